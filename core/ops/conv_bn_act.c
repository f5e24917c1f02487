/* conv_bn_act.c -- a convolution with what follows it where nothing is trained: batch norm by running statistics, residual, relu. */
#include <stddef.h>

#include "ops.h"

#define SAME_PLACE(field)                                                                       \
    _Static_assert(offsetof(ddp_conv_bn_act_attrs, field) == offsetof(ddp_conv2d_attrs, field), \
                   "attributes begin as conv2d's")
SAME_PLACE(stride);
SAME_PLACE(padding);
SAME_PLACE(dilation);
SAME_PLACE(groups);

static int conv_bn_act_infer(const ddp_call *c, ddp_meta *out) {
    const ddp_conv_bn_act_attrs *a = c->attrs;
    int st = ddp__conv2d_infer(c, out);
    if (st < 0) return st;
    for (int i = 2; i < 7; i++)
        if ((st = ddp__need_channels(c, i, 1, out->size[1], i < 5)) < 0) return st;
    if ((st = ddp__need_eps(c, a->eps)) < 0) return st;
    return ddp__need_residual(c, 7, out);
}

/* In f32 or wider, rounded at the end, as the op is. */
static int conv_bn_act_chain(ddp_vjp *v, ddp_tensor *const *in, ddp_tensor **out) {
    const ddp_conv_bn_act_attrs *a = v->attrs;
    ddp_tensor *y, *mean, *rstd,
        *z = ddp_conv2d(ddp__widened(in[0]), ddp__widened(in[1]), ddp__widened(in[2]), a->stride, a->padding,
                        a->dilation, a->groups);
    if (ddp_batch_norm(z, ddp__widened(in[3]), ddp__widened(in[4]), in[5], in[6], 0, 0, a->eps, &y, &mean, &rstd) < 0)
        return ddp__pending();
    if (in[7]) y = ddp_add(y, ddp__widened(in[7]));
    if (a->relu) y = ddp_relu(y);
    out[0] = ddp__narrowed(y, v->out_meta[0].dtype);
    return ddp__pending();
}
static int conv_bn_act_vjp(ddp_vjp *v) { return ddp__vjp_by_chain(v, conv_bn_act_chain); }

const ddp_op_rules ddp__conv_bn_act_rules = {
    .infer = conv_bn_act_infer, .vjp = conv_bn_act_vjp, .saves = 0xff, .flops = ddp__conv2d_flops};
