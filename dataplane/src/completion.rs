//! What an application hears of its messages: names, how they ended, and why a call did not take one.

use std::fmt;
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
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum LoanError {
    /// Back-pressure: no memory or no message slot is free now. Poll, then try again.
    WouldBlock,
    /// The message is longer than agreed with the receiver, or than the send memory.
    TooLarge {
        /// The longest message that can be sent, in bytes.
        limit: u64,
    },
    /// More than one fragment, and there is no session with this peer.
    NoSession,
    /// The peer is not known (any more).
    UnknownPeer,
    /// A message that is sent while it is written has a byte at least.
    Empty,
    /// What goes to this peer are IP fragments of one datagram, which leaves when it is whole.
    Datagram,
}

impl fmt::Display for LoanError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            LoanError::WouldBlock => f.write_str("no send memory is free now; poll and try again"),
            LoanError::TooLarge { limit } => {
                write!(
                    f,
                    "the message is too long: at most {limit} bytes can be sent to this peer"
                )
            }
            LoanError::NoSession => {
                f.write_str("messages of several fragments need a session with the peer; connect first")
            }
            LoanError::UnknownPeer => f.write_str("this peer is not known any more; connect again"),
            LoanError::Empty => f.write_str("a message that is sent while it is written cannot be empty; loan and send it"),
            LoanError::Datagram => f.write_str(
                "with IP fragments a message is one datagram, which leaves when it is whole; loan and send it, or connect with the wire lm",
            ),
        }
    }
}

impl std::error::Error for LoanError {}

/// Why a message was not sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum SendError {
    /// Back-pressure: too much is in flight. Poll, then try again.
    WouldBlock,
    /// The region could not be loaned.
    Loan(LoanError),
    /// The session for which the region was loaned is over.
    NoSession,
    /// The peer is not known (any more).
    UnknownPeer,
    /// Messages were not confirmed within the time given.
    TimedOut {
        /// How many are unconfirmed.
        unconfirmed: u64,
    },
    /// Messages ended without confirmation; their completions say why.
    Failed {
        /// How many since the last flush.
        messages: u64,
    },
    /// The interface went away, or its socket reports an error.
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

impl fmt::Display for SendError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            SendError::WouldBlock => f.write_str("too much is in flight; poll and try again"),
            SendError::Loan(error) => error.fmt(f),
            SendError::NoSession => f.write_str("the session with the receiver is over; connect again"),
            SendError::UnknownPeer => f.write_str("this peer is not known any more; connect again"),
            SendError::TimedOut { unconfirmed } => {
                write!(
                    f,
                    "{unconfirmed} messages were not confirmed in time; is the receiver still running?"
                )
            }
            SendError::Failed { messages } => write!(f, "{messages} messages were not delivered"),
            SendError::Link => f.write_str("the interface went away or is down; bring it up and start again"),
        }
    }
}

impl std::error::Error for SendError {}

/// Why no message was received.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum RecvError {
    /// Nothing came in the time given.
    TimedOut,
    /// A message was announced and did not arrive whole.
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
    Link,
}

impl fmt::Display for RecvError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            RecvError::TimedOut => f.write_str("no message in the time given"),
            RecvError::Incomplete {
                number, len, missing, ..
            } => {
                let fragments: u64 = missing
                    .iter()
                    .map(|range| u64::from(range.end - range.start))
                    .sum();
                write!(
                    f,
                    "message {number} of {len} bytes is incomplete: {fragments} fragments missing ("
                )?;
                for (at, range) in missing.iter().take(4).enumerate() {
                    let separator = if at == 0 { "" } else { ", " };
                    write!(f, "{separator}{}..{}", range.start, range.end)?;
                }
                f.write_str(if missing.len() > 4 { ", …)" } else { ")" })
            }
            RecvError::Aborted { number, len, .. } => write!(
                f,
                "message {number} of {len} bytes was given up by its sender before it was written"
            ),
            RecvError::Link => f.write_str("the interface went away or is down; bring it up and start again"),
        }
    }
}

impl std::error::Error for RecvError {}
