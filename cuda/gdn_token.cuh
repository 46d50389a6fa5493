// What gdn_token.cu and gdn_tokens.cu do alike for a value head of a request with a single row: all but where its state is.
// Definition: gdn_core in boleinfer/gdn_core.py.
//   q, k | v, gate | g, beta    begin_row, by a warp each
//   S^T q, S^T k and the ring   by all; who adds what: gdn_row.cuh
//   u, o, y                     end_row, by the warp that has v and the gate
#pragma once

#include "gated_rms_norm.cuh"
#include "gdn_inputs.cuh"
#include "gdn_row.cuh"

constexpr int HELD_RING = 2;  // of a group's ring entries those in registers: of 32, all
constexpr int ROLES = 4;      // warps that begin a row

// What threads tell each other.
struct Shared {
  RowMemory row;
  Act x[2][K];                  // q, k
  float taps[(2 * K + V) * W];  // of q, k, v
};

// The arrays of a layer, as the kernels have them.
struct Layer {
  const Act* qkvz;
  const float *ba, *taps, *A_log, *dt_bias, *norm;
  Act *window, *ring_k;
  float *ring_u, *ring_g;
  Act* y;
  int Hk, Hv, C;
  float eps;
};

// A value head h of a request and its key head; the request's row and slot, how many tokens are committed, and how many of
// them are in its ring. The key head's first value head leads: k and its inputs, and those of q, are its to write.
struct Head {
  int row, slot, key_head, h, committed, ring;
  bool leads;

  __device__ __forceinline__ long long entry(const Layer& l) const { return (long long)slot * l.C + ring; }  // the row's
};

// A thread's part of a head's ring, in registers.
struct HeldRing {
  Pack<float, 4> u[EACH][HELD_RING];
  Pack<Act, PIECE> key[PIECES];  // of the entry that the thread takes first

  // the j-th entry of the thread's group e
  static __device__ __forceinline__ const float* u_at(const Layer& l, const Head& head, const Member& me, int e, int j) {
    const float* first = l.ring_u + ((long long)head.slot * l.C * l.Hv + head.h) * V + me.column;
    return first + (me.group + e + GROUPS * j) * (l.Hv * V);
  }
  static __device__ __forceinline__ Pack<Act, PIECE> key_of(const Layer& l, const Head& head, int i, int p) {
    const Act* first = l.ring_k + ((long long)head.slot * l.C * l.Hk + head.key_head) * K;
    return load<PIECE>(first + i * (l.Hk * K) + threadIdx.x % 8 * PIECE + 8 * PIECE * p);
  }
  // The j-th entries of the thread's groups.
  __device__ __forceinline__ void read_u(const Layer& l, const Head& head, const Member& me, int j) {
#pragma unroll
    for (int e = 0; e < EACH; e++) {
      if (me.is && me.group + e + GROUPS * j < head.ring) u[e][j] = load<4>(u_at(l, head, me, e, j));
    }
  }
  __device__ __forceinline__ void read_key(const Layer& l, const Head& head) {
#pragma unroll
    for (int p = 0; p < PIECES; p++) {
      if (threadIdx.x / 8 < head.ring) key[p] = key_of(l, head, threadIdx.x / 8, p);
    }
  }
  __device__ __forceinline__ void score(RowMemory& m, const Act (&x)[2][K], const Layer& l, const Head& head) const {
    score_ring(m, x[0], x[1], head.ring, [&](int i, int p) { return i < SCORED ? key[p] : key_of(l, head, i, p); });
  }
  __device__ __forceinline__ void share(RowMemory& m, RowSums& sum, const Layer& l, const Head& head,
                                        const Member& me) const {
    share_sums(m, sum, me, head.ring, [&](int e, int j) { return j < HELD_RING ? u[e][j] : load<4>(u_at(l, head, me, e, j)); });
  }
};

// y = silu(conv) of a head of WIDTH channels, by one warp. Taps and window are on their way before the previous kernel is
// done; `row` and `window` begin with the head, `pitch` is that of the window's places, `position` the row's, `more` is read
// with the row. keeps: whether the row goes to its place in the window, which nobody reads yet.
template <int WIDTH, class More>
__device__ __forceinline__ void convolve_row(float (&y)[Share<WIDTH, NEAR>::EACH][NEAR], float* own_taps, const float* taps,
                                             Act* window, int pitch, unsigned position, bool keeps, const Act* row, More more) {
  Pack<Act, NEAR> x[W][Share<WIDTH, NEAR>::EACH];
  Share<WIDTH, NEAR>().each([&](int, int c) {
    if (threadIdx.x % WARP >= Share<WIDTH, NEAR>::LANES) return;  // has the channels of another lane
#pragma unroll
    for (int i = 0; i < NEAR * W; i += 4) cp_async16(own_taps + c * W + i, taps + c * W + i, true);
  });
  cp_async_commit();
#pragma unroll
  for (int j = 0; j < W - 1; j++) read_inputs<WIDTH, NEAR>(x[j], window + (position + 1 + j) % W * pitch);
  after_previous();
  read_inputs<WIDTH, NEAR>(x[W - 1], row);
  more();
  if (keeps && threadIdx.x % WARP < Share<WIDTH, NEAR>::LANES) {
    Share<WIDTH, NEAR>().each([&](int e, int c) { write<NEAR>(window + position % W * pitch + c, x[W - 1][e]); });
  }
  cp_async_wait<0>();
  __syncwarp();
  convolve<WIDTH, NEAR>(y, x, [&](int e) { return load<NEAR * W>(own_taps + Share<WIDTH, NEAR>().channel(e) * W); });
}

// What the warp that ends a row keeps of its beginning.
struct Value {
  Pack<Act, NEAR> v;
  float gate[Share<V, NEAR>::EACH][NEAR], beta;
};

// The row's q, k, g and v, by the warps of roles 0 .. ROLES - 1; all others only wait. A barrier has to follow.
__device__ __forceinline__ void begin_row(Shared& m, Value& value, const Layer& l, const Head& head, int role) {
  const int channels = 2 * l.Hk * K + l.Hv * V, lane = threadIdx.x % WARP;
  const Act* inputs = l.qkvz + (long long)head.row * (channels + l.Hv * V);
  Act* window = l.window + (long long)head.slot * W * channels;
  const float* gates = l.ba + 2ll * head.row * l.Hv + head.h;
  if (role < 2) {
    const int first = (role * l.Hk + head.key_head) * K;
    float x[Share<K, NEAR>::EACH][NEAR];
    convolve_row<K>(x, m.taps + role * K * W, l.taps + first * W, window + first, channels, head.committed, head.leads,
                    inputs + first, [] {});
    give_length<K, NEAR>(x, role == 0 ? 1.0f / sqrtf(K) : 1.0f);
    if (lane < Share<K, NEAR>::LANES) {
      write_head<K, NEAR>(m.x[role], x);
      if (role == 1 && head.leads) {
        write_head<K, NEAR>(l.ring_k + (head.entry(l) * l.Hk + head.key_head) * K, x);
      }
    }
  } else if (role == 2) {
    const int first = 2 * l.Hk * K + head.h * V;
    Pack<float, NEAR> gain[Share<V, NEAR>::EACH];
    Pack<Act, NEAR> z[Share<V, NEAR>::EACH];
    float v[Share<V, NEAR>::EACH][NEAR];
    Share<V, NEAR>().each([&](int e, int c) { gain[e] = load<NEAR>(l.norm + c); });
    const auto more = [&] {
      read_inputs<V, NEAR>(z, inputs + channels + head.h * V);
      value.beta = sigmoid(gates[0]);
    };
    convolve_row<V>(v, m.taps + 2 * K * W, l.taps + first * W, window + first, channels, head.committed, true,
                    inputs + first, more);
#pragma unroll
    for (int i = 0; i < NEAR; i++) value.v.v[i] = from_float<Act>(v[0][i]);
    gate_of(value.gate, gain, z);
  } else if (role == 3) {
    float past_g[2];
    read_decays(past_g, l.ring_g + (long long)head.slot * l.C * l.Hv + head.h, head.ring, l.Hv);
    const Decays decays(past_g, head.ring);
    const float A = l.A_log[head.h], bias = l.dt_bias[head.h];
    after_previous();
    const float own_g = log_decay(gates[l.Hv], A, bias);
    if (lane == 0) l.ring_g[head.entry(l) * l.Hv + head.h] = own_g;
    decays.fades(m.row, head.ring, clamped(own_g));
  } else {
    after_previous();
  }
}

// u, o and y, by the warp that has `value`.
__device__ __forceinline__ void end_row(const Shared& m, const Value& value, const Layer& l, const Head& head) {
  const Share<V, NEAR> own;
  const long long at = ((long long)head.row * l.Hv + head.h) * V;
  const bool used = threadIdx.x % WARP < own.LANES;
  Pack<float, NEAR> factor;
  float v[NEAR], o[Share<V, NEAR>::EACH][NEAR];
#pragma unroll
  for (int i = 0; i < NEAR; i++) v[i] = to_float(value.v.v[i]);
  solve_row(o[0], factor.v, m.row, v, value.beta, head.ring, own.first);
  if (used) store<NEAR>(l.ring_u + (head.entry(l) * l.Hv + head.h) * V + own.first, factor);
#pragma unroll
  for (int i = 0; i < NEAR; i++) o[0][i] = to_float(from_float<Act>(o[0][i]));
  norm_head<NEAR>(l.y + at, o, value.gate, l.eps, used);
}
