//! The receiver's side: who may send into which landing queue, and for how long.

use crate::control::{ControlError, ControlMessage, End, Ended, Grant, Reject, RejectReason, Request};
use crate::geometry::Layout;
use crate::time::Time;
use crate::window::WindowShape;
use crate::wire::lm::VERSION;
use alloc::vec::Vec;
use core::net::{Ipv4Addr, SocketAddrV4};
use core::num::NonZeroU16;
use core::time::Duration;

/// Ended sessions that are remembered, to answer late repetitions.
const REMEMBERED: usize = 64;

/// When a busy grantor wants to be asked again.
const BUSY_RETRY: Duration = Duration::from_millis(100);

/// A place in which nothing lands for so long goes to whoever waits for one.
pub const UNUSED_MAX: Duration = Duration::from_secs(5);

/// A place that is of no use at the moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Unused {
    /// Since when nothing of its session landed.
    pub since: Time,
    /// Whether nothing is under way; else a message is, of which nothing comes.
    pub is_idle: bool,
}

/// Whether a session goes on without its place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Aside {
    /// It does.
    Done,
    /// It may soon, and keeps its place until then.
    Later,
    /// It cannot.
    Never,
}

/// Who asks, and for what.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Application<'a> {
    /// Where the request came from: the applicant's control address.
    pub from: SocketAddrV4,
    /// The request's number.
    pub request_id: u32,
    /// LM_REQ.
    pub request: &'a Request,
}

/// What the policy allows an applicant.
///
/// A permit is itself the simplest policy: the same for everybody.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Permit {
    /// Longest message, in bytes. A request for more is rejected with this limit.
    pub max_message_len: u64,
    /// The session ends when nothing is heard from the sender for so long.
    pub lease: Duration,
}

/// What the landing side offers for one session: the parts of a [`Grant`] that it decides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Terms {
    /// The session's key: random, never used before.
    pub session_key: u64,
    /// The receiver's UDP port on the data path.
    pub data_port: u16,
    /// Wire, header and payload length, link.
    pub layout: Layout,
    /// The sender's transmit queue that leads to the landing queue, if known.
    pub tx_queue: Option<u16>,
    /// Bytes that the driver writes in front of a packet.
    pub prefix: u8,
    /// Frames that one packet takes, at least 1.
    pub frames_per_packet: u8,
    /// Fragments that are sent again must not go to the landing queue.
    pub repeats_apart: bool,
    /// The source port that fragments must have; `None`: the sender's data port.
    pub landing_port: Option<NonZeroU16>,
    /// Longest message, in bytes; the grant carries the smaller one of this and the permit's.
    pub max_message_len: u64,
    /// The session's window.
    pub window: WindowShape,
    /// DATA packets that may be sent before the first credit: entries posted already.
    pub packet_limit: u32,
    /// Number of the session's first message.
    pub first_message: u32,
}

/// Why a request is refused, and what the applicant should know about it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// Why.
    pub reason: RejectReason,
    /// The limit that the request exceeds; 0 when there is none.
    pub limit: u64,
    /// When asking again makes sense; zero when it does not.
    pub retry_after: Duration,
}

impl Refusal {
    /// All queues are taken: ask again after `retry_after`.
    pub const fn busy(retry_after: Duration) -> Refusal {
        Refusal {
            reason: RejectReason::Busy,
            limit: 0,
            retry_after,
        }
    }

    /// The messages are longer than `limit` bytes.
    pub const fn too_large(limit: u64) -> Refusal {
        Refusal {
            reason: RejectReason::TooLarge,
            limit,
            retry_after: Duration::ZERO,
        }
    }

    /// The answer that says so.
    pub fn to_message(self) -> ControlMessage {
        ControlMessage::Reject(Reject {
            reason: self.reason,
            version: VERSION,
            retry_after_ms: saturating_millis(self.retry_after),
            limit: self.limit,
        })
    }
}

impl From<RejectReason> for Refusal {
    fn from(reason: RejectReason) -> Refusal {
        Refusal {
            reason,
            limit: 0,
            retry_after: Duration::ZERO,
        }
    }
}

/// The policy: who may send here. Asked once a request, before anything is taken for it.
///
/// Closures are policies:
///
/// ```
/// use core::time::Duration;
/// use lm_protocol::control::RejectReason;
/// use lm_protocol::session::{Admit, Application, Permit};
///
/// let mut private_only = |application: &Application<'_>| {
///     if application.from.ip().is_private() {
///         Ok(Permit { max_message_len: 1 << 30, lease: Duration::from_secs(10) })
///     } else {
///         Err(RejectReason::NotAllowed.into())
///     }
/// };
/// let policy: &mut dyn Admit = &mut private_only;
/// ```
pub trait Admit {
    /// May this applicant send, and how much?
    ///
    /// # Errors
    ///
    /// The [`Refusal`] that the applicant gets.
    fn admit(&mut self, application: &Application<'_>) -> Result<Permit, Refusal>;
}

impl<F> Admit for F
where
    F: FnMut(&Application<'_>) -> Result<Permit, Refusal>,
{
    fn admit(&mut self, application: &Application<'_>) -> Result<Permit, Refusal> {
        self(application)
    }
}

impl Admit for Permit {
    fn admit(&mut self, _: &Application<'_>) -> Result<Permit, Refusal> {
        Ok(*self)
    }
}

/// The resources: landing zones, posted entries, the gate. Called by the grantor as sessions begin and end.
pub trait Landing {
    /// Makes landing queue `queue` ready for a session and opens the gate to it (the paper's "activate the DLD scheme").
    ///
    /// # Errors
    ///
    /// The [`Refusal`] that the applicant gets; nothing may stay taken then.
    fn open(&mut self, queue: u16, application: &Application<'_>, permit: &Permit) -> Result<Terms, Refusal>;

    /// Exclusive admission between hosts: from `until` on the gate admits nothing, even if nobody closes it, because this program may
    /// be gone by then. Comes before [`Landing::open`], and again with a later moment each time that the host may go on.
    /// Where admission is not exclusive it never comes, and there is nothing to do.
    fn active_until(&mut self, until: Time) {
        let _ = until;
    }

    /// What a session's place is unused for; `None` while something lands there, or may.
    fn unused(&self, session: &Session) -> Option<Unused> {
        let _ = session;
        None
    }

    /// Somebody waits for the place of a session, of which a message is under way: it goes on without, by the one-copy path.
    fn set_aside(&mut self, session: &Session) -> Aside {
        let _ = session;
        Aside::Never
    }

    /// The session is over: closes the gate and frees what it took. Gives the number of messages that it delivered.
    fn close(&mut self, session: &Session, reason: CloseReason) -> u32;

    /// Of how many messages a session had heard that was closed; `None` where that is not known.
    fn heard(&self, session_key: u64) -> Option<u32> {
        let _ = session_key;
        None
    }
}

/// Why a session is over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum CloseReason {
    /// The sender said so (LM_ENDME).
    Ended {
        /// Messages that the sender says it sent.
        messages: u32,
    },
    /// Nothing was heard from the sender for a whole lease.
    Expired,
    /// The receiver ended it.
    Local,
}

/// One admitted relation, sender → landing queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Session {
    /// The sender's control address.
    pub peer: SocketAddrV4,
    /// Number of the request that began it.
    pub request_id: u32,
    /// What was asked for.
    pub request: Request,
    /// What was granted.
    pub grant: Grant,
    /// When its lease runs out unless something is heard from the sender.
    pub expires: Time,
    /// Whether it has a place; else it is aside, and goes on by the one-copy path.
    pub has_place: bool,
}

impl Session {
    /// When it ends unless something is heard from the sender or its place is wanted: its silence is borne for `patience`.
    fn ends(&self, patience: Duration) -> Time {
        self.expires + patience.saturating_sub(self.grant.lease())
    }

    /// A session as an earlier life of this program granted it, for [`Grantor::adopt`]; without a place if it went on so.
    pub fn granted_before(
        peer: SocketAddrV4,
        request_id: u32,
        request: Request,
        grant: Grant,
        has_place: bool,
    ) -> Session {
        Session {
            peer,
            request_id,
            request,
            grant,
            expires: Time::ZERO,
            has_place,
        }
    }

    /// Where the sender's DATA packets come from, and where credits go.
    pub fn data_peer(&self) -> SocketAddrV4 {
        SocketAddrV4::new(*self.peer.ip(), self.request.data_port)
    }

    fn is_from(&self, from: SocketAddrV4, request_id: u32, request: &Request) -> bool {
        self.peer == from && self.request_id == request_id && self.request.sender_id == request.sender_id
    }
}

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
///             repeats_apart: false,
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
///     sender_id: 1, data_port: 40_000, mtu: 1500, wire: Wire::Lm, link: LinkShape::IPV4,
///     max_message_len: 1 << 20, window: WindowShape::DEFAULT, messages_in_flight: 4, uncompleted_max: 0, capabilities: 0, delivery: Default::default(),
///     integrity: Default::default(),
/// });
/// let reply = grantor.handle(from, 77, &request, Time::ZERO, &mut policy, &mut Zone);
/// assert!(matches!(reply, Some(ControlMessage::Grant(grant)) if grant.landing_queue == 1));
/// ```
#[derive(Clone, Debug)]
pub struct Grantor {
    queues: Vec<(u16, Option<Session>)>,
    /// Sessions that go on without a place: as many as there are places.
    aside: Vec<Option<Session>>,
    /// The last ended sessions, overwritten in a circle.
    past: [Option<Past>; REMEMBERED],
    past_next: usize,
    /// For how long a silent session goes on while nobody else wants its place; not less than its lease.
    patience: Duration,
    shutting_down: bool,
    /// Sessions that one source address may have.
    address_max: usize,
}

impl Grantor {
    /// A grantor for these landing queues, in the order in which they are to be used; a queue that several sessions can share
    /// is there several times. All memory is taken here.
    pub fn new(landing_queues: &[u16]) -> Grantor {
        Grantor {
            queues: landing_queues.iter().map(|&queue| (queue, None)).collect(),
            aside: landing_queues.iter().map(|_| None).collect(),
            past: [None; REMEMBERED],
            past_next: 0,
            patience: Duration::ZERO,
            shutting_down: false,
            address_max: usize::MAX,
        }
    }

    /// There are these places as well.
    pub fn add_places(&mut self, landing_queues: &[u16]) {
        (self.queues).extend(landing_queues.iter().map(|&queue| (queue, None)));
    }

    /// The same with a bound on the sessions of one source address.
    #[must_use]
    pub fn with_address_max(self, address_max: usize) -> Grantor {
        Grantor { address_max, ..self }
    }

    /// The same, of whose sessions so many may go on without a place; else as many as there are places.
    #[must_use]
    pub fn with_aside_max(self, aside_max: usize) -> Grantor {
        let aside = (0..aside_max).map(|_| None).collect();
        Grantor { aside, ..self }
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
                self.expire(now, landing);
                self.handle_request(
                    Application {
                        from,
                        request_id,
                        request,
                    },
                    now,
                    policy,
                    landing,
                )
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
        if let Some(session) = self.session_mut(session_key) {
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

    /// When to call [`Grantor::make_way`] for whoever waits; `None` while a place is free.
    pub fn next_way(&self) -> Option<Time> {
        let is_full = self.free_places() == 0;
        (self.placed().map(|session| session.expires).min()).filter(|_| is_full)
    }

    /// Somebody wants a place that there is not: sessions whose lease has run out give theirs up; gives their number. Those of which a
    /// message is under way go on without, where they can: a path may be cut.
    pub fn make_way(&mut self, now: Time, landing: &mut dyn Landing) -> usize {
        let mut freed = 0;
        for at in 0..self.queues.len() {
            let Some(session) = self.queues[at].1.filter(|session| session.expires <= now) else {
                continue;
            };
            let is_idle = landing.unused(&session).is_some_and(|unused| unused.is_idle);
            let aside = match is_idle {
                true => Aside::Never,
                false => self.put_aside(&session, landing),
            };
            let session_key = session.grant.session_key;
            match aside {
                Aside::Done => freed += 1,
                Aside::Later => {}
                Aside::Never => {
                    let is_it = |session: &Session| session.grant.session_key == session_key;
                    freed += self.close_where(landing, CloseReason::Expired, is_it);
                }
            }
        }
        freed
    }

    /// Closes the session with this key from this side; gives whether there was one.
    pub fn close(&mut self, session_key: u64, landing: &mut dyn Landing) -> bool {
        self.close_where(landing, CloseReason::Local, |session| {
            session.grant.session_key == session_key
        }) > 0
    }

    /// A host waits for a place: the session that has not used its own for longest gives it up, if that is [`UNUSED_MAX`]; where the host
    /// has as many sessions as it may, one of its own. One of which a
    /// message is under way goes on without. Any other ends, and so does the first where none can go on without: what is to be told to its
    /// sender, under the number of its request; it asks again when it has something to send.
    pub fn displace(
        &mut self,
        host: Ipv4Addr,
        now: Time,
        landing: &mut dyn Landing,
    ) -> Option<(SocketAddrV4, u32, Ended)> {
        let its_own = self.has_enough(host);
        let may_go = |session: &&Session| !its_own || *session.peer.ip() == host;
        let unused = |session: &Session| {
            let unused = landing.unused(session)?;
            (now.since(unused.since) >= UNUSED_MAX).then_some((unused, *session))
        };
        let mut unused: Vec<(Unused, Session)> = self.placed().filter(may_go).filter_map(unused).collect();
        unused.sort_by_key(|(unused, session)| (*unused, session.grant.session_key));
        let mut ending = None;
        for (unused, session) in unused {
            if unused.is_idle {
                return self.end(&session, landing);
            }
            match self.put_aside(&session, landing) {
                Aside::Done | Aside::Later => return None,
                Aside::Never => ending = ending.or(Some(session)),
            }
        }
        self.end(&ending?, landing)
    }

    /// Whether a host has as many sessions as it may: others are to find a place, whatever it asks for.
    fn has_enough(&self, host: Ipv4Addr) -> bool {
        let is_its = |session: &&Session| *session.peer.ip() == host;
        let aside = self.aside.iter().flatten().filter(is_its).count();
        self.sessions().filter(is_its).count() >= self.address_max || 2 * aside > self.aside.len()
    }

    /// Ends a session that is aside and has had nothing under way for [`UNUSED_MAX`], so that its sender asks for a place again. What is to
    /// be told to it, as by [`Grantor::displace`].
    pub fn recall(&mut self, now: Time, landing: &mut dyn Landing) -> Option<(SocketAddrV4, u32, Ended)> {
        let is_over = |session: &&Session| {
            let unused = landing.unused(session);
            unused.is_some_and(|unused| unused.is_idle && now.since(unused.since) >= UNUSED_MAX)
        };
        let session = self.aside.iter().flatten().find(is_over).copied()?;
        self.end(&session, landing)
    }

    /// A session goes on without its place, unless as many do already as there are places.
    fn put_aside(&mut self, session: &Session, landing: &mut dyn Landing) -> Aside {
        let Some(free) = self.aside.iter_mut().find(|slot| slot.is_none()) else {
            return Aside::Never;
        };
        let aside = landing.set_aside(session);
        if aside == Aside::Done {
            let is_it = |placed: &mut Session| placed.grant.session_key == session.grant.session_key;
            let mut placed = self.queues.iter_mut();
            let moved = placed.find_map(|(_, slot)| slot.take_if(is_it));
            *free = moved.map(|session| Session {
                has_place: false,
                ..session
            });
        }
        aside
    }

    /// Ends a session from this side: what is to be told to its sender.
    fn end(&mut self, session: &Session, landing: &mut dyn Landing) -> Option<(SocketAddrV4, u32, Ended)> {
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
        self.placed().chain(self.aside.iter().flatten())
    }

    /// Those that have a place.
    fn placed(&self) -> impl Iterator<Item = &Session> {
        self.queues.iter().filter_map(|(_, session)| session.as_ref())
    }

    fn sessions_mut(&mut self) -> impl Iterator<Item = &mut Session> {
        let placed = self.queues.iter_mut().filter_map(|(_, slot)| slot.as_mut());
        placed.chain(self.aside.iter_mut().flatten())
    }

    fn session_mut(&mut self, session_key: u64) -> Option<&mut Session> {
        self.sessions_mut()
            .find(|session| session.grant.session_key == session_key)
    }

    /// Places without a session.
    pub fn free_places(&self) -> usize {
        self.queues
            .iter()
            .filter(|(_, session)| session.is_none())
            .count()
    }

    /// Whether the request needs no decision any more: it has its session, or its session ended.
    pub fn is_decided(&self, from: SocketAddrV4, request_id: u32, request: &Request) -> bool {
        let live = self
            .sessions()
            .any(|session| session.is_from(from, request_id, request));
        live || self.is_late(from, request_id, request)
    }

    /// Takes over a session that an earlier life of this program granted and whose gate is still open, or that went on without a place; its
    /// lease starts anew. Gives `false`, and takes nothing, when its landing queue has no place.
    pub fn adopt(&mut self, session: Session, now: Time) -> bool {
        let queue = session.grant.landing_queue;
        let placed = self.queues.iter_mut().filter(|(number, _)| *number == queue);
        let place = match session.has_place {
            true => { placed }.map(|(_, place)| place).find(|place| place.is_none()),
            false => self.aside.iter_mut().find(|place| place.is_none()),
        };
        let Some(place) = place else {
            return false;
        };
        *place = Some(Session {
            expires: now + session.grant.lease(),
            ..session
        });
        true
    }

    /// A late repetition must not begin a session that nobody will use.
    fn is_late(&self, from: SocketAddrV4, request_id: u32, request: &Request) -> bool {
        self.past.iter().flatten().any(|past| {
            past.ended_by_sender
                && past.peer == from
                && past.request_id == request_id
                && past.sender_id == request.sender_id
        })
    }

    /// LM_REQ.
    fn handle_request(
        &mut self,
        application: Application<'_>,
        now: Time,
        policy: &mut dyn Admit,
        landing: &mut dyn Landing,
    ) -> Option<ControlMessage> {
        let Application {
            from,
            request_id,
            request,
        } = application;
        let known = |session: &&mut Session| session.is_from(from, request_id, request);
        if let Some(session) = self.sessions_mut().find(known) {
            session.expires = now + session.grant.lease();
            return Some(ControlMessage::Grant(session.grant));
        }
        if self.is_late(from, request_id, request) {
            return None;
        }
        let mut granted = self.grant(&application, now, policy, landing);
        if (granted.as_ref()).is_err_and(|refusal| refusal.reason == RejectReason::Busy) {
            // Silent sessions give way where all places are taken, and those of the same host always: it may have begun anew.
            let host = *from.ip();
            let mut freed = match self.free_places() {
                0 => self.make_way(now, landing),
                _ => 0,
            };
            freed += self.close_where(landing, CloseReason::Expired, |session| {
                session.has_place && session.expires <= now && *session.peer.ip() == host
            });
            if freed > 0 {
                granted = self.grant(&application, now, policy, landing);
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
        if self.shutting_down {
            return Err(RejectReason::ShuttingDown.into());
        }
        // Policy first: whom it does not allow learns nothing about queues.
        let permit = policy.admit(application)?;
        if application.request.max_message_len > permit.max_message_len {
            return Err(Refusal::too_large(permit.max_message_len));
        }
        if self.has_enough(*application.from.ip()) {
            return Err(Refusal::busy(BUSY_RETRY));
        }
        let (queue, free) = self
            .queues
            .iter_mut()
            .find(|(_, session)| session.is_none())
            .ok_or(Refusal::busy(BUSY_RETRY))?;
        let terms = landing.open(*queue, application, &permit)?;
        let grant = Grant {
            session_key: terms.session_key,
            data_port: terms.data_port,
            layout: terms.layout,
            landing_queue: *queue,
            tx_queue: terms.tx_queue,
            prefix: terms.prefix,
            frames_per_packet: terms.frames_per_packet,
            repeats_apart: terms.repeats_apart,
            landing_port: terms.landing_port,
            max_message_len: terms.max_message_len.min(permit.max_message_len),
            window: terms.window,
            packet_limit: terms.packet_limit,
            lease_ms: saturating_millis(permit.lease),
            first_message: terms.first_message,
            capabilities: 0,
        };
        *free = Some(Session {
            peer: application.from,
            request_id: application.request_id,
            request: *application.request,
            grant,
            expires: now + grant.lease(),
            has_place: true,
        });
        Ok(grant)
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
        let placed = self.queues.iter_mut().map(|(_, slot)| slot);
        for slot in placed.chain(&mut self.aside) {
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

fn saturating_millis(duration: Duration) -> u32 {
    u32::try_from(duration.as_millis()).unwrap_or(u32::MAX)
}
