//! An AF_XDP socket in the plainest form: aligned chunks that do not overlap, the first half of the memory for receiving and the second half for
//! sending. Rings and memory are the data plane's own ([`lm_dataplane::xsk`]): what is measured is LM without gate, messages and sessions. What the
//! rings themselves cost is judged by the crate `xsk-rs`.

use std::io;
use std::os::fd::{AsFd as _, AsRawFd as _};
use std::ptr;
use std::time::{Duration, Instant};

use lm_dataplane::HugePages;
use lm_dataplane::memory::Umem;
use lm_dataplane::ring::{CompletionRing, Descriptor, FillRing, RxRing, TxRing};
use lm_dataplane::xsk::{BindMode, Xsk, XskConfig, XskError, XskOptions};

/// Bytes of one chunk: a 1514-byte packet and the kernel's 256-byte headroom fit.
pub(super) const CHUNK_LEN: u64 = 2048;
/// Bytes of one chunk where packets take several: a page, the most there is for aligned chunks.
pub(super) const LONG_CHUNK_LEN: u64 = 4096;
/// Bytes of a chunk that the kernel leaves before what it receives into it (`XDP_PACKET_HEADROOM`).
pub(super) const HEADROOM_LEN: u64 = lm_dataplane::memory::PACKET_HEADROOM;
/// Chunks for receiving, and as many again for sending.
pub(super) const CHUNKS_EACH_WAY: u32 = 4096;

/// How a program waits for packets.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Idle {
    /// Look again at once.
    Spin,
    /// Sleep in `poll(2)`.
    Poll,
}

/// The socket, its memory and its rings.
#[derive(Debug)]
pub(super) struct Socket {
    xsk: Xsk,
    memory: Umem,
    chunk_len: u64,
    pub(super) fill: FillRing,
    pub(super) completion: CompletionRing,
    pub(super) rx: RxRing,
    pub(super) tx: TxRing,
}

impl Socket {
    /// Opens a socket bound to `queue` of the interface, with `posted` receive chunks on the fill ring. In copy mode packets may take several
    /// chunks where these are of [`LONG_CHUNK_LEN`].
    pub(super) fn open(
        ifindex: u32,
        queue: u32,
        posted: u32,
        chunk_len: u64,
        bind: BindMode,
    ) -> io::Result<Socket> {
        let memory = Umem::new(chunk_len * 2 * u64::from(CHUNKS_EACH_WAY), HugePages::Off)?;
        let config = XskConfig {
            interface_index: ifindex,
            queue,
            mapping: memory.mapping(),
            registered_len: memory.len(),
            chunk_len: chunk_len as u32,
            fill_len: CHUNKS_EACH_WAY,
            completion_len: CHUNKS_EACH_WAY,
            rx_len: CHUNKS_EACH_WAY,
            tx_len: CHUNKS_EACH_WAY,
            bind,
            need_wakeup: true,
        };
        let options = XskOptions {
            aligned_chunks: true,
            headroom_len: 0,
            multi_buffer: bind == BindMode::Copy && chunk_len == LONG_CHUNK_LEN,
        };
        let (xsk, rings) = patiently(|| Xsk::open_with(&config, &options).map_err(system_error))?;
        let mut socket = Socket {
            xsk,
            chunk_len,
            fill: rings.fill,
            completion: rings.completion,
            rx: rings.rx,
            tx: rings.tx,
            memory,
        };
        let posted = posted.min(CHUNKS_EACH_WAY);
        for chunk in 0..posted {
            socket.fill.write(chunk, u64::from(chunk) * chunk_len);
        }
        socket.fill.submit(posted);
        Ok(socket)
    }

    /// The socket's descriptor.
    pub(super) fn raw_fd(&self) -> i32 {
        self.xsk.as_fd().as_raw_fd()
    }

    /// Asks the kernel to send what is in the TX ring. It takes one budget's worth a call.
    pub(super) fn wake_tx(&self) -> io::Result<()> {
        self.xsk.wake_tx().map_err(io::Error::other)
    }

    /// Wakes a driver that waits for chunks.
    pub(super) fn wake_rx(&self) -> io::Result<()> {
        self.xsk.wake_rx().map_err(io::Error::other)
    }

    /// True when the kernel has taken everything that was submitted.
    pub(super) fn is_drained(&mut self) -> bool {
        self.tx.consumed() == self.tx.produced()
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
    pub(super) fn write_packet(&mut self, n: u32, chunk: u64, len: u32) {
        let chunks = self.chunks(len);
        self.tx.free(n + chunks);
        for part in 0..chunks {
            let at = part * self.chunk_len as u32;
            let descriptor = Descriptor::new(chunk + u64::from(at), (len - at).min(self.chunk_len as u32));
            let is_last = part + 1 == chunks;
            self.tx.write(
                n + part,
                if is_last {
                    descriptor
                } else {
                    descriptor.continued()
                },
            );
        }
    }

    /// Gives the chunks of the first `count` received descriptors back to be received into.
    pub(super) fn give_back(&mut self, count: u32) {
        self.fill.free(count);
        for n in 0..count {
            self.fill.write(n, self.chunk_of(self.rx.read(n).addr));
        }
        self.rx.release(count);
        self.fill.submit(count);
    }

    /// Writes `bytes` at `address` of the memory.
    pub(super) fn copy_in(&self, address: u64, bytes: &[u8]) {
        self.memory.copy_to(address, bytes);
    }

    /// Copies `N` bytes at `address` of the memory out.
    pub(super) fn copy_out<const N: usize>(&self, address: u64) -> [u8; N] {
        self.memory.read_header(address)
    }

    /// Packets that the kernel dropped at this socket, for any reason.
    pub(super) fn dropped(&self) -> io::Result<u64> {
        let lost = self.xsk.statistics()?;
        Ok(lost.rx_dropped + lost.rx_ring_full + lost.rx_fill_ring_empty)
    }
}

fn system_error(error: XskError) -> io::Error {
    match error {
        XskError::Busy { .. } => io::Error::from_raw_os_error(libc::EBUSY),
        other => io::Error::other(crate::cli::chain(&other)),
    }
}

/// Sleeps until a packet waits at the socket, 100 ms at most.
pub(super) fn sleep(fd: i32) {
    let mut waiting = libc::pollfd {
        fd,
        events: libc::POLLIN,
        revents: 0,
    };
    // SAFETY: one live pollfd.
    unsafe { libc::poll(&mut waiting, 1, 100) };
}

/// Repeats what fails with EBUSY for up to ten seconds: sockets and links of a program that has just ended are freed late, and on a busy machine
/// by more than a second.
pub(super) fn patiently<T>(mut attempt: impl FnMut() -> io::Result<T>) -> io::Result<T> {
    let deadline = Instant::now() + Duration::from_secs(10);
    loop {
        match attempt() {
            Err(error) if error.raw_os_error() == Some(libc::EBUSY) && Instant::now() < deadline => {
                std::thread::sleep(Duration::from_millis(5));
            }
            result => return result,
        }
    }
}

/// Makes non-blocking reads of `fd` poll the device queue that its last packet came from, `budget` packets a call.
pub(super) fn prefer_busy_poll(fd: i32, budget: u32) -> io::Result<()> {
    const SO_PREFER_BUSY_POLL: i32 = 69;
    const SO_BUSY_POLL_BUDGET: i32 = 70;
    set_option(fd, SO_PREFER_BUSY_POLL, 1)?;
    // Microseconds.
    set_option(fd, libc::SO_BUSY_POLL, 20)?;
    set_option(fd, SO_BUSY_POLL_BUDGET, budget as i32)
}

/// The NAPI id that the kernel has noted for a socket; 0 when none.
pub(super) fn napi_id(fd: i32) -> io::Result<u32> {
    const SO_INCOMING_NAPI_ID: i32 = 56;
    let (mut value, mut len) = (0_u32, size_of::<u32>() as u32);
    // SAFETY: the kernel writes at most `len` bytes into a live value of that size.
    let result = unsafe {
        libc::getsockopt(
            fd,
            libc::SOL_SOCKET,
            SO_INCOMING_NAPI_ID,
            ptr::from_mut(&mut value).cast(),
            &mut len,
        )
    };
    if result < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(value)
    }
}

/// An option of the socket level.
pub(super) fn set_option(fd: i32, name: i32, value: i32) -> io::Result<()> {
    // SAFETY: the kernel reads an i32 that lives.
    let result = unsafe {
        libc::setsockopt(
            fd,
            libc::SOL_SOCKET,
            name,
            ptr::from_ref(&value).cast(),
            size_of::<i32>() as u32,
        )
    };
    if result < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(())
    }
}
