//! One-way stream of messages between two endpoints.

use std::net::SocketAddrV4;
use std::num::NonZeroU64;
use std::time::{Duration, Instant};

use clap::Args;
use lm_dataplane::{ConnectOptions, Endpoint, LoanError, Message, PeerId, RecvError, SendError, Start};
use serde::Serialize;
use serde_json::Value;

use super::{EndpointArgs, connect};
use crate::cli::{DeliveryOption, Failure, IntegrityOption, chain, parse_rate};
use crate::link;
use crate::size::ByteSize;

/// Each message begins with a 64-bit sequence number.
const SEQUENCE_LEN: usize = 8;
/// Tag of messages that carry a report instead of payload.
const REPORT: u64 = u64::MAX;

/// A stream that is silent for so long has ended.
const SILENCE: Duration = Duration::from_secs(1);
/// Nobody sends for so long, and not all senders have come: they will not.
const GATHERING: Duration = Duration::from_secs(3);
/// A report goes as a message of one packet, also where the MTU is small, and without a session.
const REPORT_LEN_MAX: usize = 500;

/// Arguments of `lm-stream-send`.
#[derive(Debug, Clone, Args)]
pub struct SendArgs {
    /// The receiving endpoint
    #[arg(long, value_name = "HOST[:PORT]")]
    pub to: String,
    /// Options of the endpoint
    #[command(flatten)]
    pub endpoint: EndpointArgs,
    /// Message length
    #[arg(long, default_value = "64K")]
    pub message_size: ByteSize,
    /// Seconds to send
    #[arg(long, default_value_t = 2.0)]
    pub seconds: f64,
    /// Messages that may be unconfirmed
    #[arg(long, default_value_t = 16)]
    pub in_flight: u32,
    /// What becomes of messages that lose fragments
    #[arg(long, value_enum, default_value_t = DeliveryOption::Reliable)]
    pub delivery: DeliveryOption,
    /// Most to send, in bits per second of Ethernet frames: 500Mbit, 2.5G [default: no limit]
    #[arg(long, value_name = "BITS", value_parser = parse_rate)]
    pub rate: Option<NonZeroU64>,
    /// Whether digests go with what is sent
    #[arg(long, value_enum, default_value_t = IntegrityOption::Manifest)]
    pub integrity: IntegrityOption,
}

/// What `lm-stream-send` prints.
#[derive(Debug, Serialize)]
pub struct SendReport {
    /// Name of the program.
    pub program: &'static str,
    /// Payload handed over.
    pub bytes: u64,
    /// Messages handed over.
    pub messages: u64,
    /// By the sender's clock.
    pub seconds: f64,
    /// Mode in effect.
    pub mode: &'static str,
    /// Whether digests went with what was sent.
    pub integrity: IntegrityOption,
    /// The receiver's report; `{}` when none came.
    pub receiver: Value,
}

/// The receiver looks at its clock once in so many bytes: for each small message it would be felt.
const BYTES_PER_LOOK: u64 = 16 << 10;

/// Arguments of `lm-stream-recv`.
#[derive(Debug, Clone, Args)]
pub struct ReceiveArgs {
    /// UDP port for data; control has the next one
    #[arg(long, default_value_t = lm_dataplane::DEFAULT_PORT)]
    pub port: u16,
    /// Options of the endpoint
    #[command(flatten)]
    pub endpoint: EndpointArgs,
    /// Longest message to expect
    #[arg(long, default_value = "64K")]
    pub message_size: ByteSize,
    /// Seconds after the first message that do not count
    #[arg(long, default_value_t = 0.2)]
    pub warmup: f64,
    /// Seconds that count
    #[arg(long, default_value_t = 1.0)]
    pub seconds: f64,
    /// Messages to have landing memory for
    #[arg(long, default_value_t = 32)]
    pub in_flight: u32,
    /// Senders to wait for: time counts once each has sent a message
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=256))]
    pub senders: u32,
}

/// What `lm-stream-recv` prints.
#[derive(Debug, Serialize)]
pub struct ReceiveReport {
    /// Name of the program.
    pub program: &'static str,
    /// Payload received.
    pub bytes: u64,
    /// Messages received.
    pub messages: u64,
    /// Sequence numbers that did not come, and messages reported incomplete.
    pub lost_messages: u64,
    /// By the receiver's clock.
    pub seconds: f64,
    /// Payload over time.
    pub gbit_per_s: f64,
    /// Mode in effect.
    pub mode: &'static str,
    /// Payload bytes that user space copied since the start.
    pub user_copied_bytes: u64,
    /// The same of each sender, in the order of their first messages.
    pub senders: Vec<SenderReport>,
}

/// What one sender's messages came to.
#[derive(Debug, Serialize)]
pub struct SenderReport {
    /// Its address and data port.
    pub address: Option<SocketAddrV4>,
    /// Payload received.
    pub bytes: u64,
    /// Messages received.
    pub messages: u64,
    /// Sequence numbers that did not come.
    pub lost_messages: u64,
    /// Payload over time.
    pub gbit_per_s: f64,
}

/// Runs `lm-stream-send`. It ends early, without error, when the receiver has gone after the first message.
///
/// # Errors
///
/// A one-line reason when the endpoint cannot be opened or the receiver not be reached.
pub fn send(args: &SendArgs) -> Result<SendReport, Failure> {
    let len = args.message_size.bytes();
    if len < SEQUENCE_LEN as u64 {
        return Err(Failure::usage(format!(
            "--message-size must be {SEQUENCE_LEN} bytes at least"
        )));
    }
    let to = link::resolve(&args.to)?;
    let mut endpoint = args
        .endpoint
        .open(Some(*to.ip()), 0, len, 2 * args.in_flight, args.integrity)?;
    let options = ConnectOptions {
        max_message_len: len,
        messages_in_flight: args.in_flight,
        delivery: args.delivery.into(),
        rate: args.rate,
        start: Start::WhenGranted,
        ..ConnectOptions::default()
    };
    let peer = connect(&mut endpoint, to, &options)?;
    let mode = endpoint.mode().as_str();
    let mut messages = 0_u64;
    let started = Instant::now();
    let end = started + Duration::from_secs_f64(args.seconds);
    while Instant::now() < end {
        match send_one(&mut endpoint, peer, len, messages) {
            Ok(()) => messages += 1,
            Err(_) if messages > 0 => break,
            Err(error) => return Err(Failure::new(chain(&error))),
        }
        while endpoint.try_completion().is_some() {}
    }
    let seconds = started.elapsed().as_secs_f64();
    let receiver = await_report(&mut endpoint);
    Ok(SendReport {
        program: "lm-stream-send",
        bytes: messages * len,
        messages,
        seconds,
        mode,
        integrity: args.integrity,
        receiver,
    })
}

/// Writes one message into loaned memory and hands it over, polling while there is back-pressure.
fn send_one(endpoint: &mut Endpoint, peer: PeerId, len: u64, number: u64) -> Result<(), SendError> {
    let mut region = loop {
        match endpoint.loan(peer, len) {
            Ok(region) => break region,
            Err(LoanError::WouldBlock) => {
                if endpoint.poll() == 0 {
                    endpoint.wait(Duration::from_millis(10));
                }
            }
            Err(error) => return Err(error.into()),
        }
    };
    let first = region.payloads_mut().next();
    if let Some(bytes) = first.and_then(|payload| payload.first_chunk_mut::<SEQUENCE_LEN>()) {
        *bytes = number.to_be_bytes();
    }
    endpoint.send(region, number).map(drop)
}

fn await_report(endpoint: &mut Endpoint) -> Value {
    let deadline = Instant::now() + Duration::from_secs(2);
    while let Some(left) = deadline.checked_duration_since(Instant::now()) {
        match endpoint.recv(Some(left)) {
            Ok(message) if message.tag() == REPORT => {
                return serde_json::from_slice(&message).unwrap_or_default();
            }
            Err(RecvError::TimedOut | RecvError::Link) => break,
            Ok(_) | Err(_) => {}
        }
    }
    Value::Object(serde_json::Map::new())
}

/// Runs `lm-stream-recv`: waits for the first message of each sender, measures, and sends them its report.
///
/// # Errors
///
/// A one-line reason when the endpoint cannot be opened or the interface goes away.
pub fn receive(args: &ReceiveArgs, ready: impl FnOnce()) -> Result<ReceiveReport, Failure> {
    let mut endpoint = args.endpoint.open(
        None,
        args.port,
        args.message_size.bytes(),
        args.in_flight,
        IntegrityOption::default(),
    )?;
    ready();
    let mut tallies: Vec<Tally> = Vec::with_capacity(args.senders as usize);
    let mut incomplete = 0_u64;
    let mut started: Option<Instant> = None;
    let mut since_look = 0_u64;
    let mut counts_from: Option<Instant> = None;
    loop {
        // Until all senders are there, the last of them may still wait for its turn.
        let silence = match tallies.len() {
            0 => None,
            _ if started.is_none() => Some(GATHERING),
            _ => Some(SILENCE),
        };
        let message = match endpoint.recv(silence) {
            Ok(message) => message,
            Err(RecvError::TimedOut) => return Err(stopped(tallies.len(), args.senders)),
            Err(RecvError::Incomplete { .. }) => {
                incomplete += 1;
                continue;
            }
            Err(error) => return Err(Failure::new(chain(&error))),
        };
        // The first bytes of a message that was delivered in part may be lost; its tag is the same number.
        let sequence = match message.missing().is_empty() {
            true => sequence_of(&message),
            false => Some(message.tag()),
        };
        let Some(sequence) = sequence else { continue };
        let peer = message.peer();
        let tally = match tallies.iter_mut().find(|tally| tally.peer == peer) {
            Some(tally) => tally,
            None => {
                if tallies.len() == args.senders as usize {
                    return Err(Failure::new(format!(
                        "more than {} senders came; say how many with --senders",
                        args.senders
                    )));
                }
                tallies.push(Tally::new(peer));
                tallies.last_mut().expect("it was just added")
            }
        };
        tally.count(&message, sequence);
        since_look += message.len() as u64;
        drop(message);
        if started.is_some() && since_look < BYTES_PER_LOOK {
            continue;
        }
        since_look = 0;
        let now = Instant::now();
        if tallies.len() < args.senders as usize {
            continue;
        }
        let started = *started.get_or_insert(now);
        match counts_from {
            None if (now - started).as_secs_f64() >= args.warmup => {
                counts_from = Some(now);
                tallies.iter_mut().for_each(Tally::begin);
            }
            Some(from) if (now - from).as_secs_f64() >= args.seconds => {
                let report = report(&mut endpoint, &tallies, incomplete, (now - from).as_secs_f64());
                tell(&mut endpoint, &tallies, &report);
                return Ok(report);
            }
            _ => {}
        }
    }
}

/// A sender's messages since the time began to count.
struct Tally {
    peer: PeerId,
    bytes: u64,
    messages: u64,
    /// The sequence number after the last one, now and when the time began to count.
    next: u64,
    first: u64,
}

impl Tally {
    fn new(peer: PeerId) -> Tally {
        Tally {
            peer,
            bytes: 0,
            messages: 0,
            next: 0,
            first: 0,
        }
    }

    fn count(&mut self, message: &Message, sequence: u64) {
        let missing: u64 = (message.missing().iter())
            .map(|range| range.end - range.start)
            .sum();
        self.bytes += message.len() as u64 - missing;
        self.messages += 1;
        self.next = self.next.max(sequence.saturating_add(1));
    }

    fn begin(&mut self) {
        (self.bytes, self.messages, self.first) = (0, 0, self.next);
    }

    fn lost(&self) -> u64 {
        (self.next - self.first).saturating_sub(self.messages)
    }
}

/// Why the measurement ends without a result.
fn stopped(came: usize, wanted: u32) -> Failure {
    if came < wanted as usize {
        Failure::new(format!(
            "{came} of {wanted} senders came and none is left; start them all, and let them send for longer"
        ))
    } else {
        Failure::new("the sender stopped before the measurement ended; let it send for longer")
    }
}

fn report(endpoint: &mut Endpoint, tallies: &[Tally], incomplete: u64, seconds: f64) -> ReceiveReport {
    let gbit_per_s = |bytes: u64| bytes as f64 * 8.0 / seconds / 1e9;
    let senders: Vec<SenderReport> = tallies
        .iter()
        .map(|tally| SenderReport {
            address: endpoint.peer_address(tally.peer),
            bytes: tally.bytes,
            messages: tally.messages,
            lost_messages: tally.lost(),
            gbit_per_s: gbit_per_s(tally.bytes),
        })
        .collect();
    let bytes = tallies.iter().map(|tally| tally.bytes).sum();
    ReceiveReport {
        program: "lm-stream-recv",
        bytes,
        messages: tallies.iter().map(|tally| tally.messages).sum(),
        lost_messages: tallies.iter().map(Tally::lost).sum::<u64>().max(incomplete),
        seconds,
        gbit_per_s: gbit_per_s(bytes),
        mode: endpoint.mode().as_str(),
        user_copied_bytes: endpoint.counters().user_copied_bytes,
        senders,
    }
}

fn sequence_of(message: &Message) -> Option<u64> {
    message
        .first_chunk::<SEQUENCE_LEN>()
        .map(|bytes| u64::from_be_bytes(*bytes))
}

/// Sends the report to the senders; where it does not get there, the sender prints none.
fn tell(endpoint: &mut Endpoint, tallies: &[Tally], report: &ReceiveReport) {
    // One packet holds the report of some senders; to more of them only the sums go.
    let full = serde_json::to_vec(report).ok();
    let sums = || {
        let mut value = serde_json::to_value(report).ok()?;
        value.as_object_mut()?.remove("senders");
        serde_json::to_vec(&value).ok()
    };
    let Some(text) = full.filter(|text| text.len() <= REPORT_LEN_MAX).or_else(sums) else {
        return;
    };
    let mut told = 0;
    for tally in tallies {
        told += u32::from(endpoint.send_copy(tally.peer, &text, REPORT).is_ok());
    }
    // The senders' own streams go on meanwhile: what still arrives is dropped here.
    let deadline = Instant::now() + Duration::from_secs(1);
    while told > 0 && Instant::now() < deadline {
        told -= u32::from(endpoint.try_completion().is_some());
        while let Ok(Some(_)) = endpoint.try_recv() {}
    }
}
