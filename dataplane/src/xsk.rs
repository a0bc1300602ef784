//! An AF_XDP socket on one queue of one device: set-up, wake-ups, statistics, teardown.
//!
//! Set-up follows `net/xdp/xsk.c`: socket, `XDP_UMEM_REG`, ring lengths, ring mappings, bind. Each socket registers the
//! memory for itself (a second UMEM on one queue is `EBUSY`; the same memory may be registered by sockets on several
//! queues), so every queue has its own fill and completion ring.
//!
//! # Teardown
//!
//! A socket lives until its descriptor is closed *and* its ring mappings are gone, and even then the kernel releases the
//! queue later, from a work item (`xp_release_deferred`). So: drop the rings, drop the [`Xsk`], in any order, and expect
//! the next [`Xsk::open`] on that queue to find it busy for a moment; it retries for [`BIND_PATIENCE`]. The registered
//! memory stays pinned by the kernel until then, mapped or not.

mod error;
mod map;
mod options;
mod share;

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::xdp::{SocketAddrXdp, SocketAddrXdpFlags, SocketAddrXdpWithSharedUmem};
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType};

pub use error::XskError;
use map::map_rings;
pub use options::{MIN_FRAME_CAPACITY, XskOptions};
pub use share::SharedRings;

use crate::memory::{CHUNK_LEN_RANGE, Mapping};
use crate::port::{QueueDrops, WakeError};
use crate::ring::{CompletionRing, FillRing, RxRing, TxRing};
use crate::sockopt;

/// How long [`Xsk::open`] tries again while the kernel still releases the queue's last socket.
pub const BIND_PATIENCE: Duration = Duration::from_secs(1);

/// How the socket is to move packets.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum BindMode {
    /// Zero-copy where the driver can, else copy.
    Auto,
    /// The kernel copies between its own packets and the UMEM; works on every device.
    #[default]
    Copy,
    /// The device reads and writes the UMEM itself, or an error.
    ZeroCopy,
}

/// What to open.
#[derive(Clone, Debug)]
pub struct XskConfig<'a> {
    /// Index of the device.
    pub interface_index: u32,
    /// Receive queue whose packets a program may redirect here.
    pub queue: u32,
    /// The memory; kept alive by the socket.
    pub mapping: &'a Arc<Mapping>,
    /// Bytes of the memory to register, from its start; at most its length. Registered pages are pinned, so they cost
    /// real memory.
    pub registered_len: u64,
    /// Length of a chunk in bytes, 2048 to 4096: what must follow a fill address inside the registered memory. A
    /// packet longer than `chunk_len` - 256 is lost.
    pub chunk_len: u32,
    /// Fill ring length in entries, a power of two, as for the others.
    pub fill_len: u32,
    /// Completion ring length in entries: at least as many as packets in flight.
    pub completion_len: u32,
    /// RX ring length in entries: at least `fill_len`, or received packets can meet a full ring.
    pub rx_len: u32,
    /// TX ring length in entries.
    pub tx_len: u32,
    /// Copy or zero-copy.
    pub bind: BindMode,
}

/// The application's ends of a socket's rings. Each keeps the socket alive.
#[derive(Debug)]
pub struct Rings {
    /// Frames to receive into.
    pub fill: FillRing,
    /// Packets received.
    pub rx: RxRing,
    /// Packets to send.
    pub tx: TxRing,
    /// Packets sent.
    pub completion: CompletionRing,
}

/// Packets that the kernel lost on behalf of a socket, since it was opened: `struct xdp_statistics` of `linux/if_xdp.h`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct XdpStatistics {
    /// In copy mode: packets longer than a chunk holds, *and* those that met an empty fill ring, which count below too.
    pub rx_dropped: u64,
    /// Invalid fill entries as far as the kernel counts them (in unaligned mode it skips them uncounted).
    pub rx_invalid_descriptors: u64,
    /// Invalid TX descriptors.
    pub tx_invalid_descriptors: u64,
    /// Received packets that met a full RX ring. Their fill entries come back in another order: reopen the socket.
    pub rx_ring_full: u64,
    /// Received packets that met an empty fill ring.
    pub rx_fill_ring_empty: u64,
    /// Times that the kernel found the TX ring empty.
    pub tx_ring_empty: u64,
}

impl From<XdpStatistics> for QueueDrops {
    fn from(statistics: XdpStatistics) -> QueueDrops {
        QueueDrops {
            dropped: statistics.rx_dropped,
            ring_full: statistics.rx_ring_full,
            no_entry: statistics.rx_fill_ring_empty,
            invalid: statistics.rx_invalid_descriptors,
        }
    }
}

/// A socket that has its memory and its rings, and no queue yet.
#[derive(Debug)]
pub struct Prepared {
    fd: OwnedFd,
    rings: Rings,
}

impl Prepared {
    /// Binds it to its queue; `config` and `options` are those that it was prepared with.
    ///
    /// # Errors
    ///
    /// Those of [`Xsk::open_with`].
    pub fn bind(self, config: &XskConfig<'_>, options: &XskOptions) -> Result<(Xsk, Rings), XskError> {
        bind(&self.fd, config, options)?;
        let zero_copy = is_zero_copy(&self.fd)?;
        Ok((Xsk::of(self.fd, config, zero_copy), self.rings))
    }
}

/// An open, bound AF_XDP socket.
///
/// Holds the descriptor and the memory; the rings are separate ([`Rings`]), so that the thread that polls owns them.
#[derive(Debug)]
pub struct Xsk {
    // Field order is drop order: the descriptor closes before the memory may be unmapped.
    fd: OwnedFd,
    _mapping: Arc<Mapping>,
    zero_copy: bool,
    interface_index: u32,
    queue: u32,
}

impl Xsk {
    /// Opens, registers, maps and binds, with unaligned chunks, no headroom and packets in one piece.
    ///
    /// # Errors
    ///
    /// See [`XskError`]; a queue that is busy is tried again for [`BIND_PATIENCE`].
    pub fn open(config: &XskConfig<'_>) -> Result<(Xsk, Rings), XskError> {
        Xsk::open_with(config, &XskOptions::default())
    }

    /// As [`Xsk::open`], with another layout of chunks and packets.
    ///
    /// # Errors
    ///
    /// Those of [`Xsk::open`], and [`XskError::Invalid`] for options that do not fit the configuration.
    pub fn open_with(config: &XskConfig<'_>, options: &XskOptions) -> Result<(Xsk, Rings), XskError> {
        Xsk::prepare(config, options)?.bind(config, options)
    }

    /// The part of [`Xsk::open_with`] that takes memory: what is left can be done as soon as the queue is free.
    ///
    /// # Errors
    ///
    /// Those of [`Xsk::open_with`] but for what the queue and its device have to do with.
    pub fn prepare(config: &XskConfig<'_>, options: &XskOptions) -> Result<Prepared, XskError> {
        let fd = prepare(config, options)?;
        let rings = map_rings(&fd, config)?;
        Ok(Prepared { fd, rings })
    }

    /// As [`Xsk::open_with`], for another process: it gets the descriptor, and takes it over with [`Xsk::adopt`]. Nothing of it stays here; the
    /// mapping may go. Gives the descriptor, and whether the kernel moves packets without a copy.
    ///
    /// # Errors
    ///
    /// Those of [`Xsk::open_with`].
    pub fn bind_for(config: &XskConfig<'_>, options: &XskOptions) -> Result<(OwnedFd, bool), XskError> {
        let fd = prepare(config, options)?;
        bind(&fd, config, options)?;
        let zero_copy = is_zero_copy(&fd)?;
        Ok((fd, zero_copy))
    }

    /// Takes over what another process opened with [`Xsk::bind_for`], for memory that this process maps at `config.mapping`. Needs no
    /// privilege. Of the configuration, interface, queue and ring lengths must be those that it was opened with.
    ///
    /// # Errors
    ///
    /// [`XskError::System`] where the descriptor is of no such socket, or has shorter rings.
    pub fn adopt(fd: OwnedFd, config: &XskConfig<'_>) -> Result<(Xsk, Rings), XskError> {
        config.check()?;
        let zero_copy = is_zero_copy(&fd)?;
        let rings = map_rings(&fd, config)?;
        Ok((Xsk::of(fd, config, zero_copy), rings))
    }

    fn of(fd: OwnedFd, config: &XskConfig<'_>, zero_copy: bool) -> Xsk {
        Xsk {
            fd,
            _mapping: config.mapping.clone(),
            zero_copy,
            interface_index: config.interface_index,
            queue: config.queue,
        }
    }

    /// Whether the kernel moves packets without a copy, as it says itself (`XDP_OPTIONS`).
    pub fn zero_copy(&self) -> bool {
        self.zero_copy
    }

    /// The queue that the socket is bound to.
    pub fn queue(&self) -> u32 {
        self.queue
    }

    /// What the kernel lost so far.
    ///
    /// # Errors
    ///
    /// What getsockopt(2) says; none are expected on a bound socket.
    pub fn statistics(&self) -> io::Result<XdpStatistics> {
        let raw: libc::xdp_statistics = sockopt::get(&self.fd, libc::SOL_XDP, libc::XDP_STATISTICS)?;
        Ok(XdpStatistics {
            rx_dropped: raw.rx_dropped,
            rx_invalid_descriptors: raw.rx_invalid_descs,
            tx_invalid_descriptors: raw.tx_invalid_descs,
            rx_ring_full: raw.rx_ring_full,
            rx_fill_ring_empty: raw.rx_fill_ring_empty_descs,
            tx_ring_empty: raw.tx_ring_empty_descs,
        })
    }

    /// Whether its device was removed since the last time this was asked: then the kernel unbinds the socket, and leaves an error there. A
    /// device that is only down does not (`xsk_notifier` of `net/xdp/xsk.c`).
    pub fn lost_its_device(&self) -> bool {
        matches!(rustix::net::sockopt::socket_error(&self.fd), Ok(Err(_)))
    }

    /// Lets the kernel send what is on the TX ring.
    ///
    /// In copy mode this call does the sending: up to 32 packets a call (`TX_BATCH_SIZE` of `net/xdp/xsk.c`), so call
    /// again while descriptors are left. That the device is full or has more to do is no error.
    ///
    /// # Errors
    ///
    /// [`WakeError::Down`] when the device went down, [`WakeError::Gone`] when it was removed, or what else sendto(2) says.
    #[inline]
    pub fn wake_tx(&self) -> Result<(), WakeError> {
        rustix::net::send(&self.fd, &[], SendFlags::DONTWAIT).map_or_else(wake_result, |_| Ok(()))
    }

    /// Lets the driver look at the fill ring and deliver what waits.
    ///
    /// # Errors
    ///
    /// As for [`Xsk::wake_tx`].
    #[inline]
    pub fn wake_rx(&self) -> Result<(), WakeError> {
        rustix::net::recv(&self.fd, &mut [0; 0], RecvFlags::DONTWAIT).map_or_else(wake_result, |_| Ok(()))
    }
}

impl AsFd for Xsk {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

#[cold]
fn wake_result(error: Errno) -> Result<(), WakeError> {
    match error {
        // EAGAIN: more to send than one call does, or the completion ring is full. EBUSY, ENOBUFS: the device's ring or
        // the socket's send allowance is full for now. EINTR: nothing was lost, the next round asks again.
        Errno::AGAIN | Errno::BUSY | Errno::NOBUFS | Errno::INTR => Ok(()),
        Errno::NETDOWN => Err(WakeError::Down),
        Errno::NXIO | Errno::NODEV => Err(WakeError::Gone),
        _ => Err(WakeError::System(error.into())),
    }
}

impl XskConfig<'_> {
    fn check(&self) -> Result<(), XskError> {
        let invalid = |what: &'static str, value: u64| Err(XskError::Invalid { what, value });
        if !CHUNK_LEN_RANGE.contains(&self.chunk_len) {
            return invalid(
                "chunk length must be 2048 to 4096 bytes",
                u64::from(self.chunk_len),
            );
        }
        if self.registered_len < u64::from(self.chunk_len) || self.registered_len > self.mapping.len() {
            return invalid(
                "registered length must hold a chunk and lie in the mapping",
                self.registered_len,
            );
        }
        for len in [self.fill_len, self.completion_len, self.rx_len, self.tx_len] {
            if !len.is_power_of_two() {
                return invalid("ring lengths must be powers of two", u64::from(len));
            }
        }
        Ok(())
    }
}

/// A socket with its memory registered and its rings made, not bound.
fn prepare(config: &XskConfig<'_>, options: &XskOptions) -> Result<OwnedFd, XskError> {
    config.check()?;
    options.check(config)?;
    let fd = open_socket()?;
    register(&fd, config, options)?;
    set_ring_len(&fd, libc::XDP_UMEM_FILL_RING, "fill", config.fill_len)?;
    set_ring_len(
        &fd,
        libc::XDP_UMEM_COMPLETION_RING,
        "completion",
        config.completion_len,
    )?;
    set_ring_len(&fd, libc::XDP_RX_RING, "RX", config.rx_len)?;
    set_ring_len(&fd, libc::XDP_TX_RING, "TX", config.tx_len)?;
    allow_packets_in_flight(&fd);
    Ok(fd)
}

/// What the kernel says of a bound socket.
fn is_zero_copy(fd: &OwnedFd) -> Result<bool, XskError> {
    let options: libc::xdp_options = sockopt::get(fd, libc::SOL_XDP, libc::XDP_OPTIONS)
        .map_err(|error| XskError::system("getsockopt(XDP_OPTIONS)", error))?;
    Ok(options.flags & libc::XDP_OPTIONS_ZEROCOPY != 0)
}

fn open_socket() -> Result<OwnedFd, XskError> {
    let opened = rustix::net::socket_with(AddressFamily::XDP, SocketType::RAW, SocketFlags::CLOEXEC, None);
    opened.map_err(|error| match error {
        Errno::PERM => XskError::Privilege,
        Errno::AFNOSUPPORT => XskError::Unsupported,
        _ => XskError::system("socket(AF_XDP)", error),
    })
}

fn set_ring_len(fd: &OwnedFd, option: libc::c_int, ring: &'static str, len: u32) -> Result<(), XskError> {
    sockopt::set(fd, libc::SOL_XDP, option, &len).map_err(|source| XskError::Ring { ring, len, source })
}

fn register(fd: &OwnedFd, config: &XskConfig<'_>, options: &XskOptions) -> Result<(), XskError> {
    let registration = libc::xdp_umem_reg {
        addr: config.mapping.base().as_ptr().addr() as u64,
        len: config.registered_len,
        chunk_size: config.chunk_len,
        headroom: options.headroom_len,
        flags: options.registration_flags(),
        tx_metadata_len: options.tx_metadata_len,
    };
    let registered = sockopt::set(fd, libc::SOL_XDP, libc::XDP_UMEM_REG, &registration);
    registered.map_err(|source| match source.raw_os_error() {
        // `xdp_umem_account_pages` says ENOBUFS when the locked-memory limit is exceeded.
        Some(libc::ENOBUFS) => XskError::LockedMemory {
            len: config.registered_len,
        },
        Some(libc::ENOMEM) => XskError::Memory {
            len: config.registered_len,
        },
        // Of what it refuses, all else was looked at before.
        Some(libc::EINVAL) if options.tx_metadata_len > 0 => XskError::NoMetadata,
        _ => XskError::system("setsockopt(XDP_UMEM_REG)", source),
    })
}

fn bind(fd: &OwnedFd, config: &XskConfig<'_>, options: &XskOptions) -> Result<(), XskError> {
    let mode = match config.bind {
        BindMode::Auto => SocketAddrXdpFlags::empty(),
        BindMode::Copy => SocketAddrXdpFlags::XDP_COPY,
        BindMode::ZeroCopy => SocketAddrXdpFlags::XDP_ZEROCOPY,
    };
    let flags = mode | options.bind_flags() | SocketAddrXdpFlags::XDP_USE_NEED_WAKEUP;
    let address = SocketAddrXdp::new(flags, config.interface_index, config.queue);
    bind_to(fd, address, fd.as_fd(), config.bind == BindMode::ZeroCopy)
}

/// Binds to `addr`, with the memory of the socket `shared_umem_fd` if its flags say so.
fn bind_to(
    fd: &OwnedFd,
    addr: SocketAddrXdp,
    shared_umem_fd: BorrowedFd<'_>,
    zero_copy: bool,
) -> Result<(), XskError> {
    let (index, queue) = (addr.interface_index(), addr.queue_id());
    let address = SocketAddrXdpWithSharedUmem { addr, shared_umem_fd };
    let deadline = Instant::now() + BIND_PATIENCE;
    loop {
        return match rustix::net::bind(fd, &address) {
            Err(Errno::BUSY) if Instant::now() < deadline => {
                std::thread::sleep(Duration::from_millis(5));
                continue;
            }
            bound => bound.map_err(|error| match error {
                Errno::BUSY => XskError::Busy { queue },
                Errno::OPNOTSUPP | Errno::PROTONOSUPPORT if zero_copy => XskError::ZeroCopyUnsupported,
                Errno::NODEV => XskError::NoDevice { index },
                Errno::NETDOWN => XskError::Down,
                Errno::INVAL => XskError::Refused { queue, zero_copy },
                _ => XskError::system("bind(AF_XDP)", error),
            }),
        };
    }
}

/// Copy mode charges every packet in flight to the socket (`sock_alloc_send_skb` in net/xdp/xsk.c); the default
/// allowance of 208 KiB ends at some 90 full packets. Without the privilege to exceed `net.core.wmem_max` the wake-up
/// says EAGAIN earlier, and packets wait on the ring for the next one.
fn allow_packets_in_flight(fd: &OwnedFd) {
    let allowance: libc::c_int = 16 << 20;
    for option in [libc::SO_SNDBUF, libc::SO_SNDBUFFORCE] {
        let _ = sockopt::set(fd, libc::SOL_SOCKET, option, &allowance);
    }
}
