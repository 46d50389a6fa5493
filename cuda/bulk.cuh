// Runs of bytes from global into shared memory without registers (sm_90 and later).
#pragma once

#include "tma.cuh"

#ifdef EMULATED
#include "emulated_bulk.h"
#else

// Starts copying so many bytes, a multiple of 16, between addresses that are multiples of 16; they count at `full`, and in
// L2 make room for others first.
__device__ __forceinline__ void load_run(void* to, const void* from, int bytes, Barrier& full) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(
          shared_address(to)),
      "l"(__cvta_generic_to_global(from)), "r"(bytes), "r"(shared_address(&full)), "l"(ONCE)
      : "memory");
}

#endif
