// Scores of all experts, logits[r, e] = router_e . x_r, and of the shared one. Definition: route in boleinfer/ops/moe.py.
// Sums in float32, in an order that depends on D alone.
//
// grid: ceil((E + 1) / 2) x ceil(R / 8); a block owns two experts, of which number E is the shared one, for 8 rows. block:
// 256; a thread owns every 256th group of k, 16 bytes where the width and all addresses allow it, else one number. Its first
// groups of the router are under way before x is there. shared: 512 bytes.
// Read twice: the router once for every 8 rows, x once for every two experts, from L2.
//
// sizes: Act=bf16,float
#include "common.cuh"

constexpr int THREADS = 256, WARPS = THREADS / WARP;
constexpr int ROWS = 8, EXPERTS = 2, SUMS = ROWS * EXPERTS;

// This thread's sums; waits for x.
template <int N>
__device__ __forceinline__ void products(
    const Act* x, const Act* const (&router)[EXPERTS], int rows, int D, float (&sum)[SUMS]) {
  const auto load_router = [&](Pack<Act, N> (&w)[EXPERTS], int k) {
    if (k >= D) return;
#pragma unroll
    for (int e = 0; e < EXPERTS; e++) w[e] = load<N>(router[e] + k);
  };
  Pack<Act, N> w[EXPERTS];
  load_router(w, threadIdx.x * N);
  after_previous();
  for (int k = threadIdx.x * N; k < D; k += THREADS * N) {
    Pack<Act, N> group[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; r++) group[r] = load<N>(x + (long long)min(r, rows - 1) * D + k);
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
#pragma unroll
      for (int e = 0; e < EXPERTS; e++) {
        float& total = sum[r * EXPERTS + e];
#pragma unroll
        for (int j = 0; j < N; j++) total = fmaf(to_float(w[e].v[j]), to_float(group[r].v[j]), total);
      }
    }
    load_router(w, k + THREADS * N);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS) router_logits(
    const Act* x,                         // [R, D]
    const Act* __restrict__ router,       // [E, D]
    const Act* __restrict__ shared_gate,  // [1, D] or null; the shared expert's
    float* logits,                        // [R, E]
    float* gate,                          // [R] or null; the shared expert's score
    int R,
    int D,
    int E)
{
  __shared__ float part[WARPS][SUMS];
  const int first = blockIdx.x * EXPERTS, lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
  const long long row = (long long)blockIdx.y * ROWS;
  const int rows = min((long long)ROWS, R - row);
  const Act* own[EXPERTS];
#pragma unroll
  for (int e = 0; e < EXPERTS; e++) {
    own[e] = first + e < E ? router + (long long)(first + e) * D : shared_gate ? shared_gate : router;
  }
  float sum[SUMS] = {};  // products calls after_previous()
  constexpr int N = PER_16_BYTES<Act>;
  if (D % N == 0 && aligned16(x, own[0], own[1])) {
    products<N>(x + row * D, own, rows, D, sum);
  } else {
    products<1>(x + row * D, own, rows, D, sum);
  }
  const float total = transposed_sum(sum);
  if (lane % 2 == 0) part[warp][lane / 2] = total;
  __syncthreads();
  const int r = threadIdx.x / EXPERTS, e = first + threadIdx.x % EXPERTS;
  if (r >= rows) return;
  float score = 0.0f;
#pragma unroll
  for (int w = 0; w < WARPS; w++) score += part[w][threadIdx.x];
  if (e < E) logits[(row + r) * E + e] = score;
  if (e == E && gate) gate[row + r] = score;
}
