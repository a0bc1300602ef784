//! What is compared with what, and what is asked.

use lm_measure::statistics::Summary;

use super::frozen::PREFIX;
use super::schema::{Near, Ratio, Round, Row, Target, Verdict, What};

/// Kernel UDP without segmentation by the kernel.
const UDP: [&str; 6] = [
    "udp-blocking",
    "udp-spinning",
    "udp-mmsg",
    "udp-rps",
    "udp-rps-single",
    "udp-polled",
];
/// Kernel UDP that never sleeps.
const UDP_AWAKE: [&str; 2] = ["udp-spinning", "udp-polled"];
/// Kernel TCP on links without segmentation offloads.
const TCP: [&str; 4] = ["tcp", "tcp-rps", "tcp-polled", "tcp-zerocopy"];
/// Our kernel programs, and the tools that they shall agree with.
const YARDSTICKS: [(What, &str, &str, &str); 4] = [
    (What::Throughput, "udp-blocking", "iperf3", "bits_per_s"),
    (What::Throughput, "tcp", "iperf3-tcp", "bits_per_s"),
    (What::Latency, "udp-blocking", "sockperf", "p50"),
    (What::Latency, "udp-spinning", "sockperf-spinning", "p50"),
];
/// How much worse than the tool ours may be: the kernel's rows are the best we could find.
const AGREEMENT: f64 = 0.1;
/// Rounds that a verdict takes at least.
const ROUNDS_LEAST: usize = 6;

/// A round's value of a metric.
pub(super) fn value(round: &Round, metric: &str) -> Option<f64> {
    match (round, metric) {
        (Round::Latency(round), "p50") => Some(round.p50_ns),
        (Round::Latency(round), "p99") => round.p99_ns,
        (Round::Transfer(round), "bits_per_s") => Some(round.bits_per_s()),
        (Round::Transfer(round), "cpu_s_per_gb") if round.bytes > 0 => Some(round.cpu_s_per_gb()),
        _ => None,
    }
}

/// Index of the repetition.
pub(super) fn at(round: &Round) -> u32 {
    match round {
        Round::Latency(round) => round.at,
        Round::Transfer(round) => round.at,
    }
}

/// Median of a metric over a row's rounds.
pub(super) fn median(row: &Row, metric: &str) -> Option<f64> {
    let values = row.rounds.iter().filter_map(|round| value(round, metric));
    Some(Summary::of_finite(values)?.median)
}

fn find<'a>(rows: &'a [Row], what: What, size: u64, system: &str) -> Option<&'a Row> {
    rows.iter()
        .find(|row| row.what == what && row.size == size && row.system == system)
}

fn ratio(one: &Row, other: &Row, metric: &str, target: Option<Target>) -> Option<Ratio> {
    let pairs: Vec<(u32, f64)> = one
        .rounds
        .iter()
        .filter_map(|round| {
            let beside = other.rounds.iter().find(|other| at(other) == at(round))?;
            Some((at(round), value(round, metric)? / value(beside, metric)?))
        })
        .filter(|(_, ratio)| ratio.is_finite())
        .collect();
    let ratios: Vec<f64> = pairs.iter().map(|(_, ratio)| *ratio).collect();
    let summary = Summary::of(&ratios)?;
    let [low, high] = summary.interval;
    Some(Ratio {
        what: one.what,
        size: one.size,
        metric: metric.to_owned(),
        system: one.system.clone(),
        against: other.system.clone(),
        rounds: ratios.len() as u32,
        median: summary.median,
        low,
        high,
        near: near(one, other, &pairs),
        target,
        verdict: match target {
            // No interval of so few is sure by 95 %.
            Some(_) if ratios.len() < ROUNDS_LEAST => Verdict::Unclear,
            _ => verdict(&summary, target),
        },
    })
}

/// Whether the median's interval is clear of a target.
fn verdict(ratios: &Summary, target: Option<Target>) -> Verdict {
    let [low, high] = ratios.interval;
    let (inside, outside) = match target {
        None => return Verdict::None,
        Some(Target::AtLeast(least)) => (low >= least, high < least),
        Some(Target::AtMost(most)) => (high <= most, low > most),
    };
    match (inside, outside) {
        (true, _) => Verdict::Met,
        (_, true) => Verdict::Missed,
        _ => Verdict::Unclear,
    }
}

/// What is left of the ratios where both systems had near cores.
fn near(one: &Row, other: &Row, pairs: &[(u32, f64)]) -> Option<Near> {
    if one.cores.is_empty() && other.cores.is_empty() {
        return None;
    }
    let is_near = |at| [one, other].map(|row| row.cores_at(at).is_some_and(|cores| cores.near)) == [true; 2];
    let near: Vec<f64> = (pairs.iter())
        .filter_map(|&(at, ratio)| is_near(at).then_some(ratio))
        .collect();
    Some(Near {
        rounds: near.len() as u32,
        left_out: (pairs.len() - near.len()) as u32,
        median_low_high: Summary::of(&near).map(|near| [near.median, near.interval[0], near.interval[1]]),
    })
}

/// The best of some systems by median throughput.
fn best<'a>(rows: &'a [Row], size: u64, systems: &[&str]) -> Option<&'a str> {
    let speed = |row: &Row| median(row, "bits_per_s").filter(|_| systems.contains(&row.system.as_str()));
    rows.iter()
        .filter(|row| row.what == What::Throughput && row.size == size)
        .filter_map(|row| Some((row.system.as_str(), speed(row)?)))
        .max_by(|one, other| one.1.total_cmp(&other.1))
        .map(|(system, _)| system)
}

/// Whether a system's round trips are the shortest of some systems' by their median.
fn is_quickest(rows: &[Row], row: &Row, metric: &str, systems: &[&str]) -> bool {
    let time = |row: &Row| median(row, metric).filter(|_| systems.contains(&row.system.as_str()));
    let others = rows
        .iter()
        .filter(|other| (other.what, other.size) == (row.what, row.size));
    let least = others.filter_map(time).reduce(f64::min);
    least.is_some() && time(row) == least
}

/// What LM's figure shall be beside this system's.
fn target(rows: &[Row], row: &Row, metric: &str, mtu: u32) -> Option<Target> {
    let (system, size) = (row.system.as_str(), row.size);
    let is_best = |systems: &[&str]| best(rows, size, systems) == Some(system);
    if system.starts_with(PREFIX) {
        // Missed is what is slower than the frozen build for sure.
        return match metric {
            "bits_per_s" => Some(Target::AtLeast(1.0)),
            "p50" => Some(Target::AtMost(1.0)),
            _ => None,
        };
    }
    match (row.what, metric) {
        (What::Throughput, "bits_per_s") if system == "bare" => {
            (size >= 7168).then_some(Target::AtLeast(0.95))
        }
        (What::Throughput, "bits_per_s") if is_best(&UDP) => match size {
            1024 => Some(Target::AtLeast(2.5)),
            7168 => Some(Target::AtLeast(1.45)),
            65_536 => Some(Target::AtLeast(1.2)),
            1_048_576 => Some(Target::AtLeast(1.0)),
            _ => None,
        },
        (What::Throughput, "bits_per_s") if is_best(&TCP) => (size >= 7168).then_some(Target::AtLeast(1.3)),
        (What::Throughput, "bits_per_s") if system == "quinn" => {
            matches!(size, 65_536 | 1_048_576).then_some(Target::AtLeast(4.0))
        }
        // Asked of the largest packets that each supports.
        (What::Throughput, "bits_per_s") if system == "tcp-offloads" && mtu >= 9000 => {
            matches!(size, 65_536 | 1_048_576).then_some(Target::AtLeast(1.0))
        }
        (What::Throughput, "cpu_s_per_gb") if is_best(&UDP) => {
            (size == 65_536).then_some(Target::AtMost(0.9))
        }
        (What::Latency, "p50") if size == 64 && system == "udp-blocking" => Some(Target::AtMost(0.07)),
        (What::Latency, _) if size == 64 && is_quickest(rows, row, metric, &UDP_AWAKE) => match metric {
            "p50" => Some(Target::AtMost(0.55)),
            _ => Some(Target::AtMost(0.65)),
        },
        (What::LatencyUnderLoad, "p99") if system == "udp-spinning" => Some(Target::AtMost(0.2)),
        _ => None,
    }
}

/// What a command asks of two systems beside what is asked always.
#[derive(Clone, Debug)]
pub(super) struct Least {
    system: String,
    against: String,
    ratio: f64,
}

/// Reads `lm/tcp-bbr=2`.
pub(super) fn parse(text: &str) -> Result<Least, String> {
    let read = || {
        let (systems, ratio) = text.split_once('=')?;
        let (system, against) = systems.split_once('/')?;
        Some(Least {
            system: system.to_owned(),
            against: against.to_owned(),
            ratio: ratio.parse().ok()?,
        })
    };
    read().ok_or_else(|| "write SYSTEM/SYSTEM=RATIO".to_owned())
}

/// What is asked by the command, LM beside everybody at every length, and our kernel programs beside the standard tools.
pub(super) fn ratios(rows: &[Row], mtu: u32, asked: &[Least]) -> Vec<Ratio> {
    let mut ratios = Vec::new();
    let (of_lm, of_others): (Vec<&Least>, Vec<&Least>) = asked.iter().partition(|one| one.system == "lm");
    for least in of_others {
        for row in (rows.iter()).filter(|row| row.what == What::Throughput && row.system == least.system) {
            let against = find(rows, What::Throughput, row.size, &least.against);
            let target = Some(Target::AtLeast(least.ratio));
            ratios.extend(against.and_then(|against| ratio(row, against, "bits_per_s", target)));
        }
    }
    let target = |row: &Row, metric: &str| {
        let least = (of_lm.iter()).find(|one| one.against == row.system && row.what == What::Throughput);
        match least.filter(|_| metric == "bits_per_s") {
            Some(least) => Some(Target::AtLeast(least.ratio)),
            None => target(rows, row, metric, mtu),
        }
    };
    for row in rows {
        let metrics: &[&str] = match row.what {
            What::Latency | What::LatencyUnderLoad => &["p50", "p99"],
            What::Throughput | What::Cpu => &["bits_per_s", "cpu_s_per_gb"],
        };
        let Some(lm) = find(rows, row.what, row.size, "lm").filter(|lm| lm.system != row.system) else {
            continue;
        };
        ratios.extend(
            metrics
                .iter()
                .filter_map(|metric| ratio(lm, row, metric, target(row, metric))),
        );
    }
    for (what, ours, theirs, metric) in YARDSTICKS {
        for row in rows.iter().filter(|row| row.what == what && row.system == ours) {
            if let Some(tool) = find(rows, what, row.size, theirs) {
                let target = match what {
                    What::Latency => Target::AtMost(1.0 + AGREEMENT),
                    _ => Target::AtLeast(1.0 - AGREEMENT),
                };
                ratios.extend(ratio(row, tool, metric, Some(target)));
            }
        }
    }
    ratios
}

#[cfg(test)]
mod tests {
    use super::super::schema::{Cores, PerMessage, TransferRound};
    use super::*;

    fn row(system: &str, gigabits: &[f64]) -> Row {
        let rounds = gigabits.iter().zip(0..).map(|(gigabits, at)| {
            Round::Transfer(TransferRound {
                at,
                bytes: (gigabits * 1e9 / 8.0) as u64,
                messages: 1,
                lost_messages: 0,
                seconds: 1.0,
                cpu_seconds_send: 1.0,
                cpu_seconds_receive: 1.0,
                cpu_seconds_machine: 2.0,
                spare_fraction: Vec::new(),
                counts: PerMessage::default(),
            })
        });
        Row {
            what: What::Throughput,
            system: system.to_owned(),
            size: 65_536,
            rounds: rounds.collect(),
            cores: Vec::new(),
            histogram: None,
        }
    }

    #[test]
    fn ratios_of_all_rounds_stand_beside_those_of_near_cores() {
        let cores = |at, near| Cores {
            at,
            before_ns: 60.0,
            after_ns: if near { 60.0 } else { 400.0 },
            shared: false,
            near,
        };
        let mut rows = [row("lm", &[2.0, 2.0, 8.0, 8.0]), row("tcp", &[1.0; 4])];
        assert_eq!(ratios(&rows, 1500, &[])[0].near, None, "nothing is known");
        rows[0].cores = [true, true, true, false]
            .iter()
            .zip(0..)
            .map(|(&near, at)| cores(at, near))
            .collect();
        rows[1].cores = [true, true, false, true]
            .iter()
            .zip(0..)
            .map(|(&near, at)| cores(at, near))
            .collect();
        let ratio = &ratios(&rows, 1500, &[])[0];
        let near = ratio.near.as_ref().unwrap();
        assert_eq!((ratio.rounds, ratio.median), (4, 5.0), "no round is thrown away");
        assert_eq!((near.rounds, near.left_out), (2, 2));
        assert_eq!(near.median_low_high, Some([2.0, 2.0, 2.0]));
    }

    #[test]
    fn targets_are_about_the_best_of_a_kind_and_ratios_within_a_round() {
        let rows = [
            row("lm", &[2.0, 4.0, 40.0, 4.0, 4.0, 4.0]),
            row("udp-blocking", &[1.0; 6]),
            row("udp-rps", &[1.0, 2.0, 40.0, 2.0, 2.0, 2.0]),
            row("iperf3", &[1.0; 5]),
        ];
        let ratios = ratios(&rows, 1500, &[]);
        let find = |against: &str, metric: &str| {
            ratios
                .iter()
                .find(|ratio| ratio.against == against && ratio.metric == metric)
                .unwrap()
        };
        let best = find("udp-rps", "bits_per_s");
        assert_eq!((best.median, best.low, best.high), (2.0, 1.0, 2.0));
        assert_eq!(
            (best.target, best.verdict),
            (Some(Target::AtLeast(1.2)), Verdict::Unclear)
        );
        assert_eq!(find("udp-blocking", "bits_per_s").target, None);
        assert_eq!(find("udp-blocking", "bits_per_s").verdict, Verdict::None);
        let yardstick = ratios
            .iter()
            .find(|ratio| ratio.system == "udp-blocking")
            .unwrap();
        assert_eq!(
            (yardstick.against.as_str(), yardstick.verdict),
            ("iperf3", Verdict::Unclear),
            "five rounds say nothing"
        );
    }

    #[test]
    fn what_a_command_asks_is_judged() {
        let rows = [
            row("lm", &[4.0; 6]),
            row("lm-no-integrity", &[3.0; 6]),
            row("tcp-bbr", &[2.0; 6]),
        ];
        let asked = ["lm/tcp-bbr=1.5", "lm-no-integrity/tcp-bbr=2", "lm/tcp-cubic=1"]
            .map(|text| parse(text).unwrap());
        let ratios = ratios(&rows, 1500, &asked);
        let judged: Vec<_> = (ratios.iter())
            .filter_map(|one| Some((one.median, one.target?, one.verdict)))
            .collect();
        let expected = [(1.5, 2.0, Verdict::Missed), (2.0, 1.5, Verdict::Met)];
        assert_eq!(
            judged,
            expected.map(|(median, least, verdict)| (median, Target::AtLeast(least), verdict))
        );
        for text in ["lm=2", "lm/tcp", "lm/tcp=fast"] {
            assert!(parse(text).unwrap_err().contains("RATIO"), "{text}");
        }
    }

    #[test]
    fn a_build_beside_a_frozen_one_is_not_slower() {
        let of = |system: &str, gigabits: &[f64]| {
            let rows = [row("lm", gigabits), row(system, &[10.0; 6])];
            let ratio = ratios(&rows, 1500, &[]).swap_remove(0);
            (ratio.target, ratio.verdict)
        };
        let least = Some(Target::AtLeast(1.0));
        let around = [9.0, 9.5, 10.0, 10.0, 10.5, 11.0];
        assert_eq!(of("lm@v1", &around), (least, Verdict::Unclear));
        assert_eq!(
            of("lm@v1", &around.map(|speed| speed - 2.0)),
            (least, Verdict::Missed)
        );
        assert_eq!(
            of("lm@v1", &around.map(|speed| speed + 2.0)),
            (least, Verdict::Met)
        );
        assert_eq!(of("lm-sleeping", &around), (None, Verdict::None));
    }

    #[test]
    fn verdicts_are_clear_or_unclear() {
        let median = Summary::of(&[1.1, 0.9, 1.0]).unwrap();
        for (target, expected) in [
            (Target::AtLeast(0.9), Verdict::Met),
            (Target::AtLeast(1.0), Verdict::Unclear),
            (Target::AtLeast(1.2), Verdict::Missed),
            (Target::AtMost(1.1), Verdict::Met),
            (Target::AtMost(1.0), Verdict::Unclear),
            (Target::AtMost(0.8), Verdict::Missed),
        ] {
            assert_eq!(verdict(&median, Some(target)), expected, "{target:?}");
        }
        assert_eq!(verdict(&median, None), Verdict::None);
    }
}
