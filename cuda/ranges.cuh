// The order of sums of the products on sm_90a, so that a row has the same bits whatever is beside it, however the work is
// cut, and in whichever kernel.
//
// k is cut into chunks of 64 (bf16) or 128 (FP8), the last of which may be short, and into RANGES ranges of chunks. The
// products of a range are added up from zero on, 16 k of bf16 at a time, as tensor cores do; then 0 + range 0 + range 1
// and so on, in float32. A range without chunks adds nothing.
#pragma once

#include "common.cuh"

constexpr int RANGES = 8;

// The first chunk of a range.
__device__ __forceinline__ int range_start(int range, int chunks) { return range * chunks / RANGES; }
