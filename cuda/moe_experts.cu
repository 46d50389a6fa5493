// The experts' products with bf16 rows and bf16 or FP8 weights: each expert's rows gathered, gate and up products with silu
// between them, down product. Definition: moe in boleinfer/ops/moe.py. Sums in float32, in an order that depends on the
// width alone: the chunks of a warp in turn, then the warps. Slots, places and their order are made by moe_group.cu. Where
// there is a shared expert it has one slot more, and all R rows, whose places are behind the P others.
//
// grid: ceil(F / 16) or ceil(D / 32) x slots x splits; a block owns two tiles of 16 outputs of the slot's expert (16 of gate
// and the same of up; 32 of down), for the split's share of its rows, up to 8 Tiles at a time. Slots without rows end at
// once. block: 128; a warp owns every fourth chunk of k, for all rows. Weights go from memory to registers, 16 (FP8: 8)
// words of 16 bytes in flight a thread. shared: 4.6 KB Tiles, the warps' sums.
// Read twice: the weights once for every 8 Tiles rows, x by every block of its experts (L1, L2).
//
// sizes: Wt=bf16 Tiles=8 | Wt=fp8 Tiles=4
// spills: sm_100 and sm_120, down: addresses that are used once for 64 rows, so that three blocks fit
#include "linear.cuh"

constexpr int WARPS_OF_K = 4, STEP = WARPS_OF_K * CHUNK;  // of the block, and k that they take at once
constexpr int BLOCKS = sizeof(Wt) == 2 ? 3 : 2;           // on a multiprocessor, at least
constexpr int STRIDE = 36;                                // of a row's 32 sums: the lanes of a warp write to different banks

__shared__ float part[WARPS_OF_K][8 * Tiles][STRIDE];

__device__ __forceinline__ int scales_of(int n) { return (n + SCALED - 1) / SCALED; }

// The warp's sums of 2 tiles of outputs and TILES tiles of rows, to `part`. w: rows g and g+8 of either tile;
// row(n): which row of x is the n-th.
template <int TILES, class Row>
__device__ void sum_tiles(const Wt* const (&w)[4], const float* const (&scale)[2], const bf16* x, int K, Row row) {
  constexpr int WORDS = sizeof(Wt), DEPTH = TILES == 1 ? 2 : 1;
  const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, g = lane / 4, t = lane % 4;
  float sum[2][TILES][4] = {};
  int rows[TILES];
#pragma unroll
  for (int n = 0; n < TILES; n++) rows[n] = row(8 * n + g);
  for (int k = warp * CHUNK; k < K; k += DEPTH * STEP) {
    uint4 words[DEPTH][4][WORDS];
#pragma unroll
    for (int d = 0; d < DEPTH; d++) {
#pragma unroll
      for (int p = 0; p < WORDS; p++) {
        const int at = k + d * STEP + (WORDS == 2 ? 32 * p + 8 * t : 16 * t);
#pragma unroll
        for (int i = 0; i < 4; i++) {
          words[d][i][p] = TILES <= 2 ? load_once_or_zero(w[i] + at, at < K) : load_or_zero(w[i] + at, at < K);
        }
      }
    }
#pragma unroll
    for (int d = 0; d < DEPTH; d++) {
      const int start = k + d * STEP;
      if (start >= K) break;
      const Fragments<Wt> first[2] = {{words[d][0][0], words[d][1][0]}, {words[d][2][0], words[d][3][0]}};
#pragma unroll
      for (int n = 0; n < TILES; n++) {
        const bf16* from = x + (long long)rows[n] * K;
        uint4 xs[2];
#pragma unroll
        for (int p = 0; p < 2; p++) {
          const int at = start + (WORDS == 2 ? 32 * p + 8 * t : 16 * t + 8 * p);
          xs[p] = load_or_zero(from + at, at < K);
        }
#pragma unroll
        for (int i = 0; i < 2; i++) {
          if constexpr (WORDS == 2) {
            first[i].multiply(sum[i][n], &xs[0]);
            Fragments<Wt>(words[d][2 * i][1], words[d][2 * i + 1][1]).multiply(sum[i][n], &xs[1]);
          } else {
            float block[4] = {};
            first[i].multiply(block, xs);
            const float s = scale[i][start / SCALED];
#pragma unroll
            for (int j = 0; j < 4; j++) sum[i][n][j] = fmaf(s, block[j], sum[i][n][j]);
          }
        }
      }
    }
  }
#pragma unroll
  for (int n = 0; n < TILES; n++) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
#pragma unroll
      for (int j = 0; j < 4; j++) part[warp][8 * n + 2 * t + j % 2][16 * i + g + j / 2 * 8] = sum[i][n][j];
    }
  }
}

template <class Row>
__device__ void sum_rows(const Wt* const (&w)[4], const float* const (&scale)[2], const bf16* x, int K, int n, Row row) {
  if (n <= 8) {
    sum_tiles<1>(w, scale, x, K, row);
  } else if (n <= 16) {
    sum_tiles<2>(w, scale, x, K, row);
  } else if (n <= 32) {
    sum_tiles<4>(w, scale, x, K, row);
  } else {
    sum_tiles<Tiles>(w, scale, x, K, row);
  }
}

// The block's slot: its expert, and its rows in the order of places.
struct Group {
  bool shared;
  int expert, begin, end;

  __device__ Group(const int* expert_of, const int* first, int slots, int places, int rows) {
    const int slot = blockIdx.y;
    shared = slot == slots, expert = shared ? 0 : expert_of[slot];
    begin = shared ? places : first[slot], end = shared ? places + rows : first[slot + 1];
  }
};

// The sum of output i of a block's 32 for a row of the pass.
__device__ __forceinline__ float total(int row, int i) {
  float sum = part[0][row][i];
#pragma unroll
  for (int warp = 1; warp < WARPS_OF_K; warp++) sum += part[warp][row][i];
  return sum;
}

// hidden = silu(gate x) * up x, in the order of the places
extern "C" __global__ void __launch_bounds__(128, BLOCKS) gate_up(
    const bf16* x,                           // [R, D] aligned 16
    const Wt* __restrict__ weights,          // [E, 2*F, D] aligned 16; gate rows first
    const float* __restrict__ scale,         // [E, (2*F+127)/128, (D+127)/128] or null; of FP8 weights
    const Wt* __restrict__ shared,           // [2*F, D] aligned 16 or null; of the shared expert
    const float* __restrict__ shared_scale,  // [(2*F+127)/128, (D+127)/128] or null
    const int* expert_of,                    // [Slots]
    const int* first,                        // [Slots+1]
    const int* order,                        // [P]
    bf16* hidden,                            // [Places, F]
    int R,
    int A,
    int D,
    int F,
    int Slots,
    int Places)
{
  after_previous();
  const Group group(expert_of, first, Slots, R * A, R);
  const int f0 = 16 * blockIdx.x, g = threadIdx.x % WARP / 4;
  const long long e = group.expert;
  const Wt* matrix = group.shared ? shared : weights + e * 2 * F * D;
  const Wt* w[4];
#pragma unroll
  for (int i = 0; i < 4; i++) w[i] = matrix + (i / 2 * (long long)F + min(f0 + g + i % 2 * 8, F - 1)) * D;
  const float* scales = group.shared ? shared_scale : scale + e * scales_of(2 * F) * scales_of(D);
  const float* const rows_of_scales[2] = {scales + f0 / SCALED * scales_of(D), scales + (F + f0) / SCALED * scales_of(D)};

  for (int n = group.begin + blockIdx.z * 8 * Tiles; n < group.end; n += gridDim.z * 8 * Tiles) {
    const int rows = min(8 * Tiles, group.end - n);
    sum_rows(w, rows_of_scales, x, D, rows, [&](int i) {
      const int at = n + min(i, rows - 1);
      return group.shared ? at - R * A : order[at] / A;
    });
    __syncthreads();
    for (int i = threadIdx.x; i < 16 * rows; i += blockDim.x) {
      const int row = i / 16, f = i % 16;
      const float value = silu(total(row, f)) * total(row, 16 + f);
      if (f0 + f < F) hidden[(long long)(n + row) * F + f0 + f] = from_float<bf16>(value);
    }
    __syncthreads();
  }
}

// y = down hidden, to its place
extern "C" __global__ void __launch_bounds__(128, BLOCKS) down(
    const bf16* hidden,                      // [Places, F] aligned 16
    const Wt* __restrict__ weights,          // [E, D, F] aligned 16
    const float* __restrict__ scale,         // [E, (D+127)/128, (F+127)/128] or null; of FP8 weights
    const Wt* __restrict__ shared,           // [D, F] aligned 16 or null; of the shared expert
    const float* __restrict__ shared_scale,  // [(D+127)/128, (F+127)/128] or null
    const int* expert_of,                    // [Slots]
    const int* first,                        // [Slots+1]
    const int* order,                        // [P]
    float* y,                                // [Places, D]
    int R,
    int A,
    int D,
    int F,
    int Slots,
    int Places)
{
  after_previous();
  const Group group(expert_of, first, Slots, R * A, R);
  const int d0 = 32 * blockIdx.x, g = threadIdx.x % WARP / 4;
  const long long e = group.expert;
  const Wt* matrix = group.shared ? shared : weights + e * D * F;
  const Wt* w[4];
#pragma unroll
  for (int i = 0; i < 4; i++) w[i] = matrix + (long long)min(d0 + g + i * 8, D - 1) * F;
  const float* scales = group.shared ? shared_scale : scale + e * scales_of(D) * scales_of(F);
  const float* row_of_scales = scales + d0 / SCALED * scales_of(F);
  const float* const rows_of_scales[2] = {row_of_scales, row_of_scales};

  for (int n = group.begin + blockIdx.z * 8 * Tiles; n < group.end; n += gridDim.z * 8 * Tiles) {
    const int rows = min(8 * Tiles, group.end - n);
    sum_rows(w, rows_of_scales, hidden, F, rows, [&](int i) { return n + min(i, rows - 1); });
    __syncthreads();
    for (int i = threadIdx.x; i < 32 * rows; i += blockDim.x) {
      const int row = i / 32, d = d0 + i % 32;
      const int place = group.shared ? n + row : order[n + row];
      if (d < D) y[(long long)place * D + d] = total(row, i % 32);
    }
    __syncthreads();
  }
}
