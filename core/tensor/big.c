/* big.c -- storages of 1 MB and more, listed with what is known of them: so that an out-of-memory error can say what the
 * memory is in. */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "tensor.h"

static struct {
    pthread_mutex_t lock;
    ddp_big *first;
} all = {.lock = PTHREAD_MUTEX_INITIALIZER};

void ddp__big_add(ddp_big *b, size_t bytes) {
    memset(b, 0, sizeof *b);
    b->bytes = bytes;
    pthread_mutex_lock(&all.lock);
    b->next = all.first;
    if (b->next) b->next->before = b;
    all.first = b;
    pthread_mutex_unlock(&all.lock);
}

void ddp__big_remove(ddp_big *b) {
    pthread_mutex_lock(&all.lock);
    if (b->before) b->before->next = b->next;
    else all.first = b->next;
    if (b->next) b->next->before = b->before;
    pthread_mutex_unlock(&all.lock);
}

void ddp__big_made(const ddp_tensor *t, const char *op) {
    ddp_big *b = ddp__big(t->storage);
    if (!b) return;
    pthread_mutex_lock(&all.lock);
    b->m = t->m;
    b->op = op;
    pthread_mutex_unlock(&all.lock);
}

int ddp_wants_origin(const ddp_tensor *t) {
    const ddp_big *b = t ? ddp__big(t->storage) : NULL;
    return b && !b->where[0];
}

void ddp_set_origin(ddp_tensor *t, const char *where) {
    ddp_big *b = t ? ddp__big(t->storage) : NULL;
    if (!b || !where) return;
    pthread_mutex_lock(&all.lock);
    strncpy(b->where, where, sizeof b->where - 1);
    pthread_mutex_unlock(&all.lock);
}

static ddp_live live_of(const ddp_big *b) {
    ddp_live l = {.bytes = (int64_t)b->bytes, .dtype = (int)b->m.dtype, .ndim = b->m.ndim, .op = b->op};
    memcpy(l.size, b->m.size, sizeof l.size);
    memcpy(l.where, b->where, sizeof l.where);
    return l;
}

int ddp_memory_largest(int device, ddp_live *out, int n) {
    int found = 0;
    pthread_mutex_lock(&all.lock);
    for (const ddp_big *b = all.first; b && n > 0; b = b->next) {
        if (device >= 0 && b->m.device != device) continue;
        if (found == n && (int64_t)b->bytes <= out[n - 1].bytes) continue;
        int at = found < n ? found++ : n - 1; /* the smallest is pushed out */
        for (; at > 0 && out[at - 1].bytes < (int64_t)b->bytes; at--) out[at] = out[at - 1];
        out[at] = live_of(b);
    }
    pthread_mutex_unlock(&all.lock);
    return found;
}
