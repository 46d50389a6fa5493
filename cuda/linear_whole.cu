// x w^T for up to 8 rows of bf16, all of k in one block (sm_90a); or of its halves silu(gate) * up; or of two matrices,
// the second result in float. Normed: of one row, x = the norm of the residual stream and what is added to it. Definitions:
// linear, gated_linear, linear_pair in boleinfer/ops/linear.py, and with the norm in residual.py. Sums in float32, in the
// order of ranges.cuh; Gated rounds them to Out before it goes on, as linear does.
//
// A tile is `Features` features of out, of gate and of up when Gated. A warp owns a range of k. Its chunks of w come, `Run`
// at a time, into places of its own, filled before x is there; x is kept whole. So warps wait for one another only where x
// is normed and where a tile's sums meet, and little is left to do behind the wait for the kernel before: in small models
// that is most of a product's time. What does not need x is done before, or while x is on its way: addresses, and the first
// chunks of w from shared memory into registers.
//
// The first run of each warp is asked for before the second of any. No more than `AtOnce` runs are on their way before x
// is: it comes through the same queues. Of a ring that is a multiple of RANGES, so that a warp waits for runs of its own.
//
// grid: one block a multiprocessor, at most; a block takes every gridDim.x-th tile, only one where Places is 0: then there
// is a place for all its w, and a range comes as one run or chunk by chunk. block: 256 threads. shared: 1 KB + the places,
// 1 KB * Run * rows of w in a tile each, of all warps + 128 bytes * Rows for each chunk of k + what the kernel keeps behind
// it. Read twice: x, by every block (L2).
//
// arch: 90a
// sizes: Out=bf16 Din=2048 Rows=1,8 Features=8,16 Run=1,4 Places=0 Normed=0 Gated=0 | Out=bf16 Din=3584 Rows=1,8 Features=8 Run=7 Places=0 Normed=0 Gated=0 | Out=bf16 Din=1088 Rows=1,8 Features=64 Run=1 Places=0 Normed=0 Gated=0 | Out=bf16 Din=1024,4096 Rows=1,8 Features=24,32 Run=1 Places=3 Normed=0 Gated=1 | Out=bf16 Din=1024 Rows=1 Features=32 Run=1 Places=0 Normed=1 Gated=1 | Out=bf16 Din=1024 Rows=1 Features=40,64 Run=1 Places=0 Normed=1 Gated=0 | Out=bf16 Din=2560,5120,8192 Rows=1 Features=48 Run=1 Places=4 Normed=1 Gated=0 | Out=float Din=4096 Rows=1 Features=40 Run=4 Places=2 Normed=1 Gated=0
#include "ranges.cuh"
#include "tma.cuh"

constexpr int THREADS = RANGES * WARP;
constexpr int ROW_BYTES = 128, K = ROW_BYTES / sizeof(bf16);            // of a chunk
constexpr int TALL = (1 + Gated) * Features, TILES = (TALL + 15) / 16;  // rows of w in a tile; 16 of them a product
constexpr int CHUNK = TALL * ROW_BYTES, X_CHUNK = Rows * ROW_BYTES;     // bytes of w and of x
constexpr int APART = 16 * TILES + 4;  // numbers from a row's sums to the next row's, not all in the same banks
constexpr int CHUNKS = Din / K, LONGEST = (CHUNKS + RANGES - 1) / RANGES;  // of k; of a range, at most
constexpr int PLACES = Places ? Places : (LONGEST + Run - 1) / Run;
constexpr int HELD = TILES == 1 && !Places ? 2 : 1;                                     // chunks of w that a warp has in registers
constexpr int UNROLLED = Places ? 1 : Run > 1 ? Run : LONGEST <= 2 ? LONGEST : 1;       // chunks of a range
constexpr int TOGETHER = TILES > 4 ? 1 : TILES > 1 || Normed || Gated ? 2 : 4;          // blocks for which registers suffice
static_assert(!Gated || Run == 1, "a chunk of gate and one of up lie together");

// x, in a register from here on: the compiler would compute it again wherever it is needed, behind the wait.
__device__ __forceinline__ void keep(int& x) { asm volatile("" : "+r"(x)); }
template <class T>
__device__ __forceinline__ void keep(const T*& x) {
  asm volatile("" : "+l"(x));
#ifndef EMULATED
  __builtin_assume(__isGlobal(x));
#endif
}

// Asks for the runs of a warp's range, tile after tile, each into the next place.
struct Asker {
  const TensorMap<const bf16>&w, &w_more;
  char* places;
  Barrier* full;
  int width, w_tiles, tiles, begin, own, tile;  // chunks of the range: own, from begin on
  int chunk = 0, place = 0;

  __device__ __forceinline__ void ask() {
    if (tile >= tiles) return;
    const bool of_more = tile >= w_tiles;
    const int feature = (of_more ? tile - w_tiles : tile) * Features;
    arrive_expecting(full[place], Run * CHUNK);
#pragma unroll
    for (int s = 0; s <= Gated; s++) {
      char* const to = places + place * Run * CHUNK + s * (CHUNK / 2);
      load_tile(to, of_more ? w_more : w, full[place], 0, feature + s * width, begin + chunk, ONCE);
    }
    if (++place == PLACES) place = 0;
    if ((chunk += Run) >= own) chunk = 0, tile += gridDim.x;
  }
};

// Chunks of a warp's range.
__device__ __forceinline__ int chunks_of(int range) {
  return CHUNKS % RANGES ? range_start(range + 1, CHUNKS) - range_start(range, CHUNKS) : LONGEST;
}

// x = the norm of stream + added, or of the stream alone, in the bits of rms_norm.cu, all of Din numbers, of which a warp
// makes those of its own range, `own` chunks from `begin` on; block 0 writes the sum. `meanwhile` runs while the two are
// read. squares: room for 32 numbers.
template <class Meanwhile>
__device__ __forceinline__ void norm(
    const bf16* stream, const bf16* added, bf16* sum, const float* gain, float eps, int begin, int own, bf16* x,
    float* squares, Meanwhile meanwhile) {
  using Two = __nv_bfloat162;
  constexpr int WORDS = Din / 8, WAVES = (WORDS + WARP - 1) / WARP;  // of 16 bytes; of a warp's words
  constexpr int EACH = (LONGEST * K / 4 + WARP - 1) / WARP;          // fours of a lane in a warp's range
  const int lane = threadIdx.x % WARP;
  int i = threadIdx.x;
  const Two* of_stream = reinterpret_cast<const Two*>(stream) + 4 * i;
  const Two* of_added = reinterpret_cast<const Two*>(added ? added : stream) + 4 * i;
  keep(of_stream), keep(of_added);
  Pack<float, 4> delta[EACH];
  const auto own_four = [&](int e) { return e * WARP + lane < own * K / 4 ? begin * K + 4 * (e * WARP + lane) : -1; };
#pragma unroll
  for (int e = 0; e < EACH; e++) {
    if (own_four(e) >= 0) delta[e] = load<4>(gain + own_four(e));
  }
  Pack<Two, 4> h, more = {};
  const auto read = [&] {
    if (i < WORDS) h = load<4>(of_stream);
    if (i < WORDS && added) more = load<4>(of_added);
    of_stream += 4 * THREADS, of_added += 4 * THREADS;
  };
  after_previous();
  read();
  meanwhile();
#pragma unroll 1
  while (i < WAVES * WARP) {
    float square = 0.0f;
    if (i < WORDS) {
#pragma unroll
      for (int j = 0; j < 4; j++) {
        h.v[j] = __hadd2(h.v[j], more.v[j]);
        const float2 rounded = __bfloat1622float2(h.v[j]);
        square = fmaf(rounded.y, rounded.y, fmaf(rounded.x, rounded.x, square));
      }
      if (blockIdx.x == 0 && added) store(reinterpret_cast<Two*>(sum) + 4 * i, h);
      store(reinterpret_cast<Two*>(x) + 4 * i, h);
    }
    square = warp_sum(square);
    if (lane == 0) squares[i / WARP] = square;
    if (WAVES <= RANGES) break;
    i += THREADS;
    read();
  }
  __syncthreads();
  // warp_sum of the squares, a few in place
  float square;
  if constexpr (WAVES > 8) {
    square = warp_sum(lane < WAVES ? squares[lane] : 0.0f);
  } else {
    constexpr int NEAR = WAVES > 4 ? 8 : 4;
    float part[NEAR];
#pragma unroll
    for (int w = 0; w < NEAR; w++) part[w] = w < WAVES ? squares[w] : 0.0f;
#pragma unroll
    for (int far = NEAR / 2; far > 0; far /= 2) {
#pragma unroll
      for (int w = 0; w < far; w++) part[w] += part[w + far];
    }
    square = part[0];
  }
  const float scale = 1.0f / sqrtf(square / Din + eps);
#pragma unroll
  for (int e = 0; e < EACH; e++) {
    if (own_four(e) < 0) continue;
    uint2* const four = reinterpret_cast<uint2*>(x + own_four(e));
    const uint2 word = *four;
    Two two[2];
    memcpy(two, &word, 8);
#pragma unroll
    for (int j = 0; j < 2; j++) {
      const float2 y = __bfloat1622float2(two[j]);
      two[j] = __floats2bfloat162_rn(y.x * scale * (1.0f + delta[e].v[2 * j]), y.y * scale * (1.0f + delta[e].v[2 * j + 1]));
    }
    uint2 out;
    memcpy(&out, two, 8);
    *four = out;
  }
}

// The next kernel may come from here on, and not only when this one waits for the kernel before.
__device__ __forceinline__ void next_may_start() {
#ifndef EMULATED
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

extern "C" __global__ void __launch_bounds__(THREADS, TOGETHER) linear_whole(
    const __grid_constant__ TensorMap<const bf16> w,       // [Din / 64, Dout, 64] strides [64, Din, 1] box [Run, Features]
    const __grid_constant__ TensorMap<const bf16> w_more,  // [Din / 64, More, 64] strides [64, Din, 1] box [Run, Features] or null
    const bf16* x,                   // [R, Din] strides [Ldx, 1] aligned 16; the residual stream when Normed
    const bf16* added,               // [R, Din] aligned 16 or null; what is added to the stream
    bf16* sum,                       // [R, Din] aligned 16 or null; the stream with it
    const float* __restrict__ gain,  // [Din] aligned 16 or null; of the norm, a delta to 1
    Out* out,                        // [R, Dout / (1 + Gated)]
    float* more,                     // [R, More] or null; x w_more^T
    float eps,
    int R,
    int Ldx,
    int Dout,
    int More,
    int AtOnce)
{
  if (Rows == 1 && !Places) next_may_start();
  extern __shared__ uint4 dynamic[];
  __shared__ Barrier full[RANGES][PLACES];
  const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
  const int begin = range_start(warp, CHUNKS), own = chunks_of(warp);
  const int width = Dout / (1 + Gated), w_tiles = (width + Features - 1) / Features;
  const int tiles = w_tiles + (More + Features - 1) / Features;
  int skipped = -(unsigned long long)dynamic % 1024;
  keep(skipped);
  char* const all = reinterpret_cast<char*>(dynamic) + skipped;
  char* const ws = all + warp * PLACES * Run * CHUNK;
  char* const x_all = all + RANGES * PLACES * Run * CHUNK;
  char* const xs = x_all + begin * X_CHUNK;
  float* const squares = reinterpret_cast<float*>(x_all + CHUNKS * X_CHUNK);  // if Normed
  float* const sums = squares + (Normed ? WARP : 0);                          // [RANGES][Rows][APART]
  Asker asker{w, w_more, ws, full[warp], width, w_tiles, own ? tiles : 0, begin, own, (int)blockIdx.x};

  if (lane == 0) {
    prefetch_map(w);
#pragma unroll 1
    for (int i = 0; i < PLACES; i++) make_barrier(full[warp][i], 1);
    barriers_made();
  }
  __syncthreads();
  if (lane == 0) {
#pragma unroll 1
    for (int i = 0; i < PLACES && asker.tile < asker.tiles; i++) {
      const int before = i * RANGES + warp - AtOnce, range = before % RANGES;  // the run that has to be there first
      const bool asked = Places || before / RANGES * Run < chunks_of(range);
      if (before >= 0 && asked) wait(full[range][before / RANGES], 0);
      asker.ask();
    }
  }
  // where a lane's words lie: of w for each product of a chunk, the last eight rows standing for sixteen; of x for two
  int w_at[4], x_at[2];
  int half = TALL % 16 ? lane / 8 % 2 * 8 * ROW_BYTES : 0;
  const int x_row = Rows == 8 ? lane % 8 : 0;
#pragma unroll
  for (int s = 0; s < 4; s++) w_at[s] = lane % 16 * ROW_BYTES + (2 * s + lane / 16 ^ lane % 8) * 16, keep(w_at[s]);
#pragma unroll
  for (int h = 0; h < 2; h++) x_at[h] = x_row * ROW_BYTES + (4 * h + lane / 8 ^ x_row) * 16, keep(x_at[h]);
  if (TALL % 16) keep(half);

  // the next chunk of w, and of x, for their four products
  unsigned a[HELD][4][TILES][4], b[2][4];
  int to_come = Places ? own * ((tiles - 1 - (int)blockIdx.x) / (int)gridDim.x + 1) - 1 : 0;  // behind the first
  int chunk = 0, place = 0, parity = 0;
  const char *from = ws, *x_from = xs;
  const auto load_w = [&](int p, int i) {
    if (Places ? chunk % Run == 0 : Run == 1 || i == 0) wait(full[warp][place], parity);
#pragma unroll
    for (int s = 0; s < 4; s++) {
#pragma unroll
      for (int t = 0; t < TILES; t++) {
        ldmatrix_x4(a[p][s][t], from + w_at[s] - (t == TILES - 1 ? half : 0) + t * 16 * ROW_BYTES);
      }
    }
    from += CHUNK, chunk++;
    if constexpr (!Places) {
      place++;  // of the next chunk, where each has one
    } else if (chunk == own || chunk % Run == 0) {
      if (chunk == own) chunk = 0;
      if (++place == Places) place = 0, parity ^= 1;
      from = ws + place * Run * CHUNK;
    }
  };
  const auto load_x = [&] {
#pragma unroll
    for (int h = 0; h < 2; h++) ldmatrix_x4(b[h], x_from + x_at[h]);
    x_from += X_CHUNK;
  };
  const auto load_first = [&] {
#pragma unroll
    for (int p = 0; p < HELD && p < own; p++) load_w(p, p);
  };
  __syncwarp();
  if constexpr (Normed) {
    bf16* const row = reinterpret_cast<bf16*>(x_all);
    norm(x, added, sum, gain, eps, begin, own, row, squares, load_first);
  } else if constexpr (Rows == 1) {
    const bf16* of_row = x + begin * K + 8 * lane;
    keep(of_row);
    after_previous();
#pragma unroll
    for (int i = lane; i < 8 * own; i += WARP, of_row += 8 * WARP) cp_async16(xs + 16 * i, of_row, true);
  } else {
    after_previous();
    const int row = lane / 8, word = lane % 8;
    const bf16* from = x + (long long)row * Ldx + begin * K + word * 8;
#pragma unroll 1
    for (int i = 0; i < own; i++, from += K) {
      char* const to = xs + i * X_CHUNK + row * ROW_BYTES;
      cp_async16(to + (word ^ row) * 16, from, row < R);
      cp_async16(to + 4 * ROW_BYTES + (word ^ row + 4) * 16, from + 4ll * Ldx, row + 4 < R);
    }
  }
  if constexpr (!Normed) {
    cp_async_commit();
    load_first();
    cp_async_wait<0>();
  }
  __syncwarp();
  if (own) load_x();

#pragma unroll 1
  for (int tile = blockIdx.x; !Places || tile < tiles; tile += gridDim.x) {
    float own_sum[TILES][4] = {};
#pragma unroll(UNROLLED)
    for (int first = 0; first < (UNROLLED > 1 ? UNROLLED : own); first += HELD) {
#pragma unroll
      for (int p = 0; p < HELD; p++) {
        const int i = first + p;
        if (i >= own) break;
#pragma unroll
        for (int s = 0; s < 4; s++) {
          const unsigned two[2] = {b[s / 2][s % 2 * 2], b[s / 2][s % 2 * 2 + 1]};
#pragma unroll
          for (int t = 0; t < TILES; t++) mma_m16n8k16(own_sum[t], a[p][s][t], two);
        }
        if (Places && (i % Run == Run - 1 || i == own - 1)) {
          __syncwarp();  // all lanes have read the place
          if (lane == 0) asker.ask();
        }
        if (Places && i == own - 1) x_from = xs;
        if (Places || i + 1 < own) load_x();
        if (Places ? to_come-- > 0 : i + HELD < own) load_w(p, i + HELD);
      }
    }

    const bool of_more = tile >= w_tiles;
    int first = (of_more ? tile - w_tiles : tile) * Features, end = of_more ? More : width;
    keep(first), keep(end);

    // the ranges' sums in order, starting from zero
    if (Places && tile != blockIdx.x) __syncthreads();  // those of the tile before have been read
    float* const mine = sums + warp * Rows * APART + lane / 4 + (Rows == 8 ? lane % 4 * 2 * APART : 0);
    if (Rows == 8 || lane % 4 == 0) {
#pragma unroll
      for (int t = 0; t < TILES; t++) {
#pragma unroll
        for (int i = 0; i < 4; i += Rows == 8 ? 1 : 2) mine[i % 2 * APART + 16 * t + i / 2 * 8] = own_sum[t][i];
      }
    }
    __syncthreads();
    const auto total = [&](const float* of) {
      float y = 0.0f;
#pragma unroll
      for (int r = 0; r < RANGES; r++) y += of[r * Rows * APART];
      return y;
    };
    const auto finish = [&](int row, int n) {
      const int feature = first + n;
      if (feature >= end) return;
      const float y = total(sums + row * APART + n);
      if (of_more) {
        more[row * More + feature] = y;
      } else if constexpr (Gated) {
        const Out gate = from_float<Out>(y), up = from_float<Out>(total(sums + row * APART + n + Features));
        out[row * width + feature] = from_float<Out>(silu(to_float(gate)) * to_float(up));
      } else {
        out[row * width + feature] = from_float<Out>(y);
      }
    };
    if constexpr (Rows == 1) {
      if (threadIdx.x < Features) finish(0, threadIdx.x);
    } else {
#pragma unroll 1
      for (int i = threadIdx.x; i < Features * R; i += THREADS) finish(i / Features, i % Features);
    }
    if (!Places) return;
  }
}
