// Attention of one block: its share of the work, the copies into its ring, the softmax over its slots, and the joining of
// parts with those of other blocks.
//
// A block belongs to a pair of a tile of Rows queries and a KV head and takes a run of its splits. Where there are more
// blocks than pairs, equally long runs of a pair are worked on side by side, and the last few blocks to finish share the
// joining of the parts. A run that has the pair to itself joins its parts in turn, and a long prompt's joins every tile.
#pragma once

#include "arrival.cuh"
#include "attention_warp.cuh"

struct Arguments {
  const Act *q, *k_pages, *v_pages, *gate;
  const int* page_table;
  const Trees& forest;
  float* part_o;
  float2* part_ml;
  int* arrived;
  Act* out;
  int Hq, Hkv, P, M, Room, Splits, Ldg, Waiting;
  float scale;
};

constexpr bool QUARTERS = Rows == 16;  // four warps share 16 queries: a quarter of the slots' scores, a quarter of the columns
constexpr int WARPS = Rows == 128 ? 8 : 4, THREADS = WARPS * WARP;
constexpr bool AHEAD = QUARTERS && Stages >= 4;  // scores of the next slots are made beside weights and values of these
constexpr int STAGE = TILE * Dh;
constexpr int COLS = QUARTERS ? Dh / 4 : Dh, NV = COLS / 8;  // columns of a warp
constexpr int PITCH = TILE + 8;                              // of scores that warps exchange

// ---- the ring ---------------------------------------------------------------------------------------------------------

// Copies K and V of 64 slots after the other into the ring. A warp copies LINES rows of a panel at once, a lane the same
// word of EACH rows.
struct Feed {
  static constexpr int PANEL = Dh < 64 ? Dh : 64, WORDS = PANEL / 8, LINES = WARP / WORDS, EACH = TILE / (WARPS * LINES);
  const Act *k, *v;  // of the KV head
  const int* table;
  int P, pitch, old;  // old: slots that were there before the rows
  bf16* stages;
  unsigned inverse;  // (2^32 - 1) / P
  int key, stop, turn;         // the next slots, where they end, the next stage
  bool values;                 // K of them is under way already
  int own[EACH], ahead[EACH];  // where the lane's slots lie among all slots of the pool, -1 for none: of these and of the next

  __device__ __forceinline__ static int row(int j) {
    return int(threadIdx.x) / WARP * (TILE / WARPS) + int(threadIdx.x) % WARP / WORDS + LINES * j;
  }

  __device__ __forceinline__ int where(int slot) const {
    const int within = max(0, min(slot, stop - 1));
    int page = __umulhi(within, inverse), offset = within - page * P;  // or one page too few
    if (offset >= P) page++, offset -= P;
    const int place = table[page] * P + offset;
    return slot < stop ? place : -1;
  }

  __device__ __forceinline__ void begin(int from, int until) {
    key = from, stop = until, turn = 0, values = false, inverse = 0xffffffffu / unsigned(P);
#pragma unroll
    for (int j = 0; j < EACH; j++) own[j] = where(key + row(j)), ahead[j] = where(key + TILE + row(j));
  }

  // Starts the next copy, of 64 slots of K or V, zeros where no query sees one; after the last an empty one.
  __device__ __forceinline__ void next(const Queries<Rows>& query) {
    if (key < stop) {
      if (!values && key + TILE > old) {
#pragma unroll
        for (int j = 0; j < EACH; j++) {
          if (!query.any_sees(key + row(j))) own[j] = -1;
        }
      }
      const int col = int(threadIdx.x) % WORDS * 8;
      const Act* pages = (values ? v : k) + col;
      bf16* stage = stages + turn * STAGE;
#pragma unroll
      for (int j = 0; j < EACH; j++) {
        const Act* from = pages + (own[j] < 0 ? 0 : (long long)own[j] * pitch);
        bf16* to = stage + at<TILE, Dh>(row(j), col);
#pragma unroll
        for (int panel = 0; panel < Dh / PANEL; panel++) {
          cp_async16(to + panel * (TILE * PANEL), from + panel * PANEL, own[j] >= 0);
        }
      }
      if (values) {
        key += TILE;
#pragma unroll
        for (int j = 0; j < EACH; j++) own[j] = ahead[j], ahead[j] = where(key + TILE + row(j));
      }
      values = !values;
    }
    cp_async_commit();
    turn = turn + 1 == Stages ? 0 : turn + 1;
  }
};

// ---- parts and results ------------------------------------------------------------------------------------------------

// x sigmoid(gate)
__device__ __forceinline__ Act gated(float x, Act gate) {
  return from_float<Act>(__fdividef(x, 1.0f + __expf(-to_float(gate))));
}

// What one KV head of a tile of queries leaves in memory.
struct Ends {
  const Arguments& a;
  const Queries<Rows>& query;
  const QueryTile& tile;
  int head, Ratio;

  // Head `i % Ratio` of row i / Ratio for query j: its place among gate's and among out's heads.
  __device__ __forceinline__ long long gate_of(int j) const {
    const int i = tile.first + j;
    return (tile.q_row + i / Ratio) * (long long)a.Ldg + (head * Ratio + i % Ratio) * Dh;
  }
  __device__ __forceinline__ long long out_of(int j) const {
    const int i = tile.first + j;
    return ((tile.q_row + i / Ratio) * (long long)a.Hq + head * Ratio + i % Ratio) * Dh;
  }

  // The warp's part of a split, `skip` places behind each query's first.
  __device__ __forceinline__ void store_part(const Sum16<NV>& x, int row, int col, int skip) const {
    const int lane = threadIdx.x % WARP;
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const int place = query.place[row + 8 * h + lane / 4];
      if (place < 0) continue;
      float2* o = reinterpret_cast<float2*>(a.part_o + (long long)(place + skip) * Dh + col);
#pragma unroll
      for (int n = 0; n < NV; n++) o[4 * n + lane % 4] = float2{x.o[n][2 * h], x.o[n][2 * h + 1]};
      if (col == 0 && lane % 4 == 0) a.part_ml[place + skip] = float2{x.m[h], x.l[h]};
    }
  }

  // Joins x to the part that the lane stored last, whose maxima and sums are `kept`.
  __device__ __forceinline__ void join_stored(Sum16<NV>& x, float2 (&kept)[2], int row, int col) const {
    const int lane = threadIdx.x % WARP;
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const float2 factor = join_factors(kept[h].x, x.m[h]);
      x.m[h] = kept[h].x, x.l[h] = joined(kept[h].y, x.l[h], factor);
      const int place = query.place[row + 8 * h + lane / 4];
      if (place < 0) continue;
      const float2* o = reinterpret_cast<const float2*>(a.part_o + (long long)place * Dh + col);
#pragma unroll
      for (int n = 0; n < NV; n++) {
        const float2 before = o[4 * n + lane % 4];
        x.o[n][2 * h] = joined(before.x, x.o[n][2 * h], factor);
        x.o[n][2 * h + 1] = joined(before.y, x.o[n][2 * h + 1], factor);
      }
    }
  }

  __device__ __forceinline__ void store_result(const Sum16<NV>& x, int row, int col) const {
    const int lane = threadIdx.x % WARP;
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const int j = row + 8 * h + lane / 4, c = col + lane % 4 * 2;
      if (query.place[j] < 0) continue;
      const Act* gate = a.gate + gate_of(j) + c;
      Act* out = a.out + out_of(j) + c;
      const float scale = 1.0f / x.l[h];
      const bool pairs = reinterpret_cast<unsigned long long>(gate) % 4 == 0;
#pragma unroll
      for (int n = 0; n < NV; n++) {
        __nv_bfloat162 two;
        if (pairs) {
          two = *reinterpret_cast<const __nv_bfloat162*>(gate + 8 * n);
        } else {
          two.x = gate[8 * n], two.y = gate[8 * n + 1];
        }
        two.x = gated(x.o[n][2 * h] * scale, two.x), two.y = gated(x.o[n][2 * h + 1] * scale, two.y);
        *reinterpret_cast<__nv_bfloat162*>(out + 8 * n) = two;
      }
    }
  }

  static constexpr int EACH = Dh == 32 ? 1 : 2, STRIPS = Dh / (WARP * EACH);

  // Joins parts first .. first + count - 1 of each query; the warps of `ranks` blocks take turns, each with 32 EACH
  // columns of a query. room: 512 bytes of shared memory for each warp.
  __device__ void join_parts(int first, int count, int rank, int ranks, float4* room) const {
    struct alignas(4 * EACH) Columns {
      float v[EACH];
    };
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    room += warp * WARP;
    for (int strip = rank * WARPS + warp; strip < Rows * STRIPS; strip += ranks * WARPS) {
      const int j = strip / STRIPS, col = (strip % STRIPS * WARP + lane) * EACH;
      if (query.place[j] < 0) continue;
      const long long place = query.place[j] + (long long)first * a.Hq;
      const float* from = a.part_o + place * Dh + col;
      const auto by = load<EACH>(a.gate + gate_of(j) + col);
      float o[EACH] = {}, top = -inf(), l = 0.0f;
      for (int begin = 0; begin < count; begin += WARP) {
        float2 own = {-inf(), 0.0f};  // m and l of part begin + lane
        if (begin + lane < count) own = a.part_ml[place + (long long)(begin + lane) * a.Hq];
        Columns part[WARP];
#pragma unroll
        for (int p = 0; p < WARP; p++) {
          part[p] = *reinterpret_cast<const Columns*>(from + (long long)min(begin + p, count - 1) * a.Hq * Dh);
        }
        float until = own.x;  // the largest m up to this part
#pragma unroll
        for (int d = 1; d < WARP; d *= 2) until = fmaxf(until, __shfl_up_sync(ALL_LANES, until, d));
        float before = __shfl_up_sync(ALL_LANES, until, 1);
        before = lane == 0 ? top : fmaxf(before, top);
        const float2 factor = join_factors(before, own.x);
        top = __shfl_sync(ALL_LANES, before, WARP - 1);
        __syncwarp();
        room[lane] = float4{factor.x, factor.y, own.y, 0.0f};  // 1, 0 and 0 behind the last part
        __syncwarp();
#pragma unroll
        for (int p = 0; p < WARP; p++) {
          const float4 by_m = room[p];
          l = joined(l, by_m.z, float2{by_m.x, by_m.y});
#pragma unroll
          for (int e = 0; e < EACH; e++) o[e] = joined(o[e], part[p].v[e], float2{by_m.x, by_m.y});
        }
      }
      Pack<Act, EACH> y;
#pragma unroll
      for (int e = 0; e < EACH; e++) y.v[e] = gated(o[e] * (1.0f / l), by.v[e]);
      store<EACH>(a.out + out_of(j) + col, y);
    }
  }
};

// ---- the block --------------------------------------------------------------------------------------------------------

// arena: q, the ring, and what warps exchange
__device__ __forceinline__ void attend(const Arguments& a, uint4* arena) {
  __shared__ Queries<Rows> query;
  bf16 *q_tile = reinterpret_cast<bf16*>(arena), *stages = q_tile + Rows * Dh;
  float* exchange = reinterpret_cast<float*>(stages + Stages * STAGE);

  // The pair, long tiles first, and which of its `workers` blocks this is. What is read before after_previous() was there
  // before the pass began.
  query.clear();
  const int Ratio = a.Hq / a.Hkv;
  int pairs = 0, workers = 1;
  const QueryTile tile = find_tile(a.forest, Rows, Ratio, a.Room, a.Splits, a.M * a.P, [&](int tiles) {
    pairs = tiles * a.Hkv;
    workers = max(1, int(gridDim.x) / max(1, pairs));
    return int(blockIdx.x) < pairs * workers ? tiles - 1 - int(blockIdx.x) % pairs / a.Hkv : -1;
  });
  if (tile.step == 1) workers = 1;
  const int pair = tile.request < 0 ? 0 : blockIdx.x % pairs, worker = tile.request < 0 ? 0 : blockIdx.x / pairs;
  if (tile.request < 0 || worker >= workers) return after_previous();
  const int head = pair % a.Hkv;
  query.describe(a.forest, tile, Ratio, head, a.Hq);

  // Its run of splits: from the first that begins at or behind its share of the slots.
  const auto run_begin = [&](int w) {
    const int slot = int((long long)tile.end * w / workers);
    return slot == 0 ? 0 : min(tile.end, split_begin(split_of(slot - 1) + 1));
  };
  const int begin = run_begin(worker), stop = run_begin(worker + 1);
  __syncthreads();  // the queries are described
  const int* table = a.page_table + (long long)tile.request * a.M;
  Feed feed = {a.k_pages + head * Dh, a.v_pages + head * Dh, table, a.P, a.Hkv * Dh, tile.T, stages};
  feed.begin(begin, stop);
  int filled = 0;
  for (; filled < Stages - 1 && min(feed.key + TILE, stop) <= tile.T; filled++) feed.next(query);
  after_previous();
  for (; filled < Stages - 1; filled++) feed.next(query);

  // q, zero where there is no query
  const Ends ends = {a, query, tile, head, Ratio};
#pragma unroll 4
  for (int word = threadIdx.x; word < Rows * (Dh / 8); word += THREADS) {
    const int j = word / (Dh / 8), col = word % (Dh / 8) * 8;
    uint4 x = {0, 0, 0, 0};
    if (query.place[j] >= 0) x = *reinterpret_cast<const uint4*>(a.q + ends.out_of(j) + col);
    *reinterpret_cast<uint4*>(q_tile + at<Rows, Dh>(j, col)) = x;
  }

  const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
  const int row = QUARTERS ? 0 : 16 * warp, col = QUARTERS ? COLS * warp : 0;
  const int free = query.all_see(row);  // slots
  const float c = a.scale * LOG2_E;
  const bool in_turn = tile.queries > TREE_ROWS * Ratio;
  int edge = in_turn ? stop : worker == 0 ? SINGLE : split_begin(split_of(begin) + 1);  // where the part ends
  Sum16<NV> x;
  x.clear();
  bool stored = false;
  float2 kept[2];
  int turn = 0;
  const auto step = [&]() {
    cp_async_wait<AHEAD ? Stages - 4 : Stages - 2>();
    __syncthreads();  // what is used next is here, and all are done with what they used
    feed.next(query);
    if (AHEAD) feed.next(query);
  };
  const auto stage = [&]() {
    const bf16* next = stages + turn * STAGE;
    turn = turn + 1 == Stages ? 0 : turn + 1;
    return next;
  };
  const auto shared_scores = [&](int key) { return exchange + (AHEAD ? key / TILE % 2 * (16 * PITCH) : 0); };
  const auto quarter = [&](const bf16* k, int key) {  // of the scores, to all warps
    float own[2][4] = {}, *all = shared_scores(key);
    add_scores<Rows, Dh>(own, q_tile, 0, k, 16 * warp);
#pragma unroll
    for (int n = 0; n < 2; n++)
#pragma unroll
      for (int h = 0; h < 2; h++) {
        float* to = all + (lane / 4 + 8 * h) * PITCH + 16 * warp + 8 * n + lane % 4 * 2;
        *reinterpret_cast<float2*>(to) = float2{own[n][2 * h], own[n][2 * h + 1]};
      }
  };
  if constexpr (AHEAD) {
    cp_async_wait<Stages - 2>();
    __syncthreads();
    quarter(stage(), begin);
  }
  for (int key = begin; key < stop; key += TILE) {
    float s[NS][4] = {};
    if constexpr (!AHEAD) {
      step();
      const bf16* k = stage();
      if constexpr (QUARTERS) quarter(k, key);
      if constexpr (!QUARTERS) add_scores<Rows, Dh>(s, q_tile, row, k, 0);
    }
    step();
    const bf16* v = stage();
    if constexpr (QUARTERS) {
#pragma unroll
      for (int n = 0; n < NS; n++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
          const float* from = shared_scores(key) + (lane / 4 + 8 * h) * PITCH + 8 * n + lane % 4 * 2;
          const float2 two = *reinterpret_cast<const float2*>(from);
          s[n][2 * h] = two.x, s[n][2 * h + 1] = two.y;
        }
    }
    if (key + TILE > free) {
#pragma unroll
      for (int n = 0; n < NS; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
          if (!query.sees(row + lane / 4 + e / 2 * 8, key + 8 * n + lane % 4 * 2 + e % 2)) s[n][e] = -inf();
        }
    }
    if constexpr (AHEAD) quarter(stage(), key + TILE);  // of nothing behind the last
    x.add<Dh>(Weights(s, c), v, col);

    const bool last = key + TILE >= stop;
    if (!last && key + TILE < edge) continue;
    if (workers > 1) {
      ends.store_part(x, row, col, split_of(key) * a.Hq);
    } else {
      if (stored) ends.join_stored(x, kept, row, col);
      if (last) ends.store_result(x, row, col);
      if (!last) ends.store_part(x, row, col, 0);
      kept[0] = float2{x.m[0], x.l[0]}, kept[1] = float2{x.m[1], x.l[1]}, stored = true;
    }
    x.clear();
    edge = split_begin(split_of(key + TILE) + 1);
  }
  if (workers == 1) return;
  const int strips = min(Rows, tile.queries - tile.first) * Ends::STRIPS;
  const int ranks = min(min(workers, (strips + WARPS - 1) / WARPS), max(1, a.Waiting / pairs));
  const int rank = arrives_among_last(a.arrived + pair, workers, ranks);
  if (rank < 0) return;
  const int first = split_of(min(run_begin(1), SINGLE) - 1), count = split_of(tile.end - 1) + 1 - first;
  ends.join_parts(first, count, rank, ranks, reinterpret_cast<float4*>(stages));
}
