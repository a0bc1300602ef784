//! The control messages of a transfer: what `lm-send` and `lm-recv` say to each other beside the data.
//!
//! They are small LM messages whose tag is [`CONTROL_TAG`]. All numbers are big endian:
//!
//! ```text
//!   0               4       5       6       7       8               12      14      16
//!  +---------------+-------+-------+-------+-------+---------------+-------+-------+
//!  | "LMtr"        |version| kind  | code  |   0   | transfer      |textlen|   0   |
//!  +---------------+-------+-------+-------+-------+---------------+-------+-------+
//!  START:          total_len u64 | message_len u64 | message_count u64 | key u64
//!  READY:          held u64
//!  CHECK:          offset u64    | block_len u64   | end u64
//!  DIGESTS:        offset u64    | block_len u64
//!  BEGIN, BEGUN:   first u64
//!  END, RESULT:    bytes u64     | messages u64
//!  all:            textlen bytes: SHA-256 of blocks (DIGESTS), else UTF-8 for people
//! ```
//!
//! A data message has the tag `transfer << 32 | index` and nothing but the file's bytes as its payload. Transfer
//! numbers lie in 1..2^32-1, so no data tag equals [`CONTROL_TAG`].

use std::fmt;

/// The tag of control messages.
pub const CONTROL_TAG: u64 = u64::MAX;

/// The largest encoded control message, in bytes: fits one fragment at the smallest MTU, so it always goes eager.
pub const CONTROL_LEN_MAX: usize = HEAD_LEN + START_LEN + TEXT_LEN_MAX;

/// `total_len` and `message_count` of a transfer whose end is not known yet (standard input), and its key.
pub const UNKNOWN: u64 = u64::MAX;

/// Most blocks that one CHECK asks for.
pub const DIGESTS_MAX: usize = 12;

/// SHA-256 of a block of the file.
pub type Digest = [u8; 32];

const MAGIC: [u8; 4] = *b"LMtr";
const VERSION: u8 = 2;
const HEAD_LEN: usize = 16;
const START_LEN: usize = 32;
const COUNTS_LEN: usize = 16;
const CHECK_LEN: usize = 24;
const NUMBER_LEN: usize = 8;
/// Longest text in bytes; longer ones are cut.
const TEXT_LEN_MAX: usize = 400;
// IPv4 needs 576 bytes of MTU at least; 20 + 8 + 24 of them are IP, UDP and LM headers.
const _: () = assert!(CONTROL_LEN_MAX <= 576 - 52 && DIGESTS_MAX * size_of::<Digest>() <= TEXT_LEN_MAX);

/// Number of a transfer: unique among one sender's transfers, never 0 or `u32::MAX`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TransferId(u32);

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
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
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
            && total_len != Some(UNKNOWN)
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

    /// Number of messages; `None` while the total is unknown.
    #[must_use]
    pub fn message_count(&self) -> Option<u64> {
        self.total_len.map(|total| total.div_ceil(self.message_len))
    }
}

/// Why a receiver refuses a transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
#[non_exhaustive]
pub enum Refusal {
    /// Speaks another version of this protocol.
    Version = 1,
    /// START makes no sense.
    Malformed = 2,
    /// The messages are longer than the receiver's limit.
    TooLarge = 3,
    /// The output exists and may not be overwritten.
    Exists = 4,
    /// The output cannot be created or written.
    NotWritable = 5,
    /// The file system has not enough free bytes.
    DiskFull = 6,
    /// The sender's address is not allowed.
    NotAllowed = 7,
    /// As many transfers as the receiver takes at once are under way.
    Busy = 8,
}

impl Refusal {
    const ALL: [Refusal; 8] = [
        Refusal::Version,
        Refusal::Malformed,
        Refusal::TooLarge,
        Refusal::Exists,
        Refusal::NotWritable,
        Refusal::DiskFull,
        Refusal::NotAllowed,
        Refusal::Busy,
    ];
}

/// How a transfer ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
#[non_exhaustive]
pub enum Status {
    /// Every byte is there.
    Complete = 0,
    /// The sender gave up.
    Aborted = 1,
    /// The receiver could not write.
    WriteFailed = 2,
    /// A message did not arrive whole.
    Incomplete = 3,
    /// Messages contradict the plan: wrong length, twice the same, past the end.
    Inconsistent = 4,
    /// Nothing came for too long.
    TimedOut = 5,
    /// The receiver was told to stop.
    Stopped = 6,
    /// The receiver does not know this transfer.
    Unknown = 7,
}

impl Status {
    const ALL: [Status; 8] = [
        Status::Complete,
        Status::Aborted,
        Status::WriteFailed,
        Status::Incomplete,
        Status::Inconsistent,
        Status::TimedOut,
        Status::Stopped,
        Status::Unknown,
    ];
}

/// A control message.
#[derive(Clone, Debug, PartialEq, Eq)]
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
    /// Too short, another magic, an unknown kind or code, or lengths that contradict each other.
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

const START: u8 = 1;
const READY: u8 = 2;
const REFUSED: u8 = 3;
const END: u8 = 4;
const RESULT: u8 = 5;
const ALIVE: u8 = 6;
const CHECK: u8 = 7;
const DIGESTS: u8 = 8;
const BEGIN: u8 = 9;
const BEGUN: u8 = 10;

/// Bits of START's code.
const IPFRAG: u8 = 1;
const RESUME: u8 = 2;

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

    /// The message's bytes, at most [`CONTROL_LEN_MAX`]. Texts are cut at 400 bytes.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let blocks;
        let (kind, code, numbers, body): (u8, u8, &[u64], &[u8]) = match self {
            Control::Start {
                ipfrag,
                plan,
                key,
                resume,
                ..
            } => {
                let total = plan.total_len.unwrap_or(UNKNOWN);
                let count = plan.message_count().unwrap_or(UNKNOWN);
                let code = (u8::from(*ipfrag) * IPFRAG) | (u8::from(*resume) * RESUME);
                let key = key.unwrap_or(UNKNOWN);
                (START, code, &[total, plan.message_len, count, key], b"")
            }
            Control::Ready { held, .. } => (READY, 0, &[*held], b""),
            Control::Check {
                offset,
                block_len,
                end,
                ..
            } => (CHECK, 0, &[*offset, *block_len, *end], b""),
            Control::Digests {
                offset,
                block_len,
                digests,
                ..
            } => {
                blocks = digests.concat();
                (DIGESTS, 0, &[*offset, *block_len], &blocks)
            }
            Control::Begin { first, .. } => (BEGIN, 0, &[*first], b""),
            Control::Begun { first, .. } => (BEGUN, 0, &[*first], b""),
            Control::Refused { refusal, text, .. } => (REFUSED, *refusal as u8, &[], cut(text).as_bytes()),
            Control::End {
                status,
                bytes,
                messages,
                ..
            } => (END, *status as u8, &[*bytes, *messages], b""),
            Control::Result {
                status,
                bytes,
                messages,
                text,
                ..
            } => (RESULT, *status as u8, &[*bytes, *messages], cut(text).as_bytes()),
            Control::Alive { .. } => (ALIVE, 0, &[], b""),
        };
        let mut out = Vec::with_capacity(CONTROL_LEN_MAX);
        out.extend_from_slice(&MAGIC);
        out.extend_from_slice(&[VERSION, kind, code, 0]);
        out.extend_from_slice(&self.transfer().number().to_be_bytes());
        out.extend_from_slice(&(body.len() as u16).to_be_bytes());
        out.extend_from_slice(&[0, 0]);
        for number in numbers {
            out.extend_from_slice(&number.to_be_bytes());
        }
        out.extend_from_slice(body);
        out
    }

    /// Reads a control message. Reserved bytes and what follows the text are ignored, so that they can be given a
    /// meaning without a new version.
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
        let transfer = TransferId::new(u32::from_be_bytes([head[8], head[9], head[10], head[11]]));
        if head[4] != VERSION {
            return Err(ControlError::Version {
                theirs: head[4],
                transfer,
            });
        }
        let transfer = transfer.ok_or(ControlError::Malformed)?;
        let (kind, code) = (head[5], head[6]);
        let text_len = usize::from(u16::from_be_bytes([head[12], head[13]]));
        let numbers_len = match kind {
            START => START_LEN,
            END | RESULT | DIGESTS => COUNTS_LEN,
            CHECK => CHECK_LEN,
            READY | BEGIN | BEGUN => NUMBER_LEN,
            _ => 0,
        };
        let numbers = body.get(..numbers_len).ok_or(ControlError::Malformed)?;
        let number = |n: usize| {
            let mut eight = [0; 8];
            eight.copy_from_slice(&numbers[n * 8..][..8]);
            u64::from_be_bytes(eight)
        };
        let text = body
            .get(numbers_len..numbers_len + text_len)
            .ok_or(ControlError::Malformed)?;
        let status = || Status::ALL.into_iter().find(|status| *status as u8 == code);
        Ok(match kind {
            START => {
                let total_len = (number(0) != UNKNOWN).then(|| number(0));
                let plan =
                    Plan::new(total_len, number(1)).ok_or(ControlError::ImpossiblePlan { transfer })?;
                if number(2) != plan.message_count().unwrap_or(UNKNOWN) {
                    return Err(ControlError::ImpossiblePlan { transfer });
                }
                Control::Start {
                    transfer,
                    ipfrag: code & IPFRAG != 0,
                    plan,
                    key: (number(3) != UNKNOWN).then(|| number(3)),
                    resume: code & RESUME != 0,
                }
            }
            READY => Control::Ready {
                transfer,
                held: number(0),
            },
            CHECK => {
                let (offset, block_len, end) = (number(0), number(1), number(2));
                let is_some = block_len > 0 && offset < end;
                if !is_some || (end - offset).div_ceil(block_len) > DIGESTS_MAX as u64 {
                    return Err(ControlError::Malformed);
                }
                Control::Check {
                    transfer,
                    offset,
                    block_len,
                    end,
                }
            }
            DIGESTS => {
                let (digests, rest) = text.as_chunks::<{ size_of::<Digest>() }>();
                if digests.len() > DIGESTS_MAX || !rest.is_empty() {
                    return Err(ControlError::Malformed);
                }
                Control::Digests {
                    transfer,
                    offset: number(0),
                    block_len: number(1),
                    digests: digests.to_vec(),
                }
            }
            BEGIN => Control::Begin {
                transfer,
                first: number(0),
            },
            BEGUN => Control::Begun {
                transfer,
                first: number(0),
            },
            REFUSED => {
                let refusal = Refusal::ALL.into_iter().find(|refusal| *refusal as u8 == code);
                let refusal = refusal.ok_or(ControlError::Malformed)?;
                Control::Refused {
                    transfer,
                    refusal,
                    text: printable(text),
                }
            }
            END => Control::End {
                transfer,
                status: status().ok_or(ControlError::Malformed)?,
                bytes: number(0),
                messages: number(1),
            },
            RESULT => Control::Result {
                transfer,
                status: status().ok_or(ControlError::Malformed)?,
                bytes: number(0),
                messages: number(1),
                text: printable(text),
            },
            ALIVE => Control::Alive { transfer },
            _ => return Err(ControlError::Malformed),
        })
    }
}

/// Text of a peer, safe to show on a terminal: one line, no control characters (escape sequences), no direction
/// marks, at most [`TEXT_LEN_MAX`] bytes.
fn printable(text: &[u8]) -> String {
    let shown: String = String::from_utf8_lossy(text)
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
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn id(number: u32) -> TransferId {
        TransferId::new(number).unwrap()
    }

    #[test]
    fn start_byte_by_byte() {
        let plan = Plan::new(Some(5 << 20), 1 << 20).unwrap();
        let bytes = Control::Start {
            transfer: id(0x0102_0304),
            ipfrag: true,
            plan,
            key: Some(0x0506),
            resume: true,
        }
        .encode();
        assert_eq!(
            bytes,
            [
                b'L', b'M', b't', b'r', 2, 1, 3, 0, 1, 2, 3, 4, 0, 0, 0, 0, // head
                0, 0, 0, 0, 0, 0x50, 0, 0, // total_len
                0, 0, 0, 0, 0, 0x10, 0, 0, // message_len
                0, 0, 0, 0, 0, 0, 0, 5, // message_count
                0, 0, 0, 0, 0, 0, 5, 6, // key
            ]
        );
    }

    #[test]
    fn every_kind_survives_the_wire() {
        let transfer = id(7);
        let plan = |total| Plan::new(total, 1448).unwrap();
        let mut all = vec![
            Control::Start {
                transfer,
                ipfrag: false,
                plan: plan(None),
                key: None,
                resume: false,
            },
            Control::Start {
                transfer,
                ipfrag: true,
                plan: plan(Some(1)),
                key: Some(0),
                resume: true,
            },
            Control::Ready { transfer, held: 9 },
            Control::Alive { transfer },
            Control::Check {
                transfer,
                offset: 9,
                block_len: 2,
                end: 32,
            },
            Control::Digests {
                transfer,
                offset: 9,
                block_len: 2,
                digests: vec![[7; 32]; DIGESTS_MAX],
            },
            Control::Begin { transfer, first: 9 },
            Control::Begun { transfer, first: 9 },
        ];
        for refusal in Refusal::ALL {
            all.push(Control::Refused {
                transfer,
                refusal,
                text: "größer".into(),
            });
        }
        for status in Status::ALL {
            all.push(Control::End {
                transfer,
                status,
                bytes: 9,
                messages: 2,
            });
            all.push(Control::Result {
                transfer,
                status,
                bytes: 9,
                messages: 2,
                text: "x".into(),
            });
        }
        for control in all {
            let bytes = control.encode();
            assert!(bytes.len() <= CONTROL_LEN_MAX);
            assert_eq!(Control::parse(&bytes).as_ref(), Ok(&control));
            // Cut anywhere it is malformed, never a panic and never another message.
            for len in 0..bytes.len() {
                assert_eq!(
                    Control::parse(&bytes[..len]),
                    Err(ControlError::Malformed),
                    "{control:?} cut at {len}"
                );
            }
        }
    }

    #[test]
    fn another_version_is_told_before_anything_else() {
        let mut bytes = Control::Alive { transfer: id(7) }.encode();
        bytes[4] = 9;
        bytes[5] = 200;
        assert_eq!(
            Control::parse(&bytes),
            Err(ControlError::Version {
                theirs: 9,
                transfer: Some(id(7))
            })
        );
    }

    #[test]
    fn impossible_plans_are_refused() {
        for (total, message_len) in [
            (Some(0), 1),
            (Some(5), 0),
            (None, 0),
            (Some((1 << 32) + 1), 1),
            (Some(UNKNOWN), 1 << 40),
        ] {
            assert_eq!(Plan::new(total, message_len), None, "{total:?} {message_len}");
        }
        assert!(Plan::new(Some(1 << 32), 1).is_some());
        let mut bytes = Control::Start {
            transfer: id(7),
            ipfrag: false,
            plan: Plan::new(Some(10), 5).unwrap(),
            key: None,
            resume: false,
        }
        .encode();
        bytes[39] = 3;
        assert_eq!(
            Control::parse(&bytes),
            Err(ControlError::ImpossiblePlan { transfer: id(7) })
        );
    }

    #[test]
    fn data_tags_and_control_tags_never_meet() {
        for number in [1, 2, u32::MAX - 1] {
            for index in [0, 1, u32::MAX] {
                let tag = id(number).data_tag(index);
                assert_ne!(tag, CONTROL_TAG);
                assert_eq!(TransferId::from_data_tag(tag), Some((id(number), index)));
            }
        }
        assert_eq!(TransferId::from_data_tag(CONTROL_TAG), None);
        assert_eq!(TransferId::from_data_tag(7), None);
        assert_eq!(id(u32::MAX - 1).next(), id(1));
        assert_eq!(id(1).next(), id(2));
        assert_eq!(TransferId::from_random(u32::MAX).number(), 2);
    }

    #[test]
    fn a_peers_text_cannot_drive_the_terminal() {
        let text = "\u{1b}[2Jgone\r\n\u{202e}x";
        let bytes = Control::Refused {
            transfer: id(1),
            refusal: Refusal::Busy,
            text: text.into(),
        }
        .encode();
        let Ok(Control::Refused { text, .. }) = Control::parse(&bytes) else {
            panic!()
        };
        assert_eq!(text, "?[2Jgone???x");
        let long = Control::Refused {
            transfer: id(1),
            refusal: Refusal::Busy,
            text: "ö".repeat(1000),
        };
        let Ok(Control::Refused { text, .. }) = Control::parse(&long.encode()) else {
            panic!()
        };
        assert_eq!(text, "ö".repeat(200));
    }

    proptest! {
        #[test]
        fn random_bytes_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..600)) {
            let _ = Control::parse(&bytes);
        }

        /// Random bodies behind a good magic and version reach every branch.
        #[test]
        fn random_bodies_never_panic(kind in 0u8..12, bytes in proptest::collection::vec(any::<u8>(), 0..600)) {
            let mut message = b"LMtr\x02".to_vec();
            message.push(kind);
            message.extend(bytes);
            if let Ok(control) = Control::parse(&message) {
                prop_assert_eq!(Control::parse(&control.encode()), Ok(control));
            }
        }
    }
}
