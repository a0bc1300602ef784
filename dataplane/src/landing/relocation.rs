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

use lm_protocol::delivery::{Delivery, RequestTimer};
use lm_protocol::time::Time;
use lm_protocol::window::TailRule;

use super::Inbound;
use super::integrity::Verdict;
use super::repair::Source;
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

impl Inbound {
    /// Zero-copy mode: the sender says that so many packets of the session were sent, and nothing has come since.
    pub(super) fn correct(&mut self, sent: u64) {
        self.corrections += sent as i64 - self.accepted as i64;
        self.accepted = sent;
    }

    /// Zero-copy mode: the front message is sent, as far as is known, and something of it seems to be missing. Where it is, its
    /// manifest tells.
    pub(super) fn locate_missing(&mut self, umem: &Umem, now_ns: u64) {
        let Some(front) = self.messages.front_mut() else {
            return;
        };
        let count = front.fragment_count();
        if self.terms.delivery != Delivery::Reliable
            || front.zone.is_none()
            || front.located
            || front.arrivals.is_complete()
            || front.arrivals.expected() < count
        {
            return;
        }
        front.proof.wanted = true;
        if self.evidence.proved(front.number).is_some() {
            self.relocate(umem, now_ns);
        }
    }

    /// Finds what of the front message is not as its proved manifest says.
    pub(super) fn relocate(&mut self, umem: &Umem, now_ns: u64) {
        self.note_held();
        for at in 0..self.messages.len().min(MESSAGES_BEHIND) {
            self.note_unfinal(at, umem);
        }
        let wrong = self.reject_wrong();
        let front = &self.messages[0];
        let count = front.fragment_count();
        if wrong.is_empty() && front.arrivals.is_complete() {
            // The manifest is that of these bytes, and what was announced is not.
            self.messages[0].proof.verdict = Verdict::Contradicted;
            return;
        }
        let mut sources: HashMap<u64, Vec<Found>> = HashMap::new();
        for &(digest, position) in &wrong {
            let mut add = |digest, skewed| {
                let found = sources.entry(digest).or_default();
                found.push(Found::Slot(0, position, skewed));
            };
            add(digest, false);
            if let Some(digest) = self.skewed_digest(0, position, umem) {
                add(digest, true);
            }
        }
        self.look_behind(&mut sources, umem);
        let mut moves: Vec<(u32, Found)> = Vec::new();
        let mut taken: HashSet<(usize, u32)> = HashSet::new();
        for position in (0..count).filter(|position| !self.messages[0].arrivals.has(*position)) {
            let Some(digest) = self.wanted_digest(position) else {
                continue;
            };
            let found = loop {
                match sources.get_mut(&digest).and_then(Vec::pop) {
                    Some(Found::Slot(at, from, _)) if !taken.insert((at, from)) => {}
                    found => break found,
                }
            };
            moves.push((position, found.unwrap_or(Found::Stray)));
        }
        let shift = self.learn_shift(&moves);
        let mut unused = wrong;
        unused.retain(|(_, position)| !taken.contains(&(0, *position)));
        self.move_fragments(moves, &unused, umem, now_ns);
        if let Ok(lost @ 1..) = u32::try_from(shift) {
            self.lost(lost, now_ns);
        }
        let front = &mut self.messages[0];
        front.proof.verdict = Verdict::Open;
        front.proof.wanted = false;
        front.located = true;
        if !front.arrivals.is_complete() {
            // What was asked for before is not what is asked for now.
            front.timer = RequestTimer::default();
            front.timer.noticed(Time::from_nanos(now_ns));
            front.missing_ns.get_or_insert(now_ns);
        }
        self.troubled = true;
        self.settle_trouble(umem);
    }

    /// What of the front message was taken for another fragment than it is, is missing now: digests and positions of the slots
    /// where something landed.
    fn reject_wrong(&mut self) -> Vec<(u64, u32)> {
        let front = &mut self.messages[0];
        let mut wrong = Vec::new();
        let (Some(manifest), Some(zone)) = (self.evidence.proved(front.number), front.zone) else {
            return wrong;
        };
        let count = front.geometry.fragment_count();
        // Who knows the digest of all has sent all.
        front.arrivals.claim(count);
        for (index, &digest) in (0..count).zip(self.evidence.digests.of(zone.start, count)) {
            let position = self.terms.window.position_of(index, count);
            if !front.arrivals.has(position) || manifest.digest(index) == Some(digest) {
                continue;
            }
            front.arrivals.reject(position);
            if self.held.forget(front.number, position) {
                front.held -= 1;
                self.repair.corrupt += 1;
            } else {
                wrong.push((digest, position));
            }
        }
        wrong
    }

    /// Adds the slots of the messages behind the front one in which something landed.
    fn look_behind(&self, sources: &mut HashMap<u64, Vec<Found>>, umem: &Umem) {
        for at in 1..self.messages.len().min(MESSAGES_BEHIND) {
            let message = &self.messages[at];
            let Some(zone) = message
                .zone
                .filter(|_| !message.shown && !message.proof.is_proved())
            else {
                continue;
            };
            let count = message.fragment_count();
            let digests = self.evidence.digests.of(zone.start, count);
            for position in 0..message.consumed.min(SLOTS_BEHIND) {
                let index = self.terms.window.index_at(position, count);
                if message.arrivals.has(position) {
                    let mut add = |digest, skewed| {
                        let found = sources.entry(digest).or_default();
                        found.insert(0, Found::Slot(at, position, skewed));
                    };
                    add(digests[index as usize], false);
                    if let Some(digest) = self.skewed_digest(at, position, umem) {
                        add(digest, true);
                    }
                }
            }
        }
    }

    /// The digest that the manifest has for a position of the front message.
    fn wanted_digest(&self, position: u32) -> Option<u64> {
        let front = &self.messages[0];
        let index = self.terms.window.index_at(position, front.fragment_count());
        self.evidence.proved(front.number)?.digest(index)
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
        let arrivals = &self.messages[0].arrivals;
        let shift = match (from + 1..arrivals.expected()).any(|position| arrivals.has(position)) {
            true => 0,
            false => shift,
        };
        let unknown = shift - self.corrections - i64::from(self.messages[0].ahead);
        if unknown == 0 || unknown.abs() > SHIFT_MAX {
            return 0;
        }
        let accepted = self.accepted.saturating_add_signed(unknown);
        self.correct(accepted.min(self.announced_packets.max(self.accepted)));
        unknown
    }

    /// Copies what was found to its place, or aside. `unused`: slots whose payload belongs to no fragment of this message.
    fn move_fragments(&mut self, moves: Vec<(u32, Found)>, unused: &[(u64, u32)], umem: &Umem, now_ns: u64) {
        let payload_len = usize::from(self.terms.layout.payload_len());
        let mut scratch = vec![0; payload_len];
        // Where nothing is shifted, and others behind it are in their places, it was changed on its way.
        let is_shifted = moves.iter().any(|(_, found)| matches!(found, Found::Slot(..)));
        let arrivals = &self.messages[0].arrivals;
        let last_in_place = (0..arrivals.expected())
            .rev()
            .find(|position| arrivals.has(*position));
        for &(digest, position) in unused {
            if !is_shifted && last_in_place.is_some_and(|last| position < last) {
                self.repair.corrupt += 1;
                continue;
            }
            // Strays begin behind the shorter header.
            let as_other = match self.is_lowest(0, position) {
                true => self.skewed_digest(0, position, umem),
                false => None,
            };
            self.slot_bytes(0, position, as_other.is_some(), &mut scratch, umem);
            let skew = self.skew() as usize;
            let as_first = (skew > 0).then(|| self.evidence.hasher.digest(&scratch[skew..]));
            let dropped = self.strays.keep(|bytes| {
                bytes.copy_from_slice(&scratch);
                (as_other.unwrap_or(digest), as_first)
            });
            self.repair.stale += u64::from(dropped);
        }
        // Behind a loss later ones come from earlier slots, and the last goes first: whatever lay where another belongs is gone then.
        // Behind a packet too many it is the other way round. Where there is both, those are copied aside first, as is what comes
        // from elsewhere.
        let is_from_before =
            |&(position, found): &(u32, Found)| matches!(found, Found::Slot(0, from, _) if from < position);
        let behind_losses = moves.iter().any(is_from_before);
        let mut aside: Vec<(u32, Vec<u8>)> = Vec::new();
        for &(position, found) in &moves {
            match found {
                Found::Slot(0, from, false) if from < position || !behind_losses => {}
                Found::Slot(at, from, skewed) => {
                    if at > 0 {
                        // It is not what it was taken for there.
                        let message = &mut self.messages[at];
                        message.arrivals.reject(from);
                        message.missing_ns.get_or_insert(now_ns);
                        let index = (self.terms.window).index_at(from, message.geometry.fragment_count());
                        self.spoil(at, index);
                    }
                    if aside.len() == ASIDE_MAX {
                        self.repair.no_room += 1;
                        continue;
                    }
                    self.slot_bytes(at, from, skewed, &mut scratch, umem);
                    aside.push((position, scratch.clone()));
                }
                Found::Stray => {
                    let digest = self.wanted_digest(position);
                    if aside.len() < ASIDE_MAX
                        && let Some(bytes) = digest.and_then(|digest| self.strays.take(digest))
                    {
                        aside.push((position, bytes.to_vec()));
                    }
                }
            }
        }
        let mut in_place: Vec<(u32, u32)> = (moves.iter())
            .filter_map(|&(position, found)| match found {
                Found::Slot(0, from, false) if from < position || !behind_losses => Some((position, from)),
                _ => None,
            })
            .collect();
        if behind_losses {
            in_place.reverse();
        }
        for (position, from) in in_place {
            self.slot_bytes(0, from, false, &mut scratch, umem);
            self.bring(position, &scratch, umem);
        }
        for (position, bytes) in &aside {
            self.bring(*position, bytes, umem);
        }
    }

    /// The digest of what landed in a slot, if its header has another length than that of the slot's own fragment; `None` where
    /// all are of one length.
    fn skewed_digest(&self, at: usize, position: u32, umem: &Umem) -> Option<u64> {
        let skew = self.skew() as usize;
        let payload_len = usize::from(self.terms.layout.payload_len());
        let len = match self.is_lowest(at, position) {
            true => usize::from(self.messages[at].other_len),
            // A first fragment, which is full.
            false => payload_len - skew,
        };
        if skew == 0 || len == 0 {
            return None;
        }
        let mut bytes = vec![0; payload_len];
        self.slot_bytes(at, position, true, &mut bytes, umem);
        Some(self.evidence.hasher.digest(&bytes[..len]))
    }

    /// Whether a position is that of the first fragment.
    fn is_lowest(&self, at: usize, position: u32) -> bool {
        let count = self.messages[at].fragment_count();
        self.terms.window.index_at(position, count) == 0
    }

    /// Copies what landed in a slot: a full payload's length, whatever its own was, `skewed` as in [`Found::Slot`]. The last bytes
    /// of a window may be in the saved copy (I5).
    fn slot_bytes(&self, at: usize, position: u32, skewed: bool, bytes: &mut [u8], umem: &Umem) {
        let message = &self.messages[at];
        let count = message.geometry.fragment_count();
        let index = self.terms.window.index_at(position, count);
        let skew = if skewed { self.skew() } else { 0 };
        let below = if index == 0 { skew } else { 0 };
        let start = message.payload + message.geometry.rx_payload_range(index).start - u64::from(below);
        umem.copy_from(start, bytes);
        let window = self.terms.window.window_of(index);
        let slot = &message.tails[TailRule::slot(window)];
        if self.terms.window.is_highest(index, count) && message.rule.is_saved(window) && slot.valid {
            let tail = message.tail_range(window, &self.terms);
            let (from, len) = ((tail.start - start) as usize, (tail.end - tail.start) as usize);
            bytes[from..from + len].copy_from_slice(&slot.bytes[..len]);
        }
        bytes.copy_within((skew - below) as usize.., 0);
    }

    /// A fragment of the front message was found: it goes to its place, or aside while something may be written there.
    fn bring(&mut self, position: u32, bytes: &[u8], umem: &Umem) {
        let front = &mut self.messages[0];
        let index = (self.terms.window).index_at(position, front.geometry.fragment_count());
        let len = usize::from(front.geometry.fragment_len(index));
        let digest = self.evidence.hasher.digest(&bytes[..len]);
        if self.wanted_digest(position) != Some(digest) {
            self.repair.corrupt += 1;
            return;
        }
        self.repair.displaced += 1;
        let front = &mut self.messages[0];
        front.arrivals.take(position);
        if position < front.consumed {
            self.put(0, position, Source::Bytes(&bytes[..len]), umem);
        } else if let Some(held) = self.hold_slot(0, position) {
            held.copy_from_slice(&bytes[..len]);
        }
    }

    /// The front message was copied to memory at `memory`, its payload at `payload`, while packets may still have been written
    /// around it: what is not as it was is missing.
    pub(super) fn compare_copy(&mut self, (memory, payload): (u64, u64), umem: &Umem) {
        let front = &mut self.messages[0];
        let Some(zone) = front.zone else { return };
        let count = front.geometry.fragment_count();
        let mut bytes = vec![0; usize::from(self.terms.layout.payload_len())];
        for index in 0..count {
            let position = self.terms.window.position_of(index, count);
            if !front.arrivals.has(position) {
                continue;
            }
            let range = front.geometry.rx_payload_range(index);
            let bytes = &mut bytes[..(range.end - range.start) as usize];
            umem.copy_from(payload + range.start, bytes);
            let digest = self.evidence.hasher.digest(bytes);
            if self.evidence.digests.of(zone.start, count)[index as usize] != digest {
                front.arrivals.reject(position);
                front.timer.noticed(Time::from_nanos(self.progress_ns));
                front.missing_ns.get_or_insert(self.progress_ns);
                self.troubled = true;
                self.repair.corrupt += 1;
            }
            self.evidence.digests.set(memory, index, digest);
        }
    }
}
