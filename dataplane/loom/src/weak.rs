//! One ordering of the code under test, weakened to Relaxed, to see that a model notices.

use std::cell::Cell;
use std::sync::atomic::Ordering;

/// The accesses that order something. Letters as in `ring.rs`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Access {
    /// A: a producer looks where its ring's consumer is.
    ConsumerLoad,
    /// B: a producer publishes entries.
    ProducerStore,
    /// C: a consumer looks for entries.
    ProducerLoad,
    /// D: a consumer gives entries back.
    ConsumerStore,
    /// The barrier between an index and the need_wakeup flag.
    WakeupFence,
    /// The gate publishes a log entry.
    LogProducerStore,
    /// User space looks for log entries.
    LogProducerLoad,
    /// User space lets the gate accept packets.
    PostedStore,
    /// The gate looks how many packets it may accept.
    PostedLoad,
    /// An entry with a message goes into a slot, and one that is empty or has an old message comes out.
    LatestPut,
    /// An empty entry goes into a slot, and one with a message comes out.
    LatestTake,
}

thread_local! {
    // loom runs all threads of a model on the test's own thread.
    static WEAK: Cell<Option<Access>> = const { Cell::new(None) };
}

/// From now on this access is Relaxed, or left out if it is a fence, for the rest of the test.
pub(crate) fn weaken(access: Access) {
    WEAK.set(Some(access));
}

pub(crate) fn is_weak(access: Access) -> bool {
    WEAK.get() == Some(access)
}

/// The ordering that the code asked for, unless this access is weakened.
pub(crate) fn ordering(access: Option<Access>, asked: Ordering) -> Ordering {
    if access.is_some_and(is_weak) {
        Ordering::Relaxed
    } else {
        asked
    }
}
