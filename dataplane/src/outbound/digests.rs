//! Digests of what is sent: of each fragment when its packet goes to the ring for the first time, of a message when its last
//! one does.

use std::collections::VecDeque;
use std::ops::Range;

use lm_protocol::manifest::{FragmentHasher, Manifest, Packet, message_digest};
use lm_protocol::serial;
use lm_protocol::wire::lm::{MessageDigest, MissingRange};

use super::{Outbound, Outgoing, OutgoingTable};
use crate::bounds::general_payload_len;
use crate::fragment_digests::FragmentDigests;
use crate::memory::Umem;

/// Ranges of digests to be sent that are kept; the receiver repeats requests for others.
pub(super) const WANTED_MAX: usize = 64;

/// What a session's receiver is to be told of its messages' digests.
#[derive(Debug)]
pub(crate) struct DigestsToTell {
    pub(super) hasher: FragmentHasher,
    /// It was told the digests of all messages before this number.
    told: u32,
    /// It asked for those of fragments: message number and indices.
    wanted: VecDeque<(u32, Range<u32>)>,
    /// It asked for those of windows: message number and windows.
    pub(super) windows: VecDeque<(u32, Range<u32>)>,
}

impl DigestsToTell {
    pub(super) fn new(key: u64, first_message: u32) -> DigestsToTell {
        DigestsToTell {
            hasher: FragmentHasher::new(key),
            told: first_message,
            wanted: VecDeque::new(),
            windows: VecDeque::new(),
        }
    }

    /// The digest of a message leaves with it.
    pub(super) fn has_left(&mut self, number: u32) {
        if self.told == number {
            self.told = number.wrapping_add(1);
        }
    }
}

impl Outgoing {
    /// Keeps the digest of fragment `index`.
    #[inline]
    pub(super) fn note_digest(
        &self,
        index: u32,
        digests: &mut FragmentDigests,
        umem: &Umem,
        hasher: &FragmentHasher,
    ) {
        digests.set(self.start, index, hasher.digest(self.payload(index, umem)));
    }

    /// Keeps the digests of all fragments, as far as these are the message's own bytes where it has facts, and the message's.
    pub(super) fn note_digests(
        &mut self,
        key: u64,
        digests: &mut FragmentDigests,
        umem: &Umem,
        hasher: &FragmentHasher,
    ) {
        for index in 0..self.geometry.fragment_count() {
            let payload = self.payload(index, umem);
            let own = match self.has_facts {
                true => self.len.saturating_sub(self.geometry.message_offset(index)) as usize,
                false => payload.len(),
            };
            digests.set(
                self.start,
                index,
                hasher.digest(&payload[..own.min(payload.len())]),
            );
        }
        self.note_message_digest(digests, key);
    }

    /// Every fragment's digest is known.
    pub(super) fn note_message_digest(&mut self, digests: &FragmentDigests, key: u64) {
        let digests = digests.of(self.start, self.geometry.fragment_count());
        self.digest = Some(message_digest(key, self.number, digests, self.len, self.tag));
    }
}

impl Outbound {
    pub(super) fn first_queued(&self) -> u32 {
        self.next_number.wrapping_sub(self.queue.len() as u32)
    }

    /// Most payload bytes of a packet that is no fragment.
    pub(crate) fn general_payload_len(&self) -> usize {
        general_payload_len(&self.terms.layout)
    }

    /// Whether there are digests of messages that the receiver was not told.
    pub(crate) fn has_digests_to_tell(&self) -> bool {
        self.terms.integrity.has_digests()
            && serial::precedes(
                serial::later(self.digests.told, self.first_queued()),
                self.sent_up_to(),
            )
    }

    /// The first message whose digest is to be told now.
    pub(crate) fn digests_told(&self) -> u32 {
        match self.announce_due {
            true => self.first_queued(),
            false => serial::later(self.digests.told, self.first_queued()),
        }
    }

    /// The digest of a message, once it is fully sent.
    pub(crate) fn digest_of(&self, table: &mut OutgoingTable, number: u32) -> Option<MessageDigest> {
        if !self.terms.integrity.has_digests() || !serial::precedes(number, self.sent_up_to()) {
            return None;
        }
        let slot = *self
            .queue
            .get(number.wrapping_sub(self.first_queued()) as usize)?;
        let digest = table.at(slot).digest?;
        Some(MessageDigest {
            message: number,
            digest,
        })
    }

    /// The receiver was told the digests of all messages before `told`.
    pub(crate) fn told_digests(&mut self, told: u32) {
        self.digests.told = told;
    }

    /// The receiver asks for fragments' digests of a message. `false`: the message has no such fragments, or was never
    /// announced.
    pub(crate) fn digests_requested(
        &mut self,
        table: &mut OutgoingTable,
        umem: &Umem,
        number: u32,
        ranges: impl Iterator<Item = MissingRange>,
    ) -> bool {
        let first_queued = self.first_queued();
        let Some(&slot) = self.queue.get(number.wrapping_sub(first_queued) as usize) else {
            // Settled meanwhile, or never sent.
            return serial::precedes(number, first_queued);
        };
        if !serial::precedes(number, self.announced) {
            return false;
        }
        let (outgoing, digests) = table.at_with_digests(slot);
        let count = outgoing.geometry.fragment_count();
        if !outgoing.is_whole() {
            // No receiver asks before: what its writer may still write is not read.
            return false;
        }
        if outgoing.digest.is_none() {
            // Not fully sent, and its receiver settles it without the rest: once for each message.
            outgoing.note_digests(self.terms.key, digests, umem, &self.digests.hasher);
        }
        // What it lacks now is all that it lacks.
        self.digests.wanted.clear();
        for range in ranges.take(WANTED_MAX) {
            let end = range.first.saturating_add(range.len);
            if range.len == 0 || end > count {
                return false;
            }
            self.digests.wanted.push_back((number, range.first..end));
        }
        true
    }

    /// The next MANIFEST packet to send, with at most `room` bytes of payload.
    pub(crate) fn next_manifest<'a>(
        &mut self,
        table: &'a mut OutgoingTable,
        room: usize,
    ) -> Option<Packet<'a>> {
        let first_queued = self.first_queued();
        loop {
            let (number, range) = self.digests.wanted.front()?;
            let slot = self.queue.get(number.wrapping_sub(first_queued) as usize);
            let known = slot.and_then(|&slot| Some((slot, table.at(slot).digest?)));
            let (Some((slot, digest)), false) = (known, range.is_empty()) else {
                self.digests.wanted.pop_front();
                continue;
            };
            let range = MissingRange {
                first: range.start,
                len: range.end - range.start,
            };
            let number = *number;
            let (outgoing, digests) = table.at_with_digests(slot);
            let digests = digests.of(outgoing.start, outgoing.geometry.fragment_count());
            let manifest = Manifest::with_message_digest(self.terms.key, number, digests, digest);
            return manifest.packets_of(range, room).next();
        }
    }

    /// It has left, with so many digests of fragments.
    pub(crate) fn manifest_sent(&mut self, digests: u32) {
        if let Some((_, range)) = self.digests.wanted.front_mut() {
            range.start = range.start.saturating_add(digests).min(range.end);
        }
    }
}
