//! The packets of the bare programs: Ethernet, IPv4, UDP, and a payload that begins with a sequence number.

use lm_protocol::wire::Addressing;
use lm_protocol::wire::lm::TYPE_DATA;

/// Bytes before the payload: Ethernet 14, IPv4 20 (RFC 791), UDP 8 (RFC 768).
pub const HEADER_LEN: usize = 14 + 20 + 8;
/// The payload begins with a 64-bit sequence number.
pub(super) const SEQUENCE_LEN: usize = 8;

/// Headers of a datagram with `payload_len` bytes; UDP checksum 0, which RFC 768 allows over IPv4.
pub fn headers(ends: &Addressing, payload_len: usize) -> [u8; HEADER_LEN] {
    let mut packet = [0; HEADER_LEN];
    let written = ends.write_udp_headers(&mut packet, TYPE_DATA, payload_len);
    written.expect("no longer than a datagram");
    packet
}

/// Turns received headers around: the answer goes where the packet came from. Sums do not change, so the checksum stays.
pub(super) fn turn_around(packet: &mut [u8; HEADER_LEN]) {
    for (first, second, len) in [(0, 6, 6), (26, 30, 4), (34, 36, 2)] {
        for byte in 0..len {
            packet.swap(first + byte, second + byte);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use lm_protocol::wire::ethernet::MacAddr;
    use lm_protocol::wire::ipv4::checksum;

    use super::*;

    #[test]
    fn header_checksum_is_valid_both_ways() {
        let ends = Addressing {
            src_mac: MacAddr([2, 0, 0, 0, 0, 1]),
            dst_mac: MacAddr([2, 0, 0, 0, 0, 2]),
            vlan: None,
            src_ip: Ipv4Addr::new(10, 0, 0, 1),
            dst_ip: Ipv4Addr::new(10, 0, 0, 2),
            src_port: 7200,
            dst_port: 7200,
        };
        let mut packet = headers(&ends, 1472);
        assert_eq!(
            checksum(&packet[14..34]),
            0,
            "a header with its checksum sums to nothing"
        );
        assert_eq!(packet[16..18], 1500_u16.to_be_bytes());
        turn_around(&mut packet);
        assert_eq!(checksum(&packet[14..34]), 0);
        assert_eq!(packet[0..6], [2, 0, 0, 0, 0, 1]);
        assert_eq!(packet[30..34], [10, 0, 0, 1]);
    }
}
