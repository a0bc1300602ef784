//! Sessions whose packets do not reach the landing queue: they go on by the one-copy path, and only they.
#![cfg(test)]

use lm_ebpf::Verdict;
use lm_protocol::geometry::Wire as WireMode;

use super::bed::{Bed, BedConfig, noise, wire_of};
use crate::completion::{Outcome, PeerId};
use crate::simnic::{Semantics, ZeroCopy};

const LEN: usize = 900_000;
const COUNT: u64 = LEN.div_ceil(1448) as u64;

/// From now on `host`'s fragments leave on the transmit queue whose packets reach the receiver's queue of the same number.
fn send_on_queue(bed: &mut Bed, host: usize, peer: PeerId, queue: u32) {
    let engine = &mut bed.hosts[host];
    let channel = engine.sending.scheduler().find(queue).expect("a channel");
    let outbound = engine.peers.at(peer.index).outbound.as_mut();
    outbound.expect("a session").terms.channel = channel;
}

/// A receiver that is wrong about the way to its landing queue: everything comes by another one. What was posted is taken back once;
/// from then on each fragment is copied to its place as it comes.
#[test]
fn a_session_that_never_reaches_the_landing_queue_is_copied() {
    // With a receive ring as long as drivers have them.
    let device = ZeroCopy {
        ring_len: 256,
        ..ZeroCopy::default()
    };
    for semantics in [Semantics::Copy, Semantics::ZeroCopy(device)] {
        for len in [3 * 1448, 100_000, LEN] {
            let mut bed = Bed::new(&BedConfig {
                wire: wire_of(semantics),
                ..BedConfig::default()
            });
            bed.hosts[1].fixed.receives.tx_queue = Some(3);
            let peer = bed.session(0, WireMode::Lm, LEN as u64);
            for number in 0..40 {
                bed.exchange(0, peer, &noise(number, len));
            }
            let counters = bed.hosts[1].counters;
            assert_eq!(counters.messages_incomplete, 0);
            assert_eq!(counters.sessions_astray, 1, "{len} bytes");
            assert_eq!(counters.landing_rebuilt, 1, "{len} bytes");
            assert_eq!(counters.landing_packets, 0);
            assert_eq!(bed.hosts[1].notices.lines, 1);
            // From then on nothing is held aside: each byte is copied once.
            let before = counters.user_copied_bytes;
            for number in 0..5 {
                bed.exchange(0, peer, &noise(number, len));
            }
            let copied = bed.hosts[1].counters.user_copied_bytes - before;
            assert_eq!(copied, 5 * len as u64, "{len} bytes");
            bed.check_memory();
            // Those behind it find the landing queue as it should be.
            bed.hosts[1].fixed.receives.tx_queue = Some(1);
            let peer = bed.session(0, WireMode::Lm, LEN as u64);
            bed.exchange(0, peer, &noise(1, LEN));
            assert_eq!(bed.hosts[1].counters.landing_packets, COUNT);
            bed.check_memory();
        }
    }
}

/// Beside it others land as if it were not there.
#[test]
fn others_go_on_landing() {
    let mut bed = Bed::switch(&BedConfig::default(), 4);
    bed.hosts[0].fixed.receives.tx_queue = Some(3);
    let astray = bed.session(1, WireMode::Lm, LEN as u64);
    bed.hosts[0].fixed.receives.tx_queue = Some(1);
    let landing = [2, 3].map(|host| (host, bed.session(host, WireMode::Lm, LEN as u64)));
    let all = [(1, astray), landing[0], landing[1]];
    let round = |bed: &mut Bed, number: u64| {
        for (host, peer) in all {
            bed.send(host, peer, &noise(100 * host as u64 + number, LEN), host as u64);
        }
        for _ in all {
            let message = bed.recv(0);
            let expected = noise(100 * message.tag() + number, LEN);
            assert!(
                message[..] == expected[..],
                "host {}, message {number}",
                message.tag()
            );
        }
    };
    (0..2).for_each(|number| round(&mut bed, number));
    let before = bed.hosts[0].counters;
    assert_eq!((before.sessions_astray, before.landing_rebuilt), (1, 1));
    (2..12).for_each(|number| round(&mut bed, number));
    let after = bed.hosts[0].counters;
    assert_eq!((after.sessions_astray, after.landing_rebuilt), (1, 1));
    assert_eq!(after.landing_packets - before.landing_packets, 2 * 10 * COUNT);
    assert_eq!(after.fragments_one_copy - before.fragments_one_copy, 10 * COUNT);
    assert_eq!(after.fragments_displaced, before.fragments_displaced);
    assert_eq!(after.fragments_requested, before.fragments_requested);
    for (host, _) in all {
        assert!((0..12).all(|_| bed.completion(host).outcome == Outcome::Delivered));
    }
    bed.check_memory();
}

/// One that landed is believed once more, because it may be the gate that expects others. When the way to the landing queue opens again,
/// the gate admits nothing of it.
#[test]
fn a_way_that_changes_later() {
    let mut bed = Bed::new(&BedConfig::default());
    let peer = bed.session(0, WireMode::Lm, LEN as u64);
    // Opens a channel to the general queue.
    bed.exchange(0, peer, b"small");
    bed.exchange(0, peer, &noise(0, LEN));
    assert_eq!(bed.hosts[1].counters.landing_packets, COUNT);
    send_on_queue(&mut bed, 0, peer, 0);
    for number in 1..20 {
        bed.exchange(0, peer, &noise(number, LEN));
    }
    let counters = bed.hosts[1].counters;
    assert_eq!((counters.sessions_astray, counters.landing_rebuilt), (1, 2));
    send_on_queue(&mut bed, 0, peer, 1);
    for number in 20..40 {
        bed.exchange(0, peer, &noise(number, LEN));
    }
    let counters = bed.hosts[1].counters;
    assert_eq!((counters.sessions_astray, counters.landing_rebuilt), (1, 2));
    assert_eq!(counters.landing_packets, COUNT);
    let gate = bed.hosts[1].port.gate_counters();
    assert!(gate.get(Verdict::PassLimit) >= 20 * COUNT);
    bed.check_memory();
}

/// Answers to requests come to the socket while entries are posted, as many as were lost: that says nothing about the way.
#[test]
fn what_is_asked_for_keeps_landing() {
    const LOST: u64 = 120;
    let mut bed = Bed::new(&BedConfig::default());
    let peer = bed.session(0, WireMode::Lm, LEN as u64);
    bed.exchange(0, peer, &noise(0, LEN));
    // What comes behind them lands, so that the gate admits none of them any more.
    let mut fragments = 0;
    bed.wire.set_filter(move |from, packet| {
        let is_fragment = from == 0 && packet.len() > 1000;
        fragments += u64::from(is_fragment);
        !is_fragment || !(COUNT - LOST - 2..COUNT - 2).contains(&fragments)
    });
    (1..4).for_each(|number| bed.exchange(0, peer, &noise(number, LEN)));
    let counters = bed.hosts[1].counters;
    assert!(counters.fragments_one_copy >= LOST, "{counters:?}");
    assert_eq!((counters.sessions_astray, counters.landing_rebuilt), (0, 0));
    assert_eq!(counters.landing_packets + counters.fragments_one_copy, 4 * COUNT);
    bed.check_memory();
}

/// Whoever sleeps finds what landed and what did not at once, however long it was. What landed speaks for the way.
#[test]
fn a_receiver_that_sleeps_keeps_landing() {
    let mut bed = Bed::new(&BedConfig::default());
    let peer = bed.session(0, WireMode::Lm, LEN as u64);
    for number in 0..30 {
        let payload = noise(number, LEN);
        bed.send(0, peer, &payload, number);
        let message = loop {
            bed.alone(0, 50);
            bed.now_ns += 20_000_000;
            bed.alone(1, 1);
            if let Some(message) = bed.hosts[1].take_message().expect("no failure") {
                break message;
            }
        };
        assert!(message[..] == payload[..]);
        drop(message);
        assert_eq!(bed.completion(0).outcome, Outcome::Delivered);
    }
    let counters = bed.hosts[1].counters;
    assert_eq!((counters.sessions_astray, counters.landing_rebuilt), (0, 0));
    assert_eq!(counters.landing_packets, 30 * COUNT);
}
