/* test_data.c -- data sets, samplers, augmentation and loaders through the public interface (D1 to D5 of the
 * behaviours). */
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

static void failed(int line, const char *fmt, ...) {
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
static void check_error(int line, int status, ...) {
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

static void run(const char *name, void (*test)(void)) {
    const char *text;
    why[0] = 0;
    test();
    if (ddp_error_take(&text)) failed(0, "left an error: %s", text);
    if (why[0]) n_failed++;
    printf(why[0] ? "not ok %s: %s\n" : "ok %s\n", name, why);
    fflush(stdout);
}

/* ---- synthetic files ------------------------------------------------------------------------------------------------
 */

enum { RECORD = 3073, RECORDS = 24 }; /* a file */

static const char *path_of(const char *name) {
    static char path[512];
    snprintf(path, sizeof path, "%s/%s", dir, name);
    return path;
}

/* Sample i of all: label i % 10, pixels that depend on everything. */
static uint8_t pixel(int i, int k) { return (uint8_t)(i * 37 + k * 11 + (k >> 5) * 3); }

static void write_cifar(const char *name, int first, size_t cut, int bad_label) {
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

static void write_all(void) {
    char name[32];
    for (int i = 0; i < 5; i++) {
        snprintf(name, sizeof name, "data_batch_%d.bin", i + 1);
        write_cifar(name, i * RECORDS, 0, -1);
    }
    write_cifar("test_batch.bin", 1000, 0, -1);
}

/* ---- looking at batches
 * ------------------------------------------------------------------------------------------------ */

static uint64_t hash_bytes(uint64_t h, const void *p, size_t n) {
    const uint8_t *b = p;
    for (size_t i = 0; i < n; i++) h = (h ^ b[i]) * 1099511628211u;
    return h;
}

/* One pass: a hash over all bytes, in order, and the number of samples. */
static uint64_t hash_pass(ddp_loader *l, int64_t *samples) {
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

static ddp_loader_opts options(int64_t batch, int workers) {
    return (ddp_loader_opts){
        .size = sizeof(ddp_loader_opts), .batch_size = batch, .workers = workers, .order_seed = -1, .seed = 7};
}

static const double MEAN[] = {.49, .48, .44}, STD[] = {.25, .24, .26};
static ddp_loader_opts augmented(int64_t batch, int workers) {
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

static int count_entries(const char *path) {
    DIR *d = opendir(path);
    int n = 0;
    while (d && readdir(d)) n++;
    if (d) closedir(d);
    return n;
}

/* ---- data sets
 * ------------------------------------------------------------------------------------------------------------ */

static void test_cifar_values(void) {
    ddp_dataset *set = ddp_dataset_cifar10(dir, 1);
    ddp_loader_opts o = options(50, 0);
    ddp_loader *l;
    ddp_tensor *x, *y;
    CHECK_INT(ddp_dataset_len(set), 5 * RECORDS);
    CHECK_INT(ddp_loader_new(set, &o, &l), 0);
    CHECK_INT(ddp_loader_len(l), 3);
    CHECK_INT(ddp_loader_next(l, &x, &y), 1);
    CHECK_INT(ddp_ndim(x), 4);
    CHECK_INT(ddp_size(x, 0), 50);
    CHECK_INT(ddp_size(x, 1), 3);
    CHECK_INT(ddp_stride(x, 1), 1); /* channels-last */
    CHECK_INT(ddp_dtype_of(x), DDP_F32);
    CHECK_INT(ddp_dtype_of(y), DDP_I64);
    const float *p = ddp_data(x);
    for (int i = 0; i < 50; i++) {
        CHECK_INT(((int64_t *)ddp_data(y))[i], i % 10);
        for (int k = 0; k < 3072; k++) /* plane k / 1024, pixel k % 1024 */
            if (p[i * 3072 + (k % 1024) * 3 + k / 1024] != (float)pixel(i, k) / 255)
                failed(__LINE__, "sample %d, byte %d", i, k);
    }
    ddp_release(x);
    ddp_release(y);
    CHECK_INT(ddp_loader_next(l, &x, &y), 1);
    ddp_release(x);
    ddp_release(y);
    CHECK_INT(ddp_loader_next(l, &x, &y), 1);
    CHECK_INT(ddp_size(x, 0), 20);
    ddp_release(x);
    ddp_release(y);
    CHECK_INT(ddp_loader_next(l, &x, &y), 0);
    CHECK(!x && !y);
    ddp_loader_free(l);
    ddp_dataset_free(set);
}

static void test_cifar_folder(void) {
    char parent[300], sub[400];
    snprintf(parent, sizeof parent, "%s/parent", dir);
    snprintf(sub, sizeof sub, "%s/cifar-10-batches-bin", parent);
    mkdir(parent, 0700);
    if (symlink("..", sub) < 0) failed(__LINE__, "symlink");
    ddp_dataset *set = ddp_dataset_cifar10(parent, 0);
    CHECK_INT(ddp_dataset_len(set), RECORDS);
    ddp_dataset_free(set);
    unlink(sub);
    rmdir(parent);
}

static void test_cifar_missing(void) {
    CHECK(!ddp_dataset_cifar10("/nonexistent/folder", 1));
    CHECK_ERROR(DDP_EIO, "data_batch_1.bin", "/nonexistent/folder");
    unlink(path_of("data_batch_3.bin"));
    CHECK(!ddp_dataset_cifar10(dir, 1));
    CHECK_ERROR(DDP_EIO, path_of("data_batch_3.bin"), "No such file");
    write_all();
}

static void test_cifar_truncated(void) {
    write_cifar("data_batch_2.bin", RECORDS, 100, -1);
    CHECK(!ddp_dataset_cifar10(dir, 1));
    CHECK_ERROR(DDP_EIO, path_of("data_batch_2.bin"), "73652 bytes", "expected 30730000", "record 23");
    write_cifar("data_batch_2.bin", RECORDS, RECORDS * RECORD, -1);
    CHECK(!ddp_dataset_cifar10(dir, 1));
    CHECK_ERROR(DDP_EIO, "has 0 bytes");
    write_all();
}

static void bad_label(int workers) {
    write_cifar("data_batch_4.bin", 3 * RECORDS, 0, 5);
    ddp_dataset *set = ddp_dataset_cifar10(dir, 1);
    ddp_loader_opts o = options(16, workers);
    ddp_loader *l;
    ddp_tensor *x, *y;
    int r, batches = 0;
    CHECK_INT(ddp_loader_new(set, &o, &l), 0);
    while ((r = ddp_loader_next(l, &x, &y)) == 1) {
        batches++;
        ddp_release(x);
        ddp_release(y);
    }
    CHECK_INT(r, DDP_EIO);
    CHECK_INT(batches, 4); /* sample 77 stands in the fifth */
    CHECK_ERROR(DDP_EIO, "rank 0", "epoch 0", "index 77", workers ? "worker " : "worker 0", path_of("data_batch_4.bin"),
                "record 5", "label is 12", "0 to 9");
    CHECK_INT(ddp_loader_next(l, &x, &y), 1); /* the next batch */
    ddp_release(x);
    ddp_release(y);
    ddp_loader_free(l);

    o.skip_errors = 1;
    CHECK_INT(ddp_loader_new(set, &o, &l), 0);
    int64_t samples;
    hash_pass(l, &samples);
    CHECK_INT(samples, 5 * RECORDS - 1);
    CHECK_INT(ddp_loader_skipped(l), 1);
    ddp_loader_free(l);
    ddp_dataset_free(set);
    write_all();
}
static void test_bad_label(void) { bad_label(0); }
static void test_bad_label_workers(void) { bad_label(3); }

static void test_skip_whole_batch(void) {
    write_cifar("test_batch.bin", 0, 0, 3);
    ddp_dataset *set = ddp_dataset_cifar10(dir, 0);
    ddp_loader_opts o = options(1, 2);
    o.skip_errors = 1;
    ddp_loader *l;
    int64_t samples;
    CHECK_INT(ddp_loader_new(set, &o, &l), 0);
    hash_pass(l, &samples);
    CHECK_INT(samples, RECORDS - 1);
    ddp_loader_free(l);
    ddp_dataset_free(set);
    write_all();
}

static void test_digits(void) {
    static const char file[] = "scripts/data/digits.bin";
    ddp_dataset *train = ddp_dataset_digits(file, 1), *test = ddp_dataset_digits(file, 0);
    CHECK_INT(ddp_dataset_len(train), 1437);
    CHECK_INT(ddp_dataset_len(test), 360);
    ddp_loader_opts o = options(360, 0);
    ddp_loader *l;
    ddp_tensor *x, *y;
    CHECK_INT(ddp_loader_new(test, &o, &l), 0);
    CHECK_INT(ddp_loader_next(l, &x, &y), 1);
    int count[10] = {0};
    float top = 0, low = 1;
    const float *p = ddp_data(x);
    for (int64_t i = 0; i < ddp_numel(x); i++) {
        top = p[i] > top ? p[i] : top;
        low = p[i] < low ? p[i] : low;
    }
    for (int i = 0; i < 360; i++) count[((int64_t *)ddp_data(y))[i]]++;
    for (int c = 0; c < 10; c++) CHECK(count[c] >= 34 && count[c] <= 38);
    CHECK(top == 1 && low == 0);
    CHECK_INT(ddp_size(x, 1), 1);
    CHECK_INT(ddp_size(x, 2), 8);
    ddp_release(x);
    ddp_release(y);
    ddp_loader_free(l);
    CHECK(ddp_dataset_fingerprint(train) != ddp_dataset_fingerprint(test));
    ddp_dataset_free(train);
    ddp_dataset_free(test);
}

static void test_digits_damaged(void) {
    char buf[4096];
    FILE *in = fopen("scripts/data/digits.bin", "rb"), *f = fopen(path_of("cut.bin"), "wb");
    if (!in || !f || fread(buf, 1, sizeof buf, in) != sizeof buf) failed(__LINE__, "digits.bin");
    else fwrite(buf, 1, sizeof buf, f);
    if (in) fclose(in);
    if (f) fclose(f);
    CHECK(!ddp_dataset_digits(path_of("cut.bin"), 1));
    CHECK_ERROR(DDP_EIO, path_of("cut.bin"), "4096 bytes", "1797 records of 65", "record 62");
    CHECK(!ddp_dataset_digits(path_of("test_batch.bin"), 1));
    CHECK_ERROR(DDP_EIO, "DDPIMG1");
    CHECK(!ddp_dataset_digits("/nonexistent.bin", 1));
    CHECK_ERROR(DDP_EIO, "/nonexistent.bin");
    CHECK(!ddp_dataset_digits(dir, 1));
    CHECK_ERROR(DDP_EIO, dir);
    unlink(path_of("cut.bin"));
}

static void test_tensors(void) {
    float xs[10 * 2 * 3];
    uint8_t ys[10];
    for (int i = 0; i < 60; i++) xs[i] = (float)i;
    for (int i = 0; i < 10; i++) ys[i] = (uint8_t)i;
    ddp_tensor *x = ddp_from_data(xs, 3, (int64_t[]){10, 2, 3}, DDP_F32, DDP_CPU),
               *y = ddp_from_data(ys, 1, (int64_t[]){10}, DDP_U8, DDP_CPU);
    ddp_dataset *set = ddp_dataset_tensors(x, y), *sub = ddp_dataset_subset(set, (int64_t[]){9, 4, 4}, 3);
    ddp_dataset *sub2 = ddp_dataset_subset(sub, (int64_t[]){0}, 1);
    ddp_loader_opts o = options(3, 0);
    o.y_dtype = 1 + DDP_I64;
    ddp_loader *l;
    ddp_tensor *a, *b;
    CHECK_INT(ddp_loader_new(sub, &o, &l), 0);
    CHECK_INT(ddp_loader_next(l, &a, &b), 1);
    CHECK(memcmp(ddp_data(a), xs + 54, 6 * sizeof *xs) == 0);
    CHECK(memcmp((float *)ddp_data(a) + 6, xs + 24, 6 * sizeof *xs) == 0);
    CHECK_INT(ddp_dtype_of(b), DDP_I64);
    CHECK_INT(((int64_t *)ddp_data(b))[2], 4);
    ddp_release(a);
    ddp_release(b);
    ddp_loader_free(l);
    CHECK_INT(ddp_dataset_len(sub2), 1);
    CHECK(ddp_dataset_fingerprint(sub) != ddp_dataset_fingerprint(set));
    CHECK(!ddp_dataset_subset(set, (int64_t[]){1, 10}, 2));
    CHECK_ERROR(DDP_EINVAL, "id 10", "10 samples");
    ddp_tensor *z = ddp_empty(1, (int64_t[]){9}, DDP_F32, DDP_CPU);
    CHECK(!ddp_dataset_tensors(x, z));
    CHECK_ERROR(DDP_ESHAPE, "[10,2,3]", "[9]");
    o.flip = 1;
    CHECK_INT(ddp_loader_new(set, &o, &l), DDP_ESHAPE);
    CHECK(!l);
    CHECK_ERROR(DDP_ESHAPE, "[10,2,3]");
    ddp_dataset_free(sub2);
    ddp_dataset_free(set);
    ddp_dataset_free(sub);
    ddp_release(x);
    ddp_release(y);
    ddp_release(z);
}

/* ---- samplers
 * ----------------------------------------------------------------------------------------------------------------- */

static void test_sampler_eval(void) {
    for (int n = 0; n <= 9; n++)
        for (int world = 1; world <= 5; world++) {
            int seen[9] = {0};
            int64_t order[9];
            for (int r = 0; r < world; r++) {
                CHECK_INT(ddp_sampler_order(n, 1, 0, 0, 0, r, world, order), 0);
                for (int64_t i = 0; i < ddp_sampler_len(n, 0, 0, r, world); i++) seen[order[i]]++;
            }
            for (int i = 0; i < n; i++) CHECK_INT(seen[i], 1);
        }
    CHECK_INT(ddp_sampler_len(1, 0, 0, 0, 2), 1);
    CHECK_INT(ddp_sampler_len(1, 0, 0, 1, 2), 0);
}

static void test_sampler_train(void) {
    for (int n = 1; n <= 9; n++)
        for (int world = 1; world <= 5; world++)
            for (int drop = 0; drop < 2; drop++) {
                int seen[9] = {0}, total = 0;
                int64_t order[9], want = drop ? n / world : (n + world - 1) / world;
                for (int r = 0; r < world; r++) {
                    CHECK_INT(ddp_sampler_len(n, 1, drop, r, world), want);
                    CHECK_INT(ddp_sampler_order(n, 1, 0, 1, drop, r, world, order), 0);
                    for (int64_t i = 0; i < want; i++) seen[order[i]]++, total++;
                }
                for (int i = 0; i < n; i++)
                    CHECK(drop ? seen[i] <= 1 : seen[i] >= total / n && seen[i] <= (total + n - 1) / n);
            }
}

static void test_sampler_order(void) {
    enum { N = 1000 };
    static int64_t a[N], b[N], half[N];
    int moved = 0, same = 0, seen[N] = {0};
    ddp_sampler_order(N, 3, 0, 1, 0, 0, 1, a);
    ddp_sampler_order(N, 3, 1, 1, 0, 0, 1, b);
    for (int i = 0; i < N; i++) {
        moved += a[i] != i;
        same += a[i] == b[i];
        seen[a[i]]++;
    }
    for (int i = 0; i < N; i++) CHECK_INT(seen[i], 1);
    CHECK(moved > N - 20 && same < 20);
    ddp_sampler_order(N, 3, 0, 1, 0, 1, 2, half);
    for (int i = 0; i < N / 2; i++) CHECK_INT(half[i], a[2 * i + 1]);
    CHECK_INT(ddp_sampler_order(N, 3, 0, 1, 0, 2, 2, half), DDP_EINVAL);
    CHECK_ERROR(DDP_EINVAL, "rank 2 of 2");
}

/* ---- loaders
 * --------------------------------------------------------------------------------------------------------------------
 */

static void test_epochs(void) {
    ddp_dataset *set = ddp_dataset_cifar10(dir, 1);
    ddp_loader_opts o = augmented(16, 2);
    ddp_loader *l, *late;
    ddp_tensor *x, *y;
    uint64_t h[4];
    int64_t n;
    CHECK_INT(ddp_loader_new(set, &o, &l), 0);
    for (int e = 0; e < 4; e++) {
        CHECK_INT(ddp_loader_epoch(l), e);
        h[e] = hash_pass(l, &n);
        CHECK_INT(n, 5 * RECORDS);
    }
    CHECK(h[0] != h[1] && h[1] != h[2] && h[0] != h[2]);
    o.workers = 0;
    CHECK_INT(ddp_loader_new(set, &o, &late), 0);
    CHECK_INT(ddp_loader_set_epoch(late, 2), 0);
    CHECK(hash_pass(late, &n) == h[2]);
    CHECK(hash_pass(late, &n) == h[3]); /* and goes on by itself */
    /* a loop that is left counts as an epoch */
    CHECK_INT(ddp_loader_set_epoch(l, 1), 0);
    CHECK_INT(ddp_loader_next(l, &x, &y), 1);
    ddp_release(x);
    ddp_release(y);
    CHECK_INT(ddp_loader_batch(l), 1);
    CHECK_INT(ddp_loader_start(l), 0);
    CHECK_INT(ddp_loader_epoch(l), 2);
    CHECK(hash_pass(l, &n) == h[2]);
    ddp_loader_free(l);
    ddp_loader_free(late);
    ddp_dataset_free(set);
}

static void test_resume(void) {
    ddp_dataset *set = ddp_dataset_cifar10(dir, 1);
    ddp_loader_opts o = augmented(16, 2);
    ddp_loader *l, *late;
    ddp_tensor *x, *y;
    int64_t n, rest;
    CHECK_INT(ddp_loader_new(set, &o, &l), 0);
    hash_pass(l, &n);
    for (int i = 0; i < 3; i++) {
        CHECK_INT(ddp_loader_next(l, &x, &y), 1);
        ddp_release(x);
        ddp_release(y);
    }
    CHECK_INT(ddp_loader_new(set, &o, &late), 0);
    CHECK_INT(ddp_loader_load_state(late, ddp_loader_epoch(l), ddp_loader_batch(l)), 0);
    CHECK_INT(ddp_loader_start(late), 0);
    CHECK(hash_pass(l, &n) == hash_pass(late, &rest));
    CHECK_INT(n, 5 * RECORDS - 48);
    CHECK_INT(rest, n);
    CHECK_INT(ddp_loader_epoch(late), 2);
    CHECK(hash_pass(l, &n) == hash_pass(late, &n));
    CHECK_INT(ddp_loader_load_state(late, 5, ddp_loader_len(late)), 0); /* saved after the last batch */
    CHECK_INT(ddp_loader_next(late, &x, &y), 0);
    CHECK_INT(ddp_loader_epoch(late), 6);
    CHECK_INT(ddp_loader_load_state(late, -1, 0), DDP_EINVAL);
    CHECK_ERROR(DDP_EINVAL, "epoch -1");
    ddp_loader_free(l);
    ddp_loader_free(late);
    ddp_dataset_free(set);
}

static void test_workers_alike(void) {
    ddp_dataset *set = ddp_dataset_cifar10(dir, 1);
    uint64_t want[2] = {0};
    for (int k = 0; k < 4; k++) {
        static const int workers[] = {0, 1, 4, 4}, prefetch[] = {2, 1, 3, 1};
        ddp_loader_opts o = augmented(7, workers[k]);
        ddp_loader *l;
        int64_t n;
        o.prefetch = prefetch[k];
        CHECK_INT(ddp_loader_new(set, &o, &l), 0);
        for (int e = 0; e < 2; e++) {
            uint64_t h = hash_pass(l, &n);
            if (k == 0) want[e] = h;
            CHECK(h == want[e]);
        }
        ddp_loader_free(l);
    }
    ddp_dataset_free(set);
}

/* Per sample, by label and first pixels, the bytes that two ranks see are those that one sees. */
static void test_ranks_alike(void) {
    enum { N = 5 * RECORDS, BYTES = 3072 * sizeof(float) };
    static uint64_t one[N], two[N];
    ddp_dataset *set = ddp_dataset_cifar10(dir, 1);
    int64_t order[N];
    for (int world = 1; world <= 2; world++)
        for (int rank = 0; rank < world; rank++) {
            ddp_loader_opts o = augmented(8, 2 * rank);
            ddp_loader *l;
            ddp_tensor *x, *y;
            int64_t at = 0;
            o.distributed = 1;
            o.rank = rank;
            o.world = world;
            CHECK_INT(ddp_loader_new(set, &o, &l), 0);
            CHECK_INT(ddp_sampler_order(N, 7, 0, 1, 0, rank, world, order), 0);
            while (ddp_loader_next(l, &x, &y) == 1) {
                for (int64_t i = 0; i < ddp_size(x, 0); i++)
                    (world == 1 ? one : two)[order[at++]] =
                        hash_bytes(1, (char *)ddp_data(x) + i * (int64_t)BYTES, BYTES);
                ddp_release(x);
                ddp_release(y);
            }
            CHECK_INT(at, N / world);
            ddp_loader_free(l);
        }
    for (int i = 0; i < N; i++) CHECK(one[i] && one[i] == two[i]);
    ddp_dataset_free(set);
}

static void test_augment(void) {
    enum { SIDE = 6, N = 400 };
    static float xs[N * SIDE * SIDE];
    for (int i = 0; i < N * SIDE * SIDE; i++) xs[i] = (float)(1 + i % (SIDE * SIDE));
    ddp_tensor *x = ddp_from_data(xs, 4, (int64_t[]){N, 1, SIDE, SIDE}, DDP_F32, DDP_CPU), *a, *b;
    ddp_dataset *set = ddp_dataset_tensors(x, NULL);
    ddp_loader_opts o = options(N, 0);
    o.crop_h = o.crop_w = SIDE;
    o.crop_padding = 1;
    o.flip = 1;
    ddp_loader *l;
    CHECK_INT(ddp_loader_new(set, &o, &l), 0);
    CHECK_INT(ddp_loader_next(l, &a, &b), 1);
    CHECK(!b);
    int seen[3][3][2] = {{{0}}};
    for (int i = 0; i < N; i++) {
        const float *p = (float *)ddp_data(a) + i * SIDE * SIDE;
        int found = 0;
        for (int k = 0; k < 18 && !found; k++) { /* one of 9 windows, as it is or flipped */
            int dy = k / 6 - 1, dx = k / 2 % 3 - 1, same = 1;
            for (int h = 0; h < SIDE; h++)
                for (int w = 0; w < SIDE; w++) {
                    int sy = h + dy, sx = (k % 2 ? SIDE - 1 - w : w) + dx;
                    same &= p[h * SIDE + w] ==
                            (sy < 0 || sy >= SIDE || sx < 0 || sx >= SIDE ? 0 : (float)(1 + sy * SIDE + sx));
                }
            if (same) seen[dy + 1][dx + 1][k % 2]++, found = 1;
        }
        CHECK(found);
    }
    for (int k = 0; k < 18; k++) CHECK(seen[k / 6][k / 2 % 3][k % 2] >= 7); /* 22 of each are expected */
    ddp_release(a);
    ddp_loader_free(l);
    o.crop_h = 9;
    CHECK_INT(ddp_loader_new(set, &o, &l), DDP_ESHAPE);
    CHECK_ERROR(DDP_ESHAPE, "random_crop", "9x6", "6x6", "padding 1");
    ddp_dataset_free(set);
    ddp_release(x);
}

static void test_normalize(void) {
    ddp_dataset *set = ddp_dataset_cifar10(dir, 0);
    ddp_loader_opts o = options(2, 0);
    ddp_loader *l;
    ddp_tensor *x, *y;
    o.n_norm = 3;
    o.mean = MEAN;
    o.std = STD;
    CHECK_INT(ddp_loader_new(set, &o, &l), 0);
    CHECK_INT(ddp_loader_next(l, &x, &y), 1);
    for (int k = 0; k < 3072; k++) {
        double want = (pixel(1000, k) / 255. - MEAN[k / 1024]) / STD[k / 1024],
               d = ((float *)ddp_data(x))[k % 1024 * 3 + k / 1024] - want;
        CHECK(d > -1e-5 && d < 1e-5);
    }
    ddp_release(x);
    ddp_release(y);
    ddp_loader_free(l);
    o.n_norm = 2;
    CHECK_INT(ddp_loader_new(set, &o, &l), DDP_ESHAPE);
    CHECK_ERROR(DDP_ESHAPE, "2 means", "3 channels");
    o.n_norm = 1;
    o.std = (double[]){0};
    CHECK_INT(ddp_loader_new(set, &o, &l), DDP_EINVAL);
    CHECK_ERROR(DDP_EINVAL, "std[0] is 0");
    ddp_dataset_free(set);
}

static void test_early_exits(void) {
    ddp_dataset *set = ddp_dataset_cifar10(dir, 1);
    ddp_loader_opts o = augmented(8, 4);
    ddp_loader *l;
    ddp_tensor *x, *y;
    ddp_memory before, after;
    int tasks = count_entries("/proc/self/task"), fds = count_entries("/proc/self/fd");
    ddp_memory_stats(DDP_CPU, &before);
    CHECK_INT(ddp_loader_new(set, &o, &l), 0);
    for (int i = 0; i < 1000; i++) {
        CHECK_INT(ddp_loader_start(l), 0);
        CHECK_INT(ddp_loader_next(l, &x, &y), 1);
        ddp_release(x);
        ddp_release(y);
    }
    CHECK_INT(count_entries("/proc/self/task"), tasks + 4);
    CHECK_INT(count_entries("/proc/self/fd"), fds);
    CHECK_INT(ddp_loader_epoch(l), 999);
    ddp_loader_free(l);
    for (int i = 0; i < 1000; i++) { /* and loaders that are dropped */
        CHECK_INT(ddp_loader_new(set, &o, &l), 0);
        CHECK_INT(ddp_loader_start(l), 0);
        if (i % 2 && ddp_loader_next(l, &x, &y) == 1) {
            ddp_release(x);
            ddp_release(y);
        }
        ddp_loader_free(l);
    }
    for (int k = 0; k < 100 && count_entries("/proc/self/task") != tasks; k++)
        nanosleep(&(struct timespec){.tv_nsec = 10000000}, NULL);
    CHECK_INT(count_entries("/proc/self/task"), tasks);
    CHECK_INT(count_entries("/proc/self/fd"), fds);
    ddp_memory_stats(DDP_CPU, &after);
    CHECK_INT(after.live_tensors, before.live_tensors);
    CHECK_INT(after.allocated, before.allocated);
    ddp_dataset_free(set);
}

static long resident_kb(void) {
    long pages = 0, all;
    FILE *f = fopen("/proc/self/statm", "r");
    if (f) {
        if (fscanf(f, "%ld %ld", &all, &pages) != 2) pages = 0;
        fclose(f);
    }
    return pages * (sysconf(_SC_PAGESIZE) / 1024);
}

static void test_memory_steady(void) {
    ddp_dataset *set = ddp_dataset_cifar10(dir, 1);
    ddp_loader_opts o = augmented(16, 2);
    ddp_loader *l;
    int64_t n;
    long first = 0;
    CHECK_INT(ddp_loader_new(set, &o, &l), 0);
    for (int e = 0; e < 3; e++) {
        hash_pass(l, &n);
        if (e == 0) first = resident_kb();
    }
    CHECK(resident_kb() - first < 5 << 10);
    ddp_loader_free(l);
    ddp_dataset_free(set);
}

static void test_drop_last(void) {
    ddp_dataset *set = ddp_dataset_cifar10(dir, 1);
    ddp_loader_opts o = options(50, 1);
    ddp_loader *l;
    int64_t n;
    o.drop_last = 1;
    CHECK_INT(ddp_loader_new(set, &o, &l), 0);
    CHECK_INT(ddp_loader_len(l), 2);
    hash_pass(l, &n);
    CHECK_INT(n, 100);
    ddp_loader_free(l);
    o.batch_size = -1;
    CHECK_INT(ddp_loader_new(set, &o, &l), DDP_EINVAL);
    CHECK_ERROR(DDP_EINVAL, "batch_size is -1");
    o.batch_size = 1;
    o.workers = -3;
    CHECK_INT(ddp_loader_new(set, &o, &l), DDP_EINVAL);
    CHECK_ERROR(DDP_EINVAL, "workers is -3");
    ddp_dataset_free(set);
}

/* ---- hosts
 * --------------------------------------------------------------------------------------------------------------------------
 */

static int n_open, n_closed, n_freed;

static void *host_open(void *ctx, int worker) {
    (void)worker;
    __atomic_fetch_add(&n_open, 1, __ATOMIC_SEQ_CST);
    return ctx;
}
static void host_close(void *state) {
    (void)state;
    __atomic_fetch_add(&n_closed, 1, __ATOMIC_SEQ_CST);
}
static void host_free(void *ctx) {
    (void)ctx;
    n_freed++;
}
static int host_sample(void *state, ddp_sample_call *c) {
    (void)state;
    if (c->index == 13) return ddp_error_set(DDP_EINVAL, "thirteen");
    float v[2] = {(float)c->index, (float)ddp_sample_uniform(c)};
    c->out_x = ddp_from_data(v, 1, (int64_t[]){c->index == 17 ? 1 : 2}, DDP_F32, DDP_CPU);
    c->out_y = ddp_scalar((double)c->index / (c->index >= 30 ? 4 : 1));
    return 0;
}
static int host_transform(void *state, ddp_sample_call *c) {
    (void)state;
    c->out_x = ddp_retain(c->x);
    c->out_y = ddp_retain(c->x); /* any tensor */
    return 0;
}

static void test_host(void) {
    ddp_data_hooks hooks = {&n_open, host_open, host_sample, host_close, host_free}, map = hooks;
    uint64_t want = 0;
    int64_t n;
    map.sample = host_transform;
    for (int workers = 0; workers <= 3; workers += 3) {
        n_open = n_closed = n_freed = 0;
        ddp_dataset *set = ddp_dataset_host(40, &hooks);
        ddp_loader_opts o = options(10, workers);
        ddp_loader *l;
        ddp_tensor *x, *y;
        CHECK_INT(ddp_loader_new(set, &o, &l), 0);
        CHECK_INT(ddp_loader_next(l, &x, &y), 1);
        CHECK_INT(ddp_dtype_of(y), DDP_I64);
        CHECK(((float *)ddp_data(x))[18] == 9);
        ddp_release(x);
        ddp_release(y);
        CHECK_INT(ddp_loader_next(l, &x, &y), DDP_EINVAL);
        CHECK_ERROR(DDP_EINVAL, "index 13", "thirteen");
        CHECK_INT(ddp_loader_next(l, &x, &y), 1);
        ddp_release(x);
        ddp_release(y);
        CHECK_INT(ddp_loader_next(l, &x, &y), 1);
        CHECK_INT(ddp_dtype_of(y), DDP_F32);
        CHECK(((float *)ddp_data(y))[1] == 31 / 4.f);
        ddp_release(x);
        ddp_release(y);
        ddp_loader_free(l);

        o.skip_errors = 1; /* 13 raises, 17 has another shape */
        o.transform = &map;
        CHECK_INT(ddp_loader_new(set, &o, &l), 0);
        uint64_t h = hash_pass(l, &n);
        CHECK_INT(n, 38);
        if (workers == 0) want = h;
        CHECK(h == want);
        CHECK_INT(ddp_loader_skipped(l), 2);
        ddp_loader_free(l);
        CHECK_INT(n_freed, 1);
        ddp_dataset_free(set);
        CHECK_INT(n_freed, 2);
        CHECK(n_open >= 3 && n_open == n_closed);
    }
    ddp_loader *l;
    ddp_loader_opts o = {.size = sizeof o, .batch_size = -1, .transform = &map};
    n_freed = 0;
    CHECK_INT(ddp_loader_new(NULL, &o, &l), DDP_ENULL);
    CHECK_INT(n_freed, 1);
    CHECK_ERROR(DDP_ENULL, "no data set");
}

static void test_random_numbers(void) {
    ddp_sample_call a = {.index = 5, .key = 9}, b = {.index = 6, .key = 9};
    double sum = 0;
    int count[4] = {0};
    CHECK(ddp_sample_uniform(&a) != ddp_sample_uniform(&b));
    for (int i = 0; i < 4000; i++) {
        double u = ddp_sample_uniform(&a);
        int64_t k = ddp_sample_integer(&a, -1, 2);
        CHECK(u >= 0 && u < 1 && k >= -1 && k <= 2);
        sum += u;
        count[k + 1]++;
    }
    CHECK(sum > 1900 && sum < 2100);
    for (int k = 0; k < 4; k++) CHECK(count[k] > 900 && count[k] < 1100);
}

static void no_log(void *ctx, int level, const char *text) {
    (void)ctx;
    (void)level;
    (void)text;
}

int main(void) {
    const char *tmp = getenv("TMPDIR");
    snprintf(dir, sizeof dir, "%s/ddp_data_XXXXXX", tmp ? tmp : "/tmp");
    if (!mkdtemp(dir)) {
        perror(dir);
        return 1;
    }
    ddp_set_log_hook(no_log, NULL); /* small files are warned about */
    write_all();
    run("cifar10 gives planes as channels-last images in [0, 1]", test_cifar_values);
    run("cifar10 finds its subfolder", test_cifar_folder);
    run("cifar10 names a missing file", test_cifar_missing);
    run("cifar10 tells a truncated file by path, bytes and record", test_cifar_truncated);
    run("a label out of range names rank, worker, epoch, index and path, or is skipped and counted", test_bad_label);
    run("the same from a worker thread", test_bad_label_workers);
    run("a batch whose samples are all skipped is passed over", test_skip_whole_batch);
    run("digits: 1437 and 360 images, stratified, in [0, 1]", test_digits);
    run("digits: damaged and missing files are told by path", test_digits_damaged);
    run("rows of tensors, subsets, and their errors", test_tensors);
    run("without shuffle each sample is read once whatever the world", test_sampler_eval);
    run("with shuffle ranks have equal numbers, padded or dropped", test_sampler_train);
    run("the order is a permutation of (seed, epoch), shared out by stride", test_sampler_order);
    run("the order changes each epoch, and epoch 2 is epoch 2", test_epochs);
    run("a loader goes on from a saved position", test_resume);
    run("the same bytes for 0, 1 and 4 workers", test_workers_alike);
    run("the same bytes for 1 and 2 ranks", test_ranks_alike);
    run("crop and flip give every window, and nothing else", test_augment);
    run("normalize by channel, and its errors", test_normalize);
    run("1,000 loops left early leave no thread, descriptor or tensor", test_early_exits);
    run("resident memory is steady over epochs", test_memory_steady);
    run("drop_last, and options out of range", test_drop_last);
    run("host functions make and change samples in any thread", test_host);
    run("a sample's random numbers", test_random_numbers);
    char command[300];
    snprintf(command, sizeof command, "rm -rf '%s'", dir);
    if (system(command) != 0) n_failed++;
    return n_failed > 0;
}
