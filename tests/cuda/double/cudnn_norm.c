/* cudnn_norm.c -- normalisation and its gradient, over whatever dims the statistics have size 1 in: batch, layer, instance. */
#include "cudnn_double.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static value *get(const operands *o, int attribute) { return o->find(o->ctx, o->op, attribute); }

/* The tensors of one walk over x, in fixed places; NULL where absent. */
enum { X, Y, MEAN, RSTD, SCALE, BIAS, PLACES };
typedef struct walk {
    value *t[PLACES];
    int64_t step[PLACES][DIMS], at[PLACES], pos[DIMS];
} walk;

static bool start(walk *w) {
    memset(w->at, 0, sizeof w->at);
    memset(w->pos, 0, sizeof w->pos);
    memset(w->step, 0, sizeof w->step);
    for (int k = 0; k < PLACES; k++)
        if (w->t[k] && !steps_over(w->t[X], w->t[k], w->step[k])) return false;
    return true;
}
static bool next(walk *w) {
    return next_position(w->t[X]->nd, w->t[X]->size, w->pos, PLACES, (const int64_t(*)[DIMS])w->step, w->at);
}
static double at(const walk *w, int k, double otherwise) { return w->t[k] ? w->t[k]->v[w->at[k]] : otherwise; }

static double *zeros(int64_t n) {
    double *p = calloc((size_t)n + 1, sizeof *p);
    if (!p) abort();
    return p;
}

/* mean and biased variance of x, of the shape of w's MEAN; rstd and the variance [n]. */
static void statistics(walk *w, double eps, double *variance) {
    value *mean = w->t[MEAN], *rstd = w->t[RSTD];
    double count = (double)(w->t[X]->n / mean->n);
    for (int64_t i = 0; i < mean->n; i++) mean->v[i] = variance[i] = 0;
    start(w);
    do mean->v[w->at[MEAN]] += at(w, X, 0) / count;
    while (next(w));
    start(w);
    do variance[w->at[MEAN]] += pow(at(w, X, 0) - at(w, MEAN, 0), 2) / count;
    while (next(w));
    for (int64_t i = 0; i < mean->n; i++) rstd->v[i] = 1 / sqrt(variance[i] + eps);
}

/* running = (1 - momentum) running + momentum statistic, the variance unbiased. */
static void update(value *from, value *to, const double *statistic, double momentum, double by) {
    for (int64_t i = 0; from && to && i < to->n; i++)
        to->v[i] = (1 - momentum) * from->v[i] + momentum * by * statistic[i];
}

const char *run_norm_forward(const operands *o) {
    walk w = {.t = {get(o, CUDNN_ATTR_OPERATION_NORM_FWD_XDESC), get(o, CUDNN_ATTR_OPERATION_NORM_FWD_YDESC),
                    get(o, CUDNN_ATTR_OPERATION_NORM_FWD_MEAN_DESC),
                    get(o, CUDNN_ATTR_OPERATION_NORM_FWD_INV_VARIANCE_DESC),
                    get(o, CUDNN_ATTR_OPERATION_NORM_FWD_SCALE_DESC), get(o, CUDNN_ATTR_OPERATION_NORM_FWD_BIAS_DESC)}};
    value *eps = get(o, CUDNN_ATTR_OPERATION_NORM_FWD_EPSILON_DESC),
          *momentum = get(o, CUDNN_ATTR_OPERATION_NORM_FWD_EXP_AVG_FACTOR_DESC);
    if (!w.t[X] || !w.t[Y] || !w.t[MEAN] || !w.t[RSTD] || !eps) return "a normalisation without a tensor";
    if (node_enum(o->op, CUDNN_ATTR_OPERATION_NORM_FWD_PHASE, -1) != CUDNN_NORM_FWD_TRAINING)
        return "a normalisation by given statistics";
    if (!start(&w)) return "a normalisation of shapes that do not fit";
    double *variance = zeros(w.t[MEAN]->n), n = (double)(w.t[X]->n / w.t[MEAN]->n), m = momentum ? momentum->v[0] : 0;
    statistics(&w, eps->v[0], variance);
    start(&w);
    do w.t[Y]->v[w.at[Y]] = (at(&w, X, 0) - at(&w, MEAN, 0)) * at(&w, RSTD, 0) * at(&w, SCALE, 1) + at(&w, BIAS, 0);
    while (next(&w));
    update(get(o, CUDNN_ATTR_OPERATION_NORM_FWD_INPUT_RUNNING_MEAN_DESC),
           get(o, CUDNN_ATTR_OPERATION_NORM_FWD_OUTPUT_RUNNING_MEAN_DESC), w.t[MEAN]->v, m, 1);
    update(get(o, CUDNN_ATTR_OPERATION_NORM_FWD_INPUT_RUNNING_VAR_DESC),
           get(o, CUDNN_ATTR_OPERATION_NORM_FWD_OUTPUT_RUNNING_VAR_DESC), variance, m, n / (n - 1));
    free(variance);
    return NULL;
}

/* With h = (x - mean) rstd and g = dy scale: dx = rstd (g - mean of g - h mean of g h), over what the statistics were of. */
const char *run_norm_backward(const operands *o) {
    value *dy = get(o, CUDNN_ATTR_OPERATION_NORM_BWD_DYDESC), *dx = get(o, CUDNN_ATTR_OPERATION_NORM_BWD_DXDESC),
          *dscale = get(o, CUDNN_ATTR_OPERATION_NORM_BWD_DSCALE_DESC),
          *dbias = get(o, CUDNN_ATTR_OPERATION_NORM_BWD_DBIAS_DESC);
    walk w = {.t = {get(o, CUDNN_ATTR_OPERATION_NORM_BWD_XDESC), dy, get(o, CUDNN_ATTR_OPERATION_NORM_BWD_MEAN_DESC),
                    get(o, CUDNN_ATTR_OPERATION_NORM_BWD_INV_VARIANCE_DESC),
                    get(o, CUDNN_ATTR_OPERATION_NORM_BWD_SCALE_DESC), dbias}};
    if (!w.t[X] || !dy || !dx || !w.t[MEAN] || !w.t[RSTD]) return "a normalisation's gradient without a tensor";
    if (!start(&w) || dx->n != w.t[X]->n) return "a normalisation's gradient of shapes that do not fit";
    int64_t n = w.t[MEAN]->n;
    double *of_g = zeros(n), *of_gh = zeros(n), count = (double)(w.t[X]->n / n);
    for (int64_t i = 0; dscale && i < dscale->n; i++) dscale->v[i] = 0;
    for (int64_t i = 0; dbias && i < dbias->n; i++) dbias->v[i] = 0;
    do {
        double h = (at(&w, X, 0) - at(&w, MEAN, 0)) * at(&w, RSTD, 0), g = dy->v[w.at[Y]] * at(&w, SCALE, 1);
        of_g[w.at[MEAN]] += g / count;
        of_gh[w.at[MEAN]] += g * h / count;
        if (dscale) dscale->v[w.at[SCALE]] += dy->v[w.at[Y]] * h;
        if (dbias) dbias->v[w.at[BIAS]] += dy->v[w.at[Y]];
    } while (next(&w));
    start(&w);
    do {
        double h = (at(&w, X, 0) - at(&w, MEAN, 0)) * at(&w, RSTD, 0), g = dy->v[w.at[Y]] * at(&w, SCALE, 1);
        dx->v[w.at[X]] = at(&w, RSTD, 0) * (g - of_g[w.at[MEAN]] - h * of_gh[w.at[MEAN]]);
    } while (next(&w));
    free(of_g);
    free(of_gh);
    return NULL;
}
