//! Ratios with their intervals against what is asked of them: a table with a forest plot in one of its columns.

use lm_measure::size::exact;
use maud::{Markup, html};

use super::figures::{number, times};
use super::plot::{Scale, place};
use crate::suite::schema::{Ratio, Report, Target, Verdict, What};

/// Units of the drawing in a row; the page scales it.
const WIDTH: f64 = 300.0;
const HEIGHT: f64 = 20.0;
const MARGIN: f64 = 8.0;

/// The axis of all ratios.
fn span(ratios: &[&Ratio]) -> Scale {
    let values = ratios.iter().flat_map(|ratio| {
        let target = ratio.target.map_or(1.0, bound);
        [ratio.low, ratio.high, ratio.median, target]
    });
    let (low, high) = values
        .filter(|value| value.is_finite() && *value > 0.0)
        .fold((1.0f64, 1.0f64), |(low, high), value| {
            (low.min(value), high.max(value))
        });
    Scale {
        low: low / 1.15,
        high: high * 1.15,
        logarithmic: true,
        from: MARGIN,
        to: WIDTH - MARGIN,
    }
}

/// Values with a name: as many as have room.
fn ticks(span: &Scale) -> Vec<f64> {
    let all = [
        0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0,
    ];
    let mut ticks: Vec<f64> = Vec::new();
    for tick in all
        .into_iter()
        .filter(|tick| (span.low..=span.high).contains(tick))
    {
        if ticks
            .last()
            .is_none_or(|last| span.at(tick) - span.at(*last) > 26.0)
        {
            ticks.push(tick);
        }
    }
    ticks
}

/// The value that the interval shall be clear of.
fn bound(target: Target) -> f64 {
    match target {
        Target::AtLeast(bound) | Target::AtMost(bound) => bound,
    }
}

fn asked(target: Target) -> String {
    match target {
        Target::AtLeast(bound) => format!("≥ {}", shown(bound)),
        Target::AtMost(bound) => format!("≤ {}", shown(bound)),
    }
}

/// As short as it was asked.
fn shown(value: f64) -> String {
    format!("{:.4}", value)
        .trim_end_matches('0')
        .trim_end_matches('.')
        .to_owned()
}

fn what_name(ratio: &Ratio) -> &'static str {
    match (ratio.what, ratio.metric.as_str()) {
        (What::LatencyUnderLoad, "p99") => "round trip beside bulk, p99",
        (What::LatencyUnderLoad, _) => "round trip beside bulk, p50",
        (_, "p50") => "round trip, p50",
        (_, "p99") => "round trip, p99",
        (What::Cpu, "bits_per_s") => "throughput, cycles counted",
        (_, "bits_per_s") => "throughput",
        (_, "cpu_s_per_gb") => "CPU per GB",
        _ => "",
    }
}

const fn verdict_name(verdict: Verdict) -> (&'static str, &'static str) {
    match verdict {
        Verdict::Met => ("met", "✓ met"),
        Verdict::Missed => ("missed", "✗ missed"),
        Verdict::Unclear => ("unclear", "? unclear"),
        Verdict::None => ("none", "–"),
    }
}

/// The part of the page about ratios: those of which something is asked first, the others folded away.
pub(super) fn section(reports: &[Report]) -> Markup {
    html! {
        @for report in reports.iter().filter(|report| !report.ratios.is_empty()) {
            @let (with, without): (Vec<&Ratio>, Vec<&Ratio>) = report.ratios.iter().partition(|ratio| ratio.target.is_some());
            section {
                h2 { "Ratios" @if reports.len() > 1 { ", " (report.command) " of " (report.started) } }
                p { (summary(&with)) " Each ratio is taken within a round; the median of all rounds stands with its 95 % interval, "
                    "and a target is met or missed only where the whole interval is on one side. The shaded side of a line is the one asked for." }
                (forest(report, &with))
                @if !without.is_empty() {
                    details { summary { (without.len()) " more, of which nothing is asked" } (forest(report, &without)) }
                }
            }
        }
    }
}

fn summary(ratios: &[&Ratio]) -> String {
    if ratios.is_empty() {
        return "Nothing was asked of this run.".to_owned();
    }
    let count = |verdict| ratios.iter().filter(|ratio| ratio.verdict == verdict).count();
    format!(
        "Of {} targets {} are met, {} are missed, {} are unclear.",
        ratios.len(),
        count(Verdict::Met),
        count(Verdict::Missed),
        count(Verdict::Unclear)
    )
}

fn forest(report: &Report, ratios: &[&Ratio]) -> Markup {
    if ratios.is_empty() {
        return html! {};
    }
    let span = span(ratios);
    let title = |id: &str| {
        let system = report.systems.iter().find(|system| system.id == id);
        system.map_or_else(|| id.to_owned(), |system| system.title.clone())
    };
    html! {
        table.forest {
            thead { tr {
                th { "what" } th { "size" } th { "compared" } th.plot { (axis(&span)) }
                th.n { "ratio" } th.n { "95 %" } th.n { "near cores" } th.n { "asked" } th { "verdict" }
            } }
            tbody {
                @for ratio in ratios {
                    @let (class, verdict) = verdict_name(ratio.verdict);
                    tr {
                        td.what { (what_name(ratio)) }
                        td.size { (exact(ratio.size)) }
                        td.pair { (title(&ratio.system)) span.note { " over " } (title(&ratio.against)) }
                        td.plot { (interval(ratio, &span)) }
                        td.n { strong { (times(ratio.median)) } }
                        td.n.span { (number(ratio.low)) " – " (number(ratio.high)) }
                        td.n.span { (near(ratio)) }
                        td.n.asked { (ratio.target.map_or_else(String::new, asked)) }
                        td class=(format!("verdict {class}")) title=(format!("{} rounds", ratio.rounds)) { (verdict) }
                    }
                }
            }
        }
    }
}

/// The ratio over near cores, and how many rounds it leaves out.
fn near(ratio: &Ratio) -> String {
    let Some(near) = &ratio.near else {
        return String::new();
    };
    match near.median_low_high {
        Some([median, ..]) => format!("{}, {} left out", times(median), near.left_out),
        None => format!("all {} left out", near.left_out),
    }
}

/// The head of the column with the drawings.
fn axis(span: &Scale) -> Markup {
    html! {
        svg viewBox=(format!("0 0 {WIDTH} {HEIGHT}")) role="img" aria-label="ratio, logarithmic" {
            @for tick in ticks(span) {
                text.tick x=(place(span.at(tick))) y="13" text-anchor="middle" { (shown(tick)) }
            }
        }
    }
}

fn interval(ratio: &Ratio, span: &Scale) -> Markup {
    let middle = HEIGHT / 2.0;
    let (class, _) = verdict_name(ratio.verdict);
    let (left, right) = (MARGIN / 2.0, WIDTH - MARGIN / 2.0);
    let asked = ratio.target.map(|target| match target {
        Target::AtLeast(bound) => (span.at(bound), right),
        Target::AtMost(bound) => (left, span.at(bound)),
    });
    html! {
        svg viewBox=(format!("0 0 {WIDTH} {HEIGHT}")) role="img" aria-label=(format!("{} to {}", number(ratio.low), number(ratio.high))) {
            @if let Some((from, to)) = asked {
                rect.asked x=(place(from)) y="0" width=(place((to - from).max(0.0))) height=(HEIGHT) {}
            }
            line.one x1=(place(span.at(1.0))) x2=(place(span.at(1.0))) y1="0" y2=(HEIGHT) {}
            @if let Some(edge) = ratio.target.map(bound) {
                line.edge x1=(place(span.at(edge))) x2=(place(span.at(edge))) y1="0" y2=(HEIGHT) {}
            }
            g class=(format!("interval {class}")) {
                line x1=(place(span.at(ratio.low))) x2=(place(span.at(ratio.high))) y1=(middle) y2=(middle) {}
                circle cx=(place(span.at(ratio.median))) cy=(middle) r="4" {}
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_asked_is_written_as_it_was_asked() {
        let asked = [Target::AtLeast(1.45), Target::AtMost(0.07)].map(asked);
        assert_eq!(asked, ["≥ 1.45", "≤ 0.07"]);
    }

    #[test]
    fn the_axis_holds_everything_and_names_that_fit() {
        let ratio = |low, high, target| Ratio {
            what: What::Throughput,
            size: 1024,
            metric: "bits_per_s".to_owned(),
            system: "lm".to_owned(),
            against: "quinn".to_owned(),
            rounds: 20,
            median: (low + high) / 2.0,
            low,
            high,
            near: None,
            target,
            verdict: Verdict::Met,
        };
        let ratios = [
            ratio(0.05, 0.06, Some(Target::AtMost(0.07))),
            ratio(4.0, 11.0, Some(Target::AtLeast(4.0))),
        ];
        let span = span(&ratios.iter().collect::<Vec<_>>());
        assert!(span.low < 0.05 && span.high > 11.0);
        let ticks = ticks(&span);
        assert!(ticks.contains(&1.0) || ticks.len() > 3, "{ticks:?}");
        assert!(
            ticks
                .windows(2)
                .all(|pair| span.at(pair[1]) - span.at(pair[0]) > 26.0)
        );
    }
}
