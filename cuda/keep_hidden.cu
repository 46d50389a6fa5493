// Keeps the hidden rows that were accepted: kept[slot, position % Ring] = hidden[row]. What for: device_waiting.py.
//
// grid: R, a block owns a place in a request's path. block: any number of threads; a thread owns every blockDim.x-th
// group of the row, 16 bytes where the width and both addresses allow it, else one number. shared: none. Read twice: nothing.
//
// sizes: Act=bf16,float
#include "common.cuh"

template <int N>
__device__ void copy_row(const Act* from, Act* to, int D) {
  for (int i = threadIdx.x * N; i < D; i += blockDim.x * N) store<N>(to + i, load<N>(from + i));
}

extern "C" __global__ void __launch_bounds__(256) keep_hidden(
    const Act* hidden,     // [R, D]
    const int* row,        // [R] the accepted rows, from the request's first row on
    const int* count,      // [B] accepted rows
    const int* request,    // [R] -1: an unused row
    const int* start,      // [B + 1]
    const int* slot,       // [B]
    const int* committed,  // [B] tokens before these
    Act* kept,             // [Slots, Ring, D]
    int Ring,
    int D)
{
  after_previous();
  const int place = blockIdx.x, b = request[place];
  if (b < 0 || slot[b] < 0 || place - start[b] >= count[b]) return;
  const int position = committed[b] + place - start[b];
  const Act* from = hidden + (long long)row[place] * D;
  Act* to = kept + ((long long)slot[b] * Ring + position % Ring) * D;
  constexpr int N = PER_16_BYTES<Act>;
  if (D % N == 0 && aligned16(hidden, kept)) {
    copy_row<N>(from, to, D);
  } else {
    copy_row<1>(from, to, D);
  }
}
