/* cudnn_double.h -- a stand-in for cuDNN's graph API: it records descriptors, has the real library check them where that is
 * there, and computes graphs on the CPU. */
#ifndef DDP_CUDNN_DOUBLE_H
#define DDP_CUDNN_DOUBLE_H

#include <cudnn.h>

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { DIMS = 8, NODE = 0x6e6f6465, HANDLE = 0x68616e64 };

typedef struct node node;

typedef struct attribute {
    int name, type;
    int64_t n;
    size_t bytes; /* of all n values */
    void *value;  /* as given; of descriptors: node *[n], each a reference */
    struct attribute *next;
} attribute;

/* A descriptor: what the program holds is its address. */
struct node {
    int magic, type;
    bool final;
    atomic_int refs; /* the program's own one included */
    void *real;      /* the real library's, NULL where that is not asked */
    attribute *attributes;
    node *graph;       /* of heuristics, engines, configurations and plans: what they are for */
    int64_t engine;    /* made up, where no real library answers */
    int64_t workspace; /* of plans */
};

typedef struct handle {
    int magic;
    cudaStream_t stream;
} handle;

/* ---- the real library (cudnn_real.c): NULL pointers where it is not there or not wanted ------------------------------ */
typedef struct real_library {
    bool there;
    size_t version;
    __typeof__(&cudnnBackendCreateDescriptor) create;
    __typeof__(&cudnnBackendDestroyDescriptor) destroy;
    __typeof__(&cudnnBackendFinalize) finalize;
    __typeof__(&cudnnBackendSetAttribute) set;
    __typeof__(&cudnnBackendGetAttribute) get;
    __typeof__(&cudnnGetErrorString) error_string;
    __typeof__(&cudnnGetLastErrorString) last_error;
} real_library;
const real_library *real(void);
/* The JSON of the device that the double pretends to have: DDP_DOUBLE_PROFILE, a name or a path. */
const char *profile(void);

/* ---- the double of the runtime (cudnn_real.c): NULL pointers where that is another library or not there ---------------- */
typedef struct cudart_double {
    void (*enqueue)(cudaStream_t, void (*run)(void *), void (*drop)(void *), void *ctx, const char *name);
    void (*check_range)(const void *p, size_t bytes, const char *what);
} cudart_double;
const cudart_double *cudart(void);

/* ---- descriptors (cudnn_node.c) --------------------------------------------------------------------------------------- */
node *node_new(int type);
void node_keep(node *n);
void node_drop(node *n);
/* The node behind what the program holds; NULL for anything else. */
node *node_of(cudnnBackendDescriptor_t d);
long nodes_alive(void);
size_t type_bytes(int attribute_type);
/* A new value replaces an earlier one of that name. */
void node_set(node *n, int name, int type, int64_t count, const void *v);
const attribute *node_get(const node *n, int name);
node *node_child(const node *n, int name); /* the descriptor there; NULL: none */
int64_t node_int(const node *n, int name, int64_t otherwise);
int node_enum(const node *n, int name, int otherwise);
/* A graph and all below it as text, and back (NULL: that is none). What a plan's JSON carries, so that it can run again. */
char *node_text(const node *n);
node *node_from_text(const char *s);

/* ---- running (cudnn_run.c) ---------------------------------------------------------------------------------------------- */
typedef struct job job;
/* What a run needs, taken at the call: numbers by value are copied. NULL with *why, a static text. */
job *job_new(node *plan, const node *pack, const char **why);
void job_run(void *j);
void job_drop(void *j);
/* "convolution_forward+pointwise". */
const char *job_name(const job *j);

/* A tensor while a graph runs: all values as doubles, dense; of 4 dims in the order N, H, W, C, else row-major. */
typedef struct value {
    const node *desc;
    int64_t uid;
    int nd, dtype;
    int64_t size[DIMS], stride[DIMS]; /* of the program's memory, elements */
    int64_t step[DIMS];               /* of v */
    int64_t n;
    bool is_virtual, by_value, ready;
    void *memory;
    double *v;
} value;

/* ---- operations (cudnn_ops.c, cudnn_conv.c, cudnn_norm.c, cudnn_pool.c): NULL, or what they do not know or cannot do ------------------- */
typedef struct operands {
    const node *op;
    value *(*find)(void *ctx, const node *op, int attribute); /* NULL: none there */
    void *ctx;
} operands;
const char *run_pointwise(const operands *o);
const char *run_reduction(const operands *o);
const char *run_matmul(const operands *o);
const char *run_statistics(const operands *o);
const char *run_reshape(const operands *o);
const char *run_convolution(const operands *o);
const char *run_norm_forward(const operands *o);
const char *run_norm_backward(const operands *o);
const char *run_pool_forward(const operands *o);
const char *run_pool_backward(const operands *o);

/* Steps over y's shape of another value that broadcasts to it; false where it does not. */
bool steps_over(const value *y, const value *x, int64_t *step);
double round_to(int dtype, double v);
void value_read(value *v); /* what lies in the program's memory */

/* Walks over all positions of size[nd]: at[k] are the offsets of k operands, moved by step[k]. Begin with at all 0 and pos all 0. */
static inline bool next_position(int nd, const int64_t *size, int64_t *pos, int k, const int64_t (*step)[DIMS],
                                 int64_t *at) {
    for (int d = nd - 1; d >= 0; d--) {
        for (int i = 0; i < k; i++) at[i] += step[i][d];
        if (++pos[d] < size[d]) return true;
        for (int i = 0; i < k; i++) at[i] -= step[i][d] * size[d];
        pos[d] = 0;
    }
    return false;
}

#endif
