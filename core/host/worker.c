/* worker.c -- Lua functions over samples, run by a loader's workers: a Lua state for each, closed to the others. The
 * function comes as text that lua/ddp/ship.lua wrote in the script's state and reads in the worker's; tensors come by
 * handle. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "host.h"
#include "worker.h"

/* What all states of one function are made from. */
typedef struct worker_code {
    char *code, *path, *cpath;
    size_t n;
    ddp_tensor **tensors;
    int n_tensors;
} worker_code;

typedef struct worker_state {
    lua_State *L;
    int step; /* registry reference of the function that runs a sample */
} worker_state;

static void code_free(void *ctx) {
    worker_code *c = ctx;
    if (!c) return;
    for (int i = 0; i < c->n_tensors; i++) ddp_release(c->tensors[i]);
    free(c->tensors);
    free(c->code);
    free(c->path);
    free(c->cpath);
    free(c);
}

/* The text of the Lua error on the stack as this thread's error. */
static int lua_failed(lua_State *L) {
    const char *text = lua_tostring(L, -1);
    int st = ddp_error_set(DDP_EINVAL, text ? text : "an error that is no text");
    lua_pop(L, 1);
    return st;
}

static void state_close(void *p) {
    worker_state *w = p;
    if (!w) return;
    lua_close(w->L);
    free(w);
}

/* step = require("ddp.ship").worker(code, tensors) */
static int load_step(worker_state *w, const worker_code *c) {
    lua_State *L = w->L;
    lua_getglobal(L, "package");
    lua_pushstring(L, c->cpath);
    lua_setfield(L, -2, "cpath");
    lua_pop(L, 1);
    lua_getglobal(L, "require");
    lua_pushstring(L, "ddp.ship");
    if (lua_pcall(L, 1, 1, 0)) return lua_failed(L);
    lua_getfield(L, -1, "worker");
    lua_remove(L, -2);
    lua_pushlstring(L, c->code, c->n);
    lua_pushlightuserdata(L, c->tensors);
    if (lua_pcall(L, 2, 1, 0)) return lua_failed(L);
    w->step = luaL_ref(L, LUA_REGISTRYINDEX);
    return 0;
}

static void *state_open(void *ctx, int worker) {
    (void)worker;
    worker_state *w = calloc(1, sizeof *w);
    if (!w) {
        ddp_error_set(DDP_ENOMEM, "a worker's Lua state: out of memory");
        return NULL;
    }
    w->L = ddp__host_state(((worker_code *)ctx)->path);
    if (!w->L) {
        free(w);
        return NULL;
    }
    ddp_scope_push_barrier(); /* tensors that the state makes are the state's */
    int status = load_step(w, ctx);
    ddp_scope_pop_barrier();
    if (status == 0) return w;
    state_close(w);
    return NULL;
}

static int state_sample(void *state, ddp_sample_call *call) {
    worker_state *w = state;
    lua_rawgeti(w->L, LUA_REGISTRYINDEX, w->step);
    lua_pushlightuserdata(w->L, call);
    return lua_pcall(w->L, 1, 0, 0) ? lua_failed(w->L) : 0;
}

int ddp_host_worker_hooks(const char *code, int64_t n, const char *path, const char *cpath, ddp_tensor *const *tensors,
                          int n_tensors, ddp_data_hooks *out) {
    if (!getenv("DDP_LIB")) { /* a state sets it, which must not happen first while threads run */
        lua_State *L = ddp__host_state(path);
        if (L) lua_close(L);
    }
    worker_code *c = calloc(1, sizeof *c);
    if (c) {
        c->n = (size_t)n;
        c->code = malloc(c->n + 1);
        c->path = strdup(path);
        c->cpath = strdup(cpath);
        c->tensors = calloc((size_t)n_tensors + 1, sizeof *c->tensors);
    }
    if (!c || !c->code || !c->path || !c->cpath || !c->tensors) {
        code_free(c);
        return ddp_error_set(DDP_ENOMEM, "a function for workers: out of memory");
    }
    memcpy(c->code, code, c->n);
    for (int i = 0; i < n_tensors; i++) c->tensors[i] = ddp_retain(tensors[i]);
    c->n_tensors = n_tensors;
    *out = (ddp_data_hooks){c, state_open, state_sample, state_close, code_free};
    return 0;
}
