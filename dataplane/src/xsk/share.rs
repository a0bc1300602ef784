//! A further socket on the queue of another one.
//!
//! Both use the same memory and the same fill and completion ring (`XDP_SHARED_UMEM`); a program decides which socket a
//! packet goes to. The bind mode and the layout are the first socket's: the kernel takes no flags here.

use std::os::fd::AsFd as _;
use std::sync::Arc;

use rustix::net::xdp::{SocketAddrXdp, SocketAddrXdpFlags};

use super::map::{consumer, producer, ring_offsets};
use super::{Xsk, XskError, allow_packets_in_flight, bind_to, open_socket, set_ring_len};
use crate::ring::{RxRing, TxRing};

/// The rings that a socket on a shared queue has for itself. Each keeps the socket alive.
///
/// Frames come from the first socket's fill ring, and the addresses of packets sent go to its completion ring.
#[derive(Debug)]
pub struct SharedRings {
    /// Packets received.
    pub rx: RxRing,
    /// Packets to send.
    pub tx: TxRing,
}

impl Xsk {
    /// Opens another socket on this one's queue and memory, with an RX ring of `rx_len` and a TX ring of `tx_len`
    /// entries (powers of two). As for [`Xsk::open`], the calling thread is in the device's network namespace.
    ///
    /// # Errors
    ///
    /// See [`XskError`].
    pub fn share(&self, rx_len: u32, tx_len: u32) -> Result<(Xsk, SharedRings), XskError> {
        let fd = open_socket()?;
        set_ring_len(&fd, libc::XDP_RX_RING, "RX", rx_len)?;
        set_ring_len(&fd, libc::XDP_TX_RING, "TX", tx_len)?;
        let offsets = ring_offsets(&fd)?;
        let rings = SharedRings {
            rx: consumer(&fd, libc::XDP_PGOFF_RX_RING as u64, &offsets.rx, rx_len)?,
            tx: producer(&fd, libc::XDP_PGOFF_TX_RING as u64, &offsets.tx, tx_len)?,
        };
        allow_packets_in_flight(&fd);
        let flags = SocketAddrXdpFlags::XDP_SHARED_UMEM;
        let address = SocketAddrXdp::new(flags, self.interface_index, self.queue);
        bind_to(&fd, address, self.fd.as_fd(), self.zero_copy)?;
        let xsk = Xsk {
            fd,
            _mapping: Arc::clone(&self._mapping),
            ..*self
        };
        Ok((xsk, rings))
    }
}
