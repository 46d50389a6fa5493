// What attention by wgmma works on: tiles of 64 slots of K or V in shared memory, and what both ways to multiply share.
//
//   s = q k^T   m' = max(m, c s)   p = 2^(c s - m') in bf16   (o, l) = 2^(m - m') (o, l) + (p v, p 1)   c = scale log2 e
//
// A leaf of the context is made so from zero, 64 slots at a time, and then joined to the leaves before (attention.cuh):
// whoever does it in whichever company, by whichever of attention_few.cuh and attention_wide.cuh, the sums and their order
// are the same. Leaves are cut at fixed slots; how long they are is a matter of the slot that a row has itself, so that no
// row has more than LEAVES.
// A tile lies in panels of 64 columns, rows of 128 swizzled bytes each, as load_tile leaves them.
#pragma once

#include "attention.cuh"
#include "tma.cuh"
#include "wgmma.cuh"

constexpr int LEAVES = 32, CLASS = LEAVES * SPLIT;  // slots of which the rows have leaves of one length

// Slots of the leaves of a row that has this slot.
__device__ __forceinline__ int leaf_of(int slot) { return SPLIT * (slot / CLASS + 1); }

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

// m becomes at least this; the factor of what was made for m before.
__device__ __forceinline__ float rise(float& m, float other) {
  const float before = m;
  m = fmaxf(m, other);
  return before == m ? 1.0f : power2(before - m);
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
