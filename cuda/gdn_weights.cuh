// W and T of a window of the gated delta rule: decayed scores with every column, and the inverse of each 16 rows' own part.
// The equations are those of gdn.cu.
#pragma once

#include "gdn_window.cuh"

// W of the window's rows with the step's earlier columns and, in its last step, with its own rows. Diagonals, which take
// longest, come first, the steward last.
__device__ __forceinline__ void weigh(Memory& m, const Step& w, int number, const Lane& me) {
  const int tiles = w.tiles(), triangle = w.last ? tiles * (tiles + 1) / 2 : 0, held = w.held;
  const Window window = {m.x[w.window % 2], m.G[w.head % 2] + w.at, m.beta[w.window % 4], m.weights(number), m.T[number % 2]};
#pragma unroll 1
  for (int unit = WARPS - 1 - me.warp; unit < triangle + tiles * w.columns / TILE; unit += SCORERS) {
    const bool inside = unit < triangle;
    const int other = unit - triangle;
    const int row = TILE * (!inside ? other % tiles : unit < tiles ? unit : 1);
    const int column = TILE * (!inside ? other / tiles : unit < tiles ? unit : 0);  // of the panel, or inside the window
    const int a = inside ? w.at - CHUNK + column : w.column + column - held;        // in the tree, or before it
    const unsigned ring = a + TILE > w.ring - held ? (1u << max(0, w.ring - held - a)) - 1 : ~0u;
    weigh_tile(
        window, row, inside ? m.x[w.window % 2][1][0][column] : m.earlier[number % KEY_BUFFERS][0][column],
        (inside ? ROWS : Panel) * PITCH, inside ? w.columns + column : column,
        m.G[w.head % 2] + (a < 0 ? held + a : CHUNK + a), inside && row == column,
        [&](int i) { return a >= 0 ? m.ancestors[w.window % 2][i][a / 32] >> a % 32 : w.used >> i & 1 ? ring : 0u; }, me);
  }
}
