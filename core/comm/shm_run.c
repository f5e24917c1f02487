/* shm_run.c -- requests: publishing, progress, waiting, and what can go wrong while one waits. */
#include <errno.h>
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

#include "flight.h"
#include "shm.h"

#if defined(__x86_64__)
#include <immintrin.h>
#define PAUSE() _mm_pause()
#else
#define PAUSE() ((void)0)
#endif

#define SPIN_S 50e-6      /* about what a futex costs */
#define SLICE_NS 50000000 /* a wait looks around this often */
#define ASK_S .1          /* and whether its peers live, this often */

/* ---- death ---- */

static void wake(shm_rank *r) {
    atomic_fetch_add(&r->bell, 1);
    syscall(SYS_futex, &r->bell, FUTEX_WAKE, 1, NULL, NULL, 0);
}

static void wake_all(ddp_comm *c) {
    for (int r = 0; r < c->size; r++) wake(&c->ctl->rank[r]);
}

void shm_leave(ddp_comm *c, int how) {
    int here = SHM_HERE;
    if (atomic_compare_exchange_strong(&c->ctl->rank[c->rank].left, &here, how)) wake_all(c);
}

int shm_die(ddp_comm *c, int status, const char *fmt, ...) {
    pthread_mutex_lock(&c->death);
    bool first = atomic_load(&c->status) == 0;
    if (first) {
        va_list ap;
        va_start(ap, fmt);
        vsnprintf(c->text, sizeof c->text, fmt, ap);
        va_end(ap);
        atomic_store(&c->status, status);
    }
    pthread_mutex_unlock(&c->death);
    if (first) shm_leave(c, SHM_FAILED);
    return ddp__fail(atomic_load(&c->status), "%s", c->text);
}

int shm_health(ddp_comm *c) {
    int st = atomic_load(&c->status);
    if (st) return ddp__fail(st, "%s", c->text);
    if (atomic_load_explicit(&c->ctl->aborted, memory_order_acquire) != 2) return 0;
    return shm_die(c, DDP_EPEER, "peer: rank %d: %.511s", ddp__called(&c->boot, c->ctl->abort_rank),
                   c->ctl->abort_text);
}

void shm_abort(ddp_comm *c, const char *why) {
    int none = 0;
    if (!atomic_compare_exchange_strong(&c->ctl->aborted, &none, 1)) return;
    c->ctl->abort_rank = c->rank;
    snprintf(c->ctl->abort_text, sizeof c->ctl->abort_text, "%s", why ? why : "aborted");
    atomic_store(&c->ctl->aborted, 2);
    wake_all(c);
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
ALL_REACHED(all_shared, shared)
ALL_REACHED(all_copied, copied)
ALL_REACHED(all_reduced, reduced)
ALL_REACHED(all_consumed, consumed)

/* Sets a counter of this rank and wakes those who wait. */
static void count(ddp_comm *c, atomic_uint *counter, uint32_t v) {
    atomic_store_explicit(counter, v, memory_order_release);
    atomic_thread_fence(memory_order_seq_cst); /* the change before the look at who waits */
    for (int r = 0; r < c->size; r++)
        if (r != c->rank && atomic_load_explicit(&c->ctl->rank[r].waiting, memory_order_relaxed))
            wake(&c->ctl->rank[r]);
}

/* Shows a request to the others, when its ring entry is free: everyone has finished the one it held. */
static bool publish(ddp_comm *c, ddp_req *r) {
    if (r->seq > SHM_RING && !all_shared(c, r->seq - SHM_RING)) return false;
    shm_entry *e = shm_entry_of(c, c->rank, r->seq);
    size_t bytes = (size_t)r->coll.count * ddp__dtype_bytes[r->coll.dtype];
    const shm_segment *g = NULL;
    e->offset = 0;
    if (r->coll.sig.kind == DDP_COLL_ALL_REDUCE || r->coll.sig.kind == DDP_COLL_BROADCAST)
        g = shm_find_segment(c, r->coll.buf, bytes, &e->offset);
    e->sig = r->coll.sig;
    e->weight = r->coll.weight;
    e->segment = g ? g->serial : -1;
    r->published = true;
    count(c, &c->ctl->rank[c->rank].posted, r->seq);
    return true;
}

/* Who has come, and do they make the same call? Each rank finds out by itself. */
static int compare(ddp_comm *c, ddp_req *r) {
    const shm_entry *mine = shm_entry_of(c, c->rank, r->seq);
    for (int p = 0; p < c->size; p++) {
        if (r->same >> p & 1 || !reached(&c->ctl->rank[p].posted, r->seq)) continue;
        const shm_entry *e = shm_entry_of(c, p, r->seq);
        if (!ddp__signature_equal(&e->sig, &mine->sig)) {
            char a[300], b[300];
            int lo = p < c->rank ? p : c->rank, hi = p < c->rank ? c->rank : p;
            return shm_die(
                c, DDP_EMISMATCH, "rank %d calls %s, rank %d calls %s", ddp__called(&c->boot, lo),
                ddp__signature_call(&shm_entry_of(c, lo, r->seq)->sig, ddp__number(&r->coll, r->seq), a, sizeof a),
                ddp__called(&c->boot, hi),
                ddp__signature_call(&shm_entry_of(c, hi, r->seq)->sig, ddp__number(&r->coll, r->seq), b, sizeof b));
        }
        r->same |= (uint64_t)1 << p;
    }
    return 0;
}

/* All are here with the same call: how it runs. */
static void plan(ddp_comm *c, ddp_req *r) {
    const shm_entry *mine = shm_entry_of(c, c->rank, r->seq);
    bool in_place = mine->segment >= 0;
    r->weight_sum = 0;
    for (int p = 0; p < c->size; p++) {
        const shm_entry *e = shm_entry_of(c, p, r->seq);
        in_place &= e->segment == mine->segment && e->offset == mine->offset;
        r->weight_sum += e->weight;
    }
    int64_t size = ddp__dtype_bytes[r->coll.dtype];
    r->base = c->chunks;
    r->chunk_elems = SHM_CHUNK / size;
    r->n_chunks = in_place ? 0 : (shm_elements(c, r) + r->chunk_elems - 1) / r->chunk_elems;
    r->split = r->coll.sig.kind == DDP_COLL_ALL_REDUCE && r->coll.count * size >= SHM_SPLIT;
    c->chunks += (uint32_t)r->n_chunks;
    if (in_place) shm_in_place(c, r);
    r->state = r->n_chunks ? SHM_CHUNKS : SHM_WAIT_SHARED;
    if (r->n_chunks == 0) count(c, &c->ctl->rank[c->rank].shared, r->seq); /* a barrier too, which has no chunks */
}

/* Number of a chunk among all; its slot is free again when all have consumed what lay there before. */
static uint32_t nth(const ddp_req *r, int64_t chunk) { return r->base + (uint32_t)chunk; }
static uint32_t freed(const ddp_req *r, int64_t chunk) { return nth(r, chunk) - SHM_SLOTS + 1; }

/* Moves one chunk by one stage, the last stage first; false when all stages must wait for others. */
static bool move_chunk(ddp_comm *c, ddp_req *r) {
    shm_rank *me = &c->ctl->rank[c->rank];
    if (r->out < r->n_chunks && r->out < r->in) {
        uint32_t next = nth(r, r->out) + 1;
        if (r->split ? r->out < r->mid && all_reduced(c, next) : all_copied(c, next)) {
            shm_read_chunk(c, r, r->out);
            if (!r->split) atomic_store_explicit(&me->reduced, next, memory_order_release); /* nobody waits for it */
            r->out++;
            count(c, &me->consumed, next);
            return true;
        }
    }
    if (r->split && r->mid < r->in && all_copied(c, nth(r, r->mid) + 1)) {
        shm_reduce_chunk(c, r, r->mid);
        r->mid++;
        count(c, &me->reduced, nth(r, r->mid));
        return true;
    }
    if (r->in < r->n_chunks && all_consumed(c, freed(r, r->in))) {
        shm_copy_in(c, r, r->in);
        r->in++;
        count(c, &me->copied, nth(r, r->in));
        return true;
    }
    return false;
}

/* One step of a request; false when it must wait for others, or in an error. */
static bool step(ddp_comm *c, ddp_req *r, int *st) {
    switch (r->state) {
        case SHM_WAIT_POSTED:
            if (!r->published && !publish(c, r)) return false;
            *st = compare(c, r);
            if (*st < 0 || r->same != ~(uint64_t)0 >> (64 - c->size)) return false;
            plan(c, r);
            return true;
        case SHM_WAIT_SHARED:
            if (!all_shared(c, r->seq)) return false;
            r->state = SHM_DONE;
            return true;
        case SHM_CHUNKS:
            if (r->out < r->n_chunks) return move_chunk(c, r);
            r->state = SHM_DONE;
            count(c, &c->ctl->rank[c->rank].shared, r->seq);
            return true;
        case SHM_DONE: break;
    }
    return false;
}

static void nap(double s) {
    struct timespec t = {(time_t)s, (long)((s - (double)(time_t)s) * 1e9)};
    nanosleep(&t, NULL);
}

int shm_progress(ddp_comm *c, bool end) {
    int st = atomic_load_explicit(&c->status, memory_order_relaxed);
    if (st) return shm_health(c);
    ddp_req *next = c->head;
    while (next && (next->published || publish(c, next))) next = next->next;
    while (c->head) {
        ddp_req *r = c->head;
        bool more = r->state != SHM_DONE;
        while (more && (more = step(c, r, &st))) c->moves++;
        if (st < 0) return st;
        if (r->state != SHM_DONE || (c->delay > 0 && !end)) return 0;
        if (c->delay > 0 && r->coll.sig.kind != DDP_COLL_BARRIER) nap(c->delay);
        c->head = r->next;
        if (!c->head) c->tail = NULL;
    }
    return 0;
}

bool shm_finished(const ddp_req *r) { return r->state == SHM_DONE && r->comm->head != r; }

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

/* Has `rank` not done what r waits for? */
static bool behind(const ddp_comm *c, const ddp_req *r, int rank) {
    const shm_rank *p = &c->ctl->rank[rank];
    if (!reached(&p->posted, r->seq)) return true;
    if (r->state == SHM_WAIT_POSTED) /* only its own ring can be full */
        return !r->published && !reached(&p->shared, r->seq - SHM_RING);
    if (r->state == SHM_WAIT_SHARED) return !reached(&p->shared, r->seq);
    if (r->out < r->mid && !reached(&p->reduced, nth(r, r->out) + 1)) return true;
    int64_t unread = r->split ? r->mid : r->out;
    if (unread < r->in && !reached(&p->copied, nth(r, unread) + 1)) return true;
    return r->in < r->n_chunks && !reached(&p->consumed, freed(r, r->in));
}

static bool known_gone(const ddp_comm *c, int rank) {
    const shm_rank *p = &c->ctl->rank[rank], *me = &c->ctl->rank[c->rank];
    unsigned long space = atomic_load(&me->pid_space);
    return space && space == atomic_load(&p->pid_space) && is_gone(atomic_load(&p->pid));
}

/* A peer that will not come any more: it left, it failed, or (asked only now and then) its process is gone. */
static int check_peers(ddp_comm *c, const ddp_req *r, bool ask) {
    for (int p = 0; p < c->size; p++) {
        if (p == c->rank || !behind(c, r, p)) continue;
        int left = atomic_load(&c->ctl->rank[p].left);
        if (!left && !(ask && known_gone(c, p))) continue;
        if (!behind(c, r, p)) continue; /* it did its part and left then */
        char what[300], how[64];
        if (left) snprintf(how, sizeof how, "%s", left == SHM_LEFT ? "left" : "failed");
        else snprintf(how, sizeof how, "(process %d) is gone", atomic_load(&c->ctl->rank[p].pid));
        return shm_die(c, DDP_EPEER, "peer: rank %d %s while rank %d waits in %s", ddp__called(&c->boot, p), how,
                       ddp__called(&c->boot, c->rank),
                       ddp__signature_call(&r->coll.sig, ddp__number(&r->coll, r->seq), what, sizeof what));
    }
    return 0;
}

static int timed_out(ddp_comm *c, const ddp_req *r, double waited) {
    char what[300], who[256] = "";
    size_t at = 0;
    int n = 0;
    for (int p = 0; p < c->size && at < sizeof who; p++) {
        if (p == c->rank || !behind(c, r, p)) continue;
        at += (size_t)snprintf(who + at, sizeof who - at, "%s%d", n ? ", " : "", ddp__called(&c->boot, p));
        n++;
    }
    if (n == 0) return 0; /* they came this very moment */
    bool one = n == 1;
    return shm_die(c, DDP_ETIMEOUT, "rank%s %s %s not reached %s; rank %d waits there since %.1f s", one ? "" : "s",
                   who, one ? "has" : "have",
                   ddp__signature_call(&r->coll.sig, ddp__number(&r->coll, r->seq), what, sizeof what),
                   ddp__called(&c->boot, c->rank), waited);
}

/* Sleeps until a peer rings, a slice at most. */
static int sleep_a_slice(ddp_comm *c, const ddp_req *r) {
    shm_rank *me = &c->ctl->rank[c->rank];
    uint32_t bell = atomic_load(&me->bell);
    atomic_store(&me->waiting, 1);
    int st = shm_progress(c, true); /* what changed before `waiting` was seen rings no bell */
    if (st == 0 && !shm_finished(r)) {
        struct timespec t = {0, SLICE_NS};
        syscall(SYS_futex, &me->bell, FUTEX_WAIT, bell, &t, NULL, 0);
    }
    atomic_store(&me->waiting, 0);
    return st;
}

int shm_wait(ddp_req *r) {
    ddp_comm *c = r->comm;
    double begin = 0, idle = 0, asked = 0; /* since when */
    uint64_t moves = c->moves;
    for (uint32_t tries = 1;; tries++) {
        if (shm_finished(r)) return 0;
        int st = shm_progress(c, true);
        if (st < 0) return st;
        if (shm_finished(r)) return 0;
        if (c->spin && tries % 64) {
            PAUSE();
            continue;
        }
        double now = ddp__now();
        if (begin == 0) begin = idle = asked = now;
        if (moves != c->moves) idle = now;
        moves = c->moves;
        if (c->spin && now - idle < SPIN_S) {
            sched_yield(); /* the peer may have been put on this very core */
            continue;
        }
        tries = 63; /* asleep from now on, until something moves */
        if ((st = shm_health(c)) < 0) return st;
        bool ask = now - asked > ASK_S;
        if (ask) asked = now;
        if ((st = check_peers(c, c->head, ask)) < 0) return st;
        bool late = (r->coll.deadline_s > 0 && now - begin > r->coll.deadline_s) ||
                    (r->coll.late && __atomic_load_n(r->coll.late, __ATOMIC_RELAXED));
        if (late && (st = timed_out(c, c->head, now - begin)) < 0) return st;
        if ((st = sleep_a_slice(c, r)) < 0) return st;
    }
}
