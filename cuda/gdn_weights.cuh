// W and T of a window of the gated delta rule: decayed scores with every column, and the inverse of each 16 rows' own part.
// The equations are those of gdn.cu.
#pragma once

#include "gdn_window.cuh"

// T = (I + A)^-1 of 16 rows, by the first 16 lanes, a lane a column: each row's value, once known, is taken out of the rows
// below. T[n, a] is what y_a leaves in u_n after the rows between have taken their part, so it is never above beta_n.
__device__ __forceinline__ void invert(Memory& m, int stage, int tile, int lane) {
  if (lane < TILE) {
    float t[TILE];
#pragma unroll
    for (int n = 0; n < TILE; n++) t[n] = n == lane ? 1.0f : 0.0f;
#pragma unroll
    for (int a = 0; a < TILE - 1; a++) {
      const auto column = load<TILE>(m.A[tile][a]);
#pragma unroll
      for (int n = a + 1; n < TILE; n++) t[n] = fmaf(-column.v[n], t[a], t[n]);
    }
#pragma unroll
    for (int n = 0; n < TILE; n++) {
      unsigned part[3];
      split(t[n], 0.0f, part);
#pragma unroll
      for (int p = 0; p < 3; p++) m.T[stage][tile][p][n][lane] = __ushort_as_bfloat16(part[p] & 0xffffu);
    }
  }
}

// Operands of 16 rows' scores with 16 keys, 16 channels of them.
struct Scored {
  unsigned a[2][KEY_PARTS][4], b[KEY_PARTS][2][2];

  __device__ __forceinline__ void read(const Memory& m, const Step& w, int row, const bf16* keys, int stride, int k,
                                       int lane) {
#pragma unroll
    for (int p = 0; p < KEY_PARTS; p++) {
      load_b(b[p], keys + p * stride + k, PITCH, lane);
#pragma unroll
      for (int type = 0; type < 2; type++) {
        ldmatrix_x4(a[type][p], &m.x[w.window % 2][type][p][row + lane % 16][k + lane / 16 * 8]);
      }
    }
  }
};

// W of the 16 rows from `row` on with 16 columns, the first of which is column `at` of W. keys: theirs, parts `stride`
// apart; G: of the columns; seen: bits of those on the path, by row. On the diagonal also A and T.
template <class Seen>
__device__ __forceinline__ void weigh_tile(Memory& m, const Step& w, int row, const bf16* keys, int stride, int at,
                                           const float2* G, bool diagonal, int stage, Seen seen, const Lane& me) {
  Scored now, next;
  now.read(m, w, row, keys, stride, 0, me.lane);
  const float beta[2] = {m.beta[w.window % 4][row + me.row], m.beta[w.window % 4][row + me.row + 8]};
  float decay[2][2][2];  // rows row, row + 8; columns 8n + 2 quad + e
  bool on_path[2][2][2];
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int i = row + me.row + 8 * half;
    const unsigned bits = seen(i) >> 2 * me.quad;
    const float2 own = m.G[w.head % 2][w.at + i];
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
    if (k < K) next.read(m, w, row, keys, stride, k, me.lane);
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
        for (int p = 0; p < PARTS; p++) *reinterpret_cast<unsigned*>(&m.W[stage][type][p][i][at + c]) = part[p];
      }
      if (diagonal) {
#pragma unroll
        for (int e = 0; e < 2; e++) m.A[row / TILE][c + e][me.row + 8 * half] = beta[half] * value[1][e];
      }
    }
  }
  if (diagonal) {
    __syncwarp();
    invert(m, stage, row / TILE, me.lane);
  }
}

// W of the window's rows with the step's earlier columns and, in its last step, with its own rows. Diagonals, which take
// longest, come first, the steward last.
__device__ __forceinline__ void weigh(Memory& m, const Step& w, int number, const Lane& me) {
  const int tiles = w.tiles(), triangle = w.last ? tiles * (tiles + 1) / 2 : 0, held = w.held;
#pragma unroll 1
  for (int unit = WARPS - 1 - me.warp; unit < triangle + tiles * w.columns / TILE; unit += SCORERS) {
    const bool inside = unit < triangle;
    const int other = unit - triangle;
    const int row = TILE * (!inside ? other % tiles : unit < tiles ? unit : 1);
    const int column = TILE * (!inside ? other / tiles : unit < tiles ? unit : 0);  // of the panel, or inside the window
    const int a = inside ? w.at - CHUNK + column : w.column + column - held;        // in the tree, or before it
    const unsigned ring = a + TILE > w.ring - held ? (1u << max(0, w.ring - held - a)) - 1 : ~0u;
    weigh_tile(
        m, w, row, inside ? m.x[w.window % 2][1][0][column] : m.earlier[number % KEY_BUFFERS][0][column],
        (inside ? ROWS : Panel) * PITCH, inside ? w.columns + column : column,
        m.G[w.head % 2] + (a < 0 ? held + a : CHUNK + a), inside && row == column, number % 2,
        [&](int i) { return a >= 0 ? m.ancestors[w.window % 2][i][a / 32] >> a % 32 : w.used >> i & 1 ? ring : 0u; }, me);
  }
}
