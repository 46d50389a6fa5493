// Several blocks share a task, and the one that is done last ends it, in the same launch.
#pragma once

#include "common.cuh"

// Whether this block is the last of `blocks` that call it with this counter; what the others wrote before can then be
// read. The counter is 0 before and after. All threads together; they get the same.
__device__ __forceinline__ bool arrives_last(int* counter, int blocks) {
  __shared__ bool last;
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    last = atomicAdd(counter, 1) == blocks - 1;
    if (last) *counter = 0;
    __threadfence();
  }
  __syncthreads();
  return last;
}
