//! Entries that two threads pass to and fro. The models under loom have entries of their own.

use std::cell::UnsafeCell;
pub(crate) use std::sync::atomic::{AtomicU64, Ordering};

/// Has one owner at a time, which the slots decide.
#[derive(Debug)]
pub(crate) struct Entry<T>(UnsafeCell<Option<T>>);

// SAFETY: whoever is the owner reads and writes it; that it has one at a time is the contract of `replace`.
unsafe impl<T: Send> Sync for Entry<T> {}

impl<T> Entry<T> {
    pub(crate) fn new(message: Option<T>) -> Entry<T> {
        Entry(UnsafeCell::new(message))
    }

    /// # Safety
    ///
    /// The caller is its owner.
    pub(crate) unsafe fn replace(&self, message: Option<T>) -> Option<T> {
        // SAFETY: nobody else has a reference to it, as the caller says.
        std::mem::replace(unsafe { &mut *self.0.get() }, message)
    }
}
