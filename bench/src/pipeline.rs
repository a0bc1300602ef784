//! One message that is produced, sent, received and consumed: what fine-grained pipelining has to gain (E-UDP §4).
//!
//! Producer and consumer follow a timetable, a window each time, as a disk or a device does, and sleep between. Both ends are on one machine
//! and have one clock.
//!
//! ```text
//!  near: produced window by window ── sent ──▶ far: received ── consumed window by window
//! ```
//!
//! Coarse: a message is sent when all of it is produced, and consumed when all of it has come.

use std::io::Write;
use std::net::SocketAddrV4;
use std::ops::Range;
use std::time::Duration;

use lm_box::split_mix;
use lm_dataplane::{
    ConnectOptions, Endpoint, EndpointConfig, IdleStrategy, LoanError, MemoryConfig, Outcome, PeerId,
    ReceiveConfig,
};
use rustix::time::{ClockId, clock_gettime};
use serde::Serialize;
use sha2::{Digest, Sha256};

use crate::cli::{Failure, chain};

/// Longest sleep.
const STEP: Duration = Duration::from_millis(1);
/// Between two messages: nothing of the last one is under way any more.
const PAUSE_NS: u64 = 100_000_000;
/// Memory beyond one message.
const MEMORY_SPARE: u64 = 16 << 20;

/// One end of a pipeline's measurement.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Which end
    #[arg(value_enum)]
    side: Side,
    /// Interface of this end
    #[arg(long)]
    interface: String,
    /// Near: the far end
    #[arg(long, required_if_eq("side", "near"))]
    to: Option<SocketAddrV4>,
    /// Far: its port
    #[arg(long, default_value_t = 7168)]
    port: u16,
    /// Length of each message in bytes
    #[arg(long, default_value_t = 64 << 20, value_parser = clap::value_parser!(u64).range(1..=1 << 32))]
    len: u64,
    /// What is produced and consumed at once, in bytes
    #[arg(long, default_value_t = 16 * 1448, value_parser = clap::value_parser!(u64).range(1..))]
    window: u64,
    /// At what rate, in bits of payload a second
    #[arg(long, default_value_t = 450_000_000, value_parser = clap::value_parser!(u64).range(1..))]
    pace: u64,
    /// Messages, one after the other
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..))]
    messages: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Side {
    Near,
    Far,
}

/// When a message passed a station, by the machine's monotonic clock in nanoseconds.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
struct Passed {
    /// Near: its first byte is produced from here on.
    #[serde(skip_serializing_if = "Option::is_none")]
    begins_ns: Option<u64>,
    /// Near: all of it is produced; its receiver has confirmed it.
    #[serde(skip_serializing_if = "Option::is_none")]
    produced_ns: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    confirmed_ns: Option<u64>,
    /// Far: its first byte can be read, all of it can.
    #[serde(skip_serializing_if = "Option::is_none")]
    first_ns: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    whole_ns: Option<u64>,
    /// Far: all of it is consumed.
    #[serde(skip_serializing_if = "Option::is_none")]
    consumed_ns: Option<u64>,
    /// Of its bytes.
    sha256: String,
}

/// What an end prints.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// In their order.
    messages: Vec<Passed>,
    /// Processor time of this process for each second that it ran.
    busy: f64,
}

fn failed(error: &dyn std::error::Error) -> Failure {
    Failure::new(chain(error))
}

fn now_ns() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

/// Runs an end. `ready` says that the other one may start.
///
/// # Errors
///
/// [`Failure`]: the endpoint does not open, a message does not come whole, or it has other bytes.
pub fn run(args: &Args, ready: impl FnOnce()) -> Result<Report, Failure> {
    let began_ns = now_ns();
    let messages = match args.side {
        Side::Near => near(args)?,
        Side::Far => far(args, ready)?,
    };
    let spent = clock_gettime(ClockId::ProcessCPUTime);
    let spent_ns = spent.tv_sec as u64 * 1_000_000_000 + spent.tv_nsec as u64;
    Ok(Report {
        messages,
        busy: spent_ns as f64 / (now_ns() - began_ns) as f64,
    })
}

fn open(args: &Args) -> Result<Endpoint, Failure> {
    let is_far = args.side == Side::Far;
    let len = args.len + MEMORY_SPARE;
    let config = EndpointConfig {
        interface: args.interface.clone(),
        port: if is_far { args.port } else { 0 },
        memory: MemoryConfig {
            landing_len: if is_far { 2 * len } else { 0 },
            send_len: if is_far { MEMORY_SPARE } else { 2 * len },
            ..MemoryConfig::default()
        },
        receive: ReceiveConfig {
            max_message_len: args.len,
            ..ReceiveConfig::default()
        },
        idle: IdleStrategy {
            spin: Duration::ZERO,
            yields: 0,
            sleep: Some(STEP),
        },
        ..EndpointConfig::default()
    };
    Endpoint::open(&config).map_err(|error| failed(&error))
}

/// Drives the endpoint until a time.
fn wait_until(endpoint: &mut Endpoint, time_ns: u64) {
    loop {
        let worked = endpoint.poll() > 0;
        let now_ns = now_ns();
        if now_ns >= time_ns {
            return;
        }
        if !worked {
            endpoint.wait(Duration::from_nanos(time_ns - now_ns));
        }
    }
}

/// When which windows of a message are due.
#[derive(Clone, Copy, Debug)]
struct Timetable {
    len: u64,
    window: u64,
    /// Bits a second.
    pace: u64,
}

impl Timetable {
    fn of(args: &Args) -> Timetable {
        Timetable {
            len: args.len,
            window: args.window,
            pace: args.pace,
        }
    }

    /// Each window's bytes.
    fn windows(self) -> impl Iterator<Item = Range<u64>> {
        let starts = (0..self.len).step_by(self.window as usize);
        starts.map(move |start| start..self.len.min(start + self.window))
    }

    /// When these bytes are ready, of a message that begins at a time.
    fn due_ns(self, begins_ns: u64, bytes: &Range<u64>) -> u64 {
        let after = u128::from(bytes.end) * 8 * 1_000_000_000 / u128::from(self.pace);
        begins_ns + after as u64
    }
}

/// The bytes of a message from a place on, which is a multiple of eight: no two of its words are alike.
fn produce(message: u32, from: u64, bytes: &mut [u8]) {
    for (at, eight) in bytes.chunks_mut(8).enumerate() {
        let word = split_mix(u64::from(message), from / 8 + at as u64).to_le_bytes();
        eight.copy_from_slice(&word[..eight.len()]);
    }
}

fn sha256(chunks: impl Iterator<Item = Vec<u8>>) -> String {
    let mut hash = Sha256::new();
    chunks.for_each(|chunk| hash.update(chunk));
    hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
}

fn near(args: &Args) -> Result<Vec<Passed>, Failure> {
    let mut endpoint = open(args)?;
    let options = ConnectOptions {
        max_message_len: args.len,
        ..ConnectOptions::default()
    };
    let to = args.to.expect("the command line asks for it");
    let peer = endpoint.connect(to, &options).map_err(|error| failed(&error))?;
    let mut messages = Vec::new();
    for message in 0..args.messages {
        let begins_ns = now_ns() + PAUSE_NS;
        wait_until(&mut endpoint, begins_ns);
        let timetable = Timetable::of(args);
        let (produced_ns, confirmed_ns) = send(&mut endpoint, peer, message, (begins_ns, timetable))?;
        let produced = timetable.windows().map(|bytes| {
            let mut chunk = vec![0; (bytes.end - bytes.start) as usize];
            produce(message, bytes.start, &mut chunk);
            chunk
        });
        messages.push(Passed {
            begins_ns: Some(begins_ns),
            produced_ns: Some(produced_ns),
            confirmed_ns: Some(confirmed_ns),
            sha256: sha256(produced),
            ..Passed::default()
        });
    }
    Ok(messages)
}

/// Sends one message; when it was produced and when it was confirmed.
fn send(
    endpoint: &mut Endpoint,
    peer: PeerId,
    message: u32,
    (begins_ns, timetable): (u64, Timetable),
) -> Result<(u64, u64), Failure> {
    let mut region = loop {
        match endpoint.loan(peer, timetable.len) {
            Err(LoanError::WouldBlock) => wait_until(endpoint, now_ns() + STEP.as_nanos() as u64),
            region => break region.map_err(|error| failed(&error))?,
        }
    };
    let mut chunk = Vec::new();
    for bytes in timetable.windows() {
        chunk.resize((bytes.end - bytes.start) as usize, 0);
        produce(message, bytes.start, &mut chunk);
        wait_until(endpoint, timetable.due_ns(begins_ns, &bytes));
        region.write_all(&chunk).map_err(|error| failed(&error))?;
    }
    let produced_ns = now_ns();
    endpoint
        .send(region, u64::from(message))
        .map_err(|error| failed(&error))?;
    loop {
        if let Some(completion) = endpoint.try_completion() {
            return match completion.outcome {
                Outcome::Delivered => Ok((produced_ns, now_ns())),
                outcome => Err(Failure::new(format!("message {message} ended as {outcome:?}"))),
            };
        }
        wait_until(endpoint, now_ns() + STEP.as_nanos() as u64);
    }
}

fn far(args: &Args, ready: impl FnOnce()) -> Result<Vec<Passed>, Failure> {
    let mut endpoint = open(args)?;
    ready();
    let mut messages = Vec::new();
    for number in 0..args.messages {
        let message = endpoint.recv(None).map_err(|error| failed(&error))?;
        let whole_ns = now_ns();
        let mut expected = Vec::new();
        let timetable = Timetable::of(args);
        for bytes in timetable.windows() {
            wait_until(&mut endpoint, timetable.due_ns(whole_ns, &bytes));
            let bytes = bytes.start as usize..bytes.end as usize;
            expected.resize(bytes.len(), 0);
            produce(number, bytes.start as u64, &mut expected);
            if message.get(bytes.clone()) != Some(&expected[..]) {
                return Err(Failure::new(format!(
                    "other bytes at {bytes:?} of message {number}"
                )));
            }
        }
        messages.push(Passed {
            first_ns: Some(whole_ns),
            whole_ns: Some(whole_ns),
            consumed_ns: Some(now_ns()),
            sha256: sha256(message.chunks(1 << 20).map(<[u8]>::to_vec)),
            ..Passed::default()
        });
    }
    // The last confirmation may be lost.
    wait_until(&mut endpoint, now_ns() + PAUSE_NS);
    Ok(messages)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn windows_are_due_at_the_pace() {
        let timetable = Timetable {
            len: 2500,
            window: 1000,
            pace: 8_000_000_000,
        };
        let windows: Vec<_> = timetable.windows().collect();
        assert_eq!(windows, [0..1000, 1000..2000, 2000..2500]);
        let due: Vec<_> = windows
            .iter()
            .map(|bytes| timetable.due_ns(1000, bytes))
            .collect();
        assert_eq!(due, [2000, 3000, 3500]);
    }

    #[test]
    fn bytes_do_not_depend_on_where_windows_end() {
        let mut whole = [0; 100];
        produce(3, 0, &mut whole);
        for cut in [8, 16, 64, 96] {
            let mut parts = [0; 100];
            let (first, second) = parts.split_at_mut(cut);
            produce(3, 0, first);
            produce(3, cut as u64, second);
            assert_eq!(parts, whole);
        }
        let mut other = [0; 100];
        produce(4, 0, &mut other);
        assert_ne!(other, whole);
    }
}
