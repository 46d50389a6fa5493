// What the attention kernels share: tiles of queries, splits of the context, visibility, and the joining of two parts.
//
// A query is one query head of one row; the Ratio heads that read one KV head are neighbours, so that query i of a request
// is row i / Ratio, head i % Ratio of the group. A tile is up to Rows consecutive queries of one request.
// The context of a request is cut into splits at fixed slots. A row's part of a split is (o, m, l): o = sum 2^(s - m) v,
// l = sum 2^(s - m), m = max s, with s in base 2. Parts of one row are joined in the order of the splits, either by the
// block itself or, where blocks work side by side, by attention_join.cu: the result has the same bits.
#pragma once

#include "common.cuh"

constexpr int TREE_WORDS = 4;               // of an ancestor mask
constexpr int TREE_ROWS = 32 * TREE_WORDS;  // rows of a request whose splits may be worked on side by side
constexpr float LOG2_E = 1.4426950408889634f;

// ---- splits: 64 slots each up to 2048, then 16 for every doubling ---------------------------------------------------

__device__ __forceinline__ int split_of(int slot) {
  if (slot < 2048) return slot / 64;
  const int octave = 31 - __clz(slot / 2048);
  return 32 + 16 * octave + ((slot - (2048 << octave)) >> (7 + octave));
}

__device__ __forceinline__ int split_begin(int split) {
  if (split < 32) return split * 64;
  const int octave = (split - 32) / 16;
  return (2048 << octave) + ((split - 32) % 16 << (7 + octave));
}

// ---- parts -----------------------------------------------------------------------------------------------------------

// Factors of an earlier and of a later part in their sum; m becomes the common maximum.
__device__ __forceinline__ float2 join_factors(float& m, float later) {
  const float top = fmaxf(m, later);
  const float2 factor = {m == -inf() ? 0.0f : exp2f(m - top), later == -inf() ? 0.0f : exp2f(later - top)};
  m = top;
  return factor;
}

__device__ __forceinline__ float joined(float earlier, float later, float2 factor) {
  return fmaf(earlier, factor.x, __fmul_rn(later, factor.y));
}

// ---- tiles -----------------------------------------------------------------------------------------------------------

struct Trees {
  const int* rows;            // [Rq] or null
  const int* request;         // [R]
  const unsigned* ancestors;  // [R, TREE_WORDS]
  const int* chain;           // [B]
  const int* start;           // [B+1]
  const int* committed;       // [B]
  int B;
};

struct Tile {
  int request;  // -1: nothing to do
  int q_row;    // row of q of the request's query 0
  int row;      // its row in the forest
  int first;    // the tile's first query
  int queries;  // of the request
  int start;    // of the request's rows in the forest
  int T;        // its committed tokens
  int chain;    // 1: each row sees all rows before it
  int end;      // slots to look at
  int part;     // first part of the request's row 0
  int step;     // from a row's first part to the next row's: number of its parts
};

// x of all threads before this one, added up. At most 8 full warps.
__device__ __forceinline__ int2 block_before(int2 x) {
  __shared__ int2 total[8];
  const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
  int2 sum = x;
  for (int d = 1; d < WARP; d *= 2) {
    const int tiles = __shfl_up_sync(ALL_LANES, sum.x, d), rows = __shfl_up_sync(ALL_LANES, sum.y, d);
    if (lane >= d) sum = int2{sum.x + tiles, sum.y + rows};
  }
  if (lane == WARP - 1) total[warp] = sum;
  __syncthreads();
  for (int w = 0; w < warp; w++) sum = int2{sum.x + total[w].x, sum.y + total[w].y};
  return int2{sum.x - x.x, sum.y - x.y};
}

// The request's parts: `Splits` a row while its rows, of which `before` are taken, fit into Room, else one a row.
__device__ __forceinline__ void place_parts(Tile& tile, int N, int before, int Room, int Splits) {
  const bool side_by_side = N <= TREE_ROWS && before + N <= Room;
  tile.step = side_by_side ? Splits : 1;
  tile.part = side_by_side ? before * Splits : Room * Splits + tile.q_row;
}

// The index-th tile of `Rows` queries. All threads together; every thread gets the same. With a request a thread or fewer
// all that it reads lies one wait away.
__device__ __forceinline__ Tile find_tile(const Trees& f, int index, int Rows, int Ratio, int Room, int Splits, int Slots) {
  __shared__ Tile found;
  if (threadIdx.x == 0) found.request = -1;
  if (f.rows != nullptr) {
    const int a_row = (Ratio + Rows - 1) / Rows, i = index / a_row, row = f.rows[i];
    const int b = row < 0 ? -1 : f.request[row];
    if (threadIdx.x == 0 && b >= 0) {
      found = Tile{b, i, row, index % a_row * Rows, Ratio, f.start[b], f.committed[b], f.chain[b], 0, 0, 0};
      found.end = min(found.T + row - found.start + 1, Slots);
      place_parts(found, 1, i, Room, Splits);
    }
  } else {
    const int each = (f.B + blockDim.x - 1) / blockDim.x, lo = min(f.B, int(threadIdx.x) * each);
    const int hi = min(f.B, lo + each), T = lo < hi ? f.committed[lo] : 0, chain = lo < hi ? f.chain[lo] : 0;
    int2 mine = {0, 0};  // tiles, and rows that may have room for many parts
    for (int b = lo; b < hi; b++) {
      const int N = f.start[b + 1] - f.start[b];
      mine.x += (N * Ratio + Rows - 1) / Rows;
      mine.y += N <= TREE_ROWS ? N : 0;
    }
    int2 before = block_before(mine);
    if (before.x <= index && index < before.x + mine.x) {
      for (int b = lo;; b++) {
        const int start = f.start[b], N = f.start[b + 1] - start, tiles = (N * Ratio + Rows - 1) / Rows;
        if (index < before.x + tiles) {
          const int first = (index - before.x) * Rows;
          found = Tile{b, start, start, first, N * Ratio, start, T, chain, 0, 0, 0};
          if (b > lo) found.T = f.committed[b], found.chain = f.chain[b];
          place_parts(found, N, before.y, Room, Splits);
          const int nodes = found.chain && found.step == 1 ? min(N, (first + Rows - 1) / Ratio + 1) : N;
          found.end = min(found.T + nodes, Slots);
          break;
        }
        before = int2{before.x + tiles, before.y + (N <= TREE_ROWS ? N : 0)};
      }
    }
  }
  __syncthreads();
  return found;
}

// ---- queries and what they see --------------------------------------------------------------------------------------

// Of a tile's queries, in shared memory: place of its first part among part_o, -1 where there is no query; its row in
// the request; its ancestors. `seen` and `last` say what any query of the tile sees of the tree.
template <int Rows>
struct Queries {
  int place[Rows];
  int node[Rows];
  unsigned ancestors[Rows][TREE_WORDS];
  unsigned seen[TREE_WORDS];
  int last, T, chain;

  // Before find_tile, whose barriers make it known.
  __device__ void clear() {
    if (threadIdx.x < TREE_WORDS) seen[threadIdx.x] = 0;
    if (threadIdx.x == 0) last = -1;
  }

  // All threads together, at least Rows of them. The caller's next barrier makes it readable.
  __device__ void describe(const Trees& f, const Tile& tile, int Ratio, int Hq) {
    const int j = threadIdx.x, i = tile.first + j, row = tile.row + i / Ratio;
    if (j == 0) T = tile.T, chain = tile.chain;
    if (j >= Rows) return;
    int b = -1;
    unsigned mask[TREE_WORDS] = {};
    if (i < tile.queries) {
      b = f.request[row];
#pragma unroll
      for (int w = 0; w < TREE_WORDS; w++) mask[w] = f.ancestors[(long long)row * TREE_WORDS + w];
    }
    const bool used = b == tile.request;
    const int head = int(blockIdx.y) * Ratio + i % Ratio;
    place[j] = used ? (tile.part + i / Ratio * tile.step) * Hq + head : -1;
    node[j] = used ? row - tile.start : -1;
    if (used) atomicMax(&last, node[j]);
#pragma unroll
    for (int w = 0; w < TREE_WORDS; w++) {
      ancestors[j][w] = used ? mask[w] : 0;
      if (ancestors[j][w]) atomicOr(&seen[w], ancestors[j][w]);
    }
  }

  // Whether query j sees a slot; a slot that it sees was written.
  __device__ bool sees(int j, int slot) const {
    if (slot < T) return true;
    const int a = slot - T;
    return chain ? a <= node[j] : a < TREE_ROWS && ancestors[j][a / 32] >> a % 32 & 1;
  }

  // Whether any of them sees it.
  __device__ bool any_sees(int slot) const {
    if (slot < T) return true;
    const int a = slot - T;
    return chain ? a <= last : a < TREE_ROWS && seen[a / 32] >> a % 32 & 1;
  }
};

// Where each row's parts lie and how many they are, for attention_join.cu: written by one block for each tile.
__device__ __forceinline__ void write_parts(const Tile& tile, int Rows, int Ratio, int count, int* parts) {
  const int i = tile.first + threadIdx.x;
  if (parts == nullptr || blockIdx.y || blockIdx.z || threadIdx.x >= Rows || i >= tile.queries) return;
  if (threadIdx.x && i % Ratio) return;  // once a row
  int* out = parts + 2ll * (tile.q_row + i / Ratio);
  out[0] = tile.part + i / Ratio * tile.step;
  out[1] = count;
}
