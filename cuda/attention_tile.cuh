// What attention by wgmma works on: tiles of 64 slots of K or V in shared memory, and what both ways to multiply share.
//
//   s = q k^T   m = max c s   p = 2^(c s - m) in bf16   (o, m, l) = (p v, m, p 1)   c = scale log2 e
//
// The part of 64 slots is made from zero and then joined to the parts before (attention.cuh): whoever does it in whichever
// company, by whichever of attention_few.cuh and attention_wide.cuh, the sums and their order are the same.
// A tile lies in panels of 64 columns, rows of 128 swizzled bytes each, as load_tile leaves them.
#pragma once

#include "attention.cuh"
#include "tma.cuh"
#include "wgmma.cuh"

constexpr int PANEL = 64 * 64;  // numbers of 64 rows
constexpr int PANELS = Dh / 64, TILE = PANELS * PANEL;
constexpr int KS = SPLIT / 16;  // 16-slot steps of the values' product

// The sums of a warp's share of Rows queries.
template <int Rows>
struct Share;

// Where the 16 bytes around (row, col) of a tile of Lines rows begin in it.
template <int Lines>
__device__ __forceinline__ int place_in_tile(int row, int col) {
  return col / 64 * (Lines * 64) + row * 64 + (col / 8 % 8 ^ row % 8) * 8;
}

// A barrier of the threads that multiply, and the parity of its turn.
struct Meeting {
  Barrier& barrier;
  int parity = 0;

  __device__ __forceinline__ void operator()() {
    arrive(barrier);
    wait(barrier, parity);
    parity ^= 1;
  }
};

// Of the bf16 weights of 16 queries and 16 slots, one of A's fragments, the sums are added to l.
__device__ __forceinline__ void add_weights(float (&l)[4], const unsigned (&p)[4]) {
  const unsigned ones[2] = {0x3f803f80u, 0x3f803f80u};
  mma_m16n8k16(l, p, ones);
}
