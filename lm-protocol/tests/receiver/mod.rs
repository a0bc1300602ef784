//! A receiver whose landing queues exist on paper only.
#![allow(dead_code, reason = "each test binary uses a part")]

use lm_protocol::control::*;
use lm_protocol::geometry::LinkShape;
use lm_protocol::session::*;
use lm_protocol::time::Time;
use std::collections::BTreeMap;
use std::net::{Ipv4Addr, SocketAddrV4};
use std::time::Duration;

pub(crate) const SECOND: Duration = Duration::from_secs(1);
pub(crate) const LEASE: Duration = Duration::from_secs(5);

pub(crate) fn ms(millis: u64) -> Time {
    Time::from_millis(millis)
}

pub(crate) fn request(sender_id: u64) -> Request {
    Request {
        sender_id,
        data_port: 40_000,
        ..Request::default()
    }
}

pub(crate) fn peer(host: u8) -> SocketAddrV4 {
    SocketAddrV4::new(Ipv4Addr::new(10, 0, 0, host), 40_001)
}

pub(crate) fn permit() -> Permit {
    Permit {
        max_message_len: 1 << 30,
        lease: LEASE,
    }
}

/// Landing queues that know what they were told, and that nothing may be opened or closed twice.
#[derive(Default)]
pub(crate) struct Queues {
    pub(crate) open: BTreeMap<u16, (u64, u64)>,
    pub(crate) opened: BTreeMap<u64, u64>,
    pub(crate) closed: Vec<(u64, CloseReason)>,
    pub(crate) refuse: Option<Refusal>,
    pub(crate) mtu: Option<u16>,
    /// What nothing lands of, and which sessions cannot go on without their places.
    pub(crate) unused: BTreeMap<u64, Unused>,
    pub(crate) fixed: Vec<u64>,
    pub(crate) aside: Vec<u64>,
}

impl Landing for Queues {
    fn open(&mut self, queue: u16, application: &Application<'_>, permit: &Permit) -> Result<Terms, Refusal> {
        if let Some(refusal) = self.refuse {
            return Err(refusal);
        }
        let layout = application
            .request
            .layout_at(self.mtu.unwrap_or(1500), LinkShape::IPV4)
            .map_err(|_| RejectReason::Unsupported)?;
        let session_key = 1000 + self.opened.len() as u64;
        let sender_id = application.request.sender_id;
        assert!(
            self.open.insert(queue, (session_key, sender_id)).is_none(),
            "two sessions on queue {queue}"
        );
        self.opened.insert(session_key, sender_id);
        Ok(Terms {
            session_key,
            data_port: 7168,
            layout,
            tx_queue: Some(queue),
            prefix: 0,
            frames_per_packet: 1,
            fillers: 0,
            repeats_apart: false,
            goes_ahead: true,
            landing_port: None,
            max_message_len: permit.max_message_len.min(1 << 28),
            window: application.request.window,
            packet_limit: 512,
            first_message: 7,
        })
    }

    fn open_aside(
        &mut self,
        queue: u16,
        application: &Application<'_>,
        permit: &Permit,
    ) -> Result<Terms, Refusal> {
        let open = self.open.remove(&queue);
        let terms = self.open(queue, application, permit)?;
        self.open.remove(&queue);
        self.open.extend(open.map(|open| (queue, open)));
        self.aside.push(terms.session_key);
        Ok(terms)
    }

    fn land(&mut self, session: &Session) -> bool {
        let key = session.grant.session_key;
        let at = self.aside.iter().position(|aside| *aside == key);
        self.aside.remove(at.expect("a session that is aside"));
        let taken = (self.open).insert(session.grant.landing_queue, (key, session.request.sender_id));
        assert!(taken.is_none(), "two sessions on a queue");
        true
    }

    fn unused(&self, session: &Session) -> Option<Unused> {
        self.unused.get(&session.grant.session_key).copied()
    }

    fn set_aside(&mut self, session: &Session) -> Aside {
        let key = session.grant.session_key;
        if self.fixed.contains(&key) || !self.unused.contains_key(&key) {
            return Aside::Never;
        }
        assert!(session.has_place());
        let (open, _) = (self.open.remove(&session.grant.landing_queue)).expect("an open queue");
        assert_eq!(open, key);
        self.aside.push(key);
        Aside::Done
    }

    fn close(&mut self, session: &Session, reason: CloseReason) -> u32 {
        if !session.has_place() {
            let key = session.grant.session_key;
            let at = self.aside.iter().position(|aside| *aside == key);
            self.aside.remove(at.expect("a session that is aside"));
            self.closed.push((key, reason));
            return 5;
        }
        let (key, sender_id) = self
            .open
            .remove(&session.grant.landing_queue)
            .expect("an open queue");
        assert_eq!(
            (key, sender_id),
            (session.grant.session_key, session.request.sender_id)
        );
        self.closed.push((key, reason));
        5
    }
}

/// A grantor with its queues and policy.
pub(crate) struct Receiver {
    pub(crate) grantor: Grantor,
    pub(crate) queues: Queues,
    pub(crate) permit: Permit,
}

impl Receiver {
    pub(crate) fn new(landing_queues: &[u16]) -> Receiver {
        Receiver {
            grantor: Grantor::new(landing_queues),
            queues: Queues::default(),
            permit: permit(),
        }
    }

    pub(crate) fn ask(
        &mut self,
        host: u8,
        request_id: u32,
        request: Request,
        now: Time,
    ) -> Option<ControlMessage> {
        let message = ControlMessage::Request(request);
        self.grantor.handle(
            peer(host),
            request_id,
            &message,
            now,
            &mut self.permit,
            &mut self.queues,
        )
    }

    pub(crate) fn end(&mut self, host: u8, session_key: u64, now: Time) -> Option<ControlMessage> {
        let message = ControlMessage::End(End {
            session_key,
            messages: 6,
        });
        self.grantor
            .handle(peer(host), 1, &message, now, &mut self.permit, &mut self.queues)
    }
}
