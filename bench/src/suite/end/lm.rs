//! LM through its public [`Endpoint`] alone. It spins unless it is to sleep; a session is opened where a message does not fit one packet.

use std::io;
use std::time::{Duration, Instant};

use lm_dataplane::{
    ConnectOptions, DEFAULT_PORT, EffectiveMode, Endpoint, LoanError, PeerId, RecvError, SendError,
};

use super::{Arrival, End, EndArgs, Outcome, Side, Spec, Task, Work, write_number};
use crate::cli::{Failure, IntegrityOption, chain};
use crate::lm::{EndpointArgs, connect};
use crate::suite::host::await_link;

/// Bytes that a stream has under way. The window of packets is shared by its messages, so that short ones need many; but what is
/// under way should stay in the processor's cache.
const TOGETHER: u64 = 1 << 20;

/// Messages that a stream of this length has under way.
pub(super) fn in_flight(message_len: u64) -> u32 {
    (TOGETHER / message_len.max(1)).clamp(4, 256) as u32
}

/// Opens an endpoint for `messages` of `len` bytes at a time; its card has its link again.
pub(super) fn endpoint(args: &EndArgs, spec: &Spec, len: u64, messages: u32) -> Result<Endpoint, Failure> {
    let system = &spec.system.options;
    let options = EndpointArgs {
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
    let endpoint = options.open(towards, port, len, messages, system.integrity)?;
    await_link(&args.interface)?;
    Ok(endpoint)
}

pub(super) fn failed(error: &dyn std::error::Error) -> io::Error {
    io::Error::other(chain(error))
}

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
    endpoint: Endpoint,
    /// The far end learns it from the first message.
    peer: Option<PeerId>,
    options: ConnectOptions,
    integrity: IntegrityOption,
    /// Whom messages came from, in the order of their first ones.
    peers: Vec<PeerId>,
}

impl Lm {
    pub(super) fn open(args: &EndArgs, spec: &Spec, ready: impl FnOnce()) -> Result<Lm, Failure> {
        let in_flight = match spec.task {
            Task::Stream { .. } => in_flight(spec.size),
            _ => 2,
        };
        let mut endpoint = endpoint(args, spec, spec.size, 2 * in_flight * spec.senders)?;
        let options = ConnectOptions {
            max_message_len: spec.size,
            messages_in_flight: in_flight,
            delivery: spec.system.options.delivery.into(),
            window: spec.system.options.window,
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
            integrity: spec.system.options.integrity,
            peers: Vec::with_capacity(spec.senders as usize),
        })
    }
}

impl End for Lm {
    fn send(&mut self, len: usize, number: u64) -> io::Result<()> {
        let peer = self.peer.expect("a far end only answers");
        let region = loop {
            match try_loan(&mut self.endpoint, peer, len, number) {
                Ok(Some(region)) => break region,
                Ok(None) => {
                    if self.endpoint.poll() == 0 {
                        self.endpoint.wait(Duration::from_millis(10));
                    }
                }
                // The far end has no session back yet.
                Err(_) if self.endpoint.peer(peer).max_message_len() < len as u64 => {
                    self.endpoint
                        .peer(peer)
                        .open_session(&self.options)
                        .map_err(|error| failed(&error))?;
                }
                Err(error) => return Err(failed(&error)),
            }
        };
        let sent = self.endpoint.send(region, number);
        sent.map_err(|error: SendError| failed(&error))?;
        while self.endpoint.try_completion().is_some() {}
        Ok(())
    }

    fn receive(&mut self, until: Option<Instant>) -> io::Result<Option<Arrival>> {
        loop {
            let left = until.map(|until| until.saturating_duration_since(Instant::now()));
            match self.endpoint.recv(left) {
                Ok(message) => {
                    let peer = message.peer();
                    self.peer = Some(peer);
                    while self.endpoint.try_completion().is_some() {}
                    let known = self.peers.iter().position(|one| *one == peer);
                    let from = known.unwrap_or_else(|| {
                        self.peers.push(peer);
                        self.peers.len() - 1
                    });
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
                Err(error) => return Err(failed(&error)),
            }
        }
    }

    fn tell(&mut self, outcome: &mut Outcome) {
        let mode = match self.endpoint.status().mode() {
            EffectiveMode::ZeroCopy => "native zero-copy",
            EffectiveMode::CopyNative => "native copy",
            EffectiveMode::CopyGeneric => "generic copy",
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
