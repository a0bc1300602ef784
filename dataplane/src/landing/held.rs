//! Fragments aside: they wait for their places to be free.

/// Fragments that may be held aside at once; one more is dropped and asked for again.
const HELD_MAX: usize = 512;
/// The same in bytes, where fragments are long.
const HELD_LEN_MAX: usize = 4 << 20;

/// Where a fragment is.
#[derive(Clone, Copy, Debug)]
pub(super) enum Source<'a> {
    Umem(u64),
    Held(u16),
    Bytes(&'a [u8]),
}

/// A fragment that waits for its place to be free.
#[derive(Clone, Copy, Debug)]
pub(super) struct HeldFragment {
    pub(super) number: u32,
    pub(super) position: u32,
    pub(super) slot: u16,
    len: u16,
}

/// Fragments aside, and their bytes.
#[derive(Debug, Default)]
pub(super) struct Held {
    fragments: Vec<HeldFragment>,
    bytes: Vec<u8>,
    slot_len: usize,
    free: Vec<u16>,
}

impl Held {
    pub(super) fn is_empty(&self) -> bool {
        self.fragments.is_empty()
    }

    pub(super) fn is_full(&self) -> bool {
        self.free.is_empty() && !self.fragments.is_empty()
    }

    /// Those that are here, in no order.
    pub(super) fn get(&self, at: usize) -> Option<HeldFragment> {
        self.fragments.get(at).copied()
    }

    pub(super) fn slot(&self, slot: u16, len: u16) -> &[u8] {
        &self.bytes[usize::from(slot) * self.slot_len..][..usize::from(len)]
    }

    /// Positions and bytes of a message's fragments.
    pub(super) fn of(&self, number: u32) -> impl Iterator<Item = (u32, &[u8])> {
        (self.fragments.iter())
            .filter(move |fragment| fragment.number == number)
            .map(|fragment| (fragment.position, self.slot(fragment.slot, fragment.len)))
    }

    /// Forgets the one at this place of the list; the last one takes it.
    pub(super) fn remove(&mut self, at: usize) {
        self.free.push(self.fragments.swap_remove(at).slot);
    }

    /// Forgets a fragment. `false`: it is not here.
    pub(super) fn forget(&mut self, number: u32, position: u32) -> bool {
        let is_it = |fragment: &HeldFragment| (fragment.number, fragment.position) == (number, position);
        let found = self.fragments.iter().position(is_it);
        found.inspect(|&at| self.remove(at)).is_some()
    }

    /// Forgets a message's fragments.
    pub(super) fn forget_all(&mut self, number: u32) {
        let Held { fragments, free, .. } = self;
        fragments.retain(|fragment| {
            let stays = fragment.number != number;
            if !stays {
                free.push(fragment.slot);
            }
            stays
        });
    }

    /// Memory for one more, which is here from now on. A session that loses nothing takes none. `None`: there is no room.
    pub(super) fn add(&mut self, number: u32, position: u32, len: u16, slot_len: usize) -> Option<&mut [u8]> {
        if self.bytes.is_empty() {
            let count = (HELD_LEN_MAX / slot_len.max(1)).min(HELD_MAX);
            self.slot_len = slot_len;
            self.bytes = vec![0; count * slot_len];
            self.free = (0..count as u16).rev().collect();
            self.fragments.reserve(count);
        }
        let slot = self.free.pop()?;
        self.fragments.push(HeldFragment {
            number,
            position,
            slot,
            len,
        });
        Some(&mut self.bytes[usize::from(slot) * self.slot_len..][..usize::from(len)])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fragments_aside_are_bounded_in_number_and_bytes() {
        for (slot_len, most) in [(64, HELD_MAX), (1448, HELD_MAX), (60_000, HELD_LEN_MAX / 60_000)] {
            let mut held = Held::default();
            for life in 0..3 {
                let added = (0..5000).take_while(|&n| held.add(life, n, 64, slot_len).is_some());
                assert_eq!(added.count(), most);
                assert!(held.is_full() && held.fragments.len() == most);
                assert_eq!(held.bytes.len(), most * slot_len);
                held.forget_all(life);
                assert!(held.is_empty() && held.free.len() == most);
            }
        }
    }
}
