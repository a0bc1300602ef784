//! The impairment box: forwards packets between two interfaces, badly if asked to.
//!
//! ```text
//!   host ── lm0 ═══ left ┌───────────────┐ right ═══ lm0 ── host
//!                        │ rightward ──▶ │
//!                        │ ◀── leftward  │
//!                        └───────────────┘
//! ```
//!
//! The forwarding itself, loss, duplication, corruption and reordering are a program in the kernel (`Forwarder`): it
//! runs on whichever core the packet comes on, copies nothing and keeps the packet's queue, so that a box costs little
//! beside what it is put between. A delay or a rate needs memory and a clock: then each packet goes through this
//! process, which runs before ordinary ones, and leaves through its queue ([`Inject`]).
//!
//! Everything random comes from one seed and the packet's number in its direction.

#![deny(unsafe_code)]

#[expect(unsafe_code, reason = "the kernel's structs")]
mod forwarder;
mod line;
mod quantity;

use std::error::Error;
use std::io;
use std::net::UdpSocket;
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::str::FromStr as _;
use std::time::{Duration, Instant};

use clap::Args;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::netdevice::name_to_index;
use serde::Serialize;

use forwarder::{Diverted, Forwarder, ForwarderCounters, HELD_PACKET_LEN_MAX, ImpairError};
pub use forwarder::{Fate, Impairments, is_caused_by, split_mix};
use line::Line;
use lm_measure::rate::BitRate;
use quantity::{both, share, span};

/// How long the process sleeps at most while nothing is under way.
const LOOK: Duration = Duration::from_millis(20);
/// How long it sleeps while a queue has no room for a packet whose time has come.
const BACK_PRESSURE: Duration = Duration::from_micros(20);

/// Most packets that may wait in each direction.
pub const LIMIT_MAX: u32 = 4096;

/// One queue of an interface, by which packets leave that were made elsewhere.
pub trait Inject: Sized {
    /// A packet in its memory, not yet sent.
    type Stored: Copy;
    /// The queue `queue` of an interface, with room for [`LIMIT_MAX`] packets.
    ///
    /// # Errors
    ///
    /// What the kernel says.
    fn open(ifindex: u32, queue: u32) -> io::Result<Self>;
    /// Copies a packet in; `None` when there is no room or the packet is too long.
    fn store(&mut self, packet: &[u8]) -> Option<Self::Stored>;
    /// Hands a stored packet to the kernel; `false` when it has enough for now.
    ///
    /// # Errors
    ///
    /// What the kernel says.
    fn send(&mut self, packet: Self::Stored) -> io::Result<bool>;
    /// Wakes the kernel where it is needed and takes finished packets back.
    ///
    /// # Errors
    ///
    /// What the kernel says.
    fn flush(&mut self) -> io::Result<()>;
}

/// Arguments of `impair`. Every impairment takes one value for both directions or `X,Y`: left to right, right to left.
#[derive(Debug, Clone, Args)]
pub struct ImpairArgs {
    /// One interface
    #[arg(long, value_name = "IF")]
    pub left: String,
    /// The other interface
    #[arg(long, value_name = "IF")]
    pub right: String,
    /// Decides everything that is random
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// Packets to lose: 1%, 200ppm
    #[arg(long, value_name = "SHARE[,SHARE]", default_value = "0", value_parser = |text: &str| both(text, share))]
    pub loss: [u32; 2],
    /// Packets to lose in succession; --loss stays the share of all
    #[arg(long, value_name = "PACKETS[,…]", default_value = "1", value_parser = |text: &str| both(text, u32::from_str))]
    pub loss_burst: [u32; 2],
    /// Packets to send twice
    #[arg(long, value_name = "SHARE[,…]", default_value = "0", value_parser = |text: &str| both(text, share))]
    pub duplicate: [u32; 2],
    /// Packets to change one byte of
    #[arg(long, value_name = "SHARE[,…]", default_value = "0", value_parser = |text: &str| both(text, share))]
    pub corrupt: [u32; 2],
    /// Packets to hold back until others have overtaken them
    #[arg(long, value_name = "SHARE[,…]", default_value = "0", value_parser = |text: &str| both(text, share))]
    pub reorder: [u32; 2],
    /// How many packets of the same queue overtake
    #[arg(long, value_name = "PACKETS[,…]", default_value = "3", value_parser = |text: &str| both(text, u32::from_str))]
    pub reorder_by: [u32; 2],
    /// Time that each packet takes: 50us, 2ms
    #[arg(long, value_name = "TIME[,…]", default_value = "0", value_parser = |text: &str| both(text, span))]
    pub delay: [Duration; 2],
    /// Most bits per second, Ethernet headers included: 500Mbit, 1Gbit
    #[arg(long, value_name = "RATE[,…]", value_parser = |text: &str| both(text, BitRate::from_str))]
    pub rate: Option<[BitRate; 2]>,
    /// Bytes that may pass at once in spite of --rate
    #[arg(long, value_name = "BYTES", default_value_t = 3000)]
    pub rate_burst: u64,
    /// Packets that may wait because of --delay or --rate, in each direction; further ones are dropped
    #[arg(long, value_name = "PACKETS", default_value_t = 1000)]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=i64::from(LIMIT_MAX)))]
    pub limit: u32,
    /// End after so many seconds; otherwise with Ctrl-C or SIGTERM
    #[arg(long, value_name = "SECONDS")]
    pub duration: Option<f64>,
}

/// What `impair` prints at its end.
#[derive(Debug, Serialize)]
pub struct ImpairReport {
    /// Name of the program.
    pub program: &'static str,
    /// As given.
    pub seed: u64,
    /// Left to right.
    pub rightward: DirectionReport,
    /// Right to left.
    pub leftward: DirectionReport,
}

/// Packets of one direction. `received` + `duplicated` = `sent` + `lost` + `queue_full` + `refused` + `held`.
#[derive(Debug, Serialize)]
pub struct DirectionReport {
    /// What the kernel's part has done.
    #[serde(flatten)]
    forwarder: ForwarderCounters,
    /// Went out, copies included.
    pub sent: u64,
    /// Still in the box.
    pub held: u64,
    /// Dropped because more waited for --delay and --rate than --limit allows.
    pub queue_full: u64,
    /// Dropped by the kernel at the box's interfaces: before the box saw them, or because the other side's ring was
    /// full. Not in the sum above.
    pub overrun: u64,
}

/// The seed of one direction, from that of the box: 0 is rightward, 1 is leftward.
#[must_use]
pub fn direction_seed(seed: u64, direction: u64) -> u64 {
    split_mix(seed, direction + 1)
}

/// Runs `impair` until `is_ended` or the end of `--duration`.
///
/// # Errors
///
/// A one-line reason when the interfaces are missing, the options contradict each other, or the kernel lacks something.
pub fn impair<Queue: Inject>(
    args: &ImpairArgs,
    ready: impl FnOnce(),
    is_ended: impl Fn() -> bool,
) -> Result<ImpairReport, Box<dyn Error>> {
    let end = args
        .duration
        .map(|seconds| Instant::now() + Duration::from_secs_f64(seconds.clamp(0.0, 1e6)));
    let mut directions: [Direction<Queue>; 2] = [Direction::open(args, 0)?, Direction::open(args, 1)?];
    let is_over = || is_ended() || end.is_some_and(|end| Instant::now() >= end);
    ready();
    if directions.iter().any(|direction| direction.timed.is_some()) {
        take_precedence();
    }
    while !is_over() {
        let mut sleep = end.map_or(LOOK, |end| {
            end.saturating_duration_since(Instant::now()).min(LOOK)
        });
        for timed in directions
            .iter_mut()
            .filter_map(|direction| direction.timed.as_mut())
        {
            sleep = sleep.min(timed.step()?);
        }
        let mut fds: Vec<PollFd<'_>> = directions
            .iter()
            .filter_map(|direction| direction.timed.as_ref())
            .map(|timed| PollFd::from_borrowed_fd(timed.diverted.as_fd(), PollFlags::IN))
            .collect();
        let timeout = Timespec::try_from(sleep)?;
        // A signal ends the sleep early, which is all that can go wrong.
        let _ = poll(&mut fds, Some(&timeout));
    }
    let [rightward, leftward] = directions;
    Ok(ImpairReport {
        program: "impair",
        seed: args.seed,
        rightward: rightward.report()?,
        leftward: leftward.report()?,
    })
}

/// One direction: the program in the kernel, and the line in this process where there is one.
struct Direction<Queue: Inject> {
    forwarder: Forwarder,
    timed: Option<Timed<Queue>>,
    drops: [PathBuf; 2],
    dropped_before: u64,
}

impl<Queue: Inject> Direction<Queue> {
    fn open(args: &ImpairArgs, direction: usize) -> Result<Direction<Queue>, Box<dyn Error>> {
        let (from, to) = match direction {
            0 => (&args.left, &args.right),
            _ => (&args.right, &args.left),
        };
        let delay = args.delay[direction];
        let rate = args.rate.map(|rate| rate[direction]);
        let diverts = !delay.is_zero() || rate.is_some();
        let reorder = args.reorder[direction];
        if diverts || reorder > 0 {
            require_short_packets(from)?;
        }
        let to_ifindex = interface_index(to)?;
        interface_index(from)?;
        let impairments = Impairments {
            seed: direction_seed(args.seed, direction as u64),
            to_ifindex,
            loss: args.loss[direction],
            loss_burst: args.loss_burst[direction],
            duplicate: args.duplicate[direction],
            corrupt: args.corrupt[direction],
            reorder,
            reorder_by: args.reorder_by[direction],
            divert: diverts.into(),
        };
        let (forwarder, diverted) = Forwarder::attach(from, &impairments)?;
        let line = Line::new(args.limit as usize, delay, rate, args.rate_burst);
        let timed = diverted
            .map(|diverted| Timed::open(diverted, line, to, to_ifindex))
            .transpose()
            .map_err(|error| format!("cannot send through {to}: {error}; see dmesg"))?;
        let statistic =
            |interface: &str, name: &str| format!("/sys/class/net/{interface}/statistics/{name}").into();
        let drops = [statistic(from, "rx_dropped"), statistic(to, "tx_dropped")];
        Ok(Direction {
            forwarder,
            timed,
            dropped_before: dropped(&drops),
            drops,
        })
    }

    fn report(&self) -> Result<DirectionReport, ImpairError> {
        let counters = self.forwarder.counters()?;
        let held_by_kernel = counters.reordered - counters.released;
        let (queue_full, held) = match &self.timed {
            Some(timed) => {
                let arrived = timed.sent + timed.line.full + timed.line.len() as u64;
                let held =
                    held_by_kernel + timed.line.len() as u64 + counters.diverted.saturating_sub(arrived);
                (counters.ring_full + timed.line.full, held)
            }
            None => (0, held_by_kernel),
        };
        let gone = counters.lost + queue_full + counters.refused + held;
        Ok(DirectionReport {
            sent: (counters.received + counters.duplicated).saturating_sub(gone),
            held,
            queue_full,
            forwarder: counters,
            overrun: dropped(&self.drops).saturating_sub(self.dropped_before),
        })
    }
}

/// The index of an interface, by name.
fn interface_index(name: &str) -> Result<u32, Box<dyn Error>> {
    let index = name_to_index(UdpSocket::bind("0.0.0.0:0")?, name);
    index.map_err(|_| format!("no interface is called {name}; see ip link").into())
}

/// Packets of longer MTUs do not fit where they are held.
fn require_short_packets(interface: &str) -> Result<(), String> {
    let path = format!("/sys/class/net/{interface}/mtu");
    let mtu = std::fs::read_to_string(&path).ok();
    let mtu: u32 = mtu.and_then(|text| text.trim().parse().ok()).unwrap_or(0);
    if mtu + 14 > HELD_PACKET_LEN_MAX {
        return Err(format!(
            "{interface} has MTU {mtu}, and packets can be held up to {HELD_PACKET_LEN_MAX} bytes; use a smaller MTU"
        ));
    }
    Ok(())
}

/// What the kernel has dropped, by its own statistics.
fn dropped(statistics: &[PathBuf; 2]) -> u64 {
    let count = |path: &PathBuf| std::fs::read_to_string(path).ok()?.trim().parse::<u64>().ok();
    statistics.iter().filter_map(count).sum()
}

/// The part of a direction that this process does.
struct Timed<Queue: Inject> {
    diverted: Diverted,
    line: Line<(usize, Queue::Stored)>,
    injectors: Vec<Queue>,
    sent: u64,
}

impl<Queue: Inject> Timed<Queue> {
    fn open(
        diverted: Diverted,
        line: Line<(usize, Queue::Stored)>,
        to: &str,
        to_ifindex: u32,
    ) -> io::Result<Timed<Queue>> {
        let queues = std::fs::read_dir(format!("/sys/class/net/{to}/queues"))?
            .filter(|entry| {
                let name = entry.as_ref().map(std::fs::DirEntry::file_name);
                name.is_ok_and(|name| name.to_string_lossy().starts_with("tx-"))
            })
            .count() as u32;
        let injectors = (0..queues.max(1)).map(|queue| Queue::open(to_ifindex, queue));
        Ok(Timed {
            diverted,
            line,
            injectors: injectors.collect::<io::Result<_>>()?,
            sent: 0,
        })
    }

    /// Takes what has come and sends what is due; gives how long to sleep.
    fn step(&mut self) -> io::Result<Duration> {
        let Timed {
            diverted,
            line,
            injectors,
            sent,
        } = self;
        let queues = injectors.len();
        while diverted.take(|arrival_ns, queue, bytes| {
            let queue = queue as usize % queues;
            line.enter(arrival_ns, bytes.len(), || {
                Some((queue, injectors[queue].store(bytes)?))
            });
        }) {}
        let now_ns = monotonic_ns();
        let mut blocked = false;
        while let Some(&(queue, packet)) = line.due(now_ns) {
            if !injectors[queue].send(packet)? {
                blocked = true;
                break;
            }
            line.leave();
            *sent += 1;
        }
        for injector in injectors.iter_mut() {
            injector.flush()?;
        }
        if blocked {
            return Ok(BACK_PRESSURE);
        }
        let left = |due_ns: u64| Duration::from_nanos(due_ns.saturating_sub(monotonic_ns()));
        Ok(line.next_ns().map_or(LOOK, left))
    }
}

/// Lets this thread run before ordinary ones, which may spin on every core there is. Without the privilege nothing
/// changes: delays are then kept less well.
#[expect(unsafe_code, reason = "a system call that rustix does not have")]
fn take_precedence() {
    let parameters = libc::sched_param { sched_priority: 1 };
    // SAFETY: a live sched_param; 0 means the calling thread.
    let _ = unsafe { libc::sched_setscheduler(0, libc::SCHED_FIFO, &parameters) };
}

/// CLOCK_MONOTONIC, by which the kernel stamps diverted packets.
fn monotonic_ns() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}
