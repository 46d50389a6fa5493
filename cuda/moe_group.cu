// The experts of each row and the rows of each expert. Definitions: route and the grouping in moe, boleinfer/ops/moe.py.
//
// top_k: as moe_choice.cuh says. group: the places r A + a of the rows without NaN, sorted by expert and then by place: slot
// s serves expert_of[s], whose places are order[first[s]] .. order[first[s + 1] - 1]. Where there are fewer slots than
// experts only those with a place have a slot, by rising index (top_k_group); else slot e is expert e.
//
// grid: top_k ceil(R / 4), a warp owns a row, a lane PerLane neighbouring experts. group ceil(E / 4), a warp owns an expert
// and goes through all places. top_k_group 1: both, for few rows; a thread owns an expert. block: 128, 128 and 512.
// shared: top_k_group 4.2 KB. E <= 32 PerLane <= 512.
// Read twice: logits, from L1; expert and weight once for every expert.
//
// sizes: PerLane=8,16
#include "moe_choice.cuh"

constexpr int WARPS = 16;  // of top_k_group

// A row's choice number `lane`, by a warp.
__device__ Choice choose_from(const float* logits, int E, int A, bool norm_topk) {
  unsigned key[PerLane];
#pragma unroll
  for (int i = 0; i < PerLane; i++) {
    const int e = threadIdx.x % WARP * PerLane + i;
    key[i] = e < E ? ordered(logits[e]) : 0;
  }
  return choose<PerLane>(key, A, norm_topk);
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
    const float* logits,  // [R, E]
    float* weight,        // [R, A]
    int* expert,          // [R, A]
    int R,
    int E,
    int A,
    bool norm_topk)
{
  after_previous();
  const long long row = (long long)blockIdx.x * (blockDim.x / WARP) + threadIdx.x / WARP;
  if (row >= R) return;
  const Choice own = choose_from(logits + row * E, E, A, norm_topk);
  const int lane = threadIdx.x % WARP;
  if (lane < A) weight[row * A + lane] = own.weight, expert[row * A + lane] = own.expert;
}

extern "C" __global__ void __launch_bounds__(128) group(
    const float* weight,  // [P]
    const int* expert,    // [P]
    int* expert_of,       // [E]
    int* first,           // [E+1]
    int* order,           // [P]
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
    const float* logits,  // [R, E]
    float* weight,        // [R, A]
    int* expert,          // [R, A]
    int* expert_of,       // [Slots]
    int* first,           // [Slots+1]
    int* order,           // [R*A]
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
  for (int r = warp; r < R; r += WARPS) {
    const Choice own = choose_from(logits + (long long)r * E, E, A, norm_topk);
    if (lane < A) weight[r * A + lane] = own.weight, expert[r * A + lane] = own.expert;
  }
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
