//! A stream between two processes that opened no endpoint: a third one owns both ends, lends them the memory, and sleeps in one epoll
//! instance of its own. The writer fills loaned regions where they lie, the reader reads messages where they landed.
//!
//! ```text
//! cargo run -p lm-examples --bin streams
//! ```

use std::collections::{BTreeMap, VecDeque};
use std::error::Error;
use std::fs::OpenOptions;
use std::io::{self, BufRead, ErrorKind, Read, Write};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use lm_dataplane::memory::Mapping;
use lm_dataplane::{ConnectOptions, Endpoint, EndpointConfig, MemoryConfig, Message, SendError, SendRegion};
use lm_examples::{Dice, World, run, small};
use lm_sim::{Semantics, SimNic};
use rustix::event::epoll;

/// Regions that the writer has at once.
const LENT_MAX: usize = 4;
const MESSAGES: u64 = 12;
/// The wire's time runs so much faster than the processes'.
const SPEED: u32 = 10;

/// The stream's byte at a position.
fn byte(seed: u64, position: u64) -> u8 {
    (Dice(seed ^ (position / 8) << 20).roll() >> (position % 8 * 8)) as u8
}

/// What the owner tells a process: one line each.
enum Order {
    /// Map the memory behind a path, and begin the stream of a seed.
    Map { path: String, len: u64, seed: u64 },
    /// Write, or read and compare, the stream from `position` on, at these places.
    Bytes { position: u64, places: Vec<(u64, u64)> },
}

impl Order {
    fn parse(line: &str) -> Option<Order> {
        let mut words = line.split(' ');
        let number = |word: Option<&str>| word?.parse::<u64>().ok();
        match words.next()? {
            "map" => Some(Order::Map {
                path: words.next()?.to_owned(),
                len: number(words.next())?,
                seed: number(words.next())?,
            }),
            "bytes" => {
                let position = number(words.next())?;
                let mut places = Vec::new();
                while let Some(word) = words.next() {
                    places.push((number(Some(word))?, number(words.next())?));
                }
                Some(Order::Bytes { position, places })
            }
            _ => None,
        }
    }
}

/// The life of a process that has no endpoint. It answers each order for bytes with its position.
fn process(writes: bool) -> Result<(), Box<dyn Error>> {
    let mut memory: Option<(Mapping, u64)> = None;
    for line in io::stdin().lock().lines() {
        let line = line?;
        match Order::parse(&line).ok_or_else(|| format!("no order: {line}"))? {
            Order::Map { path, len, seed } => {
                let file = OpenOptions::new().read(true).write(true).open(path)?;
                memory = Some((Mapping::of_file(file.as_fd(), len)?, seed));
            }
            Order::Bytes { position, places } => {
                let (mapping, seed) = memory.as_ref().ok_or("bytes before memory")?;
                let mut at = position;
                for (start, len) in places {
                    // SAFETY: the owner lent us these bytes, and leaves them alone until we answer.
                    let bytes = unsafe { mapping.slice_mut(start, len) };
                    for place in bytes {
                        let expected = byte(*seed, at);
                        if writes {
                            *place = expected;
                        } else if *place != expected {
                            return Err(format!("seed {seed}: another byte at {at}").into());
                        }
                        at += 1;
                    }
                }
                println!("{position}");
            }
        }
    }
    Ok(())
}

/// A process, as its owner has it.
struct Lent {
    child: Child,
    orders: ChildStdin,
    answers: ChildStdout,
    partial: Vec<u8>,
}

impl Lent {
    fn spawn(role: &str) -> io::Result<Lent> {
        let mut child = Command::new(std::env::current_exe()?)
            .arg(role)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let (orders, answers) = (child.stdin.take(), child.stdout.take());
        let answers = answers.expect("piped");
        rustix::io::ioctl_fionbio(&answers, true)?;
        Ok(Lent {
            child,
            orders: orders.expect("piped"),
            answers,
            partial: Vec::new(),
        })
    }

    fn map(&mut self, end: &Endpoint<SimNic>, seed: u64) -> io::Result<()> {
        let file = end.status().memory_file().expect("memory that can be lent");
        let len = rustix::fs::fstat(file)?.st_size;
        let (owner, file) = (std::process::id(), file.as_raw_fd());
        writeln!(self.orders, "map /proc/{owner}/fd/{file} {len} {seed}")
    }

    fn bytes(&mut self, position: u64, places: impl Iterator<Item = (u64, u64)>) -> io::Result<()> {
        let places: String = places.map(|(start, len)| format!(" {start} {len}")).collect();
        writeln!(self.orders, "bytes {position}{places}")
    }

    /// Positions of what it has done, as far as it has said so.
    fn done(&mut self) -> io::Result<Vec<u64>> {
        let mut space = [0; 512];
        loop {
            match self.answers.read(&mut space) {
                Ok(0) => return Err(io::Error::other("a process ended; it says why above")),
                Ok(len) => self.partial.extend_from_slice(&space[..len]),
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) => return Err(error),
            }
        }
        let end = self
            .partial
            .iter()
            .rposition(|byte| *byte == b'\n')
            .map_or(0, |at| at + 1);
        let lines = String::from_utf8_lossy(&self.partial[..end]).into_owned();
        self.partial.drain(..end);
        Ok(lines.lines().filter_map(|line| line.parse().ok()).collect())
    }

    fn end(self) -> io::Result<()> {
        let Lent {
            mut child, orders, ..
        } = self;
        drop(orders);
        child.wait().map(drop)
    }
}

/// Sleeps until a process or an endpoint has something, or an endpoint is due.
fn sleep(waits: &OwnedFd, ends: &mut [Endpoint<SimNic>; 2]) -> io::Result<()> {
    let due = ends
        .iter_mut()
        .map(Endpoint::until_poll)
        .min()
        .unwrap_or(Duration::ZERO);
    // Their descriptors are asked for before each wait.
    for end in ends.iter() {
        let _ = end.as_fd();
    }
    let timeout = rustix::event::Timespec {
        tv_sec: 0,
        tv_nsec: (due / SPEED).as_nanos() as i64,
    };
    let mut events = Vec::with_capacity(4);
    match epoll::wait(waits, rustix::buffer::spare_capacity(&mut events), Some(&timeout)) {
        Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

fn one(
    semantics: Semantics,
    seed: u64,
    writer: &mut Lent,
    reader: &mut Lent,
) -> Result<String, Box<dyn Error>> {
    let config = EndpointConfig {
        memory: MemoryConfig {
            lend: true,
            ..small().memory
        },
        ..small()
    };
    let mut world = World::new(semantics, seed, &config);
    let peer = world.connect(0, &ConnectOptions::default());
    let start = (world.now(), Instant::now());
    let World { wire, ends, .. } = &mut world;
    writer.map(&ends[0], seed)?;
    reader.map(&ends[1], seed)?;
    let waits = epoll::create(epoll::CreateFlags::CLOEXEC)?;
    let fds = [
        writer.answers.as_fd(),
        reader.answers.as_fd(),
        ends[0].as_fd(),
        ends[1].as_fd(),
    ];
    for fd in fds {
        epoll::add(&waits, fd, epoll::EventData::new_u64(0), epoll::EventFlags::IN)?;
    }

    let mut dice = Dice(seed);
    let (mut begun, mut written, mut read, mut sleeps) = (0, 0, 0, 0);
    let (mut arrived, mut messages) = (0, 0);
    let mut being_written = VecDeque::<(u64, SendRegion)>::new();
    let mut full = VecDeque::<(u64, SendRegion)>::new();
    let mut being_read = VecDeque::<(u64, Message)>::new();
    let mut early = BTreeMap::<u64, Message>::new();
    while messages < MESSAGES || read < written {
        wire.advance((start.0 + start.1.elapsed() * SPEED).as_nanos());
        let work: usize = ends.iter_mut().map(Endpoint::poll).sum();
        if begun < MESSAGES
            && being_written.len() < LENT_MAX
            && let Ok(region) = ends[0].loan(peer, 1 + dice.clone().roll() % 60_000)
        {
            dice.roll();
            writer.bytes(
                written,
                region
                    .umem_ranges()
                    .map(|range| (range.start, range.end - range.start)),
            )?;
            begun += 1;
            let len = region.len();
            being_written.push_back((written, region));
            written += len;
        }
        for position in writer.done()? {
            let (at, region) = being_written.pop_front().ok_or("nothing was lent")?;
            assert_eq!(at, position);
            full.push_back((position, region));
        }
        while let Some((position, region)) = full.pop_front() {
            match ends[0].try_send(region, position) {
                Ok(_) => {}
                Err(error) if error.reason == SendError::WouldBlock => {
                    full.push_front((position, error.region));
                    break;
                }
                Err(error) => return Err(error.reason.into()),
            }
        }
        while let Some(message) = ends[1].try_recv()? {
            early.insert(message.tag(), message);
        }
        // A message of one fragment may overtake longer ones.
        while let Some(message) = early.remove(&arrived) {
            let place = (message.umem_offset(), message.len() as u64);
            reader.bytes(arrived, std::iter::once(place))?;
            messages += 1;
            arrived += message.len() as u64;
            being_read.push_back((message.tag(), message));
        }
        for position in reader.done()? {
            let (at, message) = being_read.pop_front().ok_or("nothing was lent")?;
            assert_eq!(at, position);
            read += message.len() as u64;
        }
        if work == 0 && (messages < MESSAGES || read < written) {
            sleep(&waits, ends)?;
            sleeps += 1;
        }
    }
    Ok(format!("{read} bytes in {messages} messages, {sleeps} sleeps"))
}

fn main() -> Result<(), Box<dyn Error>> {
    match std::env::args().nth(1).as_deref() {
        Some("writer") => return process(true),
        Some("reader") => return process(false),
        _ => {}
    }
    let (mut writer, mut reader) = (Lent::spawn("writer")?, Lent::spawn("reader")?);
    let mut result = Ok(());
    run(
        |semantics, seed| match one(semantics, seed, &mut writer, &mut reader) {
            Ok(line) => line,
            Err(error) => {
                let line = format!("{error}");
                result = Err(error);
                line
            }
        },
    );
    writer.end()?;
    reader.end()?;
    result
}
