//! Placing: where messages of many fragments land, where somebody wants to decide that: a [`ZoneSource`].
//!
//! ```text
//!  announced ── place ─┬─ Land(region) ── it lands there ──────────── settled(Landed(message))
//!                      ├─ Arena ───────── as without a source
//!                      ├─ Later ───────── PeerHandle::retry ── place …
//!                      └─ Refuse(status)─ Outcome::Declined { status } at its sender
//!  PeerHandle::retract ── nothing more is posted ── no entry covers the region ── settled(Retracted(region))
//! ```

use std::fmt;
use std::sync::Arc;

use crate::arena::Arena;
use crate::completion::PeerId;
use crate::landing::Zone;
use crate::message::{LandingRegion, Message};
use crate::release::{Loaned, Released};

/// The status of a message that was taken back ([`PeerHandle::retract`](crate::PeerHandle::retract)).
pub const RETRACTED: u16 = 0;

/// Decides where messages of many fragments land. It is called while the endpoint polls, so it does not block; regions are made before
/// ([`Extensions::landing_region`](crate::Extensions::landing_region)).
pub trait ZoneSource: Send {
    /// Where a message that was just announced is to land. Messages of a session are asked for in their order, each once, and again after
    /// [`PeerHandle::retry`](crate::PeerHandle::retry).
    fn place(&mut self, of: &Announced<'_>) -> Placement;

    /// What became of a message whose region came from here. Nothing that is posted covers the region any more (I1).
    fn settled(&mut self, of: &Placed, how: Settled);
}

/// A message that was announced.
#[derive(Clone, Copy, Debug)]
pub struct Announced<'a> {
    /// Who sends it.
    pub peer: PeerId,
    /// Its number in its session.
    pub number: u32,
    /// The 64 bits of metadata that the sender attached.
    pub tag: u64,
    /// Its length in bytes.
    pub len: u64,
    /// Opaque bytes of the sender's, 48 at most ([`SendRegion::set_words`](crate::SendRegion::set_words)). Whatever a hostile sender writes.
    pub words: &'a [u8],
}

/// Where a message lands.
#[derive(Debug)]
pub enum Placement {
    /// In the landing arena; [`Endpoint::recv`](crate::Endpoint::recv) gives it.
    Arena,
    /// In this region. Where it is too short ([`ZoneSource::settled`] gives it back at once) the message lands in the arena.
    Land(LandingRegion),
    /// Not yet: neither it nor what is behind it in its session has credit until [`PeerHandle::retry`](crate::PeerHandle::retry). The session
    /// stays, and its sender waits as long as it takes.
    Later,
    /// Nowhere. Its sender hears the status ([`Outcome::Declined`](crate::Outcome::Declined)), and later messages go on.
    Refuse(u16),
}

/// A message that has a region of a source's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Placed {
    /// Who sends it.
    pub peer: PeerId,
    /// Its number in its session.
    pub number: u32,
    /// The 64 bits of metadata that the sender attached.
    pub tag: u64,
    /// Its length in bytes.
    pub len: u64,
}

/// What became of a message that has a region, and the region.
#[derive(Debug)]
pub enum Settled {
    /// It is in its region: whole, or without what [`Message::missing`] says. [`Message::into_region`] makes a region of it again.
    Landed(Message),
    /// It came, or comes, by [`Endpoint::recv`](crate::Endpoint::recv): the region is too short, beyond what the device can reach, another
    /// endpoint's or read by an [`Incoming`](crate::Incoming); or, with partial delivery, entries that were left in it held the message up.
    Elsewhere(LandingRegion),
    /// It was taken back, and its sender hears of it.
    Retracted(LandingRegion),
    /// It was given up, or its session ended. [`Endpoint::recv`](crate::Endpoint::recv) says which fragments are missing.
    GivenUp(LandingRegion),
}

/// Why a message leaves its zone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Left {
    Moved,
    Retracted,
    GivenUp,
}

/// What a source said.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Asked {
    Arena,
    Land(Zone),
    Later,
    Refuse(u16),
}

/// The source of an endpoint, and what of its regions messages have.
pub(crate) struct Placing {
    source: Option<Box<dyn ZoneSource>>,
    loaned: Arc<Loaned>,
    placed: Vec<(Zone, Placed)>,
    /// Regions that were unfit for their message, since the last look.
    unfit: u64,
    has_told: bool,
}

impl fmt::Debug for Placing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Placing")
            .field("placed", &self.placed)
            .finish_non_exhaustive()
    }
}

impl Placing {
    /// No source. `loaned`: the way back of what regions are made of; of at most `regions_max` ones.
    pub(crate) fn new(loaned: Arc<Loaned>, regions_max: usize) -> Placing {
        Placing {
            source: None,
            loaned,
            placed: Vec::with_capacity(regions_max),
            unfit: 0,
            has_told: false,
        }
    }

    /// Another source, or none. The one before hears nothing of the regions that messages have: they are the arena's.
    pub(crate) fn replace(&mut self, source: Option<Box<dyn ZoneSource>>) {
        self.source = source;
        self.placed.clear();
    }

    /// Asks where a message lands that takes `zone_len` bytes below UMEM address `end`, of a region that nobody reads.
    pub(crate) fn place(&mut self, of: &Announced<'_>, (zone_len, end): (u64, u64), arena: &Arena) -> Asked {
        let Some(source) = &mut self.source else {
            return Asked::Arena;
        };
        let mut region = match source.place(of) {
            Placement::Arena => return Asked::Arena,
            Placement::Later => return Asked::Later,
            Placement::Refuse(status) => return Asked::Refuse(status),
            Placement::Land(region) => region,
        };
        let placed = Placed {
            peer: of.peer,
            number: of.number,
            tag: of.tag,
            len: of.len,
        };
        let is_ours = Arc::ptr_eq(&region.loaned, &self.loaned);
        let is_read = arena.is_held(region.start);
        if !is_ours || is_read || region.len < zone_len || region.umem_range().end > end {
            self.unfit += 1;
            if !std::mem::replace(&mut self.has_told, true) {
                tracing::warn!(
                    "a region of {} bytes is unfit for a message of {}, which lands in the arena; take it from \
                     landing_region of the same endpoint, for the longest message",
                    region.len,
                    of.len
                );
            }
            source.settled(&placed, Settled::Elsewhere(region));
            return Asked::Arena;
        }
        let zone = Zone {
            start: region.start,
            len: std::mem::take(&mut region.len),
            placed: true,
        };
        self.placed.push((zone, placed));
        Asked::Land(zone)
    }

    /// How many regions were unfit since this was last asked.
    pub(crate) fn take_unfit(&mut self) -> u64 {
        std::mem::take(&mut self.unfit)
    }

    /// How many messages have a region.
    #[cfg(any(test, feature = "fuzzing"))]
    pub(crate) fn placed(&self) -> usize {
        self.placed.len()
    }

    /// The message that has a zone is settled; `None`: no source wants to hear of it any more.
    fn take(&mut self, start: u64) -> Option<(Zone, Placed)> {
        let position = self.placed.iter().position(|(zone, _)| zone.start == start)?;
        Some(self.placed.swap_remove(position))
    }

    /// A message landed in a source's zone. Gives it back where it is for nobody here.
    pub(crate) fn landed(&mut self, message: Message) -> Option<Message> {
        let taken = match message.released {
            Some(Released::Zone { start, .. }) => self.take(start),
            _ => None,
        };
        match (&mut self.source, taken) {
            (Some(source), Some((_, placed))) => {
                source.settled(&placed, Settled::Landed(message));
                None
            }
            _ => Some(message),
        }
    }

    /// Nothing that is posted covers a source's zone any more, which its message has `left`.
    pub(crate) fn left(&mut self, zone: Zone, left: Left, arena: &mut Arena) {
        let taken = self.take(zone.start);
        let (Some(source), Some((_, placed))) = (&mut self.source, taken) else {
            arena.free(zone.start, zone.len);
            return;
        };
        let region = LandingRegion {
            loaned: Arc::clone(&self.loaned),
            start: zone.start,
            len: zone.len,
        };
        let how = match left {
            Left::Moved => Settled::Elsewhere(region),
            Left::Retracted => Settled::Retracted(region),
            Left::GivenUp => Settled::GivenUp(region),
        };
        source.settled(&placed, how);
    }
}
