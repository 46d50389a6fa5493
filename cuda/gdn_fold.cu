// The state of all GDN layers where accepted rows reach a multiple of C tokens, C being the ring's capacity. Definition: commit
// in boleinfer/ops/gdn_commit.py. With m = 0 nothing is written; rows behind that multiple are up to gdn_append.cu.
//   S = e^G S + sum_i e^{G - G_i} k_i u_i^T over the ring, then over the rows up to there
// Taken in pieces of PIECE entries, the latest first, so that what comes after an entry is known; G in float64.
//
// grid: as many blocks as fit, since there is seldom anything to fold: a block owns every gridDim.x-th slice of Vt columns
// of a head of a layer of a request to fold. block: Warps, at least Vt / 16; see gdn.cuh for who owns what. shared:
// sizeof(Piece) and the list of those requests, static. The state is read once and written once.
//
// sizes: Act=bf16,float K=16 V=16 Vt=16 Warps=4 | Act=bf16,float K=128 V=128 Vt=32 Warps=4
// sizes: Act=bf16,float K=64 V=64 Vt=32 Warps=4
#include "gdn.cuh"

constexpr int PIECE = 32;

// What a head folds: entries of its ring, then accepted rows.
struct Source {
  const Act *ring_k, *k;      // of the head: entry 0, row 0
  const float *ring_u, *u, *ring_g, *g;
  const int* row;             // accepted
  int ring, rows, Hk, Hv;     // how many of both
};

struct Piece {
  float sum[K * Vt];  // what is added to the state, see `place`
  bf16 keys[KEY_PARTS][PIECE][PITCH];
  const float* u[PIECE];  // of the block's columns; null where there is none
  float kept[PIECE];      // e^{G - G_i}
};

// Adds entries first .. first+n-1 of a head; `later` is the log decay of all entries behind, and then of these too.
__device__ __forceinline__ void add_piece(Piece& piece, const Source& from, int first, int n, double& later, int v0,
                                          const Lane& me) {
  const int entry = first + me.lane;
  const bool used = me.lane < n, held = entry < from.ring;
  const long long at = !used ? 0 : held ? entry : from.row[entry - from.ring];
  const double own = used ? clamped((held ? from.ring_g : from.g)[at * from.Hv]) : 0.0;
  double after = own;  // of this entry and those behind it
#pragma unroll
  for (int reach = 1; reach < WARP; reach *= 2) {
    const double more = __shfl_down_sync(ALL_LANES, after, reach);
    if (me.lane + reach < WARP) after += more;
  }
  if (me.warp == 0) {
    piece.u[me.lane] = used ? (held ? from.ring_u : from.u) + at * from.Hv * V + v0 : nullptr;
    piece.kept[me.lane] = expf(float(later + (after - own)));
  }
  later += __shfl_sync(ALL_LANES, after, 0);
  gather(piece.keys, (n + TILE - 1) / TILE * TILE, from.ring_k, me, [&](int i) -> const Act* {
    if (i >= n) return nullptr;
    const long long e = first + i, held = from.ring;
    return e < held ? from.ring_k + e * from.Hk * K : from.k + (long long)from.row[e - held] * from.Hk * K;
  });
  cp_async_commit();
  cp_async_wait<0>();
  __syncthreads();
  for (int tile = 0; me.owner && tile < n; tile += TILE) {
    float u[2][4];
#pragma unroll
    for (int i = 0; i < 2; i++) {
#pragma unroll
      for (int e = 0; e < 2; e++) {
        const int token = tile + 8 * i + 2 * me.quad + e;
        const float* at = piece.u[token];
        const float2 two = at ? load_two(at + me.pair) : float2{0.0f, 0.0f};
        u[i][e] = piece.kept[token] * two.x, u[i][2 + e] = piece.kept[token] * two.y;
      }
    }
    unsigned parts[3][4];
    operand(parts, u[0], u[1]);
#pragma unroll
    for (int j = 0; j < K / 16; j++) {
      Keys8 s[2];
#pragma unroll
      for (int i = 0; i < 2; i++) read_keys(s[i], piece.sum, 2 * j + i, me);
      absorb(s, parts, piece.keys, tile, j, me.lane);
#pragma unroll
      for (int i = 0; i < 2; i++) write_keys(piece.sum, s[i], 2 * j + i, me);
    }
  }
  __syncthreads();
}

// S = e^G S + sum_i e^{G - G_i} k_i u_i^T of Vt columns, from v0 on, of a head's state.
__device__ __forceinline__ void fold(Piece& piece, const Source& from, float* S, int v0) {
  const Lane me = this_lane();
  for (int i = threadIdx.x; i < K * Vt / 8; i += THREADS) prefetch(S + i / (Vt / 8) * V + i % (Vt / 8) * 8);
  for (int i = threadIdx.x; i < K * Vt; i += THREADS) piece.sum[i] = 0.0f;
  double later = 0.0;
  for (int end = from.ring + from.rows; end > 0; end -= PIECE) {
    const int begin = max(0, end - PIECE);
    add_piece(piece, from, begin, end - begin, later, v0, me);
  }
  const float kept = expf(float(later));
  for (int word = threadIdx.x; word < K * Vt / 4; word += THREADS) {
    const int i = word / (Vt / 4), v = word % (Vt / 4) * 4;
    auto state = load<4>(S + i * V + v);
    const auto sum = load<4>(piece.sum + place(i, v));
#pragma unroll
    for (int c = 0; c < 4; c++) state.v[c] = fmaf(kept, state.v[c], sum.v[c]);
    store<4>(S + i * V + v, state);
  }
  __syncthreads();
}

extern "C" __global__ void __launch_bounds__(THREADS, 512 / THREADS) gdn_fold(
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
  __shared__ __align__(16) Piece piece;
  __shared__ int full[THREADS], of_warp[WARPS];  // requests to fold, by rising number, and how many each warp found
  const int first = committed[min(int(threadIdx.x), B - 1)] % C;  // most often all
  const int slices = V / Vt * Hv * Layers, lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
  after_previous();
  for (int from = 0; from < B; from += THREADS) {
    const int b = from + threadIdx.x, m = b < B ? count[b] : 0;
    const bool overflows = m > 0 && (from == 0 ? first : committed[b] % C) + m >= C;
    if (!__syncthreads_or(overflows)) continue;
    const unsigned lanes = __ballot_sync(ALL_LANES, overflows);
    if (lane == 0) of_warp[warp] = __popc(lanes);
    __syncthreads();
    int found = 0, place = __popc(lanes & ((1u << lane) - 1));
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
      if (w < warp) place += of_warp[w];
      found += of_warp[w];
    }
    if (overflows) full[place] = b;
    __syncthreads();
    for (int i = blockIdx.x; i < found * slices; i += gridDim.x) {
      const int v0 = i % (V / Vt) * Vt, h = i / (V / Vt) % Hv, layer = i / (V / Vt * Hv) % Layers, hk = h / (Hv / Hk);
      const int own = full[i / slices], held = committed[own] % C, all = (held + count[own]) / C * C;
      const int ring = k[0] ? held : all;
      const long long s = (long long)layer * Slots + slot[own], entry = s * C;
      const Source source = {ring_k + (entry * Hk + hk) * K, k[layer] + hk * K, ring_u + (entry * Hv + h) * V,
                             u[layer] + h * V, ring_g + entry * Hv + h, g[layer] + h, row + start[own], ring,
                             all - ring, Hk, Hv};
      fold(piece, source, S + (s * Hv + h) * K * V + v0, v0);
    }
    __syncthreads();
  }
}
