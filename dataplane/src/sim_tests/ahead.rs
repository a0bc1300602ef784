//! Messages that come unannounced, in open entries.
#![cfg(test)]

use std::collections::VecDeque;
use std::time::Duration;

use lm_protocol::geometry::Wire as WireMode;
use lm_protocol::manifest::FragmentHasher;
use lm_protocol::wire::lm::{Facts, TYPE_DATA};
use zerocopy::IntoBytes;

use super::bed::{Bed, BedConfig, data_address, noise, wire_of};
use super::integrity::kind;
use crate::completion::{Outcome, PeerId};
use crate::connect::ConnectOptions;
use crate::message::Message;
use crate::mutants::{Mutant, PUT_IN};
use crate::simnic::{Semantics, ZeroCopy};

/// Devices that copy, that write before packets, and that take whole laps.
const DEVICES: [Semantics; 3] = [
    Semantics::Copy,
    Semantics::ZeroCopy(ZeroCopy {
        batch: 16,
        ring_len: 256,
        burst: 8,
        prefix_len: 12,
        pad_to: 0,
        lap: 1,
    }),
    Semantics::ZeroCopy(ZeroCopy {
        batch: 16,
        ring_len: 256,
        burst: 64,
        prefix_len: 0,
        pad_to: 0,
        lap: 256,
    }),
];

fn on(device: Semantics) -> BedConfig {
    BedConfig {
        landing_len: 16 << 20,
        wire: wire_of(device),
        ..BedConfig::default()
    }
}

/// Two hosts with a session each way, that have exchanged a short message.
fn exchanging(config: &BedConfig) -> (Bed, [PeerId; 2]) {
    let mut bed = Bed::new(config);
    let peers = [0, 1].map(|host| bed.session(host, WireMode::Lm, 1 << 20));
    round_trip(&mut bed, peers, 7168);
    (bed, peers)
}

/// A message goes to the host at the other end, and another one back. Gives both.
fn round_trip(bed: &mut Bed, peers: [PeerId; 2], len: usize) -> [(Message, Vec<u8>); 2] {
    [0, 1].map(|from| one_way(bed, from, peers[from], len))
}

fn one_way(bed: &mut Bed, from: usize, peer: PeerId, len: usize) -> (Message, Vec<u8>) {
    let payload = noise(len as u64 * 2 + from as u64, len);
    bed.send(from, peer, &payload, 7);
    let message = bed.recv(1 - from);
    assert!(message[..] == *payload, "{len} bytes differ");
    (message, payload)
}

/// Messages of two to 64 fragments, to and fro, many regions long: each lands where it is shown, but those at a region's end.
#[test]
fn short_messages_land_without_asking() {
    DEVICES.into_iter().for_each(exchange_many);
}

fn exchange_many(device: Semantics) {
    let (mut bed, peers) = exchanging(&on(device));
    let (mut messages, mut fragments, mut foreign) = (0, 0, 0);
    let mut kept = VecDeque::new();
    for step in 0..800 {
        let len = 1449 + step * 1759 % 20_000;
        kept.extend(round_trip(&mut bed, peers, len));
        assert!(kept.iter().all(|(message, payload)| message[..] == payload[..]));
        kept.drain(..kept.len().saturating_sub(6));
        if step % 50 == 0 && device != Semantics::Copy {
            // As long as a chunk takes: 278 bytes of the slot above.
            bed.wire.inject(1, 1, &noise(step as u64, 1792));
            foreign += 1;
            bed.rounds(2);
        }
        messages += 1;
        fragments += (len + 64).div_ceil(1448) as u64 + 2;
    }
    drop(kept);
    bed.rounds(2);
    for host in &bed.hosts {
        let counters = &host.counters;
        assert_eq!(
            (counters.messages_ahead, counters.open_refused),
            (messages, 0),
            "{counters:?}"
        );
        assert!(
            counters.messages_ahead_copied <= fragments / 512 + 1,
            "{}",
            counters.messages_ahead_copied
        );
        assert!(counters.user_copied_bytes <= counters.messages_ahead_copied * 22_000);
    }
    assert_eq!(
        bed.hosts[1]
            .counters
            .drops
            .iter()
            .map(|(_, count)| count)
            .sum::<u64>(),
        foreign
    );
    end(&mut bed);
}

/// Facts that lie are none: their message is announced after all, and repeated.
#[test]
fn facts_that_lie_are_not_believed() {
    let lies: [fn(&mut Facts); 9] = [
        // Of this one the hash is not made to fit.
        |facts| facts.tag += 1,
        |facts| facts.len += 1,
        |facts| facts.len -= 3000,
        |facts| facts.len = u64::MAX.into(),
        |facts| facts.len = 0.into(),
        |facts| facts.message = facts.message.get().wrapping_add(1).into(),
        |facts| facts.message = facts.message.get().wrapping_sub(1).into(),
        |facts| facts.sent = facts.sent.get().wrapping_add(1).into(),
        |facts| facts.session_key = (facts.session_key.get() ^ 1).into(),
    ];
    for (number, lie) in lies.into_iter().enumerate() {
        let (mut bed, peers) = exchanging(&BedConfig::default());
        let hasher = FragmentHasher::new(bed.key(0, peers[0]));
        let mut lied = false;
        bed.wire.set_filter(move |from, packet| {
            let facts = packet.last_chunk_mut().filter(|_| from == 0 && !lied);
            if let Some(bytes) = facts
                && let Some(mut facts) = Facts::read(*bytes, &hasher)
            {
                lied = true;
                lie(&mut facts);
                let sealed = facts.seal(&hasher);
                let facts = if number == 0 { facts } else { sealed };
                bytes.copy_from_slice(facts.as_bytes());
            }
            true
        });
        // What was posted for a message whose packets were dropped is used by others'.
        for _ in 0..20 {
            round_trip(&mut bed, peers, 7168);
        }
        let counters = bed.hosts[1].counters;
        assert!(counters.drops.fragment_stale > 0, "lie {number}");
        assert_eq!(
            (counters.violations.total(), counters.messages_incomplete),
            (0, 0),
            "lie {number}"
        );
        end(&mut bed);
    }
}

/// An application that keeps short messages keeps regions, as far as the longest message has memory beside them; others are announced.
#[test]
fn kept_messages_leave_memory_to_others() {
    let (mut bed, peers) = exchanging(&BedConfig::default());
    let mut kept = Vec::new();
    while bed.hosts[1].counters.open_refused == 0 {
        let number = kept.len() as u64;
        bed.send(0, peers[0], &noise(number, 7168), number);
        kept.push(bed.recv(1));
        let arena = &bed.hosts[1].landing.as_ref().expect("landing").arena;
        assert!(arena.shared() as u64 <= arena.len() / (512 * 1448));
    }
    round_trip(&mut bed, peers, 1 << 20);
    assert!(
        kept.iter()
            .zip(0..)
            .all(|(message, number)| message[..] == noise(number, 7168)[..])
    );
    assert!(bed.hosts[1].counters.messages_ahead > 90, "{}", kept.len());
    drop(kept);
    end(&mut bed);
}

/// As many messages as there is credit for, at once: the device has an entry for each packet.
#[test]
fn credit_goes_no_further_than_entries() {
    for device in DEVICES {
        let (mut bed, peers) = exchanging(&on(device));
        for round in 0..40 {
            round_trip(&mut bed, peers, 7168);
            // The driver takes entries when packets come, and is known to have.
            bed.pass(Duration::from_micros(200));
            for number in 0..20 {
                bed.send(0, peers[0], &noise(number, 20_000), number);
            }
            for number in 0..20 {
                let message = bed.recv(1);
                assert!(message[..] == noise(number, 20_000)[..], "{round}");
            }
        }
        let counters = bed.hosts[1].counters;
        assert!(counters.messages_ahead > 40, "{counters:?}");
        let again = (counters.fragments_requested, counters.fragments_one_copy);
        assert_eq!(again, (0, 0), "{device:?} {counters:?}");
        end(&mut bed);
    }
}

/// An application that was away finds a message's packets together with its announcement, by which its sender asked what became of them.
#[test]
fn what_is_announced_as_well_is_where_it_landed() {
    for device in DEVICES.into_iter().skip(1) {
        let (mut bed, peers) = exchanging(&on(device));
        for number in 0..20 {
            round_trip(&mut bed, peers, 7168);
            bed.send(0, peers[0], &noise(number, 20_000), number);
            bed.alone(0, 2000);
            let message = bed.recv(1);
            assert!(message[..] == noise(number, 20_000)[..], "{number}");
        }
        let counters = bed.hosts[1].counters;
        let again = (counters.fragments_requested, counters.fragments_one_copy);
        assert_eq!(again, (0, 0), "{device:?} {counters:?}");
        assert_eq!(counters.messages_ahead, 40, "{device:?} {counters:?}");
        end(&mut bed);
    }
}

/// Each mistake at the rules of messages ahead breaks what a test looks at.
#[test]
fn mistakes_are_found() {
    let mistakes: [(Mutant, fn()); 5] = [
        (Mutant::ClaimedAcross, || exchange_many(DEVICES[0])),
        (Mutant::SentForward, || exchange_many(DEVICES[0])),
        (Mutant::NoFillers, || exchange_many(DEVICES[1])),
        (Mutant::FactsUnhashed, facts_that_lie_are_not_believed),
        (Mutant::CreditUnposted, credit_goes_no_further_than_entries),
    ];
    for (mutant, looks) in mistakes {
        PUT_IN.set(Some(mutant));
        let found = std::panic::catch_unwind(looks);
        PUT_IN.set(None);
        assert!(found.is_err(), "{mutant:?}");
    }
}

/// Every message is confirmed, and nothing of them is left.
fn end(bed: &mut Bed) {
    bed.pass(Duration::from_millis(30));
    for engine in &mut bed.hosts {
        let completions = engine.told.completions();
        assert!(
            completions
                .iter()
                .all(|completion| completion.outcome == Outcome::Delivered),
            "{completions:?}"
        );
        completions.clear();
    }
    bed.check_memory();
}

/// A packet that is lost costs the messages behind it copies, and no bytes; those that follow land in place again.
#[test]
fn what_is_lost_of_them_comes_again() {
    // Of a message of five packets each one in turn, in a round trip of its own, and the same of three messages in a row.
    for lost in 0..15 {
        let (mut bed, peers) = exchanging(&BedConfig::default());
        round_trip(&mut bed, peers, 7168);
        let payloads: Vec<Vec<u8>> = (0..3).map(|at| noise(at, 7168)).collect();
        let before = bed.hosts[1].counters;
        let mut fragments = 0;
        bed.wire.set_filter(move |from, packet| {
            fragments += u32::from(from == 0 && (packet.len() > 1000 || fragments > 0));
            from != 0 || fragments != lost + 1
        });
        for payload in &payloads {
            bed.send(0, peers[0], payload, 7);
        }
        for payload in &payloads {
            let message = bed.recv(1);
            assert!(message[..] == **payload, "{lost}");
        }
        bed.wire.clear_filter();
        let after = bed.hosts[1].counters;
        assert!(
            after.fragments_requested - before.fragments_requested >= 1,
            "{lost}"
        );
        bed.pass(Duration::from_millis(5));
        for _ in 0..3 {
            round_trip(&mut bed, peers, 7168);
        }
        let copied = bed.hosts[1].counters.user_copied_bytes;
        for _ in 0..10 {
            round_trip(&mut bed, peers, 7168);
        }
        assert_eq!(bed.hosts[1].counters.user_copied_bytes, copied, "{lost}");
        end(&mut bed);
    }
}

/// Hosts that each send short messages to one, in turns and at once: all come unannounced, and what is mixed is copied.
#[test]
fn several_senders_go_ahead() {
    let mut bed = Bed::switch(&on(Semantics::Copy), 4);
    let options = ConnectOptions::default();
    let peers = [1, 2, 3].map(|from| bed.connect(from, &options).expect("a session"));
    let number = std::cell::Cell::new(0);
    let send = |bed: &mut Bed, from: usize, len: usize| {
        number.set(number.get() + 1);
        bed.send(from, peers[from - 1], &noise(number.get(), len), number.get());
    };
    let take = |bed: &mut Bed| {
        let message = bed.recv(0);
        let (tag, len) = (message.tag(), message.len());
        assert!(message[..] == noise(tag, len)[..], "message {tag} differs");
    };
    let in_turns = |bed: &mut Bed, times: u32| {
        for from in (0..times).flat_map(|_| 1..4) {
            send(bed, from, 7168);
            take(bed);
        }
    };
    in_turns(&mut bed, 2);
    let before = bed.hosts[0].counters;
    in_turns(&mut bed, 50);
    let apart = bed.hosts[0].counters;
    let ahead = apart.messages_ahead - before.messages_ahead;
    let copied = apart.messages_ahead_copied - before.messages_ahead_copied;
    assert_eq!((ahead, copied.min(4)), (150, copied), "{apart:?}");
    for _ in 0..50 {
        (1..4).for_each(|from| send(&mut bed, from, 7168));
        (1..4).for_each(|_| take(&mut bed));
    }
    let mixed = bed.hosts[0].counters;
    assert!(mixed.messages_ahead - apart.messages_ahead > 100, "{mixed:?}");
    assert_eq!(
        (mixed.fragments_requested, mixed.violations.total()),
        (0, 0),
        "{mixed:?}"
    );
    // Silent sessions with credit hold up no stream and do not count as stalled, and no entries open between its messages.
    for _ in 0..20 {
        send(&mut bed, 1, 1 << 20);
        take(&mut bed);
    }
    let streamed = bed.hosts[0].counters;
    let copied = streamed.user_copied_bytes - mixed.user_copied_bytes;
    assert!(copied <= 64 * 1448, "{copied} bytes are copied");
    let landing = bed.hosts[0].landing.as_ref().expect("landing");
    assert_eq!(landing.sessions.holds_up(bed.now_ns), None);
    in_turns(&mut bed, 2);
    end(&mut bed);
}

/// A length that needs a packet more for its facts than there may be is announced.
#[test]
fn what_facts_make_too_long_is_announced() {
    // Of whole laps more entries are open.
    let (mut bed, peers) = exchanging(&on(DEVICES[2]));
    let longest = 64 * 1448 - Facts::LEN;
    for (len, ahead) in [(longest, 1), (longest + 1, 0), (64 * 1448, 0)] {
        round_trip(&mut bed, peers, 7168);
        bed.pass(Duration::from_millis(1));
        let before = bed.hosts[1].counters.messages_ahead;
        one_way(&mut bed, 0, peers[0], len);
        assert_eq!(
            bed.hosts[1].counters.messages_ahead - before,
            ahead,
            "{len} bytes"
        );
    }
    end(&mut bed);
}

/// Both ends must be able to: with one that is not all is announced.
#[test]
fn where_one_end_is_unable_all_is_announced() {
    for unable in [0, 1] {
        let mut bed = Bed::new(&BedConfig::default());
        bed.hosts[unable].fixed.caps.ahead = false;
        let peers = [0, 1].map(|host| bed.session(host, WireMode::Lm, 1 << 20));
        (0..10).for_each(|_| drop(round_trip(&mut bed, peers, 7168)));
        let ahead = bed.hosts.iter().map(|host| host.counters.messages_ahead);
        assert_eq!(ahead.sum::<u64>(), 0);
        end(&mut bed);
    }
}

/// What left unannounced for a session that is no more goes again as its next one can.
#[test]
fn what_was_not_heard_of_goes_again() {
    for is_able in [false, true] {
        let (mut bed, peers) = exchanging(&BedConfig::default());
        bed.pass(Duration::from_millis(30));
        bed.hosts[1].fixed.caps.ahead = is_able;
        // The sender is silent for longer than the lease.
        (0..520).for_each(|_| {
            bed.now_ns += 10_000_000;
            bed.alone(1, 1);
        });
        let before = bed.hosts[1].counters.messages_ahead;
        (0..4).for_each(|_| drop(one_way(&mut bed, 0, peers[0], 7168)));
        assert_eq!(bed.hosts[0].counters.messages_again, 1);
        assert_eq!(bed.hosts[1].counters.messages_ahead > before, is_able);
        end(&mut bed);
    }
}

/// Messages whose rest never comes: no more of them are known than may be under way, other sessions go on, and no memory stays taken.
#[test]
fn endless_first_fragments_keep_nothing() {
    let mut bed = Bed::switch(&on(Semantics::Copy), 3);
    let options = ConnectOptions::default();
    let peers = [1, 2].map(|from| bed.connect(from, &options).expect("a session"));
    let send = |bed: &mut Bed, from: usize, number: u64| {
        bed.try_send(from, peers[from - 1], &noise(number, 7168), number)
    };
    for from in [1, 2, 1] {
        send(&mut bed, from, 1).expect("room");
        bed.recv(0);
    }
    let hasher = FragmentHasher::new(bed.key(1, peers[0]));
    bed.wire.set_filter(move |from, packet| {
        let has_facts = packet
            .last_chunk()
            .is_some_and(|bytes| Facts::read(*bytes, &hasher).is_some());
        from != 1 || kind(packet) != Some(TYPE_DATA) || has_facts
    });
    for number in 2..300 {
        let _ = send(&mut bed, 1, number);
        send(&mut bed, 2, number).expect("room");
        loop {
            bed.round();
            // The messages of host 1 are never whole.
            if let Ok(Some(message)) = bed.hosts[0].take_message() {
                assert_eq!(
                    bed.hosts[0].peers.named(message.peer()).map(|peer| peer.data),
                    Some(data_address(2))
                );
                assert!(message[..] == noise(number, 7168)[..]);
                break;
            }
        }
        let landing = bed.hosts[0].landing.as_ref().expect("landing");
        assert!(landing.sessions.iter().all(|inbound| {
            let known = inbound
                .order
                .announced()
                .wrapping_sub(inbound.order.unsettled_from());
            known <= inbound.terms.limits.messages_in_flight
        }));
        bed.pass(Duration::from_millis(20));
    }
    let counters = bed.hosts[0].counters;
    assert_eq!(
        (counters.sessions_ended, counters.violations.total()),
        (1, 0),
        "{counters:?}"
    );
    bed.wire.clear_filter();
    bed.pass(Duration::from_secs(6));
    while !matches!(bed.hosts[0].take_message(), Ok(None)) {}
    bed.hosts
        .iter_mut()
        .for_each(|engine| engine.told.completions().clear());
    bed.check_memory();
}

/// Without its first packet a message is unknown, and its sender is asked at once: it costs no millisecond.
#[test]
fn a_lost_first_packet_costs_no_millisecond() {
    let (mut bed, peers) = exchanging(&BedConfig::default());
    round_trip(&mut bed, peers, 7168);
    bed.pass(Duration::from_millis(3));
    let mut is_first = true;
    bed.wire.set_filter(move |from, packet| {
        from != 0 || kind(packet) != Some(TYPE_DATA) || !std::mem::take(&mut is_first)
    });
    let began = bed.now_ns;
    round_trip(&mut bed, peers, 7168);
    let took = Duration::from_nanos(bed.now_ns - began);
    assert!(took < Duration::from_millis(1), "{took:?}");
    assert!(bed.hosts[1].counters.fragments_requested > 0);
    end(&mut bed);
}
