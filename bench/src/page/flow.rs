//! `lm-bench flow`: what `cargo xtask bench pipeline --json` kept, as one page. When which station had a message (E-UDP, figures 2, 4 and 9), how
//! long each worked for one (figure 8), what was measured by the length of windows and queues, and what the model has to say.

use std::ops::Range;
use std::path::PathBuf;

use lm_measure::statistics::Summary;
use maud::{Markup, html};
use serde::Deserialize;

use super::forecast::Forecast;
use super::plot::{Scale, place, round_ticks, tick_name};
use super::{document, figures, write};
use crate::cli::Failure;
use crate::pipeline::Passed;

/// Stations with their colours' classes.
const STATIONS: [(&str, &str); 4] = [
    ("produce", "udp"),
    ("send", "lm"),
    ("land", "quic"),
    ("consume", "tcp"),
];
/// Comparisons whose messages are drawn.
const FLOWS: &str = "flow";
/// Those of which each contender's median is: by the length of something.
const SIZES: &str = "_sizes";

const MS: &str = "ms";

const WIDTH: f64 = 900.0;
const LEFT: f64 = 190.0;
const RIGHT: f64 = 20.0;
const TOP: f64 = 8.0;
const ROW: f64 = 20.0;
const BOTTOM: f64 = 40.0;

/// Draw what was measured of a pipeline: which station had a message when (E-UDP, figures 2, 4, 8 and 9), latency and bandwidth by length beside
/// the model's and what it foretells (10 to 14), and what longer windows and queues do
#[derive(Debug, clap::Args)]
pub struct FlowArgs {
    /// What `cargo xtask bench pipeline --json` wrote with --only flow, model, window_sizes or queue_sizes
    #[arg(required = true, value_name = "FILE")]
    files: Vec<PathBuf>,
    /// Write the page to this file
    #[arg(long, value_name = "FILE")]
    html: PathBuf,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Kept {
    Comparisons { comparisons: Vec<Comparison> },
    Forecast(Forecast),
}

#[derive(Deserialize)]
struct Comparison {
    key: String,
    title: String,
    unit: String,
    contenders: Vec<Contender>,
}

#[derive(Deserialize)]
struct Contender {
    name: String,
    median: f64,
    #[serde(default)]
    reports: Vec<serde_json::Value>,
}

/// What both ends told of a round.
#[derive(Deserialize)]
struct Ends {
    near: End,
    far: End,
}

#[derive(Deserialize)]
struct End {
    messages: Vec<Passed>,
}

/// Bars beside each other, in milliseconds.
struct Row {
    name: String,
    class: &'static str,
    bars: Vec<Range<f64>>,
}

/// Reads the files and writes the page.
///
/// # Errors
/// A file that cannot be read or has nothing to be drawn, or a page that cannot be written.
pub fn flow(args: &FlowArgs) -> Result<(), Failure> {
    let mut all = Vec::new();
    for file in &args.files {
        let other = |why: String| {
            let remedy = "write one by cargo xtask bench pipeline --only flow --json FILE";
            Failure::new(format!("{}: {why}; {remedy}", file.display()))
        };
        let text = std::fs::read_to_string(file).map_err(|error| other(crate::output::describe(&error)))?;
        all.extend(sections(&text).map_err(other)?);
    }
    let title = "One message, produced, sent, received and consumed";
    let page = document(
        title,
        html! { main { h1 { (title) } @for section in &all { (section) } } },
    );
    write(&args.html, &page.into_string())
}

/// What is drawn of a file, or why nothing is.
fn sections(text: &str) -> Result<Vec<Markup>, String> {
    let kept: Kept = serde_json::from_str(text)
        .map_err(|_| "neither a pipeline's comparisons nor its model are in it".to_owned())?;
    let comparisons = match kept {
        Kept::Forecast(forecast) => return Ok(forecast.sections()),
        Kept::Comparisons { comparisons } => comparisons,
    };
    let mut sections = Vec::new();
    for one in &comparisons {
        if one.key.starts_with(FLOWS) {
            sections.push(section(one)?);
        } else if one.key.contains(SIZES) {
            sections.push(by_size(one));
        }
    }
    match sections.is_empty() {
        true => Err("neither messages' times nor lengths of windows or queues are in it".to_owned()),
        false => Ok(sections),
    }
}

/// Each contender's median.
fn by_size(comparison: &Comparison) -> Markup {
    let rows: Vec<Row> = (comparison.contenders.iter())
        .map(|one| Row {
            name: one.name.clone(),
            class: "lm",
            bars: vec![0.0..one.median],
        })
        .collect();
    html! { section { h2 { (comparison.title) } (chart("Median", &rows, &comparison.unit)) } }
}

fn section(comparison: &Comparison) -> Result<Markup, String> {
    let mut charts = Vec::new();
    let mut work = Vec::new();
    for contender in &comparison.contenders {
        let report = contender.reports.first().ok_or("a contender without a round")?;
        let ends: Ends = serde_json::from_value(report.clone()).map_err(|error| error.to_string())?;
        charts.push(chart(&contender.name, &stations(&ends)?, MS));
        work.extend(works(&contender.name, &ends));
    }
    Ok(html! {
        section {
            h2 { (comparison.title) }
            p.note {
                "On one clock. Pauses between messages are left out. To send begins with the first byte that may leave and ends with the "
                "confirmation; to land ends when all can be read, to consume begins when the first byte can be."
            }
            @for chart in charts { (chart) }
            (chart("How long each station worked for a message, without what it waited, median", &work, MS))
        }
    })
}

/// When each station had each message, one message after the other.
fn stations(ends: &Ends) -> Result<Vec<Row>, String> {
    let messages: Vec<[Range<u64>; 4]> = (ends.near.messages.iter())
        .zip(&ends.far.messages)
        .map(|(near, far)| spans(near, far))
        .collect::<Option<_>>()
        .ok_or("a message without its times")?;
    let mut rows = STATIONS.map(|(name, class)| Row {
        name: name.to_owned(),
        class,
        bars: Vec::new(),
    });
    let mut ends_ms = 0.0;
    for spans in messages {
        let (begins_ns, begins_ms) = (spans[0].start, ends_ms);
        let at = |ns: u64| begins_ms + (ns - begins_ns) as f64 / 1e6;
        for (row, span) in rows.iter_mut().zip(spans) {
            let bar = at(span.start)..at(span.end);
            ends_ms = f64::max(ends_ms, bar.end);
            row.bars.push(bar);
        }
    }
    Ok(rows.into())
}

/// In the order of the stations; all times are after the first.
fn spans(near: &Passed, far: &Passed) -> Option<[Range<u64>; 4]> {
    let begins_ns = near.begins_ns?;
    let spans = [
        begins_ns..near.produced_ns?,
        near.released_ns?..near.confirmed_ns?,
        near.released_ns?..far.whole_ns?,
        far.first_ns?..far.consumed_ns?,
    ];
    let is_ordered = |span: &Range<u64>| begins_ns <= span.start && span.start <= span.end;
    spans.iter().all(is_ordered).then_some(spans)
}

/// How long each station worked, where that is told.
fn works(name: &str, ends: &Ends) -> Vec<Row> {
    let median = |end: &End, of: fn(&Passed) -> Option<u64>| {
        let times: Option<Vec<f64>> = (end.messages.iter())
            .map(|one| Some(of(one)? as f64 / 1e6))
            .collect();
        Summary::of(&times?).map(|summary| summary.median)
    };
    let worked = |one: &Passed| Some(one.worked.ns);
    let moved = |one: &Passed| one.moved_ns;
    let times = [
        median(&ends.near, worked),
        median(&ends.near, moved),
        median(&ends.far, moved),
        median(&ends.far, worked),
    ];
    let told = STATIONS.iter().zip(times).filter_map(|((station, class), time)| {
        Some(Row {
            name: format!("{station}, {name}"),
            class,
            bars: vec![0.0..time?],
        })
    });
    told.collect()
}

fn chart(title: &str, rows: &[Row], unit: &str) -> Markup {
    let bars = || rows.iter().flat_map(|row| &row.bars);
    let high = bars().map(|bar| bar.end).fold(0.0, f64::max);
    let x = Scale {
        low: 0.0,
        high: high.max(f64::MIN_POSITIVE),
        logarithmic: false,
        from: LEFT,
        to: WIDTH - RIGHT,
    };
    let bottom = TOP + ROW * rows.len() as f64;
    html! {
        figure.chart.flow {
            figcaption { strong { (title) } }
            svg viewBox=(format!("0 0 {WIDTH} {:.0}", bottom + BOTTOM)) role="img" aria-label=(title) {
                @for tick in round_ticks(x.low, x.high, false) {
                    line.grid x1=(place(x.at(tick))) x2=(place(x.at(tick))) y1=(TOP) y2=(place(bottom)) {}
                    text.tick x=(place(x.at(tick))) y=(place(bottom + 17.0)) text-anchor="middle" { (tick_name(tick)) }
                }
                @for (index, row) in rows.iter().enumerate() {
                    @let top = TOP + ROW * index as f64;
                    text x=(LEFT - 8.0) y=(place(top + 14.0)) text-anchor="end" { (row.name) }
                    g class=(format!("bars {}", row.class)) {
                        @for bar in &row.bars {
                            rect x=(place(x.at(bar.start))) y=(place(top + 2.0)) height=(ROW - 4.0)
                                width=(place(x.at(bar.end) - x.at(bar.start))) {
                                title { (row.name) ": " (figures::number(bar.start)) " to " (figures::number(bar.end)) " " (unit) }
                            }
                        }
                    }
                }
                line.axis x1=(LEFT) x2=(WIDTH - RIGHT) y1=(place(bottom)) y2=(place(bottom)) {}
                text.title x=(place((LEFT + WIDTH - RIGHT) / 2.0)) y=(place(bottom + 33.0)) text-anchor="middle" { (unit) }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    /// Two messages with a pause of 100 ms in between, whose stations take 10 ms each, one after the other.
    fn ends() -> Value {
        let ms = |at: u64| at * 1_000_000;
        let near = |at| {
            json!({"begins_ns": ms(at), "released_ns": ms(at + 10), "produced_ns": ms(at + 10), "confirmed_ns": ms(at + 20),
            "worked_ns": ms(9), "moved_ns": ms(4), "sha256": ""})
        };
        let far = |at| json!({"first_ns": ms(at + 20), "whole_ns": ms(at + 20), "consumed_ns": ms(at + 30), "worked_ns": ms(8), "sha256": ""});
        let end = |of: &dyn Fn(u64) -> Value| json!({"messages": [of(1000), of(1130)], "busy": 0.5});
        json!({"near": end(&near), "far": end(&far)})
    }

    #[test]
    fn messages_stand_side_by_side_on_one_clock() {
        let ends: Ends = serde_json::from_value(ends()).unwrap();
        let rows = stations(&ends).unwrap();
        let bars: Vec<_> = rows.iter().map(|row| row.bars.clone()).collect();
        assert_eq!(bars[0], [0.0..10.0, 30.0..40.0]);
        assert_eq!(bars[1], [10.0..20.0, 40.0..50.0]);
        assert_eq!(bars[2], bars[1]);
        assert_eq!(bars[3], [20.0..30.0, 50.0..60.0]);
        // Nobody tells how long the far end took to receive what is read when it is whole.
        let names: Vec<_> = works("whole", &ends).into_iter().map(|row| row.name).collect();
        assert_eq!(names, ["produce, whole", "send, whole", "consume, whole"]);
    }

    #[test]
    fn a_page_has_a_chart_for_each_contender_or_says_what_is_missing() {
        let kept = |key: &str, report: Value| {
            let contenders = ["all at once", "one after the other"]
                .map(|name| json!({"name": name, "median": 7.0, "reports": [report.clone()]}));
            json!({"comparisons": [{"key": key, "title": "ten", "unit": "ms", "contenders": contenders}]})
                .to_string()
        };
        let page = |text: &str| {
            sections(text).map(|all| all.into_iter().map(Markup::into_string).collect::<String>())
        };
        let drawn = page(&kept("flow_port", ends())).unwrap();
        assert_eq!(drawn.matches("<svg").count(), 3);
        // Of two contenders two messages at four stations, and three stations' work.
        assert_eq!(drawn.matches("<rect").count(), 2 * (2 * 4 + 3));
        assert!(
            page(&kept("core_bound", ends()))
                .unwrap_err()
                .contains("neither messages")
        );
        let drawn = page(&kept("window_sizes", ends())).unwrap();
        assert_eq!(
            (drawn.matches("<svg").count(), drawn.matches("<rect").count()),
            (1, 2)
        );
        assert!(page("{}").unwrap_err().contains("nor its model"));
        let mut early = ends();
        early["far"]["messages"][1]["first_ns"] = 5.into();
        assert!(
            page(&kept("flow_port", early))
                .unwrap_err()
                .contains("without its times")
        );
    }
}
