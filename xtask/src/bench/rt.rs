//! `cargo xtask bench rt`: what SS-RTUDP measured, real-time datagrams beside others that fill a slow port.
//!
//! **c**, table 4 on figure 10's network: three senders, each of 400 real-time and 2500 other frames a second, into one port that passes 8127
//! at most. The others are the kernel's UDP. Real time is, too, or messages of LM's real-time sockets, whose smoother holds the others back.
//! Each sender and receiver of a class is a program of its own that sleeps between its datagrams. The port is one FIFO that knows no classes.
//! What was offered and did not come is lost, whoever lost it: the port, a cable, a socket, the sender's kernel, its queue that is held back, or
//! the sender, which woke up too late. All of these are counted, and a run whose counts do not add up is refused.
//!
//! **b**, figure 9: round trips beside a TCP stream that takes most of a slow link ([`under_tcp`]).

mod under_tcp;

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use lm_measure::rate::BitRate;
use lm_measure::statistics::{Quantile, Summary};
use lm_measure::table::Table;
use rustix::time::{ClockId, clock_gettime};
use serde_json::{Value, json};

use crate::bed::{Bed, BedConfig, Drops, Launch, Port};
use crate::ends::{self, RealTime, Timetable};
use crate::machine::{self, ResultFile, two_cores};
use crate::workspace::Programs;
pub use under_tcp::under_tcp;

/// Real-time messages, and what stands in their way: figure 9 and table 4 of SS-RTUDP.
///
/// Figure 9 (`--only under_tcp`): round trips of 64 bytes beside a TCP stream that takes most of a link of 100 Mbit/s: of LM with its smoother, of
/// the kernel's UDP marked EF, and of the same with TCP in a class of HTB. Table 4 (`--only table_4`): three senders offer a port of 100 Mbit/s with
/// a buffer of 32 frames 7 % more than it passes: without a smoother, with each of its laws, and with others held to their share by hand.
/// Each round has a fresh bed for each contender. Leave the machine alone meanwhile.
#[derive(Debug, clap::Args)]
pub(super) struct Arguments {
    /// How often every contender is measured, in turns.
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// Keep every report in this file.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Only experiments whose key contains this text.
    #[arg(long, value_name = "TEXT", default_value = "")]
    only: String,
    /// Runs of table 4 as long as the paper's, 300 s instead of 30.
    #[arg(long)]
    full: bool,
}

/// Measures once on a bed of its own; the report.
type Measure = Box<dyn Fn(&Bed, &Programs) -> Result<Value>>;

/// One way to do what is measured.
pub struct Contender {
    /// As the table names it.
    pub name: &'static str,
    /// Its bed: a fresh one for every sample.
    pub bed: BedConfig,
    /// Measures once.
    pub measure: Measure,
}

/// Contenders that are measured in turns.
pub struct Experiment {
    /// Its name in JSON.
    pub key: &'static str,
    /// Its contenders, in this order.
    pub contenders: Vec<Contender>,
    /// What the table shows: places in reports, as JSON pointers (RFC 6901).
    pub columns: &'static [&'static str],
}

/// Figure 10's.
const SENDERS: u32 = 3;
const LINK: BitRate = BitRate(100_000_000);
const BUFFER_FRAMES: u32 = 32;
/// How long a run is, how long the paper's were, and how long one beside TCP.
const SECONDS: f64 = 30.0;
const FULL_SECONDS: f64 = 300.0;
const UNDER_TCP_SECONDS: f64 = 8.0;
/// Payload of a datagram that fills a packet of 1500 bytes; on the wire 1538.
const PAYLOAD_LEN: u64 = 1472;
/// Of what the port passes, when others are held by hand.
const BY_HAND_PART: f64 = 0.97;
/// Deadlines of the paper's real-time datagrams, in microseconds. The first one is less than a frame takes with another one before it.
const DEADLINES_US: [f64; 2] = [300.0, 1500.0];
/// All programs have started within this.
const LEAD_NS: u64 = 2_000_000_000;
/// How long one may take beside its timetable.
const SET_UP_S: f64 = 15.0;

/// One class of datagrams at one sender.
#[derive(Clone, Copy, Debug)]
struct Class {
    /// Where its receiver listens.
    port: u16,
    /// Datagrams a second on a link of 100 Mbit/s.
    rate: f64,
    burst: u32,
}

/// Real time, and others.
const CLASSES: [Class; 2] = [
    Class {
        port: 7168,
        rate: 400.0,
        burst: 1,
    },
    Class {
        port: 7170,
        rate: 2500.0,
        burst: 10,
    },
];

/// Runs the command.
pub(super) fn run(arguments: &Arguments) -> Result<()> {
    let file = arguments.json.as_deref().map(ResultFile::create).transpose()?;
    let seconds = if arguments.full { FULL_SECONDS } else { SECONDS };
    let mut all = vec![
        table_4(LINK, seconds),
        under_tcp(LINK, "cubic", UNDER_TCP_SECONDS),
    ];
    all.retain(|one| one.key.contains(&arguments.only));
    ensure!(
        !all.is_empty(),
        "no experiment has a key like that; there are table_4 and under_tcp"
    );
    let programs = Programs::build()?;
    let mut kept = Vec::new();
    for experiment in all {
        let reports = experiment.measure(arguments.rounds, &programs)?;
        println!(
            "\n{}: medians of {} rounds\n{}",
            experiment.key,
            arguments.rounds,
            experiment.table(&reports)
        );
        let contenders = experiment.contenders.iter().zip(reports);
        let contenders = contenders.map(|(one, reports)| json!({"name": one.name, "reports": reports}));
        kept.push(json!({"key": experiment.key, "contenders": contenders.collect::<Vec<_>>()}));
    }
    let Some(file) = file else { return Ok(()) };
    file.write(&json!({
        "suite": "rt", "rounds": arguments.rounds, "machine": machine::describe(), "experiments": kept,
    }))
}

impl Experiment {
    /// Measures every contender once a round, every other round backwards; reports by contender.
    fn measure(&self, rounds: u32, programs: &Programs) -> Result<Vec<Vec<Value>>> {
        let mut reports = vec![Vec::new(); self.contenders.len()];
        for round in 0..rounds {
            let mut order: Vec<usize> = (0..self.contenders.len()).collect();
            // What a later one is held to is known from the first one.
            if round % 2 == 1 {
                order.reverse();
            }
            for index in order {
                let contender = &self.contenders[index];
                eprintln!(
                    "  {}, round {} of {rounds}: {}",
                    self.key,
                    round + 1,
                    contender.name
                );
                let report = Bed::new(&contender.bed).and_then(|bed| (contender.measure)(&bed, programs));
                reports[index].push(report.with_context(|| contender.name)?);
            }
        }
        Ok(reports)
    }

    fn table(&self, reports: &[Vec<Value>]) -> Table {
        let mut table = Table::new(&[&[""], self.columns].concat());
        for (contender, reports) in self.contenders.iter().zip(reports) {
            let median = |place: &&str| {
                let found = reports.iter().filter_map(|report| number(report, place));
                Summary::of_finite(found).map_or_else(String::new, |found| format!("{:.2}", found.median))
            };
            let cells = self.columns.iter().map(median);
            table.row(
                std::iter::once(contender.name.to_owned())
                    .chain(cells)
                    .collect::<Vec<_>>(),
            );
        }
        table
    }
}

/// What becomes of the two classes at their senders.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum How {
    /// Both are the kernel's UDP, and nothing is held back.
    Kernel,
    /// Real time is LM's. Nothing is held back.
    Unsmoothed,
    /// Real time is LM's. Others are held back by a smoother of this law.
    Smoothed(&'static str),
    /// Real time is LM's. Others are held to their share of what the port passes.
    ByHand,
}

/// Table 4 with all links of this rate, and what is offered in proportion to it, without a smoother and with each of its laws.
pub fn table_4(link: BitRate, seconds: f64) -> Experiment {
    let contenders = [
        ("kernel UDP, no smoother", How::Kernel),
        ("LM, paced", How::Smoothed("paced")),
        ("LM, paper", How::Smoothed("paper")),
        ("LM, others held by hand", How::ByHand),
        ("LM, no smoother", How::Unsmoothed),
    ];
    let contender = |(name, how)| Contender {
        name,
        bed: bed_config(link),
        measure: Box::new(move |bed: &Bed, programs: &Programs| measure(bed, programs, how, link, seconds)),
    };
    Experiment {
        key: "table_4",
        contenders: contenders.into_iter().map(contender).collect(),
        columns: &[
            "/real_time/lost_percent",
            "/others/lost_percent",
            "/lost_percent",
            "/floor_percent",
            "/capacity",
            "/real_time/credits_mean",
            "/lost_at_senders_percent",
            "/real_time/late_percent/0",
            "/real_time/late_percent/1",
            "/real_time/delay_us/p50",
            "/real_time/delay_us/p99",
            "/others/goodput_mbit",
        ],
    }
}

fn bed_config(link: BitRate) -> BedConfig {
    BedConfig {
        senders: Some(SENDERS),
        port: Some(Port {
            rate: link,
            frames: BUFFER_FRAMES,
        }),
        cable: Some(link),
        // Else a switch brings what is for the receiver to its landing queue, and nothing lands here.
        queues: 1,
        ..BedConfig::default()
    }
}

fn number(report: &Value, place: &str) -> Option<f64> {
    report.pointer(place)?.as_f64()
}

/// One run on a fresh bed.
fn measure(bed: &Bed, programs: &Programs, how: How, link: BitRate, seconds: f64) -> Result<Value> {
    let capacity = bed.capacity()?;
    let scale = link.0 as f64 / LINK.0 as f64;
    if how == How::ByHand {
        let real_time = f64::from(SENDERS) * CLASSES[0].rate * scale;
        bed.hold_senders((BY_HAND_PART * capacity - real_time) / f64::from(SENDERS))?;
    }
    let before = bed.drops()?;
    let begins_ns = now_ns() + LEAD_NS;
    let timetable = |class: Class| Timetable {
        port: class.port,
        size: PAYLOAD_LEN,
        begins_ns,
        seconds,
        rate: class.rate * scale,
        burst: class.burst,
        is_answered: false,
    };
    let real_time = RealTime {
        timetable: timetable(CLASSES[0]),
        smoother: match how {
            How::Smoothed(law) => Some((law, link)),
            _ => None,
        },
    };
    // Words for the far end of a class, and for a near one with these gaps.
    let is_kernels = |which: usize| which > 0 || how == How::Kernel;
    let far = |which: usize| match is_kernels(which) {
        true => timetable(CLASSES[which]).far(),
        false => real_time.far(),
    };
    let near = |which: usize, seed| match is_kernels(which) {
        true => timetable(CLASSES[which]).near(seed),
        false => real_time.near(seed),
    };
    let [sending, receiving] = two_cores();
    let launch = |words: Vec<String>, core| {
        let limit = seconds + SET_UP_S;
        Launch::new(programs.path("lm-bench"))
            .args(["--time-limit", &limit.to_string()])
            .args(words)
            .core(core)
            .goes_first()
            .time_limit(Duration::from_secs_f64(limit))
    };
    let mut receivers = Vec::new();
    for which in 0..CLASSES.len() {
        let mut receiver = bed.right().spawn(launch(far(which), receiving))?;
        receiver.await_text("ready")?;
        receivers.push(receiver);
    }
    let mut senders = Vec::new();
    for (host, seed) in bed.senders().into_iter().zip((0..).step_by(CLASSES.len())) {
        for which in 0..CLASSES.len() {
            // No two have the same gaps.
            let words = near(which, seed + which as u64);
            senders.push((which, host.spawn(launch(words, sending))?));
        }
    }
    let mut tallies = [Tally::default(), Tally::default()];
    for (which, sender) in senders {
        tallies[which].add_sender(&sender.finish()?.json()?)?;
    }
    for (tally, receiver) in tallies.iter_mut().zip(receivers) {
        tally.add_receiver(&receiver.finish()?.json()?)?;
    }
    let mut report = report(&tallies, bed.drops()?.since(before), capacity, seconds)?;
    report["tc"] = bed.disciplines()?.into();
    Ok(report)
}

fn now_ns() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

/// A class's datagrams, of all senders.
#[derive(Debug, Default)]
struct Tally {
    /// By the timetables.
    due: u64,
    /// Not sent: a sender woke up too late, or its kernel refused it.
    late: u64,
    refused: u64,
    received: u64,
    /// Came, and gave way to newer ones before this machine let their receiver run.
    superseded: u64,
    bytes: u64,
    /// From sending to arrival in microseconds, shortest first.
    delays_us: Vec<f64>,
    /// What the senders printed of their stalls, and of their smoothers.
    stalls_ns: Vec<Value>,
    smoothed: Vec<Value>,
    /// Others of the senders that a smoother still holds back. Those that it dropped were refused.
    waiting: u64,
}

impl Tally {
    fn add_sender(&mut self, printed: &Value) -> Result<()> {
        self.due += count(printed, "/offered/due")?;
        self.late += count(printed, "/offered/late")?;
        self.refused += count(printed, "/offered/refused")?;
        self.stalls_ns.push(printed["offered"]["stalls_ns"].clone());
        if let Some(smoothed) = printed.get("smoothed") {
            self.waiting += count(smoothed, "/waiting")?;
            self.smoothed.push(smoothed.clone());
        }
        Ok(())
    }

    fn add_receiver(&mut self, printed: &Value) -> Result<()> {
        self.received += count(printed, "/messages")?;
        self.superseded += count(printed, "/lost_messages")?;
        self.bytes += count(printed, "/bytes")?;
        self.delays_us = ends::latencies_us(printed.get("delays"));
        Ok(())
    }

    fn sent(&self) -> u64 {
        self.due - self.late - self.refused
    }

    fn to_json(&self, seconds: f64) -> Value {
        let quantile = |part| Quantile::of(&self.delays_us, part).map(|found| found.value);
        let late = DEADLINES_US.map(|deadline| {
            let in_time = self.delays_us.partition_point(|delay| *delay <= deadline);
            percent((self.delays_us.len() - in_time) as u64, self.received)
        });
        let credits: Vec<f64> = { self.smoothed.iter() }
            .filter_map(|smoothed| number(smoothed, "/credits_mean"))
            .collect();
        let credits_mean = (!credits.is_empty()).then(|| credits.iter().sum::<f64>() / credits.len() as f64);
        json!({
            "credits_mean": credits_mean, "due": self.due, "late_at_senders": self.late, "refused": self.refused,
                "received": self.received, "superseded": self.superseded,
            "lost_percent": percent(self.due - self.received, self.due),
            "late_percent": late,
            "delay_us": {"p50": quantile(0.5), "p99": quantile(0.99), "max": self.delays_us.last()},
            "goodput_mbit": self.bytes as f64 * 8.0 / seconds / 1e6,
            "stalls_ns": self.stalls_ns, "smoothed": self.smoothed,
        })
    }
}

fn count(report: &Value, place: &str) -> Result<u64> {
    let found = report.pointer(place).and_then(Value::as_u64);
    found.with_context(|| format!("no {place} in {report}"))
}

fn percent(part: u64, all: u64) -> f64 {
    100.0 * part as f64 / all as f64
}

/// What a run came to, if every datagram is accounted for.
fn report(classes: &[Tally; 2], drops: Drops, capacity: f64, seconds: f64) -> Result<Value> {
    let sum = |count: fn(&Tally) -> u64| classes.iter().map(count).sum::<u64>();
    let (due, sent, received) = (sum(|one| one.due), sum(Tally::sent), sum(|one| one.received));
    let [waiting, superseded] = [sum(|one| one.waiting), sum(|one| one.superseded)];
    ensure!(
        sent == received + drops.sum() + waiting + superseded,
        "{sent} datagrams were sent, and {received} came ({} and {} of real time); {drops:?}, {waiting} that wait and \
         {superseded} that gave way do not make up for the rest",
        classes[0].sent(),
        classes[0].received
    );
    let [real_time, others] = classes.each_ref().map(|one| one.to_json(seconds));
    // The port sends what is in it after the last one was due, too.
    let passed = capacity * seconds + f64::from(BUFFER_FRAMES);
    ensure!(classes[0].due > 0, "no real-time datagram was due");
    Ok(json!({
        "capacity": capacity, "real_time": real_time, "others": others,
        "lost_percent": percent(due - received, due),
        "floor_percent": (100.0 * (1.0 - passed / due as f64)).max(0.0),
        "lost_at_senders_percent": percent(due - sent, due),
        "drops": {"port": drops.port, "cables": drops.cables, "sockets": drops.sockets},
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tally(due: u64, refused: u64, received: u64) -> Tally {
        let mut tally = Tally::default();
        for late in [1, 2] {
            let stalls = json!([[5_000_000, 12_000_000]]);
            let offered = json!({"due": due / 2, "late": late, "refused": refused / 2, "stalls_ns": stalls});
            tally.add_sender(&json!({"offered": offered})).unwrap();
        }
        let delays = json!([[250_000, received - 2], [1_000_000, 1], [2_000_000, 1]]);
        let printed = json!({"messages": received, "lost_messages": 0, "bytes": received * PAYLOAD_LEN,
            "delays": delays});
        tally.add_receiver(&printed).unwrap();
        tally
    }

    const DROPS: Drops = Drops {
        port: 100,
        cables: 7,
        sockets: 2,
    };

    #[test]
    fn what_was_due_and_did_not_come_is_lost() {
        // Of 3000, 3 and 3 were late, 4 refused, 109 dropped.
        let classes = [tally(1000, 0, 900), tally(2000, 4, 1981)];
        let report = report(&classes, DROPS, 2900.0, 1.0).unwrap();
        let of = |place: &str| number(&report, place).unwrap();
        assert_eq!(of("/real_time/lost_percent"), 10.0);
        assert_eq!(of("/others/lost_percent"), 0.95);
        assert!((of("/lost_percent") - 119.0 / 30.0).abs() < 1e-9);
        assert!((of("/lost_at_senders_percent") - 10.0 / 30.0).abs() < 1e-9);
        assert!((of("/floor_percent") - 68.0 / 30.0).abs() < 1e-9);
        assert!((of("/real_time/late_percent/0") - 2.0 / 9.0).abs() < 1e-9);
        assert!((of("/real_time/late_percent/1") - 1.0 / 9.0).abs() < 1e-9);
        assert_eq!(of("/real_time/delay_us/max"), 2000.0);
        assert_eq!(report["others"]["stalls_ns"][1], json!([[5_000_000, 12_000_000]]));
    }

    #[test]
    fn a_run_that_does_not_add_up_is_refused() {
        let classes = || [tally(1000, 0, 900), tally(2000, 4, 1980)];
        let error = report(&classes(), DROPS, 2900.0, 1.0).unwrap_err().to_string();
        assert!(
            error.contains("2990 datagrams were sent, and 2880 came"),
            "{error}"
        );
        let one_more = Drops { sockets: 3, ..DROPS };
        report(&classes(), one_more, 2900.0, 1.0).unwrap();
        // The same, if it waits at a sender.
        let mut classes = classes();
        let smoothed = json!({"dropped": 4, "waiting": 1, "credits_mean": 4000.0, "credits_least": 3600});
        let of_nothing = json!({"due": 0, "late": 0, "refused": 0, "stalls_ns": []});
        classes[0]
            .add_sender(&json!({"offered": of_nothing, "smoothed": smoothed}))
            .unwrap();
        let report = report(&classes, DROPS, 2900.0, 1.0).unwrap();
        assert_eq!(report["real_time"]["smoothed"], json!([smoothed]));
        assert_eq!(report["real_time"]["credits_mean"], json!(4000.0));
        let error = tally(2, 0, 2)
            .add_sender(&json!({"offered": {"due": 1}}))
            .unwrap_err();
        assert!(error.to_string().contains("no /offered/late"), "{error}");
    }
}
