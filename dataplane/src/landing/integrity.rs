//! What a message is measured by before it is shown: the digests of its fragments, taken from the bytes that came, and
//! what its sender says.
//!
//! A fragment's digest is taken when its place is final (I1): nothing that is still to come can be written there but at saved tails
//! (I5), so that what was measured is what is shown. Or from where it is copied to its place. What has to be known of a place that is not final
//! is read once, into a copy ([`Umem::copy_from`]), and measured again later. When all are here and nothing more can be written to the
//! message, the digest over them must be the one that the sender said. Where it is another, the manifest tells which fragments
//! differ; they count as lost.

use std::time::Duration;

use lm_protocol::delivery::{Delivery, RequestTimer};
use lm_protocol::integrity::DigestTimer;
use lm_protocol::manifest::{FragmentHasher, ManifestCollector, message_digest};
use lm_protocol::time::Time;
use lm_protocol::wire::lm::{LmPacket, MessageDigest, MissingRange};

use super::repair::Source;
use super::{Entries, GivenUp, Inbound, InboundTerms, Remedy};
use crate::arena::Arena;
use crate::bounds::RANGES_MAX;
use crate::fragment_digests::FragmentDigests;
use crate::memory::{CHUNK_LEN_RANGE, Umem};

/// Without reliable delivery a message whose digests do not come is given up after so long.
const PATIENCE: Duration = Duration::from_millis(500);

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
    announced: Option<u64>,
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

/// Digests of all that came, and the manifest of the front message where that is needed.
#[derive(Debug)]
pub(super) struct Evidence {
    pub(super) hasher: FragmentHasher,
    pub(super) digests: FragmentDigests,
    manifest: Option<Box<ManifestCollector>>,
    /// When to ask for what, about the message with this number.
    timer: (u32, DigestTimer),
}

impl Evidence {
    pub(super) fn new(terms: &InboundTerms, arena: &Arena) -> Evidence {
        let len = match terms.integrity.has_digests() {
            true => arena.len(),
            false => 0,
        };
        Evidence {
            hasher: FragmentHasher::new(terms.key),
            digests: FragmentDigests::new(arena.start(), len),
            manifest: None,
            timer: (terms.first_message, DigestTimer::default()),
        }
    }

    /// The timer of message `number`, the front one.
    fn timer(&mut self, number: u32) -> &mut DigestTimer {
        if self.timer.0 != number {
            self.timer = (number, DigestTimer::default());
        }
        &mut self.timer.1
    }

    /// The digest of bytes in the UMEM that nobody writes any more (I1): the only ones of what is received that are read where they
    /// lie. Others are copied first.
    #[inline]
    fn digest_final(&self, from: u64, len: u16, umem: &Umem) -> u64 {
        // SAFETY: the packet's entry is used, or it is a frame that is posted nowhere. Of the entries that are posted none lets the kernel
        // or the device write here: `Inbound::passed` says when that is so of a landing zone, but for a later window's lowest entry, which is
        // posted when this window's tail was saved, after this (I5). Nothing copies there while the slice lives.
        self.hasher
            .digest(unsafe { umem.mapping().slice(from, u64::from(len)) })
    }

    /// The proved manifest of message `number`.
    pub(super) fn proved(&self, number: u32) -> Option<&ManifestCollector> {
        (self.manifest.as_deref()).filter(|manifest| manifest.message() == number && manifest.is_proved())
    }
}

impl Inbound {
    /// Fragment `index` of the message at `at` landed at its place; its packet begins at UMEM address `start`.
    #[inline]
    pub(super) fn note_landed(&mut self, at: usize, index: u32, start: u64, umem: &Umem) {
        let fragment = self.messages[at].geometry.fragment(index);
        let payload = start + u64::from(fragment.header_len);
        // The next one's, most likely, which the kernel copied there a hundred packets ago.
        let len = u64::from(fragment.len);
        umem.mapping().prefetch(payload.saturating_sub(len), len);
        self.note_final(at, index, (payload, fragment.len), umem);
    }

    /// What is to be shown as fragment `index` of the message at `at`, so many bytes at a UMEM address, is final.
    #[inline]
    pub(super) fn note_final(&mut self, at: usize, index: u32, (payload, len): (u64, u16), umem: &Umem) {
        if !self.terms.integrity.has_digests() {
            return;
        }
        let digest = self.evidence.digest_final(payload, len, umem);
        self.note(at, index, digest);
    }

    /// The digests of what landed in the message at `at` where something may still be written: as it is now, to find out what it is. They
    /// are taken again when it is final.
    pub(super) fn note_unfinal(&mut self, at: usize, umem: &Umem) {
        let message = &self.messages[at];
        let mut bytes = [0; *CHUNK_LEN_RANGE.end() as usize];
        for position in message.final_to..message.consumed {
            let message = &mut self.messages[at];
            let Some(len) = *message.landed_at(position) else {
                continue;
            };
            let index = (self.terms.window).index_at(position, message.geometry.fragment_count());
            let bytes = &mut bytes[..usize::from(len)];
            umem.copy_from(message.payload_of(index), bytes);
            let digest = self.evidence.hasher.digest(bytes);
            self.note(at, index, digest);
        }
    }

    /// A fragment is about to be copied to its place from `source`.
    pub(super) fn note_put(&mut self, at: usize, position: u32, source: Source<'_>, umem: &Umem) {
        if !self.terms.integrity.has_digests() {
            return;
        }
        let geometry = &self.messages[at].geometry;
        let index = (self.terms.window).index_at(position, geometry.fragment_count());
        let len = geometry.fragment_len(index);
        let digest = match source {
            // A packet that was received and is not given back: in a slot of copy mode, in a spare frame, or, as a datagram, in a
            // general frame.
            Source::Umem(from) => self.evidence.digest_final(from, len, umem),
            Source::Held(slot) => self.evidence.hasher.digest(self.held.slot(slot, len)),
            Source::Bytes(payload) => self.evidence.hasher.digest(&payload[..usize::from(len)]),
        };
        self.note(at, index, digest);
    }

    #[inline]
    pub(super) fn note(&mut self, at: usize, index: u32, digest: u64) {
        let message = &mut self.messages[at];
        if let Some(zone) = message.zone {
            self.evidence.digests.set(zone.start, index, digest);
        }
        message.proof.verdict = Verdict::Open;
    }

    /// The digests of what is held of the front message take their places among the others.
    pub(super) fn note_held(&mut self) {
        let front = &self.messages[0];
        let (Some(zone), 1..) = (front.zone, front.held) else {
            return;
        };
        let count = front.fragment_count();
        for (position, payload) in self.held.of(front.number) {
            let digest = self.evidence.hasher.digest(payload);
            let index = self.terms.window.index_at(position, count);
            self.evidence.digests.set(zone.start, index, digest);
        }
    }

    /// Takes a message's digest as its sender says it. `false`: it was known, or the message is settled.
    pub(crate) fn take_digest(&mut self, digest: MessageDigest) -> bool {
        if !self.terms.integrity.has_digests() {
            return true;
        }
        let Some(at) = self.position_of(digest.message) else {
            return !self.knows(digest.message);
        };
        let proof = &mut self.messages[at].proof;
        if proof.announced.is_some() {
            return false;
        }
        proof.announced = Some(digest.digest);
        while self.front_may_land() {
            self.land(Vec::new());
        }
        self.land_early();
        true
    }

    /// Whether the front message is whole, nothing can be written to it any more (I1), and every byte is its sender's.
    #[inline]
    pub(super) fn front_may_land(&mut self) -> bool {
        self.messages.front().is_some_and(super::Arriving::is_final) && self.front_is_proved()
    }

    /// Whether every byte of the front message, all of whose fragments are here, is its sender's.
    pub(super) fn front_is_proved(&mut self) -> bool {
        if self.terms.integrity.has_digests() && self.messages[0].proof.verdict == Verdict::Open {
            self.note_held();
        }
        self.is_proved(0)
    }

    /// The same of the message at `at`, none of whose fragments is held aside.
    pub(super) fn is_proved(&mut self, at: usize) -> bool {
        if !self.terms.integrity.has_digests() {
            return true;
        }
        let message = &mut self.messages[at];
        if message.proof.verdict != Verdict::Open {
            return message.proof.verdict == Verdict::Proved;
        }
        let (Some(announced), Some(zone)) = (message.proof.announced, message.zone) else {
            return false;
        };
        let digests = self
            .evidence
            .digests
            .of(zone.start, message.geometry.fragment_count());
        let digest = message_digest(self.terms.key, message.number, digests, message.len, message.tag);
        message.proof.verdict = match digest == announced {
            true => Verdict::Proved,
            false => Verdict::Disproved,
        };
        message.proof.verdict == Verdict::Proved
    }

    /// Whether the front message waits for digests, or for being compared with them.
    #[inline]
    pub(crate) fn awaits_digests(&self) -> bool {
        self.terms.integrity.has_digests()
            && self.messages.front().is_some_and(|front| {
                front.proof.wanted
                    || (front.arrivals.is_complete()
                        && front.zone.is_some()
                        && front.proof.verdict != Verdict::Proved)
            })
    }

    /// What is to be done about the front message, all of whose fragments are here and which is not proved.
    pub(super) fn seek_proof(
        &mut self,
        entries: &mut Entries,
        arena: &mut Arena,
        umem: &Umem,
        now_ns: u64,
    ) -> Option<Remedy> {
        let front = &self.messages[0];
        match front.proof.verdict {
            Verdict::Contradicted => {
                self.repair.contradictory += 1;
                return Some(self.give_up_front(entries, arena, umem));
            }
            Verdict::Disproved if self.gives_up_unasked() => {
                // All of them: which are not is not asked.
                let given_up = self.repair.given_up;
                let remedy = self.give_up_front(entries, arena, umem);
                let corrupt = self.repair.given_up - given_up;
                self.repair.given_up = given_up;
                self.repair.corrupt += corrupt;
                return Some(remedy);
            }
            Verdict::Disproved if self.evidence.proved(front.number).is_some() => {
                self.settle_differences(umem, now_ns);
                return None;
            }
            _ => {}
        }
        let waited = self.evidence.timer(front.number).waited(Time::from_nanos(now_ns));
        (self.terms.delivery != Delivery::Reliable && waited >= PATIENCE)
            .then(|| self.give_up_front(entries, arena, umem))
    }

    /// What is not right is given up, and nobody asks what it was. In zero-copy mode, where one lost packet shifts all others, that
    /// would be the end of every message behind it.
    fn gives_up_unasked(&self) -> bool {
        self.terms.delivery == Delivery::Unreliable && self.terms.caps.witness
    }

    fn give_up_front(&mut self, entries: &mut Entries, arena: &mut Arena, umem: &Umem) -> Remedy {
        let front = &self.messages[0];
        let given_up = GivenUp {
            number: front.number,
            tag: front.tag,
            len: front.len,
            missing: std::iter::once(0..front.fragment_count()).collect(),
        };
        self.broke(given_up.number);
        self.drop_front(entries, arena);
        self.settle_trouble(umem);
        Remedy::GivenUp(given_up)
    }

    /// Before the front message is settled without some fragments: whether the others are proved, those that differ having
    /// been rejected. `None`: not known yet.
    pub(super) fn partial_is_proved(&mut self, umem: &Umem, now_ns: u64) -> Option<bool> {
        if !self.terms.integrity.has_digests() || self.gives_up_unasked() {
            return Some(true);
        }
        let front = &mut self.messages[0];
        let number = front.number;
        front.proof.wanted = true;
        if front.proof.verdict == Verdict::Contradicted {
            self.repair.contradictory += 1;
            return Some(false);
        }
        if self.evidence.proved(front.number).is_some() {
            self.settle_differences(umem, now_ns);
            // In zero-copy mode it may be whole now, and gone.
            let is_partial =
                |front: &super::Arriving| front.number == number && !front.arrivals.is_complete();
            return (self.messages.front().is_some_and(is_partial)).then_some(true);
        }
        let waited = self.evidence.timer(front.number).waited(Time::from_nanos(now_ns));
        (waited >= PATIENCE).then_some(false)
    }

    /// What of the front message is not as its proved manifest says is missing from now on, unless it lies elsewhere.
    pub(super) fn settle_differences(&mut self, umem: &Umem, now_ns: u64) {
        match self.terms.caps.witness {
            true => self.reject_what_differs(now_ns),
            false => self.relocate(umem, now_ns),
        }
    }

    /// Fragments of the front message that differ from its proved manifest are missing from now on.
    fn reject_what_differs(&mut self, now_ns: u64) {
        self.note_held();
        let front = &mut self.messages[0];
        let (Some(manifest), Some(zone)) = (self.evidence.proved(front.number), front.zone) else {
            return;
        };
        let count = front.geometry.fragment_count();
        let mut differing = 0;
        for (index, &digest) in (0..count).zip(self.evidence.digests.of(zone.start, count)) {
            let position = self.terms.window.position_of(index, count);
            if manifest.digest(index) == Some(digest) || !front.arrivals.has(position) {
                continue;
            }
            front.arrivals.reject(position);
            if self.held.forget(front.number, position) {
                front.held -= 1;
            }
            differing += 1;
        }
        if differing > 0 {
            self.repair.corrupt += differing;
            front.proof.verdict = Verdict::Open;
            // What was asked for before is not what is asked for now.
            front.timer = RequestTimer::default();
            front.timer.noticed(Time::from_nanos(now_ns));
            front.missing_ns.get_or_insert(now_ns);
            self.troubled = true;
        } else if front.arrivals.is_complete() {
            // The manifest is that of these bytes, and what was announced is not.
            front.proof.verdict = Verdict::Contradicted;
        }
    }

    /// Takes a MANIFEST packet. `Some(false)`: it contradicts what came before; `None`: nobody asked for it.
    pub(crate) fn take_manifest(&mut self, packet: &LmPacket<'_>, now_ns: u64) -> Option<bool> {
        let front = self.messages.front_mut()?;
        let manifest =
            (self.evidence.manifest.as_deref_mut()).filter(|manifest| manifest.message() == front.number)?;
        match manifest.accept(&packet.header, packet.payload) {
            Ok(0) => return Some(true),
            Ok(_) => {}
            Err(_) => return Some(false),
        }
        let digest = manifest.message_digest();
        self.evidence
            .timer(front.number)
            .progressed(Time::from_nanos(now_ns));
        if let Some(digest) = digest
            && *front.proof.announced.get_or_insert(digest) != digest
        {
            front.proof.verdict = Verdict::Contradicted;
        }
        Some(true)
    }

    /// The next request for digests that is due: of the front message's fragments, or, without ranges, its own.
    pub(crate) fn next_digest_request(&mut self, now_ns: u64) -> Option<(u32, Vec<MissingRange>)> {
        if !self.awaits_digests() {
            // It is needed again when the fragments that it rejected have come.
            let front = self.messages.front().map(|front| front.number);
            (self.evidence.manifest).take_if(|manifest| front != Some(manifest.message()));
            return None;
        }
        let now = Time::from_nanos(now_ns);
        let gives_up_unasked = self.gives_up_unasked();
        let front = self.messages.front_mut()?;
        let proof = &mut front.proof;
        match proof.verdict {
            Verdict::Open if !proof.wanted => {
                let asks = proof.announced.is_none() && self.evidence.timer(front.number).poll(now);
                return asks.then_some((front.number, Vec::new()));
            }
            Verdict::Proved | Verdict::Contradicted => return None,
            Verdict::Disproved if gives_up_unasked => return None,
            Verdict::Open | Verdict::Disproved => {}
        }
        if (self.evidence.manifest.as_ref()).is_none_or(|known| known.message() != front.number) {
            let count = front.geometry.fragment_count();
            let mut manifest = Box::new(ManifestCollector::new(count));
            manifest
                .begin(self.terms.key, front.number, count, front.len, front.tag)
                .expect("it was made for so many fragments");
            self.evidence.manifest = Some(manifest);
            self.evidence.timer(front.number).ask_at_once(now);
        }
        if self.evidence.proved(front.number).is_some() || !self.evidence.timer(front.number).poll(now) {
            return None;
        }
        let manifest = self.evidence.manifest.as_ref()?;
        self.repair.manifests += 1;
        Some((front.number, manifest.missing().take(RANGES_MAX).collect()))
    }
}
