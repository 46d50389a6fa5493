// bf16 rows split into E4M3 numbers (split.cuh), for products with FP8 w on sm_90a: as they come, or the norm of rows,
// perhaps after adding to the residual stream. Definitions: split_rows in boleinfer/hopper_fp8.py, normed in
// boleinfer/residual.py, with whose bits.
//
// split_rows: grid: a thread for eight numbers. block: whole warps.
// norm_rows: grid: R, a block owns a row. block: a thread for eight numbers, whole warps.
using Act = __nv_bfloat16;
#include "norm_row.cuh"
#include "split.cuh"

extern "C" __global__ void __launch_bounds__(256) split_rows(
    const bf16* x,         // [R, Din] strides [Ldx, 1]
    unsigned char* parts,  // [2 * R, Din] aligned 16
    float* inverse,        // [Blocks, Pad]
    int R,
    int Ldx,
    int Din,
    int Blocks,
    int Pad)
{
  const int at = blockIdx.x * blockDim.x + threadIdx.x, row = at / (16 * Blocks), k = at % (16 * Blocks) * 8;
  const bool has = row < R && k < Din;
  after_previous();
  Pack<bf16, 8> own = {};
  if (has) own = load<8>(x + (long long)row * Ldx + k);
  SplitRows{parts, inverse, R, Din, Pad}.write(own, row, k, has);
}

extern "C" __global__ void __launch_bounds__(1024) norm_rows(
    bf16* h,                      // [R, D] aligned 16; the residual stream, in place
    const bf16* x,                // [R, D] aligned 16 or null; is added to it
    const float* __restrict__ w,  // [D] aligned 16; the stored weight, a delta to 1
    bf16* out,                    // [R, D] aligned 16 or null; the norm itself
    unsigned char* parts,         // [2 * R, D] aligned 16
    float* inverse,               // [D / 128, Pad]
    int R,
    int D,
    int Pad,
    float eps)
{
  // after_previous() is called by norm_short_row
  const int row = blockIdx.x;
  const long long first = (long long)row * D;
  norm_short_row<8>(h + first, x ? x + first : nullptr, w, D, eps, [&](int i, const Pack<bf16, 8>& y) {
    if (out) store<8>(out + first + i, y);
    SplitRows{parts, inverse, R, D, Pad}.write(y, row, i);
  });
}
