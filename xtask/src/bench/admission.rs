//! `cargo xtask bench admission`: how long LM_ACQ_OK takes, and what a daemon bears.
//!
//! Two hosts on a veth pair, with a daemon on each. On the right host a program receives, as a user without privileges, so that a
//! grant opens a place in the gate. On the left host `lm-bench admission ask` speaks the daemons' protocol itself, so that what is
//! measured is LM_REQ to LM_ACQ_OK without the hop between a program and its own daemon; that one is measured by a program of the
//! left daemon, which waits for the whole of it. The daemon that is asked has a core of its own.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use lm_measure::distance::{Apart, Distances};
use lm_measure::statistics::{Quantile, Summary};
use lm_measure::table::Table;
use serde_json::{Value, json};

use crate::bed::daemons::{Daemons, NOBODY};
use crate::bed::{Bed, BedConfig, Host, INTERFACE, Launch, Program};
use crate::ends::{self, Ends};
use crate::machine::{ResultFile, describe, keep_cores_awake, two_cores};
use crate::workspace::Programs;

/// LM_REQ to LM_ACQ_OK between two daemons on a veth pair, the gate opened for each.
///
/// Prints latencies with a sleeping daemon and with one that spins: of requests one after the other, and of requests that come seldom
/// and find cold caches, with kernel UDP's round trips at the same pace below them. Then the way from a program to its own daemon apart,
/// what becomes of 10,000 requests a second, and what a flood of messages that must not be believed does to honest ones. Sleeping
/// daemons sleep, but idle cores do not (PM QoS), except in the row that says so. Takes ten minutes and both of two cores; leave the
/// machine alone meanwhile. A target that is missed is no error; a session that was granted and lost is.
#[derive(Debug, clap::Args)]
pub(super) struct Arguments {
    /// Requests of each latency, in short rounds, each of which waits a while for near cores; a third of them where requests come
    /// seldom.
    #[arg(long, default_value_t = 3000, value_parser = clap::value_parser!(u32).range(1000..))]
    requests: u32,
    /// Requests a second where they come seldom: a place of the gate rests for tens of milliseconds after its session.
    #[arg(long, default_value_t = 200, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    rate: u32,
    /// Requests a second that are offered.
    #[arg(long, default_value_t = 10_000, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    load: u32,
    /// For so many seconds.
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..=600))]
    seconds: u32,
    /// Datagrams a second of the flood.
    #[arg(long, default_value_t = 20_000, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    flood: u32,
    /// Measure latencies only.
    #[arg(long)]
    latency_only: bool,
    /// Also keep everything in this file.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// Requests of a round: a second of them at most, because a virtual machine's cores move about within seconds.
const REQUESTS_A_ROUND: u32 = 100;
const REQUESTS_IN_TRAINS_A_ROUND: u32 = 36;
/// Requests of a train: as many as a queue has places in the gate. Twelve of them count.
const TRAIN: u32 = 16;
/// Length of a request in bytes, for the round trips of UDP.
const REQUEST_LEN: u64 = 128;
/// LM_REQ to LM_ACQ_OK, 99 of 100: with a sleeping daemon, and with one that spins, in microseconds.
const P99_MAX_US: [f64; 2] = [300.0, 60.0];
/// What a flood may make of honest requests' p99.
const FLOOD_MAX: f64 = 2.0;
const RECEIVER_PORT: u16 = 7168;
const CONTROL_PORT: u16 = 7169;
const HOP_PORT: u16 = 9000;

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
        let receive = Launch::new(daemons.tool("lm-bench"))
            .args([
                "--time-limit",
                "3600",
                "admission",
                "receive",
                "--interface",
                INTERFACE,
            ])
            .arg("--socket")
            .arg(daemons.socket(host))
            .args(["--bind", &format!("{}:{RECEIVER_PORT}", host.address())])
            .user(NOBODY)
            .core(asking)
            .time_limit(Duration::from_secs(3600));
        let mut receiver = host.spawn(receive)?;
        receiver.await_text("ready")?;
        Ok(Ground {
            bed,
            daemons,
            right,
            receiver,
        })
    }

    fn launch(&self, host: &Host, program: &str) -> Launch {
        let to = format!("{}:{CONTROL_PORT}", self.bed.right().address());
        Launch::new(self.daemons.tool("lm-bench"))
            .args(["--time-limit", "3600", "admission", program, "--to", &to])
            .args(["--bind", &host.address().to_string()])
            .arg("--key-file")
            .arg(self.daemons.key_file())
            .core(two_cores()[0])
            .time_limit(Duration::from_secs(3600))
    }

    /// Asks the right host's daemon; nothing that was granted may be lost.
    fn ask(&self, requests: u32, rate: u32, spin: bool) -> Result<Value> {
        self.ask_with(requests, spin, &["--rate", &rate.to_string()])
    }

    /// The same, with other options.
    fn ask_with(&self, requests: u32, spin: bool, options: &[&str]) -> Result<Value> {
        let mut launch = self.launch(self.bed.left(), "ask");
        launch = launch
            .args(["--requests", &requests.to_string()])
            .args(options)
            .goes_first();
        if spin {
            launch = launch.arg("--spin");
        }
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

    /// Asks for one session after the other.
    fn in_trains(&self, requests: u32, spin: bool, distances: &mut Distances) -> Result<Latency> {
        let train = TRAIN.to_string();
        let options = ["--train", &train, "--histogram"];
        rounds(requests, REQUESTS_IN_TRAINS_A_ROUND, distances, |requests| {
            self.ask_with(requests, spin, &options)
        })
    }

    /// Asks so many times a second.
    fn seldom(&self, requests: u32, rate: u32, spin: bool, distances: &mut Distances) -> Result<Latency> {
        let rate = rate.to_string();
        let options = ["--rate", &rate, "--histogram"];
        rounds(requests, REQUESTS_A_ROUND, distances, |requests| {
            self.ask_with(requests, spin, &options)
        })
    }

    /// Asks by a program of the left host's daemon, which runs meanwhile alone: one that spins would take half of the asking core.
    fn hop(&self, requests: u32, rate: u32) -> Result<Value> {
        let host = self.bed.left();
        let mut left = self.daemons.spawn(host, Some(two_cores()[0]))?;
        self.daemons.await_ready(host, &mut left)?;
        let launch = Launch::new(self.daemons.tool("lm-bench"))
            .args([
                "--time-limit",
                "3600",
                "admission",
                "hop",
                "--interface",
                INTERFACE,
            ])
            .arg("--socket")
            .arg(self.daemons.socket(host))
            .args(["--bind", &format!("{}:{HOP_PORT}", host.address())])
            .args(["--to", &format!("{}:{RECEIVER_PORT}", self.bed.right().address())])
            .args(["--requests", &requests.to_string(), "--rate", &rate.to_string()])
            .user(NOBODY)
            .core(two_cores()[0])
            .time_limit(Duration::from_secs(3600));
        host.spawn(launch)?.finish()?.json()
    }

    /// Processor time that the right host's daemon has used, in seconds.
    fn daemon_seconds(&self) -> Result<f64> {
        let path = format!("/proc/{}/stat", self.right.id());
        let stat = std::fs::read_to_string(&path).with_context(|| format!("cannot read {path}"))?;
        processor_seconds(&stat).with_context(|| format!("{path} says {stat:?}"))
    }

    fn datagrams(&self) -> Result<Value> {
        let status = self.daemons.status(self.bed.right())?;
        Ok(status["interfaces"][0]["datagrams"].clone())
    }
}

/// Kernel UDP's round trips at the same pace, on the same cores and a bed without a gate or a daemon.
fn echo(
    programs: &Programs,
    requests: u32,
    rate: u32,
    spin: bool,
    distances: &mut Distances,
) -> Result<Latency> {
    let bed = Bed::new(&BedConfig::default())?;
    let [asking, answering] = two_cores();
    let transport = if spin { "udp-spinning" } else { "udp-blocking" };
    let launch = |words, core| Launch::new(programs.path("lm-bench")).args(words).core(core);
    rounds(requests, REQUESTS_A_ROUND, distances, |requests| {
        // As requests are: what is sent late is not longer under way.
        let ends = Ends::round_trips(transport, REQUEST_LEN, requests, Some(rate)).options("--from-sent", "");
        let far = launch(ends.far(), answering);
        // As a daemon: only one that sleeps goes first.
        let mut far = bed.right().spawn(if spin { far } else { far.goes_first() })?;
        far.await_text("ready")?;
        let near = launch(ends.near(), asking).goes_first();
        let report = bed.left().spawn(near)?.finish()?.json()?;
        far.stop()?;
        Ok(report)
    })
}

/// Measures in rounds, and keeps each with how far apart the cores were.
fn rounds(
    requests: u32,
    of_round: u32,
    distances: &mut Distances,
    measure: impl Fn(u32) -> Result<Value>,
) -> Result<Latency> {
    let rounds = 0..requests.div_ceil(of_round);
    let rounds = rounds.map(|_| distances.around(|| measure(of_round)));
    Ok(Latency {
        rounds: rounds.collect::<Result<_>>()?,
    })
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
    fn row(&self, what: &str, target_us: Option<f64>) -> [String; 8] {
        let all = self.all();
        let [p50, p90, p99] = [0.5, 0.9, 0.99].map(|part| Quantile::of(&all, part));
        let of = |quantile: Option<Quantile>| micros(quantile.map(|quantile| quantile.value));
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
            target_us.map_or_else(String::new, |target| {
                let met = p99.is_some_and(|p99| p99.value <= target);
                verdict(met, &format!("p99 ≤ {target} µs"))
            }),
        ]
    }

    /// As other suites keep a comparison with one contender: each round's p99, and that of all requests together.
    fn comparison(&self, daemons: &str, key: &str, what: &str, target_us: Option<f64>) -> Value {
        let p99 = |latencies: &[f64]| Quantile::of(latencies, 0.99).map(|quantile| quantile.value);
        let (figure, near) = (p99(&self.all()), p99(&self.near()));
        let of_rounds = self
            .rounds
            .iter()
            .map(|(report, _)| p99(&latencies([report].into_iter())));
        let targets = target_us.zip(figure).map(|(target, reached)| {
            json!({
                "asked": format!("≤ {target} µs"), "of": what, "bound": target, "reached": reached, "near": near, "met": reached <= target,
            })
        });
        json!({
            "key": format!("{daemons}_{key}"),
            "title": format!("LM_REQ to LM_ACQ_OK, p99, daemons {daemons}"),
            "unit": "µs",
            "contenders": [{"name": what, "figure": figure, "samples": of_rounds.collect::<Vec<_>>()}],
            "cores": self.rounds.iter().map(|(_, apart)| super::apart_json(apart)).collect::<Vec<_>>(),
            "targets": targets.into_iter().collect::<Vec<_>>(),
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
    let counts = |report: &'a Value| report.get("latency_counts").or_else(|| report.get("round_trips"));
    ends::latencies_us(reports.filter_map(counts))
}

/// User's and system's time in a line of `/proc/PID/stat`.
fn processor_seconds(stat: &str) -> Option<f64> {
    // proc_pid_stat(5): fields 14 and 15; the second field, a name in parentheses, may have spaces.
    let rest = stat.rsplit_once(')')?.1;
    let mut fields = rest.split_whitespace().skip(11);
    let [user, system] = [
        fields.next()?.parse::<f64>().ok()?,
        fields.next()?.parse::<f64>().ok()?,
    ];
    Some((user + system) / rustix::param::clock_ticks_per_second() as f64)
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
    for (at, (name, spin)) in [("sleeping", false), ("spinning", true)].into_iter().enumerate() {
        let ground = Ground::new(&programs, spin)?;
        let (requests, few) = (arguments.requests, arguments.requests / 3);
        let mut measured = |what: &str, key: &str, latency: Latency, target: Option<f64>| {
            latencies.row(latency.row(what, target));
            comparisons.push(latency.comparison(name, key, what.trim(), target));
            result[name][key] = latency.to_json();
        };
        eprintln!("  daemons {name}: latency");
        // Where nothing spins, it matters whether idle cores sleep.
        let on_sleeping_cores = match spin {
            true => None,
            false => Some(ground.in_trains(few, spin, &mut distances)?),
        };
        let _awake = keep_cores_awake()?;
        let latency = ground.in_trains(requests, spin, &mut distances)?;
        let target = Some(P99_MAX_US[at]);
        measured(
            &format!("daemons {name}, cores kept awake"),
            "ask",
            latency,
            target,
        );
        if let Some(latency) = on_sleeping_cores {
            measured("  on cores that sleep, too", "ask_cores_asleep", latency, target);
        }
        let latency = ground.seldom(few, arguments.rate, spin, &mut distances)?;
        measured(&format!("  {} a second", arguments.rate), "seldom", latency, None);
        let hop = ground.hop(arguments.requests.min(1000), arguments.rate)?;
        let of_hop = |quantile: &str| micros(hop["latency_us"][quantile].as_f64());
        latencies.row([
            format!("  with the program's hop, {name}"),
            hop["granted"].to_string(),
            of_hop("p50"),
            of_hop("p90"),
            of_hop("p99"),
            String::new(),
            String::new(),
            String::new(),
        ]);
        result[name]["hop"] = hop;
        if !spin && !arguments.latency_only {
            let [load, flood] = [load(&ground, arguments)?, flood(&ground, arguments)?];
            (result["load"], result["flood"]) = (load, flood);
        }
        drop(ground);
        let latency = echo(&programs, few, arguments.rate, spin, &mut distances)?;
        let what = format!("  kernel UDP's round trip, {} a second", arguments.rate);
        latencies.row(latency.row(&what, None));
        result[name]["echo"] = latency.to_json();
    }
    result["comparisons"] = json!(comparisons);
    println!("\n{latencies}");
    if !arguments.latency_only {
        print_load(&result["load"]);
        print_flood(&result["flood"]);
    }
    file.map_or(Ok(()), |file| file.write(&result))
}

/// So many requests a second, whatever becomes of them.
fn load(ground: &Ground, arguments: &Arguments) -> Result<Value> {
    eprintln!("  load");
    let before = ground.daemon_seconds()?;
    let rate = arguments.load.to_string();
    // Who waits for a place asks no longer than this, so that no more wait than the asking host can have open.
    let options = ["--rate", &rate, "--patience", "0.2"];
    let report = ground.ask_with(arguments.load * arguments.seconds, false, &options)?;
    let used = ground.daemon_seconds()? - before;
    Ok(json!({
        "ask": report,
        "offered_per_s": report["asked"].as_f64().unwrap_or(0.0) / report["seconds"].as_f64().unwrap_or(1.0),
        "daemon_processor_seconds": used,
    }))
}

/// Honest requests with and without a flood beside them, in turns.
fn flood(ground: &Ground, arguments: &Arguments) -> Result<Value> {
    eprintln!("  flood");
    let requests = (arguments.requests / 5).max(100);
    let seconds = f64::from(requests) / f64::from(arguments.rate) + 3.0;
    let before = ground.datagrams()?;
    let mut rounds = Vec::new();
    let mut floods = Vec::new();
    for _ in 0..3 {
        let alone = ground.ask(requests, arguments.rate, false)?;
        let launch = ground.launch(ground.bed.left(), "flood").args([
            "--rate",
            &arguments.flood.to_string(),
            "--seconds",
            &seconds.to_string(),
        ]);
        let mut flooding = ground.bed.left().spawn(launch)?;
        flooding.await_text("ready")?;
        let beside = ground.ask(requests, arguments.rate, false)?;
        floods.push(flooding.finish()?.json()?);
        rounds.push(json!({"alone": alone, "beside": beside}));
    }
    let ratios: Vec<f64> = (rounds.iter())
        .filter_map(|round| Some(p99(&round["beside"])? / p99(&round["alone"])?))
        .collect();
    Ok(json!({
        "rounds": rounds,
        "floods": floods,
        "p99_ratio": Summary::of(&ratios).map(|ratios| ratios.median),
        "daemon_datagrams_before": before,
        "daemon_datagrams_after": ground.datagrams()?,
    }))
}

fn micros(us: Option<f64>) -> String {
    us.map_or_else(|| "–".to_owned(), |us| format!("{us:.0}"))
}

fn p99(report: &Value) -> Option<f64> {
    report["latency_us"]["p99"].as_f64()
}

fn verdict(met: bool, target: &str) -> String {
    format!("{target}: {}", if met { "met" } else { "missed" })
}

fn print_load(load: &Value) {
    let ask = &load["ask"];
    println!(
        "load       {:.0} requests a second offered for {:.1} s: {} granted, all of them honoured; {} refused in time, {} without an \
         answer; {:.2} s of processor time of the daemon",
        load["offered_per_s"].as_f64().unwrap_or(f64::NAN),
        ask["seconds"].as_f64().unwrap_or(f64::NAN),
        ask["granted"],
        ask["rejected"],
        ask["unreachable"],
        load["daemon_processor_seconds"].as_f64().unwrap_or(f64::NAN),
    );
}

fn print_flood(flood: &Value) {
    let ratio = flood["p99_ratio"].as_f64().unwrap_or(f64::NAN);
    let sent = |name: &str| -> u64 {
        let floods = flood["floods"].as_array().into_iter().flatten();
        floods.filter_map(|one| one[name].as_u64()).sum()
    };
    let counted = |name: &str| {
        let at = |when: &str| flood[when][name].as_u64().unwrap_or(0);
        at("daemon_datagrams_after") - at("daemon_datagrams_before")
    };
    println!(
        "flood      {} altered, {} cut and {} replayed messages beside honest ones: their p99 × {ratio:.2} in the median of three rounds \
         ({})",
        sent("altered"),
        sent("truncated"),
        sent("replayed"),
        verdict(ratio <= FLOOD_MAX, &format!("≤ {FLOOD_MAX}")),
    );
    println!(
        "           the daemon counts {} unauthenticated, {} malformed, {} not sealed, {} of another version, {} replayed, {} of \
         unknown lives",
        counted("unauthenticated"),
        counted("malformed"),
        counted("not_sealed"),
        counted("other_version"),
        counted("replayed"),
        counted("strangers"),
    );
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
                (json!({"round_trips": [(5000, 2)]}), None),
                (json!({}), Some(near)),
            ],
        };
        assert_eq!(latency.all(), [3.0, 5.0, 5.0, 9.0]);
        assert_eq!(latency.near(), [3.0, 9.0]);
        let kept = latency.comparison("sleeping", "ask", "on some cores", Some(8.0));
        assert_eq!(kept["contenders"][0]["samples"], json!([9.0, 5.0, null]));
        assert_eq!(
            (&kept["targets"][0]["reached"], &kept["targets"][0]["met"]),
            (&json!(9.0), &json!(false))
        );
    }

    #[test]
    fn processor_time_is_read_behind_any_name() {
        let ticks = rustix::param::clock_ticks_per_second();
        let line = format!(
            "7 (a) b) S 1 7 7 0 -1 4194560 99 0 0 0 {} {ticks} 0 0 20 0 3 0",
            2 * ticks
        );
        assert_eq!(processor_seconds(&line), Some(3.0));
        assert_eq!(processor_seconds("7"), None);
    }
}
