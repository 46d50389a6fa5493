// x w^T for few rows or few features, bf16 x, bf16 or FP8 w. Definition: linear in boleinfer/ops/linear.py. Sums in
// float32, in the order that linear.cuh describes.
//
// grid: (blocks, ceil(R / 8)), one block a multiprocessor. block: 512 threads, 4 / Splits teams of warps; a team owns a
// tile of `Features` features, 8 rows and all k, then the tile gridDim.x * TEAMS further on; a warp owns a chunk of every
// step of its range. w comes through a ring of Depth chunks in which a lane finds the words that it asked for itself, so
// that warps wait for one another only where a tile's sums meet. The ring is full before x is there, and fills on across
// the ends of tiles.
// shared: Depth * 8 KB * (words a lane takes of a chunk), then x when Staged; 16 KB, the warps' sums of two tiles. Read
// twice: x, by every block (L2), and where it is not Staged by every tile.
//
// sizes: Wt=bf16 Out=bf16 Features=8,16 Depth=6 Splits=4 Staged=true | Wt=fp8 Out=float Features=16 Depth=12 Splits=1,4 Staged=false
#include "linear.cuh"

constexpr int WARPS = 16, THREADS = WARPS * WARP;
constexpr int TEAM = WARPS_OF_K * Splits, TEAMS = WARPS / TEAM;
constexpr int WORDS = sizeof(Wt);        // 16-byte words of a row's chunk that a lane takes
constexpr int LANE_K = 16 / sizeof(Wt);  // k of one of them
constexpr int TALL = Features / 8;       // rows of w of a lane
constexpr int SLOT = TALL * WORDS * WARP;

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
    const bf16* __restrict__ x,       // [R, Din] strides [Ldx, 1] aligned 16
    const Wt* __restrict__ w,         // [Dout, Din] aligned 16
    const float* __restrict__ scale,  // [(Dout + 127) / 128, (Din + 127) / 128] or null; of FP8 w
    Out* __restrict__ out,            // [R, Dout]
    int R,
    int Ldx,
    int Din,
    int Dout)
{
  extern __shared__ uint4 ring[];  // [Depth][warp][word][lane], then x [row][staged_words]
  __shared__ float4 part[2][THREADS];
  const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, g = lane / 4, own_k = lane % 4 * LANE_K;
  const int range = warp % TEAM / WARPS_OF_K * split_width(Din, Splits), begin = range + warp % WARPS_OF_K * CHUNK;
  const int end = min(range + split_width(Din, Splits), Din), chunks = max(0, end - begin + STEP - 1) / STEP;
  const int tiles = (Dout + Features - 1) / Features, step = gridDim.x * TEAMS;
  const int first = blockIdx.x * TEAMS + warp / TEAM;

  // start the copy of the next chunk, of the same tile or the next one, into place d of the ring
  uint4* const places = ring + warp * SLOT + lane;
  const Wt* from = w + ((long long)first * Features + g) * Din + begin + own_k;
  int next = chunks ? first : tiles, next_k = begin;
  const auto fetch = [&](int d) {
    if (next < tiles) {
#pragma unroll
      for (int i = 0; i < TALL * WORDS; i++) {
        const int row = i / WORDS * 8, at = i % WORDS * 32;
        const bool valid = next * Features + g + row < Dout && next_k + own_k + at < end;
        cp_async16(places + d * WARPS * SLOT + i * WARP, from + (long long)row * Din + at, valid);
      }
      from += STEP, next_k += STEP;
      if (next_k >= end) {
        next += step, next_k = begin;
        from += (long long)step * Features * Din - (long long)chunks * STEP;
      }
    }
    cp_async_commit();
  };
  // lane i of the warp has the scale of its chunk i after k
  const auto scales_at = [&](int tile, int k) {
    k += lane * STEP;
    const bool exists = WORDS == 1 && tile < tiles && k < end;
    return exists ? scale[(long long)tile * Features / SCALED * ((Din + SCALED - 1) / SCALED) + k / SCALED] : 0.0f;
  };
#pragma unroll
  for (int d = 0; d < Depth; d++) fetch(d);
  float scales_next = scales_at(first, begin);
  after_previous();

  const int rows = min(8, R - 8 * (int)blockIdx.y), row = min(g, rows - 1);
  x += 8ll * blockIdx.y * Ldx;
  uint4* const staged = ring + Depth * WARPS * SLOT;
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
  for (int round = 0, d = 0; blockIdx.x * TEAMS + round * step < tiles; round++) {
    // sum = the chunks of this warp in order of k
    const int tile = first + round * step;
    float sum[4] = {}, scales = scales_next;
    scales_next = scales_at(tile + step, begin);
    for (int i = 0; i < (tile < tiles ? chunks : 0); i++) {
      const int k = begin + i * STEP;
      const uint4 x_now[2] = {x_next[0], x_next[1]};
      own.load(x_next, i + 1 < chunks ? k + STEP : begin);
      if (WORDS == 1 && i && i % WARP == 0) scales = scales_at(tile, k);
      cp_async_wait<Depth - 1>();
      const uint4* place = places + d * WARPS * SLOT;
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
        const float factor = __shfl_sync(ALL_LANES, scales, i % WARP);
#pragma unroll
        for (int j = 0; j < 4; j++) sum[j] = fmaf(factor, block[j], sum[j]);
      }
      fetch(d);
      d = d + 1 < Depth ? d + 1 : 0;
    }

    part[round % 2][threadIdx.x] = make_float4(sum[0], sum[1], sum[2], sum[3]);
    __syncthreads();
    // out = sum over ranges of (sum over warps); thread 4 l + i of a team has number i of lane l
    const int team = threadIdx.x / (4 * WARP), l = threadIdx.x / 4 % WARP, i = threadIdx.x % 4;
    const int r = 2 * (l % 4) + i % 2, f = (blockIdx.x * TEAMS + team + round * step) * Features + l / 4 + i / 2 * 8;
    if (team < TEAMS && r < rows && (TALL == 2 || i < 2) && f < Dout) {
      const float* sums = &part[round % 2][team * TEAM * WARP + l].x + i;
      float total = 0.0f;
#pragma unroll
      for (int s = 0; s < Splits; s++) {
        float one = sums[s * WARPS_OF_K * WARP * 4];
#pragma unroll
        for (int c = 1; c < WARPS_OF_K; c++) one += sums[(s * WARPS_OF_K + c) * WARP * 4];
        total = s ? total + one : one;
      }
      out[(8ll * blockIdx.y + r) * Dout + f] = from_float<Out>(total);
    }
  }
}
