/* ddp_data.h -- data sets, samplers, augmentation and loaders of libddp; included by ddp.h, whose conventions hold.
 *
 * A data set is a number of samples by index; a loader shuffles, shares them out over the ranks, augments and batches
 * them in worker threads, in an order and with bytes that depend on (seed, epoch, index) alone: not on workers, not on
 * ranks. */
#ifndef DDP_DATA_H
#define DDP_DATA_H

#ifndef DDP_CDEF
#include "ddp.h"
#ifdef __cplusplus
extern "C" {
#endif
#endif

/* ---- samples made by a host ----------------------------------------------------------------------------------- */

/* One sample on its way through a host function.
 *   index     of the sample in its data set, from 0
 *   key, draws  where its random numbers come from: ddp_sample_uniform; draws counts them
 *   x, y      what there is so far, borrowed: [C,H,W] f32 and a 0-dim i64 for images; both NULL for a set made of a
 *             function; y NULL for a set without targets
 *   out_x, out_y  [OUT] new references, the loader's; out_y may stay NULL. A number made by ddp_scalar collates with
 *             others to i64 when all of a batch are whole, else to f32. */
typedef struct ddp_sample_call {
    int64_t index;
    uint64_t key;
    uint64_t draws;
    ddp_tensor *x, *y;
    ddp_tensor *out_x, *out_y;
} ddp_sample_call;
/* The sample's next random number, uniform in [0, 1) with 53 bits: a pure function of (seed, epoch, index, draws). */
DDP_API double ddp_sample_uniform(ddp_sample_call *call);
/* The next one as a whole number, lo <= v <= hi (hi < lo gives lo). */
DDP_API int64_t ddp_sample_integer(ddp_sample_call *call, int64_t lo, int64_t hi);

/* How a host takes part: each worker opens a state of its own, on its thread, at its first batch.
 *   open    a state for `worker` (0: the thread of ddp_loader_next; 1.. the workers), or NULL with the error set
 *   sample  fills out_x and out_y; 0, or negative with the error set
 *   close   on the thread that opened
 *   free    [OPTIONAL] called with ctx once, when nothing uses the hooks any more, on whichever thread that is
 * With 0 workers, sample runs inside ddp_loader_next. */
typedef struct ddp_data_hooks {
    void *ctx;
    void *(*open)(void *ctx, int worker);
    int (*sample)(void *state, ddp_sample_call *call);
    void (*close)(void *state);
    void (*free)(void *ctx);
} ddp_data_hooks;

/* ---- data sets ------------------------------------------------------------------------------------------------ */

/* CIFAR-10's binary version (A. Krizhevsky, "Learning multiple layers of features from tiny images", 2009): records of
 * one label byte and 3072 bytes, the red, green and blue planes of a 32x32 image. The files are mapped. Samples: x f32
 * [3,32,32] in [0, 1] (byte / 255), y i64 0..9.
 *   dir    the folder with data_batch_1.bin .. data_batch_5.bin and test_batch.bin, or its parent, where it is called
 *          cifar-10-batches-bin
 *   train  1: the five training batches; 0: the test batch
 * NULL with DDP_EIO for a missing file, or one whose size is no whole number of records. A label beyond 9 is an error
 * of its sample. Any thread. */
DDP_API ddp_dataset *ddp_dataset_cifar10(const char *dir, int train);
/* The handwritten digits that come with this library (scripts/data/digits.bin; see LICENSE-digits.txt beside it), or
 * any file of that form: 1,797 images of 8x8, split for good into 1,437 for training and 360 for testing, both
 * stratified. Samples: x f32 [1,8,8] in [0, 1] (value / 16), y i64 0..9. NULL with DDP_EIO as above. Any thread. */
DDP_API ddp_dataset *ddp_dataset_digits(const char *file, int train);
/* The rows of x and y; both are retained, not copied.
 *   x  [N, ...] any dtype
 *   y  [OPTIONAL] [N, ...]
 * NULL with DDP_ESHAPE when x has no dims or the numbers of rows differ. Any thread. */
DDP_API ddp_dataset *ddp_dataset_tensors(ddp_tensor *x, ddp_tensor *y);
/* n samples that a host makes. The set takes the hooks over: hooks->free is called when this fails, too. Any thread. */
DDP_API ddp_dataset *ddp_dataset_host(int64_t n, const ddp_data_hooks *hooks);
/* Samples ids[0..n) of another set, from 0; retains it and copies ids. NULL with DDP_EINVAL naming an id out of range.
 * Indices in messages, in augmentation and in hooks stay those of the whole set. Any thread. */
DDP_API ddp_dataset *ddp_dataset_subset(ddp_dataset *set, const int64_t *ids, int64_t n);
/* The number of samples; 0 for NULL. Any thread. */
DDP_API int64_t ddp_dataset_len(const ddp_dataset *set);
/* A number that tells data sets apart: of kind, sizes and some of the bytes. Equal on ranks that read the same. Any
 * thread. */
DDP_API uint64_t ddp_dataset_fingerprint(const ddp_dataset *set);
/* One more reference; returns set. One less. NULL is allowed. Any thread. */
DDP_API ddp_dataset *ddp_dataset_retain(ddp_dataset *set);
DDP_API void ddp_dataset_free(ddp_dataset *set);

/* ---- samplers: pure functions --------------------------------------------------------------------------------- */

/* How many of n samples a rank of `world` reads in an epoch. With shuffle the ranks have equal numbers: the order is
 * continued from its start, or with drop_last cut. Without shuffle nothing is repeated (each sample is read once over
 * the ranks), and only drop_last cuts. Any thread. */
DDP_API int64_t ddp_sampler_len(int64_t n, int shuffle, int drop_last, int rank, int world);
/* Which ones: order[rank], order[rank + world], ... where order is 0..n-1, shuffled by Fisher and Yates' algorithm with
 * Philox draws keyed by (seed, epoch) if shuffle.
 *   out  [OUT] [ddp_sampler_len(...)]
 * DDP_ENOMEM, or DDP_EINVAL unless 0 <= rank < world. Any thread. */
DDP_API int ddp_sampler_order(int64_t n, uint64_t seed, int64_t epoch, int shuffle, int drop_last, int rank, int world,
                              int64_t *out);

/* ---- loaders -------------------------------------------------------------------------------------------------- */

typedef struct ddp_loader_opts {
    size_t size;        /* sizeof(ddp_loader_opts) */
    int64_t batch_size; /* 0: 1 */
    int shuffle;        /* 1: another order each epoch */
    int drop_last;      /* 1: no short batch at the end */
    int workers;        /* threads; 0: work is done in ddp_loader_next */
    int prefetch;       /* batches a worker may be ahead; 0: 2 */
    int skip_errors;    /* 1: a sample that fails is left out and counted; 0: it ends the loop */
    int distributed;    /* 1: this rank's share, by the rules of ddp_sampler_len; 0: the whole set on each rank */
    int pad_drop;       /* drop_last of that sharing */
    int rank, world;    /* of that sharing; world 0: the job's, looked up when an epoch begins */
    int64_t order_seed; /* of the order; negative: seed */
    int64_t seed;       /* of augmentation; negative: the key of the thread's generator (ddp_manual_seed) */
    int64_t index_from; /* what the first sample is called in messages: 0, or 1 for hosts that count so */
    int x_dtype;        /* 1 + the dtype that x is converted to (not augmented images); 0: as it is */
    int y_dtype;        /* the same for y */

    /* Augmentation of f32 images [C,H,W], in this order. Draws come from (seed, epoch, index). */
    int crop_h, crop_w; /* a random window of this size; 0: none */
    int crop_padding;   /* of zeros on all four sides before that */
    int flip;           /* 1: left and right are exchanged half of the time */
    int n_norm;         /* (v - mean[c]) / std[c]: 0 (none), 1 (for all) or C values */
    const double *mean; /* [n_norm] copied */
    const double *std;  /* [n_norm] copied */

    const ddp_data_hooks *transform; /* [OPTIONAL] a host function over each sample, after all that; taken over */
    int device; /* where batches are given out: the CPU, or a GPU, to which they are copied one ahead from pinned memory */
} ddp_loader_opts;
/* A loader over a set, which it retains.
 *   opts  [OPTIONAL]
 *   out   [OUT] freed with ddp_loader_free
 * DDP_EINVAL and DDP_ESHAPE for options that do not fit the set, DDP_EDEVICE for a GPU that is not there; the transform's free is then called. Any thread. What
 * follows: one thread at a time; time in ddp_loader_next counts as DDP_PART_DATA, so the compute thread. */
DDP_API int ddp_loader_new(ddp_dataset *set, const ddp_loader_opts *opts, ddp_loader **out);
/* Begins a pass over the data. After a pass that ended, or at first, that is epoch ddp_loader_epoch(); a pass that was
 * left in the middle counts as done, but for one that ddp_loader_load_state has just set. What workers had made ready
 * is dropped. */
DDP_API int ddp_loader_start(ddp_loader *l);
/* The next batch: 1; 0 at the end of the pass; negative on error, after which the next call gives the next batch.
 * Begins a pass when none is open.
 *   x  [OUT] [B, ...] 4-D ones channels-last; a new reference, the caller's also inside a scope
 *   y  [OUT] [B, ...] the same, or NULL for a set without targets
 * Errors of samples name rank, worker, epoch, index and path. */
DDP_API int ddp_loader_next(ddp_loader *l, ddp_tensor **x, ddp_tensor **y);
/* Batches of one epoch on this rank. */
DDP_API int64_t ddp_loader_len(const ddp_loader *l);
/* Epochs that have ended: the number of the one under way, from 0. */
DDP_API int64_t ddp_loader_epoch(const ddp_loader *l);
/* The next pass is this epoch, from its start. */
DDP_API int ddp_loader_set_epoch(ddp_loader *l, int64_t epoch);
/* Batches given out in the epoch under way: with ddp_loader_epoch, all there is to save. */
DDP_API int64_t ddp_loader_batch(const ddp_loader *l);
/* The next pass goes on in `epoch` after `batch` batches. DDP_EINVAL for negative ones. */
DDP_API int ddp_loader_load_state(ddp_loader *l, int64_t epoch, int64_t batch);
/* Samples left out so far (skip_errors). Any thread. */
DDP_API int64_t ddp_loader_skipped(const ddp_loader *l);
/* Ends the workers, after the sample each is at, and frees all. NULL is allowed. */
DDP_API void ddp_loader_free(ddp_loader *l);

#ifndef DDP_CDEF
#ifdef __cplusplus
}
#endif
#endif
#endif
