// Attention of 8 queries by a warpgroup: slots, then columns of V, are the rows of its products, queries their columns.
#pragma once

#include "attention_tile.cuh"

// o^T += v^T p^T of a panel's 64 columns and 16 slots; p: 8 queries by 64 slots.
#ifdef EMULATED
inline void multiply_columns(float (&d)[4], const bf16* v, const bf16* p, int step) {
  const int lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4;
  unsigned a[4], b[2];
  const int slot = 16 * step + lane / 16 * 8 + lane % 8, col = threadIdx.x / WARP * 16 + lane / 8 % 2 * 8;
  ldmatrix_x4_trans(a, v + place_in_tile(slot, col));
  for (int i = 0; i < 2; i++) memcpy(b + i, p + place_in_tile(g, 16 * step + 8 * i) + 2 * t, 4);
  mma_m16n8k16(d, a, b);
}
#else
__device__ __forceinline__ void multiply_columns(float (&d)[4], const bf16* v, const bf16* p, int step) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%0, %1, %2, %3}, %4, %5, 1, 1, 1, 1, 0;"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "l"(Tile(v, APART).bits + APART / 8 * step), "l"(Tile(p).bits + 2 * step));
}
#endif

// Queries 2 t + e: of slots (of columns of each panel) 16 w + g + 8 h in element 2 h + e.
template <>
struct Share<8> {
  struct Shared {
    Barrier met;
    float top[4][8];
  };
  __device__ __forceinline__ static void prepare(Shared& shared) { make_barrier(shared.met, 4 * WARP); }
  static constexpr int WEIGHTS = 8 * SPLIT, EXTRA = 2 * WEIGHTS;  // numbers behind q: for this tile and the one before

  static constexpr int first_query = 0;
  float o[PANELS][4], m[2], l[2];
  Shared& shared;
  Meeting meet;
  bf16 *const weights, *p;

  __device__ __forceinline__ Share(Shared& shared, bf16* q)
      : shared(shared), meet{shared.met}, weights(q + 8 * Dh), p(weights) {
    clear();
  }

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < 4 * PANELS; i++) o[i / 4][i % 4] = 0.0f;
    m[0] = m[1] = -inf(), l[0] = l[1] = 0.0f;
  }

  float s[4], factor[2], part_l[2];

  __device__ __forceinline__ void begin_scores(const bf16* q, const bf16* k) {
    wgmma_begin();
#pragma unroll
    for (int panel = 0; panel < PANELS; panel++) {
#pragma unroll
      for (int step = 0; step < 4; step++) {
        wgmma(s, Tile(k + panel * PANEL, APART), Tile(q + panel * PANEL), step, panel + step);
      }
    }
    wgmma_end();
  }

  // -inf where a query does not see the slot
  __device__ __forceinline__ void mask(const Queries<8>& query, int key) {
    const int lane = threadIdx.x % WARP, slot = threadIdx.x / WARP * 16 + lane / 4;
#pragma unroll
    for (int e = 0; e < 2; e++) {
      const unsigned long long seen = query.visible(lane % 4 * 2 + e, key) >> slot;
      if (!(seen & 1)) s[e] = -inf();
      if (!(seen & 256)) s[2 + e] = -inf();
    }
  }

  // The weights, to shared memory, their sums and the new maxima
  __device__ __forceinline__ void weigh(float c) {
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, g = lane / 4, t = lane % 4;
    float top[2] = {fmaxf(s[0], s[2]), fmaxf(s[1], s[3])};
#pragma unroll
    for (int d = 4; d < WARP; d *= 2) {
#pragma unroll
      for (int e = 0; e < 2; e++) top[e] = fmaxf(top[e], __shfl_xor_sync(ALL_LANES, top[e], d));
    }
    if (g == 0) shared.top[warp][2 * t] = top[0], shared.top[warp][2 * t + 1] = top[1];
    meet();
    p = weights + WEIGHTS - (p - weights);
#pragma unroll
    for (int e = 0; e < 2; e++) {
      const float most = fmaxf(fmaxf(shared.top[0][2 * t + e], shared.top[1][2 * t + e]),
                               fmaxf(shared.top[2][2 * t + e], shared.top[3][2 * t + e]));
      factor[e] = rise(m[e], __fmul_rn(most, c));
      const float base = m[e] == -inf() ? 0.0f : m[e];
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const int slot = warp * 16 + 8 * h;
        p[place_in_tile(2 * t + e, slot) + g] = from_float<bf16>(power2(fmaf(s[2 * h + e], c, -base)));
      }
    }
    fence_writes();
    meet();
    float sum[4] = {};
#pragma unroll
    for (int step = 0; step < KS; step += 2) {
      unsigned r[4];
      ldmatrix_x4(r, p + place_in_tile(lane % 8, 16 * step + lane / 8 * 8));
      const unsigned first[4] = {r[0], 0, r[1], 0}, second[4] = {r[2], 0, r[3], 0};
      add_weights(sum, first), add_weights(sum, second);
    }
#pragma unroll
    for (int e = 0; e < 2; e++) part_l[e] = __shfl_sync(ALL_LANES, sum[0], (2 * t + e) * 4);
  }

  // Scales what is there to the new maxima.
  __device__ __forceinline__ void settle() {
#pragma unroll
    for (int i = 0; i < 4 * PANELS; i++) o[i / 4][i % 4] = __fmul_rn(o[i / 4][i % 4], factor[i % 2]);
#pragma unroll
    for (int e = 0; e < 2; e++) l[e] = fmaf(l[e], factor[e], part_l[e]);
  }

  __device__ __forceinline__ void begin_add(const bf16* v) {
#pragma unroll
    for (int panel = 0; panel < PANELS; panel++) made_before(o[panel]);
    wgmma_begin();
#pragma unroll
    for (int step = 0; step < KS; step++)
#pragma unroll
      for (int panel = 0; panel < PANELS; panel++) multiply_columns(o[panel], v + panel * PANEL, p, step);
    wgmma_end();
  }

  static constexpr bool HOLDS = true;  // earlier leaves itself
  float all_o[PANELS][4], all_m[2], all_l[2];

  // Joins the leaf to those before, which `memory` need not hold.
  __device__ __forceinline__ void fold(const Queries<8>&, float* memory, bool first, bool last) {
    if (!first) {
      float2 by[2];
#pragma unroll
      for (int e = 0; e < 2; e++) {
        by[e] = join_factors(all_m[e], m[e]);
        m[e] = all_m[e], l[e] = joined(all_l[e], l[e], by[e]);
      }
#pragma unroll
      for (int i = 0; i < 4 * PANELS; i++) o[i / 4][i % 4] = joined(all_o[i / 4][i % 4], o[i / 4][i % 4], by[i % 2]);
    }
#pragma unroll
    for (int i = 0; i < 4 * PANELS; i++) all_o[i / 4][i % 4] = o[i / 4][i % 4];
#pragma unroll
    for (int e = 0; e < 2; e++) all_m[e] = m[e], all_l[e] = l[e];
  }

  // visit(query, column, first of NEIGHBOURS sums) for all that the lane owns
  static constexpr int NEIGHBOURS = 1;
  template <class Visit>
  __device__ __forceinline__ void each(Visit visit) {
    const int lane = threadIdx.x % WARP, col = threadIdx.x / WARP * 16 + lane / 4;
#pragma unroll
    for (int i = 0; i < 4 * PANELS; i++) visit(query(i % 2), i / 4 * 64 + col + i / 2 % 2 * 8, o[i / 4] + i % 4);
  }
  __device__ __forceinline__ static int query(int i) { return threadIdx.x % 4 * 2 + i; }
  __device__ __forceinline__ static bool tells() { return threadIdx.x < 4; }  // its queries' m and l: one thread for each
};
