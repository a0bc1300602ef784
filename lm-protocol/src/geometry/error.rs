//! Why a geometry cannot be had.

use core::fmt;

/// Why a geometry cannot be had.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum GeometryError {
    /// The MTU is below what the IP version demands of a link.
    MtuTooSmall {
        /// MTU asked for, in bytes.
        mtu: u16,
        /// Smallest MTU that works, in bytes.
        minimum: u16,
    },
    /// A frame would be longer than 65,535 bytes.
    MtuTooLarge {
        /// MTU asked for, in bytes.
        mtu: u16,
        /// Largest MTU that works, in bytes.
        maximum: u16,
    },
    /// More than two 802.1Q tags.
    TooManyVlanTags {
        /// Tags asked for.
        tags: u8,
    },
    /// A peer's header length is not the one that the wire and the link have.
    HeaderLen {
        /// Header length given, in bytes.
        given: u16,
        /// Header length of this wire on this link, in bytes.
        expected: u16,
    },
    /// A peer's payload length is not a multiple of 8 in the range that the wire and the link allow.
    PayloadLen {
        /// Payload length given, in bytes.
        given: u16,
        /// Smallest payload length, in bytes.
        minimum: u16,
        /// Largest payload length, in bytes.
        maximum: u16,
    },
    /// The message is longer than the wire can carry.
    MessageTooLong {
        /// Message length, in bytes.
        len: u64,
        /// Longest message of this wire, in bytes.
        maximum: u64,
    },
}

impl fmt::Display for GeometryError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            GeometryError::MtuTooSmall { mtu, minimum } => {
                write!(f, "MTU {mtu} is too small: at least {minimum} is needed")
            }
            GeometryError::MtuTooLarge { mtu, maximum } => {
                write!(f, "MTU {mtu} is too large: at most {maximum} fits a frame")
            }
            GeometryError::TooManyVlanTags { tags } => {
                write!(f, "{tags} VLAN tags: at most 2 are supported")
            }
            GeometryError::HeaderLen { given, expected } => {
                write!(
                    f,
                    "header length {given} does not fit this wire and link, which have {expected}"
                )
            }
            GeometryError::PayloadLen {
                given,
                minimum,
                maximum,
            } => {
                write!(
                    f,
                    "payload length {given} is not a multiple of 8 from {minimum} to {maximum}"
                )
            }
            GeometryError::MessageTooLong { len, maximum } => {
                write!(
                    f,
                    "a message of {len} bytes is too long for this wire, which carries at most {maximum}"
                )
            }
        }
    }
}

impl core::error::Error for GeometryError {}
