// Gated delta rule for every row of a forest: outputs o and factors u from a checkpoint and a ring that are only read.
// Definition: gdn and tree in boleinfer/ops/gdn.py. With G the log decay summed from the checkpoint along the root
// path, the ring a chain before every root, and `before` the ring and all strict ancestors of a row n:
//   u_n = beta_n (v_n - e^{G_n} S^T k_n - sum_{a in before} e^{G_n - G_a} (k_a . k_n) u_a)
//   o_n =               e^{G_n} S^T q_n + sum_{a in before, n} e^{G_n - G_a} (k_a . q_n) u_a
//
// Rows are taken ROWS at a time, a window. Columns are what a window's rows may depend on: the ring and, in a tree, the
// windows before it (`earlier`, Panel of them at a time, filled up to full sixteens), then its own rows. A chain instead
// folds each window into S, which lies in shared memory. For one window:
//   W  = decays * scores of its queries and keys with the columns, T = (I + beta W_k)^-1 of each 16 of its own rows
//   X  = e^G S^T x for its queries and keys
//   16 columns at a time, in order:  U = ring, earlier rows, or T beta (V - X_k) of own rows;  X += W U of later rows
//   o  = X_q
// W and T are shared, 16 x 16 tiles dealt out to the warps; all else is each warp's own, on its 16 columns of V.
// Rows that are not in use count as keys of zero and are not written. A row depends on its request alone. A request
// with a single row takes another way, that of gdn_row.cuh. Forest, state and ring are read before the previous kernel is
// done (after_all_previous in common.cuh).
//
// Parts: S two; u, where later u depend on it, three, else two; W two; T and what it is applied to three.
//
// grid: blocks that stay and take one work after another, Vt columns of V of one head of one request each. While one is
// solved, the state and the rows of the next are under way. block: Warps, at least Vt / 16; see gdn.cuh for who owns what.
// shared: sizeof(Memory), which _shared in gdn.py repeats. S is read once; keys of earlier rows once a window.
//
// sizes: Act=bf16 K=128 V=128 Vt=32 Warps=4 Panel=64 | Act=bf16 K=128 V=128 Vt=128 Warps=8 Panel=16
// sizes: Act=bf16,float K=16 V=16 Vt=16 Warps=4 Panel=16 | Act=bf16,float K=64 V=64 Vt=32 Warps=4 Panel=16
// sizes: Act=float K=128 V=128 Vt=32 Warps=4 Panel=16
// spills: Vt=128 has 128 registers a thread; numbers of the work to come wait outside, once a work
#include "gdn_row.cuh"

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

// ---- W and T --------------------------------------------------------------------------------------------------------

// T = (I + A)^-1 of 16 rows, by the first 16 lanes, a lane a column: each row's value, once known, is taken out of the rows
// below. T[n, a] is what y_a leaves in u_n after the rows between have taken their part, so it is never above beta_n.
__device__ __forceinline__ void invert(Memory& m, int tile, int lane) {
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
      for (int p = 0; p < 3; p++) m.T[tile][p][n][lane] = __ushort_as_bfloat16(part[p] & 0xffffu);
    }
  }
}

// Operands of 16 rows' scores with 16 keys, 16 channels of them.
struct Scored {
  unsigned a[2][KEY_PARTS][4], b[KEY_PARTS][2][2];

  __device__ __forceinline__ void read(const Memory& m, const Window& w, int row, const bf16* keys, int stride, int k,
                                       int lane) {
#pragma unroll
    for (int p = 0; p < KEY_PARTS; p++) {
      load_b(b[p], keys + p * stride + k, PITCH, lane);
#pragma unroll
      for (int type = 0; type < 2; type++) {
        ldmatrix_x4(a[type][p], &m.x[w.buffer][type][p][row + lane % 16][k + lane / 16 * 8]);
      }
    }
  }
};

// W of the 16 rows from `row` on with 16 columns, the first of which is column `at` of W. keys: theirs, parts `stride`
// apart; G: of the columns; seen: bits of those on the path, by row. On the diagonal also A and T.
template <class Seen>
__device__ __forceinline__ void weigh_tile(Memory& m, const Window& w, int row, const bf16* keys, int stride, int at,
                                           const float2* G, bool diagonal, Seen seen, const Lane& me) {
  Scored now, next;
  now.read(m, w, row, keys, stride, 0, me.lane);
  float decay[2][2][2];  // rows row, row + 8; columns 8n + 2 quad + e
  bool on_path[2][2][2];
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int i = row + me.row + 8 * half;
    const unsigned bits = seen(i) >> 2 * me.quad;
    const float2 own = m.G[w.at + i];
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
        for (int p = 0; p < PARTS; p++) *reinterpret_cast<unsigned*>(&m.W[type][p][i][at + c]) = part[p];
      }
      if (diagonal) {
#pragma unroll
        for (int e = 0; e < 2; e++) m.A[row / TILE][c + e][me.row + 8 * half] = m.beta[i] * value[1][e];
      }
    }
  }
  if (diagonal) {
    __syncwarp();
    invert(m, row / TILE, me.lane);
  }
}

// W of the window's rows with `count` earlier columns from c0 on and, where `own`, with its own rows. Diagonals, which take
// longest, come first, and first to warps that own no columns.
__device__ __forceinline__ void weigh(Memory& m, const Window& w, int c0, int count, bool own) {
  const Lane me = this_lane();
  const int tiles = w.tiles(), triangle = own ? tiles * (tiles + 1) / 2 : 0, held = w.held();
  for (int unit = WARPS - 1 - me.warp; unit < triangle + tiles * count / TILE; unit += WARPS) {
    const bool inside = unit < triangle;
    const int other = unit - triangle;
    const int row = TILE * (!inside ? other % tiles : unit < tiles ? unit : 1);
    const int column = TILE * (!inside ? other / tiles : unit < tiles ? unit : 0);  // from c0 on, or inside the window
    const int a = inside ? w.at - CHUNK + column : c0 + column - held;              // in the tree, or before it
    const unsigned ring = a + TILE > w.ring - held ? (1u << max(0, w.ring - held - a)) - 1 : ~0u;
    weigh_tile(
        m, w, row, inside ? m.x[w.buffer][1][0][column] : m.earlier[0][column], (inside ? ROWS : Panel) * PITCH,
        inside ? count + column : column, m.G + (a < 0 ? held + a : CHUNK + a), inside && row == column,
        [&](int i) { return a >= 0 ? m.ancestors[i][a / 32] >> a % 32 : w.used >> i & 1 ? ring : 0u; }, me);
  }
}

// ---- the warp's own columns -----------------------------------------------------------------------------------------

// [queries or keys][16 rows][8 of them]: columns of V by rows, as mma leaves them.
using Tokens = float[2][TILES][2][4];

// X = e^G S^T x
__device__ __forceinline__ void past(Tokens& X, const Memory& m, const Window& w, const Lane& me) {
  const int tiles = w.tiles();
#pragma unroll 1
  for (int s = 0; s < K / 16; s++) {
    Keys8 state[2];
    unsigned a[PARTS][4];
#pragma unroll
    for (int n = 0; n < 2; n++) read_keys(state[n], m.S, 2 * s + n, me);
    operand(a, state[0], state[1]);
#pragma unroll
    for (int i = 0; i < TILES; i++) {
      if (i < tiles) {
        unsigned b[2][KEY_PARTS][2][2];
#pragma unroll
        for (int type = 0; type < 2; type++) {
#pragma unroll
          for (int p = 0; p < KEY_PARTS; p++) load_b(b[type][p], &m.x[w.buffer][type][p][TILE * i][16 * s], PITCH, me.lane);
        }
        for_parts<PARTS, KEY_PARTS>([&](int p, int r) {
#pragma unroll
          for (int type = 0; type < 2; type++) {
#pragma unroll
            for (int n = 0; n < 2; n++) mma_m16n8k16(X[type][i][n], a[p], b[type][r][n]);
          }
        });
      }
    }
  }
#pragma unroll
  for (int i = 0; i < TILES; i++) {
#pragma unroll
    for (int n = 0; n < 2; n++) {
#pragma unroll
      for (int e = 0; e < 2; e++) {
        const float left = i < tiles ? kept(m, w, TILE * i + 8 * n + 2 * me.quad + e) : 0.0f;
#pragma unroll
        for (int type = 0; type < 2; type++) X[type][i][n][e] *= left, X[type][i][n][2 + e] *= left;
      }
    }
  }
}

// X += W U for 16 columns of W from `at` on, in the keys from tile `keys` on and the queries from tile `queries` on.
__device__ __forceinline__ void apply(Tokens& X, const Memory& m, const unsigned (&u)[3][4], int keys, int queries,
                                      int tiles, int at, int lane) {
#pragma unroll
  for (int i = 0; i < TILES; i++) {
    if (i >= queries && i < tiles) {
      unsigned b[2][PARTS][2][2];
#pragma unroll
      for (int type = 0; type < 2; type++) {
#pragma unroll
        for (int p = 0; p < PARTS; p++) load_b(b[type][p], &m.W[type][p][TILE * i][at], WIDTH, lane);
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
__device__ __forceinline__ void fold(Memory& m, const Window& w, bool begins, float (&u)[2][4],
                                     const bf16 (*keys)[MOST][PITCH], int first, const float2* G, const Lane& me) {
  const float2 last = m.G[w.at + w.rows - 1];
  const float scale = begins ? kept(m, w, w.rows - 1) : 1.0f;
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
__device__ __forceinline__ void read_u(float (&u)[2][4], const Memory& m, const Head& head, const Window& w, int c,
                                       const Lane& me) {
  const int a = c - w.held();
  const unsigned used = a >= 0 ? m.used[a / 32] >> a % 32 : w.ring - c < TILE ? (1u << max(0, w.ring - c)) - 1 : ~0u;
  const float* from = a < 0 ? head.ring_u + head.value_at(head.entry + c) : head.u + head.value_at(w.first - w.from + a);
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

// The values of the lane's columns and tokens.
using Values = Two<Act>[TILES][2][2];

__device__ __forceinline__ void read_values(Values& v, const Head& head, const Window& w, const Lane& me) {
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
          v[i][n][e] = *reinterpret_cast<const Two<Act>*>(from);
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
        X[1][i][n][e] -= to_float(v[i][n][e].x);
        X[1][i][n][2 + e] -= to_float(v[i][n][e].y);
      }
    }
  }
}

// u and o of the window's own rows, 16 at a time: U = -T beta (X_k - V), then X += W U of these rows and those below.
__device__ __forceinline__ void solve(Tokens& X, Memory& m, const Head& head, const Window& w, int at,
                                      const Lane& me) {
#pragma unroll
  for (int j = 0; j < TILES; j++) {
    if (j < w.tiles()) {
      float y[2][4], u[2][4] = {}, small[2][4] = {};
#pragma unroll
      for (int n = 0; n < 2; n++) {
#pragma unroll
        for (int e = 0; e < 2; e++) {
          const float beta = m.beta[TILE * j + 8 * n + 2 * me.quad + e];
          y[n][e] = -beta * X[1][j][n][e];
          y[n][2 + e] = -beta * X[1][j][n][2 + e];
        }
      }
      unsigned parts[3][4], T[3][2][2];
      operand(parts, y[0], y[1]);
#pragma unroll
      for (int p = 0; p < 3; p++) load_b(T[p], &m.T[j][p][0][0], TILE + 8, me.lane);
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
      apply(X, m, parts, j + 1, j, w.tiles(), at + TILE * j, me.lane);
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
      if (w.folds()) fold(m, w, j + w.earlier == 0, u, m.x[w.buffer][1], TILE * j, m.G + w.at + TILE * j, me);
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 2) gdn(
    const Act* __restrict__ q,               // [R, Hk, K] aligned 16
    const Act* __restrict__ k,               // [R, Hk, K] aligned 16
    const Act* __restrict__ v,               // [R, Hv, V] aligned 16
    const float* __restrict__ g,             // [R, Hv]
    const float* __restrict__ beta,          // [R, Hv]
    const float* __restrict__ S,             // [Slots, Hv, K, V] aligned 16
    const Act* __restrict__ ring_k,          // [Slots, C, Hk, K] aligned 16
    const float* __restrict__ ring_u,        // [Slots, C, Hv, V] aligned 16
    const float* __restrict__ ring_g,        // [Slots, C, Hv]
    const int* __restrict__ length,          // [Slots]
    const int* __restrict__ slot,            // [B]
    const int* __restrict__ start,           // [B+1]
    const int* __restrict__ chain,           // [B]
    const int* __restrict__ parent,          // [R]
    const int* __restrict__ request,         // [R]
    const unsigned* __restrict__ ancestors,  // [R, 4] aligned 16
    Act* __restrict__ o,                     // [R, Hv, V] aligned 16
    float* u,                                // [R, Hv, V] aligned 16
    int Hk,
    int Hv,
    int C,
    int B)
{
  extern __shared__ __align__(16) char memory[];
  Memory& m = *reinterpret_cast<Memory*>(memory);
  const int units = B * Hv * (V / Vt);
  const auto read_work = [&](int unit) {  // columns of V first, then heads, then requests
    if (unit >= units) return Work{};
    const int b = unit / (V / Vt) / Hv, s = max(slot[b], 0);
    return Work{start[b], start[b + 1] - start[b], chain[b], length[s], s, b, unit / (V / Vt) % Hv, unit % (V / Vt) * Vt};
  };
  const auto fetch_state_of = [&](const Work& work) {
    if (work.rows <= 0) return;
    fetch_state(m.S, S + ((long long)work.slot * Hv + work.h) * K * V + work.column, this_lane());
  };
  const auto head_of = [&](const Work& work) {
    return Head{q, k, v, g, beta, ring_k, ring_u, ring_g, u, o, (long long)work.slot * C, work.h, work.h / (Hv / Hk) * K,
                work.h * V + work.column, Hk, Hv};
  };
  const auto row_of = [&](const Window& w, int lane) { return w.first + min(lane, w.rows - 1); };
  Lead lead;
  // Starts copying what a window reads, all but the state.
  const auto fetch = [&](Window& w, const Head& head) {
    const Lane me = this_lane();
    w.used = m.noted;
    gather_earlier(m, head, w, 0, min(Panel, w.earlier));
    after_previous();
    if (me.warp == 0) gather_ancestors(m, w, ancestors, me.lane), lead.read(head, w, me.lane);
    gather_window(m, head, w);
    cp_async_commit();
  };

  Work work = read_work(blockIdx.x), next;
  fetch_state_of(work);
  bool fetched = false;
  int buffer = 0;
  for (int unit = blockIdx.x; unit < units; unit += gridDim.x, work = next) {
    next = read_work(unit + gridDim.x);
    if (work.rows <= 0) {
      after_previous();
      fetch_state_of(next);
      continue;
    }
    const Head head = head_of(work);
    if (work.rows == 1) {
      const long long key = head.key_at(work.tree), value = head.value_at(work.tree), gate = head.gate_at(work.tree);
      const Row row = {q + key, k + key, v + value, g + gate, beta + gate, m.S, ring_k + head.key_at(head.entry),
                       ring_u + head.value_at(head.entry), ring_g + head.gate_at(head.entry), work.ring,
                       request[work.tree] == work.b, o + value, u + value};
      one_row(row, reinterpret_cast<float*>(&m.x), Hk, Hv, [&] { fetch_state_of(next); });
      __syncthreads();
      continue;
    }
    for (int from = 0; from < work.rows; from += ROWS) {
      Window w(work, from, buffer);
      Lane me = this_lane();
      if (!fetched) {
        if (me.warp == 0) note(m, w, work.b, request[row_of(w, me.lane)], parent[row_of(w, me.lane)], me.lane);
        __syncthreads();
        fetch(w, head);
      }
      w.used = m.noted;
      if (me.warp == 0) {
        if (me.lane == 0) {
          unsigned& word = m.used[from / 32 % (TREE / 32)];
          word = from % 32 ? word | w.used << from % 32 : w.used;
        }
        sum_window(m, lead, w, me.lane);
      }
      if (me.warp == 1 && !from) sum_ring(m, head, w.ring, me.lane);
      cp_async_wait<0>();
      __syncthreads();

      fetched = (BUFFERS > 1 || !w.folds()) && (w.more || next.rows > 1);  // soon
      buffer = (buffer + 1) % BUFFERS;
      Work work_to_come = next;
      if (w.more) work_to_come = work;
      Window to_come(work_to_come, w.more ? from + ROWS : 0, buffer);
      int asked[2];
      if (fetched && me.warp == 0) {
        asked[0] = request[row_of(to_come, me.lane)], asked[1] = parent[row_of(to_come, me.lane)];
      }
      weigh(m, w, 0, min(Panel, w.earlier), w.earlier <= Panel);
      me = this_lane();
      Tokens X = {};
      float u_c[2][4];
      if (me.owner) {
        Values values;
        read_values(values, head, w, me);
        past(X, m, w, me);
        subtract(X, values);
        if (w.earlier) read_u(u_c, m, head, w, 0, me);
      }
      if (fetched && me.warp == 0) note(m, to_come, work_to_come.b, asked[0], asked[1], me.lane);
      for (int c0 = 0;; c0 += Panel) {
        const int count = min(Panel, w.earlier - c0);
        const bool last = c0 + Panel >= w.earlier;
        __syncthreads();
        if (last) {  // what the window to come needs may be overwritten
          if (!w.more) fetch_state_of(next);
          if (fetched) fetch(to_come, head_of(work_to_come));
        }
        me = this_lane();
        if (me.owner) {
          for (int c = 0; c < count; c += TILE) {
            unsigned parts[3][4];
            operand(parts, u_c[0], u_c[1]);
            apply(X, m, parts, 0, 0, w.tiles(), c, me.lane);
            if (w.folds()) fold(m, w, c0 + c == 0, u_c, m.earlier, c, m.G + c0 + c, me);
            if (c0 + c + TILE < w.earlier) read_u(u_c, m, head, w, c0 + c + TILE, me);
          }
          if (last) solve(X, m, head, w, count, me);
        }
        __syncthreads();  // the memory is free again, but for what was asked for
        if (last) break;
        const int more = min(Panel, w.earlier - c0 - Panel);
        gather_earlier(m, head, w, c0 + Panel, more);
        cp_async_commit();
        cp_async_wait<0>();
        __syncthreads();
        weigh(m, w, c0 + Panel, more, c0 + 2 * Panel >= w.earlier);
      }
    }
  }
}
