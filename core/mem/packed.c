/* packed.c -- weights as kernels want them, kept for the next call: packing costs more than multiplying where a call has few
 * pixels. An entry belongs to one version of one storage; a write or the storage's end drops it. What is seen once is only
 * noted, so that training, which writes weights after each use, pays nothing. When the limit is reached nothing more is
 * kept: weights are used in turn, so those that came first would go just before their next use. */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "mem.h"

enum { BUCKETS = 256 };

typedef struct entry {
    ddp_packed p; /* bytes NULL: seen, not kept */
    struct entry *next;
    const void *owner;
    uint64_t version;
    ddp_pack_key key;
    size_t size;
    int users;
    bool gone; /* out of the table; the last user frees it */
} entry;

static struct {
    pthread_mutex_t lock;
    entry *bucket[BUCKETS];
    int64_t bytes, limit;
} c = {.lock = PTHREAD_MUTEX_INITIALIZER};
static pthread_once_t once = PTHREAD_ONCE_INIT;

static void read_limit(void) {
    const char *mb = getenv("DDP_PACK_CACHE_MB");
    c.limit = (int64_t)((mb && *mb ? strtod(mb, NULL) : 256) * 1048576);
}

static entry **bucket_of(const void *owner) { return &c.bucket[((uintptr_t)owner >> 6) % BUCKETS]; }

/* Lock held. */
static void free_entry(entry *e) {
    if (e->p.bytes) {
        c.bytes -= (int64_t)e->size;
        ddp__mem_free(e->p.bytes, e->size);
    }
    free(e);
}
static void unlink_entry(entry **at) {
    entry *e = *at;
    *at = e->next;
    e->gone = true;
    if (e->users == 0) free_entry(e);
}

/* Room for its bytes, if there is any. Lock held. */
static bool make_room(entry *e) {
    if (c.bytes + (int64_t)e->size > c.limit) return false;
    ddp_saved_error saved;
    ddp__error_save(&saved); /* without memory the caller packs as ever */
    e->p.bytes = ddp__mem_alloc(e->size);
    ddp_error_take(NULL);
    ddp__error_restore(&saved);
    if (e->p.bytes) c.bytes += (int64_t)e->size;
    return e->p.bytes != NULL;
}

/* The entry of this version; what is left of others goes. Lock held. */
static entry *find(const void *owner, uint64_t version, const ddp_pack_key *key) {
    for (entry **at = bucket_of(owner); *at;) {
        entry *e = *at;
        bool same = e->owner == owner && memcmp(&e->key, key, sizeof *key) == 0;
        if (same && e->version == version) return e;
        if (same) unlink_entry(at);
        else at = &e->next;
    }
    return NULL;
}

static void note(const void *owner, uint64_t version, const ddp_pack_key *key, size_t size) {
    entry *e = calloc(1, sizeof *e);
    if (!e) return;
    *e = (entry){.next = *bucket_of(owner), .owner = owner, .version = version, .key = *key, .size = size};
    *bucket_of(owner) = e;
}

ddp_packed *ddp__packed_take(const void *owner, uint64_t version, const ddp_pack_key *key, size_t size) {
    pthread_once(&once, read_limit);
    if (c.limit <= 0) return NULL;
    pthread_mutex_lock(&c.lock);
    entry *e = find(owner, version, key);
    if (!e) note(owner, version, key, size);
    bool mine = e && (e->p.ready || (!e->p.bytes && make_room(e)));
    if (mine) e->users++;
    pthread_mutex_unlock(&c.lock);
    return mine ? &e->p : NULL;
}

void ddp__packed_give(ddp_packed *p, bool filled) {
    if (!p) return;
    entry *e = (entry *)p;
    pthread_mutex_lock(&c.lock);
    e->users--;
    if (!p->ready && filled) p->ready = true;
    else if (!p->ready) { /* back to seen */ c.bytes -= (int64_t)e->size;
        ddp__mem_free(p->bytes, e->size);
        p->bytes = NULL;
    }
    if (e->gone && e->users == 0) free_entry(e);
    pthread_mutex_unlock(&c.lock);
}

void ddp__packed_forget(const void *owner) {
    pthread_mutex_lock(&c.lock);
    for (entry **at = bucket_of(owner); *at;) {
        if ((*at)->owner == owner) unlink_entry(at);
        else at = &(*at)->next;
    }
    pthread_mutex_unlock(&c.lock);
}

void ddp__packed_clear(void) {
    pthread_mutex_lock(&c.lock);
    for (int i = 0; i < BUCKETS; i++)
        while (c.bucket[i]) unlink_entry(&c.bucket[i]);
    pthread_mutex_unlock(&c.lock);
}

int64_t ddp__packed_bytes(void) {
    pthread_mutex_lock(&c.lock);
    int64_t bytes = c.bytes;
    pthread_mutex_unlock(&c.lock);
    return bytes;
}
