// The next token of rows of logits. Definition: Sampler.sample in boleinfer/sampling.py, whose tokens these are; sums in
// double, in an order that depends on the vocabulary alone.
//
// sample  grid: N, parts; a block owns every gridDim.y-th 64 groups of a row, a warp a group at a time: its largest
//         logit and, where all of them may be drawn, the sum of their weights. The last block of a row draws. Of a row
//         of which the head's product has kept the largest logit alone, one thread takes that.
//         block: THREADS. shared: 47 KB, static.
//         Read twice: what is not below a known bound of what is kept, by the last block, from L2.
//
// A slot's parameters: numbers = temperature, top_p, min_p, repetition, presence, frequency;
// whole = top_k (0: off), min_tokens, choice, flags, early ids.
#include "arrival.cuh"
#include "common.cuh"
#include "largest.cuh"
#include "sample_select.cuh"

constexpr int THREADS = 512, WARPS = THREADS / WARP;
constexpr int GROUP = 4 * WARP, EACH = 4;  // logits of a warp at a time; such groups under way
constexpr int GREEDY = 1, PENALISES = 2, BIASED = 4;                            // flags
constexpr int BROKEN_NAN = -1, BROKEN_INF = -2, NOTHING = -3, PATH_TOO_LONG = -4;  // instead of a token

struct Highest {  // NaN is highest
  template <class T>
  __device__ static T of(T a, T b) { return a != a || a > b ? a : b; }
};

// For each 128 logits of a row, a group: the largest number, NaN where there is one, and the sum of e^((x - largest) / temperature).
struct Groups {
  int n;
  double *top, *mass;
};

// The logits of groups g, g + WARPS, .. of a warp.
__device__ void load_groups(float (&x)[EACH][4], const Row& row, int g) {
#pragma unroll
  for (int e = 0; e < EACH; e++) {
    const int i = (g + e * WARPS) * GROUP + threadIdx.x % WARP * 4;
    x[e][0] = x[e][1] = x[e][2] = x[e][3] = -inf();
    if (i < row.n) row.load4(i, x[e]);
  }
}

// One group's entries, from its numbers.
template <class Number>
__device__ void put_group(const Groups& groups, int g, const Number (&x)[4], bool weigh, double rate) {
  const double top = warp_all<Highest>(Highest::of(Highest::of(x[0], x[1]), Highest::of(x[2], x[3])));
  double sum = 0.0;
  if (weigh && fabs(top) < inf()) {
#pragma unroll
    for (int j = 0; j < 4; j++) sum += x[j] == -inf() ? 0.0 : exp((x[j] - top) * rate);
    sum = warp_all<Add>(sum);
  }
  if (threadIdx.x % WARP) return;
  groups.top[g] = top;
  groups.mass[g] = sum;
}

// The largest numbers of the row's chunks, into s.top, and that of the row: NaN where there is one.
__device__ double chunk_tops(const Row& row, Scratch& s, const Groups& groups) {
  const int each = row.chunk / GROUP;
  double top = -inf();
  for (int c = threadIdx.x; c < CHUNKS; c += THREADS) {
    double own = -inf();
    for (int g = c * each; g < min(groups.n, (c + 1) * each); g++) own = Highest::of(own, groups.top[g]);
    s.top[c] = own;
    top = Highest::of(top, own);
  }
  return block_all<Highest>(top);
}

// The token whose number is the largest, or why there is none.
__device__ int token_or_code(double largest, int id) {
  return largest != largest ? BROKEN_NAN : largest == inf() ? BROKEN_INF : largest == -inf() ? NOTHING : id;
}

// The lowest id of the row's largest number.
__device__ int first_of(const Row& row, const Scratch& s, double largest) {
  int c = threadIdx.x, id = LAST;
  while (c < CHUNKS && s.top[c] != largest) c += THREADS;
  const int begin = block_all<Smaller>(c) * row.chunk, end = min(row.n, begin + row.chunk);
  for (int i = begin + 4 * threadIdx.x; i < end; i += 4 * THREADS) {
    row.from(largest).visit4(i, end, [&](int place, double x) { id = x == largest ? min(id, place) : id; });
  }
  return block_all<Smaller>(id);
}

// The sum of all weights of the row, and of its chunks for `seek`.
__device__ double whole_mass(const Row& row, Scratch& s, const Groups& groups, double largest, double rate) {
  const int each = row.chunk / GROUP;
  __syncthreads();
  for (int c = threadIdx.x; c < CHUNKS; c += THREADS) {
    double sum = 0.0;
    for (int g = c * each; g < min(groups.n, (c + 1) * each); g++) {
      if (groups.mass[g] > 0.0) sum += groups.mass[g] * exp((groups.top[g] - largest) * rate);
    }
    s.chunk[c] = sum;
  }
  return sum_of_chunks(s);
}

// At most the k-th largest of the chunks' largest numbers, and so of all; -inf where there are fewer chunks.
__device__ double bound_of_largest(const Row& row, const Scratch& s, int k) {
  unsigned own[CHUNKS / THREADS], bound = 0;
#pragma unroll
  for (int j = 0; j < CHUNKS / THREADS; j++) {
    const int c = threadIdx.x + j * THREADS;
    float x = s.top[c];
    if (x > s.top[c]) x = nextafterf(x, -inf());
    const unsigned bits = __float_as_uint(x);
    own[j] = c * row.chunk >= row.n ? 0 : bits >> 31 ? ~bits : bits | 1u << 31;
  }
  for (unsigned bit = 1u << 31; bit; bit /= 2) {
    int count = 0;
#pragma unroll
    for (int j = 0; j < CHUNKS / THREADS; j++) count += __syncthreads_count(own[j] >= (bound | bit));
    if (count >= k) bound |= bit;
  }
  return bound == 0 ? -inf() : __uint_as_float(bound >> 31 ? bound & ~(1u << 31) : ~bound);
}

// Puts the row's k largest numbers into s.few, by rising id, where they can be found among few; else returns false.
__device__ bool keep_few(const Row& row, Scratch& s, int k, double largest) {
  const double bound = bound_of_largest(row, s, k);
  const Word lo = ordered(bound), hi = ordered(largest) + 1;
  const int m = collect(row.from(bound), s, lo, hi, [](int, double x) { return ordered(x); });
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
  return true;
}

// `draw` of the n numbers in s.few, one a thread. Sums go by rising id, so these are NumPy's.
__device__ int draw_few(Scratch& s, int n, const double* numbers, double largest, double u) {
  const double temperature = numbers[0], top_p = numbers[1], min_p = numbers[2];
  const int i = threadIdx.x;
  const auto share = [&](double mine) {
    __syncthreads();
    if (i < n) s.chunk[i] = mine;
    __syncthreads();
  };
  double w = i < n ? exp((s.few[i] - largest) / temperature) : 0.0;
  share(w);
  double total = 0.0, above = 0.0;  // of all; of larger weights, and of equal ones with lower ids
  for (int j = 0; j < n; j++) {
    const double other = s.chunk[j];
    total += other;
    if (other > w || (other == w && j < i)) above += other;
  }
  const bool kept = (top_p >= 1.0 || above < fmax(top_p * total, from_bits(1))) && w >= min_p;
  w = kept ? w : 0.0;
  share(w);
  double until = 0.0;
  total = 0.0;
  for (int j = 0; j < n; j++) {
    total += s.chunk[j];
    if (j == i) until = total;
  }
  const int at = block_all<Smaller>(i < n && until > u * total ? i : LAST);
  if (at < LAST) return s.few_id[at];
  return s.few_id[block_all<Smaller>(i < n && until >= total ? i : LAST)];  // the product was rounded up to the whole
}

// The id at which the running sum of the kept weights, by rising id, passes u of the whole.
__device__ int draw(
    const Row& row, Scratch& s, const Groups& groups, const double* numbers, int top_k, double largest, double u) {
  const double temperature = numbers[0], top_p = numbers[1], min_p = numbers[2], rate = 1.0 / temperature;
  const auto order = [](int, double x) { return ordered(x); };
  Threshold k_kept = {0, LAST}, p_kept = {0, LAST};
  if (0 < top_k && top_k < row.n) {
    if (top_k <= FEW && keep_few(row, s, top_k, largest)) return draw_few(s, top_k, numbers, largest, u);
    const auto one = [](Word) { return 1.0; };
    k_kept = fewest(row, s, top_k, ordered(-inf()), ordered(largest) + 1, order, one, from_ordered);
  }
  // w = e^((x - largest) / temperature), 0 outside the top k; below least(w) the weights are below w
  const auto weight = [&](int place, double x) {
    return k_kept.holds(ordered(x), place) ? exp((x - largest) * rate) : 0.0;
  };
  const auto least = [&](Word w) {
    return largest + temperature * (log(from_bits(w)) * (1.0 + 1e-9) - 1e-9);
  };
  if (top_p < 1.0) {
    // weights below (1 - top_p) / n of the sum hold less than 1 - top_p together
    const double total = top_k ? chunk_masses(row, s, weight) : whole_mass(row, s, groups, largest, rate);
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
  const bool all = top_k == 0 && top_p >= 1.0 && min_p <= 0.0;
  const double total = all ? whole_mass(row, s, groups, largest, rate) : chunk_masses(rest, s, kept);
  const double below = from_bits(bits_of(total) - 1);  // where the product is rounded up to the whole
  return seek(rest, s, fmin(u * total, below), kept);
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
    const float* logits,             // [N, V] of rows with use = 1
    unsigned long long* largest,     // [N] or null; of rows with use = 2, 0 behind; null: their logits are there
    const int* row,                  // [N] rows of the forest, -1: none
    const int* use,                  // [N]
    const int* parent,               // [R] of the forest, as token, depth, request and start
    const int* token,                // [R]
    const int* depth,                // [R]
    const int* request,              // [R]
    const int* start,                // [B+1]
    const int* slot,                 // [B]
    const int* root,                 // [B] local row of the last known token
    const unsigned char* allowed,    // [V] or null
    const double* numbers,           // [Slots, 6]
    const int* whole,                // [Slots, 5]
    const unsigned long long* seed,  // [Slots]
    const int* early,                // [Slots, 64]
    const double* bias,              // [Slots, V]
    const int* seen,                 // [Slots, V]
    const int* known,                // [Slots]
    const int* generated,            // [Slots]
    double* group_top,               // [N, Count]
    double* group_mass,              // [N, Count]
    int* arrived,                    // [Counters] zeros
    int* out,                        // [R] the token of each row, or why there is none
    int V,
    int Count)
{
  __shared__ Scratch s;
  const long long from = blockIdx.x;
  const bool kept = largest && use[from] == LARGEST;
  const int own = row[from], b = own < 0 || kept ? -1 : request[own];
  if (b < 0) {
    after_previous();
    if (!kept || blockIdx.y + threadIdx.x > 0) return;
    const Largest most = largest[from];
    largest[from] = 0;
    out[own] = token_or_code(most ? number_of(most) : -inf(), place_of(most));
    return;
  }

  // the parameters are there before the logits
  const long long at = slot[b];
  const int path = depth[own] - depth[start[b] + root[b]];
  const int top_k = whole[at * 5], min_tokens = whole[at * 5 + 1], choice = whole[at * 5 + 2];
  const int flags = whole[at * 5 + 3];
  const int forbidden = generated[at] + path < min_tokens ? whole[at * 5 + 4] : 0;
  const int counted = flags & PENALISES ? path : 0;
  if (counted > MAX_PATH) {
    after_previous();
    if (blockIdx.y == 0 && threadIdx.x == 0) out[own] = PATH_TOO_LONG;
    return;
  }
  Row x = Row{V, logits + from * V, allowed}.from(-inf());
  x.chunk = chunk_length(V);
  x.bias = flags & BIASED ? bias + at * V : nullptr;
  x.seen = flags & PENALISES ? seen + at * V : nullptr;
  x.touched = touch(s.touched, parent, token, own, counted, early + at * MAX_EARLY, forbidden) ? &s.touched : nullptr;
  x.penalties = numbers + at * 6 + 3;

  // its groups
  after_previous();
  const int first = blockIdx.y * (WARPS * EACH) + threadIdx.x / WARP, col = threadIdx.x % WARP * 4;
  float logit[EACH][4];
  load_groups(logit, x, first);
  const double *number = numbers + at * 6, rate = 1.0 / number[0];
  const bool weigh = !(flags & GREEDY) && top_k == 0 && (number[1] < 1.0 || number[2] <= 0.0);
  const Groups groups = {Count, group_top + from * Count, group_mass + from * Count};
  for (int begin = first; begin < Count; begin += gridDim.y * (WARPS * EACH)) {
    float ahead[EACH][4];
    load_groups(ahead, x, begin + gridDim.y * (WARPS * EACH));
#pragma unroll
    for (int e = 0; e < EACH; e++) {
      const int g = begin + e * WARPS;
      if (g >= Count) continue;
      if (x.plain()) {
        put_group(groups, g, logit[e], weigh, rate);
      } else {
        double adjusted[4];
        x.load4(g * GROUP + col, adjusted);
        put_group(groups, g, adjusted, weigh, rate);
      }
#pragma unroll
      for (int j = 0; j < 4; j++) logit[e][j] = ahead[e][j];
    }
  }
  if (!arrives_last(arrived + blockIdx.x, gridDim.y)) return;

  // the token
  const double top = chunk_tops(x, s, groups);
  x.tops = s.top;
  int id = LAST;
  if (fabs(top) < inf()) {
    id = flags & GREEDY ? first_of(x, s, top)
                        : draw(x, s, groups, number, top_k, top, uniform(seed[at], choice, (long long)known[at] + path));
  }
  if (threadIdx.x == 0) out[own] = token_or_code(top, id);
}
