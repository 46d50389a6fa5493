// bf16 and pairs of them for the CPU, rounded to the nearest, ties to even; NaN stays NaN.
#pragma once

#include "emulated.h"

struct __nv_bfloat16_raw {
  unsigned short x;
};

struct __nv_bfloat16 {
  unsigned short __x;
  __nv_bfloat16() = default;
  __nv_bfloat16(__nv_bfloat16_raw raw) : __x(raw.x) {}
  __nv_bfloat16(float x) {
    const unsigned word = __float_as_uint(x);
    __x = x != x ? 0x7fff : (unsigned short)((word + 0x7fff + (word >> 16 & 1)) >> 16);
  }
  operator float() const { return __uint_as_float(unsigned(__x) << 16); }
};

struct alignas(4) __nv_bfloat162 {
  __nv_bfloat16 x, y;
  __nv_bfloat162() = default;
  __nv_bfloat162(__nv_bfloat16 a, __nv_bfloat16 b) : x(a), y(b) {}
};

#define OPERATOR(op)                                                              \
  inline __nv_bfloat16 operator op(__nv_bfloat16 a, __nv_bfloat16 b) {            \
    return __nv_bfloat16(float(a) op float(b));                                   \
  }                                                                               \
  inline __nv_bfloat162 operator op(__nv_bfloat162 a, __nv_bfloat162 b) {         \
    return {a.x op b.x, a.y op b.y};                                              \
  }
OPERATOR(+)
OPERATOR(-)
OPERATOR(*)
OPERATOR(/)
#undef OPERATOR

inline float __bfloat162float(__nv_bfloat16 x) { return float(x); }
inline __nv_bfloat16 __float2bfloat16(float x) { return __nv_bfloat16(x); }
inline __nv_bfloat16 __float2bfloat16_rn(float x) { return __nv_bfloat16(x); }
inline __nv_bfloat16 __double2bfloat16(double x) { return __nv_bfloat16(float(x)); }
inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) { return {__nv_bfloat16(x), __nv_bfloat16(y)}; }
inline __nv_bfloat162 __float22bfloat162_rn(float2 x) { return __floats2bfloat162_rn(x.x, x.y); }
inline __nv_bfloat162 __float2bfloat162_rn(float x) { return __floats2bfloat162_rn(x, x); }
inline float2 __bfloat1622float2(__nv_bfloat162 x) { return {float(x.x), float(x.y)}; }
inline __nv_bfloat162 __halves2bfloat162(__nv_bfloat16 x, __nv_bfloat16 y) { return {x, y}; }
inline __nv_bfloat162 __bfloat162bfloat162(__nv_bfloat16 x) { return {x, x}; }
inline __nv_bfloat16 __low2bfloat16(__nv_bfloat162 x) { return x.x; }
inline __nv_bfloat16 __high2bfloat16(__nv_bfloat162 x) { return x.y; }
inline float __low2float(__nv_bfloat162 x) { return float(x.x); }
inline float __high2float(__nv_bfloat162 x) { return float(x.y); }
inline unsigned short __bfloat16_as_ushort(__nv_bfloat16 x) { return x.__x; }
inline __nv_bfloat16 __ushort_as_bfloat16(unsigned short x) { return __nv_bfloat16(__nv_bfloat16_raw{x}); }
inline __nv_bfloat16 __hfma(__nv_bfloat16 a, __nv_bfloat16 b, __nv_bfloat16 c) {
  return __nv_bfloat16(fmaf(float(a), float(b), float(c)));
}
inline __nv_bfloat162 __hfma2(__nv_bfloat162 a, __nv_bfloat162 b, __nv_bfloat162 c) {
  return {__hfma(a.x, b.x, c.x), __hfma(a.y, b.y, c.y)};
}
inline __nv_bfloat16 __hmul(__nv_bfloat16 a, __nv_bfloat16 b) { return a * b; }
inline __nv_bfloat16 __hadd(__nv_bfloat16 a, __nv_bfloat16 b) { return a + b; }
inline __nv_bfloat162 __hmul2(__nv_bfloat162 a, __nv_bfloat162 b) { return a * b; }
inline __nv_bfloat162 __hadd2(__nv_bfloat162 a, __nv_bfloat162 b) { return a + b; }
inline bool __hisnan(__nv_bfloat16 x) { return (x.__x & 0x7fff) > 0x7f80; }
