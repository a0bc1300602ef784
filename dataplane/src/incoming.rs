//! Incoming: a message that is still on its way, of which some bytes may be read already. [`crate::landing`] says which, in windows
//! ([`lm_protocol::streaming`]); the message comes as a [`Message`](crate::Message) all the same, in the same memory.
//!
//! ```text
//!  engine's thread: Reader ── Shown, Ending ──▶ Reading ◀── ranges, bytes ── Incoming: any thread
//! ```

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use lm_protocol::streaming::{Ending, NotValid, Shown};
use rustix::thread::futex;
use rustix::time::Timespec;

use crate::completion::PeerId;
use crate::release::{Loaned, Released};

/// What the engine says of a message that is arriving, for the application.
#[derive(Debug)]
pub(crate) struct Reading {
    pub(crate) id: u64,
    pub(crate) peer: PeerId,
    pub(crate) number: u32,
    pub(crate) tag: u64,
    pub(crate) len: u64,
    /// UMEM address of the first payload byte. It changes only while nothing is shown.
    address: AtomicU64,
    /// What is published there is told by [`Reading::tell`].
    pub(crate) shown: Shown,
    settled: AtomicU8,
    /// How often there was something new. Threads that [wait](Incoming::wait) sleep on it, so many at a time.
    news: AtomicU32,
    waiting: AtomicU32,
}

impl Reading {
    /// Nothing is shown. `id` names it, `address` is the first payload byte's in the UMEM.
    pub(crate) fn new(
        id: u64,
        peer: PeerId,
        (number, tag, len): (u32, u64, u64),
        address: u64,
        shown: Shown,
    ) -> Reading {
        Reading {
            id,
            peer,
            number,
            tag,
            len,
            address: AtomicU64::new(address),
            shown,
            settled: AtomicU8::new(0),
            news: AtomicU32::new(0),
            waiting: AtomicU32::new(0),
        }
    }

    /// It lies elsewhere from now on. Nothing is shown of it.
    pub(crate) fn moved(&self, address: u64) {
        debug_assert_eq!(self.shown.valid().next(), None, "what is shown is never moved");
        // Ordered by what is shown later: see `Incoming::bytes`.
        self.address.store(address, Ordering::Relaxed);
    }

    /// It has ended.
    pub(crate) fn settle(&self, settled: Ending) {
        self.settled.store(settled as u8, Ordering::Release);
        self.tell();
    }

    /// Wakes who waits for more of it: a system call only where somebody does.
    pub(crate) fn tell(&self) {
        // Sequentially consistent, as in `wait`: either the news are seen there, or who waits is seen here.
        self.news.fetch_add(1, Ordering::SeqCst);
        if self.waiting.load(Ordering::SeqCst) > 0 {
            let _ = futex::wake(&self.news, futex::Flags::PRIVATE, i32::MAX as u32);
        }
    }

    /// [`Incoming::wait`].
    fn wait(&self, from: u64, timeout: Duration) -> u64 {
        let begun = Instant::now();
        self.waiting.fetch_add(1, Ordering::SeqCst);
        let shown_to = loop {
            let news = self.news.load(Ordering::SeqCst);
            let has_ended = self.settled().is_some();
            let shown_to = self.shown.valid_to(from);
            let left = timeout.saturating_sub(begun.elapsed());
            if shown_to > from || has_ended || left.is_zero() {
                break shown_to;
            }
            // Longer than the clock goes: without a limit.
            let left = Timespec::try_from(left).ok();
            let _ = futex::wait(&self.news, futex::Flags::PRIVATE, news, left.as_ref());
        };
        self.waiting.fetch_sub(1, Ordering::SeqCst);
        shown_to
    }

    /// How it ended, if it did. The load acquires what was shown before [`Reading::settle`].
    pub(crate) fn settled(&self) -> Option<Ending> {
        match self.settled.load(Ordering::Acquire) {
            0 => None,
            settled if settled == Ending::Whole as u8 => Some(Ending::Whole),
            settled if settled == Ending::Incomplete as u8 => Some(Ending::Incomplete),
            settled if settled == Ending::Aborted as u8 => Some(Ending::Aborted),
            _ => Some(Ending::SessionEnded),
        }
    }
}

/// A message of many fragments that is arriving, from a peer that is watched ([`crate::PeerHandle::watch`]).
///
/// What is shown of it is final: those bytes neither change nor move until this value and the [`Message`](crate::Message) are dropped, in
/// whatever order. Later ranges may be shown before earlier ones. May be moved to another thread, and outlives its message, its session and
/// its endpoint; while it is held, so is the message's memory. Dropped before the message has ended, it changes nothing for it: it is
/// received, and delivered by [`recv`](crate::Endpoint::recv) ([`Counters::incoming_dropped`](crate::Counters::incoming_dropped)).
///
/// ```no_run
/// # fn f(mut endpoint: lm_dataplane::Endpoint, peer: lm_dataplane::PeerId) {
/// # use std::time::Duration;
/// endpoint.peer(peer).watch();
/// while let Some(incoming) = endpoint.try_incoming() {
///     let reading = std::thread::spawn(move || {
///         let (mut sum, mut done) = (0, 0);
///         loop {
///             let come = done..incoming.wait(done, Duration::MAX);
///             if come.is_empty() {
///                 break sum;
///             }
///             done = come.end;
///             sum += incoming.bytes(come).unwrap().iter().map(|byte| u64::from(*byte)).sum::<u64>();
///         }
///     });
///     while !reading.is_finished() {
///         endpoint.poll();
///     }
/// }
/// # }
/// ```
#[derive(Debug)]
pub struct Incoming {
    loaned: Arc<Loaned>,
    reading: Arc<Reading>,
}

impl Incoming {
    /// Dropped, it says so by `loaned`.
    pub(crate) fn new(loaned: Arc<Loaned>, reading: Arc<Reading>) -> Incoming {
        Incoming { loaned, reading }
    }

    /// Who sends it.
    pub fn peer(&self) -> PeerId {
        self.reading.peer
    }

    /// Number of the message: its [`Message::number`](crate::Message::number).
    pub fn number(&self) -> u32 {
        self.reading.number
    }

    /// The 64 bits of metadata that the sender attached.
    pub fn tag(&self) -> u64 {
        self.reading.tag
    }

    /// Bytes of the whole message; never 0.
    #[allow(
        clippy::len_without_is_empty,
        reason = "no message of many fragments is empty"
    )]
    pub fn len(&self) -> u64 {
        self.reading.len
    }

    /// The bytes that may be read: ranges, ascending, that neither touch nor are empty. They only grow.
    pub fn shown(&self) -> impl Iterator<Item = Range<u64>> + '_ {
        self.reading.shown.valid()
    }

    /// These bytes, where all of them are shown.
    ///
    /// # Errors
    /// [`NotValid`] says how far they are.
    pub fn bytes(&self, bytes: Range<u64>) -> Result<&[u8], NotValid> {
        self.reading.shown.check(bytes.clone())?;
        // Of no bytes, or backwards, nothing is too little.
        if bytes.start > bytes.end || bytes.end > self.reading.len {
            let valid_to = bytes.start.min(self.reading.len);
            return Err(NotValid { valid_to });
        }
        let len = bytes.end - bytes.start;
        // What shows the bytes was stored after the address, and the check above acquired it. Of no bytes the address may be an old one.
        let address = self.reading.address.load(Ordering::Relaxed) + bytes.start;
        let start = self.loaned.pointer(address, len);
        // SAFETY: the range lies inside the mapping (checked by `pointer`), which `loaned` keeps mapped. The bytes are shown: they are in
        // their place, and no posted fill entry covers them or ever will (invariant I1, `landing::showing`); the engine writes them no
        // more, and does not free their zone while this value is held.
        Ok(unsafe { std::slice::from_raw_parts(start, len as usize) })
    }

    /// Waits until byte `from` is shown, the message has ended or `timeout` is over. Returns the first byte from there on that is not shown:
    /// `from` itself where none is. From the message's length on it waits for the end. Another thread drives the endpoint meanwhile.
    pub fn wait(&self, from: u64, timeout: Duration) -> u64 {
        self.reading.wait(from, timeout)
    }

    /// How the message ended; `None`: it is arriving.
    pub fn settled(&self) -> Option<Ending> {
        self.reading.settled()
    }
}

impl Drop for Incoming {
    fn drop(&mut self) {
        self.loaned.give_back(Released::Hold(self.reading.id));
    }
}

#[cfg(test)]
mod tests {
    use lm_protocol::streaming::{Grain, Part};
    use lm_protocol::window::WindowShape;

    use super::*;

    const PATIENCE: Duration = Duration::from_secs(10);
    const WINDOWS: u32 = 20_000;
    const W: u64 = 40;

    fn reading() -> Reading {
        let shape = WindowShape::new(4).expect("a power of two");
        let grain = Grain::new(u64::from(WINDOWS) * W, 10, shape).expect("windows");
        let peer = PeerId {
            index: 0,
            generation: 0,
        };
        Reading::new(0, peer, (0, 0, u64::from(WINDOWS) * W), 0, Shown::new(grain, 3))
    }

    /// Each window is seen, whenever the other thread goes to sleep; then the end.
    #[test]
    fn who_waits_is_told_of_each_window_and_of_the_end() {
        let reading = reading();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for window in 0..WINDOWS {
                    reading.shown.publish(window, Part::Whole);
                    reading.tell();
                    // A reader that is awake does not have to be woken.
                    if window % 7 == 0 {
                        while reading.waiting.load(Ordering::SeqCst) == 0 {
                            std::hint::spin_loop();
                        }
                    }
                }
                while reading.waiting.load(Ordering::SeqCst) == 0 {
                    std::hint::spin_loop();
                }
                reading.settle(Ending::Whole);
            });
            let mut done = 0;
            while done < reading.len {
                let shown_to = reading.wait(done, PATIENCE);
                assert!(shown_to > done, "asleep behind byte {done}");
                done = shown_to;
            }
            assert_eq!(reading.wait(done, PATIENCE), done);
            assert_eq!(reading.settled(), Some(Ending::Whole));
        });
    }

    #[test]
    fn who_waits_in_vain_returns() {
        let reading = reading();
        let begun = Instant::now();
        reading.shown.publish(1, Part::Body);
        assert_eq!(reading.wait(W, PATIENCE), 2 * W - 3);
        assert!(begun.elapsed() < PATIENCE, "it is shown");
        assert_eq!(reading.wait(0, Duration::from_millis(20)), 0);
        assert!(begun.elapsed() >= Duration::from_millis(20));
        reading.settle(Ending::Aborted);
        assert_eq!(reading.wait(0, Duration::MAX), 0);
    }
}
