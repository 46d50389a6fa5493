// Gated delta rule for every row of a forest: outputs o and factors u from a checkpoint and a ring that are only read.
// Definition: gdn and tree in boleinfer/ops/gdn.py. With G the log decay summed from the checkpoint along the root
// path, the ring a chain before every root, and `before` the ring and all strict ancestors of a row n:
//   u_n = beta_n (v_n - e^{G_n} S^T k_n - sum_{a in before} e^{G_n - G_a} (k_a . k_n) u_a)
//   o_n =               e^{G_n} S^T q_n + sum_{a in before, n} e^{G_n - G_a} (k_a . q_n) u_a
//
// Rows are taken ROWS at a time, a window. Columns are what a window's rows may depend on: the ring and, in a tree, the
// windows before it (`earlier`, Panel of them at a time, filled up to full sixteens), then its own rows. A chain instead
// folds each window into S, which lies in shared memory. For one window:
//   W  = decays * scores of its queries and keys with the columns, T = (I + beta W_k)^-1 of each 16 of its own rows
//   X  = e^G S^T x for its queries and keys
//   16 columns at a time, in order:  U = ring, earlier rows, or T beta (V - X_k) of own rows;  X += W U of later rows
//   o  = X_q
// W and T (gdn_weights.cuh) are shared, 16 x 16 tiles dealt out to the warps; all else is each warp's own, on its 16 columns of V.
// Rows that are not in use count as keys of zero and are not written. A row depends on its request alone. A request
// with a single row takes another way, that of gdn_row.cuh. Forest, state and ring are read before the previous kernel is
// done (after_all_previous in common.cuh).
//
// Parts: S two; u, where later u depend on it, three, else two; W two; T and what it is applied to three.
//
// grid: blocks that stay and take one work after another, Vt columns of V of one head of one request each. While one is
// solved, the state and the rows of the next are under way. block: Warps, at least Vt / 16; see gdn.cuh for who owns what.
// shared: sizeof(Memory) (gdn_window.cuh), which _shared in gdn.py repeats. S is read once; keys of earlier rows once a window.
//
// sizes: Act=bf16 K=128 V=128 Vt=32 Warps=4 Panel=64 | Act=bf16 K=128 V=128 Vt=128 Warps=8 Panel=16
// sizes: Act=bf16,float K=16 V=16 Vt=16 Warps=4 Panel=16 | Act=bf16,float K=64 V=64 Vt=32 Warps=4 Panel=16
// sizes: Act=float K=128 V=128 Vt=32 Warps=4 Panel=16
// spills: Vt=128 has 128 registers a thread; numbers of the work to come wait outside, once a work
#include "gdn_row.cuh"
#include "gdn_weights.cuh"

// ---- the warp's own columns -----------------------------------------------------------------------------------------

// [queries or keys][16 rows][8 of them]: columns of V by rows, as mma leaves them.
using Tokens = float[2][TILES][2][4];

// X = e^G S^T x
__device__ __forceinline__ void past(Tokens& X, const Memory& m, const Window& w, const Lane& me) {
  const int tiles = w.tiles();
#pragma unroll 1
  for (int s = 0; s < K / 16; s++) {
    Keys8 state[2];
    unsigned a[PARTS][4];
#pragma unroll
    for (int n = 0; n < 2; n++) read_keys(state[n], m.S, 2 * s + n, me);
    operand(a, state[0], state[1]);
#pragma unroll
    for (int i = 0; i < TILES; i++) {
      if (i < tiles) {
        unsigned b[2][KEY_PARTS][2][2];
#pragma unroll
        for (int type = 0; type < 2; type++) {
#pragma unroll
          for (int p = 0; p < KEY_PARTS; p++) load_b(b[type][p], &m.x[w.buffer][type][p][TILE * i][16 * s], PITCH, me.lane);
        }
        for_parts<PARTS, KEY_PARTS>([&](int p, int r) {
#pragma unroll
          for (int type = 0; type < 2; type++) {
#pragma unroll
            for (int n = 0; n < 2; n++) mma_m16n8k16(X[type][i][n], a[p], b[type][r][n]);
          }
        });
      }
    }
  }
#pragma unroll
  for (int i = 0; i < TILES; i++) {
#pragma unroll
    for (int n = 0; n < 2; n++) {
#pragma unroll
      for (int e = 0; e < 2; e++) {
        const float left = i < tiles ? kept(m, w, TILE * i + 8 * n + 2 * me.quad + e) : 0.0f;
#pragma unroll
        for (int type = 0; type < 2; type++) X[type][i][n][e] *= left, X[type][i][n][2 + e] *= left;
      }
    }
  }
}

// X += W U for 16 columns of W from `at` on, in the keys from tile `keys` on and the queries from tile `queries` on.
__device__ __forceinline__ void apply(Tokens& X, const Memory& m, const unsigned (&u)[3][4], int keys, int queries,
                                      int tiles, int at, int lane) {
#pragma unroll
  for (int i = 0; i < TILES; i++) {
    if (i >= queries && i < tiles) {
      unsigned b[2][PARTS][2][2];
#pragma unroll
      for (int type = 0; type < 2; type++) {
#pragma unroll
        for (int p = 0; p < PARTS; p++) load_b(b[type][p], &m.W[type][p][TILE * i][at], WIDTH, lane);
      }
      for_parts<3, PARTS>([&](int p, int r) {
#pragma unroll
        for (int type = 1; type >= 0; type--) {
          if (type ? i >= keys : p + r < PARTS) {
#pragma unroll
            for (int n = 0; n < 2; n++) mma_m16n8k16(X[type][i][n], u[p], b[type][r][n]);
          }
        }
      });
    }
  }
}

// S += the share of 16 tokens in the state behind the window; where they come first, S fades to there. u is used up.
template <int MOST>
__device__ __forceinline__ void fold(Memory& m, const Window& w, bool begins, float (&u)[2][4],
                                     const bf16 (*keys)[MOST][PITCH], int first, const float2* G, const Lane& me) {
  const float2 last = m.G[w.at + w.rows - 1];
  const float scale = begins ? kept(m, w, w.rows - 1) : 1.0f;
#pragma unroll
  for (int n = 0; n < 2; n++) {
#pragma unroll
    for (int e = 0; e < 2; e++) {
      const float left = fade(last, G[8 * n + 2 * me.quad + e]);
      u[n][e] *= left, u[n][2 + e] *= left;
    }
  }
  unsigned parts[3][4];
  operand(parts, u[0], u[1]);
#pragma unroll 1
  for (int j = 0; j < K / 16; j++) {
    Keys8 s[2];
#pragma unroll
    for (int n = 0; n < 2; n++) {
      read_keys(s[n], m.S, 2 * j + n, me);
#pragma unroll
      for (int e = 0; e < 4; e++) s[n][e] *= scale;
    }
    absorb(s, parts, keys, first, j, me.lane);
#pragma unroll
    for (int n = 0; n < 2; n++) write_keys(m.S, s[n], 2 * j + n, me);
  }
}

// u of 16 earlier columns, c on: [n][2c + e] is that of token 8n + 2 quad + e; zeros where there is none. What is
// read of rows of the tree this lane has written.
__device__ __forceinline__ void read_u(float (&u)[2][4], const Memory& m, const Head& head, const Window& w, int c,
                                       const Lane& me) {
  const int a = c - w.held();
  const unsigned used = a >= 0 ? m.used[a / 32] >> a % 32 : w.ring - c < TILE ? (1u << max(0, w.ring - c)) - 1 : ~0u;
  const float* from = a < 0 ? head.ring_u + head.value_at(head.entry + c) : head.u + head.value_at(w.first - w.from + a);
#pragma unroll
  for (int n = 0; n < 2; n++) {
#pragma unroll
    for (int e = 0; e < 2; e++) {
      const int i = 8 * n + 2 * me.quad + e;
      const float2 two = used >> i & 1 ? load_two(from + i * head.Hv * V + me.pair) : float2{0.0f, 0.0f};
      u[n][e] = two.x, u[n][2 + e] = two.y;
    }
  }
}

// The values of the lane's columns and tokens.
using Values = Two<Act>[TILES][2][2];

__device__ __forceinline__ void read_values(Values& v, const Head& head, const Window& w, const Lane& me) {
#pragma unroll
  for (int i = 0; i < TILES; i++) {
#pragma unroll
    for (int n = 0; n < 2; n++) {
#pragma unroll
      for (int e = 0; e < 2; e++) {
        const int row = TILE * i + 8 * n + 2 * me.quad + e;
        v[i][n][e] = {};
        if (w.used >> row & 1) {
          const Act* from = head.v + head.value_at(w.first) + row * head.Hv * V + me.pair;
          v[i][n][e] = *reinterpret_cast<const Two<Act>*>(from);
        }
      }
    }
  }
}

// X_k -= V
__device__ __forceinline__ void subtract(Tokens& X, const Values& v) {
#pragma unroll
  for (int i = 0; i < TILES; i++) {
#pragma unroll
    for (int n = 0; n < 2; n++) {
#pragma unroll
      for (int e = 0; e < 2; e++) {
        X[1][i][n][e] -= to_float(v[i][n][e].x);
        X[1][i][n][2 + e] -= to_float(v[i][n][e].y);
      }
    }
  }
}

// u and o of the window's own rows, 16 at a time: U = -T beta (X_k - V), then X += W U of these rows and those below.
__device__ __forceinline__ void solve(Tokens& X, Memory& m, const Head& head, const Window& w, int at,
                                      const Lane& me) {
#pragma unroll
  for (int j = 0; j < TILES; j++) {
    if (j < w.tiles()) {
      float y[2][4], u[2][4] = {}, small[2][4] = {};
#pragma unroll
      for (int n = 0; n < 2; n++) {
#pragma unroll
        for (int e = 0; e < 2; e++) {
          const float beta = m.beta[TILE * j + 8 * n + 2 * me.quad + e];
          y[n][e] = -beta * X[1][j][n][e];
          y[n][2 + e] = -beta * X[1][j][n][2 + e];
        }
      }
      unsigned parts[3][4], T[3][2][2];
      operand(parts, y[0], y[1]);
#pragma unroll
      for (int p = 0; p < 3; p++) load_b(T[p], &m.T[j][p][0][0], TILE + 8, me.lane);
      for_parts<3, 3>([&](int p, int r) {
#pragma unroll
        for (int n = 0; n < 2; n++) mma_m16n8k16(p + r < 2 ? u[n] : small[n], parts[p], T[r][n]);
      });
#pragma unroll
      for (int n = 0; n < 2; n++) {
#pragma unroll
        for (int e = 0; e < 4; e++) u[n][e] += small[n][e];
      }
      operand(parts, u[0], u[1]);
      apply(X, m, parts, j + 1, j, w.tiles(), at + TILE * j, me.lane);
#pragma unroll
      for (int n = 0; n < 2; n++) {
#pragma unroll
        for (int e = 0; e < 2; e++) {
          const int i = TILE * j + 8 * n + 2 * me.quad + e;
          if (w.used >> i & 1) {
            const long long to = head.value_at(w.first) + i * head.Hv * V + me.pair;
            store_two(head.u + to, u[n][e], u[n][2 + e]);
            store_two(head.o + to, X[0][j][n][e], X[0][j][n][2 + e]);
          }
        }
      }
      if (w.folds()) fold(m, w, j + w.earlier == 0, u, m.x[w.buffer][1], TILE * j, m.G + w.at + TILE * j, me);
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 2) gdn(
    const Act* __restrict__ q,               // [R, Hk, K] aligned 16
    const Act* __restrict__ k,               // [R, Hk, K] aligned 16
    const Act* __restrict__ v,               // [R, Hv, V] aligned 16
    const float* __restrict__ g,             // [R, Hv]
    const float* __restrict__ beta,          // [R, Hv]
    const float* __restrict__ S,             // [Slots, Hv, K, V] aligned 16
    const Act* __restrict__ ring_k,          // [Slots, C, Hk, K] aligned 16
    const float* __restrict__ ring_u,        // [Slots, C, Hv, V] aligned 16
    const float* __restrict__ ring_g,        // [Slots, C, Hv]
    const int* __restrict__ length,          // [Slots]
    const int* __restrict__ slot,            // [B]
    const int* __restrict__ start,           // [B+1]
    const int* __restrict__ chain,           // [B]
    const int* __restrict__ parent,          // [R]
    const int* __restrict__ request,         // [R]
    const unsigned* __restrict__ ancestors,  // [R, 4] aligned 16
    Act* __restrict__ o,                     // [R, Hv, V] aligned 16
    float* u,                                // [R, Hv, V] aligned 16
    int Hk,
    int Hv,
    int C,
    int B)
{
  extern __shared__ __align__(16) char memory[];
  Memory& m = *reinterpret_cast<Memory*>(memory);
  const int units = B * Hv * (V / Vt);
  const auto read_work = [&](int unit) {  // columns of V first, then heads, then requests
    if (unit >= units) return Work{};
    const int b = unit / (V / Vt) / Hv, s = max(slot[b], 0);
    return Work{start[b], start[b + 1] - start[b], chain[b], length[s], s, b, unit / (V / Vt) % Hv, unit % (V / Vt) * Vt};
  };
  const auto fetch_state_of = [&](const Work& work) {
    if (work.rows <= 0) return;
    fetch_state(m.S, S + ((long long)work.slot * Hv + work.h) * K * V + work.column, this_lane());
  };
  const auto head_of = [&](const Work& work) {
    return Head{q, k, v, g, beta, ring_k, ring_u, ring_g, u, o, (long long)work.slot * C, work.h, work.h / (Hv / Hk) * K,
                work.h * V + work.column, Hk, Hv};
  };
  const auto row_of = [&](const Window& w, int lane) { return w.first + min(lane, w.rows - 1); };
  Lead lead;
  // Starts copying what a window reads, all but the state.
  const auto fetch = [&](Window& w, const Head& head) {
    const Lane me = this_lane();
    w.used = m.noted;
    gather_earlier(m, head, w, 0, min(Panel, w.earlier));
    after_previous();
    if (me.warp == 0) gather_ancestors(m, w, ancestors, me.lane), lead.read(head, w, me.lane);
    gather_window(m, head, w);
    cp_async_commit();
  };

  Work work = read_work(blockIdx.x), next;
  fetch_state_of(work);
  bool fetched = false;
  int buffer = 0;
  for (int unit = blockIdx.x; unit < units; unit += gridDim.x, work = next) {
    next = read_work(unit + gridDim.x);
    if (work.rows <= 0) {
      after_previous();
      fetch_state_of(next);
      continue;
    }
    const Head head = head_of(work);
    if (work.rows == 1) {
      const long long key = head.key_at(work.tree), value = head.value_at(work.tree), gate = head.gate_at(work.tree);
      const Row row = {q + key, k + key, v + value, g + gate, beta + gate, m.S, ring_k + head.key_at(head.entry),
                       ring_u + head.value_at(head.entry), ring_g + head.gate_at(head.entry), work.ring,
                       request[work.tree] == work.b, o + value, u + value};
      one_row(row, reinterpret_cast<float*>(&m.x), Hk, Hv, [&] { fetch_state_of(next); });
      __syncthreads();
      continue;
    }
    for (int from = 0; from < work.rows; from += ROWS) {
      Window w(work, from, buffer);
      Lane me = this_lane();
      if (!fetched) {
        if (me.warp == 0) note(m, w, work.b, request[row_of(w, me.lane)], parent[row_of(w, me.lane)], me.lane);
        __syncthreads();
        fetch(w, head);
      }
      w.used = m.noted;
      if (me.warp == 0) {
        if (me.lane == 0) {
          unsigned& word = m.used[from / 32 % (TREE / 32)];
          word = from % 32 ? word | w.used << from % 32 : w.used;
        }
        sum_window(m, lead, w, me.lane);
      }
      if (me.warp == 1 && !from) sum_ring(m, head, w.ring, me.lane);
      cp_async_wait<0>();
      __syncthreads();

      fetched = (BUFFERS > 1 || !w.folds()) && (w.more || next.rows > 1);  // soon
      buffer = (buffer + 1) % BUFFERS;
      Work work_to_come = next;
      if (w.more) work_to_come = work;
      Window to_come(work_to_come, w.more ? from + ROWS : 0, buffer);
      int asked[2];
      if (fetched && me.warp == 0) {
        asked[0] = request[row_of(to_come, me.lane)], asked[1] = parent[row_of(to_come, me.lane)];
      }
      weigh(m, w, 0, min(Panel, w.earlier), w.earlier <= Panel);
      me = this_lane();
      Tokens X = {};
      float u_c[2][4];
      if (me.owner) {
        Values values;
        read_values(values, head, w, me);
        past(X, m, w, me);
        subtract(X, values);
        if (w.earlier) read_u(u_c, m, head, w, 0, me);
      }
      if (fetched && me.warp == 0) note(m, to_come, work_to_come.b, asked[0], asked[1], me.lane);
      for (int c0 = 0;; c0 += Panel) {
        const int count = min(Panel, w.earlier - c0);
        const bool last = c0 + Panel >= w.earlier;
        __syncthreads();
        if (last) {  // what the window to come needs may be overwritten
          if (!w.more) fetch_state_of(next);
          if (fetched) fetch(to_come, head_of(work_to_come));
        }
        me = this_lane();
        if (me.owner) {
          for (int c = 0; c < count; c += TILE) {
            unsigned parts[3][4];
            operand(parts, u_c[0], u_c[1]);
            apply(X, m, parts, 0, 0, w.tiles(), c, me.lane);
            if (w.folds()) fold(m, w, c0 + c == 0, u_c, m.earlier, c, m.G + c0 + c, me);
            if (c0 + c + TILE < w.earlier) read_u(u_c, m, head, w, c0 + c + TILE, me);
          }
          if (last) solve(X, m, head, w, count, me);
        }
        __syncthreads();  // the memory is free again, but for what was asked for
        if (last) break;
        const int more = min(Panel, w.earlier - c0 - Panel);
        gather_earlier(m, head, w, c0 + Panel, more);
        cp_async_commit();
        cp_async_wait<0>();
        __syncthreads();
        weigh(m, w, c0 + Panel, more, c0 + 2 * Panel >= w.earlier);
      }
    }
  }
}
