//! One host's part of an exchange in which every host sends to every other one: one endpoint that sends and receives.
//!
//! Every byte of a message is a function of the seed, of both hosts' addresses and of the message's tag, so each
//! receiver can compare what it is given with what must have been sent. The tag is the sender's *life*, which whoever
//! starts it again counts up, in its upper half, and the message's number in its lower half: what comes twice, or from
//! an earlier life after a later one, is a fault.
//!
//! A session that ends is asked for again, as often as it takes: peers may die and come back. Faults are told on
//! standard error at once, in lines that begin with `fault: `, so that they are known even of a program that is killed
//! before its report.

use std::collections::BTreeMap;
use std::net::{Ipv4Addr, SocketAddrV4};
use std::time::{Duration, Instant};

use clap::Args;
use lm_box::split_mix;
use lm_dataplane::{
    Admission, ConnectError, ConnectOptions, Endpoint, Message, Outcome, PeerId, RecvError, Session,
};
use serde::Serialize;

use crate::plan::{Handed, compare, hand_over};
use lm_bench::cli::{DeliveryOption, Failure, IntegrityOption, chain};
use lm_bench::lm::{EndpointArgs, session_options};
use lm_bench::signals::Interrupt;
use lm_bench::size::ByteSize;

/// How long one attempt to open a session takes at most. No message is taken out meanwhile; but an attempt that ends before a
/// busy peer has answered waits for the lease of an unused session.
const ATTEMPT: Duration = Duration::from_secs(1);
/// A peer that was asked in vain is asked again after so long.
const PAUSE: Duration = Duration::from_millis(100);
/// How long the own host's daemon may be away.
const DAEMON_PATIENCE: Duration = Duration::from_secs(15);
/// Longest sleep.
const IDLE_MAX: Duration = Duration::from_millis(1);
/// Faults that a report names; all are counted.
const FAULTS_NAMED: usize = 20;

/// Arguments of `lm-check exchange`. It goes on receiving after its last message, until SIGTERM or Ctrl-C.
#[derive(Debug, Clone, Args)]
pub(crate) struct ExchangeArgs {
    /// All hosts; the program's own address may be among them
    #[arg(long, value_name = "ADDRESS[,…]", value_delimiter = ',', required = true)]
    pub(crate) peers: Vec<Ipv4Addr>,
    /// UDP port for data, the same at all hosts; control has the next one
    #[arg(long, default_value_t = lm_dataplane::DEFAULT_PORT)]
    pub(crate) port: u16,
    /// Options of the endpoint
    #[command(flatten)]
    pub(crate) endpoint: EndpointArgs,
    /// Length of every message
    #[arg(long, default_value = "64K")]
    pub(crate) message_size: ByteSize,
    /// Messages to each peer that may be unconfirmed
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=64))]
    pub(crate) in_flight: u32,
    /// Seconds to send; who was not reached in that time is sent one message afterwards
    #[arg(long, default_value_t = 5.0)]
    pub(crate) seconds: f64,
    /// Seconds after these until each message is confirmed or reported
    #[arg(long, default_value_t = 20.0)]
    pub(crate) patience: f64,
    /// Decides the contents of all messages, the same at all hosts
    #[arg(long, default_value_t = 1)]
    pub(crate) seed: u64,
    /// How often this host's program was started before
    #[arg(long, default_value_t = 0)]
    pub(crate) life: u32,
}

/// What `lm-check exchange` prints.
#[derive(Debug, Serialize)]
pub(crate) struct ExchangeReport {
    /// This host.
    address: Ipv4Addr,
    /// From the first message on until the last confirmation, by the program's own clock.
    seconds: f64,
    /// What it sent, by peer.
    to: Vec<Sent>,
    /// What it received, by peer.
    from: Vec<Received>,
    /// Messages that were wrong, twice or out of order. Must be 0.
    faults: u64,
    /// What was wrong with the first of them.
    faults_named: Vec<String>,
    /// Fragments that the gate redirected to where they belong.
    fragments_landed: u64,
    /// Fragments that came by the kernel's socket.
    fragments_one_copy: u64,
    /// Fragments and small messages sent again.
    retransmissions: u64,
}

/// What was sent to one peer.
#[derive(Debug, Clone, Copy, Serialize)]
struct Sent {
    /// The peer.
    address: Ipv4Addr,
    /// Messages that it confirmed.
    messages: u64,
    /// Their bytes.
    bytes: u64,
    /// Messages that ended otherwise.
    failed: u64,
    /// Sessions that were opened.
    sessions: u64,
}

/// What came from one peer.
#[derive(Debug, Clone, Copy, Serialize)]
struct Received {
    /// The peer.
    address: Ipv4Addr,
    /// Messages that were delivered.
    messages: u64,
    /// Their bytes.
    bytes: u64,
    /// Messages that were reported incomplete.
    incomplete: u64,
    /// Its last life, and the number of its last message in that.
    last: (u32, u32),
}

/// A peer as receiver of our messages.
struct Target {
    to: SocketAddrV4,
    peer: Option<PeerId>,
    has_session: bool,
    ask_at: Instant,
    next: u32,
    open: u32,
    sent: Sent,
}

impl Target {
    /// A peer that has confirmed nothing is sent one message after all, and another one where that fails.
    fn is_reached(&self) -> bool {
        self.sent.messages > 0 || self.open > 0
    }

    fn describe(&self) -> String {
        let session = if self.has_session {
            "in session"
        } else {
            "without session"
        };
        let (to, sessions) = (self.to.ip(), self.sent.sessions);
        format!("{} of {} to {to}, {session} {sessions}", self.open, self.next)
    }
}

struct Exchange<'a> {
    args: &'a ExchangeArgs,
    endpoint: Endpoint,
    own: Ipv4Addr,
    options: ConnectOptions,
    targets: Vec<Target>,
    received: BTreeMap<Ipv4Addr, Received>,
    faults: u64,
    named: Vec<String>,
    /// Whose turn it is to send first.
    first: usize,
    last_confirmed: Option<Instant>,
}

/// Runs `lm-check exchange`.
///
/// # Errors
///
/// A one-line reason when the endpoint cannot be opened, the interface goes away, or messages are still open when the
/// time is over.
pub(crate) fn exchange(args: &ExchangeArgs, ready: impl FnOnce()) -> Result<ExchangeReport, Failure> {
    let interrupt = Interrupt::install().map_err(|error| Failure::new(chain(&error)))?;
    let len = args.message_size.bytes();
    if len == 0 {
        return Err(Failure::usage("--message-size must be 1 byte at least"));
    }
    let peers = args.peers.len() as u32;
    let endpoint = open(args, len, 2 * args.in_flight * peers)?;
    let own = *endpoint.local().ip();
    let started = Instant::now();
    let others = args.peers.iter().filter(|&&address| address != own);
    let targets = others.map(|&address| Target {
        to: SocketAddrV4::new(address, args.port),
        peer: None,
        has_session: false,
        ask_at: started,
        next: 0,
        open: 0,
        sent: Sent {
            address,
            messages: 0,
            bytes: 0,
            failed: 0,
            sessions: 0,
        },
    });
    let mut exchange = Exchange {
        options: ConnectOptions {
            timeout: ATTEMPT,
            ..session_options(len, args.in_flight, DeliveryOption::Reliable)
        },
        targets: targets.collect(),
        received: BTreeMap::new(),
        faults: 0,
        named: Vec::new(),
        first: 0,
        last_confirmed: None,
        args,
        endpoint,
        own,
    };
    ready();
    let end = started + Duration::from_secs_f64(args.seconds.clamp(0.0, 86_400.0));
    let deadline = end + Duration::from_secs_f64(args.patience.clamp(0.0, 86_400.0));
    let mut is_done = false;
    while !interrupt.is_set() {
        let now = Instant::now();
        let mut work = exchange.receive()?;
        exchange.take_completions(now);
        if now < end {
            work |= exchange.send(now, |_| true)?;
        } else if now < deadline && !exchange.targets.iter().all(Target::is_reached) {
            work |= exchange.send(now, |target| !target.is_reached())?;
        } else if !is_done {
            let open: u32 = exchange.targets.iter().map(|target| target.open).sum();
            if open == 0 {
                eprintln!("done");
                is_done = true;
            } else if now > deadline {
                let waiting = exchange.targets.iter().filter(|target| target.open > 0);
                let to: Vec<String> = waiting.map(Target::describe).collect();
                return Err(Failure::new(format!(
                    "{open} messages are neither confirmed nor reported {} s after the last was sent: {}",
                    args.patience,
                    to.join(", ")
                )));
            }
        }
        if !work {
            exchange.endpoint.wait(IDLE_MAX);
        }
    }
    Ok(exchange.report(started))
}

/// Opens the endpoint; tries again for a while where a daemon is asked, which may be being started again.
fn open(args: &ExchangeArgs, len: u64, messages: u32) -> Result<Endpoint, Failure> {
    let deadline = Instant::now() + DAEMON_PATIENCE;
    let has_daemon = matches!(args.endpoint.admission, Admission::Daemon(_));
    loop {
        let endpoint = &args.endpoint;
        match endpoint.open(None, args.port, len, messages, IntegrityOption::Manifest) {
            Err(_) if has_daemon && Instant::now() < deadline => std::thread::sleep(PAUSE),
            opened => return opened,
        }
    }
}

impl Exchange<'_> {
    /// Takes what has come; whether there was anything.
    fn receive(&mut self) -> Result<bool, Failure> {
        let mut any = false;
        // No more than a turn's worth: senders wait, too.
        for _ in 0..self.targets.len().max(1) {
            match self.endpoint.try_recv() {
                Ok(Some(message)) => {
                    if let Err(fault) = self.check(&message) {
                        eprintln!("fault: {fault}");
                        self.faults += 1;
                        self.named.push(fault);
                        self.named.truncate(FAULTS_NAMED);
                    }
                }
                Ok(None) => break,
                Err(RecvError::Incomplete { peer, .. }) => {
                    if let Some(from) = self.endpoint.peer(peer).address() {
                        self.from(*from.ip()).incomplete += 1;
                    }
                }
                Err(error) => return Err(Failure::new(chain(&error))),
            }
            any = true;
        }
        Ok(any)
    }

    fn from(&mut self, address: Ipv4Addr) -> &mut Received {
        self.received.entry(address).or_insert(Received {
            address,
            messages: 0,
            bytes: 0,
            incomplete: 0,
            last: (0, 0),
        })
    }

    /// The message is one that its sender must have sent, and new.
    fn check(&mut self, message: &Message) -> Result<(), String> {
        let Some(from) = self.endpoint.peer(message.peer()).address() else {
            return Err(format!("message {:#x} came from nobody", message.tag()));
        };
        let (from, tag) = (*from.ip(), message.tag());
        let (life, number) = ((tag >> 32) as u32, tag as u32);
        let received = self.from(from);
        let (life_before, before) = received.last;
        if received.messages > 0 && (life, number) <= (life_before, before) {
            return Err(format!(
                "message {number} of life {life} of {from} came after message {before} of life {life_before}"
            ));
        }
        received.last = (life, number);
        received.messages += 1;
        received.bytes += message.len() as u64;
        let start = contents(self.args.seed, from, self.own, tag);
        let len = self.args.message_size.bytes();
        compare(start, len, message).map_err(|wrong| format!("message {tag:#x} of {from}: {wrong}"))
    }

    /// Gives each peer that is `wanted` what it may have on the way; whether anything went.
    fn send(&mut self, now: Instant, wanted: impl Fn(&Target) -> bool) -> Result<bool, Failure> {
        let count = self.targets.len();
        self.first = (self.first + 1) % count.max(1);
        let mut any = false;
        let mut has_asked = false;
        for step in 0..count {
            let at = (self.first + step) % count;
            let target = &self.targets[at];
            // One attempt a round: no message is taken out meanwhile.
            if wanted(target) && !target.has_session && !has_asked && now >= target.ask_at {
                has_asked = true;
                self.ask(at)?;
                any = true;
                continue;
            }
            while wanted(&self.targets[at])
                && self.targets[at].open < self.args.in_flight
                && self.send_one(at)?
            {
                any = true;
            }
        }
        Ok(any)
    }

    /// Opens a session, or says when to try again.
    fn ask(&mut self, at: usize) -> Result<(), Failure> {
        let without = ConnectOptions {
            session: Session::Later,
            ..self.options
        };
        let target = &mut self.targets[at];
        let opened = match target.peer {
            Some(peer) => Ok(peer),
            None => self.endpoint.connect(target.to, &without),
        }
        .and_then(|peer| {
            self.endpoint.peer(peer).open_session(&self.options)?;
            Ok(peer)
        });
        target.has_session = opened.is_ok();
        match opened {
            Ok(peer) => {
                target.peer = Some(peer);
                target.sent.sessions += 1;
            }
            // The peer is not there yet, or is gone, or holds a session of an earlier life of ours until its lease
            // ends; or a daemon is being started again.
            Err(
                ConnectError::NotListening { .. }
                | ConnectError::Unreachable { .. }
                | ConnectError::Rejected { .. }
                | ConnectError::NoDaemon { .. }
                | ConnectError::Daemon(_)
                | ConnectError::UnknownPeer,
            ) => {
                target.peer = None;
                target.ask_at = Instant::now() + PAUSE;
            }
            Err(error) => return Err(Failure::new(chain(&error))),
        }
        Ok(())
    }

    /// Hands one message over; `false` when there is no room for it now.
    fn send_one(&mut self, at: usize) -> Result<bool, Failure> {
        let target = &mut self.targets[at];
        let Some(peer) = target.peer.filter(|_| target.has_session) else {
            return Ok(false);
        };
        let tag = u64::from(self.args.life) << 32 | u64::from(target.next);
        let start = contents(self.args.seed, self.own, *target.to.ip(), tag);
        let len = self.args.message_size.bytes();
        let handed = hand_over(&mut self.endpoint, peer, tag, start, len)?;
        match handed {
            Handed::Over => {
                target.open += 1;
                target.next += 1;
            }
            Handed::NoRoom => {}
            Handed::NoSession | Handed::UnknownPeer => {
                target.has_session = false;
                target.ask_at = Instant::now();
                target.peer = target.peer.filter(|_| handed == Handed::NoSession);
            }
        }
        Ok(handed == Handed::Over)
    }

    fn take_completions(&mut self, now: Instant) {
        while let Some(completion) = self.endpoint.try_completion() {
            let address = self.endpoint.peer(completion.peer).address();
            let is_it =
                |target: &&mut Target| target.peer == Some(completion.peer) || address == Some(target.to);
            let Some(target) = self.targets.iter_mut().find(is_it) else {
                continue;
            };
            target.open = target.open.saturating_sub(1);
            if completion.outcome == Outcome::Delivered {
                target.sent.messages += 1;
                target.sent.bytes += completion.len;
                self.last_confirmed = Some(now);
            } else {
                target.sent.failed += 1;
            }
        }
    }

    fn report(self, started: Instant) -> ExchangeReport {
        let counters = self.endpoint.counters();
        ExchangeReport {
            address: self.own,
            seconds: (self.last_confirmed.unwrap_or_else(Instant::now) - started).as_secs_f64(),
            to: self.targets.iter().map(|target| target.sent).collect(),
            from: self.received.into_values().collect(),
            faults: self.faults,
            faults_named: self.named,
            fragments_landed: counters.landing_packets,
            fragments_one_copy: counters.fragments_one_copy,
            retransmissions: counters.fragments_resent + counters.eager_resent,
        }
    }
}

/// Where the sequence of a message's contents starts.
fn contents(seed: u64, from: Ipv4Addr, to: Ipv4Addr, tag: u64) -> u64 {
    let pair = u64::from(u32::from(from)) << 32 | u64::from(u32::from(to));
    split_mix(split_mix(seed, pair), tag)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn contents_differ_by_everything() {
        let [a, b] = [Ipv4Addr::new(198, 18, 0, 1), Ipv4Addr::new(198, 18, 0, 2)];
        let mut all = vec![
            contents(1, a, b, 0),
            contents(2, a, b, 0),
            contents(1, b, a, 0),
            contents(1, a, b, 1),
            contents(1, a, b, 1 << 32),
            contents(1, a, a, 0),
        ];
        all.sort_unstable();
        all.dedup();
        assert_eq!(all.len(), 6);
    }
}
