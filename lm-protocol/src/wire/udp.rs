//! UDP headers over IPv4 (RFC 768).
//!
//! # Why a checksum of 0
//!
//! RFC 768 lets a sender transmit the checksum 0, "no checksum", over IPv4, and this project does so: summing every
//! payload would read all of it once in user space, which is what LM exists to avoid. Below, the Ethernet FCS covers
//! each hop and the IPv4 header has its own checksum; above, integrity from end to end is the manifest's work (a digest
//! much stronger than 16 bits of one's complement). Whoever wants the real one asks for it: [`checksum`].
//!
//! Received checksums are not verified on the XDP path either: a veth delivers packets of its own host with the
//! checksum still to be filled in, and would be misjudged. The kernel verifies what comes through its sockets.

use super::ParseError;
use super::ipv4::{PROTOCOL_UDP, fold, sum};
use core::net::Ipv4Addr;
use zerocopy::byteorder::network_endian::U16;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// A UDP header.
///
/// ```text
///  0       2       4       6       8
/// +-------+-------+-------+-------+
/// |src prt|dst prt|length |chksum |
/// +-------+-------+-------+-------+
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct UdpHeader {
    /// Source port.
    pub src_port: U16,
    /// Destination port.
    pub dst_port: U16,
    /// Bytes of header and payload.
    pub len: U16,
    /// Checksum over pseudo header, header and payload; 0 means none.
    pub checksum: U16,
}

const _: () = assert!(size_of::<UdpHeader>() == 8);

/// A UDP header's legal content.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UdpRepr {
    /// Source port.
    pub src_port: u16,
    /// Destination port.
    pub dst_port: u16,
    /// Bytes behind the header, of the whole datagram (a first fragment carries fewer).
    pub payload_len: u16,
    /// Checksum as on the wire; 0 means none.
    pub checksum: u16,
}

impl UdpRepr {
    /// Bytes of a header.
    pub const HEADER_LEN: usize = 8;

    /// Reads a header whose whole datagram follows: the length must be exactly what is there.
    ///
    /// # Errors
    ///
    /// [`ParseError::Truncated`], [`ParseError::UdpLength`].
    #[inline]
    pub fn parse(bytes: &[u8]) -> Result<(UdpRepr, &[u8]), ParseError> {
        let (repr, payload) = Self::read(bytes)?;
        if usize::from(repr.payload_len) == payload.len() {
            Ok((repr, payload))
        } else {
            Err(ParseError::UdpLength)
        }
    }

    /// Reads a header whose datagram continues in other fragments: the length must be more than what is there.
    ///
    /// # Errors
    ///
    /// [`ParseError::Truncated`], [`ParseError::UdpLength`].
    #[inline]
    pub fn parse_first_fragment(bytes: &[u8]) -> Result<(UdpRepr, &[u8]), ParseError> {
        let (repr, payload) = Self::read(bytes)?;
        if usize::from(repr.payload_len) > payload.len() {
            Ok((repr, payload))
        } else {
            Err(ParseError::UdpLength)
        }
    }

    #[inline]
    fn read(bytes: &[u8]) -> Result<(UdpRepr, &[u8]), ParseError> {
        let (header, payload) = UdpHeader::ref_from_prefix(bytes).map_err(|_| ParseError::Truncated)?;
        let repr = UdpRepr {
            src_port: header.src_port.get(),
            dst_port: header.dst_port.get(),
            payload_len: header.len.get().checked_sub(8).ok_or(ParseError::UdpLength)?,
            checksum: header.checksum.get(),
        };
        Ok((repr, payload))
    }

    /// The header's bytes.
    pub fn to_header(&self) -> UdpHeader {
        UdpHeader {
            src_port: U16::new(self.src_port),
            dst_port: U16::new(self.dst_port),
            len: U16::new(self.payload_len.wrapping_add(Self::HEADER_LEN as u16)),
            checksum: U16::new(self.checksum),
        }
    }
}

/// The UDP checksum of a datagram whose payload lies in several pieces (as in a send region, around its holes).
///
/// Never 0: a sum of 0 is sent as 0xffff (RFC 768). The payload's length is the sum of the pieces', which may have any
/// lengths; beyond 65,507 bytes the result has no meaning.
///
/// ```
/// use core::net::Ipv4Addr;
/// use lm_protocol::wire::udp::checksum;
///
/// let (src, dst) = (Ipv4Addr::new(10, 0, 0, 1), Ipv4Addr::new(10, 0, 0, 2));
/// let whole = checksum(src, dst, 4000, 7168, [&b"lightweight"[..]]);
/// assert_eq!(whole, checksum(src, dst, 4000, 7168, [&b"lig"[..], b"", b"htweight"]));
/// ```
pub fn checksum<'a>(
    src: Ipv4Addr,
    dst: Ipv4Addr,
    src_port: u16,
    dst_port: u16,
    payload: impl IntoIterator<Item = &'a [u8]>,
) -> u16 {
    let mut len = 0u64;
    let mut total = 0u64;
    for piece in payload {
        // A piece at an odd place has its bytes in the other halves of the words (RFC 1071, section 2.B).
        let folded = fold(sum(piece));
        total += u64::from(if len.is_multiple_of(2) {
            folded
        } else {
            folded.swap_bytes()
        });
        len += piece.len() as u64;
    }
    let udp_len = len + UdpRepr::HEADER_LEN as u64;
    total += sum(&src.octets()) + sum(&dst.octets()) + u64::from(PROTOCOL_UDP) + udp_len;
    total += u64::from(src_port) + u64::from(dst_port) + udp_len;
    match !fold(total) {
        0 => 0xffff,
        checksum => checksum,
    }
}
