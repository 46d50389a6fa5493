// Accepted rows of the gated delta rule become part of the past. Definition: commit and ring_after in
// boleinfer/ops/gdn.py. Of a request with m accepted rows and a ring of capacity C that holds `length`: rows are
// appended while they fit; else the ring is folded into the state first, and the rows themselves too when they are more
// than C. With m = 0 nothing is written. The two kernels run in this order; the length is not changed (gdn_advance.cu).
//
// gdn_fold    S = e^G S + sum_i e^{G - G_i} k_i u_i^T over the ring, then over the rows when m > C. Taken in pieces of
//             CHUNK entries, the latest first, so that what comes after an entry is known; G in float64.
//             grid: V / Vt, Hv, B. block: 4 * Vt threads; see gdn.cuh for who owns what. shared: 4 CHUNK (Vt + 8)
//             bytes. The state is read once and written once, from and to registers.
// gdn_append  copies up to C rows to the ring. grid: C, B. block: any; a block copies a row. shared: none.
//
// sizes: Act=bf16,float K=16 V=16 Vt=16 | Act=bf16,float K=128 V=128 Vt=16,32 | Act=bf16,float K=64 V=64 Vt=32
#include "gdn.cuh"

// Whether the rows of a request do not fit into its ring any more.
__device__ __forceinline__ bool overflows(int length, int m, int C) { return length + m > C; }

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

extern "C" __global__ void __launch_bounds__(THREADS, 512 / THREADS) gdn_fold(
    float* __restrict__ S,             // [Slots, Hv, K, V] aligned 16
    const Act* __restrict__ ring_k,    // [Slots, C, Hk, K] aligned 16
    const float* __restrict__ ring_u,  // [Slots, C, Hv, V] aligned 16
    const float* __restrict__ ring_g,  // [Slots, C, Hv]
    const Act* __restrict__ k,         // [R, Hk, K] aligned 16
    const float* __restrict__ u,       // [R, Hv, V] aligned 16
    const float* __restrict__ g,       // [R, Hv]
    const int* __restrict__ length,    // [Slots]
    const int* __restrict__ slot,      // [B]
    const int* __restrict__ start,     // [B+1]
    const int* __restrict__ row,       // [R]
    const int* __restrict__ count,     // [B]
    int Hk,
    int Hv,
    int C)
{
  after_previous();
  __shared__ __align__(16) float U[CHUNK * Vt];
  __shared__ double sum[CHUNK];
  __shared__ float kept[CHUNK];
  __shared__ int up[CHUNK];
  __shared__ const Act* key[CHUNK];
  __shared__ const float* factor[CHUNK];
  const int b = blockIdx.z, h = blockIdx.y, v0 = blockIdx.x * Vt, hk = h / (Hv / Hk), m = count[b];
  if (m <= 0) return;
  const long long s = slot[b];
  const int ring = length[s], first = start[b];
  if (!overflows(ring, m, C)) return;

  const Lane me = this_lane();
  State state = {};
  double later = 0.0;  // log decay of all entries after the piece
  for (int end = ring + (m > C ? m : 0); end > 0; end -= CHUNK) {
    const int from = max(0, end - CHUNK), n = end - from;
    for (int i = threadIdx.x; i < CHUNK; i += THREADS) {
      const int entry = from + i;
      const bool held = entry < ring;
      const long long at_ring = s * C + entry, at_row = i < n && !held ? row[first + entry - ring] : 0;
      key[i] = i >= n ? nullptr : held ? ring_k + (at_ring * Hk + hk) * K : k + (at_row * Hk + hk) * K;
      factor[i] = (held ? ring_u + (at_ring * Hv + h) * V : u + (at_row * Hv + h) * V) + v0;
      sum[i] = i >= n ? 0.0 : clamped(held ? ring_g[at_ring * Hv + h] : g[at_row * Hv + h]);
      up[i] = i - 1;
    }
    __syncthreads();
    sum_paths<CHUNK>(sum, up, n);
    for (int i = threadIdx.x; i < n; i += THREADS) kept[i] = expf(float(later + (sum[n - 1] - sum[i])));
    later += sum[n - 1];
    __syncthreads();
    fetch_faded(U, factor, kept, n, me);
    __syncwarp();
    absorb(state, key, U, (n + 15) / 16 * 16, me);
    __syncthreads();
  }

  float* to = S + (s * Hv + h) * K * V + v0 + me.pair;
  const float faded = expf(float(later));
#pragma unroll
  for (int j = 0; j < SHARE; j++) {
    float* here = to + (SHARE * me.row + j) * V;
    const float2 old = load_two(here);
    store_two(here, fmaf(faded, old.x, state[j / 2][j % 2 * 2]), fmaf(faded, old.y, state[j / 2][j % 2 * 2 + 1]));
  }
}

// One row of n numbers, 16 bytes at a time; both at multiples of 16.
template <class T>
__device__ __forceinline__ void copy(T* to, const T* from, int n) {
  constexpr int N = PER_16_BYTES<T>;
  for (int i = threadIdx.x * N; i < n; i += blockDim.x * N) store<N>(to + i, load<N>(from + i));
}

extern "C" __global__ void gdn_append(
    Act* __restrict__ ring_k,        // [Slots, C, Hk, K] aligned 16
    float* __restrict__ ring_u,      // [Slots, C, Hv, V] aligned 16
    float* __restrict__ ring_g,      // [Slots, C, Hv]
    const Act* __restrict__ k,       // [R, Hk, K] aligned 16
    const float* __restrict__ u,     // [R, Hv, V] aligned 16
    const float* __restrict__ g,     // [R, Hv]
    const int* __restrict__ length,  // [Slots]
    const int* __restrict__ slot,    // [B]
    const int* __restrict__ start,   // [B+1]
    const int* __restrict__ row,     // [R]
    const int* __restrict__ count,   // [B]
    int Hk,
    int Hv,
    int C)
{
  after_previous();
  const int i = blockIdx.x, b = blockIdx.y, m = count[b];
  if (i >= m || m > C) return;
  const long long s = slot[b], from = row[start[b] + i];
  const long long to = s * C + i + (overflows(length[s], m, C) ? 0 : length[s]);
  copy(ring_k + to * Hk * K, k + from * Hk * K, Hk * K);
  copy(ring_u + to * Hv * V, u + from * Hv * V, Hv * V);
  for (int h = threadIdx.x; h < Hv; h += blockDim.x) ring_g[to * Hv + h] = g[from * Hv + h];
}
