//! Why a geometry cannot be had.

/// Why a geometry cannot be had.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum GeometryError {
    /// The MTU is below what the IP version demands of a link.
    #[error("MTU {mtu} is too small: at least {minimum} is needed")]
    MtuTooSmall {
        /// MTU asked for, in bytes.
        mtu: u16,
        /// Smallest MTU that works, in bytes.
        minimum: u16,
    },
    /// A frame would be longer than 65,535 bytes.
    #[error("MTU {mtu} is too large: at most {maximum} fits a frame")]
    MtuTooLarge {
        /// MTU asked for, in bytes.
        mtu: u16,
        /// Largest MTU that works, in bytes.
        maximum: u16,
    },
    /// More than two 802.1Q tags.
    #[error("{tags} VLAN tags: at most 2 are supported")]
    TooManyVlanTags {
        /// Tags asked for.
        tags: u8,
    },
    /// A peer's header length is not the one that the wire and the link have.
    #[error("header length {given} does not fit this wire and link, which have {expected}")]
    HeaderLen {
        /// Header length given, in bytes.
        given: u16,
        /// Header length of this wire on this link, in bytes.
        expected: u16,
    },
    /// A peer's payload length is not a multiple of 8 in the range that the wire and the link allow.
    #[error("payload length {given} is not a multiple of 8 from {minimum} to {maximum}")]
    PayloadLen {
        /// Payload length given, in bytes.
        given: u16,
        /// Smallest payload length, in bytes.
        minimum: u16,
        /// Largest payload length, in bytes.
        maximum: u16,
    },
    /// The message is longer than the wire can carry.
    #[error("a message of {len} bytes is too long for this wire, which carries at most {maximum}")]
    MessageTooLong {
        /// Message length, in bytes.
        len: u64,
        /// Longest message of this wire, in bytes.
        maximum: u64,
    },
}
