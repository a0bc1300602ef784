//! The four AF_XDP rings, both ends of each.
//!
//! Each ring is an array of entries with two free-running `u32` indices, *producer* and *consumer*, in memory that two
//! parties share. For the fill and TX rings this program produces and the kernel consumes; for the RX and completion
//! rings it is the other way round. The kernel draws the protocol in `net/xdp/xsk_queue.h`:
//!
//! ```text
//! producer                         consumer
//!
//! if (LOAD ->consumer) {  (A)      LOAD.acq ->producer  (C)
//!    STORE $data                   LOAD $data
//!    STORE.rel ->producer (B)      STORE.rel ->consumer (D)
//! }
//! ```
//!
//! B pairs with C: whoever sees the new producer index sees the entries before it, and the packet bytes written before
//! those. D pairs with A: whoever sees the new consumer index may overwrite the entries before it. The kernel's A is a
//! plain load kept in place by a control dependency; ours is an acquire load, which Rust can express and which costs
//! nothing on x86-64.
//!
//! # Rules for this memory
//!
//! - Indices are touched through [`AtomicU32::from_ptr`] alone, entries through raw pointers alone; no reference to
//!   either exists, because the other party may write at any time. Entries are plain integers, so any bytes are valid.
//! - An entry's slot is `index & (len - 1)`; the length is a power of two (asserted when a ring is made), so no index
//!   leads outside. Writing or reading an entry that is not ours to touch is a defect and panics, in release builds too.
//! - Indices wrap at 2³²; differences are taken with wrapping arithmetic and never exceed the length.
//! - Each end keeps its own index and the last value it saw of the other's, and looks at the shared one only when that
//!   view is insufficient: an index shared between cores costs a cache miss to read.
//! - A ring end owns an `Arc` of the memory that it lives in, so it cannot dangle; it is `Send`, not `Sync`.
//!
//! The kernel's ends ([`SimFill`], [`SimRx`], [`SimTx`], [`SimCompletion`]) are the same types over plain memory: with
//! them a test or the simulated NIC plays the kernel.

use std::alloc::Layout;
use std::marker::PhantomData;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering, fence};

/// A packet on the RX or TX ring: `struct xdp_desc` of `linux/if_xdp.h`, in the machine's byte order.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Descriptor {
    /// Where the packet starts. On an RX ring in unaligned mode `base | offset << 48`: see [`Descriptor::start`].
    pub addr: u64,
    /// Packet length in bytes.
    pub len: u32,
    /// `XDP_PKT_CONTD` and TX metadata flags; 0 for a packet in one piece.
    pub options: u32,
}

const _: () = assert!(size_of::<Descriptor>() == 16 && align_of::<Descriptor>() == 8);
const _: () = assert!(size_of::<Descriptor>() == size_of::<libc::xdp_desc>());

/// Bits of an unaligned-mode address below its offset (`XSK_UNALIGNED_BUF_OFFSET_SHIFT`).
const OFFSET_SHIFT: u32 = 48;

impl Descriptor {
    /// A packet to send: `addr` counts from the UMEM's start.
    #[inline]
    pub const fn new(addr: u64, len: u32) -> Descriptor {
        Descriptor {
            addr,
            len,
            options: 0,
        }
    }

    /// A received packet as the kernel writes it in unaligned mode: the fill entry and the packet's offset from it.
    #[inline]
    pub const fn received(base: u64, offset: u16, len: u32) -> Descriptor {
        Descriptor {
            addr: base | (offset as u64) << OFFSET_SHIFT,
            len,
            options: 0,
        }
    }

    /// The same, with the packet going on in the next descriptor of the ring (multi-buffer mode).
    #[inline]
    pub const fn continued(self) -> Descriptor {
        Descriptor {
            options: self.options | libc::XDP_PKT_CONTD,
            ..self
        }
    }

    /// Whether the packet goes on in the next descriptor of the ring.
    #[inline]
    pub const fn continues(self) -> bool {
        self.options & libc::XDP_PKT_CONTD != 0
    }

    /// The fill entry that this packet took. (With aligned chunks the kernel keeps no offset apart: the entry is the start
    /// of the chunk that [`Descriptor::start`] lies in.)
    #[inline]
    pub const fn base(self) -> u64 {
        self.addr & ((1 << OFFSET_SHIFT) - 1)
    }

    /// First byte of the packet, counted from the UMEM's start.
    #[inline]
    pub const fn start(self) -> u64 {
        self.base() + (self.addr >> OFFSET_SHIFT)
    }
}

mod sealed {
    pub trait Sealed {}
}

/// Which of the four rings: fixes the type of an entry.
pub trait RingKind: sealed::Sealed + 'static {
    /// An entry: plain integers, valid with any bytes.
    type Entry: Copy + 'static;
    /// Name for messages.
    const NAME: &'static str;
}

macro_rules! ring_kind {
    ($(#[$doc:meta])* $kind:ident, $entry:ty, $name:literal) => {
        $(#[$doc])*
        #[derive(Debug)]
        pub struct $kind;
        impl sealed::Sealed for $kind {}
        impl RingKind for $kind {
            type Entry = $entry;
            const NAME: &'static str = $name;
        }
    };
}

ring_kind!(
    /// Frames offered to the kernel: addresses from the UMEM's start.
    Fill, u64, "fill"
);
ring_kind!(
    /// Frames whose packet was sent: the TX descriptor's address. Kernel 6.18 clears bit 0 of it.
    Completion, u64, "completion"
);
ring_kind!(
    /// Packets received.
    Rx, Descriptor, "RX"
);
ring_kind!(
    /// Packets to send.
    Tx, Descriptor, "TX"
);

/// The application's end of the fill ring.
pub type FillRing = Producer<Fill>;
/// The application's end of the completion ring.
pub type CompletionRing = Consumer<Completion>;
/// The application's end of the RX ring.
pub type RxRing = Consumer<Rx>;
/// The application's end of the TX ring.
pub type TxRing = Producer<Tx>;
/// The kernel's end of a fill ring in plain memory.
pub type SimFill = Consumer<Fill>;
/// The kernel's end of a completion ring in plain memory.
pub type SimCompletion = Producer<Completion>;
/// The kernel's end of an RX ring in plain memory.
pub type SimRx = Producer<Rx>;
/// The kernel's end of a TX ring in plain memory.
pub type SimTx = Consumer<Tx>;

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

    /// Zeroed memory of `len` bytes, aligned to a cache line.
    fn in_memory(len: usize) -> RingMemory {
        let layout = Layout::from_size_align(len, 64).expect("a ring's length is far below isize::MAX");
        // SAFETY: the layout's length is not 0: a ring has at least its indices.
        let base = unsafe { std::alloc::alloc_zeroed(layout) };
        let Some(base) = NonNull::new(base) else {
            std::alloc::handle_alloc_error(layout)
        };
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

/// What both ends have: pointers into the ring's memory and the own view of the indices.
struct Cursor<K: RingKind> {
    producer: NonNull<u32>,
    consumer: NonNull<u32>,
    flags: NonNull<u32>,
    entries: NonNull<K::Entry>,
    mask: u32,
    /// The index that this end moves, as published.
    own: u32,
    /// The index that the other end moves, as last seen.
    other: u32,
    /// Keeps the memory behind the pointers.
    _memory: Arc<RingMemory>,
    _kind: PhantomData<K>,
}

// SAFETY: the pointers lead into `_memory`, which may be used from any thread; the indices of one end are moved by its
// only owner, and the other end is another party whom the protocol's release/acquire pairs order. Not `Sync`.
unsafe impl<K: RingKind> Send for Cursor<K> {}

impl<K: RingKind> Cursor<K> {
    /// # Safety
    ///
    /// The memory is laid out as `offsets` say, with room for `len` entries, and no other end of the same side exists.
    ///
    /// # Panics
    ///
    /// When the parts leave the memory or are not aligned, or when `len` is no power of two.
    unsafe fn new(memory: Arc<RingMemory>, offsets: RingOffsets, len: u32) -> Cursor<K> {
        assert!(
            len.is_power_of_two(),
            "a {} ring of {len} entries: must be a power of two",
            K::NAME
        );
        let part = |at: usize, part_len: usize, align: usize| {
            assert!(
                at.checked_add(part_len).is_some_and(|end| end <= memory.len),
                "{} ring leaves its memory",
                K::NAME
            );
            // SAFETY: `at` was just found inside the memory.
            let part = unsafe { memory.base.add(at) };
            assert!(
                part.as_ptr().addr().is_multiple_of(align),
                "{} ring is not aligned",
                K::NAME
            );
            part
        };
        let entry = (size_of::<K::Entry>(), align_of::<K::Entry>());
        Cursor {
            producer: part(offsets.producer, 4, 4).cast(),
            consumer: part(offsets.consumer, 4, 4).cast(),
            flags: part(offsets.flags, 4, 4).cast(),
            entries: part(offsets.entries, len as usize * entry.0, entry.1).cast(),
            mask: len - 1,
            own: 0,
            other: 0,
            _memory: memory,
            _kind: PhantomData,
        }
    }

    #[inline]
    fn producer(&self) -> &AtomicU32 {
        // SAFETY: aligned and inside the memory (checked in `new`), which outlives `self`; everybody accesses it
        // atomically: the kernel with READ_ONCE and store-release, the other end through this function.
        unsafe { AtomicU32::from_ptr(self.producer.as_ptr()) }
    }

    #[inline]
    fn consumer(&self) -> &AtomicU32 {
        // SAFETY: as for `producer`.
        unsafe { AtomicU32::from_ptr(self.consumer.as_ptr()) }
    }

    #[inline]
    fn flags(&self) -> &AtomicU32 {
        // SAFETY: as for `producer`.
        unsafe { AtomicU32::from_ptr(self.flags.as_ptr()) }
    }

    #[inline]
    fn entry(&self, index: u32) -> NonNull<K::Entry> {
        // SAFETY: the mask keeps the slot below the length, for which `new` found room.
        unsafe { self.entries.add((index & self.mask) as usize) }
    }

    fn needs_wakeup(&self) -> bool {
        // The caller published an index before and asks now; the kernel sets the flag and then looks at the index
        // (`xsk_set_rx_need_wakeup` and what drivers do after it). Store-then-load on both sides needs a full barrier,
        // or both could miss the other. It costs a few nanoseconds once per batch.
        fence(Ordering::SeqCst);
        self.flags().load(Ordering::Relaxed) & libc::XDP_RING_NEED_WAKEUP != 0
    }

    fn set_needs_wakeup(&self, needed: bool) {
        self.flags().store(
            if needed { libc::XDP_RING_NEED_WAKEUP } else { 0 },
            Ordering::Relaxed,
        );
        fence(Ordering::SeqCst); // the other half of the pair in `needs_wakeup`
    }
}

impl<K: RingKind> std::fmt::Debug for Cursor<K> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "{} ring of {} (own {}, other {})",
            K::NAME,
            self.mask as u64 + 1,
            self.own,
            self.other
        )
    }
}

/// The end of a ring that adds entries.
#[derive(Debug)]
pub struct Producer<K: RingKind>(Cursor<K>);

impl<K: RingKind> Producer<K> {
    /// # Safety
    ///
    /// As for `Cursor::new`: the layout is right, and this is the ring's only producer.
    pub(crate) unsafe fn new(memory: Arc<RingMemory>, offsets: RingOffsets, len: u32) -> Producer<K> {
        // SAFETY: the caller's promise.
        let mut cursor: Cursor<K> = unsafe { Cursor::new(memory, offsets, len) };
        cursor.own = cursor.producer().load(Ordering::Relaxed); // written by this side alone
        cursor.other = cursor.consumer().load(Ordering::Acquire); // A, as in `free`
        Producer(cursor)
    }

    /// Length in entries, a power of two.
    #[inline]
    pub fn ring_len(&self) -> u32 {
        self.0.mask + 1
    }

    /// How many entries may be written: at least `wanted` if there are so many, otherwise all that there are.
    ///
    /// Looks at the shared consumer index only when the view kept from the last look shows fewer than `wanted`.
    #[inline]
    pub fn free(&mut self, wanted: u32) -> u32 {
        let free = self.seen_free();
        if free >= wanted {
            return free;
        }
        // A, pairs with D: the other end's `smp_store_release` of its consumer index (`__xskq_cons_release`). Entries
        // before it have been read, so overwriting them is ordered after those reads.
        self.0.other = self.0.consumer().load(Ordering::Acquire);
        self.seen_free()
    }

    #[inline]
    fn seen_free(&self) -> u32 {
        self.ring_len()
            .wrapping_sub(self.0.own.wrapping_sub(self.0.other))
    }

    /// Writes the entry `offset` places behind the published ones; [`Producer::submit`] publishes it.
    ///
    /// # Panics
    ///
    /// When `offset` is not below what [`Producer::free`] returned.
    #[inline]
    #[track_caller]
    pub fn write(&mut self, offset: u32, entry: K::Entry) {
        assert!(
            offset < self.seen_free(),
            "{} ring: entry {offset} is not free",
            K::NAME
        );
        let slot = self.0.entry(self.0.own.wrapping_add(offset));
        // SAFETY: the slot lies inside the ring and, being free, is not read by the other end until `submit`.
        unsafe { slot.write(entry) };
    }

    /// Publishes the next `count` entries, which have been written.
    ///
    /// # Panics
    ///
    /// When `count` exceeds what [`Producer::free`] returned.
    #[inline]
    #[track_caller]
    pub fn submit(&mut self, count: u32) {
        assert!(
            count <= self.seen_free(),
            "{} ring: {count} entries are not free",
            K::NAME
        );
        self.0.own = self.0.own.wrapping_add(count);
        // B, pairs with C: the other end's `smp_load_acquire` of the producer index (`__xskq_cons_peek`). The entries, and
        // the packet bytes that they point to, were written before.
        self.0.producer().store(self.0.own, Ordering::Release);
    }

    /// Whether the kernel asks to be woken (`XDP_RING_NEED_WAKEUP`) before it looks at what was submitted.
    ///
    /// Ask after [`Producer::submit`].
    #[inline]
    pub fn needs_wakeup(&self) -> bool {
        self.0.needs_wakeup()
    }

    /// Entries ever submitted, modulo 2³²: this end's index.
    #[inline]
    pub fn produced(&self) -> u32 {
        self.0.own
    }

    /// Entries that the other end has ever consumed, modulo 2³²; looks at the shared index.
    #[inline]
    pub fn consumed(&mut self) -> u32 {
        self.0.other = self.0.consumer().load(Ordering::Acquire); // A, as in `free`
        self.0.other
    }
}

/// The end of a ring that takes entries.
#[derive(Debug)]
pub struct Consumer<K: RingKind>(Cursor<K>);

impl<K: RingKind> Consumer<K> {
    /// # Safety
    ///
    /// As for `Cursor::new`: the layout is right, and this is the ring's only consumer.
    pub(crate) unsafe fn new(memory: Arc<RingMemory>, offsets: RingOffsets, len: u32) -> Consumer<K> {
        // SAFETY: the caller's promise.
        let mut cursor: Cursor<K> = unsafe { Cursor::new(memory, offsets, len) };
        cursor.own = cursor.consumer().load(Ordering::Relaxed); // written by this side alone
        cursor.other = cursor.own; // nothing seen yet: `available` looks
        Consumer(cursor)
    }

    /// Length in entries, a power of two.
    #[inline]
    pub fn ring_len(&self) -> u32 {
        self.0.mask + 1
    }

    /// How many entries may be read, at most `max`.
    ///
    /// Looks at the shared producer index only when the view kept from the last look shows fewer than `max`.
    #[inline]
    pub fn available(&mut self, max: u32) -> u32 {
        let seen = self.seen_available();
        if seen >= max {
            return max;
        }
        // C, pairs with B: the other end's `smp_store_release` of its producer index (`__xskq_prod_submit`). The entries
        // before it, and the packet bytes that they point to, are visible from here on.
        self.0.other = self.0.producer().load(Ordering::Acquire);
        self.seen_available().min(max)
    }

    #[inline]
    fn seen_available(&self) -> u32 {
        self.0.other.wrapping_sub(self.0.own)
    }

    /// A copy of the entry `offset` places behind the released ones.
    ///
    /// # Panics
    ///
    /// When `offset` is not below what [`Consumer::available`] saw.
    #[inline]
    #[track_caller]
    pub fn read(&self, offset: u32) -> K::Entry {
        assert!(
            offset < self.seen_available(),
            "{} ring: entry {offset} is not there",
            K::NAME
        );
        let slot = self.0.entry(self.0.own.wrapping_add(offset));
        // SAFETY: the slot lies inside the ring; it was published and is not overwritten until `release`; any bytes are
        // a valid entry.
        unsafe { slot.read() }
    }

    /// Gives the next `count` entries back to the other end.
    ///
    /// # Panics
    ///
    /// When `count` exceeds what [`Consumer::available`] saw.
    #[inline]
    #[track_caller]
    pub fn release(&mut self, count: u32) {
        assert!(
            count <= self.seen_available(),
            "{} ring: {count} entries are not there",
            K::NAME
        );
        self.0.own = self.0.own.wrapping_add(count);
        // D, pairs with A: the kernel's load of the consumer index before it overwrites (`xskq_prod_nb_free`). The entries
        // were read before.
        self.0.consumer().store(self.0.own, Ordering::Release);
    }

    /// Asks the producing end for a wake-up after it submits, or stops asking: what the kernel does on fill and TX rings.
    #[inline]
    pub fn set_needs_wakeup(&mut self, needed: bool) {
        self.0.set_needs_wakeup(needed);
    }

    /// Entries ever released, modulo 2³²: this end's index.
    #[inline]
    pub fn consumed(&self) -> u32 {
        self.0.own
    }

    /// Entries that the other end has ever submitted, modulo 2³²; looks at the shared index.
    #[inline]
    pub fn produced(&mut self) -> u32 {
        self.0.other = self.0.producer().load(Ordering::Acquire); // C, as in `available`
        self.0.other
    }
}

/// Both ends of a ring of `len` entries in plain memory, with both indices at `start`.
///
/// A start just below 2³² tests the wrap.
///
/// # Panics
///
/// When `len` is no power of two.
pub fn in_memory<K: RingKind>(len: u32, start: u32) -> (Producer<K>, Consumer<K>) {
    // Each index on a cache line of its own, as in `struct xdp_ring`.
    let offsets = RingOffsets {
        producer: 0,
        consumer: 64,
        flags: 128,
        entries: 192,
    };
    let memory = Arc::new(RingMemory::in_memory(
        offsets.entries + len as usize * size_of::<K::Entry>(),
    ));
    for index in [offsets.producer, offsets.consumer] {
        // SAFETY: inside the memory, aligned to 64, and nobody else knows it yet.
        unsafe { memory.base.add(index).cast::<u32>().write(start) };
    }
    // SAFETY: the memory was made with these offsets and this length; one producer and one consumer are made.
    unsafe {
        (
            Producer::new(memory.clone(), offsets, len),
            Consumer::new(memory, offsets, len),
        )
    }
}
