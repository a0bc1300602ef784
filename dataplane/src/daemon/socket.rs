//! What the kernel says of a socket that a program and the daemon have between them.

use std::io;
use std::os::fd::{AsFd, AsRawFd as _};

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
    let bytes = option(socket, SO_NETNS_COOKIE)?;
    Ok(u64::from_ne_bytes(bytes))
}

/// Index of the interface that alone a socket receives from (`SO_BINDTOIFINDEX`); 0: from all.
///
/// # Errors
/// What getsockopt(2) says: it is no socket.
pub fn bound_interface(socket: impl AsFd) -> io::Result<u32> {
    const SO_BINDTOIFINDEX: libc::c_int = 62;
    let bytes = option(socket, SO_BINDTOIFINDEX)?;
    Ok(u32::from_ne_bytes(bytes))
}

/// An option that is as long as that.
fn option<const LEN: usize>(socket: impl AsFd, option: libc::c_int) -> io::Result<[u8; LEN]> {
    let (mut value, mut len) = ([0; LEN], LEN as libc::socklen_t);
    let fd = socket.as_fd().as_raw_fd();
    // SAFETY: the kernel writes at most `len` bytes into the exclusive `value`.
    let done = unsafe {
        libc::getsockopt(
            fd,
            libc::SOL_SOCKET,
            option,
            value.as_mut_ptr().cast(),
            &raw mut len,
        )
    };
    match done {
        0 if len as usize == LEN => Ok(value),
        0 => Err(io::Error::from_raw_os_error(libc::ENOPROTOOPT)),
        _ => Err(io::Error::last_os_error()),
    }
}
