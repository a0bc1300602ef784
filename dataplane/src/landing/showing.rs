//! Showing: which windows of a message that is arriving its reader may read already. The rules are [`lm_protocol::streaming`]'s; here is
//! what they are told.
//!
//! ```text
//!  Slots, Gaps, Held ── in place, posted ─┐
//!  pairing.rs ───────── paired (I3) ──────┼─▶ Showing ── ready ──▶ statistics (I3) ──▶ Reading ──▶ Incoming
//!  WINDOWS packets ──── digests ──────────┘
//! ```
//! A look once a round finds all of that in what the parts know anyway, so that messages without a reader cost nothing. It can be late:
//! entries are posted in the order of positions, and of a window that is shown all positions are behind those that are still to be posted.

use std::ops::Range;
use std::sync::Arc;

use lm_protocol::geometry::Wire;
use lm_protocol::integrity::DigestTimer;
use lm_protocol::manifest::window_digest;
use lm_protocol::streaming::{
    Awaits, Ending, Grain, Landing, Part, Release, Released, Showing, Shown, TellError,
};
use lm_protocol::time::Time;

use super::arriving::Arriving;
use super::entries::Entries;
use super::inbound::Inbound;
use super::places::Places;
use super::sessions::Sessions;
use super::terms::InboundTerms;
use crate::arena::Arena;
use crate::completion::PeerId;
use crate::incoming::Reading;
use crate::memory::PACKET_HEADROOM;

/// What shows a message to who reads it while it arrives.
#[derive(Debug)]
pub(crate) struct Reader {
    reading: Arc<Reading>,
    showing: Showing,
    /// All of it, unless the message says something else.
    released: Released,
    /// Positions whose entries `showing` heard of, and those that were used.
    posted: u32,
    consumed: u32,
    grain: Grain,
    /// Of each window how many fragments of the message had been put to their places when its digest was found.
    digested: Box<[Option<u32>]>,
    /// All windows before this one are shown altogether.
    open: u32,
    /// What may be shown when the statistics have not moved.
    ready: Vec<(u32, Part)>,
    /// The sender was asked for the digest of each window as it leaves, or has none.
    has_asked: bool,
    /// A window is in its place, with a digest that agrees, and nothing came behind it whose header would say that the log is right.
    lacks_header: bool,
    /// The first window that is in its place without a digest that agrees.
    lacks: Option<u32>,
    timer: DigestTimer,
}

impl Reader {
    /// One of a message that has its memory; `None`: it is not shown before it is whole.
    fn new(message: &Arriving, terms: &InboundTerms, id: u64, has_digests: bool) -> Option<Reader> {
        let geometry = &message.geometry;
        let payload_len = geometry.layout().payload_len();
        let grain = Grain::new(message.len, payload_len, message.window)?;
        // One IP datagram is not streamed, and padding has no place in windows.
        if geometry.layout().wire() != Wire::Lm || grain.fragments() != geometry.fragment_count() {
            return None;
        }
        let prefix_len = u16::from(terms.caps.prefix_len);
        let tail_len = geometry.layout().header_len() + prefix_len;
        let write_len = match terms.caps.witness {
            true => u32::from(tail_len) + u32::from(payload_len),
            false => terms.chunk_len - PACKET_HEADROOM as u32 + u32::from(prefix_len),
        };
        let landing = Landing {
            has_digests,
            tail_len,
            write_len,
        };
        let mut released = Released::new(grain);
        released.hear(Release::Whole);
        let (about, shown) = (
            (message.number, message.tag, message.len),
            Shown::new(grain, tail_len),
        );
        Some(Reader {
            reading: Arc::new(Reading::new(id, terms.peer, about, message.slots.payload, shown)),
            showing: Showing::new(grain, landing),
            released,
            posted: 0,
            consumed: 0,
            grain,
            digested: vec![None; grain.windows() as usize].into_boxed_slice(),
            open: 0,
            ready: Vec::new(),
            has_asked: !has_digests,
            lacks_header: false,
            lacks: None,
            timer: DigestTimer::default(),
        })
    }

    /// Hears which entries are out.
    fn hear_entries(&mut self, message: &Arriving) {
        let (posted, consumed) = (message.slots.posted, message.slots.consumed);
        // What was posted came back unused, or is void.
        for position in posted..self.posted {
            self.showing.took(message.index_at(position));
        }
        for position in self.posted..posted {
            let posted = self.showing.post(message.index_at(position));
            debug_assert_eq!(posted, Ok(()), "an entry over what is shown");
        }
        for position in self.consumed..consumed {
            self.showing.took(message.index_at(position));
        }
        (self.posted, self.consumed) = (posted, consumed);
    }

    /// Looks what may be shown now.
    fn look(
        &mut self,
        message: &Arriving,
        terms: &InboundTerms,
        places: &Places,
        entries: &Entries,
        lands: bool,
    ) {
        self.hear_entries(message);
        (self.lacks, self.lacks_header) = (None, false);
        let checked = match terms.caps.witness && lands {
            true => entries.checked,
            false => u64::MAX,
        };
        // What is not begun has nothing to be shown.
        let begun = message.slots.consumed.div_ceil(message.window.fragments());
        for window in self.open..begun {
            if self.is_shown(window) || !message.has_window(window) || message.is_held(window, places) {
                continue;
            }
            self.showing.in_place(window, entries.received);
            if places.evidence().has_digests() {
                self.find_digest(message, terms, places, window);
            }
            match self.showing.show(window, checked, &message.slots.rule) {
                Ok(part) => self.ready.push((window, part)),
                Err(Awaits::Digest) => _ = self.lacks.get_or_insert(window),
                Err(Awaits::Header) => self.lacks_header = true,
                Err(Awaits::Packets) => {}
            }
        }
    }

    /// All of a window is shown.
    fn is_shown(&self, window: u32) -> bool {
        self.reading.shown.check(self.grain.bytes(window)).is_ok()
    }

    /// Finds the digest of a window that is in its place, if anything was put there since it was found last.
    fn find_digest(&mut self, message: &Arriving, terms: &InboundTerms, places: &Places, window: u32) {
        let put = Some(message.gaps.put);
        let Some(zone) = message.slots.zone else { return };
        if std::mem::replace(&mut self.digested[window as usize], put) != put {
            let range = message.window.range(window, message.fragment_count());
            let digests = &places.evidence().digests_of(zone, range.end)[range.start as usize..];
            let digest = window_digest(terms.key, message.number, window, digests);
            self.showing.found(window, digest);
        }
    }

    /// The statistics have not moved: shows what is ready.
    fn show(&mut self) {
        if !self.ready.is_empty() {
            for (window, part) in self.ready.drain(..) {
                self.reading.shown.publish(window, part);
            }
            self.reading.tell();
        }
        while self.open < self.grain.windows() && self.is_shown(self.open) {
            self.open += 1;
        }
    }

    /// It is the application's: whole, or without something.
    pub(crate) fn landed(mut self: Box<Reader>, is_whole: bool) {
        self.settle(match is_whole {
            true => Ending::Whole,
            false => Ending::Incomplete,
        });
    }

    /// It was given up.
    pub(super) fn given_up(&mut self, is_aborted: bool) {
        self.settle(match is_aborted {
            true => Ending::Aborted,
            false => Ending::Incomplete,
        });
    }

    fn settle(&mut self, ending: Ending) {
        if self.showing.settle(ending, &self.reading.shown) {
            self.reading.settle(ending);
        }
    }

    /// It lies elsewhere from now on, in the region at `start`.
    pub(super) fn moved(&self, start: u64, payload: u64, arena: &mut Arena) {
        if self.showing.is_held() {
            arena.hold(self.reading.id, start);
            self.reading.moved(payload);
        }
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        // Unless its end was told before.
        self.settle(Ending::SessionEnded);
    }
}

impl Arriving {
    /// Its sender waits for its writer, and somebody for what is released, which is here: what keeps it from being shown are entries that are
    /// left, or that nothing comes behind it.
    pub(super) fn is_kept_from_reader(&self) -> bool {
        !self.is_released()
            && self.awaits_writer(true)
            && (self.reader.as_ref()).is_some_and(|reader| {
                reader.showing.is_held() && (reader.lacks_header || self.slots.consumed < self.slots.posted)
            })
    }

    /// Something of it is shown to who reads it: it stays where it is.
    pub(super) fn is_read(&self) -> bool {
        (self.reader.as_ref()).is_some_and(|reader| reader.showing.keeps(0..reader.grain.windows()))
    }

    /// Fragment `index` is shown: its bytes stay what they are.
    pub(super) fn shows(&self, index: u32) -> bool {
        let window = self.window.window_of(index);
        (self.reader.as_ref()).is_some_and(|reader| reader.showing.keeps(window..window + 1))
    }

    /// Every fragment of a window is here, and every entry that was posted for it is used.
    fn has_window(&self, window: u32) -> bool {
        let positions = self.window.range(window, self.fragment_count());
        let arrivals = &self.gaps.arrivals;
        let is_of_it = |range: &Range<u32>| range.start < positions.end && positions.start < range.end;
        positions.end <= self.slots.consumed.min(arrivals.expected())
            && !arrivals.missing().iter().any(is_of_it)
    }

    /// A fragment of a window waits for its place.
    fn is_held(&self, window: u32, places: &Places) -> bool {
        let positions = self.window.range(window, self.fragment_count());
        let mut held = places.held().of(self.number);
        self.gaps.held > 0 && held.any(|(position, _)| positions.contains(&position))
    }

    /// What landed of the window of fragment `index` did so up to the `received`th packet of the channel: it was in another's slot, or in the
    /// window's lowest, where its header was checked.
    #[inline]
    pub(super) fn landed_up_to(&mut self, index: u32, received: u64) {
        if let Some(reader) = &mut self.reader {
            reader.showing.landed(self.window.window_of(index), received);
        }
    }
}

impl Sessions {
    /// Windows that are ready to be shown, and are not yet.
    #[cfg(test)]
    pub(crate) fn ready_windows(&self) -> usize {
        let messages = self.iter().flat_map(|inbound| inbound.order.iter());
        let readers = messages.flat_map(|message| &message.reader);
        readers.map(|reader| reader.ready.len()).sum()
    }

    /// Looks what may be shown of messages from the peers in `watched`, and tells `begun` of those that are new. Whether there is anything for
    /// which the statistics have to be looked at first (I3).
    pub(crate) fn look_at_windows(
        &mut self,
        watched: &[PeerId],
        next_id: &mut u64,
        arena: &mut Arena,
        mut begun: impl FnMut(Arc<Reading>),
    ) -> bool {
        let mut is_any = false;
        for inbound in self.rows.iter_mut().filter_map(Option::as_deref_mut) {
            if watched.contains(&inbound.terms.peer) {
                while let Some(reading) = inbound.next_reading(next_id, arena) {
                    begun(reading);
                }
                is_any |= inbound.look_at_windows(&self.entries);
            }
        }
        is_any
    }
}

impl Inbound {
    /// Begins to show the next message that has its memory and no reader. `next_id` names it.
    fn next_reading(&mut self, next_id: &mut u64, arena: &mut Arena) -> Option<Arc<Reading>> {
        let has_digests = self.places.evidence().has_digests();
        for message in self.order.iter_mut() {
            let (Some(zone), None) = (message.slots.zone, &message.reader) else {
                continue;
            };
            if let Some(reader) = Reader::new(message, &self.terms, *next_id, has_digests) {
                *next_id += 1;
                let reading = Arc::clone(&reader.reading);
                arena.hold(reading.id, zone.start);
                message.reader = Some(Box::new(reader));
                return Some(reading);
            }
        }
        None
    }

    /// Looks what may be shown of messages that have a reader. Whether there is anything for which the log vouches.
    fn look_at_windows(&mut self, entries: &Entries) -> bool {
        let (lands, mut is_any) = (self.lands(), false);
        if self.order.front().is_some_and(Arriving::is_kept_from_reader) {
            self.places.trouble();
        }
        for message in self.order.iter_mut() {
            if let Some(mut reader) = message.reader.take() {
                if reader.showing.is_held() {
                    reader.look(message, &self.terms, &self.places, entries, lands);
                }
                is_any |= lands && !reader.ready.is_empty();
                message.reader = Some(reader);
            }
        }
        is_any
    }

    /// Shows what was found, the statistics being unmoved.
    pub(crate) fn show_windows(&mut self) {
        for message in self.order.iter_mut() {
            if let Some(reader) = &mut message.reader {
                reader.show();
            }
        }
    }

    /// The application has let a reading go. Whether it was one of this session's, of a message that is arriving.
    pub(crate) fn let_go(&mut self, id: u64) -> bool {
        let mut readers = self
            .order
            .iter_mut()
            .filter_map(|message| message.reader.as_mut());
        let reader = readers.find(|reader| reader.reading.id == id);
        reader.is_some_and(|reader| {
            reader.showing.let_go();
            reader.reading.settled().is_none()
        })
    }

    /// Whether it is to be said, once, that messages which somebody reads are shown when they are whole.
    pub(crate) fn says_whole(&mut self) -> bool {
        let is_so = !self.terms.tells_windows && self.places.evidence().has_digests();
        let is_read = is_so && self.order.iter().any(|message| message.reader.is_some());
        is_read && !std::mem::replace(&mut self.has_said_whole, true)
    }

    /// The next request for digests of windows that is due: of which message, the first window, and how many there are from there on.
    pub(crate) fn next_windows_request(&mut self, now_ns: u64) -> Option<(u32, u32, u32)> {
        let now = Time::from_nanos(now_ns);
        let mut messages = self.order.iter_mut().filter(|_| self.terms.tells_windows);
        messages.find_map(|message| {
            let reader = message
                .reader
                .as_mut()
                .filter(|reader| reader.showing.is_held())?;
            let windows = reader.grain.windows();
            if !std::mem::replace(&mut reader.has_asked, true) {
                return Some((message.number, 0, windows));
            }
            let Some(first) = reader.lacks else {
                reader.timer = DigestTimer::default();
                return None;
            };
            (reader.timer.poll(now)).then_some((message.number, first, windows - first))
        })
    }

    /// Takes digests of windows of message `number`: how many are new. `None`: nobody asked for them.
    pub(crate) fn take_windows(
        &mut self,
        (number, first): (u32, u32),
        digests: impl ExactSizeIterator<Item = u64>,
        now_ns: u64,
    ) -> Option<Result<u32, TellError>> {
        let Some(at) = self.order.position_of(number) else {
            // Those of a message's last window may come when it is settled.
            return self.order.knows(number).then_some(Ok(0));
        };
        let has_digests = self.places.evidence().has_digests();
        let message = self.order.at_mut(at);
        let reader = message.reader.as_mut().filter(|_| has_digests)?;
        let released = message.released.as_deref().unwrap_or(&reader.released);
        let told = reader.showing.tell(first, digests, released);
        if matches!(told, Ok(1..)) {
            reader.timer.progressed(Time::from_nanos(now_ns));
        }
        Some(told)
    }
}
