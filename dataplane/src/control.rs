//! Control: admission messages on the control port, and the sessions that we ask for. The state machines are
//! `lm_protocol::session`; what others have with us is `granting.rs`.

use std::net::SocketAddrV4;
use std::time::Duration;

use lm_protocol::control::{ControlError, ControlMessage, End, Ended, Grant, MAX_CONTROL_LEN, Request};
use lm_protocol::delivery::Delivery;
use lm_protocol::geometry::Wire;
use lm_protocol::session::{Applicant, ApplicantState, Farewell, FarewellState};
use lm_protocol::time::Time;
use lm_protocol::wire::Addressing;
use lm_protocol::wire::lm::LmError;

use crate::bounds::{IN_FLIGHT_MESSAGES_MAX, TRANSMIT_RING_LEN};
use crate::completion::Outcome;
use crate::config::ConnectOptions;
use crate::engine::{Engine, LandingSide};
use crate::error::ConnectError;
use crate::introductions::Back;
use crate::notices::Fault;
use crate::outbound::{Outbound, OutboundTerms};
use crate::port::{Port, PortError, QueueSpec, Role, Socket, SocketEvent};
use crate::scheduler::Transmit;
use crate::stewarded::Asking;

/// A control datagram is shorter than this.
const CONTROL_LEN_MAX: usize = 512;
/// Control datagrams taken in one round.
pub(crate) const CONTROL_PER_LOOK: usize = 64;

/// A request for a session, and the end of one, on their way.
#[derive(Debug)]
pub(crate) struct Applying {
    pub(crate) peer: u16,
    /// Where it is asked, and by which port.
    pub(crate) to: SocketAddrV4,
    pub(crate) socket: Socket,
    /// Who asks: we, or the daemon of this host.
    pub(crate) applicant: Option<Applicant>,
    pub(crate) asking: Option<Asking>,
    pub(crate) options: ConnectOptions,
    pub(crate) begun_ns: u64,
    /// A session by the one-copy path was asked for meanwhile.
    pub(crate) started: bool,
}

impl Applying {
    /// Our own request, if it went to this address.
    fn applicant_at(&mut self, from: SocketAddrV4) -> Option<&mut Applicant> {
        self.applicant.as_mut().filter(|_| self.to == from)
    }
}

/// The end of a session, until it is confirmed.
#[derive(Debug)]
pub(crate) struct Leaving {
    pub(crate) to: SocketAddrV4,
    pub(crate) socket: Socket,
    pub(crate) farewell: Farewell,
}

impl<P: Port> Engine<P> {
    /// Stage 5, second half.
    pub(crate) fn receive_control(&mut self, now_ns: u64) -> usize {
        let mut count = 0;
        let mut datagram = [0u8; CONTROL_LEN_MAX];
        // Bounded: whoever floods the port must not keep the other stages waiting.
        while count < CONTROL_PER_LOOK
            && let Ok(Some(event)) = self.port.side().recv(Socket::Control, &mut datagram)
        {
            count += 1;
            match event {
                SocketEvent::Datagram { from, len } => self.take_control(from, &datagram[..len], now_ns),
                SocketEvent::Refused(by) => self.take_refusal(by),
                SocketEvent::TooLong(from) => {
                    self.counters.control_packets += 1;
                    self.reject(Fault::Malformed, from);
                }
            }
        }
        count
    }

    fn take_control(&mut self, from: SocketAddrV4, datagram: &[u8], now_ns: u64) {
        self.counters.control_packets += 1;
        self.take_admission(Socket::Control, from, ControlMessage::parse(datagram), now_ns);
    }

    /// A message of the admission protocol, and its number. What comes to the control port is about sessions that land, what comes
    /// to the data port is about those by the one-copy path ([`crate::one_copy`]).
    pub(crate) fn take_admission(
        &mut self,
        socket: Socket,
        from: SocketAddrV4,
        parsed: Result<(u32, ControlMessage), ControlError>,
        now_ns: u64,
    ) {
        let now = Time::from_nanos(now_ns);
        match parsed {
            Ok((_, ControlMessage::Challenge(challenge))) => {
                self.take_challenge(socket, from, &challenge, now_ns);
            }
            Ok((_, ControlMessage::Proof(proof))) => self.take_proof(from, &proof, None, now_ns),
            Ok((request_id, message @ (ControlMessage::Request(_) | ControlMessage::End(_)))) => {
                if let ControlMessage::Request(request) = &message {
                    let data = SocketAddrV4::new(*from.ip(), request.data_port);
                    let back = Back::Datagram(socket, from, request_id);
                    if !self.hears(data, request.sender_id, &back, now_ns) {
                        return;
                    }
                }
                let Some(mut grants) = self.grants.take() else {
                    self.reject(Fault::Answer, from);
                    return;
                };
                let is_for_nothing = match &message {
                    ControlMessage::End(end) if *end != End::WITHDRAWN => (grants.of(socket))
                        .and_then(|grantor| grantor.session(end.session_key))
                        .is_none_or(|session| session.peer != from),
                    _ => false,
                };
                let reply = grants.handle(socket, from, (request_id, &message), now, self);
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
                    self.send_control(socket, from, request_id, &reply);
                }
            }
            Ok((request_id, message)) => {
                let mut is_awaited = false;
                for applying in &mut self.applying {
                    if let Some(applicant) = applying.applicant_at(from) {
                        is_awaited |= applicant.request_id() == request_id;
                        applicant.handle(request_id, &message, now);
                    }
                }
                for leaving in self.leaving.iter_mut().filter(|leaving| leaving.to == from) {
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
                    false => {
                        if let ControlMessage::Grant(grant) = message {
                            self.return_late_grant(socket, from, request_id, &grant, now_ns);
                        }
                        self.reject_for(number, Fault::Answer, from);
                    }
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
                    if let Some(applicant) = applying.applicant_at(from) {
                        applicant.handle_error(&error);
                    }
                }
                let reply = (self.grants.as_mut()).and_then(|grants| grants.of(socket)?.handle_error(&error));
                if let Some((request_id, reply)) = reply {
                    self.send_control(socket, from, request_id, &reply);
                }
            }
        }
    }

    /// The peer that is being asked for a session at this address.
    pub(crate) fn asked_at(&mut self, to: SocketAddrV4) -> Option<u16> {
        let mut asked = self.applying.iter_mut();
        asked.find_map(|applying| applying.applicant_at(to).is_some().then_some(applying.peer))
    }

    /// Repeats requests to this address by this port at once.
    pub(crate) fn ask_again(&mut self, socket: Socket, to: SocketAddrV4, now_ns: u64) {
        for applying in self
            .applying
            .iter_mut()
            .filter(|applying| applying.socket == socket)
        {
            if let Some(applicant) = applying.applicant_at(to) {
                applicant.hurry(Time::from_nanos(now_ns));
            }
        }
        self.drive_admission(now_ns);
    }

    /// ICMP says that nobody listens on a port.
    pub(crate) fn take_refusal(&mut self, by: SocketAddrV4) {
        self.peers.refused(by, self.now_ns);
        for applying in &mut self.applying {
            if let Some(applicant) = applying.applicant_at(by) {
                applicant.handle_refused();
            }
        }
        for leaving in self.leaving.iter_mut().filter(|leaving| leaving.to == by) {
            leaving.farewell.handle_refused();
        }
    }

    /// The receiver has ended a session that we still used; whether it can be right about what was delivered. `None`: there is
    /// no session with this key.
    fn take_ended(&mut self, from: SocketAddrV4, ended: &Ended, now_ns: u64) -> Option<bool> {
        let found = self.senders.iter().copied().find(|&index| {
            let peer = self.peers.at(index);
            let next = peer.successor.as_ref().map(|next| &next.outbound);
            (peer.outbound.iter()).chain(next).any(|outbound| {
                // Its program says it itself, or whoever granted it.
                let by = [peer.data, peer.admission(outbound.terms.one_copy).0];
                by.contains(&from) && outbound.terms.key == ended.session_key
            })
        });
        let index = found?;
        if self.lost_successor(index, ended.session_key, now_ns) {
            return Some(true);
        }
        // The last credit may have been lost, or be behind us.
        let outbound = self.peers.at(index).outbound.as_mut();
        let is_plausible = outbound.is_none_or(|outbound| outbound.ended(ended).is_ok());
        if is_plausible {
            self.lose_session(index, ended.heard, now_ns);
        } else {
            self.reject(Fault::Ended, from);
            self.drop_outbound(index, &Outcome::SessionEnded, now_ns);
        }
        Some(is_plausible)
    }

    pub(crate) fn send_control(
        &mut self,
        socket: Socket,
        to: SocketAddrV4,
        request_id: u32,
        message: &ControlMessage,
    ) {
        let mut datagram = [0u8; MAX_CONTROL_LEN];
        let len = message.encode(request_id, &mut datagram);
        // A control message that cannot be sent now is as good as lost on the way: it is repeated.
        if self.port.side().send(socket, to, &datagram[..len]).is_err() {
            self.counters.control_send_errors += 1;
        }
    }

    /// Asks a peer for a session.
    pub(crate) fn apply(&mut self, index: u16, options: &ConnectOptions, now_ns: u64) {
        let request = Request {
            sender_id: self.fixed.sender_id,
            data_port: self.port.local().port(),
            mtu: self.fixed.mtu,
            wire: options.wire,
            link: self.fixed.link,
            max_message_len: options.max_message_len,
            window: self.fixed.window,
            messages_in_flight: options.messages_in_flight.clamp(1, IN_FLIGHT_MESSAGES_MAX),
            paced: self.fixed.paced,
            delivery: delivery_of(options),
            integrity: self.config.integrity,
        };
        let request_id = self.entropy.draw() as u32;
        let peer = self.peers.at(index);
        peer.applying = true;
        if !options.one_copy || peer.options.is_none() {
            peer.options = Some(*options);
        }
        let deadline_ns = now_ns.saturating_add(options.timeout.as_nanos() as u64);
        let (to, socket) = self.peers.at(index).admission(options.one_copy);
        let receiver = self.peers.at(index).data;
        let asking = match options.one_copy {
            true => None,
            false => self.ask_daemon(receiver, request, request_id, deadline_ns),
        };
        let applicant = match &asking {
            Some(_) => None,
            None => Some(Applicant::new(
                request,
                request_id,
                Time::from_nanos(now_ns),
                options.timeout,
            )),
        };
        self.applying.push(Applying {
            peer: index,
            to,
            socket,
            applicant,
            asking,
            options: *options,
            begun_ns: now_ns,
            started: false,
        });
    }

    /// Drives requests and farewells that are on their way.
    pub(crate) fn drive_admission(&mut self, now_ns: u64) {
        let now = Time::from_nanos(now_ns);
        self.start_by_one_copy(now_ns);
        for position in 0..self.applying.len() {
            if let Some(mut asking) = self.applying[position].asking.take() {
                self.drive_asking(&mut asking, now_ns);
                self.applying[position].asking = Some(asking);
            }
            let (to, socket) = (self.applying[position].to, self.applying[position].socket);
            while let Some(applicant) = &mut self.applying[position].applicant
                && let Some(message) = applicant.poll_transmit(now)
            {
                let request_id = applicant.request_id();
                self.send_control(socket, to, request_id, &message);
            }
        }
        for position in 0..self.leaving.len() {
            let leaving = &mut self.leaving[position];
            let (to, socket, request_id) = (leaving.to, leaving.socket, leaving.farewell.request_id());
            if let Some(message) = leaving.farewell.poll_transmit(now) {
                self.send_control(socket, to, request_id, &message);
            }
        }
        self.leaving
            .retain(|leaving| *leaving.farewell.state() == FarewellState::Pending);
    }

    /// The outcome of what a peer was asked for, once there is one.
    ///
    /// # Errors
    /// Why there is no session.
    pub(crate) fn application_outcome(
        &mut self,
        index: u16,
        now_ns: u64,
    ) -> Option<Result<(), ConnectError>> {
        let landing = self.outcome_of(index, false, now_ns);
        if let Some(Ok(())) = landing {
            self.withdraw(index, true, now_ns);
            return landing;
        }
        let one_copy = self.outcome_of(index, true, now_ns);
        match (landing, one_copy) {
            (_, Some(Ok(()))) => Some(Ok(())),
            (Some(error), _) => {
                self.withdraw(index, true, now_ns);
                Some(error)
            }
            // The other one is still waited for.
            (None, Some(_)) if self.peers.at(index).applying => None,
            (None, outcome) => outcome,
        }
    }

    /// The outcome of the request for a session that lands, or for one by the one-copy path.
    fn outcome_of(&mut self, index: u16, one_copy: bool, now_ns: u64) -> Option<Result<(), ConnectError>> {
        let position = self.position_of(index, one_copy)?;
        let outcome = self.request_outcome(position)?;
        let options = self.no_longer_applying(position, now_ns);
        let outbound = outcome.and_then(|grant| self.granted(index, &grant, &options, now_ns));
        Some(outbound.map(|outbound| {
            self.peers.at(index).outbound = Some(outbound);
            if !self.senders.contains(&index) {
                self.senders.push(index);
            }
            self.hand_over_again(index, now_ns);
        }))
    }

    /// Where the request for a session of a kind with a peer stands in `applying`.
    pub(crate) fn position_of(&self, index: u16, one_copy: bool) -> Option<usize> {
        let is_it = |applying: &Applying| applying.peer == index && applying.options.one_copy == one_copy;
        self.applying.iter().position(is_it)
    }

    /// The grant of a request, or why there is none; `None` while it is pending.
    pub(crate) fn request_outcome(&mut self, position: usize) -> Option<Result<Grant, ConnectError>> {
        let applying = &mut self.applying[position];
        let (index, peer) = (applying.peer, applying.to);
        if let Some(mut asking) = applying.asking.take() {
            let outcome = self.asking_outcome(index, &mut asking);
            self.applying[position].asking = Some(asking);
            return outcome;
        }
        Some(match *applying.applicant.as_ref()?.state() {
            ApplicantState::Pending => return None,
            ApplicantState::Granted(grant) => Ok(grant),
            ApplicantState::Rejected(reject) => Err(ConnectError::Rejected {
                peer,
                reason: reject.reason,
                limit: reject.limit,
                version: reject.version,
            }),
            ApplicantState::NotListening => Err(ConnectError::NotListening { peer }),
            ApplicantState::Unreachable => Err(ConnectError::Unreachable { peer }),
            _ => Err(ConnectError::Incompatible { peer }),
        })
    }

    /// A request is over. Gives what it was for.
    pub(crate) fn no_longer_applying(&mut self, position: usize, now_ns: u64) -> ConnectOptions {
        if self.applying[position].applicant.is_some() {
            // A grant that we do not want is given back.
            self.drive_admission(now_ns);
        }
        let Applying {
            peer,
            applicant,
            options,
            ..
        } = self.applying.swap_remove(position);
        if let Some(applicant) = applicant {
            self.notices.remember(applicant.request_id().into());
        }
        self.peers.at(peer).applying = self.applying.iter().any(|applying| applying.peer == peer);
        options
    }

    /// The sender's side of a granted session.
    pub(crate) fn granted(
        &mut self,
        index: u16,
        grant: &Grant,
        options: &ConnectOptions,
        now_ns: u64,
    ) -> Result<Outbound, ConnectError> {
        // The grant tells what the receiver sees; its device may have another idea of VLAN tags than ours.
        let layout = (grant.layout.on_link(self.fixed.link).ok())
            .filter(|layout| layout.payload_len() >= crate::fragment_digests::PAYLOAD_LEN_MIN);
        let Some(layout) = layout else {
            let (peer, _) = self.end_session_key(index, options.one_copy, grant.session_key, 0, now_ns);
            return Err(ConnectError::Incompatible { peer });
        };
        let channel = match (options.one_copy, self.scheduler.general()) {
            (true, Some(general)) => Ok(general),
            _ => self.transmit_for(grant.tx_queue_hint),
        };
        let channel = match channel {
            Ok(channel) => channel,
            Err(error) => {
                self.end_session_key(index, options.one_copy, grant.session_key, 0, now_ns);
                return Err(error);
            }
        };
        Ok(Outbound::new(
            OutboundTerms {
                key: grant.session_key,
                layout,
                window: grant.window,
                packet_limit: grant.packet_limit,
                first_message: grant.first_message,
                messages_in_flight: options.messages_in_flight.clamp(1, IN_FLIGHT_MESSAGES_MAX),
                max_message_len: grant.max_message_len,
                delivery: delivery_of(options),
                integrity: self.integrity_of(layout.wire(), grant.session_key),
                lease_ns: u64::from(grant.lease_ms) * 1_000_000,
                channel,
                plain: false,
                one_copy: options.one_copy,
                repeats_apart: grant.repeats_apart,
                landing_port: grant.landing_port,
                rate: options.rate,
            },
            now_ns,
        ))
    }

    /// The channel whose packets reach the receiver's landing queue. On veth the sender's queue selects the
    /// receiver's; the receiver says which in its grant. Other devices spread by what is in the packet.
    fn transmit_for(&mut self, hint: Option<u16>) -> Result<usize, ConnectError> {
        let Some(queue) = hint.filter(|_| self.fixed.veth) else {
            let landing = self.landing.as_ref().filter(|landing| landing.is_open);
            return Ok(landing.map_or(0, |landing| landing.transmit));
        };
        let queue = u32::from(queue);
        // A landing channel that was lost gets its queue again. What we send meanwhile comes to another one of the receiver.
        let is_lost = |landing: &LandingSide<P::Rx>| landing.queue == queue && !landing.is_open;
        if self.landing.as_ref().is_some_and(is_lost) {
            return Ok(0);
        }
        if let Some(found) = self.scheduler.find(queue) {
            return Ok(found);
        }
        let spec = QueueSpec {
            queue,
            role: Role::SendOnly,
            copies: false,
            registered_len: self.fixed.transmit_registered_len,
            capacity: 0,
            // It receives nothing, but the kernel wants rings of some length.
            rx_len: 64,
            tx_len: TRANSMIT_RING_LEN,
        };
        let tx = match self.port.open_to_send(&spec) {
            Ok(tx) => tx,
            // Another program of this host has the queue. What we send comes to another queue of the receiver, and takes the one-copy path.
            Err(source @ PortError::Denied(_)) => {
                tracing::warn!("messages are copied once more at their receiver: {source}");
                return Ok(0);
            }
            Err(source) => return Err(ConnectError::Queue { queue, source }),
        };
        let in_flight = self.config.tx_in_flight;
        Ok(self.scheduler.add(Transmit::new(queue, tx, in_flight)))
    }

    /// Ends the session that messages to a peer go by; if there is a successor, it takes over. Unconfirmed messages are settled as
    /// `outcome`.
    pub(crate) fn drop_outbound(&mut self, index: u16, outcome: &Outcome, now_ns: u64) {
        self.settle_outbound(index, Some(outcome), now_ns);
        if let Some(outbound) = self.peers.at(index).outbound.take() {
            self.notices.remember(outbound.terms.key);
            let messages = outbound.next_number.wrapping_sub(outbound.terms.first_message);
            self.end_ticket(outbound.terms.key, messages);
            if self.take_over(index, outbound) {
                return;
            }
        }
        self.senders.retain(|&sender| sender != index);
        // Nothing is there any more that a session which lands could take over from.
        self.withdraw(index, false, now_ns);
    }

    /// Tells the receiver that its session is over, until it confirms.
    pub(crate) fn end_session(&mut self, index: u16, now_ns: u64) {
        self.peers.at(index).options = None;
        if std::mem::take(&mut self.peers.at(index).reopening) {
            self.withdraw(index, false, now_ns);
            self.withdraw(index, true, now_ns);
            self.hand_over_again(index, now_ns);
        }
        self.end_successor(index, now_ns);
        let Some(outbound) = &self.peers.at(index).outbound else {
            return;
        };
        let (key, plain, one_copy) = (outbound.terms.key, outbound.terms.plain, outbound.terms.one_copy);
        let messages = outbound.next_number.wrapping_sub(outbound.terms.first_message);
        if outbound.has_digests_to_tell() {
            // What has left counts, as far as it can be verified.
            self.announce(index, now_ns);
        }
        self.drop_outbound(index, &Outcome::SessionEnded, now_ns);
        if !plain {
            self.end_session_key(index, one_copy, key, messages, now_ns);
        }
    }

    /// Gives the address that is told, and the port that it goes by.
    pub(crate) fn end_session_key(
        &mut self,
        index: u16,
        one_copy: bool,
        key: u64,
        messages: u32,
        now_ns: u64,
    ) -> (SocketAddrV4, Socket) {
        self.notices.remember(key);
        let (to, socket) = self.peers.at(index).admission(one_copy);
        if !one_copy && self.stewarded.has_daemon() {
            self.end_ticket(key, messages);
            return (to, socket);
        }
        self.say_farewell(to, socket, key, messages, now_ns);
        (to, socket)
    }

    pub(crate) fn say_farewell(
        &mut self,
        to: SocketAddrV4,
        socket: Socket,
        key: u64,
        messages: u32,
        now_ns: u64,
    ) {
        let farewell = Farewell::new(
            key,
            messages,
            self.entropy.draw() as u32,
            Time::from_nanos(now_ns),
            Duration::from_millis(700),
        );
        self.leaving.push(Leaving { to, socket, farewell });
        self.drive_admission(now_ns);
    }

    /// Addressing of answers to a datagram that came by the kernel's socket.
    pub(crate) fn addressing_of_sender(&mut self, from: SocketAddrV4) -> Option<Addressing> {
        if let Some(index) = self.peers.find(from) {
            return Some(self.peers.at(index).addressing);
        }
        let mac = self.port.side().neighbour(*from.ip())?;
        Some(self.addressing_to(from, mac))
    }
}

/// The delivery that a session has. IP fragments carry no session key, so there is no way to repeat one.
fn delivery_of(options: &ConnectOptions) -> Delivery {
    match options.wire {
        Wire::Lm => options.delivery,
        Wire::IpFrag => Delivery::Unreliable,
    }
}
