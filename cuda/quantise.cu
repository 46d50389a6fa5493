// bf16 matrices as E4M3 numbers with a scale for each block of 128 x 128. Definition: boleinfer/quantise.py.
//
// grid: blocks of columns, blocks of rows; a block owns 128 x 128 numbers. block: THREADS; 16 lanes have a row's 128, 8 each.
// shared: 128 bytes. Read twice: nothing.
#include "common.cuh"

constexpr int THREADS = 256, BLOCK = 128, AT_ONCE = THREADS / 16;

// scale = max |w| / 448 of a block, 1 where all are 0
extern "C" __global__ void __launch_bounds__(256) scales(
    const bf16* w,  // [Dout, Din] aligned 16
    float* scale,   // [Tall, Wide]
    int Dout,
    int Din)
{
  after_previous();
  const int k = blockIdx.x * BLOCK + threadIdx.x % 16 * 8, first = blockIdx.y * BLOCK;
  float most = 0.0f;
  for (int n = first + threadIdx.x / 16; n < min(Dout, first + BLOCK) && k < Din; n += AT_ONCE) {
    const auto own = load<8>(w + (long long)n * Din + k);
#pragma unroll
    for (int i = 0; i < 8; i++) most = fmaxf(most, fabsf(to_float(own.v[i])));
  }
  most = block_max(most);
  if (threadIdx.x == 0) scale[blockIdx.y * (long long)gridDim.x + blockIdx.x] = most > 0.0f ? most / 448.0f : 1.0f;
}

// bits = w / scale
extern "C" __global__ void __launch_bounds__(256) narrow(
    const bf16* w,        // [Dout, Din] aligned 16
    const float* scale,   // [Tall, Wide] of all blocks of rows where Tall is 1
    unsigned char* bits,  // [Dout, Din] aligned 16
    int Dout,
    int Din,
    int Tall)
{
  after_previous();
  const int k = blockIdx.x * BLOCK + threadIdx.x % 16 * 8, first = blockIdx.y * BLOCK;
  const float s = scale[(Tall > 1 ? blockIdx.y : 0) * (long long)gridDim.x + blockIdx.x];
  for (int n = first + threadIdx.x / 16; n < min(Dout, first + BLOCK) && k < Din; n += AT_ONCE) {
    const auto own = load<8>(w + (long long)n * Din + k);
    Pack<fp8, 8> narrowed;
#pragma unroll
    for (int i = 0; i < 8; i++) narrowed.v[i] = from_float<fp8>(to_float(own.v[i]) / s);
    memcpy(__builtin_assume_aligned(bits + (long long)n * Din + k, 8), narrowed.v, 8);
  }
}
