// What the products of few rows with FP8 w do alike (linear_fp8.cu, linear_fp8_row.cu). A tile is `Features` features of out,
// of gate and of up when Gated, or about half as many of a second matrix w_more, with all of k. Sums are in the order of
// ranges.cuh, each FP8 block of 128 k on its own, then scaled; Groups warpgroups have a run of ranges each.
#pragma once

#include "ranges.cuh"
#include "tma.cuh"

constexpr int ROW_BYTES = 128, SCALED = 128;                              // of a row in shared memory; k of an FP8 scale
constexpr int OWN = RANGES / Groups, WARPS = 4 * Groups, THREADS = WARPS * WARP;  // ranges of a warpgroup; that multiply
constexpr int SLABS = 1 + Gated, TALL = SLABS * Features, TILES = (TALL + 63) / 64;  // rows of w in a tile; 64s of them
constexpr int MORE_TALL = (Features / 2 + 7) / 8 * 8, MORE_TILES = (MORE_TALL + 63) / 64;  // the same of w_more
constexpr int BLOCKS = (Features + SCALED - 2) / SCALED + 1;              // of 128 features, that a slab of a tile meets
constexpr int MOST = 64;                                                  // places

// A place of a ring, and the parity of its turn.
struct Turn {
  int place = 0, parity = 0;

  __device__ __forceinline__ void advance(int depth) {
    if (++place == depth) place = 0, parity ^= 1;
  }
};

// Where the t-th 64 of so many rows of w in a tile begin: the last 64 are whole, if there are as many.
__device__ __forceinline__ int start_of(int t, int tall) { return min(64 * t, max(tall - 64, 0)); }

// w's scales of a tile, in shared memory: in the loop of products they would wait behind w.
struct Scales {
  float* table;  // [SLABS, BLOCKS, chunks]
  int chunks, width, Dout;  // of k; features of a slab, of all

  // By all that multiply; cp_async_wait and a barrier have to follow.
  __device__ __forceinline__ void load(const float* scale, int tile) const {
#pragma unroll
    for (int b = 0; b < SLABS * BLOCKS; b++) {
      const int block = min((tile * Features + b / BLOCKS * width) / SCALED + b % BLOCKS, (Dout - 1) / SCALED);
#pragma unroll 1
      for (int i = threadIdx.x; i < chunks; i += THREADS) {
        cp_async4(table + b * chunks + i, scale + (long long)block * chunks + i);
      }
    }
    cp_async_commit();
  }
  // Those of a row of the tile, or of its last one: a number for each chunk.
  __device__ __forceinline__ const float* of(int tile, int row) const {
    const int last = min(row, TALL - 1), slab = last / Features, first = tile * Features + slab * width;
    return table + (slab * BLOCKS + (first + last % Features) / SCALED - first / SCALED) * chunks;
  }
};

// All sums of a number in order: `apart` numbers apart.
template <int COUNT>
__device__ __forceinline__ float total(const float* sums, int apart) {
  float y = 0.0f;
#pragma unroll
  for (int r = 0; r < COUNT; r++) y += sums[r * apart];
  return y;
}
