//! Latency and bandwidth of a pipelined message by its length, measured and by the model (E-UDP, figures 10 to 12), and what the model foretells
//! of faster links (figures 13 and 14), from what `cargo xtask bench pipeline --only model --json` kept.

use maud::{Markup, html};
use serde::Deserialize;

use super::plot::{Chart, Line, Point};
use super::sections::{sizes, values};
use crate::size::ByteSize;

/// The file.
#[derive(Deserialize)]
pub(super) struct Forecast {
    runs: Vec<Run>,
    rates: Vec<Rate>,
}

#[derive(Deserialize)]
struct Run {
    bed: String,
    len: u64,
    window: u32,
    /// So many times as slow as its producer can be.
    slower: u32,
    /// One after the other.
    whole: bool,
    times: Times,
    predicted_ns: f64,
}

#[derive(Deserialize)]
struct Times {
    latency_ns: f64,
}

/// A link that two cores of the machine that was measured would have.
#[derive(Deserialize)]
struct Rate {
    gbit: u32,
    lens: Vec<Foretold>,
}

#[derive(Deserialize)]
struct Foretold {
    len: u64,
    fine_ns: f64,
    coarse_ns: f64,
    gbit_per_second: f64,
}

/// Windows that charts are of.
const WINDOW: u32 = 16;

impl Forecast {
    pub(super) fn sections(&self) -> Vec<Markup> {
        let mut beds: Vec<&str> = self.runs.iter().map(|run| &run.bed[..]).collect();
        beds.dedup();
        let measured = beds.into_iter().map(|bed| self.bed(bed));
        measured.chain([self.rates()]).collect()
    }

    /// Figures 10 to 12 on a link.
    fn bed(&self, bed: &str) -> Markup {
        let line = |name: &str, whole: bool, value: fn(&Run) -> f64| {
            let runs = (self.runs.iter()).filter(|run| {
                run.bed == bed && run.whole == whole && run.slower == 1 && run.window == WINDOW
            });
            Line {
                name: name.to_owned(),
                points: runs.map(|run| point(run.len, value(run))).collect(),
            }
        };
        let both = |measured: fn(&Run) -> f64, by_model: fn(&Run) -> f64| {
            vec![
                line("LM, all at once", false, measured),
                line("LM, model", false, by_model),
                line("whole", true, measured),
                line("whole, model", true, by_model),
            ]
        };
        let latency = both(|run| run.times.latency_ns / 1e6, |run| run.predicted_ns / 1e6);
        let bandwidth = both(
            |run| run.len as f64 * 8e3 / run.times.latency_ns,
            |run| run.len as f64 * 8e3 / run.predicted_ns,
        );
        html! {
            section {
                h2 { "By length: " (bed) }
                p.note {
                    "Windows of " (WINDOW) ". From the first byte produced to the last one consumed; bandwidth is of one message, and so less "
                    "than that of many. The paper's model errs by less than 5 %; its link gave 951 of 1007 Mbit/s, 94 %."
                }
                div.charts {
                    (chart("Latency (figures 10 and 12)", "ms", latency))
                    (chart("Bandwidth (figures 11 and 12)", "Mbit/s", bandwidth))
                }
            }
        }
    }

    /// Figures 13 and 14.
    fn rates(&self) -> Markup {
        let lines = |value: fn(&Foretold) -> f64| {
            let line = |rate: &Rate| Line {
                name: format!("{} Gbit/s", rate.gbit),
                points: rate.lens.iter().map(|one| point(one.len, value(one))).collect(),
            };
            self.rates.iter().map(line).collect()
        };
        html! {
            section {
                h2 { "Foretold of faster links" }
                p.note {
                    "By the model, with two cores of the machine that was measured and packets copied as there, in the best windows. From the rate on "
                    "at which a core takes longest, faster links gain nothing."
                }
                div.charts {
                    (chart("Latency, all at once (figure 13)", "ms", lines(|one| one.fine_ns / 1e6)))
                    (chart("Part of the time of one after the other", "", lines(|one| one.fine_ns / one.coarse_ns)))
                    (chart("Bandwidth of many messages (figure 14)", "Gbit/s", lines(|one| one.gbit_per_second)))
                }
            }
        }
    }
}

fn point(len: u64, value: f64) -> Point {
    Point {
        x: len as f64,
        y: value,
        range: None,
        says: format!("{}: {}", ByteSize::new(len), super::figures::number(value)),
    }
}

fn chart(title: &str, unit: &str, lines: Vec<Line>) -> Markup {
    let chart = Chart {
        title: title.to_owned(),
        note: unit.to_owned(),
        x: sizes(&lines),
        y: values(unit, true),
        lines,
    };
    chart.draw()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn each_link_has_two_charts_and_faster_ones_three() {
        let run = |bed: &str, whole: bool, window: u32, slower: u32, len: u64| {
            json!({"bed": bed, "len": len, "window": window, "slower": slower, "whole": whole,
                "times": {"latency_ns": 1e6}, "predicted_ns": 2e6})
        };
        let mut runs = Vec::new();
        for bed in ["veth", "100 Mbit/s"] {
            for whole in [false, true] {
                for len in [4096, 65536] {
                    // Charts are of the first alone.
                    runs.extend(
                        [(16, 1), (32, 1), (16, 2)]
                            .map(|(window, slower)| run(bed, whole, window, slower, len)),
                    );
                }
            }
        }
        let lens =
            [json!({"len": 65536, "fine_ns": 1e6, "coarse_ns": 2e6, "gbit_per_second": 0.5, "window": 16})];
        let rates = [2, 10].map(|gbit| json!({"gbit": gbit, "lens": lens}));
        let forecast: Forecast = serde_json::from_value(json!({"runs": runs, "rates": rates})).unwrap();
        let sections = forecast.sections();
        let counts = |what: &str| -> Vec<usize> {
            let each = sections.iter().map(|section| section.0.matches(what).count());
            each.collect()
        };
        assert_eq!(counts("<svg"), [2, 2, 3]);
        // Of four lines two lengths each; of two links one each.
        assert_eq!(counts("<circle"), [2 * 4 * 2, 2 * 4 * 2, 3 * 2]);
        assert!(
            sections[0].0.contains("LM, all at once: 64K: 1"),
            "{}",
            sections[0].0
        );
    }
}
