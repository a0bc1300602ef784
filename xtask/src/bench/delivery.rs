//! `cargo xtask bench delivery`: what reliable delivery costs where nothing is lost.
//!
//! The recipe is that of `bench core` (see `recipes.rs`) and differs in `--delivery` alone: with digests, as the tools have it by default,
//! and without.

use super::recipes::{LM, NO_DIGESTS, lm_stream_with};
use super::{Comparison, Target, Unit};

const UNRELIABLE: &str = "LM unreliable";
const NO_DIGESTS_RELIABLE: &str = "LM, no digests";
const NO_DIGESTS_UNRELIABLE: &str = "LM unreliable, no digests";
/// What reliable delivery shall reach of unreliable.
const KEPT: f64 = 0.97;

const LENS: [(&str, &str, u32); 3] = [
    ("delivery_7168", "no loss, 7168 B", 7168),
    ("delivery_64k", "no loss, 64 KiB", 65_536),
    ("delivery_1m", "no loss, 1 MiB", 1 << 20),
];

/// Everything of `cargo xtask bench delivery`.
pub(super) fn comparisons() -> Vec<Comparison> {
    let one = |&(key, title, message_len): &(&'static str, &'static str, u32)| {
        let stream = |name, transport, delivery| lm_stream_with(name, message_len, transport, delivery);
        Comparison {
            key,
            title,
            unit: Unit::GbitPerSecond,
            contenders: vec![
                stream(LM, "lm", None),
                stream(UNRELIABLE, "lm", Some("unreliable")),
                stream(NO_DIGESTS_RELIABLE, NO_DIGESTS, None),
                stream(NO_DIGESTS_UNRELIABLE, NO_DIGESTS, Some("unreliable")),
            ],
            targets: vec![
                Target::RatioAtLeast(UNRELIABLE, KEPT),
                Target::RatioOfAtLeast(NO_DIGESTS_RELIABLE, NO_DIGESTS_UNRELIABLE, KEPT),
            ],
            most_rounds: None,
        }
    };
    LENS.iter().map(one).collect()
}
