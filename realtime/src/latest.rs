//! The last so many messages, from one thread to another, neither of which ever waits: the oldest gives way.
//!
//! A queue in which a place is claimed first and filled then has a thread wait for another one that was interrupted between the two, for ever if
//! that has the lower priority on the same core. Here a side fills an entry that it alone has, and exchanges it for that of a slot in one
//! step: whoever takes an entry out of a slot has it until he puts it into one. Each side has one in hand.

use std::sync::Arc;

use crate::entries::{AtomicU64, Entry, Ordering};

/// What a slot says: which entry it has, the number of the message that was put there last, and whether that is still in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Slot {
    number: u32,
    entry: u32,
    is_full: bool,
}

impl Slot {
    fn pack(self) -> u64 {
        u64::from(self.number) << 32 | u64::from(self.entry) << 1 | u64::from(self.is_full)
    }

    fn unpack(word: u64) -> Slot {
        Slot {
            number: (word >> 32) as u32,
            entry: (word as u32) >> 1,
            is_full: word & 1 == 1,
        }
    }
}

#[derive(Debug)]
struct Shared<T> {
    slots: Box<[AtomicU64]>,
    entries: Box<[Entry<T>]>,
}

impl<T> Shared<T> {
    fn slot(&self, number: u32) -> &AtomicU64 {
        &self.slots[number as usize % self.slots.len()]
    }

    /// Numbers are counted up to a multiple of the slots, so that each is always the same slot's.
    fn behind(&self, number: u32, by: i64) -> u32 {
        let slots = self.slots.len() as i64;
        let all = (1 << 32) / slots * slots;
        (i64::from(number) + by).rem_euclid(all) as u32
    }
}

/// The side that puts messages in.
#[derive(Debug)]
pub(crate) struct Writer<T> {
    shared: Arc<Shared<T>>,
    /// The number of the next message, and the entry that is in hand, which is empty.
    next: u32,
    entry: u32,
}

/// The side that takes them.
#[derive(Debug)]
pub(crate) struct Reader<T> {
    shared: Arc<Shared<T>>,
    next: u32,
    entry: u32,
}

/// Both sides of a queue of `keep` messages, at least one. All memory is taken here.
pub(crate) fn latest<T>(keep: usize) -> (Writer<T>, Reader<T>) {
    begun(keep, 0)
}

/// As if `first` messages had been put in and taken.
pub(crate) fn begun<T>(keep: usize, first: u32) -> (Writer<T>, Reader<T>) {
    assert!((1..1 << 30).contains(&keep), "a queue of {keep} messages");
    let slot = |entry| Slot {
        number: first,
        entry,
        is_full: false,
    };
    let keep = keep as u32;
    let shared = Arc::new(Shared {
        slots: (0..keep)
            .map(|entry| AtomicU64::new(slot(entry).pack()))
            .collect(),
        entries: (0..keep + 2).map(|_| Entry::new(None)).collect(),
    });
    let writer = Writer {
        shared: Arc::clone(&shared),
        next: first,
        entry: keep,
    };
    let reader = Reader {
        shared,
        next: first,
        entry: keep + 1,
    };
    (writer, reader)
}

impl<T> Writer<T> {
    /// Puts a message in. If as many wait as are kept, the oldest comes back.
    pub(crate) fn put(&mut self, message: T) -> Option<T> {
        let shared = &*self.shared;
        // SAFETY: the entry is in hand.
        unsafe { shared.entries[self.entry as usize].replace(Some(message)) };
        let full = Slot {
            number: self.next,
            entry: self.entry,
            is_full: true,
        };
        // Release: the message is in the entry before the other side can have that. Acquire: what the other side took out of the entry that
        // comes into hand is out.
        let before = Slot::unpack(shared.slot(self.next).swap(full.pack(), Ordering::AcqRel));
        self.entry = before.entry;
        self.next = shared.behind(self.next, 1);
        // SAFETY: the entry is in hand.
        unsafe { shared.entries[self.entry as usize].replace(None) }
    }
}

impl<T> Reader<T> {
    fn slot(&self) -> Slot {
        // Acquire: behind a message that is seen here no slot looks as before it.
        Slot::unpack(self.shared.slot(self.next).load(Ordering::Acquire))
    }

    /// Whether a message waits.
    pub(crate) fn has_some(&self) -> bool {
        self.slot().is_full
    }

    /// The oldest message that waits.
    pub(crate) fn take(&mut self) -> Option<T> {
        let shared = &*self.shared;
        loop {
            let there = self.slot();
            if !there.is_full {
                return None;
            }
            if there.number != self.next {
                // Others have come meanwhile: the oldest is the one that stands behind this one.
                self.next = shared.behind(there.number, 1 - shared.slots.len() as i64);
                continue;
            }
            let empty = Slot {
                entry: self.entry,
                is_full: false,
                ..there
            };
            let exchanged = shared.slot(self.next).compare_exchange(
                there.pack(),
                empty.pack(),
                // As in `put`.
                Ordering::AcqRel,
                Ordering::Acquire,
            );
            // A newer one took its place in this moment: it has moved on, and nobody waits for it.
            if exchanged.is_err() {
                continue;
            }
            self.entry = there.entry;
            self.next = shared.behind(self.next, 1);
            // SAFETY: the entry is in hand.
            return unsafe { shared.entries[self.entry as usize].replace(None) };
        }
    }
}
