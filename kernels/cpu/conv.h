/* conv.h -- what the convolution kernels share: one description of the three passes, vector loads and stores of f32 and bf16
 * rows of channels, register tiles. Activations are channels-last; weights keep [K, C, R, S] and are packed each call. */
#ifndef DDP_CPU_CONV_H
#define DDP_CPU_CONV_H

#include <string.h>

#include "../../core/mem/mem.h"
#include "cpu.h"

/* Rows a register tile, and its columns: two vectors. */
#if defined(__AVX512F__)
enum { CONV_MR = 12 };
#elif defined(__AVX2__)
enum { CONV_MR = 6 };
#else
enum { CONV_MR = 4 };
#endif
enum { CONV_NR = 2 * CPU_W };

typedef enum conv_pass { CONV_FORWARD, CONV_GRAD_INPUT, CONV_GRAD_WEIGHT } conv_pass;

/* y [N, K, Ho, Wo] = x [N, C, H, W] * w [K, C, R, S]; which of them is the result depends on the pass. */
typedef struct conv_shape {
    conv_pass pass;
    int64_t N, C, H, W, K, R, S, Ho, Wo, groups;
    const int64_t *stride, *padding, *dilation; /* [2], height first */
    ddp_tensor *x, *w, *y, *bias;
    bool bf16;
} conv_shape;

/* Reads the call's operands in their roles. */
#define conv_shape_of CPU_LOCAL(conv_shape_of)
DDP_LOCAL conv_shape conv_shape_of(const ddp_call *c);
/* The work of a pass for cpu_share: 16 multiplications as one element. */
static inline int64_t conv_work(const conv_shape *s) { return s->y->numel * (s->C / s->groups) * s->R * s->S / 16; }
/* Dtypes and layouts that all kernels here need: a reason, or NULL. */
#define conv_reject_common CPU_LOCAL(conv_reject_common)
DDP_LOCAL const char *conv_reject_common(const conv_shape *s);

/* ---- kernels: when each refuses, and what it computes (see conv.c for their order) ---- */
#define conv_wino_reject CPU_LOCAL(conv_wino_reject)
DDP_LOCAL const char *conv_wino_reject(const ddp_call *c);
#define conv_wino_run CPU_LOCAL(conv_wino_run) /* forward and gradient of x */
DDP_LOCAL int conv_wino_run(const ddp_call *c);
#define conv_wino_weight CPU_LOCAL(conv_wino_weight)
DDP_LOCAL int conv_wino_weight(const ddp_call *c);
#define conv_direct_reject CPU_LOCAL(conv_direct_reject)
DDP_LOCAL const char *conv_direct_reject(const ddp_call *c);
#define conv_direct_run CPU_LOCAL(conv_direct_run) /* forward and gradient of x */
DDP_LOCAL int conv_direct_run(const ddp_call *c);
#define conv_weight_reject CPU_LOCAL(conv_weight_reject)
DDP_LOCAL const char *conv_weight_reject(const ddp_call *c);
#define conv_weight_run CPU_LOCAL(conv_weight_run) /* gradient of w */
DDP_LOCAL int conv_weight_run(const ddp_call *c);

/* ---- vectors of channels ---------------------------------------------------------------------------------------- */

/* n <= CPU_W values of f32 or bf16 at p, 0 beyond. */
CPU_INLINE cpu_vec conv_load(const void *p, bool bf16, int64_t n) {
    cpu_halves h = {0};
    cpu_vec v = {0};
    if (n >= CPU_W) return cpu_load(bf16 ? DDP_BF16 : DDP_F32, p, 0);
    if (bf16) {
        memcpy(&h, p, (size_t)n * 2);
        return cpu_from_bf16(h);
    }
    memcpy(&v, p, (size_t)n * 4);
    return v;
}

/* The first n <= CPU_W of v, bf16 rounded to nearest even. */
CPU_INLINE void conv_store(void *p, bool bf16, int64_t n, cpu_vec v) {
    if (n >= CPU_W) {
        cpu_store(bf16 ? DDP_BF16 : DDP_F32, p, 0, v);
    } else if (bf16) {
        cpu_halves h = cpu_to_bf16(v);
        memcpy(p, &h, (size_t)n * 2);
    } else memcpy(p, &v, (size_t)n * 4);
}

/* to[0..n) = n bf16 values as f32. */
static inline void conv_widen(const char *from, int64_t n, float *to) {
    for (int64_t i = 0; i < n; i += CPU_W) {
        cpu_vec v = conv_load(from + i * 2, true, n - i);
        conv_store(to + i, false, n - i, v);
    }
}

static inline int64_t conv_round_up(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

#endif
