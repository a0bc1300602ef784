//! The `ipfrag` wire, the paper's: a message is one UDP datagram, its fragments are IPv4 fragments.
//!
//! Any host's kernel can put such a datagram together and hand it to an ordinary UDP socket; LM's receiver lets the
//! fragments land in place instead. They carry no LM header, so a receiver tells them by addresses, identification and
//! offset. The identification is the low 16 bits of the message number ([`crate::serial::expand_u16`] gives the rest
//! back), which leaves 65,536 messages before a late fragment could be taken for another message's (RFC 4963): a reason
//! to prefer the `lm` wire, and to keep few messages in flight on this one.

use super::ParseError;
use super::ipv4::Ipv4Repr;
use super::udp::UdpRepr;

/// One IPv4 fragment of a UDP datagram.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IpFragment {
    /// Where its payload lies in the datagram's IP payload (which starts with the UDP header), in bytes; a multiple of 8.
    pub ip_offset: u16,
    /// Further fragments follow in the datagram (they may have arrived before: the order is reversed).
    pub more: bool,
    /// The UDP header, in the first fragment only.
    pub udp: Option<UdpRepr>,
}

impl IpFragment {
    /// Reads the payload of an IPv4 packet that is a fragment; gives the bytes of the message that it carries.
    ///
    /// # Errors
    ///
    /// [`ParseError::Truncated`], [`ParseError::UdpLength`] in a first fragment.
    #[inline]
    pub fn parse<'a>(ip: &Ipv4Repr, payload: &'a [u8]) -> Result<(IpFragment, &'a [u8]), ParseError> {
        let fragment = IpFragment {
            ip_offset: ip.fragment_offset,
            more: ip.more_fragments,
            udp: None,
        };
        if ip.fragment_offset != 0 {
            return Ok((fragment, payload));
        }
        let (udp, payload) = UdpRepr::parse_first_fragment(payload)?;
        Ok((
            IpFragment {
                udp: Some(udp),
                ..fragment
            },
            payload,
        ))
    }

    /// The fragment's index in a message whose layout has payloads of `payload_len` bytes; `None` when it was cut
    /// elsewhere.
    ///
    /// ```
    /// use lm_protocol::wire::ipfrag::IpFragment;
    /// let fragment = IpFragment { ip_offset: 2960, more: true, udp: None };
    /// assert_eq!(fragment.index(1480), Some(2));
    /// assert_eq!(fragment.index(1472), None);
    /// ```
    #[inline]
    pub const fn index(&self, payload_len: u16) -> Option<u32> {
        if payload_len == 0 || !self.ip_offset.is_multiple_of(payload_len) {
            None
        } else {
            Some((self.ip_offset / payload_len) as u32)
        }
    }
}
