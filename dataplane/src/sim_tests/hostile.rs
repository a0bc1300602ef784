//! Hostile packets: nothing panics, no message is delivered with a wrong byte, all memory comes back, and honest
//! traffic works again afterwards.
//!
//! Nothing here is encrypted, so whoever can forge a peer's address can invent eager messages and end sessions. What
//! must hold all the same: a message that carries an honest message's tag has that message's bytes.

mod forgery;

use std::collections::HashMap;
use std::io::Write;
use std::net::{Ipv4Addr, SocketAddrV4};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use proptest::prelude::*;

use lm_protocol::control::ControlMessage;
use lm_protocol::geometry::Wire as WireMode;
use lm_protocol::integrity::Integrity;
use lm_protocol::wire::lm::LmHeader;

use super::bed::{Bed, BedConfig, IPS, PORT, TWO_QUEUES, lm_packet, noise, sender_id};
use crate::completion::PeerId;
use crate::connect::ConnectOptions;
use crate::incoming::Incoming;
use crate::opening::Queues;
use crate::simnic;
use crate::writer::MessageWriter;
use forgery::{Choices, control, control_packet, forged, grant, mutated, number, wire};

/// Packets remembered, to be repeated and mutated.
const CAPTURED_MAX: usize = 400;

/// Packets that crossed the wire, each with its sender's number.
type Captured = Arc<Mutex<Vec<(usize, Vec<u8>)>>>;

struct Siege {
    bed: Bed,
    dice: Choices,
    captured: Captured,
    /// Honest messages by tag: seed of their bytes, and length.
    honest: HashMap<u64, usize>,
    /// Of them those that are written, and those that are read, while they are on their way.
    writing: Vec<(u64, MessageWriter)>,
    reading: Vec<Incoming>,
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
            writing: Vec::new(),
            reading: Vec::new(),
        }
    }

    fn key(&mut self, to: usize) -> u64 {
        let engine = &mut self.bed.hosts[to];
        let outbound = engine.sending.senders().first().copied().and_then(|index| {
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

    /// Writes a part of what is not written, and looks at what is shown.
    fn stream(&mut self) {
        self.writing.retain_mut(|(tag, writer)| {
            let payload = noise(*tag, writer.len() as usize);
            let from = writer.written() as usize;
            let part = &payload[from..(from + 6000).min(payload.len())];
            // One message in four is given up half way.
            let is_given_up = *tag & 6 == 0 && from > payload.len() / 2;
            !is_given_up && writer.write_all(part).is_ok() && writer.finish().is_err()
        });
        for engine in &mut self.bed.hosts {
            self.reading.extend(std::iter::from_fn(|| engine.next_incoming()));
        }
        self.reading.retain(|incoming| {
            let is_arriving = incoming.settled().is_none();
            if let Some(&len) = self.honest.get(&incoming.tag()) {
                let payload = noise(incoming.tag(), len);
                for shown in incoming.shown() {
                    let bytes = incoming.bytes(shown.clone()).expect("shown");
                    let sent = &payload[shown.start as usize..shown.end as usize];
                    assert!(bytes == sent, "{shown:?} of {len} bytes are shown, and differ");
                }
            }
            is_arriving
        });
    }

    fn take(&mut self) {
        self.stream();
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
            self.bed.hosts[host].told.completions().clear();
        }
    }

    fn send(&mut self, from: usize, peer: PeerId) {
        let len = [0, 30, 1448, 20_000, 150_000][self.dice.roll(5) as usize];
        let tag = self.dice.tag(self.honest.len());
        self.honest.insert(tag, len);
        if tag & 1 == 1 && len > 1448 {
            let now_ns = self.bed.now_ns;
            let begun = self.bed.hosts[from].begin(peer, len as u64, tag, now_ns);
            self.writing.extend(begun.ok().map(|writer| (tag, writer)));
            return;
        }
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
                self.bed.hosts[from].watch(peer);
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
        self.writing.clear();
        self.reading.clear();
        for host in [0, 1] {
            let peer = self.bed.session(host, WireMode::Lm, 60_000);
            self.bed.hosts[host].told.completions().clear();
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
        for engine in &mut self.bed.hosts {
            assert_eq!(engine.counters.landing_lost, 0);
            assert!(engine.told.failures().count() == 0);
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
        patience: Duration::from_millis(900),
        window: 1 << (shape >> 1 & 7),
        tx_bound: u32::from(shape & 32 != 0),
        ..BedConfig::default()
    };
    let tape = tape.to_vec();
    Siege::new(&config, Choices::Taped { tape, at: 0 }).run();
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 120, max_shrink_iters: 40, ..ProptestConfig::default() })]

    #[test]
    fn a_siege_is_survived(seed: u64, one_queue: bool, keyed: bool) {
        let queues = match one_queue {
            true => Queues { general: None, landing: Some(0) },
            false => TWO_QUEUES,
        };
        let config = BedConfig {
            queues: [queues; 2],
            patience: Duration::from_millis(900),
            keys: [keyed.then_some(1); 2],
            window: 4,
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
        bed.ask(0, peer, &options);
        bed.hosts[0].drive_admission(now_ns);
        let request_id = bed.hosts[0].admission.requests.first_ticket().expect("it is asked for");
        // No honest answer comes.
        bed.wire.set_filter(|from, _| from == 0);
        let mut key = 0;
        for _ in 0..4 {
            let grant = grant(&mut dice);
            key = grant.session_key;
            let packet = loop {
                let packet = control_packet(&mut dice, 0, request_id, &ControlMessage::Grant(grant));
                let is_control = packet[26..30] == IPS[1].octets() && packet[34..36] == (PORT + 1).to_be_bytes();
            if packet.len() == 42 + packet_len(&packet) && is_control {
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
                host.told.completions().clear();
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
    let key = bed.key(0, peer);
    let addressing = bed.hosts[1].addressing_to(super::bed::data_address(0), simnic::mac_of(IPS[0]));
    let offsets = [1 << 31, (1 << 31) + 50, (1 << 31) - 50, (1 << 31) + 2000, 70_000];
    for by in offsets {
        for header in [
            LmHeader::Credit {
                session_key: key,
                packet_limit: by,
                delivered: 1,
                announced: 1,
                lands: true,
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
    bed.ask(0, peer, &ConnectOptions::default());
    for n in 0..3000u16 {
        let address = SocketAddrV4::new(Ipv4Addr::new(10, 9, (n >> 8) as u8 + 1, n as u8), 4000);
        let addressing = bed.hosts[0].addressing_to(address, [2; 6]);
        let now_ns = bed.now_ns + u64::from(n);
        bed.hosts[0].peers.find_or_add(address, &addressing, now_ns);
    }
    let outcome = loop {
        bed.now_ns += 200_000;
        bed.round();
        if let Some(outcome) = bed.application_outcome(0, peer.index) {
            break outcome;
        }
    };
    outcome.expect("a session");
    bed.exchange(0, peer, &noise(1, 100_000));
}
