/* infer.c -- helpers of inference: shapes, dtypes, error text. */
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "op.h"

int ddp__op_fail_(const char *op, int status, const char *fmt, ...) {
    char text[512];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    return ddp__fail(status, "%s: %s", op, text);
}

static const char *in_name(const ddp_call *c, int i) { return c->op->lists ? c->op->in_names[0] : c->op->in_names[i]; }

int ddp__need_float(const ddp_call *c, int i) {
    if (!c->in[i] || ddp__is_float(c->in[i]->m.dtype)) return 0;
    return ddp__op_fail(c, DDP_EDTYPE, "%s is %s, expected a floating dtype", in_name(c, i),
                        ddp_dtype_name(c->in[i]->m.dtype));
}

int ddp__need_dtype(const ddp_call *c, int i, ddp_dtype dtype) {
    if (!c->in[i] || c->in[i]->m.dtype == dtype) return 0;
    return ddp__op_fail(c, DDP_EDTYPE, "%s is %s, expected %s", in_name(c, i), ddp_dtype_name(c->in[i]->m.dtype),
                        ddp_dtype_name(dtype));
}

int ddp__need_ndim(const ddp_call *c, int i, int ndim) {
    if (!c->in[i] || c->in[i]->m.ndim == ndim) return 0;
    return ddp__op_fail(c, DDP_ESHAPE, "%s is %s, expected %d dims", in_name(c, i), DDP_SHAPE_TEXT(&c->in[i]->m), ndim);
}

int ddp__wrap_dim(const ddp_call *c, int64_t dim, int ndim) {
    int n = ndim ? ndim : 1;
    if (dim >= -n && dim < n) return (int)(dim < 0 ? dim + n : dim);
    ddp__op_fail(c, DDP_EINVAL, "dim %lld of a tensor of %d dims", (long long)dim, ndim);
    return DDP_NO_OP;
}

ddp_dtype ddp__promote(ddp_dtype a, ddp_dtype b) {
    if (a == b) return a;
    bool fa = ddp__is_float(a), fb = ddp__is_float(b);
    if (fa && fb) return a == DDP_F64 || b == DDP_F64 ? DDP_F64 : DDP_F32; /* f16 with bf16 is f32 */
    if (fa) return a;
    if (fb) return b;
    if (a == DDP_BOOL) return b;
    if (b == DDP_BOOL) return a;
    if (a == DDP_I64 || b == DDP_I64) return DDP_I64;
    return DDP_I32;
}

int ddp__call_device(const ddp_call *c) {
    for (int i = 0; i < c->n_in; i++)
        if (c->in[i] && !c->in[i]->is_number) return c->in[i]->m.device;
    return DDP_CPU;
}

int ddp__out_shape(const ddp_call *c, ddp_dtype dtype, int ndim, const int64_t *size, ddp_meta *out) {
    if (ndim > DDP_MAX_DIM) return ddp__op_fail(c, DDP_ESHAPE, "a result of %d dims, at most %d", ndim, DDP_MAX_DIM);
    out->dtype = dtype;
    out->device = ddp__call_device(c);
    out->ndim = ndim;
    int64_t n = 1;
    for (int i = 0; i < ndim; i++) {
        if (size[i] < 0) return ddp__op_fail(c, DDP_ESHAPE, "size %lld of dim %d is negative", (long long)size[i], i);
        if (__builtin_mul_overflow(n, size[i], &n))
            return ddp__op_fail(c, DDP_ESHAPE, "%s is too large", ddp__shape_text(ndim, size, (char[160]){0}, 160));
        out->size[i] = size[i];
    }
    ddp__meta_rowmajor(out);
    return 0;
}

int ddp__out_like(const ddp_call *c, int i, ddp_dtype dtype, ddp_meta *out) {
    *out = c->in[i]->m;
    out->dtype = dtype;
    out->offset = 0;
    if (!ddp__meta_is_dense(out)) ddp__meta_rowmajor(out);
    return 0;
}

static bool broadcast_sizes(const ddp_call *c, int n, ddp_meta *out) {
    out->ndim = 0;
    for (int i = 0; i < n; i++)
        if (c->in[i] && c->in[i]->m.ndim > out->ndim) out->ndim = c->in[i]->m.ndim;
    for (int d = 0; d < out->ndim; d++) {
        out->size[d] = 1;
        for (int i = 0; i < n; i++) {
            if (!c->in[i]) continue;
            int k = d - (out->ndim - c->in[i]->m.ndim);
            int64_t s = k < 0 ? 1 : c->in[i]->m.size[k];
            if (s == 1 || s == out->size[d]) continue;
            if (out->size[d] != 1) return false;
            out->size[d] = s;
        }
    }
    return true;
}

int ddp__out_broadcast(const ddp_call *c, int n, ddp_dtype dtype, ddp_meta *out) {
    out->dtype = dtype;
    out->device = ddp__call_device(c);
    if (!broadcast_sizes(c, n, out)) {
        char text[400];
        size_t at = 0;
        text[0] = 0;
        for (int i = 0; i < n && at < sizeof text; i++)
            if (c->in[i])
                at += (size_t)snprintf(text + at, sizeof text - at, "%s%s %s", at ? ", " : "", in_name(c, i),
                                       DDP_SHAPE_TEXT(&c->in[i]->m));
        return ddp__op_fail(c, DDP_ESHAPE, "shapes do not broadcast: %s", text);
    }
    /* The layout of a dense input of full size; channels-last wins over the first. */
    const ddp_meta *like = NULL;
    for (int i = 0; i < n; i++) {
        if (!c->in[i] || !ddp__meta_same_size(&c->in[i]->m, out) || !ddp__meta_is_dense(&c->in[i]->m)) continue;
        if (!like || (ddp__meta_is_channels_last(&c->in[i]->m) && !ddp__meta_is_channels_last(like)))
            like = &c->in[i]->m;
    }
    if (like) memcpy(out->stride, like->stride, sizeof out->stride);
    else ddp__meta_rowmajor(out);
    return 0;
}
