/* agent.c -- ddprun on several hosts (agent.h). All of it goes through the store, whose keys begin with the number of the attempt:
 *
 *   K/came/I      how many said that they are node I
 *   K/node/I      "version nodes ranks port host" of node I; port: MASTER_PORT of a program
 *   K/beat/I      a number that grows as long as node I lives
 *   K/failures    how many failures; K/failure/1 is the first: "I code", a newline and the text
 *   K/done/I      node I's ranks ended well;  K/bye/I  it has heard the end */
#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "agent.h"

enum { MAX_NODES = 4096 };

struct agent {
    job *j;
    ddp_store *store; /* the thread's own, once it runs */
    double limit;     /* seconds without a beat */
    int event;
    pthread_t thread;
    bool started;
    pthread_mutex_t lock; /* guards what follows; the thread writes, so it may read without */
    pthread_cond_t wake;
    agent_news news;
    bool tell_done, told_done, leaving, left, gone; /* gone: the store does not answer */
    int tell_code;                                  /* -1: no failure to tell */
    char tell_text[4096];
    double last_word; /* from the store */
    double *heard;    /* [nodes]: when its beat last changed */
    long *beat;       /* [nodes] */
    bool *done, *bye; /* [nodes] */
    char (*host)[128];
};

static const char *key_of(const job *j, const char *what, int node, char *key, size_t n) {
    snprintf(key, n, "%d/%s/%d", j->restart, what, node);
    return key;
}
#define KEY(j, what, node) key_of(j, what, node, (char[64]){0}, 64)

/* Takes a pending error as a sentence. */
static int refuse(const char *what) {
    const char *why = "";
    ddp_error_take(&why);
    say("%s%s%s", what ? what : "", what ? ": " : "", why);
    return 1;
}

/* ---- joining ---------------------------------------------------------------------------------------------------------- */

static double heartbeat_limit(void) {
    const char *s = getenv("DDP_HEARTBEAT");
    double v = s ? atof(s) : 0;
    return v >= 0.2 ? v : 5;
}

static int announce(job *j, ddp_store *s) {
    char host[100] = "?", text[200];
    int64_t times;
    gethostname(host, sizeof host - 1);
    if (ddp__store_add(s, KEY(j, "came", j->node), 1, &times) < 0) return -1;
    if (times > 1) {
        say("node %d is here already: two ddprun say that they are --node-rank %d of the job at %s port %d", j->node,
            j->node, j->addr, j->port);
        return 1;
    }
    snprintf(text, sizeof text, "%s %d %d %d %s", DDP_RUN_VERSION, j->nodes, j->n, j->program_port, host);
    return ddp__store_set(s, KEY(j, "node", j->node), text, strlen(text) + 1) < 0 ? -1 : 0;
}

/* What node i says of itself. 0, 1 after a sentence, -1 with an error pending. */
static int hear_node(job *j, ddp_store *s, int i, double deadline, int *ranks) {
    struct agent *a = j->agent;
    void *value = NULL;
    size_t n;
    char version[32];
    int nodes, port, st = 0;
    if (ddp__store_get(s, KEY(j, "node", i), deadline, &value, &n) < 0) return -1;
    if (n == 0 || sscanf(value, "%31s %d %d %d %127s", version, &nodes, ranks, &port, a->host[i]) != 5 || *ranks < 1 ||
        *ranks > MAX_LOCAL_RANKS) {
        say("node %d says something that this version of ddp does not understand", i);
        st = 1;
    } else if (strcmp(version, DDP_RUN_VERSION) != 0) {
        say("node %d (%s) runs ddp %s, node %d runs %s: the same on all hosts is needed", i, a->host[i], version,
            j->node, DDP_RUN_VERSION);
        st = 1;
    } else if (nodes != j->nodes) {
        say("node %d (%s) was started with --nnodes %d, node %d with --nnodes %d", i, a->host[i], nodes, j->node,
            j->nodes);
        st = 1;
    }
    if (st == 0 && i == 0) j->program_port = port;
    free(value);
    return st;
}

/* Hears all nodes; names the missing ones at the deadline. */
static int hear_all(job *j, ddp_store *s, double deadline) {
    char missing[400] = "";
    size_t at = 0;
    int n_missing = 0;
    j->world = 0;
    for (int i = 0; i < j->nodes; i++) {
        int ranks = 0, st = hear_node(j, s, i, n_missing ? ddp__now() : deadline, &ranks);
        if (st > 0) return st;
        if (st < 0 && ddp__pending() != DDP_ETIMEOUT) return -1;
        if (st < 0) {
            ddp_error_take(NULL);
            if (at < sizeof missing)
                at += (size_t)snprintf(missing + at, sizeof missing - at, "%s%d", n_missing ? ", " : "", i);
            n_missing++;
        }
        if (i < j->node) j->first_rank += ranks;
        j->world += ranks;
    }
    if (!n_missing) return 0;
    say("missing: node%s %s of %d, after %.1f s; each host needs: ddprun --nnodes %d --node-rank I --master-addr %s "
        "--master-port %d ...",
        n_missing == 1 ? "" : "s", missing, j->nodes, j->o->timeout > 0 ? j->o->timeout : 600.0, j->nodes, j->addr,
        j->port);
    return 1;
}

/* One try to meet the others; -1: the store went away meanwhile (that of the attempt before). */
static int meet(job *j, double deadline) {
    struct agent *a = j->agent;
    j->first_rank = 0;
    a->store = ddp__store_connect(j->addr, j->port, j->token, deadline);
    if (!a->store) return refuse(NULL);
    int st = announce(j, a->store);
    if (st == 0) st = hear_all(j, a->store, deadline);
    if (st == 0) return 0;
    if (st < 0 && (ddp__pending() != DDP_EPEER || ddp__now() >= deadline)) st = refuse(NULL);
    ddp_error_take(NULL);
    ddp__store_free(a->store);
    a->store = NULL;
    return st;
}

static void *beat_main(void *arg);

static struct agent *agent_new(job *j) {
    struct agent *a = calloc(1, sizeof *a);
    if (!a) return NULL;
    size_t n = (size_t)j->nodes;
    *a = (struct agent){
        .j = j, .limit = heartbeat_limit(), .tell_code = -1, .news = {.failed_node = -1, .lost_node = -1}};
    a->event = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    a->heard = calloc(n, sizeof *a->heard);
    a->beat = calloc(n, sizeof *a->beat);
    a->done = calloc(n, sizeof *a->done);
    a->bye = calloc(n, sizeof *a->bye);
    a->host = calloc(n, sizeof *a->host);
    pthread_mutex_init(&a->lock, NULL);
    pthread_condattr_t attr;
    pthread_condattr_init(&attr);
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    pthread_cond_init(&a->wake, &attr);
    pthread_condattr_destroy(&attr);
    if (a->event >= 0 && a->heard && a->beat && a->done && a->bye && a->host) return a;
    return NULL; /* the process ends */
}

/* Until all have come. Nothing runs yet that a signal would leave behind, so it ends the process; threads, which inherit what is
 * blocked, are made before and after. */
static int meet_all(job *j, double deadline) {
    sigset_t ending, before;
    int st;
    sigemptyset(&ending);
    sigaddset(&ending, SIGINT);
    sigaddset(&ending, SIGTERM);
    sigaddset(&ending, SIGQUIT);
    pthread_sigmask(SIG_UNBLOCK, &ending, &before);
    while ((st = meet(j, deadline)) < 0) usleep(50000);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return st;
}

int agent_join(job *j) {
    double deadline = ddp__now() + (j->o->timeout > 0 ? j->o->timeout : 600);
    struct agent *a = j->agent = agent_new(j);
    int st, err;
    if (!a) {
        say("out of memory");
        return 1;
    }
    if (j->node == 0) {
        int fd = ddp__store_listen(j->addr, &j->port);
        if (fd >= 0) j->store = ddp__store_serve(fd, j->token);
        if (!j->store) return refuse(NULL);
    }
    st = meet_all(j, deadline);
    if (st != 0 && j->node == 0) usleep(500000); /* the others hear from this store why they do not fit either */
    if (st != 0) return st;
    for (int i = 0; i < j->nodes; i++) a->heard[i] = ddp__now();
    a->last_word = ddp__now();
    if ((err = pthread_create(&a->thread, NULL, beat_main, a)) != 0) {
        say("cannot start a thread: %s", strerror(err));
        return 1;
    }
    a->started = true;
    return 0;
}

/* ---- beating ---------------------------------------------------------------------------------------------------------- */

static void tell_news(struct agent *a) {
    uint64_t one = 1;
    while (write(a->event, &one, sizeof one) < 0 && errno == EINTR) {
    }
}

/* The value of a key as text into out; 1 it is there, 0 not, -1 an error. */
static int peek(struct agent *a, const char *key, char *out, size_t n) {
    void *value = NULL;
    size_t len = 0;
    int st = ddp__store_try(a->store, key, ddp__now() + a->limit, &value, &len);
    if (st == 1) snprintf(out, n, "%.*s", (int)len, (const char *)value);
    free(value);
    return st;
}

static int send_own(struct agent *a, long k) {
    job *j = a->j;
    char text[4200];
    pthread_mutex_lock(&a->lock);
    int code = a->tell_code;
    bool done = a->tell_done && !a->told_done, leaving = a->leaving;
    snprintf(text, sizeof text, "%d %d\n%s", j->node, code, a->tell_text);
    a->tell_code = -1;
    a->told_done |= done;
    pthread_mutex_unlock(&a->lock);
    int64_t which = 0;
    char beat[32], key[64];
    snprintf(beat, sizeof beat, "%ld", k);
    int st = ddp__store_set(a->store, KEY(j, "beat", j->node), beat, strlen(beat) + 1);
    if (st == 0 && code >= 0) {
        snprintf(key, sizeof key, "%d/failures", j->restart);
        st = ddp__store_add(a->store, key, 1, &which);
        if (st == 0 && which == 1) st = ddp__store_set(a->store, KEY(j, "failure", 1), text, strlen(text) + 1);
    }
    if (st == 0 && done) st = ddp__store_set(a->store, KEY(j, "done", j->node), "1", 2);
    if (st == 0 && leaving) st = ddp__store_set(a->store, KEY(j, "bye", j->node), "1", 2);
    return st;
}

/* Looks at node i. */
static int look_at(struct agent *a, int i) {
    char text[64];
    int st = peek(a, KEY(a->j, "beat", i), text, sizeof text);
    if (st < 0) return st;
    long beat = st ? atol(text) : 0;
    int done = a->done[i] ? 1 : peek(a, KEY(a->j, "done", i), text, sizeof text);
    int bye = a->bye[i] ? 1 : peek(a, KEY(a->j, "bye", i), text, sizeof text);
    if (done < 0 || bye < 0) return -1;
    pthread_mutex_lock(&a->lock);
    if (beat != a->beat[i]) a->heard[i] = ddp__now();
    a->beat[i] = beat;
    a->done[i] = done;
    a->bye[i] = bye;
    pthread_mutex_unlock(&a->lock);
    return 0;
}

static int look_around(struct agent *a) {
    char text[4200];
    int st = peek(a, KEY(a->j, "failure", 1), text, sizeof text), node, code, lost = -1;
    bool all_done = true;
    if (st < 0) return st;
    bool failed = st == 1 && sscanf(text, "%d %d", &node, &code) == 2;
    for (int i = 0; i < a->j->nodes; i++) {
        if ((st = look_at(a, i)) < 0) return st;
        all_done &= a->done[i];
        if (i != a->j->node && !a->bye[i] && ddp__now() - a->heard[i] > a->limit) lost = i;
    }
    pthread_mutex_lock(&a->lock);
    a->last_word = ddp__now();
    if (failed && a->news.failed_node < 0) {
        const char *eol = strchr(text, '\n');
        a->news.failed_node = node;
        a->news.code = code;
        snprintf(a->news.failure, sizeof a->news.failure, "%s", eol ? eol + 1 : "");
        tell_news(a);
    }
    if (lost >= 0 && a->news.lost_node < 0) {
        a->news.lost_node = lost;
        a->news.lost_for = ddp__now() - a->heard[lost];
        snprintf(a->news.lost_host, sizeof a->news.lost_host, "%s", a->host[lost]);
        tell_news(a);
    }
    if (all_done && !a->news.all_done) {
        a->news.all_done = true;
        tell_news(a);
    }
    pthread_mutex_unlock(&a->lock);
    return 0;
}

/* Until the next beat, or until there is something to tell. */
static void rest(struct agent *a) {
    double until = ddp__now() + (a->limit / 10 < 0.5 ? a->limit / 10 : 0.5);
    struct timespec t = {(time_t)until, (long)((until - (double)(time_t)until) * 1e9)};
    pthread_mutex_lock(&a->lock);
    while (a->tell_code < 0 && (!a->tell_done || a->told_done) && !a->leaving && ddp__now() < until)
        if (pthread_cond_timedwait(&a->wake, &a->lock, &t) == ETIMEDOUT) break;
    pthread_mutex_unlock(&a->lock);
}

static void *beat_main(void *arg) {
    struct agent *a = arg;
    for (long k = 1;; k++) {
        pthread_mutex_lock(&a->lock);
        bool leaving = a->leaving;
        pthread_mutex_unlock(&a->lock);
        int st = send_own(a, k);
        if (st == 0) st = look_around(a);
        ddp_error_take(NULL);
        pthread_mutex_lock(&a->lock);
        a->gone |= st < 0;
        a->left = leaving || st < 0;
        bool left = a->left;
        pthread_mutex_unlock(&a->lock);
        if (st < 0) tell_news(a);
        if (left) return NULL;
        rest(a);
    }
}

/* ---- the launcher's side ---------------------------------------------------------------------------------------------- */

int agent_fd(const job *j) { return j->agent ? j->agent->event : -1; }

double agent_patience(const job *j) { return j->agent ? j->agent->limit : 0; }

void agent_look(job *j, agent_news *news) {
    struct agent *a = j->agent;
    uint64_t n;
    while (read(a->event, &n, sizeof n) < 0 && errno == EINTR) {
    }
    pthread_mutex_lock(&a->lock);
    *news = a->news;
    double silent = ddp__now() - a->last_word;
    bool gone = a->gone && j->node != 0;
    pthread_mutex_unlock(&a->lock);
    if (news->failed_node >= 0 || news->lost_node >= 0 || (!gone && silent <= a->limit)) return;
    news->lost_node = 0; /* the store does not answer: it lives there */
    news->lost_for = silent;
    snprintf(news->lost_host, sizeof news->lost_host, "%s", a->host[0]);
}

void agent_tell_failure(job *j, int code, const char *text) {
    struct agent *a = j->agent;
    pthread_mutex_lock(&a->lock);
    a->tell_code = code;
    snprintf(a->tell_text, sizeof a->tell_text, "%s", text);
    pthread_cond_signal(&a->wake);
    pthread_mutex_unlock(&a->lock);
}

void agent_tell_done(job *j) {
    struct agent *a = j->agent;
    pthread_mutex_lock(&a->lock);
    a->tell_done = true;
    pthread_cond_signal(&a->wake);
    pthread_mutex_unlock(&a->lock);
}

static bool all_said_bye(const struct agent *a) {
    for (int i = 0; i < a->j->nodes; i++)
        if (i != a->j->node && !a->bye[i] && ddp__now() - a->heard[i] <= a->limit) return false;
    return true;
}

void agent_leave(job *j) {
    struct agent *a = j->agent;
    double until = ddp__now() + j->o->grace + 2;
    if (!a) return;
    /* Node 0 goes last: its store is where the others hear of the end. */
    while (a->started && j->node == 0 && ddp__now() < until) {
        pthread_mutex_lock(&a->lock);
        bool enough = all_said_bye(a) || a->gone;
        pthread_mutex_unlock(&a->lock);
        if (enough) break;
        usleep(20000);
    }
    pthread_mutex_lock(&a->lock);
    a->leaving = true;
    pthread_cond_signal(&a->wake);
    pthread_mutex_unlock(&a->lock);
    until = ddp__now() + 1;
    bool left = !a->started;
    while (!left && ddp__now() < until) {
        pthread_mutex_lock(&a->lock);
        left = a->left;
        pthread_mutex_unlock(&a->lock);
        if (!left) usleep(2000);
    }
    j->agent = NULL;
    if (!left) return; /* the thread hangs in a dead connection: what it uses stays */
    if (a->started) pthread_join(a->thread, NULL);
    ddp__store_free(a->store);
    close(a->event);
    free(a->heard);
    free(a->beat);
    free(a->done);
    free(a->bye);
    free(a->host);
    free(a);
}
