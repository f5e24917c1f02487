/* state.h -- the inside of the double of cudart: devices, streams, operations. Everything under the lock. */
#ifndef DDP_DOUBLE_STATE_H
#define DDP_DOUBLE_STATE_H

#include "double.h"

enum { MAX_DEVICES = 16 };
typedef enum run_mode { LAZY, EAGER, RANDOM, DRY } run_mode;

/* ---- settings (config.c) ------------------------------------------------------------------------------------------- */
typedef struct settings {
    run_mode mode;
    int devices, physical[MAX_DEVICES]; /* CUDA_VISIBLE_DEVICES: which GPUs they are */
    int cc, sms, driver, status;        /* compute capability as 90; status: what every call answers, 0 none */
    size_t memory;                      /* bytes of a device */
    long idle_ms;                       /* work that waited this long runs by itself */
    bool check, protect, same_uuid;
    const char *leaks; /* "", "fatal", "quiet" */
} settings;
extern settings config;
uint32_t random_below(uint32_t n); /* of DDP_DOUBLE_SEED */
double now_ms(void);

/* ---- a call (config.c) --------------------------------------------------------------------------------------------- */
/* Begins a call: takes the lock. Not 0: that is its answer (a fault, an error that sticks), and the lock is free again. */
cudaError_t enter(const char *function);
/* Ends it: remembers an error for cudaGetLastError, frees the lock. */
cudaError_t leave(cudaError_t status);
/* For the few that still answer on a device that is stuck. */
cudaError_t enter_always(const char *function);
extern __thread cudaError_t last_error;
extern __thread int current_device;

/* ---- operations and streams (stream.c) ----------------------------------------------------------------------------- */
/* What is to be done; shared by an operation and the graphs it was captured into. */
typedef struct work {
    int (*attempt)(void *ctx);
    void (*run)(void *ctx);
    void (*drop)(void *ctx);
    void *ctx;
    const char *name;
    int refs;
} work;

typedef struct operation {
    work *what; /* NULL: a mark (an event, a wait) */
    struct CUstream_st *stream;
    struct operation *next, **after; /* after: what must be done before */
    int after_count, refs;
    bool done;
    double queued, finished; /* ms */
} operation;

struct capture_node {
    work *what;
    int *after, after_count; /* nodes that come before */
};
struct CUgraph_st {
    struct capture_node *nodes;
    int count, room, device, id; /* id: of the capture */
    bool invalid;
};

struct CUstream_st {
    operation *head, *tail;
    int device, priority, id;
    bool blocking, destroyed; /* blocking: takes part in the legacy stream's fences */
    unsigned flags;
    struct CUgraph_st *capture; /* being recorded */
    bool capture_origin;
    int capture_tail, *capture_waits,
        capture_wait_count; /* its last node; nodes of others that the next one comes after */
    enum cudaStreamCaptureMode capture_mode;
    struct CUstream_st *next;
};
struct CUevent_st {
    operation *mark; /* where it was recorded last, or NULL */
    int device;
    unsigned flags;
    struct CUgraph_st *capture; /* recorded while capturing: after this node; it may be gone, see active_capture */
    int capture_id, capture_node;
};

extern struct CUstream_st *all_streams;
extern struct CUstream_st legacy[MAX_DEVICES];
struct CUstream_st *stream_of(cudaStream_t s); /* NULL is the current device's legacy stream */
bool is_stream(const struct CUstream_st *s);   /* it lives */
operation *enqueue_work(struct CUstream_st *s, work *w, operation *after); /* w NULL: a mark; takes over w */
work *new_work(int (*attempt)(void *), void (*run)(void *), void (*drop)(void *), void *ctx, const char *name);
void release_work(work *w);
void release_operation(operation *o);
void after_enqueue(struct CUstream_st *s);              /* what the mode does now */
bool run_until(struct CUstream_st *s, operation *upto); /* NULL: all; false: something waits for others */
bool run_one(struct CUstream_st *s);                    /* its first operation, if it can */
/* Blocks until `done(arg)`; the lock is given up while nothing moves. */
void wait_until(bool (*done)(void *arg), void *arg);
void wait_device(int device);
void stick(int device, cudaError_t e);
extern __thread const char *running; /* the name of the operation that runs on this thread */

/* ---- capture (graph.c) --------------------------------------------------------------------------------------------- */
void capture_work(struct CUstream_st *s, work *w);
/* 0, or the error that a call which may not be captured gets; the capture is invalid then. */
cudaError_t refuse_in_capture(struct CUstream_st *s);
cudaError_t refuse_in_any_capture(void);
/* The capture that an event was recorded in, while it goes on; or NULL. */
struct CUgraph_st *active_capture(const struct CUevent_st *ev);

/* ---- memory (memory.c, pinned.c) ----------------------------------------------------------------------------------- */
void memory_start(void);
void open_memory(void);
void close_memory(void);
void *device_alloc(int device, size_t bytes, const char *function, const void *caller); /* NULL: out of memory */
void device_free(void *p, const char *function);
int device_of_pointer(const void *p); /* -1: none */
size_t device_used(int device);
bool find_allocation(const void *p, char **at, size_t *bytes);
void check_red_zones(const char *after);
int report_leaks(void); /* how many things are left */
/* The emulator's account of where its kernel is (cudart_kernel.c); NULL before a kernel was looked up. */
extern int (*emulator_where)(const void *address, char *text, size_t size);
/* ---- what a launch touches (probe.c) ----------------------------------------------------------------------------------- */
typedef struct probed {
    const char *name;
    void (*run)(const unsigned grid[3], const unsigned block[3], size_t shared, const void *args);
    unsigned grid[3], block[3];
    size_t shared, bytes; /* of args */
    const char *args;
} probed;
enum { PROBE_READS = 1, PROBE_WRITES = 2 };
/* how[i]: what the launch does behind pointers[i], which stands `where[i]` bytes into its arguments, ascending. Where that cannot be
 * found (many pointers, less than a page) all is said to be read and written. */
void probe(const probed *l, char *const *pointers, const size_t *where, int n, unsigned char *how);
/* A fault while probing was noted, and the instruction may be tried again. */
bool probe_fault(const void *address, bool writes);
/* The emulator's limit of blocks, 0: all; NULL where it has none. */
unsigned *emulator_most_blocks(void);
bool pinned_find(const void *p, void **at, size_t *bytes);
int pinned_left(size_t *bytes);

#endif
