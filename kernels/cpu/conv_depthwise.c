/* conv_depthwise.c -- convolutions with a window of its own for each channel (groups = C = K), any window, stride, padding and
 * dilation, all three passes: memory-bound loops over vectors of channels, summed in f32. */
#include "conv.h"

enum { MAX_TAPS = 128 };

typedef struct depthwise {
    conv_shape s;
    const float *w; /* [taps][Cp] */
    int64_t Cp;
} depthwise;

/* The rows that one result pixel reads, and their taps. */
typedef struct sources {
    int64_t n;
    const char *row[MAX_TAPS];
    const float *w[MAX_TAPS];
} sources;

/* Where result position i finds tap r along dim d: a position of the source, or -1. */
static int64_t source(const conv_shape *s, int d, int64_t i, int64_t r) {
    if (s->pass != CONV_GRAD_INPUT) {
        int64_t at = i * s->stride[d] - s->padding[d] + r * s->dilation[d];
        return at >= 0 && at < (d ? s->W : s->H) ? at : -1;
    }
    int64_t at = i + s->padding[d] - r * s->dilation[d];
    if (at < 0 || at % s->stride[d]) return -1;
    at /= s->stride[d];
    return at < (d ? s->Wo : s->Ho) ? at : -1;
}

/* image: the source's; h, w: the result's. */
static void find_sources(const depthwise *q, const char *image, int64_t h, int64_t w, sources *f) {
    const conv_shape *s = &q->s;
    int64_t width = s->pass == CONV_GRAD_INPUT ? s->Wo : s->W;
    f->n = 0;
    for (int64_t r = 0; r < s->R; r++) {
        int64_t sh = source(s, 0, h, r);
        for (int64_t t = 0; sh >= 0 && t < s->S; t++) {
            int64_t sw = source(s, 1, w, t);
            if (sw < 0) continue;
            f->row[f->n] = cpu_at(s->dt, image, (sh * width + sw) * s->C);
            f->w[f->n++] = q->w + (r * s->S + t) * q->Cp;
        }
    }
}

/* Channels c .. c + n of one pixel. */
CPU_INLINE void pixel(const depthwise *q, ddp_dtype dt, const sources *f, char *to, int64_t c, int64_t n) {
    const tile_more *more = q->s.more;
    cpu_vec sum = q->s.bias ? conv_load(cpu_at(dt, ddp__ptr(q->s.bias), c), dt, n) : (cpu_vec){0};
    for (int64_t k = 0; k < f->n; k++)
        sum += conv_load(cpu_at(dt, f->row[k], c), dt, n) * cpu_load(DDP_F32, f->w[k], c);
    to = cpu_at(dt, to, c);
    if (more)
        sum = conv_more(more, dt, n, sum, cpu_load(DDP_F32, more->scale, c), cpu_load(DDP_F32, more->shift, c), to);
    conv_store(to, dt, n, sum);
}

CPU_INLINE void pixel_of(const depthwise *q, ddp_dtype dt, const sources *f, char *to) {
    int64_t c = 0, C = q->s.C;
    for (; c + CPU_W <= C; c += CPU_W) pixel(q, dt, f, to, c, CPU_W);
    if (c < C) pixel(q, dt, f, to, c, C - c);
}

/* Rows [lo, hi) of the result, through all images: forward, and the gradient of x. */
static void run_rows(const void *ctx, int64_t lo, int64_t hi) {
    const depthwise *q = ctx;
    const conv_shape *s = &q->s;
    bool back = s->pass == CONV_GRAD_INPUT;
    int64_t rows = back ? s->H : s->Ho, cols = back ? s->W : s->Wo, pixels = back ? s->Ho * s->Wo : s->H * s->W;
    char *out = ddp__ptr(back ? s->x : s->y);
    const char *in = ddp__ptr(back ? s->y : s->x);
    sources f;
    for (int64_t i = lo; i < hi; i++)
        for (int64_t w = 0; w < cols; w++) {
            char *to = cpu_at(s->dt, out, (i * cols + w) * s->C);
            find_sources(q, cpu_at(s->dt, in, i / rows * pixels * s->C), i % rows, w, &f);
            if (s->dt == DDP_F32) pixel_of(q, DDP_F32, &f, to);
            else if (s->dt == DDP_BF16) pixel_of(q, DDP_BF16, &f, to);
            else pixel_of(q, DDP_F16, &f, to);
        }
}

/* ---- gradient of w ---------------------------------------------------------------------------------------------------- */

/* sum[tap] += over image n of channels c .. c + lanes. */
static void add_image(const depthwise *q, int64_t n, int64_t c, int64_t lanes, cpu_vec *sum) {
    const conv_shape *s = &q->s;
    const char *x = ddp__ptr(s->x), *g = ddp__ptr(s->y);
    for (int64_t h = 0; h < s->Ho; h++)
        for (int64_t w = 0; w < s->Wo; w++) {
            cpu_vec v = conv_load(cpu_at(s->dt, g, ((n * s->Ho + h) * s->Wo + w) * s->C + c), s->dt, lanes);
            for (int64_t r = 0; r < s->R; r++) {
                int64_t sh = source(s, 0, h, r);
                for (int64_t t = 0; sh >= 0 && t < s->S; t++) {
                    int64_t sw = source(s, 1, w, t);
                    if (sw < 0) continue;
                    const char *p = cpu_at(s->dt, x, ((n * s->H + sh) * s->W + sw) * s->C + c);
                    sum[r * s->S + t] += v * conv_load(p, s->dt, lanes);
                }
            }
        }
}

/* Vectors [lo, hi) of channels; images are added in double. */
static void run_channels(const void *ctx, int64_t lo, int64_t hi) {
    const depthwise *q = ctx;
    const conv_shape *s = &q->s;
    int64_t taps = s->R * s->S;
    for (int64_t i = lo; i < hi; i++) {
        double total[MAX_TAPS][CPU_W] = {{0}};
        int64_t c = i * CPU_W, lanes = s->C - c < CPU_W ? s->C - c : CPU_W;
        for (int64_t n = 0; n < s->N; n++) {
            cpu_vec sum[MAX_TAPS];
            for (int64_t t = 0; t < taps; t++) sum[t] = (cpu_vec){0};
            add_image(q, n, c, lanes, sum);
            for (int64_t t = 0; t < taps; t++)
                for (int l = 0; l < CPU_W; l++) total[t][l] += sum[t][l];
        }
        for (int64_t l = 0; l < lanes; l++)
            for (int64_t t = 0; t < taps; t++) cpu_put(s->dt, ddp__ptr(s->w), (c + l) * taps + t, (float)total[t][l]);
    }
}

/* ---- kernels ------------------------------------------------------------------------------------------------------------- */

const char *conv_depthwise_reject(const ddp_call *c) {
    conv_shape s = conv_shape_of(c);
    const char *why = conv_reject_common(&s);
    if (why) return why;
    if (s.groups != s.C || s.K != s.C || s.C == 1) return "not a window for each channel";
    return s.R * s.S > MAX_TAPS ? "a window of more than 128 taps" : NULL;
}

int conv_depthwise_run(const ddp_call *c, const conv_shape *s) {
    (void)c;
    depthwise q = {.s = *s};
    int64_t taps = s->R * s->S, work = s->y->numel * taps;
    q.Cp = conv_round_up(s->C, CPU_W);
    if (s->pass == CONV_GRAD_WEIGHT) {
        cpu_share(q.Cp / CPU_W, work, run_channels, &q);
        return 0;
    }
    size_t bytes = (size_t)(taps * q.Cp) * sizeof(float);
    float *w = ddp__scratch_take(bytes);
    if (!w) return ddp__pending();
    memset(w, 0, bytes);
    for (int64_t k = 0; k < s->C; k++)
        for (int64_t t = 0; t < taps; t++) w[t * q.Cp + k] = cpu_get(s->dt, ddp__ptr(s->w), k * taps + t);
    q.w = w;
    cpu_share(s->N * (s->pass == CONV_GRAD_INPUT ? s->H : s->Ho), work, run_rows, &q);
    ddp__scratch_give(w, bytes);
    return 0;
}
