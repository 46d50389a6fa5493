// The next token of rows of logits. Definition: Sampler.sample in boleinfer/sampling.py, whose tokens these are; sums in
// double, in an order that depends on the vocabulary alone.
//
// sample          grid: N, a block owns a row of logits. block: THREADS.
// advance_history grid: B, a block owns a request. block: any number of threads.
// shared: 38 KB, static. Read twice: a row of logits, 2 to 4 times (largest; kept ones; sums; draw) and more often
// where top_k or top_p keep thousands; from L2.
//
// A slot's parameters: numbers = temperature, top_p, min_p, repetition, presence, frequency;
// whole = top_k (0: off), min_tokens, choice, flags, early ids.
#include "common.cuh"
#include "sample_select.cuh"

constexpr int THREADS = 512;
constexpr int GREEDY = 1, PENALISES = 2, BIASED = 4;                            // flags
constexpr int BROKEN_NAN = -1, BROKEN_INF = -2, NOTHING = -3, PATH_TOO_LONG = -4;  // instead of a token

// The largest number of the row, the lowest id that has it, the largest that this thread saw, and whether there is a NaN.
struct Top {
  double largest, own;
  int id;
  bool nan;
};

template <class Number>
__device__ Top top_of(const Row& row) {
  Number best = -inf();
  int id = LAST, nan = 0;
  for (int i = 4 * threadIdx.x; i < row.n; i += 4 * blockDim.x) {
    Number x[4];
    row.load4(i, x);
#pragma unroll
    for (int j = 0; j < 4; j++) {
      nan |= x[j] != x[j];
      if (x[j] > best) {
        best = x[j];
        id = i + j;
      }
    }
  }
  const double own = best, largest = block_all<Larger>(own);
  return {largest, own, block_all<Smaller>(own == largest ? id : LAST), block_all<Larger>(nan) != 0};
}

// Narrows the row to its k largest numbers where these are few; else returns false.
__device__ bool keep_few(Row& row, Scratch& s, int k, const Top& top) {
  // the k-th largest of the threads' own maxima is at most the k-th largest number
  __syncthreads();
  s.chunk[threadIdx.x] = top.own;
  if (threadIdx.x == 0) s.bound = -inf();
  __syncthreads();
  int rank = 0;
  for (int t = 0; t < blockDim.x; t++) {
    rank += s.chunk[t] > top.own || (s.chunk[t] == top.own && t < threadIdx.x);
  }
  if (rank == k - 1) s.bound = top.own;
  __syncthreads();
  const Word lo = ordered(s.bound), hi = ordered(top.largest) + 1;
  const int m = collect(row.from(s.bound), s, lo, hi, [](int, double x) { return ordered(x); });
  if (m > FEW) return false;
  const Threshold kept = among_collected(s, m, 0.0, k, hi, [](Word) { return 1.0; });
  for (int i = threadIdx.x; i < m; i += blockDim.x) {
    if (!kept.holds(s.key[i], s.place[i])) continue;
    int at = 0;
    for (int j = 0; j < i; j++) at += kept.holds(s.key[j], s.place[j]);
    s.few[at] = from_ordered(s.key[i]);
    s.few_id[at] = s.place[i];
  }
  __syncthreads();
  row.few = s.few;
  row.few_id = s.few_id;
  row.n = k;
  return true;
}

// The id at which the running sum of the kept weights, by rising id, passes u of the whole.
__device__ int draw(Row& row, Scratch& s, const double* numbers, int top_k, const Top& top, double u) {
  const double temperature = numbers[0], top_p = numbers[1], min_p = numbers[2], rate = 1.0 / temperature;
  const auto order = [](int, double x) { return ordered(x); };
  Threshold k_kept = {0, LAST}, p_kept = {0, LAST};
  if (0 < top_k && top_k < row.n && !keep_few(row, s, top_k, top)) {
    const auto one = [](Word) { return 1.0; };
    k_kept = fewest(row, s, top_k, ordered(-inf()), ordered(top.largest) + 1, order, one, from_ordered);
  }
  // w = e^((x - largest) / temperature), 0 outside the top k; below least(w) the weights are below w
  const auto weight = [&](int place, double x) {
    return k_kept.holds(ordered(x), place) ? exp((x - top.largest) * rate) : 0.0;
  };
  const auto least = [&](Word w) {
    return top.largest + temperature * (log(from_bits(w)) * (1.0 + 1e-9) - 1e-9);
  };
  if (top_p < 1.0) {
    // weights below (1 - top_p) / n of the sum hold less than 1 - top_p together
    const double total = chunk_masses(row, s, weight);
    const Word lo = bits_of((1.0 - top_p) * total / row.n * (1.0 - 1e-9));
    const double target = fmax(top_p * total, from_bits(1));
    const auto order_weight = [&](int place, double x) { return bits_of(weight(place, x)); };
    p_kept = fewest(row, s, target, lo, bits_of(1.0) + 1, order_weight, from_bits, least);
  }
  const auto kept = [&](int place, double x) {
    const double w = weight(place, x);
    return w >= min_p && p_kept.holds(bits_of(w), place) ? w : 0.0;
  };
  const Row rest = row.from(least(max(bits_of(min_p), p_kept.key)));
  const double total = chunk_masses(rest, s, kept);
  const double below = from_bits(bits_of(total) - 1);  // where the product is rounded up to the whole
  return row.id(seek(rest, s, fmin(u * total, below), kept));
}

// The path below the request's root and the end tokens that are forbidden here, into the table. Whether it is empty.
__device__ bool touch(Touched& touched, const int* parent, const int* token, int row, int path, const int* early, int n) {
  __syncthreads();
  touched.clear();
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int i = 0; i < path; i++, row = parent[row]) touched.add(token[row], 1);
    for (int i = 0; i < n; i++) touched.add(early[i], EARLY);
  }
  __syncthreads();
  return path + n > 0;
}

extern "C" __global__ void __launch_bounds__(512) sample(
    const float* __restrict__ logits,           // [N, V]
    const int* __restrict__ row,                // [N] rows of the forest, -1: none
    const int* __restrict__ parent,             // [R] of the forest, as token, depth, request and start
    const int* __restrict__ token,              // [R]
    const int* __restrict__ depth,              // [R]
    const int* __restrict__ request,            // [R]
    const int* __restrict__ start,              // [B+1]
    const int* __restrict__ slot,               // [B]
    const int* __restrict__ root,               // [B] local row of the last known token
    const unsigned char* __restrict__ allowed,  // [V] or null
    const double* __restrict__ numbers,         // [Slots, 6]
    const int* __restrict__ whole,              // [Slots, 5]
    const unsigned long long* __restrict__ seed,  // [Slots]
    const int* __restrict__ early,              // [Slots, 64]
    const double* __restrict__ bias,            // [Slots, V]
    const int* __restrict__ seen,               // [Slots, V]
    const int* __restrict__ known,              // [Slots]
    const int* __restrict__ generated,          // [Slots]
    int* __restrict__ out,                      // [R] the token of each row, or why there is none
    int V)
{
  after_previous();
  __shared__ Scratch s;
  const int own = row[blockIdx.x], b = own < 0 ? -1 : request[own];
  if (b < 0) return;
  const long long at = slot[b];
  const int path = depth[own] - depth[start[b] + root[b]];
  const int top_k = whole[at * 5], min_tokens = whole[at * 5 + 1], choice = whole[at * 5 + 2];
  const int flags = whole[at * 5 + 3];
  const int forbidden = generated[at] + path < min_tokens ? whole[at * 5 + 4] : 0;
  const int counted = flags & PENALISES ? path : 0;
  if (counted > MAX_PATH) {
    if (threadIdx.x == 0) out[own] = PATH_TOO_LONG;
    return;
  }
  Row x = Row{V, logits + (long long)blockIdx.x * V, allowed}.from(-inf());
  x.bias = flags & BIASED ? bias + at * V : nullptr;
  x.seen = flags & PENALISES ? seen + at * V : nullptr;
  x.touched = touch(s.touched, parent, token, own, counted, early + at * MAX_EARLY, forbidden) ? &s.touched : nullptr;
  x.penalties = numbers + at * 6 + 3;

  const Top top = x.plain() ? top_of<float>(x) : top_of<double>(x);
  int id;
  if (top.nan) {
    id = BROKEN_NAN;
  } else if (top.largest == inf()) {
    id = BROKEN_INF;
  } else if (top.largest == -inf()) {
    id = NOTHING;
  } else if (flags & GREEDY) {
    id = top.id;
  } else {
    id = draw(x, s, numbers + at * 6, top_k, top, uniform(seed[at], choice, (long long)known[at] + path));
  }
  if (threadIdx.x == 0) out[own] = id;
}

// The emitted tokens become part of the slots' histories.
extern "C" __global__ void advance_history(
    const int* __restrict__ emitted,  // [B, L]
    const int* __restrict__ count,    // [B] how many of them
    const int* __restrict__ slot,     // [B]
    const int* __restrict__ whole,    // [Slots, 5]
    int* __restrict__ seen,           // [Slots, V]
    int* __restrict__ known,          // [Slots]
    int* __restrict__ generated,      // [Slots]
    int L,
    int V)
{
  after_previous();
  const int b = blockIdx.x, n = count[b];
  if (n <= 0) return;
  const long long at = slot[b];
  if (threadIdx.x == 0) {
    known[at] += n;
    generated[at] += n;
  }
  if (!(whole[at * 5 + 3] & PENALISES)) return;
  const int* tokens = emitted + (long long)b * L;
  for (int i = threadIdx.x; i < n; i += blockDim.x) atomicMax(&seen[at * V + tokens[i]], 0);
  __syncthreads();
  for (int i = threadIdx.x; i < n; i += blockDim.x) atomicAdd(&seen[at * V + tokens[i]], 1);
}
