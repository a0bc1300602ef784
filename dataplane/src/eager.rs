//! Eager: messages of one fragment, which need no request. They leave from small transmit frames on the general
//! channel, and so do control packets (acknowledgements, announcements, credits).
//!
//! A transmit frame is free again when the kernel has sent it *and* the peer has acknowledged it (control
//! packets are never acknowledged). The unacknowledged ones of a peer form a list through the frames' records,
//! so that a thousand peers need no thousand queues.

use lm_protocol::serial;
use lm_protocol::wire::lm::EagerAcknowledgement;

use crate::bounds::{GENERAL_FRAMES, OnTheWay};
use crate::completion::{Completion, Outcome, PeerId, SendToken};
use crate::frames::{Frame, FramePool};

/// Transmit frames that eager messages may not take, so that acknowledgements and credits always find one.
const TRANSMIT_FRAMES_FOR_CONTROL: u32 = 128;

/// Eager messages that a peer may send before it has heard of us.
pub(crate) const EAGER_CREDIT_INITIAL: u32 = 64;
/// Eager messages that a peer may have unacknowledged at most. veth's ring has 256 entries, and the sender's credit is what keeps it
/// from overflowing, unless its own transmit completions do.
pub(crate) const EAGER_CREDIT: OnTheWay = OnTheWay { held: 192, most: 384 };
/// How old the number of the empty message is that asks where the receiver is: never the next one.
pub(crate) const EAGER_NEVER_NEXT: u32 = 1 << 30;
/// Acknowledge at the latest after this many eager messages.
pub(crate) const EAGER_ACK_EVERY: u32 = 96;

/// Our eager messages to a peer.
#[derive(Debug)]
pub(crate) struct EagerOut {
    /// Number of the next message.
    pub(crate) next: u32,
    /// All before it are acknowledged.
    pub(crate) acknowledged: u32,
    /// Numbers below may be sent.
    pub(crate) limit: u32,
    /// First and last transmit frame of the unacknowledged ones, in number order (linked by
    /// [`FrameRecord::next`]).
    pub(crate) oldest: Option<u32>,
    pub(crate) newest: Option<u32>,
    /// When the oldest one was sent or the last acknowledgement came, whichever is later.
    pub(crate) progress_ns: u64,
    /// When the peer was last asked where it is.
    pub(crate) asked_ns: u64,
    /// When unacknowledged messages were last sent again, and how often since the last progress.
    pub(crate) resent_ns: u64,
    pub(crate) resends: u32,
    /// How often the numbering began anew: after a loss that nobody repairs, the peer must not wait for the lost
    /// message for ever.
    pub(crate) epoch: u64,
    /// In the list of peers whose acknowledgements are awaited.
    pub(crate) watched: bool,
    /// The peer did not know us, and has acknowledged nothing since it was given the proof: what follows would come out of order.
    pub(crate) proving: bool,
}

impl EagerOut {
    pub(crate) fn new(now_ns: u64) -> EagerOut {
        EagerOut {
            next: 0,
            acknowledged: 0,
            limit: EAGER_CREDIT_INITIAL,
            oldest: None,
            newest: None,
            progress_ns: now_ns,
            asked_ns: now_ns,
            resent_ns: now_ns,
            resends: 0,
            epoch: 0,
            watched: false,
            proving: false,
        }
    }

    /// The incarnation under which this peer knows us; `own` is the endpoint's random number, whose bit 0 says whether there
    /// are digests.
    pub(crate) fn sender_id(&self, own: u64) -> u64 {
        own.wrapping_add(2 * self.epoch)
    }

    /// Begins a new numbering, as a new incarnation. Nothing may be unacknowledged.
    pub(crate) fn begin_anew(&mut self, now_ns: u64) {
        debug_assert!(self.oldest.is_none());
        *self = EagerOut {
            epoch: self.epoch + 1,
            watched: self.watched,
            ..EagerOut::new(now_ns)
        };
    }
}

/// A peer's eager messages to us.
#[derive(Debug, Default)]
pub(crate) struct EagerIn {
    /// The peer's incarnation, and which of its numberings; `None` until it sends.
    pub(crate) sender_id: Option<u64>,
    /// All before it arrived.
    pub(crate) next: u32,
    /// What we last told the peer.
    pub(crate) told_next: u32,
    pub(crate) told_limit: u32,
    /// When the last one arrived.
    pub(crate) last_ns: u64,
    /// Something was dropped that the peer may be waiting for: say again where we are.
    pub(crate) repeat: bool,
}

impl EagerIn {
    /// Of a peer that sent nothing yet, or begins its numbering anew.
    pub(crate) fn unheard() -> EagerIn {
        EagerIn {
            told_limit: EAGER_CREDIT_INITIAL,
            ..EagerIn::default()
        }
    }

    /// Messages that arrived and are not acknowledged.
    pub(crate) fn unacknowledged(&self) -> u32 {
        self.next.wrapping_sub(self.told_next)
    }

    /// Where we are, with credit for what `free_frames` general frames can take, and never less than the peer was told before, which
    /// keeps `uncompleted_max` packets uncompleted at most.
    pub(crate) fn acknowledgement(&self, free_frames: u32, uncompleted_max: u32) -> EagerAcknowledgement {
        let allowance = EAGER_CREDIT.of(uncompleted_max).min(free_frames / 4);
        EagerAcknowledgement {
            sender_id: self.sender_id.unwrap_or_default(),
            next: self.next,
            limit: serial::later(self.told_limit, self.next.wrapping_add(allowance)),
        }
    }

    /// This acknowledgement left.
    pub(crate) fn told(&mut self, acknowledgement: &EagerAcknowledgement) {
        self.told_next = acknowledgement.next;
        self.told_limit = acknowledgement.limit;
    }
}

/// What a transmit frame carries and who still needs it.
#[derive(Clone, Copy, Debug)]
struct FrameRecord {
    in_kernel: bool,
    unacknowledged: bool,
    next: Option<u32>,
    token: SendToken,
    tag: u64,
    len: u32,
    /// Bytes behind the message.
    trailer_len: u32,
    submitted_ns: u64,
}

/// The small transmit frames and their records.
#[derive(Debug)]
pub(crate) struct TransmitFrames {
    pool: FramePool,
    records: Vec<FrameRecord>,
}

impl TransmitFrames {
    pub(crate) fn new(pool: FramePool) -> TransmitFrames {
        let free = FrameRecord {
            in_kernel: false,
            unacknowledged: false,
            next: None,
            token: SendToken(0),
            tag: 0,
            len: 0,
            trailer_len: 0,
            submitted_ns: 0,
        };
        let records = vec![free; pool.count() as usize];
        TransmitFrames { pool, records }
    }

    /// Frames that are free now.
    #[cfg(any(test, feature = "fuzzing"))]
    pub(crate) fn available(&self) -> usize {
        self.pool.available()
    }

    /// A frame for a message, unless only those kept for control packets are left.
    #[inline]
    pub(crate) fn take_for_message(&mut self) -> Option<Frame> {
        if self.pool.available() <= TRANSMIT_FRAMES_FOR_CONTROL as usize {
            return None;
        }
        self.pool.take()
    }

    /// A frame for a control packet.
    #[inline]
    pub(crate) fn take_for_control(&mut self) -> Option<Frame> {
        self.pool.take()
    }

    /// Gives back a frame that was never sent.
    pub(crate) fn put(&mut self, frame: Frame) {
        self.pool.put(frame);
    }

    /// The token of a frame that the application gives back, by its address.
    pub(crate) fn reclaim(&self, address: u64) -> Option<Frame> {
        self.pool.reclaim(address)
    }

    /// The frame goes to the kernel and is needed no longer than the kernel needs it.
    #[inline]
    pub(crate) fn control_sent(&mut self, frame: Frame) {
        let index = self.index(frame.into_address());
        self.records[index].in_kernel = true;
        self.records[index].unacknowledged = false;
    }

    /// The frame carries an eager message of `len` bytes and `trailer_len` behind them: it goes to the end of its peer's list.
    /// `in_kernel` is false when the kernel has copied it already (UDP socket).
    #[inline]
    #[allow(clippy::too_many_arguments)]
    pub(crate) fn message_sent(
        &mut self,
        out: &mut EagerOut,
        frame: Frame,
        in_kernel: bool,
        token: SendToken,
        tag: u64,
        (len, trailer_len): (u32, u32),
        now_ns: u64,
    ) {
        let index = self.index(frame.into_address());
        self.records[index] = FrameRecord {
            in_kernel,
            unacknowledged: true,
            next: None,
            token,
            tag,
            len,
            trailer_len,
            submitted_ns: now_ns,
        };
        match out.newest {
            Some(newest) => self.records[newest as usize].next = Some(index as u32),
            None => {
                out.oldest = Some(index as u32);
                out.progress_ns = now_ns;
            }
        }
        out.newest = Some(index as u32);
        out.next = out.next.wrapping_add(1);
    }

    /// The device is done with the packet at `address`; whether it had one there. `None`: not a frame of this pool.
    #[inline]
    pub(crate) fn completed(&mut self, address: u64) -> Option<bool> {
        let index = self.pool.index_of(address)?;
        let was_sent = std::mem::take(&mut self.records[index].in_kernel);
        if was_sent {
            self.free_if_done(index);
        }
        Some(was_sent)
    }

    /// Takes an acknowledgement: all messages before `next` arrived, numbers below `limit` may be sent.
    /// `false`: it acknowledges what was never sent, or allows more than any receiver has frames for; nothing changed.
    pub(crate) fn acknowledged(
        &mut self,
        out: &mut EagerOut,
        peer: PeerId,
        next: u32,
        limit: u32,
        now_ns: u64,
        mut settled: impl FnMut(Completion),
    ) -> bool {
        // A limit far off would pass for one that lies behind, and no honest one would ever be later.
        let allowance = serial::distance(next, limit);
        if serial::precedes(out.next, next) || !(0..=GENERAL_FRAMES as i32).contains(&allowance) {
            return false;
        }
        out.limit = serial::later(out.limit, limit);
        // An answer that confirms nothing new is no progress: what it does not confirm may be lost.
        if serial::precedes(out.acknowledged, next) || out.oldest.is_none() {
            out.progress_ns = now_ns;
            out.resends = 0;
        }
        while serial::precedes(out.acknowledged, next) {
            self.settle_oldest(out, peer, Outcome::Delivered, now_ns, &mut settled);
        }
        true
    }

    /// Settles the oldest unacknowledged message of a peer.
    pub(crate) fn settle_oldest(
        &mut self,
        out: &mut EagerOut,
        peer: PeerId,
        outcome: Outcome,
        now_ns: u64,
        mut settled: impl FnMut(Completion),
    ) {
        let Some(oldest) = out.oldest else { return };
        let record = &mut self.records[oldest as usize];
        record.unacknowledged = false;
        let done = *record;
        out.oldest = done.next;
        if out.oldest.is_none() {
            out.newest = None;
        }
        out.acknowledged = out.acknowledged.wrapping_add(1);
        self.free_if_done(oldest as usize);
        settled(Completion {
            token: done.token,
            peer,
            tag: done.tag,
            len: u64::from(done.len),
            latency_ns: now_ns.saturating_sub(done.submitted_ns),
            outcome,
        });
    }

    /// An unacknowledged message: UMEM address of its frame, its length and that of what is behind it in bytes, whether the kernel
    /// still has it, and the next one in number order.
    pub(crate) fn unacknowledged(&self, index: u32) -> (u64, (u32, u32), bool, Option<u32>) {
        let record = &self.records[index as usize];
        let address = self.pool.reclaim_index(index as usize).into_address();
        let lens = (record.len, record.trailer_len);
        (address, lens, record.in_kernel, record.next)
    }

    /// An unacknowledged message goes to the kernel once more.
    pub(crate) fn sent_again(&mut self, index: u32) {
        self.records[index as usize].in_kernel = true;
    }

    #[inline]
    fn free_if_done(&mut self, index: usize) {
        let record = &self.records[index];
        if !record.in_kernel && !record.unacknowledged {
            let frame = self.pool.reclaim_index(index);
            self.pool.put(frame);
        }
    }

    #[inline]
    fn index(&self, address: u64) -> usize {
        self.pool
            .index_of(address)
            .expect("a transmit frame lies in its pool")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn out() -> EagerOut {
        let start = u32::MAX - 1;
        let limit = start.wrapping_add(EAGER_CREDIT_INITIAL);
        EagerOut {
            next: start,
            acknowledged: start,
            limit,
            ..EagerOut::new(0)
        }
    }

    #[test]
    fn a_frame_is_free_only_when_sent_and_acknowledged() {
        let mut frames = TransmitFrames::new(FramePool::new(0, 2048, 256));
        let mut out = out();
        let peer = PeerId {
            index: 3,
            generation: 1,
        };
        let mut addresses = Vec::new();
        for n in 0..4 {
            let frame = frames.take_for_message().unwrap();
            addresses.push(frame.address());
            frames.message_sent(&mut out, frame, true, SendToken(n), n * 10, (100, 8), n);
        }
        assert_eq!(out.next, 2, "message numbers wrap");
        assert_eq!(frames.completed(addresses[0] + 2), Some(true));
        assert_eq!(frames.pool.available(), 252, "sent but not acknowledged");

        let mut settled = Vec::new();
        assert!(frames.acknowledged(&mut out, peer, 1, 40, 9, |c| settled.push(c)));
        assert_eq!(
            settled.iter().map(|c| (c.token.0, c.tag)).collect::<Vec<_>>(),
            [(0, 0), (1, 10), (2, 20)]
        );
        assert!(
            settled
                .iter()
                .all(|c| c.outcome == Outcome::Delivered && c.peer == peer)
        );
        assert_eq!(
            frames.pool.available(),
            253,
            "two of them are still in the kernel"
        );
        assert_eq!([1, 2].map(|at| frames.completed(addresses[at])), [Some(true); 2]);
        assert_eq!(frames.completed(addresses[2]), Some(false), "it was");
        assert_eq!(frames.pool.available(), 255);

        assert!(!frames.acknowledged(&mut out, peer, 3, 40, 9, |_| panic!("nothing to settle")));
        frames.settle_oldest(&mut out, peer, Outcome::TimedOut, 9, |c| settled.push(c));
        assert_eq!(settled.last().unwrap().outcome, Outcome::TimedOut);
        assert!(out.oldest.is_none() && out.newest.is_none());
        assert_eq!(frames.completed(addresses[3]), Some(true));
        assert_eq!(frames.pool.available(), 256);
        assert_eq!(frames.completed(256 * 2048), None);
    }

    #[test]
    fn control_packets_have_frames_of_their_own() {
        let mut frames = TransmitFrames::new(FramePool::new(0, 2048, TRANSMIT_FRAMES_FOR_CONTROL + 1));
        let message = frames.take_for_message().unwrap();
        assert!(frames.take_for_message().is_none());
        let control = frames.take_for_control().unwrap();
        let address = control.address();
        frames.control_sent(control);
        assert_eq!(frames.completed(address), Some(true));
        frames.put(message);
        assert_eq!(frames.pool.available(), TRANSMIT_FRAMES_FOR_CONTROL as usize + 1);
    }
}
