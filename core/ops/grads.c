/* grads.c -- what is done to all gradients between backward and the step: unscaling, clipping, their norm. */
#include "ops.h"

/* A list of at least one f32 or f64 tensor whose elements do not share memory. */
static int check_grads(const ddp_call *c) {
    if (c->n_in == 0) return ddp__op_fail(c, DDP_EINVAL, "no gradients");
    for (int i = 0; i < c->n_in; i++) {
        const ddp_meta *g = &c->in[i]->m;
        if (g->dtype != DDP_F32 && g->dtype != DDP_F64)
            return ddp__op_fail(c, DDP_EDTYPE, "gradient %d is %s, expected f32 or f64", i + 1,
                                ddp_dtype_name(g->dtype));
        for (int d = 0; d < g->ndim; d++)
            if (g->stride[d] == 0 && g->size[d] > 1)
                return ddp__op_fail(c, DDP_EINVAL, "gradient %d is expanded: its elements share memory", i + 1);
    }
    return 0;
}

static int grad_unscale_infer(const ddp_call *c, ddp_meta *out) {
    int st = check_grads(c);
    return st < 0 ? st : ddp__out_shape(c, DDP_F32, 0, NULL, out);
}

/* f64 where a gradient is. */
static int norm_meta(const ddp_call *c, ddp_meta *out) {
    ddp_dtype dtype = DDP_F32;
    for (int i = 0; i < c->n_in; i++)
        if (c->in[i]->m.dtype == DDP_F64) dtype = DDP_F64;
    return ddp__out_shape(c, dtype, 0, NULL, out);
}

static int grad_clip_infer(const ddp_call *c, ddp_meta *out) {
    const ddp_grad_clip__attrs *a = c->attrs;
    int st = check_grads(c);
    if (st < 0) return st;
    if (!(a->max_norm >= 0))
        return ddp__op_fail(c, DDP_EINVAL, "max_norm is %g, expected a number from 0", a->max_norm);
    return norm_meta(c, out);
}

static int grad_norm_infer(const ddp_call *c, ddp_meta *out) {
    int st = check_grads(c);
    if (st < 0 || (st = norm_meta(c, &out[0])) < 0) return st;
    return ddp__out_shape(c, DDP_F32, 0, NULL, &out[1]);
}

static bool writes_all(const ddp_call *c, int i) {
    (void)c;
    (void)i;
    return true;
}

const ddp_op_rules ddp__grad_unscale__rules = {.infer = grad_unscale_infer, .writes = writes_all};
const ddp_op_rules ddp__grad_clip__rules = {.infer = grad_clip_infer, .writes = writes_all};
const ddp_op_rules ddp__grad_norm_rules = {.infer = grad_norm_infer};
