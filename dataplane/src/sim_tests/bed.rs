//! The test bed: two engines on one simulated wire, under virtual time.

mod checks;
mod setup;

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
use lm_protocol::wire::lm::{Facts, LmHeader, Trailer, with_digests};
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

pub(crate) use setup::*;

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
