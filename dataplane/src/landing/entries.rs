//! The channel's fill entries, in their order.

use std::collections::VecDeque;
use std::ops::Range;

use lm_protocol::streaming::Quarantine;

use super::aims::{Aim, Owner};
use super::arriving::Zone;
use super::card::Card;
use super::open::Open;
use crate::arena::{Arena, SHARED_ROOM};
use crate::frames::FramePool;
use crate::memory::PACKET_HEADROOM;
use crate::mutants::mutant;
use crate::placing::Left;
use crate::port::{Caps, RxQueue};

/// Longest packet, in bytes, that is looked at for what else it may be than a fragment: control messages are shorter.
pub(crate) const FOREIGN_LEN_MAX: u32 = 256;
/// Such packets of one burst; more are lost.
const FOREIGN_MAX: usize = 32;

/// A zone whose message is settled while entries posted in it are unused (I1): quarantined until they are.
#[derive(Clone, Copy, Debug)]
struct Quarantined {
    zone: Zone,
    left: Left,
    /// Entries posted in zones when it was put here: as many have to be used.
    until: Quarantine,
}

/// What is posted on the landing channel. Its n-th packet uses the n-th slot, is the log's n-th entry and the RX ring's n-th packet
/// (I3); the counts are of packets, each of which may take several fill entries, and outlive sessions.
#[derive(Debug)]
pub(crate) struct Entries {
    pub(crate) posted: u64,
    pub(crate) received: u64,
    /// Received when the header in a window's lowest slot was last found to be what the log says.
    pub(super) checked: u64,
    /// Frames of those that no packet has used.
    pub(super) frames_out: u32,
    /// Posted when the last one in a zone was: those behind it are spare frames.
    pub(super) zoned: u64,
    pub(super) caps: Caps,
    /// The counts are right: no violation was found since the channel was built.
    pub(crate) trusted: bool,
    /// Unused ones in the order of posting, with the positions that were left out among them. [`Aim::more`] stand in one.
    pub(super) aims: VecDeque<Aim>,
    /// Frames for entries that have no place in a zone.
    pub(super) spare: Option<FramePool>,
    quarantined: Vec<Quarantined>,
    /// Zones of a source's that nothing covers any more.
    left: Vec<(Zone, Left)>,
    /// When a packet last landed.
    pub(super) landed_ns: u64,
    /// When the kernel's socket was last found empty.
    pub(super) drained_ns: u64,
    /// Posted at that time: what is read from it since then passed the gate with at least these.
    drained_posted: u64,
    /// Zero-copy mode: what the device holds of them.
    card: Card,
    /// Without a witness: short packets of the last burst, start and length.
    foreign: VecDeque<(u64, u32)>,
    pub(super) open: Open,
}

impl Entries {
    /// None. `position`: packets that the channel's gate has accepted; `entries_max`: that will ever be posted at once;
    /// `spare`: frames of the channel's own, in zero-copy mode.
    pub(super) fn new(position: u64, entries_max: u32, caps: Caps, spare: Option<FramePool>) -> Entries {
        Entries {
            posted: position,
            received: position,
            checked: position,
            frames_out: 0,
            zoned: position,
            caps,
            trusted: true,
            aims: VecDeque::with_capacity(entries_max as usize),
            spare,
            quarantined: Vec::with_capacity(SHARED_ROOM),
            left: Vec::new(),
            landed_ns: 0,
            drained_ns: 0,
            drained_posted: position,
            card: Card::at(position),
            foreign: VecDeque::with_capacity(if caps.witness { 0 } else { FOREIGN_MAX }),
            open: Open::default(),
        }
    }

    /// A packet came of which nobody knows what it is.
    #[inline]
    pub(super) fn note_foreign(&mut self, start: u64, len: u32) {
        if len <= FOREIGN_LEN_MAX && self.foreign.len() < FOREIGN_MAX {
            self.foreign.push_back((start, len));
        }
    }

    pub(crate) fn next_foreign(&mut self) -> Option<(u64, u32)> {
        self.foreign.pop_front()
    }

    /// The channel was built anew, with `position` packets accepted: nothing is posted.
    pub(super) fn begin_anew(&mut self, position: u64, arena: &mut Arena) {
        (self.posted, self.received) = (position, position);
        self.checked = position;
        self.card = Card::at(position);
        self.frames_out = 0;
        self.zoned = position;
        self.drained_posted = position;
        self.trusted = true;
        self.forget_open(arena);
        for kept in std::mem::take(&mut self.quarantined) {
            self.free(kept.zone, kept.left, arena);
        }
    }

    /// Entries that no packet has used.
    #[inline]
    pub(crate) fn outstanding(&self) -> u32 {
        self.posted.saturating_sub(self.received) as u32
    }

    /// UMEM addresses at which packets will begin that use them.
    #[cfg(test)]
    pub(crate) fn starts(&self) -> impl Iterator<Item = u64> {
        self.aims.iter().flat_map(Aim::starts)
    }

    /// Takes the oldest aim out, one entry of it if it stands for several.
    #[inline]
    pub(super) fn next_aim(&mut self) -> Option<Aim> {
        let front = self.aims.front_mut()?;
        self.open.standing -= u32::from(front.is_open());
        if front.more == 0 {
            return self.aims.pop_front();
        }
        let first = front.first();
        front.pass(1);
        Some(first)
    }

    /// How many of the last entries are for no fragment. Fragments are passed in their order, so that only those at the end can be given
    /// another purpose.
    pub(super) fn fillers(&self) -> u64 {
        let last = self.aims.iter().rev().take_while(|aim| aim.is_for_none());
        last.map(|aim| u64::from(aim.count())).sum()
    }

    /// Of the unused entries those behind the first `before` are met by a message's fragments at `positions`, which are copied from there.
    #[cold]
    pub(super) fn assign(&mut self, before: u64, (owner, number): (Owner, u32), positions: Range<u32>) {
        let (mut before, mut next) = (before, positions.start);
        for _ in 0..self.aims.len() {
            let Some(aim) = self.aims.pop_front() else { return };
            let (earlier, rest) = aim.split(before.min(u64::from(aim.count())) as u32);
            let met = rest.map_or(0, |aim| aim.count().min(positions.end - next));
            let (its, later) = rest.map_or((None, None), |aim| aim.split(met));
            before -= u64::from(earlier.map_or(0, |aim| aim.count()));
            self.open.standing -= its.filter(Aim::is_open).map_or(0, |aim| aim.count());
            self.aims.extend(earlier);
            for entry in its.iter().flat_map(Aim::starts) {
                self.aims.push_back(Aim {
                    start: entry,
                    spare: true,
                    ..Aim::skipped(owner, number, next..next + 1)
                });
                next += 1;
            }
            // Positions that were left out are passed when they come up.
            self.aims.extend(later.or((aim.count() == 0).then_some(aim)));
        }
    }

    /// The start of a packet in a spare frame, if there is one beside those that fill the lap up.
    pub(super) fn take_spare(&mut self) -> Option<u64> {
        let kept = self.caps.lap as usize - 1;
        (self.spare.as_ref()?.available() > kept).then(|| self.take_kept())?
    }

    /// The same of all: those that fill the lap up, or are behind what is expected.
    pub(super) fn take_kept(&mut self) -> Option<u64> {
        let frame = self.spare.as_mut()?.take()?;
        Some(frame.into_address() + PACKET_HEADROOM)
    }

    /// A spare frame, in which `start` lies, is used no more.
    pub(super) fn put_spare(&mut self, start: u64) {
        if let Some(spare) = &mut self.spare
            && let Some(frame) = spare.reclaim(start)
        {
            spare.put(frame);
        }
    }

    /// The next `count` entries are those of zones, and are written.
    pub(super) fn end_zones(&mut self, count: u32) {
        self.zoned = self.posted + u64::from(count);
    }

    /// Whether every one in a zone was used, by what it was posted for or not.
    pub(crate) fn are_used(&self) -> bool {
        self.trusted && self.zoned <= self.received && (self.open.standing == 0 || !self.caps.witness)
    }

    /// Nothing waits in the kernel's socket.
    #[inline]
    pub(crate) fn found_socket_empty(&mut self, now_ns: u64) {
        self.drained_ns = now_ns;
        self.drained_posted = self.posted;
    }

    /// Whether there were entries when what is read from the kernel's socket now passed the gate, which has let `accepted` packets land.
    pub(super) fn were_posted(&self, accepted: u64) -> bool {
        self.drained_posted > accepted
    }

    /// Keeps a zone until every entry that is posted now is used.
    pub(super) fn quarantine(&mut self, zone: Zone, left: Left) {
        self.quarantine_until(zone, left, self.zoned);
    }

    /// Keeps a zone until the entry count `posted` is used.
    pub(super) fn quarantine_until(&mut self, zone: Zone, left: Left, posted: u64) {
        let until = Quarantine { posted };
        self.quarantined.push(Quarantined { zone, left, until });
    }

    /// Keeps the zones of a session that ended.
    pub(crate) fn quarantine_all(&mut self, zones: Vec<Zone>) {
        for zone in zones {
            self.quarantine(zone, Left::GivenUp);
        }
    }

    pub(super) fn keeps_zones(&self) -> bool {
        !self.quarantined.is_empty()
    }

    /// Frees zones in which nothing is posted any more.
    pub(crate) fn free_quarantined(&mut self, arena: &mut Arena) {
        if !self.trusted {
            return;
        }
        let received = self.received;
        let is_over = |kept: &Quarantined| kept.until.is_over(received) || mutant!(ZoneFreedEarly);
        while let Some(position) = self.quarantined.iter().position(is_over) {
            let kept = self.quarantined.remove(position);
            self.free(kept.zone, kept.left, arena);
        }
    }

    /// Frees a zone in which nothing is posted, and which its message has `left`.
    pub(crate) fn free(&mut self, zone: Zone, left: Left, arena: &mut Arena) {
        match zone.placed {
            true => self.left.push((zone, left)),
            false => arena.free(zone.start, zone.len),
        }
    }

    /// The next zone of a source's that nothing covers any more.
    pub(super) fn next_left(&mut self) -> Option<(Zone, Left)> {
        self.left.pop()
    }

    /// Whether a zone of a source's is kept.
    pub(super) fn owes_zones(&self) -> bool {
        self.quarantined.iter().any(|kept| kept.zone.placed)
    }

    /// To be asked before entries are posted, where a device takes them. `ring_len`: of its own ring, in entries.
    pub(crate) fn look_at_card(&mut self, queue: &mut impl RxQueue, ring_len: u32, now_ns: u64) {
        (self.card).look((self.posted, self.received), queue, ring_len, now_ns);
    }

    /// Entries that the device surely holds.
    pub(super) fn ahead(&self) -> u32 {
        self.card.ahead(self.received)
    }

    /// Whether the sender can only go on when the driver has taken entries: nothing wakes an endpoint then.
    pub(crate) fn await_driver(&self) -> bool {
        !self.caps.witness && self.posted > self.received && self.ahead() == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arena::PAGE_LEN;
    use crate::bounds::ZONES_MAX;

    /// Every zone that there may be, each second one a source's, is kept once and left once.
    #[test]
    fn no_more_zones_are_kept_than_an_arena_has() {
        let mut arena = Arena::new(0, 2 * ZONES_MAX as u64 * PAGE_LEN, ZONES_MAX);
        let mut entries = Entries::new(0, 1, Caps::copying(0), None);
        entries.end_zones(1);
        entries.posted = 1;
        while let Some(start) = arena.allocate(1) {
            let placed = !(start / PAGE_LEN).is_multiple_of(2);
            let zone = Zone {
                start,
                len: 1,
                placed,
            };
            entries.quarantine(zone, Left::GivenUp);
        }
        entries.free_quarantined(&mut arena);
        assert_eq!((entries.quarantined.len(), entries.left.len()), (ZONES_MAX, 0));
        entries.received = 1;
        entries.free_quarantined(&mut arena);
        assert_eq!(
            (entries.quarantined.len(), entries.left.len()),
            (0, ZONES_MAX / 2)
        );
        assert_eq!(arena.live(), ZONES_MAX / 2);
        assert_eq!(std::iter::from_fn(|| entries.next_left()).count(), ZONES_MAX / 2);
    }
}
