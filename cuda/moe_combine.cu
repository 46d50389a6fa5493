// Sums over experts: out[r] = sum over the experts of row r, by rising index, of weight * y, and then sigmoid(gate) times
// what the shared expert gives; or this added to a sum that is rounded already. Definitions: moe and add_shared in
// boleinfer/ops/moe.py. Sums in float32.
//
// grid: R x ceil(D / 8 threads of a block), a thread owns 8 neighbours of a row where the width and all addresses allow
// it, else every blockDim.x-th number of the block's. block: 32 .. 256 threads. shared: 256 bytes. A <= 32.
// Read twice: nothing.
//
// sizes: Act=bf16,float
#include "common.cuh"

constexpr int N = 8;

template <int M>
__device__ void sum_places(
    const float* y, const int* place, const float* share, const float* shared, float part, Act* out, int A, int D, int i) {
  float sum[M] = {};
#pragma unroll 4
  for (int a = 0; a < A; a++) {
    const auto group = load<M>(y + (long long)place[a] * D + i);
#pragma unroll
    for (int j = 0; j < M; j++) sum[j] = fmaf(share[a], group.v[j], sum[j]);
  }
  if (shared) {
    const auto group = load<M>(shared + i);
#pragma unroll
    for (int j = 0; j < M; j++) sum[j] = fmaf(part, group.v[j], sum[j]);
  }
  Pack<Act, M> rounded;
#pragma unroll
  for (int j = 0; j < M; j++) rounded.v[j] = from_float<Act>(sum[j]);
  store<M>(out + i, rounded);
}

extern "C" __global__ void __launch_bounds__(256, 2) combine(
    const float* y,       // [Places, D] the shared expert's from R*A on
    const float* weight,  // [R, A]
    const int* expert,    // [R, A] all different in a row
    const float* gate,    // [R] or null; the shared expert's score
    Act* out,             // [R, D]
    int R,
    int A,
    int D,
    int Places)
{
  after_previous();
  __shared__ int place[WARP];
  __shared__ float share[WARP];
  const long long row = blockIdx.x;
  if (threadIdx.x < A) {
    const int e = expert[row * A + threadIdx.x];
    int rank = 0;
    for (int a = 0; a < A; a++) rank += expert[row * A + a] < e;
    place[rank] = threadIdx.x, share[rank] = weight[row * A + threadIdx.x];
  }
  __syncthreads();

  const float* shared = gate ? y + (R * A + row) * D : nullptr;
  const float part = gate ? sigmoid(gate[row]) : 0.0f;
  y += row * A * D, out += row * D;
  const int start = blockIdx.y * blockDim.x * N;
  if (D % N == 0 && aligned16(y, out, shared)) {
    const int i = start + threadIdx.x * N;
    if (i < D) sum_places<N>(y, place, share, shared, part, out, A, D, i);
  } else {
    for (int i = start + threadIdx.x; i < min(D, start + int(blockDim.x) * N); i += blockDim.x) {
      sum_places<1>(y, place, share, shared, part, out, A, D, i);
    }
  }
}

template <int M>
__device__ void add_scaled(const Act* routed, float share, const Act* shared, Act* out, int i) {
  auto group = load<M>(routed + i);
  const auto added = load<M>(shared + i);
#pragma unroll
  for (int j = 0; j < M; j++) group.v[j] = from_float<Act>(fmaf(share, to_float(added.v[j]), to_float(group.v[j])));
  store<M>(out + i, group);
}

// out = routed + sigmoid(gate) * shared
extern "C" __global__ void __launch_bounds__(256, 2) add_shared(
    const Act* routed,  // [R, D]
    const float* gate,  // [R, 1]
    const Act* shared,  // [R, D]
    Act* out,           // [R, D]
    int D)
{
  after_previous();
  const long long row = blockIdx.x * (long long)D;
  const float share = sigmoid(gate[blockIdx.x]);
  routed += row, shared += row, out += row;
  const int start = blockIdx.y * blockDim.x * N;
  if (D % N == 0 && aligned16(routed, shared, out)) {
    const int i = start + threadIdx.x * N;
    if (i < D) add_scaled<N>(routed, share, shared, out, i);
  } else {
    for (int i = start + threadIdx.x; i < min(D, start + int(blockDim.x) * N); i += blockDim.x) {
      add_scaled<1>(routed, share, shared, out, i);
    }
  }
}
