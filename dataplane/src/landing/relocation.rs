//! Relocation: in zero-copy mode, where the front message's fragments really are.
//!
//! A lost packet shifts those behind it: each lies in the slot of an earlier one, and the first of the next message lie in the last
//! slots of this one. A packet too many shifts the other way. Slots do not overlap in their payloads, so that nothing of that is
//! gone: the manifest, which has proved itself, says which digest belongs to which fragment, and the digests of the slots say
//! where it is. What is found is copied to its place, or held aside while something may be written there; what is not found is
//! requested again, never guessed. What is found too much belongs to other messages and is kept ([`super::strays`]).
//!
//! Sources are looked for in the message's own slots, among the strays, and in the first slots of the messages behind it. Every copy
//! is compared with the manifest once it is made, so that a slot which changed meanwhile is not believed.

use std::collections::{HashMap, HashSet};

use lm_protocol::delivery::Delivery;

use super::arriving::{Arriving, Verdict};
use super::care::Care;
use super::held::Source;
use crate::memory::Umem;

/// Fragments that may be copied aside in one go; more are requested again.
const ASIDE_MAX: usize = 1024;
/// Slots of each message behind the front one that are looked at, in the order of their entries, and how many messages.
const SLOTS_BEHIND: u32 = 512;
const MESSAGES_BEHIND: usize = 4;
/// What is found further off than this says nothing about the packets to come.
const SHIFT_MAX: i64 = 1024;

/// Where a fragment's bytes are.
#[derive(Clone, Copy, Debug)]
enum Found {
    /// In the slot of this position of the message at `.0`; `.2`: behind a header of another length than that of the slot's own
    /// fragment (IP fragments: the first in another's slot, or another in the first one's).
    Slot(usize, u32, bool),
    /// Among the strays.
    Stray,
}

/// By digest, where it was found; what was found last is used first.
#[derive(Debug, Default)]
struct Sources(HashMap<u64, Vec<Found>>);

impl Care<'_> {
    /// Zero-copy mode: the front message is sent, as far as is known, and something of it seems to be missing. Where it is, its
    /// manifest tells.
    pub(super) fn locate_missing(&mut self, umem: &Umem, now_ns: u64) {
        let Some(front) = self.order.front_mut() else {
            return;
        };
        let arrivals = &front.gaps.arrivals;
        if self.terms.delivery != Delivery::Reliable
            || front.slots.zone.is_none()
            || front.shift.located
            || arrivals.is_complete()
            || arrivals.expected() < front.fragment_count()
        {
            return;
        }
        front.proof.wanted = true;
        if self.places.evidence().proved(front.number).is_some() {
            self.relocate(umem, now_ns);
        }
    }

    /// Finds what of the front message is not as its proved manifest says.
    pub(super) fn relocate(&mut self, umem: &Umem, now_ns: u64) {
        let relocation = Relocation {
            care: self,
            umem,
            now_ns,
        };
        if relocation.run() {
            self.settle_trouble(umem);
        }
    }
}

/// One look for the front message's fragments.
struct Relocation<'a, 'b> {
    care: &'a mut Care<'b>,
    umem: &'a Umem,
    now_ns: u64,
}

impl Relocation<'_, '_> {
    /// `false`: there is nothing to look for, its sender contradicts itself.
    fn run(mut self) -> bool {
        let places = &mut self.care.places;
        places.note_held(self.care.order.at(0));
        for message in self.care.order.iter_mut().take(MESSAGES_BEHIND) {
            places.evidence_mut().note_unfinal(message, self.umem);
        }
        if self.contradicts_what_is_shown() {
            self.care.front().proof.verdict = Verdict::Contradicted;
            return false;
        }
        let wrong = self.reject_wrong();
        let front = self.front();
        if wrong.is_empty() && front.gaps.arrivals.is_complete() {
            // The manifest is that of these bytes, and what was announced is not.
            self.care.front().proof.verdict = Verdict::Contradicted;
            return false;
        }
        let mut sources = Sources::default();
        for &(digest, position) in &wrong {
            sources.add(digest, Found::Slot(0, position, false));
            if let Some(digest) = self.skewed_digest(0, position) {
                sources.add(digest, Found::Slot(0, position, true));
            }
        }
        self.look_behind(&mut sources);
        let mut taken: HashSet<(usize, u32)> = HashSet::new();
        let moves = self.find(sources, &mut taken);
        let shift = self.learn_shift(&moves);
        let mut unused = wrong;
        unused.retain(|(_, position)| !taken.contains(&(0, *position)));
        self.keep_unused(&moves, &unused);
        self.move_fragments(&moves);
        if let Ok(lost @ 1..) = u32::try_from(shift) {
            self.care.pace.lost(lost, self.now_ns);
        }
        let now_ns = self.now_ns;
        let front = self.care.front();
        front.proof.verdict = Verdict::Open;
        front.proof.wanted = false;
        front.shift.located = true;
        if !front.gaps.arrivals.is_complete() {
            front.gaps.asks_anew(now_ns);
        }
        self.care.places.trouble();
        true
    }

    fn front(&self) -> &Arriving {
        self.care.order.at(0)
    }

    /// Whether something of the front message is shown that its proved manifest says to be otherwise.
    fn contradicts_what_is_shown(&self) -> bool {
        let (front, evidence) = (self.front(), self.care.places.evidence());
        let (true, Some(_), Some(zone)) = (front.is_read(), evidence.proved(front.number), front.slots.zone)
        else {
            return false;
        };
        let digests = evidence.digests_of(zone, front.fragment_count());
        (digests.iter().enumerate()).any(|(index, digest)| {
            front.shows(index as u32)
                && evidence.wanted(front, front.position_of(index as u32)) != Some(*digest)
        })
    }

    /// What of the front message was taken for another fragment than it is, is missing now: digests and positions of the slots
    /// where something landed.
    fn reject_wrong(&mut self) -> Vec<(u64, u32)> {
        let places = &mut self.care.places;
        let front = self.care.order.at_mut(0);
        let mut wrong = Vec::new();
        let (Some(_), Some(zone)) = (places.evidence().proved(front.number), front.slots.zone) else {
            return wrong;
        };
        let count = front.fragment_count();
        // Who knows the digest of all has sent all.
        front.gaps.arrivals.claim(count);
        for index in 0..count {
            let position = front.position_of(index);
            let digest = places.evidence().digests_of(zone, count)[index as usize];
            if !front.gaps.arrivals.has(position) || places.evidence().wanted(front, position) == Some(digest)
            {
                continue;
            }
            match places.reject(front, position) {
                true => places.repair.corrupt += 1,
                false => wrong.push((digest, position)),
            }
        }
        wrong
    }

    /// Adds the slots of the messages behind the front one in which something landed.
    fn look_behind(&self, sources: &mut Sources) {
        for (at, message) in self.care.order.iter().enumerate().take(MESSAGES_BEHIND).skip(1) {
            let Some(zone) = message.slots.zone.filter(|_| !message.proof.is_proved()) else {
                continue;
            };
            let count = message.fragment_count();
            let digests = self.care.places.evidence().digests_of(zone, count);
            for position in 0..message.slots.consumed.min(SLOTS_BEHIND) {
                // What is shown was found to be that message's own.
                if !message.gaps.arrivals.has(position) || message.shows(message.index_at(position)) {
                    continue;
                }
                let digest = digests[message.index_at(position) as usize];
                sources.add_last(digest, Found::Slot(at, position, false));
                if let Some(digest) = self.skewed_digest(at, position) {
                    sources.add_last(digest, Found::Slot(at, position, true));
                }
            }
        }
    }

    /// What is missing of the front message, and where it is. The slots that are needed for that are `taken`.
    fn find(&self, mut sources: Sources, taken: &mut HashSet<(usize, u32)>) -> Vec<(u32, Found)> {
        let mut moves: Vec<(u32, Found)> = Vec::new();
        let front = self.front();
        let arrivals = &front.gaps.arrivals;
        for position in (0..front.fragment_count()).filter(|position| !arrivals.has(*position)) {
            let Some(digest) = self.care.places.evidence().wanted(front, position) else {
                continue;
            };
            let found = loop {
                match sources.next(digest) {
                    Some(Found::Slot(at, from, _)) if !taken.insert((at, from)) => {}
                    found => break found,
                }
            };
            moves.push((position, found.unwrap_or(Found::Stray)));
        }
        moves
    }

    /// By how many packets those that landed last were ahead of their entries, and nobody knew: entries that are posted from now
    /// on are aimed by that much further.
    fn learn_shift(&mut self, moves: &[(u32, Found)]) -> i64 {
        let in_slot = |&(position, found): &(u32, Found)| match found {
            Found::Slot(0, from, _) => Some((from, i64::from(position) - i64::from(from))),
            _ => None,
        };
        let Some((from, shift)) = moves.iter().filter_map(in_slot).max_by_key(|(from, _)| *from) else {
            return 0;
        };
        // Entries that are aimed right by now may be behind those.
        let arrivals = &self.front().gaps.arrivals;
        let shift = match (from + 1..arrivals.expected()).any(|position| arrivals.has(position)) {
            true => 0,
            false => shift,
        };
        let ahead = i64::from(self.front().shift.ahead);
        let progress = &mut self.care.progress;
        let unknown = shift - progress.corrections() - ahead;
        if unknown == 0 || unknown.abs() > SHIFT_MAX {
            return 0;
        }
        let had = progress.accepted();
        let accepted = had.saturating_add_signed(unknown);
        progress.correct(accepted.min(self.care.order.packets().max(had)));
        unknown
    }

    /// Keeps what lies in slots whose payload belongs to no fragment of this message.
    fn keep_unused(&mut self, moves: &[(u32, Found)], unused: &[(u64, u32)]) {
        let mut scratch = self.scratch();
        // Where nothing is shifted, and others behind it are in their places, it was changed on its way.
        let is_shifted = moves.iter().any(|(_, found)| matches!(found, Found::Slot(..)));
        let arrivals = &self.front().gaps.arrivals;
        let last_in_place = (0..arrivals.expected())
            .rev()
            .find(|position| arrivals.has(*position));
        for &(digest, position) in unused {
            if !is_shifted && last_in_place.is_some_and(|last| position < last) {
                self.care.places.repair.corrupt += 1;
                continue;
            }
            // Strays begin behind the shorter header.
            let as_other = match self.front().index_at(position) {
                0 => self.skewed_digest(0, position),
                _ => None,
            };
            self.slot_bytes(0, position, as_other.is_some(), &mut scratch);
            let Care { strays, places, .. } = &mut *self.care;
            let digest = as_other.unwrap_or(digest);
            places.repair.stale += strays.keep_payload(&scratch, digest, places.evidence());
        }
    }

    /// Copies what was found to its place, or aside.
    fn move_fragments(&mut self, moves: &[(u32, Found)]) {
        // Behind a loss later ones come from earlier slots, and the last goes first: whatever lay where another belongs is gone then.
        // Behind a packet too many it is the other way round. Where there is both, those are copied aside first, as is what comes
        // from elsewhere.
        let is_from_before =
            |&(position, found): &(u32, Found)| matches!(found, Found::Slot(0, from, _) if from < position);
        let behind_losses = moves.iter().any(is_from_before);
        let is_in_place = |position, found| match found {
            Found::Slot(0, from, false) if from < position || !behind_losses => Some(from),
            _ => None,
        };
        let mut in_place: Vec<(u32, u32)> = Vec::new();
        let mut aside: Vec<(u32, Vec<u8>)> = Vec::new();
        for &(position, found) in moves {
            if let Some(from) = is_in_place(position, found) {
                in_place.push((position, from));
            } else if let Some(bytes) = self.take_aside(position, found, aside.len()) {
                aside.push((position, bytes));
            }
        }
        if behind_losses {
            in_place.reverse();
        }
        let mut scratch = self.scratch();
        for (position, from) in in_place {
            self.slot_bytes(0, from, false, &mut scratch);
            self.bring(position, &scratch);
        }
        for (position, bytes) in &aside {
            self.bring(*position, bytes);
        }
    }

    /// The bytes of a fragment, which are copied aside beside so many others.
    fn take_aside(&mut self, position: u32, found: Found, others: usize) -> Option<Vec<u8>> {
        let (at, from, skewed) = match found {
            Found::Slot(at, from, skewed) => (at, from, skewed),
            Found::Stray if others == ASIDE_MAX => return None,
            Found::Stray => {
                let Care {
                    strays,
                    places,
                    order,
                    ..
                } = &mut *self.care;
                let digest = places.evidence().wanted(order.at(0), position)?;
                return strays.take(digest).map(<[u8]>::to_vec);
            }
        };
        if at > 0 {
            // It is not what it was taken for there.
            let message = self.care.order.at_mut(at);
            message.gaps.arrivals.reject(from);
            message.gaps.missing_ns.get_or_insert(self.now_ns);
            let index = message.index_at(from);
            self.care.places.evidence_mut().spoil(message, index);
        }
        if others == ASIDE_MAX {
            self.care.places.repair.no_room += 1;
            return None;
        }
        let mut bytes = self.scratch();
        self.slot_bytes(at, from, skewed, &mut bytes);
        Some(bytes)
    }

    /// Room for a payload.
    fn scratch(&self) -> Vec<u8> {
        vec![0; usize::from(self.care.terms.layout.payload_len())]
    }

    /// The digest of what landed in a slot, if its header has another length than that of the slot's own fragment; `None` where
    /// all are of one length.
    fn skewed_digest(&self, at: usize, position: u32) -> Option<u64> {
        let skew = self.care.terms.skew() as usize;
        let message = self.care.order.at(at);
        let len = match message.index_at(position) {
            0 => usize::from(message.shift.other_len),
            // A first fragment, which is full.
            _ => usize::from(self.care.terms.layout.payload_len()) - skew,
        };
        if skew == 0 || len == 0 {
            return None;
        }
        let mut bytes = self.scratch();
        self.slot_bytes(at, position, true, &mut bytes);
        Some(self.care.places.evidence().digest(&bytes[..len]))
    }

    /// Copies what landed in a slot: a full payload's length, whatever its own was, `skewed` as in [`Found::Slot`]. The last bytes
    /// of a window may be in the saved copy (I5).
    fn slot_bytes(&self, at: usize, position: u32, skewed: bool, bytes: &mut [u8]) {
        let message = self.care.order.at(at);
        let index = message.index_at(position);
        let skew = if skewed { self.care.terms.skew() } else { 0 };
        let below = if index == 0 { skew } else { 0 };
        let start = message.payload_of(index) - u64::from(below);
        self.umem.copy_from(start, bytes);
        if let Some((tail, saved)) = message.saved_tail(index, self.care.terms.caps.prefix_len) {
            bytes[(tail - start) as usize..][..saved.len()].copy_from_slice(saved);
        }
        bytes.copy_within((skew - below) as usize.., 0);
    }

    /// A fragment of the front message was found: it goes to its place, or aside while something may be written there.
    fn bring(&mut self, position: u32, bytes: &[u8]) {
        let Care {
            places,
            order,
            progress,
            ..
        } = &mut *self.care;
        let front = order.at_mut(0);
        let len = usize::from(front.geometry.fragment_len(front.index_at(position)));
        let digest = places.evidence().digest(&bytes[..len]);
        if places.evidence().wanted(front, position) != Some(digest) {
            places.repair.corrupt += 1;
            return;
        }
        places.repair.displaced += 1;
        front.gaps.arrivals.take(position);
        if position < front.slots.consumed {
            places.put(front, position, Source::Bytes(&bytes[..len]), self.umem);
        } else if let Some(held) = places.hold_slot(front, position, progress.last_ns()) {
            held.copy_from_slice(&bytes[..len]);
        }
    }
}

impl Sources {
    fn add(&mut self, digest: u64, found: Found) {
        self.0.entry(digest).or_default().push(found);
    }

    /// Used after the others.
    fn add_last(&mut self, digest: u64, found: Found) {
        self.0.entry(digest).or_default().insert(0, found);
    }

    fn next(&mut self, digest: u64) -> Option<Found> {
        self.0.get_mut(&digest)?.pop()
    }
}
