// CUDA C++ for the CPU: qualifiers, vector types, built-in variables, intrinsics and mathematics, as far as the kernels
// use them. Included in front of a .cu file. What makes threads wait or exchange is in runtime.cpp and threads.h.
#pragma once

#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define __global__ __attribute__((visibility("default")))
#define __device__
#define __host__
#define __constant__
#define __shared__ static  // blocks run one after another
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
#define __grid_constant__
#define __CUDA_ARCH__ 900

// ---- vector types ---------------------------------------------------------------------------------------------------

#define VECTORS(T, name, a2, a4)                             \
  struct name##1 { T x; };                                   \
  struct alignas(a2) name##2 { T x, y; };                    \
  struct name##3 { T x, y, z; };                             \
  struct alignas(a4) name##4 { T x, y, z, w; };              \
  inline name##2 make_##name##2(T x, T y) { return {x, y}; } \
  inline name##3 make_##name##3(T x, T y, T z) { return {x, y, z}; } \
  inline name##4 make_##name##4(T x, T y, T z, T w) { return {x, y, z, w}; }
VECTORS(signed char, char, 2, 4)
VECTORS(unsigned char, uchar, 2, 4)
VECTORS(short, short, 4, 8)
VECTORS(unsigned short, ushort, 4, 8)
VECTORS(int, int, 8, 16)
VECTORS(unsigned, uint, 8, 16)
VECTORS(float, float, 8, 16)
VECTORS(long long, longlong, 16, 16)
VECTORS(unsigned long long, ulonglong, 16, 16)
VECTORS(double, double, 16, 16)
#undef VECTORS

struct dim3 {
  unsigned x, y, z;
};

// ---- the runtime ----------------------------------------------------------------------------------------------------

// In front of default arguments: the place of the call, for reports.
#define SITE const char *file = __builtin_FILE(), int line = __builtin_LINE()

namespace emulated {

struct Site {
  const char* file;
  int line;
};

extern dim3 thread_index, block_index, block_size, grid_size;
extern char dynamic_shared[];

enum Vote { COUNT, AND, OR };
unsigned block_barrier(const char* name, Vote vote, bool value, Site site);
void warp_barrier(unsigned mask, Site site);
unsigned long long shuffle(const char* name, unsigned mask, unsigned long long value, int from, Site site);
void gather(const char* name, unsigned mask, unsigned long long value, unsigned long long (&all)[32], Site site);
void product(float* d, const unsigned* a, const unsigned* b, Site site);
void load_matrices(unsigned* r, const void* row, bool transposed, Site site);
void copy_async(void* shared, const void* src, bool valid, int bytes, Site site);
void copy_commit();
void copy_wait(int still);
void make_barrier(int* barrier, int arrivals, Site site);
void arrive(int* barrier, int bytes, Site site);
void wait(int* barrier, int parity, Site site);
void load_box(void* to, const char* base, long long row_bytes, const long long (&rows)[3], const long long (&pitch)[3],
              const long long (&box)[3], const long long (&begin)[3], long long column, int* barrier, Site site);
struct Wgmma {  // a product that is not done yet
  float* d;
  int numbers, group, step;
  const char *a, *b;     // tiles, or b words
  int a_apart, b_apart;  // bytes from eight rows to the next eight
  int b_words;           // bytes from one of its words to the next, 0: b is a tile
  bool e4m3;             // or bf16
};
void wgmma_begin(Site site);
void wgmma_end(Site site);
void wgmma_wait(int still, Site site);
void wgmma(const Wgmma& p, int add, Site site);
void previous_done();
[[noreturn]] void fail(const char* what, Site site);

template <class T>
unsigned long long bits(T value) {
  static_assert(sizeof(T) <= 8, "a shuffle moves up to 8 bytes");
  unsigned long long word = 0;
  memcpy(&word, &value, sizeof(T));
  return word;
}

template <class T>
T of_bits(unsigned long long word) {
  T value;
  memcpy(&value, &word, sizeof(T));
  return value;
}

inline int lane() { return (thread_index.x + block_size.x * (thread_index.y + block_size.y * thread_index.z)) % 32; }

// A kernel with its arguments by address.
template <unsigned... I>
struct Indices {};
template <unsigned N, unsigned... I>
struct Count : Count<N - 1, N - 1, I...> {};
template <unsigned... I>
struct Count<0, I...> {
  using type = Indices<I...>;
};
template <class... P, unsigned... I>
void call(void (*kernel)(P...), void** args, Indices<I...>) {
  kernel(*reinterpret_cast<P*>(args[I])...);
}
template <class... P>
void call(void (*kernel)(P...), void** args) {
  call(kernel, args, typename Count<sizeof...(P)>::type{});
}

}  // namespace emulated

#define threadIdx emulated::thread_index
#define blockIdx emulated::block_index
#define blockDim emulated::block_size
#define gridDim emulated::grid_size
#define warpSize 32

// ---- barriers, exchange within a warp -------------------------------------------------------------------------------

#define HERE emulated::Site{file, line}

inline void __syncthreads(SITE) { emulated::block_barrier("__syncthreads", emulated::OR, false, HERE); }
inline int __syncthreads_count(int p, SITE) {
  return emulated::block_barrier("__syncthreads_count", emulated::COUNT, p != 0, HERE);
}
inline int __syncthreads_and(int p, SITE) {
  return emulated::block_barrier("__syncthreads_and", emulated::AND, p != 0, HERE);
}
inline int __syncthreads_or(int p, SITE) {
  return emulated::block_barrier("__syncthreads_or", emulated::OR, p != 0, HERE);
}
inline void __syncwarp(unsigned mask = 0xffffffffu, SITE) { emulated::warp_barrier(mask, HERE); }

template <class T>
T __shfl_sync(unsigned mask, T value, int from, int width = 32, SITE) {
  const int own = emulated::lane(), source = (own & ~(width - 1)) | (from & (width - 1));
  return emulated::of_bits<T>(emulated::shuffle("__shfl_sync", mask, emulated::bits(value), source, HERE));
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32, SITE) {
  const int own = emulated::lane(), source = own - int(delta), first = own & ~(width - 1);
  const int from = source < first ? own : source;
  return emulated::of_bits<T>(emulated::shuffle("__shfl_up_sync", mask, emulated::bits(value), from, HERE));
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32, SITE) {
  const int own = emulated::lane(), source = own + int(delta), last = own | (width - 1);
  const int from = source > last ? own : source;
  return emulated::of_bits<T>(emulated::shuffle("__shfl_down_sync", mask, emulated::bits(value), from, HERE));
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int lanes, int width = 32, SITE) {
  const int own = emulated::lane(), source = own ^ lanes;
  const int from = source > (own | (width - 1)) ? own : source;
  return emulated::of_bits<T>(emulated::shuffle("__shfl_xor_sync", mask, emulated::bits(value), from, HERE));
}

#define EACH_LANE for (int lane = 0; lane < 32; lane++) if (mask >> lane & 1)
inline unsigned __ballot_sync(unsigned mask, int p, SITE) {
  unsigned long long all[32];
  unsigned votes = 0;
  emulated::gather("__ballot_sync", mask, p != 0, all, HERE);
  EACH_LANE votes |= unsigned(all[lane]) << lane;
  return votes;
}
inline int __any_sync(unsigned mask, int p, SITE) { return __ballot_sync(mask, p, file, line) != 0; }
inline int __all_sync(unsigned mask, int p, SITE) { return __ballot_sync(mask, p, file, line) == mask; }
template <class T>
unsigned __match_any_sync(unsigned mask, T value, SITE) {
  unsigned long long all[32];
  unsigned equal = 0;
  emulated::gather("__match_any_sync", mask, emulated::bits(value), all, HERE);
  EACH_LANE equal |= unsigned(all[lane] == emulated::bits(value)) << lane;
  return equal;
}
#define REDUCE(name, expression)                                               \
  template <class T>                                                           \
  T name(unsigned mask, T value, SITE) {                                       \
    static_assert(sizeof(T) == 4 && T(0.5) == 0, "32-bit integers only");      \
    unsigned long long all[32];                                                \
    emulated::gather(#name, mask, emulated::bits(value), all, HERE);           \
    bool first = true;                                                         \
    T a = 0;                                                                   \
    EACH_LANE {                                                                \
      const T b = emulated::of_bits<T>(all[lane]);                             \
      a = first ? b : T(expression);                                           \
      first = false;                                                           \
    }                                                                          \
    return a;                                                                  \
  }
REDUCE(__reduce_add_sync, a + b)
REDUCE(__reduce_min_sync, a < b ? a : b)
REDUCE(__reduce_max_sync, a > b ? a : b)
REDUCE(__reduce_and_sync, a & b)
REDUCE(__reduce_or_sync, a | b)
REDUCE(__reduce_xor_sync, a ^ b)
#undef REDUCE
#undef EACH_LANE

// ---- memory ---------------------------------------------------------------------------------------------------------

#define ATOMIC(name, expression)           \
  template <class T, class U>              \
  T name(T* p, U value) {                  \
    const T old = *p, given = T(value);    \
    *p = expression;                       \
    return old;                            \
  }
ATOMIC(atomicAdd, T(old + given))
ATOMIC(atomicSub, T(old - given))
ATOMIC(atomicMin, given < old ? given : old)
ATOMIC(atomicMax, given > old ? given : old)
ATOMIC(atomicExch, given)
ATOMIC(atomicAnd, T(old & given))
ATOMIC(atomicOr, T(old | given))
ATOMIC(atomicXor, T(old ^ given))
ATOMIC(atomicInc, old >= given ? T(0) : T(old + 1))
#undef ATOMIC
template <class T, class U, class W>
T atomicCAS(T* p, U compare, W value) {
  const T old = *p;
  if (old == T(compare)) *p = T(value);
  return old;
}

template <class T> T __ldg(const T* p) { return *p; }
template <class T> T __ldcs(const T* p) { return *p; }
template <class T> T __ldcg(const T* p) { return *p; }
template <class T> T __ldca(const T* p) { return *p; }
template <class T> T __ldlu(const T* p) { return *p; }
template <class T> T __ldcv(const T* p) { return *p; }
template <class T> void __stcs(T* p, T value) { *p = value; }
template <class T> void __stcg(T* p, T value) { *p = value; }
template <class T> void __stwb(T* p, T value) { *p = value; }
template <class T> void __stwt(T* p, T value) { *p = value; }
inline void __threadfence() {}
inline void __threadfence_block() {}
inline void __threadfence_system() {}
inline void __nanosleep(unsigned) {}
inline void __trap(SITE) { emulated::fail("__trap()", HERE); }
#define assert(condition) ((condition) ? void() : emulated::fail("assert(" #condition ")", {__FILE__, __LINE__}))

// ---- bits and integers ----------------------------------------------------------------------------------------------

inline float __int_as_float(int x) { return emulated::of_bits<float>(unsigned(x)); }
inline float __uint_as_float(unsigned x) { return emulated::of_bits<float>(x); }
inline int __float_as_int(float x) { return int(emulated::bits(x)); }
inline unsigned __float_as_uint(float x) { return unsigned(emulated::bits(x)); }
inline double __longlong_as_double(long long x) { return emulated::of_bits<double>(x); }
inline long long __double_as_longlong(double x) { return emulated::bits(x); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __clz(int x) { return x ? __builtin_clz(x) : 32; }
inline int __clzll(long long x) { return x ? __builtin_clzll(x) : 64; }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __ffsll(long long x) { return __builtin_ffsll(x); }
inline unsigned __brev(unsigned x) {
  unsigned y = 0;
  for (int i = 0; i < 32; i++) y |= (x >> i & 1) << (31 - i);
  return y;
}
inline unsigned __umulhi(unsigned a, unsigned b) { return unsigned((unsigned long long)a * b >> 32); }
inline int __mulhi(int a, int b) { return int((long long)a * b >> 32); }
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
  return (unsigned long long)((unsigned __int128)a * b >> 64);
}
inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned n) {
  return unsigned(((unsigned long long)high << 32 | low) << (n & 31) >> 32);
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned n) {
  return unsigned(((unsigned long long)high << 32 | low) >> (n & 31));
}
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned s) {
  const unsigned long long both = (unsigned long long)b << 32 | a;
  unsigned y = 0;
  for (int i = 0; i < 4; i++) {
    const unsigned pick = s >> 4 * i & 15, byte = unsigned(both >> 8 * (pick & 7)) & 255;
    y |= (pick & 8 ? (byte & 128 ? 255u : 0u) : byte) << 8 * i;
  }
  return y;
}

// ---- mathematics ----------------------------------------------------------------------------------------------------

// With both arguments of one type, or mixed as the usual conversions say; NaN loses.
template <class A, class B>
auto min(A a, B b) -> decltype(true ? A() : B()) {
  using C = decltype(true ? A() : B());
  const C c = a, d = b;
  return c != c ? d : d < c ? d : c;
}
template <class A, class B>
auto max(A a, B b) -> decltype(true ? A() : B()) {
  using C = decltype(true ? A() : B());
  const C c = a, d = b;
  return c != c ? d : d > c ? d : c;
}

inline float rsqrtf(float x) { return float(1.0 / sqrt(double(x))); }
inline double rsqrt(double x) { return 1.0 / sqrt(x); }
inline float __expf(float x) { return expf(x); }
inline float __exp10f(float x) { return powf(10.0f, x); }
inline float __logf(float x) { return logf(x); }
inline float __log2f(float x) { return log2f(x); }
inline float __log10f(float x) { return log10f(x); }
inline float __sinf(float x) { return sinf(x); }
inline float __cosf(float x) { return cosf(x); }
inline float __tanf(float x) { return tanf(x); }
inline float __powf(float x, float y) { return powf(x, y); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __saturatef(float x) { return x > 0 ? (x < 1 ? x : 1.0f) : 0.0f; }
inline float __frcp_rn(float x) { return 1.0f / x; }
inline float __fsqrt_rn(float x) { return sqrtf(x); }
inline float __frsqrt_rn(float x) { return rsqrtf(x); }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline double __dadd_rn(double a, double b) { return a + b; }
inline double __dsub_rn(double a, double b) { return a - b; }
inline double __dmul_rn(double a, double b) { return a * b; }
inline double __ddiv_rn(double a, double b) { return a / b; }
inline double __fma_rn(double a, double b, double c) { return fma(a, b, c); }
inline int __float2int_rn(float x) { return int(rintf(x)); }
inline int __float2int_rz(float x) { return int(x); }
inline int __float2int_rd(float x) { return int(floorf(x)); }
inline int __float2int_ru(float x) { return int(ceilf(x)); }
inline unsigned __float2uint_rn(float x) { return unsigned(rintf(x)); }
inline unsigned __float2uint_rz(float x) { return unsigned(x); }
inline float __int2float_rn(int x) { return float(x); }
inline float __uint2float_rn(unsigned x) { return float(x); }
inline float __double2float_rn(double x) { return float(x); }
