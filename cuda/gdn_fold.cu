// The state of all GDN layers where accepted rows reach a multiple of C tokens, C being the ring's capacity. Definition: commit
// in boleinfer/ops/gdn_commit.py. With m = 0 nothing is written; rows behind that multiple are up to gdn_append.cu.
//   S = e^G S + sum_i e^{G - G_i} k_i u_i^T for TILE entries at a time, of the ring, then of the rows up to there
// G is added up in float64. A sum is made on its own and then added: mma cuts off what is small beside what it adds to.
//
// grid: as many blocks as fit, since there is seldom anything to fold: a block owns every gridDim.x-th slice, Vt columns
// of a head of a layer of a request to fold. block: Warps; each keeps KEYS keys of 8 COLUMNS columns of it in registers, read
// once and written once. shared: two pieces, one of which comes while the other is added, and the list of those requests,
// static. The next slice is brought into L2 meanwhile.
//
// sizes: Act=bf16,float K=16 V=16 Vt=16 Warps=1 | Act=bf16,float K=128 V=128 Vt=64 Warps=4
// sizes: Act=bf16,float K=64 V=64 Vt=64 Warps=4
#include "gdn.cuh"

constexpr int KEYS = K < 64 ? K : K / 2;
constexpr int COLUMNS = Vt < 32 ? Vt / 8 : 4, ACROSS = Vt / (8 * COLUMNS);  // of a lane; warps that share keys
constexpr int RESIDENT = HALF ? 384 : 256;                                  // threads on a multiprocessor
static_assert(WARPS == ACROSS * (K / KEYS), "a warp for each part of a slice");

struct Factors {
  const Act* ring_k;
  const Each<const Act>& k;
  const float* ring_u;
  const Each<const float>& u;
  const float* ring_g;
  const Each<const float>& g;
  const int* row;
  int Slots, Hk, Hv, C;
};

// What a request folds: entries of its ring, then accepted rows, from `start` on.
struct alignas(16) Request {
  int slot, start;
  int ring, count;  // entries of the ring, and with the rows
};

struct Slice {
  Request of;
  int layer, h, hk, v0;  // the head and its keys', the first of its columns
};

struct Piece {
  bf16 keys[KEY_PARTS][TILE][PITCH];
  alignas(16) float u[TILE][Vt + 4];  // rows 2, 4 and 6 further on lie in different banks
};

// Of the state of a slice what a lane has: keys 8 j + 2 quad + e, columns COLUMNS row + c of the warp's.
using Held = Pack<float, COLUMNS>[KEYS / 8][2];

// The lane's first number of a slice's state.
__device__ __forceinline__ float* own(float* slice, const Lane& me) {
  return slice + (me.warp / ACROSS * KEYS + 2 * me.quad) * V + (me.warp % ACROSS * 8 + me.row) * COLUMNS;
}

// Starts copying entries first .. first+TILE-1, zeros behind the last one. Returns the log decay of the lane's entry,
// first + lane % TILE.
__device__ __forceinline__ float fetch(Piece& to, const Factors& from, const Slice& slice, int first) {
  const Lane me = this_lane();
  const Request& of = slice.of;
  const int own = first + me.lane % TILE, h = slice.h;
  const int held = (slice.layer * from.Slots + of.slot) * from.C + own;
  const int at = own < of.ring ? held : own < of.count ? from.row[of.start + own - of.ring] : 0;
  const Act* k = from.k[slice.layer];
  const float* u = from.u[slice.layer];
  gather(to.keys, TILE, from.ring_k, me, [&](int i) -> const Act* {
    const long long there = __shfl_sync(ALL_LANES, at, i);
    const Act* src = (first + i < of.ring ? from.ring_k : k) + (there * from.Hk + slice.hk) * K;
    return first + i < of.count ? src : nullptr;
  });
  static_assert(TILE * Vt / 4 % THREADS == 0, "whole rounds");
#pragma unroll
  for (int n = 0; n < TILE * Vt / 4 / THREADS; n++) {
    const int word = n * THREADS + threadIdx.x, i = word / (Vt / 4), v = word % (Vt / 4) * 4;
    const long long there = __shfl_sync(ALL_LANES, at, i);
    const float* src = (first + i < of.ring ? from.ring_u : u) + (there * from.Hv + h) * V + slice.v0 + v;
    const bool used = first + i < of.count;
    cp_async16(&to.u[i][v], used ? src : from.ring_u, used);
  }
  cp_async_commit();
  const float* g = own < of.ring ? from.ring_g : from.g[slice.layer];
  return own < of.count ? g[(long long)at * from.Hv + h] : 0.0f;
}

// s = e^G s + sum_i e^{G - G_i} k_i u_i^T over the entries of a piece; g: of the lane's entry
__device__ __forceinline__ void add(Held& s, const Piece& piece, float g) {
  const Lane me = this_lane();
  const double own = clamped(g);
  double after = own;  // of this entry and those behind it
#pragma unroll
  for (int reach = 1; reach < TILE; reach *= 2) {
    const double more = __shfl_down_sync(ALL_LANES, after, reach, TILE);
    if (me.lane % TILE + reach < TILE) after += more;
  }
  const float faded = expf(float(after - own)), kept = expf(float(__shfl_sync(ALL_LANES, after, 0)));
  unsigned u[COLUMNS / 2][3][4];  // operand A in parts; columns 2m and 2m + 1 of a lane are its two rows of mma
#pragma unroll
  for (int half = 0; half < 2; half++) {
    Pack<float, COLUMNS> of[2];
#pragma unroll
    for (int e = 0; e < 2; e++) {
      const int entry = 8 * half + 2 * me.quad + e;
      const float left = __shfl_sync(ALL_LANES, faded, entry);
      of[e] = load<COLUMNS>(&piece.u[entry][(me.warp % ACROSS * 8 + me.row) * COLUMNS]);
#pragma unroll
      for (int c = 0; c < COLUMNS; c++) of[e].v[c] *= left;
    }
#pragma unroll
    for (int c = 0; c < COLUMNS; c++) {
      unsigned part[3];
      split(of[0].v[c], of[1].v[c], part);
#pragma unroll
      for (int p = 0; p < 3; p++) u[c / 2][p][2 * half + c % 2] = part[p];
    }
  }
#pragma unroll
  for (int j = 0; j < KEYS / 8; j += 2) {
    unsigned b[KEY_PARTS][2][2];
    float sum[2][COLUMNS / 2][4] = {};
#pragma unroll
    for (int p = 0; p < KEY_PARTS; p++) {
      load_b_by_rows(b[p], &piece.keys[p][0][me.warp / ACROSS * KEYS + 8 * j], PITCH, me.lane);
    }
    for_parts<3, KEY_PARTS>([&](int p, int r) {
#pragma unroll
      for (int n = 0; n < 2; n++) {
#pragma unroll
        for (int m = 0; m < COLUMNS / 2; m++) mma_m16n8k16(sum[n][m], u[m][p], b[r][n]);
      }
    });
#pragma unroll
    for (int n = 0; n < 2; n++) {
#pragma unroll
      for (int c = 0; c < COLUMNS; c++) {
#pragma unroll
        for (int e = 0; e < 2; e++) {
          float& to = s[j + n][e].v[c];
          to = fmaf(kept, to, sum[n][c / 2][2 * (c % 2) + e]);
        }
      }
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT / THREADS) gdn_fold(
    float* S,                                     // [Layers, Slots, Hv, K, V] aligned 16
    const Act* ring_k,                            // [Layers, Slots, C, Hk, K] aligned 16
    const float* ring_u,                          // [Layers, Slots, C, Hv, V] aligned 16
    const float* ring_g,                          // [Layers, Slots, C, Hv]
    const __grid_constant__ Each<const Act> k,    // [R, Hk, K] aligned 16; of each layer, or null: rows lie in the ring
    const __grid_constant__ Each<const float> u,  // [R, Hv, V] aligned 16; of each layer, or null
    const __grid_constant__ Each<const float> g,  // [R, Hv] of each layer, or null
    const int* committed,                         // [B]
    const int* slot,                              // [B]
    const int* start,                             // [B+1]
    const int* row,                               // [R]
    const int* count,                             // [B]
    int B,
    int Layers,
    int Slots,
    int Hk,
    int Hv,
    int C)
{
  __shared__ __align__(16) Piece piece[2];
  __shared__ Request full[THREADS];  // those to fold, by rising number
  __shared__ int of_warp[WARPS];     // how many each warp found
  const Factors factors = {ring_k, k, ring_u, u, ring_g, g, row, Slots, Hk, Hv, C};
  const int slices = V / Vt * Hv * Layers;
  const auto slice = [&](int i) -> Slice {
    const int h = i / (V / Vt) % Hv;
    return {full[i / slices], i / (V / Vt * Hv) % Layers, h, h / (Hv / Hk), i % (V / Vt) * Vt};
  };
  const auto state = [&](const Slice& s) { return S + (((long long)s.layer * Slots + s.of.slot) * Hv + s.h) * K * V + s.v0; };
  const auto held = [&](int b) { return b < B ? committed[b] % C : 0; };
  int b = threadIdx.x, ring = held(b);  // most often of all
  after_previous();
  for (; b - int(threadIdx.x) < B; ring = held(b += THREADS)) {
    const int m = b < B ? count[b] : 0, all = (ring + m) / C * C;
    const bool folds = m > 0 && all;
    if (!__syncthreads_or(folds)) continue;
    const unsigned lanes = __ballot_sync(ALL_LANES, folds);
    const Lane me = this_lane();
    if (me.lane == 0) of_warp[me.warp] = __popc(lanes);
    __syncthreads();
    int found = 0, place = __popc(lanes & ((1u << me.lane) - 1));
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
      if (w < me.warp) place += of_warp[w];
      found += of_warp[w];
    }
    if (folds) full[place] = {slot[b], start[b], k[0] ? ring : all, all};  // without k rows lie in the ring already
    __syncthreads();
    int i = blockIdx.x, turn = 0;
    const int end = found * slices;
    if (i >= end) continue;
    Slice next = slice(i);
    float decay = fetch(piece[turn], factors, next, 0);
    while (i < end) {
      float* part = own(state(next), me);
      Held s;
#pragma unroll
      for (int j = 0; j < KEYS / 8; j++) {
#pragma unroll
        for (int e = 0; e < 2; e++) s[j][e] = load<COLUMNS>(part + (8 * j + e) * V);
      }
      const int entries = next.of.count;
      for (int first = 0; first < entries; turn ^= 1) {
        const float g = decay;
        first += TILE;
        cp_async_wait<0>();
        __syncthreads();  // this piece is there, and nobody reads the one before any more
        if (first < entries) {
          decay = fetch(piece[turn ^ 1], factors, next, first);
        } else if ((i += gridDim.x) < end) {
          decay = fetch(piece[turn ^ 1], factors, next = slice(i), 0);
          constexpr int LINES = (Vt + 31) / 32;  // of 128 bytes
          for (int line = threadIdx.x; line < K * LINES; line += THREADS) {
            prefetch(state(next) + line / LINES * V + line % LINES * 32);
          }
        }
        add(s, piece[turn], g);
      }
#pragma unroll
      for (int j = 0; j < KEYS / 8; j++) {
#pragma unroll
        for (int e = 0; e < 2; e++) store<COLUMNS>(part + (8 * j + e) * V, s[j][e]);
      }
    }
    __syncthreads();
  }
}
