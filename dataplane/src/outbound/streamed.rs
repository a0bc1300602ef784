//! Messages that are sent while they are written: how much of each may be sent, which its [writer](crate::MessageWriter) says by a watermark.

use std::sync::Arc;

use lm_protocol::geometry::Geometry;
use lm_protocol::streaming::{self, Grain, Release, Watermark};
use lm_protocol::window::WindowShape;
use lm_protocol::wire::Addressing;

use super::{Outbound, Outgoing, OutgoingTable};
use crate::completion::{Completion, Outcome, PeerId, SendToken};
use crate::release::Released;
use crate::words::Words;

/// What is known of a message's writer.
#[derive(Debug)]
pub(crate) struct Stream {
    /// `None`: the message is settled, and its writer writes for nobody.
    watermark: Option<Arc<Watermark>>,
    released: streaming::Released,
    window: WindowShape,
    /// Its writer may still write to the message's memory.
    pub(super) is_held: bool,
}

impl Stream {
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

    /// Its writer gave up.
    pub(super) fn is_aborted(&self) -> bool {
        let stream = self.stream.as_ref();
        stream.is_some_and(|stream| stream.released.release() == Release::Aborted)
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
            window: self.terms.window,
            is_held: true,
        }));
        let slot = table.insert(outgoing);
        self.streams += 1;
        self.unwritten.push_back(slot);
        (slot, watermark)
    }

    /// Looks how far writers are. Whether one gave a message up that nobody was told of.
    #[cold]
    pub(crate) fn hear_writers(&mut self, table: &mut OutgoingTable, addressing: &Addressing) -> bool {
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
        gave_up
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
