/* cudnn_conv_loops.h -- the loops of convolutions over T, under names that NAME makes. Included once a type. */

WIDE static void NAME(add_rows)(T *restrict to, int64_t width, const T *restrict a, int64_t rows, const T *restrict b) {
    for (int64_t i = 0; i < rows; i++, b += width) {
        T f = a[i];
        for (int64_t j = 0; j < width; j++) to[j] += f * b[j];
    }
}

WIDE static void NAME(add_outer)(T *restrict to, int64_t width, const T *restrict a, int64_t rows,
                                 const T *restrict b) {
    for (int64_t i = 0; i < rows; i++, to += width) {
        T f = a[i];
        for (int64_t j = 0; j < width; j++) to[j] += f * b[j];
    }
}

/* One pixel of x, one of y, and the tap between them. */
static void NAME(tap)(const shape *v, int kind, T *x, T *w, T *y, int64_t group) {
    int64_t cg = v->c / v->groups, kg = v->k / v->groups;
    T *xg = x + group * cg, *yg = y + group * kg;
    if (kind == FORWARD) NAME(add_rows)(yg, kg, xg, cg, w);
    else if (kind == GRAD_INPUT) NAME(add_rows)(xg, cg, yg, kg, w);
    else NAME(add_outer)(w, kg, xg, cg, yg);
}

static void NAME(taps)(const shape *v, int kind, T *x, T *w, T *y) {
    int64_t block = v->c / v->groups * (v->k / v->groups);
    for (int64_t n = 0; n < v->n; n++)
        for (int64_t o = 0; o < v->ho * v->wo; o++)
            for (int64_t t = 0; t < v->r * v->s; t++) {
                int64_t p = pixel(v, o / v->wo, o % v->wo, t / v->s, t % v->s);
                for (int64_t g = 0; p >= 0 && g < v->groups; g++) NAME(tap)
                (v, kind, x + (n * v->h * v->w + p) * v->c, w + (t * v->groups + g) * block,
                 y + (n * v->ho * v->wo + o) * v->k, g);
            }
}

/* x, w and y in the graph's doubles; the one that kind computes is written. */
static void NAME(run)(const shape *v, int kind, double *x, double *w, double *y) {
    int64_t nx = v->n * v->h * v->w * v->c, ny = v->n * v->ho * v->wo * v->k,
            nw = v->k * v->r * v->s * (v->c / v->groups);
    T *tx = calloc((size_t)nx + 1, sizeof(T)), *ty = calloc((size_t)ny + 1, sizeof(T)),
      *tw = calloc((size_t)nw + 1, sizeof(T));
    if (!tx || !ty || !tw) abort();
    for (int64_t i = 0; kind != GRAD_INPUT && i < nx; i++) tx[i] = (T)x[i];
    for (int64_t i = 0; kind != FORWARD && i < ny; i++) ty[i] = (T)y[i];
    for (int64_t i = 0; kind != GRAD_WEIGHT && i < nw; i++) tw[turned(v, kind, i)] = (T)w[i];
    NAME(taps)(v, kind, tx, tw, ty);
    for (int64_t i = 0; kind == GRAD_INPUT && i < nx; i++) x[i] = tx[i];
    for (int64_t i = 0; kind == FORWARD && i < ny; i++) y[i] = ty[i];
    for (int64_t i = 0; kind == GRAD_WEIGHT && i < nw; i++) w[i] = tw[turned(v, kind, i)];
    free(tx);
    free(ty);
    free(tw);
}
#undef T
#undef NAME
