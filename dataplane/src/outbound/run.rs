//! Runs: step 2 for consecutive full fragments of a window, which are most. Their headers differ in one field, their places by one
//! stride and their lengths not at all, so nothing is worked out for each.

use lm_protocol::window::WindowShape;

use super::{Heard, Outgoing, Template, Way};
use crate::checksum::Checksum;
use crate::mutants::mutant;
use crate::port::TxQueue;

impl Outgoing {
    /// Puts packets of up to `max` fragments on the ring, each as [`Outgoing::put_packet`] would, as long as they are a run: the rest of
    /// a window from `highest` down, without a message's last fragment. Each is one descriptor, whole, and goes for the first time. Gives
    /// how many there were and the bytes of each.
    #[inline]
    pub(super) fn put_run(
        &mut self,
        (highest, window): (u32, WindowShape),
        max: u32,
        way: &mut Way<'_, impl TxQueue>,
        sent: &mut Heard<'_>,
    ) -> (u32, u32) {
        let frame_len = u32::from(self.geometry.layout().max_frame_len());
        let Template::Lm(template) = &self.template else {
            return (0, frame_len);
        };
        let Some((header, index_at)) = template.plain_header() else {
            return (0, frame_len);
        };
        // Copied, so that the loop keeps it in registers.
        let header = *header;
        let (first, count) = (self.position, self.geometry.fragment_count());
        if self.has_facts && mutant!(SentForward) {
            return (0, frame_len);
        }
        // A long packet takes several descriptors, and some that the device reads are copied.
        if way.device_reads || frame_len > way.piece_len || highest + 1 >= count {
            return (0, frame_len);
        }
        let left = (first | (window.fragments() - 1)).min(count - 1) + 1 - first;
        let packets = left.min(max);
        let stride = self.geometry.tx_stride();
        let first = self.start + self.geometry.tx_frame_offset(highest);
        let mut address = first;
        for back in 0..packets {
            let index = highest - back;
            // Nobody reads this hole yet: of what goes again, `put_packet` writes the bytes that are there already.
            way.umem
                .copy_to_with(address, &header, index_at, index.to_be_bytes());
            way.channel.put(back, address, frame_len);
            address = address.wrapping_sub(stride);
        }
        if way.channel.checksum != Checksum::None {
            way.channel.sum_up(way.umem, first, packets, stride, frame_len);
        }
        way.channel.has_put(packets);
        if let Some(sent) = sent {
            (0..u64::from(packets)).for_each(|back| sent(way.umem, first - back * stride, frame_len));
        }
        self.in_flight += packets;
        self.position += packets;
        (packets, frame_len)
    }
}
