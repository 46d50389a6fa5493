// Attention of a forest over paged KV in float32: parts (o, m, l) of each query's softmax for attention_join.cu.
// Definition: tree_attention in boleinfer/ops/attention.py; words and parts are explained in attention.cuh.
//
// grid: tiles, Hkv, workers, as in tree_attention.cu. block: 128 threads own 16 queries of one KV head: eight threads a
// query for the scores of 32 slots, and a column of all, or of every COPIES-th, query for the values.
// shared: 4 bytes x (16 (Dh + 1) + 32 Dh + 16 x 32): q, k and then v of 32 slots, the weights of the softmax.
// Read twice: the KV of a split, once for each tile of its request, from L2.
//
// sizes: Dh=32,64,128,256 Act=float
// spills: two registers at Dh=64 or 128 on sm_80 to 90, so that four blocks fit beside each other
#include "attention.cuh"

constexpr int ROWS = 16, KEYS = 32, THREADS = 128, EIGHT = 8;  // EIGHT threads a query
constexpr int COLS = Dh < THREADS ? Dh : THREADS, COPIES = THREADS / COLS;
constexpr int NC = Dh / COLS, NR = ROWS / COPIES;  // columns and queries of a thread
constexpr int NK = KEYS / EIGHT;
constexpr int STRIDE = Dh + 1;  // of q: with the order of d below, all banks are used

// KV rows of slots key .. key + KEYS - 1, zero where no query sees them.
__device__ void copy_rows(float* to, const Act* pages, const int* table, const Queries<ROWS>& query, int key, int stop, int P, int Hkv) {
  for (int word = threadIdx.x; word < KEYS * (Dh / 4); word += THREADS) {
    const int slot = key + word / (Dh / 4), col = word % (Dh / 4) * 4;
    float4 x = {0.0f, 0.0f, 0.0f, 0.0f};
    if (slot < stop && query.any_sees(slot)) {
      const long long row = ((long long)table[slot / P] * P + slot % P) * Hkv + blockIdx.y;
      x = *reinterpret_cast<const float4*>(pages + row * Dh + col);
    }
    reinterpret_cast<float4*>(to)[word] = x;
  }
}

extern "C" __global__ void __launch_bounds__(THREADS) tree_attention(
    const Act* q,               // [Rq, Hq, Dh] aligned 16
    const Act* k_pages,         // [Pages, P, Hkv, Dh] aligned 16
    const Act* v_pages,         // [Pages, P, Hkv, Dh] aligned 16
    const int* page_table,      // [B, M]
    const int* rows,            // [Rq] or null; rows of the forest, -1 for none
    const int* request,         // [R]
    const unsigned* ancestors,  // [R, 4]
    const int* chain,           // [B]
    const int* start,           // [B+1]
    const int* committed,       // [B]
    float* part_o,              // [Parts, Hq, Dh] aligned 16
    float* part_ml,             // [Parts, Hq, 2] aligned 16
    int* parts,                 // [Rq, 2] first part and number of parts of a row
    int Hq,
    int Hkv,
    int P,
    int B,
    int M,
    int Rq,
    int Room,
    int Splits,
    float scale)
{
  after_previous();
  extern __shared__ uint4 arena[];
  __shared__ Queries<ROWS> query;
  __shared__ float scales[ROWS];
  __shared__ float2 factors[ROWS];
  float* q_tile = reinterpret_cast<float*>(arena);
  float *kv = q_tile + ROWS * STRIDE, *p = kv + KEYS * Dh;

  // the tile; long ones are started first
  const Trees forest = {rows, request, ancestors, chain, start, committed, B, Rq};
  const int Ratio = Hq / Hkv;
  query.clear();
  __syncthreads();
  const auto longest_first = [](int tiles) { return tiles - 1 - int(blockIdx.x); };
  const QueryTile tile = find_tile(forest, ROWS, Ratio, Room, Splits, M * P, longest_first);
  if (tile.request < 0) return;
  const bool side_by_side = tile.step > 1;
  const int splits = side_by_side ? split_of(tile.end - 1) + 1 : 1;
  if (blockIdx.z >= splits) return;
  query.describe(forest, tile, Ratio, blockIdx.y, Hq);
  write_parts(tile, ROWS, Ratio, splits, parts);
  __syncthreads();
  for (int e = threadIdx.x; e < ROWS * Dh; e += THREADS) {
    const int i = tile.first + e / Dh;
    const long long from = ((tile.q_row + i / Ratio) * (long long)Hq + blockIdx.y * Ratio + i % Ratio) * Dh + e % Dh;
    q_tile[e / Dh * STRIDE + e % Dh] = query.place[e / Dh] >= 0 ? q[from] : 0.0f;
  }

  const int* table = page_table + (long long)tile.request * M;
  const int mine = threadIdx.x / EIGHT, eighth = threadIdx.x % EIGHT;  // for scores: query, and slots eighth + 8 n
  const int col = threadIdx.x % COLS, copy = threadIdx.x / COLS;       // for values: col + COLS c, queries copy + COPIES r
  float o[NR][NC] = {}, m = -inf(), l = 0.0f;
  float2 kept = {};  // m and l of the part that lies in memory
  for (int split = splits - 1 - blockIdx.z; split >= 0; split -= gridDim.z) {
    int edge = split_begin(split + 1), stop = tile.end;
    if (side_by_side) stop = min(stop, edge);
    for (int key = split_begin(split); key < stop; key += KEYS) {
      __syncthreads();
      copy_rows(kv, k_pages, table, query, key, stop, P, Hkv);
      __syncthreads();

      // s = scale q k^T, in base 2; -inf where the slot is not seen
      float s[NK], top = m;
#pragma unroll
      for (int n = 0; n < NK; n++) {
        const int row = eighth + EIGHT * n;
        float sum = 0.0f;
        for (int i = 0; i < Dh; i++) {
          const int d = (i + 4 * eighth) % Dh;
          sum = fmaf(q_tile[mine * STRIDE + d], kv[row * Dh + d], sum);
        }
        s[n] = query.sees(mine, key + row) ? sum * (scale * LOG2_E) : -inf();
        top = fmaxf(top, s[n]);
      }

      // m = max(m, max s), p = 2^(s - m), l scaled to the new m
      for (int d = 1; d < EIGHT; d *= 2) top = fmaxf(top, __shfl_xor_sync(ALL_LANES, top, d));
      const float before = m == top ? 1.0f : exp2f(m - top), base = top == -inf() ? 0.0f : top;
      m = top;
      l *= before;
#pragma unroll
      for (int n = 0; n < NK; n++) {
        const float weight = exp2f(s[n] - base);
        l += weight;
        p[mine * KEYS + eighth + EIGHT * n] = weight;
      }
      if (eighth == 0) scales[mine] = before;
      __syncthreads();

      // o += p v
      copy_rows(kv, v_pages, table, query, key, stop, P, Hkv);
      __syncthreads();
#pragma unroll
      for (int r = 0; r < NR; r++)
#pragma unroll
        for (int c = 0; c < NC; c++) o[r][c] *= scales[copy + COPIES * r];
      for (int k = 0; k < KEYS; k++) {
#pragma unroll
        for (int c = 0; c < NC; c++) {
          const float v = kv[k * Dh + col + COLS * c];
#pragma unroll
          for (int r = 0; r < NR; r++) o[r][c] = fmaf(p[(copy + COPIES * r) * KEYS + k], v, o[r][c]);
        }
      }
      if (key + KEYS < min(stop, edge)) continue;

      // the split's end: its part is written, or joined to the one that lies there
      const bool join = !side_by_side && edge > split_begin(1);
      const int skip = side_by_side ? split * Hq : 0;
      for (int d = 1; d < EIGHT; d *= 2) l += __shfl_xor_sync(ALL_LANES, l, d);
      float2 factor = {0.0f, 1.0f};
      if (join) factor = join_factors(kept.x, m);
      kept = join ? float2{kept.x, joined(kept.y, l, factor)} : float2{m, l};
      if (eighth == 0) {
        factors[mine] = factor;
        if (query.place[mine] >= 0) *reinterpret_cast<float2*>(part_ml + 2 * (query.place[mine] + skip)) = kept;
      }
      __syncthreads();
#pragma unroll
      for (int r = 0; r < NR; r++) {
        const int j = copy + COPIES * r;
#pragma unroll
        for (int c = 0; c < NC; c++) {
          if (query.place[j] >= 0) {
            float* to = part_o + (long long)(query.place[j] + skip) * Dh + col + COLS * c;
            *to = join ? joined(*to, o[r][c], factors[j]) : o[r][c];
          }
          o[r][c] = 0.0f;
        }
      }
      m = -inf(), l = 0.0f;
      edge = split_begin(split_of(edge) + 1);
    }
  }
}
