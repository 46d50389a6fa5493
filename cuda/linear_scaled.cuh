// FP8 w in linear_hopper: x split by the block itself, and products of E4M3 numbers, scaled. Definition: split_rows in
// boleinfer/ops/linear.py.
#pragma once

#include "linear_ring.cuh"
#include "split.cuh"

// x of the block's chunks, split, into the ring. By 16 lanes of X_WARPS a row; `first`: of those threads.
__device__ __forceinline__ void split_all(
    const bf16* x, const Units& units, const Ring& ring, int depth, int first, int R, int Ldx, int Din) {
  constexpr int PASSES = (Rows + AT_ONCE - 1) / AT_ONCE, AHEAD = PASSES > 1 ? 1 : 4;  // AHEAD: chunks under way
  const int lane = (threadIdx.x - first) % 16, row = (threadIdx.x - first) / 16;
  Turn turn{depth};
  for (int next = blockIdx.x; next < units.count; next += gridDim.x) {
    const Unit unit = units[next];
    uint4 coming[AHEAD][PASSES];
    auto ask = [&](uint4 (&to)[PASSES], int chunk) {
      const int k = chunk * K + 8 * lane;
#pragma unroll
      for (int i = 0; i < PASSES; i++) {
        const int r = unit.row + row + i * AT_ONCE;
        to[i] = load_or_zero(x + (long long)r * Ldx + k, r < R && chunk < unit.end && k < Din);
      }
    };
#pragma unroll
    for (int i = 0; i < AHEAD; i++) ask(coming[i], unit.begin + i);
    for (int begin = unit.begin; begin < unit.end; begin += AHEAD) {
#pragma unroll
      for (int a = 0; a < AHEAD; a++) {
        if (begin + a == unit.end) break;
        Split parts[PASSES];
#pragma unroll
        for (int i = 0; i < PASSES; i++) parts[i] = split(coming[a][i]);
        ask(coming[a], begin + a + AHEAD);
        wait(ring.empty[turn.place], turn.parity ^ 1);
#pragma unroll
        for (int i = 0; i < PASSES; i++) {
          const int r = row + i * AT_ONCE;
          char* const to = ring.x(turn.place) + r * ROW_BYTES + (lane / 2 ^ r % 8) * 16 + lane % 2 * 8;
          store_eight(to, parts[i].hi);
          store_eight(to + X_TILE, parts[i].lo);
          if (lane == 0) ring.inverse[turn.place * Rows + r] = parts[i].inverse;
        }
        fence_writes();
        __syncwarp();
        if (lane == 0) arrive(ring.full[turn.place]);
        turn.advance();
      }
    }
  }
}

constexpr int STEP = SLABS * Rows <= 16 ? 2 : 1;  // chunks of FP8 that are multiplied together, as registers allow

// What multiplies the lane's features g and g + 8 in each slab of the next STEP chunks, asked for before it is needed.
struct Factors {
  const float* of[SLABS][2];
  float coming[STEP][SLABS][2];

  __device__ __forceinline__ void ask(int chunk, int end) {
#pragma unroll
    for (int i = 0; i < STEP * SLABS * 2; i++) {
      const int n = i / (SLABS * 2), slab = i / 2 % SLABS;
      coming[n][slab][i % 2] = of[slab][i % 2][min(chunk + n, end - 1)];
    }
  }
};

// sum += the products of N chunks, each on its own, then scaled: tensor cores keep some 14 bits while they add up E4M3
// products. inverse: 1 / s of the rows in the first chunk, Pad numbers before those in the next; SPLITS: not used.
template <int N, int S>
__device__ __forceinline__ void add_scaled(
    float (&sum)[SLABS][S], Factors& factors, const float* inverse, int Pad, int chunk, int end, const Ring& ring,
    Turn& turn) {
  constexpr int TOGETHER = SLABS * Rows > 32 ? 1 : 2;  // of hi and lo, as registers allow
  const int lane = threadIdx.x % WARP, own = threadIdx.x / WARP / 4 * SLAB;
  float factor[N][SLABS][2];
  float2 unit_of[N][QUADS];
  int place[N];
#pragma unroll
  for (int i = 0; i < N * SLABS * 2; i++) {
    factor[i / (SLABS * 2)][i / 2 % SLABS][i % 2] = factors.coming[i / (SLABS * 2)][i / 2 % SLABS][i % 2];
  }
  factors.ask(chunk + N, end);
#pragma unroll
  for (int n = 0; n < N; n++, turn.advance()) {
    place[n] = turn.place;
    wait(ring.full[turn.place], turn.parity);
    if constexpr (SPLITS) {
      const float of_row = lane < Rows ? ring.inverse[turn.place * Rows + lane] : 0.0f;
#pragma unroll
      for (int q = 0; q < QUADS; q++) {
        const int row = 8 * q + 2 * (lane % 4);
        unit_of[n][q] = {__shfl_sync(ALL_LANES, of_row, row), __shfl_sync(ALL_LANES, of_row, row + 1)};
      }
    } else {
#pragma unroll
      for (int q = 0; q < QUADS; q++) {
        unit_of[n][q] = *reinterpret_cast<const float2*>(inverse + (chunk + n) * Pad + 8 * q + 2 * (lane % 4));
      }
    }
  }
#pragma unroll
  for (int part = 0; part < 2; part += TOGETHER) {
    float block[N][SLABS][TOGETHER * S];
    wgmma_begin();
#pragma unroll
    for (int i = 0; i < N * SLABS * 4; i++) {
      const int n = i / (SLABS * 4), slab = i / 4 % SLABS;
      const Tile x(ring.x(place[n]) + part * X_TILE);
      wgmma_e4m3(block[n][slab], Tile(ring.w(place[n], slab) + own), x, i % 4);
    }
    wgmma_end();
    wgmma_wait<0>();
    if (part + TOGETHER == 2) {
#pragma unroll
      for (int n = 0; n < N; n++) {
        if (lane < READERS) arrive(ring.empty[place[n]]);
      }
    }
#pragma unroll
    for (int i = 0; i < N * TOGETHER * SLABS * S; i++) {
      const int j = i % S, slab = i / S % SLABS, p = i / S / SLABS % TOGETHER, n = i / S / SLABS / TOGETHER;
      const float unit = (part + p ? 1.0f / 32 : 1.0f) * (j % 2 ? unit_of[n][j / 4].y : unit_of[n][j / 4].x);
      sum[slab][j] = fmaf(factor[n][slab][j / 2 % 2] * unit, block[n][slab][p * S + j], sum[slab][j]);
    }
  }
}

// sum = the unit's part of w x^T, of FP8 w and split x.
template <int S>
__device__ __forceinline__ void multiply_scaled(
    float (&sum)[SLABS][S], Factors& factors, const float* inverse, int Pad, const Unit& unit, const Ring& ring,
    Turn& turn) {
  int chunk = unit.begin;
  for (; (unit.end - chunk) % STEP; chunk++) add_scaled<1>(sum, factors, inverse, Pad, chunk, unit.end, ring, turn);
  for (; chunk < unit.end; chunk += STEP) {
    add_scaled<STEP>(sum, factors, inverse, Pad, chunk, unit.end, ring, turn);
  }
}
