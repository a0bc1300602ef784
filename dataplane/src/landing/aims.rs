//! Aims: what each entry is posted for, and what lies where it was not meant to.

use std::ops::Range;

/// What is posted for one packet, or positions that will never have anything.
#[derive(Clone, Copy, Debug)]
pub(super) struct Aim {
    /// UMEM address at which its packet will begin; [`Aim::SKIPPED`]: none was posted.
    pub(super) start: u64,
    /// Which session's message it is for.
    pub(super) owner: Owner,
    pub(super) number: u32,
    pub(super) position: u32,
    /// End of the positions that were left out, or that the entry is for: none, where it takes up a packet too many.
    pub(super) until: u32,
    /// The entry is a spare frame.
    pub(super) spare: bool,
    /// Fill entries, each one frame further than the last.
    pub(super) frames: u8,
    /// It stands for as many more entries, each for the fragment behind the one before: copy mode, packets of one frame.
    pub(super) more: u32,
    /// How far below the one before it each of these begins: a fragment's payload, in bytes.
    pub(super) step: u32,
}

/// A session, and no other that had its row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Owner {
    pub(super) serial: u32,
    pub(super) row: u8,
}

impl Aim {
    pub(super) const SKIPPED: u64 = u64::MAX;

    /// Positions of a message for which nothing is posted.
    pub(super) fn skipped(owner: Owner, number: u32, positions: Range<u32>) -> Aim {
        Aim {
            start: Aim::SKIPPED,
            owner,
            number,
            position: positions.start,
            until: positions.end,
            spare: false,
            frames: 1,
            more: 0,
            step: 0,
        }
    }

    /// The first of the entries that it stands for.
    #[inline]
    pub(super) fn first(&self) -> Aim {
        Aim { more: 0, ..*self }
    }

    /// Whether `other` goes on where this ends.
    #[inline]
    pub(super) fn is_followed_by(&self, other: &Aim) -> bool {
        let following = self.more + 1;
        (self.owner, self.number, self.step) == (other.owner, other.number, other.step)
            && self.step != 0
            && self.position + following == other.position
            && self
                .start
                .wrapping_sub(u64::from(following) * u64::from(self.step))
                == other.start
    }

    /// Leaves the first `count` of its entries, not all of them, out.
    #[inline]
    pub(super) fn pass(&mut self, count: u32) {
        debug_assert!(count <= self.more);
        self.start -= u64::from(count) * u64::from(self.step);
        self.position += count;
        self.until += count;
        self.more -= count;
    }

    /// The entries that it stands for.
    pub(super) fn count(&self) -> u32 {
        match self.start {
            Aim::SKIPPED => 0,
            _ => self.more + 1,
        }
    }

    /// UMEM addresses at which packets will begin that use its entries.
    pub(super) fn starts(&self) -> impl Iterator<Item = u64> + use<> {
        let (start, step) = (self.start, u64::from(self.step));
        (0..u64::from(self.count())).map(move |at| start - at * step)
    }

    /// Its first `count` entries, at most all of them, and the rest.
    pub(super) fn split(&self, count: u32) -> (Option<Aim>, Option<Aim>) {
        let first = count.min(self.count()).checked_sub(1);
        let first = first.map(|more| Aim { more, ..*self });
        let rest = (count < self.count()).then(|| {
            let mut rest = *self;
            rest.pass(count);
            rest
        });
        (first, rest)
    }

    /// Whether it is for no fragment.
    pub(super) fn is_for_none(&self) -> bool {
        self.position >= self.until
    }
}

/// A fragment of the burst at hand that lies in another's slot.
#[derive(Clone, Copy, Debug)]
pub(super) struct Displaced {
    pub(super) owner: Owner,
    pub(super) number: u32,
    pub(super) position: u32,
    /// UMEM address of its payload.
    pub(super) from: u64,
}
