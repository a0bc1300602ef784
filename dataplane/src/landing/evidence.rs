//! What a message is measured by before it is shown: the digests of its fragments, taken from the bytes that came, and
//! what its sender says.
//!
//! A fragment's digest is taken when its place is final (I1): nothing that is still to come can be written there but at saved tails
//! (I5), so that what was measured is what is shown. Or from where it is copied to its place. What has to be known of a place that is not final
//! is read once, into a copy ([`Umem::copy_from`]), and measured again later. When all are here and nothing more can be written to the
//! message, the digest over them must be the one that the sender said. Where it is another, the manifest tells which fragments
//! differ; they count as lost.

use std::time::Duration;

use lm_protocol::integrity::DigestTimer;
use lm_protocol::manifest::{FragmentHasher, ManifestCollector, message_digest};
use lm_protocol::time::Time;
use lm_protocol::wire::lm::{Facts, LmPacket, MissingRange};

use super::arriving::{Arriving, Verdict, Zone};
use super::counts::RepairCounters;
use super::held::{Held, Source};
use super::terms::InboundTerms;
use crate::arena::Arena;
use crate::bounds::RANGES_MAX;
use crate::fragment_digests::FragmentDigests;
use crate::memory::{CHUNK_LEN_RANGE, Umem};
use crate::mutants::mutant;

/// Digests of all that came, and the manifest of the front message where that is needed.
#[derive(Debug)]
pub(super) struct Evidence {
    key: u64,
    /// The sender sends digests. If not, nothing is measured and everything is believed.
    has_digests: bool,
    hasher: FragmentHasher,
    digests: FragmentDigests,
    manifest: Option<Box<ManifestCollector>>,
    /// When to ask for what, about the message with this number.
    timer: (u32, DigestTimer),
}

impl Evidence {
    /// `arena`: where its landing zones will be.
    pub(super) fn new(terms: &InboundTerms, arena: &Arena) -> Evidence {
        let has_digests = terms.integrity.has_digests();
        let len = if has_digests { arena.len() } else { 0 };
        Evidence {
            key: terms.key,
            has_digests,
            hasher: FragmentHasher::new(terms.key),
            digests: FragmentDigests::new(arena.start(), len),
            manifest: None,
            timer: (terms.first_message, DigestTimer::default()),
        }
    }

    /// The arena has grown to `arena_len` bytes.
    pub(super) fn grow(&mut self, arena_len: u64) {
        if self.has_digests {
            self.digests.grow(arena_len);
        }
    }

    #[inline]
    pub(super) fn has_digests(&self) -> bool {
        self.has_digests
    }

    #[inline]
    pub(super) fn digest(&self, bytes: &[u8]) -> u64 {
        self.hasher.digest(bytes)
    }

    /// Reads facts of a message of the session.
    pub(super) fn facts(&self, bytes: [u8; Facts::LEN]) -> Option<Facts> {
        if mutant!(FactsUnhashed) {
            return Some(zerocopy::transmute!(bytes));
        }
        self.has_digests.then(|| Facts::read(bytes, &self.hasher))?
    }

    /// The digest of bytes in the UMEM that nobody writes any more (I1): the only ones of what is received that are read where they
    /// lie. Others are copied first.
    #[inline]
    fn digest_final(&self, from: u64, len: u16, umem: &Umem) -> u64 {
        // SAFETY: the packet's entry is used, or it is a frame that is posted nowhere. Of the entries that are posted none lets the kernel
        // or the device write here: `Places::passed` says when that is so of a landing zone, but for a later window's lowest entry, which is
        // posted when this window's tail was saved, after this (I5). Nothing copies there while the slice lives.
        self.hasher
            .digest(unsafe { umem.mapping().slice(from, u64::from(len)) })
    }

    /// Fragment `index` landed at its place; its packet begins at UMEM address `start`.
    #[inline]
    pub(super) fn note_landed(&mut self, message: &mut Arriving, index: u32, start: u64, umem: &Umem) {
        let fragment = message.geometry.fragment(index);
        let payload = start + u64::from(fragment.header_len);
        // The next one's, most likely, which the kernel copied there a hundred packets ago.
        let len = u64::from(fragment.len);
        umem.mapping().prefetch(payload.saturating_sub(len), len);
        self.note_final(message, index, (payload, fragment.len), umem);
    }

    /// What is to be shown as fragment `index`, so many bytes at a UMEM address, is final.
    #[inline]
    pub(super) fn note_final(
        &mut self,
        message: &mut Arriving,
        index: u32,
        (payload, len): (u64, u16),
        umem: &Umem,
    ) {
        if self.has_digests {
            let digest = self.digest_final(payload, message.digested(index, len), umem);
            self.note(message, index, digest);
        }
    }

    /// The digests of what landed where something may still be written: as it is now, to find out what it is. They are taken again when it
    /// is final.
    pub(super) fn note_unfinal(&mut self, message: &mut Arriving, umem: &Umem) {
        let mut bytes = [0; *CHUNK_LEN_RANGE.end() as usize];
        for position in message.slots.final_to..message.slots.consumed {
            let Some(len) = *message.slots.landed_at(position) else {
                continue;
            };
            let index = message.index_at(position);
            let bytes = &mut bytes[..usize::from(message.digested(index, len))];
            umem.copy_from(message.payload_of(index), bytes);
            let digest = self.digest(bytes);
            self.note(message, index, digest);
        }
    }

    /// A fragment is about to be copied to its place from `source`.
    pub(super) fn note_put(
        &mut self,
        message: &mut Arriving,
        position: u32,
        source: Source<'_>,
        held: &Held,
        umem: &Umem,
    ) {
        if !self.has_digests {
            return;
        }
        let index = message.index_at(position);
        let len = message.digested(index, message.geometry.fragment_len(index));
        let digest = match source {
            // A packet that was received and is not given back: in a slot of copy mode, in a spare frame, or, as a datagram, in a
            // general frame.
            Source::Umem(from) => self.digest_final(from, len, umem),
            Source::Held(slot) => self.digest(held.slot(slot, len)),
            Source::Bytes(payload) => self.digest(&payload[..usize::from(len)]),
        };
        self.note(message, index, digest);
    }

    #[inline]
    fn note(&mut self, message: &mut Arriving, index: u32, digest: u64) {
        if let Some(zone) = message.slots.zone {
            self.digests.set(zone.start, index, digest);
        }
        message.proof.verdict = Verdict::Open;
    }

    /// No fragment has the digest of this slot.
    pub(super) fn spoil(&mut self, message: &mut Arriving, index: u32) {
        let nothing = self.digest(&[]);
        self.note(message, index, nothing);
    }

    /// The digests of what is held of the front message take their places among the others.
    pub(super) fn note_held(&mut self, front: &Arriving, held: &Held) {
        let (Some(zone), 1..) = (front.slots.zone, front.gaps.held) else {
            return;
        };
        for (position, payload) in held.of(front.number) {
            let index = front.index_at(position);
            let len = front.digested(index, payload.len() as u16);
            let digest = self.hasher.digest(&payload[..usize::from(len)]);
            self.digests.set(zone.start, index, digest);
        }
    }

    /// The digest of each of a message's fragments, by index.
    pub(super) fn digests_of(&self, zone: Zone, count: u32) -> &[u64] {
        self.digests.of(zone.start, count)
    }

    /// Sets the digest of a fragment that was copied to another zone.
    pub(super) fn set(&mut self, zone_start: u64, index: u32, digest: u64) {
        self.digests.set(zone_start, index, digest);
    }

    /// Whether every byte of a message, none of whose fragments is held aside, is its sender's.
    pub(super) fn proves(&self, message: &mut Arriving) -> bool {
        if !self.has_digests {
            return true;
        }
        if message.proof.verdict != Verdict::Open {
            return message.proof.is_proved();
        }
        let (Some(announced), Some(zone)) = (message.proof.announced, message.slots.zone) else {
            return false;
        };
        let digests = self.digests_of(zone, message.fragment_count());
        let digest = message_digest(self.key, message.number, digests, message.len, message.tag);
        message.proof.verdict = match digest == announced || mutant!(Unproved) {
            true => Verdict::Proved,
            false => Verdict::Disproved,
        };
        message.proof.is_proved()
    }

    /// The same of the front message, all of whose fragments are here.
    #[inline]
    pub(super) fn proves_front(&mut self, front: &mut Arriving, held: &Held) -> bool {
        if self.has_digests && front.proof.verdict == Verdict::Open {
            self.note_held(front, held);
        }
        self.proves(front)
    }

    /// Whether the front message waits for digests, or for being compared with them.
    #[inline]
    pub(super) fn is_awaited(&self, front: Option<&Arriving>) -> bool {
        self.has_digests
            && front.is_some_and(|front| {
                front.proof.wanted
                    || (front.gaps.arrivals.is_complete()
                        && front.slots.zone.is_some()
                        && !front.proof.is_proved())
            })
    }

    /// The timer of message `number`, the front one.
    fn timer(&mut self, number: u32) -> &mut DigestTimer {
        if self.timer.0 != number {
            self.timer = (number, DigestTimer::default());
        }
        &mut self.timer.1
    }

    /// How long digests of message `number` have been waited for.
    pub(super) fn waited(&mut self, number: u32, now_ns: u64) -> Duration {
        self.timer(number).waited(Time::from_nanos(now_ns))
    }

    /// The proved manifest of message `number`.
    pub(super) fn proved(&self, number: u32) -> Option<&ManifestCollector> {
        (self.manifest.as_deref()).filter(|manifest| manifest.message() == number && manifest.is_proved())
    }

    /// The digest that the proved manifest has for a position of the front message.
    pub(super) fn wanted(&self, front: &Arriving, position: u32) -> Option<u64> {
        self.proved(front.number)?.digest(front.index_at(position))
    }

    /// Takes a MANIFEST packet. `Some(false)`: it contradicts what came before; `None`: nobody asked for it.
    pub(super) fn take_manifest(
        &mut self,
        front: &mut Arriving,
        packet: &LmPacket<'_>,
        now_ns: u64,
    ) -> Option<bool> {
        let manifest =
            (self.manifest.as_deref_mut()).filter(|manifest| manifest.message() == front.number)?;
        match manifest.accept(&packet.header, packet.payload) {
            Ok(0) => return Some(true),
            Ok(_) => {}
            Err(_) => return Some(false),
        }
        let digest = manifest.message_digest();
        self.timer(front.number).progressed(Time::from_nanos(now_ns));
        if let Some(digest) = digest
            && *front.proof.announced.get_or_insert(digest) != digest
        {
            front.proof.verdict = Verdict::Contradicted;
        }
        Some(true)
    }

    /// The next request for digests that is due: of the front message's fragments, or, without ranges, its own. `gives_up_unasked`: what is
    /// not right is not asked for.
    pub(super) fn next_request(
        &mut self,
        front: Option<&Arriving>,
        gives_up_unasked: bool,
        repair: &mut RepairCounters,
        now_ns: u64,
    ) -> Option<(u32, Vec<MissingRange>)> {
        if !self.is_awaited(front) {
            // It is needed again when the fragments that it rejected have come.
            let number = front.map(|front| front.number);
            (self.manifest).take_if(|manifest| number != Some(manifest.message()));
            return None;
        }
        let now = Time::from_nanos(now_ns);
        let front = front?;
        match front.proof.verdict {
            Verdict::Open if !front.proof.wanted => {
                let asks = front.proof.announced.is_none() && self.timer(front.number).poll(now);
                return asks.then_some((front.number, Vec::new()));
            }
            Verdict::Proved | Verdict::Contradicted => return None,
            Verdict::Disproved if gives_up_unasked => return None,
            Verdict::Open | Verdict::Disproved => {}
        }
        if (self.manifest.as_ref()).is_none_or(|known| known.message() != front.number) {
            let count = front.fragment_count();
            let mut manifest = Box::new(ManifestCollector::new(count));
            manifest
                .begin(self.key, front.number, count, front.len, front.tag)
                .expect("it was made for so many fragments");
            self.manifest = Some(manifest);
            self.timer(front.number).ask_at_once(now);
        }
        if self.proved(front.number).is_some() || !self.timer(front.number).poll(now) {
            return None;
        }
        let manifest = self.manifest.as_ref()?;
        repair.manifests += 1;
        Some((front.number, manifest.missing().take(RANGES_MAX).collect()))
    }
}
