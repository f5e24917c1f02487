/* worker.h -- what the Lua side asks of libddp_host: functions for a loader's workers. */
#ifndef DDP_HOST_WORKER_H
#define DDP_HOST_WORKER_H

#include "../ddp_data.h"

/* Hooks that run a Lua function in states of their own; declared for Lua in lua/ddp/ship.lua.
 *   code, n      what ship.lua wrote; copied
 *   path, cpath  package.path and package.cpath of the script's state; copied
 *   tensors      [n_tensors] that the code names; retained
 *   out          [OUT] for ddp_dataset_host or a loader's transform, which take them over
 * DDP_ENOMEM. Any thread. */
DDP_API int ddp_host_worker_hooks(const char *code, int64_t n, const char *path, const char *cpath,
                                  ddp_tensor *const *tensors, int n_tensors, ddp_data_hooks *out);

#endif
