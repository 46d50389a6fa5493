// Attention of 64 queries by a warpgroup: queries are the rows of its products, 16 of them a warp's.
//
// Of 128 queries each warpgroup has 64. Of 64 queries both make all scores, and each the sums of half of V's columns: they
// have room for those of the leaves before then, and where 64 queries come, the products have to wait for memory anyway.
// The scores' fragments are, in pairs, those of the weights in the next product, so nothing passes through shared memory.
#pragma once

#include "attention_tile.cuh"

constexpr int NS = SPLIT / 8;  // 8-slot products of scores
constexpr bool HALVES = Rows == 64 && Dh > 64;  // of the columns, by two warpgroups
constexpr int COLUMNS = HALVES ? Dh / 2 : Dh;   // of a warpgroup
constexpr int NV = COLUMNS / 8;                 // 8-column products of values

// d += p v of 16 slots and N / 2 columns from the panel v on
#ifdef EMULATED
template <int N>
void multiply_values(float (&d)[N], const unsigned (&p)[4], const bf16* v, int step) {
  const int lane = threadIdx.x % WARP;
  for (int n = 0; n < N / 4; n += 2) {
    unsigned b[4];
    ldmatrix_x4_trans(b, v + place_in_tile(16 * step + lane % 16, 8 * n + lane / 16 * 8));
    for (int i = 0; i < 2; i++) {
      float(&at)[4] = reinterpret_cast<float(&)[4]>(d[4 * (n + i)]);
      mma_m16n8k16(at, p, {b[2 * i], b[2 * i + 1]});
    }
  }
}
#else
// N: columns; D: the numbers of d, then those of the next operands, then the operands that d is. From one panel of v to the
// next are 1024 bytes.
#define VALUES(N, D, P0, P1, P2, P3, V, ...)                                                                          \
  __device__ __forceinline__ void multiply_values(float (&d)[N / 2], const unsigned (&p)[4], const bf16* v, int step) { \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 {" D "}, {%" #P0 ", %" #P1 ", %" #P2       \
                 ", %" #P3 "}, %" #V ", 1, 1, 1, 1;"                                                                  \
                 : __VA_ARGS__                                                                                        \
                 : "r"(p[0]), "r"(p[1]), "r"(p[2]), "r"(p[3]),                                                        \
                   "l"(Tile(v, APART).bits + (63ull << 16) + APART / 8 * step));                                      \
  }
VALUES(64, D32, 32, 33, 34, 35, 36, SIXTEEN(0), SIXTEEN(16))
VALUES(128, D64, 64, 65, 66, 67, 68, SIXTY_FOUR(0))
VALUES(256, D128, 128, 129, 130, 131, 132, SIXTY_FOUR(0), SIXTY_FOUR(64))
#undef VALUES
#endif

// Queries g + 8 h of the warp's 16: of slots (of columns) 8 n + 2 t, + 1 in elements 2 h, + 1 of n.
template <int Rows>
struct Share {
  struct Shared {};
  __device__ __forceinline__ static void prepare(Shared&) {}
  static constexpr int EXTRA = 0;

  float o[NV][4], m[2], l[2];
  const int first_query = threadIdx.x / WARP % (HALVES ? 4 : 8) * 16;  // of the warp
  const int first_column = HALVES ? threadIdx.x / 128 * COLUMNS : 0;

  __device__ __forceinline__ Share(Shared&, bf16*) { clear(); }

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < 4 * NV; i++) o[i / 4][i % 4] = 0.0f;
    m[0] = m[1] = -inf(), l[0] = l[1] = 0.0f;
  }

  float s[NS][4], factor[2];
  unsigned p[KS][4];

  __device__ __forceinline__ void begin_scores(const bf16* q, const bf16* k) {
    float(&d)[4 * NS] = reinterpret_cast<float(&)[4 * NS]>(s);
    if (!HALVES) q += threadIdx.x / 128 * TILE;
    wgmma_begin();
#pragma unroll
    for (int panel = 0; panel < PANELS; panel++) {
#pragma unroll
      for (int step = 0; step < 4; step++) {
        wgmma(d, Tile(q + panel * PANEL, APART), Tile(k + panel * PANEL, APART), step, panel + step);
      }
    }
    wgmma_end();
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

  // The weights, in place of the scores, and the new maxima
  __device__ __forceinline__ void weigh(float c) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
      float top = -inf();
#pragma unroll
      for (int n = 0; n < NS; n++) top = fmaxf(top, fmaxf(s[n][2 * h], s[n][2 * h + 1]));
      top = fmaxf(top, __shfl_xor_sync(ALL_LANES, top, 1));
      top = fmaxf(top, __shfl_xor_sync(ALL_LANES, top, 2));
      factor[h] = rise(m[h], __fmul_rn(top, c));
      const float base = m[h] == -inf() ? 0.0f : m[h];
#pragma unroll
      for (int n = 0; n < NS; n++)
#pragma unroll
        for (int e = 0; e < 2; e++) s[n][2 * h + e] = power2(fmaf(s[n][2 * h + e], c, -base));
    }
  }

  // The weights as an operand and their sums; scales what is there to the new maxima.
  __device__ __forceinline__ void settle() {
    float sum[4] = {};
#pragma unroll
    for (int i = 0; i < KS; i++) {
#pragma unroll
      for (int j = 0; j < 4; j++) p[i][j] = pack_bf16(s[2 * i + j / 2][j % 2 * 2], s[2 * i + j / 2][j % 2 * 2 + 1]);
      add_weights(sum, p[i]);
    }
#pragma unroll
    for (int h = 0; h < 2; h++) l[h] = fmaf(l[h], factor[h], sum[2 * h]);
    if (!__any_sync(ALL_LANES, factor[0] != 1.0f || factor[1] != 1.0f)) return;
#pragma unroll
    for (int n = 0; n < NV; n++)
#pragma unroll
      for (int e = 0; e < 4; e++) o[n][e] = __fmul_rn(o[n][e], factor[e / 2]);
  }

  __device__ __forceinline__ void begin_add(const bf16* v) {
    wgmma_begin();
#pragma unroll
    for (int i = 0; i < KS; i++) {
      multiply_values(reinterpret_cast<float(&)[4 * NV]>(o), p[i], v + first_column / 64 * PANEL, i);
    }
    wgmma_end();
  }

  static constexpr bool HOLDS = HALVES;  // earlier leaves itself
  float4 all_o[2][HOLDS ? NV / 2 : 1];
  float all_m[2], all_l[2];

  // Joins the leaf to those before; they are held here, or lie in memory.
  __device__ __forceinline__ void fold(const Queries<Rows>& queries, float* memory, bool first, bool last) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
      float2 by = {0.0f, 1.0f};
      if (!first) {
        by = join_factors(all_m[h], m[h]);
        m[h] = all_m[h], l[h] = joined(all_l[h], l[h], by);
      }
      all_m[h] = m[h], all_l[h] = l[h];
      if constexpr (HOLDS) {
#pragma unroll
        for (int n = 0; n < NV; n += 2) {
          float4& all = all_o[h][n / 2];
          float(&a)[4] = o[n], (&b)[4] = o[n + 1];
          if (!first) {
            a[2 * h] = joined(all.x, a[2 * h], by), a[2 * h + 1] = joined(all.y, a[2 * h + 1], by);
            b[2 * h] = joined(all.z, b[2 * h], by), b[2 * h + 1] = joined(all.w, b[2 * h + 1], by);
          }
          if (!last) all = float4{a[2 * h], a[2 * h + 1], b[2 * h], b[2 * h + 1]};
        }
      } else {  // all reads before any write: they would wait for one another
        const int place = queries.place[query(h)];
        float2* kept = reinterpret_cast<float2*>(memory + (long long)max(place, 0) * Dh) + threadIdx.x % 4;
        if (place >= 0 && !first) {
#pragma unroll
          for (int n = 0; n < NV; n++) {
            const float2 before = kept[4 * n];
            o[n][2 * h] = joined(before.x, o[n][2 * h], by), o[n][2 * h + 1] = joined(before.y, o[n][2 * h + 1], by);
          }
        }
        if (place >= 0 && !last) {
#pragma unroll
          for (int n = 0; n < NV; n++) kept[4 * n] = float2{o[n][2 * h], o[n][2 * h + 1]};
        }
      }
    }
  }

  // visit(query, column, first of NEIGHBOURS sums): of the lane's columns of n and n + 1 those of one, and beside them those
  // of the neighbouring lane, which gets the others
  static constexpr int NEIGHBOURS = 4;
  template <class Visit>
  __device__ __forceinline__ void each(Visit visit) {
    const bool odd = threadIdx.x & 1;
#pragma unroll
    for (int h = 0; h < 2; h++)
#pragma unroll
      for (int n = 0; n < NV; n += 2) {
        float four[4];
#pragma unroll
        for (int e = 0; e < 2; e++) {
          const float a = o[n][2 * h + e], b = o[n + 1][2 * h + e], other = __shfl_xor_sync(ALL_LANES, odd ? a : b, 1);
          four[e] = odd ? other : a, four[2 + e] = odd ? b : other;
        }
        visit(query(h), first_column + 8 * (n + odd) + threadIdx.x % 4 / 2 * 4, four);
      }
  }
  __device__ __forceinline__ int query(int i) const { return first_query + threadIdx.x % WARP / 4 + 8 * i; }
  // Its queries' m and l: one thread for each
  __device__ __forceinline__ bool tells() const { return threadIdx.x % 4 == 0 && first_column == 0; }
};
