//! Messages as an application has them: how one is sent and what became of it, one that came and what is known of it.

use std::ops::Deref;
use std::time::Duration;

use lm_dataplane::{Message, PeerId};
use lm_protocol::time::Time;

use crate::pool::Block;
use crate::queues::HeldFrame;

/// From when on a message is of no use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Deadline {
    /// So long after it is sent.
    In(Duration),
    /// At this moment of the clock that [`RealTime::new`](crate::RealTime::new) was given.
    At(Time),
}

/// How a message is sent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SendOptions {
    /// 0 to 7; 7 leaves first.
    pub priority: u8,
    /// `None`: it is never late.
    pub deadline: Option<Deadline>,
}

/// What became of a message in lent memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum SendOutcome {
    /// It left: its last packet was completed. Or its queue was built anew meanwhile, so that nobody knows.
    Left,
    /// Its deadline passed before.
    Late,
    /// It gave way to newer ones.
    Superseded,
    /// Its socket was connected to another peer before, or the endpoint has no frame that takes it.
    Unsent,
}

/// What is known of a message beside its bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Info {
    /// Who sent it.
    pub from: PeerId,
    /// Its number in its flow.
    pub number: u32,
    /// 0 to 7.
    pub priority: u8,
    /// When it was sent, by its sender's clock.
    pub sent_at: Time,
    /// When it came, by this host's.
    pub received_at: Time,
    /// How much longer it took than the fastest of the last ten seconds.
    pub delay: Duration,
    /// Messages that did not come since the one before.
    pub lost: u32,
    /// It came behind its deadline.
    pub late: bool,
}

/// Where a message lies.
#[derive(Debug)]
pub(crate) enum Bytes {
    /// Where it came in. The frame is given back before it is counted as free.
    Frame {
        message: Message,
        len: usize,
        _held: HeldFrame,
    },
    /// Put together.
    Block(Block),
}

/// A real-time message: of one packet where it came in, of several in a block of its socket. Its memory goes back when it is dropped.
#[derive(Debug)]
pub struct RtMessage {
    pub(crate) bytes: Bytes,
    pub(crate) info: Info,
}

impl RtMessage {
    /// What is known of it.
    pub fn info(&self) -> &Info {
        &self.info
    }
}

impl Deref for RtMessage {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match &self.bytes {
            Bytes::Frame { message, len, .. } => &message[..*len],
            Bytes::Block(block) => block.bytes(),
        }
    }
}
