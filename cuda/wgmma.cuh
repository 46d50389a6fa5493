// Matrix products of a warpgroup (four warps, the first a multiple of four) on tiles in shared memory: bf16 or E4M3 ->
// float32 (sm_90a).
//
// d += A B^T for A [64, 16] and B [N, 16], both tiles as load_tile leaves them: rows of 128 bytes, swizzled. Lane l = 4
// g + t of warp w has D[16 w + g][8 n + 2 t, + 1] in d[4 n], d[4 n + 1] and D[16 w + g + 8] there in the next two. The
// same k in the same order, 16 at a time, give the bits of mma_m16n8k16, whatever N is.
//
// wgmma_begin(); products; wgmma_end(); wgmma_wait<P>() until at most P of those groups are under way: until then d may
// not be touched, nor the tiles be written.
#pragma once

#include "mma.cuh"

// What this thread wrote into shared memory can be read by products, and overwritten by copies, after the next barrier.
__device__ __forceinline__ void fence_writes() {
#ifndef EMULATED
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

// Registers of this thread from now on, of those that the block has; all warps of a warpgroup together.
template <int N>
__device__ __forceinline__ void fewer_registers() {
#ifndef EMULATED
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
#endif
}
template <int N>
__device__ __forceinline__ void more_registers() {
#ifndef EMULATED
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
#endif
}

#ifdef EMULATED
#include "emulated_wgmma.h"
#else

// Where a tile is, for the products: its address and the bytes from eight rows to the next eight, swizzle of 128 bytes.
struct Tile {
  unsigned long long bits;

  __device__ __forceinline__ explicit Tile(const void* p, int apart = 1024)
      : bits((unsigned long long)(shared_address(p) >> 4) | 1ull << 16 | (apart >> 4) * (1ull << 32) | 1ull << 62) {}

  // The tile so many bytes, a multiple of 16, behind this one. The address is in the lower word, so nothing is carried.
  __device__ __forceinline__ Tile behind(int bytes) const {
    Tile tile = *this;
    tile.bits = (bits >> 32) << 32 | (unsigned(bits) + unsigned(bytes >> 4));
    return tile;
  }
  __device__ __forceinline__ unsigned long long at(int step) const { return behind(32 * step).bits; }
};

// A row, or two whose 16-byte words are in turn, as the first of eight rows B; the others are what follows, and what they
// give is to be left alone. APART: bytes from a row's word to its next one, in shared memory as they come; next_rows: from
// these eight rows to the next eight.
template <int APART>
struct Words {
  unsigned long long bits;

  __device__ __forceinline__ explicit Words(const void* p, int next_rows = 0)
      : bits((unsigned long long)(shared_address(p) >> 4) | (unsigned long long)(APART >> 4) << 16 |
             (next_rows >> 4) * (1ull << 32)) {}
  __device__ __forceinline__ unsigned long long at(int step) const { return bits + APART / 8 * step; }
};

// What makes these numbers stays before the next wgmma_begin(). Where the compiler puts it behind, it has to begin again,
// and in some places then waits for each product by itself (ptxas: C7519, C7520).
template <int N>
__device__ __forceinline__ void made_before(float (&d)[N]) {
#pragma unroll
  for (int i = 0; i < N; i++) asm volatile("" : "+f"(d[i])::"memory");
}

__device__ __forceinline__ void wgmma_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_end() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int P>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(P) : "memory");
}

// Operands of products, here and in attention_wide.cuh: so many numbers of d, and their names.
#define FOUR(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define EIGHT(i) FOUR(i), FOUR(i + 4)
#define SIXTEEN(i) EIGHT(i), EIGHT(i + 8)
#define SIXTY_FOUR(i) SIXTEEN(i), SIXTEEN(i + 16), SIXTEEN(i + 32), SIXTEEN(i + 48)
#define D4 "%0, %1, %2, %3"
#define D8 D4 ", %4, %5, %6, %7"
#define D12 D8 ", %8, %9, %10, %11"
#define D16 D12 ", %12, %13, %14, %15"
#define D20 D16 ", %16, %17, %18, %19"
#define D24 D20 ", %20, %21, %22, %23"
#define D32 D24 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define D40 D32 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define D48 D40 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define D56 D48 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define D64 D56 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define D80 D64 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"
#define D96 D80 ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define D128                                                                                                          \
  D96 ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111"                  \
      ", %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"

// N: rows of B; TYPES: k of a product and types; D: the numbers of d, then the numbers of the next operands, then those of
// bf16 that say that neither is transposed, then the operands that d is.
#define PRODUCTS(NAME, N, TYPES, D, P0, P1, P2, PLAIN, ...)                                                           \
  template <class B>                                                                                                  \
  __device__ __forceinline__ void NAME(float (&d)[N / 2], Tile a, B b, int step, int add = 1) {                       \
    asm volatile("{.reg .pred add;\n setp.ne.b32 add, %" #P2 ", 0;\n"                                                 \
                 "wgmma.mma_async.sync.aligned.m64n" #N TYPES " {" D "}, %" #P0 ", %" #P1 ", add, 1, 1" PLAIN ";}"    \
                 : __VA_ARGS__                                                                                        \
                 : "l"(a.at(step)), "l"(b.at(step)), "r"(add));                                                      \
  }
#define PRODUCTS_BF16(N, D, P0, P1, P2, ...) \
  PRODUCTS(wgmma, N, "k16.f32.bf16.bf16", D, P0, P1, P2, ", 0, 0", __VA_ARGS__)
#define PRODUCTS_E4M3(N, D, P0, P1, P2, ...) \
  PRODUCTS(wgmma_e4m3, N, "k32.f32.e4m3.e4m3", D, P0, P1, P2, "", __VA_ARGS__)

// Product number `step` of the tiles: k = 16 step .. 16 step + 15. Without `add` d is put to zero before.
PRODUCTS_BF16(8, D4, 4, 5, 6, FOUR(0))
PRODUCTS_BF16(16, D8, 8, 9, 10, EIGHT(0))
PRODUCTS_BF16(24, D12, 12, 13, 14, EIGHT(0), FOUR(8))
PRODUCTS_BF16(32, D16, 16, 17, 18, SIXTEEN(0))
PRODUCTS_BF16(40, D20, 20, 21, 22, SIXTEEN(0), FOUR(16))
PRODUCTS_BF16(48, D24, 24, 25, 26, SIXTEEN(0), EIGHT(16))
PRODUCTS_BF16(64, D32, 32, 33, 34, SIXTEEN(0), SIXTEEN(16))
PRODUCTS_BF16(80, D40, 40, 41, 42, SIXTEEN(0), SIXTEEN(16), EIGHT(32))
PRODUCTS_BF16(96, D48, 48, 49, 50, SIXTEEN(0), SIXTEEN(16), SIXTEEN(32))
PRODUCTS_BF16(112, D56, 56, 57, 58, SIXTEEN(0), SIXTEEN(16), SIXTEEN(32), EIGHT(48))
PRODUCTS_BF16(128, D64, 64, 65, 66, SIXTY_FOUR(0))
PRODUCTS_BF16(160, D80, 80, 81, 82, SIXTY_FOUR(0), SIXTEEN(64))
PRODUCTS_BF16(192, D96, 96, 97, 98, SIXTY_FOUR(0), SIXTEEN(64), SIXTEEN(80))

// The same of tiles of E4M3 numbers, 32 k at a time.
PRODUCTS_E4M3(8, D4, 4, 5, 6, FOUR(0))
PRODUCTS_E4M3(16, D8, 8, 9, 10, EIGHT(0))
PRODUCTS_E4M3(32, D16, 16, 17, 18, SIXTEEN(0))
PRODUCTS_E4M3(64, D32, 32, 33, 34, SIXTEEN(0), SIXTEEN(16))
PRODUCTS_E4M3(128, D64, 64, 65, 66, SIXTY_FOUR(0))

#undef PRODUCTS
#undef PRODUCTS_BF16
#undef PRODUCTS_E4M3

#endif
