//! Packets of types that the engine does not know, and those who take them.
#![cfg(test)]

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard};

use lm_protocol::time::Time;
use lm_protocol::wire::lm::{HEADER_LEN, LmHeader, TYPE_REALTIME, TYPE_RT_REPORT, TYPE_WINDOWS, Trailer};

use super::bed::{Bed, BedConfig, TWO_QUEUES, data_address, ip, lm_packet, noise};
use crate::bounds::GENERAL_FRAMES;
use crate::completion::{Outcome, PeerId};
use crate::entropy::Entropy;
use crate::handlers::{Arrived, Handler, HandlerError, Replies};
use crate::introductions::Introductions;
use crate::message::Message;
use crate::opening::Queues;
use crate::scheduler::{Flow, FlowSpec, TxBatch};
use crate::simnic::impair::Impairments;

const COUNT: u32 = 600;
const PERIOD_NS: u64 = 20_000;

/// What a receiver of samples has.
#[derive(Default)]
struct Samples {
    kept: BTreeMap<u32, Message>,
    copied: BTreeMap<u32, Vec<u8>>,
    refused: u32,
    replies: u32,
    ticks: u32,
}

type Shared<T> = Arc<Mutex<T>>;

fn lock<T>(shared: &Shared<T>) -> MutexGuard<'_, T> {
    shared.lock().expect("one thread")
}

fn payload(number: u32) -> Vec<u8> {
    noise(u64::from(number), 100 + number as usize % 1300)
}

/// Keeps every second sample and copies the others; reports ten times a millisecond how many it has.
struct Receiver {
    samples: Shared<Samples>,
    keeps_all: bool,
    from: Option<PeerId>,
    due: Option<Time>,
}

impl Handler for Receiver {
    fn packet(&mut self, packet: Arrived<'_>, now: Time, replies: &mut Replies) {
        assert!(replies.packets.is_empty() && replies.bytes.is_empty());
        let [number, ..] = packet.words();
        assert_eq!((packet.packet_type(), packet.key()), (TYPE_REALTIME, 7));
        self.from = Some(packet.from());
        self.due
            .get_or_insert(now + std::time::Duration::from_micros(100));
        let mut samples = lock(&self.samples);
        if self.keeps_all || number.is_multiple_of(2) {
            match packet.keep() {
                Some(message) => drop(samples.kept.insert(number, message)),
                None => samples.refused += 1,
            }
        } else {
            samples.copied.insert(number, packet.payload().to_vec());
        }
    }

    fn due(&self) -> Option<Time> {
        self.due
    }

    fn tick(&mut self, now: Time, replies: &mut Replies) {
        assert!(self.due.take().is_some_and(|due| due <= now));
        assert!(replies.packets.is_empty() && replies.bytes.is_empty());
        let mut samples = lock(&self.samples);
        samples.ticks += 1;
        let whole = (samples.kept.len() + samples.copied.len()) as u32;
        let peer = self.from.expect("packets came before");
        let too_long = vec![0; replies.payload_max() + 1];
        assert!(!replies.send(peer, TYPE_RT_REPORT, 7, [whole, 0, 0], &too_long));
        assert!(
            !replies.send(peer, 7, 7, [whole, 0, 0], &[]),
            "the engine's own type"
        );
        assert!(replies.send(peer, TYPE_RT_REPORT, 7, [whole, 0, 0], &too_long[1..]));
    }
}

/// Has host 1 take samples; what it has of them.
fn receive(bed: &mut Bed, keeps_all: bool) -> Shared<Samples> {
    let samples = Shared::<Samples>::default();
    let receiver = Receiver {
        samples: Arc::clone(&samples),
        keeps_all,
        from: None,
        due: None,
    };
    let handlers = &mut bed.hosts[1].small.handlers;
    handlers
        .add(TYPE_REALTIME..=TYPE_REALTIME, Box::new(receiver))
        .expect("free");
    samples
}

/// Counts reports.
struct Reports {
    samples: Shared<Samples>,
    newest: u32,
}

impl Handler for Reports {
    fn packet(&mut self, packet: Arrived<'_>, _: Time, _: &mut Replies) {
        assert!(packet.packet_type() == TYPE_RT_REPORT && packet.payload().iter().all(|byte| *byte == 0));
        self.newest = self.newest.max(packet.words()[0]);
        lock(&self.samples).replies += 1;
    }
}

/// Sends a sample each period.
struct Sender {
    next: u32,
    due: Time,
    free: VecDeque<u32>,
}

impl Flow for Sender {
    fn next(&mut self, _: u32, now: Time, out: &mut TxBatch<'_>) {
        while self.due <= now
            && self.next < COUNT
            && out.room() > 0
            && let Some(frame) = self.free.pop_front()
        {
            let payload = payload(self.next);
            let header = LmHeader::Extension {
                packet_type: TYPE_REALTIME,
                key: 7,
                words: [self.next, 0, 0],
            };
            let trailer = Trailer::new(&header, &payload, data_address(0));
            let packet = [
                &header.encode(payload.len() as u16)[..],
                &payload,
                trailer.as_bytes(),
            ]
            .concat();
            out.frame(frame).expect("it is free")[..packet.len()].copy_from_slice(&packet);
            assert!(out.put(frame, packet.len(), frame.into()));
            self.next += 1;
            self.due += std::time::Duration::from_nanos(PERIOD_NS);
        }
    }

    fn departs(&self) -> Option<Time> {
        (self.next < COUNT).then_some(self.due)
    }

    fn sent(&mut self, token: u64, _: Option<Time>) {
        self.free.push_back(token as u32);
    }
}

/// Samples of a flow come whole, beside messages, through the general channel and through the kernel's socket; lost ones are missing, and
/// nothing else is.
#[test]
fn packets_of_a_type_come_to_its_handler_by_both_ways() {
    let socket = Queues {
        general: None,
        landing: Some(0),
    };
    for queues in [[TWO_QUEUES; 2], [TWO_QUEUES, socket]] {
        let mut bed = Bed::new(&BedConfig {
            queues,
            ..BedConfig::default()
        });
        let peer = bed.resolve(0);
        bed.exchange(0, peer, &noise(1, 100));
        bed.wire.impair(
            0,
            Impairments {
                seed: 5,
                loss_ppm: 10_000,
                duplicate_ppm: 10_000,
                reorder_ppm: 10_000,
                reorder_packets_max: 4,
                reorder_hold_max_ns: 50_000,
                corrupt_ppm: 10_000,
                ..Impairments::default()
            },
        );
        let samples = receive(&mut bed, false);
        let reports = Reports {
            samples: Arc::clone(&samples),
            newest: 0,
        };
        let handlers = &mut bed.hosts[0].small.handlers;
        let id = handlers
            .add(TYPE_RT_REPORT..=TYPE_WINDOWS, Box::new(reports))
            .expect("free");
        let spec = FlowSpec {
            to: Some(peer),
            frames: 16,
            descriptors: 16,
            messages: None,
        };
        let sender = Sender {
            next: 0,
            due: Time::from_nanos(bed.now_ns),
            free: (0..16).collect(),
        };
        bed.hosts[0].add_flow(&spec, Box::new(sender)).expect("room");
        for number in 0..60 {
            bed.send(0, peer, &noise(number, 1000), number);
            bed.pass(std::time::Duration::from_nanos(10 * PERIOD_NS));
            assert_eq!(&bed.recv(1)[..], noise(number, 1000), "messages beside it");
        }
        bed.pass(std::time::Duration::from_millis(20));
        let mut samples = std::mem::take(&mut *lock(&samples));
        let whole = samples.kept.len() + samples.copied.len();
        assert!((550..600).contains(&whole), "{whole} of {COUNT}");
        for (number, message) in &samples.kept {
            assert_eq!(&message[..], payload(*number));
            assert_eq!((message.tag(), message.number()), (7, *number));
        }
        assert!(
            samples
                .copied
                .iter()
                .all(|(number, copied)| *copied == payload(*number))
        );
        let Samples {
            replies,
            ticks,
            refused,
            ..
        } = samples;
        assert!(
            (10..=ticks).contains(&replies) && refused == 0,
            "{replies} {ticks} {refused}"
        );
        assert!(bed.hosts[1].counters.drops.corrupt > 0);
        assert_eq!(bed.hosts[1].small.frames().1, samples.kept.len() as u32);
        samples.kept.clear();
        bed.rounds(2);
        assert_eq!(
            bed.hosts[1].small.frames().1,
            0,
            "a message that is dropped gives its frame back"
        );
        assert!(
            bed.hosts[0].small.handlers.remove(id).is_some()
                && bed.hosts[0].small.handlers.remove(id).is_none()
        );
    }
}

/// A sample, as it may be injected.
fn sample(bed: &mut Bed, from: usize, number: u32) -> Vec<u8> {
    let peer = (bed.hosts[1].peers).find(data_address(0)).expect("it was heard");
    let mut addressing = bed.hosts[1].peers.at(peer).addressing.reversed();
    addressing.src_ip = ip(from);
    let header = LmHeader::Extension {
        packet_type: TYPE_REALTIME,
        key: 7,
        words: [number, 0, 0],
    };
    lm_packet(&addressing, &header, &payload(number))
}

/// Without a handler, from a host that nobody knows, or changed on the way: counted, and not answered.
#[test]
fn what_no_handler_takes_is_counted_and_not_answered() {
    let mut bed = Bed::new(&BedConfig::default());
    let peer = bed.resolve(0);
    bed.exchange(0, peer, &noise(1, 100));
    bed.pass(std::time::Duration::from_millis(2));
    let known = sample(&mut bed, 0, 1);
    let sent = bed.wire.sent(1);
    let mut unexpected = 0;
    let mut rejected = |bed: &mut Bed, packet: &[u8], more: u64| {
        bed.wire.inject(1, 0, packet);
        bed.rounds(3);
        unexpected += more;
        let drops = bed.hosts[1].counters.drops;
        assert_eq!(
            (drops.unexpected, bed.wire.sent(1)),
            (unexpected, sent),
            "{drops:?}"
        );
    };
    rejected(&mut bed, &known, 1);
    let samples = receive(&mut bed, true);
    let stranger = sample(&mut bed, 9, 2);
    rejected(&mut bed, &stranger, 1);
    let mut changed = known.clone();
    changed[42 + HEADER_LEN] ^= 1;
    rejected(&mut bed, &changed, 0);
    assert_eq!(bed.hosts[1].counters.drops.corrupt, 1);
    assert!(lock(&samples).kept.is_empty());
    bed.wire.inject(1, 0, &known);
    bed.rounds(3);
    assert_eq!(lock(&samples).kept.len(), 1);
}

/// Sends a sample for each that came.
struct Answers {
    samples: Shared<Samples>,
    sender: Sender,
}

impl Flow for Answers {
    fn next(&mut self, budget: u32, now: Time, out: &mut TxBatch<'_>) {
        self.sender.due = now;
        self.sender.next(budget, now, out);
    }

    fn departs(&self) -> Option<Time> {
        (lock(&self.samples).kept.len() > self.sender.next as usize).then_some(Time::ZERO)
    }

    fn sent(&mut self, token: u64, at: Option<Time>) {
        self.sender.sent(token, at);
    }
}

/// Samples go to and fro: a round that brings one does nothing else, and the next one begins with the answer.
#[test]
fn a_handlers_packet_is_answered_before_the_rest_of_its_round() {
    let mut bed = Bed::new(&BedConfig::default());
    let peers = [0, 1].map(|host| bed.resolve(host));
    bed.exchange(0, peers[0], &noise(1, 100));
    let samples = receive(&mut bed, true);
    let sender = Sender {
        next: 0,
        due: Time::ZERO,
        free: (0..16).collect(),
    };
    let answers = Answers {
        samples: Arc::clone(&samples),
        sender,
    };
    let spec = FlowSpec {
        to: Some(peers[1]),
        frames: 16,
        descriptors: 16,
        messages: None,
    };
    bed.hosts[1].add_flow(&spec, Box::new(answers)).expect("room");
    for number in 0..100 {
        let packet = sample(&mut bed, 0, number);
        bed.wire.inject(1, 0, &packet);
        // A handler is due in each round.
        bed.now_ns += 10 * PERIOD_NS;
        let begun = |bed: &Bed| (lock(&samples).ticks, bed.wire.sent(1));
        let (ticks, sent) = begun(&bed);
        bed.poll(1);
        assert_eq!(lock(&samples).kept.len(), number as usize + 1);
        assert!(number == 0 || begun(&bed) == (ticks, sent), "{number}");
        bed.poll(1);
        assert!(begun(&bed).1 > sent, "{number}");
    }
    assert!(lock(&samples).ticks > 40);
    // Of a stream this core would do the kernel's work, by a call in each round.
    assert!(!bed.hosts[1].small.stream.is_hot());
}

/// Nobody takes real time here: small messages come in as many rounds beside a flood of it as without, twice as many at most.
#[test]
fn floods_that_nobody_takes_hold_up_no_small_message() {
    const PER_ROUND: u64 = 24;
    let p99 = |is_flooded: bool| {
        let mut bed = Bed::new(&BedConfig::default());
        let peer = bed.resolve(0);
        bed.exchange(0, peer, &noise(1, 100));
        let packet = sample(&mut bed, 0, 1);
        let (mut rounds, mut flooded) = (Vec::new(), 0);
        for number in 0..300 {
            bed.send(0, peer, &noise(number, 64), number);
            let mut took = 0;
            while bed.hosts[1].take_message().expect("no failure").is_none() {
                for _ in 0..if is_flooded { PER_ROUND } else { 0 } {
                    bed.wire.inject(1, 0, &packet);
                    flooded += 1;
                }
                bed.round();
                took += 1;
            }
            rounds.push(took);
            bed.hosts[0].told.completions().clear();
        }
        bed.rounds(3);
        assert_eq!(bed.hosts[1].counters.drops.unexpected, flooded);
        rounds.sort_unstable();
        (rounds[rounds.len() * 99 / 100], flooded)
    };
    let ((calm, none), (flooded, packets)) = (p99(false), p99(true));
    assert!((none, packets >= 300 * PER_ROUND) == (0, true), "{packets}");
    assert!(flooded <= 2 * calm, "{flooded} rounds instead of {calm}");
}

/// Of types as of small messages: who has not proved itself, may not send here or has not the key is not heard. Who was asked for may send.
#[test]
fn packets_of_a_type_come_from_whom_small_messages_come() {
    let cases = [
        ([None; 2], 0, true),
        ([Some(1); 2], 0, true),
        ([None; 2], 8, false),
        ([Some(2), Some(1)], 0, false),
        ([None, Some(1)], 0, false),
    ];
    for ((keys, allowed, may_send), is_asked_for) in
        cases.into_iter().flat_map(|case| [(case, false), (case, true)])
    {
        let mut bed = Bed::new(&BedConfig {
            keys,
            ..BedConfig::default()
        });
        let allow = vec![(ip(allowed), 32)];
        bed.hosts[1].admission.introductions = Introductions::new(&mut Entropy::Seeded(1), allow);
        let samples = receive(&mut bed, true);
        let (peer, asked_for) = (bed.resolve(0), is_asked_for.then(|| bed.resolve(1)));
        if let Some(peer) = asked_for {
            bed.hosts[1].peers.at(peer.index).wanted = true;
        }
        let to_host_1 = bed.hosts[0].peers.at(peer.index).addressing;
        let header = LmHeader::Extension {
            packet_type: TYPE_REALTIME,
            key: 7,
            words: [1, 0, 0],
        };
        let packet = lm_packet(&to_host_1, &header, &payload(1));
        let takes = |bed: &mut Bed| {
            bed.wire.inject(1, 0, &packet);
            bed.rounds(3);
            lock(&samples).kept.remove(&1).is_some()
        };
        assert!(!takes(&mut bed), "{keys:?} {allowed}: nobody has proved itself");
        bed.send(0, peer, b"small", 7);
        let is_heard = bed.completion(0).outcome == Outcome::Delivered;
        assert_eq!(
            is_heard,
            may_send || (is_asked_for && allowed != 0),
            "{keys:?} {allowed}"
        );
        assert_eq!(takes(&mut bed), is_heard, "{keys:?} {allowed}");
    }
}

/// A handler that keeps all that comes is refused more than half of the frames, and messages still come.
#[test]
fn a_handler_that_keeps_all_leaves_half_of_the_frames() {
    let mut bed = Bed::new(&BedConfig::default());
    let peer = bed.resolve(0);
    bed.exchange(0, peer, &noise(1, 100));
    let samples = receive(&mut bed, true);
    for number in 0..GENERAL_FRAMES {
        let packet = sample(&mut bed, 0, number);
        bed.wire.inject(1, 0, &packet);
        bed.rounds(1);
    }
    {
        let samples = lock(&samples);
        let half = GENERAL_FRAMES / 2;
        assert_eq!((samples.kept.len() as u32, samples.refused), (half, half));
        assert!((samples.kept.iter()).all(|(number, message)| message[..] == payload(*number)));
    }
    for number in 0..100 {
        bed.exchange(0, peer, &noise(number, 1000));
    }
    lock(&samples).kept.clear();
    bed.rounds(2);
    let packet = sample(&mut bed, 0, 1);
    bed.wire.inject(1, 0, &packet);
    bed.rounds(2);
    assert_eq!(lock(&samples).kept.len(), 1);
}

/// The small messages that have come to the second host.
fn taken(bed: &mut Bed) -> impl Iterator<Item = Message> {
    std::iter::from_fn(|| bed.hosts[1].take_message().expect("reliable"))
}

/// However many small messages the application holds, a handler has the frames that are reserved for it; those that find none left come
/// when it has given some back.
#[test]
fn what_is_reserved_for_a_handler_no_message_takes() {
    const FRAMES: u32 = 1000;
    let mut bed = Bed::new(&BedConfig::default());
    let peer = bed.resolve(0);
    bed.exchange(0, peer, &noise(1, 100));
    let samples = Shared::<Samples>::default();
    let receiver = Receiver {
        samples: Arc::clone(&samples),
        keeps_all: true,
        from: None,
        due: None,
    };
    let handlers = &mut bed.hosts[1].small.handlers;
    let id = handlers
        .add(TYPE_REALTIME..=TYPE_REALTIME, Box::new(receiver))
        .expect("free");
    let small = &mut bed.hosts[1].small;
    let most = GENERAL_FRAMES / 2;
    assert_eq!(
        small.reserve(id, most + 1),
        Err(HandlerError::NoFrames { left: most })
    );
    small.reserve(id, FRAMES).expect("fewer than half");
    let (mut sent, mut held) = (0, Vec::new());
    for _ in 0..300 {
        while sent < u64::from(GENERAL_FRAMES) && bed.try_send(0, peer, &noise(sent, 100), sent).is_ok() {
            sent += 1;
        }
        bed.rounds(1);
        held.extend(taken(&mut bed));
    }
    assert!(
        sent > 2000 && held.len() as u32 <= GENERAL_FRAMES - FRAMES,
        "{sent} sent, {}",
        held.len()
    );
    for number in 0..FRAMES {
        let packet = sample(&mut bed, 0, number);
        bed.wire.inject(1, 0, &packet);
        bed.rounds(1);
        held.extend(taken(&mut bed));
    }
    {
        let samples = lock(&samples);
        assert_eq!((samples.kept.len() as u32, samples.refused), (FRAMES, 0));
        assert!((samples.kept.iter()).all(|(number, message)| message[..] == payload(*number)));
    }
    assert!(bed.hosts[1].counters.drops.eager_no_frame > 0);
    // All come as there is room again.
    let mut came = held.len() as u64;
    drop(held);
    for _ in 0..5000 {
        bed.rounds(1);
        came += taken(&mut bed).count() as u64;
        if came == sent {
            break;
        }
    }
    assert_eq!(came, sent);
    bed.hosts[1].small.remove_handler(id).expect("it was there");
    assert_eq!(bed.hosts[1].small.reserve(id, 1), Err(HandlerError::Unknown));
}

#[test]
fn a_type_has_one_handler_and_the_engines_own_have_none() {
    let mut bed = Bed::new(&BedConfig::default());
    let handlers = &mut bed.hosts[0].small.handlers;
    let handler = || {
        Box::new(Reports {
            samples: Shared::default(),
            newest: 0,
        })
    };
    for types in [7..=8, 13..=14, 0..=0, RangeEmpty::EMPTY] {
        let error = handlers.add(types.clone(), handler()).unwrap_err();
        assert_eq!(error, HandlerError::NotForHandlers { types });
    }
    let id = handlers.add(8..=10, handler()).expect("free");
    let taken = HandlerError::Taken { packet_type: 10 };
    assert_eq!(handlers.add(10..=11, handler()), Err(taken));
    handlers.add(11..=13, handler()).expect("free");
    handlers.remove(id).expect("it was there");
    handlers.add(8..=10, handler()).expect("free again");
}

struct RangeEmpty;

impl RangeEmpty {
    #[allow(clippy::reversed_empty_ranges)]
    const EMPTY: std::ops::RangeInclusive<u8> = 9..=8;
}
