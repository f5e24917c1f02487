/* conv.c -- conv2d and its two gradients.
 *
 * Activations stay channels-last and oneDNN's direct loops read them as they lie; weights are reordered into what it
 * wants, each call. 3x3 windows of stride 1 go through Winograd's F(4x4, 3x3) (Lavin & Gray 2016) where that was
 * measured faster in spite of the reorders of activations (README.md): half the time, errors of 2e-6 of the largest. */
#include "dnnl_util.h"

#include <string.h>

typedef enum conv_kind { FORWARD, GRAD_INPUT, GRAD_WEIGHT } conv_kind;

/* All that a primitive depends on; also the cache key, word by word. */
typedef struct conv {
    int64_t kind, bias, groups, exact;
    int64_t x[4], w[4], y[4];
    int64_t x_layout, w_layout, y_layout;
    int64_t stride[2], padding[2], dilation[2];
} conv;

/* The layout a tensor is handed over in: DNN_OTHER is copied. */
static int64_t handed(const ddp_tensor *t, dnn_layout otherwise) {
    dnn_layout l = dnn_layout_of(&t->m);
    return l == DNN_OTHER ? otherwise : l;
}

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
    ddp_tensor *x, *w, *y, *bias;
} roles;

static roles roles_of(const ddp_call *c, conv *v) {
    roles r = {NULL, NULL, NULL, NULL};
    memset(v, 0, sizeof *v);
    if (c->op->id == DDP_OP_conv2d) {
        COPY_WINDOW(v, (const ddp_conv2d_attrs *)c->attrs);
        v->kind = FORWARD;
        r = (roles){c->in[0], c->in[1], c->out[0], c->in[2]};
    } else if (c->op->id == DDP_OP_conv2d_grad_input) {
        COPY_WINDOW(v, (const ddp_conv2d_grad_input_attrs *)c->attrs);
        v->kind = GRAD_INPUT;
        r = (roles){c->out[0], c->in[1], c->in[0], NULL};
    } else {
        COPY_WINDOW(v, (const ddp_conv2d_grad_weight_attrs *)c->attrs);
        v->kind = GRAD_WEIGHT;
        r = (roles){c->in[1], c->out[0], c->in[0], NULL};
    }
    v->bias = r.bias != NULL;
    v->exact = ddp_float32_matmul_precision() == DDP_F32_EXACT;
    COPY_4(v->x, r.x->m.size);
    COPY_4(v->w, r.w->m.size);
    COPY_4(v->y, r.y->m.size);
    v->x_layout = handed(r.x, DNN_CHANNELS_LAST);
    v->w_layout = handed(r.w, DNN_ROWMAJOR);
    v->y_layout = handed(r.y, DNN_CHANNELS_LAST);
    return r;
}

/* ---- descriptors ------------------------------------------------------------------------------------------------- */

typedef struct conv_mds {
    dnnl_memory_desc_t x, w, y, bias;
} conv_mds;

/* The tensors' memory; weights get a dim of groups in front where there are several. */
static bool user_mds(const conv *v, conv_mds *m) {
    int64_t s[4], gs[5], gsize[5];
    dnn_strides((dnn_layout)v->x_layout, v->x, s);
    if (!dnn_md(&m->x, 4, v->x, s)) return false;
    dnn_strides((dnn_layout)v->y_layout, v->y, s);
    if (!dnn_md(&m->y, 4, v->y, s)) return false;
    if (v->bias && !dnn_md(&m->bias, 1, &v->w[0], (int64_t[]){1})) return false;
    dnn_strides((dnn_layout)v->w_layout, v->w, s);
    if (v->groups == 1) return dnn_md(&m->w, 4, v->w, s);
    gsize[0] = v->groups;
    gsize[1] = v->w[0] / v->groups;
    gs[0] = gsize[1] * s[0];
    gs[1] = s[0];
    for (int i = 1; i < 4; i++) {
        gsize[i + 1] = v->w[i];
        gs[i + 1] = s[i];
    }
    return dnn_md(&m->w, 5, gsize, gs);
}

static void any_layout(dnnl_memory_desc_t *m) {
    dnnl_dims_t size;
    int n = m->ndims;
    memcpy(size, m->dims, sizeof size);
    dnnl_memory_desc_init_by_tag(m, n, size, dnnl_f32, dnnl_format_tag_any);
}

/* oneDNN's descriptor of one kind; NULL: it has none. A gradient needs the forward's as a hint. */
static dnnl_primitive_desc_t describe(const conv *v, const conv_mds *m, dnnl_alg_kind_t alg) {
    dnnl_convolution_desc_t d;
    dnnl_dims_t stride = {v->stride[0], v->stride[1]}, pad = {v->padding[0], v->padding[1]};
    dnnl_dims_t dilate = {v->dilation[0] - 1, v->dilation[1] - 1};
    const dnnl_memory_desc_t *bias = v->bias ? &m->bias : NULL;
    dnnl_status_t st = dnnl_dilated_convolution_forward_desc_init(&d, dnnl_forward_training, alg, &m->x, &m->w, bias,
                                                                  &m->y, stride, dilate, pad, pad);
    dnnl_primitive_desc_t forward = st == dnnl_success ? dnn_desc(&d, NULL) : NULL, pd = NULL;
    if (v->kind == FORWARD || !forward) return forward;
    if (v->kind == GRAD_INPUT)
        st = dnnl_dilated_convolution_backward_data_desc_init(&d, alg, &m->x, &m->w, &m->y, stride, dilate, pad, pad);
    else
        st = dnnl_dilated_convolution_backward_weights_desc_init(&d, alg, &m->x, &m->w, NULL, &m->y, stride, dilate,
                                                                 pad, pad);
    if (st == dnnl_success) pd = dnn_desc(&d, forward);
    dnnl_primitive_desc_destroy(forward);
    return pd;
}

/* Where Winograd was measured to pay: enough channels, and enough tiles of 4x4 outputs to fill its products. */
static bool winograd_pays(const conv *v) {
    if (v->exact || v->w[2] != 3 || v->w[3] != 3 || v->groups != 1) return false;
    for (int i = 0; i < 2; i++)
        if (v->stride[i] != 1 || v->dilation[i] != 1 || v->padding[i] > 1) return false;
    int64_t in = v->w[1], out = v->w[0], tiles = v->y[0] * ((v->y[2] + 3) / 4) * ((v->y[3] + 3) / 4);
    if (in % 16 || out % 16 || in < 32 || out < 32 || tiles < 64) return false;
    if (v->kind != GRAD_WEIGHT) return true;
    return in * out >= 8192 || (in * out >= 4096 && v->y[2] <= 16);
}

/* The descriptor to use: Winograd where it pays; else direct on channels-last; else in oneDNN's own layout. */
static dnnl_primitive_desc_t choose(const conv *v, const conv_mds *user) {
    conv_mds blocked = *user, plain = *user;
    any_layout(&blocked.x);
    any_layout(&blocked.y);
    any_layout(&blocked.w);
    any_layout(&plain.w);
    int64_t s[4];
    dnn_strides(DNN_CHANNELS_LAST, v->x, s);
    dnn_md(&plain.x, 4, v->x, s);
    dnn_strides(DNN_CHANNELS_LAST, v->y, s);
    dnn_md(&plain.y, 4, v->y, s);
    dnnl_primitive_desc_t pd = winograd_pays(v) ? describe(v, &blocked, dnnl_convolution_winograd) : NULL;
    if (pd) return pd;
    pd = describe(v, &plain, dnnl_convolution_direct);
    if (pd && !dnn_is_reference(pd)) return pd;
    if (pd) dnnl_primitive_desc_destroy(pd);
    pd = describe(v, &blocked, dnnl_convolution_direct);
    if (pd && !dnn_is_reference(pd)) return pd;
    if (pd) dnnl_primitive_desc_destroy(pd);
    return NULL;
}

static const char *build(dnn_entry *e, const void *ctx) {
    static const dnnl_query_t query[3][3] = {
        {dnnl_query_src_md, dnnl_query_weights_md, dnnl_query_dst_md},
        {dnnl_query_diff_src_md, dnnl_query_weights_md, dnnl_query_diff_dst_md},
        {dnnl_query_src_md, dnnl_query_diff_weights_md, dnnl_query_diff_dst_md},
    };
    static const int arg[3][3] = {
        {DNNL_ARG_SRC, DNNL_ARG_WEIGHTS, DNNL_ARG_DST},
        {DNNL_ARG_DIFF_SRC, DNNL_ARG_WEIGHTS, DNNL_ARG_DIFF_DST},
        {DNNL_ARG_SRC, DNNL_ARG_DIFF_WEIGHTS, DNNL_ARG_DIFF_DST},
    };
    static const conv_kind result_is[3] = {GRAD_INPUT, GRAD_WEIGHT, FORWARD}; /* x, w and y are results of these */
    const conv *v = ctx;
    conv_mds m;
    if (!user_mds(v, &m)) return "oneDNN does not take these sizes";
    dnnl_primitive_desc_t pd = choose(v, &m);
    if (!pd) return "oneDNN has no fast convolution for this";
    const dnnl_memory_desc_t md[3] = {m.x, m.w, m.y};
    dnn_use use[4];
    for (int i = 0; i < 3; i++)
        use[i] = (dnn_use){arg[v->kind][i], v->kind == (int64_t)result_is[i], query[v->kind][i], 0, md[i]};
    if (v->bias) use[3] = (dnn_use){DNNL_ARG_BIAS, false, dnnl_query_weights_md, 1, m.bias};
    return dnn_entry_make(e, pd, v->bias ? 4 : 3, use);
}

static dnn_entry *entry_of(const ddp_call *c, const conv *v) {
    dnn_key k;
    dnn_key_start(&k, c->op->id);
    dnn_key_add(&k, (int)(sizeof *v / sizeof(int64_t)), (const int64_t *)(const void *)v);
    return dnn_find(&k, build, v);
}

/* ---- kernels ----------------------------------------------------------------------------------------------------- */

static const char *reject(const ddp_call *c) {
    conv v;
    if (c->in[0]->m.dtype != DDP_F32) return "oneDNN is used for f32 only";
    roles r = roles_of(c, &v);
    if (r.x->numel == 0 || r.w->numel == 0 || r.y->numel == 0) return "an empty tensor";
    if (dnn_layout_of(&c->out[0]->m) == DNN_OTHER) return "a result that is not dense";
    const dnn_entry *e = entry_of(c, &v);
    return e ? e->why : "out of memory";
}

static int run(const ddp_call *c) {
    conv v;
    roles r = roles_of(c, &v);
    dnn_temp temp[4] = {{NULL, 0}};
    int st;
    const dnn_entry *e = entry_of(c, &v);
    if (!e) return ddp__pending();
    void *ptr[4] = {dnn_dense(r.x, DNN_CHANNELS_LAST, &temp[0]), dnn_dense(r.w, DNN_ROWMAJOR, &temp[1]),
                    dnn_dense(r.y, DNN_CHANNELS_LAST, &temp[2]),
                    r.bias ? dnn_dense(r.bias, DNN_ROWMAJOR, &temp[3]) : NULL};
    if (ptr[0] && ptr[1] && ptr[2] && (ptr[3] || !r.bias)) st = dnn_run(e, c->op->name, ptr);
    else st = ddp__pending();
    for (int i = 0; i < 4; i++) dnn_temp_free(&temp[i]);
    return st;
}

const ddp_kernel dnn_conv2d[] = {{"conv2d.onednn", reject, run}, {NULL, NULL, NULL}};
const ddp_kernel dnn_conv2d_grad_input[] = {{"conv2d_grad_input.onednn", reject, run}, {NULL, NULL, NULL}};
const ddp_kernel dnn_conv2d_grad_weight[] = {{"conv2d_grad_weight.onednn", reject, run}, {NULL, NULL, NULL}};
