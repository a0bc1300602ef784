/* SPDX-License-Identifier: MIT OR GPL-2.0-only */
/*
 * The impairment box's forwarder: a traffic control program at the ingress of one of two interfaces. It sends each
 * packet out of the other one, or does to it what bad links do. One instance for each direction.
 *
 * It works on the socket buffers that the kernel moves anyway, so that forwarding costs no copy and needs no thread,
 * and keeps the queue: a veth hands the buffer over with the sender's transmit queue in it, and the receive queue that
 * this program records there chooses the next transmit queue (net/core/dev.c, skb_tx_hash).
 *
 * Every decision is a function of the seed and the packet's number in its direction (`draw`): the same seed and the
 * same order of packets give the same decisions. `impair.rs` has the same function in Rust, and tests compare what
 * arrived with it.
 *
 * What takes time (delay, rate limit) cannot be done here: then every packet that this program would send goes into a
 * ring instead, and user space sends it later.
 */
typedef unsigned char __u8;
typedef unsigned short __u16;
typedef unsigned int __u32;
typedef unsigned long long __u64;

#define SEC(name) __attribute__((section(name), used))
#define INLINE static inline __attribute__((always_inline))
#define __uint(name, val) int(*name)[val]
#define __type(name, val) typeof(val) *name
#define READ_ONCE(x) (*(const volatile typeof(x) *)&(x))
#define WRITE_ONCE(x, v) (*(volatile typeof(x) *)&(x) = (v))
#define BARRIER() asm volatile("" ::: "memory")

enum {
	QUEUES = 8,	      /* queues with slots of their own; others share them */
	SLOTS = 64,	      /* for each queue: more than the most packets that may overtake one */
	PACKET_LEN_MAX = 2032 /* longest packet that can be kept */
};

/* What to do, fixed when the program is loaded. Probabilities are per million packets. */
struct lm_impair_config {
	__u64 seed; /* of this direction */
	__u32 to_ifindex;
	__u32 loss;
	__u32 loss_burst; /* packets that are lost in succession; at least 1 */
	__u32 duplicate;
	__u32 corrupt;
	__u32 reorder;
	__u32 reorder_by; /* packets of the same queue that overtake a reordered one: 1 to SLOTS - 1 */
	__u32 divert;	  /* 1: packets to be sent go to user space */
};
const volatile struct lm_impair_config lm_impair = {};

struct lm_impair_counters {
	__u64 received;
	__u64 lost;
	__u64 duplicated;
	__u64 corrupted;
	__u64 reordered; /* held back, of which `released` have gone on */
	__u64 released;
	__u64 diverted;	 /* given to user space */
	__u64 ring_full; /* dropped: user space is behind */
	__u64 refused;	 /* dropped: the kernel would not copy, change or keep the packet */
	__u64 sequence[QUEUES];
};

struct lm_impair_slot {
	__u32 full, len;
	__u8 data[PACKET_LEN_MAX + 8];
};

struct lm_impair_record {
	__u64 arrival_ns; /* CLOCK_MONOTONIC */
	__u32 queue, len;
	__u8 data[PACKET_LEN_MAX];
};

enum { BPF_MAP_TYPE_ARRAY = 2, BPF_MAP_TYPE_RINGBUF = 27 };

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct lm_impair_counters);
} lm_impair_counts SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, QUEUES * SLOTS);
	__type(key, __u32);
	__type(value, struct lm_impair_slot);
} lm_impair_slots SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 1 << 24);
} lm_impair_ring SEC(".maps");

/* Kernel ABI (include/uapi/linux/bpf.h). */
enum { TC_ACT_SHOT = 2 };
struct __sk_buff {
	__u32 len, pkt_type, mark, queue_mapping;
};
static void *(*bpf_map_lookup_elem)(void *map, const void *key) = (void *)1;
static __u64 (*bpf_ktime_get_ns)(void) = (void *)5;
static long (*bpf_skb_store_bytes)(struct __sk_buff *skb, __u32 offset, const void *from, __u32 len,
				   __u64 flags) = (void *)9;
static long (*bpf_clone_redirect)(struct __sk_buff *skb, __u32 ifindex, __u64 flags) = (void *)13;
static long (*bpf_redirect)(__u32 ifindex, __u64 flags) = (void *)23;
static long (*bpf_skb_load_bytes)(const void *skb, __u32 offset, void *to, __u32 len) = (void *)26;
static long (*bpf_skb_change_tail)(struct __sk_buff *skb, __u32 len, __u64 flags) = (void *)38;
static void *(*bpf_ringbuf_reserve)(void *ringbuf, __u64 len, __u64 flags) = (void *)131;
static void (*bpf_ringbuf_submit)(void *data, __u64 flags) = (void *)132;
static void (*bpf_ringbuf_discard)(void *data, __u64 flags) = (void *)133;

/* What a number is drawn for. Numbers of different purposes are independent. */
enum purpose { LOSS, DUPLICATE, CORRUPT, CORRUPT_WHERE, REORDER, PURPOSES = 8 };

/* 64 random bits for a packet number and a purpose: SplitMix64 (Steele, Lea, Flood 2014) at that place. */
INLINE __u64 draw(__u64 number, enum purpose purpose)
{
	__u64 x = lm_impair.seed + (number * PURPOSES + purpose) * 0x9e3779b97f4a7c15ull;

	x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
	x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
	return x ^ (x >> 31);
}

INLINE int happens(__u64 number, enum purpose purpose, __u32 per_million)
{
	return per_million && ((draw(number, purpose) >> 32) * 1000000 >> 32) < per_million;
}

/* Flips one to eight bits of one byte. */
INLINE void corrupt(struct __sk_buff *skb, struct lm_impair_counters *counters, __u64 number)
{
	__u64 random = draw(number, CORRUPT_WHERE);
	__u32 offset = (random >> 32) * skb->len >> 32;
	__u8 byte;

	if (bpf_skb_load_bytes(skb, offset, &byte, 1))
		return;
	byte ^= 1 + (random & 0xffff) % 255;
	if (!bpf_skb_store_bytes(skb, offset, &byte, 1, 0))
		__sync_fetch_and_add(&counters->corrupted, 1);
}

/* Gives a copy of the packet to user space. */
INLINE void divert(struct __sk_buff *skb, struct lm_impair_counters *counters, __u32 queue)
{
	__u32 len = skb->len;
	struct lm_impair_record *record = bpf_ringbuf_reserve(&lm_impair_ring, sizeof(*record), 0);

	if (!record) {
		__sync_fetch_and_add(&counters->ring_full, 1);
		return;
	}
	record->arrival_ns = bpf_ktime_get_ns();
	record->queue = queue;
	record->len = len;
	if (!len || len > PACKET_LEN_MAX || bpf_skb_load_bytes(skb, 0, record->data, len)) {
		bpf_ringbuf_discard(record, 0);
		__sync_fetch_and_add(&counters->refused, 1);
		return;
	}
	__sync_fetch_and_add(&counters->diverted, 1);
	bpf_ringbuf_submit(record, 0);
}

/* Sends the packet as it is; the buffer remains and may be changed. */
INLINE void send_copy(struct __sk_buff *skb, struct lm_impair_counters *counters, __u32 queue)
{
	if (lm_impair.divert)
		divert(skb, counters, queue);
	else if (bpf_clone_redirect(skb, lm_impair.to_ifindex, 0))
		__sync_fetch_and_add(&counters->refused, 1);
}

/* Sends the packet and gives the buffer away. */
INLINE int send(struct __sk_buff *skb, struct lm_impair_counters *counters, __u32 queue)
{
	if (!lm_impair.divert)
		return bpf_redirect(lm_impair.to_ifindex, 0);
	divert(skb, counters, queue);
	return TC_ACT_SHOT;
}

/* Keeps a copy of the packet in a free slot; 0 when it is kept. */
INLINE int keep(struct __sk_buff *skb, struct lm_impair_slot *slot)
{
	__u32 len = skb->len;

	if (READ_ONCE(slot->full) || !len || len > PACKET_LEN_MAX || bpf_skb_load_bytes(skb, 0, slot->data, len))
		return -1;
	slot->len = len;
	BARRIER();
	WRITE_ONCE(slot->full, 1);
	return 0;
}

/* Writes what the slot keeps over the packet and frees the slot; 0 when the packet is now the kept one. */
INLINE int take(struct __sk_buff *skb, struct lm_impair_slot *slot)
{
	__u32 len = slot->len;
	int failed;

	if (!len || len > PACKET_LEN_MAX)
		failed = 1;
	else
		failed = bpf_skb_change_tail(skb, len, 0) || bpf_skb_store_bytes(skb, 0, slot->data, len, 0);
	BARRIER();
	WRITE_ONCE(slot->full, 0);
	return failed;
}

SEC("classifier")
int lm_impair_forward(struct __sk_buff *skb)
{
	__u32 first = 0, queue = skb->queue_mapping, index;
	struct lm_impair_counters *counters = bpf_map_lookup_elem(&lm_impair_counts, &first);
	struct lm_impair_slot *slot;
	__u64 number, sequence;
	int gone = 0; /* this packet goes nowhere, or not now: its buffer is free for another */

	if (!counters)
		return TC_ACT_SHOT;
	skb->queue_mapping = queue + 1; /* queue n is recorded as n + 1 (include/linux/skbuff.h, skb_record_rx_queue) */
	number = __sync_fetch_and_add(&counters->received, 1);

	if (happens(lm_impair.loss_burst > 1 ? number / lm_impair.loss_burst : number, LOSS, lm_impair.loss)) {
		__sync_fetch_and_add(&counters->lost, 1);
		gone = 1;
	}
	if (!gone && happens(number, CORRUPT, lm_impair.corrupt))
		corrupt(skb, counters, number);
	if (!lm_impair.reorder) {
		if (gone)
			return TC_ACT_SHOT;
		if (happens(number, DUPLICATE, lm_impair.duplicate)) {
			send_copy(skb, counters, queue);
			__sync_fetch_and_add(&counters->duplicated, 1);
		}
		return send(skb, counters, queue);
	}

	/* A packet that is held back at place s of its queue goes into the slot of place s + n: that packet takes it along. */
	index = queue & (QUEUES - 1);
	sequence = __sync_fetch_and_add(&counters->sequence[index], 1);
	if (!gone && happens(number, REORDER, lm_impair.reorder)) {
		__u32 later = index * SLOTS + ((sequence + lm_impair.reorder_by) & (SLOTS - 1));

		slot = bpf_map_lookup_elem(&lm_impair_slots, &later);
		if (slot && !keep(skb, slot)) {
			__sync_fetch_and_add(&counters->reordered, 1);
			gone = 1;
		}
	}
	if (!gone && happens(number, DUPLICATE, lm_impair.duplicate)) {
		send_copy(skb, counters, queue);
		__sync_fetch_and_add(&counters->duplicated, 1);
	}
	index = index * SLOTS + (sequence & (SLOTS - 1));
	slot = bpf_map_lookup_elem(&lm_impair_slots, &index);
	if (slot && READ_ONCE(slot->full)) {
		if (!gone)
			send_copy(skb, counters, queue);
		if (take(skb, slot)) {
			__sync_fetch_and_add(&counters->refused, 1);
			return TC_ACT_SHOT;
		}
		__sync_fetch_and_add(&counters->released, 1);
		return send(skb, counters, queue);
	}
	return gone ? TC_ACT_SHOT : send(skb, counters, queue);
}

char lm_license[] SEC("license") = "Dual MIT/GPL";
