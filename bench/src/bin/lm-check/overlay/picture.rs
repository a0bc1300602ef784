//! What the memory should be after each packet, told by geometry.
//!
//! So that no byte passes for another, the values are kept apart: memory is painted with bytes from 0x60 to 0x7c, and
//! payload has the highest bit set and the fragment's number behind it. Where a driver may write its prefix anything
//! will do but what lay there.

use std::ops::Range;

use lm_protocol::geometry::Geometry;
use lm_protocol::wire::{Addressing, DataTemplate};

use super::FootprintReport;

/// There is no session: any key will do.
const KEY: u64 = 0x6f76_6572_6c61_7973;
/// `lm` over IPv4, untagged.
const HEADER_LEN: usize = 66;
/// A byte of payload has three bits for its fragment.
pub(crate) const MAX_FRAGMENTS: u32 = 8;

/// What is sent, and what the registered memory should be.
pub(crate) struct Picture {
    pub(crate) geometry: Geometry,
    pub(crate) footprint: FootprintReport,
    /// Where the message will begin in the registered memory.
    pub(crate) message_start: u64,
    /// The message with its headers in the holes, as a sender has it in its memory.
    pub(crate) region: Vec<u8>,
    /// Each byte of the memory, and whether the driver has written another one there.
    bytes: Vec<(u8, bool)>,
}

/// These bytes of a message, as far as it goes.
pub(crate) fn payload(geometry: &Geometry, range: Range<u64>) -> Vec<u8> {
    let byte = |at: u64| {
        let fragment = geometry.fragment_at(at);
        let offset = at - geometry.message_offset(fragment);
        0x80 | (fragment as u8) << 4 | (offset % 13) as u8
    };
    let end = range.end.min(geometry.message_len());
    (range.start..end).map(byte).collect()
}

impl Picture {
    /// Before anything comes.
    pub(crate) fn painted(
        geometry: Geometry,
        addressing: &Addressing,
        message_start: u64,
        len: u64,
        footprint: FootprintReport,
    ) -> Picture {
        let count = geometry.fragment_count();
        let template = DataTemplate::new(addressing, KEY, 1, count, geometry.layout().payload_len());
        let mut region = vec![0; geometry.tx_region_len() as usize];
        for fragment in geometry.fragments() {
            let frame = geometry.tx_frame_offset(fragment.index) as usize;
            let (header, rest) = region[frame..].split_at_mut(HEADER_LEN);
            template.write(header, fragment.index, geometry.fragment_len(fragment.index));
            let payload = payload(&geometry, fragment.message_range());
            rest[..payload.len()].copy_from_slice(&payload);
        }
        Picture {
            geometry,
            footprint,
            message_start,
            region,
            bytes: (0..len).map(|at| (0x60 | (at % 29) as u8, false)).collect(),
        }
    }

    /// The memory, to be painted before anything comes.
    pub(crate) fn memory(&self) -> Vec<u8> {
        self.bytes.iter().map(|(byte, _)| *byte).collect()
    }

    /// Where a fragment's packet lies.
    pub(crate) fn start(&self, fragment: u32) -> u64 {
        self.message_start
            .wrapping_add_signed(self.geometry.rx_frame_start(fragment))
    }

    /// The packet of a fragment was written.
    pub(crate) fn packet(&mut self, fragment: u32) {
        let start = self.start(fragment);
        let prefix = &mut self.bytes[start as usize - self.footprint.prefix_len..];
        for (_, is_other) in &mut prefix[..self.footprint.prefix_written] {
            *is_other = true;
        }
        let frame = self.geometry.tx_frame_offset(fragment) as usize;
        let len = usize::from(self.geometry.fragment(fragment).frame_len());
        let packet = self.region[frame..frame + len].to_vec();
        self.write(start, &packet);
    }

    /// The payload under a fragment's headers was put back.
    pub(crate) fn tail_restored(&mut self, lowest: u32) {
        let begin = self.start(lowest) - self.footprint.prefix_len as u64;
        let end = self.start(lowest) + HEADER_LEN as u64;
        let of_message = begin - self.message_start..end - self.message_start;
        self.write(begin, &payload(&self.geometry, of_message));
    }

    fn write(&mut self, address: u64, bytes: &[u8]) {
        let place = self.bytes[address as usize..].iter_mut();
        place.zip(bytes).for_each(|(place, &byte)| *place = (byte, false));
    }

    /// The first byte of the memory that is not what it should be.
    pub(crate) fn difference(&self, memory: &[u8]) -> Option<usize> {
        (0..memory.len()).find(|&at| {
            let (byte, is_other) = self.bytes[at];
            (memory[at] != byte) != is_other
        })
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use lm_protocol::geometry::{Layout, LinkShape, Wire};
    use lm_protocol::window::WindowShape;
    use lm_protocol::wire::ethernet::MacAddr;

    use super::*;

    const START: u64 = 1000;
    const LEN: usize = 16 << 10;

    fn picture(message_len: u64, footprint: FootprintReport) -> Picture {
        let addressing = Addressing {
            src_mac: MacAddr([0x02, 0x7c, 0x80, 0x8c, 0xff, 0x71]),
            dst_mac: MacAddr([0x02, 0x66, 0x92, 0xa3, 0xb4, 0xc5]),
            vlan: None,
            src_ip: Ipv4Addr::new(0x61, 0x81, 0x91, 0xa1),
            dst_ip: Ipv4Addr::new(0x62, 0x82, 0x92, 0xa2),
            src_port: 0x6b8b,
            dst_port: 7168,
        };
        let layout = Layout::new(Wire::Lm, 1500, LinkShape::IPV4).unwrap();
        let geometry = layout.message(message_len).unwrap();
        Picture::painted(geometry, &addressing, START, LEN as u64, footprint)
    }

    /// Writes packets as a device does; the memory, and what it should be after the last one.
    fn receive(message_len: u64, fragments: &[u32], prefix: &[u8], gap: usize) -> (Vec<u8>, Picture) {
        let of_driver = FootprintReport {
            prefix_len: prefix.len() + gap,
            prefix_written: prefix.len(),
            packets: 0,
        };
        let mut expected = picture(message_len, of_driver);
        let (mut memory, region) = (expected.memory(), expected.region.clone());
        let geometry = expected.geometry;
        for &index in fragments {
            let start = expected.start(index) as usize;
            let frame = geometry.tx_frame_offset(index) as usize;
            let len = usize::from(geometry.fragment(index).frame_len());
            memory[start - prefix.len() - gap..start - gap].copy_from_slice(prefix);
            memory[start..start + len].copy_from_slice(&region[frame..frame + len]);
            expected.packet(index);
        }
        (memory, expected)
    }

    #[test]
    fn every_byte_is_told_by_its_value() {
        for len in [1, 1448, 1449, 11_036, 8 * 1448] {
            let count = receive(len, &[], &[], 0).1.geometry.fragment_count();
            let order: Vec<u32> = WindowShape::whole(count).transmit_order(count).collect();
            for arrived in 0..=order.len() {
                for (prefix, gap) in [(&[][..], 0), (&[0; 12], 0), (&[0, 0, 0, 0, 0, 0, 0, 0, 1, 0], 2)] {
                    let (memory, expected) = receive(len, &order[..arrived], prefix, gap);
                    assert_eq!(expected.difference(&memory), None, "{len} {arrived}");
                    // What did not come is missed, the prefix too.
                    if let Some(&next) = order.get(arrived) {
                        let (more, with_next) = receive(len, &order[..=arrived], prefix, gap);
                        let start = with_next.start(next) as usize;
                        let first = Some(start - prefix.len() - gap);
                        assert_eq!(with_next.difference(&memory), first, "{len} {arrived}");
                        assert_eq!(expected.difference(&more), first, "{len} {arrived}");
                    }
                }
            }
        }
    }

    #[test]
    fn a_byte_too_many_is_foreign() {
        let (paint, expected) = receive(3000, &[], &[], 0);
        // In a header's place, too.
        for at in [
            0,
            START as usize - 66 - 13,
            START as usize - 30,
            START as usize + 3000,
            LEN - 1,
        ] {
            let mut memory = paint.clone();
            memory[at] ^= 0xff;
            assert_eq!(expected.difference(&memory), Some(at));
        }
    }

    #[test]
    fn a_tail_is_put_back() {
        let (mut memory, mut expected) = receive(2896, &[0, 1], &[7; 12], 0);
        let headers = expected.start(1);
        let below = headers as usize - 12..headers as usize + HEADER_LEN;
        let of_message = headers - 12 - START..headers + HEADER_LEN as u64 - START;
        let tail = payload(&expected.geometry, of_message);
        memory[below.clone()].copy_from_slice(&tail);
        assert_eq!(expected.difference(&memory), Some(below.start));
        expected.tail_restored(1);
        assert_eq!(expected.difference(&memory), None);
    }

    #[test]
    fn forward_order_destroys_payload() {
        let (memory, expected) = receive(2896, &[0, 1], &[], 0);
        assert_eq!(expected.difference(&memory), None);
        let last = START as usize + 1447;
        let frame = expected.geometry.tx_frame_offset(1) as usize;
        assert_eq!(memory[last], expected.region[frame + HEADER_LEN - 1]);
        assert_ne!(memory[last], payload(&expected.geometry, 1447..1448)[0]);
    }
}
