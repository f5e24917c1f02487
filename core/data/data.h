/* data.h -- what the files of this room share: sets, augmentation, and the making of one batch. */
#ifndef DDP_DATA_INTERNAL_H
#define DDP_DATA_INTERNAL_H

#include "../tensor/tensor.h"

/* ---- data sets (dataset.c, files.c) --------------------------------------------------------------------------- */

typedef enum ddp_set_kind { DDP_SET_IMAGES, DDP_SET_TENSORS, DDP_SET_HOST, DDP_SET_SUBSET } ddp_set_kind;

enum { DDP_SET_FILES = 5 };

/* Records of one file, mapped: a label byte, then the planes of an image. */
typedef struct ddp_record_file {
    char *path;
    const uint8_t *map;
    size_t bytes;
    const uint8_t *first; /* record */
    int64_t n;
} ddp_record_file;

struct ddp_dataset {
    ddp_set_kind kind;
    atomic_int refs;
    int64_t n;
    /* images */
    const char *what; /* "cifar10" */
    int channels, height, width, classes;
    float scale;
    int n_files;
    ddp_record_file file[DDP_SET_FILES];
    /* tensors */
    ddp_tensor *x, *y;
    /* host */
    ddp_data_hooks hooks;
    /* subset */
    ddp_dataset *base; /* never a subset itself */
    int64_t *ids;
};

/* An empty set with one reference; NULL with the error set. */
DDP_LOCAL ddp_dataset *ddp__set_new(ddp_set_kind kind);
/* The file and the record of sample i. */
DDP_LOCAL const uint8_t *ddp__image_record(const ddp_dataset *set, int64_t i, const ddp_record_file **file,
                                           int64_t *record);
DDP_LOCAL void ddp__files_close(ddp_dataset *set);

/* ---- keys: every draw of the room has its own ----------------------------------------------------------------- */

static inline uint64_t ddp__epoch_key(uint64_t seed, int64_t epoch, uint64_t purpose) {
    return ddp__mix(ddp__mix(seed, purpose), (uint64_t)epoch);
}
enum { DDP_KEY_ORDER = 0x0de5, DDP_KEY_SAMPLE = 0x5a3e };

/* ---- augmentation (augment.c) --------------------------------------------------------------------------------- */

typedef struct ddp_augment {
    bool any, crop, flip;
    int crop_h, crop_w, padding;
    int n_norm;
    float *mean, *inv; /* [n_norm] */
    float *lut;        /* [C][256]: a byte as the number it becomes; NULL but for images */
} ddp_augment;

/* Where a sample's pixels come from: f32 by strides, or bytes in planes. */
typedef struct ddp_image {
    const uint8_t *bytes;
    const float *f32;
    int64_t sc, sh, sw; /* of f32 */
    int c, h, w;
} ddp_image;

/* From the loader's options; checks them against images of c channels when `c` > 0. `scale` > 0: a table for bytes. */
DDP_LOCAL int ddp__augment_init(ddp_augment *a, const ddp_loader_opts *o, int c, int h, int w, float scale);
DDP_LOCAL void ddp__augment_free(ddp_augment *a);
/* Does an image fit? Sets the error if not. */
DDP_LOCAL int ddp__augment_check(const ddp_augment *a, int c, int h, int w);
/* The size of what comes out. */
static inline int ddp__augment_h(const ddp_augment *a, int h) { return a->crop ? a->crop_h : h; }
static inline int ddp__augment_w(const ddp_augment *a, int w) { return a->crop ? a->crop_w : w; }
/* One image into out, which has strides oc, oh, ow. Draws from (key, index). */
DDP_LOCAL void ddp__augment_run(const ddp_augment *a, const ddp_image *src, uint64_t key, int64_t index, float *out,
                                int64_t oc, int64_t oh, int64_t ow);

/* ---- one batch (batch.c, collate.c) --------------------------------------------------------------------------- */

/* What a loader does to samples; fixed once it is made, read by all its threads. */
typedef struct ddp_plan {
    ddp_dataset *set; /* as given; owned */
    ddp_augment aug;
    bool host;         /* samples pass through host functions: the long way */
    ddp_data_hooks fn; /* the transform; open == NULL: none */
    int64_t batch_size;
    uint64_t seed;
    int64_t index_from;
    int x_dtype, y_dtype; /* -1: as they are */
    bool skip;
    int device; /* a GPU: batches are built in pinned memory */
} ddp_plan;

/* A thread's own part. */
typedef struct ddp_batcher {
    const ddp_plan *plan;
    int worker;
    void *set_state, *fn_state; /* opened at the first batch */
    struct ddp_generator gen;   /* what random ops in host functions draw from */
    ddp_tensor **xs, **ys;      /* [batch_size], of the long way */
} ddp_batcher;

DDP_LOCAL int ddp__batcher_init(ddp_batcher *b, const ddp_plan *plan, int worker);
/* Closes states; on the thread that built. */
DDP_LOCAL void ddp__batcher_close(ddp_batcher *b);
/* The batch of samples ids[0..n) of epoch. 0 with new references (*x NULL when all were skipped), or the error. */
DDP_LOCAL int ddp__batch_build(ddp_batcher *b, const int64_t *ids, int64_t n, int64_t epoch, ddp_tensor **x,
                               ddp_tensor **y, int64_t *skipped);

/* Copies src's elements to dst (same sizes, dst of dtype dst_type), each by its own strides. */
DDP_LOCAL void ddp__copy_strided(char *dst, ddp_dtype dst_type, const int64_t *dst_stride, const char *src,
                                 ddp_dtype src_type, const int64_t *src_stride, int ndim, const int64_t *size);
/* May `t` stand in a batch with `first`? Sets the error if not; `what` is "x" or "y". */
DDP_LOCAL int ddp__collate_check(const char *what, const ddp_tensor *first, const ddp_tensor *t);
/* [n, ...] of n samples that passed the check; dtype -1: their own. NULL with the error set. */
DDP_LOCAL ddp_tensor *ddp__collate(ddp_tensor *const *t, int64_t n, int dtype, int device);
/* A new tensor [n, size...] in the host's memory, channels-last when that makes 4 dims; pinned when device is a GPU. */
DDP_LOCAL ddp_tensor *ddp__batch_tensor(int64_t n, int ndim, const int64_t *size, ddp_dtype dtype, int device);
/* Puts a tensor of the GPU in place of the pinned *t, to which it is being copied; the compute stream must join the copies (copies_join)
 * before it is used. NULL stays. A status; after a failure *t is as it was. */
DDP_LOCAL int ddp__batch_send(ddp_tensor **t, int device);

#endif
