//! The receiver's side of transfers: what comes in, where it is written, what is answered.
//!
//! Generic over who sends (`P`) and what a message is (`M`), so that tests need no endpoint. Nothing that a peer
//! sends makes it panic or take memory without bound: transfers under way, messages kept for their turn, answers
//! waiting and ended transfers remembered are all limited by constants.

use std::collections::VecDeque;
use std::net::Ipv4Addr;
use std::ops::Deref;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use lm_admission::Policy;

use super::outgoing::REPEAT_EVERY;
use super::progress::{Arrival, Sequence};
use super::wire::{CONTROL_TAG, Control, ControlError, Digest, Plan, Refusal, Status, TransferId};
use crate::output::{Destination, Output, OutputError, Source};
use crate::size::{ByteSize, approximate};

/// A sender that is silent for so long is asked whether it is there, as often as it should speak: a live one says ALIVE every second.
const ASK_AFTER: Duration = Duration::from_secs(3);

/// Messages that wait for their turn on a stream output. Only the last, short message can overtake long ones, so one
/// is what a well-behaved sender needs.
const EARLY_MAX: usize = 64;

/// How long one question for digests is worked at; what is left is asked for again.
const CHECK_MAX: Duration = Duration::from_secs(1);

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

/// How many bytes may come in all.
#[derive(Clone, Copy, Debug)]
struct Quota {
    max: u64,
    taken: u64,
}

impl Quota {
    /// Whether `len` bytes more may come.
    fn check(&self, len: u64) -> Result<(), OutputError> {
        let left = self.max - self.taken;
        if len <= left {
            return Ok(());
        }
        let text = format!(
            "{} of the {} that the receiver takes in all are left; send less, or start it with a larger --max-bytes",
            approximate(left),
            ByteSize::new(self.max)
        );
        Err(OutputError {
            refusal: Refusal::DiskFull,
            text,
        })
    }
}

/// One transfer under way.
struct Incoming<P, M> {
    peer: P,
    from: Ipv4Addr,
    transfer: TransferId,
    /// Which file it is, if it has a name.
    source: Option<Source>,
    destination: Destination,
    plan: Plan,
    sequence: Sequence,
    /// Bytes that were there.
    resumed: u64,
    /// Whether BEGIN is awaited: what comes after it is data.
    searching: bool,
    /// Bytes written, which are gone when it fails.
    written: u64,
    /// Messages ahead of their turn, for a stream output.
    early: Vec<(u32, M)>,
    last_heard: Instant,
    asked: Instant,
}

/// A transfer whose bytes are all written, while the disk is waited for (`--fsync`): by a thread, since that takes as long as
/// it takes, and the engine must be polled.
struct Closing<P> {
    over: Over<P>,
    disk: JoinHandle<Result<String, OutputError>>,
}

/// What remains of a transfer that ends.
struct Over<P> {
    peer: P,
    from: Ipv4Addr,
    transfer: TransferId,
    sequence: Sequence,
    written: u64,
    resumed: u64,
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
    quota: Quota,
    active: Vec<Incoming<P, M>>,
    closing: Vec<Closing<P>>,
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
            quota: Quota {
                max: u64::MAX,
                taken: 0,
            },
            active: Vec::new(),
            closing: Vec::new(),
            ended: VecDeque::new(),
            replies: VecDeque::new(),
            events: VecDeque::new(),
            totals: Totals::default(),
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

    /// Whether the disk is waited for, which wakes nobody up: [`poll_timeout`](Self::poll_timeout) asks it.
    #[must_use]
    pub fn is_closing(&self) -> bool {
        !self.closing.is_empty()
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
            return self.on_control(peer, from, &message, now, between);
        }
        let known = TransferId::from_data_tag(tag)
            .and_then(|(transfer, index)| Some((self.position(peer, transfer)?, index)));
        let Some((position, index)) = known else {
            self.totals.stray_data += 1;
            return Taken::Stray;
        };
        let written =
            self.active[position].take(index, message, (&mut self.totals, &mut self.quota), between);
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

    /// Nothing that is said to `peer` arrives: its transfers are given up.
    pub fn on_gone(&mut self, peer: P, now: Instant) {
        while let Some(position) = self.active.iter().position(|incoming| incoming.peer == peer) {
            let text = "the sender no longer answers; start it again".to_owned();
            self.fail(position, Status::TimedOut, text, now);
        }
    }

    /// Gives up transfers whose sender has been silent for longer than `patience`, asks those that are silent for a while, and ends
    /// those that the disk has.
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
            self.fail(position, Status::TimedOut, text, now);
        }
        for position in 0..self.active.len() {
            let incoming = &mut self.active[position];
            let (peer, transfer) = (incoming.peer, incoming.transfer);
            if silent_for(incoming) > ASK_AFTER
                && now.saturating_duration_since(incoming.asked) >= REPEAT_EVERY
            {
                incoming.asked = now;
                self.reply(peer, Control::Alive { transfer });
            }
        }
    }

    /// Gives up every transfer under way: the receiver is told to stop. Those that only wait for the disk end as it says.
    pub fn stop(&mut self, now: Instant) {
        while self.is_closing() {
            self.close(0, now);
        }
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

    fn is_waiting_for_disk(&self, peer: P, transfer: TransferId) -> bool {
        self.closing
            .iter()
            .any(|closing| closing.over.peer == peer && closing.over.transfer == transfer)
    }

    fn on_control(
        &mut self,
        peer: P,
        from: Ipv4Addr,
        message: &[u8],
        now: Instant,
        between: &mut dyn FnMut() -> bool,
    ) -> Taken {
        match Control::parse(message) {
            Ok(Control::Start {
                transfer,
                ipfrag,
                plan,
                key,
                resume,
            }) => {
                let source = key.map(|key| Source { from, key });
                self.on_start(peer, from, transfer, ipfrag, (plan, source, resume), now);
            }
            Ok(Control::Check {
                transfer,
                offset,
                block_len,
                end,
            }) => {
                let Some(position) = self.position(peer, transfer) else {
                    self.totals.stray_control += 1;
                    return Taken::Stray;
                };
                self.active[position].last_heard = now;
                let digests = self.active[position].digests(offset, block_len, end, between);
                self.reply(
                    peer,
                    Control::Digests {
                        transfer,
                        offset,
                        block_len,
                        digests,
                    },
                );
            }
            Ok(Control::Begin { transfer, first }) => self.on_begin(peer, transfer, first, now),
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
            // READY, DIGESTS, BEGUN, REFUSED and RESULT are what a receiver says; the rest is noise.
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
        (plan, source, resume): (Plan, Option<Source>, bool),
        now: Instant,
    ) {
        if let Some(position) = self.position(peer, transfer) {
            // Repeated because READY was late or lost.
            self.active[position].last_heard = now;
            let held = self.active[position].destination.held();
            return self.reply(peer, Control::Ready { transfer, held });
        }
        if self.is_waiting_for_disk(peer, transfer) {
            return self.reply(peer, Control::Alive { transfer });
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
        // One that died has left its transfer here: whoever goes on with the file is its heir.
        let is_left = |incoming: &Incoming<P, M>| resume && source.is_some() && incoming.source == source;
        if let Some(position) = self.active.iter().position(is_left) {
            let text = "its sender began again".to_owned();
            self.fail(position, Status::Aborted, text, now);
        }
        match self.open(from, (plan, source, resume)) {
            Ok(destination) => {
                self.totals.first_start.get_or_insert(now);
                self.totals.wires[usize::from(ipfrag)] = true;
                let sequence = Sequence::new(plan);
                let held = destination.held();
                let incoming = Incoming {
                    peer,
                    from,
                    transfer,
                    source,
                    searching: destination.held() > 0,
                    destination,
                    plan,
                    sequence,
                    resumed: 0,
                    written: 0,
                    early: Vec::new(),
                    last_heard: now,
                    asked: now,
                };
                self.active.push(incoming);
                self.tell(Event::Started {
                    from,
                    total_len: plan.total_len,
                });
                self.reply(peer, Control::Ready { transfer, held });
            }
            Err(error) => {
                self.output.failed();
                self.refuse(peer, from, transfer, error);
            }
        }
    }

    /// Decides on a START and opens its destination.
    fn open(
        &mut self,
        from: Ipv4Addr,
        (plan, source, resume): (Plan, Option<Source>, bool),
    ) -> Result<Destination, OutputError> {
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
        if self.active.len() + self.closing.len() >= self.output.concurrent_max() {
            let text = "another transfer is under way; try again when it has ended".to_owned();
            return Err(OutputError {
                refusal: Refusal::Busy,
                text,
            });
        }
        // What is kept of an earlier one does not come again, unless it is another file's.
        let destination = self.output.begin(plan.total_len, source, resume)?;
        let total_len = plan.total_len.unwrap_or_default();
        self.quota.check(total_len.saturating_sub(destination.held()))?;
        Ok(destination)
    }

    /// The sender has found out what of the bytes that are there are the file's.
    fn on_begin(&mut self, peer: P, transfer: TransferId, first: u64, now: Instant) {
        let Some(position) = self.position(peer, transfer) else {
            // Its end may have been reached by it already.
            return match self.ended_answer(peer, transfer) {
                Some(answer) => self.reply(peer, answer),
                None if self.is_waiting_for_disk(peer, transfer) => {
                    self.reply(peer, Control::Alive { transfer })
                }
                None => self.totals.stray_control += 1,
            };
        };
        self.active[position].last_heard = now;
        let begun = self.active[position].begin(first);
        if begun.is_ok() {
            self.reply(peer, Control::Begun { transfer, first });
        }
        self.settle(position, begun, now);
    }

    fn on_end(
        &mut self,
        peer: P,
        transfer: TransferId,
        status: Status,
        (bytes, messages): (u64, u64),
        now: Instant,
    ) {
        if self.is_waiting_for_disk(peer, transfer) {
            return self.reply(peer, Control::Alive { transfer });
        }
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
        let (over, destination) = self.active.swap_remove(position).split();
        if !destination.waits() {
            return self.finished(over, destination.finish(), now);
        }
        let disk = thread::Builder::new().spawn(move || destination.finish());
        match disk {
            Ok(disk) => self.closing.push(Closing { over, disk }),
            Err(error) => self.finished(over, Err(no_thread(&error.to_string())), now),
        }
    }

    /// Waits for the disk, if it has not answered yet.
    fn close(&mut self, position: usize, now: Instant) {
        let Closing { over, disk } = self.closing.swap_remove(position);
        let finished = disk.join().unwrap_or_else(|_| Err(no_thread("it panicked")));
        self.finished(over, finished, now);
    }

    fn finished(&mut self, over: Over<P>, finished: Result<String, OutputError>, now: Instant) {
        match finished {
            Ok(name) => {
                self.totals.transfers += 1;
                self.totals.resumed_bytes += over.resumed;
                let bytes = over.sequence.bytes();
                self.tell(Event::Finished { name, bytes });
                self.end(&over, Status::Complete, String::new(), now);
            }
            Err(error) => self.failed(&over, Status::WriteFailed, error.text, now),
        }
    }

    fn fail(&mut self, position: usize, status: Status, text: String, now: Instant) {
        let (mut over, destination) = self.active.swap_remove(position).split();
        // Where the way to it broke there may be another; a disk or a sender that is faulty will be so again.
        let keep = match status {
            Status::Aborted | Status::Incomplete | Status::TimedOut | Status::Stopped => true,
            Status::Complete | Status::WriteFailed | Status::Inconsistent | Status::Unknown => false,
        };
        if destination.abandon(keep) {
            // They still take their place.
            over.written = 0;
        }
        self.failed(&over, status, text, now);
    }

    fn failed(&mut self, over: &Over<P>, status: Status, text: String, now: Instant) {
        self.quota.taken -= over.written;
        self.output.failed();
        self.totals.failed_transfers += 1;
        self.tell(Event::Failed {
            from: over.from,
            text: format!("{text} (after {})", approximate(over.sequence.bytes())),
        });
        self.end(over, status, text, now);
    }

    fn end(&mut self, over: &Over<P>, status: Status, text: String, now: Instant) {
        self.totals.last_end = Some(now);
        let peer = over.peer;
        let answer = Control::Result {
            transfer: over.transfer,
            status,
            bytes: over.sequence.bytes(),
            messages: over.sequence.messages(),
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

fn no_thread(why: &str) -> OutputError {
    OutputError {
        refusal: Refusal::NotWritable,
        text: format!("no thread could wait for the disk: {why}; free memory or leave out --fsync"),
    }
}

impl<P, M: Deref<Target = [u8]>> Incoming<P, M> {
    fn split(self) -> (Over<P>, Destination) {
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
    fn digests(
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
    fn begin(&mut self, first: u64) -> Result<(), (Status, String)> {
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
    fn take(
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

    fn write(
        &mut self,
        index: u32,
        bytes: &[u8],
        (totals, quota): (&mut Totals, &mut Quota),
        between: &mut dyn FnMut() -> bool,
    ) -> Result<(), (Status, String)> {
        let (offset, len) = (self.sequence.offset(index), bytes.len() as u64);
        let written = quota
            .check(len)
            .and_then(|()| self.destination.write_at(offset, bytes, between));
        written.map_err(|error| (Status::WriteFailed, error.text))?;
        quota.taken += len;
        self.written += len;
        totals.bytes += len;
        totals.messages += 1;
        Ok(())
    }
}

#[cfg(test)]
#[path = "incoming_tests.rs"]
mod tests;
