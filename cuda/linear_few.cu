// x w^T for few rows or few features, bf16 x, bf16 or FP8 w, or of its halves silu(gate) * up. Definitions: linear and
// gated_linear in boleinfer/ops/linear.py. Sums in float32, in the order that linear.cuh describes. Gated rounds them to
// Out before it goes on, as linear does; half a tile's features are of the gate, the others those of up beside them, and
// Dout is a multiple of 16 (so that each half of a tile is whole and has one scale).
//
// grid: (blocks, ceil(R / 8)), one block a multiprocessor. It owns a tile of `Features` features, 8 rows and all k; then
// the tile gridDim.x further on. block: 512 threads; a warp owns a range of k. w comes through a ring of Depth chunks in
// which a lane finds the words that it asked for itself, so that warps wait for one another only where a tile's sums meet.
// The ring is full before x is there, and fills on across the ends of tiles.
// shared: Depth * 8 KB * (words a lane takes of a chunk), then x when Staged; 16 KB, the warps' sums of two tiles. Read
// twice: x, by every block (L2), and where it is not Staged by every tile.
//
// sizes: Wt=bf16 Out=bf16 Features=8,16 Depth=6 Splits=4 Staged=true Gated=0,1 | Wt=fp8 Out=float Features=16 Depth=12 Splits=1 Staged=false Gated=0 | Wt=fp8 Out=bf16 Features=8,16 Depth=12 Splits=4 Staged=true Gated=1
#include "linear.cuh"

constexpr int THREADS = RANGES * WARP;
constexpr int WORDS = sizeof(Wt);        // 16-byte words of a row's chunk that a lane takes
constexpr int LANE_K = 16 / sizeof(Wt);  // k of one of them
constexpr int TALL = Features / 8;       // rows of w of a lane
constexpr int SLOT = TALL * WORDS * WARP;
constexpr int RESULTS = Gated ? Features / 2 : Features;  // features of out in a tile

// Words of a row of x in shared memory: whole chunks, and some more so that rows read at once lie in different banks.
__device__ __forceinline__ int staged_words(int Din) {
  return (Din + CHUNK - 1) / CHUNK * (CHUNK / 8) + (WORDS == 2 ? 4 : 1);
}

// The lane's part of x under a chunk.
struct Row {
  const bf16* x;      // in global memory, from the lane's first k of chunk 0 on
  const uint4* word;  // the same in shared memory
  int Din;

  __device__ __forceinline__ void load(uint4 (&to)[2], int k) const {
#pragma unroll
    for (int p = 0; p < 2; p++) {
      const int at = k + (WORDS == 2 ? 32 * p : 8 * p);
      to[p] = Staged ? word[at / 8] : load_or_zero(x + at, at < Din);
    }
  }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1) linear_few(
    const bf16* x,                    // [R, Din] strides [Ldx, 1] aligned 16
    const Wt* __restrict__ w,         // [Dout, Din] aligned 16
    const float* __restrict__ scale,  // [(Dout + 127) / 128, (Din + 127) / 128] or null; of FP8 w
    Out* out,                         // [R, Dout / (1 + Gated)]
    int R,
    int Ldx,
    int Din,
    int Dout)
{
  extern __shared__ uint4 ring[];  // [Depth][warp][word][lane], then x [row][staged_words]
  __shared__ float4 part[2][THREADS];
  const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, g = lane / 4, own_k = lane % 4 * LANE_K;
  const int all = (Din + CHUNK - 1) / CHUNK, chunks = range_start(warp + 1, all) - range_start(warp, all);
  const int begin = range_start(warp, all) * CHUNK;
  const int width = Gated ? Dout / 2 : Dout, tiles = (width + RESULTS - 1) / RESULTS;  // of out
  // rows of w under tile 0: the lane's first, and from it to its second
  const int first = Gated && g >= RESULTS ? width + g - RESULTS : g, apart = Gated ? width : 8;

  // start the copy of the next chunk, of the same tile or the next one, into place d of the ring
  uint4* const places = ring + warp * SLOT + lane;
  const Wt* from = w + ((long long)blockIdx.x * RESULTS + first) * Din + begin + own_k;
  int next = chunks ? (int)blockIdx.x : tiles, next_chunk = 0;
  const auto fetch = [&](int d) {
    if (next < tiles) {
#pragma unroll
      for (int i = 0; i < TALL * WORDS; i++) {
        const int row = i / WORDS * apart, at = i % WORDS * 32;
        const bool valid = next * RESULTS + first + row < Dout && begin + next_chunk * CHUNK + own_k + at < Din;
        cp_async16(places + d * RANGES * SLOT + i * WARP, from + (long long)row * Din + at, valid);
      }
      from += CHUNK;
      if (++next_chunk == chunks) {
        next += gridDim.x, next_chunk = 0;
        from += (long long)gridDim.x * RESULTS * Din - chunks * CHUNK;
      }
    }
    cp_async_commit();
  };
  // lane l of the warp has the scales of its chunk i + l: x that of the tile's first features, y that of up
  const auto scales_at = [&](int tile, int i) {
    const long long k = (begin + (i + lane) * CHUNK) / SCALED, blocks = (Din + SCALED - 1) / SCALED;
    const int f = tile * RESULTS;
    float2 found = make_float2(0.0f, 0.0f);
    if (WORDS == 1 && tile < tiles && i + lane < chunks) {
      found.x = scale[f / SCALED * blocks + k];
      if (Gated) found.y = scale[(width + f) / SCALED * blocks + k];
    }
    return found;
  };
#pragma unroll
  for (int d = 0; d < Depth; d++) fetch(d);
  float2 scales_next = scales_at(blockIdx.x, 0);
  after_previous();

  const int rows = min(8, R - 8 * (int)blockIdx.y), row = min(g, rows - 1);
  x += 8ll * blockIdx.y * Ldx;
  uint4* const staged = ring + Depth * RANGES * SLOT;
  if constexpr (Staged) {
    const int words = staged_words(Din);
#pragma unroll 4
    for (int i = threadIdx.x; i < rows * words; i += THREADS) {
      const int k = i % words * 8;
      staged[i] = load_or_zero(x + (long long)(i / words) * Ldx + k, k < Din);
    }
    __syncthreads();
  }
  const Row own{x + (long long)row * Ldx + own_k, staged + row * staged_words(Din) + own_k / 8, Din - own_k};

  uint4 x_next[2];
  own.load(x_next, begin);
  for (int tile = blockIdx.x, d = 0, odd = 0; tile < tiles; tile += gridDim.x, odd ^= 1) {
    // sum = the chunks of this warp in order of k
    float sum[4] = {};
    float2 scales = scales_next;
    scales_next = scales_at(tile + gridDim.x, 0);
    for (int i = 0; i < chunks; i++) {
      const uint4 x_now[2] = {x_next[0], x_next[1]};
      own.load(x_next, begin + (i + 1 < chunks ? i + 1 : 0) * CHUNK);
      if (WORDS == 1 && i && i % WARP == 0) scales = scales_at(tile, i);
      cp_async_wait<Depth - 1>();
      const uint4* place = places + d * RANGES * SLOT;
      uint4 low[WORDS], high[WORDS];
#pragma unroll
      for (int p = 0; p < WORDS; p++) {
        low[p] = place[p * WARP];
        high[p] = TALL == 2 ? place[(WORDS + p) * WARP] : make_uint4(0, 0, 0, 0);
      }
      if constexpr (WORDS == 2) {
#pragma unroll
        for (int p = 0; p < 2; p++) Fragments<Wt>(low[p], high[p]).multiply(sum, x_now + p);
      } else {
        float block[4] = {};
        Fragments<Wt>(low[0], high[0]).multiply(block, x_now);
        const float factor = __shfl_sync(ALL_LANES, scales.x, i % WARP);
        const float of_up = Gated ? __shfl_sync(ALL_LANES, scales.y, i % WARP) : factor;
#pragma unroll
        for (int j = 0; j < 4; j++) sum[j] = fmaf(j / 2 * 8 + g < RESULTS ? factor : of_up, block[j], sum[j]);
      }
      fetch(d);
      d = d + 1 < Depth ? d + 1 : 0;
    }

    part[odd][threadIdx.x] = make_float4(sum[0], sum[1], sum[2], sum[3]);
    __syncthreads();
    // the groups of ranges, added up; thread 4 l + i has number i of lane l
    const auto total = [&](const float* sums) {
      float all_groups = 0.0f;
#pragma unroll
      for (int s = 0; s < Splits; s++) {
        float group = 0.0f;
#pragma unroll
        for (int m = 0; m < RANGES / Splits; m++) group += sums[(s * (RANGES / Splits) + m) * WARP * 4];
        all_groups += group;
      }
      return from_float<Out>(all_groups);
    };
    const int l = threadIdx.x / 4 % WARP, i = threadIdx.x % 4, r = 2 * (l % 4) + i % 2;
    const int n = l / 4 + i / 2 * 8, f = tile * RESULTS + n;
    if (threadIdx.x < 4 * WARP && r < rows && n < RESULTS && f < width) {
      const float* sums = &part[odd][l].x + i;
      Out y = total(sums);
      if constexpr (Gated) {  // up has the lane's second pair, or is 4 rows further on
        const Out up = total(sums + (TALL == 2 ? 2 : 4 * 4 * 4));
        y = from_float<Out>(silu(to_float(y)) * to_float(up));
      }
      out[(8ll * blockIdx.y + r) * width + f] = y;
    }
  }
}
