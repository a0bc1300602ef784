//! `cargo xtask bench delivery`: what reliable delivery costs where nothing is lost.
//!
//! The recipe is that of `bench core` (see `recipes.rs`) and differs in `--delivery` alone: with digests, as the tools have it by default,
//! and without.

use std::path::PathBuf;

use anyhow::Result;

use super::recipes::{LM, NO_DIGESTS, lm_stream_with};
use super::{Comparison, Headings, Target, Unit};
use crate::machine::ResultFile;
use crate::workspace::Programs;

/// Reliable beside unreliable delivery where nothing is lost, at 7168 B, 64 KiB and 1 MiB messages.
///
/// Prints goodput and the ratio. Takes both of two cores; leave the machine alone meanwhile. A target that is missed is
/// no error.
#[derive(Debug, clap::Args)]
pub struct Arguments {
    /// Rounds: how often every contender is measured.
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..))]
    pairs: u32,
    /// Also keep everything, with every single sample, in this file.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Only comparisons whose key contains this text: 7168, 64k, 1m.
    #[arg(long, value_name = "TEXT")]
    only: Option<String>,
}

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

/// Runs the command.
pub(super) fn run(arguments: &Arguments) -> Result<()> {
    let file = arguments.json.as_deref().map(ResultFile::create).transpose()?;
    let programs = Programs::build()?;
    let comparisons = super::selected(comparisons(), arguments.only.as_deref())?;
    let measured = super::measure_all(comparisons, arguments.pairs, &programs)?;
    super::print_results(&measured, arguments.pairs, Headings::FIRST);
    println!("{}", super::ABOUT_VETH);
    super::keep("delivery", arguments.pairs, &measured, file)
}

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
