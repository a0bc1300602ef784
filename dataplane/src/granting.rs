//! Granting: sessions that others have with us, from the decision to their end. The state machine is
//! `lm_protocol::admission::Node`; here is what it acts on: the landing channel's memory, and the gate.

use std::net::SocketAddrV4;
use std::num::NonZeroU16;
use std::time::Duration;

use lm_protocol::control::{
    CAPABILITY_AHEAD, CAPABILITY_STREAMS, ControlMessage, Ended, RejectReason, Request,
};
use lm_protocol::delivery::Delivery;
use lm_protocol::geometry::Wire;
use lm_protocol::integrity::Integrity;
use lm_protocol::landing::SessionAdmission;
use lm_protocol::rss::HashInput;
use lm_protocol::session::{
    Application, Aside, CloseReason, Landing, Permit, Refusal, Session, Terms, Unused,
};

use crate::arena::pages_len;

use crate::bounds::{IN_FLIGHT_MESSAGES_MAX, LANDING_LEN_SHARED, messages_in_flight};
use crate::completion::PeerId;
use crate::engine::Engine;
use crate::landing::{Inbound, InboundTerms, Limits, Violation, Zone};
use crate::notices::Fault;
use crate::port::{Port, PortError, RxQueue, Socket, Steer};
use crate::terms::{LandingTerms, WINDOW_FRAGMENTS_MAX};

/// How long a refused applicant waits while its neighbour address is being looked up.
const NEIGHBOUR_RETRY: Duration = Duration::from_millis(20);

/// How long an applicant waits while its answers show what the device writes.
const PROBE_RETRY: Duration = Duration::from_millis(2);
/// For so long a landing queue without sessions stays open to the device's spread: a sender may come again.
const LED_NS: u64 = 1_000_000_000;

/// How a session that lands here ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Closing {
    /// By our own will: what is on its way does not count.
    Ours,
    /// By its sender, or in silence: what has arrived counts, although the end overtook it.
    Theirs,
    /// By a daemon that knew of nothing under way: messages that were announced meanwhile and not shown are as good as not announced.
    Unheard,
}

/// What a session leaves behind.
pub(crate) struct Retired {
    /// Messages that it delivered.
    pub(crate) delivered: u32,
    /// Whether nothing of it was under way.
    pub(crate) idle: bool,
    /// Memory of messages that were not delivered.
    pub(crate) zones: Vec<Zone>,
}

impl<P: Port> Engine<P> {
    /// The landing channel's packets can no longer be trusted to lie where they should: gives its sessions up, and builds it
    /// anew.
    pub(crate) fn abort_landing(&mut self, violation: Violation) {
        self.counters.violations.count(violation);
        let Some(landing) = &mut self.landing else { return };
        landing.sessions.entries.trusted = false;
        let admitted = landing.sessions.admitted();
        let keys: Vec<u64> = admitted
            .filter_map(|row| Some(landing.sessions.at(row)?.terms.key))
            .collect();
        for key in keys {
            self.abort_session(key, Fault::Violation);
        }
    }

    /// Gives a landing session up: reports to the application and the sender.
    pub(crate) fn abort_session(&mut self, session_key: u64, fault: Fault) {
        let inbound = (self.landing.as_ref()).and_then(|landing| landing.sessions.with_key(session_key));
        let Some(inbound) = inbound else { return };
        let delivered = (inbound.settled.delivered()).wrapping_sub(inbound.terms.first_message);
        let peer = inbound.terms.peer;
        if let Some(from) = self.peers.named(peer).map(|peer| peer.data) {
            self.notices.tell(fault, from);
        }
        if self.admission.stewarded.has_daemon() {
            self.admission.stewarded.abort(session_key, delivered);
            self.close_landing(session_key, Closing::Ours);
            return;
        }
        self.end_granted(session_key);
    }

    /// Ends a session that our own node granted; it tells the sender.
    fn end_granted(&mut self, session_key: u64) {
        let now_ns = self.looks.now_ns();
        self.with_node(now_ns, |node, now, local, out| {
            node.close(now, session_key, local, out);
        });
    }

    /// What is known of a session that is over, and its sender's data address.
    fn past(&self, session_key: u64) -> Option<(SocketAddrV4, Ended)> {
        self.landing.as_ref()?.past.of(session_key)
    }

    /// Somebody announces messages of a session that is over: the word of that was lost, or is on its way.
    #[cold]
    pub(crate) fn tell_ended_again(&mut self, from: SocketAddrV4, session_key: u64) {
        if let Some((_, ended)) = self.past(session_key).filter(|(sender, _)| *sender == from) {
            self.send_control(Socket::Data, from, 0, &ControlMessage::Ended(ended));
        }
    }

    /// Tells a sender itself that its session is over, which a daemon granted.
    pub(crate) fn tell_sender_ended(&mut self, peer: PeerId, ended: Ended) {
        if let Some(from) = self.peers.named(peer).map(|peer| peer.data) {
            self.send_control(Socket::Data, from, 0, &ControlMessage::Ended(ended));
        }
    }

    /// A peer began anew: what an earlier incarnation had with us is over. What a daemon granted, it ends.
    pub(crate) fn end_sessions_of(&mut self, peer: PeerId) {
        let Some(landing) = &self.landing else { return };
        let is_its = |inbound: &&Inbound| inbound.terms.peer == peer;
        let keys: Vec<u64> = (landing.sessions.iter().filter(is_its))
            .map(|inbound| inbound.terms.key)
            .collect();
        for key in keys {
            self.end_granted(key);
        }
    }

    /// Nothing has to come to a landing queue without sessions.
    pub(crate) fn close_way(&mut self, now_ns: u64) {
        let Some(landing) = &mut self.landing else { return };
        if landing.sessions.admits_any() {
            landing.led_ns = landing.led_ns.map(|_| now_ns);
        } else if landing
            .led_ns
            .is_some_and(|led_ns| now_ns.saturating_sub(led_ns) > LED_NS)
        {
            match self.port.steer(Steer::Nothing) {
                Ok(_) => landing.led_ns = None,
                Err(error) => {
                    // Once more after the same time.
                    landing.led_ns = Some(now_ns);
                    tracing::warn!("the landing queue stays open to other traffic: {error}");
                }
            }
        }
    }

    /// Takes a session out of its channel, which the gate no longer admits.
    pub(crate) fn retire(&mut self, row: u8, closing: Closing) -> Option<Retired> {
        let landing = self.landing.as_mut()?;
        let mut inbound = landing.sessions.remove(row)?;
        self.counters
            .arrivals(std::mem::take(&mut landing.sessions.arrivals));
        if closing == Closing::Unheard {
            inbound.order.forget_unsettled(inbound.settled.delivered());
        }
        let (ended, heard) = (inbound.ended(), inbound.order.announced());
        self.notices.remember(ended.session_key);
        let (peer, repair) = (inbound.terms.peer, std::mem::take(&mut inbound.places.repair));
        if let Some(peer) = self.peers.named(peer) {
            peer.inbound -= 1;
            landing.past.remember(peer.data, ended);
        }
        self.book_repair(peer, repair);
        self.counters.sessions_ended += 1;
        Some(Retired {
            delivered: ended.delivered,
            idle: inbound.is_idle(),
            zones: self.report_given_up(&mut inbound, heard),
        })
    }

    /// From where packets of sessions without a place come: their fragments may have a port of their own, from when they had one.
    pub(crate) fn elsewhere(&mut self) -> Vec<SocketAddrV4> {
        let (Some(landing), peers) = (&self.landing, &mut self.peers) else {
            return Vec::new();
        };
        let without = landing.sessions.iter().filter(|inbound| !inbound.has_place());
        let peers = without.filter_map(|inbound| {
            let data = peers.named(inbound.terms.peer)?.data;
            let fragments = SocketAddrV4::new(*data.ip(), inbound.terms.admission.peer_port);
            Some([data, fragments])
        });
        peers.flatten().collect()
    }

    /// Has the device bring the fragments of the sender at `from` to the landing queue. With a source port, if they have one; else gives the
    /// one that they must have.
    pub(crate) fn lead(
        &mut self,
        queue: u32,
        (from, port): (SocketAddrV4, Option<NonZeroU16>),
        hashed: HashInput,
        alone: bool,
    ) -> Result<Option<NonZeroU16>, PortError> {
        let general = self.small.queue();
        let elsewhere = self.elsewhere();
        if let Some(landing) = &mut self.landing {
            landing.led_ns = Some(self.looks.now_ns());
        }
        self.port.steer(Steer::Landing {
            queue,
            general,
            from,
            port,
            hashed,
            elsewhere: &elsewhere,
            alone,
        })
    }

    /// How much landing memory a session needs: room for its messages in flight as far as they share a
    /// moderate amount.
    pub(crate) fn landing_len_for(&self, zone_len: u64, messages_in_flight: u32) -> u64 {
        let zone = pages_len(zone_len);
        let shared = zone
            .saturating_mul(u64::from(messages_in_flight))
            .min(LANDING_LEN_SHARED);
        pages_len(zone.max(shared).max(self.fixed.receives.landing_len))
    }
}

impl<P: Port> Engine<P> {
    /// A peer and landing memory for the session of the sender whose data address is `from`, with messages in zones of up to
    /// `zone_len` bytes. Gives the peer's index.
    pub(crate) fn make_room_for(
        &mut self,
        from: SocketAddrV4,
        request: &Request,
        aside: bool,
        zone_len: u64,
    ) -> Result<u16, Refusal> {
        if self.admission.key.is_some() && !self.may_send(from) {
            return Err(RejectReason::NotAllowed.into());
        }
        let landing = self.landing.as_ref().ok_or(RejectReason::Unsupported)?;
        // One session for each sender. A sender that began anew waits for the lease of the old one: whoever asks may
        // have forged its address.
        let peers = &mut self.peers;
        let is_from =
            |inbound: &Inbound| (peers.named(inbound.terms.peer)).is_some_and(|peer| peer.data == from);
        if landing.sessions.iter().any(is_from) {
            return Err(Refusal::busy(Duration::from_millis(50)));
        }
        let Some(mac) = self.port.side().neighbour(*from.ip()) else {
            return Err(Refusal::busy(NEIGHBOUR_RETRY));
        };
        let messages_in_flight = request.messages_in_flight.clamp(1, IN_FLIGHT_MESSAGES_MAX);
        let memory = self.provide_memory(*from.ip(), zone_len, messages_in_flight, aside);
        // Where there is none to land in, there may be for the one-copy path.
        memory.map_err(|refusal| match aside {
            true => refusal,
            false => RejectReason::NoMemory.into(),
        })?;
        let addressing = self.addressing_to(from, mac);
        let Some(index) = self.peers.find_or_add(from, &addressing, self.looks.now_ns()) else {
            return Err(Refusal::busy(Duration::from_millis(100)));
        };
        // An earlier peer at this address may have had another neighbour.
        self.peers.at(index).addressing = addressing;
        if self.admission.key.is_some() {
            // Its host's word: it knows the cluster's key.
            self.introduce(index, request.sender_id, self.looks.now_ns());
        }
        Ok(index)
    }

    /// What our landing queue brings to the terms of a session.
    pub(crate) fn landing_terms(&self, max_message_len: u64) -> LandingTerms {
        let shortest = match self.fixed.caps.lap {
            1 => 1,
            lap => (4 * lap).next_power_of_two(),
        };
        LandingTerms {
            local: self.fixed.local,
            mtu: self.fixed.mtu,
            link: self.fixed.link,
            chunk_len: self.fixed.chunk_len,
            max_message_len,
            window_fragments: (shortest, WINDOW_FRAGMENTS_MAX),
            tx_queue: self.fixed.receives.tx_queue,
            zero_copy: !self.fixed.caps.witness,
            prefix: self.fixed.caps.prefix_len,
            exclusive: self.fixed.receives.exclusive,
            goes_ahead: self.fixed.caps.ahead,
        }
    }

    pub(crate) fn inbound_terms(
        &self,
        peer: PeerId,
        request: &Request,
        granted: &Terms,
        integrity: Integrity,
        admission: SessionAdmission,
    ) -> InboundTerms {
        let on_the_way = self.fixed.receives.on_the_way.of(request.uncompleted_max);
        InboundTerms {
            peer,
            key: granted.session_key,
            layout: granted.layout,
            window: granted.window,
            chunk_len: self.fixed.chunk_len,
            caps: self.fixed.caps,
            first_message: granted.first_message,
            limits: Limits {
                messages_in_flight: messages_in_flight(request.messages_in_flight, &granted.layout),
                max_message_len: request.max_message_len,
                on_the_way,
                adapts: self.fixed.receives.adapts,
                posted_max: on_the_way.saturating_mul(2).min(self.fixed.receives.ring_len),
                memory_max: self.landing_memory().address_max,
            },
            delivery: request.delivery,
            integrity,
            tells_windows: request.capabilities & CAPABILITY_STREAMS != 0,
            fillers: granted.fillers.into(),
            goes_ahead: self.fixed.caps.ahead
                && request.capabilities & CAPABILITY_AHEAD != 0
                && granted.layout.wire() == Wire::Lm
                && request.delivery == Delivery::Reliable
                && integrity.has_digests(),
            admission,
        }
    }

    /// A session that the gate is open to begins.
    pub(crate) fn install_session(
        &mut self,
        index: u16,
        request: &Request,
        granted: &Terms,
        integrity: Integrity,
        admission: SessionAdmission,
        now_ns: u64,
    ) -> Result<(), Refusal> {
        // Packets of the last session in this row are all on the ring now; they must not be taken for this one's.
        let violations = self.counters.violations.total();
        while self.receive_landing(now_ns) > 0 {}
        let peer = self.peers.id_of(index);
        let Some(landing) = &mut self.landing else {
            return Err(RejectReason::Unsupported.into());
        };
        if self.counters.violations.total() != violations {
            return Err(Refusal::busy(Duration::from_millis(50)));
        }
        if !landing.sessions.admits_any() {
            landing.drops = landing.rx.drops();
        }
        let terms = self.inbound_terms(peer, request, granted, integrity, admission);
        let landing = self.landing.as_mut().expect("it was there a moment ago");
        (landing.sessions).insert(Inbound::new(terms, &landing.arena, now_ns));
        let meets_open = terms.caps.witness && landing.sessions.entries.standing() > 0;
        let registered_len = landing.registered_len;
        if meets_open
            && request.wire == Wire::IpFrag
            && let Err(error) = self.rebuild_under_sessions(registered_len)
        {
            tracing::debug!("its first message is lost in open entries: {error}");
        }
        let peer = self.peers.at(index);
        peer.inbound += 1;
        peer.uncompleted_max = request.uncompleted_max;
        self.counters.sessions_granted += 1;
        Ok(())
    }

    /// A session is over: closes the gate, unless somebody did, and frees what it took. Gives the number of messages that it delivered.
    pub(crate) fn close_landing(&mut self, key: u64, closing: Closing) -> u32 {
        let Some(landing) = &mut self.landing else {
            return 0;
        };
        let queue = landing.queue;
        let Some(inbound) = landing.sessions.with_key(key) else {
            return 0;
        };
        let row = inbound.row();
        if !landing.sessions.is_admitted(row) {
            return self.close_aside(row, closing);
        }
        // I4: after this no CPU is inside the gate with the session, so every packet that it accepted has its descriptor.
        // While others go on nobody waits for that: what comes late belongs to nobody then.
        let last = landing.sessions.admitted().count() == 1;
        let mut closed = self.port.revoke(queue, u32::from(row));
        if last {
            closed = closed.and_then(|()| self.port.quiesce(queue));
        }
        // A daemon that holds the gate may be away: a CPU may be inside the gate still.
        let is_quiet = closed.is_ok();
        self.counters.control_send_errors += u64::from(!is_quiet);
        if closing != Closing::Ours {
            let violations = self.counters.violations.total();
            while self.receive_landing(self.looks.now_ns()) > 0
                && self.counters.violations.total() == violations
            {}
        }
        let Some(Retired {
            delivered,
            idle,
            zones,
        }) = self.retire(row, closing)
        else {
            return 0;
        };
        let Some(landing) = &mut self.landing else {
            return delivered;
        };
        // I1: nothing of them is free before every posted entry was used.
        landing.sessions.entries.quarantine_all(zones);
        if !last || !is_quiet || !landing.is_open || (idle && landing.sessions.entries.are_used()) {
            landing.sessions.entries.free_quarantined(&mut landing.arena);
        } else {
            let registered_len = landing.registered_len;
            self.sending.flush();
            if let Err(error) = self.rebuild_landing(registered_len) {
                // If it is as it was, the zones stay quarantined until their entries are used.
                tracing::debug!("the landing channel is not built anew: {error}");
            }
        }
        delivered
    }
}

impl<P: Port> Landing for Engine<P> {
    fn open(&mut self, queue: u16, application: &Application<'_>, permit: &Permit) -> Result<Terms, Refusal> {
        let request = application.request;
        let Some(landing) = &self.landing else {
            return Err(RejectReason::Unsupported.into());
        };
        let Some(row) = landing.sessions.free_row(request.wire == Wire::IpFrag) else {
            return Err(Refusal::busy(Duration::from_millis(50)));
        };
        let alone = !landing.sessions.admits_any();
        if !self.fixed.caps.witness && landing.footprint.is_unfit() {
            return Err(RejectReason::Unsupported.into());
        }
        let from = SocketAddrV4::new(*application.from.ip(), request.data_port);
        let offered = self.landing_terms(permit.max_message_len);
        let fit = offered.fit(request)?;
        let hashed = match request.wire {
            Wire::IpFrag if !self.fixed.caps.witness => HashInput::Addresses,
            Wire::Lm | Wire::IpFrag => HashInput::AddressesAndPorts,
        };
        // Whose packet came nobody can tell there.
        if !self.fixed.caps.witness && !alone {
            return Err(Refusal::busy(Duration::from_millis(50)));
        }
        let index = self.make_room_for(from, request, false, fit.zone_len)?;
        let now_ns = self.looks.now_ns();
        let landing_port = match self.lead(queue.into(), (from, None), hashed, alone) {
            Ok(port) => port,
            Err(error) if !self.fixed.caps.witness => {
                tracing::warn!(%from, "no session: {error}");
                return Err(RejectReason::Unsupported.into());
            }
            // What comes to another queue takes the one-copy path.
            Err(error) => {
                tracing::warn!(%from, "fragments may come to another queue: {error}");
                None
            }
        };
        let is_sought = (self.landing.as_ref()).is_some_and(|landing| landing.footprint.is_sought());
        if is_sought {
            // The answers show what the device writes, and the sender will ask again.
            let peer = self.peers.id_of(index);
            self.ask_for_footprint(peer);
            let is_unfit = (self.landing.as_ref()).is_some_and(|landing| landing.footprint.is_unfit());
            return Err(match is_unfit {
                true => RejectReason::Unsupported.into(),
                false => Refusal::busy(PROBE_RETRY),
            });
        }

        let (granted, admission) = offered.grant(&fit, request, from, u16::from(row), landing_port, || {
            self.admission.entropy.draw()
        });
        if self.port.admit(u32::from(queue), &admission).is_err() {
            return Err(RejectReason::NoMemory.into());
        }
        let installed = self.install_session(index, request, &granted, fit.integrity, admission, now_ns);
        if installed.is_err() {
            let _ = self.port.revoke(u32::from(queue), u32::from(row));
        }
        installed.map(|()| granted)
    }

    fn open_aside(
        &mut self,
        _: u16,
        application: &Application<'_>,
        permit: &Permit,
    ) -> Result<Terms, Refusal> {
        self.begin_aside(application, permit)
    }

    fn land(&mut self, session: &Session) -> bool {
        self.drain(session.grant.session_key)
    }

    fn unused(&self, session: &Session) -> Option<Unused> {
        let sessions = &self.landing.as_ref()?.sessions;
        sessions
            .with_key(session.grant.session_key)?
            .unused(self.looks.now_ns())
    }

    fn set_aside(&mut self, session: &Session) -> Aside {
        self.leave_place(session.grant.session_key)
    }

    fn close(&mut self, session: &Session, reason: CloseReason) -> u32 {
        let closing = match reason {
            CloseReason::Local => Closing::Ours,
            _ => Closing::Theirs,
        };
        self.close_landing(session.grant.session_key, closing)
    }

    fn heard(&self, session_key: u64) -> Option<u32> {
        self.past(session_key)?.1.heard
    }
}
