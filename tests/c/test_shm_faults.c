/* link: @B/obj/core/comm/shm.o @B/obj/core/comm/shm_run.o @B/obj/core/comm/shm_coll.o @B/obj/core/comm/reduce.o @B/obj/core/comm/roll_call.o @B/obj/core/comm/signature.o @B/obj/core/comm/store.o @B/obj/core/comm/store_client.o @B/obj/core/base/error.o @B/obj/core/base/threads.o @B/obj/core/base/phase.o @B/obj/core/base/log.o @B/obj/core/tensor/dtype.o */
/* test_shm_faults.c -- the shared-memory engine between processes: every way to end badly. */
#include <pthread.h>

#include "shm_common.h"

/* ---- ends ---- */

static bool said(int rank, int status, const char *const *parts) {
    if (w->status[rank] != status) return false;
    for (; *parts; parts++)
        if (!strstr(w->said[rank], *parts)) return false;
    return true;
}
#define SAID(rank, st, ...) said(rank, st, (const char *const[]){__VA_ARGS__, NULL})

static float data_[200000];

static void mismatch(void) {
    join();
    barrier();
    barrier();
    ddp_coll c = rank_ == 1 ? coll(DDP_COLL_BROADCAST, NULL, data_, 10, DDP_F32, "")
                            : coll(DDP_COLL_ALL_REDUCE, NULL, data_, 4096, DDP_F32, "loss");
    say(call(&c));
    ddp_req *r; /* dead from now on */
    CHECK(E->post(comm_, &c, &r) == DDP_EMISMATCH && E->health(comm_) == DDP_EMISMATCH);
    ddp_error_take(NULL);
    E->destroy(comm_, 0);
}

static int differ; /* which field */
static void fields(void) {
    join();
    bool me = rank_ == 1;
    ddp_coll c = coll(DDP_COLL_ALL_REDUCE, NULL, data_, differ == 0 && me ? 11 : 10,
                      differ == 1 && me ? DDP_I32 : DDP_F32, differ == 2 && me ? "b" : "a");
    c.reduce = differ == 3 && me ? DDP_MAX : DDP_SUM;
    c.root = differ == 4 && me;
    say(call(&c));
    E->destroy(comm_, 0);
}

/* Ranks 0 and 1 differ; rank 2 never comes, and they need not wait for it. */
static void mismatch_early(void) {
    join();
    if (rank_ == 2) {
        sleep(3);
        return;
    }
    ddp_coll c = coll(DDP_COLL_ALL_REDUCE, NULL, data_, rank_ ? 50000 : 40000, DDP_F32, "");
    double begin = ddp__now();
    say(call(&c));
    w->seconds[rank_] = ddp__now() - begin;
}

static void test_mismatch(void) {
    bool ok = run(2, 10, mismatch, -1);
    for (int r = 0; r < 2; r++)
        ok &= SAID(r, DDP_EMISMATCH, "rank 0 calls all_reduce #3 sum (f32 x 4096, \"loss\", train.lua:10)",
                   "rank 1 calls broadcast #3 from 0 (f32 x 10, train.lua:11)");
    verdict("C3 a mismatch names both calls on both ranks", ok, "texts");
    ok = run(3, 10, mismatch, -1);
    for (int r = 0; r < 3; r++) ok &= SAID(r, DDP_EMISMATCH, "broadcast #3 from 0 (f32 x 10, train.lua:11)");
    verdict("C3 every one of three ranks finds the mismatch", ok, "texts");
    ok = true;
    for (differ = 0; differ < 5 && ok; differ++)
        ok = run(2, 10, fields, -1) && w->status[0] == DDP_EMISMATCH && w->status[1] == DDP_EMISMATCH;
    verdict("C3 count, dtype, name, reduction and root are compared", ok, "a field is not");
    ok = run(3, 10, mismatch_early, -1);
    for (int r = 0; r < 2; r++) ok &= w->status[r] == DDP_EMISMATCH && w->seconds[r] < 1;
    verdict("C3 two ranks differ while the third has not come", ok, "late");
}

static void stalled(void) {
    join();
    barrier();
    if (rank_ == 1) {
        sleep(4);
        ddp_coll late = coll(DDP_COLL_ALL_REDUCE, NULL, data_, 4096, DDP_F32, "bucket 3");
        double begin = ddp__now();
        say(call(&late)); /* the others have given up */
        w->seconds[1] = ddp__now() - begin;
        return;
    }
    usleep(rank_ * 100000);
    ddp_coll c = coll(DDP_COLL_ALL_REDUCE, NULL, data_, 4096, DDP_F32, "bucket 3");
    double begin = ddp__now();
    say(call(&c));
    w->seconds[rank_] = ddp__now() - begin;
    E->destroy(comm_, 0);
    sleep(4); /* the process lives on */
}

static void test_timeout(void) {
    bool ok = run(3, 1.5, stalled, -1);
    for (int r = 0; r < 3; r += 2)
        ok &= w->seconds[r] >= 1.5 && w->seconds[r] < 2.5 &&
              SAID(r, DDP_ETIMEOUT, "rank 1 has not reached all_reduce #2 sum (f32 x 4096, bucket 3, train.lua:1");
    verdict("C1 C2 a wait ends between T and T + 1 s and names the missing", ok, "text or time");
    verdict("C1 who comes after the others gave up is told at once", w->seconds[1] < .5 && SAID(1, DDP_EPEER, "rank 0"),
            "not");
}

static void dies(void) {
    join();
    barrier();
    if (rank_ == 1) {
        usleep(200000);
        kill(getpid(), SIGKILL);
    }
    ddp_coll c = coll(DDP_COLL_ALL_REDUCE, NULL, data_, 100000, DDP_F32, "");
    double begin = ddp__now();
    say(call(&c));
    w->seconds[rank_] = ddp__now() - begin;
}

static void leaves(void) {
    join();
    if (rank_ == 1) {
        usleep(200000);
        E->destroy(comm_, 1);
        sleep(1);
        return;
    }
    ddp_coll c = coll(DDP_COLL_ALL_REDUCE, NULL, data_, 100, DDP_F32, "");
    double begin = ddp__now();
    say(call(&c));
    w->seconds[rank_] = ddp__now() - begin;
}

static void aborted(void) {
    pthread_t t;
    join();
    barrier();
    if (rank_ == 1) CHECK(pthread_create(&t, NULL, abort_later, NULL) == 0);
    double begin = ddp__now();
    if (rank_ == 2) sleep(1);
    ddp_coll c = coll(DDP_COLL_ALL_REDUCE, NULL, data_, 100, DDP_F32, "");
    ddp_req *r = NULL;
    int st = E->post(comm_, &c, &r);
    if (st == 0) st = E->wait(r);
    say(st);
    w->seconds[rank_] = ddp__now() - begin;
    if (rank_ == 1) pthread_join(t, NULL);
    E->req_free(r);
    E->destroy(comm_, 0);
}

static void test_faults(void) {
    bool ok = run(3, 30, dies, 1);
    for (int r = 0; r < 3; r += 2) ok &= w->seconds[r] < 1 && SAID(r, DDP_EPEER, "peer: rank 1", "all_reduce #2");
    verdict("a killed peer is noticed and named", ok, "text or time");
    ok = run(2, 30, leaves, -1) && w->seconds[0] < .4 &&
         SAID(0, DDP_EPEER, "peer: rank 1 left while rank 0 waits in all_reduce #1");
    verdict("a peer that left is named at once", ok, "text or time");
    ok = run(3, 30, aborted, -1);
    for (int r = 0; r < 3; r++)
        ok &= w->seconds[r] < 1.2 && SAID(r, DDP_EPEER, "peer: rank 1: worker 3: out of memory");
    verdict("an abort from any thread ends all ranks with its reason", ok, "text or time");
}

/* ---- joining ---- */

static void one_missing(void) {
    store_open();
    if (rank_ == 2) return;
    double begin = ddp__now();
    say(join_as(rank_, 3));
    w->seconds[rank_] = ddp__now() - begin;
}
static void twice(void) {
    store_open();
    if (rank_ == 2) usleep(200000);
    say(join_as(rank_ == 2 ? 1 : rank_, 2));
}
static void two_worlds(void) {
    store_open();
    say(join_as(rank_, 2 + rank_));
}

/* The last one to leave is not kept by the first; requests may outlive the communicator. */
static void leave_early(void) {
    join();
    ddp_coll c = coll(DDP_COLL_ALL_REDUCE, NULL, data_, 100, DDP_F32, "");
    ddp_req *r = NULL;
    if (rank_ == 0) {
        r = post(&c);
        E->destroy(comm_, 1);
        CHECK(E->test(r) < 0);
        ddp_error_take(NULL);
        CHECK(E->wait(r) < 0);
        ddp_error_take(NULL);
        E->req_free(r);
    } else {
        usleep(100000);
        CHECK(call(&c) == DDP_EPEER);
        E->destroy(comm_, 0);
    }
}

static void delayed(void) {
    setenv("DDP_FAULT", "delay:20", 1);
    join();
    for (int k = 0; k < 3; k++) {
        ddp_coll c = coll(DDP_COLL_ALL_REDUCE, NULL, data_, k == 0 ? 1 : 150000, DDP_F32, "");
        barrier();
        double begin = ddp__now();
        ddp_req *r = post(&c);
        if (ddp__now() - begin > .015) FAIL("post slept");
        CHECK(E->wait(r) == 0);
        double took = ddp__now() - begin;
        if (took < .019 || took > .03) FAIL("%.4f s", took);
        E->req_free(r);
    }
    E->destroy(comm_, 1);
}

static void test_joining(void) {
    bool ok = run(3, 1, one_missing, 2);
    for (int r = 0; r < 2; r++)
        ok &= w->seconds[r] >= 1 && w->seconds[r] < 2 && SAID(r, DDP_ETIMEOUT, "missing: rank 2 of 3");
    verdict("C1 a rank that never joins is named", ok, "text or time");
    verdict("two processes of one rank are told",
            run(3, 5, twice, -1) && SAID(2, DDP_EMISMATCH, "two processes", "rank 1") && w->status[0] == 0 &&
                w->status[1] == 0,
            "not");
    ok = run(2, 2, two_worlds, -1);
    verdict("worlds of different sizes are told",
            ok && SAID(0, DDP_EMISMATCH, "rank 1 is in a world of 3", "of 2") && w->status[1] < 0, "not");
    simple("leaving with requests outstanding", 2, leave_early);
    simple("C14 a delay of 20 ms takes 20 ms, and not in post", 2, delayed);
}

int main(void) {
    if (!shm_test_begin()) return 2;
    test_mismatch();
    test_timeout();
    test_faults();
    test_joining();
    return failures != 0;
}
