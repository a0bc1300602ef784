//! `lm-bench report`: what `lm-bench compare` kept in files, as one HTML page that needs nothing else. For each file: two charts (streams,
//! round trips), a table of ratios, and what the figures depend on.

mod chart;

use std::path::{Path, PathBuf};

use clap::Args;
use lm_measure::size::exact;
use maud::{DOCTYPE, Markup, PreEscaped, html};

use self::chart::{Chart, number};
use crate::cli::Failure;
use crate::suite::Partial;
use crate::suite::schema::{Host, Link, Report, SCHEMA, What};

/// Options of `lm-bench report`.
#[derive(Clone, Debug, Args)]
pub struct ReportArgs {
    /// Files that `lm-bench compare` wrote with --json
    #[arg(required = true, value_name = "FILE")]
    pub files: Vec<PathBuf>,

    /// Write the page to this file
    #[arg(long, value_name = "FILE")]
    pub html: PathBuf,
}

/// Reads the files and writes the page.
///
/// # Errors
/// A file that cannot be read or is of another kind, or a page that cannot be written; nothing is written then.
pub fn report(args: &ReportArgs) -> Result<(), Failure> {
    let reports: Vec<Report> = args
        .files
        .iter()
        .map(|path| read(path))
        .collect::<Result<_, _>>()?;
    Partial::create(&args.html)?.write(&page(&reports).into_string())
}

/// A report that `lm-bench compare` kept.
pub(crate) fn read(path: &Path) -> Result<Report, Failure> {
    let shown = path.display();
    let text = std::fs::read_to_string(path).map_err(|error| {
        let why = crate::output::describe(&error);
        Failure::new(format!(
            "cannot read {shown}: {why}; name a file that --json wrote"
        ))
    })?;
    let broken =
        |error: serde_json::Error| Failure::new(format!("{shown}: {error}; name a file that --json wrote"));
    let value: serde_json::Value = serde_json::from_str(&text).map_err(broken)?;
    if value["schema"] != SCHEMA {
        return Err(Failure::new(format!(
            "{shown} is of another kind or version; name files of `lm-bench` ({SCHEMA})"
        )));
    }
    serde_json::from_value(value).map_err(broken)
}

fn page(reports: &[Report]) -> Markup {
    html! {
        (DOCTYPE)
        html lang="en" {
            head {
                meta charset="utf-8";
                meta name="viewport" content="width=device-width, initial-scale=1";
                title { "lm-bench report" }
                style { (PreEscaped(include_str!("style.css"))) }
            }
            body {
                h1 { "lm-bench report" }
                @for report in reports { (section(report)) }
            }
        }
    }
}

fn section(report: &Report) -> Markup {
    html! {
        section {
            h2 { (report.started) }
            ul { @for caveat in &report.caveats { li { (caveat) } } }
            (Chart::of(report, What::Stream, "bits_per_s", 1e9, "received payload, Gbit/s").draw())
            (Chart::of(report, What::RoundTrips, "p50", 1e3, "round trip, p50, µs").draw())
            (ratios(report))
            (systems(report))
            table {
                tr { th { "version" } td { (report.version) } }
                tr { th { "host" } td { (host(&report.host)) } }
                tr { th { "far host" } td { (host(&report.far)) } }
                @for one in &report.links { tr { th { "link" } td { (link(one)) } } }
                @for (name, value) in &report.settings { tr { th { (name) } td { (value) } } }
            }
        }
    }
}

/// Each ratio with its interval.
fn ratios(report: &Report) -> Markup {
    html! {
        p { "Each ratio is taken within a round; the median of all rounds stands with its 95 % interval." }
        table {
            tr { th { "what" } th { "size" } th { "figure" } th { "compared" } th { "ratio" } th { "95 %" }
                th { "rounds" } }
            @for ratio in &report.ratios { tr {
                td { (ratio.what.name()) } td { (exact(ratio.size)) } td { (ratio.metric) }
                td { (ratio.system) " over " (ratio.against) }
                td { (number(ratio.median)) " ×" } td { (number(ratio.low)) " – " (number(ratio.high)) }
                    td { (ratio.rounds) }
            } }
        }
    }
}

/// How each system was set up, and which were not there or failed.
fn systems(report: &Report) -> Markup {
    html! {
        table {
            tr { th { "system" } th { "link" } th { "configuration" } }
            @for system in &report.systems { tr { td { (system.id) } td { (system.link) }
                td { (system.configuration) } } }
            @for absent in &report.absent { tr { td { (absent.system) } td { "absent" } td { (absent.why) } } }
            @for failed in &report.failures { tr {
                td { (failed.system) } td { "failed" }
                td { (failed.what.name()) ", " (exact(failed.size)) ", round " (failed.at + 1) ": " (failed.why) }
            } }
        }
    }
}

fn host(host: &Host) -> String {
    let memory = number(host.memory_bytes as f64 / f64::from(1 << 30));
    let governor = host
        .governor
        .as_ref()
        .map_or_else(String::new, |name| format!(", governor {name}"));
    let Host {
        name,
        kernel,
        cpu,
        core,
        ..
    } = host;
    format!("{name}, Linux {kernel}, {cpu}, core {core}, {memory} GiB{governor}")
}

fn link(link: &Link) -> String {
    let named = |on: bool| {
        let these = link.offloads.iter().filter(|(_, is)| **is == on);
        these
            .map(|(name, _)| name.as_str())
            .collect::<Vec<_>>()
            .join(", ")
    };
    let speed = link
        .speed_mbit
        .map_or_else(String::new, |speed| format!(", {speed} Mbit/s"));
    let xdp = if link.xdp {
        ", an XDP program was attached before"
    } else {
        ""
    };
    let Link {
        interface,
        driver,
        mtu,
        mode,
        queues,
        ..
    } = link;
    format!(
        "{interface}, driver {driver}, MTU {mtu}, AF_XDP {mode}, {queues} queues{speed}{xdp}; offloads on: {}; off: {}",
        named(true),
        named(false)
    )
}

#[cfg(test)]
mod tests;
