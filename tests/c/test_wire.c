/* link: @B/obj/core/comm/shm.o @B/obj/core/comm/shm_run.o @B/obj/core/comm/shm_coll.o @B/obj/core/comm/reduce.o @B/obj/core/comm/roll_call.o @B/obj/core/comm/signature.o @B/obj/core/comm/store.o @B/obj/core/comm/store_client.o @B/obj/core/comm/queue.o @B/obj/core/comm/wire.o @B/obj/core/base/error.o @B/obj/core/base/threads.o @B/obj/core/base/phase.o @B/obj/core/base/log.o @B/obj/core/tensor/dtype.o */
/* test_wire.c -- engines made of a wire (wire.c, queue.c), over plain sockets: results, bits, and every way to end badly. */
#include <errno.h>
#include <pthread.h>

#include "engine_cases.h"
#include "socket_wire.h"

static bool said(int rank, int status, const char *const *parts) {
    if (w->status[rank] != status) return false;
    for (; *parts; parts++)
        if (!strstr(w->said[rank], *parts)) return false;
    return true;
}
#define SAID(rank, st, ...) said(rank, st, (const char *const[]){__VA_ARGS__, NULL})

static float data_[200000];

static double timed_call(ddp_coll *c) {
    double begin = ddp__now();
    say(call(c));
    return w->seconds[rank_] = ddp__now() - begin;
}

static void mismatch(void) {
    join();
    barrier();
    barrier();
    ddp_coll c = rank_ == 1 ? coll(DDP_COLL_BROADCAST, NULL, data_, 10, DDP_F32, "")
                            : coll(DDP_COLL_ALL_REDUCE, NULL, data_, 4096, DDP_F32, "loss");
    timed_call(&c);
    ddp_req *r; /* dead from now on */
    CHECK(E->post(comm_, &c, &r) == w->status[rank_] && E->health(comm_) == w->status[rank_]);
    ddp_error_take(NULL);
    E->destroy(comm_, 0);
}

static void stalled(void) {
    join();
    barrier();
    if (rank_ == 1) sleep(4);
    ddp_coll c = coll(DDP_COLL_ALL_REDUCE, NULL, data_, 4096, DDP_F32, "bucket 3");
    timed_call(&c);
    E->destroy(comm_, 0);
}

/* What was posted long ago is not late: the clock starts with the wait. */
static void posted_early(void) {
    join();
    ddp_coll c = coll(DDP_COLL_ALL_REDUCE, NULL, data_, 4096, DDP_F32, "");
    if (rank_ == 1) usleep(1500000);
    ddp_req *r = post(&c);
    if (rank_ == 0) usleep(1200000);
    CHECK(E->wait(r) == 0);
    E->req_free(r);
    E->destroy(comm_, 1);
}

static void dies(void) {
    join();
    barrier();
    if (rank_ == 1) {
        usleep(200000);
        kill(getpid(), SIGKILL);
    }
    ddp_coll c = coll(DDP_COLL_ALL_REDUCE, NULL, data_, 100000, DDP_F32, "");
    timed_call(&c);
    E->destroy(comm_, 0);
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
    timed_call(&c);
    E->destroy(comm_, 0);
}

static void aborted(void) {
    pthread_t t;
    join();
    barrier();
    if (rank_ == 1) CHECK(pthread_create(&t, NULL, abort_later, NULL) == 0);
    if (rank_ == 2) sleep(1);
    ddp_coll c = coll(DDP_COLL_ALL_REDUCE, NULL, data_, 100000, DDP_F32, "");
    timed_call(&c);
    if (rank_ == 1) pthread_join(t, NULL);
    E->destroy(comm_, 0);
}

/* Requests may outlive the communicator; nobody is kept long by those who stay. */
static void leave_early(void) {
    join();
    ddp_coll c = coll(DDP_COLL_ALL_REDUCE, NULL, data_, 100000, DDP_F32, "");
    if (rank_ == 0) {
        ddp_req *r = post(&c);
        double begin = ddp__now();
        E->destroy(comm_, 1);
        CHECK(ddp__now() - begin < 1);
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

static void test_ends(void) {
    bool ok = run(2, 10, mismatch, -1);
    for (int r = 0; r < 2; r++)
        ok &= SAID(r, DDP_EMISMATCH, "rank 0 calls all_reduce #3 sum (f32 x 4096, \"loss\", train.lua:10)",
                   "rank 1 calls broadcast #3 from 0 (f32 x 10, train.lua:11)");
    verdict("C3 a mismatch names both calls on both ranks", ok, "texts");
    ok = run(3, 10, mismatch, -1);
    for (int r = 0; r < 3; r++) ok &= strstr(w->said[r], "broadcast #3 from 0 (f32 x 10, train.lua:11)") != NULL;
    verdict("C3 every one of three ranks is told of the mismatch", ok, "texts");
    ok = run(3, 1.5, stalled, -1);
    ok &= w->seconds[0] >= 1.5 && w->seconds[0] < 2.5 && w->seconds[2] < 2.5;
    ok &= SAID(0, DDP_ETIMEOUT, "rank 1 has not reached all_reduce #2 sum (f32 x 4096, bucket 3, train.lua:10") ||
          SAID(2, DDP_ETIMEOUT, "rank 1 has not reached all_reduce #2 sum (f32 x 4096, bucket 3, train.lua:12");
    verdict("C1 C2 a wait ends between T and T + 1 s and names the missing", ok, "text or time");
    verdict("C1 who comes after the others gave up is told at once",
            w->seconds[1] < .5 && SAID(1, DDP_EPEER, "peer: rank", "rank 1 has not reached"), "not");
    verdict("C1 the clock starts when a rank begins to wait", run(2, 1, posted_early, -1), "not");
    ok = run(3, 30, dies, 1);
    for (int r = 0; r < 3; r += 2) ok &= w->seconds[r] < 1.5 && SAID(r, DDP_EPEER, "peer: ", "rank 1", "all_reduce #2");
    verdict("a killed peer is noticed and named", ok, "text or time");
    ok = run(2, 30, leaves, -1) && w->seconds[0] < .4 &&
         SAID(0, DDP_EPEER, "peer: rank 1 left while rank 0 waits in all_reduce #1");
    verdict("a peer that left is named at once", ok, "text or time");
    ok = run(3, 30, aborted, -1);
    for (int r = 0; r < 3; r++)
        ok &= w->seconds[r] < 1.2 && SAID(r, DDP_EPEER, "peer: rank 1: worker 3: out of memory");
    verdict("an abort from any thread ends all ranks with its reason", ok, "text or time");
    simple("leaving with requests outstanding", 2, leave_early);
}

int main(void) {
    static ddp_engine sockets;
    if (!shm_test_begin()) return 2;
    ddp__queue_engine(&sockets, "sockets", socket_init);
    E = &sockets;
    test_cases();
    test_ends();
    return failures != 0;
}
