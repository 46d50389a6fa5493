// x w^T on tensor cores of sm_90a (wgmma), of bf16; or of its halves silu(gate) * up; or of two matrices, the second result
// in float. Definitions: linear, gated_linear, linear_pair, head in boleinfer/ops/linear.py. Sums in float32, in the order of
// ranges.cuh; Gated rounds them to Out before it goes on, as linear does. Of rows with use = 2 only the largest result is
// kept, with its feature.
//
// A tile of out is Rows rows and what `Features` rows of w give; for Gated those are rows of gate and of up in turn. The tiles
// of w_more come behind those of w. Products have 64 rows of x, of which those behind the tile's are whatever lies there and
// are left alone, and a warpgroup's rows of w, eight or more: so tiles are as wide as gives each block one, and the numbers of
// neighbouring lanes are neighbours in out. How blocks share tiles: cut.cuh. With Parts = 2 k is cut in halves, of
// which the first passes its sum on to the second, which has kept those of its ranges in registers: to be added in order.
//
// Weights pass through L2 as what goes first, so that the codes and small arrays of all other kernels stay there: 0.8B's
// step took 4 % longer without (H200, 2026-11-30).
//
// grid: one block a multiprocessor, at most. block: Groups warpgroups that share the features, for each 64 rows of x, and
// one that asks, the first thread of a warp for tiles of w, that of the next for x. Depth places of a ring hold a chunk, Run
// tiles of 64 k of w and x; it is filled with w before x is there, no more than AtOnce chunks on their way at the same time:
// x comes through the same queues. To begin a chunk takes as long as to multiply one tile, so narrow ones come together.
// shared: 1 KB + Depth * Run * 128 bytes * (Features + Rows) + what 64 rows of x are more than the last place has.
// Read twice: x, by every block (L2), w by every tile of rows.
//
// arch: 90a
// sizes: Out=bf16 Rows=128 Features=64,96 Groups=1 Run=1 Parts=2 Gated=0 | Out=bf16 Rows=32 Features=40 Groups=1 Run=2 Parts=2 Gated=0 | Out=bf16 Rows=64 Features=160 Groups=2 Run=1 Parts=2 Gated=0 | Out=bf16 Rows=16 Features=32 Groups=1 Run=4 Parts=1 Gated=0 | Out=bf16 Rows=8,64 Features=32 Groups=1 Run=2 Parts=1 Gated=0 | Out=bf16 Rows=32 Features=80,96 Groups=1 Run=2 Parts=1 Gated=0 | Out=bf16 Rows=128 Features=80,96,160 Groups=1 Run=1 Parts=1 Gated=0 | Out=float Rows=16 Features=192 Groups=2 Run=1 Parts=1 Gated=0 | Out=float Rows=128 Features=192 Groups=1 Run=1 Parts=1 Gated=0 | Out=bf16 Rows=16,64 Features=192 Groups=2 Run=1 Parts=1 Gated=1 | Out=bf16 Rows=128 Features=192 Groups=1 Run=1 Parts=1 Gated=1
#include "cut.cuh"
#include "largest.cuh"
#include "wgmma.cuh"

constexpr int ROW_BYTES = 128, TILE_K = ROW_BYTES / sizeof(bf16);  // of a tile of x or w in shared memory
constexpr int K = Run * TILE_K;                                    // of a chunk
constexpr int BLOCKS = (Rows + 63) / 64;                        // of 64 rows of x
constexpr int WARPS = 4 * BLOCKS * Groups;                      // that multiply
constexpr int HALVES = 1 + Gated, RESULTS = Features / HALVES;  // RESULTS: features of out in a tile
constexpr int OWN = Features / Groups;                          // rows of w of a warpgroup
constexpr int X_TILE = Rows * ROW_BYTES, X_BYTES = Run * X_TILE, W_TILE = Features * ROW_BYTES, W_BYTES = Run * W_TILE;
constexpr int PLACE = X_BYTES + W_BYTES;
constexpr int SUMS = OWN / 2, QUADS = OWN / 8;  // of a lane; fours of them, for eight rows of w each
constexpr int PART = RANGES / Parts;            // ranges of a unit
constexpr int MOST = 40;                        // places of a ring
static_assert(OWN % (8 * HALVES) == 0 && (!Gated || sizeof(Out) == 2), "gates and ups become words of bf16 pairs");

// Numbers that a thread holds while it multiplies; whether some need registers of those that ask, and whether two blocks
// fit on a multiprocessor.
constexpr int HELD = SUMS * (Parts == 1 ? 2 : PART);
constexpr bool HUNGRY = WARPS == 8 && HELD > 112, TWO_FIT = WARPS == 4 && HELD <= 72;

// Chunks of x and w on their way from the warps that ask for them to those that multiply. The first w of a place counts at
// `loaded`, so that it is known when it is there, all others at `full`, as x does.
struct Ring {
  char* places;
  Barrier *full, *empty, *loaded;

  __device__ __forceinline__ char* x(int place) const { return places + place * PLACE; }
  __device__ __forceinline__ char* w(int place) const { return x(place) + X_BYTES; }
  __device__ __forceinline__ void wait_for(const Turn& turn) const {
    wait(full[turn.place], turn.parity);
    if (turn.first) wait(loaded[turn.place], 0);
  }
};

// Which 64 rows of x a warpgroup multiplies with which rows of w, and where they are in the first place of the ring.
struct Warpgroup {
  int block, first;  // first: row of w in a tile
  Tile x, w;

  __device__ __forceinline__ Warpgroup(const Ring& ring, int warp)
      : block(BLOCKS == 1 ? 0 : warp / 4 / Groups), first(Groups == 1 ? 0 : warp / 4 % Groups * OWN),
        x(ring.x(0) + block * 64 * ROW_BYTES), w(ring.w(0) + first * ROW_BYTES) {}

  __device__ __forceinline__ int row() const { return 64 * block + threadIdx.x / WARP % 4 * 16; }  // of the warp
};

// sum = x w^T over chunks begin .. end - 1, one at least.
__device__ __forceinline__ void sum_up(
    float (&sum)[SUMS], const Warpgroup& own, int begin, int end, const Ring& ring, Turn& turn) {
  const int lane = threadIdx.x % WARP;
  int held = 0;
  for (int chunk = begin; chunk < end; chunk++, turn.advance()) {
    ring.wait_for(turn);
    const Tile x = own.x.behind(turn.place * PLACE), w = own.w.behind(turn.place * PLACE);
    wgmma_begin();
#pragma unroll
    for (int i = 0; i < 4 * Run; i++) {
      wgmma(sum, x.behind(i / 4 * X_TILE), w.behind(i / 4 * W_TILE), i % 4, i || chunk > begin);
    }
    wgmma_end();
    if (chunk > begin) {
      wgmma_wait<1>();
      if (lane == 0) arrive(ring.empty[held]);
    }
    held = turn.place;
  }
  wgmma_wait<0>();
  if (lane == 0) arrive(ring.empty[held]);
}

// The next two numbers of a row, or eight as bf16 pairs, or as many as exist.
__device__ __forceinline__ void store(float* to, float first, float second, int exist) {
  if (exist >= 2 && reinterpret_cast<unsigned long long>(to) % 8 == 0) {
    *reinterpret_cast<float2*>(to) = make_float2(first, second);
  } else {
    if (exist > 0) to[0] = first;
    if (exist > 1) to[1] = second;
  }
}
template <int WORDS>
__device__ __forceinline__ void store(bf16* to, unsigned (&words)[WORDS], int exist) {
  struct alignas(4 * WORDS) Some {
    unsigned v[WORDS];
  };
  if (exist >= 2 * WORDS && reinterpret_cast<unsigned long long>(to) % sizeof(Some) == 0) {
    *reinterpret_cast<Some*>(to) = reinterpret_cast<Some&>(words);
    return;
  }
#pragma unroll 1
  for (int i = 0; i < min(exist, 2 * WORDS); i++) {
    reinterpret_cast<unsigned short*>(to)[i] = words[0];
#pragma unroll
    for (int j = 0; j < WORDS; j++) words[j] = words[j] >> 16 | (j + 1 < WORDS ? words[j + 1] << 16 : 0);
  }
}

// Of four neighbouring lanes, number t gets word t of each.
__device__ __forceinline__ void transpose(unsigned (&words)[4]) {
#pragma unroll
  for (int bit = 2; bit; bit /= 2) {
    const bool upper = threadIdx.x & bit;
#pragma unroll
    for (int i = 0; i < 2; i++) {
      unsigned &low = words[bit == 2 ? i : 2 * i], &high = words[bit == 2 ? i + 2 : 2 * i + 1];
      const unsigned other = __shfl_xor_sync(ALL_LANES, upper ? low : high, bit);
      (upper ? low : high) = other;
    }
  }
}

// Two of eight neighbouring features of the i-th word, in each of four lanes, of row g for half = 0 and of g + 8 for 1: what
// eight rows of w give, or sixteen where they are gates and ups.
template <int S>
__device__ __forceinline__ unsigned word(const float (&sum)[S], int i, int half) {
  if constexpr (!Gated) return pack_bf16(sum[4 * i + 2 * half], sum[4 * i + 2 * half + 1]);
  const int t = threadIdx.x % 4, first = threadIdx.x % WARP / 4 * 4 + t % 2 * 2;  // the lanes that have features 2t, 2t + 1
  float gated[2];
#pragma unroll
  for (int n = 0; n < 2; n++) {
    const unsigned pair = pack_bf16(sum[8 * i + 4 * n + 2 * half], sum[8 * i + 4 * n + 2 * half + 1]);
    gated[n] = silu(__uint_as_float(pair << 16)) * __uint_as_float(pair & 0xffff0000u);
  }
  const unsigned both = pack_bf16(gated[0], gated[1]);  // of features t and t + 4
  const unsigned low = __shfl_sync(ALL_LANES, both, first), high = __shfl_sync(ALL_LANES, both, first + 1);
  return __byte_perm(low, high, t < 2 ? 0x5410 : 0x7632);
}

// The lane's numbers of a row, from the warp's first feature on, of which so many exist.
template <int S>
__device__ __forceinline__ void write_row(bf16* out, const float (&sum)[S], int half, int exist) {
  constexpr int ALL_WORDS = S / 4 / HALVES, FOURS = ALL_WORDS / 4 * 4;
  const int t = threadIdx.x % 4;
#pragma unroll
  for (int i = 0; i < FOURS; i += 4) {
    unsigned words[4];
#pragma unroll
    for (int j = 0; j < 4; j++) words[j] = word(sum, i + j, half);
    transpose(words);
    store(out + 8 * (i + t), words, exist - 8 * (i + t));
  }
#pragma unroll
  for (int i = FOURS; i < ALL_WORDS; i++) {
    unsigned words[1] = {word(sum, i, half)};
    store(out + 8 * i + 2 * t, words, exist - 8 * i - 2 * t);
  }
}
template <int S>
__device__ __forceinline__ void write_row(float* out, const float (&sum)[S], int half, int exist) {
#pragma unroll
  for (int n = 0; n < S / 4; n++) {
    const int own = 8 * n + threadIdx.x % 4 * 2;
    store(out + own, sum[4 * n + 2 * half], sum[4 * n + 2 * half + 1], exist - own);
  }
}

// The warp's results: of rows from `row` on, those before `end` that are read, and of features from `feature` to `last` - 1.
template <class T, int S>
__device__ __forceinline__ void write(
    T* out, const int* use, const float (&sum)[S], int row, int end, int feature, int last, int width) {
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int own = row + 8 * half + threadIdx.x % WARP / 4;
    const bool read = own < end && (use == nullptr || use[own] == ALL);
    int exist = read ? last - feature : 0;
    asm volatile("" : "+r"(exist));  // else all that follows is there twice, with and without `use`
    write_row(out + (long long)own * width + feature, sum, half, exist);
  }
}

// The largest of these results and their features, of the rows of which only that is asked for.
template <int S>
__device__ __forceinline__ void raise(
    Largest* largest, const int* use, const unsigned char* allowed, const float (&sum)[S], int row, int end,
    int feature, int last) {
  const int g = threadIdx.x % WARP / 4, t = threadIdx.x % 4;
  Largest most[2] = {};
#pragma unroll
  for (int i = 0; i < S / 2; i++) {
    const int own = feature + i / 2 * 8 + 2 * t + i % 2;
    if (own >= last || (allowed && !allowed[own])) continue;
#pragma unroll
    for (int half = 0; half < 2; half++) most[half] = max(most[half], largest_of(sum[i / 2 * 4 + i % 2 + 2 * half], own));
  }
#pragma unroll
  for (int half = 0; half < 2; half++) {
#pragma unroll
    for (int lane = 1; lane < 4; lane *= 2) most[half] = max(most[half], __shfl_xor_sync(ALL_LANES, most[half], lane));
  }
  const int own = row + g + t * 8;
  const Largest mine = t ? most[1] : most[0];
  if (t < 2 && own < end && use[own] == LARGEST && mine > __ldcg(largest + own)) atomicMax(largest + own, mine);
}

// Where results go.
struct Results {
  Out* out;
  float* more;
  const int* use;
  const unsigned char* allowed;
  Largest* largest;
  int w_tiles, width, more_width;

  // Of the warp, in rows from `row` on up to `end`: of a tile's results those of its rows of w from `from` on.
  template <int S>
  __device__ __forceinline__ void put(const float (&sum)[S], int tile, int row, int end, int from) const {
    const bool of_more = tile >= w_tiles;
    const int begin = (of_more ? tile - w_tiles : tile) * RESULTS, first = begin + from / HALVES;
    const int last = min(of_more ? more_width : width, begin + (from + OWN) / HALVES);
    if (!Gated && of_more) {
      write(more, nullptr, sum, row, end, first, last, more_width);
    } else {
      write(out, use, sum, row, end, first, last, width);
      if (sizeof(Out) == 4 && largest) raise(largest, use, allowed, sum, row, end, first, last);
    }
  }
};

// sum[0] = total + sum[0] + sum[1] + ...; total: zeros, or the lane's place of one that was kept.
template <int N>
__device__ __forceinline__ void add_to(const float4* total, float (&sum)[N][SUMS]) {
#pragma unroll
  for (int n = 0; n < QUADS; n++) {
    const float4 given = total ? __ldcg(total + n * WARP) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    float four[4] = {given.x, given.y, given.z, given.w};
#pragma unroll
    for (int r = 0; r < N; r++) {
#pragma unroll
      for (int i = 0; i < 4; i++) four[i] += sum[r][4 * n + i];
    }
#pragma unroll
    for (int i = 0; i < 4; i++) sum[0][4 * n + i] = four[i];
  }
}

extern "C" __global__ void __launch_bounds__(WARP * (WARPS + 4), TWO_FIT ? 2 : 1) linear_hopper(
    const __grid_constant__ TensorMap<const bf16> w,  // [Width, 1 + Gated, Din] strides [Din, Width * Din, 1] box [Features / (1 + Gated), 1 + Gated]
    const __grid_constant__ TensorMap<const bf16> w_more,  // [More, 1, Din] box [Features, 1] or null
    const __grid_constant__ TensorMap<const bf16> x,       // [R, Din] strides [Ldx, 1] box [Rows]
    float* sums,         // [Sums] aligned 16 or null; of first halves of tiles, lane by lane
    int* passed,         // [Passed] or null; of each warp of a tile, 0 before and after
    Out* out,            // [R, Width]
    float* more,         // [R, More] or null; x w_more^T
    const int* use,      // [R] or null; null: all results of all rows
    const unsigned char* allowed,  // [Width] or null; features that may be the largest, null: all
    unsigned long long* largest,   // [R] or null; 0 before
    int R,
    int Ldx,
    int Din,
    int Width,
    int More,
    int Depth,
    int AtOnce,
    int Sums,
    int Passed)
{
  extern __shared__ uint4 dynamic[];
  __shared__ Barrier full[MOST], empty[MOST], loaded[MOST];
  const Ring ring{reinterpret_cast<char*>(dynamic) + -(unsigned long long)dynamic % 1024, full, empty, loaded};
  const int lane = threadIdx.x % WARP, warp = __shfl_sync(ALL_LANES, threadIdx.x / WARP, 0);  // the same in a warp
  const int chunks = (Din + K - 1) / K, row_tiles = (R + Rows - 1) / Rows;
  const int w_tiles = (Width + RESULTS - 1) / RESULTS, tiles = w_tiles + (More + RESULTS - 1) / RESULTS;
  const Units<Rows> units{row_tiles, Parts == 1 ? tiles : 0, Parts, row_tiles * tiles * Parts};

  if (threadIdx.x == 0) {
    for (int i = 0; i < Depth; i++) make_barrier(full[i], 2), make_barrier(empty[i], WARPS), make_barrier(loaded[i], 1);
    barriers_made();
  }
  __syncthreads();

  if (warp >= WARPS && HUNGRY) fewer_registers<24>();
  if (warp == WARPS) {
    if (lane) return;
    prefetch_map(w);
    const unsigned long long policy = row_tiles == 1 ? ONCE : KEPT;
    fill(units, chunks, empty, Depth, [&](const Unit& unit, int chunk, const Turn& turn) {
      if (turn.first && turn.place >= AtOnce) wait(loaded[turn.place - AtOnce], 0);
      if (turn.first) arrive(full[turn.place]);
      Barrier& here = turn.first ? loaded[turn.place] : full[turn.place];
      arrive_expecting(here, W_BYTES);
#pragma unroll
      for (int i = 0; i < Run; i++) {
        char* const to = ring.w(turn.place) + i * W_TILE;
        const int k = chunk * K + i * TILE_K;
        if (unit.tile < w_tiles || More == 0) {
          load_tile(to, w, here, k, 0, unit.tile * RESULTS, policy);
        } else {
          load_tile(to, w_more, here, k, 0, (unit.tile - w_tiles) * RESULTS, policy);
        }
      }
    });
    return;
  }
  if (warp == WARPS + 1) {
    if (lane) return;
    prefetch_map(x);
    bool first = true;
    fill(units, chunks, empty, Depth, [&](const Unit& unit, int chunk, const Turn& turn) {
      Barrier& here = full[turn.place];
      if (first) after_previous();  // here, since the first unit takes some divisions
      first = false;
      arrive_expecting(here, X_BYTES);
#pragma unroll
      for (int i = 0; i < Run; i++) {
        load_tile(ring.x(turn.place) + i * X_TILE, x, here, chunk * K + i * TILE_K, unit.row);
      }
    });
    return;
  }

  if (warp >= WARPS) return;
  if (HUNGRY) more_registers<240>();
  after_previous();
  const Results results{out, more, use, allowed, largest, w_tiles, Width, More};
  const Warpgroup own(ring, warp);
  Turn turn{Depth};
  for (int next = blockIdx.x; next < units.count; next += gridDim.x) {
    const Unit unit = units[next];
    const int row = unit.row + own.row();
    if constexpr (Parts == 1) {
      float total[SUMS] = {};
      for (int range = 0; range < RANGES; range++) {
        const int begin = range_start(range, chunks), end = range_start(range + 1, chunks);
        if (begin == end) continue;
        float sum[SUMS];
        sum_up(sum, own, begin, end, ring, turn);
#pragma unroll
        for (int i = 0; i < SUMS; i++) total[i] += sum[i];
      }
      if (row < R) results.put(total, unit.tile, row, R, own.first);
    } else {
      float sum[PART][SUMS];
#pragma unroll
      for (int i = 0; i < PART; i++) {
        const int range = unit.first + i;
        sum_up(sum[i], own, range_start(range, chunks), range_start(range + 1, chunks), ring, turn);
      }
      if (row >= R) continue;
      const int number = (unit.row / Rows * tiles + unit.tile) * WARPS + warp;
      float4* const kept = reinterpret_cast<float4*>(sums) + (long long)number * QUADS * WARP + lane;
      if (unit.first == 0) {
        add_to(nullptr, sum);
        keep(sum[0], kept);
        warp_passes_on(passed + number);
      } else {
        warp_awaits(passed + number);
        add_to(kept, sum);
        results.put(sum[0], unit.tile, row, R, own.first);
      }
    }
  }
}
