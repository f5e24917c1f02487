/* hier.c -- ranks of several hosts: shared memory inside a host, one leader a host among hosts. An engine made of two
 * others: the inner one of the ranks of this host, the outer one of the leaders, each the first rank of its host.
 *
 * The first step of every collective, inside and outside, bears the user's signature, so that calls that differ are told
 * in the user's words. A mean is weighted on both levels: the mean of a host weighs as much as its ranks do together. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../tensor/tensor.h"
#include "queue.h"

typedef struct place {
    int host, local, rank;
} place;

typedef struct hier {
    const ddp_engine *inner_engine, *outer_engine;
    ddp_comm *inner, *outer; /* outer: of leaders, where there are several hosts */
    ddp_store *inner_store, *outer_store;
    char inner_prefix[80], outer_prefix[80];
    int rank, size, local, local_size, host, hosts, widest; /* widest: ranks of the largest host */
    place *places;                                          /* [size], by host, then by place in it */
    int *first;                                             /* [hosts + 1]: where a host begins in places */
    uint32_t seq;                                           /* of the collective that runs */
    int *called, *leaders;                                  /* [local_size], [hosts]: their ranks in the world */
} hier;

/* ---- steps -------------------------------------------------------------------------------------------------------------- */

/* One collective of `e`, from post to end. */
static int step(const hier *h, const ddp_engine *e, ddp_comm *comm, ddp_coll *k, const volatile int *late) {
    ddp_req *r;
    k->number = h->seq;
    k->deadline_s = 0; /* the wait for the whole has a deadline, and says by `late` that it is over */
    k->late = late;
    int st = e->post(comm, k, &r);
    if (st < 0) return st;
    st = e->wait(r);
    if (st == 0) k->weight_sum = e->weight_sum(r);
    e->req_free(r);
    return st;
}

static int inside(hier *h, ddp_coll *k, const volatile int *late) {
    return step(h, h->inner_engine, h->inner, k, late);
}

/* Among leaders; a host whose leader fails here ends with its reason (hier_stop). */
static int outside(hier *h, ddp_coll *k, const volatile int *late) {
    return h->outer ? step(h, h->outer_engine, h->outer, k, late) : 0;
}

static ddp_coll internal(ddp_coll_kind kind, void *buf, int64_t count, ddp_dtype dtype) {
    ddp_coll k = {.buf = buf, .count = count, .dtype = dtype, .weight = 1};
    k.sig.kind = (int32_t)kind;
    k.sig.dtype = (int32_t)dtype;
    k.sig.count = count;
    return k;
}

/* Compares calls and moves nothing. */
static ddp_coll only_signature(const ddp_coll *user) {
    ddp_coll k = *user;
    k.count = 0;
    k.root = 0;
    return k;
}

/* What the leader has goes to the ranks of its host. No `late`: the leader knows better who is missing. */
static int spread(hier *h, void *buf, int64_t count, ddp_dtype dtype) {
    ddp_coll k = internal(DDP_COLL_BROADCAST, buf, count, dtype);
    return h->local_size > 1 ? inside(h, &k, NULL) : 0;
}

/* ---- collectives ---------------------------------------------------------------------------------------------------------- */

static int hier_all_reduce(hier *h, ddp_coll *k) {
    ddp_coll in = *k;
    int st = inside(h, &in, k->late);
    double sum = in.weight_sum;
    if (st == 0 && h->outer) {
        ddp_coll out = *k;
        out.weight = k->reduce == DDP_MEAN ? sum : sum != 0;
        out.share = sum != 0 ? sum : 1e-300; /* 0 would mean the weight */
        st = outside(h, &out, k->late);
        sum = out.weight_sum;
    }
    if (st == 0 && h->hosts > 1) st = spread(h, k->buf, k->count, k->dtype);
    if (st == 0 && h->hosts > 1) st = spread(h, &sum, 1, DDP_F64);
    k->weight_sum = sum;
    return st;
}

static int hier_broadcast(hier *h, ddp_coll *k) {
    int at = 0;
    while (h->places[at].rank != k->root) at++;
    const place *root = &h->places[at];
    ddp_coll in = only_signature(k), out = *k;
    if (root->host == h->host) {
        in = *k;
        in.root = root->local;
    }
    out.root = root->host;
    int st = inside(h, &in, k->late);
    if (st == 0) st = outside(h, &out, k->late);
    if (st == 0 && root->host != h->host) st = spread(h, k->buf, k->count, k->dtype);
    return st;
}

/* Of all ranks' parts as hosts sent them, each host padded to the widest, into the order of ranks. */
static void by_rank(const hier *h, const char *all, char *out, size_t bytes) {
    for (int i = 0; i < h->size; i++) {
        const place *p = &h->places[i];
        memcpy(out + (size_t)p->rank * bytes, all + ((size_t)p->host * (size_t)h->widest + (size_t)p->local) * bytes,
               bytes);
    }
}

static int hier_all_gather(hier *h, ddp_coll *k) {
    size_t bytes = (size_t)k->count * ddp__dtype_bytes[k->dtype], host = bytes * (size_t)h->widest;
    char *mine = calloc(1, host + 1), *all = h->local == 0 ? malloc(host * (size_t)h->hosts + 1) : NULL;
    int st = mine && (all || h->local > 0) ? 0 : ddp__fail(DDP_ENOMEM, "hier: out of memory in all_gather");
    if (st == 0) {
        ddp_coll in = *k, out = *k;
        in.buf = mine;
        st = inside(h, &in, k->late);
        out.in = mine;
        out.buf = all;
        out.count = k->count * h->widest;
        if (st == 0 && h->outer) st = outside(h, &out, k->late);
        if (st == 0 && h->local == 0) by_rank(h, h->outer ? all : mine, k->buf, bytes);
        if (st == 0) st = spread(h, k->buf, k->count * h->size, k->dtype);
    }
    free(mine);
    free(all);
    return st;
}

static int hier_reduce_scatter(hier *h, ddp_coll *k) {
    int64_t n = k->count * h->size;
    size_t bytes = (size_t)k->count * ddp__dtype_bytes[k->dtype];
    char *all = malloc((size_t)n * ddp__dtype_bytes[k->dtype] + 1);
    if (!all) return ddp__fail(DDP_ENOMEM, "hier: out of memory in reduce_scatter");
    ddp_coll in = only_signature(k), out = in, whole = internal(DDP_COLL_ALL_REDUCE, all, n, k->dtype);
    memcpy(all, k->in, bytes * (size_t)h->size);
    whole.reduce = whole.sig.reduce = k->reduce;
    whole.weight = k->weight;
    whole.late = k->late;
    int st = inside(h, &in, k->late);
    if (st == 0) st = outside(h, &out, k->late);
    if (st == 0) st = hier_all_reduce(h, &whole);
    if (st == 0 && bytes > 0) memcpy(k->buf, all + bytes * (size_t)h->rank, bytes);
    k->weight_sum = whole.weight_sum;
    free(all);
    return st;
}

static int hier_barrier(hier *h, ddp_coll *k) {
    ddp_coll in = *k, out = *k;
    int st = inside(h, &in, k->late);
    if (st == 0) st = outside(h, &out, k->late);
    if (st == 0 && h->hosts > 1) {
        ddp_coll end = internal(DDP_COLL_BARRIER, NULL, 0, DDP_U8);
        st = inside(h, &end, NULL);
    }
    return st;
}

static int hier_run(void *self, ddp_coll *k, uint32_t seq) {
    hier *h = self;
    h->seq = seq;
    k->weight_sum = h->size;
    switch (k->sig.kind) {
        case DDP_COLL_ALL_REDUCE: return hier_all_reduce(h, k);
        case DDP_COLL_BROADCAST: return hier_broadcast(h, k);
        case DDP_COLL_ALL_GATHER: return hier_all_gather(h, k);
        case DDP_COLL_REDUCE_SCATTER: return hier_reduce_scatter(h, k);
        default: return hier_barrier(h, k);
    }
}

/* ---- joining ---------------------------------------------------------------------------------------------------------------- */

static int by_place(const void *a, const void *b) {
    const place *x = a, *y = b;
    return x->host != y->host ? x->host - y->host : x->local - y->local;
}

/* Who is where: each rank says it in the store, and all read all. */
static int find_places(hier *h, const ddp_boot *b) {
    char key[96], text[48];
    snprintf(key, sizeof key, "%s/place/%d", b->prefix, b->rank);
    snprintf(text, sizeof text, "%d %d", b->node_rank, b->local_rank);
    if (ddp__store_set(b->store, key, text, strlen(text) + 1) < 0) return ddp__pending();
    for (int r = 0; r < b->size; r++) {
        void *value;
        size_t n;
        snprintf(key, sizeof key, "%s/place/%d", b->prefix, r);
        if (ddp__store_get(b->store, key, ddp__now() + b->timeout, &value, &n) < 0) return ddp__pending();
        h->places[r] = (place){.rank = r};
        sscanf(value, "%d %d", &h->places[r].host, &h->places[r].local);
        free(value);
    }
    qsort(h->places, (size_t)b->size, sizeof *h->places, by_place);
    return 0;
}

/* Numbers hosts and places anew, from 0, and finds mine. */
static int number_places(hier *h, const ddp_boot *b) {
    int host = -1, said = -1;
    for (int i = 0; i < b->size; i++) {
        place *p = &h->places[i];
        if (i == 0 || p->host != said) h->first[++host] = i;
        said = p->host;
        if (i > h->first[host] && p->local == h->places[i - 1].local)
            return ddp__fail(
                DDP_EMISMATCH,
                "init: ranks %d and %d both say they are LOCAL_RANK %d of GROUP_RANK %d, the number of the host",
                h->places[i - 1].rank, p->rank, p->local, said);
        if (p->rank == b->rank) h->host = host;
    }
    h->hosts = host + 1;
    h->first[h->hosts] = b->size;
    for (host = 0; host < h->hosts; host++) {
        int n = h->first[host + 1] - h->first[host];
        if (n > h->widest) h->widest = n;
        h->leaders[host] = h->places[h->first[host]].rank;
        for (int i = 0; i < n; i++) {
            place *p = &h->places[h->first[host] + i];
            p->host = host;
            p->local = i;
            if (host == h->host) h->called[i] = p->rank;
            if (p->rank == b->rank) h->local = i;
        }
    }
    h->local_size = h->first[h->host + 1] - h->first[h->host];
    if (h->local_size == b->local_size) return 0;
    return ddp__fail(DDP_EMISMATCH, "init: rank %d has LOCAL_WORLD_SIZE %d, but %d ranks are of GROUP_RANK %d", b->rank,
                     b->local_size, h->local_size, b->node_rank);
}

/* The leaders' engine: DDP_HIER's, else gloo, or mpi where there is no gloo. */
static int pick_outer(const ddp_engine **out) {
    const char *name = getenv("DDP_HIER");
    bool said = name && *name;
    if (said && strcmp(name, "gloo") != 0 && strcmp(name, "mpi") != 0)
        return ddp__fail(DDP_EINVAL, "init: DDP_HIER is \"%s\", expected gloo or mpi", name);
    int st = ddp__pick_engine(said ? name : "gloo", 2, 1, out);
    if (st == 0 || said) return st;
    ddp_saved_error e;
    ddp__error_save(&e);
    st = ddp__pick_engine("mpi", 2, 1, out);
    if (st < 0) ddp_error_take(NULL);
    if (st < 0) ddp__error_restore(&e);
    else free(e.text);
    return st;
}

static int join_engines(hier *h, const ddp_boot *b) {
    ddp_boot in = *b, out = *b;
    in.rank = in.local_rank = h->local;
    in.size = in.local_size = h->local_size;
    in.called = h->called;
    in.prefix = h->inner_prefix;
    in.cores = b->cores / 2; /* whoever waits inside must not spin where the rank computes */
    out.rank = h->host;
    out.size = h->hosts;
    out.local_rank = 0;
    out.local_size = 1;
    out.called = h->leaders;
    out.prefix = h->outer_prefix;
    snprintf(h->inner_prefix, sizeof h->inner_prefix, "%s/host%d", b->prefix, h->host);
    snprintf(h->outer_prefix, sizeof h->outer_prefix, "%s/hosts", b->prefix);
    if (!(in.store = h->inner_store = ddp__store_again(b->store))) return ddp__pending();
    int st = h->inner_engine->init(&h->inner, &in);
    if (st < 0 || h->hosts == 1 || h->local > 0) return st;
    if (!(out.store = h->outer_store = ddp__store_again(b->store))) return ddp__pending();
    st = pick_outer(&h->outer_engine);
    return st < 0 ? st : h->outer_engine->init(&h->outer, &out);
}

static void hier_leave(void *self, int graceful) {
    hier *h = self;
    if (h->outer) h->outer_engine->destroy(h->outer, graceful);
    if (h->inner) h->inner_engine->destroy(h->inner, graceful);
    ddp__store_free(h->inner_store);
    ddp__store_free(h->outer_store);
    free(h->places);
    free(h->first);
    free(h->called);
    free(h->leaders);
}

static int hier_join(void **self, const ddp_boot *b, const void *with) {
    hier *h = calloc(1, sizeof *h);
    size_t n = (size_t)b->size;
    (void)with;
    if (!h) return ddp__fail(DDP_ENOMEM, "hier: out of memory");
    h->inner_engine = &ddp__engine_shm;
    h->rank = b->rank;
    h->size = b->size;
    h->places = calloc(n, sizeof *h->places);
    h->first = calloc(n + 1, sizeof *h->first);
    h->called = calloc(n, sizeof *h->called);
    h->leaders = calloc(n, sizeof *h->leaders);
    int st = h->places && h->first && h->called && h->leaders ? 0 : ddp__fail(DDP_ENOMEM, "hier: out of memory");
    if (st == 0) st = find_places(h, b);
    if (st == 0) st = number_places(h, b);
    if (st == 0) st = join_engines(h, b);
    if (st == 0) {
        *self = h;
        return 0;
    }
    if (h->inner) h->inner_engine->abort(h->inner, "its host could not join the others");
    ddp_saved_error e;
    ddp__error_save(&e);
    hier_leave(h, 0);
    ddp_error_take(NULL);
    ddp__error_restore(&e);
    free(h);
    return st;
}

static void hier_stop(void *self, const char *why) {
    hier *h = self;
    if (strncmp(why, "peer: ", 6) == 0) why += 6;
    if (h->inner) h->inner_engine->abort(h->inner, why);
    if (h->outer) h->outer_engine->abort(h->outer, why);
}

static int hier_alloc(void *self, size_t bytes, void **out) {
    hier *h = self;
    return h->inner_engine->alloc(h->inner, bytes, out);
}

static void hier_dealloc(void *self, void *p) {
    hier *h = self;
    h->inner_engine->dealloc(h->inner, p);
}

static int hier_init(ddp_comm **out, const ddp_boot *b) {
    static const ddp_queue_ops ops = {.join = hier_join,
                                      .run = hier_run,
                                      .leave = hier_leave,
                                      .stop = hier_stop,
                                      .alloc = hier_alloc,
                                      .dealloc = hier_dealloc};
    return ddp__queue_init(out, b, "hier", &ops, NULL);
}

const ddp_engine *ddp__engine_hier(void) {
    static ddp_engine engine;
    if (engine.size) return &engine;
    ddp__queue_engine(&engine, "hier", hier_init);
    engine.caps |= DDP_CAP_ALLOCATES;
    return &engine;
}
