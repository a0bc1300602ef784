//! The sessions that programs on this host ask for, have, and end: one line for each, by ticket.

use super::Outcome;
use crate::control::{ControlMessage, End, Grant, Reject, RejectReason, Request};
use crate::session::{Applicant, ApplicantState, Farewell, FarewellState, MIN_RETRY};
use crate::time::Time;
use alloc::collections::{BTreeMap, BTreeSet, VecDeque};
use alloc::vec::Vec;
use core::net::{Ipv4Addr, SocketAddrV4};
use core::time::Duration;

/// A renewal that was not confirmed is repeated after this part of the lease.
const RENEWALS_PER_LEASE: u32 = 4;
/// Requests that were taken back and are remembered.
const WITHDRAWN_MAX: usize = 64;
/// Policy `exclusive`: a place is asked for this often, while no host has active DLD.
const ASK_FOR_PLACE: Duration = Duration::from_millis(100);
/// How long a farewell is repeated.
const FAREWELL_PATIENCE: Duration = Duration::from_secs(3);

/// The time of a lease's next renewal, `1 / parts` of it ahead; never at once, however short the receiver made the lease.
fn renewal(now: Time, grant: &Grant, parts: u32) -> Time {
    now + (grant.lease() / parts).max(MIN_RETRY)
}

/// Names a request for a session, and the session, between a node and its host's programs. It is the request's number on the wire.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Ticket(pub u32);

#[derive(Clone, Debug)]
enum Stage {
    Asking(Applicant),
    Holding {
        request: Request,
        grant: Grant,
        /// When the receiver last said that the session lives.
        confirmed: Time,
        next: Time,
    },
    Leaving(Farewell),
}

/// One session's sending side.
#[derive(Clone, Debug)]
struct Line {
    to: SocketAddrV4,
    port: u16,
    stage: Stage,
    timer: Option<Time>,
    /// Policy `exclusive`: its program wants it to land, and it has no place; when to ask for one.
    place: Option<Time>,
}

/// What a line has to say: a message for its receiver, or news for its program.
#[derive(Clone, Copy, Debug)]
pub(super) enum Said {
    /// To the receiver on that port of a host.
    Message(SocketAddrV4, u16, Ticket, ControlMessage),
    Outcome(Ticket, Outcome),
}

/// All of them.
#[derive(Clone, Debug)]
pub(super) struct Outgoing {
    lines: BTreeMap<Ticket, Line>,
    /// What they have to say now.
    pub(super) said: Vec<Said>,
    timers: BTreeSet<(Time, Ticket)>,
    next_ticket: u32,
    /// Requests that were taken back, the latest last: a grant may be on its way.
    withdrawn: VecDeque<(Ticket, SocketAddrV4)>,
    /// Policy `exclusive`: a receiver that is busy will not be asked again, the paper's LM_ACQ_REJ.
    is_exclusive: bool,
    /// Whether what comes is proved to come from where it says. If not, no session is renewed: its program's own packets do that, by the
    /// way of the data.
    is_sealed: bool,
    /// For how long a session goes unconfirmed, where that is longer than its lease.
    patience: Duration,
}

impl Outgoing {
    pub(super) fn new(
        first_ticket: u32,
        is_exclusive: bool,
        is_sealed: bool,
        patience: Duration,
    ) -> Outgoing {
        Outgoing {
            lines: BTreeMap::new(),
            said: Vec::new(),
            timers: BTreeSet::new(),
            next_ticket: first_ticket,
            withdrawn: VecDeque::with_capacity(WITHDRAWN_MAX),
            is_exclusive,
            is_sealed,
            patience,
        }
    }

    pub(super) fn len(&self) -> usize {
        self.lines.len()
    }

    /// Whether a session to that host is open, or about to end.
    pub(super) fn sends_to(&self, address: Ipv4Addr) -> bool {
        self.lines
            .values()
            .any(|line| *line.to.ip() == address && !matches!(line.stage, Stage::Asking(_)))
    }

    pub(super) fn next_timer(&self) -> Option<Time> {
        self.timers.first().map(|&(at, _)| at)
    }

    /// When [`Outgoing::ask_for_places`] has something to do.
    pub(super) fn next_place(&self) -> Option<Time> {
        let holding = |line: &&Line| matches!(line.stage, Stage::Holding { .. });
        self.lines
            .values()
            .filter(holding)
            .filter_map(|line| line.place)
            .min()
    }

    /// `lands`: whether the request may say so now.
    pub(super) fn ask(
        &mut self,
        now: Time,
        to: SocketAddrV4,
        port: u16,
        request: Request,
        lands: bool,
        patience: Duration,
    ) -> Ticket {
        let ticket = self.fresh_ticket();
        let first = Request {
            lands: request.lands && lands,
            ..request
        };
        let applicant = Applicant::new(first, ticket.0, now, patience);
        self.insert(ticket, to, port, Stage::Asking(applicant), Some(now));
        if request.lands
            && !lands
            && let Some(line) = self.lines.get_mut(&ticket)
        {
            line.place = Some(now);
        }
        ticket
    }

    /// Policy `exclusive`, while no host has active DLD: sessions that are to land and have no place ask for one.
    pub(super) fn ask_for_places(&mut self, now: Time) {
        for (&ticket, line) in &mut self.lines {
            let is_due = line.place.is_some_and(|at| at <= now);
            if let Stage::Holding { request, .. } = &line.stage
                && is_due
            {
                line.place = Some(now + ASK_FOR_PLACE);
                let lands = true;
                let message = ControlMessage::Request(Request { lands, ..*request });
                self.said.push(Said::Message(line.to, line.port, ticket, message));
            }
        }
    }

    pub(super) fn resume(
        &mut self,
        now: Time,
        to: SocketAddrV4,
        port: u16,
        ticket: Ticket,
        request: Request,
        grant: Grant,
    ) -> bool {
        let stage = Stage::Holding {
            request,
            grant,
            confirmed: now,
            next: now,
        };
        let is_free = !self.lines.contains_key(&ticket);
        if is_free {
            self.insert(ticket, to, port, stage, Some(now));
        }
        is_free
    }

    /// Ends the session, or the attempt to have one.
    pub(super) fn end(&mut self, now: Time, ticket: Ticket, messages: u32) {
        let Some(line) = self.lines.get_mut(&ticket) else {
            return;
        };
        match &line.stage {
            Stage::Asking(_) => {
                let message = ControlMessage::End(End::WITHDRAWN);
                self.said.push(Said::Message(line.to, line.port, ticket, message));
                let to = line.to;
                self.remove(ticket);
                if self.withdrawn.len() == WITHDRAWN_MAX {
                    self.withdrawn.pop_front();
                }
                self.withdrawn.push_back((ticket, to));
            }
            Stage::Holding { grant, .. } => {
                let key = grant.session_key;
                line.stage = Stage::Leaving(Farewell::new(key, messages, ticket.0, now, FAREWELL_PATIENCE));
                self.rearm(ticket, Some(now));
            }
            Stage::Leaving(_) => {}
        }
    }

    /// A host takes messages now that it could not take before.
    pub(super) fn hurry(&mut self, now: Time, to: SocketAddrV4) {
        let theirs = self.lines.iter_mut().filter(|(_, line)| line.to == to);
        let mut hurried = Vec::new();
        for (&ticket, line) in theirs {
            match &mut line.stage {
                Stage::Asking(applicant) => applicant.hurry(now),
                Stage::Holding { .. } => continue,
                Stage::Leaving(farewell) => farewell.hurry(now),
            }
            hurried.push(ticket);
        }
        for ticket in hurried {
            self.rearm(ticket, Some(now));
        }
    }

    pub(super) fn number_from(&mut self, number: u32) {
        self.next_ticket = number;
    }

    pub(super) fn is_leaving(&self) -> bool {
        let is_leaving = |line: &Line| matches!(line.stage, Stage::Leaving(_));
        self.lines.values().any(is_leaving)
    }

    /// Nobody receives there.
    pub(super) fn refused(&mut self, now: Time, by: SocketAddrV4) {
        let mut refused = Vec::new();
        for (&ticket, line) in self.lines.iter_mut().filter(|(_, line)| line.to == by) {
            match &mut line.stage {
                Stage::Asking(applicant) => applicant.handle_refused(),
                // The session may have ended otherwise; its lease says so.
                Stage::Holding { .. } => continue,
                Stage::Leaving(farewell) => farewell.handle_refused(),
            }
            refused.push(ticket);
        }
        for ticket in refused {
            self.poll_one(now, ticket);
        }
    }

    /// A reply came in from a host that is in the LM_RECV_ADDR list or not; gives whether it was waited for.
    pub(super) fn handle(
        &mut self,
        now: Time,
        (from, is_listed): (SocketAddrV4, bool),
        port: u16,
        ticket: Ticket,
        message: &ControlMessage,
    ) -> bool {
        let Some(line) = self.lines.get_mut(&ticket).filter(|line| line.to == from) else {
            self.return_unwanted(now, from, port, ticket, message);
            return false;
        };
        let outcome = match &mut line.stage {
            Stage::Asking(applicant) => match message {
                ControlMessage::Reject(reject)
                    if self.is_exclusive
                        && matches!(reject.reason, RejectReason::Busy | RejectReason::NoQuorum) =>
                {
                    // LM figure 3: "if destination address is not listed … begin to transmit".
                    match applicant.request().lands && !is_listed {
                        true => {
                            applicant.send_one_copy(now);
                            line.place = Some(now + ASK_FOR_PLACE);
                            None
                        }
                        false => Some(Outcome::Rejected(*reject)),
                    }
                }
                _ => {
                    applicant.handle(ticket.0, message, now);
                    None
                }
            },
            Stage::Holding {
                request,
                grant,
                confirmed,
                next,
            } => match message {
                ControlMessage::Grant(again) if again.session_key == grant.session_key => {
                    *grant = *again;
                    if self.is_exclusive && request.lands {
                        line.place = (!grant.lands).then_some(now + ASK_FOR_PLACE);
                    }
                    *confirmed = now;
                    *next = renewal(now, grant, RENEWALS_PER_LEASE);
                    None
                }
                // The receiver began anew, and takes the renewal for a request.
                ControlMessage::Grant(_) => {
                    self.said.extend(end_unwanted(from, port, ticket, message));
                    Some(Outcome::Lost)
                }
                // Busy may be an old answer that was late.
                ControlMessage::Reject(reject) if reject.reason != RejectReason::Busy => Some(Outcome::Lost),
                ControlMessage::Ended(ended) if ended.session_key == grant.session_key => Some(Outcome::Lost),
                _ => None,
            },
            Stage::Leaving(farewell) => {
                farewell.handle(ticket.0, message);
                // An answer to the last renewal; it may even have begun a session anew.
                self.said.extend(end_unwanted(from, port, ticket, message));
                None
            }
        };
        match outcome {
            Some(outcome) => {
                self.said.push(Said::Outcome(ticket, outcome));
                self.remove(ticket);
            }
            None => self.poll_one(now, ticket),
        }
        true
    }

    /// A grant came that nothing waits for: its session is ended, if it answers what was asked.
    fn return_unwanted(
        &mut self,
        now: Time,
        from: SocketAddrV4,
        port: u16,
        ticket: Ticket,
        message: &ControlMessage,
    ) {
        let ControlMessage::Grant(grant) = message else {
            return;
        };
        let is_its = |known: &(Ticket, SocketAddrV4)| *known == (ticket, from);
        let Some(at) = self.withdrawn.iter().position(is_its) else {
            // To a life before, where nobody else can have made it up.
            if self.is_sealed {
                self.said.extend(end_unwanted(from, port, ticket, message));
            }
            return;
        };
        self.withdrawn.remove(at);
        let farewell = Farewell::new(grant.session_key, 0, ticket.0, now, FAREWELL_PATIENCE);
        self.insert(ticket, from, port, Stage::Leaving(farewell), Some(now));
        self.poll_one(now, ticket);
    }

    /// Another version answered; gives whether it was asked.
    pub(super) fn handle_version(&mut self, from: SocketAddrV4, ticket: Ticket, theirs: u8) -> bool {
        let is_asking = |line: &&Line| line.to == from && matches!(line.stage, Stage::Asking(_));
        let is_asked = self.lines.get(&ticket).filter(is_asking).is_some();
        if is_asked {
            let outcome = Outcome::Rejected(Reject {
                reason: RejectReason::Version,
                version: theirs,
                retry_after_ms: 0,
                limit: 0,
            });
            self.said.push(Said::Outcome(ticket, outcome));
            self.remove(ticket);
        }
        is_asked
    }

    /// Everything that is due.
    pub(super) fn poll(&mut self, now: Time) {
        while let Some(&(at, ticket)) = self.timers.first()
            && at <= now
        {
            self.poll_one(now, ticket);
        }
    }

    fn poll_one(&mut self, now: Time, ticket: Ticket) {
        let Some(line) = self.lines.get_mut(&ticket) else {
            return;
        };
        let (to, port) = (line.to, line.port);
        let said = &mut self.said;
        let mut send = |message| said.push(Said::Message(to, port, ticket, message));
        let mut last = None;
        let timer = match &mut line.stage {
            Stage::Asking(applicant) => {
                while let Some(message) = applicant.poll_transmit(now) {
                    send(message);
                }
                match *applicant.state() {
                    ApplicantState::Granted(grant) => {
                        let next = renewal(now, &grant, RENEWALS_PER_LEASE);
                        let request = Request {
                            lands: applicant.request().lands || line.place.is_some(),
                            ..*applicant.request()
                        };
                        line.stage = Stage::Holding {
                            request,
                            grant,
                            confirmed: now,
                            next,
                        };
                        self.said.push(Said::Outcome(ticket, Outcome::Granted(grant)));
                        return self.rearm(ticket, self.is_sealed.then_some(next));
                    }
                    ApplicantState::Pending => applicant.poll_timeout(),
                    state => {
                        last = Some(match state {
                            ApplicantState::Rejected(reject) => Outcome::Rejected(reject),
                            ApplicantState::Incompatible(_) => Outcome::Incompatible,
                            ApplicantState::NotListening => Outcome::NotListening,
                            _ => Outcome::Unreachable,
                        });
                        None
                    }
                }
            }
            Stage::Holding {
                request,
                grant,
                confirmed,
                next,
            } => {
                let until = *confirmed + grant.lease().max(self.patience);
                if now >= until {
                    last = Some(Outcome::Lost);
                }
                if now >= *next {
                    let lands = match line.place {
                        // Whether it may land is asked for by itself.
                        Some(_) => false,
                        None => request.lands,
                    };
                    send(ControlMessage::Request(Request { lands, ..*request }));
                    *next = renewal(now, grant, 2 * RENEWALS_PER_LEASE);
                }
                last.is_none().then(|| until.min(*next))
            }
            Stage::Leaving(farewell) => {
                if let Some(message) = farewell.poll_transmit(now) {
                    send(message);
                }
                match *farewell.state() {
                    FarewellState::Pending => {}
                    FarewellState::Ended { delivered } => last = Some(Outcome::Ended { delivered }),
                    FarewellState::Unconfirmed => last = Some(Outcome::Unconfirmed),
                }
                farewell.poll_timeout()
            }
        };
        match (last, timer) {
            (None, Some(timer)) => self.rearm(ticket, Some(timer)),
            (outcome, _) => {
                if let Some(outcome) = outcome {
                    self.said.push(Said::Outcome(ticket, outcome));
                }
                self.remove(ticket);
            }
        }
    }

    fn fresh_ticket(&mut self) -> Ticket {
        while self.lines.contains_key(&Ticket(self.next_ticket)) {
            self.next_ticket = self.next_ticket.wrapping_add(1);
        }
        let ticket = Ticket(self.next_ticket);
        self.next_ticket = self.next_ticket.wrapping_add(1);
        ticket
    }

    fn insert(&mut self, ticket: Ticket, to: SocketAddrV4, port: u16, stage: Stage, timer: Option<Time>) {
        let line = Line {
            to,
            port,
            stage,
            timer,
            place: None,
        };
        self.lines.insert(ticket, line);
        self.timers.extend(timer.map(|timer| (timer, ticket)));
    }

    fn rearm(&mut self, ticket: Ticket, timer: Option<Time>) {
        if let Some(line) = self.lines.get_mut(&ticket) {
            if let Some(timer) = line.timer {
                self.timers.remove(&(timer, ticket));
            }
            line.timer = timer;
            self.timers.extend(timer.map(|timer| (timer, ticket)));
        }
    }

    pub(super) fn remove(&mut self, ticket: Ticket) {
        if let Some(line) = self.lines.remove(&ticket)
            && let Some(timer) = line.timer
        {
            self.timers.remove(&(timer, ticket));
        }
    }
}

/// A session that nobody here wants: granted too late, or to a life before.
fn end_unwanted(to: SocketAddrV4, port: u16, ticket: Ticket, message: &ControlMessage) -> Option<Said> {
    let ControlMessage::Grant(grant) = message else {
        return None;
    };
    let end = End {
        session_key: grant.session_key,
        messages: 0,
    };
    Some(Said::Message(to, port, ticket, ControlMessage::End(end)))
}
