// How lanes of a warp share the channels of a head, up to four neighbours a lane.
#pragma once

#include "common.cuh"

constexpr int NEAR = 4;  // neighbours that a lane moves at once where widths and addresses allow it

// N neighbours at a multiple of their size, up to 16 bytes, in one access.
template <int N, class T>
__device__ __forceinline__ Pack<T, N> read(const T* p) {
  if constexpr (sizeof(T) * N == 8) {
    Pack<T, N> pack;
    const uint2 words = *reinterpret_cast<const uint2*>(p);
    memcpy(&pack, &words, 8);
    return pack;
  } else {
    return load<N>(p);
  }
}

template <int N, class T>
__device__ __forceinline__ void write(T* p, const Pack<T, N>& pack) {
  if constexpr (sizeof(T) * N == 8) {
    uint2 words;
    memcpy(&words, &pack, 8);
    *reinterpret_cast<uint2*>(p) = words;
  } else {
    store<N>(p, pack);
  }
}

// Lanes for a head: a power of two.
__device__ constexpr int lanes_of(int width) {
  int lanes = 1;
  while (lanes < WARP && lanes * NEAR < width) lanes *= 2;
  return lanes;
}

// A lane's share of WIDTH channels: N neighbours from `first` on, and every LANES * N-th; f(e, channel) for each.
template <int WIDTH, int N>
struct Share {
  static constexpr int LANES = lanes_of(WIDTH), EACH = (WIDTH + LANES * N - 1) / (LANES * N);
  using Numbers = float[EACH][N];
  int first = threadIdx.x % LANES * N;

  __device__ __forceinline__ int channel(int e) const { return first + e * LANES * N; }

  template <class F>
  __device__ __forceinline__ void each(F f) const {
#pragma unroll
    for (int e = 0; e < EACH; e++) {
      if (EACH * LANES * N == WIDTH || channel(e) < WIDTH) f(e, channel(e));
    }
  }

  // Over all channels, of what each lane has of them. By all lanes of a warp; every lane gets the same bits.
  static __device__ __forceinline__ float sum(float x) {
#pragma unroll
    for (int lane = 1; lane < LANES; lane *= 2) x += __shfl_xor_sync(ALL_LANES, x, lane);
    return x;
  }
};

// Sum of the squares of the lane's numbers.
template <int EACH, int N>
__device__ __forceinline__ float squares(const float (&x)[EACH][N]) {
  float sum = 0.0f;
#pragma unroll
  for (int e = 0; e < EACH; e++) {
#pragma unroll
    for (int i = 0; i < N; i++) sum = fmaf(x[e][i], x[e][i], sum);
  }
  return sum;
}

// bf16 by two in a word, which takes one instruction each.
template <int N>
__device__ __forceinline__ Pack<float, N> widened(const Pack<Act, N>& x) {
  Pack<float, N> y;
#pragma unroll
  for (int j = 0; j < N; j++) {
    if constexpr (sizeof(Act) == 2 && N % 2 == 0) {
      unsigned pair;
      memcpy(&pair, &x.v[j / 2 * 2], 4);
      y.v[j] = __uint_as_float(j % 2 ? pair & 0xffff0000u : pair << 16);
    } else {
      y.v[j] = to_float(x.v[j]);
    }
  }
  return y;
}

// The other way, to the nearest.
template <int N>
__device__ __forceinline__ Pack<Act, N> rounded(const float (&x)[N]) {
  Pack<Act, N> y;
#pragma unroll
  for (int j = 0; j < N; j++) {
    if constexpr (sizeof(Act) == 2 && N % 2 == 0) {
      if (j % 2) continue;
      const __nv_bfloat162 pair = __floats2bfloat162_rn(x[j], x[j + 1]);
      memcpy(&y.v[j], &pair, 4);
    } else {
      y.v[j] = from_float<Act>(x[j]);
    }
  }
  return y;
}

// Rounds the lane's numbers to Act and writes them to a head that begins at `out`.
template <int WIDTH, int N>
__device__ __forceinline__ void write_head(Act* out, const float (&y)[Share<WIDTH, N>::EACH][N]) {
  Share<WIDTH, N>().each([&](int e, int c) {
    write<N>(out + c, rounded(y[e]));
  });
}
