//! What a run prints and keeps: columns as perftest's users know them, tables of ratios, CSV, `.hgrm` files, JSON.

use std::fmt::Write as _;
use std::fs;
use std::io::Write as _;
use std::path::Path;

use lm_measure::statistics::Summary;

use super::schema::{Failed, LatencyRound, Ratio, Report, Round, Row, Target, Verdict, What};
use super::targets::{at, median};
use crate::cli::Failure;
use crate::files;
use crate::size::ByteSize;

/// The tables of a report.
pub(super) fn text(report: &Report) -> String {
    let mut out = String::new();
    let latency = report
        .rows
        .iter()
        .filter(|row| matches!(row.what, What::Latency | What::LatencyUnderLoad));
    let latency: Vec<&Row> = latency.collect();
    if !latency.is_empty() {
        out.push_str("\nWhole round trips in microseconds: the rounds' medians, least and most.\n");
        out.push_str(&format!(
            "{:<22} {:>9} {:>11} {:>10} {:>10} {:>10} {:>10} {:>10} {:>10}\n",
            "#system", "bytes", "iterations", "t_min", "t_typical", "t_avg", "t_max", "99%", "99.9%"
        ));
        for row in latency {
            latency_line(&mut out, row);
        }
    }
    let transfers = report
        .rows
        .iter()
        .filter(|row| matches!(row.what, What::Throughput | What::Cpu));
    let transfers: Vec<&Row> = transfers.collect();
    if !transfers.is_empty() {
        out.push_str("\nReceived payload, one way; medians of the rounds. Processor time: of both processes, and of the machine.\n");
        out.push_str(&format!(
            "{:<22} {:>9} {:>11} {:>11} {:>11} {:>9} {:>9} {:>9} {}\n",
            "#system", "bytes", "messages", "Gbit/s", "messages/s", "lost", "s/GB", "s/GB all", "spare"
        ));
        for row in transfers {
            transfer_line(&mut out, row);
        }
    }
    if !report.ratios.is_empty() {
        out.push_str("\nRatios within the rounds, all of them: median and its 95 % interval. Beside them those over near cores.\n");
        out.push_str(&format!(
            "{:<19} {:<12} {:>9} {:<14} {:<20} {:>8} {:>17} {:>24}  {}\n",
            "#what", "metric", "bytes", "system", "against", "ratio", "interval", "near cores", "target"
        ));
        for ratio in &report.ratios {
            ratio_line(&mut out, ratio);
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

fn middle(values: Vec<f64>) -> f64 {
    Summary::of(&values).map_or(0.0, |values| values.median)
}

fn latency_line(out: &mut String, row: &Row) {
    let rounds = || {
        row.rounds.iter().filter_map(|round| match round {
            Round::Latency(round) => Some(round),
            Round::Transfer(_) => None,
        })
    };
    // A tool may not print it.
    let us = |ns: Option<f64>| ns.map_or_else(|| "-".to_owned(), |ns| format!("{:.2}", ns / 1e3));
    let of = |figure: fn(&LatencyRound) -> Option<f64>| {
        let values: Vec<f64> = rounds().filter_map(figure).collect();
        us((!values.is_empty()).then(|| middle(values)))
    };
    let least = us(rounds().filter_map(|round| round.min_ns).reduce(f64::min));
    let most = us(rounds().filter_map(|round| round.max_ns).reduce(f64::max));
    let title = match row.what {
        What::LatencyUnderLoad => format!("{}, under load", row.system),
        _ => row.system.clone(),
    };
    let _ = write!(
        out,
        "{title:<22} {:>9} {:>11} {least:>10} {:>10} {:>10} {most:>10} {:>10} {:>10}",
        row.size,
        rounds().map(|round| round.count).sum::<u64>(),
        of(|round| Some(round.p50_ns)),
        of(|round| Some(round.mean_ns)),
        of(|round| round.p99_ns),
        of(|round| round.p999_ns),
    );
    let load: Vec<f64> = rounds().filter_map(|round| round.load_bits_per_s).collect();
    if !load.is_empty() {
        let _ = write!(out, "  beside {:.2} Gbit/s", middle(load) / 1e9);
    }
    out.push('\n');
}

fn transfer_line(out: &mut String, row: &Row) {
    let rounds = || {
        row.rounds.iter().filter_map(|round| match round {
            Round::Transfer(round) => Some(round),
            Round::Latency(_) => None,
        })
    };
    let per_gb = |value: fn(&super::schema::TransferRound) -> f64| {
        let rounds = rounds().filter(|round| round.bytes > 0);
        middle(
            rounds
                .map(|round| value(round) / (round.bytes as f64 / 1e9))
                .collect(),
        )
    };
    let spare: Vec<String> = (0..2)
        .filter_map(|core| {
            let values: Vec<f64> = rounds()
                .filter_map(|round| round.spare_fraction.get(core).copied())
                .collect();
            (!values.is_empty()).then(|| format!("{:.1} %", middle(values) * 100.0))
        })
        .collect();
    let _ = writeln!(
        out,
        "{:<22} {:>9} {:>11} {:>11.3} {:>11.0} {:>9} {:>9.3} {:>9.3} {}",
        row.system,
        row.size,
        rounds().map(|round| round.messages).sum::<u64>(),
        median(row, "bits_per_s").unwrap_or(0.0) / 1e9,
        middle(
            rounds()
                .map(|round| round.messages as f64 / round.seconds)
                .collect()
        ),
        rounds().map(|round| round.lost_messages).sum::<u64>(),
        per_gb(|round| round.cpu_seconds_send + round.cpu_seconds_receive),
        per_gb(|round| round.cpu_seconds_machine),
        spare.join(", "),
    );
}

fn ratio_line(out: &mut String, ratio: &Ratio) {
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
    let interval = format!("{:.3}..{:.3}", ratio.low, ratio.high);
    let near = ratio.near.as_ref().map_or_else(String::new, |near| {
        let left_out = near.left_out;
        match near.median_low_high {
            Some([median, ..]) => format!("{median:.3}, {left_out} left out"),
            None => format!("all {left_out} left out"),
        }
    });
    let line = format!(
        "{:<19} {:<12} {:>9} {:<14} {:<20} {:>8.3} {interval:>17} {near:>24}  {asked}{verdict}",
        name(ratio.what),
        ratio.metric,
        ratio.size,
        ratio.system,
        ratio.against,
        ratio.median
    );
    out.push_str(line.trim_end());
    out.push('\n');
}

/// Every round as a line.
pub(super) fn csv(report: &Report) -> String {
    let mut out = String::from(
        "what,system,bytes,round,count,min_ns,p50_ns,p90_ns,p99_ns,p999_ns,max_ns,mean_ns,load_bits_per_s,received_bytes,messages,\
         lost_messages,seconds,cpu_seconds_send,cpu_seconds_receive,cpu_seconds_machine,spare_send,spare_receive,cores_before_ns,cores_after_ns,\
         cores_near\n",
    );
    for row in &report.rows {
        for round in &row.rounds {
            let _ = write!(out, "{},{},{},", name(row.what), row.system, row.size);
            let line = match round {
                Round::Latency(r) => {
                    let or_empty =
                        |value: Option<f64>| value.map_or_else(String::new, |value| value.to_string());
                    format!(
                        "{},{},{},{},{},{},{},{},{},{},,,,,,,,,",
                        r.at,
                        r.count,
                        or_empty(r.min_ns),
                        r.p50_ns,
                        or_empty(r.p90_ns),
                        or_empty(r.p99_ns),
                        or_empty(r.p999_ns),
                        or_empty(r.max_ns),
                        r.mean_ns,
                        or_empty(r.load_bits_per_s)
                    )
                }
                Round::Transfer(r) => {
                    let spare = |core: usize| {
                        r.spare_fraction
                            .get(core)
                            .map_or_else(String::new, f64::to_string)
                    };
                    format!(
                        "{},,,,,,,,,,{},{},{},{},{},{},{},{},{}",
                        r.at,
                        r.bytes,
                        r.messages,
                        r.lost_messages,
                        r.seconds,
                        r.cpu_seconds_send,
                        r.cpu_seconds_receive,
                        r.cpu_seconds_machine,
                        spare(0),
                        spare(1)
                    )
                }
            };
            out.push_str(&line);
            match row.cores_at(at(round)) {
                Some(cores) => {
                    let _ = writeln!(out, ",{},{},{}", cores.before_ns, cores.after_ns, cores.near);
                }
                None => out.push_str(",,,\n"),
            }
        }
    }
    out
}

/// Writes a file, or a new one in the place of an old one.
pub(super) fn write(path: &Path, text: &str) -> Result<(), Failure> {
    files::create(path, true)?
        .write_all(text.as_bytes())
        .map_err(|error| files::cannot_write(path, &error))
}

/// Writes each row's histogram as `WHAT-SYSTEM-SIZE.hgrm`.
pub(super) fn write_histograms(folder: &Path, report: &Report) -> Result<(), Failure> {
    fs::create_dir_all(folder).map_err(|error| {
        Failure::new(format!(
            "cannot make {}: {error}; choose another",
            folder.display()
        ))
    })?;
    for row in &report.rows {
        if let Some(histogram) = &row.histogram {
            let size = ByteSize::new(row.size);
            let file = folder.join(format!("{}-{}-{size}.hgrm", name(row.what), row.system));
            write(&file, histogram)?;
        }
    }
    Ok(())
}
