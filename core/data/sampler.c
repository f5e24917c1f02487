/* sampler.c -- who reads which samples in which order: pure functions of (n, seed, epoch, rank, world). */
#include <stdlib.h>

#include "data.h"

int64_t ddp_sampler_len(int64_t n, int shuffle, int drop_last, int rank, int world) {
    if (n <= 0 || world < 1 || rank < 0 || rank >= world) return 0;
    if (drop_last) return n / world;
    if (shuffle) return (n + world - 1) / world;
    return rank < n ? (n - rank - 1) / world + 1 : 0;
}

/* 0..n-1, shuffled: position i is exchanged with one drawn from 0..i, for i from the last down. */
static void fill(int64_t *order, int64_t n, uint64_t key, bool shuffle) {
    for (int64_t i = 0; i < n; i++) order[i] = i;
    for (int64_t i = shuffle ? n - 1 : 0; i > 0; i--) {
        uint32_t r[4];
        ddp__philox(key, (uint64_t)i, 0, r);
        uint64_t wide = (uint64_t)r[0] << 32 | r[1];
        int64_t j = (int64_t)((unsigned __int128)wide * (uint64_t)(i + 1) >> 64);
        int64_t t = order[i];
        order[i] = order[j];
        order[j] = t;
    }
}

int ddp_sampler_order(int64_t n, uint64_t seed, int64_t epoch, int shuffle, int drop_last, int rank, int world,
                      int64_t *out) {
    if (ddp__pending()) return ddp__pending();
    if (n < 0 || world < 1 || rank < 0 || rank >= world)
        return ddp__fail(DDP_EINVAL, "sampler: %lld samples for rank %d of %d", (long long)n, rank, world);
    uint64_t key = ddp__epoch_key(seed, epoch, DDP_KEY_ORDER);
    if (world == 1) {
        fill(out, n, key, shuffle != 0);
        return 0;
    }
    int64_t *order = malloc((size_t)(n > 0 ? n : 1) * sizeof *order);
    if (!order) return ddp__fail(DDP_ENOMEM, "sampler: out of memory for the order of %lld samples", (long long)n);
    fill(order, n, key, shuffle != 0);
    int64_t len = ddp_sampler_len(n, shuffle, drop_last, rank, world);
    for (int64_t i = 0; i < len; i++) out[i] = order[(rank + i * world) % n];
    free(order);
    return 0;
}
