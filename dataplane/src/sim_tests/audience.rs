//! A host that reads messages while they arrive, and holds what it was shown against what was sent.
#![cfg(test)]

use std::ops::Range;
use std::time::Duration;

use lm_protocol::control::{CAPABILITY_STREAMS, ControlMessage, MAX_CONTROL_LEN};
use lm_protocol::delivery::Delivery;
use lm_protocol::integrity::Integrity;
use lm_protocol::streaming::NotValid;
use lm_protocol::wire::lm::LmHeader;

use super::bed::{Bed, BedConfig, data_address, lm_packet, noise, wire_of};
use super::integrity::UDP_HEADERS_LEN;
use crate::Ending;
use crate::completion::{PeerId, RecvError};
use crate::connect::ConnectOptions;
use crate::incoming::Incoming;
use crate::memory::PACKET_HEADROOM;
use crate::message::Message;
use crate::simnic::{Impairments, Semantics, ZeroCopy};

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
        wire: wire_of(semantics),
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
    pub(super) fn new(incoming: Incoming, payload: Vec<u8>) -> Read {
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
            let bytes = incoming.bytes(range.clone()).expect("shown");
            assert!(
                *bytes == self.payload[range.start as usize..range.end as usize],
                "message {} shows others than were sent in {range:?}",
                incoming.tag()
            );
            assert!(range.start == 0 || at < range.start);
            for hidden in at..range.start {
                let not_valid = Err(NotValid { valid_to: hidden });
                assert!(incoming.bytes(hidden..hidden + 1) == not_valid);
                assert!(incoming.bytes(hidden..range.end) == not_valid);
            }
            // It says how far it may be read.
            if range.end < incoming.len() {
                let beyond = incoming.bytes(range.start..range.end + 1);
                assert!(beyond == Err(NotValid { valid_to: range.end }));
            }
            at = range.end;
        }
        // Ranges that no message has.
        assert!(at == incoming.len() || incoming.bytes(at..at + 1).is_err());
        let (begin, len) = (shown.first().map_or(0, |range| range.start), incoming.len());
        assert!(
            incoming
                .bytes(begin..len + 1)
                .is_err_and(|error| error.valid_to <= len)
        );
        assert!(incoming.bytes(len + 1..len + 1).is_err());
        #[allow(clippy::reversed_empty_ranges)]
        let backwards = incoming.bytes(begin + 1..begin);
        assert!(backwards.is_err());
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
                let bytes = read.incoming.bytes(range.clone()).expect("shown");
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

    pub(super) fn until(&mut self, what: &str, mut is_so: impl FnMut(&mut Audience) -> bool) {
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

    pub(super) fn shown(&self, read: usize) -> &[Range<u64>] {
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

    /// The same, of a wire on which nothing was lost: only what lies at pages' ends was copied.
    pub(super) fn end_without_copies(self, way: Way) -> Bed {
        let bed = self.end();
        bed.check_clean();
        let copied = bed.hosts[1].counters.user_copied_bytes;
        assert!(
            copied <= bed.hosts[1].counters.page_end_fragments * P,
            "{way:?}: {copied}"
        );
        bed
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

/// A request or a grant becomes that of a host of before, which can do anything else.
pub(super) fn without_streams(packet: &mut [u8]) {
    say_otherwise(packet, |message| match message {
        ControlMessage::Request(request) => request.capabilities = !CAPABILITY_STREAMS,
        ControlMessage::Grant(grant) => grant.capabilities = !CAPABILITY_STREAMS,
        _ => {}
    });
}

/// Changes what a packet says to a control port, if it does.
pub(super) fn say_otherwise(packet: &mut [u8], change: impl FnOnce(&mut ControlMessage)) {
    let parsed = packet.get(UDP_HEADERS_LEN..).map(ControlMessage::parse);
    let Some(Ok((id, mut message))) = parsed else {
        return;
    };
    change(&mut message);
    let mut datagram = [0; MAX_CONTROL_LEN];
    let len = message.encode(id, &mut datagram);
    packet[UDP_HEADERS_LEN..].copy_from_slice(&datagram[..len]);
    // No UDP checksum.
    packet[UDP_HEADERS_LEN - 2..UDP_HEADERS_LEN].fill(0);
}
