//! Devices that keep entries back ([`Caps::held`](crate::port::Caps::held)) and give some back unused
//! ([`RxQueue::recalled`](crate::port::RxQueue::recalled)), as poll-mode drivers do.
#![cfg(test)]

use lm_protocol::geometry::Wire as WireMode;

use super::bed::{BATCHED, Bed, BedConfig, noise};
use super::times;
use super::transfer::Dice;
use super::zero_copy_losses::{lens, under_and};
use crate::completion::Outcome;
use crate::simnic::{Impairments, Semantics, WireConfig, ZeroCopy};

const P: u64 = 1448;

const DEVICES: [Semantics; 2] = [
    Semantics::Copy,
    Semantics::ZeroCopy(ZeroCopy {
        prefix_len: 10,
        ..BATCHED
    }),
];

fn config(semantics: Semantics, held: u32, window: u32) -> BedConfig {
    BedConfig {
        window,
        wire: WireConfig {
            semantics: [semantics; 2],
            held: [held; 2],
            ..WireConfig::default()
        },
        ..BedConfig::default()
    }
}

/// One in a hundred lost, others twice or late.
fn impairments(seed: u64) -> Impairments {
    Impairments {
        seed,
        loss_ppm: 10_000,
        duplicate_ppm: 3_000,
        reorder_ppm: 3_000,
        reorder_packets_max: 8,
        reorder_hold_max_ns: 50_000,
        ..Impairments::default()
    }
}

#[test]
fn the_last_packets_come_behind_entries_that_are_kept_back() {
    for semantics in DEVICES {
        for (held, window) in [(1, 64), (21, 256), (64, 64), (64, 4), (128, 16), (128, 1)] {
            let mut bed = Bed::new(&config(semantics, held, window));
            let peer = bed.session(0, WireMode::Lm, 900_000);
            let lens = [
                1449,
                2 * P + 1,
                7168,
                63 * P,
                64 * P + 1,
                100_000,
                524_288,
                900_000,
            ];
            for (number, len) in lens.into_iter().enumerate() {
                bed.exchange(0, peer, &noise(number as u64 + 7, len as usize));
            }
            bed.check_clean();
            bed.check_memory();
            let [sender, receiver] = [0, 1].map(|host| bed.hosts[host].counters);
            assert_eq!((sender.fragments_resent, receiver.fragments_one_copy), (0, 0));
            // Each message finds what the last one left behind, and a window's end may need as many.
            let (windows, kept) = (lens.iter().sum::<u64>() / P / u64::from(window), u64::from(held));
            let stops = match 2 * window > held + 3 {
                true => 0,
                false => windows,
            };
            let most = (lens.len() as u64 + stops) * kept + receiver.page_end_fragments;
            assert!(
                receiver.user_copied_bytes <= most * P,
                "{} bytes copied, {held} kept back, windows of {window}",
                receiver.user_copied_bytes
            );
        }
    }
}

/// Messages that are announced in time land in the entries behind the last one's.
#[test]
fn a_stream_pays_nothing_for_what_is_kept_back() {
    for semantics in DEVICES {
        let mut bed = Bed::new(&config(semantics, 64, 256));
        let peer = bed.session(0, WireMode::Lm, 200_000);
        let payloads: Vec<Vec<u8>> = (0..8).map(|number| noise(number, 200_000)).collect();
        for round in 0..5 {
            for payload in &payloads {
                bed.send(0, peer, payload, round);
            }
            for payload in &payloads {
                assert!(bed.recv(1)[..] == payload[..]);
                assert_eq!(bed.completion(0).outcome, Outcome::Delivered);
            }
        }
        bed.check_clean();
        bed.check_memory();
        let copied = bed.hosts[1].counters.user_copied_bytes;
        assert!(copied <= 5 * 64 * P + 40 * P, "{copied} bytes");
    }
}

#[test]
fn sessions_that_take_turns_use_what_is_kept_back() {
    let mut bed = Bed::switch(&config(Semantics::Copy, 64, 64), 3);
    let peers = [1, 2].map(|host| bed.session(host, WireMode::Lm, 300_000));
    let payload = |host: usize, round: u64| noise(round << 2 | host as u64, 40_000 + 20_000 * round as usize);
    for round in 0..12 {
        for host in [1, 2] {
            bed.send(host, peers[host - 1], &payload(host, round), host as u64);
        }
        for _ in [1, 2] {
            let message = bed.recv(0);
            let host = message.tag() as usize;
            assert!(message[..] == payload(host, round)[..], "round {round}");
        }
        for host in [1, 2] {
            assert_eq!(bed.completion(host).outcome, Outcome::Delivered);
        }
    }
    bed.check_memory();
}

#[test]
fn seeded_losses_behind_a_device_that_keeps_entries_back() {
    for semantics in DEVICES {
        for seed in 0..times(12, 100) {
            let mut dice = Dice(seed * 77 + 5);
            let (held, window) = (1 + dice.roll(100) as u32, 1 << dice.roll(9));
            let mut bed = Bed::new(&config(semantics, held, window));
            let lens = lens(&mut dice, 25);
            under_and(&mut bed, &lens, seed, impairments(seed), |_| {});
        }
    }
}

/// All that is unused comes back, or what was posted last, or some of it: where it ends and in the middle of messages.
#[test]
fn seeded_entries_come_back_unused() {
    for semantics in DEVICES {
        let mut recalled = 0;
        for seed in 0..times(12, 100) {
            let mut dice = Dice(seed * 77 + 9);
            let held = dice.roll(2) as u32 * 64;
            let mut bed = Bed::new(&config(semantics, held, 1 << dice.roll(9)));
            let lens = lens(&mut dice, 25);
            let loss = match seed % 2 {
                0 => Impairments::default(),
                _ => impairments(seed),
            };
            under_and(&mut bed, &lens, seed, loss, |bed| {
                let which: fn(u32, u64) -> bool = match dice.roll(60) {
                    0 => |_, _| true,
                    1 => |at, number| u64::from(at) >= number,
                    2 => |at, number| u64::from(at) % 64 == number,
                    _ => return,
                };
                let number = dice.roll(64);
                recalled += bed.wire.recall(1, 1, |at| which(at, number));
            });
        }
        assert!(recalled > 300, "{recalled} entries");
    }
}
