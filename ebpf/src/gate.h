/* SPDX-License-Identifier: MIT OR GPL-2.0-only */
/*
 * What the gate and user space share: the layout of every map, the order of the verdicts, and the limits.
 *
 * This file is the only C description of these layouts; `layout.rs` is the only Rust one, and a test compares the two
 * through the BTF of the committed object. Fields named `_ip`, `_port` and `key` hold network byte order, everything
 * else host byte order.
 *
 * It includes nothing: the object depends on this file, gate.c and the compiler alone, so that a rebuild elsewhere
 * gives the same bytes.
 */
#ifndef LM_GATE_H
#define LM_GATE_H

typedef unsigned char __u8;
typedef unsigned short __u16;
typedef unsigned int __u32;
typedef unsigned long long __u64;
typedef short __s16;
typedef int __s32;

enum lm_limit {
	LM_QUEUES = 64,		/* receive queues that can be channels */
	LM_STRAY_ROW = 64,	/* lm_channels row that counts for every queue above them */
	LM_SESSIONS = 64,	/* sessions of a landing queue, a power of two; six bits of a key, above the lowest, say which */
	LM_LOG_ENTRIES = 32768, /* per channel; a power of two; also the largest RX ring */
	LM_VERDICT_ROW = 32,	/* counters in a row; a power of two, at least LM_VERDICTS */
	LM_SHORT_FRAME = 64,	/* a frame up to this long may carry Ethernet padding (60, and 4 for a VLAN tag) */
};

/*
 * What became of a packet. Each packet that the gate sees counts exactly once. From LM_PASS_ONE_COPY on, the kernel's
 * UDP socket on the data port may receive the packet, and the row's `passed` counts it too.
 */
enum lm_verdict {
	LM_REDIRECT_LANDING, /* DATA or an ipfrag fragment of the open session: logged, to the queue's XSK; zero-copy: any */
	LM_REDIRECT_GENERAL, /* EAGER, EAGER_ACK, ANNOUNCE, CREDIT, MISSING, MANIFEST: to the general queue's XSK */
	LM_PASS_FOREIGN,     /* not IPv4, not UDP, a VLAN's, not our addresses or not our ports */
	LM_PASS_CONTROL,     /* to the control port */
	LM_PASS_ELSEWHERE,   /* to the data port of a program on another queue, whose log counts it */
	LM_PASS_ONE_COPY,    /* a small LM packet on a queue that is not general, or has no XSK */
	LM_PASS_OPTIONS,     /* UDP to our address with IPv4 options */
	LM_PASS_FRAGMENT,    /* an IPv4 fragment that no open ipfrag session of this queue claims */
	LM_PASS_MALFORMED,   /* lengths that contradict each other, or too short for its headers */
	LM_PASS_VERSION,     /* another version of LM */
	LM_PASS_TYPE,	     /* type 0 or 14 on the data port */
	LM_PASS_NO_SESSION,  /* DATA, but no open lm session on this queue */
	LM_PASS_KEY,	     /* another session's key */
	LM_PASS_PEER,	     /* the right key from or to another address or port */
	LM_PASS_HEADER,	     /* header length differs from the session's, which wants a VLAN tag */
	LM_PASS_INDEX,	     /* index not below count; ipfrag: offset not a multiple of the fragment length */
	LM_PASS_LENGTH,	     /* payload or frame length not what the fragment's place demands */
	LM_PASS_LIMIT,	     /* beyond the highest announced message */
	LM_PASS_ORDER,	     /* not after the last accepted fragment: duplicate or late (monotone rule) */
	LM_PASS_UNPOSTED,    /* user space has posted no frame for it (I3c) */
	LM_PASS_SLOT,	     /* the frames that come next are posted for a packet of another length (lm_slot) */
	LM_PASS_NO_SOCKET,   /* everything right, but the queue has no XSK */
	LM_VERDICTS,
};

enum lm_role {
	LM_ROLE_NONE,
	LM_ROLE_GENERAL,
	LM_ROLE_LANDING,
	/* Zero-copy mode: packets were written over each other's headers, so that every one goes to the XSK unread. */
	LM_ROLE_LANDING_ZERO_COPY,
	/* Zero-copy mode: no more packets are redirected than user space allows, so that the driver never lacks frames. */
	LM_ROLE_GENERAL_ZERO_COPY,
};

enum lm_wire { LM_WIRE_LM, LM_WIRE_IPFRAG };

enum lm_flag {
	/* One CPU at a time runs the gate for a queue (native mode: a NAPI instance has one owner): rows need no atomics. */
	LM_FLAG_ONE_CPU_PER_QUEUE = 1,
	/* The machine keeps stores in order (x86): publishing an entry needs no barrier. */
	LM_FLAG_ORDERED_STORES = 2,
	/* Several programs, each with queues and a data port of its own: lm_ports says whose a port is. */
	LM_FLAG_SEVERAL_PROGRAMS = 4,
};

/* Constants of a loaded gate, in .rodata: the verifier removes the branches they decide. */
struct lm_config {
	__u32 local_ip; /* 0: any address */
	__u16 control_port;
	__u16 reserved;
	__u32 flags;
};

struct lm_counters {
	__u64 verdicts[LM_VERDICT_ROW];
	__u64 passed; /* packets with a verdict from LM_PASS_ONE_COPY on */
	__u64 reserved[7];
};

/*
 * lm_channels, by receive queue. Only who loaded the gate has this map and the next: what admits packets cannot be
 * changed by a client (I6).
 */
struct lm_channel {
	__u32 role; /* enum lm_role; written by user space */
	__u32 zero; /* 0: a number that the verifier does not know */
	__u64 accepted; /* packets redirected by a role that counts since the gate was loaded; written by the gate */
	__u16 data_port; /* UDP port of fragments and small LM packets on this queue; written by user space */
	__u16 reserved0;
	__u16 mac[3]; /* the interface's address: what is for another one passes; written by user space */
	__u8 reserved[38];
	/* Counts for a queue that has no log. */
	struct lm_counters counters;
};

/* lm_sessions, at queue * LM_SESSIONS + row: a sender that may land on the queue. */
struct lm_session {
	/* Written by user space while `open` is 0 and no CPU is inside the gate with it (I4). */
	__u32 open; /* written last on opening, first on closing */
	__u32 peer_ip;
	__u64 key;
	__u32 local_ip;
	__u16 peer_port;
	__u16 header_len;  /* bytes before the payload: lm 66, ipfrag 42 (the first fragment's), 4 more per VLAN tag */
	__u16 payload_len; /* payload of every fragment but the last; ipfrag: IP payload of every fragment but the last */
	__u8 window_shift; /* log2 of the fragments in a window */
	__u8 wire;	   /* enum lm_wire; an ipfrag session has row 0: its packets carry no key */
	/* Written by the gate while `open` is 1. */
	__u32 last_message; /* the last accepted fragment, */
	__u32 last_index;   /* or a place just before the first legal one */
	__u32 reserved0;
	/* Written by user space at any time: nothing lands from then on (CLOCK_MONOTONIC); 0: there is no end. */
	__u64 active_until_ns;
	__u8 reserved1[16];
};

/* One accepted packet; the n-th entry describes the n-th packet of the channel's RX ring (I3). */
struct lm_log_entry {
	__u16 sequence; /* n, low 16 bits: twice as many as the log has entries */
	__u8 session;	/* its row, below LM_SESSIONS */
	__u8 frames;	/* 0: accepted, no lm_slot any more */
	__u32 message;
	__u32 index;
	__u16 frame_len;  /* bytes from the Ethernet header to the end, padding included */
	__u8 padding_len; /* bytes after the payload */
	__u8 cpu;	  /* that ran the gate, low 8 bits */
};

/*
 * What the client says of the n-th packet's frames before it may be accepted, in the first word of its entry, where
 * packets may take several frames. A packet that took more or fewer than were posted for it would leave the next one in
 * the middle of a slot.
 */
struct lm_slot {
	__u16 longest; /* bytes of the longest packet that may be written there (I2) */
	__u8 reserved;
	__u8 frames; /* how many it has to take; 0: none is posted */
};

/* One map of this value per channel, mapped by the channel's client. */
struct lm_log {
	__u64 producer; /* gate: entries written; zero-copy: packets redirected, without entries */
	__u8 reserved0[56];
	__u64 posted;	     /* client: packets that may be accepted, counted like lm_channel.accepted */
	__u32 capacity; /* client: bytes of a packet that one frame holds, where packets may take several; 0: each takes one */
	__u8 reserved1[52];
	__u32 message_limits[LM_SESSIONS]; /* client: highest announced message number of each session */
	struct lm_counters counters; /* gate */
	__u64 passed_elsewhere; /* gate, with LM_FLAG_SEVERAL_PROGRAMS: packets to the client's port on other queues */
	__u8 reserved2[3384];
	struct lm_log_entry entries[LM_LOG_ENTRIES]; /* from byte 4096 */
};

#endif
