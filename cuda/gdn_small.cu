// The gated delta rule for requests with few rows each: what gdn.cu gives, with its bits.
// Definition: gdn and tree in boleinfer/ops/gdn.py. How a tree is solved: gdn_small.cuh.
//
// What is remembered (state, ring) and the forest are read before the previous kernel is done (after_all_previous in
// common.cuh), and what the same head of the request `Ahead` requests later remembers is then asked for into L2. Rows are copied
// by the warps that own no columns, while the owners' state is on its way; decays are added up by the last of them.
//
// grid: value heads of a key head, key heads, requests; a block owns a value head. block: Warps, V / 16 of them owners, so many
// that Blocks fit on a multiprocessor. shared: sizeof(Memory); small_bytes in ops/gdn.py repeats it.
// Read twice: a key head's rows and ring keys, by each of its value heads (L2).
//
// sizes: Act=bf16 K=128 V=128 Rows=16 Ring=32 Warps=16 Blocks=1 Held=8
// sizes: Act=bf16 K=128 V=128 Rows=16 Ring=32 Warps=12 Blocks=2 Held=8
// sizes: Act=bf16 K=128 V=128 Rows=16 Ring=32 Warps=8 Blocks=3 Held=4
// sizes: Act=bf16 K=128 V=128 Rows=32 Ring=32 Warps=16 Blocks=1 Held=8
// sizes: Act=bf16 K=128 V=128 Rows=32 Ring=32 Warps=8 Blocks=2 Held=4
// sizes: Act=bf16 K=128 V=128 Rows=64 Ring=32 Warps=16 Blocks=1 Held=8
// sizes: Act=bf16 K=128 V=128 Rows=64 Ring=32 Warps=8 Blocks=2 Held=2
// sizes: Act=bf16 K=64 V=64 Rows=64 Ring=32 Warps=8 Blocks=2 Held=2
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
    const int* length,          // [Slots]
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
    int C,
    int B,
    int Ahead)
{
  extern __shared__ __align__(16) char memory[];
  Memory& m = *reinterpret_cast<Memory*>(memory);
  const Found found(start, slot, chain, length, B, Ahead);
  const int key = found.key, h = found.h;
  if (found.rows <= 0) {
    if (h + found.b == 0) after_previous();  // one block has to
    return;
  }
  const Remembered memories = {S, ring_k, ring_u, ring_g, Hk, Hv, C};
  const Head head = memories.of(found.slot, key, h, found.ring);
  const Tree tree = found.tree(request, Hk, Hv);
  const Lane me = this_lane();
  const bool copies = me.warp >= COPIES;
  const long long row = tree.first;

  // what is remembered
  Nodes nodes;
  float past_g[2];
  if (me.warp == STEWARD) {
    nodes.read(tree, parent, ancestors, me.lane);
    read_decays(past_g, head.ring_g, head.ring, Hv);
  }
  if (copies) {
    gather<COPIES>(m.ring_k, tree.held, ring_k, me, [&](int i) { return i < head.ring ? head.ring_k + i * Hk * K : nullptr; });
  }
  const Slices slices(m.S, head.S, me);
  slices.ask(0, Held);
  prefetch_u(head, Hv);
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
    const auto copy = [&](bf16 (&to)[PITCH], const Act* from, int first, int count, int pitch) {
      gather<COPIES>(reinterpret_cast<bf16(*)[Rows][PITCH]>(&to), count, from, me, [&](int i) {
        return tree.has(first + i) ? from + (first + i) * pitch : nullptr;
      });
    };
#pragma unroll
    for (int w = 0; w < WINDOWS && w * ROWS < tree.rows; w++) {
      const int count = min(ROWS, TILE * tree.tiles - w * ROWS);
      copy(m.x[w][0][0][0], q + (row * Hk + key) * K, w * ROWS, count, Hk * K);
      copy(m.x[w][1][0][0], k + (row * Hk + key) * K, w * ROWS, count, Hk * K);
    }
    copy(m.v[0], v + (row * Hv + h) * V, 0, TILE * tree.tiles, Hv * V);
  }
  cp_async_commit();
  if (me.warp == CARRIER && found.fetches) prefetch_head(memories.of(found.slot_later, key, h, found.ring_later), Hk, Hv);
#pragma unroll
  for (int w = 0; w < WINDOWS && me.warp == STEWARD; w++) {
    add_up(m, tree, w, nodes.up(tree, w, me.lane), past_g, own_g[w], own_beta[w], me.lane);
  }
  if (copies) cp_async_wait<0>();
  __syncthreads();

  // u, o
  const long long at = (row * Hv + h) * V;
  if (tree.rows > 1) {
    solve_tree(m, tree, head, slices, u + at, me);
  } else if (tree.has(0)) {
    solve_one(m, tree, past_g, head, u + at, me);
  }
  __syncthreads();
#pragma unroll 1
  for (unsigned word = threadIdx.x; word < tree.rows * (V / 8); word += THREADS) {
    const int i = word / (V / 8), c = word % (V / 8) * 8;
    if (tree.has(i)) store<8>(o + at + i * Hv * V + c, load<8>(m.v[i] + c));
  }
}
