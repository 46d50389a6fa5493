// The norm of GDN's output over a head of V columns: y = o / sqrt(mean o^2 + eps) * (w * silu(z)).
// Definition: gated_rms_norm in boleinfer/ops/norms.py.
#pragma once

#include "share.cuh"

// gate = w * silu(z)
template <int EACH, int N>
__device__ __forceinline__ void gate_of(float (&gate)[EACH][N], const Pack<float, N> (&w)[EACH],
                                        const Pack<Act, N> (&z)[EACH]) {
#pragma unroll
  for (int e = 0; e < EACH; e++) {
#pragma unroll
    for (int i = 0; i < N; i++) gate[e][i] = w[e].v[i] * silu(to_float(z[e].v[i]));
  }
}

// Writes y to `out`. By all lanes of a warp; lanes that are not `used` only take part in the sum of their group.
template <int N>
__device__ __forceinline__ void norm_head(Act* out, float (&o)[Share<V, N>::EACH][N],
                                          const float (&gate)[Share<V, N>::EACH][N], float eps, bool used) {
  const float scale = rsqrtf(Share<V, N>::sum(squares(o)) / V + eps);
#pragma unroll
  for (int e = 0; e < Share<V, N>::EACH; e++) {
#pragma unroll
    for (int i = 0; i < N; i++) o[e][i] *= scale * gate[e][i];
  }
  if (used) write_head<V, N>(out, o);
}
