// The gated delta rule for a request with a single row, plain decoding: by FMA on the state in shared memory.
//
// Keys of the state are dealt out to 16 groups, K / 16 neighbours each, and ring entries in turn. Vt / 4 threads take a
// group or, where threads are few, two neighbouring ones; each owns four columns of V. Eight threads make the scores of one
// ring entry; keys and u of the ring are copied to shared memory. The groups' sums are added in pairs of neighbours, in the
// thread, in the warp, then across warps, so that they do not depend on Vt.
#pragma once

#include "gdn.cuh"

constexpr int GROUPS = 16;
constexpr int MEMBERS = THREADS < 4 * Vt ? THREADS : 4 * Vt;  // threads that take part in the sums
constexpr int EACH = 4 * Vt / MEMBERS;                        // groups of a thread
constexpr int EACH_KEYS = K / GROUPS, EACH_RING = CHUNK / GROUPS;
constexpr int SHARE = K / 8;                                                  // numbers of a key for each of eight threads
constexpr int PIECE = SHARE < PER_16_BYTES<Act> ? SHARE : PER_16_BYTES<Act>;  // numbers of a key that are moved at once
constexpr int PIECES = SHARE / PIECE;                                         // of a key, for each of eight threads

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

// Log decays from entries lane and lane + 32 to the ring's end, and from the checkpoint to there. By one warp.
struct Decays {
  double behind[2], whole;

  __device__ __forceinline__ Decays(const Row& row, int Hv) {
    const int lane = threadIdx.x % WARP;
    double own[2], after[2];
#pragma unroll
    for (int e = 0; e < 2; e++) {
      const int i = lane + WARP * e;
      own[e] = after[e] = i < row.ring ? clamped(row.ring_g[i * Hv]) : 0.0;
    }
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

  // fade[i] = e^{G_n - G_i} of ring entry i, fade[ring + 1] = e^{G_n}, for the row's own log decay
  __device__ __forceinline__ void fades(float* fade, int ring, double last) const {
    const int lane = threadIdx.x % WARP;
#pragma unroll
    for (int e = 0; e < 2; e++) {
      if (lane + WARP * e < ring) fade[lane + WARP * e] = expf(float(behind[e] + last));
    }
    if (lane == 0) fade[ring + 1] = expf(float(whole + last));
  }
};

// Starts copying the ring's keys. A thread copies what it reads in score_ring.
__device__ __forceinline__ void fetch_keys(Act* keys, const Row& row, int Hk) {
  const int own = threadIdx.x % 8 * PIECE;
  for (int i = threadIdx.x / 8; i < row.ring; i += THREADS / 8) {
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

// score[n][i] = k_i . q (n = 0) or k_i . k (n = 1) of the ring's entries, and of the row itself at i = ring.
__device__ __forceinline__ void score_ring(float* score, const Act* keys, const Row& row) {
  const int own = threadIdx.x % 8 * PIECE;
  Pack<Act, PIECE> q[PIECES], k[PIECES];
#pragma unroll
  for (int p = 0; p < PIECES; p++) {
    q[p] = load<PIECE>(row.q + own + 8 * PIECE * p);
    k[p] = load<PIECE>(row.k + own + 8 * PIECE * p);
  }
  cp_async_wait<0>();
#pragma unroll 1
  for (int first = 0; first <= row.ring; first += THREADS / 8) {
    const int i = first + threadIdx.x / 8;
    float with_q = 0.0f, with_k = 0.0f;
#pragma unroll
    for (int p = 0; p < PIECES; p++) {
      const auto key = i < row.ring ? load<PIECE>(keys + i * K + own + 8 * PIECE * p) : k[p];
#pragma unroll
      for (int j = 0; j < PIECE; j++) {
        with_q = fmaf(to_float(key.v[j]), to_float(q[p].v[j]), with_q);
        with_k = fmaf(to_float(key.v[j]), to_float(k[p].v[j]), with_k);
      }
    }
#pragma unroll
    for (int lanes = 1; lanes < 8; lanes *= 2) {
      with_q += __shfl_xor_sync(ALL_LANES, with_q, lanes);
      with_k += __shfl_xor_sync(ALL_LANES, with_k, lanes);
    }
    if (threadIdx.x % 8 == 0 && i <= row.ring) {
      score[i] = with_q;
      score[CHUNK + 1 + i] = with_k;
    }
  }
}

// o and u of the tile's columns of one row. What is remembered is on its way before the previous kernel is done.
// memory: shared, 4 (3 (CHUNK + 2) - 2 + Vt MEMBERS / 16) bytes, then the ring's u and keys.
template <class Next>
__device__ __forceinline__ void one_row(const Row& row, float* memory, int Hk, int Hv, Next next) {
  float* part = memory;                                         // [MEMBERS / WARP, 2, Vt]
  float* score = part + MEMBERS / WARP * 2 * Vt;                // [2, CHUNK + 1]
  float* fade = score + 2 * (CHUNK + 1);                        // [CHUNK + 2]
  float* ring = fade + CHUNK + 2;                               // [ring, Vt]
  Act* keys = reinterpret_cast<Act*>(ring + row.ring * Vt);     // [ring, K]
  const Lane me = this_lane();
  const int thread = WARP * me.warp + me.lane, column = thread % (Vt / 4) * 4, group = thread / (Vt / 4) * EACH;
  const bool member = thread < MEMBERS;

  fetch_keys(keys, row, Hk);
  for (int word = thread; word < row.ring * (Vt / 4); word += THREADS) {
    const int i = word / (Vt / 4), v = word % (Vt / 4) * 4;
    cp_async16(ring + i * Vt + v, row.ring_u + (long long)i * Hv * V + v, true);
  }
  cp_async_commit();
  const Decays decays(row, Hv);
  after_previous();
  if (!row.used) {
    cp_async_wait<0>();  // no copy may still be on its way to where the next ones go
    return next();
  }

  const float value = threadIdx.x < Vt ? to_float(row.v[threadIdx.x]) : 0.0f, beta = *row.beta;
  Pack<Act, EACH_KEYS> x[2][EACH] = {};  // of q and k
#pragma unroll
  for (int e = 0; e < EACH; e++) {
    if (!member) continue;
    x[0][e] = load<EACH_KEYS>(row.q + (group + e) * EACH_KEYS);
    x[1][e] = load<EACH_KEYS>(row.k + (group + e) * EACH_KEYS);
  }
  const double last = clamped(*row.g);
  score_ring(score, keys, row);
  if (threadIdx.x < WARP) decays.fades(fade, row.ring, last);
  __syncthreads();

  // e^G S^T x + sum over the ring of e^{G - G_i} (k_i . x) u_i, of q and k
  const float whole = fade[row.ring + 1];
  float sum[EACH][2][4] = {};
#pragma unroll
  for (int e = 0; e < EACH; e++) {
    if (!member) continue;
#pragma unroll
    for (int j = 0; j < EACH_KEYS; j++) {
      const auto s = load<4>(row.S + place((group + e) * EACH_KEYS + j, column));
#pragma unroll
      for (int c = 0; c < 4; c++) {
#pragma unroll
        for (int n = 0; n < 2; n++) sum[e][n][c] = fmaf(to_float(x[n][e].v[j]), s.v[c], sum[e][n][c]);
      }
    }
#pragma unroll
    for (int n = 0; n < 2; n++) {
#pragma unroll
      for (int c = 0; c < 4; c++) sum[e][n][c] *= whole;
#pragma unroll
      for (int j = 0; j < EACH_RING; j++) {
        const int i = group + e + GROUPS * j;
        if (i < row.ring) {
          const float weight = score[n * (CHUNK + 1) + i] * fade[i];
          const auto u = load<4>(ring + i * Vt + column);
#pragma unroll
          for (int c = 0; c < 4; c++) sum[e][n][c] = fmaf(weight, u.v[c], sum[e][n][c]);
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
    if (member && threadIdx.x % WARP < Vt / 4) {
      float* to = part + (2 * me.warp + n) * Vt + column;
      *reinterpret_cast<float4*>(to) = make_float4(sum[0][n][0], sum[0][n][1], sum[0][n][2], sum[0][n][3]);
    }
  }
  __syncthreads();
  next();

  // u = beta (v - x_k), o = x_q + (k . q) u
  if (threadIdx.x < Vt) {
    float sum[2];
#pragma unroll
    for (int n = 0; n < 2; n++) {
      float of_warp[MEMBERS / WARP];
#pragma unroll
      for (int w = 0; w < MEMBERS / WARP; w++) of_warp[w] = part[(2 * w + n) * Vt + threadIdx.x];
#pragma unroll
      for (int step = 1; step < MEMBERS / WARP; step *= 2) {
#pragma unroll
        for (int w = 0; w < MEMBERS / WARP; w += 2 * step) of_warp[w] += of_warp[w + step];
      }
      sum[n] = of_warp[0];
    }
    const float u = beta * (value - sum[1]);
    row.u[threadIdx.x] = u;
    row.o[threadIdx.x] = from_float<Act>(fmaf(score[row.ring], u, sum[0]));
  }
}
