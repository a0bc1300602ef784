//! Control: admission messages on the control port. The state machines are `lm_protocol::session`; here is what
//! they act on: the landing channel's memory, the gate, and the sockets.

use std::net::SocketAddrV4;
use std::time::Duration;

use lm_ebpf::{Role, SessionAdmission};
use lm_protocol::control::{
    ControlError, ControlMessage, Ended, Grant, MAX_CONTROL_LEN, RejectReason, Request,
};
use lm_protocol::delivery::Delivery;
use lm_protocol::geometry::Wire;
use lm_protocol::session::{
    Admit, Applicant, ApplicantState, Application, CloseReason, Farewell, FarewellState, Grantor, Landing,
    Permit, Refusal, Session, Terms,
};
use lm_protocol::window::WindowShape;
use lm_protocol::wire::Addressing;
use lm_protocol::wire::lm::{LmError, LmHeader};
use lm_protocol::wire::lm::{MissingRange, with_digests};
use lm_protocol::zone::ZoneShape;

use crate::arena::pages_len;
use crate::channel::Transmit;
use crate::config::{
    ConnectOptions, IN_FLIGHT_MESSAGES_MAX, LANDING_LEN_SHARED, LANDING_RING_LEN, TRANSMIT_BURST,
    TRANSMIT_RING_LEN,
};
use crate::engine::{Engine, LandingSide, same_drops, time};
use crate::error::{ConnectError, RecvError};
use crate::landing::{GivenUp, Inbound, InboundTerms, Sessions, Violation};
use crate::nic::{Channel, ChannelConfig, Nic, NicError};
use crate::notices::Fault;
use crate::outbound::{Outbound, OutboundTerms, Outcome};
use crate::peer::PeerId;
use crate::udp::{Port, UdpEvent};

/// A control datagram is shorter than this.
const CONTROL_LEN_MAX: usize = 512;
/// Control datagrams taken in one round.
pub(crate) const CONTROL_PER_LOOK: usize = 64;
/// How long a refused applicant waits while its neighbour address is being looked up.
const NEIGHBOUR_RETRY: Duration = Duration::from_millis(20);
/// Attempts to empty a TX ring before its channel is built anew: twice as many as a full ring needs.
const FLUSHES_MAX: u32 = 2 * TRANSMIT_RING_LEN / TRANSMIT_BURST;
/// Reports of incomplete messages kept for an application that does not ask; the counter knows of all.
const FAILURES_MAX: usize = 1024;
/// Missing ranges reported in one packet.
pub(crate) const RANGES_MAX: usize = 64;

/// The granting side: taken out of the engine while it acts on the engine.
pub(crate) struct Grants {
    pub(crate) grantor: Grantor,
    pub(crate) admit: Box<dyn Admit + Send>,
}

/// A request for a session, and the end of one, on their way.
#[derive(Debug)]
pub(crate) struct Applying {
    pub(crate) peer: u16,
    pub(crate) applicant: Applicant,
    pub(crate) options: ConnectOptions,
}

/// The end of a session, until it is confirmed.
#[derive(Debug)]
pub(crate) struct Leaving {
    pub(crate) control: SocketAddrV4,
    pub(crate) farewell: Farewell,
}

impl<N: Nic> Engine<N> {
    /// Stage 5, second half.
    pub(crate) fn receive_control(&mut self, now_ns: u64) -> usize {
        let mut count = 0;
        let mut datagram = [0u8; CONTROL_LEN_MAX];
        // Bounded: whoever floods the port must not keep the other stages waiting.
        while count < CONTROL_PER_LOOK
            && let Ok(Some(event)) = self.nic.udp_recv(Port::Control, &mut datagram)
        {
            count += 1;
            match event {
                UdpEvent::Datagram { from, len } => self.take_control(from, &datagram[..len], now_ns),
                UdpEvent::Refused(by) => self.take_refusal(by),
                UdpEvent::TooLong(from) => {
                    self.counters.control_packets += 1;
                    self.reject(Fault::Malformed, from);
                }
            }
        }
        count
    }

    fn take_control(&mut self, from: SocketAddrV4, datagram: &[u8], now_ns: u64) {
        let now = time(now_ns);
        self.counters.control_packets += 1;
        match ControlMessage::parse(datagram) {
            Ok((request_id, message @ (ControlMessage::Request(_) | ControlMessage::End(_)))) => {
                let Some(mut grants) = self.grants.take() else {
                    self.reject(Fault::Answer, from);
                    return;
                };
                let is_for_nothing = match &message {
                    ControlMessage::End(end) => !(grants.grantor.sessions())
                        .any(|session| session.peer == from && session.grant.session_key == end.session_key),
                    _ => false,
                };
                let reply =
                    grants
                        .grantor
                        .handle(from, request_id, &message, now, grants.admit.as_mut(), self);
                self.grants = Some(grants);
                match (&message, &reply) {
                    (ControlMessage::End(end), _) if is_for_nothing => {
                        self.reject_for(end.session_key, Fault::Key, from);
                    }
                    (ControlMessage::Request(_), Some(ControlMessage::Reject(_))) => {
                        self.reject(Fault::Refused, from);
                    }
                    // A repetition of one whose session is over.
                    (ControlMessage::Request(_), None) => self.counters.drops.late += 1,
                    _ => self.counters.packets_used += 1,
                }
                if let Some(reply) = reply {
                    self.send_control(from, request_id, &reply);
                }
            }
            Ok((request_id, message)) => {
                let mut is_awaited = false;
                for applying in &mut self.applying {
                    if self.peers.at(applying.peer).control == from {
                        is_awaited |= applying.applicant.request_id() == request_id;
                        applying.applicant.handle(request_id, &message, now);
                    }
                }
                for leaving in self.leaving.iter_mut().filter(|leaving| leaving.control == from) {
                    is_awaited |= leaving.farewell.request_id() == request_id;
                    leaving.farewell.handle(request_id, &message);
                }
                let mut number = u64::from(request_id);
                if let ControlMessage::Ended(ended) = message {
                    match self.take_ended(from, &ended, now_ns) {
                        Some(true) => is_awaited = true,
                        // Counted as what it is.
                        Some(false) => return,
                        None => {}
                    }
                    number = ended.session_key;
                }
                match is_awaited {
                    true => self.counters.packets_used += 1,
                    false => self.reject_for(number, Fault::Answer, from),
                }
            }
            Err(error) => {
                let fault = match error {
                    ControlError::VersionMismatch { .. }
                    | ControlError::Packet(LmError::VersionMismatch { .. }) => Fault::Version,
                    _ => Fault::Malformed,
                };
                self.reject(fault, from);
                for applying in &mut self.applying {
                    if self.peers.at(applying.peer).control == from {
                        applying.applicant.handle_error(&error);
                    }
                }
                let reply = self
                    .grants
                    .as_ref()
                    .and_then(|grants| grants.grantor.handle_error(&error));
                if let Some((request_id, reply)) = reply {
                    self.send_control(from, request_id, &reply);
                }
            }
        }
    }

    /// ICMP says that nobody listens on a control port.
    fn take_refusal(&mut self, by: SocketAddrV4) {
        for applying in &mut self.applying {
            if self.peers.at(applying.peer).control == by {
                applying.applicant.handle_refused();
            }
        }
        for leaving in self.leaving.iter_mut().filter(|leaving| leaving.control == by) {
            leaving.farewell.handle_refused();
        }
    }

    /// The receiver has ended a session that we still used; whether it can be right about what was delivered. `None`: there is
    /// no session with this key.
    fn take_ended(&mut self, from: SocketAddrV4, ended: &Ended, now_ns: u64) -> Option<bool> {
        let found = self.senders.iter().copied().find(|&index| {
            let peer = self.peers.at(index);
            peer.control == from
                && peer
                    .outbound
                    .as_ref()
                    .is_some_and(|outbound| outbound.terms.key == ended.session_key)
        });
        let index = found?;
        // The last credit may have been lost, or be behind us.
        let outbound = self.peers.at(index).outbound.as_mut();
        let is_plausible = outbound.is_none_or(|outbound| outbound.ended(ended.delivered).is_ok());
        if !is_plausible {
            self.reject(Fault::Ended, from);
        }
        self.drop_outbound(index, &Outcome::SessionEnded, now_ns);
        Some(is_plausible)
    }

    pub(crate) fn send_control(&mut self, to: SocketAddrV4, request_id: u32, message: &ControlMessage) {
        let mut datagram = [0u8; MAX_CONTROL_LEN];
        let len = message.encode(request_id, &mut datagram);
        // A control message that cannot be sent now is as good as lost on the way: it is repeated.
        if self.nic.udp_send(Port::Control, to, &datagram[..len]).is_err() {
            self.counters.control_send_errors += 1;
        }
    }

    /// Asks a peer for a session.
    pub(crate) fn apply(&mut self, index: u16, options: &ConnectOptions, now_ns: u64) {
        let request = Request {
            sender_id: self.fixed.sender_id,
            data_port: self.nic.local().port(),
            mtu: self.fixed.mtu,
            wire: options.wire,
            link: self.fixed.link,
            max_message_len: options.max_message_len,
            window: self.fixed.window,
            messages_in_flight: options.messages_in_flight.clamp(1, IN_FLIGHT_MESSAGES_MAX),
            paced: self.fixed.paced,
            delivery: delivery_of(options),
            integrity: self.integrity_of(options.wire),
        };
        let request_id = random_u64() as u32;
        self.peers.at(index).applying = true;
        let applicant = Applicant::new(request, request_id, time(now_ns), options.timeout);
        self.applying.push(Applying {
            peer: index,
            applicant,
            options: *options,
        });
    }

    /// Drives requests and farewells that are on their way.
    pub(crate) fn drive_admission(&mut self, now_ns: u64) {
        let now = time(now_ns);
        for position in 0..self.applying.len() {
            let applying = &mut self.applying[position];
            let request_id = applying.applicant.request_id();
            let peer = applying.peer;
            while let Some(message) = self.applying[position].applicant.poll_transmit(now) {
                let to = self.peers.at(peer).control;
                self.send_control(to, request_id, &message);
            }
        }
        for position in 0..self.leaving.len() {
            let leaving = &mut self.leaving[position];
            let (to, request_id) = (leaving.control, leaving.farewell.request_id());
            if let Some(message) = leaving.farewell.poll_transmit(now) {
                self.send_control(to, request_id, &message);
            }
        }
        self.leaving
            .retain(|leaving| *leaving.farewell.state() == FarewellState::Pending);
    }

    /// The outcome of a request, once there is one.
    ///
    /// # Errors
    /// Why there is no session.
    pub(crate) fn application_outcome(
        &mut self,
        index: u16,
        now_ns: u64,
    ) -> Option<Result<(), ConnectError>> {
        let position = self.applying.iter().position(|applying| applying.peer == index)?;
        let control = self.peers.at(index).control;
        let outcome = match *self.applying[position].applicant.state() {
            ApplicantState::Pending => return None,
            ApplicantState::Granted(grant) => {
                let options = self.applying[position].options;
                self.granted(index, &grant, &options, now_ns)
            }
            ApplicantState::Rejected(reject) => Err(ConnectError::Rejected {
                peer: control,
                reason: reject.reason,
                limit: reject.limit,
                version: reject.version,
            }),
            ApplicantState::NotListening => Err(ConnectError::NotListening { peer: control }),
            ApplicantState::Unreachable => Err(ConnectError::Unreachable { peer: control }),
            _ => Err(ConnectError::Incompatible { peer: control }),
        };
        // A grant that we do not want is given back.
        self.drive_admission(now_ns);
        let request_id = self.applying[position].applicant.request_id();
        self.notices.remember(request_id.into());
        self.applying.swap_remove(position);
        self.peers.at(index).applying = self.applying.iter().any(|applying| applying.peer == index);
        Some(outcome)
    }

    /// Sets up the sender's side of a granted session.
    fn granted(
        &mut self,
        index: u16,
        grant: &Grant,
        options: &ConnectOptions,
        now_ns: u64,
    ) -> Result<(), ConnectError> {
        // The grant tells what the receiver sees; its device may have another idea of VLAN tags than ours.
        let layout = (grant.layout.on_link(self.fixed.link).ok())
            .filter(|layout| layout.payload_len() >= crate::integrity::PAYLOAD_LEN_MIN);
        let Some(layout) = layout else {
            self.end_session_key(index, grant.session_key, 0, now_ns);
            let peer = self.peers.at(index).control;
            return Err(ConnectError::Incompatible { peer });
        };
        let channel = match self.transmit_for(grant.tx_queue_hint) {
            Ok(channel) => channel,
            Err(error) => {
                self.end_session_key(index, grant.session_key, 0, now_ns);
                return Err(error);
            }
        };
        let outbound = Outbound::new(
            OutboundTerms {
                key: grant.session_key,
                layout,
                window: grant.window,
                packet_limit: grant.packet_limit,
                first_message: grant.first_message,
                messages_in_flight: options.messages_in_flight.clamp(1, IN_FLIGHT_MESSAGES_MAX),
                max_message_len: grant.max_message_len,
                delivery: delivery_of(options),
                integrity: self.integrity_of(layout.wire()),
                lease_ns: u64::from(grant.lease_ms) * 1_000_000,
                channel,
                plain: false,
                rate: options.rate,
            },
            now_ns,
        );
        self.peers.at(index).outbound = Some(outbound);
        if !self.senders.contains(&index) {
            self.senders.push(index);
        }
        Ok(())
    }

    /// The channel whose packets reach the receiver's landing queue. On veth the sender's queue selects the
    /// receiver's; the receiver says which in its grant. Other devices spread by what is in the packet.
    fn transmit_for(&mut self, hint: Option<u16>) -> Result<usize, ConnectError> {
        let Some(queue) = hint.filter(|_| self.fixed.veth) else {
            return Ok(self.landing.as_ref().map_or(0, |landing| landing.transmit));
        };
        let queue = u32::from(queue);
        if let Some(found) = self.transmit.iter().position(|transmit| transmit.queue == queue) {
            return Ok(found);
        }
        // It receives nothing, but the kernel wants a fill ring and an RX ring of some length.
        let config = ChannelConfig {
            queue,
            role: Role::None,
            registered_len: self.fixed.transmit_registered_len,
            fill_len: 64,
            rx_len: 64,
            tx_len: TRANSMIT_RING_LEN,
            completion_len: TRANSMIT_RING_LEN,
        };
        let channel = self
            .nic
            .tx_channel(&config)
            .map_err(|source| ConnectError::Queue { queue, source })?;
        let in_flight = self.config.tx_in_flight;
        self.transmit
            .push(Transmit::new(queue, channel.tx, channel.completion, in_flight));
        self.idle_rings.push((channel.fill, channel.rx));
        Ok(self.transmit.len() - 1)
    }

    /// Ends the session that we have with a peer. Unconfirmed messages are settled as `outcome`.
    pub(crate) fn drop_outbound(&mut self, index: u16, outcome: &Outcome, now_ns: u64) {
        self.settle_outbound(index, Some(outcome), now_ns);
        if let Some(outbound) = self.peers.at(index).outbound.take() {
            self.notices.remember(outbound.terms.key);
        }
        self.senders.retain(|&sender| sender != index);
    }

    /// Tells the receiver that its session is over, until it confirms.
    pub(crate) fn end_session(&mut self, index: u16, now_ns: u64) {
        let Some(outbound) = &self.peers.at(index).outbound else {
            return;
        };
        let (key, plain) = (outbound.terms.key, outbound.terms.plain);
        let messages = outbound.next_number.wrapping_sub(outbound.terms.first_message);
        if outbound.has_digests_to_tell() {
            // What has left counts, as far as it can be verified.
            self.announce(index, now_ns);
        }
        self.drop_outbound(index, &Outcome::SessionEnded, now_ns);
        if !plain {
            self.end_session_key(index, key, messages, now_ns);
        }
    }

    fn end_session_key(&mut self, index: u16, key: u64, messages: u32, now_ns: u64) {
        self.notices.remember(key);
        let farewell = Farewell::new(
            key,
            messages,
            random_u64() as u32,
            time(now_ns),
            Duration::from_millis(700),
        );
        self.leaving.push(Leaving {
            control: self.peers.at(index).control,
            farewell,
        });
        self.drive_admission(now_ns);
    }

    /// The landing channel's packets can no longer be trusted to lie where they should: gives its sessions up, and builds it
    /// anew.
    pub(crate) fn abort_landing(&mut self, violation: Violation) {
        self.counters.violations.count(violation);
        let Some(landing) = &mut self.landing else { return };
        landing.sessions.entries.trusted = false;
        let keys: Vec<u64> = (landing.sessions.iter())
            .map(|inbound| inbound.terms.key)
            .collect();
        for key in keys {
            self.abort_session(key, Fault::Violation);
        }
    }

    /// Gives a landing session up: reports to the application and the sender.
    pub(crate) fn abort_session(&mut self, session_key: u64, fault: Fault) {
        let Some(mut grants) = self.grants.take() else {
            return;
        };
        let session = grants.grantor.session(session_key);
        let peer = session.map(|session| session.peer);
        if let Some(peer) = peer {
            self.notices.tell(fault, peer);
        }
        grants.grantor.close(session_key, self);
        self.grants = Some(grants);
        if let Some(peer) = peer {
            let ended = Ended {
                session_key,
                delivered: 0,
            };
            self.send_control(peer, 0, &ControlMessage::Ended(ended));
        }
    }

    /// The endpoint goes: ends the sessions that it granted. Their senders need not wait for the lease to know.
    pub(crate) fn shut_down_grants(&mut self) {
        let Some(mut grants) = self.grants.take() else {
            return;
        };
        let mut ended = Vec::new();
        for session in grants.grantor.sessions() {
            let session_key = session.grant.session_key;
            let inbound = (self.landing.as_mut()).and_then(|landing| landing.sessions.keyed(session_key));
            if let Some(inbound) = inbound {
                let delivered = inbound.delivered.wrapping_sub(inbound.terms.first_message);
                ended.push((
                    session.peer,
                    Ended {
                        session_key,
                        delivered,
                    },
                ));
            }
        }
        grants.grantor.shut_down(self);
        self.grants = Some(grants);
        for (peer, ended) in ended {
            self.send_control(peer, 0, &ControlMessage::Ended(ended));
        }
    }

    /// Runs the leases of sessions that we granted.
    pub(crate) fn expire_leases(&mut self, now_ns: u64) {
        let Some(mut grants) = self.grants.take() else {
            return;
        };
        grants.grantor.expire(time(now_ns), self);
        self.grants = Some(grants);
    }

    /// Addressing of answers to a datagram that came by the kernel's socket.
    pub(crate) fn addressing_of_sender(&mut self, from: SocketAddrV4) -> Option<Addressing> {
        if let Some(index) = self.peers.find(from) {
            return Some(self.peers.at(index).addressing);
        }
        let mac = self.nic.neighbour(*from.ip())?;
        Some(self.addressing_to(from, mac))
    }

    /// How much landing memory a session needs: room for its messages in flight as far as they share a
    /// moderate amount, and always for one whole message.
    fn landing_len_for(&self, zone_len: u64, messages_in_flight: u32) -> u64 {
        let zone = pages_len(zone_len);
        let shared = zone
            .saturating_mul(u64::from(messages_in_flight))
            .min(LANDING_LEN_SHARED);
        pages_len(zone.max(shared).max(self.config.landing_len))
    }

    /// Makes the landing arena at least `len` bytes long, with a new socket that registers all of it.
    pub(crate) fn grow_landing(&mut self, len: u64) -> Result<(), Refusal> {
        let Some(landing) = &self.landing else {
            return Err(RejectReason::Unsupported.into());
        };
        if landing.arena.len() >= len {
            return Ok(());
        }
        if landing.arena.start() + len > self.umem.len() {
            return Err(RejectReason::NoMemory.into());
        }
        if !self.rebuild_under_sessions(landing.arena.start() + len) {
            return Err(RejectReason::NoMemory.into());
        }
        let landing = self.landing.as_mut().expect("it was there a moment ago");
        landing.arena.grow(len);
        Ok(())
    }

    /// Replaces the landing channel's socket: nothing that was posted on the old one can be written any more.
    fn rebuild_landing(&mut self, registered_len: u64) -> Result<(), NicError> {
        let Some(landing) = self.landing.take() else {
            return Ok(());
        };
        // Our own packets on its TX ring would go with the socket, and nobody would send them again.
        for _ in 0..FLUSHES_MAX {
            if !self.transmit[landing.transmit].has_unsent() {
                break;
            }
            self.flush();
        }
        self.reap(true);
        let LandingSide {
            queue,
            fill,
            rx,
            mut log,
            mut arena,
            chosen,
            mut sessions,
            transmit,
            ..
        } = landing;
        for released in self.outgoing.abandoned(transmit) {
            self.recover(released);
        }
        // Its place in the list is the channel's name, so the new one must take it.
        let (tx, completion) = self.transmit.remove(transmit).into_rings();
        let config = landing_channel(queue, registered_len, self.fixed.landing_ring_len);
        let old = Channel {
            queue,
            fill,
            rx,
            tx,
            completion,
        };
        let channel = match self.nic.rebuild_channel(old, &config) {
            Ok(channel) => channel,
            Err(error) => {
                self.transmit.insert(transmit, Transmit::closed());
                self.end_sessions_on(transmit);
                return Err(error);
            }
        };
        let in_flight = self.config.tx_in_flight;
        self.transmit.insert(
            transmit,
            Transmit::new(queue, channel.tx, channel.completion, in_flight),
        );
        // Packets that the gate accepted and nobody took stay behind in the log.
        let producer = log.producer();
        log.set_posted(producer);
        self.counters.drops.landing_discarded += sessions.forget_entries(producer, &mut arena, &self.umem);
        self.landing = Some(LandingSide {
            queue,
            fill: channel.fill,
            rx: channel.rx,
            log,
            arena,
            chosen,
            sessions,
            statistics: self.nic.statistics(queue).unwrap_or_default(),
            registered_len,
            transmit,
        });
        Ok(())
    }

    /// Builds the landing channel anew while its sessions go on, with so many bytes registered: what was posted is void, so
    /// that a message which waits for nothing else can be shown (I1). `false`: it could not be, or its sessions were given up.
    pub(crate) fn rebuild_under_sessions(&mut self, registered_len: u64) -> bool {
        let Some(landing) = &mut self.landing else {
            return false;
        };
        let queue = landing.queue;
        // I3: the new socket counts from 0, so what the old one dropped is looked at now.
        let statistics = self.nic.statistics(queue).unwrap_or_default();
        if !same_drops(&statistics, &landing.statistics) {
            self.abort_landing(Violation::Statistics);
            return false;
        }
        // I4: no CPU is inside the gate with a session. What it accepted until then is on the ring, and is not looked
        // at: its sender is asked for it again.
        let taken = landing.sessions.taken();
        let closed = (landing.sessions.taken())
            .try_for_each(|place| self.nic.close_session(queue, u32::from(place)))
            .and_then(|()| self.nic.quiesce(queue));
        let position = landing.log.producer();
        let mut sessions = std::mem::replace(&mut landing.sessions, Sessions::new(position, 0));
        if closed.is_err() || self.rebuild_landing(registered_len).is_err() {
            // The zones stay quarantined, and every later request is refused.
            self.counters.landing_lost += 1;
            self.landing = None;
            for inbound in sessions.iter_mut() {
                self.report_given_up(inbound);
            }
            return false;
        }
        let Some(landing) = &mut self.landing else {
            return false;
        };
        self.counters.drops.landing_discarded +=
            sessions.forget_entries(position, &mut landing.arena, &self.umem);
        landing.sessions = sessions;
        for place in taken {
            let Some(inbound) = landing.sessions.at_mut(place) else {
                continue;
            };
            let resumed = SessionAdmission {
                first_message: inbound.unsettled_from(),
                ..inbound.terms.admission
            };
            if self.nic.open_session(queue, &resumed).is_err() {
                self.counters.landing_lost += 1;
            }
            inbound.terms.registered_len = registered_len;
            inbound.resume(&mut landing.log);
        }
        landing.statistics = self.nic.statistics(queue).unwrap_or_default();
        self.show_landed(self.now_ns);
        true
    }

    /// Ends our own sessions that sent on a channel which is gone.
    fn end_sessions_on(&mut self, channel: usize) {
        for position in (0..self.senders.len()).rev() {
            let index = self.senders[position];
            let outbound = self.peers.at(index).outbound.as_ref();
            if outbound.is_some_and(|outbound| outbound.terms.channel == channel) {
                self.end_session(index, self.now_ns);
            }
        }
    }

    /// Reports messages that were given up, to the application and to their sender.
    fn report_given_up(&mut self, inbound: &mut Inbound) -> Vec<crate::landing::Zone> {
        let (given_up, zones) = inbound.give_up();
        let (peer, key) = (inbound.terms.peer, inbound.terms.key);
        self.book_repair(peer, std::mem::take(&mut inbound.repair));
        for message in given_up {
            // To a sender that repeats what is missing this would be a request.
            if inbound.terms.delivery != Delivery::Reliable {
                self.report_missing(peer, key, &message);
            }
            self.report_incomplete(peer, message);
        }
        zones
    }

    /// Tells the sender what is missing of a message that is settled without it.
    pub(crate) fn report_missing(&mut self, peer: PeerId, session_key: u64, message: &GivenUp) {
        let mut payload = [0u8; RANGES_MAX * MissingRange::LEN];
        let ranges = message.missing.len().min(RANGES_MAX);
        for (at, range) in message.missing.iter().take(ranges).enumerate() {
            let encoded = MissingRange {
                first: range.start,
                len: range.end - range.start,
            }
            .encode();
            payload[at * MissingRange::LEN..][..MissingRange::LEN].copy_from_slice(&encoded);
        }
        let header = LmHeader::Missing {
            session_key,
            message: message.number,
            ranges: ranges as u32,
            manifest: false,
        };
        if self.peers.named(peer).is_some() {
            self.send_packet(peer.index, &header, &payload[..ranges * MissingRange::LEN]);
        }
    }

    /// Tells the application that a message was given up.
    pub(crate) fn report_incomplete(&mut self, peer: PeerId, message: GivenUp) {
        self.counters.messages_incomplete += 1;
        if self.failures.len() == FAILURES_MAX {
            self.failures.pop_front();
        }
        self.failures.push_back(RecvError::Incomplete {
            peer,
            number: message.number,
            tag: message.tag,
            len: message.len,
            missing: message.missing,
        });
    }
}

impl<N: Nic> Landing for Engine<N> {
    fn open(&mut self, queue: u16, application: &Application<'_>, permit: &Permit) -> Result<Terms, Refusal> {
        let request = application.request;
        let Some(landing) = &self.landing else {
            return Err(RejectReason::Unsupported.into());
        };
        let Some(place) = landing.sessions.free_place(request.wire == Wire::IpFrag) else {
            return Err(Refusal::busy(Duration::from_millis(50)));
        };
        let layout = request
            .layout_at(self.fixed.mtu, self.fixed.link)
            .map_err(|_| RejectReason::Unsupported)?;
        if layout.payload_len() < crate::integrity::PAYLOAD_LEN_MIN {
            return Err(RejectReason::Unsupported.into());
        }
        let max_message_len = permit.max_message_len.min(layout.max_message_len());
        if request.max_message_len > max_message_len {
            return Err(Refusal::too_large(max_message_len));
        }
        let largest = layout
            .session_message(request.max_message_len)
            .map_err(|_| RejectReason::Unsupported)?;
        let zone_len = ZoneShape::new(&largest, self.fixed.chunk_len, 0).total_len();
        let from = SocketAddrV4::new(*application.from.ip(), request.data_port);
        // One session for each sender. A sender that began anew waits for the lease of the old one: whoever asks may have
        // forged its address.
        let peers = &mut self.peers;
        let is_from =
            |inbound: &Inbound| (peers.named(inbound.terms.peer)).is_some_and(|peer| peer.data == from);
        if landing.sessions.iter().any(is_from) {
            return Err(Refusal::busy(Duration::from_millis(50)));
        }
        let Some(mac) = self.nic.neighbour(*from.ip()) else {
            return Err(Refusal::busy(NEIGHBOUR_RETRY));
        };
        let messages_in_flight = request.messages_in_flight.clamp(1, IN_FLIGHT_MESSAGES_MAX);
        self.grow_landing(self.landing_len_for(zone_len, messages_in_flight))?;
        let addressing = self.addressing_to(from, mac);
        let now_ns = self.now_ns;
        let Some(index) = self.peers.find_or_add(from, &addressing, now_ns) else {
            return Err(Refusal::busy(Duration::from_millis(100)));
        };
        // An earlier peer at this address may have had another neighbour.
        self.peers.at(index).addressing = addressing;
        let peer = self.peers.id_of(index);

        let window_len = request.window.fragments().min(LANDING_RING_LEN / 4);
        let window = WindowShape::new(window_len).unwrap_or(WindowShape::DEFAULT);
        // The gate finds the session by four bits of its key.
        let key = SessionAdmission::key_at(random_u64(), u32::from(place));
        let key = with_digests(key, request.integrity.has_digests());
        let first_message = match request.wire {
            Wire::Lm => 0,
            // IP fragments carry no key, only the number's low half: a late packet of an earlier session must not
            // pass for one of this.
            Wire::IpFrag => random_u64() as u32,
        };
        let hint = self.fixed.tx_queue_hint;
        let on_the_way = self.fixed.on_the_way.of(request.paced);
        let admission = SessionAdmission {
            key,
            wire: match request.wire {
                Wire::Lm => lm_ebpf::Wire::Lm,
                Wire::IpFrag => lm_ebpf::Wire::IpFrag,
            },
            peer_ip: *from.ip(),
            peer_port: from.port(),
            local_ip: *self.nic.local().ip(),
            header_len: layout.header_len(),
            payload_len: layout.payload_len(),
            window_fragments: window.fragments(),
            first_message,
        };
        let terms = InboundTerms {
            peer,
            key,
            layout,
            window,
            chunk_len: self.fixed.chunk_len,
            prefix: 0,
            first_message,
            messages_in_flight,
            on_the_way,
            posted_max: on_the_way.saturating_mul(2).min(self.fixed.landing_ring_len),
            delivery: request.delivery,
            integrity: request.integrity,
            in_order: self.config.in_order,
            max_message_len: request.max_message_len,
            registered_len: 0,
            one_processor: self.fixed.one_processor,
            admission,
        };
        if self.nic.open_session(u32::from(queue), &admission).is_err() {
            return Err(RejectReason::NoMemory.into());
        }
        // Packets of the last session at this place are all on the ring now; they must not be taken for this one's.
        let violations = self.counters.violations.total();
        while self.receive_landing(now_ns) > 0 {}
        let Some(landing) = &mut self.landing else {
            return Err(RejectReason::Unsupported.into());
        };
        if self.counters.violations.total() != violations {
            let _ = self.nic.close_session(u32::from(queue), u32::from(place));
            return Err(Refusal::busy(Duration::from_millis(50)));
        }
        if landing.sessions.is_empty() {
            landing.statistics = self.nic.statistics(landing.queue).unwrap_or_default();
        }
        let terms = InboundTerms {
            registered_len: landing.registered_len,
            ..terms
        };
        (landing.sessions).insert(Inbound::new(terms, &landing.arena, now_ns));
        self.peers.at(index).inbound += 1;
        self.counters.sessions_granted += 1;
        Ok(Terms {
            session_key: key,
            data_port: self.nic.local().port(),
            layout,
            tx_queue_hint: hint,
            prefix: 0,
            frames_per_packet: 1,
            max_message_len: request.max_message_len,
            window,
            packet_limit: 0,
            first_message,
        })
    }

    fn close(&mut self, session: &Session, reason: CloseReason) -> u32 {
        let queue = u32::from(session.grant.landing_queue);
        let key = session.grant.session_key;
        let Some(landing) = &mut self.landing else {
            return 0;
        };
        let Some(place) = landing.sessions.keyed(key).map(|inbound| inbound.place()) else {
            return 0;
        };
        // I4: after this no CPU is inside the gate with the session, so every packet that it accepted has its descriptor.
        // While others go on nobody waits for that: what comes late belongs to nobody then.
        let last = landing.sessions.taken().count() == 1;
        let mut closed = self.nic.close_session(queue, u32::from(place));
        if last {
            closed = closed.and_then(|()| self.nic.quiesce(queue));
        }
        if closed.is_err() {
            self.counters.control_send_errors += 1;
        }
        // What has arrived counts, although the end of the session overtook it.
        if reason != CloseReason::Local {
            let violations = self.counters.violations.total();
            while self.receive_landing(self.now_ns) > 0 && self.counters.violations.total() == violations {}
        }
        let Some(landing) = &mut self.landing else {
            return 0;
        };
        let Some(mut inbound) = landing.sessions.remove(place) else {
            return 0;
        };
        self.counters.repair(std::mem::take(&mut landing.sessions.repair));
        self.notices.remember(inbound.terms.key);
        let (peer, repair) = (inbound.terms.peer, std::mem::take(&mut inbound.repair));
        self.book_repair(peer, repair);
        if let Some(peer) = self.peers.named(peer) {
            peer.inbound -= 1;
        }
        let delivered = inbound.delivered.wrapping_sub(inbound.terms.first_message);
        let idle = inbound.is_idle();
        let zones = self.report_given_up(&mut inbound);
        let Some(landing) = &mut self.landing else {
            return delivered;
        };
        // I1: nothing of them is free before every posted entry was used.
        landing.sessions.entries.quarantine_all(zones);
        if !last || (idle && landing.sessions.entries.are_used()) {
            landing.sessions.entries.free_quarantined(&mut landing.arena);
        } else {
            let registered_len = landing.registered_len;
            self.flush();
            if self.rebuild_landing(registered_len).is_err() {
                // Without a landing channel every later request is refused as unsupported; the zones stay
                // quarantined.
                self.counters.landing_lost += 1;
                return delivered;
            }
        }
        self.counters.sessions_ended += 1;
        delivered
    }
}

/// The delivery that a session has. IP fragments carry no session key, so there is no way to repeat one.
fn delivery_of(options: &ConnectOptions) -> Delivery {
    match options.wire {
        Wire::Lm => options.delivery,
        Wire::IpFrag => Delivery::Unreliable,
    }
}

/// The rings and the role of a landing channel.
pub(crate) fn landing_channel(queue: u32, registered_len: u64, ring_len: u32) -> ChannelConfig {
    ChannelConfig {
        queue,
        role: Role::Landing,
        registered_len,
        fill_len: ring_len,
        rx_len: ring_len,
        tx_len: TRANSMIT_RING_LEN,
        completion_len: TRANSMIT_RING_LEN,
    }
}

/// Random bits from the kernel: session keys and incarnations must not be guessed.
pub(crate) fn random_u64() -> u64 {
    let mut bytes = [0u8; 8];
    let mut filled = 0;
    while filled < bytes.len() {
        match rustix::rand::getrandom(&mut bytes[filled..], rustix::rand::GetRandomFlags::empty()) {
            Ok(count) => filled += count,
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => panic!("the kernel gives no random numbers: {error}"),
        }
    }
    u64::from_ne_bytes(bytes)
}
