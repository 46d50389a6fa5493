// Where accepted rows go, and the state of all GDN layers where the ring is full. Definition: commit and ring_after in
// boleinfer/ops/gdn_commit.py. Of a request with m accepted rows and a ring of capacity C that holds `length`: rows are
// appended while they fit; else the ring is folded into the state first, and the rows themselves too when they are more
// than C. With m = 0 nothing is written. What is appended, and the length, is up to gdn_append.cu, which runs behind.
//   S = e^G S + sum_i e^{G - G_i} k_i u_i^T over the ring, then over the rows when m > C
//   at = the ring entry where the first row goes, -1 where none goes there
// Taken in pieces of CHUNK entries, the latest first, so that what comes after an entry is known; G in float64.
//
// grid: Hv, layers: a block works on all requests, which are seldom to be folded. block: 4 * Vt threads, a tile of Vt
// columns of V at a time; see gdn.cuh for who owns what. shared: 4 CHUNK (Vt + 8) bytes. The state is read once and written
// once, from and to registers.
//
// sizes: Act=bf16,float K=16 V=16 Vt=16 | Act=bf16,float K=128 V=128 Vt=32 | Act=bf16,float K=64 V=64 Vt=32
#include "gdn.cuh"

// What a head folds: the filled entries of its ring, then `rows` accepted rows.
struct Source {
  const Act *ring_k, *k;      // of the head: entry 0, row 0
  const float *ring_u, *u, *ring_g, *g;
  const int* row;             // accepted
  int ring, rows, Hk, Hv;
};

struct Piece {
  float U[CHUNK * Vt];
  double sum[CHUNK];
  float kept[CHUNK];
  int up[CHUNK];
  const Act* key[CHUNK];
  const float* factor[CHUNK];
};

// The u of `count` entries, each scaled by what remains of it, the warp's columns; zeros up to a multiple of 16.
__device__ __forceinline__ void fetch_faded(float* U, const float* const* from, const float* kept, int count,
                                            const Lane& me) {
  const int quarter = me.column + 4 * (threadIdx.x % 2);
  for (int i = threadIdx.x % WARP / 2; i < (count + 15) / 16 * 16; i += WARP / 2) {
    Pack<float, 4> u = {};
    if (i < count) u = load<4>(from[i] + quarter);
#pragma unroll
    for (int j = 0; j < 4; j++) u.v[j] = i < count ? u.v[j] * kept[i] : 0.0f;
    store<4>(U + at(i, quarter), u);
  }
}

// Columns v0 .. v0+Vt-1 of a head's state S [K, V].
__device__ __forceinline__ void fold_tile(float* S, const Source& from, int v0, Piece& piece, const Lane& me) {
  State state = {};
  double later = 0.0;  // log decay of all entries after the piece
  for (int end = from.ring + from.rows; end > 0; end -= CHUNK) {
    const int first = max(0, end - CHUNK), n = end - first;
    for (int i = threadIdx.x; i < CHUNK; i += THREADS) {
      const int entry = first + i;
      const bool held = entry < from.ring;
      const long long at = i >= n ? 0 : held ? entry : from.row[entry - from.ring];
      piece.key[i] = i >= n ? nullptr : (held ? from.ring_k : from.k) + at * from.Hk * K;
      piece.factor[i] = (held ? from.ring_u : from.u) + at * from.Hv * V + v0;
      piece.sum[i] = i >= n ? 0.0 : clamped((held ? from.ring_g : from.g)[at * from.Hv]);
      piece.up[i] = i - 1;
    }
    __syncthreads();
    sum_paths<CHUNK>(piece.sum, piece.up, n);
    const double whole = piece.sum[n - 1];
    for (int i = threadIdx.x; i < n; i += THREADS) piece.kept[i] = expf(float(later + (whole - piece.sum[i])));
    later += whole;
    __syncthreads();
    fetch_faded(piece.U, piece.factor, piece.kept, n, me);
    __syncwarp();
    absorb(state, piece.key, piece.U, (n + 15) / 16 * 16, me);
    __syncthreads();
  }

  const float faded = expf(float(later));
#pragma unroll
  for (int j = 0; j < SHARE; j++) {
    float* here = S + (SHARE * me.row + j) * V + v0 + me.pair;
    const float2 old = load_two(here);
    store_two(here, fmaf(faded, old.x, state[j / 2][j % 2 * 2]), fmaf(faded, old.y, state[j / 2][j % 2 * 2 + 1]));
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 512 / THREADS) gdn_fold(
    float* __restrict__ S,                        // [Layers, Slots, Hv, K, V] aligned 16
    const Act* __restrict__ ring_k,               // [Layers, Slots, C, Hk, K] aligned 16
    const float* __restrict__ ring_u,             // [Layers, Slots, C, Hv, V] aligned 16
    const float* __restrict__ ring_g,             // [Layers, Slots, C, Hv]
    const __grid_constant__ Each<const Act> k,    // [R, Hk, K] aligned 16; of each layer
    const __grid_constant__ Each<const float> u,  // [R, Hv, V] aligned 16; of each layer
    const __grid_constant__ Each<const float> g,  // [R, Hv] of each layer
    const int* __restrict__ length,               // [Slots]
    const int* __restrict__ slot,                 // [B]
    const int* __restrict__ start,                // [B+1]
    const int* __restrict__ row,                  // [R]
    const int* __restrict__ count,                // [B]
    int* __restrict__ at,                         // [B]
    int B,
    int Slots,
    int Hk,
    int Hv,
    int C)
{
  __shared__ __align__(16) Piece piece;
  const int h = blockIdx.x, layer = blockIdx.y, hk = h / (Hv / Hk);

  const int mine = min(int(threadIdx.x), B - 1), first = slot[mine] < 0 ? 0 : length[slot[mine]];  // most often all
  after_previous();
  bool full = false;
  for (int b = threadIdx.x; b < B; b += THREADS) {
    const int m = count[b], held = m <= 0 ? 0 : b < THREADS ? first : length[slot[b]];
    const bool overflows = m > 0 && held + m > C;
    full |= overflows;
    if (h == 0 && layer == 0) at[b] = m > C ? -1 : overflows ? 0 : held;
  }
  if (!__syncthreads_or(full)) return;

  for (int b = 0; b < B; b++) {
    const int m = count[b], held = m > 0 ? length[slot[b]] : 0;
    if (m <= 0 || held + m <= C) continue;
    const long long s = (long long)layer * Slots + slot[b], entry = s * C;
    const Source from = {ring_k + (entry * Hk + hk) * K, k[layer] + hk * K, ring_u + (entry * Hv + h) * V,
                         u[layer] + h * V, ring_g + entry * Hv + h, g[layer] + h, row + start[b], held,
                         m > C ? m : 0, Hk, Hv};
    float* state = S + (s * Hv + h) * K * V;
    for (int i = threadIdx.x; i < K * V / 8; i += THREADS) prefetch(state + 8 * i);
    for (int v0 = 0; v0 < V; v0 += Vt) fold_tile(state, from, v0, piece, this_lane());
  }
}
