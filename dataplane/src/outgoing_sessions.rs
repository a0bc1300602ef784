//! Sessions that we send in, from the application's wish to their end. Those that their receiver ended, mostly because others waited for
//! their places, are asked for again, and messages of which the receiver had not heard are handed over again.

use std::net::SocketAddrV4;
use std::time::Duration;

use lm_protocol::admission::{Decision, Outcome as Admitted, Ticket};
use lm_protocol::control::{CAPABILITY_AHEAD, CAPABILITY_STREAMS, Ended, Grant, Request};
use lm_protocol::delivery::Delivery;
use lm_protocol::geometry::Wire;

use crate::applying::{Consequence, Due};
use crate::bounds::{IN_FLIGHT_MESSAGES_MAX, TRANSMIT_RING_LEN, messages_in_flight};
use crate::completion::Outcome;
use crate::connect::{ConnectError, ConnectOptions};
use crate::engine::Engine;
use crate::landing_side::LandingSide;
use crate::notices::Fault;
use crate::outbound::{Outbound, OutboundTerms};
use crate::port::{Port, PortError, QueueSpec, Role};
use crate::scheduler::Transmit;

impl<P: Port> Engine<P> {
    /// Asks a peer for a session.
    pub(crate) fn apply(&mut self, index: u16, options: &ConnectOptions, now_ns: u64) {
        let request = Request {
            sender_id: self.fixed.sender_id.wrapping_add(self.peers.at(index).alias),
            data_port: self.fixed.local.port(),
            mtu: self.fixed.mtu,
            wire: options.wire,
            link: self.fixed.link,
            max_message_len: options.max_message_len,
            window: options.window,
            messages_in_flight: options.messages_in_flight.clamp(1, IN_FLIGHT_MESSAGES_MAX),
            uncompleted_max: self.fixed.caps.tx_bound,
            capabilities: CAPABILITY_STREAMS | (u32::from(self.fixed.caps.ahead) * CAPABILITY_AHEAD),
            delivery: options.delivery_in_session(),
            integrity: self.fixed.integrity,
            lands: !options.one_copy,
        };
        let peer = self.peers.at(index);
        peer.applying = true;
        peer.options = Some(*options);
        let to = peer.control;
        (self.admission.requests).begin(index, to, (options, request), now_ns);
    }

    /// Drives requests and farewells that are on their way.
    pub(crate) fn drive_admission(&mut self, now_ns: u64) {
        self.run_node(now_ns);
        let mut position = 0;
        while position < self.admission.requests.len() {
            self.ask(position, now_ns);
            position += 1;
        }
    }

    /// Has our own node or the daemon ask for a session, where nobody does and it is time.
    fn ask(&mut self, position: usize, now_ns: u64) {
        let by_daemon = self.admission.stewarded.has_daemon();
        let Some(due) = (self.admission.requests).due(position, by_daemon, now_ns) else {
            return;
        };
        let Due {
            peer,
            to,
            request,
            patience_ms,
        } = due;
        let receiver = self.peers.at(peer).data;
        // Random, so that only whoever saw the request can answer it.
        let number = self.admission.entropy.draw() as u32;
        let decision = match by_daemon {
            true => (self.admission.stewarded).ask(receiver, &request, number, patience_ms),
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
        self.admission.requests.asked(position, decision, now_ns);
    }

    /// What became of a request or a session of ours.
    pub(crate) fn told(&mut self, ticket: u32, outcome: Admitted, now_ns: u64) {
        match self.admission.requests.told(ticket, outcome) {
            Some(Consequence::Unwanted) => self.end_ticket(ticket, 0, now_ns),
            Some(Consequence::Over { key, peer }) => {
                let outbound = self.peers.at(peer).outbound.as_ref();
                if outbound.is_some_and(|outbound| outbound.terms.key == key) {
                    self.lose_session(peer, None, now_ns);
                }
            }
            None => {}
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
        let by_daemon = self.admission.stewarded.has_daemon();
        let data = by_daemon.then(|| self.peers.at(index).data);
        let is_over = |ticket: u32| self.notices.remember(ticket.into());
        let outcome = (self.admission.requests).outcome(index, data, self.looks.now_ns(), is_over)?;
        let options = self.withdraw(index, now_ns)?;
        let outbound = outcome.and_then(|grant| self.granted(index, &grant, &options, now_ns));
        Some(outbound.map(|outbound| {
            self.peers.at(index).outbound = Some(outbound);
            self.sending.add_sender(index);
            self.hand_over_again(index, now_ns);
        }))
    }

    /// The session with a peer is not asked for any more. Gives what it was to be.
    pub(crate) fn withdraw(&mut self, index: u16, now_ns: u64) -> Option<ConnectOptions> {
        let withdrawn = self.admission.requests.withdraw(index)?;
        if let Some(key) = withdrawn.granted {
            self.notices.remember(key);
        }
        if let Some(ticket) = withdrawn.ticket {
            self.notices.remember(ticket.into());
            self.end_ticket(ticket, 0, now_ns);
        }
        self.peers.at(index).applying = false;
        Some(withdrawn.options)
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
        let Some(layout) = layout.map(|layout| layout.with_room(self.fixed.checksum.room())) else {
            let peer = self.peers.at(index).control;
            self.end_held(grant.session_key, 0, now_ns);
            return Err(ConnectError::Incompatible { peer });
        };
        let channel = match (options.one_copy, self.sending.general_queue()) {
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
        let integrity = self.integrity_of(layout.wire(), grant.session_key);
        let terms = OutboundTerms {
            key: grant.session_key,
            layout,
            window: grant.window,
            packet_limit: grant.packet_limit,
            first_message: grant.first_message,
            messages_in_flight: messages_in_flight(options.messages_in_flight, &layout),
            max_message_len: grant.max_message_len,
            delivery: options.delivery_in_session(),
            integrity,
            lease_ns: u64::from(grant.lease_ms) * 1_000_000,
            channel,
            plain: false,
            takes_streams: grant.capabilities & CAPABILITY_STREAMS != 0,
            goes_ahead: self.fixed.caps.ahead
                && grant.capabilities & CAPABILITY_AHEAD != 0
                && layout.wire() == Wire::Lm
                && options.delivery_in_session() == Delivery::Reliable
                && integrity.has_digests(),
            fillers: grant.fillers.into(),
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
        if let Some(found) = self.sending.find_queue(queue) {
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
        Ok(self
            .sending
            .add_queue(Transmit::new(queue, tx, in_flight, self.fixed.checksum)))
    }

    /// The receiver has ended a session that we still used; whether it can be right about what was delivered. `None`: there is
    /// no session with this key.
    pub(crate) fn take_ended(&mut self, from: SocketAddrV4, ended: &Ended, now_ns: u64) -> Option<bool> {
        let found = self.sending.senders().iter().copied().find(|&index| {
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

    /// Ends the session that messages to a peer go by. Unconfirmed messages are settled as `outcome`.
    pub(crate) fn drop_outbound(&mut self, index: u16, outcome: &Outcome, now_ns: u64) {
        self.settle_outbound(index, Some(outcome), now_ns);
        if let Some(outbound) = self.peers.at(index).outbound.take() {
            let messages = outbound.next_number.wrapping_sub(outbound.terms.first_message);
            self.end_held(outbound.terms.key, messages, now_ns);
        }
        self.sending.remove_sender(index);
    }

    /// A session of ours ends, in which so many messages were sent, or a request is not wanted any more.
    pub(crate) fn end_ticket(&mut self, ticket: u32, messages: u32, now_ns: u64) {
        if self.admission.stewarded.has_daemon() {
            self.admission.stewarded.end(ticket, messages);
        } else {
            self.with_node(now_ns, |node, now, local, out| {
                node.end(now, Ticket(ticket), messages, local, out);
            });
        }
    }

    /// Ends a session of ours by its key, if it is still held.
    pub(crate) fn end_held(&mut self, key: u64, messages: u32, now_ns: u64) {
        self.notices.remember(key);
        if let Some(ticket) = self.admission.requests.release(key) {
            self.end_ticket(ticket, messages, now_ns);
        }
    }

    /// The receiver has ended a session of ours: our own node need not tell it.
    fn forget_held(&mut self, key: u64, now_ns: u64) {
        if !self.admission.stewarded.has_daemon()
            && let Some(ticket) = self.admission.requests.release(key)
        {
            self.with_node(now_ns, |node, _, _, _| node.forget(Ticket(ticket)));
        }
    }

    /// The receiver ended the session that messages to a peer go by. `heard`: of how many messages it had heard; where that matters and is
    /// not known, its program is asked. All others are handed over again to the session that follows.
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
        let Some(options) = options else {
            return self.hand_over_again(index, now_ns);
        };
        self.counters.sessions_lost += 1;
        self.peers.at(index).reopening = true;
        self.apply(index, &options, now_ns);
    }

    /// Takes the outcome of sessions that are asked for again.
    pub(crate) fn look_at_reopening(&mut self, now_ns: u64) {
        let mut asked: Vec<u16> = self.admission.requests.peers().collect();
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
                && outbound.take_again(&mut self.sending.outgoing, &peer.addressing, slot)
            {
                self.counters.messages_again += 1;
                continue;
            }
            let settled = (self.sending.outgoing).settle(slot, id, Outcome::SessionEnded, now_ns);
            self.settled(settled);
        }
    }
}
