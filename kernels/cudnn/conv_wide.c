/* conv_wide.c -- f16 and bf16 where cuDNN has no engine for them (bf16 before compute capability 8.0): the same call in f32, between
 * casts. Slow, and right. */
#include <string.h>

#include "conv.h"
#include "conv_wide.h"
#include "plan.h"

enum { INPUTS = 8 };

/* A call whose half-wide tensors are f32 ones of its own. */
typedef struct wide {
    ddp_call c;
    ddp_tensor *in[INPUTS];
    conv_temp t[INPUTS + 1]; /* the last: the result */
} wide;

/* to becomes m in f32: channels-last where m is, else row-major. Without memory yet. */
static ddp_tensor *widened(conv_temp *to, const ddp_tensor *t) {
    to->t.m = t->m;
    to->t.m.dtype = DDP_F32;
    to->t.m.offset = 0;
    to->t.numel = t->numel;
    to->t.storage = &to->s;
    if (ddp__meta_is_channels_last(&t->m)) ddp__meta_channels_last(&to->t.m);
    else ddp__meta_rowmajor(&to->t.m);
    return &to->t;
}

static void widen(const ddp_call *c, wide *w) {
    memset(w, 0, sizeof *w);
    w->c = *c;
    w->c.in = w->in;
    for (int i = 0; i < c->n_in; i++)
        w->in[i] = c->in[i] && ddp__is_half(c->in[i]->m.dtype) ? widened(&w->t[i], c->in[i]) : c->in[i];
    w->c.out[0] = widened(&w->t[INPUTS], c->out[0]);
}

static int cast(const ddp_call *c, ddp_tensor *to, ddp_tensor *from) {
    walk_args a;
    ddp__cuda_walk(&a, 2, (ddp_tensor *[]){to, from});
    a.attr = (int32_t)from->m.dtype;
    return ddp__launch_cast(c, to->m.dtype, &a, ddp__grid(a.n, 4));
}

const char *conv_wide_reject(const ddp_call *c, const char *(*reject)(const ddp_call *c)) {
    wide w;
    if (!ddp__is_half(c->in[0]->m.dtype)) return reject(c); /* nothing to cast: why it is refused is what is told */
    widen(c, &w);
    return reject(&w.c);
}

int conv_wide_run(const ddp_call *c, int (*run)(const ddp_call *c)) {
    wide w;
    int st = 0;
    widen(c, &w);
    for (int i = 0; i <= INPUTS && st == 0; i++) {
        conv_temp *t = &w.t[i];
        if (!t->t.storage) continue;
        if (t->t.numel > 0 && !conv_scratch(c, (size_t)t->t.numel * sizeof(float), t)) st = ddp__pending();
        if (st == 0 && i < INPUTS && t->t.numel > 0) st = cast(c, &t->t, c->in[i]);
    }
    if (st == 0) st = run(&w.c);
    if (st == 0 && c->out[0]->numel > 0) st = cast(c, c->out[0], &w.t[INPUTS].t);
    for (int i = 0; i <= INPUTS; i++) conv_give(c, &w.t[i]);
    return st;
}
