/* outer.c -- gradients of weights by AMX: of a convolution, dw[k][c][tap] is the sum over pixels of g[pixel][k] times the row of x
 * under that tap; of a linear layer the same with one tap. A tile multiplies 32 pixels: those at one place of 32 images, so
 * that whatever the shift of the tap, what meets lies in tiles of its own. (Fewer images are cut into strips of rows that
 * count as images.) x is laid out as tiles of 16 pairs of images by 16 channels, g turned, 16 channels by 16 pairs; both once
 * for all taps and all blocks of 32 x 32 results. f32 is split, see tiles.h. Few channels: a pixel's rows of all taps are
 * laid side by side first, and count as the channels of a 1x1 window. Zeros beyond the image are multiplied where images are
 * cut and in such rows: an Inf in g can reach taps as NaN that do not see it.
 *
 * What is laid out at a time stays near: some groups of 32 images, or of one group some rows. Sums of one part are added to
 * those before in this order, whatever the number of threads. */
#include "matmul.h"
#include "tiles.h"

enum { GROUP = 32, FEW_CHANNELS = 16, BLOCK = 4 * TILE_WORDS + 16 }; /* a block of results: not a power of two */

/* x or g: where pixel (v, w) of unit u lies. Unit u is strip u % strips of image u / strips. */
typedef struct side {
    const char *p;
    int64_t channels, H, W;
    int64_t image, row, col;          /* bytes */
    int64_t strip;                    /* rows from one strip to the next */
    int64_t step[2], shift[2];        /* pixel (v, w) is (v * step - shift) of the image */
    const conv_shape *patches;        /* channels are x's rows under all taps of this window */
    int64_t tiles, columns, row_size; /* laid out: tiles of 16 channels; columns; words of a row */
} side;

typedef struct outer {
    ddp_dtype dt;
    int64_t images, strips, rows; /* rows of g in a strip */
    int64_t x_rows;               /* of an image of x, as the products see it */
    side x, g;
    int64_t R, S, stride[2], dilation[2], padding[2]; /* taps as the products see them */
    int64_t tile;                                     /* words: hi, or hi and lo */
    int64_t part_groups, part_rows, ring;             /* laid out at a time; rows of x */
    int64_t group, n_groups, row, n_rows;             /* this part */
    int64_t x_from, x_to;                             /* rows of x to lay out */
    uint32_t *lx, *lg; /* [group][row mod ring][tile of c][column], [group][row][tile of k][column] */
    float *sum;        /* [block of c][block of k][tap][BLOCK] */
    int64_t place;     /* of y: elements from one row of the result to the next */
    void *y;
    bool *failed;
} outer;

/* ---- laying out ------------------------------------------------------------------------------------------------------ */

/* The rows of x under all taps of y's pixel (h, w), side by side. */
static const char *patch_of(const side *s, const char *image, int64_t h, int64_t w, char *line) {
    const conv_shape *c = s->patches;
    size_t pixel = (size_t)s->col;
    for (int64_t t = 0; t < c->R * c->S; t++, line += pixel) {
        int64_t sh = h * c->stride[0] - c->padding[0] + t / c->S * c->dilation[0];
        int64_t sw = w * c->stride[1] - c->padding[1] + t % c->S * c->dilation[1];
        if (sh < 0 || sh >= c->H || sw < 0 || sw >= c->W) memset(line, 0, pixel);
        else memcpy(line, image + sh * s->row + sw * s->col, pixel);
    }
    return line - c->R * c->S * s->col;
}

/* The channels of pixel (v, w) of unit u; NULL: zeros. */
CPU_INLINE const char *pixel_of(const outer *q, const side *s, int64_t u, int64_t v, int64_t w, char *line) {
    if (u >= q->images * q->strips) return NULL;
    const char *image = s->p + u / q->strips * s->image;
    int64_t h = u % q->strips * s->strip + v * s->step[0] - s->shift[0];
    w = w * s->step[1] - s->shift[1];
    if (h < 0 || h >= s->H || w < 0 || w >= s->W) return NULL;
    return s->patches ? patch_of(s, image, h, w, line) : image + h * s->row + w * s->col;
}

/* Columns [w0, w1) of row v of a group as tiles [16 pairs][16 channels]. */
static void lay_pairs(const outer *q, const side *s, int64_t group, int64_t v, int64_t w0, int64_t w1, uint32_t *to) {
    char line[2][FEW_CHANNELS * TILES_TAPS * 4];
    int64_t bytes = ddp__dtype_bytes[q->dt];
    for (int64_t j = 0; j < 16; j++)
        for (int64_t w = w0; w < w1; w++) {
            int64_t u = group * GROUP + 2 * j;
            const char *a = pixel_of(q, s, u, v, w, line[0]), *b = pixel_of(q, s, u + 1, v, w, line[1]);
            uint32_t *tile = to + w * q->tile + j * 16;
            for (int64_t c = 0; c < s->channels; c += 16, tile += s->columns * q->tile) {
                int64_t n = s->channels - c < 16 ? s->channels - c : 16, at = c * bytes;
                cpu_pair_lines(q->dt, a ? a + at : NULL, b ? b + at : NULL, n, tile, tile + TILE_WORDS);
            }
        }
}

/* Tiles [w0, w1) of a row, each turned in place. */
static void turn(const outer *q, const side *s, int64_t w0, int64_t w1, uint32_t *to) {
    uint32_t tile[TILE_WORDS] __attribute__((aligned(64)));
    for (int64_t t = 0; t < s->tiles; t++)
        for (uint32_t *p = to + (t * s->columns + w0) * q->tile; p < to + (t * s->columns + w1) * q->tile;
             p += TILE_WORDS) {
            memcpy(tile, p, sizeof tile);
            cpu_transpose_words(tile, 16, 16, 16, p, 16);
        }
}

/* A few columns at a time: what is turned is still near. */
static void lay_row(const outer *q, const side *s, int64_t group, int64_t v, bool turned, uint32_t *to) {
    enum { NEAR = 8 };
    int64_t some = s->tiles < NEAR ? NEAR / s->tiles : 1;
    for (int64_t w = 0; w < s->columns; w += some) {
        int64_t end = w + some < s->columns ? w + some : s->columns;
        lay_pairs(q, s, group, v, w, end, to);
        if (turned) turn(q, s, w, end, to);
    }
}

static void lay_x(const void *ctx, int64_t lo, int64_t hi) {
    const outer *q = ctx;
    int64_t rows = q->x_to - q->x_from;
    for (int64_t i = lo; i < hi; i++) {
        int64_t group = i / rows, v = q->x_from + i % rows;
        lay_row(q, &q->x, q->group + group, v, false, q->lx + (group * q->ring + v % q->ring) * q->x.row_size);
    }
}

static void lay_g(const void *ctx, int64_t lo, int64_t hi) {
    const outer *q = ctx;
    for (int64_t i = lo; i < hi; i++) {
        int64_t group = i / q->n_rows, h = i % q->n_rows;
        lay_row(q, &q->g, q->group + group, q->row + h, true, q->lg + (group * q->part_rows + h) * q->g.row_size);
    }
}

/* ---- products ---------------------------------------------------------------------------------------------------------- */

static int64_t ceil_div(int64_t a, int64_t b) { return a <= 0 ? 0 : (a + b - 1) / b; }

/* The positions of g, from lo to *end at most, whose tap `at` past the padding reads one of n positions of x. */
static int64_t reach(const outer *q, int d, int64_t at, int64_t n, int64_t lo, int64_t *end) {
    int64_t first = ceil_div(q->padding[d] - at, q->stride[d]), last = ceil_div(n + q->padding[d] - at, q->stride[d]);
    if (last < *end) *end = last;
    return first > lo ? first : lo;
}

/* Blocks [lo, hi) of results: of 32 c, of 32 k, taps. */
static void products(const void *ctx, int64_t lo, int64_t hi) {
    const outer *q = ctx;
    int64_t taps = q->R * q->S, k_blocks = (q->g.tiles + 1) / 2;
    for (int64_t i = lo; i < hi; i++) {
        int64_t c = i / taps / k_blocks * 2, k = i / taps % k_blocks * 2, r = i % taps / q->S * q->dilation[0];
        int64_t t = i % taps % q->S * q->dilation[1], h1 = q->row + q->n_rows, w1 = q->g.columns, h0 = q->row;
        int64_t w0 = reach(q, 1, t, q->x.columns, 0, &w1);
        if (q->strips == 1)
            h0 = reach(q, 0, r, q->x_rows, h0, &h1); /* of strips all rows are there, beyond the image zeros */
        if (h0 >= h1 || w0 >= w1) continue;
        int64_t column = w0 * q->stride[1] + t - q->padding[1];
        tile_walk w = {.a = q->lg + (h0 - q->row) * q->g.row_size + (k * q->g.columns + w0) * q->tile,
                       .b = q->lx + (c * q->x.columns + column) * q->tile,
                       .groups = q->n_groups,
                       .rows = h1 - h0,
                       .cols = w1 - w0,
                       .a_group = q->part_rows * q->g.row_size,
                       .a_row = q->g.row_size,
                       .a_col = q->tile,
                       .a_next = q->g.columns * q->tile,
                       .b_group = q->ring * q->x.row_size,
                       .b_row = q->x.row_size,
                       .b_col = q->stride[1] * q->tile,
                       .b_next = q->x.columns * q->tile,
                       .b_first = h0 * q->stride[0] + r,
                       .b_step = q->stride[0],
                       .b_ring = q->ring,
                       .two_a = k + 1 < q->g.tiles,
                       .two_b = c + 1 < q->x.tiles,
                       .split = q->dt == DDP_F32};
        cpu_walk_tiles(&w, q->sum + i * BLOCK);
    }
}

/* ---- the result ---------------------------------------------------------------------------------------------------------- */

/* Row k of the result, [c][taps], of patches [taps * c]: 16 c at a time their taps are turned. */
static void collect(const outer *q, int64_t k, float *line) {
    int64_t taps = q->R * q->S, k_blocks = (q->g.tiles + 1) / 2;
    for (int64_t c = 0; c < q->x.channels; c += 16) {
        int64_t n = q->x.channels - c < 16 ? q->x.channels - c : 16;
        const float *sum = q->sum + (c / 32 * k_blocks + k / 32) * taps * BLOCK;
        sum += (k % 32 / 16 * 2 + c % 32 / 16) * TILE_WORDS + k % 16 * 16;
        if (taps == 1) memcpy(line + c, sum, (size_t)n * sizeof *line);
        else
            cpu_transpose_words((const uint32_t *)(const void *)sum, BLOCK, taps, n,
                                (uint32_t *)(void *)(line + c * taps), taps);
    }
}

/* Rows [lo, hi) of the result. */
static void finish(const void *ctx, int64_t lo, int64_t hi) {
    const outer *q = ctx;
    int64_t n = q->x.channels * q->R * q->S, C = q->x.patches ? q->x.patches->C : 0;
    float *line = ddp__scratch_take((size_t)(2 * n) * sizeof *line), *row = line;
    if (!line) {
        *q->failed = true;
        return;
    }
    for (int64_t k = lo; k < hi; k++) {
        collect(q, k, line);
        if (C) {
            row = line + n;
            cpu_transpose_words((const uint32_t *)(const void *)line, C, n / C, C, (uint32_t *)(void *)row, n / C);
        }
        cpu_narrow(q->dt, row, q->y, k * q->place, n);
    }
    ddp__scratch_give(line, (size_t)(2 * n) * sizeof *line);
}

/* ---- parts --------------------------------------------------------------------------------------------------------------- */

static int64_t groups_of(const outer *q) { return (q->images * q->strips + GROUP - 1) / GROUP; }
/* Rows of x that `rows` rows of g read, from the first to the last. */
static int64_t reads(const outer *q, int64_t rows) {
    return (rows - 1) * q->stride[0] + (q->R - 1) * q->dilation[0] + 1;
}

/* Strips of equal height: those for which fewest rows are laid out, zeros for missing images counted. */
static void cut_strips(outer *q) {
    int64_t rows = q->rows, halo = (q->R - 1) * q->dilation[0] / q->stride[0], least = INT64_MAX;
    for (int64_t n = 1; n <= rows && n <= GROUP; n++) {
        int64_t cost = (q->images * n + GROUP - 1) / GROUP * (rows / n + halo);
        if (rows % n != 0 || cost >= least) continue;
        least = cost;
        q->strips = n;
    }
    q->rows = rows / q->strips;
    q->g.strip = q->rows;
    q->x.strip = q->rows * q->x.step[0] * q->stride[0];
}

/* As much at a time as stays near; more where there are many sums, which each part reads and writes. */
static void cut_parts(outer *q, int64_t sums) {
    int64_t words = (1 << 18) + sums / 2, all = reads(q, q->rows) * q->x.row_size + q->rows * q->g.row_size;
    q->part_rows = q->rows;
    q->part_groups = words / all;
    if (q->part_groups > groups_of(q)) q->part_groups = groups_of(q);
    if (q->part_groups < 1) {
        q->part_groups = 1;
        while (q->part_rows > 1 && reads(q, q->part_rows) * q->x.row_size + q->part_rows * q->g.row_size > words)
            q->part_rows--;
    }
    q->ring = reads(q, q->part_rows);
}

static void run_part(outer *q, int64_t work) {
    int64_t from = q->row * q->stride[0];
    if (q->row == 0 || from > q->x_to) q->x_to = from;
    q->x_from = q->x_to;
    q->x_to = from + reads(q, q->n_rows);
    if (q->x_to > q->x_from) cpu_share(q->n_groups * (q->x_to - q->x_from), work, lay_x, q);
    cpu_share(q->n_groups * q->n_rows, work, lay_g, q);
    cpu_share((q->x.tiles + 1) / 2 * ((q->g.tiles + 1) / 2) * q->R * q->S, work, products, q);
}

static void measure(const outer *q, side *s) {
    s->tiles = (s->channels + 15) / 16;
    s->row_size = s->tiles * s->columns * q->tile;
}

/* The whole; work: as cpu_share wants it. */
static int run(outer *q, int64_t work) {
    bool failed = false;
    q->failed = &failed;
    q->tile = q->dt == DDP_F32 ? 2 * TILE_WORDS : TILE_WORDS;
    measure(q, &q->x);
    measure(q, &q->g);
    cut_strips(q);
    int64_t sums = (q->x.tiles + 1) / 2 * ((q->g.tiles + 1) / 2) * q->R * q->S * BLOCK;
    cut_parts(q, sums);
    int64_t x = q->part_groups * q->ring * q->x.row_size, g = q->part_groups * q->part_rows * q->g.row_size;
    size_t bytes = (size_t)(x + g + sums) * 4;
    q->lx = ddp__scratch_take(bytes);
    if (!q->lx) return ddp__pending();
    q->lg = q->lx + x;
    q->sum = (float *)(void *)(q->lg + g);
    memset(q->sum, 0, (size_t)sums * sizeof *q->sum);
    for (q->group = 0; q->group < groups_of(q); q->group += q->part_groups)
        for (q->row = 0; q->row < q->rows; q->row += q->part_rows) {
            q->n_groups = groups_of(q) - q->group < q->part_groups ? groups_of(q) - q->group : q->part_groups;
            q->n_rows = q->rows - q->row < q->part_rows ? q->rows - q->row : q->part_rows;
            run_part(q, work);
        }
    cpu_share(q->g.channels, sums, finish, q);
    ddp__scratch_give(q->lx, bytes);
    return failed ? ddp__fail(DDP_ENOMEM, "out of memory") : 0;
}

/* ---- kernels ------------------------------------------------------------------------------------------------------------- */

int conv_amx_weight(const ddp_call *c) {
    conv_shape s = conv_shape_of(c);
    int64_t bytes = ddp__dtype_bytes[s.dt], taps = s.R * s.S;
    bool one = taps == 1, patches = s.C < FEW_CHANNELS && !one;
    outer q = {.dt = s.dt,
               .images = s.N,
               .rows = s.Ho,
               .R = 1,
               .S = 1,
               .stride = {1, 1},
               .y = ddp__ptr(s.w),
               .place = s.C * taps};
    q.g = (side){
        .p = ddp__ptr(s.y), .channels = s.K, .H = s.Ho, .W = s.Wo, .col = s.K * bytes, .step = {1, 1}, .columns = s.Wo};
    q.x = (side){
        .p = ddp__ptr(s.x), .channels = s.C, .H = s.H, .W = s.W, .col = s.C * bytes, .step = {1, 1}, .columns = s.W};
    q.x.row = s.W * q.x.col;
    q.x.image = s.H * q.x.row;
    q.g.row = s.Wo * q.g.col;
    q.g.image = s.Ho * q.g.row;
    if (one || patches) q.x.columns = s.Wo;
    q.x_rows = one || patches ? s.Ho : s.H;
    if (patches) { /* the image of patches has y's size */
        q.x.patches = &s;
        q.x.channels *= taps;
        q.x.H = s.Ho;
        q.x.W = s.Wo;
    }
    for (int i = 0; i < 2 && !patches; i++) {
        q.dilation[i] = s.dilation[i];
        if (one) {
            q.x.step[i] = s.stride[i];
            q.x.shift[i] = s.padding[i];
            continue;
        }
        q.stride[i] = s.stride[i];
        q.padding[i] = s.padding[i];
    }
    if (!one && !patches) {
        q.R = s.R;
        q.S = s.S;
        q.x.shift[0] = s.padding[0]; /* rows are counted from above the padding, columns are those of x */
    }
    return run(&q, conv_work(&s));
}

int cpu_outer_gemm(const gemm *g) {
    int64_t bytes = ddp__dtype_bytes[g->dt];
    outer q = {.dt = g->dt,
               .images = g->K,
               .rows = 1,
               .x_rows = 1,
               .R = 1,
               .S = 1,
               .stride = {1, 1},
               .y = g->y,
               .place = g->ys};
    q.g = (side){.p = g->a, .channels = g->M, .H = 1, .W = 1, .image = g->ak * bytes, .step = {1, 1}, .columns = 1};
    q.x = (side){.p = g->b, .channels = g->N, .H = 1, .W = 1, .image = g->bk * bytes, .step = {1, 1}, .columns = 1};
    return run(&q, g->M * g->N * g->K / 16);
}
