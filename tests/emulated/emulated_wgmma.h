// cuda/wgmma.cuh on the CPU. Products take place at the wait, so that a missing one is seen; until then d is NaN.
#pragma once

#include "emulated.h"

struct Tile {
  const char* at;
  int apart;  // bytes from eight rows to the next eight

  explicit Tile(const void* p, int apart = 1024) : at(static_cast<const char*>(p)), apart(apart) {}

  Tile behind(int bytes) const { return Tile(at + bytes, apart); }
};

template <int APART>
struct Words {
  const char* at;
  int apart;

  explicit Words(const void* p, int next_rows = 0) : at(static_cast<const char*>(p)), apart(next_rows) {}
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
  emulated::wgmma({d, M, 0, step, a.at, b.at, a.apart, b.apart, 0, false}, add, HERE);
}
template <int M, int APART>
void wgmma(float (&d)[M], Tile a, Words<APART> b, int step, int add = 1, SITE) {
  emulated::wgmma({d, M, 0, step, a.at, b.at, a.apart, b.apart, APART, false}, add, HERE);
}
template <int M>
void wgmma_e4m3(float (&d)[M], Tile a, Tile b, int step, int add = 1, SITE) {
  emulated::wgmma({d, M, 0, step, a.at, b.at, a.apart, b.apart, 0, true}, add, HERE);
}
template <int M, int APART>
void wgmma_e4m3(float (&d)[M], Tile a, Words<APART> b, int step, int add = 1, SITE) {
  emulated::wgmma({d, M, 0, step, a.at, b.at, a.apart, b.apart, APART, true}, add, HERE);
}
