//! The control messages of a transfer: what `lm-send` and `lm-recv` say to each other beside the data.
//!
//! They are small LM messages whose tag is [`CONTROL_TAG`]: a head of 12 bytes that every version has, and a [`Control`] as `postcard` writes it.
//!
//! ```text
//!   0               4       5                       8               12
//!  +---------------+-------+-------+-------+-------+---------------+---------
//!  | "LMtr"        |version|   0       0       0   | transfer (BE) | Control
//!  +---------------+-------+-------+-------+-------+---------------+---------
//! ```
//!
//! A data message has the tag `transfer << 32 | index` and nothing but the file's bytes as its payload. Transfer
//! numbers lie in 1..2^32-1, so no data tag equals [`CONTROL_TAG`].

use std::fmt;

use serde::{Deserialize, Serialize};

/// The tag of control messages.
pub const CONTROL_TAG: u64 = u64::MAX;

/// The largest encoded control message, in bytes: fits one fragment at the smallest MTU, so it always goes eager.
pub const CONTROL_LEN_MAX: usize = HEAD_LEN + NUMBERS_LEN_MAX + TEXT_LEN_MAX;

/// Most blocks that one CHECK asks for.
pub const DIGESTS_MAX: usize = 12;

/// SHA-256 of a block of the file.
pub type Digest = [u8; 32];

const MAGIC: [u8; 4] = *b"LMtr";
const VERSION: u8 = 3;
const HEAD_LEN: usize = 12;
/// All of a [`Control`] but its text or digests: its kind, the transfer, three numbers, a status and a length, each as long as it can be.
const NUMBERS_LEN_MAX: usize = 1 + 5 + 3 * 10 + 1 + 2;
/// Longest text in bytes; longer ones are cut.
const TEXT_LEN_MAX: usize = 400;
// IPv4 needs 576 bytes of MTU at least; 20 + 8 + 24 of them are IP, UDP and LM headers.
const _: () = assert!(CONTROL_LEN_MAX <= 576 - 52 && DIGESTS_MAX * size_of::<Digest>() <= TEXT_LEN_MAX);

/// Number of a transfer: unique among one sender's transfers, never 0 or `u32::MAX`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "u32", into = "u32")]
pub struct TransferId(u32);

impl TryFrom<u32> for TransferId {
    type Error = &'static str;

    fn try_from(number: u32) -> Result<Self, Self::Error> {
        TransferId::new(number).ok_or("a reserved number")
    }
}

impl From<TransferId> for u32 {
    fn from(transfer: TransferId) -> u32 {
        transfer.0
    }
}

impl TransferId {
    /// The transfer with this number; `None` for the two reserved ones.
    #[must_use]
    pub const fn new(number: u32) -> Option<Self> {
        if number == 0 || number == u32::MAX {
            None
        } else {
            Some(TransferId(number))
        }
    }

    /// A number for a sender's first transfer, made from `random` bits.
    #[must_use]
    pub const fn from_random(random: u32) -> Self {
        TransferId(1 + random % (u32::MAX - 1))
    }

    /// The number after this one, skipping the reserved ones.
    #[must_use]
    pub const fn next(self) -> Self {
        Self::from_random(self.0)
    }

    /// The number itself.
    #[must_use]
    pub const fn number(self) -> u32 {
        self.0
    }

    /// The tag of this transfer's data message number `index`.
    #[must_use]
    pub const fn data_tag(self, index: u32) -> u64 {
        (self.0 as u64) << 32 | index as u64
    }

    /// Takes a data tag apart; `None` for a tag that no data message has.
    #[must_use]
    pub const fn from_data_tag(tag: u64) -> Option<(Self, u32)> {
        match Self::new((tag >> 32) as u32) {
            Some(transfer) => Some((transfer, tag as u32)),
            None => None,
        }
    }
}

impl fmt::Display for TransferId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:08x}", self.0)
    }
}

/// What is known of a transfer before its data: the body of START.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Plan {
    /// Bytes of the whole transfer; `None` for standard input.
    pub total_len: Option<u64>,
    /// Bytes of every message but the last, which has what is left.
    pub message_len: u64,
}

impl Plan {
    /// A plan that can be carried out: messages are not empty, neither is the whole, and an index fits 32 bits.
    #[must_use]
    pub fn new(total_len: Option<u64>, message_len: u64) -> Option<Self> {
        let plan = Plan {
            total_len,
            message_len,
        };
        let possible = message_len > 0
            && total_len != Some(0)
            && plan.message_count().is_none_or(|count| count <= 1 << 32);
        possible.then_some(plan)
    }

    /// The message that the byte at `offset` belongs to; one more than the last for the end.
    #[must_use]
    pub fn message_at(&self, offset: u64) -> u64 {
        match self.message_count() {
            Some(count) if self.total_len == Some(offset) => count,
            _ => offset / self.message_len,
        }
    }

    /// Length of the longest message, in bytes.
    #[must_use]
    pub fn longest_message(&self) -> u64 {
        self.total_len.unwrap_or(u64::MAX).min(self.message_len)
    }

    /// Number of messages; `None` while the total is unknown.
    #[must_use]
    pub fn message_count(&self) -> Option<u64> {
        self.total_len.map(|total| total.div_ceil(self.message_len))
    }
}

/// Why a receiver refuses a transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Refusal {
    /// Speaks another version of this protocol.
    Version,
    /// START makes no sense.
    Malformed,
    /// The messages are longer than the receiver's limit.
    TooLarge,
    /// The output exists and may not be overwritten.
    Exists,
    /// The output cannot be created or written.
    NotWritable,
    /// The file system has not enough free bytes.
    DiskFull,
    /// The sender's address is not allowed.
    NotAllowed,
    /// As many transfers as the receiver takes at once are under way.
    Busy,
}

/// How a transfer ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Status {
    /// Every byte is there.
    Complete,
    /// The sender gave up.
    Aborted,
    /// The receiver could not write.
    WriteFailed,
    /// A message did not arrive whole.
    Incomplete,
    /// Messages contradict the plan: wrong length, twice the same, past the end.
    Inconsistent,
    /// Nothing came for too long.
    TimedOut,
    /// The receiver was told to stop.
    Stopped,
    /// The receiver does not know this transfer.
    Unknown,
}

/// A control message.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Control {
    /// Sender: may this transfer come?
    Start {
        /// Its number.
        transfer: TransferId,
        /// Whether the data travels as IP fragments (`ipfrag`), for the receiver's report.
        ipfrag: bool,
        /// Its shape.
        plan: Plan,
        /// The same number whenever this file is sent from there; `None` for what has no name.
        key: Option<u64>,
        /// Whether to go on with what the receiver has of it.
        resume: bool,
    },
    /// Receiver: it may.
    Ready {
        /// Its number.
        transfer: TransferId,
        /// How many bytes the receiver has that may be the file's beginning; 0 when it is not to go on with them.
        held: u64,
    },
    /// Sender: which bytes are these?
    Check {
        /// Its number.
        transfer: TransferId,
        /// Where the first block begins, in bytes.
        offset: u64,
        /// Length of each block but the last, which may be shorter; above 0.
        block_len: u64,
        /// Where the last one ends: behind the first byte, and [`DIGESTS_MAX`] blocks at most.
        end: u64,
    },
    /// Receiver: these; perhaps fewer than were asked for.
    Digests {
        /// Its number.
        transfer: TransferId,
        /// As in the question.
        offset: u64,
        /// As in the question.
        block_len: u64,
        /// One for each block.
        digests: Vec<Digest>,
    },
    /// Sender: what comes begins at this message; what lies before is the file's.
    Begin {
        /// Its number.
        transfer: TransferId,
        /// Index of the first message.
        first: u64,
    },
    /// Receiver: let it come.
    Begun {
        /// Its number.
        transfer: TransferId,
        /// As in BEGIN.
        first: u64,
    },
    /// Receiver: it may not.
    Refused {
        /// Its number.
        transfer: TransferId,
        /// Why, for programs.
        refusal: Refusal,
        /// Why and what to do, for people.
        text: String,
    },
    /// Sender: that was all (or: no more comes). Asks for a RESULT.
    End {
        /// Its number.
        transfer: TransferId,
        /// [`Status::Complete`], or why it ends early.
        status: Status,
        /// Bytes sent.
        bytes: u64,
        /// Messages sent.
        messages: u64,
    },
    /// Receiver: how it ended.
    Result {
        /// Its number.
        transfer: TransferId,
        /// How.
        status: Status,
        /// Bytes written.
        bytes: u64,
        /// Messages written.
        messages: u64,
        /// What went wrong and what to do, for people.
        text: String,
    },
    /// Sender: still here, the data is slow in coming (standard input).
    Alive {
        /// Its number.
        transfer: TransferId,
    },
}

/// Why bytes are no control message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ControlError {
    /// Too short, another magic, an unknown kind, or numbers that contradict each other.
    Malformed,
    /// Another version; reported before anything else of the message is looked at.
    Version {
        /// The version that the peer speaks.
        theirs: u8,
        /// The transfer that it is about, when that field is legal.
        transfer: Option<TransferId>,
    },
    /// A START whose plan cannot be carried out (no bytes, no message length, more than 2^32 messages).
    ImpossiblePlan {
        /// The transfer that it is about.
        transfer: TransferId,
    },
}

impl Control {
    /// The transfer that it is about.
    #[must_use]
    pub fn transfer(&self) -> TransferId {
        match self {
            Control::Start { transfer, .. }
            | Control::Ready { transfer, .. }
            | Control::Check { transfer, .. }
            | Control::Digests { transfer, .. }
            | Control::Begin { transfer, .. }
            | Control::Begun { transfer, .. }
            | Control::Refused { transfer, .. }
            | Control::End { transfer, .. }
            | Control::Result { transfer, .. }
            | Control::Alive { transfer } => *transfer,
        }
    }

    /// The text for people, where there is one.
    fn text_mut(&mut self) -> Option<&mut String> {
        match self {
            Control::Refused { text, .. } | Control::Result { text, .. } => Some(text),
            _ => None,
        }
    }

    /// The message's bytes, at most [`CONTROL_LEN_MAX`]. Texts are cut at 400 bytes.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut control = self.clone();
        if let Some(text) = control.text_mut() {
            text.truncate(cut(text).len());
        }
        let mut out = Vec::with_capacity(CONTROL_LEN_MAX);
        out.extend_from_slice(&MAGIC);
        out.extend_from_slice(&[VERSION, 0, 0, 0]);
        out.extend_from_slice(&self.transfer().number().to_be_bytes());
        postcard::to_extend(&control, out).expect("numbers, texts and digests")
    }

    /// Reads a control message.
    ///
    /// # Errors
    /// See [`ControlError`]; never panics, whatever the bytes.
    pub fn parse(bytes: &[u8]) -> Result<Control, ControlError> {
        let (head, body) = bytes
            .split_first_chunk::<HEAD_LEN>()
            .ok_or(ControlError::Malformed)?;
        if head[..4] != MAGIC {
            return Err(ControlError::Malformed);
        }
        if head[4] != VERSION {
            let transfer = TransferId::new(u32::from_be_bytes([head[8], head[9], head[10], head[11]]));
            return Err(ControlError::Version {
                theirs: head[4],
                transfer,
            });
        }
        let mut control: Control = postcard::from_bytes(body).map_err(|_| ControlError::Malformed)?;
        match &control {
            Control::Start { transfer, plan, .. }
                if Plan::new(plan.total_len, plan.message_len).is_none() =>
            {
                return Err(ControlError::ImpossiblePlan { transfer: *transfer });
            }
            Control::Check {
                offset,
                block_len,
                end,
                ..
            } => {
                let is_some = *block_len > 0 && offset < end;
                if !is_some || (end - offset).div_ceil(*block_len) > DIGESTS_MAX as u64 {
                    return Err(ControlError::Malformed);
                }
            }
            Control::Digests { digests, .. } if digests.len() > DIGESTS_MAX => {
                return Err(ControlError::Malformed);
            }
            _ => {}
        }
        if let Some(text) = control.text_mut() {
            *text = printable(text);
        }
        Ok(control)
    }
}

/// Text of a peer, safe to show on a terminal: one line, no control characters (escape sequences), no direction
/// marks, at most [`TEXT_LEN_MAX`] bytes.
fn printable(text: &str) -> String {
    let shown: String = text
        .chars()
        .map(|c| if is_printable(c) { c } else { '?' })
        .collect();
    cut(&shown).to_owned()
}

fn is_printable(c: char) -> bool {
    !c.is_control() && !matches!(c, '\u{200b}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

/// At most [`TEXT_LEN_MAX`] bytes of `text`, whole characters.
fn cut(text: &str) -> &str {
    let fits = |end: &usize| text.is_char_boundary(*end);
    &text[..(0..=text.len().min(TEXT_LEN_MAX)).rev().find(fits).unwrap_or(0)]
}

#[cfg(test)]
#[path = "wire_tests.rs"]
mod tests;
