/* gpu.c -- ranks with GPUs: an engine made of two. Memory of the host goes by a host engine (shm, hier, ...); memory of GPUs by what the
 * device's plug-in offers (NCCL), which is joined when the first collective on a GPU is called.
 *
 * A collective on a GPU first goes through the host engine without any data: the ranks compare what they call and wait for
 * one another there, so whoever is missing, late or elsewhere is named as on the CPU. The GPU's part is queued at once; nobody
 * waits for it on the host, the compute stream does. A watchdog looks whether it ends: NCCL itself hangs for ever where
 * a peer's GPU is gone. After a failure it aborts NCCL, in a thread of its own, since that may hang too. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "../mem/device.h"
#include "../tensor/tensor.h"
#include "device_coll.h"

/* A collective whose GPU part may still run. Owned by its request and by the watchdog's list. */
typedef struct flying {
    struct flying *next;
    int refs;
    void *ticket;
    double since; /* all ranks were there; 0: not known yet */
    double posted;
    char what[256];
} flying;

typedef struct gpu_comm {
    const ddp_engine *host_engine;
    ddp_comm *host;
    ddp_boot boot;
    ddp_store *store;
    char prefix[80];
    uint32_t seq;
    const ddp_device_type *type;
    const ddp_device_coll *coll;
    int gpu;
    void *comm; /* NULL until joined */
    pthread_t watchdog;
    pthread_mutex_t lock; /* of what follows */
    flying *first, **last;
    bool stop, failed, aborting;
    int status;
    char why[800];
} gpu_comm;

typedef struct gpu_req {
    gpu_comm *c;
    ddp_req *host;
    ddp_coll coll;
    flying *f; /* NULL: of host memory alone */
} gpu_req;

static gpu_comm *of(ddp_comm *c) { return (gpu_comm *)(void *)c; }

/* ---- failures ---- */

static void *abort_thread(void *p) {
    gpu_comm *g = p;
    g->coll->abort(g->comm);
    return NULL;
}

/* Lock held. The abort runs beside: where it hangs the process ends by what the launcher does. */
static void fail_locked(gpu_comm *g, int status, const char *why) {
    if (g->failed) return;
    g->failed = true;
    g->status = status;
    snprintf(g->why, sizeof g->why, "%s", why);
    if (!g->comm || g->aborting) return;
    pthread_t t;
    g->aborting = true;
    g->type->poison(g->gpu, status, g->why);
    if (pthread_create(&t, NULL, abort_thread, g) == 0) pthread_detach(t);
}

static void fail(gpu_comm *g, int status, const char *why) {
    pthread_mutex_lock(&g->lock);
    fail_locked(g, status, why);
    pthread_mutex_unlock(&g->lock);
}

static int failed(gpu_comm *g) {
    pthread_mutex_lock(&g->lock);
    int st = g->failed ? ddp__fail(g->status, "%s", g->why) : 0;
    pthread_mutex_unlock(&g->lock);
    return st;
}

/* ---- the watchdog ---- */

static void drop_flying(gpu_comm *g, flying *f) { /* lock held */
    if (--f->refs > 0) return;
    if (f->ticket) g->coll->ticket_free(g->comm, f->ticket);
    free(f);
}

/* Takes what has ended off the list; true when its head has lasted too long. Lock held. */
static bool look(gpu_comm *g) {
    while (g->first && g->coll->done(g->first->ticket) == 1) {
        flying *f = g->first;
        if (!(g->first = f->next)) g->last = &g->first;
        drop_flying(g, f);
    }
    if (!g->first) return false;
    double limit = g->first->since > 0 ? g->first->since + g->boot.timeout : g->first->posted + 2 * g->boot.timeout;
    return ddp__now() > limit;
}

static void *watch(void *p) {
    gpu_comm *g = p;
    char why[400], text[800];
    for (;;) {
        usleep(20000);
        pthread_mutex_lock(&g->lock);
        bool end = g->stop || g->failed, late = !end && look(g);
        const char *ill = end ? NULL : g->coll->health(g->comm, why, sizeof why);
        if (late)
            snprintf(text, sizeof text,
                     "%s was begun by all ranks, but its work on the GPUs has not ended for %.1f s%s%s", g->first->what,
                     g->boot.timeout, ill ? "; " : "", ill ? ill : "");
        else if (ill) snprintf(text, sizeof text, "%s: %s", g->first ? g->first->what : "between collectives", ill);
        if (late || ill) fail_locked(g, late ? DDP_ETIMEOUT : DDP_EPEER, text);
        pthread_mutex_unlock(&g->lock);
        if (late || ill) g->host_engine->abort(g->host, text);
        if (end || late || ill) return NULL;
    }
}

/* ---- joining ---- */

/* What each rank shows the others of its GPU. */
typedef struct gpu_card {
    unsigned char uuid[16];
    char text[112];
} gpu_card;

static int rank_called(const gpu_comm *g, int r) { return ddp__called(&g->boot, r); }

/* Two ranks on one GPU are found here: NCCL would say so later, and less. */
static int compare_cards(const gpu_comm *g, const gpu_card *cards) {
    for (int a = 0; a < g->boot.size; a++)
        for (int b = a + 1; b < g->boot.size; b++)
            if (memcmp(cards[a].uuid, cards[b].uuid, 16) == 0)
                return ddp__fail(
                    DDP_EMISMATCH,
                    "ranks %d and %d are on the same GPU (%s): NCCL needs one a rank. Start as many ranks as there are "
                    "GPUs (ddprun -n gpu), look at CUDA_VISIBLE_DEVICES, or compute on the cpu with DDP_DEVICE=cpu",
                    rank_called(g, a), rank_called(g, b), cards[a].text);
    return 0;
}

static int show_cards(gpu_comm *g, gpu_card *cards) {
    char key[128];
    gpu_card *mine = &cards[g->boot.rank];
    if (g->type->uuid(g->gpu, mine->uuid) < 0) return ddp__pending();
    g->type->describe(g->gpu, mine->text, sizeof mine->text);
    snprintf(key, sizeof key, "%s/gpu/%d", g->prefix, g->boot.rank);
    int st = ddp__store_set(g->store, key, mine, sizeof *mine);
    double deadline = ddp__now() + g->boot.timeout;
    for (int r = 0; r < g->boot.size && st == 0; r++) {
        void *value = NULL;
        size_t n = 0;
        snprintf(key, sizeof key, "%s/gpu/%d", g->prefix, r);
        st = ddp__store_get(g->store, key, deadline, &value, &n);
        if (st == DDP_ETIMEOUT) {
            ddp_error_take(NULL);
            return ddp__fail(
                st,
                "rank %d has called no collective on a GPU in %.1f s: is its model on one? (model:to(ddp.device()))",
                rank_called(g, r), g->boot.timeout);
        }
        if (st == 0 && n == sizeof *cards) memcpy(&cards[r], value, n);
        free(value);
    }
    return st;
}

static int share_id(gpu_comm *g, unsigned char id[DDP_DEVICE_ID]) {
    char key[128];
    void *value = NULL;
    size_t n = 0;
    snprintf(key, sizeof key, "%s/gpu/id", g->prefix);
    if (g->boot.rank == 0) {
        int st = g->coll->make_id(id);
        return st < 0 ? st : ddp__store_set(g->store, key, id, DDP_DEVICE_ID);
    }
    int st = ddp__store_get(g->store, key, ddp__now() + g->boot.timeout, &value, &n);
    if (st == 0 && n == DDP_DEVICE_ID) memcpy(id, value, n);
    free(value);
    return st;
}

static int join(gpu_comm *g, int device) {
    if (g->comm) {
        if (g->gpu == device - 1) return 0;
        return ddp__fail(DDP_EDEVICE, "collective on cuda:%d: this rank's collectives are on cuda:%d", device - 1,
                         g->gpu);
    }
    unsigned char id[DDP_DEVICE_ID] = {0};
    g->gpu = device - 1;
    g->type = ddp__device_of(device);
    g->coll = g->type->coll;
    if (!g->coll) return ddp__fail(DDP_ENOSUP, "collective on cuda:%d: this build has no NCCL", g->gpu);
    gpu_card *cards = calloc((size_t)g->boot.size, sizeof *cards);
    if (!cards) return ddp__fail(DDP_ENOMEM, "nccl: out of memory");
    int st = show_cards(g, cards);
    if (st == 0) st = compare_cards(g, cards);
    free(cards);
    if (st == 0) st = share_id(g, id);
    if (st == 0) st = g->coll->join(g->gpu, g->boot.rank, g->boot.size, id, g->boot.timeout, &g->comm);
    if (st == 0 && pthread_create(&g->watchdog, NULL, watch, g) != 0)
        st = ddp__fail(DDP_ENOMEM, "nccl: no thread for its watchdog");
    if (st < 0 && g->comm) {
        g->coll->leave(g->comm, 0);
        g->comm = NULL;
    }
    return st;
}

/* ---- the engine ---- */

static int gpu_init_over(ddp_comm **out, const ddp_boot *b, const ddp_engine *host) {
    gpu_comm *g = calloc(1, sizeof *g);
    if (!g) return ddp__fail(DDP_ENOMEM, "nccl: out of memory");
    g->host_engine = host;
    g->boot = *b;
    snprintf(g->prefix, sizeof g->prefix, "%s", b->prefix);
    g->boot.prefix = g->prefix;
    g->last = &g->first;
    pthread_mutex_init(&g->lock, NULL);
    int st = host->init(&g->host, b);
    if (st == 0 && !(g->store = ddp__store_again(b->store))) {
        st = ddp__pending();
        host->destroy(g->host, 0);
    }
    if (st < 0) {
        free(g);
        return st;
    }
    *out = (ddp_comm *)(void *)g;
    return 0;
}

static void gpu_destroy(ddp_comm *comm, int graceful) {
    gpu_comm *g = of(comm);
    pthread_mutex_lock(&g->lock);
    bool joined = g->comm != NULL, ill = g->failed, aborting = g->aborting;
    g->stop = true;
    pthread_mutex_unlock(&g->lock);
    if (joined) pthread_join(g->watchdog, NULL);
    g->host_engine->destroy(g->host, graceful && !ill);
    ddp__store_free(g->store);
    if (aborting) return; /* its thread may still be at it */
    while (g->first) {
        flying *f = g->first;
        g->first = f->next;
        drop_flying(g, f);
    }
    if (joined) g->coll->leave(g->comm, graceful && !ill);
    pthread_mutex_destroy(&g->lock);
    free(g);
}

/* What goes through the host engine in place of a collective on a GPU: its signature, and its weight. */
static ddp_coll without_data(const ddp_coll *c) {
    static char nothing[8];
    ddp_coll k = *c;
    k.count = 0;
    k.root = 0;
    k.device = DDP_CPU;
    k.in = k.buf = nothing;
    return k;
}

static int fly(gpu_comm *g, gpu_req *r) {
    flying *f = calloc(1, sizeof *f);
    if (!f) return ddp__fail(DDP_ENOMEM, "nccl: out of memory");
    ddp__signature_call(&r->coll.sig, ddp__number(&r->coll, g->seq), f->what, sizeof f->what);
    f->posted = ddp__now();
    f->refs = 2;
    int st = g->coll->post(g->comm, &r->coll, &f->ticket);
    if (st < 0) {
        free(f);
        return st;
    }
    r->f = f;
    pthread_mutex_lock(&g->lock);
    *g->last = f;
    g->last = &f->next;
    pthread_mutex_unlock(&g->lock);
    return 0;
}

static int gpu_post(ddp_comm *comm, const ddp_coll *coll, ddp_req **out) {
    gpu_comm *g = of(comm);
    int st = failed(g);
    if (st == 0 && coll->device != DDP_CPU) st = join(g, coll->device);
    if (st < 0) return st;
    gpu_req *r = calloc(1, sizeof *r);
    if (!r) return ddp__fail(DDP_ENOMEM, "nccl: out of memory");
    r->c = g;
    r->coll = *coll;
    g->seq++;
    ddp_coll k = coll->device == DDP_CPU ? *coll : without_data(coll);
    if (!k.number) k.number = g->seq;
    st = g->host_engine->post(g->host, &k, &r->host);
    if (st == 0 && coll->device != DDP_CPU && (st = fly(g, r)) < 0) {
        ddp_saved_error e;
        ddp__error_save(&e);
        fail(g, st, e.text ? e.text : "NCCL");
        g->host_engine->abort(g->host, g->why);
        g->host_engine->wait(r->host);
        g->host_engine->req_free(r->host);
        ddp_error_take(NULL);
        ddp__error_restore(&e);
    }
    if (st < 0) {
        free(r);
        return st;
    }
    *out = (ddp_req *)(void *)r;
    return 0;
}

/* The host's part of a failure is the reason; NCCL's waits are ended by it. */
static int host_failed(gpu_comm *g, int st) {
    ddp_saved_error e;
    ddp__error_save(&e);
    fail(g, st, e.text ? e.text : "a collective failed");
    ddp__error_restore(&e);
    return st;
}

static int gpu_test(ddp_req *req) {
    gpu_req *r = (gpu_req *)(void *)req;
    int st = r->c->host_engine->test(r->host);
    if (st < 0) return r->f ? host_failed(r->c, st) : st;
    return st == 1 && r->f ? r->c->coll->done(r->f->ticket) : st;
}

static double gpu_weight_sum(const ddp_req *req) {
    const gpu_req *r = (const gpu_req *)(const void *)req;
    return r->c->host_engine->weight_sum ? r->c->host_engine->weight_sum(r->host) : r->c->boot.size;
}

static int gpu_wait(ddp_req *req) {
    gpu_req *r = (gpu_req *)(void *)req;
    gpu_comm *g = r->c;
    int st = g->host_engine->wait(r->host);
    if (!r->f) return st;
    if (st < 0) {
        int why = failed(g); /* the watchdog's reason came first */
        return why < 0 ? why : host_failed(g, st);
    }
    pthread_mutex_lock(&g->lock);
    r->f->since = ddp__now();
    pthread_mutex_unlock(&g->lock);
    double sum = gpu_weight_sum(req), factor = 1;
    bool adds = r->coll.sig.kind == DDP_COLL_ALL_REDUCE || r->coll.sig.kind == DDP_COLL_REDUCE_SCATTER;
    if (adds && r->coll.reduce == DDP_MEAN && sum != g->boot.size) factor = sum > 0 ? g->boot.size / sum : 0;
    return g->coll->after(g->comm, &r->coll, r->f->ticket, factor);
}

static void gpu_req_free(ddp_req *req) {
    gpu_req *r = (gpu_req *)(void *)req;
    r->c->host_engine->req_free(r->host);
    if (r->f) {
        pthread_mutex_lock(&r->c->lock);
        drop_flying(r->c, r->f);
        pthread_mutex_unlock(&r->c->lock);
    }
    free(r);
}

static int gpu_health(ddp_comm *comm) {
    gpu_comm *g = of(comm);
    int st = failed(g);
    return st < 0 ? st : g->host_engine->health(g->host);
}

static void gpu_abort(ddp_comm *comm, const char *why) {
    gpu_comm *g = of(comm);
    fail(g, DDP_EPEER, why);
    g->host_engine->abort(g->host, why);
}

static int gpu_alloc(ddp_comm *comm, size_t bytes, void **out) {
    gpu_comm *g = of(comm);
    return g->host_engine->alloc(g->host, bytes, out);
}
static void gpu_dealloc(ddp_comm *comm, void *p) {
    gpu_comm *g = of(comm);
    g->host_engine->dealloc(g->host, p);
}

static int gpu_alloc_on(ddp_comm *comm, int device, size_t bytes, void **out) {
    gpu_comm *g = of(comm);
    int st = join(g, device);
    return st < 0 ? st : g->coll->alloc(g->comm, g->gpu, bytes, out);
}
static void gpu_dealloc_on(ddp_comm *comm, int device, void *p, size_t bytes) {
    gpu_comm *g = of(comm);
    g->coll->dealloc(g->comm, device - 1, p, bytes);
}

static const ddp_engine *under; /* the host engine of this process's ranks: one a process */
static int gpu_init(ddp_comm **out, const ddp_boot *b) { return gpu_init_over(out, b, under); }

const ddp_engine *ddp__engine_gpu(const ddp_engine *host) {
    static ddp_engine engine;
    under = host;
    engine = (ddp_engine){.size = sizeof engine,
                          .name = "nccl",
                          .caps = host->caps | DDP_CAP_DEVICE,
                          .init = gpu_init,
                          .alloc = gpu_alloc,
                          .dealloc = gpu_dealloc,
                          .post = gpu_post,
                          .test = gpu_test,
                          .wait = gpu_wait,
                          .weight_sum = gpu_weight_sum,
                          .req_free = gpu_req_free,
                          .health = gpu_health,
                          .abort = gpu_abort,
                          .destroy = gpu_destroy,
                          .alloc_on = gpu_alloc_on,
                          .dealloc_on = gpu_dealloc_on};
    return &engine;
}
