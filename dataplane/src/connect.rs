//! What an application says of a session that it asks for, and why it has none: one line each, with what to do.

use std::io;
use std::net::SocketAddrV4;
use std::num::NonZeroU64;
use std::time::Duration;

use lm_protocol::control::RejectReason;
use lm_protocol::delivery::Delivery;
use lm_protocol::geometry::Wire;
use lm_protocol::window::WindowShape;

use crate::checksum::Checksum;
use crate::daemon::DaemonError;
use crate::port::PortError;

/// How to reach a peer.
#[derive(Clone, Copy, Debug)]
pub struct ConnectOptions {
    /// How fragments travel.
    pub wire: Wire,
    /// Longest message that will be sent, in bytes.
    pub max_message_len: u64,
    /// Fragments that travel in reverse order together: what is shown of a message at once while it arrives, and released of one while it is
    /// written. A receiver may grant longer ones in zero-copy mode, as its card takes entries by the lap.
    pub window: WindowShape,
    /// Messages that will be announced and unconfirmed at once: 256 at most, 120 where the MTU is 576.
    pub messages_in_flight: u32,
    /// What is to become of messages of which fragments are lost. With `ipfrag`, whose packets carry no session key, it is
    /// always [`Delivery::Unreliable`].
    pub delivery: Delivery,
    /// How long to try.
    pub timeout: Duration,
    /// Whether all messages take the one-copy path, which the receiving host's kernel copies: the session never takes a place of the
    /// receiver's landing queue. Else they do while there is no place for it, and land from the next one on when there is;
    /// [`Counters::messages_one_copy`](crate::Counters::messages_one_copy) tells how many did not. With `ipfrag` a session waits for its place.
    pub one_copy: bool,
    /// Whether to ask for a session.
    pub session: Session,
    /// Most that may leave for the peer while the session lasts, in bits per second of Ethernet frames, from the
    /// destination address to the last payload byte (no preamble, no checksum). Over any time `t` no more than
    /// `rate · t` leaves and a burst: as many full packets as the rate brings in a millisecond, 4 at least and 256 at
    /// most (one packet more where messages of one fragment go as well). Repeated fragments and small messages count;
    /// acknowledgements and other control packets do not.
    ///
    /// A receiver gives a message up that brings no packet for its `patience`: full packets should leave more
    /// often than that.
    pub rate: Option<NonZeroU64>,
}

/// Whether a peer is asked for a session.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Session {
    /// At once.
    #[default]
    Now,
    /// When [`PeerHandle::open_session`](crate::PeerHandle::open_session) says so. Until then only messages of one fragment can be sent.
    Later,
    /// The host runs no LM: messages to it leave as plain UDP datagrams in IP fragments
    /// ([`lm_protocol::geometry::Wire::IpFrag`]), each at most 65,507 bytes, and nobody confirms them. Of the other options only
    /// [`rate`](ConnectOptions::rate) counts.
    Never,
}

impl Default for ConnectOptions {
    fn default() -> Self {
        ConnectOptions {
            wire: Wire::Lm,
            max_message_len: 1 << 20,
            window: WindowShape::DEFAULT,
            messages_in_flight: 8,
            delivery: Delivery::Reliable,
            timeout: Duration::from_secs(3),
            one_copy: false,
            session: Session::Now,
            rate: None,
        }
    }
}

impl ConnectOptions {
    /// Whether messages can go so from an endpoint that does this about checksums.
    pub(crate) fn check(&self, checksum: Checksum) -> Result<(), ConnectError> {
        let is_datagram = self.wire == Wire::IpFrag || self.session == Session::Never;
        match is_datagram && checksum == Checksum::Offload {
            true => Err(ConnectError::Options(
                "a device sums no datagram up that leaves in IP fragments (--wire ipfrag); use --checksum \
                 integrated"
                    .to_owned(),
            )),
            false => Ok(()),
        }
    }

    /// The delivery that a session has. IP fragments carry no session key, so there is no way to repeat one.
    pub(crate) fn delivery_in_session(&self) -> Delivery {
        match self.wire {
            Wire::Lm => self.delivery,
            Wire::IpFrag => Delivery::Unreliable,
        }
    }
}

fn rejected(peer: SocketAddrV4, reason: RejectReason, limit: u64, version: u8) -> String {
    let why = match reason {
        RejectReason::Version => {
            let ours = lm_protocol::wire::lm::VERSION;
            return format!(
                "{peer} speaks LM version {version}, this program version {ours}; update the older one"
            );
        }
        RejectReason::TooLarge => {
            return format!(
                "{peer} takes messages of at most {limit} bytes; send smaller ones (--message-size) or raise its \
                 --max-message-size"
            );
        }
        RejectReason::NoReceiver => {
            return format!("nobody receives on that port of {peer}; start the receiver first");
        }
        RejectReason::Busy => "is busy with another sender; try again later",
        RejectReason::NotAllowed => "does not allow this host; add it to the receiver's --allow",
        RejectReason::Unsupported => "cannot receive what was asked for (wire mode, MTU or large messages)",
        RejectReason::NoMemory => {
            "has not enough memory for messages of this size; send smaller ones (--message-size), or give it more: it \
             says what it lacks"
        }
        RejectReason::NoQuorum => "cannot make sure that no other host is receiving; try again later",
        RejectReason::Unverified => {
            "is in zero-copy mode, where only digests tell what arrived; send with them (--integrity manifest), and IP \
             fragments only if it is under exclusive use (lm-recv --exclusive)"
        }
        RejectReason::ShuttingDown => "is shutting down; start the receiver again",
        reason => return format!("{peer} refuses: {reason}"),
    };
    format!("{peer} {why}")
}

/// Why a peer could not be reached or did not admit us.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConnectError {
    /// No way there: what the part of the port says that looks for one.
    #[error("{0}")]
    Route(Box<dyn std::error::Error + Send + Sync>),
    /// The host answers, but no LM endpoint listens on that port.
    #[error("no LM receiver listens on {peer} (control port); start `lm-recv` there, or correct the port")]
    NotListening {
        /// Control port asked.
        peer: SocketAddrV4,
    },
    /// No answer.
    #[error(
        "no answer from {peer} (control port); check that the host is up and its firewall lets UDP port {} in",
        .peer.port()
    )]
    Unreachable {
        /// Control port asked.
        peer: SocketAddrV4,
    },
    /// No daemon answers at the host: this program asks its own host's admission daemon, and that one asks the other host's.
    #[error(
        "no admission daemon answers at {}: start lm-admissiond there with the same key, or use --admission embedded \
         on both",
        .peer.ip()
    )]
    NoDaemon {
        /// Data port asked.
        peer: SocketAddrV4,
    },
    /// The admission daemon of this host.
    #[error(transparent)]
    Daemon(#[from] DaemonError),
    /// The receiver refused.
    #[error("{}", rejected(*.peer, *.reason, *.limit, *.version))]
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
    #[error("{peer} granted a session that does not fit this link; set --mtu the same on both sides")]
    Incompatible {
        /// Control port asked.
        peer: SocketAddrV4,
    },
    /// The receiver wants its packets on a transmit queue that this interface does not have.
    #[error(
        "cannot send on transmit queue {queue}, which reaches the receiver's landing queue ({source}); give this veth \
         device at least {} transmit queues",
        .queue + 1
    )]
    Queue {
        /// The queue.
        queue: u32,
        /// What opening it said.
        source: PortError,
    },
    /// Too many peers are owed something.
    #[error("too many peers at once; finish with some of them first")]
    PeersFull,
    /// The peer is not known (any more).
    #[error("this peer is not known any more; connect again")]
    UnknownPeer,
    /// A value of the options cannot be used.
    #[error("{0}")]
    Options(String),
    /// A system call.
    #[error(transparent)]
    System(io::Error),
}
