//! Zero-copy mode: which entries the device holds.
//!
//! A device drops a packet that finds none in its own ring, and counts it nowhere that could be relied on. Its driver moves entries
//! there from the fill ring in its NAPI poll alone: behind the packets that the poll delivered, or when it was woken, an
//! interrupt later. So credit is given for what the driver has surely taken. The kernel publishes that late (`xsk_flush` of
//! `net/xdp/xsk.c`, with the next packets); the rest follows from packets that came, and from the wake-up flag.

use crate::port::RxQueue;

/// Drivers wait until a part of their ring is free before they take entries again: 16 entries (`igb`), 32 (`virtio-net`), a quarter of
/// the ring (`ice`). None waits until less than half of it is in use.
const HELD_PART: u32 = 2;
/// A poll shows its packets before it takes entries, and says last whether it must be woken: microseconds.
const POLL_NS: u64 = 50_000;

/// What is known of it; positions count as [`Entries::posted`](super::entries::Entries) does.
#[derive(Clone, Copy, Debug)]
pub(super) struct Card {
    /// Entries that the driver has surely taken.
    taken: u64,
    /// At the last look.
    posted: u64,
    received: u64,
    changed_ns: u64,
}

impl Card {
    /// A device that holds nothing.
    pub(super) const fn at(position: u64) -> Card {
        Card {
            taken: position,
            posted: position,
            received: position,
            changed_ns: 0,
        }
    }

    /// To be asked before entries are posted: so many are `posted`, and `received` of them used. `ring_len`: of the device's own ring, in
    /// entries.
    pub(super) fn look(
        &mut self,
        (posted, received): (u64, u64),
        queue: &mut impl RxQueue,
        ring_len: u32,
        now_ns: u64,
    ) {
        let unread = queue.untaken();
        let ahead = posted.min(received + u64::from((ring_len / HELD_PART).max(1)));
        self.taken = self
            .taken
            .max(received)
            .max(posted.saturating_sub(unread.count.into()));
        if received != self.received {
            self.taken = self.taken.max(ahead);
        } else if posted == self.posted && !unread.needs_wakeup {
            // It held none and would ask to be woken if it still did.
            if self.taken == received && now_ns.saturating_sub(self.changed_ns) >= POLL_NS {
                self.taken = ahead;
            }
            return;
        }
        (self.posted, self.received, self.changed_ns) = (posted, received, now_ns);
    }

    /// Entries that the device surely holds, of which so many are used.
    pub(super) fn ahead(&self, received: u64) -> u32 {
        self.taken.saturating_sub(received) as u32
    }
}
