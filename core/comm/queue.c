/* queue.c -- requests in a queue, one thread that runs them, and how it all ends. */
#include "queue.h"

#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "../tensor/tensor.h"

#define SLICE_S .05 /* a wait looks around this often */
#define ASK_S .25   /* and asks the store how others fare, this often */
#define LEAVE_S .3  /* a rank that leaves waits for the others this long */
#define STOP_S 2.   /* and then for the library */

struct ddp_req {
    ddp_comm *comm;
    ddp_req *next;
    ddp_coll coll;
    const volatile int *late; /* the caller's */
    uint32_t seq;             /* counted from 1 */
    bool done, orphan;        /* orphan: its owner has freed it, the thread still runs it */
};

struct ddp_comm {
    const char *name;
    const ddp_queue_ops *ops;
    const void *with;
    void *self; /* NULL before join and after leave */
    ddp_boot boot;
    char prefix[64];
    ddp_store *link; /* a connection of our own: the thread's while it joins, then under link_lock */
    pthread_mutex_t lock, link_lock;
    pthread_cond_t work, done;
    pthread_t thread;
    ddp_req *head, *tail; /* in order; finished ones are off the list */
    ddp_req *running;
    int n_reqs; /* given out and not freed */
    uint32_t next_seq;
    bool joined, closing, graceful, gone, closed;
    volatile int late; /* a wait has lasted too long: run must see to it */
    int status;        /* what killed it */
    char text[1024];
    double delay; /* seconds, put in by DDP_FAULT=delay:MS */
};

static bool sleep_on(ddp_comm *c, pthread_cond_t *cond, double until) { /* false: it is over */
    struct timespec t = {(time_t)until, (long)((until - (double)(time_t)until) * 1e9)};
    pthread_cond_timedwait(cond, &c->lock, &t);
    return ddp__now() < until;
}

static void nap(double s) {
    struct timespec t = {(time_t)s, (long)((s - (double)(time_t)s) * 1e9)};
    nanosleep(&t, NULL);
}

static int me(const ddp_comm *c) { return ddp__called(&c->boot, c->boot.rank); }

/* ---- the end ---------------------------------------------------------------------------------------------------------- */

/* What the store has under prefix/key, into text; false: nothing. */
static bool look_up(ddp_comm *c, const char *key, char *text, size_t n) {
    char path[128];
    void *value = NULL;
    size_t len = 0;
    snprintf(path, sizeof path, "%s/%s", c->prefix, key);
    pthread_mutex_lock(&c->link_lock);
    ddp_saved_error e;
    ddp__error_save(&e);
    bool found = c->link && ddp__store_try(c->link, path, ddp__now() + .2, &value, &len) == 1;
    ddp_error_take(NULL);
    ddp__error_restore(&e);
    pthread_mutex_unlock(&c->link_lock);
    if (found) snprintf(text, n, "%.*s", (int)len, (const char *)value);
    free(value);
    return found;
}

static void tell(ddp_comm *c, const char *key, const char *value) {
    char path[128];
    snprintf(path, sizeof path, "%s/%s", c->prefix, key);
    pthread_mutex_lock(&c->link_lock);
    ddp_saved_error e;
    ddp__error_save(&e);
    if (c->link) ddp__store_tell(c->link, path, value, strlen(value) + 1);
    ddp_error_take(NULL);
    ddp__error_restore(&e);
    pthread_mutex_unlock(&c->link_lock);
}

/* Records what killed c; news for the others unless somebody had them already. `why`: what they are told. */
static int die(ddp_comm *c, int status, const char *why, const char *fmt, ...) DDP_PRINTF(4, 5);
static int die(ddp_comm *c, int status, const char *why, const char *fmt, ...) {
    char news[700], old[8];
    pthread_mutex_lock(&c->lock);
    bool first = c->status == 0;
    if (first) {
        va_list ap;
        va_start(ap, fmt);
        vsnprintf(c->text, sizeof c->text, fmt, ap);
        va_end(ap);
        c->status = status;
        if (c->self) c->ops->stop(c->self, c->text);
        pthread_cond_broadcast(&c->work);
        pthread_cond_broadcast(&c->done);
    }
    pthread_mutex_unlock(&c->lock);
    if (first && why && !look_up(c, "failed", old, sizeof old)) {
        if (strncmp(why, "peer: ", 6) == 0) why += 6;
        snprintf(news, sizeof news, "%d: %.600s", me(c), why);
        tell(c, "failed", news);
    }
    return ddp__fail(c->status, "%s", c->text);
}

static int queue_health(ddp_comm *c) {
    pthread_mutex_lock(&c->lock);
    int st = c->status;
    pthread_mutex_unlock(&c->lock);
    return st ? ddp__fail(st, "%s", c->text) : 0;
}

static void queue_abort(ddp_comm *c, const char *why) {
    if (!why) why = "aborted";
    ddp_saved_error e;
    ddp__error_save(&e);
    die(c, DDP_EPEER, why, "peer: rank %d: %.600s", me(c), why);
    ddp_error_take(NULL);
    ddp__error_restore(&e);
}

/* Has another rank said that it failed? Then so have we. */
static int ask_store(ddp_comm *c) {
    char text[700];
    if (!look_up(c, "failed", text, sizeof text)) return 0;
    return die(c, DDP_EPEER, NULL, "peer: rank %s", text);
}

/* A peer is lost in r: the store knows why, a moment later at the latest. `text`: what the library knows. */
static void explain_loss(ddp_comm *c, const ddp_req *r, const char *text) {
    char what[300], key[32], left[8];
    ddp__signature_call(&r->coll.sig, ddp__number(&r->coll, r->seq), what, sizeof what);
    for (double until = ddp__now() + LEAVE_S; ddp__now() < until; nap(.02)) {
        if (ask_store(c) < 0) return;
        for (int p = 0; p < c->boot.size; p++) {
            snprintf(key, sizeof key, "left/%d", p);
            if (p == c->boot.rank || !look_up(c, key, left, sizeof left)) continue;
            die(c, DDP_EPEER, NULL, "peer: rank %d left while rank %d waits in %s", ddp__called(&c->boot, p), me(c),
                what);
            return;
        }
    }
    char lost[700];
    snprintf(lost, sizeof lost, "%.300s in %.300s", text, what);
    die(c, DDP_EPEER, lost, "peer: %.300s while rank %d waits in %s", text, me(c), what);
}

/* ---- the thread ------------------------------------------------------------------------------------------------------- */

/* The next request to run; NULL: none will come any more. */
static ddp_req *next_request(ddp_comm *c) {
    pthread_mutex_lock(&c->lock);
    while (!c->head && !c->closing && !c->status) pthread_cond_wait(&c->work, &c->lock);
    ddp_req *r = c->closing || c->status ? NULL : c->head;
    c->running = r;
    pthread_mutex_unlock(&c->lock);
    return r;
}

static void unlink_request(ddp_comm *c, const ddp_req *r) {
    ddp_req *before = NULL;
    for (ddp_req *q = c->head; q; before = q, q = q->next) {
        if (q != r) continue;
        if (before) before->next = r->next;
        else c->head = r->next;
        if (c->tail == r) c->tail = before;
        return;
    }
}

static void finish_request(ddp_comm *c, ddp_req *r, bool done) {
    pthread_mutex_lock(&c->lock);
    c->running = NULL;
    r->done = done;
    if (done || r->orphan) unlink_request(c, r);
    if (r->orphan) free(r);
    pthread_cond_broadcast(&c->done);
    pthread_mutex_unlock(&c->lock);
}

static void run_request(ddp_comm *c, ddp_req *r) {
    const char *text;
    int st = c->ops->run(c->self, &r->coll, ddp__number(&r->coll, r->seq));
    if (st < 0) {
        char copy[800];
        ddp_error_take(&text);
        snprintf(copy, sizeof copy, "%s", text);
        bool lost = st == DDP_EPEER && strncmp(copy, "peer: ", 6) != 0;
        if (lost && queue_health(c) == 0) explain_loss(c, r, copy); /* else it was we who ended it */
        else die(c, st, copy, "%s", copy);
        ddp_error_take(NULL);
    } else if (c->delay > 0 && r->coll.sig.kind != DDP_COLL_BARRIER) nap(c->delay);
    finish_request(c, r, st == 0);
}

static void *work(void *arg) {
    ddp_comm *c = arg;
    void *self = NULL;
    const char *text;
    sigset_t all;
    sigfillset(&all); /* a library's SIGPIPE must end nobody; its threads inherit this */
    pthread_sigmask(SIG_BLOCK, &all, NULL);
    int st = c->ops->join(&self, &c->boot, c->with);
    ddp_error_take(&text);
    pthread_mutex_lock(&c->lock);
    c->self = self;
    c->joined = true;
    if (st < 0) {
        c->status = st;
        snprintf(c->text, sizeof c->text, "%s", text);
    }
    pthread_cond_broadcast(&c->done);
    pthread_mutex_unlock(&c->lock);
    for (ddp_req *r; (r = next_request(c));) run_request(c, r);
    pthread_mutex_lock(&c->lock);
    int graceful = c->graceful && c->status == 0;
    pthread_mutex_unlock(&c->lock);
    if (self) c->ops->leave(self, graceful);
    ddp_error_take(NULL);
    pthread_mutex_lock(&c->lock);
    c->self = NULL;
    c->gone = true;
    pthread_cond_broadcast(&c->done);
    pthread_mutex_unlock(&c->lock);
    free(self);
    return NULL;
}

/* ---- joining and leaving ---------------------------------------------------------------------------------------------- */

static void free_comm(ddp_comm *c) {
    pthread_cond_destroy(&c->work);
    pthread_cond_destroy(&c->done);
    pthread_mutex_destroy(&c->lock);
    pthread_mutex_destroy(&c->link_lock);
    free(c);
}

static void init_locks(ddp_comm *c) {
    pthread_condattr_t mono;
    pthread_condattr_init(&mono);
    pthread_condattr_setclock(&mono, CLOCK_MONOTONIC);
    pthread_mutex_init(&c->lock, NULL);
    pthread_mutex_init(&c->link_lock, NULL);
    pthread_cond_init(&c->work, &mono);
    pthread_cond_init(&c->done, &mono);
    pthread_condattr_destroy(&mono);
}

static void queue_destroy(ddp_comm *c, int graceful);

int ddp__queue_init(ddp_comm **out, const ddp_boot *b, const char *name, const ddp_queue_ops *ops, const void *with) {
    int st = ddp__roll_call(b);
    if (st < 0) return st;
    ddp_comm *c = calloc(1, sizeof *c);
    if (!c) return ddp__fail(DDP_ENOMEM, "%s: out of memory", name);
    init_locks(c);
    const char *fault = getenv("DDP_FAULT");
    if (fault && strncmp(fault, "delay:", 6) == 0 && ops->missing) /* else the engines below delay */
        c->delay = atof(fault + 6) * 1e-3;
    c->name = name;
    c->ops = ops;
    c->with = with;
    c->boot = *b;
    snprintf(c->prefix, sizeof c->prefix, "%s", b->prefix);
    c->boot.prefix = c->prefix;
    c->boot.store = c->link = ddp__store_again(b->store);
    if (!c->link || pthread_create(&c->thread, NULL, work, c) != 0) {
        ddp__store_free(c->link);
        free_comm(c);
        return ddp__fail(DDP_ENOMEM, "%s: no thread", name);
    }
    double until = ddp__now() + b->timeout + SLICE_S; /* the library's own timeout comes first, if it has one */
    pthread_mutex_lock(&c->lock);
    while (!c->joined && sleep_on(c, &c->done, until)) {
    }
    bool joined = c->joined;
    pthread_mutex_unlock(&c->lock);
    if (!joined) /* it is left alone, with all it may still use */
        return ddp__fail(DDP_ETIMEOUT, "init: %s has not connected the %d ranks within %.1f s", name, b->size,
                         b->timeout);
    if ((st = queue_health(c)) < 0) {
        queue_destroy(c, 0);
        return st;
    }
    *out = c;
    return 0;
}

/* Until the thread is gone or `seconds` are over. */
static void wait_gone(ddp_comm *c, double seconds) {
    double until = ddp__now() + seconds;
    while (!c->gone && sleep_on(c, &c->done, until)) {
    }
}

static void queue_destroy(ddp_comm *c, int graceful) {
    if (!c) return;
    char key[32];
    snprintf(key, sizeof key, "left/%d", c->boot.rank);
    if (graceful) tell(c, key, "left");
    pthread_mutex_lock(&c->lock);
    c->closing = true;
    c->graceful = graceful;
    pthread_cond_broadcast(&c->work);
    if (c->head && c->self) c->ops->stop(c->self, "left"); /* what was posted and not waited for ends here */
    wait_gone(c, LEAVE_S);
    if (!c->gone && c->self) c->ops->stop(c->self, "left");
    wait_gone(c, STOP_S);
    bool gone = c->gone;
    c->closed = true;
    if (!c->status) {
        c->status = DDP_ESTATE;
        snprintf(c->text, sizeof c->text, "the communicator is closed");
    }
    bool last = gone && c->n_reqs == 0;
    pthread_mutex_unlock(&c->lock);
    if (!gone) { /* stuck in the library: it is left alone, and ends with the process */
        pthread_detach(c->thread);
        return;
    }
    pthread_join(c->thread, NULL);
    pthread_mutex_lock(&c->link_lock);
    ddp__store_free(c->link);
    c->link = NULL;
    pthread_mutex_unlock(&c->link_lock);
    if (last) free_comm(c); /* else the last request does */
}

/* ---- bucket memory ---- */

static int queue_alloc(ddp_comm *c, size_t bytes, void **out) {
    int st = queue_health(c);
    if (st < 0) return st;
    if (c->ops->alloc) {
        pthread_mutex_lock(&c->lock); /* what it changes is the thread's otherwise */
        while ((c->head || c->running) && !c->status) sleep_on(c, &c->done, ddp__now() + SLICE_S);
        st = c->status ? c->status : c->ops->alloc(c->self, bytes, out);
        pthread_mutex_unlock(&c->lock);
        return st < 0 && !ddp__pending() ? queue_health(c) : st;
    }
    size_t room = (bytes + 4095) & ~(size_t)4095;
    void *p = aligned_alloc(4096, room ? room : 4096);
    if (!p) return ddp__fail(DDP_ENOMEM, "%s: no memory for a bucket of %zu bytes", c->name, bytes);
    memset(p, 0, room ? room : 4096);
    *out = p;
    return 0;
}

static void queue_dealloc(ddp_comm *c, void *p) {
    if (!c->ops->dealloc) {
        free(p);
        return;
    }
    pthread_mutex_lock(&c->lock);
    while ((c->head || c->running) && !c->status) sleep_on(c, &c->done, ddp__now() + SLICE_S);
    if (c->self) c->ops->dealloc(c->self, p);
    pthread_mutex_unlock(&c->lock);
}

/* ---- requests ---- */

static int queue_post(ddp_comm *c, const ddp_coll *coll, ddp_req **out) {
    int st = queue_health(c);
    if (st == 0) st = ddp__coll_check(coll);
    if (st < 0) return st;
    ddp_req *r = calloc(1, sizeof *r);
    if (!r) return ddp__fail(DDP_ENOMEM, "%s: out of memory", c->name);
    r->comm = c;
    r->coll = *coll;
    r->late = coll->late;
    r->coll.late = &c->late;
    pthread_mutex_lock(&c->lock);
    r->seq = ++c->next_seq;
    c->n_reqs++;
    if (c->tail) c->tail->next = r;
    else c->head = r;
    c->tail = r;
    pthread_cond_signal(&c->work);
    pthread_mutex_unlock(&c->lock);
    *out = r;
    return 0;
}

static int queue_test(ddp_req *r) {
    ddp_comm *c = r->comm;
    pthread_mutex_lock(&c->lock);
    int st = r->done ? 1 : c->status;
    pthread_mutex_unlock(&c->lock);
    return st < 0 ? ddp__fail(st, "%s", c->text) : st;
}

/* The wait for r has lasted too long: who has not come? 0: it is done after all. */
static int timed_out(ddp_comm *c, ddp_req *r, double waited) {
    char what[300] = "", who[256] = "", text[700];
    int n = -1;
    pthread_mutex_lock(&c->lock);
    const ddp_req *at = c->head ? c->head : r;
    ddp__signature_call(&at->coll.sig, ddp__number(&at->coll, at->seq), what, sizeof what);
    if (c->ops->missing && c->self) n = c->ops->missing(c->self, who, sizeof who);
    if (!c->ops->missing) {
        __atomic_store_n(&c->late, 1, __ATOMIC_RELAXED);
        for (double until = ddp__now() + .5; !r->done && !c->status && sleep_on(c, &c->done, until);) {
        }
    }
    bool done = r->done, dead = c->status != 0;
    pthread_mutex_unlock(&c->lock);
    if (done) return 0;
    if (dead) return queue_health(c);
    if (n > 0)
        snprintf(text, sizeof text, "rank%s %s %s not reached %s; rank %d waits there since %.1f s", n == 1 ? "" : "s",
                 who, n == 1 ? "has" : "have", what, me(c), waited);
    else
        snprintf(text, sizeof text, "all ranks have reached %s, but its data does not come; rank %d waits since %.1f s",
                 what, me(c), waited);
    return die(c, DDP_ETIMEOUT, text, "%s", text);
}

/* After an error: until the thread is out of r's buffers, which the caller may free. */
static void let_go(ddp_comm *c, const ddp_req *r) {
    pthread_mutex_lock(&c->lock);
    for (double until = ddp__now() + .25; c->running == r && sleep_on(c, &c->done, until);) {
    }
    pthread_mutex_unlock(&c->lock);
}

static int queue_wait(ddp_req *r) {
    ddp_comm *c = r->comm;
    double begin = ddp__now(), asked = begin, now = begin, limit = r->coll.deadline_s;
    for (;;) {
        pthread_mutex_lock(&c->lock);
        if (!r->done && !c->status) {
            double until = now + SLICE_S;
            if (limit > 0 && begin + limit < until) until = begin + limit;
            sleep_on(c, &c->done, until);
        }
        bool done = r->done;
        int st = done ? 0 : c->status;
        pthread_mutex_unlock(&c->lock);
        if (done) return 0;
        now = ddp__now();
        bool late = (limit > 0 && now - begin >= limit) || (r->late && __atomic_load_n(r->late, __ATOMIC_RELAXED));
        if (st == 0 && late) {
            st = timed_out(c, r, now - begin);
        } else if (st == 0 && now - asked > ASK_S) {
            st = ask_store(c);
            asked = ddp__now();
        }
        if (st < 0) {
            let_go(c, r);
            return ddp__fail(c->status, "%s", c->text);
        }
    }
}

static double queue_weight_sum(const ddp_req *r) { return r->coll.weight_sum; }

static void queue_req_free(ddp_req *r) {
    if (!r) return;
    ddp_comm *c = r->comm;
    pthread_mutex_lock(&c->lock);
    bool last = --c->n_reqs == 0 && c->closed && c->gone;
    if (c->running == r) {
        r->orphan = true;
    } else {
        if (!r->done) unlink_request(c, r);
        free(r);
    }
    pthread_mutex_unlock(&c->lock);
    if (last) free_comm(c);
}

void ddp__queue_engine(ddp_engine *e, const char *name, int (*init)(ddp_comm **, const ddp_boot *)) {
    *e = (ddp_engine){.size = sizeof *e,
                      .name = name,
                      .caps = DDP_CAP_HOST | DDP_CAP_SELF_PROGRESS | DDP_CAP_ABORTABLE | DDP_CAP_WEIGHTED,
                      .init = init,
                      .alloc = queue_alloc,
                      .dealloc = queue_dealloc,
                      .post = queue_post,
                      .test = queue_test,
                      .wait = queue_wait,
                      .weight_sum = queue_weight_sum,
                      .req_free = queue_req_free,
                      .health = queue_health,
                      .abort = queue_abort,
                      .destroy = queue_destroy};
}
