/* double.h -- what the libraries of the test double share. libcudart.so.13 of the double holds all of this; the doubles of cuBLAS,
 * NCCL and cuDNN link it and call in.
 *
 * A stream is a queue of operations that run later, on the CPU, in the order that streams and events allow (DDP_DOUBLE_MODE says
 * when). Device memory is out of the host's reach but while an operation runs. Everything happens under one lock. */
#ifndef DDP_DOUBLE_H
#define DDP_DOUBLE_H

#pragma GCC visibility push(default) /* the functions that NVIDIA's headers declare are what these libraries export */
#include <cuda_runtime_api.h>
#pragma GCC visibility pop

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define DOUBLE_API __attribute__((visibility("default")))

/* ---- the lock; it may be taken again by the thread that holds it --------------------------------------------------- */
DOUBLE_API void ddp_double_lock(void);
/* Also puts device memory out of reach again. */
DOUBLE_API void ddp_double_unlock(void);

/* ---- operations ---------------------------------------------------------------------------------------------------- */
/* Queues run(ctx) on a stream: called under the lock, with device memory in reach, when the stream comes to it; more than once when
 * it was captured into a graph. drop(ctx), which may be NULL, is called once, when it will never run again. `name` (for messages and
 * the log) is kept as a pointer until then. ctx must not point into device memory. */
DOUBLE_API void ddp_double_enqueue(cudaStream_t stream, void (*run)(void *ctx), void (*drop)(void *ctx), void *ctx,
                                   const char *name);
/* The same for work that may have to wait for others: attempt returns 0 when it is done, DOUBLE_WAITS to be called again later, or a
 * cudaError_t, which from then on is what every call on the device returns. Device memory is in its reach after ddp_double_reach only:
 * who merely looks whether to wait does not pay for that. */
enum { DOUBLE_WAITS = -1 };
DOUBLE_API void ddp_double_reach(void);
DOUBLE_API void ddp_double_enqueue_attempt(cudaStream_t stream, int (*attempt)(void *ctx), void (*drop)(void *ctx),
                                           void *ctx, const char *name);
/* Runs what can run of all streams, without waiting; true when something did. */
DOUBLE_API bool ddp_double_progress(void);
/* The device of a stream; -1 when it is none. */
DOUBLE_API int ddp_double_stream_device(cudaStream_t stream);
DOUBLE_API int ddp_double_device(void); /* current on this thread */
/* The error that a device is stuck with, or cudaSuccess. */
DOUBLE_API cudaError_t ddp_double_stuck(int device);
DOUBLE_API bool ddp_double_dry(void); /* nothing is computed: DDP_DOUBLE_MODE=dry */

/* ---- memory -------------------------------------------------------------------------------------------------------- */
DOUBLE_API bool ddp_double_is_device(const void *p);
/* Ends the process when [p, p + bytes) is not inside one live allocation on the device. `what`: "cublasGemmEx: A". */
DOUBLE_API void ddp_double_check_range(const void *p, size_t bytes, const char *what);
/* Counts of things that must be given back, by name ("cublas handle"): +1 made, -1 gone. Told at exit. */
DOUBLE_API void ddp_double_count(const char *what, int by);

/* ---- faults, messages, settings ------------------------------------------------------------------------------------ */
/* Called once a call of `function`: 0, or the status that DDP_DOUBLE_FAIL asks for; `otherwise` where it gives none. */
DOUBLE_API int ddp_double_fault(const char *function, int otherwise);
/* A line in DDP_DOUBLE_LOG. */
DOUBLE_API void ddp_double_log(const char *format, ...) __attribute__((format(printf, 1, 2)));
DOUBLE_API bool ddp_double_logs(void); /* is there such a file */
/* A line on stderr that begins with "cuda double: ". */
DOUBLE_API void ddp_double_say(const char *format, ...) __attribute__((format(printf, 1, 2)));
/* The same, and the process ends with status 99: the program under test is wrong. */
DOUBLE_API void ddp_double_die(const char *format, ...) __attribute__((format(printf, 1, 2), noreturn));
/* The same, for what this double does not simulate. */
DOUBLE_API void ddp_double_unsimulated(const char *what) __attribute__((noreturn));
DOUBLE_API long ddp_double_setting(const char *name, long otherwise);
/* The 16 bytes that name the GPU behind a device. */
DOUBLE_API void ddp_double_uuid(int device, unsigned char uuid[16]);

#endif
