// Products of a warp with FP8 weights that it has in shared memory, for moe_few_fp8.cu: in the order of sums of moe_units.cuh, in
// fewer instructions. Rows of x and of hidden are LIFTED.
#pragma once

#include "moe_units.cuh"

// Two numbers rounded, and what they are then.
struct Pair {
  unsigned bits;
  float first, second;

  __device__ __forceinline__ Pair(float a, float b) : bits(pack_bf16(a, b)) {
    Pack<bf16, 2> two;
    memcpy(&two, &bits, sizeof two);
    first = to_float(two.v[0]), second = to_float(two.v[1]);
  }
};

// Two numbers, LIFTED once they are rounded.
__device__ __forceinline__ unsigned lifted_pair(float a, float b) {
  const Pair pair(a, b);
  return pack_bf16(pair.first * LIFTED, pair.second * LIFTED);
}

// Four rows of gate and four of up: part[h], for h = 0 and 1, is part 2 h + g % 2 of row g / 2 of gate and rows 2 t, 2 t + 1 of
// x, and then of the row of up. scales: of 128 k number `lane`, x of gate, y of up. x: the row g; w: the row g / 2 of gate from
// chunk g % 2 on; further: from there to the same row of up. A product is [4 rows of either, for two chunks each] [x]^T, for one
// of the chunks.
__device__ __forceinline__ void multiply_four(
    float (&part)[2][4], const char* x, const char* w, int further, int K, float2 scales) {
  const bool odd = threadIdx.x / 4 % 2;
#pragma unroll
  for (int j = 0; j < 8; j++) part[j / 4][j % 4] = 0.0f;
#pragma unroll 1
  for (int s = 0; s < K / STEP; s++) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const char* const from = x + (2 * s + h) * 2 * CHUNK * 2;
      const char* const first = w + (2 * s + h) * 2 * CHUNK * ITEM;
      uint4 xs[2][2];
#pragma unroll
      for (int i = 0; i < 4; i++) xs[i / 2][i % 2] = *reinterpret_cast<const uint4*>(from + i / 2 * CHUNK * 2 + x_bytes(i % 2));
      const Weights gate(first), up(first + further);
      float block[2][4] = {};
#pragma unroll
      for (int i = 0; i < PRODUCTS; i++) {
        const unsigned a[4] = {gate.pair[i][0], up.pair[i][0], gate.pair[i][1], up.pair[i][1]};
#pragma unroll
        for (int c = 0; c < 2; c++) {
          const unsigned b[2] = {word(xs[c][i / 2], i % 2 * 2), word(xs[c][i / 2], i % 2 * 2 + 1)};
          mma_m16n8k16(block[c], a, b);
        }
      }
      const float of_gate = __shfl_sync(ALL_LANES, scales.x, 2 * s + h), of_up = __shfl_sync(ALL_LANES, scales.y, 2 * s + h);
#pragma unroll
      for (int j = 0; j < 4; j++) part[h][j] = fmaf(j / 2 ? of_up : of_gate, odd ? block[1][j] : block[0][j], part[h][j]);
    }
  }
}

// Two rows of either, and up to two rows of x: sum[r] is part t of row r and row g / 2 of weights, gate's first, in lanes whose t
// is g % 2 or that and 2. x: the row g % 2 from chunk g / 2 on; w: the row g / 2 from chunk g % 2 on. A product is [4 rows of
// weights, for four chunks each] [2 rows of x, for four chunks each]^T.
__device__ __forceinline__ void multiply_thin(float (&sum)[2], const char* x, const char* w, int K, float2 scales) {
  const bool second = threadIdx.x % 4 / 2;
  sum[0] = sum[1] = 0.0f;
#pragma unroll 2
  for (int s = 0; s < K / STEP; s++) {
    const char *const from = x + s * STEP * 2, *const first = w + s * STEP * ITEM;
    const uint4 xs[2] = {*reinterpret_cast<const uint4*>(from + x_bytes(0)), *reinterpret_cast<const uint4*>(from + x_bytes(1))};
    const Weights low(first), high(first + 2 * CHUNK * ITEM);
    float block[4] = {};
#pragma unroll
    for (int i = 0; i < PRODUCTS; i++) {
      const unsigned a[4] = {low.pair[i][0], high.pair[i][0], low.pair[i][1], high.pair[i][1]};
      const unsigned b[2] = {word(xs[i / 2], i % 2 * 2), word(xs[i / 2], i % 2 * 2 + 1)};
      mma_m16n8k16(block, a, b);
    }
    const int at = 2 * s + second;
    const float gate = __shfl_sync(ALL_LANES, scales.x, at), up = __shfl_sync(ALL_LANES, scales.y, at);
    const float factor = threadIdx.x % WARP / 16 ? up : gate;
#pragma unroll
    for (int r = 0; r < 2; r++) sum[r] = fmaf(factor, second ? block[2 + r] : block[r], sum[r]);
  }
}

constexpr int WORDS = PARTS * 2;  // of a row of x for a step

// Of a step, as they are now.
__device__ __forceinline__ void read_step(uint4 (&words)[WORDS], const bf16* x) {
#pragma unroll
  for (int i = 0; i < WORDS; i++) words[i] = read_live(x + i / 2 * CHUNK + x_bytes(i % 2) / 2);
}

// total: [16 rows of weights] [x]^T, four parts in order. x: the lane's row g, in memory, read until it is there; w: its rows g
// and, `further`, g + 8. here(): waits for the weights. scale: of 128 k number `lane`. words: what has been read of x's first
// step, and then of x_after's: they are on their way while others are multiplied, behind weights that were asked for before.
template <class Here>
__device__ __forceinline__ void multiply_tile_ahead(
    float (&total)[4], uint4 (&words)[WORDS], const bf16* x, const bf16* x_after, const char* w, int further, int K,
    float scale, Here here) {
  float sum[PARTS][4] = {};
#pragma unroll 1
  for (int s = 0; s < K / STEP; s++) {
    uint4 xs[WORDS];
    while (true) {
      unsigned most = 0;  // is NOT_THERE where a word is
#pragma unroll
      for (int i = 0; i < WORDS; i++) {
        xs[i] = words[i];
        most = max(most, max(max(xs[i].x, xs[i].y), max(xs[i].z, xs[i].w)));
      }
      if (!__any_sync(ALL_LANES, most == NOT_THERE)) break;
      read_step(words, x + s * STEP);
    }
    read_step(words, s + 1 < K / STEP ? x + (s + 1) * STEP : x_after);
    if (s == 0) here();
    multiply_step(sum, xs, w, further, s, scale);
  }
#pragma unroll
  for (int i = 0; i < 4; i++) total[i] = sum[0][i] + sum[1][i] + sum[2][i] + sum[3][i];
}
