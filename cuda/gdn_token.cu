// All that a gated DeltaNet layer does between its projections, for requests with a single row each: plain decoding.
// Definition: gdn_core in boleinfer/gdn_core.py, which is
//   q, k, v, g, beta = gdn_inputs,  o, u = gdn,  y = gated_rms_norm
// of which it has the bits. k, u and g are kept for the commit.
//
// What is remembered (state, ring, window) is on its way, in registers, before the previous kernel is done
// (after_all_previous in common.cuh), and that of the block that comes `Ahead` blocks later on its way into L2. Behind it:
//   q, k | v, gate | g, beta    by a warp each
//   S^T q, S^T k and the ring   by all; who adds what: gdn_row.cuh
//   u, o, y                     by the warp that has v and the gate
//
// grid: a block for each value head of each request, heads first. block: Warps. shared: sizeof(Shared), below 20 KB, so
// that blocks have room beside those of the products before and behind.
// Read twice: a key head's inputs and ring keys, by each of its value heads (L2).
//
// sizes: Act=bf16,float K=128 V=128 W=4 Warps=8 | Act=bf16,float K=16 V=64 W=3 Warps=8 | Act=bf16,float K=64 V=16 W=4 Warps=4
constexpr int Vt = V;
#include "gated_rms_norm.cuh"
#include "gdn_inputs.cuh"
#include "gdn_row.cuh"

constexpr int EARLY_RING = 1, HELD_RING = 2;  // of a group's ring entries

struct Shared {
  RowMemory row;
  Act x[2][K];                // q, k
  float taps[(2 * K + V) * W];  // of q, k, v
};

// Starts copying the lane's taps of a head.
template <int WIDTH>
__device__ __forceinline__ void fetch_taps(float* to, const float* taps) {
  Share<WIDTH, NEAR>().each([&](int, int c) {
#pragma unroll
    for (int i = 0; i < NEAR * W; i += 4) cp_async16(to + c * W + i, taps + c * W + i, true);
  });
  cp_async_commit();
}

// Starts bringing `bytes` at p, both multiples of 16, from memory into L2.
__device__ __forceinline__ void prefetch_all(const void* p, int bytes) {
#if !defined(EMULATED) && __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(__cvta_generic_to_global(p)), "r"(bytes) : "memory");
#endif
}

extern "C" __global__ void __launch_bounds__(THREADS, HALF ? 2 : 1) gdn_token(
    const Act* __restrict__ qkvz,       // [R, 2*Hk*K+2*Hv*V] aligned 16
    const float* __restrict__ ba,       // [R, 2*Hv] b, then a
    const float* __restrict__ taps,     // [2*Hk*K+Hv*V, W] aligned 16
    const float* __restrict__ A_log,    // [Hv]
    const float* __restrict__ dt_bias,  // [Hv]
    const float* __restrict__ norm,     // [V] aligned 16
    const Act* __restrict__ window,     // [Slots, W-1, 2*Hk*K+Hv*V] aligned 16
    const float* __restrict__ S,        // [Slots, Hv, K, V] aligned 16
    const Act* __restrict__ ring_k,     // [Slots, C, Hk, K] aligned 16
    const float* __restrict__ ring_u,   // [Slots, C, Hv, V] aligned 16
    const float* __restrict__ ring_g,   // [Slots, C, Hv]
    const int* __restrict__ length,     // [Slots]
    const int* __restrict__ slot,       // [B]
    const int* __restrict__ start,      // [B+1] request b's row is start[b], where it has one
    Act* __restrict__ y,                // [R, Hv, V] aligned 16
    Act* __restrict__ k,                // [R, Hk, K] aligned 16
    float* __restrict__ u,              // [R, Hv, V] aligned 16
    float* __restrict__ g,              // [R, Hv]
    int Hk,
    int Hv,
    int C,
    int B,
    int Ahead,
    float eps)
{
  __shared__ Shared m;
  const int b = blockIdx.x / Hv, h = blockIdx.x % Hv, key_head = h / (Hv / Hk);
  const int row = start[b];
  if (start[b + 1] == row) {
    if (blockIdx.x == 0) after_previous();  // one block has to
    return;
  }
  const long long s = slot[b], entry = s * C;
  const int ring = length[s];
  const Member me;

  // the state, the ring
  const float* own = S + (s * Hv + h) * K * V + me.column;
  const float* own_u = ring_u + (entry * Hv + h) * V + me.column;
  const Act* own_k = ring_k + (entry * Hk + key_head) * K + threadIdx.x % 8 * PIECE;
  Pack<float, 4> state[EACH][EACH_KEYS], held_u[EACH][HELD_RING];
  Pack<Act, PIECE> early_k[PIECES];
  const auto hold = [&](int first, int last) {
#pragma unroll
    for (int e = 0; e < EACH; e++) {
#pragma unroll
      for (int j = 0; j < HELD_RING; j++) {
        const int i = me.group + e + GROUPS * j;
        if (j >= first && j < last && me.is && i < ring) held_u[e][j] = load<4>(own_u + (long long)i * Hv * V);
      }
    }
  };
#pragma unroll
  for (int e = 0; e < EACH; e++) {
#pragma unroll
    for (int j = 0; j < EACH_KEYS; j++) {
      if (me.is) state[e][j] = load_once<4>(own + ((me.group + e) * EACH_KEYS + j) * V);
    }
  }
  hold(0, EARLY_RING);
#pragma unroll
  for (int p = 0; p < PIECES; p++) {
    const int i = threadIdx.x / 8;
    if (i < ring) early_k[p] = load<PIECE>(own_k + (long long)i * Hk * K + 8 * PIECE * p);
  }
  const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;

  // the same of a block to come
  const int later = blockIdx.x + Ahead;
  if (warp == WARPS - 1 && later < gridDim.x && start[later / Hv + 1] > start[later / Hv]) {
    const long long place = slot[later / Hv], head = later % Hv;
    if (lane == 0) prefetch_all(S + (place * Hv + head) * K * V, K * V * sizeof(float));
    for (int i = lane; i < length[place]; i += WARP) {
      prefetch_all(ring_u + ((place * C + i) * Hv + head) * V, V * sizeof(float));
      if (head % (Hv / Hk) == 0) prefetch_all(ring_k + ((place * C + i) * Hk + head / (Hv / Hk)) * K, K * sizeof(Act));
    }
  }

  // q, k, v, gates
  const int channels = 2 * Hk * K + Hv * V;
  const Act* inputs = qkvz + (long long)row * (channels + Hv * V);
  const Act* past = window + s * (W - 1) * channels;
  constexpr int OF_V = Share<V, NEAR>::EACH;
  float v[OF_V][NEAR], gate[OF_V][NEAR], beta;
  if (warp < 2) {
    constexpr int OF_K = Share<K, NEAR>::EACH;
    const int head = (warp * Hk + key_head) * K;
    float *own_taps = m.taps + warp * K * W, y[OF_K][NEAR];
    Pack<Act, NEAR> x[W][OF_K];
    fetch_taps<K>(own_taps, taps + head * W);
#pragma unroll
    for (int j = 0; j < W - 1; j++) read_inputs<K, NEAR>(x[j], past + j * channels + head);
    after_previous();
    read_inputs<K, NEAR>(x[W - 1], inputs + head);
    cp_async_wait<0>();
    convolve<K, NEAR>(y, x, [&](int e) { return load<NEAR * W>(own_taps + Share<K, NEAR>().channel(e) * W); });
    give_length<K, NEAR>(y, warp == 0 ? 1.0f / sqrtf(K) : 1.0f);
    if (lane < Share<K, NEAR>::LANES) {
      write_head<K, NEAR>(m.x[warp], y);
      if (warp == 1 && h % (Hv / Hk) == 0) write_head<K, NEAR>(k + ((long long)row * Hk + key_head) * K, y);
    }
  } else if (warp == 2) {
    const int head = 2 * Hk * K + h * V;
    float* own_taps = m.taps + 2 * K * W;
    Pack<float, NEAR> gain[OF_V];
    Pack<Act, NEAR> x[W][OF_V], z[OF_V];
    fetch_taps<V>(own_taps, taps + head * W);
    Share<V, NEAR>().each([&](int e, int c) { gain[e] = load<NEAR>(norm + c); });
#pragma unroll
    for (int j = 0; j < W - 1; j++) read_inputs<V, NEAR>(x[j], past + j * channels + head);
    after_previous();
    read_inputs<V, NEAR>(x[W - 1], inputs + head);
    read_inputs<V, NEAR>(z, inputs + channels + h * V);
    beta = sigmoid(ba[2ll * row * Hv + h]);
    cp_async_wait<0>();
    convolve<V, NEAR>(v, x, [&](int e) { return load<NEAR * W>(own_taps + Share<V, NEAR>().channel(e) * W); });
    gate_of(gate, gain, z);
  } else if (warp == 3) {
    float past_g[2];
    read_decays(past_g, ring_g + entry * Hv + h, ring, Hv);
    const Decays decays(past_g, ring);
    const float A = A_log[h], bias = dt_bias[h];
    after_previous();
    const float own_g = log_decay(ba[2ll * row * Hv + Hv + h], A, bias);
    if (lane == 0) g[(long long)row * Hv + h] = own_g;
    decays.fades(m.row, ring, clamped(own_g));
  }
  __syncthreads();

  RowSums sum;
  sum_state(sum, me, m.x[0], m.x[1], [&](int e, int j) { return state[e][j]; });
  hold(EARLY_RING, HELD_RING);
  score_ring(m.row, m.x[0], m.x[1], ring, [&](int i, int p) {
    return i < SCORED ? early_k[p] : load<PIECE>(own_k + (long long)i * Hk * K + 8 * PIECE * p);
  });
  __syncthreads();
  share_sums(m.row, sum, me, ring, [&](int e, int j) {
    return j < HELD_RING ? held_u[e][j] : load<4>(own_u + (long long)(me.group + e + GROUPS * j) * Hv * V);
  });
  __syncthreads();

  if (warp == 2) {
    const Share<V, NEAR> share;
    const bool used = lane < share.LANES;
    float o[OF_V][NEAR], factor[OF_V][NEAR];
#pragma unroll
    for (int i = 0; i < NEAR; i++) v[0][i] = to_float(from_float<Act>(v[0][i]));
    solve_row(o[0], factor[0], m.row, v[0], beta, ring, share.first);
#pragma unroll
    for (int i = 0; i < NEAR; i++) o[0][i] = to_float(from_float<Act>(o[0][i]));
    const long long at = ((long long)row * Hv + h) * V;
    if (used) {
      Pack<float, NEAR> pack;
#pragma unroll
      for (int i = 0; i < NEAR; i++) pack.v[i] = factor[0][i];
      store<NEAR>(u + at + share.first, pack);
    }
    norm_head<NEAR>(y + at, o, gate, eps, used);
  }
}
