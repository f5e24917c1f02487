/* link: @B/obj/core/comm/store.o @B/obj/core/comm/store_client.o @B/obj/core/base/error.o @B/obj/core/base/threads.o @B/obj/core/base/log.o */
/* test_store.c -- the key-value store, and strangers at its port: it must not crash, block others or keep what they send. */
#include <arpa/inet.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "../../core/comm/store.h"

static int failed, port;

static void check(bool holds, const char *name) {
    if (holds) printf("ok %s\n", name);
    else {
        const char *why = "";
        ddp_error_take(&why);
        printf("not ok %s: %s\n", name, why);
        failed = 1;
    }
    ddp_error_take(NULL);
    fflush(stdout);
}

/* ---- a stranger ---- */

static int knock(void) {
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
    a.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    if (fd < 0 || connect(fd, (struct sockaddr *)&a, sizeof a) < 0) {
        perror("connect");
        exit(1);
    }
    return fd;
}

/* Is the connection closed by the other side within two seconds? */
static bool cut_off(int fd) {
    struct timeval t = {2, 0};
    char c;
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &t, sizeof t);
    ssize_t k = recv(fd, &c, 1, 0);
    return k == 0 || (k < 0 && errno == ECONNRESET); /* a timeout is no end */
}

/* A header as store.c has it. */
typedef struct head {
    uint32_t magic, op, seq, key_len;
    uint64_t value_len;
    char token[16];
} head;

static bool sent_is_cut_off(const void *p, size_t n) {
    int fd = knock();
    bool sent = send(fd, p, n, MSG_NOSIGNAL) == (ssize_t)n, cut = cut_off(fd);
    close(fd);
    return sent && cut;
}

/* ---- the cases ---- */

static ddp_store *join(const char *job) { return ddp__store_connect("127.0.0.1", port, job, ddp__now() + 5); }

static bool works(ddp_store *s) {
    void *value = NULL;
    size_t n = 0;
    static int k;
    char key[32];
    snprintf(key, sizeof key, "key %d", ++k);
    bool ok = s && ddp__store_set(s, key, "value", 6) == 0 && ddp__store_get(s, key, ddp__now() + 5, &value, &n) == 0 &&
              n == 6 && strcmp(value, "value") == 0;
    free(value);
    return ok;
}

static void test_use(ddp_store *s) {
    void *value = NULL;
    size_t n = 0;
    int64_t sum = 0;
    check(works(s), "what is set is found");
    check(ddp__store_add(s, "count", 2, &sum) == 0 && ddp__store_add(s, "count", 3, &sum) == 0 && sum == 5,
          "a counter adds up");
    check(ddp__store_try(s, "nowhere", ddp__now() + 5, &value, &n) == 0 && !value,
          "a key that is not there is not waited for when tried");
    double t = ddp__now();
    check(ddp__store_get(s, "nowhere", t + 0.3, &value, &n) == DDP_ETIMEOUT && ddp__now() - t > 0.29 &&
              ddp__now() - t < 1.3,
          "C1 waiting for a key ends at its deadline");
    char *big = calloc(1, 1 << 20);
    check(ddp__store_set(s, "big", big, 1 << 20) == 0 && ddp__store_get(s, "big", ddp__now() + 5, &value, &n) == 0 &&
              n == 1 << 20,
          "a value of a megabyte comes back whole");
    free(value);
    free(big);
}

static void test_other_job(void) {
    ddp_store *s = join("another");
    void *value;
    size_t n;
    int st = s ? ddp__store_get(s, "key 1", ddp__now() + 5, &value, &n) : ddp__pending();
    const char *why = "";
    ddp_error_take(&why);
    bool told = st == DDP_EMISMATCH && strstr(why, "another job");
    check(told, "a client of another job is refused, and told so");
    ddp__store_free(s);
}

static void test_strangers(ddp_store *s) {
    static char noise[256];
    head h = {.magic = 0x31706464, .op = 1, .seq = 1, .key_len = 3, .value_len = 1u << 20};
    memset(noise, 'A', sizeof noise);
    static const char browser[] = "GET / HTTP/1.1\r\nHost: localhost and more than a header\r\n\r\n";
    check(sent_is_cut_off(browser, sizeof browser), "a web browser is cut off");
    check(sent_is_cut_off(noise, sizeof noise), "noise is cut off");
    check(sent_is_cut_off(&h, sizeof h), "a right header without the job's token is cut off before its value");
    h.value_len = UINT64_MAX;
    check(sent_is_cut_off(&h, sizeof h), "so is one of an absurd length");
    int half = knock(), silent = knock();
    check(send(half, &h, 7, MSG_NOSIGNAL) == 7 && works(s), "half a header holds up nobody");
    check(works(s), "nor does a stranger that says nothing");
    close(half);
    close(silent);
    srand(1);
    bool all = true;
    for (int i = 0; i < 2000; i++) {
        int fd = knock();
        size_t n = (size_t)rand() % sizeof noise;
        for (size_t k = 0; k < n; k++) noise[k] = (char)rand();
        if (i % 3 == 0 && n >= 4) memcpy(noise, &h.magic, 4); /* past the first look */
        all &= n == 0 || send(fd, noise, n, MSG_NOSIGNAL) >= 0;
        close(fd);
    }
    check(all && works(s), "2,000 strangers with random bytes harm nobody");
}

int main(void) {
    int fd = ddp__store_listen("127.0.0.1", &port);
    ddp_store_server *server = fd < 0 ? NULL : ddp__store_serve(fd, "job");
    ddp_store *s = server ? join("job") : NULL;
    check(s != NULL, "a client joins");
    if (!s) return 1;
    test_use(s);
    test_other_job();
    test_strangers(s);
    int taken = port;
    check(ddp__store_listen("127.0.0.1", &taken) < 0 && ddp__pending() == DDP_EIO, "a port in use is an error");
    int other = 0;
    check(ddp__store_listen("192.0.2.7", &other) < 0, "an address that is not this host's is an error");
    ddp__store_free(s);
    ddp__store_server_free(server);
    return failed;
}
