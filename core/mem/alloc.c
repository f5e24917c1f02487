/* alloc.c -- the caching allocator. Freed blocks wait in bins by size class for the next of their kind; eight classes
 * a doubling, so at most an eighth is wasted. What is cached is given back when all that was taken from the system
 * passes 1.2 times the most ever in use (plus a little), so varying shapes cannot pile up. */
#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "device.h"
#include "mem.h"

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#endif

enum { ALIGN = 64, MIN_SHIFT = 6, CLASSES = 8 * 42 };
static const size_t huge = (size_t)2 << 20; /* blocks this big are mapped, aligned for huge pages */
static const int64_t slack = 16 << 20;

typedef struct free_block {
    struct free_block *next;
} free_block;

static struct {
    pthread_mutex_t lock;
    free_block *bin[CLASSES];
    int64_t allocated, reserved, peak;
    void *(*hook_alloc)(void *, size_t);
    void (*hook_free)(void *, void *, size_t);
    void *hook_ctx;
} m = {.lock = PTHREAD_MUTEX_INITIALIZER};

static atomic_int_fast64_t live_tensors, since_gc, pressure; /* pressure: since_gc in bytes of the host */
static atomic_int_fast64_t fail_at;

/* The class of a size, and the bytes of that class. Class c: (8 + c%8) << (c/8) units of 64 bytes, small ones exact. */
static int class_of(size_t bytes, size_t *rounded) {
    size_t units = (bytes + ALIGN - 1) >> MIN_SHIFT;
    if (units == 0) units = 1;
    if (units < 8) {
        *rounded = units << MIN_SHIFT;
        return (int)units;
    }
    int shift = 60 - __builtin_clzl(units); /* units >> shift is 8..15 */
    size_t top = (units + ((size_t)1 << shift) - 1) >> shift;
    if (top == 16) {
        top = 8;
        shift++;
    }
    *rounded = top << shift << MIN_SHIFT;
    return 8 * (shift + 1) + (int)(top - 8);
}

static size_t bytes_of_class(int c) {
    if (c < 8) return (size_t)c << MIN_SHIFT;
    return ((size_t)(8 + c % 8) << (c / 8 - 1)) << MIN_SHIFT;
}

static void *system_alloc(size_t bytes) {
    if (m.hook_alloc) return m.hook_alloc(m.hook_ctx, bytes);
    if (bytes < huge) return aligned_alloc(ALIGN, bytes);
    void *p = aligned_alloc(huge, (bytes + huge - 1) & ~(huge - 1));
    if (p) madvise(p, bytes, MADV_HUGEPAGE);
    return p;
}

static void system_free(void *p, size_t bytes) {
    if (m.hook_alloc) m.hook_free(m.hook_ctx, p, bytes);
    else free(p);
}

/* Frees cached blocks, largest first, until `reserved` is at most `limit`. Lock held. */
static void trim(int64_t limit) {
    for (int c = CLASSES - 1; c > 0 && m.reserved > limit; c--) {
        while (m.bin[c] && m.reserved > limit) {
            free_block *b = m.bin[c];
            m.bin[c] = b->next;
            m.reserved -= (int64_t)bytes_of_class(c);
            system_free(b, bytes_of_class(c));
        }
    }
}

static void *fresh(size_t bytes) {
    int64_t most = m.peak > m.allocated + (int64_t)bytes ? m.peak : m.allocated + (int64_t)bytes;
    int64_t limit = most + most / 5 + slack;
    if (m.reserved + (int64_t)bytes > limit) trim(limit - (int64_t)bytes);
    void *p = system_alloc(bytes);
    if (!p) {
        trim(0);
        p = system_alloc(bytes);
    }
    if (p) m.reserved += (int64_t)bytes;
    return p;
}

static void *out_of_memory(size_t bytes) {
    pthread_mutex_lock(&m.lock);
    double in_use = (double)m.allocated / (1 << 20), peak = (double)m.peak / (1 << 20);
    pthread_mutex_unlock(&m.lock);
    ddp__fail(DDP_ENOMEM, "out of memory: %zu bytes (%.1f MB) asked for, %.1f MB in use, at most %.1f MB before", bytes,
              (double)bytes / (1 << 20), in_use, peak);
    return NULL;
}

void *ddp__mem_alloc(size_t bytes) {
    if (bytes > (size_t)1 << 46) return out_of_memory(bytes); /* no machine; and sizes stay sums without overflow */
    size_t rounded;
    int c = class_of(bytes, &rounded);
    bool fail = ddp__mem_fails();
    pthread_mutex_lock(&m.lock);
    void *p = NULL;
    if (!fail) {
        p = m.bin[c];
        if (p) m.bin[c] = ((free_block *)p)->next;
        else p = fresh(rounded);
    }
    if (p) {
        m.allocated += (int64_t)rounded;
        if (m.allocated > m.peak) m.peak = m.allocated;
    }
    pthread_mutex_unlock(&m.lock);
    if (!p) return out_of_memory(bytes);
#ifdef __SANITIZE_ADDRESS__ /* a rounded size would hide writes just beyond a block */
    if (!m.hook_alloc) ASAN_POISON_MEMORY_REGION((char *)p + bytes, rounded - bytes);
#endif
    atomic_fetch_add_explicit(&since_gc, (int_fast64_t)rounded, memory_order_relaxed);
    atomic_fetch_add_explicit(&pressure, (int_fast64_t)rounded, memory_order_relaxed);
    return p;
}

/* A 64th of a device's memory presses as DDP_GC_BYTES of the host do. */
void ddp__mem_taken(size_t bytes, int64_t of) {
    double weight = of > 0 ? 64.0 * DDP_GC_BYTES / (double)of : 1;
    atomic_fetch_add_explicit(&since_gc, (int_fast64_t)bytes, memory_order_relaxed);
    atomic_fetch_add_explicit(&pressure, (int_fast64_t)((double)bytes * (weight < 1 ? weight : 1)),
                              memory_order_relaxed);
}

void ddp__mem_free(void *p, size_t bytes) {
    if (!p) return;
    size_t rounded;
    int c = class_of(bytes, &rounded);
    pthread_mutex_lock(&m.lock);
    m.allocated -= (int64_t)rounded;
#ifdef __SANITIZE_ADDRESS__ /* a cache would hide writes after free */
    (void)c;
    m.reserved -= (int64_t)rounded;
    system_free(p, rounded);
#else
    ((free_block *)p)->next = m.bin[c];
    m.bin[c] = p;
#endif
    pthread_mutex_unlock(&m.lock);
}

void ddp__mem_count_tensor(int d) { atomic_fetch_add_explicit(&live_tensors, d, memory_order_relaxed); }

void ddp_memory_stats(int device, ddp_memory *out) {
    if (device > 0 && ddp__device_of(device)) {
        out->live_tensors = atomic_load(&live_tensors);
        ddp__device_of(device)->stats(device - 1, out);
        return;
    }
    pthread_mutex_lock(&m.lock);
    *out = (ddp_memory){m.allocated, m.reserved, m.peak, atomic_load(&live_tensors)};
    pthread_mutex_unlock(&m.lock);
}

void ddp_memory_reset_peak(int device) {
    if (device > 0 && ddp__device_of(device)) {
        ddp__device_of(device)->reset_peak(device - 1);
        return;
    }
    pthread_mutex_lock(&m.lock);
    m.peak = m.allocated;
    pthread_mutex_unlock(&m.lock);
}

void ddp_memory_empty_cache(void) {
    ddp__packed_clear();
    pthread_mutex_lock(&m.lock);
    trim(0);
    pthread_mutex_unlock(&m.lock);
    for (int i = 0; ddp__device_of(1) && i < ddp__device_of(1)->count; i++) ddp__device_of(1)->empty_cache(i);
}

void ddp_memory_fail_at(int64_t k) { atomic_store(&fail_at, k); }

bool ddp__mem_fails(void) {
    return atomic_load_explicit(&fail_at, memory_order_relaxed) > 0 && atomic_fetch_sub(&fail_at, 1) == 1;
}

int64_t ddp_live_bytes_since_gc(void) { return atomic_load_explicit(&since_gc, memory_order_relaxed); }
int64_t ddp_memory_pressure(void) { return atomic_load_explicit(&pressure, memory_order_relaxed); }
void ddp_memory_gc_done(void) {
    atomic_store_explicit(&since_gc, 0, memory_order_relaxed);
    atomic_store_explicit(&pressure, 0, memory_order_relaxed);
}

void ddp_set_memory_hooks(void *(*alloc)(void *, size_t), void (*release)(void *, void *, size_t), void *ctx) {
    pthread_mutex_lock(&m.lock);
    m.hook_alloc = alloc;
    m.hook_free = release;
    m.hook_ctx = ctx;
    pthread_mutex_unlock(&m.lock);
}
