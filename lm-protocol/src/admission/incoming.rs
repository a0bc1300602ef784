//! The receivers of this host: who gets a place in their landing queues, and who waits for one.

use super::waiting::{Waiting, waits_before};
use super::{Limits, Local, message::Message};
use crate::control::{ControlMessage, Ended, RejectReason};
use crate::session::{Application, Grantor, Refusal, Session};
use crate::time::Time;
use alloc::vec::Vec;
use core::net::SocketAddrV4;
use core::time::Duration;

/// When one of few that wait is to ask again; with many it takes longer, so that they do not become a load.
const RETRY: Duration = Duration::from_millis(100);
const RETRY_PER_WAITER: Duration = Duration::from_millis(1);

/// Requests that are passed over each time that a place is free and not for them.
const PASSED_MAX: usize = 4;

/// A reply, and to whom.
pub(super) type Reply = (SocketAddrV4, Message);

/// A program of this host that receives on a data port.
#[derive(Clone, Debug)]
pub(super) struct Receiver {
    pub(super) grantor: Grantor,
    pub(super) waiting: Waiting,
    /// What is to be said to senders.
    pub(super) replies: Vec<Reply>,
    /// Policy `exclusive`: who lands is decided elsewhere.
    is_exclusive: bool,
}

impl Receiver {
    pub(super) fn new(landing_queues: &[u16], limits: &Limits, is_exclusive: bool) -> Receiver {
        Receiver {
            grantor: Grantor::new(landing_queues)
                .with_address_max(limits.sessions_of_address)
                .with_aside_max(limits.aside)
                .with_patience(limits.patience),
            waiting: Waiting::new(limits.waiting, limits.waiting_of_address),
            replies: Vec::new(),
            is_exclusive,
        }
    }

    /// LM_REQ. Repetitions get the answer that they had; a new request gets a session: with a place if one is free and no other waits for
    /// it, else without, so that it waits for one meanwhile. Where it can be had with a place only, the request itself waits.
    pub(super) fn request(&mut self, now: Time, application: &Application<'_>, local: &mut Local<'_>) {
        self.grantor.expire(now, local.landing);
        if !self.grantor.is_decided(application) {
            if let Err(refusal) = refusal(application, local) {
                return self.answer(application, Some(refusal.to_message()));
            }
            // Those that wait go first.
            self.serve(now, local);
        }
        if self.answer_to(application).is_some() {
            return;
        }
        let message = match self.grantor.is_decided(application) {
            true => self.decide(now, application, local),
            false => self.begin(now, application, local),
        };
        if self.answer_to(application).is_none() {
            self.answer(application, message);
        }
    }

    /// What is about to be answered to a request.
    pub(super) fn answer_to(&self, application: &Application<'_>) -> Option<&Message> {
        let is_its = |(to, message): &&Reply| {
            *to == application.from && message.request_id() == Some(application.request_id)
        };
        self.replies.iter().find(is_its).map(|(_, message)| message)
    }

    fn answer(&mut self, application: &Application<'_>, message: Option<ControlMessage>) {
        let (from, request_id) = (application.from, application.request_id);
        let message = message.map(|message| Message::Session { request_id, message });
        self.replies.extend(message.map(|message| (from, message)));
    }

    /// A session for a request that has none.
    fn begin(
        &mut self,
        now: Time,
        application: &Application<'_>,
        local: &mut Local<'_>,
    ) -> Option<ControlMessage> {
        if self.grantor.has_place_for(application) {
            match self.decide(now, application, local) {
                Some(message) if is_refused(&message, RejectReason::NoMemory) => {}
                Some(message) if is_refused(&message, RejectReason::Busy) => {
                    // A place, but not yet: its neighbour's address is being looked up, say.
                    self.waiting.add(now, application);
                    return Some(message);
                }
                message => {
                    self.waiting.remove(application);
                    return message;
                }
            }
        }
        match (self.grantor).grant_aside(application, now, local.policy, local.landing) {
            Ok(_) => self.waiting.remove(application),
            Err(refusal) if refusal.reason == RejectReason::Busy && application.request.lands => {
                self.waiting.add(now, application);
            }
            Err(refusal) => {
                self.waiting.remove(application);
                return Some(refusal.to_message());
            }
        }
        // A place that is not used may be its own at once.
        self.serve(now, local);
        match self.grantor.is_decided(application) {
            true => self.decide(now, application, local),
            false => Some(self.busy()),
        }
    }

    /// Gives free places to those that wait, and takes those that are not used for them.
    pub(super) fn serve(&mut self, now: Time, local: &mut Local<'_>) {
        if self.is_exclusive {
            return;
        }
        self.waiting.expire(now);
        let order = |session: &Session| waits_before(now, session.aside.unwrap_or(now), &session.request);
        let mut sessions = self.grantor.waiting(now, local.landing);
        sessions.sort_by_key(|(session, _)| order(session));
        let mut sessions = sessions.into_iter().peekable();
        let (mut passed, mut requests_passed) = (0, 0);
        while passed < PASSED_MAX {
            let waiter = self.waiting.nth(requests_passed, now);
            let waiter = waiter.map(|waiter| (waits_before(now, waiter.since, &waiter.request), waiter));
            let (who, is_request) = match (sessions.peek(), &waiter) {
                (Some((session, used)), theirs)
                    if theirs.is_none_or(|(theirs, _)| order(session) <= theirs) =>
                {
                    ((*session.peer.ip(), *used), false)
                }
                (_, Some((_, waiter))) => ((*waiter.from.ip(), now), true),
                (_, None) => return,
            };
            if self.grantor.free_places() == 0 {
                self.grantor.make_way(now, local.landing);
            }
            if self.grantor.free_places() == 0 || self.grantor.has_enough_places(who.0) {
                let ending = self.grantor.displace(who, now, local.landing);
                self.replies.extend(ending.map(ended));
            }
            if self.grantor.free_places() == 0 {
                return;
            }
            if let Some((_, waiter)) = waiter.filter(|_| is_request) {
                let application = waiter.application();
                match self.decide(now, &application, local) {
                    // A place, but not for this one, or not yet: the next one may have it.
                    Some(message)
                        if is_refused(&message, RejectReason::Busy)
                            || is_refused(&message, RejectReason::NoMemory) =>
                    {
                        (passed, requests_passed) = (passed + 1, requests_passed + 1);
                    }
                    message => {
                        self.waiting.remove(&application);
                        self.answer(&application, message);
                    }
                }
            } else if let Some((session, _)) = sessions.next()
                && !self.grantor.land(session.grant.session_key, local.landing)
            {
                passed += 1;
            }
        }
    }

    pub(super) fn decide(
        &mut self,
        now: Time,
        application: &Application<'_>,
        local: &mut Local<'_>,
    ) -> Option<ControlMessage> {
        (self.grantor).decide(application, now, local.policy, local.landing)
    }

    fn busy(&self) -> ControlMessage {
        let waiters = u32::try_from(self.waiting.len()).unwrap_or(u32::MAX);
        Refusal::busy(RETRY + RETRY_PER_WAITER.saturating_mul(waiters)).to_message()
    }

    /// Closes one session, or all; their senders are told.
    pub(super) fn close(&mut self, which: impl Fn(&Session) -> bool, local: &mut Local<'_>) {
        let ending: Vec<Session> =
            (self.grantor.sessions().filter(|session| which(session)).copied()).collect();
        for session in ending {
            let ending = self.grantor.end(&session, local.landing);
            self.replies.extend(ending.map(ended));
        }
    }

    /// The program goes: ends everything.
    pub(super) fn shut_down(mut self, local: &mut Local<'_>) -> Vec<Reply> {
        self.close(|_| true, local);
        for waiter in self.waiting.take_all() {
            let message = Refusal::from(RejectReason::ShuttingDown).to_message();
            self.answer(&waiter.application(), Some(message));
        }
        self.replies
    }

    pub(super) fn next_deadline(&self) -> Option<Time> {
        let way = self.grantor.next_way().filter(|_| self.waiting.len() > 0);
        [self.grantor.poll_timeout(), way, self.waiting.next_expiry()]
            .into_iter()
            .flatten()
            .min()
    }
}

/// What is told to the sender of a session that ends from this side.
pub(super) fn ended((peer, request_id, ended): (SocketAddrV4, u32, Ended)) -> Reply {
    let message = ControlMessage::Ended(ended);
    (peer, Message::Session { request_id, message })
}

fn is_refused(message: &ControlMessage, reason: RejectReason) -> bool {
    matches!(message, ControlMessage::Reject(reject) if reject.reason == reason)
}

/// Asks the host's policy alone, before anything is done for a request.
pub(super) fn refusal(application: &Application<'_>, local: &mut Local<'_>) -> Result<(), Refusal> {
    let permit = local.policy.admit(application)?;
    match application.request.max_message_len > permit.max_message_len {
        true => Err(Refusal::too_large(permit.max_message_len)),
        false => Ok(()),
    }
}
