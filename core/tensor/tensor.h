/* tensor.h -- storage, shape and the tensor handle as the rooms above see them. */
#ifndef DDP_TENSOR_H
#define DDP_TENSOR_H

#include <stdatomic.h>

#include "../base/base.h"

/* What is known of a tensor without its data. */
typedef struct ddp_meta {
    ddp_dtype dtype;
    int device;
    int ndim;
    int64_t size[DDP_MAX_DIM];
    int64_t stride[DDP_MAX_DIM]; /* elements */
    int64_t offset;              /* elements into the storage */
} ddp_meta;

/* Bytes with a count of owners and a count of writes. */
typedef struct ddp_storage {
    atomic_int refs;
    bool graph_views;   /* a view of it was recorded: in place is refused inside graphs */
    bool big;           /* a ddp_big lies behind it */
    bool pinned;        /* bytes of the host that a device copies while the host goes on */
    atomic_bool packed; /* kernels may have kept something that they made of it */
    int device;
    size_t bytes;
    void *data;
    atomic_uint_fast64_t version; /* writes so far; the tape notes it with what it saves */
    void (*deleter)(void *ctx);   /* of blobs; NULL: the allocator's */
    void *ctx;
} ddp_storage;

/* What is known of a storage of DDP_BIG bytes and more (big.c). */
enum { DDP_BIG = 1 << 20 };
typedef struct ddp_big {
    struct ddp_big *next, *before;
    size_t bytes;
    ddp_meta m;     /* of the tensor it was made for */
    const char *op; /* the op that made it; NULL: none */
    char where[64]; /* the host's line; "" until it is told */
} ddp_big;

typedef struct ddp_node ddp_node;           /* grad/tape.h */
typedef struct ddp_leaf_info ddp_leaf_info; /* grad/tape.h */

struct ddp_tensor {
    ddp_meta m;
    int64_t numel;
    atomic_int refs;
    ddp_storage *storage;
    uint64_t id;
    bool requires_grad; /* a leaf that wants a gradient */
    bool is_number;     /* ddp_scalar: weak in promotion */
    bool is_view;       /* made by a view op of a tensor in a graph */
    bool shown;         /* a gradient whose handle was given out: its bytes may be looked at any time */
    int node_out;       /* which output of node this is */
    ddp_node *node;     /* the op that made it; NULL for a leaf */
    ddp_tensor *grad;
    ddp_leaf_info *leaf; /* accumulation node, hooks, bucket; NULL until needed */
};

/* Bytes from the caching allocator; NULL with the error set. */
DDP_LOCAL ddp_storage *ddp__storage_new(size_t bytes, int device);
DDP_LOCAL void ddp__storage_release(ddp_storage *s);

/* A tensor over `s` (one more reference to it); takes m as it is. NULL with the error set. */
DDP_LOCAL ddp_tensor *ddp__tensor_over(ddp_storage *s, const ddp_meta *m);
/* A tensor with storage of its own for m (offset 0, dense). */
DDP_LOCAL ddp_tensor *ddp__tensor_new(const ddp_meta *m);
/* The same in the host's pinned memory, for copies to `device`. */
DDP_LOCAL ddp_tensor *ddp__tensor_pinned(const ddp_meta *m, int device);
/* As results of ops are given out: to the open scope, if there is one. Returns t. */
DDP_LOCAL ddp_tensor *ddp__scope_own(ddp_tensor *t);
/* Gives up a reference that the library itself took: unlike ddp_release it leaves the scope's list alone, for the scope's
 * own reference is another. NULL is allowed. */
DDP_LOCAL void ddp__drop(ddp_tensor *t);
/* Does a scope of this thread own new results? */
DDP_LOCAL bool ddp__in_scope(void);

enum {
    DDP_STORAGE_HEADER = 64
}; /* a storage's block: the header, then the bytes of a small one, the ddp_big of a big one */
static inline ddp_big *ddp__big(const ddp_storage *s) {
    return s->big ? (ddp_big *)((char *)(uintptr_t)s + DDP_STORAGE_HEADER) : NULL;
}
DDP_LOCAL void ddp__big_add(ddp_big *b, size_t bytes);
DDP_LOCAL void ddp__big_remove(ddp_big *b);
/* t was made by op; nothing where its storage is not big. */
DDP_LOCAL void ddp__big_made(const ddp_tensor *t, const char *op);

static inline char *ddp__ptr(const ddp_tensor *t); /* first element */

/* Row-major strides for m's sizes, offset 0. */
DDP_API void ddp__meta_rowmajor(ddp_meta *m);
/* Channels-last strides for 4 dims (N, C, H, W in logical order), else row-major. */
DDP_API void ddp__meta_channels_last(ddp_meta *m);
DDP_API int64_t ddp__meta_numel(const ddp_meta *m);
DDP_API bool ddp__meta_is_rowmajor(const ddp_meta *m);
/* 4-D and dense with C innermost. Dims of size 1 never matter. */
DDP_API bool ddp__meta_is_channels_last(const ddp_meta *m);
/* Every element of a block of numel elements, in some order of dims, no gaps, no overlaps. */
DDP_API bool ddp__meta_is_dense(const ddp_meta *m);
DDP_API bool ddp__meta_same_size(const ddp_meta *a, const ddp_meta *b);
/* "[2,3]" into buf; returns buf. */
DDP_API const char *ddp__shape_text(int ndim, const int64_t *size, char *buf, size_t n);
/* "cpu", "cuda:0" into buf; returns buf. */
DDP_API const char *ddp__device_text(int device, char *buf, size_t n);
#define DDP_DEVICE_TEXT(device) ddp__device_text(device, (char[24]){0}, 24)
#define DDP_SHAPE_TEXT(m) ddp__shape_text((m)->ndim, (m)->size, (char[160]){0}, 160)

/* Where the host reads t's elements (at t's strides): t's own bytes, or a copy of a device's, *owned, which the caller frees. Waits
 * for the device. A status. */
DDP_LOCAL int ddp__host_view(const ddp_tensor *t, const char **p, void **owned);

static inline bool ddp__is_float(ddp_dtype d) { return d <= DDP_BF16; }
static inline bool ddp__is_half(ddp_dtype d) { return d == DDP_F16 || d == DDP_BF16; } /* 16 bits wide */
/* What sums and statistics of d are kept in, and what its arithmetic is done in. */
static inline ddp_dtype ddp__wide(ddp_dtype d) { return ddp__is_half(d) ? DDP_F32 : d; }
static inline bool ddp__is_int(ddp_dtype d) { return d >= DDP_I64 && d <= DDP_U8; }
DDP_API extern const uint8_t ddp__dtype_bytes[DDP_DTYPES];

static inline char *ddp__ptr(const ddp_tensor *t) {
    return (char *)t->storage->data + t->m.offset * ddp__dtype_bytes[t->m.dtype];
}

/* f16 and bf16 as bits, rounded to nearest even (dtype.c). */
DDP_API float ddp__f16_to_f32(uint16_t h);
DDP_API uint16_t ddp__f32_to_f16(float f);
static inline float ddp__bf16_to_f32(uint16_t h) {
    union {
        uint32_t u;
        float f;
    } x = {(uint32_t)h << 16};
    return x.f;
}
DDP_API uint16_t ddp__f32_to_bf16(float f);
/* Element i (in elements from p) of any dtype as a double, and back. */
DDP_API double ddp__load(ddp_dtype d, const void *p, int64_t i);
DDP_API void ddp__store(ddp_dtype d, void *p, int64_t i, double v);

/* Set by grad at start-up: frees what hangs on a handle (node, leaf info). */
DDP_LOCAL extern void (*ddp__tensor_drop_history)(ddp_tensor *t);

#endif
