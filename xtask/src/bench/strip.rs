//! `cargo xtask bench strip`: the overlay beside a gate that strips headers.
//!
//! In copy mode the gate could take the headers off (`bpf_xdp_adjust_head`), so that the kernel copies payload alone: no overlap,
//! nothing to save and restore, any order. It is the default only if it is at least as fast. Both ways run in the same programs
//! of `lm-bench`, with the gate from one source and with what [`super::recipes`] says about cores, queues and credit. Before anything
//! is measured, each way shows that it puts every byte in its place.

use std::path::PathBuf;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use super::recipes::{PaceFile, SECONDS, bare_addresses, receive_and_send, stream_sample, words};
use super::{Comparison, Contender, Measured, Target, Unit};
use crate::bed::{Bed, BedConfig, INTERFACE, Side};
use crate::machine::ResultFile;
use crate::stats::Summary;
use crate::table::Table;
use crate::workspace::Programs;

/// Placing payload: the overlay beside a gate that strips headers, in copy mode.
///
/// First compares every byte that arrives, for each way and size; then measures, with both of two cores: leave the machine
/// alone meanwhile. Prints throughput and what a packet costs the receiving core, and the ratios to the overlay, taken within a
/// round.
#[derive(Debug, clap::Args)]
pub(super) struct Arguments {
    /// Rounds: how often every way is measured.
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..))]
    pairs: u32,
    /// Also keep everything, with every single sample, in this file.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Only comparisons whose key contains this text: strip_7168, strip_64k, strip_1m.
    #[arg(long, value_name = "TEXT")]
    only: Option<String>,
}

/// One way to place payload.
#[derive(Clone, Copy)]
struct Way {
    name: &'static str,
    placement: &'static str,
    window: u32,
}

const OVERLAY: &str = "overlay";
/// The first is held against the overlay; forward order is what only stripping can do.
const WAYS: [Way; 3] = [
    Way {
        name: "strip",
        placement: "strip",
        window: 256,
    },
    Way {
        name: OVERLAY,
        placement: "overlay",
        window: 256,
    },
    Way {
        name: "strip, forward order",
        placement: "strip",
        window: 1,
    },
];

/// Key, title and length of the messages.
const SIZES: [(&str, &str, u32); 3] = [
    ("strip_7168", "7168 B", 7168),
    ("strip_64k", "64 KiB", 65_536),
    ("strip_1m", "1 MiB", 1 << 20),
];

/// Seconds of a stream whose bytes are compared.
const CHECKED_SECONDS: f64 = 0.3;
/// Frames posted ahead, as LM's receiver does on veth.
const POSTED: u32 = 384;

/// Runs the command.
pub(super) fn run(arguments: &Arguments) -> Result<()> {
    let file = arguments.json.as_deref().map(ResultFile::create).transpose()?;
    let comparisons = super::selected(all(), arguments.only.as_deref())?;
    let programs = Programs::build()?;
    for &(key, title, message_len) in &SIZES {
        if comparisons.iter().any(|comparison| comparison.key == key) {
            check(title, message_len, &programs)?;
        }
    }
    let measured = super::measure_all(comparisons, arguments.pairs, &programs)?;
    print(&measured, arguments.pairs)?;
    super::keep("strip", arguments.pairs, &measured, file)
}

/// Everything of `cargo xtask bench strip`.
pub(super) fn all() -> Vec<Comparison> {
    SIZES.iter().map(comparison).collect()
}

fn comparison(&(key, title, message_len): &(&'static str, &'static str, u32)) -> Comparison {
    let contender = |way: Way| Contender {
        name: way.name,
        bed: BedConfig::default(),
        measure: Box::new(move |bed, programs| {
            stream_sample(stream(bed, programs, way, message_len, SECONDS, "")?)
        }),
    };
    Comparison {
        key,
        title,
        unit: Unit::GbitPerSecond,
        contenders: WAYS.map(contender).into(),
        targets: vec![Target::RatioAtLeast(OVERLAY, 1.0)],
        most_rounds: None,
    }
}

/// A stream of messages from the left host to the right one; `verify` is nothing or the option.
fn stream(
    bed: &Bed,
    programs: &Programs,
    way: Way,
    message_len: u32,
    seconds: f64,
    verify: &str,
) -> Result<super::recipes::Reports> {
    let pace = PaceFile::new();
    let both = format!(
        "--interface {INTERFACE} --queue 1 --posted {POSTED} --pace {} --message-size {message_len} --window {} {verify}",
        pace.path().display(),
        way.window,
    );
    let receiver = words(&format!(
        "land-recv {both} --mode native --busy-poll udp --placement {} --to {} --from {} --seconds {seconds}",
        way.placement,
        Side::Right.address(),
        Side::Left.address(),
    ));
    let sending_seconds = seconds + 1.0;
    let mut sender = words(&format!("land-send {both} --seconds {sending_seconds}"));
    sender.extend(bare_addresses(bed)?);
    receive_and_send(bed, programs, &receiver, &sender, false)
}

/// Every way places messages of this length as they were sent, or the receiver ends with an error.
fn check(title: &str, message_len: u32, programs: &Programs) -> Result<()> {
    for way in WAYS {
        let reports = Bed::new(&BedConfig::default())
            .and_then(|bed| stream(&bed, programs, way, message_len, CHECKED_SECONDS, "--verify"))
            .with_context(|| format!("{title}: {}", way.name))?;
        let messages = reports.receiver["messages"].as_u64().unwrap_or(0);
        let verified = reports.receiver["verified"] == Value::Bool(true);
        ensure!(
            verified && messages > 0,
            "{title}: {} placed no message: {}",
            way.name,
            reports.receiver
        );
        eprintln!("  {title}: {} placed {messages} messages byte by byte", way.name);
    }
    Ok(())
}

/// What a packet cost the receiving core, by round.
fn receiver_ns(measured: &Measured, name: &str) -> Result<Vec<f64>> {
    let result = measured.results.iter().find(|(contender, ..)| *contender == name);
    let (_, _, reports) = result.context("no such way")?;
    let number = |report: &Value| report["receiver"]["receiver_ns_per_packet"].as_f64();
    reports
        .iter()
        .map(|report| number(report).context("the receiver reported no receiver_ns_per_packet"))
        .collect()
}

fn print(measured: &[Measured], pairs: u32) -> Result<()> {
    let mut table = Table::new(&[
        "",
        "way",
        "throughput",
        "spread",
        "× overlay",
        "spread",
        "receiver",
        "spread",
        "× overlay",
        "spread",
    ]);
    let percent = |summary: &Summary| format!("±{:.1} %", summary.spread() * 100.0);
    for comparison in measured {
        let overlay_ns = receiver_ns(comparison, OVERLAY)?;
        for (number, (name, throughput, _)) in comparison.results.iter().enumerate() {
            let ns = receiver_ns(comparison, name)?;
            let ns_ratios: Vec<f64> = ns.iter().zip(&overlay_ns).map(|(a, b)| a / b).collect();
            let (ns, ns_ratio) = Summary::of(&ns)
                .zip(Summary::of(&ns_ratios))
                .context("no round was measured")?;
            let ratio = comparison
                .ratio(name, OVERLAY)
                .context("the overlay was not measured")?;
            let title = if number == 0 { comparison.title } else { "" };
            let mut row = vec![
                title.to_owned(),
                (*name).to_owned(),
                format!("{:.2} Gbit/s", throughput.median),
                percent(throughput),
            ];
            let against = |ratio: &Summary| [format!("{:.3}", ratio.median), percent(ratio)];
            let is_other = *name != OVERLAY;
            row.extend(if is_other {
                against(&ratio)
            } else {
                Default::default()
            });
            row.extend([format!("{:.0} ns/packet", ns.median), percent(&ns)]);
            row.extend(if is_other {
                against(&ns_ratio)
            } else {
                Default::default()
            });
            table.row(row);
        }
    }
    println!(
        "\nMedians of {pairs} interleaved rounds; spread: half the distance of the quartiles. Ratios are taken within a round.\n\
         receiver: time of the receiving core for each packet, in the kernel (its polling, the gate, the copy) and in the program.\n\n\
         {table}"
    );
    super::print_targets(measured);
    super::print_distances(measured);
    Ok(())
}
