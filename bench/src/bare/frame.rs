//! The packets of the bare programs: Ethernet, IPv4, UDP, and a payload that begins with a sequence number.

use std::net::Ipv4Addr;
use std::str::FromStr;

use clap::Args;

/// Bytes before the payload: Ethernet 14, IPv4 20 (RFC 791), UDP 8 (RFC 768).
pub const HEADER_LEN: usize = 14 + 20 + 8;
/// The payload begins with a 64-bit sequence number.
pub(super) const SEQUENCE_LEN: usize = 8;

/// An Ethernet address, written `aa:bb:cc:dd:ee:ff`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Mac(pub [u8; 6]);

impl FromStr for Mac {
    type Err = String;

    fn from_str(text: &str) -> Result<Mac, String> {
        let mut bytes = [0; 6];
        let mut parts = text.split(':');
        for byte in &mut bytes {
            let part = parts
                .next()
                .ok_or("an Ethernet address has six parts, like 02:00:00:00:00:01")?;
            *byte = u8::from_str_radix(part, 16).map_err(|error| format!("{part}: {error}"))?;
        }
        match parts.next() {
            None => Ok(Mac(bytes)),
            Some(_) => Err("an Ethernet address has six parts, like 02:00:00:00:00:01".into()),
        }
    }
}

/// Both ends of a packet.
#[derive(Debug, Clone, Copy)]
pub struct Ends {
    /// The sender's Ethernet address.
    pub source_mac: Mac,
    /// The receiver's.
    pub destination_mac: Mac,
    /// The sender's IPv4 address.
    pub source: Ipv4Addr,
    /// The receiver's.
    pub destination: Ipv4Addr,
    /// UDP port of both.
    pub port: u16,
}

impl Ends {
    /// Headers of a datagram with `payload_len` bytes; UDP checksum 0, which RFC 768 allows over IPv4.
    pub fn headers(&self, payload_len: usize) -> [u8; HEADER_LEN] {
        let udp_len = (payload_len + 8) as u16;
        let mut packet = [0; HEADER_LEN];
        packet[0..6].copy_from_slice(&self.destination_mac.0);
        packet[6..12].copy_from_slice(&self.source_mac.0);
        packet[12..14].copy_from_slice(&0x0800_u16.to_be_bytes());
        packet[14] = 0x45;
        packet[16..18].copy_from_slice(&(udp_len + 20).to_be_bytes());
        packet[20] = 0x40; // don't fragment
        packet[22] = 64;
        packet[23] = 17;
        packet[26..30].copy_from_slice(&self.source.octets());
        packet[30..34].copy_from_slice(&self.destination.octets());
        let checksum = checksum(&packet[14..34]);
        packet[24..26].copy_from_slice(&checksum.to_be_bytes());
        packet[34..36].copy_from_slice(&self.port.to_be_bytes());
        packet[36..38].copy_from_slice(&self.port.to_be_bytes());
        packet[38..40].copy_from_slice(&udp_len.to_be_bytes());
        packet
    }
}

/// Whom a sending program talks to.
#[derive(Debug, Clone, Args)]
pub struct ToArgs {
    /// IPv4 address of the receiver
    #[arg(long, required = false)]
    pub to: Ipv4Addr,
    /// Ethernet address of the receiver
    #[arg(long, required = false)]
    pub to_mac: Mac,
    /// IPv4 address to send from
    #[arg(long, required = false)]
    pub from: Ipv4Addr,
    /// Ethernet address to send from
    #[arg(long, required = false)]
    pub from_mac: Mac,
}

impl ToArgs {
    /// These ends, with this UDP port at both.
    pub fn ends(&self, port: u16) -> Ends {
        Ends {
            source_mac: self.from_mac,
            destination_mac: self.to_mac,
            source: self.from,
            destination: self.to,
            port,
        }
    }
}

/// Turns received headers around: the answer goes where the packet came from. Sums do not change, so the checksum stays.
pub(super) fn turn_around(packet: &mut [u8; HEADER_LEN]) {
    for (first, second, len) in [(0, 6, 6), (26, 30, 4), (34, 36, 2)] {
        for byte in 0..len {
            packet.swap(first + byte, second + byte);
        }
    }
}

/// Internet checksum (RFC 1071) of an even number of bytes.
fn checksum(bytes: &[u8]) -> u16 {
    let sum: u32 = bytes
        .chunks_exact(2)
        .map(|pair| u32::from(u16::from_be_bytes([pair[0], pair[1]])))
        .sum();
    let folded = (sum & 0xffff) + (sum >> 16);
    !((folded & 0xffff) + (folded >> 16)) as u16
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ends() -> Ends {
        Ends {
            source_mac: Mac([2, 0, 0, 0, 0, 1]),
            destination_mac: Mac([2, 0, 0, 0, 0, 2]),
            source: Ipv4Addr::new(10, 0, 0, 1),
            destination: Ipv4Addr::new(10, 0, 0, 2),
            port: 7200,
        }
    }

    #[test]
    fn header_checksum_is_valid_both_ways() {
        let mut packet = ends().headers(1472);
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

    #[test]
    fn addresses_are_six_bytes() {
        assert_eq!("02:00:00:00:00:aB".parse(), Ok(Mac([2, 0, 0, 0, 0, 0xab])));
        for wrong in ["", "02:00:00:00:00", "02:00:00:00:00:01:02", "02:00:00:00:00:zz"] {
            assert!(wrong.parse::<Mac>().is_err(), "{wrong}");
        }
    }
}
