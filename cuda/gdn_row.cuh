// The gated delta rule for a request with a single row, plain decoding: by FMA.
//
// Keys of the state are dealt out to 16 groups, K / 16 neighbours each, and ring entries in turn. Vt / 4 threads take a
// group or, where threads are few, two neighbouring ones; each owns four columns of V. Eight threads make the scores of one
// ring entry. The groups' sums are added in pairs of neighbours, in the thread, in the warp, then across warps, so that
// they do not depend on Vt or on the number of threads. Where state and ring are kept is the caller's choice: in shared
// memory (one_row, for gdn.cu), in registers (gdn_token.cu), or the one here and the other there (gdn_tokens.cu).
#pragma once

#include "gdn.cuh"
#include "share.cuh"

constexpr int GROUPS = 16;
constexpr int FULL = THREADS >= 512 ? 512 : THREADS >= 256 ? 256 : 128;
constexpr int MEMBERS = FULL < 4 * Vt ? FULL : 4 * Vt;  // threads that take part in the sums
constexpr int EACH = 4 * Vt / MEMBERS;                  // groups of a thread
constexpr int EACH_KEYS = K / GROUPS, EACH_RING = CHUNK / GROUPS;
constexpr int SHARE = K / 8;                                                  // numbers of a key for each of eight threads
constexpr int PIECE = SHARE < PER_16_BYTES<Act> ? SHARE : PER_16_BYTES<Act>;  // numbers of a key that are moved at once
constexpr int PIECES = SHARE / PIECE;                                         // of a key, for each of eight threads
constexpr int SCORED = THREADS / 8;                                           // ring entries at once

// What threads tell each other of a row.
struct alignas(16) RowMemory {
  float part[MEMBERS / WARP][2][Vt];  // sums of the groups of a warp, of q and k
  float score[2][CHUNK + 1];          // k_i . q and k_i . k of the ring's entries, and of the row itself behind them
  float fade[CHUNK];                  // e^{G_n - G_i} of the ring's entries
  float whole;                        // e^{G_n}
};

// A thread's part in the sums.
struct Member {
  int column, group;  // the first of four columns, the first of EACH groups
  bool is;

  __device__ __forceinline__ Member() {
    const Lane me = this_lane();
    const int thread = WARP * me.warp + me.lane;
    column = thread % (Vt / 4) * 4, group = thread / (Vt / 4) * EACH, is = thread < MEMBERS;
  }
};

using RowSums = float[EACH][2][4];  // of each group, of q and k, by columns

// Log decays from entries lane and lane + 32 to the ring's end, and from the checkpoint to there. By one warp.
struct Decays {
  double behind[2], whole;

  // g: of those entries
  __device__ __forceinline__ Decays(const float (&g)[2], int ring) {
    const int lane = threadIdx.x % WARP;
    double own[2], after[2];
#pragma unroll
    for (int e = 0; e < 2; e++) own[e] = after[e] = lane + WARP * e < ring ? clamped(g[e]) : 0.0;
#pragma unroll
    for (int reach = 1; reach < WARP; reach *= 2) {
#pragma unroll
      for (int e = 0; e < 2; e++) {
        const double more = __shfl_down_sync(ALL_LANES, after[e], reach);
        if (lane + reach < WARP) after[e] += more;
      }
    }
    after[0] += __shfl_sync(ALL_LANES, after[1], 0);
    whole = after[0];
#pragma unroll
    for (int e = 0; e < 2; e++) behind[e] = after[e] - own[e];
  }

  // For the row's own log decay.
  __device__ __forceinline__ void fades(RowMemory& m, int ring, double last) const {
    const int lane = threadIdx.x % WARP;
#pragma unroll
    for (int e = 0; e < 2; e++) {
      if (lane + WARP * e < ring) m.fade[lane + WARP * e] = expf(float(behind[e] + last));
    }
    if (lane == 0) m.whole = expf(float(whole + last));
  }
};

// Log decays of entries lane and lane + 32 of a ring of the head, whose first is at ring_g.
__device__ __forceinline__ void read_decays(float (&g)[2], const float* ring_g, int ring, int Hv) {
  const int lane = threadIdx.x % WARP;
#pragma unroll
  for (int e = 0; e < 2; e++) {
    if (lane + WARP * e < ring) g[e] = ring_g[(lane + WARP * e) * Hv];
  }
}

// Scores of q and k with the ring's keys, key(i, p) the thread's piece p of entry i, and with the row's own.
template <class Key>
__device__ __forceinline__ void score_ring(RowMemory& m, const Act* q, const Act* k, int ring, Key key) {
  const int own = threadIdx.x % 8 * PIECE;
  Pack<Act, PIECE> x[2][PIECES];
#pragma unroll
  for (int p = 0; p < PIECES; p++) {
    x[0][p] = load<PIECE>(q + own + 8 * PIECE * p);
    x[1][p] = load<PIECE>(k + own + 8 * PIECE * p);
  }
#pragma unroll 1
  for (int first = 0; first <= ring; first += SCORED) {
    const int i = first + threadIdx.x / 8;
    float score[2] = {};
#pragma unroll
    for (int p = 0; p < PIECES; p++) {
      const auto of = widened(i < ring ? key(i, p) : x[1][p]), with_q = widened(x[0][p]), with_k = widened(x[1][p]);
#pragma unroll
      for (int j = 0; j < PIECE; j++) {
        score[0] = fmaf(of.v[j], with_q.v[j], score[0]);
        score[1] = fmaf(of.v[j], with_k.v[j], score[1]);
      }
    }
#pragma unroll
    for (int lanes = 1; lanes < 8; lanes *= 2) {
#pragma unroll
      for (int n = 0; n < 2; n++) score[n] += __shfl_xor_sync(ALL_LANES, score[n], lanes);
    }
    if (threadIdx.x % 8 == 0 && i <= ring) m.score[0][i] = score[0], m.score[1][i] = score[1];
  }
}

// sum = S^T q, S^T k over the thread's keys; state(e, j): four columns of the j-th key of group e.
template <class State>
__device__ __forceinline__ void sum_state(RowSums& sum, const Member& me, const Act* q, const Act* k, State state) {
  memset(sum, 0, sizeof sum);
  if (!me.is) return;
#pragma unroll
  for (int e = 0; e < EACH; e++) {
    const auto with_q = widened(load<EACH_KEYS>(q + (me.group + e) * EACH_KEYS));
    const auto with_k = widened(load<EACH_KEYS>(k + (me.group + e) * EACH_KEYS));
#pragma unroll
    for (int j = 0; j < EACH_KEYS; j++) {
      const Pack<float, 4> s = state(e, j);
#pragma unroll
      for (int c = 0; c < 4; c++) {
        sum[e][0][c] = fmaf(with_q.v[j], s.v[c], sum[e][0][c]);
        sum[e][1][c] = fmaf(with_k.v[j], s.v[c], sum[e][1][c]);
      }
    }
  }
}

// part = e^G sum + sum over the thread's ring entries of e^{G - G_i} (k_i . x) u_i; u(e, j): four columns of the j-th of
// group e.
template <class Ring>
__device__ __forceinline__ void share_sums(RowMemory& m, RowSums& sum, const Member& me, int ring, Ring u) {
  const float whole = m.whole;
#pragma unroll
  for (int e = 0; e < EACH; e++) {
    if (!me.is) continue;
#pragma unroll
    for (int n = 0; n < 2; n++) {
#pragma unroll
      for (int c = 0; c < 4; c++) sum[e][n][c] *= whole;
    }
#pragma unroll
    for (int j = 0; j < EACH_RING; j++) {
      const int i = me.group + e + GROUPS * j;
      if (i < ring) {
        const Pack<float, 4> of = u(e, j);
#pragma unroll
        for (int n = 0; n < 2; n++) {
          const float weight = m.score[n][i] * m.fade[i];
#pragma unroll
          for (int c = 0; c < 4; c++) sum[e][n][c] = fmaf(weight, of.v[c], sum[e][n][c]);
        }
      }
    }
  }
#pragma unroll
  for (int n = 0; n < 2; n++) {
#pragma unroll
    for (int c = 0; c < 4; c++) {
#pragma unroll
      for (int step = 1; step < EACH; step *= 2) {
#pragma unroll
        for (int e = 0; e < EACH; e += 2 * step) sum[e][n][c] += sum[e + step][n][c];
      }
#pragma unroll
      for (int lanes = Vt / 4; lanes < WARP; lanes *= 2) sum[0][n][c] += __shfl_xor_sync(ALL_LANES, sum[0][n][c], lanes);
    }
    if (me.is && threadIdx.x % WARP < Vt / 4) {
      float* to = &m.part[threadIdx.x / WARP][n][me.column];
      *reinterpret_cast<float4*>(to) = make_float4(sum[0][n][0], sum[0][n][1], sum[0][n][2], sum[0][n][3]);
    }
  }
}

// u = beta (v - x_k), o = x_q + (k . q) u of four columns from `column` on.
__device__ __forceinline__ void solve_row(float (&o)[4], float (&u)[4], const RowMemory& m, const float (&v)[4], float beta,
                                          int ring, int column) {
  float sum[2][4];
#pragma unroll
  for (int n = 0; n < 2; n++) {
    Pack<float, 4> of_warp[MEMBERS / WARP];
#pragma unroll
    for (int w = 0; w < MEMBERS / WARP; w++) of_warp[w] = load<4>(&m.part[w][n][column]);
#pragma unroll
    for (int c = 0; c < 4; c++) {
#pragma unroll
      for (int step = 1; step < MEMBERS / WARP; step *= 2) {
#pragma unroll
        for (int w = 0; w < MEMBERS / WARP; w += 2 * step) of_warp[w].v[c] += of_warp[w + step].v[c];
      }
      sum[n][c] = of_warp[0].v[c];
    }
  }
#pragma unroll
  for (int c = 0; c < 4; c++) {
    u[c] = beta * (v[c] - sum[1][c]);
    o[c] = fmaf(m.score[0][ring], u[c], sum[0][c]);
  }
}

// ---- with the state in shared memory --------------------------------------------------------------------------------

struct Row {
  const Act* q;         // [K]
  const Act* k;         // [K]
  const Act* v;         // of the tile's first column
  const float *g, *beta;
  const float* S;       // [K, Vt] in shared memory, see `place`; under way
  const Act* ring_k;    // [C, Hk, K] of the head
  const float* ring_u;  // [C, Hv, V] of the head, from the tile's first column
  const float* ring_g;  // [C, Hv] of the head
  int ring;             // filled entries
  bool used;
  Act* o;
  float* u;
};

// Starts copying the ring's keys. A thread copies what it reads in score_ring.
__device__ __forceinline__ void fetch_keys(Act* keys, const Row& row, int Hk) {
  const int own = threadIdx.x % 8 * PIECE;
  for (int i = threadIdx.x / 8; i < row.ring; i += SCORED) {
#pragma unroll
    for (int p = 0; p < PIECES; p++) {
      const int part = own + 8 * PIECE * p;
      const Act* from = row.ring_k + (long long)i * Hk * K + part;
      if constexpr (PIECE * sizeof(Act) == 16) {
        cp_async16(keys + i * K + part, from, true);
      } else {
        store<PIECE>(keys + i * K + part, load<PIECE>(from));
      }
    }
  }
  cp_async_commit();
}

// o and u of the tile's columns of one row. What is remembered is on its way before the previous kernel is done.
// memory: shared, sizeof(RowMemory), then the ring's u and keys.
template <class Next>
__device__ __forceinline__ void one_row(const Row& row, float* memory, int Hk, int Hv, Next next) {
  RowMemory& m = *reinterpret_cast<RowMemory*>(memory);
  float* ring = memory + sizeof m / sizeof(float);           // [ring, Vt]
  Act* keys = reinterpret_cast<Act*>(ring + row.ring * Vt);  // [ring, K]
  const Member me;

  fetch_keys(keys, row, Hk);
  for (int word = threadIdx.x; word < row.ring * (Vt / 4); word += THREADS) {
    const int i = word / (Vt / 4), v = word % (Vt / 4) * 4;
    cp_async16(ring + i * Vt + v, row.ring_u + (long long)i * Hv * V + v, true);
  }
  cp_async_commit();
  float ring_g[2];
  read_decays(ring_g, row.ring_g, row.ring, Hv);
  const Decays decays(ring_g, row.ring);
  after_previous();
  if (!row.used) {
    cp_async_wait<0>();  // no copy may still be on its way to where the next ones go
    return next();
  }

  const bool solves = threadIdx.x < Vt / 4;  // four columns of the row
  Pack<Act, 4> value = {};
  if (solves) value = load<4>(row.v + me.column);
  const float beta = *row.beta;
  const double last = clamped(*row.g);
  cp_async_wait<0>();
  score_ring(m, row.q, row.k, row.ring, [&](int i, int p) {
    return load<PIECE>(keys + i * K + threadIdx.x % 8 * PIECE + 8 * PIECE * p);
  });
  if (threadIdx.x < WARP) decays.fades(m, row.ring, last);
  __syncthreads();
  RowSums sum;
  sum_state(sum, me, row.q, row.k, [&](int e, int j) {
    return load<4>(row.S + place((me.group + e) * EACH_KEYS + j, me.column));
  });
  share_sums(m, sum, me, row.ring, [&](int e, int j) {
    return load<4>(ring + (me.group + e + GROUPS * j) * Vt + me.column);
  });
  __syncthreads();
  next();

  if (solves) {
    float v[4], o[4], u[4];
#pragma unroll
    for (int c = 0; c < 4; c++) v[c] = to_float(value.v[c]);
    solve_row(o, u, m, v, beta, row.ring, me.column);
    Pack<Act, 4> rounded;
    Pack<float, 4> factor;
#pragma unroll
    for (int c = 0; c < 4; c++) rounded.v[c] = from_float<Act>(o[c]), factor.v[c] = u[c];
    store<4>(row.o + me.column, rounded);
    store<4>(row.u + me.column, factor);
  }
}
