//! One host of the simulated wire: its end of each channel, its gate, its sockets, and the [`Port`] that an engine drives.

use std::io;
use std::net::{Ipv4Addr, SocketAddrV4};
use std::num::NonZeroU16;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use std::time::Duration;

use lm_ebpf::Counters;
use lm_ebpf::model::ModelGate;
use lm_protocol::landing::SessionAdmission;
use rustix::event::{EventfdFlags, eventfd};

use super::datagram::{ETHERNET_LEN, IPV4_LEN, UDP_LEN, write_datagram};
use super::driver::{Semantics, SimChannel};
use super::impair::{Place, Via};
use super::sockets::Sockets;
use super::{Delivery, HostConfig, Shared, TX_BATCH, Wire, lock, mac_of};
use lm_dataplane::memory::Umem;
use lm_dataplane::port::{
    Datagrams, EffectiveMode, Port, PortError, QueueDrops, QueueSpec, Role, RxQueue as _, Socket,
    SocketEvent, Steer, WakeError,
};
use lm_dataplane::ring::{self, Completion, Fill, Rx, Tx};
use lm_dataplane::ring_queue::{Bell, RingRx, RingTx};
use lm_dataplane::xsk::{XdpStatistics, XskError};

/// How long [`Port::wait`] takes when it need not wait.
const LOOK: Duration = Duration::from_micros(1);

/// The state of a host.
#[derive(Debug)]
pub(super) struct Host {
    pub(super) config: HostConfig,
    pub(super) gate: ModelGate,
    pub(super) channels: Vec<Option<SimChannel>>,
    pub(super) sockets: Sockets,
    /// Its interface is down.
    pub(super) is_down: bool,
    /// Packets sent from TX rings.
    pub(super) sent: u64,
    bounds: Vec<Option<Range<u64>>>,
    /// [`SimChannel::strayed`] of channels that are gone.
    strayed: u64,
    /// Zero-copy mode: queues and the senders that were led there.
    led: Vec<(u32, Ipv4Addr)>,
    /// Queues and the senders whose packets come to queue 0 instead. Everything else comes to the queue that it was sent to.
    away: Vec<(u32, Ipv4Addr)>,
    /// Readable when something has arrived; where a descriptor was asked for.
    event: Option<Arc<OwnedFd>>,
}

impl Host {
    pub(super) fn new(config: HostConfig) -> Host {
        Host {
            gate: ModelGate::new(Some(config.ip), config.port, config.port + 1),
            channels: (0..config.queues).map(|_| None).collect(),
            sockets: Sockets::new(SocketAddrV4::new(config.ip, config.port)),
            led: Vec::new(),
            away: Vec::new(),
            is_down: false,
            sent: 0,
            bounds: vec![None; config.queues as usize],
            strayed: 0,
            event: None,
            config,
        }
    }

    /// Something arrived.
    pub(super) fn notify(&self) {
        if let Some(event) = &self.event {
            // A full one is readable already.
            let _ = rustix::io::write(event, &1u64.to_ne_bytes());
        }
    }

    /// Where a packet comes that was sent to `queue`.
    pub(super) fn queue_of(&self, queue: u32, packet: &[u8]) -> u32 {
        let is_of = |ip: &Ipv4Addr| packet.get(ETHERNET_LEN + 12..ETHERNET_LEN + 16) == Some(&ip.octets());
        match self.away.iter().any(|(from, ip)| *from == queue && is_of(ip)) {
            true => 0,
            false => queue,
        }
    }

    pub(super) fn set_bounds(&mut self, queue: u32, bounds: Range<u64>) {
        if let Some(channel) = &mut self.channels[queue as usize] {
            channel.set_bounds(bounds.clone());
        }
        self.bounds[queue as usize] = Some(bounds);
    }

    pub(super) fn strayed(&self) -> u64 {
        let open = self.channels.iter().flatten();
        self.strayed + open.map(|channel| channel.strayed).sum::<u64>()
    }
}

/// One host's end of the wire.
#[derive(Debug)]
pub struct SimNic {
    shared: Arc<Mutex<Shared>>,
    host: usize,
    event: OnceLock<Arc<OwnedFd>>,
}

impl AsFd for SimNic {
    /// Readable when something arrives from now on, or has arrived: to be asked for before each wait.
    ///
    /// # Panics
    ///
    /// When the kernel has no eventfd(2) left.
    fn as_fd(&self) -> BorrowedFd<'_> {
        let event = self.event.get_or_init(|| {
            let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).expect("an eventfd");
            let event = Arc::new(event);
            let mut host = self.host();
            host.event = Some(Arc::clone(&event));
            host.shared.is_watched = true;
            drop(host);
            event
        });
        // An empty one has nothing to read.
        let _ = rustix::io::read(event, &mut [0; 8]);
        if self.has_arrivals() {
            self.host().notify();
        }
        event.as_fd()
    }
}

impl SimNic {
    pub(super) fn new(shared: Arc<Mutex<Shared>>, host: usize) -> SimNic {
        SimNic {
            shared,
            host,
            event: OnceLock::new(),
        }
    }

    fn host(&self) -> HostGuard<'_> {
        HostGuard {
            shared: lock(&self.shared),
            host: self.host,
        }
    }
}

pub(super) struct HostGuard<'a> {
    pub(super) shared: MutexGuard<'a, Shared>,
    pub(super) host: usize,
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

impl SimNic {
    /// Whether something waits to be received.
    fn has_arrivals(&self) -> bool {
        let mut host = self.host();
        let host = &mut *host;
        let sockets = host.sockets.has_event();
        // The application's index is the only one that says whether it has read: a ring with all its room back is empty.
        let rings = host.channels.iter_mut().flatten().any(|channel| {
            let produced = channel.rx.produced();
            channel.rx.consumed() != produced
        });
        sockets || rings
    }

    fn is_zero_copy(&self) -> bool {
        let host = self.host();
        host.shared.config.semantics[host.host.min(1)] != Semantics::Copy
    }

    fn open_queue(&mut self, spec: &QueueSpec) -> Result<(Option<SimRxQueue>, SimTxQueue), PortError> {
        let queue = spec.queue;
        let mut host = self.host();
        if host.refuses_channel() {
            return Err(PortError::QueueOpen { queue });
        }
        let queues = host.config.queues;
        match host.channels.get(queue as usize) {
            None => return Err(PortError::NoQueue { queue, queues }),
            Some(Some(_)) => return Err(PortError::QueueOpen { queue }),
            Some(None) => {}
        }
        if spec.registered_len > host.config.mapping.len()
            || spec.registered_len < u64::from(host.config.chunk_len)
        {
            let what = "registered length must hold a chunk and lie in the mapping";
            return Err(XskError::Invalid {
                what,
                value: spec.registered_len,
            }
            .into());
        }
        for len in [spec.rx_len, spec.tx_len] {
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
        let (fill, sim_fill) = ring::in_memory::<Fill>(spec.rx_len, start);
        let (sim_rx, rx) = ring::in_memory::<Rx>(spec.rx_len, start);
        let (tx, mut sim_tx) = ring::in_memory::<Tx>(spec.tx_len, start);
        let (sim_completion, completion) = ring::in_memory::<Completion>(spec.tx_len, start);
        sim_tx.set_needs_wakeup(true); // copy mode always wants it
        let semantics = match spec.copies {
            true => Semantics::Copy,
            false => host.shared.config.semantics[host.host.min(1)],
        };
        let role = match spec.role {
            Role::SendOnly => lm_ebpf::Role::None,
            Role::General => match semantics {
                Semantics::Copy => lm_ebpf::Role::General,
                Semantics::ZeroCopy(_) => lm_ebpf::Role::GeneralZeroCopy,
            },
            Role::Landing => match semantics {
                Semantics::Copy => lm_ebpf::Role::Landing,
                Semantics::ZeroCopy(_) => lm_ebpf::Role::LandingZeroCopy,
            },
        };
        let bounds = host.bounds[queue as usize].clone();
        let rings = (sim_fill, sim_rx, sim_tx, sim_completion);
        let channel = SimChannel::new(rings, spec.registered_len, semantics, bounds);
        host.channels[queue as usize] = Some(channel);
        host.gate.set_role(queue, role);
        host.gate.set_xsk(queue, role != lm_ebpf::Role::None);
        let bell = || SimBell {
            shared: self.shared.clone(),
            host: self.host,
            queue,
        };
        let tx = RingTx::new(tx, completion, bell());
        let log = host.gate.log(queue).filter(|_| spec.role != Role::SendOnly);
        let rx = log.map(|mut log| {
            log.set_capacity(spec.capacity);
            RingRx::new(fill, rx, log, bell())
        });
        Ok((rx, tx))
    }

    /// Gives up a queue: nothing is redirected there any more.
    ///
    /// # Errors
    ///
    /// See [`PortError`].
    pub fn close(&mut self, queue: u32) -> Result<(), PortError> {
        let mut guard = self.host();
        let number = guard.host;
        let shared = &mut *guard.shared;
        let host = &mut shared.hosts[number];
        match host.channels.get_mut(queue as usize) {
            Some(slot @ Some(_)) => {
                if let Some(channel) = slot.take() {
                    host.strayed += channel.strayed;
                }
            }
            _ => return Err(PortError::NoQueueOpen { queue }),
        }
        host.gate.set_role(queue, lm_ebpf::Role::None);
        host.gate.set_xsk(queue, false);
        Ok(())
    }

    /// What the gate counted.
    pub fn gate_counters(&self) -> Counters {
        self.host().gate.counters()
    }

    /// What `XDP_STATISTICS` would say of an open queue.
    pub fn statistics(&self, queue: u32) -> Option<XdpStatistics> {
        let host = self.host();
        let channel = host.channels.get(queue as usize)?.as_ref()?;
        Some(channel.statistics)
    }
}

/// Whoever plays the kernel's end of a simulated queue's rings.
#[derive(Debug)]
pub struct SimBell {
    shared: Arc<Mutex<Shared>>,
    host: usize,
    queue: u32,
}

/// The receive side of a simulated queue.
pub type SimRxQueue = RingRx<SimBell>;
/// The transmit side of a simulated queue.
pub type SimTxQueue = RingTx<SimBell>;

// Out of line, as what they stand for is: it is nothing that an engine's instructions are counted for.
impl Bell for SimBell {
    #[inline(never)]
    fn wake_tx(&self) -> Result<(), WakeError> {
        let mut shared = lock(&self.shared);
        if !matches!(
            shared.hosts[self.host].channels.get(self.queue as usize),
            Some(Some(_))
        ) {
            return Err(WakeError::Gone);
        }
        if shared.hosts[self.host].is_down {
            return Err(WakeError::Down);
        }
        if shared.config.delivery == Delivery::Inline {
            shared.transmit(self.host, self.queue, TX_BATCH);
            shared.run_written();
        }
        Ok(())
    }

    #[inline(never)]
    fn wake_rx(&self) -> Result<(), WakeError> {
        let mut shared = lock(&self.shared);
        let host = &mut shared.hosts[self.host];
        if host.is_down {
            return Err(WakeError::Down);
        }
        match host.channels.get_mut(self.queue as usize) {
            Some(Some(channel)) => {
                channel.wake();
                Ok(())
            }
            _ => Err(WakeError::Gone),
        }
    }

    #[inline(never)]
    fn drops(&self) -> QueueDrops {
        let shared = lock(&self.shared);
        let channel = shared.hosts[self.host].channels.get(self.queue as usize);
        let statistics = channel.and_then(Option::as_ref).map(|channel| channel.statistics);
        statistics.unwrap_or_default().into()
    }
}

impl Datagrams for SimNic {
    fn local(&self) -> SocketAddrV4 {
        self.host().sockets.address(Socket::Data)
    }

    /// Another host's, as [`mac_of`] has it.
    fn neighbour(&mut self, ip: Ipv4Addr) -> Option<[u8; 6]> {
        let shared = lock(&self.shared);
        let mut others = shared
            .hosts
            .iter()
            .enumerate()
            .filter(|(host, _)| *host != self.host);
        others.any(|(_, host)| host.config.ip == ip).then(|| mac_of(ip))
    }

    fn next_hop(&mut self, ip: Ipv4Addr) -> Result<[u8; 6], Box<dyn std::error::Error + Send + Sync>> {
        (self.neighbour(ip)).ok_or_else(|| format!("there is no host {ip} on the simulated wire").into())
    }

    /// A datagram that fits the MTU passes the receiving host's gate on queue 0, like any packet; a longer one, which would be
    /// fragmented, reaches the socket as if reassembled. A host that does not exist swallows it.
    fn send(&mut self, socket: Socket, to: SocketAddrV4, payload: &[u8]) -> io::Result<()> {
        let mut shared = lock(&self.shared);
        if payload.len() > usize::from(u16::MAX) - IPV4_LEN - UDP_LEN {
            return Err(io::Error::from_raw_os_error(libc::EMSGSIZE));
        }
        let from = shared.hosts[self.host].sockets.address(socket);
        if !shared.hosts.iter().any(|host| host.config.ip == *to.ip()) {
            return Ok(());
        }
        write_datagram(&mut shared.packet, from, to, payload);
        shared.counters.sent += 1;
        let via = match IPV4_LEN + UDP_LEN + payload.len() <= shared.config.mtu as usize {
            true => Via::Queue(0),
            false => Via::Reassembled,
        };
        shared.cross(self.host, via, Place::default());
        shared.run_written();
        Ok(())
    }

    fn recv(&mut self, socket: Socket, space: &mut [u8]) -> io::Result<Option<SocketEvent>> {
        let mut host = self.host();
        Ok(host.sockets.next_event(socket, space.len(), |payload| {
            space[..payload.len()].copy_from_slice(payload)
        }))
    }

    fn recv_into(
        &mut self,
        socket: Socket,
        umem: &Umem,
        addr: u64,
        len: u64,
    ) -> io::Result<Option<SocketEvent>> {
        umem.mapping().pointer(addr, len); // the range is checked even when there is nothing, as on the kernel's side
        let mut host = self.host();
        Ok(host
            .sockets
            .next_event(socket, len as usize, |payload| umem.copy_to(addr, payload)))
    }
}

impl Port for SimNic {
    type Rx = SimRxQueue;
    type Tx = SimTxQueue;

    /// What [`Wire::advance`](super::Wire::advance) said last.
    fn now_ns(&self) -> u64 {
        lock(&self.shared).now_ns
    }

    fn open(&mut self, spec: &QueueSpec) -> Result<(Option<SimRxQueue>, SimTxQueue), PortError> {
        self.open_queue(spec)
    }

    fn rebuild(
        &mut self,
        rx: &mut SimRxQueue,
        tx: &mut SimTxQueue,
        spec: &QueueSpec,
    ) -> Result<(), PortError> {
        if self.statistics(spec.queue).is_some() {
            self.close(spec.queue)?;
        }
        rx.close();
        tx.close();
        let (new_rx, new_tx) = self.open_queue(spec)?;
        let queue = spec.queue;
        (*rx, *tx) = (new_rx.ok_or(PortError::NoQueueOpen { queue })?, new_tx);
        rx.allow(rx.accepted());
        Ok(())
    }

    fn admit(&mut self, queue: u32, session: &SessionAdmission) -> Result<(), PortError> {
        self.host().gate.open_session(queue, session);
        Ok(())
    }

    fn revoke(&mut self, queue: u32, row: u32) -> Result<(), PortError> {
        self.host().gate.close_session(queue, row);
        Ok(())
    }

    /// A card with the worst of luck: whoever was led there before and is not among `elsewhere` meets the session's entry.
    fn steer(&mut self, wish: Steer<'_>) -> Result<Option<NonZeroU16>, PortError> {
        let is_zero_copy = self.is_zero_copy();
        let host = &mut *self.host();
        match wish {
            Steer::Landing {
                queue,
                from,
                elsewhere,
                ..
            } if is_zero_copy => {
                host.led = vec![(queue, *from.ip())];
                let others = elsewhere.iter().filter(|other| other.ip() != from.ip());
                host.away = others.map(|other| (queue, *other.ip())).collect();
            }
            Steer::Landing { .. } | Steer::General { .. } | Steer::Later { .. } => {}
            Steer::Nothing => host.away.append(&mut host.led),
        }
        Ok(None)
    }

    fn side(&mut self) -> &mut dyn Datagrams {
        self
    }

    fn passed_count(&self) -> u64 {
        self.host().sockets.passed()
    }

    fn verdicts(&self) -> Vec<(&'static str, u64)> {
        let counters = self.gate_counters();
        counters
            .iter()
            .map(|(verdict, count)| (verdict.name(), count))
            .collect()
    }

    /// Never blocks: virtual time passes, as much as a look takes where there is something to receive.
    fn wait(&mut self, timeout: Duration) -> io::Result<bool> {
        let passes = match self.has_arrivals() {
            true => LOOK.min(timeout),
            false => timeout,
        };
        let wire = Wire(Arc::clone(&self.shared));
        wire.advance(self.now_ns().saturating_add(passes.as_nanos() as u64));
        Ok(self.has_arrivals())
    }

    fn effective_mode(&self) -> EffectiveMode {
        EffectiveMode::Simulated
    }

    fn seed(&self) -> Option<u64> {
        Some(lock(&self.shared).config.seed << 8 | self.host as u64)
    }
}

const _: () = {
    const fn send<T: Send>() {}
    send::<SimNic>();
    send::<lm_dataplane::KernelNic>();
};
