// bf16 x as two E4M3 numbers each (split.cuh), for the products of linear_hopper with FP8 w and many rows. Definition:
// split_rows in boleinfer/ops/linear.py.
//
// grid: a thread for eight numbers. block: whole warps; 16 lanes have the 128 that share s.
#include "split.cuh"

extern "C" __global__ void __launch_bounds__(256) split_rows(
    const bf16* x,         // [R, Din] strides [Ldx, 1]
    unsigned char* parts,  // [2 * R, Din] aligned 16; hi of all rows, then lo
    float* inverse,        // [Blocks, Pad]; 1 / s, NaN where x is not finite
    int R,
    int Ldx,
    int Din,
    int Blocks,
    int Pad)
{
  const int at = blockIdx.x * blockDim.x + threadIdx.x, row = at / (16 * Blocks), k = at % (16 * Blocks) * 8;
  after_previous();
  const Split own = split(load_or_zero(x + (long long)row * Ldx + k, row < R && k < Din));
  if (row >= R || k >= Din) return;
  unsigned char* to = parts + (long long)row * Din + k;
  store_eight(to, own.hi);
  store_eight(to + (long long)R * Din, own.lo);
  if (k % 128 == 0) inverse[k / 128 * Pad + row] = own.inverse;
}
