// How lanes of a warp share the channels of a head, up to four neighbours a lane.
#pragma once

#include "common.cuh"

constexpr int NEAR = 4;  // neighbours that a lane moves at once where widths and addresses allow it

// N neighbours at a multiple of their size, up to 16 bytes, in one access.
template <int N, class T>
__device__ __forceinline__ Pack<T, N> read(const T* p) {
  if constexpr (sizeof(T) * N == 8) {
    Pack<T, N> pack;
    const unsigned long long word = *reinterpret_cast<const unsigned long long*>(p);
    memcpy(&pack, &word, 8);
    return pack;
  } else {
    return load<N>(p);
  }
}

template <int N, class T>
__device__ __forceinline__ void write(T* p, const Pack<T, N>& pack) {
  if constexpr (sizeof(T) * N == 8) {
    unsigned long long word;
    memcpy(&word, &pack, 8);
    *reinterpret_cast<unsigned long long*>(p) = word;
  } else {
    store<N>(p, pack);
  }
}

// silu by the quick units, within 1e-6 and without a branch; 0 where e^-x passes 2^126.
__device__ __forceinline__ float quick_silu(float x) {
#ifdef EMULATED
  return silu(x);
#else
  float e, share;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(x * -1.4426950408889634f));
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(share) : "f"(1.0f + e));
  return x * share;
#endif
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

// Rounds the lane's numbers to Act and writes them to a head that begins at `out`.
template <int WIDTH, int N>
__device__ __forceinline__ void write_head(Act* out, const float (&y)[Share<WIDTH, N>::EACH][N]) {
  Share<WIDTH, N>().each([&](int e, int c) {
    Pack<Act, N> rounded;
#pragma unroll
    for (int i = 0; i < N; i++) rounded.v[i] = from_float<Act>(y[e][i]);
    write<N>(out + c, rounded);
  });
}
