/* probe.c -- what a launch touches, found without computing it. In a dry run that is logged, a few of a launch's blocks run on zeros while
 * all device memory is out of reach; the first read and the first write behind each pointer among its arguments is noted by its fault.
 * What was found for the same kernel, grid and arguments (but for the addresses) is remembered. */
#include "state.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum { PROBE_MOST = 24, BLOCKS = 24 }; /* pointers of a launch that is probed; blocks that run */

typedef struct range {
    char *from, *to;
    bool read, written, known; /* known: it has a page of its own, so that touching it is seen */
} range;

static range ranges[PROBE_MOST];
static int count;
static bool probing;
static const uintptr_t page = 4096;

static struct known {
    uint64_t key;
    unsigned char how[PROBE_MOST]; /* 1 read, 2 written */
    struct known *next;
} * knowns[256];

static void reach(const range *r, int rights) {
    uintptr_t from = (uintptr_t)r->from & ~(page - 1), to = ((uintptr_t)r->to + page - 1) & ~(page - 1);
    mprotect((void *)from, to - from, rights);
}

bool probe_fault(const void *address, bool writes) {
    const char *at = address;
    range *r = NULL;
    for (int i = 0; probing && i < count; i++)
        if (ranges[i].from <= at && (!r || ranges[i].from > r->from)) r = &ranges[i];
    if (!r || at >= r->to || (writes ? r->written : r->read)) return false;
    if (writes) r->written = true;
    else r->read = true;
    reach(r, r->written ? PROT_READ | PROT_WRITE : PROT_READ);
    return true;
}

/* The ranges end at the next pointer or where their allocation does. */
static void find_ranges(char *const *pointers) {
    for (int i = 0; i < count; i++) {
        char *at, *end;
        size_t bytes;
        end = find_allocation(pointers[i], &at, &bytes) ? at + bytes : pointers[i] + 1;
        for (int k = 0; k < count; k++)
            if (pointers[k] > pointers[i] && pointers[k] < end) end = pointers[k];
        uintptr_t first = ((uintptr_t)pointers[i] + page - 1) & ~(page - 1);
        ranges[i] = (range){.from = pointers[i], .to = end, .known = first + page <= (uintptr_t)end};
    }
}

static struct known *remembered(uint64_t key) {
    struct known *k = knowns[key % 256];
    while (k && k->key != key) k = k->next;
    return k;
}

static uint64_t mix(uint64_t h, const void *p, size_t n) {
    for (const unsigned char *b = p; n--; b++) h = (h ^ *b) * 0x100000001b3u;
    return h;
}

/* Pointers are one key whatever they are: where[i] is the offset of the i-th. */
static uint64_t key_of(const char *name, const unsigned grid[3], const char *args, size_t bytes, const size_t *where) {
    uint64_t h = mix(mix(0xcbf29ce484222325u, name, strlen(name)), grid, 3 * sizeof *grid);
    size_t at = 0;
    for (int i = 0; i < count; at = where[i++] + sizeof(void *)) h = mix(h, args + at, where[i] - at);
    return mix(h, args + at, bytes - at);
}

void probe(const probed *l, char *const *pointers, const size_t *where, int n, unsigned char *how) {
    memset(how, PROBE_READS | PROBE_WRITES, (size_t)n);
    unsigned *most = emulator_most_blocks();
    if (n > PROBE_MOST || !most) return;
    count = n;
    uint64_t key = key_of(l->name, l->grid, l->args, l->bytes, where);
    struct known *k = remembered(key);
    if (!k) {
        find_ranges(pointers);
        k = calloc(1, sizeof *k);
        k->key = key;
        *most = BLOCKS;
        probing = true;
        l->run(l->grid, l->block, l->shared, l->args);
        probing = false;
        *most = 0;
        for (int i = 0; i < n; i++) {
            reach(&ranges[i], PROT_NONE);
            k->how[i] = ranges[i].known ? ranges[i].read * PROBE_READS + ranges[i].written * PROBE_WRITES
                                        : PROBE_READS | PROBE_WRITES;
        }
        k->next = knowns[key % 256];
        knowns[key % 256] = k;
    }
    memcpy(how, k->how, (size_t)n);
}
