/* round.c -- rounds: the reductions of a step, and what happens when a rank has no more data for one.
 *
 * A round reduces the buckets of one reducer, or of all that one backward reached, in one order on every rank: the newest
 * reducer first, each bucket in its turn. So a bucket waits for those before it, whatever order its gradients came in.
 *
 * Uneven data. A rank whose loop has ended answers the others' rounds with weight 0 until all loops have ended (ddp_join).
 * Nothing is exchanged for that as long as all take part: two numbers ride behind the first bucket's gradients,
 *   here   its sum is how many ranks took part for real,
 *   last   its sum is how many of them did so in the last batch of their loop, and know it.
 * A loop whose last round was everybody's last ends without another word. When somebody was missing in a round (it skipped,
 * or its data has ended), which all see in the round's result, the next one is announced: one all-reduce of a few whole
 * numbers says which reducers it is of, and whether all have ended. The one round that a rank must answer without an
 * announcement, its first after its end, is taken to be like the first of its last batch; should it be another one, the signatures
 * differ and both are named. Should it turn out that all only answered, their data ended at once: what lay in the buckets
 * comes back.
 *
 * Hooks. A reducer may have its gradients exchanged by the host: a round stops wherever one of its buckets is next, and goes
 * on when the host has started the exchange; before the results are taken, the host waits for all it started. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../mem/device.h"
#include "reducer.h"

static struct {
    int64_t backwards;          /* that reached a reducer's parameters */
    bool doubt;                 /* somebody was missing in the last round: the next one is announced */
    bool all_last;              /* it was the last one of all ranks' loops */
    bool took_part;             /* this rank took part in it for real */
    bool last_batch;            /* this rank's loop is in its last batch */
    bool new_batch;             /* no round was in it yet */
    int64_t serials[ROUND_MAX]; /* the reducers of the first round of a batch, the last time that there was one */
    int n;
    int64_t host_id; /* what the host is to run */
} job;

int64_t ddp__round_count(void) { return ++job.backwards; }
int64_t ddp_join_count(void) { return job.backwards; }
void ddp_join_batch(int last) {
    job.last_batch = last != 0;
    job.new_batch = true;
}
int64_t ddp_reduction_host_id(void) { return job.host_id; }

/* ---- which reducers ---- */

static ddp_reduction *spare; /* the last one freed: there is one a step */

ddp_reduction *ddp__round_new(double weight) {
    ddp_reduction *d = spare ? spare : malloc(sizeof *d);
    spare = NULL;
    if (!d) {
        ddp__fail(DDP_ENOMEM, "reducer: out of memory");
        return NULL;
    }
    *d = (ddp_reduction){.weight = weight};
    return d;
}

int ddp__round_add(ddp_reduction *d, ddp_reducer *r) {
    if (d->n == ROUND_MAX)
        return ddp__fail(DDP_ENOSUP, "reducer: a backward through more than %d wrapped models", ROUND_MAX);
    int at = d->n++;
    for (; at > 0 && d->list[at - 1]->serial < r->serial; at--) d->list[at] = d->list[at - 1];
    d->list[at] = r;
    d->hooked |= r->hook != 0;
    r->hook_waited = false;
    r->round = d;
    return 0;
}

void ddp_reduction_free(ddp_reduction *d) {
    if (!d) return;
    for (int i = 0; i < d->n; i++)
        if (d->list[i]->round == d) d->list[i]->round = NULL;
    for (int i = 0; i < d->n_saved; i++) free(d->saved[i]);
    free(d->saved);
    free(spare);
    spare = d;
}

void ddp__round_forget(const ddp_reducer *r) {
    ddp_reduction *d = r->round;
    for (int i = 0; d && i < d->n; i++)
        if (d->list[i] == r) memmove(&d->list[i], &d->list[i + 1], (size_t)(--d->n - i) * sizeof(d->list[0]));
    for (int i = 0; i < job.n; i++)
        if (job.serials[i] == r->serial) job.serials[i] = job.serials[--job.n];
}

/* ---- announcing ---- */

/* What ranks say of themselves and of the next round; each number is the largest over the ranks. */
typedef struct words {
    int64_t lowest; /* size - rank of the lowest rank that took part in the last round */
    int64_t missed; /* a rank has answered since its data ended */
    int64_t n;      /* reducers in the round; 0: this rank's data has ended */
    int64_t serials[ROUND_MAX];
} words;

static int exchange(words *w) {
    ddp_coll c =
        ddp__coll(DDP_COLL_ALL_REDUCE, NULL, w, (int64_t)(sizeof *w / sizeof(int64_t)), DDP_I64, "uneven data");
    c.reduce = DDP_MAX;
    return ddp__coll_run(&c, NULL);
}

static int64_t my_place(void) { return job.took_part ? ddp__job.size - ddp__job.rank : 0; }

static int announce(const ddp_reduction *d) {
    words w = {.n = d->n, .lowest = my_place()};
    for (int i = 0; i < d->n; i++) w.serials[i] = d->list[i]->serial;
    return exchange(&w);
}

/* ---- posting ---- */

/* Where r's numbers about the ranks lie, behind the touched ones. */
static const bucket *numbers(const ddp_reducer *r) { return ddp__apart(r) ? &r->flags : &r->buckets[0]; }

/* A number about this rank, so that the reduction gives its sum over the ranks that take part (see sum_of): a weighted mean
 * gives sum(w * v/w) / sum(w). */
static void put_number(const ddp_reducer *r, int which, double weight, double v) {
    const bucket *b = numbers(r);
    ddp__store(b->dtype, b->mem, b->count - TAIL_MORE + which, weight != 0 ? v / weight : 0);
}
static double sum_of(const ddp_reducer *r, int which, double weight_sum) {
    const bucket *b = numbers(r);
    double v = ddp__load(b->dtype, b->mem, b->count - TAIL_MORE + which);
    return round(r->reduce == DDP_MEAN ? v * weight_sum : v);
}
static bool is_touched(const ddp_reducer *r, const slot *s) {
    const bucket *b = &r->buckets[s->bucket];
    return (ddp__apart(r) ? ((const float *)r->flags.mem)[s - r->slots]
                          : ddp__load(b->dtype, b->mem, b->tail + s->index)) > 0;
}

int ddp__round_divide(ddp_tensor *g) {
    ddp_tensor *world = ddp_keep(ddp_scalar(ddp__job.size));
    int mode = ddp_set_grad_mode(0), st = ddp_div_(g, world);
    ddp_set_grad_mode(mode);
    ddp__drop(world);
    return st;
}

static double weight_in(const ddp_reduction *d, const ddp_reducer *r) {
    return r->weighted || d->weight == 0 ? d->weight : 1;
}

static int zero(ddp_tensor *view) {
    size_t bytes = (size_t)view->numel * ddp__dtype_bytes[view->m.dtype];
    if (view->m.device != DDP_CPU)
        return ddp__device_of(view->m.device)->zero(view->m.device - 1, ddp__ptr(view), bytes);
    memset(ddp__ptr(view), 0, bytes);
    return 0;
}

/* Zeros where this rank has nothing, then the touched numbers. */
static int close_bucket(const ddp_reducer *r, bucket *b, double weight) {
    for (int i = 0; i < b->n; i++) {
        slot *s = b->slots[i];
        int st = ddp__grad_settle(s->param);
        bool has = s->param->grad != NULL && weight != 0;
        if (!has) {
            int zeroed = zero(s->view);
            if (st == 0) st = zeroed;
        }
        /* What was summed over the ranks already counts once, not once a rank. */
        else if (st == 0 && s->reduced && r->reduce == DDP_SUM)
            st = ddp__round_divide(s->view);
        if (st < 0) return st;
        if (r->device == DDP_CPU) ddp__store(b->dtype, b->mem, b->tail + i, has ? 1 : 0);
        if (ddp__apart(r)) ((float *)r->flags.mem)[s - r->slots] = has ? 1 : 0;
    }
    return 0;
}

/* to = from, cast. */
static int recast(ddp_tensor *to, ddp_tensor *from) {
    int mode = ddp_set_grad_mode(0), st = ddp_copy_(to, from);
    ddp_set_grad_mode(mode);
    return st;
}

/* b->narrow = b's numbers in fewer bits, together with what was rounded off before; b->rest = what is now. */
static int narrow_down(bucket *b) {
    int mode = ddp_set_grad_mode(0), st = 0;
    size_t tail = (size_t)(b->count - b->tail) * sizeof(float);
    if (b->rest) {
        if (tail) memset((float *)ddp__ptr(b->rest) + b->tail, 0, tail); /* the tail's numbers are no gradients */
        st = ddp_add_(b->wide, b->rest);
    }
    if (st == 0) st = ddp_copy_(b->narrow, b->wide);
    if (st == 0 && b->rest && (st = ddp_copy_(b->rest, b->narrow)) == 0 && (st = ddp_neg_(b->rest)) == 0)
        st = ddp_add_(b->rest, b->wide);
    ddp_set_grad_mode(mode);
    return st;
}

static int reduce_bucket(const ddp_reducer *r, bucket *b, double weight, const char *what, int k) {
    char name[64], of[32] = "";
    if (r->serial > 1) snprintf(of, sizeof of, " of model %lld", (long long)r->serial);
    snprintf(name, sizeof name, "%s %d%s", what, k, of);
    int device = b == &r->flags ? DDP_CPU : r->device;
    ddp_coll c = ddp__coll(DDP_COLL_ALL_REDUCE, NULL, b->mem, b->count, b->dtype, name);
    if (b->narrow) {
        int st = weight != 0 ? narrow_down(b) : recast(b->narrow, b->wide); /* one that answers keeps its rest */
        if (st < 0) return st;
        c = ddp__coll(DDP_COLL_ALL_REDUCE, NULL, b->narrow_mem, b->count, b->narrow->m.dtype, name);
    }
    c.device = device;
    c.reduce = r->reduce;
    c.weight = weight;
    return ddp__coll_run(&c, &b->req);
}

static void say_who(const ddp_reducer *r, double weight) {
    put_number(r, TAIL_HERE, weight, 1);
    put_number(r, TAIL_LAST, weight, job.last_batch);
}

/* The next bucket of r, or with a hook its flags after all buckets. 1: its hook is to run. */
static int post_next(const ddp_reduction *d, ddp_reducer *r) {
    int k = r->n_posted, st = 0;
    double weight = weight_in(d, r);
    if (ddp__job.group)
        return ddp__fail(DDP_ESTATE, "reducer: a reduction of all ranks while ddp_group_use has a group");
    if (k == r->n_buckets) {
        say_who(r, weight);
        st = reduce_bucket(r, &r->flags, weight, "bucket", k);
        if (st == 0) r->n_posted++;
        return st;
    }
    bucket *b = &r->buckets[k];
    if ((st = close_bucket(r, b, weight)) < 0) return st;
    if (r->hook) {
        r->hook_bucket = k;
        job.host_id = r->hook;
        r->n_posted++;
        return 1;
    }
    if (k == 0 && !ddp__apart(r)) say_who(r, weight);
    st = reduce_bucket(r, b, weight, "bucket", k);
    if (st == 0) r->n_posted++;
    return st;
}

int ddp__round_post(ddp_reduction *d, bool all, bool ask) {
    for (int i = 0; i < d->n; i++) {
        ddp_reducer *r = d->list[i];
        int n = r->n_buckets + ddp__apart(r);
        while (r->n_posted < n) {
            int k = r->n_posted;
            if (k < r->n_buckets && !all && r->buckets[k].n_ready < r->buckets[k].n) return 0;
            if (r->hook && !ask) return 0;
            int st = d->begun || d->ended || !job.doubt ? 0 : announce(d);
            d->begun = true;
            if (st == 0) st = post_next(d, r);
            if (st != 0) return st;
        }
    }
    return 0;
}

/* ---- the end ---- */

/* Gradients of parameters that some rank touched appear on every rank; of the others there are none. */
static void take_results(ddp_reducer *r) {
    for (int i = 0; i < r->n; i++) {
        slot *s = &r->slots[i];
        s->touched = is_touched(r, s);
        s->used |= s->touched;
        s->reduced = true;
        ddp_mark_written(s->view);
        if (s->touched && !s->param->grad) s->param->grad = ddp_retain(s->view);
        if (!s->touched && s->param->grad) {
            ddp__drop(s->param->grad);
            s->param->grad = NULL;
            ddp__grad_forget(s->param);
        }
    }
    r->unreduced = false;
}

/* Within a device, or from or to its saved copy in host memory. */
static int copy_bytes(void *to, const void *from, int device, size_t bytes) {
    if (device != DDP_CPU) return ddp__device_of(device)->copy(to, device, from, DDP_CPU, bytes);
    memcpy(to, from, bytes);
    return 0;
}

static void give_back(const ddp_reduction *d) {
    for (int i = 0, at = 0; i < d->n; i++)
        for (int k = 0; k < d->list[i]->n_buckets; k++, at++) {
            bucket *b = &d->list[i]->buckets[k];
            copy_bytes(b->mem, d->saved[at], d->list[i]->device, (size_t)b->count * ddp__dtype_bytes[b->dtype]);
        }
}

/* One bucket's request, if it has one, is waited for and freed, also after a failure. */
static int wait_for(bucket *b, double *weight_sum) {
    b->n_ready = 0;
    if (!b->req) return 0;
    int st = ddp__coll_wait(b->req, weight_sum);
    b->req = NULL;
    return st == 0 && b->narrow ? recast(b->wide, b->narrow) : st;
}

static int wait_for_all(ddp_reduction *d, double *weight_sum) {
    int st = 0;
    for (int i = 0; i < d->n; i++) {
        ddp_reducer *r = d->list[i];
        for (int k = 0; k <= r->n_buckets; k++) {
            int one = wait_for(k < r->n_buckets ? &r->buckets[k] : &r->flags, i == 0 ? weight_sum : NULL);
            if (st == 0) st = one;
        }
        for (int k = 0; k < r->n; k++) r->slots[k].ready = false;
        r->n_posted = 0;
    }
    return st;
}

/* 1: the host has exchanges to wait for. */
static int wait_for_hooks(const ddp_reduction *d) {
    for (int i = 0; i < d->n; i++) {
        ddp_reducer *r = d->list[i];
        if (!r->hook || r->hook_waited) continue;
        r->hook_waited = true;
        r->hook_bucket = -1;
        job.host_id = r->hook;
        return 1;
    }
    return 0;
}

int ddp__round_finish(ddp_reduction *d) {
    double weight_sum = ddp__job.size;
    int st = ddp__round_post(d, true, true);
    if (st == 0) st = wait_for_hooks(d);
    if (st == 1) return 1;
    int waited = wait_for_all(d, &weight_sum);
    if (st == 0) st = waited;
    if (st < 0 || d->n == 0) return st;
    d->here = sum_of(d->list[0], TAIL_HERE, weight_sum);
    job.doubt = d->here != ddp__job.size;
    job.all_last = sum_of(d->list[0], TAIL_LAST, weight_sum) == ddp__job.size;
    job.took_part = !d->ended;
    if (job.new_batch) job.n = 0;
    for (int i = 0; i < d->n; i++) {
        if (job.new_batch) job.serials[job.n++] = d->list[i]->serial;
        d->list[i]->seen = true;
    }
    job.new_batch = false;
    if (d->saved && d->here == 0) give_back(d);
    else
        for (int i = 0; i < d->n; i++) take_results(d->list[i]);
    return 0;
}

int ddp_reduction_begin(ddp_reducer *r, double weight, ddp_reduction **out) {
    *out = NULL;
    if (ddp__pending()) return ddp__pending();
    if (!r) return ddp__fail(DDP_ENULL, "reducer: none");
    if (!(weight >= 0))
        return ddp__fail(DDP_EINVAL, "reduce_gradients: weight is %g, expected a number from 0", weight);
    int st = ddp__job_ready("reduce_gradients");
    ddp_reduction *d = st < 0 ? NULL : ddp__round_new(weight);
    if (!d) return ddp__pending();
    st = r->n_buckets ? ddp__round_add(d, r) : 0;
    *out = d;
    return st;
}

int ddp_reduction_next(ddp_reduction *d) {
    if (ddp__pending()) return ddp__pending();
    return d ? ddp__round_finish(d) : ddp__fail(DDP_ENULL, "reduction: none");
}

int ddp__round_alone(ddp_reducer *r, double weight) {
    if (r->hook) return ddp__fail(DDP_ESTATE, "reducer: it has a hook; use ddp_reduction_begin");
    ddp_reduction *d;
    int st = ddp_reduction_begin(r, weight, &d);
    if (st == 0) st = ddp_reduction_next(d);
    ddp_reduction_free(d);
    return st;
}

/* ---- answering ---- */

static struct {
    bool on, first; /* first: the others have not heard yet that this rank's data has ended */
    bool no_batch;  /* it had none in this loop */
    int missed;
    ddp_reduction *d; /* being answered; owned */
} joining;

static ddp_reducer *find(int64_t serial) {
    for (ddp_reducer *r = ddp__reducers; r; r = r->next)
        if (r->serial == serial) return r;
    return NULL;
}

/* Keeps what lies in the buckets. */
static int save(ddp_reduction *d) {
    int n = 0;
    for (int i = 0; i < d->n; i++) n += d->list[i]->n_buckets;
    d->saved = calloc((size_t)n + 1, sizeof *d->saved);
    if (!d->saved) return ddp__fail(DDP_ENOMEM, "join: out of memory");
    for (int i = 0; i < d->n; i++)
        for (int k = 0; k < d->list[i]->n_buckets; k++) {
            const bucket *b = &d->list[i]->buckets[k];
            for (int j = 0; j < b->n; j++)
                if (ddp__grad_settle(b->slots[j]->param) < 0) return ddp__pending();
            size_t bytes = (size_t)b->count * ddp__dtype_bytes[b->dtype];
            void *copy = malloc(bytes);
            if (!copy) return ddp__fail(DDP_ENOMEM, "join: out of memory");
            d->saved[d->n_saved++] = copy;
            int device = d->list[i]->device;
            if (device == DDP_CPU) memcpy(copy, b->mem, bytes);
            else if (ddp__device_of(device)->copy(copy, DDP_CPU, b->mem, device, bytes) < 0) return ddp__pending();
        }
    return 0;
}

/* Begins a round with weight 0; with `maybe` all ranks may turn out to do so. */
static int answer(int n, const int64_t *serials, bool maybe) {
    joining.d = ddp__round_new(0);
    if (!joining.d) return ddp__pending();
    joining.d->ended = true;
    int st = 0;
    for (int i = 0; i < n && st == 0; i++) {
        ddp_reducer *r = find(serials[i]);
        if (r) st = ddp__round_add(joining.d, r);
        else
            st = ddp__fail(DDP_EMISMATCH, "join: the others reduce model %lld, which rank %d has not",
                           (long long)serials[i], ddp__job.rank);
    }
    return st == 0 && maybe ? save(joining.d) : st;
}

/* The round that the others' next batch begins with, unannounced. In a loop without a batch that one says nothing if there is
 * a new model, of which no round was yet. */
static int answer_the_next(void) {
    int64_t serials[ROUND_MAX];
    int n = job.n;
    memcpy(serials, job.serials, sizeof serials);
    for (const ddp_reducer *r = ddp__reducers; r && joining.no_batch; r = r->next)
        if (!r->seen) serials[0] = r->serial, n = 1;
    return answer(n, serials, true);
}

enum { OVER = 2 };

/* Asks for the next round to answer. OVER: all have ended. */
static int ask(int *source) {
    if (joining.first) {
        joining.first = false;
        return answer_the_next();
    }
    words w = {.lowest = my_place(), .missed = joining.missed};
    int st = exchange(&w);
    if (st < 0) return st;
    if (w.n) return answer((int)w.n, w.serials, false);
    if (w.missed && w.lowest) *source = ddp__job.size - (int)w.lowest;
    return OVER;
}

static int go_on(void) {
    ddp_reduction *d = joining.d;
    int st = ddp__round_finish(d);
    if (st == 1) return 1;
    bool alone = d->saved && d->here == 0;
    if (!alone) joining.missed = 1;
    joining.d = NULL;
    ddp_reduction_free(d);
    return st == 0 && alone ? OVER : st;
}

static void end_join(void) {
    ddp_reduction_free(joining.d);
    memset(&joining, 0, sizeof joining);
    job.doubt = job.all_last = job.last_batch = false;
}

int ddp_join(int sure, int *source, int *missed) {
    *source = -1;
    *missed = 0;
    if (ddp__pending()) return ddp__pending();
    if (!joining.on) {
        int st = ddp__job_ready("join");
        if (st < 0 || ddp__job.size == 1 || !ddp__reducers) return st;
        bool over = sure == 1 && job.all_last && !job.doubt;
        job.all_last = job.last_batch = false;
        if (over) return 0;
        joining.on = true;
        joining.no_batch = sure < 0;
        joining.first = !job.doubt;
    }
    for (;;) {
        int st = joining.d ? go_on() : ask(source);
        if (st == 0) continue;
        if (st == 1) return 1;
        *missed = joining.missed;
        end_join();
        return st == OVER ? 0 : st;
    }
}
