/* conv.c -- conv2d, its gradients and conv_bn_act: the kernels in order of preference, and what they share. */
#include "conv.h"

conv_shape conv_shape_of(const ddp_call *c) {
    conv_shape s = {.pass = CONV_FORWARD};
    if (c->op->id == DDP_OP_conv2d || c->op->id == DDP_OP_conv_bn_act) {
        const ddp_conv2d_attrs *a = c->attrs; /* conv_bn_act's begin as these */
        bool more = c->op->id == DDP_OP_conv_bn_act;
        s = (conv_shape){.x = c->in[0],
                         .w = c->in[1],
                         .y = c->out[0],
                         .bias = more ? NULL : c->in[2],
                         .residual = more ? c->in[7] : NULL,
                         .groups = a->groups,
                         .stride = a->stride,
                         .padding = a->padding,
                         .dilation = a->dilation};
    } else if (c->op->id == DDP_OP_conv2d_grad_input) {
        const ddp_conv2d_grad_input_attrs *a = c->attrs;
        s = (conv_shape){.pass = CONV_GRAD_INPUT,
                         .x = c->out[0],
                         .w = c->in[1],
                         .y = c->in[0],
                         .groups = a->groups,
                         .stride = a->stride,
                         .padding = a->padding,
                         .dilation = a->dilation};
    } else {
        const ddp_conv2d_grad_weight_attrs *a = c->attrs;
        s = (conv_shape){.pass = CONV_GRAD_WEIGHT,
                         .x = c->in[1],
                         .w = c->out[0],
                         .y = c->in[0],
                         .groups = a->groups,
                         .stride = a->stride,
                         .padding = a->padding,
                         .dilation = a->dilation};
    }
    s.N = s.x->m.size[0];
    s.C = s.x->m.size[1];
    s.H = s.x->m.size[2];
    s.W = s.x->m.size[3];
    s.K = s.w->m.size[0];
    s.R = s.w->m.size[2];
    s.S = s.w->m.size[3];
    s.Ho = s.y->m.size[2];
    s.Wo = s.y->m.size[3];
    s.dt = c->in[0]->m.dtype;
    return s;
}

const char *conv_reject_common(const conv_shape *s) {
    if (!cpu_f32_or_half(s->x)) return "f32, f16 and bf16 only";
    if (s->x->numel == 0 || s->y->numel == 0 || s->w->numel == 0) return "an empty tensor";
    if (!ddp__meta_is_channels_last(&s->x->m) || !ddp__meta_is_channels_last(&s->y->m)) return "not channels-last";
    if (!ddp__meta_is_rowmajor(&s->w->m)) return "w is not row-major";
    if (s->bias && s->bias->m.stride[0] != 1 && s->K > 1) return "a strided bias";
    if (s->residual && !cpu_alike(s->residual, s->y)) return "the residual is laid out otherwise";
    return NULL;
}

const char *conv_reject_wide(const conv_shape *s) {
#if !defined(__AVX2__)
    return "needs AVX2";
#endif
    const char *why = conv_reject_common(s);
    return why ? why : s->groups != 1 ? "groups" : NULL;
}

ddp_packed *conv_packed(const conv_shape *s, int kind, size_t bytes) {
    enum { MOST_PIXELS = 512 };
    const ddp_tensor *w = s->w;
    bool parameter = w->requires_grad && !w->node && !w->storage->deleter &&
                     !w->storage->ctx; /* a blob may be written behind our back */
    if (s->pass != CONV_FORWARD || ddp_grad_mode() || !parameter || s->N * s->Ho * s->Wo >= MOST_PIXELS) return NULL;
    ddp_pack_key key = {kind, s->dt, w->m.offset, {s->K, s->C, s->R, s->S}};
    uint64_t version = atomic_load_explicit(&w->storage->version, memory_order_relaxed);
    ddp_packed *p = ddp__packed_take(w->storage, version, &key, bytes);
    atomic_store(&w->storage->packed, true); /* after: an entry is never without it */
    return p;
}

/* Forward, with what follows it too, and the gradient of x. */
static int run_depthwise(const ddp_call *c) { return conv_run(c, conv_depthwise_run); }
static int run_amx(const ddp_call *c) { return conv_run(c, conv_amx_run); }
static int run_wino(const ddp_call *c) { return conv_run(c, conv_wino_run); }
static int run_wino_s2(const ddp_call *c) { return conv_run(c, conv_wino_s2_run); }
static int run_direct(const ddp_call *c) { return conv_run(c, conv_direct_run); }

#define KERNEL(op, way, reject, run) \
    { #op "." #way "." CPU_TEXT(DDP_CPU_ISA), reject, run }
#define NO_MORE \
    { NULL, NULL, NULL }
#define FORWARD(op)                                                                                          \
    KERNEL(op, depthwise, conv_depthwise_reject, run_depthwise), KERNEL(op, amx, conv_amx_reject, run_amx),  \
        KERNEL(op, wino, conv_wino_reject, run_wino), KERNEL(op, wino_s2, conv_wino_s2_reject, run_wino_s2), \
        KERNEL(op, direct, conv_direct_reject, run_direct)
const ddp_kernel CPU_LOCAL(conv2d)[] = {FORWARD(conv2d), NO_MORE};
const ddp_kernel CPU_LOCAL(conv2d_grad_input)[] = {FORWARD(conv2d_grad_input), NO_MORE};
const ddp_kernel CPU_LOCAL(conv_bn_act)[] = {FORWARD(conv_bn_act),
                                             KERNEL(conv_bn_act, apart, conv_apart_reject, conv_apart_run), NO_MORE};
const ddp_kernel CPU_LOCAL(conv2d_grad_weight)[] = {
    KERNEL(conv2d_grad_weight, depthwise, conv_depthwise_reject, run_depthwise),
    KERNEL(conv2d_grad_weight, amx, conv_amx_reject, conv_amx_weight),
    KERNEL(conv2d_grad_weight, wino, conv_wino_reject, conv_wino_weight),
    KERNEL(conv2d_grad_weight, wino_s2, conv_wino_s2_reject, conv_wino_s2_weight),
    KERNEL(conv2d_grad_weight, direct, conv_direct_reject, conv_weight_run),
    NO_MORE};
