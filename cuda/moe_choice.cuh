// Which experts a row chooses, and for up to 8 rows which of them chose an expert. Definitions: route and the grouping in
// moe, boleinfer/ops/moe.py.
//
// softmax over all E logits, the A largest, equal ones by lower index; with norm_topk divided by their sum. A row with a
// NaN gets experts 0 .. A-1 and weights NaN, and counts as a row of no expert.
#pragma once

#include "common.cuh"

constexpr int MOST_EXPERTS = 512, MOST_CHOSEN = 32, FEW_ROWS = 8;

// Larger float <-> larger unsigned; 0 belongs to none, and all ones to NaN.
__device__ __forceinline__ unsigned ordered(float x) {
  const unsigned bits = __float_as_uint(x + 0.0f);  // -0 is 0
  return x != x ? ~0u : bits >> 31 ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ float unordered(unsigned u) { return __uint_as_float(u >> 31 ? u & 0x7fffffffu : ~u); }

// One of a row's choices.
struct Choice {
  float weight;
  int expert;
};

// Sorts numbers, the largest first: Batcher's merges of halves of 2 RUN, whose step compares numbers APART.
template <int RUN = 1, int APART = 1, int N>
__device__ __forceinline__ void sort_falling(unsigned (&v)[N]) {
#pragma unroll
  for (int i = 0; i < N - APART; i++) {
    const int from = i - APART % RUN, to = i + APART;
    if (from < 0 || from / APART % 2 || i / (2 * RUN) != to / (2 * RUN)) continue;
    const unsigned high = max(v[i], v[to]);
    v[to] = min(v[i], v[to]), v[i] = high;
  }
  if constexpr (APART > 1) {
    sort_falling<RUN, APART / 2>(v);
  } else if constexpr (2 * RUN < N) {
    sort_falling<2 * RUN, 2 * RUN>(v);
  }
}

// A row's choice number `lane`, by a warp whose lane l has the PER_LANE experts from l PER_LANE on. key: their scores,
// ordered; 0 behind the last expert.
template <int PER_LANE>
__device__ Choice choose(const unsigned (&key)[PER_LANE], int A, bool norm_topk) {
  const int lane = threadIdx.x % WARP;
  unsigned left[PER_LANE];  // of the lane's, not chosen
#pragma unroll
  for (int i = 0; i < PER_LANE; i++) left[i] = key[i];
  sort_falling(left);
  const unsigned most = __reduce_max_sync(ALL_LANES, left[0]);
  if (most == ~0u) return {nan(), lane};
  float sum = 0.0f;
  if (!norm_topk) {
#pragma unroll
    for (int i = 0; i < PER_LANE; i++) sum += key[i] ? expf(unordered(key[i]) - unordered(most)) : 0.0f;
    sum = warp_sum(sum);
  }

  // the largest that is left, A times; of equal ones the lowest expert. score: choice number `lane`, whose lane is the lowest of
  // `owners`, and which that lane has chosen `again` times before.
  unsigned score = 0, owners = 1, again = 0, last = 0, last_owner = 0, times = 0;
#pragma unroll 1
  for (int a = 0; a < A; a++) {
    const unsigned best = __reduce_max_sync(ALL_LANES, left[0]);
    const unsigned all = __ballot_sync(ALL_LANES, left[0] == best), owner = all & (0 - all);
    if (owner == 1u << lane) {
#pragma unroll
      for (int i = 0; i < PER_LANE - 1; i++) left[i] = left[i + 1];
      left[PER_LANE - 1] = 0;
    }
    times = best == last && owner == last_owner ? times + 1 : 0, last = best, last_owner = owner;
    if (lane == a) score = best, owners = all, again = times;
  }
  const int from = __ffs(owners) - 1;
  Choice own = {0.0f, 0};
#pragma unroll
  for (int i = 0; i < PER_LANE; i++) {
    const bool same = __shfl_sync(ALL_LANES, key[i], from) == score;
    if (same && again-- == 0) own.expert = from * PER_LANE + i;
  }
  const float share = lane < A ? expf(unordered(score) - unordered(most)) : 0.0f;
  if (norm_topk) sum = warp_sum(share);
  own.weight = share / sum;
  return own;
}

// The choices of up to 8 rows, in the shared memory of a block. Slot s < slots is the expert of[s], experts rising; its rows
// are the bits of chosen_by[of[s]]; slot_of[of[s]] is s.
template <int THREADS>
struct Choices {
  static constexpr int WARPS = THREADS / WARP, EACH = (MOST_EXPERTS + THREADS - 1) / THREADS;  // experts of a thread
  float weight[FEW_ROWS * MOST_CHOSEN];  // of row r's choice a at r A + a
  short expert[FEW_ROWS * MOST_CHOSEN], of[FEW_ROWS * MOST_CHOSEN];
  alignas(4) unsigned char chosen_by[EACH * THREADS];
  unsigned char slot_of[EACH * THREADS];
  int count[WARPS];
  int slots;

  // All threads together, before a __syncthreads() and make.
  __device__ void clear() {
    for (int i = threadIdx.x; i < EACH * THREADS / 4; i += THREADS) reinterpret_cast<unsigned*>(chosen_by)[i] = 0;
  }

  // All threads together; behind it, they may read. keys(r, key): the lane's part of row r's, for choose.
  template <int PER_LANE, class Keys>
  __device__ void make(Keys keys, int R, int A, bool norm_topk) {
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    for (int r = warp; r < R; r += WARPS) {
      unsigned key[PER_LANE];
      keys(r, key);
      const Choice own = choose<PER_LANE>(key, A, norm_topk);
      if (lane >= A) continue;
      weight[r * A + lane] = own.weight, expert[r * A + lane] = own.expert;
      unsigned* const four = reinterpret_cast<unsigned*>(chosen_by) + own.expert / 4;
      if (own.weight == own.weight) atomicOr(four, 1u << (own.expert % 4 * 8 + r));
    }
    __syncthreads();

    unsigned chosen[EACH];
    int mine = 0;
#pragma unroll
    for (int i = 0; i < EACH; i++) {
      chosen[i] = __ballot_sync(ALL_LANES, chosen_by[(warp * EACH + i) * WARP + lane] != 0);
      mine += __popc(chosen[i]);
    }
    if (lane == 0) count[warp] = mine;
    __syncthreads();
    int before = 0;
#pragma unroll
    for (int w = 0; w < WARPS; w++) before += w < warp ? count[w] : 0;
#pragma unroll
    for (int i = 0; i < EACH; i++) {
      const int at = before + __popc(chosen[i] & ((1u << lane) - 1));
      const int e = (warp * EACH + i) * WARP + lane;
      if (chosen[i] >> lane & 1) of[at] = e, slot_of[e] = at;
      before += __popc(chosen[i]);
    }
    if (threadIdx.x == THREADS - 1) slots = before;
    __syncthreads();
  }
};
