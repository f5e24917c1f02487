/* shm_run.c -- requests: publishing, progress, waiting, and what can go wrong while one waits. */
#include <errno.h>
#include <immintrin.h>
#include <linux/futex.h>
#include <sched.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "shm.h"

/* ---- death ----------------------------------------------------------------------------------------------------------
 */

int shm_die(ddp_comm *c, int status, const char *fmt, ...) {
    if (!c->status) {
        va_list ap;
        va_start(ap, fmt);
        vsnprintf(c->text, sizeof c->text, fmt, ap);
        va_end(ap);
        c->status = status;
    }
    return ddp__fail(c->status, "%s", c->text);
}

int shm_health(ddp_comm *c) {
    if (c->status) return ddp__fail(c->status, "%s", c->text);
    if (atomic_load_explicit(&c->ctl->aborted, memory_order_acquire) != 2) return 0;
    return shm_die(c, DDP_EPEER, "peer: rank %d: %.511s", c->ctl->abort_rank, c->ctl->abort_text);
}

static void wake(shm_rank *r) {
    atomic_fetch_add(&r->bell, 1);
    syscall(SYS_futex, &r->bell, FUTEX_WAKE, 1, NULL, NULL, 0);
}

void shm_ring(ddp_comm *c) {
    atomic_thread_fence(memory_order_seq_cst); /* the change before the look at who waits */
    for (int r = 0; r < c->size; r++)
        if (r != c->rank && atomic_load_explicit(&c->ctl->rank[r].waiting, memory_order_relaxed))
            wake(&c->ctl->rank[r]);
}

void shm_abort(ddp_comm *c, const char *why) {
    int none = 0;
    if (!atomic_compare_exchange_strong(&c->ctl->aborted, &none, 1)) return;
    c->ctl->abort_rank = c->rank;
    snprintf(c->ctl->abort_text, sizeof c->ctl->abort_text, "%s", why);
    atomic_store(&c->ctl->aborted, 2);
    for (int r = 0; r < c->size; r++) wake(&c->ctl->rank[r]);
}

/* ---- progress ---- */

static bool reached(const atomic_uint *counter, uint32_t v) {
    return (int32_t)(atomic_load_explicit(counter, memory_order_acquire) - v) >= 0;
}

#define ALL_REACHED(name, counter)                                   \
    static bool name(const ddp_comm *c, uint32_t v) {                \
        for (int r = 0; r < c->size; r++)                            \
            if (!reached(&c->ctl->rank[r].counter, v)) return false; \
        return true;                                                 \
    }
ALL_REACHED(all_posted, posted)
ALL_REACHED(all_shared, shared)
ALL_REACHED(all_copied, copied)
ALL_REACHED(all_consumed, consumed)

static shm_entry *entry(const ddp_comm *c, int rank, uint32_t seq) { return &c->ctl->rank[rank].ring[seq % SHM_RING]; }

/* Where in a bucket segment p lies; -1 when in none. */
static int find_segment(const ddp_comm *c, const void *p, size_t bytes, int64_t *offset) {
    for (int s = 0; s < c->n_segments; s++) {
        const shm_segment *g = &c->segments[s];
        if (!g->base) continue;
        const char *mine = g->base + g->part * (size_t)c->rank;
        if ((const char *)p < mine || (const char *)p + bytes > mine + g->part) continue;
        *offset = (const char *)p - mine;
        return s;
    }
    return -1;
}

/* Shows a request to the others, when its ring entry is free: everyone has finished the one it held. */
static bool publish(ddp_comm *c, ddp_req *r) {
    if (r->seq > SHM_RING && !all_shared(c, r->seq - SHM_RING)) return false;
    shm_entry *e = entry(c, c->rank, r->seq);
    size_t bytes = (size_t)r->coll.count * ddp__dtype_bytes[r->coll.dtype];
    e->sig = r->coll.sig;
    e->weight = r->coll.weight;
    e->segment = r->coll.sig.kind == DDP_COLL_ALL_REDUCE ? find_segment(c, r->coll.buf, bytes, &e->offset) : -1;
    r->published = true;
    atomic_store_explicit(&c->ctl->rank[c->rank].posted, r->seq, memory_order_release);
    shm_ring(c);
    return true;
}

/* All are here: the same call everywhere? Then how it runs. */
static int compare(ddp_comm *c, ddp_req *r) {
    const shm_entry *mine = entry(c, c->rank, r->seq);
    bool in_place = mine->segment >= 0;
    r->weight_sum = 0;
    for (int p = 0; p < c->size; p++) {
        const shm_entry *e = entry(c, p, r->seq);
        if (!ddp__signature_equal(&e->sig, &mine->sig)) {
            char a[256], b[256];
            int lo = p < c->rank ? p : c->rank, hi = p < c->rank ? c->rank : p;
            return shm_die(c, DDP_EMISMATCH, "the ranks differ at collective %u: rank %d calls %s; rank %d calls %s",
                           r->seq, lo, ddp__signature_text(&entry(c, lo, r->seq)->sig, a, sizeof a), hi,
                           ddp__signature_text(&entry(c, hi, r->seq)->sig, b, sizeof b));
        }
        in_place &= e->segment == mine->segment && e->offset == mine->offset;
        r->weight_sum += e->weight;
    }
    r->state = SHM_COPY_IN;
    r->chunk = 0;
    r->base = c->chunks;
    r->chunk_elems = SHM_CHUNK / ddp__dtype_bytes[r->coll.dtype];
    int64_t n = r->coll.sig.kind == DDP_COLL_REDUCE_SCATTER ? r->coll.count * c->size : r->coll.count;
    r->n_chunks = in_place ? 0 : (n + r->chunk_elems - 1) / r->chunk_elems;
    c->chunks += (uint32_t)r->n_chunks;
    if (in_place) r->state = SHM_WAIT_SHARED;
    return 0;
}

/* My share of a bucket: all copies in, the result into all of them. */
static void reduce_share(ddp_comm *c, ddp_req *r) {
    const shm_entry *mine = entry(c, c->rank, r->seq);
    const shm_segment *g = &c->segments[mine->segment];
    int64_t size = ddp__dtype_bytes[r->coll.dtype], line = 64 / size;
    int64_t share = ((r->coll.count + c->size - 1) / c->size + line - 1) / line * line;
    int64_t lo = share * c->rank, hi = lo + share;
    if (hi > r->coll.count) hi = r->coll.count;
    if (lo >= hi) return;
    void *parts[SHM_MAX_RANKS];
    double weights[SHM_MAX_RANKS];
    for (int p = 0; p < c->size; p++) {
        parts[p] = g->base + g->part * (size_t)p + mine->offset + lo * size;
        weights[p] = entry(c, p, r->seq)->weight;
    }
    shm_reduce(r->coll.dtype, r->coll.reduce, c->size, (const void *const *)parts, weights, c->size, parts, hi - lo);
}

static char *slot(const ddp_comm *c, int rank, uint32_t chunk) {
    return c->slots + ((size_t)rank * 2 + chunk % 2) * SHM_CHUNK;
}

static void copy_in(ddp_comm *c, ddp_req *r) {
    const ddp_coll *k = &r->coll;
    int64_t size = ddp__dtype_bytes[k->dtype], at = r->chunk * r->chunk_elems;
    int64_t n = (k->sig.kind == DDP_COLL_REDUCE_SCATTER ? k->count * c->size : k->count) - at;
    if (n > r->chunk_elems) n = r->chunk_elems;
    const void *from = k->sig.kind == DDP_COLL_ALL_REDUCE || k->sig.kind == DDP_COLL_BROADCAST ? k->buf : k->in;
    if (k->sig.kind == DDP_COLL_BROADCAST && k->root != c->rank) return;
    memcpy(slot(c, c->rank, r->base + (uint32_t)r->chunk), (const char *)from + at * size, (size_t)(n * size));
}

/* A chunk of the reduced whole lands where it belongs: all of it, or my part. */
static void read_reduced(ddp_comm *c, ddp_req *r, const char *const *slots, int64_t at, int64_t n) {
    const ddp_coll *k = &r->coll;
    int64_t size = ddp__dtype_bytes[k->dtype], lo = at, hi = at + n, shift = 0;
    if (k->sig.kind == DDP_COLL_REDUCE_SCATTER) {
        shift = k->count * c->rank;
        lo = lo > shift ? lo : shift;
        hi = hi < shift + k->count ? hi : shift + k->count;
        if (lo >= hi) return;
    }
    const void *in[SHM_MAX_RANKS];
    double weights[SHM_MAX_RANKS];
    for (int p = 0; p < c->size; p++) {
        in[p] = slots[p] + (lo - at) * size;
        weights[p] = entry(c, p, r->seq)->weight;
    }
    void *out = (char *)k->buf + (lo - shift) * size;
    shm_reduce(k->dtype, k->reduce, c->size, in, weights, 1, &out, hi - lo);
}

static void read_chunk(ddp_comm *c, ddp_req *r) {
    const ddp_coll *k = &r->coll;
    const char *slots[SHM_MAX_RANKS];
    int64_t size = ddp__dtype_bytes[k->dtype], at = r->chunk * r->chunk_elems;
    int64_t n = (k->sig.kind == DDP_COLL_REDUCE_SCATTER ? k->count * c->size : k->count) - at;
    if (n > r->chunk_elems) n = r->chunk_elems;
    for (int p = 0; p < c->size; p++) slots[p] = slot(c, p, r->base + (uint32_t)r->chunk);
    switch (k->sig.kind) {
        case DDP_COLL_BROADCAST:
            if (k->root != c->rank) memcpy((char *)k->buf + at * size, slots[k->root], (size_t)(n * size));
            break;
        case DDP_COLL_ALL_GATHER:
            for (int p = 0; p < c->size; p++)
                memcpy((char *)k->buf + (p * k->count + at) * size, slots[p], (size_t)(n * size));
            break;
        case DDP_COLL_ALL_REDUCE:
        case DDP_COLL_REDUCE_SCATTER: read_reduced(c, r, slots, at, n); break;
        default: break;
    }
}

static void count(ddp_comm *c, atomic_uint *counter, uint32_t v) {
    atomic_store_explicit(counter, v, memory_order_release);
    shm_ring(c);
}

/* One step of a request; false when it must wait for others. */
static bool step(ddp_comm *c, ddp_req *r, int *st) {
    shm_rank *me = &c->ctl->rank[c->rank];
    uint32_t chunk = r->base + (uint32_t)r->chunk;
    switch (r->state) {
        case SHM_WAIT_POSTED:
            if ((!r->published && !publish(c, r)) || !all_posted(c, r->seq)) return false;
            *st = compare(c, r);
            if (*st == 0 && r->state == SHM_WAIT_SHARED) {
                reduce_share(c, r);
                count(c, &me->shared, r->seq);
            }
            return *st == 0;
        case SHM_WAIT_SHARED:
            if (!all_shared(c, r->seq)) return false;
            r->state = SHM_DONE;
            return true;
        case SHM_COPY_IN:
            if (r->chunk == r->n_chunks) { /* also a barrier, which has none */
                count(c, &me->shared, r->seq);
                r->state = r->n_chunks ? SHM_DONE : SHM_WAIT_SHARED;
                return true;
            }
            if (chunk >= 2 && !all_consumed(c, chunk - 1)) return false; /* the slot held chunk - 2 */
            copy_in(c, r);
            count(c, &me->copied, chunk + 1);
            r->state = SHM_READ;
            return true;
        case SHM_READ:
            if (!all_copied(c, chunk + 1)) return false;
            read_chunk(c, r);
            count(c, &me->consumed, chunk + 1);
            r->chunk++;
            r->state = SHM_COPY_IN;
            return true;
        case SHM_DONE: break;
    }
    return false;
}

int shm_progress(ddp_comm *c) {
    for (ddp_req *r = c->head; r && (r->published || publish(c, r)); r = r->next) {
    }
    while (c->head) {
        ddp_req *r = c->head;
        int st = 0;
        while (r->state != SHM_DONE && step(c, r, &st)) {
        }
        if (st < 0) return st;
        if (r->state != SHM_DONE) return 0;
        if (c->delay > 0) {
            struct timespec t = {(time_t)c->delay, (long)((c->delay - (double)(time_t)c->delay) * 1e9)};
            nanosleep(&t, NULL);
        }
        c->head = r->next;
        if (!c->head) c->tail = NULL;
    }
    return 0;
}

/* ---- waiting ---- */

/* Ended, or a zombie whose parent has not looked yet. */
static bool is_gone(int pid) {
    if (pid <= 0) return false;
    if (kill(pid, 0) != 0 && errno == ESRCH) return true;
    char path[64], line[256];
    snprintf(path, sizeof path, "/proc/%d/stat", pid);
    FILE *f = fopen(path, "re");
    if (!f) return false;
    size_t n = fread(line, 1, sizeof line - 1, f);
    fclose(f);
    line[n] = 0;
    const char *paren = strrchr(line, ')');
    return paren && (paren[2] == 'Z' || paren[2] == 'X');
}

/* Has `rank` not done its part of r? */
static bool behind(const ddp_comm *c, const ddp_req *r, int rank) {
    const shm_rank *p = &c->ctl->rank[rank];
    if (!reached(&p->posted, r->seq)) return true;
    return r->state == SHM_WAIT_SHARED ? !reached(&p->shared, r->seq)
           : r->state == SHM_READ      ? !reached(&p->copied, r->base + (uint32_t)r->chunk + 1)
           : r->state == SHM_COPY_IN   ? !reached(&p->consumed, r->base + (uint32_t)r->chunk - 1)
                                       : false;
}

/* A peer that will not come any more: it left, or (asked only now and then) its process is gone. */
static int check_peers(ddp_comm *c, const ddp_req *r, bool ask) {
    char what[256];
    for (int p = 0; p < c->size; p++) {
        shm_rank *k = &c->ctl->rank[p];
        if (p == c->rank || !behind(c, r, p)) continue;
        ddp__signature_text(&r->coll.sig, what, sizeof what);
        if (atomic_load(&k->left))
            return shm_die(c, DDP_EPEER, "peer: rank %d left while rank %d waits in #%u %s", p, c->rank, r->seq, what);
        if (ask && is_gone(atomic_load(&k->pid)))
            return shm_die(c, DDP_EPEER, "peer: rank %d (process %d) is gone while rank %d waits in #%u %s", p,
                           atomic_load(&k->pid), c->rank, r->seq, what);
    }
    return 0;
}

static int timed_out(ddp_comm *c, const ddp_req *r, double waited) {
    char what[256], who[256] = "";
    size_t at = 0;
    int n = 0;
    for (int p = 0; p < c->size && at < sizeof who; p++) {
        if (p == c->rank || !behind(c, r, p)) continue;
        at += (size_t)snprintf(who + at, sizeof who - at, "%s%d", n ? ", " : "", p);
        n++;
    }
    return shm_die(c, DDP_ETIMEOUT, "rank%s %s %s not reached #%u %s; rank %d waits there since %.1f s",
                   n == 1 ? "" : "s", who, n == 1 ? "has" : "have", r->seq,
                   ddp__signature_text(&r->coll.sig, what, sizeof what), c->rank, waited);
}

static bool finished(const ddp_req *r) { return r->state == SHM_DONE && r->comm->head != r; }

int shm_wait(ddp_req *r) {
    ddp_comm *c = r->comm;
    shm_rank *me = &c->ctl->rank[c->rank];
    double begin = 0, asked = 0;
    for (int64_t tries = 0;; tries++) {
        int st = shm_progress(c);
        if (st < 0) return st;
        if (finished(r)) return 0;
        if (tries < c->spin) {
            /* Now and then the core is offered: the peer may have been put on this very one. */
            if (tries % 128 == 127) sched_yield();
            else _mm_pause();
            continue;
        }
        double now = ddp__now();
        if (begin == 0) begin = asked = now;
        if ((st = shm_health(c)) < 0) return st;
        if (r->coll.deadline_s > 0 && now - begin > r->coll.deadline_s) return timed_out(c, c->head, now - begin);
        if ((st = check_peers(c, c->head, now - asked > .1)) < 0) return st;
        if (now - asked > .1) asked = now;
        uint32_t bell = atomic_load(&me->bell);
        atomic_store(&me->waiting, 1);
        st = shm_progress(c); /* what changed before `waiting` was seen rings no bell */
        if (st == 0 && !finished(r)) {
            struct timespec t = {0, 50 * 1000 * 1000};
            syscall(SYS_futex, &me->bell, FUTEX_WAIT, bell, &t, NULL, 0);
        }
        atomic_store(&me->waiting, 0);
        if (st < 0) return st;
    }
}
