//! Who of the cluster is known, in which life, and what was heard already: protection against replays.
//!
//! A message is accepted when its sender's *boot id* is the one that is known of that address and its *sequence* was not seen:
//! a bitmap remembers the last 1024 (RFC 6479), so that reordering is no replay. The first message of a life that is not known
//! must prove that it is not an old one. It does by *echoing a challenge*:
//!
//! ```text
//!  A                                                 B
//!    ── LM_REQ, challenge a ───────────────────────▶    B does not know A's life: answers, and changes nothing
//!    ◀── LM_HELLO, challenge b, echo a ──────────────   A knows B's life from here on
//!    ── LM_REQ, echo b ────────────────────────────▶    B knows A's life from here on, and takes the request
//! ```
//!
//! So both sides survive a restart of either at the price of one or two round trips, with no clock and nothing on a disk. A challenge
//! is computed from the key, our own boot id, the peer's address and its *generation*, and is not stored: a replay of an unknown life
//! costs an answer, and no state. The generation is a fresh number each time a life is taken up (and for all strangers each time
//! one is forgotten), so that no echo is good twice.

use super::seal::{ClusterKey, SealHeader};
use crate::time::Time;
use alloc::collections::BTreeMap;
use core::net::SocketAddrV4;

/// How many sequence numbers back a message may be late.
pub const WINDOW_LEN: u64 = 1024;
const WORDS: usize = (WINDOW_LEN / 64) as usize;

/// Which sequence numbers were seen.
#[derive(Clone, Debug)]
struct Window {
    highest: u64,
    seen: [u64; WORDS],
}

impl Window {
    fn new(first: u64) -> Window {
        let mut window = Window {
            highest: first,
            seen: [0; WORDS],
        };
        // Nothing before the first is taken: it may have been seen before its life was forgotten.
        window.seen = [u64::MAX; WORDS];
        window
    }

    /// Whether `sequence` is new; remembers it.
    fn take(&mut self, sequence: u64) -> bool {
        if sequence > self.highest {
            let first_new = (self.highest + 1).max(sequence.saturating_sub(WINDOW_LEN - 1));
            for skipped in first_new..=sequence {
                self.clear(skipped);
            }
            self.highest = sequence;
        } else if self.highest - sequence >= WINDOW_LEN {
            return false;
        }
        let (word, bit) = place(sequence);
        let is_new = self.seen[word] & bit == 0;
        self.seen[word] |= bit;
        is_new
    }

    fn clear(&mut self, sequence: u64) {
        let (word, bit) = place(sequence);
        self.seen[word] &= !bit;
    }
}

fn place(sequence: u64) -> (usize, u64) {
    ((sequence % WINDOW_LEN / 64) as usize, 1 << (sequence % 64))
}

/// One host, in one life.
#[derive(Clone, Debug)]
struct Peer {
    boot_id: u64,
    window: Window,
    generation: u64,
    /// The challenge that goes back with every message to it.
    echo: u64,
    heard: Time,
    /// Its claims up to this number are over (LM_REMOVE_ADDR).
    removed: u64,
}

/// What a message turned out to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Arrival {
    /// New, from a life that was known.
    Known,
    /// New, and the first one of a life.
    FirstOfLife,
    /// Seen before, or too old to tell.
    Replayed,
    /// Of a life that is not known, without an echo that proves it.
    Stranger,
}

/// The hosts that are known.
#[derive(Clone, Debug)]
pub(super) struct Peers {
    known: BTreeMap<SocketAddrV4, Peer>,
    capacity: usize,
    next_generation: u64,
    strangers_generation: u64,
}

impl Peers {
    pub(super) fn new(capacity: usize) -> Peers {
        Peers {
            known: BTreeMap::new(),
            capacity: capacity.max(1),
            next_generation: 1,
            strangers_generation: 0,
        }
    }

    pub(super) fn len(&self) -> usize {
        self.known.len()
    }

    /// The challenge that a message of an unknown life of `peer` must echo.
    pub(super) fn challenge(&self, key: &ClusterKey, boot_id: u64, peer: SocketAddrV4) -> u64 {
        let generation = self
            .known
            .get(&peer)
            .map_or(self.strangers_generation, |peer| peer.generation);
        key.nonce(boot_id, peer, generation)
    }

    /// Whether messages of some life of `peer` are taken already.
    pub(super) fn is_known(&self, peer: SocketAddrV4) -> bool {
        self.known.contains_key(&peer)
    }

    /// What to echo to `peer`.
    pub(super) fn echo(&self, peer: SocketAddrV4) -> u64 {
        self.known.get(&peer).map_or(0, |peer| peer.echo)
    }

    /// An authentic message came in. Changes nothing unless it is [`Arrival::Known`] or [`Arrival::FirstOfLife`].
    pub(super) fn arrive(
        &mut self,
        key: &ClusterKey,
        our_boot_id: u64,
        now: Time,
        from: SocketAddrV4,
        header: &SealHeader,
    ) -> Arrival {
        if let Some(peer) = self
            .known
            .get_mut(&from)
            .filter(|peer| peer.boot_id == header.boot_id)
        {
            if !peer.window.take(header.sequence) {
                return Arrival::Replayed;
            }
            peer.heard = now;
            if header.challenge != 0 {
                peer.echo = header.challenge;
            }
            return Arrival::Known;
        }
        if header.echo == 0 || header.echo != self.challenge(key, our_boot_id, from) {
            return Arrival::Stranger;
        }
        if !self.known.contains_key(&from) && self.known.len() >= self.capacity {
            self.forget_one();
        }
        let generation = self.fresh_generation();
        let peer = Peer {
            boot_id: header.boot_id,
            window: Window::new(header.sequence),
            generation,
            echo: header.challenge,
            heard: now,
            removed: 0,
        };
        self.known.insert(from, peer);
        Arrival::FirstOfLife
    }

    /// The host said LM_REMOVE_ADDR: claims up to `number` are over.
    pub(super) fn removed(&mut self, from: SocketAddrV4, number: u64) {
        if let Some(peer) = self.known.get_mut(&from) {
            peer.removed = peer.removed.max(number);
        }
    }

    /// Whether the claim is over already: what says so may overtake the claim.
    pub(super) fn is_removed(&self, from: SocketAddrV4, number: u64) -> bool {
        self.known.get(&from).is_none_or(|peer| number <= peer.removed)
    }

    fn forget_one(&mut self) {
        let longest_silent = self.known.iter().min_by_key(|(_, peer)| peer.heard);
        if let Some(&address) = longest_silent.map(|(address, _)| address) {
            self.known.remove(&address);
            // What it echoed to us must not be good again.
            self.strangers_generation = self.fresh_generation();
        }
    }

    fn fresh_generation(&mut self) -> u64 {
        let generation = self.next_generation;
        self.next_generation += 1;
        generation
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    #[test]
    fn a_window_takes_each_number_once() {
        let mut window = Window::new(10);
        assert!(!window.take(10) && !window.take(9) && !window.take(0));
        assert!(window.take(12) && window.take(11));
        assert!(!window.take(12) && !window.take(11));
        assert!(window.take(12 + WINDOW_LEN));
        assert!(!window.take(12), "too far behind to tell");
        assert!(window.take(13), "just within the window");
        assert!(window.take(u64::MAX) && !window.take(u64::MAX));
        assert!(window.take(u64::MAX - WINDOW_LEN + 1) && !window.take(u64::MAX - WINDOW_LEN));
    }

    proptest! {
        #[test]
        fn a_window_is_a_set_as_far_as_it_reaches(numbers in prop::collection::vec(2u64..5000, 1..600)) {
            let mut window = Window::new(1);
            let mut seen = BTreeSet::from([1]);
            for number in numbers {
                let highest = *seen.last().unwrap();
                let expected = number + WINDOW_LEN > highest && !seen.contains(&number);
                prop_assert_eq!(window.take(number), expected, "{} after {}", number, highest);
                seen.insert(number);
            }
        }
    }

    fn header(boot_id: u64, sequence: u64, echo: u64) -> SealHeader {
        SealHeader {
            boot_id,
            sequence,
            echo,
            ..SealHeader::default()
        }
    }

    /// An attacker who recorded everything cannot bring an old life back, whatever was forgotten in between.
    #[test]
    fn an_old_life_stays_dead() {
        let key = ClusterKey::new(&[7; 32]).unwrap();
        let (a, b) = ("10.0.0.1:1".parse().unwrap(), "10.0.0.2:1".parse().unwrap());
        let mut peers = Peers::new(1);
        let mut arrive = |from, header: SealHeader| {
            let challenge = peers.challenge(&key, 99, from);
            (peers.arrive(&key, 99, Time::ZERO, from, &header), challenge)
        };
        let (arrival, challenge) = arrive(a, header(1, 5, 0));
        assert_eq!(arrival, Arrival::Stranger);
        let first = header(1, 6, challenge);
        assert_eq!(arrive(a, first).0, Arrival::FirstOfLife);
        assert_eq!(arrive(a, first).0, Arrival::Replayed);
        assert_eq!(
            arrive(a, header(1, 5, 0)).0,
            Arrival::Replayed,
            "older than the first"
        );
        // The second life, and the first one's messages again.
        let (arrival, challenge) = arrive(a, header(2, 1, 0));
        assert_eq!(arrival, Arrival::Stranger);
        let second = header(2, 2, challenge);
        assert_eq!(arrive(a, second).0, Arrival::FirstOfLife);
        assert_eq!(arrive(a, first).0, Arrival::Stranger);
        assert_eq!(arrive(a, header(1, 7, 0)).0, Arrival::Stranger);
        // Somebody else takes the only place.
        let (_, challenge) = arrive(b, header(3, 1, 0));
        let third = header(3, 2, challenge);
        assert_eq!(arrive(b, third).0, Arrival::FirstOfLife);
        for old in [first, second] {
            assert_eq!(arrive(a, old).0, Arrival::Stranger);
        }
        // And back again: what proved itself once proves nothing now.
        let (_, challenge) = arrive(a, header(2, 3, 0));
        assert_eq!(arrive(a, header(2, 4, challenge)).0, Arrival::FirstOfLife);
        assert_eq!(arrive(b, third).0, Arrival::Stranger);
        assert_eq!(arrive(a, second).0, Arrival::Replayed);
    }
}
