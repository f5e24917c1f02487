/* elementwise.c -- f32 loops over elementwise.def: all operands laid out alike, or the second a single number. */
#include <math.h>
#include <string.h>

#include "cpu.h"

/* The vector functions of libmvec, without -ffast-math: NaN and infinities keep their meaning. */
#pragma omp declare simd notinbranch
extern float expf(float);
#pragma omp declare simd notinbranch
extern float logf(float);
#pragma omp declare simd notinbranch
extern float tanhf(float);

static bool dense_f32(const ddp_tensor *t) { return t->m.dtype == DDP_F32 && ddp__meta_is_dense(&t->m); }

static const char *reject_binary(const ddp_call *c) {
    const ddp_tensor *y = c->out[0], *a = c->in[0], *b = c->in[1];
    if (y->m.dtype != DDP_F32 || a->m.dtype != DDP_F32 || b->m.dtype != DDP_F32) return "f32 only";
    if (!ddp__meta_is_dense(&y->m)) return "the result has gaps";
    if (!cpu_alike(a, y) && a->numel != 1) return "a is laid out otherwise";
    if (!cpu_alike(b, y) && b->numel != 1) return "b is laid out otherwise";
    return NULL;
}

static const char *reject_unary(const ddp_call *c) {
    if (!dense_f32(c->in[0]) || c->out[0]->m.dtype != DDP_F32) return "dense f32 only";
    return cpu_alike(c->in[0], c->out[0]) ? NULL : "the result is laid out otherwise";
}

/* One number on a side is loaded once; y may be a or b. */
#define LOOP_BINARY(name, expr)                                                                                        \
    static int run_##name(const ddp_call *c) {                                                                         \
        int64_t n = c->out[0]->numel;                                                                                  \
        float *y = cpu_f32(c->out[0]);                                                                                 \
        const float *p = cpu_f32(c->in[0]), *q = cpu_f32(c->in[1]);                                                    \
        int threads = cpu_threads(n);                                                                                  \
        if (c->in[1]->numel == 1 && n != 1) {                                                                          \
            const float b = *q;                                                                                        \
            if (c->in[0]->numel == 1) { /* both: a broadcast result of one value */                                    \
                const float a = *p;                                                                                    \
                for (int64_t i = 0; i < n; i++) y[i] = (expr);                                                         \
                return 0;                                                                                              \
            }                                                                                                          \
            _Pragma("omp parallel for simd schedule(static) num_threads(threads) if (threads > 1)") for (int64_t i =   \
                                                                                                             0;        \
                                                                                                         i < n; i++) { \
                const float a = p[i];                                                                                  \
                y[i] = (expr);                                                                                         \
            }                                                                                                          \
        } else if (c->in[0]->numel == 1 && n != 1) {                                                                   \
            const float a = *p;                                                                                        \
            _Pragma("omp parallel for simd schedule(static) num_threads(threads) if (threads > 1)") for (int64_t i =   \
                                                                                                             0;        \
                                                                                                         i < n; i++) { \
                const float b = q[i];                                                                                  \
                y[i] = (expr);                                                                                         \
            }                                                                                                          \
        } else {                                                                                                       \
            _Pragma("omp parallel for simd schedule(static) num_threads(threads) if (threads > 1)") for (int64_t i =   \
                                                                                                             0;        \
                                                                                                         i < n; i++) { \
                const float a = p[i], b = q[i];                                                                        \
                y[i] = (expr);                                                                                         \
            }                                                                                                          \
        }                                                                                                              \
        return 0;                                                                                                      \
    }                                                                                                                  \
    CPU_KERNEL(name, reject_binary, run_##name);

#define LOOP_UNARY(name, expr)                                                                                      \
    static int run_##name(const ddp_call *c) {                                                                      \
        int64_t n = c->out[0]->numel;                                                                               \
        float *y = cpu_f32(c->out[0]);                                                                              \
        const float *p = cpu_f32(c->in[0]);                                                                         \
        int threads = cpu_threads(n);                                                                               \
        _Pragma("omp parallel for simd schedule(static) num_threads(threads) if (threads > 1)") for (int64_t i = 0; \
                                                                                                     i < n; i++) {  \
            const float x = p[i];                                                                                   \
            y[i] = (expr);                                                                                          \
        }                                                                                                           \
        return 0;                                                                                                   \
    }                                                                                                               \
    CPU_KERNEL(name, reject_unary, run_##name);

/* powf and sign gain nothing here: the reference has them. */
#define T float
#define ADD(a, b) ((a) + (b))
#define SUB(a, b) ((a) - (b))
#define MUL(a, b) ((a) * (b))
#define EXP expf
#define LOG logf
#define SQRT sqrtf
#define TANH tanhf
#define POW powf
#define LIST_pow(name, expr)
#define LIST_sign(name, expr)
#define LIST_add LOOP_BINARY
#define LIST_sub LOOP_BINARY
#define LIST_mul LOOP_BINARY
#define LIST_maximum LOOP_BINARY
#define LIST_minimum LOOP_BINARY
#define LIST_relu_grad LOOP_BINARY
#define LIST_neg LOOP_UNARY
#define LIST_abs LOOP_UNARY
#define LIST_relu LOOP_UNARY
#define DDP_BINARY(op, expr) LIST_##op(op, expr)
#define DDP_UNARY(op, expr) LIST_##op(op, expr)
#define DDP_BINARY_FLOAT(op, expr) LOOP_BINARY(op, expr)
#define DDP_UNARY_FLOAT(op, expr) LOOP_UNARY(op, expr)
#include "../elementwise.def"

/* ---- copies and fills --------------------------------------------------------------------------------------------- */

static void copy_4(void *ctx, char *const *p, const int64_t *s, int64_t n) {
    (void)ctx;
    uint32_t *y = (uint32_t *)(void *)p[0];
    const uint32_t *x = (const uint32_t *)(const void *)p[1];
    if (s[0] == 1 && s[1] == 1) memcpy(y, x, (size_t)n * 4);
    else if (s[1] == 0)
        for (int64_t i = 0; i < n; i++) y[i * s[0]] = *x;
    else
        for (int64_t i = 0; i < n; i++) y[i * s[0]] = x[i * s[1]];
}

static const char *reject_copy(const ddp_call *c) {
    const ddp_tensor *src = c->in[c->n_in - 1];
    if (src->m.dtype != c->out[0]->m.dtype || ddp__dtype_bytes[src->m.dtype] != 4)
        return "4-byte elements of one dtype only";
    return NULL;
}

static int run_copy(const ddp_call *c) {
    ddp_tensor *t[2] = {c->out[0], c->in[c->n_in - 1]};
    if (cpu_alike(t[0], t[1]) && ddp__meta_is_dense(&t[0]->m)) {
        memcpy(ddp__ptr(t[0]), ddp__ptr(t[1]), (size_t)t[0]->numel * 4);
        return 0;
    }
    ddp_iter it;
    ddp__iter_init(&it, 2, t);
    ddp__iter_run(&it, copy_4, NULL);
    return 0;
}
CPU_KERNEL(clone, reject_copy, run_copy);
CPU_KERNEL(copy_, reject_copy, run_copy);

static const char *reject_fill(const ddp_call *c) { return dense_f32(c->out[0]) ? NULL : "dense f32 only"; }
static void fill(ddp_tensor *t, float v) {
    float *y = cpu_f32(t);
    for (int64_t i = 0; i < t->numel; i++) y[i] = v;
}
static int run_fill_(const ddp_call *c) {
    fill(c->out[0], (float)((const ddp_fill__attrs *)c->attrs)->value);
    return 0;
}
CPU_KERNEL(fill_, reject_fill, run_fill_);
static int run_full(const ddp_call *c) {
    fill(c->out[0], (float)((const ddp_full_attrs *)c->attrs)->value);
    return 0;
}
CPU_KERNEL(full, reject_fill, run_full);
