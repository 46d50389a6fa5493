// All that a gated DeltaNet layer does between its projections, for requests with few rows each: small trees.
// Definition: gdn_core in boleinfer/gdn_core.py, which is
//   q, k, v, g, beta = gdn_inputs,  o, u = gdn,  y = gated_rms_norm
// of which it has the bits, being made of the same functions. k, u and g are kept for the commit.
//
// What is remembered (state, ring, window) and the forest are read before the previous kernel is done (after_all_previous in
// common.cuh). Behind it:
//   q, k, v | decays      Batch rows of one of the three by a warp | by the last one, the steward
//   S^T q, S^T k | W, T   by the owners of 16 columns of V each | 16 x 16 tiles by the other warps
//   u, o                  by the owners (gdn_small.cuh)
//   y                     a warp a row
// A request with a single row takes the way of gdn_row.cuh and has the bits of gdn_token.cu. Rows that are not in use count
// as zeros and are not written.
//
// grid: value heads of a key head, key heads, requests; a block owns a value head. block: Warps, V / 16 of them owners, so many
// that Blocks fit on a multiprocessor. shared: sizeof(Memory); _shared in gdn_few.py repeats it.
// Read twice: a key head's inputs and ring keys, by each of its value heads (L2).
//
// spills: up to two numbers a thread with several blocks of a multiprocessor, once
// sizes: Act=bf16 K=128 V=128 W=4 Rows=16 Ring=32 Warps=16 Blocks=1 Batch=4 Held=8
// sizes: Act=bf16 K=128 V=128 W=4 Rows=16 Ring=32 Warps=12 Blocks=2 Batch=2 Held=4
// sizes: Act=bf16 K=128 V=128 W=4 Rows=16 Ring=32 Warps=8 Blocks=3 Batch=2 Held=4
// sizes: Act=bf16 K=64 V=64 W=4 Rows=16 Ring=32 Warps=8 Blocks=3 Batch=2 Held=4
constexpr int Vt = V;
#include "gdn_small.cuh"

#include "gated_rms_norm.cuh"
#include "gdn_inputs.cuh"

constexpr int LANES = Share<K, NEAR>::LANES;                   // of a warp, for a head
constexpr int NORMED = (ROWS + WARPS - 1) / WARPS;             // rows of a warp
constexpr int WORDS = 3 * K / 8;                               // of 16 bytes, of a row's inputs
constexpr int MOVED = (ROWS * WORDS + THREADS - 1) / THREADS;  // of a thread

struct Front {
  float taps[3][NEAR][LANES][W];   // of q, k, v; every NEAR-th channel's side by side
  Act inputs[W - 1 + ROWS][3][K];  // of the window, then of the rows
  int sources[ROWS][W];            // where among `inputs` those of a row and of the ones above it begin, the oldest first
};
struct Memory : Small<Front> {
  alignas(16) Act v[Rows][V + 8];  // then o
};

// Which inputs each row has, a lane a row. up: the lane of the next row up, negative where there is none.
__device__ __forceinline__ void find_inputs(Memory& m, const Tree& tree, int up, int lane) {
  int at = lane, past = W - 1;
#pragma unroll
  for (int j = W - 1; j >= 0; j--) {
    if (lane < ROWS) m.front.sources[lane][j] = lane < tree.rows ? (at >= 0 ? W - 1 + at : --past) * 3 * K : 0;
    const int above = __shfl_sync(ALL_LANES, up, max(at, 0));
    if (at >= 0) at = above;
  }
}

__device__ __forceinline__ void clear_unused(Memory& m, const Tree& tree) {
#pragma unroll 1
  for (int row = threadIdx.x / 8; row < TILE * tree.tiles; row += THREADS / 8) {
    if (tree.has(row)) continue;
    for (int c = threadIdx.x % 8 * 8; c < K; c += 64) {
      store<8>(&m.x[0][0][0][row][c], Pack<bf16, 8>{});
      store<8>(&m.x[0][1][0][row][c], Pack<bf16, 8>{});
    }
  }
}

// q, k and v of the rows, by all warps but the steward. kept: where the first row's k goes too, or null.
__device__ __forceinline__ void convolve_rows(Memory& m, const Tree& tree, Act* kept, const Lane& me) {
  const int lane = me.lane % LANES, own = lane * NEAR, batches = (tree.rows + Batch - 1) / Batch;
#pragma unroll 1
  for (int unit = me.warp; unit < 3 * batches && me.warp != STEWARD; unit += WARPS - 1) {
    const int type = unit % 3, first = unit / 3 * Batch;
    const Act* inputs = &m.front.inputs[0][type][own];
    Pack<float, NEAR * W> taps;
#pragma unroll
    for (int n = 0; n < NEAR; n++) {
      const auto one = load<W>(m.front.taps[type][n][lane]);
#pragma unroll
      for (int j = 0; j < W; j++) taps.v[n * W + j] = one.v[j];
    }
    float y[Batch][1][NEAR];
#pragma unroll
    for (int i = 0; i < Batch; i++) {
      const auto sources = load<W>(m.front.sources[min(first + i, ROWS - 1)]);
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
      if (row >= ROWS || !tree.has(row) || me.lane >= LANES) continue;
      write_head<K, NEAR>(type < 2 ? m.x[0][type][0][row] : m.v[row], y[i]);
      if (type == 1 && kept) write_head<K, NEAR>(kept + row * tree.Hk * K, y[i]);
    }
  }
}

// What a row's decay and beta are made from.
struct Gate {
  float A, bias, a, b;

  // ba: of the first row, at the head
  __device__ __forceinline__ void read_row(const float* ba, int Hv, bool is, int lane) {
    const float* own = ba + 2 * (is ? lane : 0) * Hv;
    b = own[0], a = own[Hv];
  }
  __device__ __forceinline__ float decay() const { return log_decay(a, A, bias); }
};

// y of the rows, a warp a row. y: of the first row, at the head
__device__ __forceinline__ void norm_rows(Memory& m, const Tree& tree, const float (&gate)[NORMED][1][NEAR], Act* y, float eps,
                                          const Lane& me) {
#pragma unroll
  for (int i = 0; i < NORMED; i++) {
    const int row = me.warp + WARPS * i;
    if (row >= tree.rows) continue;
    const auto rounded = read<NEAR>(m.v[row] + me.lane % LANES * NEAR);
    float o[1][NEAR];
#pragma unroll
    for (int n = 0; n < NEAR; n++) o[0][n] = to_float(rounded.v[n]);
    norm_head<NEAR>(y + row * tree.Hv * V, o, gate[i], eps, tree.has(row) && me.lane < LANES);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, Blocks) gdn_few(
    const Act* qkvz,                    // [R, 2*Hk*K+2*Hv*V] aligned 16
    const float* ba,                    // [R, 2*Hv] b, then a
    const float* __restrict__ taps,     // [2*Hk*K+Hv*V, W] aligned 16
    const float* __restrict__ A_log,    // [Hv]
    const float* __restrict__ dt_bias,  // [Hv]
    const float* __restrict__ norm,     // [V] aligned 16
    const Act* window,                  // [Slots, W, 2*Hk*K+Hv*V] aligned 16
    const float* S,                     // [Slots, Hv, K, V] aligned 16
    const Act* ring_k,                  // [Slots, C, Hk, K] aligned 16
    const float* ring_u,                // [Slots, C, Hv, V] aligned 16
    const float* ring_g,                // [Slots, C, Hv]
    const int* committed,               // [B]
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
    float eps)
{
  extern __shared__ __align__(16) char memory[];
  Memory& m = *reinterpret_cast<Memory*>(memory);
  const Found found(start, slot, chain, committed, request, C);
  const int key = found.key, h = found.h, first = found.first, rows = found.rows;
  if (rows <= 0) {
    if (h + found.b == 0) after_previous();  // one block has to
    return;
  }
  const Head head(found, S, ring_k, ring_u, ring_g, Hk, Hv, C);
  const Tree tree = found.tree(Hk, Hv);
  const Lane me = this_lane();
  const int channels = 2 * Hk * K + Hv * V, pitch = channels + Hv * V;
  const int own = me.lane % LANES * NEAR;  // channels of a head
  const bool is = tree.has(me.lane);  // row `lane`
  // Channels of q, k and v, eight neighbours a word.
  const auto channel_of = [&](unsigned word) {
    const int type = word / (K / 8), c = word % (K / 8) * 8;
    return (type < 2 ? (type * Hk + key) * K : 2 * Hk * K + h * V) + c;
  };

  // what is remembered
  Nodes nodes;
  Gate gate;
  float past_g[2];
  if (me.warp == STEWARD) {
    nodes.read(tree, parent, ancestors, me.lane);
    read_decays(past_g, head.ring_g, head.ring, Hv);
    gate.A = A_log[h], gate.bias = dt_bias[h];
  }
#pragma unroll 1
  for (unsigned i = threadIdx.x; i < 3 * K; i += THREADS) {
    const int type = i / K, c = i % K;
    cp_async16(m.front.taps[type][c % NEAR][c / NEAR], taps + (channel_of(i / 8) + c % 8) * W, true);
  }
  const Act* past = window + (long long)found.slot * W * channels;
#pragma unroll 1
  for (unsigned i = threadIdx.x; i < (W - 1) * WORDS; i += THREADS) {
    const int place = (found.committed + 1 + i / WORDS) % W;  // the oldest input's first
    cp_async16(m.front.inputs[i / WORDS][0] + i % WORDS * 8, past + place * channels + channel_of(i % WORDS), true);
  }
  copy_rows<0>(m.ring_k[0], tree.held, head.ring_k, Hk * K, tree.filled(0), me);
  cp_async_commit();
  const Slices slices(m.S, head.S, me);
  slices.ask(0, Held);
  prefetch_rows(head.ring_u, head.ring, Hv * V);
  const Pack<float, NEAR> gain[1] = {load<NEAR>(norm + own)};
  int up = -1;
  if (me.warp == STEWARD) {
    up = nodes.up(tree, 0, me.lane);
    nodes.note(m, tree, me.lane);
    find_inputs(m, tree, up, me.lane);
  }
  clear_unused(m, tree);
  after_previous();

  // q, k, v, decays
  const Act* inputs = qkvz + (long long)first * pitch;
  Pack<Act, 8> moved[MOVED];
#pragma unroll
  for (int i = 0; i < MOVED; i++) {
    const unsigned n = threadIdx.x + i * THREADS;
    if (n < rows * WORDS) moved[i] = load<8>(inputs + n / WORDS * pitch + channel_of(n % WORDS));
  }
  if (me.warp == STEWARD) gate.read_row(ba + 2ll * first * Hv + h, Hv, is, me.lane);
  Pack<Act, NEAR> z[NORMED][1];
#pragma unroll
  for (int i = 0; i < NORMED; i++) {
    z[i][0] = read<NEAR>(inputs + min(me.warp + WARPS * i, rows - 1) * pitch + channels + h * V + own);
  }
#pragma unroll
  for (int i = 0; i < MOVED; i++) {
    const unsigned n = threadIdx.x + i * THREADS;
    if (n < rows * WORDS) store<8>(m.front.inputs[W - 1][0] + n * 8, moved[i]);
  }
  cp_async_wait<Held>();
  __syncthreads();
  convolve_rows(m, tree, blockIdx.x == 0 ? k + ((long long)first * Hk + key) * K : nullptr, me);
  if (me.warp == STEWARD) {
    const float own_g = is ? gate.decay() : 0.0f;
    if (is) g[((long long)first + me.lane) * Hv + h] = own_g;
    add_up(m, tree, 0, up, past_g, own_g, is ? sigmoid(gate.b) : 0.0f, me.lane);
  }
  float gates[NORMED][1][NEAR];  // of y
#pragma unroll
  for (int i = 0; i < NORMED; i++) gate_of(gates[i], gain, z[i]);
  __syncthreads();

  // u, o
  const long long at = ((long long)first * Hv + h) * V;
  const In values = {m.v[0], V + 8};
  const Out out = {m.v[0], V + 8};  // in the place of v
  if (rows > 1) {
    solve_tree(m, tree, head, slices, values, u + at, out, me);
  } else if (tree.has(0)) {
    solve_one(m, tree, past_g, head, values, u + at, out, me);
  }
  __syncthreads();

  norm_rows(m, tree, gates, y + at, eps, me);
}
