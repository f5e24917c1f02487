/* data_common.h -- what the C tests of core/data share: checks, a synthetic CIFAR-10, hashes over batches. */
#ifndef DATA_COMMON_H
#define DATA_COMMON_H

#include <dirent.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "ddp.h"

static int n_failed;
static char why[4096];
static char dir[256]; /* of synthetic files */

static inline void failed(int line, const char *fmt, ...) {
    va_list ap;
    if (why[0]) return;
    int n = snprintf(why, sizeof why, "line %d: ", line);
    va_start(ap, fmt);
    vsnprintf(why + n, sizeof why - (size_t)n, fmt, ap);
    va_end(ap);
}
#define CHECK(cond)                                 \
    do {                                            \
        if (!(cond)) failed(__LINE__, "%s", #cond); \
    } while (0)
#define CHECK_INT(got, want)                                                       \
    do {                                                                           \
        long long g_ = (got), w_ = (want);                                         \
        if (g_ != w_) failed(__LINE__, "%s is %lld, expected %lld", #got, g_, w_); \
    } while (0)

/* The pending error must be `status` with all the texts (a NULL ends them). */
static inline void check_error(int line, int status, ...) {
    const char *text;
    int got = ddp_error_take(&text);
    va_list ap;
    if (got != status) failed(line, "status %d (%s), expected %d", got, text, status);
    va_start(ap, status);
    for (const char *part; (part = va_arg(ap, const char *));)
        if (!strstr(text, part)) failed(line, "the error is \"%s\", expected \"%s\" in it", text, part);
    va_end(ap);
}
#define CHECK_ERROR(...) check_error(__LINE__, __VA_ARGS__, NULL)

static inline void run(const char *name, void (*test)(void)) {
    const char *text;
    why[0] = 0;
    test();
    if (ddp_error_take(&text)) failed(0, "left an error: %s", text);
    if (why[0]) n_failed++;
    printf(why[0] ? "not ok %s: %s\n" : "ok %s\n", name, why);
    fflush(stdout);
}

/* ---- synthetic files ------------------------------------------------------------------------------------------ */

enum { RECORD = 3073, RECORDS = 24 }; /* a file */

static inline const char *path_of(const char *name) {
    static char path[512];
    snprintf(path, sizeof path, "%s/%s", dir, name);
    return path;
}

/* Sample i of all: label i % 10, pixels that depend on everything. */
static inline uint8_t pixel(int i, int k) { return (uint8_t)(i * 37 + k * 11 + (k >> 5) * 3); }

static inline void write_cifar(const char *name, int first, size_t cut, int bad_label) {
    FILE *f = fopen(path_of(name), "wb");
    uint8_t r[RECORD];
    for (int i = 0; i < RECORDS; i++) {
        r[0] = i == bad_label ? 12 : (uint8_t)((first + i) % 10);
        for (int k = 0; k < RECORD - 1; k++) r[1 + k] = pixel(first + i, k);
        fwrite(r, 1, RECORD, f);
    }
    fclose(f);
    if (cut && truncate(path_of(name), (off_t)(RECORDS * RECORD - cut)) < 0) perror("truncate");
}

static inline void write_all(void) {
    char name[32];
    for (int i = 0; i < 5; i++) {
        snprintf(name, sizeof name, "data_batch_%d.bin", i + 1);
        write_cifar(name, i * RECORDS, 0, -1);
    }
    write_cifar("test_batch.bin", 1000, 0, -1);
}

/* ---- looking at batches --------------------------------------------------------------------------------------- */

static inline uint64_t hash_bytes(uint64_t h, const void *p, size_t n) {
    const uint8_t *b = p;
    for (size_t i = 0; i < n; i++) h = (h ^ b[i]) * 1099511628211u;
    return h;
}

/* One pass: a hash over all bytes, in order, and the number of samples. */
static inline uint64_t hash_pass(ddp_loader *l, int64_t *samples) {
    ddp_tensor *x, *y;
    uint64_t h = 14695981039346656037u;
    *samples = 0;
    while (ddp_loader_next(l, &x, &y) == 1) {
        *samples += ddp_size(x, 0);
        h = hash_bytes(h, ddp_data(x), (size_t)ddp_numel(x) * ddp_dtype_size(ddp_dtype_of(x)));
        if (y) h = hash_bytes(h, ddp_data(y), (size_t)ddp_numel(y) * ddp_dtype_size(ddp_dtype_of(y)));
        ddp_release(x);
        ddp_release(y);
    }
    return h;
}

static inline ddp_loader_opts options(int64_t batch, int workers) {
    return (ddp_loader_opts){
        .size = sizeof(ddp_loader_opts), .batch_size = batch, .workers = workers, .order_seed = -1, .seed = 7};
}

static const double MEAN[] = {.49, .48, .44}, STD[] = {.25, .24, .26};
static inline ddp_loader_opts augmented(int64_t batch, int workers) {
    ddp_loader_opts o = options(batch, workers);
    o.shuffle = 1;
    o.crop_h = o.crop_w = 32;
    o.crop_padding = 4;
    o.flip = 1;
    o.n_norm = 3;
    o.mean = MEAN;
    o.std = STD;
    return o;
}

static inline int count_entries(const char *path) {
    DIR *d = opendir(path);
    int n = 0;
    while (d && readdir(d)) n++;
    if (d) closedir(d);
    return n;
}

static void no_log(void *ctx, int level, const char *text) {
    (void)ctx;
    (void)level;
    (void)text;
}

/* A folder with a small CIFAR-10 in it. */
static inline void begin(void) {
    const char *tmp = getenv("TMPDIR");
    snprintf(dir, sizeof dir, "%s/ddp_data_XXXXXX", tmp ? tmp : "/tmp");
    if (!mkdtemp(dir)) {
        perror(dir);
        exit(1);
    }
    ddp_set_log_hook(no_log, NULL); /* small files are warned about */
    write_all();
}

static inline int end(void) {
    char command[300];
    snprintf(command, sizeof command, "rm -rf '%s'", dir);
    if (system(command) != 0) n_failed++;
    return n_failed > 0;
}

#endif
