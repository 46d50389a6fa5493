// Selection and search in a row by a block, the same bits in every run: the fewest largest that hold a mass, and the
// place where a running sum passes a target. Blocks of full warps; all threads call, all get the result.
#pragma once

#include "sample_row.cuh"

constexpr int LOG_WAYS = 3, WAYS = 1 << LOG_WAYS;  // parts into which a range of keys is cut at a time
constexpr int CHUNKS = 1024;                       // pieces of a row at most, each summed by a warp
constexpr int LAST = 0x7fffffff;

struct Scratch {
  double top[CHUNKS];    // their largest numbers, NaN where a chunk holds one
  double chunk[CHUNKS];  // their sums; or weights, of few numbers
  double lane_sum[WARP];  // of 32 chunks each
  double part[WARP][WAYS];
  double sums[WAYS];
  Word raw_key[FEW], key[FEW];
  int raw_place[FEW], place[FEW];
  double few[FEW];
  int few_id[FEW];
  int count, found;
  double bound;
  Touched touched;
};

struct Add {
  template <class T>
  __device__ static T of(T a, T b) { return a + b; }
};
struct Smaller {
  template <class T>
  __device__ static T of(T a, T b) { return b < a ? b : a; }
};
struct Larger {
  template <class T>
  __device__ static T of(T a, T b) { return a < b ? b : a; }
};

template <class Op, class T>
__device__ T warp_all(T x) {
#pragma unroll
  for (int lane = WARP / 2; lane > 0; lane /= 2) x = Op::of(x, __shfl_xor_sync(ALL_LANES, x, lane));
  return x;
}

template <class Op, class T>
__device__ T block_all(T x) {
  __shared__ T part[WARP];
  x = warp_all<Op>(x);
  __syncthreads();
  if (threadIdx.x % WARP == 0) part[threadIdx.x / WARP] = x;
  __syncthreads();
  x = part[0];
  for (int warp = 1; warp < blockDim.x / WARP; warp++) x = Op::of(x, part[warp]);
  return x;
}

// ---- the place where a running sum passes a target ------------------------------------------------------------------

struct Prefix {
  double until, before;  // sums with and without the own number

  __device__ Prefix(double x, double offset) {
    const int lane = threadIdx.x % WARP;
    double sum = x;
#pragma unroll
    for (int d = 1; d < WARP; d *= 2) {
      const double lower = __shfl_up_sync(ALL_LANES, sum, d);
      if (lane >= d) sum += lower;
    }
    until = offset + sum;
    before = __shfl_up_sync(ALL_LANES, until, 1);
    if (lane == 0) before = offset;
  }
};

__device__ __forceinline__ int first_lane(unsigned lanes) { return __ffs(lanes) - 1; }
__device__ __forceinline__ int last_lane(unsigned lanes) { return 31 - __clz(lanes); }

// A multiple of 128, so that the chunks of a row are at most CHUNKS.
__device__ __forceinline__ int chunk_length(int n) { return ((n + CHUNKS - 1) / CHUNKS + 127) / 128 * 128; }

// The sum of the chunks' sums, which are in s.chunk; leaves what `seek` needs.
__device__ inline double sum_of_chunks(Scratch& s) {
  const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
  __syncthreads();
  for (int group = warp; group < WARP; group += blockDim.x / WARP) {
    const double sum = warp_all<Add>(s.chunk[group * WARP + lane]);
    if (lane == 0) s.lane_sum[group] = sum;
  }
  __syncthreads();
  return __shfl_sync(ALL_LANES, Prefix(s.lane_sum[lane], 0.0).until, WARP - 1);
}

// Sum of mass(place, number) over the row; leaves the sums of its chunks for `seek`.
template <class Mass>
__device__ double chunk_masses(const Row& row, Scratch& s, Mass mass) {
  const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, length = chunk_length(row.n);
  __syncthreads();
  for (int c = warp; c < CHUNKS; c += blockDim.x / WARP) {
    double sum = 0.0;
    if (c * length < row.n && !row.skips(c)) {
      const int end = min(row.n, (c + 1) * length);
      for (int i = c * length + 4 * lane; i < end; i += 4 * WARP) {
        row.visit4(i, end, [&](int place, double x) { sum += mass(place, x); });
      }
      sum = warp_all<Add>(sum);
    }
    if (lane == 0) s.chunk[c] = sum;
  }
  return sum_of_chunks(s);
}

// The lane where the running sum of x passes the target; where rounding hides it, the last that adds anything.
__device__ __forceinline__ int passing_lane(double x, double target, double& offset) {
  const Prefix prefix(x, offset);
  const unsigned past = __ballot_sync(ALL_LANES, prefix.until > target), any = __ballot_sync(ALL_LANES, x > 0.0);
  const int lane = past ? first_lane(past) : any ? last_lane(any) : 0;
  offset = __shfl_sync(ALL_LANES, prefix.before, lane);
  return lane;
}

// The first place at which the running sum of mass, in the order of places, is above the target. `chunk_masses` of the
// same mass comes before it, and the target is below what that returned.
template <class Mass>
__device__ int seek(const Row& row, Scratch& s, double target, Mass mass) {
  if (threadIdx.x < WARP) {
    const int lane = threadIdx.x, length = chunk_length(row.n);
    double offset = 0.0;
    const int group = passing_lane(s.lane_sum[lane], target, offset);
    const int c = group * WARP + passing_lane(s.chunk[group * WARP + lane], target, offset);
    const int begin = c * length, end = min(row.n, (c + 1) * length);
    int found = -1, last = -1;
    for (int first = begin; first < end && found < 0; first += 4 * WARP) {
      const int i = first + 4 * lane;
      double own_mass[4] = {}, sum = 0.0;
      if (i < end) row.visit4(i, end, [&](int place, double x) { own_mass[place - i] = mass(place, x); });
#pragma unroll
      for (int j = 0; j < 4; j++) {
        if (own_mass[j] > 0.0) last = i + j;
        sum += own_mass[j];
      }
      const Prefix prefix(sum, offset);
      const unsigned past = __ballot_sync(ALL_LANES, prefix.until > target);
      if (past) {
        int own = -1;
        double until = prefix.before;
#pragma unroll
        for (int j = 0; j < 4; j++) {
          until += own_mass[j];
          if (own < 0 && own_mass[j] > 0.0 && until > target) own = i + j;
        }
        found = __shfl_sync(ALL_LANES, own < 0 ? last : own, first_lane(past));
      }
      offset = __shfl_sync(ALL_LANES, prefix.until, WARP - 1);
    }
    last = warp_all<Larger>(last);
    if (lane == 0) s.found = found >= 0 ? found : last;
  }
  __syncthreads();
  const int found = s.found;
  __syncthreads();
  return found;
}

// ---- the fewest largest numbers that hold a mass --------------------------------------------------------------------

// Those with a larger key, and of those with this key the ones up to the place `last`.
struct Threshold {
  Word key;
  int last;

  __device__ bool holds(Word other, int place) const { return other > key || (other == key && place <= last); }
};

// Finds the places with lo <= key < hi, ascending, into s.key and s.place. Returns how many; above FEW nothing is stored.
template <class Key>
__device__ int collect(const Row& row, Scratch& s, Word lo, Word hi, Key key) {
  __syncthreads();
  if (threadIdx.x == 0) s.count = 0;
  __syncthreads();
  row.each([&](int place, double x) {
    const Word k = key(place, x);
    if (k < lo || k >= hi) return;
    const int at = atomicAdd(&s.count, 1);
    if (at < FEW) {
      s.raw_key[at] = k;
      s.raw_place[at] = place;
    }
  });
  __syncthreads();
  const int m = s.count;
  if (m > FEW) return m;
  for (int i = threadIdx.x; i < m; i += blockDim.x) {
    int rank = 0;
    for (int j = 0; j < m; j++) rank += s.raw_place[j] < s.raw_place[i];
    s.key[rank] = s.raw_key[i];
    s.place[rank] = s.raw_place[i];
  }
  __syncthreads();
  return m;
}

// The threshold among the m collected: one is kept while the mass before it, by falling key and rising place, is below
// the target. above: mass of all keys from hi on.
template <class Mass>
__device__ Threshold among_collected(const Scratch& s, int m, double above, double target, Word hi, Mass mass) {
  Word least = ~0ull;
  int last = -1;
  for (int i = threadIdx.x; i < m; i += blockDim.x) {
    const Word own = s.key[i];
    double before = above;
    for (int j = 0; j < m; j++) {
      if (s.key[j] > own || (s.key[j] == own && j < i)) before += mass(s.key[j]);
    }
    if (before < target && own <= least) {
      least = own;
      last = s.place[i];
    }
  }
  const Word key = block_all<Smaller>(least);
  last = block_all<Larger>(least == key ? last : -1);
  return key == ~0ull ? Threshold{hi, LAST} : Threshold{key, last};
}

// Sums over the block of each thread's WAYS numbers, into s.sums.
__device__ inline void block_sums(Scratch& s, const double (&x)[WAYS]) {
  const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
  __syncthreads();
#pragma unroll
  for (int j = 0; j < WAYS; j++) {
    const double sum = warp_all<Add>(x[j]);
    if (lane == 0) s.part[warp][j] = sum;
  }
  __syncthreads();
  if (threadIdx.x < WAYS) {
    double sum = 0.0;
    for (int w = 0; w < blockDim.x / WARP; w++) sum += s.part[w][threadIdx.x];
    s.sums[threadIdx.x] = sum;
  }
  __syncthreads();
}

// The threshold of the whole row: one is kept while the mass before it is below the target (above 0).
// key(place, number) orders, mass(key) weighs, least(key) is at most the numbers of that key; all keys to keep are in
// [lo, hi).
template <class Key, class Mass, class Least>
__device__ Threshold fewest(
    const Row& row, Scratch& s, double target, Word lo, Word hi, Key key, Mass mass, Least least) {
  double above = 0.0;
  bool fits = row.n <= FEW;
  while (!fits && hi - lo > 1) {
    // mass from lo + j 2^shift on, for j = 1 .. WAYS-1; in [0] how many keys there are
    const int shift = max(64 - LOG_WAYS - __clzll(hi - lo - 1), 0);
    double sum[WAYS] = {};
    row.from(least(lo)).each([&](int place, double x) {
      const Word k = key(place, x);
      if (k < lo || k >= hi) return;
      const double m = mass(k);
      const int part = (k - lo) >> shift;
      sum[0] += 1.0;
#pragma unroll
      for (int j = 1; j < WAYS; j++) {
        if (part >= j) sum[j] += m;
      }
    });
    block_sums(s, sum);
    fits = s.sums[0] <= FEW;
    int part = WAYS - 1;
    while (part > 0 && above + s.sums[part] < target) part--;
    if (part < WAYS - 1) {
      above += s.sums[part + 1];
      hi = min(hi, lo + (Word(part + 1) << shift));
    }
    lo += Word(part) << shift;
  }
  const Row rest = row.from(least(lo));
  if (fits) return among_collected(s, collect(rest, s, lo, hi, key), above, target, hi, mass);

  // one key is left, too many times: the first of them
  const double needed = fmax(ceil((target - above) / mass(lo)), 1.0);
  const auto equal = [&](int place, double x) { return key(place, x) == lo ? 1.0 : 0.0; };
  if (needed >= chunk_masses(rest, s, equal)) return Threshold{lo, LAST};
  return Threshold{lo, seek(rest, s, needed - 1.0, equal)};
}
