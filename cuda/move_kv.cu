// Moves the KV rows of accepted tree rows to the slots behind the committed ones, in place, for all requests and all
// layers at once. Definition: move_kv in boleinfer/ops/attention.py.
//
// grid: B, pieces of a KV row, layers. block: 128 threads; a thread owns 16 bytes (or one number) of
// every row of its request and moves them in the order of the path: row i goes to slot T + i, never behind its own, so that
// no source is lost. shared: none. Read twice: nothing.
//
// sizes: Act=bf16,float
#include "common.cuh"

template <int N>
__device__ void move_rows(Act* pages, const int* table, const int* path, int count, int start, int T, int P, int Width) {
  const int col = (blockIdx.y * blockDim.x + threadIdx.x) * N;
  if (col >= Width) return;
  for (int i = 0; i < count; i++) {
    const int from = T + path[i] - start, to = T + i;
    if (from == to) continue;
    const auto row = load<N>(pages + ((long long)table[from / P] * P + from % P) * Width + col);
    store<N>(pages + ((long long)table[to / P] * P + to % P) * Width + col, row);
  }
}

extern "C" __global__ void __launch_bounds__(128) move_kv(
    Act* k_pages,           // [Layers, Pages, P, Hkv, Dh]
    Act* v_pages,           // [Layers, Pages, P, Hkv, Dh]
    const int* page_table,  // [B, M]
    const int* start,       // [B+1]
    const int* committed,   // [B]
    const int* row,         // [R] accepted rows of request b from start[b] on
    const int* count,       // [B]
    int Pages,
    int Hkv,
    int Dh,
    int P,
    int M)
{
  const int b = blockIdx.x, first = start[b], T = committed[b], Width = Hkv * Dh;
  after_previous();
  const int accepted = count[b];
  const int* table = page_table + (long long)b * M;
  const long long layer = (long long)blockIdx.z * Pages * P * Width;
  k_pages += layer, v_pages += layer;
  constexpr int N = PER_16_BYTES<Act>;
  if (Width % N == 0 && aligned16(k_pages, v_pages)) {
    move_rows<N>(k_pages, table, row + first, accepted, first, T, P, Width);
    move_rows<N>(v_pages, table, row + first, accepted, first, T, P, Width);
  } else {
    move_rows<1>(k_pages, table, row + first, accepted, first, T, P, Width);
    move_rows<1>(v_pages, table, row + first, accepted, first, T, P, Width);
  }
}
