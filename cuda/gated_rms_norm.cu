// The norm of GDN's output, y = o / sqrt(mean o^2 + eps) * w * silu(z), over each head. Definition: gated_rms_norm in
// boleinfer/ops/norms.py. Sums in float32.
//
// grid: R x ceil(Hv / warps of a block), a warp owns a head of a row. block: 32 .. 128 threads in full warps; a lane owns
// every 32nd group of the head, 16 bytes where widths and addresses allow it, else one number. shared: none.
// Read twice: o, the second time from L1.
//
// sizes: Act=bf16,float
#include "common.cuh"

template <int N>
__device__ void norm_head(const Act* o, const Act* z, const float* w, Act* out, int V, float eps) {
  const int lane = threadIdx.x % WARP;

  // m = mean o^2
  float sum = 0.0f;
  for (int i = lane * N; i < V; i += WARP * N) {
    const auto group = load<N>(o + i);
#pragma unroll
    for (int j = 0; j < N; j++) sum = fmaf(to_float(group.v[j]), to_float(group.v[j]), sum);
  }
  const float scale = 1.0f / sqrtf(warp_sum(sum) / V + eps);

  // y = o / sqrt(m + eps) * w * silu(z)
  for (int i = lane * N; i < V; i += WARP * N) {
    const auto group = load<N>(o + i);
    const auto gate = load<N>(z + i);
    const auto gain = load<N>(w + i);
    Pack<Act, N> y;
#pragma unroll
    for (int j = 0; j < N; j++) {
      y.v[j] = from_float<Act>(to_float(group.v[j]) * scale * gain.v[j] * silu(to_float(gate.v[j])));
    }
    store<N>(out + i, y);
  }
}

extern "C" __global__ void __launch_bounds__(128, 4) gated_rms_norm(
    const Act* __restrict__ o,    // [R, Hv, V]
    const Act* __restrict__ z,    // [R, Hv, V] strides [Ldz, V, 1]; columns of a wider matrix
    const float* __restrict__ w,  // [V] a plain gain
    Act* __restrict__ out,        // [R, Hv, V]
    int Hv,
    int V,
    int Ldz,
    float eps)
{
  after_previous();
  const long long row = blockIdx.x;
  const int h = blockIdx.y * (blockDim.x / WARP) + threadIdx.x / WARP;
  if (h >= Hv) return;
  const long long head = (row * Hv + h) * V;  // its first number
  const Act* gate = z + row * Ldz + (long long)h * V;
  constexpr int N = PER_16_BYTES<Act>;
  if (V % N == 0 && Ldz % N == 0 && aligned16(o, z, w, out)) {
    norm_head<N>(o + head, gate, w, out + head, V, eps);
  } else {
    norm_head<1>(o + head, gate, w, out + head, V, eps);
  }
}
