// Matrix products of a warp (bf16 -> float32), their fragments from shared memory, and copies into it that do not wait.
//
// Fragments, for lane l of a full warp, g = l / 4, t = l % 4. An unsigned holds two bf16, the first in the low half.
//   a[4]  A [16, 16] by rows:     a[0] = A[g][2t, 2t+1]   a[1] = A[g+8][2t, 2t+1]
//                                 a[2] = A[g][2t+8, +9]   a[3] = A[g+8][2t+8, +9]
//   b[2]  B [16, 8] by columns:   b[0] = B[2t, 2t+1][g]   b[1] = B[2t+8, 2t+9][g]
//   d[4]  D [16, 8], float32:     d[0], d[1] = D[g][2t, 2t+1]   d[2], d[3] = D[g+8][2t, 2t+1]
// D of one product, in bf16 pairs, is a half of A of the next: a[0], a[1] (or a[2], a[3]) = (d[0], d[1]), (d[2], d[3]).
//
// ldmatrix_x4 reads four 8x8 matrices of 16-bit numbers; lane l gives the address of row l % 8 of matrix l / 8: 16
// bytes of shared memory at a multiple of 16. r[i] = M_i[g][2t, 2t+1]; with _trans r[i] = M_i[2t, 2t+1][g].
//   A of a row-major [16, 16] tile: lane l gives row l % 16, column 8 * (l / 16).
//   B from W [n, k] by rows (D = A W^T): plain. Lane l gives row l % 8 + 8 * (l / 16), column 8 * (l / 8 % 2):
//     r[0], r[1] are b of the first 8 rows of W, r[2], r[3] of the next 8.
//   B from V [k, n] by rows (D = A V): _trans. Lane l gives row l % 16, column 8 * (l / 16):
//     r[0], r[1] are b of the first 8 columns of V, r[2], r[3] of the next 8.
// The eight rows of a matrix should lie in different banks: a row stride of 16 bytes modulo 128, or a swizzle.
#pragma once

#include "common.cuh"

#ifdef EMULATED
#include "emulated_mma.h"
#else

// d += A B. All lanes of the warp together.
__device__ __forceinline__ void mma_m16n8k16(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

__device__ __forceinline__ unsigned shared_address(const void* p) {
  return static_cast<unsigned>(__cvta_generic_to_shared(p));
}

__device__ __forceinline__ void ldmatrix_x4(unsigned (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(row))
               : "memory");
}

__device__ __forceinline__ void ldmatrix_x4_trans(unsigned (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(row))
               : "memory");
}

// Starts copying 16 bytes from global to shared memory, past L1, both at multiples of 16; zeros instead where !valid
// (src is then not read). What is copied may be read after cp_async_wait by the same thread, by others after a barrier.
__device__ __forceinline__ void cp_async16(void* shared, const void* src, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
               :
               : "r"(shared_address(shared)), "l"(__cvta_generic_to_global(src)), "r"(valid ? 16 : 0)
               : "memory");
}

// The same of 4 bytes, through L1.
__device__ __forceinline__ void cp_async4(void* shared, const void* src) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared_address(shared)), "l"(__cvta_generic_to_global(src))
               : "memory");
}

// Ends a group of copies of this thread.
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most N of this thread's groups, the latest ones, are under way.
template <int N>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

#endif

// Two numbers as the bf16 pair of a fragment, `low` first.
__device__ __forceinline__ unsigned pack_bf16(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  unsigned bits;
  memcpy(&bits, &pair, 4);
  return bits;
}
