//! How a transfer ends, and what its sender is answered.

use std::net::Ipv4Addr;
use std::ops::Deref;
use std::thread;
use std::time::Instant;

use super::{Broken, Closing, ENDED_MAX, EVENTS_MAX, Ended, Event, REPLIES_MAX, Receiver, Tally, queue};
use crate::output::OutputError;
use crate::size::approximate;
use crate::transfer::wire::{Control, Refusal, Status, TransferId};

impl<P: Copy + Eq, M: Deref<Target = [u8]>> Receiver<P, M> {
    pub(super) fn on_end(
        &mut self,
        position: usize,
        status: Status,
        (bytes, messages): (u64, u64),
        now: Instant,
    ) {
        if status != Status::Complete {
            let broken = Broken(Status::Aborted, "the sender gave up".to_owned());
            return self.fail(position, broken, now);
        }
        let Tally {
            peer,
            transfer,
            sequence,
            ..
        } = &mut self.active[position].tally;
        let (peer, transfer, ended) = (*peer, *transfer, sequence.end(bytes, messages));
        if ended.is_ok() && !sequence.is_complete() {
            // A long message is still on its way; the sender must not think that we are gone.
            self.reply(peer, Control::Alive { transfer });
        }
        self.settle(position, ended.map_err(Broken::from), now);
    }

    /// Ends the transfer at `position` if `step` failed or was its last.
    pub(super) fn settle(&mut self, position: usize, step: Result<(), Broken>, now: Instant) {
        match step {
            Err(broken) => self.fail(position, broken, now),
            Ok(()) if !self.active[position].tally.sequence.is_complete() => {}
            Ok(()) if self.active[position].shown.is_empty() => self.finish(position, now),
            Ok(()) => {
                let text = "a message began that the sender does not count; send again";
                self.fail(position, text.into(), now);
            }
        }
    }

    fn finish(&mut self, position: usize, now: Instant) {
        let incoming = self.active.swap_remove(position);
        let (tally, destination) = (incoming.tally, incoming.destination);
        if !destination.waits() {
            return self.finished(tally, destination.finish(), now);
        }
        let disk = thread::Builder::new().spawn(move || destination.finish());
        match disk {
            Ok(disk) => self.closing.push(Closing { tally, disk }),
            Err(error) => self.finished(tally, Err(no_thread(&error.to_string())), now),
        }
    }

    /// Waits for the disk, if it has not answered yet.
    pub(super) fn close(&mut self, position: usize, now: Instant) {
        let Closing { tally, disk } = self.closing.swap_remove(position);
        let finished = disk.join().unwrap_or_else(|_| Err(no_thread("it panicked")));
        self.finished(tally, finished, now);
    }

    fn finished(&mut self, tally: Tally<P>, finished: Result<String, OutputError>, now: Instant) {
        match finished {
            Ok(name) => {
                self.totals.transfers += 1;
                self.totals.resumed_bytes += tally.resumed;
                let bytes = tally.sequence.bytes();
                self.tell(Event::Finished { name, bytes });
                self.end(&tally, Status::Complete, String::new(), now);
            }
            Err(error) => self.failed(&tally, error.into(), now),
        }
    }

    pub(super) fn fail(&mut self, position: usize, broken: Broken, now: Instant) {
        let mut incoming = self.active.swap_remove(position);
        let cut = incoming.cut_loose();
        let (mut tally, destination) = (incoming.tally, incoming.destination);
        // Where the way to it broke there may be another; a disk or a sender that is faulty will be so again.
        let keep = match broken.0 {
            Status::Aborted | Status::Incomplete | Status::TimedOut | Status::Stopped => true,
            Status::Complete | Status::WriteFailed | Status::Inconsistent | Status::Unknown => false,
        };
        let loose = cut.unwrap_or_default();
        let keep = keep
            && cut.is_some()
            && (self.output).keep(&destination, tally.from, tally.written.saturating_sub(loose));
        if destination.abandon(keep) {
            // The others still take their place.
            tally.written = loose;
        }
        self.failed(&tally, broken, now);
    }

    fn failed(&mut self, tally: &Tally<P>, Broken(status, text): Broken, now: Instant) {
        self.quota.give_back(tally.written + self.output.take_freed());
        self.totals.failed_transfers += 1;
        self.waste(tally.from, now);
        self.tell(Event::Failed {
            from: tally.from,
            text: format!("{text} (after {})", approximate(tally.sequence.bytes())),
        });
        self.end(tally, status, text, now);
    }

    fn end(&mut self, tally: &Tally<P>, status: Status, text: String, now: Instant) {
        self.totals.last_end = Some(now);
        let (peer, from) = (tally.peer, tally.from);
        let answer = Control::Result {
            transfer: tally.transfer,
            status,
            bytes: tally.sequence.bytes(),
            messages: tally.sequence.messages(),
            text,
        };
        self.reply(peer, answer.clone());
        let ended = Ended { peer, from, answer };
        queue(&mut self.ended, ended, ENDED_MAX, |one| one.from == from);
    }

    pub(super) fn refuse(&mut self, peer: P, from: Ipv4Addr, transfer: TransferId, error: OutputError) {
        let OutputError { refusal, text } = error;
        let refused = Control::Refused {
            transfer,
            refusal,
            text: text.clone(),
        };
        self.tell(Event::Refused { from, text });
        self.reply(peer, refused);
    }

    pub(super) fn reply(&mut self, peer: P, control: Control) {
        let is_its = |(other, _): &_| *other == peer;
        queue(&mut self.replies, (peer, control), REPLIES_MAX, is_its);
    }

    pub(super) fn tell(&mut self, event: Event) {
        queue(&mut self.events, event, (EVENTS_MAX, EVENTS_MAX), |_| true);
    }
}

fn no_thread(why: &str) -> OutputError {
    let text = format!("no thread could wait for the disk: {why}; free memory or leave out --fsync");
    OutputError::new(Refusal::NotWritable, text)
}
