/* collate.c -- samples side by side: one batch tensor of many small ones. */
#include <string.h>

#include "../mem/device.h"
#include "data.h"

ddp_tensor *ddp__batch_tensor(int64_t n, int ndim, const int64_t *size, ddp_dtype dtype, int device) {
    ddp_meta m = {.dtype = dtype, .device = DDP_CPU, .ndim = ndim + 1};
    if (m.ndim > DDP_MAX_DIM) {
        ddp__fail(DDP_ESHAPE, "collate: samples of %d dims make batches of %d, at most %d", ndim, ndim + 1,
                  DDP_MAX_DIM);
        return NULL;
    }
    m.size[0] = n;
    for (int d = 0; d < ndim; d++) m.size[d + 1] = size[d];
    ddp__meta_channels_last(&m);
    return device == DDP_CPU ? ddp__tensor_new(&m) : ddp__tensor_pinned(&m, device);
}

int ddp__batch_send(ddp_tensor **t, int device) {
    if (!*t || (*t)->m.device == device) return 0;
    ddp_meta m = (*t)->m;
    m.device = device;
    ddp_tensor *there = ddp__tensor_new(&m);
    if (!there) return ddp__pending();
    size_t bytes = (size_t)there->numel * ddp__dtype_bytes[m.dtype];
    if (bytes && ddp__device_of(device)->copy_ahead(device - 1, ddp__ptr(there), ddp__ptr(*t), bytes) < 0) {
        ddp__drop(there);
        return ddp__pending();
    }
    ddp__drop(*t);
    *t = there;
    return 0;
}

void ddp__copy_strided(char *dst, ddp_dtype dst_type, const int64_t *dst_stride, const char *src, ddp_dtype src_type,
                       const int64_t *src_stride, int ndim, const int64_t *size) {
    int64_t idx[DDP_MAX_DIM] = {0}, numel = 1, from = 0, to = 0, run = 1;
    size_t bytes = ddp__dtype_bytes[src_type];
    for (int d = 0; d < ndim; d++) numel *= size[d];
    if (numel == 0) return;
    int outer = ndim; /* dims from here on lie without gaps in both, and are copied as one run */
    while (dst_type == src_type && outer > 0 &&
           (size[outer - 1] == 1 || (src_stride[outer - 1] == run && dst_stride[outer - 1] == run)))
        run *= size[--outer];
    for (int64_t i = 0; i < numel; i += run) {
        if (dst_type == src_type) memcpy(dst + to * (int64_t)bytes, src + from * (int64_t)bytes, (size_t)run * bytes);
        else ddp__store(dst_type, dst, to, ddp__load(src_type, src, from));
        for (int d = outer - 1; d >= 0; d--) {
            from += src_stride[d];
            to += dst_stride[d];
            if (++idx[d] < size[d]) break;
            from -= src_stride[d] * size[d];
            to -= dst_stride[d] * size[d];
            idx[d] = 0;
        }
    }
}

int ddp__collate_check(const char *what, const ddp_tensor *first, const ddp_tensor *t) {
    if (!first != !t)
        return ddp__fail(DDP_EINVAL, "collate: this sample has %s %s, the batch's first has %s", t ? "a" : "no", what,
                         first ? "one" : "none");
    if (t && t->m.device != DDP_CPU)
        return ddp__fail(DDP_EDEVICE,
                         "collate: %s of this sample is on %s: samples are put together on the cpu, and the "
                         "loader copies batches (DataLoader's device)",
                         what, DDP_DEVICE_TEXT(t->m.device));
    if (!t || (first->is_number && t->is_number)) return 0;
    if (first->is_number != t->is_number)
        return ddp__fail(DDP_EDTYPE, "collate: %s of this sample is a %s, of the batch's first a %s", what,
                         t->is_number ? "number" : "tensor", first->is_number ? "number" : "tensor");
    if (!ddp__meta_same_size(&first->m, &t->m))
        return ddp__fail(DDP_ESHAPE, "collate: %s of this sample is %s, of the batch's first %s", what,
                         DDP_SHAPE_TEXT(&t->m), DDP_SHAPE_TEXT(&first->m));
    if (first->m.dtype != t->m.dtype)
        return ddp__fail(DDP_EDTYPE, "collate: %s of this sample is %s, of the batch's first %s", what,
                         ddp_dtype_name(t->m.dtype), ddp_dtype_name(first->m.dtype));
    return 0;
}

/* What numbers become: i64 when all are whole, else f32. */
static ddp_dtype number_type(ddp_tensor *const *t, int64_t n) {
    for (int64_t i = 0; i < n; i++)
        if (t[i]->m.dtype != DDP_I64) return DDP_F32;
    return DDP_I64;
}

ddp_tensor *ddp__collate(ddp_tensor *const *t, int64_t n, int dtype, int device) {
    const ddp_meta *m = &t[0]->m;
    ddp_dtype to = dtype >= 0 ? (ddp_dtype)dtype : t[0]->is_number ? number_type(t, n) : m->dtype;
    ddp_tensor *out = ddp__batch_tensor(n, m->ndim, m->size, to, device);
    if (!out || out->numel == 0) return out;
    for (int64_t i = 0; i < n; i++) {
        char *dst = ddp__ptr(out) + i * out->m.stride[0] * ddp__dtype_bytes[to];
        ddp__copy_strided(dst, to, out->m.stride + 1, ddp__ptr(t[i]), t[i]->m.dtype, t[i]->m.stride, m->ndim, m->size);
    }
    return out;
}
