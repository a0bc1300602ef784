//! Losses in zero-copy mode: what a packet that did not come leaves behind is found by digests alone.
#![cfg(test)]

use std::time::Duration;

use lm_protocol::delivery::Delivery;
use lm_protocol::geometry::Wire as WireMode;

use super::bed::{Bed, BedConfig, noise};
use super::soak::check_packets;
use super::transfer::Dice;
use super::zero_copy::{P, config};
use crate::completion::Outcome;
use crate::connect::ConnectOptions;
use crate::message::Message;
use crate::port::ModeRequest;
use crate::simnic::{Bursts, Impairments, Pattern, ZeroCopy};

/// Sends `lens` one after the other while the wire does what it does, and looks at every message again after all have come.
fn under(bed: &mut Bed, lens: &[usize], seed: u64, impairments: Impairments) {
    under_and(bed, lens, seed, impairments, |_| {});
}

/// The same, with something else in each round.
pub(super) fn under_and(
    bed: &mut Bed,
    lens: &[usize],
    seed: u64,
    impairments: Impairments,
    mut each: impl FnMut(&mut Bed),
) {
    let largest = *lens.iter().max().expect("messages") as u64;
    let peer = bed.session(0, WireMode::Lm, largest);
    bed.wire.impair(0, impairments);
    let payload = |number: usize| noise(seed << 8 | number as u64, lens[number]);
    let mut kept: Vec<(usize, Message)> = Vec::new();
    let (mut sent, mut got, mut confirmed, mut idle) = (0, 0, 0, 0u32);
    while got < lens.len() || confirmed < lens.len() {
        while sent < lens.len() && bed.try_send(0, peer, &payload(sent), sent as u64).is_ok() {
            sent += 1;
        }
        each(bed);
        let work = bed.round();
        idle = if work == 0 { idle + 1 } else { 0 };
        assert!(idle < 40_000, "seed {seed}: {got} of {} messages", lens.len());
        bed.now_ns += u64::from(idle.min(100)) * 1_000;
        while let Some(message) = bed.hosts[1].take_message().expect("reliable") {
            assert_eq!(message.tag(), got as u64, "seed {seed}");
            assert!(message[..] == payload(got)[..], "seed {seed}: message {got}");
            kept.push((got, message));
            got += 1;
            if kept.len() > 3 {
                let (number, oldest) = kept.remove(0);
                assert!(
                    oldest[..] == payload(number)[..],
                    "seed {seed}: message {number} changed"
                );
            }
        }
        while let Some(completion) = bed.hosts[0].told.completions().pop_front() {
            assert_eq!(completion.outcome, Outcome::Delivered, "seed {seed}");
            confirmed += 1;
        }
    }
    bed.pass(Duration::from_millis(50));
    for (number, message) in &kept {
        assert!(
            message[..] == payload(*number)[..],
            "seed {seed}: message {number} changed"
        );
    }
    drop(kept);
    bed.wire.impair(0, Impairments::default());
    let now_ns = bed.now_ns;
    bed.hosts[0].end_session(peer.index, now_ns);
    bed.pass(Duration::from_millis(100));
    bed.check_memory();
    bed.check_guards();
    for engine in &bed.hosts {
        check_packets(engine).unwrap_or_else(|error| panic!("seed {seed}: {error}"));
    }
}

pub(super) fn lens(dice: &mut Dice, count: u64) -> Vec<usize> {
    (0..count)
        .map(|_| match dice.roll(4) {
            0 => 1441 + dice.roll(4_000),
            1 => dice.roll(30) * P + 1_441 + dice.roll(20),
            _ => 2_000 + dice.roll(298_000),
        } as usize)
        .collect()
}

/// One packet is lost: what is behind it is found, and what comes later is aimed right again.
#[test]
fn a_single_loss_is_one_fragment_sent_again() {
    for lost in [0u64, 1, 70, 127, 128, 199, 206, 207, 300] {
        let mut bed = Bed::new(&config(ZeroCopy::default()));
        let (mut seen, mut done) = (0, false);
        bed.wire.set_filter(move |from, packet| {
            let is_data = from == 0 && packet.len() > 66 && packet[42] == 0x21;
            if is_data && !done {
                seen += 1;
                if seen == lost + 1 {
                    done = true;
                    return false;
                }
            }
            true
        });
        let lens = [300_000; 12];
        under(&mut bed, &lens, lost, Impairments::default());
        let [sender, receiver] = [0, 1].map(|host| bed.hosts[host].counters);
        assert_eq!(sender.fragments_resent, 1, "packet {lost}");
        assert_eq!(receiver.fragments_one_copy, 1, "packet {lost}");
        // 208 fragments a message, of which eight may be on the way: they are shifted, and no more.
        assert!(
            receiver.fragments_displaced < 8 * 208,
            "packet {lost}: {}",
            receiver.fragments_displaced
        );
        assert!(receiver.fragments_displaced > 0, "packet {lost}");
    }
}

#[test]
fn seeded_losses() {
    for seed in 0..12 {
        let mut dice = Dice(seed * 77 + 1);
        let mut bed = Bed::new(&BedConfig {
            window: 1 << dice.roll(9),
            ..config(device(&mut dice))
        });
        let lens = lens(&mut dice, 25);
        let impairments = Impairments {
            seed,
            loss_ppm: [300, 3_000, 20_000][dice.roll(3) as usize],
            bursts: match dice.roll(3) {
                0 => Bursts {
                    begin_ppm: 500,
                    end_ppm: 200_000,
                    loss_ppm: 900_000,
                },
                _ => Bursts::default(),
            },
            pattern: match dice.roll(4) {
                0 => Pattern::LastOfRun { ppm: 10_000 },
                _ => Pattern::None,
            },
            ..Impairments::default()
        };
        under(&mut bed, &lens, seed, impairments);
    }
}

fn device(dice: &mut Dice) -> ZeroCopy {
    let batch = 1 << dice.roll(7);
    ZeroCopy {
        batch,
        ring_len: batch << (1 + dice.roll(3)),
        burst: 1 << dice.roll(8),
        prefix_len: [0, 10, 12][dice.roll(3) as usize],
        pad_to: 0,
        lap: 1,
    }
}

/// Where zero-copy mode was given up there are places for all, as in copy mode.
#[test]
fn several_land_where_zero_copy_mode_was_given_up() {
    let config = BedConfig {
        probing: true,
        mode: ModeRequest::Auto,
        ..config(ZeroCopy {
            pad_to: 64,
            prefix_len: 12,
            ..ZeroCopy::default()
        })
    };
    let mut bed = Bed::switch(&config, 4);
    let options = ConnectOptions {
        max_message_len: 100_000,
        ..ConnectOptions::default()
    };
    for host in 1..4 {
        let peer = bed.connect(host, &options).expect("a place");
        bed.send(host, peer, &noise(host as u64, 90_000), host as u64);
        assert!(bed.recv(0)[..] == noise(host as u64, 90_000)[..]);
    }
    assert_eq!(bed.hosts[0].counters.sessions_one_copy, 0);
    let landing = bed.hosts[0].landing.as_ref().expect("a landing channel");
    assert_eq!(landing.sessions.admitted().count(), 3);
}

#[test]
fn seeded_duplicates_and_foreign_packets() {
    for seed in 0..12 {
        let mut dice = Dice(seed * 91 + 3);
        let mut bed = Bed::new(&BedConfig {
            window: 1 << dice.roll(9),
            ..config(device(&mut dice))
        });
        let lens = lens(&mut dice, 25);
        let impairments = Impairments {
            seed,
            duplicate_ppm: [300, 10_000][dice.roll(2) as usize],
            duplicate_delay_max_ns: [0, 100_000][dice.roll(2) as usize],
            inject_ppm: [0, 300, 10_000][dice.roll(3) as usize],
            ..Impairments::default()
        };
        under(&mut bed, &lens, seed, impairments);
    }
}

#[test]
fn seeded_everything() {
    for seed in 0..24 {
        let mut dice = Dice(seed * 101 + 9);
        let mut bed = Bed::new(&BedConfig {
            window: 1 << dice.roll(9),
            landing_len: [1 << 20, 4 << 20][dice.roll(2) as usize],
            ..config(device(&mut dice))
        });
        let lens = lens(&mut dice, 20);
        let impairments = Impairments {
            seed,
            loss_ppm: 2_000,
            duplicate_ppm: 1_000,
            duplicate_delay_max_ns: 50_000,
            reorder_ppm: 2_000,
            reorder_packets_max: 6,
            reorder_hold_max_ns: 300_000,
            corrupt_ppm: 1_000,
            inject_ppm: 1_000,
            fill_empty_ppm: 300,
            rx_full_ppm: 200,
            delay_ns: [0, 20_000][dice.roll(2) as usize],
            jitter_ns: [0, 3_000][dice.roll(2) as usize],
            ..Impairments::default()
        };
        under(&mut bed, &lens, seed, impairments);
    }
}

/// Without reliable delivery what is not proved is not shown.
#[test]
fn losses_without_repetition() {
    for (delivery, seed) in [Delivery::Unreliable, Delivery::Partial]
        .into_iter()
        .flat_map(|d| (0..6).map(move |s| (d, s)))
    {
        let mut bed = Bed::new(&config(ZeroCopy::default()));
        let options = ConnectOptions {
            max_message_len: 200_000,
            delivery,
            ..ConnectOptions::default()
        };
        let peer = bed.connect(0, &options).expect("a session");
        bed.wire.impair(
            0,
            Impairments {
                seed,
                loss_ppm: 3_000,
                ..Impairments::default()
            },
        );
        let (mut sent, mut settled, mut shown, mut partial) = (0u64, 0, 0, 0);
        while settled < 30 {
            if sent < 30 && bed.try_send(0, peer, &noise(sent, 150_000), sent).is_ok() {
                sent += 1;
            }
            if bed.round() == 0 {
                bed.now_ns += 30_000;
            }
            loop {
                match bed.hosts[1].take_message() {
                    Ok(None) => break,
                    Err(_) => {}
                    Ok(Some(message)) => {
                        let mut expected = noise(message.tag(), 150_000);
                        for range in message.missing() {
                            expected[range.start as usize..range.end as usize].fill(0);
                        }
                        assert!(message[..] == expected[..], "{delivery:?}, seed {seed}");
                        shown += 1;
                        partial += u64::from(!message.missing().is_empty());
                    }
                }
            }
            while bed.hosts[0].told.completions().pop_front().is_some() {
                settled += 1;
            }
        }
        assert!(shown > 0, "{delivery:?}, seed {seed}");
        assert!(partial == 0 || delivery == Delivery::Partial);
        assert_eq!(bed.hosts[0].counters.fragments_resent, 0);
        for engine in &bed.hosts {
            check_packets(engine).unwrap_or_else(|error| panic!("{delivery:?}, seed {seed}: {error}"));
        }
    }
}

/// What is longer than any fragment writes over what landed above it: that is found out, and sent again.
#[test]
fn packets_that_are_too_long_spoil_what_they_touch_and_no_more() {
    let mut displaced = 0;
    for seed in 0..12u64 {
        let mut dice = Dice(seed * 31 + 7);
        let mut bed = Bed::new(&BedConfig {
            window: 1 << dice.roll(9),
            ..config(device(&mut dice))
        });
        let peer = bed.session(0, WireMode::Lm, 300_000);
        let lens = lens(&mut dice, 15);
        let (mut sent, mut got) = (0, 0);
        while got < lens.len() {
            while sent < lens.len() {
                let payload = noise(sent as u64, lens[sent]);
                match bed.try_send(0, peer, &payload, sent as u64) {
                    Ok(_) => sent += 1,
                    Err(_) => break,
                }
            }
            // As long as a chunk takes: 278 bytes of the slot above.
            if dice.roll(4) == 0 {
                let len = 1515 + dice.roll(1792 - 1515 + 1);
                bed.wire.inject(1, 1, &noise(dice.roll(1 << 40), len as usize));
            }
            if bed.round() == 0 {
                bed.now_ns += 50_000;
            }
            while let Some(message) = bed.hosts[1].take_message().expect("reliable") {
                assert!(
                    message[..] == noise(got as u64, lens[got])[..],
                    "seed {seed}: message {got}"
                );
                got += 1;
            }
        }
        displaced += bed.hosts[1].counters.fragments_displaced;
        bed.pass(Duration::from_millis(20));
        bed.check_guards();
        check_packets(&bed.hosts[1]).unwrap_or_else(|error| panic!("seed {seed}: {error}"));
    }
    assert!(displaced > 1_000, "{displaced}");
}

/// Entries are left when the last packets of all are lost: a short message is copied out of its zone, for a long one the
/// channel is built anew, and what follows lands as ever.
#[test]
fn what_is_left_at_the_end_is_not_waited_for() {
    for (len, copied_out, rebuilt) in [(300_000, 1, 0), (6_000_000, 0, 1)] {
        let mut bed = Bed::new(&BedConfig {
            landing_len: 16 << 20,
            send_len: 16 << 20,
            window: 256,
            ..config(ZeroCopy::default())
        });
        let peer = bed.session(0, WireMode::Lm, len as u64);
        let count = (len as u64).div_ceil(P);
        let mut seen = 0;
        bed.wire.set_filter(move |from, packet| {
            let is_data = from == 0 && packet.len() > 66 && packet[42] == 0x21;
            seen += u64::from(is_data);
            !(is_data && (count - 2..=count).contains(&seen))
        });
        bed.exchange(0, peer, &noise(5, len));
        let counters = bed.hosts[1].counters;
        assert_eq!(
            (counters.messages_copied_out, counters.landing_rebuilt),
            (copied_out, rebuilt)
        );
        bed.wire.clear_filter();
        for number in 0..4 {
            bed.exchange(0, peer, &noise(number, 250_000));
        }
        let after = bed.hosts[1].counters;
        assert_eq!(after.landing_rebuilt, rebuilt);
        // Three packets of the next message met what was left, or, sent on a credit for entries that are gone, none.
        let displaced = after.fragments_displaced - counters.fragments_displaced;
        let most = if rebuilt > 0 { 250_000u64.div_ceil(P) } else { 3 };
        assert!(displaced <= most, "{displaced} displaced of {len}");
        let now_ns = bed.now_ns;
        bed.hosts[0].end_session(peer.index, now_ns);
        bed.check_memory();
    }
}

/// One packet too many shifts a whole long message the other way; nothing of it need be sent again.
#[test]
fn a_duplicate_shifts_the_other_way() {
    for (len, at) in [(300_000, 3), (6_000_000, 0)] {
        let mut bed = Bed::new(&BedConfig {
            landing_len: 64 << 20,
            send_len: 64 << 20,
            window: 256,
            ..config(ZeroCopy::default())
        });
        let peer = bed.session(0, WireMode::Lm, len as u64);
        let payloads = [1, 2, 3].map(|seed| noise(seed, len));
        let first = std::sync::Arc::new(std::sync::Mutex::new((0u32, None::<Vec<u8>>)));
        let kept = first.clone();
        bed.wire.set_filter(move |from, packet| {
            if from == 0 && packet.len() > 66 && packet[42] == 0x21 {
                let mut kept = kept.lock().expect("one thread");
                if kept.0 == at {
                    kept.1 = Some(packet.clone());
                }
                kept.0 += 1;
            }
            true
        });
        for (tag, payload) in payloads.iter().enumerate() {
            while bed.try_send(0, peer, payload, tag as u64).is_err() {
                bed.round();
            }
        }
        for (number, payload) in payloads.iter().enumerate() {
            let message = loop {
                let again = first.lock().expect("one thread").1.take();
                if let Some(packet) = again {
                    bed.wire.inject(1, 1, &packet);
                }
                bed.round();
                bed.now_ns += 3_000;
                if let Some(message) = bed.hosts[1].take_message().expect("reliable") {
                    break message;
                }
            };
            assert!(message[..] == payload[..], "message {number} of {len} bytes");
        }
        let [sender, receiver] = [0, 1].map(|host| bed.hosts[host].counters);
        assert!(
            sender.fragments_resent <= 2,
            "{} of {len} bytes",
            sender.fragments_resent
        );
        assert!(receiver.fragments_displaced > 100, "{len} bytes");
    }
}

/// A device holds less than is posted, and its driver takes entries an interrupt after they were: no packet comes that finds none.
#[test]
fn packets_come_for_what_the_device_holds() {
    for ring_len in [1, 32, 64, 256] {
        let mut bed = Bed::new(&config(ZeroCopy {
            ring_len,
            batch: (ring_len / 2).clamp(1, 16),
            ..ZeroCopy::default()
        }));
        let peer = bed.session(0, WireMode::Lm, 900_000);
        for number in 0..10 {
            bed.exchange(0, peer, &noise(number, 900_000 - 80_000 * number as usize));
            // Longer than a path is kept busy.
            bed.pass(Duration::from_millis(5));
        }
        assert_eq!(bed.wire.counters().device_lost, 0, "{ring_len} entries");
        assert_eq!(bed.hosts[0].counters.fragments_resent, 0);
        bed.check_memory();
    }
}
