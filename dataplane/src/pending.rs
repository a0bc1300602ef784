//! A session by the one-copy path while the request for one that lands is pending, so that the application's data is not delayed by it
//! (LM §3.3, where a request takes some 30 ms).
//!
//! ```text
//!  request ──── no place, or 25 ms ──────▶ beside it, a request for a session by the one-copy path
//!                                          granted: the peer's `outbound`; the first request is made on
//!  grant ────────────────────────────────▶ the session that lands is the peer's `successor`; no message is taken (back-pressure)
//!  outbound has nothing under way ───────▶ it ends, and the successor is the `outbound`
//! ```
//! Nothing lands before all that went by the one-copy path is settled, so that order is kept and the receiver sees two
//! sessions which have nothing to do with each other. Regions are cut alike for both, or the grant goes back.

use std::net::SocketAddrV4;
use std::time::Duration;

use lm_protocol::control::{Grant, RejectReason};
use lm_protocol::geometry::Wire;
use lm_protocol::wire::lm::LmHeader;

use crate::completion::Outcome;
use crate::config::{ConnectOptions, Start};
use crate::control::Applying;
use crate::engine::Engine;
use crate::error::ConnectError;
use crate::notices::Fault;
use crate::outbound::Outbound;
use crate::port::Port;
use crate::timers::KEEPALIVE_NS;

/// A request that has no grant after so long, or an answer that says so, is one that waits. A receiver with a free place grants sooner,
/// even where its sender has to ask again: after 10 ms, since its first answers show what its device writes, or after 20 ms, since it
/// looked for the sender's neighbour address. Who would begin before would have two sessions instead of one.
const START_AFTER: Duration = Duration::from_millis(25);

/// A session that lands, granted while messages go by the one-copy path.
#[derive(Debug)]
pub(crate) struct Successor {
    pub(crate) outbound: Outbound,
    options: ConnectOptions,
}

impl Applying {
    /// Whether a session by the one-copy path is to be had meanwhile.
    fn is_slow(&self, busy: Option<Duration>, now_ns: u64) -> bool {
        let wanted = self.options.start == Start::WhilePending
            && self.options.wire == Wire::Lm
            && !self.options.one_copy
            && !self.started;
        wanted && self.waits(busy, START_AFTER, now_ns)
    }
}

impl<P: Port> Engine<P> {
    /// Asks for sessions by the one-copy path beside requests that wait.
    pub(crate) fn start_by_one_copy(&mut self, now_ns: u64) {
        for position in 0..self.applying.len() {
            let applying = &self.applying[position];
            let index = applying.peer;
            let nodes = self.nodes.as_ref().zip(applying.ticket);
            let busy = nodes.and_then(|(nodes, ticket)| nodes.busy(applying.socket, ticket));
            if !applying.is_slow(busy, now_ns) || self.peers.at(index).outbound.is_some() {
                continue;
            }
            self.applying[position].started = true;
            let options = ConnectOptions {
                one_copy: true,
                ..self.applying[position].options
            };
            tracing::info!(to = %self.peers.at(index).data, "it does not land yet: begins by the one-copy path");
            self.apply(index, &options, now_ns);
        }
    }

    /// Takes answers to requests whose senders have begun.
    pub(crate) fn look_at_pending(&mut self, now_ns: u64) {
        let mut position = 0;
        while position < self.applying.len() {
            let applying = &self.applying[position];
            let index = applying.peer;
            let to = self.peers.at(index).data;
            let has_begun = !applying.options.one_copy && self.peers.at(index).outbound.is_some();
            match has_begun.then(|| self.request_outcome(position)).flatten() {
                None => position += 1,
                Some(Ok(grant)) => {
                    let options = self.no_longer_applying(position, now_ns);
                    self.succeed(index, &grant, options, now_ns);
                }
                Some(Err(error)) if is_passing(&error) => {
                    // It has run out of patience, and its sender has not.
                    self.applying[position].renew(now_ns);
                    position += 1;
                }
                Some(Err(error)) => {
                    tracing::info!(%to, "messages go on by the one-copy path: {error}");
                    self.no_longer_applying(position, now_ns);
                }
            }
        }
    }

    /// A session that lands is granted to a sender that has begun by the one-copy path.
    fn succeed(&mut self, index: u16, grant: &Grant, options: ConnectOptions, now_ns: u64) {
        let to = self.peers.at(index).data;
        let outbound = match self.granted(index, grant, &options, now_ns) {
            Ok(outbound) => outbound,
            Err(error) => {
                tracing::info!(%to, "messages go on by the one-copy path: {error}");
                return;
            }
        };
        let peer = self.peers.at(index);
        let next = outbound.terms;
        // What was loaned is to be sendable, whichever session takes it.
        let fits = (peer.outbound.as_ref()).is_some_and(|now| {
            now.terms.layout == next.layout && now.terms.max_message_len <= next.max_message_len
        });
        if !fits {
            tracing::info!(%to, "messages go on by the one-copy path: what was granted has packets of another length");
            self.end_held(grant.session_key, 0, now_ns);
            return;
        }
        peer.successor = Some(Box::new(Successor { outbound, options }));
        self.change_over(index, now_ns);
    }

    /// Has the successor take over as soon as the session before it has nothing under way.
    pub(crate) fn change_over(&mut self, index: u16, now_ns: u64) {
        let peer = self.peers.at(index);
        if (peer.outbound.as_ref()).is_some_and(|outbound| outbound.unsettled() == 0) {
            self.drop_outbound(index, &Outcome::SessionEnded, now_ns);
        }
    }

    /// The session `before` is over. `false`: it has no successor.
    pub(crate) fn take_over(&mut self, index: u16, before: Outbound) -> bool {
        let peer = self.peers.at(index);
        let Some(successor) = peer.successor.take() else {
            return false;
        };
        let mut outbound = successor.outbound;
        // What the one let go counts for the other.
        outbound.rate_limit = before.rate_limit;
        peer.outbound = Some(outbound);
        self.counters.sessions_changed_over += 1;
        tracing::info!(to = %peer.data, "messages land from here on");
        true
    }

    /// The receiver ended the session that messages to a peer go by, mostly because others waited for its place. `heard`: of how many messages
    /// it had heard; where that matters and is not known, its program is asked. All others are handed over again to the session that follows: a
    /// successor, or one that is asked for again. Messages go by the one-copy path until that is granted.
    pub(crate) fn lose_session(&mut self, index: u16, heard: Option<u32>, now_ns: u64) {
        self.settle_outbound(index, None, now_ns);
        let peer = self.peers.at(index);
        let Some(outbound) = &mut peer.outbound else {
            return;
        };
        match heard {
            Some(heard) => peer.unheard = outbound.take_unheard(heard),
            None if outbound.unsettled() > 0 => return outbound.is_over(now_ns),
            None => {}
        }
        // With a message that is lost the session is, unless others need it.
        let goes_on = outbound.unsettled() == 0 || !peer.unheard.is_empty();
        let options = peer.options.filter(|_| goes_on);
        self.drop_outbound(index, &Outcome::SessionEnded, now_ns);
        let Some(options) = options.filter(|_| self.peers.at(index).outbound.is_none()) else {
            return self.hand_over_again(index, now_ns);
        };
        self.counters.sessions_lost += 1;
        self.peers.at(index).reopening = true;
        self.apply(index, &options, now_ns);
    }

    /// Takes the outcome of sessions that are asked for again.
    pub(crate) fn look_at_reopening(&mut self, now_ns: u64) {
        let reopening = |applying: &Applying| applying.peer;
        let mut asked: Vec<u16> = self.applying.iter().map(reopening).collect();
        asked.retain(|&index| self.peers.at(index).reopening);
        for index in asked {
            if let Some(outcome) = self.application_outcome(index, now_ns) {
                self.peers.at(index).reopening = false;
                if let Err(error) = outcome {
                    tracing::warn!(to = %self.peers.at(index).data, "no session any more: {error}");
                    self.hand_over_again(index, now_ns);
                }
            }
        }
    }

    /// What the receiver of the session before had not heard of is the present one's. Where there is none, the messages end with it.
    pub(crate) fn hand_over_again(&mut self, index: u16, now_ns: u64) {
        let id = self.peers.id_of(index);
        while let Some(slot) = self.peers.at(index).unheard.pop_front() {
            let peer = self.peers.at(index);
            if let Some(outbound) = &mut peer.outbound
                && outbound.take_again(&mut self.outgoing, &peer.addressing, slot)
            {
                self.counters.messages_again += 1;
                self.counters.messages_one_copy += u64::from(outbound.terms.one_copy);
                continue;
            }
            let settled = (self.outgoing).settle(slot, id, Outcome::SessionEnded, now_ns);
            self.settled(settled);
        }
    }

    /// A successor is not wanted any more.
    pub(crate) fn end_successor(&mut self, index: u16, now_ns: u64) {
        if let Some(successor) = self.peers.at(index).successor.take() {
            self.end_held(successor.outbound.terms.key, 0, now_ns);
        }
    }

    /// The receiver has ended the session with this key: if it is the successor's, another one is asked for.
    pub(crate) fn lost_successor(&mut self, index: u16, key: u64, now_ns: u64) -> bool {
        let lost = (self.peers.at(index).successor).take_if(|next| next.outbound.terms.key == key);
        let Some(lost) = lost else { return false };
        self.notices.remember(key);
        self.apply(index, &lost.options, now_ns);
        true
    }

    /// Says that a successor lives, which has no messages to announce.
    pub(crate) fn keep_successor(&mut self, index: u16, now_ns: u64) {
        let Some(next) = &self.peers.at(index).successor else {
            return;
        };
        let (key, first) = (next.outbound.terms.key, next.outbound.terms.first_message);
        if now_ns.saturating_sub(next.outbound.last_announce_ns) <= KEEPALIVE_NS {
            return;
        }
        let header = LmHeader::Announce {
            session_key: key,
            first,
            entries: 0,
            sent: 0,
        };
        if self.send_packet(index, &header, &[])
            && let Some(next) = &mut self.peers.at(index).successor
        {
            next.outbound.last_announce_ns = now_ns;
        }
    }

    /// Credit of a session whose messages do not go yet, or of none.
    #[cold]
    pub(crate) fn take_credit_ahead(
        &mut self,
        index: u16,
        from: SocketAddrV4,
        key: u64,
        (limit, delivered, announced): (u32, u32, u32),
        now_ns: u64,
    ) {
        let peer = self.peers.at(index);
        let next = peer.successor.as_mut().map(|next| &mut next.outbound);
        let Some(next) = next.filter(|next| next.terms.key == key) else {
            self.reject_for(key, Fault::Key, from);
            return;
        };
        peer.heard_ns = now_ns;
        match next.credit(limit, delivered, announced, now_ns) {
            Ok(()) => self.counters.packets_used += 1,
            Err(_) => self.reject(Fault::Credit, from),
        }
    }

    /// A request for a session of a kind is not wanted any more, if there is one.
    pub(crate) fn withdraw(&mut self, index: u16, one_copy: bool, now_ns: u64) {
        let Some(position) = self.position_of(index, one_copy) else {
            return;
        };
        self.no_longer_applying(position, now_ns);
    }
}

/// Whether asking on may help.
fn is_passing(error: &ConnectError) -> bool {
    match error {
        ConnectError::Rejected { reason, .. } => *reason == RejectReason::Busy,
        ConnectError::Unreachable { .. } | ConnectError::NoDaemon { .. } | ConnectError::Daemon(_) => true,
        _ => false,
    }
}
