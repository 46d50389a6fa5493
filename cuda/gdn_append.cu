// Accepted rows of all GDN layers become part of the past, in place. Definition: commit in boleinfer/ops/gdn_commit.py.
//   window   the last W-1 of (window ++ accepted inputs)
//   ring     m rows from entry `at` on, where m <= C; at = -1 where there is nothing to append (gdn_fold decides)
//   length   at + m, or 0 where m > C; written by one block of a request, read by none
// With m = 0 nothing is written. Nothing is computed.
//
// grid: pieces, B, layers; a block owns a piece of a row: of the window, then of u, of k, of g. block: 128 threads; one
// owns its channels of the window in all entries and reads them all before it writes, 16 bytes of neighbours where Cc and
// all addresses allow it, else one. shared: none. Read twice: nothing.
//
// sizes: W=2,3,4,8 Act=bf16,float
#include "common.cuh"

// window = the last W-1 of (window ++ rows of x), for every `pieces`-th piece of its channels.
template <int N>
__device__ void move_on(const Act* x, int Ldx, Act* window, const int* rows, int m, int Cc, int pieces) {
  for (int c = (blockIdx.x * blockDim.x + threadIdx.x) * N; c < Cc; c += pieces * blockDim.x * N) {
    Pack<Act, N> entry[W];  // one is unused: W may be 1
#pragma unroll
    for (int i = 0; i < W - 1; i++) {
      const int from = m + i;
      const bool kept = from < W - 1;
      entry[i] = load<N>(kept ? window + (long long)from * Cc + c : x + (long long)rows[from - (W - 1)] * Ldx + c);
    }
#pragma unroll
    for (int i = 0; i < W - 1; i++) store<N>(window + (long long)i * Cc + c, entry[i]);
  }
}

// to[i] = from[rows[i]] for m rows of `width` numbers, N of each row by a thread. Returns the piece behind its last.
template <int N, class T>
__device__ int append(T* to, const T* from, const int* rows, int m, int width, int piece) {
  const int c = (piece * blockDim.x + threadIdx.x) * N;
  if (piece >= 0 && c < width) {
#pragma unroll 2
    for (int i = 0; i < m; i++) {
      store<N>(to + (long long)i * width + c, load<N>(from + (long long)rows[i] * width + c));
    }
  }
  return piece - (width + blockDim.x * N - 1) / (blockDim.x * N);
}

extern "C" __global__ void __launch_bounds__(128) gdn_append(
    const __grid_constant__ Each<const Act> x,    // [R, Cc] strides [Ldx, 1] of each layer: inputs of the convolution
    const __grid_constant__ Each<const Act> k,    // [R, Hk, K] aligned 16; of each layer
    const __grid_constant__ Each<const float> u,  // [R, Hv, V] aligned 16; of each layer
    const __grid_constant__ Each<const float> g,  // [R, Hv] of each layer
    Act* window,                                  // [Layers, Slots, W-1, Cc]
    Act* ring_k,                                  // [Layers, Slots, C, Hk, K] aligned 16
    float* ring_u,                                // [Layers, Slots, C, Hv, V] aligned 16
    float* ring_g,                                // [Layers, Slots, C, Hv]
    int* length,                                  // [Slots]
    const int* at,                                // [B]
    const int* slot,                              // [B]
    const int* start,                             // [B+1]
    const int* row,                               // [R] accepted rows, request b's from start[b] on
    const int* count,                             // [B] how many
    int Slots,
    int Cc,
    int Ldx,
    int Hk,
    int K,
    int Hv,
    int V,
    int C,
    int Pieces)  // of the window
{
  const int b = blockIdx.y, layer = blockIdx.z, own = slot[b];
  const int* rows = row + start[b];
  const long long place = (long long)layer * Slots + own;
  constexpr int N = PER_16_BYTES<Act>;
  Act* entries = window + place * (W - 1) * Cc;
  const int c = (blockIdx.x * blockDim.x + threadIdx.x) * N;
  for (int i = 0; own >= 0 && c < Cc && i < W - 1; i++) prefetch(entries + (long long)i * Cc + c);
  after_previous();
  const int m = count[b], to = at[b];
  if (m <= 0) return;

  int piece = int(blockIdx.x) - Pieces;
  if (piece < 0) {
    if (Cc % N == 0 && Ldx % N == 0 && aligned16(x[layer], window)) {
      move_on<N>(x[layer], Ldx, entries, rows, m, Cc, Pieces);
    } else {
      move_on<1>(x[layer], Ldx, entries, rows, m, Cc, Pieces);
    }
  }
  if (blockIdx.x == 0 && layer == 0 && threadIdx.x == 0) length[own] = to < 0 ? 0 : to + m;
  if (piece < 0 || to < 0) return;
  const long long first = place * C + to;
  piece = append<PER_16_BYTES<float>>(ring_u + first * Hv * V, u[layer], rows, m, Hv * V, piece);
  piece = append<N>(ring_k + first * Hk * K, k[layer], rows, m, Hk * K, piece);
  append<1>(ring_g + first * Hv, g[layer], rows, m, Hv, piece);
}
