//! Sessions without a place (LM §3.3: what a sender uses that was not admitted, or not yet): a message's fragments come to the
//! kernel's data socket, and each is copied to its place in contiguous memory. Memory for its messages comes from the landing arena.
//!
//! ```text
//!            open_aside ─▶ aside ── land ──▶ draining ── nothing of it is under way ──▶ it lands ◀── open
//!                            ▲                   │ leave_place                            │ leave_place
//!                            └───────────────────┴────────────────────────────────────────┘
//! ```
//! Its sender notices nothing but a flag in its credits. A draining session has credit for the messages that have memory already and for no
//! other: when they are settled no packet of it is on the way, the gate is opened to it, and entries are posted for the next one.

use std::net::SocketAddrV4;
use std::num::NonZeroU16;
use std::time::Duration;

use lm_protocol::control::{RejectReason, Request};
use lm_protocol::geometry::Wire;
use lm_protocol::integrity::Integrity;
use lm_protocol::landing::SessionAdmission;
use lm_protocol::rss::HashInput;
use lm_protocol::session::{Application, Aside, Permit, Refusal, Terms};

use crate::engine::Engine;
use crate::granting::{Closing, Retired};
use crate::landing::Inbound;
use crate::landing_side::LandingSide;
use crate::notices::Fault;
use crate::placing::Left;
use crate::port::{EffectiveMode, Port, RxQueue, Steer};

impl<P: Port> Engine<P> {
    pub(crate) fn begin_aside(
        &mut self,
        application: &Application<'_>,
        permit: &Permit,
    ) -> Result<Terms, Refusal> {
        let request = application.request;
        let landing = self.landing.as_ref().ok_or(RejectReason::Unsupported)?;
        let busy = Refusal::busy(Duration::from_millis(50));
        if request.wire != Wire::Lm {
            // IP fragments have no other path, and wait where they may land.
            let may_land = self.port.effective_mode() != EffectiveMode::CopyGeneric;
            return Err(match request.lands && may_land {
                true => busy,
                false => RejectReason::Unsupported.into(),
            });
        }
        let row = landing.sessions.free_row(false).ok_or(busy)?;
        let mut offered = self.landing_terms(permit.max_message_len);
        // One that never lands meets no device that writes beside a packet.
        offered.zero_copy &= request.lands;
        let fit = offered.fit(request)?;
        let from = SocketAddrV4::new(*application.from.ip(), request.data_port);
        let index = self.make_room_for(from, request, true, fit.zone_len)?;
        let landing_port = match request.lands {
            true => {
                let elsewhere = &self.elsewhere();
                (self.port.steer(Steer::Later { from, elsewhere })).map_err(|_| RejectReason::Unsupported)?
            }
            false => None,
        };
        let (granted, admission) = offered.grant(&fit, request, from, u16::from(row), landing_port, || {
            self.admission.entropy.draw()
        });
        (self.install_aside(index, request, &granted, fit.integrity, admission))
            .map_err(|_| RejectReason::Unsupported)?;
        Ok(granted)
    }

    /// A session without a place begins.
    pub(crate) fn install_aside(
        &mut self,
        index: u16,
        request: &Request,
        granted: &Terms,
        integrity: Integrity,
        admission: SessionAdmission,
    ) -> Result<(), &'static str> {
        let peer = self.peers.id_of(index);
        let terms = self.inbound_terms(peer, request, granted, integrity, admission);
        let now_ns = self.looks.now_ns();
        let landing = self.landing.as_mut().ok_or("nothing lands here")?;
        (landing.sessions).insert(Inbound::aside(terms, &landing.arena, now_ns));
        self.peers.at(index).inbound += 1;
        self.counters.sessions_granted += 1;
        self.counters.sessions_one_copy += 1;
        Ok(())
    }

    /// A session without a place gets one: it lands as soon as nothing of it is under way. `false`: not now.
    pub(crate) fn drain(&mut self, key: u64) -> bool {
        let has_witness = self.fixed.caps.witness;
        let Some(landing) = &self.landing else {
            return false;
        };
        let Some(inbound) = landing.sessions.with_key(key).filter(|_| landing.is_open) else {
            return false;
        };
        let terms = &inbound.terms;
        let may_land = match has_witness {
            true => !landing.sessions.lands_apart(inbound),
            // Whose packet came nobody can tell there.
            false => {
                !landing.footprint.is_unfit()
                    && !landing.sessions.has_places()
                    && terms.integrity.has_digests()
            }
        };
        if inbound.has_place() || !may_land {
            return false;
        }
        let (ip, limits) = (terms.admission.peer_ip, terms.limits);
        let (peer, zone_len) = (terms.peer, terms.zone_len_max());
        if landing.footprint.is_sought() {
            // What the device writes is not known yet.
            self.ask_for_footprint(peer);
            return false;
        }
        let has_memory = self.provide_memory(ip, zone_len, limits.messages_in_flight, false);
        if has_memory.is_err() {
            return false;
        }
        let landing = self.landing.as_mut();
        if let Some(inbound) = landing.and_then(|landing| landing.sessions.keyed(key)) {
            inbound.drain();
        }
        true
    }

    /// Has sessions land that have a place, and of which nothing is under way any more.
    pub(crate) fn land_drained(&mut self, now_ns: u64) {
        let rows = (self.landing.as_ref()).map(|landing| landing.sessions.without_entries());
        for row in rows.into_iter().flatten() {
            let landing = self.landing.as_ref();
            let inbound = landing.and_then(|landing| landing.sessions.at(row));
            if inbound.is_some_and(Inbound::is_drained) {
                self.begin_landing(row, now_ns);
            }
        }
    }

    fn begin_landing(&mut self, row: u8, now_ns: u64) {
        // Packets that came while the gate was open to it before are all on the ring now.
        while self.receive_landing(now_ns) > 0 {}
        let Some(landing) = &mut self.landing else { return };
        let queue = landing.queue;
        let alone = !landing.sessions.admits_any();
        let Some(inbound) = landing.sessions.at_mut(row) else {
            return;
        };
        let admission = SessionAdmission {
            first_message: inbound.order.unsettled_from(),
            ..inbound.terms.admission
        };
        inbound.terms.admission = admission;
        let (peer, has_witness) = (inbound.terms.peer, self.fixed.caps.witness);
        let Some(from) = self.peers.named(peer).map(|peer| peer.data) else {
            return;
        };
        let port = NonZeroU16::new(admission.peer_port).filter(|port| port.get() != from.port());
        let opened = match self.lead(queue, (from, port), HashInput::AddressesAndPorts, alone) {
            Err(error) if !has_witness => Err(error),
            _ => self.port.admit(queue, &admission),
        };
        let Some(landing) = &mut self.landing else { return };
        if let Err(error) = opened {
            tracing::warn!(%from, "its messages go on by the one-copy path: {error}");
            landing.sessions.stay_out(row);
            return;
        }
        if alone {
            landing.drops = landing.rx.drops();
        }
        landing.sessions.begin_landing(row, self.fixed.caps, now_ns);
        self.counters.sessions_landed += 1;
        if let Some(inbound) = landing.sessions.at(row) {
            inbound.limit_messages(&mut landing.rx);
        }
    }

    /// Whether packets landed that nobody has looked at: they speak for the session of which nothing seems to come. In zero-copy mode nobody
    /// knows: what the gate redirects may be lost behind it.
    fn more_landed(&self) -> bool {
        let is_behind =
            |landing: &LandingSide<P::Rx>| landing.rx.accepted() != landing.sessions.entries.received;
        self.fixed.caps.witness && self.landing.as_ref().is_some_and(is_behind)
    }

    /// The landing session in a row goes on by the one-copy path, for this reason, unless more has landed.
    pub(crate) fn stop_landing(&mut self, row: u8, fault: Fault, now_ns: u64) {
        if !self.more_landed() {
            self.lands_no_more(row, fault, now_ns);
        }
    }

    fn lands_no_more(&mut self, row: u8, fault: Fault, now_ns: u64) {
        let Some(landing) = &self.landing else { return };
        let registered_len = landing.registered_len;
        if self.rebuild_under_sessions(registered_len).is_err() {
            return;
        }
        let Some(landing) = &mut self.landing else { return };
        landing.stop_landing(row, self.memory.umem(), now_ns);
        let Some(inbound) = landing.sessions.at(row) else {
            return;
        };
        self.counters.sessions_astray += u64::from(fault == Fault::Astray);
        let peer = inbound.terms.peer;
        if let Some(from) = self.peers.named(peer).map(|peer| peer.data) {
            self.notices.tell(fault, from);
        }
        self.show_landed(now_ns);
    }

    /// Another session waits for a place: the one with this key goes on without, where nothing comes of what it has under way.
    pub(crate) fn leave_place(&mut self, key: u64) -> Aside {
        let now_ns = self.looks.now_ns();
        // What landed and was not looked at speaks for it.
        let progress = |engine: &Engine<P>| {
            let sessions = &engine.landing.as_ref()?.sessions;
            sessions.with_key(key).map(|inbound| inbound.progress.last_ns())
        };
        let before = progress(self);
        while self.receive_landing(now_ns) > 0 {}
        let landing = self.landing.as_ref();
        let is_idle = landing
            .and_then(|landing| landing.sessions.with_key(key))
            .is_some_and(Inbound::is_idle);
        if !is_idle && (before != progress(self) || self.more_landed()) {
            return Aside::Later;
        }
        // A zero-copy queue's gate redirects whatever comes there. What is on the way while the device changes its mind goes with the
        // channel, which is built anew behind that.
        if !self.fixed.caps.witness {
            if let Err(error) = self.port.steer(Steer::Nothing) {
                tracing::warn!("a session ends, because its packets cannot be led to another queue: {error}");
                return Aside::Never;
            }
            if let Some(landing) = &mut self.landing {
                landing.led_ns = None;
            }
        }
        self.go_aside(key)
    }

    /// The session goes on by the one-copy path without a place.
    pub(crate) fn go_aside(&mut self, key: u64) -> Aside {
        let now_ns = self.looks.now_ns();
        let Some(landing) = &mut self.landing else {
            return Aside::Never;
        };
        let queue = landing.queue;
        let Some(inbound) = landing.sessions.with_key(key) else {
            return Aside::Never;
        };
        let row = inbound.row();
        if inbound.terms.layout.wire() != Wire::Lm {
            // Where IP fragments belong only the gate knows.
            return Aside::Never;
        }
        if !landing.sessions.is_admitted(row) {
            // It drains, or its program was told before.
            landing.sessions.give_up_place(row);
            return Aside::Done;
        }
        if landing.sessions.is_idle(row) && self.fixed.caps.witness {
            // Nothing is posted for it.
            landing.stop_landing(row, self.memory.umem(), now_ns);
        } else if landing.sessions.has_entries(row) {
            self.lands_no_more(row, Fault::Stalled, now_ns);
        }
        // I1: nothing may be posted for it. It may have been given up as well.
        let goes_on = (self.landing.as_ref()).is_some_and(|landing| {
            landing.sessions.with_key(key).is_some() && !landing.sessions.has_entries(row)
        });
        if !goes_on || self.port.revoke(queue, u32::from(row)).is_err() {
            return Aside::Later;
        }
        if let Some(landing) = &mut self.landing {
            landing.sessions.give_up_place(row);
        }
        self.counters.sessions_set_aside += 1;
        Aside::Done
    }

    pub(crate) fn close_aside(&mut self, row: u8, closing: Closing) -> u32 {
        let Some(Retired { delivered, zones, .. }) = self.retire(row, closing) else {
            return 0;
        };
        // No entry is posted there.
        if let Some(landing) = &mut self.landing {
            for zone in zones {
                let entries = &mut landing.sessions.entries;
                entries.free(zone, Left::GivenUp, &mut landing.arena);
            }
        }
        delivered
    }
}
