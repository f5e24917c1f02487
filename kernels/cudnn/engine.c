/* engine.c -- cuDNN's engines for a graph: what its heuristics offer, what may be used of that, plans, and running them. */
#include "engine.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- descriptors that are not a graph's -------------------------------------------------------------------------- */

static void drop(cg_desc d) {
    if (d) ddp__cuda.cudnnBackendDestroyDescriptor(d);
}

/* The newest descriptors of g, all but `keep`, are not wanted any more. */
static void drop_newest(cg_graph *g, int keep) {
    while (g->n_made > keep) drop(g->made[--g->n_made]);
}

/* Takes the newest descriptor out of g's hands. */
static cg_desc taken(cg_graph *g) { return g->status < 0 ? NULL : g->made[--g->n_made]; }

cg_desc cg_device(cg_graph *g, cudnnHandle_t handle, const char *json) {
    int keep = g->n_made;
    cg_desc d = cg_make(g, CUDNN_BACKEND_DEVICEPROP_DESCRIPTOR);
    if (json) cg_set(g, d, CUDNN_ATTR_DEVICEPROP_JSON_REPRESENTATION, CUDNN_TYPE_CHAR, (int64_t)strlen(json) + 1, json);
    else cg_set(g, d, CUDNN_ATTR_DEVICEPROP_HANDLE, CUDNN_TYPE_HANDLE, 1, &handle);
    cg_finalize(g, d, "a device's properties");
    if (g->status < 0) drop_newest(g, keep);
    return taken(g);
}

/* ---- what an engine does ----------------------------------------------------------------------------------------- */

static unsigned notes_of(cg_desc engine, cudnnBackendAttributeName_t name, cudnnBackendAttributeType_t type) {
    int note[32];
    int64_t n = 0;
    unsigned bits = 0;
    if (ddp__cuda.cudnnBackendGetAttribute(engine, name, type, 32, &n, note) != CUDNN_STATUS_SUCCESS) return 0;
    for (int64_t i = 0; i < n && i < 32; i++)
        if (note[i] >= 0 && note[i] < 32) bits |= 1u << note[i];
    return bits;
}

static bool allowed(const cg_filter *f, unsigned notes) {
    const unsigned transforms = 1u << CUDNN_NUMERICAL_NOTE_FFT | 1u << CUDNN_NUMERICAL_NOTE_WINOGRAD |
                                1u << CUDNN_NUMERICAL_NOTE_WINOGRAD_TILE_4x4 |
                                1u << CUDNN_NUMERICAL_NOTE_WINOGRAD_TILE_6x6 |
                                1u << CUDNN_NUMERICAL_NOTE_WINOGRAD_TILE_13x13;
    if (f->deterministic && (notes & 1u << CUDNN_NUMERICAL_NOTE_NONDETERMINISTIC)) return false;
    if (!f->winograd && (notes & transforms)) return false;
    if (notes & 1u << CUDNN_NUMERICAL_NOTE_REDUCED_PRECISION_REDUCTION) return false;
    if (!f->is_f32 || f->tensor_f32) return true;
    return !(notes & (1u << CUDNN_NUMERICAL_NOTE_TENSOR_CORE | 1u << CUDNN_NUMERICAL_NOTE_DOWN_CONVERT_INPUTS));
}

/* ---- a configuration, read --------------------------------------------------------------------------------------- */

static int read_knobs(cg_graph *g, cg_desc config, cg_choice *c) {
    int keep = g->n_made;
    int64_t n = 0, one;
    cg_desc knob[CG_KNOBS];
    for (int i = 0; i < CG_KNOBS; i++) knob[i] = cg_make(g, CUDNN_BACKEND_KNOB_CHOICE_DESCRIPTOR);
    if (g->status == 0)
        cg_check(g,
                 ddp__cuda.cudnnBackendGetAttribute(config, CUDNN_ATTR_ENGINECFG_KNOB_CHOICES,
                                                    CUDNN_TYPE_BACKEND_DESCRIPTOR, CG_KNOBS, &n, knob),
                 "read an engine's knobs");
    if (n > CG_KNOBS) cg_fail(g, DDP_ENOSUP, "an engine of %lld knobs", (long long)n);
    for (c->n_knobs = 0; c->n_knobs < n && g->status == 0; c->n_knobs++) {
        cudnnBackendKnobType_t type = 0;
        int64_t value = 0;
        cg_desc d = knob[c->n_knobs];
        cudnnStatus_t s = ddp__cuda.cudnnBackendGetAttribute(d, CUDNN_ATTR_KNOB_CHOICE_KNOB_TYPE, CUDNN_TYPE_KNOB_TYPE,
                                                             1, &one, &type);
        if (s == CUDNN_STATUS_SUCCESS)
            s = ddp__cuda.cudnnBackendGetAttribute(d, CUDNN_ATTR_KNOB_CHOICE_KNOB_VALUE, CUDNN_TYPE_INT64, 1, &one,
                                                   &value);
        cg_check(g, s, "read a knob");
        c->knob[c->n_knobs].type = type;
        c->knob[c->n_knobs].value = value;
    }
    drop_newest(g, keep);
    return g->status;
}

/* Engine, knobs and notes of a configuration. */
static int read_config(cg_graph *g, cg_desc config, cg_plan *p) {
    int keep = g->n_made;
    int64_t n = 0;
    cg_desc engine = cg_make(g, CUDNN_BACKEND_ENGINE_DESCRIPTOR);
    if (!engine) return g->status;
    cudnnStatus_t s = ddp__cuda.cudnnBackendGetAttribute(config, CUDNN_ATTR_ENGINECFG_ENGINE,
                                                         CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &n, (void *)&engine);
    if (s == CUDNN_STATUS_SUCCESS)
        s = ddp__cuda.cudnnBackendGetAttribute(engine, CUDNN_ATTR_ENGINE_GLOBAL_INDEX, CUDNN_TYPE_INT64, 1, &n,
                                               &p->choice.engine);
    cg_check(g, s, "read an engine");
    p->notes = notes_of(engine, CUDNN_ATTR_ENGINE_NUMERICAL_NOTE, CUDNN_TYPE_NUMERICAL_NOTE);
    p->behavior = notes_of(engine, CUDNN_ATTR_ENGINE_BEHAVIOR_NOTE, CUDNN_TYPE_BEHAVIOR_NOTE);
    drop_newest(g, keep);
    return g->status < 0 ? g->status : read_knobs(g, config, &p->choice);
}

/* ---- plans ------------------------------------------------------------------------------------------------------- */

/* The plan d, which has its attributes, is made ready. False where cuDNN does not make it: g has failed. */
static bool finish_plan(cg_graph *g, cg_desc d, cg_plan *p) {
    int64_t n = 0;
    cg_finalize(g, d, "a plan");
    if (g->status == 0)
        cg_check(g,
                 ddp__cuda.cudnnBackendGetAttribute(d, CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE, CUDNN_TYPE_INT64, 1,
                                                    &n, &p->workspace),
                 "read a plan's workspace");
    p->plan = d;
    return g->status == 0;
}

/* A plan of `config`. */
static bool make_plan(cg_graph *g, cg_desc device, cg_desc config, cg_plan *p) {
    cg_desc d = cg_make(g, CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR);
    cg_set_desc(g, d, CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG, config);
    cg_set_desc(g, d, CUDNN_ATTR_EXECUTION_PLAN_DEVICEPROP, device);
    return finish_plan(g, d, p);
}

/* config becomes g's; from had it. */
static void adopt(cg_graph *g, cg_graph *from, cg_desc config) {
    if (g->n_made == CG_MADE) return; /* it stays behind, and ends with `from`: the plan goes on without */
    for (int i = 0; i < from->n_made; i++)
        if (from->made[i] == config) {
            g->made[g->n_made++] = config;
            from->made[i] = NULL;
        }
}

/* The plan of one configuration, unless cuDNN does not make it or it wants too much: g is then as it was. */
static bool try_config(cg_graph *g, cg_graph *from, cg_desc device, const cg_filter *f, cg_desc config, cg_plan *p) {
    int keep = g->n_made;
    if (read_config(from, config, p) < 0 || !allowed(f, p->notes)) return false;
    if (make_plan(g, device, config, p) && p->workspace <= f->workspace) {
        adopt(g, from, config);
        return true;
    }
    if (g->status == 0)
        snprintf(g->why, sizeof g->why, "an engine wants %lld bytes of workspace", (long long)p->workspace);
    g->status = 0; /* its text stays, for where nothing else is found */
    drop_newest(g, keep);
    return false;
}

/* One mode of cuDNN's heuristics: plans are added at out[have..most). Returns how many there are then. */
static int plans_of_mode(cg_graph *g, cg_desc device, const cg_filter *f, cudnnBackendHeurMode_t mode, int have,
                         int most, cg_plan *out) {
    cg_graph t; /* what heuristics and their results live in; failures stay in it */
    cg_desc config[CG_CONFIGS];
    int64_t n = 0;
    cg_start(&t, g->op);
    cg_desc h = cg_make(&t, CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR);
    cg_set_desc(&t, h, CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH, g->graph);
    cg_set_enum(&t, h, CUDNN_ATTR_ENGINEHEUR_MODE, CUDNN_TYPE_HEUR_MODE, (int)mode);
    cg_set_desc(&t, h, CUDNN_ATTR_ENGINEHEUR_DEVICEPROP, device);
    cg_finalize(&t, h, "heuristics");
    for (int i = 0; i < CG_CONFIGS; i++) config[i] = cg_make(&t, CUDNN_BACKEND_ENGINECFG_DESCRIPTOR);
    if (t.status == 0)
        cg_check(&t,
                 ddp__cuda.cudnnBackendGetAttribute(h, CUDNN_ATTR_ENGINEHEUR_RESULTS, CUDNN_TYPE_BACKEND_DESCRIPTOR,
                                                    CG_CONFIGS, &n, config),
                 "read what heuristics found");
    for (int64_t i = 0; i < n && i < CG_CONFIGS && have < most && t.status == 0; i++)
        if (try_config(g, &t, device, f, config[i], &out[have])) have++;
    if (t.status < 0 && !g->why[0]) memcpy(g->why, t.why, sizeof g->why);
    cg_free(&t);
    return have;
}

int cg_plans(cg_graph *g, cg_desc device, const cg_filter *f, int most, cg_plan *out) {
    if (g->status < 0) return 0;
    int n = plans_of_mode(g, device, f, CUDNN_HEUR_MODE_A, 0, most, out);
    if (n == 0) n = plans_of_mode(g, device, f, CUDNN_HEUR_MODE_FALLBACK, 0, most, out);
    if (n == 0) {
        char last[160];
        snprintf(last, sizeof last, "%.150s", g->why);
        cg_fail(g, DDP_ENOSUP, "cuDNN has no engine for this%s%s%s", last[0] ? " (" : "", last, last[0] ? ")" : "");
    }
    return n;
}

int cg_plan_of(cg_graph *g, cg_desc device, const cg_choice *c, cg_plan *out) {
    int keep = g->n_made;
    cg_desc knob[CG_KNOBS], e = cg_make(g, CUDNN_BACKEND_ENGINE_DESCRIPTOR);
    cg_set_desc(g, e, CUDNN_ATTR_ENGINE_OPERATION_GRAPH, g->graph);
    cg_set(g, e, CUDNN_ATTR_ENGINE_GLOBAL_INDEX, CUDNN_TYPE_INT64, 1, &c->engine);
    cg_set_desc(g, e, CUDNN_ATTR_ENGINE_DEVICEPROP, device);
    cg_finalize(g, e, "an engine");
    for (int i = 0; i < c->n_knobs; i++) {
        knob[i] = cg_make(g, CUDNN_BACKEND_KNOB_CHOICE_DESCRIPTOR);
        cg_set_enum(g, knob[i], CUDNN_ATTR_KNOB_CHOICE_KNOB_TYPE, CUDNN_TYPE_KNOB_TYPE, (int)c->knob[i].type);
        cg_set(g, knob[i], CUDNN_ATTR_KNOB_CHOICE_KNOB_VALUE, CUDNN_TYPE_INT64, 1, &c->knob[i].value);
        cg_finalize(g, knob[i], "a knob");
    }
    cg_desc config = cg_make(g, CUDNN_BACKEND_ENGINECFG_DESCRIPTOR);
    cg_set_desc(g, config, CUDNN_ATTR_ENGINECFG_ENGINE, e);
    if (c->n_knobs)
        cg_set(g, config, CUDNN_ATTR_ENGINECFG_KNOB_CHOICES, CUDNN_TYPE_BACKEND_DESCRIPTOR, c->n_knobs, knob);
    cg_finalize(g, config, "an engine's configuration");
    if (g->status == 0) read_config(g, config, out);
    if (g->status == 0) make_plan(g, device, config, out);
    if (g->status < 0) drop_newest(g, keep);
    return g->status;
}

char *cg_plan_text(const cg_plan *p) {
    int64_t n = 0;
    const cudnnBackendAttributeName_t name = CUDNN_ATTR_EXECUTION_PLAN_JSON_REPRESENTATION;
    if (ddp__cuda.cudnnBackendGetAttribute(p->plan, name, CUDNN_TYPE_CHAR, 0, &n, NULL) || n <= 0) return NULL;
    char *text = calloc(1, (size_t)n + 1);
    if (text && ddp__cuda.cudnnBackendGetAttribute(p->plan, name, CUDNN_TYPE_CHAR, n, &n, text) == CUDNN_STATUS_SUCCESS)
        return text;
    free(text);
    return NULL;
}

int cg_plan_of_text(cg_graph *g, cg_desc device, const char *text, const cg_choice *choice, cg_plan *out) {
    int keep = g->n_made;
    cg_desc d = cg_make(g, CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR);
    memset(out, 0, sizeof *out);
    out->choice = *choice;
    cg_set_desc(g, d, CUDNN_ATTR_EXECUTION_PLAN_DEVICEPROP, device);
    cg_set(g, d, CUDNN_ATTR_EXECUTION_PLAN_JSON_REPRESENTATION, CUDNN_TYPE_CHAR, (int64_t)strlen(text) + 1, text);
    if (!finish_plan(g, d, out)) drop_newest(g, keep);
    return g->status;
}

/* ---- running ----------------------------------------------------------------------------------------------------- */

int cg_run(cg_graph *g, const cg_plan *p, cudnnHandle_t handle, int n, const int64_t *uid, void *const *ptr,
           void *workspace) {
    int keep = g->n_made;
    cg_desc d = cg_make(g, CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR);
    cg_set(g, d, CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS, CUDNN_TYPE_INT64, n, uid);
    cg_set(g, d, CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS, CUDNN_TYPE_VOID_PTR, n, ptr);
    cg_set(g, d, CUDNN_ATTR_VARIANT_PACK_WORKSPACE, CUDNN_TYPE_VOID_PTR, 1, &workspace);
    cg_finalize(g, d, "the tensors of a run");
    if (g->status == 0) cg_check(g, ddp__cuda.cudnnBackendExecute(handle, p->plan, d), "run");
    drop_newest(g, keep);
    return g->status;
}
