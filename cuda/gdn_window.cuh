// A window of rows of the gated delta rule in shared memory: where a block keeps it, and how rows, keys, decays and ancestors
// get there. The names are those of gdn.cu.
#pragma once

#include "gdn.cuh"

constexpr int ROWS = HALF ? 32 : 16, TILES = ROWS / TILE;
constexpr int BUFFERS = Vt > 32 ? 1 : 2;  // for rows; with one, rows behind a window that is folded have to wait
constexpr int WIDTH = Panel + ROWS + 8;  // of W: eight rows lie in different banks

// What a block works on: some columns of V of one head of one request.
struct Work {
  int tree, rows, path;  // first row, how many, whether they are a chain
  int ring;              // entries
  int slot, b, h, column;
};

struct Memory {
  float S[K * Vt];                         // see `place`
  bf16 x[BUFFERS][2][KEY_PARTS][ROWS][PITCH];  // queries, keys
  bf16 earlier[KEY_PARTS][Panel][PITCH];   // keys
  bf16 W[2][PARTS][ROWS][WIDTH];           // of queries, of keys; columns: earlier, own
  bf16 T[TILES][3][TILE][TILE + 8];
  float A[TILES][TILE][TILE];              // [a][n]: beta_n W of key n with column a, own rows
  float2 G[CHUNK + TREE];                  // from the tree's root: ring, then the tree's rows or the window's
  unsigned ancestors[ROWS][TREE / 32];     // ancestors and itself
  unsigned used[TREE / 32];                // rows of the tree that are its own
  float beta[ROWS];
  int above[ROWS];                         // parents in the tree, of the window to come
  float2 ring_sum;                         // log decay from the checkpoint to the tree
  unsigned noted;                          // which rows of the window to come are the request's own
};

// A window: rows first .. first+rows-1 of the forest, row `from` of the tree on.
struct Window {
  int first, rows, from;
  int ring, earlier;  // columns: ring entries; earlier ones in full sixteens, the ring's first
  int at;             // of its first row in Memory::G
  unsigned used;      // rows that are the request's own
  int buffer;         // of its rows
  bool path, more;    // a chain; not the last of its tree

  __device__ __forceinline__ Window(const Work& work, int from, int buffer)
      : from(from), buffer(buffer % BUFFERS), path(work.path) {
    first = work.tree + from;
    rows = min(ROWS, work.rows - from);
    ring = path && from ? 0 : work.ring;
    earlier = held() + (path ? 0 : from);
    at = CHUNK + (path ? 0 : from);
    more = from + ROWS < work.rows;
  }
  __device__ __forceinline__ int held() const { return (ring + TILE - 1) / TILE * TILE; }
  __device__ __forceinline__ int tiles() const { return (rows + TILE - 1) / TILE; }
  __device__ __forceinline__ bool folds() const { return path && more; }
};

// Where a head's rows and ring entries are.
struct Head {
  const Act *q, *k, *v;
  const float *g, *beta;
  const Act* ring_k;
  const float *ring_u, *ring_g;
  float* u;
  Act* o;
  long long entry;  // the first of the request's ring
  int h, key, column, Hk, Hv;  // key: first channel of the key head; column: first of the block's columns of V
  __device__ __forceinline__ long long key_at(long long row) const { return row * Hk * K + key; }
  __device__ __forceinline__ long long value_at(long long row) const { return row * Hv * V + column; }
  __device__ __forceinline__ long long gate_at(long long row) const { return row * Hv + h; }
};

// ---- gathering ------------------------------------------------------------------------------------------------------

// What a window's decays are made from, asked for ahead; by one warp, a lane a row.
struct Lead {
  float g, beta;

  __device__ __forceinline__ void read(const Head& head, const Window& w, int lane) {
    const bool used = w.used >> lane & 1;
    const long long row = head.gate_at(w.first + (used ? lane : 0));
    g = used ? head.g[row] : 0.0f;
    beta = used ? head.beta[row] : 0.0f;
  }
};

// G of the ring, a chain, from its end; by one warp.
__device__ __forceinline__ void sum_ring(Memory& m, const Head& head, int ring, int lane) {
  double sum[2];
#pragma unroll
  for (int e = 0; e < 2; e++) {
    const int i = lane + WARP * e;
    sum[e] = i < ring ? clamped(head.ring_g[head.gate_at(head.entry + i)]) : 0.0;
  }
#pragma unroll 1
  for (int reach = 1; reach < WARP; reach *= 2) {
#pragma unroll
    for (int e = 0; e < 2; e++) {
      const double more = __shfl_up_sync(ALL_LANES, sum[e], reach);
      if (lane >= reach) sum[e] += more;
    }
  }
  sum[1] += __shfl_sync(ALL_LANES, sum[0], WARP - 1);
  const double all = __shfl_sync(ALL_LANES, sum[1], WARP - 1);
#pragma unroll
  for (int e = 0; e < 2; e++) m.G[lane + WARP * e] = two_floats(sum[e] - all);
  if (lane == 0) m.ring_sum = two_floats(all);
}

// G and beta of a window's rows; by one warp, a lane a row. Distances to the root double each round.
__device__ __forceinline__ void sum_window(Memory& m, const Lead& lead, const Window& w, int lane) {
  double sum = clamped(lead.g);
  const int parent = lane < ROWS ? m.above[lane] : -1;
  int up = parent - w.from;
  if (up < 0 && parent >= 0) sum += double(m.G[CHUNK + parent].x) + m.G[CHUNK + parent].y;
#pragma unroll 1
  while (__any_sync(ALL_LANES, up >= 0)) {
    const double more = __shfl_sync(ALL_LANES, sum, max(up, 0));
    const int next = __shfl_sync(ALL_LANES, up, max(up, 0));
    if (up >= 0) sum += more, up = next;
  }
  if (lane < ROWS) {
    m.G[w.at + lane] = two_floats(sum);
    m.beta[lane] = lead.beta;
  }
}

// e^{G + what is before the tree}
__device__ __forceinline__ float kept(const Memory& m, const Window& w, int row) {
  const float2 G = m.G[w.at + row];
  return w.path && w.from ? expf(G.x + G.y) : expf((G.x + m.ring_sum.x) + (G.y + m.ring_sum.y));
}

// Notes which rows of a window are the request's own, and parents in the tree, in a chain also of rows that are not in
// use; by one warp, a lane a row, of which it gets request and parent in the forest.
__device__ __forceinline__ void note(Memory& m, const Window& w, int b, int request, int parent, int lane) {
  const unsigned used = __ballot_sync(ALL_LANES, lane < w.rows && request == b);
  const int tree = w.first - w.from;
  if (lane == 0) m.noted = used;
  if (lane < ROWS) m.above[lane] = w.path ? (lane ? w.from + lane - 1 : -1) : max(parent, tree - 1) - tree;
}

// Starts copying which rows are ancestors of a window's rows or these themselves.
__device__ __forceinline__ void gather_ancestors(Memory& m, const Window& w, const unsigned* ancestors, int lane) {
  if (lane >= ROWS) return;
  const bool used = w.used >> lane & 1;
  if (w.path) {
    store<4>(m.ancestors[lane], Pack<unsigned, 4>{{used ? 2 * (1u << lane) - 1 : 0}});
  } else {
    cp_async16(m.ancestors[lane], ancestors + (long long)(w.first + (used ? lane : 0)) * (TREE / 32), used);
  }
}

// Keys of earlier columns c0 .. c0+count-1.
__device__ __forceinline__ void gather_earlier(Memory& m, const Head& head, const Window& w, int c0, int count) {
  const int held = w.held(), tree = w.first - w.from;
  gather(m.earlier, count, head.k, this_lane(), [&](int i) -> const Act* {
    const int c = c0 + i, a = c - held;
    if (a < 0) return c < w.ring ? head.ring_k + head.key_at(head.entry + c) : nullptr;
    return m.used[a / 32] >> a % 32 & 1 ? head.k + head.key_at(tree + a) : nullptr;
  });
}

// Queries and keys of a window's rows, in full sixteens.
__device__ __forceinline__ void gather_window(Memory& m, const Head& head, const Window& w) {
  const Lane me = this_lane();
#pragma unroll
  for (int type = 0; type < 2; type++) {
    const Act* x = type ? head.k : head.q;
    gather(m.x[w.buffer][type], w.tiles() * TILE, x, me, [&](int i) -> const Act* {
      return w.used >> i & 1 ? x + head.key_at(w.first + i) : nullptr;
    });
  }
}
