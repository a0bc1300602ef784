//! IP fragments in zero-copy mode, under exclusive use: the first fragment of a message has 8 bytes more of headers than others,
//! nothing is sent again, and digests go by LM's own packets.
#![cfg(test)]

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use lm_protocol::geometry::{Layout, LinkShape, Wire as WireMode};
use lm_protocol::integrity::Integrity;

use super::bed::{Bed, BedConfig, noise, wire_of};
use super::soak::check_packets;
use super::transfer::Dice;
use crate::completion::{Outcome, PeerId};
use crate::connect::ConnectOptions;
use crate::simnic::{Bursts, Impairments, Semantics, ZeroCopy};

/// Longest message: one UDP datagram.
const LONGEST: u64 = 65_507;
/// Message bytes of a full fragment with an MTU of 1500; the first one has 8 less.
const P: u64 = 1480;

fn config(device: ZeroCopy) -> BedConfig {
    BedConfig {
        exclusive: true,
        wire: wire_of(Semantics::ZeroCopy(device)),
        ..BedConfig::default()
    }
}

fn is_fragment(packet: &[u8]) -> bool {
    packet.len() > 34 && packet[12..14] == [8, 0] && (packet[20] & 0x3f, packet[21]) != (0, 0)
}

#[test]
fn messages_of_every_length_land_without_a_copy() {
    for (prefix_len, window, mtu) in [(0, 64, 1500), (12, 8, 1500), (10, 1, 1500), (12, 256, 576)] {
        let mut bed = Bed::new(&BedConfig {
            window,
            mtu,
            ..config(ZeroCopy {
                prefix_len,
                ..ZeroCopy::default()
            })
        });
        let peer = bed.session(0, WireMode::IpFrag, LONGEST);
        let fragments = Arc::new(AtomicU32::new(0));
        let seen = Arc::clone(&fragments);
        bed.wire.set_filter(move |from, packet| {
            let is_counted = from == 0 && is_fragment(packet);
            seen.fetch_add(u32::from(is_counted), Ordering::Relaxed);
            true
        });
        let lens = [
            1_449,
            P - 8,
            P - 7,
            2 * P - 8,
            2 * P - 7,
            2 * P - 8 + 26,
            7_168,
            8 * P - 8,
            8 * P - 7,
            40_000,
            LONGEST - 1,
            LONGEST,
        ];
        let layout = Layout::new(WireMode::IpFrag, mtu, LinkShape::IPV4).expect("an MTU");
        let mut count = 0;
        for (number, len) in lens.into_iter().enumerate() {
            count += layout.session_message(len).expect("it fits").fragment_count();
            bed.exchange(0, peer, &noise(number as u64 + 7, len as usize));
        }
        assert_eq!(fragments.load(Ordering::Relaxed), count);
        bed.check_clean();
        bed.check_memory();
        let counters = &bed.hosts[1].counters;
        assert_eq!((counters.user_copied_bytes, counters.page_end_fragments), (0, 0));
        assert_eq!(
            (counters.fragments_displaced, counters.violations.total()),
            (0, 0)
        );
    }
}

/// What becomes of messages while the wire does what it does: whether each was shown. Those that were not are reported on both
/// sides, and none is wrong.
fn under(bed: &mut Bed, peer: PeerId, lens: &[usize]) -> Vec<bool> {
    let mut shown = vec![false; lens.len()];
    let mut failed = vec![false; lens.len()];
    let mut delivered = vec![None; lens.len()];
    let (mut sent, mut settled, mut idle) = (0, 0, 0u32);
    while settled < lens.len() {
        while sent < lens.len()
            && bed
                .try_send(0, peer, &noise(sent as u64, lens[sent]), sent as u64)
                .is_ok()
        {
            sent += 1;
        }
        idle = if bed.round() == 0 { idle + 1 } else { 0 };
        assert!(idle < 40_000, "{settled} of {} messages are settled", lens.len());
        bed.now_ns += u64::from(idle.min(100)) * 1_000;
        loop {
            match bed.hosts[1].take_message() {
                Ok(None) => break,
                Ok(Some(message)) => {
                    let tag = message.tag() as usize;
                    assert!(message[..] == noise(tag as u64, lens[tag])[..], "message {tag}");
                    assert!(!std::mem::replace(&mut shown[tag], true), "message {tag} twice");
                }
                Err(crate::completion::RecvError::Incomplete { tag, .. }) => failed[tag as usize] = true,
                Err(error) => panic!("{error}"),
            }
        }
        while let Some(completion) = bed.hosts[0].told.completions().pop_front() {
            delivered[completion.tag as usize] = Some(completion.outcome == Outcome::Delivered);
            settled += 1;
        }
    }
    for tag in 0..lens.len() {
        assert_eq!(
            (delivered[tag], failed[tag]),
            (Some(shown[tag]), !shown[tag]),
            "message {tag}"
        );
    }
    for engine in &bed.hosts {
        check_packets(engine).unwrap_or_else(|error| panic!("{error}"));
    }
    shown
}

/// One packet is lost: that message is, and what it has shifted behind it is found again, first fragments and others.
#[test]
fn a_single_loss_is_one_message() {
    for lost in [0u32, 1, 43, 44, 45, 100, 134, 200] {
        let mut bed = Bed::new(&config(ZeroCopy::default()));
        let peer = bed.session(0, WireMode::IpFrag, 65_000);
        let mut seen = 0;
        bed.wire.set_filter(move |from, packet| {
            seen += u32::from(from == 0 && is_fragment(packet));
            from != 0 || !is_fragment(packet) || seen != lost + 1
        });
        let shown = under(&mut bed, peer, &[65_000; 30]);
        // 44 fragments each.
        let expected: Vec<bool> = (0..30).map(|number| number != lost / 44).collect();
        assert_eq!(shown, expected, "packet {lost}");
        let receiver = &bed.hosts[1].counters;
        assert!(
            receiver.fragments_displaced > 0 || lost >= 29 * 44,
            "packet {lost}"
        );
        assert_eq!(bed.hosts[0].counters.fragments_resent, 0);
        bed.check_guards();
    }
}

#[test]
fn seeded_impairments() {
    let (mut messages, mut lost, mut displaced) = (0, 0, 0);
    for seed in 0..24u64 {
        let mut dice = Dice(seed * 53 + 11);
        let batch = 1 << dice.roll(7);
        let device = ZeroCopy {
            batch,
            ring_len: batch << (1 + dice.roll(3)),
            burst: 1 << dice.roll(8),
            prefix_len: [0, 10, 12][dice.roll(3) as usize],
            pad_to: 0,
            lap: 1,
        };
        let mut bed = Bed::new(&BedConfig {
            window: 1 << dice.roll(9),
            ..config(device)
        });
        let peer = bed.session(0, WireMode::IpFrag, LONGEST);
        let each = |dice: &mut Dice, ppm: u32| ppm * dice.roll(2) as u32;
        let impairments = Impairments {
            seed,
            loss_ppm: [0, 500, 3_000][dice.roll(3) as usize],
            bursts: match dice.roll(4) {
                0 => Bursts {
                    begin_ppm: 500,
                    end_ppm: 200_000,
                    loss_ppm: 900_000,
                },
                _ => Bursts::default(),
            },
            duplicate_ppm: each(&mut dice, 1_000),
            duplicate_delay_max_ns: 50_000,
            reorder_ppm: each(&mut dice, 1_000),
            reorder_packets_max: 6,
            reorder_hold_max_ns: 300_000,
            corrupt_ppm: each(&mut dice, 1_000),
            inject_ppm: each(&mut dice, 1_000),
            fill_empty_ppm: each(&mut dice, 200),
            ..Impairments::default()
        };
        let lens: Vec<usize> = (0..60)
            .map(|_| match dice.roll(3) {
                0 => 1_441 + dice.roll(4_000),
                1 => dice.roll(43) * P + 1_441 + dice.roll(60),
                _ => 2_000 + dice.roll(LONGEST - 1_999),
            } as usize)
            .collect();
        bed.wire.impair(0, impairments);
        let shown = under(&mut bed, peer, &lens);
        messages += shown.len();
        lost += shown.iter().filter(|shown| !**shown).count();
        displaced += bed.hosts[1].counters.fragments_displaced;
        bed.check_guards();
    }
    assert!(
        lost > 0 && lost < messages / 3 && displaced > 1_000,
        "{lost} of {messages}, {displaced} displaced"
    );
}

/// In copy mode the paper's wire is without digests, asked for or not.
#[test]
fn exclusive_use_changes_nothing_in_copy_mode() {
    let mut bed = Bed::new(&BedConfig {
        exclusive: true,
        ..BedConfig::default()
    });
    let peer = bed.connect(
        0,
        &ConnectOptions {
            wire: WireMode::IpFrag,
            max_message_len: LONGEST,
            ..ConnectOptions::default()
        },
    );
    let peer = peer.expect("a session");
    bed.exchange(0, peer, &noise(1, LONGEST as usize));
    let landing = bed.hosts[1].landing.as_ref().expect("a landing channel");
    let inbound = landing.sessions.iter().next().expect("a session");
    assert_eq!(inbound.terms.integrity, Integrity::None);
    bed.check_clean();
}
