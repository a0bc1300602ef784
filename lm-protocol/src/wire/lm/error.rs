//! Why bytes are no LM packet.

use super::VERSION;

/// Why bytes are no LM packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LmError {
    /// Another version of the protocol. Reported before anything else is looked at.
    #[error("the peer speaks LM version {theirs}, this program version {VERSION}")]
    VersionMismatch {
        /// The version of whoever sent it.
        theirs: u8,
    },
    /// Fewer bytes than a header, or than the header's payload length announces.
    #[error("the LM packet is truncated")]
    Truncated,
    /// A type that is not known here.
    #[error("unknown LM packet type {packet_type}")]
    UnknownType {
        /// The type, 0 to 15.
        packet_type: u8,
    },
    /// The payload length differs from UDP's, or from the number of entries, or has no room for what is said to be in it.
    #[error("the LM payload length differs from the packet's")]
    Length,
    /// A packet of a type that ends with a digest says that it has none, or one of a type that has none says it has.
    #[error("the LM packet's type and its digest flag disagree")]
    Digest,
    /// A fragment index that is not below the fragment count, or digests of fragments that the message has not.
    #[error("a fragment index is not below the fragment count")]
    Index,
}
