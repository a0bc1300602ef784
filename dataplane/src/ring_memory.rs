//! The memory under a ring, and the only accesses to it.
//!
//! `ring.rs` states the protocol and the rules for this memory. The memory is a mapping of a socket, shared with the
//! kernel, or plain memory for the simulated NIC. `dataplane/loom` has another module of this name and shape over
//! `loom`'s atomics, so what `ring.rs` does is checked for every interleaving; keep the two alike.

use std::alloc::Layout;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::AtomicU32;
pub(crate) use std::sync::atomic::fence;

/// Where a ring's parts lie in its memory, in bytes from its start (`struct xdp_ring_offset`).
#[derive(Clone, Copy, Debug)]
pub(crate) struct RingOffsets {
    pub(crate) producer: usize,
    pub(crate) consumer: usize,
    pub(crate) flags: usize,
    pub(crate) entries: usize,
}

/// The memory of one ring: a mapping of the socket, or plain zeroed memory.
#[derive(Debug)]
pub(crate) struct RingMemory {
    base: NonNull<u8>,
    origin: Origin,
    len: usize,
}

#[derive(Debug)]
enum Origin {
    /// mmap(2) of an AF_XDP socket; keeps the socket alive until unmapped.
    Socket,
    /// The global allocator.
    Heap(Layout),
}

// SAFETY: an address range, tied to no thread; who reads and writes it is ruled by the ring protocol.
unsafe impl Send for RingMemory {}
// SAFETY: as above; the type itself reads and writes no byte of the range.
unsafe impl Sync for RingMemory {}

impl RingMemory {
    /// Takes over the mapping of a ring of a socket.
    ///
    /// # Safety
    ///
    /// `base` is the start of `len` bytes that mmap(2) returned and that nobody else unmaps.
    pub(crate) unsafe fn from_socket(base: NonNull<u8>, len: usize) -> RingMemory {
        RingMemory {
            base,
            origin: Origin::Socket,
            len,
        }
    }

    /// Zeroed memory of `len` bytes, aligned to a cache line, with both indices at `start`.
    pub(crate) fn in_memory(len: usize, offsets: RingOffsets, start: u32) -> RingMemory {
        let layout = Layout::from_size_align(len, 64).expect("a ring's length is far below isize::MAX");
        // SAFETY: the layout's length is not 0: a ring has at least its indices.
        let base = unsafe { std::alloc::alloc_zeroed(layout) };
        let Some(base) = NonNull::new(base) else {
            std::alloc::handle_alloc_error(layout)
        };
        for index in [offsets.producer, offsets.consumer] {
            assert!(index.is_multiple_of(4) && index + 4 <= len, "index at {index}");
            // SAFETY: inside the memory and aligned, and nobody else knows it yet.
            unsafe { base.add(index).cast::<u32>().write(start) };
        }
        RingMemory {
            base,
            origin: Origin::Heap(layout),
            len,
        }
    }
}

impl Drop for RingMemory {
    fn drop(&mut self) {
        match self.origin {
            // SAFETY: `from_socket`'s caller gave the mapping up to us; every ring end holds an Arc of it, so none is left.
            Origin::Socket => unsafe {
                libc::munmap(self.base.as_ptr().cast(), self.len);
            },
            // SAFETY: allocated in `in_memory` with this layout; no ring end is left.
            Origin::Heap(layout) => unsafe { std::alloc::dealloc(self.base.as_ptr(), layout) },
        }
    }
}

/// The parts of a ring that both parties access.
pub(crate) struct Shared<E> {
    producer: NonNull<u32>,
    consumer: NonNull<u32>,
    flags: NonNull<u32>,
    entries: NonNull<E>,
    mask: u32,
    /// Keeps the memory behind the pointers.
    _memory: Arc<RingMemory>,
}

// SAFETY: the pointers lead into `_memory`, which may be used from any thread; the indices of one end are moved by its
// only owner, and the other end is another party whom the protocol's release/acquire pairs order. Not `Sync`.
unsafe impl<E: Copy + Send> Send for Shared<E> {}

impl<E: Copy> Shared<E> {
    /// The parts of a ring of `len` entries; `name` is for messages.
    ///
    /// # Safety
    ///
    /// The memory is laid out as `offsets` say, with room for `len` entries.
    ///
    /// # Panics
    ///
    /// When the parts leave the memory or are not aligned, or when `len` is no power of two.
    pub(crate) unsafe fn new(
        memory: Arc<RingMemory>,
        offsets: RingOffsets,
        len: u32,
        name: &str,
    ) -> Shared<E> {
        assert!(
            len.is_power_of_two(),
            "a {name} ring of {len} entries: must be a power of two"
        );
        let part = |at: usize, part_len: usize, align: usize| {
            assert!(
                at.checked_add(part_len).is_some_and(|end| end <= memory.len),
                "{name} ring leaves its memory"
            );
            // SAFETY: `at` was just found inside the memory.
            let part = unsafe { memory.base.add(at) };
            assert!(
                part.as_ptr().addr().is_multiple_of(align),
                "{name} ring is not aligned"
            );
            part
        };
        let entry = (size_of::<E>(), align_of::<E>());
        Shared {
            producer: part(offsets.producer, 4, 4).cast(),
            consumer: part(offsets.consumer, 4, 4).cast(),
            flags: part(offsets.flags, 4, 4).cast(),
            entries: part(offsets.entries, len as usize * entry.0, entry.1).cast(),
            mask: len - 1,
            _memory: memory,
        }
    }

    #[inline]
    pub(crate) fn len(&self) -> u32 {
        self.mask + 1
    }

    #[inline]
    pub(crate) fn producer(&self) -> &AtomicU32 {
        // SAFETY: aligned and inside the memory (checked in `new`), which outlives `self`; everybody accesses it
        // atomically: the kernel with READ_ONCE and store-release, the other end through this function.
        unsafe { AtomicU32::from_ptr(self.producer.as_ptr()) }
    }

    #[inline]
    pub(crate) fn consumer(&self) -> &AtomicU32 {
        // SAFETY: as for `producer`.
        unsafe { AtomicU32::from_ptr(self.consumer.as_ptr()) }
    }

    #[inline]
    pub(crate) fn flags(&self) -> &AtomicU32 {
        // SAFETY: as for `producer`.
        unsafe { AtomicU32::from_ptr(self.flags.as_ptr()) }
    }

    #[inline]
    fn slot(&self, index: u32) -> NonNull<E> {
        // SAFETY: the mask keeps the slot below the length, for which `new` found room.
        unsafe { self.entries.add((index & self.mask) as usize) }
    }

    /// Writes the entry of this index.
    ///
    /// # Safety
    ///
    /// The other end does not access the slot until this end gives it away.
    #[inline]
    pub(crate) unsafe fn write(&self, index: u32, entry: E) {
        // SAFETY: inside the ring and aligned; the rest is the caller's promise.
        unsafe { self.slot(index).write(entry) }
    }

    /// A copy of the entry of this index.
    ///
    /// # Safety
    ///
    /// The other end does not write the slot until this end gives it away, and any bytes are a valid `E`.
    #[inline]
    pub(crate) unsafe fn read(&self, index: u32) -> E {
        // SAFETY: inside the ring and aligned; the rest is the caller's promise.
        unsafe { self.slot(index).read() }
    }
}
