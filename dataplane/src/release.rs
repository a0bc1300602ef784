//! Memory that an application holds, and how it comes back to the engine.
//!
//! A [`crate::Message`] or an unsent [`crate::SendRegion`] may be dropped on any thread. Its memory goes
//! through a bounded queue to the thread that polls the endpoint. The queue holds every token that can
//! exist at once, so pushing never fails and never allocates. Who owns a frame when: `ARCHITECTURE.md`.

use std::sync::Arc;

use crossbeam_queue::ArrayQueue;

use crate::memory::Mapping;

/// What came back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Released {
    /// A frame of the general receive pool, by any address inside it.
    GeneralFrame(u64),
    /// A landing zone: UMEM address and length asked for, in bytes.
    Zone { start: u64, len: u64 },
    /// Nobody reads a message any more while it arrives: the name of its [`Reading`](crate::incoming::Reading).
    Hold(u64),
    /// A frame of the small transmit pool, never sent.
    TransmitFrame(u64),
    /// The writer of a message that is sent meanwhile, by its slot among the outgoing ones: it writes no more.
    Writer(u16),
    /// A region of the send arena, never sent: UMEM address and length asked for, in bytes.
    SendRegion { start: u64, len: u64 },
}

/// The UMEM's mapping and the way back into it. Everything that the application holds keeps this alive, so
/// a message stays readable after its endpoint is gone.
#[derive(Debug)]
pub(crate) struct Loaned {
    mapping: Arc<Mapping>,
    returned: ArrayQueue<Released>,
}

impl Loaned {
    /// At most `capacity` frames and regions can be outside at once.
    pub(crate) fn new(mapping: Arc<Mapping>, capacity: usize) -> Arc<Loaned> {
        Arc::new(Loaned {
            mapping,
            returned: ArrayQueue::new(capacity.max(1)),
        })
    }

    /// Gives memory back.
    pub(crate) fn give_back(&self, released: Released) {
        let full = self.returned.push(released).is_err();
        debug_assert!(!full, "more memory came back than was given out");
    }

    /// The next piece of memory that came back.
    #[inline]
    pub(crate) fn next_returned(&self) -> Option<Released> {
        // Mostly there is nothing: asking that is two loads.
        if self.returned.is_empty() {
            None
        } else {
            self.returned.pop()
        }
    }

    /// Pointer to UMEM address `address`; the `len` bytes from there lie inside the mapping.
    #[inline]
    pub(crate) fn pointer(&self, address: u64, len: u64) -> *mut u8 {
        self.mapping.pointer(address, len).as_ptr()
    }
}
