//! Admission (LM section 3.3) as state machines: no I/O, no clock, no randomness; all three are arguments.
//!
//! The paper's words and ours:
//!
//! | paper | here |
//! |---|---|
//! | applicant, sends LM_REQ | [`Applicant`]: asks, repeats, waits while the other side is busy, gives up at a deadline |
//! | DLD controller: is DLD active, and for whom | [`Grantor`]: as many sessions as a landing queue has places |
//! | LM_RECV_ADDR entry with flag 10, "other nodes transmit to the local node" | [`Session`] in the grantor's table |
//! | LM_RECV_ADDR entry with flag 01, "the local node is transmitting" | an applicant in [`ApplicantState::Granted`] |
//! | LM_ENDME, "traffic is finished" | [`Farewell`]: says so until it is confirmed (LM_ENDME_OK) |
//!
//! What the paper leaves open is closed here: every message may be lost, doubled or late. A request has a number, and the
//! grantor gives the same answer to the same request; a session has a lease, so that a sender that vanished frees its
//! queue; an applicant that gave up ends the session that a late grant would have begun.
//!
//! ```text
//!  applicant                                grantor
//!  Pending   ── LM_REQ (100 ms, 200 ms… 1 s) ──▶  policy (Admit), free place? Landing::open, else open_aside
//!     ▲      ◀───── LM_ACQ_REJ busy ────────────  neither: ask again after retry_after
//!  Granted   ◀───── LM_ACQ_OK ──────────────────  session open, lease running
//!     │  data, credits…                           Grantor::touched; Landing::land, set_aside
//!  Farewell  ── LM_ENDME ───────────────────────▶ Landing::close
//!  Ended     ◀───── LM_ENDME_OK ────────────────  the same answer to every repetition
//! ```

mod applicant;
mod grantor;
mod landing;

pub use applicant::{Applicant, ApplicantState, Farewell, FarewellState};
pub use grantor::{Grantor, UNUSED_MAX};
pub use landing::{Admit, Application, Aside, CloseReason, Landing, Permit, Refusal, Session, Terms, Unused};

use crate::time::Time;
use core::time::Duration;

/// Time from a request's first transmission to its second.
pub const FIRST_RETRANSMIT: Duration = Duration::from_millis(100);
/// Longest time between two transmissions of a request.
pub const LAST_RETRANSMIT: Duration = Duration::from_secs(1);

/// Shortest wait before a receiver is asked again, for a session or for a longer lease, whatever it said.
pub(crate) const MIN_RETRY: Duration = Duration::from_millis(10);

/// When to transmit next: at once, then after 100 ms, doubling to 1 s, until a deadline.
#[derive(Clone, Copy, Debug)]
struct Retransmit {
    next: Time,
    interval: Duration,
    deadline: Time,
}

/// What a [`Retransmit`] says at some moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Due {
    Transmit,
    Wait,
    GiveUp,
}

impl Retransmit {
    fn new(now: Time, patience: Duration) -> Retransmit {
        Retransmit {
            next: now,
            interval: FIRST_RETRANSMIT,
            deadline: now + patience,
        }
    }

    fn poll(&mut self, now: Time) -> Due {
        if now >= self.deadline {
            return Due::GiveUp;
        }
        if now < self.next {
            return Due::Wait;
        }
        self.next = now + self.interval;
        self.interval = (self.interval * 2).min(LAST_RETRANSMIT);
        Due::Transmit
    }

    /// The other side is there and asks for patience.
    fn postpone(&mut self, now: Time, wait: Duration) {
        self.next = now + wait.clamp(MIN_RETRY, LAST_RETRANSMIT);
        self.interval = FIRST_RETRANSMIT;
    }

    fn hurry(&mut self, now: Time) {
        self.next = self.next.min(now);
    }

    fn timeout(&self) -> Time {
        self.next.min(self.deadline)
    }
}
