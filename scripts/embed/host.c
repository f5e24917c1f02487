/* host.c -- a C program that hosts the Lua side: tensors go into a Lua function that trains, and its loss comes back.
 * Ends with status 1 unless the loss of call 200 is under a tenth of the first one's. */
#include <ddp_host.h>
#include <stdio.h>

int main(int argc, char **argv) {
    const char *script = argc > 1 ? argv[1] : "step.lua", *text;
    ddp_host *h = ddp_host_new(NULL);
    double first = 0, last = 0;
    ddp_manual_seed(3);
    ddp_host_run_file(h, script, 0, NULL);
    for (int call = 1; call <= 200 && !ddp_error_peek(); call++) {
        ddp_scope_begin();
        /* Points of the plane and a function of theirs, as a simulation would have them. */
        ddp_tensor *x = ddp_randn(2, (int64_t[]){64, 2}, DDP_F32, DDP_CPU);
        ddp_tensor *y = ddp_tanh(ddp_sum(x, 1, (int64_t[]){1}, 1));
        ddp_tensor *in[2] = {x, y}, *out[1] = {NULL};
        if (ddp_host_call(h, "train_step", 2, in, 1, out) == 0) ddp_item(out[0], &last);
        ddp_release(out[0]);
        ddp_scope_end();
        if (call == 1) first = last;
    }
    int failed = ddp_error_take(&text);
    if (failed) fprintf(stderr, "%s\n", text);
    else printf("loss of call 1: %.5f, of call 200: %.5f\n", first, last);
    ddp_host_free(h);
    ddp_finish();
    return failed || !(last < first / 10);
}
