/* graph_norm.c -- normalisations and pooling as operations of a graph. */
#include "graph.h"

typedef struct pair {
    cudnnBackendAttributeName_t name;
    int tensor;
} pair;

static void set_tensors(cg_graph *g, cg_desc d, int n, const pair *p) {
    for (int i = 0; i < n && g->status == 0; i++)
        if (p[i].tensor != CG_NONE) cg_set_desc(g, d, p[i].name, g->tensor[p[i].tensor]);
}

static void add(cg_graph *g, cg_desc d, const char *what) {
    cg_finalize(g, d, what);
    if (g->status < 0) return;
    if (g->n_ops == CG_OPS) cg_fail(g, DDP_ENOSUP, "a graph of over %d operations", CG_OPS);
    else g->ops[g->n_ops++] = d;
}

#define COUNT(a) ((int)(sizeof(a) / sizeof((a)[0])))

void cg_norm_forward(cg_graph *g, const cg_norm *n) {
    const pair p[] = {
        {CUDNN_ATTR_OPERATION_NORM_FWD_XDESC, n->x},
        {CUDNN_ATTR_OPERATION_NORM_FWD_YDESC, n->y},
        {CUDNN_ATTR_OPERATION_NORM_FWD_SCALE_DESC, n->scale},
        {CUDNN_ATTR_OPERATION_NORM_FWD_BIAS_DESC, n->bias},
        {CUDNN_ATTR_OPERATION_NORM_FWD_MEAN_DESC, n->mean},
        {CUDNN_ATTR_OPERATION_NORM_FWD_INV_VARIANCE_DESC, n->rstd},
        {CUDNN_ATTR_OPERATION_NORM_FWD_EPSILON_DESC, n->eps},
        {CUDNN_ATTR_OPERATION_NORM_FWD_EXP_AVG_FACTOR_DESC, n->momentum},
        {CUDNN_ATTR_OPERATION_NORM_FWD_INPUT_RUNNING_MEAN_DESC, n->running_mean_in},
        {CUDNN_ATTR_OPERATION_NORM_FWD_INPUT_RUNNING_VAR_DESC, n->running_var_in},
        {CUDNN_ATTR_OPERATION_NORM_FWD_OUTPUT_RUNNING_MEAN_DESC, n->running_mean_out},
        {CUDNN_ATTR_OPERATION_NORM_FWD_OUTPUT_RUNNING_VAR_DESC, n->running_var_out},
    };
    cg_desc d = cg_make(g, CUDNN_BACKEND_OPERATION_NORM_FORWARD_DESCRIPTOR);
    cg_set_enum(g, d, CUDNN_ATTR_OPERATION_NORM_FWD_MODE, CUDNN_TYPE_NORM_MODE, (int)n->mode);
    cg_set_enum(g, d, CUDNN_ATTR_OPERATION_NORM_FWD_PHASE, CUDNN_TYPE_NORM_FWD_PHASE,
                n->training ? CUDNN_NORM_FWD_TRAINING : CUDNN_NORM_FWD_INFERENCE);
    set_tensors(g, d, COUNT(p), p);
    add(g, d, "a normalisation");
}

void cg_norm_backward(cg_graph *g, const cg_norm *n) {
    const pair p[] = {
        {CUDNN_ATTR_OPERATION_NORM_BWD_XDESC, n->x},
        {CUDNN_ATTR_OPERATION_NORM_BWD_DYDESC, n->dy},
        {CUDNN_ATTR_OPERATION_NORM_BWD_SCALE_DESC, n->scale},
        {CUDNN_ATTR_OPERATION_NORM_BWD_MEAN_DESC, n->mean},
        {CUDNN_ATTR_OPERATION_NORM_BWD_INV_VARIANCE_DESC, n->rstd},
        {CUDNN_ATTR_OPERATION_NORM_BWD_DXDESC, n->dx},
        {CUDNN_ATTR_OPERATION_NORM_BWD_DSCALE_DESC, n->dscale},
        {CUDNN_ATTR_OPERATION_NORM_BWD_DBIAS_DESC, n->dbias},
    };
    cg_desc d = cg_make(g, CUDNN_BACKEND_OPERATION_NORM_BACKWARD_DESCRIPTOR);
    cg_set_enum(g, d, CUDNN_ATTR_OPERATION_NORM_BWD_MODE, CUDNN_TYPE_NORM_MODE, (int)n->mode);
    set_tensors(g, d, COUNT(p), p);
    add(g, d, "a normalisation's gradient");
}

/* ---- pooling ----------------------------------------------------------------------------------------------------- */

static void set_fractions(cg_graph *g, cg_desc d, cudnnBackendAttributeName_t name, const int64_t *v) {
    const cudnnFraction_t f[2] = {{v[0], 1}, {v[1], 1}};
    cg_set(g, d, name, CUDNN_TYPE_FRACTION, 2, f);
}

static cg_desc pool_mode(cg_graph *g, const cg_pool *p) {
    cg_desc d = cg_make(g, CUDNN_BACKEND_RESAMPLE_DESCRIPTOR);
    int64_t dims = 2;
    cg_set_enum(g, d, CUDNN_ATTR_RESAMPLE_MODE, CUDNN_TYPE_RESAMPLE_MODE, (int)p->mode);
    cg_set_enum(g, d, CUDNN_ATTR_RESAMPLE_COMP_TYPE, CUDNN_TYPE_DATA_TYPE, CUDNN_DATA_FLOAT);
    cg_set(g, d, CUDNN_ATTR_RESAMPLE_SPATIAL_DIMS, CUDNN_TYPE_INT64, 1, &dims);
    cg_set_enum(g, d, CUDNN_ATTR_RESAMPLE_PADDING_MODE, CUDNN_TYPE_PADDING_MODE,
                p->mode == CUDNN_RESAMPLE_MAXPOOL ? CUDNN_NEG_INF_PAD : CUDNN_ZERO_PAD);
    set_fractions(g, d, CUDNN_ATTR_RESAMPLE_WINDOW_DIMS, p->window);
    set_fractions(g, d, CUDNN_ATTR_RESAMPLE_STRIDES, p->stride);
    set_fractions(g, d, CUDNN_ATTR_RESAMPLE_PRE_PADDINGS, p->padding);
    set_fractions(g, d, CUDNN_ATTR_RESAMPLE_POST_PADDINGS, p->padding);
    cg_finalize(g, d, "a window of pooling");
    return d;
}

void cg_pool_forward(cg_graph *g, const cg_pool *p) {
    const pair t[] = {{CUDNN_ATTR_OPERATION_RESAMPLE_FWD_XDESC, p->x},
                      {CUDNN_ATTR_OPERATION_RESAMPLE_FWD_YDESC, p->y},
                      {CUDNN_ATTR_OPERATION_RESAMPLE_FWD_IDXDESC, p->index}};
    cg_desc mode = pool_mode(g, p), d = cg_make(g, CUDNN_BACKEND_OPERATION_RESAMPLE_FWD_DESCRIPTOR);
    set_tensors(g, d, COUNT(t), t);
    cg_set_desc(g, d, CUDNN_ATTR_OPERATION_RESAMPLE_FWD_DESC, mode);
    add(g, d, "pooling");
}

void cg_pool_backward(cg_graph *g, const cg_pool *p) {
    const pair t[] = {{CUDNN_ATTR_OPERATION_RESAMPLE_BWD_DXDESC, p->dx},
                      {CUDNN_ATTR_OPERATION_RESAMPLE_BWD_DYDESC, p->dy},
                      {CUDNN_ATTR_OPERATION_RESAMPLE_BWD_IDXDESC, p->index},
                      {CUDNN_ATTR_OPERATION_RESAMPLE_BWD_XDESC, p->x},
                      {CUDNN_ATTR_OPERATION_RESAMPLE_BWD_YDESC, p->y}};
    cg_desc mode = pool_mode(g, p), d = cg_make(g, CUDNN_BACKEND_OPERATION_RESAMPLE_BWD_DESCRIPTOR);
    set_tensors(g, d, COUNT(t), t);
    cg_set_desc(g, d, CUDNN_ATTR_OPERATION_RESAMPLE_BWD_DESC, mode);
    add(g, d, "pooling's gradient");
}
