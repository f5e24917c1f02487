/* recent.c -- a ring of the last launches. Racing writers may mix two entries: it is a hint in an error's text. */
#include "recent.h"

#include <stdatomic.h>
#include <stdio.h>
#include <string.h>

enum { KEEP = 8 };
static struct { _Atomic(const char *) op, kernel; } ring[KEEP];
static atomic_ulong added, waited_at;

void ddp__recent_add(const char *op, const char *kernel) {
    unsigned long i = atomic_fetch_add_explicit(&added, 1, memory_order_relaxed) % KEEP;
    atomic_store_explicit(&ring[i].op, op, memory_order_relaxed);
    atomic_store_explicit(&ring[i].kernel, kernel, memory_order_relaxed);
}

void ddp__recent_clear(void) { atomic_store(&waited_at, atomic_load(&added)); }

const char *ddp__recent_text(char *text, size_t n) {
    unsigned long end = atomic_load(&added), begin = atomic_load(&waited_at);
    size_t at = 0;
    if (end - begin > KEEP) begin = end - KEEP;
    text[0] = 0;
    for (unsigned long i = begin; i < end && at + 1 < n; i++)
        at += (size_t)snprintf(text + at, n - at, "%s%s (%s)", at ? ", " : "", atomic_load(&ring[i % KEEP].op),
                               atomic_load(&ring[i % KEEP].kernel));
    return text;
}
