//! Messages that are sent while they are written: how much of each may be sent, which its [writer](crate::MessageWriter) says by a watermark.

use std::sync::Arc;
use std::time::Duration;

use lm_protocol::geometry::Geometry;
use lm_protocol::streaming::{self, Announcements, Grain, Release, Watermark};
use lm_protocol::time::Time;
use lm_protocol::window::WindowShape;
use lm_protocol::wire::Addressing;

use super::{Outbound, Outgoing, OutgoingTable};
use crate::completion::{Completion, Outcome, PeerId, SendToken};
use crate::release::Released;
use crate::words::Words;

/// What a receiver bears at least of a message that does not come: how much is released is said four times as often.
const MESSAGE_TIMEOUT: Duration = Duration::from_secs(2);

/// What is known of a message's writer.
#[derive(Debug)]
pub(crate) struct Stream {
    /// `None`: the message is settled, and its writer writes for nobody.
    watermark: Option<Arc<Watermark>>,
    released: streaming::Released,
    announcements: Announcements,
    window: WindowShape,
    /// Its writer may still write to the message's memory.
    pub(super) is_held: bool,
}

/// What keeps the session's next message from being sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stall {
    /// All that its writer released was sent.
    Writer,
    /// So many messages, from the next on, were given up by their writers, and the receiver has not settled them.
    Aborted(u32),
}

impl Stream {
    /// Its receiver is another, which knows nothing.
    pub(super) fn announce_anew(&mut self) {
        self.announcements = Announcements::new(MESSAGE_TIMEOUT);
    }

    /// The message is settled. Its writer sees that it shares the watermark with nobody.
    pub(super) fn end(&mut self) {
        self.watermark = None;
    }

    /// Whether its windows are those of a session.
    pub(super) fn is_cut_for(&self, window: WindowShape) -> bool {
        self.window == window
    }
}

impl Outgoing {
    /// All of it may be sent.
    pub(super) fn is_whole(&self) -> bool {
        self.end == self.geometry.fragment_count()
    }

    /// How much of it may be sent.
    pub(super) fn release(&self) -> Release {
        (self.stream.as_ref()).map_or(Release::Whole, |stream| stream.released.release())
    }

    /// Its writer gave up.
    pub(super) fn is_aborted(&self) -> bool {
        self.release() == Release::Aborted
    }

    /// All that its writer released was sent.
    fn waits_for_writer(&self) -> bool {
        (self.stream.as_ref()).is_some_and(|stream| stream.released.waits_for_writer(self.position))
    }

    /// How much of it may be sent is to be announced.
    fn is_news(&mut self, now: Time) -> bool {
        let release = self.release();
        let stream = self.stream.as_mut();
        stream.is_some_and(|stream| stream.announcements.next(release, now).is_some())
    }

    /// Looks how far its writer is.
    fn hear_writer(&mut self) {
        let Some(stream) = &mut self.stream else { return };
        let Some(watermark) = &stream.watermark else {
            return;
        };
        // The load acquires what the writer wrote there: from here on those fragments are read, and headers are written before them.
        stream.released.hear(watermark.seen());
        self.end = match stream.released.release() {
            // There may be padding behind it.
            Release::Whole => self.geometry.fragment_count(),
            Release::Windows(_) | Release::Aborted => stream.released.fragments(),
        };
    }
}

impl Outbound {
    /// How a message of so many bytes is cut; `None`: it has more windows than can be told.
    pub(crate) fn grain(&self, len: u64) -> Option<Grain> {
        Grain::new(len, self.terms.layout.payload_len(), self.terms.window)
    }

    /// Whether it is to be said, once, that this session's receiver takes messages when they are whole.
    pub(crate) fn says_whole(&mut self) -> bool {
        !self.terms.takes_streams && !std::mem::replace(&mut self.has_said_whole, true)
    }

    /// Takes a message over of which nothing is written. The caller asked for room here and in the table. Gives its slot and what its writer
    /// tells its progress by.
    pub(crate) fn begin(
        &mut self,
        table: &mut OutgoingTable,
        addressing: &Addressing,
        memory: (Released, u64, Geometry, u64),
        (tag, grain): (u64, Grain),
        token: SendToken,
        now_ns: u64,
    ) -> (u16, Arc<Watermark>) {
        let watermark = Arc::new(Watermark::new());
        let mut outgoing = self.outgoing(addressing, memory, (tag, Words::NONE), token, now_ns);
        outgoing.end = 0;
        outgoing.stream = Some(Box::new(Stream {
            watermark: Some(Arc::clone(&watermark)),
            released: streaming::Released::new(grain),
            announcements: Announcements::new(MESSAGE_TIMEOUT),
            window: self.terms.window,
            is_held: true,
        }));
        let slot = table.insert(outgoing);
        self.streams += 1;
        match self.terms.takes_streams {
            true => self.add(table, addressing, slot),
            false => self.unwritten.push_back(slot),
        }
        (slot, watermark)
    }

    /// Looks how far writers are. Whether one gave a message up that nobody was told of.
    #[cold]
    pub(crate) fn hear_writers(
        &mut self,
        table: &mut OutgoingTable,
        addressing: &Addressing,
        now_ns: u64,
    ) -> bool {
        let mut gave_up = false;
        for _ in 0..self.unwritten.len() {
            let Some(slot) = self.unwritten.pop_front() else {
                break;
            };
            let outgoing = table.at(slot);
            outgoing.hear_writer();
            gave_up |= outgoing.is_aborted();
            match outgoing.is_whole() {
                true => self.add(table, addressing, slot),
                false => self.unwritten.push_back(slot),
            }
        }
        for &slot in &self.queue {
            let outgoing = table.at(slot);
            outgoing.hear_writer();
            if outgoing.is_news(Time::from_nanos(now_ns)) {
                let number = outgoing.number;
                let first = self.news.take().map_or(number, |news| news.start);
                self.news = Some(first..number.wrapping_add(1));
            }
        }
        self.stall = self.stall(table);
        gave_up
    }

    /// What keeps the session's next message from being sent.
    fn stall(&self, table: &mut OutgoingTable) -> Option<Stall> {
        let next = table.at(*self.queue.get(self.sending)?);
        if next.waits_for_writer() {
            return Some(Stall::Writer);
        }
        if next.position < next.end {
            return None;
        }
        let rest = self.queue.range(self.sending..);
        let aborted = rest.take_while(|&&slot| table.at(slot).is_aborted());
        Some(Stall::Aborted(aborted.count() as u32))
    }

    /// A message is the session's next.
    pub(super) fn add(&mut self, table: &mut OutgoingTable, addressing: &Addressing, slot: u16) {
        let outgoing = table.at(slot);
        outgoing.number = self.next_number;
        outgoing.template = self.template(addressing, &outgoing.geometry);
        self.next_number = self.next_number.wrapping_add(1);
        self.queue.push_back(slot);
    }

    /// Settles the next message of which the receiver was not told because it is not whole: all of them when the session `ended`, and those that
    /// their writers gave up.
    pub(super) fn settle_unwritten(
        &mut self,
        table: &mut OutgoingTable,
        peer: PeerId,
        ended: Option<&Outcome>,
        now_ns: u64,
    ) -> Option<(Completion, Option<Released>)> {
        let is_over = |slot: &u16| ended.is_some() || table.at(*slot).is_aborted();
        let at = self.unwritten.iter().position(is_over)?;
        let slot = self.unwritten.remove(at)?;
        self.streams -= 1;
        let outcome = match table.at(slot).is_aborted() {
            true => Outcome::Aborted,
            false => ended?.clone(),
        };
        Some(table.settle(slot, peer, outcome, now_ns))
    }
}
