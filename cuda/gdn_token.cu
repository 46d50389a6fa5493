// All that a gated DeltaNet layer does between its projections, for requests with a single row each: plain decoding, of few
// (gdn_tokens.cu: of many). Definition: gdn_core in boleinfer/gdn_core.py, which is
//   q, k, v, g, beta = gdn_inputs,  o, u = gdn,  y = gated_rms_norm
// of which it has the bits. Inputs, k, u and g go to window and ring, behind what is committed. How: gdn_token.cuh.
//
// What is remembered (state, ring, window) is on its way, in registers, before the previous kernel is done
// (after_all_previous in common.cuh).
//
// grid: value heads of a key head, key heads, requests; a block owns a head. block: Warps. shared: sizeof(Shared) + 16
// bytes * EACH for each thread, below 25 KB, so that blocks have room beside those of the products before and behind.
// Read twice: a key head's inputs and ring keys, by each of its value heads (L2).
//
// sizes: Act=bf16,float K=128 V=128 W=4 Warps=8 | Act=bf16,float K=16 V=64 W=3 Warps=8 | Act=bf16,float K=64 V=16 W=4 Warps=4
constexpr int Vt = V;
#include "gdn_token.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, HALF ? 2 : 1) gdn_token(
    const Act* qkvz,                    // [R, 2*Hk*K+2*Hv*V] aligned 16
    const float* ba,                    // [R, 2*Hv] b, then a
    const float* __restrict__ taps,     // [2*Hk*K+Hv*V, W] aligned 16
    const float* __restrict__ A_log,    // [Hv]
    const float* __restrict__ dt_bias,  // [Hv]
    const float* __restrict__ norm,     // [V] aligned 16
    Act* window,                        // [Slots, W, 2*Hk*K+Hv*V] aligned 16
    const float* S,                     // [Slots, Hv, K, V] aligned 16
    Act* ring_k,                        // [Slots, C, Hk, K] aligned 16
    float* ring_u,                      // [Slots, C, Hv, V] aligned 16
    float* ring_g,                      // [Slots, C, Hv]
    const int* committed,               // [B]
    const int* slot,                    // [B]
    const int* start,                   // [B+1] request b's row is start[b], where it has one
    Act* y,                             // [R, Hv, V] aligned 16
    int Hk,
    int Hv,
    int C,
    int B,
    float eps)
{
  __shared__ Shared m;
  __shared__ alignas(16) float later[EACH][THREADS][4];  // of the ring what has no registers until the state is used
  const int b = blockIdx.z, warp = threadIdx.x / WARP;
  if (start[b + 1] == start[b]) {
    if (blockIdx.x + blockIdx.y + blockIdx.z == 0) after_previous();  // one block has to
    return;
  }
  const Layer layer = {qkvz, ba, taps, A_log, dt_bias, norm, window, ring_k, ring_u, ring_g, y, Hk, Hv, C, eps};
  const int own = slot[b], h = blockIdx.y * gridDim.x + blockIdx.x;
  const Head head = {start[b], own, int(blockIdx.y), h, committed[b], committed[b] % C, blockIdx.x == 0};
  const Member me;

  Pack<float, 4> state[EACH][EACH_KEYS];
  const float* from = S + ((long long)own * Hv + h) * K * V + me.group * EACH_KEYS * V + me.column;
#pragma unroll
  for (int e = 0; e < EACH; e++) {
#pragma unroll
    for (int j = 0; j < EACH_KEYS; j++) {
      if (me.is) state[e][j] = load_once<4>(from + (e * EACH_KEYS + j) * V);
    }
  }
  HeldRing ring;
  ring.read_u(layer, head, me, 0);
  ring.read_key(layer, head);
  const auto has_later = [&](int e) { return me.is && me.group + e + GROUPS < head.ring; };
#pragma unroll
  for (int e = 0; e < EACH; e++) {
    if (has_later(e)) cp_async16(later[e][threadIdx.x], HeldRing::u_at(layer, head, me, e, 1), true);
  }
  cp_async_commit();

  Value value;
  begin_row(m, value, layer, head, warp);
  __syncthreads();
  RowSums sum;
  sum_state(sum, me, m.x[0], m.x[1], [&](int e, int j) { return state[e][j]; });
  cp_async_wait<0>();
#pragma unroll
  for (int e = 0; e < EACH; e++) {
    if (has_later(e)) ring.u[e][1] = load<4>(later[e][threadIdx.x]);  // where the state was
  }
  ring.score(m.row, m.x, layer, head);
  __syncthreads();
  ring.share(m.row, sum, layer, head, me);
  __syncthreads();
  if (warp == 2) end_row(m, value, layer, head);
}
