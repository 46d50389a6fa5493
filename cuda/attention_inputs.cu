// What attention reads: q and k normed and rotated, k and v written to their pages.
// Definition: attention_inputs in boleinfer/ops/attention_inputs.py.
//   y = x / sqrt(mean x^2 + eps) * (1 + w);  the pair (y_i, y_{i+Half}), i < Half, is turned by the angle i of the row
// Sums in float32, rounded to Act once. A row without a page writes no k and v; a row without a request, and an entry -1
// of `rows`, write nothing.
//
// grid: as many blocks as hold all heads of all rows. block: 32 .. 128 threads in full warps; a group of lanes owns a
// head of q, k or v of a row, 16 bytes a lane where the widths and all addresses allow it, else one number. shared: none.
// Read twice: the rotated numbers, the second time from L1.
//
// sizes: Dh=256 Half=32 Act=bf16,float | Dh=128 Half=64 Act=bf16,float | Dh=32,64 Half=16 Act=bf16,float
// sizes: Dh=63 Half=9 Act=bf16,float
#include "common.cuh"

// Lanes of a head: a power of two.
__device__ constexpr int lanes_of_head() {
  int lanes = 1;
  while (lanes < WARP && lanes * PER_16_BYTES<Act> < Dh) lanes *= 2;
  return lanes;
}
constexpr int LANES = lanes_of_head();

// One head from x to out, by the lanes of a group; w is null for v. Where out is null the lanes only exchange sums.
template <int N>
__device__ void head(const Act* x, const float* w, const float* cos, const float* sin, Act* out, float eps) {
  constexpr int EACH = (Dh + LANES * N - 1) / (LANES * N);
  const int first = threadIdx.x % LANES * N;  // and every LANES * N-th

  // scale = 1 / sqrt(mean x^2 + eps)
  float y[EACH][N], sum = 0.0f;
#pragma unroll
  for (int e = 0; e < EACH; e++) {
    const int c = first + e * LANES * N;
    if (out == nullptr || c >= Dh) continue;
    const auto group = load<N>(x + c);
#pragma unroll
    for (int i = 0; i < N; i++) {
      y[e][i] = to_float(group.v[i]);
      sum = fmaf(y[e][i], y[e][i], sum);
    }
  }
#pragma unroll
  for (int lane = LANES / 2; lane > 0; lane /= 2) sum += __shfl_xor_sync(ALL_LANES, sum, lane);
  const float scale = 1.0f / sqrtf(sum / Dh + eps);

#pragma unroll
  for (int e = 0; e < EACH; e++) {
    const int c = first + e * LANES * N;
    if (out == nullptr || c >= Dh) continue;
    if (w != nullptr) {
      // y = x scale (1 + w)
      const auto delta = load<N>(w + c);
#pragma unroll
      for (int i = 0; i < N; i++) y[e][i] *= scale * (1.0f + delta.v[i]);
      if (c < 2 * Half) {
        // y_i cos - y_{i+Half} sin on the left, y_i cos + y_{i-Half} sin on the right
        const int angle = c % Half, other = c < Half ? c + Half : c - Half;
        const float sign = c < Half ? -scale : scale;
        const auto partner = load<N>(x + other);
        const auto partner_delta = load<N>(w + other), cosine = load<N>(cos + angle), sine = load<N>(sin + angle);
#pragma unroll
        for (int i = 0; i < N; i++) {
          const float turned = to_float(partner.v[i]) * sign * (1.0f + partner_delta.v[i]);
          y[e][i] = fmaf(y[e][i], cosine.v[i], turned * sine.v[i]);
        }
      }
    }
    Pack<Act, N> result;
#pragma unroll
    for (int i = 0; i < N; i++) result.v[i] = from_float<Act>(y[e][i]);
    store<N>(out + c, result);
  }
}

extern "C" __global__ void __launch_bounds__(128) attention_inputs(
    const Act* __restrict__ qkv,         // [Rows, 2*(Hq+Hkv)*Dh] q, gate, k, v
    const float* __restrict__ q_norm,    // [Dh] a delta to 1
    const float* __restrict__ k_norm,    // [Dh]
    const float* __restrict__ cos,       // [Rows, Half]
    const float* __restrict__ sin,       // [Rows, Half]
    const int* __restrict__ rows,        // [Rows] or null: rows of the forest
    const int* __restrict__ request,     // [R] -1 at an unused row
    const int* __restrict__ kv_slot,     // [R]
    const int* __restrict__ page_table,  // [B, M] -1 where there is no page
    Act* __restrict__ q,                 // [Rows, Hq, Dh]
    Act* __restrict__ k_pages,           // [Pages, P, Hkv, Dh]
    Act* __restrict__ v_pages,           // [Pages, P, Hkv, Dh]
    int Rows,
    int Hq,
    int Hkv,
    int P,
    int M,
    float eps)
{
  after_previous();
  const unsigned heads = Hq + 2 * Hkv;
  const unsigned unit = ((unsigned long long)blockIdx.x * blockDim.x + threadIdx.x) / LANES;
  const int n = unit / heads, h = unit % heads;
  const int row = n >= Rows ? -1 : rows == nullptr ? n : rows[n];
  const int b = row < 0 ? -1 : request[row];

  // Where the head goes
  Act* out = nullptr;
  if (b >= 0) {
    if (h < Hq) {
      out = q + ((long long)n * Hq + h) * Dh;
    } else {
      const int slot = kv_slot[row], entry = slot / P;
      const long long page = entry < M ? page_table[(long long)b * M + entry] : -1;
      const int kv_head = (h - Hq) % Hkv;
      Act* pages = h < Hq + Hkv ? k_pages : v_pages;
      if (page >= 0) out = pages + ((page * P + slot % P) * Hkv + kv_head) * Dh;
    }
  }

  const int c = h < Hq ? h * Dh : (Hq + h) * Dh;
  const Act* x = qkv + (long long)n * 2 * (Hq + Hkv) * Dh + c;
  const float* w = h < Hq ? q_norm : h < Hq + Hkv ? k_norm : nullptr;
  const float *cos_row = cos + (long long)n * Half, *sin_row = sin + (long long)n * Half;
  constexpr int N = PER_16_BYTES<Act>;
  if (Dh % N == 0 && Half % N == 0 && aligned16(qkv, q_norm, k_norm, cos, sin, q, k_pages, v_pages)) {
    head<N>(x, w, cos_row, sin_row, out, eps);
  } else {
    head<1>(x, w, cos_row, sin_row, out, eps);
  }
}
