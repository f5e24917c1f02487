/* nccl_call.c -- how one collective or message goes on. Nothing here waits: what has to is called again. */
#include "nccl_world.h"

#include <stdio.h>
#include <string.h>

/* ---- collectives --------------------------------------------------------------------------------------------------- */
static const char *kind_name(int kind) {
    static const char *const names[] = {"all_reduce",     "broadcast", "reduce", "all_gather",
                                        "reduce_scatter", "send",      "recv"};
    return names[kind];
}

static const char *describe(const signature *s, char *text, size_t size) {
    static const char *const ops[] = {"sum", "prod", "max", "min", "avg"};
    bool reduces = s->kind == ALL_REDUCE || s->kind == REDUCE || s->kind == REDUCE_SCATTER;
    snprintf(text, size, "%s of %llu %s%s%s, root %d", kind_name(s->kind), (unsigned long long)s->count,
             type_name(s->type), reduces ? " " : "",
             !reduces             ? ""
             : s->op < ncclNumOps ? ops[s->op]
                                  : "premulsum",
             s->root);
    return text;
}

static bool same(const signature *a, const signature *b) {
    return a->number == b->number && a->count == b->count && a->kind == b->kind && a->type == b->type &&
           a->op == b->op && a->root == b->root;
}

/* The real one would hang, or mix up what it is given; this one hangs, and says so. */
static bool agree(call *c) {
    const ncclComm *comm = c->comm;
    const signature *mine = &comm->w->rank[comm->rank].call;
    char a[150], b[150];
    for (int r = 0; r < comm->ranks; r++) {
        const signature *other = &comm->w->rank[r].call;
        if (same(mine, other)) continue;
        ddp_double_say("NCCL MISMATCH: call %llu: rank %d %s; rank %d %s", (unsigned long long)mine->number, comm->rank,
                       describe(mine, a, sizeof a), r, describe(other, b, sizeof b));
        c->wrong = true;
        return false;
    }
    return true;
}

/* Elements of a rank that one piece carries. */
static size_t piece(const call *c) {
    size_t most = SLOT_BYTES / element_bytes(c->type) / (c->kind == REDUCE_SCATTER ? (size_t)c->comm->ranks : 1),
           left = c->count - c->done;
    return left < most ? left : most;
}

static void put(const call *c, char *to, const char *from, size_t n) {
    double by = c->scale.on_device ? read_scalar(c->scale.at, c->scale.type) : c->scale.value;
    if (c->scale.used) scale_copy(to, from, n, c->type, by);
    else memcpy(to, from, n * element_bytes(c->type));
}

static void post(call *c) {
    ncclComm *comm = c->comm;
    shared_rank *me = &comm->w->rank[comm->rank];
    char *slot = comm->w->slot[comm->rank];
    size_t n = piece(c), size = element_bytes(c->type);
    ddp_double_reach();
    if (c->kind == REDUCE_SCATTER) {
        for (int r = 0; r < comm->ranks; r++)
            put(c, slot + (size_t)r * n * size, c->in + ((size_t)r * c->count + c->done) * size, n);
    } else if (c->kind != BROADCAST || comm->rank == c->root) {
        put(c, slot, c->in + c->done * size, n);
    }
    me->call = (signature){c->number, c->count, c->kind, c->type, c->op < ncclNumOps ? c->op : ncclNumOps, c->root};
    atomic_store_explicit(&me->posted, comm->turn + 1, memory_order_release);
    c->posted = true;
}

static void take(const call *c) {
    const ncclComm *comm = c->comm;
    size_t n = piece(c), size = element_bytes(c->type);
    const char *from[MOST_RANKS];
    ddp_double_reach();
    for (int r = 0; r < comm->ranks; r++)
        from[r] = comm->w->slot[r] + (c->kind == REDUCE_SCATTER ? (size_t)comm->rank * n * size : 0);
    switch (c->kind) {
        case ALL_REDUCE:
        case REDUCE_SCATTER: reduce(c->out + c->done * size, from, comm->ranks, n, c->type, c->op); break;
        case REDUCE:
            if (comm->rank == c->root) reduce(c->out + c->done * size, from, comm->ranks, n, c->type, c->op);
            break;
        case BROADCAST: memcpy(c->out + c->done * size, from[c->root], n * size); break;
        case ALL_GATHER:
            for (int r = 0; r < comm->ranks; r++)
                memcpy(c->out + ((size_t)r * c->count + c->done) * size, from[r], n * size);
            break;
        default: break;
    }
    if (c->spoiled && c->done == 0) c->out[size - 1] ^= 0x40;
}

static bool all_reached(const ncclComm *comm, bool finished, uint64_t turn) {
    for (int r = 0; r < comm->ranks; r++) {
        const shared_rank *s = &comm->w->rank[r];
        if (atomic_load_explicit(finished ? &s->finished : &s->posted, memory_order_acquire) < turn) return false;
    }
    return true;
}

static bool advance_collective(call *c) {
    ncclComm *comm = c->comm;
    if (!c->started) {
        c->started = true;
        c->number = ++comm->collectives;
    }
    while (!c->wrong && c->done < c->count) {
        if (!c->posted) {
            if (!all_reached(comm, true, comm->turn)) return false; /* someone still reads the slots */
            post(c);
        }
        if (!all_reached(comm, false, comm->turn + 1) || !agree(c)) return false;
        take(c);
        c->done += piece(c);
        c->posted = false;
        comm->turn++;
        atomic_store_explicit(&comm->w->rank[comm->rank].finished, comm->turn, memory_order_release);
    }
    return !c->wrong;
}

/* ---- messages ------------------------------------------------------------------------------------------------------ */
static bool advance_send(call *c) {
    mailbox *m = &c->comm->w->mail[c->comm->rank][c->root];
    size_t all = c->count * element_bytes(c->type);
    while (c->done < all) {
        uint64_t written = atomic_load(&m->written);
        if (written != atomic_load_explicit(&m->taken, memory_order_acquire)) return false;
        size_t n = all - c->done < MAIL_BYTES ? all - c->done : MAIL_BYTES;
        ddp_double_reach();
        m->bytes = all;
        m->type = (int32_t)c->type;
        memcpy(m->data, c->in + c->done, n);
        c->done += n;
        atomic_store_explicit(&m->written, written + 1, memory_order_release);
    }
    return atomic_load_explicit(&m->taken, memory_order_acquire) == atomic_load(&m->written);
}

static bool advance_recv(call *c) {
    mailbox *m = &c->comm->w->mail[c->root][c->comm->rank];
    size_t all = c->count * element_bytes(c->type);
    while (!c->wrong && c->done < all) {
        uint64_t taken = atomic_load(&m->taken);
        if (taken == atomic_load_explicit(&m->written, memory_order_acquire)) return false;
        if (m->bytes != all || m->type != (int32_t)c->type) {
            ddp_double_say("NCCL MISMATCH: rank %d receives %zu bytes of %s, rank %d sends %llu of %s", c->comm->rank,
                           all, type_name(c->type), c->root, (unsigned long long)m->bytes, type_name(m->type));
            c->wrong = true;
            return false;
        }
        size_t n = all - c->done < MAIL_BYTES ? all - c->done : MAIL_BYTES;
        ddp_double_reach();
        memcpy(c->out + c->done, m->data, n);
        c->done += n;
        atomic_store_explicit(&m->taken, taken + 1, memory_order_release);
    }
    return !c->wrong;
}

bool advance(call *c) {
    return c->kind == SEND ? advance_send(c) : c->kind == RECV ? advance_recv(c) : advance_collective(c);
}
