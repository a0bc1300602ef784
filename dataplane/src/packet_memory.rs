//! The memory that packets lie in: the UMEM, the way back of what the application holds of it, and a record of what passes.

use std::io;
use std::sync::Arc;

use lm_protocol::time::Time;

use crate::capture::Capture;
use crate::memory::Umem;
use crate::release::{Loaned, Released};

pub(crate) struct PacketMemory {
    umem: Umem,
    loaned: Arc<Loaned>,
    capture: Option<Capture>,
}

impl PacketMemory {
    /// At most `outside` frames and regions can be outside at once.
    pub(crate) fn new(umem: Umem, outside: usize, capture: Option<Capture>) -> PacketMemory {
        PacketMemory {
            loaned: Loaned::new(Arc::clone(umem.mapping()), outside),
            umem,
            capture,
        }
    }

    #[inline]
    pub(crate) fn umem(&self) -> &Umem {
        &self.umem
    }

    /// The way back, for memory that goes to the application.
    #[inline]
    pub(crate) fn way_back(&self) -> Arc<Loaned> {
        Arc::clone(&self.loaned)
    }

    #[inline]
    pub(crate) fn loaned(&self) -> &Arc<Loaned> {
        &self.loaned
    }

    /// Whether memory with this way back is this endpoint's. Another one's addresses mean nothing here.
    pub(crate) fn is_from_here(&self, loaned: &Arc<Loaned>) -> bool {
        Arc::ptr_eq(loaned, &self.loaned)
    }

    /// The next piece of memory that the application gave back.
    #[inline]
    pub(crate) fn next_returned(&self) -> Option<Released> {
        self.loaned.next_returned()
    }

    /// Pointer to UMEM address `address`; the `len` bytes from there lie inside the mapping.
    #[inline]
    pub(crate) fn pointer(&self, address: u64, len: u64) -> *mut u8 {
        self.loaned.pointer(address, len)
    }

    /// The UMEM address of bytes that lie in it.
    #[inline]
    pub(crate) fn address_of(&self, bytes: &[u8]) -> u64 {
        (bytes.as_ptr() as usize - self.umem.mapping().base().as_ptr() as usize) as u64
    }

    /// What the gate wrote before a packet that begins there, if it wrote anything.
    pub(crate) fn stamp_before(&self, start: u64) -> Option<Time> {
        const LEN: u64 = size_of::<u64>() as u64;
        let pointer = self.pointer(start.checked_sub(LEN)?, LEN);
        // SAFETY: the bytes lie inside the mapping, which lives as long as `self`; the kernel gave the packet's frame back, so nobody writes
        // its headroom.
        let ns = unsafe { pointer.cast::<u64>().read_unaligned() };
        (ns != 0).then(|| Time::from_nanos(ns))
    }

    /// Records a packet that goes to a TX ring, where packets are recorded.
    #[inline]
    pub(crate) fn record(&mut self, address: u64, len: u32) {
        if let Some(capture) = &mut self.capture {
            capture.sent(&self.umem, address, len);
        }
    }

    /// The UMEM, and what records packets.
    #[inline]
    pub(crate) fn with_capture(&mut self) -> (&Umem, Option<&mut Capture>) {
        (&self.umem, self.capture.as_mut())
    }

    /// Why the capture ended early, if it did.
    pub(crate) fn capture_error(&self) -> Option<&io::Error> {
        self.capture.as_ref().and_then(Capture::error)
    }
}
