// x w^T on tensor cores of sm_90a, of FP8 w and x as split_rows.cu leaves it, for more rows than linear_fp8.cu takes; or of
// its halves silu(gate) * up. Definitions: linear, gated_linear, head in boleinfer/ops/linear.py. Sums in float32; Gated
// rounds them to Out before it goes on, as linear does. Of rows with use = 2 only the largest result is kept, with its
// feature.
//
// Sums are made in the order of ranges.cuh, each FP8 block of 128 k on its own, then scaled.
//
// A tile of out is Rows rows and 64 rows of w for each of Groups warpgroups; for Gated those are rows of gate and of up in
// turn. How blocks share tiles: cut.cuh. Of the warps that own the same features of a cut tile those Ranks that end last
// wait for one another and join the sums of some rows each.
//
// grid: one block a multiprocessor, at most. block: a warpgroup for 64 rows of w each, and one that asks, the first thread
// of a warp for tiles of w, that of the next for x. Depth places of a ring hold a chunk of w and x, with 1 / s of x; it is
// filled with w before x is there.
// shared: 1 KB + Depth * (8 KB * Groups + 260 bytes * Rows); 640 bytes a warp. Read twice: x, by every tile of features
// (L2), w by every tile of rows.
//
// arch: 90a
// sizes: Out=bf16 Rows=16,32,64 Groups=3 Gated=0 | Out=float Rows=8,64 Groups=3 Gated=0 | Out=bf16 Rows=16,64 Groups=1,3 Gated=1
#include "bulk.cuh"
#include "cut.cuh"
#include "largest.cuh"
#include "wgmma.cuh"

constexpr int ROW_BYTES = 128, SLAB = 64 * ROW_BYTES;  // of a tile in shared memory; of 64 rows
constexpr int SCALED = 128;                            // k of a chunk, and features and k of a scale
constexpr int WARPS = 4 * Groups, HALVES = 1 + Gated;  // WARPS: that multiply
constexpr int RESULTS = 64 * Groups / HALVES;          // features of out in a tile
constexpr int X_TILE = Rows * ROW_BYTES, W_BYTES = Groups * SLAB, PLACE = 2 * X_TILE + W_BYTES;
constexpr int UNIT_BYTES = 4 * Rows;              // of 1 / s of a chunk of x
constexpr int SUMS = Rows / 2, QUADS = SUMS / 4;  // of a lane; fours of them, for eight rows each
constexpr int TO_NEXT = WARPS * QUADS * WARP;     // fours from one sum of a cut tile to the next
constexpr int TOGETHER = QUADS < 4 ? QUADS : 4;   // of these, joined at a time
constexpr int MOST = 24;                          // places of a ring

// Whether warps that multiply need registers of those that ask, and whether two blocks fit on a multiprocessor.
constexpr bool HUNGRY = Groups == 3 && Rows > 32, TWO_FIT = Rows <= 8;

// Chunks of x and w, and 1 / s of x, on their way from the warps that ask for them to those that multiply.
struct Ring {
  char *places, *units;
  Barrier *full, *empty;

  __device__ __forceinline__ char* x(int place) const { return places + place * PLACE; }
  __device__ __forceinline__ char* w(int place) const { return x(place) + 2 * X_TILE; }
  __device__ __forceinline__ float* unit(int place) const { return reinterpret_cast<float*>(units + place * UNIT_BYTES); }
};

// sum = w x^T over chunks begin .. end - 1; scale: of the lane's features g and g + 8, one for each chunk. Tensor cores keep
// some 14 bits while they add up E4M3 products, so each chunk begins anew.
__device__ __forceinline__ void multiply(
    float (&sum)[SUMS], const float* const (&scale)[2], int begin, int end, const Ring& ring, Turn& turn) {
  const int own = threadIdx.x / WARP / 4 * SLAB;
#pragma unroll
  for (int i = 0; i < SUMS; i++) sum[i] = 0.0f;
  for (int chunk = begin; chunk < end; chunk++, turn.advance()) {
    const float factor[2] = {scale[0][chunk], scale[1][chunk]};
    wait(ring.full[turn.place], turn.parity);
    float2 unit_of[QUADS];
    const auto read_units = [&] {
      const float* const units = ring.unit(turn.place) + threadIdx.x % 4 * 2;
#pragma unroll
      for (int n = 0; n < QUADS; n++) unit_of[n] = *reinterpret_cast<const float2*>(units + 8 * n);
    };
    if (!HUNGRY) read_units();
    float block[2 * SUMS];  // hi, lo
    wgmma_begin();
#pragma unroll
    for (int i = 0; i < 4; i++) wgmma_e4m3(block, Tile(ring.w(turn.place) + own), Tile(ring.x(turn.place)), i, i);
    wgmma_end();
    wgmma_wait<0>();
    if (HUNGRY) read_units();
    arrive(ring.empty[turn.place]);
#pragma unroll
    for (int i = 0; i < 2 * SUMS; i++) {
      const int j = i % SUMS;
      const float unit = (i < SUMS ? 1.0f : 1.0f / 32) * (j % 2 ? unit_of[j / 4].y : unit_of[j / 4].x);
      sum[j] = fmaf(factor[j / 2 % 2] * unit, block[i], sum[j]);
    }
  }
}

// sum = all `count` sums that were kept of a tile, `apart` fours apart, added up in order, of fours from the first of
// the lane's place on; of those behind `fours` zeros.
template <int S>
__device__ __forceinline__ void add_kept(float (&sum)[S], const float4* kept, int apart, int count, int fours) {
#pragma unroll
  for (int i = 0; i < S; i++) sum[i] = 0.0f;
#pragma unroll 4
  for (int s = 0; s < count; s++) {
#pragma unroll
    for (int n = 0; n < S / 4; n++) {
      if (n >= fours) continue;
      const float4 one = __ldcg(kept + s * apart + n * WARP);
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
  const int* use;
  const unsigned char* allowed;
  Largest* largest;
  int width;

  // Of a tile, in rows from `row` on up to `end`.
  template <int S>
  __device__ __forceinline__ void put(const float (&sum)[S], float (&turned)[8][20], int tile, int row, int end) const {
    const int feature = tile * RESULTS + threadIdx.x / WARP * (16 / HALVES);
    write(out, use, sum, turned, row, end, feature, width);
    if (sizeof(Out) == 4 && largest) raise(largest, use, allowed, sum, row, end, feature, width);
  }
};

extern "C" __global__ void __launch_bounds__(WARP * (WARPS + 4), TWO_FIT ? 2 : 1) linear_fp8_many(
    const __grid_constant__ TensorMap<const fp8> w,  // [Width, 1 + Gated, Din] strides [Din, Width * Din, 1] box [64 * Groups / (1 + Gated), 1 + Gated]
    const __grid_constant__ TensorMap<const fp8> x,  // [2 * R, Din] box [Rows]; hi of all rows, then lo
    const float* inverse,             // [(Din + 127) / 128, Pad]; 1 / s of x
    const float* __restrict__ scale,  // [((1 + Gated) * Width + 127) / 128, (Din + 127) / 128] of w
    float* sums,         // [Sums] aligned 16 or null; of parts of tiles, lane by lane
    int* tickets,        // [Tickets] or null; of each warp of a cut tile, 0 before and after
    Out* out,            // [R, Width]
    const int* use,      // [R] or null; null: all results of all rows
    const unsigned char* allowed,  // [Width] or null; features that may be the largest, null: all
    unsigned long long* largest,   // [R] or null; 0 before
    int R,
    int Pad,
    int Din,
    int Width,
    int Whole,
    int Parts,
    int Ranks,
    int Depth,
    int Sums,
    int Tickets)
{
  extern __shared__ uint4 dynamic[];
  __shared__ Barrier full[MOST], empty[MOST];
  __shared__ __align__(16) float turned[WARPS][8][20];  // rows, 16 features, not all in the same banks
  char* const places = reinterpret_cast<char*>(dynamic) + -(unsigned long long)dynamic % 1024;
  const Ring ring{places, places + Depth * PLACE, full, empty};
  const int lane = threadIdx.x % WARP, warp = __shfl_sync(ALL_LANES, threadIdx.x / WARP, 0);  // the same in a warp
  const int chunks = (Din + SCALED - 1) / SCALED, row_tiles = (R + Rows - 1) / Rows;
  const int tiles = (Width + RESULTS - 1) / RESULTS;
  const Units<Rows> units{row_tiles, Whole, Parts, row_tiles * (Whole + (tiles - Whole) * Parts)};

  if (threadIdx.x == 0) {
    for (int i = 0; i < Depth; i++) make_barrier(full[i], 2), make_barrier(empty[i], WARPS * WARP);
    barriers_made();
  }
  __syncthreads();

  if (warp >= WARPS && HUNGRY) fewer_registers<32>();
  if (warp == WARPS) {
    if (lane) return;
    prefetch_map(w);
    const unsigned long long policy = row_tiles == 1 ? ONCE : KEPT;
    fill(units, chunks, empty, Depth, [&](const Unit& unit, int chunk, const Turn& turn) {
      Barrier& here = full[turn.place];
      arrive_expecting(here, W_BYTES);
      load_tile(ring.w(turn.place), w, here, chunk * SCALED, 0, unit.tile * RESULTS, policy);
    });
    return;
  }
  if (warp == WARPS + 1) {
    if (lane) return;
    prefetch_map(x);
    after_previous();
    fill(units, chunks, empty, Depth, [&](const Unit& unit, int chunk, const Turn& turn) {
      Barrier& here = full[turn.place];
      arrive_expecting(here, 2 * X_TILE + UNIT_BYTES);
      load_run(ring.unit(turn.place), inverse + chunk * Pad + unit.row, UNIT_BYTES, here);
#pragma unroll
      for (int i = 0; i < 2; i++) {  // hi, lo
        load_tile(ring.x(turn.place) + i * X_TILE, x, here, chunk * SCALED, i * R + unit.row);
      }
    });
    return;
  }

  if (warp >= WARPS) return;
  if (HUNGRY) more_registers<160>();
  after_previous();
  const Results results{out, use, allowed, largest, Width};
  Turn turn{Depth};
  for (int next = blockIdx.x; next < units.count; next += gridDim.x) {
    const Unit unit = units[next];
    const int cut = unit.row / Rows * (tiles - Whole) + unit.tile - Whole, first_part = RANGES / Parts;
    const int kept = RANGES - first_part + 1;  // sums of a cut tile: of all of its first part, and of each range behind it
    float4* const mine = reinterpret_cast<float4*>(sums) + ((long long)cut * kept * WARPS + warp) * QUADS * WARP + lane;
    const float* scales[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int f = warp * 16 + lane / 4 + i * 8;  // of the tile
      const int own = min(unit.tile * RESULTS + f / HALVES, Width - 1) + f % HALVES * Width;
      scales[i] = scale + (long long)(own / SCALED) * chunks;
    }
    float total[SUMS] = {};
    for (int range = unit.first; range < unit.last; range++) {
      const int begin = range_start(range, chunks), end = range_start(range + 1, chunks);
      if (begin == end) continue;
      float sum[SUMS];
      multiply(sum, scales, begin, end, ring, turn);
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
      add_kept(some, mine + n * WARP, TO_NEXT, kept, last - n);
      results.put(some, turned[warp], unit.tile, unit.row + 8 * n, min(R, unit.row + 8 * last));
    }
  }
}
