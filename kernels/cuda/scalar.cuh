/* scalar.cuh -- the scalar functions of elementwise.def as function objects: <op>_fn()(x), x the operands in what T is computed in.
 * For the kernels of elementwise.cu and for chains, which are generated (chain.c). */
#ifndef DDP_CUDA_SCALAR_CUH
#define DDP_CUDA_SCALAR_CUH

#include "device.cuh"

/* Integer arithmetic wraps: it goes through the unsigned type of the same width. */
template <class T> struct unsigned_of { typedef T type; };
template <> struct unsigned_of<long long> { typedef unsigned long long type; };
template <> struct unsigned_of<int> { typedef unsigned type; };
#define UNSIGNED(T) typename unsigned_of<T>::type
template <class T> static __device__ __forceinline__ T add_of(T a, T b) { return (T)((UNSIGNED(T))a + (UNSIGNED(T))b); }
template <class T> static __device__ __forceinline__ T sub_of(T a, T b) { return (T)((UNSIGNED(T))a - (UNSIGNED(T))b); }
template <class T> static __device__ __forceinline__ T mul_of(T a, T b) { return (T)((UNSIGNED(T))a * (UNSIGNED(T))b); }

/* a to the b by squaring, wrapping; negative exponents give 0 but for 1 and -1. */
template <class T> static __device__ __forceinline__ T pow_of(T base, T exponent) {
    long long a = (long long)base, b = (long long)exponent;
    if (b < 0) return (T)(a == 1 ? 1 : a == -1 ? (b % 2 ? -1 : 1) : 0);
    unsigned long long r = 1, x = (unsigned long long)a;
    for (; b; b >>= 1, x *= x)
        if (b & 1) r *= x;
    return (T)r;
}
static __device__ __forceinline__ float pow_of(float a, float b) { return powf(a, b); }
static __device__ __forceinline__ double pow_of(double a, double b) { return pow(a, b); }

#define ADD(a, b) add_of((T)(a), (T)(b))
#define SUB(a, b) sub_of((T)(a), (T)(b))
#define MUL(a, b) mul_of((T)(a), (T)(b))
#define POW(a, b) pow_of((T)(a), (T)(b))

#define DDP_BINARY(op, expr)                                           \
    struct op##_fn {                                                   \
        template <class T> __device__ T operator()(const T *x) const { \
            const T a = x[0], b = x[1];                                \
            return (T)(expr);                                          \
        }                                                              \
    };
#define DDP_COMPARE(op, expr)                                             \
    struct op##_fn {                                                      \
        template <class T> __device__ bool operator()(const T *x) const { \
            const T a = x[0], b = x[1];                                   \
            return expr;                                                  \
        }                                                                 \
    };
#define DDP_UNARY(op, expr)                                            \
    struct op##_fn {                                                   \
        template <class T> __device__ T operator()(const T *v) const { \
            const T x = v[0];                                          \
            return (T)(expr);                                          \
        }                                                              \
    };
#define DDP_BINARY_FLOAT(op, expr) DDP_BINARY(op, expr)
#define DDP_VARIANT_2(op, expr) DDP_BINARY(op, expr)
#define DDP_UNARY_FLOAT(op, expr) DDP_UNARY(op, expr)
#define DDP_VARIANT(op, expr) DDP_UNARY(op, expr)
#include "../elementwise.def"

#endif
