//! What the kernel says of a socket that a program and the daemon have between them.

use std::io;
use std::os::fd::{AsFd, AsRawFd as _};

use crate::sockopt;

/// Bytes that the other end of a Unix socket has not read (`SIOCOUTQ`), as the kernel charges them: no packet counts less than its
/// `sk_buff`. While one is being freed it counts one byte more (net/core/sock.c, `sock_wfree`).
///
/// # Errors
/// What ioctl(2) says.
pub fn unread_len(socket: impl AsFd) -> io::Result<u32> {
    let mut len: libc::c_int = 0;
    // SAFETY: the kernel writes an int into the exclusive `len`.
    match unsafe { libc::ioctl(socket.as_fd().as_raw_fd(), libc::TIOCOUTQ, &raw mut len) } {
        0 => Ok(len.max(0) as u32),
        _ => Err(io::Error::last_os_error()),
    }
}

/// A number that the network namespace of a socket has alone while the machine runs (`SO_NETNS_COOKIE`, since Linux 5.14).
///
/// # Errors
/// What getsockopt(2) says: it is no socket, or the kernel is older.
pub fn netns_cookie(socket: impl AsFd) -> io::Result<u64> {
    const SO_NETNS_COOKIE: libc::c_int = 71;
    sockopt::get(socket, libc::SOL_SOCKET, SO_NETNS_COOKIE)
}

/// Index of the interface that alone a socket receives from (`SO_BINDTOIFINDEX`); 0: from all.
///
/// # Errors
/// What getsockopt(2) says: it is no socket.
pub fn bound_interface(socket: impl AsFd) -> io::Result<u32> {
    sockopt::get(socket, libc::SOL_SOCKET, libc::SO_BINDTOIFINDEX)
}
