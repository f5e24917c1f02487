/* config.c -- settings, faults, messages, and how a call begins and ends. */
#include "state.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

settings config;
__thread cudaError_t last_error;
__thread int current_device;

static pthread_once_t once = PTHREAD_ONCE_INIT;
static pthread_mutex_t mutex;
static int depth; /* of the lock */
static int log_file = -1;
static uint64_t random_state;

/* ---- messages ------------------------------------------------------------------------------------------------------ */
static void say(const char *format, va_list list) {
    char text[2000] = "cuda double: ";
    size_t n = strlen(text);
    vsnprintf(text + n, sizeof text - n - 1, format, list);
    strcat(text, "\n");
    fflush(stdout);
    if (write(STDERR_FILENO, text, strlen(text)) < 0) return;
}

void ddp_double_say(const char *format, ...) {
    va_list list;
    va_start(list, format);
    say(format, list);
    va_end(list);
}

void ddp_double_die(const char *format, ...) {
    va_list list;
    va_start(list, format);
    say(format, list);
    va_end(list);
    fflush(NULL);
    _exit(99);
}

void ddp_double_unsimulated(const char *what) { ddp_double_die("%s is not simulated", what); }

bool ddp_double_logs(void) { return log_file >= 0; }

void ddp_double_log(const char *format, ...) {
    char text[8000];
    if (log_file < 0) return;
    va_list list;
    va_start(list, format);
    vsnprintf(text, sizeof text - 1, format, list);
    va_end(list);
    strcat(text, "\n");
    if (write(log_file, text, strlen(text)) < 0) return;
}

/* ---- settings ------------------------------------------------------------------------------------------------------ */
long ddp_double_setting(const char *name, long otherwise) {
    const char *s = getenv(name);
    return s && *s ? atol(s) : otherwise;
}
static const char *word(const char *name, const char *otherwise) {
    const char *s = getenv(name);
    return s && *s ? s : otherwise;
}

static run_mode mode_named(const char *name) {
    static const char *const names[] = {"lazy", "eager", "random", "dry"};
    for (int i = 0; i < 4; i++)
        if (!strcmp(name, names[i])) return (run_mode)i;
    ddp_double_die("DDP_DOUBLE_MODE=%s: it is lazy, eager, random or dry", name);
}

/* CUDA_VISIBLE_DEVICES hides and reorders GPUs; the list ends at the first that is none. */
static void choose_devices(void) {
    int there = (int)ddp_double_setting("DDP_DOUBLE_GPUS", 2);
    const char *list = getenv("CUDA_VISIBLE_DEVICES");
    if (there > MAX_DEVICES) there = MAX_DEVICES;
    config.devices = 0;
    if (!list) {
        for (int i = 0; i < there; i++) config.physical[config.devices++] = i;
        return;
    }
    for (char *end; *list; list = *end ? end + 1 : end) {
        long i = strtol(list, &end, 10);
        if (end == list || i < 0 || i >= there || config.devices == MAX_DEVICES) return;
        config.physical[config.devices++] = (int)i;
    }
}

static void start(void) {
    pthread_mutexattr_t attr;
    pthread_mutexattr_init(&attr);
    pthread_mutexattr_settype(&attr, PTHREAD_MUTEX_RECURSIVE);
    pthread_mutex_init(&mutex, &attr);
    config.mode = mode_named(word("DDP_DOUBLE_MODE", "lazy"));
    config.cc = (int)ddp_double_setting("DDP_DOUBLE_CC", 90);
    config.sms = (int)ddp_double_setting("DDP_DOUBLE_SMS", 8);
    config.driver = (int)ddp_double_setting("DDP_DOUBLE_DRIVER", CUDART_VERSION);
    config.status = (int)ddp_double_setting("DDP_DOUBLE_STATUS", 0);
    config.memory = (size_t)ddp_double_setting("DDP_DOUBLE_MB", 4096) << 20;
    config.idle_ms = ddp_double_setting("DDP_DOUBLE_IDLE_MS", 100);
    config.check = ddp_double_setting("DDP_DOUBLE_CHECK", 1) != 0;
    config.protect = ddp_double_setting("DDP_DOUBLE_PROTECT", 1) != 0;
    config.same_uuid = !strcmp(word("DDP_DOUBLE_UUID", ""), "same");
    config.leaks = word("DDP_DOUBLE_LEAKS", "");
    random_state = (uint64_t)ddp_double_setting("DDP_DOUBLE_SEED", 1) * 0x9E3779B97F4A7C15u | 1;
    if (!config.status && config.driver / 1000 < CUDART_VERSION / 1000) config.status = cudaErrorInsufficientDriver;
    choose_devices();
    if (!config.status && !config.devices) config.status = cudaErrorNoDevice;
    const char *path = word("DDP_DOUBLE_LOG", NULL);
    if (path) log_file = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
    memory_start();
}

bool ddp_double_dry(void) { return config.mode == DRY; }

uint32_t random_below(uint32_t n) {
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return (uint32_t)((random_state >> 32) * n >> 32);
}

double now_ms(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e3 + (double)t.tv_nsec * 1e-6;
}

/* ---- faults: DDP_DOUBLE_FAIL=name:k[:status][,...] ----------------------------------------------------------------- */
static struct fault {
    char name[64];
    long at, calls;
    int status; /* -1: not given */
} faults[16];
static int fault_count = -1;

static void read_faults(void) {
    char text[1000], *rest = text;
    snprintf(text, sizeof text, "%s", word("DDP_DOUBLE_FAIL", ""));
    fault_count = 0;
    for (char *part; (part = strsep(&rest, ",")) && *part;) {
        struct fault *f = &faults[fault_count];
        f->status = -1;
        if (fault_count == 16 || sscanf(part, "%63[^:]:%ld:%d", f->name, &f->at, &f->status) < 2)
            ddp_double_die("DDP_DOUBLE_FAIL: %s is not name:k or name:k:status", part);
        fault_count++;
    }
}

int ddp_double_fault(const char *function, int otherwise) {
    int status = 0;
    ddp_double_lock();
    if (fault_count < 0) read_faults();
    for (int i = 0; i < fault_count; i++) {
        struct fault *f = &faults[i];
        if (!status && !strcmp(f->name, function) && ++f->calls == f->at)
            status = f->status < 0 ? otherwise : f->status;
    }
    ddp_double_unlock();
    return status;
}

/* ---- calls --------------------------------------------------------------------------------------------------------- */
void ddp_double_lock(void) {
    pthread_once(&once, start);
    pthread_mutex_lock(&mutex);
    depth++;
}

void ddp_double_unlock(void) {
    if (--depth == 0) close_memory();
    pthread_mutex_unlock(&mutex);
}

cudaError_t leave(cudaError_t status) {
    if (status) last_error = status;
    ddp_double_unlock();
    return status;
}

cudaError_t enter_always(const char *function) {
    ddp_double_lock();
    int status = ddp_double_fault(function, !strncmp(function, "cudaMalloc", 10) || !strcmp(function, "cudaHostAlloc")
                                                ? cudaErrorMemoryAllocation
                                                : cudaErrorUnknown);
    if (!status) status = config.status;
    return status ? leave((cudaError_t)status) : cudaSuccess;
}

cudaError_t enter(const char *function) {
    cudaError_t status = enter_always(function);
    if (status) return status;
    status = ddp_double_stuck(current_device);
    return status ? leave(status) : cudaSuccess;
}

int ddp_double_device(void) { return current_device; }

void ddp_double_uuid(int device, unsigned char uuid[16]) {
    memcpy(uuid, "ddp-double-gpu-", 15);
    uuid[15] = (unsigned char)(config.same_uuid || device < 0 ? 0 : config.physical[device]);
}

/* ---- the end ------------------------------------------------------------------------------------------------------- */
/* After all atexit handlers. */
__attribute__((destructor)) static void finish(void) {
    if (!config.memory || !strcmp(config.leaks, "quiet")) return;
    if (report_leaks() && !strcmp(config.leaks, "fatal")) {
        fflush(NULL);
        _exit(99);
    }
}
