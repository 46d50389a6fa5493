// x w^T for 2 .. 128 rows, bf16 x, bf16 or FP8 w. Definition: linear in boleinfer/ops/linear.py. Sums in float32, in the
// order that linear.cuh describes, so that a row has the bits that linear_few gives it.
//
// grid: (ceil(Dout / 128) * ceil(R / (8 Tiles)), splits): a block owns 128 features, 8 Tiles rows and one range of k;
// blocks of the same features are neighbours. block: 256 threads; warp 4 m + c owns features 64 m .. 64 m + 63 and the
// chunks c. w and x come through a ring of Stages stages of 32 k (FP8: 64) a chunk. Where there are several ranges, the block
// of its features and rows that ends last adds up their sums; tickets counts them and is zero before and after.
// shared: Stages * STAGE_WORDS * 16, of which 4 KB * Tiles serve the warps' sums at the end. Read twice: x, by every block (L2); w by the
// blocks of further rows (L2).
//
// sizes: Wt=bf16 Out=bf16 Tiles=1,2,4,8 Stages=2 | Wt=fp8 Out=bf16 Tiles=1,2,4 Stages=2 | Wt=bf16 Out=float Tiles=8 Stages=4
#include "linear.cuh"

constexpr int THREADS = 256, FEATURES = 128, ROWS = 8 * Tiles;
constexpr int PIECES = sizeof(Wt);                      // stages of a step
constexpr int BLOCKS = PIECES == 2 && Tiles <= 4 ? 2 : 1;  // on a multiprocessor (blocks_per_sm in linear.py)
constexpr int SLABS = 4;                                // of 16 features in a warp
constexpr int TOGETHER = 2 * PIECES;                   // slabs whose fragments are in registers at once
constexpr int UNITS = 8 / PIECES;                       // 16-byte words of x of a row, chunk and stage; of w there are 4
constexpr int W_WORDS = WARPS_OF_K * FEATURES * 4, X_WORDS = WARPS_OF_K * ROWS * UNITS;
constexpr int STAGE_WORDS = W_WORDS + X_WORDS;

// Where a stage keeps word u of a row of x: eight lanes read two rows at once, FP8's every other word.
__device__ __forceinline__ int x_word(int c, int row, int u) {
  return W_WORDS + (c * ROWS + row) * UNITS + (PIECES == 2 ? u : u ^ (row & 1));
}

// What one thread copies into every stage.
struct Copies {
  static constexpr int W_ROWS = THREADS / 4, X_ROWS = THREADS / UNITS < ROWS ? THREADS / UNITS : ROWS;  // at once
  static constexpr int X_CHUNKS = THREADS / (X_ROWS * UNITS);
  const Wt* w;  // its first word
  const bf16* x;
  int Din, Ldx;
  int w_rows, x_rows;  // that exist from there on
  int w_end, x_end;    // of k
  int w_to, x_to;

  // x, w: of the block's first row and feature; of which `rows` and `features` exist; end: of the range of k
  __device__ __forceinline__ Copies(const bf16* x, const Wt* w, int rows, int features, int Ldx, int Din, int end)
      : Din(Din), Ldx(Ldx) {
    const int f = threadIdx.x / 4, w_k = threadIdx.x % 4 * (16 / (int)sizeof(Wt));
    const int u = threadIdx.x % UNITS, row = threadIdx.x / UNITS % X_ROWS, c = threadIdx.x / (UNITS * X_ROWS);
    const int x_k = c * CHUNK + 8 * u;
    this->w = w + (long long)f * Din + w_k;
    this->x = x + (long long)row * Ldx + x_k;
    w_rows = features - f, x_rows = rows - row;
    w_end = end - w_k, x_end = end - x_k;
    w_to = threadIdx.x, x_to = x_word(c, row, u);
  }

  // Start the copies of the stage whose first chunk begins at k.
  __device__ __forceinline__ void start_w(uint4* stage, int k) const {
#pragma unroll
    for (int f = 0; f < FEATURES; f += W_ROWS) {
#pragma unroll
      for (int c = 0; c < WARPS_OF_K; c++) {
        const bool valid = f < w_rows && k + c * CHUNK < w_end;
        cp_async16(stage + w_to + (c * FEATURES + f) * 4, w + (long long)f * Din + k + c * CHUNK, valid);
      }
    }
  }
  __device__ __forceinline__ void start_x(uint4* stage, int k) const {
#pragma unroll
    for (int row = 0; row < ROWS; row += X_ROWS) {
#pragma unroll
      for (int c = 0; c < WARPS_OF_K; c += X_CHUNKS) {
        if (X_WORDS < THREADS && threadIdx.x >= X_WORDS) continue;
        const bool valid = row < x_rows && k + c * CHUNK < x_end;
        cp_async16(stage + x_to + (c * ROWS + row) * UNITS, x + (long long)row * Ldx + k + c * CHUNK, valid);
      }
    }
  }
};

// sum += w x^T of this warp's features and its chunk; scale: of the FP8 block.
__device__ __forceinline__ void multiply(float (&sum)[SLABS][Tiles][4], const uint4* stage, int c, int m, float scale) {
  const int g = threadIdx.x % WARP / 4, t = threadIdx.x % 4;
  const uint4* w = stage + (c * FEATURES + 16 * SLABS * m + g) * 4 + t;
#pragma unroll
  for (int first = 0; first < SLABS; first += TOGETHER) {
    Fragments<Wt> slabs[TOGETHER];
#pragma unroll
    for (int i = 0; i < TOGETHER; i++) slabs[i] = {w[16 * 4 * (first + i)], w[(16 * (first + i) + 8) * 4]};
#pragma unroll
    for (int n = 0; n < Tiles; n++) {
      uint4 x[2 / PIECES];
#pragma unroll
      for (int p = 0; p < 2 / PIECES; p++) x[p] = stage[x_word(c, 8 * n + g, PIECES == 2 ? t : 2 * t + p)];
#pragma unroll
      for (int i = 0; i < TOGETHER; i++) {
        float(&d)[4] = sum[first + i][n];
        if constexpr (PIECES == 2) {
          slabs[i].multiply(d, x);
        } else {
          float block[4] = {};
          slabs[i].multiply(block, x);
#pragma unroll
          for (int j = 0; j < 4; j++) d[j] = fmaf(scale, block[j], d[j]);
        }
      }
    }
  }
}

// total = the sums of the warps of each chunk, added in order; where total keeps row r of feature f:
__device__ __forceinline__ int total_at(int r, int f) {
  const int m = f / (16 * SLABS), i = f / 8 % (2 * SLABS) * 2 + r % 2;
  return ((r / 8 * 4 * SLABS + i) * (FEATURES / (16 * SLABS)) + m) * WARP + f % 8 * 4 + r % 8 / 2;
}
__device__ __forceinline__ void add_warps(float* total, const float (&sum)[SLABS][Tiles][4], int c, int m) {
  constexpr int STRIDE = FEATURES / (16 * SLABS) * WARP;
  float* own = total + m * WARP + threadIdx.x % WARP;
#pragma unroll 1
  for (int turn = 0; turn < WARPS_OF_K; turn++) {
    if (turn == c) {
#pragma unroll
      for (int n = 0; n < Tiles; n++) {
#pragma unroll
        for (int i = 0; i < 4 * SLABS; i++) {
          float& at = own[(n * 4 * SLABS + i) * STRIDE];
          at = turn ? at + sum[i / 4][n][i % 4] : sum[i / 4][n][i % 4];
        }
      }
    }
    __syncthreads();
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) linear_rows(
    const bf16* __restrict__ x,       // [R, Din] strides [Ldx, 1] aligned 16
    const Wt* __restrict__ w,         // [Dout, Din] aligned 16
    const float* __restrict__ scale,  // [(Dout + 127) / 128, (Din + 127) / 128] or null; of FP8 w
    float* __restrict__ ranges,       // [Splits, R, Dout] or null; the sums of the ranges, when there are several
    int* __restrict__ tickets,        // [Tickets] or null; one for each block of axis x
    Out* __restrict__ out,            // [R, Dout]
    int R,
    int Ldx,
    int Din,
    int Dout,
    int Splits,
    int Tickets)
{
  extern __shared__ uint4 ring[];
  const int groups = (R + ROWS - 1) / ROWS, row = blockIdx.x % groups * ROWS, tile = blockIdx.x / groups;
  const int warp = threadIdx.x / WARP, c = warp % WARPS_OF_K, m = warp / WARPS_OF_K;
  const int width = split_width(Din, Splits), begin = blockIdx.y * width, end = min(begin + width, Din);
  const int features = min(FEATURES, Dout - tile * FEATURES), rows = min(ROWS, R - row);
  const Copies copies(x + (long long)row * Ldx, w + (long long)tile * FEATURES * Din, rows, features, Ldx, Din, end);
  const float* scales = scale + (long long)tile * ((Din + SCALED - 1) / SCALED);

  // stage s: piece s % PIECES of step s / PIECES
  const int stages = begin < end ? (end - begin + STEP - 1) / STEP * PIECES : 0;
  const auto start = [&](int s) { return begin + s / PIECES * STEP + s % PIECES * 32; };
#pragma unroll
  for (int s = 0; s < Stages - 1; s++) {
    if (s < stages) copies.start_w(ring + s * STAGE_WORDS, start(s));
  }
  after_previous();
#pragma unroll
  for (int s = 0; s < Stages - 1; s++) {
    if (s < stages) copies.start_x(ring + s * STAGE_WORDS, start(s));
    cp_async_commit();
  }
  float sum[SLABS][Tiles][4] = {};
#pragma unroll 1
  for (int s = 0; s < stages; s++) {
    const int chunk = start(s) + c * CHUNK;
    const float factor = PIECES == 1 && chunk < end ? scales[chunk / SCALED] : 0.0f;
    cp_async_wait<Stages - 2>();
    __syncthreads();
    if (const int next = s + Stages - 1; next < stages) {
      copies.start_w(ring + next % Stages * STAGE_WORDS, start(next));
      copies.start_x(ring + next % Stages * STAGE_WORDS, start(next));
    }
    cp_async_commit();
    if (chunk < end) multiply(sum, ring + s % Stages * STAGE_WORDS, c, m, factor);
  }
  cp_async_wait<0>();
  __syncthreads();

  float* total = reinterpret_cast<float*>(ring);
  add_warps(total, sum, c, m);
  __shared__ bool last;
  if (Splits > 1) {
    for (int i = threadIdx.x; i < rows * FEATURES; i += THREADS) {
      const int r = i / FEATURES, f = i % FEATURES;
      const long long at = ((long long)blockIdx.y * R + row + r) * Dout + tile * FEATURES + f;
      if (f < features) ranges[at] = total[total_at(r, f)];
    }
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) last = atomicAdd(tickets + blockIdx.x, 1) == Splits - 1;
    __syncthreads();
    if (!last) return;
    __threadfence();
    if (threadIdx.x == 0) tickets[blockIdx.x] = 0;
  }
  for (int i = threadIdx.x; i < rows * FEATURES; i += THREADS) {
    const int r = i / FEATURES, f = i % FEATURES;
    if (f >= features) continue;
    const long long at = (long long)(row + r) * Dout + tile * FEATURES + f;
    float y = Splits > 1 ? __ldcg(ranges + at) : total[total_at(r, f)];
    for (int s = 1; s < Splits; s++) y += __ldcg(ranges + (long long)s * R * Dout + at);
    out[at] = from_float<Out>(y);
  }
}
