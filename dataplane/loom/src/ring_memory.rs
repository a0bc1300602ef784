//! The twin of `dataplane/src/ring_memory.rs` over loom's memory.

use std::marker::PhantomData;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use loom::cell::UnsafeCell;
use loom::sync::atomic::AtomicU32;

use crate::weak::{self, Access};

/// Where a ring's parts lie in its memory, in bytes. Here only the entries' place is looked at.
#[allow(dead_code, reason = "as in the twin")]
#[derive(Clone, Copy, Debug)]
pub(crate) struct RingOffsets {
    pub(crate) producer: usize,
    pub(crate) consumer: usize,
    pub(crate) flags: usize,
    pub(crate) entries: usize,
}

/// A word that both parties access.
#[derive(Debug)]
pub(crate) struct Word {
    value: AtomicU32,
    load: Option<Access>,
    store: Option<Access>,
}

impl Word {
    pub(crate) fn load(&self, asked: Ordering) -> u32 {
        self.value.load(weak::ordering(self.load, asked))
    }

    pub(crate) fn store(&self, value: u32, asked: Ordering) {
        self.value.store(value, weak::ordering(self.store, asked));
    }
}

pub(crate) fn fence(ordering: Ordering) {
    if !weak::is_weak(Access::WakeupFence) {
        loom::sync::atomic::fence(ordering);
    }
}

/// The memory of one ring.
#[derive(Debug)]
pub(crate) struct RingMemory {
    producer: Word,
    consumer: Word,
    flags: Word,
    /// The entries, 8 bytes each; an entry takes one or two.
    entries: Vec<UnsafeCell<u64>>,
}

impl RingMemory {
    pub(crate) fn in_memory(len: usize, offsets: RingOffsets, start: u32) -> RingMemory {
        let word = |value, load, store| Word {
            value: AtomicU32::new(value),
            load,
            store,
        };
        let entries = (len - offsets.entries) / 8;
        RingMemory {
            producer: word(start, Some(Access::ProducerLoad), Some(Access::ProducerStore)),
            consumer: word(start, Some(Access::ConsumerLoad), Some(Access::ConsumerStore)),
            flags: word(0, None, None),
            entries: (0..entries).map(|_| UnsafeCell::new(0)).collect(),
        }
    }
}

/// The parts of a ring that both parties access.
pub(crate) struct Shared<E> {
    memory: Arc<RingMemory>,
    mask: u32,
    _entry: PhantomData<E>,
}

impl<E: Copy> Shared<E> {
    /// # Safety
    ///
    /// None here; the twin has its own.
    pub(crate) unsafe fn new(memory: Arc<RingMemory>, _: RingOffsets, len: u32, _: &str) -> Shared<E> {
        assert!(len.is_power_of_two() && size_of::<E>().is_multiple_of(8) && align_of::<E>() <= 8);
        assert_eq!(memory.entries.len(), len as usize * size_of::<E>() / 8);
        Shared {
            memory,
            mask: len - 1,
            _entry: PhantomData,
        }
    }

    pub(crate) fn len(&self) -> u32 {
        self.mask + 1
    }

    pub(crate) fn producer(&self) -> &Word {
        &self.memory.producer
    }

    pub(crate) fn consumer(&self) -> &Word {
        &self.memory.consumer
    }

    pub(crate) fn flags(&self) -> &Word {
        &self.memory.flags
    }

    fn cells(&self, index: u32) -> &[UnsafeCell<u64>] {
        let words = size_of::<E>() / 8;
        &self.memory.entries[(index & self.mask) as usize * words..][..words]
    }

    /// # Safety
    ///
    /// None here: loom panics when the other end may access the slot.
    pub(crate) unsafe fn write(&self, index: u32, entry: E) {
        let from = (&raw const entry).cast::<u64>();
        for (at, cell) in self.cells(index).iter().enumerate() {
            // SAFETY: `entry` has as many words as there are cells (asserted in `new`); loom hands out the cell's address
            // only after it has found nobody else there.
            cell.with_mut(|to| unsafe { *to = from.add(at).read_unaligned() });
        }
    }

    /// # Safety
    ///
    /// Any bytes are a valid `E`.
    pub(crate) unsafe fn read(&self, index: u32) -> E {
        let mut entry = [0u64; 2];
        for (word, cell) in entry.iter_mut().zip(self.cells(index)) {
            // SAFETY: as in `write`.
            *word = cell.with(|from| unsafe { *from });
        }
        // SAFETY: `E` is one or two words, no more aligned than they are, and valid with any bytes (the caller's promise).
        unsafe { entry.as_ptr().cast::<E>().read() }
    }
}
