// What a row of the projections gives the gated delta rule: convolution, silu and length of a head's channels, and gates.
// Definition: boleinfer/ops/gdn_inputs.py. W is the number of taps.
#pragma once

#include "share.cuh"

// x = the inputs of a head that begins at `from`.
template <int WIDTH, int N>
__device__ __forceinline__ void read_inputs(Pack<Act, N> (&x)[Share<WIDTH, N>::EACH], const Act* from) {
  Share<WIDTH, N>().each([&](int e, int c) { x[e] = read<N>(from + c); });
}

// y = silu(sum_j taps[j] x[j]); tap(e): the taps of the lane's e-th N channels, one channel after another.
template <int WIDTH, int N, class Tap>
__device__ __forceinline__ void convolve(float (&y)[Share<WIDTH, N>::EACH][N],
                                         const Pack<Act, N> (&x)[W][Share<WIDTH, N>::EACH], Tap tap) {
  memset(y, 0, sizeof y);
  Share<WIDTH, N>().each([&](int e, int) {
    const Pack<float, N * W> taps = tap(e);
#pragma unroll
    for (int j = W - 1; j >= 0; j--) {
      const auto of = widened(x[j][e]);
#pragma unroll
      for (int i = 0; i < N; i++) y[e][i] = fmaf(of.v[i], taps.v[i * W + j], y[e][i]);
    }
#pragma unroll
    for (int i = 0; i < N; i++) y[e][i] = silu(y[e][i]);
  });
}

// y / sqrt(sum y^2 + 1e-6) * length. By all lanes of a warp.
template <int WIDTH, int N>
__device__ __forceinline__ void give_length(float (&y)[Share<WIDTH, N>::EACH][N], float length) {
  const float factor = length * rsqrtf(Share<WIDTH, N>::sum(squares(y)) + 1e-6f);
#pragma unroll
  for (auto& part : y) {
#pragma unroll
    for (float& number : part) number *= factor;
  }
}

// g = -e^A_log softplus(a + dt_bias)
__device__ __forceinline__ float log_decay(float a, float A_log, float dt_bias) {
  const float x = a + dt_bias;
  return -expf(A_log) * (fmaxf(x, 0.0f) + log1pf(expf(-fabsf(x))));
}
