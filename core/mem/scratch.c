/* scratch.c -- workspaces of kernels: a stack of bytes per thread, so that what every step takes and gives back neither
 * comes from the system nor goes back to it. It grows to the most that was taken at once, when it is next empty; until then
 * what does not fit comes from the allocator, and so does what passes the limit. */
#include <pthread.h>
#include <stdlib.h>

#include "mem.h"

typedef struct stack {
    char *base;
    size_t size, used;
    size_t most; /* wanted at once, ever, as far as it is kept */
    size_t out;  /* bytes given out by the allocator for want of room */
} stack;

static pthread_key_t key;
static pthread_once_t once = PTHREAD_ONCE_INIT;

static void end_of_thread(void *p) {
    stack *s = p;
    ddp__mem_free(s->base, s->size);
    free(s);
}
static void make_key(void) { pthread_key_create(&key, end_of_thread); }

static stack *mine(void) {
    pthread_once(&once, make_key);
    stack *s = pthread_getspecific(key);
    if (s) return s;
    s = calloc(1, sizeof *s);
    if (s) pthread_setspecific(key, s);
    return s;
}

static size_t rounded(size_t bytes) {
#ifdef __SANITIZE_ADDRESS__ /* which sees what lies beyond */
    return bytes;
#endif
    return (bytes + 255) & ~(size_t)255;
}

void *ddp__scratch_take(size_t bytes) {
    enum { LIMIT = 64 << 20 }; /* what a thread keeps; more comes from the allocator each time */
    size_t n = rounded(bytes);
    stack *s = mine();
#ifdef __SANITIZE_ADDRESS__ /* a stack would hide writes beyond a workspace */
    s = NULL;
#endif
    if (!s) return ddp__mem_alloc(n);
    size_t all = s->used + s->out + n;
    if (all > s->most && all <= LIMIT) s->most = all;
    if (s->used == 0 && s->out == 0 && s->size < s->most) {
        ddp__mem_free(s->base, s->size);
        s->size = 0;
        s->base = ddp__mem_alloc(s->most);
        if (!s->base) return NULL;
        s->size = s->most;
    }
    if (s->used + n <= s->size) {
        s->used += n;
        return s->base + s->used - n;
    }
    void *p = ddp__mem_alloc(n);
    if (p) s->out += n;
    return p;
}

void ddp__scratch_give(void *p, size_t bytes) {
    size_t n = rounded(bytes);
    stack *s = mine();
    if (!p) return;
    if (s && s->base && (char *)p >= s->base && (char *)p < s->base + s->size) {
        s->used -= n;
        return;
    }
    if (s && s->out >= n) s->out -= n;
    ddp__mem_free(p, n);
}
