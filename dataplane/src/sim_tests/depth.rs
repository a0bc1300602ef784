//! What is in the device and on the way, where it is to be no more than keeps both busy, on a link that is slower than the hosts.
#![cfg(test)]

use super::bed::{Bed, BedConfig, noise};
use crate::bounds::TRANSMIT_BURST;
use crate::completion::{LoanError, PeerId, SendError};
use crate::connect::ConnectOptions;
use crate::simnic::Delivery;

const LEN: usize = 300_000;
/// The link takes a packet in so many rounds of 7 µs: some 48,000 a second.
const ROUNDS_A_PACKET: u32 = 3;
const ROUNDS: u32 = 60_000;

/// What came of a stream.
#[derive(Clone, Copy, Debug)]
struct Came {
    bytes: usize,
    /// Fragments that were handed over and had not come, in the mean over the second half.
    waiting: f64,
}

/// A stream over a slow link, whose sender (the first) and receiver (the second) have no more than keep them busy, or not.
fn stream(adapts: [bool; 2]) -> Came {
    let mut bed = Bed::new(&BedConfig {
        adapts,
        tx_in_flight: 1024,
        on_the_way: 768,
        tx_bound: 1,
        send_len: 4 << 20,
        landing_len: 4 << 20,
        ..BedConfig::default()
    });
    let options = ConnectOptions {
        max_message_len: LEN as u64,
        ..ConnectOptions::default()
    };
    let peer = bed.connect(0, &options).expect("a session");
    bed.wire.set_delivery(Delivery::Manual);
    let payload = noise(7, LEN);
    let (mut bytes, mut waiting) = (0, 0u64);
    for round in 0..ROUNDS {
        keep_full(&mut bed, peer, &payload);
        if round % ROUNDS_A_PACKET == 0 {
            bed.wire.deliver(1);
        }
        bed.round();
        while bed.hosts[0].told.next_completion().is_some() {}
        while let Some(message) = bed.hosts[1].take_message().expect("no failure") {
            assert!(message[..] == payload[..]);
            bytes += message.len();
        }
        if round >= ROUNDS / 2 {
            waiting += bed.hosts[0].counters.data_packets_sent - bed.hosts[1].counters.landing_packets;
        }
    }
    Came {
        bytes,
        waiting: waiting as f64 / f64::from(ROUNDS / 2),
    }
}

fn keep_full(bed: &mut Bed, peer: PeerId, payload: &[u8]) {
    loop {
        match bed.try_send(0, peer, payload, 0) {
            Ok(_) => {}
            Err(SendError::WouldBlock | SendError::Loan(LoanError::WouldBlock)) => break,
            Err(error) => panic!("{error}"),
        }
    }
}

/// By either count: the sender's, of packets handed over and not completed, and the receiver's, of packets on the way.
#[test]
fn a_slow_link_has_little_waiting_and_passes_as_much() {
    let full = stream([false; 2]);
    assert!(full.waiting > 140.0, "{full:?}");
    for adapts in [[true, false], [false, true], [true; 2]] {
        let few = stream(adapts);
        // Credits cross the same link, and there are three times as many.
        assert!(
            few.bytes as f64 >= 0.97 * full.bytes as f64,
            "{adapts:?}: {few:?}, {full:?}"
        );
        // A burst, and for the path a millisecond and a burst more.
        let most = match adapts[0] {
            true => f64::from(TRANSMIT_BURST + TRANSMIT_BURST / 2),
            false => f64::from(2 * TRANSMIT_BURST) + 1e6 / (7_000.0 * f64::from(ROUNDS_A_PACKET)),
        };
        assert!(few.waiting <= most, "{adapts:?}: {few:?}");
    }
}
