//! One transfer under way.

use std::ops::Deref;
use std::time::Instant;

use super::quota::Quota;
use super::{CHECK_MAX, EARLY_MAX, Incoming, Over, Totals};
use crate::output::{Destination, OutputError};
use crate::transfer::progress::{Arrival, Sequence};
use crate::transfer::wire::{Digest, Status};

impl<P, M: Deref<Target = [u8]>> Incoming<P, M> {
    pub(super) fn split(self) -> (Over<P>, Destination) {
        let over = Over {
            peer: self.peer,
            from: self.from,
            transfer: self.transfer,
            sequence: self.sequence,
            written: self.written,
            resumed: self.resumed,
        };
        (over, self.destination)
    }

    /// Digests of blocks of what is there: as many as a second is enough for.
    pub(super) fn digests(
        &self,
        offset: u64,
        block_len: u64,
        end: u64,
        between: &mut dyn FnMut() -> bool,
    ) -> Vec<Digest> {
        let (began, end) = (Instant::now(), end.min(self.destination.held()));
        let mut digests = Vec::new();
        let mut from = offset;
        while self.searching && from < end && began.elapsed() < CHECK_MAX {
            let to = from.saturating_add(block_len).min(end);
            match self.destination.digest(from, to, between) {
                Ok(digest) => digests.push(digest),
                // What cannot be read is sent again.
                Err(_) => break,
            }
            from = to;
        }
        digests
    }

    /// What comes begins at message `first`. Said again it changes nothing.
    pub(super) fn begin(&mut self, first: u64) -> Result<(), (Status, String)> {
        if !self.searching {
            return Ok(());
        }
        let sequence = Sequence::resumed(self.plan, first);
        let len = sequence.bytes();
        if len > self.destination.held() {
            let text = "the sender goes on behind what is there; send again".to_owned();
            return Err((Status::Inconsistent, text));
        }
        self.destination
            .cut(len)
            .map_err(|error| (Status::WriteFailed, error.text))?;
        self.sequence = sequence;
        self.resumed = len;
        self.searching = false;
        Ok(())
    }

    /// Writes message `index`, or keeps it until its turn.
    pub(super) fn take(
        &mut self,
        index: u32,
        message: M,
        (totals, quota): (&mut Totals, &mut Quota),
        between: &mut dyn FnMut() -> bool,
    ) -> Result<(), (Status, String)> {
        if self.searching {
            let text = "data came before its beginning was said; send again".to_owned();
            return Err((Status::Inconsistent, text));
        }
        let arrival = self.sequence.arrived(index, message.len() as u64);
        let arrival = arrival.map_err(|text| (Status::Inconsistent, text.to_owned()))?;
        if self.destination.in_order() && arrival == Arrival::Early {
            if self.early.len() == EARLY_MAX {
                let text =
                    "messages came further out of order than a stream can bear; write to a file instead";
                return Err((Status::Inconsistent, text.to_owned()));
            }
            self.early.push((index, message));
            return Ok(());
        }
        self.write(index, &message, (&mut *totals, &mut *quota), between)?;
        // Early ones whose turn it is now; the memory of each goes back as soon as it is written.
        let mut turn = index;
        while !self.early.is_empty() {
            turn = turn.wrapping_add(1);
            let Some(position) = self.early.iter().position(|(index, _)| *index == turn) else {
                break;
            };
            let (index, message) = self.early.swap_remove(position);
            self.write(index, &message, (&mut *totals, &mut *quota), between)?;
        }
        Ok(())
    }

    /// Writes what is not written of message `index`.
    pub(super) fn write(
        &mut self,
        index: u32,
        bytes: &[u8],
        (totals, quota): (&mut Totals, &mut Quota),
        between: &mut dyn FnMut() -> bool,
    ) -> Result<(), (Status, String)> {
        let (offset, len) = (self.sequence.offset(index), bytes.len() as u64);
        let shown = self.take_shown(index, len)?;
        let failed = |error: OutputError| (Status::WriteFailed, error.text);
        quota.check(len - shown.bytes()).map_err(failed)?;
        for (number, part) in shown.rest().enumerate() {
            if number > 0 {
                between();
            }
            let rest = &bytes[part.start as usize..part.end as usize];
            let written = self.destination.write_at(offset + part.start, rest, between);
            written.map_err(failed)?;
            quota.taken += rest.len() as u64;
            self.written += rest.len() as u64;
        }
        totals.bytes += len;
        totals.messages += 1;
        Ok(())
    }
}
