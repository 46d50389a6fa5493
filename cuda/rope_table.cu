// Cosines and sines of a step's rotary angles. Definition: rope_table in boleinfer/ops/rope.py.
// Angles in float64: as a float32 product they would be off by 0.004 rad at position 100,000.
//
// grid, block: at least R * Half threads in all, one an angle. shared: none. Read twice: nothing.
//
// sizes: Freq=double,float
#include "common.cuh"

extern "C" __global__ void __launch_bounds__(256) rope_table(
    const int* position,                // [R]
    const Freq* __restrict__ inv_freq,  // [Half]
    float* cosine,                      // [R, Half]
    float* sine,                        // [R, Half]
    int R,
    int Half,
    double factor)
{
  after_previous();
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= R * Half) return;
  double s, c;
  sincos(double(position[i / Half]) * double(inv_freq[i % Half]), &s, &c);
  cosine[i] = float(factor * c);
  sine[i] = float(factor * s);
}
