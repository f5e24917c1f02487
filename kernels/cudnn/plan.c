/* plan.c -- the table of plans, by op, shapes, strides, dtype, precision, determinism and device; their choice and their runs. */
#include "plan.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SLOTS = 1024, ENTRIES = 2048, GPUS = 64, RUNS = 3, WORKSPACE_MB = 1024 };

/* One GPU's cuDNN. */
typedef struct context {
    const ddp_gpu *gpu;
    cudnnHandle_t handle;
    cg_desc device; /* its properties */
    char name[300]; /* and compute capability: what plans depend on */
} context;

typedef struct entry {
    plan_key key;
    int gpu, n, use; /* use: the plan that runs */
    bool measured;
    cg_plan plan[PLAN_MOST]; /* best first */
    const char *why;         /* there is none; text of graph */
    cg_graph graph;
    struct entry *next;
} entry;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* of all below; held while a call is queued, too */
static context contexts[GPUS];
static entry *table[SLOTS];
static int entries;
static plan_counts counts;

/* ---- keys -------------------------------------------------------------------------------------------------------- */

void plan_key_start(plan_key *k, const ddp_call *c) {
    k->n = 3;
    k->v[0] = c->op->id;
    k->v[1] = ddp_float32_matmul_precision();
    k->v[2] = ddp_is_deterministic();
}

void plan_key_add(plan_key *k, int n, const int64_t *v) {
    if (k->n + n > PLAN_WORDS) abort(); /* a key too small would make two calls one */
    memcpy(k->v + k->n, v, (size_t)n * sizeof *v);
    k->n += n;
}

static unsigned slot_of(const plan_key *k, int gpu) {
    uint64_t h = (uint64_t)gpu;
    for (int i = 0; i < k->n; i++) h = ddp__mix(h ^ (uint64_t)k->v[i], (uint64_t)i);
    return (unsigned)h % SLOTS;
}

static bool same(const plan_key *a, const plan_key *b) {
    return a->n == b->n && memcmp(a->v, b->v, (size_t)a->n * sizeof a->v[0]) == 0;
}

/* ---- one GPU's cuDNN --------------------------------------------------------------------------------------------- */

/* NULL with the error set. */
static context *context_of(const ddp_call *c) {
    const ddp_gpu *gpu = ddp__gpu_of(c);
    if (!gpu || ddp__cuda_need(DDP_LIB_CUDNN) < 0) return NULL;
    context *x = &contexts[gpu->index];
    if (x->handle) return x;
    cg_graph g;
    cg_start(&g, c->op->name);
    x->gpu = gpu;
    cg_check(&g, ddp__cuda.cudnnCreate(&x->handle), "make a handle");
    if (g.status == 0) cg_check(&g, ddp__cuda.cudnnSetStream(x->handle, gpu->compute), "set the stream");
    if (g.status == 0) x->device = cg_device(&g, x->handle, NULL);
    snprintf(x->name, sizeof x->name, "%s %d.%d", gpu->prop.name, gpu->prop.major, gpu->prop.minor);
    cg_free(&g);
    if (g.status == 0) return x;
    if (x->handle) ddp__cuda.cudnnDestroy(x->handle);
    memset(x, 0, sizeof *x);
    ddp__fail(DDP_EDEVICE, "%s", g.why);
    return NULL;
}

static void drop_entries(void) {
    for (int i = 0; i < GPUS; i++) /* kernels that still run are the plans' */
        if (contexts[i].handle) ddp__cuda.cudaStreamSynchronize(contexts[i].gpu->compute);
    for (int i = 0; i < SLOTS; i++)
        while (table[i]) {
            entry *e = table[i];
            table[i] = e->next;
            cg_free(&e->graph);
            free(e);
        }
    entries = 0;
}

void ddp__cudnn_clear(void) {
    pthread_mutex_lock(&lock);
    drop_entries();
    for (int i = 0; i < GPUS; i++) {
        if (!contexts[i].handle) continue;
        ddp__cuda.cudnnBackendDestroyDescriptor(contexts[i].device);
        ddp__cuda.cudnnDestroy(contexts[i].handle);
        memset(&contexts[i], 0, sizeof contexts[i]);
    }
    pthread_mutex_unlock(&lock);
}

plan_counts ddp__cudnn_counts(void) {
    pthread_mutex_lock(&lock);
    plan_counts n = counts;
    pthread_mutex_unlock(&lock);
    return n;
}

/* ---- the choice -------------------------------------------------------------------------------------------------- */

static int64_t workspace_limit(void) {
    const char *s = getenv("DDP_CUDNN_WORKSPACE_MB");
    long mb = s && *s ? strtol(s, NULL, 10) : WORKSPACE_MB;
    return (int64_t)(mb < 0 ? 0 : mb) << 20;
}

static bool tuning(void) {
    const char *s = getenv("DDP_TUNE");
    return s && strcmp(s, "1") == 0;
}

static cg_filter filter_of(const plan_key *k, bool is_f32, int64_t workspace) {
    int64_t precision = k->v[1];
    return (cg_filter){.deterministic = k->v[2] != 0,
                       .tensor_f32 = precision == DDP_F32_HIGH,
                       .winograd = precision != DDP_F32_EXACT,
                       .is_f32 = is_f32,
                       .workspace = workspace};
}

/* The first input that is a tensor of floats says what is computed in. */
static bool is_f32(const ddp_call *c) { return c->in[0]->m.dtype == DDP_F32; }

/* What a file says was chosen, unless it does not do any more: an engine of another driver, a damaged text. */
static bool plan_from_file(entry *e, const context *x) {
    plan_file f;
    if (!plan_file_read(&e->key, x->name, ddp__cuda.cudnnGetVersion(), &f)) return false;
    bool wanted = f.measured || !tuning();
    if (wanted && f.text) cg_plan_of_text(&e->graph, x->device, f.text, &f.choice, &e->plan[0]);
    else if (wanted) cg_plan_of(&e->graph, x->device, &f.choice, &e->plan[0]);
    free(f.text);
    bool good = wanted && e->graph.status == 0 && e->plan[0].workspace <= workspace_limit();
    e->graph.status = 0;
    e->n = good;
    e->measured = good && f.measured;
    return good;
}

/* Keeps the text of plans that were compiled: half a second each. */
static void plan_to_file(const entry *e, const context *x) {
    const cg_plan *p = &e->plan[e->use];
    plan_file f = {.choice = p->choice, .measured = e->measured};
    if (p->behavior & 1u << CUDNN_BEHAVIOR_NOTE_RUNTIME_COMPILATION) f.text = cg_plan_text(p);
    plan_file_write(&e->key, x->name, ddp__cuda.cudnnGetVersion(), &f);
    free(f.text);
}

static void choose(entry *e, const ddp_call *c, const context *x, plan_build build, const void *ctx) {
    cg_start(&e->graph, c->op->name);
    if (build(&e->graph, ctx) == 0 && cg_finish(&e->graph) == 0) {
        if (plan_from_file(e, x)) {
            counts.from_file++;
            return;
        }
        cg_filter f = filter_of(&e->key, is_f32(c), workspace_limit());
        e->n = cg_plans(&e->graph, x->device, &f, tuning() ? PLAN_MOST : 1, e->plan);
        counts.made++;
    }
    if (e->n == 0) e->why = e->graph.why;
    else if (!tuning()) plan_to_file(e, x);
}

/* Lock held. NULL with the error set. */
static entry *find(const ddp_call *c, context *x, const plan_key *k, plan_build build, const void *ctx) {
    unsigned i = slot_of(k, x->gpu->index);
    for (entry *e = table[i]; e; e = e->next)
        if (e->gpu == x->gpu->index && same(&e->key, k)) {
            counts.hits++;
            return e;
        }
    if (entries == ENTRIES) drop_entries();
    entry *e = calloc(1, sizeof *e);
    if (!e) {
        ddp__fail(DDP_ENOMEM, "%s: out of memory", c->op->name);
        return NULL;
    }
    e->key = *k;
    e->gpu = x->gpu->index;
    choose(e, c, x, build, ctx);
    e->next = table[i];
    table[i] = e;
    entries++;
    return e;
}

const char *plan_missing(const ddp_call *c, const plan_key *k, plan_build build, const void *ctx) {
    const char *no = ddp__cuda_missing(DDP_LIB_CUDNN);
    if (no) return no;
    pthread_mutex_lock(&lock);
    context *x = context_of(c);
    entry *e = x ? find(c, x, k, build, ctx) : NULL;
    const char *why = !e ? "cuDNN could not start" : e->why;
    pthread_mutex_unlock(&lock);
    return why;
}

/* ---- running ----------------------------------------------------------------------------------------------------- */

/* What a run needs to know of its call. */
typedef struct run {
    const ddp_call *c;
    const context *x;
    int n;
    const int64_t *uid;
    void *const *ptr;
} run;

/* Runs e's plan p. DDP_ENOMEM without an error set: there is no workspace of its size; *text says more. */
static int run_plan(entry *e, const cg_plan *p, const run *r, const char **text) {
    void *workspace = NULL;
    if (p->workspace > 0 && !(workspace = ddp__cuda_scratch_take(r->c, (size_t)p->workspace))) {
        int st = ddp_error_take(text);
        return st == DDP_ENOMEM ? st : ddp__fail(st, "%s", *text);
    }
    int st = cg_run(&e->graph, p, r->x->handle, r->n, r->uid, r->ptr, workspace);
    if (workspace) ddp__cuda_scratch_give(r->c, workspace, (size_t)p->workspace);
    e->graph.status = 0; /* the next call may go well */
    return st < 0 ? ddp__fail(DDP_EDEVICE, "%s", e->graph.why) : 0;
}

/* Another plan with less workspace than any of e's so far. False: there is none. */
static bool smaller_plan(entry *e, const run *r) {
    int64_t least = INT64_MAX;
    if (e->n == PLAN_MOST) e->n--; /* the last makes room: it had no workspace either */
    for (int i = 0; i < e->n; i++)
        if (e->plan[i].workspace < least) least = e->plan[i].workspace;
    if (least <= 0) return false;
    cg_filter f = filter_of(&e->key, is_f32(r->c), least - 1);
    int more = cg_plans(&e->graph, r->x->device, &f, 1, &e->plan[e->n]);
    e->graph.status = 0;
    e->n += more;
    return more > 0;
}

/* The plan in use, or the first other one that gets its workspace. */
static int run_some(entry *e, const run *r) {
    const char *text = "";
    int64_t wanted = e->plan[e->use].workspace;
    for (int i = e->use;; i = i + 1) {
        if (i == e->n && !smaller_plan(e, r)) break;
        if (i >= e->n) i = e->n - 1;
        int st = run_plan(e, &e->plan[i], r, &text);
        if (st == 0) e->use = i;
        if (st != DDP_ENOMEM) return st;
    }
    return ddp__fail(DDP_ENOMEM, "%s: cuDNN wants %.1f MB of workspace, and no plan does with less: %s", r->c->op->name,
                     (double)wanted / 1e6, text);
}

/* ---- measuring --------------------------------------------------------------------------------------------------- */

/* Microseconds of plan p, the best of a few runs; negative with no error set where it does not run. */
static double measure(entry *e, const cg_plan *p, const run *r, cudaEvent_t from, cudaEvent_t to) {
    const char *text;
    double best = -1;
    for (int i = 0; i <= RUNS; i++) { /* the first loads the kernels */
        float ms = 0;
        if (ddp__cuda.cudaEventRecord(from, r->x->gpu->compute)) return -1;
        if (run_plan(e, p, r, &text) < 0) {
            if (ddp__pending()) ddp_error_take(&text);
            return -1;
        }
        if (ddp__cuda.cudaEventRecord(to, r->x->gpu->compute) || ddp__cuda.cudaEventSynchronize(to) ||
            ddp__cuda.cudaEventElapsedTime(&ms, from, to))
            return -1;
        if (i > 0 && (best < 0 || ms * 1e3 < best)) best = ms * 1e3;
    }
    return best;
}

/* DDP_TUNE=1: the first call runs all of its plans; the fastest stays in use. */
static void tune(entry *e, const run *r) {
    cudaEvent_t from = NULL, to = NULL;
    double best = -1;
    e->measured = true; /* whatever comes of it: not twice */
    if (ddp__cuda.cudaEventCreateWithFlags(&from, cudaEventDefault)) return;
    if (ddp__cuda.cudaEventCreateWithFlags(&to, cudaEventDefault) == cudaSuccess)
        for (int i = 0; i < e->n; i++) {
            double us = measure(e, &e->plan[i], r, from, to);
            ddp__log(DDP_LOG_DEBUG, "%s: engine %lld takes %.1f us", r->c->op->name,
                     (long long)e->plan[i].choice.engine, us);
            if (us < 0 || (best >= 0 && us >= best)) continue;
            best = us;
            e->use = i;
        }
    ddp__cuda.cudaEventDestroy(from);
    if (to) ddp__cuda.cudaEventDestroy(to);
    plan_to_file(e, r->x);
}

int plan_run(const ddp_call *c, const plan_key *k, plan_build build, const void *ctx, int n, const int64_t *uid,
             void *const *ptr) {
    int st;
    pthread_mutex_lock(&lock);
    context *x = context_of(c);
    entry *e = x ? find(c, x, k, build, ctx) : NULL;
    if (!e) st = ddp__pending();
    else if (e->why) st = ddp__fail(DDP_ENOSUP, "%s", e->why);
    else {
        const run r = {c, x, n, uid, ptr};
        if (tuning() && !e->measured) tune(e, &r);
        st = run_some(e, &r);
    }
    pthread_mutex_unlock(&lock);
    return st;
}
