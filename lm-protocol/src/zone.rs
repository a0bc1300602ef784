//! Landing zones: how much memory one takes and what each posted entry may write (invariants I1 and I2).
//!
//! ```text
//! zone start                                R                                 R + payload_len        zone end
//! |<------------ front_margin ------------->|<--- payload_len: N·P rounded --->|<---- tail_guard ---->|
//! | headroom 256 + prefix, headers of frag 0| the message                      | the rest of a chunk  |
//! ```
//!
//! The kernel writes an AF_XDP packet `XDP_PACKET_HEADROOM` bytes behind the fill entry's address (plus the UMEM's own
//! headroom, which this project keeps 0), so the entry of fragment `k` points to `R + k·P − H − 256`.

use crate::geometry::Geometry;
use core::ops::Range;

/// Bytes that the kernel leaves free in front of a packet (`XDP_PACKET_HEADROOM`, `include/uapi/linux/bpf.h`).
pub const XDP_PACKET_HEADROOM: u32 = 256;

/// Landing zones start at multiples of this many bytes, and so does the message in them.
///
/// Some drivers pad what they write to the end of a cache line; that is harmless in the tail guard and fatal in the
/// middle of a neighbour's zone.
pub const ZONE_ALIGN: u64 = 64;

/// Frames that a packet of `frame_len` bytes takes, where each holds `capacity` bytes of it (multi-buffer mode): one after the other,
/// `capacity` bytes apart, so that the packet is contiguous.
#[inline]
pub const fn frames_of(frame_len: u16, capacity: u32) -> u32 {
    (frame_len as u32).div_ceil(capacity)
}

/// The parts of a landing zone, in bytes (invariant I2).
///
/// ```
/// use lm_protocol::geometry::{Layout, LinkShape, Wire};
/// use lm_protocol::zone::ZoneShape;
///
/// let message = Layout::new(Wire::Lm, 1500, LinkShape::IPV4)?.message(1 << 20)?;
/// let zone = ZoneShape::new(&message, 2048, 0);
/// assert_eq!(zone.front_margin, 384); // 256 + 66, rounded up to 64
/// assert_eq!(zone.message_start(), 384);
/// assert_eq!(zone.fill_offset(&message, 0), 384 - 66 - 256);
/// # Ok::<(), lm_protocol::geometry::GeometryError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ZoneShape {
    /// In front of the message: `256 + H + prefix`, rounded up to a multiple of 64. Fragment 0's entry points into it.
    pub front_margin: u64,
    /// The message's place: `N·P` rounded up to a multiple of 64.
    pub payload_len: u64,
    /// Behind it: one chunk, since an entry's chunk must lie inside the UMEM and zero-copy drivers may write all of it.
    pub tail_guard: u64,
}

impl ZoneShape {
    /// The zone for a message.
    ///
    /// `chunk_len` is the UMEM's chunk size in bytes (rounded up to a multiple of 64 here); `prefix` the bytes that a
    /// driver writes in front of a packet (0 in copy mode, 10 to 12 on virtio-net).
    pub const fn new(geometry: &Geometry, chunk_len: u32, prefix: u8) -> ZoneShape {
        let margin = XDP_PACKET_HEADROOM as u64 + geometry.layout().header_len() as u64 + prefix as u64;
        ZoneShape {
            front_margin: margin.next_multiple_of(ZONE_ALIGN),
            payload_len: geometry.rx_zone_payload_len(),
            tail_guard: (chunk_len as u64).next_multiple_of(ZONE_ALIGN),
        }
    }

    /// Bytes of the whole zone, a multiple of 64.
    #[inline]
    pub const fn total_len(&self) -> u64 {
        self.front_margin + self.payload_len + self.tail_guard
    }

    /// `R`: where the message starts, relative to the zone's start.
    #[inline]
    pub const fn message_start(&self) -> u64 {
        self.front_margin
    }

    /// The fill entry of fragment `index`, relative to the zone's start: `R + index·P − H − 256`.
    ///
    /// `geometry` is one that the zone was made for, or a shorter message of the same layout.
    #[inline]
    pub const fn fill_offset(&self, geometry: &Geometry, index: u32) -> u64 {
        self.frame_offset(geometry, index) - XDP_PACKET_HEADROOM as u64
    }

    /// Where the packet that takes fragment `index`'s entry starts, relative to the zone's start.
    #[inline]
    pub const fn frame_offset(&self, geometry: &Geometry, index: u32) -> u64 {
        // The front margin is at least H + 256, so the sum never falls below 256.
        self.front_margin
            .wrapping_add_signed(geometry.rx_frame_start(index))
    }

    /// What the kernel may write through fragment `index`'s entry in copy mode: the longest packet that the gate admits
    /// (invariant I1). Relative to the zone's start.
    #[inline]
    pub const fn copy_write_range(&self, geometry: &Geometry, index: u32) -> Range<u64> {
        let start = self.frame_offset(geometry, index);
        start..start + geometry.layout().max_frame_len() as u64
    }

    /// What a device may write through fragment `index`'s entry in zero-copy mode: from the prefix to the chunk's end
    /// (invariant I1). Relative to the zone's start.
    #[inline]
    pub const fn zero_copy_write_range(
        &self,
        geometry: &Geometry,
        index: u32,
        chunk_len: u32,
        prefix: u8,
    ) -> Range<u64> {
        let start = self.frame_offset(geometry, index);
        start - prefix as u64..start - XDP_PACKET_HEADROOM as u64 + chunk_len as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::geometry::{Layout, LinkShape, Wire};
    use proptest::prelude::*;

    proptest! {
        /// I2: whatever any entry may write lies inside the zone, in both modes.
        #[test]
        fn every_write_range_lies_inside_the_zone(
            len in 0u64..=1 << 32,
            mtu in prop_oneof![576u16..=9000, 576u16..=65_521],
            tags in 0u8..=2,
            prefix in 0u8..=64,
            ipfrag: bool,
            at in any::<prop::sample::Index>(),
        ) {
            let wire = if ipfrag { Wire::IpFrag } else { Wire::Lm };
            let mtu = mtu.min(u16::MAX - 14 - 4 * u16::from(tags));
            let layout = Layout::new(wire, mtu, LinkShape { vlan_tags: tags }).unwrap();
            let geometry = layout.message(len.min(layout.max_message_len())).unwrap();
            let chunk_len = (u32::from(layout.max_frame_len()) + XDP_PACKET_HEADROOM).max(2048);
            let zone = ZoneShape::new(&geometry, chunk_len, prefix);
            prop_assert_eq!(zone.front_margin % 64, 0);
            prop_assert_eq!(zone.total_len() % 64, 0);
            prop_assert!(zone.payload_len >= geometry.message_len());

            let last = geometry.fragment_count() - 1;
            for index in [0, last, at.index(last as usize + 1) as u32] {
                let copy = zone.copy_write_range(&geometry, index);
                prop_assert!(copy.start >= u64::from(prefix) && copy.end <= zone.front_margin + zone.payload_len);
                let zero_copy = zone.zero_copy_write_range(&geometry, index, chunk_len, prefix);
                prop_assert!(zero_copy.end <= zone.total_len());
                // The chunk itself, which the kernel demands to be inside the UMEM.
                prop_assert!(zone.fill_offset(&geometry, index) + u64::from(chunk_len) <= zone.total_len());
                // The same where chunks are short and a packet takes several, the last of which begins within it.
                let capacity = 4096 - XDP_PACKET_HEADROOM;
                let zone = ZoneShape::new(&geometry, 4096, prefix);
                let frame_len = geometry.fragment(index).frame_len();
                let last_frame = u64::from((frames_of(frame_len, capacity) - 1) * capacity);
                prop_assert!(last_frame < u64::from(frame_len));
            prop_assert!(zone.fill_offset(&geometry, index) + last_frame + 4096 <= zone.total_len());
                // The packet's payload lands where it belongs in the message.
                let header = u64::from(layout.fragment_header_len(index));
                prop_assert_eq!(
                    zone.frame_offset(&geometry, index) + header,
                    zone.message_start() + geometry.message_offset(index)
                );
            }
        }
    }
}
