// Accepted rows of all GDN layers become part of the past, in place. Definition: commit in boleinfer/ops/gdn_commit.py.
//   window   of the last W rows, that of position p at place p % W
//   ring     of the rows behind the last multiple of C, that of position p at entry p % C (gdn_fold.cu takes the others)
// Nothing is computed. Where requests have single rows nothing is moved either: gdn_token.cuh writes them there.
//
// grid: pieces, B, layers; a block owns a piece of a row, 16 bytes a thread: of the window, then of u, of k, of g. block: 128
// threads. shared: none. Read twice: nothing. x: what the convolution reads.
//
// sizes: W=2,3,4,8 Act=bf16,float
#include "common.cuh"

// to[position % places] = from[rows[i]] for i = first .. m-1, N neighbours of each row by a thread; `position` is that of
// rows[0]. Returns the piece behind its last.
template <int N, class T>
__device__ int put(T* to, int places, int position, const T* from, int pitch, const int* rows, int first, int m, int width,
                   int piece) {
  const int c = (piece * blockDim.x + threadIdx.x) * N;
  if (piece >= 0 && c < width) {
    int place = (position + first) % places;
#pragma unroll 2
    for (int i = first; i < m; i++) {
      store<N>(to + (long long)place * width + c, load<N>(from + (long long)rows[i] * pitch + c));
      if (++place == places) place = 0;
    }
  }
  return piece - (width + blockDim.x * N - 1) / (blockDim.x * N);
}

extern "C" __global__ void __launch_bounds__(128) gdn_append(
    const __grid_constant__ Each<const Act> x,    // [R, 8*Packs] strides [8*Pitch, 1] aligned 16; of each layer
    const __grid_constant__ Each<const Act> k,    // [R, Hk, K] aligned 16; of each layer
    const __grid_constant__ Each<const float> u,  // [R, Hv, V] aligned 16; of each layer
    const __grid_constant__ Each<const float> g,  // [R, Hv] of each layer
    Act* window,                                  // [Layers, Slots, W, 8*Packs] aligned 16
    Act* ring_k,                                  // [Layers, Slots, C, Hk, K] aligned 16
    float* ring_u,                                // [Layers, Slots, C, Hv, V] aligned 16
    float* ring_g,                                // [Layers, Slots, C, Hv]
    const int* committed,                         // [B]
    const int* slot,                              // [B]
    const int* start,                             // [B+1]
    const int* row,                               // [R] accepted rows, request b's from start[b] on
    const int* count,                             // [B] how many
    int Slots,
    int Packs,
    int Pitch,
    int Hk,
    int K,
    int Hv,
    int V,
    int C)
{
  const int b = blockIdx.y, layer = blockIdx.z, own = slot[b], T = committed[b], channels = 8 * Packs;
  const int* rows = row + start[b];
  const long long place = (long long)layer * Slots + own;
  constexpr int N = PER_16_BYTES<Act>;
  after_previous();
  const int m = count[b];
  if (m <= 0) return;

  const int first = m - min(m, (T + m) % C);  // in the ring
  const long long entry = place * C;
  int piece = blockIdx.x;
  piece = put<N>(window + place * W * channels, W, T, x[layer], 8 * Pitch, rows, max(0, m - W), m, channels, piece);
  piece = put<PER_16_BYTES<float>>(ring_u + entry * Hv * V, C, T, u[layer], Hv * V, rows, first, m, Hv * V, piece);
  piece = put<N>(ring_k + entry * Hk * K, C, T, k[layer], Hk * K, rows, first, m, Hk * K, piece);
  put<1>(ring_g + entry * Hv, C, T, g[layer], Hv, rows, first, m, Hv, piece);
}
