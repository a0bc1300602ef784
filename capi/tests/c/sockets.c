/*
 * What a C program meets: messages of every length, every error. `sockets echo IF` answers, `sockets check IF OTHER_IF` asks and checks;
 * of OTHER_IF the link is taken away.
 */
#define _GNU_SOURCE
#define LM_RT_PAPER_NAMES

#include <arpa/inet.h>
#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <lm_rt.h>

#define CHECK(what) \
    do { \
        if (!(what)) { \
            int said = errno; \
            fprintf(stderr, "line %d: not so: %s (errno %d: %s)\n", __LINE__, #what, said, lm_rt_error()); \
            exit(1); \
        } \
    } while (0)
/* The call fails so, with a line that has these words. */
#define FAILS(call, error, words) \
    do { \
        errno = 0; \
        CHECK((intptr_t)(call) == -1 && errno == (error)); \
        CHECK(strstr(lm_rt_error(), words) != NULL); \
    } while (0)
#define NO_POINTER(call, error, words) FAILS((call) == NULL ? -1 : 0, error, words)

static uint64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000 + (uint64_t)now.tv_nsec;
}

static struct sockaddr_in address(const char *ip, uint16_t port)
{
    struct sockaddr_in to = {.sin_family = AF_INET, .sin_port = htons(port)};
    CHECK(inet_pton(AF_INET, ip, &to.sin_addr) == 1);
    return to;
}

static ssize_t send_to(lm_rt *socket, const void *buffer, size_t len, const struct lm_rt_options *options,
                       struct sockaddr_in to)
{
    return rt_sendto(socket, buffer, len, options, (struct sockaddr *)&to, sizeof to);
}

static int wait_for(lm_rt *socket, const void *buffer)
{
    int became;
    while ((became = lm_rt_unlocked(socket, buffer)) == LM_RT_LOCKED)
        ;
    return became;
}

static void close_all_sent(lm_rt *socket)
{
    while (rt_socket_close(socket) < 0)
        CHECK(errno == EBUSY);
}

/* Two of the longest may be under way, and messages of one page with them. */
static struct lm_rt_config config_of(const char *interface)
{
    struct lm_rt_config config = lm_rt_defaults(interface);
    config.keep = 1;
    config.frames = 1;
    config.blocks_of_1 = 3;
    config.blocks_of_16 = 3;
    config.flags = LM_RT_SAME_HOST;
    return config;
}

static void echo(const char *interface)
{
    struct lm_rt_config config = config_of(interface);
    config.frames = 48;
    lm_rt *socket = rt_socket(&config);
    CHECK(socket != NULL);
    char *buffer = rt_mmap(socket, 16);
    struct lm_rt_info info = LM_RT_SIZED(lm_rt_info);
    ssize_t len;
    CHECK(buffer != NULL);
    puts("ready");
    fflush(stdout);
    while ((len = rt_recvfrom(socket, buffer, LM_RT_MESSAGE_MAX(16), -1, &info)) >= 0) {
        /* Without a deadline an answer is given up when 2 ms pass between two of its packets. */
        struct lm_rt_options options = {sizeof options, 1000000000, info.priority, 0};
        if (len == 1)
            continue; /* not answered */
        if (len == 3) { /* answered by one of four pages, and one that is of use for 50 ms */
            /* The asking end has returned from its call by then, which takes what comes meanwhile. */
            struct timespec until_it_has = {0, 100000000};
            CHECK(nanosleep(&until_it_has, NULL) == 0);
            CHECK(send_to(socket, buffer, LM_RT_MESSAGE_MAX(4), &options, info.from) > 0);
            CHECK(wait_for(socket, buffer) == LM_RT_LEFT);
            options.deadline_ns = 50000000;
        }
        CHECK(send_to(socket, buffer, (size_t)len, &options, info.from) == len);
        CHECK(wait_for(socket, buffer) == LM_RT_LEFT);
    }
    CHECK(!"it is ended from outside");
}

static int unprivileged(const struct lm_rt_config *config)
{
    pid_t child = fork();
    if (child == 0) {
        if (setresgid(65534, 65534, 65534) != 0 || setresuid(65534, 65534, 65534) != 0)
            _exit(2);
        NO_POINTER(rt_socket(config), EPERM, "CAP_");
        _exit(0);
    }
    int status = -1;
    CHECK(waitpid(child, &status, 0) == child);
    return status;
}

static void sockets_that_there_are_not(const char *interface)
{
    struct lm_rt_config config = lm_rt_defaults(interface), bad = config;
    NO_POINTER(rt_socket(NULL), EFAULT, "NULL");
    bad.size--;
    NO_POINTER(rt_socket(&bad), EINVAL, "lm_rt_defaults");
    struct { struct lm_rt_config known; uint64_t later; } newer = {config, 1};
    newer.known.size = sizeof newer;
    NO_POINTER(rt_socket(&newer.known), E2BIG, "does not know");
    bad = config, bad.interface = NULL;
    NO_POINTER(rt_socket(&bad), EFAULT, "NULL");
    bad.interface = "nosuch";
    NO_POINTER(rt_socket(&bad), ENODEV, "nosuch");
    bad.interface = "lo";
    NO_POINTER(rt_socket(&bad), EINVAL, "Ethernet");
    bad.interface = "\xff";
    NO_POINTER(rt_socket(&bad), EINVAL, "UTF-8");
    bad = config;
    const char *const malformed[] = {"", "10.0.0.0/33", "10.0.0/8", "10.0.0.1,", "x", NULL};
    for (const char *const *text = malformed; *text; text++) {
        bad.allow = *text;
        NO_POINTER(rt_socket(&bad), EINVAL, "10.0.0.0/8,192.0.2.7");
    }
    bad = config, bad.flags = 8;
    NO_POINTER(rt_socket(&bad), EINVAL, "flags");
    bad = config, bad.keep = 0;
    NO_POINTER(rt_socket(&bad), EINVAL, "at least one");
    bad = config, bad.frames = 0;
    NO_POINTER(rt_socket(&bad), EINVAL, "at least one");
    bad = config, bad.frames = UINT32_MAX;
    NO_POINTER(rt_socket(&bad), EINVAL, "4096 frames");
    bad = config, bad.blocks_of_4 = 17;
    NO_POINTER(rt_socket(&bad), EINVAL, "18");
    bad = config, bad.blocks_of_16 = 1u << 28;
    NO_POINTER(rt_socket(&bad), ENOMEM, "ulimit -l");
    CHECK(unprivileged(&config) == 0);

    lm_rt *wrong[] = {NULL, (lm_rt *)(uintptr_t)12345, (lm_rt *)&config};
    struct lm_rt_stats stats = LM_RT_SIZED(lm_rt_stats);
    for (size_t i = 0; i < 3; i++) {
        NO_POINTER(rt_mmap(wrong[i], 1), EINVAL, "no such socket");
        FAILS(rt_sendto(wrong[i], &config, 1, NULL, NULL, 0), EINVAL, "no such socket");
        FAILS(lm_rt_unlocked(wrong[i], &config), EINVAL, "no such socket");
        FAILS(rt_recvfrom(wrong[i], &stats, 1, 0, NULL), EINVAL, "no such socket");
        FAILS(lm_rt_fd(wrong[i]), EINVAL, "no such socket");
        FAILS(lm_rt_stats(wrong[i], &stats), EINVAL, "no such socket");
        FAILS(rt_socket_close(wrong[i]), EINVAL, "no such socket");
    }
}

static void bad_messages(lm_rt *socket, lm_rt *other, struct sockaddr_in to)
{
    char *buffer = rt_mmap(socket, 1), *others = rt_mmap(other, 1), own[8] = {0};
    struct lm_rt_options options = {sizeof options, 0, 8, 0};
    CHECK(buffer != NULL && others != NULL && (uintptr_t)buffer % 8 == 0);
    NO_POINTER(rt_mmap(socket, 0), EINVAL, "1, 4, 8 or 16");
    NO_POINTER(rt_mmap(socket, 2), EINVAL, "1, 4, 8 or 16");
    FAILS(rt_sendto(socket, buffer, 1, NULL, NULL, 0), EDESTADDRREQ, "connect");
    FAILS(send_to(socket, NULL, 1, NULL, to), EFAULT, "lm_rt_mmap");
    FAILS(send_to(socket, own, 1, NULL, to), EFAULT, "lm_rt_mmap");
    FAILS(send_to(socket, buffer + 1, 1, NULL, to), EFAULT, "lm_rt_mmap");
    FAILS(send_to(socket, others, 1, NULL, to), EINVAL, "another socket");
    FAILS(lm_rt_unlocked(socket, own), EFAULT, "lm_rt_mmap");
    FAILS(lm_rt_unlocked(socket, others), EINVAL, "another socket");
    FAILS(send_to(socket, buffer, LM_RT_MESSAGE_MAX(1) + 1, NULL, to), EMSGSIZE, "3996");
    FAILS(send_to(socket, buffer, 1, &options, to), EINVAL, "0 to 7");
    options.size = 0;
    FAILS(send_to(socket, buffer, 1, &options, to), EINVAL, "LM_RT_SIZED");
    options.size = sizeof options;
    options.priority = 7, options.flags = 2;
    FAILS(send_to(socket, buffer, 1, &options, to), EINVAL, "flags");
    options.flags = LM_RT_ABSTIME, options.deadline_ns = now_ns() - 1;
    FAILS(send_to(socket, buffer, 1, &options, to), ETIME, "deadline");
    FAILS(rt_sendto(socket, buffer, 1, NULL, (struct sockaddr *)&to, sizeof to - 1), EINVAL, "sockaddr_in");
    struct sockaddr_in wrong = to;
    wrong.sin_family = AF_INET6;
    FAILS(send_to(socket, buffer, 1, NULL, wrong), EAFNOSUPPORT, "IPv4");
    wrong = to, wrong.sin_port = 0;
    FAILS(send_to(socket, buffer, 1, NULL, wrong), EINVAL, "LM_RT_PORT");
    FAILS(send_to(socket, buffer, 1, NULL, address("192.0.2.1", LM_RT_PORT)), EHOSTUNREACH, "192.0.2.1");
    /* There is a host, and nobody on that port. */
    FAILS(send_to(socket, buffer, 1, NULL, address("10.77.0.2", 9000)), ETIMEDOUT, "UDP port");
    CHECK(lm_rt_unlocked(socket, buffer) == LM_RT_LEFT);

    char room[8];
    struct lm_rt_stats stats = LM_RT_SIZED(lm_rt_stats);
    uint64_t begun = now_ns();
    FAILS(rt_recvfrom(socket, room, sizeof room, 0, NULL), EAGAIN, "no message");
    FAILS(rt_recvfrom(socket, room, sizeof room, 20000000, NULL), ETIMEDOUT, "no message");
    CHECK(now_ns() - begun >= 20000000);
    FAILS(rt_recvfrom(socket, NULL, 1, 0, NULL), EFAULT, "NULL");
    FAILS(lm_rt_stats(socket, NULL), EFAULT, "NULL");
    stats.size = 0;
    FAILS(lm_rt_stats(socket, &stats), EINVAL, "LM_RT_SIZED");
    stats.size = sizeof stats;
    CHECK(lm_rt_stats(socket, &stats) == 0 && stats.size == sizeof stats && stats.sent == 0 && stats.received == 0);
}

static void receive_same(lm_rt *socket, const char *sent, size_t len, uint32_t number)
{
    static char came[LM_RT_MESSAGE_MAX(16)];
    struct lm_rt_info info = LM_RT_SIZED(lm_rt_info);
    struct pollfd readable = {lm_rt_fd(socket), POLLIN, 0};
    CHECK(readable.fd >= 0 && poll(&readable, 1, 5000) == 1);
    if (len > 8) {
        uint64_t limit_ns = now_ns() + 5000000000;
        while (rt_recvfrom(socket, came, 8, 0, &info) == -1 && errno == EAGAIN)
            CHECK(now_ns() < limit_ns);
        CHECK(errno == EMSGSIZE && info.len == len);
    }
    CHECK(rt_recvfrom(socket, came, sizeof came, 1000000000, &info) == (ssize_t)len);
    CHECK(memcmp(came, sent, len) == 0);
    CHECK(info.number == number && info.lost == 0 && info.late == 0 && info.len == len && info.priority == 5);
    CHECK(info.from.sin_addr.s_addr == address("10.77.0.2", 0).sin_addr.s_addr);
    CHECK(info.from.sin_port == htons(LM_RT_PORT));
    CHECK(info.sent_ns <= info.received_ns && info.received_ns <= now_ns() && info.delay_ns < 1000000000);
}

static void messages_come_back(lm_rt *socket, struct sockaddr_in to)
{
    static const size_t lens[] = {0, 2, 1400, 1500, 3996, 3997, 30000, 65436};
    char *buffer = rt_mmap(socket, 16);
    struct lm_rt_options options = {sizeof options, 1000000000, 5, 0};
    struct lm_rt_stats stats = LM_RT_SIZED(lm_rt_stats);
    CHECK(buffer != NULL);
    for (uint32_t i = 0; i < 8; i++) {
        for (size_t at = 0; at < lens[i]; at++)
            buffer[at] = (char)(at * 7919 >> 8 ^ i);
        const struct sockaddr *first = i ? NULL : (struct sockaddr *)&to;
        CHECK(rt_sendto(socket, buffer, lens[i], &options, first, sizeof to) == (ssize_t)lens[i]);
        CHECK(wait_for(socket, buffer) == LM_RT_LEFT);
        receive_same(socket, buffer, lens[i], i);
    }
    CHECK(lm_rt_stats(socket, &stats) == 0 && stats.sent == 8 && stats.received == 8 && stats.lost == 0);
    CHECK(stats.credits_per_second == 0 && stats.holds_kernel == 0);
    CHECK(stats.latency_ns.count == 8 && stats.delay_ns.count == 8 && stats.jitter_ns.count == 7);
    CHECK(stats.latency_ns.p50 > 0 && stats.latency_ns.p50 <= stats.latency_ns.p99);
    CHECK(stats.latency_ns.p99 <= stats.latency_ns.p999);
    CHECK(stats.latency_ns.p999 <= stats.latency_ns.max && stats.latency_ns.max < 1000000000);
    CHECK(stats.late_ns.count == 0 && stats.missed_ns.count == 0 && stats.lost_in_a_row.count == 0);
    while (stats.reported_whole < 8) {
        FAILS(rt_recvfrom(socket, buffer, 1, 1000000, NULL), ETIMEDOUT, "");
        CHECK(lm_rt_stats(socket, &stats) == 0);
    }
}

/* With one frame a message of 47 packets is under way for 47 calls at least, and those behind it wait. */
static void locked_buffers(lm_rt *socket, struct sockaddr_in to)
{
    char *first = rt_mmap(socket, 16), *second = rt_mmap(socket, 1), *third = rt_mmap(socket, 1);
    struct lm_rt_options soon = {sizeof soon, 1000000, 0, 0};
    CHECK(first != NULL && second != NULL && third != NULL);
    NO_POINTER(rt_mmap(socket, 1), ENOMEM, "blocks_of_N");
    first[0] = second[0] = third[0] = 1;
    CHECK(send_to(socket, first, LM_RT_MESSAGE_MAX(16), NULL, to) == (ssize_t)LM_RT_MESSAGE_MAX(16));
    CHECK(lm_rt_unlocked(socket, first) == LM_RT_LOCKED);
    FAILS(send_to(socket, first, 1, NULL, to), EBUSY, "locked");
    FAILS(rt_socket_close(socket), EBUSY, "locked");
    FAILS(send_to(socket, second, 1, NULL, address("10.77.0.2", 9000)), EBUSY, "another address");
    CHECK(send_to(socket, second, 1, NULL, to) == 1);
    CHECK(send_to(socket, third, 1, &soon, to) == 1);
    uint64_t late_ns = now_ns() + soon.deadline_ns;
    CHECK(wait_for(socket, second) == LM_RT_SUPERSEDED);
    CHECK(lm_rt_unlocked(socket, first) == LM_RT_LOCKED);
    while (now_ns() <= late_ns)
        ;
    CHECK(wait_for(socket, third) == LM_RT_LATE);
    CHECK(wait_for(socket, first) == LM_RT_LEFT);
    CHECK(send_to(socket, third, 1, NULL, to) == 1);
    CHECK(wait_for(socket, third) == LM_RT_LEFT);
}

static atomic_int is_told;

static void *wait_in_thread(void *socket)
{
    static char room[LM_RT_MESSAGE_MAX(16)];
    while (!is_told) /* The long message may still come back. */
        CHECK(rt_recvfrom(socket, room, sizeof room, 10000000, NULL) >= 0 || errno == ETIMEDOUT || errno == EBUSY);
    return NULL;
}

static void one_thread_at_a_time(lm_rt *socket)
{
    struct lm_rt_stats stats = LM_RT_SIZED(lm_rt_stats);
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, wait_in_thread, socket) == 0);
    while (lm_rt_stats(socket, &stats) == 0)
        ;
    CHECK(errno == EBUSY && strstr(lm_rt_error(), "another thread") != NULL);
    is_told = 1;
    CHECK(pthread_join(thread, NULL) == 0);
    CHECK(lm_rt_stats(socket, &stats) == 0);
}

/* One message comes back, and then none: that is told in each period. */
static void a_period_passes(const char *interface, struct sockaddr_in to)
{
    struct lm_rt_config config = config_of(interface);
    struct lm_rt_stats stats = LM_RT_SIZED(lm_rt_stats);
    char room[8] = {0};
    config.period_ns = 9999;
    NO_POINTER(rt_socket(&config), EINVAL, "10 µs");
    config.period_ns = 20000000;
    lm_rt *socket = rt_socket(&config);
    CHECK(socket != NULL);
    char *buffer = rt_mmap(socket, 1);
    CHECK(buffer != NULL);
    FAILS(rt_recvfrom(socket, room, sizeof room, 50000000, NULL), ETIMEDOUT, "no message"); /* not expected yet */
    CHECK(send_to(socket, buffer, 2, NULL, to) == 2);
    CHECK(rt_recvfrom(socket, room, sizeof room, 1000000000, NULL) == 2);
    FAILS(rt_recvfrom(socket, room, sizeof room, -1, NULL), ENODATA, "period");
    FAILS(rt_recvfrom(socket, room, sizeof room, -1, NULL), ENODATA, "period");
    CHECK(lm_rt_stats(socket, &stats) == 0 && stats.missed >= 2 && stats.received == 1);
    close_all_sent(socket);
}

/* There is no block for the first answer, and the second waits here behind its deadline. */
static void late_and_lost(const char *interface, struct sockaddr_in to, uint32_t flags)
{
    struct lm_rt_config config = config_of(interface);
    struct lm_rt_info info = LM_RT_SIZED(lm_rt_info), late = info;
    struct lm_rt_stats stats = LM_RT_SIZED(lm_rt_stats);
    struct timespec behind = {0, 400000000};
    char room[8] = {0};
    config.blocks_of_16 = 0;
    config.flags |= flags;
    lm_rt *socket = rt_socket(&config);
    CHECK(socket != NULL);
    char *buffer = rt_mmap(socket, 1);
    CHECK(buffer != NULL && send_to(socket, buffer, 2, NULL, to) == 2);
    CHECK(rt_recvfrom(socket, room, sizeof room, 1000000000, &info) == 2 && info.lost == 0);
    CHECK(wait_for(socket, buffer) == LM_RT_LEFT);
    CHECK(send_to(socket, buffer, 3, NULL, to) == 3);
    CHECK(nanosleep(&behind, NULL) == 0);
    if (flags & LM_RT_DELIVER_LATE) {
        CHECK(rt_recvfrom(socket, room, sizeof room, 1000000000, &late) == 3);
        CHECK(late.late == 1 && late.lost == 1 && late.number == info.number + 2);
        CHECK(late.received_ns - late.sent_ns > 50000000);
    } else {
        FAILS(rt_recvfrom(socket, room, sizeof room, 100000000, NULL), ETIMEDOUT, "no message");
    }
    CHECK(lm_rt_stats(socket, &stats) == 0 && stats.late == 1 && stats.lost == 1 && stats.received == 2);
    CHECK(stats.late_ns.count == 1 && stats.lost_in_a_row.max == 1 && stats.no_block > 0);
    close_all_sent(socket);
}

static void the_link_goes(lm_rt *socket, const char *interface)
{
    char words[64], room[1];
    snprintf(words, sizeof words, "ip link delete %s", interface);
    CHECK(system(words) == 0);
    while (rt_recvfrom(socket, room, 1, 1000000, NULL) == -1 && errno == ETIMEDOUT)
        ;
    CHECK(errno == ENETDOWN && strstr(lm_rt_error(), "interface") != NULL);
    CHECK(rt_socket_close(socket) == 0);
    FAILS(rt_socket_close(socket), EINVAL, "no such socket");
}

static void check(const char *interface, const char *other_interface)
{
    struct sockaddr_in to = address("10.77.0.2", LM_RT_PORT);
    struct lm_rt_config config = config_of(interface), other_config = config_of(other_interface), again = config;
    sockets_that_there_are_not(interface);
    /* Of a hundred megabits, held to which the kernel is, too. */
    other_config.link_bits_per_second = 100000000;
    other_config.port = 0;
    other_config.packets_per_second = 6096; /* of 8127 frames */
    NO_POINTER(rt_socket(&other_config), EBUSY, "6095 packets a second are left");
    other_config.packets_per_second = 6095;
    again.port = 0;
    lm_rt *socket = rt_socket(&config), *other = rt_socket(&other_config);
    struct lm_rt_stats stats = LM_RT_SIZED(lm_rt_stats);
    CHECK(socket != NULL && other != NULL);
    NO_POINTER(rt_socket(&config), EADDRINUSE, "7168");
    NO_POINTER(rt_socket(&again), EBUSY, interface);
    CHECK(lm_rt_stats(other, &stats) == 0 && stats.credits_per_second == 4000 && stats.holds_kernel == 1);
    bad_messages(socket, other, to);
    messages_come_back(socket, to);
    locked_buffers(socket, to);
    one_thread_at_a_time(socket);
    close_all_sent(socket);
    FAILS(lm_rt_fd(socket), EINVAL, "no such socket");
    /* More frames than the device holds packets. */
    struct lm_rt_config many = config;
    many.frames = 4096;
    NO_POINTER(rt_socket(&many), ENOBUFS, "descriptors");
    lm_rt *new = rt_socket(&config);
    CHECK(new != NULL && new != socket);
    FAILS(lm_rt_fd(socket), EINVAL, "no such socket");
    CHECK(rt_socket_close(new) == 0);
    a_period_passes(interface, to);
    late_and_lost(interface, to, 0);
    late_and_lost(interface, to, LM_RT_DELIVER_LATE);
    the_link_goes(other, other_interface);
    puts("all as it should be");
}

/* Only a network that nobody is in may send here. */
static void refuse(const char *interface)
{
    struct lm_rt_config config = lm_rt_defaults(interface);
    char room[1];
    config.allow = "192.0.2.0/24,198.51.100.7";
    lm_rt *socket = rt_socket(&config);
    CHECK(socket != NULL);
    puts("ready");
    fflush(stdout);
    FAILS(rt_recvfrom(socket, room, 1, -1, NULL), EIO, "it is ended from outside");
}

static void refused(const char *interface)
{
    struct lm_rt_config config = lm_rt_defaults(interface);
    lm_rt *socket = rt_socket(&config);
    CHECK(socket != NULL);
    char *buffer = rt_mmap(socket, 1);
    CHECK(buffer != NULL);
    FAILS(send_to(socket, buffer, 1, NULL, address("10.77.0.2", LM_RT_PORT)), ECONNREFUSED, "allow");
    CHECK(rt_socket_close(socket) == 0);
    puts("refused");
}

int main(int argc, char **argv)
{
    if (argc == 3 && strcmp(argv[1], "echo") == 0)
        echo(argv[2]);
    else if (argc == 4 && strcmp(argv[1], "check") == 0)
        check(argv[2], argv[3]);
    else if (argc == 3 && strcmp(argv[1], "refuse") == 0)
        refuse(argv[2]);
    else if (argc == 3 && strcmp(argv[1], "refused") == 0)
        refused(argv[2]);
    else
        return 2;
    return 0;
}
