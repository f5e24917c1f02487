/* cudnn_ops.c -- pointwise operations, reductions, products, statistics and reshapes. */
#include "cudnn_double.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static value *get(const operands *o, int attribute) { return o->find(o->ctx, o->op, attribute); }

bool steps_over(const value *y, const value *x, int64_t *step) {
    if (x->nd != y->nd) return false;
    for (int d = 0; d < y->nd; d++) {
        if (x->size[d] != y->size[d] && x->size[d] != 1) return false;
        step[d] = x->size[d] == y->size[d] ? x->step[d] : 0;
    }
    return true;
}

static const char NO_SHAPES[] = "shapes that do not broadcast";

/* ---- pointwise --------------------------------------------------------------------------------------------------------- */

static const double SQRT_HALF = 0.70710678118654752440, SQRT_2_PI = 0.79788456080286535588,
                    INV_SQRT_2PI = 0.39894228040143267794;

/* NaN if the mode is not known. x is the first input, b the second; t the condition. */
static bool forward(int mode, double x, double b, double t, double *y) {
    switch (mode) {
        case CUDNN_POINTWISE_ADD: *y = x + b; break;
        case CUDNN_POINTWISE_SUB: *y = x - b; break;
        case CUDNN_POINTWISE_MUL: *y = x * b; break;
        case CUDNN_POINTWISE_DIV: *y = x / b; break;
        case CUDNN_POINTWISE_MAX: *y = x != x || b != b ? NAN : x > b ? x : b; break;
        case CUDNN_POINTWISE_MIN: *y = x != x || b != b ? NAN : x < b ? x : b; break;
        case CUDNN_POINTWISE_POW: *y = pow(x, b); break;
        case CUDNN_POINTWISE_SQRT: *y = sqrt(x); break;
        case CUDNN_POINTWISE_RSQRT: *y = 1 / sqrt(x); break;
        case CUDNN_POINTWISE_EXP: *y = exp(x); break;
        case CUDNN_POINTWISE_LOG: *y = log(x); break;
        case CUDNN_POINTWISE_NEG: *y = -x; break;
        case CUDNN_POINTWISE_ABS: *y = fabs(x); break;
        case CUDNN_POINTWISE_RECIPROCAL: *y = 1 / x; break;
        case CUDNN_POINTWISE_ERF: *y = erf(x); break;
        case CUDNN_POINTWISE_IDENTITY: *y = x; break;
        case CUDNN_POINTWISE_RELU_FWD: *y = x < 0 ? 0 : x; break;
        case CUDNN_POINTWISE_TANH_FWD: *y = tanh(x); break;
        case CUDNN_POINTWISE_SIGMOID_FWD: *y = 1 / (1 + exp(-x)); break;
        case CUDNN_POINTWISE_SWISH_FWD: *y = x / (1 + exp(-x)); break;
        case CUDNN_POINTWISE_GELU_FWD: *y = x / 2 * (1 + erf(x * SQRT_HALF)); break;
        case CUDNN_POINTWISE_GELU_APPROX_TANH_FWD:
            *y = x / 2 * (1 + tanh(SQRT_2_PI * (x + 0.044715 * x * x * x)));
            break;
        case CUDNN_POINTWISE_CMP_EQ: *y = x == b; break;
        case CUDNN_POINTWISE_CMP_NEQ: *y = x != b; break;
        case CUDNN_POINTWISE_CMP_GT: *y = x > b; break;
        case CUDNN_POINTWISE_CMP_GE: *y = x >= b; break;
        case CUDNN_POINTWISE_CMP_LT: *y = x < b; break;
        case CUDNN_POINTWISE_CMP_LE: *y = x <= b; break;
        case CUDNN_POINTWISE_LOGICAL_AND: *y = x != 0 && b != 0; break;
        case CUDNN_POINTWISE_LOGICAL_OR: *y = x != 0 || b != 0; break;
        case CUDNN_POINTWISE_LOGICAL_NOT: *y = x == 0; break;
        case CUDNN_POINTWISE_BINARY_SELECT: *y = t != 0 ? x : b; break;
        default: return false;
    }
    return true;
}

/* dx = dy times the slope at x. */
static bool backward(int mode, double dy, double x, double *dx) {
    double s = 1 / (1 + exp(-x)), u = SQRT_2_PI * (x + 0.044715 * x * x * x), h = tanh(u);
    switch (mode) {
        case CUDNN_POINTWISE_RELU_BWD: *dx = x > 0 ? dy : 0; break;
        case CUDNN_POINTWISE_TANH_BWD: *dx = dy * (1 - tanh(x) * tanh(x)); break;
        case CUDNN_POINTWISE_SIGMOID_BWD: *dx = dy * s * (1 - s); break;
        case CUDNN_POINTWISE_SWISH_BWD: *dx = dy * (s + x * s * (1 - s)); break;
        case CUDNN_POINTWISE_GELU_BWD:
            *dx = dy * (0.5 * (1 + erf(x * SQRT_HALF)) + x * INV_SQRT_2PI * exp(-x * x / 2));
            break;
        case CUDNN_POINTWISE_GELU_APPROX_TANH_BWD:
            *dx = dy * (0.5 * (1 + h) + x / 2 * (1 - h * h) * SQRT_2_PI * (1 + 3 * 0.044715 * x * x));
            break;
        default: return false;
    }
    return true;
}

static const char *run_index(const node *mode, value *y) {
    int64_t pos[DIMS] = {0}, step[1][DIMS], at[1] = {0}, axis = node_int(mode, CUDNN_ATTR_POINTWISE_AXIS, -1);
    if (axis < 0 || axis >= y->nd) return "an index without an axis";
    memcpy(step[0], y->step, sizeof step[0]);
    do y->v[at[0]] = (double)pos[axis];
    while (next_position(y->nd, y->size, pos, 1, step, at));
    return NULL;
}

const char *run_pointwise(const operands *o) {
    const node *mode_of = node_child(o->op, CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR);
    int mode = node_enum(mode_of, CUDNN_ATTR_POINTWISE_MODE, -1);
    bool slope = mode >= CUDNN_POINTWISE_RELU_BWD && mode < CUDNN_POINTWISE_CMP_EQ, good = true;
    value *in[3] = {get(o, CUDNN_ATTR_OPERATION_POINTWISE_XDESC), get(o, CUDNN_ATTR_OPERATION_POINTWISE_BDESC),
                    get(o, CUDNN_ATTR_OPERATION_POINTWISE_TDESC)};
    value *y = get(o, slope ? CUDNN_ATTR_OPERATION_POINTWISE_DXDESC : CUDNN_ATTR_OPERATION_POINTWISE_YDESC);
    int64_t pos[DIMS] = {0}, step[4][DIMS] = {{0}}, at[4] = {0};
    if (slope) in[1] = get(o, CUDNN_ATTR_OPERATION_POINTWISE_DYDESC);
    if (!y || !in[0]) return "a pointwise operation without input or result";
    if (mode == CUDNN_POINTWISE_GEN_INDEX) return run_index(mode_of, y);
    memcpy(step[3], y->step, sizeof step[3]);
    for (int k = 0; k < 3; k++)
        if (in[k] && !steps_over(y, in[k], step[k])) return NO_SHAPES;
    if (y->n == 0) return NULL;
    do {
        double x = in[0]->v[at[0]], b = in[1] ? in[1]->v[at[1]] : NAN, t = in[2] ? in[2]->v[at[2]] : NAN;
        good = slope ? backward(mode, b, x, &y->v[at[3]]) : forward(mode, x, b, t, &y->v[at[3]]);
    } while (good && next_position(y->nd, y->size, pos, 4, step, at));
    return good ? NULL : "a pointwise mode that the double does not know";
}

/* ---- reductions ------------------------------------------------------------------------------------------------------------ */

const char *run_reduction(const operands *o) {
    const node *mode_of = node_child(o->op, CUDNN_ATTR_OPERATION_REDUCTION_DESC);
    int mode = node_enum(mode_of, CUDNN_ATTR_REDUCTION_OPERATOR, -1);
    value *x = get(o, CUDNN_ATTR_OPERATION_REDUCTION_XDESC), *y = get(o, CUDNN_ATTR_OPERATION_REDUCTION_YDESC);
    int64_t pos[DIMS] = {0}, step[2][DIMS] = {{0}}, at[2] = {0};
    if (mode != CUDNN_REDUCE_TENSOR_ADD && mode != CUDNN_REDUCE_TENSOR_MAX && mode != CUDNN_REDUCE_TENSOR_MIN &&
        mode != CUDNN_REDUCE_TENSOR_AVG)
        return "a reduction that the double does not know";
    memcpy(step[0], x->step, sizeof step[0]);
    if (!steps_over(x, y, step[1])) return NO_SHAPES;
    for (int64_t i = 0; i < y->n; i++)
        y->v[i] = mode == CUDNN_REDUCE_TENSOR_MAX ? -INFINITY : mode == CUDNN_REDUCE_TENSOR_MIN ? INFINITY : 0;
    if (x->n == 0) return NULL;
    do {
        double v = x->v[at[0]], *to = &y->v[at[1]];
        if (mode == CUDNN_REDUCE_TENSOR_MAX) *to = v != v || v > *to ? v : *to;
        else if (mode == CUDNN_REDUCE_TENSOR_MIN) *to = v != v || v < *to ? v : *to;
        else *to += v;
    } while (next_position(x->nd, x->size, pos, 2, step, at));
    for (int64_t i = 0; mode == CUDNN_REDUCE_TENSOR_AVG && i < y->n; i++) y->v[i] /= (double)(x->n / y->n);
    return NULL;
}

const char *run_statistics(const operands *o) {
    value *x = get(o, CUDNN_ATTR_OPERATION_GENSTATS_XDESC), *sum = get(o, CUDNN_ATTR_OPERATION_GENSTATS_SUMDESC),
          *square = get(o, CUDNN_ATTR_OPERATION_GENSTATS_SQSUMDESC);
    int64_t pos[DIMS] = {0}, step[3][DIMS] = {{0}}, at[3] = {0};
    if (!x || !sum || !square) return "statistics without a tensor";
    memcpy(step[0], x->step, sizeof step[0]);
    if (!steps_over(x, sum, step[1]) || !steps_over(x, square, step[2])) return NO_SHAPES;
    for (int64_t i = 0; i < sum->n; i++) sum->v[i] = 0;
    for (int64_t i = 0; i < square->n; i++) square->v[i] = 0;
    if (x->n == 0) return NULL;
    do {
        double v = x->v[at[0]];
        sum->v[at[1]] += v;
        square->v[at[2]] += v * v;
    } while (next_position(x->nd, x->size, pos, 3, step, at));
    return NULL;
}

/* ---- products ---------------------------------------------------------------------------------------------------------------- */

const char *run_matmul(const operands *o) {
    value *a = get(o, CUDNN_ATTR_OPERATION_MATMUL_ADESC), *b = get(o, CUDNN_ATTR_OPERATION_MATMUL_BDESC),
          *c = get(o, CUDNN_ATTR_OPERATION_MATMUL_CDESC);
    if (!a || !b || !c || a->nd != c->nd || b->nd != c->nd || c->nd < 2) return "a product without its tensors";
    int nd = c->nd, m = nd - 2, n = nd - 1;
    int64_t k = a->size[n], pos[DIMS] = {0}, step[3][DIMS] = {{0}}, at[3] = {0};
    if (b->size[m] != k || a->size[m] != c->size[m] || b->size[n] != c->size[n])
        return "a product of shapes that do not fit";
    for (int d = 0; d < nd; d++) {
        if (d < m && ((a->size[d] != c->size[d] && a->size[d] != 1) || (b->size[d] != c->size[d] && b->size[d] != 1)))
            return NO_SHAPES;
        step[0][d] = d == n || (d < m && a->size[d] == 1) ? 0 : a->step[d];
        step[1][d] = d == m || (d < m && b->size[d] == 1) ? 0 : b->step[d];
        step[2][d] = c->step[d];
    }
    if (c->n == 0) return NULL;
    /* attention's engines add the gradient of q up in the caller's memory, piece by piece: it must be zero before */
    bool adds = !c->is_virtual && node_enum(c->desc, CUDNN_ATTR_TENSOR_REORDERING_MODE, CUDNN_TENSOR_REORDERING_NONE) ==
                                      CUDNN_TENSOR_REORDERING_F16x16;
    if (adds) value_read(c);
    do {
        double sum = 0;
        for (int64_t i = 0; i < k; i++) sum += a->v[at[0] + i * a->step[n]] * b->v[at[1] + i * b->step[m]];
        c->v[at[2]] = adds ? c->v[at[2]] + sum : sum;
    } while (next_position(nd, c->size, pos, 3, step, at));
    return NULL;
}

/* ---- reshape: the same memory, seen by other strides ---------------------------------------------------------------------------- */

const char *run_reshape(const operands *o) {
    value *x = get(o, CUDNN_ATTR_OPERATION_RESHAPE_XDESC), *y = get(o, CUDNN_ATTR_OPERATION_RESHAPE_YDESC);
    int64_t pos[DIMS] = {0}, step[2][DIMS], at[2] = {0}, room = 1;
    if (!x || !y || x->n != y->n) return "a reshape to another number of elements";
    for (int d = 0; d < x->nd; d++) room += (x->size[d] - 1) * x->stride[d];
    double *memory = malloc(sizeof(double) * (size_t)room);
    if (!memory) abort();
    for (int64_t i = 0; i < room; i++) memory[i] = NAN;
    memcpy(step[0], x->step, sizeof step[0]);
    memcpy(step[1], x->stride, sizeof step[1]);
    do memory[at[1]] = x->v[at[0]];
    while (next_position(x->nd, x->size, pos, 2, step, at));
    memcpy(step[0], y->step, sizeof step[0]);
    memcpy(step[1], y->stride, sizeof step[1]);
    bool inside = true;
    at[0] = at[1] = 0;
    memset(pos, 0, sizeof pos);
    do {
        inside = at[1] < room;
        if (inside) y->v[at[0]] = memory[at[1]];
    } while (inside && next_position(y->nd, y->size, pos, 2, step, at));
    free(memory);
    return inside ? NULL : "a reshape beyond its tensor";
}
