/* SPDX-License-Identifier: MIT OR GPL-2.0-only */
/*
 * The gate: LM's XDP program. It stands in front of a receive queue and decides, before the packet takes a fill entry,
 * whether it may land (copy mode).
 *
 * A landing queue in zero-copy mode is another matter: the device has written the packet before the gate runs, and
 * perhaps the next ones over its headers. There the gate reads nothing and redirects everything.
 *
 * A fragment of an open session that comes after its last accepted one is redirected to the queue's XSK and logged;
 * small LM packets go to the XSK of a general queue; everything else gets XDP_PASS and reaches an ordinary socket, or
 * whoever it was meant for. Straight-line and bounded: no loop, no tail call, nothing allocated.
 *
 * Checksums are not verified: Ethernet's FCS guards the link, the UDP checksum of a fragment may be 0 (RFC 768), and
 * the IPv4 one covers nothing that decides placement.
 */
#include "gate.h"

#define SEC(name) __attribute__((section(name), used))
#define INLINE static inline __attribute__((always_inline))
#define __uint(name, val) int(*name)[val]
#define __type(name, val) typeof(val) *name
#define __array(name, val) typeof(val) *name[]
#define LIKELY(x) __builtin_expect(!!(x), 1)
#define READ_ONCE(x) (*(const volatile typeof(x) *)&(x))
#define WRITE_ONCE(x, v) (*(volatile typeof(x) *)&(x) = (v))
#define COMPILER_BARRIER() asm volatile("" ::: "memory")

#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
#define be16(x) __builtin_bswap16(x)
#define be32(x) __builtin_bswap32(x)
#else
#define be16(x) (x)
#define be32(x) (x)
#endif

/* Kernel ABI (include/uapi/linux/bpf.h). */
enum {
	BPF_MAP_TYPE_HASH = 1,
	BPF_MAP_TYPE_ARRAY = 2,
	BPF_MAP_TYPE_ARRAY_OF_MAPS = 12,
	BPF_MAP_TYPE_XSKMAP = 17,
	BPF_F_MMAPABLE = 1 << 10,
};
enum { XDP_PASS = 2, XDP_REDIRECT = 4 };
struct xdp_md {
	__u32 data, data_end, data_meta, ingress_ifindex, rx_queue_index, egress_ifindex;
};
static void *(*bpf_map_lookup_elem)(void *map, const void *key) = (void *)1;
static __u64 (*bpf_ktime_get_ns)(void) = (void *)5;
static __u32 (*bpf_get_smp_processor_id)(void) = (void *)8;
static long (*bpf_redirect_map)(void *map, __u64 key, __u64 flags) = (void *)51;
static long (*bpf_xdp_adjust_meta)(struct xdp_md *md, int delta) = (void *)54;
static __u64 (*bpf_xdp_get_buff_len)(struct xdp_md *md) = (void *)188;

/* Wire formats. Natural alignment holds from the IPv4 header on: Ethernet is 14 bytes, and drivers align for it. */
struct ethernet {
	__u16 destination[3], source[3];
	__u16 type;
};
struct ipv4 {
	__u8 version_words, service;
	__u16 total_len, id, fragment;
	__u8 hops, protocol;
	__u16 checksum;
	__u32 source, destination;
};
struct udp {
	__u16 source, destination, len, checksum;
};
struct data_header {
	__u8 version_type, flags;
	__u16 payload_len;
	__u32 key[2]; /* two halves: the header starts at byte 42, where 8-byte loads are not aligned */
	__u32 message, index, count;
};
enum { ETHERNET_IPV4 = 0x0800, IP_UDP = 17, IP_MORE = 0x2000, IP_OFFSET = 0x1fff };
enum { LM_VERSION = 2, LM_DATA = 1, LM_EAGER = 2, LM_REALTIME = 8, LM_LAST_SMALL = 13, LM_CONTROL = 15 };

const volatile struct lm_config lm_config = {};
/* These keep the enumerations in the object's BTF, where the layout test finds them. */
const volatile enum lm_verdict lm_verdicts = LM_VERDICTS;
const volatile enum lm_limit lm_queues = LM_QUEUES;
const volatile enum lm_role lm_first_role = LM_ROLE_NONE;
const volatile enum lm_wire lm_first_wire = LM_WIRE_LM;
const volatile enum lm_flag lm_first_flag = LM_FLAG_ONE_CPU_PER_QUEUE;

struct {
	__uint(type, BPF_MAP_TYPE_XSKMAP);
	__uint(max_entries, LM_QUEUES);
	__type(key, __u32);
	__type(value, __u32);
} lm_xsks SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, LM_QUEUES + 1);
	__type(key, __u32);
	__type(value, struct lm_channel);
} lm_channels SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, LM_QUEUES *LM_SESSIONS);
	__type(key, __u32);
	__type(value, struct lm_session);
} lm_sessions SEC(".maps");

struct log_map {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct lm_log);
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY_OF_MAPS);
	__uint(max_entries, LM_QUEUES);
	__type(key, __u32);
	__array(values, struct log_map);
} lm_logs SEC(".maps");

/* By data port: the queue in whose log its program sees what came for it on other queues. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, LM_QUEUES);
	__type(key, __u16);
	__type(value, __u32);
} lm_ports SEC(".maps");

/*
 * The parts of a packet that every judgement needs: Ethernet and ip_len are at most frame_len. Lengths are numbers, not
 * differences of pointers, and no variable is added to a packet pointer: the verifier grants both only to holders of
 * CAP_PERFMON.
 */
struct packet {
	const struct ipv4 *ip;
	const void *end;
	__u32 frame_len; /* all of it */
	__u32 ip_len;	 /* the IPv4 packet with its header */
};

/* What a packet says about itself; what is left is the session's state. `row` is the session's, below LM_SESSIONS. */
struct fragment {
	__u32 row, message, index;
};

/* The session in a row of a landing queue, if one of that wire is open and may land still. */
INLINE struct lm_session *session_at(__u32 queue, const struct lm_channel *channel, __u32 row, enum lm_wire wire)
{
	__u32 at = queue * LM_SESSIONS + row;
	struct lm_session *session;

	if (channel->role != LM_ROLE_LANDING)
		return 0;
	session = bpf_map_lookup_elem(&lm_sessions, &at);
	if (!session || !READ_ONCE(session->open) || session->wire != wire)
		return 0;
	if (READ_ONCE(session->active_until_ns) && bpf_ktime_get_ns() >= READ_ONCE(session->active_until_ns))
		return 0;
	return session;
}

/*
 * Whether a program on another queue has this port. It passes the packet to that program's socket, and says so in a log
 * that the program sees. Not in line: it would crowd the stack of everything else.
 */
static __attribute__((noinline)) int find_owner(__u16 port)
{
	__u32 *owner, first = 0, queue;
	struct lm_log *log = 0;
	void *log_map;

	owner = bpf_map_lookup_elem(&lm_ports, &port);
	if (!owner)
		return 0;
	queue = *owner;
	log_map = bpf_map_lookup_elem(&lm_logs, &queue);
	if (log_map)
		log = bpf_map_lookup_elem(log_map, &first);
	if (log) /* from any queue's CPU */
		__sync_fetch_and_add(&log->passed_elsewhere, 1);
	return 1;
}

INLINE int tell_owner(__u16 port)
{
	return (lm_config.flags & LM_FLAG_SEVERAL_PROGRAMS) && find_owner(port);
}

/* Transmit order: messages forward, windows forward inside a message, indices descending inside a window. */
INLINE int is_after_last(const struct lm_session *session, const struct fragment *fragment)
{
	__s32 ahead = (__s32)(fragment->message - session->last_message); /* serial numbers, RFC 1982 */
	__u32 shift = session->window_shift & 31;
	__u32 window = fragment->index >> shift, last_window = session->last_index >> shift;

	if (ahead != 0)
		return ahead > 0;
	if (window != last_window)
		return window > last_window;
	return fragment->index < session->last_index;
}

INLINE enum lm_verdict admit(__u32 queue, struct lm_channel *channel, struct lm_session *session, struct lm_log *log,
			     const struct packet *packet, const struct fragment *fragment)
{
	__u32 padding_len = packet->frame_len - sizeof(struct ethernet) - packet->ip_len;
	__u64 position = channel->accepted;
	struct lm_log_entry *entry = &log->entries[position & (LM_LOG_ENTRIES - 1)];
	__u32 capacity;

	/* A frame is never longer than header and payload of a full fragment (I2), but for the padding of a short one. */
	if (padding_len && packet->frame_len > LM_SHORT_FRAME)
		return LM_PASS_LENGTH;
	if ((__s32)(READ_ONCE(log->message_limits[fragment->row & (LM_SESSIONS - 1)]) - fragment->message) < 0)
		return LM_PASS_LIMIT;
	if (!is_after_last(session, fragment))
		return LM_PASS_ORDER;
	if (position >= READ_ONCE(log->posted))
		return LM_PASS_UNPOSTED;
	capacity = READ_ONCE(log->capacity);
	if (capacity) {
		/* One load: a word that is older than `posted` says 0 frames, because the gate wrote it. */
		__u32 word = READ_ONCE(*(const __u32 *)entry), held;
		struct lm_slot slot;

		__builtin_memcpy(&slot, &word, sizeof(slot));
		held = slot.frames * capacity;
		if (packet->frame_len > slot.longest || packet->frame_len > held || packet->frame_len + capacity <= held)
			return LM_PASS_SLOT;
	}
	/* The entry follows the verdict (I3b): a packet that no socket takes must not be in the log. */
	if (bpf_redirect_map(&lm_xsks, queue, XDP_PASS) != XDP_REDIRECT)
		return LM_PASS_NO_SOCKET;

	entry->sequence = (__u16)position;
	entry->session = fragment->row;
	entry->frames = 0;
	entry->message = fragment->message;
	entry->index = fragment->index;
	entry->frame_len = packet->frame_len;
	entry->padding_len = padding_len;
	entry->cpu = bpf_get_smp_processor_id();
	session->last_message = fragment->message;
	session->last_index = fragment->index;
	channel->accepted = position + 1;
	/*
	 * Publish: pairs with the acquire load in Log::producer. `accepted` is the truth and lies out of the client's reach; a
	 * client that writes `producer` confuses itself alone. An atomic exchange is a full barrier on every machine.
	 */
	COMPILER_BARRIER();
	if (lm_config.flags & LM_FLAG_ORDERED_STORES)
		WRITE_ONCE(log->producer, position + 1);
	else
		__sync_lock_test_and_set(&log->producer, position + 1);
	return LM_REDIRECT_LANDING;
}

/* DATA of the lm wire. Lengths agree with each other already. */
INLINE enum lm_verdict judge_data(__u32 queue, struct lm_channel *channel, struct lm_log *log,
				  const struct packet *packet, const struct udp *udp, const struct data_header *lm)
{
	__u32 payload_len = be16(lm->payload_len), count = be32(lm->count);
	struct fragment fragment = { .row = be32(lm->key[1]) >> 1 & (LM_SESSIONS - 1),
				     .message = be32(lm->message),
				     .index = be32(lm->index) };
	struct lm_session *session = session_at(queue, channel, fragment.row, LM_WIRE_LM);
	const __u32 *key;

	if (!log || !session)
		return LM_PASS_NO_SESSION;
	key = (const __u32 *)&session->key;
	if (key[0] != lm->key[0] || key[1] != lm->key[1])
		return LM_PASS_KEY;
	if (packet->ip->source != session->peer_ip || packet->ip->destination != session->local_ip ||
	    udp->source != session->peer_port)
		return LM_PASS_PEER;
	if (sizeof(struct ethernet) + sizeof(struct ipv4) + sizeof(*udp) + sizeof(*lm) != session->header_len)
		return LM_PASS_HEADER;
	if (fragment.index >= count)
		return LM_PASS_INDEX;
	if (fragment.index != count - 1 ? payload_len != session->payload_len
					: payload_len == 0 || payload_len > session->payload_len)
		return LM_PASS_LENGTH;
	return admit(queue, channel, session, log, packet, &fragment);
}

/*
 * An IPv4 fragment to our address, on any port: only the first one shows its ports. A function of its own, so that it
 * has a stack of its own: where the compiler puts a number in a pointer's place there, the verifier demands
 * CAP_PERFMON.
 */
static __attribute__((noinline)) enum lm_verdict judge_fragment(__u32 queue, struct lm_channel *channel,
								struct lm_log *log, const struct packet *packet)
{
	__u32 field = be16(packet->ip->fragment), offset = (field & IP_OFFSET) * 8, full_len;
	__u32 payload_len = packet->ip_len - sizeof(struct ipv4), id = be16(packet->ip->id);
	__u32 source = packet->ip->source, destination = packet->ip->destination;
	const struct udp *udp = (const void *)(packet->ip + 1);
	struct fragment fragment = { .row = 0 };
	__u32 has_ports = 0, source_port = 0, destination_port = 0;
	struct lm_session *session;

	if (offset == 0 && (const void *)(udp + 1) <= packet->end) {
		has_ports = 1;
		source_port = udp->source;
		destination_port = udp->destination;
	}
	session = session_at(queue, channel, fragment.row, LM_WIRE_IPFRAG);
	if (!log || !session || source != session->peer_ip || destination != session->local_ip)
		goto unclaimed;
	if (offset == 0) {
		if (!has_ports || payload_len < sizeof(*udp))
			return LM_PASS_MALFORMED;
		if (source_port != session->peer_port || destination_port != channel->data_port)
			goto unclaimed;
	}
	if (sizeof(struct ethernet) + sizeof(struct ipv4) + sizeof(*udp) != session->header_len)
		return LM_PASS_HEADER;
	full_len = session->payload_len;
	if (full_len == 0 || offset % full_len != 0)
		return LM_PASS_INDEX;
	if (field & IP_MORE ? payload_len != full_len : payload_len == 0 || payload_len > full_len)
		return LM_PASS_LENGTH;
	fragment.index = offset / full_len;
	/* The identification is the message number's low half; the rest follows from the last accepted message. */
	fragment.message = session->last_message + (__s32)(__s16)(id - (__u16)session->last_message);
	return admit(queue, channel, session, log, packet, &fragment);

unclaimed:
	/* The first fragment names the port of all. */
	if (has_ports)
		tell_owner(destination_port);
	return LM_PASS_FRAGMENT;
}

/*
 * Says before the packet when it came: until its program wakes up, who else has the core decides, which is no delay of
 * the network's. The place is even, as where Ethernet begins is. No pointer into the packet holds afterwards.
 */
INLINE void stamp(struct xdp_md *md)
{
	struct __attribute__((packed, aligned(2))) {
		__u64 ns;
	} *meta;

	/* Not every driver has room. */
	if (bpf_xdp_adjust_meta(md, -(int)sizeof(*meta)))
		return;
	meta = (void *)(long)md->data_meta;
	if ((const void *)(meta + 1) <= (const void *)(long)md->data)
		meta->ns = bpf_ktime_get_ns();
}

INLINE enum lm_verdict judge(struct xdp_md *md, __u32 queue, struct lm_channel *channel, struct lm_log *log)
{
	/* First: no pointer into the packet has to be kept across this call. */
	__u32 frame_len = bpf_xdp_get_buff_len(md);
	const void *data = (const void *)(long)md->data, *end = (const void *)(long)md->data_end;
	struct packet packet = { .end = end, .frame_len = frame_len };
	const struct ethernet *ethernet = data;
	const struct data_header *lm;
	const struct ipv4 *ip;
	const struct udp *udp;
	__u32 udp_len, type;

	if ((const void *)(ethernet + 1) > end)
		return LM_PASS_FOREIGN;
	/* A VLAN's traffic is its own device's; what is for another host, or for many, is only seen here. */
	if ((ethernet->destination[0] ^ channel->mac[0]) | (ethernet->destination[1] ^ channel->mac[1]) |
	    (ethernet->destination[2] ^ channel->mac[2]))
		return LM_PASS_FOREIGN;
	packet.ip = (const void *)(ethernet + 1);
	if (ethernet->type != be16(ETHERNET_IPV4) || (const void *)(packet.ip + 1) > end ||
	    packet.ip->version_words >> 4 != 4 || packet.ip->protocol != IP_UDP)
		return LM_PASS_FOREIGN;
	if (lm_config.local_ip && packet.ip->destination != lm_config.local_ip)
		return LM_PASS_FOREIGN;
	if (packet.ip->version_words != 0x45)
		return LM_PASS_OPTIONS;
	packet.ip_len = be16(packet.ip->total_len);
	if (packet.ip_len < sizeof(struct ipv4) || sizeof(struct ethernet) + packet.ip_len > packet.frame_len)
		return LM_PASS_MALFORMED;
	if (packet.ip->fragment & be16(IP_MORE | IP_OFFSET))
		return judge_fragment(queue, channel, log, &packet);

	/* Moved, or the compiler keeps what it compared with `end` on the stack, in a place that a number gets later. */
	asm volatile("%0 = %1 # the IPv4 header" : "=r"(ip) : "r"(packet.ip));
	udp = (const void *)(ip + 1);
	if ((const void *)(udp + 1) > end)
		return LM_PASS_MALFORMED;
	if (udp->destination != channel->data_port) {
		if (udp->destination == lm_config.control_port)
			return LM_PASS_CONTROL;
		return tell_owner(udp->destination) ? LM_PASS_ELSEWHERE : LM_PASS_FOREIGN;
	}
	lm = (const void *)(udp + 1);
	udp_len = be16(udp->len);
	if ((const void *)(lm + 1) > end || udp_len < sizeof(*udp) + sizeof(*lm) ||
	    packet.ip_len != sizeof(struct ipv4) + udp_len)
		return LM_PASS_MALFORMED;
	if (lm->version_type >> 4 != LM_VERSION)
		return LM_PASS_VERSION;
	if (be16(lm->payload_len) != udp_len - sizeof(*udp) - sizeof(*lm))
		return LM_PASS_MALFORMED;
	type = lm->version_type & 15;
	if (LIKELY(type == LM_DATA))
		return judge_data(queue, channel, log, &packet, udp, lm);
	/* Types that no program knows yet go the way of the known ones; nothing may overtake its introduction. */
	if ((type < LM_EAGER || type > LM_LAST_SMALL) && type != LM_CONTROL)
		return LM_PASS_TYPE;
	if (channel->role == LM_ROLE_GENERAL_ZERO_COPY) {
		/* A frame that passes is used again by the driver, a redirected one only when user space posts it again. */
		if (!log || channel->accepted >= READ_ONCE(log->posted))
			return LM_PASS_ONE_COPY;
	} else if (channel->role != LM_ROLE_GENERAL) {
		return LM_PASS_ONE_COPY;
	}
	/* What comes there is in one frame. */
	if (log && READ_ONCE(log->capacity) && frame_len > READ_ONCE(log->capacity))
		return LM_PASS_ONE_COPY;
	if (bpf_redirect_map(&lm_xsks, queue, XDP_PASS) != XDP_REDIRECT)
		return LM_PASS_ONE_COPY;
	if (channel->role == LM_ROLE_GENERAL_ZERO_COPY)
		channel->accepted++;
	if (type == LM_REALTIME)
		stamp(md);
	return LM_REDIRECT_GENERAL;
}

/*
 * Zero-copy mode: what lies where the packet begins may be another one's payload. A packet that passed would feed that
 * to the stack, and its frame would be used again out of turn. What it was, its digest says.
 */
INLINE enum lm_verdict take_unread(__u32 queue, struct lm_channel *channel, struct lm_log *log)
{
	__u64 position = channel->accepted;

	if (!log || bpf_redirect_map(&lm_xsks, queue, XDP_PASS) != XDP_REDIRECT)
		return LM_PASS_NO_SOCKET;
	channel->accepted = position + 1;
	WRITE_ONCE(log->producer, position + 1);
	return LM_REDIRECT_LANDING;
}

INLINE void add_one(__u64 *counter, int exclusive)
{
	if (exclusive)
		WRITE_ONCE(*counter, *counter + 1);
	else
		__sync_fetch_and_add(counter, 1);
}

/*
 * Never called, never loaded: clang describes what lies two pointers below a map only by name, and whoever creates the
 * inner maps needs their value's size, so a signature must mention the type.
 */
static __attribute__((noinline, used)) int lm_log_type(const struct lm_log *log)
{
	return log != 0;
}

/* Several frames to a packet: what is in the first part holds all headers, the length is that of all parts. */
SEC("xdp.frags") int lm_gate(struct xdp_md *md)
{
	__u32 queue = md->rx_queue_index, row = queue < LM_QUEUES ? queue : LM_STRAY_ROW, first = 0;
	struct lm_channel *channel = bpf_map_lookup_elem(&lm_channels, &row);
	struct lm_log *log = 0;
	enum lm_verdict verdict;
	__u64 *counter, *passed, offset;
	int exclusive;

	if (!channel) /* never: the row is in range; the verifier does not know */
		return XDP_PASS;
	if (channel->role != LM_ROLE_NONE) {
		void *log_map = bpf_map_lookup_elem(&lm_logs, &row);

		if (log_map)
			log = bpf_map_lookup_elem(log_map, &first);
	}
	if (channel->role == LM_ROLE_LANDING_ZERO_COPY)
		verdict = take_unread(queue, channel, log);
	else
		verdict = judge(md, queue, channel, log);

	/*
	 * Without CAP_PERFMON the verifier wants an addition to a map's pointer to be the same on every path: same map, same
	 * range. So each map has an instruction of its own, which the comments keep apart, and the offset is a number it
	 * cannot know.
	 */
	offset = ((verdict | channel->zero) & (LM_VERDICT_ROW - 1)) * sizeof(*counter);
	if (log) {
		counter = log->counters.verdicts;
		passed = &log->counters.passed;
		asm volatile("%0 += %1 # the log's row" : "+r"(counter) : "r"(offset));
	} else {
		counter = channel->counters.verdicts;
		passed = &channel->counters.passed;
		asm volatile("%0 += %1 # the channel's row" : "+r"(counter) : "r"(offset));
	}
	exclusive = (lm_config.flags & LM_FLAG_ONE_CPU_PER_QUEUE) && row != LM_STRAY_ROW;
	add_one(counter, exclusive);
	if (verdict >= LM_PASS_ONE_COPY)
		add_one(passed, exclusive);
	return verdict <= LM_REDIRECT_GENERAL ? XDP_REDIRECT : XDP_PASS;
}

char lm_license[] SEC("license") = "Dual MIT/GPL";
