/* graph.c -- builds graphs of cuDNN's backend API: descriptors, tensors, operations. */
#include "graph.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

enum { FIRST_VIRTUAL = 1000 }; /* uids from here on belong to tensors that exist only inside a graph */

/* ---- failures ---------------------------------------------------------------------------------------------------- */

void cg_start(cg_graph *g, const char *op) {
    memset(g, 0, sizeof *g);
    g->op = op;
}

void cg_free(cg_graph *g) {
    while (g->n_made > 0)
        if (g->made[--g->n_made]) ddp__cuda.cudnnBackendDestroyDescriptor(g->made[g->n_made]);
    g->n_tensors = g->n_ops = 0;
    g->graph = NULL;
}

int cg_fail(cg_graph *g, int status, const char *fmt, ...) {
    if (g->status < 0) return g->status;
    int n = snprintf(g->why, sizeof g->why, "%s: ", g->op);
    va_list args;
    va_start(args, fmt);
    if (n > 0 && (size_t)n < sizeof g->why) vsnprintf(g->why + n, sizeof g->why - (size_t)n, fmt, args);
    va_end(args);
    return g->status = status;
}

/* A graph, size or type that cuDNN (or this GPU) has nothing for is no fault: another kernel may take the call. */
static int status_of(cudnnStatus_t s) {
    int category = (int)s / 1000 * 1000;
    return category == CUDNN_STATUS_NOT_SUPPORTED || category == CUDNN_STATUS_BAD_PARAM ? DDP_ENOSUP : DDP_EDEVICE;
}

int cg_check(cg_graph *g, cudnnStatus_t s, const char *what) {
    if (s == CUDNN_STATUS_SUCCESS || g->status < 0) return g->status;
    char last[256] = "";
    ddp__cuda.cudnnGetLastErrorString(last, sizeof last);
    return cg_fail(g, status_of(s), "cuDNN: %s: %s%s%s", what, ddp__cuda.cudnnGetErrorString(s), last[0] ? ": " : "",
                   last);
}

/* ---- descriptors ------------------------------------------------------------------------------------------------- */

cg_desc cg_make(cg_graph *g, cudnnBackendDescriptorType_t type) {
    cg_desc d = NULL;
    if (g->status < 0) return NULL;
    if (g->n_made == CG_MADE) {
        cg_fail(g, DDP_ENOSUP, "a graph of over %d descriptors", CG_MADE);
        return NULL;
    }
    if (cg_check(g, ddp__cuda.cudnnBackendCreateDescriptor(type, &d), "make a descriptor") < 0) return NULL;
    return g->made[g->n_made++] = d;
}

void cg_set(cg_graph *g, cg_desc d, cudnnBackendAttributeName_t name, cudnnBackendAttributeType_t type, int64_t n,
            const void *v) {
    char what[48];
    if (g->status < 0) return;
    cudnnStatus_t s = ddp__cuda.cudnnBackendSetAttribute(d, name, type, n, v);
    if (s == CUDNN_STATUS_SUCCESS) return;
    snprintf(what, sizeof what, "set attribute %d", (int)name);
    cg_check(g, s, what);
}

void cg_set_enum(cg_graph *g, cg_desc d, cudnnBackendAttributeName_t name, cudnnBackendAttributeType_t type, int v) {
    cg_set(g, d, name, type, 1, &v);
}

static void set_ints(cg_graph *g, cg_desc d, cudnnBackendAttributeName_t name, int64_t n, const int64_t *v) {
    cg_set(g, d, name, CUDNN_TYPE_INT64, n, v);
}

void cg_set_desc(cg_graph *g, cg_desc d, cudnnBackendAttributeName_t name, cg_desc v) {
    cg_set(g, d, name, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &v);
}

static void set_tensor(cg_graph *g, cg_desc d, cudnnBackendAttributeName_t name, int tensor) {
    if (g->status < 0 || tensor == CG_NONE) return;
    cg_set_desc(g, d, name, g->tensor[tensor]);
}

void cg_finalize(cg_graph *g, cg_desc d, const char *what) {
    if (g->status < 0) return;
    cg_check(g, ddp__cuda.cudnnBackendFinalize(d), what);
}

/* d is whole and becomes the graph's next operation. */
static void add_op(cg_graph *g, cg_desc d, const char *what) {
    cg_finalize(g, d, what);
    if (g->status < 0) return;
    if (g->n_ops == CG_OPS) cg_fail(g, DDP_ENOSUP, "a graph of over %d operations", CG_OPS);
    else g->ops[g->n_ops++] = d;
}

/* ---- tensors ----------------------------------------------------------------------------------------------------- */

cudnnDataType_t cg_type(ddp_dtype d) {
    switch (d) {
        case DDP_F64: return CUDNN_DATA_DOUBLE;
        case DDP_F16: return CUDNN_DATA_HALF;
        case DDP_BF16: return CUDNN_DATA_BFLOAT16;
        default: return CUDNN_DATA_FLOAT;
    }
}

int cg_tensor(cg_graph *g, const cg_spec *s) {
    cg_desc d = cg_make(g, CUDNN_BACKEND_TENSOR_DESCRIPTOR);
    int64_t uid = s->uid ? s->uid : FIRST_VIRTUAL + g->n_tensors, align = s->align ? s->align : 16;
    bool yes = true;
    if (!d) return 0;
    if (g->n_tensors == CG_TENSORS) {
        cg_fail(g, DDP_ENOSUP, "a graph of over %d tensors", CG_TENSORS);
        return 0;
    }
    cg_set_enum(g, d, CUDNN_ATTR_TENSOR_DATA_TYPE, CUDNN_TYPE_DATA_TYPE, (int)s->type);
    set_ints(g, d, CUDNN_ATTR_TENSOR_DIMENSIONS, s->n, s->size);
    set_ints(g, d, CUDNN_ATTR_TENSOR_STRIDES, s->n, s->stride);
    set_ints(g, d, CUDNN_ATTR_TENSOR_UNIQUE_ID, 1, &uid);
    set_ints(g, d, CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT, 1, &align);
    if (!s->uid) cg_set(g, d, CUDNN_ATTR_TENSOR_IS_VIRTUAL, CUDNN_TYPE_BOOLEAN, 1, &yes);
    if (s->by_value) cg_set(g, d, CUDNN_ATTR_TENSOR_IS_BY_VALUE, CUDNN_TYPE_BOOLEAN, 1, &yes);
    if (s->reordered)
        cg_set_enum(g, d, CUDNN_ATTR_TENSOR_REORDERING_MODE, CUDNN_TYPE_TENSOR_REORDERING_MODE,
                    CUDNN_TENSOR_REORDERING_F16x16);
    cg_finalize(g, d, "a tensor");
    g->tensor[g->n_tensors] = d;
    return g->n_tensors++;
}

int cg_virtual(cg_graph *g, cudnnDataType_t type, int n, const int64_t *size, bool channels_last) {
    cg_spec s = {.type = type, .n = n};
    int64_t step = 1;
    for (int k = 0; k < n; k++) { /* from the innermost dim */
        int i = channels_last && n == 4 ? (const int[]){1, 3, 2, 0}[k] : n - 1 - k;
        s.size[i] = size[i];
        s.stride[i] = step;
        step *= size[i];
    }
    return cg_tensor(g, &s);
}

int cg_number(cg_graph *g, int64_t uid, cudnnDataType_t type, int n) {
    cg_spec s = {.uid = uid, .type = type, .n = n, .by_value = true};
    for (int i = 0; i < n; i++) s.size[i] = s.stride[i] = 1;
    return cg_tensor(g, &s);
}

/* ---- convolution ------------------------------------------------------------------------------------------------- */

static cg_desc window(cg_graph *g, const cg_window *w, cudnnDataType_t compute) {
    cg_desc d = cg_make(g, CUDNN_BACKEND_CONVOLUTION_DESCRIPTOR);
    int64_t dims = 2;
    cg_set_enum(g, d, CUDNN_ATTR_CONVOLUTION_COMP_TYPE, CUDNN_TYPE_DATA_TYPE, (int)compute);
    cg_set_enum(g, d, CUDNN_ATTR_CONVOLUTION_CONV_MODE, CUDNN_TYPE_CONVOLUTION_MODE, CUDNN_CROSS_CORRELATION);
    set_ints(g, d, CUDNN_ATTR_CONVOLUTION_SPATIAL_DIMS, 1, &dims);
    set_ints(g, d, CUDNN_ATTR_CONVOLUTION_PRE_PADDINGS, 2, w->padding);
    set_ints(g, d, CUDNN_ATTR_CONVOLUTION_POST_PADDINGS, 2, w->padding);
    set_ints(g, d, CUDNN_ATTR_CONVOLUTION_FILTER_STRIDES, 2, w->stride);
    set_ints(g, d, CUDNN_ATTR_CONVOLUTION_DILATIONS, 2, w->dilation);
    cg_finalize(g, d, "a window");
    return d;
}

void cg_conv(cg_graph *g, cg_conv_kind kind, const cg_window *win, cudnnDataType_t compute, int x, int w, int y) {
    static const struct {
        cudnnBackendDescriptorType_t type;
        cudnnBackendAttributeName_t x, w, y, window, alpha, beta;
        const char *what;
    } by[] = {
        {CUDNN_BACKEND_OPERATION_CONVOLUTION_FORWARD_DESCRIPTOR, CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_X,
         CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_W, CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_Y,
         CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_CONV_DESC, CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_ALPHA,
         CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_BETA, "a convolution"},
        {CUDNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_DATA_DESCRIPTOR, CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_DX,
         CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_W, CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_DY,
         CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_CONV_DESC, CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_ALPHA,
         CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_BETA, "a convolution's gradient of x"},
        {CUDNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_FILTER_DESCRIPTOR, CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_X,
         CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_DW, CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_DY,
         CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_CONV_DESC, CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_ALPHA,
         CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_BETA, "a convolution's gradient of w"},
    };
    double one = 1, zero = 0;
    float one_f = 1, zero_f = 0;
    bool wide = compute == CUDNN_DATA_DOUBLE;
    cudnnBackendAttributeType_t number = wide ? CUDNN_TYPE_DOUBLE : CUDNN_TYPE_FLOAT;
    cg_desc d = cg_make(g, by[kind].type);
    set_tensor(g, d, by[kind].x, x);
    set_tensor(g, d, by[kind].w, w);
    set_tensor(g, d, by[kind].y, y);
    cg_set_desc(g, d, by[kind].window, window(g, win, compute));
    cg_set(g, d, by[kind].alpha, number, 1, wide ? (void *)&one : (void *)&one_f);
    cg_set(g, d, by[kind].beta, number, 1, wide ? (void *)&zero : (void *)&zero_f);
    add_op(g, d, by[kind].what);
}

/* ---- pointwise --------------------------------------------------------------------------------------------------- */

static cg_desc pointwise(cg_graph *g, cudnnPointwiseMode_t mode, int64_t axis) {
    cg_desc d = cg_make(g, CUDNN_BACKEND_POINTWISE_DESCRIPTOR);
    bool compares = mode >= CUDNN_POINTWISE_CMP_EQ && mode <= CUDNN_POINTWISE_LOGICAL_NOT;
    cg_set_enum(g, d, CUDNN_ATTR_POINTWISE_MODE, CUDNN_TYPE_POINTWISE_MODE, (int)mode);
    cg_set_enum(g, d, CUDNN_ATTR_POINTWISE_MATH_PREC, CUDNN_TYPE_DATA_TYPE,
                compares ? CUDNN_DATA_BOOLEAN : CUDNN_DATA_FLOAT);
    if (axis >= 0) set_ints(g, d, CUDNN_ATTR_POINTWISE_AXIS, 1, &axis);
    cg_finalize(g, d, "a pointwise mode");
    return d;
}

void cg_pointwise(cg_graph *g, cudnnPointwiseMode_t mode, int x, int b, int t, int y) {
    cg_desc m = pointwise(g, mode, -1), d = cg_make(g, CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR);
    cg_set_desc(g, d, CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR, m);
    set_tensor(g, d, CUDNN_ATTR_OPERATION_POINTWISE_XDESC, x);
    set_tensor(g, d, CUDNN_ATTR_OPERATION_POINTWISE_BDESC, b);
    set_tensor(g, d, CUDNN_ATTR_OPERATION_POINTWISE_TDESC, t);
    set_tensor(g, d, CUDNN_ATTR_OPERATION_POINTWISE_YDESC, y);
    add_op(g, d, "a pointwise operation");
}

void cg_pointwise_grad(cg_graph *g, cudnnPointwiseMode_t mode, int dy, int x, int dx) {
    cg_desc m = pointwise(g, mode, -1), d = cg_make(g, CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR);
    cg_set_desc(g, d, CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR, m);
    set_tensor(g, d, CUDNN_ATTR_OPERATION_POINTWISE_DYDESC, dy);
    set_tensor(g, d, CUDNN_ATTR_OPERATION_POINTWISE_XDESC, x);
    set_tensor(g, d, CUDNN_ATTR_OPERATION_POINTWISE_DXDESC, dx);
    add_op(g, d, "a pointwise gradient");
}

void cg_index(cg_graph *g, int x, int64_t axis, int y) {
    cg_desc m = pointwise(g, CUDNN_POINTWISE_GEN_INDEX, axis);
    cg_desc d = cg_make(g, CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR);
    cg_set_desc(g, d, CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR, m);
    set_tensor(g, d, CUDNN_ATTR_OPERATION_POINTWISE_XDESC, x);
    set_tensor(g, d, CUDNN_ATTR_OPERATION_POINTWISE_YDESC, y);
    add_op(g, d, "an index");
}

/* ---- sums and products ------------------------------------------------------------------------------------------- */

void cg_reduce(cg_graph *g, cudnnReduceTensorOp_t how, int x, int y) {
    cg_desc m = cg_make(g, CUDNN_BACKEND_REDUCTION_DESCRIPTOR);
    cg_set_enum(g, m, CUDNN_ATTR_REDUCTION_OPERATOR, CUDNN_TYPE_REDUCTION_OPERATOR_TYPE, (int)how);
    cg_set_enum(g, m, CUDNN_ATTR_REDUCTION_COMP_TYPE, CUDNN_TYPE_DATA_TYPE, CUDNN_DATA_FLOAT);
    cg_finalize(g, m, "a reduction's mode");
    cg_desc d = cg_make(g, CUDNN_BACKEND_OPERATION_REDUCTION_DESCRIPTOR);
    set_tensor(g, d, CUDNN_ATTR_OPERATION_REDUCTION_XDESC, x);
    set_tensor(g, d, CUDNN_ATTR_OPERATION_REDUCTION_YDESC, y);
    cg_set_desc(g, d, CUDNN_ATTR_OPERATION_REDUCTION_DESC, m);
    add_op(g, d, "a reduction");
}

void cg_matmul(cg_graph *g, int a, int b, int c) {
    cg_desc m = cg_make(g, CUDNN_BACKEND_MATMUL_DESCRIPTOR);
    cg_set_enum(g, m, CUDNN_ATTR_MATMUL_COMP_TYPE, CUDNN_TYPE_DATA_TYPE, CUDNN_DATA_FLOAT);
    cg_finalize(g, m, "a product's mode");
    cg_desc d = cg_make(g, CUDNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR);
    set_tensor(g, d, CUDNN_ATTR_OPERATION_MATMUL_ADESC, a);
    set_tensor(g, d, CUDNN_ATTR_OPERATION_MATMUL_BDESC, b);
    set_tensor(g, d, CUDNN_ATTR_OPERATION_MATMUL_CDESC, c);
    cg_set_desc(g, d, CUDNN_ATTR_OPERATION_MATMUL_DESC, m);
    add_op(g, d, "a product");
}

void cg_statistics(cg_graph *g, int x, int sum, int square) {
    cg_desc d = cg_make(g, CUDNN_BACKEND_OPERATION_GEN_STATS_DESCRIPTOR);
    cg_set_enum(g, d, CUDNN_ATTR_OPERATION_GENSTATS_MODE, CUDNN_TYPE_GENSTATS_MODE, CUDNN_GENSTATS_SUM_SQSUM);
    cg_set_enum(g, d, CUDNN_ATTR_OPERATION_GENSTATS_MATH_PREC, CUDNN_TYPE_DATA_TYPE, CUDNN_DATA_FLOAT);
    set_tensor(g, d, CUDNN_ATTR_OPERATION_GENSTATS_XDESC, x);
    set_tensor(g, d, CUDNN_ATTR_OPERATION_GENSTATS_SUMDESC, sum);
    set_tensor(g, d, CUDNN_ATTR_OPERATION_GENSTATS_SQSUMDESC, square);
    add_op(g, d, "statistics");
}

void cg_reshape(cg_graph *g, int x, int y) {
    cg_desc d = cg_make(g, CUDNN_BACKEND_OPERATION_RESHAPE_DESCRIPTOR);
    set_tensor(g, d, CUDNN_ATTR_OPERATION_RESHAPE_XDESC, x);
    set_tensor(g, d, CUDNN_ATTR_OPERATION_RESHAPE_YDESC, y);
    add_op(g, d, "a reshape");
}

/* ---- the end ----------------------------------------------------------------------------------------------------- */

int cg_finish(cg_graph *g) {
    cg_desc d = cg_make(g, CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR);
    cg_set(g, d, CUDNN_ATTR_OPERATIONGRAPH_OPS, CUDNN_TYPE_BACKEND_DESCRIPTOR, g->n_ops, g->ops);
    cg_finalize(g, d, "the graph");
    if (g->status == 0) g->graph = d;
    return g->status;
}
