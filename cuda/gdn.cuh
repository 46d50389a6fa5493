// What the kernels of the gated delta rule share: tiles of float32 in shared memory, their products, sums of decays.
//
// A block works on a tile of Vt columns of V, a warp on COLUMNS of them; lane l of a warp is 4 * row + quad. Whatever
// the type, a product's result is held as mma leaves it: a lane has rows `row` and `row + 8` of two columns.
// With Act = bf16 products are made by mma: q and k are exact operands, a float32 operand is a sum of bf16 parts, up to
// 2^-17 with two parts and up to its own rounding with three. With Act = float they are made by FMA.
// The contracted index is dealt out so that a lane's four are neighbours: 2t, 2t+1, 2t+8, 2t+9 of mma are 4t .. 4t+3.
#pragma once

#include "mma.cuh"

constexpr bool TENSOR = sizeof(Act) == 2;
constexpr int COLUMNS = 8;
constexpr int WARPS = Vt / COLUMNS, THREADS = WARP * WARPS;
constexpr int BLOCK = 16;     // rows solved at once
constexpr int CHUNK = 64;     // rows of a long chain taken at once, and the largest ring
constexpr int TREE = 128;     // rows of a tree, at most
constexpr int SHARE = K / 8;  // neighbours along K that a lane holds of a state

struct Lane {
  int warp, row, quad;
  int column;  // first column of the tile that the warp owns
  int pair;    // first of the two columns that the lane holds of a product
};

__device__ __forceinline__ Lane this_lane() {
  const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
  return {warp, lane / 4, lane % 4, COLUMNS * warp, COLUMNS * warp + 2 * (lane % 4)};
}

// Where element [i, v] of a tile [., Vt] lies: groups of 8 columns change places so that a warp's reads of an operand
// meet different banks. Four neighbours at a multiple of 4 stay neighbours.
__device__ __forceinline__ int at(int i, int v) { return i * Vt + (v ^ (2 * i & 24 & (Vt - 1))); }

template <class T>
struct alignas(2 * sizeof(T)) Two {
  T x, y;
};

template <class T>
__device__ __forceinline__ float2 load_two(const T* p) {
  const Two<T> two = *reinterpret_cast<const Two<T>*>(p);
  return {to_float(two.x), to_float(two.y)};
}

template <class T>
__device__ __forceinline__ void store_two(T* p, float x, float y) {
  *reinterpret_cast<Two<T>*>(p) = {from_float<T>(x), from_float<T>(y)};
}

// ---- decays ---------------------------------------------------------------------------------------------------------

// A log decay of -800 is a full reset already; sums of clamped ones never meet inf - inf. NaN stays NaN.
__device__ __forceinline__ double clamped(float g) { return g < -800.0f ? -800.0 : double(g); }

// sum[i] += sums along `up` (index of the parent, -1 at the end) to the root, in float64: distances double each round.
// All threads together; up is used up. Columns: MOST at most.
template <int MOST>
__device__ __forceinline__ void sum_paths(double* sum, int* up, int columns) {
  constexpr int EACH = (MOST + THREADS - 1) / THREADS;
  for (int reach = 1; reach < columns; reach *= 2) {
    double more[EACH];
    int next[EACH];
#pragma unroll
    for (int e = 0; e < EACH; e++) {
      const int i = threadIdx.x + e * THREADS, parent = i < columns ? up[i] : -1;
      more[e] = parent >= 0 ? sum[parent] : 0.0;
      next[e] = parent >= 0 ? up[parent] : -1;
    }
    __syncthreads();
#pragma unroll
    for (int e = 0; e < EACH; e++) {
      const int i = threadIdx.x + e * THREADS;
      if (i < columns) sum[i] += more[e], up[i] = next[e];
    }
    __syncthreads();
  }
}

// ---- operands -------------------------------------------------------------------------------------------------------

// Takes four numbers rounded to bf16 out of x, which keeps the rest.
__device__ __forceinline__ void take(float (&x)[4], unsigned& first, unsigned& second) {
  first = pack_bf16(x[0], x[1]);
  second = pack_bf16(x[2], x[3]);
  x[0] -= __uint_as_float(first << 16);
  x[1] -= __uint_as_float(first & 0xffff0000u);
  x[2] -= __uint_as_float(second << 16);
  x[3] -= __uint_as_float(second & 0xffff0000u);
}

// Rows i .. i+15 of the warp's columns of a tile as operand B in parts.
template <int PARTS>
__device__ __forceinline__ void split(const float* tile, int i, const Lane& me, unsigned (&b)[PARTS][2]) {
  float x[4];
#pragma unroll
  for (int j = 0; j < 4; j++) x[j] = tile[at(i + 4 * me.quad + j, me.column + me.row)];
#pragma unroll
  for (int part = 0; part < PARTS; part++) take(x, b[part][0], b[part][1]);
}

// Four neighbours along K of a key or query; zeros of one that is not there.
__device__ __forceinline__ uint2 load_four(const bf16* x, int k) {
  return x ? *reinterpret_cast<const uint2*>(x + k) : make_uint2(0, 0);
}
__device__ __forceinline__ float4 load_four(const float* x, int k) {
  return x ? *reinterpret_cast<const float4*>(x + k) : make_float4(0, 0, 0, 0);
}

__device__ __forceinline__ float dot(float4 a, float4 b, float sum) {
  return fmaf(a.w, b.w, fmaf(a.z, b.z, fmaf(a.y, b.y, fmaf(a.x, b.x, sum))));
}

// Sixteen keys or queries: the lane's two by address, null where there is none, and all as operand A [16, K].
template <class T>
struct Rows {
  const T* x[2];
  unsigned a[TENSOR ? K / 16 : 1][4];

  __device__ __forceinline__ void read(const T* x0, const T* x1, const Lane& me) {
    x[0] = x0, x[1] = x1;
    if constexpr (TENSOR) {
#pragma unroll
      for (int s = 0; s < K / 16; s++) {
        const uint2 low = load_four(x0, 16 * s + 4 * me.quad), high = load_four(x1, 16 * s + 4 * me.quad);
        a[s][0] = low.x, a[s][1] = high.x, a[s][2] = low.y, a[s][3] = high.y;
      }
    }
  }
};

// ---- products -------------------------------------------------------------------------------------------------------

// d[n] += X_n Y^T over K for the queries and keys X and 8 keys Y [8, K]: mine is row `row` of Y, y0 and y1 are rows
// 2 * quad and 2 * quad + 1.
template <class T>
__device__ __forceinline__ void scores(float (&d)[2][4], const Rows<T> (&x)[2], const T* mine, const T* y0, const T* y1,
                                       const Lane& me) {
  if constexpr (TENSOR) {
#pragma unroll
    for (int s = 0; s < K / 16; s++) {
      const uint2 four = load_four(mine, 16 * s + 4 * me.quad);
      const unsigned b[2] = {four.x, four.y};
#pragma unroll
      for (int n = 0; n < 2; n++) mma_m16n8k16(d[n], x[n].a[s], b);
    }
  } else {
#pragma unroll 1
    for (int k = 0; k < K; k += 4) {
      const float4 a = load_four(y0, k), b = load_four(y1, k);
#pragma unroll
      for (int n = 0; n < 2; n++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
          const float4 row = load_four(x[n].x[half], k);
          d[n][2 * half] = dot(row, a, d[n][2 * half]);
          d[n][2 * half + 1] = dot(row, b, d[n][2 * half + 1]);
        }
      }
    }
  }
}

// d[n] += X_n S for the queries and keys X [16, K] and a state's tile S [K, Vt].
template <class T>
__device__ __forceinline__ void past(float (&d)[2][4], const Rows<T> (&x)[2], const float* S, const Lane& me) {
  if constexpr (TENSOR) {
#pragma unroll
    for (int s = 0; s < K / 16; s++) {
      unsigned b[2][2];
      split(S, 16 * s, me, b);
#pragma unroll
      for (int n = 0; n < 2; n++) {
        mma_m16n8k16(d[n], x[n].a[s], b[0]);
        mma_m16n8k16(d[n], x[n].a[s], b[1]);
      }
    }
  } else {
#pragma unroll 1
    for (int k = 0; k < K; k += 4) {
      float2 s[4];
#pragma unroll
      for (int j = 0; j < 4; j++) s[j] = *reinterpret_cast<const float2*>(S + at(k + j, me.pair));
#pragma unroll
      for (int n = 0; n < 2; n++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
          const float4 row = load_four(x[n].x[half], k);
          d[n][2 * half] = dot(row, make_float4(s[0].x, s[1].x, s[2].x, s[3].x), d[n][2 * half]);
          d[n][2 * half + 1] = dot(row, make_float4(s[0].y, s[1].y, s[2].y, s[3].y), d[n][2 * half + 1]);
        }
      }
    }
  }
}

// d[n] += W_n U over columns from .. to-1 of W [N, 16, Pitch], which are rows of U [., Vt]; both multiples of 16.
template <int N>
__device__ __forceinline__ void weigh(float (&d)[2][4], const float* W, int Pitch, const float* U, int from, int to,
                                      const Lane& me) {
  for (int i = from; i < to; i += 16) {
    if constexpr (TENSOR) {
      unsigned b[2][2];
      split(U, i, me, b);
#pragma unroll
      for (int n = 0; n < N; n++) {
        unsigned a[2][4];
#pragma unroll
        for (int half = 0; half < 2; half++) {
          const auto w = load<4>(W + (16 * n + me.row + 8 * half) * Pitch + i + 4 * me.quad);
          float rest[4] = {w.v[0], w.v[1], w.v[2], w.v[3]};
          take(rest, a[0][half], a[0][half + 2]);
          take(rest, a[1][half], a[1][half + 2]);
        }
        mma_m16n8k16(d[n], a[1], b[0]);
        mma_m16n8k16(d[n], a[0], b[1]);
        mma_m16n8k16(d[n], a[0], b[0]);
      }
    } else {
#pragma unroll 4
      for (int j = i; j < i + 16; j++) {
        const float2 u = *reinterpret_cast<const float2*>(U + at(j, me.pair));
#pragma unroll
        for (int n = 0; n < N; n++) {
#pragma unroll
          for (int half = 0; half < 2; half++) {
            const float w = W[(16 * n + me.row + 8 * half) * Pitch + j];
            d[n][2 * half] = fmaf(w, u.x, d[n][2 * half]);
            d[n][2 * half + 1] = fmaf(w, u.y, d[n][2 * half + 1]);
          }
        }
      }
    }
  }
}

// A part of a state: [j][2 * e + c] is S[SHARE * row + 2 * j + e, pair + c] of the tile.
using State = float[SHARE / 2][4];

// state += sum over i < columns of key_i u_i^T, U [., Vt] with zeros where there is no key; columns a multiple of 16.
template <class T>
__device__ __forceinline__ void absorb(State& state, const T* const* key, const float* U, int columns, const Lane& me) {
  for (int i = 0; i < columns; i += 16) {
    if constexpr (TENSOR) {
      unsigned b[3][2], x[4][SHARE / 2];
      split(U, i, me, b);
#pragma unroll
      for (int j = 0; j < 4; j++) {
        const T* from = key[i + 4 * me.quad + j];
        Pack<unsigned, SHARE / 2> pack = {};
        if (from) pack = load<SHARE / 2>(reinterpret_cast<const unsigned*>(from + SHARE * me.row));
        memcpy(x[j], &pack, sizeof(pack));
      }
#pragma unroll
      for (int j = 0; j < SHARE / 2; j++) {
        const unsigned a[4] = {(x[0][j] & 0xffffu) | x[1][j] << 16, x[0][j] >> 16 | (x[1][j] & 0xffff0000u),
                               (x[2][j] & 0xffffu) | x[3][j] << 16, x[2][j] >> 16 | (x[3][j] & 0xffff0000u)};
#pragma unroll
        for (int part = 2; part >= 0; part--) mma_m16n8k16(state[j], a, b[part]);
      }
    } else {
      for (int n = i; n < i + 16; n++) {
        if (!key[n]) continue;
        const float2 u = *reinterpret_cast<const float2*>(U + at(n, me.pair));
        const auto x = load<SHARE>(key[n] + SHARE * me.row);
#pragma unroll
        for (int j = 0; j < SHARE; j++) {
          state[j / 2][j % 2 * 2] = fmaf(x.v[j], u.x, state[j / 2][j % 2 * 2]);
          state[j / 2][j % 2 * 2 + 1] = fmaf(x.v[j], u.y, state[j / 2][j % 2 * 2 + 1]);
        }
      }
    }
  }
}
