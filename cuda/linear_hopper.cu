// x w^T on tensor cores of sm_90a (wgmma), of bf16, or of FP8 w and x split into E4M3 numbers (split.cuh); or of its halves
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
// each, a warp whose first thread asks for tiles of w, and one for x, or, of up to 32 rows with FP8 w, four that split x.
// Depth places of a ring hold a chunk of w and x; it is filled with w before x is there.
// shared: 1 KB + Depth * (8 KB * Groups * (1 + Gated) + 128 bytes * Rows, twice for FP8); 640 bytes a warp. Read twice:
// x, by every tile of features (L2), w by every tile of rows.
//
// arch: 90a
// sizes: Wt=bf16 Out=bf16 Rows=8,64 Groups=3 Gated=0 | Wt=bf16 Out=float Rows=16,128 Groups=3 Gated=0 | Wt=bf16 Out=bf16 Rows=8,32,128 Groups=2 Gated=1 | Wt=bf16 Out=bf16 Rows=256 Groups=2 Gated=0 | Wt=fp8 Out=bf16 Rows=8,64 Groups=3 Gated=0 | Wt=fp8 Out=bf16 Rows=8,32 Groups=2 Gated=1
#include "largest.cuh"
#include "linear_scaled.cuh"

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

extern "C" __global__ void __launch_bounds__(WARP * (WARPS + 1 + X_WARPS), 1) linear_hopper(
    const __grid_constant__ TensorMap<const Wt> w,       // [Dout, Din] box [64 * Groups]
    const __grid_constant__ TensorMap<const Wt> w_more,  // [More, Din] box [64 * Groups] or null
    const __grid_constant__ TensorMap<const Wt> x,       // [Xr, Din] strides [Ldx, 1] box [Rows] or null
    const bf16* unsplit,            // [R, Din] strides [Ldx, 1] aligned 16 or null; x, to be split here
    const float* inverse,           // [(Din + 127) / 128, Pad] or null; 1 / s of x that is split, for FP8 w
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
  __shared__ float inverses[SPLITS ? MOST * Rows : 1];
  const Ring ring{reinterpret_cast<char*>(((unsigned long long)dynamic + 1023) / 1024 * 1024), full, empty, inverses};
  const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
  const int chunks = (Din + K - 1) / K, width = Dout / SLABS, row_tiles = (R + Rows - 1) / Rows;
  const int w_tiles = (width + RESULTS - 1) / RESULTS, tiles = w_tiles + (More + RESULTS - 1) / RESULTS;
  const Units units{row_tiles, Whole, Parts, chunks, row_tiles * (Whole + (tiles - Whole) * Parts)};

  if (threadIdx.x == 0) {
    for (int i = 0; i < Depth; i++) {
      make_barrier(full[i], 1 + (SPLITS ? AT_ONCE : X_WARPS)), make_barrier(empty[i], WARPS * READERS);
    }
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
  if (SPLITS && warp > WARPS) {
    after_previous();
    split_all(unsplit, units, ring, Depth, WARP * (WARPS + 1), R, Ldx, Din);
    return;
  }
  if (warp > WARPS) {
    if (lane) return;
    prefetch_map(x);
    after_previous();
    fill(units, ring, Depth, [&](const Unit& unit, int chunk, int place) {
      arrive_expecting(full[place], X_BYTES);
#pragma unroll
      for (int i = 0; i < X_TILES; i++) {
        const int k = FP8 ? 0 : i * 64, row = FP8 ? i * R : 0;  // FP8: of hi, of lo
        load_tile(ring.x(place) + i * X_TILE, x, full[place], chunk * K + k, unit.row + row);
      }
    });
    return;
  }

  Turn turn{Depth};
  for (int next = blockIdx.x; next < units.count; next += gridDim.x) {
    const Unit unit = units[next];
    const int feature = unit.tile * RESULTS + warp * 16;
    float sum[SLABS][SUMS] = {};
    Factors factors;
    if constexpr (FP8) {
#pragma unroll
      for (int i = 0; i < 2 * SLABS; i++) {
        const int f = min(i / 2 * width + feature + lane / 4 + i % 2 * 8, Dout - 1);
        factors.of[i / 2][i % 2] = scale + (long long)(f / SCALED) * chunks;
      }
      factors.ask(unit.begin, unit.end);
    }
    if (next == blockIdx.x) after_previous();
    if constexpr (FP8) {
      multiply_scaled(sum, factors, inverse + unit.row, Pad, unit, ring, turn);
    } else {
      multiply(sum, unit, ring, turn);
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
