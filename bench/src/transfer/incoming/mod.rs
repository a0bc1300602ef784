//! The receiver's side of transfers: what comes in, where it is written, what is answered.
//!
//! Generic over who sends (`P`) and what a message is (`M`), so that tests need no endpoint. Nothing that a peer
//! sends makes it panic or take memory without bound: transfers under way, messages kept for their turn, answers
//! waiting and ended transfers remembered are all limited by constants.

mod ending;
mod hashing;
mod one;
mod places;
mod quota;
mod shown;

use std::collections::VecDeque;
use std::net::Ipv4Addr;
use std::ops::Deref;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use lm_admission::Policy;

use self::hashing::{Hasher, Question};
use self::places::{WASTED_BORNE, at_disk_pace, patience_with};
use self::quota::Quota;
use self::shown::Shown;
use super::outgoing::REPEAT_EVERY;
use super::progress::Sequence;
use super::wire::{CONTROL_TAG, Control, ControlError, Plan, Refusal, Status, TransferId};
use crate::output::{Destination, Output, OutputError, Source};
use crate::send::SEND_MEMORY_MAX;
use crate::size::ByteSize;

/// A sender that is silent for so long is asked whether it is there, as often as it should speak: a live one says ALIVE every second.
const ASK_AFTER: Duration = Duration::from_secs(3);

/// Messages that wait for their turn on a stream output. Only the last, short message can overtake long ones, so one
/// is what a well-behaved sender needs.
const EARLY_MAX: usize = 64;

/// A file's message is written before those ahead of it where the hole that it leaves has these bytes at most: what one
/// sender has under way.
const AHEAD_LEN_MAX: u64 = SEND_MEMORY_MAX;

/// Messages of a file that are further ahead: the last, short one can overtake a long one.
const AHEAD_MAX: usize = 1;

/// Ended transfers whose RESULT can be asked for again, and those of one address.
const ENDED_MAX: (usize, usize) = (256, 128);

/// Answers that wait to be sent, and those to one peer. More are dropped, the oldest first: senders ask again.
const REPLIES_MAX: (usize, usize) = (256, 8);

/// Answers of which it is tried again at once whether they can be sent.
const STUCK_TRIED: usize = 8;

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
    Started,
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
    /// Bytes of complete transfers that were there already.
    pub resumed_bytes: u64,
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

/// How a transfer broke, and what to do about it.
struct Broken(Status, String);

impl From<OutputError> for Broken {
    fn from(error: OutputError) -> Broken {
        Broken(Status::WriteFailed, error.text)
    }
}

impl From<&str> for Broken {
    /// What a sender says contradicts itself, or what came.
    fn from(text: &str) -> Broken {
        Broken(Status::Inconsistent, text.to_owned())
    }
}

/// One transfer under way.
struct Incoming<P, M> {
    tally: Tally<P>,
    /// Which file it is, if it has a name.
    source: Option<Source>,
    destination: Destination,
    plan: Plan,
    /// Whether BEGIN is awaited: what comes after it is data.
    searching: bool,
    /// What is asked about the bytes that are there.
    question: Option<Arc<Question>>,
    /// Messages ahead of their turn.
    early: Vec<(u32, M)>,
    /// Messages that are arriving, of which some is written.
    shown: Vec<Shown>,
    last_heard: Instant,
    asked: Instant,
    /// Too little came of it since then: its place may be another's.
    idle_at: Instant,
}

/// A transfer whose bytes are all written, while the disk is waited for (`--fsync`): by a thread, since that takes as long as
/// it takes, and the engine must be polled.
struct Closing<P> {
    tally: Tally<P>,
    disk: JoinHandle<Result<String, OutputError>>,
}

/// What a transfer has come to; it outlives its destination.
struct Tally<P> {
    peer: P,
    from: Ipv4Addr,
    transfer: TransferId,
    sequence: Sequence,
    /// Bytes written, which are gone when it fails.
    written: u64,
    /// Bytes that were there.
    resumed: u64,
}

/// A transfer that is over, remembered for repeated questions.
struct Ended<P> {
    peer: P,
    from: Ipv4Addr,
    answer: Control,
}

/// All transfers of one `lm-recv`.
pub struct Receiver<P, M> {
    output: Output,
    policy: Policy,
    quota: Quota,
    active: Vec<Incoming<P, M>>,
    closing: Vec<Closing<P>>,
    /// Whose transfers came to nothing lately, and when.
    wasted: VecDeque<(Ipv4Addr, Instant)>,
    ended: VecDeque<Ended<P>>,
    replies: VecDeque<(P, Control)>,
    /// Answers that could not be sent.
    stuck: VecDeque<(P, Control)>,
    events: VecDeque<Event>,
    totals: Totals,
    hasher: Hasher,
}

impl<P: Copy + Eq, M: Deref<Target = [u8]>> Receiver<P, M> {
    /// A receiver that writes to `output` what senders allowed by `policy` send.
    #[must_use]
    pub fn new(output: Output, policy: Policy) -> Self {
        Receiver {
            output,
            policy,
            quota: Quota {
                max: u64::MAX,
                taken: 0,
            },
            active: Vec::new(),
            closing: Vec::new(),
            wasted: VecDeque::new(),
            ended: VecDeque::new(),
            replies: VecDeque::new(),
            stuck: VecDeque::new(),
            events: VecDeque::new(),
            totals: Totals::default(),
            hasher: Hasher::default(),
        }
    }

    /// Takes at most so many bytes in all: those of complete transfers and of those under way.
    #[must_use]
    pub fn max_bytes(mut self, bytes: u64) -> Self {
        self.quota.max = bytes;
        self
    }

    /// What was received so far.
    #[must_use]
    pub fn totals(&self) -> &Totals {
        &self.totals
    }

    /// Whether no transfer is under way.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.active.is_empty() && self.closing.is_empty()
    }

    /// Whether the disk is waited for, or digests are, which wakes up nothing: [`poll_timeout`](Self::poll_timeout) asks.
    #[must_use]
    pub fn is_waiting(&self) -> bool {
        !self.closing.is_empty() || self.active.iter().any(|incoming| incoming.question.is_some())
    }

    /// The sum of the totals of the transfers under way, as far as their senders know them; for a progress bar.
    #[must_use]
    pub fn announced_bytes(&self) -> u64 {
        self.active
            .iter()
            .filter_map(|incoming| incoming.tally.sequence.total_len())
            .sum()
    }

    /// The next answer to send, if any.
    pub fn take_reply(&mut self) -> Option<(P, Control)> {
        self.replies.pop_front().or_else(|| self.stuck.pop_front())
    }

    /// Puts back an answer that could not be sent now: behind all others, whose peers may take theirs.
    pub fn return_reply(&mut self, peer: P, control: Control) {
        let is_its = |(other, _): &_| *other == peer;
        queue(&mut self.stuck, (peer, control), REPLIES_MAX, is_its);
    }

    /// How many answers are to be tried now; 0 where none waits.
    #[must_use]
    pub fn replies(&self) -> usize {
        self.replies.len() + self.stuck.len().min(STUCK_TRIED)
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
        let Some((position, index)) = self.data(peer, tag) else {
            self.totals.stray_data += 1;
            return Taken::Stray;
        };
        let incoming = &mut self.active[position];
        incoming.came(message.len() as u64, now);
        let written = incoming.take(index, message, (&mut self.totals, &mut self.quota), between);
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
        self.fail_of(peer, Status::Incomplete, what, now);
    }

    /// Nothing that is said to `peer` arrives: its transfers are given up.
    pub fn on_gone(&mut self, peer: P, now: Instant) {
        self.fail_of(
            peer,
            Status::TimedOut,
            "the sender no longer answers; start it again",
            now,
        );
    }

    fn fail_of(&mut self, peer: P, status: Status, text: &str, now: Instant) {
        while let Some(position) = self.active.iter().position(|one| one.tally.peer == peer) {
            self.fail(position, Broken(status, text.to_owned()), now);
        }
    }

    /// Gives up transfers whose sender has been silent for longer than `patience`, asks those that are silent for a while, and ends
    /// those that the disk has. Gives the digests that were asked for.
    pub fn poll_timeout(&mut self, now: Instant, patience: Duration) {
        while let Some(position) = self.closing.iter().position(|closing| closing.disk.is_finished()) {
            self.close(position, now);
        }
        let silent_for = |incoming: &Incoming<P, M>| now.saturating_duration_since(incoming.last_heard);
        while let Some(position) = (self.active.iter()).position(|incoming| silent_for(incoming) > patience) {
            let text = format!(
                "nothing came for {} s; start the sender again",
                patience.as_secs_f64()
            );
            self.fail(position, Broken(Status::TimedOut, text), now);
        }
        for position in 0..self.active.len() {
            let incoming = &mut self.active[position];
            let (peer, transfer) = (incoming.tally.peer, incoming.tally.transfer);
            if let Some(answered) = (incoming.question).take_if(|asked| asked.answer.get().is_some()) {
                let answer = Control::Digests {
                    transfer,
                    offset: answered.offset,
                    block_len: answered.block_len,
                    digests: answered.answer.get().cloned().unwrap_or_default(),
                };
                self.reply(peer, answer);
            } else if (silent_for(incoming) > ASK_AFTER || incoming.question.is_some())
                && now.saturating_duration_since(incoming.asked) >= REPEAT_EVERY
            {
                incoming.asked = now;
                self.reply(peer, Control::Alive { transfer });
            }
        }
    }

    /// Gives up every transfer under way: the receiver is told to stop. Those that only wait for the disk end as it says.
    pub fn stop(&mut self, now: Instant) {
        while !self.closing.is_empty() {
            self.close(0, now);
        }
        while !self.active.is_empty() {
            let text = "the receiver was stopped; start it again".to_owned();
            self.fail(0, Broken(Status::Stopped, text), now);
        }
    }

    fn position(&self, peer: P, transfer: TransferId) -> Option<usize> {
        let mut tallies = self.active.iter().map(|one| &one.tally);
        tallies.position(|one| (one.peer, one.transfer) == (peer, transfer))
    }

    /// Which transfer under way a data message is of, and which message it is.
    fn data(&self, peer: P, tag: u64) -> Option<(usize, u32)> {
        let (transfer, index) = TransferId::from_data_tag(tag)?;
        Some((self.position(peer, transfer)?, index))
    }

    /// What the sender of a transfer is told that is over, or waits for the disk alone.
    fn over(&self, peer: P, transfer: TransferId) -> Option<Control> {
        let mut closing = self.closing.iter().map(|one| &one.tally);
        if closing.any(|one| (one.peer, one.transfer) == (peer, transfer)) {
            return Some(Control::Alive { transfer });
        }
        let mut ended = self.ended.iter();
        let ended = ended.find(|ended| ended.peer == peer && ended.answer.transfer() == transfer)?;
        Some(ended.answer.clone())
    }

    fn on_control(&mut self, peer: P, from: Ipv4Addr, message: &[u8], now: Instant) -> Taken {
        let control = Control::parse(message);
        let transfer = control.as_ref().ok().map(Control::transfer);
        let known = transfer.and_then(|transfer| self.position(peer, transfer));
        if let Some(position) = known {
            self.active[position].last_heard = now;
        }
        match control {
            Ok(Control::Start {
                transfer,
                ipfrag,
                plan,
                key,
                resume,
            }) => match known.map(|position| self.active[position].destination.held()) {
                // Repeated because READY was late or lost.
                Some(held) => self.reply(peer, Control::Ready { transfer, held }),
                None => {
                    let source = key.map(|key| Source { from, key });
                    self.on_start((peer, from, transfer), ipfrag, (plan, source, resume), now);
                }
            },
            Ok(Control::Check {
                offset,
                block_len,
                end,
                ..
            }) => match known {
                Some(position) => self.active[position].ask((offset, block_len, end), &mut self.hasher),
                None => return self.stray(),
            },
            Ok(Control::Begin { transfer, first }) => match known {
                Some(position) => {
                    // The sender has found out what of the bytes that are there are the file's.
                    let begun = self.active[position].begin(first);
                    if begun.is_ok() {
                        self.reply(peer, Control::Begun { transfer, first });
                    }
                    self.settle(position, begun, now);
                }
                // Its end may have been reached by it already.
                None => match self.over(peer, transfer) {
                    Some(answer) => self.reply(peer, answer),
                    None => return self.stray(),
                },
            },
            Ok(Control::End {
                transfer,
                status,
                bytes,
                messages,
            }) => match known {
                Some(position) => self.on_end(position, status, (bytes, messages), now),
                None => {
                    let unknown = || Control::Result {
                        transfer,
                        status: Status::Unknown,
                        bytes: 0,
                        messages: 0,
                        text: "the receiver knows of no such transfer; send again".to_owned(),
                    };
                    let answer = self.over(peer, transfer).unwrap_or_else(unknown);
                    self.reply(peer, answer);
                }
            },
            Ok(Control::Alive { .. }) => {}
            Err(ControlError::Version {
                theirs,
                transfer: Some(transfer),
            }) => {
                let text = format!(
                    "speaks another version of the transfer protocol ({theirs}); use the same release"
                );
                self.refuse(peer, from, transfer, OutputError::new(Refusal::Version, text));
            }
            Err(ControlError::ImpossiblePlan { transfer }) => {
                let text = "asks for an impossible transfer; use larger messages";
                self.refuse(peer, from, transfer, OutputError::new(Refusal::Malformed, text));
            }
            // READY, DIGESTS, BEGUN, REFUSED and RESULT are what a receiver says; the rest is noise.
            _ => return self.stray(),
        }
        Taken::Control
    }

    fn stray(&mut self) -> Taken {
        self.totals.stray_control += 1;
        Taken::Stray
    }

    fn on_start(
        &mut self,
        (peer, from, transfer): (P, Ipv4Addr, TransferId),
        ipfrag: bool,
        (plan, source, resume): (Plan, Option<Source>, bool),
        now: Instant,
    ) {
        if let Some(answer) = self.over(peer, transfer) {
            return self.reply(peer, answer);
        }
        // A sender has one transfer under way: a new number means that it gave up the one before.
        self.fail_of(peer, Status::Aborted, "the sender began another transfer", now);
        // One that died has left its transfer here: whoever goes on with the file is its heir.
        let is_left = |incoming: &Incoming<P, M>| resume && source.is_some() && incoming.source == source;
        if let Some(position) = self.active.iter().position(is_left) {
            let text = "its sender began again".to_owned();
            self.fail(position, Broken(Status::Aborted, text), now);
        }
        let destination = match self.open(from, (plan, source, resume), now) {
            Ok(destination) => destination,
            Err(error) => return self.refuse(peer, from, transfer, error),
        };
        self.totals.first_start.get_or_insert(now);
        self.totals.wires[usize::from(ipfrag)] = true;
        let held = destination.held();
        let wastes = self.wasted_by(from) >= WASTED_BORNE;
        let grace = patience_with(plan) + at_disk_pace(held);
        let tally = Tally {
            peer,
            from,
            transfer,
            sequence: Sequence::new(plan),
            written: 0,
            resumed: 0,
        };
        self.active.push(Incoming {
            tally,
            source,
            searching: held > 0,
            destination,
            plan,
            question: None,
            early: Vec::new(),
            shown: Vec::new(),
            last_heard: now,
            asked: now,
            idle_at: if wastes { now } else { now + grace },
        });
        self.tell(Event::Started);
        self.reply(peer, Control::Ready { transfer, held });
    }

    /// Decides on a START and opens its destination.
    fn open(
        &mut self,
        from: Ipv4Addr,
        (plan, source, resume): (Plan, Option<Source>, bool),
        now: Instant,
    ) -> Result<Destination, OutputError> {
        if !self.policy.allows(from) {
            let text = format!("{from} is not allowed; add --allow {from} at the receiver");
            return Err(OutputError::new(Refusal::NotAllowed, text));
        }
        let longest = plan.longest_message();
        if longest > self.policy.max_message_len {
            let text = format!(
                "messages of {} are larger than the receiver's limit of {}; send with a smaller --message-size or \
                 start the receiver with a larger --max-message-size",
                ByteSize::new(longest),
                ByteSize::new(self.policy.max_message_len)
            );
            return Err(OutputError::new(Refusal::TooLarge, text));
        }
        if !self.has_place(from, now) {
            let text = "another transfer is under way; try again when it has ended";
            return Err(OutputError::new(Refusal::Busy, text));
        }
        // What is kept of an earlier one does not come again, unless it is another file's.
        let destination = self.output.begin(plan.total_len, source, resume)?;
        let total_len = plan.total_len.unwrap_or_default();
        self.quota.give_back(self.output.take_freed());
        if let Err(error) = self.quota.check(total_len.saturating_sub(destination.held())) {
            let keep = self.output.keep(&destination, from, 0);
            destination.abandon(keep);
            self.waste(from, now);
            return Err(error);
        }
        Ok(destination)
    }
}

/// One more, within a bound in all and one of one's own: what is too much goes, the oldest first and of one's own.
fn queue<T>(queue: &mut VecDeque<T>, new: T, (most, own_most): (usize, usize), is_its: impl Fn(&T) -> bool) {
    let oldest = match queue.iter().filter(|one| is_its(one)).count() >= own_most {
        true => queue.iter().position(is_its),
        false => (queue.len() >= most).then_some(0),
    };
    let _ = oldest.and_then(|at| queue.remove(at));
    queue.push_back(new);
}

#[cfg(test)]
mod tests;
