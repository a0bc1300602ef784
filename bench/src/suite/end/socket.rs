//! LM's real-time sockets as an [`End`]: endpoint and socket on one thread, which never sleeps unless it is to. Nothing holds their messages back, and none waits for
//! the other host: a stream hands over as many as leave. A smoother, where there is one, holds back what else the near host sends.

use std::net::SocketAddrV4;
use std::time::{Duration, Instant};

use lm_dataplane::{
    ConnectOptions, Endpoint, EndpointConfig, IdleStrategy, LinkConfig, MemoryConfig, PeerId, RecvError,
};
use lm_protocol::smoother::Parameters;
use lm_realtime::{Blocks, Foreign, RealTime, RtMessage, RtSocket, SendOptions, SocketConfig, monotonic};

use super::{Arrival, End, EndArgs, Patience, SILENCE, Side, Spec, Task, place, read_number, write_number};
use crate::cli::Failure;

/// Number of the socket at both ends.
const PORT: u16 = 1;
/// How long the far end may take to answer.
const HELLO: Duration = Duration::from_secs(1);
/// No turn of a round is made without need.
const ASLEEP: IdleStrategy = IdleStrategy {
    spin: Duration::ZERO,
    yields: 0,
    sleep: Some(Duration::from_millis(10)),
};
/// Length of an Ethernet header.
const ETHERNET_LEN: u32 = 14;
/// Bytes that are handed over and have not left, at most, and of how many messages.
const TOGETHER: u64 = 1 << 20;
const KEEP: (u64, u64) = (16, 256);
/// Frames for what the device has: as many as the longest message takes.
const FRAMES: u32 = 47;
/// The longest message, of a block of 16 pages, and those of shorter blocks.
const LENGTHS_MAX: [u64; 4] = [3996, 16_284, 32_668, 65_436];

/// A socket, and what it has handed over.
pub(super) struct Socket {
    /// What it is of.
    _real_time: RealTime,
    socket: RtSocket,
    keep: u64,
    handed_over: u64,
    /// Of these, what does not wait to leave any more, when that was asked last.
    over: u64,
    /// Whether it answers, and to which address.
    answers: bool,
    answered: Option<PeerId>,
    payload: Vec<u8>,
}

impl Socket {
    /// One for messages of `len` bytes.
    pub(super) fn open(
        endpoint: &mut Endpoint,
        args: &EndArgs,
        spec: &Spec,
        len: u64,
    ) -> Result<Socket, Failure> {
        let options = &spec.system.options;
        let smoother = options
            .smoother
            .filter(|_| args.side == Side::Near)
            .map(|rate| Parameters {
                law: options.law,
                ..Parameters::of_link(rate, (spec.mtu + ETHERNET_LEN) as u16)
            });
        let keep = (TOGETHER / len.max(1)).clamp(KEEP.0, KEEP.1);
        let blocks = match len.saturating_add(HEADERS_LEN) > spec.mtu.into() {
            true => blocks(len, keep as u32 + 2),
            false => Blocks::default(),
        };
        let config = SocketConfig {
            keep: keep as usize,
            frames: FRAMES,
            blocks,
            drops_late: false,
            same_host: true,
            ..SocketConfig::default()
        };
        let has_smoother = smoother.is_some();
        let real_time = RealTime::new(endpoint, smoother, monotonic)?;
        if has_smoother {
            real_time.hold_kernel(&args.interface, Foreign::Keep);
        }
        let socket = real_time.socket(endpoint, PORT, &config)?;
        if has_smoother && real_time.kernel_traffic().is_none() {
            return Err(Failure::new(
                "the kernel's traffic does not follow the smoother; see the warning above",
            ));
        }
        if len > socket.payload_max() as u64 {
            return Err(Failure::new(format!(
                "a real-time message has at most {} bytes",
                LENGTHS_MAX[LENGTHS_MAX.len() - 1]
            )));
        }
        Ok(Socket {
            _real_time: real_time,
            socket,
            keep,
            handed_over: 0,
            over: 0,
            // An end that only receives sends no answers.
            answers: args.side == Side::Far && !matches!(spec.task, Task::Stream { .. }),
            answered: None,
            payload: vec![0x5a; len as usize],
        })
    }

    /// Sends to the far end's socket from now on, which knows this one then.
    pub(super) fn connect(&mut self, endpoint: &mut Endpoint, to: SocketAddrV4) -> Result<(), Failure> {
        let options = ConnectOptions {
            session: lm_dataplane::Session::Later,
            ..ConnectOptions::default()
        };
        let peer = endpoint.connect(to, &options)?;
        self.socket.connect(endpoint, peer, PORT)?;
        // From strangers the far end takes nothing but the greeting.
        Ok(endpoint.flush(HELLO)?)
    }

    /// Hands over a message of `len` bytes that begins with its number; `false`: others have to leave before.
    pub(super) fn try_send(&mut self, len: usize, number: u64) -> Result<bool, Failure> {
        if self.handed_over - self.over >= self.keep {
            let statistics = self.socket.statistics();
            self.over = statistics.sent + statistics.superseded;
            if self.handed_over - self.over >= self.keep {
                return Ok(false);
            }
        }
        let payload = &mut self.payload[..len];
        write_number(payload, number);
        self.socket.send(payload, SendOptions::default())?;
        self.handed_over += 1;
        Ok(true)
    }

    /// The next message that came; a far end answers its sender from now on.
    pub(super) fn receive(&mut self, endpoint: &mut Endpoint) -> Result<Option<RtMessage>, Failure> {
        let message = self.socket.recv();
        if let Some(from) = message.as_ref().map(|message| message.info().from)
            && self.answers
            && self.answered != Some(from)
        {
            self.socket.connect(endpoint, from, PORT)?;
            self.answered = Some(from);
        }
        Ok(message)
    }
}

/// Headers, digest and what else a packet has beside the payload.
const HEADERS_LEN: u64 = 84;

/// So many blocks of the shortest kind that takes the message.
fn blocks(len: u64, count: u32) -> Blocks {
    let mut blocks = Blocks::default();
    let kind = LENGTHS_MAX.partition_point(|most| *most < len).min(3);
    let Blocks {
        of_1,
        of_4,
        of_8,
        of_16,
        ..
    } = &mut blocks;
    *[of_1, of_4, of_8, of_16][kind] = count;
    blocks
}

/// One endpoint and its socket.
pub(super) struct RealTimeEnd {
    endpoint: Endpoint,
    socket: Socket,
    sleeps: bool,
    /// Whom messages came from, in the order of their first ones.
    peers: Vec<PeerId>,
}

impl RealTimeEnd {
    pub(super) fn open(args: &EndArgs, spec: &Spec, ready: impl FnOnce()) -> Result<RealTimeEnd, Failure> {
        let is_near = args.side == Side::Near;
        let sleeps = spec.system.sleeps();
        let config = EndpointConfig {
            interface: args.interface.clone(),
            port: if is_near { 0 } else { spec.address.port() },
            link: LinkConfig {
                mode: spec.mode.into(),
                ..LinkConfig::default()
            },
            // Nothing lands: what comes, comes by the general channel, and on a card's only queue.
            memory: MemoryConfig {
                landing_len: 0,
                ..MemoryConfig::default()
            },
            idle: match sleeps {
                true => ASLEEP,
                false => IdleStrategy::SPIN,
            },
            ..EndpointConfig::default()
        };
        let mut endpoint = Endpoint::open(&config)?;
        let mut socket = Socket::open(&mut endpoint, args, spec, spec.size)?;
        match is_near {
            true => socket.connect(&mut endpoint, spec.address)?,
            false => ready(),
        }
        Ok(RealTimeEnd {
            endpoint,
            socket,
            sleeps,
            peers: Vec::new(),
        })
    }
}

impl End for RealTimeEnd {
    fn send(&mut self, len: usize, number: u64) -> Result<(), Failure> {
        while !self.socket.try_send(len, number)? {
            self.endpoint.poll();
        }
        Ok(())
    }

    fn receive(&mut self, until: Option<Instant>) -> Result<Option<Arrival>, Failure> {
        let mut patience = Patience::until(until);
        let mut has_looked = false;
        loop {
            if let Some(message) = self.socket.receive(&mut self.endpoint)? {
                let peer = message.info().from;
                return Ok(Some(Arrival {
                    from: place(&mut self.peers, peer),
                    number: read_number(&message),
                    bytes: message.len(),
                    whole: true,
                }));
            }
            // As those of messages do that wait for one: a round, and a step of the idle strategy.
            if std::mem::replace(&mut has_looked, true) {
                let left = until.map(|until| until.saturating_duration_since(Instant::now()));
                match self.sleeps {
                    true if left == Some(Duration::ZERO) => return Ok(None),
                    false if patience.is_over() => return Ok(None),
                    _ => self.endpoint.wait(left.unwrap_or(SILENCE).min(SILENCE)),
                }
            }
            // What it gives is greetings; what was handed over leaves meanwhile.
            match self.endpoint.try_recv() {
                Ok(_) | Err(RecvError::Incomplete { .. }) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }

    fn wait_until(&mut self, time: Instant) {
        while let Some(left) = time.checked_duration_since(Instant::now()) {
            if self.endpoint.poll() == 0 && self.sleeps {
                self.endpoint.wait(left);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_has_the_shortest_block_that_takes_it() {
        let of = |len| blocks(len, 3);
        let some = |of_1, of_4, of_8, of_16| Blocks {
            of_1,
            of_4,
            of_8,
            of_16,
        };
        assert_eq!(of(1500), some(3, 0, 0, 0));
        assert_eq!(of(3996), some(3, 0, 0, 0));
        assert_eq!(of(3997), some(0, 3, 0, 0));
        assert_eq!(of(32_668), some(0, 0, 3, 0));
        assert_eq!(of(65_436), some(0, 0, 0, 3));
    }
}
