// A warp's own columns of V in the gated delta rule: what state, ring and earlier rows give to a window's rows, its triangular
// system, and the state behind it. The equations are those of gdn.cu.
#pragma once

#include "gdn_window.cuh"

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

// u of 16 earlier columns, c on. What is read of rows of the tree this lane has written.
__device__ __forceinline__ void read_u(float (&u)[2][4], const Memory& m, const Head& head, const Step& w, int c,
                                       const Lane& me) {
  const int a = c - w.held;
  const unsigned used = a >= 0                ? m.used[w.head & 3][a / 32] >> a % 32
                        : w.ring - c < TILE ? (1u << max(0, w.ring - c)) - 1
                                            : ~0u;
  const float* from = a < 0 ? head.ring_u + head.value_at(head.entry + c) : head.u + head.value_at(w.tree + a);
  read_u(u, from + me.pair, head.Hv * V, used, me);
}

// u and o of the window's own rows, 16 at a time.
__device__ __forceinline__ void solve(Tokens& X, Memory& m, const Head& head, const Step& w, int number,
                                      const Lane& me) {
#pragma unroll
  for (int j = 0; j < TILES; j++) {
    if (j < w.tiles()) {
      float u[2][4];
      solve_tile(u, X, j, m.T[number % 2][j].T, m.beta[w.window % 4], m.weights(number), w.tiles(), w.columns + TILE * j, me);
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
    apply(X, m.weights(number), parts, 0, 0, w.tiles(), c, me.lane);
    if (w.folds()) {
      fold(m, w, w.column + c == 0, u, m.earlier[number % KEY_BUFFERS], c, m.G[w.head % 2] + w.column + c, me);
    }
    if (c + TILE < w.columns) read_u(u, m, head, w, w.column + c + TILE, me);
  }
  if (w.last) solve(X, m, head, w, number, me);
}

// X of a new window, without what its columns will give, and u of the step's first columns.
__device__ __forceinline__ void begin(Tokens (&X)[1], float (&u)[2][4], Memory& m, const Head& head, const Step& w,
                                      const float* to_come, const Lane& me) {
  if (w.columns > 0) read_u(u, m, head, w, w.column, me);
  if (w.column == 0) {
    Values values;
    read_values(values, head.v + head.value_at(w.first) + me.pair, head.Hv * V, w.used, me);
    memset(X, 0, sizeof X);
    if (w.from == 0) cp_async_wait<0>(), __syncwarp();
    const auto refill = [&](int s) {  // with the state to come
      if (!to_come) return;
      __syncwarp();
      fetch_state(m.S, to_come, s, me);
    };
    past(X, m.S, &m.x[w.window % 2], w.tiles(), [] {}, refill, me);
    fade_all(X[0], [&](int row) { return kept(m, w, row); }, me);
    subtract(X[0], values);
  }
}
