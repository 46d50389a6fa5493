// What the MTP layer begins with: the embedding of each token and the hidden row that it pairs with, both normed, side by
// side, and the rotary angles of its position. Definition: mtp_inputs in boleinfer/ops/mtp_inputs.py. Sums in float32,
// angles in float64. An id or a row outside its table gives a row of NaN.
//
// grid: R x 3, of a row: its token, its hidden row, its angles. block: full warps; a thread owns every blockDim.x-th group
// of the row, 16 bytes where the width and all addresses allow it, else one number. shared: 128 bytes. Read twice: both
// rows, the second time from L1.
//
// sizes: Act=bf16 Freq=double | Act=float Freq=float
#include "norm_row.cuh"
#include "rope.cuh"

extern "C" __global__ void __launch_bounds__(1024) mtp_inputs(
    const int* token,                   // [R]
    const Act* __restrict__ table,      // [Vocab, D]
    const float* __restrict__ wa,       // [D] the stored weight of the embedding's norm, a delta to 1
    const Act* hidden,                  // [Rows, D]
    const int* source,                  // [R] or null: rows of hidden; null: each its own
    const float* __restrict__ wb,       // [D] of the hidden row's norm
    const int* position,                // [R]
    const Freq* __restrict__ inv_freq,  // [Half]
    Act* out,                           // [R, 2*D]
    float* cosine,                      // [R, Half]
    float* sine,                        // [R, Half]
    int Vocab,
    int Rows,
    int D,
    int Half,
    float eps,
    double factor)
{
  after_all_previous();
  const int row = blockIdx.x, part = blockIdx.y;
  if (part == 2) {
    rotary_angles(position[row], inv_freq, factor, Half, cosine, sine, row);
    return;
  }
  const int id = part == 0 ? token[row] : source == nullptr ? row : source[row];
  Act* to = out + (2 * (long long)row + part) * D;
  if (id < 0 || id >= (part == 0 ? Vocab : Rows)) {
    for (int i = threadIdx.x; i < D; i += blockDim.x) to[i] = from_float<Act>(nan());
    return;
  }
  const Act* x = (part == 0 ? table : hidden) + (long long)id * D;
  const float* w = part == 0 ? wa : wb;
  constexpr int N = PER_16_BYTES<Act>;
  if (D % N == 0 && aligned16(table, hidden, wa, wb, out)) {
    norm_row<N>(x, w, to, D, eps);
  } else {
    norm_row<1>(x, w, to, D, eps);
  }
}
