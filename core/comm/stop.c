/* stop.c -- SIGTERM and SIGINT as something that a loop asks about, with one answer for all ranks. */
#include <pthread.h>
#include <signal.h>

#include "comm.h"

static volatile sig_atomic_t told;

static void on_signal(int sig) {
    (void)sig;
    told = 1;
}

/* Only what would end the process is replaced: a program's own handler, or nohup's "ignore", stays. The second signal of a
 * kind ends the process as it always did. */
static void watch(void) {
    static const int signals[] = {SIGTERM, SIGINT};
    struct sigaction ours = {.sa_handler = on_signal, .sa_flags = SA_RESTART | SA_RESETHAND}, now;
    for (size_t i = 0; i < sizeof signals / sizeof *signals; i++) {
        bool ends = sigaction(signals[i], NULL, &now) == 0 && !(now.sa_flags & SA_SIGINFO) && now.sa_handler == SIG_DFL;
        if (ends) sigaction(signals[i], &ours, NULL);
    }
}

int ddp_stop_requested(void) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    if (ddp__pending()) return ddp__pending();
    pthread_once(&once, watch);
    int st = ddp__job_ready("stop_requested");
    int32_t stop = told != 0;
    if (st == 0 && ddp__job.size > 1) {
        ddp_coll c = ddp__coll(DDP_COLL_ALL_REDUCE, NULL, &stop, 1, DDP_I32, "stop requested");
        c.reduce = DDP_MAX;
        st = ddp__coll_run(&c, NULL);
    }
    return st < 0 ? st : stop;
}
