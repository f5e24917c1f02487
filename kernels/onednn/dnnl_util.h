/* dnnl_util.h -- what the kernels over oneDNN share: primitives cached by what they compute, and running them.
 *
 * Everything here belongs to one thread: engine, stream and cache are per thread, so nothing is locked. */
#ifndef DDP_DNNL_UTIL_H
#define DDP_DNNL_UTIL_H

#include <oneapi/dnnl/dnnl.h>

#include "../../core/mem/mem.h"
#include "../../core/op/op.h"

enum { DNN_KEY = 64, DNN_SLOTS = 9 };

/* What a primitive computes: op, sizes, strides, attributes, threads. Compared word by word. */
typedef struct dnn_key {
    int n;
    int64_t v[DNN_KEY];
} dnn_key;
DDP_LOCAL void dnn_key_start(dnn_key *k, int op);
DDP_LOCAL void dnn_key_add(dnn_key *k, int n, const int64_t *v);

/* One argument of a primitive. Where the primitive wants another layout than the tensor's, `own` has it, in the
 * workspace, and `reorder` goes between. */
typedef struct dnn_slot {
    int arg;
    bool out;
    dnnl_memory_t user, own;
    dnnl_primitive_t reorder;
    size_t at; /* of own in the workspace */
} dnn_slot;

typedef struct dnn_entry {
    dnn_key key;
    const char *why; /* not NULL: oneDNN does not do it, the reason */
    dnnl_primitive_t prim;
    dnnl_memory_t scratch;
    size_t scratch_at, workspace; /* bytes */
    int n;
    dnn_slot slot[DNN_SLOTS];
} dnn_entry;

/* An argument as the caller has it, and where the primitive says how it wants it. */
typedef struct dnn_use {
    int arg;
    bool out;
    dnnl_query_t query;
    int index;
    dnnl_memory_desc_t user;
} dnn_use;

/* The entry of key, built on the first call: `build` makes a descriptor and calls dnn_entry_make, and returns NULL or
 * the reason why there is none. NULL with the error set when memory ran out. */
typedef const char *(*dnn_build_fn)(dnn_entry *e, const void *ctx);
DDP_LOCAL dnn_entry *dnn_find(const dnn_key *k, dnn_build_fn build, const void *ctx);
/* Takes over pd. NULL, or the reason why it failed. */
DDP_LOCAL const char *dnn_entry_make(dnn_entry *e, dnnl_primitive_desc_t pd, int n, const dnn_use *use);
/* A descriptor with scratch memory of ours; NULL when oneDNN has none. */
DDP_LOCAL dnnl_primitive_desc_t dnn_desc(const void *op_desc, dnnl_primitive_desc_t hint);
/* Is it one of its reference loops, which are slower than ours? */
DDP_LOCAL bool dnn_is_reference(dnnl_primitive_desc_t pd);
/* Runs e on the tensors' memory, in the order of its slots. A status. */
DDP_LOCAL int dnn_run(const dnn_entry *e, const char *op, void *const *ptr);
/* Number of threads that this thread's calls use, set for OpenMP. */
DDP_LOCAL int dnn_threads(void);

/* ---- tensors ---------------------------------------------------------------------------------------------------- */

typedef enum dnn_layout { DNN_ROWMAJOR, DNN_CHANNELS_LAST, DNN_OTHER } dnn_layout;
/* Channels-last wins where both hold. */
DDP_LOCAL dnn_layout dnn_layout_of(const ddp_meta *m);
/* f32 memory of 4 sizes in this layout, with the strides written plainly even where a size is 1. */
DDP_LOCAL void dnn_strides(dnn_layout layout, const int64_t *size, int64_t *stride);
DDP_LOCAL bool dnn_md(dnnl_memory_desc_t *md, int n, const int64_t *size, const int64_t *stride);

/* Dense memory made for one call. */
typedef struct dnn_temp {
    void *p;
    size_t bytes;
} dnn_temp;
DDP_LOCAL void dnn_temp_free(dnn_temp *t);
/* t's elements: its own memory, or for DNN_OTHER a copy in layout `to`. NULL with the error set. */
DDP_LOCAL float *dnn_dense(const ddp_tensor *t, dnn_layout to, dnn_temp *temp);
static inline float *dnn_ptr(const ddp_tensor *t) { return (float *)t->storage->data + t->m.offset; }

/* ---- the kernels, by family -------------------------------------------------------------------------------------- */

DDP_LOCAL extern const ddp_kernel dnn_conv2d[], dnn_conv2d_grad_input[], dnn_conv2d_grad_weight[];
DDP_LOCAL extern const ddp_kernel dnn_matmul[], dnn_linear[];
DDP_LOCAL extern const ddp_kernel dnn_avg_pool2d[];

#endif
