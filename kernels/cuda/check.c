/* check.c -- host side of looking for NaN: the counts come to the host, which waits for them. */
#include "cuda.h"

int ddp__gpu_count_bad(const ddp_call *c, const ddp_tensor *t, int64_t count[2]) {
    ddp_gpu *g = ddp__gpu(t->m.device - 1);
    const size_t bytes = 2 * sizeof(int64_t);
    void *there = g ? ddp__gpu_alloc(g->index, bytes) : NULL;
    if (!there) return ddp__pending();
    census_args a = {.count = there};
    ddp__cuda_walk(&a.walk, 1, (ddp_tensor *[]){(ddp_tensor *)(uintptr_t)t});
    int st = ddp__cuda_check(ddp__cuda.cudaMemsetAsync(there, 0, bytes, g->compute), "cudaMemsetAsync");
    if (st >= 0)
        st = ddp__launch_census(c, t->m.dtype, &a,
                                ddp__grid(a.walk.n, a.walk.ndim ? 4 : 16 / ddp__dtype_bytes[t->m.dtype]));
    if (st >= 0)
        st = ddp__cuda_check(ddp__cuda.cudaMemcpyAsync(count, there, bytes, cudaMemcpyDeviceToHost, g->compute),
                             "cudaMemcpyAsync");
    if (st >= 0) st = ddp__gpu_wait(g, "reading from the GPU");
    ddp__gpu_release(g->index, there, bytes);
    return st;
}
