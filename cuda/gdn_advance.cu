// Ring lengths after a commit, once all layers have read them. Definition: ring_after in boleinfer/ops/gdn.py.
//
// grid: B / block. block: any; a thread owns a request. shared: none. Read twice: nothing.
#include "common.cuh"

extern "C" __global__ void gdn_advance(
    int* __restrict__ length,       // [Slots]
    const int* __restrict__ slot,   // [B]
    const int* __restrict__ count,  // [B]
    int B,
    int C)
{
  after_previous();
  const int b = blockIdx.x * blockDim.x + threadIdx.x;
  const int m = b < B ? count[b] : 0;
  if (m <= 0) return;
  const int held = length[slot[b]];
  length[slot[b]] = held + m <= C ? held + m : m <= C ? m : 0;
}
