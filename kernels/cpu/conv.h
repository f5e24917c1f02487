/* conv.h -- what the convolution kernels share: one description of the three passes, vector loads and stores of rows
 * of channels. Activations are channels-last; weights keep [K, C, R, S] and are packed each call. */
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

/* What is done to sums before they are written, besides adding a bias. With scale, in registers,
 *   y = act(sums * scale + shift + residual), act none or relu;
 * without it y = act(sums + bias) + residual, which tiles.h's products alone do. */
typedef struct tile_more {
    int act;                    /* DDP_ACT_* */
    const float *scale, *shift; /* a column each, whole vectors of them; or NULL */
    const char *y;              /* of all rows; what follows is laid out as it is, of its dtype */
    const char *residual;       /* or NULL; may be y */
    char *pre;                  /* gets sums + bias; or NULL */
} tile_more;

typedef enum conv_pass { CONV_FORWARD, CONV_GRAD_INPUT, CONV_GRAD_WEIGHT } conv_pass;

/* y [N, K, Ho, Wo] = x [N, C, H, W] * w [K, C, R, S]; which of them is the result depends on the pass. */
typedef struct conv_shape {
    conv_pass pass;
    int64_t N, C, H, W, K, R, S, Ho, Wo, groups;
    const int64_t *stride, *padding, *dilation; /* [2], height first */
    ddp_tensor *x, *w, *y, *bias, *residual;
    const tile_more *more; /* with scale, or NULL: conv_run's */
    ddp_dtype dt;          /* f32, f16 or bf16 */
} conv_shape;

/* Reads the call's operands in their roles. */
#define conv_shape_of CPU_LOCAL(conv_shape_of)
DDP_LOCAL conv_shape conv_shape_of(const ddp_call *c);
/* The work of a pass for cpu_share: 16 multiplications as one element. */
static inline int64_t conv_work(const conv_shape *s) { return s->y->numel * (s->C / s->groups) * s->R * s->S / 16; }
/* Dtypes and layouts that all kernels here need: a reason, or NULL. */
#define conv_reject_common CPU_LOCAL(conv_reject_common)
DDP_LOCAL const char *conv_reject_common(const conv_shape *s);

/* The same, and what Winograd and gathered rows need besides: AVX2, one group. */
#define conv_reject_wide CPU_LOCAL(conv_reject_wide)
DDP_LOCAL const char *conv_reject_wide(const conv_shape *s);

/* Weights packed for a forward pass, kept from call to call (conv.c): NULL where they are not, and the caller packs. Only those of
 * parameters, outside of training, for a result of few pixels, where packing is a large part of the call. Goes back by
 * ddp__packed_give. */
enum { CONV_PACK_WINO, CONV_PACK_WINO_S2, CONV_PACK_DIRECT, CONV_PACK_PAIRS, CONV_PACK_AMX };
#define conv_packed CPU_LOCAL(conv_packed)
DDP_LOCAL ddp_packed *conv_packed(const conv_shape *s, int kind, size_t bytes);

/* A kernel on the call's shape; of conv_bn_act with `more` in it, made for this call (conv_bn_act.c). */
typedef int (*conv_kernel)(const ddp_call *c, const conv_shape *s);
#define conv_run CPU_LOCAL(conv_run)
DDP_LOCAL int conv_run(const ddp_call *c, conv_kernel run);
/* conv_bn_act by conv2d's fastest kernel, then a pass over y. */
#define conv_apart_reject CPU_LOCAL(conv_apart_reject)
DDP_LOCAL const char *conv_apart_reject(const ddp_call *c);
#define conv_apart_run CPU_LOCAL(conv_apart_run)
DDP_LOCAL int conv_apart_run(const ddp_call *c);

/* ---- kernels: when each refuses, and what it computes (see conv.c for their order) ---- */
#define conv_wino_reject CPU_LOCAL(conv_wino_reject)
DDP_LOCAL const char *conv_wino_reject(const ddp_call *c);
#define conv_wino_run CPU_LOCAL(conv_wino_run) /* forward and gradient of x */
DDP_LOCAL int conv_wino_run(const ddp_call *c, const conv_shape *s);
#define conv_wino_weight CPU_LOCAL(conv_wino_weight)
DDP_LOCAL int conv_wino_weight(const ddp_call *c);
#define conv_wino_s2_reject CPU_LOCAL(conv_wino_s2_reject)
DDP_LOCAL const char *conv_wino_s2_reject(const ddp_call *c);
#define conv_wino_s2_run CPU_LOCAL(conv_wino_s2_run) /* forward and gradient of x */
DDP_LOCAL int conv_wino_s2_run(const ddp_call *c, const conv_shape *s);
#define conv_wino_s2_weight CPU_LOCAL(conv_wino_s2_weight)
DDP_LOCAL int conv_wino_s2_weight(const ddp_call *c);
#define conv_depthwise_reject CPU_LOCAL(conv_depthwise_reject)
DDP_LOCAL const char *conv_depthwise_reject(const ddp_call *c);
#define conv_depthwise_run CPU_LOCAL(conv_depthwise_run) /* all passes */
DDP_LOCAL int conv_depthwise_run(const ddp_call *c, const conv_shape *s);
#define conv_direct_reject CPU_LOCAL(conv_direct_reject)
DDP_LOCAL const char *conv_direct_reject(const ddp_call *c);
#define conv_direct_run CPU_LOCAL(conv_direct_run) /* forward and gradient of x */
DDP_LOCAL int conv_direct_run(const ddp_call *c, const conv_shape *s);
#define conv_amx_reject CPU_LOCAL(conv_amx_reject)
DDP_LOCAL const char *conv_amx_reject(const ddp_call *c);
#define conv_amx_run CPU_LOCAL(conv_amx_run) /* forward and gradient of x */
DDP_LOCAL int conv_amx_run(const ddp_call *c, const conv_shape *s);
#define conv_amx_weight CPU_LOCAL(conv_amx_weight) /* gradient of w */
DDP_LOCAL int conv_amx_weight(const ddp_call *c);
#define conv_weight_run CPU_LOCAL(conv_weight_run) /* gradient of w; refuses what conv_direct_reject does */
DDP_LOCAL int conv_weight_run(const ddp_call *c);

/* ---- vectors of channels ---------------------------------------------------------------------------------------- */

/* n <= CPU_W values of dt at p, 0 beyond. */
CPU_INLINE cpu_vec conv_load(const void *p, ddp_dtype dt, int64_t n) {
    if (n >= CPU_W) return cpu_load(dt, p, 0);
    cpu_vec v = {0};
    memcpy(&v, p, (size_t)n * ddp__dtype_bytes[dt]);
    return cpu_load(dt, &v, 0);
}

/* The first n <= CPU_W of v, 16 bits rounded to nearest even. */
CPU_INLINE void conv_store(void *p, ddp_dtype dt, int64_t n, cpu_vec v) {
    if (n >= CPU_W) {
        cpu_store(dt, p, 0, v);
        return;
    }
    cpu_vec t = {0};
    cpu_store(dt, &t, 0, v);
    memcpy(p, &t, (size_t)n * ddp__dtype_bytes[dt]);
}

/* n <= CPU_W sums as they are written at `to`, by a `more` with scale; scale and shift of their columns. NaN passes relu. */
CPU_INLINE cpu_vec conv_more(const tile_more *m, ddp_dtype dt, int64_t n, cpu_vec sums, cpu_vec scale, cpu_vec shift,
                             const char *to) {
    cpu_vec v = sums * scale + shift;
    if (m->residual) v += conv_load(m->residual + (to - m->y), dt, n);
    return m->act == DDP_ACT_RELU ? (cpu_vec)(~(cpu_bits)(v < 0) & (cpu_bits)v) : v;
}

static inline int64_t conv_round_up(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

#endif
