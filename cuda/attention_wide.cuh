// Attention of 64 queries by each warpgroup: queries are the rows of its products, 16 of them a warp's.
//
// The scores' fragments are, in pairs, those of the weights in the next product, so nothing passes through shared memory.
#pragma once

#include "attention_tile.cuh"

constexpr int NS = SPLIT / 8;  // 8-slot products of scores
constexpr int NV = Dh / 8;     // 8-column products of values

// d (+)= p v of 16 slots and the 64 columns of a panel; from zero at step 0.
#ifdef EMULATED
inline void multiply_values(float (&d)[8][4], const unsigned (&p)[4], const bf16* v, int step) {
  const int lane = threadIdx.x % WARP;
  if (step == 0) memset(d, 0, sizeof d);
  for (int n = 0; n < 8; n += 2) {
    unsigned b[4];
    ldmatrix_x4_trans(b, v + place_in_tile<64>(16 * step + lane % 16, 8 * n + lane / 16 * 8));
    const unsigned low[2] = {b[0], b[1]}, high[2] = {b[2], b[3]};
    mma_m16n8k16(d[n], p, low);
    mma_m16n8k16(d[n + 1], p, high);
  }
}
#else
__device__ __forceinline__ void multiply_values(float (&d)[8][4], const unsigned (&p)[4], const bf16* v, int step) {
#define FOUR(n) "+f"(d[n][0]), "+f"(d[n][1]), "+f"(d[n][2]), "+f"(d[n][3])
  asm volatile(
      "{\n"
      ".reg .pred more;\n"
      "setp.ne.b32 more, %37, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, "
      "%25, %26, %27, %28, %29, %30, %31}, {%32, %33, %34, %35}, %36, more, 1, 1, 1;\n"
      "}"
      : FOUR(0), FOUR(1), FOUR(2), FOUR(3), FOUR(4), FOUR(5), FOUR(6), FOUR(7)
      : "r"(p[0]), "r"(p[1]), "r"(p[2]), "r"(p[3]), "l"(Tile(v).bits + 128 * step), "r"(step));
#undef FOUR
}
#endif

// Queries g + 8 h of the warp's 16: of slots (of columns) 8 n + 2 t, + 1 in elements 2 h, + 1 of n.
template <int Rows>
struct Share {
  struct Shared {};
  __device__ __forceinline__ static void prepare(Shared&) {}
  static constexpr int EXTRA = 0;

  float o[NV][4], m[2], l[2];

  __device__ __forceinline__ Share(Shared&, bf16*) { clear(); }

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < 4 * NV; i++) o[i / 4][i % 4] = 0.0f;
    m[0] = m[1] = -inf(), l[0] = l[1] = 0.0f;
  }

  float s[NS][4];

  __device__ __forceinline__ void scores(const bf16* q, const bf16* k) {
    float(&d)[4 * NS] = reinterpret_cast<float(&)[4 * NS]>(s);
    q += threadIdx.x / 128 * TILE;
#pragma unroll
    for (int i = 0; i < 4 * NS; i++) d[i] = 0.0f;
    wgmma_begin();
#pragma unroll
    for (int panel = 0; panel < PANELS; panel++) {
#pragma unroll
      for (int step = 0; step < 4; step++) wgmma(d, Tile(q + panel * PANEL), Tile(k + panel * PANEL), step);
    }
    wgmma_end();
    wgmma_wait<0>();
  }

  // -inf where a query does not see the slot
  __device__ __forceinline__ void mask(const Queries<Rows>& queries, int key) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const unsigned long long seen = queries.visible(query(h), key) >> threadIdx.x % 4 * 2;
      const unsigned low = unsigned(seen), high = unsigned(seen >> 32);
#pragma unroll
      for (int n = 0; n < NS; n++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
          if (!((n < 4 ? low : high) & 1u << n % 4 * 8 + e)) s[n][2 * h + e] = -inf();
        }
    }
  }

  // The weights, their maxima and sums
  unsigned p[KS][4];
  float part_m[2], part_l[2];

  __device__ __forceinline__ void weigh(float c) {
    float base[2];
#pragma unroll
    for (int h = 0; h < 2; h++) {
      float top = -inf();
#pragma unroll
      for (int n = 0; n < NS; n++) top = fmaxf(top, fmaxf(s[n][2 * h], s[n][2 * h + 1]));
      top = fmaxf(top, __shfl_xor_sync(ALL_LANES, top, 1));
      top = fmaxf(top, __shfl_xor_sync(ALL_LANES, top, 2));
      part_m[h] = __fmul_rn(top, c);
      base[h] = part_m[h] == -inf() ? 0.0f : part_m[h];
    }
#pragma unroll
    for (int n = 0; n < NS; n++)
#pragma unroll
      for (int h = 0; h < 2; h++) {
        p[n / 2][n % 2 * 2 + h] =
            pack_bf16(power2(fmaf(s[n][2 * h], c, -base[h])), power2(fmaf(s[n][2 * h + 1], c, -base[h])));
      }
    float sum[4] = {};
#pragma unroll
    for (int i = 0; i < KS; i++) add_weights(sum, p[i]);
    part_l[0] = sum[0], part_l[1] = sum[2];
  }

  // Joins p v, 64 columns at a time while the next are multiplied.
  __device__ __forceinline__ void add(const bf16* v) {
    float part[2][8][4];
    const auto begin = [&](int panel) {
      wgmma_begin();
#pragma unroll
      for (int i = 0; i < KS; i++) multiply_values(part[panel % 2], p[i], v + panel * PANEL, i);
      wgmma_end();
    };
    begin(0);
    float2 factor[2];
#pragma unroll
    for (int h = 0; h < 2; h++) {
      factor[h] = join_factors(m[h], part_m[h]);
      l[h] = joined(l[h], part_l[h], factor[h]);
    }
    const bool moved = __any_sync(ALL_LANES, factor[0].x != 1.0f || factor[1].x != 1.0f);
#pragma unroll
    for (int panel = 0; panel < PANELS; panel++) {
      if (panel + 1 < PANELS) begin(panel + 1);
      if (panel + 1 < PANELS) wgmma_wait<1>();
      if (panel + 1 == PANELS) wgmma_wait<0>();
#pragma unroll
      for (int n = 0; n < 8; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) {  // as joined()
          float& x = o[8 * panel + n][e];
          if (moved) x = __fmul_rn(x, factor[e / 2].x);
          x = fmaf(part[panel % 2][n][e], factor[e / 2].y, x);
        }
    }
  }

  // visit(i, query, column, first of NEIGHBOURS sums) for all that the lane owns, of its query i
  static constexpr int NEIGHBOURS = 2;
  template <class Visit>
  __device__ __forceinline__ void each(Visit visit) {
#pragma unroll
    for (int h = 0; h < 2; h++)
#pragma unroll
      for (int n = 0; n < NV; n++) visit(h, query(h), 8 * n + threadIdx.x % 4 * 2, o[n] + 2 * h);
  }
  __device__ __forceinline__ static int query(int i) { return threadIdx.x / WARP * 16 + threadIdx.x % WARP / 4 + 8 * i; }
  __device__ __forceinline__ static bool tells() { return threadIdx.x % 4 == 0; }  // its queries' m and l: one thread for each
};
