/* reduce.c -- adding up, the same way on every rank and for every engine of the host. */
#include <string.h>

#include "reduce.h"

/* One loop compiled for several instruction sets, chosen when the library is loaded. All ranks of a host choose alike. */
#if defined(__x86_64__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__) && !defined(__clang__)
#define WIDE __attribute__((target_clones("default", "avx2", "avx512f")))
#else
#define WIDE
#endif

/* Two ranks of equal weight in f32, results in both places: the case that training is made of. */
WIDE static void sum2_f32(const float *a, const float *b, float *x, float *y, float scale, int64_t n) {
#pragma GCC ivdep
    for (int64_t i = 0; i < n; i++) {
        float s = (a[i] + b[i]) * scale;
        x[i] = s;
        y[i] = s;
    }
}

static double scale_of(int reduce, int n, const double *weights) {
    double sum = 0;
    for (int r = 0; r < n; r++) sum += weights[r];
    if (reduce != DDP_MEAN) return 1;
    return sum != 0 ? 1 / sum : 0;
}

static bool all_are(double value, int n, const double *w) {
    for (int r = 0; r < n; r++)
        if (w[r] != value) return false;
    return true;
}

enum { BLOCK = 1024 };

/* f16, bf16, f32 in f32; f64 in f64: a block at a time, in rank order. */
#define FLOATS(name, T, A, LOAD, STORE)                                                                              \
    WIDE static void name(int reduce, int n_in, const void *const *in, const double *w, int n_out, void *const *out, \
                          int64_t n) {                                                                               \
        A scale = (A)scale_of(reduce, n_in, w);                                                                      \
        for (int64_t at = 0; at < n; at += BLOCK) {                                                                  \
            A acc[BLOCK];                                                                                            \
            int64_t m = n - at < BLOCK ? n - at : BLOCK;                                                             \
            bool first = true;                                                                                       \
            for (int r = 0; r < n_in; r++) {                                                                         \
                const T *p = (const T *)in[r] + at;                                                                  \
                if (w[r] == 0) continue; /* not even its NaN */                                                      \
                A f = reduce == DDP_MEAN || reduce == DDP_SUM ? (A)w[r] : 1;                                         \
                for (int64_t i = 0; i < m; i++) {                                                                    \
                    A v = LOAD(p[i]) * f;                                                                            \
                    if (first) acc[i] = v;                                                                           \
                    else if (reduce == DDP_MIN) acc[i] = v < acc[i] || v != v ? v : acc[i];                          \
                    else if (reduce == DDP_MAX) acc[i] = v > acc[i] || v != v ? v : acc[i];                          \
                    else acc[i] += v;                                                                                \
                }                                                                                                    \
                first = false;                                                                                       \
            }                                                                                                        \
            if (first) memset(acc, 0, sizeof acc);                                                                   \
            for (int k = 0; k < n_out; k++) {                                                                        \
                T *q = (T *)out[k] + at;                                                                             \
                for (int64_t i = 0; i < m; i++) q[i] = STORE(acc[i] * scale);                                        \
            }                                                                                                        \
        }                                                                                                            \
    }
#define SAME(x) (x)
/* ddp__f32_to_bf16 without branches, so that the loop is vectorised. */
static inline uint16_t to_bf16(float f) {
    union {
        float f;
        uint32_t u;
    } x = {f};
    uint32_t quiet = x.u >> 16 | 0x40, nearest = (x.u + 0x7fff + (x.u >> 16 & 1)) >> 16;
    return (uint16_t)(f != f ? quiet : nearest);
}
FLOATS(reduce_f32, float, float, SAME, SAME)
FLOATS(reduce_f64, double, double, SAME, SAME)
FLOATS(reduce_f16, uint16_t, float, ddp__f16_to_f32, ddp__f32_to_f16)
FLOATS(reduce_bf16, uint16_t, float, ddp__bf16_to_f32, to_bf16)

/* Integers wrap; bools are or-ed. */
#define INTS(name, T, U)                                                                                             \
    WIDE static void name(int reduce, int n_in, const void *const *in, const double *w, int n_out, void *const *out, \
                          int64_t n) {                                                                               \
        for (int64_t i = 0; i < n; i++) {                                                                            \
            U acc = 0;                                                                                               \
            bool first = true;                                                                                       \
            for (int r = 0; r < n_in; r++) {                                                                         \
                T v = ((const T *)in[r])[i];                                                                         \
                if (w[r] == 0) continue;                                                                             \
                if (first) acc = (U)v;                                                                               \
                else if (reduce == DDP_MIN) acc = v < (T)acc ? (U)v : acc;                                           \
                else if (reduce == DDP_MAX) acc = v > (T)acc ? (U)v : acc;                                           \
                else acc += (U)v;                                                                                    \
                first = false;                                                                                       \
            }                                                                                                        \
            for (int k = 0; k < n_out; k++) ((T *)out[k])[i] = (T)acc;                                               \
        }                                                                                                            \
    }
INTS(reduce_i64, int64_t, uint64_t)
INTS(reduce_i32, int32_t, uint32_t)
INTS(reduce_u8, uint8_t, uint8_t)

void ddp__reduce(ddp_dtype dtype, int reduce, int n_in, const void *const *in, const double *w, int n_out,
                 void *const *out, int64_t n) {
    double ones[DDP_REDUCE_MAX];
    if (reduce == DDP_MEAN && w[0] != 0 && all_are(w[0], n_in, w)) { /* a mean of equal weights needs none */
        for (int r = 0; r < n_in; r++) ones[r] = 1;
        w = ones;
    }
    bool plain = (reduce == DDP_SUM || reduce == DDP_MEAN) && all_are(1, n_in, w);
    if (dtype == DDP_F32 && plain && n_in == 2 && n_out <= 2) {
        sum2_f32(in[0], in[1], out[0], out[n_out - 1], (float)scale_of(reduce, 2, w), n);
        return;
    }
    switch (dtype) {
        case DDP_F32: reduce_f32(reduce, n_in, in, w, n_out, out, n); return;
        case DDP_F64: reduce_f64(reduce, n_in, in, w, n_out, out, n); return;
        case DDP_F16: reduce_f16(reduce, n_in, in, w, n_out, out, n); return;
        case DDP_BF16: reduce_bf16(reduce, n_in, in, w, n_out, out, n); return;
        case DDP_I64: reduce_i64(reduce, n_in, in, w, n_out, out, n); return;
        case DDP_I32: reduce_i32(reduce, n_in, in, w, n_out, out, n); return;
        case DDP_U8: reduce_u8(reduce, n_in, in, w, n_out, out, n); return;
        default: break;
    }
    reduce_u8(reduce == DDP_MIN ? DDP_MIN : DDP_MAX, n_in, in, w, n_out, out, n); /* bool: or */
}
