/* What of DPDK is inline C, and its devices behind a few calls.
 *
 * A port has one pair of queues, or two where each end's transmit queue selects the other's receive queue. Its buffers come from pools of its own.
 *
 * Copied: packets are copied to and from the buffers' own memory, so that no driver ever holds an address of LM's.
 *
 * Aimed: the driver is given buffers that lie where LM's entries are, as far as there are entries, and keeps its own memory else. So its ring is full
 * whatever LM posts. The n-th packet of a landing queue is at the n-th entry: one that comes to a buffer's own memory is copied there, without its
 * headers, since these would lie on the payload of the next packet, which a device may have written already.
 *
 * One thread at a time uses a port; drivers' own threads touch connections alone.
 */
#define _GNU_SOURCE
#define ALLOW_EXPERIMENTAL_API
#include <libgen.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <rte_dev.h>
#include <rte_eal.h>
#include <rte_ethdev.h>
#include <rte_log.h>
#include <rte_malloc.h>
#include <rte_mbuf.h>
#include <rte_mempool.h>

/* As in shim.rs. */
#define QUEUES 2
#define BURST 64
#define ROOM 2048
#define ENTRIES 32768
#define AIMED_RING 128
#define NONE (~0ULL)
#define SAID_LEN 4096

#define RING 256
/* What a ring, a burst and the driver's own stock may hold; mempools like powers of two less one. */
#define MBUFS 1023
/* Packets that may be completed and not asked for. */
#define DONE 4096
/* Of a fragment: Ethernet, IP, UDP and LM. */
#define HEADERS_LEN 66
/* Where a packet begins in its entry. */
#define PACKET_AT 256
/* `net_vhost` copies packets of no more bytes behind all others of a burst (MAX_BATCH_LEN). */
#define LATE_LEN 256

struct lm_packet {
	const char *start;
	size_t len;
	/* Received: the entry where it is aimed, or NONE. Sent: the caller's. */
	unsigned long long address;
	size_t queue;
};

struct lm_facts {
	unsigned char mac[6];
	unsigned short mtu, queues;
	/* What could not be done, in words. */
	const char *fault;
};

struct lm_counters {
	unsigned long long unfit, missed, errors, copied;
};

/* What a buffer is aimed at, in its private area. */
struct lm_aim {
	/* An entry, or a packet to be sent. */
	unsigned long long address;
	unsigned int queue;
	/* It has not its own memory. */
	bool is_aimed;
	/* FREE: it is in its pool. `net_virtio_user` gives some of a packed ring's back twice when it is closed. */
	enum { FREE, OUT, RECEIVED } state;
};

/* Buffers that packets of a queue come to, or that are sent. */
struct lm_pool {
	struct lm_port *port;
	unsigned int queue;
	/* Of sent packets. */
	bool sends;
	/* The n-th packet is at the n-th entry: those that are used stay until then. Else one is used when a buffer is aimed. */
	bool is_landing;
	/* Entries from `used` to `posted` are unused; `out` buffers will use the first of them, in their order. */
	unsigned long long used, posted;
	unsigned int out;
	/* Aimed buffers that the driver has, by queue. */
	unsigned int aimed[QUEUES];
	unsigned long long entries[ENTRIES];
	unsigned int count;
	void *free[];
};

struct lm_port {
	unsigned short id, queues;
	bool is_open, is_started, is_aimed;
	/* What is sent on a queue leaves on the device's queue of that number. */
	bool steers;
	/* Where it is found again. */
	char *devargs, *name;
	struct rte_device *device;
	struct rte_mempool *rx[QUEUES], *tx;
	/* LM's memory, as the driver may know it, and from where LM does. */
	char *memory;
	const char *base;
	/* Received and read by the caller until the next receive. */
	struct rte_mbuf *in[QUEUES * BURST];
	unsigned int in_count;
	/* To be sent on a queue of the device, and not taken by it. */
	struct rte_mbuf *out[BURST];
	unsigned int out_first, out_end, out_queue;
	/* Sent packets that the driver is done with. */
	unsigned long long done[QUEUES][DONE];
	unsigned int done_count[QUEUES];
	unsigned long long unfit, copied;
};

/* What DPDK logged since the last look, as far as it has room there: its calls fail without a reason. */
static char said[SAID_LEN];
static FILE *saying;

/* Moves what was logged to `into`, which has SAID_LEN bytes; how long it is. */
size_t lm_dpdk_said(char *into)
{
	flockfile(saying);
	size_t len = ftell(saying);
	memcpy(into, said, len);
	rewind(saying);
	funlockfile(saying);
	return len;
}

/* Begins DPDK, once in a process; what could not be done. */
const char *lm_dpdk_begin(int count, char **arguments)
{
	saying = fmemopen(said, sizeof(said), "w");
	if (!saying)
		abort();
	/* Else a line that has no room would stay in the stream's own buffer. */
	setvbuf(saying, NULL, _IONBF, 0);
	rte_openlog_stream(saying);
	int begun = rte_eal_init(count, arguments);
	/* Made although nothing is put there. Others' are not empty. */
	char *folder = strdup(rte_eal_get_runtime_dir());
	if (folder && !rmdir(folder))
		rmdir(dirname(folder));
	free(folder);
	return begun < 0 ? "does not begin" : NULL;
}

/* Faults and mistakes that tests put in. */
enum lm_mutant { SOUND, HEADERS_COPIED, STOP_BELIEVED, LATE_IN_BURST, HEADROOM_SENT, BUFFERS_KEPT };
#ifdef LM_FAULTS
#define MUTANT(name) (mutant == (name))
static _Atomic unsigned int fault_rate, mutant;
static _Atomic unsigned long long fault_seed;
/* Packets of all ports: taken to be sent, lost and doubled by faults, and received. */
enum { SENT, LOST, DOUBLED, CAME };
_Atomic unsigned long long lm_dpdk_counts[4];
#define COUNT(what, number) (lm_dpdk_counts[what] += (number))

/* Of 1024 chances `rate` are faults. */
void lm_dpdk_put_in(unsigned long long seed, unsigned int rate, unsigned int mistake)
{
	fault_seed = seed * 2 + 1;
	fault_rate = rate;
	mutant = mistake;
}

static bool fails(void)
{
	fault_seed = fault_seed * 6364136223846793005ULL + 1442695040888963407ULL;
	return (fault_seed >> 54) < fault_rate;
}
#else
#define MUTANT(name) false
#define COUNT(what, number) ((void)(number))
#define fails() false
#endif

static inline struct lm_aim *aim_of(struct rte_mbuf *mbuf)
{
	return rte_mbuf_to_priv(mbuf);
}

static inline void aim(struct rte_mbuf *mbuf, unsigned long long address, size_t queue, char *start)
{
	*aim_of(mbuf) = (struct lm_aim){ address, queue, true, OUT };
	mbuf->buf_addr = start;
	mbuf->buf_iova = (rte_iova_t)start;
}

/* Buffers for the driver, or to be sent. */
static int take(struct rte_mempool *mempool, void **buffers, unsigned int count)
{
	struct lm_pool *pool = mempool->pool_data;

	if (count > pool->count || (pool->port->is_started && fails()))
		return -ENOBUFS;
	unsigned long long next = pool->used + pool->out, left = RTE_MAX(pool->posted, next) - next;
	unsigned int queue = pool->queue, aimed = RTE_MIN(count, left);
	char *memory = pool->port->memory + PACKET_AT - RTE_PKTMBUF_HEADROOM;
	pool->count -= count;
	memcpy(buffers, pool->free + pool->count, count * sizeof(*buffers));
	for (unsigned int at = 0; at < count; at++) {
		aim_of(buffers[at])->state = OUT;
		if (at < aimed) {
			unsigned long long entry = pool->entries[(next + at) % ENTRIES];
			aim(buffers[at], entry, queue, memory + entry);
		}
	}
	pool->aimed[queue] += aimed;
	pool->used += pool->is_landing ? 0 : aimed;
	pool->out += pool->is_landing ? count : 0;
	return 0;
}

/* A buffer comes back that was given to the driver: nothing was received there, or it was sent. */
static inline void came_back(struct lm_pool *pool, const struct lm_aim *from)
{
	pool->out -= pool->is_landing;
	if (!from->is_aimed)
		return;
	pool->aimed[from->queue]--;
	if (pool->sends)
		pool->port->done[from->queue][pool->port->done_count[from->queue]++] = from->address;
	else if (!pool->is_landing)
		pool->entries[pool->posted++ % ENTRIES] = from->address;
}

static int give(struct rte_mempool *mempool, void *const *buffers, unsigned int count)
{
	struct lm_pool *pool = mempool->pool_data;

	for (unsigned int at = 0; at < count; at++) {
		struct rte_mbuf *mbuf = buffers[at];
		struct lm_aim *from = aim_of(mbuf);
		/* Before there is a port they are put in as they are. */
		if (pool->port) {
			if (from->state == FREE)
				continue;
			if (from->state == OUT)
				came_back(pool, from);
			if (from->is_aimed) {
				mbuf->buf_addr = from + 1;
				mbuf->buf_iova = (rte_iova_t)mbuf->buf_addr;
				mbuf->buf_len = RTE_PKTMBUF_HEADROOM + ROOM;
			}
		}
		from->is_aimed = false;
		from->state = FREE;
		pool->free[pool->count++] = mbuf;
	}
	return 0;
}

static int pool_new(struct rte_mempool *mempool)
{
	mempool->pool_data = calloc(1, sizeof(struct lm_pool) + mempool->size * sizeof(void *));
	return mempool->pool_data ? 0 : -ENOMEM;
}

static void pool_free(struct rte_mempool *mempool)
{
	free(mempool->pool_data);
}

static unsigned int pool_count(const struct rte_mempool *mempool)
{
	return ((const struct lm_pool *)mempool->pool_data)->count;
}

static const struct rte_mempool_ops aimed_ops = {
	.name = "lm",
	.alloc = pool_new,
	.free = pool_free,
	.enqueue = give,
	.dequeue = take,
	.get_count = pool_count,
};
RTE_MEMPOOL_REGISTER_OPS(aimed_ops);

/* A pool of a port's `number`; the last one is of what it sends. */
static struct rte_mempool *make_pool(struct lm_port *port, unsigned int number)
{
	char name[RTE_MEMPOOL_NAMESIZE];

	snprintf(name, sizeof(name), "%.20s-%u", port->name, number);
	struct rte_mempool *mempool = rte_pktmbuf_pool_create_by_ops(name, MBUFS, 0, sizeof(struct lm_aim),
								     RTE_PKTMBUF_HEADROOM + ROOM, SOCKET_ID_ANY, "lm");
	if (!mempool)
		return NULL;
	struct lm_pool *pool = mempool->pool_data;
	pool->queue = number % QUEUES;
	pool->sends = number == QUEUES;
	pool->port = port;
	return mempool;
}

static struct lm_pool *pool_of(const struct lm_port *port, size_t queue)
{
	return port->rx[queue]->pool_data;
}

/* Finds the device. */
static const char *probe(struct lm_port *port)
{
	struct rte_eth_dev_info info;

	if (rte_dev_probe(port->devargs))
		return "cannot be opened";
	if (rte_eth_dev_get_port_by_name(port->name, &port->id) || rte_eth_dev_info_get(port->id, &info))
		return "is no network device";
	port->queues = RTE_MIN(RTE_MIN(info.max_rx_queues, info.max_tx_queues), port->queues);
	port->device = info.device;
	port->is_open = true;
	return NULL;
}

/* Starts the device; what could not be done. */
const char *lm_dpdk_start(struct lm_port *port)
{
	static const struct rte_eth_conf conf;
	struct rte_eth_dev_info info;
	unsigned short rx = port->is_aimed ? AIMED_RING : RING, tx = rx;

	if (rte_eth_dev_info_get(port->id, &info) || rte_eth_dev_configure(port->id, port->queues, port->queues, &conf))
		return "cannot be configured";
	if (rte_eth_dev_adjust_nb_rx_tx_desc(port->id, &rx, &tx) || (port->is_aimed && rx != AIMED_RING))
		return "takes no rings of 128 or 256 descriptors";
	struct rte_eth_txconf sends = info.default_txconf;
	/* Few sent packets are kept until the next one is sent: memory of messages is used again. */
	if (port->is_aimed)
		sends.tx_free_thresh = tx - 4;
	for (unsigned short queue = 0; queue < port->queues; queue++) {
		if (rte_eth_rx_queue_setup(port->id, queue, rx, SOCKET_ID_ANY, NULL, port->rx[queue]))
			return "has no receive queue for packets of 2048 bytes";
		if (rte_eth_tx_queue_setup(port->id, queue, tx, SOCKET_ID_ANY, &sends))
			return "has no transmit queue";
	}
	port->is_started = !rte_eth_dev_start(port->id);
	return port->is_started ? NULL : "does not start";
}

/* Closes the device: its driver frees all buffers that it has. */
static void shut(struct lm_port *port)
{
	rte_pktmbuf_free_bulk(port->in, port->in_count);
	rte_pktmbuf_free_bulk(port->out + port->out_first, port->out_end - port->out_first);
	port->in_count = port->out_first = port->out_end = 0;
	if (port->is_started)
		rte_eth_dev_stop(port->id);
	if (port->is_open) {
		rte_eth_dev_close(port->id);
		rte_dev_remove(port->device);
	}
	port->is_started = port->is_open = false;
}

/* Whether a driver has none of the buffers that are aimed for a queue. */
static bool has_none(const struct lm_port *port, size_t queue)
{
	const struct lm_pool *tx = port->tx->pool_data;
	unsigned int kept = tx->aimed[queue] + (queue < port->queues ? pool_of(port, queue)->aimed[queue] : 0);
	return !kept && !(port->is_aimed && MUTANT(BUFFERS_KEPT));
}

/* `false`: the driver has not given all aimed buffers back. The pools are kept then, and the memory is not to be used again. */
bool lm_dpdk_close(struct lm_port *port)
{
	shut(port);
	bool is_over = !port->tx || (has_none(port, 0) && has_none(port, 1));
	if (!is_over)
		return false;
	for (unsigned int queue = 0; queue < QUEUES; queue++)
		rte_mempool_free(port->rx[queue]);
	rte_mempool_free(port->tx);
	free(port->devargs);
	free(port->name);
	free(port);
	return true;
}

static const char *make_pools(struct lm_port *port)
{
	for (unsigned int queue = 0; queue < port->queues; queue++)
		if (!(port->rx[queue] = make_pool(port, queue)))
			return "has no memory for its packets";
	port->tx = make_pool(port, QUEUES);
	return port->tx ? NULL : "has no memory for its packets";
}

/* Finds the device that `devargs` describe, to use `queues` pairs of its queues at most. NULL: `facts` has the reason. */
struct lm_port *lm_dpdk_open(const char *devargs, unsigned short queues, bool steers, struct lm_facts *facts)
{
	struct lm_port *port = calloc(1, sizeof(*port));

	facts->fault = "has no memory";
	if (!port)
		return NULL;
	port->devargs = strdup(devargs);
	port->name = strndup(devargs, strcspn(devargs, ","));
	port->steers = steers;
	port->queues = queues;
	if (port->devargs && port->name)
		facts->fault = probe(port);
	if (facts->fault || (facts->fault = make_pools(port))) {
		lm_dpdk_close(port);
		return NULL;
	}
	facts->queues = port->queues;
	rte_eth_macaddr_get(port->id, (struct rte_ether_addr *)facts->mac);
	rte_eth_dev_get_mtu(port->id, &facts->mtu);
	return port;
}

/* Puts memory that drivers may know under LM's, whose pages were not written yet: at `base`, `len` bytes, whole pages. `memory` is such memory from
 * before, as long, which nothing else uses, or NULL. It is never given back to DPDK, which would write all of it. NULL: there is none. */
char *lm_dpdk_aim(struct lm_port *port, char *memory, char *base, size_t len)
{
	size_t offset;

	/* Of such memory the pages go, not the addresses. */
	if (!memory || madvise(memory, len, MADV_REMOVE))
		memory = rte_malloc(NULL, len, 4096);
	const struct rte_memseg *segment = memory ? rte_mem_virt2memseg(memory, NULL) : NULL;
	int file = segment ? rte_memseg_get_fd(segment) : -1;
	if (file < 0 || rte_memseg_get_fd_offset(segment, &offset))
		return NULL;
	if (mmap(base, len, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file, offset) == MAP_FAILED)
		return NULL;
	port->memory = memory;
	port->base = base;
	port->is_aimed = true;
	return memory;
}

/* Nothing that was posted or sent on a queue is the driver's any more: it has none of it, or the device is closed, found and started anew. A stop is
 * not enough: `net_virtio_user` keeps its buffers. What could not be done. */
const char *lm_dpdk_clear(struct lm_port *port, size_t queue, bool lands)
{
	bool is_clear = port->is_open && has_none(port, queue);
	const char *fault = NULL;

	if (!is_clear && MUTANT(STOP_BELIEVED)) {
		rte_eth_dev_stop(port->id);
		rte_eth_dev_start(port->id);
		is_clear = true;
	}
	if (!is_clear) {
		shut(port);
		if (!has_none(port, 0) || !has_none(port, 1))
			return "keeps packets' memory";
	}
	if (queue < port->queues) {
		struct lm_pool *pool = pool_of(port, queue);
		pool->used = pool->posted = 0;
		pool->is_landing = lands;
	}
	if (!is_clear && ((fault = probe(port)) || (fault = lm_dpdk_start(port))))
		shut(port);
	return fault;
}

/* Posts entries of a queue. */
void lm_dpdk_post(struct lm_port *port, size_t queue, const unsigned long long *entries, unsigned int count)
{
	struct lm_pool *pool = pool_of(port, queue);
	for (unsigned int at = 0; at < count; at++)
		pool->entries[pool->posted++ % ENTRIES] = entries[at];
}

/* A packet landed: gives the entry that it uses, where it lies then. NONE: there is none. */
static inline unsigned long long land(struct lm_port *port, struct lm_pool *pool, const struct rte_mbuf *mbuf,
				      unsigned long long address)
{
	pool->out--;
	if (pool->used == pool->posted) {
		port->unfit++;
		return NONE;
	}
	unsigned long long due = pool->entries[pool->used++ % ENTRIES];
	/* Another one than is due: LM sees that its driver changed the order. */
	if (address != NONE)
		return address;
	unsigned int from = MUTANT(HEADERS_COPIED) ? 0 : RTE_MIN(HEADERS_LEN, mbuf->data_len);
	memcpy(port->memory + due + PACKET_AT + from, rte_pktmbuf_mtod(mbuf, char *) + from, mbuf->data_len - from);
	port->copied += mbuf->data_len - from;
	return due;
}

/* Packets that came, BURST of each queue at most: they may be read until the next call. */
unsigned int lm_dpdk_receive(struct lm_port *port, struct lm_packet *restrict packets)
{
	unsigned int count = 0;

	rte_pktmbuf_free_bulk(port->in, port->in_count);
	port->in_count = 0;
	for (unsigned short queue = 0; queue < port->queues && port->is_started; queue++) {
		struct rte_mbuf **in = port->in + port->in_count;
		struct lm_pool *pool = pool_of(port, queue);
		unsigned int came = rte_eth_rx_burst(port->id, queue, in, BURST);
		port->in_count += came;
		COUNT(CAME, came);
		for (unsigned int at = 0; at < came; at++) {
			struct rte_mbuf *mbuf = in[at];
			struct lm_aim *from = aim_of(mbuf);
			unsigned long long address = from->is_aimed ? from->address : NONE;
			mbuf->nb_segs += !pool->is_landing && fails();
			/* Without its VLAN tag a packet of another network would be one of this. What is not taken is given back as it is. */
			if (mbuf->nb_segs != 1 || mbuf->data_len == 0 || mbuf->data_len > ROOM ||
			    mbuf->ol_flags & RTE_MBUF_F_RX_VLAN_STRIPPED) {
				port->unfit++;
				continue;
			}
			from->state = RECEIVED;
			pool->aimed[queue] -= address != NONE;
			if (pool->is_landing && (address = land(port, pool, mbuf, address)) == NONE)
				continue;
			packets[count++] =
				(struct lm_packet){ rte_pktmbuf_mtod(mbuf, char *), mbuf->data_len, address, queue };
		}
	}
	return count;
}

/* Whether there are packets that the device has not taken. */
bool lm_dpdk_waits(const struct lm_port *port)
{
	return port->out_first < port->out_end;
}

/* Hands what waits to the device; whether it took all. */
static bool hand_over(struct lm_port *port)
{
	struct rte_mbuf **first = port->out + port->out_first;
	unsigned int count = port->out_end - port->out_first;

	/* Lost, twice, and in another order. */
	if (count && fails()) {
		rte_pktmbuf_free(*first++);
		port->out_first++;
		count--;
		COUNT(LOST, 1);
	}
	if (count && fails()) {
		rte_mbuf_refcnt_update(*first, 1);
		unsigned short doubled = rte_eth_tx_burst(port->id, port->out_queue, first, 1);
		rte_mbuf_refcnt_update(*first, doubled - 1);
		COUNT(DOUBLED, doubled);
	}
	if (count > 1 && fails())
		RTE_SWAP(first[0], first[1]);
	if (count > 1 && fails())
		count /= 2;
	if (count)
		port->out_first += rte_eth_tx_burst(port->id, port->out_queue, first, count);
	return !lm_dpdk_waits(port);
}

/* Takes packets, of at most ROOM bytes each, as long as the device takes those before them; how many. They are copied and done with, or later. */
unsigned int lm_dpdk_send(struct lm_port *port, const struct lm_packet *packets, unsigned int count)
{
	struct lm_pool *pool = port->tx->pool_data;
	unsigned int taken = 0;

	while (port->is_started && hand_over(port) && taken < count) {
		unsigned int most = RTE_MIN(count - taken, (unsigned int)BURST), next = 0;
		port->out_queue = port->steers ? packets[taken].queue % port->queues : 0;
		/* A landing queue at the other end wants packets in their order. */
		bool cuts = port->out_queue > 0 && !MUTANT(LATE_IN_BURST);
		while (next < most && packets[taken + next].queue == packets[taken].queue)
			if (packets[taken + next++].len <= LATE_LEN && cuts)
				break;
		port->out_first = port->out_end = 0;
		if (port->done_count[0] + port->done_count[1] + MBUFS > DONE ||
		    rte_pktmbuf_alloc_bulk(port->tx, port->out, next))
			break;
		for (unsigned int at = 0; at < next; at++, taken++) {
			const struct lm_packet *packet = packets + taken;
			struct rte_mbuf *mbuf = port->out[at];
			mbuf->data_len = mbuf->pkt_len = packet->len;
			if (!port->is_aimed || packet->address == NONE) {
				memcpy(rte_pktmbuf_mtod(mbuf, void *), packet->start, packet->len);
				if (packet->address == NONE)
					continue;
				port->copied += packet->len;
				port->done[packet->queue][port->done_count[packet->queue]++] = packet->address;
				continue;
			}
			/* No byte before it is the driver's: that is a fragment's. */
			unsigned int headroom = MUTANT(HEADROOM_SENT) ? RTE_PKTMBUF_HEADROOM : 0;
			aim(mbuf, packet->address, packet->queue, port->memory + (packet->start - port->base) - headroom);
			pool->aimed[packet->queue]++;
			mbuf->data_off = headroom;
			mbuf->buf_len = headroom + packet->len;
		}
		port->out_end = next;
		COUNT(SENT, next);
	}
	return taken;
}

/* What was sent on a queue, and is done with, since the last call; valid until the next call of anything here. */
unsigned int lm_dpdk_done(struct lm_port *port, size_t queue, const unsigned long long **done)
{
	unsigned int count = port->done_count[queue];
	*done = port->done[queue];
	port->done_count[queue] = 0;
	return count;
}

bool lm_dpdk_is_up(const struct lm_port *port)
{
	struct rte_eth_link link = { 0 };
	return port->is_started && !rte_eth_link_get_nowait(port->id, &link) && link.link_status;
}

struct lm_counters lm_dpdk_counters(const struct lm_port *port)
{
	struct rte_eth_stats stats = { 0 };
	rte_eth_stats_get(port->id, &stats);
	unsigned long long errors = stats.ierrors + stats.oerrors + stats.rx_nombuf;
	return (struct lm_counters){ port->unfit, stats.imissed, errors, port->copied };
}
