/* reduce.c -- reference reductions: each output element walks the input elements that fall on it. */
#include <math.h>

#include "ref.h"

/* How an input splits into what stays and what goes: sizes and strides of each. */
typedef struct split {
    int n_out, n_in;
    int64_t out_size[DDP_MAX_DIM], out_stride[DDP_MAX_DIM], in_size[DDP_MAX_DIM], in_stride[DDP_MAX_DIM];
    int64_t outs, ins; /* products */
} split;

static void split_dims(const ddp_meta *x, int64_t n_dims, const int64_t *dims, split *s) {
    bool gone[DDP_MAX_DIM];
    for (int d = 0; d < x->ndim; d++) gone[d] = n_dims <= 0;
    for (int64_t i = 0; i < n_dims && x->ndim; i++) gone[dims[i] < 0 ? dims[i] + x->ndim : dims[i]] = true;
    *s = (split){.outs = 1, .ins = 1};
    for (int d = 0; d < x->ndim; d++) {
        if (gone[d]) {
            s->in_size[s->n_in] = x->size[d];
            s->in_stride[s->n_in++] = x->stride[d];
            s->ins *= x->size[d];
        } else {
            s->out_size[s->n_out] = x->size[d];
            s->out_stride[s->n_out++] = x->stride[d];
            s->outs *= x->size[d];
        }
    }
}

static int64_t offset(int n, const int64_t *size, const int64_t *stride, int64_t i) {
    int64_t at = 0;
    for (int d = n - 1; d >= 0; d--) {
        at += i % size[d] * stride[d];
        i /= size[d];
    }
    return at;
}

static int64_t load_int(const ddp_tensor *t, int64_t at) {
    const void *p = ddp__ptr(t);
    if (t->m.dtype == DDP_I64) return ((const int64_t *)p)[at];
    return (int64_t)ddp__load(t->m.dtype, p, at);
}

/* In halves, so that the error grows with the logarithm of the length. */
static double pair_sum(const ddp_tensor *x, const split *s, int64_t base, int64_t lo, int64_t hi) {
    if (hi - lo > 64) {
        int64_t mid = (lo + hi) / 2;
        return pair_sum(x, s, base, lo, mid) + pair_sum(x, s, base, mid, hi);
    }
    double sum = 0;
    for (int64_t j = lo; j < hi; j++)
        sum += ddp__load(x->m.dtype, ddp__ptr(x), base + offset(s->n_in, s->in_size, s->in_stride, j));
    return sum;
}

static int sum(const ddp_call *c, const ddp_ints *dims, bool mean) {
    const ddp_tensor *x = c->in[0];
    ddp_tensor *y = c->out[0];
    split s;
    split_dims(&x->m, dims->n, dims->v, &s);
    for (int64_t i = 0; i < y->numel; i++) {
        int64_t base = offset(s.n_out, s.out_size, s.out_stride, i);
        if (y->m.dtype == DDP_I64) {
            uint64_t total = 0; /* wraps */
            for (int64_t j = 0; j < s.ins; j++)
                total += (uint64_t)load_int(x, base + offset(s.n_in, s.in_size, s.in_stride, j));
            ((int64_t *)(void *)ddp__ptr(y))[ref_at(&y->m, i)] = (int64_t)total;
            continue;
        }
        double total = pair_sum(x, &s, base, 0, s.ins);
        ref_put(y, i, mean ? total / (double)s.ins : total);
    }
    return 0;
}

static int run_sum(const ddp_call *c) { return sum(c, &((const ddp_sum_attrs *)c->attrs)->dim, false); }
DDP_REF_KERNEL(sum, run_sum);
static int run_mean(const ddp_call *c) { return sum(c, &((const ddp_mean_attrs *)c->attrs)->dim, true); }
DDP_REF_KERNEL(mean, run_mean);

/* Position of the extreme among s->ins elements: the first one; NaN beats all. sign -1 finds the smallest. */
static int64_t extreme(const ddp_tensor *x, const split *s, int64_t base, int sign) {
    int64_t best = 0;
    bool is_int = !ddp__is_float(x->m.dtype);
    for (int64_t j = 1; j < s->ins; j++) {
        int64_t a = base + offset(s->n_in, s->in_size, s->in_stride, j),
                b = base + offset(s->n_in, s->in_size, s->in_stride, best);
        if (is_int) {
            int64_t u = load_int(x, a), v = load_int(x, b);
            if (sign > 0 ? u > v : u < v) best = j;
            continue;
        }
        double u = ddp__load(x->m.dtype, ddp__ptr(x), a), v = ddp__load(x->m.dtype, ddp__ptr(x), b);
        if (isnan(v)) break;
        if (isnan(u) || (sign > 0 ? u > v : u < v)) best = j;
    }
    return best;
}

/* The values (y) and positions (ids) of extremes; either may be NULL. */
static int extremes(const ddp_tensor *x, int64_t n_dims, const int64_t *dims, int sign, ddp_tensor *y,
                    ddp_tensor *ids) {
    split s;
    split_dims(&x->m, n_dims, dims, &s);
    int bytes = ddp__dtype_bytes[x->m.dtype];
    for (int64_t i = 0; i < (y ? y : ids)->numel; i++) {
        int64_t base = offset(s.n_out, s.out_size, s.out_stride, i), j = extreme(x, &s, base, sign);
        int64_t at = base + offset(s.n_in, s.in_size, s.in_stride, j);
        if (y) __builtin_memcpy(ddp__ptr(y) + ref_at(&y->m, i) * bytes, ddp__ptr(x) + at * bytes, (size_t)bytes);
        if (ids) ((int64_t *)(void *)ddp__ptr(ids))[ref_at(&ids->m, i)] = j;
    }
    return 0;
}

static int run_amax(const ddp_call *c) {
    const ddp_amax_attrs *a = c->attrs;
    return extremes(c->in[0], a->dim.n, a->dim.v, 1, c->out[0], NULL);
}
DDP_REF_KERNEL(amax, run_amax);
static int run_amin(const ddp_call *c) {
    const ddp_amin_attrs *a = c->attrs;
    return extremes(c->in[0], a->dim.n, a->dim.v, -1, c->out[0], NULL);
}
DDP_REF_KERNEL(amin, run_amin);
static int run_max_dim(const ddp_call *c) {
    return extremes(c->in[0], 1, &((const ddp_max_dim_attrs *)c->attrs)->dim, 1, c->out[0], c->out[1]);
}
DDP_REF_KERNEL(max_dim, run_max_dim);
static int run_argmax(const ddp_call *c) {
    const ddp_argmax_attrs *a = c->attrs;
    return extremes(c->in[0], a->flat ? -1 : 1, &a->dim, 1, NULL, c->out[0]);
}
DDP_REF_KERNEL(argmax, run_argmax);
