// A mixture of experts with FP8 weights for up to 8 rows, from the residual stream on: what moe_few.cu does, in the same way. Its
// header says who waits for whom, and why all blocks come.
//
// grid, read twice: as there. block: Places warps, each with a place for a unit: two features of an expert where Rows is 2, else
// four, then 16 numbers of its out. The first unit of a warp is given, and the second one is taken before h is made: once a
// multiprocessor has asked for all its places, what else it needs from L2 comes behind them, microseconds later.
// shared: Rows rows of x, Places places; 9 KB.
//
// Sums are in the order of rms_norm.cu, moe_router.cu and moe_experts.cu, so a row has the same bits with more rows.
//
// arch: 90, 100, 120
// sizes: Wt=fp8 PerLane=16 Places=12 Rows=2 | Wt=fp8 PerLane=16 Places=10 Rows=8
#include "moe_few.cuh"
#include "moe_units_fp8.cuh"

constexpr bool THIN = Rows == 2;  // multiply_thin, else multiply_four
constexpr int FEATURES = THIN ? 2 : 4;  // of hidden, in a unit
constexpr int AT_ONCE = THIN ? 1 : 4;   // rows of h that are under way together

__device__ __forceinline__ int scales_of(int n) { return (n + SCALED - 1) / SCALED; }

extern "C" __global__ void __launch_bounds__(THREADS, 1) few(
    const bf16* stream,                           // [R, D] aligned 16
    const bf16* added,                            // [R, D] aligned 16
    const float* __restrict__ norm,               // [D] aligned 16; the stored weight, a delta to 1
    const bf16* __restrict__ router,              // [E, D] aligned 16
    const bf16* __restrict__ shared_gate,         // [1, D] aligned 16; the shared expert's
    const Wt* __restrict__ gate_up,               // [E, 2*F, D] aligned 16; gate rows first
    const float* __restrict__ up_scale,           // [E, (2*F+127)/128, (D+127)/128]; of gate_up
    const Wt* __restrict__ down,                  // [E, D, F] aligned 16
    const float* __restrict__ down_scale,         // [E, (D+127)/128, (F+127)/128]
    const Wt* __restrict__ shared_up,             // [2*F, D] aligned 16; of the shared expert
    const float* __restrict__ shared_up_scale,    // [(2*F+127)/128, (D+127)/128]
    const Wt* __restrict__ shared_down,           // [D, F] aligned 16
    const float* __restrict__ shared_down_scale,  // [(D+127)/128, (F+127)/128]
    int* counters,                                // [4 + R*(E/4*4+4)] 0 before and after
    bf16* hidden,                                 // [Slots, R, F] aligned 16; slot s + 1, the shared expert's first
    bf16* h,                                      // [R, D] aligned 16
    bf16* out,                                    // [R, D]
    int R,
    int E,
    int A,
    int D,
    int F,
    int Slots,
    float eps,
    bool norm_topk)
{
  extern __shared__ uint4 dynamic[];
  __shared__ Barrier full[Places];
  __shared__ Choices<THREADS> choices;
  __shared__ float squares[Rows][MOST_SPANS], parts[ROUTED][Rows * SCORES];
  __shared__ float turn_weight[FEW_ROWS * MOST_CHOSEN];  // of a row's experts by rising index
  __shared__ unsigned char turn_of[FEW_ROWS * MOST_CHOSEN][FEW_ROWS];  // of slot s + 1 among those of a row
  const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, g = lane / 4, t = lane % 4;
  const int up_bytes = D * ITEM, down_bytes = F * ITEM, x_pitch = D * 2 + X_PAD;
  char* const xs = reinterpret_cast<char*>(dynamic);
  float* const y = reinterpret_cast<float*>(dynamic);  // [R*A + R][HEIGHT], the shared expert's last; when x is done with
  char* const place = xs + Rows * max(x_pitch, (A + 1) * HEIGHT * 4) + warp * max(2 * FEATURES * up_bytes, HEIGHT * down_bytes);

  if (threadIdx.x < Places) {
    make_barrier(full[threadIdx.x], 1);
    barriers_made();
  }
  choices.clear();
  __syncthreads();

  // unit u of the first product is some features of slot u / each; 0 is the shared expert's, s + 1 that of of[s]
  const int each = F / FEATURES;
  const unsigned factor = ~0u / each + 1;  // 2^32 / each, rounded up
  const auto slot_of = [&](int u) { return (int)__umulhi(u, factor); };
  const int step = Places * gridDim.x;
  int unit = warp * gridDim.x + blockIdx.x;
  float2 scales = {};  // of what is in the place, of 128 k number `lane`: x of gate or down, y of up
  const auto ask = [&](int u) {
    const int slot = slot_of(u), f = (u - slot * each) * FEATURES;
    const long long e = slot ? choices.of[slot - 1] : 0;
    const Wt* matrix = (slot ? gate_up + e * 2 * F * D : shared_up) + (long long)f * D;
    if (lane == 0) {
      arrive_expecting(full[warp], 2 * FEATURES * up_bytes);
      load_run(place, matrix, FEATURES * up_bytes, full[warp]);
      load_run(place + FEATURES * up_bytes, matrix + (long long)F * D, FEATURES * up_bytes, full[warp]);
    }
    if (lane < scales_of(D)) {
      const float* own = (slot ? up_scale + e * scales_of(2 * F) * scales_of(D) : shared_up_scale) + lane;
      scales = make_float2(own[f / SCALED * scales_of(D)] * LOWERED, own[(F + f) / SCALED * scales_of(D)] * LOWERED);
    }
  };
  const bool early = unit < each;
  if (early) ask(unit);

  const int spans = D / SPAN;
  Pack<bf16, N> w[SCORES] = {};  // a lane's numbers of the router's rows, and of norm
  Pack<float, N> delta = {};
  const int own_k = warp * SPAN + lane * N;
  read_ahead(w, delta, router, shared_gate, norm, own_k, E, D);
  after_previous();
  const auto take = [&] { return lane == 0 ? step + atomicAdd(counters + TAKEN, 1) : 0; };
  int next = step < Slots * each ? take() : step;

  // By warps that have no part of h, if there are such: theirs is the time that the fence takes.
  const int filling = Places > spans ? Places - spans : Places, filler = (Places - 1 - warp) * WARP + lane;
  for (int i = blockIdx.x * filling * WARP + filler; filler < filling * WARP; i += gridDim.x * filling * WARP) {
    if (i >= Slots * R * F / N) {
      if (i >= gridDim.x * filling * WARP) fence_device();
      break;
    }
    reinterpret_cast<uint4*>(hidden)[i] = make_uint4(NOT_THERE, NOT_THERE, NOT_THERE, NOT_THERE);
  }

  // h = stream + added, and its squares
  const auto x_at = [&](int r, int k) { return reinterpret_cast<bf16*>(xs + r * x_pitch) + k; };
  const auto pairs_at = [&](int r, int k) { return reinterpret_cast<uint4*>(x_at(r, k)); };
  make_h<AT_ONCE>(squares, stream, added, R, D, [&](int r, int k, const Pack<bf16, N>& a, const Pack<bf16, N>& b) {
    unsigned pairs[N / 2];
    float square = 0.0f;
#pragma unroll
    for (int i = 0; i < N; i += 2) {
      const Pair own(to_float(a.v[i]) + to_float(b.v[i]), to_float(a.v[i + 1]) + to_float(b.v[i + 1]));
      pairs[i / 2] = own.bits;
      square = fmaf(own.second, own.second, fmaf(own.first, own.first, square));
    }
    *pairs_at(r, k) = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
    return square;
  });
  __syncthreads();

  // x = h / sqrt(mean h^2 + eps) * (1 + norm)
  float mean[Rows];
#pragma unroll
  for (int r = 0; r < Rows; r++) mean[r] = r < R && lane < spans ? squares[r][lane] : 0.0f;
  const float scale_of = 1.0f / sqrtf(transposed_sum(mean) / D + eps);  // of row lane / (WARP / Rows)
  make_x(
      h, norm, delta, R, D, x_at, [&](int r) { return __shfl_sync(ALL_LANES, scale_of, r * (WARP / Rows)); },
      [&](int r, int k, const Normed& x) {
        unsigned pairs[N / 2];
#pragma unroll
        for (int i = 0; i < N / 2; i++) pairs[i] = lifted_pair(x[2 * i], x[2 * i + 1]);
        *pairs_at(r, k) = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
      });
  if (spans > ROUTED) __syncthreads();  // else a warp reads what it wrote

  // scores = x router^T; a warp has spans v, v + ROUTED, .. of the row
  const Scores scores(counters, E);
  for (int first = blockIdx.x; first <= E; first += SCORES * gridDim.x) {
    for (int v = warp; v < min(ROUTED, spans); v += Places) {
      float total[Rows * SCORES] = {};
      for (int k = v * SPAN + lane * N; k < D; k += ROUTED * SPAN) {
        if (first != blockIdx.x || k != own_k) read_router(w, router, shared_gate, first, k, E, D);
        add_products(total, w, k, R, x_at);
      }
      constexpr int SHARING = WARP / (Rows * SCORES);  // lanes that have the same sum
      const float sum = transposed_sum(total);
      if (lane % SHARING == 0) parts[v][lane / SHARING] = sum;
    }
    scores.show(parts, first, R, spans, [](float score) { return score * (1.0f / LIFTED); });
  }
  choices.make<PerLane>([&](int r, unsigned (&key)[PerLane]) { scores.await(r, key); }, R, A, norm_topk);

  // unit v of the second product is numbers d0 .. d0 + 15 of slot v % slots, for all slots, then 16 others
  const int slots = 1 + choices.slots, own_tiles = (D / HEIGHT - 1 - (int)blockIdx.x + (int)gridDim.x) / (int)gridDim.x;
  int tile_asked = 0, slot_asked = warp;  // for when this warp asks
  const auto ask_down = [&] {
    for (; slot_asked >= slots; slot_asked -= slots) tile_asked++;
    if (tile_asked >= own_tiles) return;
    const int slot = slot_asked, d0 = (tile_asked * gridDim.x + blockIdx.x) * HEIGHT;
    slot_asked += Places;
    const long long e = slot ? choices.of[slot - 1] : 0;
    ask_tile(slot ? down + e * D * F : shared_down, d0, F, place, full[warp]);
    if (lane < scales_of(F)) {
      const float* own = slot ? down_scale + e * scales_of(D) * scales_of(F) : shared_down_scale;
      scales.x = own[d0 / SCALED * scales_of(F) + lane] * LOWERED;
    }
  };

  const int units = slots * each;
#pragma unroll 1
  for (int p = threadIdx.x; p < R * A; p += THREADS) {
    const int r = p / A, e = choices.expert[p];
    int turn = 0;
#pragma unroll 1
    for (int q = r * A; q < r * A + A; q++) turn += choices.expert[q] < e;
    turn_weight[r * A + turn] = choices.weight[p];
    turn_of[choices.slot_of[e]][r] = turn;
  }
  const char* const x_row = xs + (THIN ? min(g % 2, R - 1) * x_pitch + g / 2 * CHUNK * 2 : min(g, R - 1) * x_pitch);
  const char* const w_row = place + g / 2 * up_bytes + g % 2 * CHUNK;
  int done = -1;  // units and tiles that were multiplied; -1: nor is one asked for, but those of the shared expert
#pragma unroll 1
  for (; done < 0 || unit < units; done++) {
    float two[2], four[2][4];
    const int now = unit;
    if (done >= 0) {
      wait(full[warp], done % 2);
      if constexpr (THIN) {
        multiply_thin(two, x_row, w_row, D, scales);
      } else {
        multiply_four(four, x_row, w_row, FEATURES * up_bytes, D, scales);
      }
      __syncwarp();
      unit = __shfl_sync(ALL_LANES, next, 0);
    }
    if (unit >= units) {
      ask_down();
    } else {
      if (done >= 0) next = take();
      if (done >= 0 || !early) ask(unit);
    }
    if (done < 0) continue;

    // the four parts in order, then silu(gate) * up of two features, the second one's 8 lanes behind
    float hid[2];
    const auto behind = [](float x, int lanes) { return __shfl_down_sync(ALL_LANES, x, lanes); };
#pragma unroll
    for (int i = 0; i < 2; i++) {
      if constexpr (THIN) {
        const float total = two[i] + behind(two[i], 5) + behind(two[i], 2) + behind(two[i], 7);
        hid[i] = silu(total) * behind(total, 16);
      } else {
        const auto total = [&](int j) { return four[0][j] + behind(four[0][j], 4) + four[1][j] + behind(four[1][j], 4); };
        hid[i] = silu(total(i)) * total(2 + i);
      }
    }
    const int slot = slot_of(now), f = (now - slot * each) * FEATURES;
    const unsigned who = slot ? choices.chosen_by[choices.of[slot - 1]] : ~0u;
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const unsigned pair = lifted_pair(hid[i], behind(hid[i], 8));
      const int row = THIN ? i : 2 * t + i;
      if ((THIN ? lane == 0 : g % 4 == 0) && row < R && who >> row & 1) {
        *reinterpret_cast<unsigned*>(hidden + ((long long)slot * R + row) * F + f + (THIN ? 0 : g / 2)) = pair;
      }
    }
  }
  const int r = threadIdx.x / HEIGHT, j = threadIdx.x % HEIGHT;  // of out
  float share = 0.0f;
  if (r < R) share = scores.share(r);
  __syncthreads();
  if (warp == Places - 1) scores.leave(counters, R);

  const auto rows_of = [&](int slot) { return slot ? choices.chosen_by[choices.of[slot - 1]] : (1u << R) - 1; };
  const auto hidden_of = [&](int slot) {  // row g of a slot; of one that did not choose it, which is not used, another
    const unsigned who = rows_of(slot);
    return hidden + ((long long)slot * R + (who >> g & 1 ? g : __ffs(who) - 1)) * F;
  };
  uint4 words[WORDS];
  int first_slot = warp;
  while (first_slot >= slots) first_slot -= slots;
  read_step(words, hidden_of(first_slot));
#pragma unroll 1
  for (int i = 0, slot = warp; i < own_tiles; i++, slot -= slots) {
#pragma unroll 1
    for (; slot < slots; slot += Places, done++) {
      int after = slot + Places;
      while (after >= slots) after -= slots;
      float sum[4];
      multiply_tile_ahead(
          sum, words, hidden_of(slot), hidden_of(after), place + g * down_bytes, 8 * down_bytes, F, scales.x,
          [&] { wait(full[warp], done % 2); });
      __syncwarp();
      ask_down();
      const unsigned who = rows_of(slot);
#pragma unroll
      for (int n = 0; n < 2; n++) {  // the lane's columns
        const int row = 2 * t + n;
        if (!(who >> row & 1)) continue;
        float* const to = y + (slot ? row * A + turn_of[slot - 1][row] : R * A + row) * HEIGHT + g;
        to[0] = sum[n], to[8] = sum[2 + n];
      }
    }
    __syncthreads();
    if (r < R) out[r * D + (i * gridDim.x + blockIdx.x) * HEIGHT + j] = combine(turn_weight, y, share, r, j, R, A);
    __syncthreads();
  }
}
