// Products of a warp with what it has of an expert in shared memory, for moe_few.cu and, some, for moe_few_fp8.cu. Definition:
// moe in boleinfer/ops/moe.py.
//
// The order of sums is that of moe_experts.cu: chunks of k (linear.cuh) c, c + 4, c + 8, ... in turn, for c = 0 .. 3, and
// then these four parts. A product with FP8 weights begins anew with each scale.
#pragma once

#include "arrival.cuh"
#include "linear.cuh"

constexpr int ITEM = sizeof(Wt);                        // bytes of a weight
constexpr int X_PAD = ITEM == 2 ? 64 : 16;  // bytes behind a row of x, so that lanes read from different banks
constexpr int PRODUCTS = CHUNK / 16, PARTS = 4, STEP = PARTS * CHUNK;  // of a chunk; of k
constexpr unsigned NOT_THERE = ~0u;  // no two bf16 that arithmetic gives

// The lane's part of a row's chunk of x, from the chunk's start, in bytes: 16 for products 0 and 1, 16 for 2 and 3.
__device__ __forceinline__ int x_bytes(int half) {
  return ITEM == 2 ? threadIdx.x % 4 * 16 + half * 64 : threadIdx.x % 4 * 32 + half * 16;
}

// Two of four E4M3 numbers as a pair of bf16, 2^-120 of them: of s eeee mmm, bf16 has the exponent four bits lower, with a
// bias larger by 120. Rows of x that are LIFTED make that good but for 2^56, which the scales bring; so nothing but powers of
// two differs from what widen gives, as long as |x| < 2^63 and sums are above 2^-70.
constexpr float LIFTED = 0x1p64f, LOWERED = 0x1p56f;

__device__ __forceinline__ unsigned lowered(unsigned four, int half) {
  unsigned halves;  // each number behind eight times its sign
#ifdef EMULATED
  halves = __byte_perm(four, 0, half ? 0xb3a2 : 0x9180);
#else
  asm("prmt.b32 %0, %1, 0, %2;" : "=r"(halves) : "r"(four), "r"(half ? 0xb3a2 : 0x9180));  // __byte_perm knows no signs
#endif
  return halves << 4 & 0x87f087f0u;
}

// The lane's part of a row's chunk of weights: two numbers, and two 8 k further in the product, for each product.
struct Weights {
  unsigned pair[PRODUCTS][2];

  __device__ __forceinline__ explicit Weights(const char* chunk) {
    const char* const own = chunk + threadIdx.x % 4 * 16;
    if constexpr (ITEM == 2) {
#pragma unroll
      for (int half = 0; half < 2; half++) memcpy(pair[2 * half], __builtin_assume_aligned(own + 64 * half, 16), 16);
    } else {
      const uint4 all = *reinterpret_cast<const uint4*>(own);
#pragma unroll
      for (int i = 0; i < PRODUCTS; i++) {
        pair[i][0] = lowered(word(all, i), 0), pair[i][1] = lowered(word(all, i), 1);
      }
    }
  }
};

// sum[h], for h = 0 and 1: [x, and x one chunk further] [4 rows of weights, and these one chunk further]^T, over the chunks
// 4 s + 2 h. x, w: the lane's rows g, and g % 4 one chunk further from g = 4 on. The lane has part 2 h of the rows of weights
// 2 t and 2 t + 1 in the first two numbers for t < 2, and part 2 h + 1 of those four less in the next two for the others.
// Products of both h take turns, since each waits for its last one. Of bf16.
__device__ __forceinline__ void multiply_two(float (&sum)[2][4], const char* x, const char* w, int K) {
#pragma unroll 1
  for (int s = 0; s < K / STEP; s++) {
    uint4 near[2][2], far[2][2];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const char* const at = x + (2 * s + i / 2) * 2 * CHUNK * 2 + x_bytes(i % 2);
      near[i / 2][i % 2] = *reinterpret_cast<const uint4*>(at);
      far[i / 2][i % 2] = *reinterpret_cast<const uint4*>(at + CHUNK * 2);
    }
    const char* const first = w + 4 * s * CHUNK * ITEM;
    const Weights weights[2] = {Weights(first), Weights(first + 2 * CHUNK * ITEM)};
#pragma unroll
    for (int i = 0; i < PRODUCTS; i++) {
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const uint4 &n = near[h][i / 2], &f = far[h][i / 2];
        const int j = i % 2 * 2;
        const unsigned a[4] = {word(n, j), word(f, j), word(n, j + 1), word(f, j + 1)};
        mma_m16n8k16(sum[h], a, weights[h].pair[i]);
      }
    }
  }
}

// sum[c] += the chunk 4 s + c of [16 rows of weights] [x]^T; xs: the lane's words of x, two for each chunk. scale: of FP8
// weights, of 128 k number `lane`.
__device__ __forceinline__ void multiply_step(
    float (&sum)[PARTS][4], const uint4* xs, const char* w, int further, int s, float scale) {
#pragma unroll
  for (int c0 = 0; c0 < PARTS; c0 += 2) {
    const char* const first = w + (s * PARTS + c0) * CHUNK * ITEM;
    const Weights low[2] = {Weights(first), Weights(first + CHUNK * ITEM)};
    const Weights high[2] = {Weights(first + further), Weights(first + further + CHUNK * ITEM)};
    float block[2][4] = {};
#pragma unroll
    for (int j = 0; j < PRODUCTS; j++) {
#pragma unroll
      for (int c = 0; c < 2; c++) {
        const unsigned a[4] = {low[c].pair[j][0], high[c].pair[j][0], low[c].pair[j][1], high[c].pair[j][1]};
        const uint4& v = xs[2 * (c0 + c) + j / 2];
        const unsigned b[2] = {word(v, j % 2 * 2), word(v, j % 2 * 2 + 1)};
        mma_m16n8k16(ITEM == 2 ? sum[c0 + c] : block[c], a, b);
      }
    }
    if constexpr (ITEM == 1) {
      const float factor = __shfl_sync(ALL_LANES, scale, (s * PARTS + c0) * CHUNK / SCALED);
#pragma unroll
      for (int c = 0; c < 2; c++) {
#pragma unroll
        for (int j = 0; j < 4; j++) sum[c0 + c][j] = fmaf(factor, block[c][j], sum[c0 + c][j]);
      }
    }
  }
}

// Whether one of these words is.
__device__ __forceinline__ bool missing(const uint4& v) {
  return v.x == NOT_THERE || v.y == NOT_THERE || v.z == NOT_THERE || v.w == NOT_THERE;
}

// sum[c]: part c of [16 rows of weights] [x]^T. x: the lane's row g, in memory, read until it is there; w: its rows g and,
// `further`, g + 8. here(): waits for the weights. Of bf16.
template <class Here>
__device__ __forceinline__ void multiply_tile(
    float (&sum)[PARTS][4], const bf16* x, const char* w, int further, int K, Here here) {
  constexpr int STEPS = 2, WORDS = STEPS * PARTS * 2;  // that are under way together
#pragma unroll 1
  for (int s0 = 0; s0 < K / STEP; s0 += STEPS) {
    uint4 xs[WORDS];
    const auto at = [&](int i) { return x + (s0 * PARTS + i / 2) * CHUNK + x_bytes(i % 2) / 2; };
#pragma unroll
    for (int i = 0; i < WORDS; i++) xs[i] = s0 + i / PARTS / 2 < K / STEP ? read_live(at(i)) : make_uint4(0, 0, 0, 0);
    const auto some_missing = [&] {
      bool any = false;
#pragma unroll
      for (int i = 0; i < WORDS; i++) any |= missing(xs[i]);
      return __any_sync(ALL_LANES, any);
    };
    while (some_missing()) {
#pragma unroll
      for (int i = 0; i < WORDS; i++) {
        if (missing(xs[i])) xs[i] = read_live(at(i));
      }
    }
    if (s0 == 0) here();
#pragma unroll
    for (int i = 0; i < STEPS; i++) {
      if (s0 + i < K / STEP) multiply_step(sum, xs + i * PARTS * 2, w, further, s0 + i, 0.0f);
    }
  }
}
