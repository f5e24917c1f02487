/* plan.h -- which plan computes a call: found once, kept in memory, and what was chosen in a file too. */
#ifndef DDP_CUDNN_PLAN_H
#define DDP_CUDNN_PLAN_H

#include "../cuda/cuda.h"
#include "engine.h"

enum { PLAN_WORDS = 72, PLAN_MOST = 8 };

/* All that a plan depends on beside the device: op, precision, determinism, then what the op adds. */
typedef struct plan_key plan_key;
struct plan_key {
    int n;
    int64_t v[PLAN_WORDS];
};
void plan_key_start(plan_key *k, const ddp_call *c);
void plan_key_add(plan_key *k, int n, const int64_t *v);

/* Puts the operations of what ctx describes into g; a status. */
typedef int (*plan_build)(cg_graph *g, const void *ctx);

/* NULL where cuDNN has a plan for the call, else why not: text that stays. */
const char *plan_missing(const ddp_call *c, const plan_key *k, plan_build build, const void *ctx);
/* Queues the call: ptr[i] is the tensor of uid[i]. Workspace comes from the GPU's allocator; where there is none, from a plan
 * that needs less. A status with the error set. */
int plan_run(const ddp_call *c, const plan_key *k, plan_build build, const void *ctx, int n, const int64_t *uid,
             void *const *ptr);
/* Gives back all plans and handles, after waiting for the GPUs. */
void ddp__cudnn_clear(void);

/* For tests: how often a plan was in memory, was made by cuDNN's heuristics, came from a file. */
typedef struct plan_counts {
    int64_t hits, made, from_file;
} plan_counts;
plan_counts ddp__cudnn_counts(void);

/* ---- files (plan_file.c) ----------------------------------------------------------------------------------------- */
/* Folder: $DDP_CACHE, else $XDG_CACHE_HOME/ddp, else ~/.cache/ddp; DDP_CACHE="": none. A file a plan, named by the key, the device
 * and cuDNN's version; written whole under another name and renamed, so that ranks do not see half of one. */

/* What a file says: false where there is none, or it is damaged or of something else. */
typedef struct plan_file {
    cg_choice choice;
    bool measured;
    char *text; /* a compiled plan, or NULL; the caller frees it */
} plan_file;
bool plan_file_read(const plan_key *k, const char *device, size_t version, plan_file *out);
void plan_file_write(const plan_key *k, const char *device, size_t version, const plan_file *f);

#endif
