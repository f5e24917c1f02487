/* lines.c -- see lines.h. */
#include "lines.h"

#include <string.h>

const char *ddp__cuda_no_numbers(const ddp_call *c) {
    for (int i = 0; i < c->n_in; i++)
        if (c->in[i] && c->in[i]->is_number) return "a number";
    return NULL;
}

/* Dims of size 1 never matter. */
static bool same_strides(const ddp_meta *a, const ddp_meta *b) {
    for (int d = 0; d < a->ndim; d++)
        if (a->size[d] != 1 && a->stride[d] != b->stride[d]) return false;
    return true;
}

int ddp__cuda_lay(const ddp_call *c, ddp_tensor *t, const ddp_meta *like, ddp_laid *out) {
    *out = (ddp_laid){0};
    if (!t) return 0;
    out->p = ddp__ptr(t);
    if (t->numel == 0 || same_strides(&t->m, like)) return 0;
    out->bytes = (size_t)t->numel * ddp__dtype_bytes[t->m.dtype];
    out->own = out->p = ddp__cuda_scratch_take(c, out->bytes);
    if (!out->own) return ddp__pending();
    ddp_storage storage = {.data = out->own};
    ddp_tensor copy = {.m = t->m, .numel = t->numel, .storage = &storage}, *both[2] = {&copy, t};
    memcpy(copy.m.stride, like->stride, sizeof copy.m.stride);
    copy.m.offset = 0;
    walk_args a;
    ddp__cuda_walk(&a, 2, both);
    ddp_grid g = ddp__grid(a.n, 4);
    switch (ddp__dtype_bytes[t->m.dtype]) {
        case 2: return ddp__launch_copy_2(c, &a, g);
        case 4: return ddp__launch_copy_4(c, &a, g);
        case 8: return ddp__launch_copy_8(c, &a, g);
        default: return ddp__launch_copy_1(c, &a, g);
    }
}

int ddp__cuda_lay_rows(const ddp_call *c, ddp_tensor *t, ddp_laid *out) {
    ddp_meta rows = {0};
    if (t) {
        rows = t->m;
        ddp__meta_rowmajor(&rows);
    }
    return ddp__cuda_lay(c, t, &rows, out);
}

void ddp__cuda_unlay(const ddp_call *c, ddp_laid *l) {
    if (l->own) ddp__cuda_scratch_give(c, l->own, l->bytes);
    *l = (ddp_laid){0};
}
