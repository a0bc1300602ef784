//! Floods: tens of thousands of packets of each kind of bad input, in the middle of an honest transfer.
//!
//! Each flood comes once from the honest peer's address, whoever sends it knowing the session's key and numbers, and once from
//! a stranger. Checked is that the transfer goes on byte-exact, that each packet moves its one counter, that one line is
//! logged, and that memory, answers and work stay in proportion.
#![cfg(test)]

mod kinds;

use std::net::{Ipv4Addr, SocketAddrV4};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use lm_protocol::control::{ControlMessage, Ended, MAX_CONTROL_LEN};
use lm_protocol::geometry::Wire as WireMode;
use lm_protocol::wire::Addressing;
use lm_protocol::wire::ethernet::MacAddr;
use lm_protocol::wire::lm::{HEADER_LEN, LmHeader};

use super::allocations::growth;
use super::bed::{Bed, BedConfig, IPS, PORT, lm_packet, noise};
use super::times;

use crate::bounds::{PEERS_MAX, RECEIVE_BURST};
use crate::completion::{Outcome, PeerId, RecvError, SendError};
use crate::simnic;
pub(crate) use kinds::grant;
pub(super) use kinds::request;
use kinds::{FLOODS, Flood, announced, eager};

/// So many a round: half of what the engine takes from a socket in one, so that none is lost before it was looked at.
const PER_ROUND: u64 = 32;
/// Length of each honest message, in bytes.
const LEN: usize = 40_000;
/// The honest transfer and the simulated link need memory too; a packet of the flood must need none.
const GROWTH_MAX: i64 = 1 << 20;

/// Rounds in which everything that waits in sockets is looked at, at the most,
const QUIET_ROUNDS: u32 = 5000;
/// and in which nothing more may be counted afterwards.
const SILENT_ROUNDS: u32 = 200;

const STRANGER: Ipv4Addr = Ipv4Addr::new(10, 9, 0, 77);

/// Packets of each kind.
fn packets() -> u64 {
    times(20_000, 100_000)
}

/// A host with a session, and who knows everything about it.
struct Scene {
    bed: Bed,
    peer: PeerId,
    key: u64,
    /// Tag of the next honest message, and of the next that must come.
    sent: u64,
    received: u64,
    confirmed: u64,
}

impl Scene {
    /// Both hosts have this cluster's key, or admit whoever receives where it sends from.
    fn new(key: Option<u8>) -> Scene {
        let mut bed = Bed::new(&BedConfig {
            keys: [key; 2],
            ..BedConfig::default()
        });
        let peer = bed.session(0, WireMode::Lm, LEN as u64);
        let key = inbound_key(&bed).expect("a session");
        let mut scene = Scene {
            bed,
            peer,
            key,
            sent: 0,
            received: 0,
            confirmed: 0,
        };
        for _ in 0..100 {
            scene.go_on().expect("nothing is wrong yet");
        }
        assert!(scene.confirmed > 0);
        scene
    }

    /// A round of the honest transfer.
    fn go_on(&mut self) -> Result<usize, Outcome> {
        if self.sent < self.received + 2 {
            match self.bed.try_send(0, self.peer, &noise(self.sent, LEN), self.sent) {
                Ok(_) => self.sent += 1,
                Err(SendError::WouldBlock) => {}
                Err(error) => panic!("an honest message is refused: {error}"),
            }
        }
        let work = self.bed.round();
        loop {
            match self.bed.hosts[1].take_message() {
                // Forged messages of one fragment are messages; whoever sends them can.
                Ok(Some(message)) if message.len() == LEN => {
                    assert_eq!(message.tag(), self.received);
                    assert!(message[..] == noise(self.received, LEN)[..], "a byte differs");
                    self.received += 1;
                }
                Ok(Some(_)) => {}
                Ok(None) => break,
                Err(RecvError::Incomplete { .. }) => {}
                Err(error) => panic!("{error}"),
            }
        }
        while let Some(completion) = self.bed.hosts[0].told.completions().pop_front() {
            match completion.outcome {
                Outcome::Delivered => self.confirmed += 1,
                outcome => return Err(outcome),
            }
        }
        Ok(work)
    }
}

fn inbound_key(bed: &Bed) -> Option<u64> {
    Some(bed.hosts[1].landing.as_ref()?.sessions.iter().next()?.terms.key)
}

/// A packet to `to`'s port, from its peer's or a stranger's.
fn packet(to: usize, from: SocketAddrV4, port: u16, header: &LmHeader, payload: &[u8]) -> Vec<u8> {
    let addressing = Addressing {
        src_mac: MacAddr(simnic::mac_of(*from.ip())),
        dst_mac: MacAddr(simnic::mac_of(IPS[to])),
        vlan: None,
        src_ip: *from.ip(),
        dst_ip: IPS[to],
        src_port: from.port(),
        dst_port: port,
    };
    lm_packet(&addressing, header, payload)
}

/// A control message; it comes from a control port.
fn control(to: usize, from: SocketAddrV4, request_id: u32, message: &ControlMessage) -> Vec<u8> {
    let mut datagram = [0u8; MAX_CONTROL_LEN];
    let len = message.encode(request_id, &mut datagram);
    let (header, _) = LmHeader::decode(&datagram[..len]).expect("just encoded");
    let from = SocketAddrV4::new(*from.ip(), from.port() + 1);
    packet(to, from, PORT + 1, &header, &datagram[HEADER_LEN..len])
}

/// Counts the lines that would be logged.
pub(super) struct Lines(pub(super) Arc<AtomicU64>);

impl tracing::Subscriber for Lines {
    fn enabled(&self, metadata: &tracing::Metadata<'_>) -> bool {
        metadata.is_event()
    }
    fn new_span(&self, _: &tracing::span::Attributes<'_>) -> tracing::span::Id {
        tracing::span::Id::from_u64(1)
    }
    fn record(&self, _: &tracing::span::Id, _: &tracing::span::Record<'_>) {}
    fn record_follows_from(&self, _: &tracing::span::Id, _: &tracing::span::Id) {}
    fn event(&self, event: &tracing::Event<'_>) {
        assert_eq!(*event.metadata().level(), tracing::Level::WARN);
        // Relaxed: one thread.
        self.0.fetch_add(1, Ordering::Relaxed);
    }
    fn enter(&self, _: &tracing::span::Id) {}
    fn exit(&self, _: &tracing::span::Id) {}
}

fn counts(scene: &Scene, host: usize) -> Vec<(&'static str, u64)> {
    let counters = &scene.bed.hosts[host].counters;
    counters
        .drops()
        .chain([("challenged", counters.challenged)])
        .collect()
}

/// How far a counter went.
fn moved(scene: &Scene, what: &Flood, counter: &str, before: &[(&'static str, u64)]) -> u64 {
    let of = |counts: &[(&str, u64)]| {
        let found = counts.iter().find(|(name, _)| *name == counter);
        found.expect("a counter").1
    };
    of(&counts(scene, what.to)) - of(before)
}

fn flood(what: &Flood, honest: bool, key: Option<u8>) {
    let name = what.name;
    let mut scene = Scene::new(key);
    let from = match honest {
        true => SocketAddrV4::new(IPS[1 - what.to], PORT),
        false => SocketAddrV4::new(STRANGER, PORT),
    };
    let before = counts(&scene, what.to);
    let expected = match (what.make)(&scene, what.to, from, 0)[36..38] {
        // What is not sealed is not even read.
        [high, low] if key.is_some() && u16::from_be_bytes([high, low]) == PORT + 1 => "unexpected",
        _ => what.counters[usize::from(!honest)],
    };
    let messages = scene.received;
    let (wire_sent, lines) = (scene.bed.wire.sent(what.to), Arc::new(AtomicU64::new(0)));
    let socket_full = scene.bed.wire.counters().socket_full;
    // A sender looks at its sockets now and then only; what finds them full is the kernel's to count.
    let looked_at = |scene: &Scene| match what.to {
        0 => packets() - (scene.bed.wire.counters().socket_full - socket_full),
        _ => packets(),
    };
    let (mut work, mut rounds) = (0, 0);
    let grown = growth(|| {
        tracing::subscriber::with_default(Lines(lines.clone()), || {
            for n in 0..packets() {
                let bytes = (what.make)(&scene, what.to, from, n);
                scene.bed.wire.inject(what.to, 0, &bytes);
                if n % PER_ROUND == PER_ROUND - 1 {
                    rounds += 1;
                    work += scene.go_on().expect("the honest transfer goes on");
                }
            }
            let mut quiet = 0;
            while quiet < QUIET_ROUNDS && moved(&scene, what, expected, &before) < looked_at(&scene) {
                quiet += 1;
                scene.go_on().expect("the honest transfer goes on");
            }
            for _ in 0..SILENT_ROUNDS {
                scene.go_on().expect("the honest transfer goes on");
            }
        });
    });
    let looked_at = looked_at(&scene);
    assert!(looked_at > 1000, "{name}: {looked_at} were looked at");
    for ((counter, before), (_, after)) in before.into_iter().zip(counts(&scene, what.to)) {
        let moved = if counter == expected { looked_at } else { 0 };
        assert_eq!(after - before, moved, "{name}: {counter}, honest {honest}");
    }
    // What comes out of turn or late is what losses bring, too: nothing is said about it.
    let said =
        u64::from(!["eager_out_of_order", "announcement_early", "late", "challenged"].contains(&expected));
    let lines_of = |host: usize| scene.bed.hosts[host].notices.lines;
    assert_eq!(lines_of(what.to), said, "{name}: lines");
    // The honest peer may wonder about answers that it did not ask for.
    assert!(lines_of(1 - what.to) <= 1);
    assert_eq!(lines.load(Ordering::Relaxed), lines_of(0) + lines_of(1));
    assert!(grown < GROWTH_MAX, "{name}: memory grew by {grown} bytes");
    // The transfer went on all the while, and nothing is answered more than once.
    let transferred = scene.received - messages;
    assert!(
        transferred > rounds / 10,
        "{name}: {transferred} messages in {rounds} rounds"
    );
    let answers = scene.bed.wire.sent(what.to) - wire_sent;
    let own = match what.to {
        0 => transferred * (LEN as u64 / 1448 + 6) + 2000,
        _ => transferred * 4 + 2000,
    };
    let bound = match expected {
        // A stranger deserves a challenge, a request a refusal, and an end its confirmation.
        "challenged" | "request_refused" | "wrong_key" => packets() + own,
        _ => rounds + own,
    };
    assert!(
        answers < bound,
        "{name}: {answers} packets sent, {transferred} messages"
    );
    // Each packet is one piece of work, beside those of the transfer.
    let of_transfer = (transferred + 4) * 4 * (LEN as u64 / 1448 + 8);
    assert!(
        (work as u64) < 2 * packets() + of_transfer + 4 * rounds,
        "{name}: {work} pieces of work"
    );
    assert!(scene.bed.hosts[what.to].peers.len() <= PEERS_MAX);
    // And the session is as good as before.
    let confirmed = scene.confirmed;
    for _ in 0..100 {
        scene.go_on().expect("the honest transfer goes on");
    }
    assert!(scene.confirmed > confirmed, "{name}");
}

#[test]
fn floods_from_the_peer_itself() {
    FLOODS.iter().for_each(|what| flood(what, true, None));
}

#[test]
fn floods_from_a_stranger() {
    FLOODS.iter().for_each(|what| flood(what, false, None));
}

#[test]
fn floods_where_the_clusters_key_is_needed() {
    for honest in [true, false] {
        FLOODS.iter().for_each(|what| flood(what, honest, Some(1)));
    }
}

/// Strangers without number: none of them becomes a peer, and nothing that they say is taken.
#[test]
fn floods_from_everywhere() {
    let mut scene = Scene::new(None);
    let lines = Arc::new(AtomicU64::new(0));
    let before = scene.bed.hosts[1].counters;
    let peers = scene.bed.hosts[1].peers.len();
    let grown = growth(|| {
        tracing::subscriber::with_default(Lines(lines.clone()), || {
            for n in 0..packets() {
                let from = SocketAddrV4::new(Ipv4Addr::from_bits(0x0b00_0000 + n as u32), 1000);
                let bytes = match n % 2 {
                    0 => eager(1, from, n | 1, 0, true, None),
                    _ => control(1, from, n as u32, &request(n, from)),
                };
                scene.bed.wire.inject(1, 0, &bytes);
                if n % PER_ROUND == PER_ROUND - 1 {
                    scene.go_on().expect("the honest transfer goes on");
                }
            }
            for _ in 0..QUIET_ROUNDS {
                scene.go_on().expect("the honest transfer goes on");
            }
        });
    });
    let host = &scene.bed.hosts[1];
    assert_eq!(host.peers.len(), peers);
    assert!(grown < GROWTH_MAX, "memory grew by {grown} bytes");
    assert_eq!(host.counters.challenged - before.challenged, packets());
    assert_eq!(host.counters.messages_received, scene.received);
    // Whoever is new is no fault.
    assert_eq!(lines.load(Ordering::Relaxed), 0);
    assert_eq!(inbound_key(&scene.bed), Some(scene.key));
}

/// The peer itself says that the session is over, although it is not: a clear end, nothing else.
#[test]
fn a_peer_that_ends_the_session_early_is_believed_once() {
    let mut scene = Scene::new(None);
    let from = SocketAddrV4::new(IPS[1], PORT);
    let ended = ControlMessage::Ended(Ended {
        session_key: scene.key,
        delivered: 1 << 20,
        heard: None,
    });
    let before = scene.bed.hosts[0].counters.drops;
    let mut end = None;
    for n in 0..packets() {
        let bytes = control(0, from, n as u32, &ended);
        scene.bed.wire.inject(0, 0, &bytes);
        if n % PER_ROUND == PER_ROUND - 1 {
            scene.bed.round();
            while let Some(completion) = scene.bed.hosts[0].told.completions().pop_front() {
                end = Some(completion.outcome);
            }
        }
    }
    scene.bed.rounds(QUIET_ROUNDS);
    let refused = scene.bed.try_send(0, scene.peer, &noise(1, LEN), 1);
    assert!(
        matches!(refused, Err(SendError::Loan(_) | SendError::NoSession)),
        "{refused:?}"
    );
    assert!(
        matches!(end, Some(Outcome::SessionEnded | Outcome::Delivered)),
        "{end:?}"
    );
    let drops = scene.bed.hosts[0].counters.drops;
    assert_eq!(drops.implausible - before.implausible, 1);
    let socket_full = scene.bed.wire.counters().socket_full;
    assert_eq!(drops.late - before.late, packets() - 1 - socket_full);
}

/// Fragments that the gate cannot tell from real ones, because their sender knows the key and forges the count: the session is
/// given up and reported, nothing else suffers, and the next one is as good as any.
#[test]
fn forged_fragment_counts_end_the_session_clearly() {
    let mut scene = Scene::new(None);
    let from = SocketAddrV4::new(IPS[0], PORT);
    let before = scene.bed.hosts[1].counters;
    let mut end = None;
    let grown = growth(|| {
        for n in 0..packets() {
            let message = scene.bed.hosts[1]
                .landing
                .as_ref()
                .and_then(|side| side.sessions.iter().next());
            let header = LmHeader::Data {
                session_key: scene.key,
                message: message.map_or(announced(&scene), |inbound| inbound.order.unsettled_from()),
                // Of 28 fragments.
                index: 28 + (n % 5000) as u32,
                count: 6000,
            };
            let bytes = packet(1, from, PORT, &header, &[0x5a; 1448]);
            scene.bed.wire.inject(1, 1, &bytes);
            if n % PER_ROUND == PER_ROUND - 1 {
                match end {
                    None => end = scene.go_on().err(),
                    Some(_) => drop(scene.bed.round()),
                }
            }
        }
        scene.bed.rounds(QUIET_ROUNDS);
    });
    assert_eq!(end, Some(Outcome::SessionEnded));
    let counters = scene.bed.hosts[1].counters;
    assert_eq!(counters.violations.total() - before.violations.total(), 1);
    assert!(counters.messages_incomplete > before.messages_incomplete);
    // The channel is built anew, once: the simulated kernel's rings are new memory before the old ones go.
    assert!(grown < 8 * GROWTH_MAX, "memory grew by {grown} bytes");
    // The rest came for a session that is no more.
    let (late, socket_full) = (
        counters.drops.late - before.drops.late,
        scene.bed.wire.counters().socket_full,
    );
    assert!(
        late > 1000 && late + socket_full > 9 * packets() / 10,
        "{late}, {socket_full}"
    );
    assert!(scene.bed.hosts[1].notices.lines <= 2);
    let Scene { mut bed, .. } = scene;
    while bed.hosts[1]
        .take_message()
        .map_or(true, |message| message.is_some())
    {}
    bed.hosts[0].told.completions().clear();
    let peer = bed.session(0, WireMode::Lm, LEN as u64);
    for n in 0..20 {
        bed.exchange(0, peer, &noise(n, LEN));
    }
    bed.check_memory();
}

/// Behind a loss every packet of a burst lies in another's slot: as many wait at once as a burst has.
#[test]
fn a_burst_of_displaced_fragments_needs_no_more_room() {
    let mut bed = Bed::new(&BedConfig {
        tx_in_flight: 1024,
        on_the_way: 1024,
        window: 1024,
        ..BedConfig::default()
    });
    let payload = noise(2, 1 << 20);
    let peer = bed.session(0, WireMode::Lm, payload.len() as u64);
    bed.send(0, peer, &payload, 2);
    while bed.hosts[0].counters.data_packets_sent == 0 {
        bed.round();
    }
    bed.wire.drop_next(0, 1);
    bed.alone(0, 100);
    let before = bed.hosts[1].counters.fragments_displaced;
    bed.alone(1, 1);
    let displaced = bed.hosts[1].counters.fragments_displaced - before;
    assert!(displaced > 200, "{displaced}");
    let landing = bed.hosts[1].landing.as_ref().expect("a landing queue");
    assert_eq!(landing.sessions.room_for_displaced(), RECEIVE_BURST as usize);
    assert!(bed.recv(1)[..] == payload[..]);
    assert_eq!(bed.completion(0).outcome, Outcome::Delivered);
}
