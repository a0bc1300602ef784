//! Messages that are read while they arrive: what is shown is right at once and stays so, whatever the wire does.
#![cfg(test)]

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use lm_protocol::delivery::Delivery;
use lm_protocol::geometry::Wire;
use lm_protocol::wire::lm::{TYPE_DATA, TYPE_WINDOWS};

use super::audience::{
    Audience, Read, TAIL, W, WAYS, WINDOW, Way, config, impairments, options, payloads, without_streams,
};
use super::bed::{Bed, BedConfig, noise};
use super::flood::Lines;
use super::integrity::{index_of, kind};
use super::times;
use super::transfer::Dice;
use crate::Ending;
use crate::connect::ConnectOptions;
use crate::message::Message;
use crate::simnic::Impairments;

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
        let all = read.incoming.bytes(0..10 * W + 5).expect("whole");
        assert_eq!(all.as_ptr(), audience.messages[0].as_ptr());
        audience.end_without_copies(way);
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

/// The fragments of an IP datagram have no windows.
#[test]
fn a_datagram_is_not_read_before_it_is_whole() {
    let options = ConnectOptions {
        wire: Wire::IpFrag,
        max_message_len: 60_000,
        ..options(Delivery::Reliable)
    };
    let mut audience = Audience::new(Bed::new(&config(Way::Paired)), [0, 1], &options);
    audience.read_all((0..3).map(|seed| noise(seed, 50_000 + seed as usize)).collect());
    assert_eq!((audience.messages.len(), audience.reads.len()), (3, 0));
    audience.end();
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
            audience.until("received", |audience| {
                let payload = noise(sent, 90_000);
                sent += u64::from(sent < 8 && audience.bed.try_send(2, other, &payload, sent).is_ok());
                audience.messages.len() == 8
            });
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

/// The kernel drops a packet between gate and ring: nothing is shown that the log vouches for then.
#[test]
fn windows_are_shown_only_while_the_log_can_be_trusted() {
    let (mut ended, mut early) = (0, 0);
    for seed in 0..times(12, 120) {
        let way = WAYS[seed as usize % 2];
        let mut audience = Audience::new(Bed::new(&config(way)), [0, 1], &options(Delivery::Reliable));
        audience.bed.wire.impair(
            0,
            Impairments {
                seed,
                loss_ppm: 3_000,
                rx_full_ppm: 3_000,
                ..Impairments::default()
            },
        );
        audience.read_all(payloads(6, |_| 6 * W));
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
        assert!(audience.reads[0].incoming.bytes(0..1).is_err());
        holds_back.store(false, Ordering::Relaxed);
        audience.until("whole", |audience| !audience.messages.is_empty());
        // It lies where it was shown.
        let all = audience.reads[0].incoming.bytes(0..8 * W).expect("whole");
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

/// A sender of before tells no digests of windows and is not asked for them: what needs them is shown when its message is whole.
#[test]
fn a_sender_without_the_capability_is_read_when_its_messages_are_whole() {
    for way in WAYS {
        let needs_digests = way != Way::Paired;
        let bed = Bed::new(&config(way));
        let asked = Arc::new(AtomicBool::new(false));
        let asks = Arc::clone(&asked);
        bed.wire.set_filter(move |from, packet| {
            if from == 0 {
                without_streams(packet);
            }
            asks.fetch_or(kind(packet) == Some(TYPE_WINDOWS), Ordering::Relaxed);
            true
        });
        let mut audience = Audience::new(bed, [0, 1], &options(Delivery::Reliable));
        let lines = Arc::new(AtomicU64::new(0));
        tracing::subscriber::with_default(Lines(Arc::clone(&lines)), || {
            audience.read_all(payloads(2, |_| 10 * W));
        });
        assert_eq!(
            lines.load(Ordering::Relaxed),
            u64::from(needs_digests),
            "it is said once"
        );
        assert!(!asked.load(Ordering::Relaxed), "{way:?}: it was asked");
        assert_eq!(audience.early == 0, needs_digests, "{way:?}: {}", audience.early);
        let is_whole = |read: &Read| read.incoming.settled() == Some(Ending::Whole);
        assert!(audience.reads.len() == 2 && audience.reads.iter().all(is_whole));
        audience.end();
    }
}
