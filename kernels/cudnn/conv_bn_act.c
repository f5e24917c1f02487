/* conv_bn_act.c -- a convolution with batch norm by running statistics, residual and relu.
 *
 * f32: the norm's scale goes into the weights (turned to cuDNN's order in the same pass), so that one of cuDNN's ready-made
 * convolutions with bias, residual and relu does the rest. f16 and bf16 keep their weights; cuDNN compiles an engine that scales the
 * sum in f32. Where it has none (f64, old GPUs): its convolution, then one pass over y. */
#include <string.h>

#include "conv.h"
#include "conv_wide.h"
#include "plan.h"

/* The call, and what is computed of it before cuDNN runs. */
typedef struct step {
    conv v;
    conv_roles r;
    conv_temp x, w, residual, scale, shift, folded;
} step;

/* ---- what is asked of cuDNN -------------------------------------------------------------------------------------- */

static bool folds_weights(const ddp_call *c) { return c->in[0]->m.dtype == DDP_F32; }

static void fused(const ddp_call *c, step *s) {
    const ddp_conv_bn_act_attrs *a = c->attrs;
    conv *v = &s->v;
    int64_t size[4];
    s->r = conv_of_call(c, v);
    v->after = folds_weights(c) ? CONV_BIASED : CONV_NORMED;
    v->vector = ddp__wide(c->in[0]->m.dtype);
    v->relu = a->relu != 0;
    v->residual = s->r.residual != NULL;
    if (s->r.residual && ddp__meta_is_channels_last(&s->r.residual->m))
        conv_look(s->r.residual, size, v->r_stride, &v->align[3]);
    else if (s->r.residual) { /* a copy that lies as y does: no engine takes another order */
        memcpy(v->r_stride, v->y_stride, sizeof v->r_stride);
        v->align[3] = 16;
    }
    if (!folds_weights(c)) return;
    ddp_meta m = s->r.w->m; /* fold_weight's result */
    ddp__meta_channels_last(&m);
    conv_strides(&m, v->w_stride);
    v->align[1] = 16;
}

static const char *reject_empty(const ddp_call *c, const conv_roles *r) {
    if (c->out[0]->numel == 0) return NULL;
    if (r->x->numel == 0 || r->w->numel == 0) return "nothing is added up";
    return ddp__meta_is_channels_last(&c->out[0]->m) ? NULL : "a result that is not channels-last";
}

static const char *reject_fused(const ddp_call *c) {
    step s;
    plan_key k;
    fused(c, &s);
    const char *no = reject_empty(c, &s.r);
    if (no || c->out[0]->numel == 0) return no;
    conv_key(c, &s.v, &k);
    return plan_missing(c, &k, conv_build, &s.v);
}

static const char *reject_steps(const ddp_call *c) {
    conv v;
    plan_key k;
    conv_roles r = conv_of_call(c, &v);
    const char *no = reject_empty(c, &r);
    if (no || c->out[0]->numel == 0) return no;
    conv_key(c, &v, &k);
    return plan_missing(c, &k, conv_build, &v);
}

/* ---- before cuDNN ------------------------------------------------------------------------------------------------ */

static fold_vector vector(const ddp_tensor *t) {
    if (!t) return (fold_vector){NULL, 0, 0};
    return (fold_vector){ddp__ptr(t), t->m.stride[0], (int64_t)t->m.dtype};
}

/* scale and shift [K], in what sums are made in. */
static int fold(const ddp_call *c, step *s) {
    const ddp_conv_bn_act_attrs *at = c->attrs;
    ddp_dtype wide = ddp__wide(c->in[0]->m.dtype);
    fold_args a = {vector(c->in[2]),
                   vector(c->in[3]),
                   vector(c->in[4]),
                   vector(c->in[5]),
                   vector(c->in[6]),
                   s->v.w[0],
                   at->eps,
                   NULL,
                   NULL};
    size_t bytes = (size_t)a.channels * ddp__dtype_bytes[wide];
    a.scale = conv_scratch(c, bytes, &s->scale);
    a.shift = conv_scratch(c, bytes, &s->shift);
    if (!a.scale || !a.shift) return ddp__pending();
    ddp_grid g = ddp__grid(a.channels, 1);
    return wide == DDP_F64 ? ddp__launch_fold_f64(c, &a, g) : ddp__launch_fold_f32(c, &a, g);
}

/* w * scale, as cuDNN likes it to lie. */
static int fold_weight(const ddp_call *c, step *s) {
    const ddp_tensor *w = s->r.w;
    fold_weight_args a = {.w = (const float *)(const void *)ddp__ptr(w), .scale = s->scale.s.data};
    memcpy(a.size, w->m.size, sizeof a.size);
    memcpy(a.stride, w->m.stride, sizeof a.stride);
    a.out = conv_scratch(c, (size_t)w->numel * sizeof(float), &s->folded);
    return a.out ? ddp__launch_fold_weight(c, &a, ddp__grid(w->numel, 1)) : ddp__pending();
}

/* The residual, which must lie as y does. */
static ddp_tensor *as_y(const ddp_call *c, ddp_tensor *t, conv_temp *to) {
    return !t || ddp__meta_is_channels_last(&t->m) ? t : conv_channels_last(c, t, to);
}

static void give_all(const ddp_call *c, step *s) {
    conv_temp *const t[] = {&s->x, &s->w, &s->residual, &s->scale, &s->shift, &s->folded};
    for (int i = 0; i < 6; i++) conv_give(c, t[i]);
}

/* ---- kernels ----------------------------------------------------------------------------------------------------- */

static int run_fused(const ddp_call *c) {
    static const int64_t uid[] = {CONV_X, CONV_W, CONV_Y, CONV_BIAS, CONV_SCALE, CONV_RESIDUAL};
    if (c->out[0]->numel == 0) return 0;
    step s;
    plan_key k;
    memset(&s, 0, sizeof s);
    fused(c, &s);
    int st = fold(c, &s);
    if (st == 0 && folds_weights(c)) st = fold_weight(c, &s);
    ddp_tensor *x = NULL, *w = NULL, *residual = NULL;
    if (st == 0) {
        x = conv_dense(c, s.r.x, &s.x);
        w = folds_weights(c) ? s.r.w : conv_dense(c, s.r.w, &s.w);
        residual = as_y(c, s.r.residual, &s.residual);
        if (!x || !w || (s.r.residual && !residual)) st = ddp__pending();
    }
    if (st == 0) {
        void *ptr[] = {ddp__ptr(x),         folds_weights(c) ? s.folded.s.data : ddp__ptr(w),
                       ddp__ptr(c->out[0]), s.shift.s.data,
                       s.scale.s.data,      residual ? ddp__ptr(residual) : NULL};
        conv_key(c, &s.v, &k);
        st = plan_run(c, &k, conv_build, &s.v, residual ? 6 : 5, uid, ptr);
    }
    give_all(c, &s);
    return st;
}

/* y, which holds the convolution's sums, becomes act(y * scale + shift + residual). */
static int apply(const ddp_call *c, step *s, const ddp_tensor *residual) {
    const ddp_conv_bn_act_attrs *at = c->attrs;
    const ddp_tensor *y = c->out[0];
    fold_apply_args a = {.y = ddp__ptr(y),
                         .residual = residual ? ddp__ptr(residual) : NULL,
                         .scale = s->scale.s.data,
                         .shift = s->shift.s.data,
                         .n = y->numel,
                         .channels = y->m.size[1],
                         .relu = at->relu != 0};
    return ddp__launch_fold_apply(c, y->m.dtype, &a, ddp__grid(a.n, 1));
}

static int run_steps(const ddp_call *c) {
    static const int64_t uid[] = {CONV_X, CONV_W, CONV_Y};
    if (c->out[0]->numel == 0) return 0;
    step s;
    plan_key k;
    memset(&s, 0, sizeof s);
    s.r = conv_of_call(c, &s.v);
    conv_key(c, &s.v, &k);
    int st = fold(c, &s);
    ddp_tensor *x = NULL, *w = NULL, *residual = s.r.residual;
    if (st == 0) {
        x = conv_dense(c, s.r.x, &s.x);
        w = conv_dense(c, s.r.w, &s.w);
        residual = as_y(c, residual, &s.residual);
        if (!x || !w || (s.r.residual && !residual)) st = ddp__pending();
    }
    if (st == 0) {
        void *ptr[] = {ddp__ptr(x), ddp__ptr(w), ddp__ptr(c->out[0])};
        st = plan_run(c, &k, conv_build, &s.v, 3, uid, ptr);
    }
    if (st == 0) st = apply(c, &s, residual);
    give_all(c, &s);
    return st;
}

static const char *reject_wide(const ddp_call *c) { return conv_wide_reject(c, reject_fused); }
static int run_wide(const ddp_call *c) { return conv_wide_run(c, run_fused); }

const ddp_kernel ddp__cudnn_conv_bn_act[] = {{"conv_bn_act.cudnn", reject_fused, run_fused},
                                             {"conv_bn_act.cudnn_steps", reject_steps, run_steps},
                                             {"conv_bn_act.cudnn_wide", reject_wide, run_wide},
                                             {NULL, NULL, NULL}};
