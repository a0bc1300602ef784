//! Landing in zero-copy mode: the device writes each packet before anybody looks at it, and the next ones over its headers.
//!
//! Nobody reads a header here, and there is no log. What there is: the n-th descriptor belongs to the n-th entry, because a device
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
//! ([`Inbound::passed`]), and a message is shown only when every entry in its zone is. Nothing that is posted is ever aimed anew;
//! where descriptors come in another order than entries were posted (the driver uses frames that came back without a descriptor), the
//! channel is built anew.

use lm_protocol::delivery::Arrival;

use super::receiving::Packet;
use super::repair::Source;
use super::sessions::Entries;
use super::{Aim, Inbound, Sessions};
use crate::memory::{PACKET_HEADROOM, Umem};

/// Ethernet's shortest frame without its FCS, in bytes: to it devices fill up what is shorter, as the last one of IP fragments
/// may be.
const FRAME_LEN_MIN: u32 = 60;

impl Entries {
    /// The start of a packet in a spare frame, if there is one beside those that fill the lap up.
    pub(super) fn take_spare(&mut self) -> Option<u64> {
        let kept = self.caps.lap as usize - 1;
        let spare = self.spare.as_mut()?;
        let frame = (spare.available() > kept).then(|| spare.take())??;
        Some(frame.into_address() + PACKET_HEADROOM)
    }

    /// How many of the last entries are for no fragment. Fragments are passed in their order, so that only those at the end can be given
    /// another purpose.
    pub(super) fn fillers(&self) -> u64 {
        self.aims.iter().rev().take_while(|aim| aim.is_filler()).count() as u64
    }
}

impl Sessions {
    /// A packet lies in the entry of `aim`.
    pub(super) fn take_unread(
        &mut self,
        aim: &Aim,
        &Packet { start, len, .. }: &Packet,
        umem: &Umem,
        now_ns: u64,
    ) {
        // The queue carries one session.
        let place = self.admitted().next();
        let Some(inbound) = place.and_then(|place| self.at_mut(place)) else {
            self.repair.stale += 1;
            if aim.spare {
                self.put_spare(start);
            }
            self.pass_skipped(umem);
            return;
        };
        let packets_before = inbound.accepted;
        inbound.accepted += 1;
        inbound.progress_ns = now_ns;
        inbound.forgiven = false;
        inbound.astray.has_landed();
        let at = match (aim.serial, aim.position < aim.until) {
            (serial, true) if serial == inbound.serial => inbound.position_of(aim.number),
            _ => None,
        };
        match at {
            Some(at) => inbound.take_for(at, aim, (start, len), packets_before, umem, now_ns),
            None => inbound.keep_stray(start, len, umem),
        }
        if inbound.front_may_land() {
            inbound.land(Vec::new());
        } else {
            inbound.land_early();
        }
        if aim.spare {
            self.put_spare(start);
        }
        self.pass_skipped(umem);
    }

    /// A spare frame, in which `start` lies, is used no more.
    pub(super) fn put_spare(&mut self, start: u64) {
        if let Some(spare) = &mut self.entries.spare
            && let Some(frame) = spare.reclaim(start)
        {
            spare.put(frame);
        }
    }
}

impl Inbound {
    /// How many of `room` entries to write so that whole laps are submitted ([`crate::port::Device::lap`]): less than a lap only when
    /// the sender would have to wait otherwise, because it has to be filled up with spare frames, and fragments that land there
    /// are copied.
    pub(super) fn room_in_laps(&self, entries: &Entries, room: u32, ahead: u32) -> u32 {
        let lap = entries.caps.lap;
        let Some(spare) = &entries.spare else { return 0 };
        let stalls = entries.outstanding() <= lap / 4;
        // What may be on the way after losses can be less than a lap: the sender's credit says so, too.
        let room = match room / lap * lap {
            0 if stalls => lap,
            room => room,
        };
        if room == 0 || spare.available() < lap as usize {
            return 0;
        }
        let available = self.postable(room, ahead);
        if available >= lap {
            available.min(room) / lap * lap
        } else if stalls {
            available
        } else {
            0
        }
    }

    /// Entries that could be posted now if there is memory, at most `max`.
    fn postable(&self, max: u32, ahead: u32) -> u32 {
        let window_len = self.terms.window.fragments();
        let mut entries = 0;
        for message in self.messages.range(self.posting..) {
            let count = message.geometry.fragment_count();
            let met_by = self.accepted + u64::from(ahead + entries);
            let left_out = met_by.saturating_sub(message.base).min(u64::from(count)) as u32;
            let mut position = message.posted.max(left_out);
            while position < count && entries < max {
                let window = position / window_len;
                let window_end = count.min((window + 1) * window_len);
                entries += window_end - position;
                position = window_end;
                if !message.rule.may_post_lowest(window) {
                    return (entries - 1).min(max);
                }
            }
            if entries >= max {
                return max;
            }
        }
        let expected = self
            .announced_packets
            .saturating_sub(self.accepted + u64::from(ahead));
        entries.max(expected.min(u64::from(max)) as u32)
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
        let corrections = self.corrections;
        let message = &mut self.messages[at];
        let index = (self.terms.window).index_at(position, message.geometry.fragment_count());
        let fragment = message.geometry.fragment(index);
        let ahead = packets_before as i64 - (message.base + u64::from(position)) as i64;
        message.ahead = (ahead - corrections) as i32;
        let frame_len = u32::from(fragment.frame_len());
        let own_len = match len {
            ..=FRAME_LEN_MIN => len.min(frame_len),
            _ => len,
        };
        if aim.spare && own_len != frame_len {
            // Not that fragment, which may be somewhere else.
            self.passed(at, position, None, umem);
            self.keep_stray(start, len, umem);
            return;
        }
        let arrival = message.arrivals.take(position);
        if arrival == Arrival::Duplicate {
            // That fragment came another way, and waits to be put here.
            self.passed(at, position, None, umem);
            self.keep_stray(start, len, umem);
            self.troubled = true;
            return;
        }
        if arrival != Arrival::Next {
            message.missing_ns.get_or_insert(now_ns);
            self.troubled = true;
        }
        if aim.spare {
            let payload = start + u64::from(fragment.header_len);
            self.passed(at, position, None, umem);
            self.put(at, position, Source::Umem(payload), umem);
            self.page_ends += 1;
            return;
        }
        let header_len = u32::from(fragment.header_len);
        let payload_len = u32::from(self.terms.layout.payload_len());
        // What is longer is no fragment, or one with something behind it.
        let landed = own_len.saturating_sub(header_len).min(payload_len);
        let skew = self.skew();
        if index == 0 && skew > 0 {
            let other_len = (len + skew).saturating_sub(header_len);
            self.messages[at].other_len = other_len.min(payload_len) as u16;
        }
        self.passed(at, position, Some(landed as u16), umem);
    }

    /// No fragment has the digest of this slot.
    pub(super) fn spoil(&mut self, at: usize, index: u32) {
        let nothing = self.evidence.hasher.digest(&[]);
        self.note(at, index, nothing);
    }

    /// Keeps what landed where nothing of its kind was expected.
    fn keep_stray(&mut self, start: u64, len: u32, umem: &Umem) {
        let skew = self.skew();
        let header_len = u32::from(self.terms.layout.header_len()) - skew;
        let payload = start + u64::from(header_len);
        let len = len.saturating_sub(header_len);
        if len <= skew || len > u32::from(self.terms.layout.payload_len()) {
            self.repair.stale += 1;
            return;
        }
        let hasher = &self.evidence.hasher;
        // What lies here may be written while it is read: what is kept is measured.
        let dropped = self.strays.keep(|bytes| {
            let bytes = &mut bytes[..len as usize];
            umem.copy_from(payload, bytes);
            let as_first = (skew > 0).then(|| hasher.digest(&bytes[skew as usize..]));
            (hasher.digest(bytes), as_first)
        });
        self.repair.stale += u64::from(dropped);
    }

    /// By how many bytes a message's first fragment has a longer header than others: 8 with IP fragments, else 0.
    pub(super) fn skew(&self) -> u32 {
        u32::from(self.terms.layout.payload_len() - self.terms.layout.first_payload_len())
    }
}
