/* elementwise.c -- f32 and f64 loops over elementwise.def, and the elementwise ops with attributes. map.c brings
 * operands of any layout side by side. */
#include <math.h>
#include <string.h>

#include "cpu.h"

/* The vector functions of libmvec, without -ffast-math: NaN and infinities keep their meaning. */
#define VECTOR_1(name, T) _Pragma("omp declare simd notinbranch") extern T name(T);
#define VECTOR_2(name, T) _Pragma("omp declare simd notinbranch") extern T name(T, T);
VECTOR_1(expf, float)
VECTOR_1(logf, float)
VECTOR_1(tanhf, float)
VECTOR_1(erff, float)
VECTOR_2(powf, float)
VECTOR_1(exp, double)
VECTOR_1(log, double)
VECTOR_1(tanh, double)
VECTOR_1(erf, double)
VECTOR_2(pow, double)

/* ---- loops ---- */

#define LOOP_2(name, T, R, expr)                                            \
    static void name(const void *ctx, char *const *p, int64_t n) {          \
        (void)ctx;                                                          \
        R *y = (R *)(void *)p[0];                                           \
        const T *u = (const T *)(void *)p[1], *v = (const T *)(void *)p[2]; \
        _Pragma("omp simd") for (int64_t i = 0; i < n; i++) {               \
            const T a = u[i], b = v[i];                                     \
            y[i] = (R)(expr);                                               \
        }                                                                   \
    }
#define LOOP_1(name, T, R, expr)                                   \
    static void name(const void *ctx, char *const *p, int64_t n) { \
        (void)ctx;                                                 \
        R *y = (R *)(void *)p[0];                                  \
        const T *u = (const T *)(void *)p[1];                      \
        _Pragma("omp simd") for (int64_t i = 0; i < n; i++) {      \
            const T x = u[i];                                      \
            y[i] = (R)(expr);                                      \
        }                                                          \
    }

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
#define DDP_BINARY(op, expr) LOOP_2(op##_f32, float, float, expr)
#define DDP_BINARY_FLOAT(op, expr) LOOP_2(op##_f32, float, float, expr)
#define DDP_COMPARE(op, expr) LOOP_2(op##_f32, float, uint8_t, expr)
#define DDP_UNARY(op, expr) LOOP_1(op##_f32, float, float, expr)
#define DDP_UNARY_FLOAT(op, expr) LOOP_1(op##_f32, float, float, expr)
#define DDP_VARIANT(op, expr) LOOP_1(op##_f32, float, float, expr)
#define DDP_VARIANT_2(op, expr) LOOP_2(op##_f32, float, float, expr)
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
#define DDP_BINARY(op, expr) LOOP_2(op##_f64, double, double, expr)
#define DDP_BINARY_FLOAT(op, expr) LOOP_2(op##_f64, double, double, expr)
#define DDP_COMPARE(op, expr) LOOP_2(op##_f64, double, uint8_t, expr)
#define DDP_UNARY(op, expr) LOOP_1(op##_f64, double, double, expr)
#define DDP_UNARY_FLOAT(op, expr) LOOP_1(op##_f64, double, double, expr)
#define DDP_VARIANT(op, expr) LOOP_1(op##_f64, double, double, expr)
#define DDP_VARIANT_2(op, expr) LOOP_2(op##_f64, double, double, expr)
#include "../elementwise.def"
#undef T

#define T int64_t
#define DDP_COMPARE(op, expr) LOOP_2(op##_i64, int64_t, uint8_t, expr)
#include "../elementwise.def"
#undef T

/* ---- kernels ---- */

static const char *reject_float(const ddp_call *c) { return ddp__is_float(c->in[0]->m.dtype) ? NULL : "floats only"; }
static const char *reject_compare(const ddp_call *c) { return c->in[0]->m.dtype == DDP_I64 ? NULL : reject_float(c); }

static int run_2(const ddp_call *c, cpu_loop f32, cpu_loop f64, cpu_loop i64) {
    ddp_tensor *t[3] = {c->out[0], c->in[0], c->in[1]};
    ddp_dtype d = ddp__wide(c->in[0]->m.dtype);
    cpu_map_f32(3, t, d == DDP_F32 ? f32 : d == DDP_F64 ? f64 : i64, NULL);
    return 0;
}
static int run_1(const ddp_call *c, cpu_loop f32, cpu_loop f64) {
    ddp_tensor *t[2] = {c->out[0], c->in[0]};
    cpu_map_f32(2, t, c->in[0]->m.dtype == DDP_F64 ? f64 : f32, NULL);
    return 0;
}

#define KERNEL_2(op)                                                                      \
    static int run_##op(const ddp_call *c) { return run_2(c, op##_f32, op##_f64, NULL); } \
    CPU_KERNEL(op, reject_float, run_##op);
#define KERNEL_1(op)                                                                \
    static int run_##op(const ddp_call *c) { return run_1(c, op##_f32, op##_f64); } \
    CPU_KERNEL(op, reject_float, run_##op);
#define KERNEL_COMPARE(op)                                                                    \
    static int run_##op(const ddp_call *c) { return run_2(c, op##_f32, op##_f64, op##_i64); } \
    CPU_KERNEL(op, reject_compare, run_##op);
#define DDP_BINARY(op, expr) KERNEL_2(op)
#define DDP_BINARY_FLOAT(op, expr) KERNEL_2(op)
#define DDP_COMPARE(op, expr) KERNEL_COMPARE(op)
#define DDP_UNARY(op, expr) KERNEL_1(op)
#define DDP_UNARY_FLOAT(op, expr) KERNEL_1(op)
#include "../elementwise.def"

static int run_gelu(const ddp_call *c) {
    bool t = ((const ddp_gelu_attrs *)c->attrs)->tanh;
    return run_1(c, t ? gelu_tanh_f32 : gelu_exact_f32, t ? gelu_tanh_f64 : gelu_exact_f64);
}
CPU_KERNEL(gelu, reject_float, run_gelu);
static int run_gelu_grad(const ddp_call *c) {
    bool t = ((const ddp_gelu_grad_attrs *)c->attrs)->tanh;
    return run_2(c, t ? gelu_grad_tanh_f32 : gelu_grad_exact_f32, t ? gelu_grad_tanh_f64 : gelu_grad_exact_f64, NULL);
}
CPU_KERNEL(gelu_grad, reject_float, run_gelu_grad);

/* ---- activations for kernels that end in one: the same loops ---- */

void cpu_act(int act, float *x, int64_t n) {
    char *p[2] = {(char *)x, (char *)x};
    if (act == DDP_ACT_RELU) relu_f32(NULL, p, n);
    else if (act == DDP_ACT_GELU) gelu_exact_f32(NULL, p, n);
    else if (act == DDP_ACT_GELU_TANH) gelu_tanh_f32(NULL, p, n);
}
void cpu_act_grad(int act, const float *g, const float *from, float *to, int64_t n) {
    char *p[3] = {(char *)to, (char *)(uintptr_t)g, (char *)(uintptr_t)from};
    if (act == DDP_ACT_RELU) relu_grad_f32(NULL, p, n);
    else if (act == DDP_ACT_GELU) gelu_grad_exact_f32(NULL, p, n);
    else gelu_grad_tanh_f32(NULL, p, n);
}

/* ---- where, clamp ---- */

#define LOOP_WHERE(name, T)                                                 \
    static void name(const void *ctx, char *const *p, int64_t n) {          \
        (void)ctx;                                                          \
        T *y = (T *)(void *)p[0];                                           \
        const uint8_t *c = (const uint8_t *)p[1];                           \
        const T *u = (const T *)(void *)p[2], *v = (const T *)(void *)p[3]; \
        _Pragma("omp simd") for (int64_t i = 0; i < n; i++) {               \
            const T a = u[i], b = v[i];                                     \
            y[i] = c[i] ? a : b;                                            \
        }                                                                   \
    }
LOOP_WHERE(where_1, uint8_t)
LOOP_WHERE(where_2, uint16_t)
LOOP_WHERE(where_4, uint32_t)
LOOP_WHERE(where_8, uint64_t)

static int run_where(const ddp_call *c) {
    ddp_tensor *t[4] = {c->out[0], c->in[0], c->in[1], c->in[2]};
    int bytes = ddp__dtype_bytes[c->out[0]->m.dtype];
    cpu_map(4, t, bytes == 4 ? where_4 : bytes == 8 ? where_8 : bytes == 2 ? where_2 : where_1, NULL);
    return 0;
}
CPU_KERNEL(where, NULL, run_where);

#define LOOP_CLAMP(name, T)                                        \
    static void name(const void *ctx, char *const *p, int64_t n) { \
        const ddp_clamp_attrs *a = ctx;                            \
        const T lo = (T)a->min, hi = (T)a->max;                    \
        T *y = (T *)(void *)p[0];                                  \
        const T *u = (const T *)(void *)p[1];                      \
        _Pragma("omp simd") for (int64_t i = 0; i < n; i++) {      \
            const T x = u[i];                                      \
            y[i] = x < lo ? lo : x > hi ? hi : x;                  \
        }                                                          \
    }
LOOP_CLAMP(clamp_f32, float)
LOOP_CLAMP(clamp_f64, double)

static int run_clamp(const ddp_call *c) {
    ddp_tensor *t[2] = {c->out[0], c->in[0]};
    cpu_map_f32(2, t, c->in[0]->m.dtype == DDP_F64 ? clamp_f64 : clamp_f32, c->attrs);
    return 0;
}
CPU_KERNEL(clamp, reject_float, run_clamp);

/* ---- casts ---- */

/* As ddp__store: what is out of range saturates, NaN is 0. */
static inline int64_t to_i64(double v) {
    if (!(v > -9223372036854775808.0)) return v == v ? INT64_MIN : 0;
    return v >= 9223372036854775808.0 ? INT64_MAX : (int64_t)v;
}

LOOP_1(f32_f64, float, double, x)
LOOP_1(f32_i64, float, int64_t, to_i64(x))
LOOP_1(f32_i32, float, int32_t, to_i64(x))
LOOP_1(f32_u8, float, uint8_t, to_i64(x))
LOOP_1(f32_bool, float, uint8_t, x != 0)
LOOP_1(f64_f32, double, float, x)
LOOP_1(f64_i64, double, int64_t, to_i64(x))
LOOP_1(f64_i32, double, int32_t, to_i64(x))
LOOP_1(f64_bool, double, uint8_t, x != 0)
LOOP_1(i64_f32, int64_t, float, (double)x)
LOOP_1(i64_f64, int64_t, double, x)
LOOP_1(i64_i32, int64_t, int32_t, x)
LOOP_1(i64_bool, int64_t, uint8_t, x != 0)
LOOP_1(i32_f32, int32_t, float, (double)x)
LOOP_1(i32_f64, int32_t, double, x)
LOOP_1(i32_i64, int32_t, int64_t, x)
LOOP_1(u8_f32, uint8_t, float, x)
LOOP_1(u8_f64, uint8_t, double, x)
LOOP_1(u8_i64, uint8_t, int64_t, x)

#define LOOP_HALF(name, d)                                               \
    static void f32_##name(const void *ctx, char *const *p, int64_t n) { \
        (void)ctx;                                                       \
        cpu_narrow(d, (const float *)(const void *)p[1], p[0], 0, n);    \
    }                                                                    \
    static void name##_f32(const void *ctx, char *const *p, int64_t n) { \
        (void)ctx;                                                       \
        cpu_widen(d, p[1], 0, (float *)(void *)p[0], n);                 \
    }
LOOP_HALF(f16, DDP_F16)
LOOP_HALF(bf16, DDP_BF16)
LOOP_1(f32_f32, float, float, x) /* between f16 and bf16 */

static const cpu_loop casts[DDP_DTYPES][DDP_DTYPES] = {
    [DDP_F32] = {[DDP_F32] = f32_f32,
                 [DDP_F64] = f32_f64,
                 [DDP_F16] = f32_f16,
                 [DDP_BF16] = f32_bf16,
                 [DDP_I64] = f32_i64,
                 [DDP_I32] = f32_i32,
                 [DDP_U8] = f32_u8,
                 [DDP_BOOL] = f32_bool},
    [DDP_F64] = {[DDP_F32] = f64_f32, [DDP_I64] = f64_i64, [DDP_I32] = f64_i32, [DDP_BOOL] = f64_bool},
    [DDP_F16] = {[DDP_F32] = f16_f32},
    [DDP_BF16] = {[DDP_F32] = bf16_f32},
    [DDP_I64] = {[DDP_F32] = i64_f32, [DDP_F64] = i64_f64, [DDP_I32] = i64_i32, [DDP_BOOL] = i64_bool},
    [DDP_I32] = {[DDP_F32] = i32_f32, [DDP_F64] = i32_f64, [DDP_I64] = i32_i64},
    [DDP_U8] = {[DDP_F32] = u8_f32, [DDP_F64] = u8_f64, [DDP_I64] = u8_i64},
    [DDP_BOOL] = {[DDP_F32] = u8_f32, [DDP_F64] = u8_f64, [DDP_I64] = u8_i64},
};

static const char *reject_cast(const ddp_call *c) {
    ddp_dtype to = c->out[0]->m.dtype, from = c->in[c->n_in - 1]->m.dtype;
    return to == from || casts[ddp__wide(from)][ddp__wide(to)] ? NULL : "no loop for this pair of dtypes";
}
static int run_cast(const ddp_call *c) {
    ddp_tensor *t[2] = {c->out[0], c->in[c->n_in - 1]};
    ddp_dtype to = t[0]->m.dtype, from = t[1]->m.dtype;
    if (to == from) cpu_copy(t[0], t[1]);
    else if (casts[from][to]) cpu_map(2, t, casts[from][to], NULL);
    else cpu_map_f32(2, t, casts[ddp__wide(from)][ddp__wide(to)], NULL); /* by way of f32 */
    return 0;
}
CPU_KERNEL(cast, reject_cast, run_cast);
CPU_KERNEL(clone, reject_cast, run_cast);
CPU_KERNEL(copy_, reject_cast, run_cast);

/* ---- fills ---- */

#define LOOP_FILL(name, T)                                            \
    static void name(const void *ctx, char *const *p, int64_t n) {    \
        T *y = (T *)(void *)p[0];                                     \
        T v;                                                          \
        memcpy(&v, ctx, sizeof v);                                    \
        _Pragma("omp simd") for (int64_t i = 0; i < n; i++) y[i] = v; \
    }
LOOP_FILL(fill_1, uint8_t)
LOOP_FILL(fill_2, uint16_t)
LOOP_FILL(fill_4, uint32_t)
LOOP_FILL(fill_8, uint64_t)

static int fill(ddp_tensor *t, double value) {
    uint64_t bits = 0;
    int bytes = ddp__dtype_bytes[t->m.dtype];
    ddp__store(t->m.dtype, &bits, 0, value);
    cpu_map(1, &t, bytes == 4 ? fill_4 : bytes == 8 ? fill_8 : bytes == 2 ? fill_2 : fill_1, &bits);
    return 0;
}
static int run_fill_(const ddp_call *c) { return fill(c->out[0], ((const ddp_fill__attrs *)c->attrs)->value); }
CPU_KERNEL(fill_, NULL, run_fill_);
static int run_full(const ddp_call *c) { return fill(c->out[0], ((const ddp_full_attrs *)c->attrs)->value); }
CPU_KERNEL(full, NULL, run_full);
