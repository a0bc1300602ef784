//! Packets of a flow that is not the engine's own: they leave in time beside eight sessions, with their own frames and descriptors.
#![cfg(test)]

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard};

use lm_protocol::geometry::Wire as WireMode;
use lm_protocol::time::Time;
use lm_protocol::wire::ipv4::checksum;
use lm_protocol::wire::lm::{HEADER_LEN, TYPE_CONTROL, TYPE_DATA, TYPE_REALTIME, VERSION};

use super::bed::{Bed, BedConfig, ROUND_NS as BED_ROUND_NS, TWO_QUEUES, data_address, noise};
use super::fairness::{LEN, PACKETS, RECEIVERS, ROUND_NS, SHARED, ask, bed, bed_that, keep_full, received};
use crate::bounds::TRANSMIT_BURST;
use crate::completion::PeerId;
use crate::opening::Queues;
use crate::scheduler::{Class, Flow, FlowError, FlowSpec, RateLimit, Scope, TxBatch};
use crate::simnic::Delivery;

const PAYLOAD_LEN: usize = 200;
/// One packet in each round of the link: 5 % of it.
const PERIOD_NS: u64 = ROUND_NS + BED_ROUND_NS;
/// How long the link takes for a packet.
const PACKET_NS: u64 = PERIOD_NS / PACKETS as u64;

/// What a flow did, and what the wire saw of it.
#[derive(Debug, Default)]
struct Log {
    /// When the link begins to take packets, and how many it has taken since.
    now_ns: u64,
    crossed: u64,
    /// When each packet was due, by its number, and how long it took to the wire.
    due: Vec<u64>,
    waits: Vec<u64>,
    /// Tokens in the order of their completions, and how many have none.
    sent: Vec<u64>,
    unknown: u32,
    fragments: u64,
    /// Of these, those before the flow's last packet.
    behind: u64,
    /// Control packets since the link began, and most of them before one of the flow's.
    control: u32,
    control_before: u32,
}

type Shared = Arc<Mutex<Log>>;

fn lock(log: &Shared) -> MutexGuard<'_, Log> {
    log.lock().expect("one thread")
}

/// A packet each period, at another moment of it each time; or as many as it may, all the time.
struct Pulse {
    log: Shared,
    next_due: Option<Time>,
    is_greedy: bool,
    free: VecDeque<u32>,
}

impl Pulse {
    fn new(log: &Shared, now_ns: u64, spec: &FlowSpec, is_greedy: bool) -> Box<Pulse> {
        Box::new(Pulse {
            log: Arc::clone(log),
            next_due: Some(Time::from_nanos(now_ns)),
            is_greedy,
            free: (0..spec.frames).collect(),
        })
    }

    fn advance(&mut self, due: Time) {
        if !self.is_greedy {
            // A number that has nothing in common with the period.
            let jitter_ns = due.as_nanos() * 7919 % (PERIOD_NS / 2);
            let period = due.as_nanos() / PERIOD_NS + 1;
            self.next_due = Some(Time::from_nanos(period * PERIOD_NS + jitter_ns));
        }
    }
}

/// Puts the next packet, which was due then, into a frame.
fn put(log: &mut Log, frame: u32, due: Time, out: &mut TxBatch<'_>) {
    let number = log.due.len() as u64;
    let payload = out.frame(frame).expect("a frame that is free");
    payload[..HEADER_LEN].fill(0);
    payload[0] = VERSION << 4 | TYPE_REALTIME;
    payload[2..4].copy_from_slice(&((PAYLOAD_LEN - HEADER_LEN) as u16).to_be_bytes());
    payload[4..12].copy_from_slice(&number.to_be_bytes());
    payload[HEADER_LEN..PAYLOAD_LEN].fill(number as u8);
    assert!(out.put(frame, PAYLOAD_LEN, number << 8 | u64::from(frame)));
    assert!(out.frame(frame).is_none(), "the device reads it");
    log.due.push(due.as_nanos());
}

impl Flow for Pulse {
    fn next(&mut self, budget: u32, now: Time, out: &mut TxBatch<'_>) {
        assert!(budget > 0 && budget == out.room());
        while let Some(due) = self.next_due.filter(|due| *due <= now)
            && out.room() > 0
            && let Some(frame) = self.free.pop_front()
        {
            put(&mut lock(&self.log), frame, due, out);
            self.advance(due);
        }
    }

    fn departs(&self) -> Option<Time> {
        self.next_due.filter(|_| !self.free.is_empty())
    }

    fn sent(&mut self, token: u64, at: Option<Time>) {
        self.free.push_back(token as u8 as u32);
        let mut log = lock(&self.log);
        log.sent.push(token >> 8);
        log.unknown += u32::from(at.is_none());
    }
}

/// Looks at what crosses: the n-th packet of a round crosses so many packets' time after it began.
fn watch(bed: &Bed) -> Shared {
    let log = Shared::default();
    let seen = Arc::clone(&log);
    bed.wire.set_filter(move |from, packet| {
        let mut log = lock(&seen);
        let at_ns = log.now_ns + log.crossed * PACKET_NS;
        log.crossed += 1;
        let kind = packet[42] & 0xf;
        if from == 0 && kind == TYPE_REALTIME {
            let number = u64::from_be_bytes(packet[46..54].try_into().expect("eight bytes"));
            assert_eq!(number, log.waits.len() as u64, "in order");
            assert_eq!(packet.len(), 42 + PAYLOAD_LEN);
            assert_eq!(
                (packet[15], checksum(&packet[14..34])),
                (0xb8, 0),
                "expedited forwarding"
            );
            assert!(packet[42 + HEADER_LEN..].iter().all(|byte| *byte == number as u8));
            log.control_before = log.control_before.max(log.control);
            let wait_ns = at_ns - log.due[number as usize];
            log.waits.push(wait_ns);
            log.behind = log.fragments;
        }
        assert!(
            kind == TYPE_REALTIME || packet[15] == 0,
            "nothing else is expedited"
        );
        log.control += u32::from(from == 0 && kind == TYPE_CONTROL);
        log.fragments += u64::from(from == 0 && kind == TYPE_DATA);
        true
    });
    log
}

fn spec(bed: &mut Bed) -> FlowSpec {
    let index = bed.hosts[0].peers.find(data_address(1)).expect("a peer");
    FlowSpec {
        to: Some(bed.hosts[0].peers.id_of(index)),
        frames: 16,
        descriptors: 16,
        messages: None,
    }
}

fn rounds(bed: &mut Bed, log: &Shared, count: u32, mut before: impl FnMut(&mut Bed)) {
    for _ in 0..count {
        before(bed);
        bed.now_ns += ROUND_NS;
        {
            let mut log = lock(log);
            (log.now_ns, log.crossed, log.control) = (bed.now_ns, 0, 0);
        }
        bed.wire.deliver(PACKETS);
        bed.round();
        received(bed);
    }
}

fn p99(waits: &[u64]) -> u64 {
    let mut sorted = waits.to_vec();
    sorted.sort_unstable();
    sorted[sorted.len() * 99 / 100]
}

/// p99 of a flow's waits while nothing else is sent, then under eight backlogged sessions, and fragments that crossed beside it.
fn waits(queues: [Queues; 2], adapts: bool) -> (u64, u64, u64) {
    let (mut bed, peers) = bed_that(queues, adapts);
    bed.wire.set_delivery(Delivery::Manual);
    let log = watch(&bed);
    let spec = spec(&mut bed);
    let flow = Pulse::new(&log, bed.now_ns, &spec, false);
    let id = bed.hosts[0].add_flow(&spec, flow).expect("room");
    rounds(&mut bed, &log, 2000, |_| {});
    let idle = p99(&lock(&log).waits);
    let before = lock(&log).waits.len();
    let payload = noise(1, LEN);
    rounds(&mut bed, &log, 4000, |bed| keep_full(bed, &peers, &payload));
    let (loaded, fragments, count) = {
        let log = lock(&log);
        (p99(&log.waits[before..]), log.fragments, log.due.len())
    };
    assert!(count > 5900, "{count} packets");
    bed.hosts[0].remove_flow(id).expect("it was there");
    rounds(&mut bed, &log, 100, |_| {});
    let log = lock(&log);
    // Those that the device had when the flow went are not told.
    assert!(log.sent.len() + 16 >= count && log.unknown == 0);
    assert!(log.sent.iter().copied().eq(0..log.sent.len() as u64), "in order");
    (idle, loaded, fragments)
}

/// *House rule of the scheduler*: a flow at 5 % of the link keeps its p99 within two bursts of its idle one under eight bulk sessions.
#[test]
fn a_flow_waits_for_no_more_than_two_bursts_under_eight_sessions() {
    for (queues, adapts) in [
        ([TWO_QUEUES; 2], false),
        (SHARED, false),
        ([TWO_QUEUES; 2], true),
        (SHARED, true),
    ] {
        let (idle, loaded, fragments) = waits(queues, adapts);
        let most = idle + 2 * u64::from(TRANSMIT_BURST) * PACKET_NS;
        assert!(loaded <= most, "{loaded} ns, idle {idle} ns");
        // The sessions have most of the rest of the link; their receivers' answers cross it, too.
        assert!(
            fragments > 4000 * u64::from(PACKETS) * 7 / 10,
            "{fragments} fragments"
        );
    }
}

/// A flow that always has something to send takes all that the port may send, and that is counted; with a shaper of its class it leaves
/// bulk the rest.
#[test]
fn a_flow_leaves_bulk_what_its_shaper_leaves() {
    const RATE: u64 = 1_000_000_000;
    let part = |shaped: bool| {
        let (mut bed, peers) = bed([TWO_QUEUES; 2]);
        bed.wire.set_delivery(Delivery::Manual);
        let log = watch(&bed);
        let spec = spec(&mut bed);
        let flow = Pulse::new(&log, bed.now_ns, &spec, true);
        bed.hosts[0].add_flow(&spec, flow).expect("room");
        let now = Time::from_nanos(bed.now_ns);
        let limit = |rate: u64, len| Box::new(RateLimit::new(rate.try_into().expect("not 0"), len, now));
        let scheduler = bed.hosts[0].sending.parts().0;
        scheduler.shape(Scope::Port, Some(limit(RATE, 1514)));
        if shaped {
            scheduler.shape(Scope::Class(Class::RealTime), Some(limit(RATE / 2, 242)));
        }
        let payload = noise(1, LEN);
        rounds(&mut bed, &log, 4000, |bed| keep_full(bed, &peers, &payload));
        let log = lock(&log);
        let all = RATE as f64 * 4000.0 * PERIOD_NS as f64 / 8e9;
        let real_time = log.waits.len() as f64 * (42 + PAYLOAD_LEN) as f64 / all;
        let bulk = log.fragments as f64 * 1514.0 / all;
        (real_time, bulk, bed.hosts[0].counters.classes_starved)
    };
    let (real_time, bulk, starved) = part(false);
    assert!(
        real_time > 0.9 && bulk < 0.05 && starved > 3,
        "{real_time} {bulk} {starved}"
    );
    let (real_time, bulk, starved) = part(true);
    assert!((0.45..=0.52).contains(&real_time), "{real_time}");
    assert!((0.4..=0.52).contains(&bulk) && starved == 0, "{bulk} {starved}");
}

/// Without a queue for small packets a flow sends on the landing queue's; what was on it when it is built anew is told, and its frames are
/// free.
#[test]
fn a_queue_that_is_built_anew_forgets_what_was_on_it() {
    let one = Queues {
        general: None,
        landing: Some(1),
    };
    let (mut bed, _) = bed([one, TWO_QUEUES]);
    bed.wire.set_delivery(Delivery::Manual);
    let spec = spec(&mut bed);
    let log = Shared::default();
    let flow = Pulse::new(&log, bed.now_ns, &spec, true);
    bed.hosts[0].add_flow(&spec, flow).expect("room");
    bed.poll(0);
    assert_eq!(counts(&log), (16, 0, 0));
    let len = bed.hosts[0]
        .landing
        .as_ref()
        .expect("a landing queue")
        .registered_len;
    bed.hosts[0].rebuild_landing(len).expect("memory");
    assert_eq!(counts(&log), (16, 16, 16));
    rounds(&mut bed, &log, 10, |_| {});
    let (_, sent, unknown) = counts(&log);
    assert!(sent > 32 && unknown == 16, "{sent} {unknown}");
}

/// How many packets were due, how many completions there were, and how many of these say that nobody knows.
fn counts(log: &Shared) -> (usize, usize, u32) {
    let log = lock(log);
    (log.due.len(), log.sent.len(), log.unknown)
}

/// Two flows that always have something to send have equal parts of what their class may.
#[test]
fn flows_take_turns() {
    let (mut bed, _) = bed([TWO_QUEUES; 2]);
    bed.wire.set_delivery(Delivery::Manual);
    let spec = spec(&mut bed);
    let logs = [Shared::default(), Shared::default()];
    for log in &logs {
        let flow = Pulse::new(log, bed.now_ns, &spec, true);
        bed.hosts[0].add_flow(&spec, flow).expect("room");
    }
    let rate = 1_000_000_000.try_into().expect("not 0");
    let limit = RateLimit::new(rate, 242, Time::from_nanos(bed.now_ns));
    let scope = Scope::Class(Class::RealTime);
    bed.hosts[0].sending.shape(scope, Some(Box::new(limit)));
    rounds(&mut bed, &logs[0], 2000, |_| {});
    let sent = logs.map(|log| lock(&log).sent.len() as f64);
    let share = (sent[0] + sent[1]) / 2.0;
    assert!(
        share > 5000.0 && sent.iter().all(|sent| (0.8..=1.25).contains(&(sent / share))),
        "{sent:?}"
    );
}

/// What is asked for in vain changes nothing; what a flow had comes back when the device has read it.
#[test]
fn frames_and_descriptors_are_a_flows_own() {
    let (mut bed, _) = bed([TWO_QUEUES; 2]);
    bed.wire.set_delivery(Delivery::Manual);
    let log = watch(&bed);
    let spec = spec(&mut bed);
    let now_ns = bed.now_ns;
    let engine = &mut bed.hosts[0];
    let mut refused = |spec: FlowSpec| {
        let flow = Pulse::new(&log, now_ns, &spec, true);
        engine.add_flow(&spec, flow).expect_err("too much")
    };
    let most = engine_limit();
    assert_eq!(refused(FlowSpec { frames: 0, ..spec }), FlowError::Empty);
    assert_eq!(
        refused(FlowSpec {
            frames: 1 << 20,
            ..spec
        }),
        FlowError::NoMemory
    );
    assert_eq!(
        refused(FlowSpec {
            descriptors: most + 1,
            ..spec
        }),
        FlowError::NoDescriptors { left: most }
    );
    assert_eq!(engine.sending.arena().live(), 0);
    let flows = [
        spec,
        FlowSpec {
            descriptors: most - 16,
            ..spec
        },
    ]
    .map(|spec| {
        let flow = Pulse::new(&log, now_ns, &spec, true);
        engine.add_flow(&spec, flow).expect("room")
    });
    assert_eq!(engine.sending.arena().live(), 2);
    bed.now_ns += ROUND_NS;
    bed.poll(0);
    // Nothing has crossed: all of their frames are with the device.
    assert_eq!(lock(&log).due.len(), 32);
    for id in flows {
        assert!(bed.hosts[0].remove_flow(id).is_some());
        assert!(bed.hosts[0].remove_flow(id).is_none());
    }
    assert_eq!(bed.hosts[0].sending.arena().live(), 2);
    rounds(&mut bed, &log, 8, |_| {});
    assert_eq!(bed.hosts[0].sending.arena().live(), 0);
    assert!(lock(&log).sent.is_empty());
    assert_eq!(lock(&log).waits.len(), 32);
    assert!(bed.hosts.len() > RECEIVERS);
}

/// Frames and descriptors may be kept before there is anybody to send to.
#[test]
fn a_flow_without_a_peer_waits_until_it_is_aimed() {
    let (mut bed, _) = bed([TWO_QUEUES; 2]);
    bed.wire.set_delivery(Delivery::Manual);
    let log = watch(&bed);
    let spec = spec(&mut bed);
    let flow = Pulse::new(&log, bed.now_ns, &spec, true);
    let nowhere = FlowSpec { to: None, ..spec };
    let id = bed.hosts[0].add_flow(&nowhere, flow).expect("room");
    assert_eq!(bed.hosts[0].sending.arena().live(), 1);
    rounds(&mut bed, &log, 3, |_| {});
    assert_eq!(counts(&log), (0, 0, 0));
    assert_eq!(bed.hosts[0].sending.parts().0.flows_depart(), None);
    let peer = spec.to.expect("a peer");
    bed.hosts[0].aim_flow(id, peer).expect("both are known");
    rounds(&mut bed, &log, 3, |_| {});
    assert!(counts(&log).0 > 16 && lock(&log).waits.len() > 16);
    bed.hosts[0].remove_flow(id).expect("it was there");
    assert_eq!(bed.hosts[0].aim_flow(id, peer), Err(FlowError::UnknownFlow));
}

/// A flow waits for two control packets at most, however many there are to send.
#[test]
fn control_lets_a_flow_pass_after_two_packets() {
    let (mut bed, _) = bed([TWO_QUEUES; 2]);
    bed.wire.set_delivery(Delivery::Manual);
    let log = watch(&bed);
    let spec = spec(&mut bed);
    let flow = Pulse::new(&log, bed.now_ns, &spec, false);
    bed.hosts[0].add_flow(&spec, flow).expect("room");
    let mut answers = 0;
    rounds(&mut bed, &log, 1000, |bed| {
        answers += lock(&log).control;
        (0..8).for_each(|_| ask(bed));
    });
    let log = lock(&log);
    assert!(
        answers > 5000 && log.waits.len() > 900,
        "{answers} {}",
        log.waits.len()
    );
    assert!(log.control_before <= 2, "behind {}", log.control_before);
}

/// *Port bound*: while a flow says how fast its link is, no ring has more of messages, of small ones neither, which bulk does not keep out.
/// Then rings have what they had.
#[test]
fn no_ring_has_more_of_messages_than_a_flow_allows() {
    const MOST: u32 = 4;
    for (queues, adapts) in [
        ([TWO_QUEUES; 2], false),
        (SHARED, false),
        ([TWO_QUEUES; 2], true),
        (SHARED, true),
    ] {
        let (mut bed, peers) = bed_that(queues, adapts);
        bed.wire.set_delivery(Delivery::Manual);
        let log = watch(&bed);
        let payload = noise(1, LEN);
        // Most descriptors on the ring that bulk has at the end of a round, most small messages at a time, and how many there were.
        let load = |bed: &mut Bed| {
            let (mut longest, mut at_once, mut small) = (0, 0, 0);
            // What was on the ring before has left soon.
            let mut round = 0;
            rounds(bed, &log, 400, |bed| {
                round += 1;
                let of_bulk = bed.hosts[0].sending.scheduler().queues().last().expect("a queue");
                let in_flight = of_bulk.in_flight();
                keep_full(bed, &peers, &payload);
                let sends = |peer: &&PeerId| bed.try_send(0, **peer, &payload[..64], 0).is_ok();
                // They go before bulk: not all the time.
                let tried = if round % 4 == 0 { 16 } else { 0 };
                let sent = peers.iter().cycle().take(tried).filter(sends).count();
                small += sent;
                if round > 20 {
                    (longest, at_once) = (longest.max(in_flight), at_once.max(sent));
                }
            });
            (longest, at_once as u32, small)
        };
        let (before, at_once, _) = load(&mut bed);
        assert!(before > 2 * MOST && at_once > 2 * MOST, "{before} {at_once}");
        let spec = FlowSpec {
            to: None,
            messages: Some(MOST),
            ..spec(&mut bed)
        };
        let flow = Pulse::new(&log, bed.now_ns, &spec, true);
        let id = bed.hosts[0].add_flow(&spec, flow).expect("room");
        let fragments = lock(&log).fragments;
        let (bounded, at_once, small) = load(&mut bed);
        assert!((1..=MOST).contains(&bounded), "{bounded}");
        assert!(
            (1..=MOST).contains(&at_once) && small > 50,
            "{at_once} of {small}"
        );
        assert!(
            lock(&log).fragments > fragments + 400,
            "{} {fragments}",
            lock(&log).fragments
        );
        bed.hosts[0].remove_flow(id).expect("it was there");
        let (after, at_once, _) = load(&mut bed);
        assert!(after >= before / 2 && at_once > 2 * MOST, "{after} {at_once}");
    }
}

/// Small messages go to and fro, so that a round that brought one ends with it: what was due before has left.
#[test]
fn a_flow_leaves_in_a_round_that_ends_with_a_message() {
    let mut bed = Bed::new(&BedConfig::default());
    let peers = [0, 1].map(|host| bed.resolve(host));
    for number in 0..4 {
        let from = number as usize % 2;
        bed.send(from, peers[from], &noise(number, 64), number);
        if number < 3 {
            drop(bed.recv(1 - from));
        }
    }
    let (log, spec) = (Shared::default(), spec(&mut bed));
    let flow = Pulse::new(&log, bed.now_ns, &spec, false);
    bed.hosts[0].add_flow(&spec, flow).expect("room");
    bed.now_ns += BED_ROUND_NS;
    bed.wire.advance(bed.now_ns);
    bed.poll(0);
    assert!(bed.hosts[0].told.has_message(), "the round ended with it");
    assert_eq!(counts(&log).0, 1);
}

/// Has a packet as soon as a fragment has crossed.
struct BehindFirst(Shared);

impl Flow for BehindFirst {
    fn next(&mut self, _: u32, _: Time, out: &mut TxBatch<'_>) {
        put(&mut lock(&self.0), 0, Time::ZERO, out);
    }

    fn departs(&self) -> Option<Time> {
        let log = lock(&self.0);
        (log.fragments > 0 && log.due.is_empty()).then_some(Time::ZERO)
    }

    fn sent(&mut self, _: u64, _: Option<Time>) {}
}

#[test]
fn a_flow_that_becomes_due_leaves_before_the_rest_of_a_burst() {
    let mut bed = Bed::new(&BedConfig::default());
    let peer = bed.session(0, WireMode::Lm, LEN as u64);
    let log = watch(&bed);
    let spec = spec(&mut bed);
    let flow = Box::new(BehindFirst(Arc::clone(&log)));
    bed.hosts[0].add_flow(&spec, flow).expect("room");
    bed.try_send(0, peer, &noise(1, LEN), 0).expect("room");
    drop(bed.recv(1));
    let behind = lock(&log).behind;
    assert!((1..=u64::from(TRANSMIT_BURST)).contains(&behind), "{behind}");
}

#[test]
fn fragments_are_taken_in_bursts_while_a_flow_is_due_and_else_all() {
    const LEN: usize = 200_000;
    let mut bed = Bed::new(&BedConfig::default());
    let peers = [0, 1].map(|host| bed.resolve(host));
    let peer = bed.session(0, WireMode::Lm, LEN as u64);
    bed.send(0, peer, &noise(1, LEN), 0);
    bed.alone(0, 2);
    bed.alone(1, 1);
    // As far as credit goes.
    bed.alone(0, 20);
    let spec = FlowSpec {
        to: Some(peers[1]),
        ..spec(&mut bed)
    };
    let now_ns = bed.now_ns;
    let receiver = &mut bed.hosts[1];
    let flow = Pulse::new(&Shared::default(), now_ns, &spec, true);
    let id = receiver.add_flow(&spec, flow).expect("room");
    assert_eq!(receiver.receive_landing(now_ns), TRANSMIT_BURST as usize);
    receiver.remove_flow(id).expect("it was there");
    assert!(receiver.receive_landing(now_ns) > 2 * TRANSMIT_BURST as usize);
}

/// A quarter of what the bed's queues may have in flight.
fn engine_limit() -> u32 {
    super::bed::BedConfig::default().tx_in_flight / 4
}
