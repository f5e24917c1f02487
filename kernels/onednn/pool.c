/* pool.c -- avg_pool2d, channels-last. Not max_pool2d: oneDNN's workspace does not hold places h*W + w. */
#include "dnnl_util.h"

#include <string.h>

typedef struct pool {
    int64_t x[4], y[4], kernel[2], stride[2], padding[2], include;
} pool;

static void pool_of(const ddp_call *c, pool *v) {
    const ddp_avg_pool2d_attrs *a = c->attrs;
    memcpy(v->x, c->in[0]->m.size, sizeof v->x);
    memcpy(v->y, c->out[0]->m.size, sizeof v->y);
    memcpy(v->kernel, a->kernel, sizeof v->kernel);
    memcpy(v->padding, a->padding, sizeof v->padding);
    for (int i = 0; i < 2; i++) v->stride[i] = a->stride[i] ? a->stride[i] : a->kernel[i];
    v->include = a->count_include_pad != 0;
}

static const char *build(dnn_entry *e, const void *ctx) {
    static const char *const no = "oneDNN has no fast average pooling for this";
    const pool *v = ctx;
    int64_t s[4];
    dnnl_memory_desc_t x, y;
    dnnl_pooling_desc_t d;
    dnn_strides(DNN_CHANNELS_LAST, v->x, s);
    if (!dnn_md(&x, 4, v->x, s)) return no;
    dnn_strides(DNN_CHANNELS_LAST, v->y, s);
    if (!dnn_md(&y, 4, v->y, s)) return no;
    dnnl_alg_kind_t alg = v->include ? dnnl_pooling_avg_include_padding : dnnl_pooling_avg_exclude_padding;
    dnnl_dims_t stride = {v->stride[0], v->stride[1]}, kernel = {v->kernel[0], v->kernel[1]};
    dnnl_dims_t pad = {v->padding[0], v->padding[1]};
    dnnl_status_t st =
        dnnl_pooling_forward_desc_init(&d, dnnl_forward_inference, alg, &x, &y, stride, kernel, pad, pad);
    if (st != dnnl_success) return no;
    dnnl_primitive_desc_t pd = dnn_desc(&d, NULL);
    if (!pd) return no;
    if (dnn_is_reference(pd)) {
        dnnl_primitive_desc_destroy(pd);
        return no;
    }
    const dnn_use use[2] = {{DNNL_ARG_SRC, false, dnnl_query_src_md, 0, x},
                            {DNNL_ARG_DST, true, dnnl_query_dst_md, 0, y}};
    return dnn_entry_make(e, pd, 2, use);
}

static dnn_entry *entry_of(const ddp_call *c) {
    pool v;
    dnn_key k;
    pool_of(c, &v);
    dnn_key_start(&k, c->op->id);
    dnn_key_add(&k, (int)(sizeof v / sizeof(int64_t)), (const int64_t *)(const void *)&v);
    return dnn_find(&k, build, &v);
}

static const char *reject(const ddp_call *c) {
    if (c->in[0]->m.dtype != DDP_F32) return "oneDNN is used for f32 only";
    if (c->out[0]->numel == 0 || c->in[0]->numel == 0) return "an empty tensor";
    if (dnn_layout_of(&c->in[0]->m) != DNN_CHANNELS_LAST || dnn_layout_of(&c->out[0]->m) != DNN_CHANNELS_LAST)
        return "oneDNN is used for channels-last only";
    const dnn_entry *e = entry_of(c);
    return e ? e->why : "out of memory";
}

static int run(const ddp_call *c) {
    const dnn_entry *e = entry_of(c);
    if (!e) return ddp__pending();
    return dnn_run(e, c->op->name, (void *[]){dnn_ptr(c->in[0]), dnn_ptr(c->out[0])});
}

const ddp_kernel dnn_avg_pool2d[] = {{"avg_pool2d.onednn", reject, run}, {NULL, NULL, NULL}};
