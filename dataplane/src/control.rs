//! Control: datagrams of the admission protocol on the control port, and what the node of ours that decides about them
//! ([`crate::own_node`]) has to say. What it has done to the landing channel is `granting.rs` and `aside.rs`.

use std::net::SocketAddrV4;
#[cfg(test)]
use std::time::Duration;

use lm_protocol::admission::{Action, Local, Node, Taken};
use lm_protocol::control::{ControlMessage, MAX_CONTROL_LEN};
use lm_protocol::time::Time;

use crate::engine::Engine;
use crate::hearing::Back;
use crate::looks::CONTROL_PER_LOOK;
use crate::notices::Fault;
use crate::port::{Port, Socket, SocketEvent};

/// A control datagram is shorter than this.
const CONTROL_LEN_MAX: usize = 512;

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
            Ok((number, message)) if self.admission.key.is_none() => {
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
            ControlMessage::Proof(proof) => return self.take_proof(socket, from, proof, now_ns),
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

    /// Repeats requests to this address at once.
    pub(crate) fn ask_again(&mut self, to: SocketAddrV4, now_ns: u64) {
        self.with_node(now_ns, |node, now, local, out| node.hurry(now, to, local, out));
    }

    /// ICMP says that nobody listens on a port.
    pub(crate) fn take_refusal(&mut self, by: SocketAddrV4) {
        let now_ns = self.looks.now_ns();
        self.peers.refused(by, now_ns);
        self.with_node(now_ns, |node, now, local, out| {
            node.on_refused(now, by, local, out)
        });
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
}

impl<P: Port> Engine<P> {
    /// Has the node do something, and does what it says. `None`: there is none, or it is at work.
    pub(crate) fn with_node<R>(
        &mut self,
        now_ns: u64,
        work: impl FnOnce(&mut Node, Time, &mut Local<'_>, &mut Vec<Action>) -> R,
    ) -> Option<R> {
        let mut own = self.admission.node.take()?;
        let result = own.work(now_ns, self, work);
        let mut actions = own.take_actions();
        self.admission.node = Some(own);
        for action in actions.drain(..) {
            match action {
                Action::Send { to, datagram } => self.send_datagram(Socket::Control, to, datagram.as_bytes()),
                Action::Tell { ticket, outcome } => self.told(ticket.0, outcome, now_ns),
                // To hosts that are known to daemons alone.
                _ => {}
            }
        }
        if let Some(own) = &mut self.admission.node {
            own.keep_room(actions);
        }
        Some(result)
    }

    /// Does what is due, and looks at places that may be free meanwhile.
    pub(crate) fn run_node(&mut self, now_ns: u64) {
        self.fill_places(now_ns);
        let is_due = (self.admission.node.as_ref()).is_some_and(|own| own.is_due(now_ns));
        if is_due {
            self.with_node(now_ns, |node, now, local, out| node.on_timer(now, local, out));
        }
    }

    /// What was to land in zero-copy mode lands in copy mode: there is room for more sessions.
    fn fill_places(&mut self, now_ns: u64) {
        let more = match &mut self.admission.node {
            Some(own) if self.fixed.caps.witness => own.more_places(),
            _ => return,
        };
        if !more.is_empty() {
            let port = self.fixed.local.port();
            self.with_node(now_ns, |node, _, _, _| node.add_places(port, &more));
        }
    }

    /// Whether ends of sessions are on their way that nobody has confirmed.
    pub(crate) fn is_leaving(&self) -> bool {
        self.admission.node.as_ref().is_some_and(|own| own.is_leaving())
    }

    /// From now on others may ask for sessions here.
    pub(crate) fn open_to_requests(&mut self, landing_queues: &[u16]) {
        let port = self.fixed.local.port();
        let Some(own) = &mut self.admission.node else {
            return;
        };
        let queues = own.places(landing_queues, !self.fixed.caps.witness);
        self.with_node(0, |node, now, local, out| {
            node.add_receiver(now, port, &queues, local, out);
        });
    }

    /// So many sessions may be without a place.
    #[cfg(test)]
    pub(crate) fn limit_aside(&mut self, aside: usize) {
        let (data, queue) = (
            self.fixed.local,
            self.landing.as_ref().map(|landing| landing.queue as u16),
        );
        let boot_id = self.admission.entropy.draw();
        let own = self.admission.node.take().expect("a node of its own");
        let patience = Duration::from_nanos(self.fixed.patience_ns);
        self.admission.node = Some(own.limited(data, patience, boot_id, aside));
        self.open_to_requests(&[queue.expect("a landing queue")]);
    }

    /// The endpoint goes: ends the sessions that it granted. Their senders need not wait for the lease to know.
    pub(crate) fn close_to_requests(&mut self, now_ns: u64) {
        let port = self.fixed.local.port();
        self.with_node(now_ns, |node, now, local, out| {
            node.remove_receiver(now, port, local, out);
        });
    }
}
