/* join.c -- cat, stack and the gradient of slice: copies into parts of the result. */
#include <string.h>

#include "cpu.h"

/* Copies src into the part of out that m describes. */
static void put(const ddp_tensor *out, const ddp_meta *m, ddp_tensor *src) {
    ddp_tensor part = {.m = *m, .numel = src->numel, .storage = out->storage};
    cpu_copy(&part, src);
}

static int run_cat(const ddp_call *c) {
    const int64_t dim = ((const ddp_cat_attrs *)c->attrs)->dim;
    ddp_meta part = c->out[0]->m;
    const int d = (int)(dim < 0 ? dim + part.ndim : dim);
    for (int i = 0; i < c->n_in; i++) {
        part.size[d] = c->in[i]->m.size[d];
        put(c->out[0], &part, c->in[i]);
        part.offset += part.size[d] * part.stride[d];
    }
    return 0;
}
CPU_KERNEL(cat, NULL, run_cat);

static int run_stack(const ddp_call *c) {
    const int64_t dim = ((const ddp_stack_attrs *)c->attrs)->dim;
    ddp_meta part = c->out[0]->m;
    const int d = (int)(dim < 0 ? dim + part.ndim : dim);
    const int64_t step = part.stride[d];
    part.ndim--;
    for (int k = d; k < part.ndim; k++) {
        part.size[k] = part.size[k + 1];
        part.stride[k] = part.stride[k + 1];
    }
    for (int i = 0; i < c->n_in; i++, part.offset += step) put(c->out[0], &part, c->in[i]);
    return 0;
}
CPU_KERNEL(stack, NULL, run_stack);

static void zero_loop(const void *ctx, char *const *p, int64_t n) {
    memset(p[0], 0, (size_t)n * *(const uint8_t *)ctx);
}
/* Zeros `size` places from `start` on along dim d of out. */
static void zero(const ddp_tensor *out, int d, int64_t start, int64_t size) {
    ddp_tensor part = {.m = out->m, .storage = out->storage}, *t = &part;
    if (out->numel == 0 || size == 0) return;
    part.numel = out->numel / out->m.size[d] * size;
    part.m.size[d] = size;
    part.m.offset += start * part.m.stride[d];
    cpu_map(1, &t, zero_loop, &ddp__dtype_bytes[out->m.dtype]);
}

static int run_slice_grad(const ddp_call *c) {
    const ddp_slice_grad_attrs *a = c->attrs;
    ddp_tensor *dx = c->out[0], *g = c->in[0];
    const int d = (int)(a->dim < 0 ? a->dim + dx->m.ndim : a->dim);
    ddp_meta part = dx->m;
    part.size[d] = g->m.size[d];
    part.offset += a->start * part.stride[d];
    part.stride[d] *= a->step;
    const int64_t end = a->start + (a->step == 1 ? part.size[d] : 0);
    zero(dx, d, 0, a->start);
    zero(dx, d, end, dx->m.size[d] - end);
    put(dx, &part, g);
    return 0;
}
CPU_KERNEL(slice_grad, NULL, run_slice_grad);
