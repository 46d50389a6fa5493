// A warp's own columns of V in the gated delta rule: what state, ring and earlier rows give to a window's rows, its triangular
// system, and the state behind it. The equations are those of gdn.cu.
#pragma once

#include "gdn_window.cuh"

// [queries or keys][16 rows][8 of them]: columns of V by rows, as mma leaves them.
using Tokens = float[2][TILES][2][4];

// X = e^G S^T x; where there is a state to come, it takes the place of what has been read.
__device__ __forceinline__ void past(Tokens& X, Memory& m, const Step& w, const float* to_come, const Lane& me) {
  const int tiles = w.tiles();
  Keys8 state[2];
  unsigned x[TILES][2][KEY_PARTS][2][2];
  const auto read_state = [&](int s) {
#pragma unroll
    for (int n = 0; n < 2; n++) read_keys(state[n], m.S, 2 * s + n, me);
  };
  const auto read_rows = [&](int i, int s) {
#pragma unroll
    for (int type = 0; type < 2; type++) {
#pragma unroll
      for (int p = 0; p < KEY_PARTS; p++) {
        load_b(x[i][type][p], &m.x[w.window % 2][type][p][TILE * i][16 * s], PITCH, me.lane);
      }
    }
  };
  read_state(0);
#pragma unroll
  for (int i = 0; i < TILES; i++) {
    if (i < tiles) read_rows(i, 0);
  }
#pragma unroll
  for (int s = 0; s < K / 16; s++) {
    unsigned a[PARTS][4];
    operand(a, state[0], state[1]);
    if (s + 1 < K / 16) read_state(s + 1);
    if (to_come) {
      __syncwarp();
      fetch_state(m.S, to_come, s, me);
    }
#pragma unroll
    for (int i = 0; i < TILES; i++) {
      if (i < tiles) {
        for_parts<PARTS, KEY_PARTS>([&](int p, int r) {
#pragma unroll
          for (int type = 0; type < 2; type++) {
#pragma unroll
            for (int n = 0; n < 2; n++) mma_m16n8k16(X[type][i][n], a[p], x[i][type][r][n]);
          }
        });
        if (s + 1 < K / 16) read_rows(i, s + 1);
      }
    }
  }
  const float all = kept(m, w, me.lane % ROWS);
#pragma unroll
  for (int i = 0; i < TILES; i++) {
#pragma unroll
    for (int n = 0; n < 2; n++) {
#pragma unroll
      for (int e = 0; e < 2; e++) {
        const float left = __shfl_sync(ALL_LANES, all, TILE * i + 8 * n + 2 * me.quad + e);
#pragma unroll
        for (int type = 0; type < 2; type++) X[type][i][n][e] *= left, X[type][i][n][2 + e] *= left;
      }
    }
  }
}

// X += W U for 16 columns of W from `at` on, in the keys from tile `keys` on and the queries from tile `queries` on.
__device__ __forceinline__ void apply(Tokens& X, const Memory& m, int stage, const unsigned (&u)[3][4], int keys,
                                      int queries, int tiles, int at, int lane) {
#pragma unroll
  for (int i = 0; i < TILES; i++) {
    if (i >= queries && i < tiles) {
      unsigned b[2][PARTS][2][2];
#pragma unroll
      for (int type = 0; type < 2; type++) {
#pragma unroll
        for (int p = 0; p < PARTS; p++) load_b(b[type][p], &m.W[stage][type][p][TILE * i][at], WIDTH, lane);
      }
      for_parts<3, PARTS>([&](int p, int r) {
#pragma unroll
        for (int type = 1; type >= 0; type--) {
          if (type ? i >= keys : p + r < PARTS) {
#pragma unroll
            for (int n = 0; n < 2; n++) mma_m16n8k16(X[type][i][n], u[p], b[type][r][n]);
          }
        }
      });
    }
  }
}

// S += the share of 16 tokens in the state behind the window; where they come first, S fades to there. u is used up.
template <int MOST>
__device__ __forceinline__ void fold(Memory& m, const Step& w, bool begins, float (&u)[2][4],
                                     const bf16 (*keys)[MOST][PITCH], int first, const float2* G, const Lane& me) {
  const float2 last = m.G[w.head % 2][w.at + w.own - 1];
  const float scale = begins ? kept(m, w, w.own - 1) : 1.0f;
#pragma unroll
  for (int n = 0; n < 2; n++) {
#pragma unroll
    for (int e = 0; e < 2; e++) {
      const float left = fade(last, G[8 * n + 2 * me.quad + e]);
      u[n][e] *= left, u[n][2 + e] *= left;
    }
  }
  unsigned parts[3][4];
  operand(parts, u[0], u[1]);
#pragma unroll 1
  for (int j = 0; j < K / 16; j++) {
    Keys8 s[2];
#pragma unroll
    for (int n = 0; n < 2; n++) {
      read_keys(s[n], m.S, 2 * j + n, me);
#pragma unroll
      for (int e = 0; e < 4; e++) s[n][e] *= scale;
    }
    absorb(s, parts, keys, first, j, me.lane);
#pragma unroll
    for (int n = 0; n < 2; n++) write_keys(m.S, s[n], 2 * j + n, me);
  }
}

// u of 16 earlier columns, c on: [n][2c + e] is that of token 8n + 2 quad + e; zeros where there is none. What is
// read of rows of the tree this lane has written.
__device__ __forceinline__ void read_u(float (&u)[2][4], const Memory& m, const Head& head, const Step& w, int c,
                                       const Lane& me) {
  const int a = c - w.held;
  const unsigned used = a >= 0                ? m.used[w.head & 3][a / 32] >> a % 32
                        : w.ring - c < TILE ? (1u << max(0, w.ring - c)) - 1
                                            : ~0u;
  const float* from = a < 0 ? head.ring_u + head.value_at(head.entry + c) : head.u + head.value_at(w.tree + a);
#pragma unroll
  for (int n = 0; n < 2; n++) {
#pragma unroll
    for (int e = 0; e < 2; e++) {
      const int i = 8 * n + 2 * me.quad + e;
      const float2 two = used >> i & 1 ? load_two(from + i * head.Hv * V + me.pair) : float2{0.0f, 0.0f};
      u[n][e] = two.x, u[n][2 + e] = two.y;
    }
  }
}

// Two values as they come: to take a pair of bf16 apart is to wait for it.
struct alignas(2 * sizeof(Act)) Raw {
  unsigned word[sizeof(Act) / 2];

  __device__ __forceinline__ float2 both() const {
    if constexpr (HALF) return {__uint_as_float(word[0] << 16), __uint_as_float(word[0] & 0xffff0000u)};
    return {__uint_as_float(word[0]), __uint_as_float(word[sizeof(Act) / 2 - 1])};
  }
};

// The values of the lane's columns and tokens.
using Values = Raw[TILES][2][2];

__device__ __forceinline__ void read_values(Values& v, const Head& head, const Step& w, const Lane& me) {
#pragma unroll
  for (int i = 0; i < TILES; i++) {
#pragma unroll
    for (int n = 0; n < 2; n++) {
#pragma unroll
      for (int e = 0; e < 2; e++) {
        const int row = TILE * i + 8 * n + 2 * me.quad + e;
        v[i][n][e] = {};
        if (w.used >> row & 1) {
          const Act* from = head.v + head.value_at(w.first) + row * head.Hv * V + me.pair;
          v[i][n][e] = *reinterpret_cast<const Raw*>(from);
        }
      }
    }
  }
}

// X_k -= V
__device__ __forceinline__ void subtract(Tokens& X, const Values& v) {
#pragma unroll
  for (int i = 0; i < TILES; i++) {
#pragma unroll
    for (int n = 0; n < 2; n++) {
#pragma unroll
      for (int e = 0; e < 2; e++) {
        const float2 two = v[i][n][e].both();
        X[1][i][n][e] -= two.x;
        X[1][i][n][2 + e] -= two.y;
      }
    }
  }
}

// u and o of the window's own rows, 16 at a time: U = -T beta (X_k - V), then X += W U of these rows and those below.
__device__ __forceinline__ void solve(Tokens& X, Memory& m, const Head& head, const Step& w, int number,
                                      const Lane& me) {
#pragma unroll
  for (int j = 0; j < TILES; j++) {
    if (j < w.tiles()) {
      float y[2][4], u[2][4] = {}, small[2][4] = {};
#pragma unroll
      for (int n = 0; n < 2; n++) {
#pragma unroll
        for (int e = 0; e < 2; e++) {
          const float beta = m.beta[w.window % 4][TILE * j + 8 * n + 2 * me.quad + e];
          y[n][e] = -beta * X[1][j][n][e];
          y[n][2 + e] = -beta * X[1][j][n][2 + e];
        }
      }
      unsigned parts[3][4], T[3][2][2];
      operand(parts, y[0], y[1]);
#pragma unroll
      for (int p = 0; p < 3; p++) load_b(T[p], &m.T[number % 2][j][p][0][0], TILE + 8, me.lane);
      for_parts<3, 3>([&](int p, int r) {
#pragma unroll
        for (int n = 0; n < 2; n++) mma_m16n8k16(p + r < 2 ? u[n] : small[n], parts[p], T[r][n]);
      });
#pragma unroll
      for (int n = 0; n < 2; n++) {
#pragma unroll
        for (int e = 0; e < 4; e++) u[n][e] += small[n][e];
      }
      operand(parts, u[0], u[1]);
      apply(X, m, number % 2, parts, j + 1, j, w.tiles(), w.columns + TILE * j, me.lane);
#pragma unroll
      for (int n = 0; n < 2; n++) {
#pragma unroll
        for (int e = 0; e < 2; e++) {
          const int i = TILE * j + 8 * n + 2 * me.quad + e;
          if (w.used >> i & 1) {
            const long long to = head.value_at(w.first) + i * head.Hv * V + me.pair;
            store_two(head.u + to, u[n][e], u[n][2 + e]);
            store_two(head.o + to, X[0][j][n][e], X[0][j][n][2 + e]);
          }
        }
      }
      if (w.folds()) {
        fold(m, w, j + w.earlier == 0, u, m.x[w.window % 2][1], TILE * j, m.G[w.head % 2] + w.at + TILE * j, me);
      }
    }
  }
}


// What a step's columns give to X, in order, and in the window's last step its own rows. u: of the first columns.
__device__ __forceinline__ void finish(Tokens& X, float (&u)[2][4], Memory& m, const Head& head, const Step& w,
                                       int number, const Lane& me) {
#pragma unroll 1
  for (int c = 0; c < w.columns; c += TILE) {
    unsigned parts[3][4];
    operand(parts, u[0], u[1]);
    apply(X, m, number % 2, parts, 0, 0, w.tiles(), c, me.lane);
    if (w.folds()) {
      fold(m, w, w.column + c == 0, u, m.earlier[number % KEY_BUFFERS], c, m.G[w.head % 2] + w.column + c, me);
    }
    if (c + TILE < w.columns) read_u(u, m, head, w, w.column + c + TILE, me);
  }
  if (w.last) solve(X, m, head, w, number, me);
}

// X of a new window, without what its columns will give, and u of the step's first columns.
__device__ __forceinline__ void begin(Tokens& X, float (&u)[2][4], Memory& m, const Head& head, const Step& w,
                                      const float* to_come, const Lane& me) {
  if (w.columns > 0) read_u(u, m, head, w, w.column, me);
  if (w.column == 0) {
    Values values;
    read_values(values, head, w, me);
    memset(&X, 0, sizeof X);
    if (w.from == 0) cp_async_wait<0>(), __syncwarp();
    past(X, m, w, to_come, me);
    subtract(X, values);
  }
}
