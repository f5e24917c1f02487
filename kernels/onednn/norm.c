/* norm.c -- batch_norm in training and its gradient, channels-last. Taken only for large tensors, where oneDNN's loops
 * were measured ahead of plain ones (README.md). */
#include "dnnl_util.h"

#include <math.h>

static const int64_t least_numel = 1 << 21;

typedef struct norm {
    int64_t size[4], backward, scale, shift, eps_bits;
} norm;

static double eps_of(const norm *v) {
    union { int64_t i; double d; } u = {v->eps_bits};
    return u.d;
}

static const char *reject_x(const ddp_call *c, const ddp_tensor *x) {
    if (x->m.dtype != DDP_F32) return "oneDNN is used for f32 only";
    if (x->m.ndim != 4 || dnn_layout_of(&x->m) != DNN_CHANNELS_LAST) return "oneDNN is used for channels-last only";
    if (dnn_layout_of(&c->out[0]->m) != DNN_CHANNELS_LAST) return "a result that is not channels-last";
    if (x->numel < least_numel) return "too small for oneDNN to pay";
    return NULL;
}

/* [C] in one piece. */
static bool packed(const ddp_tensor *t) { return !t || t->m.size[0] == 1 || t->m.stride[0] == 1; }

static bool build_mds(const norm *v, dnnl_memory_desc_t *x, dnnl_memory_desc_t *c) {
    int64_t s[4];
    dnn_strides(DNN_CHANNELS_LAST, v->size, s);
    return dnn_md(x, 4, v->size, s) && dnn_md(c, 1, &v->size[1], (int64_t[]){1});
}

static const char *build(dnn_entry *e, const void *ctx) {
    static const char *const no = "oneDNN has no fast batch normalisation for this";
    const norm *v = ctx;
    dnnl_memory_desc_t x, ch;
    dnnl_batch_normalization_desc_t d;
    unsigned flags = (v->scale ? dnnl_use_scale : 0u) | (v->shift ? dnnl_use_shift : 0u);
    float    eps = (float)eps_of(v);
    if (!build_mds(v, &x, &ch) || dnnl_batch_normalization_forward_desc_init(&d, dnnl_forward_training, &x, eps, flags) != dnnl_success) return no;
    dnnl_primitive_desc_t forward = dnn_desc(&d, NULL), pd = forward;
    if (!forward) return no;
    if (v->backward) {
        pd = NULL;
        if (dnnl_batch_normalization_backward_desc_init(&d, dnnl_backward, &x, &x, eps, flags) == dnnl_success) pd = dnn_desc(&d, forward);
        dnnl_primitive_desc_destroy(forward);
        if (!pd) return no;
    }
    const dnnl_query_t any = dnnl_query_exec_arg_md; /* by argument: 1-D ones have one layout only */
    dnn_use use[DNN_SLOTS];
    int     n = 0;
    use[n++] = (dnn_use){DNNL_ARG_SRC, false, any, DNNL_ARG_SRC, x};
    use[n++] = (dnn_use){DNNL_ARG_MEAN, !v->backward, any, DNNL_ARG_MEAN, ch};
    use[n++] = (dnn_use){DNNL_ARG_VARIANCE, !v->backward, any, DNNL_ARG_VARIANCE, ch};
    if (v->backward) {
        use[n++] = (dnn_use){DNNL_ARG_DIFF_DST, false, any, DNNL_ARG_DIFF_DST, x};
        use[n++] = (dnn_use){DNNL_ARG_DIFF_SRC, true, any, DNNL_ARG_DIFF_SRC, x};
        use[n++] = (dnn_use){DNNL_ARG_DIFF_SCALE, true, any, DNNL_ARG_DIFF_SCALE, ch};
        use[n++] = (dnn_use){DNNL_ARG_DIFF_SHIFT, true, any, DNNL_ARG_DIFF_SHIFT, ch};
    } else {
        use[n++] = (dnn_use){DNNL_ARG_DST, true, any, DNNL_ARG_DST, x};
    }
    if (v->scale) use[n++] = (dnn_use){DNNL_ARG_SCALE, false, any, DNNL_ARG_SCALE, ch};
    if (v->shift) use[n++] = (dnn_use){DNNL_ARG_SHIFT, false, any, DNNL_ARG_SHIFT, ch};
    return dnn_entry_make(e, pd, n, use);
}

static dnn_entry *entry_of(const ddp_call *c, const ddp_meta *x, bool scale, bool shift, double eps) {
    union { double d; int64_t i; } bits = {eps};
    norm    v = {{x->size[0], x->size[1], x->size[2], x->size[3]}, c->op->id == DDP_OP_batch_norm_grad, scale, shift, bits.i};
    dnn_key k;
    dnn_key_start(&k, c->op->id);
    dnn_key_add(&k, (int)(sizeof v / sizeof(int64_t)), (const int64_t *)(const void *)&v);
    return dnn_find(&k, build, &v);
}

/* ---- forward ------------------------------------------------------------------------------------------------------------ */

static dnn_entry *forward_entry(const ddp_call *c) {
    return entry_of(c, &c->in[0]->m, c->in[1] != NULL, c->in[2] != NULL, ((const ddp_batch_norm_attrs *)c->attrs)->eps);
}

static const char *reject_forward(const ddp_call *c) {
    const char *no = reject_x(c, c->in[0]);
    if (no) return no;
    if (!((const ddp_batch_norm_attrs *)c->attrs)->training) return "oneDNN is used in training only";
    for (int i = 1; i < 5; i++)
        if (!packed(c->in[i])) return "a value a channel with gaps";
    const dnn_entry *e = forward_entry(c);
    return e ? e->why : "out of memory";
}

static int run_forward(const ddp_call *c) {
    const ddp_batch_norm_attrs *a = c->attrs;
    const dnn_entry *e = forward_entry(c);
    if (!e) return ddp__pending();
    float  *mean = dnn_ptr(c->out[1]), *rstd = dnn_ptr(c->out[2]);
    void   *ptr[6] = {dnn_ptr(c->in[0]), mean, rstd, dnn_ptr(c->out[0])};
    int64_t channels = c->in[0]->m.size[1], count = c->in[0]->numel / channels;
    int     n = 4;
    for (int i = 1; i < 3; i++)
        if (c->in[i]) ptr[n++] = dnn_ptr(c->in[i]);
    int st = dnn_run(e, c->op->name, ptr);
    if (st < 0) return st;
    float *rm = c->in[3] ? dnn_ptr(c->in[3]) : NULL, *rv = c->in[4] ? dnn_ptr(c->in[4]) : NULL;
    double unbiased = (double)count / (double)(count - 1);
    for (int64_t i = 0; i < channels; i++) {
        double var = rstd[i];
        if (rm) rm[i] = (float)((1 - a->momentum) * rm[i] + a->momentum * mean[i]);
        if (rv) rv[i] = (float)((1 - a->momentum) * rv[i] + a->momentum * var * unbiased);
        rstd[i] = (float)(1 / sqrt(var + a->eps));
    }
    return 0;
}

/* ---- gradient ------------------------------------------------------------------------------------------------------------- */

static dnn_entry *grad_entry(const ddp_call *c) { return entry_of(c, &c->in[1]->m, true, true, 0); }

static const char *reject_grad(const ddp_call *c) {
    const char *no = reject_x(c, c->in[1]);
    if (no) return no;
    if (!((const ddp_batch_norm_grad_attrs *)c->attrs)->training) return "oneDNN is used in training only";
    if (dnn_layout_of(&c->in[0]->m) != DNN_CHANNELS_LAST) return "oneDNN is used for channels-last only";
    for (int i = 2; i < 5; i++)
        if (!packed(c->in[i])) return "a value a channel with gaps";
    const dnn_entry *e = grad_entry(c);
    return e ? e->why : "out of memory";
}

/* oneDNN wants the variance: 1/rstd^2, with eps in it already. */
static int run_grad(const ddp_call *c) {
    const dnn_entry *e = grad_entry(c);
    int64_t channels = c->in[1]->m.size[1];
    size_t  bytes = 2 * (size_t)channels * sizeof(float);
    float  *var = e ? ddp__mem_alloc(bytes) : NULL;
    if (!var) return ddp__pending();
    float *scale = var + channels;
    const float *rstd = dnn_ptr(c->in[4]), *w = c->in[2] ? dnn_ptr(c->in[2]) : NULL;
    for (int64_t i = 0; i < channels; i++) {
        var[i] = (float)(1 / ((double)rstd[i] * rstd[i]));
        scale[i] = w ? w[i] : 1;
    }
    void *ptr[9] = {dnn_ptr(c->in[1]), dnn_ptr(c->in[3]), var, dnn_ptr(c->in[0]), dnn_ptr(c->out[0]), dnn_ptr(c->out[1]), dnn_ptr(c->out[2]),
                    scale, scale /* the shift is not read, but must be there */};
    int st = dnn_run(e, c->op->name, ptr);
    ddp__mem_free(var, bytes);
    return st;
}

const ddp_kernel dnn_batch_norm[] = {{"batch_norm.onednn", reject_forward, run_forward}, {NULL, NULL, NULL}};
const ddp_kernel dnn_batch_norm_grad[] = {{"batch_norm_grad.onednn", reject_grad, run_grad}, {NULL, NULL, NULL}};
