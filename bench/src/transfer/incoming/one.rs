//! One transfer under way.

use std::ops::Deref;
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use super::hashing::{Hasher, Question};
use super::places::{BYTE_TIME, patience_with};
use super::quota::Quota;
use super::{AHEAD_MAX, Broken, EARLY_MAX, Incoming, Totals};
use crate::transfer::progress::Sequence;

impl<P, M: Deref<Target = [u8]>> Incoming<P, M> {
    /// Asks for the digests of blocks of what is there. One question is worked at; the sender waits for its answer, or is at fault.
    pub(super) fn ask(&mut self, (offset, block_len, end): (u64, u64, u64), hasher: &mut Hasher) {
        if !self.searching || self.question.is_some() {
            return;
        }
        let Ok(file) = self.destination.reader() else {
            return;
        };
        let question = Arc::new(Question {
            from: self.tally.from,
            file,
            offset,
            block_len,
            end: end.min(self.destination.held()),
            answer: OnceLock::new(),
        });
        self.question = hasher.ask(&question).then_some(question);
    }

    /// These bytes came.
    pub(super) fn came(&mut self, bytes: u64, now: Instant) {
        let counts = BYTE_TIME.saturating_mul(bytes.try_into().unwrap_or(u32::MAX));
        self.idle_at = (self.idle_at.max(now) + counts).min(now + patience_with(self.plan));
        self.last_heard = now;
    }

    /// What comes begins at message `first`. Said again it changes nothing.
    pub(super) fn begin(&mut self, first: u64) -> Result<(), Broken> {
        if !self.searching {
            return Ok(());
        }
        let sequence = Sequence::resumed(self.plan, first);
        let len = sequence.bytes();
        if len > self.destination.held() {
            return Err("the sender goes on behind what is there; send again".into());
        }
        self.destination.cut(len)?;
        self.tally.sequence = sequence;
        self.tally.resumed = len;
        self.searching = false;
        self.question = None;
        Ok(())
    }

    /// Writes message `index`, or keeps it until its turn.
    pub(super) fn take(
        &mut self,
        index: u32,
        message: M,
        (totals, quota): (&mut Totals, &mut Quota),
        between: &mut dyn FnMut() -> bool,
    ) -> Result<(), Broken> {
        if self.searching {
            return Err("data came before its beginning was said; send again".into());
        }
        self.tally.sequence.arrived(index, message.len() as u64)?;
        if !self.is_due(index) {
            let most = [AHEAD_MAX, EARLY_MAX][usize::from(self.destination.in_order())];
            if self.early.len() == most {
                return Err("messages came further out of order than can be borne; send smaller ones".into());
            }
            self.early.push((index, message));
            return Ok(());
        }
        self.write(index, &message, (&mut *totals, &mut *quota), between)?;
        drop(message);
        // Early ones whose turn it is now; the memory of each goes back as soon as it is written.
        self.early.sort_by_key(|(index, _)| *index);
        while self.early.first().is_some_and(|(index, _)| self.is_due(*index)) {
            let (index, message) = self.early.remove(0);
            self.write(index, &message, (&mut *totals, &mut *quota), between)?;
        }
        Ok(())
    }

    /// Writes what is not written of message `index`.
    fn write(
        &mut self,
        index: u32,
        bytes: &[u8],
        (totals, quota): (&mut Totals, &mut Quota),
        between: &mut dyn FnMut() -> bool,
    ) -> Result<(), Broken> {
        let (offset, len) = (self.tally.sequence.offset(index), bytes.len() as u64);
        let shown = self.take_shown(index, len)?;
        quota.check(len - shown.bytes())?;
        for (number, part) in shown.rest().enumerate() {
            if number > 0 {
                between();
            }
            let rest = &bytes[part.start as usize..part.end as usize];
            self.destination.write_at(offset + part.start, rest, between)?;
            quota.taken += rest.len() as u64;
            self.tally.written += rest.len() as u64;
        }
        totals.bytes += len;
        totals.messages += 1;
        Ok(())
    }
}
