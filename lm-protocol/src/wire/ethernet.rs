//! Ethernet II headers with an optional 802.1Q tag.

use super::ParseError;
use core::fmt;
use core::str::FromStr;
use zerocopy::byteorder::network_endian::U16;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// EtherType of IPv4.
pub const ETHERTYPE_IPV4: u16 = 0x0800;
/// EtherType of an 802.1Q tag.
pub const ETHERTYPE_VLAN: u16 = 0x8100;

/// Shortest Ethernet frame as AF_XDP sees it (without the FCS), in bytes: shorter ones arrive padded with anything.
pub const MIN_FRAME_LEN: usize = 60;

/// An Ethernet address.
///
/// ```
/// use lm_protocol::wire::ethernet::MacAddr;
/// let mac: MacAddr = "02:00:00:00:00:2a".parse()?;
/// assert_eq!(mac, MacAddr([2, 0, 0, 0, 0, 42]));
/// assert_eq!(mac.to_string(), "02:00:00:00:00:2a");
/// # Ok::<(), lm_protocol::wire::ethernet::MacAddrError>(())
/// ```
#[derive(
    Clone,
    Copy,
    Default,
    PartialEq,
    Eq,
    PartialOrd,
    Ord,
    Hash,
    FromBytes,
    IntoBytes,
    KnownLayout,
    Immutable,
    Unaligned,
)]
#[repr(transparent)]
pub struct MacAddr(pub [u8; 6]);

impl MacAddr {
    /// Everybody.
    pub const BROADCAST: MacAddr = MacAddr([0xff; 6]);
}

impl fmt::Display for MacAddr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [a, b, c, d, e, g] = self.0;
        write!(f, "{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{g:02x}")
    }
}

impl fmt::Debug for MacAddr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// A text that is not six hexadecimal bytes with colons between them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("an Ethernet address is six hexadecimal bytes with colons between them")]
pub struct MacAddrError;

impl FromStr for MacAddr {
    type Err = MacAddrError;

    fn from_str(text: &str) -> Result<MacAddr, MacAddrError> {
        let mut bytes = [0; 6];
        let mut parts = text.split(':');
        for byte in &mut bytes {
            let part = parts.next().ok_or(MacAddrError)?;
            if part.len() != 2 || !part.bytes().all(|digit| digit.is_ascii_hexdigit()) {
                return Err(MacAddrError);
            }
            *byte = u8::from_str_radix(part, 16).map_err(|_| MacAddrError)?;
        }
        if parts.next().is_some() {
            Err(MacAddrError)
        } else {
            Ok(MacAddr(bytes))
        }
    }
}

/// An Ethernet header.
///
/// ```text
///  0                   6                   12     14
/// +---------------------+-------------------+------+
/// |   destination MAC   |     source MAC    | type |
/// +---------------------+-------------------+------+
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct EthernetHeader {
    /// Destination.
    pub dst: MacAddr,
    /// Source.
    pub src: MacAddr,
    /// EtherType of what follows.
    pub ethertype: U16,
}

/// An 802.1Q tag, between the EtherType 0x8100 and the payload.
///
/// ```text
///  0               2      4
/// +---+-+-----------+------+
/// |PCP|D| VLAN ID   | type |
/// +---+-+-----------+------+
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct VlanTag {
    /// Priority (3 bits), drop eligible (1 bit), VLAN ID (12 bits).
    pub tci: U16,
    /// EtherType of what follows.
    pub ethertype: U16,
}

const _: () = assert!(size_of::<MacAddr>() == 6);
const _: () = assert!(size_of::<EthernetHeader>() == 14);
const _: () = assert!(size_of::<VlanTag>() == 4);

/// The link layer of one frame, checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EthernetRepr {
    /// Destination.
    pub dst: MacAddr,
    /// Source.
    pub src: MacAddr,
    /// VLAN ID (12 bits) of the outermost tag, if there is one.
    pub vlan: Option<u16>,
    /// EtherType behind the tag.
    pub ethertype: u16,
}

impl EthernetRepr {
    /// Reads the header and at most one 802.1Q tag; gives what follows.
    ///
    /// # Errors
    ///
    /// [`ParseError::Truncated`].
    #[inline]
    pub fn parse(bytes: &[u8]) -> Result<(EthernetRepr, &[u8]), ParseError> {
        let (header, rest) = EthernetHeader::ref_from_prefix(bytes).map_err(|_| ParseError::Truncated)?;
        let (dst, src) = (header.dst, header.src);
        if header.ethertype.get() != ETHERTYPE_VLAN {
            return Ok((
                EthernetRepr {
                    dst,
                    src,
                    vlan: None,
                    ethertype: header.ethertype.get(),
                },
                rest,
            ));
        }
        let (tag, rest) = VlanTag::ref_from_prefix(rest).map_err(|_| ParseError::Truncated)?;
        let vlan = Some(tag.tci.get() & 0x0fff);
        Ok((
            EthernetRepr {
                dst,
                src,
                vlan,
                ethertype: tag.ethertype.get(),
            },
            rest,
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_that_are_none() {
        for text in [
            "",
            "1:2:3:4:5:6",
            "00:00:00:00:00",
            "00:00:00:00:00:00:00",
            "+1:00:00:00:00:00",
            "0g:00:00:00:00:00",
        ] {
            assert_eq!(text.parse::<MacAddr>(), Err(MacAddrError), "{text}");
        }
    }
}
