//! How chunks and packets lie in the registered memory, where it is not LM's usual way.

use rustix::net::xdp::SocketAddrXdpFlags;

use super::{XskConfig, XskError};
use crate::memory::PACKET_HEADROOM;

/// What headroom must leave of a chunk, in bytes: newer kernels (6.18.44 among them) want 128 bytes of packet and a
/// `struct skb_shared_info` of 17 fragments behind them, even in copy mode, which uses all of it for the packet.
pub const MIN_FRAME_CAPACITY: u32 = 128 + 320;

/// Layout of a socket's chunks and packets. The default is what landing zones need: unaligned chunks, no headroom, each
/// packet in one piece.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct XskOptions {
    /// Frames at multiples of the chunk length, which must be a power of two and divide the registered length. The kernel
    /// rounds each fill address down to its chunk, and a packet to send must not cross one.
    pub aligned_chunks: bool,
    /// Bytes that the kernel leaves free in each frame in addition to [`PACKET_HEADROOM`]; a packet starts that much
    /// later, and a frame holds that much less; at least [`MIN_FRAME_CAPACITY`] must remain.
    pub headroom_len: u32,
    /// Multi-buffer mode (`XDP_USE_SG`): a packet may consist of several frames, each but the last one marked
    /// ([`Descriptor::continues`](crate::ring::Descriptor::continues)). Without it a packet longer than a frame is lost on
    /// reception and refused on transmission. The program must be loaded with `BPF_F_XDP_HAS_FRAGS`.
    pub multi_buffer: bool,
    /// Bytes right before each packet to send that tell the driver what to do with it (`struct xsk_tx_metadata`), where a descriptor says so:
    /// below 256, a multiple of 8. Every packet then begins that far into the memory at least, and is that much shorter than a chunk.
    pub tx_metadata_len: u32,
}

impl XskOptions {
    /// Bytes of a packet that one frame of `chunk_len` bytes holds.
    pub fn frame_capacity(&self, chunk_len: u32) -> u32 {
        chunk_len
            .saturating_sub(PACKET_HEADROOM as u32)
            .saturating_sub(self.headroom_len)
    }

    /// The rules of `xdp_umem_reg` (`net/xdp/xdp_umem.c`), which answers EINVAL to all of them.
    pub(super) fn check(&self, config: &XskConfig<'_>) -> Result<(), XskError> {
        let invalid = |what: &'static str, value: u64| Err(XskError::Invalid { what, value });
        if self.frame_capacity(config.chunk_len) < MIN_FRAME_CAPACITY {
            return invalid(
                "headroom must leave 448 bytes of the chunk for a packet",
                u64::from(self.headroom_len),
            );
        }
        if self.aligned_chunks && !config.chunk_len.is_power_of_two() {
            return invalid(
                "length of aligned chunks must be a power of two",
                u64::from(config.chunk_len),
            );
        }
        if self.aligned_chunks && !config.registered_len.is_multiple_of(u64::from(config.chunk_len)) {
            return invalid(
                "registered length must be a multiple of the aligned chunks' length",
                config.registered_len,
            );
        }
        Ok(())
    }

    pub(super) fn registration_flags(&self) -> u32 {
        let layout = match self.aligned_chunks {
            true => 0,
            false => libc::XDP_UMEM_UNALIGNED_CHUNK_FLAG,
        };
        let metadata = match self.tx_metadata_len {
            0 => 0,
            _ => libc::XDP_UMEM_TX_METADATA_LEN,
        };
        layout | metadata
    }

    pub(super) fn bind_flags(&self) -> SocketAddrXdpFlags {
        match self.multi_buffer {
            true => SocketAddrXdpFlags::XDP_USE_SG,
            false => SocketAddrXdpFlags::empty(),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::memory::{HugePages, Mapping};
    use crate::xsk::BindMode;

    #[test]
    fn options_must_fit_the_chunks() {
        let mapping = Arc::new(Mapping::new(1 << 20, HugePages::Off).expect("memory"));
        let config = |chunk_len, registered_len| XskConfig {
            interface_index: 1,
            queue: 0,
            mapping: &mapping,
            registered_len,
            chunk_len,
            fill_len: 64,
            completion_len: 64,
            rx_len: 64,
            tx_len: 64,
            bind: BindMode::Copy,
        };
        let aligned = XskOptions {
            aligned_chunks: true,
            ..XskOptions::default()
        };
        let headroom = |headroom_len| XskOptions {
            headroom_len,
            ..XskOptions::default()
        };
        assert!(XskOptions::default().check(&config(4001, 8003)).is_ok());
        assert!(aligned.check(&config(4096, 8192)).is_ok());
        assert!(aligned.check(&config(4001, 8002)).is_err());
        assert!(aligned.check(&config(4096, 8193)).is_err());
        assert!(headroom(4096 - 256 - 448).check(&config(4096, 8192)).is_ok());
        assert!(headroom(4096 - 256 - 447).check(&config(4096, 8192)).is_err());
        assert!(headroom(u32::MAX).check(&config(4096, 8192)).is_err());
        assert_eq!(headroom(128).frame_capacity(2048), 2048 - 256 - 128);
    }
}
