/* link: @B/obj/core/comm/shm.o @B/obj/core/comm/shm_run.o @B/obj/core/comm/shm_coll.o @B/obj/core/comm/reduce.o @B/obj/core/comm/roll_call.o @B/obj/core/comm/signature.o @B/obj/core/comm/store.o @B/obj/core/comm/store_client.o @B/obj/core/base/error.o @B/obj/core/base/threads.o @B/obj/core/base/phase.o @B/obj/core/base/log.o @B/obj/core/tensor/dtype.o */
/* test_shm.c -- the shared-memory engine between processes: results and bits. `test_shm bench` prints times of two ranks
 * in place of testing. */
#include <dirent.h>
#include <sched.h>
#include <sys/prctl.h>

#include "engine_cases.h"

/* ---- segments ---- */

static void no_proc(void) {
    if (geteuid() == 0) CHECK(setresgid(65534, 65534, 65534) == 0 && setresuid(65534, 65534, 65534) == 0);
    prctl(PR_SET_DUMPABLE, 0);
    lengths();
}

static int entries(const char *path) {
    DIR *d = opendir(path);
    int n = 0;
    while (d && readdir(d)) n++;
    if (d) closedir(d);
    return n;
}

/* Segments come and go: no descriptor stays. */
static void segments(void) {
    join();
    int fds = entries("/proc/self/fd");
    for (int k = 0; k < 50; k++) {
        void *p;
        CHECK(E->alloc(comm_, 100000, &p) == 0);
        for (int i = 0; i < 100000; i++) CHECK(((char *)p)[i] == 0);
        ddp_coll c = coll(DDP_COLL_ALL_REDUCE, NULL, p, 25000, DDP_F32, "");
        for (int i = 0; i < 25000; i++) ((float *)p)[i] = 1;
        must(&c);
        CHECK(((float *)p)[24999] == (float)w->size);
        E->dealloc(comm_, p);
    }
    CHECK(entries("/proc/self/fd") == fds);
    E->destroy(comm_, 1);
}

/* ---- times ---- */

static int by_value(const void *a, const void *b) {
    return *(const double *)a < *(const double *)b ? -1 : *(const double *)a > *(const double *)b;
}

static void bench(void) {
    static const size_t bytes[] = {4, 4096, 65536, 1 << 20, 25 << 20, 100 << 20};
    static double t[4000];
    join();
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(rank_ % ddp__cores(), &one);
    sched_setaffinity(0, sizeof one, &one);
    void *bucket, *own = aligned_alloc(2 << 20, 100 << 20);
    madvise(own, 100 << 20, MADV_HUGEPAGE);
    CHECK(E->alloc(comm_, 100 << 20, &bucket) == 0);
    for (int where = 0; where < 2; where++)
        for (int k = 0; k < 6; k++) {
            int iters = bytes[k] > 2 << 20 ? 30 : bytes[k] > 65536 ? 500 : 4000;
            for (int i = 0; i < iters; i++) {
                float *x = where ? own : bucket;
                for (size_t j = 0; j < bytes[k] / 4; j++) x[j] = (float)(j & 3);
                ddp_coll c = coll(DDP_COLL_ALL_REDUCE, NULL, x, (int64_t)bytes[k] / 4, DDP_F32, "");
                barrier();
                double begin = ddp__now();
                must(&c);
                t[i] = ddp__now() - begin;
            }
            qsort(t, (size_t)iters, sizeof *t, by_value);
            if (rank_ == 0)
                printf("%d ranks  %-7s %10zu B  median %10.2f us  min %10.2f us\n", w->size,
                       where ? "private" : "bucket", bytes[k], t[iters / 2] * 1e6, t[0] * 1e6);
        }
    fflush(stdout);
    barrier();
}

int main(int argc, char **argv) {
    if (!shm_test_begin()) return 2;
    if (argc > 1 && strcmp(argv[1], "bench") == 0) {
        bool ok = run(argc > 2 ? atoi(argv[2]) : 2, 60, bench, -1);
        if (!ok) printf("%s %s\n", w->why[0], w->why[1]);
        return !ok;
    }
    test_cases();
    place = BUCKET;
    int left = entries("/dev/shm");
    simple("without the right to look into rank 0's /proc", 3, no_proc);
    verdict("nothing is left in /dev/shm", entries("/dev/shm") == left, "a name is");
    for (int p = 2; p <= 3; p++) simple("segments come and go", p, segments);
    return failures != 0;
}
