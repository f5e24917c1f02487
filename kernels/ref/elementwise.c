/* elementwise.c -- reference loops of elementwise ops, from elementwise.def. */
#include <math.h>

#include "ref.h"

/* Integer arithmetic wraps: it goes through the unsigned type of the same width. */
#define WRAP_ADD(a, b) ((T)((U)(a) + (U)(b)))
#define WRAP_SUB(a, b) ((T)((U)(a) - (U)(b)))
#define WRAP_MUL(a, b) ((T)((U)(a) * (U)(b)))

#define RUN_BINARY(op, suffix, expr)                                                                        \
    static void op##_##suffix(void *ctx, char *const *p, const int64_t *s, int64_t n) {                     \
        (void)ctx;                                                                                          \
        for (int64_t i = 0; i < n; i++) {                                                                   \
            T a = ((const T *)(const void *)p[1])[i * s[1]], b = ((const T *)(const void *)p[2])[i * s[2]]; \
            ((T *)(void *)p[0])[i * s[0]] = (T)(expr);                                                      \
        }                                                                                                   \
    }
#define RUN_COMPARE(op, suffix, expr)                                                                       \
    static void op##_##suffix(void *ctx, char *const *p, const int64_t *s, int64_t n) {                     \
        (void)ctx;                                                                                          \
        for (int64_t i = 0; i < n; i++) {                                                                   \
            T a = ((const T *)(const void *)p[1])[i * s[1]], b = ((const T *)(const void *)p[2])[i * s[2]]; \
            ((uint8_t *)p[0])[i * s[0]] = (uint8_t)(expr);                                                  \
        }                                                                                                   \
    }
#define RUN_UNARY(op, suffix, expr)                                                     \
    static void op##_##suffix(void *ctx, char *const *p, const int64_t *s, int64_t n) { \
        (void)ctx;                                                                      \
        for (int64_t i = 0; i < n; i++) {                                               \
            T x = ((const T *)(const void *)p[1])[i * s[1]];                            \
            ((T *)(void *)p[0])[i * s[0]] = (T)(expr);                                  \
        }                                                                               \
    }

#pragma GCC diagnostic ignored "-Wtype-limits" /* x < 0 of unsigned types: the expression stands for all types */

/* ---- floats ---------------------------------------------------------------------------------------------------------
 */
#define ADD(a, b) ((a) + (b))
#define SUB(a, b) ((a) - (b))
#define MUL(a, b) ((a) * (b))

#define T float
#define POW powf
#define EXP expf
#define LOG logf
#define SQRT sqrtf
#define TANH tanhf
#define ERF erff
#define DDP_BINARY(op, expr) RUN_BINARY(op, f32, expr)
#define DDP_BINARY_FLOAT(op, expr) RUN_BINARY(op, f32, expr)
#define DDP_COMPARE(op, expr) RUN_COMPARE(op, f32, expr)
#define DDP_UNARY(op, expr) RUN_UNARY(op, f32, expr)
#define DDP_UNARY_FLOAT(op, expr) RUN_UNARY(op, f32, expr)
#define DDP_VARIANT(op, expr) RUN_UNARY(op, f32, expr)
#define DDP_VARIANT_2(op, expr) RUN_BINARY(op, f32, expr)
#include "../elementwise.def"
#undef T
#undef POW
#undef EXP
#undef LOG
#undef SQRT
#undef TANH
#undef ERF

#define T double
#define POW pow
#define EXP exp
#define LOG log
#define SQRT sqrt
#define TANH tanh
#define ERF erf
#define DDP_BINARY(op, expr) RUN_BINARY(op, f64, expr)
#define DDP_BINARY_FLOAT(op, expr) RUN_BINARY(op, f64, expr)
#define DDP_COMPARE(op, expr) RUN_COMPARE(op, f64, expr)
#define DDP_UNARY(op, expr) RUN_UNARY(op, f64, expr)
#define DDP_UNARY_FLOAT(op, expr) RUN_UNARY(op, f64, expr)
#define DDP_VARIANT(op, expr) RUN_UNARY(op, f64, expr)
#define DDP_VARIANT_2(op, expr) RUN_BINARY(op, f64, expr)
#include "../elementwise.def"
#undef T
#undef POW
#undef EXP
#undef LOG
#undef SQRT
#undef TANH
#undef ERF

#undef ADD
#undef SUB
#undef MUL

/* ---- integers ---- */
#define ADD WRAP_ADD
#define SUB WRAP_SUB
#define MUL WRAP_MUL

/* a to the b by squaring, wrapping; negative exponents give 0 but for 1 and -1. */
static int64_t int_pow(int64_t a, int64_t b) {
    if (b < 0) return a == 1 ? 1 : a == -1 ? (b % 2 ? -1 : 1) : 0;
    uint64_t r = 1, x = (uint64_t)a;
    for (; b; b >>= 1, x *= x)
        if (b & 1) r *= x;
    return (int64_t)r;
}
#define POW(a, b) int_pow((int64_t)(a), (int64_t)(b))

#define T int64_t
#define U uint64_t
#define DDP_BINARY(op, expr) RUN_BINARY(op, i64, expr)
#define DDP_COMPARE(op, expr) RUN_COMPARE(op, i64, expr)
#define DDP_UNARY(op, expr) RUN_UNARY(op, i64, expr)
#include "../elementwise.def"
#undef T
#undef U
#define T int32_t
#define U uint32_t
#define DDP_BINARY(op, expr) RUN_BINARY(op, i32, expr)
#define DDP_COMPARE(op, expr) RUN_COMPARE(op, i32, expr)
#define DDP_UNARY(op, expr) RUN_UNARY(op, i32, expr)
#include "../elementwise.def"
#undef T
#undef U
#define T uint8_t
#define U uint8_t
#define DDP_BINARY(op, expr) RUN_BINARY(op, u8, expr)
#define DDP_COMPARE(op, expr) RUN_COMPARE(op, u8, expr)
#define DDP_UNARY(op, expr) RUN_UNARY(op, u8, expr)
#include "../elementwise.def"
#undef T
#undef U

/* ---- the choice by dtype ---- */

/* f16 and bf16: a few elements at a time as f32, the result rounded. A bool result stays as it is. */
typedef struct halves {
    ddp_run_fn fn; /* of f32 */
    int n;
    ddp_dtype dtype[3];
} halves;

static void halves_run(void *ctx, char *const *p, const int64_t *s, int64_t n) {
    enum { PART = 64 };
    static const int64_t one[3] = {1, 1, 1};
    const halves *h = ctx;
    float buffer[3][PART];
    char *q[3] = {(char *)buffer[0], (char *)buffer[1], (char *)buffer[2]};
    ddp_dtype from = h->dtype[0] == DDP_BOOL ? DDP_BOOL : DDP_F32;
    for (int64_t at = 0; at < n; at += PART) {
        int64_t m = n - at < PART ? n - at : PART;
        for (int k = 1; k < h->n; k++)
            for (int64_t i = 0; i < m; i++) buffer[k][i] = (float)ddp__load(h->dtype[k], p[k], (at + i) * s[k]);
        h->fn(NULL, q, one, m);
        for (int64_t i = 0; i < m; i++) ddp__store(h->dtype[0], p[0], (at + i) * s[0], ddp__load(from, buffer[0], i));
    }
}

static int walk(const ddp_call *c, const ddp_run_fn *by_dtype) {
    ddp_tensor *t[3] = {c->out[0], c->in[0], c->n_in > 1 ? c->in[1] : NULL};
    halves h = {.n = 1 + c->n_in};
    bool any = false;
    for (int k = 0; k < h.n; k++) any |= ddp__is_half(h.dtype[k] = t[k]->m.dtype);
    h.fn = by_dtype[ddp__wide(h.dtype[1])];
    ddp_iter it;
    ddp__iter_init(&it, h.n, t);
    ddp__iter_run(&it, any ? halves_run : h.fn, &h);
    return 0;
}

/* A bool is 0 or 1, so sums and products of bools are stored through != 0. */
static void bool_add(void *ctx, char *const *p, const int64_t *s, int64_t n) {
    (void)ctx;
    for (int64_t i = 0; i < n; i++) p[0][i * s[0]] = (p[1][i * s[1]] | p[2][i * s[2]]) != 0;
}
#define BOOL_add bool_add
#define BOOL_mul mul_u8
#define BOOL_maximum maximum_u8
#define BOOL_minimum minimum_u8
#define BOOL_sub NULL
#define BOOL_pow NULL
#define BOOL_relu_grad NULL
#define BOOL_neg NULL
#define BOOL_abs NULL
#define BOOL_sign NULL
#define BOOL_relu NULL

#define ALL_TYPES(op)                                                                                               \
    {                                                                                                               \
        [DDP_F32] = op##_f32, [DDP_F64] = op##_f64, [DDP_I64] = op##_i64, [DDP_I32] = op##_i32, [DDP_U8] = op##_u8, \
        [DDP_BOOL] = BOOL_##op                                                                                      \
    }
#define ENTRY(op, ...)                                              \
    static int run_##op(const ddp_call *c) {                        \
        static const ddp_run_fn by_dtype[DDP_DTYPES] = __VA_ARGS__; \
        return walk(c, by_dtype);                                   \
    }                                                               \
    DDP_REF_KERNEL(op, run_##op);
#define DDP_BINARY(op, expr) ENTRY(op, ALL_TYPES(op))
#define DDP_UNARY(op, expr) ENTRY(op, ALL_TYPES(op))
#define DDP_BINARY_FLOAT(op, expr) ENTRY(op, {[DDP_F32] = op##_f32, [DDP_F64] = op##_f64})
#define DDP_UNARY_FLOAT(op, expr) ENTRY(op, {[DDP_F32] = op##_f32, [DDP_F64] = op##_f64})
#define DDP_COMPARE(op, expr)        \
    ENTRY(op, {[DDP_F32] = op##_f32, \
               [DDP_F64] = op##_f64, \
               [DDP_I64] = op##_i64, \
               [DDP_I32] = op##_i32, \
               [DDP_U8] = op##_u8,   \
               [DDP_BOOL] = op##_u8})
#include "../elementwise.def"

/* ---- elementwise ops with attributes, and copies ---- */

static int run_gelu(const ddp_call *c) {
    static const ddp_run_fn exact[DDP_DTYPES] = {[DDP_F32] = gelu_exact_f32, [DDP_F64] = gelu_exact_f64};
    static const ddp_run_fn approximate[DDP_DTYPES] = {[DDP_F32] = gelu_tanh_f32, [DDP_F64] = gelu_tanh_f64};
    return walk(c, ((const ddp_gelu_attrs *)c->attrs)->tanh ? approximate : exact);
}
DDP_REF_KERNEL(gelu, run_gelu);
static int run_gelu_grad(const ddp_call *c) {
    static const ddp_run_fn exact[DDP_DTYPES] = {[DDP_F32] = gelu_grad_exact_f32, [DDP_F64] = gelu_grad_exact_f64};
    static const ddp_run_fn approximate[DDP_DTYPES] = {[DDP_F32] = gelu_grad_tanh_f32, [DDP_F64] = gelu_grad_tanh_f64};
    return walk(c, ((const ddp_gelu_grad_attrs *)c->attrs)->tanh ? approximate : exact);
}
DDP_REF_KERNEL(gelu_grad, run_gelu_grad);

static int run_clamp(const ddp_call *c) {
    const ddp_clamp_attrs *a = c->attrs;
    for (int64_t i = 0; i < c->out[0]->numel; i++) {
        double x = ref_get(c->in[0], i);
        ref_put(c->out[0], i, x < a->min ? a->min : x > a->max ? a->max : x);
    }
    return 0;
}
DDP_REF_KERNEL(clamp, run_clamp);

static void copy_run(void *ctx, char *const *p, const int64_t *s, int64_t n) {
    const ddp_dtype *d = ctx;
    for (int64_t i = 0; i < n; i++) ddp__store(d[0], p[0], i * s[0], ddp__load(d[1], p[1], i * s[1]));
}

/* Of one dtype the bytes go as they are: i64 keeps all its bits. */
static void copy_same(void *ctx, char *const *p, const int64_t *s, int64_t n) {
    int bytes = ddp__dtype_bytes[*(const ddp_dtype *)ctx];
    for (int64_t i = 0; i < n; i++) __builtin_memcpy(p[0] + i * s[0] * bytes, p[1] + i * s[1] * bytes, (size_t)bytes);
}

static void copy_i64(void *ctx, char *const *p, const int64_t *s, int64_t n) { /* to the narrower integers, wrapping */
    const ddp_dtype *d = ctx;
    for (int64_t i = 0; i < n; i++) {
        int64_t v = ((const int64_t *)(const void *)p[1])[i * s[1]];
        if (d[0] == DDP_I32) ((int32_t *)(void *)p[0])[i * s[0]] = (int32_t)v;
        else ((uint8_t *)p[0])[i * s[0]] = d[0] == DDP_BOOL ? v != 0 : (uint8_t)v;
    }
}

static int copy(ddp_tensor *dst, ddp_tensor *src) {
    ddp_tensor *t[2] = {dst, src};
    ddp_dtype d[2] = {dst->m.dtype, src->m.dtype};
    ddp_iter it;
    ddp__iter_init(&it, 2, t);
    ddp_run_fn fn = d[0] == d[1] ? copy_same : d[1] == DDP_I64 && d[0] > DDP_I64 ? copy_i64 : copy_run;
    ddp__iter_run(&it, fn, d);
    return 0;
}

static int run_cast(const ddp_call *c) { return copy(c->out[0], c->in[0]); }
DDP_REF_KERNEL(cast, run_cast);
DDP_REF_KERNEL(clone, run_cast);
static int run_copy_(const ddp_call *c) { return copy(c->out[0], c->in[1]); }
DDP_REF_KERNEL(copy_, run_copy_);

static void fill_run(void *ctx, char *const *p, const int64_t *s, int64_t n) {
    const ddp_dtype *d = ((void **)ctx)[0];
    const double *v = ((void **)ctx)[1];
    for (int64_t i = 0; i < n; i++) ddp__store(*d, p[0], i * s[0], *v);
}

static int fill(ddp_tensor *t, double value) {
    void *ctx[2] = {&t->m.dtype, &value};
    ddp_iter it;
    ddp__iter_init(&it, 1, &t);
    ddp__iter_run(&it, fill_run, ctx);
    return 0;
}

static int run_fill_(const ddp_call *c) { return fill(c->out[0], ((const ddp_fill__attrs *)c->attrs)->value); }
DDP_REF_KERNEL(fill_, run_fill_);
static int run_full(const ddp_call *c) { return fill(c->out[0], ((const ddp_full_attrs *)c->attrs)->value); }
DDP_REF_KERNEL(full, run_full);

static void where_run(void *ctx, char *const *p, const int64_t *s, int64_t n) {
    int bytes = *(const int *)ctx;
    for (int64_t i = 0; i < n; i++) {
        const char *from = p[1][i * s[1]] ? p[2] + i * s[2] * bytes : p[3] + i * s[3] * bytes;
        __builtin_memcpy(p[0] + i * s[0] * bytes, from, (size_t)bytes);
    }
}

static int run_where(const ddp_call *c) {
    ddp_tensor *t[4] = {c->out[0], c->in[0], c->in[1], c->in[2]};
    int bytes = ddp__dtype_bytes[c->out[0]->m.dtype];
    ddp_iter it;
    ddp__iter_init(&it, 4, t);
    ddp__iter_run(&it, where_run, &bytes);
    return 0;
}
DDP_REF_KERNEL(where, run_where);
