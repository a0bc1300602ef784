//! System calls that neither `std` nor `rustix` has: many datagrams at once, zero-copy sends, the idle scheduling class.

use std::ffi::CString;
use std::fs::File;
use std::io;
use std::mem::{size_of, size_of_val, zeroed};
use std::net::UdpSocket;
use std::os::fd::{AsRawFd, FromRawFd, RawFd};
use std::ptr;

/// `SO_EE_ORIGIN_ZEROCOPY` of `include/uapi/linux/errqueue.h`.
const ORIGIN_ZEROCOPY: u8 = 5;

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

/// Reads an integer option of a socket.
pub(super) fn option(socket: &impl AsRawFd, level: i32, name: i32) -> io::Result<i32> {
    let mut value = 0_i32;
    let mut len = size_of::<i32>() as libc::socklen_t;
    // SAFETY: the value is a live integer, and its length is given.
    let result = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            level,
            name,
            ptr::from_mut(&mut value).cast(),
            &raw mut len,
        )
    };
    if result == 0 {
        Ok(value)
    } else {
        Err(io::Error::last_os_error())
    }
}

/// Lets the calling thread run only when nobody else wants its core.
pub(super) fn become_idle() -> io::Result<()> {
    // SAFETY: an all-zero `sched_param` is the only legal one for SCHED_IDLE.
    let parameters: libc::sched_param = unsafe { zeroed() };
    // SAFETY: 0 is the calling thread; `parameters` is alive.
    let result = unsafe { libc::sched_setscheduler(0, libc::SCHED_IDLE, &parameters) };
    if result != 0 {
        return Err(io::Error::last_os_error());
    }
    // Time of a thread with a nice value is booked apart in /proc/stat, so that it can be left out of what the machine did.
    // SAFETY: no memory is involved; who 0 is the calling thread.
    let result = unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, 19) };
    if result == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

/// `struct perf_event_attr` of `include/uapi/linux/perf_event.h` in its first form (`PERF_ATTR_SIZE_VER0`).
#[repr(C)]
#[derive(Default)]
struct EventAttributes {
    kind: u32,
    size: u32,
    config: u64,
    sample_period: u64,
    sample_type: u64,
    read_format: u64,
    flags: u64,
    wakeup_events: u32,
    breakpoint_type: u32,
    breakpoint_address: u64,
}

const _: () = assert!(size_of::<EventAttributes>() == 64);

/// `PERF_TYPE_TRACEPOINT`.
const TRACEPOINT: u32 = 2;

/// A file that counts how often a tracepoint of the kernel is passed, by the calling thread or by whatever runs on a core; with `filter`, of those passes that it names: reading 8 bytes gives the count so far (perf_event_open(2)).
pub(super) fn count_passes(tracepoint: u64, core: Option<i32>, filter: Option<&str>) -> io::Result<File> {
    let attributes = EventAttributes {
        kind: TRACEPOINT,
        size: size_of::<EventAttributes>() as u32,
        config: tracepoint,
        ..EventAttributes::default()
    };
    let (thread, core) = match core {
        Some(core) => (-1, core),
        None => (0, -1),
    };
    // SAFETY: the attributes are alive and as long as they say. This thread on any core, or any on this core; no group; closed on exec.
    let fd = unsafe {
        libc::syscall(
            libc::SYS_perf_event_open,
            ptr::from_ref(&attributes),
            thread,
            core,
            -1,
            PERF_FLAG_FD_CLOEXEC,
        )
    };
    let fd = RawFd::try_from(fd).expect("a descriptor, or -1");
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: just created, owned by nobody else.
    let counter = unsafe { File::from_raw_fd(fd) };
    if let Some(filter) = filter {
        let filter = CString::new(filter)?;
        // SAFETY: the descriptor is open, and the text is alive and ends with a zero.
        let set = unsafe { libc::ioctl(fd, PERF_EVENT_IOC_SET_FILTER, filter.as_ptr()) };
        if set < 0 {
            return Err(io::Error::last_os_error());
        }
    }
    Ok(counter)
}

/// Of `include/uapi/linux/perf_event.h`.
const PERF_FLAG_FD_CLOEXEC: libc::c_ulong = 1 << 3;
const PERF_EVENT_IOC_SET_FILTER: libc::c_ulong = 0x4008_2406;

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

/// Sends of a TCP socket with `MSG_ZEROCOPY` that the kernel has finished with (`Documentation/networking/msg_zerocopy.rst`), as
/// the highest number of a finished one plus one; `None` when no notice waits.
pub(super) fn finished_sends(socket: RawFd) -> io::Result<Option<u32>> {
    // Aligned for a `cmsghdr`.
    let mut control = [0_u64; 16];
    // SAFETY: all zeroes are a legal `msghdr`.
    let mut header: libc::msghdr = unsafe { zeroed() };
    header.msg_control = ptr::from_mut(&mut control).cast();
    header.msg_controllen = size_of_val(&control) as _;
    // SAFETY: the header has no vectors, and its control memory is alive and as long as it says.
    let result = unsafe { libc::recvmsg(socket, &mut header, libc::MSG_ERRQUEUE | libc::MSG_DONTWAIT) };
    if result < 0 {
        let error = io::Error::last_os_error();
        return match error.kind() {
            io::ErrorKind::WouldBlock => Ok(None),
            _ => Err(error),
        };
    }
    // SAFETY: the kernel has filled the control memory and set its length.
    let first = unsafe { libc::CMSG_FIRSTHDR(&header) };
    if first.is_null() {
        return Ok(None);
    }
    // SAFETY: the first message lies in `control`, aligned; a notice on an error queue is a `sock_extended_err` (ip(7)), which may be
    // unaligned behind its header for all we know.
    let notice = unsafe {
        libc::CMSG_DATA(first)
            .cast::<libc::sock_extended_err>()
            .read_unaligned()
    };
    if notice.ee_origin != ORIGIN_ZEROCOPY {
        return Err(io::Error::from_raw_os_error(notice.ee_errno as i32));
    }
    Ok(Some(notice.ee_data.wrapping_add(1)))
}

/// Sends without the kernel's copy; `bytes` must stay as they are until [`finished_sends`] says so (else the wrong bytes travel: no
/// memory is at risk).
pub(super) fn send_zerocopy(socket: RawFd, bytes: &[u8]) -> io::Result<usize> {
    // SAFETY: `bytes` is alive during the call; afterwards the kernel holds the pages by itself.
    let sent = unsafe {
        libc::send(
            socket,
            bytes.as_ptr().cast(),
            bytes.len(),
            libc::MSG_ZEROCOPY | libc::MSG_NOSIGNAL,
        )
    };
    usize::try_from(sent).map_err(|_| io::Error::last_os_error())
}
