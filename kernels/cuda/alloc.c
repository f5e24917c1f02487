/* alloc.c -- memory of GPUs: freed blocks wait in bins by size for the next of their kind. Work is queued in the order of the
 * calls, so a block may be given out while work on it is still queued. */
#include <pthread.h>
#include <stdlib.h>

#include "cuda.h"

enum { MAX_GPUS = 64, BINS = 64 * 4 };

typedef struct block {
    struct block *next;
    void *p;
} block;

static struct {
    pthread_mutex_t lock;
    block *bin[BINS];
    int64_t allocated, reserved, peak;
} pools[MAX_GPUS];
static atomic_int_fast64_t fail_at;
static pthread_once_t once = PTHREAD_ONCE_INIT;

static void make_locks(void) {
    for (int i = 0; i < MAX_GPUS; i++) pthread_mutex_init(&pools[i].lock, NULL);
}

/* Four classes a doubling, from 512 bytes. */
static int class_of(size_t bytes, size_t *rounded) {
    size_t size = 512;
    int c = 0;
    while (size < bytes) {
        size_t quarter = size / 4;
        for (int k = 1; k <= 4; k++)
            if (size + (size_t)k * quarter >= bytes) {
                *rounded = size + (size_t)k * quarter;
                return c + k;
            }
        size *= 2;
        c += 4;
    }
    *rounded = size;
    return c;
}

void *ddp__gpu_alloc(int i, size_t bytes) {
    pthread_once(&once, make_locks);
    size_t size;
    int c = class_of(bytes, &size);
    if (!ddp__gpu(i)) return NULL;
    if (atomic_load(&fail_at) > 0 && atomic_fetch_sub(&fail_at, 1) == 1) {
        ddp__fail(DDP_ENOMEM, "out of GPU memory: %zu bytes", bytes);
        return NULL;
    }
    pthread_mutex_lock(&pools[i].lock);
    block *b = pools[i].bin[c];
    void *p = b ? b->p : NULL;
    if (b) {
        pools[i].bin[c] = b->next;
        free(b);
    } else if (ddp__cuda.cudaMalloc(&p, size) == cudaSuccess) {
        pools[i].reserved += (int64_t)size;
    } else {
        p = NULL;
    }
    if (p) {
        pools[i].allocated += (int64_t)size;
        if (pools[i].allocated > pools[i].peak) pools[i].peak = pools[i].allocated;
    }
    pthread_mutex_unlock(&pools[i].lock);
    if (!p) ddp__fail(DDP_ENOMEM, "out of GPU memory: %zu bytes", bytes);
    return p;
}

void ddp__gpu_release(int i, void *p, size_t bytes) {
    size_t size;
    int c = class_of(bytes, &size);
    block *b = malloc(sizeof *b);
    pthread_mutex_lock(&pools[i].lock);
    pools[i].allocated -= (int64_t)size;
    if (b) {
        *b = (block){pools[i].bin[c], p};
        pools[i].bin[c] = b;
    }
    pthread_mutex_unlock(&pools[i].lock);
}

void *ddp__cuda_scratch_take(const ddp_call *c, size_t bytes) {
    const ddp_gpu *g = ddp__gpu_of(c);
    return g ? ddp__gpu_alloc(g->index, bytes) : NULL;
}
void ddp__cuda_scratch_give(const ddp_call *c, void *p, size_t bytes) {
    const ddp_gpu *g = ddp__gpu_of(c);
    if (p && g) ddp__gpu_release(g->index, p, bytes);
}

void ddp__gpu_stats(int i, ddp_memory *out) {
    out->allocated = pools[i].allocated;
    out->reserved = pools[i].reserved;
    out->peak = pools[i].peak;
}
void ddp__gpu_reset_peak(int i) { pools[i].peak = pools[i].allocated; }
void ddp__gpu_empty_cache(int i) { (void)i; }
void ddp__gpu_fail_at(int64_t k) { atomic_store(&fail_at, k); }

void *ddp__pinned_alloc(size_t bytes) {
    void *p = NULL;
    return ddp__cuda_check(ddp__cuda.cudaHostAlloc(&p, bytes, cudaHostAllocDefault), "cudaHostAlloc") < 0 ? NULL : p;
}
void ddp__pinned_release(void *p, size_t bytes) {
    (void)bytes;
    ddp__cuda.cudaFreeHost(p);
}
