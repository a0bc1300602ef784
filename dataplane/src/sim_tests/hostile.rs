//! Hostile packets: nothing panics, no message is delivered with a wrong byte, all memory comes back, and honest
//! traffic works again afterwards.
//!
//! Nothing here is encrypted, so whoever can forge a peer's address can invent eager messages and end sessions. What
//! must hold all the same: a message that carries an honest message's tag has that message's bytes.

use std::collections::HashMap;
use std::net::{Ipv4Addr, SocketAddrV4};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use proptest::prelude::*;

use lm_protocol::control::{
    ControlMessage, End, Ended, Grant, MAX_CONTROL_LEN, Reject, RejectReason, Request,
};
use lm_protocol::delivery::Delivery;
use lm_protocol::geometry::{IpVersion, Layout, LinkShape, Wire as WireMode};
use lm_protocol::integrity::Integrity;
use lm_protocol::window::WindowShape;
use lm_protocol::wire::Addressing;
use lm_protocol::wire::ethernet::MacAddr;
use lm_protocol::wire::lm::{HEADER_LEN, LmHeader};

use super::bed::{Bed, BedConfig, IPS, PORT, TWO_QUEUES, lm_packet, noise, sender_id};
use super::transfer::Dice;
use crate::config::ConnectOptions;
use crate::opening::Queues;
use crate::peer::PeerId;
use crate::simnic;

/// Ethernet, IPv4 and UDP headers.
const UDP_HEADERS_LEN: usize = 42;
/// Headers of a packet of the `lm` wire.
const HEADERS_LEN: usize = UDP_HEADERS_LEN + HEADER_LEN;
/// Packets remembered, to be repeated and mutated.
const CAPTURED_MAX: usize = 400;

/// Packets that crossed the wire, each with its sender's number.
type Captured = Arc<Mutex<Vec<(usize, Vec<u8>)>>>;

/// Where decisions come from: a seed, or the bytes that a fuzzer made up.
enum Choices {
    Seeded(Dice),
    Taped { tape: Vec<u8>, at: usize },
}

impl Choices {
    fn seeded(seed: u64) -> Choices {
        Choices::Seeded(Dice(seed | 1))
    }

    /// A number below `sides`; behind the end of a tape always 0.
    fn roll(&mut self, sides: u64) -> u64 {
        match self {
            Choices::Seeded(dice) => dice.roll(sides),
            Choices::Taped { tape, at } => {
                let len = match sides {
                    0..=0x100 => 1,
                    0x101..=0x1_0000 => 2,
                    _ => 8,
                };
                let taken = tape.get(*at..*at + len).unwrap_or_default();
                *at += len;
                taken
                    .iter()
                    .fold(0, |number, &byte| number << 8 | u64::from(byte))
                    % sides
            }
        }
    }

    fn are_over(&self) -> bool {
        match self {
            Choices::Seeded(_) => false,
            Choices::Taped { tape, at } => *at >= tape.len(),
        }
    }

    /// The tag of an honest message. A fuzzer must not be able to write it on a forged one: that would prove nothing.
    fn tag(&mut self, messages_before: usize) -> u64 {
        match self {
            Choices::Seeded(dice) => dice.roll(u64::MAX),
            Choices::Taped { .. } => {
                let bytes = noise(0x7a67_0000 ^ messages_before as u64, 8);
                u64::from_le_bytes(bytes.try_into().expect("eight bytes"))
            }
        }
    }

    /// Steps in which time passes after the siege: a fuzzer has none to lose.
    fn step(&self) -> Duration {
        match self {
            Choices::Seeded(_) => Duration::from_micros(300),
            Choices::Taped { .. } => Duration::from_millis(5),
        }
    }
}

/// A number that breaks things if any does.
fn number(dice: &mut Choices) -> u64 {
    match dice.roll(6) {
        0 => dice.roll(4),
        1 => u64::MAX - dice.roll(3),
        2 => u64::from(u32::MAX) - dice.roll(3),
        3 => 1 << dice.roll(64),
        4 => dice.roll(2000),
        _ => dice.roll(u64::MAX),
    }
}

/// A packet to `to`, from its honest peer's address, or a stranger's.
fn packet(dice: &mut Choices, to: usize, port: u16, header: &LmHeader, payload: &[u8]) -> Vec<u8> {
    let (src_ip, src_port) = match dice.roll(6) {
        0 => (
            Ipv4Addr::from_bits(dice.roll(1 << 32) as u32),
            dice.roll(1 << 16) as u16,
        ),
        1 => (IPS[1 - to], dice.roll(1 << 16) as u16),
        _ => (IPS[1 - to], port),
    };
    let addressing = Addressing {
        src_mac: MacAddr(simnic::mac_of(src_ip)),
        dst_mac: MacAddr(simnic::mac_of(IPS[to])),
        vlan: (dice.roll(20) == 0).then_some(7),
        src_ip,
        dst_ip: IPS[to],
        src_port,
        dst_port: port,
    };
    let mut bytes = lm_packet(&addressing, header, payload);
    if dice.roll(8) == 0 {
        // The digest's, if there is one.
        let last = bytes.len() - 1;
        bytes[last] ^= 1;
    }
    bytes
}

fn window(dice: &mut Choices) -> WindowShape {
    WindowShape::new(1 << dice.roll(32)).expect("a power of two")
}

fn wire(dice: &mut Choices) -> WireMode {
    [WireMode::Lm, WireMode::IpFrag][dice.roll(2) as usize]
}

fn layout(dice: &mut Choices) -> Layout {
    loop {
        let ip = [IpVersion::V4, IpVersion::V4, IpVersion::V6][dice.roll(3) as usize];
        let link = LinkShape {
            vlan_tags: dice.roll(3) as u8,
            ip,
        };
        let mtu = 576 + dice.roll(9000) as u16;
        if let Ok(layout) = Layout::new(wire(dice), mtu, link) {
            return layout;
        }
    }
}

fn grant(dice: &mut Choices) -> Grant {
    Grant {
        session_key: number(dice),
        data_port: number(dice).max(1) as u16 | 1,
        layout: layout(dice),
        landing_queue: number(dice) as u16,
        tx_queue_hint: (dice.roll(2) == 0).then(|| dice.roll(6) as u16),
        prefix: number(dice) as u8,
        frames_per_packet: number(dice) as u8 | 1,
        repeats_apart: dice.roll(2) == 0,
        max_message_len: number(dice),
        window: window(dice),
        packet_limit: number(dice) as u32,
        lease_ms: number(dice) as u32,
        first_message: number(dice) as u32,
    }
}

/// A control message with fields from nowhere; `key` is a real session's.
fn control(dice: &mut Choices, key: u64) -> ControlMessage {
    let key = if dice.roll(4) == 0 { key } else { number(dice) };
    match dice.roll(6) {
        0 => ControlMessage::Grant(grant(dice)),
        1 => ControlMessage::Reject(Reject {
            reason: RejectReason::Busy,
            version: number(dice) as u8,
            retry_after_ms: number(dice) as u32,
            limit: number(dice),
        }),
        2 => ControlMessage::End(End {
            session_key: key,
            messages: number(dice) as u32,
        }),
        3 => ControlMessage::Ended(Ended {
            session_key: key,
            delivered: number(dice) as u32,
        }),
        _ => ControlMessage::Request(Request {
            sender_id: number(dice),
            data_port: if dice.roll(2) == 0 {
                PORT
            } else {
                dice.roll(u64::from(u16::MAX)) as u16 + 1
            },
            mtu: number(dice) as u16,
            wire: wire(dice),
            link: LinkShape {
                vlan_tags: dice.roll(3) as u8,
                ip: [IpVersion::V4, IpVersion::V6][dice.roll(2) as usize],
            },
            max_message_len: number(dice),
            window: window(dice),
            messages_in_flight: number(dice) as u32,
            paced: dice.roll(2) == 0,
            delivery: Delivery::Reliable,
            integrity: [Integrity::None, Integrity::Manifest][dice.roll(2) as usize],
        }),
    }
}

/// A control message as a packet.
fn control_packet(dice: &mut Choices, to: usize, request_id: u32, message: &ControlMessage) -> Vec<u8> {
    let mut datagram = [0u8; MAX_CONTROL_LEN];
    let len = message.encode(request_id, &mut datagram);
    let (header, _) = LmHeader::decode(&datagram[..len]).expect("just encoded");
    packet(dice, to, PORT + 1, &header, &datagram[HEADER_LEN..len])
}

/// A data-path packet with fields from nowhere. Fragments never bear the real key: with it anybody can write a
/// session's messages.
fn forged(dice: &mut Choices, to: usize, key: u64) -> Vec<u8> {
    let session_key = if dice.roll(3) > 0 { key } else { number(dice) };
    let words = [0; 4].map(|_| number(dice));
    let header = match dice.roll(7) {
        0 => LmHeader::Data {
            session_key: key ^ (1 << dice.roll(64)),
            message: words[0] as u32,
            index: words[1] as u32,
            count: words[2] as u32,
        },
        1 => LmHeader::Eager {
            sender_id: words[0],
            number: words[1] as u32,
            tag: words[2],
            paced: false,
            digested: dice.roll(2) == 0,
        },
        2 => LmHeader::EagerAck {
            // The real one's now and then.
            sender_id: if dice.roll(2) == 0 {
                sender_id(to, Integrity::Manifest)
            } else {
                words[0]
            },
            next: words[1] as u32,
            limit: words[2] as u32,
        },
        3 => LmHeader::Announce {
            session_key,
            first: words[0] as u32,
            entries: words[1] as u32,
            sent: words[1].rotate_left(9) as u32,
        },
        4 => LmHeader::Credit {
            session_key,
            packet_limit: words[0] as u32,
            delivered: words[1] as u32,
            announced: words[2] as u32,
        },
        5 => LmHeader::Missing {
            session_key,
            message: words[0] as u32,
            ranges: words[1] as u32,
            manifest: dice.roll(2) == 0,
        },
        _ => LmHeader::Control {
            request_id: words[0] as u32,
            kind: words[1] as u8,
        },
    };
    // Where entries are counted, half of the packets carry as many as they say.
    let (header, payload_len) = match header {
        LmHeader::Announce {
            session_key, first, ..
        } if dice.roll(2) == 0 => {
            let entries = dice.roll(60) as u32;
            let header = LmHeader::Announce {
                session_key,
                first,
                entries,
                sent: entries,
            };
            (header, entries as usize * 16)
        }
        LmHeader::Missing {
            session_key, message, ..
        } if dice.roll(2) == 0 => {
            let ranges = dice.roll(60) as u32;
            let header = LmHeader::Missing {
                session_key,
                message,
                ranges,
                manifest: dice.roll(2) == 0,
            };
            (header, ranges as usize * 8)
        }
        header => (header, dice.roll(1449) as usize),
    };
    let payload = noise(dice.roll(u64::MAX), payload_len);
    packet(dice, to, PORT, &header, &payload)
}

/// A real packet, repeated with some of its header changed; its payload stays. Behind the key of a fragment or an
/// announcement nothing is changed: that would be another one of the session, and nobody could tell.
fn mutated(dice: &mut Choices, packet: &[u8]) -> Vec<u8> {
    let mut bytes = packet.to_vec();
    let is_fragment = bytes.get(20).is_some_and(|b| b & 0x3f != 0);
    let is_data = is_fragment || matches!(bytes.get(UDP_HEADERS_LEN), Some(&(0x11 | 0x14)));
    let end = match (is_fragment, is_data) {
        // The message begins right behind IP's header, in all but the first.
        (true, _) => UDP_HEADERS_LEN - 8,
        (_, true) => UDP_HEADERS_LEN + 12,
        _ => HEADERS_LEN,
    };
    // An IP fragment's identification and offset say which one it is.
    let fixed = if is_data { 18..22 } else { 0..0 };
    for _ in 0..dice.roll(4) {
        let at = dice.roll(end.min(bytes.len()) as u64) as usize;
        if !fixed.contains(&at) {
            bytes[at] ^= 1 << dice.roll(8);
        }
    }
    match dice.roll(6) {
        0 => bytes.truncate(dice.roll(bytes.len() as u64) as usize),
        1 => bytes.resize(bytes.len() + dice.roll(100) as usize, 0x5a),
        _ => {}
    }
    if dice.roll(2) == 0 && bytes.len() >= 34 {
        // A right checksum, so that what was changed is looked at.
        bytes[24..26].fill(0);
        let sum: u32 = bytes[14..34]
            .chunks_exact(2)
            .map(|half| u32::from(u16::from_be_bytes([half[0], half[1]])))
            .sum();
        let folded = (sum & 0xffff) + (sum >> 16);
        let checksum = !((folded + (folded >> 16)) as u16);
        bytes[24..26].copy_from_slice(&checksum.to_be_bytes());
    }
    bytes
}

struct Siege {
    bed: Bed,
    dice: Choices,
    captured: Captured,
    /// Honest messages by tag: seed of their bytes, and length.
    honest: HashMap<u64, usize>,
}

impl Siege {
    fn new(config: &BedConfig, dice: Choices) -> Siege {
        let bed = Bed::new(config);
        let captured: Captured = Arc::default();
        let store = Arc::clone(&captured);
        bed.wire.set_filter(move |from, packet| {
            let mut store = store.lock().expect("one thread");
            if store.len() < CAPTURED_MAX {
                store.push((from, packet.clone()));
            }
            true
        });
        Siege {
            bed,
            dice,
            captured,
            honest: HashMap::new(),
        }
    }

    fn key(&mut self, to: usize) -> u64 {
        let engine = &mut self.bed.hosts[to];
        let outbound = engine.senders.first().copied().and_then(|index| {
            let outbound = engine.peers.at(index).outbound.as_ref()?;
            Some(outbound.terms.key)
        });
        let inbound = engine
            .landing
            .as_ref()
            .and_then(|landing| Some(landing.sessions.iter().next()?.terms.key));
        match self.dice.roll(2) {
            0 => outbound.or(inbound),
            _ => inbound.or(outbound),
        }
        .unwrap_or(77)
    }

    fn attack(&mut self) {
        let to = self.dice.roll(2) as usize;
        let queue = self.dice.roll(3) as u32;
        let key = self.key(to);
        let dice = &mut self.dice;
        let packet = match dice.roll(8) {
            0 => {
                let len = dice.roll(1600) as usize;
                noise(dice.roll(u64::MAX), len)
            }
            1 | 2 => {
                let captured = self.captured.lock().expect("one thread");
                let Some((from, packet)) = captured.get(dice.roll(captured.len() as u64 + 1) as usize) else {
                    return;
                };
                let packet = mutated(dice, packet);
                let to = 1 - *from;
                drop(captured);
                self.bed.wire.inject(to, queue, &packet);
                return;
            }
            3 | 4 => {
                let message = control(dice, key);
                let id = number(dice) as u32;
                control_packet(dice, to, id, &message)
            }
            _ => forged(dice, to, key),
        };
        self.bed.wire.inject(to, queue, &packet);
    }

    fn take(&mut self) {
        for host in [0, 1] {
            loop {
                match self.bed.hosts[host].take_message() {
                    Ok(None) => break,
                    Ok(Some(message)) => {
                        if let Some(&len) = self.honest.get(&message.tag()) {
                            assert_eq!(message.len(), len);
                            assert!(
                                message[..] == noise(message.tag(), len)[..],
                                "a message of {len} bytes differs"
                            );
                        }
                    }
                    Err(_) => {}
                }
            }
            self.bed.hosts[host].completions.clear();
        }
    }

    fn send(&mut self, from: usize, peer: PeerId) {
        let len = [0, 30, 1448, 20_000, 150_000][self.dice.roll(5) as usize];
        let tag = self.dice.tag(self.honest.len());
        self.honest.insert(tag, len);
        // Whatever the attackers did: a result, not a panic.
        let _ = self.bed.try_send(from, peer, &noise(tag, len), tag);
    }

    fn run(&mut self) {
        let wire = wire(&mut self.dice);
        let options = ConnectOptions {
            wire,
            max_message_len: 60_000,
            timeout: Duration::from_millis(300),
            ..ConnectOptions::default()
        };
        let mut peers = [0, 1].map(|host| self.bed.connect(host, &options).expect("a session"));
        for _ in 0..40 {
            if self.dice.are_over() {
                break;
            }
            for from in [0, 1] {
                let peer = peers[from];
                self.send(from, peer);
            }
            for _ in 0..self.dice.roll(8) {
                self.attack();
            }
            match self.dice.roll(16) {
                0 => self.bed.pass(Duration::from_millis(700)),
                1 => {
                    let host = self.dice.roll(2) as usize;
                    if let Ok(peer) = self.bed.connect(host, &options) {
                        peers[host] = peer;
                    }
                }
                _ => self.bed.rounds(3),
            }
            self.take();
        }
        // The siege ends. What was begun runs into its time limits, and honest traffic works as before.
        self.bed.wire.clear_filter();
        let step_ns = self.dice.step().as_nanos() as u64;
        for _ in 0..15 {
            for _ in 0..1_000_000_000 / step_ns {
                self.bed.now_ns += step_ns;
                self.bed.round();
            }
            self.take();
        }
        for host in [0, 1] {
            let peer = self.bed.session(host, WireMode::Lm, 60_000);
            self.bed.hosts[host].completions.clear();
            self.bed.exchange(host, peer, &noise(9, 60_000));
            // A forged incarnation costs the eager messages under way; then the numbering begins anew.
            let _ = self.bed.try_send(host, peer, b"lost, perhaps", 0);
            self.bed.pass(Duration::from_secs(2));
            self.take();
            self.bed.exchange(host, peer, b"eager");
            let now_ns = self.bed.now_ns;
            self.bed.hosts[host].end_session(peer.index, now_ns);
        }
        self.bed.check_memory();
        for engine in &self.bed.hosts {
            assert_eq!(engine.counters.landing_lost, 0);
            assert!(engine.failures.is_empty());
        }
    }
}

/// One siege with all decisions from a fuzzer's bytes: packets, times, and what the application does.
pub(crate) fn besiege(tape: &[u8]) {
    let (&shape, tape) = tape.split_first().unwrap_or((&0, &[]));
    let queues = match shape & 1 {
        1 => Queues {
            general: None,
            landing: Some(0),
        },
        _ => TWO_QUEUES,
    };
    let config = BedConfig {
        queues: [queues; 2],
        message_timeout: Duration::from_millis(900),
        window: 1 << (shape >> 1 & 7),
        one_processor: shape & 16 != 0,
        paced: shape & 32 != 0,
        ..BedConfig::default()
    };
    let tape = tape.to_vec();
    Siege::new(&config, Choices::Taped { tape, at: 0 }).run();
}

/// What a fuzzer found interesting, and what failed once.
#[test]
fn the_fuzzers_corpus_is_survived() {
    let corpus = concat!(env!("CARGO_MANIFEST_DIR"), "/../fuzz/corpus/engine");
    let mut inputs = 0;
    for file in std::fs::read_dir(corpus).expect("the committed corpus") {
        let path = file.expect("a file").path();
        println!("{}", path.display()); // shown when it fails
        besiege(&std::fs::read(&path).expect("an input"));
        inputs += 1;
    }
    assert!(inputs > 0, "{corpus} is empty");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 120, max_shrink_iters: 40, ..ProptestConfig::default() })]

    #[test]
    fn a_siege_is_survived(seed: u64, one_queue: bool) {
        let queues = match one_queue {
            true => Queues { general: None, landing: Some(0) },
            false => TWO_QUEUES,
        };
        let config = BedConfig {
            queues: [queues; 2],
            message_timeout: Duration::from_millis(900),
            ..BedConfig::default()
        };
        Siege::new(&config, Choices::seeded(seed)).run();
    }

    /// A receiver that grants nonsense, and then gives credit for it.
    #[test]
    fn a_hostile_grant_is_survived(seed: u64) {
        let mut dice = Choices::seeded(seed);
        let mut bed = Bed::new(&BedConfig::default());
        let peer = bed.resolve(0);
        let options = ConnectOptions {
            wire: wire(&mut dice),
            max_message_len: 100_000,
            ..ConnectOptions::default()
        };
        let now_ns = bed.now_ns;
        bed.hosts[0].apply(peer.index, &options, now_ns);
        let request_id = bed.hosts[0].applying[0].applicant.request_id();
        // No honest answer comes.
        bed.wire.set_filter(|from, _| from == 0);
        let mut key = 0;
        for _ in 0..4 {
            let grant = grant(&mut dice);
            key = grant.session_key;
            let packet = loop {
                let packet = control_packet(&mut dice, 0, request_id, &ControlMessage::Grant(grant));
                if packet.len() == 42 + packet_len(&packet) && packet[26..30] == IPS[1].octets() && packet[34..36] == (PORT + 1).to_be_bytes() {
                    break packet;
                }
            };
            bed.wire.inject(0, 0, &packet);
        }
        bed.rounds(300);
        let now_ns = bed.now_ns;
        let _ = bed.hosts[0].application_outcome(peer.index, now_ns);
        for n in 0..30u64 {
            let len = [1449, 1460, 5000, 60_000, 100_000][dice.roll(5) as usize];
            let _ = bed.try_send(0, peer, &noise(n, len), n);
            for _ in 0..3 {
                let packet = forged(&mut dice, 0, key);
                bed.wire.inject(0, 0, &packet);
            }
            bed.rounds(3);
        }
        bed.wire.clear_filter();
        let now_ns = bed.now_ns;
        bed.hosts[0].end_session(peer.index, now_ns);
        for _ in 0..6 {
            bed.pass(Duration::from_secs(1));
            for host in &mut bed.hosts {
                while host.take_message().map_or(true, |message| message.is_some()) {}
                host.completions.clear();
            }
        }
        bed.check_memory();
        let peer = bed.session(0, WireMode::Lm, 100_000);
        bed.exchange(0, peer, &noise(1, 100_000));
    }
}

/// Bytes behind the UDP header, as it says itself.
fn packet_len(packet: &[u8]) -> usize {
    usize::from(u16::from_be_bytes([packet[38], packet[39]])) - 8
}

/// Credits and acknowledgements with limits half a circle away change nothing, and are counted.
#[test]
fn limits_from_the_other_side_of_the_circle_are_refused() {
    let mut bed = Bed::new(&BedConfig::default());
    let peer = bed.session(0, WireMode::Lm, 100_000);
    bed.exchange(0, peer, &noise(1, 100_000));
    bed.exchange(0, peer, b"eager");
    let key = bed.hosts[1]
        .landing
        .as_ref()
        .and_then(|landing| Some(landing.sessions.iter().next()?.terms.key))
        .expect("a session");
    let addressing = bed.hosts[1].addressing_to(super::bed::data_address(0), simnic::mac_of(IPS[0]));
    let offsets = [1 << 31, (1 << 31) + 50, (1 << 31) - 50, (1 << 31) + 2000, 70_000];
    for by in offsets {
        for header in [
            LmHeader::Credit {
                session_key: key,
                packet_limit: by,
                delivered: 1,
                announced: 1,
            },
            LmHeader::EagerAck {
                sender_id: sender_id(0, Integrity::Manifest),
                next: 1,
                limit: 1u32.wrapping_add(by),
            },
        ] {
            bed.wire.inject(0, 0, &lm_packet(&addressing, &header, &[]));
        }
    }
    bed.rounds(3);
    assert_eq!(bed.hosts[0].counters.drops.implausible, 2 * offsets.len() as u64);
    bed.exchange(0, peer, &noise(1, 100_000));
    for n in 0..200 {
        bed.exchange(0, peer, &noise(n, 100));
    }
    bed.check_memory();
}

/// A peer whose session is being asked for keeps its place in the table, however many strangers send.
#[test]
fn a_flood_of_strangers_does_not_take_an_applicants_place() {
    let mut bed = Bed::new(&BedConfig::default());
    let peer = bed.resolve(0);
    let now_ns = bed.now_ns;
    bed.hosts[0].apply(peer.index, &ConnectOptions::default(), now_ns);
    for n in 0..3000u16 {
        let address = SocketAddrV4::new(Ipv4Addr::new(10, 9, (n >> 8) as u8 + 1, n as u8), 4000);
        let addressing = bed.hosts[0].addressing_to(address, [2; 6]);
        let now_ns = bed.now_ns + u64::from(n);
        bed.hosts[0].peers.find_or_add(address, &addressing, now_ns);
    }
    let outcome = loop {
        bed.now_ns += 200_000;
        bed.round();
        let now_ns = bed.now_ns;
        if let Some(outcome) = bed.hosts[0].application_outcome(peer.index, now_ns) {
            break outcome;
        }
    };
    outcome.expect("a session");
    bed.exchange(0, peer, &noise(1, 100_000));
}
