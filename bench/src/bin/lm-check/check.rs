//! A stream whose every byte both sides know from a seed: the receiver compares each message with what must have been
//! sent.
//!
//! Lengths and contents are functions of the seed and the message's number, so nothing but LM itself passes between the
//! two programs, and neither has to trust the other's report. What became of each message is one letter in a text, the
//! n-th letter for message n; who started both programs compares the texts. The sender's letters:
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

use std::net::SocketAddrV4;
use std::time::{Duration, Instant};

use clap::Args;
use lm_dataplane::{ConnectError, ConnectOptions, Endpoint, Message, Outcome, PeerId, RecvError};
use lm_protocol::geometry::Wire;
use lm_protocol::window::WindowShape;
use serde::Serialize;
use serde_json::{Map, Value};

use crate::hold::{Held, HeldReport};
use crate::plan::{Handed, PlanArgs, compare, hand_over};
use crate::reading::{ReadingReport, Readings};
use lm_bench::cli::{DeliveryOption, Failure, IntegrityOption, chain, parse_window};
use lm_bench::link;
use lm_bench::lm::{EndpointArgs, connect, session_options};
use lm_bench::signals::Interrupt;
use lm_bench::size::ByteSize;

/// Sessions that a sender asks for before it gives up what is left.
const SESSIONS_MAX: u32 = 20;
/// How long the receiver goes on after it was told to end, at least, since its last message.
const QUIET: Duration = Duration::from_millis(50);
/// How long either side sleeps at most.
const IDLE_MAX: Duration = Duration::from_millis(1);

/// Arguments of `lm-check messages`. A receiver ends with Ctrl-C or SIGTERM.
#[derive(Debug, Clone, Args)]
pub(crate) struct CheckArgs {
    /// Send to this endpoint [default: receive]
    #[arg(long, value_name = "HOST[:PORT]")]
    pub(crate) to: Option<String>,
    /// UDP port that a receiver takes data on; control has the next one
    #[arg(long, default_value_t = lm_dataplane::DEFAULT_PORT)]
    pub(crate) port: u16,
    /// Options of the endpoint
    #[command(flatten)]
    pub(crate) endpoint: EndpointArgs,
    /// What to send, and to expect
    #[command(flatten)]
    pub(crate) plan: PlanArgs,
    /// Sender: messages that may be unconfirmed [default: 16]. Receiver: messages to have landing memory for [default:
    /// 32]
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
    /// Sender: seconds that everything may take, until each message is confirmed or reported
    #[arg(long, default_value_t = 20.0)]
    pub(crate) patience: f64,
    /// Receiver: bytes of delivered messages to keep, the latest ones, and to look at again and again: they must not
    /// change
    #[arg(long, value_name = "SIZE", default_value = "0")]
    pub(crate) hold: ByteSize,
    /// Receiver: read messages while they arrive, too
    #[arg(long)]
    pub(crate) read: bool,
}

impl CheckArgs {
    /// Messages that a sender may have unconfirmed.
    fn unconfirmed(&self) -> u32 {
        self.in_flight.unwrap_or(16)
    }

    /// What to ask the receiver for.
    fn session_options(&self) -> ConnectOptions {
        ConnectOptions {
            window: self.window,
            wire: if self.ipfrag { Wire::IpFrag } else { Wire::Lm },
            ..session_options(self.plan.longest(), self.unconfirmed(), self.delivery)
        }
    }
}

/// What `lm-check messages` prints.
#[derive(Debug, Serialize)]
pub(crate) struct CheckReport {
    /// A letter for each message, see the table in this module's head.
    pub(crate) fates: String,
    /// The receiver's: what was wrong with messages that it was given. Must be empty.
    pub(crate) faults: Vec<String>,
    /// The sender's: sessions that it asked for.
    pub(crate) sessions: u32,
    /// The receiver's: messages that were kept after their delivery.
    pub(crate) held: HeldReport,
    /// The receiver's: messages that it read while they arrived.
    pub(crate) read: ReadingReport,
    /// By the program's own clock.
    pub(crate) seconds: f64,
    /// Mode in effect.
    pub(crate) mode: &'static str,
    /// Everything that the endpoint counted, by name.
    pub(crate) counters: Map<String, Value>,
    /// What was dropped and why, by name; reasons that did not occur are left out.
    pub(crate) drops: Map<String, Value>,
    /// Packets by the gate's verdict.
    pub(crate) gate: Map<String, Value>,
}

impl CheckReport {
    fn new(endpoint: &Endpoint, fates: Vec<u8>, started: Instant) -> CheckReport {
        let counters = endpoint.counters();
        let object = |pairs: &mut dyn Iterator<Item = (&'static str, u64)>| {
            let pairs = pairs.map(|(name, count)| (name.to_owned(), count.into()));
            pairs.collect::<Map<String, Value>>()
        };
        // What the balance of packets and messages needs.
        let counted = [
            ("messages_sent", counters.messages_sent),
            ("messages_failed", counters.messages_failed),
            ("data_packets_sent", counters.data_packets_sent),
            ("fragments_resent", counters.fragments_resent),
            ("landing_packets", counters.landing_packets),
            ("general_packets", counters.general_packets),
            ("one_copy_packets", counters.one_copy_packets),
            ("control_packets", counters.control_packets),
            ("landing_heard", counters.landing_heard),
            ("packets_used", counters.packets_used),
            ("challenged", counters.challenged),
            ("fragments_delivered", counters.fragments_delivered),
        ];
        CheckReport {
            fates: String::from_utf8(fates).expect("fates are letters"),
            faults: Vec::new(),
            sessions: 0,
            held: HeldReport::default(),
            read: ReadingReport::default(),
            seconds: started.elapsed().as_secs_f64(),
            mode: endpoint.status().mode().as_str(),
            counters: object(&mut counted.into_iter()),
            drops: object(&mut counters.drops().filter(|(_, count)| *count > 0)),
            gate: object(&mut endpoint.status().gate_counters().into_iter()),
        }
    }
}

/// Runs `lm-check messages`: sends everything, or receives until it is told to end.
///
/// # Errors
///
/// A one-line reason when the endpoint cannot be opened, the interface goes away, the receiver cannot be reached, or
/// messages are still open when the time is over.
pub(crate) fn check(args: &CheckArgs, ready: impl FnOnce()) -> Result<CheckReport, Failure> {
    match &args.to {
        Some(to) => send(args, link::resolve(to)?),
        None => receive(args, ready),
    }
}

fn send(args: &CheckArgs, to: SocketAddrV4) -> Result<CheckReport, Failure> {
    let longest = args.plan.longest();
    let mut endpoint = args.endpoint.open(
        Some(*to.ip()),
        0,
        longest,
        2 * args.unconfirmed(),
        IntegrityOption::Manifest,
    )?;
    let started = Instant::now();
    let options = args.session_options();
    let peer = connect(&mut endpoint, to, &options)?;
    // Whoever wants to aim at the fragments of this stream reads it here.
    let port = endpoint
        .peer(peer)
        .landing_port()
        .unwrap_or_else(|| endpoint.local().port());
    eprintln!("fragments leave from port {port}");
    let mut sender = Sender {
        endpoint,
        args,
        to,
        peer,
        sessions: 1,
        deadline: started + Duration::from_secs_f64(args.patience.clamp(0.0, 86_400.0)),
        fates: vec![b'?'; args.plan.messages as usize],
        open: 0,
    };
    for number in 0..args.plan.messages {
        let (start, len) = (args.plan.start(number), args.plan.len(number));
        loop {
            match hand_over(&mut sender.endpoint, sender.peer, number.into(), start, len)? {
                Handed::Over => break,
                Handed::NoRoom => sender.pass_time()?,
                Handed::NoSession | Handed::UnknownPeer => sender.ask_again()?,
            }
        }
        sender.open += 1;
    }
    while sender.open > 0 {
        sender.pass_time()?;
    }
    Ok(CheckReport {
        sessions: sender.sessions,
        ..CheckReport::new(&sender.endpoint, sender.fates, started)
    })
}

struct Sender<'a> {
    endpoint: Endpoint,
    args: &'a CheckArgs,
    to: SocketAddrV4,
    peer: PeerId,
    sessions: u32,
    deadline: Instant,
    fates: Vec<u8>,
    /// Messages handed over without a completion.
    open: u64,
}

impl Sender<'_> {
    /// One round, and what it brought.
    fn pass_time(&mut self) -> Result<(), Failure> {
        if self.endpoint.poll() == 0 {
            self.endpoint.wait(IDLE_MAX);
        }
        self.take_completions();
        if Instant::now() < self.deadline {
            return Ok(());
        }
        Err(Failure::new(format!(
            "{} messages are neither confirmed nor reported after {} s: {}",
            self.open,
            self.args.patience,
            String::from_utf8_lossy(&self.fates)
        )))
    }

    fn take_completions(&mut self) {
        while let Some(completion) = self.endpoint.try_completion() {
            self.open = self.open.saturating_sub(1);
            if let Some(fate) = self.fates.get_mut(completion.tag as usize) {
                *fate = match completion.outcome {
                    Outcome::Delivered => b'd',
                    Outcome::Incomplete { .. } => b'i',
                    Outcome::SessionEnded => b'e',
                    _ => b't',
                };
            }
        }
    }

    /// The session has ended before its time: another one.
    fn ask_again(&mut self) -> Result<(), Failure> {
        self.take_completions();
        if self.sessions == SESSIONS_MAX {
            return Err(Failure::new(format!("{SESSIONS_MAX} sessions ended early")));
        }
        self.sessions += 1;
        let options = self.args.session_options();
        match self.endpoint.peer(self.peer).open_session(&options) {
            // The entry of a peer that was silent for long may have been given to another.
            Err(ConnectError::UnknownPeer) => {
                let peer = self.endpoint.connect(self.to, &options);
                self.peer = peer.map_err(|error| Failure::new(chain(&error)))?;
                Ok(())
            }
            result => result.map_err(|error| Failure::new(chain(&error))),
        }
    }
}

fn receive(args: &CheckArgs, ready: impl FnOnce()) -> Result<CheckReport, Failure> {
    let interrupt = Interrupt::install().map_err(|error| Failure::new(chain(&error)))?;
    let longest = args.plan.longest();
    let kept = args.hold.bytes().div_ceil(longest);
    let mut endpoint = args.endpoint.open(
        None,
        args.port,
        longest,
        (args.in_flight.unwrap_or(32)).saturating_add(u32::try_from(kept).unwrap_or(u32::MAX)),
        IntegrityOption::default(),
    )?;
    ready();
    let started = Instant::now();
    let mut fates = vec![b'-'; args.plan.messages as usize];
    let mut faults = Vec::new();
    let mut heard = Instant::now();
    let mut held = Held::new(args.hold.bytes());
    let mut readings = Readings::default();
    loop {
        let received = endpoint.try_recv();
        faults.extend(readings.look(&args.plan, &mut endpoint).err());
        match received {
            Ok(Some(message)) => {
                heard = Instant::now();
                if args.read {
                    endpoint.peer(message.peer()).watch();
                }
                faults.extend(check_message(&args.plan, &message, &mut fates).err());
                faults.extend(held.keep(message).err());
            }
            Ok(None) if interrupt.is_set() && heard.elapsed() > QUIET => break,
            Ok(None) => match held.look() {
                Ok(true) => {}
                Ok(false) => endpoint.wait(IDLE_MAX),
                Err(fault) => faults.push(fault),
            },
            Err(RecvError::Incomplete { tag, .. }) => {
                heard = Instant::now();
                match fates.get_mut(tag as usize) {
                    Some(fate @ b'-') => *fate = b'i',
                    Some(fate) => faults.push(format!(
                        "message {tag} was reported incomplete after it was {:?}",
                        char::from(*fate)
                    )),
                    None => faults.push(format!("message {tag} was reported incomplete and never sent")),
                }
            }
            Err(error) => return Err(Failure::new(chain(&error))),
        }
    }
    faults.extend(held.look_at_all().err());
    Ok(CheckReport {
        faults,
        held: held.report(),
        read: readings.report(),
        ..CheckReport::new(&endpoint, fates, started)
    })
}

/// The message is what must have been sent, and was not delivered before.
fn check_message(plan: &PlanArgs, message: &Message, fates: &mut [u8]) -> Result<(), String> {
    let tag = message.tag();
    let Some(fate) = fates.get_mut(tag as usize) else {
        return Err(format!("message {tag} was delivered and never sent"));
    };
    if *fate != b'-' {
        let before = char::from(*fate);
        return Err(format!("message {tag} was delivered after it was {before:?}"));
    }
    *fate = if message.missing().is_empty() { b'w' } else { b'p' };
    let number = tag as u32;
    compare(plan.start(number), plan.len(number), message)
        .map_err(|wrong| format!("message {number}: {wrong}"))
}
