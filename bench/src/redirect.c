/* SPDX-License-Identifier: MIT OR GPL-2.0-only */
/*
 * The XDP program of the bare AF_XDP programs: each IPv4 UDP datagram to one port goes to the socket of the queue that it came in on,
 * where one is; everything else passes to the kernel's stack.
 */
typedef unsigned char __u8;
typedef unsigned short __u16;
typedef unsigned int __u32;
typedef unsigned long long __u64;

#define SEC(name) __attribute__((section(name), used))
#define __uint(name, val) int(*name)[val]
#define __type(name, val) typeof(val) *name

enum {
	BPF_MAP_TYPE_XSKMAP = 17,
	QUEUES = 64,
	XDP_PASS = 2,
	/* In a packet without VLAN tag and with an IPv4 header of 20 bytes. */
	ETHERTYPE = 12,
	PROTOCOL = 23,
	DESTINATION_PORT = 36,
	HEADERS = 42,
	UDP = 17
};

struct xdp_md {
	__u32 data;
	__u32 data_end;
	__u32 data_meta;
	__u32 ingress_ifindex;
	__u32 rx_queue_index;
	__u32 egress_ifindex;
};

static long (*bpf_redirect_map)(void *map, __u64 key, __u64 flags) = (void *)51;

struct {
	__uint(type, BPF_MAP_TYPE_XSKMAP);
	__uint(max_entries, QUEUES);
	__type(key, __u32);
	__type(value, __u32);
} lm_bare_sockets SEC(".maps");

/* As it lies in a packet; fixed when the program is loaded. */
const volatile __u16 lm_bare_port = 0;

SEC("xdp.frags")
int lm_bare(struct xdp_md *context)
{
	__u8 *data = (__u8 *)(long)context->data;

	if (data + HEADERS > (__u8 *)(long)context->data_end)
		return XDP_PASS;
	if (data[ETHERTYPE] != 0x08 || data[ETHERTYPE + 1] != 0x00 || data[PROTOCOL] != UDP)
		return XDP_PASS;
	if (*(__u16 *)(data + DESTINATION_PORT) != lm_bare_port)
		return XDP_PASS;
	return bpf_redirect_map(&lm_bare_sockets, context->rx_queue_index, XDP_PASS);
}

char lm_license[] SEC("license") = "Dual MIT/GPL";
