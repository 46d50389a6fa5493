// Zero-centred RMS norm of rows, y = x / sqrt(mean x^2 + eps) * (1 + w): alone, or after adding to the residual stream.
// Definitions: rms_norm, add_rms_norm in boleinfer/ops/norms.py. Sums in float32; h is rounded to its type before it is
// normed.
//
// grid: R, a block owns a row. block: 32 .. 1024 threads in full warps; a thread owns every blockDim.x-th group of the
// row, 16 bytes where the width and all addresses allow it, else one number. shared: 128 bytes.
// Read twice: x or h, the second time from L1.
//
// sizes: Act=bf16,float
#include "norm_row.cuh"

// h += x, in the type of h.
template <int N>
__device__ void add_row(Act* h, const Act* x, int D) {
  for (int i = threadIdx.x * N; i < D; i += blockDim.x * N) {
    auto group = load<N>(h + i);
    const auto added = load<N>(x + i);
#pragma unroll
    for (int j = 0; j < N; j++) group.v[j] = from_float<Act>(to_float(group.v[j]) + to_float(added.v[j]));
    store<N>(h + i, group);
  }
}

extern "C" __global__ void __launch_bounds__(1024) rms_norm(
    const Act* x,                 // [R, D]
    const float* __restrict__ w,  // [D] the stored weight, a delta to 1
    Act* out,                     // [R, D]
    int D,
    float eps)
{
  after_previous();
  const long long row = (long long)blockIdx.x * D;
  constexpr int N = PER_16_BYTES<Act>;
  if (D % N == 0 && aligned16(x, w, out)) {
    norm_row<N>(x + row, w, out + row, D, eps);
  } else {
    norm_row<1>(x + row, w, out + row, D, eps);
  }
}

// h += x; out = norm of the new h
extern "C" __global__ void __launch_bounds__(1024) add_rms_norm(
    Act* h,                       // [R, D] the residual stream, in place
    const Act* x,                 // [R, D]
    const float* __restrict__ w,  // [D] the stored weight, a delta to 1
    Act* out,                     // [R, D]
    int D,
    float eps)
{
  const long long row = (long long)blockIdx.x * D;
  constexpr int N = PER_16_BYTES<Act>;
  const bool words = D % N == 0 && aligned16(h, x, w, out);
  if (words && D <= N * blockDim.x) {
    norm_short_row<N>(h + row, x + row, w, D, eps, [&](int i, const Pack<Act, N>& y) { store<N>(out + row + i, y); });
    return;
  }
  after_previous();
  if (words) {
    add_row<N>(h + row, x + row, D);
    norm_row<N>(h + row, w, out + row, D, eps);  // each thread reads back its own groups
  } else {
    add_row<1>(h + row, x + row, D);
    norm_row<1>(h + row, w, out + row, D, eps);
  }
}
