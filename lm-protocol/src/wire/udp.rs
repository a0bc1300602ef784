//! UDP headers over IPv4 (RFC 768).
//!
//! # Why a checksum of 0
//!
//! RFC 768 lets a sender transmit the checksum 0, "no checksum", over IPv4, and this project does so: summing every
//! payload would read all of it once in user space, which is what LM exists to avoid. Below, the Ethernet FCS covers
//! each hop and the IPv4 header has its own checksum; above, integrity from end to end is the manifest's work (a digest
//! much stronger than 16 bits of one's complement). Whoever wants the real one asks for it: [`checksum`], [`put_checksum`],
//! or [`put_pseudo_sum`] where a device does the rest.
//!
//! Received checksums are not verified on the XDP path either: a veth delivers packets of its own host with the
//! checksum still to be filled in, and would be misjudged. The kernel verifies what comes through its sockets.

use super::ParseError;
use super::ipv4::{Ipv4Header, Ipv4Repr, PROTOCOL_UDP, fold, sum};
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

/// Where the checksum lies in a header.
pub const CHECKSUM: usize = core::mem::offset_of!(UdpHeader, checksum);

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

/// One's complement sum of pieces that lie one behind the other from byte `at` on, and where they end.
fn sum_of<'a>(at: u64, pieces: impl IntoIterator<Item = &'a [u8]>) -> (u64, u64) {
    pieces.into_iter().fold((0, at), |(total, len), piece| {
        let folded = fold(sum(piece));
        // A piece at an odd place has its bytes in the other halves of the words (RFC 1071, section 2.B).
        let folded = match len % 2 {
            0 => folded,
            _ => folded.swap_bytes(),
        };
        (total + u64::from(folded), len + piece.len() as u64)
    })
}

/// A sum as it is sent: never 0, which means that there is none (RFC 768).
const fn sent(total: u64) -> u16 {
    match !fold(total) {
        0 => 0xffff,
        checksum => checksum,
    }
}

/// Where the UDP header of a frame begins, if the frame carries a whole datagram over IPv4, and the sum over its pseudo header.
fn find(headers: &[u8]) -> Option<(usize, u64)> {
    let mut ethertype = 12;
    while matches!(
        headers.get(ethertype..ethertype + 2)?,
        [0x81, 0x00] | [0x88, 0xa8]
    ) {
        ethertype += 4;
    }
    let ip = headers.get(ethertype..)?;
    let ([0x08, 0x00], ip) = ip.split_at_checked(2)? else {
        return None;
    };
    let (header, _) = Ipv4Header::ref_from_prefix(ip).ok()?;
    // Neither more fragments nor an offset; "don't fragment" may be.
    let is_whole = header.fragment.get() & 0x3fff == 0;
    let ip_len = usize::from(ip[0] & 0xf) * 4;
    let udp = ip.get(ip_len..).filter(|udp| udp.len() >= UdpRepr::HEADER_LEN)?;
    if ip[0] >> 4 != 4 || ip_len < Ipv4Repr::HEADER_LEN || ip[9] != PROTOCOL_UDP || !is_whole {
        return None;
    }
    let pseudo = sum(&ip[12..20]) + u64::from(PROTOCOL_UDP) + sum(&udp[4..6]);
    Some((ethertype + 2 + ip_len, pseudo))
}

/// Puts the checksum of a datagram into its UDP header. `headers` is a frame's beginning, up to the end of the UDP header or further, and
/// `rest` what follows of the datagram, in pieces. Gives where the UDP header begins. `None`: this is no whole UDP datagram over IPv4, and nothing changes.
pub fn put_checksum<'a>(headers: &mut [u8], rest: impl IntoIterator<Item = &'a [u8]>) -> Option<usize> {
    let (udp, pseudo) = find(headers)?;
    let at = udp + CHECKSUM;
    let (own, end) = sum_of(0, [&headers[udp..at], &headers[at + 2..]]);
    let (total, _) = sum_of(end, rest);
    let total = own + total;
    headers[at..at + 2].copy_from_slice(&sent(pseudo + total).to_be_bytes());
    Some(udp)
}

/// As [`put_checksum`], for a device that sums the rest up itself: it begins with what stands in the checksum's place, which is the sum over the
/// pseudo header.
pub fn put_pseudo_sum(headers: &mut [u8]) -> Option<usize> {
    let (udp, pseudo) = find(headers)?;
    headers[udp + CHECKSUM..][..2].copy_from_slice(&fold(pseudo).to_be_bytes());
    Some(udp)
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
    let (mut total, len) = sum_of(0, payload);
    let udp_len = len + UdpRepr::HEADER_LEN as u64;
    total += sum(&src.octets()) + sum(&dst.octets()) + u64::from(PROTOCOL_UDP) + udp_len;
    total += u64::from(src_port) + u64::from(dst_port) + udp_len;
    sent(total)
}
