// The wrappers of cuda/mma.cuh on the CPU. Copies take place at the wait, so that a missing one is seen.
#pragma once

#include "emulated.h"

inline void mma_m16n8k16(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2], SITE) {
  emulated::product(d, a, b, HERE);
}
inline void ldmatrix_x4(unsigned (&r)[4], const void* row, SITE) { emulated::load_matrices(r, row, false, HERE); }
inline void ldmatrix_x4_trans(unsigned (&r)[4], const void* row, SITE) { emulated::load_matrices(r, row, true, HERE); }
inline void cp_async16(void* shared, const void* src, bool valid, SITE) {
  emulated::copy_async(shared, src, valid, 16, HERE);
}
inline void cp_async4(void* shared, const void* src, SITE) { emulated::copy_async(shared, src, true, 4, HERE); }
inline void cp_async_commit() { emulated::copy_commit(); }
template <int N>
void cp_async_wait() {
  emulated::copy_wait(N);
}
