//! Digests of the fragments of all messages in an arena.

use crate::arena::PAGE_LEN;

/// Digests that are kept for each page of an arena: one for each fragment that fits.
const DIGESTS_PER_PAGE: u64 = 8;
/// The shortest payload of a fragment with which that is enough.
pub(crate) const PAYLOAD_LEN_MIN: u16 = (PAGE_LEN / DIGESTS_PER_PAGE) as u16;

/// Digests of the fragments of all messages in an arena. A message's begin where its memory does: 8 bytes for each 512, taken
/// once, so that a message takes none.
#[derive(Debug)]
pub(crate) struct FragmentDigests {
    arena_start: u64,
    digests: Vec<u64>,
}

impl FragmentDigests {
    /// For an arena of `arena_len` bytes at `arena_start`.
    pub(crate) fn new(arena_start: u64, arena_len: u64) -> FragmentDigests {
        FragmentDigests {
            arena_start,
            digests: vec![0; (arena_len / PAGE_LEN * DIGESTS_PER_PAGE) as usize],
        }
    }

    /// The arena has grown to `arena_len` bytes.
    pub(crate) fn grow(&mut self, arena_len: u64) {
        self.digests
            .resize((arena_len / PAGE_LEN * DIGESTS_PER_PAGE) as usize, 0);
    }

    fn first_of(&self, memory: u64) -> usize {
        ((memory - self.arena_start) / u64::from(PAYLOAD_LEN_MIN)) as usize
    }

    /// Keeps the digest of fragment `index` of the message whose memory begins at UMEM address `memory`.
    #[inline]
    pub(crate) fn set(&mut self, memory: u64, index: u32, digest: u64) {
        let at = self.first_of(memory) + index as usize;
        if at >= self.digests.len() {
            // Not since `grow` is told; without this branch the compiler makes something else of the rounds, and an answer to a small
            // message takes 22 instructions more (2300 to 2322).
            self.digests.resize(at + 1, 0);
        }
        self.digests[at] = digest;
    }

    /// Those of its `count` fragments.
    pub(crate) fn of(&self, memory: u64, count: u32) -> &[u64] {
        let first = self.first_of(memory);
        &self.digests[first..first + count as usize]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_side_by_side_have_digests_of_their_own() {
        let mut digests = FragmentDigests::new(3 * PAGE_LEN, 4 * PAGE_LEN);
        // As many fragments of the shortest payload as fit each message's memory.
        let messages = [(3, 1u32), (4, 2), (6, 1)];
        for (page, pages) in messages {
            for index in 0..pages * DIGESTS_PER_PAGE as u32 {
                digests.set(page * PAGE_LEN, index, page << 32 | u64::from(index));
            }
        }
        for (page, pages) in messages {
            let count = pages * DIGESTS_PER_PAGE as u32;
            let expected: Vec<u64> = (0..u64::from(count)).map(|index| page << 32 | index).collect();
            assert_eq!(digests.of(page * PAGE_LEN, count), expected);
        }
        // An arena that has grown, and a message of which a fragment is here.
        digests.grow(8 * PAGE_LEN);
        digests.set(9 * PAGE_LEN, 0, 5);
        assert_eq!(digests.of(9 * PAGE_LEN, 3), [5, 0, 0]);
        assert_eq!(digests.of(3 * PAGE_LEN, 1), [3 << 32]);
    }
}
