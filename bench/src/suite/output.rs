//! What a run prints and keeps: a line in words, a table of what was measured and one of ratios, and JSON.

use std::fmt::Write as _;
use std::fs::{self, File};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};

use lm_measure::statistics::Summary;
use lm_measure::table::Table;

use super::ratios;
use super::schema::{Failed, Load, Report, Round, Row, Times};
use crate::cli::Failure;
use crate::files;
use crate::output::describe;
use crate::size::ByteSize;

/// The text of a report.
pub(crate) fn text(report: &Report) -> String {
    let mut out = ratios::headline(&report.ratios).map_or_else(String::new, |line| format!("{line}\n"));
    let mut rows = Table::new(&[
        "",
        "system",
        "bytes",
        "messages",
        "lost",
        "Gbit/s",
        "s/GB",
        "p50 µs",
        "mean",
        "min",
        "max",
        "99%",
        "99.9%",
        "wake-ups",
        "copied",
        "load Gbit/s",
        "lost",
        "apart",
    ]);
    report.rows.iter().for_each(|row| rows.row(line(row)));
    let mut ratios = Table::new(&["", "metric", "bytes", "system", "against", "ratio", "interval"]);
    for ratio in &report.ratios {
        ratios.row([
            ratio.what.name(),
            &ratio.metric,
            &ratio.size.to_string(),
            &ratio.system,
            &ratio.against,
            &format!("{:.3}", ratio.median),
            &format!("{:.3}..{:.3}", ratio.low, ratio.high),
        ]);
    }
    for (heading, table) in [
        (
            "Medians of the rounds: received payload, one way (of round trips beside a stream the stream's), busy \
             seconds of all cores for each 10^9 bytes of it; whole round trips (least and most of all rounds). \
             Wake-ups of devices and bytes that LM copied: for each message, at the sending and at the receiving end. \
             How far rounds are apart: the most beyond the least.",
            rows,
        ),
        ("Ratios within the rounds: median and its 95 % interval.", ratios),
    ] {
        if !table.is_empty() {
            let _ = write!(out, "\n{heading}\n{table}");
        }
    }
    for absent in &report.absent {
        let _ = writeln!(out, "absent: {}: {}", absent.system, absent.why);
    }
    for Failed {
        what,
        system,
        size,
        at,
        why,
    } in &report.failures
    {
        let (what, size) = (what.name(), ByteSize::new(*size));
        let _ = writeln!(
            out,
            "failed, and not repeated: {system}, {what} {size}, round {}: {why}",
            at + 1
        );
    }
    for caveat in &report.caveats {
        let _ = writeln!(out, "- {caveat}");
    }
    out
}

fn line(row: &Row) -> [String; 18] {
    let shown = |value: Option<f64>, digits: usize| {
        value.map_or_else(String::new, |value| format!("{value:.digits$}"))
    };
    let median = |metric, scale: f64| row.summary(metric).map(|summary| summary.median / scale);
    let times = || row.rounds.iter().filter_map(|round| round.times.as_ref());
    let us = |ns: Option<f64>| shown(ns.map(|ns| ns / 1e3), 2);
    let middle = |of: fn(&Times) -> Option<f64>| {
        Summary::of_finite(times().filter_map(of)).map(|summary| summary.median)
    };
    let sum = |of: fn(&Round) -> u64| row.rounds.iter().map(of).sum::<u64>().to_string();
    let ends = |of: fn(&Round) -> &[f64]| {
        let of_end =
            |end| Summary::of_finite(row.rounds.iter().filter_map(|round| of(round).get(end).copied()));
        let ends = (0..2).filter_map(of_end).map(|end| format!("{:.2}", end.median));
        ends.collect::<Vec<_>>().join("; ")
    };
    let load = |of: fn(&Load) -> f64| {
        let rounds = row.rounds.iter().filter_map(|round| round.load.as_ref());
        Summary::of_finite(rounds.map(of)).map(|summary| summary.median)
    };
    let apart = |metric| {
        let samples = row.summary(metric)?.samples;
        let least = samples.iter().copied().reduce(f64::min)?;
        let most = samples.iter().copied().reduce(f64::max)?;
        (samples.len() > 1 && least > 0.0).then(|| format!("{:.1} %", (most / least - 1.0) * 100.0))
    };
    let is_stream = row.rounds.iter().any(|round| round.bytes > 0);
    [
        row.what.name().to_owned(),
        row.system.clone(),
        row.size.to_string(),
        sum(|round| round.messages),
        sum(|round| round.lost_messages),
        shown(median("bits_per_s", 1e9).filter(|_| is_stream), 3),
        shown(median("cpu_s_per_gb", 1.0).filter(|seconds| *seconds > 0.0), 3),
        us(median("p50", 1.0)),
        us(middle(|times| Some(times.mean_ns))),
        us(times().filter_map(|times| times.min_ns).reduce(f64::min)),
        us(times().filter_map(|times| times.max_ns).reduce(f64::max)),
        us(median("p99", 1.0)),
        us(middle(|times| times.p999_ns)),
        ends(|round| &round.wakeups_per_message),
        ends(|round| &round.copied_bytes_per_message),
        shown(load(|load| load.bytes as f64 * 8.0 / load.seconds / 1e9), 3),
        shown(load(|load| load.lost_messages as f64), 0),
        apart("p50").or_else(|| apart("bits_per_s")).unwrap_or_default(),
    ]
}

/// A result that has its file's name once it is whole. Begun before anything is measured: that it cannot be written is better learnt then.
#[derive(Debug)]
pub(crate) struct Partial {
    path: PathBuf,
    partial: PathBuf,
    file: File,
}

impl Partial {
    /// Begins `PATH.part` beside the file.
    ///
    /// # Errors
    /// A line that names the file.
    pub(crate) fn create(path: &Path) -> Result<Partial, Failure> {
        let partial = path.with_added_extension("part");
        Ok(Partial {
            file: files::open(&partial, true).map_err(|error| not_in_folder(path, &error))?,
            path: path.to_owned(),
            partial,
        })
    }

    /// Writes the file.
    ///
    /// # Errors
    /// A line that names it.
    pub(crate) fn write(mut self, text: &str) -> Result<(), Failure> {
        let written = self.file.write_all(text.as_bytes());
        written
            .and_then(|()| fs::rename(&self.partial, &self.path))
            .map_err(|error| not_in_folder(&self.path, &error))
    }
}

impl Drop for Partial {
    fn drop(&mut self) {
        // After a successful write there is no such file any more.
        let _ = fs::remove_file(&self.partial);
    }
}

fn not_in_folder(path: &Path, error: &io::Error) -> Failure {
    Failure::new(format!(
        "cannot write {}: {}; name a file in a folder that exists",
        path.display(),
        describe(error)
    ))
}
