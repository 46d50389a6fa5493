// The forest of a step from what the host says of it and what the slots remember: tokens, parents, depths, ancestors.
// Definition: Tree and Forest in boleinfer/forest.py; the arrays are those of boleinfer/device_forest.py.
//
// grid: B, a block owns the rows of a request and an even part of those behind all requests. block: full warps; a thread
// owns every blockDim.x-th row. shared: 512 bytes. Read twice: nothing.
#include "common.cuh"

constexpr int WORDS = 4, TREE_ROWS = WORDS * 32;  // rows of a tree that is no chain
constexpr int UNUSED = -2;                        // parent of a row that holds nothing

extern "C" __global__ void __launch_bounds__(1024) plant(
    const int* given_token,   // [R] a token; -1: the slot's last one; -(2 + j): node j of the slot's draft
    const int* given_parent,  // [R] inside the request, -1 root, -2 unused; not read at drafted nodes
    const int* start,         // [B + 1]
    const int* slot,          // [B] -1: unused
    const int* known,         // [B]
    const int* last_token,    // [Slots]
    const int* length,        // [Slots] committed tokens
    const int* pages,         // [Slots, M]
    const int* draft_token,   // [Slots, L]
    const int* draft_parent,  // [Slots, L] inside the draft, -1 below the root
    const int* draft_count,   // [Slots]
    int* token,               // [R]
    int* parent,              // [R]
    int* depth,               // [R]
    int* request,             // [R]
    int* position,            // [R]
    int* kv_slot,             // [R]
    unsigned* ancestors,      // [R, 4]
    int* chain,               // [B]
    int* committed,           // [B]
    int* root,                // [B] the last known row, inside the request; -1: none
    int* page_table,          // [B, M]
    int R,
    int L,
    int M)
{
  after_previous();
  __shared__ int up[TREE_ROWS];  // parents inside the request
  const int b = blockIdx.x, first = start[b], N = start[b + 1] - first, s = slot[b], m = known[b];
  const int T = s < 0 ? 0 : length[s], drafted = s < 0 ? 0 : min(draft_count[s], L);
  const long long draft = (long long)s * L;
  bool tangled = false;  // a row is not below the one before it

  // token and parent: node j of the draft stands at row known + j, its roots hang on the last known row
  for (int n = threadIdx.x; n < N; n += blockDim.x) {
    const int row = first + n, j = -2 - given_token[row];
    int t = given_token[row], p = given_parent[row];
    if (j >= 0) {
      p = j < drafted ? draft_parent[draft + j] : UNUSED;
      if (p != UNUSED) p = p < 0 ? m - 1 : m + p;
      t = j < drafted ? draft_token[draft + j] : -1;
    } else if (j == -1) {
      t = last_token[s];
    }
    const bool used = p != UNUSED;
    token[row] = used ? t : -1;
    parent[row] = p < 0 ? p : first + p;
    request[row] = used ? b : -1;
    kv_slot[row] = used ? T + n : 0;
    if (n < TREE_ROWS) up[n] = p;
    tangled |= used && p != n - 1;
  }
  const bool branches = __syncthreads_or(tangled);

  // depth d(n) = d(parent) + 1, ancestors(n) = ancestors(parent) + n
  for (int n = threadIdx.x; n < N; n += blockDim.x) {
    unsigned word[WORDS] = {};
    int d = n;
    if (branches) {
      d = -1;
      for (int a = n; a >= 0 && a < TREE_ROWS; a = up[a], d++) {
#pragma unroll
        for (int i = 0; i < WORDS; i++) word[i] |= a / 32 == i ? 1u << a % 32 : 0u;
      }
    }
    const bool used = request[first + n] >= 0;
    depth[first + n] = used ? d : 0;
    position[first + n] = used ? T + d : 0;
#pragma unroll
    for (int i = 0; i < WORDS; i++) ancestors[(first + n) * (long long)WORDS + i] = used ? word[i] : 0u;
  }

  // rows behind all requests
  for (int row = start[gridDim.x] + b * blockDim.x + threadIdx.x; row < R; row += gridDim.x * blockDim.x) {
    token[row] = request[row] = -1;
    parent[row] = UNUSED;
    depth[row] = position[row] = kv_slot[row] = 0;
#pragma unroll
    for (int i = 0; i < WORDS; i++) ancestors[row * (long long)WORDS + i] = 0u;
  }

  for (int i = threadIdx.x; i < M; i += blockDim.x) {
    page_table[(long long)b * M + i] = s < 0 ? -1 : pages[(long long)s * M + i];
  }
  if (threadIdx.x == 0) {
    chain[b] = !branches;
    committed[b] = T;
    root[b] = m - 1;
  }
}
