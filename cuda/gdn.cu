// Gated delta rule for every row of a forest: outputs o and factors u from a checkpoint and a ring that are only read.
// Definition: gdn and tree in boleinfer/ops/gdn.py. With G the log decay summed from the checkpoint along the root
// path, the ring a chain before every root, and `before` the ring and all strict ancestors of a row n:
//   u_n = beta_n (v_n - e^{G_n} S^T k_n - sum_{a in before} e^{G_n - G_a} (k_a . k_n) u_a)
//   o_n =               e^{G_n} S^T q_n + sum_{a in before, n} e^{G_n - G_a} (k_a . q_n) u_a
//
// Rows are taken ROWS at a time, a window. Columns are what a window's rows may depend on: the ring and, in a tree, the
// windows before it (`earlier`, Panel of them at a time, filled up to full sixteens), then its own rows. A chain of more than
// CHUNK rows instead folds each window into S, which lies in shared memory. For one window:
//   W  = decays * scores of its queries and keys with the columns, T = (I + beta W_k)^-1 of each 16 of its own rows
//   X  = e^G S^T x for its queries and keys
//   16 columns at a time, in order:  U = ring, earlier rows, or T beta (V - X_k) of own rows;  X += W U of later rows
//   o  = X_q
// Rows that are not in use count as keys of zero and are not written. A row depends on its request alone. A request
// with a single row takes another way, that of gdn_row.cuh. Forest, state and ring are read before the previous kernel is
// done (after_all_previous in common.cuh).
//
// Two teams of warps work side by side, a step apart; a step is a panel of columns of a window. In round n
//   scorers make W and T of step n (gdn_weights.cuh), 16 x 16 tiles dealt out to them, and start copying step n + 1's rows;
//     the first of them, the steward, adds up its decays and finds out what step n + 2 is (gdn_window.cuh);
//   owners, which have 16 columns of V each, finish step n - 1 (U, X, o) and begin step n (its X), and where a head ends,
//     start copying the next one's state to where they have read this one's (gdn_columns.cuh).
// One barrier ends the round. All that is read from memory is so asked for a round ahead.
//
// Parts: S two; u, where later u depend on it, three, else two; W two; T and what it is applied to three.
//
// grid: blocks that stay, one a multiprocessor, and take one work after another, Vt columns of V of one head of one request
// each. block: Warps, Vt / 16 of them owners; see gdn.cuh for who owns what. shared: sizeof(Memory) (gdn_window.cuh), or
// what one_row needs instead of W and T; _shared in gdn.py repeats it. S is read once; keys of earlier rows once a window.
//
// sizes: Act=bf16 K=128 V=128 Vt=128 Warps=12 Panel=64 | Act=bf16 K=128 V=128 Vt=64 Warps=8 Panel=64
// sizes: Act=bf16 K=128 V=128 Vt=32 Warps=8 Panel=64 | Act=bf16 K=128 V=128 Vt=32 Warps=6 Panel=16
// sizes: Act=bf16,float K=128 V=128 Vt=16 Warps=8 Panel=16
// sizes: Act=bf16,float K=64 V=64 Vt=32 Warps=8 Panel=64 | Act=bf16,float K=16 V=16 Vt=16 Warps=8 Panel=64
#include "gdn_columns.cuh"
#include "gdn_row.cuh"
#include "gdn_weights.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, THREADS > 192 ? 1 : 2) gdn(
    const Act* q,               // [R, Hk, K] aligned 16
    const Act* k,               // [R, Hk, K] aligned 16
    const Act* v,               // [R, Hv, V] aligned 16
    const float* g,             // [R, Hv]
    const float* beta,          // [R, Hv]
    const float* S,             // [Slots, Hv, K, V] aligned 16
    const Act* ring_k,          // [Slots, C, Hk, K] aligned 16
    const float* ring_u,        // [Slots, C, Hv, V] aligned 16
    const float* ring_g,        // [Slots, C, Hv]
    const int* committed,       // [B]
    const int* slot,            // [B]
    const int* start,           // [B+1]
    const int* chain,           // [B]
    const int* parent,          // [R]
    const int* request,         // [R]
    const unsigned* ancestors,  // [R, 4] aligned 16
    Act* o,                     // [R, Hv, V] aligned 16
    float* u,                   // [R, Hv, V] aligned 16
    int Hk,
    int Hv,
    int C,
    int B)
{
  extern __shared__ __align__(16) char memory[];
  Memory& m = *reinterpret_cast<Memory*>(memory);
  const auto head_of = [&](const Step& s) {
    return Head{q, k, v, g, beta, ring_k, ring_u, ring_g, u, o, (long long)s.slot * C, s.h, s.key, s.h * V + s.value,
                Hk, Hv};
  };
  // The first step of the block's head number n; columns of V come first, then heads, then requests.
  const auto head_number = [&](int n, int window) {
    const int unit = blockIdx.x + n * gridDim.x, b = min(unit / (V / Vt) / Hv, B - 1), first = start[b];
    Step s = {first, start[b + 1] - first, chain[b], 0, max(slot[b], 0), b};
    s.h = unit / (V / Vt) % Hv, s.key = s.h / (Hv / Hk) * K, s.value = unit % (V / Vt) * Vt;
    s.head = n, s.window = window, s.ring = committed[b] % C;
    if (unit >= B * Hv * (V / Vt)) s.rows = -1;
    s.set(0, 0);
    return s;
  };
  const auto state_of = [&](const Step& s) {
    return s.rows > 0 ? S + ((long long)s.slot * Hv + s.h) * K * V + s.value : nullptr;
  };
  bool waited = false;
  const auto wait_once = [&] {
    if (!waited) after_previous();
    waited = true;
  };
  // Starts copying what scorers and owners read in step number n, but the state.
  const auto fetch = [&](int n, const Lane& me) {
    const Step w = m.steps[n & 3];
    if (w.own && me.warp >= CARRIER) {
      gather_earlier(m, head_of(w), w, n, me);
      wait_once();
      if (w.column == 0) gather_window(m, head_of(w), w, me);
    }
    cp_async_commit();
  };
  // Decays of step number n; what the step behind it is, and its gates.
  int parents = -1;  // of the rows of step n, in the tree
  Gates gates = {};
  const auto look_ahead = [&](int n, const Lane& me) {
    const Step w = m.steps[n & 3];
    if (w.opens()) gather_ancestors(m, w, ancestors, me.lane), cp_async_commit();
    Step soon = w;
    if (w.own && !w.last) {
      soon.set(w.from, w.column + Panel);
    } else if (w.own && w.more) {
      soon.window++, soon.set(w.from + ROWS, 0);
    } else if (w.rows >= 0) {
      soon = head_number(w.head + 1, w.window + 1);
    }
    const int above = soon.opens() ? note(m, soon, request, parent, me.lane) : parents;
    if (me.lane == 0) m.steps[n + 1 & 3] = soon;
    Gates later = gates;
    if (soon.opens()) {
      wait_once();
      later.read(head_of(soon), soon, me.lane);
    }
    if (w.opens()) gates.add_up(m, parents, w, me.lane);
    parents = above, gates = later;
  };

  if (threadIdx.x < 3) {
    m.steps[threadIdx.x] = {};
    m.steps[threadIdx.x].head = -1;
  }
  if (this_lane().owner) {
    if (const float* first = state_of(head_number(0, 0))) fetch_state(m.S, first, this_lane());
    cp_async_commit();
  }
  __syncthreads();
  Tokens X[1];
  float u_c[2][4];
#pragma unroll 1
  for (int n = 1; m.steps[n - 1 & 3].rows >= 0; n++) {
    const Step done = m.steps[n - 1 & 3], now = m.steps[n & 3], next = m.steps[n + 1 & 3];
    const bool late = KEY_BUFFERS == 1 || done.folds();  // what the next step reads takes the place of what is in use
    const float* to_come = next.head > max(now.head, 0) ? state_of(next) : nullptr;
    const Lane me = this_lane();
    if (me.owner) {
      if (done.own) finish(X[0], u_c, m, head_of(done), done, n - 1, me);
      if (late) __syncthreads();
      if (now.own) {
        wait_once();
        begin(X, u_c, m, head_of(now), now, to_come, me);
      }
      if (to_come && !now.opens() && now.rows != 1) {
        __syncwarp();
        fetch_state(m.S, to_come, me);
      }
      cp_async_commit();
    } else {
      if (me.warp == OWNERS) look_ahead(n + 1, me);
      if (!late) fetch(n + 1, me);
      if (now.own) weigh(m, now, n, me);
      if (late) {
        __syncthreads();
        fetch(n + 1, me);
      }
      cp_async_wait<0>();
    }
    if (now.rows == 1) {
      cp_async_wait<0>();
      __syncthreads();
      const Head head = head_of(now);
      const long long key = head.key_at(now.tree), value = head.value_at(now.tree), gate = head.gate_at(now.tree);
      const Row row = {q + key, k + key, v + value, g + gate, beta + gate, m.S, ring_k + head.key_at(head.entry),
                       ring_u + head.value_at(head.entry), ring_g + head.gate_at(head.entry), now.ring,
                       request[now.tree] == now.b, o + value, u + value};
      one_row(row, reinterpret_cast<float*>(&m.W), Hk, Hv, [&] {
        if (me.owner && to_come) fetch_state(m.S, to_come, me);
        cp_async_commit();
      });
    }
    __syncthreads();
  }
  after_previous();
}
