/* make.c -- tensors out of nothing. */
#include <math.h>

#include "../mem/device.h"
#include "ops.h"

int ddp__new_tensor(const ddp_call *c, int64_t dtype, int64_t device, int ndim, const int64_t *size, ddp_meta *out) {
    if (dtype < 0 || dtype >= DDP_DTYPES) return ddp__op_fail(c, DDP_EDTYPE, "no dtype %lld", (long long)dtype);
    int st = ddp__out_shape(c, (ddp_dtype)dtype, ndim, size, out);
    out->device = (int)device;
    if (st == 0 && device != DDP_CPU && !ddp__device((int)device, c->op->name)) st = ddp__pending();
    return st;
}

static int full_infer(const ddp_call *c, ddp_meta *out) {
    const ddp_full_attrs *a = c->attrs;
    return ddp__new_tensor(c, a->dtype, a->device, (int)(a->size.n < 0 ? 0 : a->size.n), a->size.v, out);
}

static int arange_infer(const ddp_call *c, ddp_meta *out) {
    const ddp_arange_attrs *a = c->attrs;
    if (!isfinite(a->start) || !isfinite(a->stop) || !isfinite(a->step))
        return ddp__op_fail(c, DDP_EINVAL, "a bound or the step is not finite");
    if (a->step == 0 || (a->stop - a->start) / a->step < 0)
        return ddp__op_fail(c, DDP_EINVAL, "step %g does not lead from %g to %g", a->step, a->start, a->stop);
    double n = ceil((a->stop - a->start) / a->step);
    if (n > 0x1p53) return ddp__op_fail(c, DDP_EINVAL, "%g elements", n);
    return ddp__new_tensor(c, a->dtype, a->device, 1, (int64_t[]){(int64_t)n}, out);
}

static int eye_infer(const ddp_call *c, ddp_meta *out) {
    const ddp_eye_attrs *a = c->attrs;
    return ddp__new_tensor(c, a->dtype, a->device, 2, (int64_t[]){a->n, a->m ? a->m : a->n}, out);
}

const ddp_op_rules ddp__full_rules = {.infer = full_infer};
const ddp_op_rules ddp__arange_rules = {.infer = arange_infer};
const ddp_op_rules ddp__eye_rules = {.infer = eye_infer};
