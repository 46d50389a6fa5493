// What moe_few.cu and moe_few_fp8.cu do alike: h, scores that all blocks make together and each one reads, runs of weights for
// a warp's place, how blocks leave, and the sum over a row's experts. moe_few.cu says who waits for whom.
#pragma once

#include "bulk.cuh"
#include "moe_choice.cuh"
#include "moe_units.cuh"

constexpr int THREADS = WARP * Places;
constexpr int HEIGHT = 16;             // numbers of out in a unit
constexpr int N = 8, SPAN = WARP * N;  // numbers of a row that a lane, and a warp, has at a time
constexpr int MOST_SPANS = 32;         // in a row: a thread each of the 1024 that norm it elsewhere
constexpr int ROUTED = 8;              // warps among which moe_router.cu shares a row
constexpr int SCORES = PerLane / 4;    // experts that a block scores at a time: those of an H200's share at once

enum { TAKEN, LEFT, KEYS = 4 };  // counters: units that were taken, blocks that take no more; then the scores

// h = stream + added and its squares, a span at a time, AT_ONCE rows of it under way together. put(r, k, a, b): rounds the sum of
// row r's numbers a and b from k on, keeps it as x, and gives the sum of its squares.
template <int AT_ONCE, int ROWS, class Put>
__device__ __forceinline__ void make_h(
    const bf16* stream, const bf16* added, float (&squares)[ROWS][MOST_SPANS], int R, int D, Put put) {
  const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
  for (int s = warp; s < D / SPAN; s += Places) {
    const int k = s * SPAN + lane * N;
#pragma unroll 1
    for (int r0 = 0; r0 < R; r0 += AT_ONCE) {
      Pack<bf16, N> a[AT_ONCE] = {}, b[AT_ONCE] = {};
#pragma unroll
      for (int i = 0; i < AT_ONCE; i++) {
        const int at = (r0 + i) * D + k;
        if (r0 + i < R) a[i] = load<N>(stream + at), b[i] = load<N>(added + at);
      }
#pragma unroll
      for (int i = 0; i < AT_ONCE; i++) {
        const int r = r0 + i;
        if (r >= R) break;
        const float square = warp_sum(put(r, k, a[i], b[i]));
        if (lane == 0) squares[r][s] = square;
      }
    }
  }
}

// A lane's numbers of a span of k, of the router's rows first, first + gridDim.x, ..; row E is the shared expert's.
__device__ __forceinline__ void read_router(
    Pack<bf16, N> (&w)[SCORES], const bf16* router, const bf16* shared_gate, int first, int k, int E, int D) {
#pragma unroll
  for (int i = 0; i < SCORES; i++) {
    const int e = first + i * (int)gridDim.x;
    if (e <= E) w[i] = load<N>((e < E ? router + (long long)e * D : shared_gate) + k);
  }
}

// total[r * SCORES + i] += the lane's numbers of x's row r from k on, times those of w[i]. x_at(r, k): where they are.
template <int TOTALS, class XAt>
__device__ __forceinline__ void add_products(
    float (&total)[TOTALS], const Pack<bf16, N> (&w)[SCORES], int k, int R, XAt x_at) {
#pragma unroll
  for (int r = 0; r < TOTALS / SCORES; r++) {
    if (r >= R) break;
    const auto x = load<N>(x_at(r, k));
#pragma unroll
    for (int i = 0; i < SCORES; i++) {
      float& own = total[r * SCORES + i];
#pragma unroll
      for (int j = 0; j < N; j++) own = fmaf(to_float(w[i].v[j]), to_float(x.v[j]), own);
    }
  }
}

// Scores, ordered, behind the counters; each is 0 until it is there. Number E is the shared expert's.
struct Scores {
  unsigned* keys;  // [R][pitch]
  int E, pitch;

  __device__ __forceinline__ Scores(int* counters, int E)
      : keys(reinterpret_cast<unsigned*>(counters) + KEYS), E(E), pitch(E / 4 * 4 + 4) {}

  // Those of experts first, first + gridDim.x, .. as sums over parts[v][r * SCORES + i], for all blocks. By a whole block, which
  // has just written them. last(score): what becomes of one before it is shown.
  template <int TOTALS, class Last>
  __device__ __forceinline__ void show(
      const float (&parts)[ROUTED][TOTALS], int first, int R, int spans, Last last) const {
    __syncthreads();
    const int r = threadIdx.x / SCORES, e = first + threadIdx.x % SCORES * (int)gridDim.x;
    if (r < R && e <= E) {
      float score = 0.0f;
      for (int v = 0; v < min(ROUTED, spans); v++) score += parts[v][threadIdx.x];
      score = last(score);
      *static_cast<volatile unsigned*>(keys + r * pitch + e) = ordered(score);
    }
    __syncthreads();
  }

  // Those of row r that a lane chooses from, by a warp, once all are there.
  __device__ __forceinline__ void await(int r, unsigned (&key)[PerLane]) const {
    bool missing;
    do {
      missing = false;
#pragma unroll
      for (int i = 0; i < PerLane; i += 4) {
        const int e = threadIdx.x % WARP * PerLane + i;
        const uint4 four = e < E ? read_live(keys + r * pitch + e) : make_uint4(0, 0, 0, 0);
#pragma unroll
        for (int j = 0; j < 4; j++) {
          key[i + j] = e + j < E ? word(four, j) : 0;
          missing |= e + j < E && !key[i + j];
        }
      }
    } while (__any_sync(ALL_LANES, missing));
  }

  // What row r takes of the shared expert.
  __device__ __forceinline__ float share(int r) const {
    unsigned key;
    do {
      key = *static_cast<const volatile unsigned*>(keys + r * pitch + E);
    } while (!key);
    return sigmoid(unordered(key));
  }

  // By a warp of each block, once it takes no more units and has read all scores: the last one clears the counters.
  __device__ __forceinline__ void leave(int* counters, int R) const {
    const int lane = threadIdx.x % WARP;
    const int before = __shfl_sync(ALL_LANES, lane == 0 ? atomicAdd(counters + LEFT, 1) : 0, 0);
    if (before == (int)gridDim.x - 1) {
      for (int i = lane; i < KEYS + R * pitch; i += WARP) counters[i] = 0;
    }
  }
};

// out of a row from the block's tile's number j on: the sum over its experts by rising index of weight * y, and the share of the shared expert's.
__device__ __forceinline__ float combine(const float* weight, const float* y, float share, int r, int j, int R, int A) {
  float sum = 0.0f;
#pragma unroll 4
  for (int p = r * A; p < r * A + A; p++) sum = fmaf(weight[p], y[p * HEIGHT + j], sum);
  return fmaf(share, y[(R * A + r) * HEIGHT + j], sum);
}
