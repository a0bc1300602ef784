//! The daemon: one thread, one loop, bounded work for everybody in each turn.
//!
//! ```text
//!  control port ──▶ Attachment::drive ─▶ Node ─▶ Ground (gate)   one for each interface
//!  programs ─────▶ calls.rs ──────────────┘
//!  other threads ▶ worker.rs: the gate is quiet, an XSK is bound
//!  signals, interfaces that come and go, timers
//! ```
//!
//! A turn takes what is there from each of them, up to a bound, and only then looks again: a flood on the control port does not keep
//! programs waiting, nor a program the others. What programs are to be told is delivered after each part; the state file is written
//! last, after every answer.

mod attachment;
mod calls;
mod channels;
mod connections;
mod ground;
mod interfaces;
mod joining;
mod program;
mod share;
mod smoothing;
mod state;
pub mod status;
mod takeover;
mod telling;
mod worker;

use std::collections::BTreeMap;
use std::io;
use std::os::fd::AsRawFd as _;
use std::sync::Arc;
use std::time::Duration;

use lm_protocol::admission::ClusterKey;
use lm_protocol::time::Time;
use mio::unix::SourceFd;
use mio::{Events, Interest, Poll, Token, Waker};
use netlink_sys::Socket as Netlink;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGUSR1};
use signal_hook_mio::v1_0::Signals;

use crate::clock;
use crate::config::Config;
use crate::metrics::Metrics;
use crate::pins::Pins;
use crate::ports::Received;
use crate::socket::{Connection, Credentials, Listener};
use attachment::Attachment;
use program::{Program, ProgramId};
use state::State;
use worker::Workers;

/// Work in a turn, at most.
const DATAGRAMS_PER_TURN: usize = 256;

/// How often one that spins looks for datagrams to its hosts' addresses before it asks the kernel for everything else: a system call
/// instead of three, and so much less that a request waits for.
const SPINS_PER_TURN: u32 = 16;

/// The state file is not written more often: it costs as much as some requests.
const STATE_PERIOD: Duration = Duration::from_millis(20);

/// When an answer is tried again for which there was no room among the descriptors in flight.
const CROWDED_RETRY: Duration = Duration::from_millis(10);

/// How long an interface that cannot be served waits before it is tried again.
const ATTACH_RETRY: Duration = Duration::from_secs(1);

const LISTENER: Token = Token(0);
const WAKER: Token = Token(1);
const SIGNALS: Token = Token(2);
const LINKS: Token = Token(3);
/// From here on: two tokens for each interface.
const PORTS: usize = 16;
/// From here on: programs.
const PROGRAMS: usize = 1 << 16;

/// How a daemon ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ending {
    /// Sessions end, everybody is told, nothing is left.
    Clean,
    /// Everything stays for the next daemon.
    HandOver,
}

/// Where the configuration comes from, to read it again.
pub type Reload = Box<dyn FnMut() -> Result<(Config, ClusterKey), String>>;

/// Changes what is logged.
pub type SetLog = Box<dyn Fn(&str)>;

/// A running daemon.
pub struct Daemon {
    config: Config,
    key: ClusterKey,
    pins: Pins,
    reload: Reload,
    set_log: SetLog,
    poll: Poll,
    listener: Option<Listener>,
    links: Netlink,
    signals: Signals,
    workers: Workers,
    metrics: Option<Metrics>,
    /// By position in the configuration; none while it is not there.
    attachments: Vec<Option<Attachment>>,
    /// Why it is not there, and when to look again.
    absent: Vec<(String, Time)>,
    /// Counts an interface's times.
    stays: Vec<u32>,
    programs: BTreeMap<ProgramId, Program>,
    /// Connections that were hung up, with descriptors in flight: as many for each user as it may have connected.
    unread: Vec<(Credentials, Connection)>,
    next_program: usize,
    /// Counts reads from programs.
    reads: u64,
    /// The user whose question was answered last.
    last_asked: u32,
    is_changed: bool,
    /// The state is being written.
    is_writing: bool,
    written: Time,
    /// Connections may wait that could not be accepted.
    accepting: bool,
    calls: u64,
    refusals: u64,
}

/// Random bits from the kernel.
fn random_u64() -> u64 {
    u64::from_ne_bytes(crate::key::random().unwrap_or_else(|what| panic!("{what}")))
}

/// Looks whether a daemon could start, without changing anything.
///
/// # Errors
/// One line with the remedy.
pub fn check(config: &Config) -> Result<(), String> {
    if let Some(user) = &config.user {
        crate::privileges::find_user(user)?;
    }
    for name in &config.interface {
        Attachment::check(name, config)?;
    }
    Ok(())
}

impl Daemon {
    /// Starts: drops privileges, attaches the gates or takes them over, listens.
    ///
    /// # Errors
    /// One line with the remedy.
    pub fn start(config: Config, key: ClusterKey, reload: Reload, set_log: SetLog) -> Result<Daemon, String> {
        let user = config.user.as_deref().map(crate::privileges::find_user);
        let user = user.transpose()?;
        crate::privileges::check()?;
        let mut directories = vec![config.state_dir.clone()];
        directories.extend(config.socket.parent().map(ToOwned::to_owned));
        let mut files = State::files(&config.state_dir).to_vec();
        files.push(Listener::lock_path(&config.socket));
        let written = directories.iter().cloned();
        // A user's daemon can make no folder there.
        let shaping =
            (user.is_some() && config.link_rate.is_some()).then(|| lm_cards::Shaping::FOLDER.into());
        let made: Vec<_> = written.chain(shaping).collect();
        let pins = crate::privileges::prepare(&made, &files, &config.bpffs, user)?;
        crate::privileges::drop_rest(user)?;
        crate::privileges::check_writable(&directories)?;
        let listener = Listener::bind(&config.socket)?;
        if let Err(error) = lm_ebpf::remove_defunct_pins(&pins.path()) {
            tracing::debug!("cannot look at what is pinned: {error}");
        }

        let told = |what: &'static str| move |error: io::Error| format!("cannot {what}: {error}");
        let poll = Poll::new().map_err(told("make an epoll instance"))?;
        let registry = poll.registry();
        let waker = Waker::new(registry, WAKER).map_err(told("make an epoll instance"))?;
        let mut signals =
            Signals::new([SIGTERM, SIGINT, SIGHUP, SIGUSR1]).map_err(told("watch for signals"))?;
        let watched = registry.register(&mut signals, SIGNALS, Interest::READABLE);
        watched.map_err(told("watch for signals"))?;
        let links = interfaces::watch().map_err(told("watch interfaces"))?;
        let watched = registry.register(&mut SourceFd(&links.as_raw_fd()), LINKS, Interest::READABLE);
        watched.map_err(told("watch interfaces"))?;
        let listening = registry.register(&mut SourceFd(&listener.raw_fd()), LISTENER, Interest::READABLE);
        listening.map_err(told("watch the socket"))?;
        let waker = Arc::new(waker);
        let workers =
            Workers::start(Arc::clone(&waker), config.state_dir.clone()).map_err(told("start a thread"))?;
        let metrics = config.metrics.map(|address| Metrics::serve(address, waker));
        let mut daemon = Daemon {
            attachments: config.interface.iter().map(|_| None).collect(),
            absent: vec![(String::new(), Time::ZERO); config.interface.len()],
            stays: vec![0; config.interface.len()],
            config,
            key,
            pins,
            reload,
            set_log,
            poll,
            listener: Some(listener),
            links,
            signals,
            workers,
            metrics: metrics.transpose()?,
            programs: BTreeMap::new(),
            unread: Vec::new(),
            next_program: 0,
            reads: 0,
            last_asked: 0,
            is_changed: true,
            is_writing: false,
            written: Time::ZERO,
            accepting: true,
            calls: 0,
            refusals: 0,
        };
        let state = State::read(&daemon.config.state_dir);
        // At the start each of them must be there.
        for position in 0..daemon.attachments.len() {
            daemon.attach(position)?;
            daemon.take_over(position, &state);
        }
        Ok(daemon)
    }

    /// Works until a signal ends it.
    ///
    /// # Errors
    /// One line: epoll failed.
    pub fn run(mut self) -> Result<(), String> {
        notify(&[sd_notify::NotifyState::Ready]);
        let mut events = Events::with_capacity(1024);
        let mut turns_to_events = 0;
        let ending = loop {
            if turns_to_events > 0 {
                // One that spins looks in between only for what hosts ask it.
                turns_to_events -= 1;
                if !self.receive_at_address() {
                    continue;
                }
                events.clear();
            } else {
                turns_to_events = if self.config.spin { SPINS_PER_TURN } else { 0 };
                let timeout = self.timeout();
                if let Err(error) = self.poll.poll(&mut events, timeout)
                    && error.kind() != io::ErrorKind::Interrupted
                {
                    return Err(format!("cannot wait for events: {error}"));
                }
            }
            if let Some(ending) = self.turn(&events) {
                break ending;
            }
        };
        self.end(ending);
        Ok(())
    }

    /// How long nothing is to be done.
    fn timeout(&self) -> Option<Duration> {
        let can_go_on = |program: &Program| program.can_be_read() || program.has_question();
        let attachments = || self.attachments.iter().flatten();
        let is_behind = attachments().any(|attachment| attachment.ports.more);
        if self.config.spin || is_behind || self.accepting || self.programs.values().any(can_go_on) {
            return Some(Duration::ZERO);
        }
        let now = clock::now();
        let nodes = attachments().map(|attachment| attachment.node.next_deadline());
        let awaited = self.programs.values().map(|program| program.awaited_until);
        let absent = self.attachments.iter().zip(&self.absent);
        let absent = absent.map(|(attachment, (_, again))| attachment.is_none().then_some(*again));
        let is_due = self.is_changed && !self.is_writing;
        let state = is_due.then_some(self.written + STATE_PERIOD);
        let mut connections = self
            .programs
            .values()
            .filter_map(|program| program.connection.as_ref());
        let is_crowded = connections.any(|connection| connection.is_crowded);
        let crowded = is_crowded.then_some(now + CROWDED_RETRY);
        let deadlines = nodes.chain(awaited).chain(absent).flatten();
        let deadline = deadlines.chain(state).chain(crowded).min();
        // Rounded up: epoll's milliseconds would wake the loop too early, and again and again.
        deadline.map(|deadline| deadline.since(now))
    }

    fn turn(&mut self, events: &Events) -> Option<Ending> {
        let mut ending = None;
        for event in events {
            match event.token() {
                LISTENER => self.accepting = true,
                WAKER => {}
                SIGNALS => ending = ending.or(self.on_signals()),
                LINKS => self.on_links(),
                // Looked at in each turn, whether there is an event or not: reading costs no more than asking.
                Token(token) if token < PROGRAMS => {}
                Token(token) => self.on_program_event(ProgramId(token - PROGRAMS), event.is_read_closed()),
            }
        }
        self.receive();
        self.deliver();
        while let Some(done) = self.workers.next() {
            self.on_done(done);
        }
        self.accept();
        self.read_programs();
        self.deliver();
        let now = clock::now();
        for attachment in self.attachments.iter_mut().flatten() {
            let deadline = attachment.node.next_deadline();
            if deadline.is_some_and(|deadline| deadline <= now) {
                attachment.drive(|node, now, local, out| node.on_timer(now, local, out));
            }
        }
        self.give_up_awaited(now);
        self.try_absent(now);
        self.deliver();
        for attachment in self.attachments.iter_mut().flatten() {
            for quiesce in attachment.ground.start_quiesce() {
                self.workers.wait(attachment.stay, quiesce);
            }
        }
        if let Some(metrics) = &self.metrics {
            metrics.answer(|| self.status());
        }
        self.watch_deaf();
        self.write_state(now);
        ending
    }

    /// Takes datagrams from the control ports.
    fn receive(&mut self) {
        let mut buffer: Received = [0; _];
        for attachment in self.attachments.iter_mut().flatten() {
            for _ in 0..DATAGRAMS_PER_TURN {
                let Some((from, len)) = attachment.ports.receive(&mut buffer) else {
                    attachment.ports.more = false;
                    break;
                };
                attachment.ports.more = true;
                attachment.take(from, &buffer[..len]);
            }
        }
    }

    /// Takes a datagram that came to an address of this host; whether there was one.
    fn receive_at_address(&mut self) -> bool {
        let mut buffer: Received = [0; _];
        let mut any = false;
        for attachment in self.attachments.iter_mut().flatten() {
            if let Some((from, len)) = attachment.ports.receive_at_address(&mut buffer) {
                attachment.take(from, &buffer[..len]);
                any = true;
            }
        }
        any
    }

    fn on_signals(&mut self) -> Option<Ending> {
        let signals: Vec<i32> = self.signals.pending().collect();
        let mut ending = None;
        for signal in signals {
            match signal {
                SIGHUP => self.reload(),
                SIGUSR1 => ending = Some(Ending::HandOver),
                _ => return Some(Ending::Clean),
            }
        }
        ending
    }

    /// SIGHUP: allow lists, limits, peers, key, the link's rate and log level are read again; what is wrong leaves all as it was.
    fn reload(&mut self) {
        let usec = clock::now().as_nanos() as i128 / 1000;
        notify(&[
            sd_notify::NotifyState::Reloading,
            sd_notify::NotifyState::MonotonicUsec(usec),
        ]);
        match (self.reload)() {
            Ok((config, key)) => {
                for name in self.config.fixed_differences(&config) {
                    tracing::warn!("{name} has changed: restart the daemon for it");
                }
                self.config.allow_uid = config.allow_uid;
                self.config.allow_gid = config.allow_gid;
                self.config.programs_max = config.programs_max;
                self.config.memory_max = config.memory_max;
                self.config.queues_per_user = config.queues_per_user;
                self.config.memory_per_user = config.memory_per_user;
                self.config.programs_per_user = config.programs_per_user;
                self.config.peer = config.peer;
                self.config.key_file = config.key_file;
                (self.set_log)(&config.log);
                self.config.log = config.log;
                if self.config.link_rate.is_some() && config.link_rate.is_some() {
                    self.set_link_rate(config.link_rate);
                }
                self.key = key;
                for attachment in self.attachments.iter_mut().flatten() {
                    attachment.node.set_key(self.key.clone());
                    attachment
                        .ports
                        .set_peers(attachment.address, &self.config.peers());
                }
                // Who is not on the list any more goes.
                let gone = self.programs_that(|program| {
                    let (who, has_any) = (
                        program.credentials,
                        program.member.is_some() || program.smooths.is_some(),
                    );
                    has_any && !self.config.allows(who.uid, who.gid)
                });
                self.drop_programs(gone, "it is not on the list any more");
                tracing::info!("the configuration was read again");
            }
            Err(what) => tracing::error!("nothing has changed: {what}"),
        }
        notify(&[sd_notify::NotifyState::Ready]);
    }

    fn write_state(&mut self, now: Time) {
        if !self.is_changed || self.is_writing || now < self.written + STATE_PERIOD {
            return;
        }
        self.is_changed = false;
        self.is_writing = true;
        self.written = now;
        self.workers.write(self.state().text());
    }

    fn end(mut self, ending: Ending) {
        notify(&[sd_notify::NotifyState::Stopping]);
        if ending == Ending::HandOver {
            tracing::info!("everything stays for the next daemon");
            self.workers.write(self.state().text());
            self.workers.finish_writing();
            if let Some(listener) = self.listener.take() {
                listener.leave();
            }
            return;
        }
        tracing::info!("ending: sessions end, and their hosts are told");
        self.drop_programs(self.programs_that(|_| true), "the daemon ends");
        for attachment in self.attachments.drain(..).flatten() {
            attachment.end();
        }
        self.workers.finish_writing();
        State::remove(&self.config.state_dir);
    }
}

/// Tells systemd, where it asked for that.
fn notify(states: &[sd_notify::NotifyState<'_>]) {
    if let Err(error) = sd_notify::notify(states) {
        tracing::debug!("cannot tell systemd: {error}");
    }
}

#[cfg(test)]
mod bounds_tests;
