//! Arena: variable-length regions of the UMEM (send regions and landing zones).
//!
//! First fit over a sorted list of free extents. A general-purpose sub-allocator with size classes was tried
//! on paper first: its classes round a request up by as much as 12.5 %, so a 1 GiB zone would not fit into
//! an arena of 1 GiB and 64 MiB, and the receiver's memory promise would be lost. Live regions are few
//! (messages in flight, not packets), so a linear walk over the gaps is short.
//!
//! ```text
//!  start                                                        end
//!    |  used  |    free    |  used  | used |   free   |   ...    |
//! ```
//! All memory of the bookkeeping is taken when the arena is made: allocating and freeing never allocate. Holds do.

/// Granularity of an arena in bytes: regions begin and end on page boundaries, so that the owner of a
/// transmit completion can be looked up by page number.
pub(crate) const PAGE_LEN: u64 = 4096;

/// Shared regions for which there is room without more memory: the one in use, and those of which messages are still read.
pub(crate) const SHARED_ROOM: usize = 16;

/// A run of free bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Extent {
    start: u64,
    len: u64,
}

/// A region that is free only when nobody reads it any more.
#[derive(Clone, Copy, Debug)]
struct Hold {
    id: u64,
    start: u64,
    /// Its length, once it was given back.
    returned: Option<u64>,
}

/// A region that several lie in: it is free when the last of them is gone.
#[derive(Clone, Copy, Debug)]
struct Shared {
    start: u64,
    len: u64,
    users: u32,
}

impl Shared {
    fn has(&self, start: u64) -> bool {
        (self.start..self.start + self.len).contains(&start)
    }
}

/// Rounds `len` up to whole pages.
pub(crate) const fn pages_len(len: u64) -> u64 {
    len.div_ceil(PAGE_LEN) * PAGE_LEN
}

/// A bounded set of page-aligned regions inside `[start, start + len)` of the UMEM.
#[derive(Debug)]
pub(crate) struct Arena {
    start: u64,
    len: u64,
    free: Vec<Extent>,
    live: usize,
    live_max: usize,
    /// Regions that somebody reads beside who took them.
    holds: Vec<Hold>,
    shared: Vec<Shared>,
    /// Start and length of every region given back, if a test asked for that.
    #[cfg(test)]
    pub(crate) journal: Option<Vec<(u64, u64)>>,
}

impl Arena {
    /// An arena over `[start, start + len)`, both multiples of [`PAGE_LEN`], for at most `live_max` regions.
    pub(crate) fn new(start: u64, len: u64, live_max: usize) -> Arena {
        assert!(start.is_multiple_of(PAGE_LEN) && len.is_multiple_of(PAGE_LEN));
        // n live regions leave at most n + 1 gaps.
        let mut free = Vec::with_capacity(live_max + 2);
        if len > 0 {
            free.push(Extent { start, len });
        }
        Arena {
            start,
            len,
            free,
            live: 0,
            live_max,
            holds: Vec::new(),
            shared: Vec::with_capacity(SHARED_ROOM),
            #[cfg(test)]
            journal: None,
        }
    }

    /// First byte of the arena as a UMEM address.
    pub(crate) fn start(&self) -> u64 {
        self.start
    }

    /// Length of the arena in bytes.
    pub(crate) fn len(&self) -> u64 {
        self.len
    }

    /// Regions taken and not given back, but for shared ones.
    #[cfg(any(test, feature = "fuzzing"))]
    pub(crate) fn live(&self) -> usize {
        self.live - self.shared.len()
    }

    /// Regions that several lie in.
    #[cfg(test)]
    pub(crate) fn shared(&self) -> usize {
        self.shared.len()
    }

    /// Whether everything is free, and one piece, but for shared regions with one user.
    #[cfg(any(test, feature = "fuzzing"))]
    pub(crate) fn is_whole(&self) -> bool {
        let kept = self.shared.iter().filter(|shared| shared.users == 1);
        let kept_len: u64 = kept.map(|shared| pages_len(shared.len)).sum();
        self.free.len() <= 1 + self.shared.len()
            && self.free.iter().map(|gap| gap.len).sum::<u64>() + kept_len == self.len
    }

    /// Start and length of every free run.
    #[cfg(test)]
    pub(crate) fn gaps(&self) -> impl Iterator<Item = (u64, u64)> {
        self.free.iter().map(|gap| (gap.start, gap.len))
    }

    /// Takes a region of at least `len` bytes and returns its UMEM address, or `None` when no gap is long
    /// enough or the bound on regions is reached.
    pub(crate) fn allocate(&mut self, len: u64) -> Option<u64> {
        self.allocate_in(len, 0, u64::MAX)
    }

    /// The same, from UMEM address `from` on and below `end`.
    pub(crate) fn allocate_in(&mut self, len: u64, from: u64, end: u64) -> Option<u64> {
        if self.live == self.live_max {
            return None;
        }
        let want = pages_len(len.max(1));
        let from = pages_len(from);
        let fits = |gap: &Extent| gap.start.max(from).saturating_add(want) <= end.min(gap.start + gap.len);
        let at = self.free.iter().position(fits)?;
        let gap = &mut self.free[at];
        let start = gap.start.max(from);
        let behind = Extent {
            start: start + want,
            len: gap.start + gap.len - (start + want),
        };
        gap.len = start - gap.start;
        match (gap.len, behind.len) {
            (0, 0) => drop(self.free.remove(at)),
            (0, _) => *gap = behind,
            (_, 0) => {}
            _ => self.free.insert(at + 1, behind),
        }
        self.live += 1;
        Some(start)
    }

    /// Whether a region of `len` bytes can be had.
    pub(crate) fn fits(&self, len: u64) -> bool {
        self.live < self.live_max && self.free.iter().any(|gap| gap.len >= pages_len(len))
    }

    /// The region at `start`, which has one user, may have others.
    pub(crate) fn share(&mut self, start: u64, len: u64) {
        let users = 1;
        self.shared.push(Shared { start, len, users });
    }

    /// The shared region around `start` has one more user, which gives `start` back.
    pub(crate) fn join(&mut self, start: u64) {
        let around = self.shared.iter_mut().find(|shared| shared.has(start));
        around.expect("a region that is shared").users += 1;
    }

    /// The region at `start` is not free before the reader `id` lets it go, whoever gives it back; what it held before is free of it.
    pub(crate) fn hold(&mut self, id: u64, start: u64) {
        self.let_go(id);
        let returned = None;
        self.holds.push(Hold { id, start, returned });
    }

    /// The reader `id` is gone, if it was there.
    pub(crate) fn let_go(&mut self, id: u64) {
        let Some(at) = self.holds.iter().position(|hold| hold.id == id) else {
            return;
        };
        let Hold { start, returned, .. } = self.holds.swap_remove(at);
        if let Some(len) = returned {
            self.free(start, len);
        }
    }

    /// Whether somebody reads the region at `start`.
    pub(crate) fn is_held(&self, start: u64) -> bool {
        self.holds.iter().any(|hold| hold.start == start)
    }

    /// The region is given back, and somebody reads it.
    #[cold]
    fn returned(&mut self, start: u64, len: u64) -> bool {
        let hold = self.holds.iter_mut().find(|hold| hold.start == start);
        hold.map(|hold| {
            assert!(hold.returned.is_none(), "region freed twice");
            hold.returned = Some(len);
        })
        .is_some()
    }

    /// Gives back the region at `start` that was taken with `len`.
    pub(crate) fn free(&mut self, start: u64, len: u64) {
        if !self.holds.is_empty() && self.returned(start, len) {
            return;
        }
        let (mut start, mut len) = (start, len);
        if let Some(at) = self.shared.iter().position(|shared| shared.has(start)) {
            self.shared[at].users -= 1;
            if self.shared[at].users > 0 {
                return;
            }
            Shared { start, len, .. } = self.shared.swap_remove(at);
        }
        let len = pages_len(len.max(1));
        assert!(
            start >= self.start && start + len <= self.start + self.len,
            "region outside its arena"
        );
        assert!(self.live > 0, "region freed twice");
        self.live -= 1;
        #[cfg(test)]
        if let Some(journal) = &mut self.journal {
            journal.push((start, len));
        }
        let at = self.free.partition_point(|gap| gap.start < start);
        let joins_next = self.free.get(at).is_some_and(|gap| {
            assert!(start + len <= gap.start, "region freed twice");
            start + len == gap.start
        });
        let joins_previous = at > 0 && {
            let previous = self.free[at - 1];
            assert!(previous.start + previous.len <= start, "region freed twice");
            previous.start + previous.len == start
        };
        match (joins_previous, joins_next) {
            (true, true) => {
                self.free[at - 1].len += len + self.free[at].len;
                self.free.remove(at);
            }
            (true, false) => self.free[at - 1].len += len,
            (false, true) => {
                self.free[at].start = start;
                self.free[at].len += len;
            }
            (false, false) => self.free.insert(at, Extent { start, len }),
        }
    }

    /// Makes the arena longer at its end (the landing arena grows when a larger message is admitted).
    pub(crate) fn grow(&mut self, len: u64) {
        assert!(len >= self.len && len.is_multiple_of(PAGE_LEN));
        let added = Extent {
            start: self.start + self.len,
            len: len - self.len,
        };
        self.len = len;
        match self.free.last_mut() {
            Some(last) if last.start + last.len == added.start => last.len += added.len,
            _ if added.len > 0 => self.free.push(added),
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn whole_arena_can_be_one_region() {
        let mut arena = Arena::new(PAGE_LEN, 1 << 30, 4);
        assert_eq!(arena.allocate(1 << 30), Some(PAGE_LEN));
        assert_eq!(arena.allocate(1), None);
        arena.free(PAGE_LEN, 1 << 30);
        assert_eq!(arena.allocate(1), Some(PAGE_LEN));
    }

    #[test]
    fn a_region_lies_where_it_is_to_lie() {
        let mut arena = Arena::new(0, 8 * PAGE_LEN, 4);
        assert_eq!(
            arena.allocate_in(PAGE_LEN, 4 * PAGE_LEN, u64::MAX),
            Some(4 * PAGE_LEN)
        );
        assert_eq!(arena.allocate_in(4 * PAGE_LEN, 4 * PAGE_LEN, u64::MAX), None);
        assert_eq!(arena.allocate_in(2 * PAGE_LEN, 0, 2 * PAGE_LEN), Some(0));
        assert_eq!(arena.allocate_in(PAGE_LEN, 0, 2 * PAGE_LEN), None);
        assert_eq!(arena.allocate(3 * PAGE_LEN), Some(5 * PAGE_LEN));
        for (start, len) in [(4, 1), (0, 2), (5, 3)] {
            arena.free(start * PAGE_LEN, len * PAGE_LEN);
        }
        assert!(arena.is_whole());
    }

    #[test]
    fn growing_joins_the_last_gap() {
        let mut arena = Arena::new(0, 2 * PAGE_LEN, 4);
        assert_eq!(arena.allocate(PAGE_LEN), Some(0));
        arena.grow(4 * PAGE_LEN);
        assert_eq!(arena.allocate(3 * PAGE_LEN), Some(PAGE_LEN));
    }

    #[test]
    fn a_region_that_is_read_is_free_when_its_reader_is_gone_too() {
        let mut arena = Arena::new(0, 8 * PAGE_LEN, 4);
        let [first, second] = [1, 2].map(|len| arena.allocate(len * PAGE_LEN).unwrap());
        arena.hold(7, first);
        arena.hold(8, second);
        assert!(arena.is_held(first));
        arena.free(first, PAGE_LEN);
        arena.let_go(8);
        arena.free(second, 2 * PAGE_LEN);
        assert_eq!((arena.live(), arena.is_held(second)), (1, false));
        arena.let_go(9);
        arena.let_go(7);
        assert!(arena.is_whole() && arena.live() == 0);
        // A reader whose message was moved.
        let [before, behind] = [1, 2].map(|len| arena.allocate(len * PAGE_LEN).unwrap());
        arena.hold(1, before);
        arena.hold(1, behind);
        arena.free(before, PAGE_LEN);
        arena.free(behind, 2 * PAGE_LEN);
        assert_eq!(arena.live(), 1);
        arena.let_go(1);
        assert!(arena.is_whole());
    }

    #[test]
    #[should_panic(expected = "freed twice")]
    fn a_double_free_is_caught() {
        let mut arena = Arena::new(0, 8 * PAGE_LEN, 4);
        let a = arena.allocate(1).unwrap();
        arena.allocate(1).unwrap();
        arena.free(a, 1);
        arena.free(a, 1);
    }

    proptest! {
        /// Random takes and gives: regions never overlap, and all memory comes back as one gap.
        #[test]
        fn regions_never_overlap(steps in prop::collection::vec((any::<bool>(), 1u64..200_000), 1..200)) {
            let len = 512 * PAGE_LEN;
            let mut arena = Arena::new(0, len, 32);
            let mut live: Vec<(u64, u64)> = Vec::new();
            let capacity = arena.free.capacity();
            for (take, n) in steps {
                if take || live.is_empty() {
                    if let Some(at) = arena.allocate(n) {
                        for &(other, other_len) in &live {
                            prop_assert!(at + pages_len(n) <= other || other + pages_len(other_len) <= at);
                        }
                        live.push((at, n));
                    }
                } else {
                    let (at, n) = live.swap_remove(n as usize % live.len());
                    arena.free(at, n);
                }
            }
            for (at, n) in live.drain(..) {
                arena.free(at, n);
            }
            prop_assert_eq!(&arena.free[..], &[Extent { start: 0, len }]);
            prop_assert_eq!(arena.free.capacity(), capacity);
        }
    }
}
