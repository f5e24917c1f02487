/* matmul_half.c -- products of f16 and bf16 matrices by tiles.h: b packed by panels (pairs of bf16 where the processor
 * multiplies them, floats otherwise), rows of a read as they lie where that fits, else laid side by side first. */
#include "matmul.h"
#include "tiles.h"

typedef struct half_gemm {
    const gemm *g;
    tile_panels p;
    tile_more more;
    int64_t panels, groups; /* groups: parts of the columns that are shared out, where there are few rows */
    bool as_they_lie;       /* rows of a */
    bool failed;
} half_gemm;

static int64_t words(const half_gemm *h) { return h->p.depth * CONV_NR / (h->p.pairs ? 2 : 1); }

/* Columns n0 .. n0 + CONV_NR of b as floats [depth][CONV_NR], 0 beyond b; line: K floats. */
static void pack_floats(const half_gemm *h, int64_t n0, float *panel, float *line) {
    const gemm *g = h->g;
    int64_t n = g->N - n0 < CONV_NR ? g->N - n0 : CONV_NR;
    if (n < CONV_NR || h->p.depth > g->K) memset(panel, 0, (size_t)(h->p.depth * CONV_NR) * sizeof *panel);
    if (g->bn == 1) {
        for (int64_t k = 0; k < g->K; k++) cpu_widen(g->dt, g->b, n0 + k * g->bk, panel + k * CONV_NR, n);
        return;
    }
    for (int64_t j = 0; j < n; j++) {
        if (g->bk == 1) cpu_widen(g->dt, g->b, (n0 + j) * g->bn, line, g->K);
        else
            for (int64_t k = 0; k < g->K; k++) line[k] = cpu_get(g->dt, g->b, (n0 + j) * g->bn + k * g->bk);
        for (int64_t k = 0; k < g->K; k++) panel[k * CONV_NR + j] = line[k];
    }
}

static void pack_panels(const void *ctx, int64_t lo, int64_t hi) {
    half_gemm *h = (half_gemm *)(uintptr_t)ctx;
    size_t floats = (size_t)(h->g->K + (h->p.pairs ? h->p.depth * CONV_NR : 0));
    float *line = ddp__scratch_take(floats * sizeof *line);
    if (!line) {
        h->failed = true;
        return;
    }
    for (int64_t i = lo; i < hi; i++) {
        uint32_t *u = (uint32_t *)h->p.u + i * words(h);
        float *panel = h->p.pairs ? line + h->g->K : (float *)(void *)u;
        pack_floats(h, i * CONV_NR, panel, line);
        if (h->p.pairs) cpu_pair_rows(panel, h->p.depth, u);
    }
    ddp__scratch_give(line, floats * sizeof *line);
}

/* Row i of a in `to`: of `depth` values, as the products want them. */
static void lay_row(const half_gemm *h, int64_t i, char *to) {
    const gemm *g = h->g;
    if (!h->p.pairs) {
        float *row = (float *)(void *)to;
        if (g->ak == 1) cpu_widen(g->dt, g->a, i * g->am, row, g->K);
        else
            for (int64_t k = 0; k < g->K; k++) row[k] = cpu_get(g->dt, g->a, i * g->am + k * g->ak);
        return;
    }
    uint16_t *row = (uint16_t *)(void *)to;
    const uint16_t *a = (const uint16_t *)g->a + i * g->am;
    for (int64_t k = 0; k < g->K; k++) row[k] = a[k * g->ak];
    memset(row + g->K, 0, (size_t)(h->p.depth - g->K) * sizeof *row);
}

/* Parts [lo, hi) of the result: blocks of TILES_ROWS rows, each in groups of panels. */
static void run_parts(const void *ctx, int64_t lo, int64_t hi) {
    half_gemm *h = (half_gemm *)(uintptr_t)ctx;
    const gemm *g = h->g;
    int64_t row_bytes = conv_round_up(h->p.depth * (h->p.pairs ? 2 : 4), 64);
    size_t bytes = sizeof(tile_rows) + (h->as_they_lie ? 0 : (size_t)(TILES_ROWS * row_bytes));
    tile_rows *r = ddp__scratch_take(bytes);
    if (!r) {
        h->failed = true;
        return;
    }
    r->n_taps = 1;
    r->tap[0] = 0;
    r->width = h->p.depth;
    r->next_bytes = 0;
    r->row_step = h->as_they_lie ? g->am * 2 : row_bytes;
    for (int64_t i = lo; i < hi; i++) {
        int64_t first = i / h->groups * TILES_ROWS, group = i % h->groups;
        r->n = g->M - first < TILES_ROWS ? g->M - first : TILES_ROWS;
        for (int64_t j = 0; j < r->n; j++) {
            char *laid = (char *)(r + 1) + j * row_bytes;
            r->to[j] = cpu_at(g->dt, g->y, (first + j) * g->ys);
            r->row[0][j] = h->as_they_lie ? cpu_at(g->dt, g->a, (first + j) * g->am) : laid;
            if (!h->as_they_lie) lay_row(h, first + j, laid);
        }
        int64_t end = h->panels * (group + 1) / h->groups;
        for (int64_t n = h->panels * group / h->groups; n < end; n++) cpu_tiles(&h->p, r, n);
    }
    ddp__scratch_give(r, bytes);
}

int cpu_half_gemm(const gemm *g) {
    bool pairs = g->dt == DDP_BF16 && cpu_has_pairs(), amx = pairs && cpu_has_amx();
    half_gemm h = {.g = g, .p = {.depth = g->K, .columns = g->N, .dt = g->dt, .pairs = pairs, .amx = amx}};
    if (pairs) h.p.depth = conv_round_up(g->K, amx ? 32 : 2);
    h.as_they_lie = pairs && g->ak == 1 && g->K == h.p.depth && (!amx || g->M % 32 == 0);
    h.panels = (g->N + CONV_NR - 1) / CONV_NR;
    int64_t blocks = (g->M + TILES_ROWS - 1) / TILES_ROWS;
    h.groups = h.as_they_lie && blocks < 4 && h.panels >= 4 ? 4 : 1;
    h.more = (tile_more){g->act, g->y, g->residual, g->pre};
    if (g->act || g->residual || g->pre) h.p.more = &h.more;
    int64_t bias = conv_round_up(g->N, 2) / 2; /* words */
    size_t bytes = (size_t)(h.panels * words(&h) + bias) * 4 + 64;
    uint32_t *u = ddp__scratch_take(bytes);
    if (!u) return ddp__pending();
    h.p.u = u;
    if (g->bias) { /* side by side */
        uint16_t *to = (uint16_t *)(void *)(u + h.panels * words(&h));
        for (int64_t n = 0; n < g->N; n++) to[n] = ((const uint16_t *)g->bias)[n * g->bias_stride];
        h.p.bias = (const char *)to;
    }
    int64_t work = g->M * g->N * g->K / 16;
    cpu_share(h.panels, work / 8, pack_panels, &h);
    cpu_share(blocks * h.groups, work, run_parts, &h);
    ddp__scratch_give(u, bytes);
    return h.failed ? ddp__fail(DDP_ENOMEM, "matmul: out of memory") : 0;
}
