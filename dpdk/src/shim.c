/* What of DPDK is inline C, and its devices behind a few calls.
 *
 * One port has one receive and one transmit queue. Packets are copied to and from mbufs of the port's own pool, so that no driver ever holds an
 * address of LM's memory. One thread at a time uses a port; drivers' own threads touch connections alone.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <rte_dev.h>
#include <rte_eal.h>
#include <rte_errno.h>
#include <rte_ethdev.h>
#include <rte_log.h>
#include <rte_mbuf.h>
#include <rte_mempool.h>

/* As in shim.rs. */
#define BURST 64
#define ROOM 2048

#define RING 256
/* What both rings, a burst each way and the driver's own stock may hold; mempools like powers of two less one. */
#define MBUFS 2047

struct lm_packet {
	const char *start;
	size_t len;
	/* The caller's. */
	unsigned long long address;
	size_t queue;
};

struct lm_facts {
	unsigned char mac[6];
	unsigned short mtu;
	/* What could not be done, in words. */
	const char *fault;
};

struct lm_counters {
	unsigned long long unfit, missed, errors;
};

struct lm_port {
	unsigned short id;
	bool is_started;
	struct rte_device *device;
	struct rte_mempool *pool;
	/* Received and read by the caller until the next receive. */
	struct rte_mbuf *in[BURST];
	unsigned int in_count;
	/* Copied, and not taken by the driver. */
	struct rte_mbuf *out[BURST];
	unsigned int out_first, out_end;
	unsigned long long unfit;
};

/* What DPDK logged since the last look: its calls fail without a reason. */
static struct {
	pthread_mutex_t lock;
	char text[4096];
	size_t len;
} said = { .lock = PTHREAD_MUTEX_INITIALIZER };

static ssize_t keep(void *cookie, const char *text, size_t len)
{
	(void)cookie;
	pthread_mutex_lock(&said.lock);
	if (len <= sizeof(said.text) - said.len) {
		memcpy(said.text + said.len, text, len);
		said.len += len;
	}
	pthread_mutex_unlock(&said.lock);
	return (ssize_t)len;
}

/* Moves what was logged to `into`; how long it is. */
size_t lm_dpdk_said(char *into, size_t room)
{
	pthread_mutex_lock(&said.lock);
	size_t len = said.len < room ? said.len : room;
	memcpy(into, said.text, len);
	said.len = 0;
	pthread_mutex_unlock(&said.lock);
	return len;
}

/* Begins DPDK, once in a process; an errno. */
int lm_dpdk_begin(int count, char **arguments)
{
	FILE *log = fopencookie(NULL, "w", (cookie_io_functions_t){ .write = keep });
	if (!log)
		return ENOMEM;
	rte_openlog_stream(log);
	return rte_eal_init(count, arguments) < 0 ? rte_errno : 0;
}

static const char *set_up(struct lm_port *port, const char *name)
{
	static const struct rte_eth_conf conf;
	struct rte_eth_dev_info info;
	unsigned short rx = RING, tx = RING;

	if (rte_eth_dev_info_get(port->id, &info) || rte_eth_dev_configure(port->id, 1, 1, &conf))
		return "cannot be configured";
	if (rte_eth_dev_adjust_nb_rx_tx_desc(port->id, &rx, &tx))
		return "takes no ring of 256 descriptors";
	port->pool = rte_pktmbuf_pool_create(name, MBUFS, 0, 0, RTE_PKTMBUF_HEADROOM + ROOM, SOCKET_ID_ANY);
	if (!port->pool)
		return "has no memory for its packets";
	if (rte_eth_rx_queue_setup(port->id, 0, rx, SOCKET_ID_ANY, NULL, port->pool))
		return "has no receive queue for packets of 2048 bytes";
	if (rte_eth_tx_queue_setup(port->id, 0, tx, SOCKET_ID_ANY, NULL))
		return "has no transmit queue";
	port->is_started = !rte_eth_dev_start(port->id);
	return port->is_started ? NULL : "does not start";
}

void lm_dpdk_close(struct lm_port *port)
{
	rte_pktmbuf_free_bulk(port->in, port->in_count);
	rte_pktmbuf_free_bulk(port->out + port->out_first, port->out_end - port->out_first);
	if (port->is_started)
		rte_eth_dev_stop(port->id);
	rte_eth_dev_close(port->id);
	rte_dev_remove(port->device);
	rte_mempool_free(port->pool);
	free(port);
}

/* Finds the device that `devargs` describe, and starts it. NULL: `facts` has the reason. */
struct lm_port *lm_dpdk_open(const char *devargs, const char *name, struct lm_facts *facts)
{
	struct rte_eth_dev_info info;
	struct lm_port *port = calloc(1, sizeof(*port));

	if (!port || rte_dev_probe(devargs)) {
		facts->fault = "cannot be opened";
		free(port);
		return NULL;
	}
	if (rte_eth_dev_get_port_by_name(name, &port->id) || rte_eth_dev_info_get(port->id, &info)) {
		facts->fault = "is no network device";
		free(port);
		return NULL;
	}
	port->device = info.device;
	facts->fault = set_up(port, name);
	if (facts->fault) {
		lm_dpdk_close(port);
		return NULL;
	}
	rte_eth_macaddr_get(port->id, (struct rte_ether_addr *)facts->mac);
	rte_eth_dev_get_mtu(port->id, &facts->mtu);
	return port;
}

/* Packets that came, BURST at most: they may be read until the next call. */
unsigned int lm_dpdk_receive(struct lm_port *port, struct lm_packet *packets)
{
	unsigned int count = 0;

	rte_pktmbuf_free_bulk(port->in, port->in_count);
	port->in_count = rte_eth_rx_burst(port->id, 0, port->in, BURST);
	for (unsigned int at = 0; at < port->in_count; at++) {
		const struct rte_mbuf *mbuf = port->in[at];
		/* Without its VLAN tag a packet of another network would be one of this. */
		bool fits = mbuf->nb_segs == 1 && mbuf->data_len > 0 && mbuf->data_len <= ROOM &&
			    !(mbuf->ol_flags & RTE_MBUF_F_RX_VLAN_STRIPPED);
		if (fits)
			packets[count++] = (struct lm_packet){ rte_pktmbuf_mtod(mbuf, char *), mbuf->data_len, 0, 0 };
		else
			port->unfit++;
	}
	return count;
}

/* Whether there are packets that the device has not taken. */
bool lm_dpdk_waits(const struct lm_port *port)
{
	return port->out_first < port->out_end;
}

/* Copies packets, of at most ROOM bytes each, as long as the device takes those before them; how many. */
unsigned int lm_dpdk_send(struct lm_port *port, const struct lm_packet *packets, unsigned int count)
{
	unsigned int taken = 0;

	for (;;) {
		struct rte_mbuf **first = port->out + port->out_first;
		port->out_first += rte_eth_tx_burst(port->id, 0, first, port->out_end - port->out_first);
		unsigned int next = RTE_MIN(count - taken, (unsigned int)BURST);
		if (lm_dpdk_waits(port) || !next)
			return taken;
		port->out_first = port->out_end = 0;
		if (rte_pktmbuf_alloc_bulk(port->pool, port->out, next))
			return taken;
		for (unsigned int at = 0; at < next; at++, taken++) {
			const struct lm_packet *packet = packets + taken;
			port->out[at]->data_len = port->out[at]->pkt_len = packet->len;
			memcpy(rte_pktmbuf_mtod(port->out[at], void *), packet->start, packet->len);
		}
		port->out_end = next;
	}
}

bool lm_dpdk_is_up(const struct lm_port *port)
{
	struct rte_eth_link link = { 0 };
	return !rte_eth_link_get_nowait(port->id, &link) && link.link_status;
}

struct lm_counters lm_dpdk_counters(const struct lm_port *port)
{
	struct rte_eth_stats stats = { 0 };
	rte_eth_stats_get(port->id, &stats);
	return (struct lm_counters){ port->unfit, stats.imissed, stats.ierrors + stats.oerrors + stats.rx_nombuf };
}
