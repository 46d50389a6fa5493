// The same as gdn_token.cu for many requests, bound by reading states. How a head is computed: gdn_token.cuh.
//
// Blocks stay and take one head after another. A warp of its own brings states, an even part for each warp that reads one,
// into the block's one place as soon as it is read there, and never has more than AT_ONCE parts on their way: what a
// multiprocessor asks for beyond some 32 KB only makes everything else wait, rows, windows and rings (H200, 2026-11-30:
// docs/tree-kernel.md). Two sets of warps take turns in beginning a row, so that one ends while the next begins.
//
// grid: blocks that stay, two a multiprocessor; heads are dealt out in turn, the heads of a request as neighbours. block:
// Warps, and the one that brings. shared: sizeof(Memory).
// Read twice: a key head's inputs and ring keys, by each of its value heads (L2).
//
// arch: 90, 100, 120
// spills: up to two registers with bf16 on sm_100 and 120, so that two blocks fit beside each other
// sizes: Act=bf16,float K=128 V=128 W=4 Warps=8 | Act=bf16,float K=16 V=64 W=3 Warps=8 | Act=bf16,float K=64 V=16 W=4 Warps=4
constexpr int Vt = V;
#include "bulk.cuh"
#include "gdn_token.cuh"

constexpr int READERS = MEMBERS / WARP, PART = K * V / READERS;  // warps that read a state, numbers for each
constexpr int AT_ONCE = 2;

struct Memory {
  float state[READERS][PART];
  Shared shared;
  Barrier full[READERS], read[READERS];  // parts of the state: here, done with
#ifdef EMULATED
  Barrier meeting;
#endif
};

// A barrier of the warps that compute: the hardware's number 1, on the emulator one in memory.
struct Meeting {
  Memory& m;
  int parity = 0;

  __device__ __forceinline__ void operator()() {
#ifdef EMULATED
    arrive(m.meeting);
    wait(m.meeting, parity);
    parity ^= 1;
#else
    asm volatile("barrier.sync 1, %0;" ::"n"(THREADS) : "memory");
#endif
  }
};

// The heads of a block, one after another: requests with a row, b < B.
struct Turn {
  const int *start, *slot, *committed;
  int B, C, Hv, ratio, b, h;

  __device__ __forceinline__ void find() {
    while (b < B && start[b + 1] == start[b]) advance();
  }
  __device__ __forceinline__ void advance() {
    h += gridDim.x;
    b += h / Hv, h %= Hv;
  }
  __device__ __forceinline__ Head head() const {
    const int key_head = h / ratio, T = committed[b];
    return {start[b], slot[b], key_head, h, T, T % C, h == key_head * ratio};
  }
};

extern "C" __global__ void __launch_bounds__(THREADS + WARP, HALF ? 2 : 1) gdn_tokens(
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
  extern __shared__ uint4 dynamic[];
  Memory& m = *reinterpret_cast<Memory*>(dynamic);
  const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
  const Layer layer = {qkvz, ba, taps, A_log, dt_bias, norm, window, ring_k, ring_u, ring_g, y, Hk, Hv, C, eps};
  Turn turn = {start, slot, committed, B, C, Hv, Hv / Hk, int(blockIdx.x) / Hv, int(blockIdx.x) % Hv};
  turn.find();
  if (turn.b >= B) {
    if (blockIdx.x == 0) after_previous();  // one block has to
    return;
  }
  if (threadIdx.x == 0) {
    for (int p = 0; p < READERS; p++) make_barrier(m.full[p], 1), make_barrier(m.read[p], WARP);
#ifdef EMULATED
    make_barrier(m.meeting, THREADS);
#endif
    barriers_made();
  }
  __syncthreads();

  if (warp == WARPS) {
    if (lane) return;
    for (int n = 0; turn.b < B; turn.advance(), turn.find()) {
      const float* from = S + ((long long)slot[turn.b] * Hv + turn.h) * K * V;
#pragma unroll 1
      for (int p = 0; p < READERS; p++, n++) {
        if (n >= READERS) wait(m.read[p], (n / READERS - 1) % 2);
        if (n >= AT_ONCE) wait(m.full[(n - AT_ONCE) % READERS], (n - AT_ONCE) / READERS % 2);
        arrive_expecting(m.full[p], PART * sizeof(float));
        load_run(m.state[p], from + p * PART, PART * sizeof(float), m.full[p]);
      }
    }
    return;
  }

  const Member me;
  Meeting meet{m};
  const bool reads = READERS == WARPS || me.is;
  Head head = turn.head();
#pragma unroll 1
  for (int parity = 0;; parity ^= 1) {
    HeldRing ring;
    ring.read_u(layer, head, me, 0);
    ring.read_key(layer, head);
    const int role = WARPS < 2 * ROLES ? warp : warp ^ ROLES * parity;
    Value value;
    begin_row(m.shared, value, layer, head, role);
    turn.advance(), turn.find();
    meet();
    ring.read_u(layer, head, me, 1);
    ring.score(m.shared.row, m.shared.x, layer, head);
    RowSums sum;
    if (reads) wait(m.full[warp], parity);
    const float* state = m.state[0] + me.group * EACH_KEYS * V + me.column;
    sum_state(sum, me, m.shared.x[0], m.shared.x[1], [&](int e, int j) { return load<4>(state + (e * EACH_KEYS + j) * V); });
    if (reads) arrive(m.read[warp]);
    meet();
    ring.share(m.shared.row, sum, layer, head, me);
    meet();
    if (role == 2) end_row(m.shared, value, layer, head);
    if (turn.b >= B) return;
    head = turn.head();
  }
}
