//! **a**, its last part: real time beside a stream of 1 MiB messages of the same endpoint, on a veth pair with a core for each host. Nobody
//! sleeps. Round trips of 64 bytes are due each millisecond, and count from then on.

use anyhow::Result;
use serde_json::json;

use super::super::Unit::{MbitPerSecond, Microseconds};
use super::super::{Column, Comparison, Contender, Measure, Sample, Target};
use super::sizes::{launch, quantile_us};
use crate::bed::{Bed, BedConfig};
use crate::ends::{self, Ends};
use crate::machine::two_cores;
use crate::workspace::Programs;

const BESIDE: &str = "LM real time";
const EAGER: &str = "LM's small messages";
const IDLE: &str = "LM real time, idle";
const ALONE: &str = "LM real time, ten a second";
const STREAM_LEN: u64 = 1 << 20;
const ROUND_TRIP_LEN: u64 = 64;
const RATE: f64 = 1000.0;
/// For the stream beside so few it is as if there were none.
const FEW: f64 = 10.0;
const SECONDS: f64 = 2.0;
/// What is asked: of p99 idle, of the small messages' p99, and of the stream that is nearly alone.
const OF_IDLE: f64 = 3.0;
const OF_EAGER: f64 = 1.0;
const KEPT_LEAST: f64 = 0.95;

pub(super) fn comparison() -> Comparison {
    let contender = |name, measure: Measure| Contender {
        name,
        bed: BedConfig::default(),
        measure,
    };
    let beside = |transport: &'static str, rate: f64| -> Measure {
        // With the warm-up more than there is time for.
        let count = (rate * SECONDS) as u32;
        let ends = Ends::round_trips_beside(transport, STREAM_LEN, count, SECONDS).rate(rate);
        Box::new(move |bed, programs| measure(bed, programs, &ends, true))
    };
    let count = (RATE * SECONDS) as u32;
    let idle = Ends::round_trips("real-time", ROUND_TRIP_LEN, count, SECONDS).rate(RATE);
    Comparison {
        key: "a_beside_stream",
        title: "64 B each millisecond beside a stream of the same endpoint, p99",
        unit: Microseconds,
        contenders: vec![
            contender(BESIDE, beside("real-time", RATE)),
            contender(EAGER, beside("lm", RATE)),
            contender(
                IDLE,
                Box::new(move |bed, programs| measure(bed, programs, &idle, false)),
            ),
            contender(ALONE, beside("real-time", FEW)),
        ],
        targets: vec![
            Target::RatioAtMost(IDLE, OF_IDLE),
            Target::RatioAtMost(EAGER, OF_EAGER),
        ],
        columns: COLUMNS,
        most_rounds: None,
    }
}

const COLUMNS: &[Column] = &[
    Column::new(
        "/p50_us",
        "64 B each millisecond beside a stream of the same endpoint, p50",
        Microseconds,
    ),
    Column {
        targets: &[Target::RatioAtLeast(ALONE, KEPT_LEAST)],
        ..Column::new(
            "/stream_mbit",
            "the stream beside 64 B each millisecond",
            MbitPerSecond,
        )
    },
];

fn measure(bed: &Bed, programs: &Programs, ends: &Ends, has_stream: bool) -> Result<Sample> {
    let [asking, answering] = two_cores();
    let mut far = bed.right().spawn(launch(programs, ends.far(), answering))?;
    far.await_text("ready")?;
    let near = bed.left().spawn(launch(programs, ends.near(), asking))?;
    let near = near.finish()?.json()?;
    let mut report = json!({"p50_us": quantile_us(&near, 0.5)?});
    if has_stream {
        report["stream_mbit"] = json!(ends::gbit_per_s(&far.finish()?.json()?)? * 1e3);
    }
    Ok(Sample {
        value: quantile_us(&near, 0.99)?,
        report,
    })
}
