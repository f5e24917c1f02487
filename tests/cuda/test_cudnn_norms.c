/* test_cudnn_norms.c -- graphs of normalisations, pooling, products and reductions: plans by the real cuDNN, numbers by the double. */
/* with: kernels/cudnn/graph.c kernels/cudnn/graph_norm.c kernels/cudnn/engine.c */
#include "cudnn_test.h"

#define COUNT(a) ((int)(sizeof(a) / sizeof((a)[0])))

static cg_graph g;
static int64_t uid[24];
static void *ptr[24];
static int bound;

static int64_t numel(const int64_t *s) { return s[0] * s[1] * s[2] * s[3]; }

/* A channels-last tensor of `size` in g under a uid of its own; p is its memory. */
static int bind(cudnnDataType_t type, const int64_t *size, void *p) {
    cg_spec s = {.uid = bound + 1, .type = type, .n = 4};
    memcpy(s.size, size, sizeof(int64_t) * 4);
    s.stride[1] = 1;
    s.stride[3] = size[1];
    s.stride[2] = size[1] * size[3];
    s.stride[0] = size[1] * size[3] * size[2];
    uid[bound] = bound + 1;
    ptr[bound++] = p;
    return cg_tensor(&g, &s);
}

static int bind_number(float *p) {
    uid[bound] = bound + 1;
    ptr[bound++] = p;
    return cg_number(&g, bound, CUDNN_DATA_FLOAT, 4);
}

static void begin(const char *name) {
    cg_start(&g, name);
    bound = 0;
}

/* A plan for the double's device, and its run. */
static void run(void) {
    const cg_filter f = {.tensor_f32 = true, .winograd = true, .workspace = 1 << 30};
    cg_plan p;
    cg_finish(&g);
    cg_desc device = cg_device(&g, handle, NULL);
    if (g.status == 0 && cg_plans(&g, device, &f, 1, &p) > 0) {
        void *workspace = aligned_alloc(256, ((size_t)p.workspace + 511) / 256 * 256);
        cg_run(&g, &p, handle, bound, uid, ptr, workspace);
        free(workspace);
    }
    if (g.status < 0) fail("%s", g.why);
    if (device) ddp__cuda.cudnnBackendDestroyDescriptor(device);
    cg_free(&g);
}

/* ---- normalisation: x and its statistics' sizes say over what ---------------------------------------------------------- */

typedef struct norm_case {
    cudnnBackendNormMode_t mode;
    int64_t x[4], statistics[4], weights[4];
} norm_case;
static const norm_case batch = {CUDNN_BATCH_NORM, {4, 16, 6, 6}, {1, 16, 1, 1}, {1, 16, 1, 1}};
static const norm_case layer = {CUDNN_LAYER_NORM, {12, 32, 1, 1}, {12, 1, 1, 1}, {1, 32, 1, 1}};

/* Element i of a channels-last walk over x: which of the statistics and weights is its. */
static int64_t which(const int64_t *x, const int64_t *of, int64_t i) {
    int64_t c = i % x[1], n = i / (x[1] * x[2] * x[3]);
    return (of[0] > 1 ? n : 0) * of[1] + (of[1] > 1 ? c : 0);
}

static void norm_numbers(const norm_case *k, ddp_dtype d) {
    int64_t n = numel(k->x), ns = numel(k->statistics), nw = numel(k->weights);
    double most = tolerance(d, 64), *x = random_numbers(n), *w = random_numbers(nw), *b = random_numbers(nw),
           *dy = random_numbers(n);
    void *px = packed(d, n, x), *pw = packed(DDP_F32, nw, w), *pb = packed(DDP_F32, nw, b), *pdy = packed(d, n, dy);
    void *py = packed(d, n, NULL), *pm = packed(DDP_F32, ns, NULL), *pr = packed(DDP_F32, ns, NULL),
         *pdx = packed(d, n, NULL), *pdw = packed(DDP_F32, nw, NULL), *pdb = packed(DDP_F32, nw, NULL);
    double *mean = calloc((size_t)ns, 8), *rstd = calloc((size_t)ns, 8), *y = calloc((size_t)n, 8),
           *dx = calloc((size_t)n, 8), *dw = calloc((size_t)nw, 8), *db = calloc((size_t)nw, 8),
           *mg = calloc((size_t)ns, 8), *mgh = calloc((size_t)ns, 8);
    double count = (double)(n / ns);
    float eps = 1e-3f;
    for (int64_t i = 0; i < n; i++) mean[which(k->x, k->statistics, i)] += x[i] / count;
    for (int64_t i = 0; i < n; i++)
        rstd[which(k->x, k->statistics, i)] += pow(x[i] - mean[which(k->x, k->statistics, i)], 2) / count;
    for (int64_t i = 0; i < ns; i++) rstd[i] = 1 / sqrt(rstd[i] + 1e-3);
    for (int64_t i = 0; i < n; i++) {
        int64_t s = which(k->x, k->statistics, i), j = which(k->x, k->weights, i);
        double h = (x[i] - mean[s]) * rstd[s], gr = dy[i] * w[j];
        y[i] = h * w[j] + b[j];
        dw[j] += dy[i] * h;
        db[j] += dy[i];
        mg[s] += gr / count;
        mgh[s] += gr * h / count;
    }
    for (int64_t i = 0; i < n; i++) {
        int64_t s = which(k->x, k->statistics, i), j = which(k->x, k->weights, i);
        dx[i] = rstd[s] * (dy[i] * w[j] - mg[s] - (x[i] - mean[s]) * rstd[s] * mgh[s]);
    }
    begin("norm");
    cg_norm m = {k->mode, true,    CG_NONE, CG_NONE, CG_NONE, CG_NONE, CG_NONE, CG_NONE, CG_NONE,
                 CG_NONE, CG_NONE, CG_NONE, CG_NONE, CG_NONE, CG_NONE, CG_NONE, CG_NONE, CG_NONE};
    cg_norm back = m;
    m.x = bind(cg_type(d), k->x, px);
    m.y = bind(cg_type(d), k->x, py);
    m.scale = bind(CUDNN_DATA_FLOAT, k->weights, pw);
    m.bias = bind(CUDNN_DATA_FLOAT, k->weights, pb);
    m.mean = bind(CUDNN_DATA_FLOAT, k->statistics, pm);
    m.rstd = bind(CUDNN_DATA_FLOAT, k->statistics, pr);
    m.eps = bind_number(&eps);
    cg_norm_forward(&g, &m);
    run();
    compare("y", d, n, py, y, most);
    compare("mean", DDP_F32, ns, pm, mean, 1e-5);
    compare("rstd", DDP_F32, ns, pr, rstd, 1e-5);
    begin("norm");
    back.x = bind(cg_type(d), k->x, px);
    back.dy = bind(cg_type(d), k->x, pdy);
    back.dx = bind(cg_type(d), k->x, pdx);
    back.scale = bind(CUDNN_DATA_FLOAT, k->weights, pw);
    back.mean = bind(CUDNN_DATA_FLOAT, k->statistics, pm);
    back.rstd = bind(CUDNN_DATA_FLOAT, k->statistics, pr);
    back.dscale = bind(CUDNN_DATA_FLOAT, k->weights, pdw);
    back.dbias = bind(CUDNN_DATA_FLOAT, k->weights, pdb);
    cg_norm_backward(&g, &back);
    run();
    compare("dx", d, n, pdx, dx, most);
    compare("dweight", DDP_F32, nw, pdw, dw, 1e-4);
    compare("dbias", DDP_F32, nw, pdb, db, 1e-4);
    void *all[] = {x, w, b, dy, px, pw, pb, pdy, py, pm, pr, pdx, pdw, pdb, mean, rstd, y, dx, dw, db, mg, mgh};
    for (int i = 0; i < COUNT(all); i++) free(all[i]);
}
static void batch_norm(void) {
    norm_numbers(&batch, DDP_F32);
    norm_numbers(&batch, DDP_BF16);
}
static void layer_norm(void) {
    norm_numbers(&layer, DDP_F32);
    norm_numbers(&layer, DDP_F16);
}

/* ---- pooling -------------------------------------------------------------------------------------------------------------- */

static void pool(cudnnResampleMode_t mode, ddp_dtype d) {
    const int64_t xs[4] = {2, 8, 7, 7}, ys[4] = {2, 8, 4, 4};
    int64_t nx = numel(xs), ny = numel(ys);
    double *x = random_numbers(nx), *y = calloc((size_t)ny, 8);
    void *px = packed(d, nx, x), *py = packed(d, ny, NULL);
    for (int64_t i = 0; i < ny; i++) {
        int64_t c = i % 8, wo = i / 8 % 4, ho = i / 32 % 4, n = i / 128, inside = 0;
        double best = -INFINITY, sum = 0;
        for (int64_t t = 0; t < 9; t++) {
            int64_t h = ho * 2 - 1 + t / 3, w = wo * 2 - 1 + t % 3;
            if (h < 0 || h >= 7 || w < 0 || w >= 7) continue;
            double v = x[((n * 7 + h) * 7 + w) * 8 + c];
            best = v > best ? v : best;
            sum += v;
            inside++;
        }
        y[i] = mode == CUDNN_RESAMPLE_MAXPOOL
                   ? best
                   : sum / (double)(mode == CUDNN_RESAMPLE_AVGPOOL_EXCLUDE_PADDING ? inside : 9);
    }
    begin("pool");
    cg_pool p = {mode,    {3, 3},  {2, 2}, {1, 1}, bind(cg_type(d), xs, px), bind(cg_type(d), ys, py),
                 CG_NONE, CG_NONE, CG_NONE};
    cg_pool_forward(&g, &p);
    run();
    compare("y", d, ny, py, y, tolerance(d, 9));
    free(x);
    free(y);
    free(px);
    free(py);
}
static void max_pool(void) {
    pool(CUDNN_RESAMPLE_MAXPOOL, DDP_F32);
    pool(CUDNN_RESAMPLE_MAXPOOL, DDP_F16);
}
static void mean_pool(void) {
    pool(CUDNN_RESAMPLE_AVGPOOL_INCLUDE_PADDING, DDP_F32);
    pool(CUDNN_RESAMPLE_AVGPOOL_EXCLUDE_PADDING, DDP_F32);
}

/* ---- products --------------------------------------------------------------------------------------------------------------- */

/* y = gelu(a b + bias), [8, 16] by [16, 24]: 3 dims, as cuDNN's products are. */
static void product(void) {
    int64_t m = 8, n = 24, k = 16;
    double *a = random_numbers(m * k), *b = random_numbers(k * n), *c = random_numbers(n),
           *y = calloc((size_t)(m * n), 8);
    void *pa = packed(DDP_F16, m * k, a), *pb = packed(DDP_F16, k * n, b), *pc = packed(DDP_F16, n, c),
         *py = packed(DDP_F16, m * n, NULL);
    for (int64_t i = 0; i < m * n; i++) {
        double s = c[i % n];
        for (int64_t j = 0; j < k; j++) s += a[i / n * k + j] * b[j * n + i % n];
        y[i] = s / 2 * (1 + tanh(0.7978845608028654 * (s + 0.044715 * s * s * s)));
    }
    begin("product");
    const cudnnDataType_t H = CUDNN_DATA_HALF;
    cg_spec sa = {.uid = 1, .type = H, .n = 3, .size = {1, m, k}, .stride = {m * k, k, 1}},
            sb = {.uid = 2, .type = H, .n = 3, .size = {1, k, n}, .stride = {k * n, n, 1}},
            sc = {.uid = 3, .type = H, .n = 3, .size = {1, 1, n}, .stride = {n, n, 1}},
            sy = {.uid = 4, .type = H, .n = 3, .size = {1, m, n}, .stride = {m * n, n, 1}};
    const int64_t size[3] = {1, m, n};
    int t = cg_virtual(&g, CUDNN_DATA_FLOAT, 3, size, false), u = cg_virtual(&g, CUDNN_DATA_FLOAT, 3, size, false);
    cg_matmul(&g, cg_tensor(&g, &sa), cg_tensor(&g, &sb), t);
    cg_pointwise(&g, CUDNN_POINTWISE_ADD, t, cg_tensor(&g, &sc), CG_NONE, u);
    cg_pointwise(&g, CUDNN_POINTWISE_GELU_APPROX_TANH_FWD, u, CG_NONE, CG_NONE, cg_tensor(&g, &sy));
    for (bound = 0; bound < 4; bound++) {
        uid[bound] = bound + 1;
        ptr[bound] = (void *[]){pa, pb, pc, py}[bound];
    }
    run();
    compare("gelu(a b + c)", DDP_F16, m * n, py, y, tolerance(DDP_F16, k));
    void *all[] = {a, b, c, y, pa, pb, pc, py};
    for (int i = 0; i < COUNT(all); i++) free(all[i]);
}

/* ---- graphs that are wrong ---------------------------------------------------------------------------------------------------- */

/* Each graph is refused by someone: the real cuDNN when it is built, or by the double when it runs (a child that ends by abort). */
static void wrong_shapes(void) {
    const int64_t x[4] = {2, 8, 6, 6}, w[4] = {4, 8, 3, 3}, y[4] = {2, 4, 6, 6}, y_small[4] = {2, 4, 4, 4},
                  w_swapped[4] = {8, 4, 3, 3};
    const struct {
        const char *name;
        const int64_t *x, *w, *y;
    } bad[] = {{"x and y swapped", y, w, x},
               {"a result without the padding", x, w, y_small},
               {"w's channels swapped", x, w_swapped, y}};
    const cg_window win = {{1, 1}, {1, 1}, {1, 1}};
    for (int i = 0; i < COUNT(bad); i++) {
        begin("conv2d");
        cg_conv(&g, CG_FORWARD, &win, CUDNN_DATA_FLOAT, bind(CUDNN_DATA_FLOAT, bad[i].x, NULL),
                bind(CUDNN_DATA_FLOAT, bad[i].w, NULL), bind(CUDNN_DATA_FLOAT, bad[i].y, NULL));
        if (cg_finish(&g) == 0) fail("%s: the graph is taken", bad[i].name);
        else if (!strstr(g.why, "conv2d: cuDNN: ")) fail("%s: the error is: %s", bad[i].name, g.why);
        cg_free(&g);
    }
}

static void missing_tensor(void) {
    const int64_t x[4] = {4, 16, 6, 6}, s[4] = {1, 16, 1, 1};
    cg_norm m = {CUDNN_BATCH_NORM, true,    CG_NONE, CG_NONE, CG_NONE, CG_NONE, CG_NONE, CG_NONE, CG_NONE,
                 CG_NONE,          CG_NONE, CG_NONE, CG_NONE, CG_NONE, CG_NONE, CG_NONE, CG_NONE, CG_NONE};
    begin("norm");
    m.x = bind(CUDNN_DATA_FLOAT, x, NULL); /* no y, no scale */
    m.mean = bind(CUDNN_DATA_FLOAT, s, NULL);
    cg_norm_forward(&g, &m);
    if (cg_finish(&g) == 0) fail("a norm without y and scale is taken");
    cg_free(&g);
}

static void too_many(void) {
    const int64_t x[4] = {1, 1, 1, 1};
    begin("large");
    for (int i = 0; i < CG_TENSORS + 1; i++) cg_virtual(&g, CUDNN_DATA_FLOAT, 4, x, false);
    if (cg_finish(&g) == 0 || !strstr(g.why, "large: a graph of over")) fail("%s", g.why);
    cg_free(&g);
}

/* What a run is given: fewer tensors, a pointer less aligned than said, no workspace. */
static void wrong_runs(void) {
    const int64_t x[4] = {2, 64, 6, 6}, y[4] = {2, 64, 6, 6};
    const cg_window win = {{1, 1}, {1, 1}, {1, 1}};
    const cg_filter f = {.tensor_f32 = true, .winograd = true, .workspace = 1 << 30};
    static _Alignas(64) float memory[3][64 * 64 * 9 + 1];
    void *const first = memory[0];
    cg_plan p;
    for (int i = 0; i < 3; i++) {
        begin("conv2d");
        int tx = bind(CUDNN_DATA_FLOAT, x, memory[0]), ty = bind(CUDNN_DATA_FLOAT, y, memory[2]);
        cg_spec rows = {.uid = 3, .type = CUDNN_DATA_FLOAT, .n = 4, .size = {64, 64, 3, 3}, .stride = {576, 9, 3, 1}};
        uid[bound] = 3;
        ptr[bound++] = memory[1];
        cg_conv(&g, CG_FORWARD, &win, CUDNN_DATA_FLOAT, tx, cg_tensor(&g, &rows), ty); /* turned in the workspace */
        cg_finish(&g);
        cg_desc device = cg_device(&g, handle, NULL);
        void *workspace =
            cg_plans(&g, device, &f, 1, &p) ? aligned_alloc(256, ((size_t)p.workspace + 511) / 256 * 256) : NULL;
        ptr[0] = i == 1 ? memory[0] + 1 : first;
        cg_run(&g, &p, handle, i == 0 ? 2 : 3, uid, ptr, i == 2 ? NULL : workspace);
        const char *want = i == 0 ? "has no pointer" : i == 1 ? "less aligned" : "no workspace";
        if (i == 2 && p.workspace == 0) fail("a plan without workspace: nothing is tested");
        if (g.status == 0 || !strstr(g.why, want)) fail("expected \"%s\", got: %s", want, g.status ? g.why : "nothing");
        free(workspace);
        ddp__cuda.cudnnBackendDestroyDescriptor(device);
        cg_free(&g);
    }
}

int main(void) {
    open_double();
    test("cuDNN: batch norm and its gradient", batch_norm);
    test("cuDNN: layer norm and its gradient", layer_norm);
    test("cuDNN: pooling by maximum", max_pool);
    test("cuDNN: pooling by mean", mean_pool);
    test("cuDNN: a product with bias and gelu", product);
    if (checked_by_cudnn()) {
        test("cuDNN: convolutions of shapes that do not fit are refused", wrong_shapes);
        test("cuDNN: a norm without its tensors is refused", missing_tensor);
    } else printf("skip cuDNN: wrong graphs are refused: the real cuDNN is not there\n");
    test("cuDNN: a graph too large says so", too_many);
    test("cuDNN: runs with wrong pointers are refused", wrong_runs);
    return end();
}
