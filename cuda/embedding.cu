// Rows of a table, out[r] = table[ids[r]], and perhaps the rotary angles of positions. Definitions: embedding, token_inputs
// in boleinfer/ops/embedding.py. An id outside the table gives a row of NaN, which ends its request and no other.
//
// grid: R, a block owns a row; R x 2 with angles, those of a row by a block too. block: any number of threads; a thread
// owns every blockDim.x-th group of the row, 16 bytes of the table where the width and all addresses allow it, else one
// number. shared: none. Read twice: nothing.
//
// sizes: Wt=bf16,float Act=bf16,float Freq=double | Wt=bf16 Act=bf16 Freq=float | Wt=float Act=float Freq=float
#include "rope.cuh"

template <int N>
__device__ void copy_row(const Wt* from, Act* to, int D, bool valid) {
  for (int i = threadIdx.x * N; i < D; i += blockDim.x * N) {
    Pack<Act, N> row;
    if (valid) {
      const auto group = load<N>(from + i);
#pragma unroll
      for (int j = 0; j < N; j++) row.v[j] = from_float<Act>(to_float(group.v[j]));
    } else {
#pragma unroll
      for (int j = 0; j < N; j++) row.v[j] = from_float<Act>(nan());
    }
    store<N>(to + i, row);
  }
}

extern "C" __global__ void __launch_bounds__(1024) embedding(
    const int* ids,                     // [R]
    const Wt* __restrict__ table,       // [Vocab, D]
    Act* out,                           // [R, D]
    const int* position,                // [R] or null
    const Freq* __restrict__ inv_freq,  // [Half] or null
    float* cosine,                      // [R, Half] or null
    float* sine,                        // [R, Half] or null
    int Vocab,
    int D,
    int Half,
    double factor)
{
  after_all_previous();
  if (blockIdx.y == 1) {
    rotary_angles(position[blockIdx.x], inv_freq, factor, Half, cosine, sine, blockIdx.x);
    return;
  }
  const int id = ids[blockIdx.x];
  const bool valid = id >= 0 && id < Vocab;
  const Wt* from = table + (valid ? (long long)id * D : 0);
  Act* to = out + (long long)blockIdx.x * D;
  constexpr int N = PER_16_BYTES<Wt> > PER_16_BYTES<Act> ? PER_16_BYTES<Wt> : PER_16_BYTES<Act>;
  if (D % N == 0 && aligned16(table, out)) {
    copy_row<N>(from, to, D, valid);
  } else {
    copy_row<1>(from, to, D, valid);
  }
}
