// cuda/tma.cuh on the CPU. What a copy brings is there when somebody waits for it, not before; until then NaN is.
#pragma once

#include "emulated.h"

template <class T>
struct TensorMap {  // as _Gpu.tensor_map in tests/emulator.py makes it; padded to what CUDA passes
  const char* base;
  long long row_bytes, rows[3], pitch[3], box[3];
  char rest[40];
};

struct alignas(8) Barrier {
  int arrivals, missing, bytes, phase;  // of a phase; still to come in this one
};

inline void make_barrier(Barrier& barrier, int arrivals, SITE) { emulated::make_barrier(&barrier.arrivals, arrivals, HERE); }
inline void barriers_made() {}
inline void arrive(Barrier& barrier, SITE) { emulated::arrive(&barrier.arrivals, 0, HERE); }
inline void arrive_expecting(Barrier& barrier, int bytes, SITE) { emulated::arrive(&barrier.arrivals, bytes, HERE); }
inline void wait(Barrier& barrier, int parity, SITE) { emulated::wait(&barrier.arrivals, parity, HERE); }

constexpr unsigned long long KEPT = 0, ONCE = 1;  // caches are not emulated

template <class T>
void load_tile(void* to, const TensorMap<T>& map, Barrier& full, int k, int row, unsigned long long = KEPT, SITE) {
  const long long begin[3] = {0, 0, row}, column = k * (long long)sizeof(T);
  emulated::load_box(to, map.base, map.row_bytes, map.rows, map.pitch, map.box, begin, column, &full.arrivals, HERE);
}
template <class T>
void load_tile(void* to, const TensorMap<T>& map, Barrier& full, int k, int middle, int first, unsigned long long, SITE) {
  const long long begin[3] = {0, first, middle}, column = k * (long long)sizeof(T);
  emulated::load_box(to, map.base, map.row_bytes, map.rows, map.pitch, map.box, begin, column, &full.arrivals, HERE);
}
template <class T>
void load_tile(void* to, const TensorMap<T>& map, Barrier& full, int k, int third, int second, int first, unsigned long long,
               SITE) {
  const long long begin[3] = {first, second, third}, column = k * (long long)sizeof(T);
  emulated::load_box(to, map.base, map.row_bytes, map.rows, map.pitch, map.box, begin, column, &full.arrivals, HERE);
}
template <class T>
void prefetch_map(const TensorMap<T>&) {}
