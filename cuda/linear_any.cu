// x w^T for any types and sizes, in float32: where tensor cores cannot take the types or the alignment, and where results
// have to agree with NumPy's. Definition: linear in boleinfer/ops/linear.py.
//
// grid: (ceil(R / 32), ceil(Dout / 32) up to 65535): a block owns 32 rows and every gridDim.y-th 32 features. block: 256
// threads; a thread owns one row and every eighth feature. Each sum runs over k in order, in 8 interleaved parts, whatever
// rows are in the block.
// shared: 8.4 KB, the block's next 32 k. Read twice: x by every block of axis y, w by every one of axis x (L2).
//
// sizes: Act=float Wt=float,bf16,fp8 Out=float | Act=bf16 Wt=float,bf16,fp8 Out=bf16 | Act=bf16 Wt=bf16 Out=float
#include "common.cuh"

constexpr int SIDE = 32, THREADS = 256, EACH = SIDE * SIDE / THREADS, PARTS = 8, SCALED = 128;

extern "C" __global__ void __launch_bounds__(THREADS) linear_any(
    const Act* x,                     // [R, Din] strides [Ldx, 1]
    const Wt* __restrict__ w,         // [Dout, Din]
    const float* __restrict__ scale,  // [(Dout + 127) / 128, (Din + 127) / 128] or null; of FP8 w
    Out* out,                         // [R, Dout]
    int R,
    int Ldx,
    int Din,
    int Dout)
{
  after_previous();
  __shared__ float xs[SIDE][SIDE + 1], ws[SIDE][SIDE + 1];  // [row or feature][k]
  const int column = threadIdx.x % SIDE, line = threadIdx.x / SIDE;
  const long long row = (long long)blockIdx.x * SIDE;
  for (long long feature = (long long)blockIdx.y * SIDE; feature < Dout; feature += (long long)gridDim.y * SIDE) {
    float sum[EACH][PARTS] = {};
    for (int k = 0; k < Din; k += SIDE) {
      __syncthreads();
#pragma unroll
      for (int i = 0; i < EACH; i++) {
        const int at = line + THREADS / SIDE * i;
        const long long r = row + at, f = feature + at;
        const bool inside = k + column < Din;
        xs[at][column] = inside && r < R ? to_float(x[r * Ldx + k + column]) : 0.0f;
        float weight = inside && f < Dout ? to_float(w[f * Din + k + column]) : 0.0f;
        if (scale && inside && f < Dout) {
          weight *= scale[f / SCALED * ((Din + SCALED - 1) / SCALED) + (k + column) / SCALED];
        }
        ws[at][column] = weight;
      }
      __syncthreads();
#pragma unroll 1
      for (int j = 0; j < SIDE; j += PARTS) {
#pragma unroll
        for (int p = 0; p < PARTS; p++) {
#pragma unroll
          for (int i = 0; i < EACH; i++) {
            sum[i][p] = fmaf(xs[column][j + p], ws[line + THREADS / SIDE * i][j + p], sum[i][p]);
          }
        }
      }
    }
#pragma unroll
    for (int i = 0; i < EACH; i++) {
      const long long r = row + column, f = feature + line + THREADS / SIDE * i;
      float total = sum[i][0];
#pragma unroll
      for (int p = 1; p < PARTS; p++) total += sum[i][p];
      if (r < R && f < Dout) out[r * Dout + f] = from_float<Out>(total);
    }
  }
}
