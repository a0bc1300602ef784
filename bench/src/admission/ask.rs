//! A host that asks for sessions, measures how long LM_ACQ_OK takes, and ends each session at once.

use std::collections::HashMap;
use std::net::{Ipv4Addr, SocketAddrV4};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use clap::Args;
use lm_protocol::admission::{Outcome, Ticket};
use serde::Serialize;

use super::host::{Host, Told};
use super::request;
use crate::cli::Failure;
use crate::histogram::{LatencyHistogram, LatencySummary};

/// Longest sleep.
const SLEEP_MAX: Duration = Duration::from_millis(10);
/// How long before a request the program is awake.
const SPIN_BEFORE: Duration = Duration::from_millis(1);
/// Sessions before those that count: both hosts get to know each other.
const WARMUP: u64 = 16;
/// How long the gate's places, which these sessions have all used, rest before the first request that counts.
const REST: Duration = Duration::from_millis(200);
/// Requests of a train that do not count: they find the caches of both hosts full of other things.
const TRAIN_WARMUP: u32 = 4;
/// They may take so long: a daemon refuses at once while requests of others, who are gone, fill its queue of those that wait.
const WARMUP_LIMIT: Duration = Duration::from_secs(20);
/// Data ports that requests come from, in turns: a receiver has one session for each.
const DATA_PORTS: std::ops::Range<u16> = 10_000..60_000;

/// Arguments of `admission ask`.
#[derive(Debug, Clone, Args)]
pub struct AskArgs {
    /// Own address
    #[arg(long, value_name = "ADDRESS")]
    pub bind: Ipv4Addr,
    /// Address and control port of the daemon to ask
    #[arg(long, value_name = "ADDRESS:PORT")]
    pub to: SocketAddrV4,
    /// Data port of the receiver there
    #[arg(long, default_value_t = lm_dataplane::DEFAULT_PORT)]
    pub port: u16,
    /// File with the cluster's key
    #[arg(long, value_name = "FILE")]
    pub key_file: PathBuf,
    /// Requests
    #[arg(long, default_value_t = 5000)]
    pub requests: u32,
    /// Requests a second, each at its time whatever became of those before
    #[arg(long, default_value_t = 150.0)]
    pub rate: f64,
    /// Requests in trains instead: so many one after the other, each when the session before has ended. The first four of each
    /// train do not count, and all places of the gate rest before the next one
    #[arg(long, value_name = "REQUESTS", conflicts_with = "rate", value_parser = clap::value_parser!(u32).range(8..=16))]
    pub train: Option<u32>,
    /// Seconds that a request may wait
    #[arg(long, default_value_t = 3.0)]
    pub patience: f64,
    /// Do not sleep while an answer is to come
    #[arg(long)]
    pub spin: bool,
    /// Print all latencies, as a histogram, so that several runs can be put together
    #[arg(long)]
    pub histogram: bool,
}

/// What `admission ask` prints.
#[derive(Debug, Default, Serialize)]
pub(super) struct AskReport {
    /// Name of the program.
    pub program: &'static str,
    /// Requests that left.
    pub asked: u64,
    /// Requests that did not, because 4096 were open.
    pub not_asked: u64,
    /// Requests that were granted.
    pub granted: u64,
    /// Requests that were refused, because nothing was free in time.
    pub rejected: u64,
    /// Requests without any answer.
    pub unreachable: u64,
    /// Sessions whose end was confirmed.
    pub ended: u64,
    /// Sessions that ended otherwise: must be 0.
    pub lost: u64,
    /// Requests and sessions that nothing was heard of until the end: must be 0.
    pub open: u64,
    /// From the first request that counts to the last.
    pub seconds: f64,
    /// From a request to its LM_ACQ_OK, in microseconds.
    pub latency_us: LatencySummary,
    /// The same as a histogram, with `--histogram`: nanoseconds, and requests.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub latency_counts: Vec<(u64, u64)>,
    /// Datagrams that came and were taken.
    pub datagrams: u64,
}

struct Asking {
    sent: HashMap<Ticket, (Instant, bool)>,
    latencies: LatencyHistogram,
    report: AskReport,
}

/// Runs `admission ask`.
///
/// # Errors
///
/// A one-line reason when the key cannot be read, the socket not be opened, or the daemon not be reached.
pub(super) fn ask(args: &AskArgs) -> Result<AskReport, Failure> {
    let mut host = Host::new(args.bind, &args.key_file, args.spin)?;
    let patience = Duration::from_secs_f64(args.patience.clamp(0.1, 60.0));
    let mut asking = Asking {
        sent: HashMap::new(),
        latencies: LatencyHistogram::new(),
        report: AskReport {
            program: "admission-ask",
            ..AskReport::default()
        },
    };
    let mut ports = DATA_PORTS.cycle();
    let mut told = Vec::new();
    let deadline = Instant::now() + WARMUP_LIMIT;
    let mut first = 0;
    while asking.report.ended < WARMUP {
        if asking.sent.is_empty() {
            asking.ask(&mut host, args, patience, &mut ports, first, false, &mut told);
            first += 1;
        }
        host.turn(SLEEP_MAX, &mut told)?;
        asking.take(&mut host, &mut told);
        if Instant::now() > deadline {
            return Err(Failure::new(format!(
                "the daemon at {} grants nothing on port {}; does a program receive there, and is the key the same?",
                args.to, args.port
            )));
        }
    }
    asking.rest(&mut host, &mut told)?;
    asking.report = AskReport {
        program: "admission-ask",
        ..AskReport::default()
    };
    let started = Instant::now();
    if let Some(train) = args.train {
        let mut number = first;
        // As many trains as have so many requests that count.
        for _ in 0..args.requests.div_ceil(train - TRAIN_WARMUP) {
            for of_train in 0..train {
                let counts = of_train >= TRAIN_WARMUP;
                asking.ask(&mut host, args, patience, &mut ports, number, counts, &mut told);
                number = number.wrapping_add(1);
                while !asking.sent.is_empty() {
                    host.turn(SLEEP_MAX, &mut told)?;
                    asking.take(&mut host, &mut told);
                }
            }
            asking.rest(&mut host, &mut told)?;
        }
    } else {
        let due = |number: u32| started + Duration::from_secs_f64(f64::from(number) / args.rate.max(0.1));
        for number in 0..args.requests {
            while let Some(left) = due(number).checked_duration_since(Instant::now()) {
                // Nothing can come, and other programs of the machine get this core for it rather than the daemon's.
                if let Some(left) = left.checked_sub(SPIN_BEFORE).filter(|_| asking.sent.is_empty()) {
                    std::thread::sleep(left);
                    continue;
                }
                host.turn(left.min(SLEEP_MAX), &mut told)?;
                asking.take(&mut host, &mut told);
            }
            let number = number.wrapping_add(first);
            asking.ask(&mut host, args, patience, &mut ports, number, true, &mut told);
            asking.take(&mut host, &mut told);
        }
    }
    asking.report.seconds = started.elapsed().as_secs_f64();
    let deadline = Instant::now() + 3 * patience;
    while !asking.sent.is_empty() && Instant::now() < deadline {
        host.turn(SLEEP_MAX, &mut told)?;
        asking.take(&mut host, &mut told);
    }
    Ok(AskReport {
        open: asking.sent.len() as u64,
        latency_us: asking.latencies.summary(),
        latency_counts: match args.histogram {
            true => asking.latencies.counts().collect(),
            false => Vec::new(),
        },
        datagrams: host.counters().accepted,
        ..asking.report
    })
}

impl Asking {
    /// Until the gate's places, which these sessions have all used, are free again.
    fn rest(&mut self, host: &mut Host, told: &mut Vec<Told>) -> Result<(), Failure> {
        let rested = Instant::now() + REST;
        while Instant::now() < rested {
            host.turn(SLEEP_MAX, told)?;
            self.take(host, told);
        }
        Ok(())
    }

    #[expect(clippy::too_many_arguments, reason = "whom, what, and what came meanwhile")]
    fn ask(
        &mut self,
        host: &mut Host,
        args: &AskArgs,
        patience: Duration,
        ports: &mut impl Iterator<Item = u16>,
        number: u32,
        counts: bool,
        told: &mut Vec<Told>,
    ) {
        let data_port = ports.next().expect("ports come round again and again");
        let request = request(u64::from(number) + 1, data_port);
        let at = Instant::now();
        match host.ask(args.to, args.port, request, patience, told) {
            Some(ticket) => {
                self.report.asked += 1;
                self.sent.insert(ticket, (at, counts));
            }
            None => self.report.not_asked += 1,
        }
    }

    fn take(&mut self, host: &mut Host, told: &mut Vec<Told>) {
        while let Some(Told { ticket, outcome, at }) = told.pop() {
            let counter = match outcome {
                Outcome::Granted(_) => {
                    if let Some((asked, true)) = self.sent.get(&ticket) {
                        self.latencies.record_ns((at - *asked).as_nanos() as u64);
                    }
                    self.report.granted += 1;
                    host.end(ticket, told);
                    continue;
                }
                Outcome::Rejected(_) => &mut self.report.rejected,
                Outcome::Unreachable => &mut self.report.unreachable,
                Outcome::Ended { .. } => &mut self.report.ended,
                _ => &mut self.report.lost,
            };
            *counter += 1;
            self.sent.remove(&ticket);
        }
    }
}
