// Cosines and sines of a row's rotary angles, for embedding.cu and mtp_inputs.cu. Definition: rotary_angles
// in boleinfer/ops/embedding.py. Angles in float64: as a float32 product they would be off by 0.004 rad at position 100,000.
#pragma once

#include "common.cuh"

// cos and sin of position * inv_freq, times factor, into row `row` of [R, Half]. By all threads of a block.
__device__ __forceinline__ void rotary_angles(int position, const Freq* inv_freq, double factor, int Half, float* cosine,
                                              float* sine, long long row) {
  for (int i = threadIdx.x; i < Half; i += blockDim.x) {
    double s, c;
    sincos(double(position) * double(inv_freq[i]), &s, &c);
    cosine[row * Half + i] = float(factor * c);
    sine[row * Half + i] = float(factor * s);
  }
}
