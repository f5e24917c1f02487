/* pinned.c -- pinned host memory. Taking and giving it costs the runtime milliseconds, so blocks are kept by size class. A block may be
 * released while copies still read it: it is given out again when their events have passed. Where the system allows no more of it,
 * pageable memory stands in, from which a copy returns when it has read. */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "../../core/mem/mem.h"
#include "cuda.h"

enum { MAX_READERS = 3, UNIT = 4096 };
static const size_t slack = (size_t)64 << 20;

/* A stream that copies out of a block: behind its last copy there is an event. */
typedef struct reader {
    cudaStream_t stream;
    cudaEvent_t event;
} reader;

typedef struct pinned {
    char *p;
    size_t size;
    bool used, pageable;
    int n_readers;
    reader readers[MAX_READERS];
} pinned;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct {
    pinned **v; /* by address */
    int n, room;
    size_t used, peak, all; /* bytes */
} blocks;
static bool told; /* that pageable memory stands in */

/* The position of the block at or below p, -1: none. */
static int place_of(const void *p) {
    int lo = 0, hi = blocks.n;
    while (lo < hi) {
        int mid = (lo + hi) / 2;
        if (blocks.v[mid]->p <= (const char *)p) lo = mid + 1;
        else hi = mid;
    }
    return lo - 1;
}

/* The block that p lies in; NULL: none. */
static pinned *find(const void *p) {
    int k = place_of(p);
    pinned *b = k < 0 ? NULL : blocks.v[k];
    return b && (const char *)p < b->p + b->size ? b : NULL;
}

/* Four classes a doubling. */
static size_t rounded(size_t bytes) {
    size_t size = UNIT;
    while (size < bytes) size += size / 4 >= UNIT ? (size_t)1 << (61 - __builtin_clzll(size)) : UNIT;
    return size;
}

static bool insert(pinned *b) {
    if (blocks.n == blocks.room) {
        int room = blocks.room ? 2 * blocks.room : 16;
        pinned **v = realloc(blocks.v, (size_t)room * sizeof(pinned *));
        if (!v) return false;
        blocks.v = v;
        blocks.room = room;
    }
    int at = place_of(b->p) + 1;
    memmove(blocks.v + at + 1, blocks.v + at, (size_t)(blocks.n - at) * sizeof(pinned *));
    blocks.v[at] = b;
    blocks.n++;
    blocks.all += b->size;
    return true;
}

static void drop(int at) {
    pinned *b = blocks.v[at];
    memmove(blocks.v + at, blocks.v + at + 1, (size_t)(--blocks.n - at) * sizeof(pinned *));
    blocks.all -= b->size;
    for (int k = 0; k < b->n_readers; k++) ddp__cuda.cudaEventDestroy(b->readers[k].event);
    if (b->pageable) free(b->p);
    else ddp__cuda.cudaFreeHost(b->p);
    free(b);
}

/* Has everyone read it? Errors count as yes: the GPU does nothing any more. */
static bool was_read(const pinned *b) {
    for (int k = 0; k < b->n_readers; k++)
        if (ddp__cuda.cudaEventQuery(b->readers[k].event) == cudaErrorNotReady) return false;
    return true;
}

/* The smallest kept block of at least `size` and not much more. */
static pinned *kept(size_t size) {
    pinned *best = NULL;
    for (int k = 0; k < blocks.n; k++) {
        pinned *b = blocks.v[k];
        if (b->used || b->size < size || b->size > size + size / 2 || (best && best->size <= b->size)) continue;
        if (was_read(b)) best = b;
    }
    ddp__cuda.cudaGetLastError();
    return best;
}

/* Gives back blocks that nobody uses until at most `most` bytes are kept and used. */
static void trim(size_t most) {
    for (int k = blocks.n - 1; k >= 0 && blocks.all > most; k--)
        if (!blocks.v[k]->used && was_read(blocks.v[k])) drop(k);
    ddp__cuda.cudaGetLastError();
}

static pinned *fresh(size_t size) {
    size_t most = blocks.used + size > blocks.peak ? blocks.used + size : blocks.peak;
    if (blocks.all + size > most + most / 2 + slack) trim(most + most / 2 + slack - size);
    pinned *b = calloc(1, sizeof *b);
    if (!b) return NULL;
    void *p = NULL;
    cudaError_t e = ddp__cuda.cudaHostAlloc(&p, size, cudaHostAllocPortable);
    if (e) {
        if (!told)
            ddp__log(
                DDP_LOG_WARN,
                "no more pinned memory (%zu MB asked for, %zu in use: %s): batches go by pageable memory, slower; see "
                "`ulimit -l` and the memory limit of the container",
                (size >> 20) + 1, blocks.used >> 20, ddp__cuda.cudaGetErrorString(e));
        told = true;
        ddp__cuda.cudaGetLastError();
        p = aligned_alloc(UNIT, size);
    }
    *b = (pinned){.p = p, .size = size, .pageable = e != cudaSuccess};
    if (p && insert(b)) return b;
    if (p && e) free(p);
    else if (p) ddp__cuda.cudaFreeHost(p);
    free(b);
    return NULL;
}

void *ddp__pinned_alloc(int i, size_t bytes) {
    if (!ddp__gpu(i)) return NULL; /* else the runtime would take it on GPU 0 */
    size_t size = bytes < (size_t)1 << 46 ? rounded(bytes) : 0;
    bool fails = !size || ddp__mem_fails();
    pthread_mutex_lock(&lock);
    pinned *b = fails ? NULL : kept(size);
    if (!b && !fails) b = fresh(size);
    if (b) {
        b->used = true;
        blocks.used += b->size;
        if (blocks.used > blocks.peak) blocks.peak = blocks.used;
    }
    pthread_mutex_unlock(&lock);
    if (!b)
        ddp__fail(DDP_ENOMEM, "out of memory: %zu bytes (%.1f MB) asked for in the host's pinned memory", bytes,
                  (double)bytes / (1 << 20));
    return b ? b->p : NULL;
}

void ddp__pinned_release(void *p) {
    if (!p) return;
    pthread_mutex_lock(&lock);
    pinned *b = find(p);
    if (b && b->used) {
        b->used = false;
        blocks.used -= b->size;
    }
    pthread_mutex_unlock(&lock);
}

int ddp__pinned_read_by(const void *p, cudaStream_t stream) {
    pthread_mutex_lock(&lock);
    pinned *b = find(p);
    cudaError_t e = cudaSuccess;
    if (b && !b->pageable) {
        int k = 0;
        while (k < b->n_readers && b->readers[k].stream != stream) k++;
        if (k == MAX_READERS) e = ddp__cuda.cudaStreamSynchronize(stream);
        else {
            if (k == b->n_readers) {
                e = ddp__cuda.cudaEventCreateWithFlags(&b->readers[k].event, cudaEventDisableTiming);
                b->readers[k].stream = stream;
                if (!e) b->n_readers++;
            }
            if (!e) e = ddp__cuda.cudaEventRecord(b->readers[k].event, stream);
        }
    }
    pthread_mutex_unlock(&lock);
    return e ? ddp__cuda_check(e, "copying to the GPU") : 0;
}

void ddp__pinned_empty(void) {
    pthread_mutex_lock(&lock);
    trim(0);
    pthread_mutex_unlock(&lock);
}
