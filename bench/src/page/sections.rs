//! The page's head, what was measured on each link, and what it was measured with.

use lm_measure::size::exact;
use lm_measure::statistics::Summary;
use maud::{Markup, html};

use super::figures::{Group, number, of_histogram, of_latency, of_transfer};
use super::input::Input;
use super::plot::{Axis, Chart, Line, Point, family};
use crate::suite::schema::{Host, LatencyRound, Link, Report, Row, TransferRound, What};

/// Who measured what, when and where, and what a reader must know first. Files of the same hosts and links share their lines, and what is
/// said of all files is said once.
pub(super) fn header(input: &Input) -> Markup {
    html! {
        header {
            h1 { "lm-bench report" }
            @let caveats = caveats(&input.reports);
            @if !caveats.is_empty() {
                aside.caveats {
                    strong { "Before believing a figure" }
                    ul {
                        @for (caveat, places) in &caveats {
                            li { @if let Some(places) = places { b { (places) ": " } } (caveat) }
                        }
                    }
                }
            }
            @for reports in &beds_of(&input.reports) {
                dl.facts {
                    @for report in reports {
                        (fact("command", &format!("{}, {}", report.command, report.started)))
                    }
                    @let report = reports[0];
                    (fact("version", &report.version))
                    (host("host", &report.host))
                    @if let Some(far) = &report.far { (host("far host", far)) }
                    @for link in &report.links { (link_facts(link)) }
                    @if !report.settings.is_empty() {
                        dt { "settings" }
                        dd { @for (name, value) in &report.settings { span.pair { (name) " " b { (value) } } " " } }
                    }
                }
            }
        }
    }
}

/// Reports of the same hosts and links with the same settings together, never none.
fn beds_of(reports: &[Report]) -> Vec<Vec<&Report>> {
    let mut beds: Vec<Vec<&Report>> = Vec::new();
    for report in reports {
        match beds.iter_mut().find(|bed| is_same_bed(bed[0], report)) {
            Some(bed) => bed.push(report),
            None => beds.push(vec![report]),
        }
    }
    beds
}

fn is_same_bed(one: &Report, other: &Report) -> bool {
    (&one.host, &one.far, &one.links) == (&other.host, &other.far, &other.links)
        && (&one.version, &one.settings) == (&other.version, &other.settings)
}

/// Each caveat once, in the order in which they come, and the links it is for where it is not for all.
fn caveats(reports: &[Report]) -> Vec<(&str, Option<String>)> {
    let mut found: Vec<&str> = Vec::new();
    for caveat in reports.iter().flat_map(|report| &report.caveats) {
        if !found.contains(&caveat.as_str()) {
            found.push(caveat);
        }
    }
    let places = |caveat: &str| {
        let (with, without): (Vec<&Report>, Vec<&Report>) =
            (reports.iter()).partition(|report| report.caveats.iter().any(|other| other == caveat));
        let mut links: Vec<&str> = with
            .iter()
            .flat_map(|report| &report.links)
            .map(|link| &*link.name)
            .collect();
        links.dedup();
        (!without.is_empty()).then(|| links.join("; "))
    };
    found.into_iter().map(|caveat| (caveat, places(caveat))).collect()
}

fn fact(name: &str, value: &str) -> Markup {
    html! { dt { (name) } dd { (value) } }
}

fn host(what: &str, host: &Host) -> Markup {
    let cores: Vec<String> = host.cores.iter().map(u32::to_string).collect();
    html! {
        dt { (what) }
        dd { (host.name) ", Linux " (host.kernel) ", " (host.cpu) ", cores " (cores.join(" and ")) ", "
            (number(host.memory_bytes as f64 / f64::from(1 << 30))) " GiB"
            @if let Some(governor) = &host.governor { ", governor " (governor) } }
    }
}

fn link_facts(link: &Link) -> Markup {
    html! {
        dt { "link " (link.name) }
        dd { (link.interface) ", driver " (link.driver) ", MTU " (link.mtu) ", AF_XDP " (link.mode) ", "
            (link.queues) @if link.queues == 1 { " queue" } @else { " queues" }
            @if let Some(speed) = link.speed_mbit { ", " (speed) " Mbit/s" }
            @if let Some(rps) = &link.rps { ", receive packet steering " (rps) }
            @if link.xdp { ", an XDP program was attached before" }
            "; offloads " (offloads(link)) }
    }
}

fn offloads(link: &Link) -> String {
    let named = |on: bool| -> Vec<&str> {
        let these = link.offloads.iter().filter(|(_, is)| **is == on);
        these.map(|(name, _)| name.as_str()).collect()
    };
    let list = |names: Vec<&str>| match names.is_empty() {
        true => "none".to_owned(),
        false => names.join(", "),
    };
    format!("on: {}; off: {}", list(named(true)), list(named(false)))
}

/// Charts and tables of the systems on one kind of link.
pub(super) fn group(group: &Group<'_>) -> Markup {
    let has_transfers = group.has(What::Throughput) || group.has(What::Cpu);
    let charts = [
        throughput(group),
        cpu(group),
        round_trips(group, "p50", |round| Some(round.p50_ns)),
        round_trips(group, "p99", |round| round.p99_ns),
        percentiles(group, What::Latency),
        percentiles(group, What::LatencyUnderLoad),
    ];
    html! {
        section {
            h2 { (group.place) span.note { ", " (group.report.command) @if let Some(link) = group.links.first() { ", MTU " (link.mtu) } } }
            div.charts { @for chart in &charts { (chart.draw()) } }
            @if has_transfers { (transfer_table(group)) }
            @if group.has(What::Latency) { (latency_table(group, What::Latency, "Round trips in figures")) }
            @if group.has(What::LatencyUnderLoad) {
                (latency_table(group, What::LatencyUnderLoad, "Round trips beside a bulk transfer in figures"))
            }
        }
    }
}

/// A line for each system, with what `figure` finds in its rows.
fn lines<'a>(
    group: &Group<'a>,
    rows: impl Fn(&str) -> Vec<&'a Row>,
    unit: &str,
    figure: impl Fn(&Row) -> Option<Summary>,
) -> Vec<Line> {
    let point = |row: &Row| {
        let spread = figure(row)?;
        Some(Point {
            x: row.size as f64,
            y: spread.median,
            range: Some((spread.lower, spread.upper)),
            says: format!("{} {unit} at {}", number(spread.median), exact(row.size)),
        })
    };
    let line = |id: &String| Line {
        name: id.clone(),
        points: rows(id).into_iter().filter_map(point).collect(),
    };
    (group.systems.iter()).map(|system| line(&system.id)).collect()
}

/// Message sizes: powers of two, named where there is room.
pub(super) fn sizes(lines: &[Line]) -> Axis {
    let all = lines.iter().flat_map(|line| &line.points).map(|point| point.x);
    let (low, high) = all.fold((f64::INFINITY, 0.0f64), |(low, high), size| {
        (low.min(size), high.max(size))
    });
    let (first, last) = (
        low.max(1.0).log2().floor() as i32,
        high.max(1.0).log2().ceil() as i32,
    );
    let step = ((last - first) / 5).max(1) as usize;
    let powers = (first..=last).step_by(step).map(|power| 1u64 << power.max(0));
    Axis {
        title: "message size, bytes".to_owned(),
        logarithmic: true,
        ticks: powers
            .map(|size| (size as f64, crate::size::ByteSize::new(size).to_string()))
            .collect(),
    }
}

pub(super) fn values(title: &str, logarithmic: bool) -> Axis {
    Axis {
        title: title.to_owned(),
        logarithmic,
        ticks: Vec::new(),
    }
}

fn throughput(group: &Group<'_>) -> Chart {
    let figure = |row: &Row| of_transfer(row, |round| round.bits_per_s() / 1e9);
    let lines = lines(group, |id| group.transfers(id), "Gbit/s", figure);
    Chart {
        title: "Throughput against message size".to_owned(),
        note: "received payload, Gbit/s".to_owned(),
        x: sizes(&lines),
        y: values("Gbit/s", true),
        lines,
    }
}

fn cpu(group: &Group<'_>) -> Chart {
    let figure = |row: &Row| of_transfer(row, TransferRound::cpu_s_per_gb);
    let lines = lines(group, |id| group.transfers(id), "s per GB", figure);
    Chart {
        title: "CPU per GB".to_owned(),
        note: "busy seconds of all cores, softirqs included; less is better".to_owned(),
        x: sizes(&lines),
        y: values("s per GB", true),
        lines,
    }
}

fn round_trips(group: &Group<'_>, name: &str, figure: impl Fn(&LatencyRound) -> Option<f64>) -> Chart {
    let figure = |row: &Row| of_latency(row, |round| Some(figure(round)? / 1e3));
    let lines = lines(group, |id| group.rows(What::Latency, id), "µs", figure);
    Chart {
        title: format!("Round trip, {name}"),
        note: "whole round trips, µs; less is better".to_owned(),
        x: sizes(&lines),
        y: values("µs", true),
        lines,
    }
}

/// How long the slowest round trips take: at 64 bytes, or the size next to it.
fn percentiles(group: &Group<'_>, what: What) -> Chart {
    let near = |row: &&Row| row.size.abs_diff(64);
    let sizes = group
        .systems
        .iter()
        .flat_map(|system| group.rows(what, &system.id));
    let size = sizes.min_by_key(near).map_or(64, |row| row.size);
    let line = |id: &String| {
        let row = group.rows(what, id).into_iter().find(|row| row.size == size);
        Line {
            name: id.clone(),
            points: row.map_or_else(Vec::new, percentile_points),
        }
    };
    let tick = |quantile: f64, name: &str| (nines(quantile), name.to_owned());
    Chart {
        title: match what {
            What::LatencyUnderLoad => format!("Round trips of {} beside a bulk transfer", exact(size)),
            _ => format!("Round trips of {} by percentile", exact(size)),
        },
        note: "µs; of all rounds".to_owned(),
        x: Axis {
            title: "percentile".to_owned(),
            logarithmic: false,
            ticks: vec![
                tick(0.0, "0"),
                tick(0.5, "50"),
                tick(0.9, "90"),
                tick(0.99, "99"),
                tick(0.999, "99.9"),
                tick(0.9999, "99.99"),
            ],
        },
        y: values("µs", true),
        lines: group.systems.iter().map(|system| line(&system.id)).collect(),
    }
}

/// The place of a quantile on an axis on which each nine has the same room.
fn nines(quantile: f64) -> f64 {
    -(1.0 - quantile).log10()
}

/// A quantile, and what a round says of it.
type Marked = (f64, fn(&LatencyRound) -> Option<f64>);

/// The whole distribution where there is one, else the percentiles of the rounds.
fn percentile_points(row: &Row) -> Vec<Point> {
    let say = |quantile: f64, us: f64| format!("{} µs at {} %", number(us), quantile * 100.0);
    let marked: [Marked; 4] = [
        (0.5, |round| Some(round.p50_ns)),
        (0.9, |round| round.p90_ns),
        (0.99, |round| round.p99_ns),
        (0.999, |round| round.p999_ns),
    ];
    let point = |&(quantile, figure): &Marked| {
        let us = of_latency(row, figure)?.median / 1e3;
        Some(Point {
            x: nines(quantile),
            y: us,
            range: None,
            says: say(quantile, us),
        })
    };
    let fine = row.histogram.as_deref().map(of_histogram).unwrap_or_default();
    if fine.is_empty() {
        return marked.iter().filter_map(point).collect();
    }
    let fine = fine.into_iter().filter(|(quantile, _)| *quantile <= 0.9999);
    let fine = fine.map(|(quantile, us)| Point {
        x: nines(quantile),
        y: us,
        range: None,
        says: String::new(),
    });
    fine.collect()
}

fn transfer_table(group: &Group<'_>) -> Markup {
    let rows = group
        .systems
        .iter()
        .flat_map(|system| group.transfers(&system.id));
    let of = |row: &Row, figure: fn(&TransferRound) -> f64| {
        of_transfer(row, figure).map_or_else(String::new, |s| number(s.median))
    };
    html! {
        details {
            summary { "Throughput and CPU in figures" }
            div.wide { table {
                thead { tr {
                    th { "system" } th.n { "size" } th.n { "rounds" } th.n { "Gbit/s" } th.n { "quartiles" } th.n { "CPU s per GB" }
                    th.n { "sender" } th.n { "receiver" } th.n { "spare cycles" } th.n { "messages lost" }
                } }
                tbody { @for row in rows { tr {
                    td { (swatch(&row.system)) } td.n { (exact(row.size)) } td.n { (row.rounds.len()) }
                    td.n { (of(row, |round| round.bits_per_s() / 1e9)) }
                    td.n { @if let Some(spread) = of_transfer(row, |round| round.bits_per_s() / 1e9) { (number(spread.lower)) " – " (number(spread.upper)) } }
                    td.n { (of(row, TransferRound::cpu_s_per_gb)) }
                    td.n { (of(row, |round| round.cpu_seconds_send / (round.bytes as f64 / 1e9))) }
                    td.n { (of(row, |round| round.cpu_seconds_receive / (round.bytes as f64 / 1e9))) }
                    td.n { (spare(row)) }
                    td.n { (of(row, |round| round.lost_messages as f64)) }
                } } }
            } }
        }
    }
}

/// Spare cycles of each core, in percent: the looper's.
fn spare(row: &Row) -> String {
    let cores = (0..2).map(|core| {
        let of_core =
            |round: &TransferRound| round.spare_fraction.get(core).copied().unwrap_or(f64::NAN) * 100.0;
        of_transfer(row, of_core).map(|spread| format!("{:.0} %", spread.median))
    });
    cores.flatten().collect::<Vec<_>>().join(", ")
}

fn latency_table(group: &Group<'_>, what: What, title: &str) -> Markup {
    let rows = group
        .systems
        .iter()
        .flat_map(|system| group.rows(what, &system.id));
    let us = |row: &Row, figure: fn(&LatencyRound) -> Option<f64>| {
        of_latency(row, figure).map_or_else(String::new, |s| number(s.median / 1e3))
    };
    html! {
        details {
            summary { (title) }
            div.wide { table {
                thead { tr {
                    th { "system" } th.n { "size" } th.n { "rounds" } th.n { "min" } th.n { "p50" } th.n { "p90" } th.n { "p99" }
                    th.n { "p99.9" } th.n { "max" } th.n { "mean" }
                    @if what == What::LatencyUnderLoad { th.n { "load, Gbit/s" } }
                } }
                tbody { @for row in rows { tr {
                    td { (swatch(&row.system)) } td.n { (exact(row.size)) } td.n { (row.rounds.len()) }
                    td.n { (us(row, |round| round.min_ns)) } td.n { (us(row, |round| Some(round.p50_ns))) } td.n { (us(row, |round| round.p90_ns)) }
                    td.n { (us(row, |round| round.p99_ns)) } td.n { (us(row, |round| round.p999_ns)) } td.n { (us(row, |round| round.max_ns)) }
                    td.n { (us(row, |round| Some(round.mean_ns))) }
                    @if what == What::LatencyUnderLoad {
                        td.n { @if let Some(load) = of_latency(row, |round| round.load_bits_per_s) { (number(load.median / 1e9)) } }
                    }
                } } }
            } }
            p.note { "Whole round trips in µs: medians of the rounds' figures." }
        }
    }
}

/// A system's id behind its colour.
fn swatch(id: &str) -> Markup {
    html! { span class=(format!("swatch {}", family(id))) {} (id) }
}

/// How each system was set up, and who was not there.
pub(super) fn systems(reports: &[Report]) -> Markup {
    html! {
        @for report in reports {
            section {
                h2 { "Systems" @if reports.len() > 1 { span.note { ", " (report.command) " of " (report.started) } } }
                p { "For each the best configuration that was found." }
                table.cards {
                    thead { tr { th { "system" } th { "name" } th { "link" } th { "configuration" } } }
                    tbody { @for system in &report.systems { tr {
                        td { (swatch(&system.id)) } td data-th="name" { (system.title) } td data-th="link" { (system.link) }
                        td data-th="configuration" { (system.configuration) }
                    } } }
                }
                @if !report.absent.is_empty() {
                    h3 { "Absent" }
                    table.cards {
                        thead { tr { th { "system" } th { "why" } } }
                        tbody { @for absent in &report.absent { tr { td { (absent.system) } td { (absent.why) } } } }
                    }
                }
                @if !report.failures.is_empty() {
                    h3 { "Failed, and not repeated" }
                    table.cards {
                        thead { tr { th { "system" } th { "size" } th { "round" } th { "why" } } }
                        tbody { @for failed in &report.failures { tr {
                            td { (failed.system) } td { (exact(failed.size)) } td.n { (failed.at + 1) } td { (failed.why) }
                        } } }
                    }
                }
            }
        }
    }
}

/// What the page is made of.
pub(super) fn beds(input: &Input) -> Markup {
    html! {
        footer {
            p { "Made by lm-bench " (env!("CARGO_PKG_VERSION")) " from " (input.reports.len()) " files. "
                "Only payload that arrived is counted. Colours tell kinds of systems apart, dashes the systems of a kind." }
        }
    }
}
