//! LM through its public [`Endpoint`] alone. It spins unless it is to sleep; a session is opened where a message does not fit one packet.

use std::time::{Duration, Instant};

use lm_dataplane::{
    ConnectOptions, DEFAULT_PORT, EffectiveMode, Endpoint, Incoming, LoanError, Message, PeerId, RecvError,
};
use xxhash_rust::xxh3::xxh3_64;

use super::{Arrival, End, EndArgs, Outcome, Side, Spec, Task, Work, place, write_number};
use crate::cli::{Failure, IntegrityOption};
use crate::lm::{EndpointArgs, connect};
use crate::suite::host::await_link;
use crate::suite::systems::Work as Bytes;

/// Bytes that a stream has under way. The window of packets is shared by its messages, so that short ones need many; but what is
/// under way should stay in the processor's cache.
const TOGETHER: u64 = 1 << 20;

/// Loans memory for a message and writes its number; `None` when there is no room now.
pub(super) fn try_loan(
    endpoint: &mut Endpoint,
    peer: PeerId,
    len: usize,
    number: u64,
) -> Result<Option<lm_dataplane::SendRegion>, LoanError> {
    match endpoint.loan(peer, len as u64) {
        Ok(mut region) => {
            if let Some(first) = region.payloads_mut().next() {
                write_number(first, number);
            }
            Ok(Some(region))
        }
        Err(LoanError::WouldBlock) => Ok(None),
        Err(error) => Err(error),
    }
}

/// One endpoint and its peer.
pub(super) struct Lm {
    pub(super) endpoint: Endpoint,
    /// The far end learns it from the first message.
    pub(super) peer: Option<PeerId>,
    options: ConnectOptions,
    work: Bytes,
    integrity: IntegrityOption,
    /// Whom messages came from, in the order of their first ones.
    peers: Vec<PeerId>,
}

impl Lm {
    pub(super) fn open(args: &EndArgs, spec: &Spec, ready: impl FnOnce()) -> Result<Lm, Failure> {
        let in_flight = match spec.task {
            Task::RoundTrips { .. } => 2,
            _ => (TOGETHER / spec.size.max(1)).clamp(4, 256) as u32,
        };
        let system = &spec.system.options;
        let endpoint = EndpointArgs {
            interface: Some(args.interface.clone()),
            mode: spec.mode,
            idle: system.idle,
            mtu: None,
            depth: system.depth,
            checksum: system.checksum,
            exclusive: false,
            admission: lm_dataplane::Admission::Auto,
        };
        let (towards, port) = match args.side {
            Side::Near => (Some(*spec.address.ip()), 0),
            Side::Far => (None, DEFAULT_PORT),
        };
        let messages = 2 * in_flight * spec.senders;
        let mut endpoint = endpoint.open(towards, port, spec.size, messages, system.integrity)?;
        // Its card has its link again.
        await_link(&args.interface)?;
        let options = ConnectOptions {
            max_message_len: spec.size,
            messages_in_flight: in_flight,
            delivery: system.delivery.into(),
            window: system.window,
            ..ConnectOptions::default()
        };
        let peer = match args.side {
            Side::Near => Some(connect(&mut endpoint, spec.address, &options)?),
            Side::Far => {
                ready();
                None
            }
        };
        Ok(Lm {
            endpoint,
            peer,
            options,
            work: system.work,
            integrity: system.integrity,
            peers: Vec::new(),
        })
    }

    /// Asks for something that takes memory until there is some, and for a session where the far end has none back yet.
    fn taking<T>(
        &mut self,
        len: usize,
        mut ask: impl FnMut(&mut Endpoint, PeerId) -> Result<T, LoanError>,
    ) -> Result<T, Failure> {
        let peer = self.peer.expect("a far end only answers");
        loop {
            match ask(&mut self.endpoint, peer) {
                Ok(taken) => return Ok(taken),
                Err(LoanError::WouldBlock) => {
                    if self.endpoint.poll() == 0 {
                        self.endpoint.wait(Duration::from_millis(10));
                    }
                }
                Err(_) if self.endpoint.peer(peer).max_message_len() < len as u64 => {
                    self.endpoint.peer(peer).open_session(&self.options)?;
                }
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Sends each window of a message as soon as it is produced.
    fn send_overlapping(&mut self, len: usize, number: u64) -> Result<(), Failure> {
        let mut writer = self.taking(len, |endpoint, peer| {
            endpoint.peer(peer).begin(len as u64, number)
        })?;
        let window = self.options.window.fragments() as usize;
        let mut done = 0;
        while done < len as u64 {
            for payload in writer.payloads_mut().take(window) {
                done += produce(payload, number);
            }
            match done < len as u64 {
                true => writer.release(done)?,
                false => writer.finish()?,
            }
            self.endpoint.poll();
        }
        Ok(())
    }

    /// The next message, of which each window was consumed as soon as it was there.
    fn receive_overlapping(&mut self, until: Option<Instant>) -> Result<Message, RecvError> {
        let mut reading: Option<(Incoming, u64)> = None;
        loop {
            self.endpoint.poll();
            if let Some(incoming) = self.endpoint.try_incoming() {
                reading = Some((incoming, 0));
            }
            if let Some((incoming, done)) = &mut reading
                && let Some(there) = incoming.shown().find(|range| range.contains(done))
            {
                consume(incoming.bytes(*done..there.end).unwrap_or_default());
                *done = there.end;
            }
            if let Some(message) = self.endpoint.try_recv()? {
                let consumed = reading.filter(|(incoming, _)| incoming.number() == message.number());
                consume(&message[consumed.map_or(0, |(_, done)| done as usize)..]);
                return Ok(message);
            }
            if until.is_some_and(|until| Instant::now() >= until) {
                return Err(RecvError::TimedOut);
            }
        }
    }
}

/// Writes all bytes of a payload, from the message's number on; how many they are.
fn produce(payload: &mut [u8], number: u64) -> u64 {
    for word in payload.chunks_mut(size_of::<u64>()) {
        write_number(word, number);
    }
    payload.len() as u64
}

/// Reads all bytes.
fn consume(bytes: &[u8]) {
    std::hint::black_box(xxh3_64(bytes));
}

impl End for Lm {
    fn send(&mut self, len: usize, number: u64) -> Result<(), Failure> {
        if self.work == Bytes::Overlap {
            self.send_overlapping(len, number)?;
        } else {
            let mut region = self.taking(len, |endpoint, peer| {
                try_loan(endpoint, peer, len, number)?.ok_or(LoanError::WouldBlock)
            })?;
            if self.work == Bytes::Coarse {
                for payload in region.payloads_mut() {
                    produce(payload, number);
                }
            }
            self.endpoint.send(region, number)?;
        }
        while self.endpoint.try_completion().is_some() {}
        Ok(())
    }

    fn receive(&mut self, until: Option<Instant>) -> Result<Option<Arrival>, Failure> {
        loop {
            let left = until.map(|until| until.saturating_duration_since(Instant::now()));
            let received = match self.work {
                Bytes::Overlap => self.receive_overlapping(until),
                Bytes::Coarse => self.endpoint.recv(left).inspect(|message| consume(message)),
                Bytes::None => self.endpoint.recv(left),
            };
            match received {
                Ok(message) => {
                    let peer = message.peer();
                    self.peer = Some(peer);
                    while self.endpoint.try_completion().is_some() {}
                    let known = self.peers.len();
                    let from = place(&mut self.peers, peer);
                    if from == known && self.work == Bytes::Overlap {
                        self.endpoint.peer(peer).watch();
                    }
                    let missing = message.missing().iter().map(|range| range.end - range.start);
                    return Ok(Some(Arrival {
                        from,
                        number: super::cut_number(message.tag(), message.len()),
                        bytes: message.len() - missing.sum::<u64>() as usize,
                        whole: true,
                    }));
                }
                // It is among the lost: the numbers say so.
                Err(RecvError::Incomplete { .. }) => {}
                Err(RecvError::TimedOut) => return Ok(None),
                Err(error) => return Err(error.into()),
            }
        }
    }

    fn tell(&mut self, outcome: &mut Outcome) {
        let mode = match self.endpoint.status().mode() {
            EffectiveMode::ZeroCopy => "native zero-copy",
            EffectiveMode::CopyNative => "native copy",
            EffectiveMode::CopyGeneric => "generic copy",
            EffectiveMode::CopyPort => "copy by the port",
            EffectiveMode::Simulated => "simulated",
        };
        outcome.mode = Some(mode.to_owned());
        outcome.integrity = Some(self.integrity);
        outcome.user_copied_bytes = Some(self.endpoint.counters().user_copied_bytes);
        for (sender, &peer) in outcome.senders.iter_mut().zip(&self.peers) {
            sender.address = self.endpoint.peer(peer).address();
        }
    }

    fn work(&self) -> Option<Work> {
        let counters = self.endpoint.counters();
        Some(Work {
            wakeups: counters.wakeups,
            copied_bytes: counters.user_copied_bytes,
        })
    }

    fn wait_until(&mut self, time: Instant) {
        while let Some(left) = time.checked_duration_since(Instant::now()) {
            if self.endpoint.poll() == 0 {
                self.endpoint.wait(left);
            }
            while self.endpoint.try_completion().is_some() {}
        }
    }
}
