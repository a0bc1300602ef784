//! Posting: fill entries for a session's messages, in the order of its packets, as far as memory and I5 allow.

use std::collections::VecDeque;

use lm_protocol::serial;

use super::sessions::Entries;
use super::{Aim, Inbound, POSTED_SLACK, Zone};
use crate::arena::{Arena, pages_len};
use crate::memory::{PACKET_HEADROOM, crosses_huge_page, fill_address_is_valid};
use crate::port::RxQueue;

/// What may be posted, or was: packets, and the entries that they take.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Posted {
    pub(super) packets: u32,
    pub(super) frames: u32,
}

impl Inbound {
    /// Writes the fill entries of up to `room` packets, as far as memory and I5 allow, in the session's packet order, and puts them to
    /// `entries`' aims. Its packets will use what is posted for `ahead` packets before. Regions that the application chose (`chosen`) are
    /// used before the arena.
    pub(super) fn write_entries(
        &mut self,
        queue: &mut impl RxQueue,
        room: Posted,
        ahead: u32,
        entries: &mut Entries,
        arena: &mut Arena,
        chosen: &mut VecDeque<Zone>,
    ) -> Posted {
        let mut written = Posted::default();
        let mut fillers = entries.fillers();
        let has_witness = self.terms.caps.witness;
        'messages: while let Some(next) = self.messages.get(self.posting) {
            // Without a witness packets may have come, which digests will find, for a message that no entry is posted for.
            let waits = has_witness && written.packets == room.packets;
            if waits || (next.zone.is_none() && !self.find_memory(arena, chosen)) {
                break;
            }
            let count = self.messages[self.posting].fragment_count();
            while self.messages[self.posting].posted < count {
                let met_by = self.accepted + u64::from(ahead + written.packets);
                let left = room.packets - written.packets;
                let run = self.write_run(queue, written.frames, left, met_by, &mut entries.aims);
                if run > 0 {
                    written.packets += run;
                    written.frames += run;
                    continue;
                }
                if (left > 0 || !has_witness) && self.leave_out(met_by, entries, &mut fillers) {
                    continue;
                }
                if left == 0 {
                    break 'messages;
                }
                let Some(aim) = self.next_entry(met_by, room.frames - written.frames, entries) else {
                    break 'messages;
                };
                self.write_entry(
                    queue,
                    &aim,
                    written.frames,
                    entries.posted + u64::from(written.packets),
                );
                entries.aims.push_back(aim);
                fillers = 0;
                written.packets += 1;
                written.frames += u32::from(aim.frames);
                self.messages[self.posting].posted = aim.until;
            }
            self.posting += 1;
        }
        // Packets that nobody sent to us have used entries of the last messages.
        let expected = self
            .announced_packets
            .saturating_sub(self.accepted + u64::from(ahead));
        while self.posting == self.messages.len()
            && written.packets < room.packets
            && u64::from(written.packets) < expected
            && let Some(start) = entries.take_spare()
        {
            self.write_spare(queue, written.frames, start, &mut entries.aims);
            written.packets += 1;
            written.frames += 1;
        }
        written
    }

    /// The packet that will find the next entry, if none is lost from here on, is the `met_by`th: after a loss it is a later one than the next
    /// to be posted for, and the places in between are left out. Their packets meet entries that are posted already: the last `fillers` are
    /// for no fragment, and become theirs; which else, nobody knows. Whether there were such places.
    fn leave_out(&mut self, met_by: u64, entries: &mut Entries, fillers: &mut u64) -> bool {
        let (place, serial) = (self.place(), self.serial);
        let message = &mut self.messages[self.posting];
        let (position, count) = (message.posted, message.geometry.fragment_count());
        let left_out = met_by.saturating_sub(message.base).min(u64::from(count)) as u32;
        if position >= left_out {
            return false;
        }
        let mut aim = Aim::skipped(serial, place, message.number, position..left_out);
        let behind = met_by - (message.base + u64::from(position)) - 1;
        let filler = (behind < *fillers).then(|| entries.aims.iter_mut().nth_back(behind as usize));
        match filler.flatten() {
            Some(filler) => {
                (aim.start, aim.spare, aim.until) = (filler.start, true, position + 1);
                *filler = aim;
                *fillers = behind;
            }
            None => {
                entries.aims.push_back(aim);
                *fillers = 0;
            }
        }
        message.posted = aim.until;
        true
    }

    /// The next entry of the message at `posting`. `None`: it has to wait.
    fn next_entry(&self, met_by: u64, frames_room: u32, entries: &mut Entries) -> Option<Aim> {
        let message = &self.messages[self.posting];
        let (position, count) = (message.posted, message.geometry.fragment_count());
        let mut aim = Aim::skipped(self.serial, self.place(), message.number, position..position);
        // Packets came that nobody sent to us; those that they overtook need entries, too, where a digest can say what came there.
        let is_for_none = entries.spare.is_some() && message.base + u64::from(position) > met_by;
        if !is_for_none {
            let window = self.terms.window;
            let index = window.index_at(position, count);
            // I5: the tail of the window before must have arrived and been saved first. The fragment it belongs to is the first of that
            // window to arrive, so posting runs up to two windows ahead.
            if window.is_lowest(index) && !message.rule.may_post_lowest(window.window_of(index)) {
                return None;
            }
            let frames = self.terms.frames_of(&message.geometry, index);
            if frames > frames_room {
                return None;
            }
            (aim.until, aim.frames) = (position + 1, frames as u8);
            aim.start = message
                .payload
                .wrapping_add_signed(message.geometry.rx_frame_start(index));
            let caps = &self.terms.caps;
            if !caps.page_ends || !crosses_huge_page(aim.start - PACKET_HEADROOM, self.terms.chunk_len) {
                return Some(aim);
            }
        }
        aim.spare = true;
        aim.start = entries.take_spare()?;
        Some(aim)
    }

    /// Writes the entries of a packet, the `position`th of the channel, behind so many `written` ones.
    fn write_entry(&self, queue: &mut impl RxQueue, aim: &Aim, written: u32, position: u64) {
        let capacity = self.terms.caps.capacity;
        if capacity > 0 {
            for frame in 1..u32::from(aim.frames) {
                let further = u64::from(frame * capacity);
                queue.write(written + frame, aim.start + further - PACKET_HEADROOM);
            }
            // I2, I3: the gate lets nothing land here that takes more or fewer of them, or is longer.
            queue.set_slot(position, aim.frames, self.terms.layout.max_frame_len());
        }
        queue.write(written, aim.start - PACKET_HEADROOM);
    }

    /// Writes an entry that is for no fragment: the spare frame in which `start` lies.
    fn write_spare(&self, queue: &mut impl RxQueue, written: u32, start: u64, aims: &mut VecDeque<Aim>) {
        queue.write(written, start - PACKET_HEADROOM);
        aims.push_back(Aim {
            start,
            spare: true,
            ..Aim::skipped(self.serial, self.place(), self.announced, 0..0)
        });
    }

    /// What may be posted of it now. Its packets will use what is posted for `ahead` packets before.
    pub(super) fn room(&self, queue: &mut impl RxQueue, entries: &Entries, ahead: u32) -> Posted {
        // I3d: the RX ring, at least `posted_max` long, has room for everything that is posted.
        let packets = self.posted_max().saturating_sub(entries.outstanding());
        if self.terms.caps.capacity > 0 {
            let left = queue.entries_max().saturating_sub(entries.frames_out);
            let frames = queue.room(left).min(left);
            return Posted { packets, frames };
        }
        let mut packets = queue.room(packets.min(queue.entries_max())).min(packets);
        let lap = entries.caps.lap;
        if lap > 1 {
            packets = match queue.room(lap) < lap {
                true => 0,
                false => self.room_in_laps(entries, packets, ahead),
            };
        }
        Posted {
            packets,
            frames: packets,
        }
    }

    /// Writes so many spare frames behind the `written` entries that a lap is full.
    pub(super) fn fill_lap(&self, queue: &mut impl RxQueue, written: &mut Posted, entries: &mut Entries) {
        let Some(spare) = &mut entries.spare else { return };
        while !written.packets.is_multiple_of(entries.caps.lap) {
            let frame = spare.take().expect("as many were kept");
            let start = frame.into_address() + PACKET_HEADROOM;
            self.write_spare(queue, written.frames, start, &mut entries.aims);
            written.packets += 1;
            written.frames += 1;
        }
    }

    /// Entries that may be posted at once. While back-off holds they are few: what is posted when a packet is lost is met by the one
    /// behind it, and each of those is copied to its place.
    pub(super) fn posted_max(&self) -> u32 {
        let allowed = self.on_the_way();
        match allowed < self.terms.on_the_way {
            true => (allowed + POSTED_SLACK).min(self.terms.posted_max),
            false => self.terms.posted_max,
        }
    }

    /// Whether entries may be posted for more packets, memory permitting.
    pub(super) fn wants_entries(&self) -> bool {
        self.lands && self.posting < self.messages.len()
    }

    /// Whether its sender has something to send for which it needs a turn: entries, or, where others' packets used those that were
    /// posted for it, credit alone. Asked while it is not its turn.
    pub(super) fn wants_turn(&self) -> bool {
        let needs_credit =
            self.lands && self.left() > 0 && serial::precedes(self.allowed, self.announced_packets as u32);
        !self.is_silent && (self.wants_entries() || needs_credit)
    }

    /// Packets of the session up to the last that an entry was posted for, or left out.
    pub(super) fn provided(&self) -> u64 {
        match self.messages.get(self.posting) {
            Some(message) => message.base + u64::from(message.posted),
            None => self.announced_packets,
        }
    }

    /// Packets of announced messages that have not come.
    pub(super) fn left(&self) -> u64 {
        self.announced_packets.saturating_sub(self.accepted)
    }

    /// Bytes of the next zone that it needs, where there is none for its next message.
    pub(super) fn next_zone_len(&self) -> Option<u64> {
        let next = self.messages.get(self.posting)?;
        (next.zone.is_none()).then(|| self.zone_of(&next.geometry).0)
    }

    /// Bytes in pages of all zones of its messages that begin below UMEM address `end`.
    pub(crate) fn zones_len(&self, end: u64) -> u64 {
        let zones = self.messages.iter().filter_map(|message| message.zone);
        { zones }
            .filter(|zone| zone.start < end)
            .map(|zone| pages_len(zone.len))
            .sum()
    }

    /// Finds memory for the message at `posting`.
    pub(super) fn find_memory(&mut self, arena: &mut Arena, chosen: &mut VecDeque<Zone>) -> bool {
        let geometry = self.messages[self.posting].geometry;
        let (zone_len, front_margin) = self.zone_of(&geometry);
        let registered = self.terms.registered_len;
        let zone = match chosen.front() {
            Some(zone) if zone.len >= zone_len => chosen.pop_front(),
            _ if zone_len > self.may_take => None,
            _ => match self.lands {
                true => arena.allocate_in(zone_len, 0, registered),
                // What others can land in is left to them, where there is more.
                false => {
                    (arena.allocate_in(zone_len, registered, u64::MAX)).or_else(|| arena.allocate(zone_len))
                }
            }
            .map(|start| Zone { start, len: zone_len }),
        };
        let Some(zone) = zone else { return false };
        self.may_take = self.may_take.saturating_sub(zone.len);
        let payload = zone.start + front_margin;
        // I2: every entry of this message is valid and writes inside the zone. The lowest and the highest
        // bound all others; the last fragment's packet may take fewer than the one before it.
        let last = geometry.fragment_count() - 1;
        for index in [0, last.saturating_sub(1), last] {
            let entry = payload.wrapping_add_signed(geometry.rx_frame_start(index)) - PACKET_HEADROOM;
            let frames = self.terms.frames_of(&geometry, index);
            let further = u64::from((frames - 1) * self.terms.caps.capacity);
            assert!(
                entry >= zone.start
                    && entry + further + u64::from(self.terms.chunk_len) <= zone.start + zone.len
                    && (!self.lands
                        || fill_address_is_valid(entry + further, self.terms.chunk_len, registered)),
                "fill entry outside its landing zone"
            );
        }
        let message = &mut self.messages[self.posting];
        message.zone = Some(zone);
        message.payload = payload;
        true
    }
}
