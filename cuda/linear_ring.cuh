// What a block of linear_hopper works on: units of the product, and the ring through which their chunks of x and w come.
#pragma once

#include "tma.cuh"
#include "wgmma.cuh"

constexpr int ROW_BYTES = 128, SLAB = 64 * ROW_BYTES;  // of a tile in shared memory; of 64 rows
constexpr int K = ROW_BYTES / sizeof(Wt), X_TILES = K / 64;  // k of a chunk; tiles of x in it
constexpr bool FP8 = sizeof(Wt) == 1, SPLITS = FP8 && Rows <= 32;  // SPLITS: x comes as bf16 and is split by the block
constexpr int X_WARPS = SPLITS ? 4 : 1, AT_ONCE = 2 * X_WARPS;     // AT_ONCE: rows of x that are split at once
constexpr int WARPS = 4 * Groups, SLABS = 1 + Gated, RESULTS = 64 * Groups;  // RESULTS: features of out in a tile
constexpr int X_TILE = Rows * ROW_BYTES, X_BYTES = X_TILES * X_TILE, W_BYTES = SLABS * Groups * SLAB;
constexpr int PLACE = X_BYTES + W_BYTES;
constexpr int SUMS = Rows / 2, QUADS = SUMS / 4;  // of a lane and slab; fours of them, for eight rows each
constexpr int MOST = 24;                          // places of a ring
constexpr int READERS = SPLITS ? Rows : 1;        // lanes of a warp that say that a place is empty: all that read of it

// A piece of work: chunks begin .. end - 1 of a tile. part: which of Parts, -1 when it is all of k.
struct Unit {
  int row, tile, part, begin, end;
};

// All units, tiles of rows first.
struct Units {
  int row_tiles, whole, parts, chunks, count;

  __device__ __forceinline__ Unit operator[](int i) const {
    const int row = i % row_tiles * Rows, u = i / row_tiles;
    if (u < whole) return {row, u, -1, 0, chunks};
    const int part = (u - whole) % parts;
    return {row, whole + (u - whole) / parts, part, part * chunks / parts, (part + 1) * chunks / parts};
  }
};

// A place of the ring, and the parity of its turn.
struct Turn {
  int depth, place = 0, parity = 0;

  __device__ __forceinline__ void advance() {
    if (++place == depth) place = 0, parity ^= 1;
  }
};

// Chunks of x and w on their way from the warps that ask for them to those that multiply.
struct Ring {
  char* places;
  Barrier *full, *empty;
  float* inverse;  // 1 / s of x that is split here, [place, Rows]

  __device__ __forceinline__ char* x(int place) const { return places + place * PLACE; }
  __device__ __forceinline__ char* w(int place, int slab) const { return x(place) + X_BYTES + slab * Groups * SLAB; }
};

// ask(unit, chunk, place) for all chunks of the block's units in order, each as soon as its place is empty.
template <class Ask>
__device__ __forceinline__ void fill(const Units& units, const Ring& ring, int depth, Ask ask) {
  Turn turn{depth};
  for (int next = blockIdx.x; next < units.count; next += gridDim.x) {
    const Unit unit = units[next];
    for (int chunk = unit.begin; chunk < unit.end; chunk++, turn.advance()) {
      wait(ring.empty[turn.place], turn.parity ^ 1);
      ask(unit, chunk, turn.place);
    }
  }
}
