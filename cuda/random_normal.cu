// Seeded normal numbers: out[i] = scale * n(seed, stream, i). The same bits on every GPU and for every grid.
//
// grid: any. block: any; a thread makes four numbers at a time, those of one Philox counter. shared: none.
//
// sizes: T=bf16,float,fp8
#include "common.cuh"

// Two independent normal numbers of two random words (Box and Muller 1958); the first is in (0, 1].
__device__ __forceinline__ float2 normals(unsigned a, unsigned b) {
  const float u = (float(a >> 8) + 1.0f) * 0x1p-24f, angle = float(b >> 8) * (6.28318530718f * 0x1p-24f);
  const float radius = sqrtf(-2.0f * logf(u));
  return float2{radius * cosf(angle), radius * sinf(angle)};
}

extern "C" __global__ void random_normal(
    T* __restrict__ out,  // [Count]
    long long Count,
    unsigned long long seed,
    unsigned stream,
    float scale)
{
  const long long step = (long long)gridDim.x * blockDim.x;
  for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < (Count + 3) / 4; i += step) {
    const uint4 word = philox(uint4{unsigned(i), unsigned(i >> 32), stream, 1u}, uint2{unsigned(seed), unsigned(seed >> 32)});
    const float2 ab = normals(word.x, word.y), cd = normals(word.z, word.w);
    const float four[4] = {ab.x, ab.y, cd.x, cd.y};
#pragma unroll
    for (int j = 0; j < 4; j++) {
      if (4 * i + j < Count) out[4 * i + j] = from_float<T>(scale * four[j]);
    }
  }
}
