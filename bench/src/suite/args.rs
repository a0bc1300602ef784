//! Arguments of the measuring commands.

use std::net::Ipv4Addr;
use std::num::NonZeroU64;
use std::path::PathBuf;

use super::bare::Recipe;
use super::end::Counted;
use super::frozen::{self, Frozen};
use super::targets::{self, Least};
use crate::cli::{Mode, parse_rate};
use crate::size::ByteSize;

/// Arguments of the measuring commands.
#[derive(Clone, Debug, clap::Args)]
pub struct MeasureArgs {
    /// The other host, where `lm-bench serve` runs
    #[arg(value_name = "HOST[:PORT]")]
    pub(super) host: String,
    /// Its address on a second link that is just the same and has no XDP program, for the kernel's systems [default: HOST]
    #[arg(long, value_name = "ADDRESS")]
    pub(super) peer_host: Option<Ipv4Addr>,
    /// Its address on a link whose packets the receiving core takes (receive packet steering)
    #[arg(long, value_name = "ADDRESS")]
    pub(super) rps_host: Option<Ipv4Addr>,
    /// Its address on a link whose queues sockets can poll: a veth pair with generic receive offload and no other offload
    #[arg(long, value_name = "ADDRESS")]
    pub(super) napi_host: Option<Ipv4Addr>,
    /// Its address on a link with segmentation offloads
    #[arg(long, value_name = "ADDRESS")]
    pub(super) offloads_host: Option<Ipv4Addr>,
    /// What the link is called in the results, where its driver alone does not tell: "through a switch", "igb (emulated), coalescing"
    #[arg(long, value_name = "TEXT")]
    pub(super) place: Option<String>,
    /// Core that this host's programs run on
    #[arg(long, default_value_t = 0)]
    pub(super) core: u32,
    /// Systems, separated by commas; `all` for everybody [default: lm; with compare all]
    #[arg(long, value_name = "NAMES", value_delimiter = ',')]
    pub(super) systems: Vec<String>,
    /// Message lengths, separated by commas: 64,7168,1M [default: the command's own]
    #[arg(long, value_name = "SIZES", value_delimiter = ',')]
    pub(super) sizes: Vec<ByteSize>,
    /// How often everything is measured, in turns [default: 1; with compare 20]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub(super) rounds: Option<u32>,
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
    /// The recipe of bare AF_XDP's streams [default: the best of all, which are tried before]
    #[arg(long, value_enum, value_name = "RECIPE")]
    pub(super) recipe: Option<Recipe>,
    /// Keep everything in this file
    #[arg(long, value_name = "FILE")]
    pub(super) json: Option<PathBuf>,
    /// What is counted
    #[command(flatten)]
    pub(super) counted: Counted,
    /// Where both hosts are on one machine: before each measurement wait a while until the two cores are near, keep how far apart they
    /// were with it, and show ratios over near cores beside those of all rounds. A virtual machine's cores move
    #[arg(long)]
    pub(super) near_cores: bool,
    /// Also measure LM by a frozen build of this program, as lm@NAME; the other host's serve is started with it, too. May be given more than
    /// once
    #[arg(long, value_name = "NAME=PATH", value_parser = frozen::parse)]
    pub(super) frozen: Vec<Frozen>,
    /// What one system's throughput shall be of another's, at least: lm/tcp-bbr=2. May be given more than once
    #[arg(long, value_name = "SYSTEM/SYSTEM=RATIO", value_parser = targets::parse)]
    pub(super) least: Vec<Least>,
    /// Something that the results keep among their settings: commit=1a2b3c4
    #[arg(long, value_name = "NAME=VALUE", value_parser = setting)]
    pub(super) setting: Vec<(String, String)>,
    /// Something to be told with the results: what else the machine did, for example
    #[arg(long, value_name = "TEXT")]
    pub(super) caveat: Vec<String>,
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
