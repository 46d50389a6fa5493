// out = the sum over a row's experts, by rising index, of weight * (down hidden), and then sigmoid(gate) times the shared
// expert's, for up to 8 rows: bf16 hidden, bf16 or FP8 weights. Definition: moe in boleinfer/ops/moe.py. Sums in float32,
// ordered as moe_few.cuh says.
//
// grid: ceil(D / 16); a block owns 16 numbers of every row of out. block: 512; a warp owns every fourth chunk of k of every
// fourth slot (moe_choice.cuh), the shared expert being ahead of all. Every block chooses by itself, as few_gate_up did, and
// its ring is full before hidden is there.
// shared: Depth * 16 KB * (words a lane takes of a row's chunk), 256 bytes a place; 5 KB.
// Read twice: hidden and logits, by every block (L2).
//
// sizes: Wt=bf16 PerLane=8 Depth=5 | Wt=fp8 PerLane=16 Depth=10
#include "moe_few.cuh"

constexpr int WARPS = 16, THREADS = WARPS * WARP, TEAMS = WARPS / PARTS;
constexpr int OWN = 2 * WORDS * WARP;  // words of a warp's chunk: rows g and g + 8
constexpr int HEIGHT = 16;             // numbers of a row of out in a block

extern "C" __global__ void __launch_bounds__(THREADS, 1) few_down(
    const bf16* __restrict__ hidden,         // [Places, F] aligned 16; by position, the shared expert's from R*A on
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
    int Places,
    bool norm_topk)
{
  extern __shared__ uint4 ring[];  // [Depth][warp][row, WORDS][lane], then y [Places][PARTS][HEIGHT]
  __shared__ Choices<THREADS> choices;
  // of a row's experts by rising index: their weights, and the positions of their rows
  __shared__ float turn_weight[FEW_ROWS * MOST_CHOSEN];
  __shared__ short turn_place[FEW_ROWS * MOST_CHOSEN];
  float* const y = reinterpret_cast<float*>(ring + Depth * WARPS * OWN);
  const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, g = lane / 4, t = lane % 4;
  const int part = warp % PARTS, team = warp / PARTS, chunks = (F + CHUNK - 1) / CHUNK, d0 = HEIGHT * blockIdx.x;
  choices.make<PerLane>(logits, R, E, A, norm_topk);  // logits were complete before few_gate_up let this kernel start

  // start the copy of the next chunk, of the same unit or the next one, into place d of the ring; unit `ahead` is slot 0
  const int ahead = shared ? 1 : 0, units = choices.slots + ahead;
  int next = team, next_chunk = part;
  const Wt* from = nullptr;
  const auto aim = [&] {
    if (next >= units) return;
    const Wt* matrix = next < ahead ? shared : weights + (long long)choices.of[next - ahead] * D * F;
    from = matrix + (long long)(d0 + g) * F + part * CHUNK + weight_k(0), next_chunk = part;
  };
  const auto fetch = [&](int d) {
    if (next < units && part < chunks) {
      uint4* to = ring + (d * WARPS + warp) * OWN + lane;
#pragma unroll
      for (int i = 0; i < 2 * WORDS; i++) {
        const int row = i / WORDS * 8, p = i % WORDS;
        cp_async16(to + i * WARP, from + row * F + 32 * p, d0 + g + row < D && next_chunk * CHUNK + weight_k(p) < F);
      }
      from += PARTS * CHUNK, next_chunk += PARTS;
      if (next_chunk >= chunks) {
        next += TEAMS;
        aim();
      }
    }
    cp_async_commit();
  };
  aim();
#pragma unroll 1
  for (int d = 0; d < Depth; d++) fetch(d);

  for (int p = threadIdx.x; p < R * A; p += THREADS) {
    if (choices.weight[p] != choices.weight[p]) turn_weight[p] = nan(), turn_place[p] = 0;
  }
  for (int s = threadIdx.x; s < choices.slots; s += THREADS) {
    const int e = choices.of[s];
    int place = choices.first[s];
    for (int r = 0; r < R; r++) {
      if (!(choices.chosen_by[e] >> r & 1)) continue;
      int rank = 0;
      float weight = 0.0f;
      for (int p = r * A; p < r * A + A; p++) {
        rank += choices.expert[p] < e;
        if (choices.expert[p] == e) weight = choices.weight[p];
      }
      turn_weight[r * A + rank] = weight, turn_place[r * A + rank] = place++;
    }
  }
  // of FP8, lane l of the warp has the scale of its chunk i + l
  const auto scales_at = [&](int unit, int i) {
    const int chunk = part + (i + lane) * PARTS;
    if (WORDS == 2 || unit >= units || chunk >= chunks) return 0.0f;
    const long long rows = scales_of(D), width = scales_of(F);
    const float* matrix = unit < ahead ? shared_scale : scale + choices.of[unit - ahead] * rows * width;
    return matrix[d0 / SCALED * width + chunk * CHUNK / SCALED];
  };
  float scales_next = scales_at(team, 0);
  after_previous();

  const auto place_of = [&](int unit) { return unit < ahead ? R * A : choices.first[unit - ahead]; };
  const auto rows_of = [&](int unit) { return unit < ahead ? R : choices.first[unit - ahead + 1] - place_of(unit); };
  const auto load_hidden = [&](uint4 (&to)[2], int unit, int chunk) {
    if (unit < units) load_x(to, hidden + (long long)(place_of(unit) + min(g, rows_of(unit) - 1)) * F, chunk, F);
  };
  uint4 x_next[2];
  load_hidden(x_next, team, part);
  for (int unit = team, d = 0; unit < units; unit += TEAMS) {
    float scales = scales_next, sum[4] = {};
    scales_next = scales_at(unit + TEAMS, 0);
    for (int chunk = part, i = 0; chunk < chunks; chunk += PARTS, i++) {
      const uint4 x_now[2] = {x_next[0], x_next[1]};
      const bool more = chunk + PARTS < chunks;
      load_hidden(x_next, more ? unit : unit + TEAMS, more ? chunk + PARTS : part);
      if (WORDS == 1 && i && i % WARP == 0) scales = scales_at(unit, i);
      const float factor = WORDS == 1 ? __shfl_sync(ALL_LANES, scales, i % WARP) : 0.0f;
      cp_async_wait<Depth - 1>();
      const uint4* own = ring + (d * WARPS + warp) * OWN + lane;
      multiply(sum, own, own + WORDS * WARP, x_now, factor);
      fetch(d);
      d = d + 1 < Depth ? d + 1 : 0;
    }
    const int place = place_of(unit), rows = rows_of(unit);
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const int i = 2 * t + j % 2;
      if (i < rows) y[((place + i) * PARTS + part) * HEIGHT + g + j / 2 * 8] = sum[j];
    }
  }
  __syncthreads();

  const auto total = [&](int place, int j) {
    const float* from = y + place * PARTS * HEIGHT + j;
    float sum = from[0];
#pragma unroll
    for (int i = 1; i < PARTS; i++) sum += from[i * HEIGHT];
    return sum;
  };
  const int r = threadIdx.x / HEIGHT, j = threadIdx.x % HEIGHT;
  if (r >= R || d0 + j >= D) return;
  float sum = 0.0f;
  for (int p = r * A; p < r * A + A; p++) sum = fmaf(turn_weight[p], total(turn_place[p], j), sum);
  if (ahead) sum = fmaf(sigmoid(gate[r]), total(R * A + r, j), sum);
  out[(long long)r * D + d0 + j] = from_float<bf16>(sum);
}
