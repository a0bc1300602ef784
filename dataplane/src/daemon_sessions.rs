//! Sessions that the admission daemon grants to others on our landing queue: what it orders is done. Where there is no daemon none of this
//! runs, and `control.rs` does it on the control port.

use lm_protocol::geometry::Wire;
use lm_protocol::landing::SessionAdmission;
use lm_protocol::session::{Aside, Terms};
use lm_protocol::time::Time;

use crate::daemon::ipc::{Offer, Progress};
use crate::engine::Engine;
use crate::granting::Closing;
use crate::landing::Inbound;
use crate::notices::Fault;
use crate::port::{Port, WakeError};
use crate::stewarded::{Opened, Ordered};
use crate::terms::WINDOW_FRAGMENTS_MAX;

/// For so long a granted session waits until its sender's neighbour address is known.
const NEIGHBOUR_PATIENCE_NS: u64 = 1_000_000_000;

impl<P: Port> Engine<P> {
    /// Does what the daemon orders. Gives how much there was.
    pub(crate) fn look_at_daemon(&mut self, now_ns: u64) -> usize {
        let mut count = 0;
        if let Some((opened, since_ns)) = self.admission.stewarded.take_waiting() {
            self.opened(&opened, since_ns, now_ns);
        }
        while let Some(order) = self.admission.stewarded.next_news(count == 0) {
            count += 1;
            self.obey(order, now_ns);
        }
        self.admission.stewarded.looked(now_ns);
        count
    }

    fn obey(&mut self, order: Ordered, now_ns: u64) {
        match order {
            Ordered::Open(opened) => self.opened(&opened, now_ns, now_ns),
            Ordered::Land { session_key } => self.land_or_later(session_key),
            Ordered::Close {
                session_key,
                was_idle,
                was_to_land,
            } => {
                let had_place = was_to_land || self.is_aside(session_key) != Some(true);
                let closing = match was_idle {
                    true => Closing::Unheard,
                    false => Closing::Theirs,
                };
                self.close_landing(session_key, closing);
                if had_place {
                    self.admission.stewarded.released(session_key);
                }
            }
            Ordered::SetAside { session_key } => self.set_aside_by_daemon(session_key, now_ns),
            Ordered::Told { ticket, outcome } => match outcome {
                Ok(outcome) => self.told(ticket, outcome, now_ns),
                Err(error) => self.admission.requests.fail(ticket, error),
            },
            Ordered::Disown => self.sending.link_failed(WakeError::Gone),
        }
    }

    /// A packet of a session that we do not know came: the daemon may have granted it.
    #[cold]
    pub(crate) fn ask_for_session(&mut self, now_ns: u64) {
        if self.admission.stewarded.has_daemon() && !self.admission.stewarded.is_waiting() {
            self.look_at_daemon(now_ns);
        }
    }

    /// The daemon granted a session on our landing queue.
    fn opened(&mut self, opened: &Opened, since_ns: u64, now_ns: u64) {
        let from = opened.from;
        let Some(mac) = self.port.side().neighbour(*from.ip()) else {
            if now_ns.saturating_sub(since_ns) < NEIGHBOUR_PATIENCE_NS {
                (self.admission.stewarded).wait_for_neighbour(*opened, since_ns);
            } else {
                tracing::warn!(%from, "no session: its neighbour address cannot be found");
                self.admission.stewarded.abort(opened.grant.session_key, 0);
            }
            return;
        };
        if let Err(reason) = self.land(opened, mac, now_ns) {
            tracing::warn!(%from, "no session: {reason}");
            self.admission.stewarded.abort(opened.grant.session_key, 0);
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
        let offered = self.landing_terms(self.fixed.receives.max_message_len);
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
            fillers: grant.fillers,
            repeats_apart: grant.repeats_apart,
            goes_ahead: true,
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
            self.admission.stewarded.land_later(key);
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

    /// Has sessions land that have a place and could not until now.
    pub(crate) fn land_late(&mut self, now_ns: u64) {
        for session_key in self.admission.stewarded.take_to_land(now_ns) {
            self.land_or_later(session_key);
        }
    }

    fn land_or_later(&mut self, session_key: u64) {
        if self.is_aside(session_key) == Some(true) && !self.drain(session_key) {
            self.admission.stewarded.land_later(session_key);
        }
    }

    /// Tells the daemon once a second how far its sessions are.
    pub(crate) fn touch_sessions(&mut self, now_ns: u64) {
        let Some(touched) = self.admission.stewarded.take_touched(now_ns) else {
            return;
        };
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
        self.admission.stewarded.progress(sessions);
    }

    /// Something lands again.
    pub(crate) fn offer_again(&mut self) {
        let Some(queue) = self.landing.as_ref().map(|landing| landing.queue) else {
            return;
        };
        self.admission.stewarded.offer(Offer {
            queue: queue as u16,
            mtu: self.fixed.mtu,
            chunk_len: self.fixed.chunk_len,
            max_message_len: self.fixed.receives.max_message_len,
            window_max: WINDOW_FRAGMENTS_MAX,
            allow: self.admission.introductions.allow().to_vec(),
        });
    }

    /// The endpoint goes: the daemon tells the senders how much was delivered.
    pub(crate) fn shut_down_at_daemon(&mut self) {
        let Some(landing) = &self.landing else { return };
        let sessions: Vec<_> = (landing.sessions.iter())
            .map(|inbound| (inbound.terms.peer, inbound.ended()))
            .collect();
        for (peer, ended) in sessions {
            (self.admission.stewarded).abort_unwaited(ended.session_key, ended.delivered);
            // Nobody is left to be asked of how many messages it has heard.
            self.tell_sender_ended(peer, ended);
        }
    }
}
