// The norm of GDN's output, y = o / sqrt(mean o^2 + eps) * w * silu(z), over each head. Definition: gated_rms_norm in
// boleinfer/ops/norms.py. Sums in float32.
//
// grid: blocks for all heads of all rows. block: 128 threads; a group of lanes owns Heads heads, whose numbers are under way
// together, four neighbours a lane where widths and addresses allow it. shared: none. Read twice: nothing.
//
// sizes: V=128 Act=bf16,float Heads=1,2 | V=63 Act=bf16,float Heads=2
#include "gated_rms_norm.cuh"

template <int N>
__device__ __forceinline__ void norm_heads(const Act* o, const Act* z, const float* w, Act* out, int heads, int Hv,
                                           int Ldz, float eps) {
  constexpr int EACH = Share<V, N>::EACH;
  const Share<V, N> own;
  const int groups = gridDim.x * blockDim.x / own.LANES, first = (blockIdx.x * blockDim.x + threadIdx.x) / own.LANES;
  Pack<float, N> gain[EACH] = {};
  own.each([&](int e, int c) { gain[e] = load<N>(w + c); });
  after_previous();
  Pack<Act, N> x[Heads][EACH] = {}, gate[Heads][EACH] = {};
#pragma unroll
  for (int i = 0; i < Heads; i++) {
    const int head = first + i * groups;
    if (head >= heads) continue;
    const long long at = (long long)(head / Hv) * Ldz + head % Hv * V;
    own.each([&](int e, int c) {
      x[i][e] = read<N>(o + (long long)head * V + c);
      gate[i][e] = read<N>(z + at + c);
    });
  }
#pragma unroll
  for (int i = 0; i < Heads; i++) {
    const int head = first + i * groups;
    float wide[EACH][N], factor[EACH][N];
#pragma unroll
    for (int e = 0; e < EACH; e++) {
#pragma unroll
      for (int j = 0; j < N; j++) wide[e][j] = to_float(x[i][e].v[j]);
    }
    gate_of(factor, gain, gate[i]);
    norm_head<N>(out + (long long)head * V, wide, factor, eps, head < heads);
  }
}

extern "C" __global__ void __launch_bounds__(128, 8) gated_rms_norm(
    const Act* o,                 // [R, Hv, V]
    const Act* z,                 // [R, Hv, V] strides [Ldz, V, 1]; columns of a wider matrix
    const float* __restrict__ w,  // [V] a plain gain
    Act* out,                     // [R, Hv, V]
    int R,
    int Hv,
    int Ldz,
    float eps)
{
  // after_previous() is called by norm_heads
  if (V % NEAR == 0 && Ldz % NEAR == 0 && aligned16(o, z, w, out)) {
    norm_heads<NEAR>(o, z, w, out, R * Hv, Hv, Ldz, eps);
  } else {
    norm_heads<1>(o, z, w, out, R * Hv, Hv, Ldz, eps);
  }
}
