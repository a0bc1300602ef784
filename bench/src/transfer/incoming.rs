//! The receiver's side of transfers: what comes in, where it is written, what is answered.
//!
//! Generic over who sends (`P`) and what a message is (`M`), so that tests need no endpoint. Nothing that a peer
//! sends makes it panic or take memory without bound: transfers under way, messages kept for their turn, answers
//! waiting and ended transfers remembered are all limited by constants.

use std::collections::VecDeque;
use std::net::Ipv4Addr;
use std::ops::Deref;
use std::time::{Duration, Instant};

use lm_admission::Policy;

use super::progress::{Arrival, Sequence};
use super::wire::{CONTROL_TAG, Control, ControlError, Plan, Refusal, Status, TransferId};
use crate::output::{Destination, Output, OutputError};
use crate::size::{ByteSize, approximate};

/// A transfer of which nothing was heard for so long has failed; a live sender says ALIVE every second.
pub const SILENCE_MAX: Duration = Duration::from_secs(10);

/// Messages that wait for their turn on a stream output. Only the last, short message can overtake long ones, so one
/// is what a well-behaved sender needs.
const EARLY_MAX: usize = 64;

/// Ended transfers whose RESULT can be asked for again.
const ENDED_MAX: usize = 256;

/// Answers that wait to be sent. More are dropped, the oldest first: senders ask again.
const REPLIES_MAX: usize = 256;

/// Events that wait to be told.
const EVENTS_MAX: usize = 256;

/// What a received message turned out to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Taken {
    /// File content, written or kept for its turn.
    Data,
    /// A control message.
    Control,
    /// Neither: no such transfer, or no control message that a receiver understands.
    Stray,
}

/// Something that the receiver's user may want to know.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// A transfer begins.
    Started {
        /// Who sends.
        from: Ipv4Addr,
        /// How many bytes, when the sender knows.
        total_len: Option<u64>,
    },
    /// A transfer is complete.
    Finished {
        /// Where its bytes are.
        name: String,
        /// How many.
        bytes: u64,
    },
    /// A transfer ended incomplete.
    Failed {
        /// Who sent.
        from: Ipv4Addr,
        /// Why and what to do.
        text: String,
    },
    /// A transfer was refused.
    Refused {
        /// Who asked.
        from: Ipv4Addr,
        /// Why and what to do.
        text: String,
    },
}

/// What was received so far.
#[derive(Clone, Copy, Debug, Default)]
pub struct Totals {
    /// Payload bytes written.
    pub bytes: u64,
    /// Messages written.
    pub messages: u64,
    /// Complete transfers.
    pub transfers: u64,
    /// Transfers that failed under way.
    pub failed_transfers: u64,
    /// Messages that belonged to no transfer.
    pub stray_data: u64,
    /// Control messages that could not be read or made no sense.
    pub stray_control: u64,
    /// Whether transfers came over `lm`, `ipfrag`.
    pub wires: [bool; 2],
    /// When the first transfer began.
    pub first_start: Option<Instant>,
    /// When the last transfer ended.
    pub last_end: Option<Instant>,
}

/// One transfer under way.
struct Incoming<P, M> {
    peer: P,
    from: Ipv4Addr,
    transfer: TransferId,
    destination: Destination,
    sequence: Sequence,
    /// Messages ahead of their turn, for a stream output.
    early: Vec<(u32, M)>,
    last_heard: Instant,
}

/// A transfer that is over, remembered for repeated questions.
struct Ended<P> {
    peer: P,
    answer: Control,
}

/// All transfers of one `lm-recv`.
pub struct Receiver<P, M> {
    output: Output,
    policy: Policy,
    active: Vec<Incoming<P, M>>,
    ended: VecDeque<Ended<P>>,
    replies: VecDeque<(P, Control)>,
    events: VecDeque<Event>,
    totals: Totals,
}

impl<P: Copy + Eq, M: Deref<Target = [u8]>> Receiver<P, M> {
    /// A receiver that writes to `output` what senders allowed by `policy` send.
    #[must_use]
    pub fn new(output: Output, policy: Policy) -> Self {
        Receiver {
            output,
            policy,
            active: Vec::new(),
            ended: VecDeque::new(),
            replies: VecDeque::new(),
            events: VecDeque::new(),
            totals: Totals::default(),
        }
    }

    /// What was received so far.
    #[must_use]
    pub fn totals(&self) -> &Totals {
        &self.totals
    }

    /// Whether no transfer is under way.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.active.is_empty()
    }

    /// The sum of the totals of the transfers under way, as far as their senders know them; for a progress bar.
    #[must_use]
    pub fn announced_bytes(&self) -> u64 {
        self.active
            .iter()
            .filter_map(|incoming| incoming.sequence.total_len())
            .sum()
    }

    /// The next answer to send, if any.
    pub fn take_reply(&mut self) -> Option<(P, Control)> {
        self.replies.pop_front()
    }

    /// Puts back an answer that could not be sent now.
    pub fn return_reply(&mut self, peer: P, control: Control) {
        self.replies.push_front((peer, control));
    }

    /// Whether answers wait to be sent.
    #[must_use]
    pub fn has_replies(&self) -> bool {
        !self.replies.is_empty()
    }

    /// The next event to tell, if any.
    pub fn take_event(&mut self) -> Option<Event> {
        self.events.pop_front()
    }

    /// Takes in one message. `between` is called now and then while it is written; see [`Destination::write_at`].
    pub fn on_message(
        &mut self,
        peer: P,
        from: Ipv4Addr,
        tag: u64,
        message: M,
        now: Instant,
        between: &mut dyn FnMut() -> bool,
    ) -> Taken {
        if tag == CONTROL_TAG {
            return self.on_control(peer, from, &message, now);
        }
        let known = TransferId::from_data_tag(tag)
            .and_then(|(transfer, index)| Some((self.position(peer, transfer)?, index)));
        let Some((position, index)) = known else {
            self.totals.stray_data += 1;
            return Taken::Stray;
        };
        let written = self.active[position].take(index, message, &mut self.totals, between);
        self.active[position].last_heard = now;
        self.settle(position, written, now);
        Taken::Data
    }

    /// Counts a message from nobody known.
    pub fn note_stray(&mut self, tag: u64) {
        if tag == CONTROL_TAG {
            self.totals.stray_control += 1;
        } else {
            self.totals.stray_data += 1;
        }
    }

    /// A message of `peer` did not arrive whole: its transfers cannot become complete any more.
    pub fn on_incomplete(&mut self, peer: P, what: &str, now: Instant) {
        while let Some(position) = self.active.iter().position(|incoming| incoming.peer == peer) {
            self.fail(position, Status::Incomplete, what.to_owned(), now);
        }
    }

    /// Gives up transfers whose sender has been silent for too long.
    pub fn poll_timeout(&mut self, now: Instant) {
        let silent =
            |incoming: &Incoming<P, M>| now.saturating_duration_since(incoming.last_heard) > SILENCE_MAX;
        while let Some(position) = self.active.iter().position(silent) {
            let text = format!(
                "nothing came for {} s; start the sender again",
                SILENCE_MAX.as_secs()
            );
            self.fail(position, Status::TimedOut, text, now);
        }
    }

    /// Gives up every transfer under way: the receiver is told to stop.
    pub fn stop(&mut self, now: Instant) {
        while !self.active.is_empty() {
            self.fail(
                0,
                Status::Stopped,
                "the receiver was stopped; start it again".to_owned(),
                now,
            );
        }
    }

    fn position(&self, peer: P, transfer: TransferId) -> Option<usize> {
        self.active
            .iter()
            .position(|incoming| incoming.peer == peer && incoming.transfer == transfer)
    }

    fn on_control(&mut self, peer: P, from: Ipv4Addr, message: &[u8], now: Instant) -> Taken {
        match Control::parse(message) {
            Ok(Control::Start {
                transfer,
                ipfrag,
                plan,
            }) => {
                self.on_start(peer, from, transfer, ipfrag, plan, now);
            }
            Ok(Control::End {
                transfer,
                status,
                bytes,
                messages,
            }) => {
                self.on_end(peer, transfer, status, (bytes, messages), now);
            }
            Ok(Control::Alive { transfer }) => {
                if let Some(position) = self.position(peer, transfer) {
                    self.active[position].last_heard = now;
                }
            }
            Err(ControlError::Version {
                theirs,
                transfer: Some(transfer),
            }) => {
                let text = format!(
                    "speaks another version of the transfer protocol ({theirs}); use the same release"
                );
                self.refuse(
                    peer,
                    from,
                    transfer,
                    OutputError {
                        refusal: Refusal::Version,
                        text,
                    },
                );
            }
            Err(ControlError::ImpossiblePlan { transfer }) => {
                let text = "asks for an impossible transfer; use larger messages".to_owned();
                self.refuse(
                    peer,
                    from,
                    transfer,
                    OutputError {
                        refusal: Refusal::Malformed,
                        text,
                    },
                );
            }
            // READY, REFUSED and RESULT are what a receiver says; the rest is noise.
            Ok(_) | Err(_) => {
                self.totals.stray_control += 1;
                return Taken::Stray;
            }
        }
        Taken::Control
    }

    fn on_start(
        &mut self,
        peer: P,
        from: Ipv4Addr,
        transfer: TransferId,
        ipfrag: bool,
        plan: Plan,
        now: Instant,
    ) {
        if let Some(position) = self.position(peer, transfer) {
            // Repeated because READY was late or lost.
            self.active[position].last_heard = now;
            return self.reply(peer, Control::Ready { transfer });
        }
        if let Some(answer) = self.ended_answer(peer, transfer) {
            return self.reply(peer, answer);
        }
        // A sender has one transfer under way: a new number means that it gave up the one before.
        if let Some(position) = self.active.iter().position(|incoming| incoming.peer == peer) {
            self.fail(
                position,
                Status::Aborted,
                "the sender began another transfer".to_owned(),
                now,
            );
        }
        match self.open(from, plan) {
            Ok(destination) => {
                self.totals.first_start.get_or_insert(now);
                self.totals.wires[usize::from(ipfrag)] = true;
                let sequence = Sequence::new(plan);
                let incoming = Incoming {
                    peer,
                    from,
                    transfer,
                    destination,
                    sequence,
                    early: Vec::new(),
                    last_heard: now,
                };
                self.active.push(incoming);
                self.tell(Event::Started {
                    from,
                    total_len: plan.total_len,
                });
                self.reply(peer, Control::Ready { transfer });
            }
            Err(error) => self.refuse(peer, from, transfer, error),
        }
    }

    /// Decides on a START and opens its destination.
    fn open(&mut self, from: Ipv4Addr, plan: Plan) -> Result<Destination, OutputError> {
        if !self.policy.allows(from) {
            let text = format!("{from} is not allowed; add --allow {from} at the receiver");
            return Err(OutputError {
                refusal: Refusal::NotAllowed,
                text,
            });
        }
        let longest = plan
            .total_len
            .map_or(plan.message_len, |total| total.min(plan.message_len));
        if longest > self.policy.max_message_len {
            let text = format!(
                "messages of {} are larger than the receiver's limit of {}; send with a smaller --message-size or start the receiver with a larger --max-message-size",
                ByteSize::new(longest),
                ByteSize::new(self.policy.max_message_len)
            );
            return Err(OutputError {
                refusal: Refusal::TooLarge,
                text,
            });
        }
        if self.active.len() >= self.output.concurrent_max() {
            let text = "another transfer is under way; try again when it has ended".to_owned();
            return Err(OutputError {
                refusal: Refusal::Busy,
                text,
            });
        }
        self.output.begin(plan.total_len)
    }

    fn on_end(
        &mut self,
        peer: P,
        transfer: TransferId,
        status: Status,
        (bytes, messages): (u64, u64),
        now: Instant,
    ) {
        let Some(position) = self.position(peer, transfer) else {
            let unknown = Control::Result {
                transfer,
                status: Status::Unknown,
                bytes: 0,
                messages: 0,
                text: "the receiver knows of no such transfer; send again".to_owned(),
            };
            let answer = self.ended_answer(peer, transfer).unwrap_or(unknown);
            return self.reply(peer, answer);
        };
        self.active[position].last_heard = now;
        if status != Status::Complete {
            return self.fail(position, Status::Aborted, "the sender gave up".to_owned(), now);
        }
        let ended = self.active[position].sequence.end(bytes, messages);
        if ended.is_ok() && !self.active[position].sequence.is_complete() {
            // A long message is still on its way; the sender must not think that we are gone.
            self.reply(peer, Control::Alive { transfer });
        }
        self.settle(
            position,
            ended.map_err(|text| (Status::Inconsistent, text.to_owned())),
            now,
        );
    }

    /// Ends the transfer at `position` if `step` failed or was its last.
    fn settle(&mut self, position: usize, step: Result<(), (Status, String)>, now: Instant) {
        match step {
            Err((status, text)) => self.fail(position, status, text, now),
            Ok(()) if self.active[position].sequence.is_complete() => self.finish(position, now),
            Ok(()) => {}
        }
    }

    fn finish(&mut self, position: usize, now: Instant) {
        let Incoming {
            peer,
            from,
            transfer,
            destination,
            sequence,
            ..
        } = self.active.swap_remove(position);
        let (status, text) = match destination.finish() {
            Ok(name) => {
                self.totals.transfers += 1;
                self.tell(Event::Finished {
                    name,
                    bytes: sequence.bytes(),
                });
                (Status::Complete, String::new())
            }
            Err(error) => {
                self.totals.failed_transfers += 1;
                self.tell(Event::Failed {
                    from,
                    text: error.text.clone(),
                });
                (Status::WriteFailed, error.text)
            }
        };
        self.end(peer, transfer, status, &sequence, text, now);
    }

    fn fail(&mut self, position: usize, status: Status, text: String, now: Instant) {
        // Dropping the destination removes the partial file.
        let Incoming {
            peer,
            from,
            transfer,
            sequence,
            ..
        } = self.active.swap_remove(position);
        self.output.failed();
        self.totals.failed_transfers += 1;
        let shown = format!("{text} (after {})", approximate(sequence.bytes()));
        self.tell(Event::Failed { from, text: shown });
        self.end(peer, transfer, status, &sequence, text, now);
    }

    fn end(
        &mut self,
        peer: P,
        transfer: TransferId,
        status: Status,
        sequence: &Sequence,
        text: String,
        now: Instant,
    ) {
        self.totals.last_end = Some(now);
        let (bytes, messages) = (sequence.bytes(), sequence.messages());
        let answer = Control::Result {
            transfer,
            status,
            bytes,
            messages,
            text,
        };
        if self.ended.len() == ENDED_MAX {
            self.ended.pop_front();
        }
        self.ended.push_back(Ended {
            peer,
            answer: answer.clone(),
        });
        self.reply(peer, answer);
    }

    fn ended_answer(&self, peer: P, transfer: TransferId) -> Option<Control> {
        let ended = self
            .ended
            .iter()
            .find(|ended| ended.peer == peer && ended.answer.transfer() == transfer);
        ended.map(|ended| ended.answer.clone())
    }

    fn refuse(&mut self, peer: P, from: Ipv4Addr, transfer: TransferId, error: OutputError) {
        let OutputError { refusal, text } = error;
        self.tell(Event::Refused {
            from,
            text: text.clone(),
        });
        self.reply(
            peer,
            Control::Refused {
                transfer,
                refusal,
                text,
            },
        );
    }

    fn reply(&mut self, peer: P, control: Control) {
        if self.replies.len() == REPLIES_MAX {
            self.replies.pop_front();
        }
        self.replies.push_back((peer, control));
    }

    fn tell(&mut self, event: Event) {
        if self.events.len() == EVENTS_MAX {
            self.events.pop_front();
        }
        self.events.push_back(event);
    }
}

impl<P, M: Deref<Target = [u8]>> Incoming<P, M> {
    /// Writes message `index`, or keeps it until its turn.
    fn take(
        &mut self,
        index: u32,
        message: M,
        totals: &mut Totals,
        between: &mut dyn FnMut() -> bool,
    ) -> Result<(), (Status, String)> {
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
        self.write(index, &message, totals, between)?;
        // Early ones whose turn it is now; the memory of each goes back as soon as it is written.
        let mut turn = index;
        while !self.early.is_empty() {
            turn = turn.wrapping_add(1);
            let Some(position) = self.early.iter().position(|(index, _)| *index == turn) else {
                break;
            };
            let (index, message) = self.early.swap_remove(position);
            self.write(index, &message, totals, between)?;
        }
        Ok(())
    }

    fn write(
        &mut self,
        index: u32,
        bytes: &[u8],
        totals: &mut Totals,
        between: &mut dyn FnMut() -> bool,
    ) -> Result<(), (Status, String)> {
        let offset = self.sequence.offset(index);
        let written = self.destination.write_at(offset, bytes, between);
        written.map_err(|error| (Status::WriteFailed, error.text))?;
        totals.bytes += bytes.len() as u64;
        totals.messages += 1;
        Ok(())
    }
}

#[cfg(test)]
#[path = "incoming_tests.rs"]
mod tests;
