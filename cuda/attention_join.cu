// The end of attention: joins the parts of each row in order, out = sum of parts / sum of weights * sigmoid(gate).
// Definition: tree_attention in boleinfer/ops/attention.py; parts are explained in attention.cuh.
//
// grid: Rq, ceil(Hq Dh / 512). block: 128 threads; a thread owns 4 neighbouring columns of a row, of one head.
// shared: 8 bytes for each of 64 parts and each head of the block. Read twice: nothing.
//
// sizes: Dh=32,64,128,256 Act=bf16,float
// spills: one register on sm_100
#include "attention.cuh"

constexpr int THREADS = 128, EACH = 4, HEADS = THREADS * EACH / Dh;  // heads of a block
constexpr int AT_ONCE = 64;                                         // parts

extern "C" __global__ void __launch_bounds__(THREADS) attention_join(
    const float* part_o,   // [Parts, Hq, Dh] aligned 16
    const float* part_ml,  // [Parts, Hq, 2] aligned 16
    const int* parts,      // [Rq, 2] first part and number of parts of a row
    const int* rows,       // [Rq] or null; rows of the forest, -1 for none
    const int* request,    // [R]
    const Act* gate,       // [Rq, Hq, Dh] strides [Ldg, Dh, 1]
    Act* out,              // [Rq, Hq, Dh]
    int Hq,
    int Ldg)
{
  after_previous();
  __shared__ float2 factors[HEADS][AT_ONCE];
  __shared__ float weights[HEADS];
  const int row = rows == nullptr ? blockIdx.x : rows[blockIdx.x];
  if (row < 0 || request[row] < 0) return;
  const int first = parts[2 * blockIdx.x], count = parts[2 * blockIdx.x + 1];
  const int own = threadIdx.x * EACH / Dh, head = blockIdx.y * HEADS + own, col = threadIdx.x * EACH % Dh;

  float o[EACH];
  float top = -inf(), weight = 0.0f;  // of the thread's head, up to the part before
  for (int begin = 0; begin < count; begin += AT_ONCE) {
    const int some = min(AT_ONCE, count - begin);
    __syncthreads();
    // factors of each part, and the sum of weights: a thread a head
    if (threadIdx.x < HEADS && blockIdx.y * HEADS + threadIdx.x < Hq) {
      const float* ml = part_ml + 2 * ((long long)(first + begin) * Hq + blockIdx.y * HEADS + threadIdx.x);
#pragma unroll 8
      for (int i = 0; i < some; i++) {
        const float2 next = *reinterpret_cast<const float2*>(ml + 2ll * i * Hq);
        if (begin + i == 0) {
          top = next.x, weight = next.y;
        } else {
          const float2 factor = join_factors(top, next.x);
          weight = joined(weight, next.y, factor);
          factors[threadIdx.x][i] = factor;
        }
      }
      weights[threadIdx.x] = weight;
    }
    __syncthreads();
    // o = o e^(m - top) + o_part e^(m_part - top)
    if (head >= Hq) continue;
    const float* from = part_o + ((long long)(first + begin) * Hq + head) * Dh + col;
#pragma unroll 8
    for (int i = 0; i < some; i++) {
      const auto part = load<EACH>(from + (long long)i * Hq * Dh);
      const float2 factor = factors[own][i];
#pragma unroll
      for (int e = 0; e < EACH; e++) o[e] = begin + i == 0 ? part.v[e] : joined(o[e], part.v[e], factor);
    }
  }
  if (head >= Hq) return;
  const Act* by = gate + (long long)blockIdx.x * Ldg + head * Dh + col;
  Pack<Act, EACH> y;
#pragma unroll
  for (int e = 0; e < EACH; e++) y.v[e] = from_float<Act>(o[e] / weights[own] * sigmoid(to_float(by[e])));
  store<EACH>(out + ((long long)blockIdx.x * Hq + head) * Dh + col, y);
}
