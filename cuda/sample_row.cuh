// What a token is drawn from: a row of logits after bias, penalties and forbidden ids.
// Definition: Sampler._adjusted in boleinfer/sampling.py; every number is the same bits, in double.
#pragma once

constexpr int FEW = 512;        // numbers that a block holds in shared memory
constexpr int MAX_PATH = 512;   // drafted tokens between a request's last known one and a row
constexpr int MAX_EARLY = 64;   // end tokens that min_tokens forbids
constexpr int TOUCHED = 1024;   // places of the table below, more than MAX_PATH + MAX_EARLY
constexpr int EARLY = 1 << 30;  // mark of a forbidden end token; the bits below count the path

using Word = unsigned long long;

__device__ __forceinline__ Word bits_of(double x) {
  Word bits;
  memcpy(&bits, &x, 8);
  return bits;
}

__device__ __forceinline__ double from_bits(Word bits) {
  double x;
  memcpy(&x, &bits, 8);
  return x;
}

// An integer that orders as the numbers do, -0 being 0; no NaN.
__device__ __forceinline__ Word ordered(double x) {
  const Word bits = bits_of(x + 0.0);
  return bits >> 63 ? ~bits : bits | 1ull << 63;
}

__device__ __forceinline__ double from_ordered(Word key) { return from_bits(key >> 63 ? key & ~(1ull << 63) : ~key); }

// The ids of the path below the root, with their counts, and the forbidden end tokens; open addressing.
struct Touched {
  int id[TOUCHED];  // -1: free
  int mark[TOUCHED];

  __device__ static int home(int token) { return (unsigned(token) * 2654435761u) >> 22; }

  __device__ void clear() {
    for (int i = threadIdx.x; i < TOUCHED; i += blockDim.x) {
      id[i] = -1;
      mark[i] = 0;
    }
  }

  // One thread at a time.
  __device__ void add(int token, int value) {
    int i = home(token);
    while (id[i] >= 0 && id[i] != token) i = (i + 1) % TOUCHED;
    id[i] = token;
    mark[i] += value;
  }

  __device__ int find(int token) const {
    int i = home(token);
    while (id[i] >= 0 && id[i] != token) i = (i + 1) % TOUCHED;
    return mark[i];
  }
};

struct Row {
  int n;                         // numbers
  const float* logits;           // [n]
  const unsigned char* allowed;  // null: all
  const double* bias;            // null: none
  const int* seen;               // null: no penalty; -1 not seen, else how often in the output
  const Touched* touched;        // null: empty
  const double* penalties;       // repetition, presence, frequency
  const double* tops;  // the largest number of each chunk, null where they are not known
  int chunk;           // numbers of a chunk, a multiple of a warp's 128
  double least;        // smaller numbers need no visit, and NaN gets none

  // The same row, of which only numbers from `bound` on matter.
  __device__ Row from(double bound) const {
    Row row = *this;
    row.least = bound;
    return row;
  }

  // Whether the numbers are logits as they are, or -inf.
  __device__ bool plain() const { return !bias && !seen && !touched; }

  // A number of the row, from its logit or, where it is no token, -inf.
  __device__ double adjusted(int token, float logit) const {
    double x = logit;
    if (bias) x += bias[token];
    const int mark = touched ? touched->find(token) : 0;
    if (seen) {
      const int before = seen[token], path = mark & (EARLY - 1);
      if (before >= 0 || path > 0) {
        // x / r or x r, - f count - p (count > 0): each product and difference rounded by itself
        const int count = max(before, 0) + path;
        x = x > 0 ? x / penalties[0] : x * penalties[0];
        x = x - __dmul_rn(penalties[2], count);
        if (count > 0) x = x - penalties[1];
      }
    }
    return mark >= EARLY || (logit == -inf() && allowed && !allowed[token]) ? double(-inf()) : x;
  }

  // The logits at i .. i+3, -inf where they are no token or behind the end; i is a multiple of 4.
  __device__ void load4(int i, float (&x)[4]) const {
    if (n % 4 == 0 && aligned16(logits)) {
      const auto group = load<4>(logits + i);
      uchar4 good = {1, 1, 1, 1};
      if (allowed) good = *reinterpret_cast<const uchar4*>(allowed + i);
      x[0] = good.x ? group.v[0] : -inf();
      x[1] = good.y ? group.v[1] : -inf();
      x[2] = good.z ? group.v[2] : -inf();
      x[3] = good.w ? group.v[3] : -inf();
    } else {
#pragma unroll
      for (int j = 0; j < 4; j++) x[j] = i + j < n && (!allowed || allowed[i + j]) ? logits[i + j] : -inf();
    }
  }

  // The numbers of a row that is not plain, at i .. i+3. A function of its own: inline, this file takes three times as
  // long to compile.
  __device__ __noinline__ void load4(int i, double (&x)[4]) const {
    float logit[4];
    load4(i, logit);
#pragma unroll
    for (int j = 0; j < 4; j++) x[j] = i + j < n ? adjusted(i + j, logit[j]) : double(-inf());
  }

  // Whether a chunk holds nothing from `least` on.
  __device__ bool skips(int c) const { return tops && tops[c] < least; }

  // visit(place, number) for i .. i+3, below end and from `least` on.
  template <class Visit>
  __device__ void visit4(int i, int end, Visit visit) const {
    double x[4];
    if (plain()) {
      float logit[4];
      load4(i, logit);
#pragma unroll
      for (int j = 0; j < 4; j++) x[j] = logit[j];
    } else {
      load4(i, x);
    }
#pragma unroll
    for (int j = 0; j < 4; j++) {
      if (i + j < end && x[j] >= least) visit(i + j, x[j]);
    }
  }

  // The same for every place, each by one thread, rising within a thread.
  template <class Visit>
  __device__ void each(Visit visit) const {
    for (int i = 4 * threadIdx.x; i < n; i += 4 * blockDim.x) {
      if (!skips(i / chunk)) visit4(i, n, visit);
    }
  }
};
