//! Who sends to whom, and the headers of a single LM packet.

use super::ethernet::{ETHERTYPE_IPV4, ETHERTYPE_VLAN, EthernetHeader, MacAddr, VlanTag};
use super::ipv4::{Ipv4Repr, PROTOCOL_UDP};
use super::lm::{self, LmHeader};
use super::udp::UdpRepr;
use crate::geometry::LinkShape;
use core::net::Ipv4Addr;
use zerocopy::IntoBytes;
use zerocopy::byteorder::network_endian::U16;

/// Addresses and ports of packets in one direction.
///
/// ```
/// use core::net::Ipv4Addr;
/// use lm_protocol::wire::{Addressing, Transport, ethernet::MacAddr, lm::LmHeader, parse_frame};
///
/// let addressing = Addressing {
///     src_mac: MacAddr([2, 0, 0, 0, 0, 1]),
///     dst_mac: MacAddr([2, 0, 0, 0, 0, 2]),
///     vlan: None,
///     src_ip: Ipv4Addr::new(10, 0, 0, 1),
///     dst_ip: Ipv4Addr::new(10, 0, 0, 2),
///     src_port: 40_000,
///     dst_port: 7168,
/// };
/// let header =
///     LmHeader::Eager { sender_id: 1, number: 0, tag: 9, digested: false, acknowledges: None };
/// let mut packet = [0; 128];
/// let header_len = addressing.write_headers(&mut packet, &header, 5)?;
/// packet[header_len..header_len + 5].copy_from_slice(b"hello");
///
/// let frame = parse_frame(&packet[..header_len + 5])?;
/// assert_eq!(frame.lm(), Some(&header));
/// assert_eq!(frame.payload, b"hello");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Addressing {
    /// Sender's Ethernet address.
    pub src_mac: MacAddr,
    /// Next hop's Ethernet address.
    pub dst_mac: MacAddr,
    /// VLAN ID (12 bits) of an 802.1Q tag, if the frame carries one.
    pub vlan: Option<u16>,
    /// Sender's address.
    pub src_ip: Ipv4Addr,
    /// Receiver's address.
    pub dst_ip: Ipv4Addr,
    /// Sender's UDP port.
    pub src_port: u16,
    /// Receiver's UDP port.
    pub dst_port: u16,
}

/// Why headers were not written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum BuildError {
    /// The output is shorter than the headers.
    #[error("the headers need {needed} bytes")]
    OutputTooShort {
        /// Bytes that the headers need.
        needed: usize,
    },
    /// The payload does not fit a UDP datagram.
    #[error("the payload does not fit one datagram: at most {maximum} bytes")]
    PayloadTooLong {
        /// Most payload bytes.
        maximum: usize,
    },
}

impl Addressing {
    /// The link that these packets travel on.
    #[inline]
    pub const fn link(&self) -> LinkShape {
        LinkShape {
            vlan_tags: self.vlan.is_some() as u8,
        }
    }

    /// Bytes of the headers that [`Addressing::write_headers`] writes: 66, with a tag 70.
    #[inline]
    pub const fn header_len(&self) -> usize {
        self.ethernet_len() + Ipv4Repr::HEADER_LEN + UdpRepr::HEADER_LEN + lm::HEADER_LEN
    }

    /// The same relation seen from the other end.
    #[inline]
    pub const fn reversed(&self) -> Addressing {
        Addressing {
            src_mac: self.dst_mac,
            dst_mac: self.src_mac,
            vlan: self.vlan,
            src_ip: self.dst_ip,
            dst_ip: self.src_ip,
            src_port: self.dst_port,
            dst_port: self.src_port,
        }
    }

    /// Writes all headers of one LM packet to the start of `out`; gives their length. The payload follows there, and behind
    /// it the [`lm::Trailer`], which `payload_len` does not count.
    ///
    /// Don't fragment, identification 0 (RFC 6864), TTL 64, DSCP as [`lm::dscp_ecn`] has it, no UDP checksum (see [`super::udp`]).
    ///
    /// # Errors
    ///
    /// [`BuildError`]; nothing is written then.
    pub fn write_headers(
        &self,
        out: &mut [u8],
        header: &LmHeader,
        payload_len: usize,
    ) -> Result<usize, BuildError> {
        let trailer_len = header.trailer_len();
        let maximum = lm::MAX_PAYLOAD_LEN - trailer_len;
        if payload_len > maximum {
            return Err(BuildError::PayloadTooLong { maximum });
        }
        let needed = self.header_len();
        let out = out
            .get_mut(..needed)
            .ok_or(BuildError::OutputTooShort { needed })?;

        // At most 65,483 with the trailer, so no sum below overflows.
        let payload_len = payload_len as u16;
        let udp_payload_len = payload_len + (trailer_len + lm::HEADER_LEN) as u16;
        let (below_lm, lm_out) = out.split_at_mut(needed - lm::HEADER_LEN);
        let dscp_ecn = match header {
            LmHeader::Extension { packet_type, .. } => lm::dscp_ecn(*packet_type),
            _ => 0,
        };
        self.write_below_lm(below_lm, udp_payload_len, dscp_ecn);
        lm_out.copy_from_slice(&header.encode(payload_len));
        Ok(needed)
    }

    /// Bytes of all headers up to UDP's.
    #[inline]
    pub const fn udp_header_len(&self) -> usize {
        self.header_len() - lm::HEADER_LEN
    }

    /// Writes the headers of a packet up to UDP's, as [`Addressing::write_headers`], for `payload_len` bytes behind them, an LM header
    /// of `packet_type` first among these; gives their length.
    ///
    /// # Errors
    ///
    /// [`BuildError`]; nothing is written then.
    pub fn write_udp_headers(
        &self,
        out: &mut [u8],
        packet_type: u8,
        payload_len: usize,
    ) -> Result<usize, BuildError> {
        let maximum = lm::MAX_PAYLOAD_LEN + lm::HEADER_LEN;
        if payload_len > maximum {
            return Err(BuildError::PayloadTooLong { maximum });
        }
        let needed = self.udp_header_len();
        let out = out
            .get_mut(..needed)
            .ok_or(BuildError::OutputTooShort { needed })?;
        self.write_below_lm(out, payload_len as u16, lm::dscp_ecn(packet_type));
        Ok(needed)
    }

    /// Fills `out`, which has exactly [`Addressing::udp_header_len`] bytes.
    #[inline(always)]
    fn write_below_lm(&self, out: &mut [u8], udp_payload_len: u16, dscp_ecn: u8) {
        let (below_udp, udp_out) = out.split_at_mut(out.len() - UdpRepr::HEADER_LEN);
        let (ethernet_out, ip_out) = below_udp.split_at_mut(below_udp.len() - Ipv4Repr::HEADER_LEN);
        self.write_ethernet(ethernet_out);
        ip_out.copy_from_slice(self.lm_ip(udp_payload_len, dscp_ecn).to_header().as_bytes());
        udp_out.copy_from_slice(self.udp(udp_payload_len, 0).to_header().as_bytes());
    }

    /// Bytes of Ethernet header and tag.
    pub(super) const fn ethernet_len(&self) -> usize {
        self.link().ethernet_len() as usize
    }

    /// Fills `out`, which has exactly [`Addressing::ethernet_len`] bytes.
    pub(super) fn write_ethernet(&self, out: &mut [u8]) {
        let ethertype = if self.vlan.is_some() {
            ETHERTYPE_VLAN
        } else {
            ETHERTYPE_IPV4
        };
        let header = EthernetHeader {
            dst: self.dst_mac,
            src: self.src_mac,
            ethertype: U16::new(ethertype),
        };
        let (header_out, tag_out) = out.split_at_mut(size_of::<EthernetHeader>());
        header_out.copy_from_slice(header.as_bytes());
        if let Some(vlan) = self.vlan {
            let tag = VlanTag {
                tci: U16::new(vlan & 0x0fff),
                ethertype: U16::new(ETHERTYPE_IPV4),
            };
            tag_out.copy_from_slice(tag.as_bytes());
        }
    }

    /// The IPv4 header of an atomic datagram.
    fn lm_ip(&self, udp_payload_len: u16, dscp_ecn: u8) -> Ipv4Repr {
        Ipv4Repr {
            src: self.src_ip,
            dst: self.dst_ip,
            protocol: PROTOCOL_UDP,
            dscp_ecn,
            id: 0,
            dont_fragment: true,
            more_fragments: false,
            fragment_offset: 0,
            payload_len: udp_payload_len + UdpRepr::HEADER_LEN as u16,
        }
    }

    pub(super) const fn udp(&self, payload_len: u16, checksum: u16) -> UdpRepr {
        UdpRepr {
            src_port: self.src_port,
            dst_port: self.dst_port,
            payload_len,
            checksum,
        }
    }
}
