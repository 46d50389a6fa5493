// cuda/bulk.cuh on the CPU. What a copy brings is there when somebody waits for it, not before; until then NaN is.
#pragma once

#include "emulated_tma.h"

namespace emulated {
void load_run(void* to, const void* from, int bytes, int* barrier, Site site);
}

inline void load_run(void* to, const void* from, int bytes, Barrier& full, SITE) {
  emulated::load_run(to, from, bytes, &full.arrivals, HERE);
}
