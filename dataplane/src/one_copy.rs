//! Sessions by the one-copy path (LM §3.3: what a sender uses that was not admitted, or not yet): a message's fragments come to the
//! kernel's data socket, and each is copied to its place in contiguous memory.
//!
//! Such a session takes no place of the gate, no entry of the landing queue and no admission between hosts; it is asked for on the
//! data port. Memory for its messages comes from the landing arena.
//!
//! A session that was to land becomes one when others wait for its place and nothing comes of its message ([`Engine::leave_place`]). Its
//! sender notices nothing: its key names the place behind that of the gate as well.

use std::net::SocketAddrV4;
use std::time::Duration;

use lm_protocol::control::RejectReason;
use lm_protocol::geometry::Wire;
use lm_protocol::session::{Application, Aside, Permit, Refusal, Terms};

use crate::bounds::ONE_COPY_ON_THE_WAY;
use crate::engine::{Engine, LandingSide};
use crate::granting::{Closing, Retired};
use crate::landing::{Inbound, InboundTerms};
use crate::memory::Umem;
use crate::notices::Fault;
use crate::port::{Caps, Port, RxQueue, Steer};
use crate::terms::{LandingTerms, WINDOW_FRAGMENTS_MAX};

/// Stands for a landing queue in the grants of such sessions.
pub(crate) const ONE_COPY_QUEUE: u16 = u16::MAX;

impl<R: RxQueue> LandingSide<R> {
    /// The session at `place` goes on by the one-copy path. Nothing is posted for it.
    pub(crate) fn stop_landing(&mut self, place: u8, umem: &Umem, now_ns: u64) {
        let (sessions, _, mut memory) = self.with_memory();
        sessions.stop_landing(place, &mut memory, umem, now_ns);
        if let Some(inbound) = self.sessions.at(place) {
            inbound.limit_messages(&mut self.rx);
        }
    }
}

impl<P: Port> Engine<P> {
    pub(crate) fn open_one_copy(
        &mut self,
        application: &Application<'_>,
        permit: &Permit,
    ) -> Result<Terms, Refusal> {
        let request = application.request;
        let Some(landing) = &self.landing else {
            return Err(RejectReason::Unsupported.into());
        };
        if request.wire != Wire::Lm {
            return Err(RejectReason::Unsupported.into());
        }
        let Some(place) = landing.sessions.free_one_copy_place() else {
            return Err(Refusal::busy(Duration::from_millis(50)));
        };
        // Nothing of the landing queue matters.
        let offered = LandingTerms {
            window_fragments: (1, WINDOW_FRAGMENTS_MAX),
            tx_queue: None,
            zero_copy: false,
            prefix: 0,
            ..self.landing_terms(permit.max_message_len)
        };
        let fit = offered.fit(request)?;
        let from = SocketAddrV4::new(*application.from.ip(), request.data_port);
        let index = self.make_room_for(from, true, fit.zone_len, request.messages_in_flight)?;
        let now_ns = self.now_ns;
        let peer = self.peers.id_of(index);
        let (granted, admission) = offered.grant(&fit, request, from, u16::from(place), None, || {
            self.entropy.draw()
        });
        let terms = self.inbound_terms(
            peer,
            request,
            &granted,
            fit.integrity,
            admission,
            ONE_COPY_ON_THE_WAY,
        );
        let Some(landing) = &mut self.landing else {
            return Err(RejectReason::Unsupported.into());
        };
        let terms = InboundTerms {
            caps: Caps::copying(terms.caps.capacity),
            one_processor: false,
            one_copy: true,
            ..terms
        };
        (landing.sessions).insert(Inbound::new(terms, &landing.arena, now_ns));
        self.peers.at(index).inbound += 1;
        self.counters.sessions_granted += 1;
        self.counters.sessions_one_copy += 1;
        Ok(granted)
    }

    /// Whether packets landed that nobody has looked at: they speak for the session of which nothing seems to come. In zero-copy mode nobody
    /// knows: what the gate redirects may be lost behind it.
    fn more_landed(&self) -> bool {
        let is_behind =
            |landing: &LandingSide<P::Rx>| landing.rx.accepted() != landing.sessions.entries.received;
        self.fixed.caps.witness && self.landing.as_ref().is_some_and(is_behind)
    }

    /// The landing session at `place` goes on by the one-copy path, for this reason, unless more has landed.
    pub(crate) fn stop_landing(&mut self, place: u8, fault: Fault, now_ns: u64) {
        if !self.more_landed() {
            self.lands_no_more(place, fault, now_ns);
        }
    }

    fn lands_no_more(&mut self, place: u8, fault: Fault, now_ns: u64) {
        let Some(landing) = &self.landing else { return };
        let registered_len = landing.registered_len;
        if self.rebuild_under_sessions(registered_len).is_err() {
            return;
        }
        let Some(landing) = &mut self.landing else { return };
        landing.stop_landing(place, &self.umem, now_ns);
        let Some(inbound) = landing.sessions.at(place) else {
            return;
        };
        self.counters.sessions_astray += u64::from(fault == Fault::Astray);
        let peer = inbound.terms.peer;
        if let Some(from) = self.peers.named(peer).map(|peer| peer.data) {
            self.notices.tell(fault, from);
        }
        self.show_landed(now_ns);
    }

    /// Others wait for a place, and nothing comes of the message that a session has under way: it goes on by the one-copy path without its
    /// own.
    pub(crate) fn leave_place(&mut self, key: u64) -> Aside {
        let now_ns = self.now_ns;
        // What landed and was not looked at speaks for it.
        let progress = |engine: &Engine<P>| {
            let sessions = &engine.landing.as_ref()?.sessions;
            sessions.with_key(key).map(|inbound| inbound.progress.last_ns())
        };
        let before = progress(self);
        while self.receive_landing(now_ns) > 0 {}
        if before != progress(self) || self.more_landed() {
            return Aside::Later;
        }
        // A zero-copy queue's gate redirects whatever comes there. What is on the way while the device changes its mind goes with the
        // channel, which is built anew behind that.
        if !self.fixed.caps.witness {
            if let Err(error) = self.port.steer(Steer::Nothing) {
                tracing::warn!("a session ends, because its packets cannot be led to another queue: {error}");
                return Aside::Never;
            }
            self.led_ns = None;
        }
        self.go_aside(key)
    }

    /// The session goes on by the one-copy path without a place.
    pub(crate) fn go_aside(&mut self, key: u64) -> Aside {
        let now_ns = self.now_ns;
        let Some(landing) = &self.landing else {
            return Aside::Never;
        };
        let queue = landing.queue;
        let Some(place) = landing.sessions.may_leave(key) else {
            return Aside::Never;
        };
        if landing.sessions.has_entries(place) {
            self.lands_no_more(place, Fault::Stalled, now_ns);
        }
        // I1: nothing may be posted for it. It may have been given up as well.
        let goes_on = (self.landing.as_ref()).is_some_and(|landing| {
            landing.sessions.with_key(key).is_some() && !landing.sessions.has_entries(place)
        });
        if !goes_on || self.port.revoke(queue, u32::from(place)).is_err() {
            return Aside::Later;
        }
        if let Some(landing) = &mut self.landing {
            landing.sessions.leave(place);
        }
        self.counters.sessions_set_aside += 1;
        Aside::Done
    }

    pub(crate) fn close_one_copy(&mut self, key: u64, closing: Closing) -> u32 {
        let place = (self.landing.as_ref())
            .and_then(|landing| landing.sessions.with_key(key))
            .map(Inbound::place);
        let retired = place.and_then(|place| self.retire(place, closing));
        let Some(Retired { delivered, zones, .. }) = retired else {
            return 0;
        };
        // No entry was ever posted there.
        if let Some(landing) = &mut self.landing {
            for zone in zones {
                landing.arena.free(zone.start, zone.len);
            }
        }
        delivered
    }
}
