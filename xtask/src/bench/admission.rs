//! `cargo xtask bench admission`: how long LM_ACQ_OK takes.
//!
//! Two hosts on a veth pair, with a daemon on each. On the right host a program receives, as a user without privileges, so that a
//! grant opens a place in the gate. On the left host `lm-bench admission ask` speaks the daemons' protocol itself, so that what is
//! measured is LM_REQ to LM_ACQ_OK without the hop between a program and its own daemon. The daemon that is asked has a core of its own.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use lm_measure::distance::{Apart, Distances};
use lm_measure::statistics::Quantile;
use lm_measure::table::Table;
use serde_json::{Value, json};

use crate::bed::daemons::{Daemons, NOBODY};
use crate::bed::{Bed, BedConfig, INTERFACE, Launch, Program};
use crate::ends;
use crate::machine::{ResultFile, describe, keep_cores_awake, two_cores};
use crate::workspace::Programs;

/// LM_REQ to LM_ACQ_OK between two daemons on a veth pair, the gate opened for each.
///
/// Prints latencies with a sleeping daemon and with one that spins, of requests one after the other. Sleeping daemons sleep, but idle
/// cores do not (PM QoS), except in the row that says so. Takes both of two cores; leave the machine alone meanwhile. A target that is
/// missed is no error; a session that was granted and lost is.
#[derive(Debug, clap::Args)]
pub(super) struct Arguments {
    /// Requests of each latency, in short rounds, each of which waits a while for near cores.
    #[arg(long, default_value_t = 3000, value_parser = clap::value_parser!(u32).range(1000..))]
    requests: u32,
    /// Also keep everything in this file.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// Requests of a round: a second of them at most, because a virtual machine's cores move about within seconds.
const REQUESTS_A_ROUND: u32 = 36;
/// Requests of a train: as many as a queue has places in the gate. Twelve of them count.
const TRAIN: u32 = 16;
/// LM_REQ to LM_ACQ_OK, 99 of 100: with a sleeping daemon, and with one that spins, in microseconds.
const P99_MAX_US: [f64; 2] = [300.0, 60.0];
const CONTROL_PORT: u16 = 7169;

/// A daemon on the right host, and a program that receives there.
struct Ground {
    bed: Bed,
    daemons: Daemons,
    right: Program,
    receiver: Program,
}

impl Ground {
    fn new(programs: &Programs, spin: bool) -> Result<Ground> {
        let bed = Bed::new(&BedConfig::default())?;
        let folder = PathBuf::from(format!("/run/lm-bench-admission-{}", std::process::id()));
        // One that never sleeps must not go before the kernel's own threads, which close the gate's places.
        let daemons = match spin {
            true => Daemons::new(programs, &folder, &["--spin"])?,
            false => Daemons::new(programs, &folder, &[])?.go_first(),
        };
        let [asking, answering] = two_cores();
        let mut right = daemons.spawn(bed.right(), Some(answering))?;
        daemons.await_ready(bed.right(), &mut right)?;
        let host = bed.right();
        let receive = Launch::new(daemons.tool("lm-recv"))
            .args(["--interface", INTERFACE, "--from-anyone", "--output", "/tmp"])
            .arg("--admission")
            .arg(daemons.socket(host))
            .user(NOBODY)
            .core(asking)
            .time_limit(Duration::from_secs(3600));
        let mut receiver = host.spawn(receive)?;
        receiver.await_text("listening on")?;
        Ok(Ground {
            bed,
            daemons,
            right,
            receiver,
        })
    }

    /// One round of trains; nothing that was granted may be lost.
    fn ask(&self) -> Result<Value> {
        let to = format!("{}:{CONTROL_PORT}", self.bed.right().address());
        // It does not spin: it would keep its core from the receiver, which polls the queue that requests come in on.
        let launch = Launch::new(self.daemons.tool("lm-bench"))
            .args(["--time-limit", "3600", "admission", "ask", "--to", &to])
            .args(["--bind", &self.bed.left().address().to_string()])
            .args([
                "--requests",
                &REQUESTS_A_ROUND.to_string(),
                "--train",
                &TRAIN.to_string(),
            ])
            .arg("--key-file")
            .arg(self.daemons.key_file())
            .core(two_cores()[0])
            .time_limit(Duration::from_secs(3600))
            .goes_first();
        let finished = self.bed.left().spawn(launch)?.finish();
        let report = finished
            .with_context(|| {
                let last = |program: &Program| program.said().lines().last().unwrap_or("nothing").to_owned();
                let (receiver, daemon) = (last(&self.receiver), last(&self.right));
                format!("the receiver said {receiver:?} last, its daemon {daemon:?}")
            })?
            .json()?;
        let number = |name: &str| report[name].as_u64().unwrap_or(u64::MAX);
        ensure!(
            number("lost") == 0 && number("open") == 0 && number("ended") == number("granted"),
            "sessions that were granted were lost: {report}"
        );
        Ok(report)
    }

    /// Asks for one session after the other, in rounds, and keeps each with how far apart the cores were.
    fn in_trains(&self, requests: u32, distances: &mut Distances) -> Result<Latency> {
        let rounds = 0..requests.div_ceil(REQUESTS_A_ROUND);
        let rounds = rounds.map(|_| distances.around(|| self.ask()));
        Ok(Latency {
            rounds: rounds.collect::<Result<_>>()?,
        })
    }
}

/// Requests in rounds, each with how far apart the cores were.
struct Latency {
    rounds: Vec<(Value, Option<Apart>)>,
}

impl Latency {
    /// The latencies of all rounds, in microseconds, in order.
    fn all(&self) -> Vec<f64> {
        latencies(self.rounds.iter().map(|(report, _)| report))
    }

    /// Those of the rounds with near cores.
    fn near(&self) -> Vec<f64> {
        let near = self.rounds.iter().filter(|(_, apart)| super::is_near(apart));
        latencies(near.map(|(report, _)| report))
    }

    /// A line of the table.
    fn row(&self, what: &str, target_us: f64) -> [String; 8] {
        let all = self.all();
        let [p50, p90, p99] = [0.5, 0.9, 0.99].map(|part| Quantile::of(&all, part));
        let of = |quantile: Option<Quantile>| {
            quantile.map_or_else(|| "–".to_owned(), |quantile| format!("{:.0}", quantile.value))
        };
        [
            what.to_owned(),
            all.len().to_string(),
            of(p50),
            of(p90),
            of(p99),
            p99.map_or_else(String::new, |p99| {
                format!("{:.0}..{:.0}", p99.interval[0], p99.interval[1])
            }),
            of(Quantile::of(&self.near(), 0.99)),
            verdict(
                p99.is_some_and(|p99| p99.value <= target_us),
                &format!("p99 ≤ {target_us} µs"),
            ),
        ]
    }

    /// As other suites keep a comparison with one contender: each round's p99, and that of all requests together.
    fn comparison(&self, daemons: &str, key: &str, what: &str, target_us: f64) -> Value {
        let p99 = |latencies: &[f64]| Quantile::of(latencies, 0.99).map(|quantile| quantile.value);
        let (figure, near) = (p99(&self.all()), p99(&self.near()));
        let of_rounds = self
            .rounds
            .iter()
            .map(|(report, _)| p99(&latencies([report].into_iter())));
        let target = figure.map(|reached| {
            json!({
                "asked": format!("≤ {target_us} µs"), "of": what, "bound": target_us, "reached": reached, "near": near,
                "met": reached <= target_us,
            })
        });
        json!({
            "key": format!("{daemons}_{key}"),
            "title": format!("LM_REQ to LM_ACQ_OK, p99, daemons {daemons}"),
            "unit": "µs",
            "contenders": [{"name": what, "figure": figure, "samples": of_rounds.collect::<Vec<_>>()}],
            "cores": self.rounds.iter().map(|(_, apart)| super::apart_json(apart)).collect::<Vec<_>>(),
            "targets": target.into_iter().collect::<Vec<_>>(),
        })
    }

    fn to_json(&self) -> Value {
        let (all, near) = (self.all(), self.near());
        let quantile = |of: &[f64], part: f64| {
            let found = Quantile::of(of, part);
            found.map(|found| json!({"value": found.value, "interval": found.interval}))
        };
        json!({
            "p50_us": quantile(&all, 0.5), "p90_us": quantile(&all, 0.9), "p99_us": quantile(&all, 0.99),
            "near_p99_us": quantile(&near, 0.99),
            "cores": self.rounds.iter().map(|(_, apart)| super::apart_json(apart)).collect::<Vec<_>>(),
            "rounds": self.rounds.iter().map(|(report, _)| report).collect::<Vec<_>>(),
        })
    }
}

/// The latencies of some rounds, in microseconds, in order.
fn latencies<'a>(reports: impl Iterator<Item = &'a Value>) -> Vec<f64> {
    ends::latencies_us(reports.filter_map(|report| report.get("latency_counts")))
}

/// Runs the command.
pub(super) fn run(arguments: &Arguments) -> Result<()> {
    crate::bed::require_root("make network namespaces")?;
    let file = arguments.json.as_deref().map(ResultFile::create).transpose()?;
    let programs = Programs::build()?;
    let mut latencies = Table::new(&[
        "LM_REQ to LM_ACQ_OK",
        "count",
        "p50 µs",
        "p90 µs",
        "p99 µs",
        "95 % interval",
        "p99, near cores",
        "target",
    ]);
    let mut result = json!({"suite": "admission", "machine": describe()});
    let mut comparisons = Vec::new();
    let mut distances = Distances::between(two_cores());
    for ((name, spin), target) in [("sleeping", false), ("spinning", true)]
        .into_iter()
        .zip(P99_MAX_US)
    {
        let ground = Ground::new(&programs, spin)?;
        let mut measured = |what: &str, key: &str, latency: Latency| {
            latencies.row(latency.row(what, target));
            comparisons.push(latency.comparison(name, key, what, target));
            result[name][key] = latency.to_json();
        };
        eprintln!("  daemons {name}: latency");
        // Where nothing spins, it matters whether idle cores sleep.
        if !spin {
            let latency = ground.in_trains(arguments.requests / 3, &mut distances)?;
            measured("on cores that sleep, too", "ask_cores_asleep", latency);
        }
        let _awake = keep_cores_awake()?;
        let latency = ground.in_trains(arguments.requests, &mut distances)?;
        measured(&format!("daemons {name}, cores kept awake"), "ask", latency);
    }
    result["comparisons"] = json!(comparisons);
    println!("\n{latencies}");
    file.map_or(Ok(()), |file| file.write(&result))
}

fn verdict(met: bool, target: &str) -> String {
    format!("{target}: {}", if met { "met" } else { "missed" })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounds_are_put_together() {
        let round = |counts: &[(u64, u64)]| json!({"granted": 2, "latency_counts": counts});
        let near = Apart {
            before_ns: 60.0,
            after_ns: 60.0,
            is_shared: false,
            is_near: true,
        };
        let latency = Latency {
            rounds: vec![
                (round(&[(3000, 1), (9000, 1)]), Some(near)),
                (round(&[(5000, 2)]), None),
                (json!({}), Some(near)),
            ],
        };
        assert_eq!(latency.all(), [3.0, 5.0, 5.0, 9.0]);
        assert_eq!(latency.near(), [3.0, 9.0]);
        let kept = latency.comparison("sleeping", "ask", "on some cores", 8.0);
        assert_eq!(kept["contenders"][0]["samples"], json!([9.0, 5.0, null]));
        assert_eq!(
            (&kept["targets"][0]["reached"], &kept["targets"][0]["met"]),
            (&json!(9.0), &json!(false))
        );
    }
}
