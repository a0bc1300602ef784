//! The loop of a transfer: reads pieces of the input into send regions, hands them over, and hears what comes back. One
//! [`round`](Tool::round) is everything that must not wait; it also runs between the reads of a slow input.

use std::io;
use std::rc::Rc;
use std::time::Instant;

use lm_dataplane::port::Port;
use lm_dataplane::{Completion, LoanError, MessageWriter, Outcome as MessageOutcome, SendRegion};
use lm_protocol::geometry::Wire;

use super::{FAREWELL_MAX, IDLE_MAX, Tool};
use crate::cli::{DeliveryOption, Failure, Pipeline};
use crate::input::{Input, RANGES_PER_READ};
use crate::link;
use crate::output::describe;
use crate::size::approximate;
use crate::transfer::WHOLE_MAX;
use crate::transfer::outgoing::{Outcome, Outgoing, Piece};
use crate::transfer::wire::{CONTROL_TAG, Control, Refusal, TransferId};

/// What became of a piece that was to be read.
enum Filled {
    /// The region holds a whole message; a stream's last one may be shorter than the piece.
    Whole(SendRegion),
    /// The stream ended before the piece's first byte.
    End,
    /// The transfer ended meanwhile: the receiver said so.
    Over,
}

impl<P: Port> Tool<P> {
    /// One transfer, from START to RESULT.
    pub(super) fn send_transfer(&mut self, transfer: TransferId) -> Result<(), Failure> {
        let ipfrag = self.shape.wire == Wire::IpFrag;
        let outgoing = Outgoing::new(transfer, self.shape.plan, ipfrag, Instant::now());
        let mut outgoing = outgoing.of_file(self.key, self.options.resume);
        let sent = self.drive(&mut outgoing);
        if sent.is_err()
            && let Some(abort) = outgoing.abort()
        {
            // The receiver would notice by itself, only later.
            let _ = link::try_send_control(&mut self.endpoint, self.peer, &abort);
            let _ = self.endpoint.flush(FAREWELL_MAX);
        }
        sent
    }

    fn drive(&mut self, outgoing: &mut Outgoing) -> Result<(), Failure> {
        loop {
            let mut worked = self.round(outgoing)?;
            if let Some(outcome) = outgoing.outcome() {
                self.judge(outcome)?;
                return self.settle(outgoing);
            }
            worked |= self.search(outgoing)?;
            worked |= self.hand_over(outgoing)?;
            if !worked {
                self.endpoint.wait(IDLE_MAX);
            }
        }
    }

    /// Compares what the receiver has with the file, where it goes on with it.
    fn search(&mut self, outgoing: &mut Outgoing) -> Result<bool, Failure> {
        let Some(blocks) = outgoing.wanted() else {
            return Ok(false);
        };
        if self.digests.0 != blocks {
            let (mut from, block_len, end) = blocks;
            let mut digests = Vec::new();
            while from < end {
                let to = from.saturating_add(block_len).min(end);
                match self.meanwhile(outgoing, |input, between| input.digest(from, to, between))? {
                    Some(digest) => digests.push(digest),
                    None => return Ok(true),
                }
                from = to;
            }
            self.digests = (blocks, digests);
        }
        Ok(outgoing.compare(&self.digests.1, Instant::now()))
    }

    /// Works at the input, with rounds in between; `None`: the transfer ended meanwhile.
    fn meanwhile<T>(
        &mut self,
        outgoing: &mut Outgoing,
        work: impl FnOnce(&Input, &mut dyn FnMut() -> bool) -> io::Result<T>,
    ) -> Result<Option<T>, Failure> {
        let input = Rc::clone(&self.input);
        let mut broken = None;
        let done = work(&input, &mut || self.is_going_on(outgoing, &mut broken));
        match (broken, done) {
            (Some(failure), _) => Err(failure),
            (None, Ok(done)) => Ok(Some(done)),
            (None, Err(error)) if error.kind() == io::ErrorKind::Interrupted => Ok(None),
            (None, Err(error)) => Err(self.cannot_read(&error)),
        }
    }

    /// A round while the input is read; `false`: the transfer is over, or `broken`.
    fn is_going_on(&mut self, outgoing: &mut Outgoing, broken: &mut Option<Failure>) -> bool {
        match self.round(outgoing) {
            Ok(_) => outgoing.outcome().is_none(),
            Err(failure) => {
                *broken = Some(failure);
                false
            }
        }
    }

    /// One file as plain datagrams: nobody is asked, and a message is done when it has left.
    pub(super) fn send_plain(&mut self) -> Result<(), Failure> {
        if self.options.resume {
            let text = "nobody there knows what came before; leave out --resume, or start lm-recv there";
            return Err(Failure::new(text));
        }
        let mut outgoing = Outgoing::unasked(self.shape.plan, Instant::now());
        while outgoing.next_piece().is_some() || self.in_flight > 0 {
            let mut worked = self.round(&mut outgoing)?;
            worked |= self.hand_over(&mut outgoing)?;
            if !worked {
                self.endpoint.wait(IDLE_MAX);
            }
        }
        self.settle(&mut outgoing)
    }

    /// Polls the endpoint, hears answers, counts completions, says what is due. Returns whether there was any work.
    fn round(&mut self, outgoing: &mut Outgoing) -> Result<bool, Failure> {
        if self.interrupt.is_set() {
            return Err(Failure::interrupted());
        }
        let now = Instant::now();
        // Answers first: when a session ends, the receiver's reason is better than the bare fact.
        let mut worked = self.take_answers(outgoing, now)?;
        if outgoing.outcome().is_some() {
            return Ok(true);
        }
        worked |= self.take_completions(outgoing, now)?;
        outgoing.poll_timeout(now, self.options.link.patience);
        if let Some(control) = outgoing.poll_control(now) {
            // Without room for it now it is said again a second later.
            let _ = link::try_send_control(&mut self.endpoint, self.peer, &control);
            worked = true;
        }
        let (endpoint, read, released) = (&self.endpoint, self.read, self.released);
        self.meter.tick(now, || {
            let (read, released) = (approximate(read), approximate(released));
            let sent = endpoint.counters().data_packets_sent;
            let stations = format!("read {read}, released {released}, sent {sent} fragments, confirmed");
            (stations, link::drop_count(endpoint))
        });
        Ok(worked)
    }

    /// Reads the next piece and sends it, when there is one and the window and the memory have room.
    fn hand_over(&mut self, outgoing: &mut Outgoing) -> Result<bool, Failure> {
        if self.in_flight >= self.shape.window {
            return Ok(false);
        }
        let Some(piece) = outgoing.next_piece() else {
            return Ok(false);
        };
        if self.is_read_while_sent(piece) {
            match self.endpoint.peer(self.peer).begin(piece.len, piece.tag) {
                Ok(writer) => return self.write(writer, piece, outgoing).map(|()| true),
                Err(LoanError::WouldBlock) => return Ok(false),
                // It leaves when it is whole, or its loan says why not.
                Err(_) => {}
            }
        }
        let region = match self.endpoint.loan(self.peer, piece.len) {
            Ok(region) => region,
            // None is free until another message is confirmed.
            Err(LoanError::WouldBlock) => return Ok(false),
            Err(error) => return Err(error.into()),
        };
        match self.fill(region, piece, outgoing)? {
            Filled::Whole(region) => {
                let len = region.len();
                self.endpoint.send(region, piece.tag)?;
                self.in_flight += 1;
                self.read += len;
                self.released += len;
                outgoing.handed(len, Instant::now());
                if len < piece.len {
                    outgoing.input_ended(Instant::now());
                }
            }
            Filled::End => outgoing.input_ended(Instant::now()),
            Filled::Over => {}
        }
        Ok(true)
    }

    fn is_read_while_sent(&self, piece: Piece) -> bool {
        let is_wanted = self.options.link.pipeline == Pipeline::On;
        is_wanted && self.input.len().is_some() && piece.len > WHOLE_MAX
    }

    /// Reads the piece into a message that leaves meanwhile, with rounds in between. A message whose writer is dropped before its end is given
    /// up.
    fn write(
        &mut self,
        mut writer: MessageWriter,
        piece: Piece,
        outgoing: &mut Outgoing,
    ) -> Result<(), Failure> {
        let input = Rc::clone(&self.input);
        let mut broken = None;
        let mut read = 0;
        self.in_flight += 1;
        while read < piece.len {
            let ranges = behind(&mut writer, read).take(RANGES_PER_READ);
            match input.fill(ranges, piece.offset + read, &mut || true) {
                Ok(0) => return Err(self.became_shorter()),
                Ok(part) => {
                    read += part;
                    self.read += part;
                }
                Err(error) => return Err(self.cannot_read(&error)),
            }
            let before = writer.released();
            match read < piece.len {
                true => writer.release(read)?,
                false => writer.finish()?,
            }
            self.released += writer.released() - before;
            if read < piece.len && !self.is_going_on(outgoing, &mut broken) {
                // Where nothing is broken the transfer has ended: the receiver said so.
                return broken.map_or(Ok(()), Err);
            }
        }
        outgoing.handed(piece.len, Instant::now());
        Ok(())
    }

    /// Reads the piece into `region`, with rounds in between.
    fn fill(
        &mut self,
        mut region: SendRegion,
        piece: Piece,
        outgoing: &mut Outgoing,
    ) -> Result<Filled, Failure> {
        let read = |input: &Input, between: &mut dyn FnMut() -> bool| {
            input.fill(region.payloads_mut(), piece.offset, between)
        };
        let Some(filled) = self.meanwhile(outgoing, read)? else {
            return Ok(Filled::Over);
        };
        if filled == piece.len {
            return Ok(Filled::Whole(region));
        }
        if self.input.len().is_some() {
            return Err(self.became_shorter());
        }
        match (filled, piece.offset) {
            (0, 0) => Err(Failure::new("the input is empty; there is nothing to send")),
            (0, _) => Ok(Filled::End),
            _ => {
                region.truncate(filled);
                Ok(Filled::Whole(region))
            }
        }
    }

    fn became_shorter(&self) -> Failure {
        let name = self.options.file.display();
        let text = "became shorter while it was sent; send it again when nobody writes it";
        Failure::new(format!("{name} {text}"))
    }

    fn cannot_read(&self, error: &io::Error) -> Failure {
        let (name, why) = (self.options.file.display(), describe(error));
        Failure::new(format!("cannot read {name}: {why}; check the file and its disk"))
    }

    /// Hears what the receiver says. Polls the endpoint at least once.
    fn take_answers(&mut self, outgoing: &mut Outgoing, now: Instant) -> Result<bool, Failure> {
        let mut any = false;
        loop {
            match self.endpoint.try_recv() {
                Ok(Some(message)) => {
                    any = true;
                    // Others than the receiver have nothing to say here.
                    if message.peer() == self.peer
                        && message.tag() == CONTROL_TAG
                        && let Ok(control) = Control::parse(&message)
                    {
                        outgoing.handle(control, now);
                    }
                }
                Ok(None) => return Ok(any),
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Counts the messages that ended.
    fn take_completions(&mut self, outgoing: &mut Outgoing, now: Instant) -> Result<bool, Failure> {
        let mut any = false;
        while let Some(completion) = self.endpoint.try_completion() {
            any = true;
            if completion.tag != CONTROL_TAG {
                self.in_flight = self.in_flight.saturating_sub(1);
                self.count(&completion)?;
                outgoing.heard(now);
            }
        }
        Ok(any)
    }

    fn count(&mut self, completion: &Completion) -> Result<(), Failure> {
        let index = completion.tag as u32;
        let why = match &completion.outcome {
            MessageOutcome::Delivered => {
                self.meter.latency.record_ns(completion.latency_ns);
                None
            }
            MessageOutcome::Sent => None,
            // The receiver has it, but for those.
            MessageOutcome::Incomplete { .. } if self.options.delivery == DeliveryOption::Partial => None,
            MessageOutcome::Incomplete { missing } => {
                let fragments: u64 = missing
                    .iter()
                    .map(|range| u64::from(range.end - range.start))
                    .sum();
                Some(format!(
                    "{fragments} fragments of message {index} were lost; check the link and send again"
                ))
            }
            MessageOutcome::SessionEnded => {
                Some("the receiver ended the session; start it and send again".to_owned())
            }
            _ => Some(format!(
                "message {index} was not confirmed in time; check that lm-recv still runs and send again"
            )),
        };
        match why {
            Some(why) => Err(Failure::new(why)),
            None => {
                self.meter.bytes += completion.len;
                self.meter.messages += 1;
                Ok(())
            }
        }
    }

    fn judge(&self, outcome: &Outcome) -> Result<(), Failure> {
        let to = &self.options.to;
        let text = match outcome {
            Outcome::Complete => return Ok(()),
            Outcome::Refused { refusal, text } => match refusal {
                Refusal::Version => format!("the receiver at {to} {text}"),
                _ => format!("{to} refuses the transfer: {text}"),
            },
            Outcome::Failed { text, .. } => format!("the transfer to {to} failed: {text}"),
            Outcome::Silent => {
                format!("{to} stopped answering; check that lm-recv still runs and send again")
            }
        };
        Err(Failure::new(text))
    }

    /// The transfer is complete. Waits a moment for what the receiver's endpoint still has to confirm, so that every
    /// message has its latency, and counts what the receiver's RESULT said rather than what was confirmed by then.
    fn settle(&mut self, outgoing: &mut Outgoing) -> Result<(), Failure> {
        self.last_end = Instant::now();
        let until = self.last_end + FAREWELL_MAX;
        while self.in_flight > 0 && Instant::now() < until {
            if !self.take_completions(outgoing, Instant::now())? && self.endpoint.poll() == 0 {
                self.endpoint.wait(IDLE_MAX);
            }
        }
        self.in_flight = 0;
        let (messages, bytes) = outgoing.handed_over();
        self.report.messages += messages;
        self.report.bytes += bytes;
        self.report.resumed_bytes += outgoing.resumed_bytes();
        (self.meter.messages, self.meter.bytes) = (self.report.messages, self.report.bytes);
        Ok(())
    }
}

/// The payload ranges behind the first `read` bytes.
fn behind(writer: &mut MessageWriter, read: u64) -> impl Iterator<Item = &mut [u8]> {
    // They begin with what is not released: whole windows are.
    let mut skip = (read - writer.released()) as usize;
    writer.payloads_mut().filter_map(move |range| {
        let (before, rest) = range.split_at_mut(skip.min(range.len()));
        skip -= before.len();
        (!rest.is_empty()).then_some(rest)
    })
}
