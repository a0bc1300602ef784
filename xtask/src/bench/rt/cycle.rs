//! **e**, the cycle test: a message each millisecond, one way between two programs that sleep meanwhile (`lm-bench rt cycle`), beside what
//! `cyclictest` measures of both cores in the same seconds; idle, and beside TCP that takes both cores.
//!
//! All of it has the real-time priority (`chrt -f`) that `cyclictest` is used with; TCP has none. One way has two wake-ups in it. No link is slow
//! here: what is measured is the host.

use std::time::Duration;

use anyhow::{Context, Result};
use lm_measure::statistics::Quantile;
use serde_json::{Value, json};

use super::super::Unit::{Microseconds, Packets};
use super::super::{Column, Comparison, Contender, Measured, Sample, Target, recipes};
use super::number;
use super::under_tcp::{cyclictest, wake_ups};
use crate::bed::{Bed, BedConfig, INTERFACE, Launch};
use crate::ends::Ends;
use crate::machine::two_cores;
use crate::workspace::Programs;

const PRIORITY: &str = "80";
/// What is asked: LM's p99.99, in microseconds, above that of two wake-ups.
const ABOVE_MOST: f64 = 50.0;
const KEYS: [&str; 2] = ["e_cycle_idle", "e_cycle_tcp"];
/// TCP is there before, and behind, and one program ends within this after its time.
const BEFORE_TCP_S: f64 = 0.5;
const SPARE_S: f64 = 10.0;
const TCP_MESSAGE_LEN: u64 = 1 << 16;

macro_rules! columns {
    ($title:literal) => {
        const {
            &[
                Column::new(
                    "/one_way_us/p50",
                    concat!($title, ", one way p50"),
                    Microseconds,
                ),
                Column::new(
                    "/one_way_us/p9999",
                    concat!($title, ", one way p99.99"),
                    Microseconds,
                ),
                Column::new(
                    "/one_way_us/max",
                    concat!($title, ", longest one way"),
                    Microseconds,
                ),
                Column::new(
                    "/round_trip_us/p9999",
                    concat!($title, ", round trip p99.99"),
                    Microseconds,
                ),
                Column::new(
                    "/cyclictest_us/p50",
                    concat!($title, ", cyclictest p50"),
                    Microseconds,
                ),
                Column::new(
                    "/cyclictest_us/p9999",
                    concat!($title, ", cyclictest p99.99"),
                    Microseconds,
                ),
                Column::new(
                    "/cyclictest_us/max",
                    concat!($title, ", cyclictest's longest"),
                    Microseconds,
                ),
                Column::new(
                    "/missed",
                    concat!($title, ", a period late or more"),
                    Packets,
                ),
                Column::new("/lost", concat!($title, ", lost"), Packets),
                Column::new(
                    "/unsent",
                    concat!($title, ", due while the sender slept"),
                    Packets,
                ),
            ]
        }
    };
}

pub(super) fn all(seconds: f64) -> [Comparison; 2] {
    [
        comparison(
            KEYS[0],
            "1 kHz idle, p99.99 less twice cyclictest's",
            columns!("1 kHz idle"),
            false,
            seconds,
        ),
        comparison(
            KEYS[1],
            "1 kHz beside TCP, p99.99 less twice cyclictest's",
            columns!("1 kHz beside TCP"),
            true,
            seconds,
        ),
    ]
}

fn comparison(
    key: &'static str,
    title: &'static str,
    columns: &'static [Column],
    has_tcp: bool,
    seconds: f64,
) -> Comparison {
    let contender = Contender {
        name: "LM real time",
        bed: BedConfig::default(),
        measure: Box::new(move |bed, programs| measure(bed, programs, has_tcp, seconds)),
    };
    Comparison {
        key,
        title,
        unit: Microseconds,
        contenders: vec![contender],
        targets: vec![Target::AtMost(ABOVE_MOST)],
        columns,
        most_rounds: None,
    }
}

fn measure(bed: &Bed, programs: &Programs, has_tcp: bool, seconds: f64) -> Result<Sample> {
    let limit = Duration::from_secs_f64(seconds + 2.0 * SPARE_S);
    let [left, right] = two_cores();
    let lm_bench = programs.path("lm-bench");
    let cycle = |core: usize, words: String| {
        Launch::new("chrt")
            .args(["-f", PRIORITY])
            .arg(&lm_bench)
            .args(["rt", "cycle", "--interface", INTERFACE])
            .args(words.split_whitespace())
            .core(core)
            .time_limit(limit)
    };
    let mut far = bed.right().spawn(cycle(right, String::new()))?;
    far.await_text("ready")?;
    let tcp = has_tcp.then(|| -> Result<_> {
        let tcp = Ends::stream("tcp", TCP_MESSAGE_LEN, [BEFORE_TCP_S, seconds]).sending(seconds + SPARE_S);
        let launch = |words: Vec<String>, core| {
            Launch::new(&lm_bench)
                .args(["--time-limit", &limit.as_secs().to_string()])
                .args(words)
                .core(core)
                .time_limit(limit)
        };
        let mut receiver = bed.right().spawn(launch(tcp.far(), right))?;
        receiver.await_text("ready")?;
        Ok((bed.left().spawn(launch(tcp.near(), left))?, receiver))
    });
    let tcp = tcp.transpose()?;
    let priority = format!("--priority={PRIORITY}");
    let waking = bed
        .left()
        .spawn(cyclictest(seconds).arg(priority).time_limit(limit))
        .context("install rt-tests")?;
    let words = format!("--to {}:7168 --seconds {seconds}", bed.right().address());
    let near = bed.left().spawn(cycle(left, words))?;
    let mut report = near.finish()?.json()?;
    let times = wake_ups(&waking.finish()?.stdout);
    let quantile = |part| Quantile::of(&times, part).map(|found| found.value);
    report["cyclictest_us"] = json!({"p50": quantile(0.5), "p9999": quantile(0.9999), "max": times.last()});
    let [due, sent] = ["/due", "/sent"].map(|place| number(&report, place).unwrap_or(0.0));
    report["unsent"] = json!(due - sent);
    if let Some((sender, mut receiver)) = tcp {
        recipes::finish_sender(sender, &mut receiver)?;
    }
    far.stop()?;
    let of = |place| number(&report, place).with_context(|| format!("no {place} in {report}"));
    Ok(Sample {
        value: of("/one_way_us/p9999")? - 2.0 * of("/cyclictest_us/p9999")?,
        report,
    })
}

/// The slowest message of each round, and why it was so slow.
pub(super) fn remarks(measured: &[Measured]) {
    for one in measured.iter().filter(|one| KEYS.contains(&one.key)) {
        for worst in one
            .results
            .iter()
            .flat_map(|(_, _, reports)| reports)
            .filter_map(worst)
        {
            println!("{}: {worst}", one.title);
        }
    }
}

fn worst(report: &Value) -> Option<String> {
    let worst = report.get("worst")?;
    let parts = worst["parts_us"].as_array()?.iter().filter_map(Value::as_f64);
    let parts: Vec<String> = parts.map(|part| format!("{part:.0}")).collect();
    Some(format!(
        "slowest {:.0} µs, after {:.1} s: {} ({} µs to wake up, send, arrive and be there)",
        worst["took_us"].as_f64()?,
        worst["at_s"].as_f64()?,
        worst["cause"].as_str()?,
        parts.join(", ")
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_slowest_is_told_with_its_cause() {
        let report = json!({"worst": {
            "at_s": 12.0, "took_us": 1402.4, "parts_us": [10.0, 5.0, 1385.4, 2.0], "waited_us": [0.0, 1300.0], "cause": "it slept",
        }});
        assert_eq!(
            worst(&report).unwrap(),
            "slowest 1402 µs, after 12.0 s: it slept (10, 5, 1385, 2 µs to wake up, send, arrive and be there)"
        );
        assert_eq!(worst(&json!({"worst": null})), None);
    }
}
