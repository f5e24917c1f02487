// Runs the blocks of a kernel one after another. In a block each thread is a fiber that runs until it waits: at a barrier,
// in a warp operation, or because it is done; then the schedule says who is next. Wrong use ends the process with a
// message that names kernel, block, thread and line, and status 99. Launches of several host threads must not overlap.
//
// DDP_EMU_SCHEDULE 0 lanes in order, 1 backwards, 2 at random; 3 a warp as far as it gets, 4 backwards, 5 at random
// DDP_EMU_SEED     of the random ones     DDP_EMU_CHECK=1 shared memory is filled with NaN before each block, not launch
// DDP_EMU_FLAT=0   flat kernels get fibers as well (so that ThreadSanitizer sees their threads)
#include "emu.h"
#include "fiber.h"
#include "launch.h"
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <sys/mman.h>
#include <unistd.h>

uint3 threadIdx, blockIdx;
emu_dim3 blockDim, gridDim;

#define EXPORT extern "C" __attribute__((visibility("default")))
extern "C" char __start_emu_shared[] __attribute__((weak, visibility("hidden")));
extern "C" char __stop_emu_shared[] __attribute__((weak, visibility("hidden")));

namespace emu {

enum state { RUNS, AT_BARRIER, IN_WARP_OP, DONE };

struct lane_state {
    fiber f;
    state now;
    uint3 id;
    site at;               // where it waits
    barrier_kind kind;     // at a barrier: which, with this predicate
    int predicate, answer; // of __syncthreads_count, _or, _and
    warp_op op;            // in a warp operation: with these lanes, what it brought and what it gets
    unsigned mask;
    uint64_t bits, result;
    int source;
};

static const int most_lanes = 1024;
static const size_t most_shared = 256 << 10, page = 4096;
static const int end_status = 99;

static struct {
    int schedule, check, flat_allowed;
    uint64_t random;
    const kernel *k; // of the launch
    const void *args;
    size_t shared;
    lane_state lanes[most_lanes]; // of the block
    int count, stacks, current;   // lanes of the block, lanes that have a stack, lane that runs or -1
    char *shared_end, *shared_at; // dynamic shared memory ends before a page that nobody may touch
    char start, end, fences, barriers[2], warps[most_lanes / 32][2]; // ThreadSanitizer's tokens
    unsigned barrier_turn, warp_turn[most_lanes / 32];
    struct {
        char *at;
        size_t bytes;
    } ranges[4096]; // of shared variables: all but what AddressSanitizer forbids
    int range_count;
} e;

// ---- messages -------------------------------------------------------------------------------------------------
[[noreturn]] static void fail(int lane, const char *format, ...) {
    va_list list;
    va_start(list, format);
    fprintf(stderr, "emulator: ");
    vfprintf(stderr, format, list);
    va_end(list);
    fprintf(stderr, ": kernel %s, block (%u,%u,%u)", e.k->name, blockIdx.x, blockIdx.y, blockIdx.z);
    if (lane >= 0) {
        const lane_state &l = e.lanes[lane];
        fprintf(stderr, ", thread (%u,%u,%u)", l.id.x, l.id.y, l.id.z);
        if (l.at.file) fprintf(stderr, " at %s:%d", l.at.file, l.at.line);
    }
    fprintf(stderr, "\n");
    fflush(nullptr);
    _exit(end_status);
}

// What a fault at this address means, for a signal handler: 0 when it is none of the emulator's.
EXPORT int ddp_emu_where(const void *address, char *text, size_t size) {
    if (!e.k) return 0;
    const char *a = (const char *)address, *what = "";
    if (e.shared_end && a >= e.shared_end && a < e.shared_end + page)
        what = ", past the end of its dynamic shared memory";
    snprintf(text, size, "kernel %s, block (%u,%u,%u), thread (%u,%u,%u)%s", e.k->name, blockIdx.x, blockIdx.y,
             blockIdx.z, threadIdx.x, threadIdx.y, threadIdx.z, what);
    return 1;
}

static bool same_site(const site &a, const site &b) { return a.line == b.line && !strcmp(a.file, b.file); }

// ---- start ----------------------------------------------------------------------------------------------------
static int setting(const char *name, int otherwise) {
    const char *s = getenv(name);
    return s && *s ? atoi(s) : otherwise;
}

static void find_shared_ranges() {
    char *from = nullptr;
    for (char *p = __start_emu_shared; p && p < __stop_emu_shared; p++) {
        bool ours = !fiber_is_poisoned(p, 1);
        if (ours && !from) from = p;
        bool ends = from && (!ours || p + 1 == __stop_emu_shared);
        if (!ends || e.range_count == 4096) continue;
        e.ranges[e.range_count].at = from;
        e.ranges[e.range_count++].bytes = (size_t)(p - from) + (ours ? 1 : 0);
        from = nullptr;
    }
}

static void start() {
    static bool started;
    if (started) return;
    started = true;
    e.schedule = setting("DDP_EMU_SCHEDULE", 0);
    e.check = setting("DDP_EMU_CHECK", 0);
    e.flat_allowed = setting("DDP_EMU_FLAT", 1);
    e.random = (uint64_t)setting("DDP_EMU_SEED", 1) * 0x9E3779B97F4A7C15u | 1;
    char *at = (char *)mmap(nullptr, most_shared + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (at == MAP_FAILED || mprotect(at + most_shared, page, PROT_NONE)) {
        perror("emulator: shared memory");
        _exit(end_status);
    }
    e.shared_end = at + most_shared;
    find_shared_ranges();
}

static unsigned random_below(unsigned n) {
    e.random ^= e.random << 13;
    e.random ^= e.random >> 7;
    e.random ^= e.random << 17;
    return (unsigned)((e.random >> 32) * n >> 32);
}

// ---- shared memory --------------------------------------------------------------------------------------------
static const unsigned char slack_byte = 0xA5; // between the end of dynamic shared memory and the next 16 bytes

static void poison_shared(bool all) {
    for (int i = 0; all && i < e.range_count; i++) memset(e.ranges[i].at, 0xFF, e.ranges[i].bytes);
    size_t room = (e.shared + 15) & ~(size_t)15;
    e.shared_at = e.shared_end - room;
    memset(e.shared_at, 0xFF, e.shared);
    memset(e.shared_at + e.shared, slack_byte, room - e.shared);
}

static void check_shared() {
    for (char *p = e.shared_at + e.shared; p < e.shared_end; p++)
        if ((unsigned char)*p != slack_byte)
            fail(-1, "a thread wrote past the end of %zu bytes of dynamic shared memory", e.shared);
}

void *dynamic_shared() {
    if (e.k->flat) fail(e.current, "dynamic shared memory in a kernel marked FLAT");
    return e.shared_at;
}

// A flat kernel that wrote a shared variable lied.
static void check_flat() {
    for (int i = 0; e.check && i < e.range_count; i++)
        for (size_t j = 0; j < e.ranges[i].bytes; j++)
            if ((unsigned char)e.ranges[i].at[j] != 0xFF) fail(-1, "shared memory written in a kernel marked FLAT");
}

// ---- what a lane calls ----------------------------------------------------------------------------------------
int lane() { return e.current < 0 ? 0 : e.current & 31; }

static void wait_as(lane_state &l, state why) {
    int me = e.current;
    l.now = why;
    fiber_leave(&l.f, false);
    e.current = me;
}

static void must_be_fiber(const char *what, site at) {
    if (e.current >= 0) return;
    e.lanes[0].id = threadIdx;
    e.lanes[0].at = at;
    fail(0, "%s in a kernel marked FLAT", what);
}

int barrier(barrier_kind kind, int predicate, site at) {
    must_be_fiber("__syncthreads", at);
    lane_state &l = e.lanes[e.current];
    l.kind = kind;
    l.predicate = predicate != 0;
    l.at = at;
    unsigned turn = e.barrier_turn & 1;
    fiber_release(&e.barriers[turn]);
    wait_as(l, AT_BARRIER);
    fiber_acquire(&e.barriers[turn]);
    return l.answer;
}

// The lanes of mask that are there and not done all wait with this mask.
static bool all_here(int base, unsigned mask) {
    for (unsigned rest = mask; rest; rest &= rest - 1) {
        int j = base + __builtin_ctz(rest);
        if (j >= e.count || e.lanes[j].now == DONE) continue;
        if (e.lanes[j].now != IN_WARP_OP || e.lanes[j].mask != mask) return false;
    }
    return true;
}

static uint64_t shuffled(int base, int j) {
    const lane_state &l = e.lanes[j];
    int s = base + (l.source & 31);
    if (!(l.mask >> (l.source & 31) & 1))
        fail(j, "shuffle from lane %d, which is not in the mask %08x", l.source & 31, l.mask);
    if (s >= e.count || e.lanes[s].now == DONE) fail(j, "shuffle from lane %d, which is not there", l.source & 31);
    return e.lanes[s].bits;
}

static void answer_warp(int base, unsigned mask, const lane_state &first) {
    unsigned here = 0, ballot = 0;
    for (unsigned rest = mask; rest; rest &= rest - 1) {
        int j = base + __builtin_ctz(rest);
        if (j >= e.count || e.lanes[j].now == DONE) continue;
        if (e.lanes[j].op != first.op || !same_site(e.lanes[j].at, first.at))
            fail(j, "lanes of the mask %08x are in different warp operations, another at %s:%d", mask, first.at.file,
                 first.at.line);
        here |= 1u << (j - base);
        if (e.lanes[j].bits) ballot |= 1u << (j - base);
    }
    for (unsigned rest = here; rest; rest &= rest - 1) {
        int j = base + __builtin_ctz(rest);
        lane_state &l = e.lanes[j];
        l.result = first.op == SHUFFLE ? shuffled(base, j) : ballot;
        if (first.op != MATCH) continue;
        l.result = 0;
        for (int i = 0; i < 32; i++)
            if (here >> i & 1 && e.lanes[base + i].bits == l.bits) l.result |= 1u << i;
    }
    for (unsigned rest = here; rest; rest &= rest - 1) e.lanes[base + __builtin_ctz(rest)].now = RUNS;
    e.warp_turn[base / 32]++;
}

uint64_t warp(warp_op op, unsigned mask, uint64_t bits, int source, site at) {
    must_be_fiber("a warp operation", at);
    int me = e.current, base = me & ~31;
    lane_state &l = e.lanes[me];
    l.op = op, l.mask = mask, l.bits = bits, l.source = source, l.at = at;
    if (!(mask >> (me & 31) & 1))
        fail(me, "a warp operation whose mask %08x does not have the calling lane %d", mask, me & 31);
    char *token = &e.warps[base / 32][e.warp_turn[base / 32] & 1];
    fiber_release(token);
    l.now = IN_WARP_OP;
    if (all_here(base, mask)) answer_warp(base, mask, l);
    else wait_as(l, IN_WARP_OP);
    fiber_acquire(token);
    return l.result;
}

void fence() {
    fiber_release(&e.fences);
    fiber_acquire(&e.fences);
}

// ---- a block --------------------------------------------------------------------------------------------------
static void lane_entry() {
    fiber_arrived();
    fiber_acquire(&e.start);
    e.k->call(e.args);
    fiber_release(&e.end);
    lane_state &l = e.lanes[e.current];
    l.now = DONE;
    fiber_leave(&l.f, true);
    abort();
}

static void run_lane(int i) {
    e.current = i;
    threadIdx = e.lanes[i].id;
    fiber_enter(&e.lanes[i].f);
    e.current = -1;
}

// One turn for each lane that can run, in the schedule's order; false when none could.
static bool run_lanes(int *order) {
    bool ran = false;
    for (int i = e.count - 1; e.schedule == 2 && i > 0; i--) {
        int j = (int)random_below((unsigned)i + 1), t = order[i];
        order[i] = order[j], order[j] = t;
    }
    for (int q = 0; q < e.count; q++) {
        int i = e.schedule == 1 ? e.count - 1 - q : e.schedule == 2 ? order[q] : q;
        if (e.lanes[i].now != RUNS) continue;
        run_lane(i);
        ran = true;
    }
    return ran;
}

static bool run_warp(int base, bool backwards) {
    bool ran = false, again = true;
    int n = e.count - base < 32 ? e.count - base : 32;
    while (again) {
        again = false;
        for (int q = 0; q < n; q++) {
            int i = base + (backwards ? n - 1 - q : q);
            if (e.lanes[i].now != RUNS) continue;
            run_lane(i);
            ran = again = true;
        }
    }
    return ran;
}

static bool run_warps() {
    int warps = (e.count + 31) / 32, shift = e.schedule == 5 ? (int)random_below((unsigned)warps) : 0;
    bool ran = false;
    for (int q = 0; q < warps; q++) {
        int w = e.schedule == 4 ? warps - 1 - q : (q + shift) % warps;
        bool backwards = e.schedule == 4 || (e.schedule == 5 && random_below(2));
        if (run_warp(w * 32, backwards)) ran = true;
    }
    return ran;
}

static void answer_barrier(int first, int waiting) {
    if (waiting < e.count) {
        for (int i = 0; i < e.count; i++)
            if (e.lanes[i].now == IN_WARP_OP) fail(i, "deadlock: it waits for lanes of the mask %08x", e.lanes[i].mask);
        fail(first, "divergent barrier: %d of %d threads are at __syncthreads, the others have returned", waiting,
             e.count);
    }
    int yes = 0;
    for (int i = 0; i < e.count; i++) {
        lane_state &l = e.lanes[i];
        if (l.kind != e.lanes[first].kind || !same_site(l.at, e.lanes[first].at))
            fail(i, "divergent barrier: threads are at different ones, another at %s:%d", e.lanes[first].at.file,
                 e.lanes[first].at.line);
        yes += l.predicate;
    }
    for (int i = 0; i < e.count; i++) {
        lane_state &l = e.lanes[i];
        l.answer = l.kind == BARRIER_COUNT ? yes : l.kind == BARRIER_OR ? yes > 0 : yes == e.count;
        l.now = RUNS;
    }
    e.barrier_turn++;
}

// Nobody can run. Lanes that returned do not count in a mask, so a warp operation may be whole now; then the barrier.
// False when all are done.
static bool wake() {
    int first = -1, waiting = 0, done = 0;
    for (int i = 0; i < e.count; i++) {
        lane_state &l = e.lanes[i];
        if (l.now == IN_WARP_OP && all_here(i & ~31, l.mask)) {
            answer_warp(i & ~31, l.mask, l);
            return true;
        }
        done += l.now == DONE;
        waiting += l.now == AT_BARRIER;
        if (l.now == AT_BARRIER && first < 0) first = i;
    }
    if (done == e.count) return false;
    if (first >= 0) {
        answer_barrier(first, waiting);
        return true;
    }
    for (int i = 0; i < e.count; i++)
        if (e.lanes[i].now == IN_WARP_OP) fail(i, "deadlock: it waits for lanes of the mask %08x", e.lanes[i].mask);
    return false;
}

static void run_block() {
    static int order[most_lanes];
    for (int i = 0; i < e.count; i++) {
        lane_state &l = e.lanes[i];
        l.now = RUNS;
        l.at.file = nullptr;
        order[i] = i;
        fiber_prepare(&l.f, lane_entry);
    }
    fiber_release(&e.start);
    do {
        while (e.schedule < 3 ? run_lanes(order) : run_warps()) {
        }
    } while (wake());
    fiber_acquire(&e.end);
    check_shared();
}

static void number_lanes() {
    e.count = (int)(blockDim.x * blockDim.y * blockDim.z);
    while (e.stacks < e.count) fiber_create(&e.lanes[e.stacks++].f);
    for (int i = 0; i < e.count; i++) {
        unsigned u = (unsigned)i;
        e.lanes[i].id = {u % blockDim.x, u / blockDim.x % blockDim.y, u / blockDim.x / blockDim.y};
    }
}

// ---- a launch -------------------------------------------------------------------------------------------------
// All threads as plain loops, backwards in the odd schedules.
static void run_flat_block() {
    bool backwards = e.schedule & 1;
    e.current = -1;
    for (unsigned z = 0; z < blockDim.z; z++)
        for (unsigned y = 0; y < blockDim.y; y++)
            for (unsigned x = 0; x < blockDim.x; x++) {
                threadIdx.x = backwards ? blockDim.x - 1 - x : x;
                threadIdx.y = backwards ? blockDim.y - 1 - y : y;
                threadIdx.z = backwards ? blockDim.z - 1 - z : z;
                e.k->call(e.args);
            }
}

// The q-th of n blocks to run: a permutation of them without a table.
static uint64_t block_at(uint64_t q, uint64_t n, uint64_t from) {
    if (e.schedule == 1 || e.schedule == 4) return n - 1 - q;
    if (e.schedule == 2 || e.schedule == 5) return (from + q) % n;
    return q;
}

// Not 0: only so many blocks run, from the first to the last (tests/cuda/double/probe.c). At least 2.
extern "C" __attribute__((visibility("default"))) unsigned ddp_emu_most_blocks;
unsigned ddp_emu_most_blocks;

void launch(const kernel &k, const unsigned grid[3], const unsigned block[3], size_t shared, const void *args) {
    start();
    uint64_t n = (uint64_t)grid[0] * grid[1] * grid[2], threads = (uint64_t)block[0] * block[1] * block[2];
    e.k = &k;
    e.args = args;
    e.shared = shared;
    gridDim = {grid[0], grid[1], grid[2]};
    blockDim = {block[0], block[1], block[2]};
    if (!n || !threads || threads > most_lanes || shared > most_shared) fail(-1, "an impossible launch");
    if (k.flat && shared) fail(-1, "dynamic shared memory for a kernel marked FLAT");
    bool flat = k.flat && e.flat_allowed;
    if (!flat) number_lanes();
    poison_shared(!flat || e.check);
    uint64_t from = e.schedule == 2 || e.schedule == 5 ? random_below((unsigned)(n < ~0u ? n : ~0u)) : 0;
    uint64_t some = ddp_emu_most_blocks && ddp_emu_most_blocks < n ? ddp_emu_most_blocks : n;
    for (uint64_t q = 0; q < some; q++) {
        uint64_t b = some < n ? q * (n - 1) / (some - 1) : block_at(q, n, from);
        blockIdx = {(unsigned)(b % grid[0]), (unsigned)(b / grid[0] % grid[1]), (unsigned)(b / grid[0] / grid[1])};
        if (flat) {
            run_flat_block();
            continue;
        }
        if (q && (e.check || shared)) poison_shared(e.check);
        run_block();
    }
    if (k.flat) check_flat();
    e.k = nullptr;
}
} // namespace emu
