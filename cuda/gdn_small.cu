// The gated delta rule for requests with few rows each: what gdn.cu gives, with its bits.
// Definition: gdn and tree in boleinfer/ops/gdn.py. How a tree is solved: gdn_small.cuh.
//
// What is remembered (state, ring) and the forest are read before the previous kernel is done (after_all_previous in
// common.cuh). Rows are copied by the warps that own no columns, where there are such, while the owners' state is on its way;
// decays are added up by the last warp.
//
// grid: value heads of a key head times V / Vt, key heads, requests; a block owns Vt columns. block: Warps, Vt / 16 of them
// owners, so many that Blocks fit on a multiprocessor. shared: sizeof(Memory); small_bytes in ops/gdn.py repeats it.
// Read twice: a key head's rows and ring keys, by each of its value heads (L2).
//
// spills: three numbers a thread with four blocks of a multiprocessor, once
// sizes: Act=bf16 K=128 V=128 Vt=64 Rows=16 Ring=32 Warps=16 Blocks=1 Held=8
// sizes: Act=bf16 K=128 V=128 Vt=128 Rows=16 Ring=32 Warps=16 Blocks=1 Held=8
// sizes: Act=bf16 K=128 V=128 Vt=128 Rows=16 Ring=32 Warps=8 Blocks=3 Held=5
// sizes: Act=bf16 K=128 V=128 Vt=128 Rows=16 Ring=32 Warps=8 Blocks=4 Held=2
// sizes: Act=bf16 K=128 V=128 Vt=64 Rows=32 Ring=32 Warps=16 Blocks=1 Held=8
// sizes: Act=bf16 K=128 V=128 Vt=128 Rows=32 Ring=32 Warps=16 Blocks=1 Held=8
// sizes: Act=bf16 K=128 V=128 Vt=128 Rows=32 Ring=32 Warps=8 Blocks=2 Held=4
// sizes: Act=bf16 K=128 V=128 Vt=128 Rows=32 Ring=32 Warps=8 Blocks=3 Held=3
// sizes: Act=bf16 K=128 V=128 Vt=64 Rows=64 Ring=32 Warps=16 Blocks=1 Held=8
// sizes: Act=bf16 K=128 V=128 Vt=128 Rows=64 Ring=32 Warps=16 Blocks=1 Held=8
// sizes: Act=bf16 K=128 V=128 Vt=128 Rows=64 Ring=32 Warps=8 Blocks=2 Held=2
// sizes: Act=bf16 K=64 V=64 Vt=64 Rows=64 Ring=32 Warps=8 Blocks=2 Held=2
#include "gdn_small.cuh"

struct Nothing {};
using Memory = Small<Nothing>;

constexpr int COPIES = SCORERS ? OWNERS : 0;  // the first warp that copies keys and rows

extern "C" __global__ void __launch_bounds__(THREADS, Blocks) gdn_small(
    const Act* q,               // [R, Hk, K] aligned 16
    const Act* k,               // [R, Hk, K] aligned 16
    const Act* v,               // [R, Hv, V] aligned 16
    const float* g,             // [R, Hv]
    const float* beta,          // [R, Hv]
    const float* S,             // [Slots, Hv, K, V] aligned 16
    const Act* ring_k,          // [Slots, C, Hk, K] aligned 16
    const float* ring_u,        // [Slots, C, Hv, V] aligned 16
    const float* ring_g,        // [Slots, C, Hv]
    const int* committed,       // [B]
    const int* slot,            // [B]
    const int* start,           // [B+1]
    const int* chain,           // [B]
    const int* parent,          // [R]
    const int* request,         // [R]
    const unsigned* ancestors,  // [R, 4] aligned 16
    Act* o,                     // [R, Hv, V] aligned 16
    float* u,                   // [R, Hv, V] aligned 16
    int Hk,
    int Hv,
    int C)
{
  extern __shared__ __align__(16) char memory[];
  Memory& m = *reinterpret_cast<Memory*>(memory);
  const Found found(start, slot, chain, committed, request, C);
  const int key = found.key, h = found.h;
  if (found.rows <= 0) {
    if (h + found.b == 0) after_previous();  // one block has to
    return;
  }
  const Head head(found, S, ring_k, ring_u, ring_g, Hk, Hv, C);
  const Tree tree = found.tree(Hk, Hv);
  const Lane me = this_lane();
  const bool copies = me.warp >= COPIES;
  const long long row = tree.first, at = (row * Hv + h) * V + found.column;

  // what is remembered
  Nodes nodes;
  float past_g[2];
  if (me.warp == STEWARD) {
    nodes.read(tree, parent, ancestors, me.lane);
    read_decays(past_g, head.ring_g, head.ring, Hv);
  }
  if (copies) copy_rows<COPIES>(m.ring_k[0], tree.held, head.ring_k, Hk * K, tree.filled(0), me);
  const Slices slices(m.S, head.S, me);
  slices.ask(0, Held);
  prefetch_rows(head.ring_u, head.ring, Hv * V);
  if (me.warp == STEWARD) nodes.note(m, tree, me.lane);
  after_previous();

  // rows, decays
  float own_g[WINDOWS] = {}, own_beta[WINDOWS] = {};
#pragma unroll
  for (int w = 0; w < WINDOWS && me.warp == STEWARD; w++) {
    const int i = me.lane + w * ROWS;
    if (tree.has(i)) own_g[w] = g[(row + i) * Hv + h], own_beta[w] = beta[(row + i) * Hv + h];
  }
  if (copies) {
#pragma unroll
    for (int w = 0; w < WINDOWS && w * ROWS < tree.rows; w++) {
      const int first = w * ROWS, count = min(ROWS, TILE * tree.tiles - first), keys = Hk * K;
      const long long from = (row * Hk + key) * K + first * keys;
      copy_rows<COPIES>(m.x[w][0][0], count, q + from, keys, tree.used[w], me);
      copy_rows<COPIES>(m.x[w][1][0], count, k + from, keys, tree.used[w], me);
    }
  }
  cp_async_commit();
  prefetch_rows(v + at, tree.rows, Hv * V);
#pragma unroll
  for (int w = 0; w < WINDOWS && me.warp == STEWARD; w++) {
    add_up(m, tree, w, nodes.up(tree, w, me.lane), past_g, own_g[w], own_beta[w], me.lane);
  }
  if (copies) cp_async_wait<0>();
  __syncthreads();

  // u, o
  const In values = {v + at, Hv * V};
  const Out out = {o + at, Hv * V};
  if (tree.rows > 1) {
    solve_tree(m, tree, head, slices, values, u + at, out, me);
  } else if (tree.has(0)) {
    solve_one(m, tree, past_g, head, values, u + at, out, me);
  }
}
