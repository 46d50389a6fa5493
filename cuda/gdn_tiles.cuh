// Products of a window's rows in the gated delta rule, 16 of them at a time: what the state gives, scores, the triangular
// system. The equations are those of gdn.cu. Who includes this says how large a window is: ROWS.
#pragma once

#include "gdn.cuh"

constexpr int TILES = ROWS / TILE;

using Tokens = float[2][TILES][2][4];            // [queries or keys][16 rows][8 of them]: columns of V by rows, as of mma
using Inputs = bf16[2][KEY_PARTS][ROWS][PITCH];  // queries, keys
using Square = float[TILE][TILE];                // [a][n]: beta_n W of key n with column a, own rows
using Inverse = bf16[3][TILE][TILE];             // T in parts, by columns

// W of a window's rows: of queries, of keys; columns: earlier, own.
struct Weights {
  bf16* first;
  int pitch;  // eight rows lie in different banks

  __device__ __forceinline__ bf16* at(int type, int part, int row, int column) const {
    return first + ((type * PARTS + part) * ROWS + row) * pitch + column;
  }
};

// T, and before it what it is made from.
union Inverted {
  Square A;
  Inverse T;
};

// ---- by columns of V ------------------------------------------------------------------------------------------------

// X += S^T x of some windows. tile: the state's keys, 16 s on in place s % HELD; ready() waits until the next ones are there;
// done(s): the warp has read them, and others may come. MOST: tiles, at most, whose rows are read before they are needed.
template <int HELD = K / 16, int MOST = 2, int WINDOWS, class Ready, class Done>
__device__ __forceinline__ void past(Tokens (&X)[WINDOWS], const float* tile, const Inputs* rows, int tiles, Ready ready,
                                     Done done, const Lane& me) {
  constexpr int ALL = WINDOWS * TILES, AHEAD = ALL < MOST ? ALL : MOST;
  constexpr bool AT_HAND = HELD == K / 16;  // from the first slice on
  Keys8 state[2];
  unsigned x[AHEAD][2][KEY_PARTS][2][2];
  const auto read_state = [&](int s) {
#pragma unroll
    for (int n = 0; n < 2; n++) read_keys(state[n], tile, 2 * (s % HELD) + n, me);
  };
  const auto read_rows = [&](int i, int s) {
    if (i > 0 && i >= tiles) return;
#pragma unroll
    for (int type = 0; type < 2; type++) {
#pragma unroll
      for (int p = 0; p < KEY_PARTS; p++) {
        load_b(x[i % AHEAD][type][p], &rows[i / TILES][type][p][i % TILES * TILE][16 * s], PITCH, me.lane);
      }
    }
  };
  ready();
  read_state(0);
#pragma unroll
  for (int i = 0; i < AHEAD; i++) read_rows(i, 0);
#pragma unroll
  for (int s = 0; s < K / 16; s++) {
    unsigned a[PARTS][4];
    operand(a, state[0], state[1]);
    done(s);
    if (AT_HAND && s + 1 < K / 16) read_state(s + 1);
#pragma unroll
    for (int i = 0; i < ALL; i++) {
      if (i == 0 || i < tiles) {
        for_parts<PARTS, KEY_PARTS>([&](int p, int r) {
#pragma unroll
          for (int type = 0; type < 2; type++) {
#pragma unroll
            for (int n = 0; n < 2; n++) mma_m16n8k16(X[i / TILES][type][i % TILES][n], a[p], x[i % AHEAD][type][r][n]);
          }
        });
      }
      if (i + AHEAD < ALL) read_rows(i + AHEAD, s);
      if (i + AHEAD >= ALL && s + 1 < K / 16) read_rows(i + AHEAD - ALL, s + 1);
    }
    if (!AT_HAND && s + 1 < K / 16) ready(), read_state(s + 1);
  }
}

// X *= e^G; kept(row): that of a row of the window.
template <class Kept>
__device__ __forceinline__ void fade_all(Tokens& X, Kept kept, const Lane& me) {
  float all;
#pragma unroll
  for (int i = 0; i < TILES; i++) {
    if (TILE * i % WARP == 0) all = kept((TILE * i + me.lane) % ROWS);
#pragma unroll
    for (int n = 0; n < 2; n++) {
#pragma unroll
      for (int e = 0; e < 2; e++) {
        const float left = __shfl_sync(ALL_LANES, all, TILE * i % WARP + 8 * n + 2 * me.quad + e);
#pragma unroll
        for (int type = 0; type < 2; type++) X[type][i][n][e] *= left, X[type][i][n][2 + e] *= left;
      }
    }
  }
}

// X += W U for 16 columns of W from `at` on, in the keys from tile `keys` on and the queries from tile `queries` on.
__device__ __forceinline__ void apply(Tokens& X, const Weights& W, const unsigned (&u)[3][4], int keys, int queries,
                                      int tiles, int at, int lane) {
#pragma unroll
  for (int i = 0; i < TILES; i++) {
    if (i >= queries && (i == 0 || i < tiles)) {
      unsigned b[2][PARTS][2][2];
#pragma unroll
      for (int type = 0; type < 2; type++) {
#pragma unroll
        for (int p = 0; p < PARTS; p++) load_b(b[type][p], W.at(type, p, TILE * i, at), W.pitch, lane);
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

// u of 16 tokens, [n][2c + e] that of token 8n + 2 quad + e; zeros where it is not used. from: the first one's, at the lane's
// columns; the next one's is `pitch` further.
__device__ __forceinline__ void read_u(float (&u)[2][4], const float* from, int pitch, unsigned used, const Lane& me) {
  from += 2 * me.quad * pitch, used >>= 2 * me.quad;
#pragma unroll
  for (int n = 0; n < 2; n++) {
#pragma unroll
    for (int e = 0; e < 2; e++) {
      const int i = 8 * n + e;
      const float2 two = used >> i & 1 ? load_two(from + i * pitch) : float2{0.0f, 0.0f};
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

// from: those of the window's first row, at the lane's columns. Zeros where a row is not used.
__device__ __forceinline__ void read_values(Values& v, const Act* from, int pitch, unsigned used, const Lane& me) {
  from += 2 * me.quad * pitch, used >>= 2 * me.quad;
#pragma unroll
  for (int i = 0; i < TILES; i++) {
#pragma unroll
    for (int n = 0; n < 2; n++) {
#pragma unroll
      for (int e = 0; e < 2; e++) {
        const int row = TILE * i + 8 * n + e;
        v[i][n][e] = {};
        if (used >> row & 1) v[i][n][e] = *reinterpret_cast<const Raw*>(from + row * pitch);
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

// u of rows 16j .. 16j+15: U = -T beta (X_k - V), then X += W U of these rows and those below. at: of W, these rows' column.
__device__ __forceinline__ void solve_tile(float (&u)[2][4], Tokens& X, int j, const Inverse& inverse, const float* beta,
                                           const Weights& W, int tiles, int at, const Lane& me) {
  float y[2][4], small[2][4] = {};
  memset(u, 0, sizeof u);
#pragma unroll
  for (int n = 0; n < 2; n++) {
#pragma unroll
    for (int e = 0; e < 2; e++) {
      const float own = beta[TILE * j + 8 * n + 2 * me.quad + e];
      y[n][e] = -own * X[1][j][n][e];
      y[n][2 + e] = -own * X[1][j][n][2 + e];
    }
  }
  unsigned parts[3][4], T[3][2][2];
  operand(parts, y[0], y[1]);
#pragma unroll
  for (int p = 0; p < 3; p++) load_b_by_rows(T[p], &inverse[p][0][0], TILE, me.lane);
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
  apply(X, W, parts, j + 1, j, tiles, at, me.lane);
}

// ---- W and T --------------------------------------------------------------------------------------------------------

// T = (I + A)^-1 of 16 rows, in the place of A. A column is two lanes', each of which writes a half: each row's value, once
// known, is taken out of the rows below. T[n, a] is what y_a leaves in u_n after the rows between have taken their part, so it
// is never above beta_n.
__device__ __forceinline__ void invert(Inverted& m, int lane) {
  float t[TILE];
#pragma unroll
  for (int n = 0; n < TILE; n++) t[n] = n == lane % TILE ? 1.0f : 0.0f;
#pragma unroll
  for (int a = 0; a < TILE - 1; a++) {
    const auto column = load<TILE>(m.A[a]);
#pragma unroll
    for (int n = a + 1; n < TILE; n++) t[n] = fmaf(-column.v[n], t[a], t[n]);
  }
  __syncwarp();
  const bool low = lane < TILE;
  Pack<unsigned, TILE / 4> column[3];
#pragma unroll
  for (int n = 0; n < TILE / 2; n += 2) {
    unsigned part[3];
    split(low ? t[n] : t[n + TILE / 2], low ? t[n + 1] : t[n + 1 + TILE / 2], part);
#pragma unroll
    for (int p = 0; p < 3; p++) column[p].v[n / 2] = part[p];
  }
#pragma unroll
  for (int p = 0; p < 3; p++) store<TILE / 4>(reinterpret_cast<unsigned*>(&m.T[p][lane % TILE][lane / TILE * 8]), column[p]);
}

// Operands of 16 rows' scores with 16 keys, 16 channels of them.
struct Scored {
  unsigned a[2][KEY_PARTS][4], b[KEY_PARTS][2][2];

  __device__ __forceinline__ void read(const Inputs& x, int row, const bf16* keys, int stride, int k, int lane) {
#pragma unroll
    for (int p = 0; p < KEY_PARTS; p++) {
      load_b(b[p], keys + p * stride + k, PITCH, lane);
#pragma unroll
      for (int type = 0; type < 2; type++) ldmatrix_x4(a[type][p], &x[type][p][row + lane % 16][k + lane / 16 * 8]);
    }
  }
};

// A window's rows, and where what is made of their keys' scores with its own rows goes.
struct Window {
  const Inputs& x;
  const float2* G;
  const float* beta;
  Weights W;
  Inverted* T;
};

// W of the 16 rows from `row` on with 16 columns, the first of which is column `at` of W. keys: theirs, parts `stride`
// apart; G: of the columns; seen: bits of those on the path, by row. On the diagonal also A and T.
template <class Seen>
__device__ __forceinline__ void weigh_tile(const Window& w, int row, const bf16* keys, int stride, int at, const float2* G,
                                           bool diagonal, Seen seen, const Lane& me) {
  Scored now, next;
  now.read(w.x, row, keys, stride, 0, me.lane);
  const float beta[2] = {w.beta[row + me.row], w.beta[row + me.row + 8]};
  float decay[2][2][2];  // rows row, row + 8; columns 8n + 2 quad + e
  bool on_path[2][2][2];
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int i = row + me.row + 8 * half;
    const unsigned bits = seen(i) >> 2 * me.quad;
    const float2 own = w.G[i];
#pragma unroll
    for (int n = 0; n < 2; n++) {
      const float4 two = *reinterpret_cast<const float4*>(G + 8 * n + 2 * me.quad);
#pragma unroll
      for (int e = 0; e < 2; e++) {
        on_path[half][n][e] = bits >> (8 * n + e) & 1;
        const float exponent = (own.x - (e ? two.z : two.x)) + (own.y - (e ? two.w : two.y));
        decay[half][n][e] = expf(on_path[half][n][e] ? exponent : -inf());
      }
    }
  }
  float d[2][2][4] = {};  // queries or keys; 8 columns
#pragma unroll (HALF ? K / 16 : 1)
  for (int k = 16; k <= K; k += 16) {
    if (k < K) next.read(w.x, row, keys, stride, k, me.lane);
    for_parts<KEY_PARTS, KEY_PARTS>([&](int p, int r) {
#pragma unroll
      for (int n = 0; n < 2; n++) {
#pragma unroll
        for (int type = 0; type < 2; type++) mma_m16n8k16(d[type][n], now.a[type][p], now.b[r][n]);
      }
    });
    now = next;
  }
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int i = row + me.row + 8 * half;
#pragma unroll
    for (int n = 0; n < 2; n++) {
      const int c = 8 * n + 2 * me.quad;
      float value[2][2];
#pragma unroll
      for (int e = 0; e < 2; e++) {
        const bool strict = on_path[half][n][e] && !(diagonal && c + e == me.row + 8 * half);
        value[0][e] = on_path[half][n][e] ? d[0][n][2 * half + e] * decay[half][n][e] : 0.0f;
        value[1][e] = strict ? d[1][n][2 * half + e] * decay[half][n][e] : 0.0f;
      }
#pragma unroll
      for (int type = 0; type < 2; type++) {
        unsigned part[PARTS];
        split(value[type][0], value[type][1], part);
#pragma unroll
        for (int p = 0; p < PARTS; p++) *reinterpret_cast<unsigned*>(w.W.at(type, p, i, at + c)) = part[p];
      }
      if (diagonal) {
#pragma unroll
        for (int e = 0; e < 2; e++) w.T[row / TILE].A[c + e][me.row + 8 * half] = beta[half] * value[1][e];
      }
    }
  }
  if (diagonal) {
    __syncwarp();
    invert(w.T[row / TILE], me.lane);
  }
}
