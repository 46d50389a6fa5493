// Number types, 16-byte accesses, block reductions, activations and random numbers for all kernels. Knows no op.
//
// Every file is compiled with this one in front of it, then its compile-time constants, then its own text.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include "philox.cuh"

using bf16 = __nv_bfloat16;
using fp8 = __nv_fp8_e4m3;

constexpr int WARP = 32;
constexpr unsigned ALL_LANES = 0xffffffffu;

__device__ __forceinline__ float inf() { return __int_as_float(0x7f800000); }
__device__ __forceinline__ float nan() { return __int_as_float(0x7fc00000); }

// ---- one kernel after another ---------------------------------------------------------------------------------------

// Waits until the kernels queued before this one are done and what they wrote can be read. A kernel that calls it is
// launched while they still run: what stands before the call, such as reading weights, overlaps with them. Before the
// call nothing may be written, and nothing read that another kernel writes.
// The compiler keeps to that for plain pointers. A pointer that is `__restrict__`, and __ldg, tell it that the wait has
// nothing to do with them: it has moved such reads across the call. So only weights are `__restrict__`
// (tests/test_waiting.py).
__device__ __forceinline__ void after_previous() {
#ifdef EMULATED
  emulated::previous_done();
#elif __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");  // the next one may come and wait here as well
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// The same for `embedding` and `mtp_inputs`, with which passes over rows begin: kernels behind them may read, before
// their own after_previous(), what was written before it: the forest, slots, windows, states and rings. None
// of them is launched before the wait here is over. At least one block of every kernel has to wait.
__device__ __forceinline__ void after_all_previous() {
#ifdef EMULATED
  emulated::previous_done();
#elif __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// ---- numbers --------------------------------------------------------------------------------------------------------

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(bf16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float to_float(half x) { return __half2float(x); }
__device__ __forceinline__ float to_float(fp8 x) { return float(x); }

// float -> T, to the nearest, ties to even; fp8 saturates at 448
template <class T>
__device__ __forceinline__ T from_float(float x);
template <>
__device__ __forceinline__ float from_float<float>(float x) { return x; }
template <>
__device__ __forceinline__ bf16 from_float<bf16>(float x) { return __float2bfloat16_rn(x); }
template <>
__device__ __forceinline__ half from_float<half>(float x) { return __float2half_rn(x); }
template <>
__device__ __forceinline__ fp8 from_float<fp8>(float x) { return fp8(x); }

// ---- memory ---------------------------------------------------------------------------------------------------------

// N neighbours, moved as 16-byte words where they fill such words (their address is then a multiple of 16)
template <class T, int N>
struct alignas(sizeof(T) * N % 16 == 0 ? 16 : alignof(T)) Pack {
  T v[N];
};

template <class T>
constexpr int PER_16_BYTES = 16 / sizeof(T);

template <int N, class T>
__device__ __forceinline__ Pack<T, N> load(const T* p) {
  Pack<T, N> pack;
  if constexpr (sizeof(pack) % 16 == 0) {
#pragma unroll
    for (int i = 0; i < sizeof(pack) / 16; i++) {
      const uint4 word = reinterpret_cast<const uint4*>(p)[i];
      memcpy(reinterpret_cast<char*>(&pack) + 16 * i, &word, 16);
    }
  } else {
#pragma unroll
    for (int i = 0; i < N; i++) pack.v[i] = p[i];
  }
  return pack;
}

// The same for what is read once, such as weights at few rows: leaves the caches to what is read again.
template <int N, class T>
__device__ __forceinline__ Pack<T, N> load_once(const T* p) {
  Pack<T, N> pack;
  static_assert(sizeof(pack) % 16 == 0, "load_once moves 16-byte words");
#pragma unroll
  for (int i = 0; i < sizeof(pack) / 16; i++) {
    const uint4 word = __ldcs(reinterpret_cast<const uint4*>(p) + i);
    memcpy(reinterpret_cast<char*>(&pack) + 16 * i, &word, 16);
  }
  return pack;
}

// Starts bringing the 32 bytes at p, and their neighbours as the device likes, from memory into L2.
__device__ __forceinline__ void prefetch(const void* p) {
#ifndef EMULATED
  asm volatile("prefetch.global.L2 [%0];" ::"l"(__cvta_generic_to_global(p)));
#endif
}

template <int N, class T>
__device__ __forceinline__ void store(T* p, const Pack<T, N>& pack) {
  if constexpr (sizeof(pack) % 16 == 0) {
#pragma unroll
    for (int i = 0; i < sizeof(pack) / 16; i++) {
      uint4 word;
      memcpy(&word, reinterpret_cast<const char*>(&pack) + 16 * i, 16);
      reinterpret_cast<uint4*>(p)[i] = word;
    }
  } else {
#pragma unroll
    for (int i = 0; i < N; i++) p[i] = pack.v[i];
  }
}

// Whether 16-byte words may be moved at all of these addresses.
template <class... P>
__device__ __forceinline__ bool aligned16(const P*... p) {
  return ((reinterpret_cast<unsigned long long>(p) | ...) & 15) == 0;
}

// One array of each layer: up to 96 that are alike (MOST_EACH in declaration.py), by value.
template <class T>
struct Each {
  T* of[96];

  __device__ __forceinline__ T* operator[](int layer) const { return of[layer]; }
};

// ---- reductions -----------------------------------------------------------------------------------------------------

struct Sum {
  __device__ static float neutral() { return 0.0f; }
  __device__ static float of(float a, float b) { return a + b; }
};
struct Max {
  __device__ static float neutral() { return -inf(); }
  __device__ static float of(float a, float b) { return fmaxf(a, b); }  // NaN loses
};

// Over the lanes of a full warp; every lane gets the same bits.
template <class Op>
__device__ __forceinline__ float warp_reduce(float x) {
#pragma unroll
  for (int lane = WARP / 2; lane > 0; lane /= 2) x = Op::of(x, __shfl_xor_sync(ALL_LANES, x, lane));
  return x;
}

// Over all threads of a block of full warps, along x; every thread gets the same bits. 128 bytes of shared memory.
template <class Op>
__device__ __forceinline__ float block_reduce(float x) {
  __shared__ float part[WARP];
  const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
  x = warp_reduce<Op>(x);
  __syncthreads();  // part may still be read by an earlier call
  if (lane == 0) part[warp] = x;
  __syncthreads();
  return warp_reduce<Op>(lane < blockDim.x / WARP ? part[lane] : Op::neutral());
}

// For lane l the sum over a full warp of sum[l N / 32], in the order of warp_reduce. Changes sum.
template <int LANES = WARP, int N>
__device__ __forceinline__ float transposed_sum(float (&sum)[N]) {
  constexpr int FAR = LANES / 2, HALF = N * FAR / WARP;  // FAR: the lane that many away has the other half
  const bool upper = threadIdx.x & FAR;
  if constexpr (HALF == 0) sum[0] += __shfl_xor_sync(ALL_LANES, sum[0], FAR);
#pragma unroll
  for (int i = 0; i < HALF; i++) {
    const float low = sum[i], high = sum[i + HALF];
    sum[i] = (upper ? high : low) + __shfl_xor_sync(ALL_LANES, upper ? low : high, FAR);
  }
  if constexpr (FAR > 1) transposed_sum<FAR>(sum);
  return sum[0];
}

__device__ __forceinline__ float warp_sum(float x) { return warp_reduce<Sum>(x); }
__device__ __forceinline__ float warp_max(float x) { return warp_reduce<Max>(x); }
__device__ __forceinline__ float block_sum(float x) { return block_reduce<Sum>(x); }
__device__ __forceinline__ float block_max(float x) { return block_reduce<Max>(x); }

// ---- activations ----------------------------------------------------------------------------------------------------

__device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }  // 0 where e^-x overflows

// x / (1 + e^-x) by the quick units, within 1e-6 and without a branch, which a quotient takes where e^-x passes 2^126;
// -0 there.
__device__ __forceinline__ float silu(float x) {
#ifdef EMULATED
  return x / (1.0f + expf(-x));
#else
  float e, share;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(x * -1.4426950408889634f));
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(share) : "f"(1.0f + e));
  return x * share;
#endif
}
