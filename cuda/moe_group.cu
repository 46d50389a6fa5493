// The experts of each row and the rows of each expert. Definitions: route and the grouping in moe, boleinfer/ops/moe.py.
//
// top_k: softmax over all E logits, the A largest, equal ones by lower index; with norm_topk divided by their sum. A row
// with a NaN gets experts 0 .. A-1 and weights NaN. group: the places r A + a of the rows without NaN, sorted by expert and
// then by place: slot s serves expert_of[s], whose places are order[first[s]] .. order[first[s + 1] - 1]. Where there are
// fewer slots than experts only those with a place have a slot, by rising index (top_k_group); else slot e is expert e.
//
// grid: top_k ceil(R / 4), a warp owns a row, a lane every 32nd expert. group ceil(E / 4), a warp owns an expert and goes
// through all places. top_k_group 1: both, for few rows; a thread owns an expert. block: 128, 128 and 512.
// shared: top_k_group 4.2 KB. E <= 32 PerLane <= 512.
// Read twice: logits, from L1; expert and weight once for every expert.
//
// sizes: PerLane=1,8,16
#include "common.cuh"

constexpr int WARPS = 16;  // of top_k_group

// Larger float <-> larger unsigned; 0 belongs to no number but NaN.
__device__ __forceinline__ unsigned ordered(float x) {
  const unsigned bits = __float_as_uint(x + 0.0f);  // -0 is 0
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ float unordered(unsigned u) { return __uint_as_float(u >> 31 ? u & 0x7fffffffu : ~u); }

// One row, by a warp.
__device__ void choose(const float* logits, float* weight, int* expert, int E, int A, bool norm_topk) {
  const int lane = threadIdx.x % WARP;
  unsigned key[PerLane];
  float most = -inf();
  bool broken = false;
#pragma unroll
  for (int i = 0; i < PerLane; i++) {
    const int e = i * WARP + lane;
    const float logit = e < E ? logits[e] : -inf();
    key[i] = e < E ? ordered(logit) : 0;
    most = fmaxf(most, logit);
    broken |= logit != logit;
  }
  if (__any_sync(ALL_LANES, broken)) {
    if (lane < A) weight[lane] = nan(), expert[lane] = lane;
    return;
  }

  // sum e^(logit - most)
  most = warp_max(most);
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < PerLane; i++) {
    if (i * WARP + lane < E) sum += expf(unordered(key[i]) - most);
  }
  sum = warp_sum(sum);

  // the largest that is left, A times: lane a keeps the a-th
  float mine = 0.0f;
  int mine_e = 0;
  for (int a = 0; a < A; a++) {
    unsigned best = 0;
#pragma unroll
    for (int i = 0; i < PerLane; i++) best = max(best, key[i]);
    best = __reduce_max_sync(ALL_LANES, best);
    int e = E;
#pragma unroll
    for (int i = PerLane - 1; i >= 0; i--) e = key[i] == best ? i * WARP + lane : e;
    e = __reduce_min_sync(ALL_LANES, e);
#pragma unroll
    for (int i = 0; i < PerLane; i++) key[i] = e == i * WARP + lane ? 0 : key[i];
    if (lane == a) mine = expf(unordered(best) - most), mine_e = e;
  }
  const float chosen = warp_sum(mine);
  if (lane < A) weight[lane] = mine / (norm_topk ? chosen : sum), expert[lane] = mine_e;
}

// Writes the places of expert e in rising order, by a warp. Returns their number.
__device__ int collect(const float* weight, const int* expert, int* order, int P, int e) {
  const int lane = threadIdx.x % WARP;
  int n = 0;
  for (int p0 = 0; p0 < P; p0 += WARP) {
    const int p = p0 + lane;
    const bool here = p < P && expert[p] == e && weight[p] == weight[p];
    const unsigned all = __ballot_sync(ALL_LANES, here);
    if (here) order[n + __popc(all & ((1u << lane) - 1))] = p;
    n += __popc(all);
  }
  return n;
}

extern "C" __global__ void __launch_bounds__(128, 4) top_k(
    const float* __restrict__ logits,  // [R, E]
    float* __restrict__ weight,        // [R, A]
    int* __restrict__ expert,          // [R, A]
    int R,
    int E,
    int A,
    bool norm_topk)
{
  after_previous();
  const long long row = (long long)blockIdx.x * (blockDim.x / WARP) + threadIdx.x / WARP;
  if (row < R) choose(logits + row * E, weight + row * A, expert + row * A, E, A, norm_topk);
}

extern "C" __global__ void __launch_bounds__(128) group(
    const float* __restrict__ weight,  // [P]
    const int* __restrict__ expert,    // [P]
    int* __restrict__ expert_of,       // [E]
    int* __restrict__ first,           // [E+1]
    int* __restrict__ order,           // [P]
    int P,
    int E)
{
  after_previous();
  const int lane = threadIdx.x % WARP, e = blockIdx.x * (blockDim.x / WARP) + threadIdx.x / WARP;
  if (e >= E) return;
  int before = 0;  // places of lower experts
  for (int p = lane; p < P; p += WARP) before += expert[p] < e && weight[p] == weight[p];
  before = __reduce_add_sync(ALL_LANES, before);
  const int n = collect(weight, expert, order + before, P, e);
  if (lane == 0) {
    expert_of[e] = e, first[e] = before;
    if (e == E - 1) first[E] = before + n;
  }
}

extern "C" __global__ void __launch_bounds__(512, 1) top_k_group(
    const float* __restrict__ logits,  // [R, E]
    float* __restrict__ weight,        // [R, A]
    int* __restrict__ expert,          // [R, A]
    int* __restrict__ expert_of,       // [Slots]
    int* __restrict__ first,           // [Slots+1]
    int* __restrict__ order,           // [R*A]
    int R,
    int E,
    int A,
    int Slots,
    bool norm_topk)
{
  after_previous();
  __shared__ int count[512], slot_expert[512];
  __shared__ int total[WARPS];
  const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, e = threadIdx.x, P = R * A;
  for (int r = warp; r < R; r += WARPS) choose(logits + (long long)r * E, weight + r * A, expert + r * A, E, A, norm_topk);
  count[e] = 0;
  __syncthreads();

  // places of each expert
  for (int p = threadIdx.x; p < P; p += blockDim.x) {
    if (weight[p] == weight[p]) atomicAdd(&count[expert[p]], 1);
  }
  __syncthreads();

  // places and chosen experts up to each expert, packed: places + 2^20 experts
  const int mine = count[e] ? count[e] + (1 << 20) : 0;
  int upto = mine;
#pragma unroll
  for (int d = 1; d < WARP; d *= 2) {
    const int other = __shfl_up_sync(ALL_LANES, upto, d);
    if (lane >= d) upto += other;
  }
  if (lane == WARP - 1) total[warp] = upto;
  __syncthreads();
  int all = 0;
  for (int w = 0; w < WARPS; w++) {
    if (w < warp) upto += total[w];
    all += total[w];
  }
  const int slots = all >> 20;
  if (mine) {
    const int slot = (upto >> 20) - 1;
    expert_of[slot] = slot_expert[slot] = e;
    first[slot] = (upto - mine) & 0xfffff;
  }
  for (int s = slots + threadIdx.x; s <= Slots; s += blockDim.x) {
    first[s] = all & 0xfffff;
    if (s < Slots) expert_of[s] = 0;  // without places
  }
  __syncthreads();

  for (int s = warp; s < slots; s += WARPS) collect(weight, expert, order + first[s], P, slot_expert[s]);
}
