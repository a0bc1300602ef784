//! IPv4 headers without options (RFC 791) and the Internet checksum (RFC 1071).

use super::ParseError;
use core::net::Ipv4Addr;
use zerocopy::byteorder::network_endian::U16;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Protocol number of UDP.
pub const PROTOCOL_UDP: u8 = 17;
/// Time to live of everything this crate builds.
pub const TTL: u8 = 64;

const VERSION_IHL: u8 = 0x45;
const DONT_FRAGMENT: u16 = 0x4000;
const MORE_FRAGMENTS: u16 = 0x2000;
const OFFSET_MASK: u16 = 0x1fff;

/// An IPv4 header without options.
///
/// ```text
///  0       1       2       3       4
/// +-------+-------+-------+-------+
/// |4 | IHL| DSCP  |  total length |   0
/// +-------+-------+-------+-------+
/// |identification |fl| offset / 8 |   4
/// +-------+-------+-------+-------+
/// |  TTL  |protoc.|   checksum    |   8
/// +-------+-------+-------+-------+
/// |        source address         |  12
/// +-------+-------+-------+-------+
/// |      destination address      |  16
/// +-------+-------+-------+-------+
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct Ipv4Header {
    /// Version (4) and header length in words (5).
    pub version_ihl: u8,
    /// Differentiated services and ECN.
    pub dscp_ecn: u8,
    /// Bytes of header and payload.
    pub total_len: U16,
    /// Identification: the same in all fragments of a datagram.
    pub id: U16,
    /// Flags (3 bits: reserved, don't fragment, more fragments) and fragment offset in units of 8 bytes.
    pub fragment: U16,
    /// Time to live.
    pub ttl: u8,
    /// Protocol of the payload.
    pub protocol: u8,
    /// Internet checksum of the header.
    pub checksum: U16,
    /// Source address.
    pub src: [u8; 4],
    /// Destination address.
    pub dst: [u8; 4],
}

const _: () = assert!(size_of::<Ipv4Header>() == 20);
const _: () = assert!(core::mem::offset_of!(Ipv4Header, fragment) == 6);
const _: () = assert!(core::mem::offset_of!(Ipv4Header, dst) == 16);

/// An IPv4 header's legal content.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ipv4Repr {
    /// Source address.
    pub src: Ipv4Addr,
    /// Destination address.
    pub dst: Ipv4Addr,
    /// Protocol of the payload.
    pub protocol: u8,
    /// Differentiated services and ECN.
    pub dscp_ecn: u8,
    /// Identification.
    pub id: u16,
    /// Routers must not fragment it.
    pub dont_fragment: bool,
    /// A later part of the datagram exists.
    pub more_fragments: bool,
    /// Where this part's payload lies in the datagram's payload, in bytes: a multiple of 8.
    pub fragment_offset: u16,
    /// Bytes behind the header.
    pub payload_len: u16,
}

impl Ipv4Repr {
    /// Bytes of an emitted header.
    pub const HEADER_LEN: usize = 20;

    /// Reads and checks a header; gives the payload, cut to the header's length field (Ethernet padding is dropped).
    ///
    /// # Errors
    ///
    /// [`ParseError::Truncated`], [`ParseError::NotIpv4`], [`ParseError::IpOptions`], [`ParseError::IpChecksum`],
    /// [`ParseError::IpLength`] and, for fragments that cannot be part of any datagram, [`ParseError::IpFragment`].
    #[inline]
    pub fn parse(bytes: &[u8]) -> Result<(Ipv4Repr, &[u8]), ParseError> {
        let (header, rest) = Ipv4Header::ref_from_prefix(bytes).map_err(|_| ParseError::Truncated)?;
        if header.version_ihl != VERSION_IHL {
            return Err(match (header.version_ihl >> 4, header.version_ihl & 0xf) {
                (4, 6..) => ParseError::IpOptions,
                (4, _) => ParseError::IpLength,
                _ => ParseError::NotIpv4,
            });
        }
        // Nobody has checked it before us on the XDP path.
        if checksum(header.as_bytes()) != 0 {
            return Err(ParseError::IpChecksum);
        }
        let total_len = header.total_len.get();
        let payload_len = total_len
            .checked_sub(Self::HEADER_LEN as u16)
            .ok_or(ParseError::IpLength)?;
        let payload = rest
            .get(..usize::from(payload_len))
            .ok_or(ParseError::Truncated)?;

        let fragment = header.fragment.get();
        let more_fragments = fragment & MORE_FRAGMENTS != 0;
        let fragment_offset = (fragment & OFFSET_MASK) * 8;
        let is_part = more_fragments || fragment_offset != 0;
        // Parts are not empty, all but the last are multiples of 8, and none ends behind the longest datagram.
        if is_part && payload_len == 0
            || more_fragments && !payload_len.is_multiple_of(8)
            || u32::from(fragment_offset) + u32::from(total_len) > u32::from(u16::MAX)
        {
            return Err(ParseError::IpFragment);
        }
        let repr = Ipv4Repr {
            src: Ipv4Addr::from(header.src),
            dst: Ipv4Addr::from(header.dst),
            protocol: header.protocol,
            dscp_ecn: header.dscp_ecn,
            id: header.id.get(),
            dont_fragment: fragment & DONT_FRAGMENT != 0,
            more_fragments,
            fragment_offset,
            payload_len,
        };
        Ok((repr, payload))
    }

    /// The header's bytes, with TTL 64 and a correct checksum.
    ///
    /// A payload beyond 65,515 bytes or an offset that is not a multiple of 8 cannot be expressed: the excess bits are
    /// dropped.
    pub fn to_header(&self) -> Ipv4Header {
        let flags =
            u16::from(self.dont_fragment) * DONT_FRAGMENT + u16::from(self.more_fragments) * MORE_FRAGMENTS;
        let mut header = Ipv4Header {
            version_ihl: VERSION_IHL,
            dscp_ecn: self.dscp_ecn,
            total_len: U16::new(self.payload_len.wrapping_add(Self::HEADER_LEN as u16)),
            id: U16::new(self.id),
            fragment: U16::new(flags | self.fragment_offset >> 3),
            ttl: TTL,
            protocol: self.protocol,
            checksum: U16::ZERO,
            src: self.src.octets(),
            dst: self.dst.octets(),
        };
        header.checksum = U16::new(checksum(header.as_bytes()));
        header
    }

    /// This packet is a part of a datagram and not all of it.
    #[inline]
    pub const fn is_fragment(&self) -> bool {
        self.more_fragments || self.fragment_offset != 0
    }
}

/// The Internet checksum (RFC 1071) of `bytes`; 0 over a header that contains its own correct checksum.
///
/// ```
/// use lm_protocol::wire::ipv4::checksum;
/// // RFC 1071, section 3: the sum is 0xddf2.
/// assert_eq!(checksum(&[0x00, 0x01, 0xf2, 0x03, 0xf4, 0xf5, 0xf6, 0xf7]), !0xddf2);
/// ```
#[inline]
pub fn checksum(bytes: &[u8]) -> u16 {
    !fold(sum(bytes))
}

/// One's complement sum of big-endian 16-bit words, an odd last byte padded with zero; 0 for zeros alone. For anything below 2^32 bytes.
#[inline]
pub(crate) fn sum(bytes: &[u8]) -> u64 {
    // Wider words, and as the machine reads them: the sum is the same, and may be swapped afterwards (RFC 1071, sections 2.B and 2.C).
    let (words, rest) = bytes.as_chunks::<4>();
    let (pairs, last) = rest.as_chunks::<2>();
    let words: u64 = words
        .iter()
        .map(|word| u64::from(u32::from_ne_bytes(*word)))
        .sum();
    let pairs: u64 = pairs
        .iter()
        .map(|pair| u64::from(u16::from_ne_bytes(*pair)))
        .sum();
    let last = last.first().map_or(0, |last| u16::from_ne_bytes([*last, 0]));
    u64::from(u16::from_be(fold(words + pairs + u64::from(last))))
}

/// Folds carries back in until 16 bits are left.
#[inline]
pub(crate) const fn fold(mut sum: u64) -> u16 {
    sum = (sum & 0xffff_ffff) + (sum >> 32);
    sum = (sum & 0xffff) + (sum >> 16 & 0xffff) + (sum >> 32);
    sum = (sum & 0xffff) + (sum >> 16);
    sum = (sum & 0xffff) + (sum >> 16);
    sum as u16
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn fold_is_the_sum_modulo_65535(sum: u64) {
            let folded = fold(sum);
            prop_assert_eq!(u64::from(folded) % 0xffff, sum % 0xffff);
            prop_assert_eq!(folded == 0, sum == 0);
        }
    }
}
