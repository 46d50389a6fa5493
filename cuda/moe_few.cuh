// What the experts' products for up to 8 rows share. Knows no kernel.
//
// The order of all sums is that of moe_experts.cu: chunks of k (linear.cuh) c, c + 4, c + 8, ... in turn, for c = 0 .. 3,
// and then these four, so a row has the same bits with more rows. A lane copies the words of its own rows of a tile
// (mma.cuh) into a ring of Depth chunks and finds them there itself: warps wait for one another only where sums meet.
#pragma once

#include "linear.cuh"
#include "moe_choice.cuh"

constexpr int PARTS = 4;                 // of k
constexpr int WORDS = sizeof(Wt);        // 16-byte words of a row's chunk that a lane takes
constexpr int LANE_K = 16 / sizeof(Wt);  // k of one of them

__device__ __forceinline__ int scales_of(int n) { return (n + SCALED - 1) / SCALED; }

// The lane's k of word p of a row's chunk of weights; of a row's chunk of x.
__device__ __forceinline__ int weight_k(int p) { return threadIdx.x % 4 * LANE_K + 32 * p; }
__device__ __forceinline__ int x_k(int p) { return threadIdx.x % 4 * LANE_K + (WORDS == 2 ? 32 : 8) * p; }

// The lane's part of a chunk of x; zeros behind the end.
__device__ __forceinline__ void load_x(uint4 (&to)[2], const bf16* row, int chunk, int K) {
#pragma unroll
  for (int p = 0; p < 2; p++) {
    const int k = chunk * CHUNK + x_k(p);
    to[p] = load_or_zero(row + k, k < K);
  }
}

// sum += the chunk of 16 rows of weights with 8 rows of x. low, high: the lane's words of rows g and g + 8.
__device__ __forceinline__ void multiply(
    float (&sum)[4], const uint4* low, const uint4* high, const uint4 (&x)[2], float scale) {
  if constexpr (WORDS == 2) {
    Fragments<Wt>(low[0], high[0]).multiply(sum, x);
    Fragments<Wt>(low[WARP], high[WARP]).multiply(sum, x + 1);
  } else {
    float block[4] = {};
    Fragments<Wt>(low[0], high[0]).multiply(block, x);
#pragma unroll
    for (int j = 0; j < 4; j++) sum[j] = fmaf(scale, block[j], sum[j]);
  }
}

// Asks L2 for so many bytes, a multiple of 16.
__device__ __forceinline__ void prefetch_bytes(const void* p, int bytes) {
#if !defined(EMULATED) && __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(__cvta_generic_to_global(p)), "r"(bytes));
#endif
}
