// silu(gate) * up, gate and up side by side. Definition: swiglu in boleinfer/ops/linear.py. In float32, rounded once.
//
// grid: (any, R up to 65535): the blocks of axis x own every gridDim.y-th row together, a thread every (threads of axis
// x)-th group of it: 16 bytes where F and all addresses allow it, else one number. block: up to 256 threads. shared: none.
// Read twice: nothing.
//
// sizes: Act=bf16,float
#include "common.cuh"

template <int N>
__device__ void gated(const Act* gate_up, Act* out, int R, int F) {
  for (long long r = blockIdx.y; r < R; r += gridDim.y) {
    for (int f = (blockIdx.x * blockDim.x + threadIdx.x) * N; f < F; f += gridDim.x * blockDim.x * N) {
      const auto gate = load<N>(gate_up + 2 * r * F + f), up = load<N>(gate_up + 2 * r * F + F + f);
      Pack<Act, N> y;
#pragma unroll
      for (int i = 0; i < N; i++) y.v[i] = from_float<Act>(silu(to_float(gate.v[i])) * to_float(up.v[i]));
      store<N>(out + r * F + f, y);
    }
  }
}

extern "C" __global__ void __launch_bounds__(256) swiglu(
    const Act* gate_up,  // [R, 2*F]
    Act* out,            // [R, F]
    int R,
    int F)
{
  after_previous();
  constexpr int N = PER_16_BYTES<Act>;
  if (F % N == 0 && aligned16(gate_up, out)) {
    gated<N>(gate_up, out, R, F);
  } else {
    gated<1>(gate_up, out, R, F);
  }
}
