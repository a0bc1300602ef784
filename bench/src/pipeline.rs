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

#[expect(unsafe_code, reason = "memory that the kernel reads while it sends")]
mod loaned;
mod model;
mod peers;
pub mod predict;
mod work;

use std::io::IoSliceMut;
use std::net::SocketAddrV4;
use std::ops::Range;
use std::time::Duration;

use lm_dataplane::{
    ConnectOptions, Endpoint, EndpointConfig, IdleStrategy, Incoming, LoanError, MemoryConfig, Message,
    Outcome, PeerId, ReceiveConfig, SendToken,
};
use rustix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::cli::{self, Failure, chain};
use peers::Transport;
use work::{Consumer, Producer, Work};

/// Longest sleep.
const STEP: Duration = Duration::from_millis(1);
/// How often is looked whether more has come.
const LOOK: Duration = Duration::from_micros(200);
/// Payload of a full fragment in packets of 1500 bytes.
const FRAGMENT: u64 = 1448;
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
    /// What moves them: LM, or what the kernel has, which knows --work keystream alone and no --whole
    #[arg(long, value_enum, default_value_t = Transport::Lm)]
    transport: Transport,
    /// What is produced, shown and consumed at once: the session's windows, in fragments
    #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..))]
    window: u32,
    /// What producer and consumer do
    #[arg(long, value_enum, default_value_t = Work::Timetable)]
    work: Work,
    /// Timetable: its rate, in bits of payload a second
    #[arg(long, default_value_t = 450_000_000, value_parser = clap::value_parser!(u64).range(1..))]
    pace: u64,
    /// Near: a producer that takes so many times as long
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    slower: u32,
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
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize)]
pub(crate) struct Passed {
    /// Near: its first byte is produced from here on, and can be sent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) begins_ns: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) released_ns: Option<u64>,
    /// Near: all of it is produced; its receiver has confirmed it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) produced_ns: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) confirmed_ns: Option<u64>,
    /// Far: its first byte can be read, all of it can.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) first_ns: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) whole_ns: Option<u64>,
    /// Far: all of it is consumed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) consumed_ns: Option<u64>,
    #[serde(flatten)]
    pub(crate) worked: Worked,
    /// How long this end took to send or to receive it, without what it waited. Receiving a message that is read when it is whole is not told.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) moved_ns: Option<u64>,
    /// Of its bytes.
    sha256: String,
}

/// An endpoint, and how long it took to do what there was to do.
struct End {
    endpoint: Endpoint,
    moved_ns: u64,
}

impl End {
    /// One round; whether there was anything to do.
    fn poll(&mut self) -> bool {
        let begins_ns = now_ns();
        let worked = self.endpoint.poll() > 0;
        if worked {
            self.moved_ns += now_ns() - begins_ns;
        }
        worked
    }

    /// Drives the endpoint until a time.
    fn wait_until(&mut self, time_ns: u64) {
        loop {
            let worked = self.poll();
            let now_ns = now_ns();
            if now_ns >= time_ns {
                return;
            }
            if !worked {
                self.endpoint.wait(Duration::from_nanos(time_ns - now_ns));
            }
        }
    }

    /// One round, and a step of the idle strategy where there was nothing to do.
    fn drive(&mut self) {
        if !self.poll() {
            self.endpoint.wait(LOOK);
        }
    }
}

/// What producing or consuming a message took.
#[derive(Clone, Copy, Debug, Default, PartialEq, Deserialize, Serialize)]
pub(crate) struct Worked {
    /// Without what it waited, but with what else had the core meanwhile.
    #[serde(rename = "worked_ns")]
    pub(crate) ns: u64,
    /// Processor time of its thread.
    #[serde(rename = "worked_cpu_ns", default)]
    cpu_ns: u64,
}

impl Worked {
    /// Adds what this takes.
    fn at<T>(&mut self, what: impl FnOnce() -> T) -> T {
        let (begins_ns, cpu_ns) = (now_ns(), read_ns(ClockId::ThreadCPUTime));
        let result = what();
        self.ns += now_ns() - begins_ns;
        self.cpu_ns += read_ns(ClockId::ThreadCPUTime) - cpu_ns;
        result
    }
}

/// What an end prints.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// In their order.
    messages: Vec<Passed>,
    /// Processor time of this process for each second that it ran.
    busy: f64,
    /// Near, where the kernel was asked to send without a copy: whether it copied all the same.
    #[serde(skip_serializing_if = "Option::is_none")]
    copied: Option<bool>,
}

fn failed(error: &dyn std::error::Error) -> Failure {
    Failure::new(chain(error))
}

fn now_ns() -> u64 {
    read_ns(ClockId::Monotonic)
}

fn read_ns(clock: ClockId) -> u64 {
    let time = clock_gettime(clock);
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

/// Runs an end. `ready` says that the other one may start.
///
/// # Errors
///
/// [`Failure`]: the endpoint does not open, a message does not come whole, or it has other bytes.
pub fn run(args: &Args, ready: impl FnOnce()) -> Result<Report, Failure> {
    let began_ns = now_ns();
    let (messages, copied) = match (args.transport, args.side) {
        (Transport::Lm, Side::Near) => (near(args)?, None),
        (Transport::Lm, Side::Far) => (far(args, ready)?, None),
        _ if args.whole || args.work != Work::Keystream => {
            let text = "LM alone has a timetable and --whole; give --work keystream";
            return Err(Failure::usage(text));
        }
        (_, Side::Near) => peers::near(args)?,
        (_, Side::Far) => (peers::far(args, ready)?, None),
    };
    Ok(Report {
        messages,
        busy: read_ns(ClockId::ProcessCPUTime) as f64 / (now_ns() - began_ns) as f64,
        copied,
    })
}

fn open(args: &Args) -> Result<End, Failure> {
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
            yields: args.work.yields(),
            sleep: Some(STEP),
        },
        ..EndpointConfig::default()
    };
    let endpoint = Endpoint::open(&config).map_err(|error| failed(&error))?;
    Ok(End {
        endpoint,
        moved_ns: 0,
    })
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
            window: u64::from(args.window) * FRAGMENT,
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
    let mut end = open(args)?;
    let options = ConnectOptions {
        max_message_len: args.len,
        window: cli::window(args.window).map_err(Failure::usage)?,
        ..ConnectOptions::default()
    };
    let to = args.to.expect("the command line asks for it");
    let endpoint = &mut end.endpoint;
    let peer = endpoint.connect(to, &options).map_err(|error| failed(&error))?;
    endpoint
        .send_copy(peer, b"hello", 0)
        .and_then(|_| endpoint.flush(HELLO))
        .map_err(|error| failed(&error))?;
    let timetable = Timetable::of(args);
    let slower = Timetable {
        pace: args.pace / u64::from(args.slower),
        ..timetable
    };
    let mut messages = Vec::new();
    for message in 0..args.messages {
        let begins_ns = now_ns() + PAUSE_NS;
        let producer = Producer::new(args.work, message, args.len, args.slower)?;
        end.wait_until(begins_ns);
        end.moved_ns = 0;
        let mut passed = match args.whole {
            true => send_whole(&mut end, peer, producer, (begins_ns, slower))?,
            false => send(&mut end, peer, producer, (begins_ns, slower))?,
        };
        passed.sha256 = sha256(args, message)?;
        messages.push(passed);
    }
    Ok(messages)
}

/// Of the bytes that are produced of a message.
fn sha256(args: &Args, message: u32) -> Result<String, Failure> {
    let mut producer = Producer::new(args.work, message, args.len, 1)?;
    let mut hash = Sha256::new();
    for bytes in Timetable::of(args).windows() {
        let mut chunk = vec![0; (bytes.end - bytes.start) as usize];
        producer.fill(bytes.start, &mut [IoSliceMut::new(&mut chunk)])?;
        hash.update(chunk);
    }
    Ok(work::hex(hash))
}

/// Fills the payloads of the bytes that a message has next.
fn fill<'a>(
    producer: &mut Producer,
    bytes: &Range<u64>,
    payloads: impl Iterator<Item = &'a mut [u8]>,
) -> Result<(), Failure> {
    let mut left = bytes.end - bytes.start;
    let payloads = payloads.map_while(|payload| {
        let is_wanted = left > 0;
        left = left.saturating_sub(payload.len() as u64);
        is_wanted.then(|| IoSliceMut::new(payload))
    });
    producer.fill(bytes.start, &mut payloads.collect::<Vec<_>>())
}

/// Memory for a message, as soon as there is some.
fn begin<T>(end: &mut End, mut ask: impl FnMut(&mut Endpoint) -> Result<T, LoanError>) -> Result<T, Failure> {
    loop {
        match ask(&mut end.endpoint) {
            Err(LoanError::WouldBlock) => end.wait_until(now_ns() + STEP.as_nanos() as u64),
            begun => return begun.map_err(|error| failed(&error)),
        }
    }
}

/// Sends one message while it is produced, window by window on the endpoint's own thread; all but its hash.
fn send(
    end: &mut End,
    peer: PeerId,
    mut producer: Producer,
    (begins_ns, timetable): (u64, Timetable),
) -> Result<Passed, Failure> {
    let mut writer = begin(end, |endpoint| {
        endpoint.peer(peer).begin(timetable.len, producer.tag())
    })?;
    let (mut worked, mut released_ns) = (Worked::default(), None);
    for bytes in timetable.windows() {
        worked.at(|| fill(&mut producer, &bytes, writer.payloads_mut()))?;
        end.wait_until(producer.due_ns(timetable.due_ns(begins_ns, &bytes)));
        released_ns.get_or_insert_with(now_ns);
        if bytes.end < timetable.len {
            writer.release(bytes.end).map_err(|error| failed(&error))?;
        }
    }
    writer.finish().map_err(|error| failed(&error))?;
    let passed = Passed {
        begins_ns: Some(begins_ns),
        released_ns,
        produced_ns: Some(now_ns()),
        worked,
        ..Passed::default()
    };
    sent(end, writer.token(), passed)
}

/// The same with a message that is sent when all of it is produced.
fn send_whole(
    end: &mut End,
    peer: PeerId,
    mut producer: Producer,
    (begins_ns, timetable): (u64, Timetable),
) -> Result<Passed, Failure> {
    let mut region = begin(end, |endpoint| endpoint.loan(peer, timetable.len))?;
    let mut worked = Worked::default();
    worked.at(|| fill(&mut producer, &(0..timetable.len), region.payloads_mut()))?;
    end.wait_until(producer.due_ns(timetable.due_ns(begins_ns, &(0..timetable.len))));
    let produced_ns = Some(now_ns());
    let token = (end.endpoint)
        .send(region, producer.tag())
        .map_err(|error| failed(&error))?;
    let passed = Passed {
        begins_ns: Some(begins_ns),
        released_ns: produced_ns,
        produced_ns,
        worked,
        ..Passed::default()
    };
    sent(end, token, passed)
}

/// What is to be told of a message when it is confirmed.
fn sent(end: &mut End, token: SendToken, passed: Passed) -> Result<Passed, Failure> {
    Ok(Passed {
        confirmed_ns: Some(confirmed(end, token)?),
        moved_ns: Some(end.moved_ns),
        ..passed
    })
}

/// When a message was confirmed.
fn confirmed(end: &mut End, token: SendToken) -> Result<u64, Failure> {
    loop {
        // The first word has one, too.
        let mut completions = std::iter::from_fn(|| end.endpoint.try_completion());
        if let Some(completion) = completions.find(|completion| completion.token == token) {
            return match completion.outcome {
                Outcome::Delivered => Ok(now_ns()),
                outcome => Err(Failure::new(format!(
                    "message {} ended as {outcome:?}",
                    completion.tag
                ))),
            };
        }
        end.wait_until(now_ns() + STEP.as_nanos() as u64);
    }
}

fn far(args: &Args, ready: impl FnOnce()) -> Result<Vec<Passed>, Failure> {
    let mut end = open(args)?;
    ready();
    // Who sends is known by a first word, and what that one sends is read from then on while it comes.
    let peer = (end.endpoint.recv(None)).map_err(|error| failed(&error))?.peer();
    if !args.whole {
        end.endpoint.peer(peer).watch();
    }
    let timetable = Timetable::of(args);
    let mut messages = Vec::new();
    for number in 0..args.messages {
        let mut consumer = Consumer::new(args.work, number)?;
        end.moved_ns = 0;
        let (message, mut passed) = match args.whole {
            true => receive_whole(&mut end, &mut consumer, timetable)?,
            false => receive(&mut end, &mut consumer, timetable)?,
        };
        let mut hash = Sha256::new();
        hash.update(&message[..]);
        passed.sha256 = work::hex(hash);
        consumer.check(&message)?;
        messages.push(passed);
    }
    // The last confirmation may be lost.
    end.wait_until(now_ns() + PAUSE_NS);
    Ok(messages)
}

/// Receives one message and consumes it meanwhile, window by window on the endpoint's own thread; all but its hash.
fn receive(
    end: &mut End,
    consumer: &mut Consumer,
    timetable: Timetable,
) -> Result<(Message, Passed), Failure> {
    let incoming = loop {
        match end.endpoint.try_incoming() {
            Some(incoming) => break incoming,
            None => end.drive(),
        }
    };
    let (mut first_ns, mut whole_ns, mut worked) = (None, None, Worked::default());
    for bytes in timetable.windows() {
        let come = when_come(end, &incoming, bytes.clone())?;
        let begins_ns = *first_ns.get_or_insert_with(now_ns);
        end.wait_until(consumer.due_ns(timetable.due_ns(begins_ns, &bytes)));
        if incoming.settled().is_some() {
            whole_ns.get_or_insert_with(now_ns);
        }
        worked.at(|| consumer.take(bytes.start, come))?;
    }
    let consumed_ns = now_ns();
    let message = end.endpoint.recv(None).map_err(|error| failed(&error))?;
    if incoming.bytes(0..timetable.len).map(<[u8]>::as_ptr) != Ok(message.as_ptr()) {
        return Err(Failure::new(
            "a message came whole at another place than it was shown",
        ));
    }
    let passed = Passed {
        first_ns,
        whole_ns: whole_ns.or(Some(consumed_ns)),
        consumed_ns: Some(consumed_ns),
        worked,
        moved_ns: Some(end.moved_ns),
        ..Passed::default()
    };
    Ok((message, passed))
}

/// These bytes of a message, when they have come.
fn when_come<'a>(end: &mut End, incoming: &'a Incoming, bytes: Range<u64>) -> Result<&'a [u8], Failure> {
    loop {
        let settled = incoming.settled();
        match (incoming.bytes(bytes.clone()), settled) {
            (Ok(come), _) => return Ok(come),
            (Err(_), Some(how)) => {
                return Err(Failure::new(format!(
                    "a message ended as {how:?}, without {bytes:?}"
                )));
            }
            (Err(_), None) => end.drive(),
        }
    }
}

/// The same with a message that is consumed when it is whole.
fn receive_whole(
    end: &mut End,
    consumer: &mut Consumer,
    timetable: Timetable,
) -> Result<(Message, Passed), Failure> {
    let message = end.endpoint.recv(None).map_err(|error| failed(&error))?;
    let whole_ns = now_ns();
    let mut worked = Worked::default();
    for bytes in timetable.windows() {
        end.wait_until(consumer.due_ns(timetable.due_ns(whole_ns, &bytes)));
        let come = &message[bytes.start as usize..bytes.end as usize];
        worked.at(|| consumer.take(bytes.start, come))?;
    }
    let passed = Passed {
        first_ns: Some(whole_ns),
        whole_ns: Some(whole_ns),
        consumed_ns: Some(now_ns()),
        worked,
        ..Passed::default()
    };
    Ok((message, passed))
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
