//! Messages of one packet, and what acknowledges them.

use std::net::SocketAddrV4;

use lm_protocol::serial;
use lm_protocol::wire::lm::{EagerAcknowledgement, LmHeader};

use crate::eager::{EAGER_NEVER_NEXT, EagerIn};
use crate::engine::Engine;
use crate::frames::Frame;
use crate::hearing::Back;
use crate::message::Message;
use crate::mutants::mutant;
use crate::notices::Fault;
use crate::port::Port;
use crate::release::Released;

/// An answer that confirms nothing new so long after the last progress means that something is lost.
const EAGER_REPEAT_SOON_NS: u64 = 200_000;

impl<P: Port> Engine<P> {
    pub(super) fn take_eager(
        &mut self,
        frame: &mut Option<Frame>,
        from: SocketAddrV4,
        (sender_id, number, tag): (u64, u32, u64),
        (address, len): (u64, u64),
        now_ns: u64,
    ) {
        if !self.hears(from, sender_id, &Back::Packet, now_ns) {
            return;
        }
        let index = self.peers.find(from).expect("who is heard is a peer");
        let numbering = self.peers.at(index).eager_in.sender_id;
        let is_later = numbering.is_none_or(|known| (sender_id.wrapping_sub(known) as i64) >= 0);
        if !is_later || (number != 0 && numbering.is_some_and(|known| known != sender_id)) {
            // A late packet of an earlier numbering; a new one begins at 0. Who only asks where we are is told that nothing of it came.
            if len == 0 && (number as i32) < -(EAGER_NEVER_NEXT as i32 / 2) {
                self.counters.packets_used += 1;
                let header = LmHeader::EagerAck {
                    sender_id,
                    next: 0,
                    limit: crate::eager::EAGER_CREDIT_INITIAL,
                };
                self.send_packet(index, &header, &[]);
                return;
            }
            self.counters.drops.eager_out_of_order += 1;
            return;
        }
        let peer = self.peers.at(index);
        peer.heard_ns = now_ns;
        if peer.eager_in.sender_id != Some(sender_id) {
            // A new numbering counts from 0, and its sender knows nothing of what we told it under the old one.
            peer.eager_in = EagerIn {
                sender_id: Some(sender_id),
                ..EagerIn::unheard()
            };
        }
        let eager = &mut peer.eager_in;
        eager.last_ns = now_ns;
        if !peer.acknowledgement_due {
            peer.acknowledgement_due = true;
            self.small.owe(index);
        }
        if number != eager.next && !mutant!(TakenTwice) {
            // Only the next one is taken, so that an acknowledgement never covers what did not come.
            let asks = len == 0 && serial::distance(eager.next, number) < -(EAGER_NEVER_NEXT as i32 / 2);
            match serial::precedes(number, eager.next) {
                _ if asks => self.counters.packets_used += 1,
                true => self.counters.drops.eager_duplicate += 1,
                false => self.counters.drops.eager_out_of_order += 1,
            }
            eager.repeat = true;
            return;
        }
        if !serial::precedes(number, eager.told_limit) {
            eager.repeat = true;
            self.reject(Fault::Overdrawn, from);
            return;
        }
        if !self.small.may_show() {
            eager.repeat = true;
            self.counters.drops.eager_no_frame += 1;
            return;
        }
        let Some(frame) = frame.take() else { return };
        eager.next = number.wrapping_add(1);
        let id = self.peers.id_of(index);
        self.small.stream.message_came();
        self.counters.packets_used += 1;
        self.counters.messages_received += 1;
        self.counters.bytes_received += len;
        self.told.received(Message {
            loaned: self.memory.way_back(),
            released: Some(Released::GeneralFrame(frame.into_address())),
            address,
            len,
            peer: id,
            tag,
            number,
            missing: Vec::new(),
            latency_ns: 0,
        });
    }

    /// An acknowledgement that came behind a message. `false`: no honest peer says that, so its message is not believed either.
    ///
    /// It may be late, since its message is sent again as it was: what it does not confirm says nothing.
    pub(super) fn take_acknowledgement_behind(
        &mut self,
        from: SocketAddrV4,
        acknowledgement: &EagerAcknowledgement,
        now_ns: u64,
    ) -> bool {
        match self.peers.find(from) {
            Some(index) if self.is_ours(index, acknowledgement) => {
                self.confirm_eager(index, acknowledgement, now_ns)
            }
            // Of an incarnation that is gone.
            _ => true,
        }
    }

    pub(super) fn take_eager_ack(
        &mut self,
        from: SocketAddrV4,
        acknowledgement: &EagerAcknowledgement,
        now_ns: u64,
    ) {
        let found = self.peers.find(from);
        let Some(index) = found.filter(|&index| self.is_ours(index, acknowledgement)) else {
            self.reject(Fault::Unexpected, from);
            return;
        };
        self.peers.at(index).heard_ns = now_ns;
        if !self.confirm_eager(index, acknowledgement, now_ns) {
            return;
        }
        self.counters.packets_used += 1;
        let next = acknowledgement.next;
        let out = &mut self.peers.at(index).eager_out;
        // Without credit and with nothing under way: a receiver that has lost count will not give any under this
        // numbering.
        if out.oldest.is_none() && serial::precedes(next, out.acknowledged) && out.limit == out.next {
            out.begin_anew(now_ns);
        }
        // The receiver says again where it is: something before what it got is lost.
        let pause_ns = EAGER_REPEAT_SOON_NS << out.resends.min(9);
        if out.oldest.is_some()
            && next == out.acknowledged
            && now_ns.saturating_sub(out.progress_ns.max(out.resent_ns)) > pause_ns
        {
            self.resend_eager(index, now_ns);
        }
    }

    /// Whether an acknowledgement is of messages of ours to this peer, under the present numbering.
    pub(super) fn is_ours(&mut self, index: u16, acknowledgement: &EagerAcknowledgement) -> bool {
        acknowledgement.sender_id == self.peers.at(index).own_id(self.fixed.sender_id)
    }

    /// Settles what a peer acknowledges. `false`: it acknowledges what was never sent.
    pub(super) fn confirm_eager(
        &mut self,
        index: u16,
        acknowledgement: &EagerAcknowledgement,
        now_ns: u64,
    ) -> bool {
        let id = self.peers.id_of(index);
        let peer = self.peers.at(index);
        let (told, counters) = (&mut self.told, &mut self.counters);
        let plausible = (self.sending).acknowledged(peer, id, acknowledgement, now_ns, |completion| {
            told.ended(completion, counters);
        });
        let proved = plausible && std::mem::take(&mut peer.eager_out.proving);
        if !plausible {
            let from = peer.data;
            self.reject(Fault::Acknowledgement, from);
        }
        if proved {
            // What was still on the ring with the proof came before it.
            self.resend_eager(index, now_ns);
        }
        plausible
    }

    /// Sends a peer's unacknowledged messages again, oldest first, as far as there is room.
    pub(crate) fn resend_eager(&mut self, index: u16, now_ns: u64) {
        let (side, peer) = (self.port.side(), self.peers.at(index));
        (self.sending).resend(side, &mut self.memory, peer, &mut self.counters, now_ns);
    }
}
