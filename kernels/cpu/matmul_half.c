/* matmul_half.c -- products of f16 and bf16 matrices by tiles.h, and of f32 in two parts of bf16: b packed by panels (pairs of
 * bf16 where the processor multiplies them, floats otherwise), rows of a read as they lie where that fits, else laid side by
 * side first. */
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

enum { AT_ONCE = 8 }; /* columns of b */

/* Of a part of a panel: the his, or the los. */
static int64_t part_words(const half_gemm *h) { return h->p.depth * CONV_NR / (h->p.pairs ? 2 : 1); }
static int64_t words(const half_gemm *h) { return part_words(h) * (h->p.split ? 2 : 1); }

/* ---- floats: f16, and bf16 where nothing multiplies pairs ------------------------------------------------------------- */

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

/* Row i of a as `depth` floats in `to`. */
static void lay_floats(const half_gemm *h, int64_t i, float *to) {
    const gemm *g = h->g;
    if (g->ak == 1) cpu_widen(g->dt, g->a, i * g->am, to, g->K);
    else
        for (int64_t k = 0; k < g->K; k++) to[k] = cpu_get(g->dt, g->a, i * g->am + k * g->ak);
}

/* ---- pairs of bf16 -------------------------------------------------------------------------------------------------------- */

/* K values of p from place `at` on, `step` apart, as `depth` bf16, of f32 as his and los; tmp: K floats. */
static void line_of(const half_gemm *h, const void *p, int64_t at, int64_t step, uint16_t *hi, uint16_t *lo,
                    float *tmp) {
    const gemm *g = h->g;
    int64_t K = g->K;
    size_t rest = (size_t)(h->p.depth - K) * sizeof *hi;
    if (h->p.split) {
        const float *x = (const float *)p + at;
        for (int64_t k = 0; k < K && step != 1; k++) tmp[k] = x[k * step];
        cpu_split_line(step == 1 ? x : tmp, K, hi, lo);
        memset(lo + K, 0, rest);
    } else {
        const uint16_t *x = (const uint16_t *)p + at;
        if (step == 1) memcpy(hi, x, (size_t)K * sizeof *hi);
        else
            for (int64_t k = 0; k < K; k++) hi[k] = x[k * step];
    }
    memset(hi + K, 0, rest);
}

/* Row k of a matrix whose rows are `step` apart, from place `at` on; NULL beyond K. */
static const char *row_of(const gemm *g, const void *p, int64_t k, int64_t step, int64_t at) {
    return k < g->K ? cpu_at(g->dt, p, at + k * step) : NULL;
}

/* Columns n0 and on of b as pairs of rows [depth / 2][CONV_NR]: rows side by side, */
static void pack_rows(const half_gemm *h, int64_t n0, int64_t n, uint32_t *hi, uint32_t *lo) {
    const gemm *g = h->g;
    for (int64_t k = 0; k < h->p.depth; k += 2, hi += CONV_NR, lo += CONV_NR)
        cpu_pair_lines(g->dt, row_of(g, g->b, k, g->bk, n0), row_of(g, g->b, k + 1, g->bk, n0), n, hi, lo);
}

/* or columns turned; line: AT_ONCE columns, and K floats. */
static void pack_columns(const half_gemm *h, int64_t n0, int64_t n, uint32_t *hi, uint32_t *lo, uint16_t *line) {
    const gemm *g = h->g;
    int64_t depth = h->p.depth, half = depth / 2;
    uint16_t *line_lo = line + AT_ONCE * depth;
    float *tmp = (float *)(void *)(line + 2 * AT_ONCE * depth);
    for (int64_t j = 0; j < n; j += AT_ONCE) {
        int64_t m = n - j < AT_ONCE ? n - j : AT_ONCE;
        for (int64_t i = 0; i < m; i++)
            line_of(h, g->b, (n0 + j + i) * g->bn, g->bk, line + i * depth, line_lo + i * depth, tmp);
        cpu_transpose_words((uint32_t *)(void *)line, half, m, half, hi + j, CONV_NR);
        if (h->p.split) cpu_transpose_words((uint32_t *)(void *)line_lo, half, m, half, lo + j, CONV_NR);
    }
}

static void pack_panels(const void *ctx, int64_t lo, int64_t hi) {
    half_gemm *h = (half_gemm *)(uintptr_t)ctx;
    const gemm *g = h->g;
    size_t bytes = (size_t)(g->K * 4 + 2 * AT_ONCE * h->p.depth * 2);
    uint16_t *line = ddp__scratch_take(bytes);
    if (!line) {
        h->failed = true;
        return;
    }
    for (int64_t i = lo; i < hi; i++) {
        uint32_t *u = (uint32_t *)h->p.u + i * words(h);
        int64_t n0 = i * CONV_NR, n = g->N - n0 < CONV_NR ? g->N - n0 : CONV_NR;
        if (n < CONV_NR) memset(u, 0, (size_t)words(h) * sizeof *u);
        if (!h->p.pairs) pack_floats(h, n0, (float *)(void *)u, (float *)(void *)line);
        else if (g->bn == 1) pack_rows(h, n0, n, u, u + part_words(h));
        else pack_columns(h, n0, n, u, u + part_words(h), line);
    }
    ddp__scratch_give(line, bytes);
}

/* ---- rows of a ------------------------------------------------------------------------------------------------------------ */

static int64_t row_bytes(const half_gemm *h) {
    return conv_round_up(h->p.depth * (h->p.pairs && !h->p.split ? 2 : 4), 64);
}

/* Rows first .. first + n of a that lie as columns do: pairs of those, turned. */
static void lay_columns(const half_gemm *h, int64_t first, int64_t n, char *to) {
    enum { PAIRS = 16, WIDTH = TILES_ROWS + 16 };
    const gemm *g = h->g;
    uint32_t hi[PAIRS][WIDTH], lo[PAIRS][WIDTH];
    int64_t half = h->p.depth / 2, step = row_bytes(h) / 4;
    for (int64_t j = 0; j < half; j += PAIRS) {
        int64_t m = half - j < PAIRS ? half - j : PAIRS;
        for (int64_t i = 0; i < m; i++) {
            int64_t k = 2 * (j + i);
            cpu_pair_lines(g->dt, row_of(g, g->a, k, g->ak, first), row_of(g, g->a, k + 1, g->ak, first), n, hi[i],
                           lo[i]);
        }
        cpu_transpose_words(hi[0], WIDTH, m, n, (uint32_t *)(void *)to + j, step);
        if (h->p.split) cpu_transpose_words(lo[0], WIDTH, m, n, (uint32_t *)(void *)to + half + j, step);
    }
}

/* Rows first .. first + n of a in `to`, row_bytes apart, as the products want them; tmp: K floats. */
static void lay_rows(const half_gemm *h, int64_t first, int64_t n, char *to, float *tmp) {
    const gemm *g = h->g;
    if (h->p.pairs && g->am == 1 && g->ak != 1) {
        lay_columns(h, first, n, to);
        return;
    }
    for (int64_t j = 0; j < n; j++, to += row_bytes(h)) {
        uint16_t *row = (uint16_t *)(void *)to;
        if (h->p.pairs) line_of(h, g->a, (first + j) * g->am, g->ak, row, row + h->p.depth, tmp);
        else lay_floats(h, first + j, (float *)(void *)to);
    }
}

/* Parts [lo, hi) of the result: blocks of TILES_ROWS rows, each in groups of panels. */
static void run_parts(const void *ctx, int64_t lo, int64_t hi) {
    half_gemm *h = (half_gemm *)(uintptr_t)ctx;
    const gemm *g = h->g;
    size_t laid_bytes = h->as_they_lie ? 0 : (size_t)(TILES_ROWS * row_bytes(h));
    size_t bytes = sizeof(tile_rows) + laid_bytes + (h->as_they_lie ? 0 : (size_t)g->K * 4);
    tile_rows *r = ddp__scratch_take(bytes);
    if (!r) {
        h->failed = true;
        return;
    }
    char *laid = (char *)(r + 1);
    r->n_taps = 1;
    r->tap[0] = 0;
    r->width = h->p.depth;
    r->next_bytes = 0;
    r->row_step = h->as_they_lie ? g->am * 2 : row_bytes(h);
    for (int64_t i = lo; i < hi; i++) {
        int64_t first = i / h->groups * TILES_ROWS, group = i % h->groups;
        r->n = g->M - first < TILES_ROWS ? g->M - first : TILES_ROWS;
        if (!h->as_they_lie) lay_rows(h, first, r->n, laid, (float *)(void *)(laid + laid_bytes));
        for (int64_t j = 0; j < r->n; j++) {
            r->to[j] = cpu_at(g->dt, g->y, (first + j) * g->ys);
            r->row[0][j] = h->as_they_lie ? cpu_at(g->dt, g->a, (first + j) * g->am) : laid + j * row_bytes(h);
        }
        int64_t end = h->panels * (group + 1) / h->groups;
        for (int64_t n = h->panels * group / h->groups; n < end; n++) cpu_tiles(&h->p, r, n);
    }
    ddp__scratch_give(r, bytes);
}

int cpu_half_gemm(const gemm *g, bool amx) {
    bool more = g->act || g->residual || g->pre;
    if (amx && g->am == 1 && g->bn == 1 && !g->bias && !more && g->K > 0) return cpu_outer_gemm(g);
    bool split = g->dt == DDP_F32, pairs = split || (g->dt == DDP_BF16 && cpu_has_pairs());
    half_gemm h = {.g = g,
                   .p = {.depth = g->K, .columns = g->N, .dt = g->dt, .pairs = pairs, .amx = amx, .split = split}};
    if (pairs) h.p.depth = conv_round_up(g->K, amx ? 32 : 2);
    h.as_they_lie = pairs && !split && g->ak == 1 && g->K == h.p.depth && (!amx || g->M % 32 == 0);
    h.panels = (g->N + CONV_NR - 1) / CONV_NR;
    int64_t blocks = (g->M + TILES_ROWS - 1) / TILES_ROWS;
    h.groups = h.as_they_lie && blocks < 4 && h.panels >= 4 ? 4 : 1;
    h.more = (tile_more){.act = g->act, .y = g->y, .residual = g->residual, .pre = g->pre};
    if (more) h.p.more = &h.more;
    size_t bias = (size_t)conv_round_up(g->N * ddp__dtype_bytes[g->dt], 4),
           bytes = (size_t)(h.panels * words(&h)) * 4 + bias + 64;
    uint32_t *u = ddp__scratch_take(bytes);
    if (!u) return ddp__pending();
    h.p.u = u;
    if (g->bias) { /* side by side */
        int64_t size = ddp__dtype_bytes[g->dt];
        char *to = (char *)(u + h.panels * words(&h));
        for (int64_t n = 0; n < g->N; n++)
            memcpy(to + n * size, cpu_at(g->dt, g->bias, n * g->bias_stride), (size_t)size);
        h.p.bias = to;
    }
    int64_t work = g->M * g->N * g->K / 16;
    cpu_share(h.panels, work / 8, pack_panels, &h);
    cpu_share(blocks * h.groups, work, run_parts, &h);
    ddp__scratch_give(u, bytes);
    return h.failed ? ddp__fail(DDP_ENOMEM, "matmul: out of memory") : 0;
}
