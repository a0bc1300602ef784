//! The rings of a socket are mapped.

use super::{Rings, XskConfig, XskError};
use crate::ring::{Consumer, Producer, RingKind, RingMemory, RingOffsets};
use crate::{memory, sockopt};
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;

pub(super) fn ring_offsets(fd: &OwnedFd) -> Result<libc::xdp_mmap_offsets, XskError> {
    sockopt::get(fd, libc::SOL_XDP, libc::XDP_MMAP_OFFSETS)
        .map_err(|error| XskError::system("getsockopt(XDP_MMAP_OFFSETS)", error))
}

pub(super) fn map_rings(fd: &OwnedFd, config: &XskConfig<'_>) -> Result<Rings, XskError> {
    let offsets = ring_offsets(fd)?;
    let (fill, completion) = (
        libc::XDP_UMEM_PGOFF_FILL_RING,
        libc::XDP_UMEM_PGOFF_COMPLETION_RING,
    );
    Ok(Rings {
        fill: producer(fd, fill, &offsets.fr, config.fill_len)?,
        completion: consumer(fd, completion, &offsets.cr, config.completion_len)?,
        rx: consumer(fd, libc::XDP_PGOFF_RX_RING as u64, &offsets.rx, config.rx_len)?,
        tx: producer(fd, libc::XDP_PGOFF_TX_RING as u64, &offsets.tx, config.tx_len)?,
    })
}

/// This program's end of a ring to produce for, which is mapped once.
pub(super) fn producer<K: RingKind>(
    fd: &OwnedFd,
    page_offset: u64,
    ring: &libc::xdp_ring_offset,
    len: u32,
) -> Result<Producer<K>, XskError> {
    let (memory, offsets) = map_ring(fd, page_offset, ring, size_of::<K::Entry>(), len)?;
    // SAFETY: the kernel laid the ring out as it said in XDP_MMAP_OFFSETS, with the length set before; it is mapped
    // once, so this is the only end of this program.
    Ok(unsafe { Producer::new(memory, offsets, len) })
}

/// This program's end of a ring to consume from, which is mapped once.
pub(super) fn consumer<K: RingKind>(
    fd: &OwnedFd,
    page_offset: u64,
    ring: &libc::xdp_ring_offset,
    len: u32,
) -> Result<Consumer<K>, XskError> {
    let (memory, offsets) = map_ring(fd, page_offset, ring, size_of::<K::Entry>(), len)?;
    // SAFETY: as in `producer`.
    Ok(unsafe { Consumer::new(memory, offsets, len) })
}

fn map_ring(
    fd: &OwnedFd,
    page_offset: u64,
    ring: &libc::xdp_ring_offset,
    entry_len: usize,
    len: u32,
) -> Result<(Arc<RingMemory>, RingOffsets), XskError> {
    let offsets = RingOffsets {
        producer: ring.producer as usize,
        consumer: ring.consumer as usize,
        flags: ring.flags as usize,
        entries: ring.desc as usize,
    };
    let map_len = offsets.entries + len as usize * entry_len;
    // MAP_POPULATE saves the page faults on the data path.
    let flags = libc::MAP_SHARED | libc::MAP_POPULATE;
    let base = memory::map(map_len, flags, fd.as_raw_fd(), page_offset as libc::off_t)
        .map_err(|error| XskError::system("mmap of an AF_XDP ring", error))?;
    // SAFETY: mmap just returned this range, and nobody else knows it.
    let memory = unsafe { RingMemory::from_socket(base, map_len) };
    Ok((Arc::new(memory), offsets))
}
