//! Runs: step 7 where nothing happens, which is most of the time. Consecutive fragments of one message, each the one after the
//! last and each in the slot that was posted for it, between a window's edges: no tail is saved or restored (I5), nothing is to be moved
//! and no message becomes whole. What I3 asks is asked of each; what has one answer for all is found out once.

use std::ops::Range;

use lm_protocol::landing::LogEntry;

use super::aims::{Aim, Owner};
use super::arriving::Arriving;
use super::entries::Entries;
use super::sessions::Sessions;
use crate::memory::{PACKET_HEADROOM, Umem};
use crate::port::RxQueue;

/// What the fragments of a run have in common, and where the first of them stands.
struct Run {
    row: u8,
    number: u32,
    index: u32,
    frame_len: u16,
    /// Entries used before.
    received: u64,
}

impl Run {
    /// How many of the descriptors from `offset` on, `longest` at most, are the run's: in the slots of `aim`, of the run's length, and
    /// logged as its fragments.
    #[inline(never)]
    fn len(&self, aim: &Aim, longest: u32, queue: &impl RxQueue, offset: u32) -> u32 {
        // One after the other, so that what either compares with stays in registers.
        let is_next = |at: &u32| {
            let descriptor = queue.packet(offset + at);
            descriptor.start() == aim.start.wrapping_sub(u64::from(*at) * u64::from(aim.step))
                && descriptor.len == u32::from(self.frame_len)
                && !descriptor.continues()
        };
        let landed = (0..longest.min(aim.more + 1)).take_while(is_next).count() as u32;
        let first = LogEntry {
            sequence: self.received as u16,
            session: self.row,
            message: self.number,
            index: self.index,
            frame_len: self.frame_len,
            padding_len: 0,
            cpu: 0,
        };
        queue.descending(self.received, &first, landed)
    }
}

impl Sessions {
    /// Takes the descriptors `offsets` of the ring as far as they are a run, and gives how many those were. The first that is
    /// anything else, an error perhaps, is for [`Sessions::pair`], which would do the same with each of these.
    pub(super) fn receive_run(
        &mut self,
        queue: &impl RxQueue,
        umem: &Umem,
        offsets: Range<u32>,
        now_ns: u64,
    ) -> u32 {
        let Some(aim) = self.entries.aims.front_mut() else {
            return 0;
        };
        let &mut Aim {
            start,
            owner,
            number,
            position: first,
            more,
            step,
            spare,
            ..
        } = aim;
        let Some(inbound) = self.rows[usize::from(owner.row)].as_deref_mut() else {
            return 0;
        };
        let window = inbound.terms.window;
        if spare || !inbound.terms.caps.has_runs() {
            return 0;
        }
        // A window's first fragment has a tail to be saved.
        if first & (window.fragments() - 1) == 0
            || inbound.serial != owner.serial
            || !inbound.progress.is_last((number, first.wrapping_sub(1)))
        {
            return 0;
        }
        let Some(at) = inbound.order.position_of(number) else {
            return 0;
        };
        let message = inbound.order.at_mut(at);
        if message.gaps.arrivals.expected() != first || message.slots.consumed != first {
            return 0;
        }
        let count = message.fragment_count();
        // The window's last has the surviving header, and a tail to be restored.
        let window_last = (first | (window.fragments() - 1)).min(count.saturating_sub(1));
        let longest = (window_last.saturating_sub(first)).min(offsets.len() as u32);
        let index = window.index_at(first, count);
        // Of one length: a message's first and last fragment are at edges of windows.
        let frame_len = message.geometry.fragment(index).frame_len();
        let run = Run {
            row: owner.row,
            number,
            index,
            frame_len,
            received: self.entries.received,
        };
        let taken = run.len(aim, longest, queue, offsets.start);
        if taken == 0 {
            return 0;
        }
        let evidence = inbound.places.evidence_mut();
        if evidence.has_digests() {
            for back in 0..taken {
                let start = start - u64::from(back) * u64::from(step);
                evidence.note_landed(message, index - back, start, umem);
            }
        }
        let last = first + taken - 1;
        message.gaps.arrivals.take_next(taken);
        message.slots.consumed += taken;
        message.slots.final_to = message.slots.consumed;
        let end = message.base + u64::from(last) + 1;
        inbound.progress.accept((number, last), end, now_ns);
        inbound.astray.has_landed();
        if taken > more {
            self.entries.aims.pop_front();
        } else {
            aim.pass(taken);
        }
        self.entries.received += u64::from(taken);
        self.entries.frames_out = self.entries.frames_out.saturating_sub(taken);
        self.pass_skipped(umem);
        taken
    }
}

impl Entries {
    /// Writes fill entries for the rest of a window of a message, but for its lowest fragment (I5), and their aims: up to
    /// `room`, behind the `written` ones. Gives how many there were.
    #[inline]
    pub(super) fn write_run(
        &mut self,
        queue: &mut impl RxQueue,
        message: &mut Arriving,
        owner: Owner,
        written: u32,
        room: u32,
    ) -> u32 {
        let (first, count) = (message.slots.posted, message.fragment_count());
        let window_last = (first | (message.window.fragments() - 1)).min(count - 1);
        let entries = (window_last - first).min(room);
        if entries == 0 {
            return 0;
        }
        let number = message.number;
        let highest = message.window.index_at(first, count);
        let payload_len = u64::from(message.geometry.layout().payload_len());
        let start = (message.slots.payload).wrapping_add_signed(message.geometry.rx_frame_start(highest));
        message.slots.posted += entries;
        // One fragment's frame begins a payload below that of the one before it.
        for entry in 0..entries {
            queue.write(
                written + entry,
                start - u64::from(entry) * payload_len - PACKET_HEADROOM,
            );
        }
        let aim = Aim {
            start,
            owner,
            number,
            position: first,
            until: first + 1,
            spare: false,
            frames: 1,
            more: entries - 1,
            step: payload_len as u32,
        };
        self.add(&aim);
        entries
    }

    /// Adds entries behind the last ones.
    #[inline]
    pub(super) fn add(&mut self, aim: &Aim) {
        match self.aims.back_mut() {
            Some(back) if back.is_followed_by(aim) => back.more += aim.more + 1,
            _ => self.aims.push_back(*aim),
        }
    }
}
