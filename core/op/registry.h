/* registry.h -- the kernel lists that are built in. Only registry.c and the lists themselves include this. */
#ifndef DDP_REGISTRY_H
#define DDP_REGISTRY_H

#include "op.h"

enum { DDP_MAX_LISTS = 3 };

/* kernels/ref/list.c: every op. */
DDP_LOCAL extern const ddp_kernel_list ddp__kernels_ref;
/* kernels/cpu/list.c: the list for this processor, or for the cap in DDP_ISA (avx2, avx512; sse: neither); NULL: none fits. */
DDP_LOCAL const ddp_kernel_list *ddp__kernels_cpu(void);
/* Are f32 products of precision "high" now faster by kernels/cpu than elsewhere? After ddp__kernels_cpu. */
DDP_LOCAL bool ddp__cpu_high(void);
/* ---- DDP_TUNE=1 (tune.c) ---- */
DDP_LOCAL bool ddp__tuning(void);
/* The kernel that was measured fastest for this call's shape, among candidates that take it; the first of them where
 * nothing is to be chosen. May run them all: outputs are there, and no kernel but writes them. */
DDP_LOCAL const ddp_kernel *ddp__tune(const ddp_call *c, const ddp_kernel *const *candidates, int n);

/* What a plug-in exports as ddp_plugin_kernels: const ddp_kernel_list *(void). */

#endif
