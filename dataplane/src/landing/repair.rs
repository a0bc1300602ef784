//! Repair: what is done about fragments that were lost, came late, twice, or into another's slot.
//!
//! A fragment that lies elsewhere than at its place (in a slot that an earlier, lost packet was to use, or in a
//! datagram of the one-copy path) is copied there as soon as nothing can be written there any more, and is *held* aside
//! until then. Fragments that do not come are asked for. A message that is whole while entries posted in its zone are
//! unused, with nothing under way that would use them, is copied out of the zone, which stays quarantined (I1).

use std::ops::Range;
use std::time::Duration;

use lm_protocol::delivery::{Arrival, Arrivals, Delivery, RequestTimer};
use lm_protocol::geometry::Geometry;
use lm_protocol::serial;
use lm_protocol::time::Time;
use lm_protocol::window::{TailRule, WindowShape};
use lm_protocol::wire::lm::MissingRange;

use super::integrity::Verdict;
use super::{Aim, Claim, Entries, GivenUp, Inbound, Sessions, Untaken, Zone};
use crate::arena::Arena;
use crate::bounds::RANGES_MAX;
use crate::memory::Umem;
use crate::port::RxQueue;

/// Fragments that may be held aside at once; one more is dropped and asked for again.
const HELD_MAX: usize = 512;
/// The same in bytes, where fragments are long.
const HELD_LEN_MAX: usize = 4 << 20;
/// What a sender says it has sent is believed to be lost when it has not come for so long.
const CLAIM_GRACE_NS: u64 = 200_000;
/// So long after a claim, and after the last packet, what is missing is looked for in the socket.
const CLAIM_LATE_NS: u64 = 50_000;
/// The same in zero-copy mode, where who is taken for lost and comes after all shifts what comes behind: cards hold packets back,
/// and a claim comes by another queue.
const CLAIM_GRACE_ZERO_COPY_NS: u64 = 10_000_000;
/// A socket that is never empty, because somebody floods it, puts that off for so long.
const SOCKET_PATIENCE_NS: u64 = 100_000_000;
/// Without reliable delivery a message ends so long after the first loss in it was noticed, if everything else is known.
const GIVE_UP_AFTER_NS: u64 = 200_000;
/// Quarantined memory that a message waits for is taken back, and the channel built anew, when nobody may send what would use the
/// entries there, or when nothing has landed for so long: many time slices, since who may send can be off the processor.
const QUARANTINE_PATIENCE_NS: u64 = 200_000_000;
/// Entries that keep fragments from their places, for which there is no room elsewhere, are voided when nothing has landed for so long: the
/// packets that they were posted for are lost, all of them, and asked for again.
const ROOM_PATIENCE_NS: u64 = 20_000_000;
/// A whole message waits so long for other packets to use the entries left in its zone.
const LEFTOVER_PATIENCE_NS: u64 = 100_000;
/// Longer messages are not copied out: building the channel anew takes less time.
const COPY_OUT_MAX: u64 = 4 << 20;

/// What happened, since it was last looked at.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct RepairCounters {
    /// Fragments that landed in another's slot.
    pub(crate) displaced: u64,
    /// Fragments that had arrived before.
    pub(crate) duplicate: u64,
    /// Fragments of messages that are settled.
    pub(crate) stale: u64,
    /// Fragments that contradict their message's announcement.
    pub(crate) implausible: u64,
    /// Fragments for which no memory was free.
    pub(crate) no_room: u64,
    /// Fragments that landed.
    pub(crate) landed: u64,
    /// Fragments of messages that were given up.
    pub(crate) given_up: u64,
    /// Fragments that the gate accepted and that could not be believed.
    pub(crate) discarded: u64,
    /// Fragments taken from datagrams.
    pub(crate) datagrams: u64,
    /// Fragments asked for.
    pub(crate) requested: u64,
    /// Payload bytes copied.
    pub(crate) copied_bytes: u64,
    /// Messages copied out of their zone.
    pub(crate) copied_out: u64,
    /// Fragments whose digest is another than their sender's.
    pub(crate) corrupt: u64,
    /// Messages whose manifest contradicts their announcement.
    pub(crate) contradictory: u64,
    /// Requests for manifests.
    pub(crate) manifests: u64,
}

impl RepairCounters {
    /// Whether anything happened.
    #[inline]
    pub(crate) fn is_any(&self) -> bool {
        *self != RepairCounters::default()
    }
}

/// A fragment that waits for its place to be free.
#[derive(Clone, Copy, Debug)]
struct HeldFragment {
    number: u32,
    position: u32,
    len: u16,
    slot: u16,
}

/// Fragments aside, and their bytes.
#[derive(Debug, Default)]
pub(super) struct Held {
    fragments: Vec<HeldFragment>,
    bytes: Vec<u8>,
    slot_len: usize,
    free: Vec<u16>,
}

impl Held {
    pub(super) fn is_empty(&self) -> bool {
        self.fragments.is_empty()
    }

    fn is_full(&self) -> bool {
        self.free.is_empty() && !self.fragments.is_empty()
    }

    pub(super) fn slot(&self, slot: u16, len: u16) -> &[u8] {
        &self.bytes[usize::from(slot) * self.slot_len..][..usize::from(len)]
    }

    /// Positions and bytes of a message's fragments.
    pub(super) fn of(&self, number: u32) -> impl Iterator<Item = (u32, &[u8])> {
        (self.fragments.iter())
            .filter(move |fragment| fragment.number == number)
            .map(|fragment| (fragment.position, self.slot(fragment.slot, fragment.len)))
    }

    /// Forgets a fragment. `false`: it is not here.
    pub(super) fn forget(&mut self, number: u32, position: u32) -> bool {
        let is_it = |fragment: &HeldFragment| (fragment.number, fragment.position) == (number, position);
        let Some(at) = self.fragments.iter().position(is_it) else {
            return false;
        };
        self.free.push(self.fragments.swap_remove(at).slot);
        true
    }

    /// Memory for one more. A session that loses nothing takes none.
    fn take(&mut self, slot_len: usize) -> Option<u16> {
        if self.bytes.is_empty() {
            let count = (HELD_LEN_MAX / slot_len.max(1)).min(HELD_MAX);
            self.slot_len = slot_len;
            self.bytes = vec![0; count * slot_len];
            self.free = (0..count as u16).rev().collect();
            self.fragments.reserve(count);
        }
        self.free.pop()
    }
}

/// Where a fragment is.
#[derive(Clone, Copy, Debug)]
pub(super) enum Source<'a> {
    Umem(u64),
    Held(u16),
    Bytes(&'a [u8]),
}

/// What has to be done about the front message when nothing else comes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Remedy {
    /// It was given up; this is what its sender and the application are told.
    GivenUp(GivenUp),
    /// It was delivered without some fragments; its sender is told.
    Partial(GivenUp),
    /// The channel has to be built anew: a message is whole that cannot be shown while its entries are posted, or the
    /// gate's order is off.
    Rebuild,
    /// Nothing of the session reaches the landing queue.
    StopLanding,
}

/// A fragment of the burst at hand that lies in another's slot.
#[derive(Clone, Copy, Debug)]
pub(super) struct Displaced {
    place: u8,
    serial: u32,
    number: u32,
    position: u32,
    /// UMEM address of its payload.
    from: u64,
}

impl Sessions {
    /// The fragment at `position` of the message at `at` landed in the slot of `aim`, its payload at UMEM address `from`.
    ///
    /// Behind a loss each fragment lies in the slot of an earlier one. The last of them goes to its place first: whatever lay
    /// where another belongs is gone then, and only the last, whose place may still be written, has to be held aside.
    pub(super) fn displaced(
        &mut self,
        place: u8,
        at: usize,
        position: u32,
        (aim, from): (&Aim, u64),
        umem: &Umem,
    ) {
        let waiting = !self.displaced.is_empty();
        let Some(inbound) = self.at_mut(place) else { return };
        let message = &mut inbound.messages[at];
        let lies_before = (aim.place, aim.serial) == (place, inbound.serial)
            && (serial::precedes(aim.number, message.number)
                || (aim.number == message.number && aim.position < position));
        if !lies_before {
            // One that waits may lie where this one belongs, or the other way round.
            match waiting {
                true => inbound.hold(at, position, from, umem),
                false => inbound.store(at, position, from, umem),
            }
            return;
        }
        // Until it is at its place the message is not shown.
        message.held += 1;
        let one = Displaced {
            place,
            serial: inbound.serial,
            number: message.number,
            position,
            from,
        };
        self.displaced.push(one);
    }

    /// Copies the burst's displaced fragments to their places, the last one first, or aside.
    pub(super) fn settle_displaced(&mut self, umem: &Umem) {
        while let Some(one) = self.displaced.pop() {
            let session = self.at_mut(one.place);
            let Some(inbound) = session.filter(|inbound| inbound.serial == one.serial) else {
                continue;
            };
            if let Some(at) = inbound.position_of(one.number) {
                inbound.messages[at].held -= 1;
                inbound.store(at, one.position, one.from, umem);
            }
        }
    }
}

impl Inbound {
    /// A fragment landed that was not simply the next one in its own slot. Where its payload is, when that has to be copied.
    pub(super) fn landed_elsewhere(
        &mut self,
        at: usize,
        position: u32,
        arrival: Arrival,
        in_place: bool,
        start: u64,
        now_ns: u64,
    ) -> Option<u64> {
        // The gate keeps the order: what has not come of the messages before is lost, or late.
        let mut lost = 0;
        for before in 0..at {
            let message = &mut self.messages[before];
            let expected = message.arrivals.expected();
            if message.arrivals.claim(u32::MAX) {
                lost += message.arrivals.expected() - expected;
                message.timer.noticed(Time::from_nanos(now_ns));
                message.missing_ns.get_or_insert(now_ns);
            }
        }
        if lost > 0 {
            self.lost(lost, now_ns);
        }
        if !self.noticed(at, arrival, now_ns) || in_place {
            return None;
        }
        self.repair.displaced += 1;
        let message = &self.messages[at];
        let index = (self.terms.window).index_at(position, message.geometry.fragment_count());
        let header_len = u64::from(message.geometry.fragment(index).header_len);
        Some(start + header_len)
    }

    /// Books an arrival that is out of the ordinary. `false`: it had arrived before.
    fn noticed(&mut self, at: usize, arrival: Arrival, now_ns: u64) -> bool {
        self.troubled = true;
        if let Arrival::Jumped(lost) = arrival {
            self.lost(lost, now_ns);
        }
        let message = &mut self.messages[at];
        match arrival {
            Arrival::Duplicate => {
                self.repair.duplicate += 1;
                return false;
            }
            Arrival::Jumped(_) => {
                message.timer.noticed(Time::from_nanos(now_ns));
                message.missing_ns.get_or_insert(now_ns);
            }
            Arrival::Late => {
                if let Some(sample) = message.timer.progressed(Time::from_nanos(now_ns)) {
                    // RFC 6298's smoothing, with an eighth for what is new.
                    let sample_ns = sample.as_nanos() as u64;
                    self.answer_ns = match self.answer_ns {
                        0 => sample_ns,
                        known => known - known / 8 + sample_ns / 8,
                    };
                }
            }
            Arrival::Next => {}
        }
        if message.arrivals.missing().is_empty() {
            message.timer.clear();
        }
        true
    }

    /// A fragment that came by the one-copy path: `len` payload bytes at UMEM address `from`. `entries_posted`: there were
    /// some when it passed the gate, which was after `drained_ns`.
    pub(crate) fn take_datagram(
        &mut self,
        (number, index, count): (u32, u32, u32),
        (from, len): (u64, u64),
        entries_posted: bool,
        drained_ns: u64,
        umem: &Umem,
        now_ns: u64,
    ) {
        let Some(at) = self.position_of(number) else {
            self.repair.stale += 1;
            return;
        };
        let message = &mut self.messages[at];
        let known = message.geometry.fragment_count();
        if count != known || index >= known || len != u64::from(message.geometry.fragment_len(index)) {
            self.repair.implausible += 1;
            return;
        }
        let position = self.terms.window.position_of(index, known);
        let arrival = message.arrivals.take(position);
        // One that the gate could not admit (its announcement was overtaken) uses no entry: those that are posted are for
        // what follows it.
        let end = message.base + u64::from(position) + 1;
        if end > self.accepted {
            self.overtaken(end);
            self.suspect(end, now_ns);
        }
        self.progress_ns = now_ns;
        if self.noticed(at, arrival, now_ns) {
            if entries_posted {
                self.came_to_the_socket(at, position, drained_ns);
            }
            self.repair.datagrams += 1;
            self.store(at, position, from, umem);
            self.settle_trouble(umem);
        }
    }

    /// Copies a fragment to its place, or aside while something may be written there.
    fn store(&mut self, at: usize, position: u32, from: u64, umem: &Umem) {
        match position < self.messages[at].consumed {
            true => self.put(at, position, Source::Umem(from), umem),
            false => self.hold(at, position, from, umem),
        }
    }

    /// Copies a fragment aside.
    fn hold(&mut self, at: usize, position: u32, from: u64, umem: &Umem) {
        if let Some(bytes) = self.hold_slot(at, position) {
            umem.copy_from(from, bytes);
        }
    }

    /// Memory for a fragment aside, which counts as held from now on. `None`: there is none, and it is missing.
    pub(super) fn hold_slot(&mut self, at: usize, position: u32) -> Option<&mut [u8]> {
        let message = &mut self.messages[at];
        let index = (self.terms.window).index_at(position, message.geometry.fragment_count());
        let len = message.geometry.fragment_len(index);
        let Some(slot) = self.held.take(usize::from(self.terms.layout.payload_len())) else {
            message.arrivals.reject(position);
            message.timer.noticed(Time::from_nanos(self.progress_ns));
            message.missing_ns.get_or_insert(self.progress_ns);
            self.troubled = true;
            self.repair.no_room += 1;
            return None;
        };
        self.repair.copied_bytes += u64::from(len);
        self.held.fragments.push(HeldFragment {
            number: message.number,
            position,
            len,
            slot,
        });
        message.held += 1;
        let begin = usize::from(slot) * self.held.slot_len;
        Some(&mut self.held.bytes[begin..begin + usize::from(len)])
    }

    /// Copies a fragment to its place, where no packet is still to come. Its tail goes to the saved copy while the
    /// next window's lowest entry is out (I5).
    pub(super) fn put(&mut self, at: usize, position: u32, source: Source<'_>, umem: &Umem) {
        self.note_put(at, position, source, umem);
        let terms = &self.terms;
        let message = &mut self.messages[at];
        let count = message.geometry.fragment_count();
        let index = terms.window.index_at(position, count);
        let range = message.geometry.rx_payload_range(index);
        if position >= message.final_to {
            *message.landed_at(position) = Some((range.end - range.start) as u16);
        }
        let to = message.payload + range.start;
        let len = range.end - range.start;
        let window = terms.window.window_of(index);
        let mut body_len = len;
        if terms.window.is_highest(index, count) && message.rule.is_saved(window) {
            let tail = message.tail_range(window, terms);
            // The last fragment of all may be shorter than a header, but no window follows it.
            body_len = tail.start - to;
            let slot = &mut message.tails[TailRule::slot(window)];
            let bytes = &mut slot.bytes[..(tail.end - tail.start) as usize];
            match source {
                Source::Umem(from) => umem.copy_from(from + body_len, bytes),
                Source::Held(held) => {
                    bytes.copy_from_slice(&self.held.slot(held, len as u16)[body_len as usize..])
                }
                Source::Bytes(payload) => bytes.copy_from_slice(&payload[body_len as usize..len as usize]),
            }
            slot.valid = true;
        }
        match source {
            Source::Umem(from) => umem.copy_within(from, to, body_len),
            Source::Held(held) => umem.copy_to(to, self.held.slot(held, body_len as u16)),
            Source::Bytes(payload) => umem.copy_to(to, &payload[..body_len as usize]),
        }
        self.repair.copied_bytes += len;
    }

    /// Puts what is held to its place as far as that is free, and lands what is whole.
    pub(super) fn settle_trouble(&mut self, umem: &Umem) {
        let mut next = 0;
        while let Some(&fragment) = self.held.fragments.get(next) {
            let at = self.position_of(fragment.number);
            if at.is_some_and(|at| fragment.position >= self.messages[at].consumed) {
                next += 1;
                continue;
            }
            if let Some(at) = at {
                self.put(at, fragment.position, Source::Held(fragment.slot), umem);
                self.messages[at].held -= 1;
            }
            self.held.free.push(fragment.slot);
            self.held.fragments.swap_remove(next);
        }
        while self.front_may_land() {
            self.land(Vec::new());
        }
        self.land_early();
        self.troubled = !self.held.is_empty()
            || self
                .messages
                .iter()
                .any(|message| !message.arrivals.missing().is_empty() || message.arrivals.is_complete());
    }

    /// The sender says how many packets of the session it has sent (cumulative, mod 2^32). If it is not believed, nothing changed.
    pub(crate) fn claimed(&mut self, sent: u32, now_ns: u64) -> Result<(), Untaken> {
        let ahead = sent.wrapping_sub(self.accepted as u32) as i32;
        let packets = self.accepted.saturating_add_signed(i64::from(ahead));
        if packets > self.announced_packets {
            return match serial::precedes(self.told.packet_limit, sent) {
                true => Err(Untaken::Implausible),
                false => Err(Untaken::Early),
            };
        }
        self.suspect(packets, now_ns);
        Ok(())
    }

    /// Packets of the session before `sent` are lost, unless they come soon.
    fn suspect(&mut self, sent: u64, now_ns: u64) {
        if self.claim.is_none_or(|claim| claim.sent < sent) {
            self.claim = Some(Claim::new(sent, now_ns));
        }
    }

    /// Whether something is known to be lost, or lies elsewhere than at its place: only then
    /// [`next_request`](Inbound::next_request) has anything to do.
    #[inline]
    pub(crate) fn is_troubled(&self) -> bool {
        self.troubled
    }

    /// Whether [`watch`](Inbound::watch) has anything to do.
    pub(crate) fn needs_care(&self) -> bool {
        self.troubled || self.claim.is_some() || self.has_landed() || self.awaits_digests()
    }

    /// Whether fragments may come another way than they were sent first: something is missing, or what was sent is late. In a stream there
    /// is always a claim, since it overtakes the packets that it speaks of.
    #[inline]
    pub(super) fn awaits_repairs(&self, now_ns: u64) -> bool {
        let is_late = |since_ns: u64| now_ns.saturating_sub(since_ns.max(self.progress_ns)) >= CLAIM_LATE_NS;
        self.troubled || self.claim.is_some_and(|claim| is_late(claim.since_ns))
    }

    /// What time brings: losses at the end of what was sent, messages to be given up, or shown without waiting for more.
    /// `more_may_come`: some sender may send what would use entries that are left.
    pub(super) fn watch(
        &mut self,
        entries: &mut Entries,
        arena: &mut Arena,
        umem: &Umem,
        more_may_come: bool,
        now_ns: u64,
    ) -> Option<Remedy> {
        self.believe_claim(entries, now_ns);
        match self.passes_by() {
            Some(true) => return Some(Remedy::StopLanding),
            Some(false) if entries.outstanding() > 0 && !self.held.is_empty() => {
                return Some(Remedy::Rebuild);
            }
            _ => {}
        }
        if self.held.is_full()
            && entries.outstanding() > 0
            && now_ns.saturating_sub(entries.landed_ns) >= ROOM_PATIENCE_NS
        {
            return Some(Remedy::Rebuild);
        }
        if !self.terms.caps.witness {
            self.locate_missing(umem, now_ns);
        }
        let front = self.messages.front()?;
        if front.zone.is_none() {
            // Memory that is quarantined may be what is missing.
            let last_ns = self.progress_ns.max(front.announced_ns).max(entries.landed_ns);
            let patience_ns = match more_may_come {
                true => QUARANTINE_PATIENCE_NS,
                false => LEFTOVER_PATIENCE_NS,
            };
            let stuck = entries.outstanding() > 0
                && entries.keeps_zones()
                && now_ns.saturating_sub(last_ns) >= patience_ns;
            return stuck.then_some(Remedy::Rebuild);
        }
        let count = front.geometry.fragment_count();
        if front.arrivals.is_complete() {
            if front.proof.verdict == Verdict::Open {
                self.note_unfinal(0, umem);
            }
            if !self.front_is_proved() {
                return self.seek_proof(entries, arena, umem, now_ns);
            }
            // Its own entries are all used, or others may still use them.
            if self.quiet_ns(entries, now_ns) < LEFTOVER_PATIENCE_NS {
                return None;
            }
            if self.messages.front().is_some_and(super::Arriving::is_final) {
                self.settle_trouble(umem);
                return None;
            }
            return match self.copy_out(entries, arena, umem) {
                true if self.messages[0].arrivals.is_complete() => {
                    self.land(Vec::new());
                    self.settle_trouble(umem);
                    None
                }
                // How far its sender has come is about to be known, and says which entries are not to be posted again.
                _ if !self.terms.caps.witness && self.claim.is_some() => None,
                _ => Some(Remedy::Rebuild),
            };
        }
        let lost_ns = now_ns.saturating_sub(front.missing_ns?);
        // Known to its end, or as far as its sender has credit: entries behind a lost one may have to wait for it (I5).
        let known = front.arrivals.expected() == count || front.arrivals.expected() >= front.posted;
        if self.terms.delivery == Delivery::Reliable || !known || lost_ns < GIVE_UP_AFTER_NS {
            return None;
        }
        // What is shown of a message is verified, too.
        let provable = self.partial_is_proved(umem, now_ns)?;
        let front = &mut self.messages[0];
        front.arrivals.claim(count);
        let given_up = GivenUp {
            number: front.number,
            tag: front.tag,
            len: front.len,
            missing: missing_indices(&self.terms.window, &front.arrivals, count),
        };
        self.broke(given_up.number);
        let front = &self.messages[0];
        let whole_zone = front.consumed == count && front.held == 0;
        if self.terms.delivery == Delivery::Partial
            && provable
            && (whole_zone || self.copy_out(entries, arena, umem))
        {
            // What is copied out in zero-copy mode is compared once more.
            let missing = missing_indices(&self.terms.window, &self.messages[0].arrivals, count);
            let given_up = GivenUp { missing, ..given_up };
            self.land(given_up.missing.clone());
            self.settle_trouble(umem);
            return Some(Remedy::Partial(given_up));
        }
        self.drop_front(entries, arena);
        self.settle_trouble(umem);
        Some(Remedy::GivenUp(given_up))
    }

    fn believe_claim(&mut self, entries: &Entries, now_ns: u64) {
        let Some(claim) = &mut self.claim else {
            return;
        };
        let grace_ns = match self.terms.caps.witness {
            true => CLAIM_GRACE_NS,
            false => CLAIM_GRACE_ZERO_COPY_NS,
        };
        // What waits in the socket behind others' datagrams is not lost.
        let seen_ns = match self.lands {
            true => now_ns,
            false => (entries.drained_ns).max(now_ns.saturating_sub(SOCKET_PATIENCE_NS)),
        };
        if !claim.outlasts(grace_ns, self.progress_ns, seen_ns) {
            return;
        }
        let Claim { sent, since_ns, .. } = *claim;
        self.claim = None;
        if !self.terms.caps.witness {
            // What came since says that more was sent.
            match since_ns >= self.progress_ns {
                true => self.correct(sent),
                false => self.overtaken(sent),
            }
        }
        for message in &mut self.messages {
            let sent_of_it = sent.saturating_sub(message.base).min(u64::from(u32::MAX)) as u32;
            if sent_of_it > 0 && message.arrivals.claim(sent_of_it) {
                message.timer.noticed(Time::from_nanos(now_ns));
                message.missing_ns.get_or_insert(now_ns);
                self.troubled = true;
            }
        }
    }

    fn quiet_ns(&self, entries: &Entries, now_ns: u64) -> u64 {
        now_ns.saturating_sub(self.progress_ns.max(entries.landed_ns))
    }

    /// Leaves out the entries of the front message that are not posted, when every fragment has come otherwise. Says whether
    /// there were such.
    pub(super) fn skip_unposted(&mut self, entries: &mut Entries, now_ns: u64) -> bool {
        let quiet_ns = self.quiet_ns(entries, now_ns);
        let Some(front) = self.messages.front_mut() else {
            return false;
        };
        let (number, posted, count) = (front.number, front.posted, front.geometry.fragment_count());
        if front.zone.is_none()
            || posted == count
            || !front.arrivals.is_complete()
            || quiet_ns < LEFTOVER_PATIENCE_NS
        {
            return false;
        }
        front.posted = count;
        self.posting = self.posting.max(1);
        let skipped = Aim::skipped(self.serial, self.place(), number, posted..count);
        entries.aims.push_back(skipped);
        true
    }

    /// Copies the front message, as far as it is here, to memory of its own. `false`: there is none, or it would be too
    /// much.
    fn copy_out(&mut self, entries: &mut Entries, arena: &mut Arena, umem: &Umem) -> bool {
        let Some(front) = self.messages.front() else {
            return false;
        };
        let geometry = front.geometry;
        let (zone_len, front_margin) = self.zone_of(&geometry);
        if zone_len > COPY_OUT_MAX {
            return false;
        }
        let Some(start) = arena.allocate(zone_len) else {
            return false;
        };
        let payload = start + front_margin;
        let front = &self.messages[0];
        for position in 0..geometry.fragment_count() {
            if position < front.consumed && front.arrivals.has(position) {
                let range = payload_range(&geometry, &self.terms.window, position);
                umem.copy_within(
                    front.payload + range.start,
                    payload + range.start,
                    range.end - range.start,
                );
            }
        }
        for window in 0..self.terms.window.count_of_windows(geometry.fragment_count()) {
            let slot = &front.tails[TailRule::slot(window)];
            if front.rule.is_saved(window) && slot.valid {
                let tail = front.tail_range(window, &self.terms);
                let bytes = &slot.bytes[..(tail.end - tail.start) as usize];
                umem.copy_to(tail.start - front.payload + payload, bytes);
            }
        }
        let number = front.number;
        self.held.fragments.retain(|fragment| {
            if fragment.number != number {
                return true;
            }
            let range = payload_range(&geometry, &self.terms.window, fragment.position);
            let begin = usize::from(fragment.slot) * self.held.slot_len;
            umem.copy_to(
                payload + range.start,
                &self.held.bytes[begin..begin + usize::from(fragment.len)],
            );
            self.held.free.push(fragment.slot);
            false
        });
        self.repair.copied_bytes += geometry.message_len();
        self.repair.copied_out += 1;
        if !self.terms.caps.witness {
            self.compare_copy((start, payload), umem);
        }
        let zone = Zone { start, len: zone_len };
        let front = &mut self.messages[0];
        front.payload = payload;
        front.held = 0;
        if let Some(zone) = front.zone.replace(zone) {
            entries.quarantine(zone);
        }
        true
    }

    /// Forgets the front message; its zone comes back when nothing can be written there any more.
    pub(super) fn drop_front(&mut self, entries: &mut Entries, arena: &mut Arena) {
        let Some(front) = self.messages.pop_front() else {
            return;
        };
        self.repair.given_up += front.arrived();
        self.posting = self.posting.saturating_sub(1);
        self.overtaken(front.end());
        self.delivered = front.number.wrapping_add(1);
        if let Some(zone) = front.zone {
            entries.quarantine(zone);
        }
        entries.free_quarantined(arena);
    }

    /// None of the posted entries will be used: what was posted for packets that are still to come is posted again.
    pub(super) fn post_again(&mut self, umem: &Umem) {
        for message in &mut self.messages {
            self.posts_again |= message.posted > message.consumed;
            message.posted = message.consumed;
        }
        let count = |message: &super::Arriving| message.geometry.fragment_count();
        self.posting = (self.messages.iter())
            .position(|message| message.posted < count(message))
            .unwrap_or(self.messages.len());
        self.last = None;
        self.forget_astray();
        self.settle_trouble(umem);
    }

    /// Number of the first message that is not settled.
    pub(crate) fn unsettled_from(&self) -> u32 {
        self.messages
            .front()
            .map_or(self.announced, |message| message.number)
    }

    /// The gate may admit what is announced, now and when it has opened the session anew; nothing of a session that is astray.
    pub(crate) fn limit_messages(&self, queue: &mut impl RxQueue) {
        if !self.terms.one_copy {
            let end = match self.lands {
                true => self.announced,
                false => self.unsettled_from(),
            };
            queue.set_message_limit(u32::from(self.place()), end.wrapping_sub(1));
        }
    }

    /// The next request for what is missing and due: a message's number, and ranges of fragment indices. It counts as
    /// sent: one that is lost is repeated like any other.
    pub(crate) fn next_request(&mut self, now_ns: u64) -> Option<(u32, Vec<MissingRange>)> {
        if self.terms.delivery != Delivery::Reliable {
            return None;
        }
        // An answer has a few of its usual times to come.
        let pause = match self.answer_ns {
            0 => RequestTimer::PAUSE,
            known => Duration::from_nanos(3 * known),
        };
        for message in &mut self.messages {
            // In zero-copy mode what seems to be missing may lie elsewhere.
            if !self.terms.caps.witness && !message.located {
                continue;
            }
            let Some(from) = message.timer.poll(Time::from_nanos(now_ns)) else {
                continue;
            };
            let count = message.geometry.fragment_count();
            let ranges: Vec<MissingRange> =
                index_ranges(&self.terms.window, message.arrivals.missing(), from, count)
                    .take(RANGES_MAX)
                    .map(|range| MissingRange {
                        first: range.start,
                        len: range.end - range.start,
                    })
                    .collect();
            message
                .timer
                .asked(Time::from_nanos(now_ns), from, message.arrivals.expected(), pause);
            if !ranges.is_empty() {
                self.repair.requested += ranges.iter().map(|range| u64::from(range.len)).sum::<u64>();
                return Some((message.number, ranges));
            }
        }
        None
    }
}

fn payload_range(geometry: &Geometry, window: &WindowShape, position: u32) -> Range<u64> {
    geometry.rx_payload_range(window.index_at(position, geometry.fragment_count()))
}

/// Fragment indices of missing positions from `from` on. Inside a window positions run backwards, so a range of
/// positions is a range of indices as far as it stays in one window.
fn index_ranges<'a>(
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
pub(super) fn missing_indices(window: &WindowShape, arrivals: &Arrivals, count: u32) -> Vec<Range<u32>> {
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
