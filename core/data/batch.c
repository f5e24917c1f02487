/* batch.c -- one batch. The short way writes images and rows straight into the batch's tensor; the long way makes each
 * sample a tensor, because a host function makes or changes it. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "data.h"

int ddp__batcher_init(ddp_batcher *b, const ddp_plan *plan, int worker) {
    *b = (ddp_batcher){.plan = plan, .worker = worker};
    if (!plan->host) return 0;
    b->xs = calloc(2 * (size_t)plan->batch_size, sizeof *b->xs);
    if (!b->xs) return ddp__fail(DDP_ENOMEM, "loader: out of memory for batches of %lld", (long long)plan->batch_size);
    b->ys = b->xs + plan->batch_size;
    return 0;
}

static ddp_dataset *root_of(const ddp_plan *p) { return p->set->base ? p->set->base : p->set; }

void ddp__batcher_close(ddp_batcher *b) {
    if (b->set_state && root_of(b->plan)->hooks.close) root_of(b->plan)->hooks.close(b->set_state);
    if (b->fn_state && b->plan->fn.close) b->plan->fn.close(b->fn_state);
    free(b->xs);
    *b = (ddp_batcher){0};
}

/* ---- errors of samples ---------------------------------------------------------------------------------------- */

/* The pending error, told with where it happened. With skip it is counted instead, and 0 returned; a lack of memory
 * never is. */
static int sample_failed(const ddp_batcher *b, int64_t index, int64_t epoch, int64_t *skipped) {
    const char *text;
    int status = ddp_error_take(&text);
    const ddp_dataset *root = root_of(b->plan);
    char why[2048], path[1024] = "";
    snprintf(why, sizeof why, "%s", text);
    if (root->kind == DDP_SET_IMAGES) {
        const ddp_record_file *f;
        int64_t record;
        ddp__image_record(root, index, &f, &record);
        snprintf(path, sizeof path, ", file %.1000s, record %lld", f->path, (long long)record);
    }
    ddp__fail(status, "data: rank %d, worker %d, epoch %lld, index %lld%s: %s", ddp_rank(), b->worker, (long long)epoch,
              (long long)index + b->plan->index_from, path, why);
    if (!b->plan->skip || status == DDP_ENOMEM) return status;
    ddp_error_take(&text);
    ddp__log(DDP_LOG_DEBUG, "skipped: %s", text);
    ++*skipped;
    return 0;
}

/* ---- samples -------------------------------------------------------------------------------------------------- */

/* The pixels and the label of an image. A status. */
static int find_image(const ddp_dataset *set, int64_t i, ddp_image *img, int64_t *label) {
    const ddp_record_file *f;
    int64_t record;
    const uint8_t *p = ddp__image_record(set, i, &f, &record);
    if (p[0] >= set->classes) return ddp__fail(DDP_EIO, "the label is %d, expected 0 to %d", p[0], set->classes - 1);
    *label = p[0];
    *img = (ddp_image){.bytes = p + 1, .c = set->channels, .h = set->height, .w = set->width};
    return 0;
}

/* Row i of an f32 tensor [N,C,H,W] as an image. */
static ddp_image row_image(const ddp_tensor *x, int64_t i) {
    return (ddp_image){.f32 = (const float *)(const void *)ddp__ptr(x) + i * x->m.stride[0],
                       .sc = x->m.stride[1],
                       .sh = x->m.stride[2],
                       .sw = x->m.stride[3],
                       .c = (int)x->m.size[1],
                       .h = (int)x->m.size[2],
                       .w = (int)x->m.size[3]};
}

static void copy_row(const ddp_tensor *src, int64_t i, ddp_tensor *dst, int64_t at) {
    if (dst->numel == 0) return;
    ddp__copy_strided(ddp__ptr(dst) + at * dst->m.stride[0] * ddp__dtype_bytes[dst->m.dtype], dst->m.dtype,
                      dst->m.stride + 1, ddp__ptr(src) + i * src->m.stride[0] * ddp__dtype_bytes[src->m.dtype],
                      src->m.dtype, src->m.stride + 1, src->m.ndim - 1, src->m.size + 1);
}

/* Sample i of a set of the library's own into place `at` of x and y. A status. */
static int fill_native(const ddp_plan *p, int64_t i, uint64_t key, ddp_tensor *x, ddp_tensor *y, int64_t at) {
    const ddp_dataset *set = root_of(p);
    ddp_image img;
    bool image = set->kind == DDP_SET_IMAGES;
    if (image) {
        int64_t label = 0;
        if (find_image(set, i, &img, &label) < 0) return ddp__pending();
        ddp__store(y->m.dtype, ddp__ptr(y), at * y->m.stride[0], (double)label);
    } else if (p->aug.any) {
        img = row_image(set->x, i);
    }
    if (image || p->aug.any) {
        float *out = (float *)(void *)ddp__ptr(x) + at * x->m.stride[0];
        ddp__augment_run(&p->aug, &img, key, i, out, x->m.stride[1], x->m.stride[2], x->m.stride[3]);
    } else {
        copy_row(set->x, i, x, at);
    }
    if (!image && y) copy_row(set->y, i, y, at);
    return 0;
}

/* Room for n samples of a set of the library's own; converted: as a whole batch, in its dtypes and memory. A status. */
static int native_tensors(const ddp_plan *p, int64_t n, bool converted, ddp_tensor **x, ddp_tensor **y) {
    const ddp_dataset *set = root_of(p);
    bool image = set->kind == DDP_SET_IMAGES || p->aug.any;
    ddp_dtype xt = DDP_F32, yt = DDP_I64;
    if (set->kind == DDP_SET_TENSORS) {
        xt = set->x->m.dtype;
        yt = set->y ? set->y->m.dtype : DDP_I64;
    }
    if (converted && p->x_dtype >= 0 && !image) xt = (ddp_dtype)p->x_dtype;
    if (converted && p->y_dtype >= 0) yt = (ddp_dtype)p->y_dtype;
    int64_t size[3];
    int device = converted ? p->device : DDP_CPU;
    if (image) {
        const int64_t *s = set->kind == DDP_SET_TENSORS ? set->x->m.size : NULL;
        size[0] = s ? s[1] : set->channels;
        size[1] = ddp__augment_h(&p->aug, s ? (int)s[2] : set->height);
        size[2] = ddp__augment_w(&p->aug, s ? (int)s[3] : set->width);
    }
    *y = NULL;
    *x = image ? ddp__batch_tensor(n, 3, size, DDP_F32, device)
               : ddp__batch_tensor(n, set->x->m.ndim - 1, set->x->m.size + 1, xt, device);
    if (!*x) return ddp__pending();
    if (set->kind == DDP_SET_IMAGES) *y = ddp__batch_tensor(n, 0, NULL, yt, device);
    else if (set->y) *y = ddp__batch_tensor(n, set->y->m.ndim - 1, set->y->m.size + 1, yt, device);
    if (*y || (set->kind == DDP_SET_TENSORS && !set->y)) return 0;
    ddp_release(*x);
    *x = NULL;
    return ddp__pending();
}

static void shorten(ddp_tensor *t, int64_t n) {
    if (!t || t->m.size[0] == n) return;
    t->m.size[0] = n;
    t->numel = ddp__meta_numel(&t->m);
}

static int build_native(ddp_batcher *b, const int64_t *ids, int64_t n, int64_t epoch, ddp_tensor **x, ddp_tensor **y,
                        int64_t *skipped) {
    const ddp_plan *p = b->plan;
    uint64_t key = ddp__epoch_key(p->seed, epoch, DDP_KEY_SAMPLE);
    if (native_tensors(p, n, true, x, y) < 0) return ddp__pending();
    int64_t made = 0;
    for (int64_t k = 0; k < n; k++) {
        if (fill_native(p, ids[k], key, *x, *y, made) == 0) made++;
        else if (sample_failed(b, ids[k], epoch, skipped) < 0) break;
    }
    if (!ddp__pending() && made > 0) {
        shorten(*x, made);
        shorten(*y, made);
        return 0;
    }
    ddp_release(*x);
    ddp_release(*y);
    *x = *y = NULL;
    return ddp__pending();
}

/* ---- the long way --------------------------------------------------------------------------------------------- */

/* The first and only sample of a batch of one, without the dim of the batch. Takes t. */
static ddp_tensor *unbatched(ddp_tensor *t) {
    if (!t) return NULL;
    ddp_meta m = t->m;
    m.ndim--;
    for (int d = 0; d < m.ndim; d++) {
        m.size[d] = t->m.size[d + 1];
        m.stride[d] = t->m.stride[d + 1];
    }
    ddp_tensor *s = ddp__tensor_over(t->storage, &m);
    ddp_release(t);
    return s;
}

/* Calls a hook over call->x and y; on success they hold its results. Tensors made inside belong to no scope. */
static int call_hook(ddp_batcher *b, const ddp_data_hooks *h, void **state, ddp_sample_call *call) {
    if (!*state) *state = h->open(h->ctx, b->worker);
    if (!*state)
        return ddp__pending() ? ddp__pending() : ddp__fail(DDP_ESTATE, "the worker's state could not be opened");
    call->out_x = call->out_y = NULL;
    ddp_scope_push_barrier();
    int grad = ddp_set_grad_mode(0);
    b->gen = (struct ddp_generator){.key = ddp__mix(call->key, (uint64_t)call->index)};
    ddp_generator_use(&b->gen);
    int status = h->sample(*state, call);
    ddp_generator_use(NULL);
    ddp_set_grad_mode(grad);
    ddp_scope_pop_barrier();
    if (status == 0) status = ddp__pending();
    if (status == 0 && !call->out_x) status = ddp__fail(DDP_EINVAL, "the function gave no x");
    ddp_release(call->x);
    ddp_release(call->y);
    call->x = call->out_x;
    call->y = call->out_y;
    call->out_x = call->out_y = NULL;
    return status < 0 && !ddp__pending() ? ddp__fail(status, "the function failed") : status;
}

/* Augments what a host's function made. */
static int augment_host(const ddp_plan *p, ddp_sample_call *call) {
    ddp_tensor *x = call->x;
    if (!p->aug.any) return 0;
    if (x->m.ndim != 3 || x->m.dtype != DDP_F32)
        return ddp__fail(DDP_ESHAPE, "transform: x is %s %s; crop, flip and normalize take f32 images [C,H,W]",
                         ddp_dtype_name(x->m.dtype), DDP_SHAPE_TEXT(&x->m));
    ddp_image img = {.f32 = (const float *)(const void *)ddp__ptr(x),
                     .sc = x->m.stride[0],
                     .sh = x->m.stride[1],
                     .sw = x->m.stride[2],
                     .c = (int)x->m.size[0],
                     .h = (int)x->m.size[1],
                     .w = (int)x->m.size[2]};
    if (ddp__augment_check(&p->aug, img.c, img.h, img.w) < 0) return ddp__pending();
    ddp_meta m = {
        .dtype = DDP_F32, .ndim = 3, .size = {img.c, ddp__augment_h(&p->aug, img.h), ddp__augment_w(&p->aug, img.w)}};
    ddp__meta_rowmajor(&m);
    ddp_tensor *out = ddp__tensor_new(&m);
    if (!out) return ddp__pending();
    ddp__augment_run(&p->aug, &img, call->key, call->index, (float *)(void *)ddp__ptr(out), m.stride[0], m.stride[1],
                     m.stride[2]);
    ddp_release(x);
    call->x = out;
    return 0;
}

static int make_sample(ddp_batcher *b, ddp_sample_call *call) {
    const ddp_plan *p = b->plan;
    ddp_dataset *set = root_of(p);
    if (set->kind == DDP_SET_HOST) {
        if (call_hook(b, &set->hooks, &b->set_state, call) < 0 || augment_host(p, call) < 0) return ddp__pending();
    } else {
        if (native_tensors(p, 1, false, &call->x, &call->y) < 0) return ddp__pending();
        if (fill_native(p, call->index, call->key, call->x, call->y, 0) < 0) return ddp__pending();
        bool y = call->y != NULL;
        call->x = unbatched(call->x);
        call->y = unbatched(call->y);
        if (!call->x || (y && !call->y)) return ddp__pending();
    }
    return p->fn.open ? call_hook(b, &p->fn, &b->fn_state, call) : 0;
}

static int build_host(ddp_batcher *b, const int64_t *ids, int64_t n, int64_t epoch, ddp_tensor **x, ddp_tensor **y,
                      int64_t *skipped) {
    const ddp_plan *p = b->plan;
    uint64_t key = ddp__epoch_key(p->seed, epoch, DDP_KEY_SAMPLE);
    int64_t made = 0;
    *x = *y = NULL;
    for (int64_t k = 0; k < n; k++) {
        ddp_sample_call call = {.index = ids[k], .key = key};
        int bad = make_sample(b, &call);
        if (!bad) {
            ddp_tensor *x0 = made ? b->xs[0] : call.x, *y0 = made ? b->ys[0] : call.y;
            bad = ddp__collate_check("x", x0, call.x) < 0 || ddp__collate_check("y", y0, call.y) < 0;
        }
        if (!bad) {
            b->xs[made] = call.x;
            b->ys[made++] = call.y;
            continue;
        }
        ddp_release(call.x);
        ddp_release(call.y);
        if (sample_failed(b, ids[k], epoch, skipped) < 0) break;
    }
    if (!ddp__pending() && made > 0) {
        *x = ddp__collate(b->xs, made, p->x_dtype, p->device);
        if (*x && b->ys[0]) *y = ddp__collate(b->ys, made, p->y_dtype, p->device);
    }
    for (int64_t k = 0; k < made; k++) {
        ddp_release(b->xs[k]);
        ddp_release(b->ys[k]);
    }
    if (!ddp__pending()) return 0;
    ddp_release(*x);
    *x = NULL;
    return ddp__pending();
}

int ddp__batch_build(ddp_batcher *b, const int64_t *ids, int64_t n, int64_t epoch, ddp_tensor **x, ddp_tensor **y,
                     int64_t *skipped) {
    *skipped = 0;
    *x = *y = NULL;
    return b->plan->host ? build_host(b, ids, n, epoch, x, y, skipped) : build_native(b, ids, n, epoch, x, y, skipped);
}
