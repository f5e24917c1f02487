/* trace.c -- a text file of the calls that run: each with its kernel, its operands and where they lie in memory. What others append to
 * the same file while a kernel runs (a log of launches) stands between its @run and its @end. */
#include <fcntl.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "op_build.h"

static FILE *file; /* NULL: no trace; of the thread that started it */

int ddp_trace_start(const char *path) {
    if (ddp__pending()) return ddp__pending();
    if (!path) return ddp__fail(DDP_ENULL, "trace: path is NULL");
    if (file) return ddp__fail(DDP_EINVAL, "trace: another one is running");
    file = fopen(path, "ae"); /* appends: others may write to it too */
    if (!file) return ddp__fail(DDP_EIO, "trace: %s cannot be written", path);
    fputs("@trace\n", file);
    fflush(file);
    ddp__watch_calls(DDP_WATCH_TRACE, true);
    return 0;
}

void ddp_trace_stop(void) {
    ddp__watch_calls(DDP_WATCH_TRACE, false);
    if (!file) return;
    fputs("@stop\n", file);
    fclose(file);
    file = NULL;
}

/* "@in x cuda:0 7f3c00000000 0 4096 f32 4x16x4x4": role, name, device, storage, offset and length in bytes, dtype, sizes. */
static void write_operand(const char *role, const char *name, const ddp_tensor *t) {
    double bytes = ddp__tensor_bytes(t);
    fprintf(file, "@%s %s %s %llx %lld %.0f %s ", role, name, DDP_DEVICE_TEXT(t->m.device),
            (unsigned long long)(uintptr_t)t->storage->data, (long long)t->m.offset * ddp__dtype_bytes[t->m.dtype],
            bytes, ddp_dtype_name((int)t->m.dtype));
    if (t->m.ndim == 0) fputc('1', file);
    for (int i = 0; i < t->m.ndim; i++) fprintf(file, "%s%lld", i ? "x" : "", (long long)t->m.size[i]);
    fputc('\n', file);
}

void ddp__trace_begin(const ddp_kernel *k, const ddp_call *c) {
    if (!file) return;
    int named = c->op->n_in > 0 ? c->op->n_in : 1, each = c->op->lists ? c->n_in / named : 1;
    fprintf(file, "@call %s %s %.0f %.0f\n", c->op->name, k->name, ddp__call_flops(c), ddp__call_bytes(c));
    for (int i = 0; i < c->n_in; i++) {
        if (!c->in[i] || c->in[i]->is_number) continue;
        bool written = (c->op->flags & DDP_OPF_WRITES) && c->op->rules->writes(c, i);
        int name = each > 0 ? i / each : 0;
        write_operand(written ? "both" : "in", c->op->in_names[name < named ? name : named - 1], c->in[i]);
    }
    for (int i = 0; i < c->op->n_out; i++)
        if (c->out[i]) write_operand("out", (char[]){'0' + (char)i, 0}, c->out[i]);
    fputs("@run\n", file);
    fflush(file);
}

void ddp__trace_end(double seconds) {
    if (file) fprintf(file, "@end %.9f\n", seconds);
    if (file) fflush(file);
}
