// Which experts a row chooses, and for up to 8 rows which of them chose an expert. Definitions: route and the grouping in
// moe, boleinfer/ops/moe.py.
//
// softmax over all E logits, the A largest, equal ones by lower index; with norm_topk divided by their sum. A row with a
// NaN gets experts 0 .. A-1 and weights NaN, and counts as a row of no expert. Place r A + a is row r's a-th choice.
#pragma once

#include "common.cuh"

constexpr int MOST_EXPERTS = 512, MOST_CHOSEN = 32, FEW_ROWS = 8;

// Larger float <-> larger unsigned; 0 belongs to no number but NaN.
__device__ __forceinline__ unsigned ordered(float x) {
  const unsigned bits = __float_as_uint(x + 0.0f);  // -0 is 0
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ float unordered(unsigned u) { return __uint_as_float(u >> 31 ? u & 0x7fffffffu : ~u); }

// One row's weights and experts, by a warp whose lanes have PER_LANE neighbouring experts each. E <= 32 PER_LANE.
template <int PER_LANE>
__device__ void choose(const float* logits, float* weight, int* expert, int E, int A, bool norm_topk) {
  const int lane = threadIdx.x % WARP, first = lane * PER_LANE;
  unsigned key[PER_LANE];
  bool broken = false;
#pragma unroll
  for (int i = 0; i < PER_LANE; i++) {
    const float logit = first + i < E ? __ldcg(logits + first + i) : 0.0f;
    key[i] = first + i < E ? ordered(logit) : 0;
    broken |= logit != logit;
  }
  if (__any_sync(ALL_LANES, broken)) {
    if (lane < A) weight[lane] = nan(), expert[lane] = lane;
    return;
  }
  const auto largest = [&] {
    unsigned best = key[0];
#pragma unroll
    for (int i = 1; i < PER_LANE; i++) best = max(best, key[i]);
    return best;
  };
  float sum = 0.0f;
  if (!norm_topk) {
    const float most = unordered(__reduce_max_sync(ALL_LANES, largest()));
#pragma unroll
    for (int i = 0; i < PER_LANE; i++) {
      if (first + i < E) sum += expf(unordered(key[i]) - most);
    }
    sum = warp_sum(sum);
  }

  // the largest that is left, A times: its lane notes the expert, lane a the score
  unsigned kept = 0;
  for (int a = 0; a < A; a++) {
    const unsigned own = largest(), best = __reduce_max_sync(ALL_LANES, own);
    if (lane == a) kept = best;
    if (lane == __ffs(__ballot_sync(ALL_LANES, own == best)) - 1) {
      int at = 0;
#pragma unroll
      for (int i = PER_LANE - 1; i >= 0; i--) at = key[i] == best ? i : at;
#pragma unroll
      for (int i = 0; i < PER_LANE; i++) key[i] = i == at ? 0 : key[i];
      expert[a] = first + at;
    }
  }
  const float most = unordered(__shfl_sync(ALL_LANES, kept, 0)), mine = lane < A ? expf(unordered(kept) - most) : 0.0f;
  if (norm_topk) sum = warp_sum(mine);
  if (lane < A) weight[lane] = mine / sum;
}

// The choices of up to 8 rows, in the shared memory of a block. Slot s < slots is the expert of[s], experts rising; its rows
// are the bits of chosen_by[of[s]], and the i-th of them has position first[s] + i.
template <int THREADS>
struct Choices {
  float weight[FEW_ROWS * MOST_CHOSEN];  // of places
  int expert[FEW_ROWS * MOST_CHOSEN];
  short of[FEW_ROWS * MOST_CHOSEN], first[FEW_ROWS * MOST_CHOSEN + 1];
  alignas(4) unsigned char chosen_by[MOST_EXPERTS];
  int total[THREADS / WARP];
  int slots;

  // All threads together; behind it, they may read.
  template <int PER_LANE>
  __device__ void make(const float* logits, int R, int E, int A, bool norm_topk) {
    constexpr int WARPS = THREADS / WARP, EACH = MOST_EXPERTS / THREADS;  // experts of a thread
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    unsigned* const four = reinterpret_cast<unsigned*>(chosen_by);
    for (int i = threadIdx.x; i < MOST_EXPERTS / 4; i += THREADS) four[i] = 0;
    for (int r = warp; r < R; r += WARPS) {
      choose<PER_LANE>(logits + (long long)r * E, weight + r * A, expert + r * A, E, A, norm_topk);
    }
    __syncthreads();
    for (int p = threadIdx.x; p < R * A; p += THREADS) {
      if (weight[p] == weight[p]) atomicOr(four + expert[p] / 4, 1u << (expert[p] % 4 * 8 + p / A));
    }
    __syncthreads();

    // rows and chosen experts up to each thread's, packed: rows + 2^16 experts
    const auto packed = [&](int e) { return chosen_by[e] ? __popc(chosen_by[e]) + (1 << 16) : 0; };
    int mine = 0;
#pragma unroll
    for (int i = 0; i < EACH; i++) mine += packed(threadIdx.x * EACH + i);
    int upto = mine;
#pragma unroll
    for (int d = 1; d < WARP; d *= 2) {
      const int other = __shfl_up_sync(ALL_LANES, upto, d);
      if (lane >= d) upto += other;
    }
    if (lane == WARP - 1) total[warp] = upto;
    __syncthreads();
    upto -= mine;
    for (int w = 0; w < warp; w++) upto += total[w];
#pragma unroll
    for (int i = 0; i < EACH; i++) {
      const int e = threadIdx.x * EACH + i, n = packed(e);
      if (n) of[upto >> 16] = e, first[upto >> 16] = upto & 0xffff;
      upto += n;
    }
    if (threadIdx.x == THREADS - 1) slots = upto >> 16, first[upto >> 16] = upto & 0xffff;
    __syncthreads();
  }
};
