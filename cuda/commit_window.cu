// The convolution's window of each request moves on: its last W-1 entries of (window ++ accepted rows), in place.
// Definition: commit_window in boleinfer/ops/gdn_inputs.py. Nothing is computed.
//
// grid: Parts blocks for each request. block: any number of threads; a thread owns its channels in all entries and reads
// them all before it writes, 16 bytes of neighbours where Cc and all addresses allow it, else one. shared: none.
// Read twice: nothing.
//
// sizes: W=2,3,4,8 Act=bf16,float
#include "common.cuh"

template <int N>
__device__ void move_on(const Act* x, long long Ldx, Act* window, const int* rows, int m, int Cc, int part,
                        int Parts) {
  for (int c = (part * blockDim.x + threadIdx.x) * N; c < Cc; c += Parts * blockDim.x * N) {
    Pack<Act, N> entry[W];  // one is unused: W may be 1
#pragma unroll
    for (int i = 0; i < W - 1; i++) {
      const int from = m + i;
      entry[i] = load<N>(from < W - 1 ? window + (long long)from * Cc + c : x + rows[from - (W - 1)] * Ldx + c);
    }
#pragma unroll
    for (int i = 0; i < W - 1; i++) store<N>(window + (long long)i * Cc + c, entry[i]);
  }
}

extern "C" __global__ void __launch_bounds__(128) commit_window(
    const Act* __restrict__ x,      // [R, Cc] strides [Ldx, 1] the inputs before the convolution
    Act* __restrict__ window,       // [Slots, W-1, Cc]
    const int* __restrict__ slot,   // [B]
    const int* __restrict__ start,  // [B+1]
    const int* __restrict__ row,    // [R] accepted rows, request b's from start[b] on
    const int* __restrict__ count,  // [B] how many
    int Cc,
    int Ldx,
    int Parts)
{
  after_previous();
  const int b = blockIdx.x / Parts, part = blockIdx.x % Parts, m = count[b];
  if (m == 0) return;
  Act* own = window + (long long)slot[b] * (W - 1) * Cc;
  constexpr int N = PER_16_BYTES<Act>;
  if (Cc % N == 0 && Ldx % N == 0 && aligned16(x, window)) {
    move_on<N>(x, Ldx, own, row + start[b], m, Cc, part, Parts);
  } else {
    move_on<1>(x, Ldx, own, row + start[b], m, Cc, part, Parts);
  }
}
