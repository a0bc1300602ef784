//! The sender's side of one transfer: what to say, which message comes next, how it ended.

use std::time::{Duration, Instant};

use super::resume::Search;
use super::wire::{Control, Digest, Plan, Refusal, Status, TransferId};

/// A question without an answer is asked again after this.
pub const REPEAT_EVERY: Duration = Duration::from_secs(1);

/// A receiver that said nothing for so long is asked again while the receiver reads what it has, which it says once a second.
const ASK_AGAIN_AFTER: Duration = Duration::from_secs(3);

/// The next message to send.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// Its tag.
    pub tag: u64,
    /// Where its bytes begin in the file.
    pub offset: u64,
    /// How many bytes it has; at most so many when the input's end is not known.
    pub len: u64,
}

/// How a transfer ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The receiver has every byte.
    Complete,
    /// The receiver did not want it.
    Refused {
        /// Why, for programs.
        refusal: Refusal,
        /// Why and what to do, in the receiver's words.
        text: String,
    },
    /// It broke under way.
    Failed {
        /// How, for programs.
        status: Status,
        /// Why and what to do.
        text: String,
    },
    /// The receiver stopped answering.
    Silent,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Phase {
    /// START was or is to be said.
    Asking,
    /// READY came; which of the receiver's bytes are the file's?
    Searching(Search),
    /// BEGIN was or is to be said.
    Beginning {
        first: u64,
    },
    /// Messages are handed over.
    Sending,
    /// Like `Sending`, to a host that says nothing.
    Unasked,
    /// All messages are handed over; RESULT is awaited.
    Ending,
    Over(Outcome),
}

/// One transfer being sent.
#[derive(Debug)]
pub struct Outgoing {
    transfer: TransferId,
    plan: Plan,
    ipfrag: bool,
    key: Option<u64>,
    resume: bool,
    phase: Phase,
    /// Messages handed over, which is the next one's index.
    messages: u64,
    bytes: u64,
    /// What of these the receiver had.
    resumed: (u64, u64),
    /// When to say something (again).
    speak_at: Instant,
    last_heard: Instant,
}

impl Outgoing {
    /// A transfer that begins now.
    #[must_use]
    pub fn new(transfer: TransferId, plan: Plan, ipfrag: bool, now: Instant) -> Self {
        let phase = Phase::Asking;
        Outgoing {
            transfer,
            plan,
            ipfrag,
            key: None,
            resume: false,
            phase,
            messages: 0,
            bytes: 0,
            resumed: (0, 0),
            speak_at: now,
            last_heard: now,
        }
    }

    /// Of the file with this key, going on with what the receiver has of it if `resume` is set.
    #[must_use]
    pub fn of_file(mut self, key: Option<u64>, resume: bool) -> Self {
        (self.key, self.resume) = (key, resume);
        self
    }

    /// A transfer that nobody was asked about and nobody confirms: it only cuts the input into pieces.
    #[must_use]
    pub fn unasked(plan: Plan, now: Instant) -> Self {
        // Never spoken: the number is of no consequence.
        let mut outgoing = Outgoing::new(TransferId::from_random(0), plan, true, now);
        outgoing.phase = Phase::Unasked;
        outgoing
    }

    /// The end, once there is one.
    #[must_use]
    pub fn outcome(&self) -> Option<&Outcome> {
        match &self.phase {
            Phase::Over(outcome) => Some(outcome),
            _ => None,
        }
    }

    /// Messages and bytes handed over so far.
    #[must_use]
    pub fn handed_over(&self) -> (u64, u64) {
        (self.messages - self.resumed.0, self.bytes - self.resumed.1)
    }

    /// Bytes that the receiver had.
    #[must_use]
    pub fn resumed_bytes(&self) -> u64 {
        self.resumed.1
    }

    /// The blocks of the file whose digests are wanted: first offset, length of each (the last one may be shorter) and end, in
    /// bytes.
    #[must_use]
    pub fn wanted(&self) -> Option<(u64, u64, u64)> {
        match &self.phase {
            Phase::Searching(search) => Some(search.blocks()),
            _ => None,
        }
    }

    /// Compares the file's digests of [`wanted`](Self::wanted) with the receiver's. `false`: these have not come yet.
    pub fn compare(&mut self, ours: &[Digest], now: Instant) -> bool {
        let Phase::Searching(search) = &mut self.phase else {
            return false;
        };
        if search.is_unanswered() {
            return false;
        }
        if let Some(verified) = search.compare(ours) {
            let first = self.plan.message_at(verified);
            self.phase = Phase::Beginning { first };
        }
        (self.speak_at, self.last_heard) = (now, now);
        true
    }

    /// The message to send next; `None` before READY and after the last one.
    #[must_use]
    pub fn next_piece(&self) -> Option<Piece> {
        if !self.is_sending() {
            return None;
        }
        // `Plan` bounds the count; `handed` ends a transfer of unknown length before the index runs out.
        let index = u32::try_from(self.messages).ok()?;
        let left = self
            .plan
            .total_len
            .map_or(self.plan.message_len, |total| total - self.bytes);
        let len = left.min(self.plan.message_len);
        Some(Piece {
            tag: self.transfer.data_tag(index),
            offset: self.bytes,
            len,
        })
    }

    /// The piece went on its way with `len` bytes.
    pub fn handed(&mut self, len: u64, now: Instant) {
        self.messages += 1;
        self.bytes += len;
        if self.plan.total_len == Some(self.bytes) {
            // The receiver can tell the end by itself: ask only if it says nothing.
            self.finish_sending(now + REPEAT_EVERY, now);
        } else if self.messages > u64::from(u32::MAX) {
            let text = "more than 2^32 messages; use a larger --message-size".to_owned();
            self.phase = Phase::Over(Outcome::Failed {
                status: Status::Aborted,
                text,
            });
        }
    }

    /// The input, whose length was not known, is at its end.
    pub fn input_ended(&mut self, now: Instant) {
        if self.is_sending() && self.plan.total_len.is_none() {
            self.finish_sending(now, now);
        }
    }

    fn is_sending(&self) -> bool {
        matches!(self.phase, Phase::Sending | Phase::Unasked)
    }

    fn finish_sending(&mut self, speak_at: Instant, now: Instant) {
        self.phase = Phase::Ending;
        self.speak_at = speak_at;
        self.last_heard = now;
    }

    /// A sign of life other than a control message: a data message was confirmed.
    pub fn heard(&mut self, now: Instant) {
        self.last_heard = now;
    }

    /// What to say now, if anything. Repeats itself until answered.
    pub fn poll_control(&mut self, now: Instant) -> Option<Control> {
        if now < self.speak_at {
            return None;
        }
        self.speak_at = now + REPEAT_EVERY;
        let transfer = self.transfer;
        match &mut self.phase {
            Phase::Asking => Some(Control::Start {
                transfer,
                ipfrag: self.ipfrag,
                plan: self.plan,
                key: self.key,
                resume: self.resume,
            }),
            Phase::Searching(search) => {
                let silent = now.saturating_duration_since(self.last_heard) >= ASK_AGAIN_AFTER;
                Some(search.say(transfer, silent))
            }
            Phase::Beginning { first } => Some(Control::Begin {
                transfer,
                first: *first,
            }),
            Phase::Sending => Some(Control::Alive { transfer }),
            Phase::Ending => Some(self.end(Status::Complete)),
            Phase::Unasked | Phase::Over(_) => None,
        }
    }

    /// What to say when giving up before the end; `None` when the receiver knows of nothing or of the end.
    #[must_use]
    pub fn abort(&self) -> Option<Control> {
        match self.phase {
            Phase::Over(Outcome::Complete | Outcome::Refused { .. }) => None,
            _ => Some(self.end(Status::Aborted)),
        }
    }

    fn end(&self, status: Status) -> Control {
        Control::End {
            transfer: self.transfer,
            status,
            bytes: self.bytes,
            messages: self.messages,
        }
    }

    /// Notices that the receiver has been silent for longer than `patience` while it owed an answer. A busy one says ALIVE every second.
    pub fn poll_timeout(&mut self, now: Instant, patience: Duration) {
        let owed = match &self.phase {
            Phase::Asking | Phase::Beginning { .. } | Phase::Ending => true,
            Phase::Searching(search) => search.is_unanswered(),
            _ => false,
        };
        if owed && now.saturating_duration_since(self.last_heard) > patience {
            self.phase = Phase::Over(Outcome::Silent);
        }
    }

    /// Takes in what the receiver says. Messages about other transfers, and kinds that only senders say, change
    /// nothing.
    pub fn handle(&mut self, control: Control, now: Instant) {
        if control.transfer() != self.transfer || matches!(self.phase, Phase::Over(_)) {
            return;
        }
        match control {
            Control::Ready { held, .. } => {
                self.last_heard = now;
                if self.phase == Phase::Asking {
                    (self.phase, self.speak_at) = match Search::new(self.plan, held) {
                        Some(search) if self.resume => (Phase::Searching(search), now),
                        _ => (Phase::Sending, now + REPEAT_EVERY),
                    };
                }
            }
            Control::Digests {
                offset,
                block_len,
                digests,
                ..
            } => {
                self.last_heard = now;
                if let Phase::Searching(search) = &mut self.phase {
                    search.answered(offset, block_len, digests);
                }
            }
            Control::Begun { first, .. } if self.phase == (Phase::Beginning { first }) => self.begun(now),
            Control::Alive { .. } => self.last_heard = now,
            Control::Refused { refusal, text, .. } if self.phase == Phase::Asking => {
                self.phase = Phase::Over(Outcome::Refused { refusal, text });
            }
            Control::Result {
                status,
                bytes,
                messages,
                text,
                ..
            } => {
                // Where nothing was to be sent the two answers come together.
                self.begun(now);
                self.phase = Phase::Over(self.judge(status, (bytes, messages), text));
            }
            Control::Start { .. }
            | Control::Check { .. }
            | Control::Begin { .. }
            | Control::Begun { .. }
            | Control::End { .. }
            | Control::Refused { .. } => {}
        }
    }

    fn begun(&mut self, now: Instant) {
        let Phase::Beginning { first } = self.phase else {
            return;
        };
        let before = first.saturating_mul(self.plan.message_len);
        let bytes = self.plan.total_len.map_or(before, |total| before.min(total));
        (self.messages, self.bytes) = (first, bytes);
        self.resumed = (first, bytes);
        (self.phase, self.speak_at) = (Phase::Sending, now + REPEAT_EVERY);
        if self.plan.total_len == Some(bytes) {
            self.finish_sending(now + REPEAT_EVERY, now);
        }
    }

    /// Success only when the receiver wrote exactly what was sent, and all of it was sent.
    fn judge(&self, status: Status, written: (u64, u64), text: String) -> Outcome {
        if status != Status::Complete {
            return Outcome::Failed { status, text };
        }
        if self.phase == Phase::Ending && written == (self.bytes, self.messages) {
            return Outcome::Complete;
        }
        let text = format!(
            "it reports {} bytes in {} messages where {} in {} were sent; send again",
            written.0, written.1, self.bytes, self.messages
        );
        Outcome::Failed {
            status: Status::Inconsistent,
            text,
        }
    }
}

#[cfg(test)]
#[path = "outgoing_tests.rs"]
mod tests;
