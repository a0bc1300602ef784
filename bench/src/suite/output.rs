//! What a run prints and keeps: tables whose columns have the names that perftest gives them, of ratios too, and JSON.

use std::fmt::Write as _;
use std::io::Write as _;
use std::path::Path;

use lm_measure::statistics::Summary;
use lm_measure::table::Table;

use super::schema::{Failed, LatencyRound, Ratio, Report, Round, Row, Target, TransferRound, Verdict, What};
use crate::cli::Failure;
use crate::files;
use crate::size::ByteSize;

/// The tables of a report.
pub(super) fn text(report: &Report) -> String {
    let mut out = String::new();
    let mut latency = Table::new(&[
        "system",
        "bytes",
        "iterations",
        "t_min",
        "t_typical",
        "t_avg",
        "t_max",
        "99%",
        "99.9%",
        "beside Gbit/s",
    ]);
    let mut transfers = Table::new(&[
        "system",
        "bytes",
        "messages",
        "Gbit/s",
        "messages/s",
        "lost",
        "s/GB",
        "s/GB all",
        "spare",
    ]);
    for row in &report.rows {
        match row.what {
            What::Latency | What::LatencyUnderLoad => latency.row(latency_line(row)),
            What::Throughput | What::Cpu => transfers.row(transfer_line(row)),
        }
    }
    let mut ratios = Table::new(&[
        "what",
        "metric",
        "bytes",
        "system",
        "against",
        "ratio",
        "interval",
        "near cores",
        "target",
    ]);
    report
        .ratios
        .iter()
        .for_each(|ratio| ratios.row(ratio_line(ratio)));
    for (heading, table) in [
        (
            "Whole round trips in microseconds: the rounds' medians, least and most.",
            latency,
        ),
        (
            "Received payload, one way; medians of the rounds. Processor time: of both processes, and of the machine.",
            transfers,
        ),
        (
            "Ratios within the rounds, all of them: median and its 95 % interval. Beside them those over near cores.",
            ratios,
        ),
    ] {
        if !table.is_empty() {
            let _ = write!(out, "\n{heading}\n{table}");
        }
    }
    if !report.absent.is_empty() {
        out.push_str("\nAbsent\n");
        for absent in &report.absent {
            let _ = writeln!(out, "{:<22} {}", absent.system, absent.why);
        }
    }
    if !report.failures.is_empty() {
        out.push_str("\nFailed, and not repeated\n");
        for failed in &report.failures {
            let Failed { system, why, .. } = failed;
            let (what, size, round) = (name(failed.what), ByteSize::new(failed.size), failed.at + 1);
            let _ = writeln!(out, "{system:<22} {what} {size}, round {round}: {why}");
        }
    }
    if !report.caveats.is_empty() {
        out.push('\n');
        for caveat in &report.caveats {
            let _ = writeln!(out, "- {caveat}");
        }
    }
    out
}

fn name(what: What) -> &'static str {
    match what {
        What::Latency => "latency",
        What::Throughput => "throughput",
        What::Cpu => "cpu",
        What::LatencyUnderLoad => "latency-under-load",
    }
}

fn middle(values: impl Iterator<Item = f64>) -> Option<f64> {
    Summary::of_finite(values).map(|values| values.median)
}

fn latency_line(row: &Row) -> [String; 10] {
    let rounds = || {
        row.rounds.iter().filter_map(|round| match round {
            Round::Latency(round) => Some(round),
            Round::Transfer(_) => None,
        })
    };
    // A tool may not print it.
    let us = |ns: Option<f64>| ns.map_or_else(|| "-".to_owned(), |ns| format!("{:.2}", ns / 1e3));
    let of = |figure: fn(&LatencyRound) -> Option<f64>| us(middle(rounds().filter_map(figure)));
    let load = middle(rounds().filter_map(|round| round.load_bits_per_s));
    [
        match row.what {
            What::LatencyUnderLoad => format!("{}, under load", row.system),
            _ => row.system.clone(),
        },
        row.size.to_string(),
        rounds().map(|round| round.count).sum::<u64>().to_string(),
        us(rounds().filter_map(|round| round.min_ns).reduce(f64::min)),
        of(|round| Some(round.p50_ns)),
        of(|round| Some(round.mean_ns)),
        us(rounds().filter_map(|round| round.max_ns).reduce(f64::max)),
        of(|round| round.p99_ns),
        of(|round| round.p999_ns),
        load.map_or_else(String::new, |load| format!("{:.2}", load / 1e9)),
    ]
}

fn transfer_line(row: &Row) -> [String; 9] {
    let rounds = || {
        row.rounds.iter().filter_map(|round| match round {
            Round::Transfer(round) => Some(round),
            Round::Latency(_) => None,
        })
    };
    let of = |figure: &dyn Fn(&TransferRound) -> f64| middle(rounds().map(figure)).unwrap_or(0.0);
    let per_gb = |seconds: fn(&TransferRound) -> f64| {
        // Of a round in which nothing came this is no number.
        format!("{:.3}", of(&|round| seconds(round) / (round.bytes as f64 / 1e9)))
    };
    let spare = (0..2).filter_map(|core| {
        let spare = middle(rounds().filter_map(|round| round.spare_fraction.get(core).copied()))?;
        Some(format!("{:.1} %", spare * 100.0))
    });
    [
        row.system.clone(),
        row.size.to_string(),
        rounds().map(|round| round.messages).sum::<u64>().to_string(),
        format!("{:.3}", of(&TransferRound::bits_per_s) / 1e9),
        format!("{:.0}", of(&|round| round.messages as f64 / round.seconds)),
        rounds().map(|round| round.lost_messages).sum::<u64>().to_string(),
        per_gb(|round| round.cpu_seconds_send + round.cpu_seconds_receive),
        per_gb(|round| round.cpu_seconds_machine),
        spare.collect::<Vec<_>>().join(", "),
    ]
}

fn ratio_line(ratio: &Ratio) -> [String; 9] {
    let asked = match ratio.target {
        None => String::new(),
        Some(Target::AtLeast(least)) => format!(">= {least}"),
        Some(Target::AtMost(most)) => format!("<= {most}"),
    };
    let verdict = match ratio.verdict {
        Verdict::Met => " met",
        Verdict::Missed => " MISSED",
        Verdict::Unclear => " unclear",
        Verdict::None => "",
    };
    let near = ratio.near.as_ref().map_or_else(String::new, |near| {
        let left_out = near.left_out;
        match near.median_low_high {
            Some([median, ..]) => format!("{median:.3}, {left_out} left out"),
            None => format!("all {left_out} left out"),
        }
    });
    [
        name(ratio.what).to_owned(),
        ratio.metric.clone(),
        ratio.size.to_string(),
        ratio.system.clone(),
        ratio.against.clone(),
        format!("{:.3}", ratio.median),
        format!("{:.3}..{:.3}", ratio.low, ratio.high),
        near,
        format!("{asked}{verdict}"),
    ]
}

/// Writes a file, or a new one in the place of an old one.
pub(super) fn write(path: &Path, text: &str) -> Result<(), Failure> {
    files::create(path, true)?
        .write_all(text.as_bytes())
        .map_err(|error| files::cannot_write(path, &error))
}
