//! What the memory should be after each packet, told by geometry.
//!
//! So that no byte passes for another, the values are kept apart: memory is painted with bytes from 0x60 to 0x7d,
//! payload has the highest bit set and the fragment's number behind it, and where a packet's headers will lie, paint
//! and payload differ from the header byte of that place. Where a driver may write its prefix anything else will do.

use std::ops::Range;

use lm_protocol::geometry::Geometry;
use lm_protocol::wire::{Addressing, DataTemplate};

/// There is no session: any key will do.
const KEY: u64 = 0x6f76_6572_6c61_7973;
const MESSAGE: u32 = 1;
/// `lm` over IPv4, untagged.
const HEADER_LEN: usize = 66;

/// The bytes that are sent, and those that lie in the memory before.
pub(crate) struct Content {
    geometry: Geometry,
    headers: Vec<[u8; HEADER_LEN]>,
    /// Where the message will begin in the registered memory.
    message_start: u64,
}

impl Content {
    /// A byte of payload has three bits for its fragment.
    pub(crate) const MAX_FRAGMENTS: u32 = 8;

    pub(crate) fn new(geometry: Geometry, addressing: &Addressing, message_start: u64) -> Content {
        let count = geometry.fragment_count();
        let template = DataTemplate::new(addressing, KEY, MESSAGE, count, geometry.layout().payload_len());
        let header = |index| {
            let mut header = [0; HEADER_LEN];
            template.write(&mut header, index, geometry.fragment_len(index));
            header
        };
        Content {
            geometry,
            headers: (0..count).map(header).collect(),
            message_start,
        }
    }

    /// The fragment whose headers cover that byte, counted from the message's first one, and the header byte there.
    fn header_at(&self, at: i64) -> Option<(u32, u8)> {
        let payload_len = i64::from(self.geometry.layout().payload_len());
        let fragment = (at + HEADER_LEN as i64).div_euclid(payload_len);
        let header = self.headers.get(usize::try_from(fragment).ok()?)?;
        let offset = usize::try_from(at - self.geometry.rx_frame_start(fragment as u32)).ok()?;
        Some((fragment as u32, *header.get(offset)?))
    }

    /// `byte`, or its neighbour where the headers have that value.
    fn distinct(&self, byte: u8, at: i64) -> u8 {
        match self.header_at(at) {
            Some((_, header)) if header == byte => byte ^ 1,
            _ => byte,
        }
    }

    /// Byte `at` of the message and its fragment.
    fn payload_at(&self, at: u64) -> Option<(u32, u8)> {
        if at >= self.geometry.message_len() {
            return None;
        }
        let fragment = self.geometry.fragment_at(at);
        let offset = at - self.geometry.message_offset(fragment);
        let byte = 0x80 | (fragment as u8) << 4 | (offset % 13) as u8;
        Some((fragment, self.distinct(byte, at as i64)))
    }

    /// The registered memory's byte at `address`, before anything comes.
    fn paint_at(&self, address: u64) -> u8 {
        let byte = 0x60 | (address % 29) as u8;
        self.distinct(byte, address as i64 - self.message_start as i64)
    }

    pub(crate) fn painted(&self, len: u64) -> Vec<u8> {
        (0..len).map(|address| self.paint_at(address)).collect()
    }

    pub(crate) fn message(&self) -> Vec<u8> {
        let len = self.geometry.message_len();
        (0..len)
            .filter_map(|at| self.payload_at(at))
            .map(|(_, byte)| byte)
            .collect()
    }

    /// The message with its headers in the holes, as a sender has it in its memory.
    pub(crate) fn send_region(&self) -> Vec<u8> {
        let mut region = vec![0; self.geometry.tx_region_len() as usize];
        let message = self.message();
        for fragment in self.geometry.fragments() {
            let frame = self.geometry.tx_frame_offset(fragment.index) as usize;
            region[frame..frame + HEADER_LEN].copy_from_slice(&self.headers[fragment.index as usize]);
            let range = fragment.message_range();
            let payload = &message[range.start as usize..range.end as usize];
            region[frame + HEADER_LEN..][..payload.len()].copy_from_slice(payload);
        }
        region
    }

    /// Where a fragment's headers lie.
    fn headers_at(&self, fragment: u32) -> Range<u64> {
        let range = self.geometry.rx_header_range(fragment);
        let place = |at| self.message_start.wrapping_add_signed(at);
        place(range.start)..place(range.end)
    }

    /// Whether that byte is what was painted there, or the payload of that place.
    fn is_known(&self, address: u64, byte: u8) -> bool {
        let payload = address
            .checked_sub(self.message_start)
            .and_then(|at| self.payload_at(at));
        byte == self.paint_at(address) || payload.is_some_and(|(_, expected)| byte == expected)
    }
}

/// What the driver writes in front of a packet.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Prefix {
    /// From its first byte to the packet, in bytes.
    pub(crate) len: u64,
    /// How many of them it writes, from the first one on.
    pub(crate) written: u64,
}

/// What the registered memory should be.
pub(crate) struct Picture {
    prefix: Prefix,
    /// Each byte; nothing of what only the driver knows.
    bytes: Vec<Option<u8>>,
}

impl Picture {
    /// Before anything comes.
    pub(crate) fn painted(content: &Content, len: u64, prefix: Prefix) -> Picture {
        Picture {
            prefix,
            bytes: content.painted(len).into_iter().map(Some).collect(),
        }
    }

    /// The packet of a fragment was written.
    pub(crate) fn packet(&mut self, content: &Content, fragment: u32) {
        let headers = content.headers_at(fragment);
        let prefix = (headers.start - self.prefix.len) as usize;
        self.bytes[prefix..][..self.prefix.written as usize].fill(None);
        self.write(headers.start, &content.headers[fragment as usize]);
        self.write_payload(content, content.geometry.rx_payload_range(fragment));
    }

    /// The payload under a fragment's headers was put back.
    pub(crate) fn tail_restored(&mut self, content: &Content, lowest: u32) {
        let headers = content.headers_at(lowest);
        let below = headers.start - self.prefix.len..headers.end;
        self.write_payload(
            content,
            below.start - content.message_start..below.end - content.message_start,
        );
    }

    fn write(&mut self, address: u64, bytes: &[u8]) {
        let place = self.bytes[address as usize..].iter_mut();
        place.zip(bytes).for_each(|(place, &byte)| *place = Some(byte));
    }

    fn write_payload(&mut self, content: &Content, of_message: Range<u64>) {
        let start = content.message_start + of_message.start;
        let payload = of_message
            .filter_map(|at| content.payload_at(at))
            .map(|(_, byte)| byte);
        self.write(start, &payload.collect::<Vec<_>>());
    }

    /// The first byte of the memory that is not what it should be.
    pub(crate) fn difference(&self, content: &Content, memory: &[u8]) -> Option<usize> {
        let is_right = |at: usize| match self.bytes[at] {
            Some(expected) => memory[at] == expected,
            None => !content.is_known(at as u64, memory[at]),
        };
        (0..memory.len()).find(|&at| !is_right(at))
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

    fn content(message_len: u64) -> Content {
        let addressing = Addressing {
            // Bytes that paint and payload would have here but for `distinct`.
            src_mac: MacAddr([0x60, 0x7c, 0x80, 0x8c, 0xff, 0x71]),
            dst_mac: MacAddr([0x65, 0x66, 0x92, 0xa3, 0xb4, 0xc5]),
            vlan: None,
            src_ip: Ipv4Addr::new(0x61, 0x81, 0x91, 0xa1),
            dst_ip: Ipv4Addr::new(0x62, 0x82, 0x92, 0xa2),
            src_port: 0x6b8b,
            dst_port: 7168,
        };
        let layout = Layout::new(Wire::Lm, 1500, LinkShape::IPV4).unwrap();
        Content::new(layout.message(message_len).unwrap(), &addressing, START)
    }

    /// Writes packets as a device does; the memory, and what it should be after the last one.
    fn receive(content: &Content, fragments: &[u32], prefix: &[u8], gap: usize) -> (Vec<u8>, Picture) {
        let geometry = content.geometry;
        let mut memory = content.painted(LEN as u64);
        let of_driver = Prefix {
            len: (prefix.len() + gap) as u64,
            written: prefix.len() as u64,
        };
        let mut expected = Picture::painted(content, LEN as u64, of_driver);
        let region = content.send_region();
        for &index in fragments {
            let start = START.wrapping_add_signed(geometry.rx_frame_start(index)) as usize;
            let frame = geometry.tx_frame_offset(index) as usize;
            let len = usize::from(geometry.fragment(index).frame_len());
            memory[start - prefix.len() - gap..start - gap].copy_from_slice(prefix);
            memory[start..start + len].copy_from_slice(&region[frame..frame + len]);
            expected.packet(content, index);
        }
        (memory, expected)
    }

    #[test]
    fn every_byte_is_told_by_its_value() {
        for len in [1, 1448, 1449, 11_036, 8 * 1448] {
            let content = content(len);
            let count = content.geometry.fragment_count();
            let order: Vec<u32> = WindowShape::whole(count).transmit_order(count).collect();
            for arrived in 0..=order.len() {
                for (prefix, gap) in [(&[][..], 0), (&[0; 12], 0), (&[0, 0, 0, 0, 0, 0, 0, 0, 1, 0], 2)] {
                    let (memory, expected) = receive(&content, &order[..arrived], prefix, gap);
                    assert_eq!(expected.difference(&content, &memory), None, "{len} {arrived}");
                    // What did not come is missed, the prefix too.
                    if let Some(&next) = order.get(arrived) {
                        let (more, with_next) = receive(&content, &order[..=arrived], prefix, gap);
                        let start = content.headers_at(next).start as usize;
                        let first = start - prefix.len() - gap;
                        assert_eq!(
                            with_next.difference(&content, &memory),
                            Some(first),
                            "{len} {arrived}"
                        );
                        assert_eq!(
                            expected.difference(&content, &more),
                            Some(first),
                            "{len} {arrived}"
                        );
                    }
                }
            }
        }
    }

    #[test]
    fn a_byte_too_many_is_foreign() {
        let content = content(3000);
        let (paint, expected) = receive(&content, &[], &[], 0);
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
            assert_eq!(expected.difference(&content, &memory), Some(at));
        }
    }

    #[test]
    fn a_tail_is_put_back() {
        let content = content(2896);
        let (mut memory, mut expected) = receive(&content, &[0, 1], &[7; 12], 0);
        let headers = content.headers_at(1);
        let below = headers.start as usize - 12..headers.end as usize;
        let from = |at: usize| at - START as usize;
        memory[below.clone()].copy_from_slice(&content.message()[from(below.start)..from(below.end)]);
        assert_eq!(expected.difference(&content, &memory), Some(below.start));
        expected.tail_restored(&content, 1);
        assert_eq!(expected.difference(&content, &memory), None);
    }

    #[test]
    fn forward_order_destroys_payload() {
        let content = content(2896);
        let (memory, expected) = receive(&content, &[0, 1], &[], 0);
        assert_eq!(expected.difference(&content, &memory), None);
        let last = START as usize + 1447;
        assert_eq!(memory[last], content.headers[1][HEADER_LEN - 1]);
        assert_ne!(memory[last], content.message()[1447]);
    }
}
