//! An AF_XDP socket with its own memory, in the plainest form: aligned chunks that do not overlap, the first
//! half of the memory for receiving and the second half for sending. Written against `include/uapi/linux/if_xdp.h` and
//! `Documentation/networking/af_xdp.rst`; with the data plane, whose upper bound it measures, it shares how a mapping
//! and an option are asked for.

use std::error::Error;
use std::io;
use std::mem::offset_of;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::ptr;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use lm_box::is_caused_by;
use lm_dataplane::sockopt;
use rustix::io::Errno;
use rustix::net::sockopt::{
    set_socket_send_buffer_size_force, set_xdp_rx_ring_size, set_xdp_tx_ring_size,
    set_xdp_umem_completion_ring_size, set_xdp_umem_fill_ring_size, set_xdp_umem_reg, xdp_mmap_offsets,
};
use rustix::net::xdp::{
    SocketAddrXdp, SocketAddrXdpFlags, XDP_PGOFF_RX_RING, XDP_PGOFF_TX_RING, XDP_UMEM_PGOFF_COMPLETION_RING,
    XDP_UMEM_PGOFF_FILL_RING, XdpRingOffset, XdpUmemReg, XdpUmemRegFlags,
};
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType};

use super::mapping::Mapping;

/// Bytes of one chunk: a 1514-byte packet and the kernel's 256-byte headroom fit.
pub(super) const CHUNK_LEN: u64 = 2048;
/// Bytes of one chunk where packets take several: a page, the most there is for aligned chunks.
pub(super) const LONG_CHUNK_LEN: u64 = 4096;
/// Bytes of a chunk that the kernel leaves before what it receives into it (`XDP_PACKET_HEADROOM`).
pub(super) const HEADROOM_LEN: u64 = 256;
/// More descriptors of the same packet follow (`XDP_PKT_CONTD`).
const CONTINUES: u32 = 1;
/// Chunks for receiving, and as many again for sending.
pub(super) const CHUNKS_EACH_WAY: u32 = 4096;
const RING_LEN: u32 = CHUNKS_EACH_WAY;
/// Bytes of sent packets that the kernel may hold for the socket. A copied packet is charged to the sender's socket until it was consumed: the
/// default (212,992 bytes) stops the sender after some ninety full frames, with EAGAIN.
const SEND_BUFFER_LEN: usize = 16 << 20;

/// One ring: the producer's and the consumer's index, then the entries. One side of each index is the kernel's.
#[derive(Debug)]
pub(super) struct Ring<T> {
    memory: Mapping,
    producer: *const AtomicU32,
    consumer: *const AtomicU32,
    flags: *const AtomicU32,
    entries: *mut T,
    /// The index that we own, and the last value seen of the kernel's.
    own: u32,
    seen: u32,
}

// SAFETY: the pointers lead into `memory`, which moves along; nothing in a ring is bound to a thread.
unsafe impl<T: Send> Send for Ring<T> {}

impl<T: Copy> Ring<T> {
    fn new(fd: &OwnedFd, file_offset: u64, offsets: &XdpRingOffset) -> io::Result<Ring<T>> {
        let len = offsets.desc as usize + RING_LEN as usize * size_of::<T>();
        let memory = Mapping::shared(fd.as_raw_fd(), file_offset as i64, len)?;
        let base = memory.base();
        // SAFETY: the kernel's offsets lie inside the mapping, whose length was computed from them; mappings are
        // page-aligned and the kernel aligns indices to 4 and entries to 8 bytes.
        let at = |offset: u64| unsafe { base.add(offset as usize) };
        Ok(Ring {
            producer: at(offsets.producer).cast(),
            consumer: at(offsets.consumer).cast(),
            flags: at(offsets.flags.unwrap_or_default()).cast(),
            entries: at(offsets.desc).cast(),
            memory,
            own: 0,
            seen: 0,
        })
    }

    fn producer(&self) -> &AtomicU32 {
        // SAFETY: points to an aligned u32 in `memory`, which lives as long as `self`; both sides use it atomically.
        unsafe { &*self.producer }
    }

    fn consumer(&self) -> &AtomicU32 {
        // SAFETY: as for `producer`.
        unsafe { &*self.consumer }
    }

    fn entry(&self, index: u32) -> *mut T {
        debug_assert!(self.memory.len() >= RING_LEN as usize * size_of::<T>());
        // SAFETY: the masked index is below RING_LEN, a power of two, for which the mapping was made.
        unsafe { self.entries.add((index & (RING_LEN - 1)) as usize) }
    }

    // As the consumer (RX and completion ring).

    /// Entries that wait, at most `max`.
    pub(super) fn waiting(&mut self, max: u32) -> u32 {
        let mut count = self.seen.wrapping_sub(self.own);
        if count == 0 {
            // Acquire pairs with the kernel's store-release of the producer index: entries are written before it.
            self.seen = self.producer().load(Ordering::Acquire);
            count = self.seen.wrapping_sub(self.own);
        }
        count.min(max)
    }

    /// The `n`-th entry that waits.
    pub(super) fn read(&self, n: u32) -> T {
        // SAFETY: `entry` is inside the ring, and below the producer index the kernel does not write.
        unsafe { self.entry(self.own.wrapping_add(n)).read() }
    }

    /// Gives `count` entries back to the kernel.
    pub(super) fn release(&mut self, count: u32) {
        self.own = self.own.wrapping_add(count);
        // Release: our reads of the entries happen before the kernel may see room for new ones.
        self.consumer().store(self.own, Ordering::Release);
    }

    // As the producer (fill and TX ring).

    /// Entries that may be written.
    pub(super) fn room(&mut self) -> u32 {
        // Acquire pairs with the kernel's store-release of the consumer index: it has read what we overwrite.
        self.seen = self.consumer().load(Ordering::Acquire);
        RING_LEN - self.own.wrapping_sub(self.seen)
    }

    /// Whether the kernel takes nothing more until it is woken (`XDP_RING_NEED_WAKEUP`): in zero-copy mode, a driver that found the fill ring empty.
    pub(super) fn needs_wakeup(&self) -> bool {
        // SAFETY: as for `producer`.
        let flags = unsafe { &*self.flags };
        // Relaxed: it orders nothing; a flag that is seen late is seen at the next look.
        flags.load(Ordering::Relaxed) & libc::XDP_RING_NEED_WAKEUP != 0
    }

    /// True when the kernel has taken everything that was submitted.
    pub(super) fn is_drained(&mut self) -> bool {
        self.room() == RING_LEN
    }

    /// Writes the `n`-th entry after the last submitted one.
    pub(super) fn write(&mut self, n: u32, value: T) {
        // SAFETY: `entry` is inside the ring, and above the producer index the kernel does not read; callers stay
        // below `room`.
        unsafe { self.entry(self.own.wrapping_add(n)).write(value) }
    }

    /// Hands `count` written entries to the kernel.
    pub(super) fn submit(&mut self, count: u32) {
        self.own = self.own.wrapping_add(count);
        // Release: the entries (and the packets they name) are written before the kernel sees the index.
        self.producer().store(self.own, Ordering::Release);
    }
}

/// The socket, its memory and its rings.
#[derive(Debug)]
pub(super) struct Socket {
    fd: OwnedFd,
    memory: Mapping,
    chunk_len: u64,
    pub(super) fill: Ring<u64>,
    pub(super) completion: Ring<u64>,
    pub(super) rx: Ring<libc::xdp_desc>,
    pub(super) tx: Ring<libc::xdp_desc>,
}

impl Socket {
    /// Opens a socket bound to `queue` of the interface, with `posted` receive chunks on the
    /// fill ring. Packets may take several chunks where these are of [`LONG_CHUNK_LEN`]. The card itself reads and writes its memory, or the
    /// kernel copies.
    pub(super) fn open(
        ifindex: u32,
        queue: u32,
        posted: u32,
        chunk_len: u64,
        by_card: bool,
    ) -> io::Result<Socket> {
        let flags = SocketFlags::CLOEXEC;
        let fd = rustix::net::socket_with(AddressFamily::XDP, SocketType::RAW, flags, None)?;
        set_socket_send_buffer_size_force(&fd, SEND_BUFFER_LEN)?;
        let memory = Mapping::anonymous((chunk_len * 2 * u64::from(CHUNKS_EACH_WAY)) as usize)?;
        let registration = XdpUmemReg {
            addr: memory.base() as u64,
            len: memory.len() as u64,
            chunk_size: chunk_len as u32,
            headroom: 0,
            flags: XdpUmemRegFlags::empty(),
            tx_metadata_len: 0,
        };
        set_xdp_umem_reg(&fd, registration)?;
        set_xdp_umem_fill_ring_size(&fd, RING_LEN)?;
        set_xdp_umem_completion_ring_size(&fd, RING_LEN)?;
        set_xdp_rx_ring_size(&fd, RING_LEN)?;
        set_xdp_tx_ring_size(&fd, RING_LEN)?;
        let offsets = xdp_mmap_offsets(&fd)?;
        let mut fill = Ring::new(&fd, XDP_UMEM_PGOFF_FILL_RING, &offsets.fr)?;
        for chunk in 0..posted.min(CHUNKS_EACH_WAY) {
            fill.write(chunk, u64::from(chunk) * chunk_len);
        }
        fill.submit(posted.min(CHUNKS_EACH_WAY));
        let socket = Socket {
            fill,
            completion: Ring::new(&fd, XDP_UMEM_PGOFF_COMPLETION_RING, &offsets.cr)?,
            rx: Ring::new(&fd, XDP_PGOFF_RX_RING, &offsets.rx)?,
            tx: Ring::new(&fd, XDP_PGOFF_TX_RING, &offsets.tx)?,
            memory,
            chunk_len,
            fd,
        };
        let flags = match by_card {
            true => SocketAddrXdpFlags::XDP_ZEROCOPY,
            false if chunk_len == LONG_CHUNK_LEN => {
                SocketAddrXdpFlags::XDP_COPY | SocketAddrXdpFlags::XDP_USE_SG
            }
            false => SocketAddrXdpFlags::XDP_COPY,
        };
        let address = SocketAddrXdp::new(flags | SocketAddrXdpFlags::XDP_USE_NEED_WAKEUP, ifindex, queue);
        patiently(|| rustix::net::bind(&socket.fd, &address).map_err(io::Error::from))?;
        Ok(socket)
    }

    /// The socket's descriptor.
    pub(super) fn raw_fd(&self) -> i32 {
        self.fd.as_raw_fd()
    }

    /// Asks the kernel to send what is in the TX ring. It takes one budget's worth a call and says EAGAIN when more is
    /// left; EBUSY and ENOBUFS mean that the device or its memory is full for the moment.
    pub(super) fn wake_tx(&self) -> io::Result<()> {
        match rustix::net::send(&self.fd, &[], SendFlags::DONTWAIT) {
            Ok(_) | Err(Errno::AGAIN | Errno::BUSY | Errno::NOBUFS) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// Wakes a driver that waits for chunks.
    pub(super) fn wake_rx(&self) {
        // What is the matter is seen when nothing comes.
        let _asked = rustix::net::recv(&self.fd, &mut [0; 0], RecvFlags::DONTWAIT);
    }

    /// Bytes of one chunk.
    pub(super) fn chunk_len(&self) -> u64 {
        self.chunk_len
    }

    /// Where the chunks for sending begin.
    pub(super) fn first_to_send(&self) -> u64 {
        u64::from(CHUNKS_EACH_WAY) * self.chunk_len
    }

    /// Chunks that a packet of `len` bytes takes when it is sent.
    pub(super) fn chunks(&self, len: u32) -> u32 {
        len.div_ceil(self.chunk_len as u32)
    }

    /// The chunk that an address lies in.
    pub(super) fn chunk_of(&self, address: u64) -> u64 {
        address & !(self.chunk_len - 1)
    }

    /// Writes the descriptors of a packet, which lies in one chunk after the other, from the TX ring's `n`-th entry on.
    pub(super) fn write_packet(&mut self, mut n: u32, chunk: u64, len: u32) {
        let mut at = 0;
        while at < u64::from(len) {
            let part = (u64::from(len) - at).min(self.chunk_len);
            let descriptor = libc::xdp_desc {
                addr: chunk + at,
                len: part as u32,
                options: if at + part < u64::from(len) { CONTINUES } else { 0 },
            };
            self.tx.write(n, descriptor);
            at += part;
            n += 1;
        }
    }

    /// Writes `bytes` at `address` of the memory.
    pub(super) fn copy_in(&self, address: u64, bytes: &[u8]) {
        assert!(
            address as usize + bytes.len() <= self.memory.len(),
            "address inside the memory"
        );
        // SAFETY: in bounds; the caller owns the chunk (it is in no ring), so the kernel does not touch it.
        unsafe {
            ptr::copy_nonoverlapping(
                bytes.as_ptr(),
                self.memory.base().add(address as usize),
                bytes.len(),
            )
        };
    }

    /// Copies `N` bytes at `address` of the memory out.
    pub(super) fn copy_out<const N: usize>(&self, address: u64) -> [u8; N] {
        assert!(
            address as usize + N <= self.memory.len(),
            "address inside the memory"
        );
        // SAFETY: in bounds; the caller owns the chunk (its RX descriptor was read), so the kernel does not touch it.
        unsafe {
            self.memory
                .base()
                .add(address as usize)
                .cast::<[u8; N]>()
                .read_unaligned()
        }
    }
}

/// Whether this descriptor is its packet's last one.
pub(super) fn is_last(descriptor: &libc::xdp_desc) -> bool {
    descriptor.options & CONTINUES == 0
}

/// Repeats what fails with EBUSY for up to ten seconds: sockets and links of a program that has just ended are freed late, and on a busy machine
/// by more than a second.
pub(super) fn patiently<T, E: Error + 'static>(mut attempt: impl FnMut() -> Result<T, E>) -> Result<T, E> {
    let deadline = Instant::now() + Duration::from_secs(10);
    loop {
        match attempt() {
            Err(error) if is_caused_by(&error, libc::EBUSY) && Instant::now() < deadline => {
                std::thread::sleep(Duration::from_millis(5));
            }
            result => return result,
        }
    }
}

/// Id of the NAPI instance that the socket's last packet came through; 0 before the first one.
pub(super) fn napi_id(socket: &impl AsFd) -> io::Result<u32> {
    sockopt::get(socket, libc::SOL_SOCKET, libc::SO_INCOMING_NAPI_ID)
}

/// Sets an option to a plain value.
pub(crate) fn set_option<T>(socket: &impl AsFd, level: i32, name: i32, value: T) -> io::Result<()> {
    sockopt::set(socket, level, name, &value)
}

const _: () = assert!(offset_of!(libc::xdp_desc, len) == 8 && size_of::<libc::xdp_desc>() == 16);
