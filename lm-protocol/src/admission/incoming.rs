//! The receivers of this host: who gets a place in their landing queues, and who waits for one.

use super::waiting::{Waiter, Waiting};
use super::{Limits, Local, message::Message};
use crate::control::{ControlMessage, Ended, RejectReason, Request};
use crate::session::{Application, Grantor, Refusal};
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
}

impl Receiver {
    pub(super) fn new(landing_queues: &[u16], limits: &Limits) -> Receiver {
        Receiver {
            grantor: Grantor::new(landing_queues)
                .with_address_max(limits.sessions_of_address)
                .with_aside_max(limits.aside)
                .with_patience(limits.patience),
            waiting: Waiting::new(limits.waiting, limits.waiting_of_address),
        }
    }

    /// Policy `concurrent`: LM_REQ. Repetitions get the answer that they had; a new request gets a place, or waits for one.
    pub(super) fn request(
        &mut self,
        now: Time,
        from: SocketAddrV4,
        request_id: u32,
        request: &Request,
        local: &mut Local<'_>,
        replies: &mut Vec<Reply>,
    ) {
        self.grantor.expire(now, local.landing);
        let is_decided = self.grantor.is_decided(from, request_id, request);
        if is_decided || (self.waiting.len() == 0 && self.grantor.free_places() > 0) {
            let message = self.decide(now, from, request_id, request, local);
            if !is_decided && message.as_ref().is_some_and(is_busy) {
                // A place, but not yet: its neighbour's address is being looked up, say.
                self.waiting.add(now, from, request_id, request);
            }
            replies.extend(message.map(|message| (from, Message::Session { request_id, message })));
            return;
        }
        if let Err(refusal) = refusal(from, request_id, request, local) {
            let message = refusal.to_message();
            replies.push((from, Message::Session { request_id, message }));
            return;
        }
        self.waiting.add(now, from, request_id, request);
        if self.grantor.free_places() == 0 {
            replies.extend(self.grantor.displace(*from.ip(), now, local.landing).map(ended));
        }
        self.serve(now, local, replies);
        if self.grantor.is_decided(from, request_id, request) {
            return;
        }
        // None of those before it can have what is free; it is asked for itself, so that they do not hold it up.
        let message = match self.grantor.free_places() {
            0 => None,
            _ => self.decide(now, from, request_id, request, local),
        };
        match message {
            Some(message) => {
                if !is_busy(&message) {
                    self.waiting.remove(from, request_id, request);
                }
                replies.push((from, Message::Session { request_id, message }));
            }
            None => replies.push((from, self.busy(request_id))),
        }
    }

    /// Gives free places to those that wait.
    pub(super) fn serve(&mut self, now: Time, local: &mut Local<'_>, replies: &mut Vec<Reply>) {
        self.waiting.expire(now);
        if self.waiting.len() > 0 && self.grantor.free_places() == 0 {
            self.grantor.make_way(now, local.landing);
        }
        let mut passed = 0;
        while self.grantor.free_places() > 0
            && passed < PASSED_MAX
            && let Some(Waiter {
                from,
                request_id,
                request,
                ..
            }) = self.waiting.nth(passed, now)
        {
            match self.decide(now, from, request_id, &request, local) {
                // A place, but not for this one, or not yet: the next one may have it.
                Some(message) if is_busy(&message) => passed += 1,
                message => {
                    self.waiting.remove(from, request_id, &request);
                    replies.extend(message.map(|message| (from, Message::Session { request_id, message })));
                }
            }
        }
    }

    fn decide(
        &mut self,
        now: Time,
        from: SocketAddrV4,
        request_id: u32,
        request: &Request,
        local: &mut Local<'_>,
    ) -> Option<ControlMessage> {
        let message = ControlMessage::Request(*request);
        self.grantor
            .handle(from, request_id, &message, now, local.policy, local.landing)
    }

    fn busy(&self, request_id: u32) -> Message {
        let waiters = u32::try_from(self.waiting.len()).unwrap_or(u32::MAX);
        let message = Refusal::busy(RETRY + RETRY_PER_WAITER.saturating_mul(waiters)).to_message();
        Message::Session { request_id, message }
    }

    /// Closes one session, or all; their senders are told.
    pub(super) fn close(
        &mut self,
        which: impl Fn(u64) -> bool,
        local: &mut Local<'_>,
        replies: &mut Vec<Reply>,
    ) {
        let ending: Vec<_> = self
            .grantor
            .sessions()
            .map(|session| (session.peer, session.request_id, session.grant.session_key))
            .filter(|&(.., session_key)| which(session_key))
            .collect();
        for (peer, request_id, session_key) in ending {
            if let Some(what) = self.grantor.close_told(session_key, local.landing) {
                replies.push(ended((peer, request_id, what)));
            }
        }
    }

    /// The program goes: ends everything.
    pub(super) fn shut_down(mut self, local: &mut Local<'_>, replies: &mut Vec<Reply>) {
        self.close(|_| true, local, replies);
        for waiter in self.waiting.take_all() {
            let message = Refusal::from(RejectReason::ShuttingDown).to_message();
            let request_id = waiter.request_id;
            replies.push((waiter.from, Message::Session { request_id, message }));
        }
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

fn is_busy(message: &ControlMessage) -> bool {
    matches!(message, ControlMessage::Reject(reject) if reject.reason == RejectReason::Busy)
}

/// Asks the host's policy alone, before anything is done for a request.
pub(super) fn refusal(
    from: SocketAddrV4,
    request_id: u32,
    request: &Request,
    local: &mut Local<'_>,
) -> Result<(), Refusal> {
    let permit = local.policy.admit(&Application {
        from,
        request_id,
        request,
    })?;
    match request.max_message_len > permit.max_message_len {
        true => Err(Refusal::too_large(permit.max_message_len)),
        false => Ok(()),
    }
}
