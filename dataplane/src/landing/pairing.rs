//! Pairing: the n-th RX descriptor of the channel with the n-th entry of the gate's log (invariant I3), and the window
//! edges that come up with it (I5).

use lm_protocol::delivery::Arrival;
use lm_protocol::geometry::Wire;
use lm_protocol::landing::LogEntry;
use lm_protocol::wire::lm::{HEADER_LEN, LmHeader};

use super::aims::Aim;
use super::arriving::TAIL_LEN_MAX;
use super::receiving::{Burst, Packet};
use super::sessions::Sessions;
use super::terms::InboundTerms;
use super::violation::Violation;
use super::zones::Memory;
use crate::memory::Umem;

impl Sessions {
    #[inline]
    pub(super) fn pair(
        &mut self,
        aim: &Aim,
        packet: &Packet,
        entry: &LogEntry,
        (umem, memory): (&Umem, &mut Memory<'_>),
        burst: &mut Burst,
        now_ns: u64,
    ) -> Result<(), Violation> {
        let &Packet { start, len, .. } = packet;
        let row = self.rows.get_mut(usize::from(entry.session));
        let Some(inbound) = row.and_then(Option::as_deref_mut) else {
            // Its session was closed while it was on its way.
            self.used(aim, false, (start, len), entry, umem, burst)?;
            self.arrivals.stale += 1;
            return Ok(());
        };
        let Some(at) = inbound.order.position_of(entry.message) else {
            if !inbound.order.knows(entry.message) {
                if !inbound.terms.goes_ahead {
                    // The gate admits nothing beyond what is announced.
                    return Err(Violation::Displaced);
                }
                let its = (entry.session, entry.message, Some(entry.index));
                let landed = (start, len.saturating_sub(entry.padding_len.into()));
                if let Some(aim) = self.claim(aim, its, landed, (umem, memory), now_ns) {
                    return self.pair(&aim, packet, entry, (umem, memory), burst, now_ns);
                }
                if let Some(inbound) = self.at_mut(entry.session) {
                    inbound.told.is_unknown();
                }
            } else {
                // What comes for a message that was given up is of no use.
                inbound.places.trouble();
            }
            self.used(aim, false, (start, len), entry, umem, burst)?;
            self.arrivals.stale += 1;
            return Ok(());
        };
        let owner = inbound.owner();
        // An IP fragment's header is shorter than others' slots are made for: the packet behind it lies on its first bytes.
        let fits = aim.owner == owner || inbound.terms.layout.wire() != Wire::IpFrag;
        let message = inbound.order.at_mut(at);
        if entry.index >= message.fragment_count() {
            return Err(Violation::Displaced);
        }
        let position = message.position_of(entry.index);
        // The gate's monotone rule: a log that goes back is not its own.
        if !inbound.progress.may_follow((entry.message, position)) {
            return Err(Violation::Displaced);
        }
        let frame_len = u32::from(message.geometry.fragment(entry.index).frame_len());
        let unpadded_len = len.checked_sub(u32::from(entry.padding_len));
        if u32::from(entry.frame_len) != len || unpadded_len != Some(frame_len) {
            return Err(Violation::Length);
        }
        let end = message.base + u64::from(position) + 1;
        inbound.progress.accept((entry.message, position), end, now_ns);
        inbound.astray.has_landed();
        if !fits {
            inbound.places.trouble();
            self.arrivals.discarded += 1;
            return self.used(aim, false, (start, len), entry, umem, burst);
        }
        let arrival = message.gaps.arrivals.take(position);
        let is_for = (aim.owner, aim.number, aim.position) == (owner, entry.message, position);
        let in_place = is_for && !aim.spare;
        let valid = in_place && arrival != Arrival::Duplicate;
        let used = self.used(aim, valid, (start, len), entry, umem, burst);
        let received = self.entries.received;
        let Some(inbound) = self.at_mut(entry.session) else {
            return used;
        };
        if used.is_err() {
            if arrival != Arrival::Duplicate {
                inbound.order.at_mut(at).gaps.arrivals.reject(position);
            }
            return used;
        }
        if arrival != Arrival::Next || !in_place {
            if !in_place {
                inbound.order.at_mut(at).landed_up_to(entry.index, received);
            }
            let mut care = inbound.care();
            let from = care.landed_elsewhere(at, position, arrival, in_place, start, now_ns);
            if let Some(from) = from {
                self.displaced(entry.session, at, position, (aim, from), umem);
            }
        }
        if let Some(inbound) = self.at_mut(entry.session) {
            inbound.care().land_whole();
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
        if !aim.is_for_none()
            && let Some((owner, at)) = self.owner(aim)
        {
            let message = owner.order.at(at);
            let index = message.index_at(aim.position);
            let landed = in_place.then(|| message.geometry.fragment_len(index));
            if !message.window.is_lowest(index) || message.is_claimed {
                owner.care().passed(at, aim.position, landed, umem);
            } else {
                burst.window_ended = true;
                // It is looked at before anything is done with the payload behind it. The header names what is in the slot, which need not be
                // what belongs there.
                if let Some(sender) = self.at(entry.session) {
                    let at = sender.order.position_of(entry.message);
                    let count = at.map(|at| sender.order.at(at).fragment_count());
                    check_header(&sender.terms, entry, count, start, len, umem)?;
                    self.entries.checked = self.entries.received;
                }
                let received = self.entries.received;
                let is_checked = self.entries.checked == received;
                if let Some((owner, at)) = self.owner(aim) {
                    let message = owner.order.at_mut(at);
                    if is_checked {
                        message.landed_up_to(index, received);
                    }
                    owner.care().passed(at, aim.position, landed, umem);
                }
            }
        }
        self.pass_skipped(umem);
        Ok(())
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
