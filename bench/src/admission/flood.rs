//! What no daemon may believe, at a steady rate: messages that were altered, cut, or sent before.

use std::time::{Duration, Instant};

use clap::Args;
use lm_box::split_mix;
use serde::Serialize;

use super::host::Host;
use super::{Ends, request};
use crate::cli::Failure;

/// Nobody receives there: what is authentic is refused, and takes no place.
const DATA_PORT: u16 = 9;
/// How long the daemon may take to answer the message that is altered and repeated.
const PATIENCE: Duration = Duration::from_secs(3);

/// Arguments of `admission flood`.
#[derive(Debug, Clone, Args)]
pub struct FloodArgs {
    /// The ends
    #[command(flatten)]
    pub ends: Ends,
    /// Datagrams a second
    #[arg(long, default_value_t = 20_000, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub rate: u32,
    /// Seconds
    #[arg(long, default_value_t = 10.0)]
    pub seconds: f64,
    /// Decides what is altered and where it is cut
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
}

/// What `admission flood` prints.
#[derive(Debug, Default, Serialize)]
pub(super) struct FloodReport {
    /// Name of the program.
    pub program: &'static str,
    /// Authentic messages with a bit that is not its sender's.
    pub altered: u64,
    /// Authentic messages without their end.
    pub truncated: u64,
    /// Authentic messages that the daemon has taken before.
    pub replayed: u64,
    /// By the program's own clock.
    pub seconds: f64,
}

/// Runs `admission flood`.
///
/// # Errors
///
/// A one-line reason when the key cannot be read, the socket not be opened, or the daemon not be reached.
pub(super) fn flood(args: &FloodArgs, ready: impl FnOnce()) -> Result<FloodReport, Failure> {
    let mut host = Host::new(&args.ends)?;
    let to = args.ends.to;
    // The second one is from a life that the daemon knows by then: its replay is known for one by its number.
    let mut authentic = None;
    for sender in 1..=2 {
        host.ask(to, DATA_PORT, request(sender, DATA_PORT), PATIENCE);
        let deadline = Instant::now() + 2 * PATIENCE;
        while host.told.is_empty() && Instant::now() < deadline {
            authentic = host.last_sent.or(authentic);
            host.turn(Duration::from_millis(10))?;
        }
        if host.counters().accepted == 0 {
            return Err(Failure::new(format!("the daemon at {to} does not answer")));
        }
        host.told.clear();
    }
    let Some(authentic) = authentic else {
        return Err(Failure::new(
            "nothing was sent that could be repeated; is the network up?",
        ));
    };
    ready();
    let mut report = FloodReport {
        program: "admission-flood",
        ..FloodReport::default()
    };
    let started = Instant::now();
    let end = started + Duration::from_secs_f64(args.seconds.clamp(0.0, 3600.0));
    let mut number = 0_u64;
    while Instant::now() < end {
        let due = (started.elapsed().as_secs_f64() * f64::from(args.rate)) as u64;
        if number >= due {
            std::thread::sleep(Duration::from_micros(500));
        }
        while number < due {
            let mut bytes = authentic.as_bytes().to_vec();
            let random = split_mix(args.seed, number);
            let at = (random >> 8) as usize % bytes.len();
            let counter = match number % 3 {
                0 => {
                    bytes[at] ^= 1 << (random & 7);
                    &mut report.altered
                }
                1 => {
                    bytes.truncate(at);
                    &mut report.truncated
                }
                _ => &mut report.replayed,
            };
            *counter += u64::from(host.send_raw(to, &bytes));
            number += 1;
        }
        // Answers are taken, lest they fill the socket.
        host.turn(Duration::ZERO)?;
        host.told.clear();
    }
    report.seconds = started.elapsed().as_secs_f64();
    Ok(report)
}
