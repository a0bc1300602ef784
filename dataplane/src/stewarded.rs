//! Sessions by the admission daemon: what it grants to others on our landing queue, and what it asks of others for us. Where there is
//! no daemon none of this runs, and `granting.rs` and `control.rs` do it on the control port.

use std::net::SocketAddrV4;
use std::sync::MutexGuard;

use lm_protocol::admission::{Decision, Outcome, Ticket};
use lm_protocol::control::{Challenge, ControlMessage, Grant, Proof, Request, WORD_LEN};
use lm_protocol::geometry::Wire;
use lm_protocol::landing::SessionAdmission;
use lm_protocol::session::{Aside, Terms};
use lm_protocol::time::Time;

use crate::daemon::ipc::{
    Call, Control, Decision as Decided, Event, Offer, Outcome as Told, Progress, Reply,
};
use crate::daemon::{Client, Daemon, DaemonError, News};
use crate::engine::Engine;
use crate::error::ConnectError;
use crate::granting::Closing;
use crate::landing::Inbound;
use crate::notices::Fault;
use crate::port::{Port, WakeError};
use crate::terms::WINDOW_FRAGMENTS_MAX;

/// How often the daemon hears in which sessions something came.
const TOUCH_EVERY_NS: u64 = 1_000_000_000;
/// For so long a granted session waits until its sender's neighbour address is known.
const NEIGHBOUR_PATIENCE_NS: u64 = 1_000_000_000;

/// The daemon's socket is looked at this often without a sign that it has something.
const NEWS_EVERY_NS: u64 = 5_000_000;

/// How often a session that has a place and cannot land tries to.
const LAND_AGAIN_NS: u64 = 50_000_000;

/// Our side of what the daemon does for us.
#[derive(Debug)]
pub(crate) struct Stewarded {
    daemon: Option<Daemon>,
    pub(crate) looked_ns: u64,
    touched_ns: u64,
    /// A bit for each place whose session said something since the daemon heard of it.
    pub(crate) touched: u64,
    /// A granted session whose sender's neighbour address is being looked up, and since when.
    waiting: Option<(Opened, u64)>,
    /// Keys of sessions that have a place and are aside: there was no memory in which they could land, or another session was in the way.
    to_land: Vec<u64>,
    /// When that was tried last.
    tried_ns: u64,
}

impl Stewarded {
    pub(crate) fn new(daemon: Option<Daemon>) -> Stewarded {
        Stewarded {
            daemon,
            looked_ns: 0,
            touched_ns: 0,
            touched: 0,
            waiting: None,
            to_land: Vec::new(),
            tried_ns: 0,
        }
    }

    /// Whether a session is to land and is aside; it is forgotten.
    fn take_to_land(&mut self, session_key: u64) -> bool {
        let before = self.to_land.len();
        self.to_land.retain(|&key| key != session_key);
        self.to_land.len() < before
    }

    /// Whether the daemon grants, and holds the gate.
    #[inline]
    pub(crate) fn has_daemon(&self) -> bool {
        self.daemon.is_some()
    }

    /// The daemon, where there is one.
    pub(crate) fn client(&self) -> Option<MutexGuard<'_, Client>> {
        self.daemon.as_ref().map(Daemon::client)
    }

    /// Whether there is a daemon that is away.
    pub(crate) fn is_away(&self) -> bool {
        self.client().is_some_and(|client| !client.is_here())
    }

    /// Whether the daemon may have said something. No system call.
    #[inline]
    pub(crate) fn has_news(&self, now_ns: u64) -> bool {
        let Some(daemon) = &self.daemon else { return false };
        self.is_waiting()
            || now_ns.saturating_sub(self.looked_ns) >= NEWS_EVERY_NS
            || daemon.client().has_news()
    }

    /// A session waits for its sender's neighbour address.
    #[inline]
    pub(crate) fn is_waiting(&self) -> bool {
        self.waiting.is_some()
    }
}

/// What [`Event::Opened`] says.
#[derive(Clone, Copy, Debug)]
struct Opened {
    from: SocketAddrV4,
    row: u16,
    request: Request,
    grant: Grant,
}

impl<P: Port> Engine<P> {
    /// Takes the daemon's news. Gives their number.
    pub(crate) fn look_at_daemon(&mut self, now_ns: u64) -> usize {
        let mut count = 0;
        if let Some((opened, since_ns)) = self.stewarded.waiting.take() {
            self.opened(&opened, since_ns, now_ns);
        }
        // Nothing overtakes a session that waits.
        while self.stewarded.waiting.is_none() {
            let Some(mut client) = self.stewarded.client() else {
                return 0;
            };
            let Some(news) = client.look(count == 0) else {
                break;
            };
            drop(client);
            count += 1;
            match news {
                News::Event(Event::Opened {
                    from,
                    row,
                    request,
                    grant,
                }) => match (request.parse(), grant.parse()) {
                    (Ok((_, ControlMessage::Request(request))), Ok((_, ControlMessage::Grant(grant)))) => {
                        let opened = Opened {
                            from,
                            row,
                            request,
                            grant,
                        };
                        if grant.lands {
                            self.gate_opened(u32::from(row), grant.session_key);
                        }
                        self.opened(&opened, now_ns, now_ns);
                    }
                    _ => tracing::warn!(%from, "the admission daemon granted what is no session"),
                },
                News::Event(Event::Landed { session_key }) => {
                    let row = SessionAdmission::row_of(session_key);
                    self.gate_opened(row, session_key);
                    if !self.drain(session_key) {
                        self.stewarded.to_land.push(session_key);
                    }
                }
                News::Event(Event::Closed {
                    session_key,
                    was_idle,
                    ..
                }) => {
                    self.gate_closed(session_key);
                    let was_to_land = self.stewarded.take_to_land(session_key);
                    let had_place = was_to_land || self.is_aside(session_key) != Some(true);
                    let closing = match was_idle {
                        true => Closing::Unheard,
                        false => Closing::Theirs,
                    };
                    self.close_landing(session_key, closing);
                    if had_place {
                        self.tell_daemon(Call::Released { session_key });
                    }
                }
                News::Event(Event::SetAside { session_key }) => self.set_aside_by_daemon(session_key, now_ns),
                News::Event(Event::Told { ticket, outcome }) => self.told_by_daemon(ticket, outcome, now_ns),
                News::Disowned(what) => {
                    tracing::error!(
                        "the admission daemon gives nothing back ({what}): start this program again"
                    );
                    self.link.failed(WakeError::Gone);
                }
            }
        }
        self.stewarded.looked_ns = now_ns;
        count
    }

    /// A packet of a session that we do not know came: the daemon may have granted it.
    #[cold]
    pub(crate) fn ask_for_session(&mut self, now_ns: u64) {
        if self.stewarded.has_daemon() && !self.stewarded.is_waiting() {
            self.look_at_daemon(now_ns);
        }
    }

    /// Nothing lands on `queue` any more: the daemon is to refuse who asks.
    pub(crate) fn withdraw_offer(&mut self, queue: u32) {
        self.tell_daemon(Call::CloseChannel { queue: queue as u16 });
    }

    /// Something lands again.
    pub(crate) fn offer_again(&mut self) {
        let Some(queue) = self.landing.as_ref().map(|landing| landing.queue) else {
            return;
        };
        self.tell_daemon(Call::Receive(Offer {
            queue: queue as u16,
            mtu: self.fixed.mtu,
            chunk_len: self.fixed.chunk_len,
            max_message_len: self.config.max_message_len,
            window_max: WINDOW_FRAGMENTS_MAX,
            allow: self.config.allow.clone(),
        }));
    }

    fn gate_opened(&mut self, row: u32, key: u64) {
        if let Some(mut client) = self.stewarded.client() {
            client.opened(row, key);
        }
    }

    fn gate_closed(&mut self, key: u64) {
        if let Some(mut client) = self.stewarded.client() {
            client.closed(key);
        }
    }

    fn tell_daemon(&mut self, call: Call) {
        if let Some(mut client) = self.stewarded.client() {
            client.tell(call);
        }
    }

    /// The daemon granted a session on our landing queue.
    fn opened(&mut self, opened: &Opened, since_ns: u64, now_ns: u64) {
        let from = opened.from;
        let Some(mac) = self.port.side().neighbour(*from.ip()) else {
            if now_ns.saturating_sub(since_ns) < NEIGHBOUR_PATIENCE_NS {
                self.stewarded.waiting = Some((*opened, since_ns));
            } else {
                tracing::warn!(%from, "no session: its neighbour address cannot be found");
                self.abort_at_daemon(opened.grant.session_key, 0);
            }
            return;
        };
        if let Err(reason) = self.land(opened, mac, now_ns) {
            tracing::warn!(%from, "no session: {reason}");
            self.abort_at_daemon(opened.grant.session_key, 0);
        }
    }

    fn land(&mut self, opened: &Opened, mac: [u8; 6], now_ns: u64) -> Result<(), &'static str> {
        let &Opened {
            from,
            row,
            request,
            grant,
        } = opened;
        let landing = self.landing.as_ref().ok_or("nothing lands here")?;
        let queue = landing.queue;
        let key = grant.session_key;
        let is_ours = u32::from(grant.landing_queue) == queue
            && u32::from(row) == SessionAdmission::row_of(key)
            && landing.sessions.at(row as u8).is_none();
        let offered = self.landing_terms(self.config.max_message_len);
        let fit = offered.fit(&request).ok();
        let fit = fit.filter(|fit| {
            is_ours
                && fit.layout == grant.layout
                && grant.max_message_len <= request.max_message_len
                && grant.window.fragments() <= offered.window_fragments.1
        });
        let fit = fit.ok_or("the daemon granted what was not offered")?;
        let terms = Terms {
            session_key: key,
            data_port: grant.data_port,
            layout: grant.layout,
            tx_queue: grant.tx_queue,
            prefix: grant.prefix,
            frames_per_packet: grant.frames_per_packet,
            repeats_apart: grant.repeats_apart,
            landing_port: grant.landing_port,
            max_message_len: grant.max_message_len,
            window: grant.window,
            packet_limit: grant.packet_limit,
            first_message: grant.first_message,
        };
        let admission = offered.admission(&terms, from);
        let attempts = |engine: &Engine<P>| {
            let failed_ns = engine.landing.as_ref().and_then(|landing| landing.failed_ns[0]);
            (engine.counters.landing_grown, failed_ns)
        };
        let before = attempts(self);
        let (zone_len, in_flight) = (fit.zone_len, request.messages_in_flight);
        let has_memory = grant.lands && (self.provide_memory(*from.ip(), zone_len, in_flight, false)).is_ok();
        if !has_memory {
            // It is granted, so that nobody can be asked to wait: its messages come by the one-copy path until there is.
            let memory = self.provide_memory(*from.ip(), zone_len, in_flight, true);
            if memory.is_err() || terms.layout.wire() != Wire::Lm {
                return Err("not enough landing memory");
            }
        }
        if has_memory && attempts(self) != before && self.port.admit(queue, &admission).is_err() {
            // The gate was closed while the channel was built anew.
            return Err("the gate cannot be opened again");
        }
        let addressing = self.addressing_to(from, mac);
        let index = (self.peers.find_or_add(from, &addressing, now_ns)).ok_or("too many peers at once")?;
        self.peers.at(index).addressing = addressing;
        // Its daemon's word.
        self.introduce(index, request.sender_id, now_ns);
        if has_memory {
            return (self.install_session(index, &request, &terms, fit.integrity, admission, now_ns))
                .map_err(|_| "the landing channel is not to be trusted");
        }
        if grant.lands {
            (self.port.revoke(queue, u32::from(row))).map_err(|_| "the gate cannot be closed")?;
            self.stewarded.to_land.push(key);
        }
        self.install_aside(index, &request, &terms, fit.integrity, admission)
    }

    /// Whether a session is aside; `None`: there is none.
    fn is_aside(&self, session_key: u64) -> Option<bool> {
        let inbound = self.landing.as_ref()?.sessions.with_key(session_key)?;
        Some(!inbound.has_place())
    }

    /// The daemon has closed the gate to a session, whose place others wait for: it goes on without. One that cannot ends.
    fn set_aside_by_daemon(&mut self, session_key: u64, now_ns: u64) {
        self.gate_closed(session_key);
        self.stewarded.take_to_land(session_key);
        while self.receive_landing(now_ns) > 0 {}
        match self.is_aside(session_key) {
            // What it was in was given up, and the daemon knows.
            None => {}
            Some(false) if self.go_aside(session_key) != Aside::Done => {
                self.abort_session(session_key, Fault::Stalled);
            }
            // By a daemon that was restarted, again.
            Some(_) => {}
        }
    }

    /// Has the daemon end a session that lands here, and waits until the gate is closed.
    pub(crate) fn abort_at_daemon(&mut self, session_key: u64, delivered: u32) {
        self.gate_closed(session_key);
        let Some(mut client) = self.stewarded.client() else {
            return;
        };
        client.gave_up(session_key);
        let call = Call::Abort {
            session_key,
            delivered,
        };
        if client.done(call.clone(), &[]).is_err() {
            // It is away; the next one hears of it.
            client.tell(call);
        }
    }

    /// Has sessions land that have a place and could not until now.
    pub(crate) fn land_late(&mut self, now_ns: u64) {
        let is_due = now_ns.saturating_sub(self.stewarded.tried_ns) >= LAND_AGAIN_NS;
        if self.stewarded.to_land.is_empty() || !is_due {
            return;
        }
        self.stewarded.tried_ns = now_ns;
        for session_key in std::mem::take(&mut self.stewarded.to_land) {
            if self.is_aside(session_key) == Some(true) && !self.drain(session_key) {
                self.stewarded.to_land.push(session_key);
            }
        }
    }

    /// Tells the daemon once a second how far its sessions are.
    pub(crate) fn touch_sessions(&mut self, now_ns: u64) {
        let is_due = now_ns.saturating_sub(self.stewarded.touched_ns) >= TOUCH_EVERY_NS;
        if !is_due || !self.stewarded.has_daemon() {
            return;
        }
        self.stewarded.touched_ns = now_ns;
        let touched = std::mem::take(&mut self.stewarded.touched);
        let Some(landing) = &self.landing else { return };
        let progress = |inbound: &Inbound| Progress {
            session_key: inbound.terms.key,
            delivered: (inbound.settled.delivered()).wrapping_sub(inbound.terms.first_message),
            is_heard: touched & 1 << inbound.row() != 0,
            unused: (inbound.unused(now_ns)).map(|unused| {
                let unused_ms = Time::from_nanos(now_ns).since(unused.since).as_millis();
                (unused_ms.min(u32::MAX.into()) as u32, unused.is_idle)
            }),
        };
        let sessions: Vec<Progress> = landing.sessions.iter().map(progress).collect();
        if !sessions.is_empty() {
            self.tell_daemon(Call::Touched { sessions });
        }
    }

    /// The endpoint goes: the daemon tells the senders how much was delivered.
    pub(crate) fn shut_down_at_daemon(&mut self) {
        let Some(landing) = &self.landing else { return };
        let sessions: Vec<_> = (landing.sessions.iter())
            .map(|inbound| (inbound.terms.peer, inbound.ended()))
            .collect();
        for (peer, ended) in sessions {
            self.tell_daemon(Call::Abort {
                session_key: ended.session_key,
                delivered: ended.delivered,
            });
            // Nobody is left to be asked of how many messages it has heard.
            self.tell_sender_ended(peer, ended);
        }
    }

    /// The word of whoever has the cluster's key for us, to a peer that hears nobody without; none where that is neither we nor a daemon.
    pub(crate) fn word_to(&mut self, to: SocketAddrV4, challenge: &Challenge) -> [u8; WORD_LEN] {
        if let Some(key) = &self.config.key {
            let from = self.fixed.local;
            return key.word(from, to, challenge.sender_id, challenge.cookie);
        }
        let call = Call::Vouch {
            to,
            sender_id: challenge.sender_id,
            cookie: challenge.cookie,
        };
        let answer = (self.stewarded.client()).map(|mut client| client.call(call, &[]));
        match answer {
            Some(Ok((Reply::Word(word), _))) => word,
            _ => {
                tracing::warn!(%to, "it hears only whom its cluster's daemons speak for: start lm-admissiond here, with the cluster's key");
                [0; WORD_LEN]
            }
        }
    }

    /// Whether a peer's word is one of the cluster; with neither key nor daemon there need be none.
    pub(crate) fn has_word(&mut self, from: SocketAddrV4, proof: &Proof) -> bool {
        if let Some(key) = &self.config.key {
            let to = self.fixed.local;
            return key.is_word(from, to, (proof.sender_id, proof.cookie), &proof.word);
        }
        let Some(mut client) = self.stewarded.client() else {
            return true;
        };
        let call = Call::Confirm {
            from,
            sender_id: proof.sender_id,
            cookie: proof.cookie,
            word: proof.word,
        };
        matches!(client.call(call, &[]), Ok((Reply::Done, _)))
    }

    /// Has the daemon ask for a session with the receiver at `to`, for so long.
    pub(crate) fn ask_daemon(
        &mut self,
        to: SocketAddrV4,
        request: &Request,
        number: u32,
        patience_ms: u64,
    ) -> Result<Decision, ConnectError> {
        let Some(mut client) = self.stewarded.client() else {
            return Err(DaemonError::Gone.into());
        };
        let call = Call::Request {
            to,
            request: Control::new(number, &ControlMessage::Request(*request)),
            patience_ms: patience_ms.min(u32::MAX.into()) as u32,
        };
        match client.call(call, &[])? {
            (Reply::Requested(Decided::Requested(ticket)), _) => {
                client.asked(ticket);
                Ok(Decision::Requested(Ticket(ticket)))
            }
            (Reply::Requested(Decided::OneCopy(ticket)), _) => {
                client.asked(ticket);
                Ok(Decision::OneCopy(Ticket(ticket)))
            }
            (Reply::Requested(Decided::Cancel), _) => Ok(Decision::Cancel),
            _ => Err(DaemonError::Nonsense("no decision").into()),
        }
    }

    fn told_by_daemon(&mut self, ticket: u32, outcome: Told, now_ns: u64) {
        let parsed = match outcome {
            Told::Granted(control) => match control.parse() {
                Ok((_, ControlMessage::Grant(grant))) => Ok(Outcome::Granted(grant)),
                _ => Err(DaemonError::Nonsense("a grant that is none")),
            },
            Told::Rejected(control) => match control.parse() {
                Ok((_, ControlMessage::Reject(reject))) => Ok(Outcome::Rejected(reject)),
                _ => Err(DaemonError::Nonsense("a rejection that is none")),
            },
            Told::Unreachable => Ok(Outcome::Unreachable),
            Told::Incompatible => Ok(Outcome::Incompatible),
            Told::Lost => Ok(Outcome::Lost),
            Told::Ended { delivered } => Ok(Outcome::Ended { delivered }),
            Told::Unconfirmed => Ok(Outcome::Unconfirmed),
        };
        match parsed {
            Ok(outcome) => self.told(ticket, outcome, now_ns),
            Err(error) => self.fail_request(ticket, error),
        }
    }

    /// A session of ours is over, or a request is not wanted any more: the daemon tells its receiver.
    pub(crate) fn end_at_daemon(&mut self, ticket: u32, messages: u32) {
        self.tell_daemon(Call::End { ticket, messages });
    }
}
