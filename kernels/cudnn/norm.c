/* norm.c -- a convolution with its channels' sums in its epilogue. */
#include "norm.h"

#include "conv.h"
#include "plan.h"

static conv_roles of(const ddp_call *c, conv *v) {
    conv_roles r = conv_of_call(c, v);
    v->after = CONV_STATISTICS;
    return r;
}

const char *ddp__cudnn_conv_statistics_reject(const ddp_call *c) {
    conv v;
    plan_key k;
    conv_roles r = of(c, &v);
    if (c->op->id != DDP_OP_conv2d || r.bias) return "statistics are made of a conv2d without bias";
    if (r.x->numel == 0 || r.w->numel == 0) return "an empty tensor";
    if (r.x->m.dtype == DDP_F64) return "cuDNN makes statistics in f32";
    if (!conv_takes_layout(&r.y->m)) return "a result that is not dense";
    conv_key(c, &v, &k);
    return plan_missing(c, &k, conv_build, &v);
}

int ddp__cudnn_conv_statistics(const ddp_call *c, float *sum, float *square) {
    static const int64_t uid[] = {CONV_X, CONV_W, CONV_Y, CONV_SUM, CONV_SQUARE};
    conv v;
    plan_key k;
    conv_roles r = of(c, &v);
    conv_temp t[2] = {{.bytes = 0}, {.bytes = 0}};
    ddp_tensor *x = conv_dense(c, r.x, &t[0]), *w = conv_dense(c, r.w, &t[1]);
    int st = x && w ? 0 : ddp__pending();
    if (st == 0) {
        void *const ptr[] = {ddp__ptr(x), ddp__ptr(w), ddp__ptr(r.y), sum, square};
        conv_key(c, &v, &k);
        st = plan_run(c, &k, conv_build, &v, 5, uid, ptr);
    }
    for (int i = 0; i < 2; i++) conv_give(c, &t[i]);
    return st;
}
