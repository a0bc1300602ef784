/*
 * Real-time messages: ahead of everything else on the link, never repeated, and of no use when late. See lm_rt(3).
 *
 * All functions but lm_rt_error set errno when they fail; lm_rt_error has the reason in words.
 *
 * A socket is used by one thread at a time: a second one gets EBUSY. Sockets have no thread of their own. Packets come and leave, reports
 * and timers too, in the calls alone: make one every 10 ms.
 */
#ifndef LM_RT_H
#define LM_RT_H

#include <netinet/in.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/socket.h>
#include <sys/types.h>

#ifdef __cplusplus
extern "C" {
#endif

/* A socket. */
typedef struct lm_rt lm_rt;

/* Bytes of the longest message in a buffer of 1, 4, 8 or 16 pages. */
#define LM_RT_MESSAGE_MAX(pages) ((size_t)(pages) * 4096 - 100)

/* UDP port that is used unless another is named; the next one is used as well. */
#define LM_RT_PORT 7168

/* Messages that come behind their deadline are received, marked late; else they are dropped and counted. */
#define LM_RT_DELIVER_LATE 1u
/* All senders have this host's clock. Of others only the delay above their fastest message's counts for the deadline. */
#define LM_RT_SAME_HOST 2u
/* The smoother replaces a root qdisc that somebody set, and puts it back. */
#define LM_RT_REPLACE_QDISC 4u

/*
 * A structure that says its size, and nothing else: struct lm_rt_info info = LM_RT_SIZED(lm_rt_info). Each has its size first, since later
 * versions add members behind; without it, it is refused (EINVAL).
 */
#define LM_RT_SIZED(name) {.size = sizeof(struct name)}

/* How a socket is opened; begin with lm_rt_defaults. */
struct lm_rt_config {
    size_t size;                   /* of this structure, in bytes */
    const char *interface;         /* network interface, for example "eth1" */
    const char *allow;             /* who may send here: "10.0.0.0/8,192.0.2.7"; NULL: everybody */
    uint64_t link_bits_per_second; /* with it a smoother holds all other traffic back; 0: the daemon's, if any */
    uint64_t period_ns;            /* a message is expected in each: ENODATA where one passes without; 0: none is */
    uint32_t keep;                 /* messages that wait to leave, and to be received: the oldest gives way */
    uint32_t frames;               /* packets that may be with the device */
    uint32_t blocks_of_1;          /* blocks for messages by pages, each direction: keep + 2 of a kind, or none */
    uint32_t blocks_of_4;
    uint32_t blocks_of_8;
    uint32_t blocks_of_16;
    uint32_t packets_per_second;   /* what it sends; EBUSY if all sockets exceed 3/4 of the link; 0: not said */
    uint16_t port;                 /* UDP port; 0: a free one */
    uint16_t number;               /* of this socket, and of those that it sends to */
    uint32_t flags;                /* LM_RT_DELIVER_LATE, LM_RT_SAME_HOST, LM_RT_REPLACE_QDISC */
};

static inline struct lm_rt_config lm_rt_defaults(const char *interface)
{
    struct lm_rt_config config = {sizeof(struct lm_rt_config), interface, NULL, 0, 0, 16, 16, 18, 0, 0, 0, 0,
                                  LM_RT_PORT, 0, 0};
    return config;
}

/* deadline_ns is a time of CLOCK_MONOTONIC, not one from now on. */
#define LM_RT_ABSTIME 1u

/* How a message is sent; begin with LM_RT_SIZED. */
struct lm_rt_options {
    size_t size;
    uint64_t deadline_ns; /* when it is of no use any more, in nanoseconds; 0: never */
    uint32_t priority;    /* 0 to 7; 7 leaves first */
    uint32_t flags;       /* LM_RT_ABSTIME */
};

/* What is known of a message beside its bytes; begin with LM_RT_SIZED. */
struct lm_rt_info {
    size_t size;
    struct sockaddr_in from; /* who sent it */
    uint64_t sent_ns;        /* when, by its sender's CLOCK_MONOTONIC */
    uint64_t received_ns;    /* when it came, by ours */
    uint64_t delay_ns;       /* how much longer it took than the fastest of the last ten seconds */
    uint64_t len;            /* its length in bytes */
    uint32_t number;         /* in its flow */
    uint32_t lost;           /* messages that did not come since the one before */
    uint32_t priority;
    uint32_t late;           /* not 0: it came behind its deadline */
};

/* How much half, 99 %, 99.9 % and all of so many values are at most: exact below 128, within 1.6 % above. It never grows. */
struct lm_rt_percentiles {
    uint64_t count;
    uint64_t p50;
    uint64_t p99;
    uint64_t p999;
    uint64_t max;
};

/* What a socket has done so far; begin with LM_RT_SIZED. */
struct lm_rt_stats {
    size_t size;
    uint64_t sent;               /* messages that left */
    uint64_t late_unsent;        /* whose deadline passed before */
    uint64_t superseded;         /* that gave way to newer ones before */
    uint64_t beyond_rate;        /* packets that left and were more than packets_per_second */
    uint64_t reported_whole;     /* of those that left, how many came, as their receiver says; wraps at 2^32 */
    uint64_t reported_lost;      /* and how many did not */
    uint64_t reported_refused;   /* reports that there is no such socket: one in 5 ms at most */
    uint64_t received;           /* messages that came */
    uint64_t lost;               /* that did not, by the gaps in their numbers */
    uint64_t late;               /* that came behind their deadline */
    uint64_t missed;             /* periods that passed without one */
    uint64_t overtaken;          /* packets that came twice, or behind a newer message */
    uint64_t no_block;           /* packets of messages for which there was no block or frame */
    uint64_t superseded_here;    /* messages that gave way to newer ones before they were received */
    uint64_t refused_packets;    /* for another number, or that nobody understands */
    uint64_t refused_reports;    /* that cannot be true */
    uint64_t credits_per_second; /* packets of others that the smoother lets go; 0: there is none */
    uint64_t holds_kernel;       /* not 0: TCP and UDP of this host get what that leaves */
    struct lm_rt_percentiles latency_ns;    /* from sending to receiving, where the socket has LM_RT_SAME_HOST */
    struct lm_rt_percentiles jitter_ns;     /* by how much that differs from the message before */
    struct lm_rt_percentiles delay_ns;      /* above the fastest of the last ten seconds */
    struct lm_rt_percentiles late_ns;       /* behind the deadline, of those that came late */
    struct lm_rt_percentiles missed_ns;     /* between two messages with a period without one between them */
    struct lm_rt_percentiles superseded_ns; /* that messages had waited which gave way to newer ones before they left */
    struct lm_rt_percentiles lost_in_a_row; /* messages, not nanoseconds */
};

/* What became of the last message in a buffer. */
#define LM_RT_LOCKED 0     /* it waits, or the device reads it */
#define LM_RT_LEFT 1       /* it left; or the buffer had none yet */
#define LM_RT_LATE 2       /* its deadline passed before */
#define LM_RT_SUPERSEDED 3 /* it gave way to newer ones */
#define LM_RT_UNSENT 4     /* the device takes no such packets */

lm_rt *lm_rt_socket(const struct lm_rt_config *config);

/* A buffer of 1, 4, 8 or 16 pages for one message, aligned to 8 bytes. It is the socket's, and gone with it. */
void *lm_rt_mmap(lm_rt *socket, unsigned pages);

/*
 * Sends the first len bytes of a buffer, which is locked until the last packet's completion. Waits for nobody, but for a host's first answer
 * where `to` is not the address of the message before: a second at most. `to` may be NULL for that address again; so may options.
 */
ssize_t lm_rt_sendto(lm_rt *socket, const void *buffer, size_t len, const struct lm_rt_options *options,
                     const struct sockaddr *to, socklen_t to_len);

/* LM_RT_LOCKED, or what became of its message. */
int lm_rt_unlocked(lm_rt *socket, const void *buffer);

/*
 * Waits so many nanoseconds for a message; 0: not at all; less: for ever. One that is longer than `len` stays: EMSGSIZE. ENODATA, once: a period
 * of the socket's passed without one, or several.
 */
ssize_t lm_rt_recvfrom(lm_rt *socket, void *buffer, size_t len, int64_t timeout_ns, struct lm_rt_info *info);

/* Readable when a packet may have come. Do nothing but wait for it. */
int lm_rt_fd(lm_rt *socket);

int lm_rt_stats(lm_rt *socket, struct lm_rt_stats *stats);

/* EBUSY while a buffer is locked. */
int lm_rt_socket_close(lm_rt *socket);

/* Why this thread's last call failed, and what to do. Valid until it is called again. */
const char *lm_rt_error(void);

#ifdef LM_RT_PAPER_NAMES
#define rt_socket lm_rt_socket
#define rt_mmap lm_rt_mmap
#define rt_sendto lm_rt_sendto
#define rt_recvfrom lm_rt_recvfrom
#define rt_socket_close lm_rt_socket_close
#endif

#ifdef __cplusplus
}
#endif

#endif
