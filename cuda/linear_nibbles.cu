// x w^T for up to eight rows of bf16 x and w of four bits a number, in float32. Definition: product in
// boleinfer/nibbles.py, where the bricks that w lies in are told. In a brick a lane finds, 16 bytes a row of w, the
// numbers that it multiplies in eight products of 16 k. Sums in float32: two products each on their own, then scaled
// and added up in order of k within a warp's range, then the ranges.
//
// grid: one block a multiprocessor, at most; a block owns 32 features and all k, then those gridDim.x further on.
// block: 512 threads; a warp owns a range of k. Bricks come through a ring of Depth places of the warp's own, which is
// full before x is there and fills on across the ends of tiles; warps wait for one another only where a tile's sums
// meet.
// shared: Depth * 36 KB, 32 KB of sums of two tiles, then x when Staged. Read twice: x, by every block (L2), and where
// it is not Staged by every tile.
//
// sizes: Depth=3 Staged=true | Depth=1 Staged=false
#include "mma.cuh"
#include "nibbles.cuh"

constexpr int RANGES = 16, THREADS = RANGES * WARP;
constexpr int TALL = FEATURES / 16, WORDS = 2 * TALL;  // products' rows of w; 16-byte words of a lane in a brick
constexpr int ROWS = 8, SUMS = FEATURES * ROWS;        // rows of x; sums of a tile
static_assert(NUMBERS == WORDS * WARP * 16 && SHARING == 32, "a lane's word of eight numbers has one scale");

// bits & 0x000f000f | 0x43004300, in one instruction: with two constants the compiler makes it two.
__device__ __forceinline__ unsigned above_128(unsigned bits) {
#ifdef EMULATED
  return bits & 0x000f000fu | 0x43004300u;
#else
  unsigned found;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(found) : "r"(bits), "n"(0x000f000f), "r"(0x43004300));
  return found;
#endif
}

// Pair p of eight numbers n: those of k 2p and 2p + 1, as n - 8 in bf16, where 128 + n is 0x4300 + n.
__device__ __forceinline__ unsigned widen(unsigned eight, int p) {
  unsigned bits = above_128(eight >> 4 * p);
  const unsigned less = 0xc308c308u;  // -136, twice
  __nv_bfloat162 a, b;
  memcpy(&a, &bits, 4);
  memcpy(&b, &less, 4);
  a = __hadd2(a, b);
  memcpy(&bits, &a, 4);
  return bits;
}

__device__ __forceinline__ unsigned word(const uint4& v, int i) {
  return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
}

__device__ __forceinline__ int range_start(int r, int bricks) { return r * bricks / RANGES; }

extern "C" __global__ void __launch_bounds__(THREADS, 1) linear_nibbles(
    const bf16* x,           // [R, Din] aligned 16
    const unsigned char* w,  // [Dout / 32, Din / 128, 2304] aligned 16; bricks
    float* out,              // [R, Dout]
    int R,
    int Din,
    int Dout)
{
  extern __shared__ uint4 dynamic[];
  const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, g = lane / 4, t = lane % 4;
  const int all = Din / K, begin = range_start(warp, all), bricks = range_start(warp + 1, all) - begin;
  const int tiles = Dout / FEATURES;
  char* const places = reinterpret_cast<char*>(dynamic) + warp * Depth * BRICK;
  float4* const part = reinterpret_cast<float4*>(reinterpret_cast<char*>(dynamic) + RANGES * Depth * BRICK);
  uint4* const staged = reinterpret_cast<uint4*>(part + 2 * TALL * THREADS);

  // start the copy of the next brick, of the same tile or the next one, into a place
  int next = bricks ? (int)blockIdx.x : tiles, next_brick = 0;
  const auto fetch = [&](int place) {
    if (next < tiles) {
      const unsigned char* from = w + ((long long)next * all + begin + next_brick) * BRICK + 16 * lane;
      char* const to = places + place * BRICK + 16 * lane;
#pragma unroll
      for (int i = 0; i < WORDS; i++) cp_async16(to + 16 * WARP * i, from + 16 * WARP * i, true);
      if (lane < (BRICK - NUMBERS) / 16) cp_async16(to + NUMBERS, from + NUMBERS, true);
      if (++next_brick == bricks) next += gridDim.x, next_brick = 0;
    }
    cp_async_commit();
  };
#pragma unroll
  for (int d = 0; d < Depth; d++) fetch(d);
  after_previous();

  // words of a row of x: one of 32 k and four lanes beside the next; in shared memory two rows in turn in other banks
  const int words = Staged ? Din / 8 + 4 : Din / 8;
  if constexpr (Staged) {
    const int row = warp / 2;
    const uint4* from = reinterpret_cast<const uint4*>(x) + (long long)row * (Din / 8);
#pragma unroll 4
    for (int i = warp % 2 * WARP + lane; i < Din / 8 && row < R; i += 2 * WARP) staged[row * words + i] = from[i];
    __syncthreads();
  }
  const uint4* rows = Staged ? staged : reinterpret_cast<const uint4*>(x);
  const uint4* own_x = rows + min(g, R - 1) * words + begin * (K / 8) + t;

  int place = 0;
  for (int tile = blockIdx.x, odd = 0; tile < tiles; tile += gridDim.x, odd ^= 1) {
    float sum[TALL][4] = {};
    for (int i = 0; i < bricks; i++) {
      uint4 of_x[4];
#pragma unroll
      for (int j = 0; j < 4; j++) of_x[j] = own_x[i * (K / 8) + 4 * j];
      cp_async_wait<Depth - 1>();
      __syncwarp();  // other lanes asked for the scales
      const uint4* own = reinterpret_cast<const uint4*>(places + place * BRICK) + lane;
      const bf16* scales = reinterpret_cast<const bf16*>(places + place * BRICK + NUMBERS) + g * WORDS * (K / SHARING);
#pragma unroll
      for (int m = 0; m < TALL; m++) {
        const uint4 low = own[2 * m * WARP], high = own[(2 * m + 1) * WARP];
        const auto scale = load<2 * K / SHARING>(scales + 2 * m * (K / SHARING));
#pragma unroll
        for (int j = 0; j < 4; j++) {
          float two[4] = {};
#pragma unroll
          for (int p = 0; p < 4; p += 2) {
            const unsigned l = word(low, j), h = word(high, j);
            const unsigned a[4] = {widen(l, p), widen(h, p), widen(l, p + 1), widen(h, p + 1)};
            const unsigned b[2] = {word(of_x[j], p), word(of_x[j], p + 1)};
            mma_m16n8k16(two, a, b);
          }
#pragma unroll
          for (int i = 0; i < 4; i++) sum[m][i] = fmaf(to_float(scale.v[i / 2 * 4 + j]), two[i], sum[m][i]);
        }
      }
      __syncwarp();  // all lanes have read the place
      fetch(place);
      place = place + 1 < Depth ? place + 1 : 0;
    }

    float4* const own_part = part + odd * TALL * THREADS;
#pragma unroll
    for (int m = 0; m < TALL; m++) {
      own_part[(warp * TALL + m) * WARP + lane] = make_float4(sum[m][0], sum[m][1], sum[m][2], sum[m][3]);
    }
    __syncthreads();
    // the ranges in order: number j of the tile is number j % 4 of lane j / 4 % 32 in the products' rows j / 128
    if (threadIdx.x < SUMS) {
      const int j = threadIdx.x, l = j / 4 % WARP, row = 2 * (l % 4) + j % 2;
      float y = 0.0f;
#pragma unroll
      for (int r = 0; r < RANGES; r++) y += reinterpret_cast<const float*>(own_part)[r * SUMS + j];
      const int feature = tile * FEATURES + j / 128 * 16 + l / 4 + j / 2 % 2 * 8;
      if (row < R) out[(long long)row * Dout + feature] = y;
    }
  }
}
