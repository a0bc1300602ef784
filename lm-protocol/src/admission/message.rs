//! What daemons say to each other: the messages about sessions ([`crate::control`]) and those about who receives.
//!
//! The latter have a control message's header, with 0 in place of the request's number, and these bodies:
//!
//! ```text
//!  kind                          0       4       8               16
//!  6  LM_APPEND_ADDR             |address| stage |    number     | lease | 0     |     stage u8 and 3 × 0; lease in ms
//!  7  LM_REMOVE_ADDR             |address|   0   |    number     |
//!  8  LM_ADDR_OK                 |address|verdict|    number     | holder| 0     |     verdict u8 and 3 × 0
//!  9  LM_HELLO                   nothing
//! ```
//!
//! LM_ADDR_OK and LM_HELLO are not in the paper: the first makes LM_APPEND_ADDR a question (see `claim.rs`), the second
//! answers a message from a life that is not known yet (see `peers.rs`).

use crate::control::{ControlError, ControlMessage, KIND_APPEND_ADDR, KIND_REMOVE_ADDR, MAX_CONTROL_LEN};
use crate::wire::lm::{self, LmHeader};
use core::net::Ipv4Addr;
use zerocopy::byteorder::network_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Kind of LM_ADDR_OK.
pub const KIND_ADDR_OK: u8 = 8;
/// Kind of LM_HELLO.
pub const KIND_HELLO: u8 = 9;

/// Longest message in a seal, in bytes.
pub const MAX_BODY_LEN: usize = MAX_CONTROL_LEN;

/// A message between daemons.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Message {
    /// LM_REQ, LM_ENDME, LM_ACQ_OK, LM_ACQ_REJ, LM_ENDME_OK.
    Session {
        /// Number of the request.
        request_id: u32,
        /// What it says.
        message: ControlMessage,
    },
    /// LM_APPEND_ADDR.
    Append(Append),
    /// LM_REMOVE_ADDR.
    Remove(Remove),
    /// LM_ADDR_OK.
    Answer(Answer),
    /// LM_HELLO.
    Hello,
}

/// What a host that says LM_APPEND_ADDR is about to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// It wants to activate DLD, and asks a voter.
    Claim,
    /// Its DLD is active: "append specified address to the LM_RECV_ADDR list".
    Active,
}

/// LM_APPEND_ADDR.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Append {
    /// The receiver's address: always the sender's own.
    pub address: Ipv4Addr,
    /// Asked or told.
    pub stage: Stage,
    /// Number of the claim; grows within a sender's life.
    pub number: u64,
    /// How long the entry is good without being said again, in milliseconds.
    pub lease_ms: u32,
}

/// LM_REMOVE_ADDR.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Remove {
    /// The receiver's address: always the sender's own.
    pub address: Ipv4Addr,
    /// Claims up to this number are over.
    pub number: u64,
}

/// LM_ADDR_OK: a voter's answer to a claim, or to its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Answer {
    /// Whose claim.
    pub address: Ipv4Addr,
    /// Number of the claim.
    pub number: u64,
    /// The answer.
    pub verdict: Verdict,
    /// Who holds the voter's promise, where that is somebody else; else 0.0.0.0.
    pub holder: Ipv4Addr,
}

/// What a voter says.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Verdict {
    /// It promises to say this to nobody else for a while.
    Promised = 1,
    /// It has promised that to somebody else.
    Held = 2,
    /// It started too short a time ago to know what it promised in its life before.
    Abstains = 3,
    /// The claim is over.
    Released = 4,
}

impl Message {
    /// Writes the message; gives its length.
    pub fn encode(&self, out: &mut [u8; MAX_BODY_LEN]) -> usize {
        match *self {
            Message::Session { request_id, message } => message.encode(request_id, out),
            Message::Append(append) => {
                let raw = RawLong {
                    address: append.address.octets(),
                    what: match append.stage {
                        Stage::Claim => 1,
                        Stage::Active => 2,
                    },
                    zero: [0; 3],
                    number: U64::new(append.number),
                    word: append.lease_ms.to_be_bytes(),
                    reserved: U32::ZERO,
                };
                write(KIND_APPEND_ADDR, &raw, out)
            }
            Message::Remove(remove) => {
                let raw = RawShort {
                    address: remove.address.octets(),
                    reserved: U32::ZERO,
                    number: U64::new(remove.number),
                };
                write(KIND_REMOVE_ADDR, &raw, out)
            }
            Message::Answer(answer) => {
                let raw = RawLong {
                    address: answer.address.octets(),
                    what: answer.verdict as u8,
                    zero: [0; 3],
                    number: U64::new(answer.number),
                    word: answer.holder.octets(),
                    reserved: U32::ZERO,
                };
                write(KIND_ADDR_OK, &raw, out)
            }
            Message::Hello => write(KIND_HELLO, &(), out),
        }
    }

    /// The number of the request that it is about, where it is about one.
    pub(super) fn request_id(&self) -> Option<u32> {
        match self {
            Message::Session { request_id, .. } => Some(*request_id),
            _ => None,
        }
    }

    /// LM_ACQ_REJ.
    pub(super) fn is_reject(&self) -> bool {
        matches!(
            self,
            Message::Session {
                message: ControlMessage::Reject(_),
                ..
            }
        )
    }

    /// Reads a message. Every field of the result is legal; reserved bytes are ignored.
    ///
    /// # Errors
    ///
    /// [`ControlError`], as [`ControlMessage::parse`].
    pub fn parse(body: &[u8]) -> Result<Message, ControlError> {
        let kind = match ControlMessage::parse(body) {
            Ok((request_id, message)) => return Ok(Message::Session { request_id, message }),
            Err(ControlError::UnknownKind { kind }) => kind,
            Err(error) => return Err(error),
        };
        let body = body.get(lm::HEADER_LEN..).unwrap_or_default();
        Ok(match kind {
            KIND_APPEND_ADDR => {
                let raw = read::<RawLong>(body)?;
                Message::Append(Append {
                    address: raw.address.into(),
                    stage: match raw.what {
                        1 => Stage::Claim,
                        2 => Stage::Active,
                        _ => return Err(ControlError::Field("stage")),
                    },
                    number: raw.number.get(),
                    lease_ms: u32::from_be_bytes(raw.word),
                })
            }
            KIND_REMOVE_ADDR => {
                let raw = read::<RawShort>(body)?;
                Message::Remove(Remove {
                    address: raw.address.into(),
                    number: raw.number.get(),
                })
            }
            KIND_ADDR_OK => {
                let raw = read::<RawLong>(body)?;
                Message::Answer(Answer {
                    address: raw.address.into(),
                    number: raw.number.get(),
                    verdict: match raw.what {
                        1 => Verdict::Promised,
                        2 => Verdict::Held,
                        3 => Verdict::Abstains,
                        4 => Verdict::Released,
                        _ => return Err(ControlError::Field("verdict")),
                    },
                    holder: raw.word.into(),
                })
            }
            KIND_HELLO if body.is_empty() => Message::Hello,
            KIND_HELLO => return Err(ControlError::Length),
            kind => return Err(ControlError::UnknownKind { kind }),
        })
    }
}

fn write<Body: IntoBytes + Immutable>(kind: u8, body: &Body, out: &mut [u8; MAX_BODY_LEN]) -> usize {
    const { assert!(size_of::<Body>() <= MAX_BODY_LEN - lm::HEADER_LEN) };
    let header = LmHeader::Control { request_id: 0, kind };
    let len = lm::HEADER_LEN + size_of::<Body>();
    out[..lm::HEADER_LEN].copy_from_slice(&header.encode(size_of::<Body>() as u16));
    out[lm::HEADER_LEN..len].copy_from_slice(body.as_bytes());
    len
}

fn read<Raw: FromBytes>(body: &[u8]) -> Result<Raw, ControlError> {
    Raw::read_from_bytes(body).map_err(|_| ControlError::Length)
}

/// LM_APPEND_ADDR and LM_ADDR_OK.
#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct RawLong {
    address: [u8; 4],
    what: u8,
    zero: [u8; 3],
    number: U64,
    word: [u8; 4],
    reserved: U32,
}

/// LM_REMOVE_ADDR.
#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct RawShort {
    address: [u8; 4],
    reserved: U32,
    number: U64,
}

const _: () = assert!(size_of::<RawLong>() == 24);
const _: () = assert!(size_of::<RawShort>() == 16);
