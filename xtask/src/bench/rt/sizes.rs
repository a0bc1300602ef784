//! **a**, figures 7 and 8 of SS-RTUDP: round trips and bandwidth of real time by size, beside kernel UDP's, on a bare veth pair and on links of
//! 500 and 100 Mbit/s; and round trips beside a stream of the same endpoint.
//!
//! Both never sleep, and each end has a core. One run is all sizes, one after the other. A link is a cable from each host to a switch. On one
//! as much is offered as goes through it, headers of all packets counted: neither end is told when the link is full. On the veth pair it is as
//! much as leaves. What comes counts. Neither repeats what is lost: a round trip without an answer has no time, and is counted.

use std::time::Duration;

use anyhow::{Context, Result};
use lm_measure::rate::BitRate;
use lm_measure::statistics::Quantile;
use serde_json::{Map, Value, json};

use super::super::Unit::{Bytes, MbitPerSecond, Microseconds, Percent};
use super::super::{Column, Comparison, Contender, Measured, Sample, Target, recipes};
use super::{count, number};
use crate::bed::{Bed, BedConfig, Launch};
use crate::ends::{self, Ends};
use crate::machine::two_cores;
use crate::workspace::Programs;

const SIZES: [u64; 7] = [4, 64, 256, 1024, 4096, 16_384, 65_436];
const UDP: &str = "kernel UDP, spinning";
/// What is asked, of kernel UDP's: a round trip of 4 bytes, of 256 to 4096, and the length with half of the highest bandwidth; and that on a slow
/// link, in bytes.
const SHORTEST_MOST: f64 = 0.6;
const SHORT: &[Target] = &[Target::RatioAtMost(UDP, 0.64)];
const HALF: &[Target] = &[Target::RatioAtMost(UDP, 0.5)];
const HALF_SLOW: &[Target] = &[Target::AtMost(512.0)];
const NOTHING: &[Target] = &[];
/// Round trips of a size: so many bytes of them, and within bounds.
const ROUND_TRIP_BYTES: u64 = 4 << 20;
const ROUND_TRIPS: (u64, u64) = (64, 2000);
const ROUND_TRIP_SECONDS: f64 = 0.5;
/// Of a stream: its begin, and what counts.
const STREAM_SECONDS: [f64; 2] = [0.1, 0.3];
/// More answers than these that do not come, in percent, say something of the link.
const LOST_MOST: f64 = 1.0;
/// What a link is offered, of what it passes.
const OFFERED_PART: f64 = 0.97;
/// More rounds than these take longer than they tell.
const ROUNDS: u32 = 5;
const LIMIT: Duration = Duration::from_secs(30);

/// A link, and what the page says of it.
struct Link {
    rate: Option<BitRate>,
    key: &'static str,
    title: &'static str,
    targets: &'static [Target],
    columns: &'static [Column],
}

macro_rules! link {
    ($name:literal, $rate:expr, $key:literal, $paper:literal, $peak:literal, $shortest:expr, $short:expr, $half:expr) => {
        Link {
            rate: $rate,
            key: concat!("a_sizes_", $key),
            title: concat!($name, ", 4 B, round trip p50", $paper),
            targets: $shortest,
            columns: &link!($name, $peak, $half,
                [("64", NOTHING), ("256", $short), ("1024", $short), ("4096", $short), ("16384", NOTHING), ("65436", NOTHING)],
                ["4", "64", "256", "1024", "4096", "16384", "65436"]),
        }
    };
    ($name:literal, $peak:literal, $half:expr, [$(($short:literal, $asked:expr)),*], [$($size:literal),*]) => {
        [
            $(asked(concat!("/round_trip_us/", $short), concat!($name, ", ", $short, " B, round trip p50"), Microseconds, $asked),)*
            asked("/lost_percent", concat!($name, ", round trips lost"), Percent, NOTHING),
            asked("/half_bytes", concat!($name, ", half of the highest bandwidth at"), Bytes, $half),
            asked("/peak_mbit", concat!($name, ", highest bandwidth", $peak), MbitPerSecond, NOTHING),
            $(asked(concat!("/mbit/", $size), concat!($name, ", ", $size, " B, bandwidth"), MbitPerSecond, NOTHING),)*
        ]
    };
}

const fn asked(
    place: &'static str,
    title: &'static str,
    unit: super::super::Unit,
    targets: &'static [Target],
) -> Column {
    Column {
        targets,
        ..Column::new(place, title, unit)
    }
}

const LINKS: [Link; 3] = [
    link!(
        "veth",
        None,
        "veth",
        " (paper, 1 Gbit/s: 39 µs of 65.8)",
        " (paper, 1 Gbit/s: 545.2, UDP's 396.6)",
        &[Target::RatioAtMost(UDP, SHORTEST_MOST)],
        SHORT,
        HALF
    ),
    link!(
        "500 Mbit/s",
        Some(BitRate(500_000_000)),
        "500",
        "",
        "",
        NOTHING,
        NOTHING,
        NOTHING
    ),
    link!(
        "100 Mbit/s",
        Some(BitRate(100_000_000)),
        "100",
        " (paper: 37 µs of 45.8)",
        " (paper: 89.6, UDP's 81.9)",
        NOTHING,
        NOTHING,
        HALF_SLOW
    ),
];

/// Who is measured, as `lm-bench` names it, and what its messages take of the wire.
#[derive(Clone, Copy, Debug)]
struct System {
    name: &'static str,
    transport: &'static str,
    /// Payload of a packet; what a packet takes on the wire beside it, and a message once.
    packet_payload: u64,
    on_wire: [u64; 2],
}

/// Of 1500 bytes of a packet 84 are headers and digest; kernel UDP has 20 of IP in each, and 8 of its own in the first. On the wire there are 38
/// more of Ethernet.
const SYSTEMS: [System; 2] = [
    System {
        name: "LM real time",
        transport: "real-time",
        packet_payload: 1416,
        on_wire: [122, 0],
    },
    System {
        name: UDP,
        transport: "udp-spinning",
        packet_payload: 1480,
        on_wire: [58, 8],
    },
];

/// On each link.
pub(super) fn all() -> Vec<Comparison> {
    LINKS.into_iter().map(|link| by_size(link, &SIZES)).collect()
}

/// These sizes on a veth pair.
pub fn sizes(sizes: &'static [u64]) -> Comparison {
    let [veth, ..] = LINKS;
    by_size(veth, sizes)
}

fn by_size(link: Link, sizes: &'static [u64]) -> Comparison {
    let Link { rate, .. } = link;
    let contender = |system: System| Contender {
        name: system.name,
        bed: BedConfig {
            senders: rate.map(|_| 1),
            cable: rate,
            // Else a switch brings what is for the receiver to its landing queue, and nothing lands here.
            queues: if rate.is_some() { 1 } else { 2 },
            ..BedConfig::default()
        },
        measure: Box::new(move |bed, programs| measure(bed, programs, system, rate, sizes)),
    };
    Comparison {
        key: link.key,
        title: link.title,
        unit: Microseconds,
        contenders: SYSTEMS.map(contender).into(),
        targets: link.targets.to_vec(),
        columns: link.columns,
        most_rounds: Some(ROUNDS),
    }
}

fn measure(
    bed: &Bed,
    programs: &Programs,
    system: System,
    link: Option<BitRate>,
    sizes: &[u64],
) -> Result<Sample> {
    let mut points = Vec::new();
    let (mut asked, mut lost) = (0, Map::new());
    let (mut round_trips, mut mbit) = (Map::new(), Map::new());
    for &size in sizes {
        if link.is_some() {
            // What is left of the stream before belongs to nobody here.
            bed.drained()?;
        }
        let of_size = || format!("{size} bytes");
        let near = round_trip(bed, programs, system, link, size).with_context(of_size)?;
        let took = quantile_us(&near, 0.5).with_context(of_size)?;
        round_trips.insert(size.to_string(), json!(took));
        let unanswered = count(&near, "/lost_messages")?;
        asked += count(&near, "/messages")? + unanswered;
        lost.insert(size.to_string(), json!(unanswered));
        let mut ends = Ends::stream(system.transport, size, STREAM_SECONDS);
        if let Some(BitRate(rate)) = link {
            ends = ends.rate(OFFERED_PART * rate as f64 * size as f64 / system.wire_len(size) as f64);
        }
        let launch = |words, core| on_link(programs, link, words, core);
        let stream = recipes::stream_of(bed, &ends, launch).with_context(of_size)?;
        points.push((size as f64, stream.value * 1e3));
        mbit.insert(size.to_string(), json!(stream.value * 1e3));
    }
    let (half, peak) = half(&points);
    // By name the map has 1024 before 4.
    let shortest = sizes
        .first()
        .and_then(|size| round_trips[&size.to_string()].as_f64());
    Ok(Sample {
        value: shortest.context("no size")?,
        report: json!({
            "round_trip_us": round_trips, "mbit": mbit, "half_bytes": half, "peak_mbit": peak, "lost": lost,
            "lost_percent": lost.values().filter_map(Value::as_f64).sum::<f64>() / asked as f64 * 100.0,
        }),
    })
}

impl System {
    fn wire_len(self, size: u64) -> u64 {
        let [of_packet, of_message] = self.on_wire;
        let len = size + of_message;
        len + len.div_ceil(self.packet_payload) * of_packet
    }
}

/// What of a run of round trips the end that asks has printed.
fn round_trip(
    bed: &Bed,
    programs: &Programs,
    system: System,
    link: Option<BitRate>,
    size: u64,
) -> Result<Value> {
    let count = (ROUND_TRIP_BYTES / size).clamp(ROUND_TRIPS.0, ROUND_TRIPS.1) as u32;
    let ends = Ends::round_trips(system.transport, size, count, ROUND_TRIP_SECONDS);
    let [asking, answering] = two_cores();
    let mut far = (bed.right()).spawn(on_link(programs, link, ends.far(), answering))?;
    far.await_text("ready")?;
    let near = (bed.left()).spawn(on_link(programs, link, ends.near(), asking))?;
    near.finish()?.json()
}

/// What never sleeps gives way to the kernel's threads (`SCHED_IDLE`) where these are the switch: a frame would wait there for a time slice,
/// 3 ms, and a message of which nothing comes for 2 ms is given up.
fn on_link(programs: &Programs, link: Option<BitRate>, words: Vec<String>, core: usize) -> Launch {
    match link {
        None => launch(programs, words, core),
        Some(_) => (Launch::new("chrt").args(["-i", "0"]))
            .arg(programs.path("lm-bench"))
            .args(words)
            .core(core)
            .time_limit(LIMIT),
    }
}

/// Says where more is lost than an idle link loses.
pub(super) fn remarks(measured: &[Measured]) {
    for (title, (name, _, reports)) in (measured.iter())
        .filter(|one| one.key.starts_with("a_sizes"))
        .flat_map(|one| one.results.iter().map(move |result| (one.title, result)))
    {
        for report in reports {
            if let Some(lost) = number(report, "/lost_percent").filter(|lost| *lost > LOST_MOST) {
                println!(
                    "{title}: {lost:.1} % of {name}'s answers did not come: {}",
                    report["lost"]
                );
            }
        }
    }
}

pub(super) fn launch(programs: &Programs, words: Vec<String>, core: usize) -> Launch {
    Launch::new(programs.path("lm-bench"))
        .args(words)
        .core(core)
        .time_limit(LIMIT)
}

pub(super) fn quantile_us(near: &Value, part: f64) -> Result<f64> {
    let times = ends::latencies_us([&near["round_trips"]]);
    let found = Quantile::of(&times, part).map(|found| found.value);
    found.with_context(|| format!("no round trip came to its end: {near}"))
}

/// The length from which on half of the highest bandwidth is reached, on a line between those measured, and that bandwidth.
fn half(points: &[(f64, f64)]) -> (f64, f64) {
    let peak = points.iter().map(|point| point.1).fold(0.0, f64::max);
    let half = peak / 2.0;
    let between = points.windows(2).find_map(|pair| {
        let [(shorter, less), (longer, more)] = [pair[0], pair[1]];
        (less < half && more >= half).then(|| shorter + (half - less) / (more - less) * (longer - shorter))
    });
    let first = points.first().map_or(0.0, |point| point.0);
    (between.unwrap_or(first), peak)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn half_of_the_peak_is_found_between_two_lengths() {
        assert_eq!(
            half(&[(4.0, 10.0), (64.0, 20.0), (128.0, 60.0), (256.0, 80.0)]),
            (96.0, 80.0)
        );
        // The shortest does it.
        assert_eq!(half(&[(4.0, 50.0), (64.0, 80.0)]), (4.0, 80.0));
    }

    #[test]
    fn messages_take_their_headers_of_the_wire() {
        let [lm, udp] = SYSTEMS;
        // RFC 768, 791; a frame of 1514 bytes is 1538 on the wire.
        assert_eq!([1472, 1473].map(|size| udp.wire_len(size)), [1538, 1538 + 1 + 58]);
        assert_eq!([1416, 1417].map(|size| lm.wire_len(size)), [1538, 1538 + 1 + 122]);
        assert_eq!(lm.wire_len(65_436), 65_436 + 47 * 122);
    }

    #[test]
    fn columns_are_what_a_run_reports() {
        for link in LINKS {
            let places = link.columns.iter().map(|column| column.place);
            let sizes = places.filter_map(|place| place.rsplit('/').next()?.parse().ok());
            let sizes: Vec<u64> = sizes.collect();
            assert_eq!(sizes, [&SIZES[1..], &SIZES].concat());
        }
    }
}
