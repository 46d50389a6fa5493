// What the products with few rows share: how k is split, which k a lane holds, and FP8 made bf16. Knows no kernel.
//
// out[r][f] = sum over k of x[r][k] w[f][k]. A product of a warp is [16 features, 16 k] x [16 k, 8 rows] (mma.cuh), and
// the order of k inside it is free as long as both sides agree: lane l = 4 g + t takes 16 neighbouring bytes of w, and
// what lies under the same k in x, as its parts of consecutive products.
//
// k is cut into chunks, RANGES ranges of chunks, and Splits groups of ranges, all of neighbours. The chunks of a range are
// added up in order of k, then the ranges of a group, then the groups, each from zero on. All of this depends on Din and
// Splits alone: a row has the same bits whatever rows are beside it, in either kernel.
#pragma once

#include "mma.cuh"

constexpr int CHUNK = 64;    // k of one step: one scale of an FP8 block
constexpr int RANGES = 16;
constexpr int SCALED = 128;  // features, and k, of one FP8 scale

// The first chunk of range r, when k has so many chunks.
__device__ __forceinline__ int range_start(int r, int chunks) { return r * chunks / RANGES; }

__device__ __forceinline__ unsigned word(const uint4& v, int i) {
  return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
}

// 16 bytes of zeros where !valid.
__device__ __forceinline__ uint4 load_or_zero(const void* p, bool valid) {
  return valid ? *reinterpret_cast<const uint4*>(p) : make_uint4(0, 0, 0, 0);
}
__device__ __forceinline__ uint4 load_once_or_zero(const void* p, bool valid) {
  return valid ? __ldcs(reinterpret_cast<const uint4*>(p)) : make_uint4(0, 0, 0, 0);
}

// Two E4M3 numbers, each in the upper byte of a half word, as a pair of bf16, exactly (NaN, which weights do not hold,
// becomes 480): of s eeee mmm, bf16 has the exponent four bits lower, with a bias larger by 120.
__device__ __forceinline__ unsigned widen_halves(unsigned halves) {
  unsigned bits = (halves & 0x80008000u) | ((halves & 0x7f007f00u) >> 4);
  const unsigned factor = 0x7b807b80u;  // 2^120, twice
  __nv_bfloat162 a, b;
  memcpy(&a, &bits, 4);
  memcpy(&b, &factor, 4);
  a = __hmul2(a, b);
  memcpy(&bits, &a, 4);
  return bits;
}

// Four E4M3 numbers as two pairs.
__device__ __forceinline__ void widen(unsigned four, unsigned& first, unsigned& second) {
  first = widen_halves(__byte_perm(four, 0, 0x1404));
  second = widen_halves(__byte_perm(four, 0, 0x3424));
}

// d += the products number 0 .. N-1 of 16 bytes of w (rows g and g+8 of a tile) with x: for bf16, N = 2 products and
// 16 bytes of x; for FP8, N = 4 and 32 bytes.
template <class T>
struct Fragments {
  static constexpr int N = 16 / sizeof(T) / 4;
  unsigned a[N][4];

  Fragments() = default;
  __device__ __forceinline__ Fragments(const uint4& low, const uint4& high) {
#pragma unroll
    for (int j = 0; j < N; j++) {
      if constexpr (sizeof(T) == 2) {
        a[j][0] = word(low, 2 * j), a[j][1] = word(high, 2 * j);
        a[j][2] = word(low, 2 * j + 1), a[j][3] = word(high, 2 * j + 1);
      } else {
        widen(word(low, j), a[j][0], a[j][2]);
        widen(word(high, j), a[j][1], a[j][3]);
      }
    }
  }

  __device__ __forceinline__ void multiply(float (&d)[4], const uint4* x) const {
#pragma unroll
    for (int j = 0; j < N; j++) {
      const unsigned b[2] = {word(x[j / 2], j % 2 * 2), word(x[j / 2], j % 2 * 2 + 1)};
      mma_m16n8k16(d, a[j], b);
    }
  }
};
