// A known tree in the place of the draft of each request, for measurements. Definition: Oracle in boleinfer/acceptance.py.
//
// grid: B, a block owns a request. block: full warps; a thread owns every blockDim.x-th node. shared: none.
// Read twice: nothing.
#include "common.cuh"

extern "C" __global__ void __launch_bounds__(128) overrule(
    const int* tokens,       // [Slots, Places, N] of the nodes of the tree behind `first` + i tokens, at place i
    const int* parents,      // [N] of each of these trees: inside the tree, -1 below the root; likelier nodes first
    const float* probs,      // [N]
    const int* size,         // [2] their nodes, and `first`
    const int* slot,         // [B] -1: unused
    const int* limit,        // [B] nodes of a draft at most
    const int* length,       // [Slots] committed tokens, behind which one more is known
    int* draft_token,        // [Slots, L]
    int* draft_parent,       // [Slots, L]
    float* draft_prob,       // [Slots, L]
    int* draft_count,        // [Slots]
    int* told_draft_token,   // [B, L] the same by request, for the host
    int* told_draft_parent,  // [B, L]
    float* told_draft_prob,  // [B, L]
    int* told_draft_count,   // [B]
    int Places,
    int N,
    int L)
{
  after_previous();
  const int b = blockIdx.x, s = slot[b];
  if (s < 0) return;
  const int place = length[s] + 1 - size[1];
  const int nodes = place >= 0 && place < Places ? min(min(size[0], limit[b]), L) : 0;
  const int* own = tokens + ((long long)s * Places + place) * N;
  const long long to = (long long)s * L, told = (long long)b * L;
  for (int n = threadIdx.x; n < nodes; n += blockDim.x) {
    draft_token[to + n] = told_draft_token[told + n] = own[n];
    draft_parent[to + n] = told_draft_parent[told + n] = parents[n];
    draft_prob[to + n] = told_draft_prob[told + n] = probs[n];
  }
  if (threadIdx.x == 0) draft_count[s] = told_draft_count[b] = nodes;
}
