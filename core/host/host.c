/* host.c -- LuaJIT for embedders and for ddprun's ranks. Tensors cross as addresses through lua/ddp/host.lua, since a C
 * function can't make cdata: no C code enters Lua but here, and never from another thread. */
#include "host.h"

#include <dlfcn.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "../base/base.h"

/* ---- the state --------------------------------------------------------------------------------------------------- */

/* The folder of this library, without the slash. */
static void own_folder(char *out, size_t n) {
    Dl_info info;
    out[0] = 0;
    if (!dladdr((void *)(uintptr_t)&ddp_host_new, &info) || !info.dli_fname) return;
    char real[PATH_MAX];
    snprintf(out, n, "%s", realpath(info.dli_fname, real) ? real : info.dli_fname);
    char *slash = strrchr(out, '/');
    if (slash) *slash = 0;
}

/* DDP_LUA_PATH, else beside this library: an install tree, or a build tree. */
static void default_lua_path(char *out, size_t n) {
    const char *env = getenv("DDP_LUA_PATH");
    char dir[PATH_MAX];
    if (env && *env) {
        snprintf(out, n, "%s", env);
        return;
    }
    own_folder(dir, sizeof dir);
    snprintf(
        out, n,
        "%s/../lua/?.lua;%s/../lua/?/init.lua;%s/lua/?.lua;%s/../share/ddp/lua/?.lua;%s/../share/ddp/lua/?/init.lua",
        dir, dir, dir, dir, dir);
}

lua_State *ddp__host_state(const char *lua_path) {
    lua_State *L = luaL_newstate();
    if (!L) {
        ddp_error_set(DDP_ENOMEM, "host: no memory for a Lua state");
        return NULL;
    }
    luaL_openlibs(L);
    char path[6 * PATH_MAX], dir[PATH_MAX];
    if (lua_path) snprintf(path, sizeof path, "%s", lua_path);
    else default_lua_path(path, sizeof path);
    own_folder(dir, sizeof dir);
    setenv("DDP_LIB", dir, 0); /* where lua/ddp/ffi.lua finds libddp */
    lua_getglobal(L, "package");
    lua_getfield(L, -1, "path");
    lua_pushfstring(L, "%s;%s", path, lua_tostring(L, -1));
    lua_setfield(L, -3, "path");
    lua_pop(L, 2);
    return L;
}

ddp_host *ddp_host_new(const ddp_host_opts *opts) {
    if (ddp_error_peek()) return NULL;
    ddp_host *h = calloc(1, sizeof *h);
    if (!h) {
        ddp_error_set(DDP_ENOMEM, "host: out of memory");
        return NULL;
    }
    h->L = ddp__host_state(opts && opts->size >= sizeof *opts ? opts->lua_path : NULL);
    if (h->L) return h;
    free(h);
    return NULL;
}

void ddp_host_free(ddp_host *h) {
    if (!h) return;
    ddp_scope_push_barrier(); /* what Lua lets go of is not on the caller's list */
    lua_close(h->L);
    ddp_scope_pop_barrier();
    free(h);
}

/* ---- running -------------------------------------------------------------------------------------------------------
 */

static int traceback(lua_State *L) {
    if (!lua_isstring(L, 1)) return 1;
    luaL_traceback(L, L, lua_tostring(L, 1), 1);
    return 1;
}

/* Calls what lies on the stack with nargs; a status. Tensors made by Lua belong to Lua, not to the caller's scopes. */
static int protected_call(lua_State *L, int nargs, int nresults) {
    int base = lua_gettop(L) - nargs;
    lua_pushcfunction(L, traceback);
    lua_insert(L, base);
    ddp_scope_push_barrier();
    int failed = lua_pcall(L, nargs, nresults, base);
    ddp_scope_pop_barrier();
    lua_remove(L, base);
    if (!failed) return 0;
    const char *text = lua_tostring(L, -1);
    int st = ddp_error_set(DDP_EINVAL, text ? text : "an error that is no text");
    lua_pop(L, 1);
    return st;
}

int ddp_host_run_file(ddp_host *h, const char *path, int argc, char *const *argv) {
    if (ddp_error_peek()) return ddp_error_peek();
    lua_State *L = h->L;
    lua_createtable(L, argc, 1);
    lua_pushstring(L, path);
    lua_rawseti(L, -2, 0);
    for (int i = 0; i < argc; i++) {
        lua_pushstring(L, argv[i]);
        lua_rawseti(L, -2, i + 1);
    }
    lua_setglobal(L, "arg");
    int failed = luaL_loadfile(L, path);
    if (failed) {
        int st = ddp_error_set(failed == LUA_ERRFILE ? DDP_EIO : DDP_EINVAL, lua_tostring(L, -1));
        lua_pop(L, 1);
        return st;
    }
    for (int i = 0; i < argc; i++) lua_pushstring(L, argv[i]);
    return protected_call(L, argc, 0);
}

int ddp_host_run_text(ddp_host *h, const char *text, const char *name) {
    if (ddp_error_peek()) return ddp_error_peek();
    if (luaL_loadbuffer(h->L, text, strlen(text), name ? name : "=text")) {
        int st = ddp_error_set(DDP_EINVAL, lua_tostring(h->L, -1));
        lua_pop(h->L, 1);
        return st;
    }
    return protected_call(h->L, 0, 0);
}

/* ---- tensors across ---- */

/* Pushes function `name` of require("ddp.host"). */
static int push_helper(lua_State *L, const char *name) {
    lua_getglobal(L, "require");
    lua_pushstring(L, "ddp.host");
    int st = protected_call(L, 1, 1);
    if (st < 0) return st;
    lua_getfield(L, -1, name);
    lua_remove(L, -2);
    return 0;
}

int ddp_host_set_tensor(ddp_host *h, const char *name, ddp_tensor *t) {
    if (ddp_error_peek()) return ddp_error_peek();
    int st = push_helper(h->L, "set");
    if (st < 0) return st;
    lua_pushstring(h->L, name);
    lua_pushlightuserdata(h->L, t);
    return protected_call(h->L, 2, 0);
}

int ddp_host_call(ddp_host *h, const char *name, int nin, ddp_tensor *const *in, int nout, ddp_tensor **out) {
    if (ddp_error_peek()) return ddp_error_peek();
    for (int i = 0; i < nout; i++) out[i] = NULL;
    int st = push_helper(h->L, "call");
    if (st < 0) return st;
    lua_pushstring(h->L, name);
    lua_pushinteger(h->L, nin);
    lua_pushlightuserdata(h->L, (void *)(uintptr_t)in);
    lua_pushinteger(h->L, nout);
    lua_pushlightuserdata(h->L, out);
    st = protected_call(h->L, 5, 0);
    for (int i = 0; st < 0 && i < nout; i++) {
        ddp_release(out[i]);
        out[i] = NULL;
    }
    return st;
}

/* ---- a rank ---- */

/* One line for the launcher: "error " and the text with its newlines escaped. */
static void tell_launcher(const char *text) {
    const char *env = getenv("DDP_STATUS_FD");
    if (!env || ddp__forked()) return; /* the rank is the parent */
    char line[4096];
    size_t at = (size_t)snprintf(line, sizeof line, "error ");
    for (; *text && at < sizeof line - 3; text++) {
        if (*text == '\n') {
            line[at++] = '\\';
            line[at++] = 'n';
        } else {
            line[at++] = *text;
        }
    }
    line[at++] = '\n';
    if (write(atoi(env), line, at) < 0) return; /* the launcher is gone */
}

int ddp_host_main(const char *script, int argc, char **argv) {
    ddp_stats_mark("process");
    static ddp_host *h; /* after an error the state is left as it is: its finalizers have nothing to say any more */
    h = ddp_host_new(NULL);
    const char *text = "";
    if (h && getenv("DDP_STATUS_FD")) ddp__host_show_stack(h->L); /* ddprun asks for it */
    if (h && ddp_host_run_file(h, script, argc, argv) == 0) {
        ddp_stats_mark("end");
        ddp_finish();
        ddp_host_free(h);
        return 0;
    }
    ddp_error_take(&text);
    tell_launcher(text);
    fflush(stdout);
    fprintf(stderr, "%s\n", text);
    char why[512];
    snprintf(why, sizeof why, "%.*s", (int)strcspn(text, "\n") < 500 ? (int)strcspn(text, "\n") : 500, text);
    ddp_abort(why);
    return 1;
}
