//! A message on its way in: what was announced of it, where it lies, and what of it is here.

use std::ops::Range;

use lm_protocol::delivery::{Arrivals, RequestTimer};
use lm_protocol::geometry::{Geometry, Layout, Wire};
use lm_protocol::streaming::{Grain, Heard, Release, Released};
use lm_protocol::time::Time;
use lm_protocol::window::{TailRule, WindowShape};

use super::placed::Place;
use super::showing::Reader;
use super::terms::InboundTerms;
use crate::fragment_digests::PAYLOAD_LEN_MIN;
use crate::memory::{CHUNK_LEN_RANGE, PACKET_HEADROOM, Umem};
use crate::mutants::mutant;
use crate::words::Words;

/// [`InboundTerms::reach`] at most: fragments in the longest chunk, where the first has eight bytes less than others.
const REACH_MAX: usize =
    (*CHUNK_LEN_RANGE.end() as usize - PACKET_HEADROOM as usize) / (PAYLOAD_LEN_MIN as usize - 8);
/// Longest header that a saved tail can hold: Ethernet with two tags, IPv4, UDP, LM, and a driver's prefix.
pub(super) const TAIL_LEN_MAX: usize = 128;

/// A landing zone taken from the arena, or from an application's region: what goes back is exactly this.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Zone {
    pub(crate) start: u64,
    pub(crate) len: u64,
    /// It is a region that a [`crate::placing::ZoneSource`] gave.
    pub(crate) placed: bool,
}

impl Zone {
    /// One taken from the arena.
    pub(crate) fn of_arena(start: u64, len: u64) -> Zone {
        Zone {
            start,
            len,
            placed: false,
        }
    }
}

/// What its sender says of a message.
#[derive(Clone, Copy, Debug)]
pub(crate) struct About {
    /// Bytes of the message.
    pub(crate) len: u64,
    pub(crate) tag: u64,
    pub(crate) words: Words,
    /// Facts lie behind its bytes.
    pub(crate) has_facts: bool,
}

/// A message that was announced and is not settled.
#[derive(Debug)]
pub(super) struct Arriving {
    pub(super) number: u32,
    pub(super) tag: u64,
    pub(super) geometry: Geometry,
    pub(super) window: WindowShape,
    /// Length of the message; the geometry may have padding behind it, or facts.
    pub(super) len: u64,
    pub(super) has_facts: bool,
    /// It landed in open entries: the header in its lowest slot may be gone before it is looked at, and others land below it.
    pub(super) is_claimed: bool,
    /// Packets behind its last fragment's that belong to it.
    pub(super) fillers: u32,
    pub(super) announced_ns: u64,
    /// Packets of the session before this message's first.
    pub(super) base: u64,
    pub(super) slots: Slots,
    pub(super) gaps: Gaps,
    pub(super) shift: Shift,
    /// What is known about its bytes being its sender's.
    pub(super) proof: Proof,
    pub(super) place: Place,
    /// How much of it its sender released, where it was announced before it was whole: few are.
    pub(super) released: Option<Box<Released>>,
    /// Opaque bytes of its sender's.
    pub(super) words: Words,
    /// What shows it to who reads it while it arrives.
    pub(super) reader: Option<Box<Reader>>,
    /// It is to be settled as it is, once nothing is posted for it.
    pub(super) ends_here: bool,
}

/// Where a message lies, and who may still write there.
#[derive(Debug)]
pub(super) struct Slots {
    pub(super) zone: Option<Zone>,
    /// There is a zone, and entries may be posted there.
    pub(super) may_post: bool,
    /// `R`: UMEM address of the first payload byte.
    pub(super) payload: u64,
    /// Positions (transmit order) whose fill entry is posted, or never will be.
    pub(super) posted: u32,
    /// Positions whose fill entry was used, or never will be.
    pub(super) consumed: u32,
    /// Positions before this one may come: all, but of a message that is being written at its sender.
    pub(super) open: u32,
    /// Of these, the ones whose places are final (I1): nothing that is posted lets anybody write there but at saved tails. All of them,
    /// but in zero-copy mode, where the last ones lie within the chunks of the next entries ([`InboundTerms::reach`]).
    pub(super) final_to: u32,
    /// Payload bytes of what lies at the last positions, until these are final; `None`: nothing that belongs there.
    landed: [Option<u16>; REACH_MAX + 1],
    /// When a window's lowest entry may be posted and which tail is where (I5).
    pub(super) rule: TailRule,
    /// Saved tails; [`TailRule::slot`] says which window uses which.
    tails: [Tail; 2],
}

/// What of a message is here.
#[derive(Debug)]
pub(super) struct Gaps {
    pub(super) arrivals: Arrivals,
    /// When to ask for those that are missing.
    pub(super) timer: RequestTimer,
    /// Fragments that wait for their place to be free.
    pub(super) held: u32,
    /// Fragments that were copied to their places (mod 2^32).
    pub(super) put: u32,
    /// When something was first found to be missing.
    pub(super) missing_ns: Option<u64>,
}

/// Zero-copy mode: what is known of fragments that lie in others' slots.
#[derive(Debug, Default)]
pub(super) struct Shift {
    /// What is missing now was looked for by digest.
    pub(super) located: bool,
    /// With IP fragments: payload bytes at the first one's place, if it is another, whose header is shorter; or 0.
    pub(super) other_len: u16,
    /// By how many packets what landed last was ahead of the entry's own, as far as was known then, less the session's corrections by then.
    pub(super) ahead: i32,
}

/// What the digests say about a message.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Verdict {
    /// Not looked at yet, since the last fragment came.
    #[default]
    Open,
    /// Every byte is its sender's.
    Proved,
    /// Some are not.
    Disproved,
    /// Its sender says two things of it.
    Contradicted,
}

/// What is known about a message's bytes being its sender's.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Proof {
    /// The message's digest, as its sender says.
    pub(super) announced: Option<u64>,
    pub(super) verdict: Verdict,
    /// Its manifest is needed although it is not whole: partial delivery, and zero-copy mode.
    pub(super) wanted: bool,
}

impl Proof {
    /// Every byte is its sender's.
    pub(super) fn is_proved(&self) -> bool {
        self.verdict == Verdict::Proved
    }
}

/// The last bytes of a window while the header of the next window's lowest frame may be written over them.
#[derive(Clone, Copy, Debug)]
struct Tail {
    bytes: [u8; TAIL_LEN_MAX],
    /// The fragment that it belongs to is in its place.
    valid: bool,
}

impl Gaps {
    /// Something was found to be missing.
    pub(super) fn noticed(&mut self, now_ns: u64) {
        self.timer.noticed(Time::from_nanos(now_ns));
        self.missing_ns.get_or_insert(now_ns);
    }

    /// What is missing now is not what was asked for before.
    pub(super) fn asks_anew(&mut self, now_ns: u64) {
        self.timer = RequestTimer::default();
        self.noticed(now_ns);
    }
}

impl Slots {
    /// What lies at one of the last positions.
    #[inline]
    pub(super) fn landed_at(&mut self, position: u32) -> &mut Option<u16> {
        &mut self.landed[position as usize % (REACH_MAX + 1)]
    }
}

impl Arriving {
    /// Number `number`, the next one to be announced, behind `base` packets of the session.
    pub(super) fn new(
        terms: &InboundTerms,
        number: u32,
        about: &About,
        geometry: Geometry,
        base: u64,
        now_ns: u64,
    ) -> Arriving {
        Arriving {
            number,
            tag: about.tag,
            geometry,
            window: terms.window,
            len: about.len,
            has_facts: about.has_facts,
            is_claimed: false,
            fillers: if about.has_facts { terms.fillers } else { 0 },
            announced_ns: now_ns,
            base,
            slots: Slots {
                zone: None,
                may_post: false,
                payload: 0,
                posted: 0,
                consumed: 0,
                open: geometry.fragment_count(),
                final_to: 0,
                landed: [None; REACH_MAX + 1],
                rule: TailRule::new(terms.window, geometry.fragment_count()),
                tails: [Tail {
                    bytes: [0; TAIL_LEN_MAX],
                    valid: false,
                }; 2],
            },
            gaps: Gaps {
                arrivals: Arrivals::new(geometry.fragment_count()),
                timer: RequestTimer::default(),
                held: 0,
                put: 0,
                missing_ns: None,
            },
            shift: Shift::default(),
            proof: Proof::default(),
            place: Place::Unasked,
            released: None,
            words: about.words,
            reader: None,
            ends_here: false,
        }
    }

    #[inline]
    pub(super) fn fragment_count(&self) -> u32 {
        self.geometry.fragment_count()
    }

    /// The fragment at a position of the transmit order.
    #[inline]
    pub(super) fn index_at(&self, position: u32) -> u32 {
        self.window.index_at(position, self.geometry.fragment_count())
    }

    #[inline]
    pub(super) fn position_of(&self, index: u32) -> u32 {
        self.window.position_of(index, self.geometry.fragment_count())
    }

    /// How many of the first `len` payload bytes of fragment `index` its digest is of: not its message's facts, nor what lies before these.
    #[inline]
    pub(super) fn digested(&self, index: u32, len: u16) -> u16 {
        match self.has_facts {
            false => len,
            true => { self.len.saturating_sub(self.geometry.message_offset(index)) }.min(len.into()) as u16,
        }
    }

    /// UMEM address of fragment `index`'s payload.
    #[inline]
    pub(super) fn payload_of(&self, index: u32) -> u64 {
        self.slots.payload + self.geometry.rx_payload_range(index).start
    }

    /// Packets of the session up to this message's last.
    pub(super) fn end(&self) -> u64 {
        self.base + u64::from(self.fragment_count() + self.fillers)
    }

    /// Positions that the session's packets up to the `sent`th leave behind.
    pub(super) fn sent_of(&self, sent: u64) -> u32 {
        sent.saturating_sub(self.base)
            .min(u64::from(self.fragment_count())) as u32
    }

    /// Fragments of it that are here.
    pub(super) fn arrived(&self) -> u64 {
        let arrivals = &self.gaps.arrivals;
        u64::from(arrivals.expected() - arrivals.missing_count())
    }

    /// All of it may come.
    #[inline]
    pub(super) fn is_released(&self) -> bool {
        self.slots.open == self.fragment_count()
    }

    /// How it is cut into windows; `None`: its sender cannot say how many of them are released.
    fn grain(&self) -> Option<Grain> {
        let layout = self.geometry.layout();
        let is_cut = layout.wire() == Wire::Lm;
        is_cut
            .then(|| Grain::new(self.len, layout.payload_len(), self.window))
            .flatten()
    }

    /// Its sender says how much of it is released, for the first time.
    pub(super) fn begins_with(&mut self, release: Release) -> Heard {
        let Some(grain) = self.grain() else {
            return Heard::Contradiction;
        };
        (self.released, self.slots.open) = (Some(Box::new(Released::new(grain))), 0);
        self.hear(release)
    }

    /// Its sender says how much of it is released.
    pub(super) fn hear(&mut self, release: Release) -> Heard {
        if self.is_released() {
            // An older word, which was overtaken, or such as no sender says.
            let Some(mut whole) = self.grain().map(Released::new) else {
                return Heard::Contradiction;
            };
            whole.hear(Release::Whole);
            return whole.hear(release);
        }
        let count = self.fragment_count();
        let Some(released) = &mut self.released else {
            return Heard::Contradiction;
        };
        let heard = released.hear(release);
        self.slots.open = match released.release() {
            // There may be padding behind it.
            Release::Whole => count,
            Release::Windows(_) | Release::Aborted => released.fragments(),
        };
        if heard == Heard::Aborted {
            self.place = Place::Aborted;
            self.slots.may_post = false;
        }
        heard
    }

    /// Its sender waits for its writer: what is released is here. Where a loss is known only when the message was sent, what is missing does not
    /// count.
    pub(super) fn awaits_writer(&self, has_witness: bool) -> bool {
        let arrivals = &self.gaps.arrivals;
        let came = match has_witness {
            true => arrivals.expected(),
            false => u32::MAX,
        };
        let is_here = arrivals.missing().is_empty() || !has_witness;
        is_here && (self.released.as_ref()).is_some_and(|released| released.waits_for_writer(came))
    }

    /// Every fragment is in its place, and nothing can be written there any more (I1).
    #[inline]
    pub(super) fn is_final(&self) -> bool {
        self.slots.final_to == self.fragment_count()
            && self.gaps.arrivals.is_complete()
            && self.gaps.held == 0
            && !self.is_refused()
    }

    /// Indices of the fragments that are known to be missing, ascending.
    pub(super) fn missing(&self) -> Vec<Range<u32>> {
        missing_indices(&self.window, &self.gaps.arrivals, self.fragment_count())
    }

    /// UMEM addresses of window `window`'s tail: where the header of the next window's lowest frame goes.
    fn tail_range(&self, window: u32, prefix_len: u8) -> Range<u64> {
        let lowest = (window + 1) * self.window.fragments();
        let header = self.geometry.rx_header_range(lowest);
        self.slots.payload.wrapping_add_signed(header.start) - u64::from(prefix_len)
            ..self.slots.payload.wrapping_add_signed(header.end)
    }

    /// The window's highest fragment is at its place, if it `is_here`: saves its last bytes before the next window's lowest entry is posted
    /// on them (I5). `tail`: the window.
    #[inline]
    pub(super) fn save_tail(&mut self, tail: u32, is_here: bool, prefix_len: u8, umem: &Umem) {
        let range = self.tail_range(tail, prefix_len);
        let slot = &mut self.slots.tails[TailRule::slot(tail)];
        slot.valid = is_here;
        if slot.valid {
            umem.copy_from(range.start, &mut slot.bytes[..(range.end - range.start) as usize]);
        }
        let saved = self.slots.rule.tail_saved(tail);
        debug_assert!(saved, "tails are saved in order");
    }

    /// Puts a tail that was saved back. Gives the number of bytes.
    #[inline]
    pub(super) fn restore_tail(&self, tail: u32, prefix_len: u8, umem: &Umem) -> u64 {
        let range = self.tail_range(tail, prefix_len);
        let tail_len = (range.end - range.start) as usize;
        let slot = &self.slots.tails[TailRule::slot(tail)];
        if !slot.valid || mutant!(TailLost) {
            return 0;
        }
        umem.copy_to(range.start, &slot.bytes[..tail_len]);
        tail_len as u64
    }

    /// The saved bytes of the window that fragment `index` is the highest of, and their UMEM address, while they are saved.
    pub(super) fn saved_tail(&self, index: u32, prefix_len: u8) -> Option<(u64, &[u8])> {
        let window = self.window.window_of(index);
        let slot = &self.slots.tails[TailRule::slot(window)];
        let is_saved =
            self.window.is_highest(index, self.fragment_count()) && self.slots.rule.is_saved(window);
        if !is_saved || !slot.valid {
            return None;
        }
        let range = self.tail_range(window, prefix_len);
        Some((range.start, &slot.bytes[..(range.end - range.start) as usize]))
    }

    /// As [`Arriving::saved_tail`], to be filled: they are valid from now on.
    pub(super) fn saved_tail_mut(&mut self, index: u32, prefix_len: u8) -> Option<(u64, &mut [u8])> {
        let window = self.window.window_of(index);
        if !self.window.is_highest(index, self.fragment_count()) || !self.slots.rule.is_saved(window) {
            return None;
        }
        let range = self.tail_range(window, prefix_len);
        let slot = &mut self.slots.tails[TailRule::slot(window)];
        slot.valid = true;
        Some((range.start, &mut slot.bytes[..(range.end - range.start) as usize]))
    }

    /// It goes to the application.
    pub(super) fn landed(&mut self, missing: Vec<Range<u32>>) -> Landed {
        Landed {
            reader: self.reader.take(),
            arrived: self.arrived(),
            zone: self.slots.zone.expect("a posted message has a zone"),
            address: self.slots.payload,
            len: self.len,
            number: self.number,
            tag: self.tag,
            announced_ns: self.announced_ns,
            missing,
        }
    }

    /// It is given up, without those fragments.
    pub(super) fn given_up(&self, missing: Vec<Range<u32>>) -> GivenUp {
        GivenUp {
            number: self.number,
            tag: self.tag,
            len: self.len,
            missing,
            is_aborted: self.is_aborted(),
        }
    }

    /// All of it.
    pub(super) fn all(&self) -> Vec<Range<u32>> {
        std::iter::once(0..self.fragment_count()).collect()
    }
}

/// A message whose every byte has arrived, or with a map of those that have.
#[derive(Debug)]
pub(crate) struct Landed {
    pub(crate) zone: Zone,
    pub(crate) address: u64,
    pub(crate) len: u64,
    pub(crate) number: u32,
    pub(crate) tag: u64,
    pub(crate) announced_ns: u64,
    /// Fragment indices that are not there, ascending: partial delivery.
    pub(crate) missing: Vec<Range<u32>>,
    /// How many fragments are.
    pub(crate) arrived: u64,
    /// What showed it while it arrived.
    pub(crate) reader: Option<Box<Reader>>,
}

impl Landed {
    /// Byte ranges of the message that are not there.
    pub(crate) fn missing_bytes(&self, layout: &Layout) -> Vec<Range<u64>> {
        let Ok(geometry) = layout.session_message(self.len) else {
            return Vec::new();
        };
        self.missing
            .iter()
            .map(|range| {
                let end = geometry.rx_payload_range(range.end - 1).end;
                geometry.rx_payload_range(range.start).start..end.min(self.len)
            })
            .filter(|range| !range.is_empty())
            .collect()
    }
}

/// A message that was given up: which fragments did not arrive where they should.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct GivenUp {
    pub(crate) number: u32,
    pub(crate) tag: u64,
    pub(crate) len: u64,
    /// Fragment indices, ascending.
    pub(crate) missing: Vec<Range<u32>>,
    /// Its writer gave it up.
    pub(crate) is_aborted: bool,
}

/// Fragment indices of missing positions from `from` on. Inside a window positions run backwards, so a range of
/// positions is a range of indices as far as it stays in one window.
pub(super) fn index_ranges<'a>(
    window: &'a WindowShape,
    missing: &'a [Range<u32>],
    from: u32,
    count: u32,
) -> impl Iterator<Item = Range<u32>> + 'a {
    missing.iter().flat_map(move |range| {
        let mut start = range.start.max(from);
        std::iter::from_fn(move || {
            if start >= range.end {
                return None;
            }
            let window_end = (start / window.fragments() + 1).saturating_mul(window.fragments());
            let end = range.end.min(window_end);
            let indices = window.index_at(end - 1, count)..window.index_at(start, count) + 1;
            start = end;
            Some(indices)
        })
    })
}

/// All missing fragment indices, ascending.
fn missing_indices(window: &WindowShape, arrivals: &Arrivals, count: u32) -> Vec<Range<u32>> {
    let mut ranges: Vec<Range<u32>> = index_ranges(window, arrivals.missing(), 0, count).collect();
    ranges.sort_by_key(|range| range.start);
    let mut merged: Vec<Range<u32>> = Vec::with_capacity(ranges.len());
    for range in ranges {
        match merged.last_mut() {
            Some(last) if last.end == range.start => last.end = range.end,
            _ => merged.push(range),
        }
    }
    merged
}
