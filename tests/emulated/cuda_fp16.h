// half and half2 for the CPU, rounded to the nearest, ties to even.
#pragma once

#include "emulated.h"

struct __half_raw {
  unsigned short x;
};
struct __half2_raw {
  unsigned short x, y;
};

struct __half {
  _Float16 value;
  __half() = default;
  __half(float x) : value(_Float16(x)) {}
  __half(__half_raw raw) { memcpy(&value, &raw, 2); }
  operator float() const { return float(value); }
};
using half = __half;

struct alignas(4) __half2 {
  half x, y;
  __half2() = default;
  __half2(half a, half b) : x(a), y(b) {}
  __half2(__half2_raw raw) : x(__half_raw{raw.x}), y(__half_raw{raw.y}) {}
};
using half2 = __half2;

inline float __half2float(half x) { return float(x.value); }
inline half __float2half(float x) { return half(x); }
inline half __float2half_rn(float x) { return half(x); }
inline float2 __half22float2(half2 x) { return {float(x.x), float(x.y)}; }
inline half2 __floats2half2_rn(float x, float y) { return {half(x), half(y)}; }
inline half2 __float22half2_rn(float2 x) { return {half(x.x), half(x.y)}; }
inline half2 __halves2half2(half x, half y) { return {x, y}; }
inline half __low2half(half2 x) { return x.x; }
inline half __high2half(half2 x) { return x.y; }
inline float __low2float(half2 x) { return float(x.x); }
inline float __high2float(half2 x) { return float(x.y); }
inline unsigned short __half_as_ushort(half x) { return (unsigned short)emulated::bits(x); }
inline half __ushort_as_half(unsigned short x) { return half(__half_raw{x}); }
