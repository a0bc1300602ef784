//! Memory maps.

use std::io;
use std::os::fd::RawFd;
use std::ptr::NonNull;

/// Memory from `mmap`, unmapped on drop.
#[derive(Debug)]
pub(super) struct Mapping {
    base: NonNull<u8>,
    len: usize,
}

impl Mapping {
    /// Private zeroed memory of `len` bytes.
    pub(super) fn anonymous(len: usize) -> io::Result<Mapping> {
        Mapping::map(len, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1, 0)
    }

    /// `len` bytes of what `fd` offers at `offset` (a ring of an AF_XDP socket).
    pub(super) fn shared(fd: RawFd, offset: i64, len: usize) -> io::Result<Mapping> {
        Mapping::map(len, libc::MAP_SHARED, fd, offset)
    }

    fn map(len: usize, flags: i32, fd: RawFd, offset: i64) -> io::Result<Mapping> {
        let base = lm_dataplane::memory::map(len, flags | libc::MAP_POPULATE, fd, offset)?;
        Ok(Mapping { base, len })
    }

    /// First byte. The kernel may write anywhere in the mapping: read and write through raw pointers only.
    pub(super) fn base(&self) -> *mut u8 {
        self.base.as_ptr()
    }

    /// Length in bytes.
    pub(super) fn len(&self) -> usize {
        self.len
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: `base` and `len` are what `mmap` gave; pointers into the mapping live in structs that own it.
        unsafe { libc::munmap(self.base.as_ptr().cast(), self.len) };
    }
}
