/* to_device.c -- a copy between devices: the bytes as they lie where x is dense, else by way of the host. */
#include <stdlib.h>
#include <string.h>

#include "../../core/mem/device.h"
#include "ref.h"

static int copy_bytes(void *dst, int dst_device, const void *src, int src_device, size_t bytes) {
    if (dst_device == DDP_CPU && src_device == DDP_CPU) {
        memcpy(dst, src, bytes);
        return 0;
    }
    return ddp__device_of(dst_device ? dst_device : src_device)->copy(dst, dst_device, src, src_device, bytes);
}

/* x's elements in the order of y's memory, at `to`. */
static void pack(char *to, const ddp_meta *y, const char *from, const ddp_meta *x, int64_t numel) {
    size_t elem = ddp__dtype_bytes[x->dtype];
    ddp_meta at_zero = *x;
    at_zero.offset = 0;
    for (int64_t i = 0; i < numel; i++)
        memcpy(to + (size_t)ref_at(y, i) * elem, from + (size_t)ref_at(&at_zero, i) * elem, elem);
}

static int run_to_device(const ddp_call *c) {
    const ddp_tensor *x = c->in[0], *y = c->out[0];
    size_t bytes = (size_t)x->numel * ddp__dtype_bytes[x->m.dtype];
    if (!bytes) return 0;
    if (ddp__copies_later && x->storage->pinned && y->m.device != DDP_CPU && ddp__meta_is_dense(&x->m))
        return ddp__device_of(y->m.device)->copy_later(y->m.device - 1, ddp__ptr(y), ddp__ptr(x), bytes);
    if (ddp__meta_is_dense(&x->m)) return copy_bytes(ddp__ptr(y), y->m.device, ddp__ptr(x), x->m.device, bytes);
    const char *from;
    void *owned = NULL, *packed = NULL;
    int st = ddp__host_view(x, &from, &owned);
    if (st == 0 && !(packed = malloc(bytes))) st = ddp__op_fail(c, DDP_ENOMEM, "out of memory");
    if (st == 0) {
        pack(packed, &y->m, from, &x->m, x->numel);
        st = copy_bytes(ddp__ptr(y), y->m.device, packed, DDP_CPU, bytes);
    }
    free(packed);
    free(owned);
    return st;
}
DDP_REF_KERNEL(to_device, run_to_device);
