//! Landing in zero-copy mode: the device writes packets before anybody looks at them, and nobody reads a header.
//!
//! The simulated device overwrites headers as a real one does, skips entries at the ends of 2 MiB pages without a word, takes
//! entries ahead and uses frames that came back before new ones.
#![cfg(test)]

use std::time::Duration;

use lm_protocol::control::RejectReason;
use lm_protocol::geometry::Wire as WireMode;
use lm_protocol::integrity::Integrity;

use super::bed::{Bed, BedConfig, noise, wire_of};
use super::transfer::Dice;
use crate::completion::Outcome;
use crate::connect::{ConnectError, ConnectOptions};
use crate::message::Message;
use crate::port::ModeRequest;
use crate::simnic::{Semantics, ZeroCopy};

pub(super) const P: u64 = 1448;

pub(super) fn config(device: ZeroCopy) -> BedConfig {
    BedConfig {
        wire: wire_of(Semantics::ZeroCopy(device)),
        ..BedConfig::default()
    }
}

/// Nothing was copied but what came into spare frames at pages' ends.
fn check_copies(bed: &Bed, host: usize) -> u64 {
    let counters = &bed.hosts[host].counters;
    let (copied, fragments) = (counters.user_copied_bytes, counters.page_end_fragments);
    assert!(
        copied <= fragments * P && copied + counters.messages_received * P >= fragments * P,
        "{copied} bytes for {fragments} fragments"
    );
    fragments
}

#[test]
fn messages_of_every_length_land_without_a_copy() {
    for (prefix_len, batch, ring_len, burst, window) in [
        (0, 16, 64, 64, 64),
        (12, 1, 1, 1, 1),
        (12, 32, 64, 32, 256),
        (10, 16, 512, 1000, 8),
        (0, 16, 32, 7, 2),
    ] {
        let device = ZeroCopy {
            batch,
            ring_len,
            burst,
            prefix_len,
            pad_to: 0,
            lap: 1,
        };
        let mut bed = Bed::new(&BedConfig {
            window,
            ..config(device)
        });
        let peer = bed.session(0, WireMode::Lm, 900_000);
        let lens = [
            1447,
            1448,
            1449,
            2 * P,
            2 * P + 1,
            7168,
            63 * P,
            64 * P,
            64 * P + 1,
            65 * P,
            100_000,
            524_288,
            900_000,
        ];
        for (number, len) in lens.into_iter().enumerate() {
            bed.exchange(0, peer, &noise(number as u64 + 7, len as usize));
        }
        bed.check_clean();
        bed.check_memory();
        check_copies(&bed, 1);
        assert_eq!(bed.hosts[1].counters.fragments_displaced, 0);
        assert_eq!(bed.hosts[0].counters.fragments_resent, 0);
        assert_eq!(bed.hosts[1].counters.violations.total(), 0);
    }
}

/// A driver that must be given whole laps gets them, and only the last fragments of a lap that nothing else filled up are copied.
#[test]
fn drivers_that_want_whole_laps_get_them() {
    for (lap, ring_len, batch) in [(64, 64, 16), (80, 79, 1), (256, 255, 1), (256, 256, 16)] {
        let mut bed = Bed::new(&BedConfig {
            landing_len: 40 << 20,
            send_len: 40 << 20,
            max_message_len: 4 << 20,
            ..config(ZeroCopy {
                lap,
                ring_len,
                batch,
                burst: 32,
                ..ZeroCopy::default()
            })
        });
        let peer = bed.session(0, WireMode::Lm, 4 << 20);
        let mut dice = Dice(u64::from(lap) + 9);
        for round in 0..6 {
            let payloads: Vec<Vec<u8>> = (0..8)
                .map(|number| noise(round * 8 + number, 1500 + dice.roll(2 << 20) as usize))
                .collect();
            for payload in &payloads {
                bed.send(0, peer, payload, 3);
            }
            for payload in &payloads {
                assert!(bed.recv(1)[..] == payload[..], "another message");
                assert_eq!(bed.completion(0).outcome, Outcome::Delivered);
            }
        }
        bed.check_clean();
        bed.check_memory();
        assert_eq!((bed.wire.short_laps(0), bed.wire.short_laps(1)), (0, 0));
        let counters = &bed.hosts[1].counters;
        assert_eq!(counters.violations.total(), 0);
        // Each burst can leave less than a lap of spare frames to the next one.
        let most = 6 * u64::from(lap) + counters.page_end_fragments;
        assert!(
            counters.user_copied_bytes <= 2 * most * P,
            "{} bytes for at most {most} fragments",
            counters.user_copied_bytes
        );
    }
}

/// 16 MiB cross eight ends of 2 MiB pages. Messages stay what they were while others land.
#[test]
fn long_messages_take_spare_frames_at_the_ends_of_pages() {
    for (mtu, on_the_way) in [(1500, 192), (3498, u32::MAX)] {
        let mut bed = Bed::new(&BedConfig {
            mtu,
            on_the_way,
            window: 256,
            landing_len: 40 << 20,
            send_len: 40 << 20,
            max_message_len: 16 << 20,
            ..config(ZeroCopy {
                prefix_len: 12,
                ..ZeroCopy::default()
            })
        });
        let peer = bed.session(0, WireMode::Lm, 16 << 20);
        let payloads = [16 << 20, 3 << 20, 5_000_000].map(|len| noise(len as u64, len));
        let mut kept: Vec<Message> = Vec::new();
        for payload in &payloads {
            bed.send(0, peer, payload, 3);
            kept.push(bed.recv(1));
            assert_eq!(bed.completion(0).outcome, Outcome::Delivered);
        }
        for (message, payload) in kept.iter().zip(&payloads) {
            assert!(message[..] == payload[..], "{} bytes", payload.len());
        }
        bed.check_clean();
        let counters = &bed.hosts[1].counters;
        let fragments = counters.page_end_fragments;
        assert!((8..100).contains(&fragments), "{fragments}");
        assert!(counters.user_copied_bytes <= fragments * u64::from(mtu));
        assert_eq!(
            (counters.fragments_displaced, counters.violations.total()),
            (0, 0)
        );
        drop(kept);
        bed.check_memory();
    }
}

#[test]
fn both_directions_at_once() {
    let mut bed = Bed::new(&config(ZeroCopy::default()));
    let peers = [0, 1].map(|host| bed.session(host, WireMode::Lm, 300_000));
    for round in 0..20 {
        for host in [0, 1] {
            bed.send(
                host,
                peers[host],
                &noise(round * 2 + host as u64, 70_000 + 9_000 * round as usize),
                round,
            );
        }
        for host in [0, 1] {
            let message = bed.recv(1 - host);
            assert!(message[..] == noise(round * 2 + host as u64, 70_000 + 9_000 * round as usize)[..]);
        }
    }
    for host in [0, 1] {
        for _ in 0..20 {
            assert_eq!(bed.completion(host).outcome, Outcome::Delivered);
        }
    }
    bed.check_clean();
    bed.check_memory();
}

/// Only digests tell what arrived, so whoever sends without is told why he cannot; and a queue carries one session.
#[test]
fn who_cannot_land_is_told_why() {
    let mut bed = Bed::new(&BedConfig {
        integrity: Integrity::None,
        ..config(ZeroCopy::default())
    });
    let rejected = |bed: &mut Bed, wire| {
        let options = ConnectOptions {
            wire,
            max_message_len: 60_000,
            ..ConnectOptions::default()
        };
        match bed.connect(0, &options) {
            Err(error @ ConnectError::Rejected { reason, .. }) => {
                assert!(error.to_string().contains("only digests tell"), "{error}");
                reason
            }
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(rejected(&mut bed, WireMode::Lm), RejectReason::Unverified);
    let mut bed = Bed::new(&config(ZeroCopy::default()));
    assert_eq!(rejected(&mut bed, WireMode::IpFrag), RejectReason::Unverified);
    let mut bed = Bed::new(&BedConfig {
        exclusive: true,
        integrity: Integrity::None,
        ..config(ZeroCopy::default())
    });
    assert_eq!(rejected(&mut bed, WireMode::IpFrag), RejectReason::Unverified);
}

#[test]
fn a_queue_carries_one_session() {
    let mut bed = Bed::switch(&config(ZeroCopy::default()), 3);
    let first = bed.session(1, WireMode::Lm, 100_000);
    let options = ConnectOptions {
        max_message_len: 100_000,
        timeout: Duration::from_millis(500),
        ..ConnectOptions::default()
    };
    let second = bed.connect(2, &options).expect("a session");
    let admitted = |bed: &Bed| {
        let landing = bed.hosts[0].landing.as_ref().expect("a landing side");
        let keys = landing
            .sessions
            .admitted()
            .filter_map(|row| landing.sessions.at(row));
        keys.map(|inbound| inbound.terms.peer.index).collect::<Vec<_>>()
    };
    let before = admitted(&bed);
    assert_eq!(before.len(), 1);
    let payload = noise(1, 100_000);
    bed.send(1, first, &payload, 0);
    assert!(bed.recv(0)[..] == payload[..]);
    assert_eq!(bed.completion(1).outcome, Outcome::Delivered);
    let now_ns = bed.now_ns;
    bed.hosts[1].end_session(first.index, now_ns);
    bed.pass(Duration::from_millis(100));
    let after = admitted(&bed);
    assert!(after.len() == 1 && after != before, "the queue is free");
    bed.send(2, second, &payload, 0);
    assert!(bed.recv(0)[..] == payload[..]);
}

/// A device that pads what it writes would overwrite what landed before. That shows when the first sender asks.
#[test]
fn a_device_that_pads_copies_or_is_refused() {
    let bed = |pad_to, mode| {
        Bed::new(&BedConfig {
            probing: true,
            mode,
            ..config(ZeroCopy {
                pad_to,
                prefix_len: 12,
                ..ZeroCopy::default()
            })
        })
    };
    let options = ConnectOptions {
        max_message_len: 200_000,
        ..ConnectOptions::default()
    };
    let refused = bed(64, ModeRequest::ZeroCopy).connect(0, &options);
    assert!(
        matches!(
            refused,
            Err(ConnectError::Rejected {
                reason: RejectReason::Unsupported,
                ..
            })
        ),
        "{refused:?}"
    );
    for (pad_to, copies) in [(64, true), (1, false)] {
        let mut bed = bed(pad_to, ModeRequest::Auto);
        let peer = bed.connect(0, &options).expect("a session");
        for len in [1449, 200_000, 77_777] {
            bed.exchange(0, peer, &noise(len, len as usize));
        }
        bed.check_memory();
        let receiver = &bed.hosts[1];
        assert_eq!(receiver.fixed.caps.witness, copies);
        assert_eq!(receiver.counters.violations.total(), 0);
        // In copy mode a short message opens entries, to which the next one's first fragments come.
        assert_eq!(receiver.counters.fragments_displaced, 64 * u64::from(copies));
    }
}
