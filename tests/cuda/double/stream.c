/* stream.c -- streams as queues, and when what is in them runs.
 *
 * lazy    nothing runs until someone waits for it or asks; a question runs one operation
 * eager   all runs at once          random  after each call a few operations of some streams run
 * dry     nothing runs at all, all counts as done
 * In every mode, what has waited for DDP_DOUBLE_IDLE_MS runs by itself, as on a GPU: ranks may wait for each other. */
#include "state.h"

#include <pthread.h>
#include <stdlib.h>
#include <time.h>

enum { QUEUE_MOST = 4096 };

struct CUstream_st *all_streams;
struct CUstream_st legacy[MAX_DEVICES];
__thread const char *running;
static cudaError_t stuck[MAX_DEVICES];
static int pending;

/* ---- lookups ------------------------------------------------------------------------------------------------------- */
struct CUstream_st *stream_of(cudaStream_t s) {
    if (s && s != cudaStreamLegacy && s != cudaStreamPerThread) return s;
    struct CUstream_st *l = &legacy[current_device];
    l->device = current_device;
    l->blocking = true;
    return l;
}

bool is_stream(const struct CUstream_st *s) {
    if (s >= legacy && s < legacy + MAX_DEVICES) return true;
    for (const struct CUstream_st *t = all_streams; t; t = t->next)
        if (t == s) return !t->destroyed;
    return false;
}

int ddp_double_stream_device(cudaStream_t s) {
    ddp_double_lock();
    struct CUstream_st *t = stream_of(s);
    int device = is_stream(t) ? t->device : -1;
    ddp_double_unlock();
    return device;
}

cudaError_t ddp_double_stuck(int device) { return device >= 0 && device < MAX_DEVICES ? stuck[device] : cudaSuccess; }
void stick(int device, cudaError_t e) {
    if (!stuck[device]) stuck[device] = e;
}

/* ---- what is queued ------------------------------------------------------------------------------------------------ */
work *new_work(int (*attempt)(void *), void (*run)(void *), void (*drop)(void *), void *ctx, const char *name) {
    work *w = malloc(sizeof *w);
    *w = (work){attempt, run, drop, ctx, name, 1};
    return w;
}

void release_work(work *w) {
    if (!w || --w->refs) return;
    if (w->drop) w->drop(w->ctx);
    free(w);
}

void release_operation(operation *o) {
    if (o && !--o->refs) free(o);
}

static void add_after(operation *o, operation *before) {
    if (!before || before->done) return;
    o->after = realloc(o->after, (size_t)(o->after_count + 1) * sizeof *o->after);
    o->after[o->after_count++] = before;
    before->refs++;
}

/* The legacy stream waits for all blocking streams of its device, and they wait for it. */
static void fence_legacy(struct CUstream_st *s, operation *o) {
    struct CUstream_st *l = &legacy[s->device];
    if (s == l) {
        for (struct CUstream_st *t = all_streams; t; t = t->next)
            if (t->device == s->device && t->blocking) add_after(o, t->tail);
    } else if (s->blocking) {
        add_after(o, l->tail);
    }
}

static void start_idle_thread(void);

operation *enqueue_work(struct CUstream_st *s, work *w, operation *after) {
    if (pending >= QUEUE_MOST) ddp_double_progress();
    operation *o = calloc(1, sizeof *o);
    pending++;
    o->what = w;
    o->stream = s;
    o->refs = 1;
    o->queued = now_ms();
    add_after(o, after);
    fence_legacy(s, o);
    if (s->tail) s->tail->next = o;
    else s->head = o;
    s->tail = o;
    start_idle_thread();
    return o;
}

static void enqueue(cudaStream_t stream, work *w) {
    ddp_double_lock();
    struct CUstream_st *s = stream_of(stream);
    if (!is_stream(s)) ddp_double_die("%s on a stream that is none, %p", w->name, (void *)s);
    if (s->capture) {
        capture_work(s, w);
    } else {
        enqueue_work(s, w, NULL);
        after_enqueue(s);
    }
    ddp_double_unlock();
}

void ddp_double_enqueue(cudaStream_t stream, void (*run)(void *), void (*drop)(void *), void *ctx, const char *name) {
    enqueue(stream, new_work(NULL, run, drop, ctx, name));
}
void ddp_double_enqueue_attempt(cudaStream_t stream, int (*attempt)(void *), void (*drop)(void *), void *ctx,
                                const char *name) {
    enqueue(stream, new_work(attempt, NULL, drop, ctx, name));
}

/* ---- running ------------------------------------------------------------------------------------------------------- */
/* False: it has to wait for others. */
static bool attempt_work(struct CUstream_st *s, work *w) {
    if (config.mode == DRY || stuck[s->device]) return true;
    open_memory();
    int status = 0;
    running = w->name;
    if (w->attempt) status = w->attempt(w->ctx);
    else w->run(w->ctx);
    running = NULL;
    if (status == DOUBLE_WAITS) return false;
    if (status) stick(s->device, (cudaError_t)status);
    if (config.check) check_red_zones(w->name);
    return true;
}

static bool run_head(struct CUstream_st *s) {
    operation *o = s->head;
    for (int i = 0; i < o->after_count; i++)
        if (!o->after[i]->done && !run_until(o->after[i]->stream, o->after[i])) return false;
    if (o->what && !attempt_work(s, o->what)) return false;
    o->done = true;
    o->finished = now_ms();
    s->head = o->next;
    if (!s->head) s->tail = NULL;
    for (int i = 0; i < o->after_count; i++) release_operation(o->after[i]);
    free(o->after);
    o->after = NULL;
    o->after_count = 0;
    release_work(o->what);
    o->what = NULL;
    release_operation(o);
    pending--;
    return true;
}

bool run_until(struct CUstream_st *s, operation *upto) {
    while (s->head) {
        bool last = s->head == upto;
        if (!run_head(s)) return false;
        if (last) return true;
    }
    return true;
}

bool run_one(struct CUstream_st *s) { return s->head && run_head(s); }

static void free_destroyed(void) {
    for (struct CUstream_st **p = &all_streams; *p;) {
        struct CUstream_st *s = *p;
        if (s->destroyed && !s->head) {
            *p = s->next;
            free(s);
        } else {
            p = &s->next;
        }
    }
}

bool ddp_double_progress(void) {
    bool moved = false;
    int before = pending;
    for (struct CUstream_st *s = all_streams; s; s = s->next) run_until(s, NULL);
    for (int i = 0; i < config.devices; i++) run_until(&legacy[i], NULL);
    moved = pending < before;
    free_destroyed();
    return moved;
}

void after_enqueue(struct CUstream_st *s) {
    if (config.mode == EAGER || config.mode == DRY) run_until(s, NULL);
    if (config.mode != RANDOM) return;
    int count = 0;
    for (struct CUstream_st *t = all_streams; t; t = t->next) count++;
    for (uint32_t turns = random_below(4); turns > 0; turns--) {
        uint32_t chosen = random_below((uint32_t)count + 1);
        struct CUstream_st *t = all_streams;
        for (uint32_t i = 0; i < chosen && t; i++) t = t->next;
        run_one(t ? t : &legacy[s->device]);
    }
}

/* ---- waiting ------------------------------------------------------------------------------------------------------- */
void wait_until(bool (*done)(void *), void *arg) {
    long nap = 20000; /* ns */
    while (!done(arg)) {
        if (ddp_double_progress()) {
            nap = 20000;
            continue;
        }
        struct timespec t = {0, nap};
        ddp_double_unlock();
        nanosleep(&t, NULL);
        ddp_double_lock();
        if (nap < 200000) nap += nap / 2;
    }
}

static bool device_is_idle(void *arg) {
    int device = *(int *)arg;
    bool idle = run_until(&legacy[device], NULL);
    for (struct CUstream_st *s = all_streams; s; s = s->next)
        if (s->device == device && !run_until(s, NULL)) idle = false;
    return idle;
}
void wait_device(int device) { wait_until(device_is_idle, &device); }

/* ---- work that nobody waits for ------------------------------------------------------------------------------------ */
static void run_old(struct CUstream_st *s, double before) {
    while (s->head && s->head->queued < before)
        if (!run_head(s)) return;
}

static void *idle_thread(void *arg) {
    (void)arg;
    for (;;) {
        struct timespec t = {0, config.idle_ms * 250000};
        nanosleep(&t, NULL);
        ddp_double_lock();
        double before = now_ms() - (double)config.idle_ms;
        for (struct CUstream_st *s = all_streams; s; s = s->next) run_old(s, before);
        for (int i = 0; i < config.devices; i++) run_old(&legacy[i], before);
        free_destroyed();
        ddp_double_unlock();
    }
    return NULL;
}

static void start_idle_thread(void) {
    static bool started;
    pthread_t thread;
    if (started || config.mode == DRY || config.idle_ms <= 0) return;
    started = true;
    if (pthread_create(&thread, NULL, idle_thread, NULL) == 0) pthread_detach(thread);
}
