// x w^T on tensor cores of sm_90a, of FP8 w and one row x of bf16; or of its halves silu(gate) * up; or of two matrices, the
// second one bf16 and its result in float. Normed: x = the norm of the residual stream and what is added to it. Definitions:
// linear, gated_linear, linear_pair in boleinfer/ops/linear.py, with the norm in residual.py. The bits are those of
// linear_fp8.cu behind split_rows.cu: sums in float32, in the order of ranges.cuh; Gated rounds them to Out before it goes on.
//
// Every block splits the row for itself (split.cuh), with the norm before it, so that nothing stands between two products.
// It is kept whole, a word of hi and one of lo in turn: products take these as the first two rows of eight that lie in one
// another. A tile is `Features` features of out, of gate and of up when Gated, or about half as many of w_more, with all of
// k. Warpgroups have a run of ranges each, and a ring of Depth places for their chunks of w, filled before x is there, but
// with no more than AtOnce places on their way until then: x comes through the same queues. Of a low tile two ranges lie
// in a place, one below the other, and are multiplied together.
//
// grid: one block a multiprocessor, at most; a block takes every gridDim.x-th tile. block: Groups warpgroups, and a warp
// for each, whose first thread asks for its w. A thread makes Eights times eight numbers of x.
// shared: 1 KB + Groups * Depth places of 128 bytes a row of w in a tile, of 8 KB for low tiles + 2 bytes for each k, twice
// with w_more + the ranges' sums and the scales of a tile. Read twice: x, by every block (L2).
//
// arch: 90a
// sizes: Out=bf16 Features=32 Groups=4 Eights=1,3 Normed=0 Gated=0 | Out=float Features=40,96 Groups=4 Eights=1 Normed=1 Gated=0
// sizes: Out=bf16 Features=96 Groups=4 Eights=1 Normed=0,1 Gated=1 | Out=bf16 Features=136 Groups=2 Eights=3 Normed=1 Gated=1
#include "linear_fp8.cuh"
#include "split.cuh"
#include "wgmma.cuh"

constexpr int LOW = 32, TOGETHER = TALL <= LOW ? 2 : 1;  // rows of a low tile; ranges that share a place
constexpr int PLACE = (TOGETHER == 2 ? 2 * LOW : TALL) * ROW_BYTES;
constexpr int X_CHUNK = 2 * SCALED, PAD = 128;  // bytes of x, and of it in bf16, for a chunk of w; behind either

// Of a pair of bf16.
__device__ __forceinline__ float low(unsigned pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high(unsigned pair) { return __uint_as_float(pair & 0xffff0000u); }

// A warpgroup's places for w.
struct Ring {
  char* places;
  Barrier *full, *empty;
};

// Chunks of a range, and of this one and the next ones that share places with it, at most.
__device__ __forceinline__ int chunks_in(int range, int chunks) {
  return range_start(range + 1, chunks) - range_start(range, chunks);
}
__device__ __forceinline__ int longest_from(int range, int chunks) {
  int most = 0;
#pragma unroll
  for (int h = 0; h < TOGETHER; h++) most = max(most, chunks_in(range + h, chunks));
  return most;
}

// The sums of the warpgroup's ranges, of a tile of w, into sums [RANGES, TALL]. xs: x in words of hi and lo; at: where the
// scales of the lane's rows begin, a number for each chunk.
__device__ __forceinline__ void multiply(
    float* sums, const char* xs, const float* const (&at)[TILES][2], const float* units, int group, int chunks,
    const Ring& ring, int depth, Turn& turn) {
  const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP % 4, half = TOGETHER == 2 ? warp / 2 : 0;
  const int own = (TOGETHER == 2 ? warp % 2 : warp) * 16 + lane / 4;  // of 64 rows, or of a low tile; and 8 behind it
#pragma unroll 1
  for (int r = group * OWN; r < (group + 1) * OWN; r += TOGETHER) {
    const int first = range_start(r, chunks), longest = longest_from(r, chunks);
    const int apart = (range_start(r + TOGETHER - 1, chunks) - first) * X_CHUNK;
    const int begin = range_start(r + half, chunks), count = chunks_in(r + half, chunks);
    float sum[TILES][2] = {};
#pragma unroll 1
    for (int i = 0; i < longest; i++, turn.advance(depth)) {
      const char* const w = ring.places + turn.place * PLACE;
      wait(ring.full[turn.place], turn.parity);
      float part[TILES][4 * TOGETHER];  // hi, lo; of the other range behind them
      wgmma_begin();
#pragma unroll
      for (int s = 0; s < 4; s++) {
#pragma unroll
        for (int t = 0; t < TILES; t++) {
          wgmma_e4m3(part[t], Tile(w + start_of(t, TALL) * ROW_BYTES), Words<32>(xs + (first + i) * X_CHUNK, apart), s, s);
        }
      }
      wgmma_end();
      const int chunk = min(begin + i, chunks - 1);
      const float unit = units[chunk];
      float factor[TILES][2];
#pragma unroll
      for (int n = 0; n < 2 * TILES; n++) factor[n / 2][n % 2] = at[n / 2][n % 2][chunk];
      wgmma_wait<0>();
      if (lane == 0) arrive(ring.empty[turn.place]);
      if (TOGETHER == 2 && i >= count) continue;
#pragma unroll
      for (int n = 0; n < 2 * TILES; n++) {
        const int t = n / 2, h = n % 2;
#pragma unroll
        for (int p = 0; p < 2; p++) {  // hi, lo
          const float both = part[t][2 * h + p], y = TOGETHER == 2 && half ? part[t][TOGETHER * 4 - 4 + 2 * h + p] : both;
          sum[t][h] = fmaf(factor[t][h] * ((p ? 1.0f / 32 : 1.0f) * unit), y, sum[t][h]);
        }
      }
    }
#pragma unroll
    for (int n = 0; n < 2 * TILES; n++) {
      const int row = start_of(n / 2, TALL) + own + n % 2 * 8;
      if (lane % 4 == 0 && row < TALL) sums[(r + half) * TALL + row] = sum[n / 2][n % 2];
    }
  }
}

// The same of w_more and x as it is.
__device__ __forceinline__ void multiply_more(float* sums, const char* x, int group, int chunks, const Ring& ring, int depth,
                                              Turn& turn) {
  const int lane = threadIdx.x % WARP, own = threadIdx.x / WARP % 4 * 16 + lane / 4;
#pragma unroll 1
  for (int r = group * OWN; r < (group + 1) * OWN; r++) {
    float sum[MORE_TILES][4] = {};
#pragma unroll 1
    for (int i = range_start(r, chunks); i < range_start(r + 1, chunks); i++, turn.advance(depth)) {
      const char* const w = ring.places + turn.place * PLACE;
      wait(ring.full[turn.place], turn.parity);
      wgmma_begin();
#pragma unroll
      for (int n = 0; n < 4 * MORE_TILES; n++) {
        wgmma(sum[n / 4], Tile(w + start_of(n / 4, MORE_TALL) * ROW_BYTES), Words<16>(x + i * ROW_BYTES), n % 4);
      }
      wgmma_end();
      wgmma_wait<0>();
      if (lane == 0) arrive(ring.empty[turn.place]);
    }
#pragma unroll
    for (int n = 0; n < 2 * MORE_TILES; n++) {
      const int row = start_of(n / 2, MORE_TALL) + own + n % 2 * 8;
      if (lane % 4 == 0 && row < MORE_TALL) sums[r * TALL + row] = sum[n / 2][n % 2 * 2];
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS + WARP * Groups, 1) linear_fp8_row(
    const __grid_constant__ TensorMap<const fp8> w,        // [Dout, Din] box [Features]
    const __grid_constant__ TensorMap<const bf16> w_more,  // [More, Din] box [(Features / 2 + 7) / 8 * 8] or null
    const bf16* x,                    // [1, Din] aligned 16; the residual stream when Normed
    const bf16* added,                // [1, Din] aligned 16 or null; what is added to the stream
    bf16* sum,                        // [1, Din] aligned 16 or null; the stream with it
    const float* __restrict__ gain,   // [Din] aligned 16 or null; of the norm, a delta to 1
    const float* __restrict__ scale,  // [(Dout + 127) / 128, (Din + 127) / 128] of w
    Out* out,                         // [1, Dout / (1 + Gated)]
    float* more,                      // [1, More] or null; x w_more^T
    float eps,
    int Din,
    int Dout,
    int More,
    int Depth,
    int AtOnce)
{
  extern __shared__ uint4 dynamic[];
  __shared__ Barrier full[MOST], empty[MOST], met;
  __shared__ float squares[WARP];
  const int lane = threadIdx.x % WARP, warp = __shfl_sync(ALL_LANES, threadIdx.x / WARP, 0);
  const int group = warp < WARPS ? warp / 4 : warp - WARPS;
  const int width = Dout / SLABS, w_tiles = (width + Features - 1) / Features;
  const int tiles = w_tiles + (More + MORE_TALL - 1) / MORE_TALL;
  const int chunks = (Din + SCALED - 1) / SCALED, more_chunks = (Din + 63) / 64;
  char* const places = reinterpret_cast<char*>(dynamic) + -(unsigned long long)dynamic % 1024;
  char* const xs = places + Groups * Depth * PLACE;
  char* const plain = xs + chunks * X_CHUNK + PAD;  // x in bf16, for w_more
  float* const sums = reinterpret_cast<float*>(plain + (More ? chunks * X_CHUNK + PAD : 0));
  float* const units = sums + RANGES * TALL;  // 1 / s of x
  const Scales scales{units + chunks, chunks, width, Dout};
  const Ring ring{places + group * Depth * PLACE, full + group * Depth, empty + group * Depth};

  // x, eight numbers a thread at a time
  const auto number = [&](int e) { return (e * THREADS + (int)threadIdx.x) * 8; };
  Pack<float, 8> delta[Eights] = {};
  if (warp < WARPS) {  // before any w, behind which these would wait
#pragma unroll
    for (int e = 0; e < Eights; e++) {
      if (Normed && number(e) < Din) delta[e] = load<8>(gain + number(e));
    }
    if (blockIdx.x < w_tiles) scales.load(scale, blockIdx.x);
  }
  if (warp >= WARPS && lane == 0) {
    prefetch_map(w);
    for (int i = 0; i < Depth; i++) make_barrier(ring.full[i], 1), make_barrier(ring.empty[i], 4);
    if (group == 0) make_barrier(met, THREADS);
    barriers_made();
  }
  __syncthreads();

  if (warp >= WARPS) {
    if (lane) return;
    Turn turn;
    int asked = 0;
    const auto room = [&] {
      if (asked >= Depth) return wait(ring.empty[turn.place], turn.parity ^ 1);
      if (asked >= AtOnce) wait(ring.full[asked - AtOnce], 0);
      asked++;
    };
    for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
      if (tile >= w_tiles) {
        const int end = range_start((group + 1) * OWN, more_chunks);
#pragma unroll 1
        for (int chunk = range_start(group * OWN, more_chunks); chunk < end; chunk++, turn.advance(Depth)) {
          room();
          arrive_expecting(ring.full[turn.place], MORE_TALL * ROW_BYTES);
          load_tile(ring.places + turn.place * PLACE, w_more, ring.full[turn.place], chunk * 64, (tile - w_tiles) * MORE_TALL,
                    ONCE);
        }
        continue;
      }
#pragma unroll 1
      for (int r = group * OWN; r < (group + 1) * OWN; r += TOGETHER) {
        const int longest = longest_from(r, chunks);
#pragma unroll 1
        for (int i = 0; i < longest; i++, turn.advance(Depth)) {
          room();
          char* const to = ring.places + turn.place * PLACE;
          Barrier& there = ring.full[turn.place];
          int boxes = 0;
#pragma unroll
          for (int h = 0; h < TOGETHER; h++) boxes += i < chunks_in(r + h, chunks);
          arrive_expecting(there, boxes * TALL * ROW_BYTES);
#pragma unroll
          for (int h = 0; h < TOGETHER; h++) {
            if (TOGETHER == 2 && i >= chunks_in(r + h, chunks)) continue;
#pragma unroll
            for (int s = 0; s < SLABS; s++) {
              load_tile(to + (h * LOW + s * Features) * ROW_BYTES, w, there, (range_start(r + h, chunks) + i) * SCALED,
                        tile * Features + s * width, ONCE);
            }
          }
        }
      }
    }
    return;
  }

  MeetingOf<THREADS> meet{met};

  // x in pairs
  const auto load_pairs = [&](unsigned (&pairs)[4], const bf16* from, int e) {
    uint4 words = {};
    if (number(e) < Din) words = *reinterpret_cast<const uint4*>(from + number(e));
    memcpy(pairs, &words, sizeof words);
  };
  unsigned own[Eights][4], other[Eights][4];
  after_previous();
#pragma unroll
  for (int e = 0; e < Eights; e++) {
    load_pairs(own[e], x, e);
    if (Normed) load_pairs(other[e], added, e);
  }
  if constexpr (Normed) {
    // h = stream + added; x = h / sqrt(mean h^2 + eps) * (1 + gain)
#pragma unroll
    for (int e = 0; e < Eights; e++) {
      float square = 0.0f;
#pragma unroll
      for (int p = 0; p < 4; p++) {
        own[e][p] = pack_bf16(low(own[e][p]) + low(other[e][p]), high(own[e][p]) + high(other[e][p]));
        square = fmaf(high(own[e][p]), high(own[e][p]), fmaf(low(own[e][p]), low(own[e][p]), square));
      }
      if (blockIdx.x == 0 && number(e) < Din) {
        *reinterpret_cast<uint4*>(sum + number(e)) = make_uint4(own[e][0], own[e][1], own[e][2], own[e][3]);
      }
      square = warp_sum(square);
      if (lane == 0 && number(e) < Din) squares[e * WARPS + warp] = square;
    }
    meet();
    const float scale = 1.0f / sqrtf(warp_sum(lane < Din / (8 * WARP) ? squares[lane] : 0.0f) / Din + eps);
#pragma unroll
    for (int e = 0; e < Eights; e++) {
#pragma unroll
      for (int p = 0; p < 4; p++) {
        const float first = low(own[e][p]) * scale * (1.0f + delta[e].v[2 * p]);
        own[e][p] = pack_bf16(first, high(own[e][p]) * scale * (1.0f + delta[e].v[2 * p + 1]));
      }
    }
  }
#pragma unroll
  for (int e = 0; e < Eights; e++) {
    const int i = number(e);
    Pack<bf16, 8> eight;
    memcpy(&eight, own[e], sizeof eight);
    Pack<fp8, 8> hi, lo;
    const float unit = split(eight, hi, lo);
    if (i >= chunks * SCALED) continue;
    char* const to = xs + i / 16 * 32 + i % 16;
    memcpy(__builtin_assume_aligned(to, 8), hi.v, 8);
    memcpy(__builtin_assume_aligned(to + 16, 8), lo.v, 8);
    if (i % SCALED == 0) units[i / SCALED] = unit;
    if (More) store<8>(reinterpret_cast<bf16*>(plain) + i, eight);
  }
  cp_async_wait<0>();
  fence_writes();
  meet();

  Turn turn;
  for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    if (tile < w_tiles) {
      const float* at[TILES][2];
#pragma unroll
      for (int n = 0; n < 2 * TILES; n++) {
        const int row = (TOGETHER == 2 ? warp % 2 : warp % 4) * 16 + lane / 4 + n % 2 * 8;
        at[n / 2][n % 2] = scales.of(tile, start_of(n / 2, TALL) + row);
      }
      multiply(sums, xs, at, units, group, chunks, ring, Depth, turn);
    } else {
      multiply_more(sums, plain, group, more_chunks, ring, Depth, turn);
    }
    meet();

    const int n = threadIdx.x, feature = tile * Features + n, more_feature = (tile - w_tiles) * MORE_TALL + n;
    if (tile >= w_tiles) {
      if (n < MORE_TALL && more_feature < More) more[more_feature] = total<RANGES>(sums + n, TALL);
    } else if (n < Features && feature < width) {
      Out y = from_float<Out>(total<RANGES>(sums + n, TALL));
      if constexpr (Gated) y = from_float<Out>(silu(to_float(y)) * to_float(from_float<Out>(total<RANGES>(sums + Features + n, TALL))));
      out[feature] = y;
    }
    const int next = tile + gridDim.x;
    if (next >= tiles) return;
    if (next < w_tiles) scales.load(scale, next);
    cp_async_wait<0>();
    meet();
  }
}
