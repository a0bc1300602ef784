//! Reading a whole frame.

use super::ParseError;
use super::addressing::Addressing;
use super::ethernet::{ETHERTYPE_IPV4, EthernetRepr, MacAddr};
use super::ipfrag::IpFragment;
use super::ipv4::{Ipv4Repr, PROTOCOL_UDP};
use super::lm::{self, LmHeader, LmPacket};
use super::udp::UdpRepr;
use core::net::Ipv4Addr;

/// A frame that was read. Headers are copied out; the payload still lies in the packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Frame<'a> {
    /// Sender's Ethernet address.
    pub src_mac: MacAddr,
    /// Receiver's Ethernet address.
    pub dst_mac: MacAddr,
    /// VLAN ID of the tag, if there is one.
    pub vlan: Option<u16>,
    /// Sender's address.
    pub src_ip: Ipv4Addr,
    /// Receiver's address.
    pub dst_ip: Ipv4Addr,
    /// IP identification.
    pub ip_id: u16,
    /// Bytes in front of the payload.
    pub header_len: u16,
    /// What IP carries.
    pub transport: Transport,
    /// Bytes of the message (DATA, EAGER, IP fragments) or entries (the rest), without what follows them in the packet
    /// ([`lm::Trailer`]) and Ethernet padding.
    pub payload: &'a [u8],
    /// The digest at the end of an LM packet that has one. It is not checked here.
    pub digest: Option<u64>,
}

/// What an IPv4 packet of ours carries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transport {
    /// A whole LM packet.
    Lm {
        /// Sender's UDP port.
        src_port: u16,
        /// Receiver's UDP port.
        dst_port: u16,
        /// The LM header.
        header: LmHeader,
    },
    /// A part of a UDP datagram.
    Fragment(IpFragment),
}

impl<'a> Frame<'a> {
    /// The LM header, if there is one.
    #[inline]
    pub const fn lm(&self) -> Option<&LmHeader> {
        match &self.transport {
            Transport::Lm { header, .. } => Some(header),
            Transport::Fragment(_) => None,
        }
    }

    /// The LM packet, if there is one.
    #[inline]
    pub fn packet(&self) -> Option<LmPacket<'a>> {
        Some(LmPacket {
            header: *self.lm()?,
            payload: self.payload,
            digest: self.digest,
        })
    }

    /// The IP fragment, if it is one.
    #[inline]
    pub const fn fragment(&self) -> Option<&IpFragment> {
        match &self.transport {
            Transport::Lm { .. } => None,
            Transport::Fragment(fragment) => Some(fragment),
        }
    }

    /// Source and destination port; `None` in fragments without a UDP header.
    #[inline]
    pub fn ports(&self) -> Option<(u16, u16)> {
        match &self.transport {
            Transport::Lm {
                src_port, dst_port, ..
            } => Some((*src_port, *dst_port)),
            Transport::Fragment(fragment) => fragment.udp.map(|udp| (udp.src_port, udp.dst_port)),
        }
    }

    /// The addressing of this frame, as its sender wrote it (`.reversed()` for a reply); `None` without ports.
    #[inline]
    pub fn addressing(&self) -> Option<Addressing> {
        let (src_port, dst_port) = self.ports()?;
        Some(Addressing {
            src_mac: self.src_mac,
            dst_mac: self.dst_mac,
            vlan: self.vlan,
            src_ip: self.src_ip,
            dst_ip: self.dst_ip,
            src_port,
            dst_port,
        })
    }
}

/// Reads a frame: Ethernet, at most one 802.1Q tag, IPv4 without options, then UDP with an LM packet, or an IP fragment
/// of a UDP datagram.
///
/// Ethernet padding behind the IP packet is dropped. Addresses and ports are reported, not judged. Never panics.
///
/// # Errors
///
/// [`ParseError`]: the first thing that is wrong, from the outside in.
#[inline]
pub fn parse_frame(bytes: &[u8]) -> Result<Frame<'_>, ParseError> {
    let (ethernet, rest) = EthernetRepr::parse(bytes)?;
    if ethernet.ethertype != ETHERTYPE_IPV4 {
        return Err(ParseError::NotIpv4);
    }
    let ethernet_len = bytes.len() - rest.len();
    let (ip, ip_payload) = Ipv4Repr::parse(rest)?;
    if ip.protocol != PROTOCOL_UDP {
        return Err(ParseError::NotUdp);
    }
    let (transport, payload, trailer_len, digest) = if ip.is_fragment() {
        let (fragment, payload) = IpFragment::parse(&ip, ip_payload)?;
        (Transport::Fragment(fragment), payload, 0, None)
    } else {
        let (udp, udp_payload) = UdpRepr::parse(ip_payload)?;
        let packet = lm::parse_packet(udp_payload)?;
        (
            Transport::Lm {
                src_port: udp.src_port,
                dst_port: udp.dst_port,
                header: packet.header,
            },
            packet.payload,
            packet.header.trailer_len(),
            packet.digest,
        )
    };
    let header_len = ethernet_len + Ipv4Repr::HEADER_LEN + (ip_payload.len() - payload.len() - trailer_len);
    Ok(Frame {
        src_mac: ethernet.src,
        dst_mac: ethernet.dst,
        vlan: ethernet.vlan,
        src_ip: ip.src,
        dst_ip: ip.dst,
        ip_id: ip.id,
        header_len: header_len as u16,
        transport,
        payload,
        digest,
    })
}
