// x w^T for 2 .. 128 rows, bf16 x, bf16 or FP8 w. Definition: linear in boleinfer/ops/linear.py. Sums in float32, in the
// order that linear.cuh describes, so that a row has the bits that linear_few gives it.
//
// grid: one block a multiprocessor. It owns a unit: all rows, a tile of 16 Slabs features a warp, and one group of ranges;
// then the unit gridDim.x further on. block: up to 8 warps. Each of Depth places of a ring holds a chunk of w, every lane's
// words where it finds them itself, and of x, which all warps read. Where there are several groups, the block that ends
// last of a tile adds up their sums; tickets counts them and is zero before and after.
// shared: Depth * (512 * words of a lane * warps + 128 * 8 Tiles). Read twice: x, for every tile (L2).
//
// sizes: Wt=bf16 Out=bf16 Tiles=2,4,8 Slabs=2 Depth=5 | Wt=bf16 Out=bf16 Tiles=16 Slabs=1 Depth=5 | Wt=fp8 Out=float Tiles=8 Slabs=2 Depth=8 | Wt=fp8 Out=bf16 Tiles=16 Slabs=1 Depth=8
#include "linear.cuh"

constexpr int ROWS = 8 * Tiles;
constexpr int WORDS = sizeof(Wt);        // 16-byte words of a row's chunk that a lane takes
constexpr int LANE_K = 16 / sizeof(Wt);  // k of one of them
constexpr int TALL = 16 * Slabs;         // features of a warp
constexpr int OWN = 2 * Slabs * WORDS;   // words of a lane in a chunk
constexpr int X_WORDS = CHUNK / 8;       // of a row of x in a chunk

// Where a row of x in the ring keeps its word u: lanes read two rows at once, of FP8's every other word.
__device__ __forceinline__ int x_word(int row, int u) { return row * X_WORDS + (u ^ (row & 1) * (WORDS == 2 ? 4 : 1)); }

// sum += w x^T of a chunk; own: the lane's words of w; scale: of the FP8 block.
__device__ __forceinline__ void multiply(float (&sum)[Slabs][Tiles][4], const uint4* own, const uint4* x, float scale) {
  const int g = threadIdx.x % WARP / 4, t = threadIdx.x % 4;
  Fragments<Wt> w[Slabs][WORDS];
#pragma unroll
  for (int i = 0; i < Slabs * WORDS; i++) {
    const int s = i / WORDS, p = i % WORDS;
    w[s][p] = {own[(2 * s * WORDS + p) * WARP], own[((2 * s + 1) * WORDS + p) * WARP]};
  }
  const uint4 *first = x + x_word(g, WORDS == 2 ? t : 2 * t), *second = x + x_word(g, WORDS == 2 ? 4 + t : 2 * t + 1);
#pragma unroll
  for (int n = 0; n < Tiles; n++) {
    const uint4 row[2] = {first[8 * n * X_WORDS], second[8 * n * X_WORDS]};
#pragma unroll
    for (int s = 0; s < Slabs; s++) {
      if constexpr (WORDS == 2) {
        w[s][0].multiply(sum[s][n], row);
        w[s][1].multiply(sum[s][n], row + 1);
      } else {
        float block[4] = {};
        w[s][0].multiply(block, row);
#pragma unroll
        for (int i = 0; i < 4; i++) sum[s][n][i] = fmaf(scale, block[i], sum[s][n][i]);
      }
    }
  }
}

extern "C" __global__ void __launch_bounds__(256, 1) linear_rows(
    const bf16* x,                    // [R, Din] strides [Ldx, 1] aligned 16
    const Wt* __restrict__ w,         // [Dout, Din] aligned 16
    const float* __restrict__ scale,  // [(Dout + 127) / 128, (Din + 127) / 128] or null; of FP8 w
    float* sums,                      // [Sums] aligned 16 or null; of [group, tile] lane by lane, for several groups
    int* tickets,                     // [Tickets] or null; one for each tile
    Out* out,                         // [R, Dout]
    int R,
    int Ldx,
    int Din,
    int Dout,
    int Splits,
    int Sums,
    int Tickets)
{
  extern __shared__ uint4 ring[];
  __shared__ bool last;
  const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, g = lane / 4, t = lane % 4;
  const int features = blockDim.x / WARP * TALL, tiles = (Dout + features - 1) / features, units = tiles * Splits;
  const int chunks = (Din + CHUNK - 1) / CHUNK, scales = (Din + SCALED - 1) / SCALED, members = RANGES / Splits;
  const int place = OWN * blockDim.x + ROWS * X_WORDS, x_at = OWN * blockDim.x;
  const auto begin_of = [&](int unit) { return range_start(unit % Splits * members, chunks); };
  const auto end_of = [&](int unit) { return range_start(unit % Splits * members + members, chunks); };

  // start the copies of a chunk of a unit into place d of the ring
  const auto fetch_w = [&](int d, int unit, int chunk) {
    const int feature = unit / Splits * features + warp * TALL + g, k = chunk * CHUNK + t * LANE_K;
    const Wt* from = w + (long long)feature * Din + k;
    uint4* to = ring + d * place + warp * OWN * WARP + lane;
#pragma unroll
    for (int i = 0; i < OWN; i++) {
      const int row = i / WORDS * 8, at = i % WORDS * 32;
      cp_async16(to + i * WARP, from + (long long)row * Din + at, feature + row < Dout && k + at < Din);
    }
  };
  const auto fetch_x = [&](int d, int chunk) {
    const int u = threadIdx.x % X_WORDS, k = chunk * CHUNK + 8 * u;
#pragma unroll 1
    for (int row = threadIdx.x / X_WORDS; row < ROWS; row += blockDim.x / X_WORDS) {
      cp_async16(ring + d * place + x_at + x_word(row, u), x + (long long)row * Ldx + k, row < R && k < Din);
    }
  };
  // the next chunk to copy, and where to; while there is one, next < next_end
  int next_unit = blockIdx.x - gridDim.x, next = 0, next_end = 0, next_place = 0;
  const auto skip_empty = [&] {
    while (next == next_end && next_unit < units) {
      next_unit += gridDim.x;
      if (next_unit < units) next = begin_of(next_unit), next_end = end_of(next_unit);
    }
  };
  const auto advance = [&] {
    next_place = next_place + 1 < Depth ? next_place + 1 : 0;
    next++;
    skip_empty();
  };

  // half of the ring is filled with w before x is there
  constexpr int EARLY = Depth / 2;
  int early[EARLY];
  skip_empty();
#pragma unroll
  for (int d = 0; d < EARLY; d++) {
    early[d] = next < next_end ? next : -1;
    if (next < next_end) fetch_w(d, next_unit, next), advance();
  }
  after_previous();
#pragma unroll
  for (int d = 0; d < EARLY; d++) {
    if (early[d] >= 0) fetch_x(d, early[d]);
    cp_async_commit();
  }
  const auto fetch = [&] {
    if (next < next_end) fetch_w(next_place, next_unit, next), fetch_x(next_place, next), advance();
    cp_async_commit();
  };
#pragma unroll 1
  for (int d = EARLY; d < Depth - 1; d++) fetch();

  for (int unit = blockIdx.x, d = 0; unit < units; unit += gridDim.x) {
    const int tile = unit / Splits, group = unit % Splits, feature = tile * features + warp * TALL;
    const float* factors = scale + (long long)(feature / SCALED) * scales;
    // total = the ranges of the group, each the sum of its chunks in order
    float total[Slabs][Tiles][4] = {};
#pragma unroll 1
    for (int range = group * members; range < (group + 1) * members; range++) {
      float sum[Slabs][Tiles][4] = {};
#pragma unroll 1
      for (int chunk = range_start(range, chunks); chunk < range_start(range + 1, chunks); chunk++) {
        const float factor = WORDS == 1 && feature < Dout ? factors[chunk * CHUNK / SCALED] : 0.0f;
        cp_async_wait<Depth - 2>();
        __syncthreads();
        fetch();
        multiply(sum, ring + d * place + warp * OWN * WARP + lane, ring + d * place + x_at, factor);
        d = d + 1 < Depth ? d + 1 : 0;
      }
#pragma unroll
      for (int i = 0; i < 4 * Slabs * Tiles; i++) {
        total[i / 4 / Tiles][i / 4 % Tiles][i % 4] += sum[i / 4 / Tiles][i / 4 % Tiles][i % 4];
      }
    }

    // the last block of a tile: total = the groups, added up
    if (Splits > 1) {
      float4* const own = reinterpret_cast<float4*>(sums) + (long long)tile * Slabs * Tiles * blockDim.x + threadIdx.x;
      const int to_group = tiles * Slabs * Tiles * blockDim.x;
      float4* to = own + (long long)group * to_group;
#pragma unroll
      for (int i = 0; i < Slabs * Tiles; i++, to += blockDim.x) {
        const float* v = total[i / Tiles][i % Tiles];
        __stcg(to, make_float4(v[0], v[1], v[2], v[3]));
      }
      __threadfence();
      __syncthreads();
      if (threadIdx.x == 0) last = atomicAdd(tickets + tile, 1) == Splits - 1;
      __syncthreads();
      if (!last) continue;
      __threadfence();
      if (threadIdx.x == 0) tickets[tile] = 0;
#pragma unroll
      for (int i = 0; i < 4 * Slabs * Tiles; i++) total[i / 4 / Tiles][i / 4 % Tiles][i % 4] = 0.0f;
      for (int s = 0; s < Splits; s++) {
        const float4* from = own + (long long)s * to_group;
#pragma unroll
        for (int i = 0; i < Slabs * Tiles; i++, from += blockDim.x) {
          const float4 part = __ldcg(from);
          float* v = total[i / Tiles][i % Tiles];
          v[0] += part.x, v[1] += part.y, v[2] += part.z, v[3] += part.w;
        }
      }
    }
    Out* to = out + (long long)(2 * t) * Dout + feature + g;
#pragma unroll
    for (int n = 0; n < Tiles; n++, to += 6ll * Dout) {
#pragma unroll
      for (int odd = 0; odd < 2; odd++, to += Dout) {
#pragma unroll
        for (int i = 0; i < 2 * Slabs; i++) {
          const bool exists = 8 * n + 2 * t + odd < R && feature + g + 8 * i < Dout;
          if (exists) to[8 * i] = from_float<Out>(total[i / 2][n][i % 2 * 2 + odd]);
        }
      }
    }
  }
}
