/* tensor.c -- storages, handles, scopes. */
#include "tensor.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../mem/device.h"
#include "../mem/mem.h"

enum {
    HEADER = DDP_STORAGE_HEADER, /* a small storage and its bytes are one block; the bytes stay 64-aligned */
    INLINE = 64 << 10
};
_Static_assert(sizeof(ddp_storage) <= HEADER, "the header fits in front of inline bytes");

void (*ddp__tensor_drop_history)(ddp_tensor *t);

/* ---- storage ---------------------------------------------------------------------------------------------------- */

/* Bytes of the block that holds the header: a host's data too when small, what is noted of it when big. */
static size_t header_block(size_t bytes, int device) {
    if (bytes >= DDP_BIG) return HEADER + sizeof(ddp_big);
    return device == DDP_CPU && bytes <= INLINE ? HEADER + bytes : HEADER;
}

/* Bytes on a device; an empty storage has none. */
static void *device_alloc(size_t bytes, int device) {
    const ddp_device_type *d = ddp__device(device, "memory");
    void *p = d ? d->alloc(device - 1, bytes) : NULL;
    if (p) ddp__mem_taken(bytes, d->memory(device - 1));
    return p;
}

ddp_storage *ddp__storage_new(size_t bytes, int device) {
    size_t block = header_block(bytes, device);
    ddp_storage *s = ddp__mem_alloc(block);
    if (!s) return NULL;
    void *data = (char *)s + HEADER;
    if (device != DDP_CPU || bytes > INLINE) {
        data = device == DDP_CPU ? ddp__mem_alloc(bytes) : bytes ? device_alloc(bytes, device) : NULL;
        if (!data && bytes) {
            ddp__mem_free(s, block);
            return NULL;
        }
    }
    memset(s, 0, sizeof *s);
    s->refs = 1;
    s->device = device;
    s->bytes = bytes;
    s->data = data;
    s->big = bytes >= DDP_BIG;
    if (s->big) ddp__big_add(ddp__big(s), bytes);
    return s;
}

void ddp__storage_release(ddp_storage *s) {
    if (!s || atomic_fetch_sub_explicit(&s->refs, 1, memory_order_acq_rel) != 1) return;
    if (atomic_load_explicit(&s->packed, memory_order_relaxed)) ddp__packed_forget(s);
    if (s->deleter) s->deleter(s->ctx);
    bool separate = s->data != (char *)s + HEADER, own = separate && !s->deleter && !s->ctx && s->data;
    if (own && s->device == DDP_CPU) ddp__mem_free(s->data, s->bytes);
    else if (own) ddp__device_of(s->device)->release(s->device - 1, s->data, s->bytes);
    if (s->big) ddp__big_remove(ddp__big(s));
    ddp__mem_free(s, s->big ? HEADER + sizeof(ddp_big) : separate ? HEADER : HEADER + s->bytes);
}

/* ---- scopes ------------------------------------------------------------------------------------------------------ */

/* A stack of tensors per thread; a NULL entry opens a scope, BARRIER shuts those below off. */
static const char barrier_mark;
#define BARRIER ((ddp_tensor *)(void *)&barrier_mark)

static _Thread_local struct {
    ddp_tensor **v;
    int n, room;
    bool active; /* the innermost mark is a scope, not a barrier */
} scope;

static bool scope_push(ddp_tensor *t) {
    if (scope.n == scope.room) {
        int room = scope.room ? 2 * scope.room : 64;
        ddp_tensor **v = realloc(scope.v, (size_t)room * sizeof *v);
        if (!v) return false;
        scope.v = v;
        scope.room = room;
    }
    scope.v[scope.n++] = t;
    return true;
}

static void scope_find_active(void) {
    scope.active = false;
    for (int i = scope.n - 1; i >= 0; i--) {
        if (scope.v[i] && scope.v[i] != BARRIER) continue;
        scope.active = scope.v[i] == NULL;
        return;
    }
    if (scope.n == 0) {
        free(scope.v);
        scope.v = NULL;
        scope.room = 0;
    }
}

void ddp_scope_begin(void) {
    if (scope_push(NULL)) scope.active = true;
}

void ddp_scope_end(void) {
    while (scope.n > 0) {
        ddp_tensor *t = scope.v[scope.n - 1];
        if (t == BARRIER) return; /* not ours to cross */
        scope.n--;
        if (!t) break;
        ddp__drop(t);
    }
    scope_find_active();
}

void ddp_scope_push_barrier(void) {
    if (scope_push(BARRIER)) scope.active = false;
}

void ddp_scope_pop_barrier(void) {
    while (scope.n > 0) {
        ddp_tensor *t = scope.v[--scope.n];
        if (t == BARRIER) break;
        if (t) ddp__drop(t);
    }
    scope_find_active();
}

/* Takes t off the innermost scope's list. */
static bool scope_take(const ddp_tensor *t) {
    for (int i = scope.n - 1; i >= 0 && scope.v[i] && scope.v[i] != BARRIER; i--) {
        if (scope.v[i] != t) continue;
        memmove(&scope.v[i], &scope.v[i + 1], (size_t)(scope.n - i - 1) * sizeof *scope.v);
        scope.n--;
        return true;
    }
    return false;
}

ddp_tensor *ddp__scope_own(ddp_tensor *t) {
    if (t && scope.active && !scope_push(t)) {
        ddp__drop(t);
        ddp__fail(DDP_ENOMEM, "scope: out of memory");
        return NULL;
    }
    return t;
}

bool ddp__in_scope(void) { return scope.active; }

ddp_tensor *ddp_keep(ddp_tensor *t) {
    if (t && scope.active) scope_take(t);
    return t;
}

/* ---- handles ------------------------------------------------------------------------------------------------------
 */

static atomic_uint_fast64_t next_id = 1;

ddp_tensor *ddp__tensor_over(ddp_storage *s, const ddp_meta *m) {
    ddp_tensor *t = malloc(sizeof *t);
    if (!t) {
        ddp__fail(DDP_ENOMEM, "tensor: out of memory for a handle");
        return NULL;
    }
    memset((char *)t + sizeof t->m, 0, sizeof *t - sizeof t->m);
    t->m = *m;
    t->numel = ddp__meta_numel(m);
    t->refs = 1;
    t->storage = s;
    atomic_fetch_add_explicit(&s->refs, 1, memory_order_relaxed);
    t->id = atomic_fetch_add_explicit(&next_id, 1, memory_order_relaxed);
    ddp__mem_count_tensor(1);
    return t;
}

ddp_tensor *ddp__tensor_new(const ddp_meta *m) {
    int64_t n = ddp__meta_numel(m);
    int64_t bytes;
    if (__builtin_mul_overflow(n, (int64_t)ddp__dtype_bytes[m->dtype], &bytes)) {
        ddp__fail(DDP_ENOMEM, "out of memory: %s of %s", DDP_SHAPE_TEXT(m), ddp_dtype_name(m->dtype));
        return NULL;
    }
    ddp_storage *s = ddp__storage_new((size_t)bytes, m->device);
    if (!s) return NULL;
    ddp_tensor *t = ddp__tensor_over(s, m);
    ddp__storage_release(s);
    if (t && s->big) ddp__big_made(t, NULL);
    return t;
}

ddp_tensor *ddp__tensor_pinned(const ddp_meta *m, int device) {
    size_t bytes = (size_t)ddp__meta_numel(m) * ddp__dtype_bytes[m->dtype];
    const ddp_device_type *d = ddp__device(device, "pinned memory");
    ddp_storage *s = d ? ddp__storage_new(0, DDP_CPU) : NULL;
    void *p = s && bytes ? d->host_alloc(device - 1, bytes) : NULL;
    if (s && p) {
        s->data = s->ctx = p;
        s->bytes = bytes;
        s->deleter = d->host_release;
        ddp__mem_taken(bytes, 0);
    }
    ddp_tensor *t = s && (p || !bytes) ? ddp__tensor_over(s, m) : NULL;
    if (t) s->pinned = true;
    ddp__storage_release(s);
    return t;
}

ddp_tensor *ddp_retain(ddp_tensor *t) {
    if (t) atomic_fetch_add_explicit(&t->refs, 1, memory_order_relaxed);
    return t;
}

void ddp_release(ddp_tensor *t) {
    if (t && scope.active) scope_take(t);
    ddp__drop(t);
}

void ddp__drop(ddp_tensor *t) {
    if (!t) return;
    if (atomic_fetch_sub_explicit(&t->refs, 1, memory_order_acq_rel) != 1) return;
    if ((t->node || t->leaf) && ddp__tensor_drop_history) ddp__tensor_drop_history(t);
    ddp__drop(t->grad);
    ddp__storage_release(t->storage);
    free(t);
    ddp__mem_count_tensor(-1);
}

/* ---- accessors ------------------------------------------------------------------------------------------------------
 */

int ddp_ndim(const ddp_tensor *t) { return t ? t->m.ndim : 0; }
int64_t ddp_numel(const ddp_tensor *t) { return t ? t->numel : 0; }
int ddp_dtype_of(const ddp_tensor *t) { return t ? (int)t->m.dtype : 0; }
int ddp_device_of(const ddp_tensor *t) { return t ? t->m.device : 0; }
uint64_t ddp_id(const ddp_tensor *t) { return t ? t->id : 0; }
uint64_t ddp_storage_id(const ddp_tensor *t) { return t ? (uint64_t)(uintptr_t)t->storage : 0; }
int ddp_storage_handles(const ddp_tensor *t) { return t ? atomic_load(&t->storage->refs) : 0; }
uint64_t ddp_version_of(const ddp_tensor *t) { return t ? atomic_load(&t->storage->version) : 0; }
int ddp_is_contiguous(const ddp_tensor *t) { return t && ddp__meta_is_rowmajor(&t->m); }
int ddp_is_pinned(const ddp_tensor *t) { return t && t->storage->pinned; }
int64_t ddp_storage_offset(const ddp_tensor *t) { return t ? t->m.offset : 0; }

static int dim_of(const ddp_tensor *t, int dim) {
    if (!t) return -1;
    if (dim < 0) dim += t->m.ndim;
    return dim < t->m.ndim ? dim : -1;
}

int64_t ddp_size(const ddp_tensor *t, int dim) {
    dim = dim_of(t, dim);
    return dim < 0 ? 0 : t->m.size[dim];
}

int64_t ddp_stride(const ddp_tensor *t, int dim) {
    dim = dim_of(t, dim);
    return dim < 0 ? 0 : t->m.stride[dim];
}

void *ddp_data(const ddp_tensor *t) {
    if (!t || t->numel == 0) return NULL;
    if (t->m.device != DDP_CPU && ddp__device_of(t->m.device)->wait(t->m.device - 1) < 0) return NULL;
    return ddp__ptr(t);
}

void ddp_mark_written(ddp_tensor *t) {
    if (!t) return;
    atomic_fetch_add(&t->storage->version, 1);
    if (atomic_exchange_explicit(&t->storage->packed, false, memory_order_relaxed)) ddp__packed_forget(t->storage);
}

/* ---- making tensors from outside ---- */

static int meta_check(const char *what, ddp_meta *m, int ndim, const int64_t *shape, int dtype, int device) {
    if (ndim < 0 || ndim > DDP_MAX_DIM)
        return ddp__fail(DDP_ESHAPE, "%s: %d dims, at most %d", what, ndim, DDP_MAX_DIM);
    if (dtype < 0 || dtype >= DDP_DTYPES) return ddp__fail(DDP_EDTYPE, "%s: no dtype %d", what, dtype);
    if (device != DDP_CPU && !ddp__device(device, what)) return ddp__pending();
    *m = (ddp_meta){.dtype = (ddp_dtype)dtype, .device = device, .ndim = ndim};
    for (int i = 0; i < ndim; i++) {
        if (shape[i] < 0)
            return ddp__fail(DDP_ESHAPE, "%s: size %lld of dim %d is negative", what, (long long)shape[i], i);
        m->size[i] = shape[i];
    }
    ddp__meta_rowmajor(m);
    return 0;
}

ddp_tensor *ddp_empty(int ndim, const int64_t *shape, int dtype, int device) {
    ddp_meta m;
    if (ddp__pending() || meta_check("empty", &m, ndim, shape, dtype, device) < 0) return NULL;
    return ddp__scope_own(ddp__tensor_new(&m));
}

ddp_tensor *ddp_from_data(const void *data, int ndim, const int64_t *shape, int dtype, int device) {
    ddp_meta m;
    if (ddp__pending() || meta_check("from_data", &m, ndim, shape, dtype, device) < 0) return NULL;
    ddp_tensor *t = ddp__tensor_new(&m);
    size_t bytes = t ? (size_t)t->numel * ddp__dtype_bytes[dtype] : 0;
    if (bytes && device == DDP_CPU) memcpy(ddp__ptr(t), data, bytes);
    else if (bytes && ddp__device_of(device)->copy(ddp__ptr(t), device, data, DDP_CPU, bytes) < 0) {
        ddp__drop(t);
        return NULL;
    }
    return ddp__scope_own(t);
}

ddp_tensor *ddp_from_blob(void *data, int ndim, const int64_t *shape, const int64_t *strides, int dtype, int device,
                          void (*deleter)(void *ctx), void *ctx) {
    ddp_meta m;
    if (ddp__pending() || meta_check("from_blob", &m, ndim, shape, dtype, device) < 0) return NULL;
    for (int i = 0; strides && i < ndim; i++) m.stride[i] = strides[i];
    if (!data && ddp__meta_numel(&m) > 0) {
        ddp__fail(DDP_ENULL, "from_blob: data is NULL");
        return NULL;
    }
    ddp_storage *s = ddp__storage_new(0, device);
    if (!s) return NULL;
    s->data = data ? data : (char *)s; /* never the inline place: it is not the allocator's */
    s->deleter = deleter;
    s->ctx = ctx ? ctx : s; /* marks foreign bytes */
    ddp_tensor *t = ddp__tensor_over(s, &m);
    if (!t) s->deleter = NULL; /* the caller still owns data */
    ddp__storage_release(s);
    return ddp__scope_own(t);
}

static ddp_tensor *number(double value, bool whole) {
    if (ddp__pending()) return NULL;
    ddp_meta m = {.dtype = whole ? DDP_I64 : DDP_F64};
    ddp_tensor *t = ddp__tensor_new(&m);
    if (!t) return NULL;
    ddp__store(m.dtype, ddp__ptr(t), 0, value);
    t->is_number = true;
    return ddp__scope_own(t);
}

ddp_tensor *ddp_scalar(double value) {
    return number(value,
                  value >= -9007199254740992.0 && value <= 9007199254740992.0 && value == (double)(int64_t)value);
}
ddp_tensor *ddp_scalar_float(double value) { return number(value, false); }

/* ---- reading ---- */

int ddp_item(const ddp_tensor *t, double *value) {
    if (ddp__pending()) return ddp__pending();
    if (!t) return ddp__fail(DDP_ENULL, "item: no tensor");
    if (t->numel != 1)
        return ddp__fail(DDP_ESHAPE, "item: %s has %lld elements, not one", DDP_SHAPE_TEXT(&t->m), (long long)t->numel);
    int64_t at_host;
    const void *p = ddp__ptr(t);
    if (t->m.device != DDP_CPU) {
        int st = ddp__device_of(t->m.device)->copy(&at_host, DDP_CPU, p, t->m.device, ddp__dtype_bytes[t->m.dtype]);
        if (st < 0) return st;
        p = &at_host;
    }
    if (t->m.dtype == DDP_I64) {
        int64_t v = *(const int64_t *)p;
        if (v > (int64_t)1 << 53 || v < -((int64_t)1 << 53))
            return ddp__fail(DDP_EINVAL, "item: %lld does not fit a double exactly", (long long)v);
    }
    *value = ddp__load(t->m.dtype, p, 0);
    return 0;
}

int ddp__host_view(const ddp_tensor *t, const char **p, void **owned) {
    *p = t->numel ? ddp__ptr(t) : NULL;
    *owned = NULL;
    if (t->m.device == DDP_CPU || !t->numel) return 0;
    int64_t last = 0; /* the furthest element; strides are never negative */
    for (int d = 0; d < t->m.ndim; d++) last += (t->m.size[d] - 1) * t->m.stride[d];
    size_t bytes = (size_t)(last + 1) * ddp__dtype_bytes[t->m.dtype];
    *owned = malloc(bytes);
    if (!*owned) return ddp__fail(DDP_ENOMEM, "out of memory: %zu bytes to look at a tensor of a device", bytes);
    int st = ddp__device_of(t->m.device)->copy(*owned, DDP_CPU, *p, t->m.device, bytes);
    if (st < 0) {
        free(*owned);
        *owned = NULL;
    }
    *p = *owned;
    return st;
}

int ddp_to_doubles(const ddp_tensor *t, double *out) {
    if (ddp__pending()) return ddp__pending();
    if (!t) return ddp__fail(DDP_ENULL, "to_doubles: no tensor");
    int64_t idx[DDP_MAX_DIM] = {0}, at = 0;
    const char *p;
    void *owned;
    int st = ddp__host_view(t, &p, &owned);
    if (st < 0) return st;
    for (int64_t i = 0; i < t->numel; i++) {
        out[i] = ddp__load(t->m.dtype, p, at);
        for (int d = t->m.ndim - 1; d >= 0; d--) {
            at += t->m.stride[d];
            if (++idx[d] < t->m.size[d]) break;
            at -= t->m.stride[d] * t->m.size[d];
            idx[d] = 0;
        }
    }
    free(owned);
    return 0;
}
