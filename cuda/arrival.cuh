// Several blocks share a task, in the same launch: the one that is done last ends it, or they read what others write.
#pragma once

#include "common.cuh"

// What was written before can be seen by whoever then sees a later write, on the whole device.
__device__ __forceinline__ void fence_device() {
#ifdef EMULATED
  __threadfence();
#else
  asm volatile("fence.acq_rel.gpu;" ::: "memory");
#endif
}

// Whether this block is the last of `blocks` that call it with this counter; what the others wrote before can then be
// read. The counter is 0 before and after. All threads together; they get the same.
__device__ __forceinline__ bool arrives_last(int* counter, int blocks) {
  __shared__ bool last;
  __syncthreads();
  if (threadIdx.x == 0) {
    fence_device();
    last = atomicAdd(counter, 1) == blocks - 1;
    if (last) *counter = 0;
    fence_device();
  }
  __syncthreads();
  return last;
}

// Of `all` that call it with this counter the last `ranks` wait until all have come: the caller's rank among these, -1 for
// the others; what all wrote before can then be read. So many blocks, of all counters in use, must fit on the device
// beside one that still works. The counter is 0 before and after. By one thread.
__device__ __forceinline__ int rank_among_last(int* counter, int all, int ranks) {
  fence_device();
  const int before = atomicAdd(counter, 1), rank = before - (all - ranks);
  if (rank >= 0) {
    while (before < all - 1 && *static_cast<volatile int*>(counter) < all) {}
    fence_device();
    atomicInc(reinterpret_cast<unsigned*>(counter), unsigned(all + ranks - 1));  // the last one clears it
  }
  return rank;
}

// The same by all threads of a block, or of a warp, together; they get the same.
__device__ __forceinline__ int arrives_among_last(int* counter, int blocks, int ranks) {
  __shared__ int rank;
  __syncthreads();
  if (threadIdx.x == 0) rank = rank_among_last(counter, blocks, ranks);
  __syncthreads();
  return rank;
}
__device__ __forceinline__ int warp_arrives_among_last(int* counter, int warps, int ranks) {
  __syncwarp();
  const int rank = threadIdx.x % WARP == 0 ? rank_among_last(counter, warps, ranks) : 0;
  __syncwarp();
  return __shfl_sync(ALL_LANES, rank, 0);
}

// A warp passes on what it wrote: whoever awaits it with the same flag, once, can then read that. The flag is 0 before and
// after. A block that awaits must come after the one that passes on: blocks begin in order, so this one has begun.
__device__ __forceinline__ void warp_passes_on(int* flag) {
  __syncwarp();
  if (threadIdx.x % WARP == 0) {
    fence_device();
    atomicExch(flag, 1);
  }
}
__device__ __forceinline__ void warp_awaits(int* flag) {
  if (threadIdx.x % WARP == 0) {
    while (*static_cast<volatile int*>(flag) == 0) {}
    fence_device();
    *flag = 0;
  }
  __syncwarp();
}

// Four words that other blocks may be writing, each as it was or as it is written.
__device__ __forceinline__ uint4 read_live(const void* p) {
#ifdef EMULATED
  return *static_cast<const uint4*>(p);
#else
  uint4 v;
  asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(__cvta_generic_to_global(p))
               : "memory");
  return v;
#endif
}
