//! What the memory should be after each packet, told by geometry.
//!
//! So that no byte passes for another, the values are kept apart: memory is painted with bytes from 0x60 to 0x7c, and
//! payload has the highest bit set and the fragment's number behind it. Where a driver may write its prefix anything
//! will do but what lay there.

use std::ops::Range;

use lm_protocol::geometry::Geometry;
use lm_protocol::wire::{Addressing, DataTemplate};

/// There is no session: any key will do.
const KEY: u64 = 0x6f76_6572_6c61_7973;
const MESSAGE: u32 = 1;
/// `lm` over IPv4, untagged.
const HEADER_LEN: usize = 66;
/// A byte of payload has three bits for its fragment.
pub(crate) const MAX_FRAGMENTS: u32 = 8;

/// What the driver writes in front of a packet.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Prefix {
    /// From its first byte to the packet, in bytes.
    pub(crate) len: u64,
    /// How many of them it writes, from the first one on.
    pub(crate) written: u64,
}

/// What is sent, and what the registered memory should be.
pub(crate) struct Picture {
    geometry: Geometry,
    prefix: Prefix,
    headers: Vec<[u8; HEADER_LEN]>,
    /// Where the message will begin in the registered memory.
    message_start: u64,
    /// Each byte of the memory, and whether the driver has written another one there.
    bytes: Vec<(u8, bool)>,
}

impl Picture {
    /// Before anything comes.
    pub(crate) fn painted(
        geometry: Geometry,
        addressing: &Addressing,
        message_start: u64,
        len: u64,
        prefix: Prefix,
    ) -> Picture {
        let count = geometry.fragment_count();
        let template = DataTemplate::new(addressing, KEY, MESSAGE, count, geometry.layout().payload_len());
        let header = |index| {
            let mut header = [0; HEADER_LEN];
            template.write(&mut header, index, geometry.fragment_len(index));
            header
        };
        Picture {
            geometry,
            prefix,
            headers: (0..count).map(header).collect(),
            message_start,
            bytes: (0..len).map(|at| (0x60 | (at % 29) as u8, false)).collect(),
        }
    }

    /// The memory, to be painted before anything comes.
    pub(crate) fn memory(&self) -> Vec<u8> {
        self.bytes.iter().map(|(byte, _)| *byte).collect()
    }

    /// These bytes of the message, as far as it goes.
    pub(crate) fn payload(&self, range: Range<u64>) -> Vec<u8> {
        let byte = |at: u64| {
            let fragment = self.geometry.fragment_at(at);
            let offset = at - self.geometry.message_offset(fragment);
            0x80 | (fragment as u8) << 4 | (offset % 13) as u8
        };
        let end = range.end.min(self.geometry.message_len());
        (range.start..end).map(byte).collect()
    }

    /// The message with its headers in the holes, as a sender has it in its memory.
    pub(crate) fn send_region(&self) -> Vec<u8> {
        let mut region = vec![0; self.geometry.tx_region_len() as usize];
        for fragment in self.geometry.fragments() {
            let frame = self.geometry.tx_frame_offset(fragment.index) as usize;
            region[frame..frame + HEADER_LEN].copy_from_slice(&self.headers[fragment.index as usize]);
            let payload = self.payload(fragment.message_range());
            region[frame + HEADER_LEN..][..payload.len()].copy_from_slice(&payload);
        }
        region
    }

    /// Where a fragment's headers lie.
    fn headers_at(&self, fragment: u32) -> Range<u64> {
        let range = self.geometry.rx_header_range(fragment);
        let place = |at| self.message_start.wrapping_add_signed(at);
        place(range.start)..place(range.end)
    }

    /// The packet of a fragment was written.
    pub(crate) fn packet(&mut self, fragment: u32) {
        let headers = self.headers_at(fragment).start;
        let prefix = &mut self.bytes[(headers - self.prefix.len) as usize..];
        for (_, is_other) in &mut prefix[..self.prefix.written as usize] {
            *is_other = true;
        }
        self.write(headers, &self.headers[fragment as usize].clone());
        self.write_payload(self.geometry.rx_payload_range(fragment));
    }

    /// The payload under a fragment's headers was put back.
    pub(crate) fn tail_restored(&mut self, lowest: u32) {
        let headers = self.headers_at(lowest);
        let of_message = |address| address - self.message_start;
        self.write_payload(of_message(headers.start - self.prefix.len)..of_message(headers.end));
    }

    fn write(&mut self, address: u64, bytes: &[u8]) {
        let place = self.bytes[address as usize..].iter_mut();
        place.zip(bytes).for_each(|(place, &byte)| *place = (byte, false));
    }

    fn write_payload(&mut self, of_message: Range<u64>) {
        self.write(
            self.message_start + of_message.start,
            &self.payload(of_message.clone()),
        );
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

    fn picture(message_len: u64, prefix: Prefix) -> Picture {
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
        Picture::painted(geometry, &addressing, START, LEN as u64, prefix)
    }

    /// Writes packets as a device does; the memory, and what it should be after the last one.
    fn receive(message_len: u64, fragments: &[u32], prefix: &[u8], gap: usize) -> (Vec<u8>, Picture) {
        let of_driver = Prefix {
            len: (prefix.len() + gap) as u64,
            written: prefix.len() as u64,
        };
        let mut expected = picture(message_len, of_driver);
        let (mut memory, region) = (expected.memory(), expected.send_region());
        let geometry = expected.geometry;
        for &index in fragments {
            let start = START.wrapping_add_signed(geometry.rx_frame_start(index)) as usize;
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
                        let start = with_next.headers_at(next).start as usize;
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
        let headers = expected.headers_at(1);
        let below = headers.start as usize - 12..headers.end as usize;
        let tail = expected.payload(headers.start - 12 - START..headers.end - START);
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
        assert_eq!(memory[last], expected.headers[1][HEADER_LEN - 1]);
        assert_ne!(memory[last], expected.payload(1447..1448)[0]);
    }
}
