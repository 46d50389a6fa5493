// How the blocks of a product share its tiles of out: the first `whole` of them are a unit of work each, the ranges of
// k (ranges.cuh) of the others are shared by `parts` units, whose warps keep sums for one another: linear_hopper.cu
// passes them on, linear_fp8_many.cu joins them. A block takes every gridDim.x-th unit and lets their chunks of k
// through a ring of places.
#pragma once

#include "arrival.cuh"
#include "ranges.cuh"
#include "tma.cuh"

// A piece of work: ranges first .. last - 1 of a tile.
struct Unit {
  int row, tile, first, last;
};

// All units, tiles of rows first; rows: of a tile.
template <int ROWS>
struct Units {
  int row_tiles, whole, parts, count;

  __device__ __forceinline__ Unit operator[](int i) const {
    const int row = i % row_tiles * ROWS, u = i / row_tiles;
    if (u < whole) return {row, u, 0, RANGES};
    const int tile = whole + (u - whole) / parts, part = (u - whole) % parts;
    return {row, tile, part * RANGES / parts, (part + 1) * RANGES / parts};
  }
};

// A place of the ring, the parity of its turn, and whether it is the first.
struct Turn {
  int depth, place = 0, parity = 0;
  bool first = true;

  __device__ __forceinline__ void advance() {
    if (++place == depth) place = 0, parity ^= 1, first = false;
  }
};

// ask(unit, chunk, turn) for all chunks of the block's units in order, each as soon as its place is empty.
template <class Units, class Ask>
__device__ __forceinline__ void fill(const Units& units, int chunks, Barrier* empty, int depth, Ask ask) {
  Turn turn{depth};
  for (int next = blockIdx.x; next < units.count; next += gridDim.x) {
    const Unit unit = units[next];
    for (int chunk = range_start(unit.first, chunks); chunk < range_start(unit.last, chunks); chunk++, turn.advance()) {
      wait(empty[turn.place], turn.parity ^ 1);
      ask(unit, chunk, turn);
    }
  }
}

// Keeps a lane's sum of a cut tile, in fours, for the warps that go on with it; to: the lane's place.
template <int S>
__device__ __forceinline__ void keep(const float (&sum)[S], float4* to) {
#pragma unroll
  for (int n = 0; n < S / 4; n++) {
    __stcg(to + n * WARP, make_float4(sum[4 * n], sum[4 * n + 1], sum[4 * n + 2], sum[4 * n + 3]));
  }
}
