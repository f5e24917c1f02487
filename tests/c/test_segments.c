/* test_segments.c -- what a host other than Lua builds on: stretches that keep nothing, host functions that are gone, the
 * profile, and what the memory is in. */
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>

#include "ddp.h"

static int failed;

static void check(const char *name, int ok) {
    printf("%sok %s\n", ok ? "" : "not ", name);
    failed |= !ok;
}

static ddp_tensor *filled(int64_t n, double v) { return ddp_full(1, &n, v, DDP_F32, DDP_CPU); }

/* exp(x w) w */
static ddp_tensor *stretch(ddp_tensor *x, ddp_tensor *w) { return ddp_mul(ddp_exp(ddp_mul(x, w)), w); }

static int64_t allocated(void) {
    ddp_memory m;
    ddp_memory_stats(DDP_CPU, &m);
    return m.allocated;
}

static double first(ddp_tensor *t) {
    double v[4] = {NAN};
    if (t && ddp_numel(t) <= 4) ddp_to_doubles(t, v);
    return v[0];
}

/* Runs the backward of a stretch that kept nothing, as a host does; returns how often it was asked. */
static int run_with_host(ddp_tensor *loss, int64_t id, ddp_tensor *x, ddp_tensor *w, int *status) {
    int asked = 0;
    ddp_backward_state *s = ddp_backward_begin(1, &loss, NULL, 0, NULL, 0, 1);
    while ((*status = ddp_backward_next(s)) == 1 && asked < 9) {
        asked++;
        if (ddp_backward_host_id(s) != id || ddp_backward_host_n(s) != 0) break;
        *status = ddp_segment_again(s);
        ddp_tensor *y = stretch(x, w);
        *status = ddp_segment_filled(s, y != NULL);
        ddp_release(y);
    }
    ddp_backward_free(s);
    return asked;
}

static void a_stretch_is_run_again(void) {
    ddp_scope_begin();
    int64_t id = ddp_host_ids() + 5;
    ddp_tensor *x = filled(2, .5), *w = filled(2, .25);
    ddp_set_requires_grad(w, 1);
    check("a stretch opens", ddp_segment_begin(id) == 0 && ddp_segment_open() == 1);
    ddp_tensor *y = stretch(x, w);
    check("it tells how much it recorded, and shuts", ddp_segment_end() == 3 && ddp_segment_open() == 0);
    int status = -1, asked = run_with_host(ddp_sum(y, -1, NULL, 0), id, x, w, &status);
    double want = exp(.125) * (1 + .125), got = first(ddp_keep(ddp_tensor_grad(w)));
    check("backward asks once for the second run, and gives the right gradient",
          asked == 1 && status == 0 && fabs(got - want) < 1e-6);
    ddp_scope_end();
    check("when the graph is gone its host function is, told once", ddp_host_dead(id) == id && ddp_host_dead(id) == -1);
}

static void nothing_is_kept(void) {
    int64_t n = 1 << 20, id = ddp_host_ids();
    ddp_tensor *x = ddp_randn(1, &n, DDP_F32, DDP_CPU);
    ddp_set_requires_grad(x, 1);
    int64_t before = allocated();
    ddp_segment_begin(id);
    ddp_scope_begin();
    ddp_tensor *y = ddp_keep(ddp_tanh(ddp_exp(ddp_tanh(x))));
    ddp_scope_end();
    ddp_segment_end();
    check("between forward and backward only the result is held", allocated() - before < 5 << 20);
    const char *text;
    ddp_tensor *loss = ddp_sum(y, -1, NULL, 0);
    int refused = ddp_backward(loss, NULL);
    check("ddp_backward, which cannot run it again, refuses",
          refused == DDP_ESTATE && ddp_error_take(&text) == DDP_ESTATE && strstr(text, "ddp_backward_next"));
    ddp_release(loss);
    ddp_release(y);
    ddp_release(x);
}

static void a_profile_counts(void) {
    ddp_scope_begin();
    ddp_tensor *a = filled(1000, 1);
    ddp_profile_row row;
    ddp_add(a, a);
    ddp_profile_start();
    for (int i = 0; i < 3; i++) ddp_relu(a);
    ddp_profile_stop();
    ddp_add(a, a);
    check("a profile counts what ran between start and stop",
          ddp_profile_read(0, &row) == 0 && row.calls == 3 && strcmp(row.op, "relu") == 0 &&
              strcmp(row.shape, "1000") == 0 && row.bytes == 3 * 2 * 4000 && row.flops == 3000 && row.seconds > 0);
    check("and ends after its last row without an error", ddp_profile_read(1, &row) == DDP_EINVAL && !ddp_error_peek());
    ddp_scope_end();
}

static void *relu_elsewhere(void *t) {
    ddp_release(ddp_relu(t));
    return NULL;
}

static void other_threads_are_left_out(void) {
    ddp_tensor *a = filled(1000, 1);
    ddp_profile_row row;
    pthread_t other;
    ddp_profile_start();
    pthread_create(&other, NULL, relu_elsewhere, a);
    pthread_join(other, NULL);
    ddp_profile_stop();
    check("a profile leaves other threads' calls out", ddp_profile_read(0, &row) == DDP_EINVAL);
    ddp_release(a);
}

static void the_largest_are_listed(void) {
    ddp_tensor *big = filled(3 << 20, 1), *bigger = filled(5 << 20, 1), *small = filled(100, 1);
    ddp_live live[3];
    check("a big tensor wants its line, a small one does not", ddp_wants_origin(big) && !ddp_wants_origin(small));
    ddp_set_origin(big, "train.c:7");
    ddp_set_origin(small, "nowhere");
    check("and then no more", !ddp_wants_origin(big));
    int n = ddp_memory_largest(-1, live, 3);
    check("the largest tensors are listed, the largest first",
          n == 2 && live[0].bytes == 20 << 20 && live[1].bytes == 12 << 20 && live[1].ndim == 1 &&
              live[1].size[0] == 3 << 20 && strcmp(live[1].op, "full") == 0);
    check("with the line that made them", strcmp(live[1].where, "train.c:7") == 0 && live[0].where[0] == 0);
    check("as many as asked for", ddp_memory_largest(-1, live, 1) == 1 && live[0].bytes == 20 << 20);
    ddp_release(big);
    ddp_release(bigger);
    ddp_release(small);
    check("and leave the list when they are gone", ddp_memory_largest(-1, live, 3) == 0);
}

int main(void) {
    a_stretch_is_run_again();
    nothing_is_kept();
    a_profile_counts();
    other_threads_are_left_out();
    the_largest_are_listed();
    return failed;
}
