//! What contradicts I3.

/// Why a session's packets can no longer be trusted to lie where they should.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Violation {
    /// A descriptor came for which nothing was posted.
    Unposted,
    /// The descriptor's address is not the next posted one.
    Address,
    /// The log's sequence number is not the next one.
    Sequence,
    /// The log names another fragment than the slot's: a packet before it was lost (displacement).
    Displaced,
    /// Log and descriptor, or log and geometry, disagree on the length.
    Length,
    /// The header that survived in a window's lowest slot names something else.
    Header,
    /// The kernel counted a dropped packet on this socket.
    Statistics,
}

impl Violation {
    pub(crate) const ALL: [Violation; 7] = [
        Violation::Unposted,
        Violation::Address,
        Violation::Sequence,
        Violation::Displaced,
        Violation::Length,
        Violation::Header,
        Violation::Statistics,
    ];

    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Violation::Unposted => "landing_unposted",
            Violation::Address => "landing_address",
            Violation::Sequence => "landing_sequence",
            Violation::Displaced => "landing_displaced",
            Violation::Length => "landing_length",
            Violation::Header => "landing_header",
            Violation::Statistics => "landing_statistics",
        }
    }
}
