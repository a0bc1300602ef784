//! `cargo xtask bench pipeline`: one message produced, sent, received and consumed (E-UDP §4), from its first byte produced to its last byte
//! consumed, where the wire is what takes longest: a port of 500 Mbit/s. Producer and consumer work at the wire's pace, so that each of the
//! three takes as long: one after the other 3, all at once 1. One after the other is the same program at the last commit that could do no better.
//!
//! And where cores are what takes longest: on a veth pair, with a producer and a consumer that do as much as their cores do. Each shares its core
//! and its thread with an end of the way, so that two and two are one after the other whatever is done. There, too, what the kernel has for it:
//! TCP that copies as little as it can, and UDP; and QUIC.

use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use lm_measure::rate::BitRate;
use lm_measure::statistics::{Quantile, Summary};
use lm_measure::table::Table;
use serde_json::{Value, json};

use super::Unit::{Milliseconds, Percent};
use super::frozen::{self, BEFORE_PIPELINE};
use super::{
    Column, Comparison, Contender, Measure, Measured, Programs, Rounds, Sample, Target, links, model, queue,
};
use crate::bed::{Bed, BedConfig, INTERFACE, Launch, Port};
use crate::machine::two_cores;
use crate::workspace::root;

/// A message that is produced, sent, received and consumed: by a timetable of the wire's pace on a port of 500 Mbit/s, and as fast as two cores
/// do it; from a file to a hash or a file (--only file_); by the length of windows (--only window_sizes); beside the kernel's TCP and UDP, and
/// QUIC (--only peers); what each station does with ten messages (--only flow); what stands in the device and on the way of that port (--only
/// queue); and what of a link a stream gets, by short windows and long ones, and in transfers that are read and written inside their messages or
/// not (--only link). How long messages of 4 KiB to 64 MiB take by the analytical model, and how long they do (--only model; 20 minutes, by
/// itself alone). `lm-bench flow` makes a page of --only flow, model, window_sizes and queue_sizes.
///
/// Prints how long it took from its first byte produced to its last byte consumed, and each part of it: all at once, and one after the other, on the
/// port by the program of an earlier commit, which is built once in a git worktree below target/frozen. Leave the machine alone meanwhile.
#[derive(Debug, clap::Args)]
pub(super) struct Arguments {
    #[command(flatten)]
    rounds: Rounds,
    /// Cargo features that lm-bench is built with besides its own: peers, for QUIC beside the kernel
    #[arg(long, value_name = "NAMES", value_delimiter = ',')]
    features: Vec<String>,
}

const LINK: BitRate = BitRate(500_000_000);
/// Completions come when packets are in it.
const PORT_FRAMES: u32 = 1000;
const LEN: u64 = 64 << 20;
/// Of 500 Mbit/s, what is left for payload in packets of 1500 bytes: 1448 of 1538.
const PACE: u64 = LINK.0 * 1448 / 1538;
/// What is asked: a part of the time that one after the other takes, which is a third at best; in milliseconds 1.05 of the wire's 1140.5 and three
/// windows of 16 fragments; and the first byte after a 200th of the time to the last one.
const RATIO_MOST: f64 = 0.40;
const LATENCY_MOST: f64 = 1199.0;
const FIRST_MOST: f64 = 5.7;
/// In percent of a core, of producer and consumer: the wire is what takes longest.
const WORK_MOST: f64 = 20.0;
/// Where cores bound: of the time that one after the other takes, and of what there is to gain.
const CORES_RATIO_MOST: f64 = 0.85;
const GAINED_LEAST: f64 = 0.85;
/// There a producer and a consumer take so many times as long as sending, and a round is marked of which a part is further from its median.
const OF_SENDING: RangeInclusive<f64> = 0.5..=2.0;
const APART_MOST: f64 = 0.1;
/// Of the time that each of the kernel's ways takes.
const PEERS_RATIO_MOST: f64 = 0.9;
/// In each round.
const MESSAGES: u32 = 3;
/// What `lm-bench flow` draws.
const FLOW_LEN: u64 = 16 << 20;
const FLOW_MESSAGES: u32 = 10;
/// A round's programs, which take 3 × 3 × 1.15 s at most.
const LIMIT: Duration = Duration::from_secs(40);

/// Runs the command.
pub(super) fn run(arguments: &Arguments) -> Result<()> {
    if arguments.rounds.only.as_deref() == Some(MODEL) {
        return model::run(arguments.rounds.json.as_deref());
    }
    if (arguments.rounds.only.as_deref()).is_none_or(|only| WIRE_BOUND.contains(only)) {
        // Before a round's time counts.
        coarse()?;
    }
    let features = &arguments.features;
    let mut comparisons = comparisons();
    if !features.iter().any(|feature| feature == "peers") {
        for comparison in &mut comparisons {
            comparison.contenders.retain(|one| one.name != QUIC);
        }
    }
    (arguments.rounds).measure("pipeline", comparisons, features, |measured| {
        let core_bound = measured.iter().find(|one| one.key == CORE_BOUND);
        print!("{}", core_bound.and_then(by_round).unwrap_or_default());
    })
}

/// The program that does one after the other.
fn coarse() -> Result<PathBuf> {
    let [revision] = <[_; 1]>::try_from(frozen::revisions(root(), &[BEFORE_PIPELINE.to_owned()])?)
        .ok()
        .context("one revision")?;
    revision.built()
}

const FINE: &str = "all at once";
const WIRE_BOUND: &str = "wire_bound";
const CORE_BOUND: &str = "core_bound";
const MODEL: &str = "model";
const COARSE: &str = "one after the other";
/// What lm-bench has with the feature `peers` alone.
const QUIC: &str = "QUIC (quinn)";
/// Others' ways; the kernel's each with the windows that it does best with.
const PEERS: [(&str, &str); 5] = [
    (
        "TCP, sendfile",
        "--work keystream --transport tcp-sendfile --window 44",
    ),
    (
        "TCP, MSG_ZEROCOPY",
        "--work keystream --transport tcp-zerocopy --window 44",
    ),
    (
        "TCP, io_uring SEND_ZC",
        "--work keystream --transport io-uring --window 44",
    ),
    (
        "UDP, 64 KiB datagrams",
        "--work keystream --transport udp --window 44",
    ),
    (QUIC, "--work keystream --transport quic --window 44"),
];
/// What a window costs and what it gives, in fragments.
const WINDOWS: [(&str, &str); 5] = [
    ("windows of 16", "--work keystream --window 16"),
    ("windows of 32", "--work keystream --window 32"),
    ("windows of 64", "--work keystream --window 64"),
    ("windows of 128", "--work keystream --window 128"),
    ("windows of 256", "--work keystream --window 256"),
];
const ASKED: &str = "one after the other, less 85 % of what there is to gain";

/// All of it.
pub(super) fn comparisons() -> Vec<Comparison> {
    let port = Port {
        rate: LINK,
        frames: PORT_FRAMES,
    };
    let contender = |name, port: Option<Port>, measure: Measure| Contender {
        name,
        bed: BedConfig {
            // Ports are a switch's.
            senders: port.map(|_| 1),
            port,
            ..BedConfig::default()
        },
        measure,
    };
    let timetable = format!("--pace {PACE}");
    let timetable_too = timetable.clone();
    let wire_bound = Comparison {
        key: WIRE_BOUND,
        title: "64 MiB over 500 Mbit/s, first byte produced to last byte consumed",
        unit: Milliseconds,
        contenders: vec![
            contender(
                FINE,
                Some(port),
                Box::new(move |bed, programs| measure(bed, &programs.path("lm-bench"), &timetable)),
            ),
            contender(
                COARSE,
                Some(port),
                Box::new(move |bed, _| measure(bed, &coarse()?, &timetable_too)),
            ),
        ],
        targets: vec![
            Target::RatioAtMost(COARSE, RATIO_MOST),
            Target::AtMost(LATENCY_MOST),
        ],
        columns: COLUMNS,
        most_rounds: None,
    };
    let cores = |name, options: &'static str| {
        let run = move |bed: &Bed, programs: &Programs| measure(bed, &programs.path("lm-bench"), options);
        contender(name, None, Box::new(run))
    };
    let peers = |key, title, segmentation_offloads: bool, targets| {
        let all = [(FINE, "--work keystream --window 64")].into_iter().chain(PEERS);
        let each = all.map(|(name, options)| {
            let mut one = cores(name, options);
            one.bed.segmentation_offloads = segmentation_offloads;
            one
        });
        Comparison {
            key,
            title,
            unit: Milliseconds,
            contenders: each.collect(),
            targets,
            columns: &[],
            most_rounds: None,
        }
    };
    let asked = |bed: &Bed, programs: &Programs| {
        let sample = measure(bed, &programs.path("lm-bench"), "--work keystream --whole")?;
        Ok(Sample {
            value: asked(&sample).with_context(|| format!("parts are missing: {}", sample.report))?,
            ..sample
        })
    };
    let core_bound = Comparison {
        key: CORE_BOUND,
        title: "64 MiB on veth, ChaCha20 to SHA-256, first byte produced to last byte consumed",
        unit: Milliseconds,
        contenders: vec![
            cores(FINE, "--work keystream"),
            cores(COARSE, "--work keystream --whole"),
            contender(ASKED, None, Box::new(asked)),
        ],
        targets: vec![
            Target::RatioSurelyAtMost(COARSE, CORES_RATIO_MOST),
            Target::RatioAtMost(ASKED, 1.0),
        ],
        columns: PARTS,
        most_rounds: None,
    };
    let files = |key, title, options: [&'static str; 2]| Comparison {
        key,
        title,
        unit: Milliseconds,
        contenders: vec![cores(FINE, options[0]), cores(COARSE, options[1])],
        targets: Vec::new(),
        columns: PARTS,
        most_rounds: None,
    };
    let by_window = Comparison {
        key: "window_sizes",
        title: "64 MiB on veth by the session's windows, ChaCha20 to SHA-256",
        unit: Milliseconds,
        contenders: WINDOWS.map(|(name, options)| cores(name, options)).into(),
        targets: Vec::new(),
        columns: BY_WINDOW,
        most_rounds: None,
    };
    let flow = |key, title, port: Option<Port>, options: String| {
        let each = [(FINE, ""), (COARSE, " --whole")].map(|(name, how)| {
            let options = format!("{options} --messages {FLOW_MESSAGES}{how}");
            let run =
                move |bed: &Bed, programs: &Programs| run_ends(bed, &programs.path("lm-bench"), &options);
            contender(name, port, Box::new(run))
        });
        Comparison {
            key,
            title,
            unit: Milliseconds,
            contenders: each.into(),
            targets: Vec::new(),
            columns: &[],
            most_rounds: Some(1),
        }
    };
    let mut all = vec![
        wire_bound,
        core_bound,
        by_window,
        files(
            "file_hash",
            "64 MiB on veth, a file in the page cache to XXH3",
            ["--work file-hash", "--work file-hash --whole"],
        ),
        files(
            "file_copy",
            "64 MiB on veth, a file in the page cache to a file on tmpfs",
            ["--work file-copy", "--work file-copy --whole"],
        ),
        peers(
            "peers",
            "64 MiB on veth, ChaCha20 to SHA-256, beside the kernel",
            false,
            PEERS
                .map(|(name, _)| Target::RatioAtMost(name, PEERS_RATIO_MOST))
                .into(),
        ),
        peers(
            "peers_offloads",
            "the same, everybody's segmentation offloads on",
            true,
            Vec::new(),
        ),
        flow(
            "flow_port",
            "ten messages of 16 MiB over 500 Mbit/s",
            Some(port),
            format!("--len {FLOW_LEN} --pace {PACE}"),
        ),
        flow(
            "flow_veth",
            "ten messages of 16 MiB on veth, ChaCha20 to SHA-256",
            None,
            format!("--len {FLOW_LEN} --work keystream"),
        ),
    ];
    all.extend(queue::comparisons());
    all.extend(links::comparisons());
    all
}

/// What may be left of the time of one after the other, where producing and sending share a core, and landing and consuming another.
fn asked(coarse: &Sample) -> Option<f64> {
    let [produce, _, land, consume] = parts(coarse.value, &coarse.report)?;
    Some(coarse.value - GAINED_LEAST * (coarse.value - (land + produce.max(consume))))
}

/// What a message one after the other took to be produced, sent, landed and consumed, in milliseconds. It lands from when it is produced until
/// it is whole: its confirmation may wait until all is consumed.
fn parts(value: f64, report: &Value) -> Option<[f64; 4]> {
    let part = |name: &str| report[name].as_f64();
    let (produced, whole) = (part("produced_ms")?, part("whole_ms")?);
    Some([produced, part("sent_ms")?, whole - produced, value - whole])
}

/// The parts of each round where cores bound, and whether producer and consumer are such as that is about.
fn by_round(measured: &Measured) -> Option<String> {
    let (_, coarse, reports) = measured.results.iter().find(|(name, ..)| *name == COARSE)?;
    let ratios = measured.ratio_to(COARSE)?;
    let rounds = coarse
        .samples
        .iter()
        .zip(reports)
        .map(|(&value, report)| parts(value, report));
    let rounds: Vec<_> = rounds.collect::<Option<_>>()?;
    let median = |part: usize| Summary::of(&rounds.iter().map(|round| round[part]).collect::<Vec<_>>());
    let medians = [median(0)?, median(1)?, median(2)?, median(3)?].map(|summary| summary.median);
    let mut table = Table::new(&["round", "produce", "send", "land", "consume", "the first is", ""]);
    for (number, (round, ratio)) in rounds.iter().zip(&ratios.samples).enumerate() {
        let mut parts = round.iter().zip(medians);
        let is_apart = parts.any(|(part, median)| (part / median - 1.0).abs() > APART_MOST);
        let [produce, send, land, consume] = round.map(|part| format!("{part:.1} ms"));
        let mark = if is_apart { "*" } else { "" };
        let ratio = format!("{ratio:.2} ×");
        table.row([
            &(number + 1).to_string(),
            &produce,
            &send,
            &land,
            &consume,
            &ratio,
            mark,
        ]);
    }
    let mut text = format!(
        "Parts of {COARSE} by rounds; *: one is more than 10 % from its median. All count. The ratio's 95 % interval: {:.2} to {:.2}.\n\n{table}\n",
        ratios.interval[0], ratios.interval[1]
    );
    for (what, part) in [("Producing", medians[0]), ("Consuming", medians[3])] {
        let times = part / medians[1];
        if !OF_SENDING.contains(&times) {
            text += &format!(
                "{what} takes {times:.2} × the time of sending, and 0.5 to 2 is what this is about.\n"
            );
        }
    }
    Some(text)
}

const BY_WINDOW: &[Column] = &[Column::new(
    "/first_ms",
    "first byte produced to first byte that can be read, by windows",
    Milliseconds,
)];

const PARTS: &[Column] = &[
    Column::new(
        "/produced_ms",
        "first byte produced to last byte produced",
        Milliseconds,
    ),
    Column::new(
        "/whole_ms",
        "first byte produced to all that can be read",
        Milliseconds,
    ),
    Column::new("/sent_ms", "what sending took", Milliseconds),
];

const COLUMNS: &[Column] = &[
    Column::new(
        "/produced_ms",
        "first byte produced to last byte produced",
        Milliseconds,
    ),
    Column {
        targets: &[Target::AtMost(FIRST_MOST)],
        ..Column::new(
            "/first_ms",
            "first byte produced to first byte that can be read",
            Milliseconds,
        )
    },
    Column::new(
        "/whole_ms",
        "first byte produced to all that can be read",
        Milliseconds,
    ),
    Column {
        targets: &[Target::AtMost(WORK_MOST)],
        ..Column::new(
            "/producer_percent",
            "share of a core that producing takes",
            Percent,
        )
    },
    Column {
        targets: &[Target::AtMost(WORK_MOST)],
        ..Column::new(
            "/consumer_percent",
            "share of a core that consuming takes",
            Percent,
        )
    },
];

/// One run on a fresh bed.
fn measure(bed: &Bed, lm_bench: &Path, options: &str) -> Result<Sample> {
    run_ends(
        bed,
        lm_bench,
        &format!("--len {LEN} --messages {MESSAGES} {options}"),
    )
}

fn run_ends(bed: &Bed, lm_bench: &Path, options: &str) -> Result<Sample> {
    let cores = two_cores();
    let launch = |side: &str, core: usize| {
        let line = format!("pipeline {side} --interface {INTERFACE} {options}");
        Launch::new(lm_bench)
            .args(line.split(' '))
            .core(core)
            .time_limit(LIMIT)
    };
    let mut far = bed.right().spawn(launch("far", cores[1]))?;
    far.await_text("ready")?;
    let to = format!("{}:7168", bed.right().address());
    let near = bed.left().spawn(launch("near", cores[0]).args(["--to", &to]))?;
    let (near, far) = (near.finish()?.json()?, far.finish()?.json()?);
    report(&near, &far)
}

/// Medians of the messages of a run.
fn report(near: &Value, far: &Value) -> Result<Sample> {
    let messages = |report: &Value| report["messages"].as_array().cloned().unwrap_or_default();
    let (sent, received) = (messages(near), messages(far));
    ensure!(
        !sent.is_empty() && sent.len() == received.len(),
        "{} messages were sent, and {} came: {near} {far}",
        sent.len(),
        received.len()
    );
    let hashes = |of: &[Value]| of.iter().map(|one| one["sha256"].clone()).collect::<Vec<_>>();
    ensure!(
        hashes(&sent) == hashes(&received),
        "what came is not what was sent: {near} {far}"
    );
    let since_begin = |of: &[Value], name: &str| {
        let passed = of.iter().zip(&sent).map(|(one, sent)| {
            let (at, begins) = (one[name].as_u64()?, sent["begins_ns"].as_u64()?);
            Some(at.checked_sub(begins)? as f64 / 1e6)
        });
        let mut passed: Vec<f64> = passed
            .collect::<Option<_>>()
            .with_context(|| format!("no {name} after the message's begin: {near} {far}"))?;
        passed.sort_by(f64::total_cmp);
        Quantile::of(&passed, 0.5)
            .map(|found| found.value)
            .context("no messages")
    };
    // The frozen program does not say it.
    let work = |of: &[Value], from: &str, to: &str| {
        let share = |one: &Value| {
            Some(100.0 * one["worked_cpu_ns"].as_f64()? / (one[to].as_f64()? - one[from].as_f64()?))
        };
        Some(Summary::of(&of.iter().map(share).collect::<Option<Vec<_>>>()?)?.median)
    };
    let moved_ms = sent.iter().map(|one| Some(one["moved_ns"].as_f64()? / 1e6));
    let moved_ms = moved_ms.collect::<Option<Vec<_>>>();
    Ok(Sample {
        value: since_begin(&received, "consumed_ns")?,
        report: json!({
            "produced_ms": since_begin(&sent, "produced_ns")?,
            "confirmed_ms": since_begin(&sent, "confirmed_ns")?,
            "sent_ms": moved_ms.and_then(|all| Some(Summary::of(&all)?.median)),
            "first_ms": since_begin(&received, "first_ns")?,
            "whole_ms": since_begin(&received, "whole_ns")?,
            "producer_percent": work(&sent, "begins_ns", "produced_ns"),
            "consumer_percent": work(&received, "first_ns", "consumed_ns"),
            "near": near, "far": far,
        }),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// 40 or 20 to produce, 45 or 65 to send, 30 to consume: at best the near end's 85, or the far end's 95.
    #[test]
    fn what_is_asked_is_a_part_of_what_there_is_to_gain() {
        let coarse = |produced: f64| Sample {
            value: 115.0,
            report: json!({"produced_ms": produced, "sent_ms": 40.0, "whole_ms": 85.0}),
        };
        assert!((asked(&coarse(40.0)).unwrap() - (115.0 - 0.85 * 30.0)).abs() < 1e-9);
        assert!((asked(&coarse(20.0)).unwrap() - (115.0 - 0.85 * 20.0)).abs() < 1e-9);
        let without = Sample {
            value: 1.0,
            report: json!({}),
        };
        assert!(asked(&without).is_none());
    }

    #[test]
    fn rounds_apart_are_marked_and_kept() {
        let report = |sent: f64| json!({"produced_ms": 20.0, "sent_ms": sent, "whole_ms": 80.0});
        let of = |coarse: &[f64], sent: &[f64]| {
            let result = |name, samples: &[f64], reports| (name, Summary::of(samples).unwrap(), reports);
            by_round(&Measured {
                key: CORE_BOUND,
                title: "t",
                unit: Milliseconds,
                results: vec![
                    result(FINE, &[55.0; 3], Vec::new()),
                    result(COARSE, coarse, sent.iter().copied().map(report).collect()),
                ],
                cores: Vec::new(),
                targets: Vec::new(),
            })
            .unwrap()
        };
        // Of the second round sending, of the third one consuming is apart: 30, 30, 20.
        let text = of(&[110.0, 110.0, 100.0], &[40.0, 45.0, 40.0]);
        let rows = text
            .lines()
            .filter(|line| line.ends_with('×') || line.ends_with("×  *"));
        let marked: Vec<_> = rows.map(|row| row.ends_with('*')).collect();
        assert_eq!(marked, [false, true, true], "{text}");
        assert!(text.contains("0.50 to 0.55"), "{text}");
        assert!(!text.contains("time of sending"), "{text}");
        let text = of(&[110.0; 3], &[50.0; 3]);
        assert!(
            text.ends_with(
                "Producing takes 0.40 × the time of sending, and 0.5 to 2 is what this is about.\n"
            )
        );
    }

    #[test]
    fn times_count_from_the_first_byte_produced() {
        let sent = |begins: u64| json!({"begins_ns": begins, "produced_ns": begins + 1_000_000, "worked_ns": 400_000, "worked_cpu_ns": 150_000, "confirmed_ns": begins + 2_500_000, "sha256": "a"});
        let came = |begins: u64, took: u64| json!({"first_ns": begins + 2_000_000, "whole_ns": begins + 2_000_000, "consumed_ns": begins + took, "sha256": "a"});
        let near = json!({"messages": [sent(100), sent(50_000_000), sent(90_000_000)]});
        let far = json!({"messages": [came(100, 3_000_000), came(50_000_000, 3_500_000), came(90_000_000, 9_000_000)]});
        let sample = report(&near, &far).unwrap();
        assert_eq!(sample.value, 3.5);
        assert_eq!(sample.report["confirmed_ms"], 2.5);
        assert_eq!(sample.report["producer_percent"], 15.0);
        // It does not say.
        assert_eq!(sample.report["consumer_percent"], Value::Null);
        let mut other = far.clone();
        other["messages"][1]["sha256"] = "b".into();
        assert!(
            report(&near, &other)
                .unwrap_err()
                .to_string()
                .starts_with("what came is not")
        );
        let fewer = json!({"messages": [came(100, 3_000_000)]});
        assert!(
            report(&near, &fewer)
                .unwrap_err()
                .to_string()
                .starts_with("3 messages were sent, and 1 came")
        );
        let mut early = far;
        early["messages"][0]["first_ns"] = 99.into();
        assert!(
            report(&near, &early)
                .unwrap_err()
                .to_string()
                .starts_with("no first_ns after")
        );
    }
}
