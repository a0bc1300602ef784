//! Posting: fill entries for a session's messages, in the order of its packets, as far as memory and I5 allow.

use std::collections::VecDeque;

use lm_protocol::serial;

use super::sessions::Entries;
use super::{Aim, Inbound, POSTED_SLACK, Zone};
use crate::arena::{Arena, pages_len};
use crate::memory::{PACKET_HEADROOM, fill_address_is_valid};
use crate::port::RxQueue;

impl Inbound {
    /// Writes the fill entries of up to `room` packets, `frames_room` at most, as far as memory and I5 allow, in the session's packet
    /// order, and puts them to `entries`' aims; gives the number of packets and that of entries. Its packets will use what is posted for
    /// `ahead` packets before. Regions that the application chose (`chosen`) are used before the arena.
    pub(super) fn write_entries(
        &mut self,
        queue: &mut impl RxQueue,
        (room, frames_room): (u32, u32),
        ahead: u32,
        entries: &mut Entries,
        arena: &mut Arena,
        chosen: &mut VecDeque<Zone>,
    ) -> (u32, u32) {
        let window_len = self.terms.window.fragments();
        let (place, serial) = (self.place(), self.serial);
        let (mut written, mut frames_written) = (0, 0);
        'messages: while written < room && self.posting < self.messages.len() {
            if self.messages[self.posting].zone.is_none() && !self.find_memory(arena, chosen) {
                break;
            }
            let count = self.messages[self.posting].geometry.fragment_count();
            while self.messages[self.posting].posted < count && written < room {
                let met_by = self.accepted + u64::from(ahead + written);
                let run = self.write_run(queue, frames_written, room - written, met_by, &mut entries.aims);
                if run > 0 {
                    written += run;
                    frames_written += run;
                    continue;
                }
                let message = &mut self.messages[self.posting];
                let position = message.posted;
                // The packet that will find this entry, if none is lost from here on: after a loss it is a later one
                // than the next to be posted for, and the places in between are left out.
                let left_out = met_by.saturating_sub(message.base).min(u64::from(count)) as u32;
                if position < left_out {
                    entries.aims.push_back(Aim {
                        start: Aim::SKIPPED,
                        serial,
                        place,
                        number: message.number,
                        position,
                        until: left_out,
                        spare: false,
                        frames: 0,
                        more: 0,
                        step: 0,
                    });
                    message.posted = left_out;
                    continue;
                }
                let window = position / window_len;
                let window_end = count.min((window + 1) * window_len);
                let lowest = position + 1 == window_end;
                // I5: the tail of the window before must have arrived and been saved first. The fragment it
                // belongs to is the first of that window to arrive, so posting runs up to two windows ahead.
                if lowest && !message.rule.may_post_lowest(window) {
                    break 'messages;
                }
                let index = self.terms.window.index_at(position, count);
                let start = message
                    .payload
                    .wrapping_add_signed(message.geometry.rx_frame_start(index));
                let frames = match self.terms.capacity {
                    0 => 1,
                    capacity => {
                        let frames = self.terms.frames_of(&message.geometry, index);
                        if frames > frames_room - frames_written {
                            break 'messages;
                        }
                        for frame in 1..frames {
                            let further = u64::from(frame * capacity);
                            queue.write(frames_written + frame, start + further - PACKET_HEADROOM);
                        }
                        // I2, I3: the gate lets nothing land here that takes more or fewer of them, or is longer.
                        let position = entries.posted + u64::from(written);
                        queue.set_slot(position, frames as u8, self.terms.layout.max_frame_len());
                        frames
                    }
                };
                queue.write(frames_written, start - PACKET_HEADROOM);
                entries.aims.push_back(Aim {
                    start,
                    serial,
                    place,
                    number: message.number,
                    position,
                    until: position + 1,
                    spare: false,
                    frames: frames as u8,
                    more: 0,
                    step: 0,
                });
                written += 1;
                frames_written += frames;
                message.posted += 1;
            }
            if self.messages[self.posting].posted == count {
                self.posting += 1;
            }
        }
        (written, frames_written)
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
            let further = u64::from((frames - 1) * self.terms.capacity);
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
