// x w^T on tensor cores of sm_90a, of FP8 w and up to Rows rows as split_rows.cu leaves them; or of its halves
// silu(gate) * up; or of two matrices, the second one bf16 and its result in float. Definitions: linear, gated_linear,
// linear_pair in boleinfer/ops/linear.py. Sums in float32; Gated rounds them to Out before it goes on, as linear does.
//
// A tile is `Features` features of out, of gate and of up when Gated, or about half as many of w_more, with all of k.
// Sums are made in the order of ranges.cuh, each FP8 block of 128 k on its own, then scaled. Warpgroups have a run of
// ranges each, of which the first adds up its own, and a ring of Depth places for their chunks of w and x, filled with w before x is there; they wait for
// one another only where a tile's sums meet.
//
// grid: one block a multiprocessor, at most; a block takes every gridDim.x-th tile. block: Groups warpgroups, and two
// warps for each, whose first threads ask for its w and its x: a thread takes some 400 clocks to ask for a chunk of x.
// shared: 1 KB + Groups * Depth * (128 bytes * (rows of w in a tile + 2 * Rows) + 4 * Rows) + the sums, or more where the
// last place has to have 64 rows. Read twice: x, by every tile (L2).
//
// arch: 90a
// sizes: Out=bf16 Rows=8 Features=16,40,64 Groups=4 Gated=0 | Out=bf16 Rows=8,16 Features=96,256 Groups=2 Gated=0 | Out=bf16 Rows=16 Features=32 Groups=4 Gated=0 | Out=bf16 Rows=8,16 Features=96 Groups=2 Gated=1 | Out=bf16 Rows=8 Features=136 Groups=2 Gated=1
#include "bulk.cuh"
#include "linear_fp8.cuh"
#include "wgmma.cuh"

constexpr int W_BYTES = TALL * ROW_BYTES, X_TILE = Rows * ROW_BYTES, PLACE = W_BYTES + 2 * X_TILE;
constexpr int UNIT_BYTES = 4 * Rows;   // of 1 / s of a chunk of x
constexpr int SUMS = Rows / 2;         // of a lane, of 64 rows of w
constexpr int SLOTS = RANGES - OWN + 1;  // sums that meet: of the first warpgroup, and of each range behind it

// Chunks of x and w on their way from the warps that ask for them to the warpgroups.
struct Ring {
  char *places, *units;
  Barrier *full, *empty;

  __device__ __forceinline__ char* w(int place) const { return places + place * PLACE; }
  __device__ __forceinline__ char* x(int place) const { return w(place) + W_BYTES; }
  __device__ __forceinline__ char* unit(int place) const { return units + place * UNIT_BYTES; }
};

// ask(tile, chunk, place) for all chunks of the warpgroup, of the block's tiles, each as soon as its place is empty.
// chunks_of: of a tile.
template <class Chunks, class Ask>
__device__ __forceinline__ void fill(int group, int tiles, Chunks chunks_of, const Ring& ring, int depth, Ask ask) {
  Turn turn;
  for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const int chunks = chunks_of(tile), end = range_start((group + 1) * OWN, chunks);
#pragma unroll 1
    for (int chunk = range_start(group * OWN, chunks); chunk < end; chunk++, turn.advance(depth)) {
      wait(ring.empty[turn.place], turn.parity ^ 1);
      ask(tile, chunk, turn.place);
    }
  }
}

// sum += the range's bf16 products of w_more.
__device__ __forceinline__ void multiply(float (&sum)[TILES][SUMS], int chunks, const Ring& ring, int depth, Turn& turn) {
#pragma unroll 1
  for (int i = 0; i < chunks; i++, turn.advance(depth)) {
    const int place = turn.place;
    wait(ring.full[place], turn.parity);
    wgmma_begin();
#pragma unroll
    for (int p = 0; p < 4 * MORE_TILES; p++) {
      wgmma(sum[p / 4], Tile(ring.w(place) + start_of(p / 4, MORE_TALL) * ROW_BYTES), Tile(ring.x(place)), p % 4);
    }
    wgmma_end();
    wgmma_wait<0>();
    arrive(ring.empty[place]);
  }
}

extern "C" __global__ void __launch_bounds__(WARP * (WARPS + 2 * Groups), 1) linear_fp8(
    const __grid_constant__ TensorMap<const fp8> w,        // [Dout, Din] box [Features]
    const __grid_constant__ TensorMap<const bf16> w_more,  // [More, Din] box [(Features / 2 + 7) / 8 * 8] or null
    const __grid_constant__ TensorMap<const fp8> x,        // [2 * R, Din] box [Rows]; hi of all rows, then lo
    const __grid_constant__ TensorMap<const bf16> x_more,  // [R, Din] box [Rows] or null; x itself, for w_more
    const float* inverse,             // [(Din + 127) / 128, Pad]; 1 / s of x
    const float* __restrict__ scale,  // [(Dout + 127) / 128, (Din + 127) / 128] of w
    Out* out,                         // [R, Dout / (1 + Gated)]
    float* more,                      // [R, More] or null; x w_more^T
    int R,
    int Pad,
    int Din,
    int Dout,
    int More,
    int Depth)
{
  extern __shared__ uint4 dynamic[];
  __shared__ Barrier full[MOST], empty[MOST], met;
  const int lane = threadIdx.x % WARP, warp = __shfl_sync(ALL_LANES, threadIdx.x / WARP, 0), asking = warp - WARPS;
  const int group = asking < 0 ? warp / 4 : asking % Groups, first = group * Depth;
  char* const places = reinterpret_cast<char*>(dynamic) + -(unsigned long long)dynamic % 1024;
  char* const units = places + Groups * Depth * PLACE;
  float* const sums = reinterpret_cast<float*>(units + Groups * Depth * UNIT_BYTES);  // [SLOTS, R, TALL]
  const Ring ring{places + first * PLACE, units + first * UNIT_BYTES, full + first, empty + first};
  const int width = Dout / SLABS, w_tiles = (width + Features - 1) / Features;
  const int tiles = w_tiles + (More + MORE_TALL - 1) / MORE_TALL;
  const int chunks = (Din + SCALED - 1) / SCALED, more_chunks = (Din + 63) / 64;
  const auto chunks_of = [&](int tile) { return tile < w_tiles ? chunks : more_chunks; };
  const Scales scales{sums + SLOTS * R * TALL, chunks, width, Dout};

  if (threadIdx.x == 0) {
    for (int i = 0; i < Groups * Depth; i++) make_barrier(full[i], 2), make_barrier(empty[i], 4 * WARP);
    make_barrier(met, THREADS);
    barriers_made();
  }
  if (asking < 0 && blockIdx.x < w_tiles) scales.load(scale, blockIdx.x);  // before any w, behind which it would wait
  __syncthreads();

  if (asking >= 0 && asking < Groups) {
    if (lane) return;
    prefetch_map(w);
    fill(group, tiles, chunks_of, ring, Depth, [&](int tile, int chunk, int place) {
      if (tile >= w_tiles) {
        arrive_expecting(ring.full[place], MORE_TALL * ROW_BYTES);
        load_tile(ring.w(place), w_more, ring.full[place], chunk * 64, (tile - w_tiles) * MORE_TALL, ONCE);
        return;
      }
      arrive_expecting(ring.full[place], W_BYTES);
#pragma unroll
      for (int s = 0; s < SLABS; s++) {
        const int feature = tile * Features + s * width;
        load_tile(ring.w(place) + s * Features * ROW_BYTES, w, ring.full[place], chunk * SCALED, feature, ONCE);
      }
    });
    return;
  }
  if (asking >= Groups) {
    if (lane) return;
    prefetch_map(x);
    after_previous();
    fill(group, tiles, chunks_of, ring, Depth, [&](int tile, int chunk, int place) {
      Barrier& there = ring.full[place];
      if (tile >= w_tiles) {
        arrive_expecting(there, X_TILE);
        load_tile(ring.x(place), x_more, there, chunk * 64, 0);
        return;
      }
      arrive_expecting(there, 2 * X_TILE + UNIT_BYTES);
      load_run(ring.unit(place), inverse + chunk * Pad, UNIT_BYTES, there);
      load_tile(ring.x(place), x, there, chunk * SCALED, 0);
      load_tile(ring.x(place) + X_TILE, x, there, chunk * SCALED, R);
    });
    return;
  }

  const int own = warp % 4 * 16 + lane / 4;  // of 64 rows of w; and 8 behind it
  MeetingOf<THREADS> meet{met};
  cp_async_wait<0>();
  meet();
  after_previous();
  Turn turn;
  for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const float* at[TILES][2];
#pragma unroll
    for (int i = 0; i < 2 * TILES; i++) at[i / 2][i % 2] = scales.of(tile, start_of(i / 2, TALL) + own + i % 2 * 8);

    const int all = chunks_of(tile), tall = tile < w_tiles ? TALL : MORE_TALL;
    float first_sum[TILES][SUMS] = {};
#pragma unroll 1
    for (int r = group * OWN; r < (group + 1) * OWN; r++) {
      float sum[TILES][SUMS] = {};
      const int begin = range_start(r, all), end = range_start(r + 1, all);
      if (!Gated && tile >= w_tiles) {
        multiply(sum, end - begin, ring, Depth, turn);
      } else {
#pragma unroll 1
        for (int chunk = begin; chunk < end; chunk++, turn.advance(Depth)) {
          const int place = turn.place;
          wait(ring.full[place], turn.parity);
          float part[TILES][2 * SUMS];  // hi, lo
          wgmma_begin();
#pragma unroll
          for (int i = 0; i < TILES * 4; i++) {
            const int t = i % TILES, step = i / TILES;
            wgmma_e4m3(part[t], Tile(ring.w(place) + start_of(t, TALL) * ROW_BYTES), Tile(ring.x(place)), step, step);
          }
          wgmma_end();
          float2 unit[Rows / 8];
#pragma unroll
          for (int n = 0; n < Rows / 8; n++) {
            unit[n] = *reinterpret_cast<const float2*>(ring.unit(place) + 32 * n + 8 * (lane % 4));
          }
          float factor[TILES][2];
#pragma unroll
          for (int i = 0; i < 2 * TILES; i++) factor[i / 2][i % 2] = at[i / 2][i % 2][chunk];
          wgmma_wait<0>();
          arrive(ring.empty[place]);
#pragma unroll
          for (int i = 0; i < 2 * SUMS * TILES; i++) {
            const int t = i / (2 * SUMS), p = i % (2 * SUMS), j = i % SUMS;
            const float own_unit = (p < SUMS ? 1.0f : 1.0f / 32) * (j % 2 ? unit[j / 4].y : unit[j / 4].x);
            sum[t][j] = fmaf(factor[t][j / 2 % 2] * own_unit, part[t][p], sum[t][j]);
          }
        }
      }
      if (group == 0) {
#pragma unroll
        for (int i = 0; i < SUMS * TILES; i++) {
          float& y = first_sum[i / SUMS][i % SUMS];
          sum[i / SUMS][i % SUMS] = y += sum[i / SUMS][i % SUMS];
        }
        if (r < OWN - 1) continue;
      }
      float* const to = sums + (r - OWN + 1) * R * TALL;
#pragma unroll
      for (int i = 0; i < SUMS * TILES; i++) {
        const int t = i / SUMS, j = i % SUMS, row = j / 4 * 8 + 2 * (lane % 4) + j % 2;
        const int feature = start_of(t, tall) + own + j % 4 / 2 * 8;
        if (row < R && 64 * t < tall && feature < tall) to[row * TALL + feature] = sum[t][j];
      }
    }

    meet();
    const int wide = tile < w_tiles ? Features : MORE_TALL;
    for (int i = threadIdx.x; i < R * wide; i += WARPS * WARP) {
      const int row = i / wide, n = i % wide, feature = tile * Features + n;
      const int more_feature = (tile - w_tiles) * MORE_TALL + n;
      const float* const from = sums + row * TALL + n;
      if (tile >= w_tiles) {
        if (more_feature < More) more[(long long)row * More + more_feature] = total<SLOTS>(from, R * TALL);
      } else if (feature < width) {
        Out y = from_float<Out>(total<SLOTS>(from, R * TALL));
        if constexpr (Gated) {
          y = from_float<Out>(silu(to_float(y)) * to_float(from_float<Out>(total<SLOTS>(from + Features, R * TALL))));
        }
        out[(long long)row * width + feature] = y;
      }
    }
    const int next = tile + gridDim.x;
    if (next >= tiles) return;
    if (next < w_tiles) scales.load(scale, next);
    cp_async_wait<0>();
    meet();
  }
}
