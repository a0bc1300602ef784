//! Landing memory that cannot be had, or only without its socket.
#![cfg(test)]

use std::time::Duration;

use super::bed::{Bed, BedConfig, noise};
use crate::completion::{Outcome, PeerId};
use crate::connect::ConnectOptions;

fn up_to(len: u64) -> ConnectOptions {
    ConnectOptions {
        max_message_len: len,
        timeout: Duration::from_secs(1),
        ..ConnectOptions::default()
    }
}

/// Host 0 receives from the others.
fn bed() -> Bed {
    Bed::switch(
        &BedConfig {
            landing_len: 1 << 20,
            send_len: 8 << 20,
            ..BedConfig::default()
        },
        3,
    )
}

/// A message from `host`, whole; gives how many packets landed for it.
fn lands(bed: &mut Bed, host: usize, peer: PeerId, len: usize) -> u64 {
    let before = bed.hosts[0].counters.landing_packets;
    let payload = noise(host as u64, len);
    bed.send(host, peer, &payload, 7);
    let message = bed.recv(0);
    assert!(message[..] == payload[..]);
    drop(message);
    assert_eq!(bed.completion(host).outcome, Outcome::Delivered);
    bed.hosts[0].counters.landing_packets - before
}

/// The socket for more memory is refused: there is one for what was, and the next smaller step is tried.
#[test]
fn a_channel_that_cannot_grow_is_as_it_was() {
    let mut bed = bed();
    let first = bed.connect(1, &up_to(300_000)).expect("a session");
    assert!(lands(&mut bed, 1, first, 300_000) > 100);
    bed.wire.refuse_channels(0, 1);
    let second = bed.connect(2, &up_to(3 << 20)).expect("memory for it");
    // It lands from when the first one pauses.
    bed.pass(Duration::from_millis(200));
    assert!(lands(&mut bed, 1, first, 300_000) > 100);
    assert!(lands(&mut bed, 2, second, 3 << 20) > 2000);
    let counters = &bed.hosts[0].counters;
    assert_eq!((counters.landing_lost, counters.sessions_ended), (0, 0));
    bed.check_memory();
}

/// Nor is there a socket for what was: sessions go on by the one-copy path, a new one begins so, and lands when there is a socket again.
#[test]
fn a_channel_that_is_lost_comes_back() {
    let mut bed = bed();
    let first = bed.connect(1, &up_to(300_000)).expect("a session");
    assert!(lands(&mut bed, 1, first, 300_000) > 100);
    bed.wire.refuse_channels(0, 8);
    let second = bed.connect(2, &up_to(3 << 20)).expect("memory for it");
    bed.pass(Duration::from_millis(200));
    assert_eq!(bed.hosts[0].counters.landing_lost, 1);
    assert_eq!(lands(&mut bed, 1, first, 300_000), 0);
    assert_eq!(lands(&mut bed, 2, second, 3 << 20), 0);
    bed.wire.refuse_channels(0, 0);
    bed.pass(Duration::from_secs(6));
    assert!(lands(&mut bed, 2, second, 3 << 20) > 2000);
    assert_eq!(lands(&mut bed, 1, first, 300_000), 0);
    let counters = &bed.hosts[0].counters;
    assert_eq!((counters.landing_lost, counters.sessions_ended), (1, 0));
    bed.check_memory();
}
