//! Ahead: short messages that leave unannounced, within credit that is beyond what is announced.
//!
//! Their last fragment, which travels first, ends with facts ([`Facts`]): what an announcement would say, and the message's digest, so that digests of
//! all fragments are taken before the first leaves. What the receiver turns out not to know is announced after all, and repeated as it asks.

use lm_protocol::geometry::Geometry;
use lm_protocol::serial;
use lm_protocol::wire::lm::{Credit, Facts};
use zerocopy::IntoBytes;

use super::{Outbound, Outgoing, OutgoingTable};
use crate::fragment_digests::FragmentDigests;
use crate::memory::Umem;
use crate::release::Released;
use lm_protocol::manifest::FragmentHasher;

impl Outbound {
    /// How the next message lies together with its facts, if it may leave unannounced.
    pub(super) fn ahead_of(
        &self,
        table: &mut OutgoingTable,
        released: &Released,
        len: u64,
    ) -> Option<Geometry> {
        // Those before it have left, or leave unannounced themselves.
        let is_next = self.announced == self.next_number && self.unwritten.is_empty() && self.streams == 0;
        let is_behind = self.sending == self.queue.len()
            || serial::precedes(self.next_number.wrapping_sub(1), self.ahead_to);
        if !(self.terms.goes_ahead && self.lands && is_next && is_behind) {
            return None;
        }
        let geometry = Facts::geometry(&self.terms.layout, len)?;
        let count = geometry.fragment_count();
        let Released::SendRegion { len: room, .. } = *released else {
            return None;
        };
        let unsent: u32 = (self.queue.range(self.sending..))
            .map(|&slot| table.at(slot).left())
            .sum();
        let credit = serial::distance(self.sent_packets.wrapping_add(unsent), self.limit);
        let packets = count + self.terms.fillers;
        let fits = count <= self.terms.window.fragments() && geometry.tx_region_len() <= room;
        (fits && i64::from(credit) >= i64::from(packets)).then_some(geometry)
    }

    /// Whether the next message may not be sent before the receiver has confirmed that it knows it: it would come to entries that
    /// are for what comes unannounced.
    pub(super) fn awaits_confirmation(&self) -> bool {
        let next = self.sent_up_to();
        self.terms.goes_ahead
            && !serial::precedes(next, self.ahead_to)
            && !serial::precedes(next, self.announced_confirmed)
    }

    /// Whether the last message leaves unannounced, and is not sent yet.
    pub(crate) fn is_leaving(&self) -> bool {
        self.sending < self.queue.len() && self.ahead_to == self.next_number
    }
}

impl Outgoing {
    /// Takes the digests of all fragments, and writes the message's facts behind its bytes; `sent` packets of the session were sent before it.
    pub(super) fn write_facts(
        &mut self,
        (session_key, sent, credit): (u64, u32, Credit),
        digests: &mut FragmentDigests,
        umem: &Umem,
        hasher: &FragmentHasher,
    ) {
        let count = self.geometry.fragment_count();
        self.note_digests(session_key, digests, umem, hasher);
        let facts = Facts {
            session_key: session_key.into(),
            message: self.number.into(),
            sent: sent.into(),
            len: self.len.into(),
            tag: self.tag.into(),
            digest: self.digest.unwrap_or_default().into(),
            credit,
            hash: 0.into(),
        };
        // Zeros as far as the facts' fragment, if they are in one of their own.
        for index in count.saturating_sub(2)..count {
            let range = self.geometry.tx_payload_range(index);
            let used = self.len.saturating_sub(self.geometry.message_offset(index));
            let behind = (range.start + used).min(range.end);
            umem.zero(self.start + behind, range.end - behind);
        }
        let end = self.start + self.geometry.tx_payload_range(count - 1).end;
        umem.copy_to(end - Facts::LEN as u64, facts.seal(hasher).as_bytes());
    }
}
