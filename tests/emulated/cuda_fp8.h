// FP8 E4M3 for the CPU: to the nearest, ties to even, saturating at 448; no infinity, NaN is 0x7f and 0xff.
#pragma once

#include "cuda_bf16.h"
#include "cuda_fp16.h"

using __nv_fp8_storage_t = unsigned char;
using __nv_fp8x2_storage_t = unsigned short;
using __nv_fp8x4_storage_t = unsigned;
enum __nv_saturation_t { __NV_NOSAT, __NV_SATFINITE };
enum __nv_fp8_interpretation_t { __NV_E4M3, __NV_E5M2 };

struct __nv_fp8_e4m3 {
  __nv_fp8_storage_t __x;
  __nv_fp8_e4m3() = default;
  explicit __nv_fp8_e4m3(float x) {
    const float size = fabsf(x);
    const unsigned sign = signbit(x) ? 0x80 : 0;
    if (x != x) {
      __x = 0x7f;
    } else if (size >= 448.0f) {
      __x = sign | 0x7e;
    } else if (size < 0x1p-6f) {  // subnormal: steps of 2^-9
      __x = sign | unsigned(rintf(size * 0x1p9f));
    } else {  // round the mantissa to 3 bits; a carry goes into the exponent, up to 448
      const unsigned word = __float_as_uint(size), rounded = word + 0x7ffff + (word >> 20 & 1);
      __x = sign | ((rounded >> 20) - (120 << 3));
    }
  }
  explicit operator float() const {
    const unsigned exponent = __x >> 3 & 15, mantissa = __x & 7;
    const float size = (__x & 0x7f) == 0x7f ? __int_as_float(0x7fc00000)
                       : exponent          ? __uint_as_float((exponent + 120) << 23 | mantissa << 20)
                                           : mantissa * 0x1p-9f;
    return __x & 0x80 ? -size : size;
  }
  explicit operator __nv_bfloat16() const { return __nv_bfloat16(float(*this)); }
  explicit operator half() const { return half(float(*this)); }
};

namespace emulated {
inline float of_fp8(unsigned bits) {
  __nv_fp8_e4m3 x;
  x.__x = (unsigned char)bits;
  return float(x);
}
}  // namespace emulated

struct alignas(2) __nv_fp8x2_e4m3 {
  __nv_fp8x2_storage_t __x;
  __nv_fp8x2_e4m3() = default;
  explicit __nv_fp8x2_e4m3(float2 v) : __x(__nv_fp8_e4m3(v.x).__x | __nv_fp8_e4m3(v.y).__x << 8) {}
  explicit operator float2() const { return {emulated::of_fp8(__x), emulated::of_fp8(__x >> 8)}; }
  explicit operator half2() const { return {half(emulated::of_fp8(__x)), half(emulated::of_fp8(__x >> 8))}; }
};

struct alignas(4) __nv_fp8x4_e4m3 {
  __nv_fp8x4_storage_t __x;
  __nv_fp8x4_e4m3() = default;
  explicit operator float4() const {
    using emulated::of_fp8;
    return {of_fp8(__x), of_fp8(__x >> 8), of_fp8(__x >> 16), of_fp8(__x >> 24)};
  }
};

inline __half_raw __nv_cvt_fp8_to_halfraw(__nv_fp8_storage_t x, __nv_fp8_interpretation_t) {
  return {__half_as_ushort(half(emulated::of_fp8(x)))};
}
inline __half2_raw __nv_cvt_fp8x2_to_halfraw2(__nv_fp8x2_storage_t x, __nv_fp8_interpretation_t) {
  return {__half_as_ushort(half(emulated::of_fp8(x))), __half_as_ushort(half(emulated::of_fp8(x >> 8)))};
}
inline __nv_fp8_storage_t __nv_cvt_float_to_fp8(float x, __nv_saturation_t, __nv_fp8_interpretation_t) {
  return __nv_fp8_e4m3(x).__x;
}
inline __nv_fp8x2_storage_t __nv_cvt_float2_to_fp8x2(float2 x, __nv_saturation_t, __nv_fp8_interpretation_t) {
  return __nv_fp8x2_e4m3(x).__x;
}
