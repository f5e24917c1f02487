/* print.c -- a tensor as people read it. */
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#include "tensor.h"

enum { EDGE = 3, WHOLE = 1000 }; /* more than WHOLE elements: EDGE at each end of a dim */

typedef struct out {
    char *buf;
    size_t n, at;
    const char *elements; /* where the host reads them */
} out;

static void put(out *o, const char *fmt, ...) DDP_PRINTF(2, 3);
static void put(out *o, const char *fmt, ...) {
    va_list ap;
    va_start(ap, fmt);
    char *to = o->at < o->n ? o->buf + o->at : NULL;
    int k = vsnprintf(to, to ? o->n - o->at : 0, fmt, ap);
    va_end(ap);
    if (k > 0) o->at += (size_t)k;
}

static void put_value(out *o, const ddp_tensor *t, int64_t at) {
    double v = ddp__load(t->m.dtype, o->elements, at);
    if (t->m.dtype == DDP_BOOL) put(o, v != 0 ? "true" : "false");
    else if (t->m.dtype == DDP_I64) put(o, "%lld", (long long)((const int64_t *)(const void *)o->elements)[at]);
    else if (ddp__is_float(t->m.dtype)) put(o, "%.*g", t->m.dtype == DDP_F64 ? 8 : 5, v);
    else put(o, "%.0f", v);
}

static void put_dim(out *o, const ddp_tensor *t, int dim, int64_t at) {
    if (dim == t->m.ndim) {
        put_value(o, t, at);
        return;
    }
    int64_t n = t->m.size[dim];
    bool cut = t->numel > WHOLE && n > 2 * EDGE;
    put(o, "{");
    for (int64_t i = 0; i < n; i++) {
        if (cut && i == EDGE) {
            put(o, ", ...");
            i = n - EDGE;
        }
        if (i) put(o, dim == t->m.ndim - 1 ? ", " : ",\n%*s", dim + 1, "");
        put_dim(o, t, dim + 1, at + i * t->m.stride[dim]);
    }
    put(o, "}");
}

size_t ddp_to_text(const ddp_tensor *t, char *buf, size_t n) {
    out o = {buf, n, 0, NULL};
    void *owned = NULL;
    if (!t) {
        put(&o, "nil");
    } else if (ddp__host_view(t, &o.elements, &owned) < 0) {
        put(&o, "(its device failed) %s %s", DDP_SHAPE_TEXT(&t->m), ddp_dtype_name(t->m.dtype));
    } else {
        if (t->numel > 0) put_dim(&o, t, 0, 0);
        else put(&o, "{}");
        put(&o, " %s %s", DDP_SHAPE_TEXT(&t->m), ddp_dtype_name(t->m.dtype));
        if (t->m.device != DDP_CPU) put(&o, " cuda:%d", t->m.device - 1);
        if (t->node) put(&o, " from %s", ddp_grad_op(t) ? ddp_grad_op(t) : "host");
        else if (t->requires_grad) put(&o, " requires_grad");
    }
    free(owned);
    return o.at;
}
