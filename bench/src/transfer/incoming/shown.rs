//! What is written of messages that are arriving: bytes are final as soon as they are shown, in whatever order that is. A message counts
//! when it is whole, and then only its rest is to be written.

use std::ops::{Deref, Range};
use std::time::Instant;

use super::quota::Quota;
use super::{AHEAD_LEN_MAX, Broken, Incoming, Receiver};
use crate::output::FILE_PIECE_LEN;

/// A message that is arriving, and what is written of it.
#[derive(Debug)]
pub(super) struct Shown {
    index: u32,
    len: u64,
    /// Ascending ranges that neither touch nor are empty.
    written: Vec<Range<u64>>,
}

impl Shown {
    pub(super) fn new(index: u32, len: u64) -> Shown {
        let written = Vec::new();
        Shown { index, len, written }
    }

    /// Bytes that are written.
    pub(super) fn bytes(&self) -> u64 {
        self.written.iter().map(|range| range.end - range.start).sum()
    }

    /// What is not written.
    pub(super) fn rest(&self) -> impl Iterator<Item = Range<u64>> + '_ {
        let mut from = 0;
        std::iter::from_fn(move || {
            let part = self.unwritten(from..self.len);
            from = part.end;
            (!part.is_empty()).then_some(part)
        })
    }

    /// The first bytes of a range that are not written; empty where all are.
    fn unwritten(&self, range: Range<u64>) -> Range<u64> {
        let next = (self.written).partition_point(|written| written.start <= range.start);
        let before = self.written[..next].last();
        let start = before.map_or(range.start, |written| range.start.max(written.end));
        let behind = self.written.get(next);
        let end = behind.map_or(range.end, |written| range.end.min(written.start));
        start..end
    }

    /// These bytes, of which none was written, are.
    fn wrote(&mut self, range: Range<u64>) {
        let from = self.written.partition_point(|written| written.end < range.start);
        let to = self.written.partition_point(|written| written.start <= range.end);
        let touched = &self.written[from..to];
        let start = touched
            .first()
            .map_or(range.start, |first| first.start.min(range.start));
        let end = touched.last().map_or(range.end, |last| last.end.max(range.end));
        self.written.splice(from..to, Some(start..end));
    }
}

impl<P: Copy + Eq, M: Deref<Target = [u8]>> Receiver<P, M> {
    /// Whether a transfer of this peer's is under way.
    #[must_use]
    pub fn is_receiving_from(&self, peer: P) -> bool {
        self.active.iter().any(|incoming| incoming.tally.peer == peer)
    }

    /// Bytes that are written of messages that are not whole.
    #[must_use]
    pub fn shown_bytes(&self) -> u64 {
        let shown = self.active.iter().flat_map(|incoming| &incoming.shown);
        shown.map(Shown::bytes).sum()
    }

    /// Writes a piece of a message with this tag and length that is arriving: the first bytes of the ranges `shown`, which `get` gives,
    /// that are to be written and are not. `false`: there are none. `between` is as for [`on_message`](Self::on_message).
    pub fn on_shown<'a>(
        &mut self,
        peer: P,
        (tag, len): (u64, u64),
        shown: impl Iterator<Item = Range<u64>>,
        get: impl FnOnce(Range<u64>) -> Option<&'a [u8]>,
        now: Instant,
        between: &mut dyn FnMut() -> bool,
    ) -> bool {
        let Some((position, index)) = self.data(peer, tag) else {
            return false;
        };
        let incoming = &mut self.active[position];
        let Some(part) = incoming.next_shown((index, len), shown, &self.quota) else {
            return false;
        };
        let bytes = get(part.clone()).filter(|bytes| bytes.len() as u64 == part.end - part.start);
        let Some(bytes) = bytes else { return false };
        incoming.came(bytes.len() as u64, now);
        let written = incoming.write_shown((index, len), part, bytes, &mut self.quota, between);
        self.settle(position, written, now);
        true
    }
}

impl<P, M> Incoming<P, M> {
    /// Which bytes of a message are to be written next, of those that are `shown`. What would be refused when it is whole is not written
    /// before.
    fn next_shown(
        &mut self,
        (index, len): (u32, u64),
        mut shown: impl Iterator<Item = Range<u64>>,
        quota: &Quota,
    ) -> Option<Range<u64>> {
        let in_order = self.destination.in_order();
        if self.searching || !self.tally.sequence.expects(index, len, in_order) || !self.is_due(index) {
            return None;
        }
        let nothing = Shown::new(index, len);
        let known = self.shown.iter().find(|known| known.index == index);
        let known = known.unwrap_or(&nothing);
        let written = known.bytes();
        if known.len != len || quota.check(len - written).is_err() {
            return None;
        }
        let part = shown.find_map(|range| {
            let part = known.unwritten(range.start..range.end.min(len));
            (!part.is_empty()).then_some(part)
        })?;
        let is_due = !in_order || part.start == written;
        is_due.then(|| part.start..part.end.min(part.start + FILE_PIECE_LEN as u64))
    }

    fn write_shown(
        &mut self,
        (index, len): (u32, u64),
        part: Range<u64>,
        bytes: &[u8],
        quota: &mut Quota,
        between: &mut dyn FnMut() -> bool,
    ) -> Result<(), Broken> {
        let offset = self.tally.sequence.offset(index) + part.start;
        self.destination.write_at(offset, bytes, between)?;
        quota.taken += bytes.len() as u64;
        self.tally.written += bytes.len() as u64;
        let known = self.shown.iter().position(|known| known.index == index);
        let known = known.unwrap_or_else(|| {
            self.shown.push(Shown::new(index, len));
            self.shown.len() - 1
        });
        self.shown[known].wrote(part);
        Ok(())
    }

    /// What is written of a message that is whole now.
    pub(super) fn take_shown(&mut self, index: u32, len: u64) -> Result<Shown, Broken> {
        let known = self.shown.iter().position(|known| known.index == index);
        match known.map(|known| self.shown.swap_remove(known)) {
            Some(known) if known.len != len => {
                Err("a message has another length than was announced; send again".into())
            }
            known => Ok(known.unwrap_or_else(|| Shown::new(index, len))),
        }
    }

    /// Whether the message may be written before all that is missing ahead of it.
    pub(super) fn is_due(&self, index: u32) -> bool {
        let most = if self.destination.in_order() {
            0
        } else {
            AHEAD_LEN_MAX
        };
        let sequence = &self.tally.sequence;
        sequence.offset(index).saturating_sub(sequence.contiguous()) <= most
    }

    /// Takes away what lies behind the first message that is missing: no transfer can go on with it. Returns how many bytes of what was
    /// written that were; `None`: they are still there.
    pub(super) fn cut_loose(&mut self) -> Option<u64> {
        if self.searching {
            return Some(0);
        }
        let end = self.tally.sequence.contiguous();
        self.destination.cut(end).ok()?;
        let kept = end.saturating_sub(self.tally.resumed);
        Some(self.tally.written.saturating_sub(kept))
    }
}
