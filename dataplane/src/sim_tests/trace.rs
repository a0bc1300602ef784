//! Traces: what a simulated run did, line by line, and three hashes of the lines.
//!
//! | hash | lines |
//! |---|---|
//! | `P` | each packet that an engine sends, with its time, before anything happens to it ([`packet`]) |
//! | `E` | each event that an application can see, with its time: messages, losses, the ends of sends, of requests for sessions |
//! | `D` | without times: for each sender and receiver its messages in their order with a digest of their bytes, and how each send ended |
//!
//! What moves code keeps all three. What changes when packets leave keeps `D` where nothing is lost. The hashes of many seeds of the soak
//! and of all simulated tests are kept in `dataplane/traces`; `cargo xtask soak --traces` compares, `--record` writes them anew. With
//! `LM_TRACE=FILE` the lines themselves are appended to a file, to compare those of two versions.

#![cfg(test)]

mod packet;

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fmt::{self, Write as _};
use std::io::Write as _;
use std::net::SocketAddrV4;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use xxhash_rust::xxh3::{xxh3_64, xxh3_64_with_seed};

use crate::completion::{Completion, Outcome, RecvError};
use crate::connect::ConnectError;
use crate::engine::Engine;
use crate::message::Message;
use crate::simnic::{SimNic, Wire};

/// Where the lines go.
const TEXT_VARIABLE: &str = "LM_TRACE";
/// Where the hashes of each test go, one line a test.
const TESTS_VARIABLE: &str = "LM_TRACES";
/// The recorded hashes of seeds: the seed and its [`Hashes`], one line a seed.
const SEEDS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/traces/seeds.txt");

/// The hashes of a run, or of several.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Hashes {
    pub(super) packets: u64,
    pub(super) events: u64,
    pub(super) messages: u64,
}

impl Hashes {
    fn parse(text: &str) -> Option<Hashes> {
        let mut words = text.split(' ').map(|word| u64::from_str_radix(word, 16).ok());
        Some(Hashes {
            packets: words.next()??,
            events: words.next()??,
            messages: words.next()??,
        })
    }

    /// Those of a run after these.
    fn then(self, next: Hashes) -> Hashes {
        let chain = |before: u64, next: u64| xxh3_64_with_seed(&next.to_be_bytes(), before);
        Hashes {
            packets: chain(self.packets, next.packets),
            events: chain(self.events, next.events),
            messages: chain(self.messages, next.messages),
        }
    }

    /// Which of them differ, in words.
    pub(super) fn differences(self, other: Hashes) -> String {
        let pairs = [
            ("packets", self.packets, other.packets),
            ("events", self.events, other.events),
            ("messages", self.messages, other.messages),
        ];
        let differing = pairs.iter().filter(|(_, a, b)| a != b).map(|(name, ..)| *name);
        differing.collect::<Vec<_>>().join(", ")
    }
}

impl fmt::Display for Hashes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{:016x} {:016x} {:016x}",
            self.packets, self.events, self.messages
        )
    }
}

/// The recorded hashes of seeds.
pub(super) fn recorded_seeds() -> BTreeMap<u64, Hashes> {
    let text = std::fs::read_to_string(SEEDS).expect("traces/seeds.txt");
    let seed = |line: &str| {
        let (seed, hashes) = line.split_once(' ')?;
        Some((seed.parse().ok()?, Hashes::parse(hashes)?))
    };
    let seeds = text
        .lines()
        .map(|line| seed(line).expect("a seed and three hashes"));
    seeds.collect()
}

/// Messages that are delivered in order among themselves: those of a sender to a host, small ones and those of sessions apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Stream {
    to: usize,
    from: SocketAddrV4,
    is_eager: bool,
}

/// The lines of a run as far as it is.
#[derive(Debug, Default)]
struct Lines {
    packets: u64,
    events: u64,
    streams: Vec<(Stream, u64)>,
    /// The sum of the hashes of all ends, so that their order is left out.
    ends: u64,
    /// The line that is being written.
    line: String,
    text: Option<String>,
}

impl Lines {
    /// Puts the line into a hash, and empties it.
    fn end(&mut self, before: u64, kind: char) -> u64 {
        let hash = xxh3_64_with_seed(self.line.as_bytes(), before);
        if let Some(text) = &mut self.text {
            let _ = writeln!(text, "{kind} {}", self.line);
        }
        self.line.clear();
        hash
    }

    fn packet(&mut self, now_ns: u64, from: usize, queue: Option<u32>, packet: &[u8]) {
        packet::write(&mut self.line, (now_ns, from, queue), packet);
        self.packets = self.end(self.packets, 'P');
    }

    fn event(&mut self, now_ns: u64, host: usize, what: fmt::Arguments<'_>) {
        let _ = write!(self.line, "{now_ns} {host} {what}");
        self.events = self.end(self.events, 'E');
    }

    fn message(&mut self, now_ns: u64, stream: Stream, message: &Message) {
        let Stream { to, from, is_eager } = stream;
        let (tag, len, number) = (message.tag, message.len, message.number);
        let (digest, missing) = (xxh3_64(message), ranges(&message.missing));
        self.event(
            now_ns,
            to,
            format_args!(
                "message {from} {is_eager} {number} {tag:x} {len} {digest:x} {missing:x} {}",
                message.latency_ns
            ),
        );
        let _ = write!(
            self.line,
            "{to} {from} {is_eager} {tag:x} {len} {digest:x} {missing:x}"
        );
        let found = self.streams.iter().position(|(other, _)| *other == stream);
        let at = found.unwrap_or(self.streams.len());
        if found.is_none() {
            self.streams.push((stream, 0));
        }
        self.streams[at].1 = self.end(self.streams[at].1, 'D');
    }

    fn completion(&mut self, now_ns: u64, host: usize, completion: &Completion) {
        let (token, tag, len) = (completion.token.0, completion.tag, completion.len);
        let (outcome, missing) = outcome(&completion.outcome);
        self.event(
            now_ns,
            host,
            format_args!(
                "sent {token} {tag:x} {len} {outcome} {missing:x} {}",
                completion.latency_ns
            ),
        );
        let _ = write!(
            self.line,
            "{host} sent {token} {tag:x} {len} {outcome} {missing:x}"
        );
        let end = self.end(0, 'D');
        self.ends = self.ends.wrapping_add(end);
    }

    fn failure(&mut self, now_ns: u64, host: usize, failure: &RecvError) {
        match failure {
            RecvError::Incomplete {
                number,
                tag,
                len,
                missing,
                ..
            } => {
                let missing = ranges(missing);
                let line = format_args!("lost {number} {tag:x} {len} {missing:x}");
                self.event(now_ns, host, line);
            }
            RecvError::Aborted { number, tag, len, .. } => {
                self.event(now_ns, host, format_args!("aborted {number} {tag:x} {len}"))
            }
            _ => unreachable!("no other is kept"),
        }
    }

    fn hashes(&self) -> Hashes {
        // Each stream has its name in its lines, so that the order in which they began may be left out.
        let streams = self.streams.iter().map(|(_, hash)| *hash);
        let streams = streams.fold(0u64, u64::wrapping_add);
        Hashes {
            packets: self.packets,
            events: self.events,
            messages: xxh3_64_with_seed(&streams.to_be_bytes(), self.ends),
        }
    }
}

fn ranges<T: Copy + Into<u64>>(ranges: &[std::ops::Range<T>]) -> u64 {
    ranges.iter().fold(0, |hash, range| {
        let ends = [range.start.into(), range.end.into()].map(u64::to_be_bytes);
        xxh3_64_with_seed(ends.as_flattened(), hash)
    })
}

/// An outcome's name in traces, which stays whatever becomes of the type's, and what it says of fragments.
fn outcome(outcome: &Outcome) -> (&'static str, u64) {
    match outcome {
        Outcome::Delivered => ("delivered", 0),
        Outcome::Sent => ("left", 0),
        Outcome::Incomplete { missing } => ("incomplete", ranges(missing)),
        Outcome::SessionEnded => ("ended", 0),
        Outcome::TimedOut => ("late", 0),
        Outcome::Refused => ("refused", 0),
        Outcome::Declined { status } => ("declined", u64::from(*status)),
        Outcome::Aborted => ("aborted", 0),
    }
}

/// What the applications of a host have been shown so far.
#[derive(Clone, Copy, Debug, Default)]
struct Shown {
    messages: u64,
    completions: u64,
    failures: u64,
}

/// Writes the trace of a bed.
pub(super) struct Trace {
    lines: Arc<Mutex<Lines>>,
    shown: Vec<Shown>,
}

fn lock(lines: &Mutex<Lines>) -> MutexGuard<'_, Lines> {
    // A panic elsewhere is that test's failure.
    lines.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Trace {
    /// Of so many hosts on this wire, from now on.
    pub(super) fn new(wire: &Wire, hosts: usize) -> Trace {
        let lines = Lines {
            // Beside tests that count allocations.
            line: String::with_capacity(512),
            streams: Vec::with_capacity(4 * hosts),
            text: std::env::var_os(TEXT_VARIABLE).map(|_| String::new()),
            ..Lines::default()
        };
        let lines = Arc::new(Mutex::new(lines));
        let watched = Arc::clone(&lines);
        wire.set_watch(move |now_ns, from, queue, packet| {
            lock(&watched).packet(now_ns, from, queue, packet);
        });
        Trace {
            lines,
            shown: vec![Shown::default(); hosts],
        }
    }

    /// Looks for what is new for the applications of a host. What came and was taken since the last look is missed.
    pub(super) fn look(&mut self, host: usize, engine: &mut Engine<SimNic>, now_ns: u64) {
        let counters = &engine.counters;
        let now = Shown {
            messages: counters.messages_received,
            completions: counters.messages_sent + counters.messages_failed,
            failures: counters.messages_incomplete,
        };
        let before = std::mem::replace(&mut self.shown[host], now);
        let mut lines = lock(&self.lines);
        // The last ones of each kind; of what the queue was too full for, none.
        let old = |len: usize, count: u64| len - len.min(count as usize);
        let messages = engine.told.messages();
        let known = old(messages.clone().count(), now.messages - before.messages);
        for message in messages.skip(known) {
            let stream = Stream {
                to: host,
                from: engine.peers.at(message.peer.index).data,
                is_eager: message.is_eager(),
            };
            lines.message(now_ns, stream, message);
        }
        let failures = engine.told.failures();
        let known = old(failures.clone().count(), now.failures - before.failures);
        for failure in failures.skip(known) {
            lines.failure(now_ns, host, failure);
        }
        let completions = engine.told.completions();
        let known = old(completions.len(), now.completions - before.completions);
        for completion in completions.range(known..) {
            lines.completion(now_ns, host, completion);
        }
    }

    /// A host's request for a session has come to its end.
    pub(super) fn connected(&self, host: usize, outcome: &Result<(), ConnectError>, now_ns: u64) {
        let (name, about) = match outcome {
            Ok(()) => ("granted", 0),
            Err(ConnectError::Rejected { reason, .. }) => ("rejected", *reason as u8),
            Err(ConnectError::Unreachable { .. }) => ("unanswered", 0),
            Err(_) => ("failed", 0),
        };
        lock(&self.lines).event(now_ns, host, format_args!("session {name} {about}"));
    }

    pub(super) fn hashes(&self) -> Hashes {
        lock(&self.lines).hashes()
    }

    /// The run is over: it counts for its test.
    pub(super) fn finish(&self) {
        let hashes = self.hashes();
        OF_TEST.with_borrow_mut(|test| test.add(hashes));
        if let (Some(text), Some(path)) = (&lock(&self.lines).text, std::env::var_os(TEXT_VARIABLE)) {
            append(path, text);
        }
    }
}

/// Appends in one piece, because tests run side by side.
fn append(path: std::ffi::OsString, text: &str) {
    let file = std::fs::OpenOptions::new().create(true).append(true).open(path);
    let written = file.and_then(|mut file| file.write_all(text.as_bytes()));
    written.expect("the file for traces can be written");
}

thread_local! {
    static OF_TEST: RefCell<OfTest> = const {
        let hashes = Hashes { packets: 0, events: 0, messages: 0 };
        RefCell::new(OfTest { name: String::new(), hashes })
    };
}

/// All runs of a test, which has a thread of its own.
struct OfTest {
    name: String,
    hashes: Hashes,
}

impl OfTest {
    fn add(&mut self, hashes: Hashes) {
        if self.name.is_empty() {
            std::thread::current()
                .name()
                .unwrap_or("?")
                .clone_into(&mut self.name);
        }
        self.hashes = self.hashes.then(hashes);
    }
}

impl Drop for OfTest {
    fn drop(&mut self) {
        if let Some(path) = std::env::var_os(TESTS_VARIABLE).filter(|_| !self.name.is_empty()) {
            append(path, &format!("{} {}\n", self.name, self.hashes));
        }
    }
}

/// What is the same and what differs.
mod tests {
    use super::*;
    use crate::sim_tests::bed::{Bed, BedConfig, noise};
    use lm_protocol::geometry::Wire as WireMode;

    const LEN: usize = 200_000;

    /// Of one large message and one small.
    fn hashes(config: &BedConfig, large: &[u8]) -> Hashes {
        let mut bed = Bed::new(config);
        let peer = bed.session(0, WireMode::Lm, LEN as u64);
        bed.exchange(0, peer, large);
        bed.exchange(0, peer, b"small");
        bed.trace.hashes()
    }

    #[test]
    fn each_hash_shows_what_it_is_for() {
        let (config, payload) = (BedConfig::default(), noise(1, LEN));
        let usual = hashes(&config, &payload);
        assert_eq!(usual, hashes(&config, &payload));
        let mut other_byte = payload.clone();
        other_byte[LEN / 2] ^= 1;
        let other = hashes(&config, &other_byte);
        assert_eq!(usual.differences(other), "packets, events, messages");
        // Fewer packets at once: the same messages, at other times.
        let slower = BedConfig {
            tx_in_flight: 8,
            ..config.clone()
        };
        let other = hashes(&slower, &payload);
        assert_eq!(usual.differences(other), "packets, events");
        // Other keys, in packets alone.
        let elsewhere = BedConfig { seed: 1, ..config };
        let other = hashes(&elsewhere, &payload);
        assert_eq!(usual.differences(other), "packets");
    }

    #[test]
    fn hashes_are_read_as_they_are_written() {
        let hashes = Hashes {
            packets: 1,
            events: u64::MAX,
            messages: 0x1234,
        };
        assert_eq!(Hashes::parse(&hashes.to_string()), Some(hashes));
        assert_eq!(Hashes::parse("1 2"), None);
    }
}
