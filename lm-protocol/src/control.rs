//! The admission messages (LM section 3.3, table 1) as datagrams on the control port.
//!
//! ```text
//!  0       1       2       4               8       9                       24
//! +-------+-------+-------+---------------+-------+-----------------------+------------
//! |ver|15 | flags |bodylen|  request id   | kind  |0  0 1 0 0 …           | body …
//! +-------+-------+-------+---------------+-------+-----------------------+------------
//! ```
//!
//! | kind | paper's name | here | who sends it |
//! |---|---|---|---|
//! | 1 | LM_REQ | [`ControlMessage::Request`] | applicant |
//! | 2 | LM_ENDME | [`ControlMessage::End`] | applicant |
//! | 3 | LM_ACQ_OK | [`ControlMessage::Grant`] | grantor |
//! | 4 | LM_ACQ_REJ | [`ControlMessage::Reject`] | grantor |
//! | 5 | not in the paper | [`ControlMessage::Ended`] | grantor; makes LM_ENDME repeatable and confirmed |
//! | 6, 7 | LM_APPEND_ADDR, LM_REMOVE_ADDR | [`crate::admission`]: only between daemons, and sealed | |
//! | 10 | not in the paper | [`ControlMessage::Challenge`] | whoever hears an address for the first time; see [`crate::introduction`] |
//! | 11 | not in the paper | [`ControlMessage::Proof`] | the challenged |
//!
//! All control messages are datagrams and may be lost, doubled or late: a reply carries its request's number, and every
//! request may be repeated. The first 8 bytes keep their meaning in all versions, so that a receiver of another version
//! can answer the request that it does not understand.

mod body;

use crate::delivery::Delivery;
use crate::geometry::{GeometryError, Layout, LinkShape, Wire};
use crate::integrity::Integrity;
use crate::window::{WindowError, WindowShape};
use crate::wire::lm::{self, LmError, LmHeader};
use core::num::NonZeroU16;
use core::time::Duration;

pub(crate) use body::{Fields, Writer};

/// Kind of LM_REQ.
pub const KIND_REQUEST: u8 = 1;
/// Kind of LM_ENDME.
pub const KIND_END: u8 = 2;
/// Kind of LM_ACQ_OK.
pub const KIND_GRANT: u8 = 3;
/// Kind of LM_ACQ_REJ.
pub const KIND_REJECT: u8 = 4;
/// Kind of LM_ENDME_OK.
pub const KIND_ENDED: u8 = 5;
/// Kind of LM_APPEND_ADDR; see [`crate::admission`].
pub const KIND_APPEND_ADDR: u8 = 6;
/// Kind of LM_REMOVE_ADDR; see [`crate::admission`].
pub const KIND_REMOVE_ADDR: u8 = 7;
/// Kind of CHALLENGE.
pub const KIND_CHALLENGE: u8 = 10;
/// Kind of PROOF.
pub const KIND_PROOF: u8 = 11;

/// Longest control message, in bytes.
pub const MAX_CONTROL_LEN: usize = lm::HEADER_LEN + body::GRANT_LEN;

/// A transmit queue that means "any".
const ANY_QUEUE: u16 = 0xffff;
/// Where a request's flags hold the kind of delivery.
const DELIVERY_SHIFT: u8 = 1;
/// Flag of a request: there will be digests.
const FLAG_INTEGRITY: u8 = 1 << 3;
/// Flag of a request: [`Request::lands`] is `false`.
const FLAG_ONE_COPY: u8 = 1 << 4;

/// Capability: messages may be announced, and sent, before they are whole ([`crate::streaming`]).
pub const CAPABILITY_STREAMS: u32 = 1 << 0;
/// Capability: messages of a few fragments may leave unannounced, with [`Facts`](crate::wire::lm::Facts).
pub const CAPABILITY_AHEAD: u32 = 1 << 1;

/// LM_REQ: "require LM_RECV traffic with specified data size".
///
/// ```text
///  0               8       10      12  13  14  15  16              24      28      32      36      40
/// +---------------+-------+-------+---+---+---+---+---------------+-------+-------+-------+-------+
/// |   sender id   |data pt|  mtu  |wir|fam|tag|flg| max msg len   |window |in flt |uncompl| capab |
/// +---------------+-------+-------+---+---+---+---+---------------+-------+-------+-------+-------+
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// Random number of the sending endpoint's incarnation.
    pub sender_id: u64,
    /// The sender's UDP port on the data path: what its DATA packets come from, where credits go.
    pub data_port: u16,
    /// MTU of the sender's link, in bytes.
    pub mtu: u16,
    /// How the sender wants to send.
    pub wire: Wire,
    /// The sender's link.
    pub link: LinkShape,
    /// Longest message that it will send, in bytes: the paper's "specified data size".
    pub max_message_len: u64,
    /// Window that it would like.
    pub window: WindowShape,
    /// Messages that it would like to have under way at once.
    pub messages_in_flight: u32,
    /// Packets that the sender keeps uncompleted at most on a transmit queue, where a completion says that the far end has taken the
    /// packet; 0: it does not count them.
    pub uncompleted_max: u32,
    /// What the sender can do beyond this version, a bit each: [`CAPABILITY_STREAMS`]. Unknown ones are ignored.
    pub capabilities: u32,
    /// What is to become of messages of which fragments are lost: [`Delivery::to_u8`] in bits 1 and 2 of the flags.
    pub delivery: Delivery,
    /// Whether the sender sends digests, without which the receiver shows nothing: bit 3 of the flags. With [`Wire::IpFrag`]
    /// it offers them, and the session's key says whether the receiver wants them
    /// ([`has_digests`](crate::wire::lm::has_digests)).
    pub integrity: Integrity,
    /// Whether the session is to land as soon as there is a place for it; else all of its messages take the one-copy path (bit 4 of the
    /// flags). A request that is repeated may say something else.
    pub lands: bool,
}

impl Default for Request {
    /// Of an endpoint without a name on Ethernet, for messages of up to 1 MiB.
    fn default() -> Request {
        Request {
            sender_id: 0,
            data_port: 0,
            mtu: 1500,
            wire: Wire::Lm,
            link: LinkShape::IPV4,
            max_message_len: 1 << 20,
            window: WindowShape::DEFAULT,
            messages_in_flight: 4,
            uncompleted_max: 0,
            capabilities: 0,
            delivery: Delivery::default(),
            integrity: Integrity::default(),
            lands: true,
        }
    }
}

/// LM_ACQ_OK: "the LM_REQ request is accepted".
///
/// Everything that the sender must know about the receiver's side; none of it is a constant of the protocol.
///
/// ```text
///  0               8       10      12      14      16      18  19  20  21  22  23  24
/// +---------------+-------+-------+-------+-------+-------+---+---+---+---+---+---+
/// |  session key  |data pt| H     | P     |landing|tx que |wir|fam|pre|tag|fpp|flg|
/// +---------------+-------+-------+-------+-------+-------+---+---+---+---+---+---+
/// |  max msg len  |window |pkt lim| lease |1st msg|src pt |fil| 0 | capab |          24…56
/// +---------------+-------+-------+-------+-------+-------+-------+-------+
/// ```
/// Flags: bit 0, repetitions go apart; bit 1, the session has a place. A source port of 0 is the sender's data port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grant {
    /// The session's key, random: DATA packets without it never reach the landing zone.
    pub session_key: u64,
    /// The receiver's UDP port on the data path.
    pub data_port: u16,
    /// Wire, header length `H`, payload length `P` and link of the session's packets as the receiver sees them.
    pub layout: Layout,
    /// The receiver's receive queue that the session lands on.
    pub landing_queue: u16,
    /// The sender's transmit queue that leads there; a port whose transmit queue selects the receiver's queue (veth, vhost) has to send
    /// on it, or nothing lands. `None`: any.
    pub tx_queue: Option<u16>,
    /// Bytes that the receiver's driver writes in front of a packet.
    pub prefix: u8,
    /// Frames that one packet takes, at least 1 (more with jumbo packets over several buffers).
    pub frames_per_packet: u8,
    /// Packets without a payload that the sender sends behind each message that leaves unannounced: slots beyond a packet that its device may write.
    pub fillers: u8,
    /// Fragments that are sent again go the way of messages of one fragment, not to the landing queue: there every packet takes
    /// the next entry, whatever it is.
    pub repeats_apart: bool,
    /// The UDP source port that fragments must have, because it leads them to the landing queue (receive side scaling); `None`:
    /// the sender's data port.
    pub landing_port: Option<NonZeroU16>,
    /// Longest message that the receiver takes, in bytes.
    pub max_message_len: u64,
    /// The session's window.
    pub window: WindowShape,
    /// DATA packets that may be sent before the first credit.
    pub packet_limit: u32,
    /// The session ends when nothing is heard from the sender for so long, in milliseconds.
    pub lease_ms: u32,
    /// Number of the session's first message.
    pub first_message: u32,
    /// Whether its messages land. If not they take the one-copy path until a CREDIT says something else.
    pub lands: bool,
    /// What the receiver can do beyond this version, a bit each: [`CAPABILITY_STREAMS`]. Unknown ones are ignored.
    pub capabilities: u32,
}

/// LM_ACQ_REJ: "the LM_REQ request is rejected".
///
/// ```text
///  0   1   2       4               8               16
/// +---+---+-------+---------------+---------------+
/// |rea|ver|   0   |retry after ms |     limit     |
/// +---+---+-------+---------------+---------------+
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reject {
    /// Why.
    pub reason: RejectReason,
    /// The receiver's protocol version.
    pub version: u8,
    /// When asking again makes sense, in milliseconds; 0 when it does not.
    pub retry_after_ms: u32,
    /// The limit that the request exceeded, in the request's units; 0 when there is none.
    pub limit: u64,
}

/// Why a request was rejected.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
#[non_exhaustive]
#[repr(u8)]
pub enum RejectReason {
    /// The request is of another version of the protocol.
    #[error("the receiver speaks another protocol version")]
    Version = 1,
    /// All landing queues carry other sessions: the paper's only reason. Worth asking again.
    #[error("the receiver is busy with other sessions")]
    Busy = 2,
    /// The messages are longer than the receiver allows; `limit` says what it allows, in bytes.
    #[error("the messages are longer than the receiver allows")]
    TooLarge = 3,
    /// The receiver's policy does not allow this sender.
    #[error("the receiver does not allow this sender")]
    NotAllowed = 4,
    /// A wire, address family, MTU or window that the receiver does not support.
    #[error("the receiver does not support this wire, address family, MTU or window")]
    Unsupported = 5,
    /// The receiver has no memory for the landing zone.
    #[error("the receiver has no memory for messages of this length")]
    NoMemory = 6,
    /// The receiver is about to end.
    #[error("the receiver is shutting down")]
    ShuttingDown = 7,
    /// The receiver's NIC writes packets before anybody looks at them, so that it takes messages with digests only; and IP
    /// fragments only under exclusive use, since all of their sender's come to the landing queue.
    #[error(
        "the receiver is in zero-copy mode, where only digests tell what arrived: send with integrity, and IP \
         fragments only to a receiver under exclusive use (lm-recv --exclusive)"
    )]
    Unverified = 8,
    /// Nobody on that host receives on the port that was asked for.
    #[error("nobody receives on that port")]
    NoReceiver = 9,
    /// Exclusive admission: too few of the voters answered. Worth asking again.
    #[error("too few hosts answered to make sure that no other one is receiving")]
    NoQuorum = 10,
}

impl RejectReason {
    const fn from_u8(byte: u8) -> Option<RejectReason> {
        Some(match byte {
            1 => RejectReason::Version,
            2 => RejectReason::Busy,
            3 => RejectReason::TooLarge,
            4 => RejectReason::NotAllowed,
            5 => RejectReason::Unsupported,
            6 => RejectReason::NoMemory,
            7 => RejectReason::ShuttingDown,
            8 => RejectReason::Unverified,
            9 => RejectReason::NoReceiver,
            10 => RejectReason::NoQuorum,
            _ => return None,
        })
    }
}

/// LM_ENDME: "LM_RECV traffic is finished". Body: session key u64, messages u32, 0 u32.
///
/// Without a session ([`End::WITHDRAWN`]) it is the request of the same number that is not wanted any more. Then there is no answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct End {
    /// The session.
    pub session_key: u64,
    /// Messages that were sent in it.
    pub messages: u32,
}

impl End {
    /// Whoever asked does not wait any longer: nobody is to keep a place for it. Said once; where it is lost, a place is kept for
    /// nobody for as long as a silent request waits, or a lease lasts. No session has this key.
    pub const WITHDRAWN: End = End {
        session_key: 0,
        messages: 0,
    };
}

/// LM_ENDME_OK: the session is over on the receiver's side too. Body: session key u64, delivered u32, u32: 0, or one more than were heard of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ended {
    /// The session.
    pub session_key: u64,
    /// Messages that were delivered in it.
    pub delivered: u32,
    /// Messages of which the receiver had heard (their announcements) when the session ended: those behind were not delivered in it, and
    /// never will be. `None`: not known here.
    pub heard: Option<u32>,
}

/// CHALLENGE: an endpoint was heard that is not known, and is asked for the proof that it receives at its address.
///
/// ```text
///  0               8               16              24  25  28      32
/// +---------------+---------------+---------------+---+---+-------+
/// |   sender id   |    cookie     | challenger id |ask| 0 |uncompl|
/// +---------------+---------------+---------------+---+---+-------+
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Challenge {
    /// The sender id that was heard.
    pub sender_id: u64,
    /// What a [`Proof`] repeats.
    pub cookie: u64,
    /// The challenger's own incarnation.
    pub challenger_id: u64,
    /// What the challenger wants.
    pub ask: Ask,
    /// As [`Request::uncompleted_max`], of the challenger.
    pub uncompleted_max: u32,
}

/// What a challenger wants.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Ask {
    /// The cookie.
    Cookie = 0,
    /// The cookie, with the word of the sender's admission daemon for it.
    Word = 1,
    /// Nothing: who sends from this address is not heard.
    Silence = 2,
}

/// PROOF: the answer to a [`Challenge`].
///
/// ```text
///  0               8               16      18      20      24                              40
/// +---------------+---------------+-------+-------+-------+-------------------------------+
/// |   sender id   |    cookie     |data pt|   0   |uncompl|         daemon's word         |
/// +---------------+---------------+-------+-------+-------+-------------------------------+
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Proof {
    /// The sender id that was challenged.
    pub sender_id: u64,
    /// The challenge's cookie.
    pub cookie: u64,
    /// The sender's UDP port on the data path.
    pub data_port: u16,
    /// As [`Request::uncompleted_max`].
    pub uncompleted_max: u32,
    /// What the sender's daemon says to the receiver's about it, under the cluster's key
    /// ([`ClusterKey::word`](crate::admission::ClusterKey::word)); zeros where there is none.
    pub word: [u8; WORD_LEN],
}

/// Bytes of a daemon's word.
pub const WORD_LEN: usize = 16;

/// An admission message.
///
/// ```
/// use lm_protocol::control::{ControlMessage, End, MAX_CONTROL_LEN};
///
/// let message = ControlMessage::End(End { session_key: 7, messages: 3 });
/// let mut datagram = [0; MAX_CONTROL_LEN];
/// let len = message.encode(42, &mut datagram);
/// assert_eq!(ControlMessage::parse(&datagram[..len]), Ok((42, message)));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ControlMessage {
    /// LM_REQ.
    Request(Request),
    /// LM_ENDME.
    End(End),
    /// LM_ACQ_OK.
    Grant(Grant),
    /// LM_ACQ_REJ.
    Reject(Reject),
    /// LM_ENDME_OK.
    Ended(Ended),
    /// CHALLENGE.
    Challenge(Challenge),
    /// PROOF.
    Proof(Proof),
}

/// Why a datagram is no control message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ControlError {
    /// Another version of the protocol. Reported before anything else is looked at.
    #[error("{}", LmError::VersionMismatch { theirs: *.theirs })]
    VersionMismatch {
        /// The version of whoever sent it.
        theirs: u8,
        /// The request to answer, where the first 8 bytes are there and are a control message's.
        request_id: Option<u32>,
    },
    /// Not an LM packet, or one with a wrong length.
    #[error(transparent)]
    Packet(LmError),
    /// An LM packet that does not belong on the control port.
    #[error("an LM packet of type {packet_type} on the control port")]
    NotControl {
        /// Its type.
        packet_type: u8,
    },
    /// A kind that is not known here.
    #[error("unknown control message {kind}")]
    UnknownKind {
        /// The kind.
        kind: u8,
    },
    /// The body's length is not its kind's.
    #[error("the control message has a wrong length")]
    Length,
    /// A field's value is none that the field may have.
    #[error("impossible {0} in a control message")]
    Field(&'static str),
    /// Header and payload length do not belong together.
    #[error(transparent)]
    Layout(GeometryError),
    /// A window that is not a power of two.
    #[error(transparent)]
    Window(WindowError),
}

impl Request {
    /// The layout that both links allow: this request's, at no more than `mtu` bytes and behind `link`, which are the
    /// receiver's.
    ///
    /// # Errors
    ///
    /// [`GeometryError`].
    pub fn layout_at(&self, mtu: u16, link: LinkShape) -> Result<Layout, GeometryError> {
        Layout::new(self.wire, self.mtu.min(mtu), link)
    }
}

impl Grant {
    /// How long the session lives without a sign of the sender.
    pub const fn lease(&self) -> Duration {
        Duration::from_millis(self.lease_ms as u64)
    }
}

impl ControlMessage {
    /// The message's kind byte.
    pub const fn kind(&self) -> u8 {
        match self {
            ControlMessage::Request(_) => KIND_REQUEST,
            ControlMessage::End(_) => KIND_END,
            ControlMessage::Grant(_) => KIND_GRANT,
            ControlMessage::Reject(_) => KIND_REJECT,
            ControlMessage::Ended(_) => KIND_ENDED,
            ControlMessage::Challenge(_) => KIND_CHALLENGE,
            ControlMessage::Proof(_) => KIND_PROOF,
        }
    }

    /// The paper's name.
    pub const fn name(&self) -> &'static str {
        match self {
            ControlMessage::Request(_) => "LM_REQ",
            ControlMessage::End(_) => "LM_ENDME",
            ControlMessage::Grant(_) => "LM_ACQ_OK",
            ControlMessage::Reject(_) => "LM_ACQ_REJ",
            ControlMessage::Ended(_) => "LM_ENDME_OK",
            ControlMessage::Challenge(_) => "CHALLENGE",
            ControlMessage::Proof(_) => "PROOF",
        }
    }

    /// Writes the datagram; gives its length.
    pub fn encode(&self, request_id: u32, out: &mut [u8; MAX_CONTROL_LEN]) -> usize {
        let to = Writer::new(out);
        let written = match self {
            ControlMessage::Request(request) => request.write(to),
            ControlMessage::End(end) => end.write(to),
            ControlMessage::Grant(grant) => grant.write(to),
            ControlMessage::Reject(reject) => reject.write(to),
            ControlMessage::Ended(ended) => ended.write(to),
            ControlMessage::Challenge(challenge) => challenge.write(to),
            ControlMessage::Proof(proof) => proof.write(to),
        };
        written.finish(request_id, self.kind())
    }

    /// Reads a datagram; gives the request's number and the message. Every field of the result is legal.
    ///
    /// # Errors
    ///
    /// [`ControlError`]; another version comes before anything else. Reserved bytes are ignored.
    pub fn parse(datagram: &[u8]) -> Result<(u32, ControlMessage), ControlError> {
        let (header, body) = lm::parse_datagram(datagram).map_err(|error| match error {
            LmError::VersionMismatch { theirs } => ControlError::VersionMismatch {
                theirs,
                request_id: foreign_request_id(datagram),
            },
            error => ControlError::Packet(error),
        })?;
        let LmHeader::Control { request_id, kind } = header else {
            return Err(ControlError::NotControl {
                packet_type: header.packet_type(),
            });
        };
        Ok((request_id, ControlMessage::parse_body(kind, body)?))
    }

    /// Reads what stands behind the header of a control packet of this kind. Every field of the result is legal.
    ///
    /// # Errors
    ///
    /// [`ControlError`]. Reserved bytes are ignored.
    pub fn parse_body(kind: u8, body: &[u8]) -> Result<ControlMessage, ControlError> {
        Ok(match kind {
            KIND_REQUEST => ControlMessage::Request(Request::read(body)?),
            KIND_END => ControlMessage::End(End::read(body)?),
            KIND_GRANT => ControlMessage::Grant(Grant::read(body)?),
            KIND_REJECT => ControlMessage::Reject(Reject::read(body)?),
            KIND_ENDED => ControlMessage::Ended(Ended::read(body)?),
            KIND_CHALLENGE => ControlMessage::Challenge(Challenge::read(body)?),
            KIND_PROOF => ControlMessage::Proof(Proof::read(body)?),
            kind => return Err(ControlError::UnknownKind { kind }),
        })
    }
}

/// The request id of a control message of another version: bytes 4 to 7, as in all versions.
fn foreign_request_id(datagram: &[u8]) -> Option<u32> {
    let (head, _) = datagram.split_first_chunk::<8>()?;
    let [version_type, _, _, _, id @ ..] = *head;
    (version_type & 0xf == lm::TYPE_CONTROL).then_some(u32::from_be_bytes(id))
}
