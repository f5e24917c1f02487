/* nvrtc.c -- generated source to kernels. What the source includes of ours (device.cuh and the like) is a part of this library; CUDA's
 * own headers for 16-bit types are read from where NVRTC or the toolkit lies. */
#include "nvrtc.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "cache.h"

/* ---- our headers, as bytes of this library (made by the Makefile), each ended by a 0 ---- */

extern const char ddp__text_device[] __attribute__((visibility("hidden")));
extern const char ddp__text_scalar[] __attribute__((visibility("hidden")));
extern const char ddp__text_args[] __attribute__((visibility("hidden")));
extern const char ddp__text_elementwise[] __attribute__((visibility("hidden")));

/* args.h asks for the types of fixed size, which NVRTC has no header for. */
static const char stdint_text[] = "typedef signed char int8_t; typedef unsigned char uint8_t; typedef int int32_t;\n"
                                  "typedef unsigned uint32_t; typedef long int64_t; typedef unsigned long uint64_t;\n"
                                  "typedef unsigned long uintptr_t;\n";

enum { HEADERS = 5 };
static const char *const header_names[HEADERS] = {"device.cuh", "scalar.cuh", "args.h", "../elementwise.def",
                                                  "stdint.h"};
static const char *const header_texts[HEADERS] = {ddp__text_device, ddp__text_scalar, ddp__text_args,
                                                  ddp__text_elementwise, stdint_text};

/* "-I" and the folder into option, when cuda_fp16.h is there. */
static bool has_headers(char *option, size_t n, const char *folder, size_t length, const char *below) {
    char file[1200];
    if ((size_t)snprintf(option, n, "-I%.*s%s", (int)length, folder, below) >= n) return false;
    snprintf(file, sizeof file, "%s/cuda_fp16.h", option + 2);
    return access(file, R_OK) == 0;
}

/* The folder with cuda_fp16.h, as an option: beside NVRTC, in CUDA_HOME, or in the toolkit of the build. */
static int include_option(char *option, size_t n) {
    Dl_info info;
    const char *home = getenv("CUDA_HOME"), *slash = NULL, *build = DDP_CUDA_HOME_LIBS;
    if (dladdr((void *)(uintptr_t)ddp__cuda.nvrtcVersion, &info) && info.dli_fname)
        slash = strrchr(info.dli_fname, '/');
    if (slash && has_headers(option, n, info.dli_fname, (size_t)(slash - info.dli_fname), "/../include")) return 0;
    if (home && *home && has_headers(option, n, home, strlen(home), "/include")) return 0;
    if (has_headers(option, n, build, strlen(build), "/../include")) return 0;
    return ddp__fail(
        DDP_ENOSUP,
        "NVRTC needs CUDA's header cuda_fp16.h, which is neither beside NVRTC nor in CUDA_HOME nor in %s/../include: "
        "install CUDA's headers (cuda-cudart-dev), or set CUDA_HOME",
        build);
}

/* ---- compiling ---- */

static int check(nvrtcResult r, const char *what) {
    return r == NVRTC_SUCCESS ? 0 : ddp__fail(DDP_EDEVICE, "%s: %s", what, ddp__cuda.nvrtcGetErrorString(r));
}

/* Line n of text, from 1, without its indent and end. */
static const char *line_of(const char *text, int n, int *length) {
    while (n > 1 && (text = strchr(text, '\n'))) {
        text++;
        n--;
    }
    if (!text || n < 1) text = "";
    text += strspn(text, " ");
    *length = (int)strcspn(text, "\n");
    return text;
}

/* The log's first error, "generated.cu(12): error: ...", with line 12 of the source. The whole log goes to ddp's. */
static int compile_error(const char *source, const char *arch, const char *log) {
    const char *error = strstr(log, "error");
    while (error && error > log && error[-1] != '\n') error--;
    if (!error) error = log;
    const char *paren = strchr(error, '(');
    int line = paren ? atoi(paren + 1) : 0, length = 0;
    const char *text = line_of(source, line, &length);
    ddp__log(DDP_LOG_DEBUG, "NVRTC on %s\n%s\nsaid\n%s", arch, source, log);
    return ddp__fail(DDP_EDEVICE, "NVRTC: a generated kernel does not compile for %s: %.*s; line %d: %.*s", arch,
                     (int)strcspn(error, "\n"), error, line, length, text);
}

static char *log_of(nvrtcProgram p) {
    size_t n = 0;
    if (ddp__cuda.nvrtcGetProgramLogSize(p, &n) != NVRTC_SUCCESS) n = 0;
    char *log = calloc(1, n + 1);
    if (log && n && ddp__cuda.nvrtcGetProgramLog(p, log) != NVRTC_SUCCESS) *log = 0;
    return log;
}

static int image_of(nvrtcProgram p, char **image, size_t *bytes) {
    int st = check(ddp__cuda.nvrtcGetCUBINSize(p, bytes), "nvrtcGetCUBINSize");
    if (st < 0) return st;
    if (!(*image = malloc(*bytes + 1))) return ddp__fail(DDP_ENOMEM, "NVRTC: out of memory");
    return check(ddp__cuda.nvrtcGetCUBIN(p, *image), "nvrtcGetCUBIN");
}

/* A sum stays a sum and a product a product (-fmad=false): a step of a chain does not melt into the next. */
int ddp__nvrtc_compile(const char *source, const char *arch, char **image, size_t *bytes, char **log) {
    char include[1100], gpu[64];
    nvrtcProgram p = NULL;
    *image = *log = NULL;
    int st = ddp__cuda_need(DDP_LIB_NVRTC);
    if (st == 0) st = include_option(include, sizeof include);
    if (st == 0)
        st = check(ddp__cuda.nvrtcCreateProgram(&p, source, "generated.cu", HEADERS, header_texts, header_names),
                   "nvrtcCreateProgram");
    if (st < 0) return st;
    snprintf(gpu, sizeof gpu, "-arch=%s", arch);
    const char *options[] = {gpu, "-std=c++17", "-fmad=false", "-diag-suppress=177", include};
    nvrtcResult r = ddp__cuda.nvrtcCompileProgram(p, (int)(sizeof options / sizeof *options), options);
    *log = log_of(p);
    if (r == NVRTC_ERROR_COMPILATION) st = compile_error(source, arch, *log ? *log : "");
    else st = check(r, "nvrtcCompileProgram");
    if (st == 0) st = image_of(p, image, bytes);
    ddp__cuda.nvrtcDestroyProgram(&p);
    return st;
}

/* ---- caches ---- */

typedef struct made {
    struct made *next;
    char *source, *image; /* the image stays: the library is loaded out of it */
    int arch;
    cudaKernel_t kernel;
} made;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static made *all;

/* What a kernel on disk depends on: source, our headers, architecture, version. */
static char *key_of(const char *source, const char *arch, size_t *n) {
    int major = 0, minor = 0;
    char *key = NULL;
    FILE *f = open_memstream(&key, n);
    if (!f || ddp__cuda.nvrtcVersion(&major, &minor) != NVRTC_SUCCESS) major = -1;
    if (!f) return NULL;
    fprintf(f, "%s NVRTC %d.%d\n%s", arch, major, minor, source);
    for (int i = 0; i < HEADERS; i++) fputs(header_texts[i], f);
    return fclose(f) == 0 ? key : NULL;
}

static cudaError_t load(const char *image, const char *name, cudaKernel_t *out) {
    cudaLibrary_t lib;
    cudaError_t e = ddp__cuda.cudaLibraryLoadData(&lib, image, NULL, NULL, 0, NULL, NULL, 0);
    if (!e && (e = ddp__cuda.cudaLibraryGetKernel(out, lib, name))) ddp__cuda.cudaLibraryUnload(lib);
    return e;
}

/* From disk when what lies there loads, else compiled and kept there. */
static int make(const char *source, const char *arch, const char *name, made *m) {
    size_t bytes = 0, key_bytes = 0;
    char *log = NULL, *key = key_of(source, arch, &key_bytes);
    int st = 0;
    m->image = key ? ddp__cache_read("chain", key, key_bytes, &bytes) : NULL;
    if (m->image && load(m->image, name, &m->kernel) == cudaSuccess) {
        free(key);
        return 0;
    }
    ddp__cuda.cudaGetLastError();
    free(m->image);
    m->image = NULL;
    st = ddp__nvrtc_compile(source, arch, &m->image, &bytes, &log);
    if (st == 0) st = ddp__cuda_check(load(m->image, name, &m->kernel), "loading a generated kernel");
    if (st == 0 && key) ddp__cache_write("chain", key, key_bytes, m->image, bytes);
    free(log);
    free(key);
    return st;
}

int ddp__nvrtc_kernel(const ddp_gpu *gpu, const char *source, const char *name, cudaKernel_t *out) {
    int number = gpu->prop.major * 10 + gpu->prop.minor;
    char arch[16];
    snprintf(arch, sizeof arch, "sm_%d", number);
    int st = ddp__cuda_need(DDP_LIB_NVRTC);
    if (st < 0) return st;
    pthread_mutex_lock(&lock);
    made *m = all;
    while (m && (m->arch != number || strcmp(m->source, source) != 0)) m = m->next;
    if (!m) {
        m = calloc(1, sizeof *m);
        char *copy = strdup(source);
        st = m && copy ? make(source, arch, name, m) : ddp__fail(DDP_ENOMEM, "NVRTC: out of memory");
        if (st < 0) {
            free(copy);
            if (m) free(m->image);
            free(m);
        } else {
            m->source = copy;
            m->arch = number;
            m->next = all;
            all = m;
        }
    }
    if (st == 0) *out = m->kernel;
    pthread_mutex_unlock(&lock);
    return st;
}
