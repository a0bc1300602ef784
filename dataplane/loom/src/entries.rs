//! What `latest.rs` finds at the root of its own crate, over loom's atomics and cells.

pub(crate) use std::sync::atomic::Ordering;

use loom::cell::UnsafeCell;
use loom::sync::atomic;

use crate::weak::{Access, ordering};

#[derive(Debug)]
pub(crate) struct AtomicU64(atomic::AtomicU64);

impl AtomicU64 {
    pub(crate) fn new(value: u64) -> AtomicU64 {
        AtomicU64(atomic::AtomicU64::new(value))
    }

    pub(crate) fn load(&self, order: Ordering) -> u64 {
        self.0.load(order)
    }

    pub(crate) fn swap(&self, value: u64, order: Ordering) -> u64 {
        self.0.swap(value, ordering(Some(Access::LatestPut), order))
    }

    pub(crate) fn compare_exchange(
        &self,
        current: u64,
        new: u64,
        success: Ordering,
        failure: Ordering,
    ) -> Result<u64, u64> {
        let success = ordering(Some(Access::LatestTake), success);
        self.0.compare_exchange(current, new, success, failure)
    }
}

/// loom reports each access to it that nothing orders.
#[derive(Debug)]
pub(crate) struct Entry<T>(UnsafeCell<Option<T>>);

// SAFETY: that is what the models try.
unsafe impl<T: Send> Sync for Entry<T> {}

impl<T> Entry<T> {
    pub(crate) fn new(message: Option<T>) -> Entry<T> {
        Entry(UnsafeCell::new(message))
    }

    /// # Safety
    ///
    /// The caller is its owner.
    pub(crate) unsafe fn replace(&self, message: Option<T>) -> Option<T> {
        // SAFETY: as the caller says; loom looks.
        self.0
            .with_mut(|there| std::mem::replace(unsafe { &mut *there }, message))
    }
}
