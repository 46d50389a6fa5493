// The exclusive or of all words of a buffer: reads everything once and does nothing else, to measure what memory gives.
//
// grid: any, whole waves of it. block: 256; the threads of the grid read 16-byte groups in turn, eight at a time in flight.
// out: what each warp found. shared: none. Read twice: nothing.
#include "common.cuh"

__device__ __forceinline__ unsigned folded(uint4 v) { return v.x ^ v.y ^ v.z ^ v.w; }

extern "C" __global__ void __launch_bounds__(256) read_bandwidth(
    const unsigned* __restrict__ x,  // [4*Groups] aligned 16
    unsigned* __restrict__ out,      // [Warps]
    long long Groups)
{
  constexpr int N = 8;
  const uint4* groups = reinterpret_cast<const uint4*>(x);
  const long long step = (long long)gridDim.x * blockDim.x;
  long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
  unsigned sum = 0;
  for (; i + (N - 1) * step < Groups; i += N * step) {
    uint4 v[N];
#pragma unroll
    for (int j = 0; j < N; j++) v[j] = groups[i + j * step];
#pragma unroll
    for (int j = 0; j < N; j++) sum ^= folded(v[j]);
  }
  for (; i < Groups; i += step) sum ^= folded(groups[i]);
  for (int lane = 16; lane; lane /= 2) sum ^= __shfl_xor_sync(0xffffffffu, sum, lane);
  if (threadIdx.x % 32 == 0) out[blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32] = sum;
}
