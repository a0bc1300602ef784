//! One end of what is measured, as a process of its own: `lm-bench end`, which the commands start on both hosts.
//!
//! Each system has an [`End`]; what is done with it (round trips, a stream, both at once) is written once ([`drive`]) and the same
//! for all. The end on the host of the command is *near*: it asks for round trips, and sends. The other is *far*.

mod drive;
mod lm;
mod meter;
mod socket;
mod tcp;
mod udp;
mod under_load;
mod watch;

use std::net::SocketAddrV4;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde::{Deserialize, Serialize};

pub use drive::Outcome;
pub(crate) use meter::Work;

use super::systems::{How, System};
use crate::bare;
use crate::cli::{Failure, Mode};
use crate::signals::Interrupt;

/// What an end does.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Task {
    /// Round trips of one message.
    RoundTrips {
        /// So many, after a tenth of it as a warm-up.
        count: u64,
        /// Fewer when they take longer than this.
        seconds: f64,
        /// Messages a second, sent by the clock; each is measured from the time it was due.
        rate: Option<f64>,
        /// By the clock: how many go before as a warm-up.
        #[serde(default)]
        warm_up: u64,
    },
    /// As many messages one way as go.
    Stream {
        /// Seconds that do not count.
        warm_up: f64,
        /// Seconds that count.
        seconds: f64,
        /// Most to send, in bits of payload per second.
        rate: Option<f64>,
    },
    /// Round trips of 64 bytes beside a stream, on one thread each side.
    Beside {
        /// So many, after a tenth of it as a warm-up.
        count: u64,
        /// Fewer when they take longer than this.
        seconds: f64,
    },
}

/// What both ends of a measurement know.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Spec {
    /// How messages are moved.
    pub(crate) system: System,
    /// What is done.
    pub(crate) task: Task,
    /// Message length in bytes.
    pub(crate) size: u64,
    /// Where the far end listens.
    pub(crate) address: SocketAddrV4,
    /// Largest IP packet of the link in bytes.
    pub(crate) mtu: u32,
    /// How packets pass between driver and LM.
    pub(crate) mode: Mode,
    /// How many near ends a stream's far end waits for; time counts once each has sent a message.
    #[serde(default = "one")]
    pub(crate) senders: u32,
    /// Receive queues of both ends' links, at least.
    #[serde(default = "one")]
    pub(crate) queues: u32,
    /// Bare: number of the file by which the receiver paces the sender, where both are on one machine.
    #[serde(default)]
    pub(crate) pace: Option<u64>,
    /// Whether it goes before what else runs on its core.
    #[serde(default)]
    pub(crate) goes_first: bool,
}

const fn one() -> u32 {
    1
}

/// Which of the two ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum, Serialize, Deserialize)]
pub(crate) enum Side {
    /// On the command's host: asks, and sends.
    Near,
    /// On the other host: answers, and receives.
    Far,
}

/// Arguments of `end`.
#[derive(Clone, Debug, clap::Args)]
pub struct EndArgs {
    /// Which end
    #[arg(value_enum)]
    pub(crate) side: Side,
    /// What to do, as JSON
    spec: String,
    /// Interface of this end
    #[arg(long)]
    pub(crate) interface: String,
}

/// Something that came.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Arrival {
    /// From which sender, in the order of their first messages.
    pub(crate) from: usize,
    /// The low bytes of its number: as many as the message is long, eight at most.
    pub(crate) number: u64,
    /// Payload.
    pub(crate) bytes: usize,
    /// Whether this completes a message.
    pub(crate) whole: bool,
}

/// A connection that messages pass through.
pub(crate) trait End {
    /// Sends a message of `len` bytes that begins with its number, as soon as the system takes it.
    fn send(&mut self, len: usize, number: u64) -> Result<(), Failure>;

    /// Sends what `send` has held back.
    fn flush(&mut self) -> Result<(), Failure> {
        Ok(())
    }

    /// Waits for something to come, as the system waits; `None` when the other end has ended, or when nothing has come until a time, where one is
    /// given. Else there is no time limit: that would cost a timer for each sleep, which ordinary programs do not pay.
    fn receive(&mut self, until: Option<Instant>) -> Result<Option<Arrival>, Failure>;

    /// Waits for a time, as the system waits.
    fn wait_until(&mut self, time: Instant) {
        if let Some(left) = time.checked_duration_since(Instant::now()) {
            std::thread::sleep(left);
        }
    }

    /// Says what only this kind of end knows.
    fn tell(&mut self, _: &mut Outcome) {}

    /// What LM has counted of itself so far.
    fn work(&self) -> Option<Work> {
        None
    }

    /// Ends the connection after the last message, which has to arrive.
    fn close(&mut self) -> Result<(), Failure> {
        self.flush()
    }
}

/// How long an end that shall end waits for more, and one that never sleeps for an answer.
pub(crate) const SILENCE: Duration = Duration::from_millis(250);

/// How long a receive that never sleeps goes on.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Patience {
    until: Option<Instant>,
    looks: u32,
}

impl Patience {
    pub(crate) fn until(until: Option<Instant>) -> Patience {
        Patience { until, looks: 0 }
    }

    /// Whether it is over. The clock is looked at once in so many times: it would be felt in each.
    #[inline]
    pub(crate) fn is_over(&mut self) -> bool {
        const EVERY: u32 = 64;
        self.looks += 1;
        self.looks.is_multiple_of(EVERY) && self.until.is_some_and(|until| Instant::now() >= until)
    }
}

/// Sleeps until a socket that blocks has something to read, or until a time, where one is given; `false`: there is nothing then.
fn has_come(socket: impl AsFd, until: Option<Instant>) -> Result<bool, Failure> {
    let Some(until) = until else { return Ok(true) };
    let left = Timespec::try_from(until.saturating_duration_since(Instant::now()))?;
    Ok(poll(&mut [PollFd::new(&socket, PollFlags::IN)], Some(&left))? > 0)
}

/// A message's number at its start, or as much of it as the message is long.
const NUMBER_LEN: usize = 8;

fn write_number(message: &mut [u8], number: u64) {
    let len = message.len().min(NUMBER_LEN);
    message[..len].copy_from_slice(&number.to_le_bytes()[..len]);
}

fn read_number(message: &[u8]) -> u64 {
    let len = message.len().min(NUMBER_LEN);
    let mut bytes = [0; NUMBER_LEN];
    bytes[..len].copy_from_slice(&message[..len]);
    u64::from_le_bytes(bytes)
}

/// What is left of `number` in a message of `len` bytes.
fn cut_number(number: u64, len: usize) -> u64 {
    read_number(&number.to_le_bytes()[..len.min(NUMBER_LEN)])
}

/// Runs one end until what it does is done; a far end that answers round trips, until the other has gone or the process is ended. `print`
/// has what was measured: a far end of a stream still waits for its end then, and a near one ends when it is asked to (SIGTERM).
///
/// # Errors
///
/// A one-line reason when the end cannot be made, or what comes is not what was sent.
pub fn run(args: &EndArgs, ready: impl FnOnce(), print: impl FnOnce(&Outcome)) -> Result<(), Failure> {
    let mut spec: Spec = serde_json::from_str(&args.spec)
        .map_err(|error| Failure::usage(format!("no end is that: {error}")))?;
    // Who has started it waits for it, and nobody else would end it.
    rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL))?;
    if spec.system.how == How::Bare {
        spec.size = bare::payload(&spec);
    }
    let near = args.side == Side::Near;
    if let Task::Beside { count, seconds } = spec.task {
        print(&under_load::run(args, &spec, (count, seconds), ready)?);
        return Ok(());
    }
    let mut end = open(args, &spec, ready)?;
    let end = end.as_mut();
    let measured = match spec.task {
        Task::Stream {
            warm_up,
            seconds,
            rate,
        } if near => drive::send(end, &spec, [warm_up, seconds], rate, &Interrupt::install()?),
        Task::Stream { warm_up, seconds, .. } => drive::receive(end, &spec, [warm_up, seconds]),
        Task::RoundTrips {
            count,
            seconds,
            rate: Some(rate),
            warm_up,
        } if near => {
            let count = count.min((seconds * rate) as u64);
            drive::ask_on_time(end, &spec, [warm_up, count], rate)
        }
        Task::RoundTrips { count, seconds, .. } if near => drive::ask(end, &spec, count, seconds),
        _ => drive::answer(end),
    };
    let mut outcome = measured?;
    end.tell(&mut outcome);
    print(&outcome);
    match spec.task {
        Task::Stream { .. } if !near => drive::drain(end),
        _ => Ok(()),
    }
}

/// Connects the near end; waits for a connection at the far one, after saying that it is ready.
fn open(args: &EndArgs, spec: &Spec, ready: impl FnOnce()) -> Result<Box<dyn End>, Failure> {
    let near = args.side == Side::Near;
    Ok(match spec.system.how {
        How::RealTime => Box::new(socket::RealTimeEnd::open(args, spec, ready)?),
        How::Lm => Box::new(lm::Lm::open(args, spec, ready)?),
        How::Bare => Box::new(bare::Bare::open(args, spec, ready)?),
        How::Tcp => Box::new(tcp::Tcp::open(near, spec, ready)?),
        How::UdpBlocking | How::UdpSpinning | How::UdpGso => Box::new(udp::Udp::open(near, spec, ready)?),
        _ => {
            return Err(Failure::usage(format!(
                "{} has no end of this program",
                spec.system.name
            )));
        }
    })
}

/// The place of a sender in the order of their first messages.
fn place<T: PartialEq>(known: &mut Vec<T>, one: T) -> usize {
    let place = known.iter().position(|other| *other == one);
    place.unwrap_or_else(|| {
        known.push(one);
        known.len() - 1
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn short_messages_carry_the_low_bytes_of_their_number() {
        for len in [1, 3, 8, 20] {
            let mut message = vec![0xff; len];
            write_number(&mut message, 0x0102_0304_0506_0708);
            assert_eq!(read_number(&message), cut_number(0x0102_0304_0506_0708, len));
        }
        assert_eq!(cut_number(0x1_ff, 1), 0xff);
    }
}
