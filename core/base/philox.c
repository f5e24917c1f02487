/* philox.c -- Philox 4x32-10, the counter-based generator (Salmon et al., SC 2011), and the generators drawn from it. */
#include <stdlib.h>

#include "base.h"

void ddp__philox(uint64_t key, uint64_t lo, uint64_t hi, uint32_t out[4]) {
    uint32_t c0 = (uint32_t)lo, c1 = (uint32_t)(lo >> 32), c2 = (uint32_t)hi, c3 = (uint32_t)(hi >> 32);
    uint32_t k0 = (uint32_t)key, k1 = (uint32_t)(key >> 32);
    for (int round = 0; round < 10; round++) {
        uint64_t p0 = (uint64_t)0xD2511F53u * c0, p1 = (uint64_t)0xCD9E8D57u * c2;
        uint32_t n0 = (uint32_t)(p1 >> 32) ^ c1 ^ k0, n2 = (uint32_t)(p0 >> 32) ^ c3 ^ k1;
        c1 = (uint32_t)p1;
        c3 = (uint32_t)p0;
        c0 = n0;
        c2 = n2;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    out[0] = c0;
    out[1] = c1;
    out[2] = c2;
    out[3] = c3;
}

static ddp_generator default_generator;
static _Thread_local ddp_generator *current;

void ddp_manual_seed(uint64_t seed) { default_generator = (ddp_generator){.key = seed}; }
void ddp_manual_seed_per_rank(uint64_t seed) { default_generator = (ddp_generator){.key = seed, .per_rank = true}; }

ddp_generator *ddp_generator_new(uint64_t seed, int per_rank) {
    ddp_generator *g = malloc(sizeof *g);
    if (!g) {
        ddp__fail(DDP_ENOMEM, "generator: out of memory");
        return NULL;
    }
    *g = (ddp_generator){.key = seed, .per_rank = per_rank != 0};
    return g;
}

void ddp_generator_free(ddp_generator *g) {
    if (g && g == current) current = NULL;
    free(g);
}

void ddp_generator_use(ddp_generator *g) { current = g; }

void ddp_generator_state(const ddp_generator *g, uint64_t state[3]) {
    if (!g) g = &default_generator;
    state[0] = g->key;
    state[1] = g->calls;
    state[2] = g->per_rank;
}

void ddp_generator_set_state(ddp_generator *g, const uint64_t state[3]) {
    *(g ? g : &default_generator) = (ddp_generator){state[0], state[1], state[2] != 0};
}

ddp_rng ddp__rng_next(bool per_rank) {
    ddp_generator *g = current ? current : &default_generator;
    ddp_rng r = {g->key, g->calls++};
    if (per_rank || g->per_rank) r.key = ddp__mix(g->key, (uint64_t)ddp_rank() + 0x5eed);
    return r;
}
