//! The twin of `ebpf/src/shared.rs` over loom's atomics, for the few words of a log that the models use.

use std::io;
use std::mem::offset_of;
use std::os::fd::BorrowedFd;
use std::sync::atomic::Ordering;

use loom::sync::atomic::{AtomicU32, AtomicU64};

use crate::layout::{LOG_ENTRIES, LogEntryRow, LogMap};
use crate::verdict::{Counters, Verdict};
use crate::weak::{self, Access};

/// Slots of the log that exist here: those around the end of its array.
const SLOTS: [u32; 3] = [LOG_ENTRIES - 1, 0, 1];

#[derive(Debug)]
pub(crate) struct SharedMemory {
    words: Vec<(usize, AtomicU32)>,
    producer: AtomicU64,
    posted: AtomicU64,
}

impl SharedMemory {
    pub(crate) fn private(len: usize) -> io::Result<SharedMemory> {
        assert_eq!(len, size_of::<LogMap>());
        let entries = SLOTS.iter().flat_map(|&slot| {
            let entry = offset_of!(LogMap, entries) + slot as usize * size_of::<LogEntryRow>();
            (0..4).map(move |word| entry + 4 * word)
        });
        let words = entries.chain([offset_of!(LogMap, message_limits)]);
        Ok(SharedMemory {
            words: words.map(|at| (at, AtomicU32::new(0))).collect(),
            producer: AtomicU64::new(0),
            posted: AtomicU64::new(0),
        })
    }

    fn word(&self, offset: usize) -> &AtomicU32 {
        let word = self.words.iter().find(|(at, _)| *at == offset);
        &word.expect("a word that the models use").1
    }

    /// The counter at an offset, and which accesses to it order something.
    fn counter(&self, offset: usize) -> (&AtomicU64, Access, Access) {
        if offset == offset_of!(LogMap, producer) {
            (&self.producer, Access::LogProducerLoad, Access::LogProducerStore)
        } else {
            assert_eq!(offset, offset_of!(LogMap, posted));
            (&self.posted, Access::PostedLoad, Access::PostedStore)
        }
    }

    pub(crate) fn load_u32(&self, offset: usize, ordering: Ordering) -> u32 {
        self.word(offset).load(ordering)
    }

    pub(crate) fn load_u32s<const N: usize>(&self, offset: usize, ordering: Ordering) -> [u32; N] {
        std::array::from_fn(|at| self.load_u32(offset + 4 * at, ordering))
    }

    pub(crate) fn store_u32(&self, offset: usize, value: u32, ordering: Ordering) {
        self.word(offset).store(value, ordering);
    }

    pub(crate) fn load_u64(&self, offset: usize, ordering: Ordering) -> u64 {
        let (counter, access, _) = self.counter(offset);
        counter.load(weak::ordering(Some(access), ordering))
    }

    pub(crate) fn store_u64(&self, offset: usize, value: u64, ordering: Ordering) {
        let (counter, _, access) = self.counter(offset);
        counter.store(value, weak::ordering(Some(access), ordering));
    }

    /// Only a gate of the kernel's has a map.
    pub(crate) fn of_map(_: BorrowedFd<'_>, _: usize) -> io::Result<SharedMemory> {
        Err(io::ErrorKind::Unsupported.into())
    }

    // Counters order nothing (Relaxed), and no model looks at them.

    pub(crate) fn add_one(&self, _: usize) {
        panic!("not modelled");
    }

    pub(crate) fn add_counters(&self, _: usize, _: &mut Counters) {
        panic!("not modelled");
    }

    pub(crate) fn load_counter(&self, _: usize, _: Verdict) -> u64 {
        panic!("not modelled");
    }

    pub(crate) fn load_passed(&self, _: usize) -> u64 {
        panic!("not modelled");
    }

    pub(crate) fn count(&self, _: usize, _: Verdict) {
        panic!("not modelled");
    }
}
