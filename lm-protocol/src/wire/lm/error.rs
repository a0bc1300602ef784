//! Why bytes are no LM packet.

use super::VERSION;
use core::fmt;

/// Why bytes are no LM packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum LmError {
    /// Another version of the protocol. Reported before anything else is looked at.
    VersionMismatch {
        /// The version of whoever sent it.
        theirs: u8,
    },
    /// Fewer bytes than a header, or than the header's payload length announces.
    Truncated,
    /// A type that is not known here.
    UnknownType {
        /// The type, 0 to 15.
        packet_type: u8,
    },
    /// The payload length differs from UDP's, or from the number of entries, or has no room for what is said to be in it.
    Length,
    /// A packet of a type that ends with a digest says that it has none, or one of a type that has none says it has.
    Digest,
    /// A fragment index that is not below the fragment count, or digests of fragments that the message has not.
    Index,
}

impl fmt::Display for LmError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            LmError::VersionMismatch { theirs } => {
                write!(
                    f,
                    "the peer speaks LM version {theirs}, this program version {VERSION}"
                )
            }
            LmError::Truncated => f.write_str("the LM packet is truncated"),
            LmError::UnknownType { packet_type } => write!(f, "unknown LM packet type {packet_type}"),
            LmError::Length => f.write_str("the LM payload length differs from the packet's"),
            LmError::Digest => f.write_str("the LM packet's type and its digest flag disagree"),
            LmError::Index => f.write_str("a fragment index is not below the fragment count"),
        }
    }
}

impl core::error::Error for LmError {}
