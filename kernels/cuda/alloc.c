/* alloc.c -- memory of GPUs. It is taken from the runtime in segments and given out in blocks; a freed block waits for the next that
 * fits, for cudaMalloc and cudaFree stop the GPU. Work is queued in the order of the calls, so a block may be given out while work on it is
 * still queued on the same stream: each stream has blocks of its own. What another stream uses beside comes back when an event
 * there has passed.
 *
 * When all that was taken would pass 1.2 times the most ever in use (plus a little), segments in which nothing lies are given back first, so
 * varying shapes cannot pile up. DDP_CUDA_CACHE=0: every block is a cudaMalloc of its own, used once, so that tools see who
 * reads and writes where. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../../core/mem/mem.h"
#include "blocks.h"
#include "cuda.h"

enum { MAX_GPUS = 64, MAX_POOLS = 8, TABLE = 4096 };
static const size_t small_most = (size_t)1 << 20, small_segment = (size_t)2 << 20, /* blocks up to 1 MB */
    large_most = (size_t)10 << 20, large_segment = (size_t)20 << 20, /* up to 10 MB; above, a segment of its own */
    own_unit = (size_t)2 << 20;
static const int64_t slack = 32 << 20;

typedef struct gpu_memory {
    ddp_block_pool pools[MAX_POOLS]; /* pools[0]: of the compute stream */
    int n_pools;
    ddp_block *pending; /* released, but another stream may still use them */
    int64_t allocated, reserved, peak;
    cudaEvent_t *events; /* of this GPU, not in use */
    int n_events, room_events;
} gpu_memory;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* of all that follows */
static gpu_memory gpus[MAX_GPUS];
static ddp_block *table[TABLE]; /* what is given out, by address */

static bool cached(void) {
    static atomic_int on = -1;
    int v = atomic_load_explicit(&on, memory_order_relaxed);
    if (v < 0) {
        const char *s = getenv("DDP_CUDA_CACHE");
        atomic_store(&on, v = !(s && strcmp(s, "0") == 0));
    }
    return v;
}

/* ---- the table ---- */

static ddp_block **place_of(const void *p) { return &table[((uintptr_t)p / DDP_BLOCK_UNIT) % TABLE]; }

static void table_add(ddp_block *b) {
    ddp_block **at = place_of(b->p);
    b->next = *at;
    *at = b;
}

/* Where the block at p hangs; its content is NULL where there is none. */
static ddp_block **table_find(const void *p) {
    ddp_block **at = place_of(p);
    while (*at && (*at)->p != (const char *)p) at = &(*at)->next;
    return at;
}

/* ---- blocks that another stream uses ---- */

static cudaEvent_t take_event(gpu_memory *m) {
    cudaEvent_t e = NULL;
    if (m->n_events) return m->events[--m->n_events];
    return ddp__cuda.cudaEventCreateWithFlags(&e, cudaEventDisableTiming) ? NULL : e;
}

static void give_event(gpu_memory *m, cudaEvent_t e) {
    if (m->n_events == m->room_events) {
        int room = m->room_events ? 2 * m->room_events : 16;
        cudaEvent_t *v = realloc(m->events, (size_t)room * sizeof *v);
        if (!v) {
            ddp__cuda.cudaEventDestroy(e);
            return;
        }
        m->events = v;
        m->room_events = room;
    }
    m->events[m->n_events++] = e;
}

/* The pool of a stream, made when it is first seen; NULL: there are too many. */
static ddp_block_pool *pool_of(gpu_memory *m, cudaStream_t stream) {
    for (int k = 0; k < m->n_pools; k++)
        if (m->pools[k].stream == stream) return &m->pools[k];
    if (m->n_pools == MAX_POOLS) return NULL;
    m->pools[m->n_pools].stream = stream;
    return &m->pools[m->n_pools++];
}

/* Events behind the uses of b that its own stream does not wait for already; true when there is one. Where none can be had, the host
 * waits. */
static bool record_uses(gpu_memory *m, ddp_block *b) {
    int n = 0;
    for (int k = 0; k < b->n_uses; k++) {
        ddp_block_use u = b->use[k];
        if (b->pool == &m->pools[0] && u.number <= u.on->joined) continue;
        ddp__gpu_select(b->gpu);
        cudaEvent_t e = take_event(m);
        if (e && ddp__cuda.cudaEventRecord(e, u.on->stream) == cudaSuccess) {
            u.event = e;
            b->use[n++] = u;
        } else {
            ddp__cuda.cudaStreamSynchronize(u.on->stream);
            if (e) give_event(m, e);
        }
    }
    b->n_uses = n;
    return n > 0;
}

/* Blocks whose events have passed (or, with wait, all) are free. */
static void settle_pending(gpu_memory *m, bool wait) {
    for (ddp_block **at = &m->pending, *b; (b = *at);) {
        for (int k = b->n_uses - 1; k >= 0; k--) {
            cudaError_t e =
                wait ? ddp__cuda.cudaEventSynchronize(b->use[k].event) : ddp__cuda.cudaEventQuery(b->use[k].event);
            if (e == cudaErrorNotReady) break; /* any other: it has passed, or nothing runs on this GPU any more */
            give_event(m, b->use[k].event);
            b->n_uses = k;
        }
        if (b->n_uses) {
            at = &b->next;
            continue;
        }
        *at = b->next;
        ddp__block_give(b);
    }
    ddp__cuda.cudaGetLastError();
}

/* ---- segments ---- */

static ddp_block *largest_idle(gpu_memory *m) {
    ddp_block *best = NULL;
    for (int k = 0; k < m->n_pools; k++) {
        ddp_block *b = ddp__block_idle(&m->pools[k]);
        if (b && (!best || b->size > best->size)) best = b;
    }
    return best;
}

/* Gives back segments in which nothing lies, the largest first, until at most `limit` bytes are reserved. Queued work may still use
 * them: the host waits for it. A status of the runtime. */
static cudaError_t trim(gpu_memory *m, int64_t limit) {
    bool waited = false;
    settle_pending(m, false);
    while (m->reserved > limit) {
        ddp_block *b = largest_idle(m);
        if (!b) break;
        cudaError_t e = waited ? cudaSuccess : ddp__cuda.cudaDeviceSynchronize();
        waited = true;
        if (!e) e = ddp__cuda.cudaFree(b->p);
        if (e) return e;
        ddp__block_remove(b);
        m->reserved -= (int64_t)b->size;
        free(b);
    }
    return cudaSuccess;
}

static size_t segment_for(size_t size) {
    if (!cached()) return size;
    if (size <= small_most) return small_segment;
    return size <= large_most ? large_segment : (size + own_unit - 1) / own_unit * own_unit;
}

/* One more segment for a block of `size`. A status of the runtime. */
static cudaError_t grow(gpu_memory *m, ddp_block_pool *q, int gpu, size_t size) {
    size_t bytes = segment_for(size);
    int64_t most = m->allocated + (int64_t)size > m->peak ? m->allocated + (int64_t)size : m->peak;
    int64_t limit = most + most / 5 + slack;
    void *p = NULL;
    cudaError_t e = cudaSuccess;
    if (m->reserved + (int64_t)bytes > limit) e = trim(m, limit - (int64_t)bytes);
    if (!e) e = ddp__cuda.cudaMalloc(&p, bytes);
    if (e == cudaErrorMemoryAllocation && bytes > size && size > small_most) {
        bytes = (size + own_unit - 1) / own_unit * own_unit; /* rather a smaller segment than none */
        e = ddp__cuda.cudaMalloc(&p, bytes);
    }
    if (e) {
        ddp__cuda.cudaGetLastError();
        return e;
    }
    if (!ddp__block_segment(q, size <= small_most, gpu, p, bytes)) {
        ddp__cuda.cudaFree(p);
        return cudaErrorMemoryAllocation;
    }
    m->reserved += (int64_t)bytes;
    return cudaSuccess;
}

/* Lock held. What is there, what comes back, a new segment; then the same with all that is idle given back. */
static ddp_block *take(gpu_memory *m, ddp_block_pool *q, int gpu, size_t size, cudaError_t *e) {
    bool small = size <= small_most, failed;
    ddp_block *b = cached() ? ddp__block_take(q, small, size, &failed) : NULL;
    if (!b && m->pending) {
        settle_pending(m, false);
        b = ddp__block_take(q, small, size, &failed);
    }
    for (int again = 0; !b && again < 2; again++) {
        *e = grow(m, q, gpu, size);
        if (*e == cudaErrorMemoryAllocation && again == 0) {
            settle_pending(m, true);
            if ((b = ddp__block_take(q, small, size, &failed))) break;
            cudaError_t gone = trim(m, 0);
            if (gone) *e = gone;
            if (!gone) continue;
        }
        if (!*e) b = ddp__block_take(q, small, size, &failed);
        break;
    }
    if (b) *e = cudaSuccess;
    else if (!*e) *e = cudaErrorMemoryAllocation; /* of the host */
    return b;
}

/* ---- the functions ---- */

static void *out_of_memory(int i, size_t bytes) {
    const double mb = 1 << 20;
    size_t free_bytes = 0, total = 0;
    pthread_mutex_lock(&lock);
    gpu_memory m = gpus[i];
    pthread_mutex_unlock(&lock);
    if (ddp__cuda.cudaMemGetInfo(&free_bytes, &total)) ddp__cuda.cudaGetLastError();
    double others = (double)total - (double)free_bytes - (double)m.reserved;
    ddp__fail(
        DDP_ENOMEM,
        "out of memory: %zu bytes (%.1f MB) asked for on cuda:%d, %.1f MB in use, at most %.1f MB before; of its %.1f "
        "MB %.1f are free, %.1f cached in pieces, %.1f held by libraries and other processes (see nvidia-smi)",
        bytes, (double)bytes / mb, i, (double)m.allocated / mb, (double)m.peak / mb, (double)total / mb,
        (double)free_bytes / mb, (double)(m.reserved - m.allocated) / mb, others > 0 ? others / mb : 0);
    return NULL;
}

void *ddp__gpu_alloc_on(int i, cudaStream_t stream, size_t bytes) {
    ddp_gpu *g = ddp__gpu(i);
    if (!g) return NULL;
    if (bytes > (size_t)1 << 46 || ddp__mem_fails()) return out_of_memory(i, bytes);
    size_t size =
        !cached() && bytes ? bytes : (bytes / DDP_BLOCK_UNIT + (bytes % DDP_BLOCK_UNIT || !bytes)) * DDP_BLOCK_UNIT;
    gpu_memory *m = &gpus[i];
    cudaError_t e = cudaSuccess;
    pthread_mutex_lock(&lock);
    pool_of(m, g->compute);
    ddp_block_pool *q = pool_of(m, stream);
    ddp_block *b = q ? take(m, q, i, size, &e) : NULL;
    if (b) {
        table_add(b);
        m->allocated += (int64_t)b->size;
        if (m->allocated > m->peak) m->peak = m->allocated;
    }
    pthread_mutex_unlock(&lock);
    if (b) return b->p;
    if (!q) ddp__fail(DDP_ESTATE, "memory on cuda:%d for more than %d streams", i, MAX_POOLS);
    else if (e == cudaErrorMemoryAllocation) out_of_memory(i, bytes);
    else ddp__cuda_check(e, "memory of the GPU");
    return NULL;
}

void *ddp__gpu_alloc(int i, size_t bytes) {
    ddp_gpu *g = ddp__gpu(i);
    return g ? ddp__gpu_alloc_on(i, g->compute, bytes) : NULL;
}

void ddp__gpu_release(int i, void *p, size_t bytes) {
    (void)bytes;
    if (!p) return;
    gpu_memory *m = &gpus[i];
    pthread_mutex_lock(&lock);
    ddp_block **at = table_find(p), *b = *at;
    if (b) {
        *at = b->next;
        m->allocated -= (int64_t)b->size;
        if (record_uses(m, b)) {
            b->next = m->pending;
            m->pending = b;
        } else {
            ddp__block_give(b);
        }
    }
    pthread_mutex_unlock(&lock);
}

void ddp__gpu_block_used_on(const void *p, cudaStream_t stream) {
    pthread_mutex_lock(&lock);
    ddp_block *b = *table_find(p);
    ddp_block_pool *on = b ? pool_of(&gpus[b->gpu], stream) : NULL;
    if (on && on != b->pool) {
        int k = 0;
        while (k < b->n_uses && b->use[k].on != on) k++;
        if (k < DDP_BLOCK_USES) b->use[k] = (ddp_block_use){.on = on, .number = ++on->used};
        else on = NULL;
        if (on && k == b->n_uses) b->n_uses++;
    }
    bool noted = !b || on;
    pthread_mutex_unlock(&lock);
    if (!noted) ddp__cuda.cudaStreamSynchronize(stream);
}

void ddp__gpu_stream_joined(int i, cudaStream_t stream) {
    pthread_mutex_lock(&lock);
    for (int k = 0; k < gpus[i].n_pools; k++)
        if (gpus[i].pools[k].stream == stream) gpus[i].pools[k].joined = gpus[i].pools[k].used;
    pthread_mutex_unlock(&lock);
}

void *ddp__cuda_scratch_take(const ddp_call *c, size_t bytes) {
    const ddp_gpu *g = ddp__gpu_of(c);
    return g ? ddp__gpu_alloc_on(g->index, g->compute, bytes) : NULL;
}
void ddp__cuda_scratch_give(const ddp_call *c, void *p, size_t bytes) {
    const ddp_gpu *g = ddp__gpu_of(c);
    if (p && g) ddp__gpu_release(g->index, p, bytes);
}

void ddp__gpu_stats(int i, ddp_memory *out) {
    pthread_mutex_lock(&lock);
    out->allocated = gpus[i].allocated;
    out->reserved = gpus[i].reserved;
    out->peak = gpus[i].peak;
    pthread_mutex_unlock(&lock);
}

void ddp__gpu_reset_peak(int i) {
    pthread_mutex_lock(&lock);
    gpus[i].peak = gpus[i].allocated;
    pthread_mutex_unlock(&lock);
}

void ddp__gpu_waited(int i) {
    if (!cached()) ddp__gpu_empty_cache(i);
}

void ddp__gpu_empty_cache(int i) {
    pthread_mutex_lock(&lock);
    gpu_memory *m = &gpus[i];
    if (m->reserved > 0 && ddp__gpu_select(i) == cudaSuccess) {
        settle_pending(m, true);
        trim(m, 0);
    }
    pthread_mutex_unlock(&lock);
}
