//! Where a socket's thread and the endpoint's meet: queues with one producer and one consumer, in which neither waits for the other, however
//! the two are scheduled. All memory is taken when the socket opens.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use lm_dataplane::Waker;
use lm_protocol::time::Time;
use rtrb::{Consumer, Producer, RingBuffer};

use crate::latest::{Reader, Writer, latest};
use crate::message::{RtMessage, SendOutcome};
use crate::pool::{Block, RtBuffer};
use crate::sending::Sent;
use crate::statistics::Counts;

/// A message on its way from the socket to the endpoint.
#[derive(Debug)]
pub(crate) struct Order {
    pub(crate) payload: Block,
    /// The application gets the block back ([`RtSocket::unlocked`](crate::RtSocket::unlocked)).
    pub(crate) is_lent: bool,
    pub(crate) priority: u8,
    pub(crate) deadline: Option<Time>,
    pub(crate) sent_at: Time,
    /// Whom the socket was connected to.
    pub(crate) flow: Arc<Sent>,
}

/// Lent memory on its way back.
type Unlocked = (RtBuffer, SendOutcome);

/// What both threads see of a socket.
#[derive(Debug)]
pub(crate) struct SocketState {
    pub(crate) counts: Counts,
    pub(crate) drops_late: bool,
    pub(crate) same_host: bool,
    /// Wakes the socket's thread.
    pub(crate) waker: Waker,
    /// Frames in which messages of one packet may be, and in which they are.
    frames: (u32, AtomicU32),
    is_closed: AtomicBool,
}

impl SocketState {
    pub(crate) fn new(drops_late: bool, same_host: bool, frames: u32) -> io::Result<SocketState> {
        Ok(SocketState {
            counts: Counts::default(),
            drops_late,
            same_host,
            waker: Waker::new()?,
            frames: (frames, AtomicU32::new(0)),
            is_closed: AtomicBool::new(false),
        })
    }

    /// A frame for a message of one packet; `None`: the socket, or its application, has all that are reserved for it.
    pub(crate) fn hold_frame(self: &Arc<SocketState>) -> Option<HeldFrame> {
        let (most, held) = &self.frames;
        // Relaxed: one thread counts up; a number that is too high for a moment refuses a message that comes in that moment.
        if held.load(Ordering::Relaxed) >= *most {
            return None;
        }
        held.fetch_add(1, Ordering::Relaxed);
        Some(HeldFrame(Arc::clone(self)))
    }

    pub(crate) fn frames(&self) -> u32 {
        self.frames.0
    }

    /// The socket is gone. What the endpoint has of it, it gives up when it looks.
    pub(crate) fn close(&self) {
        // Release: nothing is ordered by it but the end itself.
        self.is_closed.store(true, Ordering::Release);
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.is_closed.load(Ordering::Acquire)
    }
}

/// A frame of a socket's is a message, until this is dropped.
#[derive(Debug)]
pub(crate) struct HeldFrame(Arc<SocketState>);

impl Drop for HeldFrame {
    fn drop(&mut self) {
        self.0.frames.1.fetch_sub(1, Ordering::Relaxed);
    }
}

/// The socket's ends.
#[derive(Debug)]
pub(crate) struct SocketEnds {
    pub(crate) orders: Producer<Order>,
    pub(crate) arrived: Reader<RtMessage>,
    pub(crate) unlocked: Consumer<Unlocked>,
}

/// The endpoint's ends of what leaves.
#[derive(Debug)]
pub(crate) struct LeavingEnds {
    pub(crate) state: Arc<SocketState>,
    pub(crate) orders: Consumer<Order>,
    unlocked: Producer<Unlocked>,
}

/// The endpoint's end of what arrives.
#[derive(Debug)]
pub(crate) struct ArrivingEnd {
    pub(crate) state: Arc<SocketState>,
    arrived: Writer<RtMessage>,
}

/// The queues of a socket that has `blocks` for messages to be sent and keeps the last `keep` that came.
pub(crate) fn queues(
    state: SocketState,
    blocks: usize,
    keep: usize,
) -> (SocketEnds, LeavingEnds, ArrivingEnd) {
    let state = Arc::new(state);
    // Each message has a block of its own, so that there is always room for it, and for its way back.
    let (order, orders) = RingBuffer::new(blocks);
    let (unlock, unlocked) = RingBuffer::new(blocks);
    let (arrive, arrived) = latest(keep);
    let of_socket = SocketEnds {
        orders: order,
        arrived,
        unlocked,
    };
    let of_leaving = LeavingEnds {
        state: Arc::clone(&state),
        orders,
        unlocked: unlock,
    };
    let of_arriving = ArrivingEnd {
        state,
        arrived: arrive,
    };
    (of_socket, of_leaving, of_arriving)
}

impl LeavingEnds {
    /// Nobody reads a message any more: lent memory goes back.
    pub(crate) fn unlock(&mut self, order: Order, outcome: SendOutcome) {
        if order.is_lent {
            let _ = self.unlocked.push((RtBuffer::whole(order.payload), outcome));
            self.state.waker.wake();
        }
    }
}

impl ArrivingEnd {
    /// Keeps the last messages: the oldest gives way.
    pub(crate) fn deliver(&mut self, message: RtMessage) {
        if self.arrived.put(message).is_some() {
            let superseded = &self.state.counts.superseded_here;
            superseded.fetch_add(1, Ordering::Relaxed);
        }
        self.state.waker.wake();
    }
}
