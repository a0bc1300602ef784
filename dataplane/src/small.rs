//! Small messages: those that come, on the general channel, and what is owed for them.

use std::collections::VecDeque;

use crate::frames::FramePool;
use crate::handlers::Handlers;
use crate::port::RxQueue;
use crate::stream::Stream;

/// Receive side of the general channel.
#[derive(Debug)]
pub(crate) struct General<R> {
    pub(crate) queue: u32,
    pub(crate) rx: R,
    /// Packets received, counted as the gate counts them.
    pub(crate) received: u64,
    /// Frames ever posted, counted likewise: in zero-copy mode the gate redirects so many packets, without those that are kept for
    /// the driver.
    pub(crate) posted: u64,
    /// The driver was woken since the channel was opened.
    pub(crate) woken: bool,
}

pub(crate) struct Small<R> {
    pub(crate) general: Option<General<R>>,
    /// General frames.
    pub(crate) frames: FramePool,
    /// How many of them are messages now.
    pub(crate) held: u32,
    /// Who takes packets that are neither messages nor ours.
    pub(crate) handlers: Handlers,
    /// Whether messages come in a stream, or go to and fro.
    pub(crate) stream: Stream,
    /// Peers that are owed an acknowledgement.
    pub(crate) acknowledge: VecDeque<u16>,
    /// Peers with messages of ours that they have not acknowledged.
    pub(crate) unconfirmed: Vec<u16>,
}

impl<R: RxQueue> Small<R> {
    /// Whether packets have come since the round looked for some: what they ask for goes before the next burst.
    #[inline]
    pub(crate) fn has_come(&mut self) -> bool {
        let general = self.general.as_mut();
        general.is_some_and(|general| general.rx.available(1) > 0)
    }
}
