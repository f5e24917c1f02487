// The emulator's own tests. Every case runs in a child process, so that its schedule is read anew and a bug may end it.
// Built three times: plain, with AddressSanitizer, with ThreadSanitizer; the sanitized ones run the cases that need them.
#include "test_args.h"
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <functional>
#include <string>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#define ENTRY(name) \
    extern "C" void ddp_emu_##name(const unsigned grid[3], const unsigned block[3], size_t shared, const void *args);
#define KERNEL(name, args, flags) ENTRY(name)
#define KERNEL_FLOATS(name, args, flags) ENTRY(name##_f32) ENTRY(name##_f64) ENTRY(name##_f16) ENTRY(name##_bf16)
#include "test_kernels.def"

typedef void entry(const unsigned grid[3], const unsigned block[3], size_t shared, const void *args);
static void launch(entry *k, unsigned blocks, unsigned threads, size_t shared, const void *args) {
    unsigned grid[3] = {blocks, 1, 1}, block[3] = {threads, 1, 1};
    k(grid, block, shared, args);
}

static int failures;
static void verdict(const std::string &name, bool ok, const std::string &why) {
    if (ok) printf("ok %s\n", name.c_str());
    else printf("not ok %s: %s\n", name.c_str(), why.c_str()), failures++;
    fflush(stdout);
}

struct outcome {
    int status; // of the child; 0: it returned and said yes; 1: it said no
    std::string text;
};
static std::string setting(int schedule, int seed = 1) {
    return "DDP_EMU_SCHEDULE=" + std::to_string(schedule) + " DDP_EMU_SEED=" + std::to_string(seed);
}

// Runs `body` in a child with these variables set ("A=1 B=2"); what it printed on stderr is kept.
static outcome child(const std::string &variables, const std::function<bool()> &body) {
    int ends[2];
    if (pipe(ends)) abort();
    fflush(stdout);
    pid_t pid = fork();
    if (pid == 0) {
        dup2(ends[1], 2);
        close(ends[0]);
        std::string rest = variables;
        for (char *word = strtok(&rest[0], " "); word; word = strtok(nullptr, " ")) putenv(strdup(word));
        alarm(60);
        _exit(body() ? 0 : 1);
    }
    close(ends[1]);
    outcome o;
    char part[4096];
    for (ssize_t n; (n = read(ends[0], part, sizeof part)) > 0;) o.text.append(part, (size_t)n);
    close(ends[0]);
    int status;
    waitpid(pid, &status, 0);
    o.status = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
    return o;
}

static std::string describe(const outcome &o) {
    return "status " + std::to_string(o.status) + ", " + o.text.substr(0, 700);
}

// ---- data -----------------------------------------------------------------------------------------------------
static const int rows = 5, cols = 300;
static float x[rows * cols], y[rows * cols], a_matrix[64 * 64], b_matrix[64 * 64];
static int32_t ints[512];
static int64_t wide[8];

static void fill() {
    for (int i = 0; i < rows * cols; i++) x[i] = (float)((i * 37) % 101) / 16.f - 3.f, y[i] = NAN;
    for (int i = 0; i < 64 * 64; i++) a_matrix[i] = (float)(i % 17 - 8), b_matrix[i] = (float)(i % 13 - 6);
    memset(ints, 0, sizeof ints);
    memset(wide, 0, sizeof wide);
}
static bool close_to(double got, double want) { return fabs(got - want) <= 1e-3 * (1 + fabs(want)); } // false for NaN
static const reduce_args reduce = {x, y, rows, cols};

static bool sums_are_right() {
    for (int r = 0; r < rows; r++) {
        double want = 0;
        for (int c = 0; c < cols; c++) want += x[r * cols + c];
        if (!close_to(y[r], want)) return false;
    }
    return true;
}

// ---- what it must run -----------------------------------------------------------------------------------------
static bool runs_sum() {
    launch(ddp_emu_row_sum, rows, 128, 0, &reduce);
    return sums_are_right();
}

static bool runs_softmax() {
    launch(ddp_emu_row_softmax, rows, 256, 0, &reduce);
    for (int r = 0; r < rows; r++) {
        double sum = 0;
        for (int c = 0; c < cols; c++) sum += exp((double)x[r * cols + c]);
        for (int c = 0; c < cols; c++)
            if (!close_to(y[r * cols + c], exp((double)x[r * cols + c]) / sum)) return false;
    }
    return true;
}

static bool runs_gemm() {
    const int m = 30, n = 23, k = 41;
    gemm_args g = {a_matrix, b_matrix, y, m, n, k};
    unsigned grid[3] = {(n + 15) / 16, (m + 15) / 16, 1}, block[3] = {16, 16, 1};
    ddp_emu_gemm(grid, block, 2048, &g);
    for (int i = 0; i < m; i++)
        for (int j = 0; j < n; j++) {
            double want = 0;
            for (int l = 0; l < k; l++) want += a_matrix[i * k + l] * b_matrix[l * n + j];
            if (!close_to(y[i * n + j], want)) return false;
        }
    return true;
}

static bool runs_warp_ops() {
    ints_args a = {ints, wide, y, 0};
    launch(ddp_emu_warp_ops, 1, 96, 0, &a);
    bool ok = (unsigned)ints[32] == 0x55555555u && ints[33] == 32 && ints[34] == 1 && ints[35] == 1;
    for (int t = 0; t < 32; t++) ok = ok && ints[t] == (t < 3 ? t : t - 3);
    memset(ints, 0, sizeof ints);
    launch(ddp_emu_votes, 1, 32, 0, &a);
    for (int t = 0; t < 32; t++) ok = ok && ints[t] == 3 && (unsigned)ints[32 + t] == 0x11111111u << t % 4;
    return ok;
}

static bool runs_shuffles() {
    ints_args a = {ints, wide, y, 0};
    launch(ddp_emu_shuffles, 1, 32, 0, &a);
    bool ok = true;
    for (int t = 0; t < 32; t++) {
        int group = t / 8 * 8 + 5;
        for (int k = 0; k < 4; k++) ok = ok && ints[32 * k + t] == group;
        ok = ok && ints[128 + t] == (t < 31 ? t + 1 : t) && ints[160 + t] == (t ^ 1);
        ok = ok && ints[192 + t] == (t % 4 < 2 ? t + 2 : t) && ints[224 + t] == (t % 16 ? t - 1 : t);
    }
    return ok;
}

static bool runs_half_warps() {
    ints_args a = {ints, wide, y, 0};
    launch(ddp_emu_half_warps, 1, 32, 0, &a);
    bool ok = true;
    for (int t = 0; t < 24; t++) ok = ok && ints[t] == (t < 16 ? t ^ 1 : t ^ 2);
    for (int t = 0; t < 16; t++) ok = ok && ints[32 + t] == 0x0000ffff;
    return ok;
}

static bool runs_atomics() {
    ints_args a = {ints, wide, y, 0};
    y[0] = 0, ints[4] = -1;
    launch(ddp_emu_atomics, 3, 64, 0, &a);
    double quarter;
    memcpy(&quarter, &wide[1], sizeof quarter);
    return ints[0] == 192 && ints[1] == 191 && ints[2] == -191 && ints[3] == -1 && ints[4] == -256 &&
           ints[5] == ints[6] && ints[5] > 0 && wide[0] == 192ll << 32 && y[0] == 96 && quarter == 48;
}

static bool runs_last_block() {
    ints_args a = {ints, wide, y, 0};
    launch(ddp_emu_last_block, 10, 64, 0, &a);
    return y[0] == 45;
}

static bool runs_flat() {
    scale_args s = {x, y, 2, 1, rows * cols};
    launch(ddp_emu_scale, 3, 64, 0, &s);
    for (int i = 0; i < rows * cols; i++)
        if (!(y[i] == 2 * x[i] + 1)) return false;
    launch(ddp_emu_twice_bf16, 6, 256, 0, &s);
    return close_to(y[1], 2 * x[1]);
}

static const struct {
    const char *name;
    bool (*run)();
} good[] = {{"row sum", runs_sum},
            {"softmax", runs_softmax},
            {"tiled product", runs_gemm},
            {"ballots, votes and counting barriers", runs_warp_ops},
            {"shuffles of every type and width", runs_shuffles},
            {"halves of a warp apart", runs_half_warps},
            {"atomics", runs_atomics},
            {"the last block adds up", runs_last_block},
            {"flat kernels", runs_flat}};

static void test_good(const char *suffix) {
    for (auto &g : good)
        for (int schedule = 0; schedule < 6; schedule++) {
            outcome o = child(setting(schedule) + " DDP_EMU_CHECK=1 DDP_EMU_FLAT=" + (schedule == 5 ? "0" : "1"), [&] {
                fill();
                return g.run();
            });
            verdict(std::string("emulator") + suffix + ": " + g.name + ", schedule " + std::to_string(schedule),
                    o.status == 0 && o.text.empty(), describe(o));
        }
}

// ---- bugs that it must name -----------------------------------------------------------------------------------
struct bug {
    const char *name;
    entry *kernel;
    unsigned threads;
    size_t shared;
    const char *text; // of the message
};
static const bug bugs[] = {
    {"divergent barrier", ddp_emu_bug_divergent_barrier, 64, 0,
     "divergent barrier: 54 of 64 threads are at __syncthreads"},
    {"two barriers at once", ddp_emu_bug_two_barriers, 64, 0, "divergent barrier: threads are at different ones"},
    {"partial-mask shuffle", ddp_emu_bug_partial_mask, 64, 0, "is not in the mask 0000ffff"},
    {"shuffle from a lane that is not there", ddp_emu_bug_absent_lane, 16, 0, "which is not there"},
    {"caller outside its mask", ddp_emu_bug_not_in_mask, 64, 0, "does not have the calling lane"},
    {"deadlock of a warp", ddp_emu_bug_deadlock, 64, 0, "deadlock: it waits for lanes of the mask ffffffff"},
    {"write past dynamic shared memory", ddp_emu_bug_dynamic_slack, 64, cols * 4 - 4,
     "past the end of 1196 bytes of dynamic shared memory"},
};
static const bug flat_bugs[] = {
    {"barrier in a flat kernel", ddp_emu_bug_flat_barrier, 64, 0, "__syncthreads in a kernel marked FLAT"},
    {"shuffle in a flat kernel", ddp_emu_bug_flat_shuffle, 64, 0, "a warp operation in a kernel marked FLAT"},
    {"shared memory in a flat kernel", ddp_emu_bug_flat_shared, 64, 0, "shared memory written in a kernel marked FLAT"},
};

static void expect_named(const bug &b, const void *args) {
    for (int schedule : {0, 2, 4}) {
        outcome o = child(setting(schedule) + " DDP_EMU_CHECK=1", [&] {
            fill();
            launch(b.kernel, 2, b.threads, b.shared, args);
            return true;
        });
        bool named = o.status == 99 && o.text.find(b.text) != std::string::npos &&
                     o.text.find("kernel bug_") != std::string::npos && o.text.find("block (") != std::string::npos;
        verdict(std::string("emulator catches: ") + b.name + ", schedule " + std::to_string(schedule), named,
                describe(o));
    }
}

// The sums are wrong (NaN counts as wrong) in at least one schedule: what a test that compares results would see.
static void expect_wrong(const char *name, entry *kernel, const char *correct, entry *right) {
    int wrong = 0;
    for (int schedule = 0; schedule < 6; schedule++) {
        outcome o = child(setting(schedule), [&] {
            fill();
            launch(kernel, rows, 256, 0, &reduce);
            return sums_are_right();
        });
        wrong += o.status == 1;
    }
    verdict(std::string("emulator catches: ") + name, wrong > 0, "the sums were right in all six schedules");
    outcome o = child(setting(2), [&] {
        fill();
        launch(right, rows, 256, 0, &reduce);
        return sums_are_right();
    });
    verdict(std::string("emulator passes: ") + correct, o.status == 0 && o.text.empty(), describe(o));
}

static void test_guard_page() {
    outcome o = child(setting(0), [&] {
        fill();
        launch(ddp_emu_bug_dynamic_overrun, 1, 64, 256, &reduce);
        return true;
    });
    verdict("emulator catches: dynamic shared memory overrun by a page fault", o.status == 128 + 11, describe(o));
}

// A schedule is a function of its seed: the order of lanes shows in a sum that races on purpose.
static void test_seeds() {
    auto *order = (float *)mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    auto run = [&](int seed, int at) {
        child(setting(2, seed), [&] {
            fill();
            ints_args a = {ints, wide, y, 0};
            launch(ddp_emu_atomics, 1, 64, 0, &a);
            order[at] = (float)ints[5];
            return true;
        });
    };
    run(7, 0), run(7, 1);
    int differ = 0;
    for (int seed = 1; seed <= 8; seed++) run(seed, 1 + seed), differ += order[1 + seed] != order[2];
    verdict("emulator: the same seed gives the same order", order[0] == order[1] && order[0] > 0, "it did not");
    verdict("emulator: another seed gives another order", differ > 0, "eight seeds, one order");
}

static void test_flat_order() {
    int wrong = 0;
    for (int schedule : {0, 1}) {
        outcome o = child(setting(schedule), [&] {
            fill();
            scale_args s = {x, y, 0, 0, 0};
            launch(ddp_emu_bug_flat_order, 1, 64, 0, &s);
            return y[63] == y[63];
        });
        wrong += o.status == 1;
    }
    verdict("emulator catches: flat threads that depend on each other", wrong == 1, "both orders gave the same");
}

static double nanoseconds(entry *k, unsigned blocks, unsigned threads, const void *args) {
    timespec from, to;
    double best = 1e9;
    for (int i = 0; i < 5; i++) {
        clock_gettime(CLOCK_MONOTONIC, &from);
        launch(k, blocks, threads, 0, args);
        clock_gettime(CLOCK_MONOTONIC, &to);
        double ns = ((double)(to.tv_sec - from.tv_sec) * 1e9 + (double)(to.tv_nsec - from.tv_nsec)) / blocks / threads;
        if (ns < best) best = ns;
    }
    return best;
}

static void print_speed() {
    fill();
    scale_args s = {x, y, 2, 1, rows * cols};
    reduce_args one = {x, y, 1, cols};
    printf("# %.1f ns a thread of a flat kernel, ", nanoseconds(ddp_emu_scale, 4000, 256, &s));
    unsigned blocks = 1;
    double ns = nanoseconds(ddp_emu_row_sum, blocks, 256, &one);
    printf("%.0f ns a thread of a block sum (10 shuffles, 1 barrier)\n", ns);
}

// ---- with a sanitizer -----------------------------------------------------------------------------------------
static void expect_report(const char *name, const char *text, const std::function<bool()> &body) {
    outcome o = child("DDP_EMU_SCHEDULE=0 DDP_EMU_FLAT=0", body);
    verdict(name, o.status != 0 && o.text.find(text) != std::string::npos, describe(o));
}
static void test_address() {
    test_good(" (AddressSanitizer)");
    expect_report("AddressSanitizer catches: out-of-bounds shared", "global-buffer-overflow", [] {
        fill();
        launch(ddp_emu_bug_shared_overrun, rows, 128, 0, &reduce);
        return true;
    });
}
static void test_thread() {
    test_good(" (ThreadSanitizer)");
    struct {
        const char *name;
        entry *kernel;
    } races[] = {{"missing barrier", ddp_emu_bug_missing_barrier}, {"write after read", ddp_emu_bug_write_after_read}};
    for (auto &r : races)
        expect_report((std::string("ThreadSanitizer catches: ") + r.name).c_str(), "data race", [&] {
            fill();
            launch(r.kernel, rows, 256, 0, &reduce);
            return true;
        });
    expect_report("ThreadSanitizer catches: race in global memory", "data race", [] {
        fill();
        scale_args s = {x, y, 0, 0, 0};
        launch(ddp_emu_bug_global_race, 1, 64, 0, &s);
        return true;
    });
    expect_report("ThreadSanitizer catches: flat threads that depend on each other", "data race", [] {
        fill();
        scale_args s = {x, y, 0, 0, 0};
        launch(ddp_emu_bug_flat_order, 1, 64, 0, &s);
        return true;
    });
}

#if defined(__SANITIZE_ADDRESS__)
static const char built[] = "address";
#elif defined(__SANITIZE_THREAD__)
static const char built[] = "thread";
#else
static const char built[] = "plain";
#endif

static void test_plain() {
    scale_args s = {x, y, 0, 0, 0};
    test_good("");
    for (auto &b : bugs) expect_named(b, &reduce);
    for (auto &b : flat_bugs) expect_named(b, &s);
    expect_wrong("missing barrier", ddp_emu_bug_missing_barrier, "the barrier there", ddp_emu_row_sum);
    expect_wrong("write after read", ddp_emu_bug_write_after_read, "two barriers", ddp_emu_row_sum);
    expect_wrong("uninitialised shared memory", ddp_emu_bug_uninitialised, "all of it written", ddp_emu_row_sum);
    test_guard_page();
    test_seeds();
    test_flat_order();
    print_speed();
}

int main() {
    if (!strcmp(built, "address")) test_address();
    else if (!strcmp(built, "thread")) test_thread();
    else test_plain();
    return failures != 0;
}
