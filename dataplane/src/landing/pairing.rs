//! Pairing: the n-th RX descriptor of the channel with the n-th entry of the gate's log (invariant I3), and the window
//! edges that come up with it (I5).

use lm_ebpf::{Log, LogEntry};
use lm_protocol::delivery::Arrival;
use lm_protocol::geometry::Wire;
use lm_protocol::serial;
use lm_protocol::window::TailRule;
use lm_protocol::wire::lm::{HEADER_LEN, LmHeader};

use super::{Aim, Burst, ChannelOrder, Inbound, InboundTerms, TAIL_LEN_MAX, Violation};
use crate::memory::Umem;
use crate::ring::RxRing;

impl Inbound {
    /// Takes up to `max` descriptors, pairs each with its log entry and places it.
    ///
    /// # Errors
    /// The first violation of I3. Nothing of the session may be shown after that.
    pub(crate) fn receive(
        &mut self,
        rx: &mut RxRing,
        log: &Log,
        order: &mut ChannelOrder,
        umem: &Umem,
        max: u32,
        now_ns: u64,
    ) -> Result<Burst, Violation> {
        let packets = rx.available(max);
        let mut burst = Burst {
            packets,
            window_ended: false,
        };
        if packets == 0 {
            return Ok(burst);
        }
        let mut result = Ok(());
        for offset in 0..packets {
            let descriptor = rx.read(offset);
            let entry = log.entry(order.received);
            let sequence = order.received as u32;
            order.received += 1;
            result = self.pair(
                (descriptor.start(), descriptor.len),
                &entry,
                sequence,
                umem,
                &mut burst,
                now_ns,
            );
            if result.is_err() {
                break;
            }
        }
        rx.release(packets);
        self.progress_ns = now_ns;
        self.landed_ns = now_ns;
        self.passed_by = 0;
        self.forgiven = false;
        if self.troubled && result.is_ok() {
            self.settle_trouble(umem);
        }
        result.map(|()| burst)
    }

    #[inline]
    fn pair(
        &mut self,
        (start, len): (u64, u32),
        entry: &LogEntry,
        sequence: u32,
        umem: &Umem,
        burst: &mut Burst,
        now_ns: u64,
    ) -> Result<(), Violation> {
        let Some(aim) = self.aims.pop_front() else {
            return Err(Violation::Unposted);
        };
        self.outstanding -= 1;
        if start != aim.start {
            return Err(Violation::Address);
        }
        if entry.sequence != sequence {
            return Err(Violation::Sequence);
        }
        let Some(at) = self.position_of(entry.message) else {
            // The gate admits nothing beyond what is announced. What comes for a message that was given up is of no use.
            return match serial::precedes(entry.message, self.announced) {
                true => self.waste(&aim, (start, len), entry, umem, burst),
                false => Err(Violation::Displaced),
            };
        };
        let message = &mut self.messages[at];
        let count = message.geometry.fragment_count();
        if entry.index >= count {
            return Err(Violation::Displaced);
        }
        let position = self.terms.window.position_of(entry.index, count);
        // The gate's monotone rule: a log that goes back is not its own.
        if let Some((last_number, last_position)) = self.last
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
        if self.terms.one_processor && *self.processor.get_or_insert(entry.cpu) != entry.cpu {
            return Err(Violation::Processor);
        }
        self.last = Some((entry.message, position));
        self.accepted = self.accepted.max(message.base + u64::from(position) + 1);
        let arrival = message.arrivals.take(position);
        let in_place = aim.number == entry.message && aim.position == position;
        if in_place && arrival != Arrival::Duplicate {
            self.note_landed(at, entry.index, start, umem);
        }
        if arrival == Arrival::Next && in_place {
            self.used(&aim, true, (start, len), entry, umem, burst)?;
        } else {
            // The header in the slot is looked at before anything is done with the payload behind it.
            let valid = in_place && arrival != Arrival::Duplicate;
            self.used(&aim, valid, (start, len), entry, umem, burst)?;
            self.landed_elsewhere(at, position, arrival, in_place, start, umem, now_ns);
        }
        if self.front_may_land() {
            self.land(Vec::new());
        }
        Ok(())
    }

    /// A packet that nobody wants used an entry.
    fn waste(
        &mut self,
        aim: &Aim,
        frame: (u64, u32),
        entry: &LogEntry,
        umem: &Umem,
        burst: &mut Burst,
    ) -> Result<(), Violation> {
        self.repair.stale += 1;
        self.troubled = true;
        self.used(aim, false, frame, entry, umem, burst)
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
        if let Some(at) = self.position_of(aim.number) {
            let message = &self.messages[at];
            let index = (self.terms.window).index_at(aim.position, message.geometry.fragment_count());
            if self.terms.window.is_lowest(index) {
                burst.window_ended = true;
                // The header names what is in the slot, which need not be what belongs there.
                let count = self
                    .position_of(entry.message)
                    .map(|at| self.messages[at].fragment_count());
                check_header(&self.terms, entry, count, start, len, umem)?;
            }
            self.passed(at, aim.position, in_place, umem);
        }
        self.pass_skipped(umem);
        Ok(())
    }

    /// Positions that were left out come up.
    #[inline]
    pub(super) fn pass_skipped(&mut self, umem: &Umem) {
        while let Some(&aim) = self.aims.front()
            && aim.start == Aim::SKIPPED
        {
            self.aims.pop_front();
            if let Some(at) = self.position_of(aim.number) {
                for position in aim.position..aim.until {
                    self.passed(at, position, false, umem);
                }
            }
        }
    }

    /// Nothing more will be written at `position` of the message at `at`: tails are saved and restored (I5).
    #[inline]
    pub(super) fn passed(&mut self, at: usize, position: u32, in_place: bool, umem: &Umem) {
        let message = &mut self.messages[at];
        debug_assert_eq!(message.consumed, position);
        message.consumed = position + 1;
        let count = message.geometry.fragment_count();
        let index = self.terms.window.index_at(position, count);
        // The window's highest fragment is here: save its last bytes before the next window's lowest entry
        // is posted on them.
        if let Some(tail) = message.rule.tail_to_save(self.terms.window, index, count) {
            let range = message.tail_range(tail, &self.terms);
            let slot = &mut message.tails[TailRule::slot(tail)];
            slot.valid = in_place;
            if in_place {
                umem.copy_from(range.start, &mut slot.bytes[..(range.end - range.start) as usize]);
            }
            let saved = message.rule.tail_saved(tail);
            debug_assert!(saved, "tails are saved in order");
        }
        if self.terms.window.is_lowest(index)
            && let Some(tail) = message.rule.lowest_arrived(self.terms.window.window_of(index))
        {
            let range = message.tail_range(tail, &self.terms);
            let tail_len = (range.end - range.start) as usize;
            let slot = &message.tails[TailRule::slot(tail)];
            if slot.valid {
                umem.copy_to(range.start, &slot.bytes[..tail_len]);
                self.restored_bytes += tail_len as u64;
            }
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
