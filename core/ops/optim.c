/* optim.c -- the step ops of optimizers: many tensors in one call. */
#include "ops.h"

/* lists of n: all of list k like the parameter, but bufs of size 0 where `may_be_empty`. */
static int check_lists(const ddp_call *c, int n_lists, bool may_be_empty, ddp_meta *out) {
    int n = c->n_in / n_lists;
    if (n == 0) return ddp__op_fail(c, DDP_EINVAL, "no parameters");
    for (int i = 0; i < n; i++) {
        const ddp_meta *p = &c->in[i]->m;
        if (p->dtype != DDP_F32 && p->dtype != DDP_F64)
            return ddp__op_fail(c, DDP_EDTYPE, "parameter %d is %s, expected f32 or f64%s", i + 1,
                                ddp_dtype_name(p->dtype),
                                ddp__is_half(p->dtype) ? "; keep parameters in f32 and compute under autocast" : "");
        for (int k = 1; k < n_lists; k++) {
            const ddp_tensor *t = c->in[k * n + i];
            if (may_be_empty && k == n_lists - 1 && t->numel == 0) continue;
            if (t->m.dtype != p->dtype || !ddp__meta_same_size(&t->m, p))
                return ddp__op_fail(c, DDP_ESHAPE, "parameter %d is %s %s, its %s %s %s", i + 1,
                                    ddp_dtype_name(p->dtype), DDP_SHAPE_TEXT(p), c->op->in_names[k],
                                    ddp_dtype_name(t->m.dtype), DDP_SHAPE_TEXT(&t->m));
        }
    }
    *out = c->in[0]->m;
    return 0;
}

static int sgd_step_infer(const ddp_call *c, ddp_meta *out) {
    const ddp_sgd_step_attrs *a = c->attrs;
    return check_lists(c, 3, a->momentum == 0, out);
}
/* List 1 holds the gradients. */
static bool sgd_step_writes(const ddp_call *c, int i) {
    return i / (c->n_in / 3) != 1 || ((const ddp_sgd_step_attrs *)c->attrs)->keep;
}

static int adam_step_infer(const ddp_call *c, ddp_meta *out) {
    const ddp_adam_step_attrs *a = c->attrs;
    if (a->step < 1) return ddp__op_fail(c, DDP_EINVAL, "step is %lld, counted from 1", (long long)a->step);
    return check_lists(c, 4, false, out);
}
static bool adam_step_writes(const ddp_call *c, int i) {
    return i / (c->n_in / 4) != 1 || ((const ddp_adam_step_attrs *)c->attrs)->keep;
}

const ddp_op_rules ddp__sgd_step_rules = {.infer = sgd_step_infer, .writes = sgd_step_writes};
const ddp_op_rules ddp__adam_step_rules = {.infer = adam_step_infer, .writes = adam_step_writes};
