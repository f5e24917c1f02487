/* blocks.c -- free blocks by size: eight bins a doubling. */
#include "blocks.h"

#include <stdlib.h>

/* The bin of a size: 8 + k eighths of a power of two fall into one; small counts of units have bins of their own. */
static int bin_of(size_t size) {
    uint64_t units = size / DDP_BLOCK_UNIT;
    if (units < 8) return (int)units;
    int shift = 60 - __builtin_clzll(units); /* units >> shift is 8..15 */
    int bin = 8 * (shift + 1) + (int)(units >> shift) - 8;
    return bin < DDP_BLOCK_BINS ? bin : DDP_BLOCK_BINS - 1;
}

static void put(ddp_block *b) {
    int bin = bin_of(b->size);
    ddp_block **first = &b->pool->bin[b->small][bin];
    b->used = false;
    b->last = NULL;
    b->next = *first;
    if (b->next) b->next->last = b;
    *first = b;
    b->pool->filled[b->small][bin / 64] |= (uint64_t)1 << bin % 64;
}

void ddp__block_remove(ddp_block *b) {
    int bin = bin_of(b->size);
    if (b->next) b->next->last = b->last;
    if (b->last) b->last->next = b->next;
    else b->pool->bin[b->small][bin] = b->next;
    if (!b->pool->bin[b->small][bin]) b->pool->filled[b->small][bin / 64] &= ~((uint64_t)1 << bin % 64);
    b->next = b->last = NULL;
}

/* The first bin from `bin` on that is not empty; DDP_BLOCK_BINS: none. */
static int next_filled(const ddp_block_pool *q, bool small, int bin) {
    for (int word = bin / 64; word < DDP_BLOCK_BINS / 64; word++) {
        uint64_t w = q->filled[small][word];
        if (word == bin / 64) w &= ~(uint64_t)0 << bin % 64;
        if (w) return 64 * word + __builtin_ctzll(w);
    }
    return DDP_BLOCK_BINS;
}

static ddp_block *best_of(ddp_block *b, size_t size) {
    ddp_block *best = NULL;
    for (; b && !(best && best->size == size); b = b->next)
        if (b->size >= size && (!best || b->size < best->size)) best = b;
    return best;
}

static ddp_block *find(const ddp_block_pool *q, bool small, size_t size) {
    int own = bin_of(size);
    ddp_block *b = best_of(q->bin[small][own], size);
    int other = b ? DDP_BLOCK_BINS : next_filled(q, small, own + 1);
    return other < DDP_BLOCK_BINS ? best_of(q->bin[small][other], size) : b;
}

ddp_block *ddp__block_take(ddp_block_pool *q, bool small, size_t size, bool *failed) {
    ddp_block *b = find(q, small, size), *rest = NULL;
    *failed = false;
    if (!b) return NULL;
    if (b->size - size >= DDP_BLOCK_UNIT && !(rest = calloc(1, sizeof *rest))) {
        *failed = true;
        return NULL;
    }
    ddp__block_remove(b);
    if (rest) {
        *rest = (ddp_block){.before = b, .after = b->after, .pool = q, .p = b->p + size, .size = b->size - size};
        rest->small = small;
        rest->gpu = b->gpu;
        if (rest->after) rest->after->before = rest;
        b->after = rest;
        b->size = size;
        put(rest);
    }
    b->used = true;
    b->n_uses = 0;
    return b;
}

/* Swallows what follows b. */
static void merge(ddp_block *b) {
    ddp_block *gone = b->after;
    b->size += gone->size;
    b->after = gone->after;
    if (b->after) b->after->before = b;
    free(gone);
}

void ddp__block_give(ddp_block *b) {
    if (b->after && !b->after->used) {
        ddp__block_remove(b->after);
        merge(b);
    }
    if (b->before && !b->before->used) {
        b = b->before;
        ddp__block_remove(b);
        merge(b);
    }
    put(b);
}

ddp_block *ddp__block_segment(ddp_block_pool *q, bool small, int gpu, void *p, size_t size) {
    ddp_block *b = calloc(1, sizeof *b);
    if (!b) return NULL;
    *b = (ddp_block){.pool = q, .p = p, .size = size, .small = small, .gpu = gpu};
    put(b);
    return b;
}

ddp_block *ddp__block_idle(ddp_block_pool *q) {
    ddp_block *best = NULL;
    for (int small = 0; small < 2; small++)
        for (int bin = 0; bin < DDP_BLOCK_BINS; bin++)
            for (ddp_block *b = q->bin[small][bin]; b; b = b->next)
                if (!b->before && !b->after && (!best || b->size > best->size)) best = b;
    return best;
}
