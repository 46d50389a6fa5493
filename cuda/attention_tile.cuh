// What attention by wgmma works on: tiles of 64 slots of K or V in shared memory, and what both ways to multiply share.
//
//   s = q k^T   m' = max(m, c s)   p = 2^(c s - m') in bf16   (o, l) = 2^(m - m') (o, l) + (p v, p 1)   c = scale log2 e
//
// A leaf of the context is made so from zero, 64 slots at a time, and then joined to the leaves before (attention.cuh):
// whoever does it in whichever company, by whichever of attention_few.cuh and attention_wide.cuh, the sums and their order
// are the same. Leaves are cut at fixed slots; how long they are is a matter of the slot that a row has itself, so that no
// row has more than LEAVES.
// A tile lies as load_tile leaves it: eight rows of 64 columns, 128 swizzled bytes each, then the next 64 columns of these
// rows, and then the next eight rows.
#pragma once

#include "attention.cuh"
#include "tma.cuh"
#include "wgmma.cuh"

constexpr int LEAVES = 32, CLASS = LEAVES * SPLIT;  // slots of which the rows have leaves of one length

// Slots of the leaves of a row that has this slot.
__device__ __forceinline__ int leaf_of(int slot) { return SPLIT * (slot / CLASS + 1); }

constexpr int PANEL = 8 * 64;  // numbers of eight rows
constexpr int PANELS = Dh / 64, TILE = 64 * Dh;
constexpr int APART = 16 * Dh;  // bytes from eight rows to the next
constexpr int KS = SPLIT / 16;  // 16-slot steps of the values' product

// The sums of a warp's share of Rows queries.
template <int Rows>
struct Share;

// Where the 16 bytes around (row, col) of a tile begin in it.
__device__ __forceinline__ int place_in_tile(int row, int col) {
  return row / 8 * (8 * Dh) + col / 64 * PANEL + row % 8 * 64 + (col / 8 % 8 ^ row % 8) * 8;
}

// m becomes at least this; the factor of what was made for m before.
__device__ __forceinline__ float rise(float& m, float other) {
  const float before = m;
  m = fmaxf(m, other);
  return before == m ? 1.0f : power2(before - m);
}

constexpr int GROUPS = Rows == 128 || (Rows == 64 && Dh > 64) ? 2 : 1, WARPS = 4 * GROUPS;  // that multiply

using Meeting = MeetingOf<WARP * WARPS>;  // of the threads that multiply

// Of the bf16 weights of 16 queries and 16 slots, one of A's fragments, the sums are added to l.
__device__ __forceinline__ void add_weights(float (&l)[4], const unsigned (&p)[4]) {
  const unsigned ones[2] = {0x3f803f80u, 0x3f803f80u};
  mma_m16n8k16(l, p, ones);
}
