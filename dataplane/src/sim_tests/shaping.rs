//! Shapers of a class and of a port: what eight sessions and small messages may send together, and which of them waits.
#![cfg(test)]

use std::num::NonZeroU64;
use std::sync::{Arc, Mutex};

use lm_protocol::time::Time;
use lm_protocol::wire::lm::{TYPE_DATA, TYPE_EAGER};

use super::bed::{Bed, ROUND_NS, TWO_QUEUES, noise};
use super::fairness::{LEN, PACKETS, RECEIVERS, bed, keep_full, received};
use crate::completion::PeerId;
use crate::scheduler::{Class, RateLimit, Scope};
use crate::simnic::Delivery;

const RATE: u64 = 1_000_000_000;
const FULL_LEN: u16 = 1514;
/// What may leave at once: a millisecond's worth.
const BURST: u64 = RATE / 1000 / 8;
const TIME_NS: u64 = 100_000_000;

/// What crossed from host 0, in bytes.
#[derive(Clone, Copy, Debug, Default)]
struct Crossed {
    fragments: u64,
    small: u64,
    control: u64,
}

fn watch(bed: &Bed) -> Arc<Mutex<Crossed>> {
    let crossed = Arc::new(Mutex::new(Crossed::default()));
    let counted = Arc::clone(&crossed);
    bed.wire.set_filter(move |from, packet| {
        let mut crossed = counted.lock().expect("one thread");
        if from == 0 {
            match packet[42] & 0xf {
                TYPE_DATA => crossed.fragments += packet.len() as u64,
                TYPE_EAGER => crossed.small += packet.len() as u64,
                _ => crossed.control += packet.len() as u64,
            }
        }
        true
    });
    crossed
}

fn shape(bed: &mut Bed, scope: Scope, rate: u64) {
    let rate = NonZeroU64::new(rate).expect("more than nothing");
    let limit = RateLimit::new(rate, FULL_LEN, Time::from_nanos(bed.now_ns));
    bed.hosts[0].sending.shape(scope, Some(Box::new(limit)));
}

/// Eight sessions with more to send than they may, and small messages to the first of their receivers if `small` says so.
fn run(bed: &mut Bed, peers: &[PeerId], small: bool) -> Crossed {
    shares(bed, peers, small).0
}

/// The same, with what each receiver got of all, where an equal share is 1.
fn shares(bed: &mut Bed, peers: &[PeerId], small: bool) -> (Crossed, [f64; RECEIVERS]) {
    bed.wire.set_delivery(Delivery::Manual);
    let mut bytes = [0; RECEIVERS];
    let crossed = watch(bed);
    let payload = noise(1, LEN);
    for _ in 0..TIME_NS / ROUND_NS {
        keep_full(bed, peers, &payload);
        while small && bed.try_send(0, peers[0], &payload[..1000], 0).is_ok() {}
        bed.wire.deliver(PACKETS);
        bed.round();
        (bytes.iter_mut().zip(received(bed))).for_each(|(bytes, more)| *bytes += more);
    }
    let crossed = *crossed.lock().expect("one thread");
    let share = bytes.iter().sum::<usize>() as f64 / RECEIVERS as f64;
    (crossed, bytes.map(|bytes| bytes as f64 / share))
}

fn part_of_rate(bytes: u64) -> f64 {
    bytes as f64 * 8.0 * 1e9 / (RATE as f64 * TIME_NS as f64)
}

#[test]
fn a_class_keeps_to_its_rate_and_others_do_not_pay_for_it() {
    let (mut bed, peers) = bed([TWO_QUEUES; 2]);
    shape(&mut bed, Scope::Class(Class::Bulk), RATE);
    let crossed = run(&mut bed, &peers, true);
    let most = RATE / 8 * TIME_NS / 1_000_000_000 + BURST;
    assert!(crossed.fragments <= most, "{crossed:?}");
    assert!(part_of_rate(crossed.fragments) >= 0.95, "{crossed:?}");
    assert!(part_of_rate(crossed.small) > 1.0, "{crossed:?}");
    assert_eq!(bed.hosts[0].counters.classes_starved, 0);
}

#[test]
fn a_port_keeps_to_its_rate_with_all_that_leaves() {
    let (mut bed, peers) = bed([TWO_QUEUES; 2]);
    shape(&mut bed, Scope::Port, RATE);
    let (crossed, shares) = shares(&mut bed, &peers, false);
    assert!(
        shares.iter().all(|share| (0.8..=1.25).contains(share)),
        "{shares:.2?}"
    );
    let all = crossed.fragments + crossed.small + crossed.control;
    let most = RATE / 8 * TIME_NS / 1_000_000_000 + BURST;
    assert!(all <= most && part_of_rate(all) >= 0.95, "{crossed:?}");
    assert!(crossed.control > 0, "{crossed:?}");
    assert_eq!(bed.hosts[0].counters.classes_starved, 0);
}

/// A round brings the port less than a full packet: small messages without end take all that the port may send, and that is counted; with a shaper of their own they leave bulk the rest.
#[test]
fn a_class_leaves_the_next_one_what_its_shaper_leaves() {
    let (mut starving, peers) = bed([TWO_QUEUES; 2]);
    shape(&mut starving, Scope::Port, RATE);
    let crossed = run(&mut starving, &peers, true);
    assert!(part_of_rate(crossed.small) >= 0.9, "{crossed:?}");
    assert!(part_of_rate(crossed.fragments) <= 0.02, "{crossed:?}");
    assert!(starving.hosts[0].counters.classes_starved >= 5);

    let (mut fed, peers) = bed([TWO_QUEUES; 2]);
    shape(&mut fed, Scope::Port, RATE);
    shape(&mut fed, Scope::Class(Class::Small), RATE / 4);
    let crossed = run(&mut fed, &peers, true);
    let (small, bulk) = (part_of_rate(crossed.small), part_of_rate(crossed.fragments));
    assert!(
        (0.2..=0.27).contains(&small) && (0.65..=0.76).contains(&bulk),
        "{crossed:?}"
    );
    assert_eq!(fed.hosts[0].counters.classes_starved, 0);
}

/// Who sleeps wakes when the port lets the next packet go.
#[test]
fn the_next_departure_is_known() {
    let (mut bed, peers) = bed([TWO_QUEUES; 2]);
    shape(&mut bed, Scope::Port, RATE);
    keep_full(&mut bed, &peers, &noise(1, LEN));
    let departure_ns = (0..1000).find_map(|_| {
        bed.round();
        bed.hosts[0].next_departure_ns()
    });
    let departure_ns = departure_ns.expect("more to send than may leave");
    let wait_ns = departure_ns - bed.now_ns;
    assert!(wait_ns > 0 && wait_ns < 20_000, "{wait_ns} ns");
    let before = bed.hosts[0].counters.data_packets_sent;
    let mut sent_at = |now_ns: u64| {
        bed.now_ns = now_ns;
        bed.poll(0);
        bed.hosts[0].counters.data_packets_sent - before
    };
    assert_eq!(sent_at(departure_ns - 1), 0);
    assert_eq!(sent_at(departure_ns), 1);
}
