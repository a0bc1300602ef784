//! Who is heard: both ways in (small messages, requests for sessions) ask here and nowhere else, and what was found is kept with the peer.
//! Whoever is heard for the first time is introduced ([`crate::introductions`]).

use std::net::SocketAddrV4;

use lm_protocol::control::{
    Ask, Challenge, ControlError, ControlMessage, KIND_END, KIND_REQUEST, MAX_CONTROL_LEN, Proof,
    RejectReason, WORD_LEN,
};
use lm_protocol::introduction::is_same_incarnation;
use lm_protocol::session::Refusal;
use lm_protocol::time::Time;
use lm_protocol::wire::Addressing;
use lm_protocol::wire::lm::{HEADER_LEN, LmHeader, TYPE_CONTROL, TYPE_EAGER};

use crate::completion::{Outcome, PeerId};
use crate::eager::EagerIn;
use crate::engine::Engine;
use crate::introductions::Introductions;
use crate::notices::Fault;
use crate::peer::Peer;
use crate::port::{Port, Socket};

/// The same challenge is answered again after this time: the proof may be lost.
const PROVE_AGAIN_NS: u64 = 1_000_000;

/// A peer whose flows do not show what it proved is told again after this time.
const REMIND_AGAIN_NS: u64 = 100_000_000;

/// So long after it was heard last a peer may have been replaced by one of another version.
const OTHER_VERSION_SILENT_NS: u64 = 1_000_000_000;

/// How an answer goes back to an address that has proved nothing yet.
pub(crate) enum Back {
    /// As a packet of the general channel.
    Packet,
    /// As the answer to the request of this number, which came from this address to a port of ours.
    Datagram(Socket, SocketAddrV4, u32),
}

impl<P: Port> Engine<P> {
    /// Whether what the incarnation `sender_id` sends from the data address `from` is heard. If not, it is challenged or refused, and
    /// the packet is counted.
    #[inline]
    pub(crate) fn hears(&mut self, from: SocketAddrV4, sender_id: u64, back: &Back, now_ns: u64) -> bool {
        let known = self.known_as(from);
        let is_known = known.is_some_and(|known| is_same_incarnation(known, sender_id));
        if !is_known {
            let cookie = |own: &Introductions| own.cookie(from, sender_id, known, now_ns);
            self.challenge(from, sender_id, cookie, back, now_ns);
        }
        is_known
    }

    fn known_as(&mut self, data: SocketAddrV4) -> Option<u64> {
        let index = self.peers.find(data)?;
        self.peers.at(index).incarnation
    }

    /// The rule of who may send here.
    pub(crate) fn may_send(&mut self, data: SocketAddrV4) -> bool {
        let found = self.peers.find(data);
        self.admission.introductions.allows(*data.ip())
            || found.is_some_and(|index| self.peers.at(index).wanted)
    }

    /// A datagram of another version of LM for the data port. Whoever begins something is told ours; the first 9 bytes of a control
    /// message, and the type of a small one, are the same in all versions. What comes from a peer that is known was changed on the way.
    #[cold]
    pub(crate) fn take_other_version(&mut self, from: SocketAddrV4, datagram: &[u8], now_ns: u64) {
        self.reject(Fault::Version, from);
        let known = self.peers.find(from).map(|index| self.peers.at(index));
        let speaks_ours = known.is_some_and(|peer| {
            peer.incarnation.is_some() && now_ns.saturating_sub(peer.heard_ns) < OTHER_VERSION_SILENT_NS
        });
        if speaks_ours || self.port.side().neighbour(*from.ip()).is_none() {
            return;
        }
        let request_id = match (
            datagram[0] & 0xf,
            datagram.get(8),
            ControlMessage::parse(datagram),
        ) {
            (TYPE_EAGER, ..) => 0,
            // An answer to an answer would be answered again.
            (
                TYPE_CONTROL,
                Some(&(KIND_REQUEST | KIND_END)),
                Err(ControlError::VersionMismatch {
                    request_id: Some(request_id),
                    ..
                }),
            ) => request_id,
            _ => return,
        };
        if (self.admission.introductions.answers).may_answer(Time::from_nanos(now_ns)) {
            let refusal = Refusal::from(RejectReason::Version).to_message();
            self.send_control(Socket::Data, from, request_id, &refusal);
        }
    }

    /// A packet under a peer's address did not show what the peer proved: it is challenged with that, at its address.
    #[cold]
    pub(crate) fn remind(&mut self, peer: PeerId, now_ns: u64) {
        let Some(peer) = self.peers.named(peer) else {
            return;
        };
        let from = peer.data;
        let is_told = peer.reminded_ns > 0 && now_ns.saturating_sub(peer.reminded_ns) < REMIND_AGAIN_NS;
        if let (false, Some(known)) = (is_told, peer.incarnation) {
            peer.reminded_ns = now_ns;
            let secret = peer.secret;
            self.challenge(from, known, |_| secret, &Back::Packet, now_ns);
        }
    }

    #[cold]
    fn challenge(
        &mut self,
        from: SocketAddrV4,
        sender_id: u64,
        cookie: impl FnOnce(&Introductions) -> u64,
        back: &Back,
        now_ns: u64,
    ) {
        let ask = if !self.may_send(from) {
            self.reject(Fault::NotAllowed, from);
            Ask::Silence
        } else {
            self.counters.challenged += 1;
            match self.admission.stewarded.has_daemon() || self.admission.key.is_some() {
                true => Ask::Word,
                false => Ask::Cookie,
            }
        };
        if !self.admission.introductions.may_challenge(now_ns) {
            return;
        }
        // To where the kernel has the address, whatever the packet says of its Ethernet source: otherwise any host on the link could answer.
        // Where it has none yet it asks for it, and what was challenged is repeated.
        let Some(mac) = self.port.side().neighbour(*from.ip()) else {
            return;
        };
        let challenge = ControlMessage::Challenge(Challenge {
            sender_id,
            cookie: match ask {
                Ask::Silence => 0,
                Ask::Cookie | Ask::Word => cookie(&self.admission.introductions),
            },
            challenger_id: self.fixed.sender_id.wrapping_add(self.peers.alias(from)),
            ask,
            uncompleted_max: self.fixed.caps.tx_bound,
        });
        match *back {
            Back::Packet => self.send_control_packet(&self.addressing_to(from, mac), from, &challenge),
            Back::Datagram(socket, to, request_id) if ask == Ask::Silence => {
                let refusal = Refusal::from(RejectReason::NotAllowed).to_message();
                self.send_control(socket, to, request_id, &refusal);
            }
            Back::Datagram(socket, to, request_id) => self.send_control(socket, to, request_id, &challenge),
        }
    }

    /// Sends a control message as a packet like those of small messages, so that neither overtakes the other.
    fn send_control_packet(&mut self, addressing: &Addressing, to: SocketAddrV4, message: &ControlMessage) {
        let mut bytes = [0u8; MAX_CONTROL_LEN];
        let len = message.encode(0, &mut bytes);
        let header = LmHeader::Control {
            request_id: 0,
            kind: message.kind(),
        };
        // As good as lost on the way: what it answers is repeated.
        if !self.sending.send_packet(
            self.port.side(),
            &mut self.memory,
            (addressing, to),
            &header,
            &bytes[HEADER_LEN..len],
        ) {
            self.counters.control_send_errors += 1;
        }
    }

    /// A peer that we sent to does not know us.
    pub(crate) fn take_challenge(
        &mut self,
        socket: Socket,
        from: SocketAddrV4,
        challenge: &Challenge,
        now_ns: u64,
    ) {
        let found = match socket {
            Socket::Data => self.peers.find(from),
            Socket::Control => self.admission.requests.asked_at(from),
        };
        let own = self.fixed.sender_id;
        let is_ours = |peer: &Peer| is_same_incarnation(challenge.sender_id, own.wrapping_add(peer.alias));
        let Some(index) = found.filter(|&index| is_ours(self.peers.at(index))) else {
            self.reject(Fault::Unexpected, from);
            return;
        };
        self.counters.packets_used += 1;
        let peer = self.peers.at(index);
        // It names what only this peer was told. It says nothing about a peer that we know: it may be a late one of an earlier life.
        if peer.incarnation.is_none() {
            peer.incarnation = Some(challenge.challenger_id);
            peer.uncompleted_max = challenge.uncompleted_max;
            peer.secret = match challenge.cookie {
                // It hears nothing of us, and a forger could guess that.
                0 => (self.admission.introductions).cookie(from, challenge.challenger_id, None, now_ns),
                cookie => cookie,
            };
        }
        let (data, addressing) = (peer.data, peer.addressing);
        // Each message of a burst is challenged.
        let (cookie, proved_ns) = peer.proved;
        if cookie == challenge.cookie && now_ns.saturating_sub(proved_ns) < PROVE_AGAIN_NS {
            return;
        }
        peer.proved = (challenge.cookie, now_ns);
        peer.show();
        if challenge.ask == Ask::Silence {
            self.give_up_eager(index, &Outcome::Refused, now_ns);
            return;
        }
        let proof = ControlMessage::Proof(Proof {
            sender_id: challenge.sender_id,
            cookie: challenge.cookie,
            data_port: self.fixed.local.port(),
            uncompleted_max: self.fixed.caps.tx_bound,
            word: match challenge.ask {
                Ask::Word => self.admission.word_to(self.fixed.local, data, challenge),
                _ => [0; WORD_LEN],
            },
        });
        match socket {
            Socket::Control => self.send_control(socket, from, 0, &proof),
            Socket::Data => {
                self.send_control_packet(&addressing, data, &proof);
                self.sending.reap(true, now_ns);
                let out = &mut self.peers.at(index).eager_out;
                out.proving = out.oldest.is_some();
                self.resend_eager(index, now_ns);
            }
        }
        self.ask_again(from, now_ns);
    }

    /// A peer answers our challenge.
    pub(crate) fn take_proof(&mut self, socket: Socket, from: SocketAddrV4, proof: &Proof, now_ns: u64) {
        let data = SocketAddrV4::new(*from.ip(), proof.data_port);
        let known = self.known_as(data);
        if known.is_some_and(|known| is_same_incarnation(known, proof.sender_id)) {
            // Proved before, by a repetition; or both asked at once, and each knew the other by its challenge when the proof came.
            self.counters.packets_used += 1;
            if (self.admission.introductions).is_proved(proof, data, None, now_ns)
                && let Some(index) = self.peers.find(data)
            {
                let peer = self.peers.at(index);
                peer.secret = proof.cookie;
                peer.show();
            }
            return;
        }
        if !self.may_send(data) {
            self.reject(Fault::NotAllowed, from);
            return;
        }
        let is_proved = (socket == Socket::Control || data == from)
            && (self.admission.introductions).is_proved(proof, data, known, now_ns)
            && self.admission.has_word(self.fixed.local, data, proof);
        if !is_proved {
            self.reject(Fault::Proof, from);
            return;
        }
        let Some(mac) = self.port.side().neighbour(*data.ip()) else {
            self.counters.drops.no_neighbour += 1;
            return;
        };
        let addressing = self.addressing_to(data, mac);
        let Some(index) = self.peers.find_or_add(data, &addressing, now_ns) else {
            self.reject(Fault::PeersFull, from);
            return;
        };
        self.counters.packets_used += 1;
        self.peers.at(index).addressing = addressing;
        self.introduce(index, proof.sender_id, now_ns);
        let peer = self.peers.at(index);
        peer.uncompleted_max = proof.uncompleted_max;
        peer.secret = proof.cookie;
        peer.show();
    }

    /// The peer is this incarnation from now on, and what an earlier one began is over.
    pub(crate) fn introduce(&mut self, index: u16, incarnation: u64, now_ns: u64) {
        let peer = self.peers.at(index);
        peer.heard_ns = now_ns;
        let before = peer.incarnation.replace(incarnation);
        if before.is_none_or(|before| !is_same_incarnation(before, incarnation)) {
            // A daemon's word came without a proof: the peer is told when a flow of it does not show this.
            peer.secret = (self.admission.introductions).cookie(peer.data, incarnation, before, now_ns);
            peer.show();
        }
        if before.is_none_or(|before| is_same_incarnation(before, incarnation)) {
            return;
        }
        peer.eager_in = EagerIn::unheard();
        peer.uncompleted_max = 0;
        let has_confirmed = peer.eager_out.acknowledged != 0;
        if has_confirmed {
            // This one has none of those, and takes the first of a numbering alone.
            self.give_up_eager(index, &Outcome::SessionEnded, now_ns);
        }
        let id = self.peers.id_of(index);
        self.end_sessions_of(id);
    }
}
