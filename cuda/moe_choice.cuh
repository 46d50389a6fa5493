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

// A row's choice number `lane`, by a warp whose lane l has the PER_LANE experts from l PER_LANE on. key: their scores,
// ordered; 0 behind the last expert. Changes key.
template <int PER_LANE>
__device__ Choice choose(unsigned (&key)[PER_LANE], int A, bool norm_topk) {
  const int lane = threadIdx.x % WARP;
  const auto largest = [&] {
    unsigned most[PER_LANE];
#pragma unroll
    for (int i = 0; i < PER_LANE; i++) most[i] = key[i];
#pragma unroll
    for (int d = 1; d < PER_LANE; d *= 2) {
#pragma unroll
      for (int i = 0; i < PER_LANE; i += 2 * d) most[i] = max(most[i], most[i + d]);
    }
    return most[0];
  };
  unsigned mine = largest();
  const unsigned most = __reduce_max_sync(ALL_LANES, mine);
  if (most == ~0u) return {nan(), lane};
  float sum = 0.0f;
  if (!norm_topk) {
#pragma unroll
    for (int i = 0; i < PER_LANE; i++) sum += key[i] ? expf(unordered(key[i]) - unordered(most)) : 0.0f;
    sum = warp_sum(sum);
  }

  // the largest that is left, A times; of equal ones the lowest expert
  Choice own = {0.0f, 0};
  unsigned score = 0;
#pragma unroll 1
  for (int a = 0; a < A; a++) {
    const unsigned best = __reduce_max_sync(ALL_LANES, mine);
    const int owner = __ffs(__ballot_sync(ALL_LANES, mine == best)) - 1;
    int at = 0;
#pragma unroll
    for (int i = PER_LANE - 1; i >= 0; i--) at = key[i] == best ? i : at;
#pragma unroll
    for (int i = 0; i < PER_LANE; i++) key[i] = lane == owner && i == at ? 0 : key[i];
    mine = largest();
    const int expert = __shfl_sync(ALL_LANES, lane * PER_LANE + at, owner);
    if (lane == a) own.expert = expert, score = best;
  }
  const float share = lane < A ? expf(unordered(score) - unordered(most)) : 0.0f;
  if (norm_topk) sum = warp_sum(share);
  own.weight = share / sum;
  return own;
}

// The choices of up to 8 rows, in the shared memory of a block. Slot s < slots is the expert of[s], experts rising; its rows
// are the bits of chosen_by[of[s]].
template <int THREADS>
struct Choices {
  static constexpr int WARPS = THREADS / WARP, EACH = (MOST_EXPERTS + THREADS - 1) / THREADS;  // experts of a thread
  float weight[FEW_ROWS * MOST_CHOSEN];  // of row r's choice a at r A + a
  short expert[FEW_ROWS * MOST_CHOSEN], of[FEW_ROWS * MOST_CHOSEN];
  alignas(4) unsigned char chosen_by[EACH * THREADS];
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
      if (chosen[i] >> lane & 1) of[at] = (warp * EACH + i) * WARP + lane;
      before += __popc(chosen[i]);
    }
    if (threadIdx.x == THREADS - 1) slots = before;
    __syncthreads();
  }
};
