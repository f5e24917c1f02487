/* memory.c -- device memory: a reserved range of addresses a device, out of the host's reach while no operation runs.
 *
 * An allocation ends at a page that nobody may touch, but for what rounds it up to 256 bytes; that, and what is left in front of it on
 * its first page, is filled with a pattern and looked at later. Addresses are never used twice: what was freed stays out of reach. */
#include "state.h"

#include <dlfcn.h>
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

static const size_t arena_size = (size_t)1 << 37, page = 4096, alignment = 256, large = 4 << 20;
enum { NEW_BYTE = 0xFF, MAX_COUNTS = 32 };

typedef struct allocation {
    char *map, *at; /* first page of its own; what the caller got */
    size_t map_bytes, bytes;
    int device, number;
    bool live;
    const char *function; /* that made it */
    const void *caller;
    struct allocation *next, *before; /* of the live ones */
} allocation;

static struct arena {
    char *at, *top;
    allocation **all; /* by address */
    int count, room;
    size_t used;
} arenas[MAX_DEVICES];
static allocation *live;
static int number;
static bool is_open;
static struct sigaction old_segv;

/* ---- finding ------------------------------------------------------------------------------------------------------- */
static struct arena *arena_of(const void *p) {
    for (int i = 0; i < config.devices; i++)
        if (arenas[i].at && (const char *)p >= arenas[i].at && (const char *)p < arenas[i].at + arena_size)
            return &arenas[i];
    return NULL;
}

bool ddp_double_is_device(const void *p) { return arena_of(p) != NULL; }
int device_of_pointer(const void *p) {
    struct arena *a = arena_of(p);
    return a ? (int)(a - arenas) : -1;
}
size_t device_used(int device) { return arenas[device].used; }

/* The allocation, live or not, with the highest start that is not above p; NULL when there is none. */
static allocation *nearest(const void *p) {
    struct arena *a = arena_of(p);
    int low = 0, high = a ? a->count : 0;
    while (low < high) {
        int middle = (low + high) / 2;
        if ((const char *)p < a->all[middle]->map) high = middle;
        else low = middle + 1;
    }
    return low ? a->all[low - 1] : NULL;
}

bool find_allocation(const void *p, char **at, size_t *bytes) {
    allocation *b = nearest(p);
    if (!b || !b->live || (const char *)p < b->at || (const char *)p >= b->at + b->bytes) return false;
    *at = b->at;
    *bytes = b->bytes;
    return true;
}

static const char *describe(const allocation *b, char *text, size_t size) {
    Dl_info where;
    const char *file = "?", *symbol = NULL;
    size_t offset = 0;
    if (dladdr(b->caller, &where) && where.dli_fname) {
        file = strrchr(where.dli_fname, '/') ? strrchr(where.dli_fname, '/') + 1 : where.dli_fname;
        offset = (size_t)((const char *)b->caller - (const char *)where.dli_fbase);
        symbol = where.dli_sname;
    }
    snprintf(text, size, "allocation %d of %zu bytes on device %d, allocated by %s called from %s%s%s+0x%zx", b->number,
             b->bytes, b->device, b->function, symbol ? symbol : "", symbol ? " in " : "", file, offset);
    return text;
}

/* "at ADDRESS: ...", for any address of a device. */
static const char *describe_address(const void *p, char *text, size_t size) {
    char whose[400];
    allocation *b = nearest(p);
    if (!b) {
        snprintf(text, size, "%p, which was never allocated", p);
        return text;
    }
    describe(b, whose, sizeof whose);
    const char *at = p;
    if (!b->live) snprintf(text, size, "%p, use after free: inside freed %s", p, whose);
    else if (at >= b->at + b->bytes)
        snprintf(text, size, "%p, %zu bytes past the end of %s", p, (size_t)(at - b->at) - b->bytes, whose);
    else if (at < b->at) snprintf(text, size, "%p, %zu bytes before %s", p, (size_t)(b->at - at), whose);
    else snprintf(text, size, "%p, inside %s", p, whose);
    return text;
}

void ddp_double_check_range(const void *p, size_t bytes, const char *what) {
    char text[600];
    if (!bytes) return;
    if (!ddp_double_is_device(p)) ddp_double_die("%s: %p is not device memory", what, p);
    allocation *b = nearest(p);
    const char *from = p;
    if (b && b->live && from >= b->at && from + bytes <= b->at + b->bytes) return;
    ddp_double_die("%s: %zu bytes at %s", what, bytes, describe_address(p, text, sizeof text));
}

/* ---- reach --------------------------------------------------------------------------------------------------------- */
static void set_reach(const allocation *b, int rights) {
    if (mprotect(b->map, b->map_bytes, rights)) ddp_double_die("mprotect of device memory: %s", strerror(errno));
}

void open_memory(void) {
    if (is_open) return;
    is_open = true;
    for (allocation *b = live; b && config.protect; b = b->next) set_reach(b, PROT_READ | PROT_WRITE);
}

void ddp_double_reach(void) { open_memory(); }

void close_memory(void) {
    if (!is_open) return;
    is_open = false;
    for (allocation *b = live; b && config.protect; b = b->next) set_reach(b, PROT_NONE);
}

/* A fault in device memory is told, then the signal takes its course. */
static void on_segv(int signal, siginfo_t *info, void *context) {
    (void)signal;
    const ucontext_t *c = context;
    if (probe_fault(info->si_addr, c->uc_mcontext.gregs[REG_ERR] & 2)) return;
    char text[700], where[300] = "";
    if (running && emulator_where) emulator_where(info->si_addr, where, sizeof where);
    if (ddp_double_is_device(info->si_addr)) {
        describe_address(info->si_addr, text, sizeof text);
        if (running) ddp_double_say("%s touched %s%s%s", running, text, *where ? "; " : "", where);
        else ddp_double_say("host touched device memory at %s", text);
    } else if (running) {
        ddp_double_say("%s touched %p, which is not device memory%s%s", running, info->si_addr, *where ? "; " : "",
                       where);
    }
    sigaction(SIGSEGV, &old_segv, NULL);
}

void memory_start(void) {
    for (int i = 0; i < config.devices; i++) {
        void *at = mmap(NULL, arena_size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (at == MAP_FAILED) ddp_double_die("no addresses for device %d: %s", i, strerror(errno));
        arenas[i].at = arenas[i].top = at;
    }
    struct sigaction action = {.sa_sigaction = on_segv, .sa_flags = SA_SIGINFO | SA_ONSTACK};
    sigaction(SIGSEGV, &action, &old_segv);
}

/* ---- red zones ----------------------------------------------------------------------------------------------------- */
/* Differs between neighbours: a kernel that copies from one's red zone into another's is seen. */
static unsigned char red_byte(const allocation *b) { return (unsigned char)(0xC0 | (b->number & 0x3F)); }

static void check_bytes(const allocation *b, const char *from, const char *to, const char *after) {
    char text[500];
    if (from >= to || ((unsigned char)*from == red_byte(b) && !memcmp(from, from + 1, (size_t)(to - from) - 1))) return;
    for (const char *p = from; p < to; p++)
        if ((unsigned char)*p != red_byte(b))
            ddp_double_die("%s wrote %s of %s (%zd bytes from its start)", after,
                           p < b->at ? "in front" : "past the end", describe(b, text, sizeof text), p - b->at);
}

static void check_allocation(const allocation *b, const char *after) {
    const char *from = b->at - b->map > (ssize_t)alignment ? b->at - alignment : b->map;
    check_bytes(b, from, b->at, after);
    check_bytes(b, b->at + b->bytes, b->map + b->map_bytes, after);
}

void check_red_zones(const char *after) {
    if (!is_open) return; /* nobody came near */
    for (allocation *b = live; b; b = b->next) check_allocation(b, after);
}

/* ---- allocations --------------------------------------------------------------------------------------------------- */
static size_t round_up(size_t n, size_t to) { return (n + to - 1) / to * to; }

static void add(struct arena *a, allocation *b) {
    if (a->count == a->room) {
        a->room = a->room ? 2 * a->room : 64;
        a->all = realloc(a->all, (size_t)a->room * sizeof *a->all);
    }
    a->all[a->count++] = b;
    b->next = live;
    if (live) live->before = b;
    live = b;
}

void *device_alloc(int device, size_t bytes, const char *function, const void *caller) {
    struct arena *a = &arenas[device];
    size_t map_bytes = round_up(round_up(bytes, alignment), page);
    if (bytes > config.memory || a->used + bytes > config.memory) return NULL;
    if ((size_t)(a->top - a->at) + map_bytes + 2 * page > arena_size)
        ddp_double_die("device %d ran out of addresses", device);
    allocation *b = calloc(1, sizeof *b);
    *b = (allocation){.map = a->top + page, .map_bytes = map_bytes, .bytes = bytes, .device = device, .live = true};
    b->at = b->map + map_bytes - round_up(bytes, alignment);
    b->number = ++number;
    b->function = function;
    b->caller = caller;
    a->top = b->map + map_bytes;
    a->used += bytes;
    add(a, b);
    set_reach(b, PROT_READ | PROT_WRITE);
    if (map_bytes >= large) madvise(b->map, map_bytes, MADV_HUGEPAGE); /* its reach changes sooner */
    if (config.mode != DRY) {
        memset(b->map, red_byte(b), (size_t)(b->at - b->map));
        memset(b->at, NEW_BYTE, bytes);
        memset(b->at + bytes, red_byte(b), (size_t)(b->map + map_bytes - b->at) - bytes);
    }
    if (!is_open && config.protect) set_reach(b, PROT_NONE);
    return b->at;
}

void device_free(void *p, const char *function) {
    char text[500];
    allocation *b = nearest(p);
    if (!b || b->at != (char *)p) ddp_double_die("%s of %p, which was never allocated", function, p);
    if (!b->live) ddp_double_die("double free: %s of %p, freed %s", function, p, describe(b, text, sizeof text));
    set_reach(b, PROT_READ | PROT_WRITE);
    if (config.mode != DRY) check_allocation(b, "something");
    madvise(b->map, b->map_bytes, MADV_DONTNEED);
    set_reach(b, PROT_NONE);
    b->live = false;
    if (b->next) b->next->before = b->before;
    if (b->before) b->before->next = b->next;
    else live = b->next;
    arenas[b->device].used -= b->bytes;
}

/* ---- what is left at the end --------------------------------------------------------------------------------------- */
static struct {
    const char *what;
    int count;
} counts[MAX_COUNTS];

void ddp_double_count(const char *what, int by) {
    int i = 0;
    ddp_double_lock();
    while (i < MAX_COUNTS - 1 && counts[i].what && strcmp(counts[i].what, what)) i++;
    counts[i].what = what;
    counts[i].count += by;
    ddp_double_unlock();
}

int report_leaks(void) {
    int left = 0;
    size_t bytes = 0;
    const allocation *first = NULL;
    char text[500];
    for (const allocation *b = live; b; b = b->next) left++, bytes += b->bytes, first = b;
    if (left)
        ddp_double_say("LEAK: %d device allocations, %zu bytes; the oldest: %s", left, bytes,
                       describe(first, text, sizeof text));
    int pinned = pinned_left(&bytes);
    if (pinned) ddp_double_say("LEAK: %d pinned allocations, %zu bytes", pinned, bytes);
    left += pinned;
    for (int i = 0; i < MAX_COUNTS && counts[i].what; i++) {
        if (counts[i].count > 0) ddp_double_say("LEAK: %d of: %s", counts[i].count, counts[i].what);
        left += counts[i].count;
    }
    return left;
}
