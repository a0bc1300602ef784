//! The queue of two levels of E-UDP §4.2: what stands in the device and on the way, against what waits in memory. Part of `bench pipeline`.
//!
//! A stream of 1 MiB messages goes through a port of 500 Mbit/s whose buffer holds all that LM ever has on the way. Round trips of 64 bytes
//! beside it wait behind what stands there. The same stream alone says what a wake-up (a doorbell) hands over, there and where nothing is slow.
//! `full` is what it has without a bound; the same with every size of the lower level says what each of the three costs.

use std::time::Duration;

use anyhow::{Context, Result};
use lm_measure::rate::BitRate;
use lm_measure::statistics::Quantile;
use serde_json::{Value, json};

use super::Unit::{GbitPerSecond, MbitPerSecond, Microseconds, Packets};
use super::{Column, Comparison, Contender, Sample, Target, recipes};
use crate::bed::{Bed, BedConfig, Launch, Port};
use crate::ends::{self, Ends};
use crate::machine::two_cores;
use crate::workspace::Programs;

/// A port that is slow, and keeps more than anybody has on the way.
const PORT: Port = Port {
    rate: BitRate(500_000_000),
    frames: 1000,
};
/// Of messages: beside those a small one begins with each, alone there are few others than fragments.
const LEN_BESIDE: u64 = 256 << 10;
const LEN_ALONE: u64 = 4 << 20;
const SECONDS: f64 = 3.0;
/// Round trips that are measured, and how long they may take: behind a full buffer each takes 20 ms.
const ROUND_TRIPS: u32 = 1000;
const BESIDE_SECONDS: f64 = 8.0;
/// What the first half second of a stream brings is not looked at.
const WARM_UP: f64 = 0.5;
/// No program runs for longer.
const LIMIT: Duration = Duration::from_secs(30);

/// The first is what is asked about.
const AUTO: &str = "auto";
const FULL: &str = "full";
const SIZES: [&str; 8] = [FULL, "32", "64", "128", "192", "384", "768", AUTO];

/// What is asked: a small message's delay of that without a bound, what the stream keeps, and packets for each doorbell.
const DELAY_MOST: f64 = 0.25;
const STREAM_LEAST: f64 = 0.98;
const PACKETS_LEAST: f64 = 30.0;

/// All of it.
pub(super) fn comparisons() -> Vec<Comparison> {
    let handed_over = Target::ReportAtLeast(
        "packets a doorbell",
        |report| report["packets"].as_f64(),
        PACKETS_LEAST,
    );
    let kept = Target::RatioAtLeast(FULL, STREAM_LEAST);
    let judged = [
        Comparison {
            contenders: contenders(Some(PORT), beside, &[AUTO, FULL]),
            targets: vec![Target::RatioAtMost(FULL, DELAY_MOST)],
            columns: BESIDE,
            ..blank(
                "queue_beside",
                "64 B beside a stream over 500 Mbit/s, round trip p99",
                Microseconds,
            )
        },
        Comparison {
            contenders: contenders(Some(PORT), stream, &[AUTO, FULL]),
            targets: vec![kept, handed_over],
            columns: ALONE,
            ..blank("queue_port", "a stream alone over 500 Mbit/s", GbitPerSecond)
        },
        Comparison {
            contenders: contenders(None, stream, &[AUTO, FULL]),
            targets: vec![kept, handed_over],
            columns: ALONE_VETH,
            ..blank("queue_veth", "a stream alone over veth", GbitPerSecond)
        },
    ];
    let swept = [
        Comparison {
            contenders: contenders(Some(PORT), beside, &SIZES),
            columns: SIZES_BESIDE,
            ..blank(
                "queue_sizes_beside",
                "64 B beside a stream over 500 Mbit/s by size, p99",
                Microseconds,
            )
        },
        Comparison {
            contenders: contenders(Some(PORT), stream, &SIZES),
            columns: SIZES_PORT,
            ..blank(
                "queue_sizes_port",
                "a stream alone over 500 Mbit/s, by size",
                GbitPerSecond,
            )
        },
        Comparison {
            contenders: contenders(None, stream, &SIZES),
            columns: SIZES_VETH,
            ..blank(
                "queue_sizes_veth",
                "a stream alone over veth, by size",
                GbitPerSecond,
            )
        },
    ];
    judged.into_iter().chain(swept).collect()
}

/// Of which nothing is asked, and nobody is compared.
fn blank(key: &'static str, title: &'static str, unit: super::Unit) -> Comparison {
    Comparison {
        key,
        title,
        unit,
        contenders: Vec::new(),
        targets: Vec::new(),
        columns: &[],
        most_rounds: None,
    }
}

type Measured = fn(&Bed, &Programs, &str) -> Result<Sample>;

fn contenders(port: Option<Port>, measure: Measured, depths: &[&'static str]) -> Vec<Contender> {
    let contender = |&depth: &&'static str| Contender {
        name: depth,
        bed: BedConfig {
            senders: port.map(|_| 1),
            port,
            ..BedConfig::default()
        },
        measure: Box::new(move |bed: &Bed, programs: &Programs| measure(bed, programs, depth)),
    };
    depths.iter().map(contender).collect()
}

const SIZES_BESIDE: &[Column] = &[Column::new("/stream_mbit", "that stream, by size", MbitPerSecond)];
const SIZES_PORT: &[Column] = &[Column::new(
    "/packets",
    "packets a doorbell by size, over 500 Mbit/s",
    Packets,
)];
const SIZES_VETH: &[Column] = &[Column::new(
    "/packets",
    "packets a doorbell by size, over veth",
    Packets,
)];
const ALONE: &[Column] = &[Column::new(
    "/packets",
    "packets a doorbell, over 500 Mbit/s",
    Packets,
)];
const ALONE_VETH: &[Column] = &[Column::new("/packets", "packets a doorbell, over veth", Packets)];
const BESIDE: &[Column] = &[
    Column::new(
        "/p50_us",
        "64 B beside a stream over 500 Mbit/s, round trip p50",
        Microseconds,
    ),
    Column {
        targets: &[Target::RatioAtLeast(FULL, STREAM_LEAST)],
        ..Column::new("/stream_mbit", "the stream beside 64 B", MbitPerSecond)
    },
];

/// Both ends with such a lower level.
fn bounded(ends: Ends, depth: &str) -> Ends {
    let option = format!("--depth {depth}");
    ends.options(&option, &option)
}

/// A stream, and what a doorbell handed over of it.
fn stream(bed: &Bed, programs: &Programs, depth: &str) -> Result<Sample> {
    let ends = bounded(Ends::stream("lm", LEN_ALONE, [WARM_UP, SECONDS]), depth);
    let mut sample = recipes::stream(bed, programs, &ends)?;
    sample.report["packets"] = json!(packets_a_doorbell(&sample.report["sender"])?);
    Ok(sample)
}

fn packets_a_doorbell(sender: &Value) -> Result<f64> {
    let count = |name: &str| sender["handed_over"][name].as_f64();
    let (packets, wakeups) = (
        count("packets"),
        count("wakeups").filter(|&wakeups| wakeups > 0.0),
    );
    Ok(packets.context("no packets")? / wakeups.with_context(|| format!("no wake-up: {sender}"))?)
}

/// Round trips beside a stream.
fn beside(bed: &Bed, programs: &Programs, depth: &str) -> Result<Sample> {
    let ends = bounded(
        Ends::round_trips_beside("lm-sleeping", LEN_BESIDE, ROUND_TRIPS, BESIDE_SECONDS),
        depth,
    );
    let [asking, answering] = two_cores();
    let launch = |words: Vec<String>, core| {
        Launch::new(programs.path("lm-bench"))
            .args(words)
            .core(core)
            .time_limit(LIMIT)
    };
    let mut far = bed.right().spawn(launch(ends.far(), answering))?;
    far.await_text("ready")?;
    let near = bed.left().spawn(launch(ends.near(), asking))?;
    report(near.finish()?.json()?, far.finish()?.json()?)
}

fn report(near: Value, far: Value) -> Result<Sample> {
    let times = ends::latencies_us([&near["round_trips"]]);
    let quantile = |part: f64| {
        let found = Quantile::of(&times, part).map(|found| found.value);
        found.with_context(|| format!("no round trip came to its end: {near}"))
    };
    Ok(Sample {
        value: quantile(0.99)?,
        report: json!({
            "p50_us": quantile(0.5)?, "stream_mbit": ends::gbit_per_s(&far)? * 1e3, "near": near, "far": far,
        }),
    })
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroU32;

    use super::*;

    #[test]
    fn what_a_round_reports_is_what_its_columns_and_targets_look_at() {
        let near = json!({"round_trips": [[2_000_000, 99], [9_000_000, 1]]});
        let far = json!({"bytes": 50_000_000, "seconds": 1.0});
        let sample = report(near, far).unwrap();
        assert_eq!(sample.report["p50_us"], 2000.0);
        assert!((2000.0..=9000.0).contains(&sample.value));
        for column in BESIDE {
            assert!(sample.report.pointer(column.place).is_some(), "{}", column.place);
        }
        assert!((sample.report["stream_mbit"].as_f64().unwrap() - 400.0).abs() < 1e-9);
        assert!(report(json!({}), json!({"bytes": 1.0, "seconds": 1.0})).is_err());
        let sender = json!({"handed_over": {"packets": 320, "wakeups": 10}});
        assert_eq!(packets_a_doorbell(&sender).unwrap(), 32.0);
        assert!(packets_a_doorbell(&json!({"handed_over": {"packets": 320, "wakeups": 0}})).is_err());
    }

    #[test]
    fn sizes_are_what_the_ends_take() {
        let is_known = |size: &&str| [AUTO, FULL].contains(size) || size.parse::<NonZeroU32>().is_ok();
        assert!(SIZES.iter().all(is_known));
    }
}
