//! One message that is produced, sent, received and consumed: what fine-grained pipelining has to gain (E-UDP §4).
//!
//! Producer and consumer follow a timetable, a window each time, as a disk or a device does, and sleep between; or they work as fast as a core
//! does, which each shares with its end of the way: on one thread, which drives the endpoint after each window. Two threads would give the core
//! to each other by the scheduler's slices of some milliseconds, in which the way runs dry. Both ends are on one machine and have one clock.
//!
//! ```text
//!  near: produced window by window ── sent ──▶ far: received ── consumed window by window
//! ```
//!
//! All four at once: a window is sent when it is produced, and consumed when it has come. One after the other: the message is sent when all of
//! it is produced, and consumed when it is whole.

mod work;

use std::net::SocketAddrV4;
use std::ops::Range;
use std::time::Duration;

use lm_dataplane::{
    ConnectOptions, Endpoint, EndpointConfig, IdleStrategy, Incoming, LoanError, MemoryConfig, Message,
    Outcome, PeerId, ReceiveConfig, SendToken,
};
use rustix::time::{ClockId, clock_gettime};
use serde::Serialize;
use sha2::{Digest, Sha256};

use crate::cli::{Failure, chain};
use work::{Consumer, Producer, Work};

/// Longest sleep.
const STEP: Duration = Duration::from_millis(1);
/// How often is looked whether more has come.
const LOOK: Duration = Duration::from_micros(200);
/// What is shown of a message at once: the session's windows, which are as long as what is produced at once.
const WINDOW_FRAGMENTS: u32 = 16;
/// Between two messages: nothing of the last one is under way any more.
const PAUSE_NS: u64 = 100_000_000;
/// How long the far end may take to answer.
const HELLO: Duration = Duration::from_secs(1);
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
    /// What producer and consumer do
    #[arg(long, value_enum, default_value_t = Work::Timetable)]
    work: Work,
    /// Timetable: its rate, in bits of payload a second
    #[arg(long, default_value_t = 450_000_000, value_parser = clap::value_parser!(u64).range(1..))]
    pace: u64,
    /// One after the other instead of all at once
    #[arg(long)]
    whole: bool,
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
            window_fragments: WINDOW_FRAGMENTS,
            ..ReceiveConfig::default()
        },
        idle: IdleStrategy {
            spin: Duration::ZERO,
            yields: args.work.yields(),
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

/// A step of an endpoint.
fn drive(endpoint: &mut Endpoint) {
    if endpoint.poll() == 0 {
        endpoint.wait(LOOK);
    }
}

/// Leaves the endpoint alone until a time.
fn wait_asleep(time_ns: u64) {
    std::thread::sleep(Duration::from_nanos(time_ns.saturating_sub(now_ns())));
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

fn near(args: &Args) -> Result<Vec<Passed>, Failure> {
    let mut endpoint = open(args)?;
    let options = ConnectOptions {
        max_message_len: args.len,
        ..ConnectOptions::default()
    };
    let to = args.to.expect("the command line asks for it");
    let peer = endpoint.connect(to, &options).map_err(|error| failed(&error))?;
    endpoint
        .send_copy(peer, b"hello", 0)
        .and_then(|_| endpoint.flush(HELLO))
        .map_err(|error| failed(&error))?;
    let mut messages = Vec::new();
    for message in 0..args.messages {
        let begins_ns = now_ns() + PAUSE_NS;
        wait_until(&mut endpoint, begins_ns);
        let timetable = Timetable::of(args);
        let producer = Producer::new(args.work, message);
        let (produced_ns, confirmed_ns) = match args.whole {
            true => send_whole(&mut endpoint, peer, producer, (begins_ns, timetable))?,
            false => send(&mut endpoint, peer, producer, (begins_ns, timetable))?,
        };
        let mut again = Producer::new(args.work, message);
        let mut hash = Sha256::new();
        for bytes in timetable.windows() {
            let mut chunk = vec![0; (bytes.end - bytes.start) as usize];
            again.fill(bytes.start, &mut chunk);
            hash.update(chunk);
        }
        messages.push(Passed {
            begins_ns: Some(begins_ns),
            produced_ns: Some(produced_ns),
            confirmed_ns: Some(confirmed_ns),
            sha256: work::hex(hash),
            ..Passed::default()
        });
    }
    Ok(messages)
}

/// Fills the payloads of the bytes that a message has next.
fn fill<'a>(producer: &mut Producer, bytes: &Range<u64>, payloads: impl Iterator<Item = &'a mut [u8]>) {
    let mut from = bytes.start;
    for payload in payloads {
        producer.fill(from, payload);
        from += payload.len() as u64;
        if from >= bytes.end {
            break;
        }
    }
}

/// Memory for a message, as soon as there is some.
fn begin<T>(
    endpoint: &mut Endpoint,
    mut ask: impl FnMut(&mut Endpoint) -> Result<T, LoanError>,
) -> Result<T, Failure> {
    loop {
        match ask(endpoint) {
            Err(LoanError::WouldBlock) => wait_until(endpoint, now_ns() + STEP.as_nanos() as u64),
            begun => return begun.map_err(|error| failed(&error)),
        }
    }
}

/// Sends one message while it is produced, window by window on the endpoint's own thread; when it was produced and when it was confirmed.
fn send(
    endpoint: &mut Endpoint,
    peer: PeerId,
    mut producer: Producer,
    (begins_ns, timetable): (u64, Timetable),
) -> Result<(u64, u64), Failure> {
    let mut writer = begin(endpoint, |endpoint| {
        endpoint.peer(peer).begin(timetable.len, producer.tag())
    })?;
    for bytes in timetable.windows() {
        fill(&mut producer, &bytes, writer.payloads_mut());
        wait_until(endpoint, producer.due_ns(timetable.due_ns(begins_ns, &bytes)));
        if bytes.end < timetable.len {
            writer.release(bytes.end).map_err(|error| failed(&error))?;
        }
    }
    writer.finish().map_err(|error| failed(&error))?;
    let produced_ns = now_ns();
    Ok((produced_ns, confirmed(endpoint, writer.token())?))
}

/// The same with a message that is sent when all of it is produced.
fn send_whole(
    endpoint: &mut Endpoint,
    peer: PeerId,
    mut producer: Producer,
    (begins_ns, timetable): (u64, Timetable),
) -> Result<(u64, u64), Failure> {
    let mut region = begin(endpoint, |endpoint| endpoint.loan(peer, timetable.len))?;
    fill(&mut producer, &(0..timetable.len), region.payloads_mut());
    wait_asleep(producer.due_ns(timetable.due_ns(begins_ns, &(0..timetable.len))));
    let produced_ns = now_ns();
    let token = endpoint
        .send(region, producer.tag())
        .map_err(|error| failed(&error))?;
    Ok((produced_ns, confirmed(endpoint, token)?))
}

/// When a message was confirmed.
fn confirmed(endpoint: &mut Endpoint, token: SendToken) -> Result<u64, Failure> {
    loop {
        // The first word has one, too.
        let mut completions = std::iter::from_fn(|| endpoint.try_completion());
        if let Some(completion) = completions.find(|completion| completion.token == token) {
            return match completion.outcome {
                Outcome::Delivered => Ok(now_ns()),
                outcome => Err(Failure::new(format!(
                    "message {} ended as {outcome:?}",
                    completion.tag
                ))),
            };
        }
        wait_until(endpoint, now_ns() + STEP.as_nanos() as u64);
    }
}

fn far(args: &Args, ready: impl FnOnce()) -> Result<Vec<Passed>, Failure> {
    let mut endpoint = open(args)?;
    ready();
    // Who sends is known by a first word, and what that one sends is read from then on while it comes.
    let peer = endpoint.recv(None).map_err(|error| failed(&error))?.peer();
    if !args.whole {
        endpoint.peer(peer).watch();
    }
    let timetable = Timetable::of(args);
    let mut messages = Vec::new();
    for number in 0..args.messages {
        let mut consumer = Consumer::new(args.work, number);
        let (message, whole_ns, [first_ns, consumed_ns]) = match args.whole {
            true => receive_whole(&mut endpoint, &mut consumer, timetable)?,
            false => receive(&mut endpoint, &mut consumer, timetable)?,
        };
        let mut hash = Sha256::new();
        hash.update(&message[..]);
        let sha256 = work::hex(hash);
        consumer.check(&sha256)?;
        messages.push(Passed {
            first_ns: Some(first_ns),
            whole_ns: Some(whole_ns),
            consumed_ns: Some(consumed_ns),
            sha256,
            ..Passed::default()
        });
    }
    // The last confirmation may be lost.
    wait_until(&mut endpoint, now_ns() + PAUSE_NS);
    Ok(messages)
}

/// Receives one message and consumes it meanwhile, window by window on the endpoint's own thread; when it was whole, when its first byte could
/// be read, and when its last one was consumed.
fn receive(
    endpoint: &mut Endpoint,
    consumer: &mut Consumer,
    timetable: Timetable,
) -> Result<(Message, u64, [u64; 2]), Failure> {
    let incoming = loop {
        match endpoint.try_incoming() {
            Some(incoming) => break incoming,
            None => drive(endpoint),
        }
    };
    let (mut first_ns, mut whole_ns) = (None, None);
    for bytes in timetable.windows() {
        let come = when_come(endpoint, &incoming, bytes.clone())?;
        let begins_ns = *first_ns.get_or_insert_with(now_ns);
        wait_until(endpoint, consumer.due_ns(timetable.due_ns(begins_ns, &bytes)));
        if incoming.settled().is_some() {
            whole_ns.get_or_insert_with(now_ns);
        }
        consumer.take(bytes.start, come)?;
    }
    let consumed_ns = now_ns();
    let message = endpoint.recv(None).map_err(|error| failed(&error))?;
    if incoming.get(0..timetable.len).map(<[u8]>::as_ptr) != Some(message.as_ptr()) {
        return Err(Failure::new(
            "a message came whole at another place than it was shown",
        ));
    }
    let [whole_ns, first_ns] = [whole_ns, first_ns].map(|time| time.unwrap_or(consumed_ns));
    Ok((message, whole_ns, [first_ns, consumed_ns]))
}

/// These bytes of a message, when they have come.
fn when_come<'a>(
    endpoint: &mut Endpoint,
    incoming: &'a Incoming,
    bytes: Range<u64>,
) -> Result<&'a [u8], Failure> {
    loop {
        let settled = incoming.settled();
        match (incoming.get(bytes.clone()), settled) {
            (Some(come), _) => return Ok(come),
            (None, Some(how)) => {
                return Err(Failure::new(format!(
                    "a message ended as {how:?}, without {bytes:?}"
                )));
            }
            (None, None) => drive(endpoint),
        }
    }
}

/// Receives one message and consumes it when it is whole; the same times.
fn receive_whole(
    endpoint: &mut Endpoint,
    consumer: &mut Consumer,
    timetable: Timetable,
) -> Result<(Message, u64, [u64; 2]), Failure> {
    let message = endpoint.recv(None).map_err(|error| failed(&error))?;
    let whole_ns = now_ns();
    for bytes in timetable.windows() {
        wait_asleep(consumer.due_ns(timetable.due_ns(whole_ns, &bytes)));
        consumer.take(bytes.start, &message[bytes.start as usize..bytes.end as usize])?;
    }
    Ok((message, whole_ns, [whole_ns, now_ns()]))
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
}
