/* cudnn_pool.c -- pooling by maximum or mean, and its gradient. */
#include "cudnn_double.h"

#include <math.h>
#include <string.h>

static value *get(const operands *o, int attribute) { return o->find(o->ctx, o->op, attribute); }

typedef struct window {
    int mode;
    int64_t size[2], stride[2], padding[2];
} window;

static bool pair(const node *n, int name, int64_t *v) {
    const attribute *a = node_get(n, name);
    if (!a || a->n != 2) return false;
    for (int i = 0; i < 2; i++) {
        cudnnFraction_t f;
        if (a->type == CUDNN_TYPE_FRACTION) {
            memcpy(&f, (char *)a->value + (size_t)i * sizeof f, sizeof f);
            if (f.denominator != 1) return false;
            v[i] = f.numerator;
        } else v[i] = ((int64_t *)a->value)[i];
    }
    return true;
}

static const char *read_window(const node *m, window *w) {
    w->mode = node_enum(m, CUDNN_ATTR_RESAMPLE_MODE, -1);
    if (w->mode != CUDNN_RESAMPLE_MAXPOOL && w->mode != CUDNN_RESAMPLE_AVGPOOL_INCLUDE_PADDING &&
        w->mode != CUDNN_RESAMPLE_AVGPOOL_EXCLUDE_PADDING)
        return "a resampling that the double does not know";
    return pair(m, CUDNN_ATTR_RESAMPLE_WINDOW_DIMS, w->size) && pair(m, CUDNN_ATTR_RESAMPLE_STRIDES, w->stride) &&
                   pair(m, CUDNN_ATTR_RESAMPLE_PRE_PADDINGS, w->padding)
               ? NULL
               : "pooling without a 2-D window";
}

/* One window at p of y: its maximum's place in x and its mean; how many pixels count. */
typedef struct seen {
    int64_t best;
    double max, sum;
    int64_t inside;
} seen;

static int64_t offset(const value *v, const int64_t *p, int64_t h, int64_t w) {
    return p[0] * v->step[0] + p[1] * v->step[1] + h * v->step[2] + w * v->step[3];
}

static seen look(const window *w, const value *x, const int64_t *p) {
    seen s = {-1, -INFINITY, 0, 0};
    for (int64_t r = 0; r < w->size[0]; r++)
        for (int64_t q = 0; q < w->size[1]; q++) {
            int64_t h = p[2] * w->stride[0] - w->padding[0] + r, c = p[3] * w->stride[1] - w->padding[1] + q;
            if (h < 0 || h >= x->size[2] || c < 0 || c >= x->size[3]) continue;
            int64_t i = offset(x, p, h, c);
            s.inside++;
            s.sum += x->v[i];
            if (s.best < 0 || x->v[i] > s.max || (x->v[i] != x->v[i] && s.max == s.max)) {
                s.best = i;
                s.max = x->v[i];
            }
        }
    return s;
}

static double counted(const window *w, const seen *s) {
    return w->mode == CUDNN_RESAMPLE_AVGPOOL_EXCLUDE_PADDING ? (double)s->inside : (double)(w->size[0] * w->size[1]);
}

const char *run_pool_forward(const operands *o) {
    value *x = get(o, CUDNN_ATTR_OPERATION_RESAMPLE_FWD_XDESC), *y = get(o, CUDNN_ATTR_OPERATION_RESAMPLE_FWD_YDESC);
    window w;
    const char *why = read_window(node_child(o->op, CUDNN_ATTR_OPERATION_RESAMPLE_FWD_DESC), &w);
    if (why) return why;
    if (node_child(o->op, CUDNN_ATTR_OPERATION_RESAMPLE_FWD_IDXDESC)) return "pooling with places";
    int64_t pos[DIMS] = {0}, step[1][DIMS], at[1] = {0};
    memcpy(step[0], y->step, sizeof step[0]);
    do {
        seen s = look(&w, x, pos);
        y->v[at[0]] = w.mode == CUDNN_RESAMPLE_MAXPOOL ? s.max : s.sum / counted(&w, &s);
    } while (next_position(4, y->size, pos, 1, step, at));
    return NULL;
}

/* Of a maximum: to the first place that has it. x is needed for that. */
const char *run_pool_backward(const operands *o) {
    value *x = get(o, CUDNN_ATTR_OPERATION_RESAMPLE_BWD_XDESC), *dy = get(o, CUDNN_ATTR_OPERATION_RESAMPLE_BWD_DYDESC),
          *dx = get(o, CUDNN_ATTR_OPERATION_RESAMPLE_BWD_DXDESC);
    window w;
    const char *why = read_window(node_child(o->op, CUDNN_ATTR_OPERATION_RESAMPLE_BWD_DESC), &w);
    if (why) return why;
    if (w.mode == CUDNN_RESAMPLE_MAXPOOL && !x) return "a maximum's gradient without x";
    int64_t pos[DIMS] = {0}, step[1][DIMS], at[1] = {0};
    memcpy(step[0], dy->step, sizeof step[0]);
    for (int64_t i = 0; i < dx->n; i++) dx->v[i] = 0;
    do {
        seen s = look(&w, x ? x : dx, pos);
        if (w.mode == CUDNN_RESAMPLE_MAXPOOL) {
            if (s.best >= 0) dx->v[s.best] += dy->v[at[0]];
            continue;
        }
        for (int64_t t = 0; t < w.size[0] * w.size[1]; t++) {
            int64_t h = pos[2] * w.stride[0] - w.padding[0] + t / w.size[1],
                    c = pos[3] * w.stride[1] - w.padding[1] + t % w.size[1];
            if (h < 0 || h >= dx->size[2] || c < 0 || c >= dx->size[3]) continue;
            dx->v[offset(dx, pos, h, c)] += dy->v[at[0]] / counted(&w, &s);
        }
    } while (next_position(4, dy->size, pos, 1, step, at));
    return NULL;
}
