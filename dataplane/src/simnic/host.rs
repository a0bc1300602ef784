//! One host of the simulated wire: its end of each channel, its gate, its sockets, and the [`Nic`] that an engine drives.

use std::collections::VecDeque;
use std::io;
use std::net::{Ipv4Addr, SocketAddrV4};
use std::num::NonZeroU16;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use lm_ebpf::model::ModelGate;
use lm_ebpf::{Counters, Log, Role};
use lm_protocol::landing::SessionAdmission;
use lm_protocol::rss::HashInput;

use super::datagram::{ETHERNET_LEN, IPV4_LEN, UDP_LEN, write_datagram};
use super::driver::{Semantics, SimChannel};
use super::impair::{Place, Via};
use super::{Delivery, HostConfig, SOCKET_LEN, Shared, TX_BATCH, lock, mac_of};
use crate::memory::Umem;
use crate::nic::{Channel, ChannelConfig, Device, EffectiveMode, Nic, NicError};
use crate::ring::{self, Completion, Fill, Rx, Tx};
use crate::udp::{Port, UdpEvent};
use crate::xsk::{WakeError, XdpStatistics, XskError};

/// The state of a host.
#[derive(Debug)]
pub(super) struct Host {
    pub(super) config: HostConfig,
    pub(super) gate: ModelGate,
    pub(super) channels: Vec<Option<SimChannel>>,
    pub(super) control: VecDeque<(SocketAddrV4, Vec<u8>)>,
    pub(super) data: VecDeque<(SocketAddrV4, Vec<u8>)>,
    pub(super) control_refused: VecDeque<SocketAddrV4>,
    pub(super) data_refused: VecDeque<SocketAddrV4>,
    pub(super) passed: u64,
    /// Its interface is down.
    pub(super) is_down: bool,
    /// Packets sent from TX rings.
    pub(super) sent: u64,
    bounds: Vec<Option<Range<u64>>>,
    /// [`SimChannel::strayed`] of channels that are gone.
    strayed: u64,
    /// As [`Nic::land_in_copy_mode`].
    lands_in_copy_mode: bool,
    /// Zero-copy mode: queues and the senders that were led there.
    led: Vec<(u32, Ipv4Addr)>,
    /// Queues and the senders whose packets come to queue 0 instead. Everything else comes to the queue that it was sent to.
    away: Vec<(u32, Ipv4Addr)>,
}

impl Host {
    pub(super) fn new(config: HostConfig) -> Host {
        Host {
            gate: ModelGate::new(Some(config.ip), config.port, config.port + 1),
            channels: (0..config.queues).map(|_| None).collect(),
            control: VecDeque::with_capacity(SOCKET_LEN),
            data: VecDeque::with_capacity(SOCKET_LEN),
            control_refused: VecDeque::new(),
            lands_in_copy_mode: false,
            led: Vec::new(),
            away: Vec::new(),
            data_refused: VecDeque::new(),
            passed: 0,
            is_down: false,
            sent: 0,
            bounds: vec![None; config.queues as usize],
            strayed: 0,
            config,
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
}

impl SimNic {
    pub(super) fn new(shared: Arc<Mutex<Shared>>, host: usize) -> SimNic {
        SimNic { shared, host }
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
        let semantics = match config.role {
            Role::Landing if host.lands_in_copy_mode => Semantics::Copy,
            _ => host.shared.config.semantics[host.host.min(1)],
        };
        let bounds = host.bounds[queue as usize].clone();
        let rings = (sim_fill, sim_rx, sim_tx, sim_completion);
        let channel = SimChannel::new(rings, config.registered_len, semantics, bounds);
        host.channels[queue as usize] = Some(channel);
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
        let mut guard = self.host();
        let number = guard.host;
        let shared = &mut *guard.shared;
        let queue = channel.queue;
        if shared.racing[number]
            .as_ref()
            .is_some_and(|racing| racing.queue == queue)
        {
            shared.racing[number] = None;
            shared.counters.gate_lost += 1;
        }
        let host = &mut shared.hosts[number];
        match host.channels.get_mut(queue as usize) {
            Some(slot @ Some(_)) => {
                if let Some(channel) = slot.take() {
                    host.strayed += channel.strayed;
                }
            }
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
        if shared.hosts[self.host].is_down {
            return Err(WakeError::Down);
        }
        if shared.config.delivery == Delivery::Inline {
            shared.transmit(self.host, queue, TX_BATCH);
            shared.run_written();
        }
        Ok(())
    }

    fn wake_rx(&mut self, queue: u32) -> Result<(), WakeError> {
        let mut host = self.host();
        if host.is_down {
            return Err(WakeError::Down);
        }
        match host.channels.get_mut(queue as usize) {
            Some(Some(channel)) => {
                channel.wake();
                Ok(())
            }
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

    fn close_session(&mut self, queue: u32, place: u32) -> Result<(), NicError> {
        self.host().gate.close_session(queue, place);
        Ok(())
    }

    fn quiesce(&mut self, _: u32) -> Result<(), NicError> {
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

    /// A datagram that fits the MTU passes the receiving host's gate on queue 0, like any packet; a longer one, which would be
    /// fragmented, reaches the socket as if reassembled. A host that does not exist swallows it.
    fn udp_send(&mut self, port: Port, to: SocketAddrV4, payload: &[u8]) -> io::Result<()> {
        let mut shared = lock(&self.shared);
        if payload.len() > usize::from(u16::MAX) - IPV4_LEN - UDP_LEN {
            return Err(io::Error::from_raw_os_error(libc::EMSGSIZE));
        }
        let own = &shared.hosts[self.host].config;
        let own_port = own.port + u16::from(port == Port::Control);
        let from = SocketAddrV4::new(own.ip, own_port);
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

    /// A card with the worst of luck: whoever was led there before and is not among `elsewhere` meets the session's entry.
    fn lead(
        &mut self,
        queue: u32,
        _general: Option<u32>,
        from: SocketAddrV4,
        _hashed: HashInput,
        elsewhere: &[SocketAddrV4],
        _alone: bool,
    ) -> Result<Option<NonZeroU16>, NicError> {
        if self.device().is_some() {
            let host = &mut *self.host();
            host.led = vec![(queue, *from.ip())];
            let others = elsewhere.iter().filter(|other| other.ip() != from.ip());
            host.away = others.map(|other| (queue, *other.ip())).collect();
        }
        Ok(None)
    }

    fn unlead(&mut self) -> Result<(), NicError> {
        let host = &mut *self.host();
        host.away.append(&mut host.led);
        Ok(())
    }

    fn effective_mode(&self) -> EffectiveMode {
        EffectiveMode::Simulated
    }

    fn land_in_copy_mode(&mut self) {
        self.host().lands_in_copy_mode = true;
    }

    fn device(&self) -> Option<Device> {
        let host = self.host();
        match host.shared.config.semantics[host.host.min(1)] {
            Semantics::Copy => None,
            Semantics::ZeroCopy(device) => Some(Device {
                prefix_len: device.prefix_len as u8,
                kept_frames: device.kept_frames(),
                lap: device.lap,
            }),
        }
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
        let (from, payload) = socket.pop_front()?;
        if payload.len() > space_len {
            return Some(UdpEvent::TooLong(from));
        }
        take(&payload);
        Some(UdpEvent::Datagram {
            from,
            len: payload.len(),
        })
    }
}

const _: () = {
    const fn send<T: Send>() {}
    send::<SimNic>();
    send::<crate::kernel::KernelNic>();
};
