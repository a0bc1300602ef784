//! Messages that the receiver has settled without their being whole: it declined them, or gave them up.

use lm_protocol::serial;
use lm_protocol::wire::lm::UnwholeMessage;

use super::{Outbound, OutgoingTable};

impl Outbound {
    /// The receiver has settled a message without its being whole: it declined it, or said elsewhere what is missing.
    pub(crate) fn unwhole(&mut self, table: &mut OutgoingTable, unwhole: UnwholeMessage) {
        let first_queued = self.next_number.wrapping_sub(self.queue.len() as u32);
        if let Some(&slot) = (self.queue).get(unwhole.message.wrapping_sub(first_queued) as usize) {
            let outgoing = table.at(slot);
            if unwhole.declined.is_some() {
                outgoing.declined = unwhole.declined;
                return;
            }
            let all = 0..outgoing.geometry.fragment_count();
            outgoing
                .missing
                .get_or_insert_with(|| std::iter::once(all).collect());
        }
    }

    /// Messages that are next to be sent and need not be, since the receiver says that it has settled all before `delivered`, or will not,
    /// since they are aborted; and their packets.
    pub(super) fn not_needed(&self, table: &mut OutgoingTable, delivered: u32) -> (u32, u32) {
        let (mut messages, mut packets) = (0, 0u32);
        for &slot in self.queue.range(self.sending..) {
            let outgoing = table.at(slot);
            let is_over = outgoing.is_unwhole() || outgoing.is_aborted();
            if !is_over || !serial::precedes(outgoing.number, delivered) {
                break;
            }
            messages += 1;
            packets = packets.wrapping_add(outgoing.left());
        }
        (messages, packets)
    }
}
