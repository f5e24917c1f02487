/* check_nan.c -- looks for NaN and infinities in the results of ops, and says which op of which module made the first. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../mem/device.h"
#include "../op/op.h"

/* ---- modules: names by number, from 1 ---- */

static _Thread_local struct {
    char **names;
    int n;
} modules;

static int number_of(const char *name) {
    for (int i = 0; i < modules.n; i++)
        if (strcmp(modules.names[i], name) == 0) return i + 1;
    char **more = realloc(modules.names, ((size_t)modules.n + 1) * sizeof *more);
    if (!more) return 0;
    modules.names = more;
    modules.names[modules.n] = strdup(name);
    return modules.names[modules.n] ? ++modules.n : 0;
}

int ddp_check_nan_enter(const char *module) {
    int before = ddp__op_where.module;
    ddp__op_where.module = module ? number_of(module) : 0;
    return before;
}

void ddp_check_nan_leave(int before) { ddp__op_where.module = before; }

/* ---- looking ---- */

typedef struct census {
    ddp_dtype dtype;
    int64_t nan, inf;
} census;

/* No exponent is all ones: true of almost every run, so it is seen first and fast. */
static bool all_finite(ddp_dtype dtype, const void *p, int64_t n) {
    int bad = 0;
    if (dtype == DDP_F32)
        for (int64_t i = 0; i < n; i++) bad |= (((const uint32_t *)p)[i] & 0x7f800000u) == 0x7f800000u;
    else if (dtype == DDP_F64)
        for (int64_t i = 0; i < n; i++) bad |= (((const uint64_t *)p)[i] >> 52 & 0x7ff) == 0x7ff;
    else {
        uint16_t mask = dtype == DDP_F16 ? 0x7c00 : 0x7f80;
        for (int64_t i = 0; i < n; i++) bad |= (((const uint16_t *)p)[i] & mask) == mask;
    }
    return !bad;
}

static void count_run(void *ctx, char *const *ptr, const int64_t *stride, int64_t n) {
    census *c = ctx;
    if (stride[0] == 1 && all_finite(c->dtype, ptr[0], n)) return;
    for (int64_t i = 0; i < n; i++) {
        double v = ddp__load(c->dtype, ptr[0], i * stride[0]);
        c->nan += isnan(v) != 0;
        c->inf += isinf(v) != 0;
    }
}

/* Of t, an input or a result of call; a status. A device counts by itself, and is waited for. */
static int count(const ddp_call *call, ddp_tensor *t, census *c) {
    *c = (census){.dtype = t->m.dtype};
    if (!ddp__is_float(c->dtype) || t->numel == 0) return 0;
    if (t->m.device != DDP_CPU) {
        int64_t bad[2] = {0, 0};
        int st = ddp__device_of(t->m.device)->count_bad(call, t, bad);
        c->nan = bad[0];
        c->inf = bad[1];
        return st;
    }
    ddp_iter it;
    ddp__iter_init(&it, 1, &t);
    ddp__iter_run(&it, count_run, c);
    return 0;
}

/* ---- saying ---- */

/* "3 NaN and 1 infinity among the 20 elements of f32 [4,5]" */
static const char *describe(const census *c, const ddp_tensor *t, char *buf, size_t n) {
    char nan[32] = "", inf[48] = "";
    if (c->nan) snprintf(nan, sizeof nan, "%lld NaN", (long long)c->nan);
    if (c->inf)
        snprintf(inf, sizeof inf, "%s%lld %s", c->nan ? " and " : "", (long long)c->inf,
                 c->inf == 1 ? "infinity" : "infinities");
    snprintf(buf, n, "%s%s among the %lld elements of %s %s", nan, inf, (long long)t->numel, ddp_dtype_name(t->m.dtype),
             DDP_SHAPE_TEXT(&t->m));
    return buf;
}

/* "div, in the gradient of sqrt, in layer1.0.act (Sqrt)" */
static const char *who(const ddp_call *c, char *buf, size_t n) {
    const char *of = ddp__op_where.gradient_of;
    int module = ddp__op_where.module;
    bool known = module > 0 && module <= modules.n;
    snprintf(buf, n, "%s%s%s%s%s", c->op->name, of ? ", in the gradient of " : "", of ? of : "",
             known ? (of ? ", in " : " in ") : "", known ? modules.names[module - 1] : "");
    return buf;
}

static int fail_made(const ddp_call *c, const census *made, int out) {
    char a[256], b[256];
    return ddp__fail(DDP_EINVAL, "check_nan: %s made %s", who(c, a, sizeof a),
                     describe(made, c->out[out], b, sizeof b));
}

static int fail_came_in(const ddp_call *c, const census *had, int i) {
    char a[256], b[256];
    const char *name = c->op->in_names[c->op->lists ? i / (c->n_in / c->op->n_in) : i];
    return ddp__fail(DDP_EINVAL,
                     "check_nan: %s got %s in its input %s: from data, a parameter, or what ran before the check",
                     who(c, a, sizeof a), describe(had, c->in[i], b, sizeof b), name);
}

/* Made here: a NaN where no input has one, an infinity where no input has either. A NaN that came in is told as such. */
static int check(const ddp_call *c) {
    if (c->n_in == 0 || (c->op->flags & DDP_OPF_VIEW) || c->op->id == DDP_OP_fill_) return 0;
    census made, had;
    for (int k = 0; k < c->op->n_out; k++) {
        int st = count(c, c->out[k], &made);
        if (st < 0) return st;
        if (!made.nan && !made.inf) continue;
        bool came_in = false;
        for (int i = 0; i < c->n_in; i++) {
            if (!c->in[i] || c->in[i] == c->out[0]) continue; /* written in place: its old values are gone */
            if ((st = count(c, c->in[i], &had)) < 0) return st;
            if (had.nan && made.nan) return fail_came_in(c, &had, i);
            came_in |= had.nan || had.inf;
        }
        if (made.nan || !came_in) return fail_made(c, &made, k);
    }
    return 0;
}

int ddp_set_check_nan(int on) {
    int before = ddp__slots.check != NULL;
    ddp__slots.check = on ? check : NULL;
    return before;
}
