// The experts' products for any widths and types: each expert's rows gathered, gate and up products with silu between
// them, down product. Definition: moe in boleinfer/ops/moe.py. Products and sums in float32, in an order that depends on
// the width alone. Slots, places and their order are made by moe_group.cu.
//
// grid: ceil(outputs / 4) x slots x splits, a warp owns an output number of the slot's expert, for the split's share of its
// rows, ROWS at a time. block: 128; a lane owns every 32nd number of a row, or group
// of 4. shared: none.
// Read twice: the expert's row once for every ROWS rows, x once for every output, from L1 and L2.
//
// sizes: Act=bf16 Wt=bf16,fp8 | Act=float Wt=float,bf16,fp8
#include "common.cuh"

constexpr int ROWS = 8, BLOCK = 128;  // BLOCK: numbers that share an FP8 scale, along either axis

// sum[r] = w . x_r for the rows that `row` names.
template <int N, class Row>
__device__ void dot_groups(const Wt* w, const float* scale, Row row, int rows, int K, float (&sum)[ROWS]) {
#pragma unroll
  for (int r = 0; r < ROWS; r++) sum[r] = 0.0f;
  for (int k = threadIdx.x % WARP * N; k < K; k += WARP * N) {
    const auto group = load<N>(w + k);
    const float factor = scale ? scale[k / BLOCK] : 1.0f;
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
      if (r >= rows) continue;
      const auto numbers = load<N>(row(r) + k);
#pragma unroll
      for (int j = 0; j < N; j++) sum[r] = fmaf(factor * to_float(group.v[j]), to_float(numbers.v[j]), sum[r]);
    }
  }
#pragma unroll
  for (int r = 0; r < ROWS; r++) sum[r] = warp_sum(sum[r]);
}

// The same, in groups of 4 where the width and the alignment of all rows (x: the first) allow it.
template <class Row>
__device__ void dot(const Wt* w, const Act* x, const float* scale, Row row, int rows, int K, float (&sum)[ROWS]) {
  if (K % 4 == 0 && aligned16(x) && reinterpret_cast<unsigned long long>(w) % (4 * sizeof(Wt)) == 0) {
    dot_groups<4>(w, scale, row, rows, K, sum);
  } else {
    dot_groups<1>(w, scale, row, rows, K, sum);
  }
}

__device__ __forceinline__ int blocks(int n) { return (n + BLOCK - 1) / BLOCK; }

// hidden = silu(gate x) * up x, in the order of the places
extern "C" __global__ void __launch_bounds__(128, 4) plain_gate_up(
    const Act* x,                     // [R, D]
    const Wt* __restrict__ weights,   // [E, 2*F, D] gate rows first
    const float* __restrict__ scale,  // [E, (2*F+127)/128, (D+127)/128] or null
    const int* expert_of,             // [Slots]
    const int* first,                 // [Slots+1]
    const int* order,                 // [P]
    Act* hidden,                      // [P, F]
    int A,
    int D,
    int F)
{
  after_previous();
  const int f = blockIdx.x * (blockDim.x / WARP) + threadIdx.x / WARP, last = first[blockIdx.y + 1];
  const long long e = expert_of[blockIdx.y];
  if (f >= F) return;
  const Wt* gate_row = weights + (e * 2 * F + f) * D;
  const float* scales = scale ? scale + e * blocks(2 * F) * blocks(D) : nullptr;
  for (int n = first[blockIdx.y] + blockIdx.z * ROWS; n < last; n += gridDim.z * ROWS) {
    const auto row = [&](int r) { return x + (long long)(order[n + r] / A) * D; };
    const int rows = min(ROWS, last - n);
    float gate[ROWS], up[ROWS];
    dot(gate_row, x, scale ? scales + f / BLOCK * blocks(D) : nullptr, row, rows, D, gate);
    dot(gate_row + (long long)F * D, x, scale ? scales + (F + f) / BLOCK * blocks(D) : nullptr, row, rows, D, up);
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
      if (r < rows && threadIdx.x % WARP == r) hidden[(long long)(n + r) * F + f] = from_float<Act>(silu(gate[r]) * up[r]);
    }
  }
}

// y = down hidden, to its place
extern "C" __global__ void __launch_bounds__(128, 4) plain_down(
    const Act* hidden,                // [P, F]
    const Wt* __restrict__ weights,   // [E, D, F]
    const float* __restrict__ scale,  // [E, (D+127)/128, (F+127)/128] or null
    const int* expert_of,             // [Slots]
    const int* first,                 // [Slots+1]
    const int* order,                 // [P]
    float* y,                         // [P, D]
    int D,
    int F)
{
  after_previous();
  const int d = blockIdx.x * (blockDim.x / WARP) + threadIdx.x / WARP, last = first[blockIdx.y + 1];
  const long long e = expert_of[blockIdx.y];
  if (d >= D) return;
  const float* scales = scale ? scale + (e * blocks(D) + d / BLOCK) * blocks(F) : nullptr;
  for (int n = first[blockIdx.y] + blockIdx.z * ROWS; n < last; n += gridDim.z * ROWS) {
    const auto row = [&](int r) { return hidden + (long long)(n + r) * F; };
    const int rows = min(ROWS, last - n);
    float sum[ROWS];
    dot(weights + (e * D + d) * F, hidden, scales, row, rows, F, sum);
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
      if (r < rows && threadIdx.x % WARP == r) y[(long long)order[n + r] * D + d] = sum[r];
    }
  }
}
