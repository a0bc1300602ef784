//! A host's part in an exchange of messages whose every byte all sides know from a seed: it sends to any number of hosts,
//! receives from any number, and compares each message with what must have been sent.
//!
//! Lengths are a function of the seed and the message's number, contents of both hosts' addresses and the tag as well, so
//! nothing but LM itself passes between the programs, and none has to trust another's report. The tag is the sender's
//! *life*, which whoever starts it again counts up, in its upper half, and the message's number in its lower half: what
//! comes twice, or from an earlier life after a later one, is a fault.
//!
//! What became of each message is one letter in a text, the n-th letter for message n; the program that started both compares
//! the texts. The sender's letters:
//!
//! | `d` | `i` | `e` | `t` | `?` |
//! |---|---|---|---|---|
//! | confirmed whole | reported incomplete | the session ended | no confirmation in time | no completion at all |
//!
//! and the receiver's:
//!
//! | `w` | `p` | `i` | `-` |
//! |---|---|---|---|
//! | delivered whole | delivered in part, with a map | reported incomplete | nothing was heard of it |
//!
//! A session that ends is asked for again, as often as it takes: peers may die and come back. Faults are told on standard
//! error at once, in lines that begin with `fault: `, so that they are known even of a program that is killed before its
//! report.

use std::collections::BTreeMap;
use std::net::{Ipv4Addr, SocketAddrV4};
use std::ops::Bound::{Excluded, Included};
use std::time::{Duration, Instant};

use clap::Args;
use lm_dataplane::{
    Admission, ConnectError, ConnectOptions, Endpoint, LoanError, Message, Outcome, PeerId, RecvError,
    SendError,
};
use lm_protocol::control::RejectReason;
use lm_protocol::geometry::Wire;
use lm_protocol::window::WindowShape;
use serde::Serialize;
use serde_json::{Map, Value};

use crate::failed;
use crate::hold::Held;
use crate::plan::{PlanArgs, fill, first_wrong};
use crate::reading::Readings;
use lm_bench::cli::{DeliveryOption, Failure, IntegrityOption, chain, parse_window};
use lm_bench::link;
use lm_bench::lm::{EndpointArgs, connect, session_options};
use lm_bench::signals::Interrupt;
use lm_bench::size::ByteSize;

/// How long one attempt to open a session takes at most. No message is taken out meanwhile; but an attempt that ends before a
/// busy peer has answered waits for the lease of an unused session.
const ATTEMPT: Duration = Duration::from_secs(1);
/// A peer that was asked in vain is asked again after so long.
const PAUSE: Duration = Duration::from_millis(100);
/// How long the own host's daemon may be away.
const DAEMON_PATIENCE: Duration = Duration::from_secs(15);
/// How long a receiver goes on after it was told to end, at least, since its last message.
const QUIET: Duration = Duration::from_millis(50);
/// Longest sleep.
const IDLE_MAX: Duration = Duration::from_millis(1);

/// Arguments of `lm-check messages`. What receives ends with Ctrl-C or SIGTERM.
#[derive(Debug, Clone, Args)]
pub(crate) struct MessagesArgs {
    /// Send to these endpoints, in turns [default: receive]
    #[arg(long, value_name = "HOST[:PORT][,…]", value_delimiter = ',')]
    pub(crate) to: Vec<String>,
    /// UDP port to take data on, of a sender, too; control has the next one [default: 7168 without --to]
    #[arg(long)]
    pub(crate) port: Option<u16>,
    /// Options of the endpoint
    #[command(flatten)]
    pub(crate) endpoint: EndpointArgs,
    /// What to send, and to expect
    #[command(flatten)]
    pub(crate) plan: PlanArgs,
    /// Sender: messages to each host that may be unconfirmed [default: 16]. Receiver: messages to have landing memory for
    /// [default: 32]
    #[arg(long)]
    pub(crate) in_flight: Option<u32>,
    /// Sender: what becomes of messages that lose fragments
    #[arg(long, value_enum, default_value_t = DeliveryOption::Reliable)]
    pub(crate) delivery: DeliveryOption,
    /// Sender: fragments in a window
    #[arg(long, value_parser = parse_window, default_value = "256")]
    pub(crate) window: WindowShape,
    /// Sender: send plain IP fragments, always unreliably
    #[arg(long)]
    pub(crate) ipfrag: bool,
    /// Sender: seconds in which messages begin, as many as go; a host that was not reached by then is sent one afterwards
    #[arg(long)]
    pub(crate) seconds: Option<f64>,
    /// Sender: seconds after these that everything may take, until each message is confirmed or reported
    #[arg(long, default_value_t = 20.0)]
    pub(crate) patience: f64,
    /// Sender: how often this host's program was started before
    #[arg(long, default_value_t = 0)]
    pub(crate) life: u32,
    /// Receiver: bytes of delivered messages to keep and to look at again and again: they must not change
    #[arg(long, value_name = "SIZE", default_value = "0")]
    pub(crate) hold: ByteSize,
    /// Receiver: read messages while they arrive, too
    #[arg(long)]
    pub(crate) read: bool,
}

/// What `lm-check messages` prints.
#[derive(Debug, Serialize)]
pub(crate) struct Report {
    /// This host.
    address: Ipv4Addr,
    /// Until each message was confirmed or reported, by the program's own clock.
    seconds: f64,
    /// Sessions that were opened.
    sessions: u32,
    /// What it sent.
    to: Vec<Fates>,
    /// What it received.
    from: Vec<Fates>,
    /// What was wrong with messages that it was given. Must be empty.
    faults: Vec<String>,
    /// Messages that were kept after their delivery.
    held: Held<Message>,
    /// Messages that were read while they arrived.
    read: Readings,
    /// Mode in effect.
    mode: &'static str,
    /// What the balance of packets and messages needs of what the endpoint counted, by name.
    counters: Map<String, Value>,
    /// What was dropped and why, by name; reasons that did not occur are left out.
    drops: Map<String, Value>,
    /// Packets by the gate's verdict.
    gate: Map<String, Value>,
}

/// What became of the messages to or from a host.
#[derive(Debug, Serialize)]
struct Fates {
    address: Ipv4Addr,
    /// Of the sender.
    life: u32,
    /// A letter for each message, see the tables in this module's head.
    fates: String,
}

/// A host to send to.
struct Target {
    to: SocketAddrV4,
    /// Its name; where there is no session, when to ask for one.
    peer: Result<PeerId, Instant>,
    sessions: u32,
    fates: Vec<u8>,
    /// Messages without a completion.
    open: u32,
}

impl Target {
    fn new(to: &str) -> Result<Target, Failure> {
        Ok(Target {
            to: link::resolve(to)?,
            peer: Err(Instant::now()),
            sessions: 0,
            fates: Vec::new(),
            open: 0,
        })
    }

    /// Whether it shall have one more message. One that has confirmed nothing in time is sent one after all, and another
    /// one where that fails.
    fn wants(&self, messages: u32, is_time_over: bool) -> bool {
        let is_reached = || self.fates.iter().any(|fate| b"d?".contains(fate));
        (self.fates.len() as u32) < messages && !(is_time_over && is_reached())
    }
}

struct Host<'a> {
    args: &'a MessagesArgs,
    endpoint: Endpoint,
    own: Ipv4Addr,
    options: ConnectOptions,
    targets: Vec<Target>,
    /// Letters by host and life.
    sources: BTreeMap<(Ipv4Addr, u32), Vec<u8>>,
    faults: Vec<String>,
    held: Held<Message>,
    readings: Readings,
    /// When the last message came.
    heard: Instant,
}

/// Runs `lm-check messages`.
///
/// # Errors
///
/// A one-line reason when the endpoint cannot be opened, the interface goes away, a receiver refuses what is asked for, or
/// messages are still open when the time is over.
pub(crate) fn messages(args: &MessagesArgs, ready: impl FnOnce()) -> Result<Report, Failure> {
    let interrupt = Interrupt::install().map_err(failed)?;
    let mut host = Host::open(args)?;
    ready();
    let begun = Instant::now();
    let seconds = |seconds: f64| Duration::from_secs_f64(seconds.clamp(0.0, 86_400.0));
    let end = args.seconds.map(|time| begun + seconds(time));
    let deadline = end.unwrap_or(begun) + seconds(args.patience);
    let receives = args.to.is_empty() || args.port.is_some();
    let mut took = None;
    loop {
        let now = Instant::now();
        let is_time_over = end.is_some_and(|end| now >= end);
        let mut work = host.receive()?;
        host.take_completions();
        work |= host.send(is_time_over)?;
        let is_waiting = |target: &&Target| target.open > 0 || target.wants(args.plan.messages, is_time_over);
        let mut waiting = host.targets.iter().filter(is_waiting).peekable();
        if took.is_none() && waiting.peek().is_none() {
            eprintln!("done");
            took = Some(begun.elapsed());
        } else if took.is_none() && now > deadline {
            let waiting = waiting.map(|target| {
                let (to, sessions, fates) =
                    (target.to, target.sessions, String::from_utf8_lossy(&target.fates));
                format!("to {to} by {sessions} sessions: {fates}")
            });
            return Err(Failure::new(format!(
                "messages are neither confirmed nor reported after {} s: {}",
                (deadline - begun).as_secs_f64(),
                waiting.collect::<Vec<_>>().join(", ")
            )));
        }
        if (took.is_some() && !receives) || (interrupt.is_set() && host.heard.elapsed() > QUIET) {
            break;
        }
        if !work {
            match host.held.look() {
                Ok(false) => host.endpoint.wait(IDLE_MAX),
                looked => tell(&mut host.faults, looked),
            }
        }
    }
    tell(&mut host.faults, host.held.look_at_all());
    Ok(host.report(took.unwrap_or_else(|| begun.elapsed())))
}

impl Host<'_> {
    /// Opens the endpoint; tries again for a while where a daemon is asked, which may be being started again.
    fn open(args: &MessagesArgs) -> Result<Host<'_>, Failure> {
        let targets = args.to.iter().map(String::as_str).map(Target::new);
        let targets = targets.collect::<Result<Vec<_>, _>>()?;
        let (towards, port, in_flight) = match targets.first() {
            Some(target) => (Some(*target.to.ip()), 0, 16),
            None => (None, lm_dataplane::DEFAULT_PORT, 32),
        };
        let in_flight = args.in_flight.unwrap_or(in_flight);
        let longest = args.plan.longest();
        let kept = u32::try_from(args.hold.bytes().div_ceil(longest)).unwrap_or(u32::MAX);
        let messages = (in_flight * (2 * targets.len() as u32).max(1)).saturating_add(kept);
        let deadline = Instant::now() + DAEMON_PATIENCE;
        let has_daemon = matches!(args.endpoint.admission, Admission::Daemon(_));
        let endpoint = loop {
            let port = args.port.unwrap_or(port);
            match (args.endpoint).open(towards, port, longest, messages, IntegrityOption::Manifest) {
                Err(_) if has_daemon && Instant::now() < deadline => std::thread::sleep(PAUSE),
                opened => break opened?,
            }
        };
        Ok(Host {
            own: *endpoint.local().ip(),
            options: ConnectOptions {
                window: args.window,
                wire: if args.ipfrag { Wire::IpFrag } else { Wire::Lm },
                timeout: ATTEMPT,
                // Where it is needed at all.
                ..session_options(longest, in_flight, args.delivery)
            },
            targets,
            sources: BTreeMap::new(),
            faults: Vec::new(),
            held: Held::new(args.hold.bytes()),
            readings: Readings::default(),
            heard: Instant::now(),
            args,
            endpoint,
        })
    }

    /// Takes what has come; whether a message has.
    fn receive(&mut self) -> Result<bool, Failure> {
        let received = self.endpoint.try_recv();
        while let Some(incoming) = self.endpoint.try_incoming() {
            let from = self.endpoint.peer(incoming.peer()).address();
            let from = from.map_or(Ipv4Addr::UNSPECIFIED, |from| *from.ip());
            let start = self.args.plan.start(from, self.own, incoming.tag());
            self.readings.begin(incoming, start);
        }
        tell(&mut self.faults, self.readings.look());
        match received {
            Ok(None) => return Ok(false),
            Ok(Some(message)) => {
                if self.args.read {
                    self.endpoint.peer(message.peer()).watch();
                }
                let checked = self.check(&message);
                tell(&mut self.faults, checked);
                tell(&mut self.faults, self.held.keep(message));
            }
            Err(RecvError::Incomplete { peer, tag, .. }) => {
                if let Some(from) = self.endpoint.peer(peer).address() {
                    let noted = self.note(*from.ip(), tag, b'i');
                    tell(&mut self.faults, noted);
                }
            }
            Err(error) => return Err(failed(error)),
        }
        self.heard = Instant::now();
        Ok(true)
    }

    /// The message is one that its sender must have sent, and new.
    fn check(&mut self, message: &Message) -> Result<(), String> {
        let tag = message.tag();
        let Some(from) = self.endpoint.peer(message.peer()).address() else {
            return Err(format!("message {tag:#x} came from nobody"));
        };
        let (from, life, number) = (*from.ip(), (tag >> 32) as u32, tag as u32);
        let later = (Excluded((from, life)), Included((from, u32::MAX)));
        if let Some(((_, later), _)) = self.sources.range(later).next() {
            return Err(format!(
                "message {number} of life {life} of {from} came after one of life {later}"
            ));
        }
        let is_whole = message.missing().is_empty();
        self.note(from, tag, if is_whole { b'w' } else { b'p' })?;
        let (found, len) = (message.len() as u64, self.args.plan.len(number));
        let start = self.args.plan.start(from, self.own, tag);
        match first_wrong(start, 0, message, message.missing()) {
            None if found == len => Ok(()),
            at => Err(format!(
                "message {number} of {from} has {found} bytes of {len}, and is wrong from {at:?} on"
            )),
        }
    }

    /// Writes down what became of a message, once.
    fn note(&mut self, from: Ipv4Addr, tag: u64, fate: u8) -> Result<(), String> {
        let (life, number, fate_told) = ((tag >> 32) as u32, tag as u32, char::from(fate));
        if number >= self.args.plan.messages {
            return Err(format!(
                "message {number} of {from} was {fate_told:?} and never sent"
            ));
        }
        let fates = self.sources.entry((from, life)).or_default();
        let at = number as usize;
        fates.resize(fates.len().max(at + 1), b'-');
        match std::mem::replace(&mut fates[at], fate) {
            b'-' => Ok(()),
            before => Err(format!(
                "message {number} of {from} was {fate_told:?} after it was {:?}",
                char::from(before)
            )),
        }
    }

    /// Gives each host what it may have on the way; whether anything went.
    fn send(&mut self, is_time_over: bool) -> Result<bool, Failure> {
        // Another one is first each time.
        let turn = self.targets.len().min(1);
        self.targets.rotate_left(turn);
        let (mut any, mut has_asked) = (false, false);
        for at in 0..self.targets.len() {
            while self.targets[at].wants(self.args.plan.messages, is_time_over) {
                let peer = self.targets[at].peer;
                match peer {
                    Ok(peer) if self.send_one(at, peer)? => {}
                    // One attempt a round: no message is taken out meanwhile.
                    Err(due) if due <= Instant::now() && !has_asked => {
                        has_asked = true;
                        self.ask(at)?;
                    }
                    _ => break,
                }
                any = true;
            }
        }
        Ok(any)
    }

    /// Opens a session, where messages do not fit one packet, or says when to try again.
    fn ask(&mut self, at: usize) -> Result<(), Failure> {
        let target = &mut self.targets[at];
        target.peer = match connect(&mut self.endpoint, target.to, &self.options) {
            Ok(peer) => {
                target.sessions += 1;
                // Whoever wants to aim at the fragments of this stream reads it here.
                let port = self.endpoint.peer(peer).landing_port();
                let port = port.unwrap_or_else(|| self.endpoint.local().port());
                eprintln!("fragments leave from port {port}");
                Ok(peer)
            }
            // Nothing will change that.
            Err(
                error @ ConnectError::Rejected {
                    reason: RejectReason::Unsupported | RejectReason::Unverified,
                    ..
                },
            ) => return Err(failed(error)),
            // The peer is not there yet, or is gone, or holds a session of an earlier life of ours until its lease
            // ends; or a daemon is being started again.
            Err(error) => {
                eprintln!("{}", chain(&error));
                Err(Instant::now() + PAUSE)
            }
        };
        Ok(())
    }

    /// Hands one message over; `false` when there is no room for it now.
    fn send_one(&mut self, at: usize, peer: PeerId) -> Result<bool, Failure> {
        let target = &mut self.targets[at];
        let number = target.fates.len() as u32;
        let tag = u64::from(self.args.life) << 32 | u64::from(number);
        let start = self.args.plan.start(self.own, *target.to.ip(), tag);
        match hand_over(&mut self.endpoint, peer, tag, start, self.args.plan.len(number)) {
            Ok(()) => {
                target.open += 1;
                target.fates.push(b'?');
                return Ok(true);
            }
            Err(SendError::WouldBlock) => {}
            // The entry of a peer that was silent for long may have been given to another.
            Err(SendError::NoSession | SendError::Loan(LoanError::NoSession) | SendError::UnknownPeer) => {
                target.peer = Err(Instant::now());
            }
            Err(error) => return Err(failed(error)),
        }
        Ok(false)
    }

    fn take_completions(&mut self) {
        while let Some(completion) = self.endpoint.try_completion() {
            let address = self.endpoint.peer(completion.peer).address();
            let is_it =
                |target: &&mut Target| target.peer == Ok(completion.peer) || address == Some(target.to);
            let Some(target) = self.targets.iter_mut().find(is_it) else {
                continue;
            };
            target.open = target.open.saturating_sub(1);
            if let Some(fate) = target.fates.get_mut(completion.tag as u32 as usize) {
                *fate = match completion.outcome {
                    Outcome::Delivered => b'd',
                    Outcome::Incomplete { .. } => b'i',
                    Outcome::SessionEnded => b'e',
                    _ => b't',
                };
            }
        }
    }

    fn report(self, took: Duration) -> Report {
        let (endpoint, life) = (&self.endpoint, self.args.life);
        let sessions = self.targets.iter().map(|target| target.sessions).sum();
        let counters = endpoint.counters();
        let object = |pairs: &mut dyn Iterator<Item = (&'static str, u64)>| {
            let pairs = pairs.map(|(name, count)| (name.to_owned(), count.into()));
            pairs.collect::<Map<String, Value>>()
        };
        let counted = [
            ("messages_sent", counters.messages_sent),
            ("messages_failed", counters.messages_failed),
            ("data_packets_sent", counters.data_packets_sent),
            ("fragments_resent", counters.fragments_resent),
            ("eager_resent", counters.eager_resent),
            ("landing_packets", counters.landing_packets),
            ("general_packets", counters.general_packets),
            ("one_copy_packets", counters.one_copy_packets),
            ("control_packets", counters.control_packets),
            ("landing_heard", counters.landing_heard),
            ("packets_used", counters.packets_used),
            ("challenged", counters.challenged),
            ("fragments_delivered", counters.fragments_delivered),
            ("fragments_one_copy", counters.fragments_one_copy),
        ];
        let fates = |((address, life), fates)| Fates {
            address,
            life,
            fates: String::from_utf8(fates).expect("fates are letters"),
        };
        let targets = self.targets.into_iter();
        let targets = targets.map(|target| ((*target.to.ip(), life), target.fates));
        Report {
            address: self.own,
            seconds: took.as_secs_f64(),
            sessions,
            mode: endpoint.status().mode().as_str(),
            counters: object(&mut counted.into_iter()),
            drops: object(&mut counters.drops().filter(|(_, count)| *count > 0)),
            gate: object(&mut endpoint.status().gate_counters().into_iter()),
            to: targets.map(fates).collect(),
            from: self.sources.into_iter().map(fates).collect(),
            faults: self.faults,
            held: self.held,
            read: self.readings,
        }
    }
}

/// Tells of a fault at once, and in the report.
fn tell<T>(faults: &mut Vec<String>, checked: Result<T, String>) {
    if let Err(fault) = checked {
        eprintln!("fault: {fault}");
        faults.push(fault);
    }
}

/// Hands over `len` bytes of the sequence `start` as one message.
fn hand_over(endpoint: &mut Endpoint, peer: PeerId, tag: u64, start: u64, len: u64) -> Result<(), SendError> {
    let mut region = endpoint.loan(peer, len)?;
    let mut offset = 0;
    for payload in region.payloads_mut() {
        fill(start, offset, payload);
        offset += payload.len() as u64;
    }
    endpoint
        .try_send(region, tag)
        .map(drop)
        .map_err(|back| back.reason)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_that_was_not_reached_in_time_is_sent_one_more() {
        let mut target = Target::new("198.18.0.2").unwrap();
        for (fates, in_time, afterwards) in [
            ("", true, true),
            ("et", true, true),
            ("e?", true, false),
            ("de", true, false),
            ("ddd", false, false),
        ] {
            target.fates = fates.into();
            assert_eq!(
                [false, true].map(|is_time_over| target.wants(3, is_time_over)),
                [in_time, afterwards],
                "{fates}"
            );
        }
    }
}
