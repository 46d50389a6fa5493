// A mixture of experts for up to 8 rows, from the residual stream on: h = stream + added, x = rms_norm(h), the router's
// scores, each row's choice, and out = the sum over its experts, by rising index, of weight * down (silu(gate x) * up x),
// and then sigmoid(score) times the shared expert's; of bf16; FP8 weights: moe_few_fp8.cu. Definitions: add_rms_norm in
// boleinfer/ops/norms.py, route and moe in boleinfer/ops/moe.py. Sums in float32; hidden is rounded to bf16.
//
// grid: at most one block a multiprocessor and one a score, all there at once: they wait for one another's scores, and between
// the two products. That they all come: each finds room on an empty multiprocessor; kernels before this one end without it, and
// give theirs back; blocks of the next one start when every block here has passed after_previous(), so they take nobody's
// room; and a stream has the device to itself, since two such kernels side by side could each hold what the other waits for.
// block: Places warps. All blocks make x and choose; each makes the scores of some experts. Then a warp has a place in shared
// memory for a unit's weights: it asks for them, one or two runs of rows, waits, multiplies, and asks for its next unit. A unit is
// first two features of an expert, with their rows of gate and of up, for any warp that is free (multiprocessors read at
// different speeds), and then 16 numbers of an expert's out, of which a block has all experts. So memory is busy all the
// time: the shared expert's weights and the router are under way before h is there, and those of the second product while
// others still make hidden. Rows of x that did not choose an expert are multiplied with it all the same.
// shared: 8 rows of x, Places places; 8 KB.
// Read twice: stream, added, scores and hidden, by every block (L2).
//
// Nobody waits for a count of blocks: scores are 0 until they are there, and hidden is NOT_THERE, which every block
// writes to its part of it before it shows a score.
//
// It is long, since several launches would have to share the shared memory that keeps the stream of weights whole.
//
// Sums are in the order of rms_norm.cu, moe_router.cu and moe_experts.cu, so a row has the same bits with more rows.
//
// arch: 90, 100, 120
// sizes: Wt=bf16 PerLane=8 Places=10
// spills: sm_100 and sm_120, bf16: four registers, while 64 take what others write of hidden
#include "moe_few.cuh"

constexpr int AT_ONCE = 4;  // rows of h that are under way together

extern "C" __global__ void __launch_bounds__(THREADS, 1) few(
    const bf16* stream,                           // [R, D] aligned 16
    const bf16* added,                            // [R, D] aligned 16
    const float* __restrict__ norm,               // [D] aligned 16; the stored weight, a delta to 1
    const bf16* __restrict__ router,              // [E, D] aligned 16
    const bf16* __restrict__ shared_gate,         // [1, D] aligned 16; the shared expert's
    const Wt* __restrict__ gate_up,               // [E, 2*F, D] aligned 16; gate rows first
    const Wt* __restrict__ down,                  // [E, D, F] aligned 16
    const Wt* __restrict__ shared_up,             // [2*F, D] aligned 16; of the shared expert
    const Wt* __restrict__ shared_down,           // [D, F] aligned 16
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
  __shared__ float squares[FEW_ROWS][MOST_SPANS], parts[ROUTED][FEW_ROWS * SCORES];
  __shared__ float turn_weight[FEW_ROWS * MOST_CHOSEN];  // of a row's experts by rising index
  const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, g = lane / 4, t = lane % 4;
  const int up_bytes = D * ITEM, down_bytes = F * ITEM, x_pitch = D * 2 + X_PAD;
  char* const xs = reinterpret_cast<char*>(dynamic);
  float* const y = reinterpret_cast<float*>(dynamic);  // [R*A + R][HEIGHT], the shared expert's last; when x is done with
  char* const place = xs + FEW_ROWS * max(x_pitch, (A + 1) * HEIGHT * 4) + warp * max(4 * up_bytes, HEIGHT * down_bytes);

  if (threadIdx.x == 0) {
    for (int i = 0; i < Places; i++) make_barrier(full[i], 1);
    barriers_made();
  }
  choices.clear();
  __syncthreads();

  // unit u of the first product is features f and f + 1 of slot u / each; 0 is the shared expert's, s + 1 that of of[s]
  const int each = F / 2, step = Places * gridDim.x;
  int unit = warp * gridDim.x + blockIdx.x;
  const auto ask = [&](int u) {
    const int slot = u / each, f = u % each * 2;
    const long long e = slot ? choices.of[slot - 1] : 0;
    const Wt* matrix = slot ? gate_up + e * 2 * F * D : shared_up;
    if (lane == 0) {
      arrive_expecting(full[warp], 4 * up_bytes);
      load_run(place, matrix + (long long)f * D, 2 * up_bytes, full[warp]);
      load_run(place + 2 * up_bytes, matrix + (long long)(F + f) * D, 2 * up_bytes, full[warp]);
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

  const int empty = Slots * R * F / N;  // words of hidden
  for (int i = blockIdx.x * THREADS + threadIdx.x; i < empty; i += gridDim.x * THREADS) {
    reinterpret_cast<uint4*>(hidden)[i] = make_uint4(NOT_THERE, NOT_THERE, NOT_THERE, NOT_THERE);
  }

  // h = stream + added, and its squares
  const auto x_at = [&](int r, int k) { return reinterpret_cast<bf16*>(xs + r * x_pitch) + k; };
  make_h<AT_ONCE>(squares, stream, added, R, D, [&](int r, int k, Pack<bf16, N>& sum, const Pack<bf16, N>& more) {
    float square = 0.0f;
#pragma unroll
    for (int i = 0; i < N; i++) {
      sum.v[i] = from_float<bf16>(to_float(sum.v[i]) + to_float(more.v[i]));
      square = fmaf(to_float(sum.v[i]), to_float(sum.v[i]), square);
    }
    store<N>(x_at(r, k), sum);
    return square;
  });
  __syncthreads();

  // x = h / sqrt(mean h^2 + eps) * (1 + norm)
  make_x(
      h, norm, delta, R, D, x_at,
      [&](int r) { return 1.0f / sqrtf(warp_sum(lane < spans ? squares[r][lane] : 0.0f) / D + eps); },
      [&](int r, int k, const Normed& x) {
        Pack<bf16, N> rounded;
#pragma unroll
        for (int i = 0; i < N; i++) rounded.v[i] = from_float<bf16>(x[i]);
        store<N>(x_at(r, k), rounded);
      });
  if (spans > ROUTED) __syncthreads();  // else a warp reads what it wrote

  // scores = x router^T; a warp has spans v, v + ROUTED, .. of the row
  const Scores scores(counters, E);
  for (int first = blockIdx.x; first <= E; first += SCORES * gridDim.x) {
    for (int v = warp; v < min(ROUTED, spans); v += Places) {
      float total[FEW_ROWS * SCORES] = {};
      for (int k = v * SPAN + lane * N; k < D; k += ROUTED * SPAN) {
        if (first != blockIdx.x || k != own_k) read_router(w, router, shared_gate, first, k, E, D);
        add_products(total, w, k, R, x_at);
      }
#pragma unroll
      for (int r = 0; r < FEW_ROWS; r++) {
        if (r >= R) break;
#pragma unroll
        for (int i = 0; i < SCORES; i++) {
          const float part = warp_sum(total[r * SCORES + i]);
          if (lane == 0) parts[v][r * SCORES + i] = part;
        }
      }
    }
    scores.show(parts, first, R, spans, [&](float score) {
      if (blockIdx.x * THREADS < empty) fence_device();
      return score;
    });
  }
  choices.make<PerLane>([&](int r, unsigned (&key)[PerLane]) { scores.await(r, key); }, R, A, norm_topk);

  // unit v of the second product is numbers d0 .. d0 + 15 of slot v % slots, for all slots, then 16 others
  const int slots = 1 + choices.slots, own_tiles = (D / HEIGHT - 1 - (int)blockIdx.x + (int)gridDim.x) / (int)gridDim.x;
  const auto ask_down = [&](int v) {
    if (v >= own_tiles * slots) return;
    const int slot = v % slots, d0 = (v / slots * gridDim.x + blockIdx.x) * HEIGHT;
    const long long e = slot ? choices.of[slot - 1] : 0;
    ask_tile(slot ? down + e * D * F : shared_down, d0, F, place, full[warp]);
  };

  const int units = slots * each;
  if (!early) unit < units ? ask(unit) : ask_down(warp);
  const auto take = [&] { return lane == 0 ? step + atomicAdd(counters + TAKEN, 1) : 0; };
  int parity = 0, next = unit < units ? take() : units;
  const char* const x_row = xs + min(g, R - 1) * x_pitch;
  const char* const w_row = place + g % 4 * up_bytes + g / 4 * CHUNK * ITEM;
  for (; unit < units; parity ^= 1) {
    wait(full[warp], parity);
    float sum[2][4] = {};
    multiply_two(sum, x_row, w_row, D);
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
  float share = 0.0f;
  if (r < R) share = scores.share(r);
  __syncthreads();
  if (warp == Places - 1) scores.leave(counters, R);

  for (int i = 0, v = warp; i < own_tiles; i++) {
    for (; v < (i + 1) * slots; v += Places, parity ^= 1) {
      const int slot = v % slots, e = slot ? choices.of[slot - 1] : -1;
      const unsigned who = slot ? choices.chosen_by[e] : (1u << R) - 1;
      const int own = who >> g & 1 ? g : __ffs(who) - 1;  // what the others give is not used
      int to[2];  // in y, of the lane's columns
#pragma unroll
      for (int n = 0; n < 2; n++) {
        const int row = 2 * t + n;
        to[n] = who >> row & 1 ? (slot ? row * A + rank_of(row, e) : R * A + row) * HEIGHT + g : -1;
      }
      float sum[PARTS][4] = {};
      multiply_tile(
          sum, hidden + ((long long)slot * R + own) * F, place + g * down_bytes, 8 * down_bytes, F,
          [&] { wait(full[warp], parity); });
      __syncwarp();
      ask_down(v + Places);
#pragma unroll
      for (int n = 0; n < 2; n++) {
        if (to[n] < 0) continue;
        y[to[n]] = sum[0][n] + sum[1][n] + sum[2][n] + sum[3][n];
        y[to[n] + 8] = sum[0][2 + n] + sum[1][2 + n] + sum[2][2 + n] + sum[3][2 + n];
      }
    }
    __syncthreads();
    if (r < R) out[r * D + (i * gridDim.x + blockIdx.x) * HEIGHT + j] = combine(turn_weight, y, share, r, j, R, A);
    __syncthreads();
  }
}
