//! Pairing: the n-th RX descriptor of the channel with the n-th entry of the gate's log (invariant I3), and the window
//! edges that come up with it (I5).

use lm_protocol::delivery::Arrival;
use lm_protocol::geometry::Wire;
use lm_protocol::landing::LogEntry;
use lm_protocol::serial;
use lm_protocol::window::TailRule;
use lm_protocol::wire::lm::{HEADER_LEN, LmHeader};

use super::integrity::Verdict;
use super::receiving::Packet;
use super::{Aim, Burst, Inbound, InboundTerms, Sessions, TAIL_LEN_MAX, Violation};
use crate::memory::Umem;

impl Sessions {
    #[inline]
    pub(super) fn pair(
        &mut self,
        aim: &Aim,
        &Packet { start, len, .. }: &Packet,
        entry: &LogEntry,
        umem: &Umem,
        burst: &mut Burst,
        now_ns: u64,
    ) -> Result<(), Violation> {
        let place = self.places.get_mut(usize::from(entry.session));
        let Some(inbound) = place.and_then(Option::as_deref_mut) else {
            // Its session was closed while it was on its way.
            self.used(aim, false, (start, len), entry, umem, burst)?;
            self.repair.stale += 1;
            return Ok(());
        };
        let Some(at) = inbound.position_of(entry.message) else {
            // The gate admits nothing beyond what is announced. What comes for a message that was given up is of no use.
            if !serial::precedes(entry.message, inbound.announced) {
                return Err(Violation::Displaced);
            }
            inbound.troubled = true;
            self.used(aim, false, (start, len), entry, umem, burst)?;
            self.repair.stale += 1;
            return Ok(());
        };
        let message = &mut inbound.messages[at];
        let count = message.geometry.fragment_count();
        if entry.index >= count {
            return Err(Violation::Displaced);
        }
        let position = inbound.terms.window.position_of(entry.index, count);
        // The gate's monotone rule: a log that goes back is not its own.
        if let Some((last_number, last_position)) = inbound.last
            && (serial::precedes(entry.message, last_number)
                || (entry.message == last_number && position <= last_position))
        {
            return Err(Violation::Displaced);
        }
        let frame_len = u32::from(message.geometry.fragment(entry.index).frame_len());
        let unpadded_len = len.checked_sub(u32::from(entry.padding_len));
        if u32::from(entry.frame_len) != len || unpadded_len != Some(frame_len) {
            return Err(Violation::Length);
        }
        if inbound.terms.one_processor && *self.entries.processor.get_or_insert(entry.cpu) != entry.cpu {
            return Err(Violation::Processor);
        }
        inbound.last = Some((entry.message, position));
        inbound.accepted = inbound.accepted.max(message.base + u64::from(position) + 1);
        inbound.progress_ns = now_ns;
        inbound.forgiven = false;
        inbound.astray.has_landed();
        let arrival = message.arrivals.take(position);
        let in_place = (aim.serial, aim.number, aim.position) == (inbound.serial, entry.message, position);
        let valid = in_place && arrival != Arrival::Duplicate;
        let used = self.used(aim, valid, (start, len), entry, umem, burst);
        let Some(inbound) = self.at_mut(entry.session) else {
            return used;
        };
        if used.is_err() {
            if arrival != Arrival::Duplicate {
                inbound.messages[at].arrivals.reject(position);
            }
            return used;
        }
        if arrival != Arrival::Next || !in_place {
            let from = inbound.landed_elsewhere(at, position, arrival, in_place, start, now_ns);
            if let Some(from) = from {
                self.displaced(entry.session, at, position, (aim, from), umem);
            }
        }
        let Some(inbound) = self.at_mut(entry.session) else {
            return Ok(());
        };
        if inbound.front_may_land() {
            inbound.land(Vec::new());
        } else {
            inbound.land_early();
        }
        Ok(())
    }

    /// The entry `aim` was used, by the packet at `start` that `entry` of the log describes; `in_place`: by the fragment
    /// that belongs there.
    #[inline]
    fn used(
        &mut self,
        aim: &Aim,
        in_place: bool,
        (start, len): (u64, u32),
        entry: &LogEntry,
        umem: &Umem,
        burst: &mut Burst,
    ) -> Result<(), Violation> {
        if let Some((owner, at)) = self.owner(aim) {
            let message = &owner.messages[at];
            let index = (owner.terms.window).index_at(aim.position, message.geometry.fragment_count());
            let landed = in_place.then(|| message.geometry.fragment_len(index));
            if !owner.terms.window.is_lowest(index) {
                owner.passed(at, aim.position, landed, umem);
            } else {
                burst.window_ended = true;
                // It is looked at before anything is done with the payload behind it. The header names what is in the slot, which need not be
                // what belongs there.
                if let Some(sender) = self.at(entry.session) {
                    let count =
                        (sender.position_of(entry.message)).map(|at| sender.messages[at].fragment_count());
                    check_header(&sender.terms, entry, count, start, len, umem)?;
                }
                if let Some((owner, at)) = self.owner(aim) {
                    owner.passed(at, aim.position, landed, umem);
                }
            }
        }
        self.pass_skipped(umem);
        Ok(())
    }
}

impl Inbound {
    /// The entry of `position` of the message at `at` was used, or never will be. `landed`: payload bytes of what belongs there and
    /// lies there. What becomes final by that is digested, and tails are saved and restored (I5).
    #[inline]
    pub(super) fn passed(&mut self, at: usize, position: u32, landed: Option<u16>, umem: &Umem) {
        let reach = self.terms.reach();
        let message = &mut self.messages[at];
        debug_assert_eq!(message.consumed, position);
        message.consumed = position + 1;
        *message.landed_at(position) = landed;
        message.proof.verdict = Verdict::Open;
        let index = (self.terms.window).index_at(position, message.geometry.fragment_count());
        // Entries are used in their order. Those of later windows let nobody write in this one but at its tail.
        let is_lowest = self.terms.window.is_lowest(index);
        let behind = if is_lowest { 0 } else { reach };
        let (from, to) = (message.final_to, message.consumed.saturating_sub(behind));
        for position in from..to {
            self.became_final(at, position, umem);
        }
        let message = &mut self.messages[at];
        message.final_to = from.max(to);
        if is_lowest && let Some(tail) = message.rule.lowest_arrived(self.terms.window.window_of(index)) {
            let range = message.tail_range(tail, &self.terms);
            let tail_len = (range.end - range.start) as usize;
            let slot = &message.tails[TailRule::slot(tail)];
            if slot.valid {
                umem.copy_to(range.start, &slot.bytes[..tail_len]);
                self.restored_bytes += tail_len as u64;
            }
        }
    }

    /// Nobody can write at this position's place any more: what lies there is what will be shown.
    #[inline]
    fn became_final(&mut self, at: usize, position: u32, umem: &Umem) {
        let message = &mut self.messages[at];
        let count = message.geometry.fragment_count();
        let index = self.terms.window.index_at(position, count);
        let landed = *message.landed_at(position);
        if let Some(len) = landed {
            let payload = message.payload_of(index);
            self.note_final(at, index, (payload, len), umem);
        }
        // The window's highest fragment is here: save its last bytes before the next window's lowest entry
        // is posted on them.
        let message = &mut self.messages[at];
        if let Some(tail) = message.rule.tail_to_save(self.terms.window, index, count) {
            let range = message.tail_range(tail, &self.terms);
            let slot = &mut message.tails[TailRule::slot(tail)];
            slot.valid = landed.is_some();
            if slot.valid {
                umem.copy_from(range.start, &mut slot.bytes[..(range.end - range.start) as usize]);
            }
            let saved = message.rule.tail_saved(tail);
            debug_assert!(saved, "tails are saved in order");
        }
    }
}

/// I3: the header in a window's lowest slot is still there, because nothing lower was posted behind it. It
/// must name this session, and the message and index that the log has. `count`: fragments of that message, unless it is
/// settled.
fn check_header(
    terms: &InboundTerms,
    entry: &LogEntry,
    count: Option<u32>,
    start: u64,
    len: u32,
    umem: &Umem,
) -> Result<(), Violation> {
    let mut header = [0u8; TAIL_LEN_MAX];
    let header_len = usize::from(terms.layout.fragment_header_len(entry.index)).min(len as usize);
    umem.copy_from(start, &mut header[..header_len]);
    let header = &header[..header_len];
    let names_this = match terms.layout.wire() {
        Wire::Lm => {
            let found = header
                .len()
                .checked_sub(HEADER_LEN)
                .map(|at| LmHeader::decode(&header[at..]));
            let payload_len = (len as usize).wrapping_sub(header_len + usize::from(entry.padding_len));
            match found {
                Some(Ok((
                    LmHeader::Data {
                        session_key,
                        message,
                        index,
                        count: found_count,
                    },
                    found_len,
                ))) => {
                    (session_key, message, index) == (terms.key, entry.message, entry.index)
                        && count.is_none_or(|count| count == found_count)
                        && usize::from(found_len) == payload_len
                }
                _ => false,
            }
        }
        // The gate has checked addresses and offset; what it cannot have confused is the identification.
        Wire::IpFrag => {
            let ip = terms.layout.link().ethernet_len() as usize;
            header.get(ip + 4..ip + 6) == Some(&(entry.message as u16).to_be_bytes()[..])
                && header.get(ip + 6..ip + 8).is_some_and(|field| {
                    let offset = u32::from(u16::from_be_bytes([field[0], field[1]]) & 0x1fff) * 8;
                    offset == entry.index * u32::from(terms.layout.payload_len())
                })
        }
    };
    if names_this {
        Ok(())
    } else {
        Err(Violation::Header)
    }
}
