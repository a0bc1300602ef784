//! `cargo xtask bench delivery`: what reliable delivery costs where nothing is lost.
//!
//! The recipe is that of `bench core` (see [`recipes`]) and differs in `--delivery` alone. Where the tools know digests
//! (`--integrity`), the two are compared without them, and reliable delivery with digests stands beside it.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};

use super::recipes;
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

const RELIABLE: &str = "LM reliable";
const UNRELIABLE: &str = "LM unreliable";
const WITH_DIGESTS: &str = "LM reliable, digests";
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
    let digests = knows_integrity(&programs.path("lm-bench"))?;
    let comparisons = super::selected(comparisons(digests), arguments.only.as_deref())?;
    let measured = super::measure_all(comparisons, arguments.pairs, &programs)?;
    super::print_results(&measured, arguments.pairs, Headings::FIRST);
    println!("{}", super::ABOUT_VETH);
    super::keep("delivery", arguments.pairs, &measured, file)
}

/// Whether the sender can do with and without digests.
fn knows_integrity(lm_bench: &Path) -> Result<bool> {
    let help = Command::new(lm_bench).args(["lm-stream-send", "--help"]).output();
    let help = help.with_context(|| format!("cannot start {}", lm_bench.display()))?;
    Ok(String::from_utf8_lossy(&help.stdout).contains("--integrity"))
}

/// Everything of `cargo xtask bench delivery`.
fn comparisons(digests: bool) -> Vec<Comparison> {
    let none = if digests { "--integrity none" } else { "" };
    let one = |&(key, title, message_len): &(&'static str, &'static str, u32)| {
        let stream = |name, options: &str| recipes::lm_stream_with(name, message_len, options);
        let mut contenders = vec![
            stream(RELIABLE, &format!("--delivery reliable {none}")),
            stream(UNRELIABLE, &format!("--delivery unreliable {none}")),
        ];
        if digests {
            contenders.push(stream(WITH_DIGESTS, "--delivery reliable --integrity manifest"));
        }
        Comparison {
            key,
            title,
            unit: Unit::GbitPerSecond,
            contenders,
            targets: vec![Target::RatioAtLeast(UNRELIABLE, KEPT)],
            most_rounds: None,
        }
    };
    LENS.iter().map(one).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn digests_are_a_contender_where_there_are_any() {
        let names = |digests: bool| -> Vec<Vec<&str>> {
            comparisons(digests)
                .iter()
                .map(|comparison| comparison.contenders.iter().map(|one| one.name).collect())
                .collect()
        };
        assert_eq!(names(false), vec![vec![RELIABLE, UNRELIABLE]; 3]);
        assert_eq!(names(true), vec![vec![RELIABLE, UNRELIABLE, WITH_DIGESTS]; 3]);
    }
}
