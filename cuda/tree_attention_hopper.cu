// Attention of a forest over paged KV by TMA and wgmma: softmax(scale q k^T) v of each query, times sigmoid(gate).
// Definition: tree_attention in boleinfer/ops/attention.py; words and parts: attention.cuh, products: attention_tile.cuh.
// With Half > 0 each request has one row at most, and q, k and v are made here of what the product before gives
// (boleinfer/attention_core.py, head_inputs.cuh): q by every block of the row, k and v by the one that has its own slot.
//
// A block belongs to a tile of Rows queries of one KV head and takes a run of its leaves. Where there are more blocks than
// tiles, equally long runs of a tile are worked on side by side, and the last few blocks to finish share the joining of the
// leaves. The first run joins its own in turn, where registers hold them or nobody works beside it; to a long prompt all is
// one leaf.
// At few rows and short contexts what runs once costs by its instructions, which come from L2: it is kept short, and loops
// that could be unrolled are not.
//
// grid: Hkv, at least as many blocks as there may be tiles. block: two warpgroups that multiply (one for Rows = 8), and a
// warp that asks for K and V, page by page, into a ring of Stages tiles of 64 slots of either.
// shared: 1 KB + 2 bytes x ((Rows + 64 Stages) Dh + 1024): q, the ring, weights of Rows = 8. With a small ring two blocks
// share a multiprocessor, or one and a product.
// Read twice: the KV of a request, once for each of its tiles, from L2.
//
// spills: addresses, once a leaf
// arch: 90a
// sizes: Dh=64,128,256 Rows=8 Ratio=4 Stages=6 Act=bf16 Half=0 | Dh=256 Rows=8 Ratio=4,8 Stages=3 Act=bf16 Half=32
// sizes: Dh=64,128 Rows=64 Ratio=4 Stages=8 Act=bf16 Half=0 | Dh=256 Rows=64 Ratio=4 Stages=6 Act=bf16 Half=0
// sizes: Dh=64,128 Rows=128 Ratio=6 Stages=8 Act=bf16 Half=0 | Dh=256 Rows=128 Ratio=6 Stages=4 Act=bf16 Half=0
// sizes: Dh=64 Rows=8 Ratio=2 Stages=6 Act=bf16 Half=16
#include "arrival.cuh"
#include "attention_few.cuh"
#include "attention_wide.cuh"
#include "head_inputs.cuh"

constexpr int THREADS = WARP * WARPS + (GROUPS == 1 ? WARP : 4 * WARP);  // that multiply, and those that ask
constexpr int PITCH = Dh + 8;                                            // of results in shared memory

// Neighbours among a lane's sums
struct alignas(4 * Share<Rows>::NEIGHBOURS) Some {
  float v[Share<Rows>::NEIGHBOURS];
};

__device__ __forceinline__ void put(float* to, const float* from) {
  Some some;
  memcpy(&some, from, sizeof some);
  *reinterpret_cast<Some*>(to) = some;
}

// a / b of whole numbers below 2^21, without the long way of the compiler's own
__device__ __forceinline__ int quotient(int a, int b) { return int(__fdividef(a + 0.5f, b)); }

// A place of K or V in the ring, and the parity of its turn.
struct Turn {
  int place, parity = 0;

  __device__ __forceinline__ void advance(int by) {
    if ((place += by) >= Stages) place -= Stages, parity ^= 1;
  }
};

// Zeros in the rows of V that no query sees, since nothing or anything may be there. By all that multiply.
__device__ __forceinline__ void clear_unseen(bf16* v, const Queries<Rows>& query, int key) {
  const int row = threadIdx.x % 64;
  if (query.any_sees(key + row)) return;
#pragma unroll 1
  for (int word = threadIdx.x / 64; word < Dh / 8; word += WARP * WARPS / 64) {
    *reinterpret_cast<uint4*>(v + place_in_tile(row, word * 8)) = uint4{0, 0, 0, 0};
  }
}

// Of query j among a tile's: its row of q and out, and its head.
struct Place {
  int row, head;

  __device__ __forceinline__ Place(const QueryTile& tile, int j) {
    const int i = tile.first + j;
    row = tile.q_row + i / Ratio, head = int(blockIdx.x) * Ratio + i % Ratio;
  }
  // in an array whose rows are so far apart
  __device__ __forceinline__ long long in(int apart) const { return (long long)row * apart + head * Dh; }
};

static_assert(Half == 0 || (Rows == 8 && Ratio <= 8), "heads are normed and turned here where a tile is a row");

constexpr int EACH = 4;                                      // columns of a thread at the end
constexpr int AT_ONCE = Dh / EACH < WARP ? Dh / EACH : WARP;  // leaves joined at once: a lane of a query's for each
static_assert(AT_ONCE * WARP * WARPS * EACH * 4 <= Stages * TILE * 2, "leaves do not fit into the ring");

// EACH neighbours, at any address
__device__ __forceinline__ Pack<bf16, EACH> load_gate(const bf16* gate) {
  Pack<bf16, EACH> by;
  if (reinterpret_cast<unsigned long long>(gate) % 8) return load<EACH>(gate);
  const uint2 word = *reinterpret_cast<const uint2*>(gate);
  memcpy(&by, &word, 8);
  return by;
}

// out = o / l sigmoid(gate)
__device__ __forceinline__ void store_gated(bf16* out, const Pack<float, EACH>& o, float l, const Pack<bf16, EACH>& gate) {
  const float scale = 1.0f / l;
  unsigned y[EACH / 2];
#pragma unroll
  for (int i = 0; i < EACH; i += 2) {
    const auto gated = [&](int e) { return __fdividef(o.v[e] * scale, 1.0f + __expf(-to_float(gate.v[e]))); };
    y[i / 2] = pack_bf16(gated(i), gated(i + 1));
  }
  *reinterpret_cast<uint2*>(out) = uint2{y[0], y[1]};
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) tree_attention(
    const Act* q,               // [Rq, Hq, Dh] strides [Ldq, Dh, 1] aligned 16
    const Act* kv,              // [Rq, 2*Hkv, Dh] strides [Ldq, Dh, 1] or null aligned 16; this and the next six: Half > 0
    const float* q_norm,        // [Dh] or null aligned 16
    const float* k_norm,        // [Dh] or null aligned 16
    const float* cos,           // [Rq, Half] or null aligned 16
    const float* sin,           // [Rq, Half] or null aligned 16
    Act* k_pages,               // [Pages, P, Hkv, Dh] or null aligned 16
    Act* v_pages,               // [Pages, P, Hkv, Dh] or null aligned 16
    const __grid_constant__ TensorMap<const Act> k,  // [E, L, 8, 64] strides [512*L, 64, 64*L, 1] box [Box/8, Dh/64, 8]
    const __grid_constant__ TensorMap<const Act> v,  // [E, L, 8, 64] strides [512*L, 64, 64*L, 1] box [Box/8, Dh/64, 8]
    const int* page_table,      // [B, M]
    const int* rows,            // [Rq] or null; rows of the forest, -1 for none
    const int* request,         // [R]
    const unsigned* ancestors,  // [R, 4]
    const int* chain,           // [B]
    const int* start,           // [B+1]
    const int* committed,       // [B]
    float* part_o,              // [Parts, Hq, Dh] aligned 16
    float* part_ml,             // [Parts, Hq, 2] aligned 16
    const Act* gate,            // [Rq, Hq, Dh] strides [Ldg, Dh, 1]
    int* arrived,               // [Counters] zeros
    Act* out,                   // [Rq, Hq, Dh] aligned 16
    int Hq,
    int Hkv,
    int P,  // a power of two
    int Box,
    int B,
    int M,
    int Rq,
    int Room,
    int Splits,
    int Ldq,
    int Ldg,
    int Blocks,  // of a KV head that fit on the device at once
    float eps,
    float scale)
{
  extern __shared__ __align__(1024) uint4 arena[];
  __shared__ Queries<Rows> query;
  __shared__ Barrier full[Stages], empty[Stages], prepared, made;
  __shared__ Share<Rows>::Shared shared;
  bf16* q_tile = reinterpret_cast<bf16*>(arena);
  bf16* ring = q_tile + Rows * Dh + Share<Rows>::EXTRA;
  const int warp = __shfl_sync(ALL_LANES, threadIdx.x / WARP, 0), lane = threadIdx.x % WARP, head = blockIdx.x;
  query.clear();
  if (threadIdx.x == 0) {
#pragma unroll 1
    for (int i = 0; i < Stages; i++) make_barrier(full[i], 1), make_barrier(empty[i], WARPS);
    make_barrier(prepared, WARP * WARPS), make_barrier(made, WARP);
    Share<Rows>::prepare(shared);
    barriers_made();
    prefetch_map(k), prefetch_map(v);
  }

  // The tile, long ones first, and which of its `workers` blocks this is.
  const Trees forest = {rows, request, ancestors, chain, start, committed, B, Rq};
  int worker = 0, workers = 1, tiles = 1, number = 0;
  const auto choose = [&](int count) {
    tiles = max(1, count), workers = max(1, quotient(Blocks, tiles)), worker = quotient(blockIdx.y, tiles);
    number = blockIdx.y - worker * tiles;
    return worker < workers ? tiles - 1 - number : -1;
  };
  const QueryTile tile = Half ? find_row(forest, Ratio, Room, Splits, M * P, choose)
                              : find_tile<CLASS>(forest, Rows, Ratio, Room, Splits, M * P, choose);
  if (tile.request < 0) return after_previous();

  // Its run of leaves
  const int leaf = tile.queries > TREE_ROWS * Ratio ? 1 << 30 : leaf_of(tile.T + tile.row - tile.start + tile.first / Ratio);
  const int leaves = quotient(tile.end - 1, leaf) + 1;
  workers = tile.step == 1 ? 1 : min(workers, leaves);
  if (worker >= workers) return after_previous();
  const int first_leaf = quotient(leaves * worker, workers);
  const int begin = first_leaf * leaf, stop = min(tile.end, quotient(leaves * (worker + 1), workers) * leaf);
  const bool newest = Half && stop == tile.end && tile.T < M * P;  // the run ends with the row's own slot
  constexpr int WORDS = Dh / 8;
  __syncthreads();

  if (warp >= WARPS) {
    if (GROUPS > 1) fewer_registers<40>();
    if (warp > WARPS) return;
    // a lane asks for the same box of every tile
    const int first = lane * Box, shift = __ffs(P) - 1;
    const int* table = page_table + (long long)tile.request * M;
    const auto place_of = [&](int key) {
      const int slot = key + first;
      return first < 64 && slot < stop ? (__ldcg(table + (slot >> shift)) << shift) + (slot & P - 1) : -1;
    };
    Turn turn{0}, last_k{0}, last_v{0};
    int place = place_of(begin), next = place_of(begin + 64);
    bool waited = Half > 0;
#pragma unroll 1
    for (int key = begin; key < stop; key += 64) {
      // what was there before the pass began is asked for at once
      if (!waited && key + 64 > tile.T) after_previous(), waited = true;
#pragma unroll 1
      for (int values = 0; values < 2; values++, last_k = last_v, last_v = turn, turn.advance(1)) {
        wait(empty[turn.place], turn.parity ^ 1);
        const unsigned some = __ballot_sync(ALL_LANES, place >= 0);
        if (lane == 0) arrive_expecting(full[turn.place], __popc(some) * Box * Dh * 2);
        __syncwarp();
        bf16* to = ring + turn.place * TILE + first * Dh;
        if (place >= 0) load_tile(to, values ? v : k, full[turn.place], 0, 0, head * PANELS, place / 8, KEPT);
      }
      place = next, next = place_of(key + 128);
    }
    if constexpr (Half > 0) {
      // The row's own k and v, into the last tiles; zeros behind v, where nothing or anything may be
      if (!newest) return;
      bf16 *k_tile = ring + last_k.place * TILE, *v_tile = ring + last_v.place * TILE;
      const int page = __ldcg(table + (tile.T >> shift)), at = tile.T % 64;
      const long long to = (((long long)page << shift) + (tile.T & P - 1)) * Hkv + head;
      wait(full[last_k.place], last_k.parity), wait(full[last_v.place], last_v.parity);
#pragma unroll 1
      for (int row = at + 1; row < 64 && lane < WORDS; row++) {
        *reinterpret_cast<uint4*>(v_tile + place_in_tile(row, lane * 8)) = uint4{0, 0, 0, 0};
      }
      const auto put = [&](Act* tile, Act* pages, int column, const Pack<Act, 8>& numbers) {
        store(tile + place_in_tile(at, column), numbers);
        if (page >= 0) store(pages + to * Dh + column, numbers);
      };
      const Act *own_k = kv + (long long)tile.row * Ldq + head * Dh, *own_v = own_k + Hkv * Dh;
      const float *turn_cos = cos + (long long)tile.row * Half, *turn_sin = sin + (long long)tile.row * Half;
      after_previous();
      if (lane < WORDS) put(v_tile, v_pages, lane * 8, load<8>(own_v + lane * 8));
      head_inputs<8>(lane < LANES ? own_k : nullptr, k_norm, turn_cos, turn_sin, eps, lane < LANES ? k_tile : nullptr,
                     [&](Act* tile, int column, const Pack<Act, 8>& numbers) { put(tile, k_pages, column, numbers); });
      fence_writes();
      arrive(made);
    }
    return;
  }

  if (GROUPS > 1) more_registers<232>();  // those that multiply twice need what the others leave
  Meeting meet{prepared};
  if (Half) {
    query.describe_row(tile, Ratio, head, Hq, tile.step);
    for (int word = threadIdx.x; word < (Rows - Ratio) * WORDS; word += WARP * WARPS) {
      *reinterpret_cast<uint4*>(q_tile + place_in_tile(Ratio + word / WORDS, word % WORDS * 8)) = uint4{0, 0, 0, 0};
    }
  } else {
    query.describe(forest, tile, Ratio, head, Hq, tile.step);
  }
  meet();

  if constexpr (Half > 0) {
    const Act* heads = q + Place(tile, 0).in(Ldq);
    const long long angles = (long long)tile.row * Half;
#pragma unroll 1
    for (int first = warp * (WARP / LANES); first < Ratio; first += WARPS * (WARP / LANES)) {
      const int h = first + lane / LANES;
      head_inputs<8>(h < Ratio ? heads + h * Dh : nullptr, q_norm, cos + angles, sin + angles, eps,
                     h < Ratio ? q_tile : nullptr,
                     [&](Act* out, int column, const Pack<Act, 8>& numbers) {
                       store(out + place_in_tile(h, column), numbers);
                     });
    }
    after_previous();  // by warps without a head, too
  } else {  // q, zero where there is no query
    after_previous();
#pragma unroll (Rows == 8 ? 1 : 4)
    for (int word = threadIdx.x; word < Rows * WORDS; word += WARP * WARPS) {
      const int j = word / WORDS, col = word % WORDS * 8;
      const bool used = query.place[j] >= 0;
      cp_async16(q_tile + place_in_tile(j, col), q + (used ? Place(tile, j).in(Ldq) + col : 0), used);
    }
    cp_async_commit();
    cp_async_wait<0>();
  }
  fence_writes();
  meet();

  Share<Rows> x(shared, q_tile);
  const int free = Rows == 8 ? tile.T : query.all_see(x.first_query), seen = query.all_seen();  // slots
  Turn keys{0}, values{1};
  const auto begin_scores = [&](int key) {
    const bool own = newest && key + 64 > tile.T;
    wait(own ? made : full[keys.place], own ? 0 : keys.parity);
    x.begin_scores(q_tile, ring + keys.place * TILE);
  };
  const auto release = [&](Turn& turn) {
    if (lane == 0) arrive(empty[turn.place]);
    turn.advance(2);
  };
  const auto weigh = [&](int key) {
    release(keys);
    if (key + 64 > free) x.mask(query, key);
    x.weigh(scale * LOG2_E);
  };
  const auto begin_add = [&](int key) {
    wait(full[values.place], values.parity);
    bf16* v = ring + values.place * TILE;
    if (Half == 0 && key + 64 > seen) {
      clear_unseen(v, query, key);
      fence_writes();
      meet();
    }
    x.begin_add(v);
  };
#pragma unroll 1
  for (int key = begin, l = first_leaf; key < stop; l++, x.clear()) {
    const int edge = min(stop, key + leaf);
#pragma unroll 1
    for (; key < edge; key += 64) {
      begin_scores(key);
      wgmma_wait<0>();
      weigh(key);
      x.settle();
      // the next scores are made beside the values of these
#pragma unroll 1
      for (; key + 64 < edge; key += 64) {
        begin_scores(key + 64);
        begin_add(key);
        wgmma_wait<1>();
        weigh(key + 64);
        wgmma_wait<0>();
        release(values);
        x.settle();
      }
      begin_add(key);
      wgmma_wait<0>();
      release(values);
    }
    if (x.HOLDS ? worker == 0 : workers == 1) {
      x.fold(query, part_o, l == 0, key >= stop);
      if (key < stop) continue;
      if (workers == 1) break;
    }
    x.each([&](int j, int col, const float* o) {
      if (query.place[j] >= 0) put(part_o + (long long)(query.place[j] + l) * Dh + col, o);
    });
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int place = query.place[x.query(i)];
      if (x.tells() && place >= 0) reinterpret_cast<float2*>(part_ml)[place + l] = float2{x.m[i], x.l[i]};
    }
  }

  // The end: a thread takes EACH columns of a query, from shared memory or, by the last blocks together, from the parts.
  float *room = reinterpret_cast<float*>(q_tile), *sums = room + Rows * PITCH;
  const int words = min(Rows, tile.queries - tile.first) * (Dh / EACH);
  int rank = 0, ranks = 1;
  if (workers == 1) {
    meet();
    x.each([&](int j, int col, const float* o) { put(room + j * PITCH + col, o); });
    if (x.tells()) sums[x.query(0)] = x.l[0], sums[x.query(1)] = x.l[1];
    meet();
  } else {
    ranks = min(min(workers, (words + WARP * WARPS - 1) / (WARP * WARPS)), max(1, (Blocks * Hkv - 2) / (tiles * Hkv)));
    rank = arrives_among_last(arrived + number * Hkv + head, workers, ranks);
    if (rank < 0) return;
  }
  const int first = x.HOLDS ? max(0, quotient(leaves, workers) - 1) : 0, member = threadIdx.x % AT_ONCE;
  float* own = reinterpret_cast<float*>(ring) + threadIdx.x * EACH;
#pragma unroll 1
  for (int word = rank * (WARP * WARPS) + threadIdx.x; word < words; word += ranks * (WARP * WARPS)) {
    const int j = word / (Dh / EACH), col = word % (Dh / EACH) * EACH, place = query.place[j];
    const Place at(tile, j);
    const bool used = place >= 0;
    const Pack<bf16, EACH> by = used ? load_gate(gate + at.in(Ldg) + col) : Pack<bf16, EACH>{};
    Pack<float, EACH> o = {};
    float l = 0.0f;
    if (workers == 1) {
      o = load<EACH>(room + j * PITCH + col), l = sums[j];
    } else {
      float m = -inf();
#pragma unroll 1
      for (int from = first; from < leaves; from += AT_ONCE) {
        const int count = min(AT_ONCE, leaves - from);
        float2 ml = {-inf(), 0.0f};
        if (used && member < count) ml = __ldcg(reinterpret_cast<const float2*>(part_ml) + place + from + member);
        const float* part = part_o + (long long)(place + from) * Dh + col;
#pragma unroll 4
        for (int p = 0; p < count; p++, part += Dh) {
          cp_async16(own + p * (WARP * WARPS * EACH), used ? part : part_o, used);
        }
        cp_async_commit();
        // each lane the factors of its leaf, from the maximum of all before it
        float most = ml.x;
#pragma unroll 1
        for (int d = 1; d < AT_ONCE; d *= 2) {
          const float other = __shfl_up_sync(ALL_LANES, most, d, AT_ONCE);
          if (member >= d) most = fmaxf(most, other);
        }
        float before = __shfl_up_sync(ALL_LANES, most, 1, AT_ONCE);
        before = member ? fmaxf(m, before) : m;
        m = fmaxf(m, __shfl_sync(ALL_LANES, most, AT_ONCE - 1, AT_ONCE));
        const float2 factor = join_factors(before, ml.x);
        cp_async_wait<0>();
#pragma unroll 4
        for (int p = 0; p < count; p++) {
          const auto part = load<EACH>(own + p * (WARP * WARPS * EACH));
          const auto of_leaf = [&](float x) { return __shfl_sync(ALL_LANES, x, p, AT_ONCE); };
          const float2 both = {of_leaf(factor.x), of_leaf(factor.y)};
          l = joined(l, of_leaf(ml.y), both);
#pragma unroll
          for (int i = 0; i < EACH; i++) o.v[i] = joined(o.v[i], part.v[i], both);
        }
      }
    }
    if (used) store_gated(out + at.in(Hq * Dh) + col, o, l, by);
  }
}
