// bf16 x as two E4M3 numbers each, s x = hi + lo / 32 with a power of two s for each row and 128 neighbours, for the
// products of linear_hopper with FP8 w. Definition: split_rows in boleinfer/ops/linear.py.
//
// grid: a thread for eight numbers. block: whole warps; 16 lanes have the 128 that share s.
#include "linear.cuh"

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
  const uint4 own = load_or_zero(x + (long long)row * Ldx + k, row < R && k < Din);
  unsigned most = 0;
#pragma unroll
  for (int i = 0; i < 4; i++) most = max(most, max(word(own, i) & 0x7fff0000u, word(own, i) << 16 & 0x7fff0000u));
#pragma unroll
  for (int lane = 8; lane > 0; lane /= 2) most = max(most, __shfl_xor_sync(ALL_LANES, most, lane));
  const int exponent = max((int)(most >> 23), 8);
  const float s = __int_as_float((261 - exponent) << 23);
  Pack<fp8, 8> hi, lo;
#pragma unroll
  for (int i = 0; i < 8; i++) {
    const float a = __int_as_float(i % 2 ? word(own, i / 2) & 0xffff0000u : word(own, i / 2) << 16) * s;
    hi.v[i] = from_float<fp8>(a);
    lo.v[i] = from_float<fp8>((a - to_float(hi.v[i])) * 32);
  }
  if (row >= R || k >= Din) return;
  unsigned char* to = parts + (long long)row * Din + k;
  memcpy(__builtin_assume_aligned(to, 8), hi.v, 8);
  memcpy(__builtin_assume_aligned(to + (long long)R * Din, 8), lo.v, 8);
  if (k % 128 == 0) inverse[k / 128 * Pad + row] = most >= 0x7f800000u ? nan() : __int_as_float((exponent - 7) << 23);
}
