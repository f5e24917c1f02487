/* paths.c -- where things lie, from where ddprun itself lies: a build tree or an installed prefix. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "launch.h"

static bool exists(const char *path) { return access(path, F_OK) == 0; }

int places_find(places *p) {
    char root[sizeof p->exe_dir], path[sizeof p->exe_dir + 40];
    ssize_t n = readlink("/proc/self/exe", root, sizeof root - 1);
    if (n <= 0) {
        say("cannot read /proc/self/exe: %s", strerror(errno));
        return 1;
    }
    root[n] = 0;
    *strrchr(root, '/') = 0;
    memcpy(p->exe_dir, root, strlen(root) + 1);
    char *slash = strrchr(root, '/');
    if (slash) *slash = 0;
    snprintf(path, sizeof path, "%s/share/ddp/lua", root);
    if (exists(path)) {
        snprintf(p->lib_dir, sizeof p->lib_dir, "%s/lib", root);
        snprintf(p->scripts, sizeof p->scripts, "%s/share/ddp/scripts", root);
        snprintf(p->lua_path, sizeof p->lua_path, "%s/?.lua;%s/?/init.lua", path, path);
    } else {
        const char *b = p->exe_dir; /* generated Lua files lie beside ddprun */
        snprintf(p->lib_dir, sizeof p->lib_dir, "%s", b);
        snprintf(p->scripts, sizeof p->scripts, "%s/scripts", root);
        snprintf(p->lua_path, sizeof p->lua_path, "%s/lua/?.lua;%s/lua/?/init.lua;%s/lua/?.lua;%s/lua/?/init.lua", b, b,
                 root, root);
    }
    return 0;
}

/* A word for the shell, whatever it holds. */
static void print_quoted(const char *s) {
    putchar('\'');
    for (; *s; s++) {
        if (*s == '\'') fputs("'\\''", stdout);
        else putchar(*s);
    }
    putchar('\'');
}

void places_print_env(const places *p) {
    fputs("export LUA_PATH=", stdout);
    print_quoted(p->lua_path);
    fputs("';'\"${LUA_PATH:-;}\"\n", stdout); /* an empty end means Lua's own default */
    fputs("export DDP_LIB=", stdout);
    print_quoted(p->lib_dir);
    putchar('\n');
}

int places_script(const places *p, const char *name, char *out, size_t n) {
    struct stat st;
    snprintf(out, n, "%s", name);
    if (stat(out, &st) == 0) {
        if (!S_ISDIR(st.st_mode)) return 0;
        say("%s is a folder, expected a Lua script", name);
        return EXIT_USAGE;
    }
    if (strcmp(name, "doctor") == 0) {
        snprintf(out, n, "%s/doctor.lua", p->scripts);
        if (stat(out, &st) == 0) return 0;
        say("no %s", out);
        return EXIT_USAGE;
    }
    int err = errno;
    if (name[0] == '/') {
        say("no script %s: %s", name, strerror(err));
        return EXIT_USAGE;
    }
    snprintf(out, n, "%s/%s", p->scripts, name);
    if (stat(out, &st) == 0 && S_ISREG(st.st_mode)) {
        say("running %s", out);
        return 0;
    }
    say("no script %s: tried %s here and %s", name, name, out);
    return EXIT_USAGE;
}

int places_program(const char *name) {
    char path[4096];
    const char *dirs = getenv("PATH");
    if (strchr(name, '/')) {
        if (access(name, X_OK) == 0) return 0;
        say("cannot run %s: %s", name, strerror(errno));
        return EXIT_USAGE;
    }
    for (const char *d = dirs ? dirs : "/usr/bin:/bin"; *d; d += strcspn(d, ":"), d += *d == ':') {
        int len = (int)strcspn(d, ":");
        snprintf(path, sizeof path, "%.*s/%s", len ? len : 1, len ? d : ".", name);
        if (access(path, X_OK) == 0) return 0;
    }
    say("no program %s in PATH", name);
    return EXIT_USAGE;
}
