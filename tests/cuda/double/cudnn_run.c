/* cudnn_run.c -- computes a graph: takes the program's tensors, runs operations as their inputs become ready, puts results back. */
#include "cudnn_double.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { VALUES = 96, POINTERS = 64, NAME = 160 };

struct job {
    node *graph;
    char name[NAME];
    int n, n_values;
    int64_t uid[POINTERS];
    void *memory[POINTERS];
    double number[POINTERS]; /* bytes of those by value */
    void *workspace;
    int64_t workspace_bytes;
    value values[VALUES];
};

/* ---- operations: what they are called, read and write --------------------------------------------------------------------- */

typedef struct operation {
    int type;
    const char *name;
    const char *(*run)(const operands *o);
    int in[10], out[6]; /* attributes, ended by 0 */
} operation;

static const operation operations[] = {
    {CUDNN_BACKEND_OPERATION_CONVOLUTION_FORWARD_DESCRIPTOR,
     "convolution",
     run_convolution,
     {CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_X, CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_W},
     {CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_Y}},
    {CUDNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_DATA_DESCRIPTOR,
     "grad_input",
     run_convolution,
     {CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_DY, CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_W},
     {CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_DX}},
    {CUDNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_FILTER_DESCRIPTOR,
     "grad_weight",
     run_convolution,
     {CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_DY, CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_X},
     {CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_DW}},
    {CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR,
     "pointwise",
     run_pointwise,
     {CUDNN_ATTR_OPERATION_POINTWISE_XDESC, CUDNN_ATTR_OPERATION_POINTWISE_BDESC, CUDNN_ATTR_OPERATION_POINTWISE_TDESC,
      CUDNN_ATTR_OPERATION_POINTWISE_DYDESC},
     {CUDNN_ATTR_OPERATION_POINTWISE_YDESC, CUDNN_ATTR_OPERATION_POINTWISE_DXDESC}},
    {CUDNN_BACKEND_OPERATION_REDUCTION_DESCRIPTOR,
     "reduction",
     run_reduction,
     {CUDNN_ATTR_OPERATION_REDUCTION_XDESC},
     {CUDNN_ATTR_OPERATION_REDUCTION_YDESC}},
    {CUDNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR,
     "matmul",
     run_matmul,
     {CUDNN_ATTR_OPERATION_MATMUL_ADESC, CUDNN_ATTR_OPERATION_MATMUL_BDESC},
     {CUDNN_ATTR_OPERATION_MATMUL_CDESC}},
    {CUDNN_BACKEND_OPERATION_GEN_STATS_DESCRIPTOR,
     "statistics",
     run_statistics,
     {CUDNN_ATTR_OPERATION_GENSTATS_XDESC},
     {CUDNN_ATTR_OPERATION_GENSTATS_SUMDESC, CUDNN_ATTR_OPERATION_GENSTATS_SQSUMDESC}},
    {CUDNN_BACKEND_OPERATION_RESHAPE_DESCRIPTOR,
     "reshape",
     run_reshape,
     {CUDNN_ATTR_OPERATION_RESHAPE_XDESC},
     {CUDNN_ATTR_OPERATION_RESHAPE_YDESC}},
    {CUDNN_BACKEND_OPERATION_NORM_FORWARD_DESCRIPTOR,
     "norm",
     run_norm_forward,
     {CUDNN_ATTR_OPERATION_NORM_FWD_XDESC, CUDNN_ATTR_OPERATION_NORM_FWD_SCALE_DESC,
      CUDNN_ATTR_OPERATION_NORM_FWD_BIAS_DESC, CUDNN_ATTR_OPERATION_NORM_FWD_EPSILON_DESC,
      CUDNN_ATTR_OPERATION_NORM_FWD_EXP_AVG_FACTOR_DESC, CUDNN_ATTR_OPERATION_NORM_FWD_INPUT_RUNNING_MEAN_DESC,
      CUDNN_ATTR_OPERATION_NORM_FWD_INPUT_RUNNING_VAR_DESC},
     {CUDNN_ATTR_OPERATION_NORM_FWD_YDESC, CUDNN_ATTR_OPERATION_NORM_FWD_MEAN_DESC,
      CUDNN_ATTR_OPERATION_NORM_FWD_INV_VARIANCE_DESC, CUDNN_ATTR_OPERATION_NORM_FWD_OUTPUT_RUNNING_MEAN_DESC,
      CUDNN_ATTR_OPERATION_NORM_FWD_OUTPUT_RUNNING_VAR_DESC}},
    {CUDNN_BACKEND_OPERATION_NORM_BACKWARD_DESCRIPTOR,
     "norm_grad",
     run_norm_backward,
     {CUDNN_ATTR_OPERATION_NORM_BWD_XDESC, CUDNN_ATTR_OPERATION_NORM_BWD_DYDESC,
      CUDNN_ATTR_OPERATION_NORM_BWD_SCALE_DESC, CUDNN_ATTR_OPERATION_NORM_BWD_MEAN_DESC,
      CUDNN_ATTR_OPERATION_NORM_BWD_INV_VARIANCE_DESC},
     {CUDNN_ATTR_OPERATION_NORM_BWD_DXDESC, CUDNN_ATTR_OPERATION_NORM_BWD_DSCALE_DESC,
      CUDNN_ATTR_OPERATION_NORM_BWD_DBIAS_DESC}},
    {CUDNN_BACKEND_OPERATION_RESAMPLE_FWD_DESCRIPTOR,
     "pool",
     run_pool_forward,
     {CUDNN_ATTR_OPERATION_RESAMPLE_FWD_XDESC},
     {CUDNN_ATTR_OPERATION_RESAMPLE_FWD_YDESC}},
    {CUDNN_BACKEND_OPERATION_RESAMPLE_BWD_DESCRIPTOR,
     "pool_grad",
     run_pool_backward,
     {CUDNN_ATTR_OPERATION_RESAMPLE_BWD_DYDESC, CUDNN_ATTR_OPERATION_RESAMPLE_BWD_XDESC,
      CUDNN_ATTR_OPERATION_RESAMPLE_BWD_YDESC},
     {CUDNN_ATTR_OPERATION_RESAMPLE_BWD_DXDESC}},
};

static const operation *operation_of(const node *n) {
    for (size_t i = 0; i < sizeof operations / sizeof *operations; i++)
        if (operations[i].type == n->type) return &operations[i];
    return NULL;
}

/* A graph that the double cannot compute is a hole in the tests: it says so and ends the process. */
static void give_up(const job *j, const char *why) {
    fprintf(stderr, "cuda double: cuDNN graph %s: %s\n", j->name, why);
    abort();
}

/* ---- numbers ------------------------------------------------------------------------------------------------------------------ */

static double bf16(uint16_t h) {
    uint32_t u = (uint32_t)h << 16;
    float f;
    memcpy(&f, &u, 4);
    return f;
}

static uint16_t to_bf16(float f) {
    uint32_t u;
    memcpy(&u, &f, 4);
    if (f != f) return 0x7fc0;
    return (uint16_t)((u + 0x7fff + (u >> 16 & 1)) >> 16);
}

double round_to(int dtype, double v) {
    switch (dtype) {
        case CUDNN_DATA_FLOAT: return (float)v;
        case CUDNN_DATA_HALF: return (double)(_Float16)v;
        case CUDNN_DATA_BFLOAT16: return bf16(to_bf16((float)v));
        case CUDNN_DATA_BOOLEAN: return v != 0;
        default: return v;
    }
}

static double load(int dtype, const void *p, int64_t i) {
    switch (dtype) {
        case CUDNN_DATA_FLOAT: return ((const float *)p)[i];
        case CUDNN_DATA_DOUBLE: return ((const double *)p)[i];
        case CUDNN_DATA_HALF: return (double)((const _Float16 *)p)[i];
        case CUDNN_DATA_BFLOAT16: return bf16(((const uint16_t *)p)[i]);
        case CUDNN_DATA_INT32: return ((const int32_t *)p)[i];
        default: return NAN;
    }
}

static void store(int dtype, void *p, int64_t i, double v) {
    switch (dtype) {
        case CUDNN_DATA_FLOAT: ((float *)p)[i] = (float)v; break;
        case CUDNN_DATA_DOUBLE: ((double *)p)[i] = v; break;
        case CUDNN_DATA_HALF: ((_Float16 *)p)[i] = (_Float16)v; break;
        case CUDNN_DATA_BFLOAT16: ((uint16_t *)p)[i] = to_bf16((float)v); break;
        default: break;
    }
}

static bool known(int dtype) {
    return dtype == CUDNN_DATA_FLOAT || dtype == CUDNN_DATA_DOUBLE || dtype == CUDNN_DATA_HALF ||
           dtype == CUDNN_DATA_BFLOAT16;
}

static int64_t bytes_of(int dtype) { return dtype == CUDNN_DATA_DOUBLE ? 8 : dtype == CUDNN_DATA_FLOAT ? 4 : 2; }

/* ---- tensors -------------------------------------------------------------------------------------------------------------------- */

static int64_t pointer_of(const job *j, int64_t uid) {
    for (int i = 0; i < j->n; i++)
        if (j->uid[i] == uid) return i;
    return -1;
}

static bool flag(const node *n, int name) {
    const attribute *a = node_get(n, name);
    return a && a->n && *(bool *)a->value;
}

static void shape_of(value *v, const node *t) {
    const attribute *size = node_get(t, CUDNN_ATTR_TENSOR_DIMENSIONS), *stride = node_get(t, CUDNN_ATTR_TENSOR_STRIDES);
    v->desc = t;
    v->uid = node_int(t, CUDNN_ATTR_TENSOR_UNIQUE_ID, 0);
    v->dtype = node_enum(t, CUDNN_ATTR_TENSOR_DATA_TYPE, CUDNN_DATA_FLOAT);
    v->is_virtual = flag(t, CUDNN_ATTR_TENSOR_IS_VIRTUAL);
    v->by_value = flag(t, CUDNN_ATTR_TENSOR_IS_BY_VALUE);
    v->nd = (int)size->n;
    v->n = 1;
    for (int k = 0; k < v->nd; k++) {
        int d = v->nd == 4 ? (const int[]){1, 3, 2, 0}[k] : v->nd - 1 - k;
        v->size[d] = ((int64_t *)size->value)[d];
        v->stride[d] = ((int64_t *)stride->value)[d];
        v->step[d] = v->n;
        v->n *= v->size[d];
    }
}

/* Reads the program's tensor (write: puts it back) by its own strides. */
static void transfer(value *v, bool write) {
    int64_t pos[DIMS] = {0}, step[2][DIMS], at[2] = {0, 0};
    memcpy(step[0], v->step, sizeof step[0]);
    memcpy(step[1], v->stride, sizeof step[1]);
    if (v->n == 0) return;
    do
        if (write) store(v->dtype, v->memory, at[1], v->v[at[0]]);
        else v->v[at[0]] = load(v->dtype, v->memory, at[1]);
    while (next_position(v->nd, v->size, pos, 2, step, at));
}

void value_read(value *v) { transfer(v, false); }

static value *value_of(job *j, const node *t) {
    int64_t uid = node_int(t, CUDNN_ATTR_TENSOR_UNIQUE_ID, 0);
    for (int i = 0; i < j->n_values; i++)
        if (j->values[i].uid == uid) return &j->values[i];
    if (j->n_values == VALUES) give_up(j, "too many tensors");
    value *v = &j->values[j->n_values++];
    shape_of(v, t);
    int64_t at = pointer_of(j, uid);
    v->v = malloc(sizeof(double) * (size_t)(v->n ? v->n : 1));
    if (!v->v) abort();
    for (int64_t i = 0; i < v->n; i++) v->v[i] = NAN;
    if (!v->is_virtual) v->memory = v->by_value ? (void *)&j->number[at] : j->memory[at];
    return v;
}

static value *find(void *ctx, const node *op, int attribute) {
    node *t = node_child(op, attribute);
    return t ? value_of(ctx, t) : NULL;
}

/* ---- a job -------------------------------------------------------------------------------------------------------------------------- */

/* Does an operation of the graph write this tensor? */
static bool is_result(const job *j, int64_t uid) {
    const attribute *ops = node_get(j->graph, CUDNN_ATTR_OPERATIONGRAPH_OPS);
    for (int64_t i = 0; i < ops->n; i++) {
        const node *op = ((node **)ops->value)[i];
        const operation *what = operation_of(op);
        for (const int *a = what->out; a < what->out + 6 && *a; a++) {
            const node *t = node_child(op, *a);
            if (t && node_int(t, CUDNN_ATTR_TENSOR_UNIQUE_ID, 0) == uid) return true;
        }
    }
    return false;
}

/* The runtime's double knows what is allocated: all that a tensor may touch must be. */
static void check_range(const job *j, const node *t, const void *p) {
    value v;
    int64_t last = 0;
    memset(&v, 0, sizeof v);
    shape_of(&v, t);
    for (int d = 0; d < v.nd; d++) last += (v.size[d] - 1) * v.stride[d];
    if (v.n > 0 && cudart()->check_range) cudart()->check_range(p, (size_t)((last + 1) * bytes_of(v.dtype)), j->name);
}

/* NULL, or what is wrong with the pointer that a tensor was given. */
static const char *check_pointer(job *j, const node *t) {
    if (!t || flag(t, CUDNN_ATTR_TENSOR_IS_VIRTUAL)) return NULL;
    int64_t at = pointer_of(j, node_int(t, CUDNN_ATTR_TENSOR_UNIQUE_ID, 0)),
            align = node_int(t, CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT, 1);
    int dtype = node_enum(t, CUDNN_ATTR_TENSOR_DATA_TYPE, CUDNN_DATA_FLOAT);
    if (at < 0) return "a tensor of the graph has no pointer";
    if (!j->memory[at]) return "a tensor's pointer is NULL";
    if (!known(dtype)) return "a tensor in memory of a type that the double does not know";
    if (flag(t, CUDNN_ATTR_TENSOR_IS_BY_VALUE)) memcpy(&j->number[at], j->memory[at], (size_t)bytes_of(dtype));
    else if ((uintptr_t)j->memory[at] % (uintptr_t)align)
        return "a tensor's pointer is less aligned than it was said to be";
    else check_range(j, t, j->memory[at]);
    return NULL;
}

static const char *check(job *j) {
    const attribute *ops = node_get(j->graph, CUDNN_ATTR_OPERATIONGRAPH_OPS);
    const char *why = NULL;
    if (!ops) return "a graph without operations";
    for (int64_t i = 0; i < ops->n && !why; i++) {
        const node *op = ((node **)ops->value)[i];
        const operation *what = operation_of(op);
        if (!what) return "an operation that the double does not know";
        size_t length = strlen(j->name);
        snprintf(j->name + length, sizeof j->name - length, "%s%s", length ? "+" : "", what->name);
        for (const int *a = what->in; a < what->in + 10 && *a && !why; a++) why = check_pointer(j, node_child(op, *a));
        for (const int *a = what->out; a < what->out + 6 && *a && !why; a++) why = check_pointer(j, node_child(op, *a));
    }
    return why;
}

job *job_new(node *plan, const node *pack, const char **why) {
    const attribute *uid = node_get(pack, CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS),
                    *ptr = node_get(pack, CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS);
    const attribute *workspace = node_get(pack, CUDNN_ATTR_VARIANT_PACK_WORKSPACE);
    job *j = calloc(1, sizeof *j);
    if (!j) abort();
    node_keep(plan->graph);
    j->graph = plan->graph;
    j->workspace_bytes = plan->workspace;
    j->workspace = workspace ? *(void **)workspace->value : NULL;
    if (!uid || !ptr || uid->n != ptr->n || uid->n > POINTERS) *why = "a variant pack without as many pointers as uids";
    else if (j->workspace_bytes > 0 && !j->workspace) *why = "no workspace";
    else {
        j->n = (int)uid->n;
        memcpy(j->uid, uid->value, uid->bytes);
        memcpy(j->memory, ptr->value, ptr->bytes);
        *why = check(j);
        if (!*why && j->workspace_bytes > 0 && cudart()->check_range)
            cudart()->check_range(j->workspace, (size_t)j->workspace_bytes, "cuDNN's workspace");
    }
    if (!*why) return j;
    job_drop(j);
    return NULL;
}

static void forget_values(job *j) {
    while (j->n_values > 0) free(j->values[--j->n_values].v);
    memset(j->values, 0, sizeof j->values);
}

void job_drop(void *p) {
    job *j = p;
    forget_values(j);
    node_drop(j->graph);
    free(j);
}

const char *job_name(const job *j) { return j->name; }

/* Are all inputs of op there? Those that nothing writes are read from memory now. */
static bool ready(job *j, const node *op, const operation *what) {
    for (const int *a = what->in; a < what->in + 10 && *a; a++) {
        value *v = find(j, op, *a);
        if (!v || v->ready) continue;
        if (is_result(j, v->uid)) return false;
        if (v->is_virtual) give_up(j, "a tensor that nothing writes is virtual");
        transfer(v, false);
        v->ready = true;
    }
    return true;
}

static void finish(job *j, const node *op, const operation *what) {
    for (const int *a = what->out; a < what->out + 6 && *a; a++) {
        value *v = find(j, op, *a);
        if (!v) continue;
        for (int64_t i = 0; i < v->n; i++) v->v[i] = round_to(v->dtype, v->v[i]);
        v->ready = true;
        if (!v->is_virtual) transfer(v, true);
    }
}

void job_run(void *p) {
    job *j = p;
    const attribute *ops = node_get(j->graph, CUDNN_ATTR_OPERATIONGRAPH_OPS);
    bool done[64] = {false};
    int64_t left = ops->n;
    if (left > 64) give_up(j, "too many operations");
    if (j->workspace_bytes > 0)
        memset(j->workspace, 0xff, (size_t)j->workspace_bytes); /* it is ours: what lay there is gone */
    while (left > 0) {
        int64_t before = left;
        for (int64_t i = 0; i < ops->n; i++) {
            const node *op = ((node **)ops->value)[i];
            const operation *what = operation_of(op);
            if (done[i] || !ready(j, op, what)) continue;
            const char *why = what->run(&(operands){op, find, j});
            if (why) give_up(j, why);
            finish(j, op, what);
            done[i] = true;
            left--;
        }
        if (left == before) give_up(j, "operations wait for each other");
    }
    forget_values(j); /* a run that was captured comes again */
}
