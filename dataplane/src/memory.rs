//! Memory that the kernel reads and writes as well: the UMEM.
//!
//! # Rules for memory that somebody else writes
//!
//! The kernel (or a NIC) writes into every byte that a posted fill entry covers, and reads every byte that a TX
//! descriptor covers, at any time and without telling. Therefore:
//!
//! 1. [`Mapping`] hands out no references on its own: it is an address and a length. A reference into it exists
//!    only where [`Mapping::slice`] or [`Mapping::slice_mut`] was called, both `unsafe`, and only while no posted,
//!    unconsumed fill entry covers the range (I1 finality).
//! 2. Everything else goes through copies by raw pointer ([`Umem::copy_to`], [`Umem::copy_from`]). What somebody may still write is
//!    read by [`Umem::copy_from`] alone, once; what is decided is decided by the copy. [`Umem`] is `Send` but neither `Sync` nor
//!    `Clone`, and it is the only safe door to its mapping's bytes, so two threads of this program cannot copy at the same place at once.
//! 3. Bounds are checked once per access, in release builds too; an address comes from this program's own
//!    arithmetic or from the (trusted) kernel's rings, so an address outside is a defect and panics.
//! 4. What the kernel does with an address that this program put on a ring is no data race in Rust's terms: the
//!    rings' release/acquire pairs order it (see [`crate::ring`]).

use std::cell::Cell;
use std::io;
use std::marker::PhantomData;
use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd, OwnedFd, RawFd};
use std::ptr::NonNull;
use std::sync::Arc;

use rustix::fs::{MemfdFlags, SealFlags};

/// Smallest page of the machine, the granule of an anonymous mapping, in bytes.
pub const PAGE_LEN: u64 = 4096;

/// Length of the huge pages asked for (`MAP_HUGE_2MB`), in bytes.
pub const HUGE_PAGE_LEN: u64 = 2 << 20;

/// Shortest and longest chunk of a UMEM, in bytes (`net/xdp/xdp_umem.c`: `XDP_UMEM_MIN_CHUNK_SIZE`, `PAGE_SIZE`).
pub const CHUNK_LEN_RANGE: std::ops::RangeInclusive<u32> = 2048..=4096;

/// Bytes that the kernel leaves free before a packet in its frame (`XDP_PACKET_HEADROOM`, `linux/bpf.h`).
pub const PACKET_HEADROOM: u64 = 256;

/// Whether a mapping takes huge pages.
///
/// Zero-copy mode needs them, because there a chunk must not cross a physically non-contiguous page; copy mode
/// gains fewer TLB misses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum HugePages {
    /// Reserved huge pages where enough of them are free, else normal pages with a request for transparent ones.
    #[default]
    Auto,
    /// Reserved huge pages or an error.
    On,
    /// Normal pages.
    Off,
}

/// The pages that a mapping got.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PageKind {
    /// Reserved 2 MiB pages (`MAP_HUGETLB`).
    Huge,
    /// Pages of 4 KiB, possibly merged by the kernel (`MADV_HUGEPAGE`).
    Normal,
}

/// A mapping of whole pages, private or of a file without a name; unmapped on drop.
///
/// Not populated: a page costs memory when it is written first or registered with the kernel.
#[derive(Debug)]
pub struct Mapping {
    base: NonNull<u8>,
    len: u64,
    kind: PageKind,
    /// What is mapped, where others may map it too.
    file: Option<OwnedFd>,
}

// SAFETY: a mapping is an address range of the process, tied to no thread; its safe methods touch no byte of it.
unsafe impl Send for Mapping {}
// SAFETY: as above; the methods that reach bytes are `unsafe` and demand that nobody writes meanwhile.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps at least `len` bytes (rounded up to whole pages of the kind that it gets), zeroed.
    ///
    /// # Errors
    ///
    /// What mmap(2) says; `ENOMEM` with [`HugePages::On`] when too few huge pages are free
    /// (`/proc/sys/vm/nr_hugepages`). `InvalidInput` when `len` is 0 or exceeds the address space.
    pub fn new(len: u64, huge_pages: HugePages) -> io::Result<Mapping> {
        Mapping::reserved(len, len, huge_pages)
    }

    /// As [`Mapping::new`], but of huge pages no more than the first `reserved_len` bytes need are taken from the machine now. The
    /// rest is only addresses until [`Mapping::populate`] has succeeded there.
    ///
    /// # Errors
    ///
    /// Those of [`Mapping::new`].
    pub fn reserved(len: u64, reserved_len: u64, huge_pages: HugePages) -> io::Result<Mapping> {
        if len == 0 || reserved_len > len || len > isize::MAX as u64 - HUGE_PAGE_LEN {
            return Err(io::Error::from(io::ErrorKind::InvalidInput));
        }
        if huge_pages != HugePages::Off {
            match map_huge(
                len.next_multiple_of(HUGE_PAGE_LEN),
                reserved_len.next_multiple_of(HUGE_PAGE_LEN),
            ) {
                Ok(mapping) => return Ok(mapping),
                Err(error) if huge_pages == HugePages::On => return Err(error),
                Err(_) => {}
            }
        }
        let whole = len.next_multiple_of(PAGE_LEN);
        let base = map_anonymous(whole, 0)?;
        if huge_pages == HugePages::Auto && whole >= HUGE_PAGE_LEN {
            // SAFETY: the range is the mapping just made; MADV_HUGEPAGE changes no contents. Advice only: a kernel
            // without transparent huge pages refuses it, which harms nothing, so the result is not looked at.
            unsafe { libc::madvise(base.as_ptr().cast(), whole as usize, libc::MADV_HUGEPAGE) };
        }
        Ok(Mapping {
            base,
            len: whole,
            kind: PageKind::Normal,
            file: None,
        })
    }

    /// As [`Mapping::new`], of a file without a name that cannot shrink ([`Mapping::file`]): whoever gets its descriptor can map and
    /// register it. Never of huge pages.
    ///
    /// # Errors
    ///
    /// What memfd_create(2), ftruncate(2), fcntl(2) and mmap(2) say; `InvalidInput` as for [`Mapping::new`].
    pub fn shared(len: u64) -> io::Result<Mapping> {
        if len == 0 || len > isize::MAX as u64 - PAGE_LEN {
            return Err(io::Error::from(io::ErrorKind::InvalidInput));
        }
        let len = len.next_multiple_of(PAGE_LEN);
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = rustix::fs::memfd_create(c"lm-umem", flags)?;
        rustix::fs::ftruncate(&file, len)?;
        // Who registers it relies on that: pages that go away are no error there, but death by a signal.
        rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK)?;
        let mut mapping = Mapping::of_file(file.as_fd(), len)?;
        mapping.file = Some(file);
        Ok(mapping)
    }

    /// Maps the first `len` bytes of somebody else's file, to register them. Who gave it may write them at any time, as a device may;
    /// it must not be able to shrink (`F_SEAL_SHRINK`, or of hugetlbfs).
    ///
    /// # Errors
    ///
    /// What mmap(2) says; `InvalidInput` when `len` is 0.
    pub fn of_file(file: BorrowedFd<'_>, len: u64) -> io::Result<Mapping> {
        if len == 0 || len > isize::MAX as u64 {
            return Err(io::Error::from(io::ErrorKind::InvalidInput));
        }
        let flags = libc::MAP_SHARED | libc::MAP_NORESERVE;
        let base = map(len as usize, flags, file.as_raw_fd(), 0)?;
        // SAFETY: the range just mapped; advice only, so the result is not looked at.
        unsafe { libc::madvise(base.as_ptr().cast(), len as usize, libc::MADV_HUGEPAGE) };
        Ok(Mapping {
            base,
            len,
            kind: PageKind::Normal,
            file: None,
        })
    }

    /// What is mapped, where others may map it too: of [`Mapping::shared`].
    pub fn file(&self) -> Option<BorrowedFd<'_>> {
        self.file.as_ref().map(AsFd::as_fd)
    }

    /// Makes sure that there are pages behind the bytes from `from` to `to`, without changing their contents. Normal pages come by
    /// themselves.
    ///
    /// # Errors
    ///
    /// `OutOfMemory` when too few huge pages are free, and what there was of them is free again; what else madvise(2) says.
    ///
    /// # Panics
    ///
    /// When the range leaves the mapping.
    pub fn populate(&self, from: u64, to: u64) -> io::Result<()> {
        let from = from.next_multiple_of(HUGE_PAGE_LEN).min(self.len);
        let to = to.next_multiple_of(HUGE_PAGE_LEN);
        if self.kind == PageKind::Normal || from >= to {
            return Ok(());
        }
        let (start, len) = (self.pointer(from, to - from), (to - from) as usize);
        // SAFETY: the range lies inside the mapping; populating changes no contents.
        let done = unsafe { libc::madvise(start.as_ptr().cast(), len, libc::MADV_POPULATE_WRITE) };
        if done == 0 {
            return Ok(());
        }
        let error = io::Error::last_os_error();
        self.depopulate(from, to);
        match error.raw_os_error() {
            // A page that cannot be had is a SIGBUS for whoever touches it, and this for us.
            Some(libc::EFAULT | libc::ENOMEM) => Err(io::Error::from(io::ErrorKind::OutOfMemory)),
            _ => Err(error),
        }
    }

    /// Takes back what [`Mapping::populate`] did for a range in which nothing was written yet.
    pub(crate) fn depopulate(&self, from: u64, to: u64) {
        let from = from.next_multiple_of(HUGE_PAGE_LEN).min(self.len);
        let to = to.next_multiple_of(HUGE_PAGE_LEN);
        if self.kind == PageKind::Normal || from >= to {
            return;
        }
        let start = self.pointer(from, to - from);
        // SAFETY: the range lies inside the mapping; nobody has been told of these pages yet, and without them they read as zero, as
        // before.
        unsafe { libc::madvise(start.as_ptr().cast(), (to - from) as usize, libc::MADV_DONTNEED) };
    }

    /// Length in bytes, a multiple of the page length.
    #[inline]
    pub fn len(&self) -> u64 {
        self.len
    }

    /// A mapping is never empty; here for completeness beside [`Mapping::len`].
    pub fn is_empty(&self) -> bool {
        false
    }

    /// The pages that the mapping consists of.
    pub fn kind(&self) -> PageKind {
        self.kind
    }

    /// First byte of the mapping, page-aligned.
    #[inline]
    pub fn base(&self) -> NonNull<u8> {
        self.base
    }

    /// Whether `[addr, addr + len)` lies inside; `addr` counts from the mapping's start.
    #[inline]
    pub fn contains(&self, addr: u64, len: u64) -> bool {
        len <= self.len && addr <= self.len - len
    }

    /// Pointer to the byte at `addr`, with `len` bytes of the mapping behind it.
    ///
    /// # Panics
    ///
    /// When the range leaves the mapping.
    #[inline]
    #[track_caller]
    pub fn pointer(&self, addr: u64, len: u64) -> NonNull<u8> {
        assert!(
            self.contains(addr, len),
            "{len} bytes at {addr} leave a mapping of {} bytes",
            self.len
        );
        // SAFETY: the range was just found inside the allocation, whose length fits in isize.
        unsafe { self.base.add(addr as usize) }
    }

    /// The bytes at `addr` as a slice.
    ///
    /// # Panics
    ///
    /// When the range leaves the mapping.
    ///
    /// # Safety
    ///
    /// As long as the slice lives nobody writes into the range: no posted, unconsumed fill entry covers it (I1), no
    /// mutable slice of it lives, and nothing is copied there.
    #[inline]
    #[track_caller]
    pub unsafe fn slice(&self, addr: u64, len: u64) -> &[u8] {
        let start = self.pointer(addr, len);
        // SAFETY: inside the mapping, which outlives `&self`; initialised, because anonymous pages read as zero;
        // unwritten meanwhile by the caller's promise.
        unsafe { std::slice::from_raw_parts(start.as_ptr(), len as usize) }
    }

    /// Says that the bytes at `addr` are read soon: the processor may fetch them already. Any range will do.
    #[inline]
    pub fn prefetch(&self, addr: u64, len: u64) {
        #[cfg(target_arch = "x86_64")]
        for lines in (addr..addr.saturating_add(len)).step_by(8 * 64) {
            use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
            let lines = self.base.as_ptr().wrapping_add(lines as usize);
            // Eight at once: the loop would cost more than the hints.
            for line in 0..8 {
                // SAFETY: a hint, which changes no state that a program sees and does not fault, whatever the address.
                unsafe { _mm_prefetch::<_MM_HINT_T0>(lines.wrapping_add(line * 64).cast()) };
            }
        }
        #[cfg(not(target_arch = "x86_64"))]
        let _ = (addr, len);
    }

    /// The bytes at `addr` as a slice to write into.
    ///
    /// # Panics
    ///
    /// When the range leaves the mapping.
    ///
    /// # Safety
    ///
    /// As long as the slice lives nobody else reads or writes the range: neither the kernel through a ring entry nor
    /// this program through another reference or copy.
    #[inline]
    #[track_caller]
    #[allow(clippy::mut_from_ref)] // exclusive by the caller's promise, range by range
    pub unsafe fn slice_mut(&self, addr: u64, len: u64) -> &mut [u8] {
        let start = self.pointer(addr, len);
        // SAFETY: inside the mapping, which outlives `&self`; initialised; exclusive by the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(start.as_ptr(), len as usize) }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the range came from mmap in `new` and is unmapped once. A kernel that still has it registered holds
        // the pages themselves, not the mapping.
        unsafe { libc::munmap(self.base.as_ptr().cast(), self.len as usize) };
    }
}

/// Addresses for `len` bytes in huge pages, and pages for the first `reserved_len` of them.
fn map_huge(len: u64, reserved_len: u64) -> io::Result<Mapping> {
    const HUGE: libc::c_int = libc::MAP_HUGETLB | libc::MAP_HUGE_2MB;
    // Without MAP_NORESERVE the pages are promised now, so success cannot become SIGBUS later. A part cannot be promised, only had.
    let flags = match reserved_len < len {
        true => HUGE | libc::MAP_NORESERVE,
        false => HUGE,
    };
    let mapping = Mapping {
        base: map_anonymous(len, flags)?,
        len,
        kind: PageKind::Huge,
        file: None,
    };
    if reserved_len < len {
        mapping.populate(0, reserved_len)?;
    }
    Ok(mapping)
}

fn map_anonymous(len: u64, extra_flags: libc::c_int) -> io::Result<NonNull<u8>> {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | extra_flags;
    map(len as usize, flags, -1, 0)
}

/// Maps `len` bytes that can be read and written. Unmapping them is the caller's.
///
/// # Errors
///
/// What mmap(2) says.
pub fn map(len: usize, flags: libc::c_int, fd: RawFd, offset: libc::off_t) -> io::Result<NonNull<u8>> {
    let rights = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: a mapping at an address of the kernel's choice touches no existing memory.
    let base = unsafe { libc::mmap(std::ptr::null_mut(), len, rights, flags, fd, offset) };
    if base == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    NonNull::new(base.cast()).ok_or_else(|| io::Error::from(io::ErrorKind::OutOfMemory))
}

/// A mapping together with the right to copy into and out of it.
///
/// One per mapping: it makes the mapping itself, is `Send`, and is neither `Clone` nor `Sync`. Sockets register
/// [`Umem::mapping`], and messages keep it alive.
#[derive(Debug)]
pub struct Umem {
    mapping: Arc<Mapping>,
    /// Not `Sync`: see rule 2 of the module.
    _one_thread: PhantomData<Cell<()>>,
}

impl Umem {
    /// Maps at least `len` bytes; see [`Mapping::new`].
    ///
    /// # Errors
    ///
    /// Those of [`Mapping::new`].
    pub fn new(len: u64, huge_pages: HugePages) -> io::Result<Umem> {
        Umem::reserved(len, len, huge_pages)
    }

    /// Maps at least `len` bytes; see [`Mapping::reserved`].
    ///
    /// # Errors
    ///
    /// Those of [`Mapping::new`].
    pub fn reserved(len: u64, reserved_len: u64, huge_pages: HugePages) -> io::Result<Umem> {
        Ok(Umem {
            mapping: Arc::new(Mapping::reserved(len, reserved_len, huge_pages)?),
            _one_thread: PhantomData,
        })
    }

    /// Maps at least `len` bytes that others can map too; see [`Mapping::shared`].
    ///
    /// # Errors
    ///
    /// Those of [`Mapping::shared`].
    pub fn shared(len: u64) -> io::Result<Umem> {
        Ok(Umem {
            mapping: Arc::new(Mapping::shared(len)?),
            _one_thread: PhantomData,
        })
    }

    /// The mapping, to register with sockets and to keep alive.
    pub fn mapping(&self) -> &Arc<Mapping> {
        &self.mapping
    }

    /// Length in bytes.
    #[inline]
    pub fn len(&self) -> u64 {
        self.mapping.len
    }

    /// A mapping is never empty; here for completeness beside [`Umem::len`].
    pub fn is_empty(&self) -> bool {
        false
    }

    /// Copies `bytes` to `addr`.
    ///
    /// # Panics
    ///
    /// When the range leaves the mapping.
    #[inline]
    #[track_caller]
    pub fn copy_to(&self, addr: u64, bytes: &[u8]) {
        let to = self.mapping.pointer(addr, bytes.len() as u64);
        // SAFETY: `to` has bytes.len() bytes of the mapping behind it; `bytes` is a live reference, so by the promise
        // of `slice_mut`'s and `slice`'s callers it does not overlap the target; other threads have no `Umem`.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to.as_ptr(), bytes.len()) };
    }

    /// As [`Umem::copy_to`], with `field` in place of the bytes from `field_at` on.
    ///
    /// # Panics
    ///
    /// When the range leaves the mapping, or the field the bytes.
    #[inline]
    #[track_caller]
    pub fn copy_to_with<const N: usize, const F: usize>(
        &self,
        addr: u64,
        bytes: &[u8; N],
        field_at: usize,
        field: [u8; F],
    ) {
        assert!(F <= N && field_at <= N - F, "a field behind the bytes");
        let to = self.mapping.pointer(addr, N as u64);
        // SAFETY: `to` has N bytes of the mapping behind it, and the field lies in them, by the assertion; the rest as in `copy_to`.
        unsafe {
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), to.as_ptr(), N);
            std::ptr::copy_nonoverlapping(field.as_ptr(), to.as_ptr().add(field_at), F);
        }
    }

    /// Fills `bytes` from `addr`: the one way to read what the kernel or a device may write meanwhile. There is no reference to it, and
    /// each byte is loaded once, so that the copy stays what it is, whatever becomes of the memory.
    ///
    /// # Panics
    ///
    /// When the range leaves the mapping.
    #[track_caller]
    #[allow(clippy::cast_ptr_alignment)] // `unaligned` bytes are read one by one before
    pub fn copy_from(&self, addr: u64, bytes: &mut [u8]) {
        let mut from = self
            .mapping
            .pointer(addr, bytes.len() as u64)
            .as_ptr()
            .cast_const();
        let unaligned = from.align_offset(size_of::<u64>()).min(bytes.len());
        let (first, rest) = bytes.split_at_mut(unaligned);
        let (words, last) = rest.as_chunks_mut::<{ size_of::<u64>() }>();
        // SAFETY: `from` runs over bytes.len() bytes of the mapping, which `pointer` has looked at, and is aligned where words are read. Any
        // bit pattern will do. Volatile loads are what the compiler neither repeats nor takes back from the copy.
        unsafe {
            for byte in first {
                *byte = from.read_volatile();
                from = from.add(1);
            }
            for word in words {
                *word = from.cast::<u64>().read_volatile().to_ne_bytes();
                from = from.add(size_of::<u64>());
            }
            for byte in last {
                *byte = from.read_volatile();
                from = from.add(1);
            }
        }
    }

    /// Fills `len` bytes from `addr` with zeros.
    ///
    /// # Panics
    ///
    /// When the range leaves the mapping.
    pub fn zero(&self, addr: u64, len: u64) {
        let to = self.mapping.pointer(addr, len);
        // SAFETY: as in `copy_to`.
        unsafe { std::ptr::write_bytes(to.as_ptr(), 0, len as usize) };
    }

    /// Copies `len` bytes inside the mapping; the ranges may overlap.
    ///
    /// # Panics
    ///
    /// When a range leaves the mapping.
    #[inline]
    #[track_caller]
    pub fn copy_within(&self, from: u64, to: u64, len: u64) {
        let source = self.mapping.pointer(from, len);
        let target = self.mapping.pointer(to, len);
        // SAFETY: both ranges lie inside the mapping; `copy` allows overlap.
        unsafe { std::ptr::copy(source.as_ptr(), target.as_ptr(), len as usize) };
    }

    /// A copy of the `N` bytes at `addr`: read a header once, believe only the copy.
    ///
    /// # Panics
    ///
    /// When the range leaves the mapping.
    #[inline]
    #[track_caller]
    pub fn read_header<const N: usize>(&self, addr: u64) -> [u8; N] {
        let mut header = [0; N];
        self.copy_from(addr, &mut header);
        header
    }
}

/// Whether the kernel will use the fill entry `addr` of a pool of `registered_len` bytes in unaligned chunks.
///
/// An invalid entry is skipped silently and shifts every later packet by a slot, so ask before posting. The rule is
/// `xp_check_unaligned` of `net/xdp/xsk_buff_pool.c`: the whole chunk lies inside the registered memory. (Its third
/// condition, no chunk across physically non-contiguous pages, applies to zero-copy mode alone: see
/// [`crosses_huge_page`].) The upper 16 bits carry an offset in unaligned mode and must be 0.
#[inline]
pub const fn fill_address_is_valid(addr: u64, chunk_len: u32, registered_len: u64) -> bool {
    addr >> 48 == 0 && chunk_len as u64 <= registered_len && addr <= registered_len - chunk_len as u64
}

/// Whether the chunk at `addr` crosses the end of a 2 MiB page: a fill entry that zero-copy mode skips.
#[inline]
pub const fn crosses_huge_page(addr: u64, chunk_len: u32) -> bool {
    addr / HUGE_PAGE_LEN != (addr + chunk_len as u64 - 1) / HUGE_PAGE_LEN
}

#[cfg(test)]
mod tests;
