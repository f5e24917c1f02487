/* make.c -- reference kernels of arange and eye. */
#include "ref.h"

static int run_arange(const ddp_call *c) {
    const ddp_arange_attrs *a = c->attrs;
    for (int64_t i = 0; i < c->out[0]->numel; i++) ref_put(c->out[0], i, a->start + (double)i * a->step);
    return 0;
}
DDP_REF_KERNEL(arange, run_arange);

static int run_eye(const ddp_call *c) {
    int64_t cols = c->out[0]->m.size[1];
    for (int64_t i = 0; i < c->out[0]->numel; i++) ref_put(c->out[0], i, i / cols == i % cols);
    return 0;
}
DDP_REF_KERNEL(eye, run_eye);
