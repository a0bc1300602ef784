//! Places: what came is brought to its place in memory, kept aside until that is free, and measured when nobody writes there any more.

use lm_protocol::wire::lm::MissingRange;

use super::arriving::{Arriving, Verdict};
use super::counts::{Edges, RepairCounters};
use super::evidence::Evidence;
use super::held::{Held, Source};
use super::order::Order;
use super::terms::InboundTerms;
use crate::arena::Arena;
use crate::memory::Umem;
use crate::mutants::mutant;

/// What a session's fragments are measured by, and those of them that are not at their places.
#[derive(Debug)]
pub(crate) struct Places {
    evidence: Evidence,
    held: Held,
    payload_len: u16,
    prefix_len: u8,
    /// Something is missing, or lies in the wrong place.
    troubled: bool,
    pub(crate) edges: Edges,
    pub(crate) repair: RepairCounters,
}

impl Places {
    /// `arena`: where the landing zones will be.
    pub(super) fn new(terms: &InboundTerms, arena: &Arena) -> Places {
        Places {
            evidence: Evidence::new(terms, arena),
            held: Held::default(),
            payload_len: terms.layout.payload_len(),
            prefix_len: terms.caps.prefix_len,
            troubled: false,
            edges: Edges::default(),
            repair: RepairCounters::default(),
        }
    }

    #[inline]
    pub(super) fn evidence(&self) -> &Evidence {
        &self.evidence
    }

    #[inline]
    pub(super) fn evidence_mut(&mut self) -> &mut Evidence {
        &mut self.evidence
    }

    #[inline]
    pub(super) fn held(&self) -> &Held {
        &self.held
    }

    /// Whether something is known to be lost, or lies elsewhere than at its place: only then there is anything to ask for.
    #[inline]
    pub(crate) fn is_troubled(&self) -> bool {
        self.troubled
    }

    #[inline]
    pub(super) fn trouble(&mut self) {
        self.troubled = true;
    }

    /// The entry of `position` was used, or never will be. `landed`: payload bytes of what belongs there and lies there. What becomes final by
    /// that, `reach` entries behind, is digested, and tails are saved and restored (I5).
    #[inline]
    pub(super) fn passed(
        &mut self,
        message: &mut Arriving,
        position: u32,
        landed: Option<u16>,
        reach: u32,
        umem: &Umem,
    ) {
        debug_assert_eq!(message.slots.consumed, position);
        message.slots.consumed = position + 1;
        *message.slots.landed_at(position) = landed;
        message.proof.verdict = Verdict::Open;
        let index = message.index_at(position);
        // Entries are used in their order. Those of later windows reach no further into this one than its tail, and nothing is posted below a
        // message that has its zone alone.
        let is_lowest = message.window.is_lowest(index);
        let is_alone = !message.is_claimed || mutant!(NoFillers);
        let behind = if is_lowest && is_alone { 0 } else { reach };
        self.end_at(message, message.slots.consumed.saturating_sub(behind), umem);
        let window = message.window.window_of(index);
        if is_lowest && let Some(tail) = message.slots.rule.lowest_arrived(window) {
            self.edges.restored_bytes += message.restore_tail(tail, self.prefix_len, umem);
        }
    }

    /// Positions before `to`, at most all that were used, are final.
    #[inline]
    pub(super) fn end_at(&mut self, message: &mut Arriving, to: u32, umem: &Umem) {
        let (from, to) = (message.slots.final_to, to.min(message.slots.consumed));
        for position in from..to {
            self.became_final(message, position, umem);
        }
        message.slots.final_to = from.max(to);
    }

    /// Nobody can write at this position's place any more: what lies there is what will be shown.
    #[inline]
    fn became_final(&mut self, message: &mut Arriving, position: u32, umem: &Umem) {
        let index = message.index_at(position);
        let landed = *message.slots.landed_at(position);
        if let Some(len) = landed {
            let payload = message.payload_of(index);
            self.evidence.note_final(message, index, (payload, len), umem);
        }
        let count = message.fragment_count();
        if let Some(tail) = message.slots.rule.tail_to_save(message.window, index, count) {
            message.save_tail(tail, landed.is_some(), self.prefix_len, umem);
        }
    }

    /// Copies a fragment to its place, where no packet is still to come. Its tail goes to the saved copy while the
    /// next window's lowest entry is out (I5).
    pub(super) fn put(&mut self, message: &mut Arriving, position: u32, source: Source<'_>, umem: &Umem) {
        let index = message.index_at(position);
        debug_assert!(!message.shows(index), "a copy over what is shown");
        self.evidence
            .note_put(message, position, source, &self.held, umem);
        message.gaps.put = message.gaps.put.wrapping_add(1);
        let range = message.geometry.rx_payload_range(index);
        let len = range.end - range.start;
        if position >= message.slots.final_to {
            *message.slots.landed_at(position) = Some(len as u16);
        }
        let to = message.slots.payload + range.start;
        let mut body_len = len;
        if let Some((tail, bytes)) = message.saved_tail_mut(index, self.prefix_len) {
            // The last fragment of all may be shorter than a header, but no window follows it.
            body_len = tail - to;
            match source {
                Source::Umem(from) => umem.copy_from(from + body_len, bytes),
                Source::Held(held) => {
                    bytes.copy_from_slice(&self.held.slot(held, len as u16)[body_len as usize..])
                }
                Source::Bytes(payload) => bytes.copy_from_slice(&payload[body_len as usize..len as usize]),
            }
        }
        match source {
            Source::Umem(from) => umem.copy_within(from, to, body_len),
            Source::Held(held) => umem.copy_to(to, self.held.slot(held, body_len as u16)),
            Source::Bytes(payload) => umem.copy_to(to, &payload[..body_len as usize]),
        }
        self.repair.copied_bytes += len;
    }

    /// Copies a fragment to its place, or aside while something may be written there. The last packet came at `last_ns`.
    pub(super) fn store(
        &mut self,
        message: &mut Arriving,
        position: u32,
        from: u64,
        last_ns: u64,
        umem: &Umem,
    ) {
        match position < message.slots.consumed {
            true => self.put(message, position, Source::Umem(from), umem),
            false => self.hold(message, position, from, last_ns, umem),
        }
    }

    /// Copies a fragment aside.
    pub(super) fn hold(
        &mut self,
        message: &mut Arriving,
        position: u32,
        from: u64,
        last_ns: u64,
        umem: &Umem,
    ) {
        if let Some(bytes) = self.hold_slot(message, position, last_ns) {
            umem.copy_from(from, bytes);
        }
    }

    /// Memory for a fragment aside, which counts as held from now on. `None`: there is none, and it is missing.
    pub(super) fn hold_slot(
        &mut self,
        message: &mut Arriving,
        position: u32,
        last_ns: u64,
    ) -> Option<&mut [u8]> {
        let len = message.geometry.fragment_len(message.index_at(position));
        let slot_len = usize::from(self.payload_len);
        let Some(bytes) = self.held.add(message.number, position, len, slot_len) else {
            message.gaps.arrivals.reject(position);
            message.gaps.noticed(last_ns);
            self.troubled = true;
            self.repair.no_room += 1;
            return None;
        };
        self.repair.copied_bytes += u64::from(len);
        message.gaps.held += 1;
        Some(bytes)
    }

    /// A fragment's bytes are not its sender's, and it is missing. Whether it was held aside.
    pub(super) fn reject(&mut self, message: &mut Arriving, position: u32) -> bool {
        message.gaps.arrivals.reject(position);
        let was_held = self.held.forget(message.number, position);
        message.gaps.held -= u32::from(was_held);
        was_held
    }

    /// Puts what is held to its place as far as that is free.
    pub(super) fn put_held(&mut self, order: &mut Order, umem: &Umem) {
        let mut next = 0;
        while let Some(fragment) = self.held.get(next) {
            let at = order.position_of(fragment.number);
            if at.is_some_and(|at| fragment.position >= order.at(at).slots.consumed) {
                next += 1;
                continue;
            }
            if let Some(at) = at {
                let message = order.at_mut(at);
                self.put(message, fragment.position, Source::Held(fragment.slot), umem);
                message.gaps.held -= 1;
            }
            self.held.remove(next);
        }
    }

    /// Looks whether anything is left to be done.
    pub(super) fn look_for_trouble(&mut self, order: &Order) {
        self.troubled = !self.held.is_empty()
            || (order.iter().map(|message| &message.gaps.arrivals))
                .any(|arrivals| !arrivals.missing().is_empty() || arrivals.is_complete())
            || order.iter().any(Arriving::is_aborted);
    }

    /// Whether the front message is whole, nothing can be written to it any more (I1), and every byte is its sender's.
    #[inline]
    pub(super) fn may_show(&mut self, front: &mut Arriving) -> bool {
        front.is_final() && self.proves_front(front)
    }

    /// Whether every byte of the front message, all of whose fragments are here, is its sender's.
    #[inline]
    pub(super) fn proves_front(&mut self, front: &mut Arriving) -> bool {
        self.evidence.proves_front(front, &self.held)
    }

    /// The digests of what is held of the front message take their places among the others.
    pub(super) fn note_held(&mut self, front: &Arriving) {
        self.evidence.note_held(front, &self.held);
    }

    /// Fragments of the front message that differ from its proved manifest are missing from now on.
    pub(super) fn reject_what_differs(&mut self, front: &mut Arriving, now_ns: u64) {
        self.note_held(front);
        let (Some(_), Some(zone)) = (self.evidence.proved(front.number), front.slots.zone) else {
            return;
        };
        let count = front.fragment_count();
        let mut differing = 0;
        for index in 0..count {
            let position = front.position_of(index);
            let digest = self.evidence.digests_of(zone, count)[index as usize];
            if self.evidence.wanted(front, position) == Some(digest) || !front.gaps.arrivals.has(position) {
                continue;
            }
            if front.shows(index) {
                // Its window had the digest that its sender said.
                front.proof.verdict = Verdict::Contradicted;
                return;
            }
            self.reject(front, position);
            differing += 1;
        }
        if differing > 0 {
            self.repair.corrupt += differing;
            front.proof.verdict = Verdict::Open;
            front.gaps.asks_anew(now_ns);
            self.troubled = true;
        } else if front.gaps.arrivals.is_complete() {
            // The manifest is that of these bytes, and what was announced is not.
            front.proof.verdict = Verdict::Contradicted;
        }
    }

    /// Copies the front message, as far as it is here, to where its payload begins at UMEM address `payload`.
    pub(super) fn copy_out(&mut self, front: &mut Arriving, payload: u64, umem: &Umem) {
        let place_of = |position| {
            let range = front.geometry.rx_payload_range(front.index_at(position));
            (range.start, range.end - range.start)
        };
        let count = front.fragment_count();
        for position in 0..count {
            if position < front.slots.consumed && front.gaps.arrivals.has(position) {
                let (start, len) = place_of(position);
                umem.copy_within(front.slots.payload + start, payload + start, len);
            }
        }
        for window in 0..front.window.count_of_windows(count) {
            let highest = front.index_at(window * front.window.fragments());
            if let Some((tail, bytes)) = front.saved_tail(highest, self.prefix_len) {
                umem.copy_to(tail - front.slots.payload + payload, bytes);
            }
        }
        for (position, bytes) in self.held.of(front.number) {
            umem.copy_to(payload + place_of(position).0, bytes);
        }
        self.held.forget_all(front.number);
        front.gaps.held = 0;
        self.repair.copied_bytes += front.geometry.message_len();
        self.repair.copied_out += 1;
    }

    /// The front message was copied to memory at `memory`, its payload at `payload`, while packets may still have been written
    /// around it: what is not as it was is missing.
    pub(super) fn compare_copy(
        &mut self,
        front: &mut Arriving,
        (memory, payload): (u64, u64),
        last_ns: u64,
        umem: &Umem,
    ) {
        let Some(zone) = front.slots.zone else { return };
        let count = front.fragment_count();
        let mut bytes = vec![0; usize::from(self.payload_len)];
        for index in 0..count {
            let position = front.position_of(index);
            if !front.gaps.arrivals.has(position) {
                continue;
            }
            let range = front.geometry.rx_payload_range(index);
            let len = front.digested(index, (range.end - range.start) as u16);
            let bytes = &mut bytes[..usize::from(len)];
            umem.copy_from(payload + range.start, bytes);
            let digest = self.evidence.digest(bytes);
            if self.evidence.digests_of(zone, count)[index as usize] != digest {
                front.gaps.arrivals.reject(position);
                front.gaps.noticed(last_ns);
                self.troubled = true;
                self.repair.corrupt += 1;
            }
            self.evidence.set(memory, index, digest);
        }
    }

    /// The next request for digests that is due; `gives_up_unasked`: what is not right is not asked for.
    pub(super) fn ask_for_digests(
        &mut self,
        front: Option<&Arriving>,
        gives_up_unasked: bool,
        now_ns: u64,
    ) -> Option<(u32, Vec<MissingRange>)> {
        let Places { evidence, repair, .. } = self;
        evidence.next_request(front, gives_up_unasked, repair, now_ns)
    }
}
