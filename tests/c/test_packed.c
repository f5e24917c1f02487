/* test_packed.c -- kept weights from several threads: one weight that all read, and one each that is written in between. */
#include <pthread.h>
#include <stdio.h>
#include <string.h>

#include "ddp.h"

enum { THREADS = 4, ROUNDS = 200, N = 16 };

static ddp_tensor *shared, *image, *want; /* what the shared weight makes of the image */
static const int64_t one[2] = {1, 1};

static ddp_tensor *weight(double value) {
    ddp_tensor *w = ddp_full(4, (int64_t[]){N, N, 3, 3}, value, DDP_F32, DDP_CPU);
    ddp_set_requires_grad(w, 1);
    return w;
}

static ddp_tensor *convolve(ddp_tensor *w) { return ddp_conv2d(image, w, NULL, one, one, one, 1); }

static int same(ddp_tensor *a, ddp_tensor *b) {
    double x[N * 64], y[N * 64];
    int ok = ddp_to_doubles(a, x) == 0 && ddp_to_doubles(b, y) == 0 && memcmp(x, y, sizeof x) == 0;
    return ok;
}

/* Rounds in which the shared weight gave its result and the thread's own, which grows, grew: ROUNDS. */
static void *work(void *out) {
    int good = 0;
    ddp_set_grad_mode(0);
    ddp_tensor *mine = weight(1);
    for (int i = 0; i < ROUNDS; i++) {
        double first, later;
        ddp_tensor *y = convolve(shared), *a = convolve(mine), *b = convolve(mine);
        ddp_fill_(mine, i + 2);
        ddp_tensor *c = convolve(mine), *s = ddp_sum(a, 0, NULL, 0), *t = ddp_sum(c, 0, NULL, 0);
        int ok = same(y, want) && same(a, b) && ddp_item(s, &first) == 0 && ddp_item(t, &later) == 0;
        double ratio = later / first * (i + 1) / (i + 2);
        good += ok && ratio > 1 - 1e-5 && ratio < 1 + 1e-5;
        ddp_tensor *all[] = {y, a, b, c, s, t};
        for (int k = 0; k < 6; k++) ddp_release(all[k]);
    }
    ddp_release(mine);
    *(int *)out = good;
    return NULL;
}

int main(void) {
    int good[THREADS] = {0}, all = 1;
    pthread_t thread[THREADS];
    ddp_tensor *rows = ddp_randn(4, (int64_t[]){1, 8, 8, N}, DDP_F32, DDP_CPU);
    ddp_tensor *laid = ddp_permute(rows, 4, (int64_t[]){0, 3, 1, 2}), *positive = ddp_abs(laid);
    image = positive;
    shared = ddp_randn(4, (int64_t[]){N, N, 3, 3}, DDP_F32, DDP_CPU);
    want = convolve(shared);
    ddp_set_requires_grad(shared, 1);
    for (int i = 0; i < THREADS; i++) pthread_create(&thread[i], NULL, work, &good[i]);
    for (int i = 0; i < THREADS; i++) {
        pthread_join(thread[i], NULL);
        all &= good[i] == ROUNDS;
    }
    printf("%sok %d threads read one kept weight, and each sees its own writes\n", all ? "" : "not ", THREADS);
    ddp_tensor *last[] = {rows, laid, positive, shared, want};
    for (int i = 0; i < 5; i++) ddp_release(last[i]);
    return !all;
}
