/* shape.c -- joining, and the gradient of slice. Views are not computed: their entries say so. */
#include <string.h>

#include "ref.h"

static int run_view(const ddp_call *c) { return ddp__op_fail(c, DDP_ENOSUP, "a view is not computed"); }
DDP_REF_KERNEL(view, run_view);
DDP_REF_KERNEL(permute, run_view);
DDP_REF_KERNEL(transpose, run_view);
DDP_REF_KERNEL(expand, run_view);
DDP_REF_KERNEL(slice, run_view);
DDP_REF_KERNEL(select, run_view);
DDP_REF_KERNEL(unsqueeze, run_view);
DDP_REF_KERNEL(squeeze, run_view);

/* Copies src into a view of dst's bytes. */
static void copy_into(ddp_tensor *dst, const ddp_meta *part, const ddp_tensor *src) {
    size_t bytes = ddp__dtype_bytes[dst->m.dtype];
    char *base = (char *)dst->storage->data + (size_t)part->offset * bytes;
    for (int64_t i = 0; i < src->numel; i++)
        memcpy(base + (size_t)ref_at(part, i) * bytes, ddp__ptr(src) + (size_t)ref_at(&src->m, i) * bytes, bytes);
}

static int run_slice_grad(const ddp_call *c) {
    const ddp_slice_grad_attrs *a = c->attrs;
    ddp_tensor *dx = c->out[0];
    int d = (int)(a->dim < 0 ? a->dim + dx->m.ndim : a->dim);
    ddp_meta part = dx->m;
    memset(ddp__ptr(dx), 0, (size_t)dx->numel * ddp__dtype_bytes[dx->m.dtype]);
    part.size[d] = c->in[0]->m.size[d];
    part.offset += a->start * part.stride[d];
    part.stride[d] *= a->step;
    copy_into(dx, &part, c->in[0]);
    return 0;
}
DDP_REF_KERNEL(slice_grad, run_slice_grad);

static int run_cat(const ddp_call *c) {
    int64_t dim = ((const ddp_cat_attrs *)c->attrs)->dim;
    int d = (int)(dim < 0 ? dim + c->out[0]->m.ndim : dim);
    ddp_meta part = c->out[0]->m;
    for (int i = 0; i < c->n_in; i++) {
        part.size[d] = c->in[i]->m.size[d];
        copy_into(c->out[0], &part, c->in[i]);
        part.offset += part.size[d] * part.stride[d];
    }
    return 0;
}
DDP_REF_KERNEL(cat, run_cat);

static int run_stack(const ddp_call *c) {
    int64_t dim = ((const ddp_stack_attrs *)c->attrs)->dim;
    int d = (int)(dim < 0 ? dim + c->out[0]->m.ndim : dim);
    ddp_meta part = c->out[0]->m;
    int64_t step = part.stride[d];
    part.ndim--;
    for (int k = d; k < part.ndim; k++) {
        part.size[k] = part.size[k + 1];
        part.stride[k] = part.stride[k + 1];
    }
    for (int i = 0; i < c->n_in; i++) {
        copy_into(c->out[0], &part, c->in[i]);
        part.offset += step;
    }
    return 0;
}
DDP_REF_KERNEL(stack, run_stack);
