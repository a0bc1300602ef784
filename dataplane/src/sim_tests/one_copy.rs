//! Sessions by the one-copy path.
#![cfg(test)]

use std::time::Duration;

use lm_ebpf::Verdict;
use lm_protocol::control::RejectReason;
use lm_protocol::delivery::Delivery;
use lm_protocol::geometry::Wire as WireMode;

use super::bed::{BATCHED, Bed, BedConfig, noise, wire_of};
use super::transfer::Dice;
use crate::completion::Outcome;
use crate::connect::{ConnectError, ConnectOptions};
use crate::simnic::{Impairments, Semantics};

fn one_copy(len: u64) -> ConnectOptions {
    ConnectOptions {
        one_copy: true,
        max_message_len: len,
        ..ConnectOptions::default()
    }
}

fn config(semantics: Semantics) -> BedConfig {
    BedConfig {
        wire: wire_of(semantics),
        ..BedConfig::default()
    }
}

const BOTH: [Semantics; 2] = [Semantics::Copy, Semantics::ZeroCopy(BATCHED)];

#[test]
fn messages_of_every_length_arrive_and_the_gate_admits_none() {
    for semantics in BOTH {
        let mut bed = Bed::new(&config(semantics));
        let peer = bed.connect(0, &one_copy(900_000)).expect("a session");
        for len in [1, 1448, 1449, 7168, 100_000, 524_288, 900_000] {
            bed.exchange(0, peer, &noise(len, len as usize));
        }
        bed.check_clean();
        bed.check_memory();
        let receiver = &bed.hosts[1];
        assert_eq!(receiver.counters.violations.total(), 0);
        assert_eq!(receiver.counters.landing_rebuilt, 0);
        let gate = receiver.port.gate_counters();
        assert_eq!(gate.get(Verdict::RedirectLanding), 0);
        assert!(gate.get(Verdict::PassNoSession) > 1000);
        let now_ns = bed.now_ns;
        bed.hosts[0].end_session(peer.index, now_ns);
        bed.pass(Duration::from_millis(20));
        assert_eq!(bed.hosts[1].counters.sessions_ended, 1);
        assert!(!bed.hosts[0].is_leaving());
        bed.check_memory();
    }
}

/// Beside a session that lands, and however many more: they take nothing of it.
#[test]
fn they_stand_beside_a_session_that_lands() {
    for semantics in BOTH {
        let mut bed = Bed::switch(&config(semantics), 4);
        let landing = bed.session(1, WireMode::Lm, 900_000);
        let others: Vec<_> = [2, 3]
            .map(|host| (host, bed.connect(host, &one_copy(300_000)).expect("a session")))
            .into();
        for round in 0..6 {
            bed.send(1, landing, &noise(round, 900_000), round);
            for &(host, peer) in &others {
                bed.send(host, peer, &noise(100 + round, 300_000), 100 + round);
            }
            for _ in 0..3 {
                let message = bed.recv(0);
                let len = if message.tag() < 100 { 900_000 } else { 300_000 };
                assert!(
                    message[..] == noise(message.tag(), len)[..],
                    "message {}",
                    message.tag()
                );
            }
        }
        for host in [1, 2, 3] {
            assert!((0..6).all(|_| bed.completion(host).outcome == Outcome::Delivered));
        }
        // The gate's session ends, theirs go on.
        let now_ns = bed.now_ns;
        bed.hosts[1].end_session(landing.index, now_ns);
        bed.pass(Duration::from_millis(20));
        for &(host, peer) in &others {
            bed.send(host, peer, &noise(7, 300_000), 7);
            assert!(bed.recv(0)[..] == noise(7, 300_000)[..]);
        }
    }
}

/// Datagrams that wait behind those of others are not asked for again, however slowly the socket is read.
#[test]
fn what_waits_in_the_socket_is_not_lost() {
    let mut bed = Bed::switch(&config(Semantics::Copy), 8);
    let peers: Vec<_> = (1..8)
        .map(|host| (host, bed.connect(host, &one_copy(300_000)).expect("a session")))
        .collect();
    for round in 0..10 {
        for &(host, peer) in &peers {
            let token = bed.try_send(host, peer, &noise(round, 300_000), round);
            assert!(token.is_ok(), "{token:?}");
        }
        let mut received = 0;
        while received < peers.len() {
            for host in 1..8 {
                bed.alone(host, 2);
            }
            bed.now_ns += 400_000;
            bed.alone(0, 1);
            while let Some(message) = bed.hosts[0].take_message().expect("no failure") {
                assert!(message[..] == noise(round, 300_000)[..]);
                received += 1;
            }
        }
        for &(host, _) in &peers {
            assert_eq!(bed.completion(host).outcome, Outcome::Delivered);
        }
    }
    let counters = bed.hosts[0].counters;
    assert_eq!(counters.fragments_requested, 0);
    assert_eq!(counters.fragments_one_copy, 10 * 7 * 300_000u64.div_ceil(1448));
}

/// Losses are repeated; without repetition everything is settled; and nothing leaks.
#[test]
fn seeded_impairments() {
    for seed in 0..60 {
        let mut dice = Dice(seed + 1);
        let mut bed = Bed::new(&config(BOTH[seed as usize % 2]));
        for host in 0..2 {
            let impairments = Impairments {
                seed: 2 * seed + host,
                loss_ppm: 20_000,
                duplicate_ppm: 20_000,
                reorder_ppm: 50_000,
                reorder_packets_max: 5,
                reorder_hold_max_ns: 500_000,
                corrupt_ppm: 10_000,
                ..Impairments::default()
            };
            bed.wire.impair(host as usize, impairments);
        }
        let delivery = [Delivery::Reliable, Delivery::Partial, Delivery::Unreliable][seed as usize % 3];
        let options = ConnectOptions {
            delivery,
            timeout: Duration::from_secs(20),
            ..one_copy(300_000)
        };
        let peer = bed.connect(0, &options).expect("a session");
        for number in 0..6 {
            let len = 1500 + dice.roll(290_000) as usize;
            let payload = noise(number, len);
            bed.send(0, peer, &payload, number);
            let outcome = bed.completion(0).outcome;
            match bed.hosts[1].take_message() {
                Ok(Some(message)) if message.missing().is_empty() => {
                    assert!(message[..] == payload[..], "seed {seed}, message {number}");
                    assert_eq!(message.tag(), number);
                }
                Ok(Some(_)) => assert_eq!(delivery, Delivery::Partial, "seed {seed}"),
                Ok(None) | Err(_) => assert!(delivery != Delivery::Reliable, "seed {seed}: {outcome:?}"),
            }
        }
        bed.pass(Duration::from_millis(200));
        bed.check_memory();
    }
}

/// What cannot be is refused, and a sender that dies frees what it had.
#[test]
fn refusals_and_ends() {
    let mut bed = Bed::new(&BedConfig {
        lease: Duration::from_millis(500),
        ..BedConfig::default()
    });
    let ipfrag = ConnectOptions {
        wire: WireMode::IpFrag,
        ..one_copy(60_000)
    };
    for (options, expected) in [
        (ipfrag, RejectReason::Unsupported),
        (one_copy(1 << 40), RejectReason::TooLarge),
    ] {
        match bed.connect(0, &options) {
            Err(ConnectError::Rejected { reason, .. }) => assert_eq!(reason, expected),
            other => panic!("{other:?}"),
        }
    }
    let peer = bed.connect(0, &one_copy(300_000)).expect("a session");
    bed.wire
        .set_filter(|from, packet| from == 1 || packet.len() < 1000);
    bed.send(0, peer, &noise(1, 300_000), 1);
    bed.pass(Duration::from_millis(20));
    bed.wire.set_filter(|from, _| from == 1);
    bed.pass(Duration::from_secs(4));
    assert_eq!(bed.hosts[1].counters.sessions_ended, 1);
    assert!(bed.hosts[1].take_message().is_err());
    let landing = bed.hosts[1].landing.as_ref().expect("a landing side");
    assert_eq!(landing.arena.live(), 0);
    assert!(landing.sessions.is_empty());
}
