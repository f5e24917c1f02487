/* test_cudnn_graphs.c -- every graph that kernels/cudnn builds for convolutions: the real cuDNN makes a plan of it for every profile,
 * and the double computes what a plain loop does. */
/* with: kernels/cudnn/graph.c kernels/cudnn/graph_norm.c kernels/cudnn/engine.c kernels/cudnn/conv_graph.c */
#include "cudnn_test.h"
#include "../../kernels/cudnn/conv.h"

static const ddp_dtype dtypes[] = {DDP_F32, DDP_F64, DDP_F16, DDP_BF16};
static const char *const profiles[] = {"h200", "a100", "l40s", "b200", "t4", "rtx3090"};
#define COUNT(a) ((int)(sizeof(a) / sizeof((a)[0])))

/* ---- cases: x [n,c,h,w], k windows of r x s ---------------------------------------------------------------------------- */

typedef struct shape {
    const char *name;
    int64_t n, c, h, w, k, r, s, stride[2], padding[2], dilation[2], groups;
} shape;

static const shape shapes[] = {
    {"3x3", 2, 3, 5, 5, 4, 3, 3, {1, 1}, {0, 0}, {1, 1}, 1},
    {"3x2, stride 2, padding 1 and 0", 1, 2, 6, 5, 3, 3, 2, {2, 2}, {1, 0}, {1, 1}, 1},
    {"groups", 1, 4, 5, 5, 6, 2, 2, {1, 1}, {1, 1}, {1, 1}, 2},
    {"depthwise", 2, 8, 6, 6, 8, 3, 3, {1, 1}, {1, 1}, {1, 1}, 8},
    {"dilation", 1, 3, 9, 8, 5, 3, 3, {1, 1}, {2, 2}, {2, 2}, 1},
    {"1x1", 2, 16, 4, 4, 8, 1, 1, {1, 1}, {0, 0}, {1, 1}, 1},
    {"1x1, stride 2", 2, 16, 8, 8, 32, 1, 1, {2, 2}, {0, 0}, {1, 1}, 1},
    {"one of all", 1, 1, 1, 1, 1, 1, 1, {1, 1}, {0, 0}, {1, 1}, 1},
    {"7x7, stride 2", 1, 3, 18, 20, 8, 7, 7, {2, 2}, {3, 3}, {1, 1}, 1},
    {"17 to 33", 2, 17, 7, 8, 33, 3, 3, {2, 2}, {1, 1}, {1, 1}, 1},
    {"16 to 16", 2, 16, 8, 8, 16, 3, 3, {1, 1}, {1, 1}, {1, 1}, 1},
    {"32 in 4 groups", 1, 32, 8, 8, 32, 3, 3, {1, 1}, {2, 2}, {2, 2}, 4},
};

static void strides(const int64_t *size, bool last, int64_t *s) {
    s[3] = last ? size[1] : 1;
    s[2] = s[3] * size[3];
    s[1] = last ? 1 : s[2] * size[2];
    s[0] = size[1] * size[2] * size[3];
}

static int64_t numel(const int64_t *size) { return size[0] * size[1] * size[2] * size[3]; }

static conv conv_of(const shape *p, cg_conv_kind kind, ddp_dtype dtype, bool rows) {
    conv v = {.kind = kind, .dtype = dtype, .groups = p->groups, .align = {16, 16, 16, 16}, .vector = dtype};
    const int64_t x[4] = {p->n, p->c, p->h, p->w}, w[4] = {p->k, p->c / p->groups, p->r, p->s};
    memcpy(v.x, x, sizeof x);
    memcpy(v.w, w, sizeof w);
    v.y[0] = p->n;
    v.y[1] = p->k;
    for (int i = 0; i < 2; i++) {
        v.stride[i] = p->stride[i];
        v.padding[i] = p->padding[i];
        v.dilation[i] = p->dilation[i];
        v.y[2 + i] = (x[2 + i] + 2 * v.padding[i] - v.dilation[i] * (w[2 + i] - 1) - 1) / v.stride[i] + 1;
    }
    ddp_meta m = {.ndim = 4};
    strides(v.x, !rows, v.x_stride);
    strides(v.y, !rows, v.y_stride);
    memcpy(v.r_stride, v.y_stride, sizeof v.r_stride);
    memcpy(m.size, v.w, sizeof v.w); /* as the kernels do: PyTorch's order, canonical where it does not matter */
    strides(v.w, false, m.stride);
    conv_strides(&m, v.w_stride);
    return v;
}

/* ---- the plain loop ---------------------------------------------------------------------------------------------------- */

static int64_t at(const int64_t *stride, int64_t a, int64_t b, int64_t c, int64_t d) {
    return a * stride[0] + b * stride[1] + c * stride[2] + d * stride[3];
}

/* Adds the products of v to the role that its kind computes; all in memory order of their strides. */
static void loop(const conv *v, double *x, double *w, double *y) {
    int64_t kg = v->w[0] / v->groups, cg = v->w[1];
    double *to = v->kind == CG_FORWARD ? y : v->kind == CG_GRAD_INPUT ? x : w;
    memset(to, 0,
           sizeof(double) * (size_t)numel(v->kind == CG_FORWARD      ? v->y
                                          : v->kind == CG_GRAD_INPUT ? v->x
                                                                     : v->w));
    for (int64_t n = 0; n < v->y[0]; n++)
        for (int64_t k = 0; k < v->y[1]; k++)
            for (int64_t o = 0; o < v->y[2] * v->y[3]; o++)
                for (int64_t t = 0; t < cg * v->w[2] * v->w[3]; t++) {
                    int64_t c = t / (v->w[2] * v->w[3]), r = t / v->w[3] % v->w[2], s = t % v->w[3], ho = o / v->y[3],
                            wo = o % v->y[3];
                    int64_t h = ho * v->stride[0] - v->padding[0] + r * v->dilation[0],
                            q = wo * v->stride[1] - v->padding[1] + s * v->dilation[1];
                    if (h < 0 || h >= v->x[2] || q < 0 || q >= v->x[3]) continue;
                    double *px = &x[at(v->x_stride, n, k / kg * cg + c, h, q)], *pw = &w[at(v->w_stride, k, c, r, s)],
                           *py = &y[at(v->y_stride, n, k, ho, wo)];
                    if (v->kind == CG_FORWARD) *py += *px * *pw;
                    else if (v->kind == CG_GRAD_INPUT) *px += *py * *pw;
                    else *pw += *px * *py;
                }
}

/* What follows the product, element by element; vectors of k numbers. */
static void loop_after(const conv *v, double *y, const double *scale, const double *bias, const double *residual) {
    for (int64_t i = 0; i < numel(v->y); i++) {
        int64_t k = v->y_stride[1] == 1 ? i % v->y[1] : i / (v->y[2] * v->y[3]) % v->y[1];
        if (v->after == CONV_NORMED) y[i] *= scale[k];
        if (v->after == CONV_BIASED || v->after == CONV_NORMED) y[i] += bias[k];
        if (v->residual) y[i] += residual[i];
        if (v->relu && y[i] < 0) y[i] = 0;
    }
}

/* ---- one graph ------------------------------------------------------------------------------------------------------------ */

static const cg_filter any = {.tensor_f32 = true, .winograd = true, .workspace = 1 << 30};

/* Builds v and its first plan for the double's device; a status. */
static int plan(cg_graph *g, const conv *v, const cg_filter *f, cg_plan *p) {
    cg_graph t;
    cg_start(g, "conv2d");
    cg_start(&t, "conv2d");
    conv_graph(g, v);
    cg_finish(g);
    cg_desc device = g->status ? NULL : cg_device(&t, handle, NULL);
    if (g->status == 0) cg_plans(g, device, f, 1, p);
    if (device) ddp__cuda.cudnnBackendDestroyDescriptor(device);
    cg_free(&t);
    return g->status;
}

typedef struct operand {
    int64_t uid, n;
    ddp_dtype dtype;
    double *v; /* what it should hold */
    void *p;
} operand;

static operand make(int64_t uid, int64_t n, ddp_dtype d, bool result) {
    operand o = {uid, n, d, random_numbers(n), NULL};
    o.p = packed(d, n, result ? NULL : o.v);
    return o;
}

/* Computes v by loops and, as the graph of `as`, on the double. */
static void run_as(const char *name, const conv *v, const conv *as) {
    cg_graph g;
    cg_plan p;
    if (plan(&g, as, &any, &p) < 0) {
        fail("%s: %s", name, g.why);
        cg_free(&g);
        return;
    }
    ddp_dtype d = (ddp_dtype)v->dtype, wide = ddp__wide(d);
    int64_t k = v->w[0];
    operand o[] = {make(CONV_X, numel(v->x), d, v->kind == CG_GRAD_INPUT),
                   make(CONV_W, numel(v->w), d, v->kind == CG_GRAD_WEIGHT),
                   make(CONV_Y, numel(v->y), d, v->kind == CG_FORWARD),
                   make(CONV_BIAS, k, (ddp_dtype)v->vector, false),
                   make(CONV_SCALE, k, wide, false),
                   make(CONV_RESIDUAL, numel(v->y), d, false),
                   make(CONV_SUM, k, wide, true),
                   make(CONV_SQUARE, k, wide, true)};
    loop(v, o[0].v, o[1].v, o[2].v);
    loop_after(v, o[2].v, o[4].v, o[3].v, o[5].v);
    int64_t uid[8];
    void *ptr[8], *workspace = aligned_alloc(256, ((size_t)p.workspace + 511) / 256 * 256);
    for (int i = 0; i < 8; i++) {
        uid[i] = o[i].uid;
        ptr[i] = o[i].p;
    }
    if (cg_run(&g, &p, handle, 8, uid, ptr, workspace) < 0) fail("%s: %s", name, g.why);
    const operand *to = v->kind == CG_FORWARD ? &o[2] : v->kind == CG_GRAD_INPUT ? &o[0] : &o[1];
    double products = (double)(v->kind == CG_FORWARD ? numel(v->w) / v->w[0] : numel(v->y) / v->y[1]);
    compare(name, d, to->n, to->p, to->v, tolerance(d, products));
    for (int64_t i = 0; i < k && v->after == CONV_STATISTICS; i++) {
        o[6].v[i] = o[7].v[i] = 0;
        for (int64_t j = 0; j < o[2].n; j++) {
            double y = (v->y_stride[1] == 1 ? j % k : j / (v->y[2] * v->y[3]) % k) == i ? ddp__load(d, o[2].p, j) : 0;
            o[6].v[i] += y;
            o[7].v[i] += y * y;
        }
    }
    if (v->after == CONV_STATISTICS) compare("sums", wide, k, o[6].p, o[6].v, 1e-4);
    if (v->after == CONV_STATISTICS) compare("squares", wide, k, o[7].p, o[7].v, 1e-4);
    for (int i = 0; i < 8; i++) {
        free(o[i].v);
        free(o[i].p);
    }
    free(workspace);
    cg_free(&g);
}

static void run(const char *name, const conv *v) { run_as(name, v, v); }

/* ---- values ---------------------------------------------------------------------------------------------------------------- */

static void convolutions(cg_conv_kind kind, conv_after after, bool rows) {
    char name[160];
    for (int d = 0; d < COUNT(dtypes); d++)
        for (int i = 0; i < COUNT(shapes) && !wrong[0]; i++) {
            conv v = conv_of(&shapes[i], kind, dtypes[d], rows);
            v.after = after;
            snprintf(name, sizeof name, "%s of %s", shapes[i].name, ddp_dtype_name(dtypes[d]));
            run(name, &v);
        }
}
static void forward(void) { convolutions(CG_FORWARD, CONV_PLAIN, false); }
static void grad_input(void) { convolutions(CG_GRAD_INPUT, CONV_PLAIN, false); }
static void grad_weight(void) { convolutions(CG_GRAD_WEIGHT, CONV_PLAIN, false); }
static void bias(void) { convolutions(CG_FORWARD, CONV_BIASED, false); }
static void row_major(void) {
    convolutions(CG_FORWARD, CONV_PLAIN, true);
    convolutions(CG_GRAD_INPUT, CONV_PLAIN, true);
    convolutions(CG_GRAD_WEIGHT, CONV_PLAIN, true);
}

static void after(conv_after how, ddp_dtype d, bool scaled_first) {
    static const int which[] = {0, 5, 10};
    char name[160];
    for (int i = 0; i < COUNT(which) && !wrong[0]; i++)
        for (int more = 0; more < (how == CONV_STATISTICS ? 1 : 4); more++) {
            conv v = conv_of(&shapes[which[i]], CG_FORWARD, d, false);
            v.after = how;
            v.residual = more & 1;
            v.relu = more >> 1;
            if (scaled_first) v.vector = ddp__wide(d);
            snprintf(name, sizeof name, "%s of %s%s%s", shapes[which[i]].name, ddp_dtype_name(d),
                     v.residual ? ", residual" : "", v.relu ? ", relu" : "");
            run(name, &v);
        }
}
static void biased_f32(void) { after(CONV_BIASED, DDP_F32, false); }
static void normed_f16(void) { after(CONV_NORMED, DDP_F16, true); }
static void normed_bf16(void) { after(CONV_NORMED, DDP_BF16, true); }
static void statistics(void) {
    after(CONV_STATISTICS, DDP_BF16, false);
    after(CONV_STATISTICS, DDP_F16, false);
}

/* ---- what engines may do ------------------------------------------------------------------------------------------------- */

/* All plans that f allows of some gradients of x in f32; seen: which notes any of them has. */
static unsigned notes_with(const cg_filter *f) {
    unsigned seen = 0;
    for (int i = 9; i < 12; i++) {
        conv v = conv_of(&shapes[i], CG_GRAD_INPUT, DDP_F32, false);
        cg_graph g;
        cg_plan p[16];
        cg_start(&g, "conv2d_grad_input");
        conv_graph(&g, &v);
        cg_finish(&g);
        cg_desc device = cg_device(&g, handle, NULL);
        int n = cg_plans(&g, device, f, 16, p);
        for (int k = 0; k < n; k++) {
            seen |= p[k].notes;
            if (p[k].workspace > f->workspace) fail("a plan of %lld bytes of workspace", (long long)p[k].workspace);
        }
        if (n == 0) fail("%s: %s", shapes[i].name, g.why);
        ddp__cuda.cudnnBackendDestroyDescriptor(device);
        cg_free(&g);
    }
    return seen;
}

static void filters(void) {
    const unsigned varies = 1u << CUDNN_NUMERICAL_NOTE_NONDETERMINISTIC,
                   tensor = 1u << CUDNN_NUMERICAL_NOTE_TENSOR_CORE;
    cg_filter f = {.is_f32 = true, .tensor_f32 = true, .winograd = true, .workspace = 1 << 30};
    unsigned seen = notes_with(&f);
    if (!(seen & varies)) fail("no plan that varies: nothing is tested");
    if (checked_by_cudnn() && !(seen & tensor)) fail("no plan on tensor cores: nothing is tested");
    f.deterministic = true;
    if (notes_with(&f) & varies) fail("a plan that varies is deterministic");
    f.tensor_f32 = false;
    if (notes_with(&f) & tensor) fail("a plan of f32 on tensor cores, without TF32");
    f.deterministic = false;
    f.workspace = 1 << 16;
    notes_with(&f);
}

/* ---- graphs that cuDNN takes and that are wrong: the numbers say so --------------------------------------------------- */

static void expect_wrong(const char *name, const conv *v, const conv *as) {
    char kept[sizeof wrong];
    memcpy(kept, wrong, sizeof kept);
    wrong[0] = 0;
    run_as(name, v, as);
    bool seen = strstr(wrong, "expected") || strstr(wrong, "cuDNN");
    memcpy(wrong, kept, sizeof wrong);
    if (!seen) fail("%s is not seen", name);
}

static void wrong_graphs(void) {
    conv v = conv_of(&shapes[10], CG_FORWARD, DDP_F32, false), as = v;
    strides(v.w, true, as.w_stride);
    expect_wrong("w in another order", &v, &as);
    as = v;
    strides(v.x, false, as.x_stride);
    expect_wrong("x in another order", &v, &as);
    as = v;
    as.kind = CG_GRAD_INPUT; /* x, which is given, would be written */
    expect_wrong("a gradient in place of the forward", &v, &as);
    v = as = conv_of(&shapes[1], CG_FORWARD, DDP_F32, false);
    as.padding[0] = 0;
    if (checked_by_cudnn()) expect_wrong("no padding", &v, &as); /* the double alone would end the process */
    v = as = conv_of(&shapes[10], CG_FORWARD, DDP_F32, false);
    v.after = CONV_BIASED;
    expect_wrong("a bias left out", &v, &as);
    v = as = conv_of(&shapes[10], CG_FORWARD, DDP_BF16, false);
    v.after = CONV_NORMED;
    as.after = CONV_BIASED;
    v.vector = as.vector = DDP_F32;
    expect_wrong("a scale left out", &v, &as);
    as = v;
    as.relu = 1;
    expect_wrong("relu where there is none", &v, &as);
}

/* ---- plans for every profile ---------------------------------------------------------------------------------------------- */

static void every_profile(void) {
    int made = 0;
    for (int p = 0; p < COUNT(profiles); p++) {
        setenv("DDP_DOUBLE_PROFILE", profiles[p], 1);
        for (int d = 0; d < COUNT(dtypes); d++)
            for (int kind = 0; kind < 4; kind++)
                for (int i = 0; i < COUNT(shapes); i++) {
                    if (shapes[i].groups == shapes[i].c && !getenv("DDP_TEST_CUDNN_ALL"))
                        continue; /* half a second each */
                    conv v = conv_of(&shapes[i], kind == 3 ? CG_FORWARD : (cg_conv_kind)kind, dtypes[d], false);
                    cg_graph g;
                    cg_plan q;
                    v.after = kind == 3 ? CONV_BIASED : CONV_PLAIN;
                    bool may_lack =
                        strcmp(profiles[p], "t4") == 0 && dtypes[d] == DDP_BF16; /* before compute capability 8.0 */
                    if (plan(&g, &v, &any, &q) < 0 && !may_lack)
                        fail("%s, %s of %s on %s: %s", shapes[i].name,
                             kind == 3 ? "bias"
                             : kind    ? "a gradient"
                                       : "forward",
                             ddp_dtype_name(dtypes[d]), profiles[p], g.why);
                    made++;
                    cg_free(&g);
                }
    }
    unsetenv("DDP_DOUBLE_PROFILE");
    if (made < 900) fail("only %d graphs were tried", made);
}

/* What follows a convolution, compiled for each profile: a second each. */
static void compiled_on_every_profile(void) {
    static const struct {
        conv_after after;
        ddp_dtype dtype;
    } what[] = {{CONV_NORMED, DDP_F16},      {CONV_NORMED, DDP_BF16},    {CONV_STATISTICS, DDP_F16},
                {CONV_STATISTICS, DDP_BF16}, {CONV_STATISTICS, DDP_F32}, {CONV_BIASED, DDP_F32}};
    for (int p = 0; p < COUNT(profiles); p++)
        for (int i = 0; i < COUNT(what); i++)
            for (int more = 0; more < (what[i].after == CONV_STATISTICS ? 1 : 4); more++) {
                conv v = conv_of(&shapes[10], CG_FORWARD, what[i].dtype, false);
                cg_graph g;
                cg_plan q;
                bool turing = strcmp(profiles[p], "t4") == 0;
                v.after = what[i].after;
                v.vector = DDP_F32;
                v.residual = more & 1;
                v.relu = more >> 1;
                setenv("DDP_DOUBLE_PROFILE", profiles[p], 1);
                if (plan(&g, &v, &any, &q) < 0 && !(turing && what[i].after != CONV_BIASED))
                    fail("%s of %s on %s: %s", v.after == CONV_NORMED ? "a norm" : "statistics",
                         ddp_dtype_name(what[i].dtype), profiles[p], g.why);
                cg_free(&g);
            }
    unsetenv("DDP_DOUBLE_PROFILE");
}

int main(void) {
    open_double();
    test("cuDNN: conv2d of every shape and dtype is the plain loop's", forward);
    test("cuDNN: conv2d_grad_input of every shape and dtype is the plain loop's", grad_input);
    test("cuDNN: conv2d_grad_weight of every shape and dtype is the plain loop's", grad_weight);
    test("cuDNN: conv2d with a bias is one graph", bias);
    test("cuDNN: row-major activations", row_major);
    test("cuDNN: bias, residual and relu after a convolution of f32", biased_f32);
    test("cuDNN: scale, shift, residual and relu after a convolution of f16", normed_f16);
    test("cuDNN: scale, shift, residual and relu after a convolution of bf16", normed_bf16);
    test("cuDNN: statistics of a convolution's result in one graph", statistics);
    test("cuDNN: engines that vary, use TF32 or want much workspace are left out", filters);
    test("cuDNN: wrong graphs have wrong numbers", wrong_graphs);
    if (checked_by_cudnn()) test("cuDNN: convolutions have a plan on every profile", every_profile);
    else printf("skip cuDNN: convolutions have a plan on every profile: the real cuDNN is not there\n");
    if (getenv("DDP_TEST_CUDNN_ALL"))
        test("cuDNN: what follows a convolution is compiled for every profile", compiled_on_every_profile);
    return end();
}
