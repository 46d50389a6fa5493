// Scores of all experts, logits[r, e] = router_e . x_r. Definition: route in boleinfer/ops/moe.py. Sums in float32, in
// an order that depends on D alone.
//
// grid: ceil(R / ROWS) x ceil(E / warps of a block), a warp owns an expert for ROWS rows. block: 64 threads; a lane owns
// every 32nd group, 16 bytes where the width and all addresses allow it, else one number. shared: none.
// Read twice: the router once for every ROWS rows, x once for every expert, from L1 and L2.
//
// sizes: Act=bf16,float
#include "common.cuh"

constexpr int ROWS = 8;
constexpr int DEPTH = 4;  // groups of the router whose loads are under way together

template <int N>
__device__ void scores(const Act* x, const Act* router, float* logits, int rows, int D, int E) {
  constexpr int STEP = WARP * N;
  const int lane = threadIdx.x % WARP;
  float sum[ROWS] = {};
  for (int i = lane * N; i < D; i += DEPTH * STEP) {
    Pack<Act, N> w[DEPTH];
#pragma unroll
    for (int d = 0; d < DEPTH; d++) {
      if (i + d * STEP < D) w[d] = load<N>(router + i + d * STEP);
    }
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
      if (r >= rows) continue;
      Pack<Act, N> group[DEPTH];
#pragma unroll
      for (int d = 0; d < DEPTH; d++) {
        if (i + d * STEP < D) group[d] = load<N>(x + (long long)r * D + i + d * STEP);
      }
#pragma unroll
      for (int d = 0; d < DEPTH; d++) {
        if (i + d * STEP >= D) continue;
#pragma unroll
        for (int j = 0; j < N; j++) sum[r] = fmaf(to_float(w[d].v[j]), to_float(group[d].v[j]), sum[r]);
      }
    }
  }
#pragma unroll
  for (int r = 0; r < ROWS; r++) {
    if (r >= rows) continue;
    const float logit = warp_sum(sum[r]);
    if (lane == 0) logits[(long long)r * E] = logit;
  }
}

extern "C" __global__ void __launch_bounds__(64) router_logits(
    const Act* __restrict__ x,       // [R, D]
    const Act* __restrict__ router,  // [E, D]
    float* __restrict__ logits,      // [R, E]
    int R,
    int D,
    int E)
{
  after_previous();
  const long long row = (long long)blockIdx.x * ROWS;
  const int e = blockIdx.y * (blockDim.x / WARP) + threadIdx.x / WARP;
  if (e >= E) return;
  const int rows = min((long long)ROWS, R - row);
  constexpr int N = PER_16_BYTES<Act>;
  if (D % N == 0 && aligned16(x, router)) {
    scores<N>(x + row * D, router + (long long)e * D, logits + row * E + e, rows, D, E);
  } else {
    scores<1>(x + row * D, router + (long long)e * D, logits + row * E + e, rows, D, E);
  }
}
