//! Messages whose entries are used up by packets of others: their sender must get credit all the same.
#![cfg(test)]

use lm_protocol::delivery::Delivery;

use super::bed::{Bed, BedConfig, noise};
use super::transfer::Dice;
use crate::completion::{RecvError, SendError};
use crate::connect::ConnectOptions;
use crate::simnic::Impairments;

/// Packets of a message that was given up before all of it was sent still come, and use the entries of the next one. With
/// packets that overtake each other by dozens this happens to the last message of a burst now and then; nothing may stand
/// still then until the session ends.
#[test]
fn a_message_without_entries_is_not_waited_for_in_vain() {
    for seed in 0..60 {
        let mut dice = Dice(seed * 0x9e37_79b9 + 1);
        let mut bed = Bed::new(&BedConfig {
            window: 256,
            tx_bound: u32::from(dice.roll(2) == 0),
            on_the_way: [24, 64, 192][dice.roll(3) as usize],
            landing_len: 4 << 20,
            send_len: 8 << 20,
            ..BedConfig::default()
        });
        let delivery = [Delivery::Partial, Delivery::Reliable, Delivery::Unreliable][(seed % 3) as usize];
        let options = ConnectOptions {
            max_message_len: 256 << 10,
            messages_in_flight: 48,
            delivery,
            ..ConnectOptions::default()
        };
        let peer = bed.connect(0, &options).expect("a session");
        for from in [0, 1] {
            bed.wire.impair(
                from,
                Impairments {
                    seed: seed * 2 + from as u64,
                    loss_ppm: 1 + (20_000 >> dice.roll(5)) as u32,
                    duplicate_ppm: 3000,
                    duplicate_delay_max_ns: 20_000,
                    reorder_ppm: (20_000 >> dice.roll(5)) as u32,
                    reorder_packets_max: 30,
                    reorder_hold_max_ns: 300_000,
                    ..Impairments::default()
                },
            );
        }
        let (mut sent, mut ended, mut quiet) = (0u64, 0u64, 0);
        while ended < 60 {
            while sent < 60 {
                let longest = 2 + (200_000 >> dice.roll(7));
                let len = 1449 + dice.roll(longest) as usize;
                match bed.try_send(0, peer, &noise(sent, len), sent) {
                    Ok(_) => sent += 1,
                    Err(SendError::WouldBlock) => break,
                    Err(error) => panic!("seed {seed}: {error}"),
                }
            }
            bed.round();
            let ahead = dice.roll(4) as u32 * dice.roll(2) as u32 * 3;
            bed.alone(0, ahead);
            while let Ok(Some(_)) | Err(RecvError::Incomplete { .. }) = bed.hosts[1].take_message() {}
            let before = ended;
            while bed.hosts[0].told.completions().pop_front().is_some() {
                ended += 1;
            }
            quiet = if ended == before { quiet + 1 } else { 0 };
            // Long enough for every repetition, and shorter than any time limit.
            assert!(
                quiet < 60_000,
                "seed {seed}: {ended} of {sent} messages ended, {delivery:?}"
            );
        }
    }
}
