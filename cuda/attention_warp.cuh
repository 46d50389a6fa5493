// Attention of one warp: 16 queries and a tile of 64 slots, by mma on what lies in shared memory.
//
//   s = q k^T   m = max c s   p = 2^(c s - m) in bf16   (o, m, l) of the tile = (p v, m, p 1)
//
// The scores' fragments are, in pairs, those of the weights in the next product, so nothing passes through shared memory.
// A tile's part is made from zero and then joined to the parts before (attention.cuh): whoever does it in whichever
// company, the sums and their order are the same. c = scale log2 e, and s is -inf where a query does not see a slot.
#pragma once

#include "attention.cuh"
#include "mma.cuh"

constexpr int NS = TILE / 8;   // 8-slot products of a tile
constexpr int KS = TILE / 16;  // 16-slot steps of the values' product

// 2^x, 0 below 2^-126
__device__ __forceinline__ float power2(float x) {
#ifdef EMULATED
  return exp2f(x);
#else
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#endif
}

// Element (row, col + step) of a shared matrix of Lines rows and Width columns. It lies in panels of 64 columns, a row of
// 128 bytes each (at Width 32 one of 64 bytes), whose 16-byte words are permuted so that eight rows use all banks.
// step is a constant, a multiple of 8, and shares no bit with col: eight addresses then serve all steps.
template <int Lines, int Width>
__device__ __forceinline__ int at(int row, int col, int step = 0) {
  constexpr int PANEL = Width < 64 ? Width : 64;
  const int mix = PANEL == 64 ? row % 8 : row / 2 % 4;
  return (col / PANEL + step / PANEL) * (Lines * PANEL) + row * PANEL + ((col % PANEL ^ mix * 8) ^ step % PANEL);
}

// s += q k^T of queries row .. row + 15 of Rows and slots slot .. slot + 8 N - 1 of a tile
template <int Rows, int Dh, int N>
__device__ __forceinline__ void add_scores(float (&s)[N][4], const bf16* q, int row, const bf16* k, int slot) {
  constexpr int SOME = Dh < 64 ? Dh : 64;
  const int lane = threadIdx.x % WARP;
#pragma unroll(N == NS ? 1 : 4)  // where registers are scarce no copies
  for (int from = 0; from < Dh; from += SOME) {
#pragma unroll
    for (int col = 0; col < SOME; col += 16) {
      unsigned a[4], b[4];
      ldmatrix_x4(a, q + from * Rows + at<Rows, Dh>(row + lane % 16, lane / 16 * 8, col));
#pragma unroll
      for (int n = 0; n < N; n += 2) {
        ldmatrix_x4(b, k + from * TILE + at<TILE, Dh>(slot + 8 * n + lane / 16 * 8 + lane % 8, lane / 8 % 2 * 8, col));
        const unsigned low[2] = {b[0], b[1]}, high[2] = {b[2], b[3]};
        mma_m16n8k16(s[n], a, low);
        mma_m16n8k16(s[n + 1], a, high);
      }
    }
  }
}

// The weights of 16 queries in a tile, their maxima and sums; h: queries g and g + 8 of lane 4 g + t.
struct Weights {
  unsigned p[KS][4];
  float m[2], l[2];

  __device__ __forceinline__ Weights(const float (&s)[NS][4], float c) {
    float base[2];
#pragma unroll
    for (int h = 0; h < 2; h++) {
      float top = -inf();
#pragma unroll
      for (int n = 0; n < NS; n++) top = fmaxf(top, fmaxf(s[n][2 * h], s[n][2 * h + 1]));
      top = fmaxf(top, __shfl_xor_sync(ALL_LANES, top, 1));
      top = fmaxf(top, __shfl_xor_sync(ALL_LANES, top, 2));
      m[h] = __fmul_rn(top, c);
      base[h] = m[h] == -inf() ? 0.0f : m[h];
    }
#pragma unroll
    for (int n = 0; n < NS; n++)
#pragma unroll
      for (int h = 0; h < 2; h++) {
        p[n / 2][n % 2 * 2 + h] =
            pack_bf16(power2(fmaf(s[n][2 * h], c, -base[h])), power2(fmaf(s[n][2 * h + 1], c, -base[h])));
      }
    const unsigned ones[2] = {0x3f803f80u, 0x3f803f80u};
    float sum[4] = {};
#pragma unroll
    for (int i = 0; i < KS; i++) mma_m16n8k16(sum, p[i], ones);
    l[0] = sum[0], l[1] = sum[2];
  }
};

// The parts so far of 16 queries, in the 8 N columns of the warp.
template <int N>
struct Sum16 {
  float o[N][4], m[2], l[2];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
      for (int e = 0; e < 4; e++) o[n][e] = 0.0f;
#pragma unroll
    for (int h = 0; h < 2; h++) m[h] = -inf(), l[h] = 0.0f;
  }

  // Joins the tile's part, p v of columns col .. col + 8 N - 1.
  template <int Dh>
  __device__ __forceinline__ void add(const Weights& w, const bf16* v, int col) {
    constexpr int SOME = N < 8 ? N : N == 32 ? 4 : 8;  // 8-column products at a time
    const int lane = threadIdx.x % WARP;
    float2 factor[2];
#pragma unroll
    for (int h = 0; h < 2; h++) {
      factor[h] = join_factors(m[h], w.m[h]);
      l[h] = joined(l[h], w.l[h], factor[h]);
    }
    const bool moved = __any_sync(ALL_LANES, factor[0].x != 1.0f || factor[1].x != 1.0f);
#pragma unroll
    for (int first = 0; first < N; first += SOME) {
      float part[SOME][4] = {};
#pragma unroll
      for (int i = 0; i < KS; i += 2)
#pragma unroll
        for (int n = 0; n < SOME; n++) {
          unsigned b[4];
          ldmatrix_x4_trans(b, v + at<TILE, Dh>(16 * i + lane, col, 8 * (first + n)));
          const unsigned low[2] = {b[0], b[1]}, high[2] = {b[2], b[3]};
          mma_m16n8k16(part[n], w.p[i], low);
          mma_m16n8k16(part[n], w.p[i + 1], high);
        }
#pragma unroll
      for (int n = 0; n < SOME; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) {  // as joined()
          float& x = o[first + n][e];
          if (moved) x = __fmul_rn(x, factor[e / 2].x);
          x = fmaf(part[n][e], factor[e / 2].y, x);
        }
    }
  }
};
