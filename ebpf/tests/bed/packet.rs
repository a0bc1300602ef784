//! A packet builder of the tests' own: it shares no code with `lm-protocol`, so that the two check each other, and lets
//! every field lie.

use std::net::Ipv4Addr;

/// The ports and addresses of the tests.
pub(crate) const PEER: Ipv4Addr = Ipv4Addr::new(10, 77, 0, 1);
pub(crate) const LOCAL: Ipv4Addr = Ipv4Addr::new(10, 77, 0, 2);
/// The interface's.
pub(crate) const MAC: [u8; 6] = [2, 0, 0, 0, 0, 2];
pub(crate) const PEER_PORT: u16 = 40000;
pub(crate) const DATA_PORT: u16 = 7168;
pub(crate) const CONTROL_PORT: u16 = 7169;
pub(crate) const KEY: u64 = 0x0123_4567_89ab_cdef;

/// LM's version, and its header types.
pub(crate) const VERSION: u8 = 2;
pub(crate) const DATA: u8 = 1;
pub(crate) const EAGER: u8 = 2;
pub(crate) const LAST_SMALL: u8 = 13;
pub(crate) const CONTROL: u8 = 15;

/// Fields of a frame. `None` in a length: what is right.
#[derive(Clone, Debug)]
pub(crate) struct Packet {
    pub(crate) mac: [u8; 6],
    pub(crate) ethernet_type: u16,
    pub(crate) vlan: Option<u16>,
    pub(crate) version_words: u8,
    pub(crate) total_len: Option<u16>,
    pub(crate) id: u16,
    pub(crate) fragment: u16,
    pub(crate) protocol: u8,
    pub(crate) source: Ipv4Addr,
    pub(crate) destination: Ipv4Addr,
    pub(crate) has_udp: bool,
    pub(crate) source_port: u16,
    pub(crate) destination_port: u16,
    pub(crate) udp_len: Option<u16>,
    pub(crate) has_lm: bool,
    pub(crate) version_type: u8,
    pub(crate) lm_payload_len: Option<u16>,
    pub(crate) key: u64,
    pub(crate) message: u32,
    pub(crate) index: u32,
    pub(crate) count: u32,
    pub(crate) payload_len: usize,
    pub(crate) trailer_len: usize,
}

impl Packet {
    /// A packet of some LM type with legal lengths.
    pub(crate) fn lm(kind: u8, payload_len: usize) -> Packet {
        Packet {
            mac: MAC,
            ethernet_type: 0x0800,
            vlan: None,
            version_words: 0x45,
            total_len: None,
            id: 0,
            fragment: 0x4000,
            protocol: 17,
            source: PEER,
            destination: LOCAL,
            has_udp: true,
            source_port: PEER_PORT,
            destination_port: DATA_PORT,
            udp_len: None,
            has_lm: true,
            version_type: VERSION << 4 | kind,
            lm_payload_len: None,
            key: KEY,
            message: 0,
            index: 0,
            count: 1,
            payload_len,
            trailer_len: 0,
        }
    }

    /// Fragment `index` of `count` of a message on the lm wire.
    pub(crate) fn data(message: u32, index: u32, count: u32, payload_len: usize) -> Packet {
        Packet {
            message,
            index,
            count,
            ..Packet::lm(DATA, payload_len)
        }
    }

    /// An IPv4 fragment of a UDP datagram: `payload_len` IP payload bytes from `offset` on.
    pub(crate) fn ip_fragment(id: u16, offset: u16, has_more: bool, payload_len: usize) -> Packet {
        let has_udp = offset == 0;
        Packet {
            id,
            fragment: (if has_more { 0x2000 } else { 0 }) | (offset / 8),
            has_udp,
            has_lm: false,
            payload_len: if has_udp { payload_len - 8 } else { payload_len },
            ..Packet::lm(DATA, 0)
        }
    }

    /// The frame's bytes, without Ethernet's checksum.
    pub(crate) fn bytes(&self) -> Vec<u8> {
        let lm_len = if self.has_lm { 24 } else { 0 } + self.payload_len;
        let udp_len = if self.has_udp { 8 } else { 0 } + lm_len;
        let mut frame = [self.mac, [2, 0, 0, 0, 0, 1]].concat();
        if let Some(tag) = self.vlan {
            frame.extend(0x8100u16.to_be_bytes());
            frame.extend(tag.to_be_bytes());
        }
        frame.extend(self.ethernet_type.to_be_bytes());
        let ip = frame.len();
        let words = usize::from(self.version_words & 15).clamp(5, 15);
        frame.extend([self.version_words, 0]);
        frame.extend(
            self.total_len
                .unwrap_or((words * 4 + udp_len) as u16)
                .to_be_bytes(),
        );
        frame.extend(self.id.to_be_bytes());
        frame.extend(self.fragment.to_be_bytes());
        frame.extend([64, self.protocol, 0, 0]);
        frame.extend(self.source.octets());
        frame.extend(self.destination.octets());
        frame.resize(ip + words * 4, 1); // no-operation options
        let checksum = checksum(&frame[ip..]);
        frame[ip + 10..ip + 12].copy_from_slice(&checksum.to_be_bytes());
        if self.has_udp {
            frame.extend(self.source_port.to_be_bytes());
            frame.extend(self.destination_port.to_be_bytes());
            frame.extend(self.udp_len.unwrap_or(udp_len as u16).to_be_bytes());
            frame.extend([0, 0]);
        }
        if self.has_lm {
            frame.extend([self.version_type, 0]);
            frame.extend(
                self.lm_payload_len
                    .unwrap_or(self.payload_len as u16)
                    .to_be_bytes(),
            );
            frame.extend(self.key.to_be_bytes());
            frame.extend(self.message.to_be_bytes());
            frame.extend(self.index.to_be_bytes());
            frame.extend(self.count.to_be_bytes());
        }
        frame.extend((0..self.payload_len).map(|byte| byte as u8));
        frame.extend(std::iter::repeat_n(0xee, self.trailer_len));
        frame
    }
}

/// The Internet checksum (RFC 1071) of an even number of bytes.
fn checksum(bytes: &[u8]) -> u16 {
    let words = bytes
        .chunks_exact(2)
        .map(|pair| u32::from(u16::from_be_bytes([pair[0], pair[1]])));
    let sum: u32 = words.sum();
    let folded = (sum & 0xffff) + (sum >> 16);
    !((folded & 0xffff) + (folded >> 16)) as u16
}
