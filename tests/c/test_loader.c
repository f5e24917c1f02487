/* test_loader.c -- loaders, augmentation and host functions through the public interface (D1, D3, D4, D5). */
#include "data_common.h"

/* ---- loaders -------------------------------------------------------------------------------------------------- */

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

/* ---- hosts ---------------------------------------------------------------------------------------------------- */

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

int main(void) {
    begin();
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
    return end();
}
