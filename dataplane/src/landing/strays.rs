//! Strays: packets that landed, in zero-copy mode, where nothing of their kind was expected: in a spare frame, in a slot of a
//! message that is settled, or in one that belongs to another fragment. Which fragment each is, a manifest tells later.

use std::collections::VecDeque;

/// Strays that are kept; of more the oldest is dropped.
const STRAYS_MAX: usize = 512;

/// Payloads by digest, the oldest first. A session that loses nothing takes no memory.
#[derive(Debug)]
pub(super) struct Strays {
    slot_len: usize,
    bytes: Vec<u8>,
    kept: VecDeque<(u64, u16)>,
    free: Vec<u16>,
}

impl Strays {
    /// For payloads of at most `payload_len` bytes.
    pub(super) fn new(payload_len: u16) -> Strays {
        Strays {
            slot_len: usize::from(payload_len),
            bytes: Vec::new(),
            kept: VecDeque::new(),
            free: Vec::new(),
        }
    }

    /// How many are kept.
    #[cfg(test)]
    pub(super) fn len(&self) -> u64 {
        self.kept.len() as u64
    }

    /// Keeps a payload with this digest, which the caller writes to the place given. Says whether another was dropped for it.
    pub(super) fn keep(&mut self, digest: u64) -> (&mut [u8], bool) {
        if self.bytes.is_empty() {
            self.bytes = vec![0; STRAYS_MAX * self.slot_len];
            self.free = (0..STRAYS_MAX as u16).rev().collect();
        }
        let (slot, is_full) = match self.free.pop() {
            Some(slot) => (slot, false),
            None => {
                let (_, oldest) = self.kept.pop_front().expect("all are kept when none is free");
                (oldest, true)
            }
        };
        self.kept.push_back((digest, slot));
        let begin = usize::from(slot) * self.slot_len;
        (&mut self.bytes[begin..begin + self.slot_len], is_full)
    }

    /// Takes out the payload with this digest, if there is one: what lies behind its end is of no meaning.
    pub(super) fn take(&mut self, digest: u64) -> Option<&[u8]> {
        let at = self.kept.iter().position(|(known, _)| *known == digest)?;
        let (_, slot) = self.kept.remove(at)?;
        self.free.push(slot);
        let begin = usize::from(slot) * self.slot_len;
        Some(&self.bytes[begin..begin + self.slot_len])
    }

    /// Forgets all; how many there were.
    pub(super) fn clear(&mut self) -> u64 {
        let count = self.kept.len() as u64;
        self.free.extend(self.kept.drain(..).map(|(_, slot)| slot));
        count
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_goes_first() {
        let mut strays = Strays::new(4);
        for number in 0..STRAYS_MAX as u64 + 2 {
            let (bytes, dropped) = strays.keep(number);
            bytes.copy_from_slice(&(number as u32).to_be_bytes());
            assert_eq!(dropped, number >= STRAYS_MAX as u64, "{number}");
        }
        assert_eq!(strays.take(0), None);
        assert_eq!(strays.take(1), None);
        for number in [2, 300, STRAYS_MAX as u32 + 1] {
            assert_eq!(strays.take(u64::from(number)), Some(&number.to_be_bytes()[..]));
            assert_eq!(strays.take(u64::from(number)), None);
        }
        assert_eq!(strays.len(), STRAYS_MAX as u64 - 3);
        assert_eq!(strays.clear(), STRAYS_MAX as u64 - 3);
        assert!(!strays.keep(7).1);
        assert_eq!(strays.len(), 1);
    }
}
