// What GDN reads of each row of a forest. Definition: gdn_inputs in boleinfer/ops/gdn_inputs.py.
//   y = silu(sum_i taps[W-1-i] x of the i-th ancestor), past the root of the request's window
//   q = y / sqrt(sum y^2 + 1e-6) / sqrt(K),  k = y / sqrt(sum y^2 + 1e-6),  v = y
//   g = -e^A_log softplus(a + dt_bias),  beta = sigmoid(b)
// Sums in float32, rounded to Act once. Rows without a request are not written. Taps and forest are read before the
// previous kernel is done (after_all_previous in common.cuh).
//
// grid: for every `span` rows a block for each head of q, k and v and one for the gates. block: 32 .. 128 threads in
// full warps; where its rows' inputs lie is found once, a thread a row; then a group of lanes owns a row of the head and
// keeps the taps in registers from row to row. shared: 8 W MOST_ROWS bytes.
// Read twice: inputs, up to W times from the caches; taps, once a block.
//
// sizes: K=128 V=128 W=4 Act=bf16,float | K=64 V=128 W=8 Act=bf16,float | K=16,32 V=64 W=4 Act=bf16,float
// sizes: K=7 V=63 W=3 Act=bf16,float
#include "gdn_inputs.cuh"

constexpr int MOST_ROWS = 32;  // of a block

// A row's inputs by taps, the oldest first: places of the window, then rows of the forest. Without a request, its own.
struct Sources {
  const Act* of[MOST_ROWS][W];
  bool used[MOST_ROWS];
};

// One head of WIDTH channels from channel `head` on, to rows of Ldout numbers; of that length where it is not 0.
template <int WIDTH, int N>
__device__ __forceinline__ void convolve_rows(const Sources& sources, int rows, const float* taps, int head, Act* out,
                                              int Ldout, float length) {
  constexpr int LANES = Share<WIDTH, N>::LANES, EACH = Share<WIDTH, N>::EACH;
  const int groups = blockDim.x / LANES;
  Pack<float, N * W> tap[EACH];
  Share<WIDTH, N>().each([&](int e, int c) { tap[e] = load<N * W>(taps + (head + c) * W); });
  after_previous();
#pragma unroll 1
  for (int begin = threadIdx.x / WARP * (WARP / LANES); begin < rows; begin += groups) {  // the warp's first row
    const int row = min(begin + threadIdx.x % WARP / LANES, rows - 1);  // groups that have none do the last again
    Pack<Act, N> x[W][EACH];
#pragma unroll
    for (int j = 0; j < W; j++) read_inputs<WIDTH, N>(x[j], sources.of[row][j] + head);
    float y[EACH][N];
    convolve<WIDTH, N>(y, x, [&](int e) { return tap[e]; });
    if (length != 0.0f) give_length<WIDTH, N>(y, length);
    if (sources.used[row]) write_head<WIDTH, N>(out + (long long)row * Ldout, y);
  }
}

template <int N>
__device__ void convolve_head(const Sources& sources, int first, int rows, const float* taps, int head, int Hk, int Hv,
                              Act* q, Act* k, Act* v) {
  if (head < 2 * Hk) {
    Act* out = (head < Hk ? q : k) + ((long long)first * Hk + head % Hk) * K;
    convolve_rows<K, N>(sources, rows, taps, head * K, out, Hk * K, head < Hk ? 1.0f / sqrtf(K) : 1.0f);
  } else {
    const int h = head - 2 * Hk;
    convolve_rows<V, N>(sources, rows, taps, 2 * Hk * K + h * V, v + ((long long)first * Hv + h) * V, Hv * V, 0.0f);
  }
}

extern "C" __global__ void __launch_bounds__(128, W > 4 ? 4 : 8) gdn_inputs(
    const Act* qkvz,                    // [R, 2*Hk*K+2*Hv*V]
    const float* ba,                    // [R, 2*Hv] b, then a
    const float* __restrict__ taps,     // [2*Hk*K+Hv*V, W] aligned 16
    const float* __restrict__ A_log,    // [Hv]
    const float* __restrict__ dt_bias,  // [Hv]
    const Act* window,                  // [Slots, W, 2*Hk*K+Hv*V]
    const int* slot,                    // [B]
    const int* committed,               // [B]
    const int* parent,                  // [R]
    const int* request,                 // [R] -1 at an unused row
    Act* q,                             // [R, Hk, K]
    Act* k,                             // [R, Hk, K]
    Act* v,                             // [R, Hv, V]
    float* g,                           // [R, Hv]
    float* beta,                        // [R, Hv]
    int R,
    int Hk,
    int Hv,
    int span)
{
  const int heads = 2 * Hk + Hv, head = blockIdx.x % (heads + 1);
  const int first = blockIdx.x / (heads + 1) * span, rows = min(span, R - first);
  if (head == heads) {
    after_previous();
    for (int i = threadIdx.x; i < rows * Hv; i += blockDim.x) {
      const int row = first + i / Hv, h = i % Hv;
      if (request[row] < 0) continue;
      const float* own = ba + 2ll * row * Hv + h;
      g[(long long)row * Hv + h] = log_decay(own[Hv], A_log[h], dt_bias[h]);
      beta[(long long)row * Hv + h] = sigmoid(own[0]);
    }
    return;
  }

  __shared__ Sources sources;
  const int Cc = 2 * Hk * K + Hv * V, Ldx = Cc + Hv * V;
  for (int i = threadIdx.x; i < rows; i += blockDim.x) {
    const int b = request[first + i];
    const Act* past = window + (b < 0 ? 0ll : slot[b]) * W * Cc;
    int at = first + i, place = b < 0 ? 0 : committed[b] % W;
#pragma unroll
    for (int j = W - 1; j >= 0; j--) {
      if (at < 0) place = (place + W - 1) % W;
      sources.of[i][j] = at >= 0 ? qkvz + (long long)at * Ldx : past + place * Cc;
      if (b >= 0 && at >= 0) at = parent[at];
    }
    sources.used[i] = b >= 0;
  }
  __syncthreads();
  if (K % NEAR == 0 && V % NEAR == 0 && aligned16(qkvz, window, q, k, v)) {
    convolve_head<NEAR>(sources, first, rows, taps, head, Hk, Hv, q, k, v);
  } else {
    convolve_head<1>(sources, first, rows, taps, head, Hk, Hv, q, k, v);
  }
}
