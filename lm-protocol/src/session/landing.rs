//! What a grantor asks, of a policy and of the landing side, and what it is told.

use crate::control::{
    CAPABILITY_AHEAD, CAPABILITY_STREAMS, ControlMessage, Grant, Reject, RejectReason, Request,
};
use crate::geometry::Layout;
use crate::time::Time;
use crate::window::WindowShape;
use crate::wire::lm::VERSION;
use core::net::SocketAddrV4;
use core::num::NonZeroU16;
use core::time::Duration;

/// When a busy grantor wants to be asked again.
pub(super) const BUSY_RETRY: Duration = Duration::from_millis(100);

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

impl<'a> Application<'a> {
    /// A request that came from `from` under this number.
    pub fn new(from: SocketAddrV4, request_id: u32, request: &'a Request) -> Application<'a> {
        Application {
            from,
            request_id,
            request,
        }
    }
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
    /// Packets without a payload that the sender sends behind each message that leaves unannounced: slots beyond a packet that its device may write.
    pub fillers: u8,
    /// Fragments that are sent again must not go to the landing queue.
    pub repeats_apart: bool,
    /// Messages may land that were not announced.
    pub goes_ahead: bool,
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

    /// Makes a session ready whose messages take the one-copy path, until it gets a place of `queue` ([`Landing::land`]).
    ///
    /// # Errors
    ///
    /// As [`Landing::open`].
    fn open_aside(
        &mut self,
        queue: u16,
        application: &Application<'_>,
        permit: &Permit,
    ) -> Result<Terms, Refusal> {
        let _ = (queue, application, permit);
        Err(Refusal::busy(BUSY_RETRY))
    }

    /// A session that goes on without a place gets one: its messages land, from one on that has not begun. `false`: not now.
    fn land(&mut self, session: &Session) -> bool {
        let _ = session;
        false
    }

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

    /// Another one waits for the place of a session, which goes on without, by the one-copy path.
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
    /// Since when it goes on by the one-copy path and waits for a place; `None`: it has one.
    pub aside: Option<Time>,
    pub(super) begun: Time,
}

impl Session {
    pub(super) fn new(
        application: &Application<'_>,
        landing_queue: u16,
        terms: &Terms,
        permit: &Permit,
        now: Time,
    ) -> Session {
        let grant = Grant {
            session_key: terms.session_key,
            data_port: terms.data_port,
            layout: terms.layout,
            landing_queue,
            tx_queue: terms.tx_queue,
            prefix: terms.prefix,
            frames_per_packet: terms.frames_per_packet,
            fillers: terms.fillers,
            repeats_apart: terms.repeats_apart,
            landing_port: terms.landing_port,
            max_message_len: terms.max_message_len.min(permit.max_message_len),
            window: terms.window,
            packet_limit: terms.packet_limit,
            lease_ms: saturating_millis(permit.lease),
            first_message: terms.first_message,
            lands: true,
            capabilities: CAPABILITY_STREAMS | (u32::from(terms.goes_ahead) * CAPABILITY_AHEAD),
        };
        Session {
            peer: application.from,
            request_id: application.request_id,
            request: *application.request,
            grant,
            expires: now + grant.lease(),
            aside: None,
            begun: now,
        }
    }

    /// Whether it has a place; else it is aside.
    pub fn has_place(&self) -> bool {
        self.aside.is_none()
    }

    /// What its sender is told.
    pub fn told(&self) -> Grant {
        Grant {
            lands: self.has_place(),
            ..self.grant
        }
    }

    /// When it ends unless something is heard from the sender or its place is wanted: its silence is borne for `patience`.
    pub(super) fn ends(&self, patience: Duration) -> Time {
        self.expires + patience.saturating_sub(self.grant.lease())
    }

    /// A session as an earlier life of this program granted it, for [`Grantor::adopt`](crate::session::Grantor::adopt); without a place if it went on so.
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
            aside: (!has_place).then_some(Time::ZERO),
            begun: Time::ZERO,
        }
    }

    /// Where the sender's DATA packets come from, and where credits go.
    pub fn data_peer(&self) -> SocketAddrV4 {
        SocketAddrV4::new(*self.peer.ip(), self.request.data_port)
    }

    /// Whether it is what was applied for.
    pub(super) fn is_of(&self, application: &Application<'_>) -> bool {
        self.peer == application.from
            && self.request_id == application.request_id
            && self.request.sender_id == application.request.sender_id
    }

    /// The same in a place of a queue.
    pub(super) fn in_place(mut self, landing_queue: u16) -> Session {
        (self.grant.landing_queue, self.aside) = (landing_queue, None);
        self
    }
}

fn saturating_millis(duration: Duration) -> u32 {
    u32::try_from(duration.as_millis()).unwrap_or(u32::MAX)
}
