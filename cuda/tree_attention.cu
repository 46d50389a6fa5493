// Attention of a forest over paged KV, bf16 on tensor cores: parts (o, m, l) of each query's softmax, and their sum.
// Definition: tree_attention in boleinfer/ops/attention.py; words and parts are explained in attention.cuh.
//
// grid: tiles, Hkv, workers. A block owns a tile of Rows queries of one KV head, and every gridDim.z-th split of the
// context; of a request with many rows the first worker takes all splits in order. block: 128 threads (Rows = 16) or 256
// (64). Four warps form a group, with 16 queries (or twice 32) to themselves: of KEYS slots at a time each takes a quarter
// for the scores and a quarter of the columns for the values. The order of sums does not depend on Rows or Stages.
// Where `out` is given (Rows = 16) the tile's last block joins the parts, else attention_join.cu does.
// shared: 2 bytes x (Rows Dh + Stages (KEYS max(Dh, Rows) + KEYS Dh)): q, and k and v of Stages times KEYS slots. The
// weights of the softmax take the place of their k. Read twice: the KV of a split, once for each tile of its request,
// from L2.
//
// sizes: Dh=32,64,128,256 Rows=16 Stages=2,3 Act=bf16 | Dh=32,64,128,256 Rows=64 Stages=2 Act=bf16
// spills: a few registers at Dh=128 and 256 on sm_90 and 100, so that two blocks of 256 threads fit beside each other
#include "arrival.cuh"
#include "attention.cuh"
#include "mma.cuh"

constexpr int KEYS = Dh == 256 ? 32 : 64;
constexpr int QUARTERS = 4;
constexpr int MT = Rows == 16 ? 1 : 2;  // 16-row products of a warp
constexpr int WARPS = QUARTERS * Rows / (16 * MT), THREADS = WARPS * WARP;
constexpr int NK = KEYS / QUARTERS / 8, NV = Dh / QUARTERS / 8;  // 8-column products of a warp
constexpr int BLOCKS = __CUDA_ARCH__ == 900 || __CUDA_ARCH__ == 1000 ? 2 : 1;  // their shared memory holds as many
constexpr int K_SIZE = KEYS * (Dh > Rows ? Dh : Rows), STAGE = K_SIZE + KEYS * Dh;

// Element (row, col + step) of a shared matrix of Width bf16, its 16-byte words permuted so that eight rows use all banks.
// step is a constant, a multiple of 8, and shares no bit with col: one address then serves all steps.
template <int Width>
__device__ __forceinline__ int at(int row, int col, int step = 0) {
  const int mix = Width >= 64 ? row % 8 : row / 2 % 4;
  return row * Width + ((col ^ mix * 8) ^ step);
}

// Where the KV rows of slots key .. key + KEYS - 1 lie; a lane knows one of its warp's KEYS / WARPS slots.
struct Pages {
  static constexpr int OWN = KEYS / WARPS, WORDS = Dh / 8, AT_ONCE = WARP / WORDS;
  static_assert(OWN % AT_ONCE == 0, "a warp copies whole KV rows of its own");
  const Act *k, *v;
  const int* table;
  int P, Hkv;

  __device__ static int slot_of(int key) {
    const int lane = threadIdx.x % WARP;
    return lane < OWN ? key + threadIdx.x / WARP * OWN + lane : 0x7fffffff;
  }

  // The lane's slot among all slots of the pool, -1 from `stop` on.
  __device__ int where(int key, int stop) const {
    const int slot = slot_of(key);
    if (slot >= stop) return -1;
    const unsigned page = unsigned(slot) / unsigned(P);
    return table[page] * P + (slot - int(page) * P);
  }

  // k and v of slots key ..; own: where the lane's lies. Zeros where no query sees it.
  __device__ void copy(bf16* stage, const Queries<Rows>& query, int key, int own) const {
    const int lane = threadIdx.x % WARP, first = threadIdx.x / WARP * OWN, col = lane % WORDS * 8;
    if (own >= 0 && !query.any_sees(slot_of(key))) own = -1;
#pragma unroll
    for (int i = 0; i < OWN; i += AT_ONCE) {
      const int row = i + lane / WORDS;
      const int slot = __shfl_sync(ALL_LANES, own, row), to = at<Dh>(first + row, col);
      const long long from = slot < 0 ? 0 : ((long long)slot * Hkv + blockIdx.y) * Dh + col;
      cp_async16(stage + to, k + from, slot >= 0);
      cp_async16(stage + K_SIZE + to, v + from, slot >= 0);
    }
  }
};

// A of rows row .. row+15 and columns col .. col+31 of a shared matrix: two fragments.
template <int Width>
__device__ __forceinline__ void load_a(unsigned (&a)[2][4], const bf16* matrix, int row, int col) {
  const int lane = threadIdx.x % WARP;
#pragma unroll
  for (int i = 0; i < 2; i++) ldmatrix_x4(a[i], matrix + at<Width>(row + lane % 16, lane / 16 * 8, col + 16 * i));
}

__device__ __forceinline__ void multiply(float (&d)[4], const unsigned (&a)[2][4], const unsigned (&b)[4]) {
  const unsigned low[2] = {b[0], b[1]}, high[2] = {b[2], b[3]};
  mma_m16n8k16(d, a[0], low);
  mma_m16n8k16(d, a[1], high);
}

// A warp's share of the softmax over the slots since the last part. Query mt, h is row 16 mt + g + 8 h of its group.
struct Softmax {
  float o[MT][NV][4], m[MT][2], l[MT][2];  // l of this lane's slots

  __device__ void clear() {
#pragma unroll
    for (int mt = 0; mt < MT; mt++) {
#pragma unroll
      for (int n = 0; n < NV; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) o[mt][n][e] = 0.0f;
#pragma unroll
      for (int h = 0; h < 2; h++) m[mt][h] = -inf(), l[mt][h] = 0.0f;
    }
  }

  // s = q k^T of the warp's queries and its quarter of the slots. Where these are one product wide, two sums take turns:
  // the products of one sum follow each other slowly.
  __device__ static void scores(float (&s)[MT][NK][4], const bf16* q, const bf16* k, int group, int quarter) {
    const int lane = threadIdx.x % WARP;
    constexpr bool TWO = NK == 1;
    float other[MT][NK][4] = {};
#pragma unroll
    for (int col = 0; col < Dh; col += 32) {
      unsigned a[MT][2][4], b[4];
#pragma unroll
      for (int mt = 0; mt < MT; mt++) load_a<Dh>(a[mt], q, group + 16 * mt, col);
#pragma unroll
      for (int n = 0; n < NK; n++) {
        ldmatrix_x4(b, k + at<Dh>((quarter * NK + n) * 8 + lane % 8, lane / 8 * 8, col));
        const unsigned low[2] = {b[0], b[1]}, high[2] = {b[2], b[3]};
#pragma unroll
        for (int mt = 0; mt < MT; mt++) {
          mma_m16n8k16(s[mt][n], a[mt][0], low);
          mma_m16n8k16(TWO ? other[mt][n] : s[mt][n], a[mt][1], high);
        }
      }
    }
    if (!TWO) return;
#pragma unroll
    for (int mt = 0; mt < MT; mt++)
#pragma unroll
      for (int e = 0; e < 4; e++) s[mt][0][e] += other[mt][0][e];
  }

  // m = max(m, max s), p = 2^(s - m), l and o scaled to the new m; p to shared memory, over k. Two barriers.
  __device__ void weigh(float (&s)[MT][NK][4], bf16* p, float (*top)[Rows], int group, int quarter) {
    const int lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int mt = 0; mt < MT; mt++)
#pragma unroll
      for (int h = 0; h < 2; h++) {
        float most = -inf();
#pragma unroll
        for (int n = 0; n < NK; n++) most = fmaxf(most, fmaxf(s[mt][n][2 * h], s[mt][n][2 * h + 1]));
        most = fmaxf(most, __shfl_xor_sync(ALL_LANES, most, 1));
        most = fmaxf(most, __shfl_xor_sync(ALL_LANES, most, 2));
        if (t == 0) top[quarter][group + 16 * mt + 8 * h + g] = most;
      }
    __syncthreads();
#pragma unroll
    for (int mt = 0; mt < MT; mt++)
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const int row = group + 16 * mt + 8 * h + g;
        const float before = m[mt][h];
        m[mt][h] = fmaxf(fmaxf(fmaxf(before, top[0][row]), fmaxf(top[1][row], top[2][row])), top[3][row]);
        const float scale = before == m[mt][h] ? 1.0f : exp2f(before - m[mt][h]);
        const float base = m[mt][h] == -inf() ? 0.0f : m[mt][h];
        float sum = 0.0f;
#pragma unroll
        for (int n = 0; n < NK; n++) {
          const unsigned pair = pack_bf16(exp2f(s[mt][n][2 * h] - base), exp2f(s[mt][n][2 * h + 1] - base));
          sum += __uint_as_float(pair << 16) + __uint_as_float(pair & 0xffff0000u);
          memcpy(p + at<KEYS>(row, quarter * (NK * 8) + 2 * t, n * 8), &pair, 4);
        }
        l[mt][h] = fmaf(l[mt][h], scale, sum);
#pragma unroll
        for (int n = 0; n < NV; n++) o[mt][n][2 * h] *= scale, o[mt][n][2 * h + 1] *= scale;
      }
    __syncthreads();
  }

  // o += p v, of the warp's quarter of the columns
  __device__ void add_values(const bf16* p, const bf16* v, int group, int quarter) {
    const int lane = threadIdx.x % WARP;
#pragma unroll
    for (int key = 0; key < KEYS; key += 32) {
      unsigned a[MT][2][4], b[4];
#pragma unroll
      for (int mt = 0; mt < MT; mt++) load_a<KEYS>(a[mt], p, group + 16 * mt, key);
#pragma unroll
      for (int n = 0; n < NV; n++) {
        ldmatrix_x4_trans(b, v + at<Dh>(key + lane, quarter * (NV * 8), n * 8));
#pragma unroll
        for (int mt = 0; mt < MT; mt++) multiply(o[mt][n], a[mt], b);
      }
    }
  }
};

// Writes the part of a split that has ended, or joins it to the one that lies there.
__device__ void end_split(const Softmax& x, bool join, int skip, const Queries<Rows>& query,
                          float (*sums)[Rows], int group, int quarter, float* part_o, float2* part_ml) {
  const int lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4;
#pragma unroll
  for (int mt = 0; mt < MT; mt++)
#pragma unroll
    for (int h = 0; h < 2; h++) {
      float sum = x.l[mt][h];
      sum += __shfl_xor_sync(ALL_LANES, sum, 1);
      sum += __shfl_xor_sync(ALL_LANES, sum, 2);
      if (t == 0) sums[quarter][group + 16 * mt + 8 * h + g] = sum;
    }
  __syncthreads();
  float2 ml[MT][2];
#pragma unroll
  for (int mt = 0; mt < MT; mt++)
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const int row = group + 16 * mt + 8 * h + g, place = query.place[row] + skip;
      if (query.place[row] < 0) continue;
      float2 factor = {0.0f, 1.0f};
      ml[mt][h] = float2{x.m[mt][h], (sums[0][row] + sums[1][row]) + (sums[2][row] + sums[3][row])};
      if (join) {
        float2 kept = part_ml[place];
        factor = join_factors(kept.x, ml[mt][h].x);
        ml[mt][h] = float2{kept.x, joined(kept.y, ml[mt][h].y, factor)};
      }
      float2* out = reinterpret_cast<float2*>(part_o + (long long)place * Dh + quarter * (NV * 8) + 2 * t);
#pragma unroll
      for (int n = 0; n < NV; n++) {
        float2 o = {x.o[mt][n][2 * h], x.o[mt][n][2 * h + 1]};
        if (join) o = float2{joined(out[4 * n].x, o.x, factor), joined(out[4 * n].y, o.y, factor)};
        out[4 * n] = o;
      }
    }
  __syncthreads();  // all have read m and l of the part before
  if (quarter || t) return;
#pragma unroll
  for (int mt = 0; mt < MT; mt++)
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const int place = query.place[group + 16 * mt + 8 * h + g];
      if (place >= 0) part_ml[place + skip] = ml[mt][h];
    }
}

// out = sum of parts / sum of weights * sigmoid(gate) for the tile's queries, a warp a query; as attention_join.cu.
__device__ void join_tile(const Queries<Rows>& query, const QueryTile& tile, int count, int Ratio, int Hq, int Ldg,
                          const float* part_o, const float* part_ml, const Act* gate, Act* out) {
  constexpr int EACH = Dh / WARP, AT_ONCE = 16;  // columns of a lane; parts under way
  const int lane = threadIdx.x % WARP;
  for (int j = threadIdx.x / WARP; j < Rows; j += WARPS) {
    const int place = query.place[j], i = tile.first + j, head = int(blockIdx.y) * Ratio + i % Ratio;
    if (place < 0) continue;
    const long long row = tile.q_row + i / Ratio;
    const float* from = part_o + (long long)place * Dh + lane * EACH;
    float by[EACH], o[EACH] = {}, top = -inf(), weight = 0.0f;
#pragma unroll
    for (int e = 0; e < EACH; e++) by[e] = to_float(gate[row * Ldg + head * Dh + lane * EACH + e]);
    float2 own = {}, factor = {};  // of part begin / WARP * WARP + lane: m and l; its factors
    for (int begin = 0; begin < count; begin += AT_ONCE) {
      Pack<float, EACH> part[AT_ONCE];
#pragma unroll
      for (int p = 0; p < AT_ONCE; p++) {
        if (begin + p < count) part[p] = load<EACH>(from + (long long)(begin + p) * Hq * Dh);
      }
      if (begin % WARP == 0) {
        own = float2{-inf(), 0.0f};
        if (begin + lane < count) memcpy(&own, part_ml + 2 * (place + (long long)(begin + lane) * Hq), 8);
        float until = own.x;  // the largest m up to this part
#pragma unroll
        for (int d = 1; d < WARP; d *= 2) until = fmaxf(until, __shfl_up_sync(ALL_LANES, until, d));
        float before = __shfl_up_sync(ALL_LANES, until, 1);
        before = lane == 0 ? top : fmaxf(before, top);
        factor = join_factors(before, own.x);
        top = __shfl_sync(ALL_LANES, before, WARP - 1);
      }
#pragma unroll
      for (int p = 0; p < AT_ONCE; p++) {
        const int at = (begin + p) % WARP;
        const float2 by_m = {__shfl_sync(ALL_LANES, factor.x, at), __shfl_sync(ALL_LANES, factor.y, at)};
        const float l = __shfl_sync(ALL_LANES, own.y, at);
        if (begin + p >= count) continue;
        weight = begin + p == 0 ? l : joined(weight, l, by_m);
#pragma unroll
        for (int e = 0; e < EACH; e++) o[e] = begin + p == 0 ? part[p].v[e] : joined(o[e], part[p].v[e], by_m);
      }
    }
    Pack<Act, EACH> y;
#pragma unroll
    for (int e = 0; e < EACH; e++) y.v[e] = from_float<Act>(o[e] / weight * sigmoid(by[e]));
    store<EACH>(out + (row * Hq + head) * Dh + lane * EACH, y);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) tree_attention(
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
    int* parts,                 // [Rq, 2] or null; first part and number of parts of a row
    const Act* gate,            // [Rq, Hq, Dh] strides [Ldg, Dh, 1]
    int* arrived,               // [Counters] zeros
    Act* out,                   // [Rq, Hq, Dh] or null
    int Hq,
    int Hkv,
    int P,
    int B,
    int M,
    int Rq,
    int Room,
    int Splits,
    int Ldg,
    float scale)
{
  after_previous();
  extern __shared__ uint4 arena[];
  __shared__ Queries<Rows> query;
  __shared__ float exchange[QUARTERS][Rows];

  // the tile; long ones are started first
  query.clear();
  __syncthreads();
  const Trees forest = {rows, request, ancestors, chain, start, committed, B, Rq};
  const int Ratio = Hq / Hkv;
  const auto longest_first = [](int tiles) { return tiles - 1 - int(blockIdx.x); };
  const QueryTile tile = find_tile(forest, Rows, Ratio, Room, Splits, M * P, longest_first);
  if (tile.request < 0) return;
  const bool side_by_side = tile.step > 1;
  const int splits = side_by_side ? split_of(tile.end - 1) + 1 : 1;
  if (blockIdx.z >= splits) return;
  query.describe(forest, tile, Ratio, blockIdx.y, Hq);
  write_parts(tile, Rows, Ratio, splits, parts);

  bf16* q_tile = reinterpret_cast<bf16*>(arena);
  bf16* stages = q_tile + Rows * Dh;
  const int warp = threadIdx.x / WARP, group = warp / QUARTERS * (16 * MT), quarter = warp % QUARTERS;
  const int g = threadIdx.x % WARP / 4, t = threadIdx.x % 4;
  const Pages pages = {k_pages, v_pages, page_table + (long long)tile.request * M, P, Hkv};
  Softmax x;
  x.clear();
  for (int split = splits - 1 - blockIdx.z; split >= 0; split -= gridDim.z) {
    int begin = split_begin(split), edge = split_begin(split + 1), stop = tile.end;
    if (side_by_side) stop = min(stop, edge);
    int own[Stages];
#pragma unroll
    for (int i = 0; i < Stages; i++) own[i] = pages.where(begin + i * KEYS, stop);
    __syncthreads();  // the queries are described, and all are done with the stages
    if (split == splits - 1 - blockIdx.z) {
      // q, zero where there is no query
      for (int word = threadIdx.x; word < Rows * (Dh / 8); word += THREADS) {
        const int j = word / (Dh / 8), col = word % (Dh / 8) * 8, i = tile.first + j;
        const bool used = query.place[j] >= 0;
        const long long from = ((tile.q_row + i / Ratio) * (long long)Hq + blockIdx.y * Ratio + i % Ratio) * Dh + col;
        cp_async16(q_tile + at<Dh>(j, col), q + (used ? from : 0), used);
      }
    }
#pragma unroll
    for (int i = 0; i < Stages; i++) {
      if (begin + i * KEYS < stop) pages.copy(stages + i * STAGE, query, begin + i * KEYS, own[i]);
      cp_async_commit();
    }
    int ahead = pages.where(begin + Stages * KEYS, stop), turn = 0;
    for (int key = begin; key < stop; key += KEYS, turn = turn + 1 == Stages ? 0 : turn + 1) {
      bf16* k = stages + turn * STAGE;
      if (key == begin) cp_async_wait<Stages - 1>();
      if (key > begin) cp_async_wait<Stages - 2>();
      __syncthreads();  // k and v are here, and all are done with the stage before
      if (key > begin) {
        const int next = key + (Stages - 1) * KEYS, free = turn == 0 ? Stages - 1 : turn - 1;
        if (next < stop) pages.copy(stages + free * STAGE, query, next, ahead);
        cp_async_commit();
        ahead = pages.where(next + KEYS, stop);
      }

      // s = scale q k^T, in base 2; -inf where the slot is not seen
      float s[MT][NK][4] = {};
      Softmax::scores(s, q_tile, k, group, quarter);
      const bool all = key + KEYS <= query.T;
#pragma unroll
      for (int mt = 0; mt < MT; mt++)
#pragma unroll
        for (int n = 0; n < NK; n++)
#pragma unroll
          for (int e = 0; e < 4; e++) {
            const int slot = key + (quarter * NK + n) * 8 + 2 * t + e % 2;
            const bool sees = all || query.sees(group + 16 * mt + g + e / 2 * 8, slot);
            s[mt][n][e] = sees ? s[mt][n][e] * (scale * LOG2_E) : -inf();
          }
      x.weigh(s, k, exchange, group, quarter);
      x.add_values(k, k + K_SIZE, group, quarter);

      if (key + KEYS < min(stop, edge)) continue;
      const int skip = side_by_side ? split * Hq : 0;
      end_split(x, !side_by_side && edge > split_begin(1), skip, query, exchange, group, quarter, part_o,
                reinterpret_cast<float2*>(part_ml));
      x.clear();
      edge = split_begin(split_of(edge) + 1);
    }
  }
  if constexpr (Rows == 16) {
    if (out == nullptr) return;
    if (!arrives_last(arrived + blockIdx.x * Hkv + blockIdx.y, min(splits, int(gridDim.z)))) return;
    join_tile(query, tile, splits, Ratio, Hq, Ldg, part_o, part_ml, gate, out);
  }
}
