// x w^T for 1 .. 8 rows, bf16 x, bf16 or FP8 w. Definition: linear in boleinfer/ops/linear.py. Sums in float32, in the
// order that linear.cuh describes.
//
// grid: ceil(Dout / 16), a block owns 16 features and all k. block: 128 * splits threads, splits <= 4; a warp owns a chunk
// of every step of its range. w goes from memory to registers, 8 (FP8: 4) words of 16 bytes in flight a thread.
// shared: 8 KB, the warps' sums. Read twice: x, by every block (L1, L2).
//
// sizes: Wt=bf16,fp8 Out=bf16,float
#include "linear.cuh"

constexpr int MOST_WARPS = 16;
constexpr int WORDS = sizeof(Wt);          // 16-byte words of a row's chunk that a lane takes
constexpr int DEPTH = 2;                   // steps whose loads are under way together

extern "C" __global__ void __launch_bounds__(MOST_WARPS * WARP, 2) linear_few(
    const bf16* __restrict__ x,       // [R, Din] strides [Ldx, 1] aligned 16; R <= 8
    const Wt* __restrict__ w,         // [Dout, Din] aligned 16
    const float* __restrict__ scale,  // [(Dout + 127) / 128, (Din + 127) / 128] or null; of FP8 w
    Out* __restrict__ out,            // [R, Dout]
    int R,
    int Ldx,
    int Din,
    int Dout)
{
  __shared__ float part[MOST_WARPS][8 * 16];  // [warp][row][feature]
  const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, g = lane / 4, t = lane % 4;
  const int splits = blockDim.x / (WARPS_OF_K * WARP), width = split_width(Din, splits);
  const long long feature = 16ll * blockIdx.x;
  const bool has_low = feature + g < Dout, has_high = feature + g + 8 < Dout, has_row = g < R;
  const Wt* low = w + (feature + g) * Din;
  const Wt* high = low + 8ll * Din;
  const bf16* row = x + (long long)g * Ldx;
  const float* scales = scale + feature / SCALED * ((Din + SCALED - 1) / SCALED);

  const int begin = warp / WARPS_OF_K * width, end = min(begin + width, Din);
  float sum[4] = {};
  for (int k = begin + warp % WARPS_OF_K * CHUNK; k < end; k += DEPTH * STEP) {
    uint4 lows[DEPTH][WORDS], highs[DEPTH][WORDS], xs[DEPTH][2];
#pragma unroll
    for (int d = 0; d < DEPTH; d++) {
#pragma unroll
      for (int p = 0; p < WORDS; p++) {
        const int at = k + d * STEP + (WORDS == 2 ? 32 * p + 8 * t : 16 * t);
        lows[d][p] = load_once_or_zero(low + at, has_low && at < end);
        highs[d][p] = load_once_or_zero(high + at, has_high && at < end);
      }
    }
#pragma unroll
    for (int d = 0; d < DEPTH; d++) {
#pragma unroll
      for (int p = 0; p < 2; p++) {
        const int at = k + d * STEP + (WORDS == 2 ? 32 * p + 8 * t : 16 * t + 8 * p);
        xs[d][p] = load_or_zero(row + at, has_row && at < end);
      }
    }
#pragma unroll
    for (int d = 0; d < DEPTH; d++) {
      if constexpr (WORDS == 2) {
#pragma unroll
        for (int p = 0; p < 2; p++) Fragments<Wt>(lows[d][p], highs[d][p]).multiply(sum, &xs[d][p]);
      } else if (k + d * STEP < end) {
        float block[4] = {};
        Fragments<Wt>(lows[d][0], highs[d][0]).multiply(block, xs[d]);
        const float s = scales[(k + d * STEP) / SCALED];
#pragma unroll
        for (int i = 0; i < 4; i++) sum[i] = fmaf(s, block[i], sum[i]);
      }
    }
  }

#pragma unroll
  for (int i = 0; i < 4; i++) part[warp][(2 * t + i % 2) * 16 + g + i / 2 * 8] = sum[i];
  __syncthreads();
  // out = sum over ranges of (sum over warps)
  const int r = threadIdx.x / 16, f = threadIdx.x % 16;
  if (threadIdx.x < 8 * 16 && r < R && feature + f < Dout) {
    float total = 0.0f;
    for (int s = 0; s < splits; s++) {
      float range = part[WARPS_OF_K * s][threadIdx.x];
#pragma unroll
      for (int i = 1; i < WARPS_OF_K; i++) range += part[WARPS_OF_K * s + i][threadIdx.x];
      total = s ? total + range : range;
    }
    out[r * (long long)Dout + feature + f] = from_float<Out>(total);
  }
}
