/* comm.c -- collectives as ops: shapes only. They run through the collective slot (core/comm); alone, through kernels. */
#include "ops.h"

static int check_reduce(const ddp_call *c, int64_t op) {
    if (op < DDP_SUM || op > DDP_MAX)
        return ddp__op_fail(c, DDP_EINVAL, "op %lld, expected sum, mean, min or max", (long long)op);
    if (op == DDP_MEAN && !ddp__is_float(c->in[0]->m.dtype))
        return ddp__op_fail(c, DDP_EDTYPE, "the mean of %s; cast to f32, or sum", ddp_dtype_name(c->in[0]->m.dtype));
    return 0;
}

static int all_gather_infer(const ddp_call *c, ddp_meta *out) {
    const ddp_meta *x = &c->in[0]->m;
    int64_t size[DDP_MAX_DIM + 1] = {ddp_group_size(NULL)};
    for (int d = 0; d < x->ndim; d++) size[d + 1] = x->size[d];
    return ddp__out_shape(c, x->dtype, x->ndim + 1, size, out);
}

static int reduce_scatter_infer(const ddp_call *c, ddp_meta *out) {
    const ddp_meta *x = &c->in[0]->m;
    int st = check_reduce(c, ((const ddp_reduce_scatter_attrs *)c->attrs)->op), world = ddp_group_size(NULL);
    if (st < 0) return st;
    if (x->ndim == 0 || x->size[0] % world)
        return ddp__op_fail(c, DDP_ESHAPE, "x is %s: its first size must divide into %d ranks", DDP_SHAPE_TEXT(x),
                            world);
    int64_t size[DDP_MAX_DIM];
    for (int d = 0; d < x->ndim; d++) size[d] = d ? x->size[d] : x->size[0] / world;
    return ddp__out_shape(c, x->dtype, x->ndim, size, out);
}

static int all_reduce__infer(const ddp_call *c, ddp_meta *out) {
    *out = c->in[0]->m;
    return check_reduce(c, ((const ddp_all_reduce__attrs *)c->attrs)->op);
}

static int broadcast__infer(const ddp_call *c, ddp_meta *out) {
    int64_t root = ((const ddp_broadcast__attrs *)c->attrs)->root;
    if (root < 0 || root >= ddp_world_size())
        return ddp__op_fail(c, DDP_EINVAL, "root %lld in a world of %d", (long long)root, ddp_world_size());
    *out = c->in[0]->m;
    return 0;
}

const ddp_op_rules ddp__all_gather_rules = {.infer = all_gather_infer};
const ddp_op_rules ddp__reduce_scatter_rules = {.infer = reduce_scatter_infer};
const ddp_op_rules ddp__all_reduce__rules = {.infer = all_reduce__infer};
const ddp_op_rules ddp__broadcast__rules = {.infer = broadcast__infer};
