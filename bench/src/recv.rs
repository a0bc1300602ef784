//! `lm-recv`: takes transfers from other hosts and writes them out of the messages' own memory.

use std::ffi::OsString;
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::Parser;
use lm_admission::{Ipv4Net, Policy};
use lm_dataplane::port::Port;
use lm_dataplane::{
    AdmissionConfig, DEFAULT_PORT, Endpoint, EndpointConfig, Incoming, Message, Outcome, PeerId,
    ReceiveConfig, RecvError, SendError,
};

use crate::cli::{self, Failure, LinkOptions, MANUAL_END, Pipeline};
use crate::link;
use crate::meter::Meter;
use crate::output::Output;
use crate::privileges;
use crate::report::Report;
use crate::signals::Interrupt;
use crate::size::{ByteSize, approximate};
use crate::transfer::WHOLE_MAX;
use crate::transfer::incoming::{Event, Receiver, Taken};
use crate::transfer::outgoing::REPEAT_EVERY;
use crate::transfer::wire::{CONTROL_TAG, Control, TransferId};

const TOOL: &str = "lm-recv";

/// How long to sleep when nothing comes, before timers and signals are looked at again.
const IDLE_MAX: Duration = Duration::from_millis(10);

/// The same while the disk is waited for.
const DISK_MAX: Duration = Duration::from_millis(1);

/// How long the last answers may take to be confirmed before the program ends.
const FAREWELL_MAX: Duration = Duration::from_secs(1);

/// Answers that one address may have without acknowledging them. There are transmit frames for 62 such addresses.
const UNACKNOWLEDGED_MAX: usize = 64;

/// Refusals shown per second; a hostile sender can cause any number of them.
const REFUSALS_SHOWN_EVERY: Duration = Duration::from_millis(200);

const ABOUT: &str = "Receives files that lm-send sends, over AF_XDP";

const LONG_ABOUT: &str = "\
Receives files that lm-send sends, over AF_XDP: each message arrives in one contiguous piece of this program's \
memory and is written from there.

The receiver chooses the names. With --output DIR (default: the current directory) transfers become \
transfer-000001, transfer-000002 and so on, the first free number each when it is complete; with --output FILE one \
transfer becomes \
that file; with - they go to standard output one behind the other, and so they do with a FIFO or a character device.

A file has its final name only when it is complete. Until then it is called .NAME-ADDRESS-KEY.part (in a directory \
.ADDRESS-KEY.part), and it is kept when the sender or the way to it fails, for lm-send --resume: 16 of them, 8 of one \
address, in a \
directory, and no longer than until that file is sent again. What comes from standard input is .NAME.partial-PID and \
removed then. \
Nothing is overwritten without --force.

The receiver says who may send (as root it must: --allow, or --from-anyone), how much comes in all (--max-bytes), and \
leaves \
some space free (--keep-free). Once it listens it has no other privileges than those that AF_XDP needs.

Examples:
  lm-recv --interface eth1 --allow 10.0.0.0/24       what comes from there, into this directory
  lm-recv --output big.img --count 1 --allow 10.0.0.1
  lm-recv --output - --count 1 --from-anyone | tar -x";

/// The command line of `lm-recv`.
#[derive(Clone, Debug, Parser)]
#[command(name = TOOL, version, about = ABOUT, long_about = LONG_ABOUT, after_long_help = MANUAL_END)]
pub struct Options {
    #[command(flatten)]
    link: LinkOptions,

    /// UDP port for data; the next one is used for control
    #[arg(long, short = 'p', default_value_t = DEFAULT_PORT, value_name = "PORT",
          value_parser = clap::value_parser!(u16).range(1..=65_534))]
    port: u16,

    /// Where transfers go: a file, a directory (which gets transfer-000001 and so on), or - for standard output
    #[arg(long, short = 'o', default_value = ".", value_name = "FILE|DIR|-")]
    output: PathBuf,

    /// End after so many complete transfers [default: run until Ctrl-C]
    #[arg(long, short = 'n', value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    count: Option<u64>,

    /// Refuse larger messages; memory for one is taken when a sender asks for it, and for all never more than for one and 48M
    #[arg(long, default_value = "1G", value_name = "SIZE")]
    max_message_size: ByteSize,

    /// Take transfers from these addresses only; may be given more than once [default: from everybody, but not as root]
    #[arg(long, value_name = "CIDR", value_parser = lm_admission::range)]
    allow: Vec<Ipv4Net>,

    /// Take transfers from everybody who reaches this host, as root too
    #[arg(long, conflicts_with = "allow")]
    from_anyone: bool,

    /// Take so many bytes in all, and refuse what would be more; transfers that failed do not count [default: no limit]
    #[arg(long, value_name = "SIZE")]
    max_bytes: Option<ByteSize>,

    /// Refuse or end transfers that would leave less of the file system free [default: a twentieth of it, at most 1G]
    #[arg(long, value_name = "SIZE")]
    keep_free: Option<ByteSize>,

    /// Take --wire ipfrag in zero-copy mode, too: this host is LM's alone meanwhile
    ///
    /// Network cards hash IP fragments by their addresses alone. While such a transfer lasts, everything that the card
    /// hashes so between its sender and this host (other programs' fragments, ping, most of what is neither TCP nor UDP)
    /// comes to the landing queue and is lost. Without this such senders are refused in zero-copy mode; copy mode
    /// takes them always.
    #[arg(long)]
    exclusive: bool,

    /// Report success only when the disk has the file and its name
    ///
    /// Without it a host that loses its power, or a disk that fails later, may lose what was reported as received.
    #[arg(long)]
    fsync: bool,
}

/// Runs the tool; what `main` returns.
pub fn main(arguments: impl IntoIterator<Item = OsString>) -> ExitCode {
    let verbose = |options: &Options| options.link.verbose;
    cli::main(TOOL, arguments, verbose, |options: Options| {
        #[cfg(feature = "dpdk")]
        if options.link.dpdk.is_some() {
            return Ok(Tool::open(&options, link::open_dpdk)?.run());
        }
        Ok(Tool::open(&options, link::open)?.run())
    })
}

struct Tool<P: Port> {
    endpoint: Endpoint<P>,
    receiver: Receiver<PeerId, Message>,
    /// Messages that are arriving, of peers that send a transfer.
    arriving: Vec<Incoming>,
    /// Of each answer that is not acknowledged, where it went.
    unacknowledged: Vec<(PeerId, Ipv4Addr)>,
    meter: Meter,
    interrupt: Interrupt,
    options: Options,
    refusal_shown: Option<Instant>,
    refusals_hidden: u64,
}

impl<P: Port> Tool<P> {
    fn open(options: &Options, open: link::Open<P>) -> Result<Self, Failure> {
        if options.output == Path::new("-") && options.link.json {
            return Err(Failure::usage(
                "--json and --output - both want standard output; write to a file instead",
            ));
        }
        if options.max_message_size.bytes() == 0 {
            return Err(Failure::usage(
                "--max-message-size 0 refuses everything; name a larger size",
            ));
        }
        if rustix::process::geteuid().is_root() && options.allow.is_empty() && !options.from_anyone {
            return Err(Failure::usage(
                "as root, whoever reaches this host could fill its disk; say who may send (--allow 10.0.0.0/24), or \
                 add --from-anyone",
            ));
        }
        let interrupt = Interrupt::install().map_err(|error| Failure::new(format!("{error}; try again")))?;
        let output = Output::new(&options.output, options.link.force);
        let mut output = output.map_err(|error| Failure::new(error.text))?;
        output.keep_free = options.keep_free.map(ByteSize::bytes);
        output.fsync = options.fsync;
        let meter = Meter::new(TOOL, &options.link, Instant::now())?;
        let policy = Policy {
            allow: options.allow.clone(),
            max_message_len: options.max_message_size.bytes(),
        };
        let base = link::endpoint_config(&options.link, link::default_interface)?;
        let config = EndpointConfig {
            port: options.port,
            receive: ReceiveConfig {
                max_message_len: policy.max_message_len,
                exclusive: options.exclusive,
            },
            admission: AdmissionConfig {
                allow: (policy
                    .allow
                    .iter()
                    .map(|range| (range.network(), range.prefix_len())))
                .collect(),
                ..base.admission
            },
            ..base
        };
        let drop_rest = || privileges::drop_rest(|| output.check().is_ok());
        // DPDK's own threads have what this one has when they begin.
        let early = options.link.dpdk.as_ref().map(|_| drop_rest()).transpose()?;
        let endpoint = open(&options.link, &config, Box::new(policy.clone()))?;
        if early.map_or_else(drop_rest, Ok)? {
            let text = "warning: --output is another user's, so that root's power over files stays; choose a place of \
                        root's";
            cli::complain(TOOL, text);
        }
        for warning in endpoint.status().warnings() {
            cli::complain(TOOL, &format!("warning: {warning}"));
        }
        let landing = endpoint.status().landing_memory();
        let allowed = match options.allow[..] {
            [] => " from everybody (see --allow)",
            _ => "",
        };
        let text = format!(
            "listening on {} port {}{allowed}, mode {}, landing memory {}, at most {}, {} for one sender",
            config.interface,
            options.port,
            endpoint.status().mode(),
            approximate(landing.len),
            approximate(landing.len_max),
            approximate(landing.address_max)
        );
        cli::complain(TOOL, &text);
        let max_bytes = options.max_bytes.map_or(u64::MAX, ByteSize::bytes);
        Ok(Tool {
            endpoint,
            receiver: Receiver::new(output, policy).max_bytes(max_bytes),
            arriving: Vec::new(),
            unacknowledged: Vec::new(),
            meter,
            interrupt,
            options: options.clone(),
            refusal_shown: None,
            refusals_hidden: 0,
        })
    }

    fn run(mut self) -> ExitCode {
        let ended = self.receive();
        self.receiver.stop(Instant::now());
        self.tell();
        self.say_farewell();
        let result = ended.and(self.meter.finish());
        self.report(result)
    }

    /// Receives until the count is reached, a signal comes, or the endpoint fails.
    fn receive(&mut self) -> Result<(), Failure> {
        loop {
            if self.interrupt.is_set() {
                return Err(Failure::interrupted());
            }
            let now = Instant::now();
            match self.endpoint.try_recv() {
                Ok(Some(message)) => self.take(message, now),
                Ok(None) if self.write_shown(now) => {}
                Ok(None) if self.receiver.is_waiting() => self.endpoint.wait(DISK_MAX),
                Ok(None) => self.endpoint.wait(IDLE_MAX),
                Err(error @ RecvError::Incomplete { peer, .. }) => {
                    self.receiver
                        .on_incomplete(peer, &format!("{}; send again", cli::chain(&error)), now);
                }
                Err(RecvError::Aborted { peer, .. }) => {
                    self.receiver.on_incomplete(peer, "the sender gave up", now);
                }
                Err(error) => return Err(error.into()),
            }
            self.receiver.poll_timeout(now, self.options.link.patience);
            self.send_replies();
            self.tell();
            let (endpoint, receiver, arriving) = (&self.endpoint, &self.receiver, &self.arriving);
            self.meter.tick(now, || {
                let counters = endpoint.counters();
                let landed = counters.landing_packets + counters.fragments_one_copy;
                let whole = receiver.totals().bytes;
                let written = whole + receiver.shown_bytes();
                let shown = arriving.iter().flat_map(Incoming::shown);
                // What is written was shown, though its message may be settled, and no longer be arriving.
                let shown = written.max(whole + shown.map(|range| range.end - range.start).sum::<u64>());
                let (shown, written) = (approximate(shown), approximate(written));
                let stations = format!("landed {landed} fragments, shown {shown}, written {written}, whole");
                (stations, link::drop_count(endpoint))
            });
            let transfers = self.receiver.totals().transfers;
            if self.options.count.is_some_and(|count| transfers >= count) {
                return Ok(());
            }
        }
    }

    fn take(&mut self, message: Message, now: Instant) {
        let (peer, tag, latency_ns) = (message.peer(), message.tag(), message.latency_ns());
        let Some(from) = self.endpoint.peer(peer).address() else {
            // Its place in the table of peers was taken by another; it can neither be judged nor answered.
            return self.receiver.note_stray(tag);
        };
        let transfer = match tag {
            CONTROL_TAG => Control::parse(&message).ok().map(|control| control.transfer()),
            _ => TransferId::from_data_tag(tag).map(|(transfer, _)| transfer),
        };
        let mut between = between(&mut self.endpoint, &self.interrupt, (peer, transfer), now);
        let taken = (self.receiver).on_message(peer, *from.ip(), tag, message, now, &mut between);
        drop(between);
        // Their memory is free when nobody reads there any more.
        self.arriving.retain(|incoming| incoming.settled().is_none());
        let is_piped = self.options.link.pipeline == Pipeline::On;
        if taken == Taken::Control && is_piped && self.receiver.is_receiving_from(peer) {
            self.endpoint.peer(peer).watch();
        }
        if taken == Taken::Data {
            self.meter.latency.record_ns(latency_ns);
        }
        self.meter.bytes = self.receiver.totals().bytes;
        self.meter.messages = self.receiver.totals().messages;
    }

    /// Writes a piece of what may be read of messages that are arriving. `false`: there is none.
    fn write_shown(&mut self, now: Instant) -> bool {
        let come = std::iter::from_fn(|| self.endpoint.try_incoming());
        self.arriving
            .extend(come.filter(|incoming| incoming.len() > WHOLE_MAX));
        self.arriving.retain(|incoming| incoming.settled().is_none());
        self.arriving.iter().any(|incoming| {
            let (peer, tag) = (incoming.peer(), incoming.tag());
            let transfer = TransferId::from_data_tag(tag).map(|(transfer, _)| transfer);
            let mut between = between(&mut self.endpoint, &self.interrupt, (peer, transfer), now);
            let get = |bytes| incoming.bytes(bytes).ok();
            let (what, shown) = ((tag, incoming.len()), incoming.shown());
            self.receiver.on_shown(peer, what, shown, get, now, &mut between)
        })
    }

    fn send_replies(&mut self) {
        for _ in 0..self.receiver.replies() {
            let Some((peer, control)) = self.receiver.take_reply() else {
                break;
            };
            // A peer that is gone asks no more.
            let Some(to) = self.endpoint.peer(peer).address() else {
                continue;
            };
            let theirs = self.unacknowledged.iter().filter(|(_, ip)| ip == to.ip());
            let sent = match theirs.count() {
                UNACKNOWLEDGED_MAX.. => Err(SendError::WouldBlock),
                _ => link::try_send_control(&mut self.endpoint, peer, &control),
            };
            match sent {
                Ok(()) => self.unacknowledged.push((peer, *to.ip())),
                // One peer's waits for what that peer acknowledges, and the others' do not.
                Err(SendError::WouldBlock) => self.receiver.return_reply(peer, control),
                // A peer that is gone asks no more; the others go on.
                Err(error) => self.tell_refusal(&format!("cannot answer: {}", cli::chain(&error))),
            }
        }
        // Nobody here waits for confirmations, but who confirms nothing any more is not there.
        while let Some(completion) = self.endpoint.try_completion() {
            let mut answers = self.unacknowledged.iter();
            let answer = answers.position(|(peer, _)| *peer == completion.peer);
            let _ = answer.map(|at| self.unacknowledged.swap_remove(at));
            if completion.outcome == Outcome::TimedOut {
                self.receiver.on_gone(completion.peer, Instant::now());
            }
        }
    }

    /// Tells the user what happened, on standard error.
    fn tell(&mut self) {
        while let Some(event) = self.receiver.take_event() {
            match event {
                Event::Started => {
                    let announced = self.receiver.announced_bytes();
                    self.meter
                        .expect((announced > 0).then_some(self.meter.bytes + announced));
                }
                Event::Finished { name, bytes } => {
                    let text = format!("received {}: {name}", approximate(bytes));
                    self.meter.say(&text);
                }
                Event::Failed { from, text } => {
                    self.meter.say(&format!("transfer from {from} failed: {text}"));
                }
                Event::Refused { from, text } => self.tell_refusal(&format!("refused {from}: {text}")),
            }
        }
    }

    fn tell_refusal(&mut self, text: &str) {
        let now = Instant::now();
        let shown = self.refusal_shown;
        if shown.is_some_and(|shown| now < shown + REFUSALS_SHOWN_EVERY) {
            self.refusals_hidden += 1;
            return;
        }
        self.refusal_shown = Some(now);
        match std::mem::take(&mut self.refusals_hidden) {
            0 => self.meter.say(text),
            hidden => (self.meter).say(&format!("{text} ({hidden} more refusals not shown)")),
        }
    }

    /// Lets the last answers arrive: their senders wait for them.
    fn say_farewell(&mut self) {
        let until = Instant::now() + FAREWELL_MAX;
        self.send_replies();
        while self.receiver.replies() > 0 && Instant::now() < until {
            self.endpoint.wait(IDLE_MAX);
            self.endpoint.poll();
            self.send_replies();
        }
        // A sender that left without confirming is no failure of ours.
        let left = until.saturating_duration_since(Instant::now());
        let _ = self.endpoint.flush(left);
    }

    /// The report, the reason of a failure, and the exit code.
    fn report(mut self, result: Result<(), Failure>) -> ExitCode {
        let totals = *self.receiver.totals();
        let known = Report {
            transfers: totals.transfers,
            failed_transfers: totals.failed_transfers,
            resumed_bytes: totals.resumed_bytes,
            wire: match totals.wires {
                [false, false] => None,
                [true, false] => Some("lm"),
                [false, true] => Some("ipfrag"),
                [true, true] => Some("mixed"),
            },
            ..Report::default()
        };
        let mut report = link::report(TOOL, &mut self.endpoint, known);
        for (reason, count) in [
            ("stray_message", totals.stray_data),
            ("stray_control", totals.stray_control),
        ] {
            if count > 0 {
                report.drops.insert(reason.to_owned(), count);
            }
        }
        let start = totals.first_start.zip(totals.last_end);
        let time = start.map(|(start, end)| end.saturating_duration_since(start));
        let seconds = time.unwrap_or_default().as_secs_f64();
        report.set_measured(totals.bytes, totals.messages, seconds, &self.meter.latency);
        // Detach before the last word: whoever reads it may start the next program at once.
        drop(self.endpoint);
        let is_data = self.options.output == Path::new("-");
        cli::conclude(TOOL, report, result, self.options.link.json, is_data)
    }
}

/// What is done now and then while something is written or read: a sender that waits for the end of it must not think that we are gone.
/// `false`: the user wants an end.
fn between<'a, P: Port>(
    endpoint: &'a mut Endpoint<P>,
    interrupt: &'a Interrupt,
    (peer, transfer): (PeerId, Option<TransferId>),
    now: Instant,
) -> impl FnMut() -> bool + 'a {
    let mut speak_at = now + REPEAT_EVERY;
    move || {
        endpoint.poll();
        let now = Instant::now();
        if let Some(transfer) = transfer.filter(|_| now >= speak_at) {
            speak_at = now + REPEAT_EVERY;
            // When there is no room for it now, the next one is a second away.
            let _ = link::try_send_control(endpoint, peer, &Control::Alive { transfer });
        }
        !interrupt.is_set()
    }
}
