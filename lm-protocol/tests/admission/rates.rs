//! How long grants take and how much of what could be used is used, for both policies, as a table.
//!
//! `cargo xtask soak --admission` prints it for up to a thousand hosts.

use crate::world::*;
use lm_protocol::time::Time;
use std::time::Duration;

/// Link rate, in bits per nanosecond.
const LINK: u64 = 10;
/// Shortest and longest message, in powers of two: 64 KiB to 64 MiB, evenly in their logarithms.
const LENS: (u64, u64) = (16, 26);
/// The voters may vote, and hosts have met.
const WARM: Duration = Duration::from_millis(2500);

/// One line of the table.
pub(crate) struct Rates {
    requests: usize,
    /// Parts of all requests.
    pub(crate) granted: f64,
    one_copy: f64,
    cancelled: f64,
    timed_out: f64,
    p50: Duration,
    pub(crate) p99: Duration,
    /// Session time, as a part of what the policy could grant.
    pub(crate) utilisation: f64,
}

fn hold(len: u64) -> Duration {
    Duration::from_nanos(len * 8 / LINK)
}

/// `load`: offered session time, as a part of what the policy could grant: one session at a time, or one for each host.
pub(crate) fn measure(hosts: usize, voters: usize, load: f64, requests: usize) -> Rates {
    let mut setup = Setup::new(hosts as u64, hosts, voters);
    setup.patience = Duration::from_secs(2);
    setup.datagrams_max = u64::MAX;
    let mut world = World::new(setup);
    let mut random = Random(hosts as u64 ^ 0x7a7e);
    let mean_hold = (LENS.0..LENS.1)
        .map(|power| hold(3 << power).as_secs_f64() / 2.0)
        .sum::<f64>()
        / (LENS.1 - LENS.0) as f64;
    let capacity = if voters > 0 { 1.0 } else { hosts as f64 };
    let mean_gap = mean_hold / (load * capacity);
    let start = Time::ZERO + WARM;
    let mut at = 0.0;
    for _ in 0..requests {
        let uniform = (random.next() >> 11) as f64 / (1u64 << 53) as f64;
        at += -(1.0 - uniform).ln() * mean_gap;
        let power = LENS.0 + random.below(LENS.1 - LENS.0);
        let len = (1 << power) + random.below(1 << power);
        let sender = random.below(hosts as u64) as usize;
        let receiver = (sender + 1 + random.below(hosts as u64 - 1) as usize) % hosts;
        world.job(
            start + Duration::from_secs_f64(at),
            sender,
            receiver,
            len,
            hold(len),
        );
    }
    world.run(Time::MAX);
    world.check_quiet();
    // From the first request to the last session's end.
    let ends = world.jobs.iter().filter_map(|job| Some(job.granted? + job.hold));
    let span = ends.max().map_or(1.0, |end| end.since(start).as_secs_f64());
    let part = |fate| world.jobs.iter().filter(|job| job.fate == fate).count() as f64 / requests as f64;
    let mut waits: Vec<Duration> = world
        .jobs
        .iter()
        .filter_map(|job| Some(job.granted?.since(job.asked)))
        .collect();
    waits.sort();
    let quantile = |q: f64| {
        waits
            .get(((waits.len() as f64 * q) as usize).min(waits.len().saturating_sub(1)))
            .copied()
            .unwrap_or_default()
    };
    let in_session: f64 = world
        .jobs
        .iter()
        .filter(|job| job.granted.is_some())
        .map(|job| job.hold.as_secs_f64())
        .sum();
    Rates {
        requests,
        granted: part(Fate::Done),
        one_copy: part(Fate::OneCopy),
        cancelled: part(Fate::Cancelled),
        timed_out: part(Fate::TimedOut),
        p50: quantile(0.5),
        p99: quantile(0.99),
        utilisation: in_session / (span * capacity),
    }
}

fn print_line(policy: &str, hosts: usize, load: f64, rates: &Rates) {
    let percent = |part: f64| format!("{:.1} %", 100.0 * part);
    let micros = |wait: Duration| format!("{:.2} ms", wait.as_secs_f64() * 1e3);
    println!(
        "| {policy} | {hosts} | {load:.1} | {} | {} | {} | {} | {} | {} | {} | {} |",
        rates.requests,
        percent(rates.granted),
        percent(rates.one_copy),
        percent(rates.cancelled),
        percent(rates.timed_out),
        micros(rates.p50),
        micros(rates.p99),
        percent(rates.utilisation),
    );
}

#[test]
fn both_policies_use_what_they_have() {
    let light = measure(10, 0, 0.1, 400);
    assert!(
        light.granted > 0.99 && light.utilisation > 0.05,
        "{:.3}",
        light.granted
    );
    let heavy = measure(10, 0, 0.9, 400);
    assert!(heavy.utilisation > 0.5, "{:.3}", heavy.utilisation);
    let one = measure(10, 3, 0.5, 400);
    assert!(one.granted > 0.3 && one.utilisation < 1.0, "{:.3}", one.granted);
    // Asking the voters costs round trips, but no waiting for others.
    assert!(one.p99 < Duration::from_millis(2), "{:?}", one.p99);
}

/// The table: with `LM_ADMISSION_TABLE` in the environment all of it, in a minute or two of a release build, else its corners.
#[test]
fn table() {
    let whole = std::env::var_os("LM_ADMISSION_TABLE").is_some();
    let (all_hosts, loads): (&[usize], &[f64]) = match whole {
        true => (&[10, 100, 1000], &[0.1, 0.5, 0.9, 1.5]),
        false => (&[10, 100], &[0.1, 1.5]),
    };
    println!(
        "| policy | hosts | load | requests | granted | one-copy | cancelled | timed out | wait p50 | p99 | \
         utilisation |"
    );
    println!("|---|---|---|---|---|---|---|---|---|---|---|");
    for &hosts in all_hosts {
        for (policy, voters) in [("exclusive", 3), ("concurrent", 0)] {
            for &load in loads {
                let requests = match (voters, hosts) {
                    _ if !whole => 200,
                    (0, 100) => 10_000,
                    (0, _) => 20 * hosts.max(100),
                    (_, 1000) => 500,
                    _ => 2000,
                };
                let rates = measure(hosts, voters, load, requests);
                print_line(policy, hosts, load, &rates);
                let line = format!("{policy}, {hosts} hosts, load {load}");
                let known = rates.granted + rates.one_copy + rates.cancelled + rates.timed_out;
                assert!(
                    (known - 1.0).abs() < 1e-9,
                    "{line}: requests without an end, {known}"
                );
                assert!(
                    rates.granted > 0.0 && rates.utilisation <= 1.0 && rates.p50 <= rates.p99,
                    "{line}: {:.3} granted, {:.3} used",
                    rates.granted,
                    rates.utilisation
                );
            }
        }
    }
}
