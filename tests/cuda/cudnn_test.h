/* cudnn_test.h -- what the tests of kernels/cudnn share: the double's functions, tensors in host memory, comparisons. */
#ifndef DDP_CUDNN_TEST_H
#define DDP_CUDNN_TEST_H

#include "../../kernels/cudnn/engine.h"

#include <dlfcn.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

ddp_cuda_api ddp__cuda; /* the table of kernels/cuda/api.c, filled from the double alone */
static long (*alive)(void);
static int (*checks)(void);
static cudnnHandle_t handle;
static int failures;

/* ---- results: a test is a function that says what is wrong, or nothing ---- */
static char wrong[512];

static void fail(const char *fmt, ...) DDP_PRINTF(1, 2);
static void fail(const char *fmt, ...) {
    if (wrong[0]) return;
    va_list args;
    va_start(args, fmt);
    vsnprintf(wrong, sizeof wrong, fmt, args);
    va_end(args);
}

static void test(const char *name, void (*body)(void)) {
    wrong[0] = 0;
    long before = alive();
    body();
    if (alive() != before) fail("%ld descriptors were not given back", alive() - before);
    if (!wrong[0]) printf("ok %s\n", name);
    else printf("not ok %s: %s\n", name, wrong);
    failures += wrong[0] != 0;
    fflush(stdout);
}

/* ---- the double ---- */

/* Ends the process with a skip where the double is not there. */
static void open_double(void) {
    char file[1100];
    const char *dir = getenv("DDP_CUDA_LIBS"), *build = getenv("DDP_BUILD");
    if (dir) snprintf(file, sizeof file, "%s/libcudnn.so.%d", dir, CUDNN_MAJOR);
    else snprintf(file, sizeof file, "%s/cuda-double/libcudnn.so.%d", build ? build : "build", CUDNN_MAJOR);
    void *lib = dlopen(file, RTLD_NOW | RTLD_LOCAL);
    if (!lib) {
        printf("skip cudnn: %s\n", dlerror());
        exit(0);
    }
    static const struct {
        const char *name;
        size_t offset;
    } functions[] = {
#define CUDNN(f) {#f, offsetof(ddp_cuda_api, f)},
#include "../../kernels/cuda/api.def"
    };
    for (size_t i = 0; i < sizeof functions / sizeof *functions; i++) {
        void *f = dlsym(lib, functions[i].name);
        if (!f) printf("not ok the double has %s: %s\n", functions[i].name, dlerror());
        *(void **)((char *)&ddp__cuda + functions[i].offset) = f;
    }
    *(void **)&alive = dlsym(lib, "ddp_double_cudnn_alive");
    *(void **)&checks = dlsym(lib, "ddp_double_cudnn_checks");
    if (!alive || ddp__cuda.cudnnCreate(&handle)) exit(2);
}

/* The real library stands behind the double: its plans say more than a made-up one. */
static bool checked_by_cudnn(void) { return checks && checks(); }

/* ---- numbers ---- */

static uint32_t seed = 1;
static double draw(void) {
    seed = seed * 1664525u + 1013904223u;
    return (double)((int)(seed >> 12) % 2001 - 1000) / 1000;
}

/* What a dtype keeps of a sum of n products of numbers up to 1. */
static double tolerance(ddp_dtype d, double n) {
    double unit = d == DDP_F64 ? 0x1p-52 : d == DDP_F32 ? 0x1p-23 : d == DDP_F16 ? 0x1p-10 : 0x1p-7;
    return unit * (4 + (ddp__is_half(d) ? 0 : n));
}

/* A tensor of n elements of d, each v[i] rounded to it; the caller frees it. 64 spare bytes stay NaN. */
static void *packed(ddp_dtype d, int64_t n, double *v) {
    size_t bytes = (size_t)n * ddp__dtype_bytes[d] + 64;
    void *p = aligned_alloc(64, (bytes + 63) / 64 * 64);
    memset(p, 0xff, bytes);
    for (int64_t i = 0; i < n && v; i++) {
        ddp__store(d, p, i, v[i]);
        v[i] = ddp__load(d, p, i);
    }
    return p;
}

static double *random_numbers(int64_t n) {
    double *v = malloc(sizeof *v * (size_t)(n + 1));
    for (int64_t i = 0; i < n; i++) v[i] = draw();
    return v;
}

/* Does every element lie within `most` of what it should be, relative to 1 where that is less? NaN does not. */
static void compare(const char *what, ddp_dtype d, int64_t n, const void *got, const double *want, double most) {
    for (int64_t i = 0; i < n; i++) {
        double g = ddp__load(d, got, i), off = fabs(g - want[i]) / fmax(1, fabs(want[i]));
        if (!(off <= most)) {
            fail("%s: element %lld is %g, expected %g", what, (long long)i, g, want[i]);
            return;
        }
    }
}

static int end(void) {
    ddp__cuda.cudnnDestroy(handle);
    if (alive()) {
        printf("not ok descriptors and handles: %ld are left at the end\n", alive());
        failures++;
    }
    return failures != 0;
}

#endif
