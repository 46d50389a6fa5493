// Zero-centred RMS norm of one row, by one block, for rms_norm.cu, split_rows.cu and mtp_inputs.cu. Definitions:
// rms_norm, add_rms_norm in boleinfer/ops/norms.py.
#pragma once

#include "common.cuh"

// One row: sum of squares, then scale. x and out may be the same.
template <int N>
__device__ void norm_row(const Act* x, const float* w, Act* out, int D, float eps) {
  // m = mean x^2
  float sum = 0.0f;
  for (int i = threadIdx.x * N; i < D; i += blockDim.x * N) {
    const auto group = load<N>(x + i);
#pragma unroll
    for (int j = 0; j < N; j++) sum = fmaf(to_float(group.v[j]), to_float(group.v[j]), sum);
  }
  const float scale = 1.0f / sqrtf(block_sum(sum) / D + eps);

  // y = x / sqrt(m + eps) * (1 + w)
  for (int i = threadIdx.x * N; i < D; i += blockDim.x * N) {
    const auto group = load<N>(x + i);
    const auto delta = load<N>(w + i);
    Pack<Act, N> y;
#pragma unroll
    for (int j = 0; j < N; j++) y.v[j] = from_float<Act>(to_float(group.v[j]) * scale * (1.0f + delta.v[j]));
    store<N>(out + i, y);
  }
}

// h += x, where there is an x; then take(i, y) gets the numbers i .. i + N - 1 of the norm of h, of a row that has at most
// N for each thread: they stay in registers, and w is read before the previous kernel is done. The bits are the same.
template <int N, class Take>
__device__ void norm_short_row(Act* h, const Act* x, const float* w, int D, float eps, Take take) {
  const int i = threadIdx.x * N;
  const bool has = i < D;
  Pack<float, N> delta;
  if (has) delta = load<N>(w + i);
  after_previous();
  Pack<Act, N> group = {};
  if (has) group = load<N>(h + i);
  if (has && x) {
    const auto added = load<N>(x + i);
#pragma unroll
    for (int j = 0; j < N; j++) group.v[j] = from_float<Act>(to_float(group.v[j]) + to_float(added.v[j]));
    store<N>(h + i, group);
  }
  float sum = 0.0f;
#pragma unroll
  for (int j = 0; j < N; j++) sum = fmaf(to_float(group.v[j]), to_float(group.v[j]), sum);
  const float scale = 1.0f / sqrtf(block_sum(sum) / D + eps);
  if (!has) return;
#pragma unroll
  for (int j = 0; j < N; j++) group.v[j] = from_float<Act>(to_float(group.v[j]) * scale * (1.0f + delta.v[j]));
  take(i, group);
}
