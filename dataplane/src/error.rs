//! Errors: one type per operation, each message one line that says what to do.

use std::fmt;
use std::io;
use std::net::SocketAddrV4;

use lm_cards::{InterfaceError, Obstacle};
use lm_protocol::control::RejectReason;
use lm_protocol::geometry::GeometryError;

use crate::daemon::DaemonError;
use crate::port::PortError;
use crate::route::RouteError;

/// Why an endpoint could not be opened.
#[derive(Debug)]
#[non_exhaustive]
pub enum OpenError {
    /// The interface.
    Interface(InterfaceError),
    /// Sockets, ports or the gate.
    Port(PortError),
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
            OpenError::Port(error) => error.fmt(f),
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

from!(OpenError: Interface(InterfaceError), Port(PortError), Daemon(DaemonError), Geometry(GeometryError),
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
        source: PortError,
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
