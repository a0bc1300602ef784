//! What each byte of the memory is, told by its value, and what it should be, told by geometry.
//!
//! So that a value tells, the values are kept apart: memory is painted with bytes from 0x60 to 0x7d, payload has the highest bit set
//! and the fragment's number behind it, and where a packet's headers will lie, paint and payload differ from the header byte of that
//! place. What is none of the three and lies where a driver may write its prefix is *prefix*; anything else is *foreign*.

use std::ops::Range;

use lm_protocol::geometry::Geometry;
use lm_protocol::wire::{Addressing, DataTemplate};

/// There is no session: any key will do.
const KEY: u64 = 0x6f76_6572_6c61_7973;
const MESSAGE: u32 = 1;
/// `lm` over IPv4, untagged.
const HEADER_LEN: usize = 66;

/// What a byte is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum What {
    /// As it was painted.
    Paint,
    /// Written by the driver in front of the packet of a fragment.
    Prefix {
        /// The fragment.
        fragment: u32,
    },
    /// Headers of a fragment's packet.
    Header {
        /// The fragment.
        fragment: u32,
    },
    /// Payload of a fragment, at its place in the message.
    Payload {
        /// The fragment.
        fragment: u32,
    },
    /// Anything else.
    Foreign,
}

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

    fn classify(&self, address: u64, byte: u8, prefix_len: u64) -> What {
        if byte == self.paint_at(address) {
            return What::Paint;
        }
        let at = address as i64 - self.message_start as i64;
        if let Some((fragment, expected)) = u64::try_from(at).ok().and_then(|at| self.payload_at(at))
            && byte == expected
        {
            return What::Payload { fragment };
        }
        match self.header_at(at) {
            Some((fragment, expected)) if byte == expected => return What::Header { fragment },
            Some(_) => return What::Foreign,
            None => {}
        }
        match self.header_at(at + prefix_len as i64) {
            Some((fragment, _)) => What::Prefix { fragment },
            None => What::Foreign,
        }
    }
}

/// What each byte of the registered memory is.
pub(crate) struct Picture(Vec<What>);

impl Picture {
    pub(crate) fn of(memory: &[u8], content: &Content, prefix_len: u64) -> Picture {
        let classify = |(address, &byte): (usize, &u8)| content.classify(address as u64, byte, prefix_len);
        Picture(memory.iter().enumerate().map(classify).collect())
    }

    /// The first byte where two pictures differ: its address, what it is here and what there.
    pub(crate) fn difference(&self, other: &Picture) -> Option<(usize, What, What)> {
        let pairs = self.0.iter().zip(&other.0).enumerate();
        pairs
            .map(|(at, (&here, &there))| (at, here, there))
            .find(|(_, here, there)| here != there)
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

/// What the memory should be: geometry alone, no byte was looked at.
pub(crate) struct Prediction {
    geometry: Geometry,
    message_start: u64,
    prefix: Prefix,
    /// In the order of writing: later ones lie over earlier ones.
    written: Vec<(Range<u64>, What)>,
}

impl Prediction {
    pub(crate) fn new(geometry: Geometry, message_start: u64, prefix: Prefix) -> Prediction {
        Prediction {
            geometry,
            message_start,
            prefix,
            written: Vec::new(),
        }
    }

    /// The packet of a fragment was written.
    pub(crate) fn packet(&mut self, fragment: u32) {
        let headers = self.headers(fragment);
        let payload = self.geometry.rx_payload_range(fragment);
        let prefix = headers.start - self.prefix.len;
        self.written.extend([
            (prefix..prefix + self.prefix.written, What::Prefix { fragment }),
            (headers, What::Header { fragment }),
            (
                self.message_start + payload.start..self.message_start + payload.end,
                What::Payload { fragment },
            ),
        ]);
    }

    /// The payload under a fragment's headers was put back.
    pub(crate) fn tail_restored(&mut self, lowest: u32) {
        let headers = self.headers(lowest);
        let below = What::Payload { fragment: lowest - 1 };
        self.written
            .push((headers.start - self.prefix.len..headers.end, below));
    }

    fn headers(&self, fragment: u32) -> Range<u64> {
        let range = self.geometry.rx_header_range(fragment);
        let place = |at| self.message_start.wrapping_add_signed(at);
        place(range.start)..place(range.end)
    }

    pub(crate) fn picture(&self, memory_len: usize) -> Picture {
        let mut picture = vec![What::Paint; memory_len];
        for (range, what) in &self.written {
            picture[range.start as usize..range.end as usize].fill(*what);
        }
        Picture(picture)
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

    /// Writes packets as a device does, and gives the pictures seen and predicted after the last one.
    fn receive(content: &Content, fragments: &[u32], prefix: &[u8], gap: usize) -> (Picture, Picture) {
        let geometry = content.geometry;
        let mut memory = content.painted(LEN as u64);
        let prefix_len = (prefix.len() + gap) as u64;
        let mut prediction = Prediction::new(
            geometry,
            START,
            Prefix {
                len: prefix_len,
                written: prefix.len() as u64,
            },
        );
        let region = content.send_region();
        for &index in fragments {
            let start = START.wrapping_add_signed(geometry.rx_frame_start(index)) as usize;
            let frame = geometry.tx_frame_offset(index) as usize;
            let len = usize::from(geometry.fragment(index).frame_len());
            memory[start - prefix.len() - gap..start - gap].copy_from_slice(prefix);
            memory[start..start + len].copy_from_slice(&region[frame..frame + len]);
            prediction.packet(index);
        }
        (Picture::of(&memory, content, prefix_len), prediction.picture(LEN))
    }

    #[test]
    fn every_byte_is_told_by_its_value() {
        for len in [1, 1448, 1449, 11_036, 8 * 1448] {
            let content = content(len);
            let count = content.geometry.fragment_count();
            let order: Vec<u32> = WindowShape::whole(count).transmit_order(count).collect();
            for arrived in 0..=order.len() {
                for (prefix, gap) in [(&[][..], 0), (&[0; 12], 0), (&[0, 0, 0, 0, 0, 0, 0, 0, 1, 0], 2)] {
                    let (seen, predicted) = receive(&content, &order[..arrived], prefix, gap);
                    assert_eq!(seen.difference(&predicted), None, "{len} {arrived}");
                }
            }
        }
    }

    #[test]
    fn a_byte_too_many_is_foreign() {
        let content = content(3000);
        let (_, predicted) = receive(&content, &[], &[], 0);
        let paint = content.painted(LEN as u64);
        let prefix_len = 12;
        for at in [0, START as usize - 66 - 13, START as usize + 3000, LEN - 1] {
            let mut memory = paint.clone();
            memory[at] ^= 0xff;
            let seen = Picture::of(&memory, &content, prefix_len);
            assert_eq!(
                seen.difference(&predicted),
                Some((at, What::Foreign, What::Paint))
            );
        }
        // In a header's place, too, what is not that header.
        let mut memory = paint;
        let at = START as usize - 30;
        memory[at] = (0..=0xff)
            .find(|&byte| byte != memory[at] && Some(byte) != content.header_at(-30).map(|(_, byte)| byte))
            .unwrap();
        let seen = Picture::of(&memory, &content, prefix_len);
        assert_eq!(
            seen.difference(&predicted),
            Some((at, What::Foreign, What::Paint))
        );
    }

    #[test]
    fn forward_order_destroys_payload() {
        let content = content(2896);
        let (seen, predicted) = receive(&content, &[0, 1], &[], 0);
        assert_eq!(seen.difference(&predicted), None);
        assert_eq!(seen.0[START as usize + 1447], What::Header { fragment: 1 });
    }
}
