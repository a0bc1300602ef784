//! The LM header: 24 bytes behind UDP, big endian.
//!
//! ```text
//!  0       1       2       4                       12              16              20              24
//! +-------+-------+-------+-----------------------+---------------+---------------+---------------+
//! |ver|typ| flags |pay.len|          u64          |      u32      |      u32      |      u32      |
//! +-------+-------+-------+-----------------------+---------------+---------------+---------------+
//!  1  DATA                 session key             message         index           count
//!  2  EAGER                sender id               number          tag (u64)
//!  3  EAGER_ACK            sender id               next            limit           0
//!  4  ANNOUNCE             session key             first message   entries         sent
//!  5  CREDIT               session key             packet limit    delivered       announced
//!  6  MISSING              session key             message         ranges          0
//!  7  MANIFEST             session key             message         first           count             → crate::manifest
//! 10  WINDOWS              session key             message         first           windows         → WindowsPacket
//!  8  REALTIME, 9  RT_REPORT, 10  WINDOWS, 11  DATAGRAM: of extensions; 12 and 13 are free
//! 14  SEALED               not this header: an admission message between daemons, with a tag                → crate::admission
//! 15  CONTROL              request id u32, kind u8, 1 u24, 0…                                           → crate::control
//! ```
//!
//! `version << 4 | type` comes first, so that a receiver knows another version before it believes anything else. Types 8 to 13
//! pass the gate as 2 to 7 do; where nothing takes them they are counted, and not answered. The
//! payload length counts the bytes behind the header; it must agree with UDP's. Flags are [`FLAG_DIGEST`], [`FLAG_MANIFEST`],
//! [`FLAG_ACKNOWLEDGES`] and [`FLAG_LANDS`], each in the types that it belongs to, and what is not known of them is ignored.
//!
//! # What follows the payload
//!
//! ```text
//!  0                        24                                                            payload length + 24
//! +------------------------+---------------------+-----------------------+---------------+
//! |  LM header             |  payload            |  acknowledgement, 16  |  digest u64   |
//! +------------------------+---------------------+-----------------------+---------------+
//! ```
//!
//! The header's payload length counts both.
//!
//! A *digest* ends packets of types 3 to 13 always, EAGER where its sender wants it ([`FLAG_DIGEST`]). It is the [`packet_digest`]
//! of header, payload, acknowledgement and sender's address. DATA has none: a fragment's digest is in its message's (see
//! [`crate::manifest`]). CONTROL travels through the kernel's sockets, with a UDP checksum.
//!
//! An [`EagerAcknowledgement`] says in EAGER packets what an EAGER_ACK says, of the messages that go the other way
//! ([`FLAG_ACKNOWLEDGES`]): where messages are answered by messages, no acknowledgement needs a packet of its own.

mod announcement;
mod error;
mod facts;
mod missing;
mod realtime;
mod trailer;
mod unwhole;
mod windows;

use crate::manifest::DIGEST_LEN;
use core::net::SocketAddrV4;
use core::ops::RangeInclusive;
use zerocopy::byteorder::network_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use announcement::is_announcement;
pub use announcement::{AnnounceEntry, MessageDigest};
pub use error::LmError;
pub use facts::{Credit, Facts};
pub use missing::MissingRange;
pub use realtime::{Clock, RealTimePacket, RtReport};
pub use trailer::{EagerAcknowledgement, Trailer, packet_digest};
pub use unwhole::{SETTLED_KEPT, UnwholeMessage};
pub use windows::WindowsPacket;

/// The protocol version that this crate speaks.
pub const VERSION: u8 = 2;
/// Bytes of an LM header.
pub const HEADER_LEN: usize = 24;
/// Most payload bytes behind an LM header in one UDP datagram over IPv4: 65,483.
pub const MAX_PAYLOAD_LEN: usize = 65_507 - HEADER_LEN;

/// Type of a DATA packet: one fragment of a message.
pub const TYPE_DATA: u8 = 1;
/// Type of an EAGER packet: a whole message of one fragment.
pub const TYPE_EAGER: u8 = 2;
/// Type of an EAGER_ACK packet.
pub const TYPE_EAGER_ACK: u8 = 3;
/// Type of an ANNOUNCE packet.
pub const TYPE_ANNOUNCE: u8 = 4;
/// Type of a CREDIT packet.
pub const TYPE_CREDIT: u8 = 5;
/// Type of a MISSING packet.
pub const TYPE_MISSING: u8 = 6;
/// Type of a MANIFEST packet.
pub const TYPE_MANIFEST: u8 = 7;
/// Types of extensions: the header's words and the payload are theirs, and a digest ends the packet.
pub const EXTENSION_TYPES: RangeInclusive<u8> = 8..=13;
/// Type of a REALTIME packet, an extension's.
pub const TYPE_REALTIME: u8 = 8;
/// Type of an RT_REPORT packet; as [`TYPE_REALTIME`].
pub const TYPE_RT_REPORT: u8 = 9;
/// Type of a WINDOWS packet ([`WindowsPacket`]); as [`TYPE_REALTIME`].
pub const TYPE_WINDOWS: u8 = 10;
/// Type of a DATAGRAM packet; as [`TYPE_REALTIME`].
pub const TYPE_DATAGRAM: u8 = 11;
/// The packet ends with a digest: in all of types 3 to 13, and in EAGER packets of senders with odd ids. One corrupt bit does not
/// switch a digest off, because a sender's id (random, the same in all its EAGER packets) says it as well.
pub const FLAG_DIGEST: u8 = 2;
/// Flag of a MISSING packet: what is missing is not fragments but the digests of those in the ranges, or, without ranges,
/// the message's digest.
pub const FLAG_MANIFEST: u8 = 4;
/// Flag of an EAGER packet: an [`EagerAcknowledgement`] follows the message.
pub const FLAG_ACKNOWLEDGES: u8 = 8;
/// Flag of a CREDIT packet: the session's messages land; else they take the one-copy path.
pub const FLAG_LANDS: u8 = 16;
/// Type of a sealed admission message: what daemons say to each other; see [`crate::admission`].
pub const TYPE_SEALED: u8 = 14;
/// The seal's own version, which stands in a sealed message's first byte. The message inside says which version it is of, so that
/// hosts of one cluster tell each other.
pub const SEAL_VERSION: u8 = 1;
/// Type of the admission messages on the control port; see [`crate::control`].
pub const TYPE_CONTROL: u8 = 15;

/// Differentiated services and ECN in the IP header of an LM packet of this type: EF (46, RFC 3246) for real time, else 0.
#[inline]
pub const fn dscp_ecn(packet_type: u8) -> u8 {
    match packet_type {
        TYPE_REALTIME | TYPE_RT_REPORT => 46 << 2,
        _ => 0,
    }
}

/// The header as it lies on the wire. The three words mean what the type says (see the [module](self)).
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct RawHeader {
    /// `version << 4 | type`.
    pub version_type: u8,
    /// [`FLAG_DIGEST`], [`FLAG_MANIFEST`], [`FLAG_ACKNOWLEDGES`] and [`FLAG_LANDS`].
    pub flags: u8,
    /// Bytes behind the header.
    pub payload_len: U16,
    /// Session key or sender id.
    pub key: U64,
    /// First word.
    pub a: U32,
    /// Second word.
    pub b: U32,
    /// Third word.
    pub c: U32,
}

const _: () = assert!(size_of::<RawHeader>() == HEADER_LEN);
const _: () = assert!(core::mem::offset_of!(RawHeader, payload_len) == 2);
const _: () = assert!(core::mem::offset_of!(RawHeader, key) == 4);
const _: () = assert!(core::mem::offset_of!(RawHeader, a) == 12);
const _: () = assert!(core::mem::offset_of!(RawHeader, b) == 16);
const _: () = assert!(core::mem::offset_of!(RawHeader, c) == 20);

/// An LM header's legal content; for an EAGER packet with the acknowledgement behind its payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum LmHeader {
    /// One fragment of a message of a session.
    Data {
        /// The session's key, from the grant.
        session_key: u64,
        /// Number of the message in its session.
        message: u32,
        /// Fragment, from 0; below `count`.
        index: u32,
        /// Fragments of the message, at least 1.
        count: u32,
    },
    /// A whole message of one fragment, sent without a session.
    Eager {
        /// Random number of the sending endpoint's incarnation.
        sender_id: u64,
        /// Number of the message among this sender's eager messages to this receiver.
        number: u32,
        /// The application's tag.
        tag: u64,
        /// [`FLAG_DIGEST`].
        digested: bool,
        /// [`FLAG_ACKNOWLEDGES`]: what its sender has got of our own messages.
        acknowledges: Option<EagerAcknowledgement>,
    },
    /// Which eager messages arrived, and how many more may come.
    EagerAck {
        /// The sender whose messages these are.
        sender_id: u64,
        /// All numbers before this one arrived (serial arithmetic).
        next: u32,
        /// Numbers before this one may be sent (serial arithmetic): the credit.
        limit: u32,
    },
    /// Lengths and tags of the session's next messages; the payload is `entries` × [`AnnounceEntry`], and then any number
    /// of [`MessageDigest`] of messages that are fully sent. Neither: a keepalive that asks for a CREDIT.
    Announce {
        /// The session's key.
        session_key: u64,
        /// Number of the first message described.
        first: u32,
        /// Messages described.
        entries: u32,
        /// DATA packets sent since the session's start, repetitions not counted (cumulative, serial arithmetic): what has
        /// not come of them a while after this packet is lost.
        sent: u32,
    },
    /// What the receiver allows and what it has. The payload names settled messages that are not whole, of the last
    /// [`SETTLED_KEPT`] ones: each an [`UnwholeMessage`].
    Credit {
        /// The session's key.
        session_key: u64,
        /// DATA packets that the sender may have sent since the session's start (cumulative, serial arithmetic).
        packet_limit: u32,
        /// All messages before this number are settled: complete, or reported as incomplete.
        delivered: u32,
        /// All messages before this number were announced.
        announced: u32,
        /// [`FLAG_LANDS`].
        lands: bool,
    },
    /// What the receiver lacks of a message; the payload is `ranges` × [`MissingRange`].
    Missing {
        /// The session's key.
        session_key: u64,
        /// Number of the message.
        message: u32,
        /// Ranges of fragments that did not arrive.
        ranges: u32,
        /// [`FLAG_MANIFEST`].
        manifest: bool,
    },
    /// Digests of consecutive fragments of a message; the payload is one big-endian `u64` each, and behind the last
    /// fragment's digest the message's. See [`crate::manifest`].
    Manifest {
        /// The session's key.
        session_key: u64,
        /// Number of the message.
        message: u32,
        /// Fragment whose digest comes first; below `count`.
        first: u32,
        /// Fragments of the message, at least 1.
        count: u32,
    },
    /// A packet of an extension: see [`EXTENSION_TYPES`].
    Extension {
        /// The type, 8 to 13.
        packet_type: u8,
        /// What a flow or a session is told by.
        key: u64,
        /// The other three words.
        words: [u32; 3],
    },
    /// An admission message; its payload is for [`crate::control`].
    Control {
        /// Number that ties a reply to its request.
        request_id: u32,
        /// Which message it is.
        kind: u8,
    },
}

impl LmHeader {
    /// The packet's type, 1 to 15.
    #[inline]
    pub const fn packet_type(&self) -> u8 {
        match self {
            LmHeader::Data { .. } => TYPE_DATA,
            LmHeader::Eager { .. } => TYPE_EAGER,
            LmHeader::EagerAck { .. } => TYPE_EAGER_ACK,
            LmHeader::Announce { .. } => TYPE_ANNOUNCE,
            LmHeader::Credit { .. } => TYPE_CREDIT,
            LmHeader::Missing { .. } => TYPE_MISSING,
            LmHeader::Manifest { .. } => TYPE_MANIFEST,
            LmHeader::Extension { packet_type, .. } => *packet_type,
            LmHeader::Control { .. } => TYPE_CONTROL,
        }
    }

    /// Bytes of the digest behind the payload: 8, or 0 in packets without.
    #[inline]
    pub const fn digest_len(&self) -> usize {
        match self {
            LmHeader::Data { .. } | LmHeader::Control { .. } | LmHeader::Eager { digested: false, .. } => 0,
            _ => DIGEST_LEN,
        }
    }

    /// Bytes behind the payload: 16 of an acknowledgement and 8 of the digest, in packets with them.
    #[inline]
    pub const fn trailer_len(&self) -> usize {
        let acknowledgement_len = match self {
            LmHeader::Eager {
                acknowledges: Some(_),
                ..
            } => EagerAcknowledgement::LEN,
            _ => 0,
        };
        acknowledgement_len + self.digest_len()
    }

    /// The header's 24 bytes in front of a payload of `payload_len` bytes and of the [`Trailer`], which `payload_len` does not
    /// count: [`MAX_PAYLOAD_LEN`] less [`trailer_len`](LmHeader::trailer_len) at most.
    ///
    /// ```
    /// use lm_protocol::wire::lm::LmHeader;
    ///
    /// let header = LmHeader::Credit { session_key: 7, packet_limit: 512, delivered: 3, announced: 9, lands: true };
    /// let bytes = header.encode(0);
    /// assert_eq!(bytes[..4], [0x25, 18, 0, 8]); // with a digest
    /// assert_eq!(LmHeader::decode(&bytes), Ok((header, 0)));
    /// ```
    #[inline]
    pub fn encode(&self, payload_len: u16) -> [u8; HEADER_LEN] {
        let (key, a, b, c) = match *self {
            LmHeader::Data {
                session_key,
                message,
                index,
                count,
            } => (session_key, message, index, count),
            LmHeader::Eager {
                sender_id,
                number,
                tag,
                ..
            } => (sender_id, number, (tag >> 32) as u32, tag as u32),
            LmHeader::EagerAck {
                sender_id,
                next,
                limit,
            } => (sender_id, next, limit, 0),
            LmHeader::Announce {
                session_key,
                first,
                entries,
                sent,
            } => (session_key, first, entries, sent),
            LmHeader::Credit {
                session_key,
                packet_limit,
                delivered,
                announced,
                ..
            } => (session_key, packet_limit, delivered, announced),
            LmHeader::Missing {
                session_key,
                message,
                ranges,
                ..
            } => (session_key, message, ranges, 0),
            LmHeader::Manifest {
                session_key,
                message,
                first,
                count,
            } => (session_key, message, first, count),
            LmHeader::Extension {
                key,
                words: [a, b, c],
                ..
            } => (key, a, b, c),
            LmHeader::Control { request_id, kind } => {
                // Odd, and without the flag: with another type it would be no EAGER packet (see `is_intact`).
                (u64::from(request_id) << 32 | u64::from(kind) << 24 | 1, 0, 0, 0)
            }
        };
        let raw = RawHeader {
            version_type: VERSION << 4 | self.packet_type(),
            flags: match *self {
                LmHeader::Eager {
                    digested,
                    acknowledges,
                    ..
                } => {
                    (u8::from(digested) * FLAG_DIGEST)
                        | (u8::from(acknowledges.is_some()) * FLAG_ACKNOWLEDGES)
                }
                LmHeader::Missing { manifest, .. } => FLAG_DIGEST | (u8::from(manifest) * FLAG_MANIFEST),
                LmHeader::Credit { lands, .. } => FLAG_DIGEST | (u8::from(lands) * FLAG_LANDS),
                LmHeader::Data { .. } | LmHeader::Control { .. } => 0,
                _ => FLAG_DIGEST,
            },
            payload_len: U16::new(payload_len.wrapping_add(self.trailer_len() as u16)),
            key: U64::new(key),
            a: U32::new(a),
            b: U32::new(b),
            c: U32::new(c),
        };
        zerocopy::transmute!(raw)
    }

    /// Reads the 24 bytes at the start of `bytes`, and an acknowledgement behind the payload; gives the header and the length of
    /// the payload that it announces, without what follows it.
    ///
    /// Whether that payload is there is not looked at: a header that survived at the lowest slot of a window stands
    /// alone. [`parse_datagram`] reads whole packets.
    ///
    /// # Errors
    ///
    /// [`LmError`], all but [`LmError::Length`] for a payload that is not there. Another version comes before anything
    /// else.
    #[inline]
    pub fn decode(bytes: &[u8]) -> Result<(LmHeader, u16), LmError> {
        let version_type = *bytes.first().ok_or(LmError::Truncated)?;
        if version_type >> 4 != VERSION && version_type != SEAL_VERSION << 4 | TYPE_SEALED {
            return Err(LmError::VersionMismatch {
                theirs: version_type >> 4,
            });
        }
        let (raw, _) = RawHeader::ref_from_prefix(bytes).map_err(|_| LmError::Truncated)?;
        let behind_header = raw.payload_len.get();
        let (key, a, b, c) = (raw.key.get(), raw.a.get(), raw.b.get(), raw.c.get());
        let header = match version_type & 0xf {
            TYPE_DATA if b >= c => return Err(LmError::Index),
            TYPE_DATA => LmHeader::Data {
                session_key: key,
                message: a,
                index: b,
                count: c,
            },
            TYPE_EAGER => LmHeader::Eager {
                sender_id: key,
                number: a,
                tag: u64::from(b) << 32 | u64::from(c),
                digested: raw.flags & FLAG_DIGEST != 0,
                acknowledges: EagerAcknowledgement::behind(raw, bytes)?,
            },
            TYPE_EAGER_ACK => LmHeader::EagerAck {
                sender_id: key,
                next: a,
                limit: b,
            },
            TYPE_ANNOUNCE => LmHeader::Announce {
                session_key: key,
                first: a,
                entries: b,
                sent: c,
            },
            TYPE_CREDIT => LmHeader::Credit {
                session_key: key,
                packet_limit: a,
                delivered: b,
                announced: c,
                lands: raw.flags & FLAG_LANDS != 0,
            },
            TYPE_MISSING => LmHeader::Missing {
                session_key: key,
                message: a,
                ranges: b,
                manifest: raw.flags & FLAG_MANIFEST != 0,
            },
            TYPE_MANIFEST if b >= c => return Err(LmError::Index),
            TYPE_MANIFEST => LmHeader::Manifest {
                session_key: key,
                message: a,
                first: b,
                count: c,
            },
            packet_type @ 8..=13 => LmHeader::Extension {
                packet_type,
                key,
                words: [a, b, c],
            },
            TYPE_CONTROL => LmHeader::Control {
                request_id: (key >> 32) as u32,
                kind: (key >> 24) as u8,
            },
            packet_type => return Err(LmError::UnknownType { packet_type }),
        };
        if header.digest_len() > 0 && raw.flags & FLAG_DIGEST == 0 {
            return Err(LmError::Digest);
        }
        let payload_len = behind_header
            .checked_sub(header.trailer_len() as u16)
            .ok_or(LmError::Length)?;
        let entries_len = match header {
            LmHeader::Missing { ranges, .. } => u64::from(ranges) * MissingRange::LEN as u64,
            LmHeader::EagerAck { .. } => 0,
            LmHeader::Credit { .. } => u64::from(payload_len) & !3,
            LmHeader::Manifest { first, count, .. } => manifest_payload_len(payload_len, first, count)?,
            _ => u64::from(payload_len),
        };
        if entries_len != u64::from(payload_len) {
            return Err(LmError::Length);
        }
        Ok((header, payload_len))
    }
}

/// The length that a MANIFEST's payload must have if it is `payload_len` bytes long: whole digests, at least one, of
/// fragments that exist, and the message's exactly where the last fragment's is.
#[inline]
fn manifest_payload_len(payload_len: u16, first: u32, count: u32) -> Result<u64, LmError> {
    let digests = u64::from(payload_len) / DIGEST_LEN as u64;
    let end = u64::from(first) + digests;
    if end > u64::from(count) + 1 {
        return Err(LmError::Index);
    }
    if digests == 0 || end == u64::from(count) {
        return Err(LmError::Length);
    }
    Ok(digests * DIGEST_LEN as u64)
}

/// Reads one whole LM packet, as it comes from a UDP socket: the payload must be exactly what the header announces.
///
/// # Errors
///
/// [`LmError`]; another version comes before anything else.
///
/// ```
/// use lm_protocol::wire::lm::{self, LmError, LmHeader};
///
/// let header =
///     LmHeader::Eager { sender_id: 4, number: 2, tag: 3, digested: false, acknowledges: None };
/// let mut packet = header.encode(5).to_vec();
/// packet.extend_from_slice(b"hello");
/// assert_eq!(lm::parse_datagram(&packet), Ok((header, &b"hello"[..])));
/// assert_eq!(lm::parse_datagram(&packet[..28]), Err(LmError::Length));
/// ```
#[inline]
pub fn parse_datagram(bytes: &[u8]) -> Result<(LmHeader, &[u8]), LmError> {
    parse_packet(bytes).map(|packet| (packet.header, packet.payload))
}

/// A whole LM packet that was read, digest and all. Whether that is right says [`LmPacket::is_intact`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LmPacket<'a> {
    /// The header.
    pub header: LmHeader,
    /// What is between the header and the [`Trailer`].
    pub payload: &'a [u8],
    /// The digest, where the header says that there is one.
    pub digest: Option<u64>,
}

impl LmPacket<'_> {
    /// Whether the packet is as its sender, whose data port is `from`, made it. Of packets without a digest nothing is known:
    /// DATA and CONTROL always pass, EAGER where its sender's id agrees that it has none.
    #[inline]
    pub fn is_intact(&self, from: SocketAddrV4) -> bool {
        if let LmHeader::Eager {
            sender_id, digested, ..
        } = self.header
            && digested != has_digests(sender_id)
        {
            return false;
        }
        (self.digest).is_none_or(|digest| digest == packet_digest(&self.header, self.payload, from))
    }
}

/// Whether the sender with this id puts digests into its EAGER packets; and whether a session with this key has digests of
/// its messages: bit 0 of these random numbers says it.
#[inline]
pub const fn has_digests(id: u64) -> bool {
    id & 1 == 1
}

/// The random number `id`, changed to say whether there are digests; see [`has_digests`].
#[inline]
pub const fn with_digests(id: u64, digests: bool) -> u64 {
    id & !1 | digests as u64
}

/// Reads one whole LM packet, as [`parse_datagram`], with its digest. The digest is not checked.
///
/// # Errors
///
/// [`LmError`]; another version comes before anything else.
#[inline]
pub fn parse_packet(bytes: &[u8]) -> Result<LmPacket<'_>, LmError> {
    let (header, payload_len) = LmHeader::decode(bytes)?;
    let behind = bytes.get(HEADER_LEN..).ok_or(LmError::Truncated)?;
    let digest_len = header.digest_len();
    if digest_len == 0 && bytes[1] & FLAG_DIGEST != 0 {
        // Its type was another one.
        return Err(LmError::Digest);
    }
    if behind.len() != usize::from(payload_len) + header.trailer_len() {
        return Err(LmError::Length);
    }
    let (_, digest) = behind.split_at(behind.len() - digest_len);
    let payload = &behind[..usize::from(payload_len)];
    if let LmHeader::Announce { entries, .. } = header
        && !is_announcement(payload, entries)
    {
        return Err(LmError::Length);
    }
    Ok(LmPacket {
        header,
        payload,
        digest: digest.first_chunk().map(|bytes| u64::from_be_bytes(*bytes)),
    })
}
