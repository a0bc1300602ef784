//! UDP's checksum of what is sent: none, ours, or the device's.
//!
//! For [`Checksum::Offload`] 24 bytes before each packet say where it goes (`struct xsk_tx_metadata`, Documentation/networking/xsk-tx-metadata.rst), and
//! its descriptor that they are there. In copy mode the kernel does what the device cannot.

use lm_protocol::wire::udp;

use crate::memory::Umem;

/// What is in the UDP checksum of packets that an endpoint sends.
///
/// LM's receivers look at digests and not at checksums. They are for what looks at them on the way, and for hosts without LM.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Checksum {
    /// Zero: none (RFC 768).
    #[default]
    None,
    /// The sum, taken when the packet leaves, behind the digest of the same bytes, which are in the cache then (E-UDP, section 4.1).
    Integrated,
    /// The sum, taken by the device, or, in copy mode, where it cannot, by the kernel. From Linux 6.11 on, and with
    /// [`Wire::Lm`](lm_protocol::geometry::Wire::Lm) alone.
    Offload,
}

/// Length of `struct xsk_tx_metadata` (`linux/if_xdp.h`), which lies right before a packet, in bytes.
pub(crate) const METADATA_LEN: u8 = 24;
/// Its fields `flags`, and `request.csum_start` and `request.csum_offset`.
const FLAGS: std::ops::Range<usize> = 0..8;
const START: std::ops::Range<usize> = 8..10;
const OFFSET: std::ops::Range<usize> = 10..12;

impl Checksum {
    /// Bytes that are kept before each packet.
    pub(crate) const fn room(self) -> u8 {
        match self {
            Checksum::None | Checksum::Integrated => 0,
            Checksum::Offload => METADATA_LEN,
        }
    }

    /// What each packet's descriptor says.
    pub(crate) const fn descriptor_options(self) -> u32 {
        match self {
            Checksum::None | Checksum::Integrated => 0,
            Checksum::Offload => libc::XDP_TX_METADATA,
        }
    }

    /// Completes the headers of the packet that is to lie at `address`, up to UDP's or further; `payload` is what follows them. Of a packet that the
    /// device reads already it writes what is there.
    pub(crate) fn complete(self, umem: &Umem, address: u64, headers: &mut [u8], payload: &[u8]) {
        match self {
            Checksum::None => {}
            Checksum::Integrated => {
                udp::put_checksum(headers, [payload]);
            }
            Checksum::Offload => {
                // Of what is no UDP datagram nothing is asked.
                let metadata = udp::put_pseudo_sum(headers).map_or([0; METADATA_LEN as usize], metadata);
                umem.copy_to(address - u64::from(METADATA_LEN), &metadata);
            }
        }
    }

    /// The same of a packet in a frame of its own, before it goes to the ring.
    #[cold]
    #[inline(never)]
    pub(crate) fn complete_frame(self, umem: &Umem, address: u64, len: u32) {
        // SAFETY: the packet lies inside a frame that the engine owns, which nobody else writes. If the device reads it already, what
        // is written there is what was there.
        let packet = unsafe { umem.mapping().slice_mut(address, u64::from(len)) };
        self.complete(umem, address, packet, &[]);
    }

    /// The same of so many packets that differ in no length and no address, the first at `first` and each `stride` bytes before the one that it
    /// comes behind.
    pub(crate) fn complete_run(self, umem: &Umem, (first, packets): (u64, u32), stride: u64, len: u32) {
        let addresses = (0..u64::from(packets)).map(|back| first - back * stride);
        if self != Checksum::Offload {
            return addresses.for_each(|address| self.complete_frame(umem, address, len));
        }
        // SAFETY: as in `complete_frame`.
        let packet = unsafe { umem.mapping().slice_mut(first, u64::from(len)) };
        let udp = udp::put_pseudo_sum(packet).expect("fragments of a message are UDP datagrams");
        let at = udp + udp::CHECKSUM;
        let (metadata, sum) = (metadata(udp), [packet[at], packet[at + 1]]);
        for address in addresses {
            umem.copy_to(address - u64::from(METADATA_LEN), &metadata);
            umem.copy_to(address + at as u64, &sum);
        }
    }
}

/// Has the device sum up what follows from the UDP header at `start` on.
fn metadata(start: usize) -> [u8; METADATA_LEN as usize] {
    let mut bytes = [0; METADATA_LEN as usize];
    bytes[FLAGS].copy_from_slice(&u64::from(libc::XDP_TXMD_FLAGS_CHECKSUM).to_ne_bytes());
    bytes[START].copy_from_slice(&(start as u16).to_ne_bytes());
    bytes[OFFSET].copy_from_slice(&(udp::CHECKSUM as u16).to_ne_bytes());
    bytes
}
