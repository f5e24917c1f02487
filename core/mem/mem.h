/* mem.h -- the caching allocator. Thread-safe. */
#ifndef DDP_MEM_H
#define DDP_MEM_H

#include "../base/base.h"

/* A block of at least `bytes`, 64-byte aligned; NULL with DDP_ENOMEM set. */
DDP_API void *ddp__mem_alloc(size_t bytes);
/* Gives it back to the cache; `bytes` as asked for. */
DDP_API void ddp__mem_free(void *p, size_t bytes);
/* A workspace of the calling thread, 64-byte aligned; given back in the reverse order, by the same thread. NULL with
 * DDP_ENOMEM set. */
DDP_LOCAL void *ddp__scratch_take(size_t bytes);
DDP_LOCAL void ddp__scratch_give(void *p, size_t bytes);

/* ---- packed weights (packed.c): DDP_PACK_CACHE_MB bounds what is kept (256; 0: nothing) ---- */
/* Which kernel's layout of which part of a storage. */
typedef struct ddp_pack_key {
    int64_t kind, dtype, offset, size[4];
} ddp_pack_key;
typedef struct ddp_packed {
    void *bytes; /* 64-byte aligned */
    bool ready;  /* false: who took it fills it */
} ddp_packed;
/* What was packed of this version of `owner`; NULL: the caller packs for itself (seen for the first time, being filled by another
 * thread, no room). Its owner must be forgotten when it is written or ends. Given back by ddp__packed_give. */
DDP_LOCAL ddp_packed *ddp__packed_take(const void *owner, uint64_t version, const ddp_pack_key *key, size_t size);
/* filled: what it should hold it does, whoever filled it. NULL is allowed. */
DDP_LOCAL void ddp__packed_give(ddp_packed *p, bool filled);
DDP_LOCAL void ddp__packed_forget(const void *owner);
/* Drops all that is not in use. */
DDP_LOCAL void ddp__packed_clear(void);
/* Bytes kept, for tests. */
DDP_API int64_t ddp__packed_bytes(void);

/* Bytes of a device were taken, which has `of` bytes in all: they drive the host's collector too. */
DDP_LOCAL void ddp__mem_taken(size_t bytes, int64_t of);
/* True for the allocation that ddp_memory_fail_at wants to fail; each asks once. */
DDP_API bool ddp__mem_fails(void);
/* Counts handles: +1, -1. */
DDP_LOCAL void ddp__mem_count_tensor(int d);

#endif
