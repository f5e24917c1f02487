/* registry.c -- kernel lists, plug-ins, and the choice of a kernel. */
#include "../mem/device.h"
#include "op_build.h"
#include "registry.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

const ddp_op_def *ddp__op_by_name(const char *name) {
    for (int i = 0; i < DDP_OP_COUNT; i++)
        if (strcmp(ddp__ops[i].name, name) == 0) return &ddp__ops[i];
    return NULL;
}

static const ddp_kernel_list *lists[DDP_MAX_LISTS]; /* in order of preference */
static pthread_once_t once = PTHREAD_ONCE_INIT;
static const char *only, *only_on_device; /* what tests pinned, of the CPU's lists and of a device's */
static _Thread_local const char *last_kernel = "";

/* ---- the oneDNN plug-in: loaded by the first call that is worth it ---- */

enum { ONEDNN = 0, CPU = 1, REF = 2 };
static const double worth_flops = 2e6; /* below, the price of a primitive outweighs what it gains */
static pthread_once_t onednn_once = PTHREAD_ONCE_INIT;
static char onednn_why[256]; /* why it is not there */

static bool onednn_has(const ddp_op_def *op) {
    switch (op->id) {
        case DDP_OP_conv2d:
        case DDP_OP_conv2d_grad_input:
        case DDP_OP_conv2d_grad_weight:
        case DDP_OP_matmul:
        case DDP_OP_linear:
        case DDP_OP_avg_pool2d: return true;
        default: return false;
    }
}

/* Convolutions: the kernels of kernels/cpu refuse what they are not faster at. Products of precision "high". */
static bool own_first(const ddp_op_def *op) {
    if (op->id == DDP_OP_matmul || op->id == DDP_OP_linear) return ddp__cpu_high();
    return op->id == DDP_OP_conv2d || op->id == DDP_OP_conv2d_grad_input || op->id == DDP_OP_conv2d_grad_weight;
}

/* The folder this library lies in, with its slash. */
static void own_folder(char *out, size_t n) {
    Dl_info info;
    out[0] = 0;
    if (!dladdr((void *)(uintptr_t)&ddp__op_by_name, &info) || !info.dli_fname) return;
    snprintf(out, n, "%s", info.dli_fname);
    char *slash = strrchr(out, '/');
    if (slash) slash[1] = 0;
    else out[0] = 0;
}

static void load_onednn(void) {
    char folder[1024], path[1100];
    own_folder(folder, sizeof folder);
    snprintf(path, sizeof path, "%slibddp_onednn.so", folder);
    void *lib = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!lib) {
        snprintf(onednn_why, sizeof onednn_why, "%s", dlerror());
        ddp__log(DDP_LOG_DEBUG, "onednn is not used: %s", onednn_why);
        return;
    }
    const ddp_kernel_list *(*entry)(void);
    *(void **)&entry = dlsym(lib, "ddp_plugin_kernels");
    if (entry) lists[ONEDNN] = entry();
}

double ddp__call_flops(const ddp_call *c) {
    if (c->op->rules->flops) return c->op->rules->flops(c);
    return c->out[0] ? (double)c->out[0]->numel : 0;
}

/* ---- the choice ---- */

static bool of_device(const char *list) {
    return strcmp(list, "cuda") == 0 || strcmp(list, "cudnn") == 0 || strcmp(list, "cublas") == 0;
}

static void load_lists(void) {
    ddp__forbid_fork(); /* kernels have a pool of threads */
    lists[CPU] = ddp__kernels_cpu();
    lists[REF] = &ddp__kernels_ref;
    const char *env = getenv("DDP_KERNELS");
    if (env && *env) *(of_device(env) ? &only_on_device : &only) = strdup(env);
}

int ddp__kernels_only(const char *list) {
    pthread_once(&once, load_lists);
    if (list && of_device(list)) {
        only_on_device = list;
        return 0;
    }
    if (list && strcmp(list, "ref") != 0 && strcmp(list, "cpu") != 0 && strcmp(list, "onednn") != 0)
        return ddp__fail(DDP_EINVAL, "kernels: no list %s", list);
    if (list && strcmp(list, "onednn") == 0) {
        pthread_once(&onednn_once, load_onednn);
        if (!lists[ONEDNN]) return ddp__fail(DDP_ENOSUP, "kernels: onednn is not there: %s", onednn_why);
    }
    only = list;
    if (!list) only_on_device = NULL;
    return 0;
}

const char *ddp__last_kernel(void) { return last_kernel; }

static const ddp_kernel *pick_from(const ddp_kernel_list *list, const ddp_call *c, const char **why) {
    const ddp_kernel *k = list ? list->by_op[c->op->id] : NULL;
    for (; k && k->name; k++) {
        const char *no = k->reject ? k->reject(c) : NULL;
        if (!no) return k;
        *why = no;
    }
    return NULL;
}

/* The n-th list that may compute this call; NULL: not this one. */
static const ddp_kernel_list *list_of(const ddp_call *c, int n) {
    int i = own_first(c->op) && n < REF ? CPU - n : n;
    if (i == ONEDNN && !only && (ddp_is_deterministic() || ddp__call_flops(c) < worth_flops)) return NULL;
    if (i == ONEDNN && !onednn_has(c->op)) return NULL;
    if (i == ONEDNN && (!only || strcmp(only, "onednn") == 0)) pthread_once(&onednn_once, load_onednn);
    return !lists[i] || (only && strcmp(only, lists[i]->name) != 0) ? NULL : lists[i];
}

/* With DDP_TUNE, of ops that have several fast kernels: the fastest that takes the call; NULL: the usual choice. */
static const ddp_kernel *measured(const ddp_call *c) {
    enum { MOST = 8 };
    const ddp_kernel *takes[MOST];
    int n = 0;
    if (only || !onednn_has(c->op) || !ddp__tuning()) return NULL;
    for (int i = 0; i < REF; i++) {
        const ddp_kernel_list *list = list_of(c, i);
        for (const ddp_kernel *k = list ? list->by_op[c->op->id] : NULL; k && k->name && n < MOST; k++)
            if (!k->reject || !k->reject(c)) takes[n++] = k;
    }
    return n ? ddp__tune(c, takes, n) : NULL;
}

/* The first kernel of a device's lists that takes the call. */
static const ddp_kernel *pick_on_device(const ddp_call *c, int device) {
    const char *why = "it has no kernel on this device";
    const ddp_kernel *k = NULL;
    for (const ddp_kernel_list *const *list = ddp__device_of(device)->lists; *list && !k; list++)
        if (!only_on_device || strcmp(only_on_device, (*list)->name) == 0) k = pick_from(*list, c, &why);
    if (!k) ddp__op_fail(c, DDP_ENOSUP, "on %s: %s", DDP_DEVICE_TEXT(device), why);
    else last_kernel = k->name;
    return k;
}

const ddp_kernel *ddp__pick_kernel(const ddp_call *c) {
    pthread_once(&once, load_lists);
    int device = c->op->id == DDP_OP_to_device ? DDP_CPU : c->out[0]->m.device;
    if (device != DDP_CPU) return pick_on_device(c, device);
    const char *why = "no kernel";
    const ddp_kernel *k = measured(c);
    for (int n = 0; n < DDP_MAX_LISTS && !k; n++) {
        const ddp_kernel_list *list = list_of(c, n);
        if (list) k = pick_from(list, c, &why);
    }
    if (!k) ddp__op_fail(c, DDP_ENOSUP, "%s", why);
    else last_kernel = k->name;
    return k;
}

const char *ddp_version(void) {
    static char text[128];
    const char *onednn = lists[ONEDNN] ? lists[ONEDNN]->name : "";
    snprintf(text, sizeof text, "ddp 0.1.0%s%s", *onednn ? " " : "", onednn);
    return text;
}
