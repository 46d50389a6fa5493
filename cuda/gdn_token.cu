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
// spills: one register with bf16 on sm_80 to 89, so that two blocks fit beside each other
// sizes: Act=bf16,float K=128 V=128 W=4 Warps=8 | Act=bf16,float K=16 V=64 W=3 Warps=8 | Act=bf16,float K=64 V=16 W=4 Warps=4
constexpr int Vt = V;
#include "gated_rms_norm.cuh"
#include "gdn_inputs.cuh"
#include "gdn_row.cuh"

constexpr int HELD_RING = 2;  // of a group's ring entries those in registers: of 32, all

struct Shared {
  RowMemory row;
  Act x[2][K];                  // q, k
  float taps[(2 * K + V) * W];  // of q, k, v
};

// A value head of a request, its first entries of what is remembered.
struct Head {
  const float *S, *ring_u, *ring_g;
  const Act *ring_k, *window;
  int ring, Hk, Hv;  // filled entries; pitches
};

// A thread's part of what is remembered, in registers.
struct Held {
  Pack<float, 4> state[EACH][EACH_KEYS], u[EACH][HELD_RING];
  Pack<Act, PIECE> key[PIECES];  // of the entry that the thread takes first

  __device__ __forceinline__ void read_state(const Head& head, const Member& me) {
#pragma unroll
    for (int e = 0; e < EACH; e++) {
#pragma unroll
      for (int j = 0; j < EACH_KEYS; j++) {
        if (me.is) state[e][j] = load_once<4>(head.S + ((me.group + e) * EACH_KEYS + j) * V + me.column);
      }
    }
  }
  // The j-th entries of the thread's groups.
  __device__ __forceinline__ void read_u(const Head& head, const Member& me, int j) {
#pragma unroll
    for (int e = 0; e < EACH; e++) {
      if (me.is && me.group + e + GROUPS * j < head.ring) u[e][j] = u_of(head, me, e, j);
    }
  }
  __device__ __forceinline__ void read_key(const Head& head) {
#pragma unroll
    for (int p = 0; p < PIECES; p++) {
      if (threadIdx.x / 8 < head.ring) key[p] = key_of(head, threadIdx.x / 8, p);
    }
  }
  static __device__ __forceinline__ Pack<float, 4> u_of(const Head& head, const Member& me, int e, int j) {
    return load<4>(head.ring_u + (long long)(me.group + e + GROUPS * j) * head.Hv * V + me.column);
  }
  static __device__ __forceinline__ Pack<Act, PIECE> key_of(const Head& head, int i, int p) {
    return load<PIECE>(head.ring_k + (long long)i * head.Hk * K + threadIdx.x % 8 * PIECE + 8 * PIECE * p);
  }
};

// Starts bringing `bytes` at p, both multiples of 16, from memory into L2.
__device__ __forceinline__ void prefetch_run(const void* p, int bytes) {
#if !defined(EMULATED) && __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(__cvta_generic_to_global(p)), "r"(bytes) : "memory");
#endif
}

// The same of all that is remembered of a head, but for the window. By one warp.
__device__ __forceinline__ void prefetch_head(const Head& head) {
  const int lane = threadIdx.x % WARP;
  if (lane == 0) prefetch_run(head.S, K * V * sizeof(float));
  for (int i = lane; i < head.ring; i += WARP) {
    prefetch_run(head.ring_u + (long long)i * head.Hv * V, V * sizeof(float));
    prefetch_run(head.ring_k + (long long)i * head.Hk * K, K * sizeof(Act));
  }
}

// y = silu(conv) of a head of WIDTH channels, by one warp. Taps and window are on their way before the previous kernel is
// done; `row` and `window` begin with the head, `pitch` is that of the window's entries, `more` is read with the row.
template <int WIDTH, class More>
__device__ __forceinline__ void convolve_row(float (&y)[Share<WIDTH, NEAR>::EACH][NEAR], float* own_taps, const float* taps,
                                             const Act* window, int pitch, const Act* row, More more) {
  Pack<Act, NEAR> x[W][Share<WIDTH, NEAR>::EACH];
  Share<WIDTH, NEAR>().each([&](int, int c) {
    if (threadIdx.x % WARP >= Share<WIDTH, NEAR>::LANES) return;  // has the channels of another lane
#pragma unroll
    for (int i = 0; i < NEAR * W; i += 4) cp_async16(own_taps + c * W + i, taps + c * W + i, true);
  });
  cp_async_commit();
#pragma unroll
  for (int j = 0; j < W - 1; j++) read_inputs<WIDTH, NEAR>(x[j], window + j * pitch);
  after_previous();
  read_inputs<WIDTH, NEAR>(x[W - 1], row);
  more();
  cp_async_wait<0>();
  __syncwarp();
  convolve<WIDTH, NEAR>(y, x, [&](int e) { return load<NEAR * W>(own_taps + Share<WIDTH, NEAR>().channel(e) * W); });
}

extern "C" __global__ void __launch_bounds__(THREADS, HALF ? 2 : 1) gdn_token(
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
    const int* start,                   // [B+1] request b's row is start[b], where it has one
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
  __shared__ Shared m;
  const int ratio = Hv / Hk, channels = 2 * Hk * K + Hv * V, warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
  const auto head_of = [&](int block) {
    const int b = block / Hv, h = block % Hv;
    const long long s = slot[b], entry = s * C;
    return Head{S + (s * Hv + h) * K * V, ring_u + (entry * Hv + h) * V, ring_g + entry * Hv + h,
                ring_k + (entry * Hk + h / ratio) * K, window + s * (W - 1) * channels, length[s], Hk, Hv};
  };
  const auto in_use = [&](int block) { return start[block / Hv + 1] > start[block / Hv]; };
  if (!in_use(blockIdx.x)) {
    if (blockIdx.x == 0) after_previous();  // one block has to
    return;
  }
  const int row = start[blockIdx.x / Hv], h = blockIdx.x % Hv, key_head = h / ratio, later = blockIdx.x + Ahead;
  const Head head = head_of(blockIdx.x);
  const Member me;
  Held held;
  held.read_state(head, me);
  held.read_u(head, me, 0);
  held.read_key(head);
  if (warp == WARPS - 1 && later < gridDim.x && in_use(later)) prefetch_head(head_of(later));

  // q, k, v, gates
  const Act* inputs = qkvz + (long long)row * (channels + Hv * V);
  const float* gates = ba + 2ll * row * Hv + h;
  constexpr int OF_V = Share<V, NEAR>::EACH;
  float v[OF_V][NEAR], gate[OF_V][NEAR], beta;
  if (warp < 2) {
    const int first = (warp * Hk + key_head) * K;
    float x[Share<K, NEAR>::EACH][NEAR];
    convolve_row<K>(x, m.taps + warp * K * W, taps + first * W, head.window + first, channels, inputs + first, [] {});
    give_length<K, NEAR>(x, warp == 0 ? 1.0f / sqrtf(K) : 1.0f);
    if (lane < Share<K, NEAR>::LANES) {
      write_head<K, NEAR>(m.x[warp], x);
      if (warp == 1 && h % ratio == 0) write_head<K, NEAR>(k + ((long long)row * Hk + key_head) * K, x);
    }
  } else if (warp == 2) {
    const int first = 2 * Hk * K + h * V;
    Pack<float, NEAR> gain[OF_V];
    Pack<Act, NEAR> z[OF_V];
    Share<V, NEAR>().each([&](int e, int c) { gain[e] = load<NEAR>(norm + c); });
    convolve_row<V>(v, m.taps + 2 * K * W, taps + first * W, head.window + first, channels, inputs + first, [&] {
      read_inputs<V, NEAR>(z, inputs + channels + h * V);
      beta = sigmoid(gates[0]);
    });
    gate_of(gate, gain, z);
  } else if (warp == 3) {
    float past_g[2];
    read_decays(past_g, head.ring_g, head.ring, Hv);
    const Decays decays(past_g, head.ring);
    const float A = A_log[h], bias = dt_bias[h];
    after_previous();
    const float own_g = log_decay(gates[Hv], A, bias);
    if (lane == 0) g[(long long)row * Hv + h] = own_g;
    decays.fades(m.row, head.ring, clamped(own_g));
  } else {
    after_previous();
  }
  __syncthreads();

  // u, o
  RowSums sum;
  sum_state(sum, me, m.x[0], m.x[1], [&](int e, int j) { return held.state[e][j]; });
  held.read_u(head, me, 1);  // where the state was
  score_ring(m.row, m.x[0], m.x[1], head.ring, [&](int i, int p) {
    return i < SCORED ? held.key[p] : held.key_of(head, i, p);
  });
  __syncthreads();
  share_sums(m.row, sum, me, head.ring, [&](int e, int j) {
    return j < HELD_RING ? held.u[e][j] : held.u_of(head, me, e, j);
  });
  __syncthreads();
  if (warp != 2) return;
  const Share<V, NEAR> own;
  const long long at = ((long long)row * Hv + h) * V;
  const bool used = lane < own.LANES;
  Pack<float, NEAR> factor;
  float o[OF_V][NEAR];
#pragma unroll
  for (int i = 0; i < NEAR; i++) v[0][i] = to_float(from_float<Act>(v[0][i]));
  solve_row(o[0], factor.v, m.row, v[0], beta, head.ring, own.first);
  if (used) store<NEAR>(u + at + own.first, factor);

  // y
#pragma unroll
  for (int i = 0; i < NEAR; i++) o[0][i] = to_float(from_float<Act>(o[0][i]));
  norm_head<NEAR>(y + at, o, gate, eps, used);
}
