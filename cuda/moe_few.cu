// moe for up to 8 rows, from the router's scores on: out = the sum over a row's experts, by rising index, of weight *
// down (silu(gate x) * up x), and then sigmoid(gate) times the shared expert's; bf16 x, bf16 or FP8 weights. Definition:
// boleinfer/ops/moe.py. Sums in float32; hidden is rounded to bf16.
//
// grid: at most one block a multiprocessor, all there at once: they wait for one another between the two products. That
// they all come: each finds room on an empty multiprocessor; kernels before this one end without it, and give theirs back;
// blocks of the next one start when every block here has passed after_previous(), so they take nobody's room; and a stream
// has the device to itself, since two such kernels side by side could each hold what the other waits for.
// block: Places warps. Each has a place in shared memory for a unit's weights: it asks for whole rows of them, waits, multiplies,
// and asks for its next unit. A unit is first two features of an expert, with their rows of gate and of up, for any warp
// that is free (multiprocessors read at different speeds), and then 16 numbers of an expert's out, of which a block has
// all experts. So memory is busy all the time: the shared expert's weights are under way before x and the scores are
// there, and those of the second product while blocks wait. Rows of x that did not choose an expert are multiplied with
// it all the same. Every block chooses by itself.
// shared: 8 rows of x, Places places; 4 KB.
// Read twice: x, scores and hidden, by every block (L2).
//
// It is long, since two launches would have to share the shared memory that keeps the stream of weights whole.
//
// The order of sums is that of moe_experts.cu: chunks of k (linear.cuh) c, c + 4, c + 8, ... in turn, for c = 0 .. 3, and
// then these four, so a row has the same bits with more rows.
//
// arch: 90, 100, 120
// sizes: Wt=bf16 PerLane=8 Places=10 | Wt=fp8 PerLane=16 Places=11
#include "bulk.cuh"
#include "linear.cuh"
#include "moe_choice.cuh"

constexpr int THREADS = WARP * Places;
constexpr int ITEM = sizeof(Wt);                        // bytes of a weight
constexpr int W_PAD = 64, X_PAD = ITEM == 2 ? 64 : 16;  // bytes behind a row, so that lanes read from different banks
constexpr int PRODUCTS = CHUNK / 16, PARTS = 4, STEP = PARTS * CHUNK;  // of a chunk; of k
constexpr int HEIGHT = 16;                              // numbers of out in a unit

__device__ __forceinline__ int scales_of(int n) { return (n + SCALED - 1) / SCALED; }

// The lane's part of a row's chunk of x, from the chunk's start, in bytes: 16 for products 0 and 1, 16 for 2 and 3.
__device__ __forceinline__ int x_bytes(int half) {
  return ITEM == 2 ? threadIdx.x % 4 * 16 + half * 64 : threadIdx.x % 4 * 32 + half * 16;
}

// The lane's part of a row's chunk of weights: two numbers, and two 8 k further in the product, for each product.
struct Weights {
  unsigned pair[PRODUCTS][2];

  __device__ __forceinline__ explicit Weights(const char* chunk) {
    const char* const own = chunk + threadIdx.x % 4 * 16;
    if constexpr (ITEM == 2) {
#pragma unroll
      for (int half = 0; half < 2; half++) memcpy(pair[2 * half], __builtin_assume_aligned(own + 64 * half, 16), 16);
    } else {
      const uint4 all = *reinterpret_cast<const uint4*>(own);
#pragma unroll
      for (int i = 0; i < PRODUCTS; i++) widen(word(all, i), pair[i][0], pair[i][1]);
    }
  }
};

// sum[h], for h = 0 and 1: [x, and x one chunk further] [4 rows of weights, and these one chunk further]^T, over the chunks
// 4 s + 2 h. x, w: the lane's rows g, and g % 4 one chunk further from g = 4 on. The lane has part 2 h of the rows of weights
// 2 t and 2 t + 1 in the first two numbers for t < 2, and part 2 h + 1 of those four less in the next two for the others.
// scales: of 128 k number `lane`, x of gate, y of up.
__device__ __forceinline__ void multiply_two(float (&sum)[2][4], const char* x, const char* w, int K, float2 scales) {
#pragma unroll 2
  for (int s = 0; s < K / STEP; s++) {
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

// sum[c]: part c of [16 rows of weights] [x]^T. x: the lane's row g, in memory; w: its rows g and, `further`, g + 8.
// here(): waits for the weights. scale: of 128 k number `lane`.
template <class Here>
__device__ __forceinline__ void multiply_tile(
    float (&sum)[PARTS][4], const bf16* x, const char* w, int further, int K, float scale, Here here) {
#pragma unroll 1
  for (int s = 0; s < K / STEP; s++) {
    uint4 xs[PARTS][2];
#pragma unroll
    for (int i = 0; i < PARTS * 2; i++) {
      const bf16* const at = x + (s * PARTS + i / 2) * CHUNK + x_bytes(i % 2) / 2;
      xs[i / 2][i % 2] = __ldcg(reinterpret_cast<const uint4*>(at));
    }
    if (s == 0) here();
#pragma unroll
    for (int c = 0; c < PARTS; c++) {
      const int chunk = s * PARTS + c;
      const Weights low(w + chunk * CHUNK * ITEM), high(w + further + chunk * CHUNK * ITEM);
      float block[4] = {};
#pragma unroll
      for (int i = 0; i < PRODUCTS; i++) {
        const unsigned a[4] = {low.pair[i][0], high.pair[i][0], low.pair[i][1], high.pair[i][1]};
        const unsigned b[2] = {word(xs[c][i / 2], i % 2 * 2), word(xs[c][i / 2], i % 2 * 2 + 1)};
        mma_m16n8k16(ITEM == 2 ? sum[c] : block, a, b);
      }
      if constexpr (ITEM == 1) {
        const float factor = __shfl_sync(ALL_LANES, scale, chunk * CHUNK / SCALED);
#pragma unroll
        for (int j = 0; j < 4; j++) sum[c][j] = fmaf(factor, block[j], sum[c][j]);
      }
    }
  }
}

enum { ARRIVED, LEFT, TAKEN, COUNTED };  // counters, 0 before and after: blocks that met, units that were taken

// Waits until all blocks are here; what they wrote before can then be read, and nobody takes units any more.
__device__ __forceinline__ void meet(int* counters) {
  __syncthreads();
  if (threadIdx.x == 0) {
    const int blocks = gridDim.x;
    __threadfence();
    atomicAdd(counters + ARRIVED, 1);
    while (*reinterpret_cast<volatile int*>(counters + ARRIVED) < blocks) {
    }
    if (atomicAdd(counters + LEFT, 1) == blocks - 1) {
      for (int i = 0; i < COUNTED; i++) counters[i] = 0;
    }
    __threadfence();
  }
  __syncthreads();
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) few(
    const bf16* x,                                // [R, D] aligned 16
    const Wt* __restrict__ gate_up,               // [E, 2*F, D] aligned 16; gate rows first
    const float* __restrict__ up_scale,           // [E, (2*F+127)/128, (D+127)/128] or null; of FP8 weights
    const Wt* __restrict__ down,                  // [E, D, F] aligned 16
    const float* __restrict__ down_scale,         // [E, (D+127)/128, (F+127)/128] or null
    const Wt* __restrict__ shared_up,             // [2*F, D] aligned 16 or null; of the shared expert
    const float* __restrict__ shared_up_scale,    // [(2*F+127)/128, (D+127)/128] or null
    const Wt* __restrict__ shared_down,           // [D, F] aligned 16 or null
    const float* __restrict__ shared_down_scale,  // [(D+127)/128, (F+127)/128] or null
    const float* logits,                          // [R, E]
    const float* gate,                            // [R] or null; the shared expert's score
    int* counters,                                // [Counters] 0 before and after
    bf16* hidden,                                 // [Slots, R, F] aligned 16; slot s + 1, the shared expert's first
    bf16* out,                                    // [R, D]
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
  __shared__ float turn_weight[FEW_ROWS * MOST_CHOSEN];  // of a row's experts by rising index
  const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, g = lane / 4, t = lane % 4;
  const int up_pitch = D * ITEM + W_PAD, down_pitch = F * ITEM + W_PAD, x_pitch = D * 2 + X_PAD;
  char* const xs = reinterpret_cast<char*>(dynamic);
  float* const y = reinterpret_cast<float*>(dynamic);  // [R*A + R][HEIGHT], the shared expert's last; when x is done with
  char* const place = xs + FEW_ROWS * max(x_pitch, (A + 1) * HEIGHT * 4) + warp * max(4 * up_pitch, HEIGHT * down_pitch);

  if (threadIdx.x == 0) {
    for (int i = 0; i < Places; i++) make_barrier(full[i], 1);
    make_barrier(x_full, 1);
    barriers_made();
  }
  choices.clear();
  __syncthreads();

  // unit u of the first product is features f and f + 1 of slot u / each; 0 is the shared expert's, s + 1 that of of[s]
  const int each = F / 2, step = Places * gridDim.x;
  int unit = warp * gridDim.x + blockIdx.x + (shared_up ? 0 : each);
  float2 scales_next = make_float2(0.0f, 0.0f);  // of FP8, of 128 k number `lane`: x of gate or down, y of up
  const auto ask = [&](int u) {
    const int slot = u / each, f = u % each * 2;
    const long long e = slot ? choices.of[slot - 1] : 0;
    const Wt* matrix = slot ? gate_up + e * 2 * F * D : shared_up;
    if (lane == 0) arrive_expecting(full[warp], 4 * D * ITEM);
    __syncwarp();
    if (lane < 4) {
      const long long row = lane / 2 * F + f + lane % 2;
      load_run(place + lane * up_pitch, matrix + row * D, D * ITEM, full[warp]);
    }
    if (ITEM == 1 && lane < scales_of(D)) {
      const float* all = slot ? up_scale + e * scales_of(2 * F) * scales_of(D) : shared_up_scale;
      scales_next.x = all[f / SCALED * scales_of(D) + lane];
      scales_next.y = all[(F + f) / SCALED * scales_of(D) + lane];
    }
  };
  const bool early = unit < each;
  if (early) ask(unit);
  after_previous();

  if (warp == Places - 1) {
    if (lane == 0) arrive_expecting(x_full, R * D * 2);
    __syncwarp();
    if (lane < R) load_run(xs + lane * x_pitch, x + (long long)lane * D, D * 2, x_full);
  }
  choices.make<PerLane>(logits, R, E, A, norm_topk);

  // unit v of the second product is numbers d0 .. d0 + 15 of slot v % slots + begin, for all slots, then 16 others
  const int begin = shared_down ? 0 : 1, slots = choices.slots + 1 - begin, tiles = (D + HEIGHT - 1) / HEIGHT;
  const int own_tiles = (tiles - 1 - (int)blockIdx.x + (int)gridDim.x) / (int)gridDim.x;
  const auto ask_down = [&](int v) {
    if (v >= own_tiles * slots) return;
    const int slot = v % slots + begin, d0 = (v / slots * gridDim.x + blockIdx.x) * HEIGHT, height = min(HEIGHT, D - d0);
    const long long e = slot ? choices.of[slot - 1] : 0;
    const Wt* matrix = slot ? down + e * D * F : shared_down;
    if (lane == 0) arrive_expecting(full[warp], height * F * ITEM);
    __syncwarp();
    if (lane < height) load_run(place + lane * down_pitch, matrix + (long long)(d0 + lane) * F, F * ITEM, full[warp]);
    if (ITEM == 1 && lane < scales_of(F)) {
      const float* all = slot ? down_scale + e * scales_of(D) * scales_of(F) : shared_down_scale;
      scales_next.x = all[d0 / SCALED * scales_of(F) + lane];
    }
  };

  const int units = (1 + choices.slots) * each;
  if (!early) unit < units ? ask(unit) : ask_down(warp);
  const auto take = [&] { return lane == 0 ? begin * each + step + atomicAdd(counters + TAKEN, 1) : 0; };
  int parity = 0, next = unit < units ? take() : units;
  wait(x_full, 0);
  const char* const x_row = xs + min(g, R - 1) * x_pitch;
  const char* const w_row = place + g % 4 * up_pitch + g / 4 * CHUNK * ITEM;
  for (; unit < units; parity ^= 1) {
    const float2 scales = scales_next;
    wait(full[warp], parity);
    float sum[2][4] = {};
    multiply_two(sum, x_row, w_row, D, scales);
    __syncwarp();
    const int now = unit;
    unit = __shfl_sync(ALL_LANES, next, 0);
    if (unit < units) {
      ask(unit);
      next = take();
    } else {
      ask_down(warp);
    }

    // the four parts in order; gate of two features in lane 4 g, up in lane 4 g + 1
    float total[2], up[2];
#pragma unroll
    for (int j = 0; j < 2; j++) {
      total[j] = sum[0][j] + __shfl_down_sync(ALL_LANES, sum[0][2 + j], 2);
      total[j] += sum[1][j];
      total[j] += __shfl_down_sync(ALL_LANES, sum[1][2 + j], 2);
      up[j] = __shfl_down_sync(ALL_LANES, total[j], 1);
    }
    const int slot = now / each, f = now % each * 2;
    const unsigned who = slot ? choices.chosen_by[choices.of[slot - 1]] : ~0u;
    if (t == 0 && g < R && who >> g & 1) {
      const unsigned two = pack_bf16(silu(total[0]) * up[0], silu(total[1]) * up[1]);
      *reinterpret_cast<unsigned*>(hidden + ((long long)slot * R + g) * F + f) = two;
    }
  }
  const auto rank_of = [&](int r, int e) {  // of expert e among those of row r
    int rank = 0;
    for (int p = r * A; p < r * A + A; p++) rank += choices.expert[p] < e;
    return rank;
  };
  for (int p = threadIdx.x; p < R * A; p += THREADS) {
    const int r = p / A;
    turn_weight[r * A + rank_of(r, choices.expert[p])] = choices.weight[p];
  }
  const int r = threadIdx.x / HEIGHT, j = threadIdx.x % HEIGHT;  // of out
  const float part = shared_down && r < R ? sigmoid(gate[r]) : 0.0f;
  meet(counters);

  for (int i = 0, v = warp; i < own_tiles; i++) {
    for (; v < (i + 1) * slots; v += Places, parity ^= 1) {
      const int slot = v % slots + begin, e = slot ? choices.of[slot - 1] : -1;
      const unsigned who = slot ? choices.chosen_by[e] : (1u << R) - 1;
      const int own = who >> g & 1 ? g : __ffs(who) - 1;  // what the others give is not used
      float sum[PARTS][4] = {};
      multiply_tile(
          sum, hidden + ((long long)slot * R + own) * F, place + g * down_pitch, 8 * down_pitch, F, scales_next.x,
          [&] { wait(full[warp], parity); });
      __syncwarp();
      ask_down(v + Places);
#pragma unroll
      for (int n = 0; n < 2; n++) {
        const int row = 2 * t + n;
        if (!(who >> row & 1)) continue;
        float* const to = y + (slot ? row * A + rank_of(row, e) : R * A + row) * HEIGHT + g;
        to[0] = sum[0][n] + sum[1][n] + sum[2][n] + sum[3][n];
        to[8] = sum[0][2 + n] + sum[1][2 + n] + sum[2][2 + n] + sum[3][2 + n];
      }
    }
    __syncthreads();
    const int d = (i * gridDim.x + blockIdx.x) * HEIGHT + j;
    if (r < R && d < D) {
      float sum = 0.0f;
#pragma unroll 4
      for (int p = r * A; p < r * A + A; p++) sum = fmaf(turn_weight[p], y[p * HEIGHT + j], sum);
      if (shared_down) sum = fmaf(part, y[(R * A + r) * HEIGHT + j], sum);
      out[(long long)r * D + d] = from_float<bf16>(sum);
    }
    __syncthreads();
  }
}
