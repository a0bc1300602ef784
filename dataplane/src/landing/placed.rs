//! Messages that somebody else decides of ([`crate::placing`]): asked for when they are announced, and settled when they were refused or taken
//! back.
//!
//! A message that is not to land stays in the session's order until those before it are settled. Then what is on its way to entries that are
//! posted for it may still use them; nothing more is posted.

use super::arriving::Arriving;
use super::entries::Entries;
use super::inbound::Inbound;
use super::repair::{CLAIM_GRACE_NS, CLAIM_GRACE_ZERO_COPY_NS};
use super::sessions::Sessions;
use super::zones::Memory;
use crate::arena::Arena;
use crate::completion::PeerId;
use crate::memory::Umem;
use crate::placing::{Announced, Asked, Left, RETRACTED};

/// Where a message is to land, as far as somebody was asked.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Place {
    /// Nobody was asked.
    #[default]
    Unasked,
    Arena,
    /// In a zone that it has.
    Source,
    Later,
    /// Nowhere: its sender is told the status.
    Refused(u16),
    /// Nowhere: its writer gave it up.
    Aborted,
}

impl Arriving {
    /// It may not land now, nor may what is behind it.
    #[inline]
    pub(super) fn waits(&self) -> bool {
        matches!(self.place, Place::Later | Place::Refused(_) | Place::Aborted)
    }

    /// An entry may be posted for it, memory permitting.
    #[inline]
    pub(super) fn is_open(&self) -> bool {
        self.slots.posted < self.slots.open && !self.waits()
    }

    #[inline]
    pub(super) fn is_refused(&self) -> bool {
        matches!(self.place, Place::Refused(_))
    }

    /// Its writer gave it up.
    #[inline]
    pub(super) fn is_aborted(&self) -> bool {
        self.place == Place::Aborted
    }
}

impl Inbound {
    /// Asks where messages land of which nobody was asked.
    pub(crate) fn place(&mut self, memory: &mut Memory<'_>) {
        for message in self.order.iter_mut() {
            if message.place != Place::Unasked || message.slots.zone.is_some() {
                continue;
            }
            let Some(placing) = memory.placing.as_deref_mut() else {
                break;
            };
            let announced = Announced {
                peer: self.terms.peer,
                number: message.number,
                tag: message.tag,
                len: message.len,
                words: message.words.as_bytes(),
            };
            let (zone_len, _) = self.terms.zone_of(&message.geometry);
            let limits = (zone_len, memory.registered_len);
            message.place = match placing.place(&announced, limits, memory.arena) {
                Asked::Arena => Place::Arena,
                Asked::Later => Place::Later,
                Asked::Refuse(status) => Place::Refused(status),
                Asked::Land(zone) => {
                    memory.give(message, &self.terms, zone, true);
                    Place::Source
                }
            };
        }
    }

    /// The message with this number, if it waits, is to be asked for again.
    fn retry(&mut self, number: u32) -> bool {
        let at = self.order.position_of(number);
        let later = at.filter(|&at| self.order.at(at).place == Place::Later);
        if let Some(at) = later {
            self.order.at_mut(at).place = Place::Unasked;
        }
        later.is_some()
    }

    /// All messages that wait are to be asked for again.
    pub(crate) fn retry_all(&mut self) {
        for message in self
            .order
            .iter_mut()
            .filter(|message| message.place == Place::Later)
        {
            message.place = Place::Unasked;
        }
    }

    /// The message with this number, if it is not settled, is not to land.
    fn retract(&mut self, number: u32, entries: &mut Entries, arena: &mut Arena) -> bool {
        let at = self.order.position_of(number);
        let Some(message) = at.map(|at| self.order.at_mut(at)) else {
            return false;
        };
        if message.is_refused() || message.is_aborted() {
            return false;
        }
        message.place = Place::Refused(RETRACTED);
        message.slots.may_post = false;
        if message.slots.posted == 0
            && let Some(zone) = message.slots.zone.take()
        {
            entries.free(zone, Left::Retracted, arena);
        }
        true
    }

    /// Settles front messages that are not to land, when no packet will use what is posted for them.
    fn settle_refused(&mut self, entries: &mut Entries, umem: &Umem, now_ns: u64) {
        let grace_ns = match self.terms.caps.witness {
            true => CLAIM_GRACE_NS,
            false => CLAIM_GRACE_ZERO_COPY_NS,
        };
        while !self.settled.has_landed()
            && let Some(front) = self.order.front()
            && let Place::Refused(status) = front.place
        {
            let quiet_ns = now_ns.saturating_sub(self.progress.last_ns().max(entries.landed_ns));
            if front.slots.consumed < front.slots.posted && quiet_ns < grace_ns {
                return;
            }
            let Some(front) = self.order.pop_front() else {
                return;
            };
            self.places.repair.given_up += front.arrived();
            self.progress.overtaken(front.end());
            self.settled.deliver_to(front.number.wrapping_add(1));
            self.settled.broke(front.number, Some(status));
            if let Some(zone) = front.slots.zone {
                entries.quarantine(zone, Left::Retracted);
            }
            self.care().settle_trouble(umem);
        }
    }
}

impl Sessions {
    fn of_peer(&mut self, peer: PeerId) -> Option<u8> {
        let of_peer = self.iter().find(|inbound| inbound.terms.peer == peer);
        of_peer.map(Inbound::row)
    }

    /// As [`Inbound::place`], of one of a peer's messages that waits. `false`: it does not.
    pub(crate) fn retry(&mut self, peer: PeerId, number: u32, memory: &mut Memory<'_>) -> bool {
        let row = self.of_peer(peer);
        let Some(inbound) = row.and_then(|row| self.at_mut(row)) else {
            return false;
        };
        let waits = inbound.retry(number);
        inbound.place(memory);
        waits
    }

    /// A peer's message is not to land. `false`: there is no such that is not settled.
    pub(crate) fn retract(&mut self, peer: PeerId, number: u32, memory: &mut Memory<'_>) -> bool {
        let row = self.of_peer(peer);
        let inbound = row.and_then(|row| self.rows[usize::from(row)].as_deref_mut());
        inbound.is_some_and(|inbound| inbound.retract(number, &mut self.entries, memory.arena))
    }

    /// Settles what is not to land, and gives the zones of sources back that nothing covers any more.
    pub(crate) fn settle_placed(&mut self, memory: &mut Memory<'_>, umem: &Umem, now_ns: u64) {
        for row in self.taken() {
            if let Some(inbound) = self.rows[usize::from(row)].as_deref_mut() {
                inbound.settle_refused(&mut self.entries, umem, now_ns);
            }
        }
        if self.entries.keeps_zones() {
            self.entries.free_quarantined(memory.arena);
        }
        while let Some((zone, left)) = self.entries.next_left() {
            match memory.placing.as_deref_mut() {
                Some(placing) => placing.left(zone, left, memory.arena),
                None => memory.arena.free(zone.start, zone.len),
            }
        }
    }
}
