//! Incoming: a message that is still on its way, of which some bytes may be read already. [`crate::landing`] says which, in windows
//! ([`lm_protocol::streaming`]); the message comes as a [`Message`](crate::Message) all the same, in the same memory.
//!
//! ```text
//!  engine's thread: Reader ── Shown, Ending ──▶ Reading ◀── ranges, bytes ── Incoming: any thread
//! ```

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};

use lm_protocol::streaming::{NotValid, Part, Shown};

use crate::completion::PeerId;
use crate::release::{Loaned, Released};

/// How a message ended that an [`Incoming`] shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
#[non_exhaustive]
pub enum Ending {
    /// It is whole, and the application has it, or will have it with the next [`try_recv`](crate::Endpoint::try_recv).
    Whole = 1,
    /// It stays incomplete: what is shown is all that will be.
    Incomplete,
    /// Its session ended first.
    SessionEnded,
    /// Its sender gave it up while it was being written: what is shown is all that will be.
    Aborted,
}

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
    shown: Shown,
    settled: AtomicU8,
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
        }
    }

    /// So much of a window is shown from now on.
    pub(crate) fn show(&self, window: u32, part: Part) {
        self.shown.publish(window, part);
    }

    /// Whether anything is shown.
    pub(crate) fn shows_any(&self) -> bool {
        self.shown.valid().next().is_some()
    }

    /// Whether the byte is shown.
    pub(crate) fn shows(&self, byte: u64) -> bool {
        self.shown.valid_to(byte) > byte
    }

    /// It lies elsewhere from now on. Nothing is shown of it.
    pub(crate) fn moved(&self, address: u64) {
        debug_assert!(!self.shows_any(), "what is shown is never moved");
        // Ordered by what is shown later: see `Incoming::bytes`.
        self.address.store(address, Ordering::Relaxed);
    }

    /// It has ended. What was said first counts.
    pub(crate) fn settle(&self, settled: Ending) {
        let _ = (self.settled).compare_exchange(0, settled as u8, Ordering::Release, Ordering::Relaxed);
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
/// its endpoint; while it is held, so is the message's memory.
///
/// ```no_run
/// # fn f(mut endpoint: lm_dataplane::Endpoint, peer: lm_dataplane::PeerId) {
/// endpoint.peer(peer).watch();
/// let mut sum = 0u64;
/// while let Some(incoming) = endpoint.try_incoming() {
///     let mut done = 0;
///     while incoming.settled().is_none() {
///         endpoint.poll();
///         let shown = incoming.shown().find(|range| range.contains(&done));
///         if let Some(bytes) = shown.and_then(|range| incoming.bytes(done..range.end).ok()) {
///             sum += bytes.iter().map(|byte| u64::from(*byte)).sum::<u64>();
///             done += bytes.len() as u64;
///         }
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
