/* test_data.c -- data sets and samplers through the public interface (D1, D2, D5 of the behaviours). */
#include "data_common.h"

/* ---- data sets ------------------------------------------------------------------------------------------------ */

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

/* ---- samplers ------------------------------------------------------------------------------------------------- */

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

int main(void) {
    begin();
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
    return end();
}
