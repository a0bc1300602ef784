//! Strays: packets that landed, in zero-copy mode, where nothing of their kind was expected: in a spare frame, in a slot of a
//! message that is settled, or in one that belongs to another fragment. Which fragment each is, a manifest tells later.

use std::collections::VecDeque;

use lm_protocol::geometry::Layout;

use super::evidence::Evidence;
use crate::memory::Umem;

/// Strays that are kept; of more the oldest is dropped.
const STRAYS_MAX: usize = 512;

/// A payload that is kept.
#[derive(Clone, Copy, Debug)]
struct Stray {
    digest: u64,
    /// Its digest without its first bytes, where those would be the longer header of a message's first fragment.
    as_first: Option<u64>,
    slot: u16,
}

/// Payloads by digest, the oldest first. A session that loses nothing takes no memory.
#[derive(Debug)]
pub(super) struct Strays {
    slot_len: usize,
    /// Bytes of headers before a payload, and by how many those of a message's first fragment are longer.
    header_len: u32,
    skew: usize,
    bytes: Vec<u8>,
    kept: VecDeque<Stray>,
    free: Vec<u16>,
}

impl Strays {
    /// For payloads of a session with this layout.
    pub(super) fn new(layout: &Layout) -> Strays {
        Strays {
            slot_len: usize::from(layout.payload_len()),
            header_len: u32::from(layout.fragment_header_len(1)),
            skew: usize::from(layout.payload_len() - layout.first_payload_len()),
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

    /// Keeps what landed at a UMEM address, so many bytes. Gives the number of packets that are dropped: this one, or another for it.
    pub(super) fn keep_landed(&mut self, (start, len): (u64, u32), evidence: &Evidence, umem: &Umem) -> u64 {
        let (skew, payload) = (self.skew, start + u64::from(self.header_len));
        let len = len.saturating_sub(self.header_len) as usize;
        if len <= skew || len > self.slot_len {
            return 1;
        }
        // What lies here may be written while it is read: what is kept is measured.
        let dropped = self.keep(|bytes| {
            let bytes = &mut bytes[..len];
            umem.copy_from(payload, bytes);
            let as_first = (skew > 0).then(|| evidence.digest(&bytes[skew..]));
            (evidence.digest(bytes), as_first)
        });
        u64::from(dropped)
    }

    /// Keeps a payload that was taken for another fragment than it is, with its digest. Gives the number of those that are dropped for it.
    pub(super) fn keep_payload(&mut self, payload: &[u8], digest: u64, evidence: &Evidence) -> u64 {
        let as_first = (self.skew > 0).then(|| evidence.digest(&payload[self.skew..]));
        let dropped = self.keep(|bytes| {
            bytes.copy_from_slice(payload);
            (digest, as_first)
        });
        u64::from(dropped)
    }

    /// Keeps a payload, which `fill` writes to the place given. It says the digest, and the other one without the first bytes. Says whether
    /// another was dropped for it.
    fn keep(&mut self, fill: impl FnOnce(&mut [u8]) -> (u64, Option<u64>)) -> bool {
        if self.bytes.is_empty() {
            self.bytes = vec![0; STRAYS_MAX * self.slot_len];
            self.free = (0..STRAYS_MAX as u16).rev().collect();
        }
        let (slot, is_full) = match self.free.pop() {
            Some(slot) => (slot, false),
            None => {
                let oldest = self.kept.pop_front().expect("all are kept when none is free");
                (oldest.slot, true)
            }
        };
        let begin = usize::from(slot) * self.slot_len;
        let (digest, as_first) = fill(&mut self.bytes[begin..begin + self.slot_len]);
        self.kept.push_back(Stray {
            digest,
            as_first,
            slot,
        });
        is_full
    }

    /// Takes out the payload with this digest, if there is one: what lies behind its end is of no meaning.
    pub(super) fn take(&mut self, digest: u64) -> Option<&[u8]> {
        let is_it = |stray: &Stray| stray.digest == digest || stray.as_first == Some(digest);
        let at = self.kept.iter().position(is_it)?;
        let stray = self.kept.remove(at)?;
        self.free.push(stray.slot);
        let begin = usize::from(stray.slot) * self.slot_len;
        let skew = if stray.digest == digest { 0 } else { self.skew };
        Some(&self.bytes[begin + skew..begin + self.slot_len])
    }

    /// Forgets all; how many there were.
    pub(super) fn clear(&mut self) -> u64 {
        let count = self.kept.len() as u64;
        self.free.extend(self.kept.drain(..).map(|stray| stray.slot));
        count
    }
}

#[cfg(test)]
mod tests {
    use lm_protocol::geometry::{LinkShape, Wire};

    use super::*;

    fn strays(wire: Wire) -> Strays {
        Strays::new(&Layout::new(wire, 1500, LinkShape::IPV4).expect("an MTU"))
    }

    #[test]
    fn the_oldest_goes_first() {
        let mut strays = strays(Wire::Lm);
        for number in 0..STRAYS_MAX as u64 + 2 {
            let dropped = strays.keep(|bytes| {
                bytes[..4].copy_from_slice(&(number as u32).to_be_bytes());
                (number, None)
            });
            assert_eq!(dropped, number >= STRAYS_MAX as u64, "{number}");
        }
        assert_eq!(strays.take(0), None);
        assert_eq!(strays.take(1), None);
        for number in [2, 300, STRAYS_MAX as u32 + 1] {
            let bytes = strays.take(u64::from(number)).expect("it is kept");
            assert_eq!(bytes[..4], number.to_be_bytes());
            assert_eq!(strays.take(u64::from(number)), None);
        }
        assert_eq!(strays.len(), STRAYS_MAX as u64 - 3);
        assert_eq!(strays.clear(), STRAYS_MAX as u64 - 3);
        assert!(!strays.keep(|_| (7, None)));
        assert_eq!(strays.len(), 1);
    }

    /// An IP fragment may be a message's first one, which has 8 bytes more of headers.
    #[test]
    fn what_was_kept_as_any_fragment_is_found_as_the_first_one() {
        let mut strays = strays(Wire::IpFrag);
        for as_first in [false, true] {
            strays.keep(|bytes| {
                bytes[..10].copy_from_slice(b"0123456789");
                (1, Some(2))
            });
            let (digest, expected) = if as_first { (2, b"89") } else { (1, b"01") };
            assert_eq!(&strays.take(digest).expect("it is kept")[..2], expected);
            assert_eq!(strays.len(), 0);
        }
    }
}
