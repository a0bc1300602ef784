//! Errors: one type per operation, each message one line that says what to do.

use std::fmt;
use std::io;
use std::net::SocketAddrV4;
use std::ops::Range;

use lm_cards::{InterfaceError, Obstacle};
use lm_protocol::control::RejectReason;
use lm_protocol::geometry::GeometryError;

use crate::daemon::DaemonError;
use crate::nic::NicError;
use crate::peer::PeerId;
use crate::region::SendRegion;
use crate::route::RouteError;

/// Why an endpoint could not be opened.
#[derive(Debug)]
#[non_exhaustive]
pub enum OpenError {
    /// The interface.
    Interface(InterfaceError),
    /// Sockets, ports or the gate.
    Nic(NicError),
    /// The MTU.
    Geometry(GeometryError),
    /// The UMEM's memory.
    Memory {
        /// Bytes asked for.
        len: u64,
        /// What the kernel said.
        source: io::Error,
    },
    /// The admission daemon of this host.
    Daemon(DaemonError),
    /// Zero-copy mode was demanded where it must not be used.
    NoZeroCopy(Obstacle),
    /// A value of the configuration cannot be used.
    Config(String),
    /// Any other system call.
    System(io::Error),
}

impl fmt::Display for OpenError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            OpenError::Interface(error) => error.fmt(f),
            OpenError::Nic(error) => error.fmt(f),
            OpenError::Geometry(error) => error.fmt(f),
            OpenError::Memory { len, source } => {
                write!(
                    f,
                    "cannot map {len} bytes of packet memory ({source}); ask for less, or free memory"
                )
            }
            OpenError::Daemon(error) => error.fmt(f),
            OpenError::NoZeroCopy(obstacle) => obstacle.fmt(f),
            OpenError::Config(what) => f.write_str(what),
            OpenError::System(error) => error.fmt(f),
        }
    }
}

impl std::error::Error for OpenError {}

macro_rules! from {
    ($target:ident: $($variant:ident($source:ty)),*) => {
        $(impl From<$source> for $target {
            fn from(error: $source) -> Self {
                $target::$variant(error)
            }
        })*
    };
}

from!(OpenError: Interface(InterfaceError), Nic(NicError), Daemon(DaemonError), Geometry(GeometryError),
    System(io::Error));

/// Why a peer could not be reached or did not admit us.
#[derive(Debug)]
#[non_exhaustive]
pub enum ConnectError {
    /// No way there.
    Route(RouteError),
    /// The host answers, but no LM endpoint listens on that port.
    NotListening {
        /// Control port asked.
        peer: SocketAddrV4,
    },
    /// No answer.
    Unreachable {
        /// Control port asked.
        peer: SocketAddrV4,
    },
    /// No daemon answers at the host: this program asks its own host's admission daemon, and that one asks the other host's.
    NoDaemon {
        /// Data port asked.
        peer: SocketAddrV4,
    },
    /// The admission daemon of this host.
    Daemon(DaemonError),
    /// The receiver refused.
    Rejected {
        /// Control port asked.
        peer: SocketAddrV4,
        /// Why.
        reason: RejectReason,
        /// [`RejectReason::TooLarge`]: the longest message that it takes, in bytes.
        limit: u64,
        /// Its protocol version.
        version: u8,
    },
    /// The receiver's grant does not fit this link.
    Incompatible {
        /// Control port asked.
        peer: SocketAddrV4,
    },
    /// The receiver wants its packets on a transmit queue that this interface does not have.
    Queue {
        /// The queue.
        queue: u32,
        /// What opening it said.
        source: NicError,
    },
    /// Too many peers are owed something.
    PeersFull,
    /// The peer is not known (any more).
    UnknownPeer,
    /// A value of the options cannot be used.
    Options(String),
    /// A system call.
    System(io::Error),
}

from!(ConnectError: Route(RouteError), Daemon(DaemonError), System(io::Error));

impl fmt::Display for ConnectError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ConnectError::Route(error) => error.fmt(f),
            ConnectError::NotListening { peer } => write!(
                f,
                "no LM receiver listens on {peer} (control port); start `lm-recv` there, or correct the port"
            ),
            ConnectError::Unreachable { peer } => write!(
                f,
                "no answer from {peer} (control port); check that the host is up and its firewall lets UDP \
                 port {} in",
                peer.port()
            ),
            ConnectError::NoDaemon { peer } => write!(
                f,
                "no admission daemon answers at {}: start lm-admissiond there with the same key, or use --admission embedded on both",
                peer.ip()
            ),
            ConnectError::Daemon(error) => error.fmt(f),
            ConnectError::Rejected {
                peer,
                reason,
                limit,
                version,
            } => match reason {
                RejectReason::Version => write!(
                    f,
                    "{peer} speaks LM version {version}, this program version {}; update the older one",
                    lm_protocol::wire::lm::VERSION
                ),
                RejectReason::Busy => {
                    write!(f, "{peer} is busy with another sender; try again later")
                }
                RejectReason::TooLarge => write!(
                    f,
                    "{peer} takes messages of at most {limit} bytes; send smaller ones (--message-size) or \
                     raise its --max-message-size"
                ),
                RejectReason::NotAllowed => {
                    write!(
                        f,
                        "{peer} does not allow this host; add it to the receiver's --allow"
                    )
                }
                RejectReason::Unsupported => {
                    write!(
                        f,
                        "{peer} cannot receive what was asked for (wire mode, MTU or large messages)"
                    )
                }
                RejectReason::NoMemory => {
                    write!(
                        f,
                        "{peer} has not enough memory for messages of this size; send smaller ones (--message-size), or give it more: \
                         it says what it lacks"
                    )
                }
                RejectReason::NoReceiver => {
                    write!(
                        f,
                        "nobody receives on that port of {peer}; start the receiver first"
                    )
                }
                RejectReason::NoQuorum => {
                    write!(
                        f,
                        "{peer} cannot make sure that no other host is receiving; try again later"
                    )
                }
                RejectReason::Unverified => write!(
                    f,
                    "{peer} is in zero-copy mode, where only digests tell what arrived; send with them (--integrity manifest), and \
                     IP fragments only if it is under exclusive use (lm-recv --exclusive)"
                ),
                RejectReason::ShuttingDown => {
                    write!(f, "{peer} is shutting down; start the receiver again")
                }
                reason => write!(f, "{peer} refuses: {reason}"),
            },
            ConnectError::Incompatible { peer } => {
                write!(
                    f,
                    "{peer} granted a session that does not fit this link; set --mtu the same on both sides"
                )
            }
            ConnectError::Queue { queue, source } => write!(
                f,
                "cannot send on transmit queue {queue}, which reaches the receiver's landing queue ({source}); \
                 give this veth device at least {} transmit queues",
                queue + 1
            ),
            ConnectError::PeersFull => f.write_str("too many peers at once; finish with some of them first"),
            ConnectError::UnknownPeer => f.write_str("this peer is not known any more; connect again"),
            ConnectError::Options(what) => f.write_str(what),
            ConnectError::System(error) => error.fmt(f),
        }
    }
}

impl std::error::Error for ConnectError {}

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
        }
    }
}

impl std::error::Error for LoanError {}

/// A message that was not taken now; `region` gives it back.
#[derive(Debug)]
pub struct TrySendError {
    /// The message.
    pub region: SendRegion,
    /// Why.
    pub reason: SendError,
}

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
            RecvError::Link => f.write_str("the interface went away or is down; bring it up and start again"),
        }
    }
}

impl std::error::Error for RecvError {}
