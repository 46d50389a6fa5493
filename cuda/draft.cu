// Drafting with the MTP layer: the likeliest tokens of logits, the tree of candidates a level at a time, the best of it.
// Definitions: MTPDrafter and _Growing in boleinfer/draft/mtp.py, Limits.trim in boleinfer/draft/base.py.
//
// A request's candidates have fixed places, C = Top + Levels * Width * Top of them: those below the root, then at every
// level those of its first expanded candidate, of its second, and so on. A place without one has probability -1.
//
// candidates  grid: rows, ceil(Parts / WARPS). block: THREADS; a warp owns PART logits of a row, a thread EACH groups of 4,
//             16 bytes where the size and the address allow it. shared: none. Read twice: nothing.
// grow, keep  grid: B, a block owns a request, a thread a candidate, in grow at first a warp a row of logits. block: at
//             least the candidates of a level, in full warps. shared: below 8 KiB. Read twice: probabilities, from
//             shared memory.
//
// sizes: Top=1,2,3,8
#include "common.cuh"

constexpr int THREADS = 256, WARPS = THREADS / WARP, EACH = 4, PART = 4 * EACH * WARP;
constexpr int JOINED = 17;  // keys of a lane at a time: four of each part of 67,584 logits at once
constexpr int WORDS = 4;    // of a row's ancestors
constexpr int UNUSED = -2;  // parent of a row that holds nothing
constexpr int MOST = 512;   // candidates of a request

// A number as bits that rise with it; 0, which stands for none, is below all of them.
__device__ __forceinline__ unsigned rising_of(float x) {
  const unsigned bits = __float_as_uint(x + 0.0f);  // one zero only
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ float number_of(unsigned rising) {
  return __uint_as_float(rising >> 31 ? rising & 0x7fffffffu : ~rising);
}

__device__ __forceinline__ unsigned long long key_of(unsigned rising, int place) {
  return (unsigned long long)rising << 32 | unsigned(place);
}

// The Top largest of a warp's numbers, N of each lane, of equal ones the lower place first: number i in lane i, which
// leaves the others as 0. Places differ. Changes rising.
template <int N>
__device__ __forceinline__ void largest(unsigned (&rising)[N], const int (&place)[N], unsigned& number, int& at) {
  number = 0, at = -1;
#pragma unroll 1
  for (int i = 0; i < Top; i++) {
    unsigned most = rising[0];
#pragma unroll
    for (int n = 1; n < N; n++) most = max(most, rising[n]);
    most = __reduce_max_sync(ALL_LANES, most);
    if (most == 0) return;
    unsigned first = ~0u;
#pragma unroll
    for (int n = 0; n < N; n++) first = rising[n] == most ? min(first, unsigned(place[n])) : first;
    first = __reduce_min_sync(ALL_LANES, first);
#pragma unroll
    for (int n = 0; n < N; n++) rising[n] = place[n] == int(first) ? 0 : rising[n];
    if (threadIdx.x % WARP == i) number = most, at = first;
  }
}

// The maximum and sum e^(x - maximum) of a warp's lanes from each one's own; -infinity and 0 count for nothing.
__device__ __forceinline__ void join_sums(float& m, float& sum) {
  const float top = warp_max(m);
  sum = warp_sum(m == -inf() ? sum : sum * expf(m - top));  // NaN stays
  m = top;
}

// What each part of a row gives: its likeliest logits, its maximum and sum e^(x - maximum)
extern "C" __global__ void __launch_bounds__(THREADS) candidates(
    const float* logits,           // [N, Vocab]
    const int* rows,               // [N] or null; -1: the row holds nothing, and gives nothing
    unsigned long long* part_key,  // [N, Parts, Top] numbers that rise with the logit, above columns; 0: none
    float* part_sum,               // [N, Parts, 2]
    int Vocab,
    int Parts)
{
  after_previous();
  const int row = blockIdx.x, lane = threadIdx.x % WARP, part = blockIdx.y * WARPS + threadIdx.x / WARP;
  if (part >= Parts || (rows != nullptr && rows[row] < 0)) return;
  const float* x = logits + (long long)row * Vocab;
  float v[4 * EACH], m = -inf(), sum = 0.0f;
  unsigned rising[4 * EACH], number;
  int place[4 * EACH], at;
  const bool whole = Vocab % 4 == 0 && aligned16(logits);
#pragma unroll
  for (int e = 0; e < EACH; e++) {
    const int i = part * PART + 4 * (WARP * e + lane);
    Pack<float, 4> group = {-inf(), -inf(), -inf(), -inf()};
    if (whole && i < Vocab) group = load<4>(x + i);
#pragma unroll
    for (int j = 0; j < 4; j++) {
      if (!whole && i + j < Vocab) group.v[j] = x[i + j];
      v[4 * e + j] = group.v[j];
      place[4 * e + j] = i + j;
    }
  }
#pragma unroll
  for (int n = 0; n < 4 * EACH; n++) m = fmaxf(m, v[n]);
#pragma unroll
  for (int n = 0; n < 4 * EACH; n++) {
    if (v[n] != -inf()) sum += expf(v[n] - m);  // a NaN goes into it
    rising[n] = v[n] > -inf() ? rising_of(v[n]) : 0;
  }
  join_sums(m, sum);
  largest(rising, place, number, at);
  const long long to = (long long)row * Parts + part;
  if (lane < Top) part_key[to * Top + lane] = number ? key_of(number, at) : 0;
  if (lane == 0) part_sum[2 * to] = m, part_sum[2 * to + 1] = sum;
}

// Of the row whose parts these are the Top likeliest, by falling logit, of equal ones the lower column, by a warp: lane i
// gets the column of number i, -1: none, and its p = e^(x - max) / sum e^(x - max).
__device__ __forceinline__ void likeliest(
    const unsigned long long* part_key, const float* part_sum, int parts, int& column, float& p) {
  const int lane = threadIdx.x % WARP;
  float m = -inf(), sum = 0.0f;
  for (int i = lane; i < parts; i += WARP) {
    const float own = part_sum[2 * i], more = part_sum[2 * i + 1], top = fmaxf(m, own);
    sum = (m == -inf() ? sum : sum * expf(m - top)) + (own == -inf() ? more : expf(own - top) * more);
    m = top;
  }
  unsigned number = 0;
  int at = -1;
  for (int k = 0; k < parts * Top; k += JOINED * WARP) {
    unsigned rising[JOINED + 1] = {number};
    int place[JOINED + 1] = {at};
#pragma unroll
    for (int n = 0; n < JOINED; n++) {
      const int i = k + n * WARP + lane;
      const unsigned long long key = i < parts * Top ? part_key[i] : 0;
      rising[n + 1] = unsigned(key >> 32), place[n + 1] = int(unsigned(key));
    }
    largest(rising, place, number, at);
  }
  join_sums(m, sum);
  const bool sound = fabsf(m) < inf() && sum < inf() && number > 0;
  column = sound ? at : -1;
  p = sound ? expf(number_of(number) - m) / sum : 0.0f;
}

// One level: children of the candidates that were run, and the likeliest of these, to be run next
extern "C" __global__ void __launch_bounds__(MOST) grow(
    const unsigned long long* part_key,// [N, Parts, Top] of candidates; N = B at level 0, else B * Width
    const float* part_sum,             // [N, Parts, 2]
    const int* rows,                   // [N] or null; -1: the row holds nothing
    const int* names,                  // [Vocab] or null: the id of each column, -1: none; null: its number
    const int* slot,                   // [B]
    const int* limit,                  // [B] nodes of a draft at most
    const int* reach,                  // [B] tokens of a path at most
    const int* length,                 // [Slots] committed tokens
    int* candidate_token,              // [B, C]
    int* candidate_parent,             // [B, C]
    float* candidate_prob,             // [B, C] of the whole path; -1: no candidate
    int* run,                          // [B] candidates that were run
    int* chosen,                       // [B, Width] candidates to be run
    int* level_token,                  // [B, Width]
    int* level_row,                    // [B, Width] row of the forest, -1: none
    int* level_source,                 // [B, Width] row of logits under which it was found
    int* level_position,               // [B, Width]
    int* token,                        // [R] the forest, R = B * Levels * Width, at least 1
    int* parent,                       // [R]
    int* depth,                        // [R]
    int* request,                      // [R]
    int* position,                     // [R]
    int* kv_slot,                      // [R]
    unsigned* ancestors,               // [R, 4]
    int* chain,                        // [B]
    int* start,                        // [B + 1]
    int* committed,                    // [B]
    int Parts,
    int C,
    int Width,
    int Levels,
    int level,
    float worth)
{
  after_previous();
  __shared__ float likely[MOST], prob[MOST];
  __shared__ int used, ids[MOST];
  const int b = blockIdx.x, i = threadIdx.x, s = slot[b], B = gridDim.x;
  const int T = s < 0 ? 0 : length[s], nodes = s < 0 ? 0 : limit[b], most = s < 0 ? 0 : reach[b];
  const int span = Width * Levels, first = b * span;
  const long long base = (long long)b * C;

  // an empty tree at first; the requests in use come before the others
  if (level == 0) {
    if (i == 0) used = 0;
    __syncthreads();
    for (int c = i; c < C; c += blockDim.x) candidate_prob[base + c] = -1.0f;
    for (int n = i; n < span; n += blockDim.x) {
      const int row = first + n;
      token[row] = request[row] = -1;
      parent[row] = UNUSED;
      depth[row] = position[row] = kv_slot[row] = 0;
      for (int j = 0; j < WORDS; j++) ancestors[row * (long long)WORDS + j] = 0u;
    }
    for (int j = i; j < B; j += blockDim.x) {
      if (slot[j] >= 0) atomicAdd(&used, 1);
    }
    __syncthreads();
    if (i == 0) {
      start[b] = min(b, used) * span;
      if (b == B - 1) start[B] = used * span;
      committed[b] = T;
      chain[b] = run[b] = 0;
    }
    __syncthreads();
  }

  const int parents = level ? Width : 1;
  for (int w = i / WARP; w < parents; w += blockDim.x / WARP) {
    const int lane = i % WARP;
    const long long from = b * parents + w, part = from * Parts;
    int column = -1;
    float p = 0.0f;
    if (rows == nullptr || rows[from] >= 0) likeliest(part_key + part * Top, part_sum + 2 * part, Parts, column, p);
    if (lane < Top) {
      ids[w * Top + lane] = names != nullptr && column >= 0 ? names[column] : column;
      prob[w * Top + lane] = p;
    }
  }
  __syncthreads();

  // children: p(child) = p(parent) p(token)
  const int w = i / Top, from = b * parents + w;  // from: the row of logits
  const int c = (level ? Top + (level - 1) * Width * Top : 0) + i;             // its place
  int above = -1, up = -1;                                                     // its parent, and that one's row
  float p = -1.0f;
  if (w < parents) {
    int id = -1;
    float at = 1.0f;
    if (level == 0 && nodes > 0 && most > 0) id = ids[i];
    if (level > 0) {
      up = level_row[from];
      if (up >= 0) {
        id = ids[i];
        above = chosen[from];
        at = candidate_prob[base + above];
      }
    }
    if (id >= 0) p = at * prob[i];
    candidate_token[base + c] = id;
    candidate_parent[base + c] = above;
    candidate_prob[base + c] = p;
    likely[i] = p;
  }
  if (level >= Levels) return;

  // the likeliest children, of equal ones the earlier
  const int before = run[b], room = level + 1 < most ? min(Width, nodes - before) : 0;
  __syncthreads();
  int rank = 0;
  for (int j = 0; j < parents * Top; j++) rank += likely[j] > p || (likely[j] == p && j < i);
  const bool pick = p >= 0.0f && p >= worth && rank < room;
  if (pick) {
    const int n = before + rank, row = first + n, to = b * Width + rank;
    const int t = candidate_token[base + c];
    chosen[to] = c;
    level_token[to] = token[row] = t;
    level_row[to] = row;
    level_source[to] = from;
    level_position[to] = position[row] = T + level;
    parent[row] = up;
    depth[row] = level;
    request[row] = b;
    kv_slot[row] = T + n;
    for (int j = 0; j < WORDS; j++) {
      const unsigned path = up >= 0 ? ancestors[up * (long long)WORDS + j] : 0u;
      ancestors[row * (long long)WORDS + j] = path | (n / 32 == j ? 1u << n % 32 : 0u);
    }
  }
  const int picked = __syncthreads_count(pick);
  if (i == 0) run[b] = before + picked;
  if (i >= picked && i < Width) {
    const int to = b * Width + i;
    chosen[to] = level_token[to] = level_row[to] = level_source[to] = -1;
    level_position[to] = 0;
  }
}

// The slot's draft: its likeliest candidates, the likelier first, of equal ones the earlier; so parents come first
extern "C" __global__ void __launch_bounds__(MOST) keep(
    const int* candidate_token,   // [B, C]
    const int* candidate_parent,  // [B, C]
    const float* candidate_prob,  // [B, C] -1: no candidate
    const int* slot,              // [B]
    const int* limit,             // [B] nodes of a draft at most
    int* draft_token,             // [Slots, L]
    int* draft_parent,            // [Slots, L]
    float* draft_prob,            // [Slots, L]
    int* draft_count,             // [Slots]
    int* told_draft_token,        // [B, L] the same by request, for the host
    int* told_draft_parent,       // [B, L]
    float* told_draft_prob,       // [B, L]
    int* told_draft_count,        // [B]
    int C,
    int L,
    float least)  // probability
{
  after_previous();
  __shared__ float likely[MOST];
  __shared__ int place[MOST];
  const int b = blockIdx.x, s = slot[b], c = threadIdx.x;
  const long long base = (long long)b * C, to = (long long)s * L, told = (long long)b * L;
  if (s < 0) return;
  const int room = min(limit[b], L);
  const float p = c < C ? candidate_prob[base + c] : -1.0f;
  const bool kept = p >= 0.0f && p >= least;
  if (c < C) likely[c] = kept ? p : -1.0f;
  __syncthreads();
  int rank = 0;
  for (int j = 0; j < C; j++) rank += likely[j] > p || (likely[j] == p && j < c);
  if (c < C) place[c] = rank;
  const int found = __syncthreads_count(kept);
  if (kept && rank < room) {
    const int t = candidate_token[base + c], at = candidate_parent[base + c], above = at < 0 ? -1 : place[at];
    draft_token[to + rank] = told_draft_token[told + rank] = t;
    draft_parent[to + rank] = told_draft_parent[told + rank] = above;
    draft_prob[to + rank] = told_draft_prob[told + rank] = p;
  }
  if (c == 0) draft_count[s] = told_draft_count[b] = max(0, min(found, room));
}
