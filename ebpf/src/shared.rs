//! Memory that the gate and user space write at the same time.
//!
//! Rules: no Rust reference to these bytes ever exists, but to atomics; every access is an atomic load or store through
//! a raw pointer, naturally aligned and inside the mapping (checked on each access); what is read is copied and checked
//! as a value. The other side is the kernel (trusted) or, for a channel's log, a client that may write nonsense: a
//! wrong value must never become a wrong address. The BPF program's plain stores are, for the machine, relaxed atomic
//! stores of the same width.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use lm_protocol::smoother::Credits;

use crate::layout::{CounterRow, VERDICT_ROW};
use crate::verdict::{Counters, Verdict};

/// A shared mapping of a `BPF_F_MMAPABLE` map, or zeroed private memory of the same shape. Unmapped on drop.
#[derive(Debug)]
pub(crate) struct SharedMemory {
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: the mapping belongs to the value, is not bound to a thread, and is reached through atomics alone.
unsafe impl Send for SharedMemory {}
// SAFETY: as above: concurrent atomic accesses are not data races.
unsafe impl Sync for SharedMemory {}

impl SharedMemory {
    /// Maps the first `len` bytes of a map's values.
    pub(crate) fn of_map(map: BorrowedFd<'_>, len: usize) -> io::Result<SharedMemory> {
        Self::map(len, libc::MAP_SHARED, map.as_raw_fd())
    }

    /// Zeroed memory that no kernel writes.
    pub(crate) fn private(len: usize) -> io::Result<SharedMemory> {
        Self::map(len, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1)
    }

    fn map(len: usize, flags: libc::c_int, fd: libc::c_int) -> io::Result<SharedMemory> {
        // SAFETY: a fresh mapping at an address that the kernel chooses aliases nothing.
        let base = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                len,
                libc::PROT_READ | libc::PROT_WRITE,
                flags,
                fd,
                0,
            )
        };
        if base == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let base = NonNull::new(base.cast()).ok_or_else(|| io::Error::other("mmap returned address 0"))?;
        Ok(SharedMemory { base, len })
    }

    /// Where `count` values of type `T` from `offset` on are.
    #[inline]
    fn address<T>(&self, offset: usize, count: usize) -> *mut T {
        assert!(
            offset.is_multiple_of(size_of::<T>()) && offset <= self.len - count * size_of::<T>(),
            "offset {offset}"
        );
        // SAFETY: inside the mapping, by the assertion.
        unsafe { self.base.as_ptr().add(offset).cast() }
    }

    /// The credits that the mapping begins with.
    #[inline]
    pub(crate) fn credits(&self) -> &Credits {
        let credits: *const Credits = self.address(0, 1);
        // SAFETY: inside the mapping and aligned, which is of whole pages and lives as long as `self`; the structure is
        // atomics alone, for which any bytes are a value.
        unsafe { &*credits }
    }

    #[inline]
    fn u32_at(&self, offset: usize) -> &AtomicU32 {
        // SAFETY: aligned and inside the mapping (`address`), which lives as long as `self`; all accesses are atomic.
        unsafe { AtomicU32::from_ptr(self.address(offset, 1)) }
    }

    fn u64_at(&self, offset: usize) -> &AtomicU64 {
        // SAFETY: as in `u32_at`.
        unsafe { AtomicU64::from_ptr(self.address(offset, 1)) }
    }

    #[inline]
    pub(crate) fn load_u32(&self, offset: usize, ordering: Ordering) -> u32 {
        self.u32_at(offset).load(ordering)
    }

    /// The `N` words from `offset` on.
    #[inline]
    pub(crate) fn load_u32s<const N: usize>(&self, offset: usize, ordering: Ordering) -> [u32; N] {
        let first: *mut u32 = self.address(offset, N);
        let mut words = [0; N];
        for (at, word) in words.iter_mut().enumerate() {
            // SAFETY: aligned and inside the mapping (`address`, asked for all of them), which lives as long as `self`;
            // all accesses are atomic.
            *word = unsafe { AtomicU32::from_ptr(first.add(at)) }.load(ordering);
        }
        words
    }

    pub(crate) fn load_u64(&self, offset: usize, ordering: Ordering) -> u64 {
        self.u64_at(offset).load(ordering)
    }

    pub(crate) fn store_u32(&self, offset: usize, value: u32, ordering: Ordering) {
        self.u32_at(offset).store(value, ordering);
    }

    pub(crate) fn store_u64(&self, offset: usize, value: u64, ordering: Ordering) {
        self.u64_at(offset).store(value, ordering);
    }

    /// Adds what the row of counters at `row` shows. Relaxed: a counter orders nothing.
    pub(crate) fn add_counters(&self, row: usize, sum: &mut Counters) {
        for &verdict in Verdict::ALL {
            sum.add(verdict, self.load_counter(row, verdict));
        }
    }

    /// One counter of the row at `row`.
    pub(crate) fn load_counter(&self, row: usize, verdict: Verdict) -> u64 {
        const { assert!(Verdict::ALL.len() <= VERDICT_ROW) };
        let verdicts = row + std::mem::offset_of!(CounterRow, verdicts);
        self.load_u64(verdicts + 8 * verdict as usize, Ordering::Relaxed)
    }

    /// Packets of the row at `row` that the data socket may have received.
    pub(crate) fn load_passed(&self, row: usize) -> u64 {
        self.load_u64(row + std::mem::offset_of!(CounterRow, passed), Ordering::Relaxed)
    }

    /// Adds one to the number at `offset`, as the gate does.
    pub(crate) fn add_one(&self, offset: usize) {
        self.u64_at(offset).fetch_add(1, Ordering::Relaxed);
    }

    /// Counts one packet in the row at `row`, as the gate does.
    pub(crate) fn count(&self, row: usize, verdict: Verdict) {
        let verdicts = row + std::mem::offset_of!(CounterRow, verdicts);
        self.add_one(verdicts + 8 * verdict as usize);
        if verdict.may_reach_data_socket() {
            self.add_one(row + std::mem::offset_of!(CounterRow, passed));
        }
    }
}

impl Drop for SharedMemory {
    fn drop(&mut self) {
        // SAFETY: the mapping that `map` made; no pointer into it leaves this module.
        unsafe { libc::munmap(self.base.as_ptr().cast(), self.len) };
    }
}
