// x w^T for few rows or few features, bf16 x, bf16 or FP8 w. Definition: linear in boleinfer/ops/linear.py. Sums in float32, in the
// order that linear.cuh describes.
//
// grid: (ceil(Dout / 16), ceil(R / 8)), a block owns 16 features, 8 rows and all k. block: 128 * splits threads, splits
// <= 4; a warp owns a chunk of every step of its range. w goes from memory to registers, 8 (FP8: 4) words of 16 bytes in flight a thread.
// shared: 8 KB, the warps' sums. Read twice: x, by every block of axis x (L1, L2); w, by those of axis y (L2).
//
// sizes: Wt=bf16,fp8 Out=bf16,float
#include "linear.cuh"

constexpr int MOST_WARPS = 16;
constexpr int WORDS = sizeof(Wt);          // 16-byte words of a row's chunk that a lane takes
constexpr int LANE_K = 16 / sizeof(Wt);    // k of one of them
constexpr int DEPTH = 2;                   // chunks whose loads are under way together

// The lane's part of a chunk: two features of w, one row of x.
struct Chunk {
  uint4 low[WORDS], high[WORDS], x[2];

  // low, high, row: at the lane's first k of the chunk; left: how many k are left from there, where not all are there
  template <bool WHOLE>
  __device__ __forceinline__ void load(const Wt* low, const Wt* high, const bf16* row, int left) {
#pragma unroll
    for (int p = 0; p < WORDS; p++) {
      this->low[p] = load_once_or_zero(low + 32 * p, WHOLE || 32 * p < left);
      this->high[p] = load_once_or_zero(high + 32 * p, WHOLE || 32 * p < left);
    }
#pragma unroll
    for (int p = 0; p < 2; p++) {
      const int at = WORDS == 2 ? 32 * p : 8 * p;
      x[p] = load_or_zero(row + at, WHOLE || at < left);
    }
  }

  __device__ __forceinline__ void multiply(float (&sum)[4], const float* scale) const {
    if constexpr (WORDS == 2) {
#pragma unroll
      for (int p = 0; p < 2; p++) Fragments<Wt>(low[p], high[p]).multiply(sum, x + p);
    } else {
      float block[4] = {};
      Fragments<Wt>(low[0], high[0]).multiply(block, x);
#pragma unroll
      for (int i = 0; i < 4; i++) sum[i] = fmaf(*scale, block[i], sum[i]);
    }
  }
};

extern "C" __global__ void __launch_bounds__(MOST_WARPS * WARP, 2) linear_few(
    const bf16* __restrict__ x,       // [R, Din] strides [Ldx, 1] aligned 16
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
  const int range = warp / WARPS_OF_K * width, end = min(range + width, Din);
  int k = range + warp % WARPS_OF_K * CHUNK;

  // where there is no feature or row, the last one stands in: what comes of it is not stored
  const int own_k = k + t * LANE_K;
  const Wt* low = w + min(feature + g, Dout - 1ll) * Din + own_k;
  const Wt* high = w + min(feature + g + 8, Dout - 1ll) * Din + own_k;
  const bf16* row = x + (long long)min(8 * (int)blockIdx.y + g, R - 1) * Ldx + own_k;
  const float* scales = scale + feature / SCALED * ((Din + SCALED - 1) / SCALED) + k / SCALED;

  // the first weights come from memory while x is still being made: a lane's row of one of DEPTH chunks
  static_assert(DEPTH * 16 == WARP);
  if (const int at = k + lane / 16 * STEP; at < end) prefetch(w + min(feature + lane % 16, Dout - 1ll) * Din + at);
  after_previous();

  // sum = the chunks of this warp in order of k
  float sum[4] = {};
  for (; k + (DEPTH - 1) * STEP + CHUNK <= end; k += DEPTH * STEP) {
    Chunk chunks[DEPTH];
#pragma unroll
    for (int d = 0; d < DEPTH; d++) chunks[d].load<true>(low + d * STEP, high + d * STEP, row + d * STEP, 0);
#pragma unroll
    for (int d = 0; d < DEPTH; d++) chunks[d].multiply(sum, scales + d * STEP / SCALED);
    low += DEPTH * STEP, high += DEPTH * STEP, row += DEPTH * STEP, scales += DEPTH * STEP / SCALED;
  }
  for (; k < end; k += STEP) {
    Chunk chunk;
    chunk.load<false>(low, high, row, end - k - t * LANE_K);
    chunk.multiply(sum, scales);
    low += STEP, high += STEP, row += STEP, scales += STEP / SCALED;
  }

#pragma unroll
  for (int i = 0; i < 4; i++) part[warp][(2 * t + i % 2) * 16 + g + i / 2 * 8] = sum[i];
  __syncthreads();
  // out = sum over ranges of (sum over warps)
  const int r = 8 * blockIdx.y + threadIdx.x / 16, f = threadIdx.x % 16;
  if (threadIdx.x < 8 * 16 && r < R && feature + f < Dout) {
    float total = 0.0f;
    for (int s = 0; s < splits; s++) {
      float one = part[WARPS_OF_K * s][threadIdx.x];
#pragma unroll
      for (int i = 1; i < WARPS_OF_K; i++) one += part[WARPS_OF_K * s + i][threadIdx.x];
      total = s ? total + one : one;
    }
    out[r * (long long)Dout + feature + f] = from_float<Out>(total);
  }
}
