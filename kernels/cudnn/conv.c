/* conv.c -- conv2d (with its bias), its two gradients, and conv_bn_act, by cuDNN.
 *
 * Activations are handed over as they lie, channels-last or row-major; weights in PyTorch's order: cuDNN's engines turn them in
 * their workspace (README.md says what it takes). Anything else is copied first. */
#include <string.h>

#include "conv.h"
#include "plan.h"

#define COPY_4(to, from) memcpy(to, from, 4 * sizeof(int64_t))
#define COPY_WINDOW(v, a)                                          \
    do {                                                           \
        memcpy((v)->stride, (a)->stride, sizeof(v)->stride);       \
        memcpy((v)->padding, (a)->padding, sizeof(v)->padding);    \
        memcpy((v)->dilation, (a)->dilation, sizeof(v)->dilation); \
        (v)->groups = (a)->groups;                                 \
    } while (0)

/* The tensors in their roles, whichever of them is the result. */
typedef struct roles {
    ddp_tensor *x, *w, *y, *bias, *residual;
} roles;

/* ---- tensors that cuDNN does not take as they lie ---------------------------------------------------------------- */

/* A tensor of the call's own, on this stack. */
typedef struct temp {
    ddp_tensor t;
    ddp_storage s;
    size_t bytes;
} temp;

static bool is_dense_4(const ddp_meta *m) { return ddp__meta_is_channels_last(m) || ddp__meta_is_rowmajor(m); }

/* The largest power of two up to 16 that p is a multiple of. */
static int64_t align_of(const ddp_tensor *t) {
    uintptr_t p = (uintptr_t)ddp__ptr(t) | 16;
    return (int64_t)(p & (~p + 1));
}

/* How v sees t: what a copy of it would be where it is copied. */
static void look(const ddp_tensor *t, int64_t *size, int64_t *stride, int64_t *align) {
    ddp_meta m = t->m;
    COPY_4(size, m.size);
    *align = 16;
    if (is_dense_4(&m)) *align = align_of(t);
    else ddp__meta_channels_last(&m);
    conv_strides(&m, stride);
}

/* t, or a channels-last copy of it that `to` holds; NULL with the error set. */
static ddp_tensor *dense(const ddp_call *c, ddp_tensor *t, temp *to) {
    if (!t || is_dense_4(&t->m)) return t;
    walk_args a;
    memset(to, 0, sizeof *to);
    to->t.m = t->m;
    to->t.m.offset = 0;
    ddp__meta_channels_last(&to->t.m);
    to->t.numel = t->numel;
    to->bytes = (size_t)t->numel * ddp__dtype_bytes[t->m.dtype];
    to->s.device = t->m.device;
    to->s.data = ddp__cuda_scratch_take(c, to->bytes);
    to->t.storage = &to->s;
    if (!to->s.data) return NULL;
    ddp__cuda_walk(&a, 2, (ddp_tensor *[]){&to->t, t});
    ddp_grid g = ddp__grid(a.n, 4);
    int size = ddp__dtype_bytes[t->m.dtype];
    int st = size == 2   ? ddp__launch_copy_2(c, &a, g)
             : size == 4 ? ddp__launch_copy_4(c, &a, g)
                         : ddp__launch_copy_8(c, &a, g);
    return st < 0 ? NULL : &to->t;
}

static void give(const ddp_call *c, temp *t) {
    if (t->s.data) ddp__cuda_scratch_give(c, t->s.data, t->bytes);
}

/* ---- what a call is ---------------------------------------------------------------------------------------------- */

static roles roles_of(const ddp_call *c, conv *v) {
    roles r = {NULL, NULL, NULL, NULL, NULL};
    memset(v, 0, sizeof *v);
    switch (c->op->id) {
        case DDP_OP_conv2d:
            COPY_WINDOW(v, (const ddp_conv2d_attrs *)c->attrs);
            r = (roles){c->in[0], c->in[1], c->out[0], c->in[2], NULL};
            v->after = r.bias ? CONV_BIASED : CONV_PLAIN;
            break;
        case DDP_OP_conv2d_grad_input:
            COPY_WINDOW(v, (const ddp_conv2d_grad_input_attrs *)c->attrs);
            v->kind = CG_GRAD_INPUT;
            r = (roles){c->out[0], c->in[1], c->in[0], NULL, NULL};
            break;
        case DDP_OP_conv2d_grad_weight:
            COPY_WINDOW(v, (const ddp_conv2d_grad_weight_attrs *)c->attrs);
            v->kind = CG_GRAD_WEIGHT;
            r = (roles){c->in[1], c->out[0], c->in[0], NULL, NULL};
            break;
        default: { /* conv_bn_act */
            const ddp_conv_bn_act_attrs *a = c->attrs;
            COPY_WINDOW(v, a);
            r = (roles){c->in[0], c->in[1], c->out[0], NULL, c->in[7]};
            v->after = c->in[0]->m.dtype == DDP_F32 ? CONV_BIASED : CONV_NORMED;
            v->relu = a->relu != 0;
        }
    }
    v->dtype = r.x->m.dtype;
    v->residual = r.residual != NULL;
    v->vector = r.bias ? (int64_t)r.bias->m.dtype : (int64_t)ddp__wide(r.x->m.dtype);
    look(r.x, v->x, v->x_stride, &v->align[0]);
    look(r.w, v->w, v->w_stride, &v->align[1]);
    look(r.y, v->y, v->y_stride, &v->align[2]);
    if (r.residual) look(r.residual, v->y, v->r_stride, &v->align[3]);
    return r;
}

static int build(cg_graph *g, const void *ctx) { return conv_graph(g, ctx); }

static void key_of(const ddp_call *c, const conv *v, plan_key *k) {
    plan_key_start(k, c);
    plan_key_add(k, (int)(sizeof *v / sizeof(int64_t)), (const int64_t *)(const void *)v);
}

/* ---- conv2d and its gradients ------------------------------------------------------------------------------------ */

static const char *reject(const ddp_call *c) {
    conv v;
    plan_key k;
    roles r = roles_of(c, &v);
    if (c->out[0]->numel == 0) return NULL;
    if (r.x->numel == 0 || r.w->numel == 0 || r.y->numel == 0)
        return v.after == CONV_BIASED ? "nothing is added up, and there is a bias" : NULL;
    if (!is_dense_4(&c->out[0]->m)) return "a result that is not dense";
    key_of(c, &v, &k);
    return plan_missing(c, &k, build, &v);
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
    temp t[4];
    roles r = roles_of(c, &v);
    int st = 0;
    if (c->out[0]->numel == 0) return 0;
    if (r.x->numel == 0 || r.w->numel == 0 || r.y->numel == 0) return zero(c);
    for (int i = 0; i < 4; i++) t[i].s.data = NULL;
    ddp_tensor *x = dense(c, r.x, &t[0]), *w = dense(c, r.w, &t[1]), *y = dense(c, r.y, &t[2]);
    ddp_tensor *bias = r.bias;
    if (bias && bias->m.stride[0] != 1 && bias->numel > 1) {
        ddp_tensor as_4 = *bias; /* [1,K,1,1], so that dense may copy it */
        as_4.m.ndim = 4;
        COPY_4(as_4.m.size, ((const int64_t[]){1, bias->numel, 1, 1}));
        COPY_4(as_4.m.stride, ((const int64_t[]){0, bias->m.stride[0], 0, 0}));
        bias = dense(c, &as_4, &t[3]);
    }
    if (!x || !w || !y || (r.bias && !bias)) st = ddp__pending();
    if (st == 0) {
        key_of(c, &v, &k);
        void *ptr[] = {ddp__ptr(x), ddp__ptr(w), ddp__ptr(y), bias ? ddp__ptr(bias) : NULL};
        st = plan_run(c, &k, build, &v, bias ? 4 : 3, uid, ptr);
    }
    for (int i = 0; i < 4; i++) give(c, &t[i]);
    return st;
}

const ddp_kernel ddp__cudnn_conv2d[] = {{"conv2d.cudnn", reject, run}, {NULL, NULL, NULL}};
const ddp_kernel ddp__cudnn_conv2d_grad_input[] = {{"conv2d_grad_input.cudnn", reject, run}, {NULL, NULL, NULL}};
const ddp_kernel ddp__cudnn_conv2d_grad_weight[] = {{"conv2d_grad_weight.cudnn", reject, run}, {NULL, NULL, NULL}};
