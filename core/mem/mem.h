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
/* Counts handles: +1, -1. */
DDP_LOCAL void ddp__mem_count_tensor(int d);

#endif
