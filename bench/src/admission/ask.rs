//! A host that asks for sessions, measures how long LM_ACQ_OK takes, and ends each session at once.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use clap::Args;
use lm_protocol::admission::{Outcome, Ticket};
use serde::Serialize;

use super::host::{Host, Told};
use super::{Ends, request};
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
    /// The ends
    #[command(flatten)]
    pub ends: Ends,
    /// Data port of the receiver there
    #[arg(long, default_value_t = lm_dataplane::DEFAULT_PORT)]
    pub port: u16,
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
    /// Of them such that got a session without a place of the landing queue.
    pub without_place: u64,
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
    /// From a request to its LM_ACQ_OK, in microseconds, of those that got a place.
    pub latency_us: LatencySummary,
    /// The same as a histogram, so that several runs can be put together: nanoseconds, and requests.
    pub latency_counts: Vec<(u64, u64)>,
    /// Datagrams that came and were taken.
    pub datagrams: u64,
}

/// Runs `admission ask`.
///
/// # Errors
///
/// A one-line reason when the key cannot be read, the socket not be opened, or the daemon not be reached.
pub(super) fn ask(args: &AskArgs) -> Result<AskReport, Failure> {
    let mut asking = Asking {
        args,
        host: Host::new(&args.ends)?,
        patience: Duration::from_secs_f64(args.patience.clamp(0.1, 60.0)),
        number: 0,
        sent: HashMap::new(),
        latencies: LatencyHistogram::new(),
        report: AskReport::default(),
    };
    asking.warm_up()?;
    asking.rest()?;
    asking.report = AskReport::default();
    let started = Instant::now();
    match args.train {
        Some(train) => asking.trains(train)?,
        None => asking.at_their_times(started)?,
    }
    asking.report.seconds = started.elapsed().as_secs_f64();
    let deadline = Instant::now() + 3 * asking.patience;
    while !asking.sent.is_empty() && Instant::now() < deadline {
        asking.turn(SLEEP_MAX)?;
    }
    Ok(AskReport {
        program: "admission-ask",
        open: asking.sent.len() as u64,
        latency_us: asking.latencies.summary(),
        latency_counts: asking.latencies.counts().collect(),
        datagrams: asking.host.counters().accepted,
        ..asking.report
    })
}

struct Asking<'a> {
    args: &'a AskArgs,
    host: Host,
    patience: Duration,
    /// Of the next request.
    number: u32,
    /// When each open request left, and whether it counts.
    sent: HashMap<Ticket, (Instant, bool)>,
    latencies: LatencyHistogram,
    report: AskReport,
}

impl Asking<'_> {
    fn warm_up(&mut self) -> Result<(), Failure> {
        let deadline = Instant::now() + WARMUP_LIMIT;
        while self.report.ended < WARMUP {
            if self.sent.is_empty() {
                self.ask(false);
            }
            self.turn(SLEEP_MAX)?;
            if Instant::now() > deadline {
                return Err(Failure::new(format!(
                    "the daemon at {} grants nothing on port {}; does a program receive there, and is the key the same?",
                    self.args.ends.to, self.args.port
                )));
            }
        }
        Ok(())
    }

    /// As many trains as have so many requests that count.
    fn trains(&mut self, train: u32) -> Result<(), Failure> {
        for _ in 0..self.args.requests.div_ceil(train - TRAIN_WARMUP) {
            for of_train in 0..train {
                self.ask(of_train >= TRAIN_WARMUP);
                while !self.sent.is_empty() {
                    self.turn(SLEEP_MAX)?;
                }
            }
            self.rest()?;
        }
        Ok(())
    }

    fn at_their_times(&mut self, started: Instant) -> Result<(), Failure> {
        for number in 0..self.args.requests {
            let due = started + Duration::from_secs_f64(f64::from(number) / self.args.rate.max(0.1));
            while let Some(left) = due.checked_duration_since(Instant::now()) {
                // Nothing can come, and other programs of the machine get this core for it rather than the daemon's.
                if let Some(left) = left.checked_sub(SPIN_BEFORE).filter(|_| self.sent.is_empty()) {
                    std::thread::sleep(left);
                    continue;
                }
                self.turn(left.min(SLEEP_MAX))?;
            }
            self.ask(true);
            self.take();
        }
        Ok(())
    }

    /// Until the gate's places, which these sessions have all used, are free again.
    fn rest(&mut self) -> Result<(), Failure> {
        let rested = Instant::now() + REST;
        while Instant::now() < rested {
            self.turn(SLEEP_MAX)?;
        }
        Ok(())
    }

    fn ask(&mut self, counts: bool) {
        let ports = DATA_PORTS.len() as u32;
        let data_port = DATA_PORTS.start + (self.number % ports) as u16;
        self.number = self.number.wrapping_add(1);
        let request = request(u64::from(self.number), data_port);
        let at = Instant::now();
        match (self.host).ask(self.args.ends.to, self.args.port, request, self.patience) {
            Some(ticket) => {
                self.report.asked += 1;
                self.sent.insert(ticket, (at, counts));
            }
            None => self.report.not_asked += 1,
        }
    }

    fn turn(&mut self, longest: Duration) -> Result<(), Failure> {
        self.host.turn(longest)?;
        self.take();
        Ok(())
    }

    fn take(&mut self) {
        while let Some(Told { ticket, outcome, at }) = self.host.told.pop() {
            let counter = match outcome {
                Outcome::Granted(grant) => {
                    self.report.without_place += u64::from(!grant.lands);
                    if let Some((asked, true)) = self.sent.get(&ticket).filter(|_| grant.lands) {
                        self.latencies.record_ns((at - *asked).as_nanos() as u64);
                    }
                    self.report.granted += 1;
                    self.host.end(ticket);
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
