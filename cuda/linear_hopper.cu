// x w^T on tensor cores of sm_90a (wgmma), of bf16, or of FP8 w and x as split_rows.cu leaves it; or of its halves
// silu(gate) * up; or of two matrices, the second result in float. Definitions: linear, gated_linear, linear_pair, head in
// boleinfer/ops/linear.py. Sums in float32; Gated rounds them to Out before it goes on, as linear does. Of rows with
// use = 2 only the largest result is kept, with its feature.
//
// A tile of out is Rows rows and 64 features of each of Groups warpgroups, which for Gated take the same features of up
// as well; the tiles of w_more come behind those of w. The first Whole tiles of features are a unit each; k of the
// others is cut into Parts parts, a unit each. A unit's chunks of k are added up in order (an FP8 block of 128 k on its
// own, then scaled), then the parts in order, by the warp that ends last of those that own its features. None of this
// depends on R: a row has the same bits whatever is beside it.
//
// Weights pass through L2 as what goes first, so that the codes and small arrays of all other kernels stay there: 0.8B's
// step took 4 % longer without (H200, 2026-11-30).
//
// grid: one block a multiprocessor, at most; a block takes every gridDim.x-th unit. block: a warpgroup for 64 features
// each, a warp whose first thread asks for tiles of w, and one for x. Depth places of a ring hold a chunk of w and x;
// it is filled with w before x is there.
// shared: 1 KB + Depth * (8 KB * Groups * (1 + Gated) + 128 bytes * Rows, twice for FP8); 640 bytes a warp. Read twice:
// x, by every tile of features (L2), w by every tile of rows.
//
// arch: 90a
// sizes: Wt=bf16 Out=bf16 Rows=8,64 Groups=3 Gated=0 | Wt=bf16 Out=float Rows=16,128 Groups=3 Gated=0 | Wt=bf16 Out=bf16 Rows=8,32,128 Groups=2 Gated=1 | Wt=bf16 Out=bf16 Rows=256 Groups=2 Gated=0 | Wt=fp8 Out=bf16 Rows=8,64 Groups=3 Gated=0 | Wt=fp8 Out=bf16 Rows=8,32 Groups=2 Gated=1
#include "largest.cuh"
#include "linear.cuh"
#include "tma.cuh"
#include "wgmma.cuh"

constexpr int ROW_BYTES = 128, SLAB = 64 * ROW_BYTES;  // of a tile in shared memory; of 64 rows
constexpr int K = ROW_BYTES / sizeof(Wt), X_TILES = K / 64;  // k of a chunk; tiles of x in it
constexpr int WARPS = 4 * Groups, SLABS = 1 + Gated, RESULTS = 64 * Groups;  // RESULTS: features of out in a tile
constexpr int X_TILE = Rows * ROW_BYTES, X_BYTES = X_TILES * X_TILE, W_BYTES = SLABS * Groups * SLAB;
constexpr int PLACE = X_BYTES + W_BYTES;
constexpr int SUMS = Rows / 2, QUADS = SUMS / 4;  // of a lane and slab; fours of them, for eight rows each
constexpr int MOST = 24;                               // places of a ring

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

// sum = the unit's part of w x^T, of bf16 w.
__device__ __forceinline__ void multiply(float (&sum)[SLABS][SUMS], const Unit& unit, const Ring& ring, Turn& turn) {
  const int lane = threadIdx.x % WARP, own = threadIdx.x / WARP / 4 * SLAB;
  int held = 0;
  for (int chunk = unit.begin; chunk < unit.end; chunk++, turn.advance()) {
    wait(ring.full[turn.place], turn.parity);
    wgmma_begin();
#pragma unroll
    for (int i = 0; i < SLABS * 4; i++) {
      wgmma(sum[i / 4], Tile(ring.w(turn.place, i / 4) + own), Tile(ring.x(turn.place)), i % 4);
    }
    wgmma_end();
    if (chunk > unit.begin) {
      wgmma_wait<1>();
      if (lane == 0) arrive(ring.empty[held]);
    }
    held = turn.place;
  }
  wgmma_wait<0>();
  if (lane == 0) arrive(ring.empty[held]);
}

// The same of FP8 w and split x; scale: of the lane's features g and g + 8 in each slab, one for each chunk; inverse: of
// the lane's first rows, Pad numbers for each chunk. Tensor cores keep some 14 bits while they add up E4M3 products, so
// each chunk begins anew.
template <int S>
__device__ __forceinline__ void multiply_scaled(
    float (&sum)[SLABS][S], const float* const (&scale)[SLABS][2], const float* inverse, int Pad, const Unit& unit,
    const Ring& ring, Turn& turn) {
  constexpr int AT_ONCE = Rows > 32 ? 1 : 2;  // of hi and lo, as registers allow
  const int lane = threadIdx.x % WARP, own = threadIdx.x / WARP / 4 * SLAB;
  for (int chunk = unit.begin; chunk < unit.end; chunk++, turn.advance()) {
    float factor[SLABS][2];
    float2 unit_of[QUADS];
#pragma unroll
    for (int i = 0; i < 2 * SLABS; i++) factor[i / 2][i % 2] = scale[i / 2][i % 2][chunk];
#pragma unroll
    for (int n = 0; n < QUADS; n++) unit_of[n] = *reinterpret_cast<const float2*>(inverse + chunk * Pad + 8 * n);
    wait(ring.full[turn.place], turn.parity);
#pragma unroll
    for (int part = 0; part < 2; part += AT_ONCE) {
      float block[SLABS][AT_ONCE * S];
      wgmma_begin();
#pragma unroll
      for (int i = 0; i < SLABS * 4; i++) {
        const Tile x(ring.x(turn.place) + part * X_TILE);
        wgmma_e4m3(block[i / 4], Tile(ring.w(turn.place, i / 4) + own), x, i % 4);
      }
      wgmma_end();
      wgmma_wait<0>();
      if (part + AT_ONCE == 2 && lane == 0) arrive(ring.empty[turn.place]);
#pragma unroll
      for (int i = 0; i < AT_ONCE * SLABS * S; i++) {
        const int j = i % S, s = i / S % SLABS, p = i / S / SLABS;
        const float unit = (part + p ? 1.0f / 32 : 1.0f) * (j % 2 ? unit_of[j / 4].y : unit_of[j / 4].x);
        sum[s][j] = fmaf(factor[s][j / 2 % 2] * unit, block[s][p * S + j], sum[s][j]);
      }
    }
  }
}

// Of the warps that have a part of the same features the last one gets true, and in sum all parts, added up in order.
// mine: the lane's place for part 0; ticket: counts the parts.
__device__ __forceinline__ bool join(float (&sum)[SLABS][SUMS], int part, int parts, float4* mine, int* ticket) {
  constexpr int TO_PART = WARPS * SLABS * QUADS * WARP;
  const int lane = threadIdx.x % WARP;
#pragma unroll
  for (int i = 0; i < SLABS * QUADS; i++) {
    const float* v = sum[i / QUADS] + i % QUADS * 4;
    __stcg(mine + part * TO_PART + i * WARP, make_float4(v[0], v[1], v[2], v[3]));
  }
  __threadfence();
  __syncwarp();
  const int arrived = __shfl_sync(ALL_LANES, lane == 0 ? atomicAdd(ticket, 1) : 0, 0);
  if (arrived != parts - 1) return false;
  __threadfence();
  if (lane == 0) *ticket = 0;
#pragma unroll
  for (int i = 0; i < SLABS * SUMS; i++) sum[i / SUMS][i % SUMS] = 0.0f;
#pragma unroll(SLABS * QUADS <= 4 ? 4 : 1)
  for (int p = 0; p < parts; p++) {
#pragma unroll
    for (int i = 0; i < SLABS * QUADS; i++) {
      const float4 one = __ldcg(mine + p * TO_PART + i * WARP);
      float* v = sum[i / QUADS] + i % QUADS * 4;
      v[0] += one.x, v[1] += one.y, v[2] += one.z, v[3] += one.w;
    }
  }
  return true;
}

// The next four numbers of a row, or as many as exist.
template <class T>
__device__ __forceinline__ void store_four(T* to, const float* four, int exist) {
  struct alignas(4 * sizeof(T)) Four {
    T v[4];
  };
  const Four numbers{from_float<T>(four[0]), from_float<T>(four[1]), from_float<T>(four[2]), from_float<T>(four[3])};
  if (exist >= 4 && reinterpret_cast<unsigned long long>(to) % sizeof(Four) == 0) {
    *reinterpret_cast<Four*>(to) = numbers;
  } else {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      if (i < exist) to[i] = numbers.v[i];
    }
  }
}

// The warp's 16 features of a tile, from `feature` of `width` on, and rows from `row` of R on: those whose results are
// read. They are turned, eight rows at a time, so that neighbouring lanes have neighbouring features.
template <class T>
__device__ __forceinline__ void write(
    T* out, const int* use, const float (&sum)[SLABS][SUMS], float (&turned)[8][20], int row, int R, int feature,
    int width) {
  const int g = threadIdx.x % WARP / 4, t = threadIdx.x % 4, own = feature + 4 * t;
  out += (long long)(row + g) * width + own;
#pragma unroll
  for (int n = 0; n < QUADS; n++, out += 8ll * width) {
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 4; i++) {
      float y = sum[0][4 * n + i];
      if constexpr (Gated) y = silu(to_float(from_float<Out>(y))) * to_float(from_float<Out>(sum[1][4 * n + i]));
      turned[2 * t + i % 2][g + i / 2 * 8] = y;
    }
    __syncwarp();
    const bool read = row + 8 * n + g < R && (use == nullptr || use[row + 8 * n + g] == ALL);
    if (read && own < width) store_four(out, turned[g] + 4 * t, width - own);
  }
}

// The largest of these results and their features, of the rows of which only that is asked for. Lanes of the same t find
// those of up to eight rows together, and then each takes one.
__device__ __forceinline__ void raise(
    Largest* largest, const int* use, const unsigned char* allowed, const float (&sum)[SLABS][SUMS], int row, int R,
    int feature, int width) {
  constexpr int OF_LANE = SUMS / 2;  // rows of which a lane has results
  const int g = threadIdx.x % WARP / 4, t = threadIdx.x % 4, low = feature + g, high = low + 8;
  const bool has_low = low < width && (!allowed || allowed[low]), has_high = high < width && (!allowed || allowed[high]);
  Largest mine = 0;
#pragma unroll
  for (int i = 0; i < OF_LANE; i++) {
    const float* at = sum[0] + i / 2 * 4 + i % 2;
    Largest most = max(has_low ? largest_of(at[0], low) : 0, has_high ? largest_of(at[2], high) : 0);
#pragma unroll
    for (int lane = 4; lane < WARP; lane *= 2) most = max(most, __shfl_xor_sync(ALL_LANES, most, lane));
    if (i % 8 == g) mine = most;
    if (i % 8 == min(7, OF_LANE - 1)) {
      const int taken = i / 8 * 8 + g, own = row + taken / 2 * 8 + 2 * t + taken % 2;
      if (taken < OF_LANE && own < R && use[own] == LARGEST && mine > __ldcg(largest + own)) {
        atomicMax(largest + own, mine);
      }
    }
  }
}

extern "C" __global__ void __launch_bounds__(WARP * (WARPS + 2), 1) linear_hopper(
    const __grid_constant__ TensorMap<const Wt> w,       // [Dout, Din] box [64 * Groups]
    const __grid_constant__ TensorMap<const Wt> w_more,  // [More, Din] box [64 * Groups] or null
    const __grid_constant__ TensorMap<const Wt> x,       // [Xr, Din] strides [Ldx, 1] box [Rows]
    const float* inverse,           // [(Din + 127) / 128, Pad] or null; 1 / s of x, for FP8 w
    const float* __restrict__ scale,  // [(Dout + 127) / 128, (Din + 127) / 128] or null; of FP8 w
    float* sums,         // [Sums] aligned 16 or null; of parts of tiles, lane by lane
    int* tickets,        // [Tickets] or null; of each warp of a cut tile, 0 before and after
    Out* out,            // [R, Dout / (1 + Gated)]
    float* more,         // [R, More] or null; x w_more^T
    const int* use,      // [R] or null; null: all results of all rows
    const unsigned char* allowed,  // [Dout] or null; features that may be the largest, null: all
    unsigned long long* largest,   // [R] or null; 0 before
    int R,
    int Xr,
    int Pad,
    int Ldx,
    int Din,
    int Dout,
    int More,
    int Whole,
    int Parts,
    int Depth,
    int Sums,
    int Tickets)
{
  extern __shared__ uint4 dynamic[];
  __shared__ Barrier full[MOST], empty[MOST];
  __shared__ __align__(16) float turned[WARPS][8][20];  // rows, 16 features, not all in the same banks
  const Ring ring{reinterpret_cast<char*>(((unsigned long long)dynamic + 1023) / 1024 * 1024), full, empty};
  const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
  const int chunks = (Din + K - 1) / K, width = Dout / SLABS, row_tiles = (R + Rows - 1) / Rows;
  const int w_tiles = (width + RESULTS - 1) / RESULTS, tiles = w_tiles + (More + RESULTS - 1) / RESULTS;
  const Units units{row_tiles, Whole, Parts, chunks, row_tiles * (Whole + (tiles - Whole) * Parts)};

  if (threadIdx.x == 0) {
    for (int i = 0; i < Depth; i++) make_barrier(full[i], 2), make_barrier(empty[i], WARPS);
    barriers_made();
  }
  __syncthreads();

  if (warp == WARPS) {
    if (lane) return;
    prefetch_map(w);
    const unsigned long long policy = row_tiles == 1 ? ONCE : KEPT;
    fill(units, ring, Depth, [&](const Unit& unit, int chunk, int place) {
      arrive_expecting(full[place], W_BYTES);
#pragma unroll
      for (int s = 0; s < SLABS; s++) {
        if (unit.tile < w_tiles) {
          load_tile(ring.w(place, s), w, full[place], chunk * K, unit.tile * RESULTS + s * width, policy);
        } else {
          load_tile(ring.w(place, s), w_more, full[place], chunk * K, (unit.tile - w_tiles) * RESULTS, policy);
        }
      }
    });
    return;
  }
  if (warp == WARPS + 1) {
    if (lane) return;
    prefetch_map(x);
    after_previous();
    fill(units, ring, Depth, [&](const Unit& unit, int chunk, int place) {
      arrive_expecting(full[place], X_BYTES);
#pragma unroll
      for (int i = 0; i < X_TILES; i++) {
        const int k = sizeof(Wt) == 2 ? i * 64 : 0, row = sizeof(Wt) == 1 ? i * R : 0;  // FP8: of hi, of lo
        load_tile(ring.x(place) + i * X_TILE, x, full[place], chunk * K + k, unit.row + row);
      }
    });
    return;
  }

  after_previous();
  Turn turn{Depth};
  for (int next = blockIdx.x; next < units.count; next += gridDim.x) {
    const Unit unit = units[next];
    const int feature = unit.tile * RESULTS + warp * 16;
    float sum[SLABS][SUMS] = {};
    if constexpr (sizeof(Wt) == 2) {
      multiply(sum, unit, ring, turn);
    } else {
      const float* factors[SLABS][2];
#pragma unroll
      for (int i = 0; i < 2 * SLABS; i++) {
        const int f = min(i / 2 * width + feature + lane / 4 + i % 2 * 8, Dout - 1);
        factors[i / 2][i % 2] = scale + (long long)(f / SCALED) * chunks;
      }
      multiply_scaled(sum, factors, inverse + unit.row + 2 * (lane % 4), Pad, unit, ring, turn);
    }
    if (Rows <= 128 && unit.part >= 0) {
      const int cut = unit.row / Rows * (tiles - Whole) + unit.tile - Whole;
      const long long mine = ((long long)cut * Parts * WARPS + warp) * SLABS * QUADS * WARP + lane;
      if (!join(sum, unit.part, Parts, reinterpret_cast<float4*>(sums) + mine, tickets + cut * WARPS + warp)) continue;
    }
    if (unit.tile < w_tiles) {
      write(out, use, sum, turned[warp], unit.row, R, feature, width);
      if (sizeof(Out) == 4 && largest) raise(largest, use, allowed, sum, unit.row, R, feature, width);
    } else {
      write(more, nullptr, sum, turned[warp], unit.row, R, feature - w_tiles * RESULTS, More);
    }
  }
}
