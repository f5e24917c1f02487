/* engines.c -- which engine carries the collectives; those over libraries are plug-ins beside libddp.so. */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "../mem/device.h"
#include "engine.h"

/* libddp_STEM.so beside this library, "" when there is none. */
static void plugin_path(const char *stem, char *out, size_t n) {
    Dl_info info;
    out[0] = 0;
    if (!dladdr((void *)(uintptr_t)&ddp__pick_engine, &info) || !info.dli_fname) return;
    const char *slash = strrchr(info.dli_fname, '/');
    int folder = slash ? (int)(slash + 1 - info.dli_fname) : 0;
    int len = snprintf(out, n, "%.*slibddp_%s.so", folder, info.dli_fname, stem);
    if (len < 0 || (size_t)len >= n || access(out, R_OK) != 0) out[0] = 0;
}

static bool is_there(const char *stem) {
    char path[1100];
    plugin_path(stem, path, sizeof path);
    return path[0] != 0;
}

/* Loads the plug-in; it stays. */
static int load(const char *engine, const char *stem, const char *library, const char *package,
                const ddp_engine **out) {
    char path[1100];
    plugin_path(stem, path, sizeof path);
    if (!path[0])
        return ddp__fail(
            DDP_ENOSUP,
            "init: engine %s needs %s, which was not there when ddp was built; apt install %s and build again", engine,
            library, package);
    void *lib = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!lib) return ddp__fail(DDP_ENOSUP, "init: engine %s cannot be loaded: %s", engine, dlerror());
    ddp_plugin_engine_fn entry;
    *(void **)&entry = dlsym(lib, "ddp_plugin_engine");
    if (!entry) return ddp__fail(DDP_ENOSUP, "init: engine %s: %s is not one of ours", engine, path);
    *out = entry();
    return 0;
}

static bool is_set(const char *name) {
    const char *s = getenv(name);
    return s && *s;
}

/* DDP_MPI's; else the library whose launcher started us; else MPICH, which joins without one, where it is there. */
static int load_mpi(const ddp_engine **out) {
    const char *said = getenv("DDP_MPI");
    bool ompi = is_set("OMPI_COMM_WORLD_RANK"), mpich = is_set("PMI_RANK") || is_set("PMI_FD") || is_set("PMI_PORT");
    if (said && *said) {
        mpich = strcmp(said, "mpich") == 0;
        ompi = strcmp(said, "openmpi") == 0;
        if (!ompi && !mpich) return ddp__fail(DDP_EINVAL, "init: DDP_MPI is \"%s\", expected openmpi or mpich", said);
    }
    if (!ompi && !mpich) mpich = is_there("mpich");
    if (mpich && !ompi) return load("mpi", "mpich", "MPICH", "libmpich-dev", out);
    return load("mpi", "openmpi", "Open MPI", "libopenmpi-dev", out);
}

int ddp__pick_engine(const char *name, int size, int local_size, const ddp_engine **out) {
    int st = 0;
    char why[256] = "";
    bool any = !name || !*name || strcmp(name, "auto") == 0, gpus = name && strcmp(name, "nccl") == 0;
    if (gpus && !ddp__device(DDP_CUDA(0), "init: engine nccl")) return ddp__pending();
    if (any && ddp__gpus(NULL, 0) > 0) gpus = true;
    if (any || gpus) name = local_size == size || !is_there("gloo") ? "shm" : "hier";
    if (strcmp(name, "shm") == 0) *out = &ddp__engine_shm;
    else if (strcmp(name, "hier") == 0) *out = ddp__engine_hier();
    else if (strcmp(name, "gloo") == 0) st = load("gloo", "gloo", "libgloo", "libgloo-dev", out);
    else if (strcmp(name, "mpi") == 0) st = load_mpi(out);
    else st = ddp__fail(DDP_EINVAL, "init: engine \"%s\", expected auto, shm, gloo, mpi, hier or nccl", name);
    if (st < 0) return st;
    if ((*out)->probe && (*out)->probe(why, sizeof why) != 0)
        return ddp__fail(DDP_ENOSUP, "init: engine %s cannot work here: %s", (*out)->name, why);
    if (gpus) *out = ddp__engine_gpu(*out);
    return 0;
}
