//! Sessions that share a port: each has its part of what leaves.
#![cfg(test)]

use super::bed::{Bed, BedConfig, data_address, noise};

use crate::completion::{LoanError, Outcome, PeerId, SendError};
use crate::config::ConnectOptions;
use crate::simnic::{Delivery, mac_of};

const RECEIVERS: usize = 8;
const LEN: usize = 100_000;
/// The link takes so many packets in each round of so many nanoseconds: 23 Gbit/s.
const PACKETS: u32 = 20;
const ROUND_NS: u64 = 10_000;
/// Shares are looked at over this time.
const WINDOW_NS: u64 = 50_000_000;

/// A session of host 0 with another host.
fn session(bed: &mut Bed, to: usize) -> PeerId {
    let to = data_address(to);
    let now_ns = bed.now_ns;
    let engine = &mut bed.hosts[0];
    let addressing = engine.addressing_to(to, mac_of(*to.ip()));
    let index = engine
        .peers
        .find_or_add(to, &addressing, now_ns)
        .expect("room for a peer");
    let peer = engine.peers.id_of(index);
    let options = ConnectOptions {
        max_message_len: LEN as u64,
        ..ConnectOptions::default()
    };
    engine.apply(index, &options, now_ns);
    while bed.application_outcome(0, index).is_none() {
        bed.now_ns += 100_000;
        bed.round();
    }
    peer
}

/// *House rule of the scheduler*: eight backlogged sessions of one port each get 0.8 to 1.25 of an equal share over any 50 ms.
#[test]
fn backlogged_sessions_of_a_port_have_equal_shares() {
    let mut bed = Bed::switch(
        &BedConfig {
            send_len: 64 << 20,
            guarded: false,
            ..BedConfig::default()
        },
        RECEIVERS + 1,
    );
    let peers: Vec<PeerId> = (1..=RECEIVERS).map(|host| session(&mut bed, host)).collect();
    bed.wire.set_delivery(Delivery::Manual);
    let payload = noise(1, LEN);
    for window in 0..3 {
        let mut received = [0usize; RECEIVERS];
        for _ in 0..WINDOW_NS / ROUND_NS {
            for &peer in &peers {
                loop {
                    match bed.try_send(0, peer, &payload, 0) {
                        Ok(_) => {}
                        Err(SendError::WouldBlock | SendError::Loan(LoanError::WouldBlock)) => break,
                        Err(error) => panic!("{error}"),
                    }
                }
            }
            bed.now_ns += ROUND_NS;
            bed.wire.deliver(PACKETS);
            bed.round();
            while let Some(completion) = bed.hosts[0].told.completions().pop_front() {
                assert_eq!(completion.outcome, Outcome::Delivered);
            }
            for (host, received) in received.iter_mut().enumerate() {
                while let Some(message) = bed.hosts[host + 1].take_message().expect("no failure") {
                    *received += message.len();
                }
            }
        }
        let share = received.iter().sum::<usize>() as f64 / RECEIVERS as f64;
        let shares = received.map(|received| received as f64 / share);
        assert!(share > 10.0 * LEN as f64, "{share} bytes each");
        // The first one begins with sessions that have nothing under way.
        assert!(
            window == 0 || shares.iter().all(|share| (0.8..=1.25).contains(share)),
            "{shares:.2?}"
        );
    }
}
