//! Arguments of `lm-bench compare`.

use std::net::Ipv4Addr;
use std::num::NonZeroU64;
use std::path::PathBuf;

use super::schema::What;
use super::systems::System;
use crate::cli::{Mode, parse_rate};
use crate::size::ByteSize;

/// Arguments of `lm-bench compare`.
#[derive(Clone, Debug, clap::Args)]
#[command(args_override_self = true)]
pub struct CompareArgs {
    /// The other host, where `lm-bench serve` runs
    #[arg(value_name = "HOST[:PORT]")]
    pub(super) host: String,
    /// Its address on a second link that is just the same and has no XDP program, for the kernel's systems [default: HOST]
    #[arg(long, value_name = "ADDRESS")]
    pub(super) peer_host: Option<Ipv4Addr>,
    /// Core that this host's programs run on
    #[arg(long, default_value_t = 0)]
    pub(super) core: u32,
    /// Systems, separated by commas, each with options of its own: lm,lm --integrity none,tcp --congestion bbr; those without a word are
    /// named by a wrong one [default: LM, kernel UDP and TCP in their best ways, bare AF_XDP, and the tools that are installed]
    #[arg(long, value_name = "NAMES", value_delimiter = ',', value_parser = System::parse)]
    pub(super) systems: Vec<System>,
    /// A stream of another system beside each measurement, with its length and rate: 'tcp --congestion cubic', 'udp-blocking --bytes 1472
    /// --bits 29440kbit --burst 10'
    #[arg(long, value_name = "SYSTEM", value_parser = System::parse)]
    pub(super) load: Option<System>,
    /// More hosts where `lm-bench serve` runs, separated by commas: they send what this one sends
    #[arg(long, value_name = "HOSTS", value_delimiter = ',')]
    pub(super) also: Vec<String>,
    /// What is measured, separated by commas [default: all of it, round trips of 64 bytes]
    #[arg(long, value_enum, value_name = "TASKS", value_delimiter = ',')]
    pub(super) tasks: Vec<What>,
    /// Message lengths, separated by commas: 64,7168,1M [default: the tasks' own]
    #[arg(long, value_name = "SIZES", value_delimiter = ',')]
    pub(super) sizes: Vec<ByteSize>,
    /// How often everything is measured, in turns
    #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub(super) rounds: u32,
    /// Seconds that count of each transfer; the longest that round trips may take
    #[arg(long, default_value_t = 0.5, value_parser = seconds)]
    pub(super) seconds: f64,
    /// Seconds of each transfer before that
    #[arg(long, default_value_t = 0.15, value_parser = seconds)]
    pub(super) warm_up: f64,
    /// Round trips of each measurement
    #[arg(long, default_value_t = 5000, value_parser = clap::value_parser!(u64).range(1..))]
    pub(super) count: u64,
    /// Round trips a second, begun by the clock and measured from when they were due, however late [default: one after the other]
    #[arg(long, value_name = "NUMBER")]
    pub(super) rate: Option<NonZeroU64>,
    /// Most that a transfer sends, in bits of payload per second: 500Mbit, 2.5G [default: as much as goes]
    #[arg(long, value_name = "BITS", value_parser = parse_rate)]
    pub(super) bit_rate: Option<NonZeroU64>,
    /// How packets pass between driver and LM
    #[arg(long, value_enum, default_value_t = Mode::Auto)]
    pub(super) mode: Mode,
    /// Keep everything in this file
    #[arg(long, value_name = "FILE")]
    pub(super) json: Option<PathBuf>,
    /// Compare with what an earlier run has kept; fails where a row's figure differs by more than 1 %
    #[arg(long, value_name = "FILE")]
    pub(super) against: Option<PathBuf>,
    /// Something that the results keep among their settings: commit=1a2b3c4
    #[arg(long, value_name = "NAME=VALUE", value_parser = setting)]
    pub(super) setting: Vec<(String, String)>,
}

fn setting(text: &str) -> Result<(String, String), String> {
    let (name, value) = text.split_once('=').ok_or("write NAME=VALUE")?;
    Ok((name.to_owned(), value.to_owned()))
}

fn seconds(text: &str) -> Result<f64, String> {
    let seconds = text
        .parse()
        .ok()
        .filter(|seconds| (0.02..=60.0).contains(seconds));
    seconds.ok_or_else(|| "write a number of seconds from 0.02 to 60".to_owned())
}
