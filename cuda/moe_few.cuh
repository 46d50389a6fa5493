// What the experts' products for up to 8 rows share (sm_90 and later). Knows no kernel.
//
// A unit is the product of some rows of an expert's matrix with all rows of x. Each of the first Places warps has a place in
// shared memory for a unit's weights: it asks for whole rows of them, waits, multiplies, and asks for its next unit.
// Nobody else waits for it.
//
// The order of all sums is that of moe_experts.cu: chunks of k (linear.cuh) c, c + 4, c + 8, ... in turn, for c = 0 .. 3,
// and then these four, so a row has the same bits with more rows.
#pragma once

#include "bulk.cuh"
#include "linear.cuh"
#include "moe_choice.cuh"

constexpr int PARTS = 4, STEP = PARTS * CHUNK;  // of k; rows are filled up to whole steps with zeros
constexpr int ITEM = sizeof(Wt);                // bytes of a weight
constexpr int PRODUCTS = CHUNK / 16;            // of a chunk
constexpr int W_PAD = 64, X_PAD = ITEM == 2 ? 64 : 16;  // bytes behind a row, so that lanes read from different banks
constexpr int THREADS = 256;

__device__ __forceinline__ int scales_of(int n) { return (n + SCALED - 1) / SCALED; }
__device__ __forceinline__ int steps_of(int K) { return (K + STEP - 1) / STEP; }

// Bytes from a row to the next one, of weights and of x.
__device__ __forceinline__ int w_pitch(int K) { return steps_of(K) * STEP * ITEM + W_PAD; }
__device__ __forceinline__ int x_pitch(int K) { return steps_of(K) * STEP * 2 + X_PAD; }

// Zeros from k = K to the last step's end, in so many rows of `item` bytes a number. All threads together.
__device__ __forceinline__ void fill_up(char* rows, int count, int pitch, int K, int item) {
  const int words = (steps_of(K) * STEP - K) * item / 16;
  for (int i = threadIdx.x; i < count * words; i += THREADS) {
    reinterpret_cast<uint4*>(rows + i / words * pitch + K * item)[i % words] = make_uint4(0, 0, 0, 0);
  }
}

// The lane's part of a row's chunk of x, from the chunk's start, in bytes: 16 for products 0 and 1, 16 for 2 and 3.
__device__ __forceinline__ int x_bytes(int half) {
  return ITEM == 2 ? threadIdx.x % 4 * 16 + half * 64 : threadIdx.x % 4 * 32 + half * 16;
}

// The lane's part of a row's chunk of weights: two numbers, and two 8 k further in the product, for each product.
struct Weights {
  unsigned pair[PRODUCTS][2];

  __device__ __forceinline__ explicit Weights(const char* chunk) {
    const char* const own = chunk + threadIdx.x % 4 * 16;
    if constexpr (ITEM == 2) {
#pragma unroll
      for (int half = 0; half < 2; half++) memcpy(pair[2 * half], __builtin_assume_aligned(own + 64 * half, 16), 16);
    } else {
      const uint4 all = *reinterpret_cast<const uint4*>(own);
#pragma unroll
      for (int i = 0; i < PRODUCTS; i++) widen(word(all, i), pair[i][0], pair[i][1]);
    }
  }
};
