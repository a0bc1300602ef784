//! Packets of several frames (multi-buffer mode): they land where they belong without a copy, and what is lost among them does no harm.
#![cfg(test)]

use lm_ebpf::Verdict;
use lm_protocol::delivery::Delivery;
use lm_protocol::geometry::{Layout, LinkShape, Wire as WireMode};

use super::bed::{Bed, BedConfig, noise};
use crate::connect::ConnectOptions;
use crate::simnic::Impairments;

const MTUS: [u16; 5] = [3498, 3900, 4000, 9000, 60_000];

fn options(messages_in_flight: u32) -> ConnectOptions {
    ConnectOptions {
        max_message_len: 1 << 20,
        messages_in_flight,
        ..ConnectOptions::default()
    }
}

/// Every length around the edges of frames, fragments and windows is in its place without a copy.
#[test]
fn packets_of_several_frames_land_without_a_copy() {
    for mtu in MTUS {
        let mut bed = Bed::new(&BedConfig {
            mtu,
            window: 4,
            ..BedConfig::default()
        });
        let peer = bed.connect(0, &options(8)).expect("a session");
        let layout = Layout::new(WireMode::Lm, mtu, LinkShape::IPV4).expect("an MTU");
        let payload_len = u64::from(layout.payload_len());
        let capacity = 4096 - 256;
        let header_len = u64::from(layout.header_len());
        let edges = (1..=payload_len / capacity + 1).map(|frames| frames * capacity - header_len);
        let lens: Vec<u64> = edges
            .chain([
                payload_len,
                2 * payload_len,
                4 * payload_len,
                9 * payload_len + 4000,
            ])
            .flat_map(|edge| [edge - 1, edge, edge + 1])
            .filter(|len| *len > bed.hosts[0].eager_max_len())
            .collect();
        for (tag, &len) in lens.iter().enumerate() {
            bed.exchange(0, peer, &noise(tag as u64 + 1, len as usize));
        }
        let fragments: u64 = lens.iter().map(|len| len.div_ceil(payload_len)).sum();
        let gate = bed.hosts[1].port.gate_counters();
        // Facts may take a fragment more; and what comes to open entries, which are for short messages, is copied.
        let ahead = bed.hosts[1].counters.messages_ahead;
        let landed = gate.get(Verdict::RedirectLanding);
        assert!(
            (fragments..=fragments + ahead).contains(&landed),
            "MTU {mtu}: {landed}"
        );
        let copied = bed.hosts[1].counters.user_copied_bytes;
        assert!(copied <= ahead * 64 * payload_len, "MTU {mtu}: {copied}");
    }
}

/// The smaller MTU of both ends decides, and packets of one frame land beside those of three.
#[test]
fn the_smaller_mtu_decides() {
    let mut bed = Bed::switch(
        &BedConfig {
            mtu: 9000,
            ..BedConfig::default()
        },
        3,
    );
    bed.hosts[2].fixed.mtu = 1500;
    for host in [1, 2] {
        let peer = bed.connect(host, &options(4)).expect("a session");
        for round in 0..4 {
            let bytes = noise(round + 1, 100_000 + round as usize);
            bed.send(host, peer, &bytes, round);
            assert!(bed.recv(0)[..] == bytes[..]);
        }
    }
    let landing = bed.hosts[0].landing.as_ref().expect("a landing queue");
    let layouts: Vec<u16> = (landing.sessions.iter())
        .map(|inbound| inbound.terms.layout.payload_len())
        .collect();
    assert_eq!(layouts, [8944, 1448]);
}

/// A lost packet leaves its entry to a packet of another session, which may be longer than what belongs there.
#[test]
fn longer_packets_in_shorter_slots_spoil_nothing() {
    for seed in 0..40 {
        let config = BedConfig {
            window: 16,
            ..BedConfig::default()
        };
        let mut bed = Bed::switch(&config, 3);
        bed.hosts[2].fixed.mtu = [576, 1000, 1490][seed as usize % 3];
        let peers = [1, 2].map(|host| bed.connect(host, &options(4)).expect("a session"));
        for host in [1, 2] {
            let what = Impairments {
                loss_ppm: 60_000,
                seed,
                ..Impairments::default()
            };
            bed.wire.impair(host, what);
        }
        let bytes = |tag: u64| noise(seed << 16 | tag, 30_000 + 977 * tag as usize);
        for (peer, host) in peers.into_iter().zip(1..) {
            for number in 0..4 {
                let tag = 4 * host as u64 + number;
                bed.send(host, peer, &bytes(tag), tag);
            }
        }
        let mut whole = 0;
        while whole < 8 {
            bed.round();
            while let Some(message) = bed.hosts[0].take_message().expect("no failure") {
                let tag = message.tag();
                assert!(message[..] == bytes(tag)[..], "seed {seed}, message {tag}");
                whole += 1;
            }
        }
    }
}

/// A lost packet leaves its frames to one that may take fewer: that one is passed to the kernel, and nothing is written where it must not.
#[test]
fn losses_among_packets_of_several_frames_are_repaired() {
    for (mtu, delivery) in [
        (9000, Delivery::Reliable),
        (60_000, Delivery::Reliable),
        (9000, Delivery::Partial),
    ] {
        let mut bed = Bed::new(&BedConfig {
            mtu,
            window: 8,
            ..BedConfig::default()
        });
        let options = ConnectOptions {
            delivery,
            ..options(8)
        };
        let peer = bed.connect(0, &options).expect("a session");
        bed.wire.impair(
            0,
            Impairments {
                loss_ppm: 30_000,
                reorder_ppm: 5_000,
                reorder_hold_max_ns: 100_000,
                duplicate_ppm: 5_000,
                seed: u64::from(mtu),
                ..Impairments::default()
            },
        );
        let (mut whole, mut settled) = (0, 0);
        for burst in 0..20_u64 {
            let tags = 4 * burst..4 * burst + 4;
            let bytes = |tag: u64| noise(tag + 1, 64_000 + 977 * tag as usize);
            tags.clone().for_each(|tag| {
                bed.send(0, peer, &bytes(tag), tag);
            });
            while settled < tags.end {
                bed.round();
                loop {
                    let message = match bed.hosts[1].take_message() {
                        Ok(Some(message)) => message,
                        Ok(None) => break,
                        // With partial delivery a message of which nothing is proved is reported.
                        Err(_) => {
                            settled += 1;
                            continue;
                        }
                    };
                    let mut expected = bytes(message.tag());
                    for range in message.missing() {
                        expected[range.start as usize..range.end as usize].fill(0);
                    }
                    assert!(
                        message[..] == expected[..],
                        "MTU {mtu}, message {}",
                        message.tag()
                    );
                    whole += u32::from(message.missing().is_empty());
                    settled += 1;
                }
            }
        }
        if delivery == Delivery::Reliable {
            assert_eq!(whole, 80);
        }
        let gate = bed.hosts[1].port.gate_counters();
        assert!(
            gate.get(Verdict::RedirectLanding) > 0 && gate.get(Verdict::PassSlot) > 0,
            "{gate:?}"
        );
    }
}

/// A receiver that wants repetitions apart, of packets longer than our frames: they go by the kernel's socket, and nothing is written
/// behind a frame.
#[test]
fn repetitions_apart_are_never_longer_than_a_frame() {
    let mut bed = Bed::new(&BedConfig {
        mtu: 9000,
        ..BedConfig::default()
    });
    let peer = bed.connect(0, &options(4)).expect("a session");
    let outbound = bed.hosts[0].peers.at(peer.index).outbound.as_mut();
    outbound.expect("a session").terms.repeats_apart = true;
    let mut lost = 0;
    bed.wire.set_filter(move |from, packet| {
        // The first two fragments of the first message.
        let is_fragment = from == 0 && packet.len() > 5000;
        lost += u32::from(is_fragment);
        !is_fragment || lost > 2
    });
    let bytes = noise(2, 100_000);
    bed.send(0, peer, &bytes, 1);
    assert!(bed.recv(1)[..] == bytes[..]);
    assert_eq!(bed.hosts[0].counters.fragments_resent, 2);
}
