// Rows of bf16 as numbers of four bits in bricks, from row `First` of them on. Definition: narrow in boleinfer/nibbles.py.
//
// grid: Din / 128, rows. block: a warp; a lane owns four neighbours. shared: none. Read twice: nothing.
#include "nibbles.cuh"

extern "C" __global__ void __launch_bounds__(32) narrow_nibbles(
    const bf16* rows,  // [Rows, Din] aligned 16
    unsigned char* w,  // [Dout / 32, Din / 128, 2304] aligned 16; bricks
    int First,
    int Din,
    int Dout)
{
  after_previous();
  const int lane = threadIdx.x, chunk = blockIdx.x, f = First + blockIdx.y, g = f % 8, of_g = f % FEATURES / 8;
  const int k = 4 * lane;
  const auto own = load<4>(rows + (long long)blockIdx.y * Din + chunk * K + k);

  // the number of largest size among those that share a scale, of equal ones the first
  float most = to_float(own.v[0]);
#pragma unroll
  for (int i = 1; i < 4; i++) {
    if (fabsf(to_float(own.v[i])) > fabsf(most)) most = to_float(own.v[i]);
  }
#pragma unroll
  for (int apart = 1; apart < SHARING / 4; apart *= 2) {
    const float other = __shfl_xor_sync(ALL_LANES, most, apart);
    const bool is_first = lane & apart;  // the other lane comes first
    if (fabsf(other) > fabsf(most) || (is_first && fabsf(other) == fabsf(most))) most = other;
  }
  const bf16 scale = from_float<bf16>(most / -8.0f);
  const float s = to_float(scale);

  unsigned bits = 0;  // of the eight numbers that this lane and its neighbour have
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const float n = s == 0.0f ? 8.0f : fminf(fmaxf(rintf(to_float(own.v[i]) / s) + 8.0f, 0.0f), 15.0f);
    const int e = k % 8 + i;
    bits |= unsigned(n) << 4 * (e / 2 + e % 2 * 4);
  }
  bits |= __shfl_xor_sync(ALL_LANES, bits, 1);
  unsigned char* const brick = w + ((long long)(f / FEATURES) * (Din / K) + chunk) * BRICK;
  const int at = (of_g * WARP + 4 * g + k / 8 % 4) * 16 + k / 32 * 4;
  if (lane % 2 == 0) *reinterpret_cast<unsigned*>(brick + at) = bits;
  bf16* const scales = reinterpret_cast<bf16*>(brick + NUMBERS) + (g * 4 + of_g) * (K / SHARING);
  if (k % SHARING == 0) scales[k / SHARING] = scale;
}
