// What a block of the gated delta rule has in shared memory, the steps that its work is cut into, and how rows, keys, decays
// and ancestors get there. The names are those of gdn.cu.
#pragma once

#include "gdn.cuh"

constexpr int ROWS = HALF ? 32 : 16;
constexpr int WIDTH = Panel + ROWS + 8;  // eight rows of W lie in different banks

#include "gdn_tiles.cuh"

constexpr int SCORERS = WARPS - OWNERS;    // warps that own no columns
constexpr int CARRIER = OWNERS + 1;        // the first warp that copies keys: all scorers but the steward
constexpr int KEY_BUFFERS = HALF ? 2 : 1;  // of keys of earlier columns

// A panel of earlier columns of one window of one head, for the block's columns of V. A head without a window, which has less
// than two rows, is a step as well.
struct alignas(16) Step {
  int tree, rows, path;     // the request's first row, how many, whether they are a chain; rows < 0: nothing is left
  int ring;                 // entries
  int slot, b, h, key, value;  // key: the key head's first channel; value: the first column of V
  int head, window;         // how many heads and windows the block had before
  int first, from, own;     // the window's first row in the forest and in the tree, how many it has; own = 0: no window
  int held, earlier;        // columns in full sixteens: of the ring, of all before the window
  int column, columns;      // the panel of these
  int at;                   // of the first row in Memory::G
  unsigned used;            // rows that are the request's own
  bool more, last;          // not the last window of its tree; the last panel

  // The window that begins at row `from` of the tree, and its panel at a column.
  __device__ __forceinline__ void set(int begin, int panel) {
    from = begin, first = tree + from, column = panel;
    own = rows > 1 ? min(ROWS, rows - from) : 0;
    if (folding() && from) ring = 0;
    held = (ring + TILE - 1) / TILE * TILE;
    earlier = held + (folding() ? 0 : from);
    columns = min(Panel, earlier - column);
    at = CHUNK + from % TREE;
    more = from + ROWS < rows;
    last = column + Panel >= earlier;
  }
  __device__ __forceinline__ int tiles() const { return (own + TILE - 1) / TILE; }
  __device__ __forceinline__ bool opens() const { return own && column == 0; }
  __device__ __forceinline__ bool folding() const { return path && rows > CHUNK; }  // a long chain's windows into the state
  __device__ __forceinline__ bool folds() const { return own && folding() && more; }
};

struct Memory {
  float S[K * Vt];                                     // see `place`
  Inputs x[2];                                         // by windows, as are ancestors and beta
  bf16 earlier[KEY_BUFFERS][KEY_PARTS][Panel][PITCH];  // keys; by steps, as are W and T
  unsigned ancestors[2][ROWS][TREE / 32];              // ancestors and itself
  float beta[4][ROWS];
  float2 G[2][CHUNK + TREE];                           // from the tree's root: ring, then the tree's rows; by heads
  float2 ring_sum[2];                                  // log decay from the checkpoint to the tree; by heads
  Step steps[4];
  unsigned used[4][TREE / 32];                         // rows of the tree that are its own; by heads
  bf16 W[2][2 * PARTS * ROWS * WIDTH];
  Inverted T[2][TILES];

  __device__ __forceinline__ Weights weights(int number) { return {W[number % 2], WIDTH}; }
};

// Where a head's rows and ring entries are.
struct Head {
  const Act *q, *k, *v;
  const float *g, *beta;
  const Act* ring_k;
  const float *ring_u, *ring_g;
  float* u;
  Act* o;
  long long entry;           // the first of the request's ring
  int h, key, value, Hk, Hv;  // key: first channel of the key head; value: first of the block's columns of V
  __device__ __forceinline__ long long key_at(long long row) const { return row * Hk * K + key; }
  __device__ __forceinline__ long long value_at(long long row) const { return row * Hv * V + value; }
  __device__ __forceinline__ long long gate_at(long long row) const { return row * Hv + h; }
};

// ---- by the scorers -------------------------------------------------------------------------------------------------

// Starts copying the keys of step number n's earlier columns, and brings the ring's u among them nearer.
__device__ __forceinline__ void gather_earlier(Memory& m, const Head& head, const Step& w, int n, const Lane& me) {
  constexpr int LINES = (Vt + 31) / 32;  // of 128 bytes, in the block's columns
  const int thread = WARP * (me.warp - CARRIER) + me.lane;
  for (int line = thread; line < (min(w.column + Panel, w.ring) - w.column) * LINES; line += THREADS - WARP * CARRIER) {
    prefetch(head.ring_u + head.value_at(head.entry + w.column + line / LINES) + line % LINES * 32);
  }
  gather<CARRIER>(m.earlier[n % KEY_BUFFERS], w.columns, head.k, me, [&](int i) -> const Act* {
    const int c = w.column + i, a = c - w.held;
    if (a < 0) return c < w.ring ? head.ring_k + head.key_at(head.entry + c) : nullptr;
    return m.used[w.head & 3][a / 32] >> a % 32 & 1 ? head.k + head.key_at(w.tree + a) : nullptr;
  });
}

// Starts copying queries and keys of a window's rows, in full sixteens.
__device__ __forceinline__ void gather_window(Memory& m, const Head& head, const Step& w, const Lane& me) {
#pragma unroll
  for (int type = 0; type < 2; type++) {
    const Act* x = type ? head.k : head.q;
    gather<CARRIER>(m.x[w.window % 2][type], w.tiles() * TILE, x, me, [&](int i) -> const Act* {
      return w.used >> i & 1 ? x + head.key_at(w.first + i) : nullptr;
    });
  }
}

// ---- by the steward, a lane a row -----------------------------------------------------------------------------------

// Starts copying which rows are ancestors of a window's rows or these themselves.
__device__ __forceinline__ void gather_ancestors(Memory& m, const Step& w, const unsigned* ancestors, int lane) {
  if (lane >= ROWS) return;
  unsigned* to = m.ancestors[w.window % 2][lane];
  const bool used = w.used >> lane & 1;
  if (w.path) {
    const int row = w.from % TREE + lane;
    Pack<unsigned, 4> bits;
#pragma unroll
    for (int n = 0; n < 4; n++) bits.v[n] = !used || n > row / 32 ? 0u : n < row / 32 ? ~0u : 2 * (1u << row % 32) - 1;
    store<4>(to, bits);
  } else {
    cp_async16(to, ancestors + (long long)(w.first + (used ? lane : 0)) * (TREE / 32), used);
  }
}

// Notes which rows of a new window are the request's own. Returns parents in the tree, in a chain also of rows that are not
// in use.
__device__ __forceinline__ int note(Memory& m, Step& w, const int* request, const int* parent, int lane) {
  const int row = w.first + min(lane, w.own - 1), asked = request[row], up = parent[row];
  w.used = __ballot_sync(ALL_LANES, lane < w.own && asked == w.b);
  if (lane == 0) {
    unsigned& word = m.used[w.head & 3][w.from % TREE / 32];
    word = w.from % 32 ? word | w.used << w.from % 32 : w.used;
  }
  if (w.folding() && lane == 0) return -1;
  return w.path ? w.from + lane - 1 : max(up, w.tree - 1) - w.tree;
}

// What a window's decays are made from: log decays and beta of its rows, and of a new head those of its ring.
struct Gates {
  float g, beta, ring[2];

  __device__ __forceinline__ void read(const Head& head, const Step& w, int lane) {
    const bool used = w.used >> lane & 1;
    const long long row = head.gate_at(w.first + (used ? lane : 0));
    g = used ? head.g[row] : 0.0f;
    beta = used ? head.beta[row] : 0.0f;
#pragma unroll
    for (int e = 0; e < 2; e++) {
      const int i = lane + WARP * e;
      ring[e] = !w.from && i < w.ring ? head.ring_g[head.gate_at(head.entry + i)] : 0.0f;
    }
  }

  // G and beta of the window's rows and G of the ring, which is a chain and counts from its end. parent: in the tree, -1 where
  // there is none.
  __device__ __forceinline__ void add_up(Memory& m, int parent, const Step& w, int lane) const {
    float2* G = m.G[w.head % 2];
    double sum = clamped(g), chain[2] = {clamped(ring[0]), clamped(ring[1])};
    int up = lane < ROWS ? parent - w.from : -1;
    if (up < 0 && parent >= 0 && lane < ROWS) sum += double(G[CHUNK + parent].x) + G[CHUNK + parent].y;
    add_up_paths(sum, up, chain, lane);
    if (lane < ROWS) {
      G[w.at + lane] = two_floats(sum);
      m.beta[w.window % 4][lane] = beta;
    }
    if (w.from == 0) {
      const float2 all = ring_sums(G, chain, lane);
      if (lane == 0) m.ring_sum[w.head % 2] = all;
    }
  }
};

// e^{G + what is before the tree} of a row of the window
__device__ __forceinline__ float kept(const Memory& m, const Step& w, int row) {
  const float2 G = m.G[w.head % 2][w.at + row], ring = m.ring_sum[w.head % 2];
  const bool begun = w.folding() && w.from;  // the state has what was before
  return kept(G, begun ? float2{} : ring);
}
