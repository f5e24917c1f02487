/* op.h -- an op: what it is, how it is called, who computes it.
 *
 * core/op/ops.def has one entry an op: its comment, name, signature and flags. From it come the prototypes and docs
 * (ddp_ops.h), the attribute structs (op_attrs.h), the table below and the Lua binding. core/ops/<family>.c has its
 * rules: inference, gradient, cost. Kernels (kernels/<way>/<same family>.c) compute it. */
#ifndef DDP_OP_H
#define DDP_OP_H

#include "../tensor/tensor.h"

typedef struct ddp_op_def ddp_op_def;
typedef struct ddp_op_rules ddp_op_rules;

enum { DDP_MAX_OUT = 4 };

/* A list of ints as an attribute: dims, a shape. n < 0: not given. */
typedef struct ddp_ints {
    int64_t n;
    int64_t v[DDP_MAX_DIM];
} ddp_ints;

typedef enum ddp_attr_type {
    DDP_ATTR_INT,
    DDP_ATTR_FLOAT,
    DDP_ATTR_BOOL,
    DDP_ATTR_DTYPE,
    DDP_ATTR_DEVICE,
    DDP_ATTR_INT2,
    DDP_ATTR_INTS
} ddp_attr_type;
typedef struct ddp_attr_def {
    const char *name;
    ddp_attr_type type;
    size_t offset; /* into the attribute struct; an INT2 is int64_t[2], the rest int64_t, double or ddp_ints */
} ddp_attr_def;

enum {
    DDP_OPF_VIEW = 1,                /* out shares in[0]'s storage; infer gives strides and offset */
    DDP_OPF_RANDOM = 2,              /* draws; same on all ranks for the same seed */
    DDP_OPF_PER_RANK = 4,            /* with RANDOM: keyed by rank too */
    DDP_OPF_COLLECTIVE = 8,          /* runs through the collective slot */
    DDP_OPF_IN_PLACE = 16,           /* has a form that writes in[0]: ddp_<op>_ */
    DDP_OPF_ONLY_IN_PLACE = 32,      /* has only that form, without the underscore */
    DDP_OPF_PROMOTE = 64,            /* inputs are cast to one dtype first, as PyTorch promotes */
    DDP_OPF_FLOAT = 128,             /* with PROMOTE: an integer result becomes f32 (div, exp) */
    DDP_OPF_NO_GRAD = 256,           /* has no gradient, by nature (comparisons, argmax) */
    DDP_OPF_WRITES = 512,            /* writes into inputs (optimizer steps): rules->writes says which */
    DDP_OPF_AMP_LOW = 1024,          /* under autocast: 16- and 32-bit floating inputs are cast to its dtype */
    DDP_OPF_AMP_F32 = 2048,          /* under autocast: 16-bit inputs are cast to f32 */
    DDP_OPF_AMP_WIDE = 4096,         /* under autocast: floating inputs are cast to the widest of them */
    DDP_OPF_AMP_KEEP_VECTORS = 8192, /* beside one of these: inputs of one dim stay (vectors of channels) */
    DDP_OPF_AMP = 1024 | 2048 | 4096
};

/* One call, as inference and kernels see it. */
typedef struct ddp_call {
    const ddp_op_def *op;
    const void *attrs;
    int n_in;
    ddp_tensor *const *in;        /* NULL where an optional input is absent */
    ddp_tensor *out[DDP_MAX_OUT]; /* set before a kernel runs */
    ddp_rng rng;                  /* of RANDOM ops */
} ddp_call;

/* A gradient rule's view of a recorded call. It runs inside a scope of its own: it may leave temporaries lying. */
typedef struct ddp_vjp {
    const ddp_op_def *op;
    const void *attrs;
    int n_in, n_out;
    ddp_tensor **in;          /* what SAVE_IN kept, else NULL */
    ddp_tensor **out;         /* what SAVE_OUT kept, else NULL */
    const ddp_meta *in_meta;  /* [n_in] of all inputs */
    const ddp_meta *out_meta; /* [n_out] */
    ddp_tensor **grad_out;    /* NULL where no gradient came */
    const bool *needs;        /* [n_in] */
    ddp_tensor **grad_in;     /* [OUT] [n_in], NULL at the start: no gradient */
} ddp_vjp;

#define DDP_SAVE_IN(i) (1u << (i))
#define DDP_SAVE_OUT(i) (1u << (16 + (i)))
#define DDP_SAVE_ALL_IN 0x8000u /* of list inputs: all */

struct ddp_op_rules {
    /* Fills out[0..n_out): sizes, dtype, strides (ddp__out_* below). Finds every user error before anything is allocated. */
    int (*infer)(const ddp_call *c, ddp_meta *out);
    /* Gradients by calling ops. NULL with NO_GRAD. Returns a status. */
    int (*vjp)(ddp_vjp *v);
    unsigned saves;                           /* DDP_SAVE_*: all that vjp reads of values */
    unsigned (*saves_of)(const ddp_call *c);  /* [OPTIONAL] the same where it depends on the call */
    unsigned const_out;                       /* bit i: output i carries no gradient (statistics) */
    double (*flops)(const ddp_call *c);       /* NULL: one an output element */
    bool (*writes)(const ddp_call *c, int i); /* of WRITES ops: does it write in[i] */
};

struct ddp_op_def {
    const char *name, *sig;
    unsigned flags;
    int id, n_in, n_out;         /* n_in: named inputs (lists count as one) */
    unsigned optional;           /* bit i: input i may be NULL */
    unsigned lists;              /* bit i: input i is a list */
    const char *const *in_names; /* [n_in] */
    size_t attr_size;
    int n_attrs;
    const ddp_attr_def *attrs;
    const ddp_op_rules *rules;
};

/* One way of computing one op. */
typedef struct ddp_kernel {
    const char *name;                         /* "conv2d.onednn" */
    const char *(*reject)(const ddp_call *c); /* NULL, or returns NULL: takes it; else the reason, printable */
    int (*run)(const ddp_call *c);            /* allocates only scratch, checks nothing that a user could get wrong */
} ddp_kernel;

/* A kernel folder's list: for each op (by id) its kernels, best first, ended by name == NULL; NULL: none. */
typedef struct ddp_kernel_list {
    const char *name;         /* "ref" */
    const ddp_kernel **by_op; /* [DDP_OP_COUNT] */
} ddp_kernel_list;

/* ---- registry (registry.c) ------------------------------------------------------------------------------------ */
DDP_LOCAL extern const ddp_op_def ddp__ops[];
enum { DDP_NO_OP = -1 };
DDP_LOCAL const ddp_op_def *ddp__op_by_name(const char *name);
/* Kernel lists in order of preference: plug-ins (loaded when a call is worth it), cpu, ref. */
DDP_LOCAL const ddp_kernel *ddp__pick_kernel(const ddp_call *c);
/* Tests pin a list: only its kernels (and no other) are tried; NULL restores. Returns 0, or DDP_EINVAL for no such list.
 * DDP_KERNELS=ref in the environment does the same for a process. */
DDP_API int ddp__kernels_only(const char *list);
/* The name of the kernel that the last call on this thread ran. */
DDP_API const char *ddp__last_kernel(void);

/* ---- the one call path (call.c) ------------------------------------------------------------------------------- */
/* Runs op on in[0..n_in); out[0..n_out) are new references (or the scope's). A status. */
DDP_API int ddp__call(const ddp_op_def *op, const void *attrs, int n_in, ddp_tensor *const *in, ddp_tensor **out);
/* The same, writing into in[0]. */
DDP_API int ddp__call_in_place(const ddp_op_def *op, const void *attrs, int n_in, ddp_tensor *const *in);

/* What rooms above put into the call path at start-up; NULL: nothing there. */
typedef struct ddp_call_slots {
    /* autocast, called where ddp__autocast is on and op has an AMP flag: may replace in[i], then owned[i] too */
    int (*cast)(const ddp_op_def *op, int n_in, ddp_tensor **in, ddp_tensor **owned);
    int (*capture)(const ddp_call *c, const ddp_meta *out); /* a plan being recorded */
    int (*check_in_place)(const ddp_op_def *op, ddp_tensor *target, int n_in, ddp_tensor *const *in);
    int (*check)(const ddp_call *c);                 /* check_nan: looks at what was computed */
    int (*record)(const ddp_call *c, bool in_place); /* the tape */
    int (*collective)(const ddp_call *c);            /* comm */
    bool (*wants_record)(int n_in, ddp_tensor *const *in);
} ddp_call_slots;
DDP_LOCAL extern ddp_call_slots ddp__slots;
/* What autocast computes in on this thread: DDP_F16, DDP_BF16 or DDP_AUTOCAST_OFF. */
DDP_LOCAL extern _Thread_local int ddp__autocast;
/* On whose behalf ops run on this thread, for messages: the module that check_nan was told of (0: none), and in a backward the
 * op whose gradient is being computed (else NULL). */
typedef struct ddp_op_where {
    int module;
    const char *gradient_of;
} ddp_op_where;
DDP_LOCAL extern _Thread_local ddp_op_where ddp__op_where;

/* ---- shapes (infer.c): helpers of infer functions; each sets the error and returns its status -------------------- */
/* Broadcast shape of in[0..n) (NULL skipped), dense strides kept, channels-last wins; dtype as given. */
DDP_LOCAL int ddp__out_broadcast(const ddp_call *c, int n, ddp_dtype dtype, ddp_meta *out);
/* The device of the inputs: numbers go with any. */
DDP_LOCAL int ddp__call_device(const ddp_call *c);
/* Row-major. */
DDP_LOCAL int ddp__out_shape(const ddp_call *c, ddp_dtype dtype, int ndim, const int64_t *size, ddp_meta *out);
/* The same size and strides as in[i] when that is dense, else row-major. */
DDP_LOCAL int ddp__out_like(const ddp_call *c, int i, ddp_dtype dtype, ddp_meta *out);
/* -1 back to a dim of `ndim`, or DDP_NO_OP with the error set. ndim 0 counts as 1. */
DDP_LOCAL int ddp__wrap_dim(const ddp_call *c, int64_t dim, int ndim);
/* An error that names op and argument: "conv2d: w is [32,3,3,3], ..." */
#define ddp__op_fail(c, status, ...) ddp__op_fail_((c)->op->name, status, __VA_ARGS__)
DDP_API int ddp__op_fail_(const char *op, int status, const char *fmt, ...) DDP_PRINTF(3, 4);
/* in[i] must be floating / of dtype / have ndim dims. */
DDP_LOCAL int ddp__need_float(const ddp_call *c, int i);
DDP_LOCAL int ddp__need_dtype(const ddp_call *c, int i, ddp_dtype dtype);
DDP_LOCAL int ddp__need_ndim(const ddp_call *c, int i, int ndim);
/* PyTorch's promotion of two dtypes. */
DDP_LOCAL ddp_dtype ddp__promote(ddp_dtype a, ddp_dtype b);

/* ---- strided walks (iter.c): for kernels ----------------------------------------------------------------------- */
enum { DDP_ITER_MAX = 6 };
/* n operands over one broadcast shape: dims of size 1 dropped, merged where all allow, sorted so that the first
 * operand's smallest stride is innermost (dim 0). Strides in elements, 0 where an operand is broadcast. */
typedef struct ddp_iter {
    int n, ndim;
    int64_t size[DDP_MAX_DIM];
    int64_t stride[DDP_ITER_MAX][DDP_MAX_DIM];
    char *ptr[DDP_ITER_MAX];
    int elem[DDP_ITER_MAX]; /* bytes */
    int64_t numel;
} ddp_iter;
/* t[0] gives the shape; the others must broadcast to it. */
DDP_API void ddp__iter_init(ddp_iter *it, int n, ddp_tensor *const *t);
/* Calls fn(ctx, ptr, stride, count) for each innermost run; stride[k] in elements. */
typedef void (*ddp_run_fn)(void *ctx, char *const *ptr, const int64_t *stride, int64_t count);
DDP_LOCAL void ddp__iter_run(const ddp_iter *it, ddp_run_fn fn, void *ctx);

/* The attribute act of ops that end in an activation. */
enum { DDP_ACT_NONE, DDP_ACT_RELU, DDP_ACT_GELU, DDP_ACT_GELU_TANH };

#include "op_attrs.h" /* generated: ddp_<op>_attrs, DDP_OP_<op>, DDP_OP_COUNT */

#endif
