// out = the sum over a row's experts, by rising index, of weight * (down hidden), and then sigmoid(gate) times the shared
// expert's, for up to 8 rows: bf16 hidden, bf16 or FP8 weights. Definition: moe in boleinfer/ops/moe.py. Sums in float32,
// ordered as moe_few.cuh says.
//
// grid: ceil(D / 16); a block owns 16 numbers of every row of out. block: 256. A unit is an expert, the shared one ahead of
// all. Every block chooses by itself, as few_gate_up did; the weights of its first Places units are under way to it, and
// those of the next AHEAD units to L2, before hidden is there.
// shared: Places times 16 rows of weights, 64 bytes for every choice and the shared expert of every row; 5 KB.
// Read twice: hidden and logits, by every block (L2).
//
// arch: 90, 100, 120
// sizes: Wt=bf16 PerLane=8 Places=5 | Wt=fp8 PerLane=16 Places=8
#include "moe_few.cuh"

constexpr int HEIGHT = 16;  // numbers of a row of out in a block
constexpr int AHEAD = 8;

extern "C" __global__ void __launch_bounds__(THREADS, 1) few_down(
    const bf16* __restrict__ hidden,         // [Slots, R, F] aligned 16; slot s + 1, the shared expert's first
    const Wt* __restrict__ weights,          // [E, D, F] aligned 16
    const float* __restrict__ scale,         // [E, (D+127)/128, (F+127)/128] or null; of FP8 weights
    const Wt* __restrict__ shared,           // [D, F] aligned 16 or null; of the shared expert
    const float* __restrict__ shared_scale,  // [(D+127)/128, (F+127)/128] or null
    const float* __restrict__ logits,        // [R, E]
    const float* __restrict__ gate,          // [R] or null; the shared expert's score
    bf16* __restrict__ out,                  // [R, D]
    int R,
    int E,
    int A,
    int D,
    int F,
    int Slots,
    bool norm_topk)
{
  extern __shared__ uint4 dynamic[];
  __shared__ Barrier full[Places];
  __shared__ Choices<THREADS> choices;
  __shared__ float turn_weight[FEW_ROWS * MOST_CHOSEN];  // of a row's experts by rising index
  const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, g = lane / 4, t = lane % 4;
  const int pitch = w_pitch(F), d0 = HEIGHT * blockIdx.x, height = min(HEIGHT, D - d0);
  char* const places = reinterpret_cast<char*>(dynamic);
  char* const place = places + warp * HEIGHT * pitch;
  float* const y = reinterpret_cast<float*>(places + Places * HEIGHT * pitch);  // [R*A + R][HEIGHT], the shared expert's last

  if (threadIdx.x == 0) {
    for (int i = 0; i < Places; i++) make_barrier(full[i], 1);
    barriers_made();
  }
  fill_up(places, Places * HEIGHT, pitch, F, ITEM);
  choices.clear();
  __syncthreads();
  choices.make<PerLane>(logits, R, E, A, norm_topk);  // logits were complete before few_gate_up let this kernel start

  // unit 0 is the shared expert, unit s + 1 that of choices.of[s]
  const int units = 1 + choices.slots, begin = shared ? 0 : 1;
  const auto matrix_of = [&](int u) {
    return (u ? weights + (long long)choices.of[u - 1] * D * F : shared) + (long long)d0 * F;
  };
  float scales_next = 0.0f;  // of FP8, of 128 k number `lane`
  const auto ask = [&](int u) {
    if (lane == 0) arrive_expecting(full[warp], height * F * ITEM);
    __syncwarp();
    if (lane < height) load_run(place + lane * pitch, matrix_of(u) + (long long)lane * F, F * ITEM, full[warp]);
    if (ITEM == 1 && lane < scales_of(F)) {
      const float* all = u ? scale + (long long)choices.of[u - 1] * scales_of(D) * scales_of(F) : shared_scale;
      scales_next = all[d0 / SCALED * scales_of(F) + lane];
    }
  };
  int unit = warp < Places ? begin + warp : units;
  if (unit < units) ask(unit);
  if (const int u = begin + Places + threadIdx.x; threadIdx.x < AHEAD && u < units) {
    prefetch_run(matrix_of(u), height * F * ITEM);
  }

  const auto rank_of = [&](int r, int e) {
    int rank = 0;
    for (int p = r * A; p < r * A + A; p++) rank += choices.expert[p] < e;
    return rank;
  };
  for (int p = threadIdx.x; p < R * A; p += THREADS) {
    const int r = p / A;
    turn_weight[r * A + rank_of(r, choices.expert[p])] = choices.weight[p];
  }
  after_previous();

  const char* const w_row = place + g * pitch;
  for (int parity = 0; unit < units; unit += Places, parity ^= 1) {
    const int e = unit ? choices.of[unit - 1] : -1;
    const unsigned who = unit ? choices.chosen_by[e] : (1u << R) - 1;
    const int row = who >> g & 1 ? g : __ffs(who) - 1;  // what the others give is not used
    const bf16* const x_row = hidden + ((long long)unit * R + row) * F;
    const float scales = scales_next;
    float sum[PARTS][4] = {};
#pragma unroll 2
    for (int s = 0; s < steps_of(F); s++) {
      uint4 x[PARTS][2];
#pragma unroll
      for (int i = 0; i < PARTS * 2; i++) {
        const int at = (s * PARTS + i / 2) * CHUNK + x_bytes(i % 2) / 2;
        x[i / 2][i % 2] = load_or_zero(x_row + at, at < F);
      }
      if (s == 0) wait(full[warp], parity);
#pragma unroll
      for (int c = 0; c < PARTS; c++) {
        const int chunk = s * PARTS + c;
        const Weights low(w_row + chunk * CHUNK * ITEM), high(w_row + 8 * pitch + chunk * CHUNK * ITEM);
        float block[4] = {};
#pragma unroll
        for (int i = 0; i < PRODUCTS; i++) {
          const unsigned a[4] = {low.pair[i][0], high.pair[i][0], low.pair[i][1], high.pair[i][1]};
          const unsigned b[2] = {word(x[c][i / 2], i % 2 * 2), word(x[c][i / 2], i % 2 * 2 + 1)};
          mma_m16n8k16(ITEM == 2 ? sum[c] : block, a, b);
        }
        if constexpr (ITEM == 1) {
          const float factor = __shfl_sync(ALL_LANES, scales, chunk * CHUNK / SCALED);
#pragma unroll
          for (int j = 0; j < 4; j++) sum[c][j] = fmaf(factor, block[j], sum[c][j]);
        }
      }
    }
    __syncwarp();
    if (unit + Places < units) ask(unit + Places);
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int r = 2 * t + i;
      if (!(who >> r & 1)) continue;
      float* const to = y + (unit ? r * A + rank_of(r, e) : R * A + r) * HEIGHT + g;
#pragma unroll
      for (int j = 0; j < 2; j++) to[8 * j] = sum[0][2 * j + i] + sum[1][2 * j + i] + sum[2][2 * j + i] + sum[3][2 * j + i];
    }
  }
  __syncthreads();

  const int r = threadIdx.x / HEIGHT, j = threadIdx.x % HEIGHT;
  if (r >= R || d0 + j >= D) return;
  float sum = 0.0f;
#pragma unroll 4
  for (int p = r * A; p < r * A + A; p++) sum = fmaf(turn_weight[p], y[p * HEIGHT + j], sum);
  if (shared) sum = fmaf(sigmoid(gate[r]), y[(R * A + r) * HEIGHT + j], sum);
  out[(long long)r * D + d0 + j] = from_float<bf16>(sum);
}
