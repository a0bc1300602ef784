//! A host's gate, as far as admission sees it: which landing queues are open to whom, and since when.

use lm_protocol::control::{RejectReason, Request};
use lm_protocol::geometry::LinkShape;
use lm_protocol::session::*;
use lm_protocol::time::Time;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// The lease of sessions.
pub(crate) const LEASE: Duration = Duration::from_secs(5);

/// The port on which every host receives.
pub(crate) const PORT: u16 = 7168;

/// The policy of every host.
pub(crate) fn permit() -> Permit {
    Permit {
        max_message_len: 1 << 40,
        lease: LEASE,
    }
}

/// A request for a message of `len` bytes by the job with this number.
pub(crate) fn request(job: u64, len: u64) -> Request {
    Request {
        sender_id: job,
        data_port: 40_000 + (job % 20_000) as u16,
        max_message_len: len,
        ..Request::default()
    }
}

/// One session that the gate lets in.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Open {
    pub(crate) queue: u16,
    /// The job whose session it is.
    pub(crate) job: u64,
}

/// The gate.
#[derive(Clone, Debug, Default)]
pub(crate) struct Gate {
    pub(crate) open: BTreeMap<u64, Open>,
    /// Sessions without a place, under `exclusive`.
    pub(crate) aside: BTreeSet<u64>,
    /// Under `exclusive`: nothing is admitted from then on, in the host's own time.
    pub(crate) until: Option<Time>,
    /// Keys are never used twice, in no life.
    pub(crate) next_key: u64,
    pub(crate) opened: u64,
    /// Places for each queue.
    pub(crate) places: usize,
    pub(crate) is_exclusive: bool,
}

impl Gate {
    pub(crate) fn new(host: usize, places: usize) -> Gate {
        Gate {
            next_key: (host as u64) << 32 | 1,
            places,
            ..Gate::default()
        }
    }

    fn terms(&mut self, application: &Application<'_>, permit: &Permit) -> Result<Terms, Refusal> {
        let layout = application
            .request
            .layout_at(1500, LinkShape::IPV4)
            .map_err(|_| RejectReason::Unsupported)?;
        let session_key = self.next_key;
        self.next_key += 1;
        Ok(Terms {
            session_key,
            data_port: PORT,
            layout,
            tx_queue: None,
            prefix: 0,
            frames_per_packet: 1,
            fillers: 0,
            repeats_apart: false,
            goes_ahead: true,
            landing_port: None,
            max_message_len: permit.max_message_len,
            window: application.request.window,
            packet_limit: 256,
            first_message: 0,
        })
    }
}

impl Landing for Gate {
    fn open(&mut self, queue: u16, application: &Application<'_>, permit: &Permit) -> Result<Terms, Refusal> {
        let terms = self.terms(application, permit)?;
        self.opened += 1;
        let job = application.request.sender_id;
        assert!(
            self.until.is_some() || !self.is_exclusive,
            "open, and no end in sight"
        );
        self.open.insert(terms.session_key, Open { queue, job });
        let on_queue = self.open.values().filter(|open| open.queue == queue).count();
        assert!(on_queue <= self.places, "{on_queue} sessions on queue {queue}");
        Ok(terms)
    }

    fn open_aside(
        &mut self,
        _: u16,
        application: &Application<'_>,
        permit: &Permit,
    ) -> Result<Terms, Refusal> {
        if !self.is_exclusive {
            return Err(Refusal::busy(Duration::from_millis(100)));
        }
        let terms = self.terms(application, permit)?;
        self.aside.insert(terms.session_key);
        Ok(terms)
    }

    fn active_until(&mut self, until: Time) {
        self.until = self.until.max(Some(until));
    }

    fn close(&mut self, session: &Session, _: CloseReason) -> u32 {
        let key = session.grant.session_key;
        let is_closed = self.open.remove(&key).is_some() || self.aside.remove(&key);
        assert!(is_closed, "closed twice, or never opened: {session:?}");
        1
    }
}
