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

constexpr int SPLIT = 64;     // slots: all splits begin and end at multiples of it
constexpr int SINGLE = 2048;  // up to here each split is as long as that

__device__ __forceinline__ int split_of(int slot) {
  if (slot < SINGLE) return slot / SPLIT;
  const int octave = 31 - __clz(slot / SINGLE);
  return 32 + 16 * octave + ((slot - (SINGLE << octave)) >> (7 + octave));
}

__device__ __forceinline__ int split_begin(int split) {
  if (split < 32) return split * SPLIT;
  const int octave = (split - 32) / 16;
  return (SINGLE << octave) + ((split - 32) % 16 << (7 + octave));
}

// ---- parts -----------------------------------------------------------------------------------------------------------

// 2^x, 0 below 2^-126
__device__ __forceinline__ float power2(float x) {
#ifdef EMULATED
  return exp2f(x);
#else
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#endif
}

// Factors of an earlier and of a later part in their sum; m becomes the common maximum. A part without slots is zero.
__device__ __forceinline__ float2 join_factors(float& m, float later) {
  const float top = fmaxf(m, later);
  const float2 factor = {m == top ? 1.0f : power2(m - top), later == top ? 1.0f : power2(later - top)};
  m = top;
  return factor;
}

__device__ __forceinline__ float joined(float earlier, float later, float2 factor) {
  return fmaf(later, factor.y, __fmul_rn(earlier, factor.x));
}

// ---- tiles -----------------------------------------------------------------------------------------------------------

struct Trees {
  const int* rows;            // [Rq] or null
  const int* request;         // [R]
  const unsigned* ancestors;  // [R, TREE_WORDS]
  const int* chain;           // [B]
  const int* start;           // [B+1]
  const int* committed;       // [B]
  int B, Rq;
};

struct QueryTile {
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

// The request's parts: `Splits` a row while its rows, of which `before` are taken, fit into Room, else one a row.
__device__ __forceinline__ void place_parts(QueryTile& tile, int N, int before, int Room, int Splits) {
  const bool side_by_side = N <= TREE_ROWS && before + N <= Room;
  tile.step = side_by_side ? Splits : 1;
  tile.part = side_by_side ? before * Splits : Room * Splits + tile.q_row;
}

// Of the tiles of `Rows` queries, those of the earliest request or entry of `rows` first, the one whose number choose(how
// many there are) gives. Each warp finds it for itself, from what was there before the pass began. Where Class is not 0,
// rows of a tile lie between the same multiples of Class slots, and a tile ends at its last row's slot.
template <int Class = 0, class Choose>
__device__ __forceinline__ QueryTile find_tile(
    const Trees& f, int Rows, int Ratio, int Room, int Splits, int Slots, Choose choose) {
  struct Entry {
    int N, T, chain, start;  // N: rows that attend together; the others without `rows` only
  };
  const int lane = threadIdx.x % WARP, count = f.rows == nullptr ? f.B : f.Rq, each = (count + WARP - 1) / WARP;
  const int lo = min(count, lane * each), hi = min(count, lo + each);
  const auto read = [&](int i) {
    if (f.rows == nullptr) {
      const int start = __ldcg(f.start + i);
      return Entry{__ldcg(f.start + i + 1) - start, __ldcg(f.committed + i), __ldcg(f.chain + i), start};
    }
    const int row = __ldcg(f.rows + i);
    return Entry{row >= 0 && __ldcg(f.request + row) >= 0 ? 1 : 0};
  };
  const auto cut_of = [&](Entry e) { return Class && e.N <= TREE_ROWS ? min(e.N, Class - e.T % max(Class, 1)) : e.N; };
  const auto in_tiles = [&](int N) { return (N * Ratio + Rows - 1) / Rows; };
  const auto tiles_of = [&](Entry e) { return in_tiles(cut_of(e)) + in_tiles(e.N - cut_of(e)); };
  const auto room_of = [&](Entry e) { return e.N <= TREE_ROWS ? e.N : 0; };  // rows that may have room for many parts
  int tiles = 0, rows = 0;
  Entry own = {};
#pragma unroll 1
  for (int i = lo; i < hi; i++) {
    own = read(i);
    tiles += tiles_of(own), rows += room_of(own);
  }
  int tiles_upto = tiles, rows_upto = rows;
#pragma unroll 1
  for (int d = 1; d < WARP; d *= 2) {
    const int t = __shfl_up_sync(ALL_LANES, tiles_upto, d), r = __shfl_up_sync(ALL_LANES, rows_upto, d);
    if (lane >= d) tiles_upto += t, rows_upto += r;
  }
  const int index = choose(__shfl_sync(ALL_LANES, tiles_upto, WARP - 1));
  const unsigned owner = __ballot_sync(ALL_LANES, tiles_upto - tiles <= index && index < tiles_upto);
  if (owner == 0) return {-1};
  const int from = __ffs(owner) - 1;
  const auto of_owner = [&](int x) { return __shfl_sync(ALL_LANES, x, from); };
  tiles = of_owner(tiles_upto - tiles), rows = of_owner(rows_upto - rows);
  own = {of_owner(own.N), of_owner(own.T), of_owner(own.chain), of_owner(own.start)};
  int i = from * each;
  if (each > 1) {
    own = read(i);
#pragma unroll 1
    for (; index >= tiles + tiles_of(own); own = read(++i)) tiles += tiles_of(own), rows += room_of(own);
  }

  int b = i, row = own.start;
  if (f.rows != nullptr) {
    row = __ldcg(f.rows + i), b = __ldcg(f.request + row);
    own = {1, __ldcg(f.committed + b), __ldcg(f.chain + b), __ldcg(f.start + b)};
  }
  const int N = own.N, T = own.T, start = own.start, chain = own.chain;
  QueryTile tile = {b, f.rows == nullptr ? row : i, row, (index - tiles) * Rows, N * Ratio, start, T, chain};
  place_parts(tile, N, rows, Room, Splits);
  const int cut = cut_of(own), behind = index - tiles - in_tiles(cut);
  if (behind < 0) tile.queries = cut * Ratio;
  if (behind >= 0) tile.first = cut * Ratio + behind * Rows;
  const bool short_end = Class ? true : chain && tile.step == 1;
  const int nodes = short_end ? min(tile.queries / Ratio, (tile.first + Rows - 1) / Ratio + 1) : N;
  tile.end = min(T + (f.rows == nullptr ? nodes : row - start + 1), Slots);
  return tile;
}

// The same where each of up to 128 requests has one row or none, whose heads fit into a tile.
template <class Choose>
__device__ __forceinline__ QueryTile find_row(const Trees& f, int Ratio, int Room, int Splits, int Slots, Choose choose) {
  constexpr int GROUPS = 4;  // of WARP requests, read at once
  const int lane = threadIdx.x % WARP;
  int row[GROUPS], T[GROUPS], count = 0;
  unsigned used[GROUPS];
#pragma unroll
  for (int g = 0; g < GROUPS; g++) {
    const int b = g * WARP + lane;
    used[g] = 0, row[g] = T[g] = 0;
    if (b >= f.B) continue;
    row[g] = __ldcg(f.start + b), T[g] = __ldcg(f.committed + b), used[g] = __ldcg(f.start + b + 1) > row[g];
  }
#pragma unroll
  for (int g = 0; g < GROUPS; g++) {
    if (g * WARP < f.B) used[g] = __ballot_sync(ALL_LANES, used[g]);
    count += __popc(used[g]);
  }
  const int index = choose(count);
  if (index < 0 || index >= count) return {-1};
  QueryTile tile = {};
  int before = 0;
#pragma unroll
  for (int g = 0; g < GROUPS; g++) {
    const int behind = index - before, here = __popc(used[g]);
    before += here;
    if (behind < 0 || behind >= here) continue;
    const bool own = used[g] >> lane & 1 && __popc(used[g] << (WARP - 1 - lane)) == behind + 1;
    const int from = __ffs(__ballot_sync(ALL_LANES, own)) - 1;
    tile.request = g * WARP + from;
    tile.row = __shfl_sync(ALL_LANES, row[g], from), tile.T = __shfl_sync(ALL_LANES, T[g], from);
  }
  tile.q_row = tile.start = tile.row, tile.queries = Ratio, tile.chain = 1, tile.end = min(tile.T + 1, Slots);
  place_parts(tile, 1, index, Room, Splits);
  return tile;
}

// ---- queries and what they see --------------------------------------------------------------------------------------

// Of a tile's queries, in shared memory: place of its first part among part_o, -1 where there is no query; its row in
// the request; its ancestors. `seen` and `last` say what any query of the tile sees of the tree.
template <int Rows>
struct Queries {
  int place[Rows];
  int node[Rows];
  alignas(16) unsigned ancestors[Rows][TREE_WORDS];
  unsigned seen[TREE_WORDS];
  int last, T, chain;

  // A barrier has to follow before describe().
  __device__ void clear() {
    if (threadIdx.x < TREE_WORDS) seen[threadIdx.x] = 0;
    if (threadIdx.x == 0) last = -1;
  }

  // Of the query heads of a KV head; parts of neighbouring heads are `Apart` parts apart. All threads together, at least
  // Rows of them. The caller's next barrier makes it readable.
  __device__ void describe(const Trees& f, const QueryTile& tile, int Ratio, int kv_head, int Hq, int Apart = 1) {
    const int j = threadIdx.x, i = tile.first + j, row = tile.row + i / Ratio;
    if (j == 0) T = tile.T, chain = tile.chain;
    if (j >= Rows) return;
    int b = -1;
    unsigned mask[TREE_WORDS] = {};
    if (i < tile.queries) {
      b = __ldcg(f.request + row);
#pragma unroll
      for (int w = 0; w < TREE_WORDS; w++) mask[w] = __ldcg(f.ancestors + (long long)row * TREE_WORDS + w);
    }
    const bool used = b == tile.request;
    const int head = kv_head * Ratio + i % Ratio;
    place[j] = used ? (tile.part + i / Ratio * tile.step) * Hq + head * Apart : -1;
    node[j] = used ? row - tile.start : -1;
    if (used) atomicMax(&last, node[j]);
#pragma unroll
    for (int w = 0; w < TREE_WORDS; w++) {
      ancestors[j][w] = used ? mask[w] : 0;
      if (ancestors[j][w]) atomicOr(&seen[w], ancestors[j][w]);
    }
  }

  // The same for a tile of find_row, whose heads are its queries.
  __device__ void describe_row(const QueryTile& tile, int Ratio, int kv_head, int Hq, int Apart) {
    const int j = threadIdx.x;
    if (j == 0) T = tile.T, chain = 1, last = 0;
    if (j >= Rows) return;
    place[j] = j < Ratio ? tile.part * Hq + (kv_head * Ratio + j) * Apart : -1;
    node[j] = j < Ratio ? 0 : -1;
  }

  // Slots that all of 16 queries from `row` on see, at least. By one warp.
  __device__ int all_see(int row) const {
    const int lane = threadIdx.x % WARP, own = lane < 16 && place[row + lane] >= 0 ? node[row + lane] : 0x7fffffff;
    const int least = __reduce_min_sync(ALL_LANES, own);
    return T + (chain && least < 0x7fffffff ? least + 1 : 0);
  }

  // Slots that each some query sees, at least.
  __device__ int all_seen() const { return T + (chain ? last + 1 : 0); }

  // Whether query j sees a slot; a slot that it sees was written.
  __device__ bool sees(int j, int slot) const {
    if (slot < T) return true;
    const int a = slot - T;
    return chain ? a <= node[j] : a < TREE_ROWS && ancestors[j][a / 32] >> a % 32 & 1;
  }

  // Which of the 64 slots from `key` on query j sees, the first one in the lowest bit.
  __device__ unsigned long long visible(int j, int key) const {
    const auto first = [](int n) { return n >= 64 ? ~0ull : (1ull << max(n, 0)) - 1; };
    const int old = T - key;
    if (old >= 64 || chain) return first(old >= 64 ? 64 : old + node[j] + 1);
    const uint4 words = *reinterpret_cast<const uint4*>(ancestors[j]);
    const unsigned long long low = words.x | (unsigned long long)words.y << 32;
    const unsigned long long high = words.z | (unsigned long long)words.w << 32;
    if (old > 0) return low << old | first(old);
    if (old <= -64) return old <= -128 ? 0 : high >> (-old - 64);
    return old == 0 ? low : low >> -old | high << (64 + old);
  }

  // Whether any of them sees it.
  __device__ bool any_sees(int slot) const {
    if (slot < T) return true;
    const int a = slot - T;
    return chain ? a <= last : a < TREE_ROWS && seen[a / 32] >> a % 32 & 1;
  }
};

// Where each row's parts lie and how many they are, for attention_join.cu: written by one block for each tile.
__device__ __forceinline__ void write_parts(const QueryTile& tile, int Rows, int Ratio, int count, int* parts) {
  const int i = tile.first + threadIdx.x;
  if (parts == nullptr || blockIdx.y || blockIdx.z || threadIdx.x >= Rows || i >= tile.queries) return;
  if (threadIdx.x && i % Ratio) return;  // once a row
  int* out = parts + 2ll * (tile.q_row + i / Ratio);
  out[0] = tile.part + i / Ratio * tile.step;
  out[1] = count;
}
