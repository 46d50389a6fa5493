// Eight neighbours of bf16 x as two E4M3 numbers each: s x = hi + lo / 32, with a power of two s for each row and 128
// neighbours. Definition: split_rows in boleinfer/ops/linear.py.
#pragma once

#include "linear.cuh"

struct Split {
  Pack<fp8, 8> hi, lo;
  float inverse;  // 1 / s, NaN where x is not finite
};

// By the 16 lanes, half a warp, that have the 128 numbers.
__device__ __forceinline__ Split split(const uint4& x) {
  unsigned most = 0;
#pragma unroll
  for (int i = 0; i < 4; i++) most = max(most, max(word(x, i) & 0x7fff0000u, word(x, i) << 16 & 0x7fff0000u));
#pragma unroll
  for (int lane = 8; lane > 0; lane /= 2) most = max(most, __shfl_xor_sync(ALL_LANES, most, lane));
  const int exponent = max((int)(most >> 23), 8);
  const float s = __int_as_float((261 - exponent) << 23);
  Split parts;
#pragma unroll
  for (int i = 0; i < 8; i++) {
    const float a = __int_as_float(i % 2 ? word(x, i / 2) & 0xffff0000u : word(x, i / 2) << 16) * s;
    parts.hi.v[i] = from_float<fp8>(a);
    parts.lo.v[i] = from_float<fp8>((a - to_float(parts.hi.v[i])) * 32);
  }
  parts.inverse = most >= 0x7f800000u ? nan() : __int_as_float((exponent - 7) << 23);
  return parts;
}

// Eight E4M3 numbers to a multiple of 8 bytes.
__device__ __forceinline__ void store_eight(void* to, const Pack<fp8, 8>& numbers) {
  memcpy(__builtin_assume_aligned(to, 8), numbers.v, 8);
}
