// hidden = silu(gate x) * up x of every chosen expert and of the shared one, for up to 8 rows: bf16 x, bf16 or FP8 weights.
// Definition: moe in boleinfer/ops/moe.py. Sums in float32, ordered as moe_few.cuh says.
//
// grid: 4 blocks a multiprocessor. A block owns an equal share of the shared expert's features, then one of all chosen
// experts' features, slot by slot (moe_choice.cuh), and goes through them in tiles of up to 16: as many rows of gate, and
// the same of up. block: 128; a warp owns every fourth chunk of k, for all rows, whether they chose the expert or not. The
// shared expert's weights are under way before x and the logits are there; every block chooses by itself. A block that has
// asked for all of its weights asks L2 for those that few_down begins with.
// shared: Depth * 8 KB * (words a lane takes of a row's chunk); 4 KB of the warps' sums, 4 KB.
// Read twice: x, by every block for every tile (L1, L2); logits, by every block.
//
// sizes: Wt=bf16 PerLane=8 Depth=3 | Wt=fp8 PerLane=16 Depth=6
#include "moe_few.cuh"

constexpr int THREADS = PARTS * WARP;
constexpr int OWN = 4 * WORDS * WARP;  // words of a warp's chunk: rows g and g + 8 of gate, and of up
constexpr int HEIGHT = 16;             // features of a tile, at most
constexpr int AHEAD = 12;              // experts of few_down that L2 is asked for

// Features to go through: `left` of them from feature f of a slot on; slot -1 is the shared expert.
struct Span {
  int slot, f, left;
};

extern "C" __global__ void __launch_bounds__(THREADS, 4) few_gate_up(
    const bf16* __restrict__ x,              // [R, D] aligned 16
    const Wt* __restrict__ weights,          // [E, 2*F, D] aligned 16; gate rows first
    const float* __restrict__ scale,         // [E, (2*F+127)/128, (D+127)/128] or null; of FP8 weights
    const Wt* __restrict__ shared,           // [2*F, D] aligned 16 or null; of the shared expert
    const float* __restrict__ shared_scale,  // [(2*F+127)/128, (D+127)/128] or null
    const Wt* __restrict__ down,             // [E, D, F] aligned 16
    const Wt* __restrict__ shared_down,      // [D, F] aligned 16 or null
    const float* __restrict__ logits,        // [R, E]
    bf16* __restrict__ hidden,               // [Places, F] by position; the shared expert's from R*A on
    int R,
    int E,
    int A,
    int D,
    int F,
    int Places,
    bool norm_topk)
{
  extern __shared__ uint4 ring[];  // [Depth][warp][row, WORDS][lane]
  __shared__ float part[PARTS][2][WARP * 4];  // gate and up; number j of lane l at 4 l + j
  __shared__ Choices<THREADS> choices;
  const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, g = lane / 4;
  const int chunks = (D + CHUNK - 1) / CHUNK, blocks = gridDim.x, b = blockIdx.x;

  const auto share_of = [&](int features, int slot) {
    const int begin = (long long)b * features / blocks, end = (long long)(b + 1) * features / blocks;
    return Span{slot + begin / F, begin % F, end - begin};
  };
  Span second = {0, 0, 0};
  const auto height = [&](const Span& s) { return min(min(HEIGHT - s.f % HEIGHT, F - s.f), s.left); };
  const auto step = [&](Span& s) {
    const int n = height(s);
    s.f += n, s.left -= n;
    if (s.left == 0 && s.slot < 0) {
      s = second;
    } else if (s.f == F) {
      s.f = 0, s.slot++;
    }
  };

  // start the copy of the next chunk, of the same tile or the next one, into place d of the ring
  Span next = shared ? share_of(F, -1) : second;
  int next_chunk = warp;
  const Wt* from = nullptr;
  bool low = false, high = false;  // whether there are features g and g + 8
  const auto aim = [&] {
    if (next.left == 0) return;
    const Wt* matrix = next.slot < 0 ? shared : weights + (long long)choices.of[next.slot] * 2 * F * D;
    from = matrix + (long long)(next.f + g) * D + warp * CHUNK + weight_k(0);
    low = g < height(next), high = g + 8 < height(next), next_chunk = warp;
  };
  bool chosen = false;
  const auto ask_ahead = [&] {  // 16 rows of each expert
    const int row = HEIGHT * b, rows = min(HEIGHT, D - row), s = (int)threadIdx.x - 1;
    if (rows <= 0 || s >= min(choices.slots, AHEAD) || (s < 0 && !shared)) return;
    const Wt* matrix = s < 0 ? shared_down : down + (long long)choices.of[s] * D * F;
    prefetch_bytes(matrix + (long long)row * F, rows * F * (int)sizeof(Wt));
  };
  const long long to_up = (long long)F * D;
  const auto fetch = [&](int d) {
    if (next.left && warp < chunks) {
      uint4* to = ring + (d * PARTS + warp) * OWN + lane;
#pragma unroll
      for (int i = 0; i < 4 * WORDS; i++) {
        const int row = i / WORDS, p = i % WORDS;
        const bool inside = next_chunk * CHUNK + weight_k(p) < D;
        cp_async16(to + i * WARP, from + (row / 2 * to_up + row % 2 * 8 * D + 32 * p), (row % 2 ? high : low) && inside);
      }
      from += PARTS * CHUNK, next_chunk += PARTS;
      if (next_chunk >= chunks) {
        step(next);
        aim();
        if (next.left == 0 && chosen) ask_ahead();
      }
    }
    cp_async_commit();
  };
  aim();
  int early = 0;  // chunks that are under way
  while (early < Depth && next.left && warp < chunks) fetch(early++);
  after_all_previous();  // few_down reads the logits, too

  const bf16* const row = x + (long long)min(g, R - 1) * D;
  uint4 x_next[2];
  load_x(x_next, row, warp, D);
  choices.make<PerLane>(logits, R, E, A, norm_topk);
  chosen = true;
  second = share_of(choices.slots * F, 0);
  if (next.left == 0) {
    next = second;
    aim();
  }
  for (int d = early; d < Depth; d++) fetch(d);

  // of FP8, lane l of the warp has the scales of its chunk i + l: x of gate, y of up
  const auto scales_at = [&](const Span& s, int i) {
    float2 found = make_float2(0.0f, 0.0f);
    const int chunk = warp + (i + lane) * PARTS;
    if (WORDS == 2 || s.left == 0 || chunk >= chunks) return found;
    const long long rows = scales_of(2 * F), width = scales_of(D);
    const float* matrix = s.slot < 0 ? shared_scale : scale + choices.of[s.slot] * rows * width;
    found.x = matrix[s.f / SCALED * width + chunk * CHUNK / SCALED];
    found.y = matrix[(F + s.f) / SCALED * width + chunk * CHUNK / SCALED];
    return found;
  };
  Span now = shared ? share_of(F, -1) : second;
  if (now.left == 0) now = second;
  float2 scales_next = scales_at(now, 0);
  for (int d = 0; now.left;) {
    Span following = now;
    step(following);
    float2 scales = scales_next;
    scales_next = scales_at(following, 0);
    float sum[2][4] = {};
    for (int chunk = warp, i = 0; chunk < chunks; chunk += PARTS, i++) {
      const uint4 x_now[2] = {x_next[0], x_next[1]};
      load_x(x_next, row, chunk + PARTS < chunks ? chunk + PARTS : warp, D);
      if (WORDS == 1 && i && i % WARP == 0) scales = scales_at(now, i);
      const float of_gate = WORDS == 1 ? __shfl_sync(ALL_LANES, scales.x, i % WARP) : 0.0f;
      const float of_up = WORDS == 1 ? __shfl_sync(ALL_LANES, scales.y, i % WARP) : 0.0f;
      cp_async_wait<Depth - 1>();
      const uint4* own = ring + (d * PARTS + warp) * OWN + lane;
      multiply(sum[0], own, own + WORDS * WARP, x_now, of_gate);
      multiply(sum[1], own + 2 * WORDS * WARP, own + 3 * WORDS * WARP, x_now, of_up);
      fetch(d);
      d = d + 1 < Depth ? d + 1 : 0;
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
#pragma unroll
      for (int j = 0; j < 4; j++) part[warp][i][4 * lane + j] = sum[i][j];
    }
    __syncthreads();
    float total[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
      total[i] = part[0][i][threadIdx.x];
#pragma unroll
      for (int w = 1; w < PARTS; w++) total[i] += part[w][i][threadIdx.x];
    }
    const int l = threadIdx.x / 4, j = threadIdx.x % 4, feature = l / 4 + j / 2 * 8, r = l % 4 * 2 + j % 2;
    const unsigned who = now.slot < 0 ? ~0u : choices.chosen_by[choices.of[now.slot]];
    if (feature < height(now) && r < R && who >> r & 1) {
      const long long to = (now.slot < 0 ? R * A : choices.first[now.slot]) + __popc(who & ((1u << r) - 1));
      hidden[to * F + now.f + feature] = from_float<bf16>(silu(total[0]) * total[1]);
    }
    __syncthreads();
    now = following;
  }
}
