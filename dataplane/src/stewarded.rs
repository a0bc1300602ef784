//! What the admission daemon does for an endpoint, and is told by it. What it grants to others on our landing queue is carried out by
//! `daemon_sessions.rs`. Where there is no daemon a node of our own does the same ([`crate::own_node`]).

use std::net::SocketAddrV4;
use std::path::PathBuf;
use std::sync::MutexGuard;

use lm_protocol::admission::{Decision, Outcome, Ticket};
use lm_protocol::control::{Challenge, ControlMessage, Grant, Proof, Request, WORD_LEN};
use lm_protocol::landing::SessionAdmission;

use crate::connect::ConnectError;
use crate::daemon::ipc::{
    Call, Control, Decision as Decided, Event, Offer, Outcome as Told, Progress, Reply,
};
use crate::daemon::{Client, Daemon, DaemonError, News};

/// How often the daemon hears in which sessions something came.
const TOUCH_EVERY_NS: u64 = 1_000_000_000;
/// The daemon's socket is looked at this often without a sign that it has something.
const NEWS_EVERY_NS: u64 = 5_000_000;

/// How often a session that has a place and cannot land tries to.
const LAND_AGAIN_NS: u64 = 50_000_000;

/// Our side of what the daemon does for us.
#[derive(Debug)]
pub(crate) struct Stewarded {
    daemon: Option<Daemon>,
    looked_ns: u64,
    touched_ns: u64,
    /// A bit for each place whose session said something since the daemon heard of it.
    touched: u64,
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

    /// Whether the daemon grants, and holds the gate.
    #[inline]
    pub(crate) fn has_daemon(&self) -> bool {
        self.daemon.is_some()
    }

    /// The daemon, where there is one.
    fn client(&self) -> Option<MutexGuard<'_, Client>> {
        self.daemon.as_ref().map(Daemon::client)
    }

    /// Where the daemon listens.
    pub(crate) fn daemon_path(&self) -> Option<PathBuf> {
        Some(self.client()?.path().to_owned())
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

    /// What the daemon has to say next. Nothing overtakes a session that waits. `first` in a round: its socket is looked at.
    pub(crate) fn next_news(&mut self, first: bool) -> Option<Ordered> {
        let mut first = first;
        while self.waiting.is_none() {
            let news = self.client()?.look(first)?;
            first = false;
            match news {
                News::Event(Event::Opened {
                    from,
                    row,
                    request,
                    grant,
                }) => match (request.parse(), grant.parse()) {
                    (Ok((_, ControlMessage::Request(request))), Ok((_, ControlMessage::Grant(grant)))) => {
                        if grant.lands {
                            self.gate_opened(u32::from(row), grant.session_key);
                        }
                        return Some(Ordered::Open(Opened {
                            from,
                            row,
                            request,
                            grant,
                        }));
                    }
                    _ => tracing::warn!(%from, "the admission daemon granted what is no session"),
                },
                News::Event(Event::Landed { session_key }) => {
                    self.gate_opened(SessionAdmission::row_of(session_key), session_key);
                    return Some(Ordered::Land { session_key });
                }
                News::Event(Event::Closed {
                    session_key,
                    was_idle,
                    ..
                }) => {
                    self.gate_closed(session_key);
                    return Some(Ordered::Close {
                        session_key,
                        was_idle,
                        was_to_land: self.forget_to_land(session_key),
                    });
                }
                News::Event(Event::SetAside { session_key }) => {
                    self.gate_closed(session_key);
                    self.forget_to_land(session_key);
                    return Some(Ordered::SetAside { session_key });
                }
                News::Event(Event::Told { ticket, outcome }) => {
                    let outcome = parsed(outcome);
                    return Some(Ordered::Told { ticket, outcome });
                }
                News::Disowned(what) => {
                    tracing::error!(
                        "the admission daemon gives nothing back ({what}): start this program again"
                    );
                    return Some(Ordered::Disown);
                }
            }
        }
        None
    }

    /// All that it has to say is taken.
    pub(crate) fn looked(&mut self, now_ns: u64) {
        self.looked_ns = now_ns;
    }

    /// The session that waits for its sender's neighbour address, and since when.
    pub(crate) fn take_waiting(&mut self) -> Option<(Opened, u64)> {
        self.waiting.take()
    }

    /// A session waits for its sender's neighbour address, and all that the daemon says after it.
    pub(crate) fn wait_for_neighbour(&mut self, opened: Opened, since_ns: u64) {
        self.waiting = Some((opened, since_ns));
    }

    /// A session has a place, and cannot land now.
    pub(crate) fn land_later(&mut self, session_key: u64) {
        self.forget_to_land(session_key);
        self.to_land.push(session_key);
    }

    /// Sessions that have a place and could not land until now, where it is time to try again.
    pub(crate) fn take_to_land(&mut self, now_ns: u64) -> Vec<u64> {
        let is_due = now_ns.saturating_sub(self.tried_ns) >= LAND_AGAIN_NS;
        if self.to_land.is_empty() || !is_due {
            return Vec::new();
        }
        self.tried_ns = now_ns;
        std::mem::take(&mut self.to_land)
    }

    /// Whether a session was to land; it is not any more.
    fn forget_to_land(&mut self, session_key: u64) -> bool {
        let before = self.to_land.len();
        self.to_land.retain(|&key| key != session_key);
        self.to_land.len() < before
    }

    fn gate_opened(&self, row: u32, key: u64) {
        if let Some(mut client) = self.client() {
            client.opened(row, key);
        }
    }

    fn gate_closed(&self, key: u64) {
        if let Some(mut client) = self.client() {
            client.closed(key);
        }
    }

    fn tell(&self, call: Call) {
        if let Some(mut client) = self.client() {
            client.tell(call);
        }
    }

    /// What lands on a queue of ours is offered to it.
    pub(crate) fn offer(&self, offer: Offer) {
        self.tell(Call::Receive(offer));
    }

    /// Nothing lands on `queue` any more: it is to refuse who asks.
    pub(crate) fn withdraw_offer(&self, queue: u32) {
        self.tell(Call::CloseChannel { queue: queue as u16 });
    }

    /// A session of its has left its place.
    pub(crate) fn released(&self, session_key: u64) {
        self.tell(Call::Released { session_key });
    }

    /// The session in a row said something.
    pub(crate) fn touched(&mut self, row: u8) {
        self.touched |= 1 << row;
    }

    /// The rows whose sessions said something, once a second.
    pub(crate) fn take_touched(&mut self, now_ns: u64) -> Option<u64> {
        let is_due = now_ns.saturating_sub(self.touched_ns) >= TOUCH_EVERY_NS;
        if !is_due || !self.has_daemon() {
            return None;
        }
        self.touched_ns = now_ns;
        Some(std::mem::take(&mut self.touched))
    }

    /// How far its sessions are.
    pub(crate) fn progress(&self, sessions: Vec<Progress>) {
        if !sessions.is_empty() {
            self.tell(Call::Touched { sessions });
        }
    }

    /// Has it end a session that lands here, and waits until the gate is closed.
    pub(crate) fn abort(&self, session_key: u64, delivered: u32) {
        self.gate_closed(session_key);
        let Some(mut client) = self.client() else { return };
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

    /// The endpoint goes: it is to end a session that lands here.
    pub(crate) fn abort_unwaited(&self, session_key: u64, delivered: u32) {
        self.tell(Call::Abort {
            session_key,
            delivered,
        });
    }

    /// Has the daemon ask for a session with the receiver at `to`, for so long.
    pub(crate) fn ask(
        &self,
        to: SocketAddrV4,
        request: &Request,
        number: u32,
        patience_ms: u64,
    ) -> Result<Decision, ConnectError> {
        let Some(mut client) = self.client() else {
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

    /// A session of ours is over, or a request is not wanted any more: it tells the receiver.
    pub(crate) fn end(&self, ticket: u32, messages: u32) {
        self.tell(Call::End { ticket, messages });
    }

    /// Its word for us to a peer; `None`: it gives none, or there is no daemon.
    pub(crate) fn word(&self, to: SocketAddrV4, challenge: &Challenge) -> Option<[u8; WORD_LEN]> {
        let call = Call::Vouch {
            to,
            sender_id: challenge.sender_id,
            cookie: challenge.cookie,
        };
        match self.client()?.call(call, &[]) {
            Ok((Reply::Word(word), _)) => Some(word),
            _ => None,
        }
    }

    /// Whether a peer's word is one of its cluster; `None`: there is no daemon.
    pub(crate) fn is_word(&self, from: SocketAddrV4, proof: &Proof) -> Option<bool> {
        let call = Call::Confirm {
            from,
            sender_id: proof.sender_id,
            cookie: proof.cookie,
            word: proof.word,
        };
        Some(matches!(self.client()?.call(call, &[]), Ok((Reply::Done, _))))
    }

    /// All that it was told is on its way.
    pub(crate) fn finish(&self) {
        if let Some(mut client) = self.client() {
            client.finish();
        }
    }
}

/// What the daemon wants to be done.
pub(crate) enum Ordered {
    /// It granted a session on our landing queue.
    Open(Opened),
    /// A session without a place has one.
    Land { session_key: u64 },
    /// A session is over. `was_to_land`: it had a place that it did not use.
    Close {
        session_key: u64,
        was_idle: bool,
        was_to_land: bool,
    },
    /// The gate is closed to a session, whose place others wait for.
    SetAside { session_key: u64 },
    /// What became of a request or a session of ours, if that makes sense.
    Told {
        ticket: u32,
        outcome: Result<Outcome, DaemonError>,
    },
    /// It does not know this endpoint any more.
    Disown,
}

/// What [`Event::Opened`] says.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Opened {
    pub(crate) from: SocketAddrV4,
    pub(crate) row: u16,
    pub(crate) request: Request,
    pub(crate) grant: Grant,
}

fn parsed(told: Told) -> Result<Outcome, DaemonError> {
    match told {
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
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A session that is to land stands once in the list of those, however often that is said.
    #[test]
    fn sessions_that_are_to_land_stand_once() {
        let mut stewarded = Stewarded::new(None);
        for say in 0..1000 {
            stewarded.land_later(say % 64);
        }
        assert_eq!(stewarded.to_land.len(), 64);
        assert_eq!(stewarded.take_to_land(LAND_AGAIN_NS).len(), 64);
        assert!(stewarded.to_land.is_empty());
    }
}
