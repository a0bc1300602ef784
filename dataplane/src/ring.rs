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
//! This file holds the protocol and its orderings; `ring_memory.rs` holds the memory. `dataplane/loom` puts the same
//! protocol over `loom`'s memory and tries every interleaving.
//!
//! # Rules for this memory
//!
//! - Indices are touched atomically alone, entries through raw pointers alone; no reference to
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

use std::marker::PhantomData;
use std::sync::Arc;
use std::sync::atomic::Ordering;

pub(crate) use crate::ring_memory::{RingMemory, RingOffsets};
use crate::ring_memory::{Shared, fence};

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

    /// The same, with `options` set (`XDP_TX_METADATA`).
    #[inline]
    pub const fn with_options(self, options: u32) -> Descriptor {
        Descriptor {
            options: self.options | options,
            ..self
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

/// What both ends have: the shared parts and the own view of the indices.
struct Cursor<K: RingKind> {
    shared: Shared<K::Entry>,
    /// The index that this end moves, as published.
    own: u32,
    /// The index that the other end moves, as last seen.
    other: u32,
    _kind: PhantomData<K>,
}

impl<K: RingKind> Cursor<K> {
    /// # Safety
    ///
    /// The memory is laid out as `offsets` say, with room for `len` entries, and no other end of the same side exists.
    ///
    /// # Panics
    ///
    /// When the parts leave the memory or are not aligned, or when `len` is no power of two.
    unsafe fn new(memory: Arc<RingMemory>, offsets: RingOffsets, len: u32) -> Cursor<K> {
        Cursor {
            // SAFETY: the caller's promise.
            shared: unsafe { Shared::new(memory, offsets, len, K::NAME) },
            own: 0,
            other: 0,
            _kind: PhantomData,
        }
    }

    #[inline]
    fn len(&self) -> u32 {
        self.shared.len()
    }

    fn needs_wakeup(&self) -> bool {
        // The caller published an index before and asks now; the kernel sets the flag and then looks at the index
        // (`xsk_set_rx_need_wakeup` and what drivers do after it). Store-then-load on both sides needs a full barrier,
        // or both could miss the other. It costs a few nanoseconds once per batch.
        fence(Ordering::SeqCst);
        self.shared.flags().load(Ordering::Relaxed) & libc::XDP_RING_NEED_WAKEUP != 0
    }

    fn set_needs_wakeup(&self, needed: bool) {
        self.shared.flags().store(
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
            self.len(),
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
        cursor.own = cursor.shared.producer().load(Ordering::Relaxed); // written by this side alone
        cursor.other = cursor.shared.consumer().load(Ordering::Acquire); // A, as in `free`
        Producer(cursor)
    }

    /// Length in entries, a power of two.
    #[inline]
    pub fn ring_len(&self) -> u32 {
        self.0.len()
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
        self.0.other = self.0.shared.consumer().load(Ordering::Acquire);
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
        // SAFETY: the slot is free, so the other end does not read it until `submit`.
        unsafe { self.0.shared.write(self.0.own.wrapping_add(offset), entry) };
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
        self.0.shared.producer().store(self.0.own, Ordering::Release);
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
        self.0.other = self.0.shared.consumer().load(Ordering::Acquire); // A, as in `free`
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
        cursor.own = cursor.shared.consumer().load(Ordering::Relaxed); // written by this side alone
        cursor.other = cursor.own; // nothing seen yet: `available` looks
        Consumer(cursor)
    }

    /// Length in entries, a power of two.
    #[inline]
    pub fn ring_len(&self) -> u32 {
        self.0.len()
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
        self.0.other = self.0.shared.producer().load(Ordering::Acquire);
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
        // SAFETY: the slot was published and is not overwritten until `release`.
        unsafe { self.0.shared.read(self.0.own.wrapping_add(offset)) }
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
        self.0.shared.consumer().store(self.0.own, Ordering::Release);
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
        self.0.other = self.0.shared.producer().load(Ordering::Acquire); // C, as in `available`
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
    let memory_len = offsets.entries + len as usize * size_of::<K::Entry>();
    let memory = Arc::new(RingMemory::in_memory(memory_len, offsets, start));
    // SAFETY: the memory was made with these offsets and this length; one producer and one consumer are made.
    unsafe {
        (
            Producer::new(memory.clone(), offsets, len),
            Consumer::new(memory, offsets, len),
        )
    }
}
