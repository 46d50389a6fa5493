// What moe_few.cu and moe_few_fp8.cu do alike: h and x, the scores that blocks show one another, how blocks leave, what
// is asked of down, and the sum over a row's experts. moe_few.cu says who waits for whom.
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

// ---- x --------------------------------------------------------------------------------------------------------------

// A lane's numbers from k on of the router's rows first, first + gridDim.x, ..; row E is the shared expert's.
__device__ __forceinline__ void read_router(
    Pack<bf16, N> (&w)[SCORES], const bf16* router, const bf16* shared_gate, int first, int k, int E, int D) {
#pragma unroll
  for (int i = 0; i < SCORES; i++) {
    const int e = first + i * (int)gridDim.x;
    if (e <= E) w[i] = load<N>((e < E ? router + (long long)e * D : shared_gate) + k);
  }
}

// Those of the first rows that the block scores, and of norm, from the lane's first k on: before the wait.
__device__ __forceinline__ void read_ahead(
    Pack<bf16, N> (&w)[SCORES], Pack<float, N>& delta, const bf16* router, const bf16* shared_gate, const float* norm,
    int own_k, int E, int D) {
  if (own_k < D) {
    if (threadIdx.x / WARP < ROUTED) read_router(w, router, shared_gate, blockIdx.x, own_k, E, D);
    delta = load<N>(norm + own_k);
  }
}

// squares[r][s]: the sum of the squares of h = stream + added, over span s of row r. AtOnce: rows that are under way
// together. put(r, k, a, b): keeps the sums of a and b, row r's numbers from k on, and gives that of their squares; it
// may change a.
template <int AtOnce, int ROWS, class Put>
__device__ __forceinline__ void make_h(
    float (&squares)[ROWS][MOST_SPANS], const bf16* stream, const bf16* added, int R, int D, Put put) {
  const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
  for (int s = warp; s < D / SPAN; s += Places) {
    const int k = s * SPAN + lane * N;
#pragma unroll 1
    for (int r0 = 0; r0 < R; r0 += AtOnce) {
      Pack<bf16, N> a[AtOnce] = {}, b[AtOnce] = {};
#pragma unroll
      for (int i = 0; i < AtOnce; i++) {
        const int at = (r0 + i) * D + k;
        if (r0 + i < R) a[i] = load<N>(stream + at), b[i] = load<N>(added + at);
      }
#pragma unroll
      for (int i = 0; i < AtOnce; i++) {
        const int r = r0 + i;
        if (r >= R) break;
        const float square = warp_sum(put(r, k, a[i], b[i]));
        if (lane == 0) squares[r][s] = square;
      }
    }
  }
}

// A lane's numbers of x = h * scale * (1 + delta), not rounded.
struct Normed {
  const Pack<bf16, N>& h;
  const Pack<float, N>& delta;
  float scale;

  __device__ __forceinline__ float operator[](int i) const { return to_float(h.v[i]) * scale * (1.0f + delta.v[i]); }
};

// x in the place of h, of which a block writes some rows to memory. delta: norm's numbers from the lane's first k on.
// x_at(r, k): where row r's numbers from k on are; scale_of(r): by a warp; put(r, k, x): writes Normed numbers there.
template <class XAt, class ScaleOf, class Put>
__device__ __forceinline__ void make_x(
    bf16* h, const float* norm, Pack<float, N>& delta, int R, int D, XAt x_at, ScaleOf scale_of, Put put) {
  const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
  for (int s = warp; s < D / SPAN; s += Places) {
    const int k = s * SPAN + lane * N;
    if (s != warp) delta = load<N>(norm + k);
#pragma unroll 1
    for (int r = 0; r < R; r++) {
      const float scale = scale_of(r);
      const auto own = load<N>(x_at(r, k));
      if (r % gridDim.x == blockIdx.x) store<N>(h + r * D + k, own);
      put(r, k, Normed{own, delta, scale});
    }
  }
}

// ---- scores ---------------------------------------------------------------------------------------------------------

// total[r * SCORES + i] += the sum of w[i] * row r's numbers of x from k on.
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

// What blocks show one another, behind the counters: ordered scores of E experts and, number E, of the shared one; 0
// until they are there.
struct Scores {
  unsigned* keys;  // [R][pitch]
  int E, pitch;

  __device__ __forceinline__ Scores(int* counters, int E)
      : keys(reinterpret_cast<unsigned*>(counters) + KEYS), E(E), pitch(E / 4 * 4 + 4) {}

  // Shows those of experts first, first + gridDim.x, ..: finish(the sum over v of parts[v][r * SCORES + i]). All
  // threads together, which may write parts before and behind it.
  template <int TOTALS, class Finish>
  __device__ __forceinline__ void show(
      const float (&parts)[ROUTED][TOTALS], int first, int R, int spans, Finish finish) const {
    __syncthreads();
    const int r = threadIdx.x / SCORES, e = first + threadIdx.x % SCORES * (int)gridDim.x;
    if (r < R && e <= E) {
      float score = 0.0f;
      for (int v = 0; v < min(ROUTED, spans); v++) score += parts[v][threadIdx.x];
      score = finish(score);
      *static_cast<volatile unsigned*>(keys + r * pitch + e) = ordered(score);
    }
    __syncthreads();
  }

  // A lane's of row r, for choose, once all of the warp's are there.
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

  // The shared expert's share in row r, once its score is there.
  __device__ __forceinline__ float share(int r) const {
    unsigned key;
    do {
      key = *static_cast<const volatile unsigned*>(keys + r * pitch + E);
    } while (!key);
    return sigmoid(unordered(key));
  }

  // By a warp, when its block takes no more units and has read all scores: that of the last block clears the counters.
  __device__ __forceinline__ void leave(int* counters, int R) const {
    const int lane = threadIdx.x % WARP;
    const int before = __shfl_sync(ALL_LANES, lane == 0 ? atomicAdd(counters + LEFT, 1) : 0, 0);
    if (before == (int)gridDim.x - 1) {
      for (int i = lane; i < KEYS + R * pitch; i += WARP) counters[i] = 0;
    }
  }
};

// ---- the second product ---------------------------------------------------------------------------------------------

// A warp asks for rows d0 .. d0 + 15 of an expert's down.
__device__ __forceinline__ void ask_tile(const Wt* down, int d0, int F, char* place, Barrier& full) {
  if (threadIdx.x % WARP == 0) {
    arrive_expecting(full, HEIGHT * F * ITEM);
    load_run(place, down + (long long)d0 * F, HEIGHT * F * ITEM, full);
  }
}

// Number j of a tile of out, of row r: the sum of weight * y over its experts, by rising index, then share times the
// shared expert's, which is behind those of all R rows.
__device__ __forceinline__ bf16 combine(const float* weight, const float* y, float share, int r, int j, int R, int A) {
  float sum = 0.0f;
#pragma unroll 4
  for (int p = r * A; p < r * A + A; p++) sum = fmaf(weight[p], y[p * HEIGHT + j], sum);
  return from_float<bf16>(fmaf(share, y[(R * A + r) * HEIGHT + j], sum));
}
