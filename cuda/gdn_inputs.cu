// What GDN reads of each row of a forest. Definition: gdn_inputs in boleinfer/ops/gdn_inputs.py.
//   y = silu(sum_i taps[W-1-i] x of the i-th ancestor), past the root of the request's window
//   q = y / sqrt(sum y^2 + 1e-6) / sqrt(K),  k = y / sqrt(sum y^2 + 1e-6),  v = y
//   g = -e^A_log softplus(a + dt_bias),  beta = sigmoid(b)
// Sums in float32, rounded to Act once. Rows without a request are not written. Taps, forest and windows are read before the
// previous kernel is done (after_all_previous in common.cuh).
//
// grid: for every `span` rows a block for each head of q, k and v and one for the gates. block: 32 .. 128 threads in
// full warps; a group of lanes owns a row of the head and keeps the taps in registers from row to row, 16 bytes of
// inputs a lane where the widths and all addresses allow it, else one number. shared: none.
// Read twice: inputs, up to W times from the caches; taps, once a block.
//
// sizes: K=128 V=128 W=4 Act=bf16,float | K=64 V=128 W=8 Act=bf16,float | K=16,32 V=64 W=4 Act=bf16,float
// sizes: K=7 V=63 W=3 Act=bf16,float
#include "common.cuh"

// Lanes for a head: a power of two.
__device__ constexpr int lanes_of(int width) {
  int lanes = 1;
  while (lanes < WARP && lanes * PER_16_BYTES<Act> < width) lanes *= 2;
  return lanes;
}

template <int LANES>
__device__ __forceinline__ float sum_of_lanes(float x) {
#pragma unroll
  for (int lane = LANES / 2; lane > 0; lane /= 2) x += __shfl_xor_sync(ALL_LANES, x, lane);
  return x;
}

struct Rows {  // what all heads read, and which rows: first .. last - 1
  const Act *qkvz, *window;
  const float* taps;
  const int *slot, *parent, *request;
  int Cc, Ldx, first, last;
};

// One head of WIDTH channels from channel `head` on, to rows of Ldout numbers; normed to length `scale` where NORM.
template <int WIDTH, bool NORM, int N>
__device__ void convolve(const Rows& rows, int head, Act* out, int Ldout, float scale) {
  constexpr int LANES = lanes_of(WIDTH), EACH = (WIDTH + LANES * N - 1) / (LANES * N);
  const int group = threadIdx.x / LANES, groups = blockDim.x / LANES;
  const int channel = threadIdx.x % LANES * N;  // and every LANES * N-th
  if (rows.first + threadIdx.x / WARP * WARP / LANES >= rows.last) return;  // no row for this warp
  Pack<float, N * W> tap[EACH];
#pragma unroll
  for (int e = 0; e < EACH; e++) {
    const int c = channel + e * LANES * N;
    if (c < WIDTH) tap[e] = load<N * W>(rows.taps + (head + c) * W);
  }

  for (int begin = rows.first; begin < rows.last; begin += groups) {
    const int row = begin + group;
    const int b = row < rows.last ? rows.request[row] : -1;

    // the row and its ancestors; past the root, entries of the window
    Pack<Act, N> x[W][EACH];
    const Act* from[W] = {};
    if (b >= 0) {
      const Act* past = rows.window + (long long)rows.slot[b] * (W - 1) * rows.Cc + head;
      int at = row, entry = W - 1;
#pragma unroll
      for (int j = W - 1; j >= 0; j--) {
        if (at >= 0) {
          from[j] = rows.qkvz + (long long)at * rows.Ldx + head;
          at = rows.parent[at];
        } else {
          entry--;
#pragma unroll
          for (int e = 0; e < EACH; e++) {
            const int c = channel + e * LANES * N;
            if (c < WIDTH) x[j][e] = load<N>(past + entry * rows.Cc + c);
          }
        }
      }
    }
    if (begin == rows.first) after_previous();
#pragma unroll
    for (int j = W - 1; j >= 0; j--) {
#pragma unroll
      for (int e = 0; e < EACH; e++) {
        const int c = channel + e * LANES * N;
        if (from[j] && c < WIDTH) x[j][e] = load<N>(from[j] + c);
      }
    }

    // y = silu(sum_j taps[j] x of the (W-1-j)-th ancestor)
    float y[EACH][N] = {};
#pragma unroll
    for (int j = W - 1; j >= 0; j--) {
#pragma unroll
      for (int e = 0; e < EACH; e++) {
        if (b >= 0 && channel + e * LANES * N < WIDTH) {
#pragma unroll
          for (int i = 0; i < N; i++) y[e][i] = fmaf(to_float(x[j][e].v[i]), tap[e].v[i * W + j], y[e][i]);
        }
      }
    }

    // y / sqrt(sum y^2 + eps)
    float sum = 0.0f;
#pragma unroll
    for (int e = 0; e < EACH; e++) {
#pragma unroll
      for (int i = 0; i < N; i++) {
        y[e][i] = silu(y[e][i]);
        sum = fmaf(y[e][i], y[e][i], sum);
      }
    }
    const float factor = NORM ? scale / sqrtf(sum_of_lanes<LANES>(sum) + 1e-6f) : 1.0f;
#pragma unroll
    for (int e = 0; e < EACH; e++) {
      const int c = channel + e * LANES * N;
      Pack<Act, N> result;
#pragma unroll
      for (int i = 0; i < N; i++) result.v[i] = from_float<Act>(y[e][i] * factor);
      if (b >= 0 && c < WIDTH) store<N>(out + (long long)row * Ldout + c, result);
    }
  }
}

template <int N>
__device__ void convolve_head(const Rows& rows, int head, int Hk, int Hv, Act* q, Act* k, Act* v) {
  if (head < Hk) {
    convolve<K, true, N>(rows, head * K, q + head * K, Hk * K, 1.0f / sqrtf(K));
  } else if (head < 2 * Hk) {
    convolve<K, true, N>(rows, head * K, k + (head - Hk) * K, Hk * K, 1.0f);
  } else {
    const int c = (head - 2 * Hk) * V;
    convolve<V, false, N>(rows, 2 * Hk * K + c, v + c, Hv * V, 1.0f);
  }
}

__device__ void gates(const float* ba, const float* A_log, const float* dt_bias, const int* request, float* g,
                      float* beta, int Hv, int first, int last) {
  after_previous();
  for (int i = threadIdx.x; i < (last - first) * Hv; i += blockDim.x) {
    const int row = first + i / Hv, h = i % Hv, owner = request[row];
    const float b = ba[2ll * row * Hv + h], a = ba[2ll * row * Hv + Hv + h] + dt_bias[h];
    if (owner < 0) continue;
    const float softplus = fmaxf(a, 0.0f) + log1pf(expf(-fabsf(a)));
    g[(long long)row * Hv + h] = -expf(A_log[h]) * softplus;
    beta[(long long)row * Hv + h] = sigmoid(b);
  }
}

extern "C" __global__ void __launch_bounds__(128) gdn_inputs(
    const Act* __restrict__ qkvz,       // [R, 2*Hk*K+2*Hv*V]
    const float* __restrict__ ba,       // [R, 2*Hv] b, then a
    const float* __restrict__ taps,     // [2*Hk*K+Hv*V, W] aligned 16
    const float* __restrict__ A_log,    // [Hv]
    const float* __restrict__ dt_bias,  // [Hv]
    const Act* __restrict__ window,     // [Slots, W-1, 2*Hk*K+Hv*V]
    const int* __restrict__ slot,       // [B]
    const int* __restrict__ parent,     // [R]
    const int* __restrict__ request,    // [R] -1 at an unused row
    Act* __restrict__ q,                // [R, Hk, K]
    Act* __restrict__ k,                // [R, Hk, K]
    Act* __restrict__ v,                // [R, Hv, V]
    float* __restrict__ g,              // [R, Hv]
    float* __restrict__ beta,           // [R, Hv]
    int R,
    int Hk,
    int Hv,
    int span)
{
  // after_previous() is called by gates and convolve
  const int heads = 2 * Hk + Hv, head = blockIdx.x % (heads + 1);
  const int first = blockIdx.x / (heads + 1) * span, last = min(first + span, R);
  if (head == heads) return gates(ba, A_log, dt_bias, request, g, beta, Hv, first, last);

  const int Cc = 2 * Hk * K + Hv * V;
  const Rows rows = {qkvz, window, taps, slot, parent, request, Cc, Cc + Hv * V, first, last};
  constexpr int N = PER_16_BYTES<Act>;
  if (K % N == 0 && V % N == 0 && aligned16(qkvz, window, q, k, v)) {
    convolve_head<N>(rows, head, Hk, Hv, q, k, v);
  } else {
    convolve_head<1>(rows, head, Hk, Hv, q, k, v);
  }
}
