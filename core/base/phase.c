/* phase.c -- where a step's time goes, start-up marks, and their summary. One thread trains; its calls come here. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "progress.h"

_Static_assert((int)DDP_PHASES == (int)DDP_PARTS, "one part a phase");

enum { MAX_MARKS = 16 };

typedef struct step_times {
    float total, part[DDP_PARTS];
} step_times;

static struct {
    int phase;
    double since;               /* when the present phase began; 0: no step is open */
    double now_part[DDP_PARTS]; /* of the open step */
    step_times *steps;
    int64_t n, room;
    double first_step_ms;
    struct {
        char name[24];
        double ms;
    } marks[MAX_MARKS];
    int n_marks;
} st = {.first_step_ms = -1};

static ddp_progress unseen;
static ddp_progress *progress = &unseen;
void (*ddp__step_ended)(int64_t steps);

void ddp__progress_show(ddp_progress *p) {
    atomic_store(&p->phase, st.phase);
    atomic_store(&p->steps, st.n);
    progress = p;
}

double ddp_now(void) { return ddp__now(); }

static void account(double now) {
    if (st.since > 0) st.now_part[st.phase] += now - st.since;
    st.since = now;
}

ddp_phase ddp__phase_enter(ddp_phase phase) {
    int before = st.phase;
    account(ddp__now());
    st.phase = (int)phase;
    atomic_store_explicit(&progress->phase, st.phase, memory_order_relaxed);
    return (ddp_phase)before;
}

int ddp_stats_enter(int part) {
    if (part < 0 || part >= DDP_PARTS) part = DDP_PART_FORWARD;
    return (int)ddp__phase_enter((ddp_phase)part);
}

static double launched(void) {
    static double t;
    if (t == 0) {
        const char *s = getenv("DDP_LAUNCHED");
        t = s ? atof(s) : 0;
        if (t <= 0) t = ddp__now();
    }
    return t;
}

void ddp_stats_step(void) {
    double now = ddp__now();
    account(now);
    if (st.first_step_ms < 0) st.first_step_ms = 1e3 * (now - launched());
    if (st.n == st.room) {
        int64_t room = st.room ? 2 * st.room : 1024;
        step_times *s = realloc(st.steps, (size_t)room * sizeof *s);
        if (!s) return; /* the numbers stop, the training does not */
        st.steps = s;
        st.room = room;
    }
    step_times *s = &st.steps[st.n++];
    s->total = 0;
    for (int i = 0; i < DDP_PARTS; i++) {
        s->part[i] = (float)st.now_part[i];
        s->total += s->part[i];
        st.now_part[i] = 0;
    }
    atomic_store_explicit(&progress->steps, st.n, memory_order_relaxed);
    if (ddp__step_ended) ddp__step_ended(st.n);
}

void ddp_stats_pause(void) {
    memset(st.now_part, 0, sizeof st.now_part);
    st.since = ddp__now();
}

int64_t ddp_stats_steps(void) { return st.n; }

static int by_value(const void *a, const void *b) {
    float x = *(const float *)a, y = *(const float *)b;
    return (x > y) - (x < y);
}

int64_t ddp_stats_summary(int64_t skip, double *median_step, double *mean_step, double *parts) {
    int64_t n = st.n - skip;
    if (n <= 0) {
        skip = 0;
        n = st.n;
    }
    if (parts) memset(parts, 0, DDP_PARTS * sizeof *parts);
    *median_step = *mean_step = 0;
    float *t = n > 0 ? malloc((size_t)n * sizeof *t) : NULL;
    if (!t) return 0;
    for (int64_t i = 0; i < n; i++) {
        const step_times *s = &st.steps[skip + i];
        t[i] = s->total;
        *mean_step += s->total / (double)n;
        if (parts)
            for (int k = 0; k < DDP_PARTS; k++) parts[k] += s->part[k] / (double)n;
    }
    qsort(t, (size_t)n, sizeof *t, by_value);
    *median_step = n % 2 ? t[n / 2] : 0.5 * (t[n / 2 - 1] + t[n / 2]);
    free(t);
    return n;
}

void ddp_stats_mark(const char *name) {
    if (st.n_marks == MAX_MARKS) return;
    snprintf(st.marks[st.n_marks].name, sizeof st.marks[0].name, "%s", name);
    st.marks[st.n_marks++].ms = 1e3 * (ddp__now() - launched());
}

int ddp_stats_mark_get(int i, const char **name, double *ms) {
    if (i < 0 || i >= st.n_marks) return DDP_EINVAL;
    *name = st.marks[i].name;
    *ms = st.marks[i].ms;
    return 0;
}

double ddp_stats_first_step_ms(void) { return st.first_step_ms; }
