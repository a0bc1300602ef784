//! The receiver's side: who may send into which landing queue, and for how long.

mod places;

pub use places::UNUSED_MAX;

use crate::control::{ControlError, ControlMessage, End, Ended, Grant, RejectReason, Request};
use crate::time::Time;
use alloc::vec::Vec;
use core::net::SocketAddrV4;
use core::ops::Range;
use core::time::Duration;

use super::landing::{Admit, Application, BUSY_RETRY, CloseReason, Landing, Permit, Refusal, Session};

/// Ended sessions that are remembered, to answer late repetitions.
const REMEMBERED: usize = 64;

/// An ended session, as much of it as repetitions need.
#[derive(Clone, Copy, Debug)]
struct Past {
    peer: SocketAddrV4,
    sender_id: u64,
    request_id: u32,
    ended: Ended,
    /// The sender itself ended it, so that its request can only come again because it was late. A session that expired
    /// is different: perhaps every grant was lost, and its applicant is still asking.
    ended_by_sender: bool,
}

/// Grants sessions: at most as many at a time as the landing queues have places (the paper's DLD controller, for several
/// queues).
///
/// Everything is idempotent: a request is known by address, sender id and number, and the same request gets the same
/// grant as long as its session lives, and no answer once its sender ended it; LM_ENDME gets the same confirmation however often it comes.
///
/// ```
/// use core::net::{Ipv4Addr, SocketAddrV4};
/// use core::time::Duration;
/// use lm_protocol::control::{ControlMessage, Request};
/// use lm_protocol::geometry::{Layout, LinkShape, Wire};
/// use lm_protocol::session::*;
/// use lm_protocol::time::Time;
/// use lm_protocol::window::WindowShape;
///
/// struct Zone;
/// impl Landing for Zone {
///     fn open(&mut self, _: u16, application: &Application<'_>, permit: &Permit) -> Result<Terms, Refusal> {
///         let layout = application.request.layout_at(1500, LinkShape::IPV4)
///             .map_err(|_| lm_protocol::control::RejectReason::Unsupported)?;
///         Ok(Terms {
///             session_key: 0xfeed, data_port: 7168, layout, tx_queue: None, prefix: 0, frames_per_packet: 1,
///             fillers: 0, repeats_apart: false, goes_ahead: false,
///             landing_port: None,
///             max_message_len: permit.max_message_len, window: application.request.window,
///             packet_limit: 256, first_message: 0,
///         })
///     }
///     fn close(&mut self, _: &Session, _: CloseReason) -> u32 { 0 }
/// }
///
/// let mut policy = Permit { max_message_len: 1 << 30, lease: Duration::from_secs(10) };
/// let mut grantor = Grantor::new(&[1]);
/// let from = SocketAddrV4::new(Ipv4Addr::new(10, 0, 0, 1), 7169);
/// let request = ControlMessage::Request(Request {
///     sender_id: 1, data_port: 40_000, ..Request::default()
/// });
/// let reply = grantor.handle(from, 77, &request, Time::ZERO, &mut policy, &mut Zone);
/// assert!(matches!(reply, Some(ControlMessage::Grant(grant)) if grant.landing_queue == 1));
/// ```
#[derive(Clone, Debug)]
pub struct Grantor {
    /// The landing queue of each place.
    queues: Vec<u16>,
    /// A session in each place, and behind these the sessions without one.
    slots: Vec<Option<Session>>,
    /// The last ended sessions, overwritten in a circle.
    past: [Option<Past>; REMEMBERED],
    past_next: usize,
    /// For how long a silent session goes on while nobody else wants its place; not less than its lease.
    patience: Duration,
    shutting_down: bool,
    /// Places that one source address may have.
    address_max: usize,
}

impl Grantor {
    /// A grantor for these landing queues, in the order in which they are to be used; a queue that several sessions can share
    /// is there several times. All memory is taken here.
    pub fn new(landing_queues: &[u16]) -> Grantor {
        Grantor {
            queues: landing_queues.to_vec(),
            slots: alloc::vec![None; landing_queues.len()],
            past: [None; REMEMBERED],
            past_next: 0,
            patience: Duration::ZERO,
            shutting_down: false,
            address_max: usize::MAX,
        }
    }

    /// There are these places as well.
    pub fn add_places(&mut self, landing_queues: &[u16]) {
        let places = self.queues.len();
        self.slots
            .splice(places..places, landing_queues.iter().map(|_| None));
        self.queues.extend(landing_queues);
    }

    /// The same with a bound on the places of one source address.
    #[must_use]
    pub fn with_address_max(self, address_max: usize) -> Grantor {
        Grantor { address_max, ..self }
    }

    /// The same, of whose sessions so many may be without a place; else none may.
    #[must_use]
    pub fn with_aside_max(mut self, aside_max: usize) -> Grantor {
        self.slots.resize(self.queues.len() + aside_max, None);
        self
    }

    /// The same, whose sessions go on for so long in silence (a path that is cut, a link that is down). Once its lease has run out,
    /// a session gives way to whoever asks for a place and finds none.
    #[must_use]
    pub fn with_patience(mut self, patience: Duration) -> Grantor {
        self.patience = patience;
        self
    }

    /// A control message came in on the control port; gives the reply, which goes back to `from` under the same number.
    pub fn handle(
        &mut self,
        from: SocketAddrV4,
        request_id: u32,
        message: &ControlMessage,
        now: Time,
        policy: &mut dyn Admit,
        landing: &mut dyn Landing,
    ) -> Option<ControlMessage> {
        match message {
            ControlMessage::Request(request) => {
                self.decide(&Application::new(from, request_id, request), now, policy, landing)
            }
            ControlMessage::End(end) => self.handle_end(from, request_id, end, landing),
            // Replies are for applicants, introductions for the endpoint.
            ControlMessage::Grant(_)
            | ControlMessage::Reject(_)
            | ControlMessage::Ended(_)
            | ControlMessage::Challenge(_)
            | ControlMessage::Proof(_) => None,
        }
    }

    /// A datagram came in that is no control message; gives the number and the reply to send, if it deserves one: another
    /// version is told ours.
    pub fn handle_error(&self, error: &ControlError) -> Option<(u32, ControlMessage)> {
        match *error {
            ControlError::VersionMismatch {
                request_id: Some(request_id),
                ..
            } => Some((request_id, Refusal::from(RejectReason::Version).to_message())),
            _ => None,
        }
    }

    /// Something arrived in the session with this key: its lease starts anew.
    #[inline]
    pub fn touched(&mut self, session_key: u64, now: Time) {
        let mut sessions = self.slots.iter_mut().flatten();
        if let Some(session) = sessions.find(|session| session.grant.session_key == session_key) {
            session.expires = now + session.grant.lease();
        }
    }

    /// When to call [`Grantor::expire`] next; `None` without sessions.
    pub fn poll_timeout(&self) -> Option<Time> {
        (self.sessions().map(|session| session.ends(self.patience))).min()
    }

    /// Closes the sessions of which nothing was heard for their lease and the grantor's patience, whichever is longer; gives their number.
    pub fn expire(&mut self, now: Time, landing: &mut dyn Landing) -> usize {
        let patience = self.patience;
        self.close_where(landing, CloseReason::Expired, |session| {
            session.ends(patience) <= now
        })
    }

    /// Closes the session with this key from this side; gives whether there was one.
    pub fn close(&mut self, session_key: u64, landing: &mut dyn Landing) -> bool {
        self.close_where(landing, CloseReason::Local, |session| {
            session.grant.session_key == session_key
        }) > 0
    }

    /// Ends a session from this side: what is to be told to its sender.
    pub(crate) fn end(
        &mut self,
        session: &Session,
        landing: &mut dyn Landing,
    ) -> Option<(SocketAddrV4, u32, Ended)> {
        let ended = self.close_told(session.grant.session_key, landing)?;
        Some((session.peer, session.request_id, ended))
    }

    /// As [`Grantor::close`], and gives what is to be told to the sender.
    pub fn close_told(&mut self, session_key: u64, landing: &mut dyn Landing) -> Option<Ended> {
        self.close(session_key, landing)
            .then(|| self.past_of(session_key))
    }

    /// What became of a session that is over; nothing was delivered in one that is not known.
    fn past_of(&self, session_key: u64) -> Ended {
        let mut past = self.past.iter().flatten().map(|past| past.ended);
        past.find(|ended| ended.session_key == session_key)
            .unwrap_or(Ended {
                session_key,
                delivered: 0,
                heard: None,
            })
    }

    /// A sender has begun anew, if its host can be believed: what an earlier life of it had is over.
    pub fn end_earlier(&mut self, from: SocketAddrV4, request: &Request, landing: &mut dyn Landing) {
        self.close_where(landing, CloseReason::Expired, |session| {
            session.peer == from
                && session.request.data_port == request.data_port
                && session.request.sender_id != request.sender_id
        });
    }

    /// Closes all sessions and rejects all requests from now on.
    pub fn shut_down(&mut self, landing: &mut dyn Landing) {
        self.shutting_down = true;
        self.close_where(landing, CloseReason::Local, |_| true);
    }

    /// The session with this key.
    pub fn session(&self, session_key: u64) -> Option<&Session> {
        self.sessions()
            .find(|session| session.grant.session_key == session_key)
    }

    /// All sessions (the paper's LM_RECV_ADDR entries with flag 10).
    pub fn sessions(&self) -> impl Iterator<Item = &Session> {
        self.slots.iter().flatten()
    }

    /// Those that have a place.
    fn placed(&self) -> impl Iterator<Item = &Session> {
        self.slots[..self.queues.len()].iter().flatten()
    }

    /// The slots of those that have a place, or of the others.
    fn slots_of(&self, has_place: bool) -> Range<usize> {
        match has_place {
            true => 0..self.queues.len(),
            false => self.queues.len()..self.slots.len(),
        }
    }

    fn free_slot(&self, has_place: bool) -> Option<usize> {
        self.slots_of(has_place).find(|&at| self.slots[at].is_none())
    }

    /// Places without a session.
    pub fn free_places(&self) -> usize {
        self.queues.len() - self.placed().count()
    }

    /// Whether there is, or was a moment ago, a session with this key of this peer's.
    pub fn knows(&self, from: SocketAddrV4, session_key: u64) -> bool {
        let past = self.past.iter().flatten();
        let mut past = past.map(|past| (past.peer, past.ended.session_key));
        let is_its = |session: &Session| session.peer == from;
        self.session(session_key).is_some_and(is_its) || past.any(|past| past == (from, session_key))
    }

    /// Whether the request needs no decision any more: it has its session, or its session ended.
    pub fn is_decided(&self, application: &Application<'_>) -> bool {
        self.session_of(application).is_some() || self.is_late(application)
    }

    /// Takes over a session that an earlier life of this program granted and whose gate is still open, or that went on without a place; its
    /// lease starts anew. Gives `false`, and takes nothing, when its landing queue has no place.
    pub fn adopt(&mut self, session: Session, now: Time) -> bool {
        let queue = session.grant.landing_queue;
        let may_have = |at: &usize| {
            let is_its = self.queues.get(*at).is_none_or(|of| *of == queue);
            is_its && self.slots[*at].is_none()
        };
        let Some(at) = self.slots_of(session.has_place()).find(may_have) else {
            return false;
        };
        self.slots[at] = Some(Session {
            expires: now + session.grant.lease(),
            ..session
        });
        true
    }

    /// A late repetition must not begin a session that nobody will use.
    fn is_late(&self, application: &Application<'_>) -> bool {
        self.past.iter().flatten().any(|past| {
            past.ended_by_sender
                && past.peer == application.from
                && past.request_id == application.request_id
                && past.sender_id == application.request.sender_id
        })
    }

    /// LM_REQ.
    pub(crate) fn decide(
        &mut self,
        application: &Application<'_>,
        now: Time,
        policy: &mut dyn Admit,
        landing: &mut dyn Landing,
    ) -> Option<ControlMessage> {
        self.expire(now, landing);
        let known = |session: &&mut Session| session.is_of(application);
        if let Some(session) = self.slots.iter_mut().flatten().find(known) {
            session.expires = now + session.grant.lease();
            session.request.lands = application.request.lands;
            return Some(ControlMessage::Grant(session.told()));
        }
        if self.is_late(application) {
            return None;
        }
        let mut granted = self.grant(application, now, policy, landing);
        if (granted.as_ref()).is_err_and(|refusal| refusal.reason == RejectReason::Busy) {
            // Silent sessions give way where all places are taken, and those of the same host always: it may have begun anew.
            let host = *application.from.ip();
            let mut freed = match self.free_places() {
                0 => self.make_way(now, landing),
                _ => 0,
            };
            freed += self.close_where(landing, CloseReason::Expired, |session| {
                session.has_place() && session.expires <= now && *session.peer.ip() == host
            });
            if freed > 0 {
                granted = self.grant(application, now, policy, landing);
            }
        }
        Some(match granted {
            Ok(grant) => ControlMessage::Grant(grant),
            Err(refusal) => refusal.to_message(),
        })
    }

    fn grant(
        &mut self,
        application: &Application<'_>,
        now: Time,
        policy: &mut dyn Admit,
        landing: &mut dyn Landing,
    ) -> Result<Grant, Refusal> {
        let permit = self.permit(application, policy)?;
        if self.has_enough_places(*application.from.ip()) || !application.request.lands {
            return Err(Refusal::busy(BUSY_RETRY));
        }
        let at = self.free_slot(true).ok_or(Refusal::busy(BUSY_RETRY))?;
        let queue = self.queues[at];
        let terms = landing.open(queue, application, &permit)?;
        let session = Session::new(application, queue, &terms, &permit, now);
        self.slots[at] = Some(session);
        Ok(session.told())
    }

    /// LM_REQ that no place is to be had for now: a session without one.
    ///
    /// # Errors
    ///
    /// The [`Refusal`] that the applicant gets.
    pub fn grant_aside(
        &mut self,
        application: &Application<'_>,
        now: Time,
        policy: &mut dyn Admit,
        landing: &mut dyn Landing,
    ) -> Result<Grant, Refusal> {
        let permit = self.permit(application, policy)?;
        let busy = Refusal::busy(BUSY_RETRY);
        if self.has_enough_aside(*application.from.ip()) {
            return Err(busy);
        }
        let queue = self.queues.first().copied().unwrap_or(0);
        let at = self.free_slot(false).ok_or(busy)?;
        let terms = landing.open_aside(queue, application, &permit)?;
        let session = Session {
            aside: Some(now),
            ..Session::new(application, queue, &terms, &permit, now)
        };
        self.slots[at] = Some(session);
        Ok(session.told())
    }

    fn permit(&self, application: &Application<'_>, policy: &mut dyn Admit) -> Result<Permit, Refusal> {
        if self.shutting_down {
            return Err(RejectReason::ShuttingDown.into());
        }
        // Policy first: whom it does not allow learns nothing about queues.
        let permit = policy.admit(application)?;
        match application.request.max_message_len > permit.max_message_len {
            true => Err(Refusal::too_large(permit.max_message_len)),
            false => Ok(permit),
        }
    }

    /// LM_ENDME.
    fn handle_end(
        &mut self,
        from: SocketAddrV4,
        request_id: u32,
        end: &End,
        landing: &mut dyn Landing,
    ) -> Option<ControlMessage> {
        if *end == End::WITHDRAWN {
            self.close_where(landing, CloseReason::Ended { messages: 0 }, |session| {
                session.peer == from && session.request_id == request_id
            });
            return None;
        }
        let reason = CloseReason::Ended {
            messages: end.messages,
        };
        self.close_where(landing, reason, |session| {
            session.grant.session_key == end.session_key && session.peer == from
        });
        if self
            .sessions()
            .any(|session| session.grant.session_key == end.session_key)
        {
            // Somebody else's session.
            return None;
        }
        // A session that is not known, perhaps of an earlier life of this program: it has certainly ended.
        let mut past = self.past.iter().flatten();
        let is_its = |past: &&Past| past.ended.session_key == end.session_key && past.peer == from;
        Some(ControlMessage::Ended(Ended {
            session_key: end.session_key,
            delivered: past.find(is_its).map_or(0, |past| past.ended.delivered),
            heard: None,
        }))
    }

    fn close_where(
        &mut self,
        landing: &mut dyn Landing,
        reason: CloseReason,
        matches: impl Fn(&Session) -> bool,
    ) -> usize {
        let mut closed = 0;
        for slot in &mut self.slots {
            let Some(session) = slot.take_if(|session| matches(session)) else {
                continue;
            };
            let session_key = session.grant.session_key;
            let delivered = landing.close(&session, reason);
            self.past[self.past_next] = Some(Past {
                peer: session.peer,
                sender_id: session.request.sender_id,
                request_id: session.request_id,
                ended: Ended {
                    session_key,
                    delivered,
                    heard: landing.heard(session_key),
                },
                ended_by_sender: matches!(reason, CloseReason::Ended { .. }),
            });
            self.past_next = (self.past_next + 1) % REMEMBERED;
            closed += 1;
        }
        closed
    }
}
