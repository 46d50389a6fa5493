// What attention reads: q and k normed and rotated, k and v written to their pages.
// Definition: attention_inputs in boleinfer/ops/attention_inputs.py.
// A head's equations: head_inputs.cuh. A row without a page writes no k and v; a row without a request, and an entry -1
// of `rows`, write nothing.
//
// grid: as many blocks as hold all heads of all rows. block: 32 .. 128 threads in full warps; a group of lanes owns a
// head of q, k or v of a row, 16 bytes a lane where the widths and all addresses allow it, else one number. shared: none.
// Read twice: the rotated numbers, the second time from L1.
//
// sizes: Dh=256 Half=32 Act=bf16,float | Dh=128 Half=64 Act=bf16,float | Dh=32,64 Half=16 Act=bf16,float
// sizes: Dh=63 Half=9 Act=bf16,float
#include "head_inputs.cuh"

struct Put {
  template <int N>
  __device__ __forceinline__ void operator()(Act* out, int column, const Pack<Act, N>& numbers) const {
    store(out + column, numbers);
  }
};

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
  const unsigned heads = Hq + 2 * Hkv;
  const unsigned unit = ((unsigned long long)blockIdx.x * blockDim.x + threadIdx.x) / LANES;
  const int n = unit / heads, h = unit % heads;
  const Act* x = n < Rows ? qkv + (2ll * n * (Hq + Hkv) + (h < Hq ? h : Hq + h)) * Dh : nullptr;
  const float* w = h < Hq ? q_norm : h < Hq + Hkv ? k_norm : nullptr;
  const float *cos_row = cos + (long long)n * Half, *sin_row = sin + (long long)n * Half;

  // Where the head goes, null for nowhere: known before the pass began. What this pass made is read behind after_previous(),
  // in head_inputs.
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
  Act* out = where();

  constexpr int N = PER_16_BYTES<Act>;
  if (Dh % N == 0 && Half % N == 0 && aligned16(qkv, q_norm, k_norm, cos, sin, q, k_pages, v_pages)) {
    head_inputs<N>(x, w, cos_row, sin_row, eps, out, Put{});
  } else {
    head_inputs<1>(x, w, cos_row, sin_row, eps, out, Put{});
  }
}
