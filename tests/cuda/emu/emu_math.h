// Device functions that g++ does not know: bits, rounding modes, fast versions. Part of emu.h.
#pragma once

template <class T> static inline T __ldg(const T *p) { return *p; }
template <class T> static inline T __ldcs(const T *p) { return *p; }
template <class T> static inline T __ldcg(const T *p) { return *p; }
template <class T> static inline void __stcs(T *p, T v) { *p = v; }
template <class T> static inline void __stcg(T *p, T v) { *p = v; }

// ---- bits -----------------------------------------------------------------------------------------------------
static inline int __float_as_int(float x) { return emu::from_bits<int>(emu::to_bits(x)); }
static inline unsigned __float_as_uint(float x) { return emu::from_bits<unsigned>(emu::to_bits(x)); }
static inline float __int_as_float(int x) { return emu::from_bits<float>((uint32_t)x); }
static inline float __uint_as_float(unsigned x) { return emu::from_bits<float>(x); }
static inline long long __double_as_longlong(double x) { return emu::from_bits<long long>(emu::to_bits(x)); }
static inline double __longlong_as_double(long long x) { return emu::from_bits<double>((uint64_t)x); }
static inline int __clz(int x) { return x ? __builtin_clz((unsigned)x) : 32; }
static inline int __clzll(long long x) { return x ? __builtin_clzll((unsigned long long)x) : 64; }
static inline int __ffs(int x) { return __builtin_ffs(x); }
static inline int __ffsll(long long x) { return __builtin_ffsll(x); }
static inline int __popc(unsigned x) { return __builtin_popcount(x); }
static inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
static inline unsigned __umulhi(unsigned a, unsigned b) { return (unsigned)((uint64_t)a * b >> 32); }
static inline int __mulhi(int a, int b) { return (int)((int64_t)a * b >> 32); }
static inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
    return (unsigned long long)((unsigned __int128)a * b >> 64);
}
static inline unsigned __brev(unsigned x) {
    unsigned y = 0;
    for (int i = 0; i < 32; i++) y |= (x >> i & 1) << (31 - i);
    return y;
}
static inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned by) {
    return (unsigned)((((uint64_t)high << 32 | low) << (by & 31)) >> 32);
}
static inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned by) {
    return (unsigned)(((uint64_t)high << 32 | low) >> (by & 31));
}

// ---- 16-bit floats: CUDA's headers have them for the host in software; the processor gives the same bits sooner -----
#ifdef __F16C__
#include <immintrin.h>
static inline __half emu_half_of_float(float x) {
    __half_raw bits;
    bits.x = x == x ? _cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT) : 0x7FFF; // NaN as the device has it
    return bits;
}
static inline float emu_float_of_half(__half x) { return _cvtsh_ss(((__half_raw)x).x); }
#define __float2half(x) emu_half_of_float(x)
#define __float2half_rn(x) emu_half_of_float(x)
#define __half2float(x) emu_float_of_half(x)
#endif

// ---- arithmetic -----------------------------------------------------------------------------------------------
static inline float __fadd_rn(float a, float b) { return a + b; }
static inline float __fsub_rn(float a, float b) { return a - b; }
static inline float __fmul_rn(float a, float b) { return a * b; }
static inline float __fdiv_rn(float a, float b) { return a / b; }
static inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
static inline float __fsqrt_rn(float a) { return sqrtf(a); }
static inline float __frcp_rn(float a) { return 1.f / a; }
static inline double __dadd_rn(double a, double b) { return a + b; }
static inline double __dsub_rn(double a, double b) { return a - b; }
static inline double __dmul_rn(double a, double b) { return a * b; }
static inline double __ddiv_rn(double a, double b) { return a / b; }
static inline double __fma_rn(double a, double b, double c) { return fma(a, b, c); }
static inline double __dsqrt_rn(double a) { return sqrt(a); }
static inline float __fdividef(float a, float b) { return a / b; }
static inline float rsqrtf(float x) { return 1.f / sqrtf(x); }
static inline double rsqrt(double x) { return 1. / sqrt(x); }
static inline float __frsqrt_rn(float x) { return 1.f / sqrtf(x); }
// macros: math.h has functions of these names that nobody can call
#define __expf(x) expf(x)
#define __logf(x) logf(x)
#define __log2f(x) log2f(x)
#define __powf(x, y) powf(x, y)
#define __sinf(x) sinf(x)
#define __cosf(x) cosf(x)
static inline float __saturatef(float x) { return x > 0.f ? (x < 1.f ? x : 1.f) : 0.f; } // NaN becomes 0
static inline float sinpif(float x) { return (float)sin(M_PI * (double)x); } // good to the last place, as the device's
static inline float cospif(float x) { return (float)cos(M_PI * (double)x); }
static inline double sinpi(double x) { return sin(M_PI * x); }
static inline double cospi(double x) { return cos(M_PI * x); }
static inline void sincospif(float x, float *s, float *c) { *s = sinpif(x), *c = cospif(x); }
static inline void sincospi(double x, double *s, double *c) { *s = sinpi(x), *c = cospi(x); }
static inline float normcdff(float x) { return .5f * erfcf(-x * (float)M_SQRT1_2); }
static inline double normcdf(double x) { return .5 * erfc(-x * M_SQRT1_2); }
static inline int __float2int_rz(float x) { return (int)x; }
static inline int __float2int_rn(float x) { return (int)nearbyintf(x); }
static inline unsigned __float2uint_rz(float x) { return (unsigned)x; }
static inline long long __double2ll_rz(double x) { return (long long)x; }
static inline float __int2float_rn(int x) { return (float)x; }
static inline float __uint2float_rn(unsigned x) { return (float)x; }
static inline float __double2float_rn(double x) { return (float)x; }

// min and max of CUDA are overloads of the global namespace; of floating types they pass over NaN, as fmin and fmax.
static inline int min(int a, int b) { return b < a ? b : a; }
static inline int max(int a, int b) { return a < b ? b : a; }
static inline unsigned min(unsigned a, unsigned b) { return b < a ? b : a; }
static inline unsigned max(unsigned a, unsigned b) { return a < b ? b : a; }
static inline long min(long a, long b) { return b < a ? b : a; }
static inline long max(long a, long b) { return a < b ? b : a; }
static inline long long min(long long a, long long b) { return b < a ? b : a; }
static inline long long max(long long a, long long b) { return a < b ? b : a; }
static inline unsigned long min(unsigned long a, unsigned long b) { return b < a ? b : a; }
static inline unsigned long max(unsigned long a, unsigned long b) { return a < b ? b : a; }
static inline float min(float a, float b) { return fminf(a, b); }
static inline float max(float a, float b) { return fmaxf(a, b); }
static inline double min(double a, double b) { return fmin(a, b); }
static inline double max(double a, double b) { return fmax(a, b); }
