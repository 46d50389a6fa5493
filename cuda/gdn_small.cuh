// What a block does with a small tree in the gated delta rule: Vt columns of a value head of a request.
// The equations are those of gdn.cu. A tree has up to Rows rows, in windows of ROWS; a ring up to Ring entries; and there is
// room for Held slices of the state, 16 keys each.
#pragma once

constexpr int ROWS = Rows < 32 ? Rows : 32;
#include "gdn_row.cuh"
#include "gdn_tiles.cuh"

constexpr int STEWARD = WARPS - 1;
constexpr bool SCORERS = WARPS > OWNERS;  // there are warps that own no columns: W and T are theirs to make
constexpr int WEIGHERS = SCORERS ? WARPS - OWNERS : WARPS;
constexpr int SLICES = K / 16, WINDOWS = Rows / ROWS;
static_assert(WINDOWS <= 2, "rows in use are two words");
constexpr int NARROW = Ring + ROWS + 8, WIDE = Ring + Rows + 8;  // pitches of W: of a window before the last, of the last
constexpr bool WHOLE = Held == SLICES;  // the state is there at once

// Front: what is needed before W and T are made, in their place.
template <class Front>
struct Small {
  float S[Held * 16 * Vt];  // see `place`
  Inputs x[WINDOWS];
  bf16 ring_k[KEY_PARTS][Ring][PITCH];
  union {
    Front front;
    struct {
      bf16 W[2 * PARTS * ROWS * ((WINDOWS - 1) * NARROW + WIDE)];
      Inverted T[WINDOWS][TILES];
    };
    RowMemory row;
  };
  float2 G[CHUNK + Rows];             // from the tree's root: ring, then rows
  float2 ring_sum;                    // log decay from the checkpoint to the tree
  float beta[Rows], g;                // g: of the first row
  unsigned ancestors[Rows][WINDOWS];  // and itself

  __device__ __forceinline__ Weights weights(int window) {
    if (window + 1 < WINDOWS) return {W, NARROW};
    return {W + 2 * PARTS * ROWS * (WINDOWS - 1) * NARROW, WIDE};
  }
};

// v or o of the rows, from the block's first column on.
template <class T>
struct Columns {
  T* first;
  int pitch;
};
using In = Columns<const Act>;
using Out = Columns<Act>;

// The request's rows, and pitches.
struct Tree {
  int b, first, rows, tiles;
  int ring, held;  // entries before them, and those in full sixteens
  int Hk, Hv;
  bool path;
  unsigned used[WINDOWS];  // rows that are the request's own

  __device__ __forceinline__ unsigned used_from(int i) const { return (i < WARP ? used[0] : used[WINDOWS - 1]) >> i % WARP; }
  __device__ __forceinline__ bool has(int i) const { return used_from(i) & 1; }
  // Entries of the ring from c on, as bits.
  __device__ __forceinline__ unsigned filled(int c) const { return ring - c < WARP ? (1u << max(0, ring - c)) - 1 : ~0u; }
};

// ---- what there is --------------------------------------------------------------------------------------------------

// A block's value head h of key head `key` of request b, from `column` on. Each warp finds it for itself: what can be asked for
// at once is, a lane each. Behind a shuffle a load cannot be put off to where it is needed.
struct Found {
  int key, h, column, b, first, rows, slot, committed, ring;
  bool path;
  unsigned used[WINDOWS];

  __device__ __forceinline__ Found(const int* start, const int* slots, const int* chain, const int* tokens,
                                   const int* request, int C) {
    const int own = blockIdx.y * gridDim.x + blockIdx.x, lane = threadIdx.x % WARP, what = lane % 8;
    key = blockIdx.y, h = own / (V / Vt), column = own % (V / Vt) * Vt, b = blockIdx.z;
    const int found = (what < 2 ? start + what : what == 2 ? slots : what == 3 ? chain : tokens)[b];
    const auto told = [&](int lane) { return __shfl_sync(ALL_LANES, found, lane); };
    first = told(0), rows = told(1) - first, slot = max(told(2), 0), path = told(3);
    committed = told(4), ring = committed % C;
    int of[WINDOWS];
#pragma unroll
    for (int w = 0; w < WINDOWS; w++) of[w] = request[rows > 0 ? first + min(lane + w * ROWS, rows - 1) : 0];
#pragma unroll
    for (int w = 0; w < WINDOWS; w++) used[w] = __ballot_sync(ALL_LANES, lane + w * ROWS < rows && of[w] == b);
  }

  __device__ __forceinline__ Tree tree(int Hk, int Hv) const {
    Tree tree = {b, first, rows, (rows + TILE - 1) / TILE, ring, (ring + TILE - 1) / TILE * TILE, Hk, Hv, path};
#pragma unroll
    for (int w = 0; w < WINDOWS; w++) tree.used[w] = used[w];
    return tree;
  }
};

// What is remembered of a value head of a request, its first entries at the block's columns.
struct Head {
  const float *S, *ring_u, *ring_g;
  const Act* ring_k;
  int ring;

  __device__ __forceinline__ Head(const Found& found, const float* states, const Act* keys, const float* us,
                                  const float* gs, int Hk, int Hv, int C)
      : ring(found.ring) {
    const long long slot = found.slot, entry = slot * C;
    S = states + (slot * Hv + found.h) * K * V + found.column, ring_k = keys + (entry * Hk + found.key) * K;
    ring_u = us + (entry * Hv + found.h) * V + found.column, ring_g = gs + entry * Hv + found.h;
  }
};

// What the forest says of row `lane` of each window: all rows at once, since who is above is then a lane's to tell.
struct Nodes {
  int parent[WINDOWS];
  unsigned ancestors[WINDOWS][WINDOWS];

  __device__ __forceinline__ void read(const Tree& tree, const int* parents, const unsigned* masks, int lane) {
#pragma unroll
    for (int w = 0; w < WINDOWS; w++) {
      const int row = tree.first + min(lane + w * ROWS, tree.rows - 1);
      parent[w] = parents[row];
#pragma unroll
      for (int word = 0; word <= w; word++) ancestors[w][word] = masks[4ll * row + word];
    }
  }
  // The row's next one up, in the tree; negative where there is none.
  __device__ __forceinline__ int up(const Tree& tree, int w, int lane) const {
    return tree.has(lane + w * ROWS) ? max(parent[w] - tree.first, -1) : -1;
  }
  // Writes down which rows are ancestors of which or these themselves.
  template <class Front>
  __device__ __forceinline__ void note(Small<Front>& m, const Tree& tree, int lane) const {
    if (lane >= ROWS) return;
#pragma unroll
    for (int w = 0; w < WINDOWS; w++) {
      const int row = lane + w * ROWS;
#pragma unroll
      for (int word = 0; word <= w; word++) {
        const unsigned bits = !tree.path ? ancestors[w][word] : word < w ? ~0u : 2 * (1u << lane) - 1;
        m.ancestors[row][word] = tree.has(row) ? bits : 0u;
      }
    }
  }
};

// Starts bringing Vt columns of some rows nearer, 128 bytes at once. By all threads.
template <class T>
__device__ __forceinline__ void prefetch_rows(const T* first, int rows, int pitch) {
  constexpr unsigned EACH = 128 / sizeof(T), LINES = Vt < EACH ? 1 : Vt / EACH;
#pragma unroll 1
  for (unsigned line = threadIdx.x; line < rows * LINES; line += THREADS) {
    prefetch(first + line / LINES * pitch + line % LINES * EACH);
  }
}

// Starts copying rows of a matrix, those whose bit is set in `used`, and fills others up to `count` with zeros. By warps FIRST
// and on. from: the first row, the next one is `pitch` further; LONG: 8 more than a row has.
template <int FIRST, int MOST, int LONG>
__device__ __forceinline__ void copy_rows(Act (&to)[MOST][LONG], int count, const Act* from, int pitch, unsigned used,
                                          const Lane& me) {
  static_assert(HALF && MOST <= WARP, "a bit for each row");
  constexpr unsigned WORDS = LONG / 8 - 1, TOGETHER = (THREADS - WARP * FIRST) / WORDS;
  const unsigned thread = WARP * (me.warp - FIRST) + me.lane, row = thread / WORDS, c = thread % WORDS * 8;
  if (row >= TOGETHER) return;
  from += row * pitch + c;
#pragma unroll
  for (int i = 0; i < MOST; i += TOGETHER) {
    if (row + i < count) cp_async16(&to[row + i][c], from + i * pitch, used >> (row + i) & 1);
  }
}

// The state on its way into shared memory, slice after slice, to each owner the columns that it has.
struct Slices {
  float* to;
  const float* from;
  bool owner;

  __device__ __forceinline__ Slices(float* S, const float* state, const Lane& me) {
    const int column = TILE * me.warp + 4 * me.quad;  // a lane copies four at once
    to = S + place(me.row, column), from = state + me.row * V + column, owner = me.owner;
  }
  // Asks for slices first .. end - 1, a group of copies each; others have as many, empty ones.
  __device__ __forceinline__ void ask(int first, int end) const {
    if (owner) {
#pragma unroll
      for (int slice = first; slice < end; slice++) {
#pragma unroll
        for (int i = 0; i < 16; i += 8) {
          if (slice < SLICES) cp_async16(to + (slice % Held * 16 + i) * Vt, from + (slice * 16 + i) * V, true);
        }
        cp_async_commit();
      }
    } else {
#pragma unroll
      for (int slice = first; slice < end; slice++) cp_async_commit();
    }
  }
  // Waits until a slice is there.
  __device__ __forceinline__ void ready() const {
    cp_async_wait<WHOLE ? 0 : Held - 1>();
    __syncwarp();
  }
  // A slice has been read: asks for the one that comes into its place.
  __device__ __forceinline__ void done(int slice) const {
    if (!WHOLE) __syncwarp(), ask(slice + Held, slice + Held + 1);
  }
};

// ---- by the steward, a lane a row -----------------------------------------------------------------------------------

// Decays and beta of a window's rows, whose log decay is g, and with the first one's decays of the ring, whose entries' are
// ring_g. up: as Nodes says.
template <class Front>
__device__ __forceinline__ void add_up(Small<Front>& m, const Tree& tree, int w, int up, const float (&ring_g)[2], float g,
                                       float beta, int lane) {
  const int row = lane + w * ROWS;
  if (tree.path) up = row - 1;  // of rows that are not in use, too
  double sum = clamped(g), past[2] = {};
  if (lane < ROWS && up >= 0 && up < w * ROWS) sum += double(m.G[CHUNK + up].x) + m.G[CHUNK + up].y;
  if (w == 0) {
#pragma unroll
    for (int e = 0; e < 2; e++) past[e] = lane + WARP * e < tree.ring ? clamped(ring_g[e]) : 0.0;
  }
  add_up_paths(sum, lane < ROWS ? max(up - w * ROWS, -1) : -1, past, lane);
  if (lane < ROWS) m.G[CHUNK + row] = two_floats(sum), m.beta[row] = beta;
  __syncwarp();
  if (w > 0) return;
  if (lane == 0) m.g = g;
  const float2 all = ring_sums(m.G, past, lane);
  if (lane == 0) m.ring_sum = all;
}

// ---- W, T, u and o --------------------------------------------------------------------------------------------------

// W of all rows with themselves and all before them, T of each 16 rows' own. Diagonals, which take longest, come first.
template <class Front>
__device__ __forceinline__ void weigh(Small<Front>& m, const Tree& tree, const Lane& me) {
  const int diagonals = tree.tiles, ring = tree.held / TILE, count = diagonals * (diagonals + 1 + 2 * ring) / 2;
  // Who has a diagonal is the last to have another one.
#pragma unroll 1
  for (int i = me.warp - (WARPS - WEIGHERS); i < max(count, WEIGHERS); i += WEIGHERS) {
    const int unit = i < WEIGHERS ? WEIGHERS - 1 - i : i;
    if (unit >= count) continue;
    const bool diagonal = unit < diagonals;
    int row = 0, column = unit - diagonals;  // in tiles; a row has the ring's columns and those up to its own
    while (!diagonal && column >= ring + row) column -= ring + row++;
    if (diagonal) row += unit, column = ring + row;
    const int window = row / TILES, before = window * ROWS;
    const int at = TILE * column, a = at - tree.held;  // of W; in the tree, or before it
    // The remainder is the window itself, and known to be one.
    const Window w = {m.x[window], m.G + CHUNK + before, m.beta + before, m.weights(window), m.T[window % WINDOWS]};
    weigh_tile(
        w, TILE * (row % TILES), a < 0 ? m.ring_k[0][at] : m.x[a / ROWS][1][0][a % ROWS], (a < 0 ? Ring : ROWS) * PITCH, at,
        m.G + (a < 0 ? at : CHUNK + a), diagonal,
        [&](int i) { return a < 0 ? tree.filled(at) : m.ancestors[before + i][a / WARP] >> a % WARP; }, me);
  }
}

// u of 16 columns of W, c on, at the lane's columns of V. What is read of rows of the tree this lane has written. u: of the
// first row, at the head, as is the ring's.
__device__ __forceinline__ void read_u(float (&past_u)[2][4], const Tree& tree, int c, const float* ring_u, const float* u,
                                       const Lane& me) {
  const int a = c - tree.held, pitch = tree.Hv * V;
  const unsigned used = a < 0 ? tree.filled(c) : tree.used_from(a);
  read_u(past_u, (a < 0 ? ring_u + c * pitch : u + a * pitch) + me.pair, pitch, used, me);
}

// u and o of a window's rows. X: what the state gives; past_u: u of the first 16 columns; out: where o goes.
template <class Front>
__device__ __forceinline__ void solve(Small<Front>& m, const Tree& tree, int window, Tokens& X, float (&past_u)[2][4],
                                      const float* ring_u, float* u, const Out& out, const Lane& me) {
  const int before = window * ROWS, tiles = min(TILES, tree.tiles - window * TILES), columns = tree.held + before;
  const Weights weights = m.weights(window);
#pragma unroll 1
  for (int c = 0; c < columns; c += TILE) {
    unsigned parts[3][4];
    operand(parts, past_u[0], past_u[1]);
    if (c + TILE < columns) read_u(past_u, tree, c + TILE, ring_u, u, me);
    apply(X, weights, parts, 0, 0, tiles, c, me.lane);
  }
  // Tokens of the lane are 2 quad, + 1, + 8, + 9 of each 16.
  const int first = before + 2 * me.quad, pitch = tree.Hv * V;
  const unsigned used = tree.used[window] >> 2 * me.quad;
  float* own_u = u + first * pitch + me.pair;
  Act* own_o = out.first + first * out.pitch + me.pair;
#pragma unroll
  for (int j = 0; j < TILES; j++) {
    if (j >= tiles) continue;
    float own[2][4];
    solve_tile(own, X, j, m.T[window][j].T, m.beta + before, weights, tiles, columns + TILE * j, me);
#pragma unroll
    for (int n = 0; n < 2; n++) {
#pragma unroll
      for (int e = 0; e < 2; e++) {
        const int i = TILE * j + 8 * n + e;
        if (!(used >> i & 1)) continue;
        store_two(own_u + i * pitch, own[n][e], own[n][2 + e]);
        store_two(own_o + i * out.pitch, X[0][j][n][e], X[0][j][n][2 + e]);
      }
    }
  }
}

// The same of a request's only row.
template <class Front>
__device__ __forceinline__ void solve_one(Small<Front>& m, const Tree& tree, const float (&ring_g)[2], const Head& head,
                                          const In& values, float* u, const Out& out, const Lane& me) {
  if (WHOLE) cp_async_wait<0>();
  const Member member;
  const Act *q = m.x[0][0][0][0], *k = m.x[0][1][0][0];
  score_ring(m.row, q, k, tree.ring, [&](int i, int p) {
    return load<PIECE>(m.ring_k[0][i] + threadIdx.x % 8 * PIECE + 8 * PIECE * p);
  });
  if (me.warp == STEWARD) Decays(ring_g, tree.ring).fades(m.row, tree.ring, clamped(m.g));
  __syncthreads();
  RowSums sum;
  sum_state(sum, member, q, k, [&](int e, int j) {
    const int i = (member.group + e) * EACH_KEYS + j;
    return load<4>(WHOLE ? m.S + place(i, member.column) : head.S + i * V + member.column);
  });
  share_sums(m.row, sum, member, tree.ring, [&](int e, int j) {
    return load<4>(head.ring_u + (member.group + e + GROUPS * j) * tree.Hv * V + member.column);
  });
  __syncthreads();
  if (threadIdx.x >= Vt / 4) return;
  float v[4], o[4];
  Pack<float, 4> factor;
#pragma unroll
  for (int c = 0; c < 4; c++) v[c] = to_float(values.first[member.column + c]);
  solve_row(o, factor.v, m.row, v, m.beta[0], tree.ring, member.column);
  store<4>(u + member.column, factor);
#pragma unroll
  for (int c = 0; c < 4; c++) out.first[member.column + c] = from_float<Act>(o[c]);
}

// u and o of all rows but a single one. u: of the first row, at the head.
template <class Front>
__device__ __forceinline__ void solve_tree(Small<Front>& m, const Tree& tree, const Head& head, const Slices& slices,
                                           const In& values, float* u, const Out& out, const Lane& me) {
  Values v;
  const auto read = [&](int w) {
    read_values(v, values.first + w * ROWS * values.pitch + me.pair, values.pitch, tree.used[w], me);
  };
  if (!SCORERS || !me.owner) weigh(m, tree, me);
  Tokens X[WINDOWS] = {};
  float past_u[2][4];
  if (me.owner) {
    if (SCORERS) read(0);
    read_u(past_u, tree, 0, head.ring_u, u, me);
    past<Held, Blocks < 3 ? 2 : 1>(
        X, m.S, m.x, tree.tiles, [&] { slices.ready(); }, [&](int slice) { slices.done(slice); }, me);
  }
#pragma unroll
  for (int w = 0; w < WINDOWS; w++) {
    if (w * ROWS >= tree.rows) break;
    if (me.owner && (w > 0 || !SCORERS)) read(w);  // others have no registers for it before
    if (w > 0 && me.owner) read_u(past_u, tree, 0, head.ring_u, u, me);
    if (me.owner) {
      fade_all(X[w], [&](int row) { return kept(m.G[CHUNK + w * ROWS + row], m.ring_sum); }, me);
      subtract(X[w], v);
    }
    if (w == 0) __syncthreads();
    if (me.owner) solve(m, tree, w, X[w], past_u, head.ring_u, u, out, me);
  }
}
