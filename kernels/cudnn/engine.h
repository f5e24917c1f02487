/* engine.h -- the ways cuDNN has to compute a graph, and running one of them. */
#ifndef DDP_CUDNN_ENGINE_H
#define DDP_CUDNN_ENGINE_H

#include "graph.h"

enum { CG_KNOBS = 24, CG_CONFIGS = 64, CG_POINTERS = 24 };

/* What an engine may do. */
typedef struct cg_filter {
    bool deterministic; /* the same bits in every run */
    bool tensor_f32;    /* f32 may be multiplied as TF32 */
    bool winograd;      /* and by Winograd's or Fourier's transform */
    bool is_f32;        /* the data are f32: tensor cores would round them */
    int64_t workspace;  /* at most these bytes */
} cg_filter;

/* Which engine, set how: what is kept of a choice. Numbers are cuDNN's, and mean something within one version only. */
typedef struct cg_choice {
    int64_t engine;
    int n_knobs;
    struct {
        int64_t type, value;
    } knob[CG_KNOBS];
} cg_choice;

/* A graph with an engine, ready to run. The graph owns its descriptors. */
typedef struct cg_plan {
    cg_desc plan;
    cg_choice choice;
    int64_t workspace; /* bytes it wants */
    unsigned notes;    /* bit i: numerical note i of cuDNN's */
    unsigned behavior; /* bit i: behavior note i */
} cg_plan;

/* Properties of a device, for plans without one (json: as cuDNN writes them) or of a handle's. Owned by the caller, given back
 * by cudnnBackendDestroyDescriptor; NULL with g failed. */
cg_desc cg_device(cg_graph *g, cudnnHandle_t handle, const char *json);
/* Up to `most` plans that f allows, cuDNN's best guess first: of its heuristics, then of its fallback. Returns how many; 0: g
 * has failed and says why. */
int cg_plans(cg_graph *g, cg_desc device, const cg_filter *f, int most, cg_plan *out);
/* The plan of a choice made earlier, for the same graph, version and device. */
int cg_plan_of(cg_graph *g, cg_desc device, const cg_choice *choice, cg_plan *out);
/* p as text, with what was compiled for it: the caller frees it; NULL where cuDNN gives none. And a plan of that text, of
 * `choice`, which is not compiled again; a status. */
char *cg_plan_text(const cg_plan *p);
int cg_plan_of_text(cg_graph *g, cg_desc device, const char *text, const cg_choice *choice, cg_plan *out);

/* Runs p on handle's stream: ptr[i] is the tensor of uid[i], in device memory, numbers by value in host memory (read before
 * the call returns). */
int cg_run(cg_graph *g, const cg_plan *p, cudnnHandle_t handle, int n, const int64_t *uid, void *const *ptr,
           void *workspace);

#endif
