//! Options of sockets: getsockopt(2) and setsockopt(2) of integers, and of structs of integers.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd as _};

/// What an option is read into.
///
/// # Safety
/// Any bytes are a value.
pub unsafe trait Plain {}

// SAFETY: integers.
unsafe impl Plain for libc::c_int {}
// SAFETY: integers.
unsafe impl Plain for u32 {}
// SAFETY: integers.
unsafe impl Plain for u64 {}
// SAFETY: a C struct of integers.
unsafe impl Plain for libc::xdp_mmap_offsets {}
// SAFETY: a C struct of integers.
unsafe impl Plain for libc::xdp_options {}
// SAFETY: a C struct of integers.
unsafe impl Plain for libc::xdp_statistics {}

/// Reads an option, which is as long as `T`.
///
/// # Errors
/// What getsockopt(2) says; `ENOPROTOOPT` where the kernel's option is shorter: that of an earlier version.
pub fn get<T: Plain>(socket: impl AsFd, level: libc::c_int, option: libc::c_int) -> io::Result<T> {
    let mut value = MaybeUninit::<T>::zeroed();
    let mut len = size_of::<T>() as libc::socklen_t;
    let (fd, to) = (socket.as_fd().as_raw_fd(), value.as_mut_ptr().cast());
    // SAFETY: the kernel writes at most `len` bytes into the exclusive `value`.
    match unsafe { libc::getsockopt(fd, level, option, to, &raw mut len) } {
        // SAFETY: any bytes are a `T`, and all of them are initialized.
        0 if len as usize == size_of::<T>() => Ok(unsafe { value.assume_init() }),
        // A kernel before 5.9 fills in the first version of AF_XDP's structs.
        0 => Err(io::Error::from_raw_os_error(libc::ENOPROTOOPT)),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Sets an option.
///
/// # Errors
/// What setsockopt(2) says.
pub fn set<T>(socket: impl AsFd, level: libc::c_int, option: libc::c_int, value: &T) -> io::Result<()> {
    let (fd, from) = (socket.as_fd().as_raw_fd(), (&raw const *value).cast());
    // SAFETY: the value is a live `T` of the length given; the kernel reads it only.
    match unsafe { libc::setsockopt(fd, level, option, from, size_of::<T>() as libc::socklen_t) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}
