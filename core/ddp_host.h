/* ddp_host.h -- a Lua side inside a C program, or the whole of one (ddprun). libddp_host holds LuaJIT; libddp does not.
 * Conventions, errors and ownership as in ddp.h: a call entered with an error pending returns that error. */
#ifndef DDP_HOST_H
#define DDP_HOST_H

#include "ddp.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct ddp_host ddp_host;

typedef struct ddp_host_opts {
    size_t size; /* sizeof(ddp_host_opts) */
    const char
        *lua_path; /* templates put before package.path; NULL: DDP_LUA_PATH, else where this library is installed */
} ddp_host_opts;

/* A Lua state of its own with the standard libraries, which finds `require "ddp"`.
 *   opts  [OPTIONAL]
 * NULL with the error set. One thread at a time; several hosts in one process are fine. */
DDP_API ddp_host *ddp_host_new(const ddp_host_opts *opts);
/* Runs a file; arg[1..argc] hold argv, arg[0] the path. DDP_EIO when it can't be read, DDP_EINVAL with Lua's text and
 * traceback when it raises. The host's thread. */
DDP_API int ddp_host_run_file(ddp_host *h, const char *path, int argc, char *const *argv);
/* Runs a text as a chunk named `name`. The host's thread. */
DDP_API int ddp_host_run_text(ddp_host *h, const char *text, const char *name);
/* The global `name` becomes t (one more reference, Lua's) or nil for NULL. The host's thread. */
DDP_API int ddp_host_set_tensor(ddp_host *h, const char *name, ddp_tensor *t);
/* Calls the global function `name`.
 *   in   [nin]   borrowed; NULL entries are nil
 *   out  [nout]  [OUT] new references, the caller's; numbers come as 0-dim f64 tensors, nil as NULL
 * DDP_EINVAL when there is no such function, a result is neither tensor, number nor nil, or Lua raises. The host's thread. */
DDP_API int ddp_host_call(ddp_host *h, const char *name, int nin, ddp_tensor *const *in, int nout, ddp_tensor **out);
/* Closes the state; tensors that only Lua held are released. NULL is allowed. The host's thread. */
DDP_API void ddp_host_free(ddp_host *h);
/* What ddprun runs in a rank: the script, then ddp_finish. An uncaught error goes to stderr, to the launcher and to the
 * other ranks. Returns the exit status. */
DDP_API int ddp_host_main(const char *script, int argc, char **argv);
/* What `ddprun -i` runs: a prompt on stdin and stdout until stdin ends, after the script if one is given; `ddp` is a global.
 *   script  [OPTIONAL]
 * Returns the exit status. */
DDP_API int ddp_host_prompt(const char *script, int argc, char **argv);

#ifdef __cplusplus
}
#endif
#endif
