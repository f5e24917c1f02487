/* host.h -- what the files of libddp_host share. */
#ifndef DDP_HOST_INTERNAL_H
#define DDP_HOST_INTERNAL_H

#include <lauxlib.h>
#include <lua.h>
#include <lualib.h>

#include "../ddp_host.h"

struct ddp_host {
    lua_State *L;
};

/* A state with the standard libraries and package.path set; NULL with the error set. */
__attribute__((visibility("hidden"))) lua_State *ddp__host_state(const char *lua_path);

/* stack.c: SIGUSR1 makes the process write its stacks to stderr from now on. */
__attribute__((visibility("hidden"))) void ddp__host_show_stack(lua_State *L);

#endif
