// What a block does with a small tree in the gated delta rule: a value head of a request.
// The equations are those of gdn.cu. A tree has up to Rows rows, in windows of ROWS; a ring up to Ring entries; and there is room
// for Held slices of the state, 16 keys each.
#pragma once

constexpr int Vt = V, ROWS = Rows < 32 ? Rows : 32, WIDTH = Ring + Rows + 8;
#include "gdn_row.cuh"
#include "gdn_tiles.cuh"

constexpr int STEWARD = WARPS - 1, CARRIER = WARPS - 2;
constexpr bool SCORERS = WARPS > OWNERS;  // there are warps that own no columns: W and T are theirs to make
constexpr int WEIGHERS = SCORERS ? WARPS - OWNERS : WARPS;
constexpr int SLICES = K / 16, WINDOWS = Rows / ROWS;
constexpr int BUFFERS = SCORERS ? WINDOWS : 1;  // of W and T, so that the next window's are made beside a solution
static_assert(WINDOWS <= 2, "rows in use are two words");
constexpr bool WHOLE = Held == SLICES;  // the state is there at once

// Front: what is needed before W and T are made, in their place.
template <class Front>
struct Small {
  float S[Held * 16 * V];  // see `place`
  Inputs x[WINDOWS];
  Act v[Rows][V + 8];  // values, then o
  bf16 ring_k[KEY_PARTS][Ring][PITCH];
  union {
    Front front;
    struct {
      Weights weights[BUFFERS];
      Inverse T[BUFFERS][TILES];
      Square A[TILES];
    };
    RowMemory row;
  };
  float2 G[CHUNK + Rows];             // from the tree's root: ring, then rows
  float2 ring_sum;                    // log decay from the checkpoint to the tree
  float beta[Rows], g;                // g: of the first row
  unsigned ancestors[Rows][WINDOWS];  // and itself
};

// What is remembered of a value head of a request, its first entries.
struct Head {
  const float *S, *ring_u, *ring_g;
  const Act* ring_k;
  int ring;
};

// The request's rows, and pitches.
struct Tree {
  int b, first, rows, tiles;
  int ring, held;  // entries before them, and those in full sixteens
  int Hk, Hv;
  bool path;
  unsigned used[WINDOWS];  // rows that are the request's own

  __device__ __forceinline__ unsigned used_from(int i) const { return (i < WARP ? used[0] : used[WINDOWS - 1]) >> i % WARP; }
  __device__ __forceinline__ bool has(int i) const { return used_from(i) & 1; }
  // Entries of the ring among the 16 from c on, as bits.
  __device__ __forceinline__ unsigned filled(int c) const { return ring - c < TILE ? (1u << max(0, ring - c)) - 1 : ~0u; }
};

// ---- what there is --------------------------------------------------------------------------------------------------

// A block's value head h of key head `key` of request b, and what `Ahead` requests later comes to the same head. Each warp
// finds it for itself: what can be asked for at once is, a lane each.
struct Found {
  int key, h, b, first, rows, slot, ring, slot_later, ring_later;
  bool path, fetches;  // there is a later one

  __device__ __forceinline__ Found(const int* start, const int* slots, const int* chain, const int* length, int B,
                                   int Ahead) {
    key = blockIdx.y, h = key * gridDim.x + blockIdx.x, b = blockIdx.z;
    const int lane = threadIdx.x % WARP, later = min(b + Ahead, B - 1), what = lane % 4;
    const int* from = what < 2 ? start + what : what == 2 ? slots : chain;
    const int found = from[lane % 8 < 4 ? b : later];
    const auto told = [&](int lane) { return __shfl_sync(ALL_LANES, found, lane); };
    first = told(0), rows = told(1) - first, slot = max(told(2), 0), path = told(3);
    slot_later = max(told(6), 0), fetches = b + Ahead == later && told(5) > told(4);
    const int lengths = length[lane % 2 ? slot_later : slot];
    ring = __shfl_sync(ALL_LANES, lengths, 0), ring_later = __shfl_sync(ALL_LANES, lengths, 1);
  }

  __device__ __forceinline__ Tree tree(const int* request, int Hk, int Hv) const {
    Tree tree = {b, first, rows, (rows + TILE - 1) / TILE, ring, (ring + TILE - 1) / TILE * TILE, Hk, Hv, path};
#pragma unroll
    for (int w = 0; w < WINDOWS; w++) {
      const int row = threadIdx.x % WARP + w * ROWS;
      tree.used[w] = __ballot_sync(ALL_LANES, row < rows && request[first + min(row, rows - 1)] == b);
    }
    return tree;
  }
};

// What is remembered of all, as the kernels have it.
struct Remembered {
  const float* S;
  const Act* ring_k;
  const float *ring_u, *ring_g;
  int Hk, Hv, C;

  __device__ __forceinline__ Head of(long long slot, int key, int h, int ring) const {
    const long long entry = slot * C;
    return {S + (slot * Hv + h) * K * V, ring_u + (entry * Hv + h) * V, ring_g + entry * Hv + h,
            ring_k + (entry * Hk + key) * K, ring};
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

// Starts bringing `bytes` at p, both multiples of 16, from memory into L2.
__device__ __forceinline__ void prefetch_run(const void* p, int bytes) {
#if !defined(EMULATED) && __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(__cvta_generic_to_global(p)), "r"(bytes) : "memory");
#endif
}

// The same of all that is remembered of a head. By one warp.
__device__ __forceinline__ void prefetch_head(const Head& head, int Hk, int Hv) {
  const int lane = threadIdx.x % WARP;
  if (lane == 0) prefetch_run(head.S, K * V * sizeof(float));
#pragma unroll 1
  for (int i = lane; i < head.ring; i += WARP) {
    prefetch_run(head.ring_u + i * Hv * V, V * sizeof(float));
    prefetch_run(head.ring_k + i * Hk * K, K * sizeof(Act));
  }
}

// Starts bringing the ring's u nearer. By all threads.
__device__ __forceinline__ void prefetch_u(const Head& head, int Hv) {
#pragma unroll 1
  for (unsigned line = threadIdx.x; line < head.ring * (V / 32); line += THREADS) {
    prefetch(head.ring_u + line / (V / 32) * Hv * V + line % (V / 32) * 32);
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
        for (int i = 0; i < 16 * V; i += 8 * V) {
          if (slice < SLICES) cp_async16(to + slice % Held * 16 * V + i, from + slice * 16 * V + i, true);
        }
        cp_async_commit();
      }
    } else {
#pragma unroll
      for (int slice = first; slice < end; slice++) cp_async_commit();
    }
  }
  // Waits until a slice is there; those before it have been read, and others may come into their place.
  __device__ __forceinline__ void ready(int slice) const {
    if (WHOLE && slice > 0) return;
    if (slice > 0) __syncwarp(), ask(slice - 1 + Held, slice + Held);
    cp_async_wait<WHOLE ? 0 : Held - 1>();
    __syncwarp();
  }
};

// ---- by the steward, a lane a row -----------------------------------------------------------------------------------

// Decays and beta of a window's rows, whose log decay is g, and with the first one's decays of the ring, whose entries' are ring_g.
// up: as Nodes says.
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

// W of a window's rows with themselves and all before them, T of their own. Diagonals, which take longest, come first.
template <class Front>
__device__ __forceinline__ void weigh(Small<Front>& m, const Tree& tree, int window, const Lane& me) {
  const int before = window * ROWS, tiles = min(TILES, tree.tiles - window * TILES), triangle = tiles * (tiles + 1) / 2;
  const Window w = {m.x[window], m.G + CHUNK + before, m.beta + before, m.weights[window % BUFFERS], m.A, m.T[window % BUFFERS]};
  const int count = triangle + tiles * (tree.held + before) / TILE;
  // Who has a diagonal is the last to have another one.
#pragma unroll 1
  for (int i = me.warp - (WARPS - WEIGHERS); i < max(count, WEIGHERS); i += WEIGHERS) {
    const int unit = i < WEIGHERS ? WEIGHERS - 1 - i : i;
    if (unit >= count) continue;
    const bool inside = unit < triangle;
    const int other = unit - triangle;
    const int row = !inside ? other % tiles : unit < tiles ? unit : 1;
    const int column = inside ? tree.held + before + TILE * (unit < tiles ? unit : 0) : TILE * (other / tiles);  // of W
    const int a = column - tree.held;  // in the tree, or before it
    weigh_tile(
        w, TILE * row, a < 0 ? m.ring_k[0][column] : m.x[a / ROWS][1][0][a % ROWS], (a < 0 ? Ring : ROWS) * PITCH, column,
        m.G + (a < 0 ? column : CHUNK + a), inside && unit < tiles,
        [&](int i) { return a < 0 ? tree.filled(column) : m.ancestors[before + i][a / WARP] >> a % WARP; }, me);
  }
}

// u of 16 columns of W, c on, at the lane's columns of V. What is read of rows of the tree this lane has written. u: of the first row,
// at the head, as is the ring's.
__device__ __forceinline__ void read_u(float (&past_u)[2][4], const Tree& tree, int c, const float* ring_u, const float* u,
                                       const Lane& me) {
  const int a = c - tree.held, pitch = tree.Hv * V;
  const unsigned used = a < 0 ? tree.filled(c) : tree.used_from(a);
  read_u(past_u, (a < 0 ? ring_u + c * pitch : u + a * pitch) + me.pair, pitch, used, me);
}

// u and o of a window's rows, o in the place of v. X: what the state gives; past_u: u of the first 16 columns.
template <class Front>
__device__ __forceinline__ void solve(Small<Front>& m, const Tree& tree, int window, Tokens& X, float (&past_u)[2][4],
                                      const float* ring_u, float* u, const Lane& me) {
  const int before = window * ROWS, tiles = min(TILES, tree.tiles - window * TILES), columns = tree.held + before;
  const Weights& weights = m.weights[window % BUFFERS];
#pragma unroll 1
  for (int c = 0; c < columns; c += TILE) {
    unsigned parts[3][4];
    operand(parts, past_u[0], past_u[1]);
    if (c + TILE < columns) read_u(past_u, tree, c + TILE, ring_u, u, me);
    apply(X, weights, parts, 0, 0, tiles, c, me.lane);
  }
#pragma unroll
  for (int j = 0; j < TILES; j++) {
    if (j >= tiles) continue;
    float own[2][4];
    solve_tile(own, X, j, m.T[window % BUFFERS][j], m.beta + before, weights, tiles, columns + TILE * j, me);
#pragma unroll
    for (int n = 0; n < 2; n++) {
#pragma unroll
      for (int e = 0; e < 2; e++) {
        const int i = before + TILE * j + 8 * n + 2 * me.quad + e;
        if (!tree.has(i)) continue;
        store_two(u + i * tree.Hv * V + me.pair, own[n][e], own[n][2 + e]);
        store_two(m.v[i] + me.pair, X[0][j][n][e], X[0][j][n][2 + e]);
      }
    }
  }
}

// The same of a request's only row.
template <class Front>
__device__ __forceinline__ void solve_one(Small<Front>& m, const Tree& tree, const float (&ring_g)[2], const Head& head, float* u,
                                          const Lane& me) {
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
  if (threadIdx.x >= V / 4) return;
  float v[4], o[4];
  Pack<float, 4> factor;
#pragma unroll
  for (int c = 0; c < 4; c++) v[c] = to_float(m.v[0][member.column + c]);
  solve_row(o, factor.v, m.row, v, m.beta[0], tree.ring, member.column);
  store<4>(u + member.column, factor);
#pragma unroll
  for (int c = 0; c < 4; c++) m.v[0][member.column + c] = from_float<Act>(o[c]);
}

// u and o of all rows but a single one, o in the place of v; behind it a barrier has to follow. u: of the first row, at the head.
template <class Front>
__device__ __forceinline__ void solve_tree(Small<Front>& m, const Tree& tree, const Head& head, const Slices& slices, float* u,
                                           const Lane& me) {
  if (!SCORERS || !me.owner) weigh(m, tree, 0, me);
  Tokens X[WINDOWS] = {};
  float past_u[2][4];
  if (me.owner) {
    read_u(past_u, tree, 0, head.ring_u, u, me);
    past<Held>(X, m.S, m.x, tree.tiles, nullptr, [&](int slice) { slices.ready(slice); }, me);
#pragma unroll
    for (int w = 0; w < WINDOWS; w++) {
      Values v;
      read_values(v, m.v[w * ROWS] + me.pair, V + 8, [](int) { return true; }, me);
      fade_all(X[w], [&](int row) { return kept(m.G[CHUNK + w * ROWS + row], m.ring_sum); }, me);
      subtract(X[w], v);
    }
  }
#pragma unroll
  for (int w = 0; w < WINDOWS; w++) {
    if (w * ROWS >= tree.rows) break;
    if (w > 0 && !SCORERS) {
      __syncthreads();
      weigh(m, tree, w, me);
    }
    __syncthreads();
    if (me.owner) {
      if (w > 0) read_u(past_u, tree, 0, head.ring_u, u, me);
      solve(m, tree, w, X[w], past_u, head.ring_u, u, me);
    } else if (w + 1 < WINDOWS && (w + 1) * ROWS < tree.rows) {
      weigh(m, tree, w + 1, me);
    }
  }
}
