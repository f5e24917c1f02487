/* dataset.c -- data sets: made, counted, told apart, freed. */
#include <stdlib.h>
#include <string.h>

#include "data.h"

ddp_dataset *ddp__set_new(ddp_set_kind kind) {
    ddp_dataset *set = calloc(1, sizeof *set);
    if (!set) {
        ddp__fail(DDP_ENOMEM, "data set: out of memory");
        return NULL;
    }
    set->kind = kind;
    set->refs = 1;
    return set;
}

ddp_dataset *ddp_dataset_retain(ddp_dataset *set) {
    if (set) atomic_fetch_add(&set->refs, 1);
    return set;
}

void ddp_dataset_free(ddp_dataset *set) {
    if (!set || atomic_fetch_sub(&set->refs, 1) != 1) return;
    ddp__files_close(set);
    ddp__drop(set->x);
    ddp__drop(set->y);
    if (set->hooks.free) set->hooks.free(set->hooks.ctx);
    ddp_dataset_free(set->base);
    free(set->ids);
    free(set);
}

int64_t ddp_dataset_len(const ddp_dataset *set) { return set ? set->n : 0; }

ddp_dataset *ddp_dataset_tensors(ddp_tensor *x, ddp_tensor *y) {
    if (ddp__pending()) return NULL;
    if (!x) {
        ddp__fail(DDP_ENULL, "data set of tensors: x is missing");
        return NULL;
    }
    if (x->m.device != DDP_CPU || (y && y->m.device != DDP_CPU)) {
        ddp__fail(DDP_EDEVICE,
                  "data set of tensors: %s is on %s: keep it on the cpu, and let the loader copy batches (DataLoader's "
                  "device)",
                  x->m.device != DDP_CPU ? "x" : "y",
                  DDP_DEVICE_TEXT(x->m.device != DDP_CPU ? x->m.device : y->m.device));
        return NULL;
    }
    if (x->m.ndim == 0 || (y && y->m.ndim == 0)) {
        ddp__fail(DDP_ESHAPE, "data set of tensors: %s has no rows (0 dims)", x->m.ndim == 0 ? "x" : "y");
        return NULL;
    }
    if (y && y->m.size[0] != x->m.size[0]) {
        ddp__fail(DDP_ESHAPE, "data set of tensors: x is %s, y %s: the numbers of rows differ", DDP_SHAPE_TEXT(&x->m),
                  DDP_SHAPE_TEXT(&y->m));
        return NULL;
    }
    ddp_dataset *set = ddp__set_new(DDP_SET_TENSORS);
    if (!set) return NULL;
    set->n = x->m.size[0];
    set->x = ddp_retain(x);
    set->y = ddp_retain(y);
    return set;
}

ddp_dataset *ddp_dataset_host(int64_t n, const ddp_data_hooks *hooks) {
    ddp_dataset *set = NULL;
    if (!hooks || !hooks->open || !hooks->sample) ddp__fail(DDP_ENULL, "data set: open and sample are both needed");
    else if (n < 0) ddp__fail(DDP_EINVAL, "data set: %lld samples", (long long)n);
    else if (!ddp__pending()) set = ddp__set_new(DDP_SET_HOST);
    if (!set) {
        if (hooks && hooks->free) hooks->free(hooks->ctx);
        return NULL;
    }
    set->n = n;
    set->hooks = *hooks;
    return set;
}

ddp_dataset *ddp_dataset_subset(ddp_dataset *base, const int64_t *ids, int64_t n) {
    if (ddp__pending()) return NULL;
    if (!base || (!ids && n > 0) || n < 0) {
        ddp__fail(base ? DDP_EINVAL : DDP_ENULL, "subset: a data set and ids are needed");
        return NULL;
    }
    for (int64_t i = 0; i < n; i++) {
        if (ids[i] >= 0 && ids[i] < base->n) continue;
        ddp__fail(DDP_EINVAL, "subset: id %lld (at %lld) of a set of %lld samples", (long long)ids[i], (long long)i,
                  (long long)base->n);
        return NULL;
    }
    ddp_dataset *set = ddp__set_new(DDP_SET_SUBSET);
    if (!set) return NULL;
    set->ids = malloc((size_t)(n > 0 ? n : 1) * sizeof *set->ids);
    if (!set->ids) {
        ddp__fail(DDP_ENOMEM, "subset: out of memory for %lld ids", (long long)n);
        ddp_dataset_free(set);
        return NULL;
    }
    for (int64_t i = 0; i < n; i++) set->ids[i] = base->kind == DDP_SET_SUBSET ? base->ids[ids[i]] : ids[i];
    set->n = n;
    set->base = ddp_dataset_retain(base->kind == DDP_SET_SUBSET ? base->base : base);
    return set;
}

/* ---- fingerprint ---------------------------------------------------------------------------------------------- */

enum { LOOKS = 64 }; /* samples looked at, spread over the set */

static uint64_t mix_bytes(uint64_t h, const void *p, size_t n) {
    const uint8_t *b = p;
    for (size_t i = 0; i < n; i += 8) {
        uint64_t word = 0;
        memcpy(&word, b + i, n - i < 8 ? n - i : 8);
        h = ddp__mix(h ^ word, n);
    }
    return h;
}

static uint64_t mix_meta(uint64_t h, const ddp_tensor *t) {
    if (!t) return ddp__mix(h, 1);
    h = ddp__mix(h, (uint64_t)t->m.dtype);
    return mix_bytes(h, t->m.size, (size_t)t->m.ndim * sizeof *t->m.size);
}

/* The first elements of a row, by value. */
static uint64_t mix_row(uint64_t h, const ddp_tensor *t, int64_t i) {
    if (!t || t->numel == 0) return h;
    double v = ddp__load(t->m.dtype, ddp__ptr(t), i * t->m.stride[0]);
    return mix_bytes(h, &v, sizeof v);
}

uint64_t ddp_dataset_fingerprint(const ddp_dataset *set) {
    if (!set) return 0;
    uint64_t h = ddp__mix((uint64_t)set->kind, (uint64_t)set->n);
    const ddp_dataset *root = set;
    if (set->base) {
        root = set->base;
        h = ddp__mix(h, ddp_dataset_fingerprint(root));
        h = mix_bytes(h, set->ids, (size_t)set->n * sizeof *set->ids);
    }
    h = mix_meta(mix_meta(h, root->x), root->y);
    for (int64_t k = 0; k < LOOKS && k < root->n; k++) {
        int64_t i = root->n <= LOOKS ? k : (int64_t)((double)(root->n - 1) * (double)k / (LOOKS - 1));
        if (root->kind == DDP_SET_TENSORS) h = mix_row(mix_row(h, root->x, i), root->y, i);
        if (root->kind != DDP_SET_IMAGES) continue;
        const ddp_record_file *f;
        int64_t record;
        const uint8_t *p = ddp__image_record(root, i, &f, &record);
        h = mix_bytes(h, p, 1 + (size_t)root->channels * (size_t)root->height * (size_t)root->width);
    }
    return h;
}
