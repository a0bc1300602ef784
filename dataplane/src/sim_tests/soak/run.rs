//! A soak's run: two applications that send and keep messages, and the hosts that pause and die.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::num::NonZeroU64;

use lm_protocol::delivery::Delivery;
use lm_protocol::geometry::{Layout, LinkShape, Wire as WireMode};
use lm_protocol::landing::PLACES;

use super::plan::{self, Plan};
use super::writing::Written;
use super::{LIMIT_NS, Report};
use crate::arena::pages_len;
use crate::bounds::GENERAL_FRAMES;
use crate::completion::{LoanError, Outcome, PeerId, RecvError, SendError};
use crate::connect::ConnectOptions;
use crate::landing::Inbound;
use crate::message::Message;
use crate::opening::spare_frame_count;
use crate::region::SendRegion;
use crate::region::TrySendError;
use crate::release::Released;
use crate::sim_tests::audience::Read;
use crate::sim_tests::bed::{Bed, PORT, fill, is_back_pressure, noise};
use crate::sim_tests::guard::Guard;
use crate::sim_tests::transfer::Dice;
use crate::simnic::Impairments;

/// How often a host asks for a session before it gives up what it has left to send.
const CONNECTS_MAX: u32 = 40;
/// Between two attempts.
const CONNECT_AGAIN_NS: u64 = 50_000_000;
/// Rounds between two checks of all guard bytes.
const GUARD_EVERY: u64 = 512;
/// The longest steps of virtual time while nothing happens, at first and when that has lasted for a while: timers need
/// milliseconds, and leases last seconds.
const STEP_MAX_NS: [u64; 2] = [500_000, 4_000_000];
/// So many rounds without work are a while.
const IDLE_ROUNDS: u32 = 100;

/// The application of one host.
pub(super) struct Application {
    peer: PeerId,
    /// Tag and length.
    to_send: VecDeque<(u64, usize)>,
    unsent: Option<(SendRegion, u64)>,
    pub(super) written: Vec<Written>,
    /// Tags of those that their writers gave up.
    pub(super) given_up: BTreeSet<u64>,
    /// How each message that was accepted ended.
    pub(super) sent: BTreeMap<u64, Option<Outcome>>,
    is_connecting: bool,
    connects: u32,
    connect_after_ns: u64,
    /// Tags received.
    pub(super) received: BTreeSet<u64>,
    /// The last of those that came in a session.
    last_landed: Option<u64>,
    aborted: u64,
    pub(super) held: Vec<(Message, u64)>,
    /// What it reads while it arrives.
    reads: Vec<Read>,
    read_early: u64,
    pub(super) dead: bool,
}

pub(super) struct Run {
    pub(super) seed: u64,
    pub(super) plan: Plan,
    pub(super) bed: Bed,
    pub(super) layout: Layout,
    pub(super) applications: [Application; 2],
    pub(super) guards: [Guard; 2],
    pub(super) start_ns: u64,
    rounds: u64,
    /// Rounds without work since the last one with some.
    idle: u32,
    /// When rounds are, and what applications do in them.
    dice: Dice,
    /// Of its own, so that what else a seed decides is the same with and without.
    pub(super) write_dice: Dice,
}

pub(super) fn payload(seed: u64, tag: u64, len: usize) -> Vec<u8> {
    noise(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ tag, len)
}

impl Run {
    pub(super) fn new(seed: u64, plan: Plan) -> Run {
        let mut bed = Bed::new(&plan.bed);
        let applications = [0usize, 1].map(|host| Application {
            peer: bed.resolve(host),
            to_send: plan.messages[host]
                .iter()
                .enumerate()
                .map(|(number, &len)| (((host as u64) << 32) + number as u64, len))
                .collect(),
            unsent: None,
            written: Vec::new(),
            given_up: BTreeSet::new(),
            sent: BTreeMap::new(),
            is_connecting: false,
            connects: 0,
            connect_after_ns: 0,
            received: BTreeSet::new(),
            last_landed: None,
            aborted: 0,
            held: Vec::new(),
            reads: Vec::new(),
            read_early: 0,
            dead: false,
        });
        let guards = [0usize, 1].map(|host| {
            let queues = plan.bed.queues[host];
            let engine = &mut bed.hosts[host];
            let memory = engine.memory.umem().len();
            let landing = engine.landing.as_ref().expect("a landing channel");
            let chunk_len = u64::from(engine.fixed.chunk_len).next_power_of_two();
            // Spare frames lie before the arena.
            let spare = pages_len(u64::from(spare_frame_count(&engine.fixed.caps)) * chunk_len);
            let first = landing.arena.start() - spare;
            bed.wire
                .set_bounds(host, queues.landing.expect("a landing queue"), first..memory);
            if let Some(general) = queues.general {
                let end = u64::from(GENERAL_FRAMES) * chunk_len;
                bed.wire.set_bounds(host, general, 0..end);
            }
            Guard::new(engine)
        });
        if plan.reads {
            for (application, engine) in applications.iter().zip(&mut bed.hosts) {
                engine.watch(application.peer);
            }
        }
        for (from, what) in plan.impairments.iter().enumerate() {
            bed.wire.impair(from, *what);
        }
        if plan.full_until.is_some() {
            for engine in &mut bed.hosts {
                engine.with_node(0, |node, now, local, out| {
                    node.add_receiver(now, PORT, &[], local, out);
                });
            }
        }
        Run {
            layout: Layout::new(plan.mode, plan.bed.mtu, LinkShape::IPV4).expect("a legal MTU"),
            start_ns: bed.now_ns,
            applications,
            guards,
            seed,
            plan,
            bed,
            rounds: 0,
            idle: 0,
            dice: plan::dice(!seed),
            write_dice: plan::dice(seed ^ 0x7772_6974_6572),
        }
    }

    /// Fragments of the host's session leave on another queue from now on.
    fn take_a_detour(&mut self, host: usize) {
        let engine = &mut self.bed.hosts[host];
        let Some(general) = engine.sending.scheduler().general() else {
            return;
        };
        let outbound = engine
            .peers
            .at(self.applications[host].peer.index)
            .outbound
            .as_mut();
        if let Some(outbound) = outbound {
            outbound.terms.channel = general;
        }
    }

    /// One round of whoever is awake.
    pub(super) fn round(&mut self) -> Result<(), String> {
        let since_ns = self.bed.now_ns - self.start_ns;
        if let Some((host, at_ns)) = self.plan.death
            && since_ns >= at_ns
            && !self.applications[host].dead
        {
            self.applications[host].dead = true;
            // Its application is told by somebody else, and sends no more to it.
            let survivor = &mut self.applications[1 - host];
            survivor.to_send.clear();
            survivor.unsent = None;
        }
        if let Some((host, at_ns)) = self.plan.detour
            && since_ns >= at_ns
        {
            self.take_a_detour(host);
        }
        let now_ns = self.bed.now_ns;
        let until = self.plan.full_until.iter_mut().flatten();
        for (engine, until_ns) in (self.bed.hosts.iter_mut()).zip(until) {
            if since_ns >= *until_ns {
                *until_ns = u64::MAX;
                let landing = engine.landing.as_ref().expect("a landing channel");
                let queue = landing.queue as u16;
                let places = match engine.fixed.caps.witness {
                    true => PLACES as usize,
                    false => 1,
                };
                engine.with_node(now_ns, |node, _, _, _| {
                    node.add_places(PORT, &vec![queue; places]);
                });
            }
        }
        let is_awake = [0, 1].map(|host| {
            !self.applications[host].dead
                && !self
                    .plan
                    .stalls
                    .iter()
                    .any(|stall| stall.host == host && (stall.begin_ns..stall.end_ns).contains(&since_ns))
        });
        let mut work = 0;
        for host in [0, 1] {
            if is_awake[host] {
                work += self.send(host)? + self.write(host);
            }
        }
        self.bed.wire.advance(self.bed.now_ns);
        for host in [0, 1] {
            if is_awake[host] {
                work += self.bed.poll(host);
                self.guards[host].look(&mut self.bed.hosts[host]);
                work += self.receive(host)?;
                self.complete(host)?;
            }
        }
        self.rounds += 1;
        if self.rounds.is_multiple_of(GUARD_EVERY) {
            self.check_guards()?;
        }
        self.idle = if work == 0 { self.idle + 1 } else { 0 };
        let step_ns = match self.idle {
            0 => 1000 + self.dice.roll(10_000),
            1..IDLE_ROUNDS => STEP_MAX_NS[0] >> self.dice.roll(8),
            _ => STEP_MAX_NS[1] - self.dice.roll(1_000_000),
        };
        let due_ns = self.bed.wire.next_due_ns().unwrap_or(u64::MAX);
        let next_ns = self.bed.now_ns + step_ns;
        self.bed.now_ns = next_ns.min(due_ns.max(self.bed.now_ns + 1));
        Ok(())
    }

    /// Hands messages over until there is back-pressure, and asks for a session where there is none.
    fn send(&mut self, host: usize) -> Result<usize, String> {
        let now_ns = self.bed.now_ns;
        let application = &mut self.applications[host];
        let mut work = 0;
        if application.is_connecting {
            match self.bed.application_outcome(host, application.peer.index) {
                None => {}
                Some(outcome) => {
                    application.is_connecting = false;
                    application.connect_after_ns = match outcome {
                        Ok(()) => now_ns,
                        Err(_) => now_ns + CONNECT_AGAIN_NS,
                    };
                    work += 1;
                }
            }
        }
        let engine = &mut self.bed.hosts[host];
        loop {
            let (region, tag) = match application.unsent.take() {
                Some(unsent) => unsent,
                None => {
                    let Some(&(tag, len)) = application.to_send.front() else {
                        return Ok(work);
                    };
                    let is_written = self.plan.writes && tag % 2 == 1 && len > 0;
                    let loaned = match is_written {
                        true => (engine.begin(application.peer, len as u64, tag, now_ns)).map(|writer| {
                            let payload = payload(self.seed, tag, len);
                            let written = Written::new(tag, writer, payload, &mut self.write_dice);
                            application.written.push(written);
                            None
                        }),
                        false => engine.loan(application.peer, len as u64).map(Some),
                    };
                    let region = match loaned {
                        Ok(region) => region,
                        Err(error) if is_back_pressure(&error) => return Ok(work),
                        Err(LoanError::NoSession) => {
                            self.connect(host);
                            return Ok(work);
                        }
                        Err(error) => return Err(format!("host {host} cannot loan {len} bytes: {error}")),
                    };
                    application.to_send.pop_front();
                    let Some(mut region) = region else {
                        application.sent.insert(tag, None);
                        work += 1;
                        continue;
                    };
                    fill(&mut region, &payload(self.seed, tag, len));
                    (region, tag)
                }
            };
            match engine.submit(region, tag, now_ns) {
                Ok(_) => {
                    application.sent.insert(tag, None);
                    work += 1;
                }
                Err(TrySendError { region, reason }) => match reason {
                    SendError::WouldBlock => {
                        application.unsent = Some((region, tag));
                        return Ok(work);
                    }
                    // It ended meanwhile: loan anew.
                    SendError::NoSession => {
                        let len = self.plan.messages[host][tag as u32 as usize];
                        application.to_send.push_front((tag, len));
                        drop(region);
                        return Ok(work + 1);
                    }
                    error => return Err(format!("host {host} cannot send: {error}")),
                },
            }
            if self.dice.roll(3) == 0 {
                return Ok(work);
            }
        }
    }

    fn connect(&mut self, host: usize) {
        let now_ns = self.bed.now_ns;
        let application = &mut self.applications[host];
        if application.is_connecting || now_ns < application.connect_after_ns {
            return;
        }
        if application.connects == CONNECTS_MAX {
            application.to_send.clear();
            return;
        }
        application.connects += 1;
        application.is_connecting = true;
        let options = ConnectOptions {
            wire: self.plan.mode,
            // By its own dice: adding a kind must not change what the other decisions of a seed are.
            delivery: [
                Delivery::Reliable,
                Delivery::Reliable,
                Delivery::Partial,
                Delivery::Unreliable,
            ][(self.seed % 4) as usize],
            max_message_len: self.plan.max_message_len,
            messages_in_flight: self.plan.messages_in_flight,
            one_copy: self.plan.mode == WireMode::Lm && (self.seed / 5).is_multiple_of(4),
            rate: NonZeroU64::new([0, 0, 0, 300_000_000, 2_000_000_000][(self.seed / 4 % 5) as usize]),
            ..ConnectOptions::default()
        };
        let engine = &mut self.bed.hosts[host];
        engine.end_session(application.peer.index, now_ns);
        self.bed.ask(host, application.peer, &options);
    }

    /// Looks at what is shown of messages that arrive, and lets some of them go.
    fn read(&mut self, host: usize) {
        let application = &mut self.applications[host];
        while let Some(incoming) = self.bed.hosts[host].next_incoming() {
            let payload = payload(self.seed, incoming.tag(), incoming.len() as usize);
            application.reads.push(Read::new(incoming, payload));
        }
        application.reads.retain_mut(|read| {
            let has_ended = read.incoming.settled().is_some();
            let was: u64 = read.seen.iter().map(|range| range.end - range.start).sum();
            let shown: u64 = read.incoming.shown().map(|range| range.end - range.start).sum();
            let goes = self.dice.roll(if has_ended { 16 } else { 4096 }) == 0;
            if shown != was || goes {
                read.check();
            }
            application.read_early += if has_ended { 0 } else { shown - was };
            !goes
        });
    }

    /// Takes what came, and gives back what was kept long enough.
    fn receive(&mut self, host: usize) -> Result<usize, String> {
        let mut work = 0;
        self.read(host);
        loop {
            match self.bed.hosts[host].take_message() {
                Ok(None) => break,
                Ok(Some(message)) => {
                    let tag = message.tag();
                    self.check(host, &message, "on arrival")?;
                    if !self.applications[host].received.insert(tag) {
                        return Err(format!("message {tag:#x} was delivered twice"));
                    }
                    if !message.is_eager() {
                        let last = self.applications[host].last_landed.replace(tag);
                        if last.is_some_and(|last| last > tag) {
                            return Err(format!("message {tag:#x} was delivered after {last:x?}"));
                        }
                    }
                    if let Some(Released::Zone { start, len }) = message.released {
                        self.check_margins(host, &message, (start, len))?;
                    }
                    let kept_ns = self.dice.roll(self.plan.keep_max_ns + 1);
                    self.applications[host]
                        .held
                        .push((message, self.bed.now_ns + kept_ns));
                }
                Err(RecvError::Incomplete { .. }) => {}
                Err(RecvError::Aborted { tag, .. }) => {
                    self.applications[host].aborted += 1;
                    if !self.applications[1 - host].given_up.contains(&tag) {
                        return Err(format!("message {tag:#x} is told as given up, and was not"));
                    }
                }
                Err(error) => return Err(format!("host {host} cannot receive: {error}")),
            }
            work += 1;
        }
        let mut at = 0;
        while at < self.applications[host].held.len() {
            if self.applications[host].held[at].1 <= self.bed.now_ns {
                self.give_back(host, at)?;
                work += 1;
            } else {
                at += 1;
            }
        }
        Ok(work)
    }

    /// The application drops a message, which nobody has written to meanwhile (I1).
    pub(super) fn give_back(&mut self, host: usize, at: usize) -> Result<(), String> {
        let (message, _) = self.applications[host].held.swap_remove(at);
        self.check(host, &message, "when it was dropped")?;
        // The guard writes over what is dropped.
        let tag = message.tag();
        let reads = &mut self.applications[host].reads;
        let is_of_it = |read: &Read| read.incoming.tag() == tag;
        for read in reads.iter_mut().filter(|read| is_of_it(read)) {
            read.check();
        }
        reads.retain(|read| !is_of_it(read));
        if let Some(Released::Zone { start, len }) = message.released {
            let payload = message.umem_offset();
            self.guards[host].leave(&mut self.bed.hosts[host], (start, len), payload);
        }
        Ok(())
    }

    fn complete(&mut self, host: usize) -> Result<(), String> {
        while let Some(completion) = self.bed.hosts[host].told.completions().pop_front() {
            let tag = completion.tag;
            match self.applications[host].sent.get_mut(&tag) {
                Some(outcome @ None) => *outcome = Some(completion.outcome),
                Some(Some(_)) => return Err(format!("message {tag:#x} has two completions")),
                None => return Err(format!("message {tag:#x} has a completion and was not sent")),
            }
        }
        Ok(())
    }

    /// Everything that was accepted has ended, and nothing waits to be accepted.
    pub(super) fn is_settled(&self) -> bool {
        let since_ns = self.bed.now_ns - self.start_ns;
        let is_over = |application: &Application| {
            application.dead
                || (application.to_send.is_empty()
                    && application.unsent.is_none()
                    && !application.is_connecting
                    && application.sent.values().all(Option::is_some))
        };
        self.applications.iter().all(is_over) && self.plan.stalls.iter().all(|stall| stall.end_ns <= since_ns)
    }

    /// No live host waits for packets or keeps a message.
    fn is_quiet(&self) -> bool {
        let mut hosts = self.applications.iter().zip(&self.bed.hosts);
        hosts.all(|(application, engine)| {
            application.dead
                || (application.held.is_empty()
                    && (engine.landing.iter()).all(|landing| landing.sessions.iter().all(Inbound::is_idle))
                    && engine.sending.arena().live() == 0)
        })
    }

    pub(super) fn unsettled(&self) -> String {
        let open: Vec<String> = self
            .applications
            .iter()
            .flat_map(|application| application.sent.iter())
            .filter(|(_, outcome)| outcome.is_none())
            .map(|(tag, _)| format!("{tag:#x}"))
            .collect();
        let waiting: usize = self.applications.iter().map(|a| a.to_send.len()).sum();
        format!(
            "not settled after {} s of virtual time: {} messages without completion ({}), {waiting} not accepted",
            LIMIT_NS / 1_000_000_000,
            open.len(),
            open.join(" ")
        )
    }

    /// The link heals, everything comes back, and the books are closed.
    pub(super) fn finish(mut self) -> Result<Report, String> {
        let impaired_until_ns = self.bed.now_ns - self.start_ns;
        let clean = Impairments::default();
        for from in [0, 1] {
            self.bed.wire.impair(from, clean);
        }
        // What a dead peer owes is given up after its lease, what a live one owes after the message's time limit.
        let end_ns = self.bed.now_ns
            + 50_000_000
            + self.plan.keep_max_ns
            + 2 * (self.plan.bed.lease + self.plan.bed.patience).as_nanos() as u64;
        // At rest and nothing said for a while: what is repeated is repeated more often than this. Counted anew, because a
        // host may just have come back from a pause.
        self.idle = 0;
        while self.bed.now_ns < end_ns && !(self.is_quiet() && self.idle > 2 * IDLE_ROUNDS) {
            self.round()?;
        }
        // A session keeps zones in which entries are left by losses; with its end they are free.
        let now_ns = self.bed.now_ns;
        for host in [0, 1] {
            while !self.applications[host].dead
                && let Some(&peer) = self.bed.hosts[host].sending.senders().first()
            {
                self.bed.hosts[host].end_session(peer, now_ns);
            }
        }
        // That of a dead sender ends with its lease.
        let end_ns = now_ns + 2 * self.plan.bed.lease.as_nanos() as u64;
        let is_open = |run: &Run| {
            (run.applications.iter().zip(&run.bed.hosts)).any(|(application, engine)| {
                !application.dead
                    && engine
                        .landing
                        .as_ref()
                        .is_some_and(|side| !side.sessions.is_empty())
            })
        };
        while self.bed.now_ns < end_ns && is_open(&self) {
            self.bed.now_ns += 5_000_000;
            self.round()?;
        }
        for _ in 0..200 {
            self.round()?;
        }
        self.bed.wire.advance(u64::MAX);
        for host in [0, 1] {
            if self.applications[host].dead {
                continue;
            }
            self.bed.poll(host);
            self.receive(host)?;
            for mut read in self.applications[host].reads.drain(..) {
                read.check();
            }
            while !self.applications[host].held.is_empty() {
                self.give_back(host, 0)?;
            }
            self.bed.now_ns += 1;
            self.bed.poll(host);
            self.complete(host)?;
            self.bed.check_memory_of(host);
        }
        self.check_guards()?;
        self.check_outcomes()?;
        self.check_books()?;
        let [a, b] = &self.applications;
        let outcomes = || a.sent.values().chain(b.sent.values()).flatten();
        let engines = &self.bed.hosts;
        Ok(Report {
            accepted: (a.sent.len() + b.sent.len()) as u64,
            delivered: (a.received.len() + b.received.len()) as u64,
            reported: outcomes()
                .filter(|outcome| **outcome != Outcome::Delivered)
                .count() as u64,
            aborted: a.aborted + b.aborted,
            sessions: engines
                .iter()
                .map(|engine| engine.counters.sessions_granted)
                .sum(),
            packets: self.bed.wire.counters().sent,
            violations: engines
                .iter()
                .map(|engine| engine.counters.violations.total())
                .sum(),
            changed_over: engines.iter().map(|engine| engine.counters.sessions_landed).sum(),
            astray: engines.iter().map(|engine| engine.counters.sessions_astray).sum(),
            read_early: a.read_early + b.read_early,
            virtual_ns: impaired_until_ns,
            died: a.dead || b.dead,
            impaired: [0, 1].map(|from| self.bed.wire.impairment_counters(from)),
            trace: self.bed.trace.hashes(),
        })
    }
}
