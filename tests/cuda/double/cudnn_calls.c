/* cudnn_calls.c -- cuDNN's entry points as the program calls them: recorded, checked by the real library, run on the CPU.
 *
 *   DDP_DOUBLE_CUDNN=90000               another version
 *   DDP_DOUBLE_CUDNN_CHECK=0             the real library is not asked
 *   DDP_DOUBLE_FAIL=cudnnX:K[:STATUS]    the K-th call of cudnnX fails (several: with commas)
 *   DDP_DOUBLE_LOG=FILE                  a line a run
 */
#include "cudnn_double.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { ENGINES = 3, MADE_UP_WORKSPACE = 1 << 16 }; /* where no real library offers any */

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static _Thread_local char last[512];
static atomic_long handles;

/* ---- failures ---------------------------------------------------------------------------------------------------------- */

static cudnnStatus_t fail(cudnnStatus_t s, const char *why) {
    snprintf(last, sizeof last, "%s", why);
    return s;
}

/* How often each function was called. */
static struct {
    const char *name;
    long calls;
} counted[16];

/* The K-th call of `name`, when DDP_DOUBLE_FAIL asks for that; `standard` where it gives no status. */
static cudnnStatus_t seeded(const char *name, cudnnStatus_t standard) {
    const char *s = getenv("DDP_DOUBLE_FAIL");
    size_t length = strlen(name);
    int i = 0, status = (int)standard;
    long k = 0;
    pthread_mutex_lock(&lock);
    while (counted[i].name && strcmp(counted[i].name, name) != 0) i++;
    counted[i].name = name;
    long call = ++counted[i].calls;
    pthread_mutex_unlock(&lock);
    for (; s && *s; s = strchr(s, ',') ? strchr(s, ',') + 1 : "") {
        if (strncmp(s, name, length) != 0 || s[length] != ':') continue;
        if (sscanf(s + length + 1, "%ld:%d", &k, &status) >= 1 && k == call)
            return fail((cudnnStatus_t)status, "the double was told to fail");
    }
    return CUDNN_STATUS_SUCCESS;
}
#define SEEDED(name, standard)                             \
    do {                                                   \
        cudnnStatus_t seeded_ = seeded(#name, (standard)); \
        if (seeded_) return seeded_;                       \
    } while (0)

/* Counts from the start again; returns how often `name` was called. */
long ddp_double_cudnn_calls(const char *name);
long ddp_double_cudnn_calls(const char *name) {
    long calls = 0;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < 16; i++) {
        if (counted[i].name && strcmp(counted[i].name, name) == 0) calls = counted[i].calls;
        counted[i].calls = 0;
    }
    pthread_mutex_unlock(&lock);
    return calls;
}

/* What the real library said. */
static cudnnStatus_t answered(cudnnStatus_t s) {
    if (s) {
        last[0] = 0;
        real()->last_error(last, sizeof last);
    }
    return s;
}

/* ---- the library --------------------------------------------------------------------------------------------------------- */

size_t cudnnGetVersion(void) {
    const char *s = getenv("DDP_DOUBLE_CUDNN");
    return s && *s ? (size_t)atol(s) : real()->version ? real()->version : CUDNN_VERSION;
}

const char *cudnnGetErrorString(cudnnStatus_t s) {
    if (real()->there) return real()->error_string(s);
    switch ((int)s) {
        case CUDNN_STATUS_SUCCESS: return "CUDNN_STATUS_SUCCESS";
        case CUDNN_STATUS_EXECUTION_FAILED: return "CUDNN_STATUS_EXECUTION_FAILED";
        default:
            return s < 3000   ? "CUDNN_STATUS_BAD_PARAM"
                   : s < 4000 ? "CUDNN_STATUS_NOT_SUPPORTED"
                              : "CUDNN_STATUS_INTERNAL_ERROR";
    }
}

void cudnnGetLastErrorString(char *message, size_t room) { snprintf(message, room, "%s", last); }

cudnnStatus_t cudnnCreate(cudnnHandle_t *out) {
    SEEDED(cudnnCreate, CUDNN_STATUS_NOT_INITIALIZED);
    handle *h = calloc(1, sizeof *h);
    if (!h) abort();
    h->magic = HANDLE;
    atomic_fetch_add(&handles, 1);
    *out = (cudnnHandle_t)h;
    return CUDNN_STATUS_SUCCESS;
}

static handle *handle_of(cudnnHandle_t h) {
    handle *p = (handle *)h;
    return p && p->magic == HANDLE ? p : NULL;
}

cudnnStatus_t cudnnDestroy(cudnnHandle_t h) {
    handle *p = handle_of(h);
    if (!p) return fail(CUDNN_STATUS_BAD_PARAM, "not a handle");
    p->magic = 0;
    free(p);
    atomic_fetch_sub(&handles, 1);
    return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnSetStream(cudnnHandle_t h, cudaStream_t stream) {
    SEEDED(cudnnSetStream, CUDNN_STATUS_BAD_PARAM);
    handle *p = handle_of(h);
    if (!p) return fail(CUDNN_STATUS_BAD_PARAM, "not a handle");
    p->stream = stream;
    return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnGetStream(cudnnHandle_t h, cudaStream_t *stream) {
    handle *p = handle_of(h);
    if (!p) return fail(CUDNN_STATUS_BAD_PARAM, "not a handle");
    *stream = p->stream;
    return CUDNN_STATUS_SUCCESS;
}

/* Does the real library stand behind this one? */
int ddp_double_cudnn_checks(void);
int ddp_double_cudnn_checks(void) { return real()->there; }

/* Descriptors and handles that were not given back. */
long ddp_double_cudnn_alive(void);
long ddp_double_cudnn_alive(void) { return nodes_alive() + atomic_load(&handles); }

/* ---- descriptors ------------------------------------------------------------------------------------------------------------ */

cudnnStatus_t cudnnBackendCreateDescriptor(cudnnBackendDescriptorType_t type, cudnnBackendDescriptor_t *out) {
    SEEDED(cudnnBackendCreateDescriptor, CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED);
    void *r = NULL;
    if (real()->there && type != CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR) {
        cudnnStatus_t s = real()->create(type, &r);
        if (s) return answered(s);
    }
    node *n = node_new((int)type);
    n->real = r;
    *out = n;
    return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnBackendDestroyDescriptor(cudnnBackendDescriptor_t d) {
    node *n = node_of(d);
    if (!n) return fail(CUDNN_STATUS_BAD_PARAM, "not a descriptor, or destroyed before");
    pthread_mutex_lock(&lock);
    node_drop(n);
    pthread_mutex_unlock(&lock);
    return CUDNN_STATUS_SUCCESS;
}

static cudnnStatus_t set_real(node *n, int name, int type, int64_t count, const void *v) {
    void *r[64];
    if (!n->real || type == CUDNN_TYPE_HANDLE) return CUDNN_STATUS_SUCCESS;
    if (type != CUDNN_TYPE_BACKEND_DESCRIPTOR) return answered(real()->set(n->real, name, type, count, v));
    if (count > 64) return fail(CUDNN_STATUS_BAD_PARAM, "the double takes 64 descriptors at once");
    for (int64_t i = 0; i < count; i++) r[i] = ((node *const *)v)[i]->real;
    return answered(real()->set(n->real, name, type, count, r));
}

/* A plan's JSON carries the graph behind a line of its own. */
static const char GRAPH_MARK[] = "\n#graph ";

static cudnnStatus_t set_json(node *n, int name, const char *v, int64_t count) {
    const char *mark = memmem(v, (size_t)count, GRAPH_MARK, sizeof GRAPH_MARK - 1);
    if (!mark || v[count - 1]) return fail(CUDNN_STATUS_BAD_PARAM, "not a plan's JSON");
    node_drop(n->graph);
    n->graph = node_from_text(mark + sizeof GRAPH_MARK - 1);
    if (!n->graph) return fail(CUDNN_STATUS_BAD_PARAM, "a plan's JSON is damaged");
    if (!n->real) return CUDNN_STATUS_SUCCESS;
    char *plain = strndup(v, (size_t)(mark - v));
    cudnnStatus_t s = answered(real()->set(n->real, name, CUDNN_TYPE_CHAR, (int64_t)(mark - v) + 1, plain));
    free(plain);
    return s;
}

static cudnnStatus_t set(node *n, int name, int type, int64_t count, const void *v) {
    if (n->final) return fail(CUDNN_STATUS_BAD_PARAM, "an attribute is set after finalize");
    if (type == CUDNN_TYPE_BACKEND_DESCRIPTOR)
        for (int64_t i = 0; i < count; i++) {
            node *child = node_of(((const cudnnBackendDescriptor_t *)v)[i]);
            if (!child) return fail(CUDNN_STATUS_BAD_PARAM, "not a descriptor");
            if (!child->final) return fail(CUDNN_STATUS_BAD_PARAM_NOT_FINALIZED, "a descriptor that is not finalized");
        }
    if (name == CUDNN_ATTR_EXECUTION_PLAN_JSON_REPRESENTATION) return set_json(n, name, v, count);
    cudnnStatus_t s = set_real(n, name, type, count, v);
    if (s) return s;
    node_set(n, name, type, count, v);
    return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnBackendSetAttribute(cudnnBackendDescriptor_t d, cudnnBackendAttributeName_t name,
                                       cudnnBackendAttributeType_t type, int64_t count, const void *v) {
    SEEDED(cudnnBackendSetAttribute, CUDNN_STATUS_BAD_PARAM);
    node *n = node_of(d);
    if (!n) return fail(CUDNN_STATUS_BAD_PARAM, "not a descriptor");
    if (count < 0 || (count && !v)) return fail(CUDNN_STATUS_BAD_PARAM_NULL_POINTER, "no values");
    pthread_mutex_lock(&lock);
    cudnnStatus_t s = set(n, (int)name, (int)type, count, v);
    pthread_mutex_unlock(&lock);
    return s;
}

/* ---- finalize: what a descriptor is for is noted, the rest is the real library's -------------------------------------------- */

static void set_graph(node *n, node *from) {
    if (!from) return;
    node_keep(from);
    node_drop(n->graph);
    n->graph = from;
}

static cudnnStatus_t note_graph(node *n) {
    switch (n->type) {
        case CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR:
            set_graph(n, node_child(n, CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH));
            break;
        case CUDNN_BACKEND_ENGINE_DESCRIPTOR:
            set_graph(n, node_child(n, CUDNN_ATTR_ENGINE_OPERATION_GRAPH));
            n->engine = node_int(n, CUDNN_ATTR_ENGINE_GLOBAL_INDEX, 0);
            break;
        case CUDNN_BACKEND_ENGINECFG_DESCRIPTOR: {
            node *e = node_child(n, CUDNN_ATTR_ENGINECFG_ENGINE);
            if (e) set_graph(n, e->graph);
            if (e) n->engine = e->engine;
            break;
        }
        case CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR: {
            node *c = node_child(n, CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG);
            if (c) set_graph(n, c->graph);
            if (c) n->engine = c->engine;
            break;
        }
        default: return CUDNN_STATUS_SUCCESS;
    }
    return n->graph ? CUDNN_STATUS_SUCCESS : fail(CUDNN_STATUS_BAD_PARAM, "there is no graph that this is for");
}

/* The real library gets the profile's device where the program gave a handle. */
static cudnnStatus_t give_profile(node *n) {
    if (!n->real || !node_get(n, CUDNN_ATTR_DEVICEPROP_HANDLE)) return CUDNN_STATUS_SUCCESS;
    const char *json = profile();
    return answered(real()->set(n->real, CUDNN_ATTR_DEVICEPROP_JSON_REPRESENTATION, CUDNN_TYPE_CHAR,
                                (int64_t)strlen(json) + 1, json));
}

static cudnnStatus_t finalize(node *n) {
    if (n->final) return CUDNN_STATUS_SUCCESS;
    cudnnStatus_t s = note_graph(n);
    if (!s && n->type == CUDNN_BACKEND_DEVICEPROP_DESCRIPTOR) s = give_profile(n);
    if (!s && n->real) s = answered(real()->finalize(n->real));
    if (s) return s;
    n->final = true;
    if (n->type != CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR) return CUDNN_STATUS_SUCCESS;
    n->workspace = (ENGINES - 1 - n->engine) * MADE_UP_WORKSPACE;
    int64_t one;
    if (n->real)
        s = real()->get(n->real, CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE, CUDNN_TYPE_INT64, 1, &one, &n->workspace);
    return answered(s);
}

cudnnStatus_t cudnnBackendFinalize(cudnnBackendDescriptor_t d) {
    SEEDED(cudnnBackendFinalize, CUDNN_STATUS_NOT_SUPPORTED);
    node *n = node_of(d);
    if (!n) return fail(CUDNN_STATUS_BAD_PARAM, "not a descriptor");
    pthread_mutex_lock(&lock);
    cudnnStatus_t s = finalize(n);
    pthread_mutex_unlock(&lock);
    return s;
}

/* ---- reading ------------------------------------------------------------------------------------------------------------------ */

/* The descriptors at out become what the real library fills in. */
static cudnnStatus_t get_descriptors(node *n, int name, int64_t room, int64_t *count, node **out) {
    void *r[128];
    int64_t have = 0;
    if (room > 128) return fail(CUDNN_STATUS_BAD_PARAM, "the double gives 128 descriptors at once");
    for (int64_t i = 0; i < room; i++) {
        if (!node_of(out[i])) return fail(CUDNN_STATUS_BAD_PARAM, "not a descriptor");
        r[i] = out[i]->real;
    }
    if (n->real) {
        cudnnStatus_t s = real()->get(n->real, name, CUDNN_TYPE_BACKEND_DESCRIPTOR, room, &have, r);
        if (s) return answered(s);
    } else have = name == CUDNN_ATTR_ENGINEHEUR_RESULTS ? ENGINES : name == CUDNN_ATTR_ENGINECFG_ENGINE;
    if (count) *count = have;
    for (int64_t i = 0; i < have && i < room; i++) {
        out[i]->final = true;
        out[i]->engine = name == CUDNN_ATTR_ENGINEHEUR_RESULTS ? i : n->engine;
        set_graph(out[i], n->graph);
    }
    return CUDNN_STATUS_SUCCESS;
}

static cudnnStatus_t get_plan_json(node *n, int64_t room, int64_t *count, char *out) {
    int64_t size = 3;
    char *graph = node_text(n->graph);
    cudnnStatus_t s = CUDNN_STATUS_SUCCESS;
    if (n->real)
        s = real()->get(n->real, CUDNN_ATTR_EXECUTION_PLAN_JSON_REPRESENTATION, CUDNN_TYPE_CHAR, 0, &size, NULL);
    char *own = calloc(1, (size_t)size + 1);
    if (!s && n->real)
        s = real()->get(n->real, CUDNN_ATTR_EXECUTION_PLAN_JSON_REPRESENTATION, CUDNN_TYPE_CHAR, size, &size, own);
    if (!n->real) memcpy(own, "{}", 3);
    int64_t whole = (int64_t)(strlen(own) + strlen(GRAPH_MARK) + strlen(graph) + 1);
    if (!s && count) *count = whole;
    if (!s && room >= whole) snprintf(out, (size_t)room, "%s%s%s", own, GRAPH_MARK, graph);
    else if (!s && room > 0) s = fail(CUDNN_STATUS_BAD_PARAM_SIZE_INSUFFICIENT, "no room for the JSON");
    free(own);
    free(graph);
    return answered(s);
}

/* What the double says of itself where no real library is there. */
static cudnnStatus_t get_made_up(const node *n, int name, int64_t room, int64_t *count, void *out) {
    int64_t none, *c = count ? count : &none;
    *c = 1;
    switch (name) {
        case CUDNN_ATTR_ENGINE_GLOBAL_INDEX:
            if (room) *(int64_t *)out = n->engine;
            return CUDNN_STATUS_SUCCESS;
        case CUDNN_ATTR_OPERATIONGRAPH_ENGINE_GLOBAL_COUNT:
            if (room) *(int64_t *)out = ENGINES;
            return CUDNN_STATUS_SUCCESS;
        case CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE:
            if (room) *(int64_t *)out = n->workspace;
            return CUDNN_STATUS_SUCCESS;
        case CUDNN_ATTR_ENGINE_NUMERICAL_NOTE: /* engine 1: other bits in each run */
            *c = n->engine == 1;
            if (room && *c) *(int *)out = CUDNN_NUMERICAL_NOTE_NONDETERMINISTIC;
            return CUDNN_STATUS_SUCCESS;
        case CUDNN_ATTR_ENGINE_BEHAVIOR_NOTE: *c = 0; return CUDNN_STATUS_SUCCESS;
        default: return fail(CUDNN_STATUS_NOT_SUPPORTED, "the double does not know this attribute");
    }
}

cudnnStatus_t cudnnBackendGetAttribute(cudnnBackendDescriptor_t d, cudnnBackendAttributeName_t name,
                                       cudnnBackendAttributeType_t type, int64_t room, int64_t *count, void *out) {
    SEEDED(cudnnBackendGetAttribute, CUDNN_STATUS_NOT_SUPPORTED);
    node *n = node_of(d);
    if (!n || !n->final) return fail(CUDNN_STATUS_BAD_PARAM_NOT_FINALIZED, "not a finalized descriptor");
    pthread_mutex_lock(&lock);
    cudnnStatus_t s;
    if (type == CUDNN_TYPE_BACKEND_DESCRIPTOR) s = get_descriptors(n, (int)name, room, count, out);
    else if (name == CUDNN_ATTR_EXECUTION_PLAN_JSON_REPRESENTATION) s = get_plan_json(n, room, count, out);
    else if (n->real) s = answered(real()->get(n->real, name, type, room, count, out));
    else s = get_made_up(n, (int)name, room, count, out);
    pthread_mutex_unlock(&lock);
    return s;
}

/* ---- execute ---------------------------------------------------------------------------------------------------------------------- */

static void log_run(const job *j, const node *plan) {
    const char *file = getenv("DDP_DOUBLE_LOG");
    FILE *f = file && *file ? fopen(file, "ae") : NULL;
    if (!f) return;
    fprintf(f, "cudnn %s engine %lld workspace %lld\n", job_name(j), (long long)plan->engine,
            (long long)plan->workspace);
    fclose(f);
}

cudnnStatus_t cudnnBackendExecute(cudnnHandle_t h, cudnnBackendDescriptor_t plan, cudnnBackendDescriptor_t pack) {
    SEEDED(cudnnBackendExecute, CUDNN_STATUS_EXECUTION_FAILED);
    node *p = node_of(plan), *v = node_of(pack);
    handle *hp = handle_of(h);
    if (!hp || !p || !v) return fail(CUDNN_STATUS_BAD_PARAM, "a handle, a plan and a variant pack are needed");
    if (!p->final || !v->final || p->type != CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR ||
        v->type != CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR)
        return fail(CUDNN_STATUS_BAD_PARAM_NOT_FINALIZED, "not a finalized plan and variant pack");
    const char *why = NULL;
    pthread_mutex_lock(&lock);
    job *j = job_new(p, v, &why);
    if (j) log_run(j, p);
    pthread_mutex_unlock(&lock);
    if (!j) return fail(CUDNN_STATUS_BAD_PARAM, why);
    if (cudart()->enqueue) cudart()->enqueue(hp->stream, job_run, job_drop, j, job_name(j));
    else { /* no runtime's double: there are no streams, a run is at once */ job_run(j);
        job_drop(j);
    }
    return CUDNN_STATUS_SUCCESS;
}
