//! The test bed: two engines on one simulated wire, under virtual time.

use std::net::{Ipv4Addr, SocketAddrV4};
use std::time::Duration;

use lm_cards::chunk_len_for;
use lm_protocol::admission::ClusterKey;
use lm_protocol::geometry::{Layout, LinkShape, Wire as WireMode};
use lm_protocol::integrity::Integrity;
use lm_protocol::session::Permit;
use lm_protocol::window::WindowShape;
use lm_protocol::wire::Addressing;
use lm_protocol::wire::ethernet::MacAddr;
use lm_protocol::wire::lm::{LmHeader, Trailer, with_digests};
#[cfg(test)]
use lm_protocol::zone::ZONE_ALIGN;

#[cfg(test)]
use super::guard::Guard;
#[cfg(test)]
use super::trace::Trace;
use crate::bounds::{GENERAL_FRAMES, InFlight, LANDING_RING_LEN, OUTGOING_MAX, OnTheWay, TRANSMIT_FRAMES};
use crate::checksum::Checksum;
use crate::completion::{Completion, LoanError, Outcome, PeerId, SendError, SendToken};
use crate::config::{EndpointConfig, LinkConfig, MemoryConfig, ReceiveConfig};
use crate::connect::{ConnectError, ConnectOptions};
use crate::engine::{Engine, Fixed, Receives};
use crate::entropy::Entropy;
use crate::footprint::Footprint;
use crate::memory::{HugePages, Umem};
use crate::message::Message;
use crate::opening::{MemoryPlan, Parts, Queues};
use crate::over::MTU_IN_ONE_FRAME;
use crate::port::{Caps, ModeRequest, Port};
use crate::region::SendRegion;
use crate::region::TrySendError;
#[cfg(test)]
use crate::release::Released;
use crate::simnic::{self, HostConfig, Impairments, Semantics, SimNic, Wire, WireConfig, ZeroCopy};

pub(crate) const PORT: u16 = 7168;
pub(crate) const IPS: [Ipv4Addr; 2] = [ip(0), ip(1)];

pub(crate) const fn ip(host: usize) -> Ipv4Addr {
    Ipv4Addr::new(10, 9, 0, host as u8 + 1)
}

/// Virtual time between two rounds.
pub(crate) const ROUND_NS: u64 = 7_000;

#[derive(Clone, Debug)]
pub(crate) struct BedConfig {
    pub(crate) mtu: u16,
    pub(crate) window: u32,
    /// General and landing queue of each host; on a switch the second counts for all but the first.
    pub(crate) queues: [Queues; 2],
    pub(crate) landing_len: u64,
    pub(crate) send_len: u64,
    pub(crate) max_message_len: u64,
    pub(crate) ring_start: u32,
    pub(crate) tx_in_flight: u32,
    pub(crate) on_the_way: u32,
    /// As [`Caps::tx_bound`], with which all of them get all the credit that there is.
    pub(crate) tx_bound: u32,
    /// Whether each host has no more in the device and on the way than keep both busy; on a switch the second counts for all but the first.
    pub(crate) adapts: [bool; 2],
    pub(crate) patience: Duration,
    pub(crate) lease: Duration,
    /// Fill and RX ring of the landing channels.
    pub(crate) landing_ring_len: u32,
    /// Whether the bed watches over free landing memory and zones' margins. Not where somebody else does, or where nothing
    /// may be allocated.
    pub(crate) guarded: bool,
    /// What both hosts do for what they send.
    pub(crate) integrity: Integrity,
    pub(crate) checksum: Checksum,
    /// Whether IP fragments may land in zero-copy mode.
    pub(crate) exclusive: bool,
    /// What the device writes beside packets is found out before the first session.
    pub(crate) probing: bool,
    pub(crate) mode: ModeRequest,
    /// The cluster's key of each host, made of this byte; on a switch the second counts for all but the first.
    pub(crate) keys: [Option<u8>; 2],
    /// What the hosts' random numbers come from.
    pub(crate) seed: u64,
    pub(crate) wire: WireConfig,
}

pub(crate) const TWO_QUEUES: Queues = Queues {
    general: Some(0),
    landing: Some(1),
};

impl Default for BedConfig {
    fn default() -> BedConfig {
        BedConfig {
            mtu: 1500,
            window: 64,
            queues: [TWO_QUEUES; 2],
            landing_len: 2 << 20,
            send_len: 2 << 20,
            max_message_len: 8 << 20,
            ring_start: 0u32.wrapping_sub(100),
            tx_in_flight: 192,
            on_the_way: 192,
            tx_bound: 0,
            adapts: [false; 2],
            patience: Duration::from_secs(2),
            lease: Duration::from_secs(5),
            landing_ring_len: LANDING_RING_LEN,
            guarded: true,
            integrity: Integrity::Manifest,
            checksum: Checksum::None,
            exclusive: false,
            probing: false,
            mode: ModeRequest::ZeroCopy,
            keys: [None; 2],
            seed: 0,
            wire: WireConfig::default(),
        }
    }
}

pub(crate) struct Bed {
    pub(crate) wire: Wire,
    pub(crate) hosts: Vec<Engine<SimNic>>,
    pub(crate) now_ns: u64,
    pub(crate) window: WindowShape,
    #[cfg(test)]
    guards: Vec<Option<Guard>>,
    #[cfg(test)]
    pub(super) trace: Trace,
}

/// The incarnation of a host: bit 0 says that there are digests.
pub(crate) fn sender_id(host: usize, integrity: Integrity) -> u64 {
    with_digests(0x1000_0000_0000 * (host as u64 + 1), integrity.has_digests())
}

pub(crate) fn data_address(host: usize) -> SocketAddrV4 {
    SocketAddrV4::new(ip(host), PORT)
}

/// A device that takes entries by the batch, and whose packets have a prefix.
pub(crate) const BATCHED: ZeroCopy = ZeroCopy {
    batch: 16,
    ring_len: 64,
    burst: 64,
    prefix_len: 12,
    pad_to: 0,
    lap: 1,
};

/// A wire between devices of one kind.
pub(crate) fn wire_of(semantics: Semantics) -> WireConfig {
    WireConfig {
        semantics: [semantics; 2],
        ..WireConfig::default()
    }
}

/// Loss, repetition and overtaking of everything.
pub(crate) fn bad_link(seed: u64) -> Impairments {
    Impairments {
        seed,
        loss_ppm: 60_000,
        duplicate_ppm: 60_000,
        duplicate_delay_max_ns: 3_000_000,
        reorder_ppm: 60_000,
        reorder_packets_max: 5,
        reorder_hold_max_ns: 1_000_000,
        ..Impairments::default()
    }
}

/// What an application of the bed's asks for.
pub(crate) fn endpoint_config(config: &BedConfig) -> EndpointConfig {
    EndpointConfig {
        patience: config.patience,
        integrity: config.integrity,
        link: LinkConfig {
            mtu: Some(config.mtu),
            mode: config.mode,
            checksum: config.checksum,
            ..LinkConfig::default()
        },
        receive: ReceiveConfig {
            max_message_len: config.max_message_len,
            exclusive: config.exclusive,
        },
        memory: MemoryConfig {
            landing_len: config.landing_len,
            send_len: config.send_len,
            ..MemoryConfig::default()
        },
        ..EndpointConfig::default()
    }
}

fn layout_of(mtu: u16) -> Layout {
    Layout::new(WireMode::Lm, mtu, LinkShape::IPV4).expect("an MTU of at least 576")
}

/// The memory of a host with such a device.
pub(crate) fn plan(config: &BedConfig, caps: Caps) -> MemoryPlan {
    let chunk_len = chunk_len_for(None, config.mtu.into());
    MemoryPlan::new(&endpoint_config(config), &layout_of(config.mtu), chunk_len, caps).expect("a plan")
}

/// An engine on any port.
pub(crate) fn engine_on<P: Port>(
    config: &BedConfig,
    host: usize,
    mut port: P,
    umem: Umem,
    plan: &MemoryPlan,
) -> Engine<P> {
    let queues = config.queues[host.min(1)];
    let mut endpoint = endpoint_config(config);
    endpoint.admission.key =
        config.keys[host.min(1)].map(|byte| ClusterKey::new(&[byte; 32]).expect("long enough"));
    if queues.landing.is_none() {
        endpoint.memory.landing_len = 0;
    }
    let tx_in_flight = InFlight {
        most: plan.in_flight(config.tx_in_flight),
        adapts: config.adapts[host.min(1)],
    };
    let parts =
        Parts::open(&mut port, plan, queues, config.landing_ring_len, tx_in_flight).expect("channels");
    let fixed = Fixed {
        local: port.side().local(),
        sender_id: sender_id(host, config.integrity),
        mac: MacAddr(simnic::mac_of(ip(host))),
        link: LinkShape::IPV4,
        mtu: config.mtu,
        layout: layout_of(config.mtu.min(MTU_IN_ONE_FRAME)),
        chunk_len: plan.chunk_len,
        caps: Caps {
            tx_bound: config.tx_bound,
            tx_steers: true,
            ..plan.caps
        },
        datagram: plan.datagram,
        integrity: config.integrity,
        checksum: plan.checksum,
        patience_ns: config.patience.as_nanos() as u64,
        device_moves: plan.device_moves,
        kept_frames: plan.caps.kept_frames,
        tx_in_flight,
        transmit_registered_len: plan.landing_arena,
        receives: Receives {
            tx_queue: (queues.landing).map(|queue| queue as u16),
            on_the_way: OnTheWay {
                held: config.on_the_way,
                most: config.on_the_way.saturating_mul(2),
            },
            adapts: config.adapts[host.min(1)],
            ring_len: config.landing_ring_len,
            max_message_len: endpoint.receive.max_message_len,
            landing_len: endpoint.memory.landing_len,
            exclusive: endpoint.receive.exclusive,
            may_copy: endpoint.link.mode == ModeRequest::Auto,
        },
    };
    let permit = Permit {
        max_message_len: config.max_message_len,
        lease: config.lease,
    };
    let entropy = Entropy::Seeded(config.seed << 8 | host as u64);
    let mut engine = parts.into_engine(
        port,
        &endpoint,
        fixed,
        umem,
        plan,
        Box::new(permit),
        None,
        entropy,
    );
    // So it calls itself towards its peer; others know it by other numbers.
    let peer = data_address(usize::from(host == 0));
    engine.fixed.sender_id = engine.fixed.sender_id.wrapping_sub(engine.peers.alias(peer));
    if config.probing {
        let landing = engine.landing.as_mut().expect("a landing queue");
        landing.footprint = Footprint::unknown("sim0", plan.chunk_len, plan.caps.kept_frames);
    }
    engine
}

impl Bed {
    pub(crate) fn new(config: &BedConfig) -> Bed {
        Bed::switch(config, 2)
    }

    /// So many hosts on a switch.
    pub(crate) fn switch(config: &BedConfig, count: usize) -> Bed {
        let wire_config = WireConfig {
            mtu: u32::from(config.mtu),
            ..config.wire
        };
        // What the hosts' devices write, each has to know before it has a NIC.
        let devices = Wire::new(wire_config);
        let plans = [0, 1].map(|host| plan(config, devices.device(host).caps));
        let umem = |host: usize| Umem::new(plans[host.min(1)].total_len(), HugePages::Off).expect("memory");
        let umems: Vec<Umem> = (0..count).map(umem).collect();
        let hosts = umems.iter().enumerate().map(|(host, umem)| HostConfig {
            ip: ip(host),
            port: PORT,
            queues: 4,
            mapping: umem.mapping().clone(),
            chunk_len: plans[0].chunk_len,
            multi_buffer: plans[0].is_multi_buffer(),
            tx_metadata_len: plans[0].checksum.room().into(),
            ring_start: config.ring_start,
        });
        let (wire, nics) = simnic::switch(wire_config, hosts.collect());
        let hosts = nics.into_iter().zip(umems).enumerate();
        let engine = |(host, (nic, umem)): (usize, (SimNic, Umem))| {
            engine_on(config, host, nic, umem, &plans[host.min(1)])
        };
        let hosts = hosts.map(engine).collect();
        let mut bed = Bed {
            #[cfg(test)]
            trace: Trace::new(&wire, count),
            wire,
            hosts,
            now_ns: 1_000_000_000,
            window: WindowShape::new(config.window).expect("a power of two"),
            #[cfg(test)]
            guards: (0..count).map(|_| None).collect(),
        };
        #[cfg(test)]
        if config.guarded {
            bed.guard();
        }
        bed.round();
        bed
    }

    /// Paints the landing memory and says where packets may be written. What was written elsewhere is found at the latest when
    /// the bed goes, so that no test can forget to look.
    #[cfg(test)]
    fn guard(&mut self) {
        for (host, engine) in self.hosts.iter_mut().enumerate() {
            if engine.landing.is_some() {
                self.guards[host] = Some(Guard::new(engine));
            }
        }
    }

    /// Looks at the guard bytes of all free landing memory.
    #[cfg(test)]
    pub(crate) fn check_guards(&mut self) {
        for (host, (guard, engine)) in self.guards.iter_mut().zip(&mut self.hosts).enumerate() {
            if let Some(guard) = guard {
                let checked = guard.check_free(engine);
                checked.unwrap_or_else(|error| panic!("host {host}: {error}"));
            }
        }
    }

    /// Paints what was given back since the last round.
    #[cfg(test)]
    fn look_after(&mut self) {
        for (guard, engine) in self.guards.iter_mut().zip(&mut self.hosts) {
            if let Some(guard) = guard {
                guard.look(engine);
            }
        }
    }

    #[cfg(not(test))]
    fn look_after(&mut self) {}

    /// Looks at the margins around a message in a landing zone.
    #[cfg(test)]
    fn check_margins(&mut self, host: usize, message: &Message) {
        let engine = &mut self.hosts[host];
        // Of other wires and layouts the test knows more.
        let layout = Layout::new(WireMode::Lm, engine.fixed.mtu, engine.fixed.link).ok();
        let layout = layout.filter(|layout| {
            (engine.landing.as_ref())
                .and_then(|landing| landing.sessions.iter().next())
                .is_some_and(|inbound| inbound.terms.layout == *layout)
        });
        let (Some(guard), Some(Released::Zone { start, len }), Some(layout)) =
            (&mut self.guards[host], &message.released, layout)
        else {
            return;
        };
        let Ok(geometry) = layout.session_message(message.len() as u64) else {
            return;
        };
        let payload_len = geometry.rx_zone_payload_len().next_multiple_of(ZONE_ALIGN);
        // In zero-copy mode packets that nobody sent may be longer than a fragment: to the chunk's end (I2).
        let (before, behind) = match engine.fixed.caps.witness {
            true => (0, 0),
            false => (
                u64::from(engine.fixed.caps.prefix_len),
                u64::from(engine.fixed.chunk_len),
            ),
        };
        let written = message.umem_offset() - u64::from(layout.header_len()) - before
            ..message.umem_offset() + payload_len + behind;
        let checked = guard.check_margins(engine, (*start, *len), written);
        checked.unwrap_or_else(|error| panic!("host {host}: {error}"));
    }

    #[cfg(not(test))]
    fn check_margins(&mut self, _host: usize, _message: &Message) {}

    /// One round of one engine, without time passing; how much it did.
    pub(crate) fn poll(&mut self, host: usize) -> usize {
        let work = self.hosts[host].poll(self.now_ns);
        #[cfg(test)]
        self.trace.look(host, &mut self.hosts[host], self.now_ns);
        work
    }

    /// What became of a request for a session.
    pub(crate) fn application_outcome(&mut self, host: usize, peer: u16) -> Option<Result<(), ConnectError>> {
        let outcome = self.hosts[host].application_outcome(peer, self.now_ns)?;
        #[cfg(test)]
        self.trace.connected(host, &outcome, self.now_ns);
        Some(outcome)
    }

    /// One round of both engines; how much they did.
    pub(crate) fn round(&mut self) -> usize {
        self.now_ns += ROUND_NS;
        self.wire.advance(self.now_ns);
        let work = (0..self.hosts.len()).map(|host| self.poll(host)).sum();
        self.look_after();
        work
    }

    pub(crate) fn rounds(&mut self, count: u32) {
        for _ in 0..count {
            self.round();
        }
    }

    /// Lets virtual time pass while both engines run.
    pub(crate) fn pass(&mut self, time: Duration) {
        let end = self.now_ns + time.as_nanos() as u64;
        while self.now_ns < end {
            self.now_ns += 300_000;
            self.round();
        }
    }

    /// Runs one host alone.
    pub(crate) fn alone(&mut self, host: usize, count: u32) {
        for _ in 0..count {
            self.now_ns += ROUND_NS;
            self.wire.advance(self.now_ns);
            self.poll(host);
        }
    }

    /// `host` learns where the other one is; on a switch, all others where the first one is.
    pub(crate) fn resolve(&mut self, host: usize) -> PeerId {
        let engine = &mut self.hosts[host];
        let to = data_address(usize::from(host == 0));
        let addressing = engine.addressing_to(to, simnic::mac_of(*to.ip()));
        let index = engine
            .peers
            .find_or_add(to, &addressing, self.now_ns)
            .expect("room for a peer");
        engine.peers.id_of(index)
    }

    /// `host` asks a peer for a session, with windows of this bed's.
    pub(crate) fn ask(&mut self, host: usize, peer: PeerId, options: &ConnectOptions) {
        let options = ConnectOptions {
            window: self.window,
            ..*options
        };
        self.hosts[host].apply(peer.index, &options, self.now_ns);
    }

    /// `host` asks the other one for a session, as [`crate::PeerHandle::open_session`] does.
    pub(crate) fn connect(&mut self, host: usize, options: &ConnectOptions) -> Result<PeerId, ConnectError> {
        let peer = self.resolve(host);
        let now_ns = self.now_ns;
        self.hosts[host].end_session(peer.index, now_ns);
        self.ask(host, peer, options);
        loop {
            // A host that polls looks at its control port within half a millisecond. Longer steps when none of what is quick is awaited.
            if self.now_ns - now_ns > 30_000_000 {
                self.now_ns += 200_000;
            }
            self.round();
            if let Some(outcome) = self.application_outcome(host, peer.index) {
                return outcome.map(|()| peer);
            }
        }
    }

    /// A session with everything at its default, for messages up to `len` bytes.
    pub(crate) fn session(&mut self, host: usize, wire: WireMode, len: u64) -> PeerId {
        let options = ConnectOptions {
            wire,
            max_message_len: len,
            ..ConnectOptions::default()
        };
        self.connect(host, &options).expect("a session")
    }

    /// The key of a host's session with a peer.
    pub(crate) fn key(&mut self, host: usize, peer: PeerId) -> u64 {
        let outbound = self.hosts[host].peers.at(peer.index).outbound.as_ref();
        outbound.expect("a session").terms.key
    }

    /// Loans, fills and submits, as far as there is room now.
    pub(crate) fn try_send(
        &mut self,
        host: usize,
        peer: PeerId,
        payload: &[u8],
        tag: u64,
    ) -> Result<SendToken, SendError> {
        let mut region = self.hosts[host].loan(peer, payload.len() as u64)?;
        fill(&mut region, payload);
        let now_ns = self.now_ns;
        self.hosts[host]
            .submit(region, tag, now_ns)
            .map_err(|TrySendError { reason, .. }| reason)
    }

    /// Sends, running both engines while there is back-pressure.
    pub(crate) fn send(&mut self, host: usize, peer: PeerId, payload: &[u8], tag: u64) -> SendToken {
        for _ in 0..100_000 {
            match self.try_send(host, peer, payload, tag) {
                Ok(token) => return token,
                Err(SendError::WouldBlock) => self.round(),
                Err(error) => panic!("not sent: {error}"),
            };
        }
        panic!("back-pressure for ever");
    }

    /// Runs both engines until `host` has a message.
    pub(crate) fn recv(&mut self, host: usize) -> Message {
        for _ in 0..100_000 {
            if let Some(message) = self.hosts[host].take_message().expect("no failure") {
                self.check_margins(host, &message);
                return message;
            }
            self.round();
        }
        panic!("no message");
    }

    /// Runs both engines until `host` has a completion.
    pub(crate) fn completion(&mut self, host: usize) -> Completion {
        for _ in 0..100_000 {
            if let Some(completion) = self.hosts[host].told.completions().pop_front() {
                return completion;
            }
            self.now_ns += 100_000;
            self.round();
        }
        panic!("no completion");
    }

    /// Sends a message and sees it arrive and be confirmed.
    pub(crate) fn exchange(&mut self, from: usize, peer: PeerId, payload: &[u8]) {
        let tag = payload.len() as u64 ^ 0x7a67;
        let token = self.send(from, peer, payload, tag);
        let message = self.recv(1 - from);
        assert!(message[..] == *payload, "{} bytes differ", payload.len());
        assert_eq!(message.tag(), tag);
        drop(message);
        let completion = self.completion(from);
        assert_eq!(
            (completion.token, &completion.outcome),
            (token, &Outcome::Delivered)
        );
    }

    /// Everything was given back, and nothing is under way. Sessions may be open.
    pub(crate) fn check_memory(&mut self) {
        self.pass(Duration::from_millis(30));
        for host in 0..self.hosts.len() {
            self.check_memory_of(host);
        }
    }

    /// The same of one host, whose last rounds were long enough ago for it to have taken everything back.
    pub(crate) fn check_memory_of(&mut self, host: usize) {
        let engine = &mut self.hosts[host];
        let (free, held) = engine.small.frames();
        assert_eq!(free, GENERAL_FRAMES, "general frames of host {host}");
        assert_eq!(held, 0, "host {host}");
        assert_eq!(
            engine.sending.parts().1.available(),
            TRANSMIT_FRAMES as usize,
            "transmit frames of host {host}"
        );
        assert_eq!(engine.sending.arena().live(), 0, "send regions of host {host}");
        assert!(engine.sending.arena().is_whole(), "send arena of host {host}");
        #[cfg(test)]
        assert_eq!(
            engine.sending.outgoing.available(),
            OUTGOING_MAX,
            "outgoing messages of host {host}"
        );
        for transmit in engine.sending.scheduler().queues() {
            assert_eq!(transmit.in_flight(), 0, "queue {} of host {host}", transmit.queue);
        }
        if let Some(landing) = &engine.landing {
            assert_eq!(landing.arena.live(), 0, "landing zones of host {host}");
            assert!(landing.arena.is_whole(), "landing arena of host {host}");
            assert!(
                landing
                    .placing
                    .as_ref()
                    .is_none_or(|placing| placing.placed() == 0)
            );
            let unused = landing.sessions.entries.outstanding();
            // Spare frames that fill a lap up are left, or that the device keeps back.
            let caps = &engine.fixed.caps;
            assert!(
                unused < caps.lap || caps.held > 0,
                "{unused} entries of host {host}"
            );
            assert!(landing.sessions.entries.are_used(), "entries of host {host}");
        }
        assert!(engine.told.messages().count() == 0 && engine.told.completions().is_empty());
    }

    /// Nothing was dropped, and no invariant violated.
    pub(crate) fn check_clean(&self) {
        for (host, engine) in self.hosts.iter().enumerate() {
            for (name, count) in engine.counters.drops() {
                assert_eq!(count, 0, "{name} of host {host}");
            }
            let counters = &engine.counters;
            assert_eq!(counters.messages_failed, 0, "host {host}");
            assert_eq!(counters.messages_incomplete, 0, "host {host}");
            assert_eq!(counters.frames_exhausted, 0, "host {host}");
            assert_eq!(counters.control_send_errors, 0, "host {host}");
            assert_eq!(counters.landing_lost, 0, "host {host}");
            for transmit in engine.sending.scheduler().queues() {
                let statistics = engine.port.statistics(transmit.queue).expect("an open channel");
                assert_eq!(
                    (
                        statistics.rx_dropped,
                        statistics.rx_ring_full,
                        statistics.tx_invalid_descriptors
                    ),
                    (0, 0, 0),
                    "queue {} of host {host}",
                    transmit.queue
                );
            }
        }
        let counters = self.wire.counters();
        assert_eq!(
            (counters.too_long, counters.stack_ignored, counters.socket_full),
            (0, 0, 0)
        );
    }
}

#[cfg(test)]
impl Drop for Bed {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            self.check_guards();
            self.trace.finish();
        }
    }
}

/// A whole LM packet with this header and payload, and the trailer that belongs to it.
pub(crate) fn lm_packet(addressing: &Addressing, header: &LmHeader, payload: &[u8]) -> Vec<u8> {
    let mut packet = vec![0; addressing.header_len()];
    addressing
        .write_headers(&mut packet, header, payload.len())
        .expect("room for the headers");
    packet.extend_from_slice(payload);
    let from = SocketAddrV4::new(addressing.src_ip, addressing.src_port);
    packet.extend_from_slice(Trailer::new(header, payload, from).as_bytes());
    packet
}

/// Writes a message into a region, range by range.
pub(crate) fn fill(region: &mut SendRegion, payload: &[u8]) {
    let mut rest = payload;
    for range in region.payloads_mut() {
        let (now, later) = rest.split_at(range.len());
        range.copy_from_slice(now);
        rest = later;
    }
    assert!(rest.is_empty());
}

/// Bytes that no two places share by accident (splitmix64).
pub(crate) fn noise(seed: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len.next_multiple_of(8)];
    let mut state = seed;
    for eight in bytes.chunks_exact_mut(8) {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = state;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        eight.copy_from_slice(&(z ^ (z >> 31)).to_le_bytes());
    }
    bytes.truncate(len);
    bytes
}

/// Whether a loan failed for want of memory, which is no failure.
pub(crate) fn is_back_pressure(error: &LoanError) -> bool {
    *error == LoanError::WouldBlock
}
