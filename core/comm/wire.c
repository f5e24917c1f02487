/* wire.c -- collectives made of one thing: bytes that ranks exchange.
 *
 * Each collective begins with a message of every rank to every other: its call, its weight and, when the data are few,
 * the data. What follows moves in shares: rank r adds up the r-th share of what all ranks have, in rank order (reduce.c),
 * and sends it to all. So a number is rounded once, its bits are the same on all ranks and those of the shm engine, and a
 * rank sends and receives 2 (P - 1) / P times the data. One share goes straight to each rank, where a ring would take
 * P - 1 steps. Large data go in pieces: the results of a piece travel with the shares of the next. */
#include "wire.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "reduce.h"

enum {
    INLINE = 824,     /* bytes that travel with the call: a message is 1 KiB */
    WHOLE = 16 << 10, /* bytes up to which all ranks get everything and add up by themselves */
    PIECE = 1 << 20,  /* bytes of a piece, of all ranks' shares together */
    LEAVING = -1      /* the kind of a rank's last message */
};

typedef struct message {
    ddp_signature sig;
    double weight, share;
    uint32_t seq;
    uint32_t come; /* 1; zero before it has come */
    char data[INLINE];
} message;
_Static_assert(sizeof(message) == 1024, "a message");

typedef struct wire_comm {
    const ddp_wire *wire;
    pthread_mutex_t lock; /* guards lib against stop */
    void *lib;            /* the wire's own */
    ddp_boot boot;
    int rank, size;
    message *all;       /* [size]; mine at [rank] */
    ddp_part *out, *in; /* [2 * size] */
    int n_out, n_in;
    char *stage; /* [size][stage_bytes]: shares of the others */
    size_t stage_bytes;
    double *weights;   /* [size] */
    const void **from; /* [size] */
} wire_comm;

/* ---- exchanging ------------------------------------------------------------------------------------------------------- */

static void send_to(wire_comm *c, int rank, const void *p, size_t n) {
    c->out[c->n_out++] = (ddp_part){.rank = rank, .p = (void *)(uintptr_t)p, .n = n};
}
static void receive_from(wire_comm *c, int rank, void *p, size_t n) {
    c->in[c->n_in++] = (ddp_part){.rank = rank, .p = p, .n = n};
}

/* Moves what was named since the last time. */
static int exchange(wire_comm *c) {
    int lost = -1, st = c->wire->exchange(c->lib, c->out, c->n_out, c->in, c->n_in, &lost);
    c->n_out = c->n_in = 0;
    if (st == DDP_EPEER) {
        ddp_error_take(NULL);
        if (lost >= 0) ddp__fail(st, "the connection to rank %d is lost", ddp__called(&c->boot, lost));
        else ddp__fail(st, "a connection is lost");
    }
    return st;
}

/* The k-th other rank, as seen from mine: so that not all begin with the same one. */
static int other(const wire_comm *c, int k) { return (c->rank + k) % c->size; }

/* My message to all, and theirs to me. */
static int exchange_messages(wire_comm *c) {
    for (int k = 1; k < c->size; k++) {
        int from = other(c, c->size - k), to = other(c, k);
        receive_from(c, from, &c->all[from], sizeof(message));
        send_to(c, to, &c->all[c->rank], sizeof(message));
    }
    return exchange(c);
}

/* Also looked at while the library may be writing the message: only to name who is missing. */
static bool has_come(const message *m) { return __atomic_load_n(&m->come, __ATOMIC_ACQUIRE) != 0; }

/* A share of n elements; whole cache lines, so that shares are aligned alike. */
static void share_of(const wire_comm *c, int rank, int64_t n, int64_t size, int64_t *lo, int64_t *hi) {
    int64_t line = 64 / size, share = ((n + c->size - 1) / c->size + line - 1) / line * line;
    *lo = share * rank < n ? share * rank : n;
    *hi = *lo + share < n ? *lo + share : n;
}

static int need_stage(wire_comm *c, size_t bytes) {
    if (bytes <= c->stage_bytes) return 0;
    free(c->stage);
    c->stage_bytes = (bytes + 4095) & ~(size_t)4095;
    c->stage = aligned_alloc(4096, c->stage_bytes * (size_t)c->size);
    if (c->stage) return 0;
    c->stage_bytes = 0;
    return ddp__fail(DDP_ENOMEM, "%s: no memory for %zu bytes of %d ranks", c->wire->name, bytes, c->size);
}

static char *stage_of(const wire_comm *c, int rank) { return c->stage + (size_t)rank * c->stage_bytes; }

/* out = what the stages of all ranks hold, mine at `mine`. */
static void add_up(wire_comm *c, const ddp_coll *k, const void *mine, void *out, int64_t n) {
    for (int r = 0; r < c->size; r++) c->from[r] = r == c->rank ? mine : stage_of(c, r);
    ddp__reduce(k->dtype, k->reduce, c->size, c->from, c->weights, 1, &out, n);
}

/* ---- the collectives -------------------------------------------------------------------------------------------------- */

/* Elements a rank puts in. */
static int64_t input_count(const wire_comm *c, const ddp_coll *k) {
    if (k->sig.kind == DDP_COLL_BARRIER) return 0;
    return k->sig.kind == DDP_COLL_REDUCE_SCATTER ? k->count * c->size : k->count;
}

static const void *input_of(const ddp_coll *k) {
    return k->sig.kind == DDP_COLL_ALL_REDUCE || k->sig.kind == DDP_COLL_BROADCAST ? k->buf : k->in;
}

/* The data came with the messages. */
static void from_messages(wire_comm *c, const ddp_coll *k) {
    size_t size = ddp__dtype_bytes[k->dtype], bytes = (size_t)k->count * size;
    size_t at = k->sig.kind == DDP_COLL_REDUCE_SCATTER ? bytes * (size_t)c->rank : 0;
    void *out = k->buf;
    if (bytes == 0) return;
    switch (k->sig.kind) {
        case DDP_COLL_BROADCAST: memcpy(out, c->all[k->root].data, bytes); break;
        case DDP_COLL_ALL_GATHER:
            for (int r = 0; r < c->size; r++) memcpy((char *)out + (size_t)r * bytes, c->all[r].data, bytes);
            break;
        default:
            for (int r = 0; r < c->size; r++) c->from[r] = c->all[r].data + at;
            ddp__reduce(k->dtype, k->reduce, c->size, c->from, c->weights, 1, &out, k->count);
    }
}

/* Everything to everyone. */
static int reduce_whole(wire_comm *c, const ddp_coll *k) {
    size_t bytes = (size_t)k->count * ddp__dtype_bytes[k->dtype];
    int st = need_stage(c, bytes);
    if (st < 0) return st;
    for (int n = 1; n < c->size; n++) {
        receive_from(c, other(c, c->size - n), stage_of(c, other(c, c->size - n)), bytes);
        send_to(c, other(c, n), k->buf, bytes);
    }
    if ((st = exchange(c)) == 0) add_up(c, k, k->buf, k->buf, k->count);
    return st;
}

/* Names the shares of a piece [at, at + n) that travel: to be added up, or already so. */
static void name_shares(wire_comm *c, const ddp_coll *k, int64_t at, int64_t n, bool results) {
    int64_t size = ddp__dtype_bytes[k->dtype], lo, hi, my_lo, my_hi;
    char *piece = (char *)k->buf + at * size;
    share_of(c, c->rank, n, size, &my_lo, &my_hi);
    for (int j = 1; j < c->size; j++) {
        int to = other(c, j), from = other(c, c->size - j);
        share_of(c, results ? from : to, n, size, &lo, &hi);
        if (results) {
            send_to(c, to, piece + my_lo * size, (size_t)((my_hi - my_lo) * size));
            receive_from(c, from, piece + lo * size, (size_t)((hi - lo) * size));
        } else {
            send_to(c, to, piece + lo * size, (size_t)((hi - lo) * size));
            receive_from(c, from, stage_of(c, from), (size_t)((my_hi - my_lo) * size));
        }
    }
}

static int reduce_by_shares(wire_comm *c, const ddp_coll *k) {
    int64_t size = ddp__dtype_bytes[k->dtype], step = PIECE / size, before = -1, lo, hi;
    int st = need_stage(c, PIECE / (size_t)c->size + 128);
    for (int64_t at = 0; st == 0 && (at < k->count || before >= 0); at += step) {
        int64_t n = k->count - at < step ? k->count - at : step;
        if (before >= 0) name_shares(c, k, before, k->count - before < step ? k->count - before : step, true);
        before = -1;
        if (n > 0) name_shares(c, k, at, n, false);
        if ((st = exchange(c)) < 0 || n <= 0) continue;
        share_of(c, c->rank, n, size, &lo, &hi);
        char *mine = (char *)k->buf + (at + lo) * size;
        add_up(c, k, mine, mine, hi - lo);
        before = at;
    }
    return st;
}

static int reduce_scatter(wire_comm *c, const ddp_coll *k) {
    int64_t size = ddp__dtype_bytes[k->dtype], step = PIECE / size;
    int st = need_stage(c, (size_t)((k->count < step ? k->count : step) * size));
    for (int64_t at = 0; st == 0 && at < k->count; at += step) {
        int64_t n = k->count - at < step ? k->count - at : step;
        const char *in = (const char *)k->in + at * size;
        for (int j = 1; j < c->size; j++) {
            int to = other(c, j), from = other(c, c->size - j);
            send_to(c, to, in + to * k->count * size, (size_t)(n * size));
            receive_from(c, from, stage_of(c, from), (size_t)(n * size));
        }
        if ((st = exchange(c)) == 0) add_up(c, k, in + c->rank * k->count * size, (char *)k->buf + at * size, n);
    }
    return st;
}

static int all_gather(wire_comm *c, const void *in, char *out, size_t bytes) {
    for (int j = 1; j < c->size; j++) {
        int to = other(c, j), from = other(c, c->size - j);
        send_to(c, to, in, bytes);
        receive_from(c, from, out + (size_t)from * bytes, bytes);
    }
    if (out + (size_t)c->rank * bytes != in) memcpy(out + (size_t)c->rank * bytes, in, bytes);
    return exchange(c);
}

/* The root gives each rank a share, and all exchange them; few bytes, or two ranks, get all from the root. */
static int broadcast(wire_comm *c, const ddp_coll *k) {
    int64_t size = ddp__dtype_bytes[k->dtype], lo, hi, my_lo, my_hi;
    bool whole = c->size == 2 || k->count * size <= WHOLE, root = c->rank == k->root;
    char *buf = k->buf;
    share_of(c, c->rank, k->count, size, &my_lo, &my_hi);
    if (whole) {
        my_lo = 0;
        my_hi = k->count;
    }
    if (!root) receive_from(c, k->root, buf + my_lo * size, (size_t)((my_hi - my_lo) * size));
    for (int j = 1; root && j < c->size; j++) {
        share_of(c, other(c, j), k->count, size, &lo, &hi);
        if (whole) {
            lo = 0;
            hi = k->count;
        }
        send_to(c, other(c, j), buf + lo * size, (size_t)((hi - lo) * size));
    }
    int st = exchange(c);
    if (st < 0 || whole) return st;
    for (int j = 1; j < c->size; j++) { /* nobody needs to send the root anything but it sends its own share */
        int to = other(c, j), from = other(c, c->size - j);
        if (to != k->root) send_to(c, to, buf + my_lo * size, (size_t)((my_hi - my_lo) * size));
        share_of(c, from, k->count, size, &lo, &hi);
        if (!root) receive_from(c, from, buf + lo * size, (size_t)((hi - lo) * size));
    }
    return exchange(c);
}

/* ---- one collective --------------------------------------------------------------------------------------------------- */

static int compare(const wire_comm *c, uint32_t seq) {
    const message *mine = &c->all[c->rank];
    char a[300], b[300];
    for (int p = 0; p < c->size; p++) {
        const message *m = &c->all[p];
        if (m->sig.kind == LEAVING)
            return ddp__fail(DDP_EPEER, "peer: rank %d left while rank %d waits in %s", ddp__called(&c->boot, p),
                             ddp__called(&c->boot, c->rank), ddp__signature_call(&mine->sig, seq, a, sizeof a));
        if (ddp__signature_equal(&m->sig, &mine->sig)) continue;
        int lo = p < c->rank ? p : c->rank, hi = p < c->rank ? c->rank : p;
        return ddp__fail(DDP_EMISMATCH, "rank %d calls %s, rank %d calls %s", ddp__called(&c->boot, lo),
                         ddp__signature_call(&c->all[lo].sig, c->all[lo].seq, a, sizeof a), ddp__called(&c->boot, hi),
                         ddp__signature_call(&c->all[hi].sig, c->all[hi].seq, b, sizeof b));
    }
    return 0;
}

static int wire_run(void *self, ddp_coll *k, uint32_t seq) {
    wire_comm *c = self;
    message *mine = &c->all[c->rank];
    size_t bytes = (size_t)input_count(c, k) * ddp__dtype_bytes[k->dtype];
    *mine = (message){
        .sig = k->sig, .weight = k->weight, .share = k->share != 0 ? k->share : k->weight, .seq = seq, .come = 1};
    if (bytes > 0 && bytes <= INLINE) memcpy(mine->data, input_of(k), bytes);
    int st = exchange_messages(c);
    if (st == 0) st = compare(c, seq);
    if (st < 0) return st;
    k->weight_sum = 0;
    for (int r = 0; r < c->size; r++) {
        c->weights[r] = c->all[r].weight;
        k->weight_sum += c->all[r].share;
    }
    if (bytes <= INLINE) {
        from_messages(c, k);
    } else {
        switch (k->sig.kind) {
            case DDP_COLL_BROADCAST: st = broadcast(c, k); break;
            case DDP_COLL_ALL_GATHER: st = all_gather(c, k->in, k->buf, bytes); break;
            case DDP_COLL_REDUCE_SCATTER: st = reduce_scatter(c, k); break;
            default: st = bytes <= WHOLE ? reduce_whole(c, k) : reduce_by_shares(c, k);
        }
    }
    for (int r = 0; r < c->size; r++)
        __atomic_store_n(&c->all[r].come, 0, __ATOMIC_RELAXED); /* the next have not come */
    return st;
}

static int wire_missing(void *self, char *who, size_t n) {
    const wire_comm *c = self;
    size_t at = 0;
    int missing = 0;
    for (int r = 0; r < c->size; r++) {
        if (r == c->rank || has_come(&c->all[r])) continue;
        if (at < n) at += (size_t)snprintf(who + at, n - at, "%s%d", missing ? ", " : "", ddp__called(&c->boot, r));
        missing++;
    }
    return missing;
}

/* ---- joining and leaving ---------------------------------------------------------------------------------------------- */

static void wire_free(wire_comm *c) { /* all but itself, which the queue frees */
    free(c->all);
    free(c->out);
    free(c->in);
    free(c->stage);
    free(c->weights);
    free(c->from);
}

static wire_comm *wire_new(const ddp_boot *b, const ddp_wire *w) {
    wire_comm *c = calloc(1, sizeof *c);
    size_t n = (size_t)b->size;
    if (!c) return NULL;
    c->wire = w;
    c->boot = *b;
    c->rank = b->rank;
    c->size = b->size;
    pthread_mutex_init(&c->lock, NULL);
    c->all = calloc(n, sizeof *c->all);
    c->out = calloc(2 * n, sizeof *c->out);
    c->in = calloc(2 * n, sizeof *c->in);
    c->weights = calloc(n, sizeof *c->weights);
    c->from = calloc(n, sizeof *c->from);
    if (c->all && c->out && c->in && c->weights && c->from) return c;
    wire_free(c);
    free(c);
    return NULL;
}

static void wire_stop(void *self, const char *why) {
    wire_comm *c = self;
    (void)why; /* the store tells */
    pthread_mutex_lock(&c->lock);
    if (c->lib) c->wire->stop(c->lib);
    pthread_mutex_unlock(&c->lock);
}

/* A last word to all, and theirs: when every rank leaves, each knows that nobody needs it any more. */
static void wire_leave(void *self, int graceful) {
    wire_comm *c = self;
    if (graceful) {
        c->all[c->rank] = (message){.sig.kind = LEAVING, .come = 1};
        graceful = exchange_messages(c) == 0;
        for (int r = 0; r < c->size; r++) graceful = graceful && c->all[r].sig.kind == LEAVING;
        ddp_error_take(NULL);
    }
    pthread_mutex_lock(&c->lock);
    void *lib = c->lib;
    c->lib = NULL;
    pthread_mutex_unlock(&c->lock);
    c->wire->leave(lib, graceful);
    wire_free(c);
}

static int wire_join(void **self, const ddp_boot *b, const void *wire) {
    wire_comm *c = wire_new(b, wire);
    if (!c) return ddp__fail(DDP_ENOMEM, "%s: out of memory", ((const ddp_wire *)wire)->name);
    int st = c->wire->join(&c->lib, b);
    if (st < 0) {
        wire_free(c);
        free(c);
        return st;
    }
    *self = c;
    return 0;
}

int ddp__wire_init(ddp_comm **out, const ddp_boot *b, const ddp_wire *w) {
    static const ddp_queue_ops ops = {
        .join = wire_join, .run = wire_run, .leave = wire_leave, .stop = wire_stop, .missing = wire_missing};
    if (b->size > DDP_REDUCE_MAX)
        return ddp__fail(DDP_EINVAL, "%s: %d ranks, at most %d", w->name, b->size, DDP_REDUCE_MAX);
    return ddp__queue_init(out, b, w->name, &ops, w);
}

int ddp__wire_again(ddp_boot *copy, const ddp_boot *b) {
    *copy = *b;
    copy->store = ddp__store_again(b->store);
    return copy->store ? 0 : ddp__pending();
}

/* ---- for join --------------------------------------------------------------------------------------------------------- */

int ddp__wire_set(const ddp_boot *b, const char *key, const void *value, size_t n) {
    char path[256];
    snprintf(path, sizeof path, "%s/%s", b->prefix, key);
    return ddp__store_set(b->store, path, value, n);
}

int ddp__wire_get(const ddp_boot *b, const char *key, double deadline, void **value, size_t *n) {
    char path[256];
    snprintf(path, sizeof path, "%s/%s", b->prefix, key);
    return ddp__store_get(b->store, path, deadline, value, n);
}

int ddp__wire_add(const ddp_boot *b, const char *key, int64_t by, int64_t *value) {
    char path[256];
    snprintf(path, sizeof path, "%s/%s", b->prefix, key);
    return ddp__store_add(b->store, path, by, value);
}

void ddp__wire_address(const ddp_boot *b, char *iface, size_t iface_n, char *address, size_t address_n) {
    const char *name = getenv("DDP_IFACE");
    snprintf(iface, iface_n, "%s", name ? name : "");
    ddp__store_address(b->store, address, address_n);
}
