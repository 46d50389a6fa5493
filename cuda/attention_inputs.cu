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

// One head from x to where(), by the lanes of a group; w is null for v. Where x is null the lanes only exchange sums.
// All reads are under way before the first is used: where() has to wait for others as well.
template <int N, class Where>
__device__ void head(const Act* x, const float* w, const float* cos, const float* sin, float eps, Where where) {
  constexpr int EACH = (Dh + LANES * N - 1) / (LANES * N);
  const int first = threadIdx.x % LANES * N;  // and every LANES * N-th
  Pack<Act, N> own[EACH], partner[EACH];
  Pack<float, N> delta[EACH], partner_delta[EACH], cosine[EACH], sine[EACH];
#pragma unroll
  for (int e = 0; e < EACH; e++) {
    const int c = first + e * LANES * N;
    if (x == nullptr || c >= Dh) continue;
    own[e] = load<N>(x + c);
    if (w == nullptr) continue;
    delta[e] = load<N>(w + c);
    if (c >= 2 * Half) continue;
    const int other = c < Half ? c + Half : c - Half;
    partner[e] = load<N>(x + other), partner_delta[e] = load<N>(w + other);
    cosine[e] = load<N>(cos + c % Half), sine[e] = load<N>(sin + c % Half);
  }
  Act* out = where();

  // scale = 1 / sqrt(mean x^2 + eps)
  float sum = 0.0f;
#pragma unroll
  for (int e = 0; e < EACH; e++) {
    if (x == nullptr || first + e * LANES * N >= Dh) continue;
#pragma unroll
    for (int i = 0; i < N; i++) sum = fmaf(to_float(own[e].v[i]), to_float(own[e].v[i]), sum);
  }
#pragma unroll
  for (int lane = LANES / 2; lane > 0; lane /= 2) sum += __shfl_xor_sync(ALL_LANES, sum, lane);
  const float scale = 1.0f / sqrtf(sum / Dh + eps);

#pragma unroll
  for (int e = 0; e < EACH; e++) {
    const int c = first + e * LANES * N;
    if (out == nullptr || c >= Dh) continue;
    if (w != nullptr) {
      // y = x scale (1 + w); y_i cos - y_{i+Half} sin on the left, y_i cos + y_{i-Half} sin on the right
      const float sign = c < Half ? -scale : scale;
#pragma unroll
      for (int i = 0; i < N; i++) {
        float y = to_float(own[e].v[i]) * (scale * (1.0f + delta[e].v[i]));
        if (c < 2 * Half) {
          const float turned = to_float(partner[e].v[i]) * sign * (1.0f + partner_delta[e].v[i]);
          y = fmaf(y, cosine[e].v[i], turned * sine[e].v[i]);
        }
        own[e].v[i] = from_float<Act>(y);
      }
    }
    store<N>(out + c, own[e]);
  }
}

extern "C" __global__ void __launch_bounds__(128, 6) attention_inputs(
    const Act* qkv,                    // [Rows, 2*(Hq+Hkv)*Dh] q, gate, k, v
    const float* __restrict__ q_norm,  // [Dh] a delta to 1
    const float* __restrict__ k_norm,  // [Dh]
    const float* cos,                  // [Rows, Half]
    const float* sin,                  // [Rows, Half]
    const int* rows,                   // [Rows] or null: rows of the forest
    const int* request,                // [R] -1 at an unused row
    const int* kv_slot,                // [R]
    const int* page_table,             // [B, M] -1 where there is no page
    Act* q,                            // [Rows, Hq, Dh]
    Act* k_pages,                      // [Pages, P, Hkv, Dh]
    Act* v_pages,                      // [Pages, P, Hkv, Dh]
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
  const Act* x = n < Rows ? qkv + (2ll * n * (Hq + Hkv) + (h < Hq ? h : Hq + h)) * Dh : nullptr;
  const float* w = h < Hq ? q_norm : h < Hq + Hkv ? k_norm : nullptr;
  const float *cos_row = cos + (long long)n * Half, *sin_row = sin + (long long)n * Half;

  // Where the head goes, null for nowhere
  const auto where = [&]() -> Act* {
    const int row = n >= Rows ? -1 : rows == nullptr ? n : rows[n];
    if (row < 0) return nullptr;
    const int b = request[row], slot = kv_slot[row];
    if (b < 0) return nullptr;
    if (h < Hq) return q + ((long long)n * Hq + h) * Dh;
    const int entry = slot / P;
    const long long page = entry < M ? page_table[(long long)b * M + entry] : -1;
    Act* pages = h < Hq + Hkv ? k_pages : v_pages;
    return page < 0 ? nullptr : pages + ((page * P + slot % P) * Hkv + (h - Hq) % Hkv) * Dh;
  };

  constexpr int N = PER_16_BYTES<Act>;
  if (Dh % N == 0 && Half % N == 0 && aligned16(qkv, q_norm, k_norm, cos, sin, q, k_pages, v_pages)) {
    head<N>(x, w, cos_row, sin_row, eps, where);
  } else {
    head<1>(x, w, cos_row, sin_row, eps, where);
  }
}
