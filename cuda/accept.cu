// The walk over each tree along the sampled tokens, what it gives joins the histories; and the chain of accepted rows that
// the MTP layer reads after it.
// Definitions: accept and TokenHistory in boleinfer/sampling.py, MTPDrafter._catch_up in boleinfer/draft/mtp.py.
//
// grid: B, a block owns a request. block: full warps; a thread owns every blockDim.x-th row, in walk the first warp
// walks. shared: 2 KB in walk. Read twice: the drafted rows, once a node of the path, from shared memory.
#include "common.cuh"

constexpr int UNUSED = -2;     // parent of a row that holds nothing
constexpr int PENALISES = 2;   // flag, as in sample.cu
constexpr int REACHED = 128;   // rows from the root on that a walk can reach: a draft has fewer (Slots in device_step.py)

// A request's rows from its last known one on.
struct Tree {
  int token[REACHED], parent[REACHED], sampled[REACHED];  // parents counted from there

  // The first of n rows after `node` that is its child and holds token t, -1: none. All lanes of the warp together.
  __device__ int child(int node, int t, int n) const {
    for (int base = node + 1; base < n; base += WARP) {
      const int i = base + threadIdx.x;
      const unsigned hits = __ballot_sync(ALL_LANES, i < n && parent[i] == node && token[i] == t);
      if (hits) return base + __ffs(hits) - 1;
    }
    return -1;
  }
};

// path = known rows, then nodes below the last known one while they hold what was sampled above them
extern "C" __global__ void __launch_bounds__(1024) walk(
    const int* sampled,   // [R] token after each row, negative: its logits are broken
    const int* token,     // [R]
    const int* parent,    // [R]
    const int* start,     // [B + 1]
    const int* slot,      // [B]
    const int* known,     // [B]
    const int* complete,  // [B] 0: nothing is sampled, the known rows are the path
    const int* whole,     // [Slots, 5] as in sample.cu
    int* row,             // [R] the path, from the request's first row on
    int* count,           // [B] rows of the path
    int* emitted,         // [B, L + 1] sampled along the path
    int* emitted_count,   // [B]
    int* error,           // [B] what was sampled at a broken last known row, else 0
    int* drafted,         // [B] rows that were guesses
    int* last_token,      // [Slots]
    int* length,          // [Slots] committed tokens
    int* draft_count,     // [Slots] 0 from here on
    int* text_length,     // [Slots] tokens of prompt and output
    int* generated,       // [Slots] tokens of the output
    int* seen,            // [Slots, V] -1, or how often in the output; where there are penalties
    int L,
    int V)
{
  __shared__ Tree tree;
  __shared__ int text[REACHED];
  const int b = blockIdx.x, first = start[b], end = start[b + 1], m = known[b], s = slot[b], root = first + m - 1;
  const bool walks = s >= 0 && m > 0 && complete[b], penalises = walks && whole[s * 5ll + 3] & PENALISES;
  const int n = walks ? min(end - root, REACHED) : 0;
  int guesses = 0;
  for (int base = root + 1; base < end; base += blockDim.x) {
    const int r = base + threadIdx.x;
    guesses += __syncthreads_count(r < end && parent[r] != UNUSED);
  }
  for (int i = threadIdx.x; i < n; i += blockDim.x) {
    tree.token[i] = token[root + i];
    tree.parent[i] = parent[root + i] - root;
  }
  after_previous();
  for (int i = threadIdx.x; i < n; i += blockDim.x) tree.sampled[i] = sampled[root + i];
  for (int i = threadIdx.x; i < m; i += blockDim.x) row[first + i] = first + i;
  __syncthreads();
  if (threadIdx.x >= WARP) return;

  int drawn = 0, t = walks ? tree.sampled[0] : -1;
  const int broken = walks ? min(t, 0) : 0;
  for (int node = 0; t >= 0;) {
    if (threadIdx.x == 0) {
      text[drawn] = t;
      if (node > 0) row[root + drawn] = root + node;
    }
    drawn++;
    node = drawn <= L ? tree.child(node, t, n) : -1;
    t = node < 0 ? -1 : tree.sampled[node];
  }
  __syncwarp();

  // the tokens: seen once at least, then so often
  for (int i = threadIdx.x; i < drawn; i += WARP) {
    emitted[(long long)b * (L + 1) + i] = text[i];
    if (penalises) atomicMax(&seen[(long long)s * V + text[i]], 0);
  }
  __syncwarp();
  for (int i = threadIdx.x; penalises && i < drawn; i += WARP) atomicAdd(&seen[(long long)s * V + text[i]], 1);
  if (threadIdx.x > 0) return;
  const int rows = s < 0 || broken ? 0 : m + max(drawn - 1, 0);
  count[b] = rows;
  emitted_count[b] = drawn;
  error[b] = broken;
  drafted[b] = guesses;
  if (s < 0) return;
  length[s] += rows;
  draft_count[s] = 0;
  text_length[s] += drawn;
  generated[s] += drawn;
  if (drawn) last_token[s] = text[drawn - 1];
}

// A chain of the path's rows, each with the token that follows it
extern "C" __global__ void __launch_bounds__(1024) follow(
    const int* path,        // [R] accepted rows, from the request's first row on
    const int* count,       // [B]
    const int* step_token,  // [R] tokens of the step's forest
    const int* start,       // [B + 1]
    const int* committed,   // [B] before the step
    const int* slot,        // [B]
    const int* complete,    // [B]
    const int* next_token,  // [B] the token after an incomplete request's known rows
    const int* last_token,  // [Slots] the token after a complete request's path
    int* token,             // [R]
    int* parent,            // [R]
    int* depth,             // [R]
    int* request,           // [R]
    int* position,          // [R]
    int* kv_slot,           // [R]
    int* chain,             // [B]
    int* hidden_row,        // [R] the row of the step that each one pairs with, -1: unused
    int* last_row,          // [B] -1: none
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
