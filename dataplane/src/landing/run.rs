//! Runs: step 7 where nothing happens, which is most of the time. Consecutive fragments of one message, each the one after the
//! last and each in the slot that was posted for it, between a window's edges: no tail is saved or restored (I5), nothing is to be moved
//! and no message becomes whole. What I3 asks is asked of each; what has one answer for all is found out once.

use std::collections::VecDeque;
use std::ops::Range;

use lm_ebpf::{Log, LogEntry};

use super::{Aim, Inbound, Sessions};
use crate::memory::{PACKET_HEADROOM, Umem};
use crate::ring::{FillRing, RxRing};

/// What the fragments of a run have in common, and where the first of them stands.
struct Run {
    serial: u32,
    place: u8,
    number: u32,
    /// Position of the first in transmit order.
    first: u32,
    index: u32,
    frame_len: u16,
    /// The CPU that must have run the gate.
    processor: Option<u8>,
    /// Entries used before.
    received: u64,
}

impl Run {
    /// How many of the descriptors from `offset` on are the run's: in the slots of `aims`, of the run's length, and logged as its
    /// fragments.
    #[inline(never)]
    fn len(&self, aims: &[Aim], rx: &RxRing, log: &Log, offset: u32) -> u32 {
        // One after the other, so that what either compares with stays in registers.
        let landed = self.landed(aims, rx, offset);
        self.logged(landed, log)
    }

    fn landed(&self, aims: &[Aim], rx: &RxRing, offset: u32) -> u32 {
        let is_next = |(aim, at): &(&Aim, u32)| {
            let descriptor = rx.read(offset + at);
            (aim.serial, aim.number, aim.position) == (self.serial, self.number, self.first + at)
                && aim.start == descriptor.start()
                && descriptor.len == u32::from(self.frame_len)
                && !descriptor.continues()
        };
        aims.iter().zip(0..).take_while(is_next).count() as u32
    }

    fn logged(&self, landed: u32, log: &Log) -> u32 {
        let is_next = |at: &u32| {
            let position = self.received + u64::from(*at);
            let entry = log.entry(position);
            let expected = LogEntry {
                sequence: position as u16,
                session: self.place,
                message: self.number,
                index: self.index - at,
                frame_len: self.frame_len,
                padding_len: 0,
                cpu: self.processor.unwrap_or(entry.cpu),
            };
            entry == expected
        };
        (0..landed).take_while(is_next).count() as u32
    }
}

impl Sessions {
    /// Takes the descriptors `offsets` of the ring as far as they are a run, and gives how many those were. The first that is
    /// anything else, an error perhaps, is for [`Sessions::pair`], which would do the same with each of these.
    pub(super) fn receive_run(
        &mut self,
        rx: &RxRing,
        log: &Log,
        umem: &Umem,
        offsets: Range<u32>,
        now_ns: u64,
    ) -> u32 {
        let (aims, _) = self.entries.aims.as_slices();
        let Some(&Aim {
            serial,
            place,
            number,
            position: first,
            ..
        }) = aims.first()
        else {
            return 0;
        };
        let Some(inbound) = self.places[usize::from(place)].as_deref_mut() else {
            return 0;
        };
        let window = inbound.terms.window;
        // A packet of several frames has several descriptors.
        if inbound.terms.capacity > 0 {
            return 0;
        }
        // A window's first fragment has a tail to be saved.
        if first & (window.fragments() - 1) == 0
            || inbound.serial != serial
            || inbound.last != Some((number, first - 1))
        {
            return 0;
        }
        let Some(at) = inbound.position_of(number) else {
            return 0;
        };
        let message = &inbound.messages[at];
        if message.arrivals.expected() != first || message.consumed != first {
            return 0;
        }
        let processor = match (inbound.terms.one_processor, self.entries.processor) {
            (true, None) => return 0,
            (true, processor) => processor,
            (false, _) => None,
        };
        let count = message.geometry.fragment_count();
        // The window's last has the surviving header, and a tail to be restored.
        let window_last = (first | (window.fragments() - 1)).min(count.saturating_sub(1));
        let longest = (window_last.saturating_sub(first)).min(offsets.len() as u32);
        let index = window.index_at(first, count);
        // Of one length: a message's first and last fragment are at edges of windows.
        let frame_len = message.geometry.fragment(index).frame_len();
        let run = Run {
            serial,
            place,
            number,
            first,
            index,
            frame_len,
            processor,
            received: self.entries.received,
        };
        let taken = run.len(&aims[..aims.len().min(longest as usize)], rx, log, offsets.start);
        if taken == 0 {
            return 0;
        }
        if inbound.terms.integrity.has_digests() {
            for (aim, back) in aims[..taken as usize].iter().zip(0..) {
                inbound.note_landed(at, index - back, aim.start, umem);
            }
        }
        let last = first + taken - 1;
        let message = &mut inbound.messages[at];
        message.arrivals.take_next(taken);
        message.consumed += taken;
        inbound.accepted = inbound.accepted.max(message.base + u64::from(last) + 1);
        inbound.last = Some((number, last));
        inbound.progress_ns = now_ns;
        inbound.astray.has_landed();
        inbound.forgiven = false;
        self.entries.aims.drain(..taken as usize);
        self.entries.received += u64::from(taken);
        self.entries.frames_out = self.entries.frames_out.saturating_sub(taken);
        self.pass_skipped(umem);
        taken
    }
}

impl Inbound {
    /// Writes fill entries for the rest of a window of the message at `posting`, but for its lowest fragment (I5), and their aims: up to
    /// `room`, behind the `written` ones. `met_by`: the first of them will be met by this packet of the session, if none is lost.
    /// Gives how many there were: none where places are to be left out first.
    #[inline]
    pub(super) fn write_run(
        &mut self,
        fill: &mut FillRing,
        written: u32,
        room: u32,
        met_by: u64,
        aims: &mut VecDeque<Aim>,
    ) -> u32 {
        let (place, serial, window) = (self.place(), self.serial, self.terms.window);
        let message = &mut self.messages[self.posting];
        let (first, count) = (message.posted, message.geometry.fragment_count());
        let window_last = (first | (window.fragments() - 1)).min(count - 1);
        let entries = (window_last - first).min(room);
        // Of packets of several frames the gate is told each by itself.
        if self.terms.capacity > 0 || entries == 0 || u64::from(first) < met_by.saturating_sub(message.base) {
            return 0;
        }
        let number = message.number;
        let highest = window.index_at(first, count);
        let payload_len = u64::from(message.geometry.layout().payload_len());
        let start = message
            .payload
            .wrapping_add_signed(message.geometry.rx_frame_start(highest));
        // One fragment's frame begins a payload below that of the one before it.
        let start_of = move |entry: u32| start - u64::from(entry) * payload_len;
        for entry in 0..entries {
            fill.write(written + entry, start_of(entry) - PACKET_HEADROOM);
        }
        aims.extend((0..entries).map(move |entry| Aim {
            start: start_of(entry),
            serial,
            place,
            number,
            position: first + entry,
            until: first + entry + 1,
            spare: false,
            frames: 1,
        }));
        message.posted += entries;
        entries
    }
}
