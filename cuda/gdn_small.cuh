// What a block does with a small tree in the gated delta rule: a value head of a request, all of whose rows are one window.
// The equations are those of gdn.cu. Who includes this says how large a tree is, ROWS, and a ring, Ring, at most, and for how many
// slices of the state, 16 keys each, there is room: Held.
#pragma once

#include "gdn_row.cuh"
#include "gdn_tiles.cuh"

constexpr int STEWARD = WARPS - 1, CARRIER = WARPS - 2;
constexpr int WEIGHERS = WARPS > OWNERS ? WARPS - OWNERS : WARPS;  // warps that make W and T
constexpr int SLICES = K / 16;
constexpr bool WHOLE = Held == SLICES;  // the state is there at once

// Front: what is needed before W and T are made, in their place.
template <class Front>
struct Small {
  float S[Held * 16 * V];  // see `place`
  Inputs x;
  Act v[ROWS][V + 8];  // values, then o
  bf16 ring_k[KEY_PARTS][Ring][PITCH];
  union {
    Front front;
    struct {
      Weights weights;
      Inverse T[TILES];
      Square A[TILES];
    };
    RowMemory row;
  };
  float2 G[CHUNK + ROWS];    // from the tree's root: ring, then rows
  float2 ring_sum;           // log decay from the checkpoint to the tree
  float beta[ROWS], g;       // g: of the first row
  unsigned ancestors[ROWS];  // and itself
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
  unsigned used;  // rows that are the request's own

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
    const int lane = threadIdx.x % WARP;
    const bool is = lane < rows && request[first + min(lane, rows - 1)] == b;
    return {b, first, rows, (rows + TILE - 1) / TILE, ring, (ring + TILE - 1) / TILE * TILE, Hk, Hv, path,
            __ballot_sync(ALL_LANES, is)};
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

// What the forest says of row `lane` of the tree: all rows at once, since the next one up is then a lane's to tell.
struct Node {
  int parent;
  unsigned ancestors;

  __device__ __forceinline__ void read(const Tree& tree, const int* parents, const unsigned* masks, int lane) {
    const int row = tree.first + min(lane, tree.rows - 1);
    parent = parents[row], ancestors = masks[4ll * row];
  }
  // The lane of the next row up, negative where there is none.
  __device__ __forceinline__ int up(const Tree& tree, int lane) const {
    return tree.used >> lane & 1 ? max(parent - tree.first, -1) : -1;
  }
  __device__ __forceinline__ unsigned mask(const Tree& tree, int lane) const {
    return !(tree.used >> lane & 1) ? 0u : tree.path ? 2 * (1u << lane) - 1 : ancestors;
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

// Decays and beta of the rows, whose log decay is g, and decays of the ring, whose entries' are ring_g. up: as Node says, in a
// chain also of rows that are not in use.
template <class Front>
__device__ __forceinline__ void add_up(Small<Front>& m, const Tree& tree, int up, const float (&ring_g)[2], float g, float beta,
                                       int lane) {
  double sum = clamped(g), past[2];
#pragma unroll
  for (int e = 0; e < 2; e++) past[e] = lane + WARP * e < tree.ring ? clamped(ring_g[e]) : 0.0;
  add_up_paths(sum, lane < ROWS ? (tree.path ? lane - 1 : up) : -1, past, lane);
  if (lane < ROWS) m.G[CHUNK + lane] = two_floats(sum), m.beta[lane] = beta;
  if (lane == 0) m.g = g;
  const float2 all = ring_sums(m.G, past, lane);
  if (lane == 0) m.ring_sum = all;
}

// ---- W, T, u and o --------------------------------------------------------------------------------------------------

// W of the rows with themselves and the ring, T of their own. Diagonals, which take longest, come first.
template <class Front>
__device__ __forceinline__ void weigh(Small<Front>& m, const Tree& tree, const Lane& me) {
  const Window w = {m.x, m.G + CHUNK, m.beta, m.weights, m.A, m.T};
  const int triangle = tree.tiles * (tree.tiles + 1) / 2;
#pragma unroll 1
  for (int unit = STEWARD - me.warp; unit < triangle + tree.tiles * tree.held / TILE; unit += WEIGHERS) {
    const bool own = unit < triangle;
    const int other = unit - triangle;
    const int row = !own ? other % tree.tiles : unit < tree.tiles ? unit : 1;
    const int column = !own ? other / tree.tiles : unit < tree.tiles ? unit : 0, c = TILE * column;
    weigh_tile(
        w, TILE * row, own ? m.x[1][0][c] : m.ring_k[0][c], (own ? ROWS : Ring) * PITCH, own ? tree.held + c : c,
        m.G + (own ? CHUNK + c : c), own && row == column,
        [&](int i) { return own ? m.ancestors[i] >> c : tree.filled(c); }, me);
  }
}

// u of the ring's 16 entries from c on, at the lane's columns. ring_u: at the head
__device__ __forceinline__ void read_ring(float (&past_u)[2][4], const Tree& tree, int c, const float* ring_u,
                                          const Lane& me) {
  read_u(past_u, ring_u + c * tree.Hv * V + me.pair, tree.Hv * V, tree.filled(c), me);
}

// u and o of the rows, o in the place of v. X: what the state gives; past_u: u of the ring's first 16 entries; u: of the first
// row, at the head.
template <class Front>
__device__ __forceinline__ void solve(Small<Front>& m, const Tree& tree, Tokens& X, float (&past_u)[2][4],
                                      const float* ring_u, float* u, const Lane& me) {
#pragma unroll 1
  for (int c = 0; c < tree.held; c += TILE) {
    unsigned parts[3][4];
    operand(parts, past_u[0], past_u[1]);
    if (c + TILE < tree.held) read_ring(past_u, tree, c + TILE, ring_u, me);
    apply(X, m.weights, parts, 0, 0, tree.tiles, c, me.lane);
  }
#pragma unroll
  for (int j = 0; j < TILES; j++) {
    if (j >= tree.tiles) continue;
    float own[2][4];
    solve_tile(own, X, j, m.T[j], m.beta, m.weights, tree.tiles, tree.held + TILE * j, me);
#pragma unroll
    for (int n = 0; n < 2; n++) {
#pragma unroll
      for (int e = 0; e < 2; e++) {
        const int i = TILE * j + 8 * n + 2 * me.quad + e;
        if (!(tree.used >> i & 1)) continue;
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
  const Act *q = m.x[0][0][0], *k = m.x[1][0][0];
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
  if (WEIGHERS == WARPS || !me.owner) weigh(m, tree, me);
  Tokens X = {};
  float past_u[2][4];
  if (me.owner) {
    Values v;
    read_ring(past_u, tree, 0, head.ring_u, me);
    past<Held>(X, m.S, m.x, tree.tiles, nullptr, [&](int slice) { slices.ready(slice); }, me);
    read_values(v, m.v[0] + me.pair, V + 8, [](int) { return true; }, me);
    fade_all(X, [&](int row) { return kept(m.G[CHUNK + row], m.ring_sum); }, me);
    subtract(X, v);
  }
  __syncthreads();
  if (me.owner) solve(m, tree, X, past_u, head.ring_u, u, me);
}
