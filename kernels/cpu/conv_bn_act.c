/* conv_bn_act.c -- a convolution with batch norm by running statistics, residual and relu: a scale and a shift for each channel, which
 * the convolutions' kernels apply where sums leave the registers; and, where none of them takes the call, conv2d's fastest and a
 * pass over y. */
#include <math.h>

#include "conv.h"

static float channel(const ddp_tensor *t, int64_t k, float absent) {
    return t ? cpu_get(t->m.dtype, ddp__ptr(t), k * t->m.stride[0]) : absent;
}

/* Sums become sums * scale + shift, K of each. Of an infinite weight: NaN. */
static void find_scales(const ddp_call *c, int64_t K, float *scale, float *shift) {
    const ddp_conv_bn_act_attrs *a = c->attrs;
    for (int64_t k = 0; k < K; k++) {
        double s = channel(c->in[3], k, 1) / sqrt(channel(c->in[6], k, 1) + a->eps);
        scale[k] = (float)s;
        shift[k] = (float)(((double)channel(c->in[2], k, 0) - channel(c->in[5], k, 0)) * s + channel(c->in[4], k, 0));
    }
}

int conv_run(const ddp_call *c, conv_kernel run) {
    conv_shape s = conv_shape_of(c);
    if (c->op->id != DDP_OP_conv_bn_act) return run(c, &s);
    int64_t Kp = conv_round_up(s.K, CPU_W);
    size_t bytes = (size_t)(2 * Kp) * sizeof(float);
    float *scale = ddp__scratch_take(bytes);
    if (!scale) return ddp__pending();
    memset(scale, 0, bytes);
    find_scales(c, s.K, scale, scale + Kp);
    tile_more more = {.act = ((const ddp_conv_bn_act_attrs *)c->attrs)->relu ? DDP_ACT_RELU : DDP_ACT_NONE,
                      .scale = scale,
                      .shift = scale + Kp,
                      .y = ddp__ptr(s.y),
                      .residual = s.residual ? ddp__ptr(s.residual) : NULL};
    s.more = &more;
    int st = run(c, &s);
    ddp__scratch_give(scale, bytes);
    return st;
}

/* ---- apart ------------------------------------------------------------------------------------------------------------------- */

/* Rows of K sums in f32, which may be where the results go: `to`, rows of K of dt. */
typedef struct pass {
    const tile_more *more;
    int64_t K;
    ddp_dtype dt;
    const float *sums;
    char *to;
} pass;

CPU_INLINE void row(const pass *p, ddp_dtype dt, int64_t r) {
    const tile_more *m = p->more;
    for (int64_t k = 0; k < p->K; k += CPU_W) {
        int64_t at = r * p->K + k, n = p->K - k;
        char *to = cpu_at(dt, p->to, at);
        cpu_vec sums = conv_load(p->sums + at, DDP_F32, n);
        conv_store(to, dt, n,
                   conv_more(m, dt, n, sums, cpu_load(DDP_F32, m->scale, k), cpu_load(DDP_F32, m->shift, k), to));
    }
}

static void rows(const void *ctx, int64_t lo, int64_t hi) {
    const pass *p = ctx;
    for (int64_t r = lo; r < hi; r++) {
        if (p->dt == DDP_F32) row(p, DDP_F32, r);
        else if (p->dt == DDP_BF16) row(p, DDP_BF16, r);
        else row(p, DDP_F16, r);
    }
}

static void copy_loop(const void *ctx, char *const *p, int64_t n) {
    (void)ctx;
    memcpy(p[0], p[1], (size_t)n * sizeof(float));
}

/* t in f32, in the usual order of dims; a new reference. */
static ddp_tensor *in_f32(ddp_tensor *t, bool channels_last) {
    ddp_meta m = t->m;
    m.dtype = DDP_F32;
    m.offset = 0;
    ddp__meta_rowmajor(&m);
    if (channels_last) ddp__meta_channels_last(&m);
    ddp_tensor *wide = ddp__tensor_new(&m);
    if (wide) cpu_map_f32(2, (ddp_tensor *[]){wide, t}, copy_loop, NULL);
    return wide;
}

/* The sums of all, in f32, into sums. */
static int convolve(const ddp_call *c, ddp_tensor *x, ddp_tensor *w, ddp_tensor *sums) {
    ddp_conv2d_attrs a;
    memcpy(&a, c->attrs, sizeof a); /* conv_bn_act's begin as these */
    ddp_tensor *in[3] = {x, w, NULL};
    ddp_call conv = {.op = &ddp__ops[DDP_OP_conv2d], .attrs = &a, .n_in = 3, .in = in, .out = {sums}};
    const ddp_kernel *k = ddp__pick_kernel(&conv);
    return k ? k->run(&conv) : ddp__pending();
}

const char *conv_apart_reject(const ddp_call *c) { return cpu_f32_or_half(c->in[0]) ? NULL : "f32, f16 and bf16 only"; }

/* 16 bits by way of f32, so that they are rounded once. */
static int run_apart(const ddp_call *c, const conv_shape *s) {
    ddp_tensor *x = s->x, *w = s->w, *sums = s->y, *residual = s->residual;
    tile_more more = *s->more;
    int st = 0;
    if (s->dt != DDP_F32) {
        ddp_meta m = s->y->m;
        m.dtype = DDP_F32;
        x = in_f32(s->x, true);
        w = in_f32(s->w, false);
        sums = ddp__tensor_new(&m);
    }
    if (residual && !cpu_alike(residual, s->y)) {
        ddp_meta m = s->y->m;
        residual = ddp__tensor_new(&m);
        if (residual) cpu_copy(residual, s->residual);
    }
    if (!x || !w || !sums || (s->residual && !residual)) st = ddp__pending();
    if (st == 0) st = convolve(c, x, w, sums);
    if (st == 0) {
        more.residual = residual ? ddp__ptr(residual) : NULL;
        pass p = {&more, s->K, s->dt, cpu_f32(sums), ddp__ptr(s->y)};
        cpu_share(s->y->numel / s->K, s->y->numel, rows, &p);
    }
    if (x != s->x) ddp__drop(x);
    if (w != s->w) ddp__drop(w);
    if (sums != s->y) ddp__drop(sums);
    if (residual != s->residual) ddp__drop(residual);
    return st;
}

int conv_apart_run(const ddp_call *c) { return c->out[0]->numel == 0 ? 0 : conv_run(c, run_apart); }
