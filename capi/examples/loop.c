/*
 * A control loop over the network: every millisecond a state leaves, ahead of everything else, and its answer comes back.
 *
 *     cc -O2 -o loop loop.c $(pkg-config --cflags --libs lm_rt)
 *     loop answer eth1
 *     loop ask eth1 10.0.0.2 10000
 */
#define _POSIX_C_SOURCE 200809L

#include <arpa/inet.h>
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <lm_rt.h>

#define PERIOD_NS 1000000
#define BUCKETS 24

struct state {
    uint64_t number;
    uint64_t sent_ns;
    double position[8];
};

/* Two buffers in turns: one is written while the other leaves. */
struct sender {
    lm_rt *socket;
    struct state *buffers[2];
    unsigned next;
};

static uint64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000 + (uint64_t)now.tv_nsec;
}

static void die(const char *what)
{
    fprintf(stderr, "%s: %s\n", what, lm_rt_error());
    exit(1);
}

static struct sender open_sender(const char *interface)
{
    struct lm_rt_config config = lm_rt_defaults(interface);
    struct sender sender = {lm_rt_socket(&config), {NULL, NULL}, 0};
    if (sender.socket == NULL)
        die("socket");
    for (int i = 0; i < 2; i++)
        if ((sender.buffers[i] = lm_rt_mmap(sender.socket, 1)) == NULL)
            die("mmap");
    return sender;
}

/* Both buffers are locked, or the deadline has passed: this state is left out. */
static int send_state(struct sender *sender, const struct state *state, const struct sockaddr_in *to)
{
    struct lm_rt_options options = {sizeof options, 2 * PERIOD_NS, 7, 0};
    struct state *buffer = sender->buffers[sender->next];
    if (lm_rt_unlocked(sender->socket, buffer) == LM_RT_LOCKED)
        return 0;
    *buffer = *state;
    if (lm_rt_sendto(sender->socket, buffer, sizeof *buffer, &options, (const struct sockaddr *)to, sizeof *to) < 0) {
        if (errno == ETIME || errno == ETIMEDOUT)
            return 0;
        die("send");
    }
    sender->next ^= 1;
    return 1;
}

/* Waits for the last states to leave. */
static void close_sender(struct sender *sender)
{
    while (lm_rt_socket_close(sender->socket) < 0)
        if (errno != EBUSY)
            die("close");
}

/* Answers until nothing has come for two seconds. */
static void answer(const char *interface)
{
    struct sender sender = open_sender(interface);
    struct lm_rt_info info = LM_RT_SIZED(lm_rt_info);
    struct state state;
    int64_t patience_ns = -1;
    puts("ready");
    fflush(stdout);
    while (lm_rt_recvfrom(sender.socket, &state, sizeof state, patience_ns, &info) == sizeof state) {
        send_state(&sender, &state, &info.from);
        patience_ns = 2000000000;
    }
    if (errno != ETIMEDOUT)
        die("receive");
    close_sender(&sender);
}

static int by_value(const void *a, const void *b)
{
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return (x > y) - (x < y);
}

static void print(uint64_t *round_trips_ns, size_t count)
{
    size_t buckets[BUCKETS] = {0};
    qsort(round_trips_ns, count, sizeof *round_trips_ns, by_value);
    for (size_t i = 0; i < count; i++) {
        unsigned bucket = 0;
        while (bucket + 1 < BUCKETS && round_trips_ns[i] >= (UINT64_C(1000) << bucket))
            bucket++;
        buckets[bucket]++;
    }
    for (unsigned bucket = 0; bucket < BUCKETS; bucket++)
        if (buckets[bucket] > 0)
            printf("under %8" PRIu64 " us: %zu\n", UINT64_C(1) << bucket, buckets[bucket]);
    printf("round trip: least %" PRIu64 " ns, median %" PRIu64 " ns, longest %" PRIu64 " ns\n", round_trips_ns[0],
           round_trips_ns[count / 2], round_trips_ns[count - 1]);
}

static void ask(const char *interface, const char *address, size_t count)
{
    struct sockaddr_in to = {.sin_family = AF_INET, .sin_port = htons(LM_RT_PORT)};
    uint64_t *round_trips_ns = calloc(count, sizeof *round_trips_ns);
    struct state state = {0, 0, {0}}, came;
    size_t sent = 0, answered = 0;
    uint64_t last = 0;
    struct lm_rt_stats stats = LM_RT_SIZED(lm_rt_stats);
    if (inet_pton(AF_INET, address, &to.sin_addr) != 1 || round_trips_ns == NULL) {
        fprintf(stderr, "%s is no address\n", address);
        exit(2);
    }
    struct sender sender = open_sender(interface);
    /* The first message waits for the other host, and opens nothing in the loop any more. */
    while (!send_state(&sender, &state, &to))
        ;
    uint64_t next_ns = now_ns();
    for (state.number = 1; state.number <= count; state.number++) {
        next_ns += PERIOD_NS;
        state.sent_ns = now_ns();
        sent += (size_t)send_state(&sender, &state, &to);
        /* Waiting for answers is what drives the socket until the next period. */
        for (uint64_t now = now_ns(); now < next_ns; now = now_ns()) {
            if (lm_rt_recvfrom(sender.socket, &came, sizeof came, (int64_t)(next_ns - now), NULL) < 0) {
                if (errno != ETIMEDOUT)
                    die("receive");
            } else if (came.number > 0) {
                if (answered == 0) {
                    puts("ready");
                    fflush(stdout);
                }
                round_trips_ns[answered++] = now_ns() - came.sent_ns;
                last = came.number;
            }
        }
    }
    if (lm_rt_stats(sender.socket, &stats) < 0)
        die("statistics");
    printf("%zu states sent, %zu answered, the last one was %" PRIu64 "; of answers %" PRIu64
           " were lost and %" PRIu64 " late\n",
           sent, answered, last, stats.lost, stats.late);
    if (answered > 0)
        print(round_trips_ns, answered);
    free(round_trips_ns);
    close_sender(&sender);
}

int main(int argc, char **argv)
{
    if (argc == 3 && strcmp(argv[1], "answer") == 0) {
        answer(argv[2]);
    } else if (argc == 5 && strcmp(argv[1], "ask") == 0 && atol(argv[4]) > 0) {
        ask(argv[2], argv[3], (size_t)atol(argv[4]));
    } else {
        fprintf(stderr, "usage: loop answer INTERFACE | loop ask INTERFACE ADDRESS STATES\n");
        return 2;
    }
    return 0;
}
