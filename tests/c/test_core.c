/* link: core/base/philox.c */
/* test_core.c -- the C interface without Lua: errors, scopes, ownership, failure at every allocation, known draws. */
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>

#include "base/base.h"
#include "ddp.h"

static int failed;

static void check(const char *name, int ok) {
    printf("%sok %s\n", ok ? "" : "not ", name);
    failed |= !ok;
}

static ddp_tensor *ones(int64_t n) { return ddp_full(1, &n, 1, DDP_F32, DDP_CPU); }

static void errors_stick(void) {
    const char *text;
    ddp_tensor *a = ones(2), *b = ones(3);
    ddp_tensor *c = ddp_relu(ddp_add(ddp_add(a, b), a)); /* the inner one fails */
    check("a nested expression with a failure inside is NULL", c == NULL);
    check("status calls return the pending status", ddp_backward(a, NULL) == DDP_ESHAPE);
    check("release, retain and accessors go on", ddp_numel(ddp_retain(a)) == 2);
    ddp_release(a);
    check("the first error is kept",
          ddp_error_take(&text) == DDP_ESHAPE && strstr(text, "add: shapes do not broadcast: a [2], b [3]"));
    check("and taken once", ddp_error_take(&text) == 0 && text[0] == 0);
    check("a NULL required argument is an error of its own",
          ddp_add(a, NULL) == NULL && ddp_error_take(&text) == DDP_ENULL && strstr(text, "b is missing"));
    check("NULL is released quietly", (ddp_release(NULL), 1));
    ddp_release(a);
    ddp_release(b);
}

static int64_t live(void) {
    ddp_memory m;
    ddp_memory_stats(DDP_CPU, &m);
    return m.live_tensors;
}

static void scopes_own(void) {
    int64_t before = live();
    ddp_scope_begin();
    ddp_tensor *a = ones(4), *kept = ddp_keep(ddp_add(a, a));
    ddp_scope_begin();
    ddp_tensor *b = ddp_mul(a, a);
    ddp_release(b); /* taken off the list: not released twice */
    ddp_mul(a, kept);
    ddp_scope_end();
    ddp_scope_push_barrier();
    ddp_tensor *outside = ones(1);
    ddp_scope_pop_barrier();
    ddp_scope_end();
    double v = 0;
    ddp_tensor *s = ddp_sum(kept, -1, NULL, 0);
    ddp_item(s, &v);
    check("what was kept survives the scope", v == 8);
    check("the rest is gone", live() == before + 3);
    ddp_release(kept);
    ddp_release(outside);
    ddp_release(s);
    check("nothing is left", live() == before);
}

static void trains(int64_t fail_at, int *outcome) {
    ddp_memory_fail_at(fail_at);
    ddp_scope_begin();
    ddp_manual_seed(1);
    ddp_tensor *w = ddp_randn(2, (int64_t[]){3, 4}, DDP_F32, DDP_CPU),
               *x = ddp_randn(2, (int64_t[]){5, 4}, DDP_F32, DDP_CPU);
    ddp_set_requires_grad(w, 1);
    ddp_optim *o = NULL;
    ddp_optim_adam(&w, w ? 1 : 0, NULL, &o);
    ddp_backward(ddp_mean(ddp_tanh(ddp_linear(x, w, NULL)), -1, NULL, 0), NULL);
    ddp_optim_step(o);
    ddp_memory_fail_at(0);
    *outcome = ddp_error_take(NULL);
    ddp_optim_free(o);
    ddp_scope_end();
}

static void fails_at_every_allocation(void) {
    int64_t before = live();
    int outcome = 1, clean = 1, leaks = 0, k = 1;
    for (; outcome != 0 && k < 200; k++) {
        trains(k, &outcome);
        clean &= outcome == 0 || outcome == DDP_ENOMEM;
        leaks += live() != before;
    }
    check("a failure at each allocation of a step is reported as out of memory", clean && outcome == 0 && k > 10);
    check("and leaks nothing", leaks == 0);
}

static void philox_is_known(void) {
    uint32_t w[4];
    ddp__philox(0, 0, 0, w);
    check("Philox of zeros is the published value",
          w[0] == 0x6627e8d5 && w[1] == 0xe169c58d && w[2] == 0xbc57ac4c && w[3] == 0x9b00dbd8);
}

static void *work(void *arg) {
    int *bad = arg;
    for (int i = 0; i < 2000 && !*bad; i++) {
        ddp_scope_begin();
        ddp_tensor *a = ones(64 + i % 512);
        double v = 0;
        ddp_set_requires_grad(a, 1);
        ddp_backward(ddp_sum(ddp_mul(a, a), -1, NULL, 0), NULL);
        ddp_tensor *g = ddp_tensor_grad(a), *s = ddp_sum(g, -1, NULL, 0);
        ddp_item(s, &v);
        if (v != 2 * (64 + i % 512)) *bad = 1;
        if (ddp_add(a, g) == NULL) *bad = 1;
        ddp_release(g);
        ddp_scope_end();
    }
    return NULL;
}

static void threads_work_apart(void) {
    pthread_t t[4];
    int bad[4] = {0};
    for (int i = 0; i < 4; i++) pthread_create(&t[i], NULL, work, &bad[i]);
    for (int i = 0; i < 4; i++) pthread_join(t[i], NULL);
    check("threads work on tensors of their own", !(bad[0] | bad[1] | bad[2] | bad[3]));
}

static int gone;
static void count_gone(void *ctx) { gone += ctx == &gone; }

static void blobs_are_given_back(void) {
    float data[6] = {1, 2, 3, 4, 5, 6};
    ddp_tensor *t = ddp_from_blob(data, 2, (int64_t[]){2, 3}, NULL, DDP_F32, DDP_CPU, count_gone, &gone);
    ddp_tensor *v = ddp_select(t, 0, 1);
    ddp_release(t);
    check("a blob lives as long as a view of it", gone == 0 && ddp_data(v) == &data[3]);
    ddp_release(v);
    check("and its deleter runs once", gone == 1);
}

static void autocast_in_c(void) {
    const char *text;
    int before = 7;
    int64_t handles = live();
    ddp_tensor *w = ddp_full(2, (int64_t[]){2, 2}, 1, DDP_F32, DDP_CPU);
    ddp_set_requires_grad(w, 1);
    int st = ddp_autocast_begin(DDP_BF16, &before);
    ddp_scope_begin();
    ddp_tensor *y = ddp_matmul(w, w), *loss = ddp_sum(y, -1, NULL, 0);
    check("autocast: products in bf16, sums in f32", ddp_dtype_of(y) == DDP_BF16 && ddp_dtype_of(loss) == DDP_F32);
    st |= ddp_backward(loss, NULL);
    ddp_scope_end();
    ddp_autocast_end(before);
    ddp_tensor *g = ddp_tensor_grad(w);
    double v[4] = {0};
    st |= ddp_to_doubles(g, v);
    check("the gradient is f32", st == 0 && ddp_dtype_of(g) == DDP_F32 && v[0] == 4 && v[3] == 4);
    check("the region has ended", before == DDP_AUTOCAST_OFF && ddp_autocast_dtype() == DDP_AUTOCAST_OFF);
    ddp_release(g);
    ddp_release(w);
    check("no handle is left of it", live() == handles);
    check("f64 is refused", ddp_autocast_begin(DDP_F64, &before) == DDP_EDTYPE);
    check("by name", ddp_error_take(&text) == DDP_EDTYPE && strstr(text, "autocast: f64"));
}

static void check_nan_in_c(void) {
    const char *text;
    ddp_tensor *zero = ddp_full(1, (int64_t[]){3}, 0, DDP_F32, DDP_CPU);
    ddp_set_check_nan(1);
    int before = ddp_check_nan_enter("encoder.0");
    check("P4 an op that makes NaN fails", ddp_div(zero, zero) == NULL);
    ddp_check_nan_leave(before);
    check("P4 and is named with its module",
          ddp_error_take(&text) == DDP_EINVAL && strstr(text, "div in encoder.0 made 3 NaN"));
    check("switching off gives what was set", ddp_set_check_nan(0) == 1);
    ddp_tensor *y = ddp_div(zero, zero);
    check("off it passes", y != NULL);
    ddp_release(y);
    ddp_release(zero);
}

int main(void) {
    errors_stick();
    scopes_own();
    fails_at_every_allocation();
    philox_is_known();
    threads_work_apart();
    blobs_are_given_back();
    autocast_in_c();
    check_nan_in_c();
    return failed;
}
