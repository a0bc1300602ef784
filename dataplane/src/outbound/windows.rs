//! Digests of windows for a receiver whose application reads messages while they arrive: each as its window has left.

use std::ops::Range;

use lm_protocol::manifest::{DIGEST_LEN, window_digest};
use lm_protocol::serial;
use lm_protocol::wire::lm::WindowsPacket;

use super::digests::WANTED_MAX;
use super::{Outbound, OutgoingTable};

impl Outbound {
    /// The receiver asks for digests of `count` windows of a message, from the `first` on. `false`: the message has no such windows, or was
    /// never announced, or there are no digests.
    pub(crate) fn windows_requested(
        &mut self,
        table: &mut OutgoingTable,
        number: u32,
        (first, count): (u32, u32),
    ) -> bool {
        let first_queued = self.first_queued();
        if !self.terms.integrity.has_digests() {
            return false;
        }
        let Some(&slot) = self.queue.get(number.wrapping_sub(first_queued) as usize) else {
            // Settled meanwhile, or never sent.
            return serial::precedes(number, first_queued);
        };
        let fragments = table.at(slot).geometry.fragment_count();
        let all = self.terms.window.count_of_windows(fragments);
        let end = first.saturating_add(count);
        if count == 0 || end > all || !serial::precedes(number, self.announced) {
            return false;
        }
        // What it lacks now is all of that message that it lacks.
        let windows = &mut self.digests.windows;
        windows.retain(|(known, _)| *known != number);
        if windows.len() == WANTED_MAX {
            windows.pop_front();
        }
        windows.push_back((number, first..end));
        true
    }

    #[inline]
    pub(crate) fn has_windows_to_tell(&self) -> bool {
        !self.digests.windows.is_empty()
    }

    /// Messages with windows of which digests are to be told.
    #[cfg(test)]
    pub(crate) fn messages_to_tell_of(&self) -> usize {
        self.digests.windows.len()
    }

    /// Writes the payload of the next WINDOWS packet to the start of `payload`: the header's words, and the payload's length. `None`: no window
    /// that is asked for has left.
    pub(crate) fn next_windows(
        &mut self,
        table: &mut OutgoingTable,
        payload: &mut [u8],
    ) -> Option<([u32; 3], usize)> {
        let first_queued = self.first_queued();
        let Outbound { digests, queue, .. } = self;
        let slot_of = |number: u32| queue.get(number.wrapping_sub(first_queued) as usize).copied();
        digests.windows.retain(|(number, _)| slot_of(*number).is_some());
        let (key, shape) = (self.terms.key, self.terms.window);
        digests.windows.iter().find_map(|(number, windows)| {
            let (outgoing, digests) = table.at_with_digests(slot_of(*number)?);
            let (sent, count) = (outgoing.position, outgoing.geometry.fragment_count());
            let left = match sent == count {
                true => windows.end,
                false => windows.end.min(sent / shape.fragments()),
            };
            let most = (payload.len() / DIGEST_LEN) as u32;
            let ready = windows.start..left.min(windows.start.saturating_add(most));
            let ends = shape.range(ready.end.checked_sub(1)?, count).end;
            let digests = digests.of(outgoing.start, ends);
            let digest_of = |window| {
                let Range { start, end } = shape.range(window, count);
                window_digest(key, *number, window, &digests[start as usize..end as usize])
            };
            WindowsPacket::write(payload, *number, ready.start, ready.map(digest_of))
        })
    }

    /// They have left.
    pub(crate) fn windows_sent(&mut self, [number, first, count]: [u32; 3]) {
        let windows = &mut self.digests.windows;
        for (_, windows) in windows.iter_mut().filter(|(known, _)| *known == number) {
            windows.start = first + count;
        }
        windows.retain(|(_, windows)| !windows.is_empty());
    }
}
