//! Random packets through the gate and through its model: the same verdicts, the same log.
//!
//! A failure prints its seed; `LM_SEED=<seed> cargo test -p lm-ebpf --test differential` replays that one alone.

mod bed;
#[path = "../../fuzz/replay.rs"]
mod replay;

use bed::pair::Pair;
use bed::{packet, random};
use lm_ebpf::Verdict;

/// Bytes per case: some 150 packets.
const CASE_LEN: usize = 2000;
const CASES: u64 = 150;

/// SplitMix64 (Steele, Lea, Flood 2014).
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ mixed >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ mixed >> 31
    }
}

fn case(pair: &mut Pair, seed: u64) -> usize {
    let mut random = Random(seed);
    let bytes: Vec<u8> = (0..CASE_LEN / 8)
        .flat_map(|_| random.next().to_le_bytes())
        .collect();
    random::run(pair, &bytes)
}

/// Names the seed if the case panics.
struct Named(u64);

impl Drop for Named {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!(
                "replay: LM_SEED={} cargo test -p lm-ebpf --test differential",
                self.0
            );
        }
    }
}

#[test]
fn gate_and_model_agree() {
    bed::in_namespace(|| {
        let mut pair = Pair::new(Some(packet::LOCAL));
        let replay: Option<u64> = std::env::var("LM_SEED")
            .ok()
            .map(|seed| seed.parse().expect("LM_SEED is a number"));
        let mut landed = 0;
        for seed in replay.map_or(0..CASES, |seed| seed..seed + 1) {
            let _named = Named(seed);
            landed += case(&mut pair, seed);
        }
        let counters = pair.gate.counters();
        println!("{} packets, {landed} landed", counters.total());
        if replay.is_none() {
            assert!(
                counters.total() > 10_000 && landed > 1_000,
                "{} packets, {landed} landed",
                counters.total()
            );
            // One program has the gate here; `tests/sharing.rs` has several.
            let is_here = |verdict| verdict != Verdict::PassElsewhere;
            let unseen: Vec<_> = counters
                .iter()
                .filter(|&(verdict, count)| count == 0 && is_here(verdict))
                .collect();
            assert!(unseen.is_empty(), "the cases never reach {unseen:?}");
        }
    });
}

#[test]
fn the_corpus_of_gate_agrees() {
    bed::in_namespace(|| {
        let mut pair = Pair::new(Some(packet::LOCAL));
        replay::replay("gate", |bytes| {
            random::run(&mut pair, bytes);
        });
    });
}
