/* meta.c -- shapes and strides. */
#include <stdio.h>

#include "tensor.h"

void ddp__meta_rowmajor(ddp_meta *m) {
    int64_t s = 1;
    for (int i = m->ndim - 1; i >= 0; i--) {
        m->stride[i] = s;
        s *= m->size[i] > 0 ? m->size[i] : 1;
    }
    m->offset = 0;
}

void ddp__meta_channels_last(ddp_meta *m) {
    ddp__meta_rowmajor(m);
    if (m->ndim != 4) return;
    int64_t c = m->size[1] > 0 ? m->size[1] : 1, w = m->size[3] > 0 ? m->size[3] : 1,
            h = m->size[2] > 0 ? m->size[2] : 1;
    m->stride[1] = 1;
    m->stride[3] = c;
    m->stride[2] = c * w;
    m->stride[0] = c * w * h;
}

int64_t ddp__meta_numel(const ddp_meta *m) {
    int64_t n = 1;
    for (int i = 0; i < m->ndim; i++)
        if (__builtin_mul_overflow(n, m->size[i], &n)) return INT64_MAX;
    return n;
}

bool ddp__meta_is_rowmajor(const ddp_meta *m) {
    int64_t s = 1;
    if (ddp__meta_numel(m) == 0) return true;
    for (int i = m->ndim - 1; i >= 0; i--) {
        if (m->size[i] != 1 && m->stride[i] != s) return false;
        s *= m->size[i];
    }
    return true;
}

bool ddp__meta_is_channels_last(const ddp_meta *m) {
    if (m->ndim != 4) return false;
    static const int order[4] = {1, 3, 2, 0};
    int64_t s = 1;
    for (int k = 0; k < 4; k++) {
        int i = order[k];
        if (m->size[i] != 1 && m->stride[i] != s) return false;
        s *= m->size[i];
    }
    return true;
}

bool ddp__meta_is_dense(const ddp_meta *m) {
    bool used[DDP_MAX_DIM] = {false};
    int64_t s = 1;
    for (int left = m->ndim; left > 0; left--) {
        int pick = -1;
        for (int i = 0; i < m->ndim; i++)
            if (!used[i] && (m->size[i] == 1 || m->stride[i] == s) && (pick < 0 || m->size[pick] != 1)) pick = i;
        if (pick < 0) return false;
        used[pick] = true;
        s *= m->size[pick];
    }
    return true;
}

bool ddp__meta_same_size(const ddp_meta *a, const ddp_meta *b) {
    if (a->ndim != b->ndim) return false;
    for (int i = 0; i < a->ndim; i++)
        if (a->size[i] != b->size[i]) return false;
    return true;
}

const char *ddp__shape_text(int ndim, const int64_t *size, char *buf, size_t n) {
    size_t at = (size_t)snprintf(buf, n, "[");
    for (int i = 0; i < ndim && at < n; i++)
        at += (size_t)snprintf(buf + at, n - at, "%s%lld", i ? "," : "", (long long)size[i]);
    if (at < n) snprintf(buf + at, n - at, "]");
    return buf;
}

const char *ddp__device_text(int device, char *buf, size_t n) {
    if (device == DDP_CPU) snprintf(buf, n, "cpu");
    else snprintf(buf, n, "cuda:%d", device - 1);
    return buf;
}
