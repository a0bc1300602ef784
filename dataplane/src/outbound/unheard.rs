//! Messages of which the receiver had not heard when it ended their session: they go over to the next one.

use std::collections::VecDeque;

use lm_protocol::serial;
use lm_protocol::wire::Addressing;

use super::{Outbound, OutgoingTable};

impl Outbound {
    /// The session is over, and messages are under way: its receiver is asked of how many it has heard.
    pub(crate) fn is_over(&mut self, now_ns: u64) {
        self.over_ns.get_or_insert(now_ns);
        self.announce_due = true;
    }

    /// The session is over, and its receiver had heard of so many messages: gives the others.
    pub(crate) fn take_unheard(&mut self, heard: u32) -> VecDeque<u16> {
        let first = self.terms.first_message.wrapping_add(heard);
        let kept = serial::distance(self.first_queued(), first).max(0) as usize;
        let mut unheard = self.queue.split_off(kept.min(self.queue.len()));
        self.next_number = self.next_number.wrapping_sub(unheard.len() as u32);
        self.sending = self.sending.min(self.queue.len());
        unheard.append(&mut self.unwritten);
        unheard
    }

    /// Takes a message over of which the receiver of the session before had not heard. `false`: its region was not cut for this session, or
    /// there is no room.
    pub(crate) fn take_again(
        &mut self,
        table: &mut OutgoingTable,
        addressing: &Addressing,
        slot: u16,
    ) -> bool {
        let outgoing = table.at(slot);
        if *outgoing.geometry.layout() != self.terms.layout
            || outgoing.len > self.terms.max_message_len
            || !self.has_room()
        {
            return false;
        }
        if let Some(stream) = &mut outgoing.stream {
            if !stream.is_cut_for(self.terms.window) {
                return false;
            }
            stream.announce_anew();
            self.streams += 1;
            if !self.terms.takes_streams && !outgoing.is_whole() {
                self.unwritten.push_back(slot);
                return true;
            }
        }
        if std::mem::take(&mut outgoing.has_facts) {
            let geometry = self.terms.layout.session_message(outgoing.len);
            outgoing.geometry = geometry.expect("it was one with facts");
            (outgoing.end, outgoing.fillers) = (outgoing.geometry.fragment_count(), 0);
        }
        outgoing.number = self.next_number;
        outgoing.template = self.template(addressing, &outgoing.geometry);
        outgoing.position = 0;
        (outgoing.missing, outgoing.declined, outgoing.digest) = (None, None, None);
        self.next_number = self.next_number.wrapping_add(1);
        self.queue.push_back(slot);
        true
    }
}
