// x w^T on tensor cores of sm_90a (wgmma), of bf16, or of FP8 w and x as split_rows.cu leaves it; or of its halves
// silu(gate) * up; or of two matrices, the second result in float. Definitions: linear, gated_linear, linear_pair, head in
// boleinfer/ops/linear.py. Sums in float32; Gated rounds them to Out before it goes on, as linear does. Of rows with
// use = 2 only the largest result is kept, with its feature.
//
// Sums are made in the order of ranges.cuh. FP8 blocks of 128 k are summed on their own, then scaled and added up.
//
// A tile of out is Rows rows and 64 rows of w for each of Groups warpgroups; for Gated those are rows of gate and of up in
// turn. The tiles of w_more come behind those of w. The first Whole tiles of features are a unit each; the ranges of the
// others are shared by Parts units. Of the warps that own the same features those Ranks that end last wait for one another
// and join the sums of some rows each. Blocks of a cluster have the same k at the same time: each reads its share of the
// rows of x for all of them. Its last tiles may lie behind the matrices, where zeros are read and nothing is written.
//
// Weights pass through L2 as what goes first, so that the codes and small arrays of all other kernels stay there: 0.8B's
// step took 4 % longer without (H200, 2026-11-30).
//
// grid: one block a multiprocessor, at most; a block takes every gridDim.x-th unit. block: a warpgroup for 64 rows of w
// each, and one that asks, the first thread of a warp for tiles of w and that of the next for x. Depth places of a ring
// hold a chunk of w and x; it is filled with w before x is there.
// shared: 1 KB + Depth * (8 KB * Groups + 128 bytes * Rows, twice for FP8); 640 bytes a warp. Read twice:
// x, by every cluster (L2), w by every tile of rows.
//
// arch: 90a
// spills: at 128 rows, once a tile, outside the loops: sums take nearly all registers
// sizes: Wt=bf16 Out=bf16 Rows=8,64 Groups=3 Gated=0 | Wt=bf16 Out=float Rows=16,128 Groups=3 Gated=0 | Wt=bf16 Out=bf16 Rows=8,32,128 Groups=3 Gated=1 | Wt=fp8 Out=bf16 Rows=8,64 Groups=3 Gated=0 | Wt=fp8 Out=bf16 Rows=8,64 Groups=3 Gated=1
#include "arrival.cuh"
#include "largest.cuh"
#include "ranges.cuh"
#include "tma.cuh"
#include "wgmma.cuh"

constexpr int ROW_BYTES = 128, SLAB = 64 * ROW_BYTES;  // of a tile in shared memory; of 64 rows
constexpr int K = ROW_BYTES / sizeof(Wt), X_TILES = K / 64;  // k of a chunk; tiles of x in it
constexpr int SCALED = 128;                                  // features, and k, of one FP8 scale
constexpr int WARPS = 4 * Groups, HALVES = 1 + Gated;         // WARPS: that multiply
constexpr int RESULTS = 64 * Groups / HALVES;                // features of out in a tile
constexpr int X_TILE = Rows * ROW_BYTES, X_BYTES = X_TILES * X_TILE, W_BYTES = Groups * SLAB;
constexpr int PLACE = X_BYTES + W_BYTES;
constexpr int SUMS = Rows / 2, QUADS = SUMS / 4;  // of a lane; fours of them, for eight rows each
constexpr int TOGETHER = QUADS < 4 ? QUADS : 4;   // of these, joined at a time
constexpr int MOST = 24;                          // places of a ring

// Whether warps that multiply need registers of those that ask, and whether two blocks fit on a multiprocessor.
constexpr bool HUNGRY = Groups == 3 && Rows * 2 / sizeof(Wt) > 64, TWO_FIT = Rows * 2 / sizeof(Wt) <= 16;

// A piece of work: ranges first .. last - 1 of a tile.
struct Unit {
  int row, tile, first, last;
};

// All units, tiles of rows first.
struct Units {
  int row_tiles, whole, parts, cluster, count;

  __device__ __forceinline__ Unit operator[](int i) const {
    const int row = i % row_tiles * Rows, u = i / row_tiles;
    if (u < whole) return {row, u, 0, RANGES};
    const int v = (u - whole) / cluster, part = v % parts;
    return {row, whole + v / parts * cluster + (u - whole) % cluster, part * RANGES / parts, (part + 1) * RANGES / parts};
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

  __device__ __forceinline__ char* x(int place) const { return places + place * PLACE; }
  __device__ __forceinline__ char* w(int place) const { return x(place) + X_BYTES; }
};

// ask(unit, chunk, turn) for all chunks of the block's units in order, each as soon as its place is empty.
template <class Ask>
__device__ __forceinline__ void fill(const Units& units, int chunks, const Ring& ring, int depth, Ask ask) {
  Turn turn{depth};
  for (int next = blockIdx.x; next < units.count; next += gridDim.x) {
    const Unit unit = units[next];
    for (int chunk = range_start(unit.first, chunks); chunk < range_start(unit.last, chunks); chunk++, turn.advance()) {
      wait(ring.empty[turn.place], turn.parity ^ 1);
      ask(unit, chunk, turn);
    }
  }
}

// sum = w x^T over chunks begin .. end - 1, one at least, of bf16 w.
__device__ __forceinline__ void multiply(float (&sum)[SUMS], int begin, int end, const Ring& ring, Turn& turn) {
  const int lane = threadIdx.x % WARP, own = threadIdx.x / WARP / 4 * SLAB;
  int held = 0;
  for (int chunk = begin; chunk < end; chunk++, turn.advance()) {
    wait(ring.full[turn.place], turn.parity);
    wgmma_begin();
#pragma unroll
    for (int i = 0; i < 4; i++) {
      wgmma(sum, Tile(ring.w(turn.place) + own), Tile(ring.x(turn.place)), i, i || chunk > begin);
    }
    wgmma_end();
    if (chunk > begin) {
      wgmma_wait<1>();
      if (lane == 0) arrive(ring.empty[held]);
    }
    held = turn.place;
  }
  wgmma_wait<0>();
  if (lane == 0) arrive(ring.empty[held]);
}

// The same of FP8 w and split x; scale: of the lane's features g and g + 8, one for each chunk; inverse: of the lane's
// first rows, Pad numbers for each chunk. Tensor cores keep some 14 bits while they add up E4M3 products, so each chunk
// begins anew.
template <int S>
__device__ __forceinline__ void multiply_scaled(
    float (&sum)[S], const float* const (&scale)[2], const float* inverse, int Pad, int begin, int end, const Ring& ring,
    Turn& turn) {
  constexpr int AT_ONCE = Rows > 32 ? 1 : 2;  // of hi and lo, as registers allow
  const int lane = threadIdx.x % WARP, own = threadIdx.x / WARP / 4 * SLAB;
#pragma unroll
  for (int i = 0; i < S; i++) sum[i] = 0.0f;
  for (int chunk = begin; chunk < end; chunk++, turn.advance()) {
    const float factor[2] = {scale[0][chunk], scale[1][chunk]};
    float2 unit_of[QUADS];
#pragma unroll
    for (int n = 0; n < QUADS; n++) unit_of[n] = *reinterpret_cast<const float2*>(inverse + chunk * Pad + 8 * n);
    wait(ring.full[turn.place], turn.parity);
#pragma unroll
    for (int part = 0; part < 2; part += AT_ONCE) {
      float block[AT_ONCE * S];
      wgmma_begin();
#pragma unroll
      for (int i = 0; i < 4; i++) {
        wgmma_e4m3(block, Tile(ring.w(turn.place) + own), Tile(ring.x(turn.place) + part * X_TILE), i, i);
      }
      wgmma_end();
      wgmma_wait<0>();
      if (part + AT_ONCE == 2 && lane == 0) arrive(ring.empty[turn.place]);
#pragma unroll
      for (int i = 0; i < AT_ONCE * S; i++) {
        const int j = i % S, p = i / S;
        const float unit = (part + p ? 1.0f / 32 : 1.0f) * (j % 2 ? unit_of[j / 4].y : unit_of[j / 4].x);
        sum[j] = fmaf(factor[j / 2 % 2] * unit, block[i], sum[j]);
      }
    }
  }
}

constexpr int TO_NEXT = WARPS * QUADS * WARP;  // fours from one sum of a cut tile to the next

// Keeps a sum of a cut tile for the warps that join it; to: the lane's place.
__device__ __forceinline__ void keep(const float (&sum)[SUMS], float4* to) {
#pragma unroll
  for (int n = 0; n < QUADS; n++) {
    __stcg(to + n * WARP, make_float4(sum[4 * n], sum[4 * n + 1], sum[4 * n + 2], sum[4 * n + 3]));
  }
}

// sum = all `count` sums that were kept of a tile, added up in order, of fours from the first of the lane's place on; of
// those behind `fours` zeros.
template <int S>
__device__ __forceinline__ void add_kept(float (&sum)[S], const float4* kept, int count, int fours) {
#pragma unroll
  for (int i = 0; i < S; i++) sum[i] = 0.0f;
#pragma unroll 4
  for (int s = 0; s < count; s++) {
#pragma unroll
    for (int n = 0; n < S / 4; n++) {
      if (n >= fours) continue;
      const float4 one = __ldcg(kept + s * TO_NEXT + n * WARP);
      sum[4 * n] += one.x, sum[4 * n + 1] += one.y, sum[4 * n + 2] += one.z, sum[4 * n + 3] += one.w;
    }
  }
}

// The next N numbers of a row, or as many as exist.
template <int N, class T>
__device__ __forceinline__ void store(T* to, const float* numbers, int exist) {
  struct alignas(N * sizeof(T)) Some {
    T v[N];
  } some;
#pragma unroll
  for (int i = 0; i < N; i++) some.v[i] = from_float<T>(numbers[i]);
  if (exist >= N && reinterpret_cast<unsigned long long>(to) % sizeof(Some) == 0) {
    *reinterpret_cast<Some*>(to) = some;
  } else {
#pragma unroll
    for (int i = 0; i < N; i++) {
      if (i < exist) to[i] = some.v[i];
    }
  }
}

// The warp's features of a tile, from `feature` of `width` on, and rows from `row` on up to `end`: those that are read.
// They are turned, eight rows at a time, so that neighbouring lanes have neighbouring features. For Gated, lanes of even g
// have gates and those after them up of two features, and each goes on with one of the two.
template <class T, int S>
__device__ __forceinline__ void write(
    T* out, const int* use, const float (&sum)[S], float (&turned)[8][20], int row, int end, int feature, int width) {
  constexpr int N = 4 / HALVES;  // features of a lane
  const int g = threadIdx.x % WARP / 4, t = threadIdx.x % 4, own = feature + N * t;
  out += (long long)(row + g) * width + own;
#pragma unroll
  for (int n = 0; n < S / 4; n++, out += 8ll * width) {
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const float low = sum[4 * n + i], high = sum[4 * n + 2 + i];
      if constexpr (Gated) {
        const float other = __shfl_xor_sync(ALL_LANES, g % 2 ? low : high, 4);
        const float gate = g % 2 ? other : low, up = g % 2 ? high : other;
        turned[2 * t + i][g / 2 + g % 2 * 4] = silu(to_float(from_float<Out>(gate))) * to_float(from_float<Out>(up));
      } else {
        turned[2 * t + i][g] = low, turned[2 * t + i][g + 8] = high;
      }
    }
    __syncwarp();
    const bool read = row + 8 * n + g < end && (use == nullptr || use[row + 8 * n + g] == ALL);
    if (read && own < width) store<N>(out, turned[g] + N * t, width - own);
  }
}

// The largest of these results and their features, of the rows of which only that is asked for. Lanes of the same t find
// those of up to eight rows together, and then each takes one.
template <int S>
__device__ __forceinline__ void raise(
    Largest* largest, const int* use, const unsigned char* allowed, const float (&sum)[S], int row, int end,
    int feature, int width) {
  constexpr int OF_LANE = S / 2;  // rows of which a lane has results
  const int g = threadIdx.x % WARP / 4, t = threadIdx.x % 4, low = feature + g, high = low + 8;
  const bool has_low = low < width && (!allowed || allowed[low]), has_high = high < width && (!allowed || allowed[high]);
  Largest mine = 0;
#pragma unroll
  for (int i = 0; i < OF_LANE; i++) {
    const float* at = sum + i / 2 * 4 + i % 2;
    Largest most = max(has_low ? largest_of(at[0], low) : 0, has_high ? largest_of(at[2], high) : 0);
#pragma unroll
    for (int lane = 4; lane < WARP; lane *= 2) most = max(most, __shfl_xor_sync(ALL_LANES, most, lane));
    if (i % 8 == g) mine = most;
    if (i % 8 == min(7, OF_LANE - 1)) {
      const int taken = i / 8 * 8 + g, own = row + taken / 2 * 8 + 2 * t + taken % 2;
      if (taken < OF_LANE && own < end && use[own] == LARGEST && mine > __ldcg(largest + own)) {
        atomicMax(largest + own, mine);
      }
    }
  }
}

// Where results go.
struct Results {
  Out* out;
  float* more;
  const int* use;
  const unsigned char* allowed;
  Largest* largest;
  int w_tiles, width, more_width;

  // Of a tile, in rows from `row` on up to `end`.
  template <int S>
  __device__ __forceinline__ void put(const float (&sum)[S], float (&turned)[8][20], int tile, int row, int end) const {
    const int first = threadIdx.x / WARP * (16 / HALVES);
    if (tile < w_tiles) {
      const int feature = tile * RESULTS + first;
      write(out, use, sum, turned, row, end, feature, width);
      if (sizeof(Out) == 4 && largest) raise(largest, use, allowed, sum, row, end, feature, width);
    } else {
      write(more, nullptr, sum, turned, row, end, (tile - w_tiles) * RESULTS + first, more_width);
    }
  }
};

extern "C" __global__ void __launch_bounds__(WARP * (WARPS + 4), TWO_FIT ? 2 : 1) linear_hopper(
    const __grid_constant__ TensorMap<const Wt> w,  // [Width, 1 + Gated, Din] strides [Din, Width * Din, 1] box [64 * Groups / (1 + Gated), 1 + Gated]
    const __grid_constant__ TensorMap<const Wt> w_more,  // [More, 1, Din] box [64 * Groups, 1] or null
    const __grid_constant__ TensorMap<const Wt> x,       // [Xr, Din] strides [Ldx, 1] box [Rows / Cluster]
    const float* inverse,           // [(Din + 127) / 128, Pad] or null; 1 / s of x, for FP8 w
    const float* __restrict__ scale,  // [((1 + Gated) * Width + 127) / 128, (Din + 127) / 128] or null; of FP8 w
    float* sums,         // [Sums] aligned 16 or null; of parts of tiles, lane by lane
    int* tickets,        // [Tickets] or null; of each warp of a cut tile, 0 before and after
    Out* out,            // [R, Width]
    float* more,         // [R, More] or null; x w_more^T
    const int* use,      // [R] or null; null: all results of all rows
    const unsigned char* allowed,  // [Width] or null; features that may be the largest, null: all
    unsigned long long* largest,   // [R] or null; 0 before
    int R,
    int Xr,
    int Pad,
    int Ldx,
    int Din,
    int Width,
    int More,
    int Whole,
    int Parts,
    int Cluster,
    int Ranks,
    int Depth,
    int Sums,
    int Tickets)
{
  extern __shared__ uint4 dynamic[];
  __shared__ Barrier full[MOST], empty[MOST], room[MOST];  // room: in all blocks of the cluster
  __shared__ __align__(16) float turned[WARPS][8][20];  // rows, 16 features, not all in the same banks
  const Ring ring{reinterpret_cast<char*>(((unsigned long long)dynamic + 1023) / 1024 * 1024), full, empty};
  const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
  const int chunks = (Din + K - 1) / K, row_tiles = (R + Rows - 1) / Rows;
  const int w_tiles = (Width + RESULTS - 1) / RESULTS;
  const int tiles = (w_tiles + (More + RESULTS - 1) / RESULTS + Cluster - 1) / Cluster * Cluster;  // the last may be empty
  const Units units{row_tiles, Whole, Parts, Cluster, row_tiles * (Whole + (tiles - Whole) * Parts)};

  if (threadIdx.x == 0) {
    for (int i = 0; i < Depth; i++) {
      make_barrier(full[i], 2), make_barrier(empty[i], WARPS), make_barrier(room[i], Cluster);
    }
    barriers_made();
  }
  __syncthreads();
  if (Cluster > 1) cluster_arrive();
  if (Cluster > 1 && warp != WARPS) cluster_wait();

  if (warp >= WARPS && HUNGRY) fewer_registers<32>();
  if (warp == WARPS) {
    if (lane) return;
    prefetch_map(w);
    const unsigned long long policy = row_tiles == 1 ? ONCE : KEPT;
    fill(units, chunks, ring, Depth, [&](const Unit& unit, int chunk, const Turn& turn) {
      Barrier& here = full[turn.place];
      arrive_expecting(here, W_BYTES);
      if (unit.tile < w_tiles || More == 0) {
        load_tile(ring.w(turn.place), w, here, chunk * K, 0, unit.tile * RESULTS, policy);
      } else {
        load_tile(ring.w(turn.place), w_more, here, chunk * K, 0, (unit.tile - w_tiles) * RESULTS, policy);
      }
    });
    return;
  }
  if (warp == WARPS + 1) {
    if (lane) return;
    prefetch_map(x);
    after_previous();
    const int own = Cluster > 1 ? cluster_rank() * (Rows / Cluster) : 0;  // rows from here on are for all to load
    fill(units, chunks, ring, Depth, [&](const Unit& unit, int chunk, const Turn& turn) {
      Barrier& here = full[turn.place];
      if (Cluster > 1) {
        for (int rank = 0; rank < Cluster; rank++) arrive_at(room[turn.place], rank);
        wait(room[turn.place], turn.parity);
      }
      arrive_expecting(here, X_BYTES);
#pragma unroll
      for (int i = 0; i < X_TILES; i++) {
        const int k = chunk * K + (sizeof(Wt) == 2 ? i * 64 : 0);
        const int row = unit.row + own + (sizeof(Wt) == 1 ? i * R : 0);  // FP8: of hi, of lo
        char* const to = ring.x(turn.place) + i * X_TILE + own * ROW_BYTES;
        if (Cluster > 1) {
          load_tile_for_all(to, x, here, k, row, Cluster);
        } else {
          load_tile(to, x, here, k, row);
        }
      }
    });
    return;
  }

  if (warp >= WARPS) return;
  if (HUNGRY) more_registers<160>();
  after_previous();
  const Results results{out, more, use, allowed, largest, w_tiles, Width, More};
  Turn turn{Depth};
  for (int next = blockIdx.x; next < units.count; next += gridDim.x) {
    const Unit unit = units[next];
    const int cut = unit.row / Rows * (tiles - Whole) + unit.tile - Whole, first_part = RANGES / Parts;
    const int kept = RANGES - first_part + 1;  // sums of a cut tile: of all of its first part, and of each range behind it
    float4* const mine = reinterpret_cast<float4*>(sums) + ((long long)cut * kept * WARPS + warp) * QUADS * WARP + lane;
    float total[SUMS] = {};
    for (int range = unit.first; range < unit.last; range++) {
      const int begin = range_start(range, chunks), end = range_start(range + 1, chunks);
      if (begin == end) continue;
      float sum[SUMS];
      if constexpr (sizeof(Wt) == 2) {
        multiply(sum, begin, end, ring, turn);
      } else {
        const float* factors[2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
          const int f = warp * 16 + lane / 4 + i * 8;  // of the tile
          const int own = min(unit.tile * RESULTS + f / HALVES, Width - 1) + f % HALVES * Width;
          factors[i] = scale + (long long)(own / SCALED) * chunks;
        }
        multiply_scaled(sum, factors, inverse + unit.row + 2 * (lane % 4), Pad, begin, end, ring, turn);
      }
      if (unit.first == 0) {
#pragma unroll
        for (int i = 0; i < SUMS; i++) total[i] += sum[i];
      } else {
        keep(sum, mine + (range - first_part + 1) * TO_NEXT);
      }
    }
    if (unit.tile < Whole || Parts == 1) {
      results.put(total, turned[warp], unit.tile, unit.row, R);
      continue;
    }
    if (unit.first == 0) keep(total, mine);
    const int rank = warp_arrives_among_last(tickets + cut * WARPS + warp, Parts, Ranks);
    const int last = (rank + 1) * QUADS / Ranks;
    for (int n = rank * QUADS / Ranks; rank >= 0 && n < last; n += TOGETHER) {
      float some[4 * TOGETHER];
      add_kept(some, mine + n * WARP, kept, last - n);
      results.put(some, turned[warp], unit.tile, unit.row + 8 * n, min(R, unit.row + 8 * last));
    }
  }
}
