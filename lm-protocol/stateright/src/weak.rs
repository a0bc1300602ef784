//! Words that two threads share, over a memory that orders no more than it must: whether a load synchronises with the store whose value it
//! reads is noted, and the model goes by that.

use std::cell::Cell;
use std::hash::{Hash, Hasher};
use std::sync::atomic;

pub(crate) use std::sync::atomic::Ordering;

thread_local! {
    static SYNCHRONISED: Cell<bool> = const { Cell::new(true) };
}

/// Whether all loads of this thread since the last call synchronised with their stores.
pub(crate) fn synchronised() -> bool {
    SYNCHRONISED.replace(true)
}

/// A word, and whether its value was stored with release.
#[derive(Debug)]
pub(crate) struct Word<T>(atomic::AtomicU64, std::marker::PhantomData<T>);

pub(crate) type AtomicU8 = Word<u8>;
pub(crate) type AtomicU32 = Word<u32>;

const RELEASED: u64 = 1 << 32;

macro_rules! word {
    ($kind:ty) => {
        impl Word<$kind> {
            pub(crate) fn new(value: $kind) -> Self {
                Word(
                    atomic::AtomicU64::new(RELEASED | u64::from(value)),
                    std::marker::PhantomData,
                )
            }

            pub(crate) fn load(&self, order: Ordering) -> $kind {
                let word = self.0.load(Ordering::Relaxed);
                if word & RELEASED == 0 || order != Ordering::Acquire {
                    SYNCHRONISED.set(false);
                }
                word as $kind
            }

            pub(crate) fn store(&self, value: $kind, order: Ordering) {
                let released = if order == Ordering::Release {
                    RELEASED
                } else {
                    0
                };
                self.0.store(released | u64::from(value), Ordering::Relaxed);
            }
        }
    };
}

word!(u8);
word!(u32);

impl<T> Word<T> {
    fn state(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

impl<T> Clone for Word<T> {
    fn clone(&self) -> Self {
        Word(atomic::AtomicU64::new(self.state()), std::marker::PhantomData)
    }
}

impl<T> PartialEq for Word<T> {
    fn eq(&self, other: &Self) -> bool {
        self.state() == other.state()
    }
}

impl<T> Eq for Word<T> {}

impl<T> Hash for Word<T> {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.state().hash(state);
    }
}
