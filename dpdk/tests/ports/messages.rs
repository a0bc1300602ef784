//! Messages between two ports.

use std::panic::AssertUnwindSafe;
use std::time::Duration;

use lm_dataplane::Delivery::{self, Partial, Reliable, Unreliable};
use lm_dataplane::{EffectiveMode, ModeRequest};
use lm_dpdk::put_in;

use crate::bed::{A, B, PATIENCE, Wire, alone, carry};

/// Lengths in one packet and in many, around their ends, beyond the landing memory that is there at first, and with short last packets where the device has
/// aimed buffers.
const LENS: [usize; 10] = [1, 1439, 1440, 1441, 2896, 1 << 20, 8 << 20, 100_000, 2897, 2897];

/// They cross to one end, to the other, and to the first again.
fn cross(wire: &Wire, queues: u32, arguments: &str, delivery: Delivery, patience: Duration) {
    let mut ends = wire.ends(queues, arguments);
    for to in [B, A, B] {
        let before = ends[1].counters().user_copied_bytes;
        let [_, received] = carry(&mut ends, to, delivery, &LENS, patience);
        // Each packet once, and nothing by the sockets.
        let bytes = LENS.iter().sum::<usize>() as u64;
        let copied = received.user_copied_bytes - before;
        let (mode, expected) = match to == B && queues > 1 {
            true => (EffectiveMode::ZeroCopy, 1..bytes / 4),
            false => (EffectiveMode::CopyPort, bytes..u64::MAX),
        };
        assert!(expected.contains(&copied), "{copied} {received:?}");
        let elsewhere = received.fragments_one_copy + received.fragments_requested;
        assert_eq!(elsewhere, 0, "{received:?}");
        assert_eq!(received.violations.total(), 0);
        assert!(to == A || ends[1].status().mode() == mode);
        ends.swap(0, 1);
    }
}

#[test]
fn messages_cross_both_ways_on_all_rings() {
    let ways = [Reliable, Unreliable, Partial, Reliable];
    for queues in [1, 2] {
        for (delivery, (ring, packed)) in ways.into_iter().zip([(128, 0), (128, 1), (256, 0), (256, 1)]) {
            let arguments = format!("queue_size={ring},packed_vq={packed}");
            cross(&Wire::new(), queues, &arguments, delivery, PATIENCE);
        }
    }
}

/// What the second end is asked for and cannot be, and a memory of two endpoints, and one that a device kept.
#[test]
fn what_cannot_be_aimed_is_refused() {
    // Memory that was kept is not used by another test.
    if !alone("messages::what_cannot_be_aimed_is_refused") {
        return;
    }
    let wire = Wire::new();
    let refused = |queues, arguments, words: &str| {
        let [_, refused] = wire.try_ends(queues, arguments, ModeRequest::ZeroCopy);
        let why = refused.expect_err(words).to_string();
        assert!(why.contains(words), "{why}");
    };
    refused(1, "packed_vq=0", "has no queue for what lands alone");
    refused(2, "mrg_rxbuf=1", "mrg_rxbuf=1");
    refused(2, "vectorized=1", "vectorized=1");
    refused(2, "queue_size=64", "tx_free_thresh");
    let first = wire.ends(2, "packed_vq=0");
    refused(2, "packed_vq=0", "; ask for --mode copy");
    drop(first);
    put_in(0, 0, 5);
    refused(2, "packed_vq=0", "keeps packets' memory");
    put_in(0, 0, 0);
    refused(2, "packed_vq=0", "; ask for --mode copy");
}

/// Packets that are lost, overtaken or doubled, cut bursts and refused buffers cost no byte. Each session leaves buffers with the device.
#[test]
fn faults_cost_time_alone() {
    let seeds = std::env::var_os("LM_LONG").map_or(15, |_| 1000);
    for packed in 0..2 {
        let wire = Wire::new();
        let mut ends = wire.ends(2, &format!("packed_vq={packed}"));
        for (seed, to) in (0..2 * seeds).zip([B, A].into_iter().cycle()) {
            let long = 1 + seed as usize * 7919 % 600_000;
            put_in(seed, 8, 0);
            let lens = [1, 7000, long, 100_000, 1441];
            let [_, received] = carry(&mut ends, to, Reliable, &lens, PATIENCE);
            assert_eq!(received.violations.total(), 0, "{seed}: {received:?}");
            ends.swap(0, 1);
        }
    }
}

/// Those that [`put_in`] names: whether one shows is a matter of bursts, too. A panic leaves nothing.
#[test]
fn mistakes_are_found() {
    for mistake in 1..=4 {
        let is_found = |_| {
            let (wire, patience) = (Wire::new(), Duration::from_secs(3));
            put_in(0, 0, mistake);
            let crossed = || cross(&wire, 2, "packed_vq=0", Reliable, patience);
            std::panic::catch_unwind(AssertUnwindSafe(crossed)).is_err()
        };
        assert!((0..8).any(is_found), "{mistake}");
    }
}
