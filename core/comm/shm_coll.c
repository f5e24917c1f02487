/* shm_coll.c -- where the bytes of a collective move: in bucket segments, and through the slots by chunks. */
#include <string.h>

#include "shm.h"

const shm_segment *shm_find_segment(const ddp_comm *c, const void *p, size_t bytes, int64_t *offset) {
    for (int s = 0; s < c->n_segments; s++) {
        const shm_segment *g = &c->segments[s];
        if (!g->base) continue;
        const char *mine = g->base + g->part * (size_t)c->rank;
        if ((const char *)p < mine || (const char *)p + bytes > mine + g->part) continue;
        *offset = (const char *)p - mine;
        return g;
    }
    return NULL;
}

/* Rank's share of n elements: whole cache lines, so that two ranks never write into one. */
static void share_of(const ddp_comm *c, int rank, int64_t n, int64_t size, int64_t *lo, int64_t *hi) {
    int64_t line = 64 / size, share = ((n + c->size - 1) / c->size + line - 1) / line * line;
    *lo = share * rank < n ? share * rank : n;
    *hi = *lo + share < n ? *lo + share : n;
}

static void weights_of(const ddp_comm *c, const ddp_req *r, double *w) {
    for (int p = 0; p < c->size; p++) w[p] = shm_entry_of(c, p, r->seq)->weight;
}

/* ---- in place --------------------------------------------------------------------------------------------------------- */

void shm_in_place(ddp_comm *c, ddp_req *r) {
    int64_t size = ddp__dtype_bytes[r->coll.dtype], lo, hi, offset = 0;
    size_t bytes = (size_t)(r->coll.count * size);
    const shm_segment *g = shm_find_segment(c, r->coll.buf, bytes, &offset);
    if (r->coll.sig.kind == DDP_COLL_BROADCAST) {
        const char *from = g->base + g->part * (size_t)r->coll.root + offset;
        if (r->coll.root != c->rank) memcpy(r->coll.buf, from, bytes);
        return;
    }
    share_of(c, c->rank, r->coll.count, size, &lo, &hi);
    void *parts[SHM_MAX_RANKS];
    double weights[SHM_MAX_RANKS];
    for (int p = 0; p < c->size; p++) parts[p] = g->base + g->part * (size_t)p + offset + lo * size;
    weights_of(c, r, weights);
    ddp__reduce(r->coll.dtype, r->coll.reduce, c->size, (const void *const *)parts, weights, c->size, parts, hi - lo);
}

/* ---- by chunks -------------------------------------------------------------------------------------------------------- */

/* A chunk of a request: elements [at, at + n) of all. */
typedef struct piece {
    int64_t size, at, n;
    uint32_t slot;
} piece;

static piece piece_of(const ddp_comm *c, const ddp_req *r, int64_t chunk) {
    piece p = {.size = ddp__dtype_bytes[r->coll.dtype], .at = chunk * r->chunk_elems, .n = r->chunk_elems};
    if (p.n > shm_elements(c, r) - p.at) p.n = shm_elements(c, r) - p.at;
    p.slot = (r->base + (uint32_t)chunk) % SHM_SLOTS;
    return p;
}

static char *slot_of(const ddp_comm *c, int rank, const piece *p) {
    return c->slots + ((size_t)rank * SHM_SLOTS + p->slot) * SHM_CHUNK;
}

void shm_copy_in(ddp_comm *c, ddp_req *r, int64_t chunk) {
    const ddp_coll *k = &r->coll;
    piece p = piece_of(c, r, chunk);
    bool in_buf = k->sig.kind == DDP_COLL_ALL_REDUCE || k->sig.kind == DDP_COLL_BROADCAST;
    if (k->sig.kind == DDP_COLL_BROADCAST && k->root != c->rank) return;
    const char *from = (const char *)(in_buf ? k->buf : k->in) + p.at * p.size;
    char *to = slot_of(c, c->rank, &p);
    int64_t lo = 0, hi = 0;
    if (r->split)
        share_of(c, c->rank, p.n, p.size, &lo, &hi); /* nobody else reads my share, and its place is for the result */
    memcpy(to, from, (size_t)(lo * p.size));
    memcpy(to + hi * p.size, from + hi * p.size, (size_t)((p.n - hi) * p.size));
}

void shm_reduce_chunk(ddp_comm *c, ddp_req *r, int64_t chunk) {
    piece p = piece_of(c, r, chunk);
    int64_t lo, hi;
    share_of(c, c->rank, p.n, p.size, &lo, &hi);
    char *mine = (char *)r->coll.buf + (p.at + lo) * p.size;
    const void *in[SHM_MAX_RANKS];
    double weights[SHM_MAX_RANKS];
    for (int q = 0; q < c->size; q++) in[q] = q == c->rank ? mine : slot_of(c, q, &p) + lo * p.size;
    weights_of(c, r, weights);
    void *out[2] = {mine, slot_of(c, c->rank, &p) + lo * p.size};
    ddp__reduce(r->coll.dtype, r->coll.reduce, c->size, in, weights, 2, out, hi - lo);
}

/* The shares that the others have reduced. */
static void read_shares(ddp_comm *c, ddp_req *r, const piece *p) {
    for (int q = 0; q < c->size; q++) {
        int64_t lo, hi;
        share_of(c, q, p->n, p->size, &lo, &hi);
        if (q != c->rank)
            memcpy((char *)r->coll.buf + (p->at + lo) * p->size, slot_of(c, q, p) + lo * p->size,
                   (size_t)((hi - lo) * p->size));
    }
}

/* All slots are added up here: a whole chunk, or what of it is in my part. */
static void read_sum(ddp_comm *c, ddp_req *r, const piece *p) {
    const ddp_coll *k = &r->coll;
    int64_t lo = p->at, hi = p->at + p->n, begin = 0;
    if (k->sig.kind == DDP_COLL_REDUCE_SCATTER) {
        begin = k->count * c->rank;
        lo = lo > begin ? lo : begin;
        hi = hi < begin + k->count ? hi : begin + k->count;
        if (lo >= hi) return;
    }
    const void *in[SHM_MAX_RANKS];
    double weights[SHM_MAX_RANKS];
    for (int q = 0; q < c->size; q++) in[q] = slot_of(c, q, p) + (lo - p->at) * p->size;
    weights_of(c, r, weights);
    void *out = (char *)k->buf + (lo - begin) * p->size;
    ddp__reduce(k->dtype, k->reduce, c->size, in, weights, 1, &out, hi - lo);
}

void shm_read_chunk(ddp_comm *c, ddp_req *r, int64_t chunk) {
    const ddp_coll *k = &r->coll;
    piece p = piece_of(c, r, chunk);
    size_t bytes = (size_t)(p.n * p.size);
    switch (k->sig.kind) {
        case DDP_COLL_BROADCAST:
            if (k->root != c->rank) memcpy((char *)k->buf + p.at * p.size, slot_of(c, k->root, &p), bytes);
            break;
        case DDP_COLL_ALL_GATHER:
            for (int q = 0; q < c->size; q++)
                memcpy((char *)k->buf + (q * k->count + p.at) * p.size, slot_of(c, q, &p), bytes);
            break;
        case DDP_COLL_ALL_REDUCE:
            if (r->split) read_shares(c, r, &p);
            else read_sum(c, r, &p);
            break;
        case DDP_COLL_REDUCE_SCATTER: read_sum(c, r, &p); break;
        default: break;
    }
}
