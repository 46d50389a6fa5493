// x w^T for many rows, bf16 x, bf16 or FP8 w. Definition: linear in boleinfer/ops/linear.py. Sums in float32, over k in
// order; with FP8 each block of 128 k on its own, then scaled and added.
//
// grid: ceil(Dout / 128) * ceil(R / 128): a block owns 128 rows and 128 features; BAND row tiles pass over all features
// together, so that w comes from L2. block: 256 threads; warp 4 a + b owns rows 64 a .. 64 a + 63 and features
// 32 b .. 32 b + 31. x and w come through a ring of Stages stages of 32 k.
// shared: Stages * (8 KB + 4 KB * the bytes of a weight). Read twice: x and w, by the blocks of a column and a row (L2).
//
// sizes: Wt=bf16,fp8 Out=bf16,float Stages=4
#include "linear.cuh"

constexpr int THREADS = 256, SIDE = 128, DEPTH = 32;
constexpr int ROW_TILES = 4, FEATURE_TILES = 4;  // of a warp: 16 rows, 8 features each
constexpr int W_UNITS = 2 * sizeof(Wt), X_UNITS = 4;  // 16-byte words of a row in a stage
constexpr int X_WORDS = SIDE * X_UNITS, STAGE_WORDS = X_WORDS + SIDE * W_UNITS;
constexpr int BAND = 8;

// What a thread copies into every stage: some words of x and w, from `x` and `w` on.
template <class T, int UNITS>
__device__ __forceinline__ void copy_tile(uint4* to, const T* from, int stride, int k, int Din, int exist) {
  constexpr int AT_ONCE = THREADS / UNITS;
  const int first = threadIdx.x / UNITS, at = k + threadIdx.x % UNITS * (16 / (int)sizeof(T));
#pragma unroll
  for (int row = 0; row < SIDE; row += AT_ONCE) {
    const bool valid = first + row < exist && at < Din;
    cp_async16(to + threadIdx.x + row * UNITS, from + (long long)(first + row) * stride + at, valid);
  }
}

// The lane's part of a row of w under 32 k, as the b of two products.
__device__ __forceinline__ uint4 weights(const uint4* row, int t) {
  if constexpr (sizeof(Wt) == 2) {
    return row[t];
  } else {
    const uint2 eight = reinterpret_cast<const uint2*>(row)[t];
    uint4 pairs;
    widen(eight.x, pairs.x, pairs.y);
    widen(eight.y, pairs.z, pairs.w);
    return pairs;
  }
}

// sum += x w^T of a warp and a stage.
__device__ __forceinline__ void multiply(float (&sum)[ROW_TILES][FEATURE_TILES][4], const uint4* x, const uint4* w, int t) {
  uint4 b[FEATURE_TILES];
#pragma unroll
  for (int j = 0; j < FEATURE_TILES; j++) b[j] = weights(w + 8 * j * W_UNITS, t);
#pragma unroll
  for (int i = 0; i < ROW_TILES; i++) {
    const Fragments<bf16> a(x[16 * i * X_UNITS + t], x[(16 * i + 8) * X_UNITS + t]);
#pragma unroll
    for (int j = 0; j < FEATURE_TILES; j++) a.multiply(sum[i][j], &b[j]);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, sizeof(Wt) == 2 ? 2 : 1) linear_tiles(
    const bf16* x,                    // [R, Din] strides [Ldx, 1] aligned 16
    const Wt* __restrict__ w,         // [Dout, Din] aligned 16
    const float* __restrict__ scale,  // [(Dout + 127) / 128, (Din + 127) / 128] or null; of FP8 w
    Out* out,                         // [R, Dout]
    int R,
    int Ldx,
    int Din,
    int Dout)
{
  extern __shared__ uint4 ring[];
  // blocks run through the row tiles of a band first, then through the features, then through the bands
  const int row_tiles = (R + SIDE - 1) / SIDE, columns = (Dout + SIDE - 1) / SIDE;
  const int band = blockIdx.x / (BAND * columns), inside = blockIdx.x % (BAND * columns);
  const int height = min(BAND, row_tiles - band * BAND);
  const int row = (band * BAND + inside % height) * SIDE, column = inside / height, feature = column * SIDE;
  const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, g = lane / 4, t = lane % 4;
  const int a = warp / 4 * 64, b = warp % 4 * 32;
  x += (long long)row * Ldx;
  w += (long long)feature * Din;
  const float* scales = scale + (long long)column * ((Din + SCALED - 1) / SCALED);

  const int stages = (Din + DEPTH - 1) / DEPTH;
  const auto fetch_w = [&](int s) {
    copy_tile<Wt, W_UNITS>(ring + s % Stages * STAGE_WORDS + X_WORDS, w, Din, s * DEPTH, Din, Dout - feature);
  };
  const auto fetch_x = [&](int s) {
    copy_tile<bf16, X_UNITS>(ring + s % Stages * STAGE_WORDS, x, Ldx, s * DEPTH, Din, R - row);
  };
#pragma unroll
  for (int s = 0; s < Stages - 1; s++) {
    if (s < stages) fetch_w(s);
  }
  after_previous();
#pragma unroll
  for (int s = 0; s < Stages - 1; s++) {
    if (s < stages) fetch_x(s);
    cp_async_commit();
  }
  float sum[ROW_TILES][FEATURE_TILES][4] = {}, scaled[ROW_TILES][FEATURE_TILES][4] = {};
#pragma unroll 1
  for (int s = 0; s < stages; s++) {
    cp_async_wait<Stages - 2>();
    __syncthreads();
    if (s + Stages - 1 < stages) fetch_w(s + Stages - 1), fetch_x(s + Stages - 1);
    cp_async_commit();
    const uint4* stage = ring + s % Stages * STAGE_WORDS;
    multiply(sum, stage + (a + g) * X_UNITS, stage + X_WORDS + (b + g) * W_UNITS, t);
    if (sizeof(Wt) == 1 && ((s + 1) % (SCALED / DEPTH) == 0 || s + 1 == stages)) {
      const float factor = scales[s * DEPTH / SCALED];
#pragma unroll
      for (int i = 0; i < 4 * ROW_TILES * FEATURE_TILES; i++) {
        float &part = sum[i / 16][i / 4 % 4][i % 4], &total = scaled[i / 16][i / 4 % 4][i % 4];
        total = fmaf(factor, part, total);
        part = 0.0f;
      }
    }
  }

#pragma unroll
  for (int i = 0; i < ROW_TILES; i++) {
#pragma unroll
    for (int j = 0; j < FEATURE_TILES; j++) {
#pragma unroll
      for (int e = 0; e < 4; e++) {
        const int r = row + a + 16 * i + g + e / 2 * 8, f = feature + b + 8 * j + 2 * t + e % 2;
        const float y = sizeof(Wt) == 1 ? scaled[i][j][e] : sum[i][j][e];
        if (r < R && f < Dout) out[(long long)r * Dout + f] = from_float<Out>(y);
      }
    }
  }
}
