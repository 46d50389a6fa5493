// Tiles of matrices from global into shared memory without registers, and the barriers that tell when they are there
// (sm_90).
//
// A TensorMap describes a matrix, or rows on up to three axes (the launcher makes it from the parameter's declaration); load_tile
// copies a box of it, zeros where the box leaves it. A row of a box has 128 bytes, and its 16-byte words are swizzled: word u
// of row r lies in place u ^ (r % 8) of the row, so that eight rows' words of one column lie in different banks.
//
// A Barrier counts arrivals and bytes. It begins in phase 0; when as many have arrived as it was made for, and all
// bytes that were announced are there, the next phase begins. wait(barrier, p) waits for the end of a phase of parity
// p: what the arrived did before, and the bytes, can then be seen.
#pragma once

#include "mma.cuh"

#ifdef EMULATED
#include "emulated_tma.h"
#else

template <class T>
struct alignas(64) TensorMap {  // of a matrix of T
  char opaque[128];
};

struct alignas(8) Barrier {
  unsigned long long state;
};

// By one thread; then barriers_made() and __syncthreads() before anyone uses it.
__device__ __forceinline__ void make_barrier(Barrier& barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(&barrier)), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void barriers_made() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

__device__ __forceinline__ void arrive(Barrier& barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(&barrier)) : "memory");
}

// Arrives and announces so many bytes for this phase.
__device__ __forceinline__ void arrive_expecting(Barrier& barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(&barrier)), "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void wait(Barrier& barrier, int parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}" ::"r"(shared_address(&barrier)), "r"(parity) : "memory");
}

// Starts copying the box that begins at this row and k to a multiple of 1024 bytes; its bytes count at `full`. In L2 they
// make room for others first where they are read ONCE (createpolicy's words for evict_normal and evict_first).
constexpr unsigned long long KEPT = 0x1000000000000000ull, ONCE = 0x12f0000000000000ull;

template <class T>
__device__ __forceinline__ void load_tile(
    void* to, const TensorMap<T>& map, Barrier& full, int k, int row, unsigned long long policy = KEPT) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1, {%3, %4}], [%2], %5;" ::"r"(shared_address(to)), "l"(&map), "r"(shared_address(&full)), "r"(k), "r"(row),
      "l"(policy)
      : "memory");
}

// The same of three axes: the box begins at this k, this number on the middle axis and this one on the first.
template <class T>
__device__ __forceinline__ void load_tile(
    void* to, const TensorMap<T>& map, Barrier& full, int k, int middle, int first, unsigned long long policy) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1, {%3, %4, %5}], [%2], %6;" ::"r"(shared_address(to)), "l"(&map), "r"(shared_address(&full)), "r"(k),
      "r"(middle), "r"(first), "l"(policy)
      : "memory");
}

// The same of four axes.
template <class T>
__device__ __forceinline__ void load_tile(
    void* to, const TensorMap<T>& map, Barrier& full, int k, int third, int second, int first, unsigned long long policy) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(shared_address(to)), "l"(&map), "r"(shared_address(&full)), "r"(k),
      "r"(third), "r"(second), "r"(first), "l"(policy)
      : "memory");
}

// Brings the description itself, which the first load_tile has to wait for otherwise.
template <class T>
__device__ __forceinline__ void prefetch_map(const TensorMap<T>& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

#endif

// A barrier of THREADS threads of a block, whole warps: the hardware's number 1, on the emulator one in memory.
template <int THREADS>
struct MeetingOf {
  Barrier& barrier;
  int parity = 0;

  __device__ __forceinline__ void operator()() {
#ifdef EMULATED
    arrive(barrier);
    wait(barrier, parity);
    parity ^= 1;
#else
    asm volatile("barrier.sync 1, %0;" ::"n"(THREADS) : "memory");
#endif
  }
};
