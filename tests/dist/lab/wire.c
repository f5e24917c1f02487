/* wire.c -- a cable between two network namespaces: a TAP device in each, joined here, with delay, loss, a rate and a cut.
 *
 *   wire NAMESPACE ADDRESS NAMESPACE ADDRESS CONTROL
 *
 * CONTROL is a file with the words delay=MS loss=PERCENT rate=MBIT cut=0|1, read again whenever it changes. Prints "up". */
#include <errno.h>
#include <fcntl.h>
#include <linux/if_tun.h>
#include <net/if.h>
#include <poll.h>
#include <sched.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum { FRAME_MAX = 9100, QUEUE = 16384 };

typedef struct frame {
    double due; /* seconds */
    size_t n;
    char bytes[FRAME_MAX];
} frame;

typedef struct side {
    int fd;
    frame *queue[QUEUE]; /* frames that came in here and go out on the other side */
    unsigned first, last;
    double free_at; /* when the line has sent what it was given */
} side;

static struct {
    double delay, loss, rate; /* seconds, 0..1, bytes a second (0: no limit) */
    bool cut;
} cable;

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void die(const char *what) {
    perror(what);
    exit(1);
}

static int open_tap(const char *space, const char *address) {
    char path[128], command[256];
    snprintf(path, sizeof path, "/run/netns/%s", space);
    int ns = open(path, O_RDONLY | O_CLOEXEC);
    if (ns < 0 || setns(ns, CLONE_NEWNET) != 0) die(path);
    close(ns);
    int fd = open("/dev/net/tun", O_RDWR | O_CLOEXEC | O_NONBLOCK);
    struct ifreq r = {.ifr_flags = IFF_TAP | IFF_NO_PI};
    snprintf(r.ifr_name, sizeof r.ifr_name, "wire0");
    if (fd < 0 || ioctl(fd, TUNSETIFF, &r) != 0) die("/dev/net/tun");
    snprintf(command, sizeof command,
             "ip link set wire0 mtu 9000 up && ip addr add %s/24 dev wire0 && ip link set lo up", address);
    if (system(command) != 0) die(command);
    return fd;
}

static void read_control(const char *path) {
    static struct timespec seen;
    struct stat s;
    char words[256];
    if (stat(path, &s) != 0 || (s.st_mtim.tv_sec == seen.tv_sec && s.st_mtim.tv_nsec == seen.tv_nsec)) return;
    seen = s.st_mtim;
    FILE *f = fopen(path, "re");
    size_t n = f ? fread(words, 1, sizeof words - 1, f) : 0;
    if (f) fclose(f);
    words[n] = 0;
    for (char *rest = words, *word; (word = strtok_r(rest, " \n", &rest));) {
        double v = strchr(word, '=') ? atof(strchr(word, '=') + 1) : 0;
        if (strncmp(word, "delay=", 6) == 0) cable.delay = v * 1e-3;
        if (strncmp(word, "loss=", 5) == 0) cable.loss = v * 1e-2;
        if (strncmp(word, "rate=", 5) == 0) cable.rate = v * 125e3;
        if (strncmp(word, "cut=", 4) == 0) cable.cut = v != 0;
    }
}

/* Sends on what is due. When the next frame is due, or `until`. */
static double send_due(side *from, int to, double until) {
    while (from->first != from->last) {
        frame *f = from->queue[from->first % QUEUE];
        if (f->due > now()) return f->due < until ? f->due : until;
        if (!cable.cut && write(to, f->bytes, f->n) < 0 && errno == EAGAIN) return now() + 1e-4;
        free(f);
        from->first++;
    }
    return until;
}

static void take_in(side *s) {
    static char bytes[FRAME_MAX];
    for (int k = 0; k < 64; k++) {
        ssize_t n = read(s->fd, bytes, sizeof bytes);
        if (n <= 0) return;
        if (cable.cut || drand48() < cable.loss || s->last - s->first >= QUEUE) continue;
        frame *f = malloc(sizeof *f);
        if (!f) die("malloc");
        double t = now();
        if (s->free_at < t) s->free_at = t;
        if (cable.rate > 0) s->free_at += (double)n / cable.rate;
        if (cable.rate > 0 && s->free_at - t > 0.2) { /* the queue of a line this slow is full */
            s->free_at -= (double)n / cable.rate;
            free(f);
            continue;
        }
        f->due = s->free_at + cable.delay;
        f->n = (size_t)n;
        memcpy(f->bytes, bytes, f->n);
        s->queue[s->last++ % QUEUE] = f;
    }
}

int main(int argc, char **argv) {
    static side a, b;
    if (argc != 6) return 2;
    a.fd = open_tap(argv[1], argv[2]);
    b.fd = open_tap(argv[3], argv[4]);
    puts("up");
    fflush(stdout);
    for (;;) {
        read_control(argv[5]);
        double next = send_due(&a, b.fd, now() + 0.02);
        next = send_due(&b, a.fd, next);
        double wait = next - now();
        struct timespec t = {0, wait > 0 ? (long)(wait * 1e9) : 0};
        struct pollfd p[] = {{.fd = a.fd, .events = POLLIN}, {.fd = b.fd, .events = POLLIN}};
        ppoll(p, 2, &t, NULL);
        take_in(&a);
        take_in(&b);
    }
}
