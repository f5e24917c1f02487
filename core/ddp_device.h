/* ddp_device.h -- devices and their memory; included by ddp.h, whose conventions hold. */
#ifndef DDP_DEVICES_H
#define DDP_DEVICES_H

#ifndef DDP_CDEF
#include "ddp.h"
#ifdef __cplusplus
extern "C" {
#endif
#endif

/* 0 when `device` is there, else DDP_EDEVICE with the reason and what to do. Any thread. */
DDP_API int ddp_device_check(int device);
/* Waits for all work of a device; failures of earlier work come out here. Any thread. */
DDP_API int ddp_device_wait(int device);
/* GPUs that this process sees; 0: none, and why [OPTIONAL] says in a sentence of at most n bytes why not. Any thread. */
DDP_API int ddp_num_gpus(char *why, size_t n);
/* Library k of those that GPUs are computed with, from 0: 1 and its version in text, or 0 and what is missing; -1 past the last and where there
 * is no GPU. open 0: one that no work has needed yet is not opened, and counts as missing, with an empty text. Any thread. */
DDP_API int ddp_gpu_library(int k, int open, const char **name, char *text, size_t n);
/* 1 when GPU i can read the memory of GPU j without the host. */
DDP_API int ddp_gpu_peer(int i, int j);
/* What a device is, in words, at most n bytes with the final 0; a status. Any thread. */
DDP_API int ddp_device_text(int device, char *text, size_t n);

/* ---- memory --------------------------------------------------------------------------------------------------- */

typedef struct ddp_memory {
    int64_t allocated;    /* bytes in tensors now */
    int64_t reserved;     /* bytes taken from the system: in use and cached */
    int64_t peak;         /* the most `allocated` has been since the reset */
    int64_t live_tensors; /* handles */
} ddp_memory;
/* Any thread. */
DDP_API void ddp_memory_stats(int device, ddp_memory *out);
DDP_API void ddp_memory_reset_peak(int device);
/* Gives cached blocks back to the system, also weights that kernels kept as they want them. Any thread. */
DDP_API void ddp_memory_empty_cache(void);
/* A live storage of 1 MB or more: what it was made for. */
typedef struct ddp_live {
    int64_t bytes;
    int dtype, ndim;
    int64_t size[DDP_MAX_DIM];
    const char *op; /* the op that made it; NULL: none */
    char where[64]; /* what ddp_set_origin noted, "" when nothing */
} ddp_live;
/* The n largest on a device (-1: anywhere), the largest first, into out [n]; returns how many there were. Any thread. */
DDP_API int ddp_memory_largest(int device, ddp_live *out, int n);
/* Notes who made t ("train.lua:57"; copied, cut at 63 bytes) where its storage has 1 MB or more. Any thread. */
DDP_API void ddp_set_origin(ddp_tensor *t, const char *where);
/* 1 when nothing is noted yet for a storage of that size. Any thread. */
DDP_API int ddp_wants_origin(const ddp_tensor *t);
/* Bytes of storage made since ddp_memory_gc_done, on the host and on devices. Any thread. */
DDP_API int64_t ddp_live_bytes_since_gc(void);
/* The same, but a 64th of a device's memory counts as DDP_GC_BYTES: drives the Lua collector, which runs each DDP_GC_BYTES.
 * Any thread. */
enum { DDP_GC_BYTES = 24 << 20 };
DDP_API int64_t ddp_memory_pressure(void);
DDP_API void ddp_memory_gc_done(void);
/* The k-th allocation from now on fails once with DDP_ENOMEM (k >= 1; 0: never). For tests of failure. */
DDP_API void ddp_memory_fail_at(int64_t k);
/* Memory hooks for embedders: big blocks come from these. Before the first tensor. NULL restores. */
DDP_API void ddp_set_memory_hooks(void *(*alloc)(void *ctx, size_t bytes),
                                  void (*release)(void *ctx, void *p, size_t bytes), void *ctx);

#ifndef DDP_CDEF
#ifdef __cplusplus
}
#endif
#endif

#endif
