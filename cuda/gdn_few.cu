// All that a gated DeltaNet layer does between its projections, for requests with few rows each: small trees.
// Definition: gdn_core in boleinfer/gdn_core.py, which is
//   q, k, v, g, beta = gdn_inputs,  o, u = gdn,  y = gated_rms_norm
// of which it has the bits, being made of the same functions. k, u and g are kept for the commit.
//
// What is remembered (state, ring, window) and the forest are read before the previous kernel is done (after_all_previous in
// common.cuh), and what the same head of the request `Ahead` requests later remembers is then asked for into L2. Behind it:
//   q, k, v | decays      Batch rows of one of the three by a warp | by the last one, the steward
//   S^T q, S^T k | W, T   by the owners of 16 columns of V each | 16 x 16 tiles by the other warps
//   u, o                  by the owners (gdn_tiles.cuh)
//   y                     a warp a row
// A request with a single row takes the way of gdn_row.cuh and has the bits of gdn_token.cu. Rows that are not in use count
// as zeros and are not written.
//
// grid: value heads of a key head, key heads, requests; a block owns a value head. block: Warps, V / 16 of them owners, so many that Blocks fit on a
// multiprocessor. shared: sizeof(Memory); _shared in gdn_few.py repeats it.
// Read twice: a key head's inputs and ring keys, by each of its value heads (L2).
//
// sizes: Act=bf16 K=128 V=128 W=4 Rows=16 Ring=32 Warps=16 Blocks=1 Batch=4 Held=8 Asked=8
// sizes: Act=bf16 K=128 V=128 W=4 Rows=16 Ring=32 Warps=12 Blocks=2 Batch=2 Held=8 Asked=8
// sizes: Act=bf16 K=128 V=128 W=4 Rows=16 Ring=32 Warps=12 Blocks=2 Batch=2 Held=8 Asked=2
// sizes: Act=bf16 K=128 V=128 W=4 Rows=16 Ring=32 Warps=8 Blocks=3 Batch=2 Held=4 Asked=4
// sizes: Act=bf16 K=128 V=128 W=4 Rows=32 Ring=32 Warps=16 Blocks=1 Batch=4 Held=8 Asked=8
// sizes: Act=bf16 K=64 V=64 W=4 Rows=16 Ring=32 Warps=12 Blocks=2 Batch=2 Held=4 Asked=4
constexpr int Vt = V, ROWS = Rows, WIDTH = Ring + Rows + 8;
#include "gated_rms_norm.cuh"
#include "gdn_inputs.cuh"
#include "gdn_row.cuh"
#include "gdn_tiles.cuh"

constexpr int STEWARD = WARPS - 1, CARRIER = WARPS - 2;
constexpr int WEIGHERS = WARPS > OWNERS ? WARPS - OWNERS : WARPS;  // warps that make W and T
constexpr int SLICES = K / 16;                                 // of the state, 16 keys each; S has room for Held of them
constexpr bool WHOLE = Held == SLICES && Asked == SLICES;      // the state is there at once
constexpr int LANES = Share<K, NEAR>::LANES;                   // of a warp, for a head
constexpr int NORMED = (ROWS + WARPS - 1) / WARPS;             // rows of a warp
constexpr int WORDS = 3 * K / 8;                               // of 16 bytes, of a row's inputs
constexpr int MOVED = (ROWS * WORDS + THREADS - 1) / THREADS;  // of a thread

struct Memory {
  float S[Held * 16 * V];  // see `place`
  Inputs x;
  Act v[ROWS][V + 8];  // values, then o
  bf16 ring_k[KEY_PARTS][Ring][PITCH];
  union {
    struct {
      float taps[3][NEAR][LANES][W];   // of q, k, v; every NEAR-th channel's side by side
      Act inputs[W - 1 + ROWS][3][K];  // of the window, then of the rows
    };
    struct {
      Weights weights;
      Inverse T[TILES];
      Square A[TILES];
    };
    RowMemory row;
  };
  int sources[ROWS][W];             // where among `inputs` those of a row and of the ones above it begin, the oldest first
  float2 G[CHUNK + ROWS];           // from the tree's root: ring, then rows
  float2 ring_sum;                  // log decay from the checkpoint to the tree
  float beta[ROWS], g;              // g: of the first row
  unsigned ancestors[ROWS];         // and itself
  unsigned used;                    // rows that are the request's own
};

// What is remembered of a value head of a request, its first entries.
struct Head {
  const float *S, *ring_u, *ring_g;
  const Act *ring_k, *window;
  int ring;
};

// The request's rows, and pitches.
struct Tree {
  int b, first, rows, tiles;
  int ring, held;  // entries before them, and those in full sixteens
  int Hk, Hv;

  // Entries of the ring among the 16 from c on, as bits.
  __device__ __forceinline__ unsigned filled(int c) const { return ring - c < TILE ? (1u << max(0, ring - c)) - 1 : ~0u; }
};

// What the forest says of row `lane` of the tree: all rows at once, since the next one up is then a lane's to tell.
struct Node {
  int request, parent;
  unsigned ancestors;

  __device__ __forceinline__ void read(const Tree& tree, const int* requests, const int* parents, const unsigned* masks,
                                       int lane) {
    const int row = tree.first + min(lane, tree.rows - 1);
    request = requests[row], parent = parents[row], ancestors = masks[4ll * row];
  }

  // Notes which rows are the request's own, their ancestors, and which inputs each has. Returns the lane of the next row up for
  // decays, -1 where there is none.
  __device__ __forceinline__ int note(Memory& m, const Tree& tree, bool path, int lane) const {
    const bool is = lane < tree.rows && request == tree.b;
    const int up = is ? max(parent - tree.first, -1) : -1;
    int at = lane, past = W - 1;
#pragma unroll
    for (int j = W - 1; j >= 0; j--) {
      if (lane < ROWS) m.sources[lane][j] = lane < tree.rows ? (at >= 0 ? W - 1 + at : --past) * 3 * K : 0;
      const int above = __shfl_sync(ALL_LANES, up, max(at, 0));
      if (at >= 0) at = above;
    }
    if (lane < ROWS) m.ancestors[lane] = !is ? 0u : path ? 2 * (1u << lane) - 1 : ancestors;
    const unsigned all = __ballot_sync(ALL_LANES, is);
    if (lane == 0) m.used = all;
    return path ? lane - 1 : up;
  }
};

__device__ __forceinline__ void clear_unused(Memory& m, const Tree& tree, unsigned used) {
#pragma unroll 1
  for (int row = threadIdx.x / 8; row < TILE * tree.tiles; row += THREADS / 8) {
    if (used >> row & 1) continue;
    for (int c = threadIdx.x % 8 * 8; c < K; c += 64) {
      store<8>(&m.x[0][0][row][c], Pack<bf16, 8>{});
      store<8>(&m.x[1][0][row][c], Pack<bf16, 8>{});
      store<8>(&m.v[row][c], Pack<bf16, 8>{});
    }
  }
}

// q, k and v of the rows, by all warps but the steward. kept: where the first row's k goes too, or null.
__device__ __forceinline__ void convolve_rows(Memory& m, const Tree& tree, unsigned used, Act* kept, const Lane& me) {
  const int lane = me.lane % LANES, own = lane * NEAR, batches = (tree.rows + Batch - 1) / Batch;
#pragma unroll 1
  for (int unit = me.warp; unit < 3 * batches && me.warp != STEWARD; unit += WARPS - 1) {
    const int type = unit % 3, first = unit / 3 * Batch;
    const Act* inputs = &m.inputs[0][type][own];
    Pack<float, NEAR * W> taps;
#pragma unroll
    for (int n = 0; n < NEAR; n++) {
      const auto one = load<W>(m.taps[type][n][lane]);
#pragma unroll
      for (int j = 0; j < W; j++) taps.v[n * W + j] = one.v[j];
    }
    float y[Batch][1][NEAR];
#pragma unroll
    for (int i = 0; i < Batch; i++) {
      const auto sources = load<W>(m.sources[min(first + i, ROWS - 1)]);
      Pack<Act, NEAR> x[W][1];
#pragma unroll
      for (int j = 0; j < W; j++) x[j][0] = read<NEAR>(inputs + sources.v[j]);
      convolve<K, NEAR>(y[i], x, [&](int) { return taps; });
    }
    if (type < 2) {
#pragma unroll
      for (int i = 0; i < Batch; i++) give_length<K, NEAR>(y[i], type == 0 ? 1.0f / sqrtf(K) : 1.0f);
    }
#pragma unroll
    for (int i = 0; i < Batch; i++) {
      const int row = first + i;
      if (row >= ROWS || !(used >> row & 1) || me.lane >= LANES) continue;
      write_head<K, NEAR>(type < 2 ? m.x[type][0][row] : m.v[row], y[i]);
      if (type == 1 && kept) write_head<K, NEAR>(kept + row * tree.Hk * K, y[i]);
    }
  }
}

// What decays are made from: of the ring its log decays; of row `lane` who is above it, and its gate's inputs and weights.
struct Gates {
  int up;
  float ring_g[2], A, bias, a, b;

  // ba: of the first row, at the head
  __device__ __forceinline__ void read_row(const float* ba, int Hv, bool is, int lane) {
    const float* own = ba + 2 * (is ? lane : 0) * Hv;
    b = own[0], a = own[Hv];
  }

  // beta, g and sums of decays. g: of the first row, at the head
  __device__ __forceinline__ void add_up(Memory& m, const Tree& tree, float* g, bool is, int lane) const {
    const float own = is ? log_decay(a, A, bias) : 0.0f;
    if (is) g[lane * tree.Hv] = own;
    double sum = clamped(own), past[2];
#pragma unroll
    for (int e = 0; e < 2; e++) past[e] = lane + WARP * e < tree.ring ? clamped(ring_g[e]) : 0.0;
    add_up_paths(sum, lane < ROWS ? up : -1, past, lane);
    if (lane < ROWS) m.G[CHUNK + lane] = two_floats(sum), m.beta[lane] = is ? sigmoid(b) : 0.0f;
    if (lane == 0) m.g = own;
    const float2 all = ring_sums(m.G, past, lane);
    if (lane == 0) m.ring_sum = all;
  }
};

// W of the rows with themselves and the ring, T of their own. Diagonals, which take longest, come first.
__device__ __forceinline__ void weigh(Memory& m, const Tree& tree, const Lane& me) {
  const Window w = {m.x, m.G + CHUNK, m.beta, m.weights, m.A, m.T};
  const int triangle = tree.tiles * (tree.tiles + 1) / 2;
#pragma unroll 1
  for (int unit = STEWARD - me.warp; unit < triangle + tree.tiles * tree.held / TILE; unit += WEIGHERS) {
    const bool own = unit < triangle;
    const int other = unit - triangle;
    const int row = !own ? other % tree.tiles : unit < tree.tiles ? unit : 1;
    const int column = !own ? other / tree.tiles : unit < tree.tiles ? unit : 0, c = TILE * column;
    weigh_tile(
        w, TILE * row, own ? m.x[1][0][c] : m.ring_k[0][c], (own ? ROWS : Ring) * PITCH, own ? tree.held + c : c,
        m.G + (own ? CHUNK + c : c), own && row == column,
        [&](int i) { return own ? m.ancestors[i] >> c : tree.filled(c); }, me);
  }
}

// u of the ring's 16 entries from c on, at the lane's columns. ring_u: at the head
__device__ __forceinline__ void read_ring(float (&past_u)[2][4], const Tree& tree, int c, const float* ring_u,
                                          const Lane& me) {
  read_u(past_u, ring_u + c * tree.Hv * V + me.pair, tree.Hv * V, tree.filled(c), me);
}

// u and o of the rows, o in the place of v. X: what the state gives; past_u: u of the ring's first 16 entries; u: of the first
// row, at the head.
__device__ __forceinline__ void solve(Memory& m, const Tree& tree, unsigned used, Tokens& X, float (&past_u)[2][4],
                                      const float* ring_u, float* u, const Lane& me) {
#pragma unroll 1
  for (int c = 0; c < tree.held; c += TILE) {
    unsigned parts[3][4];
    operand(parts, past_u[0], past_u[1]);
    if (c + TILE < tree.held) read_ring(past_u, tree, c + TILE, ring_u, me);
    apply(X, m.weights, parts, 0, 0, tree.tiles, c, me.lane);
  }
#pragma unroll
  for (int j = 0; j < TILES; j++) {
    if (j >= tree.tiles) continue;
    float own[2][4];
    solve_tile(own, X, j, m.T[j], m.beta, m.weights, tree.tiles, tree.held + TILE * j, me);
#pragma unroll
    for (int n = 0; n < 2; n++) {
#pragma unroll
      for (int e = 0; e < 2; e++) {
        const int i = TILE * j + 8 * n + 2 * me.quad + e;
        if (!(used >> i & 1)) continue;
        store_two(u + i * tree.Hv * V + me.pair, own[n][e], own[n][2 + e]);
        store_two(m.v[i] + me.pair, X[0][j][n][e], X[0][j][n][2 + e]);
      }
    }
  }
}

// The same of a request's only row. S: the state, where there is no room for all of it.
__device__ __forceinline__ void solve_one(Memory& m, const Tree& tree, const float (&ring_g)[2], const float* S,
                                          const float* ring_u, float* u, const Lane& me) {
  const Member member;
  const Act *q = m.x[0][0][0], *k = m.x[1][0][0];
  score_ring(m.row, q, k, tree.ring, [&](int i, int p) {
    return load<PIECE>(m.ring_k[0][i] + threadIdx.x % 8 * PIECE + 8 * PIECE * p);
  });
  if (me.warp == STEWARD) Decays(ring_g, tree.ring).fades(m.row, tree.ring, clamped(m.g));
  __syncthreads();
  RowSums sum;
  sum_state(sum, member, q, k, [&](int e, int j) {
    const int i = (member.group + e) * EACH_KEYS + j;
    return load<4>(Held == SLICES ? m.S + place(i, member.column) : S + i * V + member.column);
  });
  share_sums(m.row, sum, member, tree.ring, [&](int e, int j) {
    return load<4>(ring_u + (member.group + e + GROUPS * j) * tree.Hv * V + member.column);
  });
  __syncthreads();
  if (threadIdx.x >= V / 4) return;
  float v[4], o[4];
  Pack<float, 4> factor;
#pragma unroll
  for (int c = 0; c < 4; c++) v[c] = to_float(m.v[0][member.column + c]);
  solve_row(o, factor.v, m.row, v, m.beta[0], tree.ring, member.column);
  store<4>(u + member.column, factor);
#pragma unroll
  for (int c = 0; c < 4; c++) m.v[0][member.column + c] = from_float<Act>(o[c]);
}

// y of the rows, a warp a row. y: of the first row, at the head
__device__ __forceinline__ void norm_rows(Memory& m, int rows, unsigned used, const float (&gate)[NORMED][1][NEAR], Act* y,
                                          int Hv, float eps, const Lane& me) {
#pragma unroll
  for (int i = 0; i < NORMED; i++) {
    const int row = me.warp + WARPS * i;
    if (row >= rows) continue;
    const auto rounded = read<NEAR>(m.v[row] + me.lane % LANES * NEAR);
    float o[1][NEAR];
#pragma unroll
    for (int n = 0; n < NEAR; n++) o[0][n] = to_float(rounded.v[n]);
    norm_head<NEAR>(y + row * Hv * V, o, gate[i], eps, (used >> row & 1) && me.lane < LANES);
  }
}

// Starts bringing `bytes` at p, both multiples of 16, from memory into L2.
__device__ __forceinline__ void prefetch_run(const void* p, int bytes) {
#if !defined(EMULATED) && __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(__cvta_generic_to_global(p)), "r"(bytes) : "memory");
#endif
}

// The same of all that is remembered of a head, but for the window. By one warp.
__device__ __forceinline__ void prefetch_head(const Head& head, int Hk, int Hv) {
  const int lane = threadIdx.x % WARP;
  if (lane == 0) prefetch_run(head.S, K * V * sizeof(float));
#pragma unroll 1
  for (int i = lane; i < head.ring; i += WARP) {
    prefetch_run(head.ring_u + i * Hv * V, V * sizeof(float));
    prefetch_run(head.ring_k + i * Hk * K, K * sizeof(Act));
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, Blocks) gdn_few(
    const Act* qkvz,                    // [R, 2*Hk*K+2*Hv*V] aligned 16
    const float* ba,                    // [R, 2*Hv] b, then a
    const float* __restrict__ taps,     // [2*Hk*K+Hv*V, W] aligned 16
    const float* __restrict__ A_log,    // [Hv]
    const float* __restrict__ dt_bias,  // [Hv]
    const float* __restrict__ norm,     // [V] aligned 16
    const Act* window,                  // [Slots, W-1, 2*Hk*K+Hv*V] aligned 16
    const float* S,                     // [Slots, Hv, K, V] aligned 16
    const Act* ring_k,                  // [Slots, C, Hk, K] aligned 16
    const float* ring_u,                // [Slots, C, Hv, V] aligned 16
    const float* ring_g,                // [Slots, C, Hv]
    const int* length,                  // [Slots]
    const int* slot,                    // [B]
    const int* start,                   // [B+1]
    const int* chain,                   // [B]
    const int* parent,                  // [R]
    const int* request,                 // [R]
    const unsigned* ancestors,          // [R, 4] aligned 16
    Act* y,                             // [R, Hv, V] aligned 16
    Act* k,                             // [R, Hk, K] aligned 16
    float* u,                           // [R, Hv, V] aligned 16
    float* g,                           // [R, Hv]
    int Hk,
    int Hv,
    int C,
    int B,
    int Ahead,
    float eps)
{
  extern __shared__ __align__(16) char memory[];
  Memory& m = *reinterpret_cast<Memory*>(memory);
  const int key = blockIdx.y, h = key * gridDim.x + blockIdx.x, b = blockIdx.z, later = min(b + Ahead, B - 1);
  // Of the two requests first row, end, slot and whether a chain: a lane each, so that all are asked for at once.
  const int lane = threadIdx.x % WARP, one = lane % 8 < 4 ? b : later, what = lane % 4;
  const int found = *((what < 2 ? start + what : what == 2 ? slot : chain) + one);
  const auto told = [&](int from) { return __shfl_sync(ALL_LANES, found, from); };
  const int first = told(0), rows = told(1) - first, s = max(told(2), 0), s_later = max(told(6), 0);
  const bool path = told(3), fetches = b + Ahead == later && told(5) > told(4);
  if (rows <= 0) {
    if (h + b == 0) after_previous();  // one block has to
    return;
  }
  const int channels = 2 * Hk * K + Hv * V, pitch = channels + Hv * V;
  const int lengths = length[lane % 2 ? s_later : s];
  const auto head_of = [&](long long s, int from) {
    const long long entry = s * C;
    return Head{S + (s * Hv + h) * K * V, ring_u + (entry * Hv + h) * V, ring_g + entry * Hv + h,
                ring_k + (entry * Hk + key) * K, window + s * (W - 1) * channels, __shfl_sync(ALL_LANES, lengths, from)};
  };
  const Head head = head_of(s, 0), next = head_of(s_later, 1);
  const Tree tree = {b, first, rows, (rows + TILE - 1) / TILE, head.ring, (head.ring + TILE - 1) / TILE * TILE, Hk, Hv};
  const Lane me = this_lane();
  const int own = me.lane % LANES * NEAR;  // channels of a head
  // Channels of q, k and v, eight neighbours a word.
  const auto channel_of = [&](unsigned word) {
    const int type = word / (K / 8), c = word % (K / 8) * 8;
    return (type < 2 ? (type * Hk + key) * K : 2 * Hk * K + h * V) + c;
  };

  // what is remembered
  Node node;
  Gates gates;
  if (me.warp == STEWARD) {
    node.read(tree, request, parent, ancestors, me.lane);
    read_decays(gates.ring_g, head.ring_g, head.ring, Hv);
    gates.A = A_log[h], gates.bias = dt_bias[h];
  }
#pragma unroll 1
  for (unsigned i = threadIdx.x; i < 3 * K; i += THREADS) {
    const int type = i / K, c = i % K;
    cp_async16(m.taps[type][c % NEAR][c / NEAR], taps + (channel_of(i / 8) + c % 8) * W, true);
  }
#pragma unroll 1
  for (unsigned i = threadIdx.x; i < (W - 1) * WORDS; i += THREADS) {
    cp_async16(m.inputs[i / WORDS][0] + i % WORDS * 8, head.window + i / WORDS * channels + channel_of(i % WORDS), true);
  }
  gather(m.ring_k, tree.held, ring_k, me, [&](int i) { return i < head.ring ? head.ring_k + i * Hk * K : nullptr; });
  cp_async_commit();
  const int column = TILE * me.warp + 4 * me.quad;  // of a warp's columns, as it copies them: four a lane
  const float* const from = head.S + me.row * V + column;
  float* const to = m.S + place(me.row, column);
  const auto ask = [&](int first, int end) {
    if (me.owner) {
#pragma unroll
      for (int slice = first; slice < end; slice++) {
#pragma unroll
        for (int i = 0; i < 16 * V; i += 8 * V) {
          if (slice < SLICES) cp_async16(to + slice % Held * 16 * V + i, from + slice * 16 * V + i, true);
        }
        cp_async_commit();
      }
    } else {
#pragma unroll
      for (int slice = first; slice < end; slice++) cp_async_commit();
    }
  };
  ask(0, Asked);
#pragma unroll 1
  for (unsigned line = threadIdx.x; line < head.ring * (V / 32); line += THREADS) {
    prefetch(head.ring_u + line / (V / 32) * Hv * V + line % (V / 32) * 32);
  }
  const Pack<float, NEAR> gain[1] = {load<NEAR>(norm + own)};
  if (me.warp == STEWARD) gates.up = node.note(m, tree, path, me.lane);
  __syncthreads();
  const unsigned used = m.used;
  const bool is = used >> me.lane & 1;  // row `lane`
  clear_unused(m, tree, used);
  after_previous();

  // q, k, v, decays
  const Act* inputs = qkvz + (long long)first * pitch;
  Pack<Act, 8> moved[MOVED];
#pragma unroll
  for (int i = 0; i < MOVED; i++) {
    const unsigned n = threadIdx.x + i * THREADS;
    if (n < rows * WORDS) moved[i] = load<8>(inputs + n / WORDS * pitch + channel_of(n % WORDS));
  }
  if (me.warp == STEWARD) gates.read_row(ba + 2ll * first * Hv + h, Hv, is, me.lane);
  Pack<Act, NEAR> z[NORMED][1];
#pragma unroll
  for (int i = 0; i < NORMED; i++) {
    z[i][0] = read<NEAR>(inputs + min(me.warp + WARPS * i, rows - 1) * pitch + channels + h * V + own);
  }
  if (me.warp == CARRIER && fetches) prefetch_head(next, Hk, Hv);
  constexpr int LATER = Held == SLICES ? (SLICES - Asked + 2) / 3 : 0;  // pieces
  const auto ask_later = [&](int n) { ask(Asked + n * LATER, Asked + (n + 1) * LATER); };
  ask_later(0);
#pragma unroll
  for (int i = 0; i < MOVED; i++) {
    const unsigned n = threadIdx.x + i * THREADS;
    if (n < rows * WORDS) store<8>(m.inputs[W - 1][0] + n * 8, moved[i]);
  }
  cp_async_wait<Asked + LATER>();
  __syncthreads();
  ask_later(1);
  convolve_rows(m, tree, used, blockIdx.x == 0 ? k + ((long long)first * Hk + key) * K : nullptr, me);
  ask_later(2);
  if (me.warp == STEWARD) gates.add_up(m, tree, g + (long long)first * Hv + h, is, me.lane);
  float gate[NORMED][1][NEAR];  // of y
#pragma unroll
  for (int i = 0; i < NORMED; i++) gate_of(gate[i], gain, z[i]);
  __syncthreads();

  // u, o
  const long long at = ((long long)first * Hv + h) * V;
  if (rows == 1) {
    cp_async_wait<0>();
    if (used) solve_one(m, tree, gates.ring_g, head.S, head.ring_u, u + at, me);
  } else {
    if (WEIGHERS == WARPS || !me.owner) weigh(m, tree, me);
    Tokens X = {};
    float past_u[2][4];
    if (me.owner) {
      Values v;
      read_ring(past_u, tree, 0, head.ring_u, me);
      past<Held>(X, m.S, m.x, tree.tiles, nullptr, [&](int slice) {
        if (WHOLE && slice == 0) cp_async_wait<0>();
        if (!WHOLE && slice > 0) __syncwarp(), ask(slice - 1 + Held, slice + Held);
        if (!WHOLE) cp_async_wait<Held - 1>();
        if (!WHOLE || slice == 0) __syncwarp();
      }, me);
      read_values(v, m.v[0] + me.pair, V + 8, [](int) { return true; }, me);
      fade_all(X, [&](int row) { return kept(m.G[CHUNK + row], m.ring_sum); }, me);
      subtract(X, v);
    }
    __syncthreads();
    if (me.owner) solve(m, tree, used, X, past_u, head.ring_u, u + at, me);
  }
  __syncthreads();

  norm_rows(m, rows, used, gate, y + at, Hv, eps, me);
}
