// One head of q or k normed and rotated, or of v as it is: for attention_inputs.cu and tree_attention_hopper.cu.
//   y = x / sqrt(mean x^2 + eps) * (1 + w);  the pair (y_i, y_{i+Half}), i < Half, is turned by the angle i of the row
// Sums in float32, rounded to Act once.
#pragma once

#include "common.cuh"

// Lanes of a head: a power of two.
__device__ constexpr int lanes_of_head() {
  int lanes = 1;
  while (lanes < WARP && lanes * PER_16_BYTES<Act> < Dh) lanes *= 2;
  return lanes;
}
constexpr int LANES = lanes_of_head();

// By the lanes of a group, from x: put(out, column, N numbers). w is null for v. Where x is null the lanes only exchange
// sums, where out is null nothing is put. Waits for the kernels before, weights being on their way.
template <int N, class Put>
__device__ __forceinline__ void head_inputs(
    const Act* x, const float* w, const float* cos, const float* sin, float eps, Act* out, Put put) {
  constexpr int EACH = (Dh + LANES * N - 1) / (LANES * N);
  const int first = threadIdx.x % LANES * N;  // and every LANES * N-th
  Pack<Act, N> own[EACH], partner[EACH];
  Pack<float, N> delta[EACH], partner_delta[EACH], cosine[EACH], sine[EACH];
#pragma unroll
  for (int e = 0; e < EACH; e++) {
    const int c = first + e * LANES * N;
    if (x == nullptr || w == nullptr || c >= Dh) continue;
    delta[e] = load<N>(w + c);
    if (c < 2 * Half) partner_delta[e] = load<N>(w + (c < Half ? c + Half : c - Half));
  }
  after_previous();
#pragma unroll
  for (int e = 0; e < EACH; e++) {
    const int c = first + e * LANES * N;
    if (x == nullptr || c >= Dh) continue;
    own[e] = load<N>(x + c);
    if (w == nullptr || c >= 2 * Half) continue;
    partner[e] = load<N>(x + (c < Half ? c + Half : c - Half));
    cosine[e] = load<N>(cos + c % Half), sine[e] = load<N>(sin + c % Half);
  }

  // scale = 1 / sqrt(mean x^2 + eps)
  float sum = 0.0f;
#pragma unroll
  for (int e = 0; e < EACH; e++) {
    if (x == nullptr || first + e * LANES * N >= Dh) continue;
#pragma unroll
    for (int i = 0; i < N; i++) sum = fmaf(to_float(own[e].v[i]), to_float(own[e].v[i]), sum);
  }
#pragma unroll
  for (int lane = LANES / 2; lane > 0; lane /= 2) sum += __shfl_xor_sync(ALL_LANES, sum, lane);
  const float scale = 1.0f / sqrtf(sum / Dh + eps);

#pragma unroll
  for (int e = 0; e < EACH; e++) {
    const int c = first + e * LANES * N;
    if (out == nullptr || c >= Dh) continue;
    if (w != nullptr) {
      // y = x scale (1 + w); y_i cos - y_{i+Half} sin on the left, y_i cos + y_{i-Half} sin on the right
      const float sign = c < Half ? -scale : scale;
#pragma unroll
      for (int i = 0; i < N; i++) {
        float y = to_float(own[e].v[i]) * (scale * (1.0f + delta[e].v[i]));
        if (c < 2 * Half) {
          const float turned = to_float(partner[e].v[i]) * sign * (1.0f + partner_delta[e].v[i]);
          y = fmaf(y, cosine[e].v[i], turned * sine[e].v[i]);
        }
        own[e].v[i] = from_float<Act>(y);
      }
    }
    put(out, c, own[e]);
  }
}
