/* test_cudnn_attention.c -- attention's graphs, both ways: a plan on every profile that has tensor cores for them, and the numbers of plain loops. */
/* with: kernels/cudnn/graph.c kernels/cudnn/engine.c kernels/cudnn/attention_graph.c */
#include "cudnn_test.h"
#include "../../kernels/cudnn/attention.h"

enum { TENSORS = 14 };

/* [B, H, S, D] lying as [B, S, H, D]: what a projection of all heads gives. */
static void stride_of(const attention *t, int64_t length, int64_t *s) {
    s[0] = length * t->heads * t->dim;
    s[1] = t->dim;
    s[2] = t->heads * t->dim;
    s[3] = 1;
}

static attention attention_of(ddp_dtype d, bool causal, int64_t b, int64_t h, int64_t sq, int64_t sk, int64_t dim) {
    attention t = {
        .dtype = d, .causal = causal, .batch = b, .heads = h, .queries = sq, .keys = sk, .dim = dim, .align = 16};
    stride_of(&t, sq, t.q);
    stride_of(&t, sk, t.k);
    stride_of(&t, sk, t.v);
    stride_of(&t, sq, t.o);
    return t;
}

static int plan(cg_graph *g, const attention *t, bool backward, cg_plan *p) {
    const cg_filter f = {.tensor_f32 = true, .winograd = true, .workspace = 1 << 30};
    cg_start(g, "attention");
    if (backward) attention_backward_graph(g, t);
    else attention_forward_graph(g, t);
    cg_finish(g);
    cg_desc device = cg_device(g, handle, NULL);
    if (g->status == 0) cg_plans(g, device, &f, 1, p);
    if (device) ddp__cuda.cudnnBackendDestroyDescriptor(device);
    return g->status;
}

/* ---- one problem: tensors by uid; v in doubles, p as they lie in memory ---- */
typedef struct problem {
    attention t;
    double scale;
    double *v[TENSORS + 1];
    void *p[TENSORS + 1];
    float number[3];
} problem;

static int64_t at(const attention *t, int64_t b, int64_t s, int64_t h, int64_t d, int64_t length) {
    return ((b * length + s) * t->heads + h) * t->dim + d;
}

/* Rows of P and of what it makes, for one head. */
static void head(problem *m, int64_t b, int64_t h) {
    const attention *t = &m->t;
    int64_t sq = t->queries, sk = t->keys;
    double *p = calloc((size_t)(sq * sk), sizeof *p);
    for (int64_t i = 0; i < sq; i++) {
        double z = 0, dot = 0, *row = p + i * sk;
        int64_t seen = t->causal && i + 1 < sk ? i + 1 : sk;
        for (int64_t j = 0; j < seen; j++) {
            double s = 0;
            for (int64_t d = 0; d < t->dim; d++)
                s += m->v[ATT_Q][at(t, b, i, h, d, sq)] * m->v[ATT_K][at(t, b, j, h, d, sk)];
            z += row[j] = exp(s * m->scale);
        }
        m->v[ATT_STATS][(b * t->heads + h) * sq + i] = log(z);
        for (int64_t j = 0; j < seen; j++) row[j] /= z;
        for (int64_t d = 0; d < t->dim; d++) {
            double o = 0;
            for (int64_t j = 0; j < seen; j++) o += row[j] * m->v[ATT_V][at(t, b, j, h, d, sk)];
            m->v[ATT_O][at(t, b, i, h, d, sq)] = o;
            dot += o * m->v[ATT_DO][at(t, b, i, h, d, sq)];
        }
        for (int64_t j = 0; j < seen; j++) {
            double dp = 0;
            for (int64_t d = 0; d < t->dim; d++) {
                dp += m->v[ATT_DO][at(t, b, i, h, d, sq)] * m->v[ATT_V][at(t, b, j, h, d, sk)];
                m->v[ATT_DV][at(t, b, j, h, d, sk)] += row[j] * m->v[ATT_DO][at(t, b, i, h, d, sq)];
            }
            double ds = row[j] * (dp - dot) * m->scale;
            for (int64_t d = 0; d < t->dim; d++) {
                m->v[ATT_DQ][at(t, b, i, h, d, sq)] += ds * m->v[ATT_K][at(t, b, j, h, d, sk)];
                m->v[ATT_DK][at(t, b, j, h, d, sk)] += ds * m->v[ATT_Q][at(t, b, i, h, d, sq)];
            }
        }
    }
    free(p);
}

static void start(problem *m, attention t) {
    int64_t nq = t.batch * t.heads * t.queries * t.dim, nk = t.batch * t.heads * t.keys * t.dim,
            rows = t.batch * t.heads * t.queries;
    memset(m, 0, sizeof *m);
    m->t = t;
    m->scale = 1 / sqrt((double)t.dim);
    m->number[0] = (float)m->scale;
    m->number[1] = 1;
    m->number[2] = -1e20f;
    for (int i = ATT_Q; i <= ATT_DK; i++) {
        bool wide = i == ATT_STATS || i == ATT_SUM || i == ATT_TOTAL, input = i <= ATT_V || i == ATT_DO;
        int64_t n = i == ATT_STATS || i == ATT_SUM                           ? rows
                    : i == ATT_K || i == ATT_V || i == ATT_DV || i == ATT_DK ? nk
                                                                             : nq;
        m->v[i] = random_numbers(n);
        m->p[i] = packed(wide ? DDP_F32 : (ddp_dtype)t.dtype, n, input ? m->v[i] : NULL);
        if (!input) memset(m->v[i], 0, sizeof(double) * (size_t)n);
        if (i == ATT_TOTAL) memset(m->p[i], 0, (size_t)n * sizeof(float));
    }
    for (int i = 0; i < 3; i++) m->p[ATT_SCALE + i] = &m->number[i];
    for (int64_t b = 0; b < t.batch; b++)
        for (int64_t h = 0; h < t.heads; h++) head(m, b, h);
}

static void finish(problem *m) {
    for (int i = ATT_Q; i <= ATT_DK; i++) {
        free(m->v[i]);
        free(m->p[i]);
    }
}

static void run_way(problem *m, bool backward) {
    cg_graph g;
    cg_plan p;
    int64_t uid[TENSORS];
    for (int i = 0; i < TENSORS; i++) uid[i] = i + 1;
    if (plan(&g, &m->t, backward, &p) < 0) fail("%s: %s", backward ? "backward" : "forward", g.why);
    else {
        void *workspace = aligned_alloc(256, ((size_t)p.workspace + 511) / 256 * 256);
        if (cg_run(&g, &p, handle, TENSORS, uid, m->p + 1, workspace) < 0) fail("%s", g.why);
        free(workspace);
    }
    cg_free(&g);
}

static void numbers(ddp_dtype d, bool causal, int64_t sq, int64_t sk, int64_t dim) {
    problem m;
    start(&m, attention_of(d, causal, 2, 2, sq, sk, dim));
    int64_t nq = 4 * sq * dim, nk = 4 * sk * dim;
    double most = d == DDP_F16 ? 4e-3 : 3e-2; /* probabilities are rounded to the type before they are multiplied */
    run_way(&m, false);
    compare("o", d, nq, m.p[ATT_O], m.v[ATT_O], most);
    compare("stats", DDP_F32, 4 * sq, m.p[ATT_STATS], m.v[ATT_STATS], 1e-4);
    run_way(&m, true);
    compare("dq", d, nq, m.p[ATT_DQ], m.v[ATT_DQ], most);
    compare("dk", d, nk, m.p[ATT_DK], m.v[ATT_DK], most);
    compare("dv", d, nk, m.p[ATT_DV], m.v[ATT_DV], most);
    finish(&m);
}

static void causal_bf16(void) { numbers(DDP_BF16, true, 24, 24, 64); }
static void causal_f16(void) { numbers(DDP_F16, true, 17, 17, 32); }
static void all_keys(void) { numbers(DDP_F16, false, 12, 20, 64); }

/* The gradient of q is added to what lies there. */
static void total_is_zeroed(void) {
    problem m;
    start(&m, attention_of(DDP_F16, true, 1, 1, 8, 8, 8));
    run_way(&m, false);
    ((float *)m.p[ATT_TOTAL])[3] = NAN;
    run_way(&m, true);
    if (ddp__load(DDP_F16, m.p[ATT_DQ], 3) == ddp__load(DDP_F16, m.p[ATT_DQ], 3))
        fail("memory that was not zeroed is not seen");
    finish(&m);
}

static void every_profile(void) {
    static const char *const profiles[] = {"h200", "a100", "l40s", "b200", "rtx3090"};
    bool all = getenv("DDP_TEST_CUDNN_ALL") != NULL;
    for (int p = 0; p < 5; p++)
        for (int backward = 0; backward < 2; backward++)
            for (int more = 0; more < (all ? 8 : 1); more++) {
                attention t =
                    attention_of(more & 1 ? DDP_F16 : DDP_BF16, !(more & 2), 4, 8, 256, 256, more & 4 ? 128 : 64);
                cg_graph g;
                cg_plan q;
                setenv("DDP_DOUBLE_PROFILE", profiles[p], 1);
                if (plan(&g, &t, backward, &q) < 0)
                    fail("%s on %s: %s", backward ? "backward" : "forward", profiles[p], g.why);
                cg_free(&g);
            }
    unsetenv("DDP_DOUBLE_PROFILE");
}

int main(void) {
    open_double();
    test("cuDNN: causal attention of bf16 and its gradients", causal_bf16);
    test("cuDNN: causal attention of f16 and its gradients", causal_f16);
    test("cuDNN: attention to all keys", all_keys);
    test("cuDNN: attention's gradient of q is added to memory that must be zero", total_is_zeroed);
    if (checked_by_cudnn()) test("cuDNN: attention has a plan on every profile", every_profile);
    else printf("skip cuDNN: attention has a plan on every profile: the real cuDNN is not there\n");
    return end();
}
