// bf16 numbers as two E4M3 numbers each, s x = hi + lo / 32 with a power of two s for each row and 128 neighbours.
// Definition: split_rows in boleinfer/hopper_fp8.py.
#pragma once

#include "common.cuh"

constexpr int SHARING = 128;  // neighbours with the same s

// s x = hi + lo / 32 of N of those neighbours; the lanes next to this one have the others. By all lanes of a warp. Gives 1 / s,
// NaN where one of the neighbours is not finite.
template <int N>
__device__ __forceinline__ float split(const Pack<bf16, N>& x, Pack<fp8, N>& hi, Pack<fp8, N>& lo) {
  float wide[N];
  unsigned most = 0;  // bits of the largest |x|
#pragma unroll
  for (int i = 0; i < N; i++) {
    wide[i] = to_float(x.v[i]);
    most = max(most, __float_as_uint(wide[i]) & 0x7fffffffu);
  }
#pragma unroll
  for (int lane = SHARING / N / 2; lane > 0; lane /= 2) most = max(most, __shfl_xor_sync(ALL_LANES, most, lane));
  const int exponent = max((int)(most >> 23), 8);
  const float s = __int_as_float((261 - exponent) << 23);
#pragma unroll
  for (int i = 0; i < N; i += 2) {  // one instruction for two
    const float2 both = make_float2(wide[i] * s, wide[i + 1] * s);
    const __nv_fp8x2_e4m3 high(both);
    const float2 rounded(high);
    const __nv_fp8x2_e4m3 low(make_float2((both.x - rounded.x) * 32, (both.y - rounded.y) * 32));
    memcpy(hi.v + i, &high, 2), memcpy(lo.v + i, &low, 2);
  }
  return most >= 0x7f800000u ? nan() : __int_as_float((exponent - 7) << 23);
}

// Rows that are split: hi of all R, then lo; 1 / s.
struct SplitRows {
  unsigned char* parts;  // [2 * R, Din]
  float* inverse;        // [Din / 128, Pad]
  int R, Din, Pad;

  // x is N neighbours of `row` from k on, as for split; lanes that have nothing to write bring zeros.
  template <int N>
  __device__ __forceinline__ void write(const Pack<bf16, N>& x, int row, int k, bool has = true) const {
    Pack<fp8, N> hi, lo;
    const float unit = split(x, hi, lo);
    if (!has) return;
    unsigned char* to = parts + (long long)row * Din + k;
    memcpy(__builtin_assume_aligned(to, N), hi.v, N);
    memcpy(__builtin_assume_aligned(to + (long long)R * Din, N), lo.v, N);
    if (k % SHARING == 0) inverse[k / SHARING * Pad + row] = unit;
  }
};
