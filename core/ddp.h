/* ddp.h -- the public C interface of libddp.
 *
 * Conventions
 *   Names      ddp_<noun>_<verb>; ops are ddp_<op> and stand in ddp_ops.h, generated from core/op/ops.def.
 *   Results    An op returns its result, a new reference that is the caller's, or NULL. Arguments are borrowed.
 *              Everything else returns a status, 0 or negative, with results through trailing pointers ([OUT]).
 *   Errors     Sticky per thread. After a failure every op returns NULL and every status call that status until
 *              ddp_error_take; so a nested expression needs one check at its end. Never refused while an error is
 *              pending: retain, release, keep, free, scope ends, error_take, finish, abort and accessors.
 *   Threads    One thread at a time per handle; different threads may work on different tensors. "Any thread" below
 *              means just that; "compute thread" means the one thread of the process that trains.
 *   Sizes      int64_t; strides in elements; dims count from 0, -1 is the last.
 *   libddp never prints (but for log lines), exits or jumps. */
#ifndef DDP_H
#define DDP_H

#ifndef DDP_CDEF
#include <stddef.h>
#include <stdint.h>
#define DDP_API __attribute__((visibility("default")))
#ifdef __cplusplus
extern "C" {
#endif
#else
#define DDP_API
#endif

/* The version of this interface; ddp_abi_version() of the library must equal it. */
enum { DDP_ABI = 1 };
/* DDP_ABI of the library. Any thread. */
DDP_API int ddp_abi_version(void);
/* "ddp 0.1.0 onednn 2.6.3 ...": versions of what is in use, static text. Any thread. */
DDP_API const char *ddp_version(void);

enum { DDP_MAX_DIM = 8 };

/* Status. Text through ddp_error_take. */
enum {
    DDP_OK = 0,
    DDP_EINVAL = -1,    /* an argument's value */
    DDP_ESHAPE = -2,    /* shapes that do not fit */
    DDP_EDTYPE = -3,    /* a dtype that does not fit */
    DDP_EDEVICE = -4,   /* a device that is not there, or two that differ */
    DDP_ENOMEM = -5,    /* out of memory */
    DDP_EIO = -6,       /* files and sockets */
    DDP_ETIMEOUT = -7,  /* a peer did not come in time */
    DDP_EPEER = -8,     /* a peer failed or left */
    DDP_EMISMATCH = -9, /* ranks disagree about a call or about the model */
    DDP_ESTATE = -10,   /* called at the wrong time */
    DDP_ENOSUP = -11,   /* not supported, by name */
    DDP_ENULL = -12     /* a NULL required argument */
};

/* Element types. The first letters are what Lua calls them. */
typedef enum ddp_dtype {
    DDP_F32,
    DDP_F64,
    DDP_F16,
    DDP_BF16,
    DDP_I64,
    DDP_I32,
    DDP_U8,
    DDP_BOOL,
    DDP_DTYPES
} ddp_dtype;

/* Devices: one int. */
enum { DDP_CPU = 0 };
#define DDP_CUDA(i) (1 + (i)) /* GPU i of those that this process sees */

typedef struct ddp_tensor ddp_tensor;
typedef struct ddp_generator ddp_generator;
typedef struct ddp_backward_state ddp_backward_state;
typedef struct ddp_reducer ddp_reducer;
typedef struct ddp_optim ddp_optim;
typedef struct ddp_work ddp_work;
typedef struct ddp_reduction ddp_reduction;
typedef struct ddp_group ddp_group;
typedef struct ddp_loader ddp_loader;
typedef struct ddp_dataset ddp_dataset;

/* ---- errors -------------------------------------------------------------------------------------------------- */

/* Returns the pending status of this thread, 0 when none, and clears it.
 *   text   [OUT] [OPTIONAL] what happened, in a sentence; valid until this thread's next ddp_error_take; "" when none
 * Any thread. */
DDP_API int ddp_error_take(const char **text);
/* The pending status without taking it, 0 when none. Any thread. */
DDP_API int ddp_error_peek(void);
/* Records a failure of the caller's own as this thread's error (unless one is pending). Returns the pending status. */
DDP_API int ddp_error_set(int status, const char *text);
/* The short name of a status, "shape" for DDP_ESHAPE. Static text. Any thread. */
DDP_API const char *ddp_status_name(int status);
/* Log lines go to `hook` (level 0 debug, 1 info, 2 warning) in place of stderr; NULL restores. Before other threads start. */
DDP_API void ddp_set_log_hook(void (*hook)(void *ctx, int level, const char *text), void *ctx);
/* A log line of the host's own. Any thread. */
DDP_API void ddp_log_line(int level, const char *text);

/* ---- the process and the job --------------------------------------------------------------------------------- */

typedef struct ddp_init_opts {
    size_t size;        /* sizeof(ddp_init_opts) */
    double timeout;     /* seconds, for every wait; 0: DDP_TIMEOUT or 600 */
    const char *engine; /* NULL: DDP_ENGINE or "auto" */
} ddp_init_opts;
/* Joins the job that the environment describes, by the first of these that is whole: DDP_RANK and DDP_WORLD_SIZE; RANK and
 * WORLD_SIZE (ddprun, torchrun); OMPI_COMM_WORLD_* (mpirun); a Slurm step (srun); PMI_* (MPICH); JOB_COMPLETION_INDEX
 * (Kubernetes; the number of pods in WORLD_SIZE or JOB_COMPLETIONS). Rank 0 is met at MASTER_ADDR and MASTER_PORT, which
 * srun and, on one host, mpirun make needless. Without any of it, a world of one.
 * A second call changes nothing. Collective: returns when all ranks have joined, or DDP_ETIMEOUT naming the missing.
 *   opts   [OPTIONAL]
 * Compute thread. */
DDP_API int ddp_init(const ddp_init_opts *opts);
/* 1 after ddp_init. Any thread. */
DDP_API int ddp_is_initialized(void);
/* Leaves: hands the numbers to the launcher, stops own threads. No barrier. Compute thread; more than once is fine. */
DDP_API void ddp_finish(void);
/* From the environment, before ddp_init too. Any thread. */
DDP_API int ddp_rank(void);
DDP_API int ddp_world_size(void);
DDP_API int ddp_local_rank(void);
DDP_API int ddp_local_world_size(void);
/* This host among the job's, and how many there are; -1 and 0 where the launcher does not say it. Any thread. */
DDP_API int ddp_node_rank(void);
DDP_API int ddp_num_nodes(void);
/* The device that this rank computes on: the GPU of its local rank, or the CPU where there is no GPU or DDP_DEVICE=cpu. DDP_EDEVICE when
 * there are GPUs, but none for this rank. Any thread. */
DDP_API int ddp_local_device(void);
/* Threads of compute: OMP_NUM_THREADS, or usable cores over local ranks. Any thread. */
DDP_API int ddp_num_threads(void);
/* 0 when all waits have ended cleanly, else the status that killed the job's communicator. Any thread. */
DDP_API int ddp_job_status(void);
/* Compares what the ranks say under `key`, each once, without waiting for any: the first leaves its `value`, another's that
 * differs is DDP_EMISMATCH, naming both and `what`. 0 in a world of one and before ddp_init. Compute thread. */
DDP_API int ddp_job_compare(const char *key, const char *value, const char *what);
/* Ends all ranks: their waits return DDP_EPEER with `why`. Any thread. */
DDP_API void ddp_abort(const char *why);
/* 1 once this process or, in a job, any rank got SIGTERM or SIGINT since the first call, which replaces their default action;
 * a second signal of the kind ends the process. The same answer on all ranks. Collective. Negative on error. Compute thread. */
DDP_API int ddp_stop_requested(void);
/* What this thread is about to do, for messages between ranks ("train.lua:57"); copied, cut at 95 bytes. */
DDP_API void ddp_set_where(const char *where);

/* ---- random numbers ------------------------------------------------------------------------------------------ */

/* Seeds the process's default generator; alike on all ranks by default. Compute thread. */
DDP_API void ddp_manual_seed(uint64_t seed);
DDP_API void ddp_manual_seed_per_rank(uint64_t seed);
/* A generator of its own. Freed with ddp_generator_free. NULL when out of memory. Any thread. */
DDP_API ddp_generator *ddp_generator_new(uint64_t seed, int per_rank);
DDP_API void ddp_generator_free(ddp_generator *g);
/* Random ops of this thread draw from g until the next call; NULL is the default one. g must outlive its use. */
DDP_API void ddp_generator_use(ddp_generator *g);
/* What g (NULL: the default one) will draw next, as three words, and back. Compute thread. */
DDP_API void ddp_generator_state(const ddp_generator *g, uint64_t state[3]);
DDP_API void ddp_generator_set_state(ddp_generator *g, const uint64_t state[3]);

/* ---- tensors -------------------------------------------------------------------------------------------------- */

/* One more reference; returns t. NULL is allowed. Any thread. */
DDP_API ddp_tensor *ddp_retain(ddp_tensor *t);
/* One reference less. NULL is allowed; in any order. In a scope it takes t off the scope's list. Any thread. */
DDP_API void ddp_release(ddp_tensor *t);
/* Opens a scope of this thread: results of ops belong to it until ddp_scope_end. Scopes nest. */
DDP_API void ddp_scope_begin(void);
/* Closes the innermost scope and releases what it still owns. */
DDP_API void ddp_scope_end(void);
/* Hands a result of an open scope to the caller; returns t. Without a scope it changes nothing. NULL is allowed. */
DDP_API ddp_tensor *ddp_keep(ddp_tensor *t);
/* A barrier: scopes opened before own nothing that is made until ddp_scope_pop_barrier (for hosts of other owners). */
DDP_API void ddp_scope_push_barrier(void);
DDP_API void ddp_scope_pop_barrier(void);

/* Accessors: never fail; of NULL they give 0. Any thread. */
DDP_API int ddp_ndim(const ddp_tensor *t);
DDP_API int64_t ddp_size(const ddp_tensor *t, int dim);   /* dim may be negative; 0 when out of range */
DDP_API int64_t ddp_stride(const ddp_tensor *t, int dim); /* the same */
DDP_API int64_t ddp_numel(const ddp_tensor *t);
DDP_API int ddp_dtype_of(const ddp_tensor *t);
DDP_API int ddp_device_of(const ddp_tensor *t);
DDP_API uint64_t ddp_id(const ddp_tensor *t);         /* unique in the process, never reused */
DDP_API uint64_t ddp_storage_id(const ddp_tensor *t); /* the address of its storage: equal for views of one another */
DDP_API int ddp_storage_handles(const ddp_tensor *t); /* handles and saved tensors on its storage, this one too */
DDP_API uint64_t ddp_version_of(const ddp_tensor *t); /* writes so far to its storage */
DDP_API int ddp_is_contiguous(const ddp_tensor *t);   /* row-major in logical order */
DDP_API int64_t ddp_storage_offset(const ddp_tensor *t);
DDP_API const char *ddp_dtype_name(int dtype);     /* "f32" */
DDP_API int ddp_dtype_from_name(const char *name); /* -1 when unknown */
DDP_API size_t ddp_dtype_size(int dtype);

/* The first element's address; NULL for an empty tensor. Waits for the device. The caller may write where nothing saved
 * for backward lives, and then calls ddp_mark_written. Any thread. */
DDP_API void *ddp_data(const ddp_tensor *t);
/* Moves t and its gradient to another device: the handle stays, its bytes are new; views of the old bytes keep those. DDP_EINVAL for a
 * tensor with history. */
DDP_API int ddp_move_(ddp_tensor *t, int device);
/* A copy of t in the host's pinned memory for copies to a GPU; t itself, as a new reference, when it lies there already. DDP_EINVAL
 * for a tensor of a GPU or with history, DDP_EDEVICE where that GPU is not there. Any thread. */
DDP_API ddp_tensor *ddp_pin_memory(ddp_tensor *t, int device);
DDP_API int ddp_is_pinned(const ddp_tensor *t);
/* ddp_to_device, but from pinned memory to a GPU the host does not wait until t was read: t must not be written before
 * ddp_device_wait. It may be released at once. */
DDP_API ddp_tensor *ddp_to_device_later(ddp_tensor *t, int device);
/* Counts a write made through ddp_data. */
DDP_API void ddp_mark_written(ddp_tensor *t);

/* A tensor over the caller's memory.
 *   shape    [ndim]
 *   strides  [OPTIONAL] [ndim] in elements; NULL: row-major
 *   deleter  [OPTIONAL] called with (ctx) when the last view is gone, on whichever thread that is
 * Returns a new reference, or NULL. Any thread. */
DDP_API ddp_tensor *ddp_from_blob(void *data, int ndim, const int64_t *shape, const int64_t *strides, int dtype,
                                  int device, void (*deleter)(void *ctx), void *ctx);
/* A tensor with a copy of `data`, row-major, of `dtype`; `data` holds elements of `dtype`. Any thread. */
DDP_API ddp_tensor *ddp_from_data(const void *data, int ndim, const int64_t *shape, int dtype, int device);
/* Uninitialised. Any thread. */
DDP_API ddp_tensor *ddp_empty(int ndim, const int64_t *shape, int dtype, int device);
/* A 0-dim number that takes the other operand's dtype in arithmetic, as a literal does in PyTorch: a whole number is an
 * integer, else it is f32. Any thread. */
DDP_API ddp_tensor *ddp_scalar(double value);
/* The same, but a float whatever its value: x * 2.0. */
DDP_API ddp_tensor *ddp_scalar_float(double value);
/* The one element as a double. DDP_ESHAPE when there is not exactly one; DDP_EINVAL for an i64 beyond 2^53. */
DDP_API int ddp_item(const ddp_tensor *t, double *value);
/* All elements in logical order, converted to double. `out` has room for ddp_numel(t). */
DDP_API int ddp_to_doubles(const ddp_tensor *t, double *out);
/* Values, shape and dtype as text, as people read them. Writes at most n bytes with the final 0; returns the full length. */
DDP_API size_t ddp_to_text(const ddp_tensor *t, char *buf, size_t n);

/* ---- gradients ------------------------------------------------------------------------------------------------ */

/* A leaf wants its gradient (1) or not (0). DDP_ESTATE on a result of ops; DDP_EDTYPE unless floating. Compute thread. */
DDP_API int ddp_set_requires_grad(ddp_tensor *t, int on);
DDP_API int ddp_requires_grad(const ddp_tensor *t);
DDP_API int ddp_is_leaf(const ddp_tensor *t);
/* The name of the op that made it, or NULL for a leaf. Static text. */
DDP_API const char *ddp_grad_op(const ddp_tensor *t);
/* The gradient: a new reference, or NULL when there is none. */
DDP_API ddp_tensor *ddp_tensor_grad(const ddp_tensor *t);
/* Sets the gradient (copied into the bucket of a reduced parameter) or drops it (NULL). */
DDP_API int ddp_tensor_set_grad(ddp_tensor *t, ddp_tensor *grad);
/* The same storage without history. A new reference. */
DDP_API ddp_tensor *ddp_detach(ddp_tensor *t);
/* Recording on (1) or off (0) for this thread; returns the mode before. */
DDP_API int ddp_set_grad_mode(int on);
DDP_API int ddp_grad_mode(void);

enum { DDP_RETAIN_GRAPH = 1, DDP_CREATE_GRAPH = 2 };
/* d loss / d leaf for every leaf that wants one, added to its gradient.
 *   loss    0-dim or one element, unless grad is given
 *   grad    [OPTIONAL] shape of loss
 * DDP_ESTATE when the graph is gone, when a saved tensor was written since (both ops are named), or when a custom gradient
 * or hook stands on the way (use ddp_backward_next). Compute thread. */
DDP_API int ddp_backward(ddp_tensor *loss, ddp_tensor *grad);
/* The resumable form. Returns NULL on error. weight: this rank's weight in a "weighted" reduction, 1 by default.
 *   grads   [OPTIONAL] [n], each may be NULL
 *   inputs  [OPTIONAL] gradients of these n_inputs tensors are kept in the state and no leaf's gradient is touched */
DDP_API ddp_backward_state *ddp_backward_begin(int n, ddp_tensor *const *outputs, ddp_tensor *const *grads,
                                               int n_inputs, ddp_tensor *const *inputs, int flags, double weight);
/* Goes on. Returns 0 when done, negative on error, or 1: run the host function ddp_backward_host_id(state) on
 * ddp_backward_host_n / _host_grad, put its results with ddp_backward_host_result, and call again. */
DDP_API int ddp_backward_next(ddp_backward_state *s);
DDP_API int64_t ddp_backward_host_id(const ddp_backward_state *s);
DDP_API int ddp_backward_host_n(const ddp_backward_state *s);
/* The i-th gradient that came in; borrowed; NULL when none came. */
DDP_API ddp_tensor *ddp_backward_host_grad(const ddp_backward_state *s, int i);
/* The i-th result; NULL: no gradient. Borrowed. */
DDP_API int ddp_backward_host_result(ddp_backward_state *s, int i, ddp_tensor *grad);
/* The gradient of inputs[i] after the end: a new reference, or NULL when no path led there. */
DDP_API ddp_tensor *ddp_backward_input_grad(ddp_backward_state *s, int i);
DDP_API void ddp_backward_free(ddp_backward_state *s);
/* Gradients of outputs with respect to inputs, without touching any leaf.
 *   grads [OUT] [n_inputs] new references; NULL entries only with allow_unused */
DDP_API int ddp_grad(int n_out, ddp_tensor *const *outputs, ddp_tensor *const *grad_outputs, int n_in,
                     ddp_tensor *const *inputs, int flags, int allow_unused, ddp_tensor **grads);
/* A host function in the graph: outputs of a computation that the host differentiates itself (ddp.func in Lua).
 *   id       what ddp_backward_host_id will return
 *   in       [n_in] the inputs whose gradients the host will give
 *   out      [n_out] results computed without recording; after the call they carry history
 * DDP_ESTATE when an output has history already. */
DDP_API int ddp_record_host(int64_t id, int n_in, ddp_tensor *const *in, int n_out, ddp_tensor *const *out);
/* A host function called with the gradient of t when it is complete; its result (when not NULL) replaces it.
 * after != 0: on a leaf, after accumulation and reduction (no result). Returns 0 or an error. */
DDP_API int ddp_tensor_add_hook(ddp_tensor *t, int64_t id, int after);
DDP_API int ddp_tensor_remove_hook(ddp_tensor *t, int64_t id);
/* The first of 2^32 ids for host functions, given to no one else. Any thread. */
DDP_API int64_t ddp_host_ids(void);
/* An id of the block that begins with `first` which no graph can ask for any more, once each; -1: none. Any thread. */
DDP_API int64_t ddp_host_dead(int64_t first);

/* A stretch of the forward that keeps nothing for backward (ddp.checkpoint in Lua): what is recorded until ddp_segment_end
 * saves no tensors. Where ddp_backward_next needs them it returns 1 with ddp_backward_host_id == id and no gradients: the
 * host then calls ddp_segment_again, computes the same again from the same inputs, and calls ddp_segment_filled. They nest.
 * ddp_segment_end returns how much was recorded; 0: it will not be asked for. Compute thread. */
DDP_API int ddp_segment_begin(int64_t id);
DDP_API int ddp_segment_end(void);
/* 0: none is open; 1: nothing is kept now (a function of the host's would not be asked for either: the stretch around
 * it is run again first); 2: a second run is going on. */
DDP_API int ddp_segment_open(void);
DDP_API int ddp_segment_again(ddp_backward_state *s);
/* ok 0: the second run failed, nothing is handed over. DDP_ESTATE when it recorded other calls than the first. */
DDP_API int ddp_segment_filled(ddp_backward_state *s, int ok);

/* ---- the job's tensors: collectives ---------------------------------------------------------------------------- */

enum { DDP_SUM, DDP_MEAN, DDP_MIN, DDP_MAX };
/* In place, all ranks alike. Collective ops with results stand in ddp_ops.h (ddp_all_gather, ddp_reduce_scatter).
 *   name    [OPTIONAL] joins the signature: ranks that disagree are told
 *   work    [OPTIONAL] [OUT] when given the call only starts; ddp_work_wait ends it, ddp_work_free frees it; the work holds t
 * DDP_EMISMATCH naming both calls when ranks differ, DDP_ETIMEOUT, DDP_EPEER. Compute thread. */
DDP_API int ddp_all_reduce(ddp_tensor *t, int op, const char *name, ddp_work **work);
DDP_API int ddp_broadcast(ddp_tensor *t, int root, const char *name, ddp_work **work);
DDP_API int ddp_barrier(void);
/* x of each rank into out [size, ...], by rank; x's dtype; out row-major. */
DDP_API int ddp_all_gather_into(ddp_tensor *out, ddp_tensor *x, const char *name, ddp_work **work);
/* The rank's part of x [size * n, ...] reduced, into out [n, ...]; x's dtype; out row-major. */
DDP_API int ddp_reduce_scatter_into(ddp_tensor *out, ddp_tensor *x, int op, const char *name, ddp_work **work);
/* Part r of x [size * n, ...] goes to rank r; out [size * n, ...] has this rank's part of each rank, by rank. */
DDP_API int ddp_all_to_all_into(ddp_tensor *out, ddp_tensor *x, const char *name);
/* t to, or from, one rank: both call, and both wait for each other; several in the order of the calls. The first between
 * two ranks sets up their channel. DDP_EMISMATCH naming both when shapes or names differ. */
DDP_API int ddp_send(ddp_tensor *t, int to, const char *name, ddp_work **work);
DDP_API int ddp_recv(ddp_tensor *t, int from, const char *name, ddp_work **work);

/* A group of some of the ranks: collectives of theirs alone. Collective of all ranks, with the same list everywhere.
 *   ranks  [n] of the job, ascending
 *   out    [OUT] on every rank, freed by ddp_group_free; on those outside it is only a name
 * DDP_EMISMATCH when the lists differ. Compute thread. */
DDP_API int ddp_group_new(const int *ranks, int n, ddp_group **out);
/* This rank's place in it, from 0, by rank; -1 outside. NULL: in the one in force. */
DDP_API int ddp_group_rank(const ddp_group *g);
DDP_API int ddp_group_size(const ddp_group *g);
DDP_API void ddp_group_free(ddp_group *g);
/* From now on collectives are of g (NULL: of all ranks): sizes are g's, roots are ranks of the job. Outside of g they are
 * DDP_EINVAL, and so are reductions of reducers meanwhile. Returns what was in force. */
DDP_API ddp_group *ddp_group_use(ddp_group *g);
DDP_API int ddp_work_wait(ddp_work *w);
/* 1 when done, 0 when not yet, negative on error. */
DDP_API int ddp_work_test(ddp_work *w);
DDP_API void ddp_work_free(ddp_work *w);
/* Bytes from root to all: *data and *n are replaced on the other ranks. *data is the caller's, ddp_bytes_free frees it. */
DDP_API int ddp_broadcast_bytes(void **data, int64_t *n, int root);
/* Bytes of all ranks: out[r] (n_out[r] long), `out` as one block freed by ddp_bytes_free. */
DDP_API int ddp_all_gather_bytes(const void *data, int64_t n, void **out, int64_t *n_out);
DDP_API void ddp_bytes_free(void *p);
/* Marks a stretch in which only rank 0 works: a collective inside is DDP_ESTATE. Returns the mark before. */
DDP_API int ddp_set_solo(int on);
/* Like ddp_broadcast_bytes but the others wait without a timeout (ddp.rank0). */
DDP_API int ddp_broadcast_bytes_patient(void **data, int64_t *n, int root);

typedef struct ddp_reducer_opts {
    size_t size;              /* sizeof(ddp_reducer_opts) */
    double bucket_mb;         /* 0: 25, or 8 where the engine moves data by itself */
    int sum;                  /* 1: the sum of the ranks' gradients; 0: their mean */
    int weighted;             /* 1: the mean, weighted by each backward's weight */
    const char *const *names; /* [n] [OPTIONAL] names for messages */
    int compression;          /* a ddp_compression: how the gradients of f32 parameters travel */
    int error_feedback;       /* 1: what this rank's compression rounds off goes with its next gradient */
} ddp_reducer_opts;
/* In 16 bits half the bytes travel; the ranks' numbers are rounded before they are added up in f32, their result after. */
typedef enum ddp_compression { DDP_COMPRESSION_NONE, DDP_COMPRESSION_BF16, DDP_COMPRESSION_F16 } ddp_compression;
/* Reduces gradients of params over the ranks in buckets while ddp_backward runs. Compares names, shapes, dtypes and order
 * over the ranks (DDP_EMISMATCH names the first difference) and broadcasts rank 0's values. Collective. Compute thread.
 *   params  [n] leaves; retained until ddp_reducer_free */
DDP_API int ddp_reducer_new(ddp_tensor *const *params, int n, const ddp_reducer_opts *opts, ddp_reducer **out);
/* Waits until the gradients of the last backward are final: the same bits on every rank. */
DDP_API int ddp_reducer_finish(ddp_reducer *r);
/* Gradients only accumulate while sync is 0; the next backward with sync 1 (or ddp_reducer_reduce) reduces the sum. */
DDP_API int ddp_reducer_set_sync(ddp_reducer *r, int sync);
/* Reduces what no_sync left. Collective. */
DDP_API int ddp_reducer_reduce(ddp_reducer *r);
/* The same with this rank's weight, as ddp_backward_begin takes it: 0 contributes nothing. Collective. */
DDP_API int ddp_reducer_reduce_weighted(ddp_reducer *r, double weight);
/* From now on the mean is weighted (1) or not (0), as the option of ddp_reducer_new; a sum stays one. All ranks alike. */
DDP_API int ddp_reducer_set_weighted(ddp_reducer *r, int weighted);
/* Joins a step of the others with weight 0. Collective. */
DDP_API int ddp_reducer_skip(ddp_reducer *r);
/* 1 when a reducer reduces t's gradient. */
DDP_API int ddp_is_reduced(const ddp_tensor *t);
/* 1 when a rank touched params[i] in the last reduction. */
DDP_API int ddp_reducer_touched(const ddp_reducer *r, int i);
/* 1 when there was a reduction of r. */
DDP_API int ddp_reducer_seen(const ddp_reducer *r);
/* 1 when a rank touched params[i] in one. */
DDP_API int ddp_reducer_used(const ddp_reducer *r, int i);
DDP_API void ddp_reducer_free(ddp_reducer *r);

/* A hook of the host's that exchanges the buckets itself instead of the reducer: wherever a reduction gets to one,
 * ddp_backward_next, ddp_reduction_next and ddp_join return 1 and ask for host function `id`, which calls
 * ddp_reducer_hook_bucket and does what that says. 0: no hook. Not while a reduction goes on. All ranks alike.
 * ddp_reducer_reduce, _reduce_weighted, _skip and _finish are DDP_ESTATE with one: use ddp_reduction_begin. */
DDP_API int ddp_reducer_set_hook(ddp_reducer *r, int64_t id);
/* What the hook is to do: exchange bucket k (the result, from 0), which it may only start; or, -1, wait for all it started. */
DDP_API int ddp_reducer_hook_bucket(const ddp_reducer *r);
DDP_API int ddp_reducer_n_buckets(const ddp_reducer *r);
/* The gradients in bucket k: 1-D, one behind the other, each on a multiple of 16 elements (between them is nothing). A new
 * reference. This rank's share is zeros where it takes part with weight 0. */
DDP_API ddp_tensor *ddp_reducer_bucket(const ddp_reducer *r, int k);
/* A reduction outside of a backward, as ddp_reducer_reduce_weighted; a weight of 0: ddp_reducer_skip. Collective.
 * ddp_reduction_next returns 0 (done), an error, or 1: run host function ddp_reduction_host_id, then call it again. */
DDP_API int ddp_reduction_begin(ddp_reducer *r, double weight, ddp_reduction **out);
DDP_API int ddp_reduction_next(ddp_reduction *d);
DDP_API void ddp_reduction_free(ddp_reduction *d);
/* The host function that ddp_reduction_next or ddp_join asks for. */
DDP_API int64_t ddp_reduction_host_id(void);

/* Uneven data: a rank whose loop over its data has ended answers the others' reductions with weight 0 until all loops have
 * ended. Collective, at the end of a loop in which a backward reached a reducer's parameters.
 *   sure     1: ddp_join_batch was called in this loop, and for no other since; -1: this rank had no batch; else 0
 *   source   [OUT] the rank to take parameters, buffers and optimizers' state from: the lowest that took the last step;
 *            -1 when no rank missed one
 *   missed   [OUT] whether this rank missed one
 * Returns 0, an error, or 1: run host function ddp_reduction_host_id, then call it again with the same arguments.
 * DDP_EMISMATCH, naming both calls, when the others do something else in their loops than reducing gradients. Compute thread. */
DDP_API int ddp_join(int sure, int *source, int *missed);
/* A batch begins that is the last of this rank's loop (1), or not as far as is known (0). When all ranks have known that
 * in their last reduction, the end of the loop needs no exchange. */
DDP_API void ddp_join_batch(int last);
/* Backwards that reached a reducer's parameters so far. */
DDP_API int64_t ddp_join_count(void);
/* The number of the one that reached r last; 0: none. */
DDP_API int64_t ddp_reducer_last(const ddp_reducer *r);

/* ---- optimizers ------------------------------------------------------------------------------------------------ */

typedef struct ddp_sgd_opts {
    size_t size; /* sizeof(ddp_sgd_opts) */
    double lr, momentum, dampening, weight_decay;
    int nesterov;
} ddp_sgd_opts;
typedef struct ddp_adam_opts {
    size_t size;                                /* sizeof(ddp_adam_opts) */
    double lr, beta1, beta2, eps, weight_decay; /* 0 takes 1e-3, .9, .999, 1e-8, 0 */
    int decoupled;                              /* 1: AdamW */
} ddp_adam_opts;
/* params [n] are retained. State is made at the first step of each parameter. Compute thread. */
DDP_API int ddp_optim_sgd(ddp_tensor *const *params, int n, const ddp_sgd_opts *opts, ddp_optim **out);
DDP_API int ddp_optim_adam(ddp_tensor *const *params, int n, const ddp_adam_opts *opts, ddp_optim **out);
/* Moves every parameter that has a gradient, and closes the step in the run's numbers. */
DDP_API int ddp_optim_step(ddp_optim *o);
/* Moves them and leaves the step open: for several optimizers in one step. */
DDP_API int ddp_optim_apply(ddp_optim *o);
/* The same as if every gradient had been multiplied by `by` before, and afterwards ddp_tensor_grad gives it so. For unscaling
 * and clipping: gradients are read once, and written only where a handle of theirs was given out. */
DDP_API int ddp_optim_apply_scaled(ddp_optim *o, double by);
/* Multiplies the gradients by `by`; at once where a handle of theirs was given out, else when they are next read. */
DDP_API int ddp_optim_scale_grads(ddp_optim *o, double by);
/* How many parameters have a gradient. */
DDP_API int ddp_optim_count_grads(const ddp_optim *o);
/* inv_scale times the 2-norm of all gradients of o[0..n) together, and whether one of their elements is NaN or infinite (1,
 * else 0): ddp_grad_norm; 0 and 0 where there is no gradient.
 *   norm, found  [OUT] 0-dim; new references */
DDP_API int ddp_optim_grad_norm(ddp_optim *const *o, int n, double inv_scale, ddp_tensor **norm, ddp_tensor **found);
/* Drops the gradients; buckets keep their bytes. */
DDP_API int ddp_optim_zero_grad(ddp_optim *o);
DDP_API int ddp_optim_set_lr(ddp_optim *o, double lr);
/* What params[i] has for its steps: k = 0 the momentum buffer (SGD) or the first moment, k = 1 the second moment. A new
 * reference, or NULL where there is none (yet). */
DDP_API ddp_tensor *ddp_optim_state(const ddp_optim *o, int k, int i);
/* Copies t (its shape) into it. DDP_EINVAL for a k or i that this optimizer has not, DDP_ESHAPE. */
DDP_API int ddp_optim_set_state(ddp_optim *o, int k, int i, ddp_tensor *t);
/* Steps that params[i] has made. */
DDP_API int64_t ddp_optim_steps(const ddp_optim *o, int i);
DDP_API int ddp_optim_set_steps(ddp_optim *o, int i, int64_t steps);
DDP_API void ddp_optim_free(ddp_optim *o);

/* ---- mixed precision -------------------------------------------------------------------------------------------- */

enum { DDP_AUTOCAST_OFF = -1 };
/* Until the matching ddp_autocast_end this thread computes matmul, linear and conv2d in `dtype` (DDP_F16 or DDP_BF16), and
 * exp, log, pow, softmax, layer norms, losses, sums and means in f32, by casting their floating inputs of 16 and 32 bits; other ops take
 * what comes, cat and stack the widest of it. f64 and integers are never cast, nor is what an op writes into. Casts are
 * recorded: gradients of f32 weights are f32. DDP_AUTOCAST_OFF switches it off inside a region. Backward always runs with it
 * off, in the dtypes recorded.
 * A leaf that wants a gradient is cast once for each of its versions; these bytes are kept until the outermost region ends.
 *   before  [OUT] for ddp_autocast_end
 * DDP_EDTYPE for another dtype. Regions nest; on the compute thread, or any thread that uses tensors of its own. */
DDP_API int ddp_autocast_begin(int dtype, int *before);
DDP_API void ddp_autocast_end(int before);
/* The dtype in force on this thread, or DDP_AUTOCAST_OFF. */
DDP_API int ddp_autocast_dtype(void);
/* For code that is left and entered again in the middle of a region (coroutines): what it runs under. Code that was not
 * entered yet: its dtype and 0 regions. */
typedef struct ddp_autocast_state {
    int dtype, regions; /* regions: open ones, begun in that code */
} ddp_autocast_state;
/* Puts s in force on this thread, and what was in force into s. */
DDP_API void ddp_autocast_swap(ddp_autocast_state *s);
/* s will not be entered again: its regions are over. */
DDP_API void ddp_autocast_abandon(ddp_autocast_state *s);

/* How exact f32 matrix products and convolutions are.
 *   EXACT    each product in f32, as defined
 *   HIGHEST  (the default) Winograd's fast convolutions too, still in f32: errors of at most 1e-5 of the largest result,
 *            measured up to 4e-6 (EXACT: 3e-6), and an Inf or NaN spreads over its tile of 4x4 results
 *   HIGH     matmul, linear, conv2d and their gradients with two bf16 parts for each f32, three products for each, summed in
 *            f32, where the processor has AMX; elsewhere as HIGHEST. Errors of at most 3 * 2^-16 of the sum of the products'
 *            sizes, measured 4e-6 to 6.5e-6 of the largest result; an Inf, and what is above 3.39e38, leaves NaN in its results
 * bf16 and f16 tensors are not affected. DDP_EINVAL for another level. Any thread; holds for the process. */
enum { DDP_F32_EXACT, DDP_F32_HIGHEST, DDP_F32_HIGH };
DDP_API int ddp_set_float32_matmul_precision(int level);
DDP_API int ddp_float32_matmul_precision(void);
/* on: results do not depend on the number of threads either (oneDNN is not used: it shares sums out by threads). Two runs
 * with the same threads give the same bits without this. Any thread; holds for the process. */
DDP_API void ddp_set_deterministic(int on);
DDP_API int ddp_is_deterministic(void);

/* Ops look for NaN and infinities in what they compute (1) or not (0, the default, which costs nothing). The first op that
 * makes one fails with DDP_EINVAL and is named, in forward and in backward, with the module that ran it; so is an op whose
 * input brought a NaN along. Infinities that come in, and values that full and fill_ are given, are let pass. Overflows that a
 * loss scale provokes are errors like others. Returns what was set before. For all threads; compute thread. */
DDP_API int ddp_set_check_nan(int on);
/* From now on ops of this thread run on behalf of `module` ("layer1.0.conv1"); copied. Returns a number for the module before,
 * for ddp_check_nan_leave; 0 is none. */
DDP_API int ddp_check_nan_enter(const char *module);
DDP_API void ddp_check_nan_leave(int before);

/* ---- the run's numbers ------------------------------------------------------------------------------------------ */

/* Seconds of the last n steps by part; the step ends with ddp_stats_step, which optimizers call. Compute thread. */
enum { DDP_PART_FORWARD, DDP_PART_DATA, DDP_PART_BACKWARD, DDP_PART_COMM, DDP_PART_OPTIMIZER, DDP_PARTS };
/* Time from now on counts for `part`; returns the part before, to be put back. */
DDP_API int ddp_stats_enter(int part);
/* Closes a step. */
DDP_API void ddp_stats_step(void);
/* Time since the last step belongs to no step (evaluation). */
DDP_API void ddp_stats_pause(void);
DDP_API int64_t ddp_stats_steps(void);
/* Medians over the steps but the first `skip`: the whole step and its parts, in seconds. Returns the number of steps used.
 *   parts [OUT] [OPTIONAL] [DDP_PARTS] mean seconds a step, so that they add up to the mean step */
DDP_API int64_t ddp_stats_summary(int64_t skip, double *median_step, double *mean_step, double *parts);
/* Start-up marks, in milliseconds since the launch (DDP_LAUNCHED, else this process's start). */
DDP_API void ddp_stats_mark(const char *name);
DDP_API int ddp_stats_mark_get(int i, const char **name, double *ms);
/* Seconds since the first step's end and milliseconds from the launch to it; -1 before. */
DDP_API double ddp_stats_first_step_ms(void);
DDP_API double ddp_now(void); /* seconds, monotonic */
/* A profile: time by kernel and shape, of the calls that the compute thread makes between start and stop. Start clears what
 * was counted before. While it is off a call pays for one branch. Compute thread. */
typedef struct ddp_profile_row {
    const char *kernel; /* "conv2d.onednn" */
    const char *op;     /* "conv2d" */
    const char
        *shape; /* "64x64x32x32 w 64x64x3x3": the first input, others by name, "-> " the result where it differs */
    int64_t calls;
    double seconds; /* inside the kernel */
    double flops;   /* useful operations: a multiply-add is two */
    double bytes;   /* inputs read and results written, once each */
} ddp_profile_row;
DDP_API int ddp_profile_start(void);
DDP_API void ddp_profile_stop(void);
/* Row i, from 0; DDP_EINVAL past the last (no error is set). Texts are valid until the next start, or the next call while
 * it is on. */
DDP_API int ddp_profile_read(int64_t i, ddp_profile_row *row);
/* A trace: every call of the compute thread is appended to a text file between start and stop: its kernel, and each operand's name,
 * place in memory, dtype and sizes (tests/bench/trace.lua reads it). DDP_EINVAL while one is on, DDP_EIO when the file cannot be
 * written. While it is off a call pays for the profile's branch alone. Compute thread. */
DDP_API int ddp_trace_start(const char *path);
DDP_API void ddp_trace_stop(void);
/* Writes the rank's JSON text where the launcher collects it (its report pipe); 0 without a launcher. */
DDP_API int ddp_report_send(const char *json);

#ifndef DDP_CDEF
#include "ddp_data.h"
#include "ddp_device.h"
#include "ddp_file.h"
#include "ddp_ops.h"
#ifdef __cplusplus
}
#endif
#endif

#endif
