//! Loss curves, from what `cargo xtask bench loss --json` wrote.

use std::collections::BTreeMap;

use maud::{Markup, html};
use serde::Deserialize;
use serde_json::Value;

use super::figures::number;
use super::plot::{Axis, Chart, Line, Point};

/// The file, as far as the page shows it.
#[derive(Debug, Deserialize)]
pub(super) struct LossReport {
    pub(super) rounds: u32,
    /// Kernel, processor, cores and time.
    pub(super) machine: BTreeMap<String, Value>,
    comparisons: Vec<Comparison>,
}

#[derive(Debug, Deserialize)]
struct Comparison {
    /// `64 KiB, 0.1 % lost` or `64 KiB, no loss`.
    title: String,
    unit: String,
    contenders: Vec<Contender>,
    targets: Vec<Target>,
}

#[derive(Debug, Deserialize)]
struct Contender {
    name: String,
    median: f64,
    lower_quartile: f64,
    upper_quartile: f64,
}

#[derive(Debug, Deserialize)]
struct Target {
    asked: String,
    reached: f64,
    met: bool,
}

impl Comparison {
    /// Message size as it is written, and the part of packets lost in percent.
    fn place(&self) -> Option<(&str, f64)> {
        let (size, loss) = self.title.split_once(", ")?;
        match loss.strip_suffix(" % lost") {
            Some(percent) => Some((size, percent.parse().ok()?)),
            None if loss == "no loss" && size.ends_with("iB") => Some((size, 0.0)),
            None => None,
        }
    }
}

/// The part of the page about losses; nothing without a file.
pub(super) fn section(losses: &[LossReport]) -> Markup {
    html! {
        @for report in losses {
            section {
                h2 { "Packet loss" }
                p { "Goodput through an impairment box that loses packets at random in both directions; medians of " (report.rounds)
                    " interleaved rounds, bars from quartile to quartile. The same losses for each system of a round." }
                div.charts { @for chart in charts(report) { (chart.draw()) } }
                (table(report))
            }
        }
    }
}

fn charts(report: &LossReport) -> Vec<Chart> {
    let mut sizes: Vec<&str> = Vec::new();
    for (size, _) in report.comparisons.iter().filter_map(Comparison::place) {
        if !sizes.contains(&size) {
            sizes.push(size);
        }
    }
    sizes.into_iter().map(|size| chart(report, size)).collect()
}

/// Rates are as far apart as their names need, not as their values are.
fn chart(report: &LossReport, size: &str) -> Chart {
    let mut places: Vec<(f64, &Comparison)> = (report.comparisons.iter())
        .filter_map(|one| Some((one.place().filter(|place| place.0 == size)?.1, one)))
        .collect();
    places.sort_by(|a, b| a.0.total_cmp(&b.0));
    let mut lines: Vec<Line> = Vec::new();
    for (at, (percent, comparison)) in places.iter().enumerate() {
        for contender in &comparison.contenders {
            let point = Point {
                x: at as f64,
                y: contender.median,
                range: Some((contender.lower_quartile, contender.upper_quartile)),
                says: format!("{} {} at {percent} %", number(contender.median), comparison.unit),
            };
            match lines.iter_mut().find(|line| line.name == contender.name) {
                Some(line) => line.points.push(point),
                None => lines.push(Line {
                    name: contender.name.clone(),
                    points: vec![point],
                }),
            }
        }
    }
    let unit = places
        .first()
        .map_or("", |(_, comparison)| comparison.unit.as_str());
    Chart {
        title: format!("Goodput against loss, {size}"),
        note: unit.to_owned(),
        x: Axis {
            title: "packets lost".to_owned(),
            logarithmic: false,
            ticks: (places.iter().enumerate())
                .map(|(at, (percent, _))| (at as f64, format!("{percent} %")))
                .collect(),
        },
        y: Axis {
            title: unit.to_owned(),
            logarithmic: false,
            ticks: Vec::new(),
        },
        lines,
    }
}

fn table(report: &LossReport) -> Markup {
    html! {
        details {
            summary { "Targets and figures" }
            div.wide { table {
                thead { tr { th { "" } th { "asked of the first" } th.n { "reached" } th { "" } } }
                tbody {
                    @for comparison in &report.comparisons {
                        @for target in &comparison.targets {
                            tr {
                                td { (comparison.title) } td { (target.asked) } td.n { (number(target.reached)) }
                                td.verdict.met[target.met].missed[!target.met] { @if target.met { "met" } @else { "missed" } }
                            }
                        }
                    }
                }
            } }
            div.wide { table {
                thead { tr { th { "" } th { "system" } th.n { "median" } th.n { "quartiles" } th { "" } } }
                tbody {
                    @for comparison in &report.comparisons {
                        @for contender in &comparison.contenders {
                            tr {
                                td { (comparison.title) } td { (contender.name) } td.n { (number(contender.median)) }
                                td.n { (number(contender.lower_quartile)) " – " (number(contender.upper_quartile)) }
                                td { (comparison.unit) }
                            }
                        }
                    }
                }
            } }
        }
    }
}
