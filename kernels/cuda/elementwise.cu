/* elementwise.cu -- every scalar function of elementwise.def, for every dtype, over operands of any layout. */
#include "device.cuh"

/* Integer arithmetic wraps: it goes through the unsigned type of the same width. */
template <class T> struct unsigned_of {
    typedef T type;
};
template <> struct unsigned_of<long long> {
    typedef unsigned long long type;
};
template <> struct unsigned_of<int> {
    typedef unsigned type;
};
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

#define BINARY(op, expr)                                              \
    struct op##_fn {                                                  \
        template <class T> __device__ T operator()(const T *x) const { \
            const T a = x[0], b = x[1];                                \
            return (T)(expr);                                          \
        }                                                             \
    };                                                                \
    template <class T> static __device__ void op##_body(const walk_args &a) { walk<2, T, T>(a, op##_fn()); }
#define COMPARE(op, expr)                                                \
    struct op##_fn {                                                     \
        template <class T> __device__ bool operator()(const T *x) const { \
            const T a = x[0], b = x[1];                                   \
            return expr;                                                  \
        }                                                                \
    };                                                                   \
    template <class T> static __device__ void op##_body(const walk_args &a) { walk<2, bool8, T>(a, op##_fn()); }
#define UNARY(op, expr)                                               \
    struct op##_fn {                                                  \
        template <class T> __device__ T operator()(const T *v) const { \
            const T x = v[0];                                          \
            return (T)(expr);                                          \
        }                                                             \
    };                                                                \
    template <class T> static __device__ void op##_body(const walk_args &a) { walk<1, T, T>(a, op##_fn()); }

#define DDP_BINARY(op, expr) BINARY(op, expr) DEFINE_ALL(op, walk_args)
#define DDP_BINARY_FLOAT(op, expr) BINARY(op, expr) DEFINE_FLOATS(op, walk_args)
#define DDP_COMPARE(op, expr) COMPARE(op, expr) DEFINE_ALL(op, walk_args)
#define DDP_UNARY(op, expr) UNARY(op, expr) DEFINE_ALL(op, walk_args)
#define DDP_UNARY_FLOAT(op, expr) UNARY(op, expr) DEFINE_FLOATS(op, walk_args)
#define DDP_VARIANT(op, expr) UNARY(op, expr) DEFINE_FLOATS(op, walk_args)
#define DDP_VARIANT_2(op, expr) BINARY(op, expr) DEFINE_FLOATS(op, walk_args)
#include "../elementwise.def"

/* attrs: min, max. NaN stays. */
struct clamp_fn {
    double min, max;
    template <class T> __device__ double operator()(const T *x) const {
        double v = (double)x[0];
        return v < min ? min : v > max ? max : v;
    }
    __device__ float operator()(const float *x) const {
        float v = x[0];
        return v < (float)min ? (float)min : v > (float)max ? (float)max : v;
    }
};
template <class T> static __device__ void clamp_body(const walk_args &a) {
    clamp_fn f = {a.attrs[0], a.attrs[1]};
    walk<1, T, T>(a, f);
}
DEFINE_ALL(clamp, walk_args)
