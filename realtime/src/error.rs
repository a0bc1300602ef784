//! Why there is no socket, and why a message is not sent: one line each, with what to do.

use std::io;

use lm_dataplane::{FlowError, HandlerError, SendError as MessageError};
use lm_protocol::smoother::ParametersError;

use crate::pool::RtBuffer;

/// Why there is no socket.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OpenError {
    /// Another socket has the number.
    #[error("a real-time socket has number {0} already; close that one, or choose another number")]
    Taken(u16),
    /// No message could wait, or leave.
    #[error("a real-time socket keeps at least one message and has at least one frame")]
    Empty,
    /// A period that is shorter than a round.
    #[error("a period of a real-time socket has {} µs at least; leave it out if none is \
             expected", crate::socket::PERIOD_LEAST.as_micros())]
    Period,
    /// So many descriptors has no device.
    #[error("a real-time socket has at most {0} frames; ask for fewer")]
    ManyFrames(u32),
    /// Blocks of a kind are fewer than messages that may have one.
    #[error(
        "{count} blocks of {pages} pages are too few: of {keep} messages that wait, one that comes and one in use \
         each has one; ask for {least}, for none, or keep fewer messages", least = keep + 2
    )]
    FewBlocks {
        /// Pages of such a block.
        pages: u64,
        /// How many were asked for.
        count: u32,
        /// Messages that the socket keeps.
        keep: usize,
    },
    /// Memory for blocks.
    #[error(
        "no memory for a socket's blocks, which is locked: {0}; ask for fewer, or allow more (ulimit -l, or \
         LimitMEMLOCK= of its unit)"
    )]
    Blocks(#[source] io::Error),
    /// Other sockets have declared too much.
    #[error(
        "sockets on this interface declare three quarters of its link at most, and {0} packets a second are left; \
         declare fewer, or close others"
    )]
    Rate(u64),
    /// No descriptor by which threads wake each other.
    #[error("no descriptor for a real-time socket's wake-ups: {0}; close others, or allow more (ulimit -n)")]
    Waker(#[source] io::Error),
    /// Frames that packets come into.
    #[error(
        "no frames are left for what a real-time socket receives: {0}; keep fewer messages, or close other sockets"
    )]
    ReceiveFrames(#[source] HandlerError),
    /// Real time was made for another endpoint.
    #[error("this is not the endpoint that the socket's real time was made for; pass that one")]
    OtherEndpoint,
    /// The endpoint has other handlers for these packets.
    #[error("this endpoint has real time already: {0}")]
    Handler(#[from] HandlerError),
    /// Frames and descriptors.
    #[error("no memory or descriptors are left for a real-time socket: {0}")]
    Flow(#[from] FlowError),
    /// The message by which a peer hears of this endpoint.
    #[error("the peer cannot hear of this endpoint: {0}")]
    Greeting(#[source] MessageError),
    /// The smoother's parameters.
    #[error("{0}")]
    Smoother(#[from] ParametersError),
}

/// Why a message is not sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SendError {
    /// The socket has no peer.
    #[error("the socket is not connected; connect it first")]
    NotConnected,
    /// There is no block for it, and it does not fit a packet.
    #[error(
        "a real-time message has at most {0} bytes here; open the socket with longer blocks, or send it in parts"
    )]
    TooLong(usize),
    /// Its deadline is now, or was.
    #[error("the deadline of this message has passed: it was not sent; give a later one, or none")]
    Past,
    /// So many messages were sent since the endpoint was polled.
    #[error(
        "all of the socket's memory for a message of this length waits for the endpoint; poll it, or open the socket \
         with more blocks"
    )]
    NotPolled,
    /// The memory is lent by another socket.
    #[error("this memory is another socket's; send it there, or take some of this socket's")]
    Foreign,
}

/// Memory that was not sent.
#[derive(Debug, thiserror::Error)]
#[error("{reason}")]
pub struct NotSent {
    /// It, unlocked.
    pub buffer: RtBuffer,
    /// Why.
    pub reason: SendError,
}
