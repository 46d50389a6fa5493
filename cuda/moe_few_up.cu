// hidden = silu(gate x) * up x of every chosen expert and of the shared one, for up to 8 rows: bf16 x, bf16 or FP8 weights.
// Definition: moe in boleinfer/ops/moe.py. Sums in float32, ordered as moe_few.cuh says.
//
// grid: one block a multiprocessor; block: 256. A unit is two features of an expert, their rows of gate and of up; the shared
// expert is ahead of all. Neighbouring blocks' warps take neighbouring units. Rows of x that did not choose an expert are
// multiplied with it all the same. The shared expert's weights are under way before x and the logits are there; every
// block chooses by itself.
// shared: 8 rows of x, 4 Places rows of weights; 4 KB.
// Read twice: x and logits, by every block (L2).
//
// arch: 90, 100, 120
// sizes: Wt=bf16 PerLane=8 Places=5 | Wt=fp8 PerLane=16 Places=8
#include "moe_few.cuh"

// sum[h], for h = 0 and 1: [x, and x one chunk further] [4 rows of weights, and these one chunk further]^T, over the chunks
// 4 s + 2 h. x, w: the lane's rows g, and g % 4 one chunk further from g = 4 on. The lane has part 2 h of the rows of weights
// 2 t and 2 t + 1 in the first two numbers for t < 2, and part 2 h + 1 of those four less in the next two for the others.
__device__ __forceinline__ void multiply(float (&sum)[2][4], const char* x, const char* w, int steps, float2 scales) {
#pragma unroll 2
  for (int s = 0; s < steps; s++) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const int pair = 2 * s + h;
      uint4 near[2], far[2];
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const char* const at = x + pair * 2 * CHUNK * 2 + x_bytes(half);
        near[half] = *reinterpret_cast<const uint4*>(at), far[half] = *reinterpret_cast<const uint4*>(at + CHUNK * 2);
      }
      const Weights weights(w + pair * 2 * CHUNK * ITEM);
      float block[4] = {};
#pragma unroll
      for (int i = 0; i < PRODUCTS; i++) {
        const int j = i % 2 * 2;
        const unsigned a[4] = {word(near[i / 2], j), word(far[i / 2], j), word(near[i / 2], j + 1), word(far[i / 2], j + 1)};
        mma_m16n8k16(ITEM == 2 ? sum[h] : block, a, weights.pair[i]);
      }
      if constexpr (ITEM == 1) {
        const float gate = __shfl_sync(ALL_LANES, scales.x, pair), up = __shfl_sync(ALL_LANES, scales.y, pair);
        const float factor = threadIdx.x % 2 ? up : gate;
#pragma unroll
        for (int j = 0; j < 4; j++) sum[h][j] = fmaf(factor, block[j], sum[h][j]);
      }
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 2) few_gate_up(
    const bf16* __restrict__ x,              // [R, D] aligned 16
    const Wt* __restrict__ weights,          // [E, 2*F, D] aligned 16; gate rows first
    const float* __restrict__ scale,         // [E, (2*F+127)/128, (D+127)/128] or null; of FP8 weights
    const Wt* __restrict__ shared,           // [2*F, D] aligned 16 or null; of the shared expert
    const float* __restrict__ shared_scale,  // [(2*F+127)/128, (D+127)/128] or null
    const float* __restrict__ logits,        // [R, E]
    bf16* __restrict__ hidden,               // [Slots, R, F] aligned 16; slot s + 1, the shared expert's first
    int R,
    int E,
    int A,
    int D,
    int F,
    int Slots,
    bool norm_topk)
{
  extern __shared__ uint4 dynamic[];
  __shared__ Barrier full[Places], x_full;
  __shared__ Choices<THREADS> choices;
  const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, g = lane / 4, t = lane % 4;
  const int pitch = w_pitch(D);
  char* const xs = reinterpret_cast<char*>(dynamic);
  char* const places = xs + FEW_ROWS * x_pitch(D);
  char* const place = places + warp * 4 * pitch;

  if (threadIdx.x == 0) {
    for (int i = 0; i < Places; i++) make_barrier(full[i], 1);
    make_barrier(x_full, 1);
    barriers_made();
  }
  fill_up(xs, FEW_ROWS, x_pitch(D), D, 2);
  fill_up(places, Places * 4, pitch, D, ITEM);
  choices.clear();
  __syncthreads();

  // unit u is features f and f + 1 of slot u / each, of which 0 is the shared expert's and s + 1 that of choices.of[s]
  const int each = F / 2, step = Places * gridDim.x;
  int unit = warp * gridDim.x + blockIdx.x + (shared ? 0 : each);
  float2 scales_next = make_float2(0.0f, 0.0f);  // of FP8, of 128 k number `lane`: x of gate, y of up
  const auto ask = [&](int u) {
    const int slot = u / each, f = u % each * 2;
    const long long e = slot ? choices.of[slot - 1] : 0;
    const Wt* matrix = slot ? weights + e * 2 * F * D : shared;
    if (lane == 0) arrive_expecting(full[warp], 4 * D * ITEM);
    __syncwarp();
    if (lane < 4) {
      const long long row = lane / 2 * F + f + lane % 2;
      load_run(place + lane * pitch, matrix + row * D, D * ITEM, full[warp]);
    }
    if (ITEM == 1 && lane < scales_of(D)) {
      const float* all = slot ? scale + e * scales_of(2 * F) * scales_of(D) : shared_scale;
      scales_next.x = all[f / SCALED * scales_of(D) + lane];
      scales_next.y = all[(F + f) / SCALED * scales_of(D) + lane];
    }
  };
  const bool early = warp < Places && unit < each;
  if (early) ask(unit);
  after_all_previous();  // few_down reads the logits, too

  if (warp == THREADS / WARP - 1) {
    if (lane == 0) arrive_expecting(x_full, R * D * 2);
    __syncwarp();
    if (lane < R) load_run(xs + lane * x_pitch(D), x + (long long)lane * D, D * 2, x_full);
  }
  choices.make<PerLane>(logits, R, E, A, norm_topk);
  if (warp >= Places) return;
  const int units = (1 + choices.slots) * each;
  if (!early && unit < units) ask(unit);
  wait(x_full, 0);

  const char* const x_row = xs + min(g, R - 1) * x_pitch(D);
  const char* const w_row = place + g % 4 * pitch + g / 4 * CHUNK * ITEM;
  for (int parity = 0; unit < units; unit += step, parity ^= 1) {
    const float2 scales = scales_next;
    wait(full[warp], parity);
    float sum[2][4] = {};
    multiply(sum, x_row, w_row, steps_of(D), scales);
    __syncwarp();
    if (unit + step < units) ask(unit + step);

    // the four parts in order; gate of two features in lane 4 g, up in lane 4 g + 1
    float total[2], up[2];
#pragma unroll
    for (int j = 0; j < 2; j++) {
      total[j] = sum[0][j] + __shfl_down_sync(ALL_LANES, sum[0][2 + j], 2);
      total[j] += sum[1][j];
      total[j] += __shfl_down_sync(ALL_LANES, sum[1][2 + j], 2);
      up[j] = __shfl_down_sync(ALL_LANES, total[j], 1);
    }
    const int slot = unit / each, f = unit % each * 2;
    const unsigned who = slot ? choices.chosen_by[choices.of[slot - 1]] : ~0u;
    if (t == 0 && g < R && who >> g & 1) {
      const unsigned two = pack_bf16(silu(total[0]) * up[0], silu(total[1]) * up[1]);
      *reinterpret_cast<unsigned*>(hidden + ((long long)slot * R + g) * F + f) = two;
    }
  }
}
