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

use crate::control::{
    ControlError, ControlMessage, Fields, KIND_APPEND_ADDR, KIND_REMOVE_ADDR, MAX_CONTROL_LEN, Writer,
};
use crate::wire::lm;
use core::net::Ipv4Addr;

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
#[repr(u8)]
pub enum Stage {
    /// It wants to activate DLD, and asks a voter.
    Claim = 1,
    /// Its DLD is active: "append specified address to the LM_RECV_ADDR list".
    Active = 2,
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
        let to = Writer::new(out);
        match *self {
            Message::Session { request_id, message } => message.encode(request_id, out),
            Message::Append(append) => to
                .put(append.address.octets())
                .put([append.stage as u8, 0, 0, 0])
                .put(append.number.to_be_bytes())
                .put(append.lease_ms.to_be_bytes())
                .put([0; 4])
                .finish(0, KIND_APPEND_ADDR),
            Message::Remove(remove) => to
                .put(remove.address.octets())
                .put([0; 4])
                .put(remove.number.to_be_bytes())
                .finish(0, KIND_REMOVE_ADDR),
            Message::Answer(answer) => to
                .put(answer.address.octets())
                .put([answer.verdict as u8, 0, 0, 0])
                .put(answer.number.to_be_bytes())
                .put(answer.holder.octets())
                .put([0; 4])
                .finish(0, KIND_ADDR_OK),
            Message::Hello => to.finish(0, KIND_HELLO),
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
                let mut fields = Fields::of(body, 24)?;
                Message::Append(Append {
                    address: fields.take().into(),
                    stage: match fields.u8() {
                        1 => Stage::Claim,
                        2 => Stage::Active,
                        _ => return Err(ControlError::Field("stage")),
                    },
                    number: fields.skip::<3>().u64(),
                    lease_ms: fields.u32(),
                })
            }
            KIND_REMOVE_ADDR => {
                let mut fields = Fields::of(body, 16)?;
                Message::Remove(Remove {
                    address: fields.take().into(),
                    number: fields.skip::<4>().u64(),
                })
            }
            KIND_ADDR_OK => {
                let mut fields = Fields::of(body, 24)?;
                Message::Answer(Answer {
                    address: fields.take().into(),
                    verdict: match fields.u8() {
                        1 => Verdict::Promised,
                        2 => Verdict::Held,
                        3 => Verdict::Abstains,
                        4 => Verdict::Released,
                        _ => return Err(ControlError::Field("verdict")),
                    },
                    number: fields.skip::<3>().u64(),
                    holder: fields.take().into(),
                })
            }
            KIND_HELLO => {
                Fields::of(body, 0)?;
                Message::Hello
            }
            kind => return Err(ControlError::UnknownKind { kind }),
        })
    }
}
