//! Small packets on their way in: the general channel, the frames that its packets come into, and what is owed for messages among them.

use std::collections::VecDeque;

use crate::bounds::{GENERAL_FRAMES, GENERAL_FRAMES_FOR_SOCKET, PEERS_MAX};
use crate::eager::{EAGER_CREDIT, EagerOut};
use crate::frames::{Frame, FramePool};
use crate::handlers::{Handler, HandlerError, HandlerId, Handlers};
use crate::port::RxQueue;
use crate::ring::Descriptor;
use crate::stream::Stream;

/// General frames posted beside those that the peers' eager credits cover, for control packets; few enough to stay in the
/// cache.
const GENERAL_FRAMES_SPARE: u32 = 128;
/// Looks for packets between two idle rounds: some 20 ns each, with what the processor waits in `spin_loop`.
const LOOKS_MAX: u32 = 16;

/// Receive side of the general channel.
#[derive(Debug)]
pub(crate) struct General<R> {
    queue: u32,
    rx: R,
    /// Packets received, counted as the gate counts them.
    received: u64,
    /// Frames ever posted, counted likewise: in zero-copy mode the gate redirects so many packets, without those that are kept for
    /// the driver.
    posted: u64,
    /// Which frames are out, by their position: a port may name no other.
    out: Box<[bool]>,
    /// The driver was woken since the channel was opened.
    woken: bool,
}

impl<R: RxQueue> General<R> {
    pub(crate) fn new(queue: u32, rx: R) -> General<R> {
        General {
            queue,
            posted: rx.accepted(),
            received: rx.accepted(),
            out: vec![false; GENERAL_FRAMES as usize].into(),
            rx,
            woken: false,
        }
    }
}

pub(crate) struct Small<R> {
    /// Without one small packets come through the kernel's socket.
    general: Option<General<R>>,
    frames: FramePool,
    /// Frames that are messages now.
    held: u32,
    /// As [`crate::port::Caps::kept_frames`]; 0 in copy mode.
    kept_frames: u32,
    /// Reserved for what handlers keep.
    reserved: u32,
    /// Who takes packets that are neither messages nor ours.
    pub(crate) handlers: Handlers,
    /// Whether messages come in a stream, or go to and fro.
    pub(crate) stream: Stream,
    /// The same of packets that handlers take and flows send: an exchange of these ends rounds and changes nothing else,
    /// for as one of messages it would cost a stream a seventh.
    pub(crate) apart: Stream,
    /// Peers that are owed an acknowledgement.
    acknowledge: VecDeque<u16>,
    /// Peers with messages of ours that they have not acknowledged.
    unconfirmed: Vec<u16>,
}

impl<R: RxQueue> Small<R> {
    pub(crate) fn new(
        general: Option<General<R>>,
        frames: FramePool,
        kept_frames: u32,
        handlers: Handlers,
    ) -> Small<R> {
        Small {
            general,
            frames,
            held: 0,
            kept_frames,
            reserved: 0,
            handlers,
            stream: Stream::default(),
            apart: Stream::default(),
            acknowledge: VecDeque::with_capacity(PEERS_MAX),
            unconfirmed: Vec::with_capacity(PEERS_MAX),
        }
    }

    /// The number of the general queue.
    pub(crate) fn queue(&self) -> Option<u32> {
        self.general.as_ref().map(|general| general.queue)
    }

    /// Its receive side, and whether its driver was woken.
    pub(crate) fn receiver(&mut self) -> Option<(&mut R, &mut bool)> {
        let general = self.general.as_mut()?;
        Some((&mut general.rx, &mut general.woken))
    }

    /// How many packets have come, so many at most; `None`: there is no general channel.
    #[inline]
    pub(crate) fn available(&mut self, most: u32) -> Option<u32> {
        Some(self.general.as_mut()?.rx.available(most))
    }

    /// Whether packets have come since the round looked for some: what they ask for goes before the next burst.
    #[inline]
    pub(crate) fn has_come(&mut self) -> bool {
        self.available(1).is_some_and(|packets| packets > 0)
    }

    /// Looks for packets for less than a microsecond.
    pub(crate) fn linger(&mut self, mut landing: Option<&mut R>) {
        for _ in 0..LOOKS_MAX {
            let has_landed = (landing.as_mut()).is_some_and(|landing| landing.available(1) > 0);
            if has_landed || self.available(1).is_none_or(|packets| packets > 0) {
                break;
            }
            std::hint::spin_loop();
        }
    }

    /// A packet that has come, and the frame in which it lies, if that is one that was posted.
    #[inline]
    pub(crate) fn packet(&mut self, offset: u32) -> Option<(Descriptor, Option<Frame>)> {
        let general = self.general.as_mut()?;
        let descriptor = general.rx.packet(offset);
        let frame = (self.frames.index_within(descriptor.start(), descriptor.len))
            .filter(|&index| std::mem::take(&mut general.out[index]))
            .map(|index| self.frames.reclaim_index(index));
        general.received += u64::from(frame.is_some());
        Some((descriptor, frame))
    }

    /// So many packets are taken.
    #[inline]
    pub(crate) fn release(&mut self, packets: u32) {
        self.stream.looked(packets);
        if packets > 0
            && let Some(general) = &mut self.general
        {
            general.rx.release(packets);
        }
    }

    /// A frame for a packet that comes by another way.
    pub(crate) fn take_frame(&mut self) -> Option<Frame> {
        self.frames.take()
    }

    /// A packet was looked at. `None`: its frame is a message now.
    #[inline]
    pub(crate) fn looked_at(&mut self, frame: Option<Frame>) {
        match frame {
            Some(frame) => self.frames.put(frame),
            None => self.held += 1,
        }
    }

    /// The application is done with the message at `address`.
    pub(crate) fn recover(&mut self, address: u64) {
        if let Some(frame) = self.frames.reclaim(address) {
            self.frames.put(frame);
            self.held -= 1;
        }
    }

    /// Whether a packet for a handler may become a message: half of the frames are left to others. A handler with frames of its own has those,
    /// however many messages are shown, and keeps no more of itself.
    pub(crate) fn may_keep(&self, packet_type: u8) -> bool {
        match self.handlers.has_frames(packet_type) {
            // What was given back in this round counts still: half of the spare ones are for that.
            true => self.held + GENERAL_FRAMES_SPARE / 2 < self.frames_for_messages(),
            false => self.held < GENERAL_FRAMES / 2 && self.may_show(),
        }
    }

    /// Whether a message may be shown: it leaves frames that are reserved for handlers.
    #[inline]
    pub(crate) fn may_show(&self) -> bool {
        self.reserved == 0 || self.held + self.reserved + GENERAL_FRAMES_SPARE < self.frames_for_messages()
    }

    /// Reserves so many frames for what a handler keeps, instead of those before.
    pub(crate) fn reserve(&mut self, id: HandlerId, frames: u32) -> Result<(), HandlerError> {
        self.reserved = self.handlers.reserve(id, frames, GENERAL_FRAMES / 2)?;
        Ok(())
    }

    /// Takes a handler out, and what is reserved for it. `None`: there is none of that name.
    pub(crate) fn remove_handler(&mut self, id: HandlerId) -> Option<Box<dyn Handler>> {
        let _ = self.reserve(id, 0);
        self.handlers.remove(id)
    }

    fn frames_for_messages(&self) -> u32 {
        (GENERAL_FRAMES - GENERAL_FRAMES_FOR_SOCKET).saturating_sub(self.kept_frames)
    }

    /// Frames that are no messages and not kept for anything else.
    pub(crate) fn free_frames(&self) -> u32 {
        self.frames_for_messages()
            .saturating_sub(self.held)
            .saturating_sub(self.reserved)
    }

    /// Posts frames, each of which `prepare` hears of before.
    pub(crate) fn replenish(&mut self, peers: usize, mut prepare: impl FnMut(u64)) {
        let Some(general) = &mut self.general else { return };
        // The frames used last come first, and only as many as the peers' credits allow: a short list of
        // frames stays in the cache.
        let target = self.kept_frames + GENERAL_FRAMES_SPARE + EAGER_CREDIT.most * peers.max(1) as u32;
        let posted = general.posted.saturating_sub(general.received) as u32;
        let free = (self.frames.available() as u32).saturating_sub(GENERAL_FRAMES_FOR_SOCKET);
        let wanted = target.saturating_sub(posted).min(free);
        let count = match wanted {
            0 => 0,
            _ => general.rx.room(wanted).min(wanted),
        };
        for offset in 0..count {
            let frame = self.frames.take().expect("as many as were counted");
            prepare(frame.address());
            general.out[self.frames.index(&frame)] = true;
            general.rx.write(offset, frame.into_address());
        }
        if count > 0 {
            general.rx.submit(count);
            general.posted += u64::from(count);
            if self.kept_frames > 0 {
                let allowed = general.posted.saturating_sub(self.kept_frames.into());
                general.rx.allow(allowed);
            }
        }
    }

    /// A peer is owed an acknowledgement.
    pub(crate) fn owe(&mut self, peer: u16) {
        self.acknowledge.push_back(peer);
    }

    /// How many peers are owed one.
    pub(crate) fn owed(&self) -> usize {
        self.acknowledge.len()
    }

    /// The one that waits longest.
    pub(crate) fn first_owed(&self) -> Option<u16> {
        self.acknowledge.front().copied()
    }

    pub(crate) fn take_owed(&mut self) -> Option<u16> {
        self.acknowledge.pop_front()
    }

    /// A peer owes us an acknowledgement, or more credit.
    #[inline]
    pub(crate) fn watch(&mut self, peer: u16, out: &mut EagerOut) {
        if !out.watched {
            out.watched = true;
            self.unconfirmed.push(peer);
        }
    }

    /// Peers that do.
    pub(crate) fn watched(&self) -> &[u16] {
        &self.unconfirmed
    }

    /// The one at a position does no more.
    pub(crate) fn unwatch(&mut self, position: usize, out: &mut EagerOut) {
        out.watched = false;
        self.unconfirmed.swap_remove(position);
    }
}

/// For tests, which look inside.
#[cfg(any(test, feature = "fuzzing"))]
#[cfg_attr(not(test), allow(dead_code, reason = "the fuzzer uses a part of the tests"))]
impl<R: RxQueue> Small<R> {
    /// Frames that are free or posted, and those that are messages.
    pub(crate) fn frames(&self) -> (u32, u32) {
        let posted = (self.general.as_ref()).map_or(0, |general| (general.posted - general.received) as u32);
        (self.frames.available() as u32 + posted, self.held)
    }
}
