//! System calls that neither `std` nor `rustix` has: many datagrams at once, memory that stays.

use std::io;
use std::mem::{size_of, zeroed};
use std::net::UdpSocket;
use std::os::fd::AsRawFd;
use std::ptr;

/// Keeps in memory what of this program has been there once: under pressure a page of its code takes milliseconds to come again.
pub(super) fn keep_memory() -> io::Result<()> {
    // SAFETY: mlockall(2) takes flags alone and changes no byte of memory.
    match unsafe { libc::mlockall(libc::MCL_CURRENT | libc::MCL_FUTURE | libc::MCL_ONFAULT) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Sets an integer option of a socket.
pub(super) fn set_option(socket: &impl AsRawFd, level: i32, name: i32, value: i32) -> io::Result<()> {
    // SAFETY: the value is a live integer, and its length is given.
    let result = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            level,
            name,
            ptr::from_ref(&value).cast(),
            size_of::<i32>() as libc::socklen_t,
        )
    };
    if result == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

/// Datagrams that are sent or received by one system call.
pub(super) struct Batch {
    memory: Vec<u8>,
    stride: usize,
    /// Lengths of the datagrams in `memory`, from the first one on.
    lengths: Vec<usize>,
    vectors: Vec<libc::iovec>,
    headers: Vec<libc::mmsghdr>,
}

impl Batch {
    /// Room for `count` datagrams of `stride` bytes at most.
    pub(super) fn new(count: usize, stride: usize) -> Batch {
        let empty = libc::iovec {
            iov_base: ptr::null_mut(),
            iov_len: 0,
        };
        Batch {
            memory: vec![0x5a; count * stride],
            stride,
            lengths: Vec::with_capacity(count),
            vectors: vec![empty; count],
            // SAFETY: all zeroes are a legal `mmsghdr`: no address, no vectors, no control data.
            headers: vec![unsafe { zeroed() }; count],
        }
    }

    /// Datagrams in it.
    pub(super) fn len(&self) -> usize {
        self.lengths.len()
    }

    pub(super) fn is_full(&self) -> bool {
        self.lengths.len() == self.headers.len()
    }

    /// The `n`-th datagram.
    pub(super) fn datagram(&self, n: usize) -> &[u8] {
        &self.memory[n * self.stride..][..self.lengths[n]]
    }

    /// Adds a datagram of `len` bytes, to be written by the caller.
    pub(super) fn push(&mut self, len: usize) -> &mut [u8] {
        let at = self.lengths.len() * self.stride;
        self.lengths.push(len);
        &mut self.memory[at..][..len]
    }

    /// Points the headers at `len` bytes of each datagram's memory.
    fn aim(&mut self, len: impl Fn(usize) -> usize) {
        let memory = self.memory.as_mut_ptr();
        for (n, (vector, header)) in self.vectors.iter_mut().zip(&mut self.headers).enumerate() {
            vector.iov_base = memory.wrapping_add(n * self.stride).cast();
            vector.iov_len = len(n);
            header.msg_hdr.msg_iov = vector;
            header.msg_hdr.msg_iovlen = 1;
        }
    }

    /// Sends everything and empties the batch.
    pub(super) fn send(&mut self, socket: &UdpSocket) -> io::Result<()> {
        let lengths = std::mem::take(&mut self.lengths);
        self.aim(|n| lengths.get(n).copied().unwrap_or(0));
        let mut sent = 0;
        while sent < lengths.len() {
            let rest = &mut self.headers[sent..lengths.len()];
            // SAFETY: each header points at its vector and that at its part of `memory`; both live as long as `self`, which nobody
            // else touches meanwhile, and lengths are not beyond the stride (checked by `push`'s slicing).
            let count =
                unsafe { libc::sendmmsg(socket.as_raw_fd(), rest.as_mut_ptr(), rest.len() as u32, 0) };
            match usize::try_from(count) {
                Ok(count) => sent += count,
                Err(_) => return Err(io::Error::last_os_error()),
            }
        }
        self.lengths = lengths;
        self.lengths.clear();
        Ok(())
    }

    /// Waits for a datagram as the socket is told to wait, and takes as many as there are.
    pub(super) fn receive(&mut self, socket: &UdpSocket) -> io::Result<()> {
        self.lengths.clear();
        let stride = self.stride;
        self.aim(|_| stride);
        // SAFETY: as in `send`; the kernel writes at most `stride` bytes for each header.
        let count = unsafe {
            libc::recvmmsg(
                socket.as_raw_fd(),
                self.headers.as_mut_ptr(),
                self.headers.len() as u32,
                libc::MSG_WAITFORONE,
                ptr::null_mut(),
            )
        };
        let count = usize::try_from(count).map_err(|_| io::Error::last_os_error())?;
        let headers = self.headers[..count].iter();
        self.lengths.extend(headers.map(|header| header.msg_len as usize));
        Ok(())
    }
}
