//! What an application hears of its messages: names, how they ended, and why a call did not take one.

use std::ops::Range;

/// Names a peer of an endpoint. Stays distinct when the peer's place in the table is taken by another. The default one names no peer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PeerId {
    pub(crate) index: u16,
    pub(crate) generation: u32,
}

/// Names a message that was handed over, until its completion.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SendToken(pub(crate) u64);

/// How a message ended, as the sender knows it.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Outcome {
    /// The receiver confirmed the whole message.
    Delivered,
    /// Sent to a host without LM: the packets left, nobody confirms them.
    Sent,
    /// The receiver reported fragments missing (indices, ascending). Nothing was delivered.
    Incomplete {
        /// Fragment indices that did not arrive.
        missing: Vec<Range<u32>>,
    },
    /// The session ended before the message was confirmed.
    SessionEnded,
    /// No confirmation within the time limit.
    TimedOut,
    /// The receiver does not allow this sender.
    Refused,
    /// Its [`MessageWriter`](crate::MessageWriter) was dropped before it was finished.
    Aborted,
    /// The receiver did not let this message land; others may.
    Declined {
        /// What its application says ([`Placement::Refuse`](crate::Placement::Refuse)); [`RETRACTED`](crate::RETRACTED): it took the memory back.
        status: u16,
    },
}

/// The end of one message.
#[derive(Clone, Debug)]
pub struct Completion {
    /// What `send` returned.
    pub token: SendToken,
    /// Who it was for.
    pub peer: PeerId,
    /// The metadata given to `send`.
    pub tag: u64,
    /// Length in bytes.
    pub len: u64,
    /// Nanoseconds from `send` to this event.
    pub latency_ns: u64,
    /// How it ended.
    pub outcome: Outcome,
}

/// Why no send region was loaned.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LoanError {
    /// Back-pressure: no memory or no message slot is free now. Poll, then try again.
    #[error("no send memory is free now; poll and try again")]
    WouldBlock,
    /// The message is longer than agreed with the receiver, or than the send memory.
    #[error("the message is too long: at most {limit} bytes can be sent to this peer")]
    TooLarge {
        /// The longest message that can be sent, in bytes.
        limit: u64,
    },
    /// More than one fragment, and there is no session with this peer.
    #[error("messages of several fragments need a session with the peer; connect first")]
    NoSession,
    /// The peer is not known (any more).
    #[error("this peer is not known any more; connect again")]
    UnknownPeer,
    /// A message that is sent while it is written has a byte at least.
    #[error("a message that is sent while it is written cannot be empty; loan and send it")]
    Empty,
    /// What goes to this peer are IP fragments of one datagram, which leaves when it is whole.
    #[error(
        "with IP fragments a message is one datagram, which leaves when it is whole; loan and send it, or connect \
         with the wire lm"
    )]
    Datagram,
}

/// Why a message was not sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SendError {
    /// Back-pressure: too much is in flight. Poll, then try again.
    #[error("too much is in flight; poll and try again")]
    WouldBlock,
    /// The region could not be loaned.
    #[error(transparent)]
    Loan(LoanError),
    /// The session for which the region was loaned is over.
    #[error("the session with the receiver is over; connect again")]
    NoSession,
    /// The peer is not known (any more).
    #[error("this peer is not known any more; connect again")]
    UnknownPeer,
    /// Messages were not confirmed within the time given.
    #[error("{unconfirmed} messages were not confirmed in time; is the receiver still running?")]
    TimedOut {
        /// How many are unconfirmed.
        unconfirmed: u64,
    },
    /// Messages ended without confirmation; their completions say why.
    #[error("{messages} messages were not delivered")]
    Failed {
        /// How many since the last flush.
        messages: u64,
    },
    /// The interface went away, or its socket reports an error.
    #[error("the interface went away or is down; bring it up and start again")]
    Link,
}

impl From<LoanError> for SendError {
    fn from(error: LoanError) -> SendError {
        match error {
            LoanError::WouldBlock => SendError::WouldBlock,
            LoanError::UnknownPeer => SendError::UnknownPeer,
            error => SendError::Loan(error),
        }
    }
}

fn incomplete(number: u32, len: u64, missing: &[Range<u32>]) -> String {
    let fragments: u64 = missing
        .iter()
        .map(|range| u64::from(range.end - range.start))
        .sum();
    let mut shown: Vec<_> = (missing
        .iter()
        .take(4)
        .map(|range| format!("{}..{}", range.start, range.end)))
    .collect();
    if missing.len() > 4 {
        shown.push("…".into());
    }
    format!(
        "message {number} of {len} bytes is incomplete: {fragments} fragments missing ({})",
        shown.join(", ")
    )
}

/// Why no message was received.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RecvError {
    /// Nothing came in the time given.
    #[error("no message in the time given")]
    TimedOut,
    /// A message was announced and did not arrive whole.
    #[error("{}", incomplete(*.number, *.len, .missing))]
    Incomplete {
        /// Its sender.
        peer: PeerId,
        /// Its number.
        number: u32,
        /// Its metadata.
        tag: u64,
        /// Its length in bytes.
        len: u64,
        /// Fragment indices that did not arrive where they should, ascending; all of them where nothing of it was shown to be right.
        missing: Vec<Range<u32>>,
    },
    /// A message was announced while it was being written at its sender, which gave it up.
    #[error("message {number} of {len} bytes was given up by its sender before it was written")]
    Aborted {
        /// Its sender.
        peer: PeerId,
        /// Its number.
        number: u32,
        /// Its metadata.
        tag: u64,
        /// Its length in bytes.
        len: u64,
    },
    /// The interface went away, or its socket reports an error.
    #[error("the interface went away or is down; bring it up and start again")]
    Link,
}
