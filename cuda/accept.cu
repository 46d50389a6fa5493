// The walk over each tree along the sampled tokens, and the chain of accepted rows that the MTP layer reads after it.
// Definitions: accept in boleinfer/sampling.py, MTPDrafter._catch_up in boleinfer/draft/mtp.py.
//
// grid: B, a block owns a request. block: full warps; a thread owns every blockDim.x-th row, in walk the first warp
// walks. shared: none. Read twice: the drafted rows, once a node of the path, from L1.
#include "common.cuh"

constexpr int UNUSED = -2;  // parent of a row that holds nothing

// The first row after `node` that is its child and holds token t, -1: none. All lanes of the warp together.
__device__ int find_child(const int* parent, const int* token, int node, int t, int end) {
  for (int base = node + 1; base < end; base += WARP) {
    const int row = base + threadIdx.x;
    const unsigned hits = __ballot_sync(ALL_LANES, row < end && parent[row] == node && token[row] == t);
    if (hits) return base + __ffs(hits) - 1;
  }
  return -1;
}

// path = known rows, then nodes below the last known one while they hold what was sampled above them
extern "C" __global__ void __launch_bounds__(1024) walk(
    const int* __restrict__ sampled,   // [R] token after each row, negative: its logits are broken
    const int* __restrict__ token,     // [R]
    const int* __restrict__ parent,    // [R]
    const int* __restrict__ start,     // [B + 1]
    const int* __restrict__ slot,      // [B]
    const int* __restrict__ known,     // [B]
    const int* __restrict__ complete,  // [B] 0: nothing is sampled, the known rows are the path
    int* __restrict__ row,             // [R] the path, from the request's first row on
    int* __restrict__ count,           // [B] rows of the path
    int* __restrict__ emitted,         // [B, L + 1] sampled along the path
    int* __restrict__ emitted_count,   // [B]
    int* __restrict__ error,           // [B] what was sampled at a broken last known row, else 0
    int* __restrict__ drafted,         // [B] rows that were guesses
    int* __restrict__ last_token,      // [Slots]
    int* __restrict__ length,          // [Slots] committed tokens
    int* __restrict__ draft_count,     // [Slots] 0 from here on
    int L)
{
  after_previous();
  const int b = blockIdx.x, first = start[b], end = start[b + 1], m = known[b], s = slot[b];
  for (int i = threadIdx.x; i < m; i += blockDim.x) row[first + i] = first + i;
  if (threadIdx.x >= WARP) return;

  int guesses = 0;
  for (int base = first + m; base < end; base += WARP) {
    const int r = base + threadIdx.x;
    guesses += __popc(__ballot_sync(ALL_LANES, r < end && parent[r] != UNUSED));
  }

  int drawn = 0, broken = 0;  // tokens of the walk
  if (s >= 0 && m > 0 && complete[b]) {
    int node = first + m - 1, t = sampled[node];
    broken = min(t, 0);
    while (t >= 0) {
      if (threadIdx.x == 0) emitted[(long long)b * (L + 1) + drawn] = t;
      drawn++;
      const int child = drawn <= L ? find_child(parent, token, node, t, end) : -1;
      const int next = child < 0 ? -1 : sampled[child];
      if (next >= 0 && threadIdx.x == 0) row[first + m - 1 + drawn] = child;
      if (next < 0 && threadIdx.x == 0) last_token[s] = t;
      node = child;
      t = next;
    }
  }
  if (threadIdx.x == 0) {
    const int rows = s < 0 || broken ? 0 : m + max(drawn - 1, 0);
    count[b] = rows;
    emitted_count[b] = drawn;
    error[b] = broken;
    drafted[b] = guesses;
    if (s >= 0) {
      length[s] += rows;
      draft_count[s] = 0;
    }
  }
}

// A chain of the path's rows, each with the token that follows it
extern "C" __global__ void __launch_bounds__(1024) follow(
    const int* __restrict__ path,         // [R] accepted rows, from the request's first row on
    const int* __restrict__ count,        // [B]
    const int* __restrict__ step_token,   // [R] tokens of the step's forest
    const int* __restrict__ start,        // [B + 1]
    const int* __restrict__ committed,    // [B] before the step
    const int* __restrict__ slot,         // [B]
    const int* __restrict__ complete,     // [B]
    const int* __restrict__ next_token,   // [B] the token after an incomplete request's known rows
    const int* __restrict__ last_token,   // [Slots] the token after a complete request's path
    int* __restrict__ token,              // [R]
    int* __restrict__ parent,             // [R]
    int* __restrict__ depth,              // [R]
    int* __restrict__ request,            // [R]
    int* __restrict__ position,           // [R]
    int* __restrict__ kv_slot,            // [R]
    int* __restrict__ chain,              // [B]
    int* __restrict__ hidden_row,         // [R] the row of the step that each one pairs with, -1: unused
    int* __restrict__ last_row,           // [B] -1: none
    int R)
{
  after_previous();
  const int b = blockIdx.x, first = start[b], N = start[b + 1] - first, m = count[b], T = committed[b];
  const bool last = b == gridDim.x - 1;  // also owns the rows behind all requests
  for (int n = threadIdx.x; n < (last ? R - first : N); n += blockDim.x) {
    const int row = first + n;
    const bool used = n < m;
    int t = -1;
    if (used) t = n + 1 < m ? step_token[path[row + 1]] : complete[b] ? last_token[slot[b]] : next_token[b];
    token[row] = t;
    parent[row] = !used ? UNUSED : n ? row - 1 : -1;
    depth[row] = used ? n : 0;
    request[row] = used ? b : -1;
    position[row] = kv_slot[row] = used ? T + n : 0;
    hidden_row[row] = used ? path[row] : -1;
  }
  if (threadIdx.x == 0) {
    chain[b] = 1;
    last_row[b] = m > 0 ? first + m - 1 : -1;
  }
}
