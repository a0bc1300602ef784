//! Messages that are read while they arrive: what is shown is right at once and stays so, whatever the wire does.
#![cfg(test)]

use std::num::NonZeroU64;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use lm_protocol::delivery::Delivery;
use lm_protocol::integrity::Integrity;
use lm_protocol::manifest::{Manifest, fragment_digest, message_digest};
use lm_protocol::wire::lm::{
    LmHeader, MessageDigest, TYPE_ANNOUNCE, TYPE_DATA, TYPE_MANIFEST, TYPE_WINDOWS, WindowsPacket,
};

use super::bed::{Bed, BedConfig, data_address, lm_packet, noise};
use super::integrity::{has_message_digests, index_of, kind};
use super::times;
use super::transfer::Dice;
use crate::completion::{PeerId, RecvError};
use crate::connect::ConnectOptions;
use crate::incoming::{Ending, Incoming};
use crate::memory::PACKET_HEADROOM;
use crate::message::LandingRegion;
use crate::message::Message;
use crate::placing::{Announced, Placed, Placement, Settled, ZoneSource};
use crate::simnic::{Impairments, Semantics, WireConfig, ZeroCopy};

pub(super) const P: u64 = 1448;
/// Fragments of a window.
pub(super) const WINDOW: u64 = 16;
pub(super) const W: u64 = WINDOW * P;
/// Bytes of a window's end over which the next window's lowest header goes.
pub(super) const TAIL: u64 = 66;

/// How a receiver takes what comes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Way {
    /// Copy mode, where the log's pairing is the proof.
    Paired,
    /// Copy mode with digests.
    Digests,
    /// A device that writes by itself.
    ZeroCopy,
}

pub(super) const WAYS: [Way; 3] = [Way::Paired, Way::Digests, Way::ZeroCopy];

pub(super) fn config(way: Way) -> BedConfig {
    let (semantics, integrity) = match way {
        Way::Paired => (Semantics::Copy, Integrity::None),
        Way::Digests => (Semantics::Copy, Integrity::Manifest),
        Way::ZeroCopy => (
            Semantics::ZeroCopy(ZeroCopy {
                prefix_len: 12,
                ..ZeroCopy::default()
            }),
            Integrity::Manifest,
        ),
    };
    BedConfig {
        window: WINDOW as u32,
        landing_len: 4 << 20,
        integrity,
        wire: WireConfig {
            semantics: [semantics; 2],
            ..WireConfig::default()
        },
        ..BedConfig::default()
    }
}

/// A message of which somebody reads what is shown.
pub(super) struct Read {
    pub(super) incoming: Incoming,
    pub(super) payload: Vec<u8>,
    pub(super) seen: Vec<Range<u64>>,
}

impl Read {
    fn new(incoming: Incoming, payload: Vec<u8>) -> Read {
        assert_eq!(incoming.len(), payload.len() as u64);
        Read {
            incoming,
            payload,
            seen: Vec::new(),
        }
    }

    /// What is shown has the right bytes and was not taken back; what is not shown is not given. Bytes shown.
    pub(super) fn check(&mut self) -> u64 {
        let incoming = &self.incoming;
        let shown: Vec<Range<u64>> = incoming.shown().collect();
        for before in &self.seen {
            let is_within = |now: &Range<u64>| now.start <= before.start && before.end <= now.end;
            assert!(shown.iter().any(is_within), "{before:?} was shown, now {shown:?}");
        }
        let mut at = 0;
        for range in &shown {
            let bytes = incoming.get(range.clone()).expect("shown");
            assert!(
                *bytes == self.payload[range.start as usize..range.end as usize],
                "message {} shows others than were sent in {range:?}",
                incoming.tag()
            );
            assert!(range.start == 0 || at < range.start);
            for hidden in at..range.start {
                assert!(
                    incoming.get(hidden..hidden + 1).is_none() && incoming.get(hidden..range.end).is_none()
                );
            }
            at = range.end;
        }
        assert!(at == incoming.len() || incoming.get(at..at + 1).is_none());
        assert!(incoming.get(0..incoming.len() + 1).is_none());
        if incoming.settled() == Some(Ending::Whole) {
            let all = 0..incoming.len();
            assert!(shown == std::slice::from_ref(&all), "{shown:?}");
        }
        self.seen = shown;
        self.seen.iter().map(|range| range.end - range.start).sum()
    }
}

/// Two hosts, and who reads at one what the other sends.
pub(super) struct Audience {
    pub(super) bed: Bed,
    pub(super) sender: usize,
    pub(super) receiver: usize,
    pub(super) to: PeerId,
    pub(super) payloads: Vec<Vec<u8>>,
    pub(super) sent: usize,
    pub(super) reads: Vec<Read>,
    pub(super) messages: Vec<Message>,
    pub(super) failures: u64,
    /// Bytes that were read before their messages were whole, most at once of each message.
    pub(super) early: u64,
}

impl Audience {
    pub(super) fn new(mut bed: Bed, [sender, receiver]: [usize; 2], options: &ConnectOptions) -> Audience {
        let to = bed.connect(sender, options).expect("a session");
        let peers = &mut bed.hosts[receiver].peers;
        let from = peers.find(data_address(sender)).expect("its sender is known");
        let from = peers.id_of(from);
        assert!(bed.hosts[receiver].watch(from));
        Audience {
            bed,
            sender,
            receiver,
            to,
            payloads: Vec::new(),
            sent: 0,
            reads: Vec::new(),
            messages: Vec::new(),
            failures: 0,
            early: 0,
        }
    }

    pub(super) fn of(way: Way, delivery: Delivery) -> Audience {
        Audience::new(Bed::new(&config(way)), [0, 1], &options(delivery))
    }

    /// One round, and a look at everything that is read. What is shown of it may be written by nothing that is posted.
    pub(super) fn watch(&mut self) {
        if let Some(payload) = self.payloads.get(self.sent)
            && (self.bed)
                .try_send(self.sender, self.to, payload, self.sent as u64)
                .is_ok()
        {
            self.sent += 1;
        }
        if self.bed.round() == 0 {
            self.bed.now_ns += 30_000;
        }
        while let Some(incoming) = self.bed.hosts[self.receiver].next_incoming() {
            let payload = self.payloads[incoming.tag() as usize].clone();
            self.reads.push(Read::new(incoming, payload));
        }
        for read in &mut self.reads {
            let was = read.seen.iter().map(|range| range.end - range.start).sum::<u64>();
            let shown = read.check();
            if read.incoming.settled().is_none() {
                self.early += shown - was;
            }
        }
        self.check_posted();
    }

    /// The same, and takes what came.
    pub(super) fn round(&mut self) {
        self.watch();
        match self.bed.hosts[self.receiver].take_message() {
            Ok(Some(message)) if self.is_whole(&message) => self.messages.push(message),
            Ok(Some(_)) => {}
            Ok(None) => {}
            Err(RecvError::Incomplete { .. }) => self.failures += 1,
            Err(error) => panic!("{error}"),
        }
    }

    /// Whether it is one that was read; with the right bytes then, but for what is missing.
    fn is_whole(&self, message: &Message) -> bool {
        let from = self.reads.first().map(|read| read.incoming.peer());
        if message.peer() != from.unwrap_or(message.peer()) {
            return false;
        }
        let mut payload = self.payloads[message.tag() as usize].clone();
        for range in message.missing() {
            payload[range.start as usize..range.end as usize].fill(0);
        }
        assert!(message[..] == payload[..], "message {} is another", message.tag());
        true
    }

    fn check_posted(&self) {
        let host = &self.bed.hosts[self.receiver];
        let Some(landing) = &host.landing else { return };
        let (prefix, reach) = match host.fixed.caps.witness {
            true => (0, u64::from(host.fixed.mtu) + 14),
            false => (
                u64::from(host.fixed.caps.prefix_len),
                u64::from(host.fixed.chunk_len) - PACKET_HEADROOM,
            ),
        };
        let posted: Vec<u64> = landing.sessions.entries.starts().collect();
        for read in &self.reads {
            for range in &read.seen {
                let bytes = read.incoming.get(range.clone()).expect("shown");
                let start = host.memory.address_of(bytes);
                let end = start + bytes.len() as u64;
                let over = posted
                    .iter()
                    .find(|at| **at - prefix < end && start < **at + reach);
                assert!(
                    over.is_none(),
                    "an entry may write into {range:?} of {}",
                    read.incoming.tag()
                );
            }
        }
    }

    pub(super) fn until(&mut self, what: &str, mut is_so: impl FnMut(&Audience) -> bool) {
        for _ in 0..30_000 {
            if is_so(self) {
                return;
            }
            self.round();
        }
        panic!("never {what}");
    }

    /// Sends these and reads them until each was received or given up.
    pub(super) fn read_all(&mut self, payloads: Vec<Vec<u8>>) {
        self.payloads.extend(payloads);
        let all = self.payloads.len();
        self.until("settled", |audience| {
            audience.messages.len() + audience.failures as usize == all
        });
    }

    fn shown(&self, read: usize) -> &[Range<u64>] {
        &self.reads[read].seen
    }

    /// All is given back.
    pub(super) fn end(mut self) -> Bed {
        self.messages.clear();
        self.reads.clear();
        self.bed.pass(Duration::from_millis(30));
        self.end_session();
        self.bed.pass(Duration::from_millis(30));
        for host in &mut self.bed.hosts {
            host.told.completions().clear();
        }
        self.bed.check_memory();
        self.bed
    }

    pub(super) fn end_session(&mut self) {
        let now_ns = self.bed.now_ns;
        self.bed.hosts[self.sender].end_session(self.to.index, now_ns);
    }

    /// A packet of its sender's, or somebody's in its name, reaches the receiver.
    pub(super) fn forge(&mut self, header: &LmHeader, payload: &[u8]) {
        let index = self.to.index;
        let addressing = self.bed.hosts[self.sender].peers.at(index).addressing;
        self.bed
            .wire
            .inject(self.receiver, 0, &lm_packet(&addressing, header, payload));
    }

    pub(super) fn key(&self) -> u64 {
        let landing = self.bed.hosts[self.receiver].landing.as_ref().expect("it lands");
        landing.sessions.iter().next().expect("a session").terms.key
    }

    /// The receiver's counter of drops of this name.
    pub(super) fn drops(&self, name: &str) -> u64 {
        let drops = self.bed.hosts[self.receiver].counters.drops();
        { drops }
            .into_iter()
            .find(|(known, _)| *known == name)
            .expect("a counter")
            .1
    }
}

pub(super) fn options(delivery: Delivery) -> ConnectOptions {
    ConnectOptions {
        delivery,
        max_message_len: 1 << 20,
        ..ConnectOptions::default()
    }
}

pub(super) fn payloads(count: u64, len: impl Fn(u64) -> u64) -> Vec<Vec<u8>> {
    (0..count)
        .map(|number| noise(number + 77, len(number) as usize))
        .collect()
}

/// Each window is there before the next one has come; the message is the same memory.
#[test]
fn windows_are_read_as_they_come() {
    for way in WAYS {
        let mut audience = Audience::of(way, Delivery::Reliable);
        audience.payloads = payloads(1, |_| 10 * W + 5);
        let mut steps: Vec<u64> = Vec::new();
        audience.until("whole", |audience| {
            let shown = audience
                .reads
                .first()
                .and_then(|read| Some(read.seen.first()?.end));
            if shown.is_some() && shown > steps.last().copied() {
                steps.extend(shown);
            }
            !audience.messages.is_empty()
        });
        assert!(steps.len() > 5 && steps[0] <= 2 * W, "{way:?}: {steps:?}");
        // Where the headers of a window that is still to come are written is not shown.
        let ends = [0, W - TAIL, W - TAIL - 12, 5];
        assert!(
            steps.iter().all(|end| ends.contains(&(end % W))),
            "{way:?}: {steps:?}"
        );
        assert!(
            way != Way::Paired || steps.iter().any(|end| end % W > 5),
            "{steps:?}"
        );
        let read = &audience.reads[0];
        assert_eq!(read.incoming.settled(), Some(Ending::Whole));
        assert_eq!(
            (read.incoming.tag(), read.incoming.number()),
            (0, audience.messages[0].number())
        );
        assert_eq!(read.incoming.peer(), audience.messages[0].peer());
        let all = read.incoming.get(0..10 * W + 5).expect("whole");
        assert_eq!(all.as_ptr(), audience.messages[0].as_ptr());
        let bed = audience.end();
        bed.check_clean();
        let copied = bed.hosts[1].counters.user_copied_bytes;
        assert!(
            copied <= bed.hosts[1].counters.page_end_fragments * P,
            "{way:?}: {copied}"
        );
    }
}

/// Sends three bursts, keeps some of what was read while others land, and ends all.
fn read_under(mut audience: Audience, seed: u64, impairments: Impairments) -> (Bed, u64) {
    let mut dice = Dice(seed * 31 + 7);
    for host in 0..audience.bed.hosts.len() {
        let seed = seed * 2 + host as u64;
        audience
            .bed
            .wire
            .impair(host, Impairments { seed, ..impairments });
    }
    for _ in 0..3 {
        let lens: Vec<u64> = (0..4).map(|_| 2_000 + dice.roll(6 * W)).collect();
        let kept: Vec<Message> = audience
            .messages
            .drain(..)
            .filter(|_| dice.roll(2) == 0)
            .collect();
        let bytes: Vec<Vec<u8>> = kept.iter().map(|message| message.to_vec()).collect();
        audience.reads.retain(|_| dice.roll(2) == 0);
        (audience.sent, audience.failures) = (0, 0);
        audience.payloads.clear();
        audience.read_all(payloads(4, |number| lens[number as usize]));
        for (message, bytes) in kept.iter().zip(&bytes) {
            assert!(message[..] == bytes[..], "a message that was kept has changed");
        }
    }
    for host in 0..audience.bed.hosts.len() {
        audience.bed.wire.impair(host, Impairments::default());
    }
    let early = audience.early;
    (audience.end(), early)
}

/// Losses, packets that overtake others, packets that come twice.
pub(super) fn impairments(seed: u64) -> Impairments {
    let [loss_ppm, duplicate_ppm, reorder_ppm] = match seed % 3 {
        0 => [10_000, 0, 0],
        1 => [10_000, 3_000, 3_000],
        _ => [0, 3_000, 10_000],
    };
    Impairments {
        loss_ppm,
        duplicate_ppm,
        duplicate_delay_max_ns: 50_000,
        reorder_ppm,
        reorder_packets_max: 6,
        reorder_hold_max_ns: 300_000,
        ..Impairments::default()
    }
}

#[test]
fn what_is_read_is_right_and_stays_so_on_a_bad_wire() {
    for way in WAYS {
        let mut early = 0;
        for seed in 0..times(6, 60) {
            let audience = Audience::of(way, Delivery::Reliable);
            let (bed, read) = read_under(audience, seed, impairments(seed));
            early += read;
            assert_eq!(bed.hosts[1].counters.violations.total(), 0);
            assert_eq!(bed.hosts[1].counters.messages_incomplete, 0);
        }
        assert!(early > 10 * W, "{way:?}: {early}");
    }
}

/// Packets are changed on their way: only digests notice.
#[test]
fn what_was_changed_on_the_way_is_not_shown() {
    for way in [Way::Digests, Way::ZeroCopy] {
        let mut early = 0;
        for seed in 0..times(6, 60) {
            let audience = Audience::of(way, Delivery::Reliable);
            let (_, read) = read_under(
                audience,
                seed,
                Impairments {
                    loss_ppm: 2_000,
                    corrupt_ppm: 5_000,
                    ..Impairments::default()
                },
            );
            early += read;
        }
        assert!(early > 10 * W, "{way:?}: {early}");
    }
}

/// Messages of the same bytes: what is shown of one is no source for what another lacks.
#[test]
fn messages_that_are_alike_are_not_taken_for_each_other() {
    for seed in 0..times(8, 80) {
        let mut audience = Audience::of(Way::ZeroCopy, Delivery::Reliable);
        audience.bed.wire.impair(
            0,
            Impairments {
                seed,
                ..impairments(0)
            },
        );
        audience.payloads = vec![noise(5, 6 * W as usize); 6];
        audience.until("whole", |audience| audience.messages.len() == 6);
        audience.bed.wire.impair(0, Impairments::default());
        audience.end();
    }
}

/// Packets that take several frames each.
#[test]
fn windows_of_long_packets_are_read() {
    for way in [Way::Paired, Way::Digests] {
        let mut early = 0;
        for seed in 0..times(3, 30) {
            let config = BedConfig {
                mtu: 9000,
                window: 2,
                ..config(way)
            };
            let audience = Audience::new(Bed::new(&config), [0, 1], &options(Delivery::Reliable));
            early += read_under(audience, seed, impairments(seed)).1;
        }
        assert!(early > 10 * W, "{way:?}: {early}");
    }
}

/// All fragments of a session come by the kernel's socket.
#[test]
fn windows_of_the_one_copy_path_are_read() {
    for way in [Way::Paired, Way::Digests] {
        let mut early = 0;
        for seed in 0..times(3, 30) {
            let options = ConnectOptions {
                one_copy: true,
                ..options(Delivery::Reliable)
            };
            let audience = Audience::new(Bed::new(&config(way)), [0, 1], &options);
            early += read_under(audience, seed, impairments(seed)).1;
        }
        assert!(early > 10 * W, "{way:?}: {early}");
    }
}

/// Another session's packets use entries of the one that is read, and the other way round.
#[test]
fn a_queue_that_is_shared_shows_what_is_right() {
    for way in [Way::Paired, Way::Digests] {
        let mut early = 0;
        for seed in 0..times(3, 30) {
            let mut bed = Bed::switch(&config(way), 3);
            let other = bed.connect(2, &options(Delivery::Reliable)).expect("a session");
            let mut audience = Audience::new(bed, [1, 0], &options(Delivery::Reliable));
            for host in [1, 2] {
                let seed = seed * 3 + host as u64;
                audience.bed.wire.impair(
                    host,
                    Impairments {
                        seed,
                        ..impairments(seed)
                    },
                );
            }
            audience.payloads = payloads(8, |number| 2 * W + number * 7_000);
            let mut sent = 0;
            audience.until("all", |audience| {
                audience.reads.len() + audience.messages.len() > 0
            });
            for _ in 0..30_000 {
                let payload = noise(sent, 90_000);
                sent += u64::from(sent < 8 && audience.bed.try_send(2, other, &payload, sent).is_ok());
                audience.round();
                if audience.messages.len() == 8 {
                    break;
                }
            }
            assert_eq!(audience.messages.len(), 8);
            assert!(
                audience
                    .reads
                    .iter()
                    .all(|read| read.incoming.peer() == audience.messages[0].peer())
            );
            early += audience.early;
            for host in [1, 2] {
                audience.bed.wire.impair(host, Impairments::default());
            }
            audience.bed.pass(Duration::from_millis(30));
            while audience.bed.hosts[0]
                .take_message()
                .expect("no failure")
                .is_some()
            {}
            let now_ns = audience.bed.now_ns;
            audience.bed.hosts[2].end_session(other.index, now_ns);
            audience.end();
        }
        assert!(early > 10 * W, "{way:?}: {early}");
    }
}

/// The kernel drops a packet between gate and ring, or runs the gate on two CPUs: nothing is shown that the log vouches for then.
#[test]
fn windows_are_shown_only_while_the_log_can_be_trusted() {
    let (mut ended, mut early) = (0, 0);
    for seed in 0..times(12, 120) {
        let way = WAYS[seed as usize % 2];
        let config = BedConfig {
            one_processor: true,
            ..config(way)
        };
        let mut audience = Audience::new(Bed::new(&config), [0, 1], &options(Delivery::Reliable));
        audience.bed.wire.impair(
            0,
            Impairments {
                seed,
                loss_ppm: 3_000,
                rx_full_ppm: [3_000, 0][seed as usize / 2 % 2],
                race_ppm: [0, 3_000][seed as usize / 2 % 2],
                ..Impairments::default()
            },
        );
        audience.payloads = payloads(6, |_| 6 * W);
        for _ in 0..3_000 {
            audience.round();
            if audience.messages.len() as u64 + audience.failures == 6 {
                break;
            }
        }
        early += audience.early;
        let endings: Vec<_> = audience
            .reads
            .iter()
            .map(|read| read.incoming.settled())
            .collect();
        ended += endings
            .iter()
            .filter(|ending| **ending == Some(Ending::SessionEnded))
            .count();
        assert!(!endings.contains(&Some(Ending::Incomplete)), "{endings:?}");
        audience.bed.wire.impair(0, Impairments::default());
        audience.bed.pass(Duration::from_millis(30));
        while audience.bed.hosts[1].take_message().is_err() {}
        audience.reads.iter_mut().for_each(|read| {
            read.check();
        });
        audience.end();
    }
    assert!(ended > 0 && early > 10 * W, "{ended} {early}");
}

/// A window of which a packet is lost, and its repetition late: those behind it are read first.
#[test]
fn later_windows_are_read_before_earlier_ones() {
    for way in [Way::Paired, Way::Digests] {
        let mut audience = Audience::of(way, Delivery::Reliable);
        let holds_back = Arc::new(AtomicBool::new(true));
        let holding = Arc::clone(&holds_back);
        audience.bed.wire.set_filter(move |from, packet| {
            let is_lost = from == 0 && kind(packet) == Some(TYPE_DATA) && index_of(packet) == 3;
            !(is_lost && holding.load(Ordering::Relaxed))
        });
        audience.payloads = payloads(1, |_| 8 * W);
        audience.until("a later window", |audience| {
            audience.reads.first().is_some_and(|read| !read.seen.is_empty())
        });
        assert!(audience.shown(0)[0].start >= W, "{:?}", audience.shown(0));
        audience.until("all but the first", |audience| {
            let last = audience.shown(0).last().expect("some");
            last.end >= 7 * W
        });
        assert_eq!(audience.shown(0)[0].start, W);
        assert!(audience.reads[0].incoming.get(0..1).is_none());
        holds_back.store(false, Ordering::Relaxed);
        audience.until("whole", |audience| !audience.messages.is_empty());
        // It lies where it was shown.
        let all = audience.reads[0].incoming.get(0..8 * W).expect("whole");
        assert_eq!(all.as_ptr(), audience.messages[0].as_ptr());
        audience.end();
    }
}

/// In zero-copy mode a loss shifts what is behind it, until the message's end: what was found then is read while the rest is awaited.
#[test]
fn what_was_shifted_is_read_when_it_is_found() {
    let mut audience = Audience::of(Way::ZeroCopy, Delivery::Reliable);
    let holds_back = Arc::new(AtomicBool::new(true));
    let holding = Arc::clone(&holds_back);
    audience.bed.wire.set_filter(move |from, packet| {
        let lost = 2 * WINDOW as u32 + 3;
        let is_lost = from == 0 && kind(packet) == Some(TYPE_DATA) && index_of(packet) == lost;
        !(is_lost && holding.load(Ordering::Relaxed))
    });
    audience.payloads = payloads(1, |_| 6 * W);
    audience.until("all but one", |audience| {
        let shown = audience.reads.first().map(|read| &read.seen[..]);
        shown.is_some_and(|shown| *shown == [0..2 * W, 3 * W..6 * W])
    });
    holds_back.store(false, Ordering::Relaxed);
    audience.until("whole", |audience| !audience.messages.is_empty());
    audience.end();
}

/// A window that a repetition completes when packets were dropped behind the gate is not shown, whoever notices first.
#[test]
fn a_window_is_shown_only_while_the_drop_counters_stand() {
    let mut audience = Audience::of(Way::Paired, Delivery::Reliable);
    let holds_back = Arc::new(AtomicBool::new(true));
    let holding = Arc::clone(&holds_back);
    audience.bed.wire.set_filter(move |from, packet| {
        let is_data = from == 0 && kind(packet) == Some(TYPE_DATA);
        // One is never let through, so that the message does not become whole.
        !(is_data && (index_of(packet) == 100 || index_of(packet) == 3 && holding.load(Ordering::Relaxed)))
    });
    audience.payloads = payloads(1, |_| 8 * W);
    audience.until("what is between them", |audience| {
        let shown = audience.reads.first().and_then(|read| read.seen.first());
        shown.is_some_and(|shown| shown.start == W && shown.end > 5 * W)
    });
    let landing = audience.bed.hosts[1].landing.as_mut().expect("it lands");
    landing.drops.ring_full += 1;
    holds_back.store(false, Ordering::Relaxed);
    audience.until("settled", |audience| {
        audience.reads[0].incoming.settled().is_some()
    });
    assert_eq!(audience.reads[0].incoming.settled(), Some(Ending::SessionEnded));
    assert_eq!(audience.shown(0)[0].start, W);
    assert_eq!(audience.bed.hosts[1].counters.violations.total(), 1);
    audience.bed.pass(Duration::from_millis(50));
    while audience.bed.hosts[1].take_message().is_err() {}
    audience.end();
}

/// Loses a fragment of the first message once.
fn lose(bed: &Bed, index: u32) {
    let mut is_first = true;
    bed.wire.set_filter(move |from, packet| {
        let is_it = from == 0 && kind(packet) == Some(TYPE_DATA) && index_of(packet) == index;
        !(is_it && std::mem::take(&mut is_first))
    });
}

/// An entry is left behind a loss. A message of which something is shown waits for a new channel; one of which nothing is shown is copied out,
/// and is read where it is then.
#[test]
fn what_is_shown_is_never_moved() {
    for way in WAYS {
        for (windows, lets_go) in [(5, false), (5, true), (1, false)] {
            let is_moved = windows == 1 || lets_go;
            let mut audience = Audience::of(way, Delivery::Reliable);
            lose(&audience.bed, ((windows - 1) * WINDOW + 5) as u32);
            audience.payloads = payloads(1, |_| windows * W);
            let mut first = None;
            if lets_go {
                audience.until("some of it", |audience| {
                    audience.reads.first().is_some_and(|read| !read.seen.is_empty())
                });
                audience.reads.clear();
            }
            audience.until("whole", |audience| {
                if let Some(read) = audience.reads.first().filter(|read| !read.seen.is_empty()) {
                    let bytes = read.incoming.get(read.seen[0].clone()).expect("shown");
                    assert_eq!(*first.get_or_insert(bytes.as_ptr()), bytes.as_ptr());
                }
                !audience.messages.is_empty()
            });
            if let Some(read) = audience.reads.first() {
                let all = read.incoming.get(0..windows * W).expect("whole");
                assert_eq!(all.as_ptr(), audience.messages[0].as_ptr());
            }
            let counters = audience.bed.hosts[1].counters;
            assert_eq!(counters.messages_copied_out, u64::from(is_moved), "{way:?}");
            assert_eq!(counters.landing_rebuilt > 0, !is_moved, "{way:?}");
            // Its memory is nobody else's while it is read.
            audience.messages.clear();
            audience.sent = 0;
            audience.payloads = payloads(8, |_| 5 * W);
            audience.until("others", |audience| audience.messages.len() == 8);
            audience.end();
        }
    }
}

/// What was shown stays when the message is given up, or comes without something.
#[test]
fn messages_that_stay_incomplete_are_read_as_far_as_they_were_shown() {
    for way in WAYS {
        let windows = [2, 4].into_iter();
        let cases = windows.flat_map(|window| [Delivery::Unreliable, Delivery::Partial].map(|d| (window, d)));
        for (window, delivery) in cases {
            // Behind a loss in the last one an entry is left.
            let lost = window * WINDOW as u32 + 2;
            let mut audience = Audience::of(way, delivery);
            lose(&audience.bed, lost);
            audience.payloads = payloads(2, |_| 5 * W);
            audience.until("settled", |audience| {
                audience.messages.len() as u64 + audience.failures == 2
            });
            let read = &audience.reads[0];
            assert_eq!(
                read.incoming.settled(),
                Some(Ending::Incomplete),
                "{way:?} {delivery:?}"
            );
            assert_eq!(read.seen[0], 0..u64::from(window) * W, "{way:?} {delivery:?}");
            let lost = u64::from(lost) * P;
            assert!(read.incoming.get(lost..lost + 1).is_none());
            if delivery == Delivery::Partial {
                assert_eq!(audience.failures, 0);
                let message = &audience.messages[0];
                assert_eq!(message.missing(), std::slice::from_ref(&(lost..lost + P)));
                assert_eq!(read.incoming.get(0..1).expect("shown").as_ptr(), message.as_ptr());
                assert_eq!(audience.bed.hosts[1].counters.messages_copied_out, 0);
            } else {
                assert_eq!(audience.failures, 1);
            }
            // Its memory is nobody else's while it is read.
            audience.messages.clear();
            audience.sent = 0;
            audience.payloads = payloads(12, |_| 5 * W);
            audience.until("others", |audience| audience.messages.len() == 12);
            audience.reads[0].check();
            audience.end();
        }
    }
}

/// All that a sender has credit for is lost: the message ends there, on a new channel, without what was never sent.
#[test]
fn a_message_of_which_the_rest_is_lost_ends_where_it_is_read() {
    for way in WAYS {
        let config = BedConfig {
            on_the_way: 32,
            ..config(way)
        };
        let mut audience = Audience::new(Bed::new(&config), [0, 1], &options(Delivery::Partial));
        audience.bed.wire.set_filter(|from, packet| {
            from != 0 || kind(packet) != Some(TYPE_DATA) || index_of(packet) < 3 * WINDOW as u32
        });
        audience.payloads = payloads(1, |_| 10 * W);
        audience.until("settled", |audience| !audience.messages.is_empty());
        let message = &audience.messages[0];
        assert_eq!(
            message.missing(),
            std::slice::from_ref(&(3 * W..10 * W)),
            "{way:?}"
        );
        let read = &audience.reads[0];
        assert_eq!(read.incoming.settled(), Some(Ending::Incomplete));
        assert!(
            read.seen[0].start == 0 && read.seen[0].end >= 3 * W - TAIL - 12,
            "{:?}",
            read.seen
        );
        assert_eq!(read.incoming.get(0..1).expect("shown").as_ptr(), message.as_ptr());
        let rebuilt = audience.bed.hosts[1].counters.landing_rebuilt;
        assert!((1..4).contains(&rebuilt), "{way:?}: {rebuilt}");
        audience.end();
    }
}

#[test]
fn a_session_that_ends_leaves_what_was_shown() {
    for way in WAYS {
        let mut audience = Audience::of(way, Delivery::Reliable);
        audience.payloads = payloads(3, |_| 10 * W);
        audience.until("half of one", |audience| {
            audience
                .reads
                .first()
                .is_some_and(|read| read.seen.iter().any(|range| range.end > 4 * W))
        });
        audience.end_session();
        audience.until("settled", |audience| {
            audience
                .reads
                .iter()
                .all(|read| read.incoming.settled().is_some())
        });
        assert_eq!(audience.reads[0].incoming.settled(), Some(Ending::SessionEnded));
        audience.bed.pass(Duration::from_millis(50));
        audience.reads[0].check();
        while audience.bed.hosts[1].take_message().is_err() {}
        audience.end();
    }
}

/// Gives a region for the next message, and lets it go when it was not for that.
struct Once(Option<LandingRegion>);

impl ZoneSource for Once {
    fn place(&mut self, _: &Announced<'_>) -> Placement {
        self.0.take().map_or(Placement::Arena, Placement::Land)
    }

    fn settled(&mut self, _: &Placed, how: Settled) {
        assert!(matches!(how, Settled::Elsewhere(_)), "it is read: {how:?}");
    }
}

/// Whoever is dropped last gives the memory back, and one that nobody asked for is gone with its message.
#[test]
fn readings_are_let_go_before_and_after_their_messages() {
    for way in WAYS {
        let mut audience = Audience::of(way, Delivery::Reliable);
        let live = |audience: &Audience| {
            let landing = audience.bed.hosts[1].landing.as_ref().expect("it lands");
            (landing.arena.live(), landing.watching.begun.len())
        };
        // While it arrives.
        audience.payloads = payloads(1, |_| 6 * W);
        audience.until("a window", |audience| {
            audience.reads.first().is_some_and(|read| !read.seen.is_empty())
        });
        audience.reads.clear();
        audience.until("whole", |audience| !audience.messages.is_empty());
        assert!(audience.reads.is_empty(), "it is told of once");
        audience.messages.clear();
        audience.bed.pass(Duration::from_millis(5));
        assert_eq!(live(&audience), (0, 0), "{way:?}");
        // After the message, and its region is no other's meanwhile.
        audience.sent = 0;
        audience.payloads = payloads(2, |_| 6 * W);
        audience.until("whole", |audience| audience.messages.len() == 1);
        let message = audience.messages.remove(0);
        let region = message.into_region().expect("a zone");
        audience.bed.hosts[1].place_by(Some(Box::new(Once(Some(region)))));
        audience.bed.pass(Duration::from_millis(5));
        audience.until("the next", |audience| !audience.messages.is_empty());
        audience.reads[0].check();
        audience.bed.hosts[1].place_by(None);
        audience.messages.clear();
        audience.bed.pass(Duration::from_millis(5));
        assert_eq!(live(&audience).0, audience.reads.len(), "{way:?}");
        audience.reads.clear();
        audience.bed.pass(Duration::from_millis(5));
        assert_eq!(live(&audience), (0, 0), "{way:?}");
        // Nobody asks for it.
        audience.bed.send(0, audience.to, &noise(3, 6 * W as usize), 0);
        drop(audience.bed.recv(1));
        audience.bed.pass(Duration::from_millis(5));
        assert_eq!(live(&audience), (0, 0), "{way:?}");
        audience.end();
    }
}

/// WINDOWS packets of honest senders are lost, others come in their stead.
#[test]
fn forged_digests_show_nothing() {
    for way in [Way::Digests, Way::ZeroCopy] {
        // Slow enough for questions and answers while a message is on its way.
        let options = ConnectOptions {
            rate: NonZeroU64::new(300_000_000),
            ..options(Delivery::Reliable)
        };
        let mut audience = Audience::new(Bed::new(&config(way)), [0, 1], &options);
        let key = audience.key();
        let lets_through = Arc::new(AtomicBool::new(false));
        let letting = Arc::clone(&lets_through);
        audience.bed.wire.set_filter(move |_, packet| {
            kind(packet) != Some(TYPE_WINDOWS) || letting.load(Ordering::Relaxed)
        });
        audience.payloads = payloads(2, |_| 20 * W);
        audience.until("begun", |audience| !audience.reads.is_empty());
        let number = audience.reads[0].incoming.number();
        let windows = |key, words| LmHeader::Extension {
            packet_type: TYPE_WINDOWS,
            key,
            words,
        };
        let mut payload = [0; 800];
        let (words, len) = WindowsPacket::write(&mut payload, number, 0, [5; 20].into_iter()).expect("room");
        // Another key, other windows than there are, counts that are not those of the payload; the last is the only one that is taken.
        let forged = [
            (key ^ 1, words, len),
            (key, [number, 1, 20], len),
            (key, [number, u32::MAX - 10, 20], len),
            (key, [number, 0, u32::MAX], len),
            (key, [number, 0, 0], len),
            (key, [number, 0, 21], len),
            (key, words, len - 1),
            (key, [number + 1000, 0, 20], len),
            (key, words, len),
        ];
        for (key, words, len) in forged {
            audience.forge(&windows(key, words), &payload[..len]);
        }
        audience.until("whole", |audience| !audience.messages.is_empty());
        assert_eq!(audience.early, 0, "{way:?}");
        assert_eq!(audience.drops("corrupt"), 0);
        // What comes too late is not looked at, and the next message's are believed again.
        audience.forge(&windows(key, words), &payload[..len]);
        audience.messages.clear();
        audience.until("the second", |audience| audience.reads.len() == 2);
        let number = audience.reads[1].incoming.number();
        audience.forge(&windows(key, [number, 0, 20]), &payload[..len]);
        audience.round();
        lets_through.store(true, Ordering::Relaxed);
        audience.until("whole", |audience| !audience.messages.is_empty());
        assert!(audience.early > 0, "{way:?}");
        audience.end();
    }
}

/// Requests for digests that no honest receiver sends.
#[test]
fn forged_requests_for_digests_are_refused() {
    let mut audience = Audience::of(Way::Digests, Delivery::Reliable);
    let key = audience.key();
    audience.payloads = payloads(1, |_| 20 * W);
    audience.until("begun", |audience| !audience.reads.is_empty());
    let number = audience.reads[0].incoming.number();
    let index = { &mut audience.bed.hosts[1].peers }
        .find(data_address(0))
        .expect("known");
    let addressing = audience.bed.hosts[1].peers.at(index).addressing;
    let forged = [
        (key ^ 1, [number, 0, 20]),
        (key, [number, 0, 0]),
        (key, [number, 0, 21]),
        (key, [number, 20, 1]),
        (key, [number, u32::MAX, u32::MAX]),
        (key, [number + 1, 0, 1]),
        (key, [number.wrapping_sub(1), 0, u32::MAX]),
    ];
    for (key, words) in forged {
        let header = LmHeader::Extension {
            packet_type: TYPE_WINDOWS,
            key,
            words,
        };
        audience
            .bed
            .wire
            .inject(0, 0, &lm_packet(&addressing, &header, &[]));
    }
    audience.until("whole", |audience| !audience.messages.is_empty());
    let drops = audience.bed.hosts[0].counters.drops();
    let refused: Vec<_> = drops.into_iter().filter(|(_, count)| *count > 0).collect();
    assert_eq!(
        refused.iter().map(|(_, count)| count).sum::<u64>(),
        6,
        "{refused:?}"
    );
    assert!(audience.early > 0);
    audience.end();
}

/// A sender whose windows agree, and whose message is to have other bytes: what was shown stays, and the message is given up.
#[test]
fn what_is_shown_stays_when_its_sender_contradicts_itself() {
    // In zero-copy mode a manifest says where what is missing may be, too.
    for (way, loses) in [
        (Way::Digests, false),
        (Way::ZeroCopy, false),
        (Way::ZeroCopy, true),
    ] {
        let mut audience = Audience::of(way, Delivery::Reliable);
        let key = audience.key();
        audience
            .bed
            .wire
            .set_filter(move |from, packet| match (from, kind(packet)) {
                (0, Some(TYPE_MANIFEST)) => false,
                (0, Some(TYPE_ANNOUNCE)) => !has_message_digests(packet),
                (0, Some(TYPE_DATA)) => !(loses && index_of(packet) == 4 * WINDOW as u32 + 1),
                _ => true,
            });
        audience.payloads = payloads(1, |_| 5 * W);
        audience.until("some", |audience| {
            let shows = |read: &Read| read.seen.iter().any(|range| range.end >= 3 * W);
            audience.reads.first().is_some_and(shows)
        });
        audience.bed.pass(Duration::from_millis(10));
        let number = audience.reads[0].incoming.number();
        let fragments = audience.payloads[0].chunks(P as usize);
        let mut digests: Vec<u64> = fragments.map(|bytes| fragment_digest(key, bytes)).collect();
        digests[5] ^= 1;
        let manifest = Manifest::new(key, number, &digests, 5 * W, 0);
        let mut packets = Vec::new();
        for packet in manifest.packets(1400) {
            let mut payload = vec![0; packet.payload_len()];
            packet.write_payload(&mut payload);
            packets.push((packet.header, payload));
        }
        let digest = message_digest(key, number, &digests, 5 * W, 0);
        let announce = LmHeader::Announce {
            session_key: key,
            first: number + 1,
            entries: 0,
            sent: 5 * WINDOW as u32,
        };
        let digest = MessageDigest {
            message: number,
            digest,
        };
        audience.forge(&announce, &digest.encode());
        // How much was sent is believed after some milliseconds.
        for _ in 0..300 {
            audience.bed.now_ns += 100_000;
            audience.round();
            for (header, payload) in &packets {
                audience.forge(header, payload);
            }
        }
        assert_eq!(audience.failures, 1, "{way:?} {loses}");
        assert_eq!(audience.reads[0].incoming.settled(), Some(Ending::Incomplete));
        assert_eq!(audience.drops("manifest_contradictory"), 1);
        audience.end();
    }
}
