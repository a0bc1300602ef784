//! Control: admission messages on the control port, and the sessions that we ask for. The state machines are
//! `lm_protocol::admission`, run in `nodes.rs` or by the daemon; what others have with us is `granting.rs`.

use std::net::SocketAddrV4;
use std::time::Duration;

use lm_protocol::admission::{Decision, Outcome as Admitted, Taken, Ticket};
use lm_protocol::control::{ControlMessage, Ended, Grant, MAX_CONTROL_LEN, RejectReason, Request};
use lm_protocol::delivery::Delivery;
use lm_protocol::geometry::Wire;
use lm_protocol::wire::Addressing;

use crate::bounds::{IN_FLIGHT_MESSAGES_MAX, TRANSMIT_RING_LEN};
use crate::completion::Outcome;
use crate::config::ConnectOptions;
use crate::daemon::DaemonError;
use crate::engine::{Engine, LandingSide};
use crate::error::ConnectError;
use crate::introductions::Back;
use crate::notices::Fault;
use crate::outbound::{Outbound, OutboundTerms};
use crate::port::{Port, PortError, QueueSpec, Role, Socket, SocketEvent};
use crate::scheduler::Transmit;

/// A control datagram is shorter than this.
const CONTROL_LEN_MAX: usize = 512;
/// A request that cannot be made now is made again after this time.
const ASK_AGAIN_NS: u64 = 50_000_000;
/// The daemon may say so much later than the deadline that a request is over.
const DAEMON_PATIENCE_NS: u64 = 2_000_000_000;
/// Control datagrams taken in one round.
pub(crate) const CONTROL_PER_LOOK: usize = 64;

/// A request for a session, on its way.
#[derive(Debug)]
pub(crate) struct Applying {
    pub(crate) peer: u16,
    /// The address that is asked.
    to: SocketAddrV4,
    pub(crate) options: ConnectOptions,
    request: Request,
    deadline_ns: u64,
    /// Its number, while our own node or the daemon asks for us.
    pub(crate) ticket: Option<u32>,
    /// When it is asked for again, while nobody does.
    again_ns: u64,
    outcome: Option<Admitted>,
    error: Option<ConnectError>,
}

/// A session that we have as sender, as it is known to whoever asked for it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Held {
    ticket: u32,
    key: u64,
    peer: u16,
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
                SocketEvent::Datagram { from, len } => {
                    self.counters.control_packets += 1;
                    self.take_control(from, &datagram[..len], now_ns);
                }
                SocketEvent::Refused(by) => self.take_refusal(by),
                SocketEvent::TooLong(from) => {
                    self.counters.control_packets += 1;
                    self.reject(Fault::Malformed, from);
                }
            }
        }
        count
    }

    pub(crate) fn take_control(&mut self, from: SocketAddrV4, datagram: &[u8], now_ns: u64) {
        match ControlMessage::parse(datagram) {
            Ok((number, message)) if self.config.key.is_none() => {
                self.take_admission(Socket::Control, from, number, &message, now_ns);
            }
            // Sealed; or of another version, which is answered.
            _ => {
                let taken = self.with_node(now_ns, |node, now, local, out| {
                    node.on_datagram(now, from, datagram, local, out)
                });
                self.book(taken.unwrap_or(Taken::Malformed), None, from);
            }
        }
    }

    /// A message of the admission protocol, and its number. To the data port come introductions, and what a receiver says itself about the
    /// end of a session.
    pub(crate) fn take_admission(
        &mut self,
        socket: Socket,
        from: SocketAddrV4,
        number: u32,
        message: &ControlMessage,
        now_ns: u64,
    ) {
        let mut about = u64::from(number);
        let mut is_known = false;
        match message {
            ControlMessage::Challenge(challenge) => {
                return self.take_challenge(socket, from, challenge, now_ns);
            }
            ControlMessage::Proof(proof) => return self.take_proof(from, proof, None, now_ns),
            ControlMessage::Request(request) if socket == Socket::Control => {
                let data = SocketAddrV4::new(*from.ip(), request.data_port);
                let back = Back::Datagram(socket, from, number);
                if !self.hears(data, request.sender_id, &back, now_ns) {
                    return;
                }
            }
            ControlMessage::Ended(ended) => {
                about = ended.session_key;
                match self.take_ended(from, ended, now_ns) {
                    // Counted as what it is.
                    Some(false) => return,
                    taken => is_known = taken.is_some(),
                }
            }
            _ => {}
        }
        let taken = match socket {
            Socket::Control => self.with_node(now_ns, |node, now, local, out| {
                node.on_message(now, from, (number, message), local, out)
            }),
            Socket::Data => None,
        };
        match taken {
            _ if is_known => self.counters.packets_used += 1,
            Some(taken) => self.book(taken, Some(about), from),
            None => self.reject(Fault::Answer, from),
        }
    }

    /// Counts a datagram as what it was, `about` this session or request.
    fn book(&mut self, taken: Taken, about: Option<u64>, from: SocketAddrV4) {
        match taken {
            Taken::Used | Taken::Stranger => self.counters.packets_used += 1,
            // A repetition of one whose session is over.
            Taken::Late => self.counters.drops.late += 1,
            Taken::WrongKey(key) => self.reject_for(key, Fault::Key, from),
            Taken::Unasked(number) => {
                self.reject_for(about.unwrap_or(number.into()), Fault::Answer, from);
            }
            Taken::Refused => self.reject(Fault::Refused, from),
            Taken::OtherVersion => self.reject(Fault::Version, from),
            Taken::Unproved => self.reject(Fault::Proof, from),
            _ => self.reject(Fault::Malformed, from),
        }
    }

    /// The peer that our own node asks for a session at this address of a control port.
    pub(crate) fn asked_at(&self, to: SocketAddrV4) -> Option<u16> {
        let is_it = |applying: &&Applying| applying.to == to && applying.ticket.is_some();
        self.applying.iter().find(is_it).map(|applying| applying.peer)
    }

    /// Repeats requests to this address at once.
    pub(crate) fn ask_again(&mut self, to: SocketAddrV4, now_ns: u64) {
        self.with_node(now_ns, |node, now, local, out| node.hurry(now, to, local, out));
    }

    /// ICMP says that nobody listens on a port.
    pub(crate) fn take_refusal(&mut self, by: SocketAddrV4) {
        let now_ns = self.now_ns;
        self.peers.refused(by, now_ns);
        self.with_node(now_ns, |node, now, local, out| {
            node.on_refused(now, by, local, out)
        });
    }

    /// The receiver has ended a session that we still used; whether it can be right about what was delivered. `None`: there is
    /// no session with this key.
    fn take_ended(&mut self, from: SocketAddrV4, ended: &Ended, now_ns: u64) -> Option<bool> {
        let found = self.senders.iter().copied().find(|&index| {
            let peer = self.peers.at(index);
            // Its program says it itself, or the node that granted it.
            [peer.data, peer.control].contains(&from)
                && (peer.outbound.as_ref()).is_some_and(|outbound| outbound.terms.key == ended.session_key)
        });
        let index = found?;
        self.forget_held(ended.session_key, now_ns);
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
        self.send_datagram(socket, to, &datagram[..len]);
    }

    pub(crate) fn send_datagram(&mut self, socket: Socket, to: SocketAddrV4, datagram: &[u8]) {
        // A control message that cannot be sent now is as good as lost on the way: it is repeated.
        if self.port.side().send(socket, to, datagram).is_err() {
            self.counters.control_send_errors += 1;
        }
    }

    /// Asks a peer for a session.
    pub(crate) fn apply(&mut self, index: u16, options: &ConnectOptions, now_ns: u64) {
        let request = Request {
            sender_id: self.fixed.sender_id,
            data_port: self.fixed.local.port(),
            mtu: self.fixed.mtu,
            wire: options.wire,
            link: self.fixed.link,
            max_message_len: options.max_message_len,
            window: self.fixed.window,
            messages_in_flight: options.messages_in_flight.clamp(1, IN_FLIGHT_MESSAGES_MAX),
            uncompleted_max: self.fixed.caps.tx_bound,
            capabilities: 0,
            delivery: delivery_of(options),
            integrity: self.config.integrity,
            lands: !options.one_copy,
        };
        let peer = self.peers.at(index);
        peer.applying = true;
        peer.options = Some(*options);
        let to = peer.control;
        self.applying.push(Applying {
            peer: index,
            to,
            options: *options,
            request,
            deadline_ns: now_ns.saturating_add(options.timeout.as_nanos() as u64),
            ticket: None,
            again_ns: now_ns,
            outcome: None,
            error: None,
        });
    }

    /// Drives requests and farewells that are on their way.
    pub(crate) fn drive_admission(&mut self, now_ns: u64) {
        self.run_node(now_ns);
        let mut position = 0;
        while position < self.applying.len() {
            self.ask(position, now_ns);
            position += 1;
        }
    }

    /// Has our own node or the daemon ask for a session, where nobody does and it is time.
    fn ask(&mut self, position: usize, now_ns: u64) {
        let by_daemon = self.stewarded.has_daemon();
        let applying = &mut self.applying[position];
        if applying.error.is_some() || applying.outcome.is_some() {
            return;
        }
        if applying.ticket.is_some() {
            if by_daemon && now_ns > applying.deadline_ns.saturating_add(DAEMON_PATIENCE_NS) {
                // It was to say something by then.
                applying.error = Some(DaemonError::Gone.into());
            }
            return;
        }
        if now_ns < applying.again_ns {
            return;
        }
        let patience_ms = applying.deadline_ns.saturating_sub(now_ns) / 1_000_000;
        if patience_ms == 0 {
            // Others receive, and went on doing so.
            applying.error = Some(ConnectError::Rejected {
                peer: applying.to,
                reason: RejectReason::Busy,
                limit: 0,
                version: lm_protocol::wire::lm::VERSION,
            });
            return;
        }
        let (to, request) = (applying.to, applying.request);
        let receiver = self.peers.at(self.applying[position].peer).data;
        // Random, so that only whoever saw the request can answer it.
        let number = self.entropy.draw() as u32;
        let decision = match by_daemon {
            true => self.ask_daemon(receiver, &request, number, patience_ms),
            false => {
                let asked = self.with_node(now_ns, |node, now, local, out| {
                    node.number_from(number);
                    let patience = Duration::from_millis(patience_ms);
                    node.request(now, to, receiver.port(), request, patience, local, out)
                });
                match asked {
                    Some(Ok(decision)) => Ok(decision),
                    // It is at work, or has as many as it can have.
                    Some(Err(_)) | None => Ok(Decision::Cancel),
                }
            }
        };
        let Some(applying) = self.applying.get_mut(position) else {
            return;
        };
        match decision {
            // LM §3.3, under exclusive admission: where others receive, and the receiver does not, it begins by the one-copy path.
            Ok(Decision::Requested(ticket) | Decision::OneCopy(ticket)) => applying.ticket = Some(ticket.0),
            // It receives from others: not to be disturbed until it is done.
            Ok(Decision::Cancel) => applying.again_ns = now_ns + ASK_AGAIN_NS,
            Err(error) => applying.error = Some(error),
        }
    }

    /// What became of a request or a session of ours.
    pub(crate) fn told(&mut self, ticket: u32, outcome: Admitted, now_ns: u64) {
        let is_it = |applying: &&mut Applying| applying.ticket == Some(ticket);
        if let Some(applying) = self.applying.iter_mut().find(is_it) {
            applying.outcome = Some(outcome);
            return;
        }
        if let Admitted::Granted(_) = outcome {
            // Nobody waits for it any more.
            return self.end_ticket(ticket, 0, now_ns);
        }
        let Some(position) = self.held.iter().position(|held| held.ticket == ticket) else {
            return;
        };
        let Held { key, peer, .. } = self.held.swap_remove(position);
        let outbound = self.peers.at(peer).outbound.as_ref();
        if outbound.is_some_and(|outbound| outbound.terms.key == key) {
            self.lose_session(peer, None, now_ns);
        }
    }

    /// A session of ours ends, in which so many messages were sent, or a request is not wanted any more.
    pub(crate) fn end_ticket(&mut self, ticket: u32, messages: u32, now_ns: u64) {
        if self.stewarded.has_daemon() {
            self.end_at_daemon(ticket, messages);
        } else {
            self.with_node(now_ns, |node, now, local, out| {
                node.end(now, Ticket(ticket), messages, local, out);
            });
        }
    }

    /// Ends a session of ours by its key, if it is still held.
    pub(crate) fn end_held(&mut self, key: u64, messages: u32, now_ns: u64) {
        self.notices.remember(key);
        if let Some(position) = self.held.iter().position(|held| held.key == key) {
            let Held { ticket, .. } = self.held.swap_remove(position);
            self.end_ticket(ticket, messages, now_ns);
        }
    }

    /// The receiver has ended a session of ours: our own node need not tell it.
    fn forget_held(&mut self, key: u64, now_ns: u64) {
        let is_it = |held: &Held| held.key == key && !self.stewarded.has_daemon();
        if let Some(position) = self.held.iter().position(is_it) {
            let Held { ticket, .. } = self.held.swap_remove(position);
            self.with_node(now_ns, |node, _, _, _| node.forget(Ticket(ticket)));
        }
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
        let position = self.position_of(index)?;
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

    /// Where the request for a session with a peer stands in `applying`.
    fn position_of(&self, index: u16) -> Option<usize> {
        self.applying.iter().position(|applying| applying.peer == index)
    }

    /// The grant of a request, or why there is none; `None` while it is pending.
    fn request_outcome(&mut self, position: usize) -> Option<Result<Grant, ConnectError>> {
        let now_ns = self.now_ns;
        let by_daemon = self.stewarded.has_daemon();
        let applying = &mut self.applying[position];
        if let Some(error) = applying.error.take() {
            return Some(Err(error));
        }
        let outcome = applying.outcome.take()?;
        let ticket = applying.ticket.take()?;
        self.notices.remember(ticket.into());
        let peer = match by_daemon {
            true => self.peers.at(applying.peer).data,
            false => applying.to,
        };
        Some(match outcome {
            Admitted::Granted(grant) => {
                self.held.push(Held {
                    ticket,
                    key: grant.session_key,
                    peer: applying.peer,
                });
                Ok(grant)
            }
            Admitted::Rejected(reject)
                if reject.reason == RejectReason::Busy && now_ns + ASK_AGAIN_NS < applying.deadline_ns =>
            {
                applying.again_ns = now_ns + ASK_AGAIN_NS;
                return None;
            }
            Admitted::Rejected(reject) => Err(ConnectError::Rejected {
                peer,
                reason: reject.reason,
                limit: reject.limit,
                version: reject.version,
            }),
            Admitted::Incompatible => Err(ConnectError::Incompatible { peer }),
            Admitted::Unreachable if by_daemon => Err(ConnectError::NoDaemon { peer }),
            Admitted::NotListening => Err(ConnectError::NotListening { peer }),
            _ if by_daemon => Err(DaemonError::Gone.into()),
            _ => Err(ConnectError::Unreachable { peer }),
        })
    }

    /// What the daemon says of a request makes no sense.
    pub(crate) fn fail_request(&mut self, ticket: u32, error: DaemonError) {
        let is_it = |applying: &&mut Applying| applying.ticket == Some(ticket);
        if let Some(applying) = self.applying.iter_mut().find(is_it) {
            applying.error = Some(error.into());
        }
    }

    /// A request is over. Gives what it was for.
    fn no_longer_applying(&mut self, position: usize, now_ns: u64) -> ConnectOptions {
        let applying = self.applying.swap_remove(position);
        let peer = applying.peer;
        if let Some(Admitted::Granted(grant)) = applying.outcome {
            self.notices.remember(grant.session_key);
        }
        if let Some(ticket) = applying.ticket {
            self.notices.remember(ticket.into());
            self.end_ticket(ticket, 0, now_ns);
        }
        self.peers.at(peer).applying = false;
        applying.options
    }

    /// A request for a session is not wanted any more, if there is one.
    pub(crate) fn withdraw(&mut self, index: u16, now_ns: u64) {
        if let Some(position) = self.position_of(index) {
            self.no_longer_applying(position, now_ns);
        }
    }

    /// The sender's side of a granted session.
    fn granted(
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
            let peer = self.peers.at(index).control;
            self.end_held(grant.session_key, 0, now_ns);
            return Err(ConnectError::Incompatible { peer });
        };
        let channel = match (options.one_copy, self.scheduler.general()) {
            (true, Some(general)) => Ok(general),
            _ => self.transmit_for(grant.tx_queue),
        };
        let channel = match channel {
            Ok(channel) => channel,
            Err(error) => {
                self.end_held(grant.session_key, 0, now_ns);
                return Err(error);
            }
        };
        let terms = OutboundTerms {
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
            repeats_apart: grant.repeats_apart,
            landing_port: grant.landing_port,
            rate: options.rate,
        };
        let mut outbound = Outbound::new(terms, now_ns);
        outbound.lands = grant.lands;
        Ok(outbound)
    }

    /// The channel whose packets reach the receiver's landing queue. Where the sender's queue selects the receiver's, the receiver says
    /// which in its grant. Other devices spread by what is in the packet.
    fn transmit_for(&mut self, granted: Option<u16>) -> Result<usize, ConnectError> {
        let Some(queue) = granted.filter(|_| self.fixed.caps.tx_steers) else {
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
        let tx = match self.port.open(&spec) {
            Ok((_, tx)) => tx,
            // Another program of this host has the queue. What we send comes to another queue of the receiver, and takes the one-copy path.
            Err(source @ PortError::Denied(_)) => {
                tracing::warn!("messages are copied once more at their receiver: {source}");
                return Ok(0);
            }
            Err(source) => return Err(ConnectError::Queue { queue, source }),
        };
        let in_flight = self.fixed.tx_in_flight;
        Ok(self.scheduler.add(Transmit::new(queue, tx, in_flight)))
    }

    /// Ends the session that messages to a peer go by. Unconfirmed messages are settled as `outcome`.
    pub(crate) fn drop_outbound(&mut self, index: u16, outcome: &Outcome, now_ns: u64) {
        self.settle_outbound(index, Some(outcome), now_ns);
        if let Some(outbound) = self.peers.at(index).outbound.take() {
            let messages = outbound.next_number.wrapping_sub(outbound.terms.first_message);
            self.end_held(outbound.terms.key, messages, now_ns);
        }
        self.senders.retain(|&sender| sender != index);
    }

    /// Tells the receiver that its session is over, until it confirms.
    pub(crate) fn end_session(&mut self, index: u16, now_ns: u64) {
        self.peers.at(index).options = None;
        if std::mem::take(&mut self.peers.at(index).reopening) {
            self.withdraw(index, now_ns);
            self.hand_over_again(index, now_ns);
        }
        let Some(outbound) = &self.peers.at(index).outbound else {
            return;
        };
        if outbound.has_digests_to_tell() {
            // What has left counts, as far as it can be verified.
            self.announce(index, now_ns);
        }
        self.drop_outbound(index, &Outcome::SessionEnded, now_ns);
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
