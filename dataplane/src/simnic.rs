//! A simulated NIC: two hosts on a wire, in memory, without privilege, threads or clock.
//!
//! It plays the kernel's end of the real rings ([`crate::ring`]), so whatever runs on a [`Nic`] runs here unchanged and
//! repeatably. It has copy mode's semantics, in the order of `net/xdp/xsk.c`:
//!
//! 1. A TX descriptor is checked and its packet crosses the wire; the completion bears its address, with bit 0 cleared.
//! 2. The receiver's gate ([`lm_ebpf::model`]) judges the packet *before* it takes a frame, and logs what it redirects.
//! 3. A redirected packet takes the oldest fill entry (invalid ones are skipped uncounted) and is copied 256 bytes behind it.
//! 4. It is lost, and counted as `XDP_STATISTICS` would, when it is too long (its entry stays), when there is no entry, or when
//!    the RX ring is full; in that last case its entry moves to a list that is used, last in first out, before new entries.
//! 5. Everything else goes to the host's stack: a datagram for the data or control port reaches that socket.
//!
//! The wire loses nothing unless a test asks for it ([`Wire::drop_next`], [`Wire::set_filter`]). Packets cross it when the sender wakes its TX queue ([`Delivery::Inline`], as on veth) or when
//! the test says so ([`Wire::deliver`]).
//!
//! What a host's rings point to is read and written here as the kernel would: the rules of [`crate::memory`] hold, and a posted
//! address is out of its owner's hands.

mod datagram;
mod faults;

use std::collections::VecDeque;
use std::io;
use std::net::{Ipv4Addr, SocketAddrV4};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use lm_ebpf::model::ModelGate;
use lm_ebpf::{Counters, Log, Role, SessionAdmission, Verdict};

use datagram::{HEADERS_LEN, IPV4_LEN, UDP_LEN, parse_datagram, write_datagram};
use faults::Faults;

use crate::memory::{CHUNK_LEN_RANGE, Mapping, PACKET_HEADROOM, Umem, fill_address_is_valid};
use crate::nic::{Channel, ChannelConfig, EffectiveMode, Nic, NicError};
use crate::ring::{self, Completion, Descriptor, Fill, Rx, SimCompletion, SimFill, SimRx, SimTx, Tx};
use crate::udp::{Port, UdpEvent};
use crate::xsk::{WakeError, XdpStatistics, XskError};

/// Packets that one wake-up sends: `TX_BATCH_SIZE` of `net/xdp/xsk.c`.
const TX_BATCH: u32 = 32;

/// Datagrams that a socket holds; more are lost and counted.
const SOCKET_LEN: usize = 4096;

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

/// The link between the two hosts.
#[derive(Clone, Copy, Debug)]
pub struct WireConfig {
    /// Longest IP packet in bytes; longer ones are lost and counted.
    pub mtu: u32,
    /// When packets cross.
    pub delivery: Delivery,
    /// How far a packet's receive queue lies below its transmit queue: 0 as on veth in native mode, 1 as in generic mode. Queues
    /// that this leads below 0 count as 0.
    pub queue_shift: u32,
}

impl Default for WireConfig {
    fn default() -> WireConfig {
        WireConfig {
            mtu: 1500,
            delivery: Delivery::Inline,
            queue_shift: 0,
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
    /// Where the indices of its rings begin: just below 2³² to test the wrap.
    pub ring_start: u32,
}

/// What the wire and the hosts' stacks lost or moved, over both directions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WireCounters {
    /// Packets that crossed the wire.
    pub crossed: u64,
    /// Packets that a test lost on purpose.
    pub lost: u64,
    /// Packets longer than the MTU: lost.
    pub too_long: u64,
    /// Passed packets that no stack here takes: not UDP to the host's address, IP fragments, malformed.
    pub stack_ignored: u64,
    /// Datagrams that met a full socket.
    pub socket_full: u64,
}

#[derive(Debug)]
struct SimChannel {
    fill: SimFill,
    rx: SimRx,
    tx: SimTx,
    completion: SimCompletion,
    registered_len: u64,
    statistics: XdpStatistics,
    /// Entries whose packet met a full RX ring: used first, from the end.
    returned: Vec<u64>,
}

#[derive(Debug)]
struct Host {
    config: HostConfig,
    gate: ModelGate,
    channels: Vec<Option<SimChannel>>,
    control: VecDeque<(SocketAddrV4, Vec<u8>)>,
    data: VecDeque<(SocketAddrV4, Vec<u8>)>,
    control_refused: VecDeque<SocketAddrV4>,
    data_refused: VecDeque<SocketAddrV4>,
    passed: u64,
}

#[derive(Debug)]
struct Shared {
    config: WireConfig,
    hosts: [Host; 2],
    counters: WireCounters,
    faults: Faults,
    /// The packet that is crossing.
    packet: Vec<u8>,
    /// Where [`Wire::deliver`] looks first: host and queue in turn.
    turn: usize,
}

/// The wire: moves packets by hand and tells what crossed.
#[derive(Clone, Debug)]
pub struct Wire(Arc<Mutex<Shared>>);

/// One host's end of the wire.
#[derive(Debug)]
pub struct SimNic {
    shared: Arc<Mutex<Shared>>,
    host: usize,
}

/// Ethernet address of the simulated host with that IPv4 address: locally administered, the address at its end.
pub const fn mac_of(ip: Ipv4Addr) -> [u8; 6] {
    let [a, b, c, d] = ip.octets();
    [2, 0, a, b, c, d]
}

fn lock(shared: &Mutex<Shared>) -> MutexGuard<'_, Shared> {
    // A panic elsewhere is that test's failure; the state is plain data.
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Two hosts on a wire.
///
/// # Panics
///
/// When a host has no queues or more than 64, when a chunk length is not 2048 to 4096, when a data port is 65535, or when both
/// have one address.
pub fn wire(config: WireConfig, hosts: [HostConfig; 2]) -> (Wire, SimNic, SimNic) {
    assert_ne!(hosts[0].ip, hosts[1].ip, "two hosts with one address");
    let hosts = hosts.map(|config| {
        assert!(
            (1..=lm_ebpf::layout::QUEUES).contains(&config.queues),
            "{} queues",
            config.queues
        );
        assert!(
            CHUNK_LEN_RANGE.contains(&config.chunk_len),
            "a chunk of {} bytes",
            config.chunk_len
        );
        assert_ne!(config.port, u16::MAX, "no control port");
        Host {
            gate: ModelGate::new(Some(config.ip), config.port, config.port + 1),
            channels: (0..config.queues).map(|_| None).collect(),
            control: VecDeque::with_capacity(SOCKET_LEN),
            data: VecDeque::with_capacity(SOCKET_LEN),
            control_refused: VecDeque::new(),
            data_refused: VecDeque::new(),
            passed: 0,
            config,
        }
    });
    let packet = Vec::with_capacity(config.mtu as usize + LINK_LEN as usize);
    let shared = Shared {
        config,
        hosts,
        counters: WireCounters::default(),
        faults: Faults::default(),
        packet,
        turn: 0,
    };
    let shared = Arc::new(Mutex::new(shared));
    let nic = |host| SimNic {
        shared: shared.clone(),
        host,
    };
    let nics = (nic(0), nic(1));
    (Wire(shared), nics.0, nics.1)
}

impl Wire {
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
            let first = shared.hosts[0].channels.len();
            let (from, queue) = if turn < first {
                (0, turn)
            } else {
                (1, turn - first)
            };
            if shared.transmit(from, queue as u32, 1) == 1 {
                moved += 1;
                idle = 0;
            } else {
                idle += 1;
            }
        }
        moved
    }

    /// What crossed and what was lost.
    pub fn counters(&self) -> WireCounters {
        lock(&self.0).counters
    }
}

impl Shared {
    /// Sends up to `max` packets of one TX ring; how many descriptors it took.
    fn transmit(&mut self, from: usize, queue: u32, max: u32) -> u32 {
        let mut taken = 0;
        while taken < max {
            let host = &mut self.hosts[from];
            let Some(channel) = host.channels.get_mut(queue as usize).and_then(Option::as_mut) else {
                break;
            };
            // As `xsk_cq_reserve_addr_locked`: no room for the completion, no transmission.
            if channel.completion.free(1) == 0 {
                break;
            }
            if channel.tx.available(1) == 0 {
                channel.statistics.tx_ring_empty += 1;
                break;
            }
            let descriptor = channel.tx.read(0);
            let valid = channel.accepts(descriptor, host.config.chunk_len);
            if valid {
                let frame = host
                    .config
                    .mapping
                    .pointer(descriptor.start(), u64::from(descriptor.len));
                self.packet.resize(descriptor.len as usize, 0);
                // SAFETY: the frame lies inside the mapping and the packet has its length; its sender put it on the TX ring
                // and leaves it alone until the completion.
                unsafe {
                    std::ptr::copy_nonoverlapping(
                        frame.as_ptr(),
                        self.packet.as_mut_ptr(),
                        self.packet.len(),
                    );
                }
            }
            // Copied: the packet needs the frame no more.
            channel.tx.release(1);
            taken += 1;
            if !valid {
                channel.statistics.tx_invalid_descriptors += 1;
                continue;
            }
            channel.completion.write(0, descriptor.addr & !1);
            channel.completion.submit(1);
            if descriptor.len > self.config.mtu + LINK_LEN {
                self.counters.too_long += 1;
                continue;
            }
            if !self.crosses(from) {
                continue;
            }
            let queue = queue.saturating_sub(self.config.queue_shift);
            self.arrive(1 - from, queue);
        }
        taken
    }

    /// `self.packet` reaches a host.
    fn arrive(&mut self, to: usize, queue: u32) {
        let host = &mut self.hosts[to];
        let queue = queue % host.config.queues;
        match host.gate.run(queue, &self.packet) {
            verdict @ (Verdict::RedirectLanding | Verdict::RedirectGeneral) => {
                if verdict == Verdict::RedirectLanding && self.faults.lose_behind_gate[to] > 0 {
                    self.faults.lose_behind_gate[to] -= 1;
                    return;
                }
                let config = &host.config;
                if let Some(channel) = host.channels[queue as usize].as_mut() {
                    channel.receive(&config.mapping, config.chunk_len, &self.packet);
                }
            }
            _ => match parse_datagram(&self.packet, host.config.ip) {
                Some((from, to_port, payload)) => self.reach_socket(to, from, to_port, payload),
                None => self.counters.stack_ignored += 1,
            },
        }
    }

    fn reach_socket(&mut self, to: usize, from: SocketAddrV4, port: u16, payload: std::ops::Range<usize>) {
        let host = &mut self.hosts[to];
        let here = SocketAddrV4::new(host.config.ip, port);
        let socket = if port == host.config.port {
            &mut host.data
        } else if port == host.config.port + 1 {
            &mut host.control
        } else {
            // Nobody listens: the stack answers with an ICMP message, which reaches the sending socket.
            let sender = &mut self.hosts[1 - to];
            let queue = if from.port() == sender.config.port + 1 {
                &mut sender.control_refused
            } else if from.port() == sender.config.port {
                &mut sender.data_refused
            } else {
                return;
            };
            if queue.len() < SOCKET_LEN {
                queue.push_back(here);
            }
            return;
        };
        if socket.len() == SOCKET_LEN {
            self.counters.socket_full += 1;
            return;
        }
        socket.push_back((from, self.packet[payload].to_vec()));
        host.passed += 1;
    }
}

impl SimChannel {
    /// As `xp_unaligned_validate_desc` of `net/xdp/xsk_queue.h`.
    fn accepts(&self, descriptor: Descriptor, chunk_len: u32) -> bool {
        let start = descriptor.start();
        descriptor.options == 0
            && (1..=chunk_len).contains(&descriptor.len)
            && start < self.registered_len
            && u64::from(descriptor.len) <= self.registered_len - start
    }

    /// As `__xsk_rcv` of `net/xdp/xsk.c` in unaligned mode.
    fn receive(&mut self, mapping: &Mapping, chunk_len: u32, packet: &[u8]) {
        if packet.len() as u64 > u64::from(chunk_len) - PACKET_HEADROOM {
            self.statistics.rx_dropped += 1;
            return;
        }
        let Some(entry) = self.next_frame(chunk_len) else {
            self.statistics.rx_fill_ring_empty += 1;
            self.statistics.rx_dropped += 1;
            return;
        };
        let frame = mapping.pointer(entry + PACKET_HEADROOM, packet.len() as u64);
        // SAFETY: the frame lies inside the mapping and has the packet's length; its owner posted the entry and leaves it
        // alone until the RX descriptor. `packet` is the wire's own memory.
        unsafe { std::ptr::copy_nonoverlapping(packet.as_ptr(), frame.as_ptr(), packet.len()) };
        if self.rx.free(1) == 0 {
            self.statistics.rx_ring_full += 1;
            self.returned.push(entry);
            return;
        }
        self.rx.write(
            0,
            Descriptor::received(entry, PACKET_HEADROOM as u16, packet.len() as u32),
        );
        self.rx.submit(1);
    }

    fn next_frame(&mut self, chunk_len: u32) -> Option<u64> {
        if let Some(entry) = self.returned.pop() {
            return Some(entry);
        }
        while self.fill.available(1) == 1 {
            let entry = self.fill.read(0);
            self.fill.release(1);
            if fill_address_is_valid(entry, chunk_len, self.registered_len) {
                return Some(entry);
            }
        }
        None
    }
}

impl SimNic {
    fn host(&self) -> HostGuard<'_> {
        HostGuard {
            shared: lock(&self.shared),
            host: self.host,
        }
    }
}

struct HostGuard<'a> {
    shared: MutexGuard<'a, Shared>,
    host: usize,
}

impl std::ops::Deref for HostGuard<'_> {
    type Target = Host;
    fn deref(&self) -> &Host {
        &self.shared.hosts[self.host]
    }
}

impl std::ops::DerefMut for HostGuard<'_> {
    fn deref_mut(&mut self) -> &mut Host {
        &mut self.shared.hosts[self.host]
    }
}

impl Nic for SimNic {
    fn open_channel(&mut self, config: &ChannelConfig) -> Result<Channel, NicError> {
        let queue = config.queue;
        let mut host = self.host();
        if host.refuses_channel() {
            return Err(NicError::ChannelOpen { queue });
        }
        let queues = host.config.queues;
        match host.channels.get(queue as usize) {
            None => return Err(NicError::NoQueue { queue, queues }),
            Some(Some(_)) => return Err(NicError::ChannelOpen { queue }),
            Some(None) => {}
        }
        if config.registered_len > host.config.mapping.len()
            || config.registered_len < u64::from(host.config.chunk_len)
        {
            let what = "registered length must hold a chunk and lie in the mapping";
            return Err(XskError::Invalid {
                what,
                value: config.registered_len,
            }
            .into());
        }
        for len in [
            config.fill_len,
            config.rx_len,
            config.tx_len,
            config.completion_len,
        ] {
            if !len.is_power_of_two() {
                let what = "ring lengths must be powers of two";
                return Err(XskError::Invalid {
                    what,
                    value: u64::from(len),
                }
                .into());
            }
        }
        let start = host.config.ring_start;
        let (fill, sim_fill) = ring::in_memory::<Fill>(config.fill_len, start);
        let (sim_rx, rx) = ring::in_memory::<Rx>(config.rx_len, start);
        let (tx, mut sim_tx) = ring::in_memory::<Tx>(config.tx_len, start);
        let (sim_completion, completion) = ring::in_memory::<Completion>(config.completion_len, start);
        sim_tx.set_needs_wakeup(true); // copy mode always wants it
        host.channels[queue as usize] = Some(SimChannel {
            fill: sim_fill,
            rx: sim_rx,
            tx: sim_tx,
            completion: sim_completion,
            registered_len: config.registered_len,
            statistics: XdpStatistics::default(),
            returned: Vec::with_capacity(config.fill_len as usize),
        });
        host.gate.set_role(queue, config.role);
        host.gate.set_xsk(queue, config.role != Role::None);
        Ok(Channel {
            queue,
            fill,
            rx,
            tx,
            completion,
        })
    }

    fn rebuild_channel(&mut self, old: Channel, config: &ChannelConfig) -> Result<Channel, NicError> {
        self.close_channel(old)?;
        self.open_channel(config)
    }

    fn close_channel(&mut self, channel: Channel) -> Result<(), NicError> {
        let mut host = self.host();
        let queue = channel.queue;
        match host.channels.get_mut(queue as usize) {
            Some(slot @ Some(_)) => *slot = None,
            _ => return Err(NicError::NoChannel { queue }),
        }
        host.gate.set_role(queue, Role::None);
        host.gate.set_xsk(queue, false);
        Ok(())
    }

    fn wake_tx(&mut self, queue: u32) -> Result<(), WakeError> {
        let mut shared = lock(&self.shared);
        if !matches!(
            shared.hosts[self.host].channels.get(queue as usize),
            Some(Some(_))
        ) {
            return Err(WakeError::Gone);
        }
        if shared.config.delivery == Delivery::Inline {
            shared.transmit(self.host, queue, TX_BATCH);
        }
        Ok(())
    }

    fn wake_rx(&mut self, queue: u32) -> Result<(), WakeError> {
        match self.host().channels.get(queue as usize) {
            Some(Some(_)) => Ok(()),
            _ => Err(WakeError::Gone),
        }
    }

    fn statistics(&self, queue: u32) -> io::Result<XdpStatistics> {
        match self.host().channels.get(queue as usize) {
            Some(Some(channel)) => Ok(channel.statistics),
            _ => Err(io::Error::from_raw_os_error(libc::ENXIO)),
        }
    }

    fn open_session(&mut self, queue: u32, session: &SessionAdmission) -> Result<(), NicError> {
        self.host().gate.open_session(queue, session);
        Ok(())
    }

    fn close_session(&mut self, queue: u32) -> Result<(), NicError> {
        self.host().gate.close_session(queue);
        Ok(())
    }

    fn log(&self, queue: u32) -> Result<Log, NicError> {
        self.host().gate.log(queue).ok_or(NicError::NoChannel { queue })
    }

    fn passed_count(&self) -> u64 {
        self.host().passed
    }

    fn gate_counters(&self) -> Result<Counters, NicError> {
        Ok(self.host().gate.counters())
    }

    fn local(&self) -> SocketAddrV4 {
        let host = self.host();
        SocketAddrV4::new(host.config.ip, host.config.port)
    }

    /// The other host's, as [`mac_of`] has it.
    fn neighbour(&mut self, ip: Ipv4Addr) -> Option<[u8; 6]> {
        let shared = lock(&self.shared);
        (shared.hosts[1 - self.host].config.ip == ip).then(|| mac_of(ip))
    }

    /// A datagram that fits the MTU passes the other host's gate on queue 0, like any packet; a longer one, which would be
    /// fragmented, reaches the socket as if reassembled. A host that does not exist swallows it.
    fn udp_send(&mut self, port: Port, to: SocketAddrV4, payload: &[u8]) -> io::Result<()> {
        let mut shared = lock(&self.shared);
        if payload.len() > usize::from(u16::MAX) - IPV4_LEN - UDP_LEN {
            return Err(io::Error::from_raw_os_error(libc::EMSGSIZE));
        }
        let own = &shared.hosts[self.host].config;
        let own_port = own.port + u16::from(port == Port::Control);
        let from = SocketAddrV4::new(own.ip, own_port);
        if shared.hosts[1 - self.host].config.ip != *to.ip() {
            return Ok(());
        }
        write_datagram(&mut shared.packet, from, to, payload);
        if !shared.crosses(self.host) {
            return Ok(());
        }
        if IPV4_LEN + UDP_LEN + payload.len() <= shared.config.mtu as usize {
            shared.arrive(1 - self.host, 0);
        } else {
            let end = shared.packet.len();
            shared.reach_socket(1 - self.host, from, to.port(), HEADERS_LEN..end);
        }
        Ok(())
    }

    fn udp_recv(&mut self, port: Port, space: &mut [u8]) -> io::Result<Option<UdpEvent>> {
        let mut host = self.host();
        Ok(host.next_event(port, space.len(), |payload| {
            space[..payload.len()].copy_from_slice(payload)
        }))
    }

    fn udp_recv_into(
        &mut self,
        port: Port,
        umem: &Umem,
        addr: u64,
        len: u64,
    ) -> io::Result<Option<UdpEvent>> {
        umem.mapping().pointer(addr, len); // the range is checked even when there is nothing, as on the kernel's side
        let mut host = self.host();
        Ok(host.next_event(port, len as usize, |payload| umem.copy_to(addr, payload)))
    }

    /// Never blocks: time does not pass here.
    fn wait(&mut self, _timeout: Duration) -> io::Result<bool> {
        let mut host = self.host();
        let host = &mut *host;
        let sockets = !(host.control.is_empty()
            && host.data.is_empty()
            && host.control_refused.is_empty()
            && host.data_refused.is_empty());
        // The application's index is the only one that says whether it has read: a ring with all its room back is empty.
        let rings = host.channels.iter_mut().flatten().any(|channel| {
            let produced = channel.rx.produced();
            channel.rx.consumed() != produced
        });
        Ok(sockets || rings)
    }

    fn effective_mode(&self) -> EffectiveMode {
        EffectiveMode::Simulated
    }
}

impl Host {
    fn next_event(&mut self, port: Port, space_len: usize, mut take: impl FnMut(&[u8])) -> Option<UdpEvent> {
        let (socket, refused) = match port {
            Port::Control => (&mut self.control, &mut self.control_refused),
            Port::Data => (&mut self.data, &mut self.data_refused),
        };
        if let Some(peer) = refused.pop_front() {
            return Some(UdpEvent::Refused(peer));
        }
        while let Some((from, payload)) = socket.pop_front() {
            if payload.len() <= space_len {
                take(&payload);
                return Some(UdpEvent::Datagram {
                    from,
                    len: payload.len(),
                });
            }
        }
        None
    }
}

const _: () = {
    const fn send<T: Send>() {}
    send::<SimNic>();
    send::<crate::kernel::KernelNic>();
};
