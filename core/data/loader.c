/* loader.c -- passes over a data set by worker threads. Batches are claimed in order by whichever worker is free, put
 * into a ring, and given out in order, so what comes out does not depend on how many work. Workers live as long as the
 * loader and wait when they are a ring ahead. A pass that is left leaves its batches in the ring until the next one
 * begins.
 *
 * For a GPU batches are built in pinned memory. With workers, the one after that which is given out is on its way to the GPU already,
 * on a stream beside the computing one. */
#include <omp.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../mem/device.h"
#include "data.h"

enum { MAX_WORKERS = 256 };

/* A finished batch, or the error that stands in its place. */
typedef struct loader_slot {
    bool ready, sent; /* sent: to the loader's GPU */
    int status;
    char *text; /* owned */
    ddp_tensor *x, *y;
} loader_slot;

struct ddp_loader {
    ddp_plan plan;
    ddp_loader_opts o;
    pthread_mutex_t lock;
    pthread_cond_t work, done; /* for workers: there may be a batch to claim; for the caller: one is ready */
    bool stop;
    int n_threads;
    pthread_t *threads;
    loader_slot *ring, ahead; /* ahead: the batch `next`, when it was taken from the ring before its time */
    int64_t cap;              /* of the ring */
    uint64_t pass;            /* grows with each, so that a worker knows a stale batch */
    bool open, resume;
    int64_t epoch, next, taken, claim, n_batches; /* batches given out, taken from the ring, claimed by workers */
    int64_t *order;
    int64_t n_order;
    ddp_batcher self; /* of the calling thread, without workers */
    atomic_int_fast64_t skipped;
};

/* ---- making --------------------------------------------------------------------------------------------------- */

static int check_opts(const ddp_loader_opts *o) {
    if (o->batch_size < 1)
        return ddp__fail(DDP_EINVAL, "loader: batch_size is %lld, expected 1 or more", (long long)o->batch_size);
    if (o->batch_size > INT32_MAX)
        return ddp__fail(DDP_EINVAL, "loader: batch_size is %lld, expected less than 2^31", (long long)o->batch_size);
    if (o->workers < 0 || o->workers > MAX_WORKERS)
        return ddp__fail(DDP_EINVAL, "loader: workers is %d, expected 0 to %d", o->workers, MAX_WORKERS);
    if (o->prefetch < 1) return ddp__fail(DDP_EINVAL, "loader: prefetch is %d, expected 1 or more", o->prefetch);
    if (o->world < 0 || (o->world > 0 && (o->rank < 0 || o->rank >= o->world)))
        return ddp__fail(DDP_EINVAL, "loader: rank %d of a world of %d", o->rank, o->world);
    if (o->x_dtype < 0 || o->x_dtype > DDP_DTYPES || o->y_dtype < 0 || o->y_dtype > DDP_DTYPES)
        return ddp__fail(DDP_EDTYPE, "loader: no dtype %d or %d", o->x_dtype - 1, o->y_dtype - 1);
    return o->device == DDP_CPU || ddp__device(o->device, "loader") ? 0 : ddp__pending();
}

static int make_plan(ddp_plan *p, const ddp_loader_opts *o, ddp_dataset *set) {
    const ddp_dataset *root = set->base ? set->base : set;
    p->set = ddp_dataset_retain(set);
    p->host = root->kind == DDP_SET_HOST || p->fn.open;
    p->batch_size = o->batch_size;
    p->seed = o->seed >= 0 ? (uint64_t)o->seed : ddp__rng_next(false).key;
    p->index_from = o->index_from;
    p->x_dtype = o->x_dtype - 1;
    p->y_dtype = o->y_dtype - 1;
    p->skip = o->skip_errors != 0;
    p->device = o->device;
    if (root->kind == DDP_SET_IMAGES)
        return ddp__augment_init(&p->aug, o, root->channels, root->height, root->width, root->scale);
    if (ddp__augment_init(&p->aug, o, 0, 0, 0, 0) < 0 || !p->aug.any || root->kind != DDP_SET_TENSORS)
        return ddp__pending();
    const ddp_meta *m = &root->x->m;
    if (m->ndim != 4 || m->dtype != DDP_F32)
        return ddp__fail(DDP_ESHAPE, "transform: x is %s %s; crop, flip and normalize take f32 images [N,C,H,W]",
                         ddp_dtype_name(m->dtype), DDP_SHAPE_TEXT(m));
    return ddp__augment_check(&p->aug, (int)m->size[1], (int)m->size[2], (int)m->size[3]);
}

int ddp_loader_new(ddp_dataset *set, const ddp_loader_opts *opts, ddp_loader **out) {
    ddp_loader_opts o = {.order_seed = -1, .seed = -1};
    *out = NULL;
    if (opts) memcpy(&o, opts, opts->size < sizeof o ? opts->size : sizeof o);
    ddp_data_hooks fn = o.transform ? *o.transform : (ddp_data_hooks){0};
    if (o.batch_size == 0) o.batch_size = 1;
    if (o.prefetch == 0) o.prefetch = 2;
    ddp_loader *l = NULL;
    if (!ddp__pending() && !set) ddp__fail(DDP_ENULL, "loader: no data set");
    if (!ddp__pending() && o.transform && (!fn.open || !fn.sample))
        ddp__fail(DDP_ENULL, "loader: the transform needs open and sample");
    if (!ddp__pending() && check_opts(&o) == 0 && !(l = calloc(1, sizeof *l)))
        ddp__fail(DDP_ENOMEM, "loader: out of memory");
    if (!l) {
        if (fn.free) fn.free(fn.ctx);
        return ddp__pending();
    }
    pthread_mutex_init(&l->lock, NULL);
    pthread_cond_init(&l->work, NULL);
    pthread_cond_init(&l->done, NULL);
    l->plan.fn = fn;
    l->o = o;
    l->o.transform = NULL;
    l->o.mean = l->o.std = NULL;
    if (make_plan(&l->plan, &o, set) == 0 && ddp__batcher_init(&l->self, &l->plan, 0) == 0) {
        l->cap = (int64_t)o.workers * o.prefetch;
        l->ring = calloc((size_t)l->cap + 1, sizeof *l->ring);
        l->threads = calloc((size_t)o.workers + 1, sizeof *l->threads);
        if (!l->ring || !l->threads) ddp__fail(DDP_ENOMEM, "loader: out of memory");
    }
    if (!ddp__pending()) {
        *out = l;
        return 0;
    }
    ddp_loader_free(l);
    return ddp__pending();
}

static void empty_slot(loader_slot *s) {
    ddp_release(s->x);
    ddp_release(s->y);
    free(s->text);
    *s = (loader_slot){0};
}

void ddp_loader_free(ddp_loader *l) {
    if (!l || ddp__forked()) return; /* in a fork its workers are not there to be joined */
    pthread_mutex_lock(&l->lock);
    l->stop = true;
    pthread_cond_broadcast(&l->work);
    pthread_mutex_unlock(&l->lock);
    for (int i = 0; i < l->n_threads; i++) pthread_join(l->threads[i], NULL);
    for (int64_t i = 0; l->ring && i < l->cap; i++) empty_slot(&l->ring[i]);
    empty_slot(&l->ahead);
    if (l->self.plan) ddp__batcher_close(&l->self);
    if (l->plan.fn.free) l->plan.fn.free(l->plan.fn.ctx);
    ddp__augment_free(&l->plan.aug);
    ddp_dataset_free(l->plan.set);
    pthread_cond_destroy(&l->work);
    pthread_cond_destroy(&l->done);
    pthread_mutex_destroy(&l->lock);
    free(l->order);
    free(l->ring);
    free(l->threads);
    free(l);
}

/* ---- workers -------------------------------------------------------------------------------------------------- */

typedef struct worker_start {
    ddp_loader *l;
    int worker;
} worker_start;

/* The samples of batch k; how many. */
static int64_t batch_ids(const ddp_loader *l, int64_t k, int64_t *ids) {
    int64_t first = k * l->plan.batch_size, n = l->n_order - first;
    const ddp_dataset *set = l->plan.set;
    if (n > l->plan.batch_size) n = l->plan.batch_size;
    for (int64_t i = 0; i < n; i++) {
        int64_t at = l->order[first + i];
        ids[i] = set->base ? set->ids[at] : at;
    }
    return n;
}

static void build_slot(ddp_loader *l, ddp_batcher *b, const int64_t *ids, int64_t n, int64_t epoch, loader_slot *s) {
    const char *text;
    int64_t skipped = 0;
    *s = (loader_slot){.ready = true};
    if (!ids) ddp__fail(DDP_ENOMEM, "loader: out of memory in worker %d", b->worker);
    else ddp__batch_build(b, ids, n, epoch, &s->x, &s->y, &skipped);
    atomic_fetch_add(&l->skipped, skipped);
    s->status = ddp_error_take(&text);
    if (s->status) s->text = strdup(text);
}

static bool may_claim(const ddp_loader *l) {
    return l->open && l->claim < l->n_batches && l->claim < l->taken + l->cap;
}

static void *worker_main(void *arg) {
    worker_start w = *(worker_start *)arg;
    ddp_loader *l = w.l;
    char name[16];
    free(arg);
    snprintf(name, sizeof name, "ddp-data-%d", w.worker);
    pthread_setname_np(pthread_self(), name);
    omp_set_num_threads(1); /* ops of host functions stay on this thread */
    ddp_batcher b;
    int64_t *ids = malloc((size_t)l->plan.batch_size * sizeof *ids);
    if (ddp__batcher_init(&b, &l->plan, w.worker) < 0) {
        free(ids);
        ids = NULL; /* each batch then says so */
        ddp_error_take(NULL);
    }
    pthread_mutex_lock(&l->lock);
    while (!l->stop) {
        if (!may_claim(l)) {
            pthread_cond_wait(&l->work, &l->lock);
            continue;
        }
        int64_t k = l->claim++, epoch = l->epoch, n = ids ? batch_ids(l, k, ids) : 0;
        uint64_t pass = l->pass;
        loader_slot made;
        pthread_mutex_unlock(&l->lock);
        build_slot(l, &b, ids, n, epoch, &made);
        pthread_mutex_lock(&l->lock);
        if (pass == l->pass) {
            l->ring[k % l->cap] = made;
            pthread_cond_signal(&l->done);
        } else {
            pthread_mutex_unlock(&l->lock);
            empty_slot(&made);
            pthread_mutex_lock(&l->lock);
        }
    }
    pthread_mutex_unlock(&l->lock);
    ddp__batcher_close(&b);
    free(ids);
    return NULL;
}

/* Workers take no signals: those are the main thread's. */
static int start_workers(ddp_loader *l) {
    sigset_t all, before;
    int err = 0;
    if (l->o.workers > 0) ddp__forbid_fork();
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    while (l->n_threads < l->o.workers && !err) {
        worker_start *w = malloc(sizeof *w);
        if (!w) {
            err = ddp__fail(DDP_ENOMEM, "loader: out of memory for workers");
            break;
        }
        *w = (worker_start){l, l->n_threads + 1};
        int failed = pthread_create(&l->threads[l->n_threads], NULL, worker_main, w);
        if (!failed) {
            l->n_threads++;
            continue;
        }
        free(w);
        err = ddp__fail(DDP_ENOMEM, "loader: worker %d of %d does not start: %s", l->n_threads + 1, l->o.workers,
                        strerror(failed));
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return err;
}

/* ---- passes --------------------------------------------------------------------------------------------------- */

static void share_of(const ddp_loader *l, int *rank, int *world) {
    *rank = 0;
    *world = 1;
    if (!l->o.distributed) return;
    *rank = l->o.world > 0 ? l->o.rank : ddp_rank();
    *world = l->o.world > 0 ? l->o.world : ddp_world_size();
}

static int64_t batches_of(const ddp_loader *l, int64_t samples) {
    int64_t b = l->plan.batch_size;
    return l->o.drop_last ? samples / b : (samples + b - 1) / b;
}

int64_t ddp_loader_len(const ddp_loader *l) {
    if (!l) return 0;
    int rank, world;
    share_of(l, &rank, &world);
    return batches_of(l, ddp_sampler_len(l->plan.set->n, l->o.shuffle, l->o.pad_drop, rank, world));
}

/* Ends what is under way; workers that are in the middle of a batch will drop it. Lock held. */
static void cancel(ddp_loader *l) {
    l->pass++;
    l->open = false;
    for (int64_t i = 0; i < l->cap; i++) empty_slot(&l->ring[i]);
    empty_slot(&l->ahead);
}

static int make_order(ddp_loader *l) {
    int rank, world;
    share_of(l, &rank, &world);
    int64_t n = ddp_sampler_len(l->plan.set->n, l->o.shuffle, l->o.pad_drop, rank, world);
    int64_t *order = realloc(l->order, (size_t)(n > 0 ? n : 1) * sizeof *order);
    if (!order) return ddp__fail(DDP_ENOMEM, "loader: out of memory for the order of %lld samples", (long long)n);
    l->order = order;
    l->n_order = n;
    l->n_batches = batches_of(l, n);
    uint64_t seed = l->o.order_seed >= 0 ? (uint64_t)l->o.order_seed : l->plan.seed;
    return ddp_sampler_order(l->plan.set->n, seed, l->epoch, l->o.shuffle, l->o.pad_drop, rank, world, order);
}

int ddp_loader_start(ddp_loader *l) {
    if (ddp__pending()) return ddp__pending();
    if (!l) return ddp__fail(DDP_ENULL, "loader: none");
    pthread_mutex_lock(&l->lock);
    cancel(l);
    if (l->next > 0 && !l->resume) { /* left in the middle */
        l->epoch++;
        l->next = 0;
    }
    l->resume = false;
    int status = make_order(l);
    if (status == 0) {
        l->claim = l->taken = l->next;
        l->open = true;
        pthread_cond_broadcast(&l->work);
    }
    pthread_mutex_unlock(&l->lock);
    if (status == 0 && (status = start_workers(l)) < 0) l->open = false;
    return status;
}

/* The next batch of the ring into *s; false: it is not ready, and the caller does not wait. */
static bool take_from_ring(ddp_loader *l, bool wait, loader_slot *s) {
    pthread_mutex_lock(&l->lock);
    loader_slot *at = &l->ring[l->taken % l->cap];
    while (wait && !at->ready) pthread_cond_wait(&l->done, &l->lock);
    bool ready = at->ready;
    if (ready) {
        *s = *at;
        *at = (loader_slot){0};
        l->taken++;
        pthread_cond_signal(&l->work);
    }
    pthread_mutex_unlock(&l->lock);
    return ready;
}

/* The batch at hand into *s, waiting for it. */
static void take_batch(ddp_loader *l, loader_slot *s) {
    if (l->o.workers == 0) {
        int64_t *ids = malloc((size_t)l->plan.batch_size * sizeof *ids);
        build_slot(l, &l->self, ids, ids ? batch_ids(l, l->next, ids) : 0, l->epoch, s);
        free(ids);
    } else if (l->ahead.ready) {
        *s = l->ahead;
        l->ahead = (loader_slot){0};
    } else {
        take_from_ring(l, true, s);
    }
    l->next++;
}

/* ---- on to a GPU ---------------------------------------------------------------------------------------------- */

/* Copies begin; a status. */
static int send(const ddp_loader *l, loader_slot *s) {
    if (l->plan.device == DDP_CPU || s->sent || s->status < 0) return 0;
    if (ddp__batch_send(&s->x, l->plan.device) < 0) return ddp__pending();
    s->sent = ddp__batch_send(&s->y, l->plan.device) == 0;
    return ddp__pending();
}

/* The batch of s may be used. A status. */
static int arrive(ddp_loader *l, loader_slot *s) {
    int device = l->plan.device;
    if (device == DDP_CPU || s->status < 0 || !s->x) return 0;
    if (send(l, s) == 0) ddp__device_of(device)->copies_join(device - 1);
    if (!ddp__pending()) return 0;
    empty_slot(s);
    return ddp__pending();
}

/* The batch after this one is sent, when it is ready. What fails is tried again in its turn, and told then. */
static void send_ahead(ddp_loader *l) {
    if (l->plan.device == DDP_CPU || l->o.workers == 0 || l->ahead.ready || l->taken >= l->n_batches) return;
    if (!take_from_ring(l, false, &l->ahead)) return;
    if (send(l, &l->ahead) < 0) ddp_error_take(NULL);
}

static void end_pass(ddp_loader *l) {
    pthread_mutex_lock(&l->lock);
    cancel(l);
    l->epoch++;
    l->next = 0;
    pthread_mutex_unlock(&l->lock);
}

static int next_batch(ddp_loader *l, ddp_tensor **x, ddp_tensor **y) {
    if (!l->open && ddp_loader_start(l) < 0) return ddp__pending();
    for (;;) {
        if (l->next >= l->n_batches) {
            end_pass(l);
            return 0;
        }
        loader_slot s;
        take_batch(l, &s);
        if (s.status < 0) ddp__fail(s.status, "%s", s.text ? s.text : "loader: out of memory");
        free(s.text);
        s.text = NULL;
        if (s.status < 0 || arrive(l, &s) < 0) return ddp__pending();
        *x = s.x;
        *y = s.y;
        if (!s.x) continue; /* all its samples were skipped */
        send_ahead(l);
        return 1;
    }
}

int ddp_loader_next(ddp_loader *l, ddp_tensor **x, ddp_tensor **y) {
    *x = *y = NULL;
    if (ddp__pending()) return ddp__pending();
    if (!l) return ddp__fail(DDP_ENULL, "loader: none");
    ddp_phase before = ddp__phase_enter(DDP_PHASE_DATA);
    int r = next_batch(l, x, y);
    ddp__phase_enter(before);
    return r;
}

/* ---- position ------------------------------------------------------------------------------------------------- */

int64_t ddp_loader_epoch(const ddp_loader *l) { return l ? l->epoch : 0; }
int64_t ddp_loader_batch(const ddp_loader *l) { return l ? l->next : 0; }
int64_t ddp_loader_skipped(const ddp_loader *l) {
    return l ? (int64_t)atomic_load(&((ddp_loader *)(uintptr_t)l)->skipped) : 0;
}

int ddp_loader_load_state(ddp_loader *l, int64_t epoch, int64_t batch) {
    if (ddp__pending()) return ddp__pending();
    if (!l) return ddp__fail(DDP_ENULL, "loader: none");
    if (epoch < 0 || batch < 0)
        return ddp__fail(DDP_EINVAL, "loader: epoch %lld, batch %lld, expected 0 or more", (long long)epoch,
                         (long long)batch);
    pthread_mutex_lock(&l->lock);
    cancel(l);
    l->epoch = epoch;
    l->next = batch;
    l->resume = true;
    pthread_mutex_unlock(&l->lock);
    return 0;
}

int ddp_loader_set_epoch(ddp_loader *l, int64_t epoch) { return ddp_loader_load_state(l, epoch, 0); }
