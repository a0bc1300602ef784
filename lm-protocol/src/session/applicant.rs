//! The sender's side: asking for a session, and ending it.

use super::{Due, Retransmit};
use crate::control::{ControlError, ControlMessage, End, Grant, Reject, RejectReason, Request};
use crate::time::Time;
use core::time::Duration;

/// Where an application for a session stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ApplicantState {
    /// No answer yet, or the receiver is busy and will be asked again.
    Pending,
    /// The receiver granted the session (LM_ACQ_OK): transmission may begin.
    Granted(Grant),
    /// The receiver rejected the request (LM_ACQ_REJ), or was busy until the deadline.
    ///
    /// The sender may still send in the one-copy way where the paper says so.
    Rejected(Reject),
    /// No answer until the deadline.
    Unreachable,
    /// The receiver's host said that nobody listens on the control port (ICMP port unreachable).
    NotListening,
    /// The receiver granted something that was not asked for; that session was ended.
    Incompatible(Grant),
}

/// Applies for a session: sends LM_REQ until there is an answer.
///
/// The owner transmits what [`Applicant::poll_transmit`] gives, under [`Applicant::request_id`], to the receiver's control
/// port, and passes in what comes back *from there*. Requests are repeated after 100 ms, doubling to 1 s, until the
/// deadline. Keep an applicant that ended in anything but a grant for a while, and go on passing answers in: a grant that
/// comes late is ended properly instead of blocking the receiver's queue until its lease runs out.
///
/// ```
/// use core::time::Duration;
/// use lm_protocol::control::{ControlMessage, End, Request};
/// use lm_protocol::geometry::{LinkShape, Wire};
/// use lm_protocol::session::{Applicant, ApplicantState};
/// use lm_protocol::time::Time;
/// use lm_protocol::window::WindowShape;
///
/// let request = Request {
///     sender_id: 0x1234, data_port: 40_000, ..Request::default()
/// };
/// let start = Time::ZERO;
/// let mut applicant = Applicant::new(request, 77, start, Duration::from_secs(3));
/// assert_eq!(applicant.poll_transmit(start), Some(ControlMessage::Request(request)));
/// assert_eq!(applicant.poll_transmit(start), None);
/// assert_eq!(applicant.poll_timeout(), Some(start + Duration::from_millis(100)));
/// let withdrawn = Some(ControlMessage::End(End::WITHDRAWN));
/// assert_eq!(applicant.poll_transmit(start + Duration::from_secs(3)), withdrawn);
/// assert_eq!(*applicant.state(), ApplicantState::Unreachable);
/// ```
#[derive(Clone, Debug)]
pub struct Applicant {
    request: Request,
    request_id: u32,
    state: ApplicantState,
    retransmit: Retransmit,
    /// The last answer said "busy".
    busy: Option<Reject>,
    /// What is to be ended: a session that was granted and will not be used, or the request itself.
    unwanted: Option<End>,
}

impl Applicant {
    /// An application that starts now and is given up after `patience`.
    ///
    /// `request_id` is random, and new for every application: a receiver takes the same number from the same sender for
    /// a repetition.
    pub fn new(request: Request, request_id: u32, now: Time, patience: Duration) -> Applicant {
        Applicant {
            request,
            request_id,
            state: ApplicantState::Pending,
            retransmit: Retransmit::new(now, patience),
            busy: None,
            unwanted: None,
        }
    }

    /// The number that goes with every message of this application.
    pub fn request_id(&self) -> u32 {
        self.request_id
    }

    /// What was asked for.
    pub fn request(&self) -> &Request {
        &self.request
    }

    /// Where it stands.
    pub fn state(&self) -> &ApplicantState {
        &self.state
    }

    /// While it is pending: what the receiver said last, if it answered at all. It is busy, and says for how long.
    pub fn busy(&self) -> Option<&Reject> {
        self.busy
            .as_ref()
            .filter(|_| self.state == ApplicantState::Pending)
    }

    /// The message to transmit now, if any; call until `None`. Gives up when the deadline has passed.
    pub fn poll_transmit(&mut self, now: Time) -> Option<ControlMessage> {
        if let Some(end) = self.unwanted.take() {
            return Some(ControlMessage::End(end));
        }
        if self.state != ApplicantState::Pending {
            return None;
        }
        match self.retransmit.poll(now) {
            Due::Transmit => Some(ControlMessage::Request(self.request)),
            Due::Wait => None,
            Due::GiveUp => {
                self.state = match self.busy {
                    Some(reject) => ApplicantState::Rejected(reject),
                    None => ApplicantState::Unreachable,
                };
                // It may wait there, or its grant be on the way.
                Some(ControlMessage::End(End::WITHDRAWN))
            }
        }
    }

    /// The receiver can take now what it could not before: do not wait to repeat the request.
    pub fn hurry(&mut self, now: Time) {
        self.retransmit.hurry(now);
    }

    /// The session is asked for without a place from now on.
    pub fn send_one_copy(&mut self, now: Time) {
        self.request.lands = false;
        self.hurry(now);
    }

    /// When to call [`Applicant::poll_transmit`] next; `None` when only an answer can change anything.
    pub fn poll_timeout(&self) -> Option<Time> {
        if self.unwanted.is_some() {
            return Some(Time::ZERO);
        }
        (self.state == ApplicantState::Pending).then(|| self.retransmit.timeout())
    }

    /// A control message came from the receiver. Messages that answer something else are ignored.
    pub fn handle(&mut self, request_id: u32, message: &ControlMessage, now: Time) {
        if request_id != self.request_id {
            return;
        }
        match message {
            ControlMessage::Grant(grant) => self.granted(grant),
            ControlMessage::Reject(reject) if self.state == ApplicantState::Pending => {
                self.rejected(reject, now);
            }
            _ => {}
        }
    }

    /// A datagram came from the receiver that is no control message: another version is an answer too.
    pub fn handle_error(&mut self, error: &ControlError) {
        if let ControlError::VersionMismatch {
            theirs,
            request_id: Some(request_id),
        } = *error
            && request_id == self.request_id
            && self.state == ApplicantState::Pending
        {
            let reject = Reject {
                reason: RejectReason::Version,
                version: theirs,
                retry_after_ms: 0,
                limit: 0,
            };
            self.state = ApplicantState::Rejected(reject);
        }
    }

    /// The receiver's host refused a datagram to its control port (ICMP port unreachable).
    pub fn handle_refused(&mut self) {
        if self.state == ApplicantState::Pending {
            self.state = ApplicantState::NotListening;
        }
    }

    fn granted(&mut self, grant: &Grant) {
        match &self.state {
            ApplicantState::Pending if self.fits(grant) => self.state = ApplicantState::Granted(*grant),
            ApplicantState::Pending => {
                self.state = ApplicantState::Incompatible(*grant);
                self.unwanted = Some(unused(grant));
            }
            // The answer to a repetition.
            ApplicantState::Granted(first) if first.session_key == grant.session_key => {}
            // Too late, or a second session for one request (the receiver was restarted in between).
            _ => self.unwanted = Some(unused(grant)),
        }
    }

    /// The grant is one that this request's packets can follow.
    fn fits(&self, grant: &Grant) -> bool {
        let largest = self.request.layout_at(u16::MAX, self.request.link);
        grant.layout.wire() == self.request.wire
            && largest.is_ok_and(|layout| grant.layout.payload_len() <= layout.payload_len())
    }

    fn rejected(&mut self, reject: &Reject, now: Time) {
        if reject.reason == RejectReason::Busy {
            self.busy = Some(*reject);
            let wait = Duration::from_millis(u64::from(reject.retry_after_ms));
            self.retransmit.postpone(now, wait);
        } else {
            self.state = ApplicantState::Rejected(*reject);
        }
    }
}

/// The end of a session that nobody uses.
fn unused(grant: &Grant) -> End {
    End {
        session_key: grant.session_key,
        messages: 0,
    }
}

/// Where the end of a session stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum FarewellState {
    /// Not confirmed yet.
    Pending,
    /// The receiver confirmed (LM_ENDME_OK).
    Ended {
        /// Messages that it delivered in the session.
        delivered: u32,
    },
    /// No confirmation until the deadline, or nobody listens any more. The lease ends the session.
    Unconfirmed,
}

/// Ends a session: sends LM_ENDME until it is confirmed.
#[derive(Clone, Debug)]
pub struct Farewell {
    end: End,
    request_id: u32,
    state: FarewellState,
    retransmit: Retransmit,
}

impl Farewell {
    /// Ends the session `session_key`, in which `messages` messages were sent; gives up after `patience`.
    pub fn new(session_key: u64, messages: u32, request_id: u32, now: Time, patience: Duration) -> Farewell {
        Farewell {
            end: End {
                session_key,
                messages,
            },
            request_id,
            state: FarewellState::Pending,
            retransmit: Retransmit::new(now, patience),
        }
    }

    /// The number that goes with every message of this farewell.
    pub fn request_id(&self) -> u32 {
        self.request_id
    }

    /// Where it stands.
    pub fn state(&self) -> &FarewellState {
        &self.state
    }

    /// The message to transmit now, if any. Gives up when the deadline has passed.
    pub fn poll_transmit(&mut self, now: Time) -> Option<ControlMessage> {
        if self.state != FarewellState::Pending {
            return None;
        }
        match self.retransmit.poll(now) {
            Due::Transmit => Some(ControlMessage::End(self.end)),
            Due::Wait => None,
            Due::GiveUp => {
                self.state = FarewellState::Unconfirmed;
                None
            }
        }
    }

    /// The receiver can take now what it could not before: do not wait to repeat the farewell.
    pub fn hurry(&mut self, now: Time) {
        self.retransmit.hurry(now);
    }

    /// When to call [`Farewell::poll_transmit`] next; `None` when it is over.
    pub fn poll_timeout(&self) -> Option<Time> {
        (self.state == FarewellState::Pending).then(|| self.retransmit.timeout())
    }

    /// A control message came from the receiver. Messages that answer something else are ignored.
    pub fn handle(&mut self, request_id: u32, message: &ControlMessage) {
        if let ControlMessage::Ended(ended) = message
            && request_id == self.request_id
            && ended.session_key == self.end.session_key
            && self.state == FarewellState::Pending
        {
            self.state = FarewellState::Ended {
                delivered: ended.delivered,
            };
        }
    }

    /// The receiver's host refused a datagram to its control port: it is gone, and the session with it.
    pub fn handle_refused(&mut self) {
        if self.state == FarewellState::Pending {
            self.state = FarewellState::Unconfirmed;
        }
    }
}
