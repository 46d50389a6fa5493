// The largest number of a row with its place, as one integer; and what becomes of a row of logits. Knows no op.
// Definition: largest_of in boleinfer/ops/linear.py.
#pragma once

#include "common.cuh"

constexpr int UNREAD = 0, ALL = 1, LARGEST = 2;  // use of a row: nobody reads it, all of it is read, its largest alone

// Larger numbers first, NaN before all, of equal ones the lower place; 0 is below all of them.
using Largest = unsigned long long;

__device__ __forceinline__ Largest largest_of(float x, int place) {
  const unsigned bits = __float_as_uint(x + 0.0f);  // one zero only
  const unsigned rising = x != x ? 0xffffffffu : bits >> 31 ? ~bits : bits | 1u << 31;
  return Largest(rising) << 32 | unsigned(~place);
}
__device__ __forceinline__ int place_of(Largest key) { return ~int(unsigned(key)); }
__device__ __forceinline__ float number_of(Largest key) {
  const unsigned rising = unsigned(key >> 32);
  return __uint_as_float(rising >> 31 ? rising & ~(1u << 31) : ~rising);
}
