// cuda/wgmma.cuh on the CPU. Products take place at the wait, so that a missing one is seen; until then d is NaN.
#pragma once

#include "emulated.h"

struct Tile {
  const char* at;
  int apart;  // bytes from eight rows to the next eight

  explicit Tile(const void* p, int apart = 1024) : at(static_cast<const char*>(p)), apart(apart) {}

  Tile behind(int bytes) const { return Tile(at + bytes, apart); }
};

template <int N>
void made_before(float (&)[N]) {}
inline void wgmma_begin(SITE) { emulated::wgmma_begin(HERE); }
inline void wgmma_end(SITE) { emulated::wgmma_end(HERE); }
template <int P>
void wgmma_wait(SITE) {
  emulated::wgmma_wait(P, HERE);
}
template <int M>
void wgmma(float (&d)[M], Tile a, Tile b, int step, int add = 1, SITE) {
  emulated::wgmma(d, M, a.at, b.at, a.apart, b.apart, step, add, HERE);
}
template <int M>
void wgmma_e4m3(float (&d)[M], Tile a, Tile b, int step, int add = 1, SITE) {
  emulated::wgmma_e4m3(d, M, a.at, b.at, step, add, HERE);
}
