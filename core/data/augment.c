/* augment.c -- random crop, flip and normalisation of one image, and a sample's random numbers. All draws come from
 * Philox with the key of (seed, epoch) and the counter (index, stream): stream 0 is this file's, 1.. are the host
 * function's. */
#include <stdlib.h>

#include "data.h"

double ddp_sample_uniform(ddp_sample_call *call) {
    uint32_t r[4];
    ddp__philox(call->key, (uint64_t)call->index, 1 + call->draws++, r);
    return ddp__unit_f64(r[0], r[1]);
}

int64_t ddp_sample_integer(ddp_sample_call *call, int64_t lo, int64_t hi) {
    uint32_t r[4];
    ddp__philox(call->key, (uint64_t)call->index, 1 + call->draws++, r);
    if (hi <= lo) return lo;
    uint64_t wide = (uint64_t)r[0] << 32 | r[1], span = (uint64_t)hi - (uint64_t)lo;
    if (span == UINT64_MAX) return (int64_t)wide;
    return (int64_t)((uint64_t)lo + (uint64_t)((unsigned __int128)wide * (span + 1) >> 64));
}

/* ---- options -------------------------------------------------------------------------------------------------- */

int ddp__augment_check(const ddp_augment *a, int c, int h, int w) {
    if (a->n_norm > 1 && a->n_norm != c)
        return ddp__fail(DDP_ESHAPE, "normalize: %d means for images of %d channels", a->n_norm, c);
    if (a->crop && (a->crop_h > h + 2 * a->padding || a->crop_w > w + 2 * a->padding))
        return ddp__fail(DDP_ESHAPE, "random_crop: a window of %dx%d from images of %dx%d with padding %d", a->crop_h,
                         a->crop_w, h, w, a->padding);
    return 0;
}

static int take_norm(ddp_augment *a, const ddp_loader_opts *o) {
    if (!o->mean || !o->std) return ddp__fail(DDP_ENULL, "normalize: mean and std are both needed");
    a->mean = malloc(2 * (size_t)o->n_norm * sizeof *a->mean);
    if (!a->mean) return ddp__fail(DDP_ENOMEM, "loader: out of memory");
    a->n_norm = o->n_norm;
    a->inv = a->mean + o->n_norm;
    for (int i = 0; i < o->n_norm; i++) {
        if (!(o->std[i] > 0))
            return ddp__fail(DDP_EINVAL, "normalize: std[%d] is %g, expected more than 0", i, o->std[i]);
        a->mean[i] = (float)o->mean[i];
        a->inv[i] = (float)(1 / o->std[i]);
    }
    return 0;
}

/* The mean and the factor of channel c. */
// NOLINTNEXTLINE(clang-analyzer-core.uninitialized.UndefReturn): ddp__augment_init sets as many as n_norm says
static float norm_mean(const ddp_augment *a, int c) { return a->n_norm ? a->mean[a->n_norm > 1 ? c : 0] : 0; }
// NOLINTNEXTLINE(clang-analyzer-core.uninitialized.UndefReturn): ddp__augment_init sets as many as n_norm says
static float norm_inv(const ddp_augment *a, int c) { return a->n_norm ? a->inv[a->n_norm > 1 ? c : 0] : 1; }

int ddp__augment_init(ddp_augment *a, const ddp_loader_opts *o, int c, int h, int w, float scale) {
    *a = (ddp_augment){.crop = o->crop_h > 0 || o->crop_w > 0,
                       .flip = o->flip != 0,
                       .crop_h = o->crop_h,
                       .crop_w = o->crop_w,
                       .padding = o->crop_padding};
    if (o->crop_h < 0 || o->crop_w < 0 || o->crop_padding < 0 || (a->crop && (o->crop_h == 0 || o->crop_w == 0)))
        return ddp__fail(DDP_EINVAL, "random_crop: size %dx%d, padding %d", o->crop_h, o->crop_w, o->crop_padding);
    if (o->n_norm < 0) return ddp__fail(DDP_EINVAL, "normalize: %d means", o->n_norm);
    if (o->n_norm > 0 && take_norm(a, o) < 0) return ddp__pending();
    a->any = a->crop || a->flip || a->n_norm > 0;
    if (c > 0 && ddp__augment_check(a, c, h, w) < 0) return ddp__pending();
    if (scale <= 0) return 0;
    a->lut = malloc((size_t)c * 256 * sizeof *a->lut);
    if (!a->lut) return ddp__fail(DDP_ENOMEM, "loader: out of memory");
    for (int k = 0; k < c; k++)
        for (int v = 0; v < 256; v++) a->lut[k * 256 + v] = ((float)v / scale - norm_mean(a, k)) * norm_inv(a, k);
    return 0;
}

void ddp__augment_free(ddp_augment *a) {
    free(a->mean);
    free(a->lut);
    *a = (ddp_augment){0};
}

/* ---- one image ------------------------------------------------------------------------------------------------ */

/* Row `y` of channel c; columns x0, x0 + dx, ... of it. Outside the image are zeros. */
static void row(const ddp_augment *a, const ddp_image *s, int c, int y, int x0, int dx, int n, float *out, int64_t ow) {
    float mean = norm_mean(a, c), inv = norm_inv(a, c);
    if (s->bytes) {
        const float *lut = a->lut + 256 * c;
        const uint8_t *p = s->bytes + ((int64_t)c * s->h + (y < 0 || y >= s->h ? 0 : y)) * s->w;
        for (int i = 0, x = x0; i < n; i++, x += dx) {
            bool inside = y >= 0 && y < s->h && x >= 0 && x < s->w;
            out[i * ow] = lut[inside ? p[x] : 0];
        }
        return;
    }
    for (int i = 0, x = x0; i < n; i++, x += dx) {
        bool inside = y >= 0 && y < s->h && x >= 0 && x < s->w;
        float v = inside ? s->f32[c * s->sc + y * s->sh + x * s->sw] : 0;
        out[i * ow] = (v - mean) * inv;
    }
}

void ddp__augment_run(const ddp_augment *a, const ddp_image *src, uint64_t key, int64_t index, float *out, int64_t oc,
                      int64_t oh, int64_t ow) {
    int h = ddp__augment_h(a, src->h), w = ddp__augment_w(a, src->w), top = 0, left = 0;
    uint32_t r[4] = {0};
    if (a->crop || a->flip) ddp__philox(key, (uint64_t)index, 0, r);
    if (a->crop) {
        top = (int)((uint64_t)r[0] * (uint64_t)(src->h + 2 * a->padding - h + 1) >> 32) - a->padding;
        left = (int)((uint64_t)r[1] * (uint64_t)(src->w + 2 * a->padding - w + 1) >> 32) - a->padding;
    }
    bool flip = a->flip && r[2] >> 31;
    for (int c = 0; c < src->c; c++)
        for (int y = 0; y < h; y++)
            row(a, src, c, top + y, flip ? left + w - 1 : left, flip ? -1 : 1, w, out + c * oc + y * oh, ow);
}
