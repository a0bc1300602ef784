//! Endpoints that admit by themselves and have the cluster's key.

use std::time::Duration;

use lm_protocol::geometry::Wire as WireMode;

use super::bed::{Bed, BedConfig, noise};
use crate::completion::Outcome;
use crate::connect::{ConnectError, ConnectOptions};

const LEN: usize = 100_000;

fn bed(keys: [Option<u8>; 2]) -> Bed {
    Bed::new(&BedConfig {
        keys,
        ..BedConfig::default()
    })
}

fn options() -> ConnectOptions {
    ConnectOptions {
        max_message_len: LEN as u64,
        timeout: Duration::from_secs(1),
        ..ConnectOptions::default()
    }
}

#[test]
fn messages_of_all_sizes_come_from_whom_the_key_speaks_for() {
    let mut bed = bed([Some(1), Some(1)]);
    for from in [0, 1] {
        let peer = bed.session(from, WireMode::Lm, LEN as u64);
        for len in [0, 64, 1400, 20_000, LEN] {
            bed.exchange(from, peer, &noise(len as u64, len));
        }
    }
    let drops: u64 = bed
        .hosts
        .iter()
        .flat_map(|host| {
            host.counters
                .drops
                .iter()
                .map(|(_, count)| count)
                .collect::<Vec<_>>()
        })
        .sum();
    assert_eq!(drops, 0);
    bed.check_memory();
}

/// One has another key, or none: no session, and no small message either.
#[test]
fn nothing_comes_from_whom_it_does_not_speak_for() {
    for keys in [[Some(2), Some(1)], [None, Some(1)]] {
        let mut bed = bed(keys);
        let error = bed.connect(0, &options()).expect_err("no answer");
        assert!(
            matches!(error, ConnectError::Unreachable { .. }),
            "{keys:?}: {error}"
        );
        let peer = bed.resolve(0);
        bed.send(0, peer, b"small", 7);
        assert_ne!(bed.completion(0).outcome, Outcome::Delivered, "{keys:?}");
        assert!(bed.hosts[1].told.messages().count() == 0, "{keys:?}");
        assert!(bed.hosts[1].counters.drops.unexpected > 0, "{keys:?}");
    }
}

/// A sender that was started anew is not kept out by what it had before.
#[test]
fn a_sender_that_starts_anew_has_a_session_at_once() {
    let mut bed = bed([Some(1), Some(1)]);
    let peer = bed.connect(0, &options()).expect("a session");
    bed.exchange(0, peer, &noise(1, LEN));
    // It forgets what it had, and says nothing.
    let now_ns = bed.now_ns;
    bed.hosts[0].admission.requests.forget_held();
    bed.hosts[0].drop_outbound(peer.index, &Outcome::SessionEnded, now_ns);
    bed.hosts[0].fixed.sender_id ^= 0x5a5a << 40;
    let peer = bed.connect(0, &options()).expect("a session within a second");
    bed.exchange(0, peer, &noise(2, LEN));
    assert_eq!(bed.hosts[1].counters.sessions_ended, 1);
    bed.check_memory();
}
