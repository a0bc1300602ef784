//! A simulated NIC: two hosts on a wire, in memory, without privilege, threads or clock.
//!
//! It plays the kernel's end of the real rings ([`lm_dataplane::ring`]), so whatever runs on a [`Port`](lm_dataplane::port::Port) runs here
//! unchanged and repeatably. In copy mode, in the order of `net/xdp/xsk.c`:
//!
//! 1. A TX descriptor is checked and its packet crosses the wire; the completion bears its address, with bit 0 cleared.
//! 2. The receiver's gate ([`lm_ebpf::model`]) judges the packet *before* it takes a frame, and logs what it redirects.
//! 3. A redirected packet takes the oldest fill entry (invalid ones are skipped uncounted) and is copied 256 bytes behind it; one that
//!    is longer than a frame takes as many as it needs, where the host has multi-buffer mode.
//! 4. It is lost, and counted as `XDP_STATISTICS` would, when it is too long (its entry stays), when there is no entry, or when
//!    the RX ring is full; in that last case its entry moves to a list that is used, last in first out, before new entries.
//! 5. Everything else goes to the host's stack: a datagram for the data or control port reaches that socket.
//!
//! In zero-copy mode ([`Semantics::ZeroCopy`]) the device writes packets into frames that its driver has taken ahead, and the
//! gate sees what lies there afterwards ([`driver`]).
//!
//! The wire loses nothing unless a test asks for it: by [`Impairments`], all from one seed, or by hand ([`Wire::drop_next`],
//! [`Wire::set_filter`]). Packets cross it when the sender wakes its TX queue ([`Delivery::Inline`], as on veth) or when
//! the test says so ([`Wire::deliver`]); what an impairment holds back crosses when the test says what time it is
//! ([`Wire::advance`]).
//!
//! What a host's rings point to is read and written here as the kernel would: the rules of [`lm_dataplane::memory`] hold, and a posted
//! address is out of its owner's hands.

mod counters;
pub mod datagram;
pub mod driver;
mod faults;
mod host;
pub mod impair;
mod plug;
mod sockets;

use std::collections::VecDeque;
use std::net::{Ipv4Addr, SocketAddrV4};
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use lm_ebpf::Verdict;

use datagram::{ETHERNET_LEN, parse_datagram};
use driver::Exhaustion;
use faults::Faults;
use host::Host;
use impair::{Arrival, Handed, Link, Place, Via};
use sockets::Reached;

pub use counters::WireCounters;
pub use driver::{Semantics, ZeroCopy};
pub use host::{SimBell, SimNic, SimRxQueue, SimTxQueue};
pub use impair::{Bursts, Corrupt, ImpairmentCounters, Impairments, Pattern};
pub use plug::{switch, wire};

use lm_dataplane::memory::Mapping;

/// Packets that one wake-up sends: `TX_BATCH_SIZE` of `net/xdp/xsk.c`.
const TX_BATCH: u32 = 32;

/// Descriptors of a packet at most: `MAX_SKB_FRAGS` and one for what is before the fragments.
const PIECES_MAX: u32 = 18;

/// Ethernet header and one VLAN tag: what a packet may be longer than the MTU.
const LINK_LEN: u32 = 18;

/// When packets cross the wire.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Delivery {
    /// When the sender wakes its TX queue.
    #[default]
    Inline,
    /// When [`Wire::deliver`] is called.
    Manual,
}

/// The link between two hosts, or of each host to the switch.
#[derive(Clone, Copy, Debug)]
pub struct WireConfig {
    /// Longest IP packet in bytes; longer ones are lost and counted.
    pub mtu: u32,
    /// When packets cross.
    pub delivery: Delivery,
    /// How each host's driver receives; on a switch the second counts for all but the first.
    pub semantics: [Semantics; 2],
    /// What random numbers of endpoints that [`Wire::open`] opens come from.
    pub seed: u64,
}

impl Default for WireConfig {
    fn default() -> WireConfig {
        WireConfig {
            mtu: 1500,
            delivery: Delivery::Inline,
            semantics: [Semantics::Copy; 2],
            seed: 0,
        }
    }
}

/// One host on the wire.
#[derive(Clone, Debug)]
pub struct HostConfig {
    /// Its address.
    pub ip: Ipv4Addr,
    /// Its data port; control has the next one.
    pub port: u16,
    /// How many queues its interface has, at most 64.
    pub queues: u32,
    /// The memory of its channels.
    pub mapping: Arc<Mapping>,
    /// Length of a chunk in bytes, 2048 to 4096.
    pub chunk_len: u32,
    /// Whether packets may take several chunks, as [`XskOptions::multi_buffer`](lm_dataplane::xsk::XskOptions::multi_buffer): in copy mode.
    pub multi_buffer: bool,
    /// As [`PortMemory::tx_metadata_len`](lm_dataplane::PortMemory::tx_metadata_len).
    pub tx_metadata_len: u32,
    /// Where the indices of its rings begin: just below 2³² to test the wrap.
    pub ring_start: u32,
}

#[derive(Debug)]
struct Shared {
    config: WireConfig,
    hosts: Vec<Host>,
    /// Entries were given back: queues look for them.
    counters: WireCounters,
    faults: Faults,
    /// Somebody waits on a host's descriptor.
    is_watched: bool,
    /// What happens to the packets of each host on their way; `None`: nothing.
    links: Vec<Option<Box<Link>>>,
    /// Packets that came out of a link and have not arrived yet.
    handed: VecDeque<Handed>,
    /// The packet that is crossing.
    packet: Vec<u8>,
    /// Virtual time, as the test last said.
    now_ns: u64,
    /// Where [`Wire::deliver`] looks first: host and queue in turn.
    turn: usize,
}

/// The wire: moves packets by hand and tells what crossed.
#[derive(Clone, Debug)]
pub struct Wire(Arc<Mutex<Shared>>);

/// Ethernet address of the simulated host with that IPv4 address: locally administered, the address at its end.
pub const fn mac_of(ip: Ipv4Addr) -> [u8; 6] {
    let [a, b, c, d] = ip.octets();
    [2, 0, a, b, c, d]
}

fn lock(shared: &Mutex<Shared>) -> MutexGuard<'_, Shared> {
    // A panic elsewhere is that test's failure; the state is plain data.
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Wire {
    /// A switch without hosts.
    pub fn new(config: WireConfig) -> Wire {
        Wire(Arc::new(Mutex::new(Shared {
            config,
            hosts: Vec::new(),
            counters: WireCounters::default(),
            faults: Faults::default(),
            is_watched: false,
            links: Vec::new(),
            handed: VecDeque::new(),
            packet: Vec::with_capacity(config.mtu as usize + LINK_LEN as usize),
            now_ns: 0,
            turn: 0,
        })))
    }

    /// Moves one packet, from whichever host's turn it is; whether there was one.
    pub fn step(&self) -> bool {
        self.deliver(1) == 1
    }

    /// Moves up to `max` packets, from each host and queue in turn; how many there were.
    pub fn deliver(&self, max: u32) -> u32 {
        let mut shared = lock(&self.0);
        let places: usize = shared.hosts.iter().map(|host| host.channels.len()).sum();
        let (mut moved, mut idle) = (0, 0);
        while moved < max && idle < places {
            let turn = shared.turn;
            shared.turn = (turn + 1) % places;
            let (mut from, mut queue) = (0, turn);
            while queue >= shared.hosts[from].channels.len() {
                queue -= shared.hosts[from].channels.len();
                from += 1;
            }
            if shared.transmit(from, queue as u32, 1) > 0 {
                moved += 1;
                idle = 0;
            } else {
                idle += 1;
            }
        }
        shared.run_written();
        moved
    }

    /// Says when packets cross from now on.
    pub fn set_delivery(&self, delivery: Delivery) {
        lock(&self.0).config.delivery = delivery;
    }

    /// Says what time it is: packets that were held back until now arrive.
    pub fn advance(&self, now_ns: u64) {
        let mut shared = lock(&self.0);
        let shared = &mut *shared;
        shared.now_ns = shared.now_ns.max(now_ns);
        for from in 0..shared.hosts.len() {
            if let Some(link) = &mut shared.links[from] {
                link.release(shared.now_ns, &mut shared.handed);
            }
            shared.hand_over(from);
        }
        shared.run_written();
    }

    /// Sets the interface of host number `host`, of two, up or down, as `ip link set` does. What is sent meanwhile is lost.
    pub fn set_up(&self, host: usize, is_up: bool) {
        let mut shared = lock(&self.0);
        let host = &mut shared.hosts[host];
        host.is_down = !is_up;
        let channels = host.channels.iter_mut().flatten();
        if is_up {
            // Its drivers fill their rings.
            channels.for_each(driver::SimChannel::wake);
        } else {
            let lost: u64 = channels.map(driver::SimChannel::go_down).sum();
            shared.counters.device_lost += lost;
        }
    }

    /// When the next packet that is held back arrives at the latest, in virtual nanoseconds.
    pub fn next_due_ns(&self) -> Option<u64> {
        let shared = lock(&self.0);
        shared
            .links
            .iter()
            .flatten()
            .filter_map(|link| link.next_due_ns())
            .min()
    }

    /// Impairs what host number `from` sends (in the order given to [`wire`]) from now on. What is held back already stays so.
    pub fn impair(&self, from: usize, impairments: Impairments) {
        lock(&self.0).impair(from, impairments);
    }

    /// What the impairments did to the packets of host number `from`.
    pub fn impairment_counters(&self, from: usize) -> ImpairmentCounters {
        let shared = lock(&self.0);
        shared.links[from]
            .as_ref()
            .map(|link| link.counters())
            .unwrap_or_default()
    }

    /// Packets that host number `host` put on the wire from its TX rings.
    pub fn sent(&self, host: usize) -> u64 {
        lock(&self.0).hosts[host].sent
    }

    /// How often drivers of host number `host` were given too few entries ([`ZeroCopy::lap`]).
    pub fn short_laps(&self, host: usize) -> u64 {
        let shared = lock(&self.0);
        shared.hosts[host]
            .channels
            .iter()
            .flatten()
            .map(driver::SimChannel::short_laps)
            .sum()
    }

    /// Datagrams in the sockets of host number `host` that nobody has read.
    pub fn unread_datagrams(&self, host: usize) -> u64 {
        let shared = lock(&self.0);
        shared.hosts[host].sockets.unread() as u64
    }

    /// Has the gate of host number `host` do with a queue's packets what this role says, whatever the queue is for.
    pub fn set_role(&self, host: usize, queue: u32, role: lm_ebpf::Role) {
        lock(&self.0).hosts[host].gate.set_role(queue, role);
    }

    /// Says where the kernel may write what it receives for a queue of host number `host`: packets that it writes elsewhere are
    /// counted by [`Wire::strayed`].
    pub fn set_bounds(&self, host: usize, queue: u32, bounds: Range<u64>) {
        lock(&self.0).hosts[host].set_bounds(queue, bounds);
    }

    /// How often something was written outside the bounds set.
    pub fn strayed(&self) -> u64 {
        lock(&self.0).hosts.iter().map(Host::strayed).sum()
    }

    /// What crossed and what was lost.
    pub fn counters(&self) -> WireCounters {
        lock(&self.0).counters
    }
}

/// As `xsk_skb_metadata` of net/xdp/xsk.c and a device behind it: sums a packet up from where its metadata says. `false`: it asks for something
/// else, or for a sum that does not lie in the packet.
fn sum_as_told(packet: &mut [u8], metadata: &[u8]) -> bool {
    let word = |at: usize| usize::from(u16::from_ne_bytes([metadata[at], metadata[at + 1]]));
    let flags = u64::from_ne_bytes(metadata[..8].try_into().expect("eight bytes"));
    if flags == 0 {
        return true;
    }
    let (start, offset) = (word(8), word(10));
    if flags != u64::from(libc::XDP_TXMD_FLAGS_CHECKSUM) || start + offset + 2 > packet.len() {
        return false;
    }
    let checksum = match lm_protocol::wire::ipv4::checksum(&packet[start..]) {
        0 => 0xffff,
        checksum => checksum,
    };
    packet[start + offset..][..2].copy_from_slice(&checksum.to_be_bytes());
    true
}

impl Shared {
    /// Sends up to `max` packets of one TX ring; how many descriptors it took. The last packet may end behind them.
    fn transmit(&mut self, from: usize, queue: u32, max: u32) -> u32 {
        let mut taken = 0;
        while taken < max {
            let host = &mut self.hosts[from];
            if host.is_down {
                break;
            }
            let Some(channel) = host.channels.get_mut(queue as usize).and_then(Option::as_mut) else {
                break;
            };
            if channel.tx.available(1) == 0 {
                channel.statistics.tx_ring_empty += 1;
                break;
            }
            // A packet goes on in the next descriptor while its own says so; its sender shows all of them at once.
            let on_ring = channel.tx.available(PIECES_MAX);
            let multi_buffer = host.config.multi_buffer;
            let goes_on = |&piece: &u32| multi_buffer && channel.tx.read(piece).continues();
            let pieces = 1 + (0..on_ring - 1).take_while(goes_on).count() as u32;
            let is_whole = !goes_on(&(pieces - 1));
            // As `xsk_cq_reserve_addr_locked`: no room for the completion, no transmission.
            if channel.completion.free(pieces) < pieces {
                break;
            }
            let is_legal = |piece: u32| {
                let descriptor = channel.tx.read(piece);
                channel.accepts(descriptor, &host.config)
            };
            let mut valid = is_whole && (0..pieces).all(is_legal);
            self.packet.clear();
            for descriptor in (0..pieces).map(|piece| channel.tx.read(piece)).filter(|_| valid) {
                let frame = host
                    .config
                    .mapping
                    .pointer(descriptor.start(), u64::from(descriptor.len));
                // SAFETY: the frame lies inside the mapping; its sender put it on the TX ring and leaves it alone until the
                // completion.
                let piece = unsafe { std::slice::from_raw_parts(frame.as_ptr(), descriptor.len as usize) };
                self.packet.extend_from_slice(piece);
            }
            let first = channel.tx.read(0);
            if valid && first.options & libc::XDP_TX_METADATA != 0 {
                let len = host.config.tx_metadata_len;
                let metadata = (host.config.mapping).pointer(first.start() - u64::from(len), len.into());
                // SAFETY: as for the packet, before which it lies.
                let metadata = unsafe { std::slice::from_raw_parts(metadata.as_ptr(), len as usize) };
                valid = sum_as_told(&mut self.packet, metadata);
            }
            if valid {
                for piece in 0..pieces {
                    let address = channel.tx.read(piece).addr & !1;
                    channel.completion.write(piece, address);
                }
                channel.completion.submit(pieces);
            }
            // Copied: the packet needs the frames no more.
            channel.tx.release(pieces);
            taken += pieces;
            if !valid {
                channel.statistics.tx_invalid_descriptors += u64::from(pieces);
                continue;
            }
            let place = Place {
                first: taken == pieces,
                last: taken >= max || channel.tx.available(1) == 0,
            };
            host.sent += 1;
            self.counters.sent += 1;
            if self.packet.len() as u32 > self.config.mtu + LINK_LEN {
                self.counters.too_long += 1;
                continue;
            }
            self.cross(from, Via::Queue(queue), place);
        }
        taken
    }

    /// `self.packet` of host `from` is on the wire.
    fn cross(&mut self, from: usize, via: Via, place: Place) {
        self.show(from, via);
        if !self.crosses(from) {
            return;
        }
        match &mut self.links[from] {
            None => self.arrive_from(from, via),
            Some(link) => {
                link.offer(&self.packet, via, place, self.now_ns, &mut self.handed);
                self.hand_over(from);
            }
        }
    }

    /// What came out of the link of host `from` arrives.
    fn hand_over(&mut self, from: usize) {
        while let Some(Handed { packet, via }) = self.handed.pop_front() {
            let before = std::mem::replace(&mut self.packet, packet);
            self.arrive_from(from, via);
            let packet = std::mem::replace(&mut self.packet, before);
            if let Some(link) = &mut self.links[from] {
                link.recycle(packet);
            }
        }
    }

    /// `self.packet`, which host `from` sent, reaches another.
    fn arrive_from(&mut self, from: usize, via: Via) {
        match self.destination(from) {
            Some(to) => self.arrive(to, Some(from), via),
            None => {
                self.counters.arrived += 1;
                self.counters.stack_ignored += 1;
            }
        }
    }

    /// Which host the switch takes `self.packet` to.
    fn destination(&self, from: usize) -> Option<usize> {
        if self.hosts.len() == 2 {
            return Some(1 - from);
        }
        let ip = self.packet.get(ETHERNET_LEN + 16..ETHERNET_LEN + 20)?;
        self.hosts.iter().position(|host| host.config.ip.octets() == ip)
    }

    /// `self.packet` reaches a host.
    fn arrive(&mut self, to: usize, from: Option<usize>, via: Via) {
        self.counters.arrived += 1;
        if self.is_watched {
            self.hosts[to].notify();
        }
        let arrival = match from.and_then(|from| self.links[from].as_mut()) {
            Some(link) => link.arrival(),
            None => Arrival::default(),
        };
        let exhaustion = Exhaustion {
            fill_empty: arrival.fill_empty,
            rx_full: arrival.rx_full,
        };
        let Via::Queue(queue) = via else {
            self.reach_stack(to);
            return;
        };
        let host = &mut self.hosts[to];
        let config = &host.config;
        let queue = host.queue_of(queue % config.queues, &self.packet);
        if let Some(channel) = host.channels[queue as usize].as_mut()
            && channel.is_zero_copy()
        {
            let (mapping, chunk_len) = (&config.mapping, config.chunk_len);
            let counters = &mut self.counters;
            if channel.write(mapping, chunk_len, &self.packet, exhaustion, counters) {
                self.run_written_of(to, queue);
            }
            return;
        }
        match host.gate.run(queue, &self.packet) {
            verdict @ (Verdict::RedirectLanding | Verdict::RedirectGeneral) => {
                if self.loses_behind_gate(to, verdict) {
                    return;
                }
                self.redirect(to, queue, exhaustion);
            }
            _ => self.reach_stack(to),
        }
    }

    /// Copy mode: `self.packet`, which the gate redirected, goes to the queue's XSK.
    fn redirect(&mut self, to: usize, queue: u32, exhaustion: Exhaustion) {
        let host = &mut self.hosts[to];
        let config = &host.config;
        match host.channels[queue as usize].as_mut() {
            Some(channel) => channel.receive(
                (&config.mapping, config.chunk_len, config.multi_buffer),
                &self.packet,
                exhaustion,
                &mut self.counters,
            ),
            None => self.counters.gate_lost += 1,
        }
    }

    /// Zero-copy mode: the program looks at what was written.
    fn run_written(&mut self) {
        for to in 0..self.hosts.len() {
            for queue in 0..self.hosts[to].config.queues {
                self.run_written_of(to, queue);
            }
        }
    }

    fn run_written_of(&mut self, to: usize, queue: u32) {
        loop {
            let host = &mut self.hosts[to];
            let mapping = &host.config.mapping;
            let Some(channel) = host.channels[queue as usize].as_mut() else {
                return;
            };
            let Some(written) = channel.next_written(mapping, &mut self.packet) else {
                channel.take_ahead(host.config.chunk_len);
                return;
            };
            match host.gate.run(queue, &self.packet) {
                verdict @ (Verdict::RedirectLanding | Verdict::RedirectGeneral) => {
                    if !self.loses_behind_gate(to, verdict)
                        && let Some(channel) = self.hosts[to].channels[queue as usize].as_mut()
                    {
                        channel.show_written(written, &mut self.counters);
                    }
                }
                _ => {
                    channel.give_back(written);
                    self.reach_stack(to);
                }
            }
        }
    }

    /// `self.packet` passed the gate, or came as a datagram put together again.
    fn reach_stack(&mut self, to: usize) {
        let host = &mut self.hosts[to];
        let Some((from, port, payload)) = parse_datagram(&self.packet, host.config.ip) else {
            self.counters.stack_ignored += 1;
            return;
        };
        match host.sockets.take(from, port, &self.packet[payload]) {
            Reached::Socket => self.counters.in_sockets += 1,
            Reached::Full => self.counters.socket_full += 1,
            Reached::Nobody => {
                self.counters.refused += 1;
                // The stack answers with an ICMP message, which reaches the sending socket.
                let here = SocketAddrV4::new(host.config.ip, port);
                let sender = (self.hosts.iter_mut()).find(|host| host.config.ip == *from.ip());
                if let Some(sender) = sender {
                    sender.sockets.refuse(from.port(), here);
                }
            }
        }
    }
}
