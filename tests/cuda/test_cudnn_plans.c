/* test_cudnn_plans.c -- which plan computes a call: kept in memory and in files, with less workspace where there is none, measured where
 * that is asked for; and what remains after a call of cuDNN's failed. The GPU around it is made up here. */
/* with: kernels/cudnn/graph.c kernels/cudnn/engine.c kernels/cudnn/conv_graph.c kernels/cudnn/plan.c kernels/cudnn/plan_file.c */
#include "cudnn_test.h"
#include "../../kernels/cudnn/conv.h"
#include "../../kernels/cudnn/plan.h"

#include <dirent.h>
#include <unistd.h>

/* ---- a GPU of the test's own -------------------------------------------------------------------------------------------- */

static ddp_gpu gpu = {.prop = {.name = "made up", .major = 9}};
static size_t most_scratch = SIZE_MAX, taken;
static int runs, held; /* held: scratch that was not given back */

ddp_gpu *ddp__gpu_of(const ddp_call *c) { return c ? &gpu : NULL; }
int ddp__cuda_need(ddp_cuda_lib lib) { return lib == DDP_LIB_CUDNN ? 0 : DDP_ENOSUP; }
const char *ddp__cuda_missing(ddp_cuda_lib lib) { return lib == DDP_LIB_CUDNN ? NULL : "not in this test"; }
void *ddp__cuda_scratch_take(const ddp_call *c, size_t bytes) {
    if (bytes > most_scratch) {
        ddp__fail(DDP_ENOMEM, "%s: out of GPU memory: %zu bytes wanted", c->op->name, bytes);
        return NULL;
    }
    taken = bytes;
    held++;
    return aligned_alloc(256, (bytes + 255) / 256 * 256);
}
void ddp__cuda_scratch_give(const ddp_call *c, void *p, size_t bytes) {
    if (!c || bytes != taken) fail("scratch of %zu bytes is given back as %zu", taken, bytes);
    held--;
    free(p);
}

/* Run i of a tuning takes what speed says. */
static float milliseconds[64];
static cudaError_t event_create(cudaEvent_t *e, unsigned flags) {
    *e = (cudaEvent_t)malloc(1);
    return flags == cudaEventDefault ? cudaSuccess : cudaErrorInvalidValue;
}
static cudaError_t event_destroy(cudaEvent_t e) {
    free(e);
    return cudaSuccess;
}
static cudaError_t event_record(cudaEvent_t e, cudaStream_t s) { return e && !s ? cudaSuccess : cudaErrorInvalidValue; }
static cudaError_t event_synchronize(cudaEvent_t e) { return e ? cudaSuccess : cudaErrorInvalidValue; }
static cudaError_t event_elapsed(float *ms, cudaEvent_t from, cudaEvent_t to) {
    *ms = milliseconds[runs++ / 4 % 64]; /* a warm-up and three runs a plan */
    return from != to ? cudaSuccess : cudaErrorInvalidValue;
}
static cudaError_t stream_synchronize(cudaStream_t s) { return s ? cudaErrorInvalidValue : cudaSuccess; }

/* ---- one call -------------------------------------------------------------------------------------------------------------- */

static const ddp_op_def op = {.name = "conv2d", .id = 7};

typedef struct call {
    ddp_call c;
    ddp_tensor x;
    ddp_tensor *in[1];
    conv v;
    plan_key k;
    double *number[4];
    void *p[4];
} call;

static int build(cg_graph *g, const void *ctx) { return conv_graph(g, ctx); }

static void layout(const int64_t *size, int64_t *s) {
    s[1] = 1;
    s[3] = size[1];
    s[2] = s[3] * size[3];
    s[0] = s[2] * size[2];
}

/* x [2, 16, 6, 6] by a window of 3x3 to k channels, channels-last, with a bias. */
static void start(call *a, ddp_dtype d, cg_conv_kind kind, conv_after after, int64_t k) {
    memset(a, 0, sizeof *a);
    a->x.m.dtype = d;
    a->in[0] = &a->x;
    a->c = (ddp_call){.op = &op, .n_in = 1, .in = a->in};
    a->v = (conv){.kind = kind,
                  .dtype = d,
                  .after = after,
                  .vector = after == CONV_NORMED ? ddp__wide(d) : d,
                  .groups = 1,
                  .x = {2, 16, 6, 6},
                  .w = {k, 16, 3, 3},
                  .y = {2, k, 6, 6},
                  .align = {16, 16, 16, 16},
                  .stride = {1, 1},
                  .padding = {1, 1},
                  .dilation = {1, 1}};
    layout(a->v.x, a->v.x_stride);
    layout(a->v.w, a->v.w_stride);
    layout(a->v.y, a->v.y_stride);
    const int64_t n[4] = {2 * 16 * 36, k * 16 * 9, 2 * k * 36, k};
    for (int i = 0; i < 4; i++) {
        a->number[i] = random_numbers(n[i]);
        a->p[i] = packed(i == 3 ? (ddp_dtype)a->v.vector : d, n[i], a->number[i]);
    }
    plan_key_start(&a->k, &a->c);
    plan_key_add(&a->k, (int)(sizeof a->v / 8), (const int64_t *)(const void *)&a->v);
}

static void end_call(call *a) {
    for (int i = 0; i < 4; i++) {
        free(a->number[i]);
        free(a->p[i]);
    }
}

static int go(call *a) {
    static const int64_t uid[] = {CONV_X, CONV_W, CONV_Y, CONV_BIAS, CONV_SCALE};
    void *const ptr[] = {a->p[0], a->p[1], a->p[2], a->p[3], a->p[3]};
    return plan_run(&a->c, &a->k, build, &a->v, 5, uid, ptr);
}

/* The first element of a forward, by a loop: corner (0, 0) of image 0, channel 0. */
static void check_first(const call *a) {
    double sum = 0;
    for (int64_t c = 0; c < 16; c++)
        for (int64_t r = 1; r < 3; r++)
            for (int64_t s = 1; s < 3; s++)
                sum += a->number[0][c + 16 * (s - 1) + 96 * (r - 1)] * a->number[1][c + 16 * s + 48 * r];
    if (a->v.after == CONV_NORMED) sum *= a->number[3][0];
    if (a->v.after != CONV_PLAIN) sum += a->number[3][0];
    compare("a corner", (ddp_dtype)a->v.dtype, 1, a->p[2], &sum, tolerance((ddp_dtype)a->v.dtype, 64));
}

static void ok(int st) {
    const char *text;
    if (st == 0) return;
    ddp_error_take(&text);
    fail("status %d: %s", st, text);
}

static char cache[64];

static int files(void) {
    int n = 0;
    DIR *d = opendir(cache);
    for (struct dirent *e; d && (e = readdir(d));) n += strstr(e->d_name, ".plan") != NULL;
    if (d) closedir(d);
    return n;
}

/* fn(path) for each file of the cache. */
static void each_file(void (*fn)(const char *path)) {
    char path[400];
    DIR *d = opendir(cache);
    for (struct dirent *e; d && (e = readdir(d));) {
        if (e->d_name[0] == '.') continue;
        snprintf(path, sizeof path, "%s/%s", cache, e->d_name);
        fn(path);
    }
    if (d) closedir(d);
}
static void remove_file(const char *path) { unlink(path); }

/* Counts since `from`. */
static void expect(plan_counts from, int hits, int made, int from_file) {
    plan_counts n = ddp__cudnn_counts();
    if (n.hits - from.hits != hits || n.made - from.made != made || n.from_file - from.from_file != from_file)
        fail("%lld found in memory, %lld made, %lld from files; expected %d, %d, %d", (long long)(n.hits - from.hits),
             (long long)(n.made - from.made), (long long)(n.from_file - from.from_file), hits, made, from_file);
}

/* ---- tests -------------------------------------------------------------------------------------------------------------------- */

static void in_memory(void) {
    call a, b;
    plan_counts from = ddp__cudnn_counts();
    start(&a, DDP_F32, CG_FORWARD, CONV_BIASED, 8);
    start(&b, DDP_F32, CG_FORWARD, CONV_BIASED, 16);
    ok(go(&a));
    check_first(&a);
    ok(go(&a));
    expect(from, 1, 1, 0);
    ok(go(&b));
    check_first(&b);
    expect(from, 1, 2, 0);
    if (plan_missing(&a.c, &a.k, build, &a.v)) fail("a plan that ran is missing");
    end_call(&a);
    end_call(&b);
    ddp__cudnn_clear();
}

static void precision_is_part(void) {
    call a, b, d;
    plan_counts from = ddp__cudnn_counts();
    start(&a, DDP_F32, CG_GRAD_INPUT, CONV_PLAIN, 8);
    ddp_set_float32_matmul_precision(DDP_F32_HIGH);
    start(&b, DDP_F32, CG_GRAD_INPUT, CONV_PLAIN, 8);
    ddp_set_float32_matmul_precision(DDP_F32_HIGHEST);
    ddp_set_deterministic(1);
    start(&d, DDP_F32, CG_GRAD_INPUT, CONV_PLAIN, 8);
    ddp_set_deterministic(0);
    ok(go(&a));
    ok(go(&b));
    ok(go(&d));
    expect(from, 0, 3, 0);
    end_call(&a);
    end_call(&b);
    end_call(&d);
    ddp__cudnn_clear();
}

/* A process that starts again (here: forgets its plans) takes them from files. */
static void restart(conv_after after, ddp_dtype d) {
    call a;
    setenv("DDP_CACHE", cache, 1);
    plan_counts from = ddp__cudnn_counts();
    start(&a, d, CG_FORWARD, after, 8);
    ok(go(&a));
    expect(from, 0, 1, 0);
    if (files() != 1) fail("%d files after one plan", files());
    ddp__cudnn_clear();
    memset(a.p[2], 0xff, 64);
    ok(go(&a));
    check_first(&a);
    expect(from, 0, 1, 1);
    ddp__cudnn_clear();
    end_call(&a);
}
static void from_files(void) { restart(CONV_BIASED, DDP_F32); }
static void compiled_from_files(void) { restart(CONV_NORMED, DDP_BF16); }

static void halve(const char *path) {
    if (truncate(path, 60)) fail("truncate");
}
/* One character of what was chosen, so that it still reads well: only the sum tells. */
static void flip(const char *path) {
    char text[8192];
    FILE *f = fopen(path, "r+");
    size_t n = f ? fread(text, 1, sizeof text - 1, f) : 0;
    text[n] = 0;
    char *at = strstr(text, "measured 0");
    if (!at) fail("no measured 0 in %s", path);
    else {
        fseek(f, at + 9 - text, SEEK_SET);
        fputc('1', f);
    }
    if (f) fclose(f);
}
static void empty(const char *path) {
    if (truncate(path, 0)) fail("truncate");
}

static void damaged(void) {
    void (*const damage[])(const char *) = {halve, flip, empty};
    call a;
    setenv("DDP_CACHE", cache, 1);
    start(&a, DDP_F32, CG_FORWARD, CONV_BIASED, 8);
    for (int i = 0; i < 3; i++) {
        ok(go(&a));
        ddp__cudnn_clear();
        each_file(damage[i]);
        plan_counts from = ddp__cudnn_counts();
        ok(go(&a));
        check_first(&a);
        expect(from, 0, 1, 0);
        ddp__cudnn_clear();
        from = ddp__cudnn_counts();
        ok(go(&a)); /* it was written anew */
        expect(from, 0, 0, 1);
        ddp__cudnn_clear();
    }
    end_call(&a);
}

static char newest[400];
static void remember(const char *path) { snprintf(newest, sizeof newest, "%s", path); }

/* Another call's file under a call's name: two keys of one hash. */
static void other_key(void) {
    call a, b;
    char of_a[400];
    setenv("DDP_CACHE", cache, 1);
    start(&a, DDP_F32, CG_FORWARD, CONV_BIASED, 32);
    start(&b, DDP_F32, CG_FORWARD, CONV_BIASED, 48); /* a key of the same length */
    ok(go(&a));
    each_file(remember);
    snprintf(of_a, sizeof of_a, "%s", newest);
    unlink(of_a);
    ddp__cudnn_clear();
    ok(go(&b));
    each_file(remember);
    if (strcmp(newest, of_a) == 0 || rename(newest, of_a)) fail("two keys have one file");
    ddp__cudnn_clear();
    plan_counts from = ddp__cudnn_counts();
    ok(go(&a));
    check_first(&a);
    expect(from, 0, 1, 0);
    ddp__cudnn_clear();
    end_call(&a);
    end_call(&b);
}

static void other_version(void) {
    call a;
    setenv("DDP_CACHE", cache, 1);
    start(&a, DDP_F32, CG_FORWARD, CONV_BIASED, 8);
    ok(go(&a));
    ddp__cudnn_clear();
    setenv("DDP_DOUBLE_CUDNN", "91000", 1);
    plan_counts from = ddp__cudnn_counts();
    ok(go(&a));
    expect(from, 0, 1, 0);
    ddp__cudnn_clear();
    unsetenv("DDP_DOUBLE_CUDNN");
    snprintf(gpu.prop.name, sizeof gpu.prop.name, "another");
    from = ddp__cudnn_counts();
    ok(go(&a));
    expect(from, 0, 1, 0);
    if (files() != 3) fail("%d files for two versions and two devices", files());
    snprintf(gpu.prop.name, sizeof gpu.prop.name, "made up");
    ddp__cudnn_clear();
    end_call(&a);
}

static void no_folder(void) {
    call a;
    setenv("DDP_CACHE", "/proc/nowhere/ddp", 1);
    start(&a, DDP_F32, CG_FORWARD, CONV_BIASED, 8);
    ok(go(&a));
    ddp__cudnn_clear();
    setenv("DDP_CACHE", "", 1);
    ok(go(&a));
    ddp__cudnn_clear();
    end_call(&a);
}

/* The workspace that is there decides the plan; where nothing is enough the error says so. */
static void less_workspace(void) {
    call a;
    start(&a, DDP_F32, CG_GRAD_INPUT, CONV_PLAIN, 32);
    taken = 0;
    ok(go(&a));
    size_t first = taken;
    if (first == 0) fail("the first plan wants no workspace: nothing is tested");
    most_scratch = first - 1;
    taken = 0;
    ok(go(&a));
    if (taken >= first) fail("a plan of %zu bytes ran", taken);
    if (ddp__pending()) fail("an error stayed");
    most_scratch = SIZE_MAX;
    ddp__cudnn_clear();
    end_call(&a);
}

static void no_workspace(void) {
    call a;
    const char *text = "";
    start(&a, DDP_F32, CG_GRAD_INPUT, CONV_PLAIN, 32);
    ddp_set_deterministic(1);
    plan_key_start(&a.k, &a.c);
    plan_key_add(&a.k, (int)(sizeof a.v / 8), (const int64_t *)(const void *)&a.v);
    ddp_set_deterministic(0);
    ok(go(&a));
    most_scratch = 0;
    int st = go(&a);
    ddp_error_take(&text);
    if (st != DDP_ENOMEM && st != 0) fail("status %d: %s", st, text);
    if (st == DDP_ENOMEM && (!strstr(text, "conv2d: cuDNN wants ") || !strstr(text, "MB of workspace") ||
                             !strstr(text, "out of GPU memory")))
        fail("the error is: %s", text);
    most_scratch = SIZE_MAX;
    ok(go(&a));
    ddp__cudnn_clear();
    setenv("DDP_CUDNN_WORKSPACE_MB", "0", 1);
    taken = 0;
    st = go(&a);
    if (st == 0 && taken) fail("DDP_CUDNN_WORKSPACE_MB=0: a plan of %zu bytes ran", taken);
    ddp_error_take(&text);
    unsetenv("DDP_CUDNN_WORKSPACE_MB");
    ddp__cudnn_clear();
    end_call(&a);
}

/* The line of what was chosen, as the file has it. */
static char chosen[2048];
static void read_chosen(const char *path) {
    char line[8192];
    FILE *f = fopen(path, "r");
    while (f && fgets(line, sizeof line, f))
        if (strncmp(line, "engine ", 7) == 0) snprintf(chosen, sizeof chosen, "%.2000s", line);
    if (f) fclose(f);
}

/* The same line for the second plan that cuDNN offers. */
static void write_second(const call *a, char *line, size_t room) {
    const cg_filter f = {.winograd = true, .workspace = 1 << 30};
    cg_plan p[PLAN_MOST];
    cg_graph g;
    cg_start(&g, "conv2d");
    conv_graph(&g, &a->v);
    cg_finish(&g);
    cg_desc device = cg_device(&g, handle, NULL);
    if (cg_plans(&g, device, &f, 2, p) < 2) fail("cuDNN offers less than 2 plans");
    size_t n = (size_t)snprintf(line, room, "engine %lld measured 1 knobs %d", (long long)p[1].choice.engine,
                                p[1].choice.n_knobs);
    for (int i = 0; i < p[1].choice.n_knobs; i++)
        n += (size_t)snprintf(line + n, room - n, " %lld=%lld", (long long)p[1].choice.knob[i].type,
                              (long long)p[1].choice.knob[i].value);
    snprintf(line + n, room - n, "\n");
    ddp__cuda.cudnnBackendDestroyDescriptor(device);
    cg_free(&g);
}

/* The plan that ran fastest is used, kept and found again. */
static void tuned(void) {
    call a;
    setenv("DDP_CACHE", cache, 1);
    setenv("DDP_TUNE", "1", 1);
    start(&a, DDP_F16, CG_FORWARD, CONV_BIASED, 8);
    for (int i = 0; i < 64; i++) milliseconds[i] = 5;
    runs = 0;
    milliseconds[1] = 1; /* the second plan */
    ok(go(&a));
    if (runs < 12) fail("only %d runs were measured", runs);
    check_first(&a);
    char want[2048];
    write_second(&a, want, sizeof want);
    each_file(read_chosen);
    if (strcmp(chosen, want) != 0) fail("chosen was %s, expected %s", chosen, want);
    int before = runs;
    ok(go(&a));
    if (runs != before) fail("a tuned call was measured again");
    ddp__cudnn_clear();
    plan_counts from = ddp__cudnn_counts();
    ok(go(&a));
    expect(from, 0, 0, 1);
    if (runs != before) fail("a tuned plan from a file was measured again");
    unsetenv("DDP_TUNE");
    ddp__cudnn_clear();
    end_call(&a);
}

/* Every call of cuDNN's fails once: an error that names the op, or another plan; nothing is left behind and the next call goes well. */
static void faults(void) {
    static const char *const functions[] = {
        "cudnnCreate",          "cudnnSetStream",           "cudnnBackendCreateDescriptor", "cudnnBackendSetAttribute",
        "cudnnBackendFinalize", "cudnnBackendGetAttribute", "cudnnBackendExecute"};
    long (*calls)(const char *) = NULL;
    void *lib = dlopen("libcudnn.so.9", RTLD_NOW | RTLD_NOLOAD);
    *(void **)&calls = lib ? dlsym(lib, "ddp_double_cudnn_calls") : NULL;
    if (!calls) {
        fail("no ddp_double_cudnn_calls");
        return;
    }
    call a;
    char seed_text[80];
    const char *text;
    setenv("DDP_CACHE", "", 1);
    start(&a, DDP_F32, CG_FORWARD, CONV_BIASED, 8);
    for (int f = 0; f < 7; f++) {
        calls("");
        ok(go(&a));
        long n = calls(functions[f]);
        ddp__cudnn_clear();
        if (n < 1) fail("%s is never called", functions[f]);
        long left = alive();
        for (long k = 1; k <= n && !wrong[0]; k++) {
            snprintf(seed_text, sizeof seed_text, "%s:%ld", functions[f], k);
            calls("");
            setenv("DDP_DOUBLE_FAIL", seed_text, 1);
            int st = go(&a);
            unsetenv("DDP_DOUBLE_FAIL");
            ddp_error_take(&text);
            if (st < 0 && !strstr(text, "conv2d")) fail("%s: the error does not name the op: %s", seed_text, text);
            if (st < 0 && f == 6 && !strstr(text, "told to fail"))
                fail("%s: the error does not say what cuDNN said: %s", seed_text, text);
            ddp__cudnn_clear();
            if (alive() != left) fail("%s: %ld descriptors are left", seed_text, alive() - left);
            if (held) fail("%s: scratch is left", seed_text);
        }
    }
    calls("");
    ok(go(&a)); /* the plan stays good where one run of it failed */
    setenv("DDP_DOUBLE_FAIL", "cudnnBackendExecute:2", 1);
    if (go(&a) == 0) fail("a failing run is no error");
    unsetenv("DDP_DOUBLE_FAIL");
    ddp_error_take(&text);
    memset(a.p[2], 0xff, 64);
    ok(go(&a));
    check_first(&a);
    ddp__cudnn_clear();
    end_call(&a);
}

static void (*current)(void);
static void with_scratch(void) {
    current();
    if (held) fail("%d times scratch was not given back", held);
}

static void clean(const char *name, void (*body)(void)) {
    each_file(remove_file);
    setenv("DDP_CACHE", "", 1);
    held = 0;
    current = body;
    test(name, with_scratch);
}

int main(void) {
    open_double();
    ddp__cuda.cudaEventCreateWithFlags = event_create;
    ddp__cuda.cudaEventDestroy = event_destroy;
    ddp__cuda.cudaEventRecord = event_record;
    ddp__cuda.cudaEventSynchronize = event_synchronize;
    ddp__cuda.cudaEventElapsedTime = event_elapsed;
    ddp__cuda.cudaStreamSynchronize = stream_synchronize;
    snprintf(cache, sizeof cache, "/tmp/ddp_cudnn_XXXXXX");
    if (!mkdtemp(cache)) return 2;
    clean("cuDNN: a plan is made once a shape", in_memory);
    clean("cuDNN: precision and determinism have plans of their own", precision_is_part);
    clean("cuDNN: plans come back from files", from_files);
    if (checked_by_cudnn()) clean("cuDNN: a compiled plan comes back from its file", compiled_from_files);
    clean("cuDNN: a damaged file is made anew", damaged);
    clean("cuDNN: a file of another key is not taken", other_key);
    clean("cuDNN: another version and another device do not take a file's plan", other_version);
    clean("cuDNN: plans need no folder", no_folder);
    clean("cuDNN: where memory is short, a plan with less workspace runs", less_workspace);
    clean("cuDNN: where no plan gets its workspace, the error says how much it wants", no_workspace);
    clean("cuDNN: DDP_TUNE=1 keeps the fastest plan", tuned);
    clean("cuDNN: a call that fails leaves nothing behind", faults);
    each_file(remove_file);
    rmdir(cache);
    return end();
}
