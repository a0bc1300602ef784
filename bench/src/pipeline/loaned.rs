//! Memory that the kernel reads while it sends: a message's, which is a file without a name, too, and a ring of io_uring that sends from there.

use std::io;
use std::net::TcpStream;
use std::ops::Range;
use std::os::fd::{AsRawFd as _, BorrowedFd};

use io_uring::{IoUring, cqueue, opcode, types};
use lm_dataplane::memory::Mapping;

/// Requests that a ring takes at once: one is under way, and each leaves a notice behind.
const ENTRIES: u32 = 64;
/// `IORING_SEND_ZC_REPORT_USAGE` of `include/uapi/linux/io_uring.h`: a notice says whether the kernel copied.
const REPORT_USAGE: u16 = 1 << 3;
/// `IORING_NOTIF_USAGE_ZC_COPIED` there.
const COPIED: i32 = i32::MIN;

/// Memory of one message.
#[derive(Debug)]
pub(super) struct Memory {
    mapping: Mapping,
    len: u64,
}

impl Memory {
    /// Of `len` bytes, all of them there.
    pub(super) fn new(len: u64) -> io::Result<Memory> {
        let mapping = Mapping::shared(len)?;
        let mut memory = Memory { mapping, len };
        memory.bytes_mut(&(0..len)).fill(0);
        Ok(memory)
    }

    /// The file that it is.
    pub(super) fn file(&self) -> BorrowedFd<'_> {
        self.mapping.file().expect("a shared mapping has one")
    }

    /// Some of it, to be read.
    pub(super) fn bytes(&self, bytes: &Range<u64>) -> &[u8] {
        // SAFETY: the program writes through `bytes_mut` alone, which borrows `self`; nobody else has the file, and the kernel only reads it.
        unsafe { self.mapping.slice(bytes.start, bytes.end - bytes.start) }
    }

    /// Some of it, to be written. What the kernel still sends of it travels with other bytes then: no memory is at risk.
    pub(super) fn bytes_mut(&mut self, bytes: &Range<u64>) -> &mut [u8] {
        // SAFETY: `self` is borrowed alone; nobody else has the file, and the kernel only reads it.
        unsafe { self.mapping.slice_mut(bytes.start, bytes.end - bytes.start) }
    }
}

/// io_uring's zero-copy sends (`IORING_OP_SEND_ZC`) of registered memory on one connection: one request at a time, of all that was produced
/// while the one before it was under way.
pub(super) struct Ring {
    ring: IoUring,
    connection: TcpStream,
    /// Of the message: bytes that the socket has taken.
    taken: u64,
    is_under_way: bool,
    /// Requests whose memory the kernel still reads.
    held: u32,
    copied: bool,
}

impl Ring {
    /// A ring that sends from this memory.
    pub(super) fn new(connection: TcpStream, memory: &Memory) -> io::Result<Ring> {
        let ring = IoUring::new(ENTRIES)?;
        let whole = libc::iovec {
            iov_base: memory.mapping.pointer(0, memory.len).as_ptr().cast(),
            iov_len: memory.len as usize,
        };
        // SAFETY: the range is mapped now; the kernel pins its pages, whatever becomes of the mapping.
        unsafe { ring.submitter().register_buffers(&[whole]) }?;
        Ok(Ring {
            ring,
            connection,
            taken: 0,
            is_under_way: false,
            held: 0,
            copied: false,
        })
    }

    /// Whether the kernel has copied any.
    pub(super) fn copied(&self) -> bool {
        self.copied
    }

    pub(super) fn connection(&mut self) -> &mut TcpStream {
        &mut self.connection
    }

    /// Sends what is produced of a message, its first so many bytes, unless a request is under way.
    pub(super) fn send(&mut self, memory: &Memory, produced: u64) -> io::Result<()> {
        self.reap()?;
        while !self.is_under_way && self.taken < produced {
            let len = produced - self.taken;
            let request = opcode::SendZc::new(
                types::Fd(self.connection.as_raw_fd()),
                memory.mapping.pointer(self.taken, len).as_ptr(),
                len as u32,
            );
            // A part of it would have to be asked for again.
            let request = request.buf_index(Some(0)).flags(libc::MSG_WAITALL);
            let request = request.zc_flags(REPORT_USAGE).build();
            // SAFETY: the memory is registered, so that its pages stay until the kernel has finished with them.
            unsafe { self.ring.submission().push(&request) }.map_err(io::Error::other)?;
            self.is_under_way = true;
            self.ring.submit()?;
            self.reap()?;
        }
        Ok(())
    }

    /// Waits until all of a message is sent and none of its memory is read any more.
    pub(super) fn finish(&mut self, memory: &Memory) -> io::Result<()> {
        self.send(memory, memory.len)?;
        while self.is_under_way || self.held > 0 {
            self.ring.submit_and_wait(1)?;
            self.send(memory, memory.len)?;
        }
        self.taken = 0;
        Ok(())
    }

    /// Takes what the kernel has to say.
    fn reap(&mut self) -> io::Result<()> {
        for said in self.ring.completion() {
            if cqueue::notif(said.flags()) {
                self.held -= 1;
                self.copied |= said.result() & COPIED != 0;
                continue;
            }
            let sent = said.result();
            if sent < 0 {
                return Err(io::Error::from_raw_os_error(-sent));
            }
            self.taken += sent as u64;
            self.is_under_way = false;
            self.held += u32::from(cqueue::more(said.flags()));
        }
        Ok(())
    }
}
