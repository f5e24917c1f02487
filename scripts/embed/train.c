/* train.c -- a small network trained on the handwritten digits by a C program, without Lua.
 *   make -C scripts/embed run        alone, and as two ranks under ddprun
 * Ends with status 1 unless the test accuracy reaches 95 % and the loss has fallen tenfold. */
#include <ddp.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { HIDDEN = 128, CLASSES = 10, PIXELS = 64, EPOCHS = 60, BATCH = 64 };

static ddp_tensor *params[4]; /* w1 b1 w2 b2 */

/* A leaf of this size, uniform in +-bound. */
static ddp_tensor *leaf(int ndim, const int64_t *size, double bound) {
    ddp_tensor *t = ddp_empty(ndim, size, DDP_F32, DDP_CPU);
    ddp_uniform_(t, -bound, bound);
    ddp_set_requires_grad(t, 1);
    return t;
}

/* [B, 1, 8, 8] -> [B, 10]; intermediate results belong to the open scope. */
static ddp_tensor *forward(ddp_tensor *x) {
    ddp_tensor *flat = ddp_view(ddp_clone(x, 0), 2, (int64_t[]){-1, PIXELS});
    return ddp_linear(ddp_relu(ddp_linear(flat, params[0], params[1])), params[2], params[3]);
}

/* One pass over the loader with training; returns the mean loss, negative on error. */
static double train_epoch(ddp_loader *loader, ddp_reducer *reducer, ddp_optim *optim) {
    ddp_tensor *x, *y;
    double total = 0;
    int batches = 0;
    while (ddp_loader_next(loader, &x, &y) == 1) {
        double loss = 0;
        ddp_scope_begin();
        ddp_tensor *l = ddp_cross_entropy(forward(x), y, 1, -100, 0);
        ddp_optim_zero_grad(optim);
        ddp_backward(l, NULL);
        ddp_reducer_finish(reducer);
        ddp_optim_step(optim);
        ddp_item(l, &loss);
        ddp_scope_end();
        ddp_release(x);
        ddp_release(y);
        total += loss;
        batches++;
    }
    return ddp_error_peek() || batches == 0 ? -1 : total / batches;
}

/* The share of the test digits that are told right. */
static double evaluate(const char *file) {
    ddp_dataset *set = ddp_dataset_digits(file, 0);
    ddp_loader_opts opts = {.size = sizeof opts, .batch_size = 256};
    ddp_loader *loader = NULL;
    ddp_tensor *x, *y;
    double right = 0, seen = 0;
    ddp_loader_new(set, &opts, &loader);
    int mode = ddp_set_grad_mode(0);
    while (ddp_loader_next(loader, &x, &y) == 1) {
        double n = 0;
        ddp_scope_begin();
        ddp_item(ddp_sum(ddp_eq(ddp_argmax(forward(x), 1, 0, 0), y), -1, NULL, 0), &n);
        ddp_scope_end();
        right += n;
        seen += (double)ddp_numel(y);
        ddp_release(x);
        ddp_release(y);
    }
    ddp_set_grad_mode(mode);
    ddp_loader_free(loader);
    ddp_dataset_free(set);
    return seen > 0 ? right / seen : 0;
}

int main(int argc, char **argv) {
    const char *file = argc > 1 ? argv[1] : "../data/digits.bin", *text;
    ddp_init(NULL);
    ddp_manual_seed(1);
    double b1 = 1 / sqrt(PIXELS), b2 = 1 / sqrt(HIDDEN);
    params[0] = leaf(2, (int64_t[]){HIDDEN, PIXELS}, b1);
    params[1] = leaf(1, (int64_t[]){HIDDEN}, b1);
    params[2] = leaf(2, (int64_t[]){CLASSES, HIDDEN}, b2);
    params[3] = leaf(1, (int64_t[]){CLASSES}, b2);
    ddp_dataset *set = ddp_dataset_digits(file, 1);
    ddp_loader_opts opts = {.size = sizeof opts, .batch_size = BATCH, .shuffle = 1, .distributed = 1, .seed = 1};
    ddp_loader *loader = NULL;
    ddp_reducer *reducer = NULL;
    ddp_optim *optim = NULL;
    ddp_loader_new(set, &opts, &loader);
    ddp_reducer_new(params, 4, NULL, &reducer);
    ddp_optim_sgd(params, 4, &(ddp_sgd_opts){.size = sizeof(ddp_sgd_opts), .lr = .1, .momentum = .9}, &optim);
    double first = 0, last = 0, accuracy = 0;
    for (int epoch = 0; epoch < EPOCHS && last >= 0; epoch++) {
        last = train_epoch(loader, reducer, optim);
        if (epoch == 0) first = last;
    }
    if (!ddp_error_peek()) accuracy = evaluate(file);
    int failed = ddp_error_take(&text);
    if (failed) fprintf(stderr, "%s\n", text);
    else if (ddp_rank() == 0)
        printf("rank 0 of %d: loss %.4f, then %.4f; test accuracy %.2f %%\n", ddp_world_size(), first, last,
               100 * accuracy);
    ddp_optim_free(optim);
    ddp_reducer_free(reducer);
    ddp_loader_free(loader);
    ddp_dataset_free(set);
    for (int i = 0; i < 4; i++) ddp_release(params[i]);
    ddp_finish();
    return failed || accuracy < .95 || !(last < first / 10);
}
