/* iter.c -- strided walks over several operands of one shape. */
#include <stdlib.h>
#include <string.h>

#include "op.h"

/* Is dim a of the first operand further in than dim b? */
static bool inner(const ddp_iter *it, int a, int b) {
    for (int k = 0; k < it->n; k++) {
        int64_t sa = llabs(it->stride[k][a]), sb = llabs(it->stride[k][b]);
        if (sa == 0 || sb == 0 || sa == sb) continue;
        return sa < sb;
    }
    return false;
}

static void swap_dims(ddp_iter *it, int a, int b) {
    int64_t s = it->size[a];
    it->size[a] = it->size[b];
    it->size[b] = s;
    for (int k = 0; k < it->n; k++) {
        s = it->stride[k][a];
        it->stride[k][a] = it->stride[k][b];
        it->stride[k][b] = s;
    }
}

static void merge_dims(ddp_iter *it) {
    int d = 0;
    for (int e = 1; e < it->ndim; e++) {
        bool fits = true;
        for (int k = 0; k < it->n; k++) fits &= it->stride[k][e] == it->stride[k][d] * it->size[d];
        if (fits) {
            it->size[d] *= it->size[e];
            continue;
        }
        d++;
        it->size[d] = it->size[e];
        for (int k = 0; k < it->n; k++) it->stride[k][d] = it->stride[k][e];
    }
    if (it->ndim > 0) it->ndim = d + 1;
}

void ddp__iter_init(ddp_iter *it, int n, ddp_tensor *const *t) {
    const ddp_meta *shape = &t[0]->m;
    it->n = n;
    it->ndim = 0;
    it->numel = t[0]->numel;
    for (int k = 0; k < n; k++) {
        it->ptr[k] = ddp__ptr(t[k]);
        it->elem[k] = ddp__dtype_bytes[t[k]->m.dtype];
    }
    for (int d = shape->ndim - 1; d >= 0; d--) {
        if (shape->size[d] == 1) continue;
        it->size[it->ndim] = shape->size[d];
        for (int k = 0; k < n; k++) {
            int e = d - (shape->ndim - t[k]->m.ndim);
            it->stride[k][it->ndim] = e < 0 || t[k]->m.size[e] == 1 ? 0 : t[k]->m.stride[e];
        }
        it->ndim++;
    }
    for (int a = 1; a < it->ndim; a++)
        for (int b = a; b > 0 && inner(it, b, b - 1); b--) swap_dims(it, b, b - 1);
    merge_dims(it);
}

void ddp__iter_run(const ddp_iter *it, ddp_run_fn fn, void *ctx) {
    if (it->numel == 0) return;
    char *p[DDP_ITER_MAX];
    int64_t step[DDP_ITER_MAX] = {0}, idx[DDP_MAX_DIM] = {0};
    for (int k = 0; k < it->n; k++) {
        p[k] = it->ptr[k];
        step[k] = it->ndim ? it->stride[k][0] : 0;
    }
    int64_t count = it->ndim ? it->size[0] : 1;
    for (;;) {
        fn(ctx, p, step, count);
        int d = 1;
        for (; d < it->ndim; d++) {
            for (int k = 0; k < it->n; k++) p[k] += it->stride[k][d] * it->elem[k];
            if (++idx[d] < it->size[d]) break;
            for (int k = 0; k < it->n; k++) p[k] -= it->stride[k][d] * it->size[d] * it->elem[k];
            idx[d] = 0;
        }
        if (d >= it->ndim) return;
    }
}
