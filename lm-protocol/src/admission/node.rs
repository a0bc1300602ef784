//! One host's admission: what comes in, in the order in which it is believed, and what is done about it.

mod status;

use super::exclusive::Exclusive;
use super::incoming::Receiver;
use super::list::List;
use super::message::{Append, Message, Remove, Stage};
use super::outgoing::{Outgoing, Ticket};
use super::peers::{Arrival, Peers};
use super::saying::Announced;
use super::seal::{ClusterKey, SealError, SealHeader};
use super::{Action, Config, Counters, Decision, LIST_LEASE_MAX, Local, Policy, Taken, TooMany};
use crate::control::{
    ControlError, ControlMessage, End, Ended, Grant, KIND_END, KIND_REQUEST, RejectReason, Request,
};
use crate::introduction::Answers;
use crate::session::{Application, Refusal, Session};
use crate::time::Time;
use crate::wire::lm::LmError;
use alloc::collections::BTreeMap;
use alloc::vec::Vec;
use core::net::{Ipv4Addr, SocketAddrV4};
use core::time::Duration;

pub use status::Usage;

/// One host's admission (see the [module](super)).
#[derive(Clone, Debug)]
pub struct Node {
    pub(super) config: Config,
    pub(super) sequence: u64,
    pub(super) peers: Peers,
    pub(super) list: List,
    pub(super) receivers: BTreeMap<u16, Receiver>,
    pub(super) outgoing: Outgoing,
    pub(super) exclusive: Option<Exclusive>,
    pub(super) announced: Announced,
    /// Number of the last claim, or of the last time that this host became active.
    pub(super) last_number: u64,
    counters: Counters,
    /// To hosts that have proved nothing: where there is no key.
    answers: Answers,
    /// What is to be done for it.
    pub(super) out: Vec<Action>,
}

impl Node {
    /// A node that begins its life. Under `exclusive`, no landing queue may be open any more of a life before.
    pub fn new(config: Config, now: Time) -> Node {
        let (exclusive, is_exclusive) = match &config.policy {
            Policy::Concurrent => (None, false),
            Policy::Exclusive { voters } => (Some(Exclusive::new(voters.clone(), config.address, now)), true),
        };
        Node {
            sequence: 0,
            peers: Peers::new(config.limits.hosts),
            list: List::new(),
            receivers: BTreeMap::new(),
            outgoing: Outgoing::new(
                config.boot_id as u32,
                is_exclusive,
                config.key.is_some(),
                config.limits.patience,
            ),
            exclusive,
            announced: Announced::Nothing,
            last_number: 0,
            counters: Counters::default(),
            answers: Answers::default(),
            out: Vec::new(),
            config,
        }
    }

    /// The cluster has another key from now on. Sessions go on; hosts that still use the old one are not understood.
    pub fn set_key(&mut self, key: ClusterKey) {
        self.config.key = Some(key);
    }

    /// A program of this host receives on `port`, in these landing queues; one that takes several sessions is there several times.
    /// What was there for that port is shut down.
    pub fn add_receiver(
        &mut self,
        now: Time,
        port: u16,
        landing_queues: &[u16],
        local: &mut Local<'_>,
        out: &mut Vec<Action>,
    ) {
        self.remove_receiver(now, port, local, out);
        let receiver = Receiver::new(landing_queues, &self.config.limits, self.exclusive.is_some());
        self.receivers.insert(port, receiver);
    }

    /// The receiver on `port` takes more sessions, in these landing queues.
    pub fn add_places(&mut self, port: u16, landing_queues: &[u16]) {
        if let Some(receiver) = self.receivers.get_mut(&port) {
            receiver.grantor.add_places(landing_queues);
        }
    }

    /// That program is gone: its sessions end, and their senders are told.
    pub fn remove_receiver(&mut self, now: Time, port: u16, local: &mut Local<'_>, out: &mut Vec<Action>) {
        if let Some(receiver) = self.receivers.remove(&port) {
            let replies = receiver.shut_down(local);
            self.send_all(port, replies);
            self.settle(now, local, out);
        }
    }

    /// Takes over a session that an earlier life granted and whose gate is open. Gives `false` when it has no place: close the gate then.
    /// Under `exclusive` the gate stays open as long as that life was told ([`Landing::active_until`](crate::session::Landing::active_until)),
    /// and no longer, until this one is told more. [`Node::on_timer`] afterwards starts what goes with it.
    pub fn adopt(&mut self, now: Time, port: u16, session: Session) -> bool {
        let receiver = self.receivers.get_mut(&port);
        let is_adopted = receiver.is_some_and(|receiver| receiver.grantor.adopt(session, now));
        if let Some(exclusive) = self.exclusive.as_mut().filter(|_| is_adopted) {
            exclusive.resume(now);
        }
        is_adopted
    }

    /// A program of this host wants to send to the receiver on `port` at the host `to` (its control address).
    ///
    /// # Errors
    ///
    /// [`TooMany`].
    #[expect(clippy::too_many_arguments, reason = "two of them are where to act")]
    pub fn request(
        &mut self,
        now: Time,
        to: SocketAddrV4,
        port: u16,
        request: Request,
        patience: Duration,
        local: &mut Local<'_>,
        out: &mut Vec<Action>,
    ) -> Result<Decision, TooMany> {
        self.list.expire(now);
        let is_exclusive = self.exclusive.is_some() && request.lands;
        // LM §3.3: "it must ensure that no DLD mechanism is active by checking its LM_RECV_ADDR list".
        if is_exclusive && self.is_listed(*to.ip()) {
            return Ok(Decision::Cancel);
        }
        if self.outgoing.len() >= self.config.limits.outgoing {
            return Err(TooMany);
        }
        let is_active = is_exclusive && self.is_any_receiving();
        let ticket = (self.outgoing).ask(now, to, port, request, !is_active, patience);
        self.settle(now, local, out);
        Ok(match is_active {
            true => Decision::OneCopy(ticket),
            false => Decision::Requested(ticket),
        })
    }

    /// A program kept its session over a restart of this host's daemon: goes on renewing its lease. Gives `false` when the ticket is
    /// somebody else's, or there are too many.
    pub fn resume(
        &mut self,
        now: Time,
        to: SocketAddrV4,
        port: u16,
        ticket: Ticket,
        request: Request,
        grant: Grant,
    ) -> bool {
        self.outgoing.len() < self.config.limits.outgoing
            && self.outgoing.resume(now, to, port, ticket, request, grant)
    }

    /// A program ends its session, in which it sent `messages` messages, or does not want one any more.
    pub fn end(
        &mut self,
        now: Time,
        ticket: Ticket,
        messages: u32,
        local: &mut Local<'_>,
        out: &mut Vec<Action>,
    ) {
        self.outgoing.end(now, ticket, messages);
        self.settle(now, local, out);
    }

    /// Ends a session of a receiver from this side; its sender is told.
    pub fn close(&mut self, now: Time, session_key: u64, local: &mut Local<'_>, out: &mut Vec<Action>) {
        self.close_sessions(|session| session.grant.session_key == session_key, local);
        self.settle(now, local, out);
    }

    /// Data of a session came in: as good as a renewal of its lease.
    pub fn touched(&mut self, now: Time, session_key: u64) {
        for receiver in self.receivers.values_mut() {
            receiver.grantor.touched(session_key, now);
        }
    }

    /// A datagram came in on the control port, from `from`.
    pub fn on_datagram(
        &mut self,
        now: Time,
        from: SocketAddrV4,
        bytes: &[u8],
        local: &mut Local<'_>,
        out: &mut Vec<Action>,
    ) -> Taken {
        let taken = self.arrived(now, from, bytes, local);
        out.append(&mut self.out);
        taken
    }

    fn arrived(&mut self, now: Time, from: SocketAddrV4, bytes: &[u8], local: &mut Local<'_>) -> Taken {
        let Some(key) = &self.config.key else {
            let header = SealHeader {
                port: self.only_port(),
                ..SealHeader::default()
            };
            let taken = self.take(now, from, &header, bytes, local);
            self.do_due(now, local);
            return taken;
        };
        if from == self.config.address {
            self.counters.own += 1;
            return Taken::Used;
        }
        let (header, body) = match key.open(from, self.config.address, bytes) {
            Ok(opened) => opened,
            Err(error) => {
                let (counter, taken) = match error {
                    SealError::Length => (&mut self.counters.malformed, Taken::Malformed),
                    SealError::NotSealed => (&mut self.counters.not_sealed, Taken::Unproved),
                    SealError::Version { .. } => (&mut self.counters.other_version, Taken::OtherVersion),
                    SealError::Tag => (&mut self.counters.unauthenticated, Taken::Unproved),
                };
                *counter += 1;
                return taken;
            }
        };
        let arrival = self.peers.arrive(key, self.config.boot_id, now, from, &header);
        match arrival {
            Arrival::Replayed => {
                self.counters.replayed += 1;
                return Taken::Unproved;
            }
            Arrival::Stranger => {
                self.counters.strangers += 1;
                // An LM_HELLO with an echo has been through this already. Its echo is too old, and whoever has something to say
                // says it again; answers to answers could go on for ever where more hosts talk than are remembered.
                if header.echo == 0 || !matches!(Message::parse(body), Ok(Message::Hello)) {
                    self.hello(from, header.challenge, true);
                }
                return Taken::Stranger;
            }
            Arrival::FirstOfLife => {
                self.list.renumber(*from.ip());
                self.tell_newcomer(now, from);
            }
            Arrival::Known => {}
        }
        if arrival == Arrival::FirstOfLife || header.challenge != 0 {
            // Now, or with the echo, it takes what it could not take before.
            self.outgoing.hurry(now, from);
            if let Some(exclusive) = &mut self.exclusive {
                exclusive.hurry(now, from);
            }
        }
        let first = self.out.len();
        let taken = self.take(now, from, &header, body, local);
        self.do_due(now, local);
        let is_answer = |action: &Action| matches!(action, Action::Send { to, .. } if *to == from);
        if header.challenge != 0 && !self.out[first..].iter().any(is_answer) {
            self.hello(from, header.challenge, false);
        }
        taken
    }

    /// Without a key: a control message that was read already, by whatever way it came.
    pub fn on_message(
        &mut self,
        now: Time,
        from: SocketAddrV4,
        (request_id, message): (u32, &ControlMessage),
        local: &mut Local<'_>,
        out: &mut Vec<Action>,
    ) -> Taken {
        let taken = self.handle_session(now, from, self.only_port(), request_id, message, local);
        self.counters.accepted += 1;
        self.settle(now, local, out);
        taken
    }

    /// Without a key there is one receiver, and a message does not say which it is for.
    fn only_port(&self) -> u16 {
        self.receivers.keys().next().copied().unwrap_or(0)
    }

    /// A message that is believed, or need not be.
    fn take(
        &mut self,
        now: Time,
        from: SocketAddrV4,
        header: &SealHeader,
        body: &[u8],
        local: &mut Local<'_>,
    ) -> Taken {
        let (counter, taken) = match self.handle(now, from, header, body, local) {
            Ok(Some(taken)) => (&mut self.counters.accepted, taken),
            Ok(None) => (&mut self.counters.impossible, Taken::Malformed),
            Err(ControlError::VersionMismatch { theirs, request_id }) => {
                let is_asked = self.answer_version(now, from, header.port, theirs, request_id, body);
                // Whoever asked is told in words.
                let taken = if is_asked {
                    Taken::Used
                } else {
                    Taken::OtherVersion
                };
                (&mut self.counters.other_version, taken)
            }
            Err(ControlError::Packet(LmError::VersionMismatch { .. })) => {
                (&mut self.counters.other_version, Taken::OtherVersion)
            }
            Err(_) => (&mut self.counters.malformed, Taken::Malformed),
        };
        *counter += 1;
        taken
    }

    /// The host at `by` says that nobody receives on the port that something went to.
    pub fn on_refused(&mut self, now: Time, by: SocketAddrV4, local: &mut Local<'_>, out: &mut Vec<Action>) {
        self.outgoing.refused(now, by);
        self.settle(now, local, out);
    }

    /// The host `to` takes messages now that it could not take before.
    pub fn hurry(&mut self, now: Time, to: SocketAddrV4, local: &mut Local<'_>, out: &mut Vec<Action>) {
        self.outgoing.hurry(now, to);
        self.settle(now, local, out);
    }

    /// The next request has this number if it can: a random one, where messages are not sealed, so that only those who saw a request can
    /// answer it.
    pub fn number_from(&mut self, number: u32) {
        self.outgoing.number_from(number);
    }

    /// The receiver has ended this session, and the program that had it knows.
    pub fn forget(&mut self, ticket: Ticket) {
        self.outgoing.remove(ticket);
    }

    /// Whether ends of sessions are on their way that nobody has confirmed.
    pub fn is_leaving(&self) -> bool {
        self.outgoing.is_leaving()
    }

    /// The moment that [`Node::next_deadline`] gave has come.
    pub fn on_timer(&mut self, now: Time, local: &mut Local<'_>, out: &mut Vec<Action>) {
        self.settle(now, local, out);
    }

    /// Whether this host's DLD is active.
    pub(super) fn is_receiving(&self) -> bool {
        self.sessions().any(|(_, session)| session.has_place())
    }

    /// Whether DLD is active here or at a host that said so.
    pub(super) fn is_any_receiving(&self) -> bool {
        !self.list.is_empty() || self.is_receiving()
    }

    pub(super) fn is_listed(&self, address: Ipv4Addr) -> bool {
        self.list.contains(address) || (address == *self.config.address.ip() && self.is_receiving())
    }

    /// An authentic and new message: the paper's figure 3. Gives `None` when it makes no sense.
    fn handle(
        &mut self,
        now: Time,
        from: SocketAddrV4,
        header: &SealHeader,
        body: &[u8],
        local: &mut Local<'_>,
    ) -> Result<Option<Taken>, ControlError> {
        let makes_sense = match Message::parse(body)? {
            Message::Session { request_id, message } => {
                let taken = self.handle_session(now, from, header.port, request_id, &message, local);
                return Ok(Some(taken));
            }
            // About hosts: only those of one cluster speak so.
            _ if self.config.key.is_none() => false,
            // A host speaks for itself only.
            Message::Append(Append { address, .. }) | Message::Remove(Remove { address, .. })
                if address != *from.ip() =>
            {
                false
            }
            Message::Append(append) => match append.stage {
                Stage::Claim => self.handle_claim(now, from, header.boot_id, &append),
                Stage::Active => {
                    if !self.peers.is_removed(from, append.number) {
                        let lease = Duration::from_millis(append.lease_ms.into()).min(LIST_LEASE_MAX);
                        let capacity = self.config.limits.hosts;
                        self.list
                            .append(append.address, append.number, now + lease, capacity);
                    }
                    true
                }
            },
            Message::Remove(remove) => {
                self.peers.removed(from, remove.number);
                self.list.remove(remove.address, remove.number);
                self.handle_release(from, header.boot_id, &remove);
                true
            }
            Message::Answer(answer) => self.handle_answer(now, from, &answer),
            Message::Hello => true,
        };
        Ok(makes_sense.then_some(Taken::Used))
    }

    fn handle_session(
        &mut self,
        now: Time,
        from: SocketAddrV4,
        port: u16,
        request_id: u32,
        message: &ControlMessage,
        local: &mut Local<'_>,
    ) -> Taken {
        match message {
            ControlMessage::Request(request) => {
                let Some(receiver) = self.receivers.get_mut(&port) else {
                    let message = Refusal::from(RejectReason::NoReceiver).to_message();
                    self.transmit(from, port, &Message::Session { request_id, message });
                    return Taken::Refused;
                };
                if self.config.key.is_some() {
                    receiver.grantor.end_earlier(from, request, local.landing);
                }
                let application = Application::new(from, request_id, request);
                if self.exclusive.is_some() {
                    self.request_exclusively(now, port, &application, local);
                    return Taken::Used;
                }
                receiver.request(now, &application, local);
                let taken = match receiver.answer_to(&application) {
                    Some(answer) if answer.is_reject() => Taken::Refused,
                    Some(_) => Taken::Used,
                    None => Taken::Late,
                };
                self.reply();
                taken
            }
            ControlMessage::End(end) => {
                let mut taken = Taken::Used;
                let receiver = self.receivers.get(&port);
                let is_known = receiver.is_some_and(|receiver| receiver.grantor.knows(from, end.session_key));
                let reply = match self.receivers.get_mut(&port) {
                    Some(receiver) => {
                        let session = receiver.grantor.session(end.session_key);
                        if *end != End::WITHDRAWN && session.is_none_or(|session| session.peer != from) {
                            taken = Taken::WrongKey(end.session_key);
                        }
                        if *end == End::WITHDRAWN {
                            receiver.waiting.withdraw(from, request_id);
                        }
                        receiver
                            .grantor
                            .handle(from, request_id, message, now, local.policy, local.landing)
                    }
                    None if *end == End::WITHDRAWN => None,
                    // With its receiver, the session has ended too.
                    None => Some(ControlMessage::Ended(Ended {
                        session_key: end.session_key,
                        delivered: 0,
                        heard: None,
                    })),
                };
                if let Some(message) = reply
                    && (is_known || self.may_answer(now))
                {
                    self.transmit(from, port, &Message::Session { request_id, message });
                }
                taken
            }
            ControlMessage::Grant(_) | ControlMessage::Reject(_) | ControlMessage::Ended(_) => {
                let from = (from, self.is_listed(*from.ip()));
                match (self.outgoing).handle(now, from, port, Ticket(request_id), message) {
                    true => Taken::Used,
                    false => Taken::Unasked(request_id),
                }
            }
            // Between endpoints.
            ControlMessage::Challenge(_) | ControlMessage::Proof(_) => Taken::Malformed,
        }
    }

    /// A host of the cluster speaks another version: an applicant learns it from the answer, and a request gets one. Gives whether it
    /// was the answer.
    fn answer_version(
        &mut self,
        now: Time,
        from: SocketAddrV4,
        port: u16,
        theirs: u8,
        request_id: Option<u32>,
        body: &[u8],
    ) -> bool {
        let Some(request_id) = request_id else {
            return false;
        };
        let is_asked = self.outgoing.handle_version(from, Ticket(request_id), theirs);
        // The kind's place is the same in all versions; an answer to an answer would be answered again.
        if !is_asked && matches!(body.get(8), Some(&(KIND_REQUEST | KIND_END))) && self.may_answer(now) {
            let message = Refusal::from(RejectReason::Version).to_message();
            self.transmit(from, port, &Message::Session { request_id, message });
        }
        is_asked
    }

    /// Whether one more answer may be sent to a host that has shown no more than that it can send.
    fn may_answer(&mut self, now: Time) -> bool {
        self.config.key.is_some() || self.answers.may_answer(now)
    }

    /// Does everything that is due.
    fn settle(&mut self, now: Time, local: &mut Local<'_>, out: &mut Vec<Action>) {
        self.do_due(now, local);
        out.append(&mut self.out);
    }

    fn do_due(&mut self, now: Time, local: &mut Local<'_>) {
        self.list.expire(now);
        self.outgoing.poll(now);
        if self.exclusive.is_some() && !self.is_any_receiving() {
            self.outgoing.ask_for_places(now);
        }
        self.say();
        for receiver in self.receivers.values_mut() {
            receiver.grantor.expire(now, local.landing);
            receiver.serve(now, local);
        }
        self.reply();
        if self.exclusive.is_some() {
            self.poll_exclusive(now, local);
        } else {
            self.announce(now);
        }
    }

    pub(super) fn close_sessions(&mut self, which: impl Fn(&Session) -> bool, local: &mut Local<'_>) {
        for receiver in self.receivers.values_mut() {
            receiver.close(&which, local);
        }
        self.reply();
    }
}
