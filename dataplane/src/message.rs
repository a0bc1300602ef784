//! Message: what a receiver gets. Step 9 of the data's path: comes from [`crate::landing`] (many fragments,
//! a landing zone) or [`crate::eager`] (one fragment, a general frame), goes to the application, and gives
//! its memory back when it is dropped.

use std::ops::{Deref, Range};
use std::sync::Arc;

use crate::completion::PeerId;
use crate::release::{Loaned, Released};

/// A received message: one contiguous slice inside the UMEM.
///
/// Dereferences to `&[u8]`. The memory is the application's alone (invariant I1) until the value is dropped;
/// then it goes back to the endpoint. A message may be moved to and dropped on another thread, and may
/// outlive its endpoint.
///
/// ```no_run
/// # fn f(message: lm_dataplane::Message) {
/// let first_kilobyte = &message[..message.len().min(1024)];
/// println!("{} bytes from {:?}: {:?}", message.len(), message.peer(), first_kilobyte);
/// # }
/// ```
#[derive(Debug)]
pub struct Message {
    pub(crate) loaned: Arc<Loaned>,
    /// What the drop gives back; `None` once the memory has another owner.
    pub(crate) released: Option<Released>,
    /// UMEM address of the first payload byte.
    pub(crate) address: u64,
    pub(crate) len: u64,
    pub(crate) peer: PeerId,
    pub(crate) tag: u64,
    pub(crate) number: u32,
    pub(crate) missing: Vec<Range<u64>>,
    pub(crate) latency_ns: u64,
}

impl Message {
    /// Who sent it; an answer can be sent to it with [`crate::Endpoint::send_copy`].
    pub fn peer(&self) -> PeerId {
        self.peer
    }

    /// The 64 bits of metadata that the sender attached.
    pub fn tag(&self) -> u64 {
        self.tag
    }

    /// Number of the message, counted by its sender; eager and large messages are counted apart.
    pub fn number(&self) -> u32 {
        self.number
    }

    /// Whether it came as one packet on the general channel, without a request.
    pub fn is_eager(&self) -> bool {
        matches!(self.released, Some(Released::GeneralFrame(_)))
    }

    /// Byte ranges that did not arrive, ascending; they hold zeros. Always empty but with
    /// [`Delivery::Partial`](lm_protocol::delivery::Delivery::Partial).
    pub fn missing(&self) -> &[Range<u64>] {
        &self.missing
    }

    /// Nanoseconds from the announcement (eager: from its packet) to its delivery.
    pub fn latency_ns(&self) -> u64 {
        self.latency_ns
    }

    /// Position of the payload's first byte in the endpoint's UMEM, in bytes; lies inside
    /// [`crate::Status::landing_range`] for a message of many fragments.
    pub fn umem_offset(&self) -> u64 {
        self.address
    }

    /// Makes the landing zone of this message a region for a later one
    /// ([`Placement::Land`](crate::Placement::Land)), which no message uses while an [`Incoming`](crate::Incoming) shows this one. `None` for an
    /// eager message, which has no zone.
    pub fn into_region(mut self) -> Option<LandingRegion> {
        let Some(Released::Zone { start, len }) = self.released else {
            return None;
        };
        self.released = None;
        Some(LandingRegion {
            loaned: Arc::clone(&self.loaned),
            start,
            len,
        })
    }
}

impl Deref for Message {
    type Target = [u8];

    #[inline]
    fn deref(&self) -> &[u8] {
        let start = self.loaned.pointer(self.address, self.len);
        // SAFETY: the range lies inside the mapping (checked by `pointer`), which `loaned` keeps mapped. The
        // engine made this value only after every byte was received and no posted fill entry covers it
        // (invariant I1), and takes the memory back only after the drop, so nobody writes it meanwhile.
        unsafe { std::slice::from_raw_parts(start, self.len as usize) }
    }
}

impl AsRef<[u8]> for Message {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

impl Drop for Message {
    fn drop(&mut self) {
        if let Some(released) = self.released {
            self.loaned.give_back(released);
        }
    }
}

/// A landing zone that the application holds before a message arrives, of the shape that invariant I2 asks
/// for. From [`crate::Extensions::landing_region`]; used with [`Placement::Land`](crate::Placement::Land).
#[derive(Debug)]
pub struct LandingRegion {
    pub(crate) loaned: Arc<Loaned>,
    pub(crate) start: u64,
    pub(crate) len: u64,
}

impl LandingRegion {
    /// Position of the region in the endpoint's UMEM: first byte and length, margins included, in bytes.
    pub fn umem_range(&self) -> std::ops::Range<u64> {
        self.start..self.start + self.len
    }
}

impl Drop for LandingRegion {
    fn drop(&mut self) {
        // Length 0: the memory has another owner.
        if self.len == 0 {
            return;
        }
        self.loaned.give_back(Released::Zone {
            start: self.start,
            len: self.len,
        });
    }
}
