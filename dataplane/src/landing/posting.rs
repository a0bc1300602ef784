//! Posting: fill entries for a session's messages, in the order of its packets, as far as memory and I5 allow.

use super::aims::{Aim, Owner};
use super::arriving::Arriving;
use super::entries::Entries;
use super::order::Order;
use super::terms::InboundTerms;
use super::zones::Memory;
use crate::memory::{PACKET_HEADROOM, crosses_huge_page};
use crate::mutants::mutant;
use crate::port::RxQueue;

/// What may be posted, or was: packets, and the entries that they take.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Posted {
    pub(super) packets: u32,
    pub(super) frames: u32,
}

/// What entries are posted for, and with what.
pub(super) struct Poster<'a, 'm> {
    pub(super) terms: &'a InboundTerms,
    pub(super) order: &'a mut Order,
    pub(super) owner: Owner,
    /// Entries that may be posted at once.
    pub(super) posted_max: u32,
    /// Packets of the session that have come.
    pub(super) accepted: u64,
    /// Its packets will use what is posted for so many packets before.
    pub(super) ahead: u32,
    /// Bytes that zones of its next messages may take.
    pub(super) may_take: &'a mut u64,
    pub(super) entries: &'a mut Entries,
    pub(super) memory: &'a mut Memory<'m>,
}

impl Poster<'_, '_> {
    /// What may be posted now.
    pub(super) fn room(&self, queue: &mut impl RxQueue) -> Posted {
        // I3d: the RX ring, at least `posted_max` long, has room for everything that is posted.
        let packets = self.posted_max.saturating_sub(self.entries.outstanding());
        if self.terms.caps.capacity > 0 {
            let left = queue.entries_max().saturating_sub(self.entries.frames_out);
            let frames = queue.room(left).min(left);
            return Posted { packets, frames };
        }
        let mut packets = queue.room(packets.min(queue.entries_max())).min(packets);
        let lap = self.entries.caps.lap;
        if lap > 1 {
            packets = match queue.room(lap) < lap {
                true => 0,
                false => self.room_in_laps(packets),
            };
        }
        Posted {
            packets,
            frames: packets,
        }
    }

    /// Writes the fill entries of up to `room` packets, as far as memory and I5 allow, in the session's packet order, and puts them to
    /// the entries' aims.
    pub(super) fn write(&mut self, queue: &mut impl RxQueue, room: Posted) -> Posted {
        let (terms, owner) = (self.terms, self.owner);
        let (has_witness, has_runs) = (terms.caps.witness, terms.caps.has_runs());
        let (met_first, entries) = (self.accepted + u64::from(self.ahead), &mut *self.entries);
        let mut written = Posted::default();
        let mut fillers = entries.spare.as_ref().map_or(0, |_| entries.fillers());
        'messages: while let Some(next) = self.order.next_mut() {
            // Without a witness packets may have come, which digests will find, for a message that no entry is posted for.
            let waits = has_witness && written.packets == room.packets;
            // Of what is being written nothing may come yet: it takes no memory.
            let may_come = next.slots.open > 0;
            if waits
                || !(next.slots.may_post || may_come && self.memory.find(next, terms, true, self.may_take))
            {
                break;
            }
            while next.slots.posted < next.slots.open {
                // The packet that will find the next entry, if none is lost from here on: after a loss it is a later one than the next to
                // be posted for, and the places in between are left out.
                let met_by = met_first + u64::from(written.packets);
                let left = room.packets - written.packets;
                let leaves_out = met_by > next.base + u64::from(next.slots.posted);
                if leaves_out && (left > 0 || !has_witness) {
                    entries.leave_out(next, owner, met_by, &mut fillers);
                    continue;
                }
                if left == 0 {
                    break 'messages;
                }
                if has_runs {
                    let run = entries.write_run(queue, next, owner, written.frames, left);
                    written.packets += run;
                    written.frames += run;
                    if run > 0 {
                        continue;
                    }
                }
                let frames_room = room.frames - written.frames;
                let Some(aim) = entries.next_entry(next, terms, owner, met_by, frames_room) else {
                    break 'messages;
                };
                entries.write_entry(queue, next, terms, &aim, written);
                fillers = 0;
                written.packets += 1;
                written.frames += u32::from(aim.frames);
            }
            if next.slots.posted < next.fragment_count() {
                // It is being written, and those behind it wait for it.
                break;
            }
            self.order.look_for_unposted();
        }
        if written.packets > 0 {
            self.entries.end_zones(written.packets);
        }
        if !has_witness {
            let fillers = self.fillers(room, written);
            let filled = (self.entries).fill(queue, self.terms, self.memory, fillers, written.packets);
            written.packets += filled;
            written.frames += filled;
        }
        written
    }

    /// Entries behind the last messages' that are for no fragment: one for each packet that came and was not the sender's, which has used one of
    /// theirs; and those that fill a lap up.
    fn fillers(&self, room: Posted, written: Posted) -> u32 {
        let expected = self
            .order
            .packets_open()
            .saturating_sub(self.accepted + u64::from(self.ahead));
        let surplus = match self.order.next_open() {
            None => expected.min(room.packets.into()) as u32,
            Some(_) => 0,
        };
        surplus
            .max(written.packets)
            .next_multiple_of(self.entries.caps.lap)
            - written.packets
    }

    /// How many of `room` entries to write so that whole laps are submitted ([`crate::port::Caps::lap`]): less than a lap only when
    /// the sender would have to wait otherwise, because it has to be filled up with spare frames, and fragments that land there
    /// are copied.
    fn room_in_laps(&self, room: u32) -> u32 {
        let lap = self.entries.caps.lap;
        let Some(spare) = &self.entries.spare else {
            return 0;
        };
        let stalls = self.entries.outstanding() <= lap / 4;
        // What may be on the way after losses can be less than a lap: the sender's credit says so, too.
        let room = match room / lap * lap {
            0 if stalls => lap,
            room => room,
        };
        if room == 0 || spare.available() < lap as usize {
            return 0;
        }
        let available = self.postable(room);
        if available >= lap {
            available.min(room) / lap * lap
        } else if stalls {
            available
        } else {
            0
        }
    }

    /// Entries that could be posted now if there is memory, at most `max`.
    fn postable(&self, max: u32) -> u32 {
        let window_len = self.terms.window.fragments();
        let mut entries = 0;
        for message in self.order.unposted() {
            let count = message.slots.open;
            let met_by = self.accepted + u64::from(self.ahead + entries);
            let mut position = message.slots.posted.max(message.sent_of(met_by));
            while position < count && entries < max {
                let window = position / window_len;
                let window_end = count.min((window + 1) * window_len);
                entries += window_end - position;
                position = window_end;
                if !message.slots.rule.may_post_lowest(window) {
                    return (entries - 1).min(max);
                }
            }
            if entries >= max {
                return max;
            }
            if !message.is_released() {
                break;
            }
        }
        let expected = (self.order.packets_open()).saturating_sub(self.accepted + u64::from(self.ahead));
        entries.max(expected.min(u64::from(max)) as u32)
    }
}

impl Entries {
    /// Leaves the places of the message out that are before the `met_by`th packet of the session. Their packets meet entries that are posted
    /// already: the last `fillers` are for no fragment, and become theirs; which else is not known.
    #[cold]
    fn leave_out(&mut self, next: &mut Arriving, owner: Owner, met_by: u64, fillers: &mut u64) {
        let (position, left_out) = (next.slots.posted, next.sent_of(met_by).min(next.slots.open));
        let behind = met_by - (next.base + u64::from(position));
        let all: u64 = self.aims.iter().map(|aim| u64::from(aim.count())).sum();
        let aim = Aim::skipped(owner, next.number, position..left_out);
        if behind <= *fillers {
            self.assign(all - behind, (owner, next.number), position..left_out);
            *fillers = behind - u64::from(left_out - position);
        } else if position == 0 && self.caps.witness && self.open.standing > 0 {
            // What comes to open entries first is copied from there, and nothing of it is awaited where it belongs.
            self.aims.push_front(aim);
        } else {
            self.aims.push_back(aim);
            *fillers = 0;
        }
        next.slots.posted = left_out;
    }

    /// The next entry of the message. `None`: it has to wait.
    #[inline]
    fn next_entry(
        &mut self,
        next: &Arriving,
        terms: &InboundTerms,
        owner: Owner,
        met_by: u64,
        frames_room: u32,
    ) -> Option<Aim> {
        let position = next.slots.posted;
        let mut aim = Aim::skipped(owner, next.number, position..position);
        // Packets came that nobody sent to us; those that they overtook need entries, too, where a digest can say what came there.
        let is_for_none = !terms.caps.witness && next.base + u64::from(position) > met_by;
        if !is_for_none {
            let index = next.index_at(position);
            // I5: the tail of the window before must have arrived and been saved first. The fragment it belongs to is the first of that
            // window to arrive, so posting runs up to two windows ahead.
            let window = next.window.window_of(index);
            let may_post = next.slots.rule.may_post_lowest(window) || mutant!(LowestUnheld);
            if next.window.is_lowest(index) && !may_post {
                return None;
            }
            let frames = terms.frames_of(&next.geometry, index);
            if frames > frames_room {
                return None;
            }
            (aim.until, aim.frames) = (position + 1, frames as u8);
            aim.start = (next.slots.payload).wrapping_add_signed(next.geometry.rx_frame_start(index));
            if !terms.caps.page_ends || !crosses_huge_page(aim.start - PACKET_HEADROOM, terms.chunk_len) {
                return Some(aim);
            }
        }
        aim.spare = true;
        aim.start = self.take_spare()?;
        Some(aim)
    }

    /// Writes the entries of a packet behind those that are `written`.
    #[inline]
    fn write_entry(
        &mut self,
        queue: &mut impl RxQueue,
        next: &mut Arriving,
        terms: &InboundTerms,
        aim: &Aim,
        written: Posted,
    ) {
        let capacity = terms.caps.capacity;
        if capacity > 0 {
            for frame in 1..u32::from(aim.frames) {
                let further = u64::from(frame * capacity);
                queue.write(written.frames + frame, aim.start + further - PACKET_HEADROOM);
            }
            // I2, I3: the gate lets nothing land here that takes more or fewer of them, or is longer.
            let position = self.posted + u64::from(written.packets);
            queue.set_slot(position, aim.frames, terms.layout.max_frame_len());
        }
        queue.write(written.frames, aim.start - PACKET_HEADROOM);
        self.aims.push_back(*aim);
        next.slots.posted = aim.until;
    }
}
