/* list.c -- the vectorised kernels: one list an instruction set, chosen once by what the processor has and DDP_ISA allows. */
#include <stdlib.h>
#include <string.h>

#include "../../core/op/registry.h"

#define CPU_OP(op) extern const ddp_kernel ddp__cpu_##op##_v2[], ddp__cpu_##op##_v3[], ddp__cpu_##op##_v4[];
#include "cpu_ops.def"
#undef CPU_OP

#define CPU_OP(op) [DDP_OP_##op] = ddp__cpu_##op##_v2,
static const ddp_kernel *v2[DDP_OP_COUNT] = {
#include "cpu_ops.def"
};
#undef CPU_OP
#define CPU_OP(op) [DDP_OP_##op] = ddp__cpu_##op##_v3,
static const ddp_kernel *v3[DDP_OP_COUNT] = {
#include "cpu_ops.def"
};
#undef CPU_OP
#define CPU_OP(op) [DDP_OP_##op] = ddp__cpu_##op##_v4,
static const ddp_kernel *v4[DDP_OP_COUNT] = {
#include "cpu_ops.def"
};
#undef CPU_OP

static const ddp_kernel_list lists[] = {{"cpu", v2}, {"cpu", v3}, {"cpu", v4}};

static const ddp_kernel_list *choose(void) {
    const char *isa = getenv("DDP_ISA");
    int cap = 2;
    if (isa && strcmp(isa, "sse") == 0) cap = 0;
    else if (isa && strcmp(isa, "avx2") == 0) cap = 1;
    else if (isa && *isa && strcmp(isa, "avx512") != 0 && strcmp(isa, "amx") != 0)
        ddp__log(DDP_LOG_WARN, "DDP_ISA is \"%s\", expected sse, avx2, avx512 or amx; it is ignored", isa);
    bool has_v4 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                  __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
                  __builtin_cpu_supports("avx512cd");
    bool has_v3 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2") &&
                  __builtin_cpu_supports("f16c");
    if (cap == 2 && has_v4) return &lists[2];
    if (cap >= 1 && has_v3) return &lists[1];
    return __builtin_cpu_supports("sse4.2") ? &lists[0] : NULL;
}

static const ddp_kernel_list *chosen;
const ddp_kernel_list *ddp__kernels_cpu(void) { return chosen = choose(); }

extern bool ddp__cpu_high_by_amx_v4(void); /* tiles.c */
bool ddp__cpu_high(void) { return chosen == &lists[2] && ddp__cpu_high_by_amx_v4(); }
