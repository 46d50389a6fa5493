// What the kernels of the gated delta rule share: operands in bf16 parts, keys in shared memory, a head's state in
// registers, sums of decays.
//
// Products are made by mma with columns of V as the rows of its result and tokens, or keys' channels, as its columns:
//   S^T x: A = S^T [V, K], B = x^T [K, tokens]      (T y)^T: A = y^T [V, tokens], B = T^T [tokens, tokens]
// so that what one product gives, in registers, is an operand of the next. A warp owns 16 columns of V. Lane 4 * row + quad
// has columns `pair` and pair + 1 of them, which are rows `row` and row + 8 of mma's.
// A float32 operand is a sum of bf16 parts: up to 2^-17 with two parts, up to its own rounding with three. q and k are
// one part with Act = bf16, and three with Act = float.
#pragma once

#include "mma.cuh"

constexpr bool HALF = sizeof(Act) == 2;
constexpr int KEY_PARTS = HALF ? 1 : 3;  // of q and k
constexpr int PARTS = HALF ? 2 : 3;      // of what is float32, where less than its own rounding is enough
constexpr int TILE = 16;                 // columns of V of a warp, and tokens that are taken at once
constexpr int OWNERS = Vt / TILE;        // warps that own columns
constexpr int WARPS = Warps, THREADS = WARP * WARPS;
constexpr int CHUNK = 64;                // the largest ring
constexpr int TREE = 128;                // rows of a tree, at most
constexpr int PITCH = K + 8;             // of keys in shared memory: eight rows lie in different banks

struct Lane {
  int warp, lane, row, quad;
  int pair;    // the first of two columns of the block's Vt
  bool owner;  // of columns
};

// Each stage asks anew: the compiler would keep all addresses that follow from a lane in registers, through all loops.
__device__ __forceinline__ Lane this_lane() {
  const int warp = __shfl_sync(ALL_LANES, threadIdx.x / WARP, 0);  // known to be uniform
  int lane = threadIdx.x % WARP;
#ifndef EMULATED
  asm volatile("" : "+r"(lane));
  __builtin_assume(0 <= lane && lane < WARP && 0 <= warp && warp < WARPS);  // quotients are then shifts
#endif
  return {warp, lane, lane / 4, lane % 4, TILE * warp + 2 * (lane / 4), warp < OWNERS};
}

template <class T>
struct alignas(2 * sizeof(T)) Two {
  T x, y;
};

template <class T>
__device__ __forceinline__ float2 load_two(const T* p) {
  const Two<T> two = *reinterpret_cast<const Two<T>*>(p);
  return {to_float(two.x), to_float(two.y)};
}

// As one number: the compiler stores the members of a struct one by one.
template <class T>
__device__ __forceinline__ void store_two(T* p, float x, float y) {
  if constexpr (sizeof(T) == 2) {
    *reinterpret_cast<unsigned*>(p) = pack_bf16(x, y);
  } else {
    const unsigned long long high = __float_as_uint(y);
    *reinterpret_cast<unsigned long long*>(p) = high << 32 | __float_as_uint(x);
  }
}

// ---- decays ---------------------------------------------------------------------------------------------------------

// A log decay of -800 is a full reset already; sums of clamped ones never meet inf - inf. NaN stays NaN.
__device__ __forceinline__ double clamped(float g) { return g < -800.0f ? -800.0 : double(g); }

// A sum of log decays as a float and what it lacks.
__device__ __forceinline__ float2 two_floats(double sum) {
  const float high = float(sum);
  return {high, float(sum - high)};
}

// e^{later - earlier}
__device__ __forceinline__ float fade(float2 later, float2 earlier) {
  return expf((later.x - earlier.x) + (later.y - earlier.y));
}

// e^{G + what is before the tree}
__device__ __forceinline__ float kept(float2 G, float2 ring) { return expf((G.x + ring.x) + (G.y + ring.y)); }

// Log decays of row `lane`, and of entries lane and lane + 32 of a ring, become sums: of the row and those above it, the next
// of which is `up`, -1 where there is none; of the entry and those before it in its half. Distances double each round.
__device__ __forceinline__ void add_up_paths(double& sum, int up, double (&chain)[2], int lane) {
#pragma unroll
  for (int reach = 1; reach < WARP; reach *= 2) {
    const double more = __shfl_sync(ALL_LANES, sum, max(up, 0));
    const int next = __shfl_sync(ALL_LANES, up, max(up, 0));
    if (up >= 0) sum += more, up = next;
#pragma unroll
    for (int e = 0; e < 2; e++) {
      const double before = __shfl_up_sync(ALL_LANES, chain[e], reach);
      if (lane >= reach) chain[e] += before;
    }
  }
}

// G of the ring's entries, which counts from the ring's end. Returns that of the whole ring.
__device__ __forceinline__ float2 ring_sums(float2* G, double (&chain)[2], int lane) {
  chain[1] += __shfl_sync(ALL_LANES, chain[0], WARP - 1);
  const double all = __shfl_sync(ALL_LANES, chain[1], WARP - 1);
#pragma unroll
  for (int e = 0; e < 2; e++) G[lane + WARP * e] = two_floats(chain[e] - all);
  return two_floats(all);
}

// ---- operands -------------------------------------------------------------------------------------------------------

// x and y as sums of pairs of bf16, the largest first.
template <int P>
__device__ __forceinline__ void split(float x, float y, unsigned (&part)[P]) {
#pragma unroll
  for (int p = 0; p < P; p++) {
    part[p] = pack_bf16(x, y);
    x -= __uint_as_float(part[p] << 16);
    y -= __uint_as_float(part[p] & 0xffff0000u);
  }
}

// Two results side by side, [16, 8] each, as operand A [16, 16] in parts.
template <int P>
__device__ __forceinline__ void operand(unsigned (&a)[P][4], const float (&left)[4], const float (&right)[4]) {
#pragma unroll
  for (int j = 0; j < 4; j++) {
    const float* pair = (j < 2 ? left : right) + j % 2 * 2;
    unsigned part[P];
    split(pair[0], pair[1], part);
#pragma unroll
    for (int p = 0; p < P; p++) a[p][j] = part[p];
  }
}

// Rows of a matrix M in shared memory as operand B = M^T [16, 16]: b[n] are rows 8n .. 8n+7, columns 0 .. 15.
__device__ __forceinline__ void load_b(unsigned (&b)[2][2], const bf16* M, int pitch, int lane) {
  unsigned r[4];
  ldmatrix_x4(r, M + (lane % 8 + lane / 16 * 8) * pitch + lane / 8 % 2 * 8);
  b[0][0] = r[0], b[0][1] = r[1], b[1][0] = r[2], b[1][1] = r[3];
}

// Rows 0 .. 15 of M as operand B = M [16, 16]: b[n] are columns 8n .. 8n+7.
__device__ __forceinline__ void load_b_by_rows(unsigned (&b)[2][2], const bf16* M, int pitch, int lane) {
  unsigned r[4];
  ldmatrix_x4_trans(r, M + lane % 16 * pitch + lane / 16 * 8);
  b[0][0] = r[0], b[0][1] = r[1], b[1][0] = r[2], b[1][1] = r[3];
}

// f(p, r) for the products of parts p and r that count, the smallest first.
template <int PA, int PB, class F>
__device__ __forceinline__ void for_parts(F f) {
  constexpr int MOST = PA > PB ? PA : PB;
#pragma unroll
  for (int sum = MOST - 1; sum >= 0; sum--) {
#pragma unroll
    for (int p = 0; p < PA; p++) {
      if (sum - p >= 0 && sum - p < PB) f(p, sum - p);
    }
  }
}

// ---- keys in shared memory ------------------------------------------------------------------------------------------

// to[part][i] = from(i), or zeros where that is null, for i < count, by warps FIRST and on; `any` is some address that can be
// read.
template <int FIRST = 0, int MOST, class From>
__device__ __forceinline__ void gather(bf16 (*to)[MOST][PITCH], int count, const Act* any, const Lane& me, From from) {
#pragma unroll 1
  for (unsigned word = WARP * (me.warp - FIRST) + me.lane; word < count * (K / 8); word += THREADS - WARP * FIRST) {
    const int i = word / (K / 8), k = word % (K / 8) * 8;
    const Act* src = from(i);
    if constexpr (HALF) {
      cp_async16(&to[0][i][k], src ? src + k : any, src);
    } else {
      Pack<Act, 8> x = {};
      if (src) x = load<8>(src + k);
      Pack<unsigned, 4> part[KEY_PARTS];
#pragma unroll
      for (int j = 0; j < 4; j++) {
        unsigned two[KEY_PARTS];
        split(to_float(x.v[2 * j]), to_float(x.v[2 * j + 1]), two);
#pragma unroll
        for (int p = 0; p < KEY_PARTS; p++) part[p].v[j] = two[p];
      }
#pragma unroll
      for (int p = 0; p < KEY_PARTS; p++) store<4>(reinterpret_cast<unsigned*>(&to[p][i][k]), part[p]);
    }
  }
}

// ---- the state ------------------------------------------------------------------------------------------------------

// Where element [i, v] of a state's tile [K, Vt] in shared memory lies: groups of 8 columns change places so that the
// reads of a warp meet different banks. Four neighbours at a multiple of 4 stay neighbours.
__device__ __forceinline__ int place(int i, int v) { return i * Vt + (v ^ (4 * i & 24 & (Vt - 1))); }

// Starts copying the warp's columns of a state, of 16 keys, 16 s on, or of all. S: from the tile's first column on, rows V
// apart.
__device__ __forceinline__ void fetch_state(float* tile, const float* S, int s, const Lane& me) {
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int i = 16 * s + 8 * half, v = TILE * me.warp + 4 * me.quad;
    cp_async16(tile + i * Vt + place(me.row, v), S + i * V + (me.row * V + v), true);
  }
}

__device__ __forceinline__ void fetch_state(float* tile, const float* S, const Lane& me) {
#pragma unroll 2
  for (int s = 0; s < K / 16; s++) fetch_state(tile, S, s, me);
}

// The warp's columns of 8 keys of a state, as S^T [16, 8]: [2c + e] is S[8j + 2 quad + e, pair + c].
using Keys8 = float[4];

__device__ __forceinline__ void read_keys(Keys8& s, const float* tile, int j, const Lane& me) {
#pragma unroll
  for (int e = 0; e < 2; e++) {
    const float2 two = load_two(tile + 8 * j * Vt + place(2 * me.quad + e, me.pair));
    s[e] = two.x, s[2 + e] = two.y;
  }
}

__device__ __forceinline__ void write_keys(float* tile, const Keys8& s, int j, const Lane& me) {
#pragma unroll
  for (int e = 0; e < 2; e++) store_two(tile + 8 * j * Vt + place(2 * me.quad + e, me.pair), s[e], s[2 + e]);
}

// s[n] += the part of 16 keys, 16 j on, in sum over 16 tokens i of k_i u_i^T; u: faded, as operand A in parts.
template <int MOST>
__device__ __forceinline__ void absorb(Keys8 (&s)[2], const unsigned (&u)[3][4], const bf16 (*keys)[MOST][PITCH],
                                       int first, int j, int lane) {
  unsigned b[KEY_PARTS][2][2];
#pragma unroll
  for (int p = 0; p < KEY_PARTS; p++) load_b_by_rows(b[p], &keys[p][first][16 * j], PITCH, lane);
  for_parts<3, KEY_PARTS>([&](int p, int r) {
#pragma unroll
    for (int n = 0; n < 2; n++) mma_m16n8k16(s[n], u[p], b[r][n]);
  });
}
