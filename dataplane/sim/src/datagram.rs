//! The simulated hosts' stack: UDP datagrams in Ethernet frames.

use std::net::{Ipv4Addr, SocketAddrV4};

pub(super) const ETHERNET_LEN: usize = 14;
pub(super) const IPV4_LEN: usize = 20;
pub(super) const UDP_LEN: usize = 8;
pub(super) const HEADERS_LEN: usize = ETHERNET_LEN + IPV4_LEN + UDP_LEN;

/// Source, destination port and payload of a whole UDP datagram to `ip`.
pub fn parse_datagram(frame: &[u8], ip: Ipv4Addr) -> Option<(SocketAddrV4, u16, std::ops::Range<usize>)> {
    let half = |at: usize| Some(u16::from_be_bytes([*frame.get(at)?, *frame.get(at + 1)?]));
    let address = |at: usize| {
        let octets: [u8; 4] = frame.get(at..at + 4)?.try_into().ok()?;
        Some(Ipv4Addr::from(octets))
    };
    let start = match half(12)? {
        0x0800 => ETHERNET_LEN,
        0x8100 if half(16)? == 0x0800 => ETHERNET_LEN + 4,
        _ => return None,
    };
    let version_and_len = *frame.get(start)?;
    let header_len = usize::from(version_and_len & 15) * 4;
    let fragment = half(start + 6)? & 0x3fff != 0;
    if version_and_len >> 4 != 4
        || header_len < IPV4_LEN
        || fragment
        || *frame.get(start + 9)? != 17
        || address(start + 16)? != ip
    {
        return None;
    }
    let end = start + usize::from(half(start + 2)?);
    let udp = start + header_len;
    let udp_len = usize::from(half(udp + 4)?);
    if udp_len < UDP_LEN || udp + udp_len > end || end > frame.len() {
        return None;
    }
    // As `ip_rcv_core` and `udp4_csum_init`; a UDP checksum of 0 says that there is none.
    if folded(sum(0, &frame[start..udp])) != 0xffff {
        return None;
    }
    let pseudo = sum(17 + udp_len as u32, &frame[start + 12..start + 20]);
    if half(udp + 6)? != 0 && folded(sum(pseudo, &frame[udp..udp + udp_len])) != 0xffff {
        return None;
    }
    let from = SocketAddrV4::new(address(start + 12)?, half(udp)?);
    Some((from, half(udp + 2)?, udp + UDP_LEN..udp + udp_len))
}

/// Adds the 16-bit words of `bytes` (RFC 1071), an odd last byte as if a 0 came behind it.
fn sum(start: u32, bytes: &[u8]) -> u32 {
    bytes.chunks(2).fold(start, |sum, pair| {
        let word = u16::from_be_bytes([pair[0], pair.get(1).copied().unwrap_or(0)]);
        sum + u32::from(word)
    })
}

/// A sum's 16 bits with all carries; datagrams have at most 2^15 words, so that `sum` does not overflow.
fn folded(sum: u32) -> u16 {
    let once = (sum & 0xffff) + (sum >> 16);
    ((once & 0xffff) + (once >> 16)) as u16
}

/// Writes a datagram as the kernel would send it, with both checksums and without MAC addresses.
pub fn write_datagram(packet: &mut Vec<u8>, from: SocketAddrV4, to: SocketAddrV4, payload: &[u8]) {
    packet.clear();
    packet.extend_from_slice(&[0; 12]);
    packet.extend_from_slice(&[0x08, 0x00]);
    let udp_len = (UDP_LEN + payload.len()) as u16;
    let mut ip = [0_u8; IPV4_LEN];
    ip[0] = 0x45;
    ip[2..4].copy_from_slice(&(IPV4_LEN as u16 + udp_len).to_be_bytes());
    ip[8] = 64;
    ip[9] = 17;
    ip[12..16].copy_from_slice(&from.ip().octets());
    ip[16..20].copy_from_slice(&to.ip().octets());
    let checksum = !folded(sum(0, &ip));
    ip[10..12].copy_from_slice(&checksum.to_be_bytes());
    packet.extend_from_slice(&ip);
    for half in [from.port(), to.port(), udp_len, 0] {
        packet.extend_from_slice(&half.to_be_bytes());
    }
    packet.extend_from_slice(payload);
    let pseudo = sum(17 + u32::from(udp_len), &ip[12..20]);
    let udp = ETHERNET_LEN + IPV4_LEN;
    // A checksum that comes out as 0 is sent as its other representation (RFC 768).
    let checksum = match !folded(sum(pseudo, &packet[udp..])) {
        0 => 0xffff,
        checksum => checksum,
    };
    packet[udp + 6..udp + 8].copy_from_slice(&checksum.to_be_bytes());
}
