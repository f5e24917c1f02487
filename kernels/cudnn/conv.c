/* conv.c -- conv2d (with its bias) and its two gradients by cuDNN.
 *
 * Activations are handed over as they lie, channels-last or row-major; weights in PyTorch's order: cuDNN's engines turn them in
 * their workspace (README.md says what it takes). Anything else is copied first. */
#include <string.h>

#include "conv.h"
#include "conv_wide.h"
#include "plan.h"

#define COPY_4(to, from) memcpy(to, from, 4 * sizeof(int64_t))
#define COPY_WINDOW(v, a)                                          \
    do {                                                           \
        memcpy((v)->stride, (a)->stride, sizeof(v)->stride);       \
        memcpy((v)->padding, (a)->padding, sizeof(v)->padding);    \
        memcpy((v)->dilation, (a)->dilation, sizeof(v)->dilation); \
        (v)->groups = (a)->groups;                                 \
    } while (0)

/* ---- tensors that cuDNN does not take as they lie ---------------------------------------------------------------- */

bool conv_takes_layout(const ddp_meta *m) { return ddp__meta_is_channels_last(m) || ddp__meta_is_rowmajor(m); }

/* The largest power of two up to 16 that its pointer is a multiple of. */
static int64_t align_of(const ddp_tensor *t) {
    uintptr_t p = (uintptr_t)ddp__ptr(t) | 16;
    return (int64_t)(p & (~p + 1));
}

void conv_look(const ddp_tensor *t, int64_t *size, int64_t *stride, int64_t *align) {
    ddp_meta m = t->m;
    COPY_4(size, m.size);
    *align = 16;
    if (conv_takes_layout(&m)) *align = align_of(t);
    else ddp__meta_channels_last(&m);
    conv_strides(&m, stride);
}

void *conv_scratch(const ddp_call *c, size_t bytes, conv_temp *to) {
    to->bytes = bytes;
    return to->s.data = ddp__cuda_scratch_take(c, bytes);
}

void conv_give(const ddp_call *c, conv_temp *t) {
    if (t->s.data) ddp__cuda_scratch_give(c, t->s.data, t->bytes);
    t->s.data = NULL;
}

ddp_tensor *conv_dense(const ddp_call *c, ddp_tensor *t, conv_temp *to) {
    return !t || conv_takes_layout(&t->m) ? t : conv_channels_last(c, t, to);
}

ddp_tensor *conv_channels_last(const ddp_call *c, ddp_tensor *t, conv_temp *to) {
    walk_args a;
    int size = ddp__dtype_bytes[t->m.dtype];
    to->t.m = t->m;
    to->t.m.offset = 0;
    ddp__meta_channels_last(&to->t.m);
    to->t.numel = t->numel;
    to->t.storage = &to->s;
    to->s.device = t->m.device;
    if (!conv_scratch(c, (size_t)(t->numel * size), to)) return NULL;
    ddp__cuda_walk(&a, 2, (ddp_tensor *[]){&to->t, t});
    ddp_grid g = ddp__grid(a.n, 4);
    int st = size == 2   ? ddp__launch_copy_2(c, &a, g)
             : size == 4 ? ddp__launch_copy_4(c, &a, g)
                         : ddp__launch_copy_8(c, &a, g);
    return st < 0 ? NULL : &to->t;
}

/* The same for a vector. */
static ddp_tensor *dense_vector(const ddp_call *c, ddp_tensor *t, conv_temp *to) {
    if (!t || t->numel <= 1 || t->m.stride[0] == 1) return t;
    ddp_tensor as_4 = *t; /* [1,n,1,1] */
    as_4.m.ndim = 4;
    COPY_4(as_4.m.size, ((const int64_t[]){1, t->numel, 1, 1}));
    COPY_4(as_4.m.stride, ((const int64_t[]){0, t->m.stride[0], 0, 0}));
    return conv_channels_last(c, &as_4, to);
}

/* ---- what a call is ---------------------------------------------------------------------------------------------- */

conv_roles conv_of_call(const ddp_call *c, conv *v) {
    conv_roles r = {NULL, NULL, NULL, NULL, NULL};
    memset(v, 0, sizeof *v);
    switch (c->op->id) {
        case DDP_OP_conv2d:
            COPY_WINDOW(v, (const ddp_conv2d_attrs *)c->attrs);
            r = (conv_roles){c->in[0], c->in[1], c->out[0], c->in[2], NULL};
            break;
        case DDP_OP_conv2d_grad_input:
            COPY_WINDOW(v, (const ddp_conv2d_grad_input_attrs *)c->attrs);
            v->kind = CG_GRAD_INPUT;
            r = (conv_roles){c->out[0], c->in[1], c->in[0], NULL, NULL};
            break;
        case DDP_OP_conv2d_grad_weight:
            COPY_WINDOW(v, (const ddp_conv2d_grad_weight_attrs *)c->attrs);
            v->kind = CG_GRAD_WEIGHT;
            r = (conv_roles){c->in[1], c->out[0], c->in[0], NULL, NULL};
            break;
        default: /* conv_bn_act, whose attributes begin as conv2d's; what follows is its own affair */
            COPY_WINDOW(v, (const ddp_conv2d_attrs *)c->attrs);
            r = (conv_roles){c->in[0], c->in[1], c->out[0], NULL, c->in[7]};
    }
    v->after = r.bias ? CONV_BIASED : CONV_PLAIN;
    v->dtype = r.x->m.dtype;
    v->vector = r.bias ? (int64_t)r.bias->m.dtype : 0;
    conv_look(r.x, v->x, v->x_stride, &v->align[0]);
    conv_look(r.w, v->w, v->w_stride, &v->align[1]);
    conv_look(r.y, v->y, v->y_stride, &v->align[2]);
    return r;
}

int conv_build(cg_graph *g, const void *v) { return conv_graph(g, v); }

void conv_key(const ddp_call *c, const conv *v, plan_key *k) {
    plan_key_start(k, c);
    plan_key_add(k, (int)(sizeof *v / sizeof(int64_t)), (const int64_t *)(const void *)v);
}

/* ---- kernels ----------------------------------------------------------------------------------------------------- */

static bool nothing_to_add(const conv_roles *r) { return r->x->numel == 0 || r->w->numel == 0 || r->y->numel == 0; }

static const char *reject(const ddp_call *c) {
    conv v;
    plan_key k;
    conv_roles r = conv_of_call(c, &v);
    if (c->out[0]->numel == 0) return NULL;
    if (nothing_to_add(&r)) return r.bias ? "nothing is added up, and there is a bias" : NULL;
    if (!conv_takes_layout(&c->out[0]->m)) return "a result that is not dense";
    conv_key(c, &v, &k);
    return plan_missing(c, &k, conv_build, &v);
}

/* Sums of nothing. */
static int zero(const ddp_call *c) {
    const ddp_gpu *g = ddp__gpu_of(c);
    size_t bytes = (size_t)c->out[0]->numel * ddp__dtype_bytes[c->out[0]->m.dtype];
    if (!g) return ddp__pending();
    return ddp__cuda_check(ddp__cuda.cudaMemsetAsync(ddp__ptr(c->out[0]), 0, bytes, g->compute), c->op->name);
}

static int run(const ddp_call *c) {
    static const int64_t uid[] = {CONV_X, CONV_W, CONV_Y, CONV_BIAS};
    conv v;
    plan_key k;
    conv_roles r = conv_of_call(c, &v);
    if (c->out[0]->numel == 0) return 0;
    if (nothing_to_add(&r)) return zero(c);
    conv_temp t[4] = {{.bytes = 0}, {.bytes = 0}, {.bytes = 0}, {.bytes = 0}};
    ddp_tensor *x = conv_dense(c, r.x, &t[0]), *w = conv_dense(c, r.w, &t[1]), *y = conv_dense(c, r.y, &t[2]);
    ddp_tensor *bias = dense_vector(c, r.bias, &t[3]);
    int st = 0;
    if (!x || !w || !y || (r.bias && !bias)) st = ddp__pending();
    if (st == 0) {
        conv_key(c, &v, &k);
        void *ptr[] = {ddp__ptr(x), ddp__ptr(w), ddp__ptr(y), bias ? ddp__ptr(bias) : NULL};
        st = plan_run(c, &k, conv_build, &v, bias ? 4 : 3, uid, ptr);
    }
    for (int i = 0; i < 4; i++) conv_give(c, &t[i]);
    return st;
}

static const char *reject_wide(const ddp_call *c) { return conv_wide_reject(c, reject); }
static int run_wide(const ddp_call *c) { return conv_wide_run(c, run); }

#define KERNELS(op)                                                                                   \
    {                                                                                                 \
        {#op ".cudnn", reject, run}, {#op ".cudnn_wide", reject_wide, run_wide}, { NULL, NULL, NULL } \
    }
const ddp_kernel ddp__cudnn_conv2d[] = KERNELS(conv2d);
const ddp_kernel ddp__cudnn_conv2d_grad_input[] = KERNELS(conv2d_grad_input);
const ddp_kernel ddp__cudnn_conv2d_grad_weight[] = KERNELS(conv2d_grad_weight);
