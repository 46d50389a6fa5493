// The norm of GDN's output, y = o / sqrt(mean o^2 + eps) * w * silu(z), over each head. Definition: gated_rms_norm in
// boleinfer/ops/norms.py. Sums in float32.
//
// grid: R x ceil(Hv / warps of a block), a warp owns a head of a row. block: 32 .. 128 threads in full warps; a lane owns
// every 32nd group of the head, 16 bytes where widths and addresses allow it, else one number. shared: none.
// Read twice: o beyond a warp's 32 groups, the second time from L1.
//
// sizes: Act=bf16,float
#include "common.cuh"

template <int N>
__device__ float sum_of_squares(const Pack<Act, N>& x, float sum) {
#pragma unroll
  for (int j = 0; j < N; j++) sum = fmaf(to_float(x.v[j]), to_float(x.v[j]), sum);
  return sum;
}

// y = o * scale * w * silu(z)
template <int N>
__device__ Pack<Act, N> gated(const Pack<Act, N>& o, const Pack<Act, N>& z, const Pack<float, N>& w, float scale) {
  Pack<Act, N> y;
#pragma unroll
  for (int j = 0; j < N; j++) {
    y.v[j] = from_float<Act>(to_float(o.v[j]) * scale * w.v[j] * silu(to_float(z.v[j])));
  }
  return y;
}

template <int N>
__device__ void norm_head(const Act* o, const Act* z, const float* w, Act* out, int V, float eps) {
  const int first = threadIdx.x % WARP * N;
  Pack<Act, N> group = {}, gate;  // the lane's first ones are read at once
  Pack<float, N> gain;
  if (first < V) gain = load<N>(w + first);
  after_previous();
  if (first < V) {
    group = load<N>(o + first);
    gate = load<N>(z + first);
  }

  // m = mean o^2
  float sum = sum_of_squares(group, 0.0f);
  for (int i = first + WARP * N; i < V; i += WARP * N) sum = sum_of_squares(load<N>(o + i), sum);
  const float scale = 1.0f / sqrtf(warp_sum(sum) / V + eps);

  if (first < V) store<N>(out + first, gated(group, gate, gain, scale));
  for (int i = first + WARP * N; i < V; i += WARP * N) {
    store<N>(out + i, gated(load<N>(o + i), load<N>(z + i), load<N>(w + i), scale));
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
  // after_previous() is called by norm_head
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
