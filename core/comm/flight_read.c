/* flight_read.c -- a record of flight.h in words: for the rank, and for the launcher, which links no other part of comm. */
#include <stdio.h>
#include <string.h>

#include "flight.h"

bool ddp__flight_call_of(const ddp_flight *f, uint32_t seq, ddp_flight_call *out) {
    const ddp_flight_call *c = &f->call[seq % DDP_FLIGHT_CALLS];
    if (seq == 0 || atomic_load(&c->seq) != seq) return false;
    memcpy(out, c, sizeof *out);
    out->sig.name[sizeof out->sig.name - 1] = out->sig.where[sizeof out->sig.where - 1] = 0;
    return atomic_load(&c->seq) == seq;
}

const char *ddp__flight_text(const ddp_flight *f, double now, char *text, size_t n) {
    static const char *const phases[] = {"computing", "loading data", "in the backward pass", "in a collective",
                                         "in the optimizer"};
    _Static_assert(sizeof phases / sizeof *phases == DDP_PHASES, "one text a phase");
    uint32_t waits = atomic_load(&f->waits), done = atomic_load(&f->done), seq = waits ? waits : done;
    int phase = atomic_load(&f->progress.phase);
    long long step = atomic_load(&f->progress.steps) + 1;
    char what[320] = "a collective";
    ddp_flight_call c;
    if (ddp__flight_call_of(f, seq, &c)) ddp__signature_call(&c.sig, seq, what, sizeof what);
    double ago = now - f->since;
    if (waits) snprintf(text, n, "waits in %s since %.1f s, step %lld", what, ago, step);
    else if (phase < 0 || phase >= DDP_PHASES) snprintf(text, n, "has left no readable record");
    else if (seq == 0) snprintf(text, n, "%s, step %lld, %.1f s after it joined", phases[phase], step, ago);
    else snprintf(text, n, "%s, step %lld, %.1f s after %s", phases[phase], step, ago, what);
    return text;
}
