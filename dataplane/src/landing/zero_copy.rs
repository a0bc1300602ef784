//! Landing in zero-copy mode: the device writes each packet before anybody looks at it, and the next ones over its headers.
//!
//! No header is believed here, and there is no log. What there is: the n-th descriptor belongs to the n-th entry, because a device
//! uses entries in the order of posting; and digests. A packet is *taken for* the fragment that its entry was posted for. The
//! digest of each slot's payload is noted when it is final, and when a message's slots are used, the message's own digest
//! says whether all of that was right: then every fragment is in its place and nothing has been copied. Where it was not,
//! [`super::relocation`] finds out.
//!
//! ```text
//!  entries   k+1   k   k-1  …            packets   k+1   (lost)   k-1   k-2  …
//!            └──▶ slot k+1 holds fragment k+1, slot k holds fragment k-1, slot k-1 holds k-2 …
//! ```
//! An entry whose chunk crosses the end of a 2 MiB page is skipped silently by the kernel (`xp_check_unaligned`), and shifts
//! everything behind it: a *spare frame* takes its place in the order, and the fragment is copied from there. Spare frames also
//! take up packets that came too many: duplicates, and what was not meant for this queue.
//!
//! I1: until its entry is used, a slot may be written from the device's prefix to the chunk's end: over the fragments above it, which
//! landed before. So each is digested, and a window's tail saved, when the entries behind it that reach so far are used
//! ([`Places::passed`](super::places::Places::passed)), and a message is shown only when every entry in its zone is. Nothing that is posted is ever aimed anew;
//! where descriptors come in another order than entries were posted (the driver uses frames that came back without a descriptor), the
//! channel is built anew.

use lm_protocol::delivery::Arrival;
use lm_protocol::wire::lm::{HEADER_LEN, LmHeader};

use super::aims::Aim;
use super::arriving::TAIL_LEN_MAX;
use super::care::Care;
use super::held::Source;
use super::receiving::Packet;
use super::sessions::Sessions;
use super::zones::Memory;
use crate::memory::{CHUNK_LEN_RANGE, Umem};

/// Ethernet's shortest frame without its FCS, in bytes: to it devices fill up what is shorter, as the last one of IP fragments
/// may be.
const FRAME_LEN_MIN: u32 = 60;

impl Sessions {
    /// A packet lies in the entry of `aim`.
    pub(super) fn take_unread(
        &mut self,
        aim: &Aim,
        &Packet { start, len, .. }: &Packet,
        (umem, memory): (&Umem, &mut Memory<'_>),
        now_ns: u64,
    ) {
        // The queue carries one session.
        let row = self.admitted().next();
        let Some(inbound) = row.and_then(|row| self.at_mut(row)) else {
            self.arrivals.stale += 1;
            self.pass_skipped(umem);
            return;
        };
        let is_its = aim.position < aim.until && aim.owner.serial == inbound.serial;
        let at = inbound.order.position_of(aim.number).filter(|_| is_its);
        if let Some(at) = at.filter(|&at| aim.position < inbound.order.at(at).fragment_count()) {
            let packets_before = inbound.progress.count(now_ns);
            inbound.astray.has_landed();
            let mut care = inbound.care();
            care.take_for(at, aim, (start, len), packets_before, umem, now_ns);
            care.land_whole();
        } else {
            let number = (inbound.overtaken()).map_or(inbound.order.announced(), |message| message.number);
            let next = (inbound.row(), number, None);
            match self.claim(aim, next, (start, len), (umem, memory), now_ns) {
                Some(claimed) => self.take_first(&claimed, (start, len), umem, now_ns),
                None => self.take_unexpected(next.0, (start, len), umem, now_ns),
            }
            if let Some((owner, at)) = self.owner(aim).filter(|_| is_its) {
                owner.care().filler_came(at, aim.position, umem);
            }
        }
        self.pass_skipped(umem);
    }

    /// The packet is the first of a message that is known by its facts, and with it how many were sent before.
    fn take_first(&mut self, aim: &Aim, landed: (u64, u32), umem: &Umem, now_ns: u64) {
        let Some((inbound, at)) = self.owner(aim) else {
            return;
        };
        let base = inbound.order.at(at).base;
        inbound.progress.count(now_ns);
        inbound.progress.correct(base + 1);
        inbound.astray.has_landed();
        let mut care = inbound.care();
        if care.order.at(at).slots.zone.is_some() {
            care.take_for(at, aim, landed, base, umem, now_ns);
        } else {
            care.keep_stray(landed, umem);
        }
    }

    /// The packet lies where no fragment is expected. Its header may be another's payload by now; if it is not, it says whether the session's sender
    /// sent it.
    #[cold]
    fn take_unexpected(&mut self, row: u8, (start, len): (u64, u32), umem: &Umem, now_ns: u64) {
        let Some(inbound) = self.at_mut(row) else { return };
        let header_len = inbound.terms.layout.fragment_header_len(1);
        let mut bytes = [0; TAIL_LEN_MAX];
        let header = &mut bytes[..usize::from(header_len).min(len as usize)];
        umem.copy_from(start, header);
        let behind = header.len().saturating_sub(HEADER_LEN);
        let of_session = match LmHeader::decode(&header[behind..]) {
            Ok((
                LmHeader::Data {
                    session_key, message, ..
                },
                _,
            )) => (session_key == inbound.terms.key).then_some(message),
            _ => None,
        };
        if let Some(message) = of_session {
            inbound.progress.count(now_ns);
            inbound.astray.has_landed();
            if !inbound.order.knows(message) {
                inbound.told.is_unknown();
            }
        }
        let mut care = inbound.care();
        match of_session.is_some() && len <= header_len.into() {
            true => care.places.repair.fillers += 1,
            false => care.keep_stray((start, len), umem),
        }
        care.land_whole();
    }
}

impl Care<'_> {
    /// Keeps what landed where nothing of its kind was expected.
    fn keep_stray(&mut self, landed: (u64, u32), umem: &Umem) {
        self.places.repair.stale += self.strays.keep_landed(landed, self.places.evidence(), umem);
    }

    /// What is behind the last fragment's entry of the message at `at` was used: the place that is [`InboundTerms::reach`] above is final.
    fn filler_came(&mut self, at: usize, position: u32, umem: &Umem) {
        let (message, reach) = (self.order.at_mut(at), self.terms.reach());
        (self.places).end_at(message, (position + 1).saturating_sub(reach), umem);
        self.land_whole();
    }

    /// A packet landed in the entry of `aim`, which the message at `at` owns, and is taken for the fragment that belongs there.
    fn take_for(
        &mut self,
        at: usize,
        aim: &Aim,
        (start, len): (u64, u32),
        packets_before: u64,
        umem: &Umem,
        now_ns: u64,
    ) {
        let position = aim.position;
        let message = self.order.at_mut(at);
        let index = message.index_at(position);
        let fragment = message.geometry.fragment(index);
        let ahead = packets_before as i64 - (message.base + u64::from(position)) as i64;
        message.shift.ahead = (ahead - self.progress.corrections()) as i32;
        let frame_len = u32::from(fragment.frame_len());
        let own_len = match len {
            ..=FRAME_LEN_MIN => len.min(frame_len),
            _ => len,
        };
        if aim.spare && own_len != frame_len {
            // Not that fragment, which may be somewhere else.
            self.passed(at, position, None, umem);
            self.keep_stray((start, len), umem);
            return;
        }
        let arrival = message.gaps.arrivals.take(position);
        if arrival == Arrival::Duplicate {
            // That fragment came another way, and waits to be put here.
            self.passed(at, position, None, umem);
            self.keep_stray((start, len), umem);
            self.places.trouble();
            return;
        }
        if arrival != Arrival::Next {
            message.gaps.missing_ns.get_or_insert(now_ns);
            self.places.trouble();
        }
        if aim.spare {
            let payload = start + u64::from(fragment.header_len);
            self.passed(at, position, None, umem);
            let message = self.order.at_mut(at);
            // The device may write there meanwhile. What is final is not measured again: it is measured as it is put.
            match position < message.slots.final_to {
                true => {
                    let mut bytes = [0; *CHUNK_LEN_RANGE.end() as usize];
                    let bytes = &mut bytes[..usize::from(fragment.len)];
                    umem.copy_from(payload, bytes);
                    self.places.put(message, position, Source::Bytes(bytes), umem);
                }
                false => self.places.put(message, position, Source::Umem(payload), umem),
            }
            self.places.edges.page_ends += 1;
            return;
        }
        let header_len = u32::from(fragment.header_len);
        let payload_len = u32::from(self.terms.layout.payload_len());
        // What is longer is no fragment, or one with something behind it.
        let landed = own_len.saturating_sub(header_len).min(payload_len);
        let skew = self.terms.skew();
        if index == 0 && skew > 0 {
            let other_len = (len + skew).saturating_sub(header_len);
            message.shift.other_len = other_len.min(payload_len) as u16;
        }
        self.passed(at, position, Some(landed as u16), umem);
    }
}
