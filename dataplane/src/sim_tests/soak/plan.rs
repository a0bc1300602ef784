//! What a seed stands for: a bed, its load, and everything that goes wrong in it.

use std::time::Duration;

use lm_protocol::geometry::{Layout, LinkShape, Wire as WireMode};
use lm_protocol::integrity::Integrity;

use super::Soak;
use crate::opening::Queues;
use crate::sim_tests::bed::{BedConfig, TWO_QUEUES, noise};
use crate::sim_tests::transfer::Dice;
use crate::simnic::{Bursts, Corrupt, Impairments, Pattern, Semantics, ZeroCopy};

/// A host that is not polled for a while: its application is busy, or the scheduler has other ideas.
#[derive(Clone, Copy, Debug)]
pub(super) struct Stall {
    pub(super) host: usize,
    pub(super) begin_ns: u64,
    pub(super) end_ns: u64,
}

/// All that a seed decides.
#[derive(Clone, Debug)]
pub(super) struct Plan {
    pub(super) bed: BedConfig,
    pub(super) mode: WireMode,
    pub(super) max_message_len: u64,
    pub(super) messages_in_flight: u32,
    /// Lengths of the messages that each host sends.
    pub(super) messages: [Vec<usize>; 2],
    pub(super) impairments: [Impairments; 2],
    pub(super) stalls: Vec<Stall>,
    /// Which host stops for ever, and when after the start.
    pub(super) death: Option<(usize, u64)>,
    /// Whose fragments do not reach the landing queue any more, and from when after the start on.
    pub(super) detour: Option<(usize, u64)>,
    /// Until when after the start each host's places for sessions that land are taken, where its sender begins by the one-copy path.
    pub(super) full_until: Option<[u64; 2]>,
    /// Every second message that is not empty is sent while it is written.
    pub(super) writes: bool,
    /// Both hosts read messages while they arrive.
    pub(super) reads: bool,
    /// How long an application keeps a message, at most.
    pub(super) keep_max_ns: u64,
}

/// Decisions of the plan; the seed's bits are mixed first, because seeds are small numbers.
pub(super) fn dice(seed: u64) -> Dice {
    let mixed = noise(seed ^ 0x736f_616b, 8);
    Dice(u64::from_le_bytes(mixed.try_into().expect("eight bytes")) | 1)
}

pub(super) fn pick<T: Copy>(dice: &mut Dice, choices: &[T]) -> T {
    choices[dice.roll(choices.len() as u64) as usize]
}

/// Rare or frequent: every power of two below the limit is as likely as any other, and nothing at all as one third.
fn rate(dice: &mut Dice, max_ppm: u32) -> u32 {
    match dice.roll(3) {
        0 => 0,
        _ => max_ppm >> dice.roll(10),
    }
}

fn length(dice: &mut Dice, layout: &Layout, max: u64) -> usize {
    let payload_len = u64::from(layout.payload_len());
    let len = match dice.roll(6) {
        0 => dice.roll(100),
        1 | 2 => dice.roll(payload_len + 1),
        // Around whole fragments.
        3 => (dice.roll(40) * payload_len + dice.roll(70)).saturating_sub(35),
        4 => dice.roll(66_000),
        _ => dice.roll(max + 1),
    };
    len.min(max) as usize
}

/// `verified`: the hosts' sessions have digests.
fn impairments(dice: &mut Dice, soak: &Soak, verified: bool, seed: u64) -> Impairments {
    let pattern = match dice.roll(8) {
        0 => Pattern::Every {
            count: 50 + dice.roll(2000),
            at: dice.roll(50),
        },
        1 => Pattern::FirstOfRun {
            ppm: rate(dice, 50_000),
        },
        2 => Pattern::LastOfRun {
            ppm: rate(dice, 50_000),
        },
        _ => Pattern::None,
    };
    let bursts = Bursts {
        begin_ppm: rate(dice, 3_000),
        end_ppm: 20_000 + dice.roll(400_000) as u32,
        loss_ppm: 300_000 + dice.roll(700_001) as u32,
    };
    let delays = [0, 0, 3_000, 20_000, 200_000];
    let mut what = Impairments {
        seed,
        loss_ppm: rate(dice, 30_000),
        bursts,
        pattern,
        duplicate_ppm: rate(dice, 30_000),
        duplicate_delay_max_ns: pick(dice, &[0, 10_000, 1_000_000]),
        reorder_ppm: rate(dice, 30_000),
        reorder_packets_max: dice.roll(8) as u32,
        reorder_hold_max_ns: pick(dice, &[10_000, 100_000, 3_000_000]),
        delay_ns: pick(dice, &delays),
        jitter_ns: pick(dice, &[0, 0, 0, 2_000, 50_000]),
        corrupt_ppm: rate(dice, 10_000),
        corrupt: Corrupt::FragmentHeaders,
        inject_ppm: rate(dice, 50_000),
        fill_empty_ppm: rate(dice, 3_000),
        rx_full_ppm: rate(dice, 3_000),
    };
    // Drawn once for an impairment that went: what follows stays as it was recorded.
    rate(dice, 10_000);
    if !soak.corrupt {
        what.corrupt_ppm = 0;
    } else if verified || soak.unverified {
        what.corrupt = Corrupt::Anything;
    }
    if !soak.foreign {
        what.inject_ppm = 0;
    }
    if !soak.rings {
        (what.fill_empty_ppm, what.rx_full_ppm) = (0, 0);
    }
    what
}

/// A host's device, by dice of its own.
fn device(seed: u64, landing_ring_len: u32) -> ZeroCopy {
    let mut dice = dice(seed ^ 0x6e69_6300);
    let batch = 1 << dice.roll(7);
    ZeroCopy {
        batch,
        ring_len: batch << (1 + dice.roll(3)),
        burst: 1 << dice.roll(8),
        prefix_len: pick(&mut dice, &[0, 10, 12]),
        pad_to: 0,
        // A lap must fit the ring.
        lap: pick(&mut dice, &[1, 1, 16, 80]).min(landing_ring_len / 4),
    }
}

impl Plan {
    pub(super) fn new(seed: u64, soak: &Soak) -> Plan {
        let mut dice = dice(seed);
        let dice = &mut dice;
        let mtu = match dice.roll(3) {
            0 => 576 + dice.roll(3498 - 576 + 1) as u16,
            _ => pick(dice, &[576, 1500, 1500, 3498]),
        };
        // Half of the seeds land in zero-copy mode, where nothing else is possible. Not by the dice, as below.
        let zero_copy = !seed.is_multiple_of(2) && !soak.unverified;
        // A quarter of the others has packets of several frames. Not by the dice either.
        let mtu = match (seed / 2) % 4 {
            3 if !zero_copy => [4000, 9000, 9000, 60_000, 65_521][(seed / 8) as usize % 5],
            _ => mtu,
        };
        let mode = match dice.roll(5) {
            0 => WireMode::IpFrag,
            _ => WireMode::Lm,
        };
        // Not by the dice, so that what else a seed decides is the same with and without.
        let integrity = match (seed / 4).is_multiple_of(3) {
            true if !zero_copy => Integrity::None,
            _ => Integrity::Manifest,
        };
        let verified = (zero_copy || mode == WireMode::Lm) && integrity.has_digests();
        let layout = Layout::new(mode, mtu, LinkShape::IPV4).expect("a legal MTU");
        let max_message_len = pick(dice, &[20_000u64, 100_000, 300_000]).min(layout.max_message_len());
        let messages = [0, 1].map(|_| {
            let count = match dice.roll(8) {
                0 => 0,
                1 => 1 + dice.roll(80),
                _ => 1 + dice.roll(25),
            };
            (0..count)
                .map(|_| length(dice, &layout, max_message_len))
                .collect()
        });
        let lease = Duration::from_millis(1500 + dice.roll(3500));
        let patience = Duration::from_millis(300 + dice.roll(1700));
        let mut bed = BedConfig {
            // The soak has guards of its own, which know what it keeps.
            guarded: false,
            mtu,
            window: 1 << dice.roll(11),
            queues: match dice.roll(8) {
                0 if !zero_copy => {
                    [Queues {
                        general: None,
                        landing: Some(0),
                    }; 2]
                }
                _ => [TWO_QUEUES; 2],
            },
            landing_len: pick(dice, &[4096u64, 256 << 10, 1 << 20]),
            send_len: pick(dice, &[640u64 << 10, 2 << 20]),
            max_message_len,
            ring_start: 0u32.wrapping_sub(dice.roll(2000) as u32),
            tx_in_flight: pick(dice, &[3u32, 32, 192, 1024]),
            on_the_way: pick(dice, &[5u32, 64, 192, u32::MAX]),
            tx_bound: u32::from(dice.roll(2) == 0),
            patience,
            lease,
            landing_ring_len: pick(dice, &[64u32, 256, 2048, 1 << 15]),
            integrity,
            exclusive: true,
            seed,
            // By its own dice, as for the digests.
            adapts: [seed % 7 == 3, seed % 5 == 3],
            ..BedConfig::default()
        };
        if zero_copy {
            let device = |host| Semantics::ZeroCopy(device(seed * 2 + host, bed.landing_ring_len));
            bed.wire.semantics = [0, 1].map(device);
        }
        let stalls = match soak.stalls {
            true => (0..dice.roll(4))
                .map(|_| {
                    let begin_ns = dice.roll(30_000_000);
                    let longest_ns = pick(dice, &[100_000u64, 5_000_000, 300_000_000, 3_000_000_000]);
                    Stall {
                        host: dice.roll(2) as usize,
                        begin_ns,
                        end_ns: begin_ns + dice.roll(longest_ns),
                    }
                })
                .collect(),
            false => Vec::new(),
        };
        // By their own dice, as for the digests.
        let detour = (mode == WireMode::Lm && bed.queues[0].general.is_some() && seed % 24 < 3).then(|| {
            let mut dice = self::dice(seed ^ 0x6465_746f_7572);
            let at_ns = pick(&mut dice, &[0, 0, 1_000_000, 30_000_000]);
            (dice.roll(2) as usize, dice.roll(at_ns + 1))
        });
        // By their own dice, too.
        let full_until = seed.is_multiple_of(5).then(|| {
            let mut dice = self::dice(seed ^ 0x70_656e_6469_6e67);
            [0, 1].map(|_| {
                let longest_ns = pick(&mut dice, &[1_000_000, 30_000_000, 30_000_000, 400_000_000]);
                dice.roll(longest_ns)
            })
        });
        let death = (soak.death && dice.roll(6) == 0).then(|| (dice.roll(2) as usize, dice.roll(10_000_000)));
        Plan {
            mode,
            max_message_len,
            messages_in_flight: 1 + dice.roll(32) as u32,
            messages,
            impairments: [0, 1].map(|from| impairments(dice, soak, verified, seed * 2 + from)),
            stalls,
            death,
            detour,
            full_until,
            // Not by the dice.
            writes: mode == WireMode::Lm && seed.is_multiple_of(3),
            reads: soak.reading,
            keep_max_ns: pick(dice, &[0, 100_000, 20_000_000]),
            bed,
        }
    }
}
