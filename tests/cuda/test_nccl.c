/* link: -lnccl */
/* The double of NCCL. A rank is a process of its own, or a thread; the first makes the unique id. */
#include "child.h"
#include "double/numbers.h"
#include "emu/test_args.h"

#include <nccl.h>

#include <fcntl.h>
#include <math.h>
#include <pthread.h>
#include <sys/mman.h>
#include <time.h>

enum { N = 3000, BIG = 3 << 20 };

/* ---- ranks as processes -------------------------------------------------------------------------------------------- */
static int ranks, rank;
static ncclUniqueId *shared_id; /* in memory that the ranks share */
static volatile int *shared_flag;
static ncclComm_t comm;
static cudaStream_t stream, other;
static float *x, *y, *host;

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static int start(void) {
    WORKS(cudaSetDevice(rank));
    if (rank == 0) {
        WORKS(ncclGetUniqueId(shared_id));
        shared_flag[0] = 1;
    }
    while (!shared_flag[0]) usleep(1000);
    WORKS(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    WORKS(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking));
    WORKS(cudaMalloc((void **)&x, BIG * sizeof *x));
    WORKS(cudaMalloc((void **)&y, BIG * sizeof *y));
    WORKS(cudaMallocHost((void **)&host, BIG * sizeof *host));
    return 0;
}
static int join(void) {
    WORKS(start());
    return (int)ncclCommInitRank(&comm, ranks, *shared_id, rank);
}
static int finish(void) {
    if (comm) WORKS(ncclCommDestroy(comm));
    WORKS(cudaFree(x));
    WORKS(cudaFree(y));
    WORKS(cudaFreeHost(host));
    WORKS(cudaStreamDestroy(stream));
    WORKS(cudaStreamDestroy(other));
    return 0;
}
/* x[i] = i % 100 + 10 * rank */
static int fill(int n) {
    for (int i = 0; i < n; i++) host[i] = (float)(i % 100 + 10 * rank);
    return (int)cudaMemcpy(x, host, (size_t)n * 4, cudaMemcpyHostToDevice);
}
static int fetch(const float *from, int n) {
    WORKS(cudaStreamSynchronize(stream));
    return (int)cudaMemcpy(host, from, (size_t)n * 4, cudaMemcpyDeviceToHost);
}

/* What the children said by now goes to the end of o->text. */
static void listen(int end, outcome *o) {
    size_t n = strlen(o->text);
    ssize_t got;
    while (n < sizeof o->text - 1 && (got = read(end, o->text + n, sizeof o->text - 1 - n)) > 0) n += (size_t)got;
}

/* Runs the ranks; their worst status, all their words. Ranks that still run when `limit` seconds are over, or half a second after one
 * of them has said `last_words`, are killed: 124. */
static outcome run_ranks(int n, const char *variables, int (*body)(void), double limit, const char *last_words) {
    outcome o = {0};
    int ends[2], status, left = n;
    pid_t pids[16];
    char *page = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    shared_flag = (int *)(void *)page;
    shared_id = (ncclUniqueId *)(page + 64);
    if (pipe(ends)) abort();
    fcntl(ends[0], F_SETFL, O_NONBLOCK);
    ranks = n;
    for (rank = 0; rank < n; rank++) pids[rank] = start_child(variables, body, ends[1]);
    close(ends[1]);
    for (double end = now() + limit; left && now() < end; usleep(2000)) {
        for (int r = 0; r < n; r++)
            if (pids[r] && waitpid(pids[r], &status, WNOHANG) == pids[r]) {
                pids[r] = 0, left--;
                if (exit_status(status) > o.status) o.status = exit_status(status);
            }
        listen(ends[0], &o);
        if (last_words && strstr(o.text, last_words) && end > now() + 0.5) end = now() + 0.5;
    }
    for (int r = 0; r < n; r++)
        if (pids[r]) {
            kill(pids[r], SIGKILL);
            waitpid(pids[r], &status, 0);
            o.status = 124;
        }
    listen(ends[0], &o);
    close(ends[0]);
    munmap(page, 4096);
    return o;
}
static void ranks_pass(const char *name, int n, const char *variables, int (*body)(void)) {
    char title[200];
    outcome o = run_ranks(n, variables, body, 60, NULL);
    snprintf(title, sizeof title, "nccl double: %s, %d ranks%s%s", name, n, *variables ? ", " : "", variables);
    verdict(title, o.status == 0 && !o.text[0], &o);
}
static void ranks_caught(const char *name, const char *variables, int (*body)(void), double limit, int status,
                         const char *text) {
    outcome o = run_ranks(2, variables, body, limit, text);
    verdict(name, o.status == status && (text ? strstr(o.text, text) != NULL : !o.text[0]), &o);
}

/* ---- collectives --------------------------------------------------------------------------------------------------- */
static float mine(int r, int i) { return (float)(i % 100 + 10 * r); }

static int collectives(void) {
    WORKS(join());
    WORKS(fill(N));
    WORKS(ncclAllReduce(x, y, N, ncclFloat, ncclSum, comm, stream));
    WORKS(fetch(y, N));
    for (int i = 0; i < N; i++) MUST(host[i] == (float)(ranks * (i % 100) + 10 * ranks * (ranks - 1) / 2));
    WORKS(fill(N));
    WORKS(ncclAllReduce(x, x, N, ncclFloat, ncclMax, comm, stream));
    WORKS(fetch(x, N));
    for (int i = 0; i < N; i++) MUST(host[i] == mine(ranks - 1, i));
    WORKS(fill(N));
    WORKS(ncclAllReduce(x, y, N, ncclFloat, ncclAvg, comm, stream));
    WORKS(ncclBroadcast(x, x, N, ncclFloat, ranks - 1, comm, stream));
    WORKS(fetch(y, N));
    for (int i = 0; i < N; i++) MUST(fabsf(host[i] - ((float)(i % 100) + 5.f * (float)(ranks - 1))) < 1e-4f);
    WORKS(fetch(x, N));
    for (int i = 0; i < N; i++) MUST(host[i] == mine(ranks - 1, i));
    WORKS(fill(N));
    WORKS(ncclAllGather(x, y, N, ncclFloat, comm, stream));
    WORKS(fetch(y, N * ranks));
    for (int r = 0; r < ranks; r++)
        for (int i = 0; i < N; i++) MUST(host[r * N + i] == mine(r, i));
    int part = N / ranks;
    WORKS(fill(N));
    WORKS(ncclReduceScatter(x, y, (size_t)part, ncclFloat, ncclSum, comm, stream));
    WORKS(fetch(y, part));
    for (int i = 0; i < part; i++)
        MUST(host[i] == (float)(ranks * ((rank * part + i) % 100) + 10 * ranks * (ranks - 1) / 2));
    WORKS(fill(N));
    WORKS(ncclReduce(x, y, N, ncclFloat, ncclMin, 0, comm, stream));
    WORKS(fetch(rank ? x : y, N));
    for (int i = 0; i < N; i++) MUST(rank || host[i] == mine(0, i));
    return finish();
}

static int many_pieces(void) {
    WORKS(join());
    WORKS(fill(BIG));
    WORKS(ncclAllReduce(x, y, BIG, ncclFloat, ncclSum, comm, stream));
    WORKS(fetch(y, BIG));
    for (int i = 0; i < BIG; i++) MUST(host[i] == (float)(ranks * (i % 100) + 10 * ranks * (ranks - 1) / 2));
    return finish();
}

static int types(void) {
    double doubles[4] = {1.5, -2, 3, 1e300};
    uint16_t halves[4], bf16s[4];
    int64_t longs[4] = {1ll << 40, -5, 7, 0};
    uint8_t bytes[4] = {1, 2, 100, 250};
    WORKS(join());
    for (int i = 0; i < 4; i++) halves[i] = half_of_float((float)i + 0.5f), bf16s[i] = bf16_of_float((float)i + 0.5f);
    struct {
        ncclDataType_t type;
        void *values;
        size_t size;
    } t[] = {{ncclFloat64, doubles, 8},
             {ncclFloat16, halves, 2},
             {ncclBfloat16, bf16s, 2},
             {ncclInt64, longs, 8},
             {ncclUint8, bytes, 1}};
    for (int k = 0; k < 5; k++) {
        WORKS(cudaMemcpy(x, t[k].values, 4 * t[k].size, cudaMemcpyHostToDevice));
        WORKS(ncclAllReduce(x, x, 4, t[k].type, ncclSum, comm, stream));
        WORKS(cudaStreamSynchronize(stream));
        WORKS(cudaMemcpy(t[k].values, x, 4 * t[k].size, cudaMemcpyDeviceToHost));
    }
    MUST(doubles[0] == 3 && doubles[3] == 2e300 && longs[0] == 2ll << 40 && longs[1] == -10 && bytes[2] == 200 &&
         bytes[3] == 244);
    for (int i = 0; i < 4; i++) MUST(float_of_half(halves[i]) == 2 * i + 1 && float_of_bf16(bf16s[i]) == 2 * i + 1);
    return finish();
}

static int scaled_sum(void) {
    float quarter = 0.25f;
    ncclRedOp_t op;
    WORKS(join());
    WORKS(fill(N));
    WORKS(ncclRedOpCreatePreMulSum(&op, &quarter, ncclFloat, ncclScalarHostImmediate, comm));
    WORKS(ncclAllReduce(x, y, N, ncclFloat, op, comm, stream));
    WORKS(ncclRedOpDestroy(op, comm));
    WORKS(fetch(y, N));
    for (int i = 0; i < N; i++) MUST(host[i] == 0.25f * mine(0, i) + 0.25f * mine(1, i));
    return finish();
}

static int messages(void) {
    int to = (rank + 1) % ranks, from = (rank + ranks - 1) % ranks;
    WORKS(join());
    WORKS(fill(BIG));
    WORKS(ncclGroupStart());
    WORKS(ncclSend(x, BIG, ncclFloat, to, comm, stream));
    WORKS(ncclRecv(y, BIG, ncclFloat, from, comm, stream));
    WORKS(ncclGroupEnd());
    WORKS(fetch(y, BIG));
    for (int i = 0; i < BIG; i++) MUST(host[i] == mine(from, i));
    return finish();
}

static int groups_and_streams(void) {
    cudaEvent_t event;
    WORKS(join());
    WORKS(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    WORKS(fill(N));
    WORKS(ncclGroupStart());
    WORKS(ncclAllReduce(x, x, N / 2, ncclFloat, ncclSum, comm, stream));
    WORKS(ncclAllReduce(x + N / 2, x + N / 2, N / 2, ncclFloat, ncclMax, comm, stream));
    WORKS(ncclGroupEnd());
    WORKS(cudaEventRecord(event, stream));
    WORKS(cudaStreamWaitEvent(other, event, 0));
    WORKS(ncclAllReduce(x, x, N, ncclFloat, ncclSum, comm, other));
    WORKS(cudaStreamSynchronize(other));
    WORKS(fetch(x, N));
    MUST(host[3] == 2 * (mine(0, 3) + mine(1, 3)) && host[N - 1] == 2 * mine(1, N - 1));
    WORKS(cudaEventDestroy(event));
    return finish();
}

static int in_a_graph(void) {
    cudaGraph_t g;
    cudaGraphExec_t run;
    WORKS(join());
    WORKS(fill(N));
    WORKS(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    WORKS(ncclAllReduce(x, x, N, ncclFloat, ncclSum, comm, stream));
    WORKS(cudaStreamEndCapture(stream, &g));
    WORKS(cudaGraphInstantiate(&run, g, 0));
    for (int i = 0; i < 3; i++) WORKS(cudaGraphLaunch(run, stream));
    WORKS(fetch(x, N));
    MUST(host[1] == 4 * (mine(0, 1) + mine(1, 1)));
    WORKS(cudaGraphExecDestroy(run));
    WORKS(cudaGraphDestroy(g));
    return finish();
}

/* The first rank waits for the second by other means, whose GPU has to go on by itself. */
static int gpu_goes_on_alone(void) {
    WORKS(join());
    WORKS(fill(N));
    WORKS(ncclAllReduce(x, y, N, ncclFloat, ncclSum, comm, stream));
    if (rank == 0) {
        WORKS(fetch(y, N));
        shared_flag[1] = 1;
    }
    while (!shared_flag[1]) usleep(1000);
    WORKS(fetch(y, N));
    MUST(host[1] == mine(0, 1) + mine(1, 1));
    return finish();
}

static int registered_memory(void) {
    void *handle, *p;
    WORKS(join());
    WORKS(ncclMemAlloc(&p, 4096));
    WORKS(ncclCommRegister(comm, p, 4096, &handle));
    WORKS(ncclAllReduce(p, p, 1024, ncclFloat, ncclSum, comm, stream));
    WORKS(cudaStreamSynchronize(stream));
    WORKS(ncclCommDeregister(comm, handle));
    WORKS(ncclMemFree(p));
    return finish();
}

/* ---- without blocking ---------------------------------------------------------------------------------------------- */
static int poll(void) {
    ncclResult_t state;
    do WORKS(ncclCommGetAsyncError(comm, &state));
    while (state == ncclInProgress);
    return (int)state;
}
static int without_blocking(void) {
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    WORKS(start());
    if (rank == 1) usleep(50000);
    GIVES(ncclCommInitRankConfig(&comm, ranks, *shared_id, rank, &config), ncclInProgress);
    if (rank == 0) GIVES(ncclAllReduce(x, y, N, ncclFloat, ncclSum, comm, stream), ncclInvalidArgument); /* too early */
    WORKS(poll());
    WORKS(fill(N));
    GIVES(ncclAllReduce(x, y, N, ncclFloat, ncclSum, comm, stream), ncclInProgress);
    GIVES(ncclAllReduce(x, y, N, ncclFloat, ncclSum, comm, stream), ncclInvalidArgument);
    MUST(strstr(ncclGetLastError(comm), "before the previous operation returned ncclSuccess"));
    WORKS(poll());
    WORKS(fetch(y, N));
    MUST(host[1] == mine(0, 1) + mine(1, 1));
    GIVES(ncclCommFinalize(comm), ncclInProgress);
    WORKS(poll());
    return finish();
}

/* ---- failures ------------------------------------------------------------------------------------------------------ */
static int same_gpu(void) {
    WORKS(start());
    GIVES(ncclCommInitRank(&comm, ranks, *shared_id, rank), ncclInvalidUsage);
    MUST(strstr(ncclGetLastError(comm), "Duplicate GPU detected : rank 0 and rank 1 both on CUDA device 10000"));
    return finish();
}
static bool clean;
static int counts_differ(void) {
    WORKS(join());
    WORKS(ncclAllReduce(x, y, clean || rank ? N : N - 1, ncclFloat, ncclSum, comm, stream));
    WORKS(cudaStreamSynchronize(stream));
    return finish();
}
static int calls_differ(void) {
    WORKS(join());
    if (clean || rank) WORKS(ncclAllReduce(x, y, N, ncclFloat, ncclSum, comm, stream));
    else WORKS(ncclBroadcast(x, y, N, ncclFloat, 0, comm, stream));
    WORKS(cudaStreamSynchronize(stream));
    return finish();
}
static int peer_dies(void) {
    WORKS(join());
    if (!clean && rank == 1) _exit(0);
    WORKS(ncclAllReduce(x, y, N, ncclFloat, ncclSum, comm, stream));
    WORKS(cudaStreamSynchronize(stream));
    return finish();
}
static int peer_never_comes(void) {
    if (!clean && rank == 1) return 0;
    WORKS(join());
    return finish();
}

static void *abort_later(void *arg) {
    (void)arg;
    usleep(100000);
    return ncclCommAbort(comm) ? (void *)1 : NULL;
}
/* The peer is gone; another thread aborts, and that ends the wait. */
static int aborted_while_waiting(void) {
    pthread_t thread;
    void *status;
    WORKS(join());
    if (rank == 1) _exit(0);
    WORKS(ncclAllReduce(x, y, N, ncclFloat, ncclSum, comm, stream));
    GIVES(cudaStreamQuery(stream), cudaErrorNotReady);
    pthread_create(&thread, NULL, abort_later, NULL);
    WORKS(cudaStreamSynchronize(stream));
    pthread_join(thread, &status);
    MUST(!status);
    comm = NULL;
    (void)cudaGetLastError();
    return finish();
}
static int second_call_fails(void) {
    WORKS(join());
    WORKS(ncclAllReduce(x, y, N, ncclFloat, ncclSum, comm, stream));
    GIVES(ncclAllReduce(x, y, N, ncclFloat, ncclSum, comm, stream), ncclRemoteError);
    MUST(strstr(ncclGetErrorString(ncclRemoteError), "remote process exited"));
    WORKS(cudaStreamSynchronize(stream));
    return finish();
}
static int device_fails(void) { /* nothing hangs: not the wait, not the end */
    WORKS(join());
    WORKS(cudaMemsetAsync(x, 0, 4, stream));
    WORKS(ncclAllReduce(x, y, N, ncclFloat, ncclSum, comm, stream));
    scale_args args = {x, y, 1, 0, 1};
    void *list[] = {&args};
    cudaLibrary_t library;
    cudaKernel_t k;
    WORKS(cudaLibraryLoadData(&library, "image", NULL, NULL, 0, NULL, NULL, 0));
    WORKS(cudaLibraryGetKernel(&k, library, "scale"));
    WORKS(cudaLaunchKernel((const void *)k, (dim3){1, 1, 1}, (dim3){1, 1, 1}, list, 0, stream));
    WORKS(ncclAllReduce(x, y, N, ncclFloat, ncclSum, comm, stream));
    GIVES(cudaStreamSynchronize(stream), cudaErrorIllegalAddress);
    GIVES(ncclAllReduce(x, y, N, ncclFloat, ncclSum, comm, stream), ncclUnhandledCudaError);
    WORKS(ncclCommDestroy(comm));
    return 0;
}
static int second_group_fails(void) {
    WORKS(join());
    for (int i = 0; i < 2; i++) {
        WORKS(ncclGroupStart());
        WORKS(ncclAllReduce(x, y, N, ncclFloat, ncclSum, comm, stream));
        GIVES(ncclGroupEnd(), i ? ncclSystemError : ncclSuccess);
    }
    WORKS(cudaStreamSynchronize(stream));
    return finish();
}
static int fails_in_the_background(void) {
    ncclResult_t state;
    WORKS(join());
    WORKS(ncclCommGetAsyncError(comm, &state));
    MUST(state == ncclSuccess);
    WORKS(ncclCommGetAsyncError(comm, &state));
    MUST(state == ncclSystemError);
    WORKS(ncclCommGetAsyncError(comm, &state));
    MUST(state == ncclSystemError); /* it stays */
    WORKS(ncclCommAbort(comm));
    comm = NULL;
    return finish();
}
static int leaves_it(void) {
    WORKS(join());
    if (clean) return finish();
    return 0;
}

/* ---- ranks as threads ---------------------------------------------------------------------------------------------- */
static ncclUniqueId thread_id;
static int thread_body(int r, float *got) {
    ncclComm_t c;
    cudaStream_t s;
    float *d, value = (float)(r + 1);
    WORKS(cudaSetDevice(r));
    WORKS(ncclCommInitRank(&c, 3, thread_id, r));
    WORKS(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking));
    WORKS(cudaMalloc((void **)&d, 4));
    WORKS(cudaMemcpy(d, &value, 4, cudaMemcpyHostToDevice));
    for (int i = 0; i < 50; i++) WORKS(ncclAllReduce(d, d, 1, ncclFloat, i ? ncclMax : ncclSum, c, s));
    WORKS(cudaStreamSynchronize(s));
    WORKS(cudaMemcpy(got, d, 4, cudaMemcpyDeviceToHost));
    WORKS(cudaFree(d));
    WORKS(cudaStreamDestroy(s));
    return (int)ncclCommDestroy(c);
}
static void *thread_main(void *arg) {
    float got = 0;
    int status = thread_body((int)(intptr_t)arg, &got);
    return (void *)(intptr_t)(status ? status : got == 6 ? 0 : 1);
}
static int threads(void) {
    pthread_t t[3];
    WORKS(ncclGetUniqueId(&thread_id));
    for (intptr_t i = 0; i < 3; i++) pthread_create(&t[i], NULL, thread_main, (void *)i);
    for (int i = 0; i < 3; i++) {
        void *status;
        pthread_join(t[i], &status);
        MUST(!status);
    }
    return 0;
}

/* One thread, two GPUs: the calls of both ranks in one group. */
static int one_thread(void) {
    ncclComm_t c[2];
    cudaStream_t s[2];
    float *d[2], values[2] = {3, 4}, got;
    WORKS(ncclGetUniqueId(&thread_id));
    WORKS(ncclGroupStart());
    for (int r = 0; r < 2; r++) {
        WORKS(cudaSetDevice(r));
        WORKS(ncclCommInitRank(&c[r], 2, thread_id, r));
    }
    WORKS(ncclGroupEnd());
    for (int r = 0; r < 2; r++) {
        WORKS(cudaSetDevice(r));
        WORKS(cudaStreamCreateWithFlags(&s[r], cudaStreamNonBlocking));
        WORKS(cudaMalloc((void **)&d[r], 4));
        WORKS(cudaMemcpy(d[r], &values[r], 4, cudaMemcpyHostToDevice));
    }
    WORKS(ncclGroupStart());
    for (int r = 0; r < 2; r++) WORKS(ncclAllReduce(d[r], d[r], 1, ncclFloat, ncclSum, c[r], s[r]));
    WORKS(ncclGroupEnd());
    for (int r = 0; r < 2; r++) {
        WORKS(cudaStreamSynchronize(s[r]));
        WORKS(cudaMemcpy(&got, d[r], 4, cudaMemcpyDeviceToHost));
        MUST(got == 7);
        WORKS(cudaFree(d[r]));
        WORKS(cudaStreamDestroy(s[r]));
        WORKS(ncclCommDestroy(c[r]));
    }
    return 0;
}

static int speed(void) {
    WORKS(join());
    WORKS(fill(BIG));
    double best = 1e9, small = 1e9;
    for (int i = 0; i < 10; i++) {
        double t = now();
        WORKS(ncclAllReduce(x, y, BIG, ncclFloat, ncclSum, comm, stream));
        WORKS(cudaStreamSynchronize(stream));
        if (now() - t < best) best = now() - t;
        t = now();
        WORKS(ncclAllReduce(x, y, 1000, ncclFloat, ncclSum, comm, stream));
        WORKS(cudaStreamSynchronize(stream));
        if (now() - t < small) small = now() - t;
    }
    if (rank == 0) printf("# all_reduce of 12 MB: %.1f ms, of 4 KB: %.2f ms\n", best * 1e3, small * 1e3);
    return finish();
}

/* ---- all ----------------------------------------------------------------------------------------------------------- */
#define FATAL "DDP_DOUBLE_LEAKS=fatal"

/* The mended program ends with 0 and says nothing; the wrong one ends so and says that. */
static void mistake(const char *name, const char *variables, int (*body)(void), double limit, int status,
                    const char *text) {
    char title[200];
    clean = true;
    snprintf(title, sizeof title, "nccl double passes, with its mistake mended: %s", name);
    ranks_caught(title, FATAL, body, 60, 0, NULL);
    clean = false;
    snprintf(title, sizeof title, "nccl double catches: %s", name);
    ranks_caught(title, variables, body, limit, status, text);
}

int main(void) {
    use_test_kernels();
    static const char *const modes[] = {FATAL, FATAL " DDP_DOUBLE_MODE=eager", FATAL " DDP_DOUBLE_MODE=random"};
    for (int m = 0; m < 3; m++) {
        ranks_pass("collectives", 2, modes[m], collectives);
        ranks_pass("types", 2, modes[m], types);
        ranks_pass("a ring of messages", 2, modes[m], messages);
        ranks_pass("groups and two streams", 2, modes[m], groups_and_streams);
        ranks_pass("in a graph", 2, modes[m], in_a_graph);
        ranks_pass("without blocking", 2, modes[m], without_blocking);
    }
    ranks_pass("collectives", 3, FATAL " DDP_DOUBLE_GPUS=4", collectives);
    ranks_pass("collectives", 1, FATAL, collectives);
    ranks_pass("a ring of messages", 3, FATAL " DDP_DOUBLE_GPUS=4", messages);
    ranks_pass("a large one in many pieces", 2, FATAL, many_pieces);
    ranks_pass("a sum of scaled values", 2, FATAL, scaled_sum);
    ranks_pass("a GPU goes on while its host waits elsewhere", 2, FATAL, gpu_goes_on_alone);
    ranks_pass("registered memory", 2, FATAL, registered_memory);
    passes("nccl double: ranks as threads", FATAL " DDP_DOUBLE_GPUS=3", threads);
    passes("nccl double: one thread, two GPUs", FATAL, one_thread);
    ranks_pass("two ranks on one GPU are refused", 2, "DDP_DOUBLE_UUID=same", same_gpu);
    ranks_pass("an abort ends a wait", 2, "DDP_DOUBLE_LEAKS=quiet", aborted_while_waiting);
    ranks_pass("the second call fails", 2, "DDP_DOUBLE_FAIL=ncclAllReduce:2:6", second_call_fails);
    ranks_pass("the second group fails", 2, "DDP_DOUBLE_FAIL=ncclGroupEnd:2:2", second_group_fails);
    ranks_pass("a GPU fails between two calls", 2, "DDP_DOUBLE_LEAKS=quiet DDP_DOUBLE_FAIL=kernel:1", device_fails);
    ranks_pass("an error in the background", 2, "DDP_DOUBLE_FAIL=ncclAsync:2:2", fails_in_the_background);
    mistake("mismatch of counts", FATAL, counts_differ, 30, 124, "NCCL MISMATCH: call 1: rank");
    mistake("mismatch of calls", FATAL, calls_differ, 30, 124, "broadcast of 3000 f32");
    mistake("a hang with a dead peer", "", peer_dies, 2, 124, NULL);
    mistake("a peer that never comes", "", peer_never_comes, 2, 124, NULL);
    mistake("a communicator left", FATAL, leaves_it, 60, 99, "LEAK: 1 of: nccl communicator");
    ranks_pass("speed", 2, "", speed);
    return failures != 0;
}
