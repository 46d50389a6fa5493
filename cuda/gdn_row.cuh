// The gated delta rule for a request with a single row, plain decoding: by FMA, the state from memory to registers.
//
// A block has 16 groups of Vt / 4 threads; a thread owns four columns of V, of K / 16 keys of the state and of every
// 16th ring entry. Eight threads make the scores of one ring entry, whose key is copied to shared memory, every warp the
// decays. The groups' sums are added in
// pairs of neighbours, first in the warp, then across warps, so that they do not depend on Vt.
#pragma once

#include "gdn.cuh"

constexpr int GROUPS = 16;
constexpr int EACH_KEYS = K / GROUPS, EACH_RING = CHUNK / GROUPS;
constexpr int PIECE = SHARE < PER_16_BYTES<Act> ? SHARE : PER_16_BYTES<Act>;  // numbers of a key that are moved at once
constexpr int PIECES = SHARE / PIECE;                                         // of a key, for each of eight threads

struct Row {
  const Act* q;         // [K]
  const Act* k;         // [K]
  const Act* v;         // of the tile's first column
  const float *g, *beta;
  const float* S;       // [K, V] from the tile's first column
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
// memory: shared, 4 (3 (CHUNK + 2) - 2 + 2 Vt WARPS) bytes, then the ring's keys.
__device__ __forceinline__ void one_row(const Row& row, float* memory, int Hk, int Hv) {
  float* score = memory;                   // [2, CHUNK + 1]
  float* fade = score + 2 * (CHUNK + 1);   // [CHUNK + 2]
  float* part = fade + CHUNK + 2;          // [WARPS, 2, Vt]
  Act* keys = reinterpret_cast<Act*>(part + WARPS * 2 * Vt);  // [ring, K]
  const int column = threadIdx.x % (Vt / 4) * 4, group = threadIdx.x / (Vt / 4);

  Pack<float, 4> s[EACH_KEYS], ring[EACH_RING];
#pragma unroll
  for (int j = 0; j < EACH_KEYS; j++) s[j] = load<4>(row.S + (group * EACH_KEYS + j) * V + column);
  fetch_keys(keys, row, Hk);
#pragma unroll
  for (int j = 0; j < EACH_RING; j++) {
    const int i = group + GROUPS * j;
    if (i < row.ring) ring[j] = load<4>(row.ring_u + (long long)i * Hv * V + column);
  }
  const Decays decays(row, Hv);
  after_previous();
  if (!row.used) return;

  const float value = threadIdx.x < Vt ? to_float(row.v[threadIdx.x]) : 0.0f, beta = *row.beta;
  const auto q = load<EACH_KEYS>(row.q + group * EACH_KEYS), k = load<EACH_KEYS>(row.k + group * EACH_KEYS);
  const double last = clamped(*row.g);
  score_ring(score, keys, row);
  if (threadIdx.x < WARP) decays.fades(fade, row.ring, last);
  __syncthreads();

  // x = e^G S^T x + sum over the ring of e^{G - G_i} (k_i . x) u_i, for q and k
  float x[2][4] = {};
#pragma unroll
  for (int j = 0; j < EACH_KEYS; j++) {
#pragma unroll
    for (int c = 0; c < 4; c++) {
      x[0][c] = fmaf(to_float(q.v[j]), s[j].v[c], x[0][c]);
      x[1][c] = fmaf(to_float(k.v[j]), s[j].v[c], x[1][c]);
    }
  }
  const float whole = fade[row.ring + 1];
#pragma unroll
  for (int n = 0; n < 2; n++) {
#pragma unroll
    for (int c = 0; c < 4; c++) x[n][c] *= whole;
#pragma unroll
    for (int j = 0; j < EACH_RING; j++) {
      const int i = group + GROUPS * j;
      if (i < row.ring) {
        const float weight = score[n * (CHUNK + 1) + i] * fade[i];
#pragma unroll
        for (int c = 0; c < 4; c++) x[n][c] = fmaf(weight, ring[j].v[c], x[n][c]);
      }
    }
#pragma unroll
    for (int c = 0; c < 4; c++) {
#pragma unroll
      for (int lanes = Vt / 4; lanes < WARP; lanes *= 2) x[n][c] += __shfl_xor_sync(ALL_LANES, x[n][c], lanes);
    }
    if (threadIdx.x % WARP < Vt / 4) {
#pragma unroll
      for (int c = 0; c < 4; c++) part[(threadIdx.x / WARP * 2 + n) * Vt + column + c] = x[n][c];
    }
  }
  __syncthreads();

  // u = beta (v - x_k), o = x_q + (k . q) u
  if (threadIdx.x < Vt) {
    float sum[2];
#pragma unroll
    for (int n = 0; n < 2; n++) {
      float of_warp[WARPS];
#pragma unroll
      for (int w = 0; w < WARPS; w++) of_warp[w] = part[(2 * w + n) * Vt + threadIdx.x];
#pragma unroll
      for (int step = 1; step < WARPS; step *= 2) {
#pragma unroll
        for (int w = 0; w < WARPS; w += 2 * step) of_warp[w] += of_warp[w + step];
      }
      sum[n] = of_warp[0];
    }
    const float u = beta * (value - sum[1]);
    row.u[threadIdx.x] = u;
    row.o[threadIdx.x] = from_float<Act>(fmaf(score[row.ring], u, sum[0]));
  }
}
