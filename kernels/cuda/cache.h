/* cache.h -- a folder of files that can be made anew: $DDP_CACHE, else $XDG_CACHE_HOME/ddp, else ~/.cache/ddp. DDP_CACHE="": none. */
#ifndef DDP_CUDA_CACHE_H
#define DDP_CUDA_CACHE_H

#include "../../core/base/base.h"

/* The bytes kept under `kind` and key (key_bytes, any bytes), or NULL: there are none, or the file is damaged or of another key. Free
 * them. */
DDP_LOCAL void *ddp__cache_read(const char *kind, const void *key, size_t key_bytes, size_t *bytes);
/* Keeps them. Written beside and renamed: a reader never sees half a file. What cannot be written is left. */
DDP_LOCAL void ddp__cache_write(const char *kind, const void *key, size_t key_bytes, const void *data, size_t bytes);

#endif
