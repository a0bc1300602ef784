//! A row as a sum of parts: whose the instructions of a message are, so that a gain that comes from a worse competitor is seen.

use anyhow::{Result, ensure};
use lm_measure::table::Table;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::{Measured, What};
use crate::vm::instructions::Instructions;
use crate::vm::layers::LAYERS;

/// How long an instruction takes, in nanoseconds (`-icount shift=1`).
const INSTRUCTION_NS: f64 = 2.0;
/// Parts are the whole within this share of it.
const AGREE: f64 = 0.03;

/// Instructions for each message or round trip, of both ends.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Parts {
    /// Of the programs at both ends.
    programs: f64,
    /// Of the kernel without the cards' driver.
    kernel: f64,
    /// Of the cards' driver.
    driver: f64,
    /// Time in which nobody executed any: what is left of the whole, as instructions. Of round trips it lacks what the asking end does between two of
    /// them, some 450 instructions.
    idle: f64,
    /// By [`LAYERS`].
    #[serde(default)]
    layers: [f64; LAYERS.len()],
    /// Where most were.
    functions: Vec<(String, f64)>,
}

impl Parts {
    /// Of a row's report; `None` where they were not counted, or not in each of its rounds.
    pub(super) fn of(what: What, report: &Value) -> Option<Parts> {
        let counted: Instructions = serde_json::from_value(report["instructions"].clone()).ok()?;
        let rounds = report["rounds"].as_array()?;
        if rounds.is_empty() || counted.windows != rounds.len() {
            return None;
        }
        let (mut messages, mut whole_ns) = (0.0, 0.0);
        for round in rounds {
            let (count, ns) = match what {
                What::Stream | What::Sessions => {
                    (round["messages"].as_f64()?, round["seconds"].as_f64()? * 1e9)
                }
                What::RoundTrips | What::Beside => {
                    let count = round["count"].as_f64()?;
                    (count, round["mean_ns"].as_f64()? * count)
                }
            };
            messages += count;
            whole_ns += ns;
        }
        let each = |count: u64| count as f64 / messages;
        let sum = counted.programs + counted.kernel + counted.driver;
        (messages > 0.0).then(|| Parts {
            programs: each(counted.programs),
            kernel: each(counted.kernel),
            driver: each(counted.driver),
            layers: counted.layers.map(each),
            idle: whole_ns / INSTRUCTION_NS / messages - each(sum),
            functions: (counted.functions.into_iter())
                .map(|(name, count)| (name, each(count)))
                .collect(),
        })
    }

    fn executed(&self) -> f64 {
        self.programs + self.kernel + self.driver
    }
}

/// Where two ends that poll leave no time idle, what they and the kernel execute is the whole, or it was not counted right.
pub(super) fn are_the_whole(measured: &[Measured]) -> Result<()> {
    for one in measured {
        let name = one.row.name();
        let Some(parts) = &one.parts else {
            anyhow::bail!("the instructions of {name} were not counted");
        };
        let idle = parts.idle / (parts.executed() + parts.idle);
        ensure!(
            idle.abs() <= AGREE,
            "the parts of {name} are {:.1} % off the whole, though both ends poll",
            idle * 100.0
        );
    }
    Ok(())
}

/// The parts of each row.
pub(super) fn table(measured: &[Measured]) -> Table {
    let mut table = Table::new(&[
        "instructions a message",
        "programs",
        "kernel",
        "driver",
        "idle",
        "executed for a byte",
    ]);
    for one in measured {
        let Some(parts) = &one.parts else {
            table.row([&one.row.name(), "not counted", "", "", "", ""]);
            continue;
        };
        let [programs, kernel, driver, idle] =
            [parts.programs, parts.kernel, parts.driver, parts.idle.max(0.0)]
                .map(|part| format!("{part:.0}"));
        let byte = format!("{:.2}", parts.executed() / one.row.bytes());
        table.row([one.row.name(), programs, kernel, driver, idle, byte]);
    }
    table
}

/// Table 1 of SS-RTUDP: layers of each row that was counted, and their share of what was executed.
pub(super) fn layers(measured: &[Measured]) -> Table {
    let counted = measured
        .iter()
        .filter_map(|one| Some((one.row.name(), one.parts.as_ref()?)));
    let counted: Vec<_> = counted.collect();
    let heads = counted.iter().map(|(name, _)| &**name);
    let heads: Vec<&str> = ["instructions a message", "paper's UDP"]
        .into_iter()
        .chain(heads)
        .collect();
    let mut table = Table::new(&heads);
    for (place, layer) in LAYERS.iter().enumerate() {
        let share = |part: f64, all: f64| format!("{:.1} %", part / all * 100.0);
        let paper = layer.paper_us.map_or_else(String::new, |us| share(us, 68.1));
        let cells = counted.iter().map(|(_, parts)| {
            let executed = parts.layers[place];
            format!("{executed:.0}, {}", share(executed, parts.executed()))
        });
        table.row([layer.name.to_owned(), paper].into_iter().chain(cells));
    }
    table
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::{USECS, short_rows};
    use super::*;
    use crate::vm::protocol::{Ended, Outcome};

    fn measured(what: What, rounds: Value, windows: usize) -> Measured {
        let mut row = short_rows(1, USECS).remove(0);
        row.what = what;
        let ended = Ended {
            name: row.name(),
            outcome: Outcome::Passed,
            seconds: 1.0,
            report: json!({
                "rounds": rounds,
                "instructions": {"windows": windows, "programs": 3000, "kernel": 1500, "driver": 500, "functions": [["igb_poll", 400]]},
            }),
            output: String::new(),
        };
        Measured::of(&row, &ended)
    }

    #[test]
    fn parts_of_a_message_are_those_of_all_windows() {
        let streams = json!([{"bytes": 1, "messages": 3, "seconds": 6e-6}, {"bytes": 1, "messages": 7, "seconds": 6e-6}]);
        let one = measured(What::Stream, streams.clone(), 2);
        let parts = one.parts.clone().unwrap();
        assert_eq!(
            (parts.programs, parts.kernel, parts.driver, parts.idle),
            (300.0, 150.0, 50.0, 100.0)
        );
        assert_eq!(parts.functions, [("igb_poll".to_owned(), 40.0)]);
        assert!(table(&[one]).to_string().contains("300"));
        let lost = measured(What::Stream, streams, 1);
        assert!(lost.parts.is_none(), "a round that did not count");
        assert!(table(&[lost]).to_string().contains("not counted"));
        let trips = measured(
            What::RoundTrips,
            json!([{"p50_ns": 1.0, "count": 100, "mean_ns": 100.0}]),
            1,
        );
        assert_eq!(trips.parts.unwrap().idle, 0.0);
    }

    #[test]
    fn parts_that_are_not_the_whole_are_named() {
        let stream = |seconds: f64| {
            measured(
                What::Stream,
                json!([{"bytes": 1, "messages": 1, "seconds": seconds}]),
                1,
            )
        };
        are_the_whole(&[stream(1.02e-5), stream(0.98e-5)]).unwrap();
        for seconds in [1.1e-5, 0.9e-5] {
            let error = are_the_whole(&[stream(seconds)]).unwrap_err().to_string();
            assert!(error.contains("% off the whole"), "{error}");
        }
        let none = measured(What::Stream, json!([]), 0);
        assert!(are_the_whole(&[none]).is_err());
    }
}
