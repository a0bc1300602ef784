//! The rings of a socket are mapped.

use super::{Rings, XskConfig, XskError};
use crate::ring::{Consumer, Descriptor, Producer, RingMemory, RingOffsets};
use crate::{memory, sockopt};
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;

pub(super) fn ring_offsets(fd: &OwnedFd) -> Result<libc::xdp_mmap_offsets, XskError> {
    sockopt::get(fd, libc::SOL_XDP, libc::XDP_MMAP_OFFSETS)
        .map_err(|error| XskError::system("getsockopt(XDP_MMAP_OFFSETS)", error))
}

pub(super) fn map_rings(fd: &OwnedFd, config: &XskConfig<'_>) -> Result<Rings, XskError> {
    let offsets = ring_offsets(fd)?;
    let (descriptor_len, address_len) = (size_of::<Descriptor>(), size_of::<u64>());
    let (fill, fill_at) = map_ring(
        fd,
        libc::XDP_UMEM_PGOFF_FILL_RING,
        &offsets.fr,
        address_len,
        config.fill_len,
    )?;
    let (completion, completion_at) = map_ring(
        fd,
        libc::XDP_UMEM_PGOFF_COMPLETION_RING,
        &offsets.cr,
        address_len,
        config.completion_len,
    )?;
    let (rx, rx_at) = map_ring(
        fd,
        libc::XDP_PGOFF_RX_RING as u64,
        &offsets.rx,
        descriptor_len,
        config.rx_len,
    )?;
    let (tx, tx_at) = map_ring(
        fd,
        libc::XDP_PGOFF_TX_RING as u64,
        &offsets.tx,
        descriptor_len,
        config.tx_len,
    )?;
    // SAFETY: the kernel laid the rings out as it said in XDP_MMAP_OFFSETS, with the lengths set before; each ring was
    // mapped once, so these are the only ends of this program.
    unsafe {
        Ok(Rings {
            fill: Producer::new(fill, fill_at, config.fill_len),
            rx: Consumer::new(rx, rx_at, config.rx_len),
            tx: Producer::new(tx, tx_at, config.tx_len),
            completion: Consumer::new(completion, completion_at, config.completion_len),
        })
    }
}

pub(super) fn map_ring(
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
